"""Standardized weights, computed once for inference instead of in every forward pass."""

from copy import deepcopy
from itertools import chain

import torch
from timm.layers import Conv2dSame, ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from torch import Tensor, nn
from torch.nn import functional as F

# timm's convolutions with weight standardization: of NFNets, BiT and hybrid ViTs.
STANDARDIZED = (ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame)


@torch.no_grad()
def freeze_weights(network: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Replace convolutions that standardize their weights by plain ones with those weights.

    NFNet-F6 has 345 of them. They are 2,070 of the 4,027 ATen operations of its forward pass, and
    on a GPU they read and write 5.9 GB in each batch.

    Args:
        network: is not changed, so its state_dict and their hash are the same afterwards.
        dtype: in which the convolutions compute: autocast's, or float32 without autocast, where the
            weights keep their own. Weights are standardized in float32 and rounded to it once.

    Returns a copy that shares all other tensors with `network`, or `network` itself if it
    standardizes no weights. Gradients of the copy do not reach the replaced weights.
    """
    if not any(_is_standardized(module) for module in network.modules()):
        return network
    # deepcopy takes what its memo holds as copied already.
    tensors = chain(network.parameters(), network.buffers())
    frozen = deepcopy(network, {id(tensor): tensor for tensor in tensors})
    for module in list(frozen.modules()):
        for name, child in list(module.named_children()):
            if _is_standardized(child):
                setattr(module, name, _make_plain(child, dtype))
    return frozen


def _is_standardized(module: nn.Module) -> bool:
    """Return whether this is timm's layer: no subclass, no parametrization, no hooks."""
    hooks = module._forward_pre_hooks or module._forward_hooks
    return type(module) in STANDARDIZED and not hooks


def _make_plain(conv: nn.Conv2d, dtype: torch.dtype) -> nn.Conv2d:
    """Build the convolution that gives the outputs of a standardizing one."""
    if dtype == torch.float32:
        dtype = conv.weight.dtype
    # Padding that depends on the input's size, as in TensorFlow.
    layer = Conv2dSame if getattr(conv, "same_pad", False) else nn.Conv2d
    plain = layer(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,
        stride=conv.stride,
        padding=conv.padding,
        dilation=conv.dilation,
        groups=conv.groups,
        bias=conv.bias is not None,
        # Without values, because all are replaced.
        device="meta",
    )
    plain.weight = nn.Parameter(_standardize(conv).to(dtype), requires_grad=False)
    if conv.bias is not None:
        plain.bias = nn.Parameter(conv.bias.to(dtype), requires_grad=False)
    return plain.train(conv.training)


def _standardize(conv: nn.Conv2d) -> Tensor:
    """Compute the weight that timm's forward pass convolves with, in float32."""
    weight = conv.weight.float()
    # Only the scaled layers of NFNets have a gain.
    gain = (conv.gain.float() * conv.scale).view(-1) if hasattr(conv, "gain") else None
    # The same operation as timm's, so that the numbers are equal to the bit.
    return F.batch_norm(
        weight.reshape(1, conv.out_channels, -1),
        None,
        None,
        weight=gain,
        training=True,
        momentum=0.0,
        eps=conv.eps,
    ).reshape_as(weight)

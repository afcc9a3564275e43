"""A residual sum and the layer norm after it in one pass each way.

The sum, its norm, and in the backward pass the gradients of both, of the branch, of the norm's
parameters and of the bias of the branch's last layer are each read or written once. A compiled
block reads the stream twice more (computed: 1,510 MB of a block of LV-ViT-S and 256 images, here
about 1,000). The norm of a block belongs to the sum of the block before, so blocks pass a sum on
that is not added yet. The plain twin is `Block.forward`.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.models.lvvit import Block, LVViT
from densefeed.system.devices import has_triton

# N images   T tokens   D width

MOST_WIDTH = 1024


class Pending(NamedTuple):
    """The residual stream, and what is still to be added to it."""

    stream: Tensor  # [N, T, D]
    branch: Tensor  # [N, T, D]
    scale: Tensor  # float32 [N], of the branch: its divisor and stochastic depth
    bias: Tensor  # [D], of the branch's last layer, which gets its gradient from the sum


class FusedBlock(Block):
    """A block that takes and returns Pending, where the kernels can run."""

    # Whether it returns the sum itself.
    last = False

    def forward(self, x: Tensor | Pending) -> Tensor | Pending:
        if isinstance(x, Tensor):
            # A block that is alone, or in evaluation.
            if not can_run(self, x):
                return super().forward(x)
            x_NTD, y_NTD = x, self.norm1(x)
        else:
            x_NTD, y_NTD = add_norm(x, self.norm1)
        y_NTD, layer = mix_tokens(self, y_NTD)
        x_NTD, y_NTD = add_norm(self._wait(x_NTD, y_NTD, self.drop_path1, layer), self.norm2)
        layer = self.mlp.fc2
        y_NTD = with_constant_bias(layer, self.mlp.act(self.mlp.fc1(y_NTD)))
        pending = self._wait(x_NTD, y_NTD, self.drop_path2, layer)
        return add(pending) if self.last else pending

    def _wait(
        self, x_NTD: Tensor, y_NTD: Tensor, drop_path: nn.Module, layer: nn.Linear
    ) -> Pending:
        ones = y_NTD.new_ones(len(y_NTD), 1, 1, dtype=torch.float32)
        scale_N = drop_path(ones).flatten() / self.residual_divisor
        return Pending(x_NTD, y_NTD, scale_N, layer.bias)


def use(model: nn.Module) -> None:
    """Let the blocks of every LV-ViT with layer norms add and normalize so."""
    for network in model.modules():
        if isinstance(network, LVViT) and all(map(is_plain, network.blocks)):
            for block in network.blocks:
                block.__class__ = FusedBlock
            network.blocks[-1].last = True


def is_plain(block: nn.Module) -> bool:
    """Return whether a block has the layers that a FusedBlock has."""
    norms = block.norm1, block.norm2
    return (
        type(block) is Block and not block.post_norm and all(type(n) is nn.LayerNorm for n in norms)
    )


def can_run(block: Block, x_NTD: Tensor) -> bool:
    """Return whether a block in training can use the kernels, which compute in autocast's dtype."""
    trained = block.training and torch.is_grad_enabled() and x_NTD.shape[2] <= MOST_WIDTH
    return trained and x_NTD.is_cuda and torch.is_autocast_enabled("cuda") and has_triton()


def mix_tokens(block: Block, y_NTD: Tensor) -> tuple[Tensor, nn.Linear]:
    """Return the branch of attention, and its last layer."""
    attn, (N, T, D) = block.attn, y_NTD.shape
    qkv = attn.qkv(y_NTD).view(N, T, 3, attn.num_heads, D // attn.num_heads)
    return with_constant_bias(attn.proj, attn.attend(qkv).reshape(N, T, D)), attn.proj


def with_constant_bias(layer: nn.Linear, x: Tensor) -> Tensor:
    """Compute a layer whose bias gets no gradient here."""
    # In `--compile blocks` it computes with copies of its parameters.
    if type(layer) is not nn.Linear:
        return layer.with_constant_bias(x)
    return F.linear(x, layer.weight, layer.bias.detach())


def add_norm(pending: Pending, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Return the sum and its norm."""
    x_NTD, branch_NTD, scale_N, bias_D = pending
    total, out, *_ = forward(x_NTD, branch_NTD, scale_N, bias_D, norm.weight, norm.bias, norm.eps)
    return total, out


def add(pending: Pending) -> Tensor:
    """Return the sum alone. Its bias gets its gradient too."""
    x_NTD, branch_NTD, scale_N, bias_D = pending
    # A sum of zeros, whose gradient is that of the bias.
    constant_D = bias_D - bias_D.detach()
    return x_NTD + (branch_NTD + constant_D.to(branch_NTD.dtype)) * scale_N[:, None, None].to(
        branch_NTD.dtype
    )


# ------------------------------------------------------------------------- operators


def plain_forward(
    x_NTD: Tensor,
    branch_NTD: Tensor,
    scale_N: Tensor,
    bias_D: Tensor,
    weight_D: Tensor,
    norm_bias_D: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `x + scale branch`, its norm in the branch's dtype, and mean and 1 / deviation.

    `bias_D` is part of the branch; it is an argument because it gets its gradient here.
    """
    total = (x_NTD + branch_NTD * scale_N[:, None, None]).to(x_NTD.dtype)
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    var_NT, mean_NT = torch.var_mean(wide, 2, correction=0)
    rstd_NT = torch.rsqrt(var_NT + eps)
    normal = (wide - mean_NT[..., None]) * rstd_NT[..., None]
    return total, (normal * weight_D + norm_bias_D).to(branch_NTD.dtype), mean_NT, rstd_NT


def plain_backward(
    total_grad_NTD: Tensor,
    out_grad_NTD: Tensor,
    total_NTD: Tensor,
    mean_NT: Tensor,
    rstd_NT: Tensor,
    scale_N: Tensor,
    weight_D: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the stream and of the branch, and three sums over all rows `[3, D]`:

    the gradients of the norm's weight and bias, and of the branch's bias.
    """
    grad = out_grad_NTD.to(mean_NT.dtype)
    normal = (total_NTD - mean_NT[..., None]) * rstd_NT[..., None]
    sums = [(grad * normal).sum((0, 1)), grad.sum((0, 1))]
    grad = grad * weight_D
    grad = grad - grad.mean(2, True) - normal * (grad * normal).mean(2, True)
    grad = grad * rstd_NT[..., None] + total_grad_NTD
    branch_grad = grad * scale_N[:, None, None]
    sums.append(branch_grad.sum((0, 1)))
    return grad.to(total_NTD.dtype), branch_grad.to(out_grad_NTD.dtype), torch.stack(sums)


forward = torch.library.custom_op("densefeed::add_norm", plain_forward, mutates_args=())
backward = torch.library.custom_op("densefeed::add_norm_backward", plain_backward, mutates_args=())


@forward.register_kernel("cuda")
def _(x_NTD, branch_NTD, scale_N, bias_D, weight_D, norm_bias_D, eps):
    # Imported here, because importing Triton takes a second, or fails.
    from densefeed.models.kernels import add_norm_triton

    tensors = x_NTD.contiguous(), branch_NTD.contiguous(), scale_N
    return add_norm_triton.forward(*tensors, weight_D, norm_bias_D, eps)


@backward.register_kernel("cuda")
def _(total_grad_NTD, out_grad_NTD, *more):
    from densefeed.models.kernels import add_norm_triton

    return add_norm_triton.backward(total_grad_NTD.contiguous(), out_grad_NTD.contiguous(), *more)


@forward.register_fake
def _(x_NTD, branch_NTD, scale_N, *more):
    dtype = torch.promote_types(x_NTD.dtype, torch.float32)
    mean, rstd = (x_NTD.new_empty(x_NTD.shape[:2], dtype=dtype) for _ in range(2))
    return contiguous_like(x_NTD), contiguous_like(branch_NTD), mean, rstd


@backward.register_fake
def _(total_grad_NTD, out_grad_NTD, total_NTD, mean_NT, *more):
    sums = mean_NT.new_empty(3, total_NTD.shape[2])
    return contiguous_like(total_NTD), contiguous_like(out_grad_NTD), sums


def contiguous_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def keep(ctx, inputs, output) -> None:
    """Keep what the backward pass reads."""
    _, _, scale_N, _, weight_D, _, _ = inputs
    total_NTD, _, mean_NT, rstd_NT = output
    ctx.save_for_backward(total_NTD, mean_NT, rstd_NT, scale_N, weight_D)


def differentiate(ctx, total_grad_NTD, out_grad_NTD, *_) -> tuple[Tensor | None, ...]:
    """Return the gradients of `forward`'s arguments; the scale has none."""
    x_grad, branch_grad, sums_3D = backward(total_grad_NTD, out_grad_NTD, *ctx.saved_tensors)
    weight_grad, norm_bias_grad, bias_grad = sums_3D.unbind()
    return x_grad, branch_grad, None, bias_grad, weight_grad, norm_bias_grad, None


forward.register_autograd(differentiate, setup_context=keep)

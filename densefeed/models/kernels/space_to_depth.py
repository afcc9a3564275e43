"""The stem's first convolution, 7 x 7 with a stride of 2, as one of 4 x 4 over 2 x 2 pixels.

A convolution over three channels leaves most of a GPU's product units idle: 256 images of 224
pixels took 2.88 ms forward and backward, and 1.58 as 4 x 4 over 16 channels (once, on an H200).
The sums are the same, in another order. The plain twin is `nn.Conv2d`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.models.lvvit import Stem

# N images   C channels   H, W pixels   O outputs

KERNEL, STRIDE, PADDING = (7, 7), (2, 2), (3, 3)
# Channels are a multiple of this: 16 bytes of 16 bits.
CHANNELS = 8


def use(model: nn.Module) -> None:
    """Let the first convolution of every stem be computed so, if it is 7 x 7 with a stride of 2."""
    for module in model.modules():
        if conv := find_convolution(module):
            # Kept by the layer that takes its place and computes with a copy of its weight.
            conv._conv_forward = convolve


def find_convolution(module: nn.Module | None) -> nn.Conv2d | None:
    """Return the first convolution of a stem, if it is 7 x 7 with a stride of 2; else None."""
    if not isinstance(module, Stem) or not isinstance(module[0], nn.Conv2d):
        return None
    conv = module[0]
    fits = (conv.kernel_size, conv.stride, conv.padding) == (KERNEL, STRIDE, PADDING)
    return conv if fits else None


def convolve(x_NCHW: Tensor, weight_OC77: Tensor, bias_O: Tensor | None) -> Tensor:
    """Compute `F.conv2d(x, weight, bias, stride=2, padding=3)` for even H and W."""
    # Autocast casts what a convolution gets, which here would be after the copies.
    if torch.is_autocast_enabled(x_NCHW.device.type):
        dtype = torch.get_autocast_dtype(x_NCHW.device.type)
        x_NCHW, weight_OC77 = x_NCHW.to(dtype), weight_OC77.to(dtype)
    C = x_NCHW.shape[1]
    more = -4 * C % CHANNELS
    # Pixel 2i + u - 3 of the window of output i is number u + 1 of eight, before which there is a
    # zero: four pairs from pair i - 2 on.
    weight = F.pad(weight_OC77, (1, 0, 1, 0)).unflatten(3, (4, 2)).unflatten(2, (4, 2))
    weight = F.pad(weight.permute(0, 3, 5, 1, 2, 4).flatten(1, 3), (0, 0, 0, 0, 0, more))
    # Channels last: 2 x 2 pixels, then channels, then zeros. One copy writes all.
    pairs_NHVWWC = x_NCHW.movedim(1, -1).unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
    deep_NHWD = pairs_NHVWWC.transpose(2, 3).flatten(3)
    deep_NHWD = F.pad(deep_NHWD, (0, more, 2, 1, 2, 1))
    return F.conv2d(
        deep_NHWD.movedim(-1, 1), weight.contiguous(memory_format=torch.channels_last), bias_O
    )

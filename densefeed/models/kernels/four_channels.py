"""The stem's first convolution, 7 x 7 with a stride of 2, over images with a fourth channel of 0.

As space_to_depth.py it gives a GPU's product units more channels than three, but it copies nothing:
the kernel that normalizes images writes the fourth channel, and in channels_last memory two pixels
side by side are one of eight channels (16 bytes of 16 bits). Images of three channels, as in
evaluation, are convolved as before. The sums are the same, in another order. The plain twin is
`nn.Conv2d`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.models.kernels.space_to_depth import find_convolution

# N images   C channels   H, W pixels   O outputs


def use(model: nn.Module) -> None:
    """Let a stem's first convolution be computed so, if it is 7 x 7 with a stride of 2 over colors.

    The network then asks for images of four channels by its attribute `image_channels`.
    """
    for network in model.modules():
        # The stem of a network itself: what its caller passes is what the convolution gets.
        conv = find_convolution(getattr(network, "stem", None))
        if conv and conv.in_channels == 3:
            conv._conv_forward = convolve
            network.image_channels = 4


def convolve(x_NCHW: Tensor, weight_O377: Tensor, bias_O: Tensor | None) -> Tensor:
    """Compute `F.conv2d(x, weight, bias, stride=2, padding=3)`; the fourth channel counts as 0.

    H and W are even, C is 3 or 4.
    """
    if x_NCHW.shape[1] == 3:
        return F.conv2d(x_NCHW, weight_O377, bias_O, stride=2, padding=3)
    # Column 2j + u - 3 of the window of output j is number u + 1 of ten, with zeros at both ends:
    # five pairs from pair j - 2 on. Four would do, but give one output too many.
    weight = F.pad(weight_O377, (1, 2, 0, 0, 0, 1)).unflatten(3, (5, 2))
    weight = weight.permute(0, 4, 1, 2, 3).flatten(1, 2)
    x = x_NCHW.movedim(1, -1).unflatten(2, (-1, 2)).flatten(3).movedim(-1, 1)
    weight = weight.contiguous(memory_format=torch.channels_last)
    return F.conv2d(x, weight, bias_O, stride=(2, 1), padding=(3, 2))

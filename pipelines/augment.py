"""What happens to a batch of pixels on the device."""

import torch
from torch import Tensor


class Normalise(torch.nn.Module):
    """uint8 `[N, H, W, 3]` to float `[N, 3, H, W]` in channels_last memory: (x / 255 - mean) / std, one multiply-add."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        scale, mean = 1 / (255 * torch.tensor(std)), torch.tensor(mean)
        self.register_buffer("scale", scale.view(1, 3, 1, 1))
        self.register_buffer("shift", (-mean * 255 * scale).view(1, 3, 1, 1))

    def forward(self, image_NHWC: Tensor) -> Tensor:
        return image_NHWC.permute(0, 3, 1, 2).float() * self.scale + self.shift  # permuting NHWC is channels_last

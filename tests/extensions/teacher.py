"""A teacher of your own: any module with a grid of features and a linear classifier.

PYTHONPATH=. densefeed label --teacher teacher:make --data DATA --out maps.h5 ...
"""

import torch
from torch import Tensor, nn


class Cells(nn.Module):
    """Scores of every cell of 8 pixels."""

    num_classes = 2

    def __init__(self) -> None:
        super().__init__()
        self.features, self.classifier = nn.Conv2d(3, 16, 8, 8), nn.Linear(16, 2)

    def forward_token_logits(self, image_NCHW: Tensor) -> Tensor:
        """Return logits of every cell, `[N, K, S, S]`."""
        x_NSSD = self.features(image_NCHW).relu().permute(0, 2, 3, 1)
        return self.classifier(x_NSSD).permute(0, 3, 1, 2)


def make() -> nn.Module:
    """Return the teacher with its weights."""
    torch.manual_seed(0)
    return Cells()

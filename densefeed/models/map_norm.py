"""BatchNorm of maps that are cut out of tokens."""

import torch
from torch import Tensor, nn


class MapNorm(nn.BatchNorm2d):
    """`nn.BatchNorm2d` whose gradients are right for a single image on a CPU too.

    PyTorch 2.15's backward pass there is wrong for the map `[1, D, R, C]` of one image if it or its
    gradient was sliced out of tokens, as in DHVT and CvT: strides of a dimension of 1 then give
    another memory format. A row of positions, `[1, D, R C]`, has only one.
    """

    def forward(self, x_NDRC: Tensor) -> Tensor:
        if torch.is_grad_enabled() and len(x_NDRC) == 1:
            return super().forward(x_NDRC.flatten(2)).unflatten(2, x_NDRC.shape[2:])
        return super().forward(x_NDRC)

    def _check_input_dim(self, x: Tensor) -> None:
        """Accept a row of positions too."""
        if x.ndim != 3:
            super()._check_input_dim(x)

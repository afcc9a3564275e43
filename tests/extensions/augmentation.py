"""An augmentation of your own: a random gamma correction.

python augmentation.py lvvit_micro_ce --operations gamma --data DATA --val DATA --out runs/gamma
"""

import numpy as np
from torch import Tensor

from densefeed import register_operation, train


def gamma(image_NHWC: Tensor, exponent_N: Tensor) -> Tensor:
    """Return the images with every value v in 0 to 1 replaced by v ** exponent."""
    value_NHWC = (image_NHWC / 255) ** exponent_N[:, None, None, None]
    return (255 * value_NHWC).round().to(image_NHWC.dtype)


def draw(uniform_N: np.ndarray) -> np.ndarray:
    """Exponents from 1/2 to 2, uniform in their logarithm."""
    return 2 ** (2 * uniform_N - 1)


register_operation("gamma", gamma, draw, probability=0.5)

if __name__ == "__main__":
    train.command()

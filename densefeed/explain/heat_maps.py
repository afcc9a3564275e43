"""Maps of relevance and attention as pictures: gray ones for a page, colored ones as files.

A page holds one pixel for each token. The browser enlarges it and then colors it, with the filter
of heat.html, so a map of 14 x 14 tokens takes 0.4 kB.
"""

import numpy as np
from PIL import Image
from torch import Tensor

from densefeed.explain.attention_maps import to_picture
from densefeed.pages.templates import picture

# Dark, purple, orange, yellow: each lighter than the one before, also in gray and for color-blind
# readers (matplotlib's inferno).
ANCHORS = (
    *("#000004", "#1b0c42", "#4b0c6b", "#781c6d", "#a52c60"),
    *("#cf4446", "#ed6925", "#fb9a06", "#f7d03c", "#fcffa4"),
)
INKS_A3 = np.array([[int(ink[at : at + 2], 16) for at in (1, 3, 5)] for ink in ANCHORS])
# Share of the colors where they lie over an image.
OPACITY = 0.62
# What heat.html needs: the values of each channel of color at equal distances.
HEAT = {
    "opacity": OPACITY,
    "channels": [" ".join(f"{value / 255:.3f}" for value in channel) for channel in INKS_A3.T],
}


def encode_map(map_RC: Tensor) -> str:
    """Encode a map as a gray PNG with a pixel for each token, a data URL.

    It goes from black at the map's minimum to white at its maximum.
    """
    return picture(gray(to_picture(map_RC, tuple(map_RC.shape))), "PNG")


def gray(value_HW: Tensor) -> Image.Image:
    """Return values from 0 to 1 as a gray image."""
    return Image.fromarray((255 * value_HW.cpu().numpy()).round().astype(np.uint8))


def colorize(value_HW: Tensor) -> Image.Image:
    """Return values from 0 to 1 in the colors of ANCHORS."""
    places = np.linspace(0, 1, len(ANCHORS))
    flat = value_HW.cpu().numpy()
    channels = [np.interp(flat, places, channel) for channel in INKS_A3.T]
    return Image.fromarray(np.stack(channels, -1).round().astype(np.uint8))


def overlay(image: Image.Image, map_RC: Tensor) -> Image.Image:
    """Return an image with a map over it: bilinear, from minimum to maximum, then colored."""
    heat = colorize(to_picture(map_RC, (image.height, image.width)))
    return Image.blend(image, heat, OPACITY)


def matrix_picture(matrix_QK: Tensor, most: int = 0) -> Image.Image:
    """Return an attention matrix as a gray image, a pixel for each pair of tokens.

    Gray is the square root of the share of the largest weight: one token that takes nearly all
    attention would leave the rest black. A side above `most` pixels is reduced to it; 0: no limit.
    """
    value_QK = (matrix_QK / matrix_QK.max()).sqrt()
    return shrink(gray(value_QK), most)


def shrink(image: Image.Image, most: int) -> Image.Image:
    """Reduce an image whose longer side has more than `most` pixels; 0: never."""
    share = most / max(image.size)
    if not 0 < share < 1:
        return image
    width, height = (max(1, round(side * share)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BOX)

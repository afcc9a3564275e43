"""View and Window: how the network's input, the stored image and the score map relate. The only place that knows.

Everything is normalised: (0, 0) is the top-left *corner* of the image, (1, 1) its bottom-right corner, x before y.

- A `View` is float32 `[N, 2, 3]`: it takes a point (x, y, 1) of the network's input to a point of the stored image. Crop
  and flip (later rotate, shear, translate) are all one matrix. The identity shows the whole image.
- A `Window` is float32 `[N, 4]`, (top, left, bottom, right): the part of the stored image that the score map covers. A
  point outside it has no dense label.

The published code reads another region: it hands (top, left, ...) to an operator that wants (x, y, ...), and takes the
crop relative to the whole image where the map covers only its centre square.
"""

import math
from typing import Literal

import numpy as np

Geometry = Literal["squash", "centre-crop"]
MOST_SAMPLES = 64
WHOLE = (0.0, 0.0, 1.0, 1.0)  # the Window of a map that covers the whole image


def crop_views(box_N4: np.ndarray, flip_N: np.ndarray, height_N: np.ndarray, width_N: np.ndarray) -> np.ndarray:
    """Views of crops: float32 `[N, 2, 3]`.

    `box_N4` is (top, left, height, width) in pixels of images of `height_N` x `width_N`; where `flip_N` is true the crop
    is mirrored left-right after it was cut.
    """
    top, left, height, width = np.asarray(box_N4, np.float64).T
    sign = np.where(flip_N, -1.0, 1.0)
    view = np.zeros((len(top), 2, 3))
    view[:, 0, 0] = sign * width / width_N
    view[:, 0, 2] = (left + np.where(flip_N, width, 0.0)) / width_N
    view[:, 1, 1] = height / height_N
    view[:, 1, 2] = top / height_N
    return view.astype(np.float32)


def shown_boxes(view_N23: np.ndarray) -> np.ndarray:
    """The part of the image that crops of these Views show: float32 `[N, 4]`, (top, left, bottom, right), as a Window."""
    ends = np.stack([view_N23[:, :, 2], view_N23[:, :, :2].sum(2) + view_N23[:, :, 2]], axis=1)  # N, corner, x and y
    return np.concatenate([ends.min(1)[:, ::-1], ends.max(1)[:, ::-1]], axis=1)


def window_of(geometry: Geometry, height: int, width: int) -> tuple[float, float, float, float]:
    """The Window a teacher sees of an image: all of it (`squash`: aspect ratio not kept) or its centre square."""
    if geometry == "squash":
        return WHOLE
    top, left = (max(extent - min(height, width), 0) / 2 / extent for extent in (height, width))
    return top, left, 1.0 - top, 1.0 - left


def crop_in_pixels(window: tuple[float, float, float, float], height: int, width: int) -> tuple[float, float, float, float]:
    """A Window as Pillow's box: (left, top, right, bottom) in pixels, fractions allowed."""
    top, left, bottom, right = window
    return left * width, top * height, right * width, bottom * height


def centre_box(height_N: np.ndarray, width_N: np.ndarray, crop_pct: float) -> np.ndarray:
    """The evaluation crop: a centred square of `crop_pct` times the shorter side; float64 `[N, 4]`, pixels.

    The same region as "resize the shorter side to size / crop_pct, then cut size x size from the centre".
    """
    side = np.minimum(height_N, width_N) * min(crop_pct, 1.0)
    return np.stack([(height_N - side) / 2, (width_N - side) / 2, side, side], axis=1)


def samples_per_bin(map_side: int, grid: int, min_window_side: float) -> int:
    """Most samples that RoIAlign's rule, ceil(box / grid), takes along one axis of one token, over all crops.

    A crop of the whole image spans `map_side / min_window_side` cells of a map that covers only part of the image. At most
    MOST_SAMPLES are taken: one image of 1 x 4000 pixels labelled by its centre square would else ask for 5,000 a token.
    """
    return max(1, min(math.ceil(map_side / min_window_side / grid - 1e-5), max(MOST_SAMPLES, map_side)))

"""View, Window and Frame: how the network's input, the stored image and the score map relate.

All conversions between them are in this module. Everything is normalized: (0, 0) is the top-left
*corner* of the image, (1, 1) its bottom-right corner, x before y.

- A `View` is float32 `[N, 2, 3]`: it takes a point (x, y, 1) of the network's input to a point of
  the stored image. Crop, flip, rotate, shear and translate are all one matrix. The identity shows
  the whole image.
- A `Window` is float32 `[N, 4]`, (top, left, bottom, right): the part of the stored image that the
  score map covers. A point outside it has no dense label. The Window of a letterbox reaches beyond
  the image; map cells there show padding and give no label.
- A `Frame` is float32 `[N, 2, 2]`: (scale, shift) of x and of y, which take a point of the stored
  image to a point of the map, again with (0, 0) at its top-left corner. The Frame of the map's
  Window, `window_frame`, is the correct one.

The published code of TokenLabeling and ReLabel reads another region: it passes (top, left, ...) to
an operator that expects (x, y, ...), and takes the crop relative to the whole image even if the map
covers only its center square. `published_frame` reproduces that.
"""

import math
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

# How images of imported maps were fitted to the teacher's input.
Footprint = Literal["squash", "center-crop", "letterbox"]
Geometry = Literal["squash", "center-crop", "letterbox", "tile"]
TLBR = tuple[float, float, float, float]  # top, left, bottom, right
LTRB = tuple[float, float, float, float]  # left, top, right, bottom: the order of Pillow
Array = TypeVar("Array", np.ndarray, Tensor)
# Rounding error of a Window that ends at the edge of its image.
EDGE = 1e-6
# Most samples per axis of a token; `samples_per_bin` explains the limit.
MOST_SAMPLES = 64
WHOLE = (0.0, 0.0, 1.0, 1.0)  # the Window of a map that covers the whole image


class TeacherView(NamedTuple):
    """One crop of an image that is given to the teacher."""

    # (left, top, right, bottom) in pixels of the image, fractions allowed. Beyond the image it is
    # filled with the teacher's mean color.
    box_ltrb: LTRB
    flip: bool  # mirrored left-right after the crop


def crop_views(
    box_tlhw_N4: np.ndarray, flip_N: np.ndarray, height_N: np.ndarray, width_N: np.ndarray
) -> np.ndarray:
    """Compute the Views of crops: float32 `[N, 2, 3]`.

    `box_tlhw_N4` is (top, left, height, width) in pixels of images of `height_N` x `width_N`. Where
    `flip_N` is true the crop is mirrored left-right after cropping.
    """
    # In float64, so a View is rounded once, when it becomes float32.
    top, left, height, width = np.asarray(box_tlhw_N4, np.float64).T
    sign = np.where(flip_N, -1.0, 1.0)
    view = np.zeros((len(top), 2, 3))
    view[:, 0, 0] = sign * width / width_N
    # A mirrored crop begins at its right edge.
    view[:, 0, 2] = (left + np.where(flip_N, width, 0.0)) / width_N
    view[:, 1, 1] = height / height_N
    view[:, 1, 2] = top / height_N
    return view.astype(np.float32)


def visible_boxes(view_N23: np.ndarray) -> np.ndarray:
    """Compute the box, within the image, around what the corners of the input show.

    Returns float32 `[N, 4]`, (top, left, bottom, right), normalized like a Window.
    """
    sides, first = view_N23[:, :, :2], view_N23[:, :, 2]
    ends = first + np.minimum(sides, 0).sum(2), first + np.maximum(sides, 0).sum(2)
    shown = np.concatenate([end[:, ::-1] for end in ends], axis=1)
    # Beyond the image there is fill. Rounding at its edge is left.
    inside = shown.clip(0, 1)
    return np.where(abs(shown - inside) < EDGE, shown, inside)


def teacher_window(geometry: Geometry, height: int, width: int) -> TLBR:
    """Compute the Window that a teacher covers of an image of `height` x `width` pixels.

    Returns (top, left, bottom, right).

    `squash` and `tile`: the whole image, aspect ratio not kept. `center-crop`: its center square.
    `letterbox`: the square around it, as long as its longer side, so along the shorter side the
    Window reaches beyond 0 and 1.
    """
    if geometry in ("squash", "tile"):
        return WHOLE
    side = max(height, width) if geometry == "letterbox" else min(height, width)
    top, left = ((extent - side) / 2 / extent for extent in (height, width))
    return top, left, 1.0 - top, 1.0 - left


def are_windows(window_N4: Array) -> Array:
    """Mark valid Windows, bool `[N]`.

    Along each axis a Window is a part of the image, or centered and longer than it. Other regions,
    corners in pixels and values that are not finite are invalid.
    """

    def along(low: Array, high: Array) -> Array:
        within = (low >= -EDGE) & (high <= 1 + EDGE)
        # A Window as long as 4,000 images has ends that float32 rounds by 1e-4, so the tolerance
        # grows with its length. With an infinite end both sides are infinite, and neither is less.
        around = (low <= 0) & (high >= 1) & (abs(low + high - 1) < EDGE * (high - low))
        # Conditions that must hold, instead of their negations: every comparison with NaN is
        # false.
        return (low < high) & (within | around)

    return along(window_N4[:, 0], window_N4[:, 2]) & along(window_N4[:, 1], window_N4[:, 3])


def crop_in_pixels(window_tlbr: TLBR, height: int, width: int) -> LTRB:
    """Convert a Window to Pillow's box: (left, top, right, bottom) in pixels, with fractions."""
    top, left, bottom, right = window_tlbr
    return left * width, top * height, right * width, bottom * height


# Least side of the evaluation crop, share of the shorter side.
LEAST_CROP = 1e-3


def center_box(height_N: np.ndarray, width_N: np.ndarray, crop_pct: float) -> np.ndarray:
    """Return the evaluation crop: a centered square of `crop_pct` times the shorter side.

    Returns (top, left, height, width) in pixels, float64 `[N, 4]`. This is the same region as
    "resize the shorter side to size / crop_pct, then crop size x size from the center".
    """
    side = np.minimum(height_N, width_N) * min(crop_pct, 1.0)
    return np.stack([(height_N - side) / 2, (width_N - side) / 2, side, side], axis=1)


def window_frame(window_N4: Tensor) -> Tensor:
    """Return the frame of maps that cover these Windows: float `[N, 2, 2]`."""
    top, left, bottom, right = window_N4.unbind(1)
    scale = torch.stack([1 / (right - left), 1 / (bottom - top)], 1)
    return torch.stack([scale, -scale * torch.stack([left, top], 1)], 2)


def labeling_cells(frame_N22: Tensor, side: int) -> Tensor:
    """Return the first and last cell, along x and y, whose center is in the image, not in padding.

    Returns float `[N, 2, 2]`, 0 to `side` - 1. These are all cells unless the Window reaches beyond
    the image. An image narrower than a cell has the cell that contains its center.
    """
    scale, shift = (side * part for part in frame_N22.unbind(2))
    # 1e-4 of a cell keeps a cell whose center lies on the image's edge, and 0 and side - 1 if
    # rounding moved them.
    first, last = (shift - 0.5 - 1e-4).ceil(), (shift + scale - 0.5 + 1e-4).floor()
    middle = (shift + scale / 2).floor()
    return torch.stack([torch.minimum(first, middle), torch.maximum(last, middle)], 2).clamp(
        0, side - 1
    )


def published_frame(shown_N4: Tensor, view_N23: Tensor, side: int) -> Tensor:
    """Return the frame of maps of `side` cells in the published code of TokenLabeling and ReLabel.

    Returns float `[N, 2, 2]`. `shown_N4` is `visible_boxes` of the crops.

    The published code flips image and map, then cuts (top, left, height, width) out of the flipped
    image, and pools (x, y, x, y) = (top, left, top + height, left + width) of the flipped map, at
    least one cell wide and high: along the crop's width it reads the map from `top` on, along its
    height from `left` on. Here images are cropped first, flipped afterwards, so a flip (a View of
    negative determinant) turns left into 1 - right and mirrors the map:

        map x = top + max(height, 1 / side) (x - left) / width
        map y = left + max(width, 1 / side) (y - top) / height

    and if flipped

        map x = 1 - top - max(height, 1 / side) (right - x) / width
        map y = 1 - right + max(width, 1 / side) (y - top) / height

    Both depend only on the point of the image. They are therefore also defined if `view_N23` is a
    crop after a warp, which no published code does: the label of a pixel is then read where the
    unwarped crop would have read it.
    """
    top, left, bottom, right = shown_N4.unbind(1)
    flipped = view_N23[:, 0, 0] * view_N23[:, 1, 1] < view_N23[:, 0, 1] * view_N23[:, 1, 0]
    width, height = right - left, bottom - top
    scale_x, scale_y = height.clamp(min=1 / side) / width, width.clamp(min=1 / side) / height
    shift_x = torch.where(flipped, 1 - top - scale_x * right, top - scale_x * left)
    shift_y = torch.where(flipped, 1 - right, left) - scale_y * top
    return torch.stack([torch.stack([scale_x, shift_x], 1), torch.stack([scale_y, shift_y], 1)], 1)


def samples_per_bin(map_side: int, grid: int, min_window_side: float, sheared: bool = False) -> int:
    """Return the most samples per axis of a token by RoIAlign's rule, ceil(box / grid).

    The maximum is over all crops. A crop of the whole image spans `map_side / min_window_side`
    cells of a map that covers only part of the image. The result is at most MOST_SAMPLES: a single
    image of 1 x 4000 pixels labeled by its center square would otherwise need 5,000 per token.

    `sheared` views span up to sqrt(2) times as much (two shears of timm's 0.3 give 1.17). They are
    sampled point by point and not per axis, (grid * samples)^2 points per image, so the samples are
    limited to one per cell of twice the map's width: N = 128 crops in 24 classes then take 22 MB at
    map_side 18 and grid 14, where MOST_SAMPLES would take 10 GB. Beyond that width a crop lies
    mostly outside the Window and has no label.
    """
    reach = 1 / min_window_side
    most = max(MOST_SAMPLES, map_side)
    if sheared:
        reach, most = math.sqrt(2) * reach, math.ceil(2 * map_side / grid)
    # 1e-5 keeps a whole number that rounding raised from one more sample.
    return max(1, min(math.ceil(map_side * reach / grid - 1e-5), most))

"""View and Window: how the network's input, the stored image and the score map relate. The only
place that knows.

Everything is normalized: (0, 0) is the top-left *corner* of the image, (1, 1) its bottom-right
corner, x before y.

- A `View` is float32 `[N, 2, 3]`: it takes a point (x, y, 1) of the network's input to a point of
  the stored image. Crop, flip, rotate, shear and translate are all one matrix. The identity shows
  the whole image.
- A `Window` is float32 `[N, 4]`, (top, left, bottom, right): the part of the stored image that the
  score map covers. A point outside it has no dense label. A letterbox's reaches beyond the image;
  cells there show padding and label nothing.

- A `Frame` is float32 `[N, 2, 2]`: (scale, shift) of x and of y, which take a point of the stored
  image to a point of the map, (0, 0) being its first corner again. A Window's frame is the right
  one.

The published code reads another region: it hands (top, left, ...) to an operator that wants (x, y,
...), and takes the crop relative to the whole image where the map covers only its center square.
`published_frame` is where it reads.
"""

import math
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

Footprint = Literal["squash", "center-crop", "letterbox"]  # of maps that others made
Geometry = Literal["squash", "center-crop", "letterbox", "tile"]
TLBR = tuple[float, float, float, float]  # top, left, bottom, right
LTRB = tuple[float, float, float, float]  # left, top, right, bottom: the order of Pillow
Array = TypeVar("Array", np.ndarray, Tensor)
EDGE = 1e-6  # by which rounding may put a Window outside its image
MOST_SAMPLES = 64
WHOLE = (0.0, 0.0, 1.0, 1.0)  # the Window of a map that covers the whole image


class TeacherView(NamedTuple):
    """One picture that a teacher is shown of an image."""

    # (left, top, right, bottom) in pixels of the image, fractions allowed; beyond the image is the
    # teacher's mean color
    box_ltrb: LTRB
    flip: bool  # mirrored left-right after it was cut


def crop_views(
    box_tlhw_N4: np.ndarray, flip_N: np.ndarray, height_N: np.ndarray, width_N: np.ndarray
) -> np.ndarray:
    """Views of crops: float32 `[N, 2, 3]`.

    `box_tlhw_N4` is (top, left, height, width) in pixels of images of `height_N` x `width_N`; where
    `flip_N` is true the crop is mirrored left-right after it was cut.
    """
    top, left, height, width = np.asarray(box_tlhw_N4, np.float64).T
    sign = np.where(flip_N, -1.0, 1.0)
    view = np.zeros((len(top), 2, 3))
    view[:, 0, 0] = sign * width / width_N
    view[:, 0, 2] = (left + np.where(flip_N, width, 0.0)) / width_N
    view[:, 1, 1] = height / height_N
    view[:, 1, 2] = top / height_N
    return view.astype(np.float32)


def visible_boxes(view_N23: np.ndarray) -> np.ndarray:
    """The part of the image that crops of these Views show: float32 `[N, 4]`, (top, left, bottom,
    right), as a Window.
    """
    # N, corner, x and y
    ends = np.stack([view_N23[:, :, 2], view_N23[:, :, :2].sum(2) + view_N23[:, :, 2]], axis=1)
    return np.concatenate([ends.min(1)[:, ::-1], ends.max(1)[:, ::-1]], axis=1)


def teacher_window(geometry: Geometry, height: int, width: int) -> TLBR:
    """The Window a teacher sees of an image of these pixels, (top, left, bottom, right).

    `squash` and `tile`: all of it, aspect ratio not kept. `center-crop`: its center square.
    `letterbox`: the square about it, as long as its longer side, so along the shorter one the
    Window reaches beyond 0 and 1.
    """
    if geometry in ("squash", "tile"):
        return WHOLE
    side = max(height, width) if geometry == "letterbox" else min(height, width)
    top, left = ((extent - side) / 2 / extent for extent in (height, width))
    return top, left, 1.0 - top, 1.0 - left


def are_windows(window_N4: Array) -> Array:
    """Which of these can be a Window, bool `[N]`: a part of the image or, along either axis,
    centered and longer than it.

    Neither a map of another place passes nor corners in pixels, nor what is not finite.
    """

    def along(low: Array, high: Array) -> Array:
        within = (low >= -EDGE) & (high <= 1 + EDGE)
        # float32 rounds the ends of 4,000 images' length by 1e-4. An end at infinity is not less.
        around = (low <= 0) & (high >= 1) & (abs(low + high - 1) < EDGE * (high - low))
        # not the other way round: NaN is neither less nor more
        return (low < high) & (within | around)

    return along(window_N4[:, 0], window_N4[:, 2]) & along(window_N4[:, 1], window_N4[:, 3])


def crop_in_pixels(window_tlbr: TLBR, height: int, width: int) -> LTRB:
    """A Window as Pillow's box: (left, top, right, bottom) in pixels, fractions allowed."""
    top, left, bottom, right = window_tlbr
    return left * width, top * height, right * width, bottom * height


def center_box(height_N: np.ndarray, width_N: np.ndarray, crop_pct: float) -> np.ndarray:
    """The evaluation crop: a centered square of `crop_pct` times the shorter side; float64 `[N, 4]`,
    pixels.

    The same region as "resize the shorter side to size / crop_pct, then cut size x size from the
    center".
    """
    side = np.minimum(height_N, width_N) * min(crop_pct, 1.0)
    return np.stack([(height_N - side) / 2, (width_N - side) / 2, side, side], axis=1)


def window_frame(window_N4: Tensor) -> Tensor:
    """The Frame of maps that cover these Windows: float `[N, 2, 2]`."""
    top, left, bottom, right = window_N4.unbind(1)
    scale = torch.stack([1 / (right - left), 1 / (bottom - top)], 1)
    return torch.stack([scale, -scale * torch.stack([left, top], 1)], 2)


def labeling_cells(frame_N22: Tensor, side: int) -> Tensor:
    """First and last cell along x and y whose center shows the image and not padding: float `[N, 2,
    2]`, 0 to `side` - 1.

    All of them unless the Window reaches beyond the image. An image narrower than a cell has the
    one it lies in.
    """
    scale, shift = (side * part for part in frame_N22.unbind(2))
    # The guard keeps a cell whose center lies on the image's edge, and 0 and side - 1 where
    # rounding moved them.
    first, last = (shift - 0.5 - 1e-4).ceil(), (shift + scale - 0.5 + 1e-4).floor()
    middle = (shift + scale / 2).floor()
    return torch.stack([torch.minimum(first, middle), torch.maximum(last, middle)], 2).clamp(
        0, side - 1
    )


def published_frame(shown_N4: Tensor, view_N23: Tensor, side: int) -> Tensor:
    """The Frame by which the published code of TokenLabeling and ReLabel reads maps of `side`
    cells: float `[N, 2, 2]`.

    That code flips image and map, then cuts (top, left, height, width) out of the flipped image,
    and pools (x, y, x, y) = (top, left, top + height, left + width) of the flipped map, at least
    one cell wide and high: along the crop's width it reads the map from `top` on, along its height
    from `left` on. Our crops are cut first and flipped afterwards, so a flip (a View of negative
    determinant) turns left into 1 - right and mirrors the map:

        map x = top + max(height, 1 / side) (x - left) / width,    flipped: 1 - top - max(height, 1 / side) (right - x) / width
        map y = left + max(width, 1 / side) (y - top) / height,    flipped: left replaced by 1 - right

    Both are functions of the image's point alone. So they mean something too where `view_N23` is a
    crop after a warp, though no published code does that: there the label follows the pixel to
    where the unwarped crop would have had it read.
    """
    top, left, bottom, right = shown_N4.unbind(1)
    flipped = view_N23[:, 0, 0] * view_N23[:, 1, 1] < view_N23[:, 0, 1] * view_N23[:, 1, 0]
    width, height = right - left, bottom - top
    scale_x, scale_y = height.clamp(min=1 / side) / width, width.clamp(min=1 / side) / height
    shift_x = torch.where(flipped, 1 - top - scale_x * right, top - scale_x * left)
    shift_y = torch.where(flipped, 1 - right, left) - scale_y * top
    return torch.stack([torch.stack([scale_x, shift_x], 1), torch.stack([scale_y, shift_y], 1)], 1)


def samples_per_bin(map_side: int, grid: int, min_window_side: float, sheared: bool = False) -> int:
    """Most samples that RoIAlign's rule, ceil(box / grid), takes along one axis of one token, over
    all crops.

    A crop of the whole image spans `map_side / min_window_side` cells of a map that covers only
    part of the image. At most MOST_SAMPLES are taken: one image of 1 x 4000 pixels labeled by its
    center square would else ask for 5,000 a token.

    `sheared` views span up to sqrt(2) times as much (two shears of timm's 0.3 make 1.17). They are
    sampled one by one and not axis by axis, (grid * samples)^2 points an image, so that only two
    maps' width of cells gets a sample each: N = 128 crops in 24 classes then take 22 MB at map_side
    18 and grid 14, where MOST_SAMPLES would take 10 GB. What a crop spans beyond that lies for the
    most part outside the Window and carries no label.
    """
    reach = 1 / min_window_side
    most = max(MOST_SAMPLES, map_side)
    if sheared:
        reach, most = math.sqrt(2) * reach, math.ceil(2 * map_side / grid)
    return max(1, min(math.ceil(map_side * reach / grid - 1e-5), most))

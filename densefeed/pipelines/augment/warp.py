"""Affine maps of pixels as Pillow's Image.transform defines them, composed and resampled once.

The maps are rotation, shear and translation.

Border rule: an output pixel whose center falls outside [0, W) x [0, H) of the source has the fill
color; inside, neighbors beyond the edge repeat the edge's pixels, so nothing blends with the fill.
Bicubic is cubic convolution with a = -1, not -0.75 as in torch's grid_sample. Results are
truncated, not rounded.

`warp_by_gather` warps all samples at once, on any device; a GPU runs it. On a CPU its 16 gathers
take 4 ms for an image of 224 px where Pillow takes 1.8 (bicubic; bilinear 0.7), so there Pillow
itself does maps of both axes. A map along one axis, as four of the five operations are, shifts
every row by its own amount; `shift_rows` does that in 0.4 ms, 0.5 along y.
"""

from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from densefeed.pipelines.augment.operations import quantize_levels

# N images   H, W pixels
# Matrices map output to source, in pixels from the top-left corner, x before y.

Values = TypeVar("Values", Tensor, np.ndarray)
IDENTITY = np.eye(2, 3)
# Rows at a time; their floats stay in a CPU's second-level cache.
STRIP = 112
# Added before truncation: weights add up to 1 - 1e-7, and on a flat 200 the sum 199.9999 would be
# truncated to 199.
ALMOST = 1e-3


def warp_images(
    image_NHWC: Tensor, matrix_N23: Tensor, cubic_N: Tensor, fill: tuple[int, int, int]
) -> Tensor:
    """Warp uint8 `[N, H, W, 3]` by float32 `[N, 2, 3]`.

    It is bicubic where float32 `cubic_N` is 1 and bilinear where it is 0.
    """
    if image_NHWC.device.type != "cpu":
        return warp_by_gather(image_NHWC, matrix_N23, cubic_N, fill)
    out = torch.empty_like(image_NHWC)
    matrices = zip(matrix_N23.numpy(), cubic_N.tolist(), strict=True)
    for number, (matrix_23, cubic) in enumerate(matrices):
        image = image_NHWC[number]
        keeps_x, keeps_y = (matrix_23 == IDENTITY).all(1)
        if keeps_x or keeps_y:
            # Along y the same work is done on the transposed image; transpose(0, 0) does nothing.
            axis = 0 if keeps_y else 1
            slope, shift = matrix_23[axis, [1 - axis, 2]].tolist()
            rows = image.transpose(0, axis)
            out[number] = shift_rows(rows, slope, shift, bool(cubic), fill).transpose(0, axis)
        else:
            resample = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
            data = Image.Transform.AFFINE, matrix_23.ravel().tolist(), resample
            picture = Image.fromarray(image.numpy())
            picture = picture.transform(picture.size, *data, fillcolor=fill)
            out[number] = torch.from_numpy(np.array(picture))
    return out


def shift_rows(
    image_HW3: Tensor, slope: float, shift: float, cubic: bool, fill: tuple[int, int, int]
) -> Tensor:
    """Shift the rows of one image, uint8 `[H, W, 3]`: x shows x + slope (y + 0.5) + shift.

    All pixels of a row have the same fractional offset, so a row is a sum of shifted rows with one
    weight each.
    """
    H, W, _ = image_HW3.shape
    move_H = slope * (np.arange(H) + 0.5) + shift
    start_H = np.floor(move_H)
    weights = tap_weights(move_H - start_H, cubic)
    # Each row has two pixels of edge on each side, then the next row begins. Where a window reaches
    # into that row, its pixels are outside the image and masked.
    wide = W + 4
    # The rows before and after stay uninitialized: bytes are never NaN, and the mask removes them.
    pixels = torch.empty((H + 2) * wide, 3, dtype=torch.uint8)
    rows = pixels[wide:-wide].view(H, wide, 3)
    rows[:, 2:-2], rows[:, :2], rows[:, -2:] = image_HW3, image_HW3[:, :1], image_HW3[:, -1:]
    # A row that moves by W or more shows fill alone; clipping keeps its window in `pixels`.
    first_H = (np.arange(H) + 1) * wide + 1 + np.clip(start_H, -W, W).astype(np.int64)
    row_HL = _windows(pixels, W + 3, first_H)
    # The pixels of a row whose source lies inside are contiguous, so the mask of a row is a window
    # of one pattern.
    begin_H = W - np.clip(np.ceil(-0.5 - move_H), -W, W).astype(np.int64)
    inside_HL, out_HL = (_windows(pattern, W, begin_H) for pattern in _patterns(W, fill))
    taps = [
        (3 * tap, torch.from_numpy(weights[tap].astype(np.float32))[:, None])
        for tap in (range(4) if cubic else (1, 2))
    ]
    for at in range(0, H, STRIP):
        strip = slice(at, at + STRIP)
        value_HL, (first, weight_H1), *others = row_HL[strip].float(), *taps
        total_HL = value_HL[:, first : first + 3 * W] * weight_H1[strip]
        for first, weight_H1 in others:
            total_HL.addcmul_(value_HL[:, first : first + 3 * W], weight_H1[strip])
        # The mask is 0 where the fill is not, so the two can be combined bit by bit.
        out_HL[strip] |= quantize_levels(total_HL.add_(ALMOST)) & inside_HL[strip]
    return out_HL.view(H, W, 3)


@lru_cache(maxsize=8)
def _patterns(width: int, fill: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Make the mask and the fill of a row between two rows outside, uint8 `[3 width, 3]` each.

    The mask is 255 in the middle third; the fill is the color in the outer thirds. Both are 0
    elsewhere.
    """
    mask = torch.zeros(3 * width, 3, dtype=torch.uint8)
    mask[width : 2 * width] = 255
    return mask, torch.tensor(fill, dtype=torch.uint8) & ~mask


def _windows(pixels: Tensor, width: int, first_H: np.ndarray) -> Tensor:
    """Copy `width` contiguous pixels from each index in `first_H`: uint8 `[H, 3 width]`.

    `pixels` is `[..., 3]`. index_select copies whole rows of a strided view of all windows.
    """
    count = pixels.numel() // 3 - width + 1
    return pixels.as_strided((count, 3 * width), (3, 1)).index_select(0, torch.from_numpy(first_H))


def tap_weights(d: Values, cubic: Values) -> tuple[Values, Values, Values, Values]:
    """Compute the weights of neighbors -1, 0, 1 and 2 for a point `d` past neighbor 0.

    `cubic` is 1, or 0 for bilinear weights (0, 1 - d, d, 0).
    Cubic convolution with a = -1 moves the weight d (1 - d)^2 from neighbor -1 to 0 and d^2 (1 - d)
    from neighbor 2 to 1.
    """
    e = 1 - d
    bend = cubic * d * e
    left, right = bend * e, bend * d
    return -left, e + left, d + right, -right


def warp_by_gather(
    image_NHWC: Tensor, matrix_N23: Tensor, cubic_N: Tensor, fill: tuple[int, int, int]
) -> Tensor:
    """Do the work of `warp_images` whatever the matrices are, in operations for all N at once."""
    N, H, W, _ = image_NHWC.shape
    device = image_NHWC.device
    red, green, blue = image_NHWC.unbind(-1)
    # One gather serves three channels.
    packed = torch.stack([red, green, blue, blue], -1).view(torch.int32).flatten()
    x_W, y_H = (torch.arange(side, dtype=torch.float32, device=device) + 0.5 for side in (W, H))
    y_H1 = y_H[:, None]
    along = matrix_N23[:, :, :, None, None]
    inside, axes = True, []
    for axis, extent in ((0, W), (1, H)):
        position = along[:, axis, 0] * x_W + along[:, axis, 1] * y_H1 + along[:, axis, 2]
        inside = (position >= 0) & (position < extent) & inside
        start = (position - 0.5).floor()
        first = start.int()
        index = [(first + tap).clamp_(0, extent - 1) for tap in range(-1, 3)]
        weights = tap_weights(position - 0.5 - start, cubic_N.view(N, 1, 1))
        axes.append(list(zip(index, weights, strict=True)))
    # R, 256 G and 65536 B: masking without a shift is one operation for all three, and float32
    # holds each exactly.
    unit = 1 << (torch.arange(3, dtype=torch.int32, device=device) * 8).view(3, 1, 1, 1)
    mask = 255 * unit
    total_3NHW = torch.zeros(3, N, H, W, dtype=torch.float32, device=device)
    before_N11 = torch.arange(N, dtype=torch.int32, device=device).view(N, 1, 1) * H
    for row, row_weight in axes[1]:
        # The rows of the images before this one.
        row += before_N11
        for column, column_weight in axes[0]:
            pixel_NHW = packed.index_select(0, (row * W + column).flatten()).view(N, H, W)
            total_3NHW.addcmul_((pixel_NHW & mask).float(), row_weight * column_weight)
    # Packed again, so that one `where` fills all three channels.
    color_3NHW = total_3NHW.mul_(1 / unit).add_(ALMOST).clamp_(0, 255).int() * unit
    packed_fill = fill[0] + fill[1] * 256 + fill[2] * 65536
    color_NHW = torch.where(inside, color_3NHW.sum(0, dtype=torch.int32), packed_fill)
    return torch.stack(color_NHW.view(torch.uint8).view(N, H, W, 4).unbind(-1)[:3], -1)

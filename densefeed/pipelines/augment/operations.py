"""The photometric operations of RandAugment and color jitter, by Pillow's definitions, and shifts.

They are batched and run on any device, without a host sync. Every operation takes uint8
`[N, H, W, 3]` and returns a new tensor of the same shape and dtype. Rounding follows Pillow's, so
the results equal Pillow's to the gray level (tests/pipelines/augment/test_operations.py). The bytes
of a row are processed as one line of 3 W numbers wherever possible: PyTorch's loops over an
innermost axis of three cost ten times as much on a CPU. For the same reason no `torch.where` on
bytes is used (0.65 ms for an image of 224 px; arithmetic takes 0.02 ms).
"""

import torch
from torch import Tensor

# N images   H, W pixels   L = 3 W bytes per row


def quantize_levels(value: Tensor) -> Tensor:
    """Convert floats to bytes as Pillow does: clip to [0, 255], then truncate. Overwrites `value`.

    Goes through int16: on a CPU its two conversions take half the time of one from float to byte.
    """
    return value.clamp_(0, 255).to(torch.int16).to(torch.uint8)


def apply_tables(image_NHWC: Tensor, table_NC256: Tensor) -> Tensor:
    """Map each byte through uint8 tables `[N, 3, 256]`, or `[N, 1, 256]` for all three channels."""
    index = _table_index(image_NHWC, table_NC256.shape[1])
    return table_NC256.flatten().index_select(0, index).view_as(image_NHWC)


def _table_index(image_NHWC: Tensor, channels: int) -> Tensor:
    """Compute the index of each byte's entry in tables `[N, channels, 256]`: int32 `[N H L]`."""
    index_NHL = image_NHWC.flatten(2).int()
    if channels == 3:
        index_NHL += _channel_of_byte(image_NHWC) * 256
    number_N = torch.arange(len(image_NHWC), dtype=torch.int32, device=image_NHWC.device)
    return index_NHL.add_(number_N.view(-1, 1, 1) * (256 * channels)).flatten()


def histogram(index: Tensor, size: int) -> Tensor:
    """Count as bincount does, without a host sync: int32 `[size]`.

    Deterministic, since sums of integers do not depend on their order.
    """
    count = torch.zeros(size, dtype=torch.int32, device=index.device)
    # The expanded 1 needs no memory for as many ones as there are bytes.
    return count.scatter_add_(0, index.long(), count.new_ones(1).expand_as(index))


def _channel_of_byte(image_NHWC: Tensor) -> Tensor:
    """Return the channel of each byte of a row: int32 0, 1, 2, 0, 1, ..."""
    return torch.arange(3 * image_NHWC.shape[2], dtype=torch.int32, device=image_NHWC.device) % 3


def _blend(degenerate: Tensor, image: Tensor, factor_N: Tensor) -> Tensor:
    """Blend float tensors of N rows as Pillow's Image.blend does.

    Factor 1 gives the image and 0 the degenerate image; above 1 it extrapolates.
    """
    factor = factor_N.view(-1, *[1] * (image.ndim - 1))
    return quantize_levels((image - degenerate).mul_(factor).add_(degenerate))


def _luma(image_NHWC: Tensor) -> Tensor:
    """Compute Pillow's L of each pixel: float32 `[N, H, L - 2]`, whole numbers.

    L = (19595 R + 38470 G + 7471 B + 32768) / 65536, truncated. The sum stays below 2^24, so
    float32 is exact. L is in the place of the pixel's first byte; the other places are 0.
    """
    channel_L = _channel_of_byte(image_NHWC)
    is_first_L, is_second_L = (channel_L == 0).float(), (channel_L == 1).float()
    weight_L = (7471 + (19595 - 7471) * is_first_L + (38470 - 7471) * is_second_L) * 2.0**-16
    part_NHL = image_NHWC.flatten(2).float().mul_(weight_L)
    sum_NHL = (part_NHL[..., :-2] + part_NHL[..., 1:-1]).add_(part_NHL[..., 2:])
    return sum_NHL.add_(0.5).floor_().mul_(is_first_L[:-2])


def auto_contrast(image_NHWC: Tensor, _: Tensor) -> Tensor:
    """Stretch each channel to [0, 255]; a flat one does not change."""
    # H is reduced first: W is contiguous.
    low_N3, high_N3 = image_NHWC.amin(1).amin(1).double(), image_NHWC.amax(1).amax(1).double()
    # Pillow computes the table in Python floats, which are float64.
    level = torch.arange(256, dtype=torch.float64, device=image_NHWC.device)
    span_N3 = (high_N3 - low_N3).clamp(min=1)
    # PyTorch computes 255 / x as a product with 1 / x, which rounds twice.
    scale_N3 = torch.full_like(span_N3, 255) / span_N3
    stretched = level * scale_N3[..., None] + (-low_N3 * scale_N3)[..., None]
    is_flat = (high_N3 == low_N3)[..., None]
    return apply_tables(image_NHWC, quantize_levels(torch.where(is_flat, level, stretched)))


def equalize(image_NHWC: Tensor, _: Tensor) -> Tensor:
    """Equalize each channel's histogram, with Pillow's integer steps.

    A channel of too few pixels does not change.
    """
    N, index = len(image_NHWC), _table_index(image_NHWC, 3)
    # On a GPU bincount would wait for the largest index.
    count = index.bincount(minlength=N * 768) if index.is_cpu else histogram(index, N * 768)
    count_N3256 = count.view(N, 3, 256).long()
    level = torch.arange(256, device=image_NHWC.device)
    brightest_N3 = (level * (count_N3256 > 0)).amax(-1, keepdim=True)
    step_N3 = (count_N3256.sum(-1, keepdim=True) - count_N3256.gather(-1, brightest_N3)) // 255
    darker_N3256 = count_N3256.cumsum(-1) - count_N3256
    even = ((step_N3 // 2 + darker_N3256) // step_N3.clamp(min=1)).clamp(max=255)
    table = torch.where(step_N3 == 0, level, even).to(torch.uint8)
    return table.flatten().index_select(0, index).view_as(image_NHWC)


def contrast(image_NHWC: Tensor, factor_N: Tensor) -> Tensor:
    """Blend with the mean of L, rounded to a whole number."""
    # The sum of a row is exact in float32; that of an image need not be.
    sum_N = _luma(image_NHWC).sum(2).double().sum(1)
    mean_N = (sum_N / (image_NHWC.shape[1] * image_NHWC.shape[2]) + 0.5).floor().float()
    level = torch.arange(256, dtype=torch.float32, device=image_NHWC.device)[None]
    return apply_tables(image_NHWC, _blend(mean_N[:, None], level, factor_N)[:, None])


def color(image_NHWC: Tensor, factor_N: Tensor) -> Tensor:
    """Blend with L."""
    first_NHL = _luma(image_NHWC)
    luma_NHL = torch.nn.functional.pad(first_NHL, (0, 2))
    luma_NHL[..., 1:-1] += first_NHL
    luma_NHL[..., 2:] += first_NHL
    return _blend(luma_NHL, image_NHWC.flatten(2).float(), factor_N).view_as(image_NHWC)


def sharpness(image_NHWC: Tensor, factor_N: Tensor) -> Tensor:
    """Blend with the image smoothed by (1 1 1, 1 5 1, 1 1 1) / 13, except the outermost pixels."""
    # So small an image has outermost pixels only.
    if min(image_NHWC.shape[1:3]) < 3:
        return image_NHWC.clone()
    byte_NHL = image_NHWC.flatten(2)
    # int16 holds the largest sum, 13 x 255 = 3,315.
    value = byte_NHL.short()
    column = value[:, :-2] + value[:, 1:-1] + value[:, 2:]
    center = value[:, 1:-1, 3:-3]
    total = column[..., :-6] + column[..., 3:-3] + column[..., 6:] + 4 * center
    # total / 13 is at least 1 / 26 away from any half, so rounding in float32 is exact.
    smooth = total.float().mul_(1 / 13).add_(0.5).floor_()
    out = byte_NHL.clone()
    out[:, 1:-1, 3:-3] = _blend(smooth, center.float(), factor_N)
    return out.view_as(image_NHWC)


def gaussian_blur(image_NHWC: Tensor, radius_N: Tensor) -> Tensor:
    """Blur as Pillow's GaussianBlur up to radius 2.

    Three box blurs run along rows, then three along columns, each rounded to bytes. Gwosdek et al.,
    "Theoretical foundations of Gaussian convolution by extended box filtering" (2011): a box of
    2 l + 1 pixels whose two neighbors have fractional weight. Up to radius 2 the box has one pixel
    or three.
    """
    squared_N = radius_N.double() ** 2
    # l, with sigma^2 = radius^2 / 3 for each of three passes
    whole_N = (((squared_N * 4 + 1).sqrt() - 1) / 2).floor()
    width_N = 2 * whole_N + 1
    excess_N = whole_N * (whole_N + 1) - squared_N
    edge_N = width_N * excess_N / (2 * (squared_N - 3 * (whole_N + 1) ** 2))
    # Pillow's weights are multiples of 2^-24, which decides the many ties: at radius 1 the weights
    # are near 1/6, 2/3, 1/6.
    inner_N = (2.0**24 / (width_N + 2 * edge_N).float()).double().floor()
    outer_N = ((2**24 - width_N * inner_N) / 2).floor()
    near_N, far_N = torch.where(whole_N > 0, inner_N, outer_N), torch.where(whole_N > 0, outer_N, 0)
    weights = [weight_N.view(-1, 1, 1, 1) for weight_N in (far_N, near_N, inner_N, near_N, far_N)]
    # float32 could not hold the sums of bytes times weights of 24 bits.
    image = image_NHWC.double()
    for axis in (2, 2, 2, 1, 1, 1):
        extent = image.shape[axis]
        beyond = torch.arange(-2, extent + 2, device=image.device).clamp(0, extent - 1)
        wider = image.index_select(axis, beyond)
        total = sum(weight * wider.narrow(axis, at, extent) for at, weight in enumerate(weights))
        # 2^23 is a half: Pillow rounds to bytes after each of the six passes.
        image = total.add_(2**23).mul_(2.0**-24).floor_()
    return quantize_levels(image)


def hue(image_NHWC: Tensor, turn_N: Tensor) -> Tensor:
    """Shift the hue of Pillow's HSV, a byte, by the whole part of 255 `turn_N`, modulo 256."""
    red, green, blue = image_NHWC.double().unbind(-1)
    value, least = image_NHWC.amax(-1).double(), image_NHWC.amin(-1).double()
    span = (value - least).clamp(min=1)
    # Pillow computes in double, stores float and truncates: rounding can change a whole level.
    far_red, far_green, far_blue = (
        ((value - channel) / span).float().double() for channel in (red, green, blue)
    )
    # The largest channel selects the sector of the circle; of equal channels the first counts.
    angle = torch.where(green == value, 2 + far_red - far_blue, 4 + far_green - far_red)
    angle = torch.where(red == value, far_blue - far_green, angle).float().double()
    hue_NHW = (((angle / 6 + 1) % 1).float().double() * 255).floor()
    saturation = ((span / value.clamp(min=1)).float().double() * 255).floor() / 255
    # `span` is clamped to 1, so a gray pixel needs its own case.
    saturation = torch.where(value == least, 0, saturation)
    angle = (hue_NHW + (turn_N.double() * 255).trunc().view(-1, 1, 1)) % 256 * 6 / 255
    sector = angle.floor()
    part = angle - sector
    down, falling, rising = (value * (1 - saturation * share) for share in (1, part, 1 - part))
    # Red by sector; green is two sectors later, blue four.
    reds = torch.stack([value, falling, down, down, rising, value])
    channels = [reds.gather(0, ((sector + turn) % 6).long()[None])[0] for turn in (0, 4, 2)]
    return quantize_levels(torch.stack(channels, -1).add_(0.5))


def shift_rows_black(image_NHWC: Tensor, step_N: Tensor) -> Tensor:
    """Show row y + `step_N`, a whole number, at row y: black where the image has no such row."""
    N, H = image_NHWC.shape[:2]
    row_NH = torch.arange(H, device=image_NHWC.device) + step_N.long()[:, None]
    near_NH = row_NH.clamp(0, H - 1)
    number_N1 = torch.arange(N, device=image_NHWC.device)[:, None]
    is_inside_NH = (row_NH == near_NH).to(torch.uint8)
    return image_NHWC[number_N1, near_NH] * is_inside_NH[:, :, None, None]


def shift_columns_black(image_NHWC: Tensor, step_N: Tensor) -> Tensor:
    """Do the work of `shift_rows_black` on columns."""
    return shift_rows_black(image_NHWC.transpose(1, 2), step_N).transpose(1, 2)


OPERATIONS = {
    "AutoContrast": auto_contrast,
    "Equalize": equalize,
    "Contrast": contrast,
    "Color": color,
    "Sharpness": sharpness,
    "GaussianBlur": gaussian_blur,
    "Hue": hue,
    "ShiftX": shift_columns_black,
    "ShiftY": shift_rows_black,
}

"""What RandAugment and color jitter do to pixels: Pillow's definitions, batched, on any device,
without a wait for it.

Every operation takes uint8 `[N, H, W, 3]` and gives the same, a new tensor. Pillow's own rounding
is followed, so all but the resampled ones equal it to the gray level
(tests/pipelines/augment/test_operations.py). Bytes of a row are worked on as one line of 3 W
numbers wherever possible: PyTorch's loops over an innermost axis of three cost ten times as much on
a CPU. For the same reason nothing here is a `torch.where` on bytes (0.65 ms for an image of 224 px;
arithmetic takes 0.02 ms).
"""

import torch
from torch import Tensor

# N images   H, W pixels   L = 3 W bytes of a row


def quantize_levels(value: Tensor) -> Tensor:
    """Pillow's way back to bytes: clipped to [0, 255], then truncated. Overwrites `value`.

    By way of int16, which a CPU converts to and from twice as fast as it goes from float to byte.
    """
    return value.clamp_(0, 255).to(torch.int16).to(torch.uint8)


def apply_tables(image_NHWC: Tensor, table_NC256: Tensor) -> Tensor:
    """Each byte replaced by its table's: uint8 tables `[N, 3, 256]`, or `[N, 1, 256]` for all three
    channels.
    """
    index = _table_index(image_NHWC, table_NC256.shape[1])
    return table_NC256.flatten().index_select(0, index).view_as(image_NHWC)


def _table_index(image_NHWC: Tensor, channels: int) -> Tensor:
    """Where each byte stands in tables `[N, channels, 256]`: int32 `[N H L]`."""
    index_NHL = image_NHWC.flatten(2).int()
    if channels == 3:
        index_NHL += _channel_of_byte(image_NHWC) * 256
    number_N = torch.arange(len(image_NHWC), dtype=torch.int32, device=image_NHWC.device)
    return index_NHL.add_(number_N.view(-1, 1, 1) * (256 * channels)).flatten()


def histogram(index: Tensor, size: int) -> Tensor:
    """bincount without a wait for a GPU: int32 `[size]`. Whole numbers add up the same in any
    order, so it is deterministic.
    """
    one = torch.ones(1, dtype=torch.int32, device=index.device).expand_as(index)
    return torch.zeros(size, dtype=torch.int32, device=index.device).scatter_add_(
        0, index.long(), one
    )


def _channel_of_byte(image_NHWC: Tensor) -> Tensor:
    """Which channel a byte of a row belongs to: int32 0, 1, 2, 0, 1, ..."""
    return torch.arange(3 * image_NHWC.shape[2], dtype=torch.int32, device=image_NHWC.device) % 3


def _blended(degenerate: Tensor, image: Tensor, factor_N: Tensor) -> Tensor:
    """Pillow's Image.blend of float tensors of N rows: the image at factor 1, the degenerate one at
    0, beyond it above 1.
    """
    return quantize_levels(
        (image - degenerate).mul_(factor_N.view(-1, *[1] * (image.ndim - 1))).add_(degenerate)
    )


def _luma(image_NHWC: Tensor) -> Tensor:
    """Pillow's L of each pixel in the place of its first byte, 0 in those of the others: float32
    `[N, H, L - 2]`, whole numbers.

    L = (19595 R + 38470 G + 7471 B + 32768) / 65536, truncated. The sum stays below 2^24, so
    float32 is exact.
    """
    channel_L = _channel_of_byte(image_NHWC)
    is_first_L, is_second_L = (channel_L == 0).float(), (channel_L == 1).float()
    weight_L = (7471 + (19595 - 7471) * is_first_L + (38470 - 7471) * is_second_L) * 2.0**-16
    part_NHL = image_NHWC.flatten(2).float().mul_(weight_L)
    return (
        (part_NHL[..., :-2] + part_NHL[..., 1:-1])
        .add_(part_NHL[..., 2:])
        .add_(0.5)
        .floor_()
        .mul_(is_first_L[:-2])
    )


def auto_contrast(image_NHWC: Tensor, _: Tensor) -> Tensor:
    """Each channel stretched to [0, 255]; a flat one stays as it is."""
    # H first: W is contiguous
    low_N3, high_N3 = (image_NHWC.amin(1).amin(1).double(), image_NHWC.amax(1).amax(1).double())
    level = torch.arange(256, dtype=torch.float64, device=image_NHWC.device)
    span_N3 = (high_N3 - low_N3).clamp(min=1)
    # PyTorch makes 255 / x a product with 1 / x, which rounds twice
    scale_N3 = torch.full_like(span_N3, 255) / span_N3
    stretched = level * scale_N3[..., None] + (-low_N3 * scale_N3)[..., None]
    is_flat = (high_N3 == low_N3)[..., None]
    return apply_tables(image_NHWC, quantize_levels(torch.where(is_flat, level, stretched)))


def equalize(image_NHWC: Tensor, _: Tensor) -> Tensor:
    """Each channel's histogram made even, with Pillow's whole-number steps; a channel of too few
    pixels stays as it is.
    """
    N, index = len(image_NHWC), _table_index(image_NHWC, 3)
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
    # a row's sum is exact in float32, an image's need not be
    sum_N = _luma(image_NHWC).sum(2).double().sum(1)
    mean_N = (sum_N / (image_NHWC.shape[1] * image_NHWC.shape[2]) + 0.5).floor().float()
    level = torch.arange(256, dtype=torch.float32, device=image_NHWC.device).expand(
        len(image_NHWC), 256
    )
    return apply_tables(image_NHWC, _blended(mean_N[:, None], level, factor_N)[:, None])


def color(image_NHWC: Tensor, factor_N: Tensor) -> Tensor:
    """Blend with L."""
    first_NHL = _luma(image_NHWC)
    luma_NHL = torch.nn.functional.pad(first_NHL, (0, 2))
    luma_NHL[..., 1:-1] += first_NHL
    luma_NHL[..., 2:] += first_NHL
    return _blended(luma_NHL, image_NHWC.flatten(2).float(), factor_N).view_as(image_NHWC)


def sharpness(image_NHWC: Tensor, factor_N: Tensor) -> Tensor:
    """Blend with the image smoothed by (1 1 1, 1 5 1, 1 1 1) / 13; the outermost pixels stay as
    they are.
    """
    if min(image_NHWC.shape[1:3]) < 3:
        return image_NHWC.clone()
    byte_NHL = image_NHWC.flatten(2)
    value = byte_NHL.short()  # 13 x 255 fits
    column = value[:, :-2] + value[:, 1:-1] + value[:, 2:]
    center = value[:, 1:-1, 3:-3]
    total = column[..., :-6] + column[..., 3:-3] + column[..., 6:] + 4 * center
    # total / 13 is never half a number, nor nearer to it than 1 / 26.
    smooth = total.float().mul_(1 / 13).add_(0.5).floor_()
    out = byte_NHL.clone()
    out[:, 1:-1, 3:-3] = _blended(smooth, center.float(), factor_N)
    return out.view_as(image_NHWC)


def gaussian_blur(image_NHWC: Tensor, radius_N: Tensor) -> Tensor:
    """Pillow's GaussianBlur up to radius 2: three box blurs along rows, then three along columns,
    each rounded to bytes.

    Gwosdek et al., "Theoretical foundations of Gaussian convolution by extended box filtering"
    (2011): a box of 2 l + 1 pixels whose two neighbors count in part. Up to radius 2 the box has
    one pixel or three.
    """
    squared_N = radius_N.double() ** 2
    # l, with sigma^2 = radius^2 / 3 for each of three passes
    whole_N = (((squared_N * 4 + 1).sqrt() - 1) / 2).floor()
    width_N = 2 * whole_N + 1
    edge_N = (
        width_N * (whole_N * (whole_N + 1) - squared_N) / (2 * (squared_N - 3 * (whole_N + 1) ** 2))
    )
    # Pillow weighs in whole 2^-24, which decides the many ties: at radius 1 the weights are near
    # 1/6, 2/3, 1/6.
    inner_N = (2.0**24 / (width_N + 2 * edge_N).float()).double().floor()
    outer_N = ((2**24 - width_N * inner_N) / 2).floor()
    near_N, far_N = torch.where(whole_N > 0, inner_N, outer_N), torch.where(whole_N > 0, outer_N, 0)
    weights = [weight_N.view(-1, 1, 1, 1) for weight_N in (far_N, near_N, inner_N, near_N, far_N)]
    image = image_NHWC.double()
    for axis in (2, 2, 2, 1, 1, 1):
        extent = image.shape[axis]
        beyond = torch.arange(-2, extent + 2, device=image.device).clamp(0, extent - 1)
        wider = image.index_select(axis, beyond)
        total = sum(weight * wider.narrow(axis, at, extent) for at, weight in enumerate(weights))
        image = total.add_(2**23).mul_(2.0**-24).floor_()
    return quantize_levels(image)


def hue(image_NHWC: Tensor, turn_N: Tensor) -> Tensor:
    """The hue of Pillow's HSV, a byte, moved by 255 `turn_N` (truncated to a whole number), round
    the circle.
    """
    red, green, blue = image_NHWC.double().unbind(-1)
    value, least = image_NHWC.amax(-1).double(), image_NHWC.amin(-1).double()
    span = (value - least).clamp(min=1)
    # Pillow keeps what it computes in double as float; a hue is a truncated number, so that decides
    # about whole grays.
    far_red, far_green, far_blue = (
        ((value - channel) / span).float().double() for channel in (red, green, blue)
    )
    # The sixth of the circle follows the greatest channel; the first of equal ones counts.
    angle = torch.where(green == value, 2 + far_red - far_blue, 4 + far_green - far_red)
    angle = torch.where(red == value, far_blue - far_green, angle).float().double()
    hue_NHW = (((angle / 6 + 1) % 1).float().double() * 255).floor()
    saturation = ((span / value.clamp(min=1)).float().double() * 255).floor() / 255
    saturation = torch.where(value == least, 0, saturation)
    angle = (hue_NHW + (turn_N.double() * 255).trunc().view(-1, 1, 1)) % 256 * 6 / 255
    sector = angle.floor()
    part = angle - sector
    down, falling, rising = (
        value * (1 - saturation * share) for share in (torch.ones_like(part), part, 1 - part)
    )
    # by sector; green's are two sectors on, blue's four
    reds = torch.stack([value, falling, down, down, rising, value])
    channels = [reds.gather(0, ((sector + turn) % 6).long()[None])[0] for turn in (0, 4, 2)]
    return quantize_levels(torch.stack(channels, -1).add_(0.5))


OPERATIONS = {
    "AutoContrast": auto_contrast,
    "Equalize": equalize,
    "Contrast": contrast,
    "Color": color,
    "Sharpness": sharpness,
    "GaussianBlur": gaussian_blur,
    "Hue": hue,
}

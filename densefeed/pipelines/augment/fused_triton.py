"""The kernels of fused augmentation in Triton; fused.py launches them.

Each computes the bytes of its PyTorch twin (operations.py, warp.py, augmentation.py): sums and
products in the twin's order, each rounded by itself. So `launch` forbids fused multiply-adds, and
divisions are those of IEEE 754, which float64 has without asking.
"""

import torch
import triton
import triton.language as tl

from densefeed.pipelines.augment.settings import CODES, TABLES

# Codes of the operations, see settings.CODES; those up to CONTRAST are tables of 256 bytes.
NUM_TABLES = tl.constexpr(len(TABLES))
AUTO_CONTRAST = tl.constexpr(CODES["AutoContrast"])
CONTRAST = tl.constexpr(CODES["Contrast"])
COLOR = tl.constexpr(CODES["Color"])
SHARPNESS = tl.constexpr(CODES["Sharpness"])
HUE = tl.constexpr(CODES["Hue"])
# Pixels that a program of a pointwise kernel handles, and of one that counts all of an image.
BLOCK = 1024
COUNT_BLOCK = 4096
# Samples of a program that composes Views.
VIEWS = 128


@triton.jit
def quantize(value):
    """Clip to [0, 255] and truncate."""
    return tl.minimum(tl.maximum(value, 0.0), 255.0).to(tl.int32)


@triton.jit
def blend(degenerate, value, factor):
    """Blend float32 values as Pillow's Image.blend does."""
    return quantize((value - degenerate) * factor + degenerate)


@triton.jit
def luma(red, green, blue):
    """Compute Pillow's L of int32 channels."""
    return (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16


@triton.jit
def table_kernel(image, entry, code, argument, given, tables, pixels, PIXELS: tl.constexpr):
    """Write the table of one channel of one sample, if its operation is one by table."""
    sample, channel = tl.program_id(0), tl.program_id(1)
    at = tl.load(entry + sample)
    name = tl.load(code + at, mask=at >= 0, other=CONTRAST + 1)
    image += sample.to(tl.int64) * pixels * 3
    level = tl.arange(0, 256)
    out = tables + (sample * 3 + channel) * 256 + level
    if name < NUM_TABLES:
        tl.store(out, tl.load(given + at * 256 + level))
    elif name == CONTRAST:
        total = tl.zeros([1], tl.int64)
        for start in range(0, pixels, PIXELS):
            pixel = start + tl.arange(0, PIXELS)
            first, inside = image + pixel * 3, pixel < pixels
            red = tl.load(first, mask=inside, other=0).to(tl.int32)
            green = tl.load(first + 1, mask=inside, other=0).to(tl.int32)
            blue = tl.load(first + 2, mask=inside, other=0).to(tl.int32)
            # A pixel beyond the image is black, whose L is 0.
            total += tl.sum(luma(red, green, blue), 0)
        # The mean, rounded half up.
        mean = ((2 * total + pixels) // (2 * pixels)).to(tl.float32)
        tl.store(out, blend(mean, level.to(tl.float32), tl.load(argument + at)).to(tl.uint8))
    elif name < CONTRAST:
        count = tl.zeros([256], tl.int32)
        for start in range(0, pixels, PIXELS):
            pixel = start + tl.arange(0, PIXELS)
            inside = pixel < pixels
            value = tl.load(image + pixel * 3 + channel, mask=inside, other=0).to(tl.int32)
            count += tl.histogram(value, 256, mask=inside)
        high = tl.max(tl.where(count > 0, level, 0), 0)
        if name == AUTO_CONTRAST:
            low = tl.min(tl.where(count > 0, level, 255), 0)
            scale = tl.full([1], 255, tl.float64) / tl.maximum(high - low, 1).to(tl.float64)
            stretched = level.to(tl.float64) * scale + (-low).to(tl.float64) * scale
            tl.store(out, tl.where(high == low, level, quantize(stretched)).to(tl.uint8))
        else:
            step = (pixels - tl.sum(tl.where(level == high, count, 0), 0)) // 255
            darker = tl.cumsum(count, 0) - count
            even = tl.minimum((step // 2 + darker) // tl.maximum(step, 1), 255)
            tl.store(out, tl.where(step == 0, level, even).to(tl.uint8))


@triton.jit
def hue_channel(sector, turn: tl.constexpr, value, falling, down, rising):
    """Compute the channel whose value red had `turn` sectors of the circle earlier."""
    at = (sector + turn) % 6
    low = tl.where(at == 1, falling, tl.where(at == 4, rising, down))
    return quantize(tl.where((at == 0) | (at == 5), value, low) + 0.5)


@triton.jit
def shift_hue(red, green, blue, turn):
    """Shift the hue of int32 channels in the steps of operations.hue: float64, rounded alike."""
    most, least = tl.maximum(tl.maximum(red, green), blue), tl.minimum(tl.minimum(red, green), blue)
    value = most.to(tl.float64)
    span = tl.maximum(most - least, 1).to(tl.float64)
    far_red = ((most - red).to(tl.float64) / span).to(tl.float32).to(tl.float64)
    far_green = ((most - green).to(tl.float64) / span).to(tl.float32).to(tl.float64)
    far_blue = ((most - blue).to(tl.float64) / span).to(tl.float32).to(tl.float64)
    angle = tl.where(green == most, 2 + far_red - far_blue, 4 + far_green - far_red)
    angle = tl.where(red == most, far_blue - far_green, angle).to(tl.float32).to(tl.float64)
    turned = angle / 6 + 1
    share = (turned - tl.floor(turned)).to(tl.float32).to(tl.float64)
    ratio = (span / tl.maximum(value, 1)).to(tl.float32).to(tl.float64)
    saturation = tl.where(most == least, 0.0, tl.floor(ratio * 255) / 255)
    whole = (turn.to(tl.float64) * 255).to(tl.int32)
    angle = ((share * 255).to(tl.int32) + whole & 255).to(tl.float64) * 6 / 255
    sector = angle.to(tl.int32)
    part = angle - sector
    down = value * (1 - saturation)
    falling, rising = value * (1 - saturation * part), value * (1 - saturation * (1 - part))
    return (
        hue_channel(sector, 0, value, falling, down, rising),
        hue_channel(sector, 4, value, falling, down, rising),
        hue_channel(sector, 2, value, falling, down, rising),
    )


@triton.jit
def sharpen(image, pixel, channel: tl.constexpr, height, width, factor):
    """Sharpen one channel as operations.sharpness does."""
    x, y = pixel % width, pixel // width
    inner = (x > 0) & (x < width - 1) & (y > 0) & (y < height - 1)
    center_at = image + pixel * 3 + channel
    center = tl.load(center_at, mask=y < height, other=0).to(tl.int32)
    total = 4 * center
    for dy in tl.static_range(-1, 2):
        for dx in tl.static_range(-1, 2):
            near = tl.load(center_at + (dy * width + dx) * 3, mask=inner, other=0)
            total += near.to(tl.int32)
    # total / 13, rounded; it is never a half.
    smooth = (2 * total + 13) // 26
    sharp = blend(smooth.to(tl.float32), center.to(tl.float32), factor)
    return tl.where(inner, sharp, center)


@triton.jit
def photometric_kernel(
    image, out, entry, code, argument, tables, height, width, PIXELS: tl.constexpr
):
    """Apply each sample's operation to a block of its pixels; without one, copy them."""
    sample, pixels = tl.program_id(0), height * width
    at = tl.load(entry + sample)
    name = tl.load(code + at, mask=at >= 0, other=-1)
    factor = tl.load(argument + at, mask=at >= 0, other=0.0)
    before = sample.to(tl.int64) * pixels * 3
    image, out = image + before, out + before
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    inside = pixel < pixels
    red = tl.load(image + pixel * 3, mask=inside, other=0).to(tl.int32)
    green = tl.load(image + pixel * 3 + 1, mask=inside, other=0).to(tl.int32)
    blue = tl.load(image + pixel * 3 + 2, mask=inside, other=0).to(tl.int32)
    if (name >= 0) & (name <= CONTRAST):
        tables += sample * 768
        red = tl.load(tables + red).to(tl.int32)
        green = tl.load(tables + 256 + green).to(tl.int32)
        blue = tl.load(tables + 512 + blue).to(tl.int32)
    elif name == COLOR:
        gray = luma(red, green, blue).to(tl.float32)
        red = blend(gray, red.to(tl.float32), factor)
        green = blend(gray, green.to(tl.float32), factor)
        blue = blend(gray, blue.to(tl.float32), factor)
    elif name == SHARPNESS:
        red = sharpen(image, pixel, 0, height, width, factor)
        green = sharpen(image, pixel, 1, height, width, factor)
        blue = sharpen(image, pixel, 2, height, width, factor)
    elif name == HUE:
        red, green, blue = shift_hue(red, green, blue, factor)
    tl.store(out + pixel * 3, red.to(tl.uint8), mask=inside)
    tl.store(out + pixel * 3 + 1, green.to(tl.uint8), mask=inside)
    tl.store(out + pixel * 3 + 2, blue.to(tl.uint8), mask=inside)


@triton.jit
def tap_weight(tap, d, cubic):
    """Compute the weight of neighbor `tap`, from -1 to 2: one of warp.tap_weights."""
    e = 1 - d
    bend = cubic * d * e
    left, right = bend * e, bend * d
    inner = tl.where(tap == 0, e + left, d + right)
    return tl.where(tap == -1, -left, tl.where(tap == 2, -right, inner))


@triton.jit
def warp_kernel(
    image,
    out,
    number,
    matrix,
    cubics,
    height,
    width,
    fill_red,
    fill_green,
    fill_blue,
    almost,
    PIXELS: tl.constexpr,
):
    """Warp a block of pixels of a sample; copy it if the sample is not warped."""
    sample, pixels = tl.program_id(0), height * width
    at = tl.load(number + sample)
    before = sample.to(tl.int64) * pixels * 3
    image, out = image + before, out + before
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    exists = pixel < pixels
    if at < 0:
        for channel in tl.static_range(3):
            byte = tl.load(image + pixel * 3 + channel, mask=exists, other=0)
            tl.store(out + pixel * 3 + channel, byte, mask=exists)
    else:
        matrix += at * 6
        xx, xy, x0 = tl.load(matrix), tl.load(matrix + 1), tl.load(matrix + 2)
        yx, yy, y0 = tl.load(matrix + 3), tl.load(matrix + 4), tl.load(matrix + 5)
        cubic = tl.load(cubics + at)
        column, row = (pixel % width).to(tl.float32) + 0.5, (pixel // width).to(tl.float32) + 0.5
        x, y = xx * column + xy * row + x0, yx * column + yy * row + y0
        inside = exists & (x >= 0) & (x < width) & (y >= 0) & (y < height)
        x_start, y_start = tl.floor(x - 0.5), tl.floor(y - 0.5)
        x_past, y_past = x - 0.5 - x_start, y - 0.5 - y_start
        # Neighbors with the weight 0 are not read: -1 and 2 where it is bilinear, all but 0 along
        # an axis that the map keeps.
        reach = cubic.to(tl.int32)
        x_keeps, y_keeps = (xx == 1) & (xy == 0) & (x0 == 0), (yx == 0) & (yy == 1) & (y0 == 0)
        x_low, x_end = tl.where(x_keeps, 0, -reach), tl.where(x_keeps, 1, 2 + reach)
        y_low, y_end = tl.where(y_keeps, 0, -reach), tl.where(y_keeps, 1, 2 + reach)
        red = tl.zeros([PIXELS], tl.float32)
        green, blue = red, red
        for y_tap in range(y_low, y_end):
            near_row = tl.minimum(tl.maximum(y_start.to(tl.int32) + y_tap, 0), height - 1)
            y_weight = tap_weight(y_tap, y_past, cubic)
            for x_tap in range(x_low, x_end):
                near = tl.minimum(tl.maximum(x_start.to(tl.int32) + x_tap, 0), width - 1)
                weight = y_weight * tap_weight(x_tap, x_past, cubic)
                first = image + (near_row * width + near) * 3
                red += tl.load(first, mask=inside, other=0).to(tl.float32) * weight
                green += tl.load(first + 1, mask=inside, other=0).to(tl.float32) * weight
                blue += tl.load(first + 2, mask=inside, other=0).to(tl.float32) * weight
        first = out + pixel * 3
        red = tl.where(inside, quantize(red + almost), fill_red)
        green = tl.where(inside, quantize(green + almost), fill_green)
        blue = tl.where(inside, quantize(blue + almost), fill_blue)
        tl.store(first, red.to(tl.uint8), mask=exists)
        tl.store(first + 1, green.to(tl.uint8), mask=exists)
        tl.store(first + 2, blue.to(tl.uint8), mask=exists)


@triton.jit
def normalize_kernel(
    image,
    out,
    scale,
    shift,
    boxes,
    noise,
    height,
    width,
    NUMBERS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Normalize a block of numbers of a sample and fill its box with noise, in NHWC memory.

    The output has CHANNELS channels; those after the third are 0.
    """
    sample, pixels = tl.program_id(0).to(tl.int64), height * width
    number = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    inside = number < pixels * CHANNELS
    pixel, channel = number // CHANNELS, number % CHANNELS
    x, y = pixel % width, pixel // width
    seen = inside & (channel < 3)
    byte = image + sample * pixels * 3 + pixel * 3 + channel
    value = tl.load(byte, mask=seen, other=0).to(tl.float32)
    # One rounding, as in torch.addcmul on a GPU.
    factor = tl.load(scale + channel, mask=seen, other=0.0)
    value = tl.fma(value, factor, tl.load(shift + channel, mask=seen, other=0.0))
    edge = boxes + sample * 5
    top, left = tl.load(edge), tl.load(edge + 1)
    tall, wide = tl.load(edge + 2), tl.load(edge + 3)
    erased = (y >= top) & (y < top + tall) & (x >= left) & (x < left + wide) & seen
    place = ((y - top) * wide + x - left) * 3 + channel
    at = noise + tl.load(edge + 4)
    value = tl.where(erased, tl.load(at + place, mask=erased, other=0.0), value)
    to = out + sample * pixels * CHANNELS + number
    tl.store(to, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def view_kernel(view, out, number, matrix, samples, BLOCK_N: tl.constexpr):
    """Compose the Views of BLOCK_N samples with their warps; without one, copy them."""
    sample = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = sample < samples
    at = tl.load(number + sample, mask=inside, other=-1)
    warped = at >= 0
    matrix += at * 6
    for axis in tl.static_range(2):
        row = view + sample * 6 + axis * 3
        x, y, one = (
            tl.load(row, mask=inside),
            tl.load(row + 1, mask=inside),
            tl.load(row + 2, mask=inside),
        )
        for column in tl.static_range(3):
            first = tl.load(matrix + column, mask=warped, other=0.0)
            second = tl.load(matrix + 3 + column, mask=warped, other=0.0)
            composed = x * first + y * second
            if column == 2:
                composed += one
            old = x if column == 0 else y if column == 1 else one
            new = tl.where(warped, composed, old)
            tl.store(out + sample * 6 + axis * 3 + column, new, mask=inside)


def launch(kernel: triton.JITFunction, grid: tuple[int, ...], *arguments, **constants) -> None:
    """Run a kernel on the device of its first tensor, without fused multiply-adds."""
    # Triton launches on the current device. A fused multiply-add rounds once, the twin twice.
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **constants, enable_fp_fusion=False)

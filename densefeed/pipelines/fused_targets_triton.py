"""The kernels of sparse targets in Triton; fused_targets.py launches them.

The formulas are those of targets.py, which writes a map over its whole palette and samples that.
Here a sample adds the k classes of its four cells to their slots, so no such map exists.
"""

import torch
import triton
import triton.language as tl

# Cells, entries or classes that a program handles at a time.
BLOCK = tl.constexpr(1024)
# Columns of `place`: to the image and to the map [2, 3], the part of the image that is visible and
# the cells that show it, both first and last along x and y, and the weight of the image.
THROUGH, VISIBLE, CELLS, WEIGHT, PLACE = (tl.constexpr(n) for n in (6, 12, 16, 20, 21))


@triton.jit
def palette_kernel(
    map_class,
    map_logit,
    map_lse,
    rank,
    palette,
    slot,
    value,
    share,
    cells,
    top_k,
    classes,
    size,
    temperature,
    TAIL: tl.constexpr,
    BACKGROUND: tl.constexpr,
    SOFTENED: tl.constexpr,
):
    """Write an image's palette, the slot of every entry, its value, and the share of the others.

    `rank` is memory for a number per class: 1 where the map has it, then its place among those.
    """
    image = tl.program_id(0).to(tl.int64)
    rank += image * classes
    palette += image * size
    map_class += image * cells * top_k
    slot += image * cells * top_k
    for start in range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(rank + column, 0, mask=column < classes)
    # This is __syncthreads, here and below: other threads read what these have written.
    tl.debug_barrier()
    for start in range(0, cells * top_k, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        name = tl.load(map_class + entry, mask=entry < cells * top_k, other=0).to(tl.int32)
        # Loaders refuse a class beyond the data's; here it must not be written beyond the memory.
        tl.store(rank + name, 1, mask=(entry < cells * top_k) & (name < classes))
    tl.debug_barrier()
    found = 0
    for start in range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK)
        named = tl.load(rank + column, mask=column < classes, other=0)
        place = found + tl.cumsum(named, 0) - 1
        tl.store(rank + column, place, mask=column < classes)
        tl.store(palette + place, column.to(tl.int64), mask=(named == 1) & (place < size))
        found += tl.sum(named, 0)
    for start in range(0, size, BLOCK):
        unused = start + tl.arange(0, BLOCK)
        tl.store(palette + unused, 0, mask=(unused >= found) & (unused < size))
    tl.debug_barrier()
    for start in range(0, cells * top_k, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < cells * top_k
        name = tl.load(map_class + entry, mask=inside, other=0).to(tl.int32)
        place = tl.load(rank + name, mask=inside & (name < classes), other=-1)
        tl.store(slot + entry, place, mask=inside)
    # The entries as they are pooled: `palette_maps` and `apply_temperature`.
    for start in range(0, cells, BLOCK):
        cell = start + tl.arange(0, BLOCK)
        inside = cell < cells
        cell += image * cells
        first = cell * top_k
        if TAIL:
            others = classes - top_k
            lse = tl.load(map_lse + cell, mask=inside, other=0.0).to(tl.float32)
            kept = tl.zeros_like(lse)
            peak = kept - float("inf")
            for j in range(top_k):
                log_probability = tl.load(map_logit + first + j, mask=inside, other=0.0) - lse
                kept += tl.exp(log_probability)
                peak = tl.maximum(peak, log_probability)
            scale = 1 / tl.where((others > 0) | BACKGROUND, tl.maximum(kept, 1.0), kept)
            total = kept * scale
            spread = tl.maximum(1 - total, 0.0) / tl.maximum(others, 1)
            if BACKGROUND:
                spread = tl.zeros_like(total)
            tl.store(share + cell, spread, mask=inside)
            softened = tl.zeros_like(lse)
            if SOFTENED:
                for j in range(top_k):
                    log_probability = tl.load(map_logit + first + j, mask=inside, other=0.0) - lse
                    softened += tl.exp((log_probability - peak) / temperature)
            for j in range(top_k):
                log_probability = tl.load(map_logit + first + j, mask=inside, other=0.0) - lse
                if SOFTENED:
                    probability = total * tl.exp((log_probability - peak) / temperature) / softened
                else:
                    probability = tl.exp(log_probability) * scale
                tl.store(value + first + j, probability - spread, mask=inside)
        else:
            for j in range(top_k):
                logit = tl.load(map_logit + first + j, mask=inside, other=0.0).to(tl.float32)
                tl.store(value + first + j, logit / temperature, mask=inside)


@triton.jit
def to_axes(matrix, x, y):
    """Apply a matrix `[2, 3]` to points."""
    return (
        tl.load(matrix) * x + tl.load(matrix + 1) * y + tl.load(matrix + 2),
        tl.load(matrix + 3) * x + tl.load(matrix + 4) * y + tl.load(matrix + 5),
    )


@triton.jit
def is_between(points, ends, margin):
    """Test whether points lie between two numbers in memory, or at most `margin` outside."""
    return (points > tl.load(ends) - margin) & (points < tl.load(ends + 1) + margin)


@triton.jit
def corner(cell, ends, side):
    """Return a coordinate's cell below, its cell above and the weight of that one."""
    cell = tl.minimum(tl.maximum(cell, tl.load(ends)), tl.load(ends + 1))
    below = tl.floor(cell)
    # At the last cell the weight of the one above is 0.
    above = tl.minimum(below + 1, side - 1)
    return below.to(tl.int32), above.to(tl.int32), cell - below


@triton.jit
def count_samples(column, cells, most):
    """Return the samples of a token along an axis of the input, which spans `cells` cells."""
    x, y = tl.load(column), tl.load(column + 3)
    return tl.minimum(tl.maximum(tl.ceil(tl.sqrt(x * x + y * y) * cells - 1e-5), 1.0), most)


@triton.jit
def pool_kernel(
    slot,
    value,
    share,
    place,
    extra,
    base,
    weight,
    total,
    side,
    top_k,
    classes,
    slots,
    grid_rows,
    grid_columns,
    most,
    margin,
    edge,
    on,
    off,
    sums_to,
    TAIL: tl.constexpr,
    UNIFORM: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Write the targets of ROWS tokens of an image.

    WHOLE: of its only token. Then the rows are samples of that token, and are added at the end.
    """
    image = tl.program_id(0).to(tl.int64)
    slot += image * side * side * top_k
    value += image * side * side * top_k
    share += image * side * side
    place += image * PLACE
    # As `sample_points` counts them.
    count_x = count_samples(place + THROUGH, side / grid_columns, most)
    count_y = count_samples(place + THROUGH + 1, side / grid_rows, most)
    samples = (count_x * count_y).to(tl.int32)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    step = ROWS if WHOLE else 1
    column = tl.arange(0, SLOTS)
    pooled = tl.zeros([ROWS, SLOTS], tl.float32)
    pooled_share = tl.zeros([ROWS], tl.float32)
    hits = tl.zeros([ROWS], tl.float32)
    for first in range(0, samples, step):
        sample = first + row if WHOLE else first + row * 0
        token = row * 0 if WHOLE else row
        # Exact: a token has fewer than 2^23 samples.
        line = tl.floor((sample.to(tl.float32) + 0.5) / count_x)
        x = (token % grid_columns + (sample - line * count_x + 0.5) / count_x) / grid_columns
        y = (token // grid_columns + (line + 0.5) / count_y) / grid_rows
        image_x, image_y = to_axes(place, x, y)
        map_x, map_y = to_axes(place + THROUGH, x, y)
        inside = is_between(image_x, place + VISIBLE, edge)
        inside &= is_between(image_y, place + VISIBLE + 2, edge)
        inside &= (map_x > -margin) & (map_x < 1 + margin)
        inside &= (map_y > -margin) & (map_y < 1 + margin) & (sample < samples)
        hits += inside.to(tl.float32)
        left, right, to_right = corner(map_x * side - 0.5, place + CELLS, side)
        top, bottom, to_bottom = corner(map_y * side - 0.5, place + CELLS + 2, side)
        for i in tl.static_range(4):
            part = to_right if i % 2 else 1 - to_right
            part *= to_bottom if i // 2 else 1 - to_bottom
            cell = (bottom if i // 2 else top) * side + (right if i % 2 else left)
            if TAIL:
                pooled_share += part * tl.load(share + cell, mask=inside, other=0.0)
            for j in range(top_k):
                at = tl.load(slot + cell * top_k + j, mask=inside, other=-1)
                part_value = part * tl.load(value + cell * top_k + j, mask=inside, other=0.0)
                pooled += tl.where(at[:, None] == column[None, :], part_value[:, None], 0.0)
    if WHOLE:
        hits = tl.sum(hits, 0, keep_dims=True)
        pooled = tl.sum(pooled, 0, keep_dims=True)
        pooled_share = tl.sum(pooled_share, 0, keep_dims=True)
        row = tl.program_id(1) + tl.arange(0, 1)
    # A token without a sample inside has a value and a weight of 0, not 0 / 0.
    tokens = grid_rows * grid_columns
    known = hits / (count_x * count_y)
    divisor = tl.zeros_like(hits) + count_x * count_y if UNIFORM else tl.maximum(hits, 1.0)
    pooled /= divisor[:, None]
    if TAIL:
        rest = pooled_share / divisor
        if UNIFORM:
            rest += (1 - known) / classes
        above = pooled * on
        rest *= on
    else:
        peak = tl.maximum(tl.max(pooled, 1), 0.0)
        rest = tl.exp(-peak)
        above = tl.exp(pooled - peak[:, None]) - rest[:, None]
        scale = on / (classes * rest + tl.sum(above, 1))
        above *= scale[:, None]
        rest *= scale
    inside = row < tokens
    row += image * tokens
    used = inside[:, None] & (column < slots)[None, :]
    tl.store(extra + row[:, None] * slots + column[None, :], above, mask=used)
    tl.store(base + row, rest + off, mask=inside)
    tl.store(total + row, tl.zeros_like(rest) + sums_to, mask=inside)
    if UNIFORM:
        known = tl.zeros_like(known) + 1.0
    tl.store(weight + row, known * tl.load(place + WEIGHT), mask=inside)


def launch(kernel: triton.JITFunction, grid: tuple[int, ...], *arguments, **constants) -> None:
    """Run a kernel on the device of its first tensor."""
    # Triton launches on the current device. The default of enable_fp_fusion changes in Triton 3.10;
    # until then its absence prints a warning.
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **constants, enable_fp_fusion=True)

"""Sparse cross entropy in Triton, one program a row; the plain twins and the formulas are in
sparse_cross_entropy.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# N images   T tokens   K classes   M classes of an image's palette


@triton.jit
def forward_kernel(
    logits,
    palette,
    extra,
    base,
    total,
    loss,
    peaks,
    partitions,
    tokens,
    classes,
    slots,
    image_stride,
    token_stride,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """A row's loss, maximum and sum: one pass with a running maximum, then the palette's classes
    again, from the cache.
    """
    row = tl.program_id(0).to(tl.int64)
    image = row // tokens
    x = logits + image * image_stride + (row % tokens) * token_stride

    peak = tl.load(x).to(tl.float32)
    partition = 0.0  # sum of e^(x - peak)
    below = 0.0  # sum of x - peak
    for start in range(0, classes, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        inside = column < classes
        value = tl.load(x + column, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(value, 0))
        partition = partition * tl.exp(peak - higher) + tl.sum(tl.exp(value - higher), 0)
        below += start * (peak - higher) + tl.sum(tl.where(inside, value - higher, 0.0), 0)
        peak = higher

    at_palette = 0.0
    for start in range(0, slots, BLOCK_M):
        slot = start + tl.arange(0, BLOCK_M)
        used = slot < slots
        value = tl.load(x + tl.load(palette + image * slots + slot, mask=used, other=0)).to(
            tl.float32
        )
        at_palette += tl.sum(
            tl.load(extra + row * slots + slot, mask=used, other=0.0) * (value - peak), 0
        )

    tl.store(
        loss + row,
        tl.load(total + row) * tl.log(partition) - tl.load(base + row) * below - at_palette,
    )
    tl.store(peaks + row, peak)
    tl.store(partitions + row, partition)


@triton.jit
def backward_kernel(
    grad,
    logits,
    peaks,
    partitions,
    palette,
    extra,
    base,
    total,
    out,
    tokens,
    classes,
    slots,
    image_stride,
    token_stride,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """A row's gradient: all columns without the palette's extras, then the palette's columns once
    more with them.

    Slots that name the same class each write the sum over all of them, so it does not matter which
    one writes last.
    """
    row = tl.program_id(0).to(tl.int64)
    image = row // tokens
    x = logits + image * image_stride + (row % tokens) * token_stride
    out += row * classes
    palette += image * slots
    extra += row * slots
    scale = tl.load(grad + row)
    of_softmax = scale * tl.load(total + row) / tl.load(partitions + row)
    of_all = scale * tl.load(base + row)
    peak = tl.load(peaks + row)

    for start in range(0, classes, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        inside = column < classes
        value = tl.load(x + column, mask=inside, other=-float("inf")).to(tl.float32)
        tl.store(out + column, of_softmax * tl.exp(value - peak) - of_all, mask=inside)

    tl.debug_barrier()  # __syncthreads: what is stored below replaces what was stored above
    for start in range(0, slots, BLOCK_M):
        slot = start + tl.arange(0, BLOCK_M)
        used = slot < slots
        label = tl.load(palette + slot, mask=used, other=-1).to(tl.int32)
        named = tl.zeros([BLOCK_M], tl.float32)
        for other_start in range(0, slots, BLOCK_M):
            other = other_start + tl.arange(0, BLOCK_M)
            other_label = tl.load(palette + other, mask=other < slots, other=-2).to(tl.int32)
            share = tl.load(extra + other, mask=other < slots, other=0.0)
            named += tl.sum(
                tl.where(label[:, None] == other_label[None, :], share[None, :], 0.0), 1
            )
        value = tl.load(x + label, mask=used, other=0.0).to(tl.float32)
        tl.store(out + label, of_softmax * tl.exp(value - peak) - of_all - scale * named, mask=used)


def block_sizes(classes: int, slots: int) -> dict[str, int]:
    """Columns and slots that a program holds at a time, and its warps: at most 16 columns and 32
    pairs of slots a thread.
    """
    columns = min(triton.next_power_of_2(classes), 4096)
    return {
        "BLOCK_K": columns,
        "BLOCK_M": min(triton.next_power_of_2(slots), 64),
        "num_warps": max(4, columns // 512),
    }


def targets_of(palette_NM: Tensor, *floats: Tensor) -> list[Tensor]:
    """Dense in memory, and sums in float32, as the kernels read them; no copy of what is so
    already.
    """
    return [palette_NM.contiguous(), *(tensor.float().contiguous() for tensor in floats)]


def forward(
    logits_NTK: Tensor, palette_NM: Tensor, extra_NTM: Tensor, base_NT: Tensor, total_NT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `plain_forward`, for float32, float16 and bfloat16 logits."""
    (N, T, K), M = logits_NTK.shape, palette_NM.shape[1]
    if logits_NTK.stride(2) != 1:
        logits_NTK = logits_NTK.contiguous()
    results = [logits_NTK.new_empty(N, T, dtype=torch.float32) for _ in range(3)]
    forward_kernel[(N * T,)](
        logits_NTK,
        *targets_of(palette_NM, extra_NTM, base_NT, total_NT),
        *results,
        T,
        K,
        M,
        *logits_NTK.stride()[:2],
        **block_sizes(K, M),
    )
    return tuple(results)


def backward(
    grad_NT: Tensor,
    logits_NTK: Tensor,
    peak_NT: Tensor,
    partition_NT: Tensor,
    palette_NM: Tensor,
    extra_NTM: Tensor,
    base_NT: Tensor,
    total_NT: Tensor,
) -> Tensor:
    """As `plain_backward`, for float32, float16 and bfloat16 logits."""
    (N, T, K), M = logits_NTK.shape, palette_NM.shape[1]
    if logits_NTK.stride(2) != 1:
        logits_NTK = logits_NTK.contiguous()
    out_NTK = torch.empty_like(logits_NTK, memory_format=torch.contiguous_format)
    palette_NM, *floats = targets_of(palette_NM, extra_NTM, base_NT, total_NT)
    backward_kernel[(N * T,)](
        grad_NT.float().contiguous(),
        logits_NTK,
        peak_NT,
        partition_NT,
        palette_NM,
        *floats,
        out_NTK,
        T,
        K,
        M,
        *logits_NTK.stride()[:2],
        **block_sizes(K, M),
    )
    return out_NTK

"""Sparse cross entropy in Triton, one program per row.

The formulas and the plain PyTorch versions are in sparse_cross_entropy.py.
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
    """Compute a row's loss, maximum and sum.

    One pass has a running maximum; a second one reads the palette's classes again, from the cache.
    """
    # Offsets leave int32: 1,024 images of 196 tokens and 21,841 classes have 4.4e9 logits.
    row = tl.program_id(0).to(tl.int64)
    image = row // tokens
    x = logits + image * image_stride + (row % tokens) * token_stride

    # The first logit and not -inf, with which 0 * (peak - higher) below would be NaN.
    peak = tl.load(x).to(tl.float32)
    partition = 0.0  # sum of e^(x - peak)
    below = 0.0  # sum of x - peak
    for start in range(0, classes, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        inside = column < classes
        value = tl.load(x + column, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(value, 0))
        # Both sums so far were taken from the old maximum; `start` classes move to the new one.
        partition = partition * tl.exp(peak - higher) + tl.sum(tl.exp(value - higher), 0)
        below += start * (peak - higher) + tl.sum(tl.where(inside, value - higher, 0.0), 0)
        peak = higher

    # A class beyond the row makes its loss and gradient NaN, which the guard of the trainer finds.
    # Loaders refuse such maps; a kernel cannot raise an error.
    palette_sum = 0.0
    for start in range(0, slots, BLOCK_M):
        slot = start + tl.arange(0, BLOCK_M)
        used = slot < slots
        label = tl.load(palette + image * slots + slot, mask=used, other=0)
        named = (label >= 0) & (label < classes)
        value = tl.load(x + label, mask=named, other=0.0).to(tl.float32)
        share = tl.load(extra + row * slots + slot, mask=used, other=0.0)
        palette_sum += tl.sum(share * (value - peak), 0)
        partition = tl.where(tl.min(named.to(tl.int32), 0) == 1, partition, float("nan"))

    spread = tl.load(base + row) * below
    tl.store(loss + row, tl.load(total + row) * tl.log(partition) - spread - palette_sum)
    tl.store(peaks + row, peak)
    tl.store(partitions + row, partition)


@triton.jit
def backward_kernel(
    logits,
    palette,
    extra,
    base,
    total,
    grad,
    peaks,
    partitions,
    out,
    tokens,
    classes,
    slots,
    image_stride,
    token_stride,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Compute a row's gradient: all columns without `extra`, then the palette's columns with it.

    Slots with the same class each write the sum over all of them, so their order does not matter.
    """
    row = tl.program_id(0).to(tl.int64)
    image = row // tokens
    x = logits + image * image_stride + (row % tokens) * token_stride
    out += row * classes
    palette += image * slots
    extra += row * slots
    scale = tl.load(grad + row)
    softmax_scale = scale * tl.load(total + row) / tl.load(partitions + row)
    base_scale = scale * tl.load(base + row)
    peak = tl.load(peaks + row)

    for start in range(0, classes, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        inside = column < classes
        value = tl.load(x + column, mask=inside, other=-float("inf")).to(tl.float32)
        tl.store(out + column, softmax_scale * tl.exp(value - peak) - base_scale, mask=inside)

    # This is __syncthreads: the stores below overwrite those above.
    tl.debug_barrier()
    for start in range(0, slots, BLOCK_M):
        slot = start + tl.arange(0, BLOCK_M)
        used = slot < slots
        # -1 and, for the other slots, -2: unused slots match nothing.
        label = tl.load(palette + slot, mask=used, other=-1)
        # Nothing is stored for a class beyond the row; `partition` is NaN then.
        inside = (label >= 0) & (label < classes)
        label = tl.where(inside, label, -1).to(tl.int32)
        named = tl.zeros([BLOCK_M], tl.float32)
        for other_start in range(0, slots, BLOCK_M):
            other = other_start + tl.arange(0, BLOCK_M)
            other_label = tl.load(palette + other, mask=other < slots, other=-2).to(tl.int32)
            share = tl.load(extra + other, mask=other < slots, other=0.0)
            named += tl.sum(
                tl.where(label[:, None] == other_label[None, :], share[None, :], 0.0), 1
            )
        value = tl.load(x + label, mask=inside, other=0.0).to(tl.float32)
        tl.store(
            out + label,
            softmax_scale * tl.exp(value - peak) - base_scale - scale * named,
            mask=inside,
        )


def block_sizes(classes: int, slots: int) -> dict[str, int]:
    """Return the columns and slots that a program holds at a time, and its number of warps.

    A thread holds at most 16 columns and 32 pairs of slots.
    """
    # tl.arange takes powers of two.
    columns = min(triton.next_power_of_2(classes), 4096)
    return {
        "BLOCK_K": columns,
        "BLOCK_M": min(triton.next_power_of_2(slots), 64),
        "num_warps": max(4, columns // 512),
    }


def prepare(logits_NTK: Tensor, palette_NM: Tensor, *floats: Tensor) -> list[Tensor]:
    """Return tensors as the kernels read them: contiguous, and all but the logits' floats float32.

    Only the rows of the logits need be contiguous. Tensors that are so already are not copied.
    """
    if logits_NTK.stride(2) != 1:
        logits_NTK = logits_NTK.contiguous()
    return [logits_NTK, palette_NM.contiguous(), *(x.float().contiguous() for x in floats)]


def launch(kernel: triton.JITFunction, logits_NTK: Tensor, palette_NM: Tensor, *more: Tensor):
    """Run a kernel on every row of logits."""
    (N, T, K), M = logits_NTK.shape, palette_NM.shape[1]
    strides = logits_NTK.stride()[:2]
    sizes = block_sizes(K, M)
    # Triton launches on the current device. The default of enable_fp_fusion changes in Triton 3.10;
    # until then its absence prints a warning.
    with torch.cuda.device_of(logits_NTK):
        kernel[(N * T,)](
            logits_NTK, palette_NM, *more, T, K, M, *strides, **sizes, enable_fp_fusion=True
        )


def forward(logits_NTK: Tensor, *targets: Tensor) -> tuple[Tensor, ...]:
    """Compute `plain_forward` for float32, float16 and bfloat16 logits."""
    results = [logits_NTK.new_empty(logits_NTK.shape[:2], dtype=torch.float32) for _ in range(3)]
    launch(forward_kernel, *prepare(logits_NTK, *targets), *results)
    return tuple(results)


def backward(
    grad_NT: Tensor, logits_NTK: Tensor, peak_NT: Tensor, partition_NT: Tensor, *targets: Tensor
) -> Tensor:
    """Compute `plain_backward` for float32, float16 and bfloat16 logits."""
    out_NTK = torch.empty_like(logits_NTK, memory_format=torch.contiguous_format)
    read = prepare(logits_NTK, *targets, grad_NT)
    launch(backward_kernel, *read, peak_NT, partition_NT, out_NTK)
    return out_NTK

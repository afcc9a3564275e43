"""Sparse cross entropy of rows of logits, forward and backward, in plain PyTorch.

The Triton version for CUDA is in sparse_cross_entropy_triton.py. With targets
t_c = base + sum over m of extra_m [c = palette_m], which sum to `total`, and
e_c = exp(x_c - max(x)),
    loss = sum_c t_c (log(sum(e)) + max(x) - x_c)  and  d loss / d x_c = total e_c / sum(e) - t_c.
Both passes read a row of logits from memory once, and allocate nothing as large as the logits
except their gradient. They are operators of `torch.library`, so `torch.compile` keeps them whole
instead of unrolling their loops over rows.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from densefeed.system.devices import has_triton

# N images   T tokens   K classes   M classes of an image's palette

# Rows are processed in blocks of this many bytes, so that all passes over a block find it in the
# processor's cache. From 1 MiB to 16 MiB the time differs by less than 5 % on two idle cores
# (K = 1,000). But every pass starts and joins all threads, and on busy cores a join waits for the
# slowest thread, so small blocks then take several times as long. torch.softmax and log_softmax
# instead of these passes saved 4 % of the time and had an error of 8e-6 at 70,001 classes.
BLOCK_BYTES = 8 << 20


def blocks(logits_NTK: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield slices of images and of tokens that cover the logits, and a buffer for each block.

    A block has at most BLOCK_BYTES in `dtype`, that of the buffer, or one row. All buffers are the
    same memory.
    """
    N, T, K = logits_NTK.shape
    rows = max(1, BLOCK_BYTES // (K * dtype.itemsize))
    # Several whole images, or a part of one, so that a block is a slice of both axes.
    images, tokens = max(1, rows // T), min(rows, T)
    buffer = torch.empty_like(logits_NTK[:images, :tokens], dtype=dtype)
    for image in range(0, N, images):
        for token in range(0, T, tokens):
            yield (
                slice(image, image + images),
                slice(token, token + tokens),
                buffer[: N - image, : T - token],
            )


def accumulation_dtype(logits: Tensor) -> torch.dtype:
    """Return the dtype of sums over these logits: float32, or float64 for float64."""
    return torch.promote_types(logits.dtype, torch.float32)


def gather_classes(values_NTK: Tensor, classes_NTM: Tensor) -> Tensor:
    """Gather values of classes. ValueError if there is no such class; on a GPU an assertion of it.

    Checked by the gather itself, as looking at the classes would wait for a GPU.
    """
    try:
        return values_NTK.gather(2, classes_NTM)
    except (IndexError, RuntimeError) as error:
        if "out of bounds" not in str(error):
            raise
        raise ValueError(
            f"logits of {values_NTK.shape[2]:,} classes, and targets of class "
            f"{classes_NTM.max():,}; give the model as many classes as the labels have"
        ) from error


def plain_forward(
    logits_NTK: Tensor, palette_NM: Tensor, extra_NTM: Tensor, base_NT: Tensor, total_NT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses, and for the backward pass each row's maximum and sum of e.

    All are `[N, T]` in float32 (float64 for float64 logits). Because targets sum to `total`, only
    distances from the maximum matter: every class adds a positive term, and a large offset common
    to all logits loses no precision. (With a logsumexp instead of maximum and sum, an offset of 300
    gave the gradient a relative error of 1.5e-5.)
    """
    dtype = accumulation_dtype(logits_NTK)
    loss_NT, peak_NT, partition_NT = (
        logits_NTK.new_empty(logits_NTK.shape[:2], dtype=dtype) for _ in range(3)
    )
    for images, tokens, buffer in blocks(logits_NTK, dtype):
        block, extra = logits_NTK[images, tokens], extra_NTM[images, tokens].to(dtype)
        palette = palette_NM[images, None].expand(extra.shape)
        peak = block.amax(-1, keepdim=True).to(dtype)
        below = torch.sub(block, peak, out=buffer)
        # Before exp_ below, which overwrites the distances.
        named = gather_classes(below, palette)
        dense = base_NT[images, tokens] * below.sum(-1) + (extra * named).sum(-1)
        partition = below.exp_().sum(-1)
        loss_NT[images, tokens] = total_NT[images, tokens] * partition.log() - dense
        peak_NT[images, tokens], partition_NT[images, tokens] = peak[..., 0], partition
    return loss_NT, peak_NT, partition_NT


def plain_backward(
    grad_NT: Tensor,
    logits_NTK: Tensor,
    peak_NT: Tensor,
    partition_NT: Tensor,
    palette_NM: Tensor,
    extra_NTM: Tensor,
    base_NT: Tensor,
    total_NT: Tensor,
) -> Tensor:
    """Return the gradient of the logits, contiguous and in their dtype; see `plain_forward`."""
    dtype = accumulation_dtype(logits_NTK)
    grad_NTK = torch.empty_like(logits_NTK, memory_format=torch.contiguous_format)
    for images, tokens, block in blocks(logits_NTK, dtype):
        grad = grad_NT[images, tokens, None].to(dtype)
        extra = (extra_NTM[images, tokens] * -grad).to(dtype)
        palette = palette_NM[images, None].expand(extra.shape)
        torch.sub(logits_NTK[images, tokens], peak_NT[images, tokens, None], out=block).exp_()
        block.mul_(grad * total_NT[images, tokens, None] / partition_NT[images, tokens, None])
        # A palette may name a class twice: scatter_add_ sums its extras, as the gather in the
        # forward pass does.
        block.sub_(grad * base_NT[images, tokens, None]).scatter_add_(2, palette, extra)
        # The result is rounded once, and its memory, not in the cache yet, is written once.
        grad_NTK[images, tokens] = block
    return grad_NTK


forward = torch.library.custom_op("densefeed::sparse_cross_entropy", plain_forward, mutates_args=())
backward = torch.library.custom_op(
    "densefeed::sparse_cross_entropy_backward", plain_backward, mutates_args=()
)


@forward.register_fake
def _(logits_NTK, *targets):
    losses = logits_NTK.new_empty(logits_NTK.shape[:2], dtype=accumulation_dtype(logits_NTK))
    return losses, torch.empty_like(losses), torch.empty_like(losses)


@backward.register_fake
def _(grad_NT, logits_NTK, *more):
    return torch.empty_like(logits_NTK, memory_format=torch.contiguous_format)


def run_kernel(name: str, plain: Callable, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Run the Triton kernel `name`, or `plain` where it cannot be used.

    The kernels sum in float32, and some builds of PyTorch for CUDA come without Triton.
    """
    if tensors[0].dtype == torch.float64 or not has_triton():
        return plain(*tensors)
    # Imported here, because importing Triton takes a second, or fails.
    from densefeed.models.kernels import sparse_cross_entropy_triton

    return getattr(sparse_cross_entropy_triton, name)(*tensors)


forward.register_kernel("cuda")(partial(run_kernel, "forward", plain_forward))
backward.register_kernel("cuda")(partial(run_kernel, "backward", plain_backward))

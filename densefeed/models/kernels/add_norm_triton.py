"""Triton kernels of a residual sum and the layer norm after it, for CUDA; see add_norm.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# N images   T tokens   D width   R rows of a tile   P programs

ROWS, WARPS = 4, 4
# Programs of a backward pass at the most: each writes a row of sums.
PROGRAMS = 1024


@triton.jit
def forward_kernel(
    x, branch, scale, weight, bias, total, out, mean, rstd, count, tokens, eps,
    D: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, BLOCK)
    there, known = row < count, column < D
    mask = there[:, None] & known[None, :]
    at = row.to(tl.int64)[:, None] * D + column[None, :]
    factor = tl.load(scale + row // tokens, mask=there, other=0.0)
    sum = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    sum += tl.load(branch + at, mask=mask, other=0.0).to(tl.float32) * factor[:, None]
    # The norm is that of the sum as it is stored.
    rounded = sum.to(total.dtype.element_ty)
    tl.store(total + at, rounded, mask=mask)
    sum = rounded.to(tl.float32)
    middle = tl.sum(sum, 1) / D
    far = tl.where(mask, sum - middle[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(far * far, 1) / D + eps)
    w = tl.load(weight + column, mask=known, other=0.0)
    b = tl.load(bias + column, mask=known, other=0.0)
    normal = far * inverse[:, None] * w[None, :] + b[None, :]
    tl.store(out + at, normal.to(out.dtype.element_ty), mask=mask)
    tl.store(mean + row, middle, mask=there)
    tl.store(rstd + row, inverse, mask=there)


@triton.jit
def backward_kernel(
    total_grad, out_grad, total, mean, rstd, scale, weight, x_grad, branch_grad, sums,
    count, tokens,
    D: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    known = column < D
    w = tl.load(weight + column, mask=known, other=0.0)
    weight_sum = tl.zeros([R, BLOCK], tl.float32)
    bias_sum = tl.zeros([R, BLOCK], tl.float32)
    branch_sum = tl.zeros([R, BLOCK], tl.float32)
    for first in range(tl.program_id(0) * R, count, tl.num_programs(0) * R):
        row = first + tl.arange(0, R)
        there = row < count
        mask = there[:, None] & known[None, :]
        at = row.to(tl.int64)[:, None] * D + column[None, :]
        middle = tl.load(mean + row, mask=there, other=0.0)
        inverse = tl.load(rstd + row, mask=there, other=0.0)
        factor = tl.load(scale + row // tokens, mask=there, other=0.0)
        value = tl.load(total + at, mask=mask, other=0.0).to(tl.float32)
        normal = tl.where(mask, (value - middle[:, None]) * inverse[:, None], 0.0)
        grad = tl.load(out_grad + at, mask=mask, other=0.0).to(tl.float32)
        weight_sum += grad * normal
        bias_sum += grad
        grad *= w[None, :]
        grad -= (tl.sum(grad, 1) / D)[:, None] + normal * (tl.sum(grad * normal, 1) / D)[:, None]
        grad *= inverse[:, None]
        grad += tl.load(total_grad + at, mask=mask, other=0.0).to(tl.float32)
        grad = tl.where(mask, grad, 0.0)
        tl.store(x_grad + at, grad.to(x_grad.dtype.element_ty), mask=mask)
        grad *= factor[:, None]
        tl.store(branch_grad + at, grad.to(branch_grad.dtype.element_ty), mask=mask)
        branch_sum += grad
    at = sums + tl.program_id(0) * 3 * D + column
    tl.store(at, tl.sum(weight_sum, 0), mask=known)
    tl.store(at + D, tl.sum(bias_sum, 0), mask=known)
    tl.store(at + 2 * D, tl.sum(branch_sum, 0), mask=known)


def forward(
    x_NTD: Tensor, branch_NTD: Tensor, scale_N: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float
) -> tuple[Tensor, ...]:
    """Compute `plain_forward`."""
    N, T, D = x_NTD.shape
    total, out = torch.empty_like(x_NTD), torch.empty_like(branch_NTD)
    mean, rstd = (x_NTD.new_empty(N, T, dtype=torch.float32) for _ in range(2))
    # Triton launches on the current device.
    with torch.cuda.device_of(x_NTD):
        forward_kernel[(triton.cdiv(N * T, ROWS),)](
            *(x_NTD, branch_NTD, scale_N, weight_D, bias_D, total, out, mean, rstd),
            *(N * T, T, eps),
            **block_sizes(D),
        )
    return total, out, mean, rstd


def backward(
    total_grad_NTD: Tensor,
    out_grad_NTD: Tensor,
    total_NTD: Tensor,
    mean_NT: Tensor,
    rstd_NT: Tensor,
    scale_N: Tensor,
    weight_D: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `plain_backward`."""
    N, T, D = total_NTD.shape
    x_grad, branch_grad = torch.empty_like(total_NTD), torch.empty_like(out_grad_NTD)
    programs = min(triton.cdiv(N * T, ROWS), PROGRAMS)
    sums = total_NTD.new_empty(programs, 3, D, dtype=torch.float32)
    with torch.cuda.device_of(total_NTD):
        backward_kernel[(programs,)](
            *(total_grad_NTD, out_grad_NTD, total_NTD, mean_NT, rstd_NT, scale_N, weight_D),
            *(x_grad, branch_grad, sums, N * T, T),
            **block_sizes(D),
        )
    return x_grad, branch_grad, sums.sum(0)


def block_sizes(D: int) -> dict[str, object]:
    """Return the constants of a launch."""
    block = triton.next_power_of_2(D)
    return {"D": D, "R": ROWS, "BLOCK": block, "num_warps": WARPS, "enable_fp_fusion": True}

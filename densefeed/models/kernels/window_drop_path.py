"""Stochastic depth of a fixed number of samples, whose branches are left out of a compiled step.

timm draws each sample by itself, so a GPU computes all branches and multiplies by zeros. Here the
samples that keep a branch are neighbors in the batch, from a random one on, in a circle: every
sample keeps it with the same probability, the rate's to half a sample, and the mean of the result
is the same. Neighbors are dropped together, which a shuffled batch makes as random. Nothing is
added atomically, and the compiler gathers rows where it reads them, but for the gradient of what
was taken. The plain twins are timm's DropPath and `drop_path.add_kept`.

`--compile blocks` does not use it: blocks of different rates would be compiled apart.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from densefeed.models.drop_path import BranchDropPath

# N images   K of them keep the branch   T tokens   D width


class WindowDropPath(BranchDropPath):
    """Stochastic depth that keeps the branch of K neighbors."""

    def add(
        self, x_NTD: Tensor, branch: Callable[[Tensor], Tensor], divisor: float = 1.0
    ) -> Tensor:
        N = len(x_NTD)
        K = max(1, round(N * (1 - self.drop_prob)))
        scale = (N / K if self.scale_by_keep else 1.0) / divisor
        if K == N:
            return torch.add(x_NTD, branch(x_NTD), alpha=scale)
        # Below 1, but float32 may round the product to N.
        start = (torch.rand((), device=x_NTD.device) * N).long() % N
        return AddRows.apply(x_NTD, branch(TakeRows.apply(x_NTD, start, K)), start, scale)


class TakeRows(torch.autograd.Function):
    """Take K rows from one on, in a circle."""

    @staticmethod
    def forward(ctx, x_NTD, start, K):
        ctx.save_for_backward(start)
        ctx.images = len(x_NTD)
        return take(x_NTD, start, K)

    @staticmethod
    def backward(ctx, grad_KTD):
        return spread(grad_KTD, *ctx.saved_tensors, ctx.images), None, None


class AddRows(torch.autograd.Function):
    """Add K rows, times a number, to those that they were taken from."""

    @staticmethod
    def forward(ctx, x_NTD, y_KTD, start, scale):
        ctx.save_for_backward(start)
        ctx.scale, ctx.dtype, ctx.kept = scale, y_KTD.dtype, len(y_KTD)
        return (x_NTD + spread(y_KTD, start, len(x_NTD)) * scale).to(x_NTD.dtype)

    @staticmethod
    def backward(ctx, grad_NTD):
        grad_KTD = take(grad_NTD, *ctx.saved_tensors, ctx.kept) * ctx.scale
        return grad_NTD, grad_KTD.to(ctx.dtype), None, None


def take(x_NTD: Tensor, start: Tensor, K: int) -> Tensor:
    """Return K rows from number `start` on, in a circle."""
    # The compiler computes these numbers where the rows are read.
    rows_K = (torch.arange(K, device=x_NTD.device) + start) % len(x_NTD)
    return x_NTD.index_select(0, rows_K)


def spread(y_KTD: Tensor, start: Tensor, N: int) -> Tensor:
    """Return N rows: those of `y` from number `start` on, in a circle, and zeros."""
    places_N = (torch.arange(N, device=y_KTD.device) - start) % N
    rows_NTD = y_KTD.index_select(0, places_N.clamp(max=len(y_KTD) - 1))
    return torch.where((places_N < len(y_KTD))[:, None, None], rows_NTD, 0)


def use(model: nn.Module) -> None:
    """Let every branch that can leave samples out do so."""
    for module in model.modules():
        if isinstance(module, BranchDropPath):
            module.__class__, module.skip = WindowDropPath, True

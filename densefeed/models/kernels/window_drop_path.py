"""Stochastic depth of a fixed number of samples, whose branches are left out of a compiled step.

timm draws each sample by itself, so a GPU computes all branches and multiplies by zeros. Here the
samples that keep a branch are neighbors in the batch, from a random one on, in a circle: every
sample keeps it with the same probability, the rate's to half a sample, and the mean of the result
is the same. Neighbors are dropped together, which a shuffled batch makes as random. The rows are
gathered in the kernels that read them anyway, in both passes, and nothing is added atomically. The
plain twins are timm's DropPath and `drop_path.add_kept`.

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
        rows_K = (torch.arange(K, device=x_NTD.device) + start) % N
        # For each sample, which of the K it is; at least K: none.
        places_N = (torch.arange(N, device=x_NTD.device) - start) % N
        y_KTD = branch(TakeRows.apply(x_NTD, rows_K, places_N))
        return AddRows.apply(x_NTD, y_KTD, rows_K, places_N, scale)


class TakeRows(torch.autograd.Function):
    """Take K rows."""

    @staticmethod
    def forward(ctx, x_NTD, rows_K, places_N):
        ctx.save_for_backward(places_N)
        return x_NTD.index_select(0, rows_K)

    @staticmethod
    def backward(ctx, grad_KTD):
        (places_N,) = ctx.saved_tensors
        return spread(grad_KTD, places_N), None, None


class AddRows(torch.autograd.Function):
    """Add K rows, times a number, to those that they were taken from."""

    @staticmethod
    def forward(ctx, x_NTD, y_KTD, rows_K, places_N, scale):
        ctx.save_for_backward(rows_K)
        ctx.scale, ctx.dtype = scale, y_KTD.dtype
        return (x_NTD + spread(y_KTD, places_N) * scale).to(x_NTD.dtype)

    @staticmethod
    def backward(ctx, grad_NTD):
        (rows_K,) = ctx.saved_tensors
        grad_KTD = (grad_NTD.index_select(0, rows_K) * ctx.scale).to(ctx.dtype)
        return grad_NTD, grad_KTD, None, None, None


def spread(y_KTD: Tensor, places_N: Tensor) -> Tensor:
    """Return N rows: those of `y` at their places, and zeros."""
    rows_NTD = y_KTD.index_select(0, places_N.clamp(max=len(y_KTD) - 1))
    return torch.where((places_N < len(y_KTD))[:, None, None], rows_NTD, 0)


def use(model: nn.Module) -> None:
    """Let every branch that can leave samples out do so."""
    for module in model.modules():
        if isinstance(module, BranchDropPath):
            module.__class__, module.skip = WindowDropPath, True

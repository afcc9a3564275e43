"""Stochastic depth (arXiv 1603.09382) of residual branches, with the dropped samples left out."""

from collections.abc import Callable

import torch
from timm.layers import DropPath
from torch import Tensor, nn

# N images   T tokens   D width


class BranchDropPath(DropPath):
    """timm's DropPath of a branch that computes every sample independently.

    With `skip`, `add_branch` computes the branch only for the samples that keep it. Called as a
    module it is timm's.
    """

    skip = False

    def add(
        self, x_NTD: Tensor, branch: Callable[[Tensor], Tensor], divisor: float = 1.0
    ) -> Tensor:
        """Do `add_branch` for a random choice of samples."""
        return add_kept(x_NTD, branch, self, divisor)


def branch_drop_path(rate: float, *branch: nn.Module) -> nn.Module:
    """Return the DropPath of a branch that consists of these modules; an Identity for a rate of 0.

    It can skip samples unless the branch has a BatchNorm, whose statistics are those of all images.
    """
    if not rate:
        return nn.Identity()
    norms = (isinstance(m, nn.modules.batchnorm._BatchNorm) for b in branch for m in b.modules())
    return DropPath(rate) if any(norms) else BranchDropPath(rate)


def skip_dropped(model: nn.Module, skip: bool = True) -> None:
    """Let all branches of a model that can do so leave dropped samples out, or compute them."""
    for module in model.modules():
        if isinstance(module, BranchDropPath):
            module.skip = skip


def add_branch(
    x_NTD: Tensor, branch: Callable[[Tensor], Tensor], drop_path: nn.Module, divisor: float = 1.0
) -> Tensor:
    """Return `x + drop_path(branch(x)) / divisor`, `[N, T, D]`.

    Where `drop_path` skips, the branch gets only the samples that keep it. The draw is timm's, so
    the result is the same up to rounding. The number of these samples is read on the host, which
    waits for a GPU, and is another batch size for a compiler.
    """
    if drop_path.training and getattr(drop_path, "skip", False):
        return drop_path.add(x_NTD, branch, divisor)
    y_NTD = drop_path(branch(x_NTD))
    return x_NTD + (y_NTD if divisor == 1 else y_NTD / divisor)


def add_kept(
    x_NTD: Tensor, branch: Callable[[Tensor], Tensor], drop_path: BranchDropPath, divisor: float
) -> Tensor:
    """Do `add_branch` for a random choice of samples."""
    keep = 1 - drop_path.drop_prob
    scale = 1 / ((keep if drop_path.scale_by_keep else 1) * divisor)
    kept = x_NTD.new_empty(len(x_NTD)).bernoulli_(keep).nonzero().flatten()
    if len(kept) == len(x_NTD):
        return torch.add(x_NTD, branch(x_NTD), alpha=scale)
    if not len(kept):
        # Gradients of zero, as those of a mask. DDP waits for every gradient, and an optimizer
        # leaves weights without one alone.
        kept, scale = kept.new_zeros(1), 0.0
    y_NTD = branch(x_NTD.index_select(0, kept))
    # The residual stream is float32 under autocast, where the branch is not.
    return x_NTD.index_add(0, kept, y_NTD.to(x_NTD.dtype), alpha=scale)

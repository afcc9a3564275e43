"""The objectives of Token Labeling (arXiv 2104.10858): sparse cross entropy, and the loss on class token and tokens.

With soft targets t_c = base + sum over m of extra_m [c = palette_m] that sum to `total`,
    CE = -sum_c t_c log_softmax(x)_c = total logsumexp(x) - base sum_c x_c - sum_m extra_m x_{palette_m},
so a row of logits is needed only through its logsumexp, its sum and a gather: no dense target is ever built.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

# N images   T tokens   K classes   M classes of an image's palette


class Targets(Protocol):
    """What the losses read of targets; `pipelines.targets.SparseTargets` is one."""

    palette: Tensor  # int64 [N, M]
    extra: Tensor  # float [N, T, M]
    base: Tensor  # float [N, T]
    weight: Tensor  # float [N, T]
    total: Tensor  # float [N, T]


def sparse_cross_entropy(
    logits_NTK: Tensor, palette_NM: Tensor, extra_NTM: Tensor, base_NT: Tensor, total_NT: Tensor
) -> Tensor:
    """Cross entropy of each token, `[N, T]`, in float32 whatever the logits' dtype."""
    logits_NTK = logits_NTK.float()
    at_palette = logits_NTK.gather(2, palette_NM[:, None].expand(-1, logits_NTK.shape[1], -1))
    return total_NT * logits_NTK.logsumexp(-1) - base_NT * logits_NTK.sum(-1) - (extra_NTM * at_palette).sum(-1)


def weighted_mean(loss: Tensor, weight: Tensor) -> Tensor:
    """Mean of `loss` over what carries weight; 0 if nothing does."""
    return (loss * weight).sum() / weight.sum().clamp(min=1e-6)


def class_token_loss(cls_NK: Tensor, targets: Targets) -> Tensor:
    """H(X_cls, y_cls) with the dense label of the whole crop (`targets` of a 1 x 1 grid), mixed as the images are."""
    loss_N1 = sparse_cross_entropy(cls_NK[:, None], targets.palette, targets.extra, targets.base, targets.total)
    return weighted_mean(loss_N1, targets.weight)


def token_loss(tokens_NTK: Tensor, targets: Targets) -> Tensor:
    """L_aux of equation 6: the mean over all labelled tokens. MixToken's logits are un-mixed, so targets stay in place."""
    loss_NT = sparse_cross_entropy(tokens_NTK, targets.palette, targets.extra, targets.base, targets.total)
    return weighted_mean(loss_NT, targets.weight)


def hard_label_loss(
    cls_NK: Tensor, label_N: Tensor, weight_N: Tensor, smoothing: float = 0.0, partner_share: Tensor | None = None
) -> Tensor:
    """Plain cross entropy with the image's label; under MixToken mixed with the partner's by area, as CutMix does."""
    own = F.cross_entropy(cls_NK.float(), label_N, reduction="none", label_smoothing=smoothing)
    if partner_share is not None:
        partner = F.cross_entropy(cls_NK.float(), label_N.flip(0), reduction="none", label_smoothing=smoothing)
        own = torch.lerp(own, partner, partner_share)
    return weighted_mean(own, weight_N)

"""The objectives of Token Labeling (arXiv 2104.10858): sparse cross entropy, and the loss on class
token and tokens.

With soft targets t_c = base + sum over m of extra_m [c = palette_m] that sum to `total`,
    CE = -sum_c t_c log_softmax(x)_c = total logsumexp(x) - base sum_c x_c - sum_m extra_m
    x_{palette_m}, dCE/dx_c = total softmax(x)_c - t_c,
so a row of logits is needed only through its logsumexp, its sum and a gather: no dense target is
ever built.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from densefeed.models.kernels import fused_head
from densefeed.models.kernels import sparse_cross_entropy as kernels
from densefeed.models.token_transformer import TokenFeatures, TokenLogits

# N images   T tokens   D width   K classes   M classes of an image's palette


class Targets(Protocol):
    """What the losses read of targets, as constants; `pipelines.targets.SparseTargets` is one."""

    palette: (
        Tensor  # int64 [N, M], each from 0 to K - 1; a class named twice gets the sum of its extras
    )
    extra: Tensor  # float [N, T, M]
    base: Tensor  # float [N, T]
    weight: Tensor  # float [N, T]
    total: Tensor  # float [N, T], base K + sum of extra


class SparseCrossEntropy(torch.autograd.Function):
    """Keeps of the forward pass the logits, the targets and two numbers a row."""

    @staticmethod
    def forward(ctx, logits_NTK, palette_NM, extra_NTM, base_NT, total_NT):
        loss_NT, *sums = kernels.forward(logits_NTK, palette_NM, extra_NTM, base_NT, total_NT)
        ctx.save_for_backward(logits_NTK, *sums, palette_NM, extra_NTM, base_NT, total_NT)
        return loss_NT

    @staticmethod
    def backward(ctx, grad_NT):
        return kernels.backward(grad_NT, *ctx.saved_tensors), None, None, None, None


def check_shapes(
    N: int, T: int, palette_NM: Tensor, extra_NTM: Tensor, base_NT: Tensor, total_NT: Tensor
) -> None:
    """ValueError where these are no targets of N images of T tokens."""
    M = palette_NM.shape[-1]
    found = [tuple(tensor.shape) for tensor in (palette_NM, extra_NTM, base_NT, total_NT)]
    if found != [(N, M), (N, T, M), (N, T), (N, T)]:
        raise ValueError(
            f"targets of shapes {found} are not for {N} images of {T} tokens; ask for targets of the model's grid"
        )


def sparse_cross_entropy(
    logits_NTK: Tensor, palette_NM: Tensor, extra_NTM: Tensor, base_NT: Tensor, total_NT: Tensor
) -> Tensor:
    """Cross entropy of each token, `[N, T]`, in float32 whatever the logits' dtype (float64 for
    float64).

    Arguments are a `Targets`' fields; they must sum to `total_NT`. The gradient is the logits'
    alone, in their dtype, summed in float32; targets are constants. A second derivative is an
    error. ValueError if the shapes do not fit.
    """
    check_shapes(*logits_NTK.shape[:2], palette_NM, extra_NTM, base_NT, total_NT)
    return SparseCrossEntropy.apply(logits_NTK, palette_NM, extra_NTM, base_NT, total_NT)


def weighted_mean(loss: Tensor, weight: Tensor) -> Tensor:
    """Mean of `loss` over what carries weight; 0 if nothing does."""
    return (loss * weight).sum() / weight.sum().clamp(min=1e-6)


def token_loss(tokens_NTK: Tensor, targets: Targets) -> Tensor:
    """L_aux of equation 6: the mean over all labeled tokens. MixToken's logits are un-mixed, so
    targets stay in place.
    """
    loss_NT = sparse_cross_entropy(
        tokens_NTK, targets.palette, targets.extra, targets.base, targets.total
    )
    return weighted_mean(loss_NT, targets.weight)


def class_token_loss(cls_NK: Tensor, targets: Targets) -> Tensor:
    """H(X_cls, y_cls) with the dense label of the whole crop: `targets` of a 1 x 1 grid, under
    MixToken already mixed.
    """
    return token_loss(cls_NK[:, None], targets)


class FusedTokenLoss(torch.autograd.Function):
    """Weighted sum of losses. The gradients are made in the forward pass, as logits exist only
    there, and scaled here.

    They are kept without the mean's factor 1/(N T): it would push those of float16 below its range.
    """

    @staticmethod
    def forward(
        ctx,
        features_NTD,
        weight_KD,
        bias_K,
        palette_NM,
        extra_NTM,
        base_NT,
        total_NT,
        row_weight_NT,
        dtype,
        wanted,
    ):
        loss, *grads = fused_head.loss_and_gradients(
            features_NTD,
            weight_KD,
            bias_K,
            palette_NM,
            extra_NTM,
            base_NT,
            total_NT,
            row_weight_NT,
            dtype,
            *wanted,
        )
        ctx.wanted = wanted
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    def backward(ctx, grad):
        grads = (
            made * grad if wanted else None
            for made, wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)
        )
        return *grads, *(None,) * 7


def fused_token_loss(
    features_NTD: Tensor, weight_KD: Tensor, bias_K: Tensor, targets: Targets
) -> Tensor:
    """`token_loss` of `F.linear(features, weight, bias)` whose logits never exist whole, for heads
    of many classes.

    Products are in autocast's dtype where it is on, all sums over classes and over chunks of rows
    in float32. What needs no gradient (a frozen head, everything under no_grad) costs none.
    ValueError if the shapes do not fit.
    """
    target = targets.palette, targets.extra, targets.base, targets.total
    check_shapes(*features_NTD.shape[:2], *target)
    device = features_NTD.device.type
    dtype = (
        torch.get_autocast_dtype(device)
        if torch.is_autocast_enabled(device)
        else features_NTD.dtype
    )
    wanted = tuple(
        torch.is_grad_enabled() and tensor.requires_grad
        for tensor in (features_NTD, weight_KD, bias_K)
    )
    loss = FusedTokenLoss.apply(
        features_NTD, weight_KD, bias_K, *target, targets.weight, dtype, wanted
    )
    return loss / targets.weight.sum().clamp(min=1e-6)


def token_labeling_loss(
    output: TokenLogits | TokenFeatures, whole: Targets, tokens: Targets, token_weight: float
) -> Tensor:
    """Equation 7: the class token's loss on `whole`, the dense label of the crop, and
    `token_weight` times that on `tokens`.
    """
    if isinstance(output, TokenFeatures):
        on_tokens = fused_token_loss(output.tokens, output.head.weight, output.head.bias, tokens)
    else:
        on_tokens = token_loss(output.tokens, tokens)
    return class_token_loss(output.cls, whole) + token_weight * on_tokens


def hard_label_loss(
    cls_NK: Tensor,
    label_N: Tensor,
    weight_N: Tensor,
    smoothing: float = 0.0,
    partner_share: Tensor | None = None,
) -> Tensor:
    """Plain cross entropy with the image's label; under MixToken mixed with the partner's by area,
    as CutMix does.
    """
    own = F.cross_entropy(cls_NK.float(), label_N, reduction="none", label_smoothing=smoothing)
    if partner_share is not None:
        partner = F.cross_entropy(
            cls_NK.float(), label_N.flip(0), reduction="none", label_smoothing=smoothing
        )
        own = torch.lerp(own, partner, partner_share)
    return weighted_mean(own, weight_N)

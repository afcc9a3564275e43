"""Losses of Token Labeling (arXiv 2104.10858): sparse cross entropy of class token and tokens.

With soft targets t_c = base + sum over m of extra_m [c = palette_m] that sum to `total`,
    CE = -sum_c t_c log_softmax(x)_c
       = total logsumexp(x) - base sum_c x_c - sum_m extra_m x_{palette_m}
    dCE/dx_c = total softmax(x)_c - t_c
so a row of logits is read only through its logsumexp, its sum and a gather. Dense targets are never
built.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from densefeed.models.kernels import fused_head
from densefeed.models.kernels import sparse_cross_entropy as kernels
from densefeed.models.token_transformer import TokenFeatures, TokenLogits
from densefeed.objectives.mask_loss import mask_loss
from densefeed.pipelines.masks import SoftMasks
from densefeed.pipelines.targets import SparseTargets

# N images   T tokens   D width   K classes   M classes of an image's palette   h x w pixels


class SparseCrossEntropy(torch.autograd.Function):
    """Sparse cross entropy; saves the logits, the targets and two numbers per row for backward."""

    @staticmethod
    def forward(ctx, logits_NTK, *targets):
        loss_NT, *sums = kernels.forward(logits_NTK, *targets)
        ctx.save_for_backward(logits_NTK, *sums, *targets)
        return loss_NT

    @staticmethod
    def backward(ctx, grad_NT):
        return kernels.backward(grad_NT, *ctx.saved_tensors), None, None, None, None


def list_fields(targets: SparseTargets, N: int, T: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields that kernels read. ValueError unless they are of N images of T tokens."""
    fields = targets.palette, targets.extra, targets.base, targets.total
    found, M = [tuple(tensor.shape) for tensor in fields], targets.palette.shape[-1]
    if found != [(N, M), (N, T, M), (N, T), (N, T)]:
        raise ValueError(
            f"targets of shapes {found} do not fit {N} images of {T} tokens; make targets for the "
            "grid of the model, or correct its patch_size"
        )
    return fields


def sparse_cross_entropy(logits_NTK: Tensor, targets: SparseTargets) -> Tensor:
    """Compute the cross entropy of each token, `[N, T]`, float32 (float64 for float64 logits).

    The targets must sum to their `total`. Only the logits get a gradient, in their dtype, summed in
    float32; targets are constants. A second derivative is an error. Raises ValueError if the shapes
    do not fit.
    """
    return SparseCrossEntropy.apply(logits_NTK, *list_fields(targets, *logits_NTK.shape[:2]))


def weighted_mean(loss: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted mean of `loss`, `[]`; 0 if all weights are 0."""
    # A part of the padded last batch may have no real sample, and warped images no labeled token.
    return (loss * weight).sum() / weight.sum().clamp(min=1e-6)


def sparse_loss(logits: Tensor, targets: SparseTargets | SoftMasks) -> Tensor:
    """Compute the mean cross entropy over all labeled tokens, `[]` (L_aux of equation 6).

    `logits` are those of the tokens, `[N, T, K]`, or of the class token, `[N, K]`, whose targets
    are of a grid of 1 (H(X_cls, y_cls)); or those of the pixels, `[N, K, h, w]`, whose targets are
    of a grid of h x w or, in less memory, SoftMasks (mask_loss.py). Logits of MixToken are already
    un-mixed, so targets stay in place. Each token or pixel counts by its weight in `targets`;
    without any the loss is 0. Raises ValueError if the shapes do not fit, where SparseTargets know
    h w and not h x w, and TypeError for logits that are not a floating-point tensor and for other
    targets.
    """
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        kind = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"logits are {kind}; give the network's output, a floating-point tensor")
    if isinstance(targets, SoftMasks):
        return mask_loss(logits, targets)
    if not isinstance(targets, SparseTargets):
        raise TypeError(
            f"targets are a {type(targets).__name__}; give SparseTargets or SoftMasks, or compute "
            "torch.nn.functional.cross_entropy of other targets"
        )
    # The class token is a grid of one, and pixels are tokens.
    logits_NTK = logits[:, None] if logits.ndim == 2 else logits
    logits_NTK = logits.flatten(2).mT if logits.ndim == 4 else logits_NTK
    return weighted_mean(sparse_cross_entropy(logits_NTK, targets), targets.weight)


class FusedTokenLoss(torch.autograd.Function):
    """Weighted sum of token losses, whose gradients are computed in the forward pass.

    Logits exist only there; the backward pass scales the gradients. They are stored without the
    mean's factor 1/(N T), which would push those of float16 below its range.
    """

    @staticmethod
    def forward(ctx, *arguments):
        *arguments, wanted = arguments
        loss, *grads = fused_head.loss_and_gradients(*arguments, *wanted)
        ctx.wanted = wanted
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    def backward(ctx, grad):
        # Not in place, which would save their memory, 71 MB of LV-ViT-S with 256 images and 21,841
        # classes: a loop may go through this graph again (retain_graph).
        # The other seven arguments, the targets and how to compute, are constants.
        saved = zip(ctx.saved_tensors, ctx.wanted, strict=True)
        return *(made * grad if wanted else None for made, wanted in saved), *(None,) * 7


def fused_token_loss(
    features_NTD: Tensor, weight_KD: Tensor, bias_K: Tensor, targets: SparseTargets
) -> Tensor:
    """Compute `sparse_loss` of `F.linear(features, weight, bias)` without storing all logits.

    For heads of many classes. Products are in autocast's dtype where it is enabled, all sums over
    classes and over chunks of rows in float32. Gradients are computed only for tensors that require
    them (not for a frozen head, and none under no_grad). Raises ValueError if the shapes do not
    fit.
    """
    target = list_fields(targets, *features_NTD.shape[:2])
    device, dtype = features_NTD.device.type, features_NTD.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    inputs = features_NTD, weight_KD, bias_K
    # Inside `forward` of an autograd function gradients are always disabled, so check here.
    wanted = tuple(torch.is_grad_enabled() and tensor.requires_grad for tensor in inputs)
    loss = FusedTokenLoss.apply(*inputs, *target, targets.weight, dtype, wanted)
    return loss / targets.weight.sum().clamp(min=1e-6)


def token_labeling_loss(
    output: TokenLogits | TokenFeatures,
    whole: SparseTargets,
    tokens: SparseTargets,
    token_weight: float,
) -> Tensor:
    """Compute equation 7: the class token's loss on `whole`, plus `token_weight` times L_aux.

    `whole` is the dense label of the crop; L_aux is the loss on `tokens`.
    """
    if isinstance(output, TokenFeatures):
        on_tokens = fused_token_loss(output.tokens, output.head.weight, output.head.bias, tokens)
    else:
        on_tokens = sparse_loss(output.tokens, tokens)
    return sparse_loss(output.cls, whole) + token_weight * on_tokens


def hard_label_loss(
    cls_NK: Tensor,
    label_N: Tensor,
    weight_N: Tensor,
    smoothing: float = 0.0,
    partner_share: Tensor | None = None,
) -> Tensor:
    """Compute the cross entropy with the image's label.

    Under MixToken it is mixed with that of the partner's label by area, as CutMix does.
    """
    # Under autocast the logits have 16 bits.
    logits_NK, options = cls_NK.float(), dict(reduction="none", label_smoothing=smoothing)
    loss_N = F.cross_entropy(logits_NK, label_N, **options)
    if partner_share is not None:
        # The partner is the batch reversed. Cross entropy is linear in its target, so a mean of two
        # losses is the loss of the mixed label.
        partner_N = F.cross_entropy(logits_NK, label_N.flip(0), **options)
        loss_N = torch.lerp(loss_N, partner_N, partner_share)
    return weighted_mean(loss_N, weight_N)

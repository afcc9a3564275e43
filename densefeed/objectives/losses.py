"""Losses of Token Labeling (arXiv 2104.10858): sparse cross entropy of class token and tokens.

With soft targets t_c = base + sum over m of extra_m [c = palette_m] that sum to `total`,
    CE = -sum_c t_c log_softmax(x)_c
       = total logsumexp(x) - base sum_c x_c - sum_m extra_m x_{palette_m}
    dCE/dx_c = total softmax(x)_c - t_c
so a row of logits is read only through its logsumexp, its sum and a gather. Dense targets are never
built.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from densefeed.models.kernels import fused_head
from densefeed.models.kernels import sparse_cross_entropy as kernels
from densefeed.models.token_transformer import TokenFeatures, TokenLogits
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
    of a grid of h x w or, in less memory, SoftMasks (see MaskLoss). Logits of MixToken are already
    un-mixed, so targets stay in place. Each token or pixel counts by its weight in `targets`;
    without any the loss is 0. Raises ValueError if the shapes do not fit.
    """
    if isinstance(targets, SoftMasks):
        return mask_loss(logits, targets)
    # The class token is a grid of one, and pixels are tokens.
    logits_NTK = logits[:, None] if logits.ndim == 2 else logits
    logits_NTK = logits.flatten(2).mT if logits.ndim == 4 else logits_NTK
    return weighted_mean(sparse_cross_entropy(logits_NTK, targets), targets.weight)


# A stripe of rows of pixels has logits of this many bytes in float32: on a CPU they stay in the
# cache, on a GPU each operation should be longer than its launch.
STRIPE_BYTES = {"cpu": 2 << 20, "cuda": 128 << 20}
LOG2_E = math.log2(math.e)


class MaskLoss(torch.autograd.Function):
    """Mean cross entropy of pixels, whose gradient is computed in the forward pass.

    Probabilities exist for a stripe of rows of pixels at a time; only the gradient of the logits
    stays, in their dtype. The one backward pass scales it in place. It is stored without the mean's
    factor 1/(N h w), which would push that of float16 below its range.
    """

    @staticmethod
    def forward(ctx, logits_NKhw, masks, wanted):
        with torch.autocast(logits_NKhw.device.type, enabled=False):
            loss, weight, ctx.grad = sum_stripes(logits_NKhw, masks, wanted)
        ctx.weight = weight.clamp(min=1e-6)
        return loss / ctx.weight

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        made, ctx.grad = ctx.grad, None
        if made is None:
            raise RuntimeError(
                "sparse_loss of masks has one backward pass, because its gradient is scaled in "
                "place; call sparse_loss again for a second"
            )
        return made.mul_(grad / ctx.weight), None, None


def sum_stripes(
    logits_NKhw: Tensor, masks: SoftMasks, wanted: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the sums of losses and of weights of all pixels, `[]`, and the first's gradient.

    The gradient is None unless `wanted`. Sums are in float32, or float64 for float64 logits.
    """
    K, h, w = logits_NKhw.shape[1:]
    dtype = kernels.accumulation_dtype(logits_NKhw)
    most = STRIPE_BYTES.get(logits_NKhw.device.type, STRIPE_BYTES["cuda"])
    count = min(h, max(1, most // (K * w * dtype.itemsize)))
    buffer = logits_NKhw.new_empty(K * count * w, dtype=dtype)
    loss, weight = logits_NKhw.new_zeros(2, dtype=torch.float64).unbind()
    grad_NKhw = logits_NKhw.new_empty(logits_NKhw.shape) if wanted else None
    for image, rows, soft, hard in masks.stripes(count):
        block = logits_NKhw[image, :, rows]
        below_KT = buffer[: block.numel()].view(K, -1)
        # Distances from the maximum, in powers of 2: on processors of AMD PyTorch's exp2 takes a
        # quarter of the time of its exp.
        peak = block.amax(0).to(dtype) * -LOG2_E
        torch.add(peak, block, alpha=LOG2_E, out=below_KT.view(block.shape))
        targets = weigh_targets(soft, hard, masks.share, dtype)
        # All terms have one sign: as targets sum to `total`, distances from the maximum are enough.
        loss -= targets.dot(below_KT) / LOG2_E
        partition = below_KT.exp2_().sum(0)
        loss += (targets.total * partition.log()).sum()
        weight += targets.weight.sum()
        if wanted:
            grad_KT = grad_NKhw[image, :, rows].view(below_KT.shape)
            # A gradient of 16 bits is rounded once.
            made = grad_KT if grad_KT.dtype == dtype else below_KT
            targets.subtract_from(below_KT, targets.total / partition, made)
            if made is below_KT:
                grad_KT.copy_(made)
    return loss.to(dtype), weight.to(dtype), grad_NKhw


class PixelTargets(NamedTuple):
    """Weighted targets of the T pixels of a stripe, as in the text above: never dense.

    Of a pixel they are `base` for each class, `extra` for those of the palette and `on_hard` for
    its hard class.
    """

    base: Tensor  # [T]
    palette: Tensor  # int64 [M]
    extra: Tensor  # [M, T]
    hard: Tensor | None  # int64 [1, T]
    on_hard: Tensor | None  # [1, T]
    total: Tensor  # [T], their sum
    weight: Tensor  # [T]

    def dot(self, values_KT: Tensor) -> Tensor:
        """Return the sum of all targets, each times its value, `[]`."""
        sums = sum_products(self.base, values_KT.sum(0))
        sums += sum_products(self.extra, values_KT[self.palette])
        if self.hard is not None:
            sums += sum_products(self.on_hard, values_KT.gather(0, self.hard))
        return sums

    def subtract_from(self, values_KT: Tensor, scale: Tensor, out: Tensor) -> None:
        """Write values, times the `scale` of each pixel, minus the targets to `out`, `[K, T]`."""
        torch.addcmul(-self.base, values_KT, scale, out=out)
        out.index_add_(0, self.palette, self.extra, alpha=-1)
        if self.hard is not None:
            out.scatter_add_(0, self.hard, -self.on_hard)


def sum_products(targets: Tensor, values: Tensor) -> Tensor:
    """Return the sum of targets times values, `[]`; overwrites the values.

    A logit of -inf takes a class out, whose target is 0.
    """
    # 0 times -inf would be NaN. Not torch.dot, which adds one product after the other: the loss of
    # zeros was 1.3e-5 off.
    return values.clamp_(min=torch.finfo(values.dtype).min).mul_(targets).sum()


def weigh_targets(
    soft: SparseTargets, hard_T: Tensor | None, share: float, dtype: torch.dtype
) -> PixelTargets:
    """Return the targets of a stripe by weight; with hard classes see `SoftMasks.mix`."""
    # Weights of the soft target and of the hard class. With w and m, whether they are known, these
    # are share and 1 - share where both are 1, w without a hard class, and m without a soft target.
    on_soft = soft.weight[0].to(dtype)
    weight, hard, on_hard = on_soft, None, None
    if hard_T is not None:
        labeled = (hard_T >= 0).to(dtype)
        on_hard = labeled * (1 - share * on_soft)
        on_soft = on_soft * (1 - labeled * (1 - share))
        weight = on_soft + on_hard
    # Extras of pixels lie class by class in memory, see `SoftMasks.stripes`.
    extra_MT = (soft.extra[0].mT * on_soft).to(dtype)
    total = on_soft * soft.total[0]
    if hard_T is not None:
        hard, total, on_hard = hard_T.clamp(min=0)[None], total + on_hard, on_hard[None]
    base = on_soft * soft.base[0]
    return PixelTargets(base, soft.palette[0], extra_MT, hard, on_hard, total, weight)


@torch.compiler.disable
def mask_loss(logits_NKhw: Tensor, masks: SoftMasks) -> Tensor:
    """Compute `sparse_loss` of pixels on the device of the logits."""
    wanted = len(masks.batch.view), masks.spec.num_classes, *masks.size
    if tuple(logits_NKhw.shape) != wanted:
        raise ValueError(
            f"logits of shape {tuple(logits_NKhw.shape)} do not fit masks of {wanted}; make masks "
            "of the size of the logits, or resize the logits"
        )
    needs_grad = torch.is_grad_enabled() and logits_NKhw.requires_grad
    return MaskLoss.apply(logits_NKhw, masks.to(logits_NKhw.device), needs_grad)


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

"""The loss of pixels on soft masks, whose targets and probabilities never exist as a whole.

It is the sparse cross entropy of losses.py, with the mean over all labeled pixels.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from densefeed.models.kernels import sparse_cross_entropy as kernels
from densefeed.pipelines.masks import SoftMasks
from densefeed.pipelines.targets import SparseTargets

# N images   K classes   M classes of an image's palette   h x w pixels   T pixels of a stripe

# A stripe of rows of pixels has logits of this many bytes in float32: on a CPU they stay in the
# cache, on a GPU each operation should be longer than its launch.
STRIPE_BYTES = {"cpu": 4 << 20, "cuda": 128 << 20}
LOG2_E = math.log2(math.e)


class MaskLoss(torch.autograd.Function):
    """Mean cross entropy of pixels, whose gradient is computed in the forward pass.

    Probabilities exist for a stripe of rows of pixels at a time; only the gradient of the logits
    stays, in their dtype. It is that of the mean over all pixels, or for float16, below whose range
    1/(N h w) would push it, that of the sum. The one backward pass scales it in place.
    """

    @staticmethod
    def forward(ctx, logits_NKhw, masks, wanted):
        N, _, h, w = logits_NKhw.shape
        count = 1 if logits_NKhw.dtype == torch.float16 else N * h * w
        with torch.autocast(logits_NKhw.device.type, enabled=False):
            loss, weight, ctx.grad = sum_stripes(logits_NKhw, masks, wanted, count)
        weight = weight.clamp(min=1e-6)
        ctx.scale = count / weight
        return loss / weight

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        made, ctx.grad = ctx.grad, None
        if made is None:
            raise RuntimeError(
                "sparse_loss of masks has one backward pass, because its gradient is scaled in "
                "place; call sparse_loss again for a second"
            )
        scale = grad * ctx.scale
        # As in loss.backward() where all pixels are labeled. On a GPU this would wait.
        if scale.device.type == "cpu" and scale == 1:
            return made, None, None
        return made.mul_(scale), None, None


def sum_stripes(
    logits_NKhw: Tensor, masks: SoftMasks, wanted: bool, count: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the sums of losses and of weights of all pixels, `[]`, and the first's gradient.

    The gradient is divided by `count`, and None unless `wanted`. Sums are in float32, or float64
    for float64 logits.
    """
    K, h, w = logits_NKhw.shape[1:]
    dtype = kernels.accumulation_dtype(logits_NKhw)
    most = STRIPE_BYTES.get(logits_NKhw.device.type, STRIPE_BYTES["cuda"])
    height = min(h, max(1, most // (K * w * dtype.itemsize)))
    buffer = logits_NKhw.new_empty(K * height * w, dtype=dtype)
    loss, weight = logits_NKhw.new_zeros(2, dtype=torch.float64).unbind()
    grad_NKhw = logits_NKhw.new_empty(logits_NKhw.shape) if wanted else None
    # On other devices the host would wait for what `is_exact` compares.
    shift = logits_NKhw.device.type != "cpu"
    for image, rows, soft, hard in masks.stripes(height):
        block = logits_NKhw[image, :, rows]
        powers_KT = buffer[: block.numel()].view(K, -1)
        targets = weigh_targets(soft, hard, masks.share, dtype)
        product, partition = exponentiate(block, targets, shift, powers_KT)
        # Rare; the other stripes then mostly need it too.
        if not shift and not is_exact(partition):
            shift = True
            product, partition = exponentiate(block, targets, shift, powers_KT)
        loss += (targets.total * partition.log()).sum(dtype=loss.dtype) - product
        weight += targets.weight.sum()
        if wanted:
            grad_KT = grad_NKhw[image, :, rows].view(powers_KT.shape)
            # A gradient of 16 bits is rounded once.
            made = grad_KT if grad_KT.dtype == dtype else powers_KT
            targets.subtract_from(powers_KT, targets.total / partition, count, made)
            if made is powers_KT:
                grad_KT.copy_(made)
    return loss.to(dtype), weight.to(dtype), grad_NKhw


def exponentiate(
    block_KRw: Tensor, targets: "PixelTargets", shift: bool, out_KT: Tensor
) -> tuple[Tensor, Tensor]:
    """Write e to the power of the logits to `out`.

    Return the sum of targets times logits, `[]`, and the sum of the powers, `[T]`. With `shift` the
    maximum of each pixel is subtracted first, so that no power overflows.
    """
    out = out_KT.view(block_KRw.shape)
    # Powers of 2: on processors of AMD PyTorch's exp2 takes a quarter of the time of its exp.
    if shift:
        peak = block_KRw.amax(0).to(out.dtype) * -LOG2_E
        torch.add(peak, block_KRw, alpha=LOG2_E, out=out)
    else:
        # A tensor of one element makes the product float32; a Python number would keep 16 bits.
        torch.mul(block_KRw, out.new_full((1,), LOG2_E), out=out)
    product = targets.dot(out_KT) / LOG2_E
    return product, out_KT.exp2_().sum(0)


def is_exact(partition_T: Tensor) -> bool:
    """Return whether the maximum logit of each pixel need not be subtracted.

    Finding the maxima takes a fifth of the time. Without, no power overflows here, and the loss of
    a pixel is off by up to 4e-6, the rounding of logarithms of up to 28: it may be below 0.
    """
    low, high = (end.item() for end in partition_T.aminmax())
    return low > 2.0**-40 and high < 2.0**40


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

    def subtract_from(self, values_KT: Tensor, scale: Tensor, count: int, out: Tensor) -> None:
        """Write values, times the `scale` of each pixel, minus the targets to `out`, `[K, T]`.

        The result is divided by `count`.
        """
        torch.addcmul(self.base / -count, values_KT, scale / count, out=out)
        out.index_add_(0, self.palette, self.extra, alpha=-1 / count)
        if self.hard is not None:
            out.scatter_add_(0, self.hard, self.on_hard / -count)


def sum_products(targets: Tensor, values: Tensor) -> Tensor:
    """Return the sum of targets times values, `[]`; overwrites the values.

    A logit of -inf takes a class out, whose target is 0.
    """
    # 0 times -inf would be NaN. In float64, as the sum is subtracted from a close one.
    products = values.clamp_(min=torch.finfo(values.dtype).min).mul_(targets)
    return products.sum(dtype=torch.float64)


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

"""The loss of pixels on soft masks, whose targets and probabilities never exist as a whole.

It is the sparse cross entropy of losses.py, with the mean over all labeled pixels.
"""

import math
import threading
import weakref
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


class GradientMemory(threading.local):
    """The memory of a thread's last gradient on a CPU, for the next one if no tensor has it then.

    By default glibc gives a tensor of more than 32 MB new pages each time, and touching them first
    took 80 of 190 ms an image (docs/results/targets.md, on the Xeon). The memory is kept until the
    thread ends. At the peak of a step, in the loss, a gradient exists anyway.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        # To what the last tensor's storage holds. It holds nothing yet: this set is gone at once.
        self._lease = weakref.ref(set())

    def take(self, like: Tensor) -> Tensor:
        """Return an uninitialized, contiguous tensor of the shape, dtype and device of another."""
        if like.device.type != "cpu" or not like.numel():
            return like.new_empty(like.shape)
        if self._bytes.nbytes != like.nbytes or self._lease() is not None:
            self._bytes = torch.empty(like.nbytes, dtype=torch.uint8, device="cpu")
        # The storage of the new tensor, which its views share, is the only holder of this array.
        lease = self._bytes.numpy()
        self._lease = weakref.ref(lease)
        return torch.from_numpy(lease).view(like.dtype).view(like.shape)


memory = GradientMemory()


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
            loss, weight, ctx.grad = sum_blocks(logits_NKhw, masks, wanted, count)
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


def sum_blocks(
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
    buffer_KT = logits_NKhw.new_empty((K, height * w), dtype=dtype)
    loss, weight = logits_NKhw.new_zeros(2, dtype=torch.float64).unbind()
    grad_NKhw = memory.take(logits_NKhw) if wanted else None
    # On other devices the host would wait for what `is_exact` compares.
    shift = logits_NKhw.device.type != "cpu"
    for image, rows, soft, hard in masks.blocks(height):
        targets = weigh_targets(soft, hard, masks.share, dtype, count)
        block = logits_NKhw[image, :, rows]
        grad = grad_NKhw[image, :, rows] if wanted else None
        sums = sum_stripes(block, targets, shift, buffer_KT, grad)
        # Rare; the other blocks then mostly need it too.
        if not shift and not is_exact(sums.partition):
            shift = True
            sums = sum_stripes(block, targets, shift, buffer_KT, grad)
        loss += targets.losses(sums).sum(dtype=loss.dtype)
        weight += targets.weight.sum()
    return loss.to(dtype), weight.to(dtype), grad_NKhw


class PixelSums(NamedTuple):
    """What the loss of T pixels needs of their logits, which count in powers of 2."""

    every: Tensor  # [T], sum of all logits
    named: Tensor  # [M, T], logits of the classes of the palette
    hard: Tensor | None  # [1, T], the logit of the hard class
    partition: Tensor  # [T], sum of the powers


class PixelTargets(NamedTuple):
    """Weighted targets of T pixels, as in the text above: never dense.

    Of a pixel they are `base` for each class, `extra` for those of the palette and `on_hard` for
    its hard class. The gradient is divided by `count`.
    """

    base: Tensor  # [T]
    palette: Tensor  # int64 [M]
    extra: Tensor  # [M, T]
    hard: Tensor | None  # int64 [1, T]
    on_hard: Tensor | None  # [1, T]
    total: Tensor  # [T], their sum
    weight: Tensor  # [T]
    count: int

    def losses(self, sums: PixelSums) -> Tensor:
        """Return the weighted cross entropy of each pixel, `[T]`; overwrites the sums.

        A logit of -inf takes a class out, whose target is 0.
        """
        terms = [(sums.every, self.base), (sums.named, self.extra), (sums.hard, self.on_hard)]
        total = self.total * sums.partition.log_()
        for values, target in terms:
            if values is not None:
                # 0 times -inf would be NaN.
                values = values.clamp_(min=torch.finfo(values.dtype).min).mul_(target)
                total.sub_(values if values.dim() == 1 else values.sum(0), alpha=1 / LOG2_E)
        return total


def sum_stripes(
    block_KRw: Tensor,
    targets: PixelTargets,
    shift: bool,
    buffer_KT: Tensor,
    grad_KRw: Tensor | None,
) -> PixelSums:
    """Return the sums of a block of rows, stripe by stripe; write the gradient, unless it is None.

    `buffer` has room for a stripe. With `shift` the maximum of each pixel is subtracted first, so
    that no power overflows.
    """
    K, R, w = block_KRw.shape
    every, partition = targets.base.new_empty((2, R * w)).unbind()
    named = torch.empty_like(targets.extra)
    hard = None if targets.hard is None else torch.empty_like(targets.on_hard)
    scale, base = targets.total / targets.count, targets.base / -targets.count
    on_hard = None if hard is None else targets.on_hard / -targets.count
    height = buffer_KT.shape[1] // w
    for first in range(0, R, height):
        end = min(R, first + height)
        here = slice(first * w, end * w)
        powers = buffer_KT.view(-1)[: K * (end - first) * w].view(K, -1)
        scale_logits(block_KRw[:, first:end], shift, powers.view(K, -1, w))
        torch.sum(powers, 0, out=every[here])
        torch.index_select(powers, 0, targets.palette, out=named[:, here])
        if hard is not None:
            torch.gather(powers, 0, targets.hard[:, here], out=hard[:, here])
        torch.sum(powers.exp2_(), 0, out=partition[here])
        if grad_KRw is not None:
            grad = grad_KRw[:, first:end].view(K, -1)
            # A gradient of 16 bits is rounded once.
            made = grad if grad.dtype == powers.dtype else powers
            torch.addcmul(base[here], powers, scale[here] / partition[here], out=made)
            made.index_add_(0, targets.palette, targets.extra[:, here], alpha=-1 / targets.count)
            if hard is not None:
                made.scatter_add_(0, targets.hard[:, here], on_hard[:, here])
            if made is powers:
                grad.copy_(made)
    return PixelSums(every, named, hard, partition)


def scale_logits(block_KRw: Tensor, shift: bool, out_KRw: Tensor) -> None:
    """Write logits as exponents of 2 to `out`; with `shift` less than the maximum of the pixel."""
    # Powers of 2: on processors of AMD PyTorch's exp2 takes a quarter of the time of its exp.
    if shift:
        peak = block_KRw.amax(0).to(out_KRw.dtype) * -LOG2_E
        torch.add(peak, block_KRw, alpha=LOG2_E, out=out_KRw)
    else:
        # A tensor of one element makes the product float32; a Python number would keep 16 bits.
        torch.mul(block_KRw, out_KRw.new_full((1,), LOG2_E), out=out_KRw)


def is_exact(partition_T: Tensor) -> bool:
    """Return whether the maximum logit of each pixel need not be subtracted.

    Finding the maxima takes a fifth of the time. Without, no power overflows here, and the loss of
    a pixel is off by up to 4e-6, the rounding of logarithms of up to 28: it may be below 0.
    """
    low, high = (end.item() for end in partition_T.aminmax())
    return low > 2.0**-40 and high < 2.0**40


def weigh_targets(
    soft: SparseTargets, hard_T: Tensor | None, share: float, dtype: torch.dtype, count: int
) -> PixelTargets:
    """Return the targets of some pixels by weight; with hard classes see `SoftMasks.mix`."""
    # Weights of the soft target and of the hard class. With w and m, whether they are known, these
    # are share and 1 - share where both are 1, w without a hard class, and m without a soft target.
    on_soft = soft.weight[0].to(dtype)
    weight, hard, on_hard = on_soft, None, None
    if hard_T is not None:
        labeled = (hard_T >= 0).to(dtype)
        on_hard = labeled * (1 - share * on_soft)
        on_soft = on_soft * (1 - labeled * (1 - share))
        weight = on_soft + on_hard
    # Extras of pixels lie class by class in memory, see `SoftMasks.blocks`.
    extra_MT = soft.extra[0].mT
    # Mostly all pixels are inside. On a GPU, which would wait, a product is cheaper.
    if on_soft.device.type != "cpu" or not (on_soft == 1).all():
        extra_MT = extra_MT * on_soft
    extra_MT = extra_MT.to(dtype)
    total = on_soft * soft.total[0]
    if hard_T is not None:
        hard, total, on_hard = hard_T.clamp(min=0)[None], total + on_hard, on_hard[None]
    base = on_soft * soft.base[0]
    return PixelTargets(base, soft.palette[0], extra_MT, hard, on_hard, total, weight, count)


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

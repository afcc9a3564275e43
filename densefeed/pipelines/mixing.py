"""MixToken, CutMix and MixUp: what a batch takes from its partner, which is the batch reversed.

Reversing needs no even batch: the middle sample of an odd one is its own partner. The box is drawn
by the plan and reaches the device as five numbers in a tensor, so a compiled or captured step is
one and the same for every box.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.targets import SparseTargets
from densefeed.system.errors import UserError
from densefeed.system.options import Fraction, NonNegative, Options

# N images   T = P * P tokens   M palette   H = W side of the input in pixels


class Mix(NamedTuple):
    """What is mixed in one step."""

    # float32 [4], (top, left, bottom, right), in units of which the image's side has `side`; what
    # is exchanged
    box_tlbr: Tensor
    # float32 [], the partner's share of every pixel (MixUp), blended before anything is exchanged
    blend: Tensor
    side: int  # pixels (CutMix, MixUp) or tokens (MixToken)

    def to(self, device: torch.device) -> "Mix":
        """On `device`, without waiting."""
        return Mix(
            self.box_tlbr.to(device, non_blocking=True),
            self.blend.to(device, non_blocking=True),
            self.side,
        )


@dataclass(frozen=True, kw_only=True)
class MixOptions(Options):
    """What is mixed with the partner image.

    MixToken together with CutMix raises UserError: their two boxes would need a label each.
    """

    # exchange a box of tokens with the partner image in every step (arXiv 2104.10858, section 3.3)
    mixtoken: bool = True
    # alpha of CutMix (arXiv 1905.04899), which exchanges a box of pixels; 0: none
    cutmix: NonNegative = 0.0
    # alpha of MixUp (arXiv 1710.09412), which blends images; 0: none
    mixup: NonNegative = 0.0
    mix_prob: Fraction = 1.0  # fraction of the steps that CutMix or MixUp mix
    switch_prob: Fraction = 0.5  # with both, the fraction of those steps that are CutMix
    # dense label of a mixed image: both labels by area, or the mean over the regions it shows
    mix_label: Literal["area", "regions"] = "area"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mixtoken and self.cutmix:
            raise UserError(
                "MixToken exchanges a box in every step already; give --no-mixtoken or --cutmix 0"
            )

    def __bool__(self) -> bool:
        return bool(self.mixtoken or self.cutmix or self.mixup)


class Mixing(NamedTuple):
    """Draws what a run mixes; `plan` draws every box."""

    plan: EpochPlan
    options: MixOptions

    def draw(self, epoch: int, step: int, size: int, grid: int) -> Mix:
        """The mix of a step, on the CPU: of images of `size` pixels a side, or of a `grid` x `grid`
        table of tokens.
        """
        plan, options, box, blend = self.plan, self.options, (0, 0, 0, 0), 0.0
        mixes, switch = plan.mix_switches(epoch, step)
        mixed = mixes < options.mix_prob
        if mixed and options.cutmix and (not options.mixup or switch < options.switch_prob):
            box = plan.mix_box(epoch, step, size, kept=plan.beta(epoch, step, options.cutmix))
        elif mixed and options.mixup:
            blend = 1 - plan.beta(epoch, step, options.mixup)
        if options.mixtoken:
            box, size = plan.mix_box(epoch, step, grid), grid
        return Mix(
            torch.tensor(box, dtype=torch.float32), torch.tensor(blend, dtype=torch.float32), size
        )


def combine_shares(one: Tensor, other: Tensor) -> Tensor:
    """The partner's share after two mixings with the same partner: who is exchanged twice is
    back.
    """
    return one + other - 2 * one * other


def box_map(mix: Mix, grid: int) -> Tensor:
    """The share of each cell of a `grid` x `grid` table over the image that the box covers. float32
    `[grid, grid]`.
    """
    edges = torch.arange(grid + 1, device=mix.box_tlbr.device) * (mix.side / grid)
    top, left, bottom, right = mix.box_tlbr.unbind()

    def covered(low: Tensor, high: Tensor) -> Tensor:
        return (torch.minimum(edges[1:], high) - torch.maximum(edges[:-1], low)).clamp(min=0) * (
            grid / mix.side
        )

    return covered(top, bottom)[:, None] * covered(left, right)


def share_map(mix: Mix, grid: int) -> Tensor:
    """The partner's share of what each cell of a `grid` x `grid` table over the image shows.
    float32 `[grid, grid]`.
    """
    return combine_shares(box_map(mix, grid), mix.blend)


def label_share(mix: Mix) -> Tensor:
    """The partner's share of the image's label. float32 `[]`.

    The box's true area, after it was clipped (1 - M̄ of equation 10), applied to labels that are
    blended already.
    """
    top, left, bottom, right = mix.box_tlbr.unbind()
    return combine_shares((bottom - top) * (right - left) / mix.side**2, mix.blend)


def mix_images(image_NCHW: Tensor, share: Tensor) -> Tensor:
    """Images with `share` (`[H, W]` or a scalar) of their partners; the memory format is kept.

    `share_map` at the input's side gives CutMix and MixUp. Where MixToken does the exchange later,
    `Mix.blend` alone is due.
    """
    return torch.lerp(image_NCHW, image_NCHW.flip(0), share.to(image_NCHW.dtype))


def mix_targets(targets: SparseTargets, share: Tensor) -> SparseTargets:
    """Targets mixed with the partner's: (1 - share) t + share t_partner, both by their weights; the
    palette is twice as long.

    `share` is a scalar (a label mixed by area) or `[T]` (each token by its own covered area). Where
    only one of the two has a label, that is the label, and the weight says how much of the token it
    covers.
    """
    share = share.flatten()  # 1 or T
    own, partner = (1 - share) * targets.weight, share * targets.weight.flip(0)
    weight = own + partner
    own, partner = (part / weight.clamp(min=1e-12) for part in (own, partner))
    return SparseTargets(
        palette=torch.cat([targets.palette, targets.palette.flip(0)], 1),
        extra=torch.cat(
            [own[..., None] * targets.extra, partner[..., None] * targets.extra.flip(0)], 2
        ),
        base=own * targets.base + partner * targets.base.flip(0),
        weight=weight,
        total=own * targets.total + partner * targets.total.flip(0),
    )


def mean_target(targets: SparseTargets) -> SparseTargets:
    """One target an image, the mean of its tokens': T becomes 1.

    Of tokens that were `mix_targets` it is a class label that knows what the exchanged region
    shows, where mixing by area takes the partner's label for the whole of its image (asked for in
    relabel_imagenet's issue 4).
    """
    part = targets.weight / targets.weight.sum(1, keepdim=True).clamp(min=1e-12)
    return SparseTargets(
        palette=targets.palette,
        extra=(part[..., None] * targets.extra).sum(1, keepdim=True),
        base=(part * targets.base).sum(1, keepdim=True),
        weight=targets.weight.mean(1, keepdim=True),
        total=(part * targets.total).sum(1, keepdim=True),
    )

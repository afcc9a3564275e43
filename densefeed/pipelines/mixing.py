"""MixToken, CutMix and MixUp of a batch with its partner, the batch reversed.

The size of the batch need not be even: the middle sample of an odd batch is its own partner. The
plan draws the box; box and blend reach the device as tensors, five numbers, so one compiled or
captured step serves every box.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.shapes import Grid, Shape, split_grid
from densefeed.pipelines.targets import SparseTargets
from densefeed.system.devices import send
from densefeed.system.errors import UserError
from densefeed.system.options import NonNegative, Options

# N images   T = R * C tokens   M palette   H, W pixels of the input
# R x C, the grid of tokens: rows and columns, or the side of a square


class Mix(NamedTuple):
    """The box and the blend of one step."""

    # float32 [4], (top, left, bottom, right): the box that is exchanged, in units of `grid`
    box_tlbr: Tensor
    # float32 [], the partner's share of every pixel (MixUp), blended before the exchange
    blend: Tensor
    grid: Grid  # of the image: pixels (CutMix, MixUp) or tokens (MixToken)

    def to(self, device: torch.device) -> "Mix":
        """Copy to `device` without a host sync."""
        # One copy for both.
        numbers = send(torch.cat([self.box_tlbr, self.blend[None]]), device)
        return Mix(numbers[:4], numbers[4], self.grid)


@dataclass(frozen=True, kw_only=True)
class MixOptions(Options):
    """What is mixed with the partner image.

    MixToken together with CutMix is refused: their two boxes would need a label each. With
    CutMix and MixUp, each step draws one of the two, with equal chances, as in timm. MixToken may
    follow MixUp (LV-ViT, arXiv 2104.10858, Table 7, third row).
    """

    # exchange a box of tokens with the partner image in every step (arXiv 2104.10858, section 3.2)
    mixtoken: bool = True
    # alpha of CutMix (arXiv 1905.04899), which exchanges a box of pixels; 0: none
    cutmix: NonNegative = 0.0
    # alpha of MixUp (arXiv 1710.09412), which blends images; 0: none
    mixup: NonNegative = 0.0
    # dense label of a mixed image: both labels by area, or the mean over the regions it shows
    mix_label: Literal["area", "regions"] = "area"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mixtoken and self.cutmix:
            raise UserError(
                "MixToken already exchanges a box in every step; choose --no-mixtoken or --cutmix 0"
            )

    def unused(self) -> dict[str, str]:
        return {} if self else {"mix_label": "--mixtoken, --cutmix or --mixup"}

    def __bool__(self) -> bool:
        return bool(self.mixtoken or self.cutmix or self.mixup)


def check_pairs(plan: EpochPlan, options: MixOptions) -> None:
    """Raise UserError where a run mixes and a part of a batch does not hold whole pairs."""
    count = plan.microbatches or plan.ranks
    if options and count > 1 and plan.batch // count % 2:
        raise UserError(
            f"a batch of {plan.batch} in {count} parts has {plan.batch // count} images in each, "
            "and an image and its mixing partner share a part; choose a batch whose parts have an "
            "even number, or mix nothing (--no-mixtoken --cutmix 0 --mixup 0)"
        )


class Mixing(NamedTuple):
    """Draws what a run mixes; `plan` draws every box."""

    plan: EpochPlan
    options: MixOptions

    def draw(self, epoch: int, step: int, size: int | Shape, grid: Grid) -> Mix:
        """Draw the mix of a step, on the CPU.

        It is for images of `size` pixels, a side or (height, width), or a `grid` of tokens
        (MixToken).
        """
        plan, options, box, blend = self.plan, self.options, (0, 0, 0, 0), 0.0
        if options.cutmix and (not options.mixup or plan.mix_switch(epoch, step) < 0.5):
            box = plan.mix_box(epoch, step, size, kept=plan.beta(epoch, step, options.cutmix))
        elif options.mixup:
            # MixUp's lambda is the image's own share, `blend` is its partner's.
            blend = 1 - plan.beta(epoch, step, options.mixup)
        if options.mixtoken:
            # MixOptions refuses CutMix beside MixToken, so no other box is overwritten.
            box, size = plan.mix_box(epoch, step, grid), grid
        box_tlbr = torch.tensor(box, dtype=torch.float32)
        return Mix(box_tlbr, torch.tensor(blend, dtype=torch.float32), size)


def combine_shares(one: Tensor, other: Tensor) -> Tensor:
    """Return the partner's share after two mixings with the same partner; two exchanges cancel."""
    # (1 - one) other + one (1 - other): what both exchange is the image's own again.
    return one + other - 2 * one * other


def box_map(mix: Mix, grid: Grid) -> Tensor:
    """Return the share of each cell that the box covers: float32 `[R, C]`.

    The cells are a table of `grid` over the image.
    """
    top, left, bottom, right = mix.box_tlbr.unbind()
    down, across = zip(split_grid(mix.grid), split_grid(grid), strict=True)

    def find_edges(units: int, cells: int) -> Tensor:
        return torch.arange(cells + 1, dtype=top.dtype, device=top.device) * (units / cells)

    def cover(low: Tensor, high: Tensor, edges: Tensor, units: int, cells: int) -> Tensor:
        # The box has whole units of `mix.grid`, so it may cover a part of a cell.
        overlap = torch.minimum(edges[1:], high) - torch.maximum(edges[:-1], low)
        return overlap.clamp(min=0) * (cells / units)

    edges_y = find_edges(*down)
    # Once for a square: two launches fewer.
    edges_x = edges_y if across == down else find_edges(*across)
    return cover(top, bottom, edges_y, *down)[:, None] * cover(left, right, edges_x, *across)


def share_map(mix: Mix, grid: Grid) -> Tensor:
    """Return the partner's share of the pixels of a cell of `box_map`: float32 `[R, C]`."""
    return combine_shares(box_map(mix, grid), mix.blend)


def label_share(mix: Mix) -> Tensor:
    """Return the partner's share of the image's label: float32 `[]`.

    The true area of the clipped box (1 - M̄ of LV-ViT's equation 10), applied to labels that are
    already blended.
    """
    top, left, bottom, right = mix.box_tlbr.unbind()
    area = math.prod(split_grid(mix.grid))
    return combine_shares((bottom - top) * (right - left) / area, mix.blend)


def mix_images(image_NCHW: Tensor, share: Tensor) -> Tensor:
    """Mix images with a `share` (`[H, W]` or a scalar) of their partners; keeps the memory format.

    `share_map` at the input's shape gives CutMix and MixUp. Where MixToken exchanges the box later,
    pass `Mix.blend` alone.
    """
    # torch.lerp refuses a weight of another dtype.
    return torch.lerp(image_NCHW, image_NCHW.flip(0), share.to(image_NCHW.dtype))


def mix_targets(targets: SparseTargets, share: Tensor) -> SparseTargets:
    """Mix targets with the partner's: (1 - share) t + share t_partner, both by their weights.

    The palette is twice as long. `share` is a scalar (a label mixed by area) or `[T]` (each token
    by its own covered area). Where only one of the two has a label, the result is that label, and
    the weight is the share of the token that it covers.
    """
    share = share.flatten()  # 1 or T
    other = SparseTargets(*(field.flip(0) for field in targets))
    own, partner = (1 - share) * targets.weight, share * other.weight
    weight = own + partner
    # Where neither has a label, 0 / 1e-12 gives shares of 0 instead of NaN.
    own, partner = (part / weight.clamp(min=1e-12) for part in (own, partner))
    extra = own[..., None] * targets.extra, partner[..., None] * other.extra
    return SparseTargets(
        palette=torch.cat([targets.palette, other.palette], 1),
        extra=torch.cat(extra, 2),
        base=own * targets.base + partner * other.base,
        weight=weight,
        total=own * targets.total + partner * other.total,
    )


def mean_target(targets: SparseTargets) -> SparseTargets:
    """Average the targets of each image's tokens into one: T becomes 1.

    After `mix_targets` of the tokens this is a class label of the content of the exchanged region;
    mixing by area assigns the partner's label to any part of its image.
    """
    part = targets.weight / targets.weight.sum(1, keepdim=True).clamp(min=1e-12)
    return SparseTargets(
        palette=targets.palette,
        extra=(part[..., None] * targets.extra).sum(1, keepdim=True),
        base=(part * targets.base).sum(1, keepdim=True),
        weight=targets.weight.mean(1, keepdim=True),
        total=(part * targets.total).sum(1, keepdim=True),
    )

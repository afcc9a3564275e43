"""Score maps and Views to sparse token targets, on the device and without a dense map or target.

DESIGN: token (r, c) of a P x P grid is the mean of g x g bilinear samples of the map at View(points) seen through the
Window, which is RoIAlign (aligned) with g = ceil(box / P). For a View of crop and flip alone the sampling is separable: a
small weight matrix per axis and two batched products. Work is done in each image's own palette of classes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..relabel.geometry import samples_per_bin
from .batch import Batch, LabelSpec

# N images   S map side   k classes per cell   M palette   P grid side   T = P * P tokens   G samples per token and axis


class SparseTargets(NamedTuple):
    """Soft targets over K classes: t = base + sum over m of extra[m] at class palette[m]; they sum to `total`.

    A palette may name a class twice: its extras add up.
    """

    palette: Tensor  # int64 [N, M]; unused slots point at class 0 with extra 0
    extra: Tensor  # float32 [N, T, M], may be negative
    base: Tensor  # float32 [N, T], what every class gets
    weight: Tensor  # float32 [N, T], 1 inside Window and image, 0 outside, between at the border
    total: Tensor  # float32 [N, T], sum of a target: 1 + smoothing / K, as the published smoothing does


def palettes(map_class: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Each map's distinct classes, int64 `[N, size]` ascending, and every entry's slot in it, int64 `[N, S * S * k]`.

    `map_class` is `[N, S, S, k]`; `size` must be at least the number of distinct classes of any map.
    """
    ordered, source = map_class.flatten(1).long().sort(dim=1)
    is_new = torch.cat([torch.ones_like(ordered[:, :1]), (ordered[:, 1:] != ordered[:, :-1]).long()], dim=1)
    rank = is_new.cumsum(1) - 1
    slot = torch.empty_like(rank).scatter_(1, source, rank)
    palette = torch.zeros(len(ordered), size, dtype=torch.long, device=ordered.device).scatter_(1, rank, ordered)
    return palette, slot


def axis_weights(
    scale: Tensor, shift: Tensor, low: Tensor, high: Tensor, side: int, grid: int, most: int
) -> tuple[Tensor, Tensor]:
    """Sampling along one axis: weights of the map's cells, `[N, P, S]`, and the share of samples inside, `[N, P]`.

    Args:
        scale, shift: `[N]`, the View along this axis: image = scale * output + shift.
        low, high: `[N]`, the Window along this axis.
        most: G, at least the samples any crop needs; those beyond ceil(box / P) are masked.
    """
    extent = scale.abs() / (high - low) * side  # of the crop, in cells
    # The guard keeps a box of exactly P cells at one sample where rounding makes it 14.000001.
    count = (extent / grid - 1e-5).ceil().clamp(1, most)
    number = torch.arange(most, device=scale.device)
    used = number < count[:, None]  # N G
    within = (number + 0.5) / count[:, None]  # N G
    output = (torch.arange(grid, device=scale.device)[:, None] + within[:, None]) / grid  # N P G
    image = scale[:, None, None] * output + shift[:, None, None]
    through = (image - low[:, None, None]) / (high - low)[:, None, None]  # 0 to 1 inside the Window
    inside = (through > -1e-6) & (through < 1 + 1e-6) & (image > -1e-6) & (image < 1 + 1e-6) & used[:, None]
    cell = (through * side - 0.5).clamp(0, side - 1)
    hat = (1 - (cell[..., None] - torch.arange(side, device=scale.device)).abs()).clamp(min=0)  # N P G S, bilinear
    inside = inside.to(scale.dtype)
    hits = inside.sum(-1)
    return (hat * inside[..., None]).sum(2) / hits.clamp(min=1)[..., None], hits / count[:, None]


def sparse_targets(batch: Batch, spec: LabelSpec, grid: int, smoothing: float = 0.0) -> SparseTargets:
    """Targets of a `grid` x `grid` table of tokens, row-major; `grid=1` gives the class token's.

    Views must be crops and flips (no rotation or shear). `spec.absent` says what a class outside a cell's top-k has:
    `zero-logit`: logit 0, logits are averaged over the samples, then softmax (published packs, reference of TokenLabeling);
    `tail`: an even share of the probability the top-k leave, probabilities are averaged.
    Smoothing s: t (1 - s + s/K) + s/K, as published.
    """
    view, window = batch.view, batch.window
    most = samples_per_bin(spec.side, grid, spec.min_window_side)
    rows, rows_inside = axis_weights(view[:, 1, 1], view[:, 1, 2], window[:, 0], window[:, 2], spec.side, grid, most)
    columns, columns_inside = axis_weights(view[:, 0, 0], view[:, 0, 2], window[:, 1], window[:, 3], spec.side, grid, most)
    palette, slot = palettes(batch.map_class, spec.max_palette)
    logit = batch.map_logit.to(view.dtype)

    def pooled(map_NMSS: Tensor) -> Tensor:
        """`[N, M, S, S]` to `[N, T, M]`."""
        return (rows[:, None] @ map_NMSS @ columns[:, None].mT).flatten(2).mT

    def spread(value: Tensor) -> Tensor:
        """Entries `[N, S, S, k]` as a map over the palette, `[N, M, S, S]`."""
        N, S = value.shape[:2]
        cells = torch.zeros(N, S * S, spec.max_palette, dtype=value.dtype, device=value.device)
        cells.scatter_(2, slot.view(N, S * S, -1), value.flatten(1, 2))
        return cells.mT.unflatten(2, (S, S))

    if spec.absent == "zero-logit":
        value = pooled(spread(logit))  # N T M
        peak = value.amax(-1, keepdim=True).clamp(min=0)
        grown = (value - peak).exp()
        rest = (-peak).exp()  # e^0, shifted
        partition = spec.num_classes * rest + (grown - rest).sum(-1, keepdim=True)
        base, extra = (rest / partition).squeeze(-1), (grown - rest) / partition
    else:
        probability = (logit - batch.map_lse.to(view.dtype)[..., None]).exp()
        kept = probability.sum(-1, keepdim=True)
        others = spec.num_classes - spec.top_k
        # Rounding to float16 lets the kept probabilities pass 1 by 1e-3; where every class is kept they must sum to 1.
        probability = probability / (kept.clamp(min=1) if others else kept)
        share = (1 - probability.sum(-1)).clamp(min=0) / max(others, 1)
        base = pooled(share[:, None]).squeeze(-1)
        extra = pooled(spread(probability - share[..., None]))
    off = smoothing / spec.num_classes
    on = 1 - smoothing + off
    weight = (rows_inside[:, :, None] * columns_inside[:, None]).flatten(1) * batch.weight[:, None]
    base = on * base + off
    return SparseTargets(palette, on * extra, base, weight, total=torch.full_like(base, on + smoothing))

"""Sparse token targets from score maps and Views, on the device, without a dense map or target.

Token (r, c) of a P x P grid is the mean of g x g bilinear samples of the map at View(points) seen
through the Window. That is RoIAlign (aligned) with g = ceil(box / P). For an axis-aligned View
(crop, flip, translation) the sampling is separable: a small weight matrix per axis and two batched
products. Rotated and sheared Views gather the same points one by one. All work is done in each
image's own palette of classes. Shapes depend on shapes alone, and nothing waits for the device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.fused_targets import SlotMaps, can_run, pool_targets, spread_maps
from densefeed.pipelines.shapes import Grid, split_grid
from densefeed.storage.geometry import (
    labeling_cells,
    published_frame,
    samples_per_bin,
    window_frame,
)
from densefeed.storage.score_maps import ScoreMaps, find_faults
from densefeed.system.errors import UserError
from densefeed.system.options import Bounds, Options

# N images   S map side   k classes per cell   M palette   R x C or P x P tokens   T = R * C
# G samples per token and axis

GroundTruth = Literal["published", "intended"]
# Share of the teacher's label where its best class is the image's label, and where it is another.
# The published code (VOLO's, and TokenLabeling's --ground-truth) gives the image's label the larger
# share where the teacher agrees; its comment states the opposite.
TEACHER_SHARE = {"published": (0.5, 0.9), "intended": (0.9, 0.5)}
# A point that rounding puts this far outside the image or map is on its border.
EDGE = 1e-6


@dataclass(frozen=True, kw_only=True)
class TargetRules(Options):
    """How targets are made of score maps. The defaults read what a token shows and nothing else."""

    # label smoothing, probability
    smoothing: Annotated[float, Bounds(0, 0.999)] = 0.0
    # temperature of dense labels: above 1 softer, below 1 harder than the teacher's
    temperature: Annotated[float, Bounds(1e-3)] = 1.0
    # mix the image's label into the class token's dense label: as the published code does, or as
    # its comment says
    ground_truth: Literal["none", "published", "intended"] = "none"
    # aligned: labels of what a token shows; published: of where the published code reads the map
    geometry: Literal["aligned", "published"] = "aligned"
    # what lies outside map, image, crop or the data's classes: no label, or all classes alike
    outside: Literal["ignore", "uniform"] = "ignore"

    def smooth(self, num_classes: int) -> tuple[float, float]:
        """Return (1 - s + s/K, s/K): what smoothing multiplies a probability by, and then adds.

        A distribution then sums to 1 + s/K, as published, and not to 1.
        """
        off = self.smoothing / num_classes
        return 1 - self.smoothing + off, off


PLAIN = TargetRules()


class SparseTargets(NamedTuple):
    """Soft targets over K classes: t = base + sum over m of extra[m] at class palette[m].

    They sum to `total`. A palette may name a class twice: its extras add up.
    """

    palette: Tensor  # int64 [N, M]; unused slots point at class 0 with extra 0
    extra: Tensor  # float32 [N, T, M], may be negative
    base: Tensor  # float32 [N, T], what every class gets
    weight: Tensor  # float32 [N, T], 1 inside Window and crop, 0 outside, between at the border
    # float32 [N, T], sum of a target: 1 + smoothing / K, as the published smoothing does
    total: Tensor

    def dense(self, num_classes: int) -> Tensor:
        """Return the targets as a dense tensor, float `[N, T, num_classes]`.

        `num_classes` are those of the labels; an IndexError or RuntimeError for fewer.
        """
        T = self.base.shape[1]
        dense = self.base[..., None].repeat(1, 1, num_classes)
        return dense.scatter_add_(2, self.palette[:, None].expand(-1, T, -1), self.extra)


# ---------------------------------------------------------------- where a token's samples lie


class Places(NamedTuple):
    """How points of the network's input relate to image and map, for x and y: `[N, 2, ...]`."""

    view: Tensor  # [N, 2, 3], to the image
    through: Tensor  # [N, 2, 3], to the map: 0 to 1 inside it
    visible: Tensor  # [N, 2, 2], first and last coordinate of the crop, in the image
    cells: Tensor  # [N, 2, 2], first and last cell of the map that shows the image
    margin: float  # how far beyond 0 and 1 of the map a point counts as inside


def places(batch: Batch, side: int, rules: TargetRules) -> Places:
    """Combine a batch's Views with the frames of its maps."""
    view = batch.view
    if rules.geometry == "aligned":
        frame = window_frame(batch.window)
        cells = labeling_cells(frame, side)
    else:
        frame = published_frame(batch.shown, view, side)
        # All cells count: the published code ignores the Window, and with it any padding.
        ends = torch.arange(2, dtype=view.dtype, device=view.device) * (side - 1)
        cells = ends.expand(len(view), 2, 2)
    scale, shift = frame.unbind(2)
    through = scale[:, :, None] * view + F.pad(shift[:, :, None], (2, 0))
    # x before y; a list as an index would be copied to a GPU, and the host would wait. A crop lies
    # within its image, so no point is tested against the image too.
    visible = batch.shown.unflatten(1, (2, 2)).mT.flip(1)
    return Places(view, through, visible, cells, map_margin(side, rules))


def map_margin(side: int, rules: TargetRules) -> float:
    """Return how far beyond 0 and 1 of a map of `side` cells a point counts as inside."""
    # The published sampling clamps points within half a cell beyond the map and reads 0 for points
    # farther outside.
    return EDGE if rules.geometry == "aligned" else 0.5 / side + EDGE


def sample_points(extent: Tensor, grid: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Place samples along x and y of the input for crops that span `extent` cells, `[N, 2]`.

    Returns coordinates `[N, 2, P, G]` with G = `most`, whether each counts, bool `[N, 2, 1, G]`,
    and how many of a token count, `[N, 2]`: ceil(extent / P), as RoIAlign.
    """
    # The guard keeps a box of exactly P cells at one sample where rounding makes it 14.000001.
    count = (extent / grid - 1e-5).ceil().clamp(1, most)
    # With integers the result would have PyTorch's default dtype, which a script may have set.
    middles = torch.arange(most, dtype=extent.dtype, device=extent.device) + 0.5
    within = middles / count[..., None]
    points = (torch.arange(grid, device=extent.device)[:, None] + within[:, :, None]) / grid
    return points, (within < 1)[:, :, None], count


def is_inside(at: Places, image: Tensor, through: Tensor) -> Tensor:
    """Test whether x and y of points of image and map, `[N, 2, ...]`, lie in crop and map."""
    low, high = at.visible[..., None, None].unbind(2)
    in_map = (through > -at.margin) & (through < 1 + at.margin)
    return in_map & (image > low - EDGE) & (image < high + EDGE)


def axis_weights(at: Places, side: int, grid: int, most: int) -> tuple[Tensor, Tensor]:
    """Compute the sampling of axis-aligned Views along x and y.

    Returns weights of the map's cells, `[N, 2, P, S]`, and the share of samples inside,
    `[N, 2, P]`.
    """
    # Scale and shift of each axis, of the map and of the image.
    (map_scale, map_shift), (scale, shift) = (
        (matrix[:, :, :2].diagonal(dim1=1, dim2=2)[..., None, None], matrix[..., 2, None, None])
        for matrix in (at.through, at.view)
    )
    points, used, count = sample_points(map_scale[..., 0, 0].abs() * side, grid, most)
    through = map_scale * points + map_shift  # N 2 P G
    inside = (is_inside(at, scale * points + shift, through) & used).to(points.dtype)
    first, last = at.cells[..., None, None].unbind(2)
    # Beyond the edge of the image, as beyond that of the map, the last cell repeats: no padding.
    cell = (through * side - 0.5).clamp(first, last)
    # bilinear weights, N 2 P G S
    hat = (1 - (cell[..., None] - torch.arange(side, device=cell.device)).abs()).clamp(min=0)
    # A token without a sample inside has weights and a share of 0, not 0 / 0.
    hits = inside.sum(-1)
    return (hat * inside[..., None]).sum(3) / hits.clamp(min=1)[..., None], hits / count[..., None]


def table_points(
    at: Places, side: int, grid: tuple[int, int], most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return how to sample any View: points, their shares in tokens and shares of samples inside.

    The points of the map are `[N, R * G, C * G, 2]`, -1 to 1 as in grid_sample. Their share in the
    mean of their token is `[N, 1, R * G, C * G]`, 0 outside. The share of samples inside is
    `[N, R, C]`.
    """
    rows, columns = grid
    # Length of the input's axis on the map, however the View rotates it.
    extent = at.through[:, :, :2].norm(dim=1) * side
    down = sample_points(extent, rows, most)
    across = down if rows == columns else sample_points(extent, columns, most)
    (x, used_x, count_x), (y, used_y, count_y) = (
        [part[:, axis] for part in parts] for axis, parts in enumerate((across, down))
    )
    x, y = x.flatten(1)[:, None, None], y.flatten(1)[:, None, :, None]
    through, image = (
        a * x + b * y + c
        for a, b, c in (matrix[..., None, None].unbind(2) for matrix in (at.through, at.view))
    )
    # N 1 G, of a token: for all columns, and for all rows.
    used_x, used_y = used_x.repeat(1, 1, columns), used_y.repeat(1, 1, rows)
    inside = is_inside(at, image, through).all(1) & used_x & used_y.mT
    first, last = ((at.cells[..., None, None] + 0.5) / side).unbind(2)
    # grid_sample repeats the map's edge; before padding, the image's last cell must repeat.
    through = through.clamp(first, last)
    # N R G C G
    inside = inside.to(x.dtype).unflatten(2, (columns, most)).unflatten(1, (rows, most))
    hits = inside.sum((2, 4))
    share = (inside / hits.clamp(min=1)[:, :, None, :, None]).flatten(3, 4).flatten(1, 2)[:, None]
    count = (count_x * count_y)[:, None, None]
    return through.permute(0, 2, 3, 1) * 2 - 1, share, hits / count


def may_round(tensor: Tensor) -> bool:
    """Tell whether matrix products on the tensor's device may be rounded to TF32."""
    return tensor.is_cuda and torch.backends.cuda.matmul.allow_tf32


def exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` in the tensors' own precision, whatever autocast and TF32 settings the caller uses.

    bfloat16 keeps 8 bits of a logit and TF32 11. PyTorch has no switch for one product, so where
    TF32 is allowed the product is written as a sum.
    """
    with torch.autocast(a.device.type, enabled=False):
        if may_round(a):
            return (a[..., None] * b[..., None, :, :]).sum(-2)
        return a @ b


def most_samples(batch: Batch, spec: ScoreMapSpec, grid: Grid, rules: TargetRules) -> int:
    """Return the most samples that a token of a crop has along either axis."""
    # Published boxes lie within the image, which the published code takes for the map.
    reach = spec.min_window_side if rules.geometry == "aligned" else 1.0
    return samples_per_bin(spec.side, min(split_grid(grid)), reach, not batch.axis_aligned)


def sampler(
    batch: Batch, spec: ScoreMapSpec, grid: Grid, rules: TargetRules
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Build the pooling of a batch's maps to a table of tokens.

    Returns a function that pools maps `[N, S, S, M]` to tokens `[N, T, M]`, means over the samples
    inside, and the share of samples inside `[N, T]`. `batch.axis_aligned` selects the method.
    """
    grid, most = split_grid(grid), most_samples(batch, spec, grid, rules)
    at = places(batch, spec.side, rules)
    if batch.axis_aligned:
        down = axis_weights(at, spec.side, grid[0], most)
        across = down if grid[0] == grid[1] else axis_weights(at, spec.side, grid[1], most)
        columns, inside_x = (part[:, 0] for part in across)
        rows, inside_y = (part[:, 1] for part in down)

        def pool_axes(map_NSSM: Tensor) -> Tensor:
            strips_NRSM = exact_matmul(rows, map_NSSM.flatten(2)).unflatten(2, map_NSSM.shape[2:])
            return exact_matmul(columns[:, None], strips_NRSM).flatten(1, 2)

        return pool_axes, (inside_y[:, :, None] * inside_x[:, None]).flatten(1)
    points, share, inside = table_points(at, spec.side, grid, most)
    return partial(pool_points, points, share, most), inside.flatten(1)


def pool_points(points: Tensor, share: Tensor, most: int, map_NSSM: Tensor) -> Tensor:
    """Pool maps to tokens `[N, T, M]` at the first two results of `table_points`."""
    map_NMSS = map_NSSM.permute(0, 3, 1, 2).contiguous()
    sampled = F.grid_sample(
        map_NMSS, points, mode="bilinear", padding_mode="border", align_corners=False
    ).mul_(share)
    # The divisor of 1 makes it a sum over the samples of a token: `share` has divided already.
    pooled = F.avg_pool2d(sampled, most, divisor_override=1) if most > 1 else sampled
    return pooled.flatten(2).mT


# ---------------------------------------------------------------- targets


class PaletteMaps(NamedTuple):
    """A batch's score maps over their palettes: what the targets of every grid are pooled from."""

    palette: Tensor  # int64 [N, M]
    # float32 [N, S, S, M]: zero-logit: logits; else: probabilities beyond what every class has
    value: Tensor
    # float32 [N, S, S, 1], what every class has; 0 with background, None with zero-logit
    share: Tensor | None


def palettes(map_class: Tensor, size: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """Find each map's distinct classes.

    Returns the palettes, int64 `[N, size]`, ascending, and the slot of every entry in its palette,
    int64 `[N, S * S * k]`. `map_class` is `[N, S, S, k]`; `size` must be at least the number of
    distinct classes of any map.
    """
    # By a table of all classes. To sort the entries takes 7 times as long for 1,000 classes, and
    # half as long for 21,841: 4.7 ms for 128 maps of 18 x 18 cells and their top 5.
    entries = map_class.flatten(1).long()
    named = torch.zeros(len(entries), num_classes, dtype=torch.bool, device=entries.device)
    rank = named.scatter_(1, entries, True).cumsum(1, dtype=torch.int32)
    slot = rank.gather(1, entries).long() - 1
    palette = torch.zeros(len(entries), size, dtype=torch.long, device=entries.device)
    # A class that several entries name is written several times.
    return palette.scatter_(1, slot, entries), slot


def apply_temperature(
    log_probability: Tensor, spec: ScoreMapSpec, temperature: float
) -> tuple[Tensor, Tensor]:
    """Turn log-probabilities of a cell's top-k classes `[..., k]` into probabilities.

    Returns those of the top k, `[..., k]`, and that of each other class, `[..., 1]`, which is 0 if
    what the top k leave belongs to no class (`background`). Temperature
    redistributes what the top k have together. The remainder stays as it is: float16 resolves it to
    1e-3 only, and the fourth root of 1e-6 is 0.03 for each of 995 classes, 31 together.
    """
    probability = log_probability.exp()
    kept = probability.sum(-1, keepdim=True)
    others, background = spec.num_classes - spec.top_k, spec.absent == "background"
    # Rounding to float16 lets the kept probabilities pass 1 by 1e-3; where every class is kept they
    # must sum to 1.
    probability = probability / (kept.clamp(min=1) if others or background else kept)
    share = (1 - probability.sum(-1, keepdim=True)).clamp(min=0) / max(others, 1)
    if background:
        share = torch.zeros_like(share)
    if temperature != 1:
        softened = (log_probability / temperature).softmax(-1)
        probability = probability.sum(-1, keepdim=True) * softened
    return probability, share


def palette_maps(batch: Batch, spec: ScoreMapSpec, rules: TargetRules) -> PaletteMaps | SlotMaps:
    """Spread the maps of a batch over their palettes.

    `sparse_targets` takes the result where targets of several grids are made from one batch. On a
    GPU it is a SlotMaps, for the kernels.
    """
    if can_run(batch.view, spec.max_palette):
        maps = batch.map_class, batch.map_logit, batch.map_lse
        numbers = spec.num_classes, spec.max_palette, spec.absent, rules.temperature
        at = places(batch, spec.side, rules)
        rows = at.view, at.through, at.visible, at.cells, batch.weight[:, None]
        place = torch.cat([field.flatten(1) for field in rows], 1)
        return SlotMaps(*spread_maps(*maps, *numbers), place)
    return spread_palettes(batch, spec, rules)


def spread_palettes(batch: Batch, spec: ScoreMapSpec, rules: TargetRules) -> PaletteMaps:
    """Spread the maps of a batch over their palettes, on any device."""
    palette, slot = palettes(batch.map_class, spec.max_palette, spec.num_classes)
    entries, share = batch.map_logit.to(batch.view.dtype), None
    if spec.absent != "zero-logit":
        probability, share = apply_temperature(
            entries - batch.map_lse.to(entries.dtype)[..., None], spec, rules.temperature
        )
        entries = probability - share
    else:
        # Pooling is linear: dividing before it or after it gives the same. Classes that were not
        # kept stay at logit 0, as published.
        entries = entries / rules.temperature
    N, S = entries.shape[:2]
    value = torch.zeros(N, S * S, spec.max_palette, dtype=entries.dtype, device=entries.device)
    # The classes of a cell are distinct, so each slot is written at most once.
    value.scatter_(2, slot.view(N, S * S, -1), entries.flatten(1, 2))
    return PaletteMaps(palette, value.unflatten(1, (S, S)), share)


def sparse_targets(
    batch: Batch,
    spec: ScoreMapSpec,
    grid: Grid,
    rules: TargetRules = PLAIN,
    maps: PaletteMaps | SlotMaps | None = None,
) -> SparseTargets:
    """Make the targets of a table of tokens, row-major.

    `grid` is the side of a square or (rows, columns). `grid=1` gives the class token's target. A
    sample of the map counts if it lies in the crop (`batch.shown`) and in the Window.

    `spec.absent` defines the classes outside a cell's top k. `zero-logit`: they have logit 0;
    logits are averaged over the samples, then softmax (published packs and code of TokenLabeling).
    `tail`: they share evenly the probability that the top k leave; probabilities are averaged.
    `background`: they have none, what the top k leave belongs to no class of the data;
    probabilities are averaged, to a sum m of at most 1.

    `rules.outside` defines the samples outside. `ignore`: they do not count, and the weight of a
    token is its share of samples inside. `uniform`, as published: they count as logit 0
    (zero-logit) or probability 1 / K (tail), and every token has weight 1. Background is outside:
    `ignore` rescales the probabilities to 1 and multiplies the weight by m, `uniform` gives each
    class (1 - m) / K more.

    Smoothing s gives t (1 - s + s/K) + s/K, as published. Padding (`batch.weight` 0) has weight 0.
    `maps` is `palette_maps(batch, spec, rules)`, if the caller has it: half the time of a call.
    """
    maps = palette_maps(batch, spec, rules) if maps is None else maps
    if isinstance(maps, SlotMaps):
        on, off = rules.smooth(spec.num_classes)
        numbers = [map_margin(spec.side, rules), EDGE, on, off, on + rules.smoothing]
        most, uniform = most_samples(batch, spec, grid, rules), rules.outside == "uniform"
        sizes = spec.num_classes, spec.max_palette, *split_grid(grid), most, uniform
        extra, base, weight, total = pool_targets(*maps[1:], numbers, *sizes)
        targets = SparseTargets(maps.palette, extra, base, weight, total)
        return resolve_background(targets, spec, rules)
    return finish_targets(maps, *sampler(batch, spec, grid, rules), batch.weight, spec, rules)


def finish_targets(
    maps: PaletteMaps,
    pool_map: Callable[[Tensor], Tensor],
    inside: Tensor,
    weight_N: Tensor,
    spec: ScoreMapSpec,
    rules: TargetRules,
) -> SparseTargets:
    """Make targets of maps and of what `sampler` returns; see `sparse_targets`."""
    on, off = rules.smooth(spec.num_classes)
    # The largest tensor, N T M. It is changed in place: each operation would write to new memory.
    value, weight = pool_map(maps.value), inside
    # The mean with 0 for samples outside is the mean of those inside times their share.
    if rules.outside == "uniform":
        value, weight = value.mul_(inside[..., None]), torch.ones_like(inside)
    if maps.share is None:
        # Subtracted so that exp cannot overflow; at least 0, the logit of all other classes.
        peak = value.amax(-1, keepdim=True).clamp(min=0)
        # e^0 of a class outside the palette, after the shift.
        rest = (-peak).exp()
        above = value.sub_(peak).exp_().sub_(rest)
        scale = on / (spec.num_classes * rest + above.sum(-1, keepdim=True))
        base, extra = (rest * scale).squeeze(-1), above.mul_(scale)
    else:
        base = pool_map(maps.share).squeeze(-1)
        if rules.outside == "uniform":
            base = base * inside + (1 - inside) / spec.num_classes
        base, extra = on * base, value if on == 1 else value.mul_(on)
    base = base + off
    total = torch.full_like(base, on + rules.smoothing)
    targets = SparseTargets(maps.palette, extra, base, weight * weight_N[:, None], total)
    return resolve_background(targets, spec, rules)


def resolve_background(
    targets: SparseTargets, spec: ScoreMapSpec, rules: TargetRules
) -> SparseTargets:
    """Make targets that sum to `total` of pooled maps with `background`; return others as they are.

    The sum of a token's extras is the share of it that shows classes of the data.
    """
    if spec.absent != "background":
        return targets
    on, off = rules.smooth(spec.num_classes)
    known = targets.extra.sum(-1) / on
    if rules.outside == "uniform":
        # Samples outside are pooled as 0, so 1 - known has them too.
        base = on * (1 - known).clamp(min=0) / spec.num_classes + off
        return targets._replace(base=base)
    # A token that shows none has extras and a weight of 0, not 0 / 0.
    extra = targets.extra / known.clamp(min=torch.finfo(known.dtype).tiny)[..., None]
    return targets._replace(extra=extra, weight=targets.weight * known)


def mix_ground_truth(
    targets: SparseTargets, label_N: Tensor, num_classes: int, smoothing: float, rule: GroundTruth
) -> SparseTargets:
    """Mix the class token's targets (T = 1) with the image's label: r target + (1 - r) label.

    The palette grows by one slot. r depends on whether the target's best class is `label_N`, int64
    `[N]`. `published`: 0.5 if it is, else 0.9, so the label counts for more where the teacher
    confirms it. `intended`: 0.9 and 0.5, as the comment in the published code says. The label is
    one-hot, smoothed: s/K, and 1 - s + s/K at its class, which sums to 1. Weights stay: a crop
    without a dense label has no loss under either rule.
    """
    palette, extra = targets.palette, targets.extra[:, 0]
    best = extra.max(1)
    # Where every class in the palette has less than the classes outside it, the best class is the
    # first one outside.
    in_order = palette == torch.arange(palette.shape[1], device=palette.device)
    unnamed = in_order.long().cumprod(1).sum(1)
    named = palette.gather(1, best.indices[:, None])[:, 0]
    teacher_N = torch.where(best.values > 0, named, unnamed)
    agrees, differs = TEACHER_SHARE[rule]
    share = torch.where(teacher_N == label_N, agrees, differs).to(extra.dtype)[:, None]
    given = (1 - share) * (1 - smoothing)
    return targets._replace(
        palette=torch.cat([palette, label_N[:, None]], 1),
        extra=torch.cat([share * extra, given], 1)[:, None],
        base=share * targets.base + (1 - share) * (smoothing / num_classes),
        total=share * targets.total + (1 - share),
    )


# ---------------------------------------------------------------- once, before the first step


def check_batch(batch: Batch, spec: ScoreMapSpec, where: str) -> None:
    """Check the maps, Windows and Views of a batch on the CPU, before the first step of a run.

    `where` names the score maps in messages, e.g. `the score maps of train.beton`. Raises
    UserError, which names the sample, where `sparse_targets` cannot read them.
    """
    fields = batch.map_logit, batch.map_class, batch.map_lse, batch.window
    if any(field is None for field in fields):
        raise UserError(
            f"{where} did not come with the batch; give --score-maps, or pack them into the .beton"
        )
    cells = len(batch.index), spec.side, spec.side
    shapes = (*cells, spec.top_k), (*cells, spec.top_k), cells
    if tuple(tuple(field.shape) for field in fields[:3]) != shapes:
        side, top_k = batch.map_logit.shape[2:]
        raise UserError(
            f"{where} have {side} x {side} cells of {top_k} classes, "
            f"but their header says {spec.side} x {spec.side} of {spec.top_k}; label the images "
            "again"
        )
    maps = ScoreMaps(*(field.numpy() for field in fields))
    faults = find_faults(maps, spec.num_classes, np.array(spec.max_palette))
    faults = {f"{fault}; label it again": bad for fault, bad in faults.items()}
    view = batch.view.double()
    flat = (torch.linalg.det(view[:, :, :2]).abs() < 1e-12) | ~view.flatten(1).isfinite().all(1)
    faults["a View of no area; crop and warp it less"] = flat.numpy()
    for what, bad in faults.items():
        if bad.any():
            raise UserError(f"{where}: sample {int(batch.index[bad.argmax()])} has {what}")

"""Score maps and Views to sparse token targets, on the device and without a dense map or target.

DESIGN: token (r, c) of a P x P grid is the mean of g x g bilinear samples of the map at
View(points) seen through the Window, which is RoIAlign (aligned) with g = ceil(box / P). For a View
of crop, flip and translation alone the sampling is separable: a small weight matrix per axis and
two batched products. Rotated and sheared Views gather the same points one by one. Work is done in
each image's own palette of classes, shapes depend on nothing but shapes, and nothing waits for the
device.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.storage.geometry import (
    are_windows,
    labeling_cells,
    published_frame,
    samples_per_bin,
    window_frame,
)
from densefeed.system.errors import UserError

# N images   S map side   k classes per cell   M palette   P grid side   T = P * P tokens   G samples per token and axis

GroundTruth = Literal["published", "intended"]
# Share of the teacher's label where its best class is the image's label, and where it is another.
# The published code (VOLO's, and TokenLabeling's --ground-truth) gives the image's label the larger
# share where the teacher agrees; its comment says the opposite.
TEACHER_SHARE = {"published": (0.5, 0.9), "intended": (0.9, 0.5)}
EDGE = 1e-6  # of the image or map: a point that rounding puts this far outside is on the border


class TargetRules(NamedTuple):
    """How targets are made of score maps; the defaults read what a token shows and nothing else."""

    smoothing: float = 0.0  # probability
    # Above 1 softens. zero-logit: softmax(logits / temperature), after pooling as published;
    # classes not kept stay at logit 0. tail: softmax(logits / temperature) of the classes a cell
    # keeps, which share what they had together; then pooled. The remainder stays as it is: float16
    # resolves it to 1e-3, and of 995 classes' 1e-6 the fourth root is 0.03 each, 31 together.
    temperature: float = 1.0
    # Of the samples outside of the crop (and so the image) or the Window. ignore: they do not
    # count, and a token weighs by its share of others. uniform, as published: they count as logit 0
    # (zero-logit) or probability 1 / K (tail), and every token weighs 1.
    outside: Literal["ignore", "uniform"] = "ignore"
    # published: read the map where the published code does, see geometry.published_frame; the
    # Window is ignored.
    geometry: Literal["aligned", "published"] = "aligned"
    sheared: bool = False  # Views may rotate or shear; false is faster and wrong for those


PLAIN = TargetRules()


class SparseTargets(NamedTuple):
    """Soft targets over K classes: t = base + sum over m of extra[m] at class palette[m]; they sum
    to `total`.

    A palette may name a class twice: its extras add up.
    """

    palette: Tensor  # int64 [N, M]; unused slots point at class 0 with extra 0
    extra: Tensor  # float32 [N, T, M], may be negative
    base: Tensor  # float32 [N, T], what every class gets
    weight: Tensor  # float32 [N, T], 1 inside Window and crop, 0 outside, between at the border
    # float32 [N, T], sum of a target: 1 + smoothing / K, as the published smoothing does
    total: Tensor


# ------------------------------------------------------------------------- where a token's samples lie


class Places(NamedTuple):
    """How points of the network's input relate to image and map. All hold for x and y: `[N, 2,
    ...]`.
    """

    view: Tensor  # [N, 2, 3], to the image
    through: Tensor  # [N, 2, 3], to the map: 0 to 1 inside it
    visible: Tensor  # [N, 2, 2], first and last coordinate of the crop, in the image
    cells: Tensor  # [N, 2, 2], first and last cell of the map that shows the image
    margin: float  # how far beyond 0 and 1 of the map a point counts as inside


def places(batch: Batch, side: int, rules: TargetRules) -> Places:
    """Views, maps' frames and visible parts of a batch."""
    view = batch.view
    if rules.geometry == "aligned":
        frame, margin = window_frame(batch.window), EDGE
        cells = labeling_cells(frame, side)
    else:
        # published sampling clamps points within half a cell beyond the map, and takes what is
        # farther for 0
        frame, margin = published_frame(batch.shown, view, side), 0.5 / side + EDGE
        cells = (torch.arange(2, dtype=view.dtype, device=view.device) * (side - 1)).expand(
            len(view), 2, 2
        )
    scale, shift = frame.unbind(2)
    through = scale[:, :, None] * view
    through = torch.cat([through[:, :, :2], through[:, :, 2:] + shift[:, :, None]], 2)
    visible = batch.shown[:, [1, 3, 0, 2]].unflatten(1, (2, 2))  # a crop lies within its image
    return Places(view, through, visible, cells, margin)


def sample_points(extent: Tensor, grid: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Samples along one axis of the network's input for crops that span `extent` cells along it,
    float `[N]`.

    Returns their coordinates `[N, P, G]`, G = `most`, whether they count, bool `[N, 1, G]`, and how
    many of a token do, `[N]`: ceil(extent / P), as RoIAlign.
    """
    # The guard keeps a box of exactly P cells at one sample where rounding makes it 14.000001.
    count = (extent / grid - 1e-5).ceil().clamp(1, most)
    within = (torch.arange(most, device=extent.device) + 0.5) / count[:, None]
    points = (torch.arange(grid, device=extent.device)[:, None] + within[:, None]) / grid
    return points, (within < 1)[:, None], count


def is_inside(
    point: Tensor, low: Tensor | float, high: Tensor | float, margin: float = EDGE
) -> Tensor:
    """Whether `low` <= `point` <= `high`, give or take `margin`."""
    return (point > low - margin) & (point < high + margin)


def axis_weights(at: Places, axis: int, side: int, grid: int, most: int) -> tuple[Tensor, Tensor]:
    """Sampling along one axis (0: x, 1: y): weights of the map's cells, `[N, P, S]`, and share of
    samples inside, `[N, P]`.
    """

    def along(matrix: Tensor) -> tuple[Tensor, Tensor]:
        return matrix[:, axis, axis], matrix[:, axis, 2]

    (scale, shift), (map_scale, map_shift) = along(at.view), along(at.through)
    points, used, count = sample_points(map_scale.abs() * side, grid, most)
    image = scale[:, None, None] * points + shift[:, None, None]  # N P G
    through = map_scale[:, None, None] * points + map_shift[:, None, None]
    low, high = at.visible[:, axis, :, None, None].unbind(1)
    inside = (is_inside(through, 0, 1, at.margin) & is_inside(image, low, high) & used).to(
        scale.dtype
    )
    first, last = at.cells[:, axis, :, None, None].unbind(1)
    # at an image's edge as at a map's: its last cell, and no padding
    cell = (through * side - 0.5).clamp(first, last)
    # N P G S, bilinear
    hat = (1 - (cell[..., None] - torch.arange(side, device=scale.device)).abs()).clamp(min=0)
    hits = inside.sum(-1)
    return (hat * inside[..., None]).sum(2) / hits.clamp(min=1)[..., None], hits / count[:, None]


def table_points(at: Places, side: int, grid: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sampling of any View: points of the map `[N, P * G, P * G, 2]`, -1 to 1 as grid_sample has
    it, their share in their token's mean, `[N, 1, P * G, P * G]` and 0 for those outside, and the
    share of samples inside, `[N, P, P]`.
    """
    # The edge of a token along an axis of the network's input, wherever the View turns it.
    extent = at.through[:, :, :2].norm(dim=1) * side
    x, used_x, count_x = sample_points(extent[:, 0], grid, most)
    y, used_y, count_y = sample_points(extent[:, 1], grid, most)
    x, y = x.flatten(1)[:, None], y.flatten(1)[:, :, None]

    def moved(matrix: Tensor) -> list[Tensor]:
        return [
            a * x + b * y + c
            for a, b, c in (row[:, :, None, None].unbind(1) for row in matrix.unbind(1))
        ]

    through, image = moved(at.through), moved(at.view)
    inside = (
        (used_x.expand(-1, grid, -1).flatten(1)[:, None])
        & (used_y.expand(-1, grid, -1).flatten(1)[:, :, None])
    )
    for axis in (0, 1):
        low, high = at.visible[:, axis, :, None, None].unbind(1)
        inside = (
            inside & is_inside(through[axis], 0, 1, at.margin) & is_inside(image[axis], low, high)
        )
        first, last = ((at.cells[:, axis, :, None, None] + 0.5) / side).unbind(1)
        through[axis] = through[axis].clamp(first, last)
    inside = inside.to(x.dtype).unflatten(2, (grid, most)).unflatten(1, (grid, most))  # N P G P G
    hits = inside.sum((2, 4))
    share = inside / hits.clamp(min=1)[:, :, None, :, None]
    points = torch.stack(through, -1) * 2 - 1
    return (
        points,
        share.flatten(3, 4).flatten(1, 2)[:, None],
        hits / (count_x * count_y)[:, None, None],
    )


def sampler(
    batch: Batch, spec: ScoreMapSpec, grid: int, rules: TargetRules
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A function that pools maps `[N, S, S, M]` to tokens `[N, T, M]`, means over samples inside,
    and their share `[N, T]`.
    """
    # The published boxes lie within the image, which they take for the map.
    reach = spec.min_window_side if rules.geometry == "aligned" else 1.0
    most = samples_per_bin(spec.side, grid, reach, rules.sheared)
    at = places(batch, spec.side, rules)
    if not rules.sheared:
        columns, columns_inside = axis_weights(at, 0, spec.side, grid, most)
        rows, rows_inside = axis_weights(at, 1, spec.side, grid, most)

        def pooled(map_NSSM: Tensor) -> Tensor:
            # Autocast would make bfloat16 of the products: 8 bits of a logit. (TF32 products have
            # 11: train.py must not allow them.)
            with torch.autocast(rows.device.type, enabled=False):
                strips = (rows @ map_NSSM.flatten(2)).unflatten(2, map_NSSM.shape[2:])  # N P S M
                return (columns[:, None] @ strips).flatten(1, 2)

        return pooled, (rows_inside[:, :, None] * columns_inside[:, None]).flatten(1)
    points, share, inside = table_points(at, spec.side, grid, most)

    def gathered(map_NSSM: Tensor) -> Tensor:
        map_NMSS = map_NSSM.permute(0, 3, 1, 2).contiguous()
        sampled = F.grid_sample(
            map_NMSS, points, mode="bilinear", padding_mode="border", align_corners=False
        )
        return F.avg_pool2d(sampled * share, most, divisor_override=1).flatten(2).mT

    return gathered, inside.flatten(1)


# ------------------------------------------------------------------------- targets


class PaletteMaps(NamedTuple):
    """A batch's score maps over their palettes: what the targets of every grid are pooled from."""

    palette: Tensor  # int64 [N, M]
    # float32 [N, S, S, M]: zero-logit: logits; tail: probabilities beyond what every class has
    value: Tensor
    share: Tensor | None  # float32 [N, S, S, 1], tail: what every class has


def palettes(map_class: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Each map's distinct classes, int64 `[N, size]` ascending, and every entry's slot in it, int64
    `[N, S * S * k]`.

    `map_class` is `[N, S, S, k]`; `size` must be at least the number of distinct classes of any
    map.
    """
    ordered, source = map_class.flatten(1).int().sort(dim=1)
    rank = F.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0)).cumsum(1)  # the first is no change
    slot = torch.empty_like(rank).scatter_(1, source, rank)
    palette = torch.zeros(len(ordered), size, dtype=torch.long, device=ordered.device).scatter_(
        1, rank, ordered.long()
    )
    return palette, slot


def apply_temperature(
    log_probability: Tensor, spec: ScoreMapSpec, temperature: float
) -> tuple[Tensor, Tensor]:
    """Probabilities of a cell's top-k classes, `[..., k]`, and of any other class, `[..., 1]`, of
    their logs `[..., k]`.
    """
    probability = log_probability.exp()
    kept = probability.sum(-1, keepdim=True)
    others = spec.num_classes - spec.top_k
    # Rounding to float16 lets the kept probabilities pass 1 by 1e-3; where every class is kept they
    # must sum to 1.
    probability = probability / (kept.clamp(min=1) if others else kept)
    share = (1 - probability.sum(-1, keepdim=True)).clamp(min=0) / max(others, 1)
    if temperature != 1:
        probability = probability.sum(-1, keepdim=True) * (log_probability / temperature).softmax(
            -1
        )
    return probability, share


def palette_maps(batch: Batch, spec: ScoreMapSpec, rules: TargetRules = PLAIN) -> PaletteMaps:
    """The maps of a batch for `sparse_targets`; for its sake alone where several grids are wanted
    of one batch.
    """
    palette, slot = palettes(batch.map_class, spec.max_palette)
    entries, share = batch.map_logit.to(batch.view.dtype), None
    if spec.absent == "tail":
        probability, share = apply_temperature(
            entries - batch.map_lse.to(entries.dtype)[..., None], spec, rules.temperature
        )
        entries = probability - share
    else:
        # pooling is linear, so before it or after it is the same
        entries = entries / rules.temperature
    N, S = entries.shape[:2]
    value = torch.zeros(N, S * S, spec.max_palette, dtype=entries.dtype, device=entries.device)
    value.scatter_(2, slot.view(N, S * S, -1), entries.flatten(1, 2))
    return PaletteMaps(palette, value.unflatten(1, (S, S)), share)


def sparse_targets(
    batch: Batch,
    spec: ScoreMapSpec,
    grid: int,
    rules: TargetRules = PLAIN,
    maps: PaletteMaps | None = None,
) -> SparseTargets:
    """Targets of a `grid` x `grid` table of tokens, row-major; `grid=1` gives the class token's.

    A sample of the map counts if it lies in `shown`, and so in the image, and in the Window.
    `spec.absent` says what a class outside a cell's top-k has: `zero-logit`: logit 0, logits are
    averaged over the samples, then softmax (published packs, reference of TokenLabeling); `tail`:
    an even share of the probability the top-k leave, probabilities are averaged. Smoothing s: t (1
    - s + s/K) + s/K, as published. Padding (`weight` 0 in the batch) has weight 0.

    `maps` is `palette_maps(batch, spec, rules)`, if the caller has it: half the time of a call.
    """
    maps = palette_maps(batch, spec, rules) if maps is None else maps
    pooled, inside = sampler(batch, spec, grid, rules)
    value, weight = pooled(maps.value), inside  # N T M, N T
    # a mean with 0 for samples outside is the mean of those inside times their share
    if rules.outside == "uniform":
        value, weight = value * inside[..., None], torch.ones_like(inside)
    off = rules.smoothing / spec.num_classes
    on = 1 - rules.smoothing + off
    if maps.share is None:
        peak = value.amax(-1, keepdim=True).clamp(min=0)
        rest = (-peak).exp()  # e^0, shifted
        above = (value - peak).exp() - rest
        scale = on / (spec.num_classes * rest + above.sum(-1, keepdim=True))
        base, extra = (rest * scale).squeeze(-1), above * scale
    else:
        base = pooled(maps.share).squeeze(-1)
        if rules.outside == "uniform":
            base = base * inside + (1 - inside) / spec.num_classes
        base, extra = on * base, on * value
    base = base + off
    total = torch.full_like(base, on + rules.smoothing)
    return SparseTargets(maps.palette, extra, base, weight * batch.weight[:, None], total)


def mix_ground_truth(
    targets: SparseTargets, label_N: Tensor, num_classes: int, smoothing: float, rule: GroundTruth
) -> SparseTargets:
    """The class token's targets (T = 1) mixed with the image's label: r * target + (1 - r) * label,
    one slot of palette more.

    r depends on whether the target's best class is `label_N`, int64 `[N]`: `published` 0.5 if so
    and else 0.9, so the label counts for more where the teacher confirms it; `intended` 0.9 and
    0.5, what that code's comment says. The label is one-hot, smoothed: s/K, and 1 - s + s/K at its
    class, which sums to 1. Weights stay: a crop without a dense label has no loss under either
    rule.
    """
    palette, extra = targets.palette, targets.extra[:, 0]
    best = extra.max(1)
    # Where every class that the map names has less than those it does not, the best is the first of
    # these.
    unnamed = (
        (palette == torch.arange(palette.shape[1], device=palette.device)).long().cumprod(1).sum(1)
    )
    teacher_N = torch.where(
        best.values > 0, palette.gather(1, best.indices[:, None])[:, 0], unnamed
    )
    agrees, differs = TEACHER_SHARE[rule]
    share = torch.where(teacher_N == label_N, agrees, differs).to(extra.dtype)[:, None]
    given = (1 - share) * (1 - smoothing)
    return targets._replace(
        palette=torch.cat([palette, label_N[:, None]], 1),
        extra=torch.cat([share * extra, given], 1)[:, None],
        base=share * targets.base + (1 - share) * (smoothing / num_classes),
        total=share * targets.total + (1 - share),
    )


# ------------------------------------------------------------------------- once, before the first step


def check_batch(batch: Batch, spec: ScoreMapSpec, where: str) -> None:
    """UserError if the maps, Windows or Views of a batch on the CPU are not what `sparse_targets`
    can read.

    `where` names the score maps, as `the score maps of train.beton`. For the first batch of a run:
    no step looks again.
    """
    N = len(batch.index)
    shape = (N, spec.side, spec.side, spec.top_k)
    if (
        batch.map_logit is None
        or batch.map_class is None
        or batch.map_lse is None
        or batch.window is None
    ):
        raise UserError(
            f"{where} did not come with the batch; give --labels, or pack them into the .beton"
        )
    if (
        batch.map_logit.shape != shape
        or batch.map_class.shape != shape
        or batch.map_lse.shape != shape[:3]
    ):
        side, top_k = batch.map_logit.shape[2:]
        raise UserError(
            f"{where} have {side} x {side} cells of {top_k} classes, "
            f"their header says {spec.side} x {spec.side} of {spec.top_k}; relabel"
        )

    def refuse(bad: Tensor, what: str) -> None:
        """`bad` is bool `[N, ...]`."""
        rows = bad.flatten(1).any(1).nonzero()[:, 0].tolist()
        if rows:
            raise UserError(f"{where}: sample {int(batch.index[rows[0]])} {what}")

    refuse(~batch.map_logit.isfinite(), "has a logit that is no finite number; relabel it")
    if spec.absent == "tail":
        refuse(~batch.map_lse.isfinite(), "has a logsumexp that is no finite number; relabel it")
    named = batch.map_class.long()
    refuse(
        named >= spec.num_classes,
        f"names a class beyond the {spec.num_classes:,} of the data; relabel with a teacher of its classes",
    )
    distinct = 1 + (named.flatten(1).sort(1).values.diff(dim=1) != 0).sum(1)
    refuse(
        (distinct > spec.max_palette)[:, None],
        f"names more classes than the {spec.max_palette} the header allows; relabel it",
    )
    refuse(
        ~are_windows(batch.window)[:, None], "has a Window that is no part of its image; relabel it"
    )
    view = batch.view.double()
    flat = (view[:, 0, 0] * view[:, 1, 1] - view[:, 0, 1] * view[:, 1, 0]).abs() < 1e-12
    refuse(
        flat[:, None] | ~view.isfinite().all(2),
        "has a View that shows a line or a point; crop and warp it less",
    )

"""Sparse targets against torchvision's RoIAlign, a sampler in plain numpy and a dense cross
entropy, all in float64; invariants.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.ops import roi_align

from densefeed.objectives.losses import sparse_loss
from densefeed.pipelines import fused_targets
from densefeed.pipelines import targets as targets_module
from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.shapes import split_grid
from densefeed.pipelines.targets import (
    TargetRules,
    check_batch,
    mix_ground_truth,
    palette_maps,
    palettes,
    sampler,
    sparse_targets,
)
from densefeed.storage.geometry import crop_views, visible_boxes
from densefeed.storage.score_maps import ScoreMaps, palette_sizes
from densefeed.system.errors import UserError


def random_boxes(count, height=375, width=500, seed=0, flips=False):
    boxes, flip = EpochPlan(num_samples=count, batch=1, seed=seed, mode="train").crops(
        0, np.arange(count), np.full(count, height), np.full(count, width)
    )
    return boxes, flip if flips else np.zeros(count, bool)


def batch_of(maps, boxes, flips, height=375, width=500, dtype=torch.float64, sheared=False):
    """A batch of crops; `sheared` selects the sampling that rotated and sheared views need."""
    count = len(boxes)
    view = torch.from_numpy(crop_views(boxes, flips, np.full(count, height), np.full(count, width)))
    logit, lse, window = (torch.from_numpy(part) for part in (maps.logit, maps.lse, maps.window))
    return Batch(
        image=torch.zeros(count, 1, 1, 3, dtype=torch.uint8),
        label=torch.zeros(count, dtype=torch.long),
        view=view.to(dtype),
        shown=torch.from_numpy(visible_boxes(view.numpy())).to(dtype),
        index=torch.arange(count),
        repeat=torch.zeros(count, dtype=torch.long),
        weight=torch.ones(count, dtype=dtype),
        map_logit=logit,
        map_class=torch.from_numpy(maps.cls.astype(np.int32)),
        map_lse=lse,
        window=window.to(dtype),
        axis_aligned=not sheared,
    )


def spec_of(maps, num_classes, absent, min_window_side=1.0):
    side, top_k = maps.logit.shape[2:]
    return ScoreMapSpec(
        side, top_k, num_classes, absent, int(palette_sizes(maps.cls).max()), min_window_side
    )


def dense_maps(maps, num_classes, absent):
    """Expand maps to `[N, K, S, S]` float64: logits with zeros where absent, or probabilities."""
    logit, cls, lse = (
        torch.from_numpy(np.asarray(part, np.float64)) for part in (maps.logit, maps.cls, maps.lse)
    )
    if absent == "zero-logit":
        dense = torch.zeros(*logit.shape[:3], num_classes, dtype=torch.float64)
        return dense.scatter_(3, cls.long(), logit).permute(0, 3, 1, 2)
    kept = (logit - lse[..., None]).exp()
    kept = kept / kept.sum(-1, keepdim=True).clamp(min=1)
    rest = (1 - kept.sum(-1, keepdim=True)) / (num_classes - logit.shape[3])
    return (
        rest.expand(*logit.shape[:3], num_classes).scatter(3, cls.long(), kept).permute(0, 3, 1, 2)
    )


def dense_targets(maps, boxes, flips, num_classes, grid, absent, smoothing, height=375, width=500):
    """Compute dense targets by the published recipe in the right geometry: dense map, torchvision's
    RoIAlign, softmax, smoothing. `[N, P * P, K]`.
    """
    side = maps.logit.shape[1]
    top, left, h, w = torch.from_numpy(boxes).T
    corners = (
        torch.stack([left / width, top / height, (left + w) / width, (top + h) / height], 1) * side
    )
    rois = torch.cat([torch.arange(len(boxes))[:, None].double(), corners], 1)
    pooled = roi_align(
        dense_maps(maps, num_classes, absent), rois, grid, sampling_ratio=-1, aligned=True
    )
    pooled = torch.where(torch.from_numpy(flips)[:, None, None, None], pooled.flip(3), pooled)
    target = pooled.flatten(2).mT
    if absent == "zero-logit":
        target = target.softmax(-1)
    off = smoothing / num_classes
    return target * (1 - smoothing + off) + off


def densify(targets, num_classes):
    dense = targets.base[..., None].expand(-1, -1, num_classes).clone()
    index = targets.palette[:, None].expand(-1, dense.shape[1], -1)
    return dense.scatter_add_(2, index, targets.extra)


@pytest.mark.parametrize("absent", ["tail", "zero-logit"])
@pytest.mark.parametrize(
    ("side", "grid", "count"), [(18, 14, 5), (18, 1, 4), (7, 8, 3), (6, 24, 1)]
)
def test_targets_are_dense_roi_align(random_maps, side, grid, count, absent):
    maps = random_maps(count, side, 5, 50)
    boxes, flips = random_boxes(count, flips=True)
    targets = sparse_targets(
        batch_of(maps, boxes, flips), spec_of(maps, 50, absent), grid, TargetRules(smoothing=0.1)
    )
    want = dense_targets(maps, boxes, flips, 50, grid, absent, 0.1)
    # Views are float32: 18 cells * 2^-24 are off by 1e-6 cells, and probabilities change by at most
    # 3 a cell.
    torch.testing.assert_close(densify(targets, 50), want, rtol=0, atol=4e-6)
    torch.testing.assert_close(densify(targets, 50).sum(-1), targets.total, rtol=0, atol=1e-9)
    assert (targets.weight == 1).all()


@pytest.mark.parametrize("absent", ["tail", "zero-logit"])
def test_the_sparse_loss_and_its_gradient_are_the_dense_ones(random_maps, absent):
    """The loss agrees within 2e-6 relative and its gradient within 1e-7, float32 against dense
    float64.
    """
    count, grid, num_classes = 5, 14, 1000
    maps = random_maps(count, 18, 5, num_classes)
    boxes, flips = random_boxes(count, flips=True)
    logits = 2 * torch.randn(
        count, grid * grid, num_classes, generator=torch.Generator().manual_seed(1)
    )
    ours = logits.clone().requires_grad_()
    batch = batch_of(maps, boxes, flips, dtype=torch.float32)
    loss = sparse_loss(
        ours,
        sparse_targets(batch, spec_of(maps, num_classes, absent), grid, TargetRules(smoothing=0.1)),
    )
    loss.backward()
    theirs = logits.double().requires_grad_()
    want = (
        -(
            dense_targets(maps, boxes, flips, num_classes, grid, absent, 0.1)
            * theirs.log_softmax(-1)
        )
        .sum(-1)
        .mean()
    )
    want.backward()
    assert abs(loss.item() / want.item() - 1) < 2e-6
    assert (ours.grad.double() - theirs.grad).abs().max() < 1e-7


@pytest.mark.one_in(3)
@pytest.mark.parametrize("sheared", [False, True])
@pytest.mark.parametrize(
    ("grid", "dtype"),
    [(14, torch.float64), (1, torch.float64), (14, torch.float32), ((12, 16), torch.float64)],
)
def test_sampling_is_roi_align_on_ten_thousand_boxes(grid, dtype, sheared):
    """Boxes from a thousandth of a cell to the whole map, on a random map; RoIAlign in float64."""
    rng = np.random.default_rng(0)
    count, side, part = 10_000, 18, 500
    low = rng.random((count, 2)) * 0.999
    extent = np.maximum((1 - low) * rng.random((count, 2)) ** 4, 1e-5)
    low[:2000], extent[:2000] = 0, 1 - rng.random((2000, 2)) ** 4
    low, extent = torch.from_numpy(low), torch.from_numpy(extent)
    values = torch.from_numpy(rng.standard_normal((1, 1, side, side)))
    views = torch.cat([torch.diag_embed(extent), low[:, :, None]], 2).to(dtype)
    low, extent = views[:, :, 2].double(), views[:, :, :2].double().sum(2)
    rois = torch.cat([torch.zeros(count, 1), low * side, (low + extent) * side], 1)
    want = roi_align(values, rois, grid, sampling_ratio=-1, aligned=True)[:, 0].flatten(1)
    window = torch.tensor([[0.0, 0, 1, 1]], dtype=dtype).expand(part, -1)
    blank = Batch(*[None] * 11, axis_aligned=not sheared)._replace(window=window)
    spec = ScoreMapSpec(side, 1, 1, "tail", 1, 1.0)
    cells = values[0].to(dtype).movedim(0, -1)[None].expand(part, -1, -1, -1)
    for at in range(0, count, part):
        view = views[at : at + part]
        batch = blank._replace(view=view, shown=torch.from_numpy(visible_boxes(view.numpy())))
        pooled, inside = sampler(batch, spec, grid, TargetRules())
        torch.testing.assert_close(
            pooled(cells)[..., 0].double(), want[at : at + part], rtol=0, atol=1e-5
        )
        assert (inside == 1).all()


@given(st.integers(0, 10_000), st.sampled_from([1, 4, 7]), st.booleans())
@settings(max_examples=60)
def test_a_position_coded_map_returns_the_cells_under_the_crop(seed, grid, flip):
    """The class of every cell is its index: a token's largest target is a cell that it overlaps."""
    side, height, width = 9, 300, 420
    cls = np.arange(side * side, dtype=np.uint16).reshape(1, side, side, 1)
    maps = ScoreMaps(
        np.full(cls.shape, 9.0, np.float16),
        cls,
        np.full((1, side, side), 9.0, np.float16),
        np.array([[0, 0, 1, 1]], np.float32),
    )
    boxes, _ = random_boxes(1, height, width, seed)
    batch = batch_of(maps, boxes, np.array([flip]), height, width)
    targets = sparse_targets(batch, spec_of(maps, side * side, "tail"), grid)
    best = densify(targets, side * side)[0].argmax(-1).view(grid, grid).numpy()
    top, left, h, w = boxes[0] / np.array([height, width, height, width]) * side
    for row in range(grid):
        for column in range(grid):
            seen = grid - 1 - column if flip else column
            r, c = divmod(int(best[row, column]), side)
            assert top + h * row / grid - 0.51 <= r + 0.5 <= top + h * (row + 1) / grid + 0.51
            assert left + w * seen / grid - 0.51 <= c + 0.5 <= left + w * (seen + 1) / grid + 0.51


@given(st.integers(0, 999), st.integers(1, 4), st.sampled_from([1, 5, 7, 14]), st.booleans())
@settings(max_examples=25)
def test_flipping_twice_changes_nothing(random_maps, seed, count, grid, sheared):
    """The targets of the flipped crop, flipped back, equal those of the crop."""
    maps = random_maps(count, 8, 3, 20, seed=seed)
    boxes, _ = random_boxes(count, seed=seed)
    rules = TargetRules()
    plain, flipped = (
        sparse_targets(
            batch_of(maps, boxes, np.full(count, flip), sheared=sheared),
            spec_of(maps, 20, "tail"),
            grid,
            rules,
        )
        for flip in (False, True)
    )
    back = flipped.extra.view(count, grid, grid, -1).flip(2).flatten(1, 2)
    torch.testing.assert_close(back, plain.extra, rtol=0, atol=4e-6)


@given(
    st.integers(0, 999),
    st.integers(1, 4),
    st.sampled_from([1, 7, 14]),
    st.booleans(),
    st.sampled_from(["ignore", "uniform"]),
)
@settings(max_examples=25)
def test_inside_the_window_every_token_has_its_whole_weight(
    random_maps, seed, count, grid, sheared, outside
):
    """Weights are 1 and targets sum to their total, wherever the Window lies; a map of ones is
    pooled to ones.
    """
    rng = np.random.default_rng(seed)
    top, left = rng.uniform(0, 0.4, 2)
    bottom, right = rng.uniform(0.6, 1, 2)
    maps = random_maps(count, 9, 3, 20, seed=seed, window=(top, left, bottom, right))
    height, width = (bottom - top) * 375, (right - left) * 500
    extent = rng.uniform(0.05, 1, (count, 2)) * (height, width)
    corner = np.array([top * 375, left * 500]) + rng.uniform(0, 1, (count, 2)) * (
        (height, width) - extent
    )
    batch = batch_of(
        maps, np.concatenate([corner, extent], 1), rng.random(count) < 0.5, sheared=sheared
    )
    spec = spec_of(maps, 20, "tail", min_window_side=0.2)
    targets = sparse_targets(batch, spec, grid, TargetRules(outside=outside))
    torch.testing.assert_close(targets.weight, torch.ones_like(targets.weight), rtol=0, atol=0)
    torch.testing.assert_close(densify(targets, 20).sum(-1), targets.total, rtol=0, atol=1e-9)
    pooled, inside = sampler(batch, spec, grid, TargetRules())
    torch.testing.assert_close(
        pooled(torch.ones(count, 9, 9, 1).double()), torch.ones(count, grid * grid, 1).double()
    )
    assert (inside == 1).all()


def test_outside_the_window_there_is_no_label(random_maps):
    """A map of the image's middle half: tokens left and right of it have weight 0, those inside
    weight 1 and the labels of the map.
    """
    maps = random_maps(1, 8, 2, 6, window=(0.0, 0.25, 1.0, 0.75))
    batch = batch_of(maps, np.array([[0.0, 0.0, 100.0, 100.0]]), np.array([False]), 100, 100)
    spec = spec_of(maps, 6, "tail", min_window_side=0.5)
    targets = sparse_targets(batch, spec, 8)
    inside = torch.zeros(8, 8, dtype=torch.float64)
    inside[:, 2:6] = 1
    torch.testing.assert_close(targets.weight.view(8, 8), inside)
    whole = maps._replace(window=np.array([[0, 0, 1, 1]], np.float32))
    middle = batch_of(whole, np.array([[0.0, 0.0, 100.0, 100.0]]), np.array([False]), 100, 100)
    want = densify(sparse_targets(middle, spec_of(whole, 6, "tail"), 8), 6)
    got = densify(targets, 6).view(8, 8, 6)
    # Token (r, 2 + c) covers two columns of the map, which two tokens of the 8 x 8 grid over the
    # map alone also cover.
    torch.testing.assert_close(got[:, 2:6], want.view(8, 4, 2, 6).mean(2), rtol=0, atol=1e-9)


@pytest.mark.parametrize("outside", ["ignore", "uniform"])
def test_padding_carries_no_loss(random_maps, outside):
    maps = random_maps(3, 6, 2, 8)
    batch = batch_of(maps, *random_boxes(3))._replace(weight=torch.tensor([1.0, 0.0, 1.0]))
    targets = sparse_targets(batch, spec_of(maps, 8, "tail"), 2, TargetRules(outside=outside))
    assert targets.weight.tolist() == [[1.0] * 4, [0.0] * 4, [1.0] * 4]


def test_a_crop_outside_the_window_carries_no_loss(random_maps):
    maps = random_maps(2, 8, 2, 6, window=(0.0, 0.5, 1.0, 1.0))
    batch = batch_of(
        maps, np.array([[0.0, 0.0, 100.0, 40.0]] * 2), np.array([False, True]), 100, 100
    )
    spec = spec_of(maps, 6, "tail", min_window_side=0.5)
    logits = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    loss = sparse_loss(logits, sparse_targets(batch, spec, 1))
    loss.backward()
    assert loss.item() == 0
    assert (logits.grad == 0).all()


@given(st.integers(1, 5), st.integers(2, 5), st.integers(1, 4), st.integers(4, 40))
@settings(max_examples=50)
def test_palettes_hold_each_class_once(count, side, top_k, num_classes):
    rng = np.random.default_rng(side * 100 + top_k)
    cls = torch.from_numpy(
        np.sort(
            rng.permuted(np.tile(np.arange(num_classes), (count, side, side, 1)), axis=3)[
                ..., :top_k
            ],
            axis=3,
        )
    )
    size = int(palette_sizes(cls.numpy()).max())
    palette, slot = palettes(cls, size, num_classes)
    torch.testing.assert_close(palette.gather(1, slot), cls.flatten(1).long())
    for n in range(count):
        used = palette[n, : len(cls[n].unique())]
        torch.testing.assert_close(used, cls[n].unique().long())


@given(st.permutations(range(5)), st.integers(0, 99), st.booleans())
@settings(max_examples=20)
def test_permuting_the_batch_permutes_the_targets(random_maps, order, seed, sheared):
    maps = random_maps(5, 6, 3, 12, seed=seed)
    boxes, flips = random_boxes(5, flips=True, seed=seed)
    spec = spec_of(maps, 12, "tail")
    batch, rules = batch_of(maps, boxes, flips, sheared=sheared), TargetRules()
    plain = sparse_targets(batch, spec, 5, rules)
    moved = sparse_targets(batch.map_tensors(lambda field: field[order]), spec, 5, rules)
    for one, other in zip(moved, plain, strict=True):
        torch.testing.assert_close(one, other[order])


def test_when_every_class_is_kept_the_target_is_the_softmax(random_maps):
    """k = K leaves no tail; float16 storage is the only error."""
    maps = random_maps(2, 4, 6, 6)
    batch = batch_of(
        maps, np.array([[0.0, 0.0, 100.0, 100.0]] * 2), np.array([False, False]), 100, 100
    )
    dense = densify(sparse_targets(batch, spec_of(maps, 6, "tail"), 4), 6)
    full = np.zeros((2, 4, 4, 6))
    np.put_along_axis(full, maps.cls.astype(int), maps.logit.astype(float), axis=3)
    torch.testing.assert_close(
        dense, torch.from_numpy(full).softmax(-1).flatten(1, 2), rtol=0, atol=1e-9
    )


# ---------------------------------------------------------------------- rotated and sheared views


def warp(angle=0.0, shear=0.0, shift=(0.0, 0.0)):
    """Build a rotation by `angle` radians, then a shear along x and a shift, about the center of
    the network's input: `[3, 3]`.
    """
    cos, sin = np.cos(angle), np.sin(angle)
    turned = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]]) @ np.array(
        [[1, shear, shift[0]], [0, 1, shift[1]], [0, 0, 1]]
    )
    middle = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
    return middle @ turned @ np.linalg.inv(middle)


def warped(batch, *warps):
    """Compose each View of the batch with a warp, as augmentation does with a cropped image."""
    view = torch.from_numpy(
        np.stack([(v @ w) for v, w in zip(batch.view.double().numpy(), warps, strict=True)])
    )
    return batch._replace(view=view.to(batch.view.dtype))


def outermost(low, high, side):
    """Return the first and last cell whose center lies from `low` to `high` of an image."""
    shown = [cell for cell in range(side) if 0 <= low + (cell + 0.5) / side * (high - low) <= 1]
    return shown[0], shown[-1]


def cell_value(cells, x, y, columns, rows):
    """Sample a map `[S, S, K]` bilinearly at (x, y) from 0 to 1, clamped at the centers of the
    outermost cells.
    """
    side = len(cells)
    x, y = (min(max(v * side - 0.5, first), last) for v, (first, last) in ((x, columns), (y, rows)))
    c, r = min(int(x), side - 2), min(int(y), side - 2)
    u, v = x - c, y - r
    upper, lower = ((1 - u) * cells[row, c] + u * cells[row, c + 1] for row in (r, r + 1))
    return (1 - v) * upper + v * lower


def walked_targets(batch, maps, num_classes, grid, absent, outside):
    """Compute targets `[N, T, K]` and weights `[N, T]` in a loop over sample points, without
    palettes, in float64.
    """
    targets, weights = [], []
    dense = dense_maps(maps, num_classes, absent).permute(0, 2, 3, 1).numpy()
    rows, columns = split_grid(grid)
    side, nothing = (
        dense.shape[1],
        np.full(num_classes, 0.0 if absent == "zero-logit" else 1 / num_classes),
    )
    views, windows, showns = (
        part.double().numpy() for part in (batch.view, batch.window, batch.shown)
    )
    for cells, view, (top, left, bottom, right), shown in zip(
        dense, views, windows, showns, strict=True
    ):
        edges = view[:, :2] / np.array([[right - left], [bottom - top]]) * side
        lengths = np.linalg.norm(edges, axis=0) / [columns, rows]
        counts = np.maximum(np.ceil(lengths - 1e-5), 1).astype(int)
        for row, column in itertools.product(range(rows), range(columns)):
            values, hits = [], 0
            for j, i in itertools.product(range(counts[1]), range(counts[0])):
                x, y = view @ [
                    (column + (i + 0.5) / counts[0]) / columns,
                    (row + (j + 0.5) / counts[1]) / rows,
                    1,
                ]
                seen = max(shown[1], left, 0) <= x <= min(shown[3], right, 1) and max(
                    shown[0], top, 0
                ) <= y <= min(shown[2], bottom, 1)
                hits += seen
                if seen:
                    ends = outermost(left, right, side), outermost(top, bottom, side)
                    values.append(
                        cell_value(
                            cells, (x - left) / (right - left), (y - top) / (bottom - top), *ends
                        )
                    )
                elif outside == "uniform":
                    values.append(nothing)
            target = np.mean(values, axis=0) if values else nothing
            targets.append(
                np.exp(target) / np.exp(target).sum() if absent == "zero-logit" else target
            )
            weights.append(1.0 if outside == "uniform" else hits / counts.prod())
    shape = len(views), rows * columns
    return torch.from_numpy(np.array(targets)).view(*shape, -1), torch.tensor(
        weights, dtype=torch.float64
    ).view(shape)


@pytest.mark.parametrize("outside", ["ignore", "uniform"])
@pytest.mark.parametrize("absent", ["tail", "zero-logit"])
@pytest.mark.parametrize(("side", "grid"), [(9, 4), (6, 1), (5, 7), (9, (3, 6))])
def test_any_view_is_sampled_as_a_walk_over_its_points(random_maps, side, grid, absent, outside):
    """Rotated, sheared, shifted and mirrored views; points outside of Windows and crops."""
    maps = random_maps(5, side, 3, 12, window=(0.05, 0.2, 1.0, 0.8))
    boxes = np.array(
        [
            [20, 60, 300, 400],
            [0, 0, 375, 500],
            [0, 250, 200, 250],
            [100, 100, 60, 90],
            [50, 0, 300, 300.0],
        ]
    )
    batch = batch_of(maps, boxes, np.array([False, True, False, True, True]), sheared=True)
    warps = [
        warp(0.4),
        warp(-0.5, 0.3),
        warp(0, 0.28, (0.3, 0)),
        warp(1.3, -0.3, (0.1, -0.4)),
        warp(0, 0, (0.45, -0.2)),
    ]
    batch = warped(batch, *warps)
    rules = TargetRules(outside=outside)
    targets = sparse_targets(batch, spec_of(maps, 12, absent, 0.6), grid, rules)
    want, weight = walked_targets(batch, maps, 12, grid, absent, outside)
    torch.testing.assert_close(targets.weight, weight, rtol=0, atol=1e-9)
    told = weight > 0
    torch.testing.assert_close(densify(targets, 12)[told], want[told], rtol=0, atol=1e-9)
    assert 0 < weight.mean() <= 1
    if outside == "ignore" and grid != 1:
        assert (weight == 0).any()


@pytest.mark.parametrize("absent", ["tail", "zero-logit"])
@pytest.mark.parametrize("sheared", [False, True])
@pytest.mark.parametrize(("side", "grid"), [(9, 4), (6, 1), (5, 7)])
@pytest.mark.parametrize("window", [(-1 / 6, 0, 7 / 6, 1), (0, -0.9, 1, 1.9)])
def test_a_letterboxs_tokens_read_the_image_and_no_padding(
    random_maps, window, side, grid, sheared, absent
):
    """Targets equal those of the loop; the values of padding cells have no effect; every token in
    the image has its full weight.
    """
    maps = random_maps(5, side, 3, 12, window=window)
    boxes = np.array(
        [
            [20, 60, 300, 400],
            [0, 0, 375, 500],
            [0, 250, 200, 250],
            [100, 100, 60, 90],
            [50, 0, 300, 300.0],
        ]
    )
    batch = batch_of(maps, boxes, np.array([False, True, False, True, True]), sheared=sheared)
    if sheared:
        batch = warped(
            batch,
            warp(0.4),
            warp(-0.5, 0.3),
            warp(0, 0.28, (0.3, 0)),
            warp(1.3, -0.3),
            warp(0, 0, (0.45, -0.2)),
        )
    spec, rules = spec_of(maps, 12, absent, 1.0), TargetRules()
    targets = sparse_targets(batch, spec, grid, rules)
    want, weight = walked_targets(batch, maps, 12, grid, absent, "ignore")
    torch.testing.assert_close(targets.weight, weight, rtol=0, atol=1e-9)
    told = weight > 0
    torch.testing.assert_close(densify(targets, 12)[told], want[told], rtol=0, atol=4e-6)
    if not sheared:
        assert (weight == 1).all()
    (left, right), (top, bottom) = (
        outermost(window[axis], window[axis + 2], side) for axis in (1, 0)
    )
    padding = np.ones((side, side), bool)
    padding[top : bottom + 1, left : right + 1] = False
    assert padding.any()
    logit = maps.logit.copy()
    logit[:, padding] = np.array([60, 50, 40], np.float16)
    other = batch._replace(map_logit=torch.from_numpy(logit))
    # Points that grid_sample is given lie on the last cell's center up to rounding.
    torch.testing.assert_close(
        sparse_targets(other, spec, grid, rules).extra,
        targets.extra,
        rtol=0,
        atol=1e-12 if sheared else 0,
    )


@given(
    st.integers(0, 999),
    st.sampled_from([1, 7, 14]),
    st.sampled_from(["tail", "zero-logit"]),
    st.sampled_from(["aligned", "published"]),
)
@settings(max_examples=60)
@pytest.mark.parametrize("window", [(0.0, 0.125, 1.0, 0.875), (-1 / 6, 0.0, 7 / 6, 1.0)])
def test_both_paths_agree_where_no_view_is_sheared(
    random_maps, window, seed, grid, absent, geometry
):
    """In float32, as in training: crops, flips and shifts, a Window that some crops leave, and one
    that reaches beyond the image.
    """
    rng = np.random.default_rng(seed)
    maps = random_maps(3, 18, 5, 40, seed, window=window)
    boxes, flips = random_boxes(3, seed=seed, flips=True)
    batch = batch_of(maps, boxes, flips, dtype=torch.float32)
    batch = warped(
        batch, *(warp(shift=rng.uniform(-0.3, 0.3, 2) * (rng.random() < 0.5)) for _ in range(3))
    )
    spec, rules = spec_of(maps, 40, absent, 0.75), TargetRules(geometry=geometry, smoothing=0.1)
    plain, general = (
        sparse_targets(batch._replace(axis_aligned=aligned), spec, grid, rules)
        for aligned in (True, False)
    )
    # A sample exactly on a border may count in only one of the two paths.
    border = (plain.weight - general.weight).abs() > 1e-6
    assert border.float().mean() < 0.02
    torch.testing.assert_close(
        densify(plain, 40)[~border], densify(general, 40)[~border], rtol=0, atol=1e-5
    )


def position_coded(count, side):
    """Make maps in which every cell has a class of its own, with probability 1."""
    cls = np.tile(
        np.arange(side * side, dtype=np.uint16).reshape(1, side, side, 1), (count, 1, 1, 1)
    )
    sure = np.full(cls.shape, 9.0, np.float16)
    return ScoreMaps(
        sure, cls, sure[..., 0], np.tile(np.array([[0, 0, 1, 1]], np.float32), (count, 1))
    )


def centers_of(targets, side):
    """Locate the targets of a position-coded map: x, y `[N, T, 2]` in cells, and the distance of
    the farthest cell.
    """
    dense = densify(targets, side * side)
    y, x = torch.meshgrid(torch.arange(side) + 0.5, torch.arange(side) + 0.5, indexing="ij")
    cells = torch.stack([x.flatten(), y.flatten()], 1).double()
    center = dense @ cells
    far = (cells - center[:, :, None]).abs().amax(-1) * (dense > 1e-9)
    return center, far.amax(-1)


@given(
    st.integers(0, 9999),
    st.sampled_from([1, 5, 8]),
    st.floats(-0.6, 0.6),
    st.floats(-0.4, 0.4),
    st.booleans(),
)
@settings(max_examples=40)
@pytest.mark.parametrize("geometry", ["aligned", "published"])
def test_a_position_coded_map_returns_the_cells_under_any_view(
    geometry, seed, grid, angle, shear, flip
):
    """Bilinear sampling preserves linear functions: the mean cell of a token's target is exactly
    the token's position.
    """
    side, height, width = 9, 300, 420
    maps = position_coded(1, side)
    boxes, _ = random_boxes(1, height, width, seed)
    batch = batch_of(maps, boxes, np.array([flip]), height, width, sheared=True)
    top, left, bottom, right = batch.shown[0].numpy()
    batch = warped(batch, warp(angle, shear))
    targets = sparse_targets(
        batch, spec_of(maps, side * side, "tail"), grid, TargetRules(geometry=geometry)
    )
    steps = (np.arange(grid) + 0.5) / grid
    u, v = (part.ravel() for part in np.meshgrid(steps, steps))
    x, y = batch.view[0].numpy() @ np.stack([u, v, np.ones_like(u)])
    # As in the published code: flip, crop, and pass rows as columns.
    if geometry == "published":
        if flip:
            x, left, right = 1 - x, 1 - right, 1 - left
        x, y = (
            top + (x - left) / (right - left) * (bottom - top),
            left + (y - top) / (bottom - top) * (right - left),
        )
        x = 1 - x if flip else x
    center, far = centers_of(targets, side)
    # Where all samples are inside and none was clamped to the centers of the outermost cells.
    clear = (
        torch.from_numpy(np.minimum(np.minimum(x, 1 - x), np.minimum(y, 1 - y))) * side
        > 0.5 + far[0]
    ) & (targets.weight[0] == 1)
    want = torch.from_numpy(np.stack([x, y], 1) * side)
    torch.testing.assert_close(center[0][clear], want[clear], rtol=0, atol=2e-6)
    told = targets.weight[0] > 0
    torch.testing.assert_close(
        densify(targets, side * side)[0].sum(-1)[told], torch.ones(int(told.sum())).double()
    )
    torch.testing.assert_close(targets.total, torch.ones_like(targets.total))


# ------------------------------------------------------------------------- the published reading


def published_dense_targets(maps, shown, flips, num_classes, grid, smoothing):
    """Restate the published recipe: flip image and map, scatter, RoIAlign with rows for x, softmax,
    smoothing; `[N, T, K]`.
    """
    side = maps.logit.shape[1]
    pooled = []
    for logit, cls, (top, left, bottom, right), flip in zip(
        maps.logit, maps.cls, shown.tolist(), flips, strict=True
    ):
        dense = torch.zeros(num_classes, side, side, dtype=torch.float64)
        for row, column, k in itertools.product(range(side), range(side), range(logit.shape[2])):
            dense[int(cls[row, column, k]), row, side - 1 - column if flip else column] = float(
                logit[row, column, k]
            )
        left, right = (1 - right, 1 - left) if flip else (left, right)
        box = torch.tensor([[top, left, bottom, right]], dtype=torch.float64) * side - 0.5
        pooled.append(roi_align(dense[None], [box], grid)[0].flatten(1).mT)
    off = smoothing / num_classes
    return torch.stack(pooled).softmax(-1) * (1 - smoothing + off) + off


@pytest.mark.parametrize("sheared", [False, True])
@pytest.mark.parametrize(
    ("side", "grid", "count"), [(18, 14, 6), (18, 1, 5), (7, 14, 6), (7, 1, 1), (7, 4, 5)]
)
def test_published_geometry_reads_what_the_published_code_reads(
    random_maps, side, grid, count, sheared
):
    """Random and tiny crops (its boxes are at least a cell), flipped and not, at the borders; the
    Window has no effect.
    """
    maps = random_maps(count, side, 5, 50, window=(0.1, 0.2, 0.9, 0.7))
    boxes, flips = random_boxes(count, flips=True)
    flips[:3] = np.array([True, False, True])[:count]
    boxes[1:3] = np.array([[360.0, 470, 15, 30], [0, 0, 20, 12]])[: count - 1]
    batch = batch_of(maps, boxes, flips, sheared=sheared)
    # Unrounded, as in the published code.
    batch = batch._replace(shown=torch.from_numpy(visible_boxes(batch.view.numpy())))
    rules = TargetRules(smoothing=0.1, outside="uniform", geometry="published")
    targets = sparse_targets(batch, spec_of(maps, 50, "zero-logit", 0.5), grid, rules)
    want = published_dense_targets(maps, batch.shown, flips, 50, grid, 0.1)
    torch.testing.assert_close(densify(targets, 50), want, rtol=0, atol=1e-9)
    assert (targets.weight == 1).all()
    aligned = sparse_targets(
        batch, spec_of(maps, 50, "zero-logit", 0.5), grid, replace(rules, geometry="aligned")
    )
    assert (densify(aligned, 50) - want).abs().max() > 1e-2


# ---------------------------------------------------------------------- temperature, ground truth


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_temperature_divides_logits(random_maps, temperature):
    maps = random_maps(2, 6, 3, 12)
    boxes, flips = random_boxes(2, flips=True)
    batch, rules = batch_of(maps, boxes, flips), TargetRules(temperature=temperature)
    logit, tail = (
        densify(sparse_targets(batch, spec_of(maps, 12, kind), 4, rules), 12)
        for kind in ("zero-logit", "tail")
    )
    softer = maps._replace(logit=maps.logit.astype(np.float64) / temperature)
    torch.testing.assert_close(
        logit, dense_targets(softer, boxes, flips, 12, 4, "zero-logit", 0.0), rtol=0, atol=4e-6
    )
    # The kept classes of a cell share their sum by their powers; the remainder does not change.
    cells = dense_maps(maps, 12, "tail").permute(0, 2, 3, 1)
    named = torch.from_numpy(maps.cls.astype(int))
    kept = cells.gather(3, named)
    power = kept ** (1 / temperature)
    cells = cells.scatter(3, named, kept.sum(3, keepdim=True) * power / power.sum(3, keepdim=True))
    pooled, _ = sampler(batch, spec_of(maps, 12, "tail"), 4, TargetRules())
    torch.testing.assert_close(tail, pooled(cells), rtol=0, atol=1e-9)
    torch.testing.assert_close(tail.sum(-1), torch.ones(2, 16).double())


def test_a_low_temperature_of_many_classes_stays_finite():
    """At K = 65,536 a cell's largest probability can be 2e-5, whose tenth power underflows float32;
    class ids up to the last.
    """
    cls = np.array([0, 65535], np.uint16).reshape(1, 1, 1, 2).repeat(3, 1).repeat(3, 2)
    maps = ScoreMaps(
        np.float16([0.5, 0.25]) * np.ones(cls.shape, np.float16),
        cls,
        np.full((1, 3, 3), 11.1, np.float16),
        np.float32([[0, 0, 1, 1]]),
    )
    batch = batch_of(
        maps, np.array([[0.0, 0.0, 90.0, 90.0]]), np.array([False]), 100, 100, torch.float32
    )
    spec = spec_of(maps, 65536, "tail")
    targets = sparse_targets(batch, spec, 2, TargetRules(temperature=0.1))
    assert targets.palette.tolist() == [[0, 65535]]
    dense = densify(targets, 65536)
    torch.testing.assert_close(dense.sum(-1), torch.ones(1, 4), rtol=0, atol=2e-4)
    torch.testing.assert_close(
        dense[..., 0] / dense[..., 65535],
        torch.full((1, 4), np.exp(2.5)).float(),
        rtol=1e-4,
        atol=0,
    )


def test_a_high_temperature_makes_no_target_of_rounding(random_maps):
    """A confident teacher of 1,000 classes: the remainder of 1e-8 underflows float16, and the kept
    classes keep all of the target.
    """
    maps = random_maps(2, 6, 5, 1000)
    maps = maps._replace(
        lse=(maps.logit.max(3) + 20).astype(np.float16), logit=(maps.logit + 20).astype(np.float16)
    )
    boxes, flips = random_boxes(2)
    for dtype in (torch.float32, torch.float64):
        batch = batch_of(maps, boxes, flips, dtype=dtype)
        kept = [
            sparse_targets(
                batch, spec_of(maps, 1000, "tail"), 4, TargetRules(temperature=t)
            ).extra.sum(-1)
            for t in (1, 4)
        ]
        torch.testing.assert_close(kept[0], kept[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("rule", "shares"), [("published", (0.5, 0.9)), ("intended", (0.9, 0.5))])
def test_the_image_label_is_mixed_in_by_whether_the_teacher_agrees(random_maps, rule, shares):
    """Against dense arithmetic: labels that the map contains, labels that it does not, and the
    first of these, which is the best class where logits are negative.
    """
    maps = random_maps(5, 4, 2, 9)
    maps.logit[4] = -np.abs(maps.logit[4]) - 1
    maps.cls[4], maps.cls[3] = np.array([0, 1]), np.array([3, 8])
    boxes, flips = random_boxes(5, flips=True)
    spec = spec_of(maps, 9, "zero-logit")
    targets = sparse_targets(batch_of(maps, boxes, flips), spec, 1, TargetRules(smoothing=0.2))
    dense = densify(targets, 9)[:, 0]
    best = dense.argmax(1)
    assert best[4] == 2
    for shift in range(9):
        label = (best + shift * torch.arange(5)) % 9
        mixed = mix_ground_truth(targets, label, 9, 0.2, rule)
        given = torch.nn.functional.one_hot(label, 9).double() * 0.8 + 0.2 / 9
        share = torch.where(label == best, *shares)[:, None]
        want = share * dense + (1 - share) * given
        torch.testing.assert_close(densify(mixed, 9)[:, 0], want, rtol=0, atol=1e-12)
        torch.testing.assert_close(mixed.total[:, 0], want.sum(1), rtol=0, atol=1e-12)
        assert torch.equal(mixed.weight, targets.weight)
        assert mixed.palette.shape == (5, targets.palette.shape[1] + 1)


# ------------------------------------------------------------------ shapes, devices, the compiler


@pytest.mark.parametrize("sheared", [False, True])
def test_a_crop_far_outside_a_small_window_stays_small(random_maps, sheared):
    """1 x 4000 pixels labeled by their center square: 64 samples per token and axis would take 3 MB
    per image and class.
    """
    maps = random_maps(1, 18, 2, 6, window=(0.0, 0.499875, 1.0, 0.500125))
    batch = batch_of(
        maps, np.array([[0.0, 0.0, 1.0, 4000.0]]), np.array([False]), 1, 4000, sheared=sheared
    )
    spec = spec_of(maps, 6, "tail", 1 / 4000)
    made = []
    with torch.profiler.profile(profile_memory=True) as profile:
        made.append(sparse_targets(batch, spec, 14, TargetRules()))
    assert sum(max(event.cpu_memory_usage, 0) for event in profile.key_averages()) < 40e6
    assert made[0].weight.isfinite().all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("geometry", ["aligned", "published"])
@pytest.mark.parametrize("absent", ["tail", "zero-logit"])
@pytest.mark.parametrize("sheared", [False, True])
@pytest.mark.parametrize("kernels", [False, True])
def test_nothing_is_read_from_the_device(
    monkeypatch, random_maps, kernels, sheared, absent, geometry
):
    """On a simulated GPU, where values cannot be read, shapes cannot depend on them, and tensors of
    two devices cannot be combined.
    """
    monkeypatch.setattr(fused_targets, "has_triton", lambda: kernels)
    maps = random_maps(3, 6, 2, 8)
    batch = batch_of(maps, *random_boxes(3, flips=True), dtype=torch.float32, sheared=sheared)
    batch = batch._replace(map_class=batch.map_class.to(torch.uint16))
    spec, rules = (
        spec_of(maps, 8, absent),
        TargetRules(smoothing=0.1, temperature=2.0, outside="uniform", geometry=geometry),
    )
    with FakeTensorMode():
        batch = batch.map_tensors(
            lambda part: torch.empty(part.shape, dtype=part.dtype, device="cuda")
        )
        targets = sparse_targets(batch, spec, 5, rules)
        whole = mix_ground_truth(
            sparse_targets(batch, spec, 1, rules), batch.label, 8, 0.1, "published"
        )
        assert {part.device.type for part in (*targets, *whole)} == {"cuda"}
        for read in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.nonzero):
            with pytest.raises(RuntimeError):
                read(targets.base[:1, :1])


@pytest.mark.parametrize("sheared", [False, True])
def test_autocast_leaves_targets_as_they_are(random_maps, sheared):
    maps = random_maps(3, 6, 2, 8)
    batch, spec = (
        batch_of(maps, *random_boxes(3, flips=True), dtype=torch.float32, sheared=sheared),
        spec_of(maps, 8, "zero-logit"),
    )
    plain = sparse_targets(batch, spec, 5, TargetRules())
    with torch.autocast("cpu", torch.bfloat16):
        cast = sparse_targets(batch, spec, 5, TargetRules())
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("sheared", "backend"), [(False, "inductor"), (True, "aot_eager")])
def test_targets_and_loss_compile_whole(random_maps, sheared, backend):
    """One graph, and equal to eager; inductor once, since it takes seconds."""
    maps = random_maps(3, 6, 2, 8)
    boxes, flips = random_boxes(3, flips=True)
    batch, spec = (
        batch_of(maps, boxes, flips, dtype=torch.float32, sheared=sheared),
        spec_of(maps, 8, "zero-logit"),
    )
    batch = batch._replace(map_class=batch.map_class.to(torch.uint16))
    rules = TargetRules(smoothing=0.1, geometry="published" if sheared else "aligned")

    def step(logits, batch):
        known = palette_maps(batch, spec, rules)
        whole = mix_ground_truth(
            sparse_targets(batch, spec, 1, rules, known), batch.label, 8, 0.1, "intended"
        )
        return sparse_loss(logits[:, 0], whole) + sparse_loss(
            logits[:, 1:], sparse_targets(batch, spec, 4, rules, known)
        )

    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend=backend)):
        logits = torch.randn(3, 17, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        loss = run(logits, batch)
        loss.backward()
        results.append((loss.detach(), logits.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


# ------------------------------------------------------------------------- refusals


def test_a_first_batch_that_cannot_be_right_is_refused(random_maps):
    maps = random_maps(3, 4, 2, 8)
    good = batch_of(maps, *random_boxes(3), dtype=torch.float32)._replace(
        index=torch.tensor([5, 6, 7])
    )
    good = good._replace(map_class=good.map_class.to(torch.uint16))
    spec = spec_of(maps, 8, "tail")
    check_batch(good, spec, "the maps of x.h5")

    def spoiled(field, row, value):
        part = getattr(good, field).clone()
        part[row] = value
        return good._replace(**{field: part})

    for bad, words in [
        (spoiled("map_logit", 1, float("nan")), "sample 6 has a logit that is not finite"),
        (spoiled("map_logit", 2, float("inf")), "sample 7 has a logit that is not finite"),
        (spoiled("map_lse", 0, float("inf")), "sample 5 has a logsumexp that is not finite"),
        (
            spoiled("map_class", 2, torch.tensor(8, dtype=torch.uint16)),
            "sample 7 has class 8 of 8; label it again",
        ),
        (
            spoiled("view", 1, torch.tensor([[1.0, 2, 0], [0.5, 1, 0]])),
            "sample 6 has a View of no area",
        ),
        (spoiled("view", 1, float("nan")), "sample 6 has a View"),
        (
            spoiled("window", 0, torch.tensor([0.5, 0, 0.5, 1])),
            "sample 5 has a Window that is not part of the image",
        ),
        (good._replace(map_lse=None), "did not come with the batch"),
        (
            good._replace(map_logit=good.map_logit[:, :3, :3]),
            r"have 3 x 3 cells of 2 classes, but their header says 4 x 4 of 2",
        ),
    ]:
        with pytest.raises(UserError, match=rf"the maps of x.h5.* {words}"):
            check_batch(bad, spec, "the maps of x.h5")
    with pytest.raises(UserError, match="has more classes than its palette size; label it again"):
        check_batch(good, spec._replace(max_palette=spec.max_palette - 1), "x")
    with pytest.raises(
        UserError, match=r"the maps have .* of 2 classes, but their header says .* of 3"
    ):
        check_batch(good, spec._replace(top_k=3), "the maps")


def test_a_rotated_view_is_sampled_rightly_without_being_declared(random_maps):
    """A batch that nobody declared axis-aligned is sampled point by point."""
    maps = random_maps(2, 6, 3, 8)
    batch = warped(batch_of(maps, *random_boxes(2), sheared=True), warp(0.4), warp(-0.5, 0.3))
    undeclared = Batch(*batch[:11])
    assert not undeclared.axis_aligned
    spec = spec_of(maps, 8, "tail")
    targets = sparse_targets(undeclared, spec, 3)
    want, weight = walked_targets(batch, maps, 8, 3, "tail", "ignore")
    torch.testing.assert_close(targets.weight, weight, rtol=0, atol=1e-9)
    torch.testing.assert_close(densify(targets, 8)[weight > 0], want[weight > 0], rtol=0, atol=1e-9)
    declared = sparse_targets(undeclared._replace(axis_aligned=True), spec, 3)
    assert (densify(declared, 8) - densify(targets, 8)).abs().max() > 1e-2


@pytest.mark.parametrize("rounds", [False, True])
def test_products_without_tf32_are_the_products(monkeypatch, rounds):
    """Where CUDA may round a product to TF32, a sum replaces it."""
    a, b = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 4, 5, dtype=torch.float64)
    monkeypatch.setattr(targets_module, "may_round", lambda tensor: rounds)
    with torch.profiler.profile() as profile:
        got = targets_module.exact_matmul(a, b)
    torch.testing.assert_close(got, torch.einsum("nij,njk->nik", a, b))
    assert any("bmm" in event.key for event in profile.key_averages()) != rounds

"""Sparse targets against torchvision's RoIAlign in float64 and a dense cross entropy; laws of the geometry."""

import numpy as np
import pytest
import torch
from densefeed.models.token_labeling import class_token_loss, token_loss
from densefeed.pipelines.batch import Batch, LabelSpec
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.targets import TargetRules, palettes, sparse_targets
from densefeed.relabel.geometry import crop_views, shown_boxes
from densefeed.relabel.store import palette_sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.ops import roi_align


def random_boxes(count, height=375, width=500, seed=0, flips=False):
    boxes, flip = EpochPlan(num_samples=count, batch=1, seed=seed, mode="train").crops(
        0, np.arange(count), np.full(count, height), np.full(count, width)
    )
    return boxes, flip if flips else np.zeros(count, bool)


def batch_of(maps, boxes, flips, height=375, width=500, dtype=torch.float64):
    count = len(boxes)
    view = torch.from_numpy(crop_views(boxes, flips, np.full(count, height), np.full(count, width)))
    logit, lse, window = (torch.from_numpy(part) for part in (maps.logit, maps.lse, maps.window))
    return Batch(
        image=torch.zeros(count, 1, 1, 3, dtype=torch.uint8), label=torch.zeros(count, dtype=torch.long), view=view.to(dtype),
        shown=torch.from_numpy(shown_boxes(view.numpy())).to(dtype), index=torch.arange(count), repeat=torch.zeros(count, dtype=torch.long),
        weight=torch.ones(count, dtype=dtype), map_logit=logit,
        map_class=torch.from_numpy(maps.cls.astype(np.int32)), map_lse=lse, window=window.to(dtype),
    )  # fmt: skip


def spec_of(maps, num_classes, absent, min_window_side=1.0):
    side, top_k = maps.logit.shape[2:]
    return LabelSpec(side, top_k, num_classes, absent, int(palette_sizes(maps.cls).max()), min_window_side)


def dense_maps(maps, num_classes, absent):
    """`[N, K, S, S]` float64: logits with zeros where absent, or probabilities."""
    logit, cls, lse = (torch.from_numpy(np.asarray(part, np.float64)) for part in (maps.logit, maps.cls, maps.lse))
    if absent == "zero-logit":
        dense = torch.zeros(*logit.shape[:3], num_classes, dtype=torch.float64)
        return dense.scatter_(3, cls.long(), logit).permute(0, 3, 1, 2)
    kept = (logit - lse[..., None]).exp()
    kept = kept / kept.sum(-1, keepdim=True).clamp(min=1)
    rest = (1 - kept.sum(-1, keepdim=True)) / (num_classes - logit.shape[3])
    return rest.expand(*logit.shape[:3], num_classes).scatter(3, cls.long(), kept).permute(0, 3, 1, 2)


def dense_targets(maps, boxes, flips, num_classes, grid, absent, smoothing, height=375, width=500):
    """The published recipe, in the right geometry: dense map, torchvision's RoIAlign, softmax, smoothing. `[N, P * P, K]`."""
    side = maps.logit.shape[1]
    top, left, h, w = torch.from_numpy(boxes).T
    corners = torch.stack([left / width, top / height, (left + w) / width, (top + h) / height], 1) * side
    rois = torch.cat([torch.arange(len(boxes))[:, None].double(), corners], 1)
    pooled = roi_align(dense_maps(maps, num_classes, absent), rois, grid, sampling_ratio=-1, aligned=True)
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
@pytest.mark.parametrize(("side", "grid", "count"), [(18, 14, 5), (18, 1, 4), (7, 8, 3), (6, 24, 1)])
def test_targets_are_dense_roi_align(random_maps, side, grid, count, absent):
    maps = random_maps(count, side, 5, 50)
    boxes, flips = random_boxes(count, flips=True)
    targets = sparse_targets(batch_of(maps, boxes, flips), spec_of(maps, 50, absent), grid, TargetRules(smoothing=0.1))
    want = dense_targets(maps, boxes, flips, 50, grid, absent, 0.1)
    # Views are float32: 18 cells * 2^-24 are off by 1e-6 cells, and probabilities change by at most 3 a cell.
    torch.testing.assert_close(densify(targets, 50), want, rtol=0, atol=4e-6)
    torch.testing.assert_close(densify(targets, 50).sum(-1), targets.total, rtol=0, atol=1e-9)
    assert (targets.weight == 1).all()


@pytest.mark.parametrize("absent", ["tail", "zero-logit"])
def test_the_sparse_loss_and_its_gradient_are_the_dense_ones(random_maps, absent):
    """Bars of the labels' own issue: loss within 2e-6 relative, gradient within 1e-7, in float32 against dense float64."""
    count, grid, num_classes = 5, 14, 1000
    maps = random_maps(count, 18, 5, num_classes)
    boxes, flips = random_boxes(count, flips=True)
    logits = 2 * torch.randn(count, grid * grid, num_classes, generator=torch.Generator().manual_seed(1))
    ours = logits.clone().requires_grad_()
    batch = batch_of(maps, boxes, flips, dtype=torch.float32)
    loss = token_loss(ours, sparse_targets(batch, spec_of(maps, num_classes, absent), grid, TargetRules(smoothing=0.1)))
    loss.backward()
    theirs = logits.double().requires_grad_()
    want = -(dense_targets(maps, boxes, flips, num_classes, grid, absent, 0.1) * theirs.log_softmax(-1)).sum(-1).mean()
    want.backward()
    assert abs(loss.item() / want.item() - 1) < 2e-6
    assert (ours.grad.double() - theirs.grad).abs().max() < 1e-7


def test_sampling_is_roi_align_on_degenerate_boxes():
    """2,000 boxes down to a thousandth of a cell, read from a random map by both."""
    rng = np.random.default_rng(0)
    count, side, grid = 2000, 18, 14
    low = rng.random((count, 2)) * 0.999
    extent = (1 - low) * rng.random((count, 2)) ** 4
    low, extent = torch.from_numpy(low), torch.from_numpy(extent).clamp(min=1e-4)
    values = torch.from_numpy(rng.standard_normal((1, 1, side, side)))
    zeros, ones = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
    rows, inside = axis_weights(extent[:, 1], low[:, 1], zeros, ones, side, grid, 2)
    columns, _ = axis_weights(extent[:, 0], low[:, 0], zeros, ones, side, grid, 2)
    rois = torch.cat([zeros[:, None], low * side, (low + extent) * side], 1)
    torch.testing.assert_close(
        rows @ values[0] @ columns.mT, roi_align(values, rois, grid, sampling_ratio=-1, aligned=True)[:, 0], rtol=0, atol=1e-5
    )
    assert (inside == 1).all()


@given(st.integers(0, 10_000), st.sampled_from([1, 4, 7]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_position_coded_map_returns_the_cells_under_the_crop(seed, grid, flip):
    """A map whose class is its cell: the class a token puts most weight on is a cell that token overlaps."""
    side, height, width = 9, 300, 420
    cls = np.arange(side * side, dtype=np.uint16).reshape(1, side, side, 1)
    from densefeed.relabel.store import ScoreMaps

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


def test_flipping_twice_changes_nothing(random_maps):
    maps = random_maps(3, 8, 3, 20)
    boxes, _ = random_boxes(3)
    plain, flipped = (sparse_targets(batch_of(maps, boxes, np.full(3, f)), spec_of(maps, 20, "tail"), 6) for f in (False, True))
    back = flipped.extra.view(3, 6, 6, -1).flip(2).flatten(1, 2)
    torch.testing.assert_close(back, plain.extra, rtol=0, atol=4e-6)


def test_outside_the_window_there_is_no_label(random_maps):
    """A map of the image's middle half: tokens left and right of it weigh 0, those inside 1, and their labels are the map's."""
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
    # Token (r, 2 + c) covers two columns of the map, which two tokens of the 8 x 8 grid over the map alone also cover.
    torch.testing.assert_close(got[:, 2:6], want.view(8, 4, 2, 6).mean(2), rtol=0, atol=1e-9)


def test_a_crop_outside_the_window_carries_no_loss(random_maps):
    maps = random_maps(2, 8, 2, 6, window=(0.0, 0.5, 1.0, 1.0))
    batch = batch_of(maps, np.array([[0.0, 0.0, 100.0, 40.0]] * 2), np.array([False, True]), 100, 100)
    spec = spec_of(maps, 6, "tail", min_window_side=0.5)
    logits = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    loss = class_token_loss(logits, sparse_targets(batch, spec, 1))
    loss.backward()
    assert loss.item() == 0
    assert (logits.grad == 0).all()


@given(st.integers(1, 5), st.integers(2, 5), st.integers(1, 4), st.integers(4, 40))
@settings(max_examples=50, deadline=None)
def test_palettes_hold_each_class_once(count, side, top_k, num_classes):
    rng = np.random.default_rng(side * 100 + top_k)
    cls = torch.from_numpy(
        np.sort(rng.permuted(np.tile(np.arange(num_classes), (count, side, side, 1)), axis=3)[..., :top_k], axis=3)
    )
    size = int(palette_sizes(cls.numpy()).max())
    palette, slot = palettes(cls, size)
    torch.testing.assert_close(palette.gather(1, slot), cls.flatten(1).long())
    for n in range(count):
        used = palette[n, : len(cls[n].unique())]
        torch.testing.assert_close(used, cls[n].unique().long())


def test_permuting_the_batch_permutes_the_targets(random_maps):
    maps = random_maps(4, 6, 3, 12)
    boxes, flips = random_boxes(4, flips=True)
    order = [2, 0, 3, 1]
    spec = spec_of(maps, 12, "tail")
    plain = sparse_targets(batch_of(maps, boxes, flips), spec, 5)
    moved = sparse_targets(Batch(*(f[order] for f in batch_of(maps, boxes, flips) if f is not None)), spec, 5)
    torch.testing.assert_close(moved.extra, plain.extra[order])


def test_when_every_class_is_kept_the_target_is_the_softmax(random_maps):
    """k = K leaves no tail; float16 storage is the only error."""
    maps = random_maps(2, 4, 6, 6)
    batch = batch_of(maps, np.array([[0.0, 0.0, 100.0, 100.0]] * 2), np.array([False, False]), 100, 100)
    dense = densify(sparse_targets(batch, spec_of(maps, 6, "tail"), 4), 6)
    full = np.zeros((2, 4, 4, 6))
    np.put_along_axis(full, maps.cls.astype(int), maps.logit.astype(float), axis=3)
    torch.testing.assert_close(dense, torch.from_numpy(full).softmax(-1).flatten(1, 2), rtol=0, atol=1e-9)

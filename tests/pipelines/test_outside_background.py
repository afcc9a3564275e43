"""Targets of maps whose top k leave what belongs to no class of the data, against loops in float64.

The maps are those of a teacher of nine classes, of which the data has six.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from densefeed.objectives.losses import sparse_loss
from densefeed.pipelines.mixing import mean_target, mix_targets
from densefeed.pipelines.targets import TargetRules, mix_ground_truth, palette_maps, sparse_targets
from densefeed.relabel.class_map import ClassMap, merge_classes, name_unmapped
from densefeed.relabel.scoring import keep, to_maps
from densefeed.storage.row_codecs import ScoreMaps, code_levels, pack, unpack
from densefeed.storage.score_maps import palette_sizes

from .test_targets import (
    batch_of,
    cell_value,
    densify,
    outermost,
    random_boxes,
    spec_of,
    warp,
    warped,
)

TEACHER, K, SIDE, N = 9, 6, 5, 5
BOXES = np.array(
    [
        [20, 60, 300, 400],
        [0, 0, 375, 500],
        [0, 250, 200, 250],
        [100, 100, 60, 90],
        [50, 0, 300, 300.0],
    ]
)
FLIPS = np.array([False, True, False, True, True])
WARPS = [
    warp(0.4),
    warp(-0.5, 0.3),
    warp(0, 0.28, (0.3, 0)),
    warp(1.3, -0.3, (0.1, -0.4)),
    warp(0, 0, (0.45, -0.2)),
]
WINDOW = (0.05, 0.2, 1.0, 0.8)


def background_maps(top_k, seed=0):
    """Random maps; rows 1 and 3 show no class of the data in three columns of cells."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.standard_normal((N, SIDE, SIDE, TEACHER))
    cls = np.argsort(-logits[..., :K], -1)[..., :top_k]
    lse = np.log(np.exp(logits).sum(-1)).astype(np.float16)
    # The largest number of float16: beside it a logit has no probability.
    lse[1::2, :, :3] = 65504
    return ScoreMaps(
        np.take_along_axis(logits, cls, -1).astype(np.float16),
        cls.astype(np.uint16),
        lse,
        np.tile(np.float32(WINDOW), (N, 1)),
    )


def make_compact(maps):
    rows = [np.frombuffer(row, np.uint8) for row in pack("compact", "background", maps)]
    palette, levels = palette_sizes(maps.cls), code_levels("background")
    return ScoreMaps(
        *unpack("compact", SIDE, maps.cls.shape[3], levels, palette, rows), maps.window
    )


def dense_cells(maps, temperature=1.0):
    """Return the probability of each class of the data in each cell, `[N, S, S, K]`."""
    log_p = maps.logit.astype(float) - maps.lse.astype(float)[..., None]
    p = np.exp(log_p)
    mass = np.minimum(p.sum(-1, keepdims=True), 1)
    soft = np.exp((log_p - log_p.max(-1, keepdims=True)) / temperature)
    dense = np.zeros((*p.shape[:3], K))
    np.put_along_axis(dense, maps.cls.astype(int), mass * soft / soft.sum(-1, keepdims=True), -1)
    return dense


def walk(batch, dense, grid, outside, smoothing=0.0):
    """Walk over the sample points of every token: targets `[N, T, K]` and weights `[N, T]`."""
    targets, weights = np.zeros((2, len(dense), grid * grid, 1))
    targets = np.repeat(targets, K, 2)
    for n, cells in enumerate(dense):
        view, shown = batch.view[n].double().numpy(), batch.shown[n].double().numpy()
        top, left, bottom, right = batch.window[n].double().numpy()
        edges = view[:, :2] / np.array([[right - left], [bottom - top]]) * SIDE
        counts = np.ceil(np.linalg.norm(edges, axis=0) / grid - 1e-5).clip(1).astype(int)
        ends = outermost(left, right, SIDE), outermost(top, bottom, SIDE)
        for t, (row, column) in enumerate(itertools.product(range(grid), repeat=2)):
            total = np.zeros(K)
            for j, i in itertools.product(range(counts[1]), range(counts[0])):
                u, v = (column + (i + 0.5) / counts[0]) / grid, (row + (j + 0.5) / counts[1]) / grid
                x, y = view @ [u, v, 1]
                if not max(shown[1], left, 0) <= x <= min(shown[3], right, 1):
                    continue
                if not max(shown[0], top, 0) <= y <= min(shown[2], bottom, 1):
                    continue
                at = (x - left) / (right - left), (y - top) / (bottom - top)
                total += cell_value(cells, *at, *ends)
            # The mean over all points, with nothing for those outside.
            p = total / counts.prod()
            if outside == "uniform":
                targets[n, t], weights[n, t] = p + (1 - p.sum()) / K, 1
            elif p.sum() > 0:
                targets[n, t], weights[n, t] = p / p.sum(), p.sum()
    off = smoothing / K
    targets = targets * (1 - smoothing + off) + off
    return torch.from_numpy(targets), torch.from_numpy(weights[..., 0])


@pytest.mark.parametrize("outside", ["ignore", "uniform"])
@pytest.mark.parametrize("sheared", [False, True])
@pytest.mark.parametrize("form", ["raw", "compact"])
@pytest.mark.parametrize(
    ("top_k", "grid", "rules"),
    [(3, 4, {}), (K, 3, dict(smoothing=0.1, temperature=2.0)), (K, 1, {})],
)
def test_outside_the_data_targets_are_those_of_a_walk(top_k, grid, rules, form, sheared, outside):
    maps = background_maps(top_k)
    maps = make_compact(maps) if form == "compact" else maps
    batch = batch_of(maps, BOXES, FLIPS, sheared=sheared)
    batch = warped(batch, *WARPS) if sheared else batch
    spec = spec_of(maps, K, "background", 0.6)
    rules = TargetRules(outside=outside, **rules)
    got = sparse_targets(batch, spec, grid, rules)
    dense = dense_cells(maps, rules.temperature)
    want, weight = walk(batch, dense, grid, outside, rules.smoothing)
    # Boxes are float32, and so 18 cells are off by 1e-6.
    torch.testing.assert_close(got.weight, weight, rtol=0, atol=4e-6)
    told = weight > 1e-4
    torch.testing.assert_close(densify(got, K)[told], want[told], rtol=0, atol=2e-5)
    torch.testing.assert_close(densify(got, K).sum(-1)[told], got.total[told], rtol=0, atol=1e-9)
    assert all(field.isfinite().all() for field in got)
    if outside == "uniform":
        assert (got.weight == 1).all()
    elif grid > 1:
        # Code 0 of a compact row is a millionth of its largest probability.
        assert (weight < 1e-5).any()
        assert 0.1 < weight.mean() < 0.8


@pytest.mark.parametrize("outside", ["ignore", "uniform"])
def test_outside_the_data_the_loss_is_the_dense_one_with_weights(outside):
    """And its gradient, float32 against float64; tokens of no class and padding have none."""
    maps = background_maps(3)
    batch = batch_of(maps, BOXES, FLIPS, dtype=torch.float32)
    batch = batch._replace(weight=torch.tensor([1.0, 1, 0, 1, 1]))
    rules = TargetRules(smoothing=0.1, outside=outside)
    ours = torch.randn(N, 16, K, generator=torch.Generator().manual_seed(1)).requires_grad_()
    loss = sparse_loss(ours, sparse_targets(batch, spec_of(maps, K, "background", 0.6), 4, rules))
    loss.backward()
    want, weight = walk(batch, dense_cells(maps), 4, outside, 0.1)
    weight = weight * batch.weight[:, None].double()
    theirs = ours.detach().double().requires_grad_()
    each = -(want * theirs.log_softmax(-1)).sum(-1)
    dense = (each * weight).sum() / weight.sum()
    dense.backward()
    assert loss.item() == pytest.approx(dense.item(), rel=1e-5)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=0, atol=2e-6)
    assert (ours.grad[weight == 0] == 0).all()
    assert outside == "uniform" or (weight[3] == 0).any()


def test_outside_the_data_a_crop_of_no_class_has_no_loss():
    """All cells without a class: weight 0 and no NaN, also of the gradient."""
    maps = background_maps(3)
    maps.lse[:] = 65504
    batch = batch_of(maps, BOXES, FLIPS, dtype=torch.float32)
    logits = torch.randn(N, K).requires_grad_()
    targets = sparse_targets(batch, spec_of(maps, K, "background", 0.6), 1)
    loss = sparse_loss(logits, targets)
    loss.backward()
    assert loss.item() == 0
    assert (logits.grad == 0).all()
    even = sparse_targets(
        batch, spec_of(maps, K, "background", 0.6), 1, TargetRules(outside="uniform")
    )
    torch.testing.assert_close(densify(even, K), torch.full((N, 1, K), 1 / K))


@given(st.integers(0, 999), st.sampled_from([1, 4]), st.sampled_from(["ignore", "uniform"]))
@settings(max_examples=25, deadline=None)
def test_outside_law_of_a_map_that_covers_every_class(seed, grid, outside):
    """Then keep gives drop's targets, but for the rounding of a cell's sum to float16."""
    logits = 3 * torch.randn(2, SIDE, SIDE, TEACHER, generator=torch.Generator().manual_seed(seed))
    target = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2])
    class_map, window = ClassMap(torch.arange(TEACHER), target, K), np.float32([[0, 0, 1, 1]] * 2)
    dropped = to_maps(keep(merge_classes(logits, class_map), K), window)
    extended = merge_classes(logits, name_unmapped(class_map, TEACHER))
    kept = to_maps(keep(extended, K, unmapped=True), window)
    np.testing.assert_array_equal(kept.logit, dropped.logit)
    np.testing.assert_array_equal(kept.lse, dropped.lse)
    boxes, flips = random_boxes(2, seed=seed, flips=True)
    batch, rules = batch_of(kept, boxes, flips), TargetRules(outside=outside, smoothing=0.1)
    one, other = (
        sparse_targets(batch, spec_of(kept, K, absent), grid, rules)
        for absent in ("background", "tail")
    )
    # Logit and logsumexp are up to 16 and have 11 bits: 2 * 16 / 2**12.
    torch.testing.assert_close(densify(one, K), densify(other, K), rtol=0, atol=8e-3)
    torch.testing.assert_close(one.weight, other.weight, rtol=0, atol=8e-3)


def test_outside_the_data_mixing_adds_what_images_show():
    """Under `ignore`, exchanged and averaged targets are those of the added probabilities."""
    maps = background_maps(3)
    batch, spec = batch_of(maps, BOXES, FLIPS), spec_of(maps, K, "background", 0.6)
    known = palette_maps(batch, spec, TargetRules())
    tokens, whole = (sparse_targets(batch, spec, grid, maps=known) for grid in (4, 1))
    dense = dense_cells(maps)
    for targets, grid in ((tokens, 4), (whole, 1)):
        target, weight = walk(batch, dense, grid, "ignore")
        p = target * weight[..., None]
        mixed = mix_targets(targets, torch.tensor(0.3, dtype=torch.float64))
        want = 0.7 * p + 0.3 * p.flip(0)
        torch.testing.assert_close(mixed.weight, want.sum(-1), rtol=0, atol=4e-6)
        got = densify(mixed, K) * mixed.weight[..., None]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    target, weight = walk(batch, dense, 4, "ignore")
    mean = mean_target(tokens)
    want = (target * weight[..., None]).mean(1, keepdim=True)
    torch.testing.assert_close(densify(mean, K) * mean.weight[..., None], want, rtol=0, atol=1e-5)
    label = torch.tensor([0, 1, 2, 3, 4])
    labeled = mix_ground_truth(whole, label, K, 0.0, "intended")
    assert torch.equal(labeled.weight, whole.weight)
    told = whole.weight > 0
    got, total = densify(labeled, K).sum(-1)[told], labeled.total[told]
    torch.testing.assert_close(got, total, rtol=0, atol=1e-6)

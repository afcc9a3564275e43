"""Mixing against plain slices and dense targets."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from densefeed.pipelines.mixing import (
    Mix,
    Mixing,
    MixOptions,
    box_map,
    check_pairs,
    label_share,
    mean_target,
    mix_images,
    mix_targets,
    share_map,
)
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.shapes import split_grid
from densefeed.pipelines.targets import SparseTargets
from densefeed.system.errors import UserError

PLAN = EpochPlan(num_samples=10, batch=2, seed=1, mode="train")


def mix_of(top, left, bottom, right, blend=0.0, side=32):
    return Mix(
        torch.tensor([top, left, bottom, right], dtype=torch.float32), torch.tensor(blend), side
    )


def test_outside_parts_of_odd_size_are_refused_only_where_a_run_mixes():
    fields = dict(num_samples=100, batch=18, seed=1, mode="train", microbatches=6)
    plans = [EpochPlan(**fields, ranks=2, rank=rank) for rank in range(2)]
    rows = np.concatenate([plan.rows for plan in plans])
    assert sorted(rows) == list(range(18))
    # Weights of a batch that is not padded.
    assert plans[0].part_weights(0) == [1, 1, 1]
    check_pairs(plans[0], MixOptions(mixtoken=False))
    for fields in ({}, {"cutmix": 1.0}, {"mixup": 0.2}):
        with pytest.raises(UserError, match=r"18 in 6 parts has 3 images in each, and an image"):
            check_pairs(plans[0], MixOptions(mixtoken=not fields, **fields))
    check_pairs(EpochPlan(num_samples=9, batch=9, seed=1, mode="train"), MixOptions())


def random_targets(count, tokens, palette=3, classes=9, seed=0):
    """Make targets, some tokens without a label, and the same as a dense `[N, T, K]`."""
    rng = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randperm(classes, generator=rng)[:palette] for _ in range(count)])
    extra = torch.rand(count, tokens, palette, generator=rng)
    base = torch.rand(count, tokens, generator=rng) / 10
    weight = (torch.rand(count, tokens, generator=rng) > 0.3).float() * torch.rand(
        count, tokens, generator=rng
    )
    targets = SparseTargets(index, extra, base, weight, base * classes + extra.sum(-1))
    return targets, dense(targets, classes)


def dense(targets, classes=9):
    full = targets.base.double()[..., None].expand(-1, -1, classes).clone()
    index = targets.palette[:, None].expand(-1, full.shape[1], -1)
    return full.scatter_add_(2, index, targets.extra.double())


boxes = st.tuples(*[st.integers(0, 32)] * 4).map(
    lambda b: (min(b[0], b[2]), min(b[1], b[3]), max(b[0], b[2]), max(b[1], b[3]))
)


@given(
    boxes,
    st.sampled_from([(32, (1, 3, 8, 32)), (48, ((1, 1), (3, 8), (32, 4), (16, 24)))]),
    st.integers(0, 3),
    st.floats(0, 1),
)
@settings(max_examples=120)
def test_shares_of_cells_equal_mixed_pictures(box, shape, which, blend):
    """A black image and its white partner, blended and then exchanged in the box, pixel by pixel; a
    cell is the mean of its pixels. The image has 32 x 32 or 32 x 48 units, of 3 pixels a side.
    """
    units, grids = shape
    grid, wide = grids[which], 3 * units
    top, left, bottom, right = box[0], box[1] * units // 32, box[2], box[3] * units // 32
    picture, covered = np.full((96, wide), blend), np.zeros((96, wide))
    inside = np.s_[3 * top : 3 * bottom, 3 * left : 3 * right]
    picture[inside], covered[inside] = 1 - blend, 1

    def cells(picture):
        rows, columns = split_grid(grid)
        fine = np.kron(picture, np.ones((rows, columns)))
        return fine.reshape(rows, 96, columns, wide).mean((1, 3))

    mix = mix_of(top, left, bottom, right, blend, 32 if units == 32 else (32, 48))
    np.testing.assert_allclose(box_map(mix, grid), cells(covered), atol=1e-6)
    np.testing.assert_allclose(share_map(mix, grid), cells(picture), atol=1e-6)
    np.testing.assert_allclose(label_share(mix), picture.mean(), atol=1e-6)


def test_mixtoken_exchanges_whole_tokens_of_an_oblong_grid():
    """The box is any in the grid, clipped; the label has the share of the exchanged tokens."""
    mixing, ends = Mixing(PLAN, MixOptions(mixtoken=True)), []
    for step in range(200):
        mix = mixing.draw(0, step, (36, 16), (9, 4))
        top, left, bottom, right = ends_of = tuple(mix.box_tlbr.int().tolist())
        mask = torch.zeros(9, 4)
        mask[top:bottom, left:right] = 1
        assert torch.equal(box_map(mix, (9, 4)), mask)
        assert label_share(mix).item() == pytest.approx(mask.mean().item())
        ends.append(ends_of)
        # A square is drawn from the same numbers.
        assert PLAN.mix_box(0, step, (9, 9))[::2] == (top, bottom)
        assert PLAN.mix_box(0, step, (4, 4))[1::2] == (left, right)
    assert np.array(ends).max(0).tolist() == [8, 3, 9, 4]
    assert len(set(ends)) > 50


@given(boxes, st.integers(1, 4))
@settings(max_examples=30)
def test_cutmix_pastes_the_partners_box(box, count):
    image = torch.randn(count, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    want = image.clone()
    top, left, bottom, right = box
    want[:, :, top:bottom, left:right] = image.flip(0)[:, :, top:bottom, left:right]
    got = mix_images(image, share_map(mix_of(*box), 32))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert got.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("count", [1, 4, 5])
def test_an_empty_box_changes_nothing(count):
    image, (targets, full) = torch.randn(count, 3, 32, 32), random_targets(count, 16)
    targets = targets._replace(weight=(targets.weight > 0).float())
    empty = mix_of(7, 9, 7, 20)
    assert torch.equal(mix_images(image, share_map(empty, 32)), image)
    assert torch.equal(mix_images(image, empty.blend), image)
    for share in (share_map(empty, 4), label_share(empty)):
        same = mix_targets(targets, share)
        assert torch.equal(same.weight, targets.weight)
        torch.testing.assert_close(
            dense(same), full * targets.weight[..., None].double(), rtol=0, atol=0
        )


@given(st.integers(1, 5), boxes, st.integers(0, 99))
@settings(max_examples=40)
def test_mixed_targets_equal_mixed_dense_targets(count, box, seed):
    targets, full = random_targets(count, 16, seed=seed)
    for share in (share_map(mix_of(*box), 4), torch.tensor(0.3)):
        got = mix_targets(targets, share)
        part = share.flatten().double()
        weight = targets.weight.double()
        own, partner = (1 - part) * weight, part * weight.flip(0)
        total = own + partner
        want = (own[..., None] * full + partner[..., None] * full.flip(0)) / total.clamp(min=1e-12)[
            ..., None
        ]
        torch.testing.assert_close(got.weight.double(), total, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(dense(got), want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(dense(got).sum(-1), got.total.double(), rtol=1e-5, atol=1e-5)


def test_the_mean_target_is_that_of_the_visible_tokens():
    targets, full = random_targets(4, 16)
    got = mean_target(targets)
    weight = targets.weight.double()[..., None]
    torch.testing.assert_close(
        dense(got)[:, 0], (weight * full).sum(1) / weight.sum(1), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(got.weight[:, 0], targets.weight.mean(1))
    torch.testing.assert_close(dense(got).sum(-1), got.total.double(), rtol=1e-5, atol=1e-5)
    nothing = mean_target(targets._replace(weight=torch.zeros(4, 16)))
    assert not nothing.weight.any()
    assert torch.isfinite(nothing.extra).all()


@pytest.mark.slow
def test_frequency_and_strength_of_mixing_follow_the_options():
    """2,000 steps: shares within 4 standard deviations; CutMix's box covers the share that is not
    kept, unless it is clipped.
    """
    mixing = Mixing(PLAN, MixOptions(mixtoken=False, cutmix=1.0, mixup=0.8))
    draws = [mixing.draw(epoch, step, 64, 8) for epoch in range(4) for step in range(500)]
    blended = [mix for mix in draws if mix.blend]
    assert all(mix.box_tlbr.tolist() == [0, 0, 0, 0] for mix in blended)
    assert abs(len(blended) - 1000) < 4 * np.sqrt(500)
    kept = np.array([1 - label_share(mix).item() for mix in blended])
    # Beta(a, a) has mean 1/2 and variance 1 / (4 (2a + 1)).
    assert abs(kept.mean() - 0.5) < 4 * np.sqrt(1 / (4 * 2.6 * len(kept)))
    assert abs(kept.var() * 4 * 2.6 - 1) < 0.15
    again = Mixing(PLAN, mixing.options).draw(2, 17, 64, 8)
    assert all(torch.equal(a, b) for a, b in zip(again[:2], draws[1017][:2], strict=True))


def test_mixtoken_after_mixup_combines_both():
    both = Mixing(PLAN, MixOptions(mixtoken=True, mixup=0.8))
    alone = (
        Mixing(PLAN, MixOptions(mixtoken=False, mixup=0.8)),
        Mixing(PLAN, MixOptions(mixtoken=True)),
    )
    draws = [[mixing.draw(1, step, 64, 8) for mixing in (both, *alone)] for step in range(100)]
    for mix, blended, exchanged in draws:
        assert torch.equal(mix.box_tlbr, exchanged.box_tlbr)
        assert torch.equal(mix.blend, blended.blend)
        assert mix.grid == 8
    assert all(mix.blend for mix, *_ in draws)


@given(boxes, st.floats(0, 1), st.integers(0, 99))
@settings(max_examples=30)
def test_mixing_twice_equals_mixing_once_by_the_combined_share(box, blend, seed):
    """MixUp, then the exchange by area: mix the targets one after the other."""
    targets, _ = random_targets(4, 1, seed=seed)
    mix = mix_of(*box, blend)
    area = (box[2] - box[0]) * (box[3] - box[1]) / 32**2
    once, twice = (
        mix_targets(targets, label_share(mix)),
        mix_targets(mix_targets(targets, mix.blend), torch.tensor(area)),
    )
    torch.testing.assert_close(once.weight, twice.weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        dense(once) * once.weight[..., None],
        dense(twice) * once.weight[..., None],
        rtol=1e-5,
        atol=1e-6,
    )


def test_cutmix_box_covers_the_share_that_is_not_kept():
    plan, boxes = PLAN, []
    for step in range(300):
        kept = plan.beta(0, step, 1.0)
        top, left, bottom, right = plan.mix_box(0, step, 224, kept=kept)
        boxes.append((top, left, bottom, right))
        # A box that is not clipped; an odd side loses one pixel.
        if top > 0 and bottom < 224 and left > 0 and right < 224:
            assert bottom - top == right - left
            assert 0 <= 224 * np.sqrt(1 - kept) - (bottom - top) < 2
    assert len(set(boxes)) > 250


def test_conflicting_options_are_refused():
    with pytest.raises(UserError, match="--no-mixtoken"):
        Mixing(PLAN, MixOptions(mixtoken=True, cutmix=1.0, mixup=0.8))
    with pytest.raises(UserError, match="--mixup is -1, and must be at least 0"):
        Mixing(PLAN, MixOptions(mixtoken=False, mixup=-1.0))
    assert not MixOptions(mixtoken=False)

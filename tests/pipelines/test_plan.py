"""The plan's generator against published vectors, its crops against torchvision's distribution."""

import numpy as np
import pytest
import torch
from densefeed.pipelines.plan import EpochPlan, philox, uniforms
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import RandomResizedCrop


def plan(**fields):
    return EpochPlan(**{"num_samples": 1000, "batch": 32, "seed": 7, "mode": "train"} | fields)


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, 0xFFFFFFFFFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter, key, want):
    """Known answers of Random123 (Salmon et al.), philox4x32 10 rounds."""
    np.testing.assert_array_equal(philox(key, np.array([counter])), [want])


def test_every_epoch_is_a_permutation_and_differs():
    first, second = plan().order(0), plan().order(1)
    for order in (first, second):
        np.testing.assert_array_equal(np.sort(order), np.arange(1000))
    assert (first != second).mean() > 0.99
    assert (plan(seed=8).order(0) != first).mean() > 0.99
    np.testing.assert_array_equal(plan().order(0), first)


def test_order_is_uniform():
    """Each place holds each sample equally often: over 6,000 epochs of 6 samples, chi-square of 25 degrees of freedom.

    A permutation's cells are correlated, so the sum is (n - 1) / n of Pearson's.
    """
    counts = np.zeros((6, 6))
    for epoch in range(6000):
        counts[np.arange(6), plan(num_samples=6).order(epoch)] += 1
    assert ((counts - 1000) ** 2 / 1000).sum() * 5 / 6 < 52.6  # 99.9 % quantile


@given(st.integers(0, 2**31), st.integers(0, 1000), st.lists(st.integers(0, 2**31), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_a_samples_draws_do_not_depend_on_its_batch(seed, epoch, ids):
    together = uniforms(seed, epoch, np.array(ids), 1, 23)
    alone = np.concatenate([uniforms(seed, epoch, np.array([i]), 1, 23) for i in ids])
    np.testing.assert_array_equal(together, alone)
    assert together.min() >= 0
    assert together.max() < 1


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 100))
@settings(max_examples=200, deadline=None)
def test_crops_are_inside_the_image(height, width, sample):
    (box,), _ = plan().crops(0, np.array([sample]), np.array([height]), np.array([width]))
    top, left, h, w = box
    assert 0 <= top <= top + h <= height
    assert 0 <= left <= left + w <= width
    assert h >= 1
    assert w >= 1


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333), (64, 64)])
def test_crops_have_torchvisions_distribution(height, width):
    """Two-sample Kolmogorov-Smirnov on area, aspect ratio and both offsets of 4,000 crops each."""
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    theirs = np.array([RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)], float)
    ours, flips = plan().crops(0, np.arange(4000), np.full(4000, height), np.full(4000, width))
    for measure in (
        lambda b: b[:, 2] * b[:, 3],
        lambda b: b[:, 3] / b[:, 2],
        lambda b: b[:, 0] / np.maximum(height - b[:, 2], 1),
        lambda b: b[:, 1] / np.maximum(width - b[:, 3], 1),
    ):
        both = np.sort(np.concatenate([measure(ours), measure(theirs)]))
        cdf = [np.searchsorted(np.sort(measure(boxes)), both, side="right") / 4000 for boxes in (ours, theirs)]
        assert np.abs(cdf[0] - cdf[1]).max() < 1.95 * np.sqrt(2 / 4000)  # 99.9 %
    assert abs(flips.mean() - 0.5) < 4 * 0.5 / np.sqrt(4000)


@pytest.mark.parametrize(("height", "width"), [(1, 4000), (4000, 1), (10, 100), (100, 10)])
def test_the_fallback_is_torchvisions(height, width):
    """Where no allowed ratio fits ten times, the largest centred box of an allowed ratio."""
    torch.manual_seed(0)
    box, _ = plan(crop_scale=(0.9, 1.0)).crops(0, np.array([0]), np.array([height]), np.array([width]))
    want = RandomResizedCrop.get_params(torch.empty(3, height, width), [0.9, 1.0], [3 / 4, 4 / 3])
    np.testing.assert_array_equal(box[0], want)


def test_evaluation_is_in_order_and_centred():
    evaluate = plan(mode="evaluate", crop_pct=0.875)
    np.testing.assert_array_equal(evaluate.order(3), np.arange(1000))
    box, flip = evaluate.crops(0, np.array([5]), np.array([480]), np.array([640]))
    np.testing.assert_array_equal(box, [[30, 110, 420, 420]])
    assert not flip.any()


def test_mix_boxes_are_inside_and_keep_the_uniform_share():
    """lam is uniform, so without rounding and clipping the box's area would average 1/2; on 14 tokens both shrink it."""
    boxes = np.array([plan().mix_box(0, step, 14) for step in range(3000)])
    top, left, bottom, right = boxes.T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (bottom <= 14).all()
    assert (right <= 14).all()
    area = ((bottom - top) * (right - left)).mean() / 196
    rng = np.random.default_rng(0)
    sides = np.floor(14 * np.sqrt(1 - rng.random(20000))) // 2
    centres = rng.integers(0, 14, (2, 20000))
    want = np.prod([np.minimum(c + sides, 14) - np.maximum(c - sides, 0) for c in centres], axis=0).mean() / 196
    assert abs(area - want) < 0.02
    assert plan().mix_box(0, 1, 14) == plan().mix_box(0, 1, 14)
    assert plan().mix_box(0, 1, 14) != plan().mix_box(1, 1, 14)


def test_batches_count_the_padded_one():
    assert plan(num_samples=64).batches == 2
    assert plan(num_samples=65).batches == 3

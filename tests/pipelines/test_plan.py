"""The plan's numbers against a plain implementation of their formulas, its crops against
torchvision's distribution; invariants of shards, orders and repeats.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import RandomResizedCrop

from densefeed.pipelines.plan import EpochPlan
from densefeed.system.errors import UserError


def plan(**fields):
    return EpochPlan(**{"num_samples": 1000, "batch": 32, "seed": 7, "mode": "train"} | fields)


@pytest.mark.slow
def test_order_is_uniform():
    """Every sample is equally frequent at every position: over 6,000 epochs of 6 samples,
    chi-square with 25 degrees of freedom.

    The cells of a permutation are correlated, so the statistic is (n - 1) / n of Pearson's.
    """
    counts = np.zeros((6, 6))
    for epoch in range(6000):
        counts[np.arange(6), plan(num_samples=6).permutation(epoch)] += 1
    assert ((counts - 1000) ** 2 / 1000).sum() * 5 / 6 < 52.6  # 99.9 % quantile


@given(
    st.integers(0, 2**31),
    st.integers(0, 1000),
    st.lists(st.integers(0, 2**31), min_size=1, max_size=8),
)
@settings(max_examples=50)
def test_draws_of_a_sample_do_not_depend_on_its_batch(seed, epoch, ids):
    drawn = plan(seed=seed)
    together = drawn.draws(epoch, np.array(ids), 1, range(23))
    alone = np.concatenate([drawn.draws(epoch, np.array([i]), 1, range(23)) for i in ids], axis=1)
    np.testing.assert_array_equal(together, alone)
    assert together.min() >= 0
    assert together.max() < 1


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 100))
@settings(max_examples=200)
def test_crops_are_inside_the_image(height, width, sample):
    (box,), _ = plan().crops(0, np.array([sample]), np.array([height]), np.array([width]))
    top, left, h, w = box
    assert 0 <= top <= top + h <= height
    assert 0 <= left <= left + w <= width
    assert h >= 1
    assert w >= 1


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333), (64, 64)])
def test_crops_follow_torchvisions_distribution(height, width):
    """Two-sample Kolmogorov-Smirnov on area, aspect ratio and both offsets of 4,000 crops each."""
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    theirs = np.array(
        [RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)],
        float,
    )
    ours, flips = plan().crops(0, np.arange(4000), np.full(4000, height), np.full(4000, width))
    for measure in (
        lambda b: b[:, 2] * b[:, 3],
        lambda b: b[:, 3] / b[:, 2],
        lambda b: b[:, 0] / np.maximum(height - b[:, 2], 1),
        lambda b: b[:, 1] / np.maximum(width - b[:, 3], 1),
    ):
        both = np.sort(np.concatenate([measure(ours), measure(theirs)]))
        cdf = [
            np.searchsorted(np.sort(measure(boxes)), both, side="right") / 4000
            for boxes in (ours, theirs)
        ]
        assert np.abs(cdf[0] - cdf[1]).max() < 1.95 * np.sqrt(2 / 4000)  # 99.9 %
    assert abs(flips.mean() - 0.5) < 4 * 0.5 / np.sqrt(4000)


@pytest.mark.parametrize(("height", "width"), [(1, 4000), (4000, 1), (10, 100), (100, 10)])
def test_fallback_equals_torchvision(height, width):
    """After ten failed tries: the largest centered box of an allowed ratio."""
    torch.manual_seed(0)
    box, _ = plan(crop_scale=(0.9, 1.0)).crops(
        0, np.array([0]), np.array([height]), np.array([width])
    )
    want = RandomResizedCrop.get_params(torch.empty(3, height, width), [0.9, 1.0], [3 / 4, 4 / 3])
    np.testing.assert_array_equal(box[0], want)


def test_evaluation_keeps_order_and_centers_crops():
    evaluate = plan(mode="evaluate", crop_pct=0.875)
    np.testing.assert_array_equal(evaluate.permutation(3), np.arange(1000))
    box, flip = evaluate.crops(0, np.array([5]), np.array([480]), np.array([640]))
    np.testing.assert_array_equal(box, [[30, 110, 420, 420]])
    assert not flip.any()


def test_mix_boxes_are_inside_and_their_kept_share_is_uniform():
    """The kept share is uniform, so without rounding and clipping the mean area of the box would be
    1/2; on 14 tokens both reduce it.
    """
    boxes = np.array([plan().mix_box(0, step, 14) for step in range(3000)])
    top, left, bottom, right = boxes.T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (bottom <= 14).all()
    assert (right <= 14).all()
    area = ((bottom - top) * (right - left)).mean() / 196
    rng = np.random.default_rng(0)
    sides = np.floor(14 * np.sqrt(1 - rng.random(20000))) // 2
    centers = rng.integers(0, 14, (2, 20000))
    want = (
        np.prod(
            [np.minimum(c + sides, 14) - np.maximum(c - sides, 0) for c in centers], axis=0
        ).mean()
        / 196
    )
    assert abs(area - want) < 0.02
    assert plan().mix_box(0, 1, 14) == plan().mix_box(0, 1, 14)
    assert plan().mix_box(0, 1, 14) != plan().mix_box(1, 1, 14)


def naive_philox(key, counter):
    """Compute Philox as in Salmon et al., SC 2011: Python integers, one counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & 0xFFFFFFFF, p0 >> 32 ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return c0, c1, c2, c3


def naive_uniforms(seed, epoch, sample, stream, count):
    words = [
        word
        for block in range(-(-count // 4))
        for word in naive_philox(seed, (epoch, sample, stream, block))
    ]
    return [word / 2**32 for word in words[:count]]


def naive_crop(seed, epoch, sample, height, width, scale=(0.08, 1.0), hflip=0.5):
    """Compute a crop by the formulas of version 0.1: one sample, ten tries one after the other."""
    u = naive_uniforms(seed, epoch, sample, 1, 23)
    low, high = np.log(3 / 4), np.log(4 / 3)
    for number in range(10):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * u[number])
        ratio = np.exp(low + (high - low) * u[10 + number])
        w, h = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return [np.floor(u[20] * (height - h + 1)), np.floor(u[21] * (width - w + 1)), h, w], u[
                22
            ] < hflip
    w = np.rint(height * (4 / 3)) if width > height * (4 / 3) else width
    h = np.rint(width / (3 / 4)) if width < height * (3 / 4) else height
    return [(height - h) // 2, (width - w) // 2, h, w], u[22] < hflip


def extents(count, most=700):
    rng = np.random.default_rng(1)
    return rng.integers(1, most, count), rng.integers(1, most, count)


# Few samples, and more than a batch of the tests holds.
@pytest.mark.parametrize("count", [3, 600])
@pytest.mark.parametrize("fields", [{}, dict(seed=2**63 + 5, crop_scale=(0.5, 0.9), hflip=0.2)])
def test_crops_equal_a_plain_implementation(count, fields):
    height, width = extents(count)
    ids = np.arange(count) * 7919
    boxes, flips = plan(**fields).crops(3, ids, height, width)
    scale = {"scale": fields["crop_scale"], "hflip": fields["hflip"]} if fields else {}
    for n in range(count):
        box, flip = naive_crop(
            fields.get("seed", 7), 3, int(ids[n]), int(height[n]), int(width[n]), **scale
        )
        assert boxes[n].tolist() == box
        assert flips[n] == flip


def test_a_random_filter_is_the_number_behind_a_crops_flip():
    """One of two filters, as timm's RandomResizedCropAndInterpolation; boxes and flips stay."""
    u, ids = plan().crop_draws(3, np.arange(2000)), np.arange(2000)
    cubic = plan(crop_interpolation="random").cubic_crops(u)
    assert cubic[:50].tolist() == [naive_uniforms(7, 3, n, 1, 24)[23] >= 0.5 for n in range(50)]
    assert abs(cubic.mean() - 0.5) < 4 * 0.5 / np.sqrt(2000)
    plain = plan().crops(3, ids, *extents(2000))
    for way, want in (("bilinear", False), ("bicubic", True)):
        chosen = plan(crop_interpolation=way)
        assert (chosen.cubic_crops(u) == want).all()
        for one, other in zip(chosen.crops(3, ids, *extents(2000)), plain, strict=True):
            np.testing.assert_array_equal(one, other)
        evaluate = plan(mode="evaluate", crop_interpolation=way)
        assert (evaluate.cubic_crops(evaluate.crop_draws(0, ids)) == want).all()
    with pytest.raises(UserError, match="choose bilinear or bicubic to evaluate"):
        plan(mode="evaluate", crop_interpolation="random")


def test_order_boxes_and_seeds_equal_a_plain_implementation():
    words = [naive_philox(7, (3, sample, 0, 0))[:2] for sample in range(1000)]
    assert plan().permutation(3).tolist() == sorted(range(1000), key=words.__getitem__)
    for step in range(40):
        share, row, column = naive_uniforms(7, 3, step, 2, 3)
        half, row, column = int(14 * np.sqrt(1 - share)) // 2, int(row * 14), int(column * 14)
        want = (
            max(row - half, 0),
            max(column - half, 0),
            min(row + half, 14),
            min(column + half, 14),
        )
        assert plan().mix_box(3, step, 14) == want
        high, low = naive_philox(7, (3, step, 3, 0))[:2]
        assert plan().step_seed(3, step) == high << 32 | low


def test_numbers_of_version_0_1_are_unchanged():
    """Printed by version 0.1, so that a change of formula and test together is detected."""
    assert plan().permutation(3)[:8].tolist() == [511, 880, 475, 274, 947, 27, 755, 787]
    boxes, flips = plan().crops(
        3, np.array([0, 1, 5, 999]), np.array([375, 375, 64, 30]), np.array([500, 333, 64, 300])
    )
    assert boxes.tolist() == [
        [27, 255, 244, 241],
        [23, 10, 345, 273],
        [6, 6, 50, 46],
        [0, 130, 30, 40],
    ]
    assert flips.tolist() == [True, True, True, False]
    assert plan().mix_box(3, 5, 14) == (0, 0, 12, 12)
    assert plan().step_seed(3, 5) == 11750915164156441033


def test_extents_of_any_integer_type_give_the_same_crops():
    """A .beton stores uint16, whose product wraps at 65,536."""
    height, width = extents(300)
    want, _ = plan().crops(0, np.arange(300), height, width)
    got, _ = plan().crops(0, np.arange(300), height.astype(np.uint16), width.astype(np.uint16))
    np.testing.assert_array_equal(got, want)


plans = st.fixed_dictionaries(
    {
        "num_samples": st.integers(1, 300),
        "batch": st.sampled_from([24, 48, 72]),
        "order": st.sampled_from(["random", "blocks"]),
        "block": st.integers(1, 40),
        "window": st.integers(1, 5),
        "repeats": st.sampled_from([1, 2, 3]),
        "mode": st.sampled_from(["train", "evaluate"]),
        "seed": st.integers(0, 2**64 - 1),
    }
)


@given(plans, st.integers(0, 500))
@settings(max_examples=100)
def test_ranks_partition_an_epoch_and_no_sample_counts_twice(fields, epoch):
    """The ranks' rows of a batch together are those of one rank; every (sample, repeat) has weight
    1 exactly once.
    """
    whole = plan(**fields).rank_rows(epoch)
    assert [part.dtype for part in whole] == [np.int64, np.int64, np.float32]
    assert whole.index.shape == (plan(**fields).batches, fields["batch"])
    for ranks, parts in ((2, 0), (4, 0), (1, 2), (2, 4)):
        plans = [
            plan(**fields, rank=rank, ranks=ranks, microbatches=parts) for rank in range(ranks)
        ]
        order = np.argsort(np.concatenate([one.rows for one in plans]))
        for field, shares in zip(
            whole, zip(*(one.rank_rows(epoch) for one in plans), strict=True), strict=True
        ):
            np.testing.assert_array_equal(np.concatenate(shares, axis=1)[:, order], field)
        # The weighted means of the parts average to the mean over the whole batch.
        last = plans[0].batches - 1
        real, size = whole.weight[last] == 1, fields["batch"] // (parts or ranks)
        means = []
        for one in plans:
            for rows, weight in zip(
                one.rows.reshape(-1, size), one.part_weights(last), strict=True
            ):
                # Mixing partners share a part.
                assert (
                    fields["mode"] == "evaluate" or (rows + rows[::-1] == fields["batch"] - 1).all()
                )
                means.append(weight * rows[real[rows]].mean() if real[rows].any() else 0.0 * weight)
        assert np.mean(means) == pytest.approx(np.flatnonzero(real).mean())
    repeats = fields["repeats"] if fields["mode"] == "train" else 1
    real = whole.weight == 1
    counted = sorted(zip(whole.index[real].tolist(), whole.repeat[real].tolist(), strict=True))
    assert counted == [
        (sample, repeat) for sample in range(fields["num_samples"]) for repeat in range(repeats)
    ]
    assert whole.weight.sum() == real.sum() == fields["num_samples"] * repeats
    # The end of the last batch is padding: real samples, from the start of the sequence.
    assert (np.diff(whole.weight.ravel()) <= 0).all()
    padding = whole.index.size - len(counted)
    np.testing.assert_array_equal(
        whole.index.ravel()[len(counted) :], np.resize(whole.index.ravel()[: len(counted)], padding)
    )
    if fields["mode"] == "evaluate":
        np.testing.assert_array_equal(whole.index[real], np.arange(fields["num_samples"]))


@given(plans)
@settings(max_examples=50)
def test_repeats_of_a_sample_share_a_batch_and_follow_the_order(fields):
    chosen = plan(**fields | {"mode": "train"})
    shard, repeats = chosen.rank_rows(0), fields["repeats"]
    groups = shard.index.reshape(chosen.batches, -1, repeats)
    assert (groups == groups[..., :1]).all()
    np.testing.assert_array_equal(
        groups[..., 0].ravel()[: fields["num_samples"]], chosen.permutation(0)
    )


def test_repeats_differ_and_repeat_0_is_the_crop_without_repeats():
    ids, extent = np.arange(200), np.full(200, 400)
    plain, plain_flips = plan().crops(0, ids, extent, extent)
    boxes, flips = zip(
        *(plan().crops(0, ids, extent, extent, np.full(200, repeat)) for repeat in range(3)),
        strict=True,
    )
    np.testing.assert_array_equal(boxes[0], plain)
    np.testing.assert_array_equal(flips[0], plain_flips)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (boxes[one] != boxes[other]).any(1).all()
        assert 0.3 < (flips[one] != flips[other]).mean() < 0.7


@given(
    st.integers(1, 400),
    st.integers(1, 50),
    st.integers(1, 6),
    st.integers(0, 2**32),
    st.integers(0, 1000),
)
@settings(max_examples=100)
def test_block_order_is_a_permutation_whose_windows_are_contiguous(
    count, block, window, seed, epoch
):
    order = plan(
        num_samples=count, block=block, window=window, order="blocks", seed=seed
    ).permutation(epoch)
    np.testing.assert_array_equal(np.sort(order), np.arange(count))
    # In order of first appearance, every `window` blocks are a window: along the sequence no window
    # comes back.
    _, first = np.unique(order // block, return_index=True)
    window_of_block = np.argsort(np.argsort(first)) // window
    assert (np.diff(window_of_block[order // block]) >= 0).all()


def test_block_order_deviates_from_uniform_as_documented():
    """Neighbors in storage share a batch with probability (1 - 1 / block) (batch - 1) / (W - 1),
    here 15 times that of `random`.
    """
    fields = dict(num_samples=40_960, batch=64, block=32, window=16)

    def share(order):
        hits = 0
        for epoch in range(10):
            batch_of = np.empty(40_960, np.int64)
            batch_of[plan(**fields, order=order).rank_rows(epoch).index.ravel()] = (
                np.arange(40_960) // 64
            )
            hits += (batch_of[1:] == batch_of[:-1]).mean() / 10
        return hits

    blocks, uniform = 31 / 32 * 63 / 511, 63 / 40_959
    # Four standard deviations over 400,000 pairs, enough to distinguish (1 - 1 / block) from 1.
    assert share("blocks") == pytest.approx(blocks, abs=4 * (blocks / 4e5) ** 0.5)
    assert share("random") == pytest.approx(uniform, abs=4 * (uniform / 4e5) ** 0.5)


@pytest.mark.slow
def test_block_order_is_shuffled_at_both_levels():
    """Every sample is equally frequent at every position, any three blocks can form a window."""
    chosen = plan(num_samples=12, block=2, window=3, order="blocks")
    orders = np.array([chosen.permutation(epoch) for epoch in range(6000)])
    for place in orders.T:
        # 99.98 % quantile of chi-square with 11 degrees of freedom
        assert ((np.bincount(place, minlength=12) - 500) ** 2 / 500).sum() < 35.6
    # The three blocks of the first window.
    together = np.sort(np.sort(orders[:, :6], axis=1)[:, ::2] // 2, axis=1)
    assert len(np.unique(together, axis=0)) == 20  # of 6


def test_sizes_change_at_the_given_epochs():
    sizes = plan(sizes=((0, 160), (2, 192), (5, 224)))
    sides = [160, 160, 192, 192, 192, 224, 224]
    assert [sizes.shape(epoch, 3) for epoch in range(7)] == [(side, side) for side in sides]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(ranks=3), r"a batch of 32 is not a multiple of the 3 ranks"),
        (dict(repeats=3), r"a batch of 32 is not a multiple of the 3 repeats"),
        (
            dict(ranks=2, microbatches=3),
            r"3 microbatches of a batch of 32 cannot be shared by 2 ranks",
        ),
        (dict(microbatches=5), r"5 microbatches of a batch of 32 cannot be shared"),
        (dict(rank=2, ranks=2), r"rank 2 is out of range for 2 ranks"),
        (dict(repeats=0), r"repeats is 0 and must be at least 1"),
        (dict(block=0), r"block is 0 and must be at least 1"),
        (dict(sizes=()), r"epochs ascend from 0"),
        (dict(sizes=((1, 224),)), r"epochs ascend from 0"),
        (dict(sizes=((0, 160), (0, 224))), r"epochs ascend from 0"),
        (dict(sizes=((0, 160), (9, 192), (5, 224))), r"epochs ascend from 0"),
        (dict(sizes=((0, 0),)), r"an input of 0 px is too small; give a larger --size,"),
    ],
)
def test_inconsistent_plans_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        plan(**fields)


@pytest.mark.parametrize(
    "options",
    [{}, {"repeats": 2}, {"num_samples": 1024}, {"batch": 512}, {"window": 1}, {"block": 1}],
)
@pytest.mark.parametrize("start", [0, 1, 7])
def test_storage_is_prefetched_one_window_ahead(options, start):
    """No sample comes before its block was prefetched, no block is prefetched twice, and the rate
    is even.
    """
    plan = EpochPlan(
        **{
            "num_samples": 1000,
            "batch": 64,
            "seed": 1,
            "mode": "train",
            "order": "blocks",
            "block": 16,
            "window": 8,
        }
        | options
    )
    rows, fetched = plan.rank_rows(2).index[start:], []
    runs = list(plan.runs(2, start))
    assert len(runs) == len(rows)
    for number, (ids, new) in enumerate(zip(rows, runs, strict=True)):
        fetched += new
        known = {first for first, _ in fetched}
        # The last batch is padded with the first samples of the epoch.
        padding = start + number == plan.batches - 1
        assert padding or {sample - sample % plan.block for sample in ids.tolist()} <= known
        if number:
            assert len(new) <= -(-plan.batch // (plan.block * plan.repeats))
    assert len(fetched) == len(set(fetched))
    assert all(end == min(first + plan.block, plan.num_samples) for first, end in fetched)
    if start == 0:
        assert sorted(sample for run in fetched for sample in range(*run)) == list(
            range(plan.num_samples)
        )
    assert not any(EpochPlan(num_samples=1000, batch=64, seed=1, mode="train").runs(2, start))


def test_images_are_counted_without_padding():
    few = plan(num_samples=11, batch=4, repeats=2)
    weights = np.concatenate([few.rank_rows(epoch).weight.sum(1) for epoch in range(3)])
    for first in range(len(weights) + 1):
        for end in range(first, len(weights) + 1):
            assert few.count_images(first, end) == weights[first:end].sum()

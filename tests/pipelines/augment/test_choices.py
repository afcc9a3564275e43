"""The chosen operations against timm's statistics; they depend on (seed, epoch, id, repeat)
alone.
"""

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from timm.data import random_erasing
from timm.data.auto_augment import rand_augment_transform

from densefeed.pipelines.augment.choices import Chooser, noise_length
from densefeed.pipelines.augment.settings import GEOMETRIC, Augment, find_code
from densefeed.pipelines.plan import EpochPlan
from densefeed.system.errors import UserError

PLAN = EpochPlan(num_samples=100_000, batch=64, seed=5, mode="train")
POLICY = "rand-m9-mstd0.5-inc1"


def chooser(plan: EpochPlan = PLAN, **augment) -> Chooser:
    return Chooser(plan, Augment(**augment))


def drawer(epoch: int, N: int):
    """Return the draws of samples 0 to N - 1, as the methods of a Chooser take them."""
    return lambda stream, numbers, rows=slice(None): PLAN.draws(
        epoch, np.arange(N)[rows], stream, numbers
    )


def flat(choice, N: int) -> list[tuple]:
    """List the operations of each sample in order, independent of the groups."""
    samples = [([], [], []) for _ in range(N)]
    for group in (*choice.before, *choice.after):
        for at in range(group.start, group.stop):
            table = choice.table[at].tolist() if group.name == "Table" else None
            samples[choice.row[at]][0].append((group.name, choice.argument[at].item(), table))
    for row, matrix, cubic in zip(
        choice.warp_row.tolist(), choice.matrix.tolist(), choice.cubic.tolist(), strict=True
    ):
        samples[row][1].append((matrix, cubic))
    for box in choice.boxes:
        samples[box.sample][2].append(box[1:])
    return samples


@pytest.mark.parametrize(
    "augment",
    [
        Augment(rand_augment=POLICY, erase_probability=0.4),
        Augment(rand_augment="rand-m5-n4-p0.8-mstd101-tweights"),
        Augment(color_jitter=(0.4, 0.3, 0.2, 0.1)),
        Augment(rand_augment="rand-m3-t3a", color_jitter=(0.3,)),
        Augment(shift=4),
        Augment(shift=4, rand_augment=POLICY),
    ],
)
def test_choices_depend_on_seed_epoch_sample_and_repeat_alone(augment):
    rng = np.random.default_rng(0)
    index, repeat = rng.integers(0, 1000, 61), rng.integers(0, 3, 61)
    whole = flat(Chooser(PLAN, augment).choose(3, index, repeat, 32, 48), 61)
    order = rng.permutation(61)
    assert flat(Chooser(PLAN, augment).choose(3, index[order], repeat[order], 32, 48), 61) == [
        whole[at] for at in order
    ]
    for at in (0, 17, 60):
        assert flat(
            Chooser(PLAN, augment).choose(3, index[at : at + 1], repeat[at : at + 1], 32, 48), 1
        ) == [whole[at]]
    tensors = torch.from_numpy(index), torch.from_numpy(repeat)
    assert flat(Chooser(PLAN, augment).choose(3, *tensors, 32, 48), 61) == whole
    others = (
        (PLAN, 4, index, repeat),
        (PLAN, 3, index, repeat + 1),
        (replace(PLAN, seed=6), 3, index, repeat),
    )
    for plan, *counter in others:
        assert flat(Chooser(plan, augment).choose(*counter, 32, 48), 61) != whole


def test_frequencies_of_operations_equal_timms():
    """Count how many of 40,000 samples get each operation in either layer; timm's own counts differ
    by at most 4.5 sigma.
    """
    N = 40_000
    choice = chooser(rand_augment=POLICY).choose(0, np.arange(N), np.zeros(N, int), 224, 224)
    mine = Counter({"warp": len(choice.warp_row)})
    for group in (*choice.before, *choice.after):
        mine[group.name] += group.stop - group.start
    random.seed(0)
    np.random.seed(0)  # timm chooses with numpy's global generator
    policy = rand_augment_transform(POLICY, {})
    kinds = []
    for op in policy.ops:
        kind = (
            "warp"
            if op.name in GEOMETRIC
            else "Table"
            if find_code(op.name) < 5
            else op.name.removesuffix("Increasing")
        )
        op.aug_fn = lambda image, *_, kind=kind, **__: kinds[-1].append(kind)
    for _ in range(N):
        kinds.append([])
        policy(None)
    timms = Counter()
    for one in kinds:
        timms.update(kind for kind in one if kind != "warp")
        timms["warp"] += "warp" in one
    assert mine.keys() == timms.keys()
    for kind, count in timms.items():
        spread = math.sqrt(2 * count)  # of the difference of two Poisson counts, or less
        assert abs(mine[kind] - count) < 4.5 * spread, kind


@pytest.mark.parametrize(
    "text", [POLICY, "rand-m4-mstd101", "rand-m9-mstd3-mmax12-inc1", "rand-m7"]
)
def test_magnitudes_follow_timms_distribution(text):
    """Kolmogorov-Smirnov distance between the degrees of 20,000 rotations each, 1e-4 level."""
    random.seed(1)
    (rotate,) = (op for op in rand_augment_transform(text, {}).ops if op.name == "Rotate")
    rotate.prob, degrees = 1.0, []
    rotate.aug_fn = lambda _, by, **__: degrees.append(by)
    for _ in range(20_000):
        rotate(None)
    mine = chooser(rand_augment=text)
    mine.spec = mine.spec._replace(names=("Rotate",), layers=1, probability=1.0)
    choice = mine.choose(0, np.arange(20_000), np.zeros(20_000, int), 100, 100)
    got = np.degrees(np.arcsin(-choice.pixel_matrix[:, 0, 1].double().numpy()))
    # Exact zeros are rotations by 0 degrees. Both samples are rounded, so that clipped magnitudes
    # compare equal.
    got, want = np.round(got, 3) + 0.0, np.round(degrees, 3) + 0.0
    grid = np.unique(np.concatenate([got, want]))
    distance = (
        abs(
            np.searchsorted(np.sort(got), grid, "right")
            - np.searchsorted(np.sort(want), grid, "right")
        ).max()
        / 20_000
    )
    assert distance < 2.23 * math.sqrt(2 / 20_000)


@pytest.mark.slow
def test_weighted_choices_follow_numpys_distribution():
    """Without replacement and in order: counts of the pairs (first, second) in 30,000 draws,
    against numpy's.
    """
    N, text = 30_000, "rand-m5-tweights-n2"
    mine = chooser(rand_augment=text)
    got = mine._choose_operations(drawer(0, N), np.zeros((2, N)))
    assert (got[0] != got[1]).all()
    rng = np.random.default_rng(0)
    names = len(mine.spec.names)
    want = np.array([rng.choice(names, 2, replace=False, p=mine.spec.weights) for _ in range(N)]).T
    counts = [np.histogram2d(*pair, bins=names, range=[[0, names]] * 2)[0] for pair in (got, want)]
    often = counts[1] >= 20
    assert (abs(counts[0] - counts[1])[often] < 4.5 * np.sqrt(counts[0] + counts[1])[often]).all()


def test_layers_and_probability():
    """p = 1 applies every layer to every sample, p = 0 none; n is the number of layers."""
    index, repeat = np.arange(50), np.zeros(50, int)
    assert not len(chooser(rand_augment="rand-m9-p0").choose(0, index, repeat, 32, 32).row)
    assert not len(chooser(rand_augment="rand-m9-n0-p1").choose(0, index, repeat, 32, 32).row)
    mine = chooser(rand_augment="rand-m9-n5-p1-t3a")
    choice = mine.choose(0, index, repeat, 32, 32)
    assert np.bincount(choice.row.numpy()).tolist() == [5] * 50


@pytest.mark.parametrize(
    "jitter", [(0.4,), (0.4, 0.2, 1.5), (0.1, 0.2, 0.3, 0.4), (0.0, 0.2, 0.0, 0.1)]
)
def test_color_jitter_follows_torchvisions_distribution(jitter):
    """Operations in uniform order, with factors uniform from max(0, 1 - v) to 1 + v, for hue from
    -v to v.
    """
    N = 4000
    augment = Augment(color_jitter=jitter)
    code, argument = Chooser(PLAN, augment)._jitter(drawer(0, N))
    strengths = dict(zip(("Brightness", "Contrast", "Color", "Hue"), augment.jitter, strict=True))
    for name, strength in strengths.items():
        of_sample = code == find_code(name)
        assert (of_sample.sum(1) == (strength > 0)).all()
        if not strength:
            continue
        low, high = (-strength, strength) if name == "Hue" else (max(0, 1 - strength), 1 + strength)
        share = (argument[of_sample] - low) / (high - low)
        assert abs(np.sort(share) - (np.arange(N) + 0.5) / N).max() < 2.23 / math.sqrt(N)
        place = of_sample.argmax(1)
        assert (abs(np.bincount(place, minlength=4) - N / 4) < 4.5 * math.sqrt(N / 4)).all()
    with pytest.raises(UserError, match="--color-jitter is off beside --rand-augment"):
        Augment(color_jitter=jitter, rand_augment=POLICY)
    alone, both = (
        chooser(rand_augment="rand-m3-t3a", **one).choose(0, np.arange(9), np.zeros(9, int), 8, 8)
        for one in ({}, dict(color_jitter=jitter))
    )
    assert len(both.row) == len(alone.row) + 9 * sum(v > 0 for v in strengths.values())


def boxes_of_timm(
    monkeypatch, erasing: random_erasing.RandomErasing, N: int, height: int, width: int
) -> list[tuple]:
    """List the boxes that timm would erase: (sample, height, width, top, left)."""
    found = []
    monkeypatch.setattr(random_erasing, "_get_pixels", lambda *_, **__: 0)

    class Spy:
        def __setitem__(self, key, _):
            _, rows, columns = key
            found.append(
                (
                    sample,
                    rows.stop - rows.start,
                    columns.stop - columns.start,
                    rows.start,
                    columns.start,
                )
            )

    random.seed(2)
    for sample in range(N):  # noqa: B007, the spy reads it
        erasing._erase(Spy(), 3, height, width, torch.float32)
    return found


@pytest.mark.parametrize("size", [(64, 64), (48, 96)])
def test_boxes_follow_timms_distribution(monkeypatch, size):
    """Number, sides and positions of the boxes of 6,000 samples: Kolmogorov-Smirnov distance, 1e-4
    level.
    """
    N = 6000
    erasing = random_erasing.RandomErasing(0.6, mode="pixel", device="cpu")
    timms = np.array(boxes_of_timm(monkeypatch, erasing, N, *size))
    mine = chooser(erase_probability=0.6)
    boxes = mine.choose(0, np.arange(N), np.zeros(N, int), *size).boxes
    mine = np.array([(box.sample, box.height, box.width, box.top, box.left) for box in boxes])
    assert abs(len(mine) - len(timms)) < 4.5 * math.sqrt(2 * N)
    assert len(np.unique(mine[:, 0])) == len(mine)
    limit = 2.23 * math.sqrt(1 / len(mine) + 1 / len(timms))
    for column in range(1, 5):
        got, want = (np.sort(found[:, column]) for found in (mine, timms))
        grid = np.arange(100)
        shares = [np.searchsorted(values, grid, "right") / len(values) for values in (got, want)]
        assert abs(shares[0] - shares[1]).max() < limit, column


def test_boxes_lie_inside_the_image_and_the_noise_table():
    boxes = (
        chooser(erase_probability=1.0).choose(0, np.arange(500), np.zeros(500, int), 30, 50).boxes
    )
    for box in boxes:
        assert 0 <= box.top <= 30 - box.height
        assert 0 <= box.left <= 50 - box.width
        assert 0 <= box.noise <= noise_length(PLAN) - 3 * box.height * box.width
    assert {box.sample for box in boxes} == set(range(500))


def test_every_sample_keeps_the_order_of_its_operations():
    """With three layers: photometric operations before a sample's last warp precede the batch's
    warp, later ones follow it.
    """
    mine = chooser(rand_augment="rand-m9-n3-p0.9-inc1")
    N = 300
    index, repeat = np.arange(N), np.zeros(N, int)
    code, argument, last, _, _ = mine._rand_augment(drawer(2, N), N, 40, 40)
    choice = mine.choose(2, index, repeat, 40, 40)
    for is_before, part in ((True, choice.before), (False, choice.after)):
        for group in part:
            rows = choice.row[group.start : group.stop].tolist()
            # A sample must be in a group only once, or the second result would replace the first.
            assert len(set(rows)) == len(rows)
            for at, row in enumerate(rows, group.start):
                if last[row] >= 0:
                    layers = np.flatnonzero(
                        (argument[row].astype(np.float32) == choice.argument[at].item())
                        & (code[row] >= 0)
                    )
                    assert any((layer < last[row]) == is_before for layer in layers)
    sequence = [[] for _ in range(N)]
    for group in (*choice.before, *choice.after):
        for at in range(group.start, group.stop):
            sequence[choice.row[at]].append(choice.argument[at].item())
    for row in range(N):
        assert sequence[row] == argument[row][code[row] >= 0].astype(np.float32).tolist()


def test_shifts_are_whole_pixels_uniform_and_independent():
    """49 pairs, 20,000 draws: chi-square with 48 degrees of freedom below 84.0 (0.999 quantile)."""
    choice = chooser(shift=3).choose(0, np.arange(20_000), np.zeros(20_000, int), 32, 48)
    assert not choice.cubic.any()
    moved = choice.pixel_matrix
    assert torch.equal(moved[:, :, :2], torch.eye(2).expand(20_000, 2, 2))
    counts = np.array(list(Counter(map(tuple, moved[:, :, 2].tolist())).values()))
    assert len(counts) == 49
    assert moved[:, :, 2].abs().max() == 3
    assert ((counts - 20_000 / 49) ** 2 / (20_000 / 49)).sum() < 84.0


def test_a_shift_precedes_rand_augment_and_keeps_its_draws():
    """A sample's map is the shift composed with RandAugment's map; photometric operations do not
    change.
    """
    index, repeat = np.arange(300), np.zeros(300, int)
    with_shift = chooser(shift=2, rand_augment=POLICY).choose(1, index, repeat, 32, 32)
    alone, shift = (
        chooser(**one).choose(1, index, repeat, 32, 32)
        for one in (dict(rand_augment=POLICY), dict(shift=2))
    )
    assert [s[0] for s in flat(with_shift, 300)] == [s[0] for s in flat(alone, 300)]
    want = torch.eye(3, dtype=torch.float64).repeat(300, 1, 1)
    want[alone.warp_row, :2] = alone.pixel_matrix.double()
    for row in range(300):
        step = torch.cat([shift.pixel_matrix[row].double(), torch.tensor([[0.0, 0.0, 1.0]])])
        torch.testing.assert_close(
            with_shift.pixel_matrix[row].double(), (step @ want[row])[:2], rtol=0, atol=1e-4
        )

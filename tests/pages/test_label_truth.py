"""Label truth: owners of tokens against points looked up one by one, and shares by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from densefeed.pages import label_truth
from densefeed.pages.label_truth import (
    PURE,
    SAMPLES,
    Counts,
    find_owners_in_mask,
    measure_labels,
    summarize,
)
from densefeed.pages.true_objects import Truth, read_mask
from densefeed.system.errors import UserError


@given(st.integers(0, 2**32), st.sampled_from([1, 3, 5]), st.sampled_from([0.51, PURE]))
def test_the_owner_of_a_token_is_the_object_of_most_of_its_points(seed, grid, pure):
    rng = np.random.default_rng(seed)
    mask = np.kron(rng.integers(0, 3, (5, 7)), np.ones((6, 6))).astype(np.uint8)
    view = rng.uniform(-0.2, 1.0, (2, 3))
    want = []
    for row, column in np.ndindex(grid, grid):
        seen = []
        for down, across in np.ndindex(SAMPLES, SAMPLES):
            point = (
                (column + (across + 0.5) / SAMPLES) / grid,
                (row + (down + 0.5) / SAMPLES) / grid,
            )
            x, y = (
                view[axis, 0] * point[0] + view[axis, 1] * point[1] + view[axis, 2]
                for axis in (0, 1)
            )
            inside = 0 <= x < 1 and 0 <= y < 1
            seen.append(mask[int(y * 30), int(x * 42)] if inside else 0)
        values, counts = np.unique(seen, return_counts=True)
        most = counts.argmax()
        want.append(int(values[most]) - 1 if counts[most] >= pure * len(seen) else -1)
    found = find_owners_in_mask(mask, view, grid, pure)
    assert found.tolist() == want


def write_mask(folder, mask):
    Image.fromarray(mask).save(folder / "mask.png")
    size = mask.shape[1], mask.shape[0]
    return Truth(np.array([4, 7]), np.zeros((2, 4)), folder / "mask.png", size)


def make_batch(index, label, view, weight):
    fields = dict(index=index, label=label, view=view, weight=weight)
    return SimpleNamespace(**{name: torch.tensor(value) for name, value in fields.items()})


def test_shares_by_part_are_those_counted_by_hand(tmp_path):
    """The left half of the image is an object of class 4, and a quarter one of class 7."""
    mask = np.zeros((8, 8), np.uint8)
    mask[:, :4], mask[:4, 4:] = 1, 2
    whole, right = [[1.0, 0, 0], [0, 1, 0]], [[0.5, 0, 0.5], [0, 0.5, 0]]
    batch = make_batch([0, 1, 0], [4, 4, 4], [whole, right, whole], [1.0, 1.0, 0.0])
    # The label of each kind in four tokens of the two crops; the third is padding.
    labels = {
        "token": lambda batch: np.array([[4, 7, 7, 4], [7, 7, 7, 4], [0, 0, 0, 0]]),
        "image": lambda batch: batch.label.numpy()[:, None],
    }
    truth = write_mask(tmp_path, mask)
    found = measure_labels([batch], [truth, truth], 2, labels)
    # Crop 0 shows 4, 7, 4 and the background, crop 1, the upper right quarter, 7 everywhere.
    assert found["tokens"] == {
        "all": 7,
        "largest": 2,
        "others": 5,
        "crop 0.25-0.5": 4,
        "crop > 0.5": 3,
        "object > 0.1": 7,
    }
    assert found["token"]["largest"] == 1 / 2
    assert found["token"]["others"] == 4 / 5
    assert found["token"]["crop 0.25-0.5"] == 3 / 4
    assert (found["image"]["largest"], found["image"]["others"]) == (1, 0)
    assert found["scenes"] == 2


def test_intervals_cover_the_share_of_all_scenes():
    """In 95 % of many draws of scenes, of very different numbers of tokens."""
    rng = np.random.default_rng(0)
    parts, inside = len(label_truth.PARTS), 0
    for _ in range(400):
        tokens, quality = rng.integers(1, 60, 80), rng.beta(2, 1, 80)
        hits = rng.binomial(tokens, quality)
        counts = [
            Counts(np.full(parts, t), np.full((1, parts), h))
            for t, h in zip(tokens.tolist(), hits.tolist(), strict=True)
        ]
        found = summarize(counts, ["token"])
        inside += abs(found["token"]["all"] - 2 / 3) <= found["intervals"]["token"]["all"]
    assert 0.92 <= inside / 400 <= 0.975


@pytest.mark.parametrize("fault", ["missing", "truncated", "color", "another scene", "size"])
def test_outside_a_damaged_mask_is_one_sentence(tmp_path, fault):
    truth = write_mask(tmp_path, np.full((64, 64), 3 if fault == "another scene" else 1, np.uint8))
    path = truth.mask
    if fault == "missing":
        path.unlink()
    elif fault == "truncated":
        path.write_bytes(path.read_bytes()[:40])
    elif fault == "color":
        Image.new("RGB", (64, 64)).save(path)
    elif fault == "size":
        Image.new("L", (10, 10), 1).save(path)
    with pytest.raises(UserError, match=r"mask.png .*; make the scenes again"):
        read_mask(truth)

"""Dividing a dataset without validation images."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from densefeed.storage.dataset_names import hold_out

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=8)
FRACTIONS = st.floats(1e-6, 0.9)
SEEDS = st.integers(0, 2**63 - 1)
# Held out of 100 by a fraction of 0.1 and seed 0.
FIRST = ["015", "019", "025", "038", "075", "076", "077", "092", "093", "099"]


@st.composite
def datasets(draw):
    """Return distinct paths `class/name` in any order, and their labels."""
    sizes = draw(st.lists(st.integers(0, 30), min_size=1, max_size=4))
    names = {n: draw(st.sets(NAMES, min_size=size, max_size=size)) for n, size in enumerate(sizes)}
    pairs = [(f"{n}/{name}", n) for n, members in names.items() for name in sorted(members)]
    return draw(st.permutations(pairs))


def divide(pairs, fraction, seed):
    """Return the paths that are held out."""
    if not pairs:
        return set()
    paths, labels = zip(*pairs, strict=True)
    held_N = hold_out(list(paths), np.array(labels, np.int64), fraction, seed)
    return {path for path, held in zip(paths, held_N.tolist(), strict=True) if held}


@given(datasets(), FRACTIONS, SEEDS)
def test_outside_each_class_holds_out_its_fraction(pairs, fraction, seed):
    held = divide(pairs, fraction, seed)
    for label in {label for _, label in pairs}:
        members = {path for path, other in pairs if other == label}
        count = round(fraction * len(members))
        assert len(held & members) == min(max(count, 1), len(members) - 1)


@given(datasets(), FRACTIONS, SEEDS, st.randoms())
def test_outside_the_order_of_images_does_not_matter(pairs, fraction, seed, random):
    shuffled = list(pairs)
    random.shuffle(shuffled)
    assert divide(shuffled, fraction, seed) == divide(pairs, fraction, seed)


@given(datasets(), st.sets(NAMES, max_size=10), FRACTIONS, SEEDS)
def test_outside_adding_m_images_moves_m_others_at_most(pairs, names, fraction, seed):
    known = {path for path, _ in pairs}
    added = [(f"0/{name}", 0) for name in names if f"0/{name}" not in known]
    before, after = divide(pairs, fraction, seed), divide([*added, *pairs], fraction, seed)
    moved = {path for path in known if (path in before) != (path in after)}
    assert len(moved) <= len(added)
    assert all(path.startswith("0/") for path in moved)


def test_outside_the_choice_is_that_of_every_platform_and_depends_on_the_seed():
    """The names were computed once: other ones would put training images into validation."""
    pairs = [(f"cat/{n:03d}.jpg", 0) for n in range(100)]
    chosen = [divide(pairs, 0.1, seed) for seed in range(20)]
    assert sorted(path[4:7] for path in chosen[0]) == FIRST
    # The held-out images of two seeds have 1 of 10 in common on average.
    shared = [len(one & other) for n, one in enumerate(chosen) for other in chosen[:n]]
    assert 0.6 < np.mean(shared) < 1.4


def test_outside_images_of_one_path_stay_together():
    """A list may name an image twice, which then counts once."""
    pairs = [(f"cat/{n % 10}.jpg", 0) for n in range(40)]
    paths = [path for path, _ in pairs]
    held_N = hold_out(paths, np.zeros(40, np.int64), 0.3, 0)
    assert held_N.reshape(4, 10).all(0).sum() == held_N.reshape(4, 10).any(0).sum() == 3

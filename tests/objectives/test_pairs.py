"""Pairs of places: drawn on the device, a function of seed, epoch, sample and repeat alone."""

from types import SimpleNamespace

import numpy as np
import torch

from densefeed.objectives.drloc import PAIRS, draw_pairs
from densefeed.pipelines.plan import EpochPlan


def plan(seed: int = 3) -> EpochPlan:
    return EpochPlan(num_samples=100, batch=10, seed=seed, mode="train")


def batch(index, repeat=None) -> SimpleNamespace:
    index = torch.tensor(index)
    return SimpleNamespace(
        index=index, repeat=torch.zeros_like(index) if repeat is None else torch.tensor(repeat)
    )


def test_pairs_of_a_sample_do_not_depend_on_its_batch():
    """Nor on the number of pairs; they differ between epochs, repeats, seeds and samples."""
    words = draw_pairs(plan(), 4, batch([5, 9, 70]), 6, 0.5).words
    assert words.shape == (3, 6, 4)
    assert torch.equal(draw_pairs(plan(), 4, batch([70, 5]), 9, 0.1).words[:, :6], words[[2, 0]])
    others = [
        draw_pairs(plan(), 5, batch([5]), 6, 0.5),
        draw_pairs(plan(4), 4, batch([5]), 6, 0.5),
        draw_pairs(plan(), 4, batch([5], [1]), 6, 0.5),
        draw_pairs(plan(), 4, batch([6]), 6, 0.5),
    ]
    assert all(not (other.words == words[:1]).any() for other in others)


def test_no_other_stream_of_the_plan_has_the_same_numbers():
    """A new kind of draw takes a new stream number."""
    words = draw_pairs(plan(), 0, batch(list(range(50))), 8, 0.5).words.flatten().tolist()
    drawn = [plan().draws(0, np.arange(50), stream, range(32)) for stream in range(PAIRS)]
    assert not set(words) & set((np.stack(drawn) * 2**32).astype(np.int64).ravel().tolist())


def test_words_are_uniform_and_independent():
    """100,000 pairs: means and correlations within five standard deviations."""
    words = draw_pairs(plan(), 0, batch(list(range(1000))), 100, 0.5).words
    assert 0 <= words.min() <= words.max() < 2**32
    uniform = words.reshape(-1, 4).double() / 2**32
    assert (uniform.mean(0) - 0.5).abs().max() < 5 * (1 / 12 / 100_000) ** 0.5
    assert (uniform.T.corrcoef() - torch.eye(4)).abs().max() < 5 / 100_000**0.5
    # Neighboring pairs of an image and neighboring images are independent too.
    along = [
        uniform[:, 0].view(1000, 100)[part].flatten()
        for part in (np.s_[:, 1:], np.s_[:, :-1], np.s_[1:], np.s_[:-1])
    ]
    for one, other in (along[:2], along[2:]):
        assert torch.stack([one, other]).corrcoef()[0, 1].abs() < 5 / 99_000**0.5


def test_drawing_needs_no_host_sync(no_host_read):
    small = batch([1, 2])
    with no_host_read():
        pairs = draw_pairs(plan(), 0, small, 3, 0.25)
    assert (pairs.weight.shape, pairs.weight.dtype, pairs.weight.item()) == (
        (),
        torch.float32,
        0.25,
    )

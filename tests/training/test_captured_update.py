"""Updates as graphs equal updates without: on a CPU, whose graphs are tapes (tape.py)."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import densefeed.train as training
from densefeed.models import checkpoints
from densefeed.pipelines.augment.augmentation import Augmentation
from densefeed.training.student import Student

from ..runs import mark_slow, records
from ..test_train import AUGMENTED
from .spied_run import stopped_after
from .tape import PATCHES, Tape

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def tapes(monkeypatch):
    """Let `--compile graph` replay tapes; return the number of replays so far."""
    for patch in PATCHES:
        monkeypatch.setattr(*patch)
    monkeypatch.setattr(Tape, "replayed", 0)
    # A graph reads the rate from a float32 tensor, so plain updates get one that float32 holds.
    set_rate = Student.set_rate
    monkeypatch.setattr(
        Student, "set_rate", lambda self, rate: set_rate(self, float(np.float32(rate)))
    )
    return lambda: Tape.replayed


def losses(out: Path) -> torch.Tensor:
    return torch.tensor([(one["loss"], one["grad_norm"], one["lr"]) for one in records(out)])


CASES = {
    # Three kinds of steps, each with a graph: the last batch of an epoch is padded, and the last
    # epochs have larger images.
    "token labels": dict(
        mixtoken=True, epochs=9, sizes=((0, 32), (5, 48)), clip_grad=1.0, **AUGMENTED
    ),
    "float16": dict(mixtoken=True, epochs=3, precision="fp16"),
    "parts": dict(microbatch=2, epochs=3, drop_path=0.0),
    "drloc": dict(objective="ce", mixtoken=False, epochs=3, drloc="l1", drloc_grid=2),
}


@pytest.fixture
def masked(monkeypatch):
    """Compute what stochastic depth drops without --compile too, as a graph does."""
    monkeypatch.setattr("densefeed.training.compile.skip_dropped", lambda model, skip: None)


@pytest.mark.parametrize("fields", mark_slow(CASES, "token labels"))
def test_captured_updates_equal_plain_ones(micro, tmp_path, tapes, masked, fields):
    """Inputs, seeds, rates and step numbers are new in every replay."""
    training.train(micro(tmp_path / "plain", **fields))
    assert not tapes()
    training.train(micro(tmp_path / "graph", compile="graph", **fields))
    plain, graph = losses(tmp_path / "plain"), losses(tmp_path / "graph")
    assert tapes() >= len(plain) // 3
    assert torch.equal(graph, plain)
    one, other = (checkpoints.load(tmp_path / run / "last.pt") for run in ("plain", "graph"))
    for part in ("model", "ema"):
        if one[part] is not None:
            torch.testing.assert_close(other[part], one[part], rtol=0, atol=0)


@pytest.mark.slow
def test_a_captured_update_that_is_skipped_leaves_nothing(
    micro, tmp_path, tapes, masked, monkeypatch
):
    """The second batch of every epoch is not finite, from the one on whose update is captured."""
    forward, seen = Augmentation.forward, []

    def spoil(self, batch, choice):
        batch = forward(self, batch, choice)
        seen.append(batch.epoch)
        return batch._replace(image=batch.image * math.nan) if len(seen) % 3 == 2 else batch

    monkeypatch.setattr(Augmentation, "forward", spoil)
    fields = dict(epochs=5, on_nonfinite="skip", log_every=3, **AUGMENTED)
    states = []
    for run, how in (("plain", "never"), ("graph", "graph")):
        seen.clear()
        training.train(micro(tmp_path / run, compile=how, **fields))
        states.append(checkpoints.load(tmp_path / run / "last.pt"))
    plain, graph = states
    assert tapes() > 3
    assert plain["skips"] == graph["skips"] == 5
    for part in ("model", "ema"):
        assert all(tensor.isfinite().all() for tensor in graph[part].values())
        torch.testing.assert_close(graph[part], plain[part], rtol=0, atol=0)


@pytest.mark.slow
def test_a_resumed_training_equals_one_without_interruption(micro, tmp_path, tapes, monkeypatch):
    """It begins without graphs: the same numbers, bit for bit."""
    fields = dict(compile="graph", epochs=5, **AUGMENTED)
    training.train(micro(tmp_path / "whole", **fields))
    with monkeypatch.context() as patch:
        patch.setattr(training, "signal_handler", stopped_after(8))
        training.train(micro(tmp_path / "resumed", **fields))
    training.train(micro(tmp_path / "resumed", resume="auto", **fields))
    assert tapes() > 8
    assert torch.equal(losses(tmp_path / "whole"), losses(tmp_path / "resumed"))
    one, other = (checkpoints.load(tmp_path / run / "last.pt") for run in ("whole", "resumed"))
    torch.testing.assert_close(other["ema"], one["ema"], rtol=0, atol=0)

"""Guards: bad updates reach no weight, signals ask once, and every sentence names what to turn."""

import math
import os
import signal
import time

import pytest
import torch
from torch import nn

from densefeed.system.errors import UserError
from densefeed.training import guards
from densefeed.training.guards import (
    STOPPING,
    LossSpikes,
    NonFiniteGuard,
    explain_oom,
    first_not_finite,
    signal_handler,
)

CPU = torch.device("cpu")


def test_without_skipping_the_flag_stays_and_names_the_first_step(no_host_read):
    finite, norms = NonFiniteGuard(CPU, skip=False), [1.0, math.inf, 1.0, math.nan]
    with no_host_read():
        flags = [
            finite.update(torch.tensor(norm), step) for step, norm in enumerate(norms, start=7)
        ]
    assert [flag.item() for flag in flags] == [0, 1, 1, 1]
    assert finite.poll_sync() == (2, 8)
    assert finite.poll_sync() == (2, 8)


def test_with_skipping_each_look_begins_anew(no_host_read):
    finite = NonFiniteGuard(CPU, skip=True)
    with no_host_read():
        flags = [
            finite.update(torch.tensor(norm), step)
            for step, norm in enumerate([math.nan, 1.0, -math.inf])
        ]
    assert [flag.item() for flag in flags] == [1, 0, 1]
    assert finite.poll_sync() == (2, 0)
    assert finite.poll_sync() == (0, None)
    finite.update(torch.tensor(math.nan), 5)
    assert finite.poll_sync() == (1, 5)


class Poisoned(nn.Module):
    """Passes on its input, or what is not finite in its place: in the forward pass, or backward."""

    def __init__(self, forward: float = 1.0, backward: float = 1.0) -> None:
        super().__init__()
        self.factors = forward, backward

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda grad: grad * self.factors[1])
        return x * self.factors[0]


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (Poisoned(), None),
        (Poisoned(forward=math.nan), "the output of 1 (Poisoned)"),
        (Poisoned(backward=math.inf), "the gradient of 0.bias"),
    ],
)
def test_the_first_tensor_that_is_not_finite_is_named(layer, said):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 2), nn.Linear(2, 1))
    assert first_not_finite(model, lambda: model(torch.ones(2, 3)).sum()) == said
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_a_weight_comes_first_and_a_loss_after_outputs():
    model = nn.Sequential(nn.Linear(3, 1))
    assert first_not_finite(model, lambda: model(torch.ones(2, 3)).sum() / 0) == "the loss"
    with torch.no_grad():
        model[0].weight[0, 1] = math.inf
    assert first_not_finite(model, lambda: model(torch.ones(2, 3)).sum()) == "the weight 0.weight"


def test_spike_relative_to_median_of_last_intervals():
    spikes = LossSpikes(factor=1.5, window=5)
    # At least five intervals are needed.
    assert [spikes.describe(loss) for loss in (9.0, 2.0, 2.0, 4.0)] == [""] * 4
    assert spikes.describe(30.0) == ""
    spike = "loss spike: 6.100; the median of the last intervals is 4.000"
    assert spikes.describe(6.1) == spike  # of 9, 2, 2, 4, 30
    assert spikes.describe(math.nan) == ""
    assert spikes.describe(6.1) == spike  # of 2, 2, 4, 30, 6.1
    assert spikes.describe(6.1) == ""  # of 2, 4, 30, 6.1, 6.1 the median is 6.1


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_asks_and_a_second_one_acts(number, monkeypatch):
    """Within a second it is the same one, passed on by torchrun."""
    acted = []
    before = signal.signal(number, lambda *_: acted.append(1))
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    try:
        with signal_handler() as asked:
            assert asked() == ""
            for _ in range(3):
                os.kill(os.getpid(), number)
                assert asked() == signal.Signals(number).name
                now[0] += 0.4
            assert acted == []
            now[0] += guards.ECHO
            os.kill(os.getpid(), number)
            assert acted == [1]
        os.kill(os.getpid(), number)
        assert acted == [1, 1]  # what was there before is there again
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_memory_that_runs_out_names_the_knobs(error):
    with (
        pytest.raises(
            UserError,
            match=r"^runs/x: out of memory with 64 images .*; give --microbatch 32 .*--ema 0$",
        ),
        explain_oom(64, "runs/x"),
    ):
        raise error


def test_a_real_failure_to_get_memory_is_known():
    """PyTorch's own words."""
    with (
        pytest.raises(UserError, match="out of memory with 2 images .*; give --microbatch 2 "),
        explain_oom(2, "runs/x"),
    ):
        torch.empty(2**60)


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="another"), explain_oom(2, "runs/x"):
        raise RuntimeError("another")

"""Guards: skipped updates, stop signals, loss spikes and out-of-memory messages."""

import math
import os
import signal
import time
from functools import partial

import pytest
import timm
import torch
from torch import nn

from densefeed.system.errors import UserError
from densefeed.training import guards
from densefeed.training.guards import (
    STOPPING,
    LossSpikes,
    NonFiniteGuard,
    explain_oom,
    find_first_nonfinite,
    signal_handler,
)

from ..runs import compiled_step

CPU = torch.device("cpu")


def judge(guard: NonFiniteGuard, norm: float, step: int) -> torch.Tensor:
    """Return the flag of a step with this norm; the next step overwrites it."""
    guard.begin(step)
    return guard.update(torch.tensor(norm))


def test_flag_stays_set_without_skip(no_host_read):
    guard, norms = NonFiniteGuard(CPU, skip=False), [1.0, math.inf, 1.0, math.nan]
    with no_host_read():
        flags = [judge(guard, norm, step).clone() for step, norm in enumerate(norms, start=7)]
    assert [flag.item() for flag in flags] == [0, 1, 1, 1]
    assert guard.poll_sync() == (2, 8)
    assert guard.poll_sync() == (2, 8)


def test_poll_resets_counts_with_skip(no_host_read):
    guard = NonFiniteGuard(CPU, skip=True)
    with no_host_read():
        norms = enumerate([math.nan, 1.0, -math.inf])
        flags = [judge(guard, norm, step).clone() for step, norm in norms]
    assert [flag.item() for flag in flags] == [1, 0, 1]
    assert guard.poll_sync() == (2, 0)
    assert guard.poll_sync() == (0, None)
    judge(guard, math.nan, 5)
    assert guard.poll_sync() == (1, 5)


class Poisoned(nn.Module):
    """Identity that multiplies its output, or its gradient, by a factor that may not be finite."""

    def __init__(self, forward: float = 1.0, backward: float = 1.0) -> None:
        super().__init__()
        self.factors = forward, backward

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda grad: grad * self.factors[1])
        return x * self.factors[0]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Poisoned(), None),
        (Poisoned(forward=math.nan), "the output of 1 (Poisoned)"),
        (Poisoned(backward=math.inf), "the gradient of 0.bias"),
    ],
)
def test_first_nonfinite_tensor_is_named(layer, message):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 2), nn.Linear(2, 1))
    assert find_first_nonfinite(model, lambda: model(torch.ones(2, 3)).sum()) == message
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", ["blocks", "whole"])
def test_outside_first_nonfinite_tensor_of_a_compiled_step_is_named(monkeypatch, mode):
    """Compiled code ignores the hooks; what follows the block would be named instead."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    shape = dict(img_size=32, depth=2, embed_dim=24, num_heads=2, num_classes=3)
    model = timm.create_model("lvvit_micro", token_head=False, **shape).train()
    step, image = compiled_step(model, mode), torch.randn(2, 3, 32, 32)
    step(image).backward()
    with torch.no_grad():
        # Each weight is finite, and the sum over the inputs is not.
        model.blocks[1].mlp.fc1.weight.fill_(3e38)
    found = find_first_nonfinite(model, lambda: step(image))
    assert found == "the output of blocks.1.mlp.fc1 (Linear)"


def test_weights_are_checked_first_and_loss_after_outputs():
    model = nn.Sequential(nn.Linear(3, 1))
    assert find_first_nonfinite(model, lambda: model(torch.ones(2, 3)).sum() / 0) == "the loss"
    with torch.no_grad():
        model[0].weight[0, 1] = math.inf
    assert (
        find_first_nonfinite(model, lambda: model(torch.ones(2, 3)).sum()) == "the weight 0.weight"
    )


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
def test_second_signal_triggers_previous_handler(number, monkeypatch):
    """Within a second it counts as the same signal, passed on by torchrun."""
    acted = []
    before = signal.signal(number, lambda *_: acted.append(1))
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    try:
        with signal_handler() as signal_name:
            assert signal_name() == ""
            for _ in range(3):
                os.kill(os.getpid(), number)
                assert signal_name() == signal.Signals(number).name
                now[0] += 0.4
            assert acted == []
            now[0] += guards.ECHO
            os.kill(os.getpid(), number)
            assert acted == [1]
        os.kill(os.getpid(), number)
        # The previous handler is restored.
        assert acted == [1, 1]
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
def test_oom_error_names_options(error):
    with (
        pytest.raises(
            UserError,
            match=r"^runs/x: out of memory with 64 images .*; give --microbatch 32 .*--ema 0$",
        ),
        explain_oom(64, "runs/x"),
    ):
        raise error


def test_real_oom_is_recognized():
    """With the message of PyTorch itself."""
    with (
        pytest.raises(
            UserError, match=r"out of memory with 2 images .*; give a smaller --size or --batch,"
        ),
        explain_oom(2, "runs/x"),
    ):
        torch.empty(2**60)


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="another"), explain_oom(2, "runs/x"):
        raise RuntimeError("another")


@pytest.mark.parametrize(("images", "part"), [(10, 2), (12, 6), (24, 12), (64, 32)])
def test_outside_the_microbatch_that_an_oom_error_names_divides_the_batch(images, part):
    with (
        pytest.raises(UserError, match=rf"; give --microbatch {part} \("),
        explain_oom(images, "runs/x"),
    ):
        raise MemoryError

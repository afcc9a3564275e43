"""TrainMonitor: interval means, skipped updates, and errors that end a run."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from densefeed.step import PartLoss
from densefeed.system.errors import UserError
from densefeed.system.options import with_options
from densefeed.training import monitor
from densefeed.training.config import Config
from densefeed.training.monitor import LEAST_SCALE, TrainMonitor
from densefeed.training.ranks import Ranks
from densefeed.training.student import build_student, update

ALONE = Ranks(0, 1, torch.device("cpu"))


def build_monitor(dtype=None, **fields) -> tuple[TrainMonitor, SimpleNamespace, list]:
    """Build a monitor of one weight and a step that multiplies it by a given factor."""
    config = with_options(Config(), out=Path("run"), ema=0.0, **fields)
    model = torch.nn.Linear(1, 1, bias=False)
    student = build_student(config.optim, model, model, ALONE, dtype)
    feed = SimpleNamespace(loader=[0] * 10, batches=lambda epoch, at: iter([None]))
    seen = torch.zeros(2, dtype=torch.float64)
    watch, steps = TrainMonitor(student, feed, ALONE, config.run.out, seen, 0), iter(range(1000))

    def step(factor: float) -> None:
        samples = SimpleNamespace(index=torch.tensor([7]))
        compute = PartLoss(lambda *_: (model.weight.float() * factor).sum(), (samples,), None)
        feed.losses = lambda *_: [compute]
        watch.add(update(student, ALONE, next(steps), [compute])[0])

    return watch, student, step


def test_mean_covers_steps_since_last_log_line():
    watch, student, step = build_monitor()
    with torch.no_grad():
        student.model.weight.fill_(2.0)
    student.optimizer.param_groups[0]["lr"] = 0.0
    step(1.0), step(2.0)
    assert watch.mean_loss_sync(2) == pytest.approx(3.0)
    watch.next_interval(2, 3.0)
    step(5.0)
    assert watch.mean_loss_sync(3) == pytest.approx(10.0)


def test_skipped_updates_are_counted_up_to_a_limit(capsys, monkeypatch):
    monkeypatch.setattr(monitor, "MOST_SKIPS", 2)
    watch, _, step = build_monitor(on_nonfinite="skip")
    step(1.0), step(float("nan"))
    watch.mean_loss_sync(2)
    assert (watch.skips, watch.seen[1].item()) == (1, 1)
    assert (
        "skipped 1 updates whose gradients were not finite, from step 2 on"
        in capsys.readouterr().err
    )
    step(float("nan")), step(float("nan"))
    with pytest.raises(UserError, match=r"3 updates were skipped .* than the 2 that a run may"):
        watch.mean_loss_sync(4)


def test_error_if_float16_overflows_at_any_scale():
    """The loss is finite, but its gradients overflow at every scale."""
    watch, student, _ = build_monitor(dtype=torch.float16)
    weight = student.model.weight

    def loss_of() -> torch.Tensor:
        return torch.sqrt((weight * 0).sum())  # zero, with an infinite slope

    for number in range(27):  # 2^16 halved so often is 2^-11
        watch.add(update(student, ALONE, number, [loss_of])[0])
        if student.scaler.get_scale() >= LEAST_SCALE:
            watch.mean_loss_sync(number)
    with pytest.raises(
        UserError,
        match="run: gradients overflow in float16 at any scale of the loss, up to step 26;",
    ):
        watch.mean_loss_sync(26)


def test_loss_spike_is_reported_once(capsys):
    watch, _, _ = build_monitor()
    for number in range(8):
        watch.next_interval(number, 1.0)
    watch.next_interval(8, 9.0)
    assert (
        capsys.readouterr().err
        == "step 8: loss spike: 9.000; the median of the last intervals is 1.000\n"
    )

"""SAM: against its formula, with guards, in float16, with drop-path, and refused by name."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import densefeed.train as training
from densefeed.models import checkpoints
from densefeed.system.errors import UserError
from densefeed.training import setup
from densefeed.training.student import Student, update

from ..runs import SHARED_AGENT, student_for
from .test_student import ALONE, float_state, loss, make_batch, make_student, network


def assert_same(one: object, other: object) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def weights(student: Student) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in student.model.named_parameters()}


def gradients(model: nn.Module, parts: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the gradients of the mean loss of the parts."""
    mean = sum(loss(model, part) for part in parts) / len(parts)
    return list(torch.autograd.grad(mean, list(model.parameters())))


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["fp32", "fp16"])
def test_a_step_is_that_of_the_formula(clip, dtype):
    """In float64, with SGD by hand: w - lr clip(g(w + rho g(w) / |g(w)|)), of two parts.

    Running statistics are those of the first passes.
    """
    rate, rho = 0.1, 0.3
    ours = make_student(
        dtype, optimizer="sgd", momentum=0.0, lr=rate, weight_decay=0.0, sam_rho=rho, clip_grad=clip
    )
    twin, still = network().double(), network().double()
    for step in range(3):
        parts = make_batch(2 * step), make_batch(2 * step + 1)
        found, norm = update(ours, ALONE, step, [partial(loss, ours.model, x) for x in parts])
        wide = tuple(part.double() for part in parts)
        still.load_state_dict(twin.state_dict())
        want = sum(loss(still, part) for part in wide) / 2
        first = gradients(twin, wide)
        length = torch.cat([g.flatten() for g in first]).norm()
        before = [p.detach().clone() for p in twin.parameters()]
        with torch.no_grad():
            for parameter, gradient in zip(twin.parameters(), first, strict=True):
                parameter += rho * gradient / length
        second = gradients(twin, wide)
        longest = torch.cat([g.flatten() for g in second]).norm()
        factor = min(1.0, clip / longest) if clip else 1.0
        with torch.no_grad():
            for parameter, old, gradient in zip(twin.parameters(), before, second, strict=True):
                parameter.copy_(old - rate * factor * gradient)
        for name, buffer in still.named_buffers():
            twin.get_buffer(name).copy_(buffer)
        torch.testing.assert_close((found.double(), norm.double()), (want.detach(), longest))
    got = {name: tensor.double() for name, tensor in float_state(ours.model).items()}
    torch.testing.assert_close(got, float_state(twin), rtol=1e-5, atol=1e-6)
    assert int(ours.model[1].num_batches_tracked) == 6


class Cliff(nn.Module):
    """A loss that is not finite away from the weights that it has seen first."""

    def __init__(self, model: nn.Module, where: str) -> None:
        super().__init__()
        self.model, self.where, self.seen = model, where, None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.model[0].weight.detach().clone()
        self.seen = weight if self.seen is None else self.seen
        away = not torch.equal(weight, self.seen)
        return loss(self.model, x) * (math.inf if self.where == "both" or away else 1)


@pytest.mark.parametrize("where", ["both", "second"])
@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["fp32", "fp16"])
def test_a_skipped_update_changes_nothing(where, dtype):
    """Where a loss is not finite at the weights themselves, or only at those that SAM reads."""
    ours = make_student(dtype, on_nonfinite="skip", sam_rho=0.1)
    update(ours, ALONE, 0, [partial(loss, ours.model, make_batch(0))])
    before = float_state(ours.model)
    update(ours, ALONE, 1, [partial(Cliff(ours.model, where), make_batch(1))])
    assert_same(float_state(ours.model), before)
    assert ours.guard.poll_sync() == (1, 1)
    update(ours, ALONE, 2, [partial(loss, ours.model, make_batch(2))])
    after = float_state(ours.model)
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert not torch.equal(after["0.weight"], before["0.weight"])


def test_without_skip_weights_stay_those_of_the_bad_step():
    ours = make_student(sam_rho=0.1)
    update(ours, ALONE, 0, [partial(loss, ours.model, make_batch(0))])
    before = weights(ours)
    update(ours, ALONE, 1, [partial(Cliff(ours.model, "second"), make_batch(1))])
    update(ours, ALONE, 2, [partial(loss, ours.model, make_batch(2))])
    assert_same(weights(ours), before)
    assert ours.guard.poll_sync()[1] == 1


def test_an_overflow_of_scaled_gradients_is_not_counted():
    """The first pass overflows, so weights are not moved, and the second one overflows too."""
    ours = make_student(torch.float16, sam_rho=0.1)
    before, scale = weights(ours), ours.scaler.get_scale()
    steep = [lambda: loss(ours.model, make_batch(1)) + 6000 * ours.model[3].bias.half().sum()]
    update(ours, ALONE, 0, steep)
    assert ours.scaler.get_scale() == scale / 2
    assert ours.guard.poll_sync() == (0, None)
    assert_same(weights(ours), before)


def test_a_gradient_of_zeros_moves_nothing():
    ours = make_student(sam_rho=0.1, weight_decay=0.0)
    before = weights(ours)
    update(ours, ALONE, 0, [lambda: 0 * loss(ours.model, make_batch(0))])
    assert_same(weights(ours), before)
    assert ours.guard.poll_sync() == (0, None)


@pytest.mark.parametrize(
    "fields",
    [
        dict(drop_path=0.5, microbatch=2),
        pytest.param(dict(precision="fp16"), marks=pytest.mark.slow),
        # Gradients of weights that two networks share are combined before they move the weights.
        pytest.param(SHARED_AGENT, marks=pytest.mark.slow),
        pytest.param(dict(compile="blocks"), marks=pytest.mark.slow),
    ],
    ids=["parts", "fp16", "shared", "compiled"],
)
def test_both_passes_drop_the_same_and_leave_no_trace(micro, tmp_path, one_thread, fields):
    """With a radius that float32's sums round off, a run equals one without SAM to the bit."""
    states = []
    for rho in (0.0, 1e-30):
        out = tmp_path / f"{rho}"
        training.train(micro(out, epochs=2, sam_rho=rho, clip_grad=1.0, **fields))
        states.append(checkpoints.load(out / "last.pt"))
    assert states[0].keys() == states[1].keys()
    for part in states[0].keys() & {"model", "ema", "agent", "optimizer", "scaler", "seen"}:
        assert_same(states[1][part], states[0][part])


def test_captured_updates_are_refused(micro, tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "can_capture", lambda mode, _: mode == "graph")
    run = micro(tmp_path, compile="graph", sam_rho=0.1)
    with pytest.raises(UserError, match=r"draws two masks of drop-path, .* give --compile whole"):
        student_for(run)

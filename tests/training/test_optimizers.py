"""timm's optimizers: equal to their own steps, skipped and resumed to the bit, refused by name."""

import copy
import io
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from timm.optim import create_optimizer_v2, muon, param_groups_weight_decay
from torch import nn

from densefeed.system.errors import UserError
from densefeed.training.config import OptimOptions
from densefeed.training.optimizers import FUSED, build_optimizer, has_momentum, optimizer_names
from densefeed.training.student import Student, update

from .test_student import ALONE, float_state, loss, make_batch, make_student, network

# Every kind of state: none before the first update, a count of steps in the group, two kinds of
# parameters in one optimizer.
SOME = ["adamw", "sgd", "lion", "nadamuon", "adan"]
OTHERS = sorted(set(optimizer_names()) - set(SOME))
every_name = pytest.mark.parametrize(
    "name", [*SOME, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)


def train(student: Student, *steps: int, scale: float = 1.0) -> None:
    for step in steps:
        compute = partial(loss, student.model, make_batch(step, scale))
        update(student, ALONE, step, [compute])


def moments(student: Student) -> list[dict]:
    return copy.deepcopy([dict(state) for state in student.optimizer.state.values()])


def assert_same(one: object, other: object) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_the_default_is_fused_adamw_to_the_bit():
    ours, twin = make_student(), network()
    plain = torch.optim.AdamW(param_groups_weight_decay(twin, 0.05), lr=1e-2, fused=True)
    train(ours, 0, 1, 2)
    for step in range(3):
        loss(twin, make_batch(step)).backward()
        plain.step()
        plain.zero_grad()
    assert_same(float_state(ours.model), float_state(twin))


@every_name
def test_updates_are_timms_and_resume_to_the_bit(name, monkeypatch):
    """With weight decay on matrices alone; the state passes through a file, without pickles.

    Muon's products are in float32, as ours on a CPU.
    """
    exact = partial(muon.zeropower_via_newtonschulz, dtype=torch.float32)
    monkeypatch.setattr(muon, "zeropower_via_newtonschulz", exact)
    ours, twin = make_student(optimizer=name, ema=0.9), network()
    plain = create_optimizer_v2(twin, name, lr=1e-2, weight_decay=0.05)
    train(ours, 0, 1)
    file = io.BytesIO()
    torch.save(ours.state(), file)
    file.seek(0)
    train(ours, 2, 3)
    for step in range(4):
        loss(twin, make_batch(step)).backward()
        plain.step()
        plain.zero_grad()
    # timm's are not fused, which rounds otherwise.
    bound = 1e-6 if name in FUSED else 0
    torch.testing.assert_close(float_state(ours.model), float_state(twin), rtol=bound, atol=bound)
    resumed = make_student(optimizer=name, ema=0.9)
    resumed.restore(torch.load(file, weights_only=True), Path("run"))
    train(resumed, 2, 3)
    assert_same(float_state(resumed.model), float_state(ours.model))
    assert_same(float_state(resumed.ema.module), float_state(ours.ema.module))


@every_name
@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["fp32", "fp16"])
def test_a_skipped_update_changes_nothing(name, dtype):
    """Checks the first updates, which create the moments, and of a later one."""
    ours, clean = (make_student(dtype, optimizer=name, on_nonfinite="skip") for _ in range(2))
    weights = float_state(ours.model)
    train(ours, 0, scale=math.nan)
    assert_same(float_state(ours.model), weights)
    train(ours, 1, 2)
    before, state = float_state(ours.model), moments(ours)
    train(ours, 3, scale=math.inf)
    assert_same(float_state(ours.model), before)
    assert_same(moments(ours), state)
    assert ours.guard.poll_sync() == (2, 0)
    # The scale of float16, halved by a skip, is a power of 2 and changes no gradient.
    train(clean, 1, 2)
    assert_same(float_state(clean.model), before)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_momentum_and_decay_of_all_parameters(momentum):
    """SGD by hand; 0 is no momentum, whose form of Nesterov's PyTorch refuses."""
    options = dict(optimizer="sgd", momentum=momentum, decay_all=True)
    ours, twin = make_student(**options), network()
    plain = torch.optim.SGD(
        twin.parameters(), 1e-2, momentum, weight_decay=0.05, nesterov=momentum > 0
    )
    train(ours, 0, 1, 2)
    for step in range(3):
        loss(twin, make_batch(step)).backward()
        plain.step()
        plain.zero_grad()
    torch.testing.assert_close(float_state(ours.model), float_state(twin), rtol=1e-6, atol=1e-6)
    # Without biases and norms the update is another one.
    other = make_student(**options | dict(decay_all=False))
    train(other, 0)
    assert not torch.equal(other.model[1].weight, make_trained(options).model[1].weight)


@pytest.mark.parametrize("name", [name for name in optimizer_names() if has_momentum(name)])
def test_no_momentum_trains_and_resumes(name):
    ours = make_student(optimizer=name, momentum=0.0)
    train(ours, 0)
    file = io.BytesIO()
    torch.save(ours.state(), file)
    file.seek(0)
    resumed = make_student(optimizer=name, momentum=0.0)
    resumed.restore(torch.load(file, weights_only=True), Path("run"))
    for student in (ours, resumed):
        train(student, 1)
    assert_same(float_state(resumed.model), float_state(ours.model))


def make_trained(options: dict) -> Student:
    student = make_student(**options)
    train(student, 0)
    return student


@pytest.mark.parametrize("name", SOME)
def test_weights_stay_those_of_the_bad_step_without_skip(name):
    ours = make_student(optimizer=name)
    train(ours, 0)
    before = {key: parameter.clone() for key, parameter in ours.model.named_parameters()}
    train(ours, 1, scale=math.inf)
    train(ours, 2, 3)
    assert_same(dict(ours.model.named_parameters()), before)
    assert ours.guard.poll_sync()[1] == 1


def test_a_state_of_another_run_is_refused():
    ours, other = make_student(optimizer="adan"), make_student(optimizer="adan")
    state = ours.state()
    groups = {**state["optimizer"], "param_groups": []}
    wrong = {**state["model"], "0.weight": torch.zeros(2, 2)}
    for part in (dict(optimizer=groups), dict(model=wrong), dict(optimizer=None)):
        with pytest.raises(UserError, match=r"in run does not fit its run \(") as error:
            other.restore(state | part, Path("run"))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nadamoun", "is unknown to timm; choose nadamuon, "),
        ("AdamW", "is unknown to timm; choose adamw, "),
        ("", "is unknown to timm; choose adamw, "),
        ("adahessian", "cannot train here; choose "),
        ("bnbadam", "cannot train here; choose nadam, "),
    ],
)
def test_unknown_names_are_refused(name, message):
    with pytest.raises(UserError, match=f"--optimizer {name} {message}"):
        OptimOptions(optimizer=name)


def test_parameters_without_gradients_have_no_state():
    """No loss reads the second layer, so a checkpoint has no moments of it."""
    students = [make_student(optimizer=name) for name in ("adamw", "nadamuon")]
    for student in students:
        idle: nn.Module = student.model[3]
        compute = partial(loss, student.model[:3], make_batch(0))
        update(student, ALONE, 0, [compute])
        assert not any(p in student.optimizer.state for p in idle.parameters())
        other = make_student(optimizer="adamw" if student is students[0] else "nadamuon")
        other.restore(student.state(), Path("run"))
        assert_same(moments(other), moments(student))


def test_muon_orthogonalizes_in_float32_on_a_cpu():
    """To 1e-5; in bfloat16, as timm does it, the step would be off by 1e-2."""
    layer, grad = nn.Linear(12, 8, bias=False), torch.randn(8, 12)
    before, layer.weight.grad = layer.weight.detach().clone(), grad.clone()
    build_optimizer("muon", layer, lr=1.0, weight_decay=0.0).step()
    # The first momentum is a multiple of the gradient. The iterations change singular values alone.
    u, values, v = torch.linalg.svd(grad.double(), full_matrices=False)
    values = values / values.norm()
    for a, b, c in muon.resolve_ns_coefficients("quintic", muon._COEFFICIENTS)[:5]:
        values = a * values + b * values**3 + c * values**5
    # timm matches the size of AdamW's updates: 0.2 times the root of the longer side.
    want = -0.2 * math.sqrt(12) * (u * values) @ v
    torch.testing.assert_close((layer.weight.detach() - before).double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["muon", "nmuon", "adamuon", "nadamuon"])
def test_timms_own_muon_keeps_its_bytes(name):
    """Beside ours, whichever is built or stepped first."""

    def make() -> nn.Linear:
        torch.manual_seed(0)
        layer = nn.Linear(12, 8, bias=False)
        layer.weight.grad = torch.randn(8, 12)
        return layer

    def step(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.step()
        return layer.weight.detach().clone()

    function, options = muon.zeropower_via_newtonschulz, dict(lr=0.1, weight_decay=0.05)
    alone, before, ours, after = (make() for _ in range(4))
    plain = create_optimizer_v2(before, name, **options)
    want = step(alone, create_optimizer_v2(alone, name, **options))
    own = build_optimizer(name, ours, **options)
    assert not torch.equal(step(ours, own), want)
    assert torch.equal(step(before, plain), want)
    assert torch.equal(step(after, create_optimizer_v2(after, name, **options)), want)
    assert muon.zeropower_via_newtonschulz is function
    # The same options, and a copy is of the same kind.
    groups = [
        [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]
        for o in (own, plain, copy.deepcopy(own))
    ]
    assert groups[0] == groups[1] == groups[2]
    assert own.defaults == plain.defaults

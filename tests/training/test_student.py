"""Updates against torch's optimizer and clipping, with non-finite gradients, without host syncs."""

import math
from functools import partial

import pytest
import timm
import torch
from timm.optim import param_groups_weight_decay
from torch import nn

from densefeed.training.config import OptimOptions
from densefeed.training.ranks import Ranks
from densefeed.training.student import build_student, update

ALONE = Ranks(0, 1, torch.device("cpu"))


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    # No bias before BatchNorm: its gradient would be rounding noise, which Adam scales to a step.
    layers = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3)
    return nn.Sequential(*layers)


def make_student(dtype=None, **fields):
    optim = OptimOptions(batch=640, **(dict(lr=1e-2, ema=0.0) | fields))
    model = network()
    return build_student(optim, model, model, ALONE, dtype)


def make_batch(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def float_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone()
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point()
    }


@pytest.mark.parametrize("clip", [0.0, 0.05, 1e6])
def test_update_matches_adamw_with_clipping(clip):
    """Not fused, and clipped by clip_grad_norm_; two parts of a batch are their mean. Norms are
    those before clipping.
    """
    ours, twin = make_student(clip_grad=clip), network()
    plain = torch.optim.AdamW(
        param_groups_weight_decay(twin, 0.05), lr=1e-2, fused=False, foreach=False
    )
    for step in range(4):
        parts = make_batch(2 * step), make_batch(2 * step + 1)
        mean, norm = update(ours, ALONE, step, [partial(loss, ours.model, part) for part in parts])
        want = (loss(twin, parts[0]) + loss(twin, parts[1])) / 2
        want.backward()
        length = nn.utils.clip_grad_norm_(twin.parameters(), clip or math.inf)
        plain.step()
        plain.zero_grad()
        torch.testing.assert_close((mean, norm), (want.detach(), length))
        assert bool(length > clip) == (clip < 1)  # the second clips, the third does not
    torch.testing.assert_close(float_state(ours.model), float_state(twin), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_update_keeps_the_learned_exponents(bad):
    """Sparse attention, for an image from which its backward pass is not finite either."""
    torch.manual_seed(0)
    model = timm.create_model("bootstrapping_vit_s_sparse", depth=1, img_size=32, num_classes=3)
    optim = OptimOptions(batch=640, lr=1e-2, on_nonfinite="skip")
    ours = build_student(optim, model, model, ALONE, None)
    image = torch.randn(2, 3, 32, 32)
    exponents = [model.blocks[0].attn.alpha.item()]
    for step, scale in enumerate((1.0, bad, 1.0)):
        before = float_state(model)
        update(ours, ALONE, step, [partial(loss, model, scale * image)])
        if step == 1:
            torch.testing.assert_close(float_state(model), before, rtol=0, atol=0)
        exponents.append(model.blocks[0].attn.alpha.item())
    assert exponents[0] == 1.5 != exponents[1] == exponents[2] != exponents[3]
    assert ours.guard.poll_sync() == (1, 1)


def test_ema_matches_formula():
    """Decay min(ema, 1 - (1 + t)^(-2/3)) after t more steps than one, timm's warm-up, in
    float64.
    """
    ours = make_student(ema=0.9)
    want = {name: tensor.double() for name, tensor in float_state(ours.model).items()}
    for step in range(5):
        update(ours, ALONE, step, [partial(loss, ours.model, make_batch(step))])
        decay = min(0.9, 1 - (1 + step) ** (-2 / 3))
        want = {
            name: decay * want[name] + (1 - decay) * tensor.double()
            for name, tensor in float_state(ours.model).items()
        }
    torch.testing.assert_close(
        {n: t.double() for n, t in float_state(ours.ema.module).items()}, want, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("poison", ["input", "gradient"])
@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["fp32", "fp16"])
def test_skipped_update_changes_nothing(poison, dtype):
    """Weights, moments and running statistics, which a non-finite input would otherwise corrupt."""
    ours = make_student(dtype, on_nonfinite="skip")
    update(ours, ALONE, 0, [partial(loss, ours.model, make_batch(0))])
    before, moments = (
        float_state(ours.model),
        [dict(state) for state in ours.optimizer.state.values()],
    )
    moments = [{name: value.clone() for name, value in state.items()} for state in moments]
    bad = make_batch(1)
    if poison == "input":
        bad[3, 2] = math.nan
    losses = [lambda: loss(ours.model, bad) * (math.inf if poison == "gradient" else 1)]
    update(ours, ALONE, 1, losses)
    now = float_state(ours.model)
    torch.testing.assert_close(now, before, rtol=0, atol=0)
    torch.testing.assert_close(
        [dict(state) for state in ours.optimizer.state.values()], moments, rtol=0, atol=0
    )
    assert ours.guard.poll_sync() == (1, 1)
    mean, _ = update(ours, ALONE, 2, [partial(loss, ours.model, make_batch(2))])
    assert mean.isfinite()
    assert any(
        not torch.equal(now[name], tensor) for name, tensor in float_state(ours.model).items()
    )
    assert all(tensor.isfinite().all() for tensor in float_state(ours.model).values())


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["fp32", "fp16"])
def test_weights_stay_those_of_the_bad_step_without_skip(dtype):
    """However many good steps follow before the next poll."""
    ours = make_student(dtype)
    update(ours, ALONE, 0, [partial(loss, ours.model, make_batch(0))])
    before = {name: parameter.clone() for name, parameter in ours.model.named_parameters()}
    for step, scale in ((1, math.inf), (2, 1.0), (3, 1.0)):
        update(
            ours,
            ALONE,
            step,
            [lambda scale=scale, step=step: loss(ours.model, make_batch(step)) * scale],
        )
    torch.testing.assert_close(dict(ours.model.named_parameters()), before, rtol=0, atol=0)
    assert ours.guard.poll_sync()[1] == 1


def test_scaled_gradient_overflow_is_not_counted():
    """As usual with float16: the update is skipped, the scale halved, and no guard counts it."""
    ours = make_student(torch.float16)
    update(ours, ALONE, 0, [partial(loss, ours.model, make_batch(0))])
    before, scale = float_state(ours.model), ours.scaler.get_scale()
    # The gradient of the bias is 6000. Times 65536, the initial scale, it exceeds 65504, which is
    # the largest float16.
    update(
        ours,
        ALONE,
        1,
        [lambda: loss(ours.model, make_batch(1)) + 6000 * ours.model[3].bias.half().sum()],
    )
    assert ours.scaler.get_scale() == scale / 2
    assert ours.guard.poll_sync() == (0, None)
    torch.testing.assert_close(
        dict(ours.model.named_parameters())["0.weight"], before["0.weight"], rtol=0, atol=0
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict(clip_grad=0.1, ema=0.9),
        dict(on_nonfinite="skip", ema=0.9),
        dict(optimizer="sgd"),
        dict(sam_rho=0.1),
    ],
)
def test_update_does_not_sync(no_host_read, fields):
    """Except for the fused kernel and the step count of the EMA, which PyTorch keeps on the CPU."""
    ours = make_student(**fields)
    x = make_batch(0)
    with no_host_read():
        mean, norm = update(ours, ALONE, 0, [partial(loss, ours.model, x)] * 2)
    assert mean.isfinite()
    assert norm > 0

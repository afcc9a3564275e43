"""Stochastic depth of neighbors: exact means and gradients, and one compilation for all draws."""

import pytest
import timm
import torch

from densefeed.models.drop_path import add_branch, branch_drop_path
from densefeed.models.kernels import window_drop_path
from densefeed.models.kernels.window_drop_path import WindowDropPath


def make(rate):
    module = branch_drop_path(rate)
    window_drop_path.use(torch.nn.Sequential(module))
    assert type(module) is WindowDropPath
    return module.train()


def fix(monkeypatch, start, images):
    """Let the window begin at a sample."""
    value = torch.tensor((start + 0.5) / images, dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *shape, device: value)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.97])
def test_outside_every_sample_is_dropped_as_often_and_the_mean_stays(monkeypatch, rate):
    """Over all begins of a window, which are equally likely, the mean is that without drops."""
    N, divisor = 8, 2.0
    x = torch.randn(N, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outs, module = [], make(rate)
    for start in range(N):
        fix(monkeypatch, start, N)
        outs.append(add_branch(x, torch.sin, module, divisor))
    kept = max(1, round(N * (1 - rate)))
    changed = (torch.stack(outs) != x).any(3).any(2)
    assert (changed.sum(1) == kept).all()
    assert (changed.sum(0) == kept).all()
    torch.testing.assert_close(torch.stack(outs).mean(0), x + x.sin() / divisor)
    assert torch.equal(add_branch(x, torch.sin, module.eval(), 1.0), x + x.sin())


@pytest.mark.parametrize("start", [0, 3, 7])
def test_outside_gradients_are_those_of_the_kept_samples(monkeypatch, start):
    N, module = 8, make(0.4)
    fix(monkeypatch, start, N)
    x = torch.randn(N, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    out = add_branch(x, lambda y: (y @ weight).sin(), module, 2.0)
    # Five of eight.
    mask = torch.zeros(N, 1, 1, dtype=torch.float64)
    mask[[(start + n) % N for n in range(5)]] = 8 / 5 / 2
    want, grad = x + mask * (x @ weight).sin(), torch.randn_like(out)
    torch.testing.assert_close(out, want)
    found, plain = (torch.autograd.grad(y, (x, weight), grad) for y in (out, want))
    torch.testing.assert_close(found, plain)


@pytest.mark.slow
def test_outside_one_compilation_serves_all_draws():
    """As --compile whole and graph do: no break, and no compilation for each number."""
    torch.manual_seed(0)
    model = timm.create_model("lvvit_micro", img_size=32, num_classes=5, drop_path_rate=0.5)
    window_drop_path.use(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model.train(), dynamic=False, fullgraph=True, backend="aot_eager")
    x = torch.randn(8, 3, 32, 32)
    outs = []
    for _ in range(3):
        cls, tokens = compiled(x)
        (cls.sum() + tokens.sum()).backward()
        outs.append(cls.detach())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch.equal(outs[0], outs[1])
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

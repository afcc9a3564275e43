"""Residual sums with norms against float64: plain, interpreted, compiled; blocks against blocks."""

import copy

import pytest
import timm
import torch
from timm.layers import DropPath
from torch import nn
from torch.nn import functional as F

from densefeed.models.kernels import add_norm
from densefeed.models.lvvit import Block
from densefeed.training.mixed_linear import WeightCopies

from ...interpreter import compile_kernel, interpreted, read_resources, run_interpreted

triton = pytest.importorskip("triton")

# N, T, D: rows that tiles do not divide, a width that is no power of two, one program and several.
SHAPES = ((3, 7, 48), (1, 1, 16), (2, 5, 384))


def example(N, T, D, dtype=torch.float32):
    rng = torch.Generator().manual_seed(D)
    shapes = dict(x=(N, T, D), branch=(N, T, D), scale=(N,), bias=(D,), weight=(D,), norm_bias=(D,))
    found = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    grads = [torch.randn(N, T, D, generator=rng) for _ in range(2)]
    # A sample that stochastic depth drops.
    found["scale"][0] = 0
    wide = ("scale", "bias", "weight", "norm_bias")
    return {n: t if n in wide else t.to(dtype) for n, t in found.items()}, grads


def exact(case, grads):
    """Return results and gradients in float64, by PyTorch's functions."""
    leaves = {name: tensor.double().requires_grad_() for name, tensor in case.items()}
    # The branch holds its bias already; its gradient is that of a constant added to the branch.
    branch = leaves["branch"] + leaves["bias"] - leaves["bias"].detach()
    total = leaves["x"] + branch * leaves["scale"].detach()[:, None, None]
    norm = leaves["weight"], leaves["norm_bias"]
    out = F.layer_norm(total, total.shape[-1:], *norm, 1e-5)
    names = "x", "branch", "weight", "norm_bias", "bias"
    wanted = [leaves[name] for name in names]
    found = torch.autograd.grad((total, out), wanted, [grad.double() for grad in grads])
    return total.detach(), out.detach(), *found


# By architecture, as docs/results/gpu.md has them. More would let fewer warps run at a time.
MOST_REGISTERS = {
    "forward_kernel": {80: 56, 90: 56, 100: 56},
    "backward_kernel": {80: 152, 90: 128, 100: 136},
}


def check(found, want, bound):
    for one, other in zip(found, want, strict=True):
        assert float((one.double() - other).norm()) <= bound * float(other.norm()) + 1e-12


@pytest.mark.parametrize("shape", SHAPES)
def test_outside_a_sum_with_its_norm_has_exact_gradients(shape):
    case, grads = example(*shape)
    leaves = [t.double().requires_grad_(name != "scale") for name, t in case.items()]
    total, out, *_ = add_norm.forward(*leaves, 1e-5)
    x, branch, _, bias, weight, norm_bias = leaves
    wanted = x, branch, weight, norm_bias, bias
    found = torch.autograd.grad((total, out), wanted, [grad.double() for grad in grads])
    check((total, out, *found), exact(case, grads), 1e-12)


@interpreted
@pytest.mark.parametrize("shape", SHAPES)
def test_interpreted_sums_with_norms(shape, monkeypatch):
    from densefeed.models.kernels import add_norm_triton as subject

    case, grads = example(*shape)
    x, branch, scale, _, weight, norm_bias = case.values()
    for programs in (subject.PROGRAMS, 2):
        monkeypatch.setattr(subject, "PROGRAMS", programs)
        total, out, *sums = subject.forward(x, branch, scale, weight, norm_bias, 1e-5)
        x_grad, branch_grad, added = subject.backward(*grads, total, *sums, scale, weight)
        check((total, out, x_grad, branch_grad, *added), exact(case, grads), 2e-6)


@pytest.mark.slow
def test_outside_sums_with_norms_in_the_interpreter():
    assert run_interpreted(__file__) == len(SHAPES)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("stream", ["*fp32", "*bf16"])
@pytest.mark.parametrize("name", ["forward_kernel", "backward_kernel"])
def test_outside_sums_with_norms_compile_without_spills(name, stream, capability):
    from densefeed.models.kernels import add_norm_triton as subject

    kernel, wide = getattr(subject, name), ("scale", "weight", "bias", "mean", "rstd", "sums")
    types = dict.fromkeys(wide, "*fp32") | {"eps": "fp32"}
    types |= dict.fromkeys(("x", "total", "total_grad", "x_grad"), stream)
    types |= dict.fromkeys(("branch", "out", "out_grad", "branch_grad"), "*bf16")
    sizes = subject.block_sizes(384)
    constants = {name: sizes[name] for name in ("D", "R", "BLOCK")}
    code = compile_kernel(kernel, types, constants, capability, True, subject.WARPS, aligned=True)
    stack, registers = read_resources(code)
    assert (stack, registers <= MOST_REGISTERS[name][capability]) == (0, True), registers


@pytest.fixture
def runs_here(monkeypatch):
    """The plain operators take the place of the kernels on a CPU too."""
    monkeypatch.setattr(
        add_norm, "can_run", lambda block, x: block.training and torch.is_grad_enabled()
    )


@pytest.mark.parametrize("drop_path", [0.0, 0.5])
def test_outside_blocks_that_pass_sums_on_are_the_same_blocks(runs_here, drop_path):
    torch.manual_seed(0)
    options = dict(img_size=32, num_classes=5, residual_divisor=2.0, drop_path_rate=drop_path)
    plain = timm.create_model("lvvit_micro", **options).double()
    for module in plain.modules():
        if isinstance(module, DropPath):
            # The scale of a branch is float32, which is exact for 1 / 0.5.
            module.drop_prob = 0.5
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.1)
    fused = copy.deepcopy(plain)
    add_norm.use(fused)
    assert [type(block) for block in fused.blocks] == [add_norm.FusedBlock] * 4
    x, found = torch.randn(4, 3, 32, 32, dtype=torch.float64), []
    for model in (plain, fused):
        torch.manual_seed(1)
        cls, tokens = model.train()(x)
        (cls.square().sum() + tokens.square().sum()).backward()
        found.append((cls, tokens, *(p.grad for p in model.parameters())))
        model.eval()
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(fused(x), plain(x), rtol=0, atol=0)


def test_outside_blocks_that_pass_sums_on_compute_with_copies_of_weights(runs_here):
    """As in --compile blocks, where norms and biases would be summed by image."""
    torch.manual_seed(0)
    plain = timm.create_model("lvvit_micro", img_size=32, num_classes=5, drop_path_rate=0.0)
    x, found = torch.randn(2, 3, 32, 32), []
    for use in (lambda model: None, add_norm.use):
        model = copy.deepcopy(plain).train()
        use(model)
        copies = WeightCopies([model], by_image=True)
        copies.update(torch.bfloat16, 2)
        with torch.autocast("cpu", torch.bfloat16):
            cls, tokens = model(x)
            loss = cls.float().square().sum() + tokens.float().square().sum()
        loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, want in found[0].items():
        assert found[1][name].dtype == torch.float32
        far = float((found[1][name] - want).norm() / want.norm())
        assert far < 0.05, (name, far)


def test_outside_other_blocks_stay():
    """Norms after the sums, and GroupNorm, have no such kernels."""
    for options in (dict(post_norm=True), dict(norm_groups=4)):
        model = timm.create_model("lvvit_micro", img_size=32, num_classes=5, **options)
        add_norm.use(model)
        assert all(type(block) is Block for block in model.blocks)

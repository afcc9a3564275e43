"""Every rule conserves relevance where it should; properties in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.explain.rules import RelevanceTracer, divide

SEEDS = st.integers(0, 10_000)
CHECKS = settings(max_examples=20, deadline=None)


def draw(seed: int, *shape: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def relevance(compute, *inputs: Tensor, seed: int = 1) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return relevance drawn at the output of `compute(*inputs)`, and that of the inputs."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    with torch.no_grad(), RelevanceTracer(nn.Identity(), {}):
        out = compute(*inputs)
    R = draw(seed, *out.shape)
    return R, torch.autograd.grad(out, inputs, R)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@given(SEEDS, st.integers(1, 6), st.integers(1, 7), st.booleans())
@CHECKS
def test_linear_layers_conserve(seed, T, D, bias):
    """Where no output is without positive contributions; a bias gets none."""
    layer = nn.Linear(D + 4, 3, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(draw(seed, 3, D + 4))
    x = draw(seed + 1, 2, T, D + 4)
    R, (R_x,) = relevance(layer, x)
    positive = x.clamp(min=0) @ layer.weight.clamp(min=0).mT
    positive = positive + x.clamp(max=0) @ layer.weight.clamp(max=0).mT
    # 1e-9 in the denominator matters to the smallest.
    close(R_x.sum((1, 2)), (R * positive / (positive + 1e-9)).sum((1, 2)))
    if positive.min() > 1e-3:
        close(R_x.sum(), R.sum())


@given(SEEDS, st.sampled_from([1, 2]), st.booleans())
@CHECKS
def test_convolutions_conserve(seed, stride, depthwise):
    groups = 4 if depthwise else 1
    kernel = draw(seed, 4, 4 // groups, 3, 3)
    x = draw(seed + 1, 2, 4, 6, 6)

    def convolve(x: Tensor, kernel: Tensor) -> Tensor:
        return F.conv2d(x, kernel, None, stride, 1, 1, groups)

    R, (R_x,) = relevance(lambda x: convolve(x, kernel), x)
    positive = convolve(x.clamp(min=0), kernel.clamp(min=0))
    positive = positive + convolve(x.clamp(max=0), kernel.clamp(max=0))
    close(R_x.sum((1, 2, 3)), (R * positive / (positive + 1e-9)).sum((1, 2, 3)))


@given(SEEDS)
@CHECKS
def test_products_halve_and_conserve(seed):
    a, b = draw(seed, 2, 3, 5, 4).abs(), draw(seed + 1, 2, 3, 4, 6).abs()
    R, parts = relevance(torch.matmul, a, b)
    for part in parts:
        close(part.sum(), R.sum() / 2)
    R, parts = relevance(torch.mul, a, draw(seed + 2, 2, 3, 5, 4).abs() + 0.1)
    for part in parts:
        close(part, R / 2)


@given(SEEDS)
@CHECKS
def test_sums_conserve_per_image(seed):
    a, b = draw(seed, 3, 4, 5), draw(seed + 1, 3, 4, 5)
    R, (R_a, R_b) = relevance(torch.add, a, b)
    torch.testing.assert_close((R_a + R_b).sum((1, 2)), R.sum((1, 2)), rtol=1e-6, atol=1e-5)
    # In proportion to the sizes of both branches' parts.
    parts = (a * R / (a + b)).sum((1, 2)).abs(), (b * R / (a + b)).sum((1, 2)).abs()
    share = parts[0] / (parts[0] + parts[1]) * R.sum((1, 2))
    torch.testing.assert_close(R_a.sum((1, 2)), share, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    "compute",
    [
        nn.LayerNorm(5, dtype=torch.float64),
        F.gelu,
        lambda x: x.softmax(-1),
        lambda x: x / 2,
        lambda x: 3 * x,
        lambda x: x + torch.ones(5, dtype=torch.float64),
        lambda x: x - torch.ones(5, dtype=torch.float64),
        lambda x: x.mT.reshape(2, 4, 5),
    ],
)
def test_layers_that_pass(compute):
    x = draw(0, 2, 4, 5)
    R, (R_x,) = relevance(compute, x)
    expected = R.reshape(2, 5, 4).mT if compute(x).allclose(x.mT.reshape(2, 4, 5)) else R
    assert torch.equal(R_x, expected)


@given(SEEDS)
@CHECKS
def test_means_give_relevance_to_positive_values(seed):
    x = draw(seed, 2, 6, 3)
    R, (R_x,) = relevance(lambda x: x.mean(1, keepdim=True), x)
    positive = x.clamp(min=0)
    close(R_x, R * divide(positive, positive.sum(1, keepdim=True)))


def test_division_by_zero_is_zero():
    a, b = torch.tensor([1.0, 1, 0]).double(), torch.tensor([0.0, -1e-9, 0]).double()
    assert not divide(a, b).any()
    assert divide(a[:1], a[:1]) == 1 / (1 + 1e-9)

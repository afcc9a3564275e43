"""Forms of the stem's layers and of GELU against float64 and PyTorch's own."""

import copy
import math

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from densefeed.models.kernels import four_channels, norm_relu, shared_gelu, space_to_depth
from densefeed.models.lvvit import Stem
from densefeed.training.mixed_linear import WeightCopies


@pytest.mark.parametrize("size", [(32, 48), (2, 2), (14, 6)])
@pytest.mark.parametrize("channels", [3, 5])
def test_outside_a_convolution_over_pairs_of_pixels_has_the_same_sums(size, channels):
    rng = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=rng, dtype=torch.float64, requires_grad=True)
        for shape in ((2, channels, *size), (8, channels, 7, 7))
    )
    found = []
    for convolve in (
        lambda x, weight: F.conv2d(x, weight, stride=2, padding=3),
        lambda x, weight: space_to_depth.convolve(x, weight, None),
    ):
        out = convolve(x, weight)
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), (x, weight))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("size", [(32, 48), (2, 2), (14, 6)])
@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_outside_a_convolution_over_four_channels_has_the_same_sums(size, channels, memory):
    """In both memory formats; with three channels it is the plain convolution."""
    rng = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=rng, dtype=torch.float64)
        for shape in ((2, 3, *size), (8, 3, 7, 7))
    )
    weight.requires_grad_()
    want = F.conv2d(x, weight, stride=2, padding=3)
    given = F.pad(x, (0, 0, 0, 0, 0, channels - 3)).contiguous(memory_format=memory)
    out = four_channels.convolve(given, weight, None)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-11)
    gradients = [torch.autograd.grad(y.square().sum(), weight)[0] for y in (out, want)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("form", [space_to_depth, four_channels])
def test_outside_a_copy_of_the_weight_in_16_bits_is_used_over_pairs_too(form):
    """The layer with copies takes the place of the convolution, and keeps its form."""
    torch.manual_seed(0)
    stem = Stem(3, 8, 16, ((7, 2), (3, 1), (8, 8)))
    plain, x = copy.deepcopy(stem), torch.randn(2, 3, 32, 32)
    model = nn.Module()
    model.stem = stem
    form.use(model)
    copies = WeightCopies([model], by_image=True)
    copies.update(torch.bfloat16, 2)
    first = model.stem[0]
    assert first.low_weight.dtype == torch.bfloat16
    wide = F.pad(x, (0, 0, 0, 0, 0, getattr(model, "image_channels", 3) - 3))
    with torch.autocast("cpu", torch.bfloat16):
        out, want = first(wide), plain[0](x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)


def test_outside_gelu_is_as_exact_as_pytorchs():
    """Errors against the standard library's erfc in float64."""
    # Points of float32, so that their rounding is no error.
    x = torch.linspace(-12, 12, 20_001).double()
    values = [0.5 * math.erfc(-one / math.sqrt(2)) for one in x.tolist()]
    share = torch.tensor(values, dtype=torch.float64)
    want = x * share
    slope = share + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    low = x.float().requires_grad_()
    out = shared_gelu.SharedGELU()(low)
    (gradient,) = torch.autograd.grad(out.sum(), low)
    # PyTorch's own is 1.2e-6.
    assert float((out.detach().double() - want).abs().max()) < 6e-7
    assert float((gradient.double() - slope).abs().max()) < 5e-7


def test_outside_gelu_in_bfloat16_differs_in_one_result_of_a_hundred_at_most():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2**18, generator=rng).mul(1.5).bfloat16()
    ours, plain = shared_gelu.SharedGELU()(x), F.gelu(x)
    assert float((ours != plain).float().mean()) < 0.01
    torch.testing.assert_close(ours, plain, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outside_norm_and_relu_are_one_function(dtype):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU())
    nn.init.normal_(plain[0].weight)
    nn.init.normal_(plain[0].bias)
    joined = copy.deepcopy(plain[0])
    joined.__class__ = norm_relu.NormReLU
    exact = copy.deepcopy(plain).double()
    x, grad = torch.randn(4, 8, 6, 6).to(dtype), torch.randn(4, 8, 6, 6).to(dtype)
    found = []
    for layer, kind in ((exact, torch.float64), (plain, dtype), (joined, dtype)):
        leaf = x.to(kind).requires_grad_()
        out = layer(leaf)
        assert out.dtype == kind
        gradients = torch.autograd.grad(out, (leaf, *layer.parameters()), grad.to(kind))
        *statistics, number = layer.buffers()
        assert number == 1
        found.append((out.detach(), *gradients, *statistics))
    for want, theirs, ours in zip(*found, strict=True):
        far = float((ours.double() - want).norm())
        # In float32 both are off by rounding in other orders.
        assert far <= 1.05 * float((theirs.double() - want).norm()) + 2e-6 * float(want.norm())
    torch.testing.assert_close(joined.eval()(x), plain.eval()(x))


def test_outside_forms_stand_where_their_layers_were():
    model = timm.create_model("lvvit_micro", img_size=32, num_classes=5)
    names = list(model.state_dict())
    for form in (space_to_depth, four_channels, shared_gelu, norm_relu):
        form.use(model)
    assert list(model.state_dict()) == names
    kinds = [type(layer).__name__ for layer in list(model.stem)[:6]]
    assert kinds == ["Conv2d", "NormReLU", "Identity"] * 2
    assert all(type(block.mlp.act) is shared_gelu.SharedGELU for block in model.blocks)

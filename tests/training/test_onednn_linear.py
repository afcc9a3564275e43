"""Linear layers computed with oneDNN, against float64 and PyTorch's own."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from densefeed.training import onednn_linear, speed, student
from densefeed.training.config import OptimOptions
from densefeed.training.onednn_linear import LEAST_WORK, OnednnLinear, is_faster, use_onednn
from densefeed.training.ranks import Ranks

CPU = torch.device("cpu")
# An operator of inductor's for x86 processors; its library may be left out of a build.
pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available()
    or not hasattr(torch.ops.mkldnn, onednn_linear.PRODUCT),
    reason="this PyTorch has no oneDNN",
)


def make_layer(inputs, outputs, bias=True):
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=bias)
    use_onednn(layer)
    assert type(layer) is OnednnLinear
    return layer


@pytest.fixture
def products():
    """Return a mock that counts oneDNN's products and computes them."""
    with mock.patch.object(onednn_linear, "multiply", wraps=onednn_linear.multiply) as counted:
        yield counted


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    ("shape", "outputs"),
    [((700, 64), 32), ((700, 24), 64), ((8, 197, 48), 48), ((2, 14, 14, 40), 33), ((1, 600), 500)],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_float64(shape, outputs, bias, products):
    """Wide and narrow outputs, tokens, maps, one row, sizes that are no multiple of a vector."""
    layer = make_layer(shape[-1], outputs, bias)
    exact = copy.deepcopy(layer).double()
    x, grad = torch.randn(shape, requires_grad=True), torch.randn(*shape[:-1], outputs)
    x64 = x.detach().double().requires_grad_()
    out, want = layer(x), F.linear(x64, exact.weight, exact.bias)
    out.backward(grad)
    want.backward(grad.double())
    assert products.call_count == 3
    pairs = [(out, want), (x.grad, x64.grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(layer.parameters(), exact.parameters(), strict=True)]
    for ours, theirs in pairs:
        # Sums of up to 1,576 numbers of about 1.
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


def test_any_memory_format(products):
    """A transposed input and an expanded gradient, as a mean over tokens has it."""
    layer, x = make_layer(64, 96), torch.randn(64, 200).T.requires_grad_()
    layer(x).mean(0).sum().backward()
    assert products.call_count == 3
    torch.testing.assert_close(x.grad, (layer.weight.sum(0) / 200).expand(200, -1))
    torch.testing.assert_close(layer.weight.grad, x.detach().mean(0).expand(96, -1))
    torch.testing.assert_close(layer.bias.grad, torch.ones(96))


@pytest.mark.parametrize("shape", [(200, 64), (4, 50, 64)])
def test_outputs_may_be_changed_in_place(shape, products):
    """As timm's NaFlexViT adds its positions."""
    layer, x = make_layer(64, 96), torch.randn(shape)
    layer(x).mul_(2).add_(1).sum().backward()
    assert products.call_count == 2
    torch.testing.assert_close(layer.bias.grad, torch.full((96,), 400.0))
    total = x.flatten(0, -2).sum(0)
    torch.testing.assert_close(layer.weight.grad, (2 * total).expand(96, -1), rtol=1e-4, atol=1e-4)


def test_only_needed_gradients_are_computed(products):
    layer = make_layer(64, 96)
    layer.weight.requires_grad_(False)
    layer(torch.randn(200, 64)).sum().backward()
    assert products.call_count == 1
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.bias.grad, torch.full((96,), 200.0))


def test_second_derivatives_are_those_of_float64():
    """As a penalty on the gradient needs them."""
    layer, x = make_layer(64, 96), torch.randn(200, 64, requires_grad=True)
    exact, found = copy.deepcopy(layer).double(), []
    for net, at in ((layer, x), (exact, x.detach().double().requires_grad_())):
        (grad,) = torch.autograd.grad(net(at).square().sum(), at, create_graph=True)
        grad.square().mean().backward()
        found.append([at.grad, net.weight.grad, net.bias.grad])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(0, 64), (64,), (1, 64), (LEAST_WORK // (64 * 96), 64)])
def test_small_products_are_pytorchs(shape, products):
    layer, x = make_layer(64, 96), torch.randn(shape)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert not products.called


def test_other_dtypes_are_pytorchs(products):
    layer, x = make_layer(64, 96), torch.randn(200, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    layer.double()
    assert torch.equal(layer(x.double()), F.linear(x.double(), layer.weight, layer.bias))
    assert not products.called


def test_a_compiled_layer_is_pytorchs():
    layer, x = make_layer(64, 96), torch.randn(200, 64)
    whole = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(whole(x), F.linear(x, layer.weight, layer.bias))


def test_layers_keep_names_hooks_and_parameters_and_subclasses_their_product():
    class Other(nn.Linear):
        pass

    net = nn.Sequential(nn.Linear(4, 4), Other(4, 4), nn.Sequential(nn.Linear(4, 4)))
    called, parameters = [], list(net.parameters())
    net[0].register_forward_hook(lambda *_: called.append(1))
    use_onednn(net)
    assert [type(m) for m in net] == [OnednnLinear, Other, nn.Sequential]
    assert type(net[2][0]) is OnednnLinear
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    net(torch.randn(2, 4))
    assert called == [1]
    use_onednn(net, False)
    assert [type(m) for m in (net[0], net[1], net[2][0])] == [nn.Linear, Other, nn.Linear]


@pytest.mark.parametrize(
    "name", ["AMD EPYC 9B45", "AMD Ryzen 9 7950X", "Intel(R) Xeon(R)", "arm64"]
)
@pytest.mark.parametrize("backend", [None, "mkl", "mkldnn"])
def test_it_is_for_amds_processors_and_builds_with_both_libraries(name, backend):
    """Builds without MKL multiply by another library, which may be as fast."""
    is_faster.cache_clear()
    with mock.patch.object(onednn_linear, "cpu_model", return_value=name):
        mkl, mkldnn = (
            mock.patch.object(
                getattr(torch.backends, lib), "is_available", lambda lib=lib: lib != backend
            )
            for lib in ("mkl", "mkldnn")
        )
        with mkl, mkldnn:
            assert is_faster() == (name.startswith("AMD") and backend is None)
    is_faster.cache_clear()


@pytest.mark.parametrize("faster", [True, False])
def test_students_and_their_averages_use_it_where_it_is_faster(faster):
    """And a step is the same up to rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    twin, ranks, x = copy.deepcopy(model), Ranks(0, 1, CPU), torch.randn(200, 64)
    with mock.patch.object(student, "is_faster", return_value=faster):
        ours = student.build_student(OptimOptions(batch=200, ema=0.9), model, model, ranks, None)
    for net in (ours.model, ours.ema.module):
        assert type(net[0]) is (OnednnLinear if faster else nn.Linear)
    loss, norm = student.update(ours, ranks, 0, [lambda: ours.model(x).square().mean()])
    want = twin(x).square().mean()
    want.backward()
    norms = torch.stack([p.grad.norm() for p in twin.parameters()])
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=0)
    torch.testing.assert_close(norm, norms.norm(), rtol=1e-5, atol=0)


def test_the_rate_of_products_is_that_of_the_faster_library():
    with (
        mock.patch.object(speed, "best_rate", side_effect=[1.0, 3.0]),
        mock.patch.object(speed, "is_faster", return_value=True),
    ):
        assert speed.matmul_rate(CPU, torch.float32) == 3.0

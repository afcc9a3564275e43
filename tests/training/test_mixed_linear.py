"""Linear layers with copies of their weights, and norms: outputs of autocast, float32 gradients."""

import copy
from itertools import product

import pytest
import timm
import torch
from torch import nn

import densefeed.models  # noqa: F401  (registers its models)
from densefeed.models.lvvit import Block, PatchProjection
from densefeed.training.mixed_linear import MixedConv2d, MixedLayerNorm, MixedLinear, WeightCopies

IMAGES = 4
# Rows of 16-bit numbers that float32 sums: rounding of 2^-24 a term.
FLOAT32 = dict(rtol=1e-5, atol=1e-5)


class Net(nn.Module):
    """Two layers, one without a bias, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 8, bias=False)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.first(x).relu())


def run(net, x, dtype, enabled=True):
    """Return the outputs of a net under autocast; its gradients are those of their squares."""
    with torch.autocast("cpu", dtype, enabled=enabled):
        out = net(x)
    out.double().square().sum().backward()
    return out


@pytest.mark.parametrize(
    ("shape", "by_image"),
    [*product([(IMAGES, 12), (IMAGES, 7, 12), (3 * IMAGES, 2, 5, 12), (3, 5, 12)], [False, True])],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_outputs_are_autocasts_and_gradients_those_of_rounded_numbers(shape, by_image, dtype):
    """Tables, tokens, windows, and rows that are no multiple of the images."""
    torch.manual_seed(0)
    net, x = Net(), torch.randn(shape, requires_grad=True)
    plain, plain_x = copy.deepcopy(net), x.detach().clone().requires_grad_()
    copies = WeightCopies([net], by_image)
    copies.update(dtype, IMAGES)
    out, want = run(net, x, dtype), run(plain, plain_x, dtype)
    assert torch.equal(out, want)
    assert torch.equal(x.grad, plain_x.grad)
    # What autocast rounds, as leaves in float64: their gradients are not rounded.
    with torch.no_grad(), torch.autocast("cpu", dtype):
        hidden = plain.first(x)
    grad_out = 2 * out.detach().double()
    rounded = grad_out.to(dtype).double()
    rows = rounded.flatten(0, -2)
    second = rows.T @ hidden.relu().double().flatten(0, -2)
    back = (rounded.to(dtype) @ plain.second.weight.to(dtype)).double() * (hidden > 0)
    first = back.flatten(0, -2).T @ x.detach().to(dtype).double().flatten(0, -2)
    grads = {name: parameter.grad for name, parameter in net.named_parameters()}
    for name, expected in (
        ("second.weight", second),
        ("first.weight", first),
        ("first.bias", back.flatten(0, -2).sum(0)),
    ):
        assert grads[name].dtype == torch.float32
        torch.testing.assert_close(grads[name].double(), expected, **FLOAT32)
    assert grads["unused.weight"] is None
    assert grads["unused.bias"] is None


def test_parameters_and_their_names_stay():
    net = Net()
    before, names = dict(net.named_parameters()), list(net.state_dict())
    WeightCopies([net], True).update(torch.bfloat16, IMAGES)
    assert isinstance(net.first, MixedLinear)
    assert list(net.state_dict()) == names
    assert {name: id(p) for name, p in net.named_parameters()} == {
        name: id(p) for name, p in before.items()
    }
    assert not list(net.buffers())


def test_copies_follow_updates_and_are_not_evaluated():
    torch.manual_seed(0)
    net, x = Net(), torch.randn(IMAGES, 7, 12)
    copies = WeightCopies([net], True)
    copies.update(torch.bfloat16, IMAGES)
    run(net, x, torch.bfloat16)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.5
        plain = Net()
        plain.load_state_dict(net.state_dict())
        # before the copies are updated
        assert torch.equal(net(x), plain(x))
    copies.update(torch.bfloat16, IMAGES)
    assert torch.equal(run(net, x, torch.bfloat16), run(plain, x, torch.bfloat16))
    # A step in float32 has no copies.
    copies.update(None, IMAGES)
    assert torch.equal(run(net, x, torch.bfloat16, False), run(plain, x, torch.bfloat16, False))


@pytest.mark.parametrize("by_image", [False, True])
def test_gradients_of_parts_add_up_and_frozen_layers_get_none(by_image):
    torch.manual_seed(0)
    net, x = Net(), torch.randn(2 * IMAGES, 7, 12)
    net.second.weight.requires_grad_(False)
    whole = copy.deepcopy(net)
    for model, parts in ((net, x.chunk(2)), (whole, [x])):
        copies = WeightCopies([model], by_image)
        for part in parts:
            copies.update(torch.bfloat16, len(part))
            run(model, part, torch.bfloat16)
    assert net.second.weight.grad is None
    for name in ("weight", "bias"):
        seen, want = getattr(net.first, name).grad, getattr(whole.first, name).grad
        assert want.abs().max() > 1
        torch.testing.assert_close(seen, want, **FLOAT32)


@pytest.mark.parametrize("padding_mode", ["zeros", "circular"])
def test_convolutions_have_the_outputs_and_gradients_of_autocast(padding_mode):
    torch.manual_seed(0)
    options = dict(stride=2, padding=1, padding_mode=padding_mode)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False, **options),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3, groups=2, **options),
    ).to(memory_format=torch.channels_last)
    plain, x = copy.deepcopy(net), torch.randn(IMAGES, 3, 9, 9)
    copies = WeightCopies([net], True)
    assert [type(part) for part in net] == [MixedConv2d, nn.ReLU, MixedConv2d]
    for _ in range(2):
        copies.update(torch.bfloat16, IMAGES)
        assert torch.equal(run(net, x, torch.bfloat16), run(plain, x, torch.bfloat16))
        for part, other in zip(net.parameters(), plain.parameters(), strict=True):
            assert part.grad.dtype == torch.float32
            assert torch.equal(part.grad, other.grad)
            assert part.grad.abs().max() > 0
            part.data.add_(0.1)
            other.data.add_(0.1)
    assert str(net) == str(plain).replace("Conv2d", "MixedConv2d")
    assert list(net.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(net(x), plain(x))


@pytest.mark.parametrize("by_image", [False, True])
def test_outside_gradients_of_projected_patches_are_not_rounded(by_image):
    """They are products as those of linear layers, summed in float32, not convolutions."""
    torch.manual_seed(0)
    net = nn.Sequential(PatchProjection(3, 8, 4, 4)).to(memory_format=torch.channels_last)
    plain, x = copy.deepcopy(net), torch.randn(IMAGES, 3, 12, 12, requires_grad=True)
    plain_x = x.detach().clone().requires_grad_()
    copies = WeightCopies([net], by_image)
    copies.update(torch.bfloat16, IMAGES)
    out = run(net, x, torch.bfloat16)
    # Sums in another order, rounded to 8 bits.
    torch.testing.assert_close(out, run(plain, plain_x, torch.bfloat16), rtol=2**-7, atol=2**-7)
    # The numbers as autocast rounds them, with gradients in float64.
    exact = copy.deepcopy(plain).double()
    with torch.no_grad():
        for part in exact.parameters():
            part.copy_(part.bfloat16())
    exact_x = x.detach().bfloat16().double().requires_grad_()
    exact.zero_grad()
    exact(exact_x).backward((2 * out.detach().double()).bfloat16().double())
    for part, other in zip(net.parameters(), exact.parameters(), strict=True):
        assert part.grad.dtype == torch.float32
        torch.testing.assert_close(part.grad.double(), other.grad, **FLOAT32)
    torch.testing.assert_close(x.grad, exact_x.grad.float(), rtol=2**-7, atol=2**-7)
    assert net[0].weight.grad.is_contiguous(memory_format=torch.channels_last)


FAMILIES = {
    "lvvit_micro": dict(img_size=32, depth=2, token_head=False),
    "dhvt_tiny_cifar_patch4": dict(embed_dim=32, depth=2, num_heads=4),
    "t2t_vit_7": dict(img_size=32, embed_dim=32, depth=2, num_heads=2, token_head=False),
    "test_vit": dict(img_size=32),
    "swin_tiny_patch4_window7_224": dict(
        img_size=32, window_size=4, embed_dim=16, depths=(1, 1), num_heads=(2, 2), drop_path_rate=0
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_the_gradients_of_float32_as_nearly_as_under_autocast(name):
    """Errors of all gradients together, relative to their norm; autocast's are about 1 %."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **FAMILIES[name])
    plain, exact, x = copy.deepcopy(model), copy.deepcopy(model), torch.randn(IMAGES, 3, 32, 32)
    copies = WeightCopies([model], True)
    assert copies.layers
    copies.update(torch.bfloat16, IMAGES)
    for net in (model, plain, exact):
        run(net, x, torch.bfloat16, enabled=net is not exact)
    flat = [
        torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        for net in (model, plain, exact)
    ]
    ours, autocasts = ((grad - flat[2]).norm() / flat[2].norm() for grad in flat[:2])
    assert 0 < ours < 1.1 * autocasts < 0.1


class Norms(nn.Module):
    """The norms of a block, with parameters that are not ones and zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16, eps=1e-3)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x):
        return self.norm2(3 * self.norm1(x) + x + 1)


@pytest.mark.parametrize("shape", [(IMAGES, 7, 16), (IMAGES, 16), (2, 7, 16)], ids=str)
def test_norms_have_the_outputs_and_gradients_of_layer_norm(shape):
    """Tokens of each image; a table, and other images, as where a model is called by itself."""
    torch.manual_seed(0)
    net, x = Norms(), torch.randn(shape, requires_grad=True)
    plain, exact = copy.deepcopy(net), copy.deepcopy(net).double()
    copies = WeightCopies([net], True)
    copies.update(torch.bfloat16, IMAGES)
    kinds = type(net.norm1), type(net.norm2)
    assert kinds == (nn.LayerNorm, MixedLayerNorm)
    assert list(net.state_dict()) == list(plain.state_dict())
    found = []
    for model, image in ((net, x), (plain, x), (exact, x.detach().double().requires_grad_())):
        image.grad = None
        out = model(image)
        (out * torch.linspace(-1, 1, 16)).sum().backward()
        found.append((out.detach(), [image.grad, *(p.grad for p in model.parameters())]))
    (out, grads), (want, _), (_, expected) = found
    assert torch.equal(out, want)
    for grad, one in zip(grads, expected, strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad.double(), one, **FLOAT32)


def test_norms_are_not_summed_by_image_where_ranks_share_gradients():
    net = Norms()
    WeightCopies([net], False).update(torch.bfloat16, IMAGES)
    assert type(net.norm2) is nn.LayerNorm


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_compilation_serves_every_step(backend):
    """Without graph breaks; gradients are those of the layers in eager mode."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    net = Net()
    compiled, both = copy.deepcopy(net), []
    for model in (net, compiled):
        copies = WeightCopies([model], True)
        call = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(IMAGES, 7, 12)
            copies.update(torch.bfloat16, IMAGES)
            run(call if model is compiled else model, x, torch.bfloat16)
            with torch.no_grad():
                model.first.weight += 0.5
        both.append([parameter.grad for parameter in model.parameters()])
    # A number that is rounded to 8 bits the other way changes a sum of 28 by as much.
    torch.testing.assert_close(both[1], both[0], rtol=0.02, atol=0.02)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_layers_with_hooks_or_parameters_of_their_own_stay():
    """Their hooks and parameters would be lost."""
    net = nn.Module()
    net.hooked, net.extended, net.plain = (nn.Linear(3, 3) for _ in range(3))
    net.hooked.register_forward_hook(lambda *_: None)
    net.extended.gain = nn.Parameter(torch.ones(()))
    WeightCopies([net], by_image=True)
    kinds = type(net.hooked), type(net.extended), type(net.plain)
    assert kinds == (nn.Linear, nn.Linear, MixedLinear)


@pytest.mark.parametrize("by_image", [False, True])
def test_a_deep_copy_has_no_copies_of_weights(by_image):
    """Nothing would update them: it computes with its own weights."""
    net = nn.Sequential(nn.Linear(3, 3))
    copies = WeightCopies([net], by_image)
    copies.update(torch.bfloat16, 2)
    other, x = copy.deepcopy(net), torch.ones(2, 3)
    with torch.no_grad():
        other[0].weight.mul_(3)
    assert net[0].low_weight is not None
    assert torch.equal(other(x).detach(), torch.nn.functional.linear(x, *other.parameters()))


def test_outside_a_compiled_evaluation_follows_weights_that_changed():
    """As with --sam-rho, which restores weights after a step: its rows are views of them."""
    torch.manual_seed(0)
    block, x = Block(16, 2, 2.0, 0.0), torch.randn(2, 3, 16)
    copies = WeightCopies([block], by_image=True)
    copies.update(torch.bfloat16, 2)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(1)
        want = block(x)
        block.compile(dynamic=False, backend="eager")
        torch.testing.assert_close(block(x), want)

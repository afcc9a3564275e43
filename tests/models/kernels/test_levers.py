"""The switch of forms of layers that are under test."""

import copy

import pytest
import timm
import torch

from densefeed.models.kernels.levers import LEVERS, VARIABLE, use_levers
from densefeed.system.errors import UserError


def build():
    torch.manual_seed(0)
    return timm.create_model("lvvit_micro", img_size=32, num_classes=5)


def test_outside_no_form_is_used_unless_it_is_named(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    model, plain = build(), build()
    use_levers(model)
    assert [type(part) for part in model.modules()] == [type(part) for part in plain.modules()]
    monkeypatch.setenv(VARIABLE, "attention speed")
    with pytest.raises(UserError, match=rf"{VARIABLE}: speed is not among attention.*; leave it"):
        use_levers(model)


@pytest.mark.parametrize("name", LEVERS)
def test_outside_a_form_keeps_parameters_and_results(monkeypatch, name):
    """On a CPU in float32: outputs, gradients, running statistics; used twice as once."""
    monkeypatch.setenv(VARIABLE, name)
    models, found = (build().train(), build().train()), []
    for _ in range(2):
        use_levers(models[0])
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    for model in models:
        logits = model(x)
        (logits.cls.square().sum() + logits.tokens.square().sum()).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        state = model.state_dict()
        found.append((*logits, gradients, state, model.eval()(x)))
    torch.testing.assert_close(found[0], found[1], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("names", ["four-channels space-to-depth", "space-to-depth four-channels"])
def test_outside_two_forms_of_a_layer_are_the_last_in_any_order(monkeypatch, names):
    """In one order the network asked for four channels, and its convolution took three."""
    monkeypatch.setenv(VARIABLE, names)
    model, plain, x = build().train(), build().train(), torch.randn(4, 3, 32, 32)
    use_levers(model)
    wide = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, model.image_channels - 3))
    torch.testing.assert_close(model(wide).cls, plain(x).cls, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("lever", ["norm-relu", "gelu"])
def test_outside_a_lever_leaves_layers_of_float64_as_they_are(monkeypatch, lever):
    """`norm-relu` failed in the update of its statistics; `gelu` computed in float32."""
    torch.manual_seed(0)
    plain = timm.create_model("lvvit_micro", num_classes=3).double()
    monkeypatch.setenv("DENSEFEED_LEVERS", lever)
    model = copy.deepcopy(plain)
    use_levers(model)
    x = torch.randn(2, 3, 48, 48, dtype=torch.float64)
    assert torch.equal(model.train()(x).tokens, plain.train()(x).tokens)

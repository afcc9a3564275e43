"""Laws that the models of every family obey; the tests of a family name what is special in it."""

import copy
from collections.abc import Callable

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F


def list_outputs(out: Tensor | tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return the outputs of a model's one or two heads as a list."""
    return [out] if torch.is_tensor(out) else [out.cls, out.tokens]


def check_training_step(
    model: nn.Module, side: int, is_unused: Callable[[str], bool] = lambda name: False
) -> None:
    """A step lowers the loss of five classes; every parameter that has an effect gets a finite
    nonzero gradient.
    """
    image, label = torch.randn(6, 3, side, side), torch.tensor([0, 1, 2, 3, 4, 0])

    def loss() -> Tensor:
        # Draws of drop-path are equal before and after the step.
        torch.manual_seed(1)
        outputs = list_outputs(model(image))
        return sum(F.cross_entropy(out if out.ndim == 2 else out.mean(1), label) for out in outputs)

    before = loss()
    before.backward()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.any() != is_unused(name), name
            parameter -= 0.01 * parameter.grad
    assert loss() < before
    assert model.eval()(image).shape == (6, 5)


def check_compiles(model: nn.Module, *given: Tensor) -> None:
    """One graph computes what the model does."""
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    both = list_outputs(compiled(*given)), list_outputs(model(*given))
    for got, want in zip(*both, strict=True):
        torch.testing.assert_close(got, want)


def check_heads(model: nn.Module, name: str, image: Tensor) -> Tensor:
    """As in timm's tests: logits are those of the pooled features, which remain without a
    classifier; the configuration names modules of the model. Returns the features.
    """
    cfg, head = timm.get_pretrained_cfg(name), model.get_classifier()
    assert f"{cfg.first_conv}.weight" in model.state_dict()
    assert "head" in cfg.classifier
    assert model.head in (head if isinstance(head, tuple) else (head,))
    with torch.no_grad():
        features = model.forward_features(image)
        torch.testing.assert_close(model.forward_head(features), model(image))
        pooled = model.forward_head(features, pre_logits=True)
        assert pooled.shape == (len(image), model.num_features)
        assert model.head_hidden_size == model.num_features
        model.reset_classifier(0)
        assert torch.equal(model(image), pooled)
    return features

"""Gradients of one image through BatchNorm of a map, in models that cut maps out of tokens."""

import pytest
import timm
import torch
from torch import Tensor, nn

from densefeed.models.map_norm import MapNorm

MODELS = {
    "dhvt_micro": dict(depth=2),
    "cvt_13": dict(dims=(16, 32, 48), depths=(1, 1, 2), num_heads=(1, 2, 3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_one_image_are_half_those_of_two_copies(name):
    """With `nn.BatchNorm2d`, errors on CPUs are as large as the gradients in PyTorch 2.15."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **MODELS[name]).double().eval()
    assert any(isinstance(part, MapNorm) for part in model.modules())
    image = torch.randn(1, 3, 64, 64, dtype=torch.float64)

    def gradients(copies: int) -> list[Tensor]:
        pixels = image.expand(copies, -1, -1, -1).clone().requires_grad_()
        loss = model(pixels)[:, 1].sum() / copies
        found = torch.autograd.grad(loss, [pixels, *model.parameters()], allow_unused=True)
        pixels_sum = found[0].sum(0)
        return [pixels_sum, *(part for part in found[1:] if part is not None)]

    for one, two in zip(gradients(1), gradients(2), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-10 * two.abs().max().item() + 1e-15)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_outputs_and_statistics_are_those_of_batch_norm(training):
    torch.manual_seed(0)
    ours, stock = MapNorm(6).train(training), nn.BatchNorm2d(6).train(training)
    for count in (1, 3):
        map_NDRC = torch.randn(count, 6, 4, 5)
        torch.testing.assert_close(ours(map_NDRC), stock(map_NDRC))
    torch.testing.assert_close(ours.state_dict(), stock.state_dict())

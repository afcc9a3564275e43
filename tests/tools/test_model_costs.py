"""Costs of models against counts by hand and published figures."""

import pytest
import torch
from timm.layers import use_fused_attn
from torch import nn

from densefeed.system.errors import UserError
from densefeed.tools.model_costs import Costs, ModelCosts, costs_by_name, main, measure_costs


def test_layers_products_and_norms_are_counted_separately():
    """4 x 4 pixels: a convolution to 2 x 2, both norms, a linear layer, an activation product."""

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 5, 3, stride=2, padding=1), nn.BatchNorm2d(5)
            self.norm, self.linear = nn.LayerNorm(5), nn.Linear(5, 7)
            self.linear.bias.requires_grad_(False)

        def forward(self, x):
            x = self.norm(self.bn(self.conv(x)).flatten(2).transpose(1, 2))
            return self.linear(x) * (x @ x.transpose(1, 2)).mean()

    with torch.device("meta"):
        costs = measure_costs(Small(), 4)
    assert costs == Costs(
        3 * 5 * 9 + 5 + 10 + 10 + 35, 4 * 3 * 5 * 9 + 4 * 35, 4 * 4 * 5, 2 * 20 + 5 * 20
    )
    assert costs.whole == pytest.approx((costs.layers + costs.attention + costs.norms) / 1e9)
    assert costs.without_attention == pytest.approx((costs.layers + costs.norms) / 1e9)


@pytest.mark.parametrize(
    ("name", "without", "whole"),
    [("deit_small_patch16_224", 4.25, 4.61), ("swin_tiny_patch4_window7_224", None, 4.51)],
)
def test_costs_of_timms_models_equal_the_counts_of_fvcore(name, without, whole):
    """timm's setting for fused attention is restored."""
    fused = use_fused_attn()
    costs, size = costs_by_name(name)
    assert (size, use_fused_attn()) == (224, fused)
    assert round(costs.whole, 2) == whole
    assert without is None or round(costs.without_attention, 2) == without


def test_the_command_prints_a_line_per_model(command):
    done = command(
        "tools/model_costs.py",
        "dhvt_tiny_cifar_patch4",
        "dhvt_small_imagenet_patch16",
        "t2t_vit_7",
        "--size",
        64,
    )
    assert done.returncode == 0, done.stderr
    assert "6,008,650" in done.stdout
    assert "4,255,694" in done.stdout
    assert "dhvt_small_imagenet_patch16 " in done.stdout  # the whole name, in a pipe too


def test_sizes_that_a_model_cannot_take_are_refused():
    with pytest.raises(UserError, match=r"vit_tiny_patch16_224 cannot take inputs of 65 px \("):
        main(ModelCosts(models=("vit_tiny_patch16_224",), size=65))


def test_sizes_that_no_image_has_are_refused():
    with pytest.raises(UserError, match="--size is 65,536, and must be from 0 to 65,535"):
        ModelCosts(models=("resnet18",), size=2**16)


@pytest.mark.parametrize(
    ("words", "why"),
    [(["dhvt_huge"], "timm knows no model 'dhvt_huge'"), ([], "name at least one model")],
)
def test_unknown_models_are_refused(words, why):
    with pytest.raises(UserError, match=why):
        main(ModelCosts(models=tuple(words)))

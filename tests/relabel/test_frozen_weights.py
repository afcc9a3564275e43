"""Weights that are standardized once, against timm's modules and against float64."""

from collections import Counter
from dataclasses import replace

import pytest
import timm
import torch
from timm.layers import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from timm.models.nfnet import NormFreeNet, _dm_nfnet_cfg
from timm.models.resnetv2 import ResNetV2
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from densefeed.relabel.frozen_weights import freeze_weights
from densefeed.relabel.scoring import Scorer
from densefeed.relabel.teacher import Teacher, weights_hash

CONFIG = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "interpolation": "bilinear"}
# Operations that only a standardization needs in a network without BatchNorm.
STATISTICS = ("native_batch_norm", "batch_norm", "_native_batch_norm_legit", "var_mean", "std_mean")


class Operations(TorchDispatchMode):
    """Counts ATen operations by name."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def statistics(self):
        return sum(self.count[name] for name in STATISTICS)


def perturb(module):
    """Give every weight a value of its own: gains begin as ones, some biases as zeros."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data += (0.1 if parameter.ndim == 1 else 0.02) * noise
    return module.eval()


def standardize(conv):
    """Compute the standardized weight in float64, by its definition."""
    weight = conv.weight.double()
    var, mean = torch.var_mean(weight, (1, 2, 3), unbiased=False, keepdim=True)
    scale = conv.gain.double() * conv.scale if hasattr(conv, "gain") else 1
    return (weight - mean) / (var + conv.eps).sqrt() * scale


LAYERS = [
    pytest.param(ScaledStdConv2d(6, 8, 3, stride=2, groups=2, gamma=1.7), id="scaled"),
    pytest.param(ScaledStdConv2dSame(6, 8, 3, stride=2, gamma=1.7), id="scaled, same padding"),
    pytest.param(ScaledStdConv2dSame(6, 8, 3, dilation=2, bias=False), id="scaled, dilated"),
    pytest.param(StdConv2d(6, 8, 5, bias=True), id="plain"),
    pytest.param(StdConv2dSame(6, 8, 3, stride=2), id="plain, same padding"),
]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("size", [9, 16])
def test_a_layer_gives_the_outputs_of_timms(layer, size):
    """Odd and even sizes, which `same` padding pads differently."""
    perturb(layer)
    image = torch.randn(2, 6, size, size, generator=torch.Generator().manual_seed(0))
    plain = freeze_weights(nn.Sequential(layer))[0]
    assert type(plain).__module__ != type(layer).__module__
    with torch.no_grad():
        torch.testing.assert_close(plain(image), layer(image), rtol=1e-6, atol=1e-6)
        # A rounding each of the mean, the variance, the quotient and the two factors.
        torch.testing.assert_close(
            plain.weight.double(), standardize(layer), rtol=8 * 2.0**-24, atol=1e-7
        )


def test_a_bf16_weight_is_rounded_once():
    """As autocast rounds it. Standardized in bfloat16, half of the weights would differ."""
    layer = perturb(ScaledStdConv2d(32, 64, 3))
    plain = freeze_weights(nn.Sequential(layer), torch.bfloat16)[0]
    assert plain.weight.dtype == plain.bias.dtype == torch.bfloat16
    # Float32's own rounding moves few weights across the middle between two bfloat16 numbers.
    same = plain.weight == standardize(layer).to(torch.bfloat16)
    assert same.float().mean() > 0.99
    image = torch.randn(2, 32, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(plain(image), layer(image), rtol=2.0**-7, atol=2.0**-7)


def small_dm_nfnet():
    """DeepMind's NFNet, whose padding is `same`, with one narrow block in each of two stages."""
    config = replace(_dm_nfnet_cfg((1, 1), (32, 64)), stem_chs=16, group_size=16, num_features=0)
    return NormFreeNet(config, num_classes=7)


MODELS = {
    "NFNet": lambda: timm.create_model("test_nfnet", num_classes=7),
    "DeepMind's NFNet": small_dm_nfnet,
    "BiT": lambda: ResNetV2((1, 1), (128, 256), 7, conv_layer=StdConv2d, stem_type="fixed"),
    "hybrid ViT": lambda: timm.create_model(
        "vit_tiny_r_s16_p8_224", num_classes=7, img_size=64, embed_dim=48, depth=1
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_frozen_model_gives_the_models_outputs_and_leaves_it_as_it_was(name):
    model = perturb(MODELS[name]())
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    hash_before, kinds = weights_hash(model), Counter(map(type, model.modules()))
    frozen = freeze_weights(model)
    with torch.no_grad(), Operations() as operations:
        got = frozen(image)
    assert operations.statistics() == 0
    with torch.no_grad(), Operations() as operations:
        want = model(image)
    assert operations.statistics() > 0
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert weights_hash(model) == hash_before
    assert Counter(map(type, model.modules())) == kinds
    # Only the standardized weights take memory again.
    (own, of_model) = (dict(m.named_parameters()) for m in (frozen, model))
    head = [key for key in own if key.startswith("head")]
    assert head
    assert all(own[key] is of_model[key] for key in head)


def test_what_standardizes_no_weights_is_not_copied():
    model = timm.create_model("test_resnet", num_classes=7)
    assert freeze_weights(model) is model


def test_layers_with_a_behavior_of_their_own_are_kept():
    class Noisy(StdConv2d):
        def forward(self, x):
            return super().forward(x) + 1

    hooked = StdConv2d(3, 4, 1)
    hooked.register_forward_hook(lambda module, given, out: out + 1)
    both = nn.Sequential(Noisy(3, 3, 1), hooked, StdConv2d(4, 4, 1))
    frozen = freeze_weights(both)
    assert [type(layer) for layer in frozen] == [Noisy, StdConv2d, nn.Conv2d]
    image = torch.ones(1, 3, 2, 2)
    with torch.no_grad():
        torch.testing.assert_close(frozen(image), both(image))


@pytest.mark.slow
def test_a_forward_pass_of_nfnet_f6_has_half_of_the_operations():
    """On the meta device: shapes without values."""
    with torch.device("meta"):
        model, image = timm.create_model("dm_nfnet_f6").eval(), torch.zeros(1, 3, 576, 576)
    counts = []
    for network in (model, freeze_weights(model)):
        with torch.no_grad(), Operations() as operations:
            features = network.forward_features(image)
        assert features.shape == (1, 3072, 18, 18)
        counts.append((sum(operations.count.values()), operations.statistics()))
    (before, standardized), (after, left) = counts
    assert (standardized, left) == (345, 0)
    assert after < before / 2


def test_a_scored_batch_standardizes_no_weights():
    """The teacher itself, whose weights the store's header hashes, still does."""
    model = perturb(timm.create_model("test_nfnet", num_classes=7))
    teacher = Teacher(model, 96, "squash", CONFIG)
    pictures = torch.zeros(1, 1, 96, 96, 3, dtype=torch.uint8)
    counts, maps = [], []
    for score in (teacher, Scorer(teacher, torch.device("cpu")).logits):
        with torch.no_grad(), Operations() as operations:
            maps.append(score(pictures))
        counts.append(operations.statistics())
    assert counts == [25, 0]
    torch.testing.assert_close(maps[1], maps[0], rtol=1e-5, atol=1e-5)

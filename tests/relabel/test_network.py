"""Cells of a network against its own output, family by family, with random weights."""

import pytest
import timm
import torch
from timm.models.volo import VOLO
from torch import nn

from densefeed.models import lvvit  # noqa: F401  (registers)
from densefeed.relabel.class_map import ClassMap
from densefeed.relabel.network import Network, preprocessing_config
from densefeed.system.errors import UserError

CONFIG = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "interpolation": "bilinear"}
CLASSES = 7
# Name, arguments that make it small, input size, cells a side.
# The head averages and then is linear.
LINEAR = [
    ("test_nfnet", {}, 96, 3),
    ("test_resnet", {}, 96, 3),
    ("test_efficientnet", {}, 96, 3),
    ("regnety_002", {}, 64, 2),
    ("test_maxvit", {}, 160, 5),
    ("test_coatnet", {}, 160, 5),
    (
        "swin_tiny_patch4_window7_224",
        dict(img_size=64, window_size=2, embed_dim=16, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2)),
        64,
        2,
    ),
    ("mixer_s32_224", dict(img_size=96), 96, 3),
]
OTHERS = [
    ("test_convnext", {}, 96, 3),  # a norm after the average
    ("test_mambaout", {}, 96, 3),  # channels last, a norm and a layer after the average
    ("mobilenetv3_small_050", {}, 64, 2),  # a layer and its activation after the average
    # fc_norm
    ("beit_base_patch16_224", dict(img_size=64, embed_dim=24, depth=1, num_heads=2), 64, 4),
    ("eva02_tiny_patch14_224", dict(img_size=56, depth=1), 56, 4),  # fc_norm
    ("test_vit2", {}, 64, 4),  # fc_norm, a register token
    ("test_vit", {}, 64, 4),  # a class token
    ("test_vit3", {}, 64, 4),  # pooled by attention
    ("deit_tiny_distilled_patch16_224", dict(img_size=64, depth=1), 64, 4),  # two heads
]


def make_model(name, options):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=CLASSES, **options)
    if hasattr(model, "set_input_size") and not options and name.startswith("test_vit"):
        model.set_input_size(img_size=(64, 64))
    # Initial biases and some initial heads are zero, and an initial norm changes nothing.
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name or not parameter.any():
            nn.init.normal_(parameter, mean=float(name.endswith("weight")), std=0.5)
    return model.eval()


def random_images(size, count=2):
    return torch.randint(
        0,
        256,
        (count, size, size, 3),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(1),
    )


def normalize(image_NHWC):
    mean, std = torch.tensor(CONFIG["mean"]), torch.tensor(CONFIG["std"])
    return ((image_NHWC.float() / 255 - mean) / std).permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("name", "options", "size", "side"), LINEAR, ids=[case[0] for case in LINEAR]
)
def test_the_mean_over_cells_of_a_linear_head_is_the_models_own_output(name, options, size, side):
    model = make_model(name, options)
    with torch.no_grad():
        logits = Network(model, size, CONFIG)(random_images(size))
        assert logits.shape == (2, side, side, CLASSES)
        assert logits.std((1, 2)).min() > 1e-4  # cells differ
        torch.testing.assert_close(
            logits.mean((1, 2)), model(normalize(random_images(size))), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    ("name", "options", "size", "side"), LINEAR + OTHERS, ids=[case[0] for case in LINEAR + OTHERS]
)
def test_a_cell_is_the_models_output_for_features_that_are_this_cell_everywhere(
    name, options, size, side
):
    """The model's own head on whole features that are equal to one cell at every position.

    No reshaping of ours is involved.
    """
    model = make_model(name, options)
    prefix = getattr(model, "num_prefix_tokens", 0)
    with torch.no_grad():
        logits = Network(model, size, CONFIG)(random_images(size))
        features = model.forward_features(normalize(random_images(size)))
        assert logits.shape == (2, side, side, CLASSES)
        for row, column in [(0, 0), (0, 1), (side - 1, 0), (1, side - 1)]:
            if features.ndim == 3:
                everywhere = features[:, prefix + row * side + column, None].expand_as(features)
            elif features.shape[1] == features.shape[2]:
                everywhere = features[:, row, column, None, None].expand_as(features)
            else:
                everywhere = features[:, :, row, column, None, None].expand_as(features)
            torch.testing.assert_close(
                logits[:, row, column], model.forward_head(everywhere), rtol=1e-4, atol=1e-4
            )


def test_a_cell_is_features_times_the_classifier_with_its_bias():
    """Against the classifier as a 1x1 convolution."""
    model = make_model("test_nfnet", {})
    with torch.no_grad():
        features = model.forward_features(normalize(random_images(64)))
        want = torch.nn.functional.conv2d(
            features, model.head.fc.weight[:, :, None, None], model.head.fc.bias
        )
        torch.testing.assert_close(
            Network(model, 64, CONFIG)(random_images(64)),
            want.permute(0, 2, 3, 1),
            rtol=1e-4,
            atol=1e-5,
        )


def test_distilled_heads_are_averaged_and_norms_applied():
    """DeiT's two linear heads and BEiT's norm before its head, written out."""
    deit, beit = make_model(*OTHERS[8][:2]), make_model(*OTHERS[3][:2])
    with torch.no_grad():
        x = normalize(random_images(64))
        tokens = deit.forward_features(x)[:, 2:]
        want = (deit.head(tokens) + deit.head_dist(tokens)) / 2
        torch.testing.assert_close(
            Network(deit, 64, CONFIG)(random_images(64)).flatten(1, 2), want, rtol=1e-4, atol=1e-4
        )
        want = beit.head(beit.fc_norm(beit.forward_features(x)[:, 1:]))
        torch.testing.assert_close(
            Network(beit, 64, CONFIG)(random_images(64)).flatten(1, 2), want, rtol=1e-4, atol=1e-4
        )


def test_lvvit_uses_its_token_head():
    model = make_model("lvvit_micro", {})
    with torch.no_grad():
        logits = Network(model, 64, CONFIG)(random_images(64))
        assert logits.shape == (2, 8, 8, CLASSES)
        x = normalize(random_images(64))
        want = model.head(model.forward_features(x)[:, 0]) + 0.5 * logits.flatten(1, 2).amax(1)
        torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)


def test_volo_uses_its_token_head():
    """Against its training mode, whose second output is that of the tokens."""
    torch.manual_seed(0)
    dims, ones = (24, 48, 48, 48), (1, 1, 1, 1)
    model = VOLO(
        layers=ones,
        img_size=64,
        num_classes=CLASSES,
        embed_dims=dims,
        num_heads=ones,
        use_mix_token=False,
    ).eval()
    nn.init.normal_(model.aux_head.bias)
    with torch.no_grad():
        logits = Network(model, 64, CONFIG)(random_images(64))
        model.training = True
        _, tokens, _ = model.forward_train(normalize(random_images(64)))
        torch.testing.assert_close(logits.flatten(1, 2), tokens, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "size", "words"),
    [
        (
            "cait_xxs24_224",
            dict(img_size=64, depth=1),
            64,
            "classifies a class token that alone passes its last blocks",
        ),
        (
            "xcit_nano_12_p16_224",
            dict(img_size=64, depth=1),
            64,
            "classifies a class token that alone",
        ),
        (
            "pit_ti_224",
            dict(img_size=64),
            64,
            r"gives 1 tokens \(1 x 1\), and a map must be a square table",
        ),
        (
            "crossvit_tiny_240",
            dict(img_size=240, depth=((1, 1, 0),) * 3),
            240,
            "gives features of kind list, and a teacher must keep",
        ),
        ("test_resnet", dict(num_classes=0), 64, "has no classifier"),
    ],
)
def test_models_whose_classifier_fits_no_cell_are_refused_by_name(name, options, size, words):
    model = timm.create_model(name, **{"num_classes": CLASSES} | options)
    with pytest.raises(UserError, match=rf"my {name} {words}"), torch.no_grad():
        Network(model, size, CONFIG, name=f"my {name}")(random_images(size))


def test_tables_that_are_not_square_are_refused():
    """36 tokens are 6 x 6 by their number, and 9 x 4 by the model's grid size."""
    model = timm.create_model("test_vit", num_classes=2, img_size=(72, 64), patch_size=(8, 16))
    model.patch_embed.img_size = None
    with (
        pytest.raises(
            UserError, match=r"test_vit gives 36 tokens \(9 x 4\), and a map must be a square table"
        ),
        torch.no_grad(),
    ):
        Network(model, 72, CONFIG, name="test_vit")._classify_features(
            torch.zeros(1, 37, model.num_features)
        )
    model = timm.create_model("test_resnet", num_classes=2)
    model.forward_features = lambda x: torch.zeros(len(x), model.num_features, 2, 3)
    with (
        pytest.raises(UserError, match=r"ResNet gives 2 x 3 cells, and a map must be square"),
        torch.no_grad(),
    ):
        Network(model, 64, CONFIG)(random_images(64))
    model.forward_features = lambda x: torch.zeros(len(x), 5)
    with (
        pytest.raises(
            UserError,
            match=r"gives features of shape \(2, 5\), and a teacher must keep spatial positions",
        ),
        torch.no_grad(),
    ):
        Network(model, 64, CONFIG)(random_images(64))


def test_a_model_that_reads_a_class_token_has_a_caveat():
    assert (
        "was trained to classify its class token"
        in Network(make_model("test_vit", {}), 64, CONFIG, name="x").caveat
    )
    for name in ("test_vit2", "test_resnet", "lvvit_micro"):
        assert not Network(make_model(name, {}), 64, CONFIG).caveat


class Own(nn.Module):
    """Defines all of its preprocessing; cells of 8 x 8 pixels, classes mean red, green, blue."""

    num_classes, mean, std, interpolation = (
        3,
        (0.0, 0.0, 0.0),
        torch.full((3, 1, 1), 1 / 255),
        "lanczos",
    )

    def forward_token_logits(self, image_NCHW):
        return torch.nn.functional.avg_pool2d(image_NCHW, 8)


def test_the_preprocessing_of_a_users_module_is_used():
    config = preprocessing_config(Own())
    assert config["mean"] == (0, 0, 0)
    assert config["interpolation"] == "lanczos"
    image = random_images(32)
    want = image.double().unflatten(2, (4, 8)).unflatten(1, (4, 8)).mean((2, 4))
    torch.testing.assert_close(
        Network(Own(), 32, config)(image).double(), want, rtol=1e-5, atol=1e-3
    )
    assert preprocessing_config(nn.Identity()) == {
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "interpolation": "bicubic",
    }
    assert preprocessing_config(timm.create_model("test_vit"))["mean"] == (0.5, 0.5, 0.5)
    module = nn.Identity()
    # In float32 the last two are 0 and infinite.
    for std in ((1.0, 2.0), (0.2, 0.2, 0.0), (0.2, 0.2, 1e-320), (0.2, 0.2, 1e300)):
        module.std = std
        with pytest.raises(
            UserError, match=r"the std of Identity must be three numbers, .* from 1e-6 to 1e6$"
        ):
            preprocessing_config(module)
    with pytest.raises(
        UserError, match="Identity needs images resized by 'nearest', and only bilinear"
    ):
        Network(nn.Identity(), 32, CONFIG | {"interpolation": "nearest"})
    with pytest.raises(UserError, match=r"has forward_features and forward_head as in timm"):
        Network(nn.Flatten(), 32, CONFIG)(random_images(32))


def test_a_class_map_adds_the_probabilities_of_merged_classes():
    network = Network(Own(), 16, CONFIG, ClassMap(torch.tensor([0, 2]), torch.tensor([0, 0]), 1))
    image = random_images(16)
    want = Network(Own(), 16, CONFIG)(image)[..., [0, 2]].logsumexp(-1, keepdim=True)
    torch.testing.assert_close(network(image), want, rtol=1e-6, atol=1e-5)


def test_an_image_of_another_size_is_resized_on_the_device():
    """Against Pillow: one rounding to 8 bits and the order of sums differ."""
    import numpy as np
    from PIL import Image

    picture = Image.fromarray(random_images(64)[0].numpy()).resize(
        (48, 48), Image.Resampling.BICUBIC
    )
    for word, filter in (
        ("bilinear", Image.Resampling.BILINEAR),
        ("bicubic", Image.Resampling.BICUBIC),
    ):
        small = torch.from_numpy(np.array(picture.resize((16, 16), filter)))[None]
        network = Network(Own(), 16, preprocessing_config(Own()) | {"interpolation": word})
        got, want = network(torch.from_numpy(np.array(picture))[None]), network(small)
        assert (got - want).abs().max() < 0.6

"""A teacher's cells against timm's own answer."""

import numpy as np
import pytest
import timm
import torch
from densefeed.models import lvvit  # noqa: F401  (registers)
from densefeed.relabel.files import UserError
from densefeed.relabel.rendering import render
from densefeed.relabel.teacher import Teacher, weights_hash
from PIL import Image

CONFIG = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "interpolation": "bilinear"}


def normalised(image_NHWC):
    mean, std = torch.tensor(CONFIG["mean"]), torch.tensor(CONFIG["std"])
    return ((image_NHWC.float() / 255 - mean) / std).permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("name", "size", "side"),
    [
        ("test_nfnet", 96, 3),  # NF feature map, final convolution
        ("test_resnet", 96, 3),  # plain feature map
        ("test_efficientnet", 96, 3),  # convolutional head
        ("test_vit", 160, 10),  # class token
        ("test_vit2", 64, 4),  # register tokens, averaged
    ],
)
def test_the_mean_over_cells_is_the_models_own_answer(name, size, side):
    """True for heads that average linearly; for a class token only the shape can be checked."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7).eval()
    image = torch.randint(0, 256, (2, size, size, 3), dtype=torch.uint8)
    logits = Teacher(model, size, "squash", CONFIG)(image)
    assert logits.shape == (2, side, side, 7)
    if getattr(model, "global_pool", "avg") == "avg" and not getattr(model, "num_prefix_tokens", 0):
        with torch.no_grad():
            torch.testing.assert_close(logits.mean((1, 2)), model(normalised(image)), rtol=1e-4, atol=1e-5)


def test_a_cell_is_features_times_the_classifier_with_its_bias():
    """The classifier as a 1x1 convolution, written out."""
    torch.manual_seed(0)
    model = timm.create_model("test_nfnet", num_classes=7).eval()
    torch.nn.init.normal_(model.head.fc.bias)
    image = torch.randint(0, 256, (1, 64, 64, 3), dtype=torch.uint8)
    with torch.no_grad():
        features = model.forward_features(normalised(image))
        want = torch.nn.functional.conv2d(features, model.head.fc.weight[:, :, None, None], model.head.fc.bias)
    torch.testing.assert_close(Teacher(model, 64, "squash", CONFIG)(image), want.permute(0, 2, 3, 1), rtol=1e-4, atol=1e-5)


def test_lvvit_teaches_with_its_token_head():
    torch.manual_seed(0)
    model = timm.create_model("lvvit_micro", num_classes=5).eval()
    image = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)
    logits = Teacher(model, 64, "squash", CONFIG)(image)
    assert logits.shape == (2, 8, 8, 5)
    with torch.no_grad():
        x = normalised(image)
        want = model.head(model.forward_features(x)[:, 0]) + 0.5 * logits.flatten(1, 2).amax(1)
        torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)


def test_geometry_decides_what_is_seen():
    """A picture whose left and right quarters are red and whose middle is blue: only a squash sees red."""
    pixels = np.zeros((50, 100, 3), np.uint8)
    pixels[:, :25, 0] = pixels[:, 75:, 0] = pixels[:, 25:75, 2] = 255
    image = Image.fromarray(pixels)
    model = timm.create_model("test_resnet", num_classes=2)
    squashed, centre = np.empty((2, 1, 64, 64, 3), np.uint8)
    window = render(image, Teacher(model, 64, "squash", CONFIG), squashed)
    assert window == (0.0, 0.0, 1.0, 1.0)
    assert squashed[0, :, :8, 0].min() > 200
    window = render(image, Teacher(model, 64, "centre-crop", CONFIG), centre)
    assert window == (0.0, 0.25, 1.0, 0.75)
    assert centre[..., 0].max() == 0


def test_a_model_without_a_square_map_is_refused():
    model = timm.create_model("test_resnet", num_classes=2)
    model.forward_features = lambda x: torch.zeros(len(x), 5)
    with pytest.raises(UserError, match=r"must keep space"):
        Teacher(model, 64, "squash", CONFIG)(torch.zeros(1, 64, 64, 3, dtype=torch.uint8))


def test_the_hash_follows_the_weights():
    model = timm.create_model("test_resnet", num_classes=2)
    before = weights_hash(model)
    assert weights_hash(model) == before
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    assert weights_hash(model) != before

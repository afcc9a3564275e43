"""Every photometric operation against Pillow's own, to the gray level."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from timm.data.auto_augment import posterize, solarize_add
from torchvision.transforms.functional import adjust_hue

from densefeed.pipelines.augment.operations import OPERATIONS, apply_tables, histogram
from densefeed.pipelines.augment.settings import CODES, TABLES, make_tables


@pytest.fixture(scope="module")
def images(noise) -> torch.Tensor:
    """Make 6 images of odd size: photograph-like, noise, one color, black and white, channels of
    different spread, nearly flat.
    """
    rng = np.random.default_rng(1)
    H, W = 61, 83
    spread = np.stack(
        [np.full((H, W), 7), rng.integers(100, 120, (H, W)), rng.integers(0, 256, (H, W))], -1
    )
    nearly = np.full((H, W, 3), 90)
    nearly[3, 5] = (91, 80, 200)
    pictures = [
        noise(H, W),
        rng.integers(0, 256, (H, W, 3)),
        np.full((H, W, 3), 77),
        rng.integers(0, 2, (H, W, 1)).repeat(3, 2) * 255,
        spread,
        nearly,
    ]
    return torch.from_numpy(np.stack(pictures).astype(np.uint8))


def by_pillow(images: torch.Tensor, operation) -> torch.Tensor:
    return torch.from_numpy(
        np.stack([np.asarray(operation(Image.fromarray(image))) for image in images.numpy()])
    )


def move(image: Image.Image, right: float, down: float) -> Image.Image:
    """Cut the same size out of the image at another place; Pillow fills with black."""
    return image.crop((right, down, right + image.width, down + image.height))


BY_PILLOW = {
    "AutoContrast": (lambda image, _: ImageOps.autocontrast(image), [0.0]),
    "Equalize": (lambda image, _: ImageOps.equalize(image), [0.0]),
    "Contrast": (
        lambda image, by: ImageEnhance.Contrast(image).enhance(by),
        [0.0, 0.1, 0.37, 1.0, 1.3, 1.9, 2.6],
    ),
    "Color": (
        lambda image, by: ImageEnhance.Color(image).enhance(by),
        [0.0, 0.1, 0.37, 1.0, 1.3, 1.9, 2.6],
    ),
    "Sharpness": (
        lambda image, by: ImageEnhance.Sharpness(image).enhance(by),
        [0.0, 0.1, 0.37, 1.0, 1.3, 1.9, 2.6],
    ),
    "GaussianBlur": (
        lambda image, by: image.filter(ImageFilter.GaussianBlur(by)),
        [0.1, 0.5, 1.0, 1.41, 1.42, 2.0],
    ),
    "Hue": (adjust_hue, [-0.5, -0.3, -0.01, 0.0, 0.1, 0.37, 0.5]),
    "ShiftX": (lambda image, by: move(image, by, 0), [-90.0, -83.0, -28.0, -1.0, 0.0, 4.0, 83.0]),
    "ShiftY": (lambda image, by: move(image, 0, by), [-90.0, -61.0, -28.0, -1.0, 0.0, 4.0, 61.0]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_equal_pillows(images, name):
    pillows, arguments = BY_PILLOW[name]
    for argument in arguments:
        got = OPERATIONS[name](images, torch.full((len(images),), argument))
        assert got.dtype == torch.uint8
        assert torch.equal(got, by_pillow(images, lambda image, by=argument: pillows(image, by))), (
            argument
        )


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_sample_has_its_own_argument(images, name):
    """Each result in a batch equals that of the sample alone; the input is not modified."""
    before = images.clone()
    argument = torch.tensor([0.1, 0.5, 0.2, 0.4, 0.3, 0.45])
    together = OPERATIONS[name](images, argument)
    alone = [
        OPERATIONS[name](images[at : at + 1], argument[at : at + 1]) for at in range(len(images))
    ]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(images, before)


TABLE_BY_PILLOW = {
    "Invert": (lambda image, _: ImageOps.invert(image), [0]),
    "Posterize": (posterize, [1, 2, 3, 4, 7, 8, 9]),
    "Solarize": (ImageOps.solarize, [0, 1, 26, 128, 255, 256]),
    "SolarizeAdd": (solarize_add, [0, 1, 60, 110, 128]),
    "Brightness": (
        lambda image, by: ImageEnhance.Brightness(image).enhance(by),
        [0.0, 0.1, 0.37, 1.0, 1.3, 1.9, 2.6],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_equal_pillows(images, name):
    pillows, arguments = TABLE_BY_PILLOW[name]
    for argument in arguments:
        table = make_tables(
            np.full(len(images), CODES[name]), np.full(len(images), float(argument))
        )
        got = apply_tables(images, torch.from_numpy(table)[:, None])
        assert torch.equal(got, by_pillow(images, lambda image, by=argument: pillows(image, by))), (
            argument
        )


def test_posterize_without_bits_is_black():
    """Pillow 13 raises an error; its formula, as in older Pillow, masks all bits."""
    assert not make_tables(np.full(3, CODES["Posterize"]), np.array([0.0, -1.0, -4.0])).any()


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 5), (3, 3)])
def test_tiny_crops(height, width):
    images = torch.randint(
        0, 256, (2, height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    for name in ("AutoContrast", "Equalize", "Contrast", "Color", "Sharpness"):
        pillows, _ = BY_PILLOW[name]
        got = OPERATIONS[name](images, torch.full((2,), 1.7))
        assert torch.equal(
            got, by_pillow(images, lambda image, pillows=pillows: pillows(image, 1.7))
        ), name


def test_histogram_equals_bincount():
    index = torch.randint(
        0, 900, (5000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0)
    )
    assert torch.equal(histogram(index, 1000).long(), index.bincount(minlength=1000))

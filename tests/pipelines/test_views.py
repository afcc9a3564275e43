"""Views against pixels: an image whose pixels are their own coordinates passes through pipelines of
torchvision, and its pixels say where the View must point.
"""

import inspect
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F
from torchvision.transforms.v2.functional._utils import _KERNEL_REGISTRY

from densefeed import UserError, View
from densefeed.pipelines import views
from densefeed.storage.geometry import crop_views, visible_boxes

# Largest differences in sides of the stored image. The bar of float tensors.
EXACT = 1e-4
BILINEAR = v2.InterpolationMode.BILINEAR
GEOMETRIC = {"ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"}


def coordinates(height: int, width: int) -> Tensor:
    """Make float64 `[3, H, W]`: x and y of each pixel's center, and 1; 0 is fill."""
    x = ((torch.arange(width, dtype=torch.float64) + 0.5) / width).expand(height, width)
    y = ((torch.arange(height, dtype=torch.float64) + 0.5) / height)[:, None].expand_as(x)
    return erase_border(torch.stack([x, y, torch.ones_like(x)]))


def erase_border(image: Tensor) -> Tensor:
    """Mark the outer pixels as fill: where one is repeated, coordinates do not go on."""
    image = image.clone()
    inner = torch.zeros_like(image[2])
    inner[1:-1, 1:-1] = 1
    image[2] *= inner
    return image


class EraseBorder(v2.Transform):
    """Do that to the image of a sample between two transforms."""

    _transformed_types = (v2.functional.is_pure_tensor,)

    def transform(self, inpt, params):
        return erase_border(inpt)


def run(steps, image, seed=0):
    """Pass the image and its View through steps."""
    torch.manual_seed(seed)
    pair = image, View.identity(image)
    for step in steps:
        pair = EraseBorder()(*step(*pair))
    return pair


def predict(view: View, height: int, width: int) -> Tensor:
    """Compute what a View says of each pixel's center: float64 `[2, H, W]`."""
    x = ((torch.arange(width, dtype=torch.float64) + 0.5) / width).expand(height, width)
    y = ((torch.arange(height, dtype=torch.float64) + 0.5) / height)[:, None].expand_as(x)
    a = view.matrix[:, :, None, None]
    return a[:, 0] * x + a[:, 1] * y + a[:, 2]


def deviation(image: Tensor, view: View, whole: float = 1e-9) -> tuple[float, int]:
    """Compare pixels that are not fill: the largest difference in sides, and how many they are."""
    height, width = image.shape[1:]
    assert view.canvas_size == (height, width)
    valid = image[2] > 1 - whole
    top, left, bottom, right = view.shown
    x, y = image[:2, valid]
    assert ((x > left) & (x < right) & (y > top) & (y < bottom)).all()
    count = int(valid.sum())
    far = (predict(view, height, width) - image[:2]).abs()[:, valid]
    return far.max().item() if count else 0.0, count


# ---------------------------------------------------------------- every transform

SMOOTH = {"interpolation": BILINEAR}
# Bilinear without antialiasing is exact on a linear image.
POINT = {"antialias": False}
TRANSFORMS = {
    "crop": lambda: v2.RandomCrop((61, 70)),
    "crop padded": lambda: v2.RandomCrop((150, 99), padding=[3, 5, 7, 11], pad_if_needed=True),
    "center crop": lambda: v2.CenterCrop((50, 41)),
    "center crop square": lambda: v2.CenterCrop(60),
    "center crop beyond": lambda: v2.CenterCrop((131, 71)),
    "center crop far beyond": lambda: v2.CenterCrop([200]),
    "resized crop": lambda: v2.RandomResizedCrop((64, 48), **POINT),
    "resize": lambda: v2.Resize((130, 55), **POINT),
    "resize shorter": lambda: v2.Resize(77, **POINT),
    "resize limited": lambda: v2.Resize(60, max_size=71, **POINT),
    "resize longer": lambda: v2.Resize(None, max_size=75, **POINT),
    "scale jitter": lambda: v2.ScaleJitter((90, 110), (0.5, 1.5), **POINT),
    "shortest size": lambda: v2.RandomShortestSize([60, 90], 110, **POINT),
    "random resize": lambda: v2.RandomResize(50, 120, **POINT),
    "pad": lambda: v2.Pad(9),
    "pad two": lambda: v2.Pad([4, 13], fill=0.0),
    "pad four": lambda: v2.Pad([1, 2, 3, 4]),
    "pad negative": lambda: v2.Pad([-5, 4, 3, -6]),
    "zoom out": lambda: v2.RandomZoomOut(p=1),
    "flip": lambda: v2.RandomHorizontalFlip(1),
    "vertical flip": lambda: v2.RandomVerticalFlip(1),
    "affine": lambda: v2.RandomAffine(40, (0.1, 0.2), (0.7, 1.4), (-20, 20, -10, 15), **SMOOTH),
    "affine sheared": lambda: v2.RandomAffine(0, shear=25, **SMOOTH),
    "affine centered": lambda: v2.RandomAffine(30, (0.1, 0.1), center=[13, 70], **SMOOTH),
    "rotation": lambda: v2.RandomRotation(180, **SMOOTH),
    "rotation centered": lambda: v2.RandomRotation(70, center=[20.5, 31], **SMOOTH),
    "rotation expanded": lambda: v2.RandomRotation(180, expand=True, **SMOOTH),
    "rotation expanded, centered": lambda: v2.RandomRotation(
        50, expand=True, center=[40, 30], **SMOOTH
    ),
    "a quarter": lambda: v2.RandomRotation((90, 90), **SMOOTH),
    "a quarter expanded": lambda: v2.RandomRotation((270, 270), expand=True),
    "half a turn": lambda: v2.RandomRotation((180, 180)),
    "RandAugment": lambda: geometric(views.RandAugment)(3, **SMOOTH),
    "AutoAugment": lambda: geometric(views.AutoAugment)(v2.AutoAugmentPolicy.SVHN, **SMOOTH),
    "TrivialAugmentWide": lambda: geometric(views.TrivialAugmentWide)(**SMOOTH),
    "one of two": lambda: v2.RandomChoice([v2.CenterCrop(50), v2.RandomHorizontalFlip(1)]),
    "any order": lambda: v2.RandomOrder([v2.CenterCrop((50, 60)), v2.RandomRotation(9, **SMOOTH)]),
    "applied": lambda: v2.RandomApply([v2.Pad(3), v2.CenterCrop(55)], 0.9),
}


def geometric(policy):
    """Make a class with the policy's draws that leaves colors, here coordinates, as they are."""

    class Geometric(policy):
        def _apply_image_or_video_transform(self, image, transform_id, *numbers, **options):
            kept = transform_id not in GEOMETRIC
            return (
                image
                if kept
                else super()._apply_image_or_video_transform(
                    image, transform_id, *numbers, **options
                )
            )

    return Geometric


@pytest.mark.parametrize("name", TRANSFORMS)
def test_pixels_are_where_the_view_says(name):
    reached, count = zip(
        *(
            deviation(*run([TRANSFORMS[name]()], coordinates(97, 83), seed))
            for seed in range(8)
        ),
        strict=True,
    )
    print(name, max(reached), min(count))
    assert max(reached) < EXACT
    assert min(count) > 300

"""What timm needs to register and build the models of every family here."""

from collections.abc import Callable

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg
from torch import nn


def pretrained_cfg(
    first_conv: str,
    classifier: str | tuple[str, ...],
    size: int = 224,
    crop_pct: float = 0.9,
    num_classes: int = 1000,
    interpolation: str = "bicubic",
) -> dict:
    """Return a model's default configuration, by timm's keys, with ImageNet's mean and deviation.

    `first_conv` and `classifier` are module names, `size` is the input's side in pixels.
    """
    return {
        "input_size": (3, size, size),
        "crop_pct": crop_pct,
        "interpolation": interpolation,
        "num_classes": num_classes,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": first_conv,
        "classifier": classifier,
    }


def build_vit(
    model_class: type[nn.Module], filter_fn: Callable, name: str, pretrained: bool, arguments: dict
) -> nn.Module:
    """Build the registered model `name`; with `features_only` it returns the last three maps."""
    return build_model_with_cfg(
        model_class,
        name,
        pretrained,
        pretrained_filter_fn=filter_fn,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **arguments,
    )

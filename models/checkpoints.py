"""Checkpoints: plain dictionaries that `torch.load(weights_only=True)` reads, with everything needed to use the model again."""

from pathlib import Path
from typing import NamedTuple

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from . import lvvit, nfnet  # noqa: F401  (registers their models with timm)


class CheckpointError(Exception):
    """A checkpoint that cannot be used; one sentence that names the file and the remedy."""


class Recipe(NamedTuple):
    """How to build a model again."""

    name: str  # timm's
    kwargs: dict  # of timm.create_model


def load(path: Path) -> dict:
    """The dictionary of a checkpoint, on the CPU. Never runs code from the file. Raises CheckpointError."""
    try:
        if path.suffix == ".safetensors":
            return {"model": load_file(path)}
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such checkpoint; check the path") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # unpickling a damaged file may raise nearly anything
        raise CheckpointError(
            f"{path} is no checkpoint that loads safely ({type(error).__name__}); copy or train it again"
        ) from error

    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"{path} holds a {type(checkpoint).__name__}, no dictionary of weights; choose another file")
    return checkpoint


def weights_of(checkpoint: dict) -> dict[str, torch.Tensor]:
    """The weights to use: the averaged ones where there are any; prefixes of wrappers removed."""
    found = next(
        (checkpoint[key] for key in ("ema", "state_dict_ema", "model", "state_dict") if checkpoint.get(key)), checkpoint
    )
    return {name.removeprefix("module.").removeprefix("_orig_mod."): tensor for name, tensor in found.items()}


def build(path: Path, model_name: str = "") -> tuple[nn.Module, dict]:
    """A model with its weights from a checkpoint, and the checkpoint.

    Our checkpoints say which model they hold; for others `model_name` (timm's) must. Raises CheckpointError.
    """
    checkpoint = load(path)
    if "recipe" in checkpoint:
        recipe = Recipe(**checkpoint["recipe"])
    elif model_name:
        weights = weights_of(checkpoint)
        classes = [
            tensor.shape[0]
            for name, tensor in weights.items()
            if name.endswith(("head.fc.bias", "head.bias", "fc.bias", "classifier.bias"))
        ]
        recipe = Recipe(model_name, {"num_classes": classes[-1]} if classes else {})
    else:
        raise CheckpointError(f"{path} does not say which model it holds; name it with --model")
    try:
        model = timm.create_model(recipe.name, **recipe.kwargs)
        model.load_state_dict(weights_of(checkpoint))
    except (RuntimeError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} does not fit the model {recipe.name}: {str(error).splitlines()[0]}") from error
    return model, checkpoint

"""Checkpoints: plain dictionaries that `torch.load(weights_only=True)` reads, with everything
needed to use the model again.
"""

import argparse
import inspect
import math
import re
from pathlib import Path
from typing import NamedTuple

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from densefeed.models import agent_cnn, cvt, dhvt, lvvit, nfnet, t2t, vit  # noqa: F401  (registers their models with timm)

# Where the weights lie in a checkpoint, the averaged ones first: ours, timm's two names for EMA,
# ours, timm's.
AVERAGED = ("ema", "state_dict_ema", "model_ema")
WEIGHTS = (*AVERAGED, "model", "state_dict")


class CheckpointError(Exception):
    """A checkpoint that cannot be used; one sentence that names the file and the remedy."""


class Recipe(NamedTuple):
    """How to build a model again."""

    name: str  # timm's
    kwargs: dict  # of timm.create_model


def load(path: Path) -> dict:
    """The dictionary of a checkpoint, on the CPU. Never runs code from the file. Raises
    CheckpointError.
    """
    try:
        if path.suffix == ".safetensors":
            return {"model": load_file(path)}
        # timm's trainer, and those that grew from it, save the command line as a Namespace:
        # attributes and no code.
        with torch.serialization.safe_globals([argparse.Namespace]):
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
        raise CheckpointError(
            f"{path} holds a {type(checkpoint).__name__}, no dictionary of weights; choose another file"
        )
    return checkpoint


def weights_of(checkpoint: dict) -> dict[str, Tensor]:
    """The weights to use: the averaged ones where there are any; prefixes of wrappers (DDP,
    compile) removed.
    """
    key = weights_key(checkpoint)
    found = checkpoint[key] if key else checkpoint
    return {
        re.sub(r"^(?:module\.|_orig_mod\.)+", "", name): tensor for name, tensor in found.items()
    }


def weights_key(checkpoint: dict) -> str:
    """Under which name a checkpoint holds the weights to use; empty if it is itself the dictionary
    of weights.
    """
    return next(
        (key for key in WEIGHTS if isinstance(checkpoint.get(key), dict) and checkpoint[key]), ""
    )


def build(path: Path, model_name: str = "") -> tuple[nn.Module, dict]:
    """A model with its weights from a checkpoint, and the checkpoint.

    Our checkpoints say which model they hold; for others `model_name` (timm's) must. A model of
    ours that has a position table is built at the size of the file's. Raises CheckpointError.
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
        if (
            "recipe" not in checkpoint
            and isinstance(model, (lvvit.LVViT, t2t.T2TViT))
            and "pos_embed" in weights
        ):
            side = math.isqrt(weights["pos_embed"].shape[1] - 1)
            if side != model.grid_size:
                model = timm.create_model(
                    recipe.name, img_size=side * model.patch_size, **recipe.kwargs
                )
        model.load_state_dict(weights_of(checkpoint))
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError) as error:
        # PyTorch names the first weight in the second
        said = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise CheckpointError(
            f"{path} does not fit the model {recipe.name}: {said}; check --model"
        ) from error
    return model, checkpoint


def initialize(model: nn.Module, path: Path) -> str:
    """Let a model begin from the weights in a file, in place; returns one line that says what was
    taken and what is new.

    The file may be ours, a published LV-ViT file, or one of timm's for the same model, safetensors
    too; averaged weights are preferred. The model's family makes them fit (timm's
    `checkpoint_filter_fn`: names, position table); a head that the file lacks or that has other
    classes stays as it was built. Raises CheckpointError, and changes nothing, where any other
    tensor is missing, surplus or of another shape.
    """
    checkpoint = load(path)
    weights = weights_of(checkpoint)
    if not weights or not all(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointError(f"{path} holds no dictionary of weights; choose another file")
    fit = getattr(inspect.getmodule(type(model)), "checkpoint_filter_fn", None)
    try:
        fitting = dict(fit(weights, model)) if fit else weights
    # another family's tensors
    except (RuntimeError, KeyError, ValueError, AttributeError, TypeError, IndexError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} does not fit {type(model).__name__} ({reason}); choose another file or model"
        ) from error

    own = model.state_dict()
    left_out = len(weights) - len(fitting)
    classifiers = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    new, classes = [], 0
    for head in (classifiers,) if isinstance(classifiers, str) else classifiers:
        there, here = (tensors.get(f"{head}.weight") for tensors in (fitting, own))
        if here is None or there is None or len(there) != len(here):
            new += [head] if here is not None else []
            classes = len(there) if there is not None else classes
            fitting = {
                name: tensor for name, tensor in fitting.items() if name.rpartition(".")[0] != head
            }

    # Files older than BatchNorm's step counter lack it, and it is used only where a momentum is
    # None.
    expected = {
        key
        for key in own
        if key.rpartition(".")[0] not in new and not key.endswith(".num_batches_tracked")
    }
    wrong = {
        "lacks": sorted(expected - fitting.keys()),
        "has besides": sorted(fitting.keys() - own.keys()),
        "has in another shape": [
            key for key in own if key in fitting and fitting[key].shape != own[key].shape
        ],
    }
    if any(wrong.values()):
        found = ", ".join(
            f"{what} {names[0]}" + (f" and {len(names) - 1:,} more" if names[1:] else "")
            for what, names in wrong.items()
            if names
        )
        counts = [sum(tensor.numel() for tensor in tensors.values()) for tensors in (weights, own)]
        raise CheckpointError(
            f"{path} does not fit this {type(model).__name__} ({counts[0]:,} numbers there, {counts[1]:,} here): it {found}; "
            "give the --model and --model-kwargs that it was trained with"
        )
    model.load_state_dict(fitting, strict=False)

    notes = [
        f"begins from {path}"
        + (" (averaged weights)" if weights_key(checkpoint) in AVERAGED else "")
    ]
    table, fitted = weights.get("pos_embed"), fitting.get("pos_embed")
    if table is not None and fitted is not None and table.shape != fitted.shape:
        notes.append(f"position table resized from {table.shape[1]:,} to {fitted.shape[1]:,} rows")
    if new:
        notes.append(
            f"new: {' and '.join(new)}" + (f" ({classes:,} classes in the file)" if classes else "")
        )
    if left_out:
        notes.append(f"{left_out:,} tensors of the file left out")
    return "; ".join(notes)

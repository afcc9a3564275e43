"""Checkpoints: plain dictionaries with everything needed to use a model again.

`torch.load(weights_only=True)` reads them. Files of LV-ViT and timm are read too, safetensors
included.
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

from densefeed.models.lvvit import LVViT
from densefeed.models.t2t import T2TViT
from densefeed.system.errors import UserError, explain_os_error, first_line

# Keys under which a checkpoint holds weights, EMA weights first: ours, timm's two, ours, timm's.
AVERAGED = ("ema", "state_dict_ema", "model_ema")
WEIGHTS = (*AVERAGED, "model", "state_dict")


class CheckpointError(UserError):
    """A checkpoint that cannot be used; one sentence with the file and the remedy."""


class ModelSpec(NamedTuple):
    """The name and the keyword arguments of `timm.create_model` that build a model again."""

    name: str
    kwargs: dict


def load(path: Path) -> dict:
    """Load the dictionary of a checkpoint on the CPU, without running code from the file.

    Raises CheckpointError.
    """
    try:
        if path.suffix == ".safetensors":
            return {"model": load_file(path)}
        # timm's trainer and those derived from it save the command line as a Namespace, which has
        # attributes and no code.
        with torch.serialization.safe_globals([argparse.Namespace]):
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise CheckpointError(explain_os_error(error)) from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); copy it again") from error
    # Unpickling a damaged file may raise nearly any exception.
    except Exception as error:
        what = f"is not a checkpoint that loads safely ({type(error).__name__})"
        raise CheckpointError(f"{path} {what}; copy or train it again") from error
    if not isinstance(checkpoint, dict):
        what = f"a {type(checkpoint).__name__} instead of a dictionary of weights"
        raise CheckpointError(f"{path} holds {what}; choose another file")
    return checkpoint


def select_weights(checkpoint: dict) -> dict[str, Tensor]:
    """Return the weights to use, EMA weights if any, without the prefixes of DDP and compile."""
    key = weights_key(checkpoint)
    weights = checkpoint[key] if key else checkpoint
    return {
        re.sub(r"^(?:module\.|_orig_mod\.)+", "", name): tensor for name, tensor in weights.items()
    }


def weights_key(checkpoint: dict) -> str:
    """Return the key of the weights to use, or "" if the checkpoint itself is the state dict."""
    # `ema` is None in the checkpoints of a run without one.
    return next(
        (key for key in WEIGHTS if isinstance(checkpoint.get(key), dict) and checkpoint[key]), ""
    )


def build_for_weights(name: str, weights: dict[str, Tensor]) -> nn.Module:
    """Build timm's model `name` with the number of classes and the position table of the weights.

    Only LV-ViT and T2T-ViT get the size of the table; other models keep their own.
    """
    biases = ("head.fc.bias", "head.bias", "fc.bias", "classifier.bias")
    # timm's families name their classifiers differently.
    classes = [len(tensor) for key, tensor in weights.items() if key.endswith(biases)]
    kwargs = {"num_classes": classes[-1]} if classes else {}
    model = timm.create_model(name, **kwargs)
    if isinstance(model, LVViT | T2TViT) and "pos_embed" in weights:
        # One row is the class token's.
        side = math.isqrt(weights["pos_embed"].shape[1] - 1)
        if side != model.grid_size:
            return timm.create_model(name, img_size=side * model.patch_size, **kwargs)
    return model


def build(path: Path, model_name: str = "") -> tuple[nn.Module, dict]:
    """Return a model with its weights from a checkpoint, and the checkpoint.

    Our checkpoints contain the `ModelSpec`; other files need `model_name`, one of timm's, and
    `build_for_weights` then chooses the sizes. Raises CheckpointError.
    """
    checkpoint = load(path)
    own = "recipe" in checkpoint
    spec = ModelSpec(**checkpoint["recipe"]) if own else ModelSpec(model_name, {})
    if not spec.name:
        raise CheckpointError(f"{path} does not contain its model's name; give it with --model")
    try:
        weights = select_weights(checkpoint)
        if own:
            model = timm.create_model(spec.name, **spec.kwargs)
        else:
            model = build_for_weights(spec.name, weights)
        model.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError) as error:
        # The second line of PyTorch's message names weights that do not fit, perhaps hundreds.
        reason = " ".join(line.strip()[:200] for line in str(error).splitlines()[:2])
        raise CheckpointError(
            f"{path} does not fit the model {spec.name}: {reason}; check --model"
        ) from error
    return model, checkpoint


def initialize(model: nn.Module, path: Path) -> str:
    """Initialize a model from the weights in a file; return one line on what was used and is new.

    The file may be ours, a published LV-ViT file, or one of timm's for the same model, safetensors
    included; EMA weights are preferred. The model family's `checkpoint_filter_fn` (timm's
    convention) adapts names and the position table. A head that the file does not have, or has with
    other classes, keeps its initial weights. Raises CheckpointError, and changes nothing, where any
    other tensor is missing, unexpected or of another shape.
    """
    checkpoint = load(path)
    weights = select_weights(checkpoint)
    if not weights or not all(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointError(f"{path} holds no dictionary of weights; choose another file")
    # timm applies this function to the weights that it downloads, and not to files.
    filter_fn = getattr(inspect.getmodule(type(model)), "checkpoint_filter_fn", None)
    try:
        fitted = dict(filter_fn(weights, model)) if filter_fn else weights
    # The tensors are those of another family.
    except (RuntimeError, KeyError, ValueError, AttributeError, TypeError, IndexError) as error:
        raise CheckpointError(
            f"{path} does not fit {type(model).__name__} ({first_line(error)}); choose another "
            "file or model"
        ) from error

    unused = len(weights) - len(fitted)
    fitted, new, classes = drop_unfit_heads(fitted, model)
    if mismatch := find_mismatch(fitted, model, new):
        counts = [sum(map(Tensor.numel, w.values())) for w in (weights, model.state_dict())]
        raise CheckpointError(
            f"{path} does not fit this {type(model).__name__} ({counts[0]:,} values in the file, "
            f"{counts[1]:,} in the model): {mismatch}; "
            "give the --model and --model-kwargs that it was trained with"
        )
    # Not strict, because new heads are missing in it; find_mismatch has compared all else.
    model.load_state_dict(fitted, strict=False)

    notes = [f"initialized from {path}"]
    if weights_key(checkpoint) in AVERAGED:
        notes[0] += " (EMA weights)"
    table, resized = weights.get("pos_embed"), fitted.get("pos_embed")
    if table is not None and resized is not None and table.shape != resized.shape:
        notes.append(f"position table resized from {table.shape[1]:,} to {resized.shape[1]:,} rows")
    if new:
        in_file = f" ({classes:,} classes in the file)" if classes else ""
        notes.append(f"new: {' and '.join(new)}{in_file}")
    if unused:
        notes.append(f"{unused:,} tensors of the file not used")
    return "; ".join(notes)


def drop_unfit_heads(
    weights: dict[str, Tensor], model: nn.Module
) -> tuple[dict[str, Tensor], list[str], int]:
    """Return the weights without heads that do not fit the model.

    Also returns the names of the model's heads that therefore keep their initial weights, and the
    number of classes of such a head in the file, 0 if there is none.
    """
    classifiers = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    new, classes, own = [], 0, model.state_dict()
    for head in (classifiers,) if isinstance(classifiers, str) else classifiers:
        there, here = (tensors.get(f"{head}.weight") for tensors in (weights, own))
        if here is None or there is None or len(there) != len(here):
            new += [head] if here is not None else []
            classes = len(there) if there is not None else classes
            weights = {
                name: tensor for name, tensor in weights.items() if name.rpartition(".")[0] != head
            }
    return weights, new, classes


def find_mismatch(weights: dict[str, Tensor], model: nn.Module, new: list[str]) -> str:
    """Describe how the weights differ from the model's, its `new` heads apart; "" if they fit."""
    own = model.state_dict()
    # Files older than BatchNorm's batch counter do not have it; it is read only where a momentum is
    # None.
    expected = {
        key
        for key in own
        if key.rpartition(".")[0] not in new and not key.endswith(".num_batches_tracked")
    }
    wrong = {
        "missing": sorted(expected - weights.keys()),
        "unexpected": sorted(weights.keys() - own.keys()),
        "of another shape": [
            key for key in own if key in weights and weights[key].shape != own[key].shape
        ],
    }
    return ", ".join(
        f"{kind}: {names[0]}" + (f" and {len(names) - 1:,} more" if names[1:] else "")
        for kind, names in wrong.items()
        if names
    )

"""A trained model from a checkpoint or a run folder, ready to be judged or given away: weights,
size, classes, preprocessing.
"""

from pathlib import Path
from typing import Literal, NamedTuple

import timm
import torch
from timm.data import ImageNetInfo, infer_imagenet_subset, resolve_data_config
from timm.layers import resample_abs_pos_embed
from torch import nn

from densefeed.models import checkpoints
from densefeed.models.token_transformer import TokenTransformer
from densefeed.system.errors import UserError

Weights = Literal["ema", "raw"]
AVERAGED = ("ema", "state_dict_ema")  # names of averaged weights in checkpoints: ours, timm's
# Our loaders resample with an antialiased triangle, which is what Pillow and timm call bilinear.
OUR_INTERPOLATION = "bilinear"


class Trained(NamedTuple):
    """A model and what one must know to use it."""

    path: Path  # the checkpoint file
    model: nn.Module  # in evaluation mode, float32, on the CPU, for inputs of `size`
    name: str  # timm's
    kwargs: dict  # of timm.create_model, for this size
    weights: Weights  # which were found: `raw` also where a checkpoint has no others
    class_names: list[str]  # in the order of the logits; empty if nobody names them
    size: int  # side of the input, pixels
    crop_pct: float  # side of the evaluation crop, share of the shorter side
    interpolation: str  # timm's word
    mean: tuple[float, ...]  # of input from 0 to 1
    std: tuple[float, ...]


def open_trained(
    path: Path, weights: Weights = "ema", model_name: str = "", size: int = 0
) -> Trained:
    """The model of a checkpoint, or of a run folder's `last.pt`, for inputs of `size` pixels (0:
    those it was trained for).

    `ema` takes averaged weights where there are any, `raw` the others. `model_name` (timm's) is for
    checkpoints that do not say what they hold; their classes are named after ImageNet where their
    number is that of an ImageNet set. Raises UserError.
    """
    if path.is_dir():
        if not (path / "last.pt").is_file():
            raise UserError(
                f"{path} holds no last.pt; name a run folder of train.py, or a checkpoint file"
            )
        path = path / "last.pt"
    if size < 0:
        raise UserError(f"--size is {size}, and must be a number of pixels")
    try:
        model, checkpoint = checkpoints.build(path, model_name)
    except checkpoints.CheckpointError as error:
        raise UserError(str(error)) from error
    averaged = any(checkpoint.get(name) for name in AVERAGED)
    if averaged and weights == "raw":
        plain = {name: value for name, value in checkpoint.items() if name not in AVERAGED}
        try:
            model.load_state_dict(checkpoints.weights_of(plain))
        except RuntimeError as error:
            raise UserError(
                f"{path} holds no whole raw weights ({str(error).splitlines()[0]}); take --weights ema"
            ) from error
    ours = "recipe" in checkpoint
    recipe = (
        checkpoints.ModelSpec(**checkpoint["recipe"])
        if ours
        else checkpoints.ModelSpec(model_name, {"num_classes": model.num_classes})
    )
    run, data = checkpoint.get("config") or {}, resolve_data_config(model=model)
    names = checkpoint.get("class_names") or imagenet_names(model)
    if names and len(names) != model.num_classes:
        raise UserError(
            f"{path} names {len(names)} classes but its model has {model.num_classes}; train or copy it again"
        )
    trained_size = run.get("size") or data["input_size"][-1]
    model, kwargs = at_size(model, recipe, size or trained_size, path)
    return Trained(
        path,
        model,
        recipe.name,
        kwargs,
        "ema" if averaged and weights == "ema" else "raw",
        list(names),
        size or trained_size,
        run.get("crop_pct") or data["crop_pct"],
        OUR_INTERPOLATION if ours else data["interpolation"],
        tuple(checkpoint.get("mean") or data["mean"]),
        tuple(checkpoint.get("std") or data["std"]),
    )


def imagenet_names(model: nn.Module) -> list[str]:
    """WordNet ids in the order of the logits, if the number of classes is that of an ImageNet set
    (1,000, 21,841, ...).
    """
    subset = infer_imagenet_subset(model)
    return ImageNetInfo(subset).label_names() if subset else []


def at_size(
    model: nn.Module, recipe: checkpoints.ModelSpec, size: int, path: Path
) -> tuple[nn.Module, dict]:
    """The model for square inputs of `size` pixels, and the arguments that build it so. UserError
    if it cannot take them.

    A position table is resampled once: that of our families as their forward pass would each time,
    timm's by `set_input_size`, which every family of timm has that knows how. What has neither, as
    networks of convolutions, stays as it is.
    """
    kwargs = recipe.kwargs
    try:
        if isinstance(model, TokenTransformer) and model.pos_embed is not None:
            if size != model.grid_size * model.patch_size:
                kwargs = kwargs | {"img_size": size}
                model = resampled(model, timm.create_model(recipe.name, **kwargs))
        elif hasattr(model, "set_input_size"):
            model.set_input_size(img_size=(size, size))
            kwargs = kwargs | {"img_size": size}
        with torch.inference_mode():
            model.eval()(torch.zeros(1, 3, size, size))
    except (ValueError, RuntimeError, AssertionError, TypeError) as error:
        why = str(error).partition("\n")[0]
        raise UserError(
            f"{path}: {recipe.name} cannot take inputs of {size} px ({why}); choose another --size"
        ) from error
    return model, kwargs


def resampled(model: TokenTransformer, new: TokenTransformer) -> TokenTransformer:
    """`new` with the weights of `model`, its position table resampled."""
    table = resample_abs_pos_embed(
        model.pos_embed.detach(), [new.grid_size] * 2, [model.grid_size] * 2
    )
    new.load_state_dict(model.state_dict() | {"pos_embed": table})
    return new

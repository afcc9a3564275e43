"""Load a trained model from a checkpoint or a run folder, to evaluate or export it."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from timm.data import resolve_data_config
from timm.data.transforms import str_to_pil_interp
from timm.layers import resample_abs_pos_embed
from torch import nn

from densefeed.models import checkpoints
from densefeed.models.mask_rcnn import MaskRCNN
from densefeed.models.model_spec import CANNOT_BUILD, imagenet_names
from densefeed.models.on_backbone import find_backbone
from densefeed.models.token_transformer import TokenTransformer
from densefeed.models.upernet import UperNet
from densefeed.objectives import Objectives, build_objective, complete
from densefeed.objectives.base import Setting
from densefeed.objectives.segmentation import SegmentationOptions
from densefeed.pipelines.mixing import MixOptions
from densefeed.pipelines.targets import TargetRules
from densefeed.storage.geometry import center_box
from densefeed.storage.images import Images, SplitOptions, crop_resize
from densefeed.system.errors import UserError, first_line
from densefeed.system.json_files import is_number
from densefeed.system.options import from_dict

Weights = Literal["ema", "raw"]
# The filter of evaluation in runs whose config has no option for it.
OLD_INTERPOLATION = "bilinear"
# Largest side of the input that a file may ask for, pixels: the model is tried at it.
MAX_SIZE = 1024
# Largest side that --size may ask for, pixels.
MOST_SIZE = 4096
# Patches along a side of an input, if a file states them. Attention over 64 x 64 takes 67 MB a
# head.
MAX_PATCHES = 64


# Networks that are no classifiers, and what they are and who reads them, for messages.
OTHERS = {
    UperNet: (
        "a segmentation network, which classifies pixels and not images; densefeed validate, "
        "report, export and label read it"
    ),
    MaskRCNN: (
        "a detector, which returns boxes and not one class for each image; densefeed validate, "
        "report, export and train read it (--init, --resume)"
    ),
}


class Divided(NamedTuple):
    """A folder of images that a run, or packing for it, divided into training and validation."""

    root: str  # of a packed part, its file
    dataset: str
    division: SplitOptions
    fingerprint: str  # of the training images


class Trained(NamedTuple):
    """A model and what is needed to use it."""

    path: Path  # the checkpoint file
    model: nn.Module  # in evaluation mode, float32, on the CPU, for inputs of `size`
    name: str  # timm's
    kwargs: dict  # arguments of timm.create_model, for this size
    weights: Weights  # those that were loaded: `raw` also where a checkpoint has no others
    class_names: list[str]  # in the order of the logits; empty if they are unknown
    size: int  # side of the input, pixels
    crop_pct: float  # side of the evaluation crop, share of the shorter side
    interpolation: str  # timm's name of it
    mean: tuple[float, ...]  # of input from 0 to 1
    std: tuple[float, ...]
    divided: Divided | None = None  # by --val-fraction
    train: str = ""  # where the training images were; empty: not known
    dataset: str = ""  # the run's --dataset
    fingerprint: str = ""  # of the training images
    # at which its run evaluates whole images, 1 is `size`
    eval_scales: tuple[float, ...] = (1.0,)


def open_trained(
    path: Path,
    weights: Weights = "ema",
    model_name: str = "",
    size: int = 0,
    others: tuple[type[nn.Module], ...] = (),
) -> Trained:
    """Load the model of a checkpoint, of a run folder's `last.pt`, or of an exported folder.

    Args:
        path: a checkpoint file, or a folder of densefeed train or export.
        weights: `ema` selects EMA weights where there are any, `raw` the others.
        model_name: timm's name, for checkpoints that do not contain it. Their classes get the names
            of the ImageNet set with that number of classes, if there is one.
        size: side of the input, pixels; 0: the size that the model was trained at.
        others: networks that will do beside classifiers, of OTHERS.

    Raises UserError.
    """
    path = checkpoints.find_file(path)
    if not 0 <= size <= MOST_SIZE:
        raise UserError(f"--size is {size:,}, and must be a number of pixels up to {MOST_SIZE:,}")
    model, checkpoint = checkpoints.build(path, model_name)
    if isinstance(model, tuple(OTHERS)) and not isinstance(model, others):
        raise UserError(f"{path} holds {OTHERS[type(model)]}")
    facts = checkpoints.read_facts(checkpoint, path)
    if not any(checkpoint.get(key) for key in checkpoints.AVERAGED):
        weights = "raw"
    # `checkpoints.build` has loaded the EMA weights.
    elif weights == "raw":
        load_raw(model, checkpoint, path)
    given = checkpoints.ModelSpec(model_name, {"num_classes": model.num_classes})
    recipe = checkpoints.read_spec(checkpoint, path) or given
    data = resolve_data_config(model=model)
    names = facts.class_names or imagenet_names(model)
    if names and len(names) != model.num_classes:
        raise UserError(
            f"{path} names {len(names)} classes but its model has {model.num_classes}; "
            "train or copy it again"
        )
    stated, patch = facts.size or data["input_size"][-1], recipe.kwargs.get("patch_size")
    largest = min(MAX_SIZE, MAX_PATCHES * patch) if isinstance(patch, int) else MAX_SIZE
    if not size and stated > largest:
        raise UserError(f"{path} states inputs of {stated:,} px, above {largest:,}; give --size")
    size = size or stated
    model, kwargs = at_size(model, recipe, size, path)
    return Trained(
        path=path,
        model=model,
        name=recipe.name,
        kwargs=kwargs,
        weights=weights,
        class_names=names,
        size=size,
        crop_pct=facts.crop_pct or data["crop_pct"],
        interpolation=facts.eval_interpolation or default_interpolation(checkpoint, data),
        mean=facts.mean or tuple(data["mean"]),
        std=facts.std or tuple(data["std"]),
        divided=read_divided(checkpoint, path),
        train=str(read_data(checkpoint).get("train", "")),
        dataset=str(read_data(checkpoint).get("dataset", "")),
        fingerprint=str(checkpoint.get("fingerprint", "")),
        eval_scales=read_scales(checkpoint, path) if isinstance(model, UperNet) else (1.0,),
    )


def read_divided(checkpoint: dict, path: Path) -> Divided | None:
    """Read what a run, or packing for it, divided by --val-fraction; None for others.

    Raises UserError.
    """
    data = read_data(checkpoint)
    if isinstance(division := checkpoint.get("division"), dict):
        data = data | division
    fraction, seed = data.get("val_fraction"), data.get("val_seed")
    if not is_number(fraction) or not fraction:
        return None
    texts = data.get("train"), data.get("dataset"), checkpoint.get("fingerprint")
    try:
        division = SplitOptions(val_fraction=fraction, val_seed=seed)
    except UserError as error:
        raise checkpoints.CheckpointError(f"{path}: {error}; train it again") from error
    if not all(isinstance(text, str) and "\0" not in text for text in texts):
        raise checkpoints.CheckpointError(f"{path}: its data is not a path; train it again")
    root, dataset, fingerprint = texts
    return Divided(root, dataset, division, fingerprint)


def read_data(checkpoint: dict) -> dict:
    """Read the section `data` of a run's options; empty if there is none."""
    return read_section(checkpoint, "config", "data")


def read_scales(checkpoint: dict, path: Path) -> tuple[float, ...]:
    """Read the scales of the evaluation of a run; 1 if it states none. Raises UserError."""
    given = read_section(checkpoint, "config", "objective", "segmentation")
    try:
        return SegmentationOptions(eval_scales=given.get("eval_scales", (1.0,))).eval_scales
    except UserError as error:
        raise checkpoints.CheckpointError(f"{path}: {error}; train it again") from error


def read_section(document: dict, *names: str) -> dict:
    """Return the dictionary below these names; empty if there is none."""
    for name in names:
        document = document.get(name)
        if not isinstance(document, dict):
            return {}
    return document


def find_division(trained: Trained, path: Path, dataset: str = "") -> Divided | None:
    """Return how the model's run divided the folder `path`; None if that is not the run's data.

    Also None if `dataset` is given and is not the run's. The run's data may have been moved, or
    images may have been added to it.
    """
    divided = trained.divided
    if divided is None or not path.is_dir() or dataset not in ("", divided.dataset):
        return None
    if os.path.realpath(divided.root) == os.path.realpath(path):
        return divided
    with suppress(UserError):
        images = Images(path, divided.dataset, division=divided.division)
        if images.fingerprint() == divided.fingerprint:
            return divided
    return None


def open_beside(trained: Trained, name: str, device: torch.device) -> Trained:
    """Load a network that was trained beside a model, such as an agent, from their checkpoint.

    Where it shares the model's weights it uses those of `trained`, which must be raw: the EMA is of
    the model alone. Both are placed on `device`, since moving them breaks the sharing. Raises
    UserError.
    """
    path, model, checkpoint = trained.path, trained.model.to(device), checkpoints.load(trained.path)
    weights = checkpoint.get(name)
    if not isinstance(weights, dict):
        raise UserError(
            f"{path} holds no {name}; give a checkpoint of a run that trains one beside its model, "
            f"or leave out --network {name}"
        )
    checkpoints.check_tensors(weights, path)
    shapes = [(trained.size, trained.size)]
    try:
        section = from_dict(complete(Objectives()), checkpoint["config"]["objective"])
        # Labels, mixing and epochs do not change what is built.
        plain = TargetRules(), MixOptions(mixtoken=False)
        objective = build_objective(Setting(section, *plain, shapes, 1, trained.name))
        joint = objective.wrap(model, model.num_classes, lambda network: network.to(device))
        network = joint.evaluated[name]
        network.load_state_dict(weights)
        network.eval()
        # Maps that become too small to be halved are found out in a forward pass alone.
        with torch.inference_mode():
            network(torch.zeros(1, 3, trained.size, trained.size, device=device))
    except (UserError, *CANNOT_BUILD) as error:
        raise UserError(
            f"{path}: its {name} cannot be built for inputs of {trained.size} px "
            f"({first_line(error)}); check --size, or copy the run again"
        ) from error
    return trained._replace(model=network, name=f"{name} of {trained.name}")


def crop_input(image: Image.Image, trained: Trained, crop_pct: float) -> np.ndarray:
    """Cut out what the model sees of an image, with the filter of its evaluation.

    Returns uint8 `[S, S, 3]`.
    """
    box_14 = center_box(np.array([image.height]), np.array([image.width]), crop_pct)
    top, left, height, width = box_14[0].tolist()
    filter = str_to_pil_interp(trained.interpolation)
    box_ltrb = left, top, left + width, top + height
    return crop_resize(image, box_ltrb, trained.size, filter)


def default_interpolation(checkpoint: dict, data: dict) -> str:
    """Return the filter of a checkpoint that states none: that of earlier runs, else timm's."""
    # Only checkpoints of train.py hold the recipe of their model.
    return OLD_INTERPOLATION if "recipe" in checkpoint else data["interpolation"]


def load_raw(model: nn.Module, checkpoint: dict, path: Path) -> None:
    """Load the raw weights of a checkpoint that has EMA weights too. Raises UserError."""
    raw = {key: value for key, value in checkpoint.items() if key not in checkpoints.AVERAGED}
    try:
        model.load_state_dict(checkpoints.match_names(checkpoints.select_weights(raw, path), model))
    except RuntimeError as error:
        raise UserError(
            f"{path} has no complete raw weights ({first_line(error)}); use --weights ema"
        ) from error


def at_size(
    model: nn.Module, recipe: checkpoints.ModelSpec, size: int, path: Path
) -> tuple[nn.Module, dict]:
    """Return the model for square inputs of `size` pixels, and the arguments that build it.

    A position table is resampled once. Our families resample it as their forward pass does;
    timm's with `set_input_size`, which every timm family with such a table has. Models with
    neither, as CNNs, are not changed. Raises UserError if the model cannot take this size.
    """
    kwargs, backbone = recipe.kwargs, find_backbone(model)
    # A detector fills images up to whole cells.
    side = -(-size // model.whole) * model.whole if isinstance(model, MaskRCNN) else size
    try:
        if isinstance(backbone, TokenTransformer) and has_table(backbone):
            if side != backbone.grid_size * backbone.patch_size:
                kwargs = kwargs | {"img_size": side}
                model = resample_table(model, recipe._replace(kwargs=kwargs).build())
        # Swin without a head takes any size; timm would scale its windows.
        elif hasattr(backbone, "set_input_size") and (backbone is model or has_table(backbone)):
            backbone.set_input_size(img_size=(side, side))
            # The exported config must build the model at this size.
            kwargs = kwargs | {"img_size": side}
        # Some families find out only in a forward pass that they cannot take the size.
        with torch.inference_mode():
            model.eval()(torch.zeros(1, 3, size, size))
    except CANNOT_BUILD as error:
        raise UserError(
            f"{path}: {recipe.name} cannot take inputs of {size} px ({first_line(error)}); choose "
            "another --size"
        ) from error
    return model, kwargs


def has_table(model: nn.Module) -> bool:
    """Return whether a model has a position table."""
    return getattr(model, "pos_embed", None) is not None


def resample_table(model: nn.Module, new: nn.Module) -> nn.Module:
    """Load the weights of `model` into `new`, with its position table resampled; return `new`."""
    before, after = find_backbone(model), find_backbone(new)
    sides = [after.grid_size] * 2, [before.grid_size] * 2
    table = resample_abs_pos_embed(before.pos_embed.detach(), *sides)
    name = "pos_embed" if before is model else "backbone.pos_embed"
    new.load_state_dict(model.state_dict() | {name: table})
    return new

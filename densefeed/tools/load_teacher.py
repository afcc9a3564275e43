"""Teachers by their words on a command line: a timm name, a checkpoint, or a module of the user's
own, with its class map.
"""

import hashlib
import importlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import timm
from timm.data import resolve_data_config
from torch import nn

from densefeed.models import checkpoints
from densefeed.relabel.class_map import ClassMap, read_class_map
from densefeed.relabel.network import Network, preprocessing_config
from densefeed.relabel.teacher import Teacher
from densefeed.storage.geometry import Geometry
from densefeed.system.errors import UserError
from densefeed.tools.load_model import imagenet_names

OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # package.module:factory
SAME = "-"  # in place of a class map: the teacher's classes are the data's


class Loaded(NamedTuple):
    """A network with its weights."""

    model: nn.Module
    config: dict  # mean, std and interpolation, as timm's data config
    class_names: list[str]  # where its checkpoint or it itself tells them


def load_teacher(
    words: Sequence[str],
    models: Sequence[str],
    sizes: Sequence[int],
    class_maps: Sequence[str],
    data_names: list[str],
    geometry: Geometry,
    views: int,
    tiles: int,
) -> tuple[Teacher, str]:
    """The teacher, on the CPU, and what a store calls it, class maps and views included.

    `words` name one network or the members of an ensemble; `models`, `sizes` and `class_maps` are
    one for all or one each, and the first and the last may be empty. Raises UserError, naming which
    cannot be used and why.
    """
    if not words:
        raise UserError(
            "--teacher is missing: a timm model's name, a checkpoint, a run folder, or package.module:factory"
        )
    sizes = _one_each(sizes, len(words), "--input-size")
    if min(sizes) < 1:
        raise UserError("--input-size must be at least 1 pixel")
    members, names = [], []
    each = zip(
        words,
        _one_each(models or [""], len(words), "--model"),
        sizes,
        _one_each(class_maps or [SAME], len(words), "--class-map"),
        strict=True,
    )
    for word, model_name, size, file in each:
        network = load_network(word, model_name, size)
        class_map = None
        if file != SAME:
            class_map = _class_map(Path(file), network, word, data_names)
            word = f"{word} by {Path(file).name} {_digest(class_map)}"
        elif network.class_names and network.class_names != data_names:
            raise UserError(
                f"{word} was trained on other classes than the data has "
                f"({network.class_names[0]}, ... and {data_names[0]}, ...); choose a teacher of the same classes, or give a --class-map"
            )
        members.append(
            {
                "model": network.model,
                "input_size": size,
                "config": network.config,
                "class_map": class_map,
                "name": word,
            }
        )
        names.append(word)
    others = [Network(**member) for member in members[1:]]
    teacher = Teacher(**members[0], geometry=geometry, views=views, tiles=tiles, others=others)
    return teacher, " + ".join(names) + (f", {views} views" if views > 1 else "")


def load_network(word: str, model_name: str, size: int) -> Loaded:
    """The network that a word names, for inputs of `size` pixels. `model_name` (timm's) is for
    checkpoints that do not say.
    """
    path = Path(word)
    path = path / "last.pt" if path.is_dir() else path
    try:
        if path.exists() or path.suffix in (".pt", ".pth", ".tar", ".safetensors"):
            model, checkpoint = checkpoints.build(path, model_name)
            model.pretrained_cfg.update(
                {name: checkpoint[name] for name in ("mean", "std") if name in checkpoint}
            )
            return Loaded(
                at_size(model, size),
                resolve_data_config(model=model),
                list(checkpoint.get("class_names", [])),
            )
    except checkpoints.CheckpointError as error:
        raise UserError(str(error)) from error
    if OWN.fullmatch(word):
        model = own_module(word)
        return Loaded(model, preprocessing_config(model), list(getattr(model, "class_names", [])))
    if not timm.is_model(word.split(".")[0]):
        raise UserError(f"{word} is neither a file nor a timm model; timm.list_models() lists them")
    try:
        model = at_size(timm.create_model(word, pretrained=True), size)
    except UserError:
        raise
    except Exception as error:  # the hub's client raises many kinds when a download fails
        raise UserError(
            f"the weights of {word} cannot be downloaded ({type(error).__name__}); give a file: "
            f"--teacher weights.safetensors --model {word}"
        ) from error
    return Loaded(model, resolve_data_config(model=model), [])


def own_module(word: str) -> nn.Module:
    """What `package.module:factory` makes, called without arguments; modules in the current folder
    are found too.
    """
    module_name, factory_name = word.split(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's own code raises
        raise UserError(
            f"{word}: {module_name} cannot be imported ({type(error).__name__}: {error}); name a module that is installed or here"
        ) from error
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise UserError(
            f"{word}: {module_name} has no function {factory_name}; name one that makes the teacher"
        )
    try:
        model = factory()
    except Exception as error:
        raise UserError(
            f"{word} failed ({type(error).__name__}: {error}); it is called without arguments"
        ) from error
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{word} made a {type(model).__name__}; it must make a torch.nn.Module with its weights loaded"
        )
    return model


def at_size(model: nn.Module, size: int) -> nn.Module:
    """The model ready for inputs of `size` pixels: timm's transformers resize their position
    tables, CNNs take any size.
    """
    if hasattr(model, "set_input_size"):
        try:
            model.set_input_size(img_size=(size, size))
        except (AssertionError, RuntimeError, ValueError, TypeError) as error:
            why = str(error).partition("\n")[0] or type(error).__name__
            raise UserError(
                f"{type(model).__name__} does not take images of {size} px ({why}); choose another --input-size"
            ) from error
    return model


def _one_each(values: Sequence, count: int, flag: str) -> list:
    if len(values) not in (1, count):
        raise UserError(
            f"{flag} was given {len(values)} times for {count} teachers; give it once, or once for each"
        )
    return list(values) * (count if len(values) == 1 else 1)


def _class_map(path: Path, network: Loaded, word: str, data_names: list[str]) -> ClassMap:
    names = network.class_names
    count = len(names) or getattr(network.model, "num_classes", 0)
    if not count:
        raise UserError(
            f"{word} does not say how many classes it has, which a --class-map needs; give it num_classes"
        )
    return read_class_map(path, names or imagenet_names(network.model), count, data_names)


def _digest(class_map: ClassMap) -> str:
    pairs = list(zip(class_map.source.tolist(), class_map.target.tolist(), strict=True))
    return hashlib.sha256(repr(pairs).encode()).hexdigest()[:8]

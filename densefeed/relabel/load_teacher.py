"""Load teachers named on a command line: a timm model, a checkpoint, or a user's own module.

Each may have a class map.
"""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import timm
import torch
from torch import nn

from densefeed.models import checkpoints
from densefeed.models.mask_rcnn import MaskRCNN
from densefeed.models.model_spec import imagenet_names, is_registered
from densefeed.relabel.class_map import ClassMap, name_unmapped, read_class_map
from densefeed.relabel.network import Network, preprocessing_config
from densefeed.relabel.reference_match import References
from densefeed.relabel.teacher import Teacher
from densefeed.storage.dataset_names import describe_difference, match_numbers
from densefeed.storage.geometry import Geometry
from densefeed.system.devices import choose_device
from densefeed.system.errors import UserError, first_line
from densefeed.system.factories import call_factory, is_factory
from densefeed.system.terminal import print

# In place of a file: the teacher's classes are those of the data.
NO_CLASS_MAP = "-"


class Loaded(NamedTuple):
    """A network with its weights."""

    model: nn.Module
    config: dict  # mean, std and interpolation, as timm's data config
    class_names: list[str]  # empty if neither checkpoint nor module has them


def load_teacher(
    sources: Sequence[str | nn.Module],
    models: Sequence[str],
    sizes: Sequence[int],
    class_maps: Sequence[str],
    data_names: list[str],
    geometry: Geometry,
    tta_views: int,
    tiles: int,
    keep_unmapped: bool = False,
    map_side: int = 0,
) -> tuple[Teacher, str]:
    """Load the teacher on the CPU; return it and its name in a store.

    A network that states the names of the data's classes in another order is matched by name.
    `sources` are one network or the members of an ensemble, by name or as modules. `models`,
    `sizes` and `class_maps` are one for all or one for each; the first and the last may be empty.
    The name includes class maps and test-time views. With `keep_unmapped` the teacher has one more
    class than the data, what its class maps leave. `map_side` is that of Network. Raises UserError
    with the source that cannot be used and the reason.
    """
    if not sources:
        raise UserError(
            "--teacher is missing: pass the name of a timm model, a checkpoint, a run folder, or "
            "package.module:factory"
        )
    sizes = _repeat(sizes, len(sources), "--input-size")
    if min(sizes) < 1:
        raise UserError("--input-size must be at least 1 pixel")
    if any(models) and not any(isinstance(s, str) and is_checkpoint(s) for s in sources):
        raise UserError(
            "--model is timm's name of a checkpoint, and no --teacher is one; remove it"
        )
    models = _repeat(models or [""], len(sources), "--model")
    class_maps = _repeat(class_maps or [NO_CLASS_MAP], len(sources), "--class-map")
    members, matches = [], []
    for source, model_name, size, file in zip(sources, models, sizes, class_maps, strict=True):
        network = load_network(source, model_name, size)
        source = source if isinstance(source, str) else type(source).__name__
        by, class_map, first = "", None, ""
        theirs = _find_names(network, data_names)
        if file != NO_CLASS_MAP:
            class_map = _read_class_map(Path(file), network, source, data_names)
            by = f" by {Path(file).name}"
        elif theirs != data_names and sorted(theirs) == sorted(data_names):
            class_map = _renumber(theirs, data_names)
            by = " by name"
        elif numbers := _match_numbers(network.class_names, data_names):
            class_map, first = _select(numbers), network.class_names[0]
            by = " by number"
        # Without names only the number of classes can be compared, which `begin_pass` does.
        elif network.class_names and network.class_names != data_names:
            difference = describe_difference(
                network.class_names, "of the teacher", data_names, "of the data"
            )
            raise UserError(
                f"{source} was trained on other classes than the data has ({difference}); choose a "
                "teacher of the same classes, or pass a --class-map"
            )
        matches.append((not theirs and class_map is None, first))
        if keep_unmapped:
            count = _count_classes(network, source)
            every = torch.arange(count)
            class_map = name_unmapped(class_map or ClassMap(every, every, count), count)
        # The store keeps this name. Another class map gives another name, so that no pass is
        # resumed with it.
        name = f"{source}{by} {_digest(class_map)}" if by else source
        members.append((network.model, size, network.config, class_map, name))
    joined = " + ".join(member[-1] for member in members)
    (model, size, config, class_map, name), *others = members
    teacher = Teacher(
        model,
        size,
        geometry,
        config,
        class_map=class_map,
        name=name,
        tta_views=tta_views,
        tiles=tiles,
        others=[Network(*other, map_side) for other in others],
        unmapped=keep_unmapped,
        map_side=map_side,
    )
    for network, match in zip(teacher.networks, matches, strict=True):
        network.by_order, network.by_number = match
    return teacher, joined + (f", {tta_views} views" if tta_views > 1 else "")


def is_checkpoint(source: str) -> bool:
    """Return whether a teacher is a file or a run folder."""
    path = Path(source)
    # A missing file of such a name is a wrong path and not an unknown timm model.
    return path.exists() or path.suffix in (".pt", ".pth", ".tar", ".safetensors")


def load_network(source: str | nn.Module, model_name: str, size: int) -> Loaded:
    """Load the network that `source` names or is, for inputs of `size` pixels.

    `model_name` is timm's name for checkpoints that do not contain it.
    """
    if isinstance(source, nn.Module):
        return Loaded(source, preprocessing_config(source), list_names(source))
    if is_checkpoint(source):
        path = checkpoints.find_file(Path(source))
        model, checkpoint = checkpoints.build(path, model_name)
        if isinstance(model, MaskRCNN):
            raise UserError(
                f"{path} holds a detector, whose boxes are no scores of cells; give a classifier "
                "or a network of segmentation"
            )
        # A run may have its own mean and deviation.
        facts = checkpoints.read_facts(checkpoint, path)
        own = {"mean": facts.mean, "std": facts.std}
        model.pretrained_cfg.update({name: value for name, value in own.items() if value})
        model, names = set_input_size(model, size), facts.class_names
        if names and len(names) != getattr(model, "num_classes", len(names)):
            raise UserError(
                f"{path} names {len(names)} classes but its model has {model.num_classes}; train "
                "or copy it again"
            )
    elif is_factory(source):
        model = call_factory(source)
        if not isinstance(model, nn.Module):
            raise UserError(
                f"{source} made a {type(model).__name__}; it must make a torch.nn.Module with its "
                "weights loaded"
            )
        names = list_names(model)
    else:
        model, names = set_input_size(download(source), size), []
    return Loaded(model, preprocessing_config(model), names)


def load_references(
    name: str,
    model: str,
    input_size: int,
    class_names: Sequence[str],
    device: str = "auto",
    class_map: Path | None = None,
    remedy: str = "choose another reference",
) -> References:
    """Load a model as two references: shown whole images, and shown their center squares.

    `name` and `class_map` are a teacher and its class map as in densefeed label. Prints a line if
    it or the maps state no names of classes, which are then matched by order. Raises UserError if
    the model cannot be loaded, was trained on other classes (what to do is the `remedy`), or does
    not take inputs of `input_size` pixels.
    """
    network = load_network(name, model, input_size)
    names, merged = _find_names(network, list(class_names)), None
    if class_map:
        merged, names = _read_class_map(class_map, network, name, list(class_names)), class_names
    if not names:
        print(
            f"note: {name} states no names of classes; they are matched by order with those of the "
            "maps"
        )
    if names and _match_numbers(names, class_names) == list(range(len(names))):
        print(f"note: {describe_numbers('the store', name, names[0])}")
    elif names and list(names) != list(class_names):
        difference = describe_difference(names, "of the reference", class_names, "of the maps")
        raise UserError(
            f"{name} was trained on other classes than the maps have ({difference}); {remedy}"
        )
    place = choose_device(device)
    # Both show their pictures to the same network.
    found = {
        geometry: Teacher(
            network.model, input_size, geometry, network.config, class_map=merged, name=name
        ).to(place)
        for geometry in ("squash", "center-crop")
    }
    # A wrong size is refused before any image is read.
    found["squash"].count_cells()
    return found


def download(source: str) -> nn.Module:
    """Create a timm model with its published weights. Raises UserError."""
    if not is_registered(source):
        raise UserError(
            f"{source} is neither a file nor a timm model; timm.list_models(include_tags=True) "
            "lists them"
        )
    # The hub's client warns of each of its retries, and raises many types when a download fails.
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.ERROR)
    try:
        return timm.create_model(source, pretrained=True)
    except Exception as error:
        raise UserError(
            f"the weights of {source} cannot be downloaded ({type(error).__name__}); name a file "
            f"of them in its place, and {source} with --model, or --reference-model of an import"
        ) from error
    finally:
        hub.setLevel(level)


def list_names(model: nn.Module) -> list[str]:
    """Return the names of classes that a user's module states; [] without them."""
    return list(getattr(model, "class_names", None) or [])


def set_input_size(model: nn.Module, size: int) -> nn.Module:
    """Prepare a model for inputs of `size` pixels, and return it.

    timm's transformers resize their position tables; CNNs take any size.
    """
    if hasattr(model, "set_input_size"):
        try:
            model.set_input_size(img_size=(size, size))
        except (AssertionError, RuntimeError, ValueError, TypeError) as error:
            raise UserError(
                f"{type(model).__name__} does not take images of {size} px ({first_line(error)}); "
                "choose another --input-size, or --reference-size of an import"
            ) from error
    return model


def _repeat(values: Sequence, count: int, flag: str) -> list:
    """Return one value for each of `count` teachers."""
    if len(values) not in (1, count):
        raise UserError(
            f"{flag} was given {len(values)} times for {count} teachers; pass it once, or once for "
            "each"
        )
    return (list(values) * count)[:count]


def _read_class_map(path: Path, network: Loaded, source: str, data_names: list[str]) -> ClassMap:
    """Read a class map; names of the teacher's classes may be ImageNet's."""
    names = network.class_names or imagenet_names(network.model)
    return read_class_map(path, names, _count_classes(network, source), data_names)


def _count_classes(network: Loaded, source: str) -> int:
    """Return the number of a teacher's classes; UserError if it is not known."""
    count = len(network.class_names) or getattr(network.model, "num_classes", 0)
    if not count:
        raise UserError(
            f"the number of classes of {source} is not known, and a --class-map needs it; set "
            "num_classes of the module"
        )
    return count


def _find_names(network: Loaded, data_names: list[str]) -> list[str]:
    """Return the names of a teacher's classes: its own, or ImageNet's if those are the data's."""
    known = imagenet_names(network.model)
    return network.class_names or (known if sorted(known) == sorted(data_names) else [])


def _renumber(teacher_names: list[str], data_names: list[str]) -> ClassMap:
    """Return the class map between two orders of the same names."""
    place = {name: number for number, name in enumerate(data_names)}
    target = torch.tensor([place[name] for name in teacher_names])
    return ClassMap(torch.arange(len(target)), target, len(target))


def _match_numbers(teacher_names: list[str], data_names: Sequence[str]) -> list[int]:
    """Return the teacher's class of each class of data without names, as validate does; else []."""
    count = len(data_names)
    differ = teacher_names != list(data_names) and count <= len(teacher_names)
    # Numbers below their count stand in for names; others are names of folders.
    return match_numbers(data_names, count) if differ else []


def _select(classes: list[int]) -> ClassMap:
    """Return the class map that keeps these classes of a teacher, in this order."""
    source, target = torch.tensor(classes).sort()
    return ClassMap(source, target, len(classes))


def describe_numbers(numbered: object, teacher: str, first: str) -> str:
    """Describe that classes of `numbered` are matched by number; `first` is the teacher's of 0."""
    return (
        f"{numbered} has numbers for names of classes; they are matched by number with those of "
        f"{teacher}, as 0 with {first!r}; if these are other classes, the maps are wrong"
    )


def _digest(class_map: ClassMap) -> str:
    """Hash the pairs of a class map; 8 hexadecimal digits."""
    pairs = list(zip(class_map.source.tolist(), class_map.target.tolist(), strict=True))
    return hashlib.sha256(repr(pairs).encode()).hexdigest()[:8]

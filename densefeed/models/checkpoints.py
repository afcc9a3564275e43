"""Checkpoints: plain dictionaries with everything needed to use a model again.

`torch.load(weights_only=True)` reads them. Files of LV-ViT, timm and EfficientNet-PyTorch are read
too, safetensors included.
"""

import argparse
import functools
import hashlib
import inspect
import math
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from densefeed.models.efficientnet_layout import rename_layout
from densefeed.models.lvvit import LVViT
from densefeed.models.model_spec import (
    CANNOT_BUILD,
    ModelSpec,
    build_on_meta,
    find_forbidden,
    imagenet_names,
    is_channels,
    is_registered,
)
from densefeed.models.t2t import T2TViT
from densefeed.storage.dataset_names import list_some
from densefeed.storage.geometry import LEAST_CROP
from densefeed.storage.torch_files import TorchFileError, check_torch_file
from densefeed.system.channels import CHANNEL_RANGES
from densefeed.system.errors import UserError, explain_os_error, first_line, is_out_of_memory
from densefeed.system.file_kinds import name_kind
from densefeed.system.files import open_regular
from densefeed.system.json_files import is_number, read_json
from densefeed.system.terminal import escape_controls, print, warn

# Bytes of a checkpoint's pickle. With 10,000 tensors and 20,000 class names it has 2 MB.
MAX_PICKLE = 2**24
# Bytes of the header of a safetensors file, about 100 for each tensor. One of 75 MB took 2.7 GB.
MAX_HEADER = 2**22
# Bytes of a model's tables that are not weights, such as Swin's masks of its windows. The largest
# of timm's are the 202 MB of beit_large_patch16_512.
MAX_TABLES = 2**28
# Beside the checkpoints of a run folder; training/run_checkpoints.py writes it.
MANIFEST = "manifest.json"
# What densefeed export and the hub call the weights that the config.json beside them describes.
EXPORTED = "model.safetensors"
# Tensors of other dtypes, such as complex numbers, are not weights of a model.
NUMBERS = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
# Keys under which a checkpoint holds weights, EMA weights first: ours, timm's two, ours, timm's and
# Lightning's, that of PyTorch's tutorials.
AVERAGED = ("ema", "state_dict_ema", "model_ema")
WEIGHTS = (*AVERAGED, "model", "state_dict", "model_state_dict")
# Names of the parts of a module that hold a running average of its network: EMA, SWA, and those of
# self-supervised methods.
AVERAGES = re.compile(r"(^|[._])(ema|swa|avg|averaged|teacher|target|momentum)([._]|$)")


class CheckpointError(UserError):
    """A checkpoint that cannot be used; one sentence with the file and the remedy."""


class Facts(NamedTuple):
    """What a checkpoint of a run states beside weights; None or empty where it states nothing."""

    mean: tuple[float, ...] | None  # of input from 0 to 1
    std: tuple[float, ...] | None
    class_names: list[str]  # in the order of the logits
    size: int | None  # side of the input in training, pixels
    crop_pct: float | None  # side of the evaluation crop, share of the shorter side
    eval_interpolation: str | None  # filter that resizes that crop


def find_file(path: Path) -> Path:
    """Return a checkpoint, or that of a folder: a run's newest one, or exported weights.

    Raises CheckpointError if a folder has neither.
    """
    if not path.is_dir():
        return path
    for name in ("last.pt", EXPORTED):
        if (path / name).is_file():
            return path / name
    raise CheckpointError(
        f"{path} has no last.pt and no {EXPORTED}; give a run folder of densefeed train, a folder "
        "of densefeed export, or a checkpoint file"
    )


def load(path: Path) -> dict:
    """Load the dictionary of a checkpoint on the CPU, without running code from the file.

    A file that the manifest of its run folder lists must have the SHA-256 stated there. Exported
    weights come with what `read_exported` finds beside them. Raises CheckpointError.
    """
    try:
        with open_regular(path) as file:
            verify(file, path)
            if path.suffix == ".safetensors":
                check_header(file, path)
                return {"model": load_file(path)} | read_exported(path)
            check_torch_file(file, MAX_PICKLE)
            # timm's trainer and those derived from it save the command line as a Namespace, which
            # has attributes and no code. torch warns about damaged pickles.
            allowed = torch.serialization.safe_globals([argparse.Namespace])
            with allowed, warnings.catch_warnings(action="ignore"):
                checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except (CheckpointError, MemoryError):
        raise
    # Unpickling a damaged file may raise nearly any exception.
    except Exception as error:
        # Errors of the system name the file and have a remedy.
        if isinstance(error, OSError) and error.filename:
            raise CheckpointError(explain_os_error(error)) from None
        if kind := name_other_kind(path):
            raise CheckpointError(
                f"{path} is {kind}, and not a checkpoint; give a checkpoint, a run folder or a "
                f"folder with {EXPORTED}"
            ) from error
        readable = isinstance(error, TorchFileError | SafetensorError | OSError)
        why = error if readable else type(error).__name__
        what = f"is not a checkpoint that loads safely ({why})"
        raise CheckpointError(f"{path} {what}; copy or train it again") from error
    if not isinstance(checkpoint, dict):
        what = f"a {type(checkpoint).__name__} instead of a dictionary of weights"
        raise CheckpointError(f"{path} holds {what}; choose another file")
    return checkpoint


def name_other_kind(path: Path) -> str:
    """Name the kind of a file that is no checkpoint; empty for a damaged checkpoint."""
    # ONNX files have no first bytes of their own.
    if path.suffix.lower() == ".onnx":
        return "an ONNX network"
    kind = name_kind(path)
    return "" if "checkpoint" in kind or kind == "a safetensors file" else kind


def read_exported(path: Path) -> dict:
    """Return what config.json beside exported weights states, as a checkpoint of a run would.

    It has timm's form; of others, such as transformers', only names of classes are read. Raises
    CheckpointError if it is damaged.
    """
    config = path.with_name("config.json")
    if path.name != EXPORTED or not config.is_file():
        return {}
    try:
        stated = read_json(config, "copy it again")
    except UserError as error:
        raise CheckpointError(str(error)) from None
    inputs, kwargs = (stated.get(key, {}) for key in ("pretrained_cfg", "model_args"))
    if not isinstance(inputs, dict) or not isinstance(kwargs, dict):
        return {}
    found = {"class_names": read_names(stated) or read_names(inputs)}
    name = stated.get("architecture")
    if "num_classes" in stated:
        kwargs = {"num_classes": stated["num_classes"]} | kwargs
    # A model that cannot be built so, or is evaluated with another filter than loaders have, may
    # still be named with --model.
    known = FACTS["eval_interpolation"][0](inputs.get("interpolation"))
    if not known or not is_registered(name) or find_forbidden(kwargs):
        return found
    shape = inputs.get("input_size")
    data = {
        "size": shape[-1] if isinstance(shape, list) and shape else None,
        "crop_pct": inputs.get("crop_pct"),
        "eval_interpolation": inputs.get("interpolation"),
    }
    found |= {key: inputs.get(key) for key in ("mean", "std")}
    return found | {"recipe": {"name": name, "kwargs": kwargs}, "config": {"data": data}}


def check_header(file: BinaryIO, path: Path) -> None:
    """Raise CheckpointError for a safetensors file whose header is larger than any model's."""
    file.seek(0)
    # Its length is the first eight bytes; safetensors refuses a file without them.
    if int.from_bytes(file.read(8), "little") > MAX_HEADER:
        raise CheckpointError(
            f"{path} has a header of more than {MAX_HEADER:,} bytes; choose another file"
        )


def verify(file: BinaryIO, path: Path) -> None:
    """Raise CheckpointError if the manifest beside a checkpoint states another SHA-256.

    A file without a manifest, or that it does not list, is not compared. A manifest that cannot be
    read is a warning.
    """
    # OUT/last.pt is a link into the folder of the manifest.
    real = Path(os.path.realpath(path))
    manifest = real.with_name(MANIFEST)
    if not manifest.is_file():
        return
    try:
        entries = read_json(manifest, "copy it again", list)
        hashes = {entry["file"]: entry["sha256"] for entry in entries}
    except (UserError, TypeError, KeyError):
        warn_unreadable(manifest)
        return
    if real.name in hashes and hashlib.file_digest(file, "sha256").hexdigest() != hashes[real.name]:
        raise CheckpointError(
            f"{path} is damaged: its SHA-256 is not the one in {manifest}; copy the run folder "
            "again, or use an older checkpoint"
        )


@functools.cache
def warn_unreadable(manifest: Path) -> None:
    """Warn once that a manifest cannot be read."""
    warning = "cannot be read, so no SHA-256 of its checkpoints is compared"
    warn(f"{manifest} {warning}")


def select_weights(checkpoint: dict, path: Path) -> dict[str, Tensor]:
    """Return the weights to use, EMA weights if any, without the prefixes of DDP and compile.

    Raises CheckpointError for anything but dense tensors of finite numbers.
    """
    key = weights_key(checkpoint)
    weights = checkpoint[key] if key else checkpoint
    if not weights or not all(isinstance(n, str) for n in weights):
        raise CheckpointError(f"{path} holds no dictionary of weights; choose another file")
    if len(nested := nested_weights(checkpoint)) > 1 and not key:
        names = ", ".join(ascii(name)[1:-1][:100] for name in nested[:5])
        raise CheckpointError(
            f"{path} holds dictionaries of weights under the keys {names}; save one of them alone, "
            "or under the key model"
        )
    check_tensors(weights, path)
    return {
        re.sub(r"^(?:module\.|_orig_mod\.)+", "", name): tensor for name, tensor in weights.items()
    }


def match_names(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return weights by the names that they have in `model`.

    What all names begin with, such as `model.` of a LightningModule or `backbone.`, is removed; a
    part that names of `model` begin with too stays. Where names begin differently, the first of
    `find_prefixes` is taken, without others inside it. Names of EfficientNet-PyTorch become timm's.
    """
    if prefixes := find_prefixes(weights, model):
        prefix, *others = prefixes
        inside = tuple(other for other in others if other.startswith(prefix))
        weights = {
            name.removeprefix(prefix): tensor
            for name, tensor in weights.items()
            if name.startswith(prefix) and not (inside and name.startswith(inside))
        }
    own = {name.partition(".")[0] for name in model.state_dict()}
    while len(parts := {name.partition(".")[0] for name in weights}) == 1 and not parts & own:
        rest = {name.partition(".")[2]: tensor for name, tensor in weights.items()}
        if not all(rest):
            break
        weights = rest
    return rename_layout(weights, model)


def find_prefixes(weights: dict[str, Tensor], model: nn.Module) -> list[str]:
    """Return what names of weights begin with where all tensors of the model follow, best first.

    Its heads may be missing. Running averages come last, then the order is the file's.
    """
    heads = find_heads(model)
    expected = [
        name
        for name in model.state_dict()
        if name.rpartition(".")[0] not in heads and not name.endswith(".num_batches_tracked")
    ]
    if not expected:
        return []
    rare = max(expected, key=len)
    starts = [name.removesuffix(rare) for name in weights if name.endswith(rare)]
    complete = [
        start
        for start in starts
        if start[-1:] in ("", ".") and all(start + name in weights for name in expected)
    ]
    return sorted(complete, key=lambda start: (bool(start), bool(AVERAGES.search(start))))


def describe_left_out(stated: dict[str, Tensor], taken: dict[str, Tensor], model: nn.Module) -> str:
    """Describe which network `match_names` took of the weights that a file states; "" if all."""
    count = len(stated) - len(taken)
    if not count:
        return ""
    prefix = find_prefixes(stated, model)[0]
    which = f"the tensors of {escape_controls(prefix)}*" if prefix else "the outer network"
    return f"took {which}; {count:,} other tensors of the file left out"


def check_tensors(tensors: dict[str, object], path: Path) -> None:
    """Raise CheckpointError unless all values are dense tensors of finite numbers."""
    for name, tensor in tensors.items():
        if type(tensor) not in (Tensor, nn.Parameter):
            raise CheckpointError(f"{path} holds no dictionary of weights; choose another file")
        shown = ascii(name)[1:-1][:100]
        dense = tensor.layout is torch.strided and tensor.dtype in NUMBERS
        # A tensor of any size may repeat the bytes of a small storage.
        if not dense or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{path}: {shown} is not a dense tensor; choose another file")
        if not tensor.isfinite().all():
            raise CheckpointError(
                f"{path}: {shown} has values that are not finite; use an older checkpoint"
            )
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()}
    # Models that tie weights save some storages twice, and none repeats most of them.
    if sum(t.nbytes for t in tensors.values()) > 4 * sum(held.values()):
        raise CheckpointError(f"{path}: its weights repeat a few storages; choose another file")


def weights_key(checkpoint: dict) -> str:
    """Return the key of the weights to use, or "" if the checkpoint itself is the state dict.

    Any other key than WEIGHTS is used if it alone holds tensors.
    """
    # `ema` is None in the checkpoints of a run without one.
    known = [key for key in WEIGHTS if isinstance(checkpoint.get(key), dict) and checkpoint[key]]
    nested = [] if known else nested_weights(checkpoint)
    return known[0] if known else nested[0] if len(nested) == 1 else ""


def nested_weights(checkpoint: dict) -> list[str]:
    """Return the keys under which a checkpoint holds dictionaries of tensors alone."""
    return [
        key
        for key, value in checkpoint.items()
        if isinstance(key, str)
        and isinstance(value, dict)
        and value
        and all(isinstance(tensor, Tensor) for tensor in value.values())
    ]


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
    spec = read_spec(checkpoint, path)
    name = spec.name if spec else model_name
    # timm's names may end in a tag, as in resnet10t.c3_in1k.
    if model_name and not model_name.startswith(name):
        raise CheckpointError(
            f"{path} holds a model {name}; leave out --model {model_name} (of an import "
            "--reference-model)"
        )
    if not name:
        raise CheckpointError(
            f"{path} does not contain its model's name; give it with --model, that of the "
            "reference of an import with --reference-model"
        )
    if not is_registered(name):
        raise CheckpointError(
            f"{path}: timm knows no model {ascii(name)[:100]}; timm.list_models(include_tags=True) "
            "lists those it knows; for one of your own import the file that registers it before "
            "the command, as docs/extending.md shows"
        )
    weights = select_weights(checkpoint, path)
    try:
        if spec:
            # The shapes are compared before the model takes memory: a file may state any size.
            with warnings.catch_warnings(action="ignore"):
                twin = build_on_meta(spec)
                twin.load_state_dict(weights)
            check_tables(twin, path)
        else:
            twin, stated = build_on_meta(ModelSpec(name, {})), weights
            weights = match_names(stated, twin)
            if note := describe_left_out(stated, weights, twin):
                print(f"note: {path}: {note}")
                heads = {f"{head}.weight" for head in find_heads(twin)} & twin.state_dict().keys()
                if missing := sorted(heads - weights.keys()):
                    raise CheckpointError(
                        f"{path} has the classifier of {name} under another name than "
                        f"{missing[0]} ({note}); save the model's own state_dict"
                    )
        model = spec.build() if spec else build_for_weights(name, weights)
        model.load_state_dict(weights)
    except CANNOT_BUILD as error:
        if is_out_of_memory(error):
            raise
        # The second line of PyTorch's message names weights that do not fit, perhaps hundreds.
        reason = " ".join(line.strip()[:200] for line in str(error).splitlines()[:2])
        remedy = "copy or train it again" if spec else "check --model, or --reference-model"
        raise CheckpointError(
            f"{path} does not fit the model {name}: {reason}; {remedy}"
        ) from error
    return model, checkpoint


def check_tables(twin: nn.Module, path: Path) -> None:
    """Raise CheckpointError if a model takes memory for more than its weights."""
    tables = sum(buffer.nbytes for buffer in twin.buffers())
    # A large model may be trained at a larger size than timm's.
    if tables > max(MAX_TABLES, 4 * sum(weights.nbytes for weights in twin.parameters())):
        raise CheckpointError(
            f"{path}: its recipe builds tables of {tables:,} bytes beside the weights; train it "
            "again with a smaller img_size or window_size"
        )


def read_spec(checkpoint: dict, path: Path) -> ModelSpec | None:
    """Return how to build the model of a run's checkpoint again, None for another file.

    Raises CheckpointError for what no run writes.
    """
    if "recipe" not in checkpoint:
        return None
    recipe = checkpoint["recipe"]
    fields = recipe.items() if isinstance(recipe, dict) else ()
    if {name: type(value) for name, value in fields} != ModelSpec.__annotations__:
        raise CheckpointError(
            f"{path}: its recipe is not the name and the arguments of a model; copy or train it "
            "again"
        )
    if forbidden := find_forbidden(recipe["kwargs"]):
        raise CheckpointError(f"{path}: its recipe cannot be used: {forbidden}; train it again")
    return ModelSpec(**recipe)


def read_facts(checkpoint: dict, path: Path) -> Facts:
    """Read what a checkpoint states beside weights. Raises CheckpointError for impossible values.

    Checkpoints of earlier versions hold all options side by side.
    """
    # The names of a plain state dict are those of tensors.
    stated = checkpoint if weights_key(checkpoint) else {}
    config = stated.get("config")
    config = config if isinstance(config, dict) else {}
    data = config["data"] if isinstance(config.get("data"), dict) else config
    given = {name: stated.get(name) for name in ("mean", "std")}
    given["class_names"] = read_names(stated)
    given |= {name: data.get(name) for name in ("size", "crop_pct", "eval_interpolation")}
    for name, (valid, expected) in FACTS.items():
        if given[name] is not None and not valid(given[name]):
            raise CheckpointError(f"{path}: its {name} is not {expected}; copy or train it again")
    for name in ("mean", "std"):
        given[name] = given[name] and tuple(given[name])
    return Facts(**given | {"class_names": list(given["class_names"] or [])})


def read_names(stated: dict) -> object:
    """Return the names of classes in the order of the logits; None if a file states none.

    They are `class_names` of our checkpoints, timm's `label_names`, torchvision's `class_to_idx`,
    or `id2label` of transformers. Only the first may be anything but a list of names.
    """
    if stated.get("class_names") is not None:
        return stated["class_names"]
    names, numbers = stated.get("label_names"), stated.get("class_to_idx")
    if not names and isinstance(numbers, dict) and all(type(n) is int for n in numbers.values()):
        names = {number: name for name, number in numbers.items()}
    names = names or stated.get("id2label")
    if isinstance(names, dict):
        # The keys of a JSON object are texts.
        names = [names.get(number, names.get(str(number))) for number in range(len(names))]
    # transformers makes up names such as LABEL_0 where it knows none.
    if not names or not are_names(names) or names[0] == "LABEL_0":
        return None
    return list(names)


def are_names(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(is_encodable, value))


def is_encodable(value: object) -> bool:
    """Whether a value is a string that a file can hold, without halves of surrogate pairs."""
    return isinstance(value, str) and value.encode(errors="replace").decode() == value


# How a value is checked, and what it should be.
FACTS = {
    "mean": (lambda value: is_channels("mean", value), f"three numbers {CHANNEL_RANGES['mean']}"),
    "std": (lambda value: is_channels("std", value), f"three numbers {CHANNEL_RANGES['std']}"),
    "class_names": (are_names, "a list of names"),
    "size": (lambda value: type(value) is int and value > 0, "a number of pixels"),
    "crop_pct": (lambda value: is_number(value) and LEAST_CROP <= value <= 1, "from 0.001 to 1"),
    "eval_interpolation": (lambda value: value in ("bilinear", "bicubic"), "bilinear or bicubic"),
}


def initialize(model: nn.Module, path: Path, class_names: Sequence[str] = ()) -> str:
    """Initialize a model from the weights in a file; return one line on what was used and is new.

    The file may be ours, or a run folder, a published LV-ViT file, or one of timm's or
    EfficientNet-PyTorch's for the same model, safetensors included; EMA weights are preferred. The
    model family's `checkpoint_filter_fn` (timm's convention) adapts names and the position table. A
    head that the file does not have, or has with other classes, keeps its initial weights. One of
    the model's `class_names` in another order is put in theirs; () does not compare names. Raises
    CheckpointError, and changes nothing, where any other tensor is missing, unexpected or of
    another shape.
    """
    path = find_file(path)
    checkpoint = load(path)
    stated = select_weights(checkpoint, path)
    weights = match_names(stated, model)
    # timm applies this function to the weights that it downloads, and not to files.
    filter_fn = getattr(inspect.getmodule(type(model)), "checkpoint_filter_fn", None)
    try:
        fitted = dict(filter_fn(weights, model)) if filter_fn else weights
    # The tensors are those of another family.
    except CANNOT_BUILD as error:
        raise CheckpointError(
            f"{path} does not fit {type(model).__name__} ({first_line(error)}); choose another "
            "file or model"
        ) from error

    unused = len(weights) - len(fitted)
    fitted, others, about_classes = match_heads(fitted, model, checkpoint, list(class_names))
    fitted, new, classes = drop_unfit_heads(fitted, model, others)
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
    if left_out := describe_left_out(stated, weights, model):
        notes.append(left_out)
    table, resized = weights.get("pos_embed"), fitted.get("pos_embed")
    if table is not None and resized is not None and table.shape != resized.shape:
        notes.append(f"position table resized from {table.shape[1]:,} to {resized.shape[1]:,} rows")
    if about_classes and get_heads(fitted, model):
        notes.append(about_classes)
    if new:
        in_file = f" ({classes:,} {'other ' * others}classes in the file)" if classes else ""
        notes.append(f"new: {' and '.join(new)}{in_file}")
    # A decoder, which no file of a classifier has.
    if unused < 0:
        notes.append("what else the file lacks keeps its initial weights")
    if unused > 0:
        notes.append(f"{unused:,} tensors of the file not used")
    return "; ".join(notes)


def find_heads(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the model's heads."""
    classifiers = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    return (classifiers,) if isinstance(classifiers, str) else tuple(classifiers)


def get_heads(weights: dict[str, Tensor], model: nn.Module) -> list[str]:
    """Return the names of the model's heads that `weights` have with as many classes."""
    own = model.state_dict()
    pairs = {
        name: (weights.get(f"{name}.weight"), own.get(f"{name}.weight"))
        for name in find_heads(model)
    }
    return [
        name
        for name, (there, here) in pairs.items()
        if there is not None and here is not None and len(there) == len(here)
    ]


def match_heads(
    weights: dict[str, Tensor], model: nn.Module, checkpoint: dict, class_names: list[str]
) -> tuple[dict[str, Tensor], bool, str]:
    """Put the rows of heads in the order of `class_names`, by the names that a file states.

    Returns the weights, whether the file's classes are others, and what was matched how.
    """
    names = read_names(checkpoint) if weights_key(checkpoint) else None
    names = list(names) if names and are_names(names) else []
    # ImageNet's numbering is known.
    if not names and sorted(imagenet_names(model)) == sorted(class_names):
        names = imagenet_names(model)
    if not class_names or names == class_names:
        return weights, False, ""
    if sorted(names) == sorted(class_names):
        rows, heads = [names.index(name) for name in class_names], get_heads(weights, model)
        ordered = {
            name: order_rows(tensor, rows)
            for name, tensor in weights.items()
            if name.rpartition(".")[0] in heads
        }
        return weights | ordered, False, "classes of its head renumbered by name"
    # A .beton of stock FFCV, or a model trained on one, has numbers in place of names.
    unnamed = [str(number) for number in range(len(class_names))]
    if names and unnamed not in (names, class_names):
        return weights, True, ""
    if names and get_heads(weights, model):
        warn(
            f"the classes of the head ({list_some(names)}) have other names than those of "
            f"the data ({list_some(class_names)}) and are matched by their order; if they are "
            "other classes, the head begins with weights that mean nothing here"
        )
    return weights, False, "classes of its head matched with those of the data by their order"


def order_rows(tensor: Tensor, rows: list[int]) -> Tensor:
    """Put the rows of a head, of a detector's also behind those of the background, in this order.

    A detector's head has 1 or 4 rows a class.
    """
    classes = len(rows) + 1
    if len(tensor) == len(rows) or len(tensor) % classes:
        return tensor[rows]
    return tensor.unflatten(0, (classes, -1))[[0, *(row + 1 for row in rows)]].flatten(0, 1)


def drop_unfit_heads(
    weights: dict[str, Tensor], model: nn.Module, others: bool = False
) -> tuple[dict[str, Tensor], list[str], int]:
    """Return the weights without heads that do not fit the model; if it has `others`, without all.

    Also returns the names of the model's heads that therefore keep their initial weights, and the
    number of classes of such a head in the file, 0 if there is none.
    """
    new, classes, own = [], 0, model.state_dict()
    for head in find_heads(model):
        there, here = (tensors.get(f"{head}.weight") for tensors in (weights, own))
        if here is None or there is None or others or len(there) != len(here):
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

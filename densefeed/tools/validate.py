"""Evaluate a trained model: top-1, top-5, ReaL accuracy, loss and speed, at any size.

    densefeed validate runs/student --data val.beton --json row.json
    densefeed validate runs/student --data imagenet --real real.json
    densefeed validate runs/student --data val.beton --size 384 --crop-pct 1.0
    densefeed validate weights.safetensors --model resnet50 --data imagenet-r

CLASSES. The classes of the data are matched to those of the model. Logits of classes that are not
in the data are removed, for the loss too, so ImageNet-A and ImageNet-R (200 classes in folders
named by WordNet id) are evaluated over their own classes, as is usual. Classes match by name. A
model without class names, or with numbers as names, gets the names of the ImageNet set with its
number of classes. Data with numbers as class names (ImageNet-V2's folders 0 to 999, files written
by FFCV) is matched by number, compared as integers and not as text. A file that FFCV wrote from
such folders has lost their order, so read ImageNet-V2 from its folder. --class-map assigns classes
of the model to those of the data, as in densefeed label: the probabilities of classes that become
one add up, and those that become none take no part.

REAL (Beyer et al., arXiv 2006.07159). Each image has a list of correct classes: top-1 is correct if
it is in the list, and images with an empty list do not count. `--real` is the path of real.json, or
`timm` for the copy in timm. Its lists are in the order of the file names
ILSVRC2012_val_00000001.JPEG and so on. In a folder they are found by these names; a .beton has no
file names and is assumed to be in that order. Both are refused if the labels of fewer than half of
the images are among their ReaL classes.

PIXELS. The loader crops the centered square of crop-pct times the shorter side and resizes it,
antialiased, with the filter of the checkpoint's run or, for other files, of timm's model.
--eval-interpolation selects another one. timm resizes the shorter side to size / crop-pct and crops
afterwards. Accuracies of published models may therefore differ a little from the reported ones. By
how much was not measured.
"""

if not __package__:
    import script_start  # noqa: F401

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
import tyro
from rich.table import Table
from rich.text import Text
from timm.data import RealLabelsImagenet
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.models.model_spec import imagenet_names
from densefeed.pipelines.augment.augmentation import Normalize
from densefeed.pipelines.batch import to_device
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.loader import Source, ThreadedLoader
from densefeed.pipelines.open import BUILTIN, LOADERS, Filter, choose_loader
from densefeed.pipelines.plan import EpochPlan
from densefeed.relabel.class_map import ClassMap, merge_classes, read_class_map
from densefeed.storage.beton import is_beton
from densefeed.storage.dataset_names import (
    describe_lookalikes,
    list_some,
    match_forms,
    match_numbers,
)
from densefeed.storage.geometry import LEAST_CROP
from densefeed.storage.images import DecodeOptions, limit_pixels
from densefeed.system.devices import DeviceOptions, ThreadOptions, choose_device, synchronize
from densefeed.system.errors import UserError, make_command
from densefeed.system.files import check_ending
from densefeed.system.json_files import read_json
from densefeed.system.options import Bounds, Count, own_first
from densefeed.system.progress import bar
from densefeed.system.provenance import check_replaceable, environment, write_json
from densefeed.system.terminal import escape_controls, print, print_table
from densefeed.training.evaluation import Metrics, mean_metrics_sync, predict, sum_metrics
from densefeed.training.load_model import Divided, Trained, Weights, find_division, open_trained
from densefeed.training.shared_images import estimate_shared

PACKAGES = ("torch", "timm", "numpy")
# Images per call of timm's ReaL accuracy, which takes a dense row of all classes for each.
CHUNK = 1024
# Least time for which the model alone is timed.
MODEL_SECONDS = 1.0


@own_first
@dataclass(frozen=True, kw_only=True)
class Validation(DecodeOptions, ThreadOptions, DeviceOptions):
    """The model and the data to evaluate it on."""

    checkpoint: tyro.conf.Positional[Path]  # a checkpoint, or a folder of densefeed train or export
    # a .beton, a folder of class folders, or a folder of splits, of which `val` is read; of the
    # folder that the model's run divided by --val-fraction, its validation images
    data: Path
    # ffcv reads .beton files, folder reads folders; auto: the one that reads the data; dali reads
    # both, decoded by NVIDIA DALI
    loader: str = "auto"
    size: int = 0  # side of the input, pixels; 0: the size the model was trained at
    # side of the crop, share of the shorter side; 0: the checkpoint's value
    crop_pct: float = 0.0
    # filter that resizes the crop; auto: the checkpoint's
    eval_interpolation: Literal["auto", "bilinear", "bicubic"] = "auto"
    weights: Weights = "ema"  # EMA weights where the checkpoint has them, or the raw weights
    model: str = ""  # timm's name of the model, for a checkpoint that does not contain it
    # CSV or JSON of the model's classes and those of the data, as in densefeed label
    class_map: Path | None = None
    real: str = ""  # ReaL labels: path of real.json, or `timm` for the copy in timm
    batch: Count = 128  # images per forward pass
    # auto: bf16 autocast on CUDA, float32 on a CPU
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    json: Path | None = None  # write the result to this JSON file


class Match(NamedTuple):
    """The position of each class of the data among the model's classes."""

    columns: list[int]  # for each class of the data, the model's
    by: Literal["name", "number", "order", "class map"]


class Merged(nn.Module):
    """A model whose logits are those of the data's classes, by a class map."""

    def __init__(self, model: nn.Module, class_map: ClassMap) -> None:
        super().__init__()
        self.model, self.num_classes = model, class_map.classes
        self.register_buffer("source", class_map.source)
        self.register_buffer("target", class_map.target)

    def forward(self, image_NCHW: Tensor) -> Tensor:
        logits_NK = self.model(image_NCHW).float()
        return merge_classes(logits_NK, ClassMap(self.source, self.target, self.num_classes))


def match_classes(
    data: list[str], model: list[str], num_classes: int, stand_in: list[str]
) -> Match:
    """Find each class of the data among the model's, by the rules in this module's docstring.

    `model` is empty if the names of its `num_classes` classes are unknown; `stand_in` are the names
    to use for a model without names of its own. Raises UserError if a class is not found.
    """
    # Files written by stock ffcv hold no class names, so models trained on one have numbers.
    unnamed = not model or model == [str(number) for number in range(num_classes)]
    # Names before numbers: a model trained on folders 0, 1, ..., 10 has them sorted as text.
    for names in (model, stand_in if unnamed else []):
        place = {name: number for number, name in enumerate(names)}
        found = match_forms(data, names)
        if names and set(found) <= set(place):
            return Match([place[name] for name in found], "name")
    if numbers := match_numbers(data, num_classes):
        return Match(numbers, "number")
    if unnamed and not stand_in and len(data) == num_classes:
        return Match(list(range(num_classes)), "order")
    known = stand_in if unnamed else model
    there = set(known)
    unknown = [name for name in match_forms(data, known) if name not in there]
    example = f" ({list_some(model)})" if model else ""
    pair = describe_lookalikes(unknown, known)
    raise UserError(
        f"{len(unknown)} of the {len(data)} classes of the data ({list_some(unknown)}) are not "
        f"among the {num_classes} classes of the model{example}; "
        "give data with class folders named as in training" + (f"; {pair}" if pair else "")
    )


def warn_of_others(match: Match, data: list[str], trained: Trained, path: Path) -> None:
    """Warn if classes match by number or order, not by name, and may be others.

    By number they may be if they are not as many, or if the model has names; the 1,000 classes of
    ImageNet-V2 are numbers too. By order they may be if the model has names, which then differ.
    """
    names, count = trained.class_names, trained.model.num_classes
    others = len(data) != count or (names and not imagenet_names(trained.model))
    if match.by != "name" and others:
        why = "have numbers for names" if match.by == "number" else "have other names"
        first = f", as {data[0]} with {names[match.columns[0]]!r}" if names else ""
        print(
            f"warning: the {len(data):,} classes of {path} {why} and were matched by {match.by} "
            f"with the {count:,} of the model{first}; if these are other classes, the accuracy is "
            "meaningless",
            file=sys.stderr,
            flush=True,
        )


def open_source(options: Validation, loader: str, divided: Divided | None = None) -> Source:
    """Open the samples: of what the model's run `divided`, those that it held out.

    Raises UserError if the loader cannot read such data.
    """
    path = options.data
    # Training sets are packed with another --split, so this remedy is not that of the loaders.
    if loader == "ffcv" and path.is_dir():
        raise UserError(
            f"{path} is a folder; read it with --loader folder, "
            "or pack it with densefeed pack --split val"
        )
    opened = partial(LOADERS[loader][0], path, "evaluate", None, options.threads)
    if divided is None or loader not in BUILTIN:
        return opened()
    source = opened(dataset=divided.dataset, division=divided.division)
    print(
        f"{path} is the data of the model's run; evaluating the {len(source.labels):,} images that "
        f"it held out, {divided.division.val_fraction:.3g} of each class"
    )
    return source


def warn_training_images(trained: Trained, source: Source, path: Path) -> None:
    """Warn if images to evaluate are training images of the model's run, where that is known.

    The run's checkpoint has the fingerprint of its training images. Others than these are compared
    with the run's .beton, if that is still there, see `estimate_shared`.
    """
    share, train = float(source.fingerprint == trained.fingerprint), Path(trained.train)
    with suppress(UserError, OSError):
        if not share and trained.train and is_beton(train):
            with closing(FfcvSource(train)) as packed:
                if packed.fingerprint == trained.fingerprint:
                    share = estimate_shared(packed, source)
    if share:
        about = "" if share == 1 else f"about {100 * share:.0f} % of "
        print(
            f"warning: {about}the images of {path} are training images of the model's run, so the "
            "accuracy is not that of new images; give --data the images that it was validated on",
            file=sys.stderr,
            flush=True,
        )


# ------------------------------------------------------------------------- ReaL


def check_real_json(path: str) -> None:
    """Raise UserError if the file is not a list of lists of class numbers."""
    lists = read_json(Path(path), "copy it again", list)
    if not all(isinstance(classes, list) and all(map(is_class, classes)) for classes in lists):
        raise UserError(
            f"{path} is not a list of lists of class numbers; use the real.json of arXiv 2006.07159"
        )


def is_class(value: object) -> bool:
    """Whether a value of a JSON file can be the number of a class."""
    return type(value) is int and value >= 0


def open_real(path: str, source: Source, data: Path) -> RealLabelsImagenet:
    """Open timm's ReaL accuracy for these samples, in their order.

    Raises UserError if the ReaL labels are not those of the samples.
    """
    count = len(source.labels)
    if path != "timm":
        check_real_json(path)
    names = [Path(source.where(index)).name for index in range(count)]
    official = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, count + 1)]
    try:
        accuracy = RealLabelsImagenet(
            names if sorted(names) == official else official,
            real_json=None if path == "timm" else path,
            topk=(1,),
        )
    # timm asserts that there are as many lists as images.
    except AssertionError:
        raise UserError(
            f"--real {path} has another number of images than the {count:,} of {data}; "
            "give the ReaL labels of this data"
        ) from None
    lists = [accuracy.real_labels[name] for name in accuracy.filenames]
    labeled = [pair for pair in zip(source.labels.tolist(), lists, strict=True) if pair[1]]
    if not labeled or max(max(right) for _, right in labeled) >= len(source.class_names):
        raise UserError(
            f"--real {path} has no labels of the {len(source.class_names)} classes of {data}; "
            "give the ReaL labels of this data"
        )
    agree = sum(label in right for label, right in labeled) / len(labeled)
    # About nine in ten of ImageNet's own labels are among their ReaL classes. In a wrong order it
    # is about one in hundreds.
    if agree < 0.5:
        raise UserError(
            f"only {100 * agree:.0f} % of the labels of {data} are among those of --real {path}, "
            "so their orders differ; "
            "validate the folder of ILSVRC2012_val_*.JPEG with --loader folder"
        )
    return accuracy


def real_top1(accuracy: RealLabelsImagenet, best_N: Tensor, num_classes: int) -> float:
    """Return the share of correct images, 0 to 1, among those with a ReaL label."""
    for best in best_N.split(CHUNK):
        # timm takes the top-k of these rows, as it does of logits.
        accuracy.add_result(F.one_hot(best, num_classes))
    # timm returns a percentage.
    return accuracy.get_accuracy(1) / 100


# ------------------------------------------------------------------------- measurement


class Measurement(NamedTuple):
    """Accuracy, predictions and speed."""

    metrics: Metrics
    # int64 [N] on the CPU: the best class of each image, in the data's order and numbers
    best: Tensor
    images_per_s: float  # loader and model together
    model_images_per_s: float  # the model alone


def time_sync(forward: Callable[[], None], device: torch.device) -> float:
    """Return the median seconds of `forward`, of at least three runs.

    The median is robust against other processes, which disturb few of the runs.
    """
    runs = []
    while sum(runs) < MODEL_SECONDS or len(runs) < 3:
        synchronize(device)
        began = time.perf_counter()
        forward()
        synchronize(device)
        runs.append(time.perf_counter() - began)
    return statistics.median(runs)


def measure_sync(
    model: nn.Module,
    loader: ThreadedLoader,
    normalize: Normalize,
    match: Match,
    device: torch.device,
    dtype: torch.dtype | None,
) -> Measurement:
    """Evaluate the model on one pass over the data, then time it alone on the first batch."""
    columns = None
    # Logits in the right order need no gather in every batch.
    if match.columns != list(range(model.num_classes)):
        columns = torch.tensor(match.columns, device=device)
    first, best = [], []

    def normalized() -> Iterator[tuple[Tensor, ...]]:
        for batch in to_device(bar(loader.batches(0), "validate, batches", len(loader)), device):
            image_NCHW = normalize(batch.image)
            # One batch stays on the device, to time the model without the loader.
            if not first:
                first.append(image_NCHW)
            yield image_NCHW, batch.label, batch.weight

    def predictions() -> Iterator[tuple[Tensor, ...]]:
        for logits_NK, label_N, weight_N in predict(model, normalized(), columns, dtype):
            best.append(logits_NK.argmax(-1))
            yield logits_NK, label_N, weight_N

    def forward(image_NCHW: Tensor) -> None:
        list(predict(model, [(image_NCHW, None, None)], columns, dtype))

    shape, rows = loader.plan.shape(0, 0), loader.plan.batch
    blank = torch.zeros((rows, 3, *shape), device=device).to(memory_format=torch.channels_last)
    # The first pass is not timed: a device selects its kernels in it.
    forward(blank)
    synchronize(device)
    began = time.perf_counter()
    metrics = mean_metrics_sync(sum_metrics(predictions()))
    seconds = time.perf_counter() - began
    alone = time_sync(lambda: forward(first[0]), device)
    count = loader.plan.num_samples
    # The last batch is padded: rows beyond `count` are repeated images.
    return Measurement(metrics, torch.cat(best)[:count].cpu(), count / seconds, rows / alone)


# ------------------------------------------------------------------------- command


def choose_filter(given: str, trained: Trained) -> str:
    """Return the filter that resizes crops. UserError if the loaders do not have the model's."""
    chosen = trained.interpolation if given == "auto" else given
    if chosen not in get_args(Filter):
        raise UserError(
            f"{trained.name} is evaluated with the filter {chosen}, which loaders do not have; "
            "give --eval-interpolation bicubic"
        )
    return chosen


def main(options: Validation) -> dict:
    """Evaluate the model, print the table and write the JSON file; return the row."""
    if options.json:
        check_ending(options.json, ".json", "--json")
        check_replaceable(options.json, "model_images_per_s", "--json")
    limit_pixels(options.max_pixels)
    # 0 stands for the checkpoint's value.
    if options.crop_pct:
        Bounds(LEAST_CROP, 1).check("crop_pct", options.crop_pct)
    device = choose_device(options.device)
    trained = open_trained(options.checkpoint, options.weights, options.model, options.size)
    chosen = choose_loader(options.loader, options.data)
    source = open_source(options, chosen, find_division(trained, options.data))
    warn_training_images(trained, source, options.data)
    model = trained.model
    count, crop_pct = len(source.labels), options.crop_pct or trained.crop_pct
    interpolation = choose_filter(options.eval_interpolation, trained)
    plan = EpochPlan(
        num_samples=count,
        batch=min(options.batch, count),
        seed=0,
        mode="evaluate",
        sizes=((0, trained.size),),
        crop_pct=crop_pct,
        crop_interpolation=interpolation,
    )
    dtype = None
    if options.precision == "bf16" or (options.precision == "auto" and device.type == "cuda"):
        dtype = torch.bfloat16
    _, make_loader = LOADERS[chosen]
    with closing(make_loader(source, plan, options.threads, "raise", False, device)) as loader:
        stand_in = imagenet_names(model)
        data_names, model_names = source.class_names, trained.class_names
        if options.class_map:
            names = model_names or stand_in
            found = read_class_map(options.class_map, names, model.num_classes, data_names)
            model, match = Merged(model, found), Match(list(range(found.classes)), "class map")
        else:
            match = match_classes(data_names, model_names, model.num_classes, stand_in)
            warn_of_others(match, data_names, trained, options.data)
        real = open_real(options.real, source, options.data) if options.real else None
        model.to(device, memory_format=torch.channels_last)
        normalize = Normalize(trained.mean, trained.std).to(device)
        measured = measure_sync(model, loader, normalize, match, device, dtype)
    # NaN has no best class that ReaL labels could hold.
    real = None if measured.metrics.nonfinite else real
    row = {
        "checkpoint": str(trained.path),
        "model": trained.name,
        "weights": trained.weights,
        "data": str(options.data),
        "loader": chosen,
        "classes": len(match.columns),
        "model_classes": trained.model.num_classes,
        "classes_by": match.by,
        "size": trained.size,
        "crop_pct": crop_pct,
        "eval_interpolation": interpolation,
        "precision": "bf16" if dtype else "fp32",
        # With the number of images that were evaluated; an unreadable one is an error here.
        **measured.metrics._asdict(),
        "real_top1": real_top1(real, measured.best, len(match.columns)) if real else None,
        "real_images": sum(map(bool, real.real_labels.values())) if real else None,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "images_per_s": measured.images_per_s,
        "model_images_per_s": measured.model_images_per_s,
        "batch": plan.batch,
        "threads": options.threads,
        "device": str(device),
    } | environment(PACKAGES)
    print_table(table(row))
    if fault := measured.metrics.describe_nonfinite():
        print(f"warning: {fault}", file=sys.stderr, flush=True)
    if options.json:
        write_json(options.json, row)
    return row


def table(row: dict) -> Table:
    """Return the row as a table to print."""
    title = f"{row['model']} ({row['weights']} weights) on {row['data']}"
    # As Text, because names may contain rich's markup.
    lines = Table("", "", title=Text(escape_controls(title)), show_header=False)
    of = f" of {row['model_classes']:,}" if row["classes"] != row["model_classes"] else ""
    classes = f"{row['classes']:,}{of}, matched by {row['classes_by']}"
    lines.add_row("top-1", f"{100 * row['top1']:.2f} %")
    lines.add_row("top-5", f"{100 * row['top5']:.2f} %")
    if row["real_top1"] is not None:
        lines.add_row(
            "ReaL top-1", f"{100 * row['real_top1']:.2f} % of {row['real_images']:,} images"
        )
    lines.add_row("loss", f"{row['loss']:.4f}")
    lines.add_row("images, classes", f"{row['images']:,}, {classes}")
    crop = f"{row['crop_pct']:g} of the shorter side, {row['eval_interpolation']}"
    lines.add_row("size, crop", f"{row['size']} px, {crop}")
    lines.add_row("parameters", f"{row['parameters']:,}")
    lines.add_row(
        "images/s",
        f"{row['images_per_s']:,.1f} with the loader, {row['model_images_per_s']:,.1f} model alone",
    )
    lines.add_row(
        "on", f"{row['device']}, {row['precision']}, batch {row['batch']}, {row['threads']} threads"
    )
    return lines


command = make_command(main, Validation, __doc__)


if __name__ == "__main__":
    command()

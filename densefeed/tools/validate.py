"""Evaluate a trained model: accuracy, mean IoU or average precision, and speed.

    densefeed validate runs/student --data val.beton --json row.json
    densefeed validate runs/student --data imagenet --real real.json
    densefeed validate runs/student --data val.beton --size 384 --crop-pct 1.0
    densefeed validate weights.safetensors --model resnet50 --data imagenet-r
    densefeed validate runs/masks --data photos/scenes --eval-scales 0.75 1 1.25
    densefeed validate runs/boxes --data coco --dataset coco/coco/annotations/instances_val2017.json

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

SEGMENTATION AND DETECTION. Networks of masks and of objects are evaluated as their run does it, on
whole images: mean IoU and, in the JSON file, the IoU of each class, or COCO's average precision.
The data has the classes of the run, in the same order.
"""

if not __package__:
    import script_start  # noqa: F401

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
import tyro
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from densefeed.models.mask_rcnn import MaskRCNN
from densefeed.models.model_spec import imagenet_names
from densefeed.models.upernet import UperNet
from densefeed.objectives.base import Evaluation
from densefeed.objectives.detection import BoxEvaluation
from densefeed.objectives.segmentation import MaskEvaluation, SegmentationOptions
from densefeed.pipelines.augment.augmentation import Normalize
from densefeed.pipelines.batch import to_device
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.loader import Masks, Source, ThreadedLoader
from densefeed.pipelines.open import BUILTIN, LOADERS, Filter, check_masks, choose_loader
from densefeed.pipelines.plan import EpochPlan
from densefeed.relabel.class_map import read_class_map
from densefeed.storage.beton import is_beton
from densefeed.storage.dataset_names import list_some
from densefeed.storage.geometry import LEAST_CROP
from densefeed.storage.images import DecodeOptions, limit_pixels
from densefeed.system.devices import DeviceOptions, ThreadOptions, choose_device, synchronize
from densefeed.system.errors import UserError, make_command
from densefeed.system.files import check_ending
from densefeed.system.options import Bounds, NonNegativeInt, Numbers, own_first
from densefeed.system.precision import autocast_dtype
from densefeed.system.progress import bar, steps_bar
from densefeed.system.provenance import check_replaceable, environment, write_json
from densefeed.system.terminal import escape_controls, print, print_table, warn
from densefeed.training.evaluation import (
    Metrics,
    describe_nonfinite,
    mean_metrics_sync,
    predict,
    sum_metrics,
)
from densefeed.training.load_model import (
    OTHERS,
    Divided,
    Trained,
    Weights,
    find_division,
    open_trained,
)
from densefeed.training.match_classes import Match, Merged, match_classes, warn_of_others
from densefeed.training.real_labels import open_real, real_top1
from densefeed.training.shared_images import estimate_shared

PACKAGES = ("torch", "timm", "numpy")
# Images per forward pass by default, and windows of a segmentation network, whose logits take
# 157 MB each at 512 x 512 pixels and 150 classes.
BATCH, WINDOWS = 128, 8
# Names of shares, in the order of a table.
SHARES = {
    "top1": "top-1",
    "top5": "top-5",
    "real_top1": "ReaL top-1",
    "miou": "mean IoU",
    "macc": "mean accuracy of classes",
    "pixels": "pixels that are right",
    "map_box": "AP of boxes",
    "map_box_50": "AP of boxes, IoU 0.5",
    "map_box_75": "AP of boxes, IoU 0.75",
    "map_mask": "AP of masks",
    "map_mask_50": "AP of masks, IoU 0.5",
    "map_mask_75": "AP of masks, IoU 0.75",
}
# Classes that a table lists.
LOWEST = 3
# Least time for which the model alone is timed.
MODEL_SECONDS = 1.0


@own_first
@dataclass(frozen=True, kw_only=True)
class Validation(DecodeOptions, ThreadOptions, DeviceOptions):
    """The model and the data to evaluate it on."""

    checkpoint: tyro.conf.Positional[Path]  # a checkpoint, or a folder of densefeed train or export
    # a .beton, a folder of class folders, or a folder of splits, of which `val` is read; images and
    # masks or objects, as in training; of the folder that the model's run divided by
    # --val-fraction, its validation images
    data: Path
    # ffcv reads .beton files, folder reads folders; auto: the one that reads the data; dali reads
    # both, decoded by NVIDIA DALI
    loader: str = "auto"
    # name of the dataset, as in densefeed train, if --data is a folder, but not of class folders;
    # default for a segmentation network: masks, for a detector: instances
    dataset: str = ""
    # side of the input, of whole images the shorter one, pixels; 0: the size the model was trained
    # at
    size: int = 0
    # side of the crop, share of the shorter side; 0: the checkpoint's value
    crop_pct: float = 0.0
    # filter that resizes the crop; auto: the checkpoint's
    eval_interpolation: Literal["auto", "bilinear", "bicubic"] = "auto"
    # segmentation: scales of the images, whose probabilities are averaged; 1: --size is the shorter
    # side; none: those of the model's run, 1 for an exported one
    eval_scales: Numbers = ()
    weights: Weights = "ema"  # EMA weights where the checkpoint has them, or the raw weights
    model: str = ""  # timm's name of the model, for a checkpoint that does not contain it
    # CSV or JSON of the model's classes and those of the data, as in densefeed label
    class_map: Path | None = None
    real: str = ""  # ReaL labels: path of real.json, or `timm` for the copy in timm
    # images per forward pass, windows of a segmentation network; 0: 128, windows 8
    batch: NonNegativeInt = 0
    # auto: bf16 autocast on GPUs that compute it, else fp32
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    json: Path | None = None  # write the result to this JSON file


def open_source(
    options: Validation, loader: str, dataset: str = "", divided: Divided | None = None
) -> Source:
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
    if loader not in BUILTIN:
        if dataset:
            raise UserError(
                f"--loader {loader} takes no --dataset, which is for folders that --loader folder "
                "or dali reads; leave it out"
            )
        return opened()
    if divided is None:
        return opened(dataset=dataset)
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
        warn(
            f"{about}the images of {path} are training images of the model's run, so the "
            "accuracy is not that of new images; give --data the images that it was validated on"
        )


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


def classify_sync(
    options: Validation,
    trained: Trained,
    loader: ThreadedLoader,
    device: torch.device,
    dtype: torch.dtype | None,
) -> dict:
    """Evaluate a classifier on the classes of the data; return its part of the row."""
    model, source = trained.model, loader.source
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
    warn_nonfinite(measured.metrics)
    # NaN has no best class that ReaL labels could hold.
    real = None if measured.metrics.nonfinite else real
    return {
        "classes": len(match.columns),
        "model_classes": trained.model.num_classes,
        "classes_by": match.by,
        "crop_pct": loader.plan.crop_pct,
        # With the number of images that were evaluated; an unreadable one is an error here.
        **measured.metrics._asdict(),
        "real_top1": real_top1(real, measured.best, len(match.columns)) if real else None,
        "real_images": sum(map(bool, real.real_labels.values())) if real else None,
        "images_per_s": measured.images_per_s,
        "model_images_per_s": measured.model_images_per_s,
    }


class Whole(NamedTuple):
    """How a network of segmentation or detection is evaluated on whole images."""

    evaluation: Evaluation
    masks: Masks  # what the data must have
    dataset: str  # of data with it, for a network that states none
    batch: int  # windows per forward pass, or images
    what: str  # for messages


def measure_whole_sync(
    trained: Trained,
    loader: ThreadedLoader,
    evaluation: Evaluation,
    device: torch.device,
    dtype: torch.dtype | None,
) -> dict:
    """Evaluate a network as its run does, on whole images; return its part of the row."""
    names, count = loader.source.class_names, loader.plan.num_samples
    model = trained.model.to(device, memory_format=torch.channels_last)
    normalize = Normalize(trained.mean, trained.std).to(device)
    began = time.perf_counter()
    with steps_bar("validate, images", count, 0) as show:
        sums = evaluation.sum(model, loader, normalize, device, dtype, lambda _, text: show(1, ""))
    metrics = evaluation.mean_sync(sums)
    seconds = time.perf_counter() - began
    warn_nonfinite(metrics)
    more = {}
    if isinstance(evaluation, MaskEvaluation):
        found = zip(names, evaluation.iou_sync(sums), strict=True)
        # A list, as classes may have equal names.
        more = {"iou": [{"class": name, "iou": value} for name, value in found]}
        more |= {"eval_scales": evaluation.scales}
    return {"classes": len(names), **metrics._asdict(), **more, "images_per_s": count / seconds}


def warn_nonfinite(metrics: Any) -> None:
    """Warn if the outputs of some images are not finite."""
    if fault := describe_nonfinite(metrics):
        warn(fault)


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


def choose_evaluation(options: Validation, trained: Trained) -> Whole | None:
    """Return how a network of segmentation or detection is evaluated; None for a classifier.

    Raises UserError for an option that has no effect on it.
    """
    model, what = trained.model, "a classifier"
    given = {
        "--eval-scales": options.eval_scales,
        "--batch": options.batch,
        "--crop-pct": options.crop_pct,
        "--class-map": options.class_map,
        "--real": options.real,
        # Whole images are read by Pillow.
        "--loader dali": options.loader == "dali",
    }
    whole, used = None, given.keys() - {"--eval-scales"}
    if isinstance(model, UperNet):
        scales = SegmentationOptions(eval_scales=options.eval_scales or trained.eval_scales)
        evaluation, what = MaskEvaluation(scales.eval_scales), "a segmentation network"
        whole, used = Whole(evaluation, True, "masks", WINDOWS, what), {"--eval-scales", "--batch"}
    elif isinstance(model, MaskRCNN):
        what = "a detector"
        whole, used = Whole(BoxEvaluation(), "instances", "instances", 1, what), set()
    for option in (option for option, value in given.items() if value and option not in used):
        raise UserError(f"{option} has no effect on {trained.path}, {what}; leave it out")
    return whole


def open_whole(options: Validation, loader: str, trained: Trained, whole: Whole) -> Source:
    """Open images with the masks or objects that a network is evaluated on.

    Raises UserError for data without them or with other classes than the network's.
    """
    dataset, path = options.dataset, options.data
    if not path.is_dir():
        raise UserError(
            f"{path} is not a folder; give --data the folder of the images that {whole.what} is "
            "evaluated on, and an annotation file of COCO as --dataset coco/FILE"
        )
    divided = find_division(trained, path, dataset)
    if not dataset and not divided:
        if trained.dataset.startswith("coco/"):
            raise UserError(
                f"{trained.path} was trained on objects of COCO's format; give --dataset "
                f"coco/FILE, the annotation file of the images of {path}"
            )
        dataset = whole.dataset
    source = open_source(options, loader, dataset, divided)
    try:
        check_masks(path, source, whole.masks)
        check_names(path, source.class_names, trained)
    except UserError:
        source.close()
        raise
    return source


def check_names(path: Path, names: list[str], trained: Trained) -> None:
    """Raise UserError unless these are the names, or the number, of the network's classes."""
    known = trained.class_names
    if (known and names != known) or len(names) != trained.model.num_classes:
        has = f" ({list_some(known)})" if known else ""
        raise UserError(
            f"{path} has {len(names):,} classes ({list_some(names)}), and the model "
            f"{trained.model.num_classes:,}{has}; give data with the same classes in the same order"
        )


def main(options: Validation) -> dict:
    """Evaluate the model, print the table and write the JSON file; return the row."""
    if options.json:
        check_ending(options.json, ".json", "--json")
        check_replaceable(options.json, "images_per_s", "--json")
    limit_pixels(options.max_pixels)
    # 0 stands for the checkpoint's value.
    if options.crop_pct:
        Bounds(LEAST_CROP, 1).check("crop_pct", options.crop_pct)
    device = choose_device(options.device)
    trained = open_trained(
        options.checkpoint, options.weights, options.model, options.size, tuple(OTHERS)
    )
    whole, chosen = choose_evaluation(options, trained), choose_loader(options.loader, options.data)
    if whole:
        source = open_whole(options, chosen, trained, whole)
    else:
        divided = find_division(trained, options.data, options.dataset)
        source = open_source(options, chosen, options.dataset, divided)
    warn_training_images(trained, source, options.data)
    count = len(source.labels)
    # An image has any number of windows.
    batch = options.batch or whole.batch if whole else min(options.batch or BATCH, count)
    plan = EpochPlan(
        num_samples=count,
        batch=batch,
        seed=0,
        mode="evaluate",
        sizes=((0, trained.size),),
        crop_pct=options.crop_pct or trained.crop_pct,
        crop_interpolation=choose_filter(options.eval_interpolation, trained),
    )
    dtype = autocast_dtype(options.precision, device)
    _, make_loader = LOADERS[chosen]
    with closing(make_loader(source, plan, options.threads, "raise", False, device)) as loader:
        if whole:
            found = measure_whole_sync(trained, loader, whole.evaluation, device, dtype)
        else:
            found = classify_sync(options, trained, loader, device, dtype)
    row = {
        "checkpoint": str(trained.path),
        "model": trained.name,
        "weights": trained.weights,
        "data": str(options.data),
        "loader": chosen,
        "size": trained.size,
        "eval_interpolation": plan.crop_interpolation,
        "precision": "bf16" if dtype else "fp32",
        **found,
        "parameters": sum(parameter.numel() for parameter in trained.model.parameters()),
        "batch": plan.batch,
        "threads": options.threads,
        "device": str(device),
    } | environment(PACKAGES)
    print_table(table(row))
    if options.json:
        write_json(options.json, row)
    return row


def table(row: dict) -> Table:
    """Return the row as a table to print."""
    title = f"{row['model']} ({row['weights']} weights) on {row['data']}"
    # As Text, because names may contain rich's markup.
    lines = Table("", "", title=Text(escape_controls(title)), show_header=False)
    classes, speed = f"{row['classes']:,}", f"{row['images_per_s']:,.1f} with the loader"
    for name in (name for name in SHARES if row.get(name) is not None):
        of = f" of {row['real_images']:,} images" if name == "real_top1" else ""
        lines.add_row(SHARES[name], f"{100 * row[name]:.2f} %{of}")
    if "iou" in row:
        lines.add_row("lowest IoU", Text(escape_controls(describe_lowest(row["iou"]))))
    if "loss" in row:
        lines.add_row("loss", f"{row['loss']:.4f}")
    if "classes_by" in row:
        of = f" of {row['model_classes']:,}" if row["classes"] != row["model_classes"] else ""
        classes += f"{of}, matched by {row['classes_by']}"
        speed += f", {row['model_images_per_s']:,.1f} model alone"
    lines.add_row("images, classes", f"{row['images']:,}, {classes}")
    if "crop_pct" in row:
        crop = f"{row['crop_pct']:g} of the shorter side, {row['eval_interpolation']}"
        lines.add_row("size, crop", f"{row['size']} px, {crop}")
    else:
        scales = "".join(f" {scale:g}" for scale in row.get("eval_scales", ()))
        scales = f", scales{scales}" if scales else ""
        lines.add_row(
            "size", f"{row['size']} px, the shorter side{scales}, {row['eval_interpolation']}"
        )
    lines.add_row("parameters", f"{row['parameters']:,}")
    lines.add_row("images/s", speed)
    lines.add_row(
        "on", f"{row['device']}, {row['precision']}, batch {row['batch']}, {row['threads']} threads"
    )
    return lines


def describe_lowest(iou: list[dict]) -> str:
    """List the classes with the lowest IoU, of those that are there."""
    lowest = sorted((each["iou"], each["class"]) for each in iou if math.isfinite(each["iou"]))
    return ", ".join(f"{name} {100 * value:.1f} %" for value, name in lowest[:LOWEST])


command = make_command(main, Validation, __doc__)


if __name__ == "__main__":
    command()

"""How good a trained model is: top-1, top-5, ReaL and loss on any labeled images, at any
resolution, and how fast.

    python tools/validate.py runs/student --data val.beton --json row.json
    python tools/validate.py runs/student --loader folder --data imagenet/val --size 384 --crop-pct 1.0 --real real.json
    python tools/validate.py weights.safetensors --model resnet50 --loader folder --data imagenet-r

CLASSES. The data's classes are matched to the model's, and logits of classes that the data does not
have are left out, of the loss too: so ImageNet-A and -R (200 classes in folders named by WordNet
id) are judged over their own classes, as usual. Classes match by name. A model that names none, or
numbers only, is named after ImageNet where it has as many classes. Data whose classes are numbers
(ImageNet-V2's folders 0 to 999, files that FFCV wrote) is matched by number, as numbers and not as
text; a file that FFCV wrote of such folders has lost their order, so read ImageNet-V2 from its
folder.

REAL (Beyer et al., arXiv 2006.07159): each image has a list of right classes; top-1 is right if in
the list, and images of an empty list do not count. `--real` names real.json, or `timm` for the copy
in timm. Its order is that of the file names ILSVRC2012_val_00000001.JPEG to ..., which a folder
has; a .beton has no names, so there it is taken to be in that order, and either is refused if fewer
than half of the images' own labels are among their right ones.

PIXELS. The loader crops the centered square of crop-pct times the shorter side and resizes it with
an antialiased triangle (bilinear in Pillow and timm). timm resizes the shorter side to size /
crop-pct, bicubic for most models, and crops then. So accuracies of published models may differ from
those reported in the second digit after the point.
"""

import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
import tyro
from rich.console import Console
from rich.table import Table
from timm.data import RealLabelsImagenet
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.pipelines.augment.augmentation import Normalize
from densefeed.pipelines.batch import to_device
from densefeed.pipelines.dali import DaliLoader
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.folder import FolderSource
from densefeed.pipelines.loader import Source, ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.system.devices import choose_device
from densefeed.system.errors import UserError, run
from densefeed.system.progress import bar
from densefeed.system.provenance import environment, write_json
from densefeed.tools.load_model import Weights, imagenet_names, open_trained
from densefeed.training.evaluation import Metrics, Told, mean_metrics_sync, predict, sum_metrics

PACKAGES = ("torch", "timm", "numpy")
NAMED = 3  # unknown classes named in a message
CHUNK = 1024  # images that are judged by ReaL at once
MODEL_SECONDS = 1.0  # that the model alone is timed for, at least


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What to judge, on what."""

    checkpoint: Annotated[Path, tyro.conf.Positional]  # a checkpoint, or a run folder of train.py
    data: Path  # a .beton, or a folder of class folders (or of splits, of which `val` is taken)
    # reads .beton files, or folders; dali reads both, decoded by NVIDIA DALI
    loader: Literal["ffcv", "folder", "dali"] = "ffcv"
    size: int = 0  # side of the input, pixels; 0: what the model was trained for
    crop_pct: float = 0.0  # side of the crop, share of the shorter side; 0: the checkpoint's
    weights: Weights = "ema"  # averaged weights where the checkpoint has them, or the raw ones
    model: str = ""  # timm's name of the model, for a checkpoint that does not say
    real: str = ""  # ReaL labels: real.json, or `timm` for timm's copy
    batch: int = 128  # images per forward pass
    threads: int = os.cpu_count() or 1  # decoding threads
    device: str = "auto"  # auto: cuda if there is one, else cpu
    # auto: bf16 autocast on CUDA, float32 on a CPU
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    json: Path | None = None  # write the result there


class Match(NamedTuple):
    """Where the data's classes stand among the model's."""

    columns: list[int]  # for each class of the data, the model's
    by: Literal["name", "number", "order"]


def match_classes(
    data: list[str], model: list[str], num_classes: int, stand_in: list[str]
) -> Match:
    """The model's class for each of the data's, by the rule of the module's head. UserError if some
    have none.

    `model` may be empty, if nobody named its `num_classes` classes; `stand_in` are names for a
    model that names none itself.
    """
    unnamed = not model or model == [str(number) for number in range(num_classes)]
    for names in (model, stand_in if unnamed else []):
        place = {name: number for number, name in enumerate(names)}
        if names and set(data) <= set(place):
            return Match([place[name] for name in data], "name")
    if all(name.isdecimal() for name in data) and max(map(int, data)) < num_classes:
        return Match([int(name) for name in data], "number")
    if unnamed and not stand_in and len(data) == num_classes:
        return Match(list(range(num_classes)), "order")
    known = set(stand_in if unnamed else model)
    strange = [name for name in data if name not in known]
    raise UserError(
        f"{len(strange)} of the data's {len(data)} classes ({', '.join(strange[:NAMED])}, ...) are none of the model's "
        f"{num_classes}{f' ({model[0]}, ...)' if model else ''}; give data whose class folders are named as in training"
    )


def open_source(validation: Validation) -> Source:
    """The samples. UserError if the loader does not read such data."""
    path = validation.data
    folder = validation.loader == "folder" or (validation.loader == "dali" and path.is_dir())
    if folder and path.is_file():
        raise UserError(
            f"{path} is a file; --loader folder reads folders, --loader ffcv reads .beton files"
        )
    if not folder and path.is_dir():
        raise UserError(
            f"{path} is a folder; read it with --loader folder, or pack it with tools/pack_dataset.py --split val"
        )
    return FolderSource(path, "val", None, validation.threads) if folder else FfcvSource(path)


def official(number: int) -> str:
    """The name of an image of ImageNet's validation set; `number` counts from 0."""
    return f"ILSVRC2012_val_{number + 1:08d}.JPEG"


def open_real(path: str, source: Source, data: Path) -> RealLabelsImagenet:
    """timm's judge for these samples, in their order. UserError if labels and samples do not belong
    together.
    """
    count = len(source.labels)
    if path != "timm":
        try:
            told = json.loads(Path(path).read_text())
        except ValueError as error:
            raise UserError(
                f"{path} is no JSON that can be read ({error}); copy it again"
            ) from error
        lists = isinstance(told, list) and all(isinstance(classes, list) for classes in told)
        if not lists or not all(type(number) is int for classes in told for number in classes):
            raise UserError(
                f"{path} is no list of lists of class numbers; take the real.json of arXiv 2006.07159"
            )
    names = [Path(source.where(index)).name for index in range(count)]
    officials = [official(number) for number in range(count)]
    try:
        judge = RealLabelsImagenet(
            names if set(names) == set(officials) else officials,
            real_json=None if path == "timm" else path,
            topk=(1,),
        )
    except AssertionError:
        raise UserError(
            f"--real {path} is for another number of images than the {count:,} of {data}; give their own labels"
        ) from None
    lists = [judge.real_labels[name] for name in judge.filenames]
    judged = [
        (label, right) for label, right in zip(source.labels.tolist(), lists, strict=True) if right
    ]
    if not judged or max(max(right) for _, right in judged) >= len(source.class_names):
        raise UserError(
            f"--real {path} has no labels of the {len(source.class_names)} classes of {data}; give their own labels"
        )
    agree = sum(label in right for label, right in judged) / len(judged)
    # ReaL keeps about nine in ten of ImageNet's own labels, another order one in hundreds
    if agree < 0.5:
        raise UserError(
            f"only {100 * agree:.0f} % of the labels of {data} are among those of --real {path}, so their orders differ; "
            "validate the folder of ILSVRC2012_val_*.JPEG with --loader folder"
        )
    return judge


def real_top1(judge: RealLabelsImagenet, best_N: Tensor, num_classes: int) -> float:
    """The share of judged images whose best class is right, 0 to 1."""
    for best in best_N.split(CHUNK):
        judge.add_result(F.one_hot(best, num_classes))  # of which timm takes the largest
    return judge.get_accuracy(1) / 100


def synchronize_sync(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Judged(NamedTuple):
    """What was measured."""

    shares: Metrics
    # int64 [N] on the CPU: the best class of each image, in the data's order and numbers
    best: Tensor
    images_per_s: float  # of loader and model together
    model_images_per_s: float  # of the model alone


def judge_sync(
    model: nn.Module,
    loader: ThreadedLoader,
    normalize: Normalize,
    match: Match,
    device: torch.device,
    dtype: torch.dtype | None,
) -> Judged:
    """One pass over the data, then the model alone on the first batch."""
    columns = torch.tensor(match.columns, device=device)
    columns = None if match.columns == list(range(model.num_classes)) else columns
    first, best = [], []

    def prepared() -> Iterator[Told]:
        for batch in to_device(bar(loader.batches(0), "validate, batches", len(loader)), device):
            image_NCHW = normalize(batch.image)
            first.append(image_NCHW) if not first else None
            yield image_NCHW, batch.label, batch.weight

    def watched() -> Iterator[Told]:
        for logits_NK, label_N, weight_N in predict(model, prepared(), columns, dtype):
            best.append(logits_NK.argmax(-1))
            yield logits_NK, label_N, weight_N

    size, rows = loader.plan.size(0), loader.plan.batch
    blank = torch.zeros((rows, 3, size, size), device=device).to(memory_format=torch.channels_last)

    def alone(image_NCHW: Tensor) -> None:
        for _ in predict(model, [(image_NCHW, None, None)], columns, dtype):
            pass

    alone(blank)  # what a device does once (choosing kernels) is not counted
    synchronize_sync(device)
    began = time.perf_counter()
    shares = mean_metrics_sync(sum_metrics(watched()))
    seconds = time.perf_counter() - began
    # The median of single runs: what else the machine does hits few of them.
    runs = []
    while sum(runs) < MODEL_SECONDS or len(runs) < 3:
        synchronize_sync(device)
        began = time.perf_counter()
        alone(first[0])
        synchronize_sync(device)
        runs.append(time.perf_counter() - began)
    took = statistics.median(runs)
    count = loader.plan.num_samples
    return Judged(shares, torch.cat(best)[:count].cpu(), count / seconds, rows / took)


def main(validation: Validation) -> dict:
    """Judge, print the table, write the row; returns it."""
    if validation.threads < 1 or validation.batch < 1 or not 0 <= validation.crop_pct <= 1:
        raise UserError(
            "--threads and --batch must be at least 1, and --crop-pct a share: from 0 (the checkpoint's) to 1"
        )
    device = choose_device(validation.device)
    trained = open_trained(
        validation.checkpoint, validation.weights, validation.model, validation.size
    )
    source = open_source(validation)
    count, crop_pct = len(source.labels), validation.crop_pct or trained.crop_pct
    plan = EpochPlan(
        num_samples=count,
        batch=min(validation.batch, count),
        seed=0,
        mode="evaluate",
        sizes=((0, trained.size),),
        crop_pct=crop_pct,
    )
    if validation.loader == "dali":
        loader = DaliLoader(source, plan, validation.threads, maps=False, device=device)
    else:
        loader = ThreadedLoader(source, plan, validation.threads, maps=False)
    try:
        model = trained.model
        match = match_classes(
            source.class_names, trained.class_names, model.num_classes, imagenet_names(model)
        )
        real = open_real(validation.real, source, validation.data) if validation.real else None
        model.to(device, memory_format=torch.channels_last)
        normalize = Normalize(trained.mean, trained.std).to(device)
        amp = validation.precision == "bf16" or (
            validation.precision == "auto" and device.type == "cuda"
        )
        judged = judge_sync(
            model, loader, normalize, match, device, torch.bfloat16 if amp else None
        )
    finally:
        loader.close()
    row = {
        "checkpoint": str(trained.path),
        "model": trained.name,
        "weights": trained.weights,
        "data": str(validation.data),
        "loader": validation.loader,
        "images": count,
        "classes": len(match.columns),
        "model_classes": model.num_classes,
        "classes_by": match.by,
        "size": trained.size,
        "crop_pct": crop_pct,
        "precision": "bf16" if amp else "fp32",
        "top1": judged.shares.top1,
        "top5": judged.shares.top5,
        "loss": judged.shares.loss,
        "real_top1": real_top1(real, judged.best, len(match.columns)) if real else None,
        "real_images": sum(map(bool, real.real_labels.values())) if real else None,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "images_per_s": judged.images_per_s,
        "model_images_per_s": judged.model_images_per_s,
        "batch": plan.batch,
        "threads": validation.threads,
        "device": str(device),
    }
    row |= environment(PACKAGES)
    if validation.json:
        write_json(validation.json, row)
    Console().print(table(row))
    return row


def table(row: dict) -> Table:
    """The row as people read it."""
    shown = Table(
        "",
        "",
        title=f"{row['model']} ({row['weights']} weights) on {row['data']}",
        show_header=False,
    )
    of = f" of {row['model_classes']:,}" if row["classes"] != row["model_classes"] else ""
    shown.add_row("top-1", f"{100 * row['top1']:.2f} %")
    shown.add_row("top-5", f"{100 * row['top5']:.2f} %")
    if row["real_top1"] is not None:
        shown.add_row(
            "ReaL top-1", f"{100 * row['real_top1']:.2f} % of {row['real_images']:,} images"
        )
    shown.add_row("loss", f"{row['loss']:.4f}")
    shown.add_row(
        "images, classes",
        f"{row['images']:,}, {row['classes']:,}{of}, matched by {row['classes_by']}",
    )
    shown.add_row("size, crop", f"{row['size']} px, {row['crop_pct']:g} of the shorter side")
    shown.add_row("parameters", f"{row['parameters']:,}")
    shown.add_row(
        "images/s",
        f"{row['images_per_s']:,.1f} with loader, {row['model_images_per_s']:,.1f} model alone",
    )
    shown.add_row(
        "on", f"{row['device']}, {row['precision']}, batch {row['batch']}, {row['threads']} threads"
    )
    return shown


if __name__ == "__main__":
    run(lambda: main(tyro.cli(Validation, description=__doc__)))

"""Write one self-contained HTML file with the results of training runs.

    densefeed report runs/ce runs/token-label --boxes scenes/boxes.json

The report of runs has a table of results, curves, a contact sheet (training crops exactly as the
student saw them, with the label of every token drawn on them) and validation images that the last
run's student got right and wrong. `--boxes`, a file that densefeed scenes or densefeed photo-scenes
writes, adds the true objects and measures how many labels are correct.
"""

if not __package__:
    import script_start  # noqa: F401

import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import tyro
from PIL import Image

from densefeed.explain.heat_maps import HEAT
from densefeed.models import checkpoints
from densefeed.models.meta_device import meta_device
from densefeed.models.token_transformer import TokenTransformer
from densefeed.objectives import OBJECTIVES, build_objective
from densefeed.objectives.base import DenseObjective
from densefeed.pages.label_truth import PUBLISHED, find_owners_in_mask, measure_labels, usual_labels
from densefeed.pages.templates import TEMPLATES, picture
from densefeed.pages.tokens import draw_labels, label_tokens
from densefeed.pages.true_objects import (
    Truth,
    draw_objects,
    make_objects,
    read_license,
    read_mask,
    read_objects,
)
from densefeed.pipelines.augment.augmentation import Augmentation, augment_batches
from densefeed.pipelines.loader import Source, ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.shapes import describe_shape
from densefeed.step import read_patch_size
from densefeed.storage.dataset_names import list_some
from densefeed.storage.images import Images
from densefeed.storage.scenes import BOXES
from densefeed.system.errors import UserError, make_command, restore_url
from densefeed.system.files import check_ending, open_regular, replace_file
from densefeed.system.json_files import check_number, read_json
from densefeed.system.options import Options, leaves, with_options
from densefeed.system.progress import bar
from densefeed.system.provenance import check_replaceable, write_json
from densefeed.system.terminal import print
from densefeed.training.build import build_model
from densefeed.training.config import Config
from densefeed.training.guards import explain_oom
from densefeed.training.logs import RATED, complete_lines, parse_record
from densefeed.training.predictions import show_predictions
from densefeed.training.setup import open_loader

# Crops on the contact sheet, and whole scenes with their masks.
CONTACTS, SCENES = 12, 4
# Crops whose labels are compared with the true objects.
PURITY_CROPS = 2000
# Bytes of the pixels of a batch that is replayed: 1,024 images of 448 px have 0.6 GB. A quarter of
# it where the training set is smaller than a batch, as in no recipe: then a small folder would be
# enough to take the memory.
MOST_BYTES = 2**30
# Bytes of metrics.jsonl, which take about ten times as many in memory.
LONGEST_LOG = 2**26
# The remedy for a damaged file of a run.
AGAIN = "copy it again, or train again"
CURVES = ("#0b6e99", "#c2571a", "#3a8f4d", "#7a4fa3", "#8a6d1f", "#555555")


@dataclass(frozen=True, kw_only=True)
class Report(Options):
    """The runs to show."""

    # run folders of densefeed train
    runs: tyro.conf.Positional[
        Annotated[
            tuple[Path, ...], tyro.conf.arg(metavar="RUN ...", help_behavior_hint="(required)")
        ]
    ]
    boxes: Path | None = None  # true boxes of the training images, to count correct labels
    # JSON of densefeed audit --crops, to show what the cached labels cost
    audit: Path | None = None
    # name of a JSON file in the run folders, by densefeed validate --json, whose top-1, mIoU or box
    # AP is shown too
    validated: str = ""
    out: Path | None = None  # the HTML to write; default: report.html in the last run's folder


# Options that say where and how fast a run trains, not what it trains. The table of results leaves
# them out.
PLACES = {
    *("data", "val", "dataset", "out", "score_maps", "maps_on_device", "cache", "threads"),
    "device",
    *("resume", "loader"),
    *("microbatch", "log_every", "eval_every", "save_every", "wandb", "keep"),
}


class RunRecord(NamedTuple):
    """The contents of a run folder."""

    name: str
    config: Config
    result: dict  # empty until the run has finished
    train: list[dict]  # training metrics, a record every log_every steps
    val: list[dict]  # evaluation metrics
    # metric of the file --validated, 0 to 1; None if it was not asked for, or the run has none
    validated: float | None = None


def read_run(folder: Path, validated: str = "") -> RunRecord:
    """Read a run folder, finished or not. Raises UserError if it is none, or a file is damaged.

    `validated` is the name of a file of densefeed validate in it.
    """
    path, done = folder / "config.json", folder / "result.json"
    with name_missing(folder):
        config = Config.from_dict(read_json(path, AGAIN), where=str(path))
        result = read_json(done, AGAIN) if done.exists() else {}
        train, val = read_metrics(folder / "metrics.jsonl")
    bounds = {"seconds": 10**10, "data_wait_share": 1} if result else {}
    for name, most in bounds.items():
        check_number(done, name, result.get(name), most, AGAIN)
    record = RunRecord(folder.name, config, result, train, val)
    path = folder / validated
    if not validated or not path.exists():
        return record
    remedy = "validate the run again"
    values = read_json(path, remedy)
    name = next((name for name in RATED if name in values), "top1")
    check_number(path, name, values.get(name), 1, remedy)
    return record._replace(validated=values[name])


@contextmanager
def name_missing(folder: Path) -> Iterator[None]:
    """Turn the error of a file that does not exist into one about the run folder."""
    try:
        yield
    except FileNotFoundError as error:
        if restore_url(folder):
            raise
        missing = Path(error.filename).name
        inside = [str(path.parent) for path in sorted(folder.glob("*/config.json"))]
        known = f"give those that it holds: {list_some(inside)}" if inside else ""
        raise UserError(
            f"{folder} is not a run folder ({missing} is missing); "
            f"{known or 'give a run folder of densefeed train'}"
        ) from None


def read_metrics(path: Path) -> tuple[list[dict], list[dict]]:
    """Read the records of training and of evaluation. Raises UserError for a damaged line."""
    records = {"train": [], "val": []}
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > LONGEST_LOG:
            raise UserError(
                f"{path} has more than {LONGEST_LOG / 2**20:.0f} MiB, which no page can show; "
                "give the run without it, or train with a larger --log-every"
            )
    for number, line in complete_lines(path):
        try:
            record = parse_record(line)
        except ValueError as error:
            raise UserError(
                f"{path} is damaged in line {number:,} ({error}); remove the line"
            ) from None
        # Records of other kinds are not shown.
        records.setdefault(record["kind"], []).append(record)
    return records["train"], records["val"]


def read_environment(folder: Path) -> dict:
    """Read the software and hardware that a run used. Raises UserError if the file is damaged."""
    path = folder / "environment.json"
    with name_missing(folder):
        environment = read_json(path, AGAIN)
    if missing := {"device", "cores", "torch", "timm"} - environment.keys():
        raise UserError(f"{path} is damaged ({min(missing)} is missing); {AGAIN}")
    return environment


def make_row(run: RunRecord, runs: list[RunRecord]) -> dict:
    """Return a run's row in the table of results.

    `differs` lists its options whose values more than half of the `runs` do not share.
    """
    last = run.val[-1] if run.val else {}
    # Not by the objective: a user's own is not imported here.
    rated = next((name for name in RATED if name in last), "")
    kinds = {rated: "", f"{rated}_ema": "EMA"}
    others = [dict(leaves(other.config)) for other in runs]
    options = [
        f"{name.replace('_', '-')} {format_value(value)}"
        for name, value in leaves(run.config)
        if name not in PLACES and 2 * sum(other[name] == value for other in others) <= len(runs)
    ]
    row = {
        "name": run.name,
        "differs": ", ".join(options),
        "rated": RATED.get(rated, ""),
        "tops": [(last[key], kind) for key, kind in kinds.items() if key in last],
        "epoch": max((record["epoch"] for record in run.train + run.val), default=0),
        "epochs": run.config.optim.total_epochs,
        "result": run.result,
        "validated": run.validated,
        "images": last.get("images"),
        "unreadable": last.get("unreadable"),
    }
    for name in ("images_per_s", "mfu"):
        values = [record[name] for record in run.train if name in record]
        row[name] = statistics.median(values) if values else None
    return row


def format_value(value: object) -> str:
    """Format the value of an option for a table's cell."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(map(format_value, value)) or "none"
    return "none" if value in ("", None) else str(value)


def build_augmentation(run: RunRecord, loader: ThreadedLoader) -> tuple[int, Augmentation]:
    """Return the side of the student's token grid in the first epoch, and its augmentation.

    The side is 16 for a model without tokens.
    """
    config = run.config
    # Only the model's sizes and pretrained_cfg are read, so it needs no weights.
    with meta_device():
        objective = build_objective(config.setting)
        model, _ = build_model(config.model, config.data, objective, loader.num_classes)
    side, _ = loader.plan.shape(0, 0)
    has_tokens = objective.needs_tokens or isinstance(model, TokenTransformer)
    grid = side // read_patch_size(model, objective) if has_tokens else 16
    mean, std = (model.pretrained_cfg[name] for name in ("mean", "std"))
    published = config.labels.geometry == "published"
    return grid, Augmentation(loader.plan, config.augment, mean, std, warps_maps=published)


def read_truths(path: Path, run: RunRecord, loader: ThreadedLoader) -> list[Truth]:
    """Read the true objects of the run's images, in the order of its samples.

    Raises UserError if the file describes other images, or the run has no labels of images.
    """
    if OBJECTIVES[run.config.objective.name].needs_masks:
        raise UserError(
            f"--boxes shows how often labels of images and tokens are right, and {run.name} trains "
            "on masks; leave it out"
        )
    images = Images(path.parent, division=run.config.data)
    # Boxes are found by the number of the sample, so both must list the same images in one order.
    if loader.fingerprint != images.fingerprint():
        raise UserError(
            f"{path} describes other images than those in {run.config.data.train}; "
            "give the boxes of these images"
        )
    return list(read_objects(path, images, "train"))


# ------------------------------------------------------------------------- contact sheet


def make_contact_sheet(
    run: RunRecord,
    loader: ThreadedLoader,
    truths: list[Truth],
    grid: int,
    augmentation: Augmentation,
) -> list[dict]:
    """Return the first crops of epoch 0 as the student saw them, with the labels of their tokens.

    Where there are `truths`, each also has the labels that the published code would read and the
    true objects: `objects` are their boxes, and without masks these alone. Labels are as in the
    run, but without label smoothing, which changes all of them alike.
    """
    crops = islice(loader.batches(0, prepare=augmentation.whole), 1)
    (batch,) = augment_batches(crops, augmentation, torch.device("cpu"))
    # Back from normalized values to pixels, for a picture.
    batch = batch._replace(image=augmentation.normalize.pixels(batch.image))
    rules, spec = replace(run.config.labels, smoothing=0.0), loader.score_maps
    names, views = loader.class_names, batch.view.numpy()
    masks = OBJECTIVES[run.config.objective.name].needs_masks
    # The Views of a published pipeline are those of augmented images, where the boxes are not.
    boxed = truths and not (augmentation.whole and augmentation.whole.warps_maps)
    tables = [label_tokens(batch, spec, grid, rules)]
    if boxed:
        tables.append(label_tokens(batch, spec, grid, PUBLISHED))
    sheet = []
    for n, index in enumerate(batch.index[:CONTACTS].tolist()):
        labels, *beside = [[part[n].reshape(grid, grid) for part in table] for table in tables]
        masked = boxed and truths[index].mask is not None
        if masked:
            beside.append(draw_truth(truths[index], views[n], grid))
        item = {
            "image": picture(Image.fromarray(batch.image[n].numpy()), "PNG"),
            # Images with masks have the label 0 until a mask gives them one.
            "label": "" if masks else names[int(batch.label[n])],
            "index": index,
            "labels": draw_labels(*labels, names, beside=beside),
            "masked": masked,
            "view": views[n],
            "objects": make_objects(truths[index], views[n], grid, names) if boxed else [],
        }
        sheet.append(item)
    return sheet


def draw_scenes(
    source: Source, truths: list[Truth], sheet: list[dict], names: Sequence[str]
) -> list[dict]:
    """Return the whole images of the first crops of the contact sheet, and their true objects.

    `frame` is the crop, as the corners of a polygon in an image of 1 x 1.
    """
    shown = []
    for item in [item for item in sheet if item["masked"]][:SCENES]:
        image = source.image(item["index"])
        objects, key = draw_objects(image, truths[item["index"]], names)
        corners = np.array([[0, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1]])
        found = {
            "image": picture(image, "JPEG"),
            "objects": picture(objects, "JPEG"),
            "key": key,
            "ratio": image.width / image.height,
            "frame": [(round(x, 4), round(y, 4)) for x, y in (item["view"] @ corners).T.tolist()],
            "index": item["index"],
            "label": item["label"],
        }
        shown.append(found)
    return shown


def draw_truth(truth: Truth, view: np.ndarray, grid: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the class of the object that most of each token of a crop shows, and 1, else 0."""
    owner_T = find_owners_in_mask(read_mask(truth), view, grid, pure=0.6)
    classes = truth.classes[owner_T].reshape(grid, grid)
    return classes, (owner_T >= 0).astype(float).reshape(grid, grid)


def choose_run(runs: list[RunRecord]) -> RunRecord | None:
    """Choose the run whose crops are shown: the last one with dense labels, or None.

    Runs without mixing and with aligned labels are preferred, since the contact sheet shows crops
    before they are mixed.
    """
    # The module of an objective from outside the package is not imported here.
    dense = [
        run
        for run in runs
        if OBJECTIVES.get(run.config.objective.name, DenseObjective).needs_score_maps
    ]
    plain = [run for run in dense if not run.config.mix and run.config.labels.geometry == "aligned"]
    return (plain or dense or [None])[-1]


def describe_excess(plan: EpochPlan) -> str:
    """Return why a batch takes too much memory to be replayed, or an empty string if it does not.

    A config from anywhere may state any batch and size.
    """
    shape = plan.shape(0, 0)
    num_bytes = 3 * plan.batch * math.prod(shape)
    few = plan.batch > plan.num_samples
    if num_bytes <= (MOST_BYTES // 4 if few else MOST_BYTES):
        return ""
    return (
        f"batches of {plan.batch:,} images of {describe_shape(shape)} ({num_bytes / 1e9:,.1f} GB) "
        f"for {plan.num_samples:,} training images"
    )


def measure_purity(loader: ThreadedLoader, truths: list[Truth], grid: int) -> dict:
    """Measure how many labels are correct in up to PURITY_CROPS crops of epoch 0."""
    batches = min(-(-PURITY_CROPS // loader.plan.batch), len(loader))
    crops = bar(islice(loader.batches(0), batches), "check labels, batches", batches)
    found = measure_labels(crops, truths, grid, usual_labels(loader.score_maps, grid))
    # Boxes of digits leave large crops and large objects only.
    return found | {
        "by": [part for part in found["tokens"] if part not in ("all", "largest", "others")]
    }


def replay(runs: list[RunRecord], boxes: Path | None) -> dict:
    """Replay the first epoch of a run; return what the page shows of it."""
    page = {"labeled": None, "sheet": [], "purity": None, "grid": 0, "scenes": [], "license": ""}
    run = choose_run(runs)
    if run is None:
        if boxes:
            raise UserError(
                "--boxes has no effect without a run that has dense labels; remove it, or give one"
            )
        return page
    # Only maps that batches carry can be drawn, and only square crops: of a run with aspect buckets
    # or several scales those of --size.
    config = with_options(run.config, maps_on_device=False, aspects=(), multi_scale=())
    with ExitStack() as stack, explain_oom(0, run.name):
        try:
            objective = build_objective(config.setting)
            loader = open_loader(config.data, config.optim, config.run.seed, objective, "train")
            stack.enter_context(closing(loader))
            if too_large := describe_excess(loader.plan):
                raise UserError(f"{run.name} has {too_large}")
            grid, augmentation = build_augmentation(run, loader)
        # The table and the curves are of use without the training set, which may be on another
        # machine, and without a user's own code, which is not imported here.
        except (UserError, OSError) as error:
            print(f"the report shows no crops: {error}", file=sys.stderr)
            return page
        truths = read_truths(boxes, run, loader) if boxes else []
        sheet = make_contact_sheet(run, loader, truths, grid, augmentation)
        page |= {"labeled": run, "sheet": sheet, "grid": grid}
        page["scenes"] = draw_scenes(loader.source, truths, sheet, loader.class_names)
        if truths:
            page["purity"] = measure_purity(loader, truths, grid)
            page["license"] = read_license(boxes)
    return page


# ------------------------------------------------------------------------- page


def draw_curves(runs: list[RunRecord]) -> list[tuple[str, dict]]:
    """Return titles and curves of accuracy and loss, without those that have no point."""
    curves = [
        ("training loss by epoch", curve(runs, "train", "loss", False)),
        *(
            (f"{text} on the validation set by epoch", curve(runs, "val", name, True))
            for name, text in RATED.items()
        ),
    ]
    return [(title, plot) for title, plot in curves if any(x["points"] for x in plot["lines"])]


def curve(runs: list[RunRecord], kind: str, value: str, percent: bool) -> dict:
    """Return one value of all runs over epochs: lines in a 100 x 100 frame, and the axes' ticks."""
    series = [
        (run.name, [(r["epoch"], r[value]) for r in getattr(run, kind) if value in r])
        for run in runs
    ]
    points = [point for _, line in series for point in line]
    if not points:
        return {"lines": [], "ticks_x": [], "ticks_y": []}
    # The first steps of a long epoch are at epoch 0.0000, and a loss may be 0.
    high_x = max(1, int(np.ceil(max(x for x, _ in points))))
    high_y = 1.0 if percent else max(y for _, y in points) * 1.05 or 1.0
    scale, unit, digits = (100, " %", 1) if percent else (1, "", 2)
    lines = [
        {
            "name": name,
            "ink": CURVES[n % len(CURVES)],
            "last": f"{scale * line[-1][1]:.{digits}f}{unit}" if line else "",
            "points": [
                (round(100 * x / high_x, 2), round(100 - 100 * y / high_y, 2)) for x, y in line
            ],
        }
        for n, (name, line) in enumerate(series)
    ]
    ticks = [scale * (high_y * share) for share in (0, 0.25, 0.5, 0.75, 1)]
    return {
        "lines": lines,
        "ticks_x": [f"{high_x * share:g}" for share in (0, 0.5, 1)],
        "ticks_y": [f"{tick:.{digits - 1}f}{unit}" for tick in ticks],
    }


def read_costs(path: Path) -> dict:
    """Read what cached labels cost from the JSON of an audit. UserError if it has none."""
    numbers = read_json(path, "audit the maps again")
    crops, header = numbers.get("crops"), numbers.get("header")
    if not isinstance(crops, dict) or "groups" not in crops or not isinstance(header, dict):
        raise UserError(f"{path} compares no crops; audit the maps with --teacher and --crops 8")
    crops |= {"maps": numbers.get("file"), "fingerprint": header.get("fingerprint")}
    # JSON holds no NaN, which the page leaves out.
    return json.loads(json.dumps(crops), object_hook=restore_nan)


def check_audited(
    folders: Sequence[Path], runs: Sequence[RunRecord], fingerprint: object, path: Path
) -> None:
    """Raise UserError if an audit is not of the images that the runs train on.

    Their checkpoints state these images. Not compared are a run without any, and one of several
    .beton files, or of one beside its maps, which FFCV may have written: these have a fingerprint
    of their own.
    """
    if not isinstance(fingerprint, str):
        raise UserError(f"{path} does not state its images, as it is old; audit the maps again")
    for folder, run in zip(folders, runs, strict=True):
        data, last = run.config.data, folder / "last.pt"
        if data.loader == "ffcv" and (data.score_maps or "*" in str(data.train)):
            continue
        if last.exists() and checkpoints.load(last).get("fingerprint") != fingerprint:
            raise UserError(
                f"{path} audits score maps of other images than those that {folder} was trained "
                "on; give the audit of its maps"
            )


def restore_nan(values: dict) -> dict:
    """Return a dictionary with NaN for None."""
    return {name: math.nan if value is None else value for name, value in values.items()}


@torch.no_grad()
def main(report: Report) -> None:
    """Read the runs, replay the first epoch of one of them, and write the page."""
    if not report.runs:
        raise UserError("name at least one run folder of densefeed train")
    for path in report.runs:
        if path.is_file() or path.suffix in (".h5", ".hdf5"):
            raise UserError(f"{path} is not a run folder; audit score maps with densefeed audit")
    if report.out:
        check_ending(report.out, ".html", "--out")
    folder = report.runs[-1]
    out = report.out or folder / "report.html"
    if report.boxes:
        # Before the replay, which is left out where the training set is missing.
        if not report.boxes.exists():
            raise UserError(
                f"{report.boxes}: there is no such file; densefeed scenes and densefeed "
                "photo-scenes write it with their scenes"
            )
        check_replaceable(out.with_suffix(".json"), "published", "--out")
    cached_labels = read_costs(report.audit) if report.audit else None
    name = report.validated
    runs, environment = [read_run(folder, name) for folder in report.runs], read_environment(folder)
    if name and all(run.validated is None for run in runs):
        raise UserError(
            f"no run folder holds {name}; write it with densefeed validate RUN --json RUN/{name}"
        )
    if cached_labels:
        check_audited(report.runs, runs, cached_labels["fingerprint"], report.audit)
    crops, predictions = replay(runs, report.boxes), show_predictions(runs[-1].config, folder)
    rows, shown = [make_row(run, runs) for run in runs], runs[-1].config.data.val
    # Predicted masks lie on whole images.
    if predictions and "segmented" in predictions and isinstance(shown, Path):
        crops["license"] = crops["license"] or read_license(shown / BOXES)
    text = TEMPLATES.get_template("report.html").render(
        environment=environment,
        rows=rows,
        rated=list(dict.fromkeys(row["rated"] for row in rows if row["rated"])) or ["top-1"],
        last=runs[-1],
        curves=draw_curves(runs),
        predictions=predictions,
        validated=Path(name).stem,
        heat=HEAT,
        cached_labels=cached_labels,
        **crops,
    )
    with replace_file(out) as part:
        part.write_text(text, encoding="utf-8")
    if crops["purity"]:
        write_json(out.with_suffix(".json"), crops["purity"])
    print(f"{out}: {out.stat().st_size / 1024:,.0f} KiB, open it in a browser")


command = make_command(main, Report, __doc__)


if __name__ == "__main__":
    command()

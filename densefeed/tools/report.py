"""One self-contained HTML file that shows what runs were trained on and what came out.

    python tools/report.py runs/ce runs/token-label --boxes scenes/boxes.json

A table of results, curves, and a contact sheet: training crops exactly as the student saw them,
with the label of every token drawn over them. `--boxes` (from tools/make_digit_scenes.py) adds the
true objects, and judges the labels by them.
"""

import json
import statistics
import sys
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import tyro

from densefeed.models.token_transformer import TokenTransformer
from densefeed.pipelines.augment.augmentation import Augmentation, augment_batches
from densefeed.pipelines.batch import Batch, Loader
from densefeed.pipelines.targets import PLAIN, TargetRules, sparse_targets
from densefeed.storage.images import Images
from densefeed.system.errors import UserError, run
from densefeed.system.files import replace_file
from densefeed.system.progress import bar
from densefeed.tools.audit import INKS, environment, picture
from densefeed.train import build_model, open_loader
from densefeed.training.config import Config, config_from_dict
from densefeed.training.objective import augment_settings

CONTACTS = 12  # crops on the contact sheet
JUDGED = 2000  # crops whose labels are judged
CURVES = ("#0b6e99", "#c2571a", "#3a8f4d", "#7a4fa3", "#8a6d1f", "#555555")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What to show."""

    # run folders of train.py
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    boxes: Path | None = None  # true boxes of the training images, to judge labels by
    out: Path | None = None  # the HTML to write; default: report.html in the last run's folder


# Fields of a config that say where and how fast, not what.
PLACES = {
    "data",
    "val",
    "out",
    "labels",
    "threads",
    "device",
    "resume",
    "loader",
    "microbatch",
    "log_every",
    "eval_every",
    "save_every",
    "wandb",
    "keep",
}


class Run(NamedTuple):
    """A run folder, read."""

    name: str
    config: dict
    result: dict
    train: list[dict]  # metrics of the training, a record every log_every steps
    val: list[dict]  # of the evaluations


class Truth(NamedTuple):
    """True objects of one image: classes `[n]` and boxes `[n, 4]`,
    normalized.
    """

    classes: np.ndarray
    boxes_ltrb: np.ndarray


def read_run(folder: Path) -> Run:
    """A run, finished or not (then its result is empty). UserError if the folder is none."""
    try:
        config = json.loads((folder / "config.json").read_text())
        done = folder / "result.json"
        result = json.loads(done.read_text()) if done.exists() else {}
        # The last line of a run that goes on may be half written.
        text = (folder / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} is no run ({Path(error.filename).name} is missing); train it with train.py"
        ) from None
    except ValueError as error:
        raise UserError(f"{folder} holds a damaged file ({error}); train it again") from error
    return Run(
        folder.name,
        config,
        result,
        *([r for r in lines if r["kind"] == kind] for kind in ("train", "val")),
    )


def row_of(run: Run, runs: list[Run]) -> dict:
    """A run's line in the table of results; `told` is what of its config not all `runs` share."""
    tops = [(record["top1"], "") for record in run.val[-1:]]
    tops += [(record["top1_ema"], "averaged") for record in run.val[-1:] if "top1_ema" in record]
    names = [
        name
        for name in run.config
        if name not in PLACES and len({json.dumps(r.config.get(name)) for r in runs}) > 1
    ]
    told = ", ".join(f"{name.replace('_', '-')} {brief(run.config[name])}" for name in names)
    speeds = {
        name: [record[name] for record in run.train if name in record]
        for name in ("images_per_s", "mfu")
    }
    return {
        "name": run.name,
        "told": told,
        "tops": tops,
        "epoch": max((r["epoch"] for r in run.train + run.val), default=0),
        "epochs": run.config["epochs"],
        "result": run.result,
        **{name: statistics.median(values) if values else None for name, values in speeds.items()},
    }


def brief(value: object) -> str:
    """A config's value in a table's cell."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        " ".join(map(brief, value)) or "none"
        if isinstance(value, list)
        else "none"
        if value in ("", None)
        else str(value)
    )


def student_of(run: Run, loader: Loader) -> tuple[int, Augmentation]:
    """P, the side of the student's table of tokens in the first epoch (16 where its model has
    none), and what it sees of a crop.
    """
    config = config_from_dict(run.config)
    with torch.device("meta"):
        model, _ = build_model(config, loader.num_classes)
    grid = loader.plan.size(0) // model.patch_size if isinstance(model, TokenTransformer) else 16
    return grid, Augmentation(
        loader.plan,
        augment_settings(config),
        model.pretrained_cfg["mean"],
        model.pretrained_cfg["std"],
    )


def read_truth(path: Path, run: Run, loader: Loader) -> list[Truth]:
    """True objects in the order of the run's samples. UserError if they are not of the run's
    images.
    """
    if not path.exists():
        raise UserError(
            f"{path}: there is no such file; tools/make_digit_scenes.py writes it beside its scenes"
        )
    try:
        told = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); make the scenes again") from error
    images = Images(path.parent, split="train")
    if loader.fingerprint != images.fingerprint():
        raise UserError(
            f"{path} describes other images than {run.config['data']} holds; name the boxes of these images"
        )
    truths = []
    for name in images.paths:
        objects = told["scenes"][f"train/{name}"]
        classes = np.array([images.class_names.index(str(o["digit"])) for o in objects])
        truths.append(Truth(classes, np.array([o["box"] for o in objects], float) / told["size"]))
    return truths


def in_crop(boxes_ltrb_n4: np.ndarray, view: np.ndarray) -> np.ndarray:
    """Boxes of the image as the crop shows them: the View undone, the box around the four corners;
    normalized, `[n, 4]`.
    """
    back = np.linalg.inv(np.vstack([view, [0, 0, 1]]))[:2]
    corners = boxes_ltrb_n4[:, [[0, 1], [2, 1], [2, 3], [0, 3]]] @ back[:, :2].T + back[:, 2]
    return np.concatenate([corners.min(1), corners.max(1)], axis=1)


def owner_of_tokens(boxes_ltrb_n4: np.ndarray, grid: int) -> np.ndarray:
    """For each token of a `grid` x `grid` table, the one box it lies wholly inside of, or -1 if it
    touches none or another too.
    """
    edges = np.arange(grid) / grid
    left, top = np.meshgrid(edges, edges)
    token = np.stack([left, top, left + 1 / grid, top + 1 / grid], -1)[:, :, None]
    box = boxes_ltrb_n4[None, None]
    inside = (token[..., :2] >= box[..., :2] - 1e-6).all(-1) & (
        token[..., 2:] <= box[..., 2:] + 1e-6
    ).all(-1)
    touches = (token[..., :2] < box[..., 2:]).all(-1) & (token[..., 2:] > box[..., :2]).all(-1)
    return np.where((touches.sum(-1) == 1) & inside.any(-1), inside.argmax(-1), -1)


def labels_of_tokens(
    batch: Batch, loader: Loader, grid: int, rules: TargetRules = PLAIN
) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest class of every token, and its probability times the token's weight; `[N, T]`
    each.
    """
    targets = sparse_targets(batch, loader.score_maps, grid, rules)
    best = (targets.extra + targets.base[..., None]).max(-1)
    return targets.palette.gather(1, best.indices).numpy(), (best.values * targets.weight).numpy()


def judge(loader: Loader, truths: list[Truth], grid: int) -> dict:
    """Of the tokens that lie inside exactly one true object: how often is each kind of label that
    object's class?

    Judged are crops before augmentation.

    Kinds: `image`, the image's own label, which plain cross entropy tells every token; `crop`, the
    dense label of the whole crop (objective relabel); `token`, the dense label of the token;
    `published`, the same read where the published code reads. Each for `all` such tokens, those on
    the `largest` object of their image and those on the `others`. `tokens` counts them.
    """
    hits = {
        kind: {"all": 0, "largest": 0, "others": 0}
        for kind in ("image", "crop", "token", "published")
    }
    tokens = {"all": 0, "largest": 0, "others": 0}
    batches = min(-(-JUDGED // loader.plan.batch), len(loader))
    for batch in bar(islice(loader.batches(0), batches), "judge, batches", batches):
        token_NT, _ = labels_of_tokens(batch, loader, grid)
        crop_N1, _ = labels_of_tokens(batch, loader, 1)
        published_NT, _ = labels_of_tokens(
            batch, loader, grid, TargetRules(geometry="published", outside="uniform")
        )
        for n in np.nonzero(batch.weight.numpy())[0]:
            truth = truths[int(batch.index[n])]
            owner_T = owner_of_tokens(
                in_crop(truth.boxes_ltrb, batch.view[n].numpy()), grid
            ).ravel()
            inside_T = owner_T >= 0
            want, owner = truth.classes[owner_T[inside_T]], owner_T[inside_T]
            said = {
                "image": int(batch.label[n]),
                "crop": crop_N1[n, 0],
                "token": token_NT[n][inside_T],
            }
            said["published"] = published_NT[n][inside_T]
            for part, chosen in (
                ("all", owner >= 0),
                ("largest", owner == 0),
                ("others", owner > 0),
            ):
                tokens[part] += int(chosen.sum())
                for kind, label in said.items():
                    hits[kind][part] += int(((label == want) & chosen).sum())
    shares = {
        kind: {part: hits[kind][part] / max(tokens[part], 1) for part in tokens} for kind in hits
    }
    return shares | {"tokens": tokens}


def contact_sheet(
    config: Config,
    loader: Loader,
    truths: list[Truth] | None,
    grid: int,
    augmentation: Augmentation,
) -> list[dict]:
    """The first crops of epoch 0 as the student saw them, each with its tokens' labels and, if
    known, the true boxes.

    Labels are as the run reads them, but for their smoothing, which moves all alike.
    """
    (batch,) = augment_batches(islice(loader.batches(0), 1), augmentation, 0, torch.device("cpu"))
    batch = batch._replace(image=augmentation.normalize.pixels(batch.image))
    # right for all Views
    rules = TargetRules(0.0, config.temperature, config.outside, config.geometry, sheared=True)
    token, probability = labels_of_tokens(batch, loader, grid, rules)
    sheet = []
    for n in range(min(CONTACTS, loader.plan.batch)):
        cells = [
            {
                "x": at % grid,
                "y": at // grid,
                "name": loader.class_names[c],
                "ink": INKS[c % len(INKS)],
                "opacity": round(0.62 * float(p) ** 2, 3),
                "sure": bool(p > 0.5),
            }
            for at, (c, p) in enumerate(
                zip(token[n].tolist(), probability[n].tolist(), strict=True)
            )
        ]
        objects = []
        if truths is not None:
            truth = truths[int(batch.index[n])]
            for c, (left, top, right, bottom) in zip(
                truth.classes,
                in_crop(truth.boxes_ltrb, batch.view[n].numpy()).clip(0, 1),
                strict=True,
            ):
                if right > left and bottom > top:
                    objects.append(
                        {
                            "x": left * grid,
                            "y": top * grid,
                            "w": (right - left) * grid,
                            "h": (bottom - top) * grid,
                            "name": loader.class_names[c],
                            "ink": INKS[c % len(INKS)],
                        }
                    )
        sheet.append(
            {
                "image": picture(batch.image[n].numpy()),
                "label": loader.class_names[int(batch.label[n])],
                "index": int(batch.index[n]),
                "cells": cells,
                "objects": objects,
            }
        )
    return sheet


def curve(runs: list[Run], kind: str, value: str, percent: bool) -> dict:
    """Points of one value of all runs over epochs, in a 100 x 100 frame with its axes' ticks."""
    series = [
        (run.name, [(r["epoch"], r[value]) for r in getattr(run, kind) if value in r])
        for run in runs
    ]
    points = [point for _, line in series for point in line]
    if not points:
        return {"lines": [], "ticks_x": [], "ticks_y": []}
    high_x = int(np.ceil(max(x for x, _ in points)))
    low_y, high_y = (0.0, 1.0) if percent else (0.0, max(y for _, y in points) * 1.05)

    def ended(line: list[tuple[float, float]]) -> str:
        return "" if not line else f"{100 * line[-1][1]:.1f} %" if percent else f"{line[-1][1]:.2f}"

    def placed(x: float, y: float) -> tuple[float, float]:
        return round(100 * x / high_x, 2), round(100 - 100 * (y - low_y) / (high_y - low_y), 2)

    lines = [
        {
            "name": name,
            "ink": CURVES[n % len(CURVES)],
            "last": ended(line),
            "points": [placed(*point) for point in line],
        }
        for n, (name, line) in enumerate(series)
    ]
    ticks = [low_y + (high_y - low_y) * share for share in (0, 0.25, 0.5, 0.75, 1)]
    return {
        "lines": lines,
        "ticks_x": [f"{high_x * share:g}" for share in (0, 0.5, 1)],
        "ticks_y": [f"{100 * t:.0f} %" if percent else f"{t:.1f}" for t in ticks],
    }


def main(report: Report) -> None:
    """Read the runs, replay the last one's first epoch, write the file."""
    if not report.runs:
        raise UserError("name at least one run folder of train.py")
    for path in report.runs:
        if path.is_file() or path.suffix in (".h5", ".hdf5"):
            raise UserError(f"{path} is not a run folder; audit score maps with tools/audit.py")
    runs = [read_run(folder) for folder in report.runs]
    # The sheet shows crops before they are mixed; of several runs the last that mixes nothing and
    # reads labels where they belong.
    dense = [run for run in runs if run.config["objective"] != "ce"]
    mixes = ("mixtoken", "cutmix", "mixup")
    plain = [
        run
        for run in dense
        if not any(run.config.get(name) for name in mixes)
        and run.config.get("geometry", "aligned") == "aligned"
    ]
    labeled = (plain or dense or [None])[-1]
    sheet, purity, grid = [], None, 0
    if labeled:
        config = replace(config_from_dict(labeled.config), labels_on_device=False)
        try:
            loader = open_loader(config, "train")
        except (UserError, OSError) as error:
            print(
                f"no pictures of crops, as the training set cannot be opened: {error}",
                file=sys.stderr,
            )
            labeled = None
    if labeled:
        grid, augmentation = student_of(labeled, loader)
        truths = read_truth(report.boxes, labeled, loader) if report.boxes else None
        sheet = contact_sheet(config, loader, truths, grid, augmentation)
        purity = judge(loader, truths, grid) if truths else None
        loader.close()
    page = environment().get_template("report.html")
    out = report.out or report.runs[-1] / "report.html"
    text = page.render(
        environment=json.loads((report.runs[-1] / "environment.json").read_text()),
        rows=[row_of(run, runs) for run in runs],
        first=runs[-1],
        sheet=sheet,
        purity=purity,
        grid=grid,
        labeled=labeled,
        accuracy=curve(runs, "val", "top1", True),
        losses=curve(runs, "train", "loss", False),
    )
    with replace_file(out) as part:
        part.write_text(text)
    if purity:
        with replace_file(out.with_suffix(".json")) as part:
            part.write_text(json.dumps(purity, indent=1))
    print(f"{out}: {out.stat().st_size / 1024:,.0f} KiB, open it in a browser")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    run(lambda: main(tyro.cli(Report, description=__doc__)))

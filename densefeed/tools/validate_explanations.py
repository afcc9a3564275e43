"""Measure how well a model's explanations find the objects, in boxes or by deletion and insertion.

    python tools/validate_explanations.py runs/ce runs/token-label --data scenes \\
        --boxes scenes/boxes.json --json maps.json
    python tools/validate_explanations.py runs/student --data imagenet --max-images 500
    python tools/validate_explanations.py vit.safetensors --model vit_small_patch16_224 \\
        --data imagenet --max-images 500

MAPS. Relevance of a class (arXiv 2012.09838), gradient x attention and attention of the last layer,
from what the classifier reads and from all tokens, and attention rollout. No class changes rollout
and attention. What a model does not have (Swin has neither relevance nor rollout, a CNN none) is a
dash in the table, with the reason below. `chance` is a map without information.

BOXES. With `--boxes`, a file that tools/make_digit_scenes.py writes, every class with a visible box
in an image is asked for, and measured apart for the image's label and for other classes. Box share
is the share of the map inside the boxes of the class, exact where they cut patches; chance is the
boxes' share of the area. In the pointing game (arXiv 1608.00507) the patch of the maximum must lie
in a box by half, or in a box smaller than a patch more than the others do. There is no tolerance
around boxes. As in the paper it is averaged over the images of each class, then over classes.

CURVES. Without boxes, or with `--steps`: pixels are removed in the order of the map (deletion; a
low area under the curve of the label's probability is good), or inserted (a high one is). RISE
(arXiv 1806.07421) deletes to the mean color and inserts into a blurred image; small inputs are
still recognized blurred, so give them `--baseline gray`. Chance is a map of random patches.

The model sees each image as in tools/validate.py: the centered square of crop-pct times the shorter
side, resized to the model's size with the filter of its evaluation. Images that it classifies
wrongly count too.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import tyro
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from densefeed.explain.attention_maps import class_map, mean_map
from densefeed.explain.capture import forward_attention
from densefeed.explain.measures import (
    area_under,
    baseline_image,
    box_coverage,
    box_share,
    class_curve,
    pointing_hits,
    rank_pixels,
)
from densefeed.explain.refusals import Refusals, group_refusals
from densefeed.explain.relevance import attention_rollout, class_relevance, gradient_attention
from densefeed.native import MAX_PIXELS
from densefeed.pipelines.augment.augmentation import Normalize
from densefeed.storage.geometry import LEAST_CROP, crop_views
from densefeed.storage.images import Images, MaxPixels, decode, limit_pixels
from densefeed.system.devices import choose_device
from densefeed.system.errors import UserError, make_command
from densefeed.system.files import check_ending
from densefeed.system.options import Bounds, Count, NonNegativeInt, Options
from densefeed.system.progress import bar
from densefeed.system.provenance import check_replaceable, environment, write_json
from densefeed.system.terminal import escape_controls, print, print_table
from densefeed.tools.load_model import Trained, Weights, crop_input, imagenet_names, open_trained
from densefeed.tools.true_objects import Truth, boxes_in_crop, read_objects
from densefeed.tools.validate import match_classes

# N images   J classes asked for   R x C a grid, rows and columns

PACKAGES = ("torch", "timm", "numpy")
MAPS = ("relevance", "gradient x attention", "rollout", "class attention", "mean attention")
CHANCE = "chance"
# Steps of a curve where nobody chooses them.
STEPS = 32
# As many as the pixels of 256 x 256.
MOST_STEPS = 2**16
# Images of a forward pass of curves, in batches: without gradients an image takes less memory.
FORWARD = 8
# Of RISE's code: (deletion, insertion).
BASELINES = {"published": ("gray", "blur"), "gray": ("gray", "gray"), "blur": ("blur", "blur")}
TITLES = {
    "label_share": "Box share, the image's label",
    "label_pointing": "Pointing game, the image's label",
    "others_share": "Box share, other classes",
    "others_pointing": "Pointing game, other classes",
    "deletion": "Deletion, area under the curve (low is good)",
    "insertion": "Insertion, area under the curve (high is good)",
}


@dataclass(frozen=True, kw_only=True)
class MapValidation(Options):
    """The models, and the images to explain."""

    # checkpoints, or run folders of train.py; a row of the table for each
    checkpoints: tyro.conf.Positional[tuple[Path, ...]]
    data: Path  # a folder of class folders, or a folder of splits, of which `val` is read
    boxes: Path | None = None  # true boxes of these images
    # steps of deletion and insertion curves, each a forward pass for every map; 0: no curves;
    # default: 32 without --boxes, else 0
    steps: int | None = None
    # what replaces pixels; published: gray (the mean color) in deletion, blur in insertion
    baseline: Literal["published", "gray", "blur"] = "published"
    max_images: NonNegativeInt = 0  # how many of the images, drawn by --seed; 0: all
    seed: NonNegativeInt = 0  # of the choice of images, and of the curves' chance
    size: NonNegativeInt = 0  # side of the input, pixels; 0: the size each was trained at
    # side of the crop, share of the shorter side; 0: the checkpoint's value
    crop_pct: float = 0.0
    weights: Weights = "ema"  # EMA weights where the checkpoint has them, or the raw weights
    model: str = ""  # timm's name of the model, for a checkpoint that does not contain it
    batch: Count = 8  # images at once; curves, which need no gradients, take eight times as many
    max_pixels: MaxPixels = MAX_PIXELS
    device: str = "auto"  # auto: cuda if it is available, else cpu
    json: Path | None = None  # write the result to this JSON file


# ------------------------------------------------------------------------- data


class Samples(NamedTuple):
    """The images to explain."""

    images: Images
    rows: list[int]  # of the images
    truths: dict[int, Truth]  # true objects by row; empty without --boxes


def open_samples(options: MapValidation) -> Samples:
    """Choose images and read their boxes. Raises UserError."""
    images = Images(options.data, split="val")
    count = options.max_images or len(images)
    rng = np.random.default_rng(options.seed)
    rows = np.sort(rng.permutation(len(images))[:count]).tolist()
    truths = read_boxes(options.boxes, images, rows) if options.boxes else {}
    return Samples(images, rows, truths)


def read_boxes(path: Path, images: Images, rows: list[int]) -> dict[int, Truth]:
    """Read the true objects of images, by row. UserError if the file describes other images."""
    # Keys are paths from the file's folder, beside which the images were made.
    first = Path(images.where(0))
    folder = first.parents[len(Path(images.paths[0]).parts) - 1].resolve().name
    beside = path.parent / folder
    # Scenes of another seed have the same names.
    if not beside.is_dir() or Images(beside).fingerprint() != images.fingerprint():
        raise UserError(
            f"{path} describes other images than those of {first.parent.parent}; "
            "give the boxes of these images"
        )
    truths = list(read_objects(path, images, folder))
    return {row: truths[row] for row in rows}


class Inputs(NamedTuple):
    """A batch of images as the model sees them."""

    pixels: Tensor  # uint8 [N, S, S, 3]
    label: list[int]
    # Of each image the boxes of each class that it shows, [n, 4], normalized to the input.
    boxes: list[dict[int, np.ndarray]]


def read_inputs(samples: Samples, rows: list[int], trained: Trained, crop_pct: float) -> Inputs:
    """Read images and cut out what the model sees. Raises UserError for a damaged one."""
    pixels, boxes = [], []
    for row in rows:
        image = decode(samples.images.read(row), samples.images.where(row))
        seen, box = crop_input(image, trained, crop_pct)
        pixels.append(seen)
        sides = np.array([image.height]), np.array([image.width])
        view = crop_views(box, np.array([False]), *sides)[0]
        truth = samples.truths.get(row)
        boxes.append(visible_boxes(truth, view) if truth else {})
    label = samples.images.labels[rows].tolist()
    return Inputs(torch.from_numpy(np.stack(pixels)), label, boxes)


def visible_boxes(truth: Truth, view: np.ndarray) -> dict[int, np.ndarray]:
    """Return the boxes of each class that the crop of `view` shows, cut at its edges."""
    boxes = boxes_in_crop(truth.boxes_ltrb, view).clip(0, 1)
    shown = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    classes = truth.classes[shown]
    return {c: boxes[shown][classes == c] for c in np.unique(classes).tolist()}


# ------------------------------------------------------------------------- maps


class MapMaker:
    """Computes the maps of a model.

    Attributes:
        refused: the maps that the model does not have, and the reasons.
    """

    def __init__(self, model: nn.Module) -> None:
        # Derivatives of attention matrices need none of weights.
        self.model, self.refused = model.requires_grad_(False), Refusals()

    def __call__(self, image_NCHW: Tensor, target_NJ: Tensor) -> dict[str, Tensor]:
        """Return the maps that there are, `[N, J or 1, R, C]`; 1 where no class changes them."""
        model, made = self.model, {}
        captured = self.refused.attempt(
            "class attention", lambda: forward_attention(model, image_NCHW)
        )
        computed = {
            "relevance": lambda: class_relevance(model, image_NCHW, target_NJ),
            "gradient x attention": lambda: gradient_attention(model, image_NCHW, target_NJ),
            "rollout": lambda: attention_rollout(captured)[:, None],
            "class attention": lambda: class_map(captured[-1])[:, None],
            "mean attention": lambda: mean_map(captured[-1])[:, None],
        }
        for name in MAPS:
            # Without attention no map has another reason.
            if captured is None:
                self.refused.setdefault(name, self.refused["class attention"])
            elif (map_NJRC := self.refused.attempt(name, computed[name])) is not None:
                made[name] = map_NJRC
        return made


# ------------------------------------------------------------------------- scores


class Scores:
    """Sums of what is measured, by map and measure."""

    def __init__(self) -> None:
        self.values = defaultdict(lambda: defaultdict(list))
        self.classes = defaultdict(lambda: defaultdict(list))

    def add(self, name: str, measure: str, values: Tensor, classes: list[int]) -> None:
        """Add values, and the class of each, to a measure of the map `name`."""
        self.values[name][measure] += values.tolist()
        self.classes[name][measure] += classes

    def means(self) -> dict[str, dict[str, float]]:
        """Return the mean of each measure; of the pointing game over classes, as in the paper."""
        return {
            name: {m: self._mean(name, m) for m in measures}
            for name, measures in self.values.items()
        }

    def _mean(self, name: str, measure: str) -> float:
        values = np.array(self.values[name][measure])
        if not measure.endswith("pointing"):
            return values.mean().item()
        classes = np.array(self.classes[name][measure])
        return np.mean([values[classes == c].mean() for c in np.unique(classes)]).item()


def score_boxes(scores: Scores, maps: dict[str, Tensor], inputs: Inputs, asked: list[list]) -> None:
    """Add box share and pointing game of each class that an image shows.

    `asked` are the classes of the maps, J of each image, as numbers of the data.
    """
    places = [
        (n, asked[n].index(c), c, boxes)
        for n, shown in enumerate(inputs.boxes)
        for c, boxes in shown.items()
    ]
    for group, is_label in (("label", True), ("others", False)):
        chosen = [p for p in places if (p[2] == inputs.label[p[0]]) == is_label]
        if not chosen:
            continue
        n, j, classes, boxes = map(list, zip(*chosen, strict=True))
        for name, map_NJRC in maps.items():
            # A map that no class changes has J = 1.
            map_KRC = map_NJRC.expand(-1, len(asked[0]), -1, -1)[n, j]
            coverage_KRC = torch.stack([box_coverage(b, tuple(map_KRC.shape[1:])) for b in boxes])
            scores.add(name, f"{group}_share", box_share(map_KRC, coverage_KRC), classes)
            scores.add(name, f"{group}_pointing", pointing_hits(map_KRC, coverage_KRC), classes)


def score_curves(
    scores: Scores,
    maps: dict[str, Tensor],
    model: nn.Module,
    image_NCHW: Tensor,
    target_N: Tensor,
    options: MapValidation,
) -> None:
    """Add the areas under deletion and insertion curves of the label."""
    removed, blank = (baseline_image(image_NCHW, kind) for kind in BASELINES[options.baseline])
    for name, map_NJRC in maps.items():
        rank_NHW = rank_pixels(map_NJRC[:, 0], tuple(image_NCHW.shape[2:]))
        for measure, ends in (
            ("deletion", (image_NCHW, removed)),
            ("insertion", (blank, image_NCHW)),
        ):
            steps, batch = curve_steps(options), FORWARD * options.batch
            curve_NS = class_curve(model, *ends, rank_NHW, target_N, steps, batch)
            scores.add(name, measure, area_under(curve_NS), target_N.tolist())


def curve_steps(options: MapValidation) -> int:
    """Return the steps of curves, 0 for none."""
    if options.steps is not None:
        return options.steps
    return 0 if options.boxes else STEPS


def chance_maps(
    maps: dict[str, Tensor], rows: list[int], seed: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return maps without information: uniform for boxes, and random, of each image, for curves."""
    like = next(iter(maps.values()))[:, :1]
    grid = like.shape[2:]
    noise = np.stack([np.random.default_rng([seed, row]).random(grid) for row in rows])
    return {CHANCE: torch.ones_like(like)}, {CHANCE: torch.from_numpy(noise)[:, None].to(like)}


# ------------------------------------------------------------------------- command


def batches(
    samples: Samples, trained: Trained, options: MapValidation
) -> Iterator[tuple[list[int], Inputs]]:
    """Yield the rows and inputs of each batch."""
    parts = [
        samples.rows[begin : begin + options.batch]
        for begin in range(0, len(samples.rows), options.batch)
    ]
    for rows in bar(parts, f"{trained.name}, batches"):
        yield rows, read_inputs(samples, rows, trained, options.crop_pct or trained.crop_pct)


def measure(
    trained: Trained, samples: Samples, device: torch.device, options: MapValidation
) -> dict:
    """Explain all images; return the row of the result."""
    model, columns = trained.model.to(device), find_columns(trained, samples).to(device)
    normalize, make_maps = Normalize(trained.mean, trained.std).to(device), MapMaker(model)
    scores, right = Scores(), 0
    for rows, inputs in batches(samples, trained, options):
        image_NCHW, asked = normalize(inputs.pixels.to(device)), list_classes(inputs)
        target_NJ = columns[torch.tensor(asked, device=device)]
        maps = make_maps(image_NCHW, target_NJ)
        if not maps:
            break
        with torch.no_grad():
            best_N = model(image_NCHW)[:, columns].argmax(1)
        right += (best_N.cpu() == torch.tensor(inputs.label)).sum().item()
        uniform, random = chance_maps(maps, rows, options.seed)
        if options.boxes:
            score_boxes(scores, maps | uniform, inputs, asked)
        if curve_steps(options):
            score_curves(scores, maps | random, model, image_NCHW, target_NJ[:, 0], options)
    return describe(trained, scores, make_maps.refused, right / len(samples.rows), options)


def find_columns(trained: Trained, samples: Samples) -> Tensor:
    """Return the logit of each class of the data, int64 `[L]`. UserError if one has none."""
    model = trained.model
    names, stand_in = samples.images.class_names, imagenet_names(model)
    match = match_classes(names, trained.class_names, model.num_classes, stand_in)
    return torch.tensor(match.columns)


def list_classes(inputs: Inputs) -> list[list[int]]:
    """Return the classes to ask of each image, as many of each: its label, and those it shows."""
    asked = [
        [label, *(c for c in shown if c != label)]
        for label, shown in zip(inputs.label, inputs.boxes, strict=True)
    ]
    J = max(map(len, asked))
    return [[*classes, *classes[:1] * (J - len(classes))] for classes in asked]


def describe(
    trained: Trained, scores: Scores, refused: dict, top1: float, options: MapValidation
) -> dict:
    """Return the row of a model."""
    return {
        "checkpoint": str(trained.path),
        "model": trained.name,
        "weights": trained.weights,
        "size": trained.size,
        "crop_pct": options.crop_pct or trained.crop_pct,
        "top1": None if len(refused) == len(MAPS) else top1,
        "maps": scores.means(),
        "refused": {name: refused[name] for name in MAPS if name in refused},
    }


def open_model(path: Path, options: MapValidation) -> Trained:
    """Load the model of a checkpoint or run folder. Raises UserError."""
    return open_trained(path, options.weights, options.model, options.size)


def check_options(options: MapValidation) -> None:
    """Raise UserError for options that need no model to be refused."""
    if options.json:
        check_ending(options.json, ".json", "--json")
        check_replaceable(options.json, "explanations", "--json")
    if not options.checkpoints:
        raise UserError("no model is given; give checkpoints or run folders")
    Bounds(0, MOST_STEPS).check("steps", curve_steps(options))
    if not options.boxes and not curve_steps(options):
        raise UserError("--steps 0 leaves nothing to measure without --boxes; give one of them")
    # 0 stands for the checkpoint's value.
    if options.crop_pct:
        Bounds(LEAST_CROP, 1).check("crop_pct", options.crop_pct)


def main(options: MapValidation) -> dict:
    """Measure the maps of all models, print the tables and write the JSON file; return it."""
    check_options(options)
    limit_pixels(options.max_pixels)
    device, samples = choose_device(options.device), open_samples(options)
    # Before the first is measured, which may take hours, whose result would be lost.
    for path in options.checkpoints[1:]:
        find_columns(open_model(path, options), samples)
    rows = [
        {"run": str(path)} | measure(open_model(path, options), samples, device, options)
        for path in options.checkpoints
    ]
    if not any(row["maps"] for row in rows):
        reasons = [reason for row in rows for reason in row["refused"].values()]
        raise UserError("; ".join(dict.fromkeys(reasons)))
    show(rows, len(samples.rows))
    document = {
        "explanations": rows,
        "data": str(options.data),
        "boxes": options.boxes and str(options.boxes),
        "images": len(samples.rows),
        "seed": options.seed,
        "steps": curve_steps(options),
        "baseline": options.baseline if curve_steps(options) else None,
    } | environment(PACKAGES)
    if options.json:
        write_json(options.json, document)
    return document


def show(rows: list[dict], count: int) -> None:
    """Print a table of each measure, and why maps are absent."""
    found = {measure for row in rows for maps in row["maps"].values() for measure in maps}
    for measure, title in TITLES.items():
        if measure in found:
            print_table(table(rows, measure, f"{title}, {count:,} images"), least_width=100)
    for row in rows:
        for names, reason in group_refusals(row["refused"]):
            print(f"{row['run']} has no {names}: {reason}")


def table(rows: list[dict], measure: str, title: str) -> Table:
    """Return the table of a measure, a row for each model."""
    lines = Table(title=title, title_justify="left")
    lines.add_column("model", overflow="fold")
    lines.add_column("top-1", justify="right")
    for name in (*MAPS, CHANCE):
        lines.add_column(name, justify="right")
    for row in rows:
        cells = [row["maps"].get(name, {}).get(measure) for name in (*MAPS, CHANCE)]
        # As Text, because names may contain rich's markup.
        lines.add_row(
            Text(escape_controls(row["run"])),
            format_value(row["top1"], "top1"),
            *(format_value(cell, measure) for cell in cells),
        )
    return lines


def format_value(value: float | None, measure: str) -> str:
    """Format a value as a percentage, of curves as a number; a dash for None."""
    if value is None:
        return "–"
    return f"{value:.3f}" if measure in ("deletion", "insertion") else f"{100 * value:.1f} %"


command = make_command(main, MapValidation, __doc__)


if __name__ == "__main__":
    command()

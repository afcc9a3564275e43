"""Audit score maps: print the findings, and write them to an HTML page and to JSON.

    densefeed audit maps.h5 --data imagenet --teacher dm_nfnet_f6.dm_in1k

The file alone is checked for damaged values, duplicates, and agreement with its labels. With
--data, names, image sizes and files are checked too, and the page shows pictures. With --teacher, a
model of the same classes that locates objects, the audit also checks how the maps are oriented,
which part of the image they cover, and whether each is stored at its own image. With --crops 8 it
also measures what the cached labels cost: the stored maps are compared with the teacher's labels of
8 random-resized crops of each image, which it sees enlarged, as it would if every crop were labeled
anew. Exit code 2 means that a fault was found.
"""

if not __package__:
    import script_start  # noqa: F401

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from PIL import Image

from densefeed.pages.templates import TEMPLATES, picture
from densefeed.pages.tokens import draw_labels
from densefeed.pages.true_objects import read_license
from densefeed.pipelines.faithfulness import measure_crops
from densefeed.relabel.audit import AuditResult, audit, print_checks, raise_on_faults
from densefeed.relabel.checks.labels import class_name
from densefeed.relabel.checks.outcome import VERDICTS
from densefeed.relabel.load_teacher import load_references
from densefeed.relabel.reference_match import ORIENTATIONS, References
from densefeed.storage.beton_images import open_images
from densefeed.storage.images import (
    DecodeOptions,
    SplitOptions,
    decode,
    limit_pixels,
    sample_evenly,
)
from densefeed.storage.row_codecs import cell_targets
from densefeed.storage.scenes import BOXES
from densefeed.storage.store_folder import open_rows, read_manifest
from densefeed.system.devices import DeviceOptions, ThreadOptions
from densefeed.system.errors import UserError, make_command
from densefeed.system.factories import is_factory
from densefeed.system.files import check_ending, replace_file
from densefeed.system.options import Bounds, NonNegativeInt, own_first
from densefeed.system.provenance import check_replaceable, write_json
from densefeed.system.terminal import print

# Pictures on the page: with 18 x 18 cells 0.8 MB in all.
NUM_OVERLAYS, NUM_DISAGREEMENTS = 12, 24
# Longer side of a picture, pixels.
PICTURE_SIDE = 224
# With more classes the page lists the best and the worst.
FEW_CLASSES = 30
# While one of these checks has a fault, the agreement with the labels does not measure the teacher.
BEFORE_ACCURACY = ("logits", "images", "class names", "class list", "labels", "rows")


@own_first
@dataclass(frozen=True, kw_only=True)
class AuditOptions(SplitOptions, DecodeOptions, ThreadOptions, DeviceOptions):
    """Score maps to audit, and what to compare them with."""

    maps: tyro.conf.Positional[Path]  # score maps: an HDF5 file, or a folder of shards
    out: Path | None = None  # HTML file to write; default: NAME.audit.html beside the maps
    json: Path | None = None  # JSON file to write the numbers to; default: beside the HTML
    data: Path | None = None  # images of the maps: a folder, or the root that --dataset needs
    # name of the dataset, from the list in the --help of packing, if the data is not a folder of
    # class folders; or, in place of --data, package.module:factory, which returns a dataset
    dataset: str = ""
    # split of the images; with --val-fraction, as in labeling, train or val
    split: str = "train"
    # reference to compare the maps with: a timm model, a checkpoint, or a run folder of densefeed
    # train
    teacher: str = ""
    # CSV or JSON from the reference's classes to those of the maps, as in labeling
    class_map: Path | None = None
    model: str = ""  # timm's name of the reference, for a checkpoint that does not contain it
    # side of the reference's input, pixels; 0: that of the maps' teacher
    input_size: NonNegativeInt = 0
    images: Annotated[int, Bounds(2)] = 300  # images shown to the reference
    # random-resized crops of each of these images that the reference labels too, to measure how far
    # the stored maps are from its labels of the crops; 0: none
    crops: Annotated[int, Bounds(0, 64)] = 0
    # read all rows of a file of more than 100,000, of which otherwise 20,480 are read
    every_row: bool = False

    def unused(self) -> dict[str, str]:
        found = {}
        if not self.teacher:
            names = "model", "class_map", "input_size", "images", "crops", "threads", "device"
            found |= dict.fromkeys(names, "--teacher")
        if not self.has_images:
            found |= dict.fromkeys(("dataset", "split", "max_pixels"), "--data")
        return found

    @property
    def has_images(self) -> bool:
        """Whether the images are given."""
        return self.data is not None or is_factory(self.dataset)


def main(options: AuditOptions) -> None:
    """Audit the maps, print the checks, write the page and the numbers.

    Raises UserError, and so ends with exit code 2, if a fault was found.
    """
    limit_pixels(options.max_pixels)
    path = options.maps
    if options.teacher and not options.has_images:
        raise UserError("--teacher needs the images; pass them with --data")
    if path.is_dir():
        read_manifest(path)
        # The page lies beside the folder, also if that is named `.`.
        path = path.resolve()
    out = options.out or path.with_suffix(".audit.html")
    check_ending(out, ".html", "--out")
    numbers = options.json or out.with_suffix(".json")
    check_ending(numbers, ".json", "--json")
    check_replaceable(numbers, "checks", "--json" if options.json else "--out")
    images = None
    if options.has_images:
        images = open_images(options.data, options.dataset, options.split, options)
        images.describe_split()
    references = open_references(options) if options.teacher else None
    result = audit(path, images, references, options.images, options.every_row, options.threads)
    if options.crops and references:
        result.figures["crops"] = compare_crops(result, references, options)
    license = read_license(options.data / BOXES) if options.data else ""
    text = render_page(result, license)
    with replace_file(out) as part:
        part.write_text(text, encoding="utf-8")
    write_json(numbers, result.to_dict())
    print_checks(result)
    if crops := result.figures.get("crops"):
        print(f"cached labels: {crops['sentence']}")
    size = f"{out.stat().st_size / 1024:,.0f} KiB"
    print(f"{out}: {size}, open it in a browser; the numbers are in {numbers}")
    raise_on_faults(result, path, f"{out} lists the remedies")


def open_references(options: AuditOptions) -> References:
    """Load --teacher for the classes and, unless --input-size is given, the size of the maps."""
    # Not by ScoreMapStore, which refuses unfinished files. The audit reports these.
    header = open_rows(options.maps).header
    size, names = options.input_size or header.input_size, header.class_names
    remedy = "choose another reference, or give the --class-map that the images were labeled with"
    return load_references(
        options.teacher, options.model, size, names, options.device, options.class_map, remedy
    )


def compare_crops(result: AuditResult, references: References, options: AuditOptions) -> dict:
    """Measure what the cached labels cost; return numbers for the page, with one sentence."""
    # The maps of a store with such a fault were not compared with the reference either.
    if not result.figures.get("reference"):
        return {"sentence": "crops were not compared, see the faults and the checks not made"}
    # Rows can be in two pairs of neighbors.
    rows, places = np.unique(result.compared), (result.images, result.image_of)
    squash = references["squash"]
    return measure_crops(result.store, *places, rows, squash, options.crops, options.threads)


# ---------------------------------------------------------------------------------------- the page


def render_page(result: AuditResult, license: str = "") -> str:
    """Render the self-contained HTML page; `license` is that of its pictures."""
    # The figures of an unfinished store have nothing but its path.
    figures = {"header": None, "reference": None, "classes": [], "crops": None} | result.figures
    verdicts = {check.name: check.verdict for check in result.checks}
    # A teacher at chance may be untrained, or the maps may be those of other images; a warning of
    # the rows means that they may be.
    measures_teacher = (
        verdicts.get("labels") in ("sound", "warning") and verdicts.get("rows") != "warning"
    )
    entropy, palette = figures.get("entropy"), figures.get("palette")
    return TEMPLATES.get_template("audit.html").render(
        at_fault=[name for name in BEFORE_ACCURACY if verdicts.get(name) == "fault"],
        measures_teacher=measures_teacher,
        checks=result.checks,
        words=VERDICTS,
        figures=figures,
        **choose_classes(figures["classes"]),
        entropy=entropy and scale_bars(entropy["histogram"], 0, entropy["nats_most"]),
        palette=palette and palette_bars(palette),
        overlays=list_overlays(result),
        disagreements=list_disagreements(result),
        orientations=ORIENTATIONS,
        license=license,
    )


def choose_classes(classes: list[dict]) -> dict:
    """Return what the page shows of the classes: all, or a histogram and its ends."""
    classes = sorted(classes, key=lambda c: (c["agree"], -c["images"]))
    parts, agreement = [("", classes)], None
    if len(classes) > FEW_CLASSES:
        parts = [("lowest", classes[:20]), ("highest", classes[-5:])]
        shares = [100 * c["agree"] for c in classes]
        agreement = scale_bars(np.histogram(shares, 20, (0, 100))[0], 0, 100)
    return {"class_parts": parts, "class_count": len(classes), "agreement": agreement}


def scale_bars(counts: Sequence[int], low: float, high: float) -> dict:
    """Scale a histogram for the page.

    Returns heights in percent of the highest bar, the count of that bar, and three ticks of the
    axis.
    """
    most = max([1, *map(int, counts)])
    return {
        "heights": [round(100 * int(n) / most, 2) for n in counts],
        "most": most,
        "ticks": [f"{low + (high - low) * share:.3g}" for share in (0, 0.5, 1)],
    }


def palette_bars(palette: dict) -> dict:
    """Count palette sizes in at most 24 equal ranges from 0 on, and scale the bars."""
    sizes = np.array(palette["sizes"])
    high = int(sizes.max())
    bins, weights = min(24, high + 1), palette["counts"]
    return scale_bars(np.histogram(sizes, bins, (0, high + 1), weights=weights)[0], 0, high)


def draw_row(result: AuditResult, row: int) -> dict:
    """Return the image of a row, small, as a data URL, its width over its height, and its map.

    Raises UserError if the image cannot be read.
    """
    index = int(result.image_of[row])
    image = decode(result.images.read(index), result.images.where(index))
    ratio = round(image.width / image.height, 4)
    image.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    # Small pictures would look blurred when the browser enlarges them.
    if max(image.size) < PICTURE_SIDE // 2:
        image = image.resize((image.width * 2, image.height * 2), Image.Resampling.NEAREST)
    return {"image": picture(image, "JPEG"), "ratio": ratio} | draw_map(result, row)


def draw_map(result: AuditResult, row: int) -> dict:
    """Return the rectangles of a map, placed in its image (0 to 1), and a key of its classes."""
    header, maps = result.store.header, result.store.rows(np.array([row]))
    named, _ = cell_targets(maps, header.num_classes, header.absent)
    names = [class_name(header.class_names, c) for c in range(header.num_classes)]
    window = tuple(maps.window[0].tolist())
    return draw_labels(maps.cls[0, ..., 0], named[0, ..., 0], names, window)


def list_overlays(result: AuditResult) -> list[dict]:
    """Draw maps over some of the images that were compared."""
    store = result.store
    if store is None or not len(result.compared):
        return []
    # Rows are in pairs of neighbors, mostly of one class, so one of each pair is drawn.
    names, rows = store.header.class_names, result.compared[::2]
    places = sample_evenly(len(rows), NUM_OVERLAYS)
    return [
        {"path": store.image_path(row), "label": names[int(store.labels[row])]}
        | draw_row(result, row)
        for row in rows[places].tolist()
    ]


def list_disagreements(result: AuditResult) -> list[dict]:
    """List the images whose maps disagree most with their labels, with pictures if known."""
    items = []
    for item in result.figures.get("disagreements", [])[:NUM_DISAGREEMENTS]:
        # Without images the list has names and numbers only.
        known = result.images is not None and result.image_of[item["row"]] >= 0
        blank = {"image": "", "ratio": 1.0, "cells": [], "key": []}
        items.append(item | (draw_row(result, item["row"]) if known else blank))
    return items


command = make_command(main, AuditOptions, __doc__)


if __name__ == "__main__":
    command()

"""What an audit needs and gives: a reference model, findings on the terminal, and one
self-contained HTML page with JSON beside it.
"""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path

import jinja2
import numpy as np
import torch
from PIL import Image

from densefeed.relabel.audit import Audit, audit
from densefeed.relabel.reference_match import ORIENTATIONS, References
from densefeed.relabel.teacher import Teacher
from densefeed.storage.images import Images, decode
from densefeed.storage.row_codecs import cell_targets
from densefeed.system.devices import choose_device
from densefeed.system.errors import UserError
from densefeed.system.files import replace_file
from densefeed.tools.load_teacher import load_network

FOLDER = Path(__file__).parent
INKS = (
    "#56b4e9",
    "#e69f00",
    "#009e73",
    "#f0e442",
    "#d55e00",
    "#cc79a7",
    "#0072b2",
    "#b2df8a",
    "#ff7f7f",
    "#9e9ac8",
)
OVERLAID, DOUBTED = 12, 24  # pictures on the page: with 18 x 18 cells 0.8 MB in all
SHOWN = 224  # longer side of a picture, pixels
FEW_CLASSES = 30  # of more, the page names the best and the worst
# Checks without which the agreement with the labels says nothing of the teacher.
OF_LABELS = ("logits", "images", "class names", "class list", "labels", "rows")
ORDER = {"fault": "Fault", "warning": "Look at this", "unchecked": "Not checked", "sound": "Sound"}


# ------------------------------------------------------------------------------------------------ the reference


def references(
    name: str, model: str, input_size: int, class_names: Sequence[str], device: str = "auto"
) -> References:
    """A model, as tools/relabel_imagenet.py names teachers, that looks at whole images and at their
    center squares.

    UserError if it cannot be loaded, was trained on other classes, or does not take inputs of
    `input_size` pixels.
    """
    network = load_network(name, model, input_size)
    names = network.class_names
    if names and list(names) != list(class_names):
        raise UserError(
            f"{name} was trained on other classes than the maps have ({names[0]}, ... and {class_names[0]}, ...); choose another"
        )
    found = {
        geometry: Teacher(network.model, input_size, geometry, network.config, name=name).to(
            choose_device(device)
        )
        for geometry in ("squash", "center-crop")
    }
    teacher = found["squash"]
    try:
        example = torch.from_numpy(
            np.stack([teacher.prepare(Image.new("RGB", (input_size, input_size)))[0]])
        )
        teacher(example.to(teacher.mean.device))
    except (AssertionError, RuntimeError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{name} does not take images of {input_size} px ({said}); give the size it takes"
        ) from error
    return found


# ------------------------------------------------------------------------------------------------ what is said


def tell(result: Audit) -> None:
    """Print a line for each check, those that matter first."""
    for check in result.checks:
        print(
            f"{ORDER[check.verdict].lower():>12}  {check.name}: {check.evidence}"
            + (f". {check.remedy}" if check.remedy else "")
        )


def conclude(result: Audit, path: Path, see: str) -> None:
    """UserError, and so exit code 2, if a fault was found."""
    faults = result.faults()
    if faults:
        names = ", ".join(check.name for check in faults)
        raise UserError(
            f"{path}: the audit found {len(faults)} fault{'s' * (len(faults) > 1)} ({names}); {see}"
        )


def audit_store(
    path: Path,
    out: Path,
    data: Images | None,
    found: References | None,
    count: int,
    every_row: bool,
    threads: int,
    report: Path,
) -> None:
    """Audit a store, print what was found, and write the page to `out` and the numbers to
    `report`.
    """
    result = audit(path, data, found, count, every_row, threads)
    text = page(result)
    with replace_file(out) as part:
        part.write_text(text)
    with replace_file(report) as part:
        part.write_text(json.dumps(result.plain(), indent=1))
    tell(result)
    print(
        f"{out}: {out.stat().st_size / 1024:,.0f} KiB, open it in a browser; the numbers are in {report}"
    )
    conclude(result, path, f"{out} says what to do")


# ------------------------------------------------------------------------------------------------ the page


def page(result: Audit) -> str:
    """The HTML, self-contained."""
    # of an unfinished store nothing more is known
    figures = {"header": None, "looks": None, "classes": []} | result.figures
    classes = sorted(figures.get("classes", []), key=lambda c: (c["agree"], -c["images"]))
    few = len(classes) <= FEW_CLASSES
    parts = [("", classes)] if few else [("lowest", classes[:20]), ("highest", classes[-5:])]
    verdicts = {check.name: check.verdict for check in result.checks}
    at_fault = [name for name in OF_LABELS if verdicts.get(name) == "fault"]
    # At chance, the teacher may know nothing, or the maps be others'; a rows warning says that they
    # may be.
    labels_hold = (
        verdicts.get("labels") in ("sound", "warning") and verdicts.get("rows") != "warning"
    )
    return (
        environment()
        .get_template("audit.html")
        .render(
            at_fault=at_fault,
            labels_hold=labels_hold,
            checks=result.checks,
            words=ORDER,
            figures=figures,
            class_parts=parts,
            class_count=len(classes),
            agreement=histogram([100 * c["agree"] for c in classes], 0, 100, 20)
            if not few
            else None,
            entropy=bars(figures["entropy"]["histogram"], 0, figures["entropy"]["nats_most"])
            if figures.get("entropy")
            else None,
            palette=palette_bars(figures["palette"]) if figures.get("palette") else None,
            overlays=overlays(result),
            doubted=doubted(result),
            orientations=ORIENTATIONS,
        )
    )


def environment() -> jinja2.Environment:
    """Templates of this folder; a name that is not given is an error."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, undefined=jinja2.StrictUndefined
    )


def bars(counts: Sequence[int], low: float, high: float) -> dict:
    """A histogram for the page: heights in percent of the highest bar, its count, and the ends of
    the axis.
    """
    most = max([*counts, 1])
    return {
        "heights": [round(100 * n / most, 2) for n in counts],
        "most": most,
        "ticks": [f"{low + (high - low) * share:.3g}" for share in (0, 0.5, 1)],
    }


def histogram(values: Sequence[float], low: float, high: float, count: int) -> dict:
    """`bars` of values."""
    return bars(np.histogram(values, bins=count, range=(low, high))[0].tolist(), low, high)


def palette_bars(palette: dict) -> dict:
    """A bar for each of at most 24 ranges of palette sizes, from 0 on."""
    sizes = np.array(palette["sizes"])
    low, high = 0, int(sizes.max())
    count = min(24, high - low + 1)
    found = (
        np.histogram(sizes, bins=count, range=(low, high + 1), weights=palette["counts"])[0]
        .astype(int)
        .tolist()
    )
    return bars(found, low, high)


def picture(pixels: np.ndarray | Image.Image, kind: str = "PNG") -> str:
    """A data URL of the pixels: PNG, every one kept, or JPEG."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    buffer = io.BytesIO()
    image.save(buffer, kind, optimize=True, **({"quality": 82} if kind == "JPEG" else {}))
    return f"data:image/{kind.lower()};base64," + base64.b64encode(buffer.getvalue()).decode()


def shown(result: Audit, row: int) -> tuple[str, float]:
    """The image of a row, small, as a data URL, and its width over its height; UserError if it
    cannot be read.
    """
    index = int(result.image_of[row])
    image = decode(result.images.read(index), result.images.where(index))
    ratio = image.width / image.height
    image.thumbnail((SHOWN, SHOWN))
    if max(image.size) < SHOWN // 2:  # enlarged by the browser they would look like fog
        image = image.resize((image.width * 2, image.height * 2), Image.Resampling.NEAREST)
    return picture(image, "JPEG"), ratio


def cells_of(result: Audit, row: int) -> tuple[list[dict], list[dict]]:
    """Rectangles of a map, placed in its image (0 to 1), and its greatest classes with their
    inks.
    """
    store = result.store
    header, maps = store.header, store.rows(np.array([row]))
    named, _ = cell_targets(maps, header.num_classes, header.absent)
    best_SS, p_SS = maps.cls[0, ..., 0], named[0, ..., 0]
    mass = np.bincount(best_SS.reshape(-1), p_SS.reshape(-1) ** 2)
    ranked = [int(c) for c in np.argsort(-mass, kind="stable") if mass[c] > 0]
    ink = {c: INKS[at % len(INKS)] for at, c in enumerate(ranked)}
    top, left, bottom, right = maps.window[0].tolist()
    wide, high = (right - left) / header.side, (bottom - top) / header.side
    cells = [
        {
            "x": round(left + x * wide, 4),
            "y": round(top + y * high, 4),
            "w": round(wide, 4),
            "h": round(high, 4),
            "ink": ink[int(best_SS[y, x])],
            "opacity": round(0.62 * float(p_SS[y, x]) ** 2, 2),
        }
        for y in range(header.side)
        for x in range(header.side)
        if p_SS[y, x] > 0.2
    ]
    names = header.class_names
    key = [
        {"name": names[c] if c < len(names) else f"class {c}", "ink": ink[c]}
        for c in ranked[:4]
        if mass[c] > 0.02 * mass.sum()
    ]
    return cells, key


def overlays(result: Audit) -> list[dict]:
    """Some of the images that were looked at, with their maps over them."""
    if result.store is None or result.images is None or not len(result.looked):
        return []
    chosen = result.looked[::2]
    chosen = chosen[np.linspace(0, len(chosen) - 1, min(OVERLAID, len(chosen))).astype(int)]
    items = []
    for row in chosen.tolist():
        source, ratio = shown(result, row)
        cells, key = cells_of(result, row)
        names, label = result.store.header.class_names, int(result.store.labels[row])
        items.append(
            {
                "image": source,
                "ratio": round(ratio, 4),
                "cells": cells,
                "key": key,
                "path": result.store.path_of(row),
                "label": names[label],
            }
        )
    return items


def doubted(result: Audit) -> list[dict]:
    """The images whose label the maps doubt most, with pictures where images are given."""
    items = []
    for item in result.figures.get("disagreements", [])[:DOUBTED]:
        there = result.images is not None and result.image_of[item["row"]] >= 0
        source, ratio = shown(result, item["row"]) if there else ("", 1.0)
        cells, key = cells_of(result, item["row"]) if there else ([], [])
        items.append(item | {"image": source, "ratio": round(ratio, 4), "cells": cells, "key": key})
    return items

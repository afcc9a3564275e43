"""Parts of composed scenes: photographs that come with packages, windows of them, true boxes.

A file of true boxes (BOXES) is JSON: the `size` of all scenes as [width, height] in pixels, their
`seed`, and `scenes`: for the path of each image the list of its objects. The first object is the
label's and the largest. An object has a `class`, which is a name, and a `box`: [left, top, right,
bottom] in pixels. `license`, if it is there, is that of the pictures.
"""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.random import Generator
from PIL import Image

from densefeed.storage.images import decode
from densefeed.system.commands import PACKAGE
from densefeed.system.errors import UserError, first_line, install_extra

BOXES = "boxes.json"
# Folder of masks beside it: `masks/<path of the image>.png`, 0 for the background and i + 1 for the
# i-th object.
MASKS = "masks"
# Splits of photo scenes.
TRAIN, VAL, HELD_OUT = SPLITS = "train", "val", "held-out"
# Cut-outs of photo scenes in Debian's package: file, class (empty: held out) and group of each.
CUTOUTS = PACKAGE / "recipes/photo_cutouts.csv"


def list_cutouts() -> list[dict[str, str]]:
    """Return file, class and group of each cut-out of the packages."""
    with open(CUTOUTS, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def count_classes() -> tuple[int, int]:
    """Return the numbers of classes and of held-out groups of the packages' cut-outs."""
    rows = list_cutouts()
    classes = {row["class"] for row in rows} - {""}
    return len(classes), len({row["group"] for row in rows if not row["class"]})


def check_counts(counts: dict[str, int], classes: int, groups: int) -> None:
    """Raise UserError if the scenes of a split are fewer than its classes, or `groups`."""
    for split, count in counts.items():
        labels = groups if split == HELD_OUT else classes
        if count < labels:
            raise UserError(
                f"--{split} {count} leaves some of the {labels} classes of this split without a "
                f"scene; give at least {labels}"
            )


def load_photographs(names: Sequence[str]) -> list[Image.Image]:
    """Return photographs that come with scikit-image and scikit-learn, RGB.

    UserError if a package or a photograph is missing.
    """
    # These packages are the optional group `demo`.
    try:
        import skimage.data
        import sklearn.datasets
    except ImportError as error:
        raise UserError(
            f"the scenes need scikit-image and scikit-learn ({first_line(error)}); "
            f"{install_extra('demo')}"
        ) from error
    folders = Path(skimage.data.__file__).parent, Path(sklearn.datasets.__file__).parent / "images"
    found = []
    for name in names:
        paths = [path for folder in folders for path in sorted(folder.glob(f"{name}.*"))]
        paths = [path for path in paths if path.suffix in (".png", ".jpg")]
        if not paths:
            raise UserError(
                f"scikit-image and scikit-learn have no photograph {name!r}; install other "
                "versions of them"
            )
        found += [decode(path.read_bytes(), str(path)) for path in paths]
    return found


def cut_window(
    rng: Generator,
    photographs: Sequence[Image.Image],
    size: tuple[int, int],
    shares: tuple[float, float],
) -> np.ndarray:
    """Return a random window of a random photograph, float32 `[height, width, 3]`, 0 to 255.

    `size` is (width, height). The height of the window is drawn between two `shares` of the
    greatest that the photograph has room for.
    """
    width, height = size
    photograph = photographs[rng.integers(len(photographs))]
    tallest = min(photograph.height, photograph.width * height / width)
    rows = max(1, int(rng.uniform(*shares) * tallest))
    sides = max(1, round(rows * width / height)), rows
    left, top = (
        int(rng.integers(0, extent - side + 1))
        for extent, side in zip(photograph.size, sides, strict=True)
    )
    box = left, top, left + sides[0], top + sides[1]
    return np.array(photograph.resize(size, Image.Resampling.BILINEAR, box=box), np.float32)


def encode_scene(canvas: np.ndarray) -> bytes:
    """Encode a canvas `[height, width, 3]`, 0 to 255, as a JPEG of quality 90."""
    buffer = io.BytesIO()
    Image.fromarray(canvas.round().clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def write_boxes(
    folder: Path, size: tuple[int, int], seed: int, scenes: dict[str, list[dict]], license: str = ""
) -> None:
    """Write the file of true boxes of the scenes in a folder."""
    document = {"size": size, "seed": seed, "scenes": scenes}
    document |= {"license": license} if license else {}
    (folder / BOXES).write_text(json.dumps(document))

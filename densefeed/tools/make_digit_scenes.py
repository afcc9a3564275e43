"""Make a folder of digit scenes: real digits on real photographs, several per image.

    densefeed scenes --out scenes

It writes `scenes/train/<digit>/*.jpg`, `scenes/val/<digit>/*.jpg` and `scenes/boxes.json`, and has
ImageNet's multi-object problem at small scale. A scene has one large handwritten digit and a few
small ones of other classes. The large one is the label, so the image label is wrong for many crops,
while a label with a location is not. The digits are those of scikit-learn (1,797 scans of 8x8
pixels, UCI), split by scan: no scan of the validation set occurs in training. The photographs ship
with scikit-image and scikit-learn. The boxes are for judging labels, never for training.
"""

if not __package__:
    import script_start  # noqa: F401

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.random import Generator, default_rng
from PIL import Image

from densefeed.storage.scenes import BOXES, cut_window, encode_scene, load_photographs, write_boxes
from densefeed.system.errors import UserError, first_line, install_extra, make_command
from densefeed.system.files import create_folder
from densefeed.system.options import Bounds, NonNegativeInt, Options
from densefeed.system.progress import bar
from densefeed.system.terminal import print

PHOTOGRAPHS = (
    *("astronaut", "brick", "chelsea", "coffee"),
    *("grass", "gravel", "motorcycle_left", "rocket", "china", "flower"),
)
# Every fourth scan of each class is for validation only.
VAL_SHARE = 4
# Least opacity of the pixels that a digit's box encloses.
INK = 0.35


@dataclass(frozen=True, kw_only=True)
class Scenes(Options):
    """The scenes to make."""

    out: Path  # folder to make; must not exist yet
    train: Annotated[int, Bounds(10)] = 3000  # training scenes
    val: Annotated[int, Bounds(10)] = 1000  # validation scenes
    size: Annotated[int, Bounds(48)] = 96  # side of a scene, pixels
    seed: NonNegativeInt = 0  # the same seed gives the same bytes


def main(scenes: Scenes) -> None:
    """Write the folder under a temporary name and rename it when it is complete."""
    with create_folder(scenes.out) as part:
        boxes = write_scenes(scenes, part)
        write_boxes(part, (scenes.size, scenes.size), scenes.seed, boxes)
    print(
        f"{scenes.out}: {scenes.train} training and {scenes.val} validation scenes of "
        f"{scenes.size} px, boxes in {BOXES}"
    )


def write_scenes(scenes: Scenes, folder: Path) -> dict[str, list[dict]]:
    """Write the images; return the digits of each, by its path in the folder."""
    photographs, scans = load_photographs(PHOTOGRAPHS), load_scans()
    boxes = {}
    for split, count in (("train", scenes.train), ("val", scenes.val)):
        for label in range(10):
            (folder / split / str(label)).mkdir(parents=True)
        for number in bar(range(count), f"{split} scenes"):
            # A generator for each scene: it is the same whatever the number of scenes.
            rng = default_rng([scenes.seed, split == "val", number])
            label = number % 10
            jpeg, digits = scene(rng, label, scenes.size, photographs, scans[split])
            name = f"{split}/{label}/{number:06d}.jpg"
            (folder / name).write_bytes(jpeg)
            boxes[name] = digits
    return boxes


def load_scans() -> dict[str, list[np.ndarray]]:
    """Return the scans of each split, by class: opacity in [0, 1], `[n, 8, 8]`."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError(
            f"the scenes need scikit-learn ({first_line(error)}); {install_extra('demo')}"
        ) from error

    digits = load_digits()
    # The scans have 17 levels, 0 to 16.
    by_class = [digits.images[digits.target == label] / 16.0 for label in range(10)]
    return {
        "train": [np.delete(scans, np.s_[::VAL_SHARE], axis=0) for scans in by_class],
        "val": [scans[::VAL_SHARE] for scans in by_class],
    }


def scene(
    rng: Generator, label: int, size: int, photographs: list, scans: list
) -> tuple[bytes, list[dict]]:
    """Compose one scene; return its JPEG and its digits, the largest first.

    Each digit has its class and the box of its ink (left, top, right, bottom) in pixels.
    """
    canvas, digits, places = background(rng, size, photographs), [], []
    sides = [rng.uniform(0.46, 0.62)] + [rng.uniform(0.24, 0.30) for _ in range(rng.integers(1, 4))]
    for number, side in enumerate(round(size * share) for share in sides):
        digit = label if number == 0 else int(rng.choice([c for c in range(10) if c != label]))
        place = free_place(rng, size, side, places)
        if place is None:
            # The scene is full, so it has one small digit fewer.
            continue
        scan = scans[digit][rng.integers(len(scans[digit]))]
        digits.append({"class": str(digit), "box": draw(rng, canvas, scan, *place, side)})
        places.append((*place, side))
    return encode_scene(canvas), digits


def draw(
    rng: Generator, canvas: np.ndarray, scan: np.ndarray, left: int, top: int, side: int
) -> list[int]:
    """Draw a scan on the canvas in a random light color; return the box of its ink, pixels."""
    image = Image.fromarray((scan * 255).astype(np.uint8))
    resized = image.resize((side, side), Image.Resampling.BICUBIC)
    opacity = np.asarray(resized, np.float32)[..., None] / 255
    ink = rng.uniform(190, 255, 3).astype(np.float32)
    patch = canvas[top : top + side, left : left + side]
    patch += opacity * (ink - patch)
    rows, columns = np.nonzero(opacity[..., 0] > INK)
    corners = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    return [int(at + offset) for at, offset in zip(corners, (left, top) * 2, strict=True)]


def background(rng: Generator, size: int, photographs: list) -> np.ndarray:
    """Return a random piece of a photograph, float32 `[size, size, 3]`.

    It is darkened, so that light ink stays readable.
    """
    piece = cut_window(rng, photographs, (size, size), (0.25, 0.9))
    return piece * rng.uniform(0.3, 0.5)


def free_place(
    rng: Generator, size: int, side: int, taken: list[tuple[int, int, int]]
) -> tuple[int, int] | None:
    """Draw the (left, top) of a square that overlaps none of the squares `taken`.

    Those are (left, top, side). Returns None after 50 tries.
    """
    for _ in range(50):
        left, top = rng.integers(0, size - side + 1, 2).tolist()
        if all(
            left + side <= x or x + s <= left or top + side <= y or y + s <= top
            for x, y, s in taken
        ):
            return left, top
    return None


command = make_command(main, Scenes, __doc__)


if __name__ == "__main__":
    command()

"""Real digits over real photographs: an ordinary ImageFolder that shows ImageNet's multi-object
problem in small.

    python tools/make_digit_scenes.py --out scenes

writes `scenes/train/<digit>/*.jpg`, `scenes/val/<digit>/*.jpg` and `scenes/boxes.json`. A scene
holds one large handwritten digit and some small ones of other classes; its label is the large one,
so the image-level label is wrong for many crops while a located label is not. Digits are
scikit-learn's (1,797 scans of 8x8 pixels, UCI), split by source digit: no scan of the validation
set was ever seen in training. Photographs are those that scikit-image and scikit-learn carry. The
boxes serve to judge labels, never to train.
"""

import io
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from PIL import Image

from densefeed.system.errors import UserError, run
from densefeed.system.files import name_errors
from densefeed.system.progress import bar

PHOTOGRAPHS = (
    "astronaut",
    "brick",
    "chelsea",
    "coffee",
    "grass",
    "gravel",
    "motorcycle_left",
    "rocket",
)
VAL_SHARE = 4  # every fourth scan of each class is for validation only
INK = 0.35  # opacity from which a pixel counts as ink when a digit's box is measured


@dataclass(frozen=True, kw_only=True)
class Scenes:
    """What to make."""

    out: Path  # folder to make; must not exist yet
    train: int = 3000  # training scenes
    val: int = 1000  # validation scenes
    size: int = 96  # side of a scene, pixels
    seed: int = 0  # the same seed gives the same bytes


def main(scenes: Scenes) -> None:
    """Write the folder under a temporary name and rename it when it is whole."""
    if scenes.out.exists():
        raise UserError(f"{scenes.out} exists already; remove it or choose another --out")
    if scenes.train < 10 or scenes.val < 10 or scenes.size < 48:
        raise UserError(
            "scenes need --train and --val of 10 or more (one a class) and --size of 48 pixels or more"
        )
    photographs, scans = load_photographs(), load_scans()
    part = scenes.out.with_name(f"{scenes.out.name}.{os.getpid()}.part")
    boxes = {}
    try:
        for split, count in (("train", scenes.train), ("val", scenes.val)):
            for label in range(10):
                (part / split / str(label)).mkdir(parents=True)
            for number in bar(range(count), f"{split} scenes"):
                rng = np.random.default_rng([scenes.seed, split == "val", number])
                label = number % 10
                jpeg, digits = scene(rng, label, scenes.size, photographs, scans[split])
                name = f"{split}/{label}/{number:06d}.jpg"
                with name_errors(scenes.out):
                    (part / name).write_bytes(jpeg)
                boxes[name] = digits
        (part / "boxes.json").write_text(
            json.dumps({"size": scenes.size, "seed": scenes.seed, "scenes": boxes})
        )
        part.rename(scenes.out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    print(
        f"{scenes.out}: {scenes.train} training and {scenes.val} validation scenes of {scenes.size} px, boxes in boxes.json"
    )


def load_photographs() -> list[Image.Image]:
    """The photographs, RGB."""
    import skimage.data
    from sklearn.datasets import load_sample_images

    folder = Path(skimage.data.__file__).parent
    found = [
        path
        for name in PHOTOGRAPHS
        for path in sorted(folder.glob(f"{name}.*"))
        if path.suffix in (".png", ".jpg")
    ]
    return [Image.open(path).convert("RGB") for path in found] + [
        Image.fromarray(a) for a in load_sample_images().images
    ]


def load_scans() -> dict[str, list[np.ndarray]]:
    """Per split and class, the scans as opacity in [0, 1], `[n, 8, 8]`."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    by_class = [digits.images[digits.target == label] / 16.0 for label in range(10)]
    return {
        "train": [np.delete(scans, np.s_[::VAL_SHARE], axis=0) for scans in by_class],
        "val": [scans[::VAL_SHARE] for scans in by_class],
    }


def scene(
    rng: np.random.Generator, label: int, size: int, photographs: list, scans: list
) -> tuple[bytes, list[dict]]:
    """One scene: JPEG bytes, and of each digit its class and its box of ink (left, top, right,
    bottom) in pixels, largest first.
    """
    canvas = background(rng, size, photographs)
    digits = []
    sides = [rng.uniform(0.46, 0.62)] + [rng.uniform(0.24, 0.30) for _ in range(rng.integers(1, 4))]
    for number, side in enumerate(round(size * share) for share in sides):
        digit = label if number == 0 else int(rng.choice([c for c in range(10) if c != label]))
        place = free_place(rng, size, side, [d["place"] for d in digits])
        if place is None:
            continue  # the scene is full: one small digit fewer
        left, top = place
        scan = scans[digit][rng.integers(len(scans[digit]))]
        resized = Image.fromarray((scan * 255).astype(np.uint8)).resize(
            (side, side), Image.Resampling.BICUBIC
        )
        opacity = np.asarray(resized, np.float32)[..., None] / 255
        ink = rng.uniform(190, 255, 3).astype(np.float32)
        patch = canvas[top : top + side, left : left + side]
        patch += opacity * (ink - patch)
        rows, columns = np.nonzero(opacity[..., 0] > INK)
        box = [
            left + columns.min(),
            top + rows.min(),
            left + columns.max() + 1,
            top + rows.max() + 1,
        ]
        digits.append({"digit": digit, "box": [int(v) for v in box], "place": (left, top, side)})
    buffer = io.BytesIO()
    Image.fromarray(canvas.round().clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue(), [{"digit": d["digit"], "box": d["box"]} for d in digits]


def background(rng: np.random.Generator, size: int, photographs: list) -> np.ndarray:
    """A darkened random piece of a photograph, float32 `[size, size, 3]`, so that light ink stays
    readable.
    """
    photograph = photographs[rng.integers(len(photographs))]
    side = int(rng.uniform(0.25, 0.9) * min(photograph.size))
    left, top = (int(rng.integers(0, extent - side + 1)) for extent in photograph.size)
    piece = photograph.resize(
        (size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side)
    )
    return np.array(piece, np.float32) * rng.uniform(0.3, 0.5)


def free_place(
    rng: np.random.Generator, size: int, side: int, taken: list[tuple]
) -> tuple[int, int] | None:
    """Left and top of a square that touches none of the squares `taken` (left, top, side), or None
    after 50 tries.
    """
    for _ in range(50):
        left, top = (int(v) for v in rng.integers(0, size - side + 1, 2))
        if all(
            left + side <= x or x + s <= left or top + side <= y or y + s <= top
            for x, y, s in taken
        ):
            return left, top
    return None


if __name__ == "__main__":
    run(lambda: main(tyro.cli(Scenes, description=__doc__)))

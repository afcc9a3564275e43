"""True objects of scenes, from their file of boxes (storage/scenes.py)."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageColor

from densefeed.pages.templates import INKS
from densefeed.storage.images import Images, explain, open_image
from densefeed.storage.scenes import MASKS
from densefeed.system.errors import UserError
from densefeed.system.files import open_regular
from densefeed.system.json_files import is_number, read_json

# Bytes of a file of true boxes: 80,000 scenes.
LARGEST_BOXES = 2**24


class Truth(NamedTuple):
    """True objects of one image, the label's first."""

    classes: np.ndarray  # [n]
    boxes_ltrb: np.ndarray  # [n, 4], normalized
    mask: Path | None = None  # a PNG: 0 for the background, i + 1 for object i
    size: tuple[int, int] = (0, 0)  # width and height of the mask, pixels


def read_mask(truth: Truth) -> np.ndarray:
    """Read the mask of a scene, uint8 `[H, W]`. Raises UserError if it is missing or damaged."""
    remedy = "make the scenes again"
    try:
        with open_regular(truth.mask) as file, open_image(file) as image:
            mask_HW = np.asarray(image)
    except MemoryError:
        raise
    # Pillow does not limit the types of its exceptions.
    except Exception as error:
        raise UserError(f"{truth.mask} cannot be read ({explain(error)}); {remedy}") from error
    fits = mask_HW.shape[::-1] == truth.size and mask_HW.dtype == np.uint8
    if not fits or mask_HW.max() > len(truth.classes):
        raise UserError(f"{truth.mask} is not the mask of this scene; {remedy}")
    return mask_HW


def draw_objects(
    image: Image.Image, truth: Truth, names: Sequence[str]
) -> tuple[Image.Image, list]:
    """Color the objects of a whole image by its mask; return the picture and a key of the colors.

    Raises UserError as `read_mask`.
    """
    # The picture may be smaller than the scene: packing can shrink it.
    mask = Image.fromarray(read_mask(truth)).resize(image.size, Image.Resampling.NEAREST)
    inks = [INKS[n % len(INKS)] for n in range(len(truth.classes))]
    color = np.array([(0, 0, 0), *map(ImageColor.getrgb, inks)], np.float32)[np.asarray(mask)]
    # The background is dark, but can be recognized.
    drawn = 0.4 * np.asarray(image, np.float32) + 0.6 * color
    key = [{"name": names[c], "ink": ink} for c, ink in zip(truth.classes, inks, strict=True)]
    return Image.fromarray(drawn.astype(np.uint8)), key


def read_license(path: Path) -> str:
    """Return the license of the pictures that a file of boxes states, or an empty string."""
    try:
        license = read_json(path, "", largest=LARGEST_BOXES).get("license", "")
    # None, or a file of another kind with this name.
    except (OSError, UserError):
        return ""
    return license if isinstance(license, str) else ""


def read_objects(path: Path, images: Images, split: str) -> Iterator[Truth]:
    """Yield the true objects of the images of a split, in their order, from a file of boxes."""
    document = read_json(path, "make the scenes again", largest=LARGEST_BOXES)
    scenes, size = document.get("scenes"), document.get("size")
    names = {name: number for number, name in enumerate(images.class_names)}
    # densefeed photo-scenes writes them, densefeed scenes does not.
    masks = path.parent / MASKS if (path.parent / MASKS).is_dir() else None
    for name in images.paths:
        truth = parse_truth(scenes, size, f"{split}/{name}", names, path)
        yield truth._replace(
            mask=masks and (masks / split / name).with_suffix(".png"), size=tuple(size)
        )


def parse_truth(
    scenes: object, size: object, name: str, classes: dict[str, int], path: Path
) -> Truth:
    """Return the objects of a scene of a file `path` of true boxes. UserError if it has none."""
    objects = scenes.get(name) if isinstance(scenes, dict) else None
    # An image has the class of one of its objects.
    good = isinstance(objects, list) and objects and is_size(size)
    if not good or not all(is_object(item, size, classes) for item in objects):
        raise UserError(f"{path} is damaged (the objects of {name}); make the scenes again")
    numbers = np.array([classes[item["class"]] for item in objects], np.int64)
    boxes = np.array([item["box"] for item in objects], float).reshape(-1, 4)
    return Truth(numbers, boxes / np.tile(size, 2))


def is_size(size: object) -> bool:
    """Whether a value of a file of boxes is the size of its scenes, [width, height]."""
    return isinstance(size, list) and len(size) == 2 and all(map(is_number, size))


def is_object(item: object, size: list[float], classes: dict[str, int]) -> bool:
    """Whether an item of a scene has a class of the data, and a box within the scene's `size`."""
    box = item.get("box") if isinstance(item, dict) else None
    whole = isinstance(box, list) and len(box) == 4 and all(map(is_number, box))
    name = item.get("class") if whole else None
    if not isinstance(name, str) or name not in classes:
        return False
    left, top, right, bottom = box
    return 0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]


def boxes_in_crop(boxes_ltrb_n4: np.ndarray, view: np.ndarray) -> np.ndarray:
    """Map boxes of the image into the crop; normalized, `[n, 4]`.

    The view is inverted; the result is the box around the four corners.
    """
    back = np.linalg.inv(np.vstack([view, [0, 0, 1]]))[:2]
    corners = boxes_ltrb_n4[:, [[0, 1], [2, 1], [2, 3], [0, 3]]] @ back[:, :2].T + back[:, 2]
    return np.concatenate([corners.min(1), corners.max(1)], axis=1)


def make_objects(truth: Truth, view: np.ndarray, grid: int, names: Sequence[str]) -> list[dict]:
    """Return the rectangles of the objects that a crop shows, in units of tokens."""
    # A box outside the crop becomes empty by this, and is left out below.
    boxes = boxes_in_crop(truth.boxes_ltrb, view).clip(0, 1)
    return [
        {
            "x": left * grid,
            "y": top * grid,
            "w": (right - left) * grid,
            "h": (bottom - top) * grid,
            "name": names[c],
            "ink": INKS[c % len(INKS)],
        }
        for c, (left, top, right, bottom) in zip(truth.classes, boxes, strict=True)
        if right > left and bottom > top
    ]

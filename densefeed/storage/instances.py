"""Read images with objects: COCO's annotation files, and photo scenes.

The objects of an image are one map of its pixels, which crops, flips and warps move as a mask:
pixels of an object have its code, class * OBJECTS + number of the object in its image, others -1.
Where objects overlap the smaller one is whole, as larger ones are painted before it. COCO's crowd
regions are not painted, so a pixel of them is background in training; an evaluation ignores them.

    --dataset coco/FILE          images below --data, or below the folder that the end of the file's
                                 name names (instances_train2017.json: train2017)
    --dataset instances          photo scenes: masks that number their objects, beside boxes.json
"""

import os
from collections.abc import Hashable
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from densefeed.storage import images
from densefeed.storage.datasets import register_dataset
from densefeed.storage.listed import Listed
from densefeed.storage.mask_folder import UNLABELED, MaskFolder, list_masked
from densefeed.system.errors import UserError, install_extra
from densefeed.system.json_files import is_number, read_json

# K classes   H, W pixels

# Objects of an image, at most; an int32 holds codes of half as many classes.
OBJECTS = 2**16
MOST_CLASSES = 2**15
# Bytes of an annotation file: COCO's has 470 MB.
LARGEST = 2**30
REMEDY = "correct it, or copy it again"


def import_masks() -> Any:
    """Import pycocotools.mask; UserError if it is missing."""
    try:
        from pycocotools import mask
    except ImportError as error:
        raise UserError(
            f"detection needs the package pycocotools; {install_extra('detect')}"
        ) from error
    return mask


def read_counts(text: str) -> list[int]:
    """Return the lengths of runs that pycocotools wrote as a string."""
    counts, value, shift = [], 0, 0
    for character in text.encode():
        bits = character - 48
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (1 << shift) if bits & 16 else 0
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value, shift = 0, 0
    return counts


def make_objects(map_HW: Tensor) -> list[dict[str, Any]]:
    """Return the objects of a map of codes as annotations, see `CocoInstances.objects`."""
    masks, found = import_masks(), []
    for code in map_HW[map_HW >= 0].unique().tolist():
        rle = masks.encode(np.asfortranarray((map_HW == code).numpy(), np.uint8))
        found.append(describe_object(code // OBJECTS, rle))
    return found


def describe_object(category: int, rle: dict, **stated: Any) -> dict[str, Any]:
    """Return an annotation; what the file does not state is that of the mask."""
    masks = import_masks()
    own = {"area": float(masks.area(rle)), "bbox": masks.toBbox(rle).tolist(), "iscrowd": 0}
    return own | stated | {"category_id": category, "segmentation": rle}


class SceneInstances(MaskFolder):
    """Photo scenes, whose masks number their objects: maps of codes, without a background class."""

    instances = True

    def __init__(self, root: str | Path, split: str = "train") -> None:
        super().__init__(root, split)
        if self._objects is None:
            raise UserError(
                f"{root} has masks without objects; give photo scenes, whose boxes.json lists them,"
                " or --dataset coco/FILE"
            )
        for image, path in zip(self.images, self.masks, strict=True):
            if path is None:
                raise UserError(f"{image} has no mask, so its objects are not known; remove it")
        self.classes = self.classes[1:]
        self._objects = [
            [UNLABELED, *((k - 1) * OBJECTS + n for n, k in enumerate(found[1:]))]
            for found in self._objects
        ]

    def objects(self, index: int) -> list[dict[str, Any]]:
        """Return the objects of an image, see `CocoInstances.objects`."""
        return make_objects(self.mask(index))


class CocoInstances:
    """The images and objects of an annotation file of COCO, in its order.

    Classes are the categories by their ids, numbered from 0. Images without objects are kept.

    Attributes:
        classes: the K names.
        images, masks: paths of the images.

    Raises UserError for a file that is damaged, and for one that names an image that is not there.
    """

    instances = True

    def __init__(self, root: Path, file: Path) -> None:
        self.file = file
        content = read_json(file, REMEDY, largest=LARGEST)
        for part in ("images", "annotations", "categories"):
            records = content.get(part)
            if not isinstance(records, list) or not all(isinstance(r, dict) for r in records):
                self._refuse(f"it has no list {part} of objects")
        names = self._by_id(content["categories"], "category", int)
        self.classes = [self._take(names[key], "name", str, "a category") for key in sorted(names)]
        if not 0 < len(set(self.classes)) == len(self.classes) <= MOST_CLASSES:
            self._refuse(f"its categories are not 1 to {MOST_CLASSES:,} of different names")
        self._numbers = {key: number for number, key in enumerate(sorted(names))}
        listed = self._by_id(content["images"], "image", int | str)
        self._sizes = [self._read_size(record) for record in listed.values()]
        paths = [self._take(record, "file_name", str, "an image") for record in listed.values()]
        home = self._find_home(root, paths)
        self.images = self.masks = [home / path for path in paths]
        self._found = [[] for _ in listed]
        rows = {key: row for row, key in enumerate(listed)}
        if not content["annotations"]:
            raise UserError(f"{file} lists no objects; give a file with annotations")
        for number, record in enumerate(content["annotations"]):
            self._add(f"annotations[{number}]", record, rows)

    def _refuse(self, why: str) -> NoReturn:
        raise UserError(f"{self.file} is damaged ({why}); {REMEDY}")

    def _take(self, record: dict, name: str, kind: Any, what: str) -> Any:
        """Return a field of a record. UserError if it is missing or of another type."""
        value = record.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            self._refuse(f"{what} has no valid {name}")
        return value

    def _by_id(self, records: list[dict], what: str, kind: Any) -> dict[Hashable, dict]:
        found = {
            self._take(record, "id", kind, f"a record of {what}"): record for record in records
        }
        if len(found) < len(records):
            self._refuse(f"an id of {what} is there twice")
        return found

    def _read_size(self, record: dict) -> tuple[int, int]:
        """Return height and width of an image, pixels."""
        H, W = (self._take(record, name, int, "an image") for name in ("height", "width"))
        if min(H, W) < 1 or images.max_pixels < H * W:
            self._refuse(f"an image has {W} x {H} pixels")
        return H, W

    def _find_home(self, root: Path, paths: list[str]) -> Path:
        """Return the folder below which all images are."""
        for path in paths:
            pure = PurePosixPath(path)
            if not path or "\0" in path or pure.is_absolute() or ".." in pure.parts:
                self._refuse(f"{path[:100]!r} is not a path below the folder of images")
        home, split = root, root / self.file.stem.rpartition("_")[2]
        if paths and not (root / paths[0]).is_file() and (split / paths[0]).is_file():
            home = split
        # Each folder is listed once: a stat of every file of a network disk takes minutes.
        there: dict[str, set[str]] = {}
        for path in paths:
            folder, name = os.path.split(path)
            if folder not in there:
                place = home / folder
                there[folder] = set(os.listdir(place)) if place.is_dir() else set()
            if name not in there[folder]:
                raise UserError(
                    f"{self.file} names {path}, which is not below {root}; check --data, or remove "
                    "the image from the file"
                )
        return home

    def _add(self, name: str, record: dict, rows: dict[Hashable, int]) -> None:
        """Check an annotation, which messages call `name`, and keep what is needed of it."""
        image = self._take(record, "image_id", int | str, name)
        if image not in rows:
            self._refuse(f"{name} is of the image {str(image)[:20]}, which it does not list")
        key = self._take(record, "category_id", int, name)
        if key not in self._numbers:
            self._refuse(f"{name} has the category {key}, which it does not list")
        row = rows[image]
        if len(self._found[row]) == OBJECTS:
            self._refuse(f"an image has more than {OBJECTS:,} objects")
        stated = {"iscrowd": int(record.get("iscrowd") in (1, True))}
        area, box = record.get("area"), record.get("bbox")
        stated |= {"area": float(area)} if is_number(area) else {}
        if isinstance(box, list) and len(box) == 4 and all(map(is_number, box)):
            stated["bbox"] = [float(value) for value in box]
        shape = self._read_shape(name, record.get("segmentation"), row)
        self._found[row].append((self._numbers[key], shape, stated))

    def _read_shape(self, name: str, shape: Any, row: int) -> Any:
        """Return polygons as arrays, or runs as pycocotools reads them."""
        H, W = self._sizes[row]
        if isinstance(shape, dict):
            counts = shape.get("counts")
            counts = read_counts(counts) if isinstance(counts, str) else counts
            whole = isinstance(counts, list) and all(type(n) is int and n >= 0 for n in counts)
            # pycocotools would leave pixels beyond the runs as the memory was.
            if shape.get("size") != [H, W] or not whole or sum(counts) != H * W:
                self._refuse(f"{name} has runs that are not those of {W} x {H} pixels")
            return np.array(counts, np.uint32)
        if not isinstance(shape, list) or not shape:
            self._refuse(f"{name} has no segmentation")
        polygons = []
        for one in shape:
            valid = isinstance(one, list) and len(one) >= 6 and not len(one) % 2
            if not valid or not all(map(is_number, one)):
                self._refuse(f"{name} has a polygon that is not 3 or more pairs of numbers")
            # Work and memory of painting grow with the extent.
            points = np.array(one, np.float64).reshape(-1, 2)
            polygons.append(points.clip(-max(H, W), 2 * max(H, W)).ravel())
        return polygons

    def __len__(self) -> int:
        """Number of images."""
        return len(self.images)

    def _encode(self, shape: Any, row: int) -> dict:
        """Return the mask of an object as pycocotools' runs."""
        masks, (H, W) = import_masks(), self._sizes[row]
        if isinstance(shape, np.ndarray):
            return masks.frPyObjects({"size": [H, W], "counts": shape.tolist()}, H, W)
        return masks.merge(masks.frPyObjects([polygon.tolist() for polygon in shape], H, W))

    def objects(self, index: int) -> list[dict[str, Any]]:
        """Return the objects of an image, crowd regions too, as annotations of COCO.

        They have `category_id` (the class), `segmentation` (runs), `bbox`, `area` and `iscrowd`.
        """
        return [
            describe_object(k, self._encode(shape, index), **stated)
            for k, shape, stated in self._found[index]
        ]

    def mask(self, index: int) -> Tensor:
        """Return the map of codes of an image, int64 `[H, W]`."""
        masks = import_masks()
        map_HW = np.full(self._sizes[index], UNLABELED, np.int64)
        shapes = [
            (k * OBJECTS + number, self._encode(shape, index))
            for number, (k, shape, stated) in enumerate(self._found[index])
            if not stated["iscrowd"]
        ]
        for code, rle in sorted(shapes, key=lambda pair: -int(masks.area(pair[1]))):
            map_HW[masks.decode(rle) > 0] = code
        return torch.from_numpy(map_HW)

    def check_size(self, index: int, mask: Tensor, height: int, width: int) -> None:
        """Raise UserError if an image has another size than the file states."""
        if self._sizes[index] != (height, width):
            H, W = self._sizes[index]
            raise UserError(
                f"{self.images[index]} has {width} x {height} pixels, and {self.file} states "
                f"{W} x {H}; give the image of this file"
            )


def read_coco(root: Path, name: str, split: str) -> Listed:
    """Find the images of `--dataset coco/FILE`. The file is the split."""
    if not name:
        raise UserError(
            "--dataset coco names no file; give coco/FILE, as coco/instances_train2017.json"
        )
    return list_masked(Path(root), CocoInstances(Path(root), Path(name)))


def read_scenes(root: Path, name: str, split: str) -> Listed:
    """Find the images of `--dataset instances`."""
    if name:
        raise UserError(f"--dataset instances/{name}: scenes have no names; leave it out")
    return list_masked(root, SceneInstances(root, split))


register_dataset("coco", read_coco)
register_dataset("instances", read_scenes)

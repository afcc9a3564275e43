"""Read images with hard masks: class ids of all pixels, as PNG files.

Four layouts are known by their folders:

    images/a.jpg              masks/a.png                    plain: ids from 0, 255 unlabeled
    images/training/a.jpg     annotations/training/a.png     ADE20K: 0 unlabeled, ids from 1
    JPEGImages/a.jpg          SegmentationClass/a.png        Pascal VOC: 255 unlabeled
    train/dog/a.jpg           masks/train/dog/a.png          photo scenes, beside boxes.json

VOC's images are those that `ImageSets/Segmentation/train.txt` lists. In the other layouts an image
may have no mask: it is unlabeled. Masks of photo scenes number the objects of a scene, whose
classes are in boxes.json; 0 is the background. `--dataset masks` reads these layouts in commands.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision import tv_tensors

from densefeed.storage.dataset_names import ENDINGS
from densefeed.storage.datasets import register_dataset
from densefeed.storage.images import decode, open_image, sample_evenly
from densefeed.storage.listed import Listed
from densefeed.storage.scenes import BOXES, MASKS
from densefeed.system.errors import UserError, first_line
from densefeed.system.files import read_lines
from densefeed.system.json_files import read_json
from densefeed.system.progress import bar

# Class of pixels without a label, in masks as they are returned, and in files.
UNLABELED, VOID = -1, 255
VOC_CLASSES = [
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair"),
    *("cow", "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
]
# By bit depth and color type in a PNG header: the factor by which Pillow scales gray to 255.
GRAY_FACTORS = {b"\x02\x00": 85, b"\x04\x00": 17}
# Masks that are read when a dataset is found.
CHECKED = 64
# Bytes of boxes.json.
LARGEST_BOXES = 2**24
# Names of splits in ADE20K's folders.
ADE_SPLITS = {"train": "training", "val": "validation"}


class MaskFolder:
    """A dataset of N images with masks: items for transforms, masks for the loss.

    `[index]` is a dictionary: `image`, a PIL image; `mask`, a `tv_tensors.Mask` int64 `[H, W]`,
    which torchvision.transforms.v2 moves with the image; and `label`, the class of most labeled
    pixels (0 without any), which `densefeed.label` asks for.

    Attributes:
        classes: the K names.
        images, masks: paths of the files; None for an image without a mask.

    Args:
        root: the folder that holds `images` or `JPEGImages`.
        split: `train` or `val`, or the name of a folder or list of the layout; the plain layout
            has no splits.
        classes: names of the classes; needed unless the layout is VOC's, or the folder holds
            ADE20K's `objectInfo150.txt`, or `classes.txt` with one name a line.

    Raises UserError for a folder of none of the layouts, a mask without its image, and, when it is
    read, a mask of another size than its image or with an id that is no class.
    """

    def __init__(
        self, root: str | Path, split: str = "train", classes: Sequence[str] | None = None
    ) -> None:
        self.root, names, table = Path(root), None, None
        # What is subtracted from ids; 0 then is UNLABELED.
        self._first = 0
        # Photo scenes: the class of each value of a mask.
        self._objects: list[list[int]] | None = None
        if (self.root / BOXES).is_file():
            images, masks, names = self._list_scenes(split)
        elif (self.root / "SegmentationClass").is_dir():
            images, masks, names = self._list_voc(split)
        elif (self.root / "annotations").is_dir():
            split = ADE_SPLITS.get(split, split)
            images, masks = self._pair(f"images/{split}", f"annotations/{split}")
            self._first, table = 1, self.root / "objectInfo150.txt"
        elif (self.root / "masks").is_dir():
            images, masks = self._pair("images", "masks")
        elif not self.root.is_dir():
            raise UserError(f"{root} is not a folder; give the one that holds images and masks")
        else:
            raise UserError(
                f"{root} has neither masks, nor annotations (ADE20K), nor SegmentationClass (Pascal"
                " VOC); give the folder that holds one of them beside its images"
            )
        listed = self.root / "classes.txt"
        if classes is not None:
            if isinstance(classes, str | bytes) or not isinstance(classes, Iterable):
                raise UserError(f"classes is {classes!r}; give a list of names")
            names = classes
        elif listed.is_file():
            names = [line for _, line in read_lines(listed)]
        elif table and table.is_file():
            names = read_ade_classes(table)
        if not names:
            raise UserError(
                f"the classes of {root} are not known; write {listed} with one name a line (in "
                "Python, classes=[...] serves too)"
            )
        self.classes, self.images, self.masks = list(names), images, masks

    def _list_scenes(self, split: str) -> tuple[list[Path], list[Path | None], list[str]]:
        """List the images and masks of a split of photo scenes."""
        path, remedy = self.root / BOXES, "make the scenes again"
        scenes = read_json(path, remedy, largest=LARGEST_BOXES).get("scenes")
        try:
            shown = {name: [each["class"] for each in found] for name, found in scenes.items()}
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"{path} does not list the objects of scenes; {remedy}") from error
        # Classes of both splits, so that they have the same numbers.
        own = [name for name in shown if name.startswith(("train/", "val/"))]
        names = ["background", *sorted({each for name in own for each in shown[name]})]
        files = sorted(name for name in shown if name.startswith(f"{split}/"))
        numbers = {name: number for number, name in enumerate(names)}
        if others := sorted({each for name in files for each in shown[name]} - numbers.keys()):
            raise UserError(
                f"{path} has objects in {split} of a class that train and val lack ({others[0]}); "
                "give one of these splits"
            )
        self._objects = [[0, *(numbers[each] for each in shown[name])] for name in files]
        masks = [(self.root / MASKS / name).with_suffix(".png") for name in files]
        if not files:
            raise UserError(f"{path} lists no scenes of the split {split}; give another")
        there = [path if path.is_file() else None for path in masks]
        return [self.root / name for name in files], there, names

    def _list_voc(self, split: str) -> tuple[list[Path], list[Path | None], list[str]]:
        """List the images and masks of a split of Pascal VOC."""
        listed = self.root / "ImageSets/Segmentation" / f"{split}.txt"
        if not listed.is_file():
            raise UserError(f"{listed} is missing; give a split of which there is a list")
        names = [line for _, line in read_lines(listed)]
        images = [self.root / "JPEGImages" / f"{name}.jpg" for name in names]
        masks = [self.root / "SegmentationClass" / f"{name}.png" for name in names]
        for path in images + masks:
            if not path.is_file():
                raise UserError(f"{path} is missing, and {listed} lists it; copy the dataset again")
        return images, list(masks), VOC_CLASSES

    def _pair(self, images: str, masks: str) -> tuple[list[Path], list[Path | None]]:
        """List the images of a folder, and the masks of the same stems."""
        for folder in (images, masks):
            if not (self.root / folder).is_dir():
                raise UserError(f"{self.root / folder} is missing; give another split or folder")
        listed = [path for path in sorted((self.root / masks).iterdir()) if path.is_file()]
        found = {path.stem: path for path in listed if path.suffix.lower() == ".png"}
        # A JPEG of ids holds other ids.
        for path in listed:
            if path.suffix.lower() in ENDINGS and path.suffix.lower() != ".png":
                raise UserError(f"{path} is no PNG file, as masks are; save it as PNG")
        files = sorted((self.root / images).iterdir())
        files = [path for path in files if path.suffix.lower() in ENDINGS]
        stems = {path.stem for path in files}
        if len(stems) < len(files) or not files:
            what = "several images of the same name" if files else "no images"
            raise UserError(f"{self.root / images} has {what}; correct the folder")
        for stem, path in found.items():
            if stem not in stems:
                raise UserError(f"{path} is a mask of no image in {images}; remove it")
        return files, [found.get(path.stem) for path in files]

    def __len__(self) -> int:
        """Number of images."""
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path = self.images[index]
        image, mask = decode(path.read_bytes(), str(path)), self.mask(index)
        self.check_size(index, mask, image.height, image.width)
        if self.masks[index] is None:
            mask = torch.full((image.height, image.width), UNLABELED)
        return {"image": image, "mask": tv_tensors.Mask(mask), "label": self._find_label(mask)}

    def check_size(self, index: int, mask: Tensor, height: int, width: int) -> None:
        """Raise UserError if a mask has not the size of its image."""
        rows, columns = mask.shape
        if self.masks[index] and (rows, columns) != (height, width):
            raise UserError(
                f"{self.masks[index]} has {columns} x {rows} pixels and {self.images[index]} "
                f"{width} x {height}; give the mask of this image"
            )

    def mask(self, index: int) -> Tensor:
        """Return a mask, int64 `[H, W]`, -1 where unlabeled; `[0, 0]` without a file."""
        path, K = self.masks[index], len(self.classes)
        numbers = self._objects and self._objects[index]
        K = len(numbers) if numbers else K
        if path is None:
            return torch.empty(0, 0, dtype=torch.int64)
        try:
            with path.open("rb") as file:
                depth = file.read(26)[24:]
                file.seek(0)
                with open_image(file) as image:
                    mode, kind, pixels = image.mode, image.format, np.array(image)
        # Pillow does not limit the types of its exceptions.
        except Exception as error:
            raise UserError(f"{path} cannot be read ({first_line(error)}); replace it") from error
        if kind != "PNG":
            raise UserError(f"{path} is a {kind} file, which may hold other ids; save it as PNG")
        if pixels.ndim != 2:
            raise UserError(
                f"{path} is an image of mode {mode}, not of class ids; save it as a PNG of one "
                "channel, or of a palette"
            )
        ids = torch.from_numpy(pixels.astype(np.int64)) // GRAY_FACTORS.get(depth, 1)
        if self._first:
            ids -= self._first
        elif K <= VOID and not numbers:
            ids[ids == VOID] = UNLABELED
        if (ids >= K).any() and numbers:
            raise UserError(f"{path} has more objects than {BOXES} lists; make the scenes again")
        if (ids >= K).any():
            raise UserError(
                f"{path} has class {int(ids.max()) + self._first}, and there are {K} classes from "
                f"{self._first} on; correct the mask or give all classes"
            )
        return torch.tensor(numbers)[ids] if numbers else ids

    @cached_property
    def labels(self) -> np.ndarray:
        """The class of most labeled pixels of each image, int64 `[N]`; reads all masks once."""
        indices = bar(range(len(self)), f"masks of {self.root}")
        return np.array([self._find_label(self.mask(index)) for index in indices], np.int64)

    def _find_label(self, mask: Tensor) -> int:
        ids = mask[mask >= 0]
        return int(ids.bincount().argmax()) if len(ids) else 0


def read_ade_classes(path: Path) -> list[str]:
    """Read the names of ADE20K's 150 classes from its table."""
    rows = [line.split("\t") for _, line in read_lines(path)]
    if not rows or "Name" not in rows[0]:
        raise UserError(f"{path} has no column Name; copy it again, or write classes.txt beside it")
    column = rows[0].index("Name")
    return [row[column].strip() for row in rows[1:] if len(row) > column]


def read_masks(root: Path, name: str, split: str) -> Listed:
    """Find the images of `--dataset masks`, and read some of their masks.

    Their labels are all 0, so that maps of the images stay valid when masks are added.
    """
    if name:
        raise UserError(f"--dataset masks/{name}: the layout has no names; give --dataset masks")
    return list_masked(root, MaskFolder(root, split))


def list_masked(root: Path, folder: Any) -> Listed:
    """Return the images of a `MaskFolder`, or of another reader of masks, after a check of some."""
    # Masks of other classes are found before a training begins.
    for index in sample_evenly(len(folder), CHECKED).tolist():
        folder.mask(index)
    paths = [path.relative_to(root).as_posix() for path in folder.images]
    return Listed(paths, np.zeros(len(paths), np.int64), folder.classes, Path(root), masks=folder)


register_dataset("masks", read_masks)

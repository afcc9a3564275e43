"""Open the images that are labeled and packed; those of .beton are JPEGs as stored, others PNG."""

import hashlib
import io
from pathlib import Path

import numpy as np
from PIL import Image

from densefeed import native
from densefeed.storage.beton import Beton, is_beton, open_matching
from densefeed.storage.beton_format import JPEG, name_classes
from densefeed.storage.dataset_items import DatasetItems
from densefeed.storage.images import (
    SIZED_FILES,
    UNDIVIDED,
    FileSizes,
    Images,
    SplitOptions,
    sample_evenly,
)
from densefeed.system.errors import UserError
from densefeed.system.factories import is_factory
from densefeed.system.object_url import ObjectURL

# What the names of images begin with. A .beton holds none.
MARK = "beton-"


def open_images(
    root: Path | ObjectURL | None,
    dataset: str | DatasetItems,
    split: str,
    division: SplitOptions = UNDIVIDED,
) -> Images:
    """Open .beton files, the dataset of a factory or of timm, or Images with these arguments.

    UserError as of these, for no root where one is needed, and for one beside a factory.
    """
    if isinstance(dataset, str) and dataset.startswith("torch/"):
        # Both parts of a division are of the training set.
        dataset = DatasetItems.create(dataset, root, "train" if division.val_fraction else split)
    if isinstance(dataset, str) and is_factory(dataset):
        if root is not None:
            raise UserError(
                f"--dataset {dataset} makes the dataset itself, and --data {root} has no effect "
                "beside it; remove --data"
            )
        dataset = DatasetItems.load(dataset)
    if isinstance(dataset, DatasetItems):
        return Images(Path(dataset.root), dataset, split, division)
    if root is None:
        raise UserError(
            "--data is missing; give the folder of the images, or --dataset package.module:factory"
        )
    remote = isinstance(root, ObjectURL)
    if not (root.endswith(".beton") if remote else is_beton(root)):
        return Images(root, dataset, split, division)
    for option, given in (("--dataset", dataset), ("--val-fraction", division.val_fraction)):
        if given:
            raise UserError(f"{root} is packed, and {option} is for folders; leave it out")
    if remote:
        raise UserError(f"{root} can be trained on, but not labeled or packed; copy it to a disk")
    return BetonImages(root, split)


class BetonImages(Images):
    """The images of a .beton, or of all files that match a pattern, in their order.

    Files that FFCV wrote have numbers for class names. UserError as of Beton and `name_classes`.
    """

    def __init__(self, path: Path, split: str = "train") -> None:
        self.root, self.whole, self.rows = path, None, None
        self._split, self._reads_split, self._blocks = split, False, None
        self._beton = open_matching(path)
        self.labels, self.where = self._beton.labels, self._beton.where
        self.class_names = name_classes(path, self._beton.notes, self.labels)
        self.paths = name_images(self._beton)

    def open(self, index: int) -> io.BytesIO:
        """Open the encoded bytes of image `index`. UserError if they are damaged."""
        stored, mode = self._beton.image(index)
        if mode == JPEG:
            return io.BytesIO(stored)
        file = io.BytesIO()
        try:
            image = Image.fromarray(self._beton.pixels(index, stored))
        except native.JpegError as error:
            raise UserError(f"{self.where(index)} is damaged ({error}); pack it again") from error
        # The fastest level: the bytes are decoded at once and dropped.
        image.save(file, "PNG", compress_level=1)
        file.seek(0)
        return file

    def size(self, index: int) -> tuple[int, int]:
        """Return the height and width of image `index`."""
        return int(self._beton.heights[index]), int(self._beton.widths[index])

    def sample_sizes(self, rows: range | None = None, sized: int = SIZED_FILES) -> FileSizes:
        """Return the bytes of sampled images as they are stored, by their rows."""
        rows = range(len(self)) if rows is None else rows
        sampled = [rows[place] for place in sample_evenly(len(rows), sized).tolist()]
        return {row: int(self._beton.images.size[row]) for row in sampled}


def name_images(beton: Beton) -> list[str]:
    """Return a name for each image, which no image of a file with other images has."""
    digest = hashlib.sha256(beton.fingerprint.encode())
    # Files of one fingerprint may leave out different images.
    if beton.notes.get("left_out"):
        for part in (beton.labels, beton.heights, beton.widths):
            digest.update(np.ascontiguousarray(part).tobytes())
    mark = f"{MARK}{digest.hexdigest()[:16]}"
    return [f"{mark}/{number:08d}" for number in range(len(beton))]

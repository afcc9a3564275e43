"""Read the images of a dataset object: of torchvision, timm or Hugging Face, or of the user's own.

Such an object has `len` and `[index]` (a map-style dataset of PyTorch). An item is (image, label),
or a dictionary with `image` (or `img`) and `label`. An image is a Pillow image, a uint8 array
`[H, W, 3]`, a tensor `[3, H, W]` of uint8 or of floats from 0 to 1, or the bytes or the path of an
image file. Gray and alpha are converted as those of files (samples.py).

An image is called after its index, as item-00000012. Pixels are returned as PPM, which costs a
copy, so all other code reads encoded images only.
"""

import hashlib
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset

from densefeed.storage import samples
from densefeed.storage.dataset_names import MOST_CLASSES, SPLITS, check_label, list_some
from densefeed.storage.datasets import check_labels, describe_classes
from densefeed.storage.image_shards import IMAGE_COLUMNS
from densefeed.storage.images import SIZED_FILES, explain, read_encoded, sample_evenly
from densefeed.storage.mask_folder import MaskFolder
from densefeed.system.errors import UserError, first_line
from densefeed.system.factories import call_factory
from densefeed.system.files import open_regular
from densefeed.system.progress import bar

# Items whose pixels enter the fingerprint. They are read twice when a dataset is opened.
SAMPLED = 32
LABEL_COLUMN = "label"
# Attributes in which datasets of torchvision hold all labels.
LABELS = "targets", "labels", "_labels"
FORMS = (
    "a Pillow image, a uint8 array [H, W, 3], a tensor [3, H, W] of uint8 or of floats from 0 to 1,"
    " or the bytes or the path of an image file"
)


class DatasetItems:
    """The N images of a dataset object, in its order; the interface is that of `Listed`.

    `name` is what messages call it. Items are read one at a time: few datasets are made for
    threads, which would mix up what they read from one open file.

    Raises UserError if the object is no such dataset, for a sampled item whose image cannot be read
    or differs when it is read again, and for a label that is missing or invalid.
    """

    # The split that it was made for; None where only the user knows.
    split: str | None = None
    # As many items are read as `sample_sizes` has files: 32 of all, and two of a shard.
    sampling = SIZED_FILES // SAMPLED

    def __init__(self, dataset: Any, name: str) -> None:
        check_dataset(dataset, name)
        self.root, self._dataset, self._lock = name, dataset, Lock()
        count = len(dataset)
        self.paths = [f"item-{index:08d}" for index in range(count)]
        self._columns, self._files = find_columns(dataset, name), list_files(dataset)
        self.has_labels = not holds_masks(dataset)
        self._digests: dict[int, int] = {}
        sampled = {index: self._compare(index) for index in sample_evenly(count, SAMPLED).tolist()}
        self.labels = self._find_labels(sampled)
        names = list_classes(dataset, name)
        self.class_names = names or [str(n) for n in range(int(self.labels.max()) + 1)]
        check_labels(name, self)
        if self.has_labels:
            describe_classes(name, self)

    @classmethod
    def load(cls, source: str) -> "DatasetItems":
        """Call `package.module:factory` for a dataset. UserError if that fails."""
        return cls(call_factory(source), source)

    @classmethod
    def create(cls, name: str, root: Any, split: str) -> "DatasetItems":
        """Create the dataset of torchvision that timm calls torch/NAME, of files below `root`.

        UserError for another name, and for files that are missing or damaged.
        """
        if not isinstance(root, Path):
            raise UserError(f"--dataset {name} is read from a disk; give its folder with --data")
        # timm takes any other word for the test set.
        if split not in (known := [word for words in SPLITS for word in words]):
            raise UserError(
                f"--dataset {name} has no split {split!r}; give --split {' or '.join(known)}"
            )
        # This import takes 1.2 s.
        from timm.data import create_dataset

        try:
            found = cls(create_dataset(name, root=str(root), split=split), name)
        except UserError:
            raise
        # torchvision has its own errors for each dataset, as of NumPy, tarfile and pickle.
        except Exception as error:
            problem = f"{type(error).__name__}: {first_line(error)}".rstrip(": ")
            raise UserError(
                f"--dataset {name} cannot be read from {root} ({problem}); check the name and "
                "--split, and that the files are there as torchvision.datasets downloads them"
            ) from error
        found.split = split
        return found

    def where(self, index: int) -> str:
        """Name of item `index` for error messages."""
        return f"item {index} of {self.root}"

    def open(self, index: int) -> io.BytesIO:
        """Open the encoded bytes of item `index`. UserError if it has no image."""
        return io.BytesIO(self._read(index)[0])

    def measure(self, index: int) -> int:
        """Return 64 bits of a hash of the pixels, or the encoded bytes, of item `index`."""
        if index not in self._digests:
            self._digests[index] = digest(self._read(index)[0])
        return self._digests[index]

    def hash_files(self, rows: Sequence[int]) -> str:
        """Hash the files of items, by the last two parts of their paths; "" if none are stated.

        Not by all parts, as a data set may move to another folder.
        """
        names = ("/".join(self._files[row].split("/")[-2:]) for row in rows if self._files)
        text = "\n".join(names)
        return f"{digest(text.encode(errors='surrogateescape')):016x}" if text else ""

    def _compare(self, index: int) -> Any:
        """Read an item twice, and return its label. UserError if its images differ."""
        encoded, label = self._read(index)
        self._digests[index] = digest(encoded)
        if digest(self._read(index)[0]) != self._digests[index]:
            raise UserError(
                f"{self.where(index)} has other pixels when it is read again; leave the random "
                "transform out of the dataset (transform=None) and apply it in training, where the "
                "maps follow the view"
            )
        return label

    def _read(self, index: int) -> tuple[bytes, Any]:
        """Read the encoded image of an item, and its label or None."""
        # Images that Pillow has only opened are decoded here too: they may share a file.
        with self._lock:
            image, label = self._split(self._fetch(index), index)
            return encode(image, self.where(index)), label

    def _fetch(self, index: int) -> Any:
        # The user's own code may raise anything.
        try:
            item, count = self._dataset[index], len(self._dataset)
        except (UserError, MemoryError):
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {first_line(error)}".rstrip(": ")
            raise UserError(
                f"{self.where(index)} cannot be read ({problem}); correct the dataset, which had "
                f"{len(self.paths):,} items when it was opened"
            ) from error
        if count != len(self.paths):
            raise UserError(
                f"{self.root} has {count:,} items and had {len(self.paths):,} when it was opened; "
                "leave it as it is while it is read"
            )
        return item

    def _split(self, item: Any, index: int) -> tuple[Any, Any]:
        """Return the image and the label, or None, of an item."""
        if isinstance(item, Mapping):
            image, label = self._columns or (find_image(item), LABEL_COLUMN)
            found = item.get(image), item.get(label)
        else:
            # A tuple without a label has one entry, and another item is the image.
            found = (*item, None, None)[:2] if isinstance(item, tuple | list) else (item, None)
        if found[0] is None:
            columns = f" among {list_some(list(map(str, item)))}" * isinstance(item, Mapping)
            raise UserError(
                f"{self.where(index)} has no image{columns}; return (image, label), or a "
                f"dictionary with {IMAGE_COLUMNS[0]!r} and {LABEL_COLUMN!r}"
            )
        return found

    def _find_labels(self, sampled: dict[int, Any]) -> np.ndarray:
        """Return all labels, int64 `[N]`, of which those of `sampled` items are known.

        They are those that the dataset states, if these agree with the sampled items; else every
        item is read.
        """
        stated = list_labels(self._dataset, self.root)
        known = {index: label for index, label in sampled.items() if label is not None}
        checked = {index: self._check(label, index) for index, label in known.items()}
        if stated is not None and all(stated[index] == label for index, label in checked.items()):
            for index in np.flatnonzero((stated < 0) | (stated >= MOST_CLASSES))[:1].tolist():
                self._check(stated[index], index)
            return stated
        for index in sampled.keys() - known.keys():
            self._check(None, index)
        with closing(bar(range(len(self.paths)), f"labels of {self.root}")) as indices:
            labels = [self._check(self._read_label(index), index) for index in indices]
        return np.array(labels, np.int64)

    def _read_label(self, index: int) -> Any:
        with self._lock:
            return self._split(self._fetch(index), index)[1]

    def _check(self, label: Any, index: int) -> int:
        if label is None:
            raise UserError(
                f"{self.where(index)} has no label; return (image, label), with the number of its "
                "class"
            )
        is_number = isinstance(label, np.generic | np.ndarray | torch.Tensor) and label.ndim == 0
        return check_label(label.item() if is_number else label, self.where(index))


def name_dataset(dataset: Any) -> str:
    """Return what messages call a dataset object."""
    return f"the dataset {type(dataset).__name__}"


def check_dataset(dataset: Any, name: str) -> None:
    """Raise UserError unless an object has a number of items and gives them by index."""
    if isinstance(dataset, Mapping):
        raise UserError(
            f"{name} is a dictionary of {list_some(list(map(str, dataset)))}; give one of its "
            "datasets"
        )
    try:
        count = len(dataset) if hasattr(dataset, "__getitem__") else None
    # Datasets of streams raise their own errors.
    except Exception:
        count = None
    if count is None or isinstance(dataset, str | bytes):
        raise UserError(
            f"{name} is a {type(dataset).__name__}, and not a map-style dataset; give an object "
            "that has len() and returns (image, label) for [index]"
        )
    if not count:
        raise UserError(f"{name} holds no items; give a dataset of images")


# ------------------------------------------------------------------------- labels and classes


def find_image(item: Mapping) -> str:
    """Return the column of an item's image."""
    return next((name for name in IMAGE_COLUMNS if name in item), IMAGE_COLUMNS[0])


def holds_masks(dataset: Any) -> bool:
    """Whether a dataset is a `MaskFolder`, or made of parts of some."""
    if isinstance(dataset, Subset):
        return holds_masks(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return any(map(holds_masks, dataset.datasets))
    return isinstance(dataset, MaskFolder)


def find_columns(dataset: Any, name: str) -> tuple[str, str] | None:
    """Return the columns of the images and the labels of a dataset of Hugging Face; else None.

    They are found as in Parquet files. UserError for several.
    """
    if isinstance(dataset, Subset):
        return find_columns(dataset.dataset, name)
    features = read_attribute(dataset, "features")
    # A dictionary of one's own is not that of Hugging Face, whose values describe columns.
    if not isinstance(features, Mapping) or not hasattr(dataset, "with_format"):
        return None
    images = [column for column, kind in features.items() if type(kind).__name__ == "Image"]
    images = images or [column for column in IMAGE_COLUMNS if column in features]
    classes = [column for column, kind in features.items() if hasattr(kind, "names")]
    labels = [LABEL_COLUMN] if LABEL_COLUMN in features else classes
    for what, columns, own in (("images", images, "image"), ("labels", labels, LABEL_COLUMN)):
        if len(columns) != 1:
            raise UserError(
                f"{name} has {len(columns)} columns of {what} among {list_some(list(features))}; "
                f"keep one by remove_columns, or call it {own!r} by rename_column"
            )
    return images[0], labels[0]


def read_attribute(dataset: Any, name: str) -> Any:
    """Return an attribute of a dataset; None without it, and where reading it fails."""
    try:
        return getattr(dataset, name, None)
    # A property of somebody else's class.
    except Exception:
        return None


def list_labels(dataset: Any, name: str) -> np.ndarray | None:
    """Return the labels that a dataset states without its images, int64 `[N]`; None if unknown."""
    if isinstance(dataset, Subset):
        labels = list_labels(dataset.dataset, name)
        return None if labels is None else labels[np.asarray(dataset.indices, np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [list_labels(part, name) for part in dataset.datasets]
        return None if any(part is None for part in parts) else np.concatenate(parts)
    # A sample of the items would not show each label that this changes.
    if getattr(dataset, "target_transform", None) is not None:
        return None
    reader, columns = read_attribute(dataset, "reader"), find_columns(dataset, name)
    if columns:
        # Without a transform, which would read the images.
        stated = list(dataset.with_format(None)[columns[1]])
    elif hasattr(reader, "class_to_idx"):
        stated = list_reader(reader, len(dataset))
    else:
        found = (read_attribute(dataset, attribute) for attribute in LABELS)
        stated = next((labels for labels in found if labels is not None), None)
    try:
        labels = np.asarray(stated)
    # Nested lists, as the boxes of objects, or a tensor on another device.
    except (ValueError, TypeError):
        return None
    fits = labels.shape == (len(dataset),) and labels.dtype.kind in "iu"
    return labels.astype(np.int64) if fits else None


def list_files(dataset: Any) -> list[str]:
    """Return the paths of files that datasets of torchvision and timm state; [] if unknown."""
    if isinstance(dataset, Subset):
        files = list_files(dataset.dataset)
        return [files[index] for index in dataset.indices] if files else []
    if isinstance(dataset, ConcatDataset):
        parts = [list_files(part) for part in dataset.datasets]
        return [file for part in parts for file in part] if all(parts) else []
    reader = read_attribute(dataset, "reader")
    stated = [read_attribute(dataset, "samples"), read_attribute(dataset, "imgs")]
    stated.append(read_attribute(reader, "samples"))
    samples = next((given for given in stated if isinstance(given, list) and given), [])
    if len(samples) != len(dataset):
        return []
    files = [item[0] if isinstance(item, tuple) and item else None for item in samples]
    return files if all(isinstance(file, str) for file in files) else []


def list_reader(reader: Any, count: int) -> list[int]:
    """Return the labels of a dataset of timm, by opening its files and not decoding them."""
    labels = []
    for index in range(count):
        file, label, *_ = reader[index]
        if hasattr(file, "close"):
            file.close()
        labels.append(label)
    return labels


def list_classes(dataset: Any, name: str) -> list[str]:
    """Return the class names that a dataset states; [] without any.

    UserError for datasets of other classes that were joined.
    """
    if isinstance(dataset, Subset):
        return list_classes(dataset.dataset, name)
    if isinstance(dataset, ConcatDataset):
        first, *others = (list_classes(part, name) for part in dataset.datasets)
        if any(other != first for other in others):
            raise UserError(
                f"{name} joins datasets of other classes, whose labels mean different ones; give "
                "all the same list of classes, or label each by itself"
            )
        return first
    names = read_attribute(dataset, "classes")
    if columns := find_columns(dataset, name):
        names = getattr(dataset.features[columns[1]], "names", None)
    elif numbers := getattr(read_attribute(dataset, "reader"), "class_to_idx", None):
        names = sorted(numbers, key=numbers.get)
    if not isinstance(names, Sequence) or isinstance(names, str):
        return []
    # torchvision's ImageNet has several words for a class.
    names = [", ".join(words) if isinstance(words, tuple) else str(words) for words in names]
    # timm's has two classes called crane, a bird and a machine: classes are matched by their names.
    counts = Counter(names)
    return [f"{name} ({n})" if counts[name] > 1 else name for n, name in enumerate(names)]


# ------------------------------------------------------------------------- images


def digest(encoded: bytes) -> int:
    """Return 64 bits of a hash."""
    return int.from_bytes(hashlib.sha256(encoded).digest()[:8], "little")


def encode(image: Any, where: str) -> bytes:
    """Return an image as the bytes of a file: its own, or a PPM of its pixels, RGB of 8 bits.

    UserError that names `where` for anything but FORMS.
    """
    # Hugging Face's images that are not decoded: of a file beside the table the path alone.
    if isinstance(image, Mapping) and {"bytes", "path"} <= image.keys():
        image = image["path"] if image["bytes"] is None else image["bytes"]
    if isinstance(image, str | Path):
        try:
            with open_regular(image) as file:
                return read_encoded(file, where)
        # ValueError for a zero byte.
        except (FileNotFoundError, ValueError) as error:
            raise UserError(f"{where} names {image}, which does not exist; correct it") from error
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    pixels_HWC = take_pillow(image, where) if isinstance(image, Image.Image) else take_array(image)
    if pixels_HWC is None:
        raise UserError(f"{where} has an image of {describe(image)}; an image is {FORMS}")
    height, width, _ = pixels_HWC.shape
    return b"P6 %d %d 255\n" % (width, height) + pixels_HWC.tobytes()


def take_pillow(image: Image.Image, where: str) -> np.ndarray:
    """Return the pixels of a Pillow image, uint8 `[H, W, 3]`. UserError if it cannot be decoded."""
    transparency = image.info.get("transparency")
    try:
        return np.asarray(samples.to_rgb(image, where))
    except (UserError, MemoryError):
        raise
    # Pillow does not limit the types of its exceptions.
    except Exception as error:
        raise UserError(
            f"{where} cannot be decoded ({explain(error)}); replace or remove this image"
        ) from error
    finally:
        # The dataset may keep the image, whose transparency the conversion removes.
        if transparency is not None:
            image.info["transparency"] = transparency


def take_array(image: Any) -> np.ndarray | None:
    """Return the pixels of an array or a tensor, uint8 `[H, W, 3]`; None of another form."""
    if isinstance(image, torch.Tensor):
        image_CHW = image.detach().cpu()
        if image_CHW.is_floating_point() and image_CHW.numel():
            # Not of NaN either.
            if not (image_CHW.min() >= 0 and image_CHW.max() <= 1):
                return None
            image_CHW = (image_CHW.float() * 255).round().to(torch.uint8)
        image = (image_CHW.permute(1, 2, 0) if image_CHW.ndim == 3 else image_CHW).numpy()
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or not image.size:
        return None
    pixels = image[..., None] if image.ndim == 2 else image
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4):
        return None
    if pixels.shape[2] == 1:
        return np.broadcast_to(pixels, (*pixels.shape[:2], 3))
    return pixels[..., :3]


def describe(image: Any) -> str:
    """Describe an object that is no image by its type, and its numbers if it has any."""
    if isinstance(image, np.ndarray | torch.Tensor):
        text = f"{str(image.dtype).removeprefix('torch.')} {list(image.shape)}"
        if isinstance(image, torch.Tensor) and image.is_floating_point() and image.numel():
            text += f" from {image.min():.3g} to {image.max():.3g}"
        return text
    return f"type {type(image).__name__}"

"""Datasets that others publish and read: torchvision's, DomainNet, and Hugging Face's with timm.

Those of pixel arrays are returned as PNG, so all other code reads encoded images only.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from densefeed.storage.dataset_names import check_label
from densefeed.storage.image_lists import read_list
from densefeed.storage.listed import Listed
from densefeed.system.errors import UserError, first_line
from densefeed.system.terminal import print, warn

if TYPE_CHECKING:
    from timm.data.readers.reader import Reader

# Images of DomainNet's lists, train and test: DHVT, Table 6, arXiv 2106.03746, Section 5.
DOMAINS = {
    "clipart": (33_525, 14_604),
    "infograph": (36_023, 15_582),
    "painting": (50_416, 21_850),
    "quickdraw": (120_750, 51_750),
    "real": (120_906, 52_041),
    "sketch": (48_212, 20_916),
}
DOMAIN_CLASSES = 345
# Splits of torchvision's datasets, and their files for messages.
TORCHVISION = {
    "cifar10": (("train", "test"), "the folder cifar-10-batches-py of cifar-10-python.tar.gz"),
    "cifar100": (("train", "test"), "the folder cifar-100-python of cifar-100-python.tar.gz"),
    "svhn": (("train", "test"), "train_32x32.mat and test_32x32.mat"),
    "flowers102": (
        ("train", "val", "trainval", "test"),
        "flowers-102/ with folder jpg of 102flowers.tgz, imagelabels.mat and setid.mat",
    ),
}


class TimmDataset(NamedTuple):
    """A dataset of Hugging Face, which timm reads, in timm's order."""

    paths: list[str]
    labels: np.ndarray
    class_names: list[str]
    reader: "Reader"

    def where(self, index: int) -> str:
        """Name of sample `index` for error messages."""
        return str(self.reader.filename(index, absolute=True))

    def open(self, index: int) -> BinaryIO:
        """Open the encoded bytes of sample `index`."""
        return self.reader[index][0]


def check_split(dataset: str, split: str, splits: Iterable[str]) -> None:
    """Raise UserError unless a published dataset has the split."""
    if split not in splits:
        raise UserError(
            f"--dataset {dataset} has no split {split!r}; give --split {' or '.join(splits)}"
        )


def read_torchvision(name: str, root: Path, rest: str, split: str) -> Listed:
    """Read the dataset `name` with torchvision; download it if it is missing or damaged.

    Its pickles are opened only if their MD5 is the published one.
    """
    if rest:
        raise UserError(f"--dataset {name}/{rest} is unknown; the dataset is called {name}")
    splits, files = TORCHVISION[name]
    check_split(name, split, splits)
    try:
        parts = load_parts(root, name, split, download=False)
    # A file is missing, or its MD5 is not the published one.
    except (RuntimeError, FileNotFoundError):
        try:
            print(f"{name} is not complete and sound in {root}; downloading it to this folder")
            parts = load_parts(root, name, split, download=True)
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"{name} is not complete and sound in {root}, and cannot be downloaded "
                f"({first_line(error)}); put there {files}"
            ) from error
    except ImportError as error:
        raise UserError(
            f"--dataset {name} needs a missing package ({error}); pip install scipy"
        ) from error
    part = parts[0]
    if name == "flowers102":
        # torchvision gives no public access to the files of Flowers-102.
        home = part._base_folder
        paths = [str(Path(file).relative_to(home)) for part in parts for file in part._image_files]
        labels = np.concatenate([part._labels for part in parts])
        return Listed(paths, labels.astype(np.int64), list(part.classes), home)
    if name == "svhn":
        # torchvision has channels first.
        pixels, labels, names = part.data.transpose(0, 2, 3, 1), part.labels, list("0123456789")
    else:
        pixels, labels, names = part.data, part.targets, list(part.classes)
    paths = [f"{name}-{split}-{number:06d}.png" for number in range(len(pixels))]
    # The transposed pixels of SVHN are a view, whose images would be copied at every read.
    return Listed(paths, np.array(labels, np.int64), names, root, np.ascontiguousarray(pixels))


def load_parts(root: Path, name: str, split: str, download: bool) -> list:
    """Load torchvision's datasets that form a split; it is two for `trainval`, else one."""
    import torchvision.datasets as sets

    if name == "flowers102":
        parts = ("train", "val") if split == "trainval" else (split,)
        return [sets.Flowers102(root, part, download=download) for part in parts]
    kind = getattr(sets, name.upper())
    return [kind(root, split if name == "svhn" else split == "train", download=download)]


def read_domainnet(root: Path, name: str, split: str) -> Listed:
    """Read one domain of DomainNet from its published lists, both of which must exist.

    It has 345 classes, named after the folders in the lists. Prints a warning if a list has another
    number of images than the published one.
    """
    if name not in DOMAINS:
        names = ", ".join(f"domainnet/{domain}" for domain in DOMAINS)
        raise UserError(f"--dataset domainnet/{name}: there is no such domain; choose from {names}")
    lists = {word: root / f"{name}_{word}.txt" for word in ("train", "test")}
    check_split(f"domainnet/{name}", split, lists)
    for file in lists.values():
        if not file.exists():
            raise UserError(
                f"{file} does not exist; put {name}.zip there, unpacked, "
                f"and its lists {name}_train.txt and {name}_test.txt"
            )
    found = read_list(root, lists[split], DOMAIN_CLASSES)
    published = dict(zip(lists, DOMAINS[name], strict=True))[split]
    if len(found.paths) != published:
        warn(f"{lists[split]} has {len(found.paths):,} images, but {published:,} were published")
    return found


def read_timm(root: Path, dataset: str, split: str) -> TimmDataset:
    """Read the dataset of Hugging Face that timm calls `dataset`."""
    # This import takes 1.2 s, which no other dataset needs.
    from timm.data import create_dataset

    try:
        reader = create_dataset(dataset, root=str(root), split=split).reader
        paths = reader.filenames()
    except ImportError as error:
        raise UserError(
            f"--dataset {dataset} needs a missing package ({error}); pip install datasets"
        ) from error
    # A full disk, or no memory, has a remedy of its own.
    except (UserError, OSError, MemoryError):
        raise
    # Hugging Face and timm have errors of many types, as ValueError for a split that is not there.
    except Exception as error:
        raise UserError(
            f"--dataset {dataset} cannot be read as split {split} ({type(error).__name__}, "
            f"{first_line(error)}); check the name, and which splits the dataset has"
        ) from error
    where = f"--dataset {dataset}, row"
    given = [check_label(reader[i][1], f"{where} {i}") for i in range(len(paths))]
    names = getattr(reader, "class_to_idx", None)
    names = (
        sorted(names, key=names.get) if names else [*map(str, range(max(given, default=-1) + 1))]
    )
    return TimmDataset(paths, np.array(given, np.int64), names, reader)

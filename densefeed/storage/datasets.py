"""Find the samples of a dataset: class folders, the small sets of the papers, lists, subsets.

    (empty)            a folder of class folders, or of train/ and val/ that hold them; images are
                       the files whose names end as in ENDINGS, in timm's order. A folder of shards
                       (files of the next two kinds) is recognized
    tar                WebDataset's tar shards (image_shards.py)
    parquet[/COLUMN]   Parquet files with images as Hugging Face writes them, and the column of
                       their labels, if there are several
    cifar10 cifar100   as torchvision stores them below the root; downloaded if they are missing
    svhn flowers102    and there is a network
    domainnet/NAME     clipart infograph painting quickdraw real sketch: <root>/<name>_train.txt
                       and _test.txt, as published
    list/FILE          lines "path label" or "class/file", paths relative to the root; in a .csv
                       also "path,label", or a header that names these columns
    classes/FILE       the class folders of the root that FILE names, one per line, in its order
                       (ImageNet-100)
    share/PERCENT      a fixed share of the images of every class folder (ImageNet 1, 5, 10, 50 %)
    masks              images with hard masks, for segmentation (mask_folder.py)
    instances          photo scenes with the objects of their masks, for detection (instances.py)
    coco/FILE          images with the objects of an annotation file of COCO (instances.py)
    hfds/NAME          as timm reads it

What package.module:factory makes, and torch/NAME of timm, is read by dataset_items.py.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from densefeed.storage.class_folders import read_folder, select_classes, select_share
from densefeed.storage.dataset_names import (
    MOST_CLASSES,
    describe_lookalikes,
    find_unused,
    list_some,
)
from densefeed.storage.image_lists import read_list
from densefeed.storage.image_shards import read_parquet, read_tar, recognize
from densefeed.storage.listed import Listed
from densefeed.storage.object_images import ObjectImages, read_objects
from densefeed.storage.parquet_files import ParquetImages
from densefeed.storage.published_datasets import (
    TORCHVISION,
    TimmDataset,
    read_domainnet,
    read_timm,
    read_torchvision,
)
from densefeed.storage.tar_files import TarImages
from densefeed.system.errors import UserError
from densefeed.system.factories import is_factory
from densefeed.system.object_url import ObjectURL, check_local
from densefeed.system.terminal import print, warn

# What a finder returns: paths, labels, class names, and the methods `where` and `open` of Listed.
Found = Listed | TimmDataset | TarImages | ParquetImages | ObjectImages


def find(root: Path | ObjectURL, dataset: str, split: str) -> Found:
    """Find the samples of `dataset` below `root`.

    UserError if it is missing and cannot be downloaded, has no such split, or its list is invalid.
    """
    kind, _, rest = dataset.partition("/")
    if kind in ("list", "classes", "coco") and rest:
        check_file(root, kind, rest)
    if is_factory(dataset) or (kind == "torch" and rest):
        raise UserError(
            f"--dataset {dataset} is labeled, packed and audited, and here files are read; give a "
            ".beton, which `densefeed pack` makes of it, or in Python the dataset to open_loader"
        )
    if kind in ("hfids", "tfds", "wds"):
        raise UserError(
            f"--dataset {dataset} is a stream, and maps belong to numbered images; give its files, "
            "as --dataset tar or parquet, or hfds/NAME"
        )
    if dataset and kind not in (*FINDERS, "hfds"):
        raise UserError(
            f"--dataset {dataset} is unknown; give none for a folder of class folders, "
            "package.module:factory for a dataset of your own, "
            f"or one of {', '.join([*FINDERS, 'hfds', 'torch'])} (see --help)"
        )
    if not isinstance(root, ObjectURL):
        check_local(root)
    if kind == "":
        kind = recognize(root, split)
    remote = isinstance(root, ObjectURL)
    if remote and kind not in ("", "tar", "parquet"):
        raise UserError(f"--dataset {dataset} is read from a disk only; copy {root}")
    if kind in ("list", "classes") and not rest:
        raise UserError(f"--dataset {dataset} names no file; give {kind}/FILE, as {kind}/some.txt")
    if kind == "":
        found = (read_objects if remote else read_folder)(root, split)
    elif kind == "hfds":
        found = read_timm(root, dataset, split)
    else:
        found = FINDERS[kind](root, rest, split)
    if not found.paths:
        raise UserError(f"{root} holds no images of the split {split!r}; check --data and --split")
    check_labels(root, found)
    # The label of an image with a mask says little.
    if not getattr(found, "masks", None):
        describe_classes(root, found)
    return found


def check_file(root: Path | ObjectURL, kind: str, name: str) -> None:
    """Raise UserError if a list lies below `root`, and not where its path leads."""
    # Unlike the method of Path, false for names that no file can have.
    is_there = os.path.exists
    if isinstance(root, Path) and not is_there(name) and is_there(root / name):
        raise UserError(
            f"--dataset {kind}/{name}: {name} is not in the working directory, from which its path "
            f"is read, but in {root}; give {kind}/{root / name}"
        )


def choose_validation_split(dataset: str) -> str:
    """Return the split of a dataset that training is evaluated on."""
    kind = dataset.partition("/")[0]
    if kind == "hfds":
        return "validation"
    # Published without a split for validation.
    has_none = kind == "domainnet" or (kind in TORCHVISION and "val" not in TORCHVISION[kind][0])
    return "test" if has_none else "val"


def check_labels(root: Path | ObjectURL, found: Found) -> None:
    """Raise UserError for too many classes, or a label that is none of them."""
    classes, labels = len(found.class_names), found.labels
    if classes > MOST_CLASSES:
        raise UserError(
            f"{root} has {classes:,} classes, and files hold {MOST_CLASSES:,} at most; "
            "check --data, or merge some of them"
        )
    if not 0 <= labels.min() <= labels.max() < classes:
        raise UserError(
            f"{root} has labels from {labels.min()} to {labels.max()}, outside its {classes:,} "
            "classes; correct the labels"
        )


def describe_classes(root: Path | ObjectURL, found: Found) -> None:
    """Print which classes no image has, and two whose names look equal."""
    names = found.class_names
    if unused := find_unused(found.labels, names):
        print(
            f"{root} has no images of {len(unused):,} of its {len(names):,} classes: "
            f"{list_some(unused)}"
        )
    if pair := describe_lookalikes(names):
        warn(f"{root} has classes whose names look equal: {pair}")


# What finds the samples of a kind of dataset: (root, the rest of the name, split) to its samples.
Finder = Callable[[Path, str, str], Found]
FINDERS = {
    **{name: partial(read_torchvision, name) for name in TORCHVISION},
    "domainnet": read_domainnet,
    # The file is the split.
    "list": lambda root, name, split: read_list(root, Path(name)),
    "classes": select_classes,
    "share": select_share,
    "tar": read_tar,
    "parquet": read_parquet,
}


def register_dataset(kind: str, finder: Finder) -> None:
    """Make a kind of dataset known to `--dataset KIND/NAME`. ValueError if the kind is taken."""
    if kind in (*FINDERS, "hfds"):
        raise ValueError(f"there is a kind of dataset {kind!r} already")
    FINDERS[kind] = finder

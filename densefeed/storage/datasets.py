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

Number and names of the classes belong to a dataset, not to a split. Lists whose file names differ
only in the word for the split (a_train.txt, a_test.txt) are therefore read together for them, so a
class without images in one split has the same number and name in both. Datasets of pixel arrays
are returned as PNG, so all other code reads encoded images only.
"""

import csv
import io
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from densefeed.storage.dataset_names import (
    ENDINGS,
    MOST_CLASSES,
    SPLITS,
    begin_at_classes,
    check_label,
    choose_home,
    describe_lookalikes,
    describe_system,
    find_classes,
    find_system_entry,
    find_unused,
    list_some,
    match_forms,
    number_folders,
    skip_split,
    sort_images,
    take_class,
)
from densefeed.storage.image_shards import check_folders, read_parquet, read_tar, recognize
from densefeed.storage.object_images import ObjectImages, read_objects
from densefeed.storage.parquet_files import ParquetImages
from densefeed.storage.tar_files import TarImages
from densefeed.system.errors import UserError, explain_os_error, first_line
from densefeed.system.factories import is_factory
from densefeed.system.files import find_path_fault, is_folder, open_regular, read_lines
from densefeed.system.object_url import ObjectURL, check_local
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
# Times that links may lead to folders read before. Two in each folder of a chain lead to 2^n.
MOST_REPEATS = 1024
# Columns of a CSV, with a header, in lower case.
PATH_COLUMNS, LABEL_COLUMN = ("path", "file", "filename", "file_name", "image"), "label"
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


class Listed(NamedTuple):
    """The N samples of a dataset, in order."""

    paths: list[str]  # relative to `root`; made-up names for pixel arrays
    labels: np.ndarray  # int64 [N]
    class_names: list[str]
    root: Path
    pixels: np.ndarray | None = None  # uint8 [N, height, width, 3], only for pixel arrays
    masks: Any = None  # MaskFolder, if the dataset has hard masks, or a reader of objects

    def where(self, index: int) -> str:
        """Name of sample `index` for error messages."""
        return str(self.root / self.paths[index])

    def open(self, index: int) -> io.BufferedIOBase:
        """Open the encoded bytes of sample `index`."""
        if self.pixels is None:
            # 3 of 17 microseconds less than an object of pathlib.
            return open_regular(os.path.join(self.root, self.paths[index]))
        file = io.BytesIO()
        # The fastest level: the bytes are decoded at once and dropped.
        Image.fromarray(self.pixels[index]).save(file, "PNG", compress_level=1)
        file.seek(0)
        return file


class Entry(NamedTuple):
    """A line of a list."""

    line: int  # from 1
    path: str
    label: int | str | None  # in a CSV also the name of a class


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


def read_folder(root: Path, split: str) -> Listed:
    """Read a folder of class folders, or the one of `split` in it, in timm's order.

    Prints how many files and folders were left out. UserError if there are no images in class
    folders, or links that lead around in a circle.
    """
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; give a folder of class folders with images in it")
    there = {path.name for path in root.iterdir() if path.is_dir()}
    check_folders(root, there, split)
    home = choose_home(root, there, split)
    files = (
        f"{folder}/{name}" if folder else name for folder, names in walk(home) for name in names
    )
    paths = sort_images(home, files)
    if not paths:
        raise UserError(
            f"{home} holds no images; it should hold one folder of images per class, with the "
            f"endings {' '.join(ENDINGS)}"
        )
    return Listed(paths, *number_folders(paths, home), home)


def walk(home: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder at or below `home`, relative to it, and the names of its other entries.

    Hidden folders and those of systems are such entries: they are not read. Links are followed.
    Prints how many folders cannot be read. UserError for a link to a folder above it, and for links
    that lead to the same folders more than MOST_REPEATS times.
    """
    # Not os.walk: it follows links that lead around, and recurses once per level.
    stack, seen, repeats, unread = [("", frozenset())], set(), 0, []
    while stack:
        folder, above = stack.pop()
        try:
            about, entries = os.stat(home / folder), list(os.scandir(home / folder))
        except OSError as error:
            unread.append(error)
            continue
        place = about.st_dev, about.st_ino
        repeats += place in seen
        if place in above or repeats > MOST_REPEATS:
            raise UserError(
                f"{home / folder} is a link to a folder above it, or one of links that lead to the "
                f"same folders more than {MOST_REPEATS:,} times; remove it"
            )
        seen.add(place)
        names = [entry.name for entry in entries if is_folder(entry)]
        below = [name for name in names if not find_system_entry(name)]
        inside = above | {place}
        stack += [(f"{folder}/{name}" if folder else name, inside) for name in reversed(below)]
        folders = set(below)
        yield folder, [entry.name for entry in entries if entry.name not in folders]
    if unread:
        warn(f"{len(unread):,} folders were left out: {explain_os_error(unread[0])}")


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


def read_list(root: Path, file: Path, classes: int = 0) -> Listed:
    """Read a list of lines "path label", or of paths alone, whose class is a folder.

    The lists of the other splits beside it (`sibling_lists`) are read for the classes only. Without
    labels the classes are the first folders below those that all images share, sorted, of all these
    lists; hidden and system names are left out. With labels there are `classes` classes, or one
    more than the highest label in all lists. Names in place of labels are the classes, sorted.

    Raises UserError that names an invalid line, also if the first or the last image is not below
    `root`. It only prints how many others are missing, because readers may skip them.
    """
    most = classes or MOST_CLASSES
    own = read_entries(file, most)
    if not own:
        raise UserError(f'{file} names no images; give it lines "path label" or "class/file"')
    lists = [own]
    for other in sibling_lists(file):
        theirs = read_entries(other, most)
        if theirs and (theirs[0].label is None) != (own[0].label is None):
            with_labels, without = (file, other) if theirs[0].label is None else (other, file)
            raise UserError(
                f"{with_labels} has labels and {without} has none, though by their names they are "
                "splits of one dataset; give labels to both or neither, or move one to another "
                "folder"
            )
        if theirs and isinstance(theirs[0].label, str) != isinstance(own[0].label, str):
            raise UserError(
                f"{file} and {other} are splits of one dataset by their names, and one has numbers "
                "for labels and the other names of classes; write the same in both, or move one to "
                "another folder"
            )
        # They add classes, but no images.
        lists.append(theirs)
    check_paths(root, file, own)
    first = {}
    for entry in own:
        earlier = first.setdefault(entry.path, entry)
        if earlier.label != entry.label:
            raise UserError(
                f"{file}, line {entry.line} gives {entry.path} the label {entry.label}, "
                f"and line {earlier.line} the label {earlier.label}; keep one of them"
            )
    # `find .` writes ./cat/1.jpg.
    groups = [[entry.path.removeprefix("./") for entry in entries] for entries in lists]
    own_paths, *other_paths = begin_at_classes(groups, None if own[0].label is not None else file)
    if own[0].label is None:
        folders = find_classes(own_paths, file)
        names = sorted({*folders, *(take_class(path) for paths in other_paths for path in paths)})
        labels = np.searchsorted(names, folders)
    elif isinstance(own[0].label, str):
        names = sorted({entry.label for entries in lists for entry in entries})
        labels = np.searchsorted(names, [entry.label for entry in own])
    else:
        # A list with labels may hold several splits: train/cat/1.jpg and val/cat/2.jpg.
        every_path = [path for paths in (own_paths, *other_paths) for path in paths]
        folders = [take_class(skip_split(path)) for path in every_path]
        every = [entry.label for entries in lists for entry in entries]
        if not classes and min(every) > 0:
            print(
                f"note: {file} gives no image the label 0, so class 0 has no images; if its labels "
                f"count from 1, subtract 1 from each"
            )
        names, labels = name_labels(every, folders, classes), [entry.label for entry in own]
    return Listed([entry.path for entry in own], np.array(labels, np.int64), names, root)


def sibling_lists(file: Path) -> list[Path]:
    """Find the lists beside `file` whose names differ only in the split, as a_test, a_train."""
    words = sorted({"trainval"}.union(*SPLITS))
    # Whole words only: `tested` contains no split.
    places = list(re.finditer(rf"(?<![A-Za-z])({'|'.join(words)})(?![A-Za-z])", file.name))
    if not places:
        return []
    begin, end = places[-1].span()
    others = (file.with_name(file.name[:begin] + word + file.name[end:]) for word in words)
    return [other for other in others if other != file and other.is_file()]


def read_entries(file: Path, most: int) -> list[Entry]:
    """Read the lines of a list, all with labels below `most` or all without.

    Without labels, hidden and system names are left out, and counted in a line. Raises UserError
    that names an invalid line.
    """
    entries, system = [], set()
    for number, line, cells in read_rows(file):
        path, *last = cells or line.rsplit(maxsplit=1)
        label = None
        # A signed or fractional number is taken for a wrong label and not for a part of the path.
        if last and re.fullmatch(r"[-+]?\d+(\.\d*)?", last[0]):
            digits = last[0].lstrip("0") or "0"
            # The length is compared first: `int` refuses more than 4,300 digits with another error.
            if not digits.isdecimal() or len(digits) > len(str(most)) or int(digits) >= most:
                raise UserError(
                    f"{file}, line {number} ends in {last[0][:24]}; "
                    f"a label is an integer from 0 to {most - 1:,}, fix the list"
                )
            label = int(digits)
        elif cells:
            (label,) = last
        else:
            path = line
        if fault := find_path_fault(path):
            raise UserError(
                f"{file}, line {number}: {path} {fault}; paths in a list are relative to --data "
                "and stay below it"
            )
        if label is None and not take_class(path.removeprefix("./")):
            raise UserError(
                f"{file}, line {number}: {path} has no label and no folder; a line is "
                '"path label", with an integer from 0 as label, or "class/file"'
            )
        if entries and type(label) is not type(entries[0].label):
            if None not in (label, entries[0].label):
                raise UserError(
                    f"{file}, line {number}: some labels are numbers and some names of classes, as "
                    f"in line {entries[0].line} and this one; write all in one way"
                )
            raise UserError(
                f"{file}, line {number}: some lines end in a label and some do not, as line "
                f"{entries[0].line} and this one; a label is an integer from 0 to {most - 1:,}, "
                "fix the list"
            )
        # A line with a label is meant as it is.
        if label is None and (entry := find_system_entry(path)):
            system.add(entry)
        else:
            entries.append(Entry(number, path, label))
    if system:
        print(f"{file}: {describe_system(system)}")
    return entries


def read_rows(file: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Yield the lines of a list, and of a CSV the path and the label in each, else [].

    A CSV is known by its ending. Without a header that names the columns it has two. Lines without
    a comma are those of any list. UserError that names an invalid line.
    """
    width, columns = 2, [0, 1]
    for line_number, (number, line) in enumerate(read_lines(file)):
        cells = next(csv.reader([line])) if file.suffix.lower() == ".csv" else []
        cells = [cell.strip() for cell in cells]
        names = [cell.lower() for cell in cells]
        if len(cells) > 1 and not line_number and LABEL_COLUMN in names:
            paths = [names.index(name) for name in PATH_COLUMNS if name in names]
            if len(paths) != 1:
                raise UserError(
                    f"{file}, line {number} names {len(paths)} columns of paths; call one, and no "
                    f"other, {PATH_COLUMNS[0]!r} (or {', '.join(PATH_COLUMNS[1:])})"
                )
            width, columns = len(cells), [paths[0], names.index(LABEL_COLUMN)]
            continue
        if len(cells) < 2:
            yield number, line, []
            continue
        path, label = (cells[n] for n in columns) if len(cells) == width else ("", "")
        if not path or not label:
            raise UserError(
                f"{file}, line {number} has no path and label in its {len(cells)} columns; write "
                '"path,label", or name the columns path and label in the first line'
            )
        yield number, line, [path, label]


def name_labels(every: Sequence[int], images_folders: Sequence[str], classes: int) -> list[str]:
    """Return the names of `classes` labels; if 0, of one more than the highest label.

    `every` are the labels of all images, `images_folders` their class folders. A label is named
    after a folder if exactly one of its folders holds no other label's images. (A folder that holds
    all images of a split names no class.) The other labels are `class 7`, or plain numbers if no
    label has a name.
    """
    pairs = set(zip(every, images_folders, strict=True))
    labels = Counter(folder for _, folder in pairs)
    own = [(label, folder) for label, folder in pairs if folder and labels[folder] == 1]
    folders = Counter(label for label, _ in own)
    name_of = {label: folder for label, folder in own if folders[label] == 1}
    default = "class {}" if name_of else "{}"
    numbers = range(classes or 1 + max(label for label, _ in pairs))
    return [name_of.get(number, default.format(number)) for number in numbers]


def check_paths(root: Path, file: Path, entries: Sequence[Entry]) -> None:
    """Raise UserError if the first or the last image of a list is not below `root`.

    Prints how many of the others are not.
    """
    for entry in (entries[0], entries[-1]):
        if not (root / entry.path).is_file():
            raise UserError(
                f"{file}, line {entry.line} names {entry.path}, which is not below {root}; "
                'check --data, and that lines are "path label" or "class/file"'
            )
    # Each folder is listed once: a stat of every file of a network disk takes minutes.
    there, missing = {}, []
    for entry in entries:
        folder, name = os.path.split(entry.path)
        if folder not in there:
            there[folder] = set(os.listdir(root / folder) if (root / folder).is_dir() else ())
        if name not in there[folder]:
            missing.append(entry)
    if missing:
        first = missing[0]
        warn(
            f"{file} names {len(missing):,} images that are not below {root}, "
            f"the first in line {first.line}: {first.path}"
        )


def select_classes(root: Path, file: str, split: str) -> Listed:
    """Select the class folders that the file lists, numbered in its order."""
    lines = [line for _, line in read_lines(Path(file))]
    if not lines:
        raise UserError(f"{file} is empty; give it a line for each class folder")
    whole = read_folder(root, split)
    known = set(whole.class_names)
    # A folder's name may have spaces; the lists of ImageNet-100 describe a class behind its name.
    names = [line if line in known else line.split()[0] for line in lines]
    names = match_forms(names, whole.class_names)
    number = {name: n for n, name in enumerate(names)}
    fault = "a class twice" if len(number) < len(names) else ""
    if missing := number.keys() - known:
        fault = f"{min(missing)}, which is not a class folder of {root}"
    if fault:
        raise UserError(f"{file} names {fault}; fix the list, or check --data")
    labels = np.array([number.get(name, -1) for name in whole.class_names])[whole.labels]
    return subset(whole, np.flatnonzero(labels >= 0), labels, names)


def select_share(root: Path, percent: str, split: str) -> Listed:
    """Select round(n x percent / 100) images, at least one, of every class of n.

    They are drawn by a generator whose seed is the class id, as in the published code of
    arXiv 2112.03552 (with another generator), and kept in the folder's order.
    """
    try:
        share = float(percent) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UserError(f"--dataset share/{percent} is not a percentage; write it as share/10")
    whole = read_folder(root, split)
    kept = []
    for label in range(len(whole.class_names)):
        members = np.flatnonzero(whole.labels == label)
        # The first images of one permutation, so a smaller share is part of a larger one.
        drawn = np.random.default_rng(label).permutation(len(members))
        kept.append(members[drawn[: max(1, round(len(members) * share))]])
    return subset(whole, np.sort(np.concatenate(kept)), whole.labels, whole.class_names)


def subset(whole: Listed, ids: np.ndarray, labels: np.ndarray, names: list[str]) -> Listed:
    """Return the samples `ids` of a folder, with the labels that `labels` has for them."""
    return Listed([whole.paths[i] for i in ids], labels[ids], names, whole.root)


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

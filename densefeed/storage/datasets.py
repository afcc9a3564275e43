"""Find the samples of a dataset: class folders, the small sets of the papers, lists, subsets.

    (empty)            a folder of class folders, or of train/ and val/ that hold them
    cifar10 cifar100   as torchvision stores them below the root; downloaded if they are missing
    svhn flowers102    and there is a network
    domainnet/NAME     clipart infograph painting quickdraw real sketch: <root>/<name>_train.txt
                       and _test.txt, as published
    list/FILE          lines "path label" or "class/file", paths relative to the root
    classes/FILE       the class folders of the root that FILE names, one per line, in its order
                       (ImageNet-100)
    share/PERCENT      a fixed share of the images of every class folder (ImageNet 1, 5, 10, 50 %)
    hfds/NAME          as timm reads it

Number and names of the classes belong to a dataset, not to a split. Lists whose file names differ
only in the word for the split (a_train.txt, a_test.txt) are therefore read together for them, so a
class without images in one split has the same number and name in both. Datasets of pixel arrays
are returned as PNG, so all other code reads encoded images only.
"""

import io
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from densefeed.system.errors import UserError, explain_os_error, first_line

if TYPE_CHECKING:
    from timm.data.readers.reader import Reader

# Classes, and images of each split. Sources: DHVT, Table 6; DRLoc, Section 5 (Flowers: train and
# val together, evaluated on test); the web page of SVHN.
DOMAIN_CLASSES = 345
DOMAINS = {  # train, test
    "clipart": (33_525, 14_604),
    "infograph": (36_023, 15_582),
    "painting": (50_416, 21_850),
    "quickdraw": (120_750, 51_750),
    "real": (120_906, 52_041),
    "sketch": (48_212, 20_916),
}
CIFAR = {"train": 50_000, "test": 10_000}
COUNTS = {
    "cifar10": (10, CIFAR),
    "cifar100": (100, CIFAR),
    "svhn": (10, {"train": 73_257, "test": 26_032}),
    "flowers102": (102, {"train": 1_020, "val": 1_020, "trainval": 2_040, "test": 6_149}),
}
COUNTS |= {
    f"domainnet/{name}": (DOMAIN_CLASSES, {"train": train, "test": test})
    for name, (train, test) in DOMAINS.items()
}
# The synonyms that timm accepts.
SPLITS = ({"train", "training"}, {"val", "valid", "validation", "eval", "evaluation"}, {"test"})
# Stores and batches hold the class ids of score maps in uint16.
MOST_CLASSES = 65_535
# Files of torchvision's datasets, for messages.
TORCHVISION_FILES = {
    "cifar10": "the folder cifar-10-batches-py of cifar-10-python.tar.gz",
    "cifar100": "the folder cifar-100-python of cifar-100-python.tar.gz",
    "svhn": "train_32x32.mat and test_32x32.mat",
    "flowers102": "flowers-102/ with folder jpg of 102flowers.tgz, imagelabels.mat and setid.mat",
}


class Listed(NamedTuple):
    """The N samples of a dataset, in order."""

    paths: list[str]  # relative to `root`; made-up names for pixel arrays
    labels: np.ndarray  # int64 [N]
    class_names: list[str]
    root: Path
    pixels: np.ndarray | None = None  # uint8 [N, height, width, 3], only for pixel arrays

    def where(self, index: int) -> str:
        """Name of sample `index` for error messages."""
        return str(self.root / self.paths[index])

    def open(self, index: int) -> io.BufferedIOBase:
        """Open the encoded bytes of sample `index`."""
        if self.pixels is None:
            return open(self.root / self.paths[index], "rb")
        file = io.BytesIO()
        # The fastest level: the bytes are decoded at once and dropped.
        Image.fromarray(self.pixels[index]).save(file, "PNG", compress_level=1)
        file.seek(0)
        return file


class Entry(NamedTuple):
    """A line of a list."""

    line: int  # from 1
    path: str
    label: int | None
    folder: str  # name of the image's folder


class TimmDataset(NamedTuple):
    """A dataset that timm reads, in timm's order."""

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


def find(root: Path, dataset: str, split: str) -> Listed | TimmDataset:
    """Find the samples of `dataset` below `root`.

    Prints a warning if a published dataset has another number of samples than published. Raises
    UserError if it is missing and cannot be downloaded, has no such split, or its list is invalid.
    """
    kind, _, rest = dataset.partition("/")
    if dataset and kind not in (*FINDERS, "hfds"):
        raise UserError(
            f"--dataset {dataset} is unknown; give none for a folder of class folders, "
            f"or one of {', '.join([*FINDERS, 'hfds'])} (see --help)"
        )
    if kind in ("", "hfds"):
        return read_timm(root, dataset, split)
    if kind in ("list", "classes") and not rest:
        raise UserError(f"--dataset {dataset} names no file; give {kind}/FILE, as {kind}/some.txt")
    classes, counts = COUNTS.get(dataset, (0, {}))
    if counts and split not in counts:
        raise UserError(
            f"--dataset {dataset} has no split {split!r}; give --split {' or '.join(counts)}"
        )
    found = FINDERS[kind](root, rest, split)
    if not found.paths:
        raise UserError(f"--dataset {dataset}: {root} holds no images of the split {split!r}")
    images, names = len(found.paths), len(found.class_names)
    if counts and (names, images) != (classes, counts[split]):
        print(
            f"warning: {dataset}, {split}: {images:,} images of {names} classes, "
            f"but {counts[split]:,} of {classes} were published"
        )
    return found


def read_timm(root: Path, dataset: str, split: str) -> TimmDataset:
    """Read a folder of class folders, or the dataset that timm calls `dataset`."""
    # This import takes 1.2 s, which a loader of .beton files does not need.
    from timm.data import create_dataset

    if not dataset:
        check_split(root, split)
    try:
        reader = create_dataset(dataset, root=str(root), split=split).reader
        paths = reader.filenames()
    # timm's readers raise these for a folder without images and for a root that is missing.
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"{root}: no images found ({error}); it should hold one folder of images per class"
        ) from error
    except ImportError as error:
        raise UserError(
            f"--dataset {dataset} needs a missing package ({error}); pip install datasets"
        ) from error
    if not paths:
        raise UserError(f"{root} holds no images; it should hold one folder of images per class")
    # Readers of folders list their labels; of others every sample is read once.
    samples = getattr(reader, "samples", None) or (reader[i] for i in range(len(paths)))
    labels = np.array([sample[1] for sample in samples], np.int64)
    names = getattr(reader, "class_to_idx", None)
    names = sorted(names, key=names.get) if names else [*map(str, range(labels.max() + 1))]
    return TimmDataset(paths, labels, names, reader)


def check_split(root: Path, split: str) -> None:
    """Raise UserError if `root` is no folder, or holds splits but not this one.

    timm would then read all of them as one split.
    """
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; give a folder of class folders with images in it")
    there = {path.name for path in root.iterdir() if path.is_dir()}
    wanted = next((names for names in SPLITS if split in names), {split})
    if there & set().union(*SPLITS) and not there & wanted:
        raise UserError(
            f"{root} holds {', '.join(sorted(there))} but no folder {split!r}; "
            "name one of them, or the folder of classes"
        )


def read_torchvision(name: str, root: Path, rest: str, split: str) -> Listed:
    """Read the dataset `name` with torchvision; download it if it is incomplete.

    Its pickles are opened only if their MD5 is the published one.
    """
    if rest:
        raise UserError(f"--dataset {name}/{rest} is unknown; the dataset is called {name}")
    try:
        parts = load_parts(root, name, split, download=False)
    # Missing or incomplete.
    except (RuntimeError, FileNotFoundError):
        fault = find_fault(root, name, split)
        try:
            print(f"{name} is incomplete in {root} ({fault}); downloading it to this folder")
            parts = load_parts(root, name, split, download=True)
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"{name} is incomplete in {root} ({fault}) and cannot be downloaded "
                f"({first_line(error)}); put there {TORCHVISION_FILES[name]}"
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


def find_fault(root: Path, name: str, split: str) -> str:
    """Name the file of a torchvision dataset that is missing or differs from the published one."""
    import torchvision.datasets as sets
    from torchvision.datasets.utils import check_integrity

    if name == "svhn":
        home, files = root, [sets.SVHN.split_list[split][1:3]]
    elif name == "flowers102":
        home = root / "flowers-102"
        files = [sets.Flowers102._file_dict[what] for what in ("label", "setid")]
    else:
        kind = getattr(sets, name.upper())
        home, meta = root / kind.base_folder, (kind.meta["filename"], kind.meta["md5"])
        files = [*kind.train_list, *kind.test_list, meta]
    for file, published in files:
        path = home / file
        if not path.is_file():
            return f"there is no {path.relative_to(root)}"
        if not check_integrity(path, published):
            return f"the MD5 of {path.relative_to(root)} is not the published one"
    return "images are missing"


def read_domainnet(root: Path, name: str, split: str) -> Listed:
    """Read one domain of DomainNet from its published lists, both of which must exist.

    It has 345 classes, named after the folders in the lists.
    """
    if name not in DOMAINS:
        names = ", ".join(f"domainnet/{domain}" for domain in DOMAINS)
        raise UserError(f"--dataset domainnet/{name}: there is no such domain; choose from {names}")
    lists = {word: root / f"{name}_{word}.txt" for word in ("train", "test")}
    for file in lists.values():
        if not file.exists():
            raise UserError(
                f"{file} does not exist; put {name}.zip there, unpacked, "
                f"and its lists {name}_train.txt and {name}_test.txt"
            )
    return read_list(root, lists[split], DOMAIN_CLASSES)


def read_list(root: Path, file: Path, classes: int = 0) -> Listed:
    """Read a list of lines "path label", or of paths alone, whose folder is the class.

    The lists of the other splits beside it (`sibling_lists`) are read for the classes only. Without
    labels the classes are the folders in all these lists, sorted. With labels there are `classes`
    classes, or one more than the highest label in all lists.

    Raises UserError that names an invalid line, also if the first or the last image is not below
    `root`. It only prints how many others are missing, because readers may skip them.
    """
    most = classes or MOST_CLASSES
    own = read_entries(file, most)
    if not own:
        raise UserError(f'{file} names no images; give it lines "path label" or "class/file"')
    every = list(own)
    for other in sibling_lists(file):
        theirs = read_entries(other, most)
        if theirs and (theirs[0].label is None) != (own[0].label is None):
            with_labels, without = (file, other) if theirs[0].label is None else (other, file)
            raise UserError(
                f"{with_labels} has labels and {without} has none, though by their names they are "
                "splits of one dataset; give labels to both or neither, or move one to another "
                "folder"
            )
        # They add classes, but no images.
        every += theirs
    check_paths(root, file, own)
    first = {}
    for entry in own:
        earlier = first.setdefault(entry.path, entry)
        if earlier.label != entry.label:
            raise UserError(
                f"{file}, line {entry.line} gives {entry.path} the label {entry.label}, "
                f"and line {earlier.line} the label {earlier.label}; keep one of them"
            )
    if own[0].label is None:
        names = sorted({entry.folder for entry in every})
        labels = np.searchsorted(names, [entry.folder for entry in own])
    else:
        names, labels = name_labels(every, classes), [entry.label for entry in own]
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

    Raises UserError that names an invalid line.
    """
    entries = []
    for number, line in read_lines(file):
        path, *last = line.rsplit(maxsplit=1)
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
        else:
            path = line
        folder = Path(path).parent.name
        if label is None and not folder:
            raise UserError(
                f"{file}, line {number}: {path} has no label and no folder; "
                'a line is "path label" or "class/file"'
            )
        if entries and (label is None) != (entries[0].label is None):
            raise UserError(
                f"{file}, line {number}: some lines end in a label and some do not, as line "
                f"{entries[0].line} and this one; a label is an integer from 0 to {most - 1:,}, "
                "fix the list"
            )
        entries.append(Entry(number, path, label, folder))
    return entries


def name_labels(entries: Sequence[Entry], classes: int) -> list[str]:
    """Return the names of `classes` labels; if 0, of one more than the highest label.

    A label is named after a folder if exactly one of its folders holds no other label's images. (A
    folder that holds all images of a split names no class.) The other labels are `class 7`, or
    plain numbers if no label has a name.
    """
    pairs = {(entry.label, entry.folder) for entry in entries}
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
        print(
            f"warning: {file} names {len(missing):,} images that are not below {root}, "
            f"the first in line {first.line}: {first.path}"
        )


def read_lines(file: Path) -> list[tuple[int, str]]:
    """Read the lines that are not empty, numbered from 1. UserError if the file cannot be read."""
    try:
        text = file.read_text()
        # Binary data may be valid UTF-8. A list has no zero bytes.
        if "\0" in text:
            raise UnicodeError("a zero byte")
    except OSError as error:
        # A read that fails after the file was opened names none.
        error.filename = str(file)
        raise UserError(explain_os_error(error)) from error
    except UnicodeError as error:
        raise UserError(f"{file} is not a text file; give a list with one name per line") from error
    lines = enumerate(map(str.strip, text.splitlines()), start=1)
    return [(number, line) for number, line in lines if line]


def select_classes(root: Path, name: str, split: str) -> Listed:
    """Select the class folders that the file `name` lists, numbered in its order."""
    names = [line.split()[0] for _, line in read_lines(Path(name))]
    if not names:
        raise UserError(f"{name} is empty; give it a line for each class folder")
    whole = read_timm(root, "", split)
    missing = [name for name in names if name not in whole.class_names]
    if missing or len(set(names)) != len(names):
        fault = f"{missing[0]}, which is no class folder of {root}" if missing else "a class twice"
        raise UserError(f"{name} names {fault}; fix the list, or check --data")
    number = [names.index(name) if name in names else -1 for name in whole.class_names]
    labels = np.array(number)[whole.labels]
    return subset(whole, np.flatnonzero(labels >= 0), labels, names)


def select_share(root: Path, percent: str, split: str) -> Listed:
    """Select round(n x percent / 100) images, at least one, of every class of n.

    They are drawn by a generator whose seed is the class id, as in the published code of
    Bootstrapping ViTs (with another generator), and kept in the folder's order.
    """
    try:
        share = float(percent) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UserError(f"--dataset share/{percent} is not a percentage; write it as share/10")
    whole = read_timm(root, "", split)
    kept = []
    for label in range(len(whole.class_names)):
        members = np.flatnonzero(whole.labels == label)
        # The first images of one permutation, so a smaller share is part of a larger one.
        drawn = np.random.default_rng(label).permutation(len(members))
        kept.append(members[drawn[: max(1, round(len(members) * share))]])
    return subset(whole, np.sort(np.concatenate(kept)), whole.labels, whole.class_names)


def subset(whole: TimmDataset, ids: np.ndarray, labels: np.ndarray, names: list[str]) -> Listed:
    """Return the samples `ids` of a folder, with the labels that `labels` has for them."""
    return Listed([whole.paths[i] for i in ids], labels[ids], names, Path(whole.reader.root))


# What finds the samples of a kind of dataset: (root, the rest of the name, split) to its samples.
Finder = Callable[[Path, str, str], Listed]
FINDERS = {
    **{name: partial(read_torchvision, name) for name in TORCHVISION_FILES},
    "domainnet": read_domainnet,
    # The file is the split.
    "list": lambda root, name, split: read_list(root, Path(name)),
    "classes": select_classes,
    "share": select_share,
}


def register_dataset(kind: str, finder: Finder) -> None:
    """Make a kind of dataset known to `--dataset KIND/NAME`. ValueError if the kind is taken."""
    if kind in (*FINDERS, "hfds"):
        raise ValueError(f"there is a kind of dataset {kind!r} already")
    FINDERS[kind] = finder

"""What samples a dataset has: a folder of class folders, the small sets of the papers, lists of
files, parts of a folder.

    (empty)                            a folder of class folders, or of train/ and val/ that hold them
    cifar10 cifar100 svhn flowers102   as torchvision keeps them below the root, downloaded if they are not there and the network allows
    domainnet/NAME                     clipart infograph painting quickdraw real sketch: <root>/<name>_train.txt and _test.txt, as published
    list/FILE                          lines "path label" or "class/file", paths relative to the root
    classes/FILE                       those class folders of the root that FILE names, a line each, in its order (ImageNet-100)
    share/PERCENT                      so many of every class folder's images, always the same (ImageNet 1, 5, 10, 50 %)
    hfds/NAME                          as timm reads it

Number and names of the classes belong to a dataset, not to a split: lists whose file names differ
only in the word of the split (a_train.txt, a_test.txt) are read together for them, so that a class
without images in one has its place and name in both. Small arrays of pixels are handed on as PNG,
so everything behind this file reads encoded images only.
"""

import io
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from densefeed.system.errors import UserError, explain_os_error

if TYPE_CHECKING:
    from timm.data.readers.reader import Reader

# Classes and images of each split: DHVT, Table 6; DRLoc, Section 5 (Flowers: train and val
# together, to test on test); SVHN's own page.
CIFAR = {"train": 50_000, "test": 10_000}
COUNTS: dict[str, tuple[int, dict[str, int]]] = {
    "cifar10": (10, CIFAR),
    "cifar100": (100, CIFAR),
    "svhn": (10, {"train": 73_257, "test": 26_032}),
    "flowers102": (102, {"train": 1_020, "val": 1_020, "trainval": 2_040, "test": 6_149}),
    "domainnet/clipart": (345, {"train": 33_525, "test": 14_604}),
    "domainnet/infograph": (345, {"train": 36_023, "test": 15_582}),
    "domainnet/painting": (345, {"train": 50_416, "test": 21_850}),
    "domainnet/quickdraw": (345, {"train": 120_750, "test": 51_750}),
    "domainnet/real": (345, {"train": 120_906, "test": 52_041}),
    "domainnet/sketch": (345, {"train": 48_212, "test": 20_916}),
}
# timm's synonyms
SPLITS = ({"train", "training"}, {"val", "valid", "validation", "eval", "evaluation"}, {"test"})
MOST_CLASSES = 65_535  # a store and a batch number the classes of score maps in uint16
KINDS = (
    "cifar10",
    "cifar100",
    "svhn",
    "flowers102",
    "domainnet",
    "list",
    "classes",
    "share",
    "hfds",
)
WHERE = {
    "cifar10": "the folder cifar-10-batches-py of cifar-10-python.tar.gz",
    "cifar100": "the folder cifar-100-python of cifar-100-python.tar.gz",
    "svhn": "train_32x32.mat and test_32x32.mat",
    "flowers102": "flowers-102/ with the folder jpg of 102flowers.tgz, imagelabels.mat and setid.mat",
}


class Listed(NamedTuple):
    """A dataset as it was found: N samples in their order."""

    paths: list[str]  # relative to `root`; of arrays, a name
    labels: np.ndarray  # int64 [N]
    class_names: list[str]
    root: Path
    pixels: np.ndarray | None = None  # uint8 [N, height, width, 3] of sets that are arrays

    def where(self, index: int) -> str:
        """How an error message should name sample `index`."""
        return str(self.root / self.paths[index])

    def open(self, index: int) -> io.BufferedIOBase:
        """The encoded bytes of sample `index`."""
        if self.pixels is None:
            return open(self.root / self.paths[index], "rb")
        file = io.BytesIO()
        Image.fromarray(self.pixels[index]).save(file, "PNG", compress_level=1)
        file.seek(0)
        return file


class Entry(NamedTuple):
    """A line of a list."""

    line: int  # from 1
    path: str
    label: int | None
    folder: str  # the name of the folder in which the image stands


class ByTimm(NamedTuple):
    """A dataset that timm reads, in its order."""

    paths: list[str]
    labels: np.ndarray
    class_names: list[str]
    reader: "Reader"

    def where(self, index: int) -> str:
        """How an error message should name sample `index`."""
        return str(self.reader.filename(index, absolute=True))

    def open(self, index: int) -> BinaryIO:
        """The encoded bytes of sample `index`."""
        return self.reader[index][0]


def find(root: Path, dataset: str, split: str) -> Listed | ByTimm:
    """The samples of `dataset` below `root`; a warning if a published set has not as many as
    published.

    Raises UserError if it is not there and cannot be downloaded, has no such split, or its list
    names what is not there.
    """
    kind, _, rest = dataset.partition("/")
    if dataset and kind not in KINDS:
        raise UserError(
            f"--dataset {dataset}: give none for a folder of class folders, or one of {', '.join(KINDS)} (see --help)"
        )
    if kind in ("", "hfds"):
        return by_timm(root, dataset, split)
    finder: Callable[[Path, str, str], Listed] = {
        "domainnet": domainnet,
        "list": listed,
        "classes": chosen_classes,
        "share": share_of_each,
    }.get(kind, of_torchvision)
    if kind in WHERE and rest:
        raise UserError(f"--dataset {dataset}: it is called {kind}")
    if kind in ("list", "classes") and not rest:
        raise UserError(f"--dataset {dataset} names no file; give {kind}/FILE, as {kind}/some.txt")
    found = finder(Path(root), kind if kind in WHERE else rest, split)
    if not found.paths:
        raise UserError(f"--dataset {dataset}: {root} holds no images of the split {split!r}")
    classes, counts = COUNTS.get(dataset, (len(found.class_names), {}))
    if (len(found.class_names), len(found.paths)) != (classes, counts.get(split, len(found.paths))):
        print(
            f"{dataset}, {split}: {len(found.paths):,} images of {len(found.class_names)} classes, "
            f"where {counts.get(split, 0):,} of {classes} were published"
        )
    return found


def by_timm(root: Path, dataset: str, split: str) -> ByTimm:
    """A folder of class folders, or what timm calls `dataset`."""
    from timm.data import (
        create_dataset,  # takes 1.2 s, which a loader of .beton files need not wait for
    )

    if not dataset:
        check_split(root, split)
    try:
        reader = create_dataset(dataset, root=str(root), split=split).reader
        paths = reader.filenames()
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"{root}: no images found ({error}); it should hold one folder of images per class"
        ) from error
    except ImportError as error:
        raise UserError(
            f"--dataset {dataset} needs a package that is not here ({error}); pip install datasets"
        ) from error
    if not paths:
        raise UserError(f"{root} holds no images; it should hold one folder of images per class")
    samples = getattr(reader, "samples", None)
    labels = np.array(
        [sample[1] for sample in samples] if samples else [reader[i][1] for i in range(len(paths))],
        np.int64,
    )
    names = getattr(reader, "class_to_idx", None) or {
        str(label): label for label in range(labels.max() + 1)
    }
    return ByTimm(
        paths, labels, [name for name, _ in sorted(names.items(), key=lambda item: item[1])], reader
    )


def check_split(root: Path, split: str) -> None:
    """UserError if `root` is no folder, or holds splits but not this one: timm would then read all
    of them as one.
    """
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; give a folder of class folders with images in it")
    there = {path.name for path in root.iterdir() if path.is_dir()}
    wanted = next((names for names in SPLITS if split in names), {split})
    if there & set().union(*SPLITS) and not there & wanted:
        raise UserError(
            f"{root} holds {', '.join(sorted(there))} but no folder {split!r}; name one of them, or the folder of classes"
        )


def of_torchvision(root: Path, name: str, split: str) -> Listed:
    """A set that torchvision reads. Its pickles are opened only if their MD5 is the published
    one.
    """
    import torchvision.datasets as sets

    _, counts = COUNTS[name]
    if split not in counts:
        raise UserError(
            f"--dataset {name} has no split {split!r}; give --split {' or '.join(counts)}"
        )

    def read(download: bool) -> list:
        if name == "flowers102":
            parts = ("train", "val") if split == "trainval" else (split,)
            return [sets.Flowers102(root, part, download=download) for part in parts]
        if name == "svhn":
            return [sets.SVHN(root, split, download=download)]
        return [
            (sets.CIFAR10 if name == "cifar10" else sets.CIFAR100)(
                root, split == "train", download=download
            )
        ]

    try:
        parts = read(download=False)
    except (RuntimeError, FileNotFoundError):  # not there, or not whole
        fault = fault_of(root, name, split)
        try:
            print(f"{name} is not whole in {root} ({fault}); downloading it there")
            parts = read(download=True)
        except (RuntimeError, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"{name} is not whole in {root} ({fault}) and cannot be downloaded ({reason}); put there {WHERE[name]}"
            ) from error
    except ImportError as error:
        raise UserError(
            f"--dataset {name} needs a package that is not here ({error}); pip install scipy"
        ) from error
    if name == "flowers102":
        home = parts[0]._base_folder
        paths = [str(Path(file).relative_to(home)) for part in parts for file in part._image_files]
        labels = np.concatenate([part._labels for part in parts])
        return Listed(paths, labels.astype(np.int64), list(parts[0].classes), home)
    (part,) = parts
    if name == "svhn":  # torchvision has channels first
        pixels, labels, names = (
            part.data.transpose(0, 2, 3, 1),
            part.labels,
            [str(digit) for digit in range(10)],
        )
    else:
        pixels, labels, names = part.data, part.targets, list(part.classes)
    paths = [f"{name}-{split}-{number:06d}.png" for number in range(len(pixels))]
    return Listed(paths, np.array(labels, np.int64), names, root, np.ascontiguousarray(pixels))


def fault_of(root: Path, name: str, split: str) -> str:
    """Which file of a set of torchvision's is not there, or is another than the published one."""
    import torchvision.datasets as sets
    from torchvision.datasets.utils import check_integrity

    if name == "svhn":
        home, files = root, [sets.SVHN.split_list[split][1:3]]
    elif name == "flowers102":
        home, files = (
            root / "flowers-102",
            [sets.Flowers102._file_dict[what] for what in ("label", "setid")],
        )
    else:
        kind = sets.CIFAR10 if name == "cifar10" else sets.CIFAR100
        home, files = (
            root / kind.base_folder,
            [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])],
        )
    for file, published in files:
        if not (home / file).is_file():
            return f"there is no {(home / file).relative_to(root)}"
        if not check_integrity(home / file, published):
            return f"the MD5 of {(home / file).relative_to(root)} is not the published one"
    return "images are missing"


def domainnet(root: Path, name: str, split: str) -> Listed:
    """One domain of DomainNet, from its own lists, of which both must be there; 345 classes, named
    by the folders in them.
    """
    if f"domainnet/{name}" not in COUNTS:
        names = ", ".join(dataset for dataset in COUNTS if dataset.startswith("domainnet/"))
        raise UserError(f"--dataset domainnet/{name}: there is no such domain; choose from {names}")
    if split not in ("train", "test"):
        raise UserError(
            f"--dataset domainnet/{name} has no split {split!r}; give --split train or test"
        )
    lists = {word: root / f"{name}_{word}.txt" for word in ("train", "test")}
    for file in lists.values():
        if not file.exists():
            raise UserError(
                f"{file} is not there; put there {name}.zip, unpacked, and its lists {name}_train.txt and {name}_test.txt"
            )
    return of_list(root, lists[split], COUNTS[f"domainnet/{name}"][0])


def listed(root: Path, name: str, split: str) -> Listed:
    """Files that a list names; it is the split."""
    del split
    return of_list(root, Path(name))


def of_list(root: Path, file: Path, classes: int = 0) -> Listed:
    """Lines "path label"; or of paths alone, whose folder is the class.

    The lists of the other splits, where they stand beside it (`siblings`), are read for the classes
    alone. Without labels the folders of all of them, sorted, are the classes. With labels there are
    `classes`, or one more than the highest label of all.

    Raises UserError that names a line that makes no sense, and if the first or the last image is
    not below `root`; of others that are not there it prints how many, since whoever reads them may
    leave them out.
    """
    most = classes or MOST_CLASSES
    own = entries_of(file, most)
    if not own:
        raise UserError(f'{file} names no images; give it lines "path label" or "class/file"')
    every = list(own)
    for other in siblings(file):
        theirs = entries_of(other, most)
        if theirs and (theirs[0].label is None) != (own[0].label is None):
            with_labels, without = (file, other) if theirs[0].label is None else (other, file)
            raise UserError(
                f"{with_labels} has labels and {without} has none, though by their names they are splits of one dataset; "
                "give labels to both or neither, or move one to another folder"
            )
        every += theirs
    check_paths(root, file, own)
    paths = [entry.path for entry in own]
    if own[0].label is None:
        names = sorted({entry.folder for entry in every})
        number_of = {name: number for number, name in enumerate(names)}
        return Listed(
            paths, np.array([number_of[entry.folder] for entry in own], np.int64), names, root
        )
    first: dict[str, Entry] = {}
    for entry in own:
        earlier = first.setdefault(entry.path, entry)
        if earlier.label != entry.label:
            raise UserError(
                f"{file}, line {entry.line} gives {entry.path} the label {entry.label}, and line {earlier.line} the label "
                f"{earlier.label}; keep one of them"
            )
    return Listed(
        paths,
        np.array([entry.label for entry in own], np.int64),
        names_of_labels(every, classes),
        root,
    )


def siblings(file: Path) -> list[Path]:
    """The lists beside `file` whose names are its own but for the split: that of a_train.txt is
    a_test.txt, and so on.
    """
    words = sorted({"trainval"}.union(*SPLITS))
    places = list(re.finditer(rf"(?<![A-Za-z])({'|'.join(words)})(?![A-Za-z])", file.name))
    if not places:
        return []
    begin, end = places[-1].span()
    others = [
        file.with_name(file.name[:begin] + word + file.name[end:])
        for word in words
        if word != places[-1].group()
    ]
    return [other for other in others if other.is_file()]


def entries_of(file: Path, most: int) -> list[Entry]:
    """The lines of a list, with labels below `most` or all without; UserError names a line that
    makes no sense.
    """
    entries: list[Entry] = []
    for number, line in lines_of(file):
        path, *last = line.rsplit(maxsplit=1)
        label = None
        if last and re.fullmatch(r"[-+]?\d+(\.\d*)?", last[0]):
            digits = last[0].lstrip("0") or "0"
            if not digits.isdecimal() or len(digits) > len(str(most)) or int(digits) >= most:
                raise UserError(
                    f"{file}, line {number} ends in {last[0][:24]}; a label is a whole number from 0 to {most - 1:,}, mend the list"
                )
            label = int(digits)
        else:
            path = line
        folder = Path(path).parent.name
        if label is None and not folder:
            raise UserError(
                f'{file}, line {number}: {path} has no label and no folder; a line is "path label" or "class/file"'
            )
        if entries and (label is None) != (entries[0].label is None):
            raise UserError(
                f"{file}, line {number}: some lines end in a label and some do not, as line {entries[0].line} and this one; "
                f"a label is a whole number from 0 to {most - 1:,}, mend the list"
            )
        entries.append(Entry(number, path, label, folder))
    return entries


def names_of_labels(entries: Sequence[Entry], classes: int) -> list[str]:
    """A label's name is that of its folder, if it has one folder in which no other label's images
    stand (one for all images of a split names no class); else `class 7`, or plain numbers where no
    label has a name. As many as `classes`; 0: one more than the highest label.
    """
    pairs = {(entry.label, entry.folder) for entry in entries if entry.label is not None}
    labels = Counter(folder for _, folder in pairs)
    own = [(label, folder) for label, folder in pairs if folder and labels[folder] == 1]
    folders = Counter(label for label, _ in own)
    name_of = {label: folder for label, folder in own if folders[label] == 1}
    numbers = range(classes or 1 + max(label for label, _ in pairs))
    return [
        name_of.get(number, f"class {number}" if name_of else str(number)) for number in numbers
    ]


def check_paths(root: Path, file: Path, entries: Sequence[Entry]) -> None:
    """UserError if the first or the last image of a list is not below `root`; prints how many of
    the others are not.
    """
    for entry in (entries[0], entries[-1]):
        if not (root / entry.path).is_file():
            raise UserError(
                f"{file}, line {entry.line} names {entry.path}, which is not below {root}; check --data, and that lines are "
                '"path label" or "class/file"'
            )
    # a folder is listed once: a stat of every file of a network disk takes minutes
    there: dict[str, set[str]] = {}
    missing = []
    for entry in entries:
        folder, name = os.path.split(entry.path)
        if folder not in there:
            try:
                there[folder] = set(os.listdir(root / folder))
            except (FileNotFoundError, NotADirectoryError):
                there[folder] = set()
        if name not in there[folder]:
            missing.append(entry)
    if missing:
        first = missing[0]
        print(
            f"{file} names {len(missing):,} images that are not below {root}, the first in line {first.line}: {first.path}"
        )


def lines_of(file: Path) -> list[tuple[int, str]]:
    """Its lines, numbered from 1, without those that are empty. UserError if it cannot be read."""
    try:
        text = file.read_text()
        if "\0" in text:
            raise UnicodeError("a zero byte")
    except OSError as error:
        raise UserError(f"{file}: {explain_os_error(error)}") from error
    except UnicodeError as error:
        raise UserError(f"{file} is no text; give a list of one name a line") from error
    return [
        (number, line.strip())
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    ]


def chosen_classes(root: Path, name: str, split: str) -> Listed:
    """Those class folders that the file `name` lists, numbered in its order."""
    names = [line.split()[0] for _, line in lines_of(Path(name))]
    if not names:
        raise UserError(f"{name} is empty; give it a line for each class folder")
    whole = by_timm(root, "", split)
    missing = [name for name in names if name not in whole.class_names]
    if missing or len(set(names)) != len(names):
        what = f"{missing[0]}, which is no class folder of {root}" if missing else "a class twice"
        raise UserError(f"{name} names {what}; mend the list, or check --data")
    number_of = {whole.class_names.index(name): number for number, name in enumerate(names)}
    kept = [index for index, label in enumerate(whole.labels.tolist()) if label in number_of]
    labels = np.array([number_of[int(whole.labels[index])] for index in kept], np.int64)
    return Listed([whole.paths[index] for index in kept], labels, names, Path(whole.reader.root))


def share_of_each(root: Path, percent: str, split: str) -> Listed:
    """round(n x percent / 100) images of every class of n, one at least, drawn by a generator whose
    seed is the class's number (as Bootstrapping ViTs' published code draws, by its own generator);
    in the folder's order.
    """
    try:
        share = float(percent) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UserError(f"--dataset share/{percent}: a percentage, as share/10")
    whole = by_timm(root, "", split)
    kept = []
    for label in range(len(whole.class_names)):
        all_of_it = np.flatnonzero(whole.labels == label)
        drawn = np.random.default_rng(label).permutation(len(all_of_it))[
            : max(1, round(len(all_of_it) * share))
        ]
        kept.append(np.sort(all_of_it[drawn]))
    order = np.sort(np.concatenate(kept))
    return Listed(
        [whole.paths[index] for index in order],
        whole.labels[order],
        whole.class_names,
        Path(whole.reader.root),
    )

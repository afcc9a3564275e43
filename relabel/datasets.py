"""What samples a dataset has: a folder of class folders, the small sets of the papers, lists of files, parts of a folder.

    (empty)                            a folder of class folders, or of train/ and val/ that hold them
    cifar10 cifar100 svhn flowers102   as torchvision keeps them below the root, downloaded if they are not there and the network allows
    domainnet/NAME                     clipart infograph painting quickdraw real sketch: <root>/<name>_train.txt and _test.txt, as published
    list/FILE                          lines "path label" or "class/file", paths relative to the root
    classes/FILE                       those class folders of the root that FILE names, a line each, in its order (ImageNet-100)
    share/PERCENT                      so many of every class folder's images, always the same (ImageNet 1, 5, 10, 50 %)
    hfds/NAME                          as timm reads it

Small arrays of pixels are handed on as PNG, so everything behind this file reads encoded images only.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from .files import UserError, explain

if TYPE_CHECKING:
    from timm.data.readers.reader import Reader

# Classes and images of each split: DHVT, Table 6; DRLoc, Section 5 (Flowers: train and val together, to test on test); SVHN's own page.
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
SPLITS = ({"train", "training"}, {"val", "valid", "validation", "eval", "evaluation"}, {"test"})  # timm's synonyms
KINDS = ("cifar10", "cifar100", "svhn", "flowers102", "domainnet", "list", "classes", "share", "hfds")
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
    """The samples of `dataset` below `root`; a warning if a published set has not as many as published.

    Raises UserError if it is not there and cannot be downloaded, has no such split, or its list names what is not there.
    """
    kind, _, rest = dataset.partition("/")
    if dataset and kind not in KINDS:
        raise UserError(f"--dataset {dataset}: give none for a folder of class folders, or one of {', '.join(KINDS)} (see --help)")
    if kind in ("", "hfds"):
        return by_timm(root, dataset, split)
    finder: Callable[[Path, str, str], Listed] = {
        "domainnet": domainnet, "list": listed, "classes": chosen_classes, "share": share_of_each
    }.get(kind, of_torchvision)  # fmt: skip
    if kind in WHERE and rest:
        raise UserError(f"--dataset {dataset}: it is called {kind}")
    found = finder(Path(root), rest or kind, split)
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
    from timm.data import create_dataset  # takes 1.2 s, which a loader of .beton files need not wait for

    if not dataset:
        check_split(root, split)
    try:
        reader = create_dataset(dataset, root=str(root), split=split).reader
        paths = reader.filenames()
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"{root}: no images found ({error}); it should hold one folder of images per class") from error
    except ImportError as error:
        raise UserError(f"--dataset {dataset} needs a package that is not here ({error}); pip install datasets") from error
    if not paths:
        raise UserError(f"{root} holds no images; it should hold one folder of images per class")
    samples = getattr(reader, "samples", None)
    labels = np.array([sample[1] for sample in samples] if samples else [reader[i][1] for i in range(len(paths))], np.int64)
    names = getattr(reader, "class_to_idx", None) or {str(label): label for label in range(labels.max() + 1)}
    return ByTimm(paths, labels, [name for name, _ in sorted(names.items(), key=lambda item: item[1])], reader)


def check_split(root: Path, split: str) -> None:
    """UserError if `root` is no folder, or holds splits but not this one: timm would then read all of them as one."""
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; give a folder of class folders with images in it")
    there = {path.name for path in root.iterdir() if path.is_dir()}
    wanted = next((names for names in SPLITS if split in names), {split})
    if there & set().union(*SPLITS) and not there & wanted:
        raise UserError(
            f"{root} holds {', '.join(sorted(there))} but no folder {split!r}; name one of them, or the folder of classes"
        )


def of_torchvision(root: Path, name: str, split: str) -> Listed:
    """A set that torchvision reads. Its pickles are opened only if their MD5 is the published one."""
    import torchvision.datasets as sets

    _, counts = COUNTS[name]
    if split not in counts:
        raise UserError(f"--dataset {name} has no split {split!r}; give --split {' or '.join(counts)}")

    def read(download: bool) -> list:
        if name == "flowers102":
            parts = ("train", "val") if split == "trainval" else (split,)
            return [sets.Flowers102(root, part, download=download) for part in parts]
        if name == "svhn":
            return [sets.SVHN(root, split, download=download)]
        return [(sets.CIFAR10 if name == "cifar10" else sets.CIFAR100)(root, split == "train", download=download)]

    try:
        parts = read(download=False)
    except (RuntimeError, FileNotFoundError):  # not there, or not whole
        try:
            print(f"{name} is not in {root}; downloading it there")
            parts = read(download=True)
        except (RuntimeError, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"{name} is not whole in {root} and cannot be downloaded ({reason}); put there {WHERE[name]}"
            ) from error
    except ImportError as error:
        raise UserError(f"--dataset {name} needs a package that is not here ({error}); pip install scipy") from error
    if name == "flowers102":
        home = parts[0]._base_folder
        paths = [str(Path(file).relative_to(home)) for part in parts for file in part._image_files]
        labels = np.concatenate([part._labels for part in parts])
        return Listed(paths, labels.astype(np.int64), list(parts[0].classes), home)
    (part,) = parts
    if name == "svhn":  # torchvision has channels first
        pixels, labels, names = part.data.transpose(0, 2, 3, 1), part.labels, [str(digit) for digit in range(10)]
    else:
        pixels, labels, names = part.data, part.targets, list(part.classes)
    paths = [f"{name}-{split}-{number:06d}.png" for number in range(len(pixels))]
    return Listed(paths, np.array(labels, np.int64), names, root, np.ascontiguousarray(pixels))


def domainnet(root: Path, name: str, split: str) -> Listed:
    """One domain of DomainNet, from its own lists; classes are the folders that the lists name."""
    if f"domainnet/{name}" not in COUNTS:
        names = ", ".join(dataset for dataset in COUNTS if dataset.startswith("domainnet/"))
        raise UserError(f"--dataset domainnet/{name}: there is no such domain; choose from {names}")
    file = root / f"{name}_{split}.txt"
    if split not in ("train", "test"):
        raise UserError(f"--dataset domainnet/{name} has no split {split!r}; give --split train or test")
    if not file.exists():
        raise UserError(
            f"{file} is not there; put there {name}.zip, unpacked, and its lists {name}_train.txt and {name}_test.txt"
        )
    return of_list(root, file)


def listed(root: Path, name: str, split: str) -> Listed:
    """Files that a list names; it is the split."""
    del split
    return of_list(root, Path(name))


def of_list(root: Path, file: Path) -> Listed:
    """Lines "path label"; or of paths alone, whose folder is the class. UserError names a line that makes no sense."""
    paths, labels, folders = [], [], []
    for number, line in enumerate(lines_of(file), start=1):
        path, space, label = line.rpartition(" ")
        if not (space and label.isdecimal()):
            path, label = line, ""
        if paths and bool(label) != bool(labels[-1]):
            raise UserError(f"{file}, line {number}: some lines end in a label and some do not; mend the list")
        paths.append(path)
        labels.append(label)
        folders.append(Path(path).parent.name)
    if not paths:
        raise UserError(f"{file} names no images")
    missing = next((path for path in (paths[0], paths[-1]) if not (root / path).is_file()), None)
    if missing:
        raise UserError(f"{file} names {missing}, which is not below {root}; check --data")
    if not labels[0]:
        names = sorted(set(folders))
        return Listed(paths, np.array([names.index(folder) for folder in folders], np.int64), names, root)
    numbers = np.array(labels, np.int64)
    folder_of = dict(zip(numbers.tolist(), folders, strict=True))
    if len(set(folder_of.values())) != len(folder_of):  # one folder for all: it is no name of a class
        folder_of = {number: str(number) for number in folder_of}
    # A class without an image in this list keeps its place, so that lists of train and test agree on all numbers.
    names = [folder_of.get(number, f"class {number}") for number in range(int(numbers.max()) + 1)]
    return Listed(paths, numbers, names, root)


def lines_of(file: Path) -> list[str]:
    """Its lines, without those that are empty. UserError if it cannot be read."""
    try:
        return [line.strip() for line in file.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"{file}: {explain(error)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is no text; give a list of one name a line") from error


def chosen_classes(root: Path, name: str, split: str) -> Listed:
    """Those class folders that the file `name` lists, numbered in its order."""
    whole, names = by_timm(root, "", split), [line.split()[0] for line in lines_of(Path(name))]
    missing = [name for name in names if name not in whole.class_names]
    if missing or len(set(names)) != len(names):
        what = f"{missing[0]}, which is no class folder of {root}" if missing else "a class twice"
        raise UserError(f"{name} names {what}; mend the list, or check --data")
    number_of = {whole.class_names.index(name): number for number, name in enumerate(names)}
    kept = [index for index, label in enumerate(whole.labels.tolist()) if label in number_of]
    labels = np.array([number_of[int(whole.labels[index])] for index in kept], np.int64)
    return Listed([whole.paths[index] for index in kept], labels, names, Path(whole.reader.root))


def share_of_each(root: Path, percent: str, split: str) -> Listed:
    """round(n x percent / 100) images of every class of n, one at least, drawn by a generator whose seed is the class's number (as
    Bootstrapping ViTs' released code draws, by its own generator); in the folder's order."""
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
        drawn = np.random.default_rng(label).permutation(len(all_of_it))[: max(1, round(len(all_of_it) * share))]
        kept.append(np.sort(all_of_it[drawn]))
    order = np.sort(np.concatenate(kept))
    return Listed([whole.paths[index] for index in order], whole.labels[order], whole.class_names, Path(whole.reader.root))

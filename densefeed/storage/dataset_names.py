"""Names and numbers that datasets have in common: splits, classes, labels, image files.

Without splits of its own, a dataset is divided by `hold_out`.
"""

import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np

from densefeed.system.errors import UserError
from densefeed.system.files import find_path_fault
from densefeed.system.object_url import ObjectURL
from densefeed.system.terminal import print

# The synonyms that timm accepts, in its order.
SPLITS = (("train", "training"), ("val", "valid", "validation", "eval", "evaluation"), ("test",))
# Endings of image files in class folders, in lower case: those of torchvision's ImageFolder. timm
# reads only the first three.
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
# Stores and batches hold the class ids of score maps in uint16.
MOST_CLASSES = 65_535
# Names that systems and tools put into folders, as a whole: those of macOS and its shares,
# Synology, QNAP, NetApp, Windows, fsck and Python, and all hidden ones (.ipynb_checkpoints,
# .Trash-0, .thumbnails, .AppleDouble, .git, .dvc, ._x.jpg). Not RECYCLER of Windows XP, which may
# be a class.
SYSTEM = re.compile(
    r"(?:^|/)(\.(?!\.?(?:/|$))[^/]*|__MACOSX|Network Trash Folder|Temporary Items|"
    r"TheVolumeSettingsFolder|TheFindByContentFolder|@eaDir|@tmp|@sharebin|@__thumb|@SynoResource|@SynoEAStream|#recycle|#snapshot|"
    r"~snapshot|@Recycle|@Recently-Snapshot|\$RECYCLE\.BIN|System Volume Information|"
    r"found\.\d{3}|lost\+found|__pycache__)(?:/|$)",
    re.IGNORECASE,
)
# Kinds of files, or classes, that a message lists, and characters of each kind.
NAMED, LETTERS = 5, 18
# Images whose paths are hashed or compared at once.
MOST_NAMES = 2**14


def find_synonyms(split: str) -> tuple[str, ...]:
    """Return the names of a split: itself, then those that mean the same."""
    return split, *next((names for names in SPLITS if split in names), ())


def natural_key(text: str) -> list[str | int]:
    """Return a key that sorts names as timm does: without case, numbers by their value."""
    return [int(s) if s.isdecimal() else s for s in re.split(r"(\d+)", text.lower())]


def choose_home(root: Path | ObjectURL, there: set[str], split: str) -> Path | ObjectURL:
    """Return the folder of `split`, or `root`, which holds the folders `there`.

    UserError if it holds splits but not this one (timm would read all of them as one split), or if
    the split is a path, as 2024/train, that is missing.
    """

    def is_there(name: str) -> bool:
        # A disk may not tell Train from train.
        return name in there or (isinstance(root, Path) and (root / name).is_dir())

    there = {name for name in there if not find_system_entry(name)}
    name = next(filter(is_there, find_synonyms(split)), None)
    if name is None and ("/" in split or there & set().union(*SPLITS)):
        held_out = ", or hold out images by --val-fraction 0.15" if split in SPLITS[1] else ""
        raise UserError(
            f"{root} holds {', '.join(sorted(there))} but no folder {split!r}; name one of them, "
            f"or the folder of classes{held_out}"
        )
    return root / name if name else root


def find_system_entry(path: str) -> str:
    """Return a path up to its first hidden or system name; empty if it has none."""
    found = SYSTEM.search(path)
    return path[: found.end(1)] if found else ""


def sort_images(home: Path | ObjectURL, files: Iterable[str]) -> list[str]:
    """Return the images in class folders among the files below `home`, in timm's order.

    Names that are equal to `natural_key`, as 1.jpg and 01.jpg, have the order of their text.
    An image is known by its ending. Hidden names and those of systems (SYSTEM) are left out. Prints
    how many files were left out. UserError for a name that no path can have, and if all images lie
    in no class folder.
    """
    paths, flat, others, system = [], [], Counter(), set()
    for path in files:
        ending = os.path.splitext(path)[1].lower()
        # Counted once for a whole folder: on a disk it is not read.
        if entry := find_system_entry(path):
            system.add(entry)
        elif ending not in ENDINGS:
            others[ending] += 1
        elif fault := find_path_fault(path):
            raise UserError(f"{home}/{path}: this name {fault}; rename it")
        else:
            (paths if "/" in path else flat).append(path)
    if flat and not paths:
        raise UserError(
            f"the images in {home}, as {min(flat)}, lie in no class folder; make a folder of "
            "images for each class, or label and pack by a list: --dataset list/FILE"
        )
    if others:
        print(f"{home}: {describe_others(others)}")
    if system:
        print(f"{home}: {describe_system(system)}")
    if flat:
        print(f"{home}: images left out that lie in no class folder: {len(flat):,}, as {min(flat)}")
    # timm leaves equal names in the order of the disk, which a copy of the folder does not keep.
    return sorted(sorted(paths), key=natural_key)


def hold_out(paths: Sequence[str], labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Choose the validation images of N images, a fraction of each class; bool `[N]`.

    The images of a class are ranked by a hash of their paths whose key is `seed`. The first
    round(fraction * n) of n are chosen: at least one of two or more, and never all. So neither the
    order of the images nor the platform matters, and adding m images to a class moves at most m of
    the others. Images of one path count as one, and stay together.
    """
    key = seed.to_bytes(8, "little")
    digests = (
        hashlib.blake2b(path.encode(errors="surrogateescape"), key=key, digest_size=8).digest()
        for path in paths
    )
    ranks = np.frombuffer(b"".join(digests), ">u8")
    _, first, image_N = np.unique(ranks, return_index=True, return_inverse=True)
    label_U = labels[first]
    # By class, and within a class by rank.
    order = np.argsort(label_U, kind="stable")
    counts = np.bincount(label_U)
    chosen = np.minimum(np.maximum(np.rint(fraction * counts), 1), counts - 1)
    place = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    held_U = np.empty(len(order), bool)
    held_U[order] = place < np.repeat(chosen, counts)
    return held_U[image_N]


# ------------------------------------------------------------------------- classes


def take_class(path: str) -> str:
    """Return the first folder of a path, which is its class; empty without a folder."""
    folder, slash, _ = path.partition("/")
    return folder if slash else ""


def skip_split(path: str) -> str:
    """Remove the folder of a split that a path begins with, if class folders follow it."""
    first, _, rest = path.partition("/")
    return rest if "/" in rest and first in set().union(*SPLITS) else path


def find_classes(paths: Sequence[str], where: object) -> list[str]:
    """Return the class of each image: the first folder of its path, as in torchvision.

    Deeper folders belong to it; prints how many images lie in such. (timm takes the innermost
    folder, which merges cat/monday and dog/monday.) UserError if the folders are splits.
    """
    deep = [path for path in paths if path.count("/") > 1]
    folders = list(map(take_class, paths))
    if deep and set().union(*SPLITS).issuperset(folders) and len(set(folders)) > 1:
        raise UserError(
            f"{where} holds splits where class folders should be: {', '.join(sorted(set(folders)))}"
            "; give each split a folder or file of its own"
        )
    if deep:
        print(
            f"{where}: the class of an image is its first folder; {len(deep):,} images lie deeper, "
            f"as {deep[0]} of class {take_class(deep[0])!r}"
        )
    return folders


def number_folders(paths: Sequence[str], where: object) -> tuple[np.ndarray, list[str]]:
    """Number the classes of N images by their folders' names, in timm's order.

    Returns int64 `[N]` and the names; see `find_classes`.
    """
    folders = find_classes(paths, where)
    names = sorted(set(folders), key=lambda name: (natural_key(name), name))
    number = {name: n for n, name in enumerate(names)}
    return np.array([number[folder] for folder in folders], np.int64), names


def begin_at_classes(groups: Sequence[Sequence[str]], where: object = None) -> list[list[str]]:
    """Remove the folders above the class folders from paths in files, as train/cat/1.jpg.

    These are the folders that all images of a group (a split) share, up to one called as a split,
    and then those that all groups share. A folder is left to each image that has one. Prints the
    latter, if `where` names the file: they may be the only class and its subfolders.
    """
    starts = []
    for paths in groups:
        shared = find_shared_folders(paths)
        splits = [n for n, name in enumerate(shared, 1) if name in set().union(*SPLITS)]
        starts.append(max(splits, default=0))
    cut = [
        [path.split("/", start)[-1] for path in paths]
        for paths, start in zip(groups, starts, strict=True)
    ]
    shared = find_shared_folders([path for paths in cut for path in paths])
    if shared and where:
        print(f"{where}: the classes are the folders in {'/'.join(shared)}, which all images share")
    start = len(shared)
    return [[path.split("/", start)[-1] for path in paths] for paths in cut]


def find_shared_folders(paths: Sequence[str]) -> list[str]:
    """Return the folders that all paths begin with, but not the last folder of any path."""
    if not paths:
        return []
    first, last = (path.split("/")[:-1] for path in (min(paths), max(paths)))
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    shared = [name for name, _ in pairs]
    return shared[: max(0, min(path.count("/") for path in paths) - 1)]


def find_unused(labels: np.ndarray, class_names: Sequence[str]) -> list[str]:
    """Return the names of the classes that no label is."""
    counts = np.bincount(labels, minlength=len(class_names))
    return [class_names[label] for label in np.flatnonzero(counts == 0).tolist()]


def match_forms(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return `names` as `known` has them, whose Unicode form may be another.

    A Mac writes "é" as two characters. Names stay as they are where one of either would stand for
    several.
    """
    forms = {unicodedata.normalize("NFC", name): name for name in known}
    matched = [forms.get(unicodedata.normalize("NFC", name), name) for name in names]
    clear = len(forms) == len(set(known)) and len(set(matched)) == len(set(names))
    return matched if clear else list(names)


def match_numbers(names: Sequence[str], count: int) -> list[int]:
    """Return the classes, of `count`, that names of data without class names number; else [].

    Files written by stock FFCV, and shards of numbered labels, have numbers for names.
    """
    known = all(name.isdecimal() for name in names) and max(map(int, names), default=0) < count
    return [int(name) for name in names] if known else []


def describe_lookalikes(names: Iterable[str], known: Iterable[str] = ()) -> str:
    """Describe a name that differs from an earlier one, or one of `known`, in case or form only.

    The form is Unicode's, see `match_forms`. Empty if there is none.
    """

    def fold(name: str) -> str:
        return unicodedata.normalize("NFC", name).casefold()

    first = {fold(name): name for name in known}
    for name in names:
        earlier = first.setdefault(fold(name), name)
        if earlier != name:
            return f"{earlier!a} and {name!a} differ in case or Unicode form only"
    return ""


def check_two_classes(
    root: object, class_names: Sequence[str], labels: np.ndarray | None = None
) -> None:
    """Raise UserError for one class alone, which a classifier cannot learn.

    Of `labels`, int64 `[N]`, all of which are known, none may have a number that is not 0 alone:
    the classes below it have no name and no image.
    """
    alone = len(class_names) == 1
    if labels is not None and len(labels) and labels.min() == labels.max():
        filled = [f"class {number}" for number in range(int(labels[0]))]
        alone |= list(class_names[:-1]) == filled
    if alone:
        raise UserError(
            f"{root} has one class alone, {class_names[-1]!r}; give images of two classes or more: "
            "the folder that holds a folder of images for each class, or a list or files that "
            "label both"
        )


def list_some(names: Sequence[str]) -> str:
    """Write out the first names of a list."""
    return ", ".join(names[:NAMED]) + ", ..." * (len(names) > NAMED)


def describe_difference(one: Sequence[str], where: str, other: Sequence[str], there: str) -> str:
    """Describe how the class names of `where` differ from those of `there`, another list."""
    first, second = set(one), set(other)
    lacking = [name for name in other if name not in first]
    more = [name for name in one if name not in second]
    alone = [(more, where), (lacking, there)]
    if parts := [f"only {place}: {list_some(names)}" for names, place in alone if names]:
        return "; ".join(parts)
    n = next((n for n, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), 0)
    return f"the same names in another order: class {n} is {one[n]} {where} and {other[n]} {there}"


def hash_images(paths: Sequence[str], labels: np.ndarray, sizes: Iterable[int | None] = ()) -> str:
    """Hash all paths and labels in order, then the byte `sizes` of sampled files, by SHA-256.

    None is the size of a file that cannot be opened.
    """
    digest = hashlib.sha256()
    # In parts: the text of all images would take 140 bytes of memory for each.
    for start in range(0, len(paths), MOST_NAMES):
        part = slice(start, start + MOST_NAMES)
        names = zip(paths[part], labels[part].tolist(), strict=True)
        text = "\n".join(f"{path}\t{label}" for path, label in names)
        digest.update((f"\n{text}" if start else text).encode())
    for size in sizes:
        digest.update(b"unreadable" if size is None else str(size).encode())
    return digest.hexdigest()


def same_images(one: str, other: str) -> bool:
    """Whether two fingerprints are of the same images.

    The names of files, after the hyphen, are compared where both have them: a list of the items of
    a dataset does not state them.
    """
    (first, _, names), (second, _, others) = one.partition("-"), other.partition("-")
    return first == second and (names == others or not (names and others))


def check_label(label: object, where: str) -> int:
    """Return `label`; UserError if it is invalid, before all up to the highest get names."""
    if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < MOST_CLASSES:
        raise UserError(
            f"{where} has the label {str(label)[:24]!r}; a label is an integer from 0 to "
            f"{MOST_CLASSES - 1:,}: write the number of its class there, or remove the image"
        )
    return label


def describe_others(others: Counter) -> str:
    """Describe files that were left out, counted by their endings."""
    noun = "files with other endings were" if others.total() > 1 else "file with another ending was"
    return f"{others.total():,} {noun} left out: {list_kinds(others)}"


def describe_system(entries: Iterable[str]) -> str:
    """Describe hidden and system files and folders that were left out, by their names."""
    names = [entry.rpartition("/")[2] for entry in entries]
    kinds = Counter("._*" if name.startswith("._") else name for name in names)
    noun = "hidden or system names were" if len(names) > 1 else "hidden or system name was"
    return f"{len(names):,} {noun} left out: {list_kinds(kinds)}"


def list_kinds(counts: Counter) -> str:
    """List the most frequent kinds and their counts."""
    common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    kinds = [f"{kind[:LETTERS] or 'no ending'} {count:,}" for kind, count in common]
    more = f" and {len(kinds) - NAMED} more" if len(kinds) > NAMED else ""
    return f"{', '.join(kinds[:NAMED])}{more}"

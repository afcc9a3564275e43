"""Names and numbers that datasets have in common: splits, classes, labels, image files."""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
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
# Images whose paths are hashed or compared at once.
MOST_NAMES = 2**14
# Endings that a message lists, and characters of each.
NAMED, LETTERS = 5, 12


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

    name = next(filter(is_there, find_synonyms(split)), None)
    if name is None and ("/" in split or there & set().union(*SPLITS)):
        raise UserError(
            f"{root} holds {', '.join(sorted(there))} but no folder {split!r}; name one of them, "
            "or the folder of classes"
        )
    return root / name if name else root


def sort_images(home: Path | ObjectURL, files: Iterable[str]) -> list[str]:
    """Return the images among the files of a folder, by their endings, in timm's order.

    Prints how many files were left out. UserError for a name that no path can have.
    """
    paths, others = [], Counter()
    for path in files:
        ending = os.path.splitext(path)[1].lower()
        if ending not in ENDINGS:
            others[ending] += 1
        elif fault := find_path_fault(path):
            raise UserError(f"{home}/{path}: this name {fault}; rename it")
        else:
            paths.append(path)
    if others:
        print(f"{home}: {describe_others(others)}")
    # Names that are equal to `natural_key`, as 1.jpg and 01.jpg, stay in the order of the disk, as
    # in timm: another one would change the fingerprint of the stores that exist.
    return sorted(paths, key=natural_key)


def number_folders(paths: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    """Number the folders that N images lie in, in timm's order; return int64 `[N]`, and names."""
    folders = [path.rpartition("/")[0].rpartition("/")[2] for path in paths]
    names = sorted(set(folders), key=lambda name: (natural_key(name), name))
    number = {name: n for n, name in enumerate(names)}
    return np.array([number[folder] for folder in folders], np.int64), names


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


def check_label(label: object, where: str) -> int:
    """Return `label`; UserError if it is invalid, before all up to the highest get names."""
    if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < MOST_CLASSES:
        raise UserError(
            f"{where} has the label {str(label)[:24]!r}; a label is an integer from 0 to "
            f"{MOST_CLASSES - 1:,}"
        )
    return label


def describe_others(others: Counter) -> str:
    """Describe files that were left out, counted by their endings."""
    common = sorted(others.items(), key=lambda item: (-item[1], item[0]))
    kinds = [f"{ending[:LETTERS] or 'no ending'} {count:,}" for ending, count in common]
    more = f" and {len(kinds) - NAMED} more" if len(kinds) > NAMED else ""
    noun = "files with other endings were" if others.total() > 1 else "file with another ending was"
    return f"{others.total():,} {noun} left out: {', '.join(kinds[:NAMED])}{more}"

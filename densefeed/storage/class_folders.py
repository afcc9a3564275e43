"""Datasets of class folders: all of them, those that a file names, or a share of their images."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from densefeed.storage.dataset_names import (
    ENDINGS,
    choose_home,
    find_system_entry,
    match_forms,
    number_folders,
    sort_images,
)
from densefeed.storage.image_shards import check_folders
from densefeed.storage.listed import Listed, subset
from densefeed.system.errors import UserError, explain_os_error
from densefeed.system.files import is_folder, read_lines
from densefeed.system.terminal import warn

# Times that links may lead to folders read before. Two in each folder of a chain lead to 2^n.
MOST_REPEATS = 1024


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

"""Lists of images, "path label" or "class/file", and the classes of all splits of a dataset.

Number and names of the classes belong to a dataset, not to a split. Lists whose file names differ
only in the word for the split (a_train.txt, a_test.txt) are therefore read together for them, so a
class without images in one split has the same number and name in both.
"""

import csv
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from densefeed.storage.dataset_names import (
    MOST_CLASSES,
    SPLITS,
    begin_at_classes,
    describe_system,
    find_classes,
    find_system_entry,
    skip_split,
    take_class,
)
from densefeed.storage.listed import Listed
from densefeed.system.errors import UserError
from densefeed.system.files import find_path_fault, read_lines
from densefeed.system.terminal import print, warn

# Columns of a CSV, with a header, in lower case.
PATH_COLUMNS, LABEL_COLUMN = ("path", "file", "filename", "file_name", "image"), "label"


class Entry(NamedTuple):
    """A line of a list."""

    line: int  # from 1
    path: str
    label: int | str | None  # in a CSV also the name of a class


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

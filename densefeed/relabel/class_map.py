"""Class maps: let a teacher of other classes label this data.

A file assigns classes of the teacher to classes of the data.
"""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from densefeed.storage.dataset_names import MOST_CLASSES
from densefeed.system.errors import UserError
from densefeed.system.files import read_lines
from densefeed.system.json_files import make_unique, read_json

# Bytes of a JSON file: 512 for each of the most classes that a dataset has.
MOST_BYTES = 512 * MOST_CLASSES
# Characters of a cell that a message shows.
SHOWN = 48


class ClassMap(NamedTuple):
    """The class of the data that each class of a teacher becomes."""

    # int64 [M], classes of the teacher, ascending; the others become none.
    source: Tensor
    # int64 [M], the class that each becomes; every class of the data occurs.
    target: Tensor
    classes: int  # of the data


def merge_classes(logits: Tensor, class_map: ClassMap) -> Tensor:
    """Merge logits `[..., K]` of a teacher's classes into those of the data, `[..., classes]`.

    A merged logit is the logsumexp of its parts, so probabilities of merged classes add up. The
    probability of classes that become none is dropped: the results are the probabilities of the
    data's classes given that a cell shows one of them. `name_unmapped` keeps it as one more class,
    whose logit is minus infinity if no class becomes none.
    """
    source, target, classes = class_map
    logits = logits.index_select(-1, source)
    peak = logits.new_full((*logits.shape[:-1], classes), -torch.inf)
    # Minus infinity is neutral for a maximum.
    peak = peak.scatter_reduce(-1, target.expand_as(logits), logits, "amax")
    # Each class relative to its own greatest logit. Relative to the cell's, e^-104 would be 0 and
    # its logarithm not finite.
    share = (logits - peak.index_select(-1, target)).exp()
    return peak + torch.zeros_like(peak).index_add_(-1, target, share).log()


def name_unmapped(class_map: ClassMap, num_teacher: int) -> ClassMap:
    """Add one class after those of the data, which the teacher's unmapped classes become."""
    target = torch.full((num_teacher,), class_map.classes)
    target[class_map.source] = class_map.target
    return ClassMap(torch.arange(num_teacher), target, class_map.classes + 1)


def read_class_map(
    path: Path, teacher_names: Sequence[str], num_teacher: int, data_names: Sequence[str]
) -> ClassMap:
    """Read a class map from a file.

    The file is JSON, an object from a teacher's class to a class of the data (null: none), or CSV,
    two columns of the same (second column empty: none), with or without the line `teacher,data`. A
    class of the teacher is one of `teacher_names` (empty if they are unknown) or its number, from
    0; a class of the data is its name. Classes that the file does not contain become none.

    Raises UserError if the file cannot be read, contains a class that does not exist or one of the
    teacher's twice, or assigns nothing to a class of the data. It names the line of a CSV.
    """
    place = {name: index for index, name in enumerate(teacher_names)}
    wanted = {name: index for index, name in enumerate(data_names)}
    if len(wanted) < len(data_names):
        name = next(name for name, number in wanted.items() if data_names.index(name) != number)
        raise UserError(
            f"{path}: two classes of the data are called {name[:SHOWN]!r}, which a class map "
            "cannot tell apart; rename one"
        )
    becomes = {}
    read = _read_json if path.suffix.lower() == ".json" else _read_csv
    for where, theirs, ours in read(path):
        # A name goes first, because names can be numbers too.
        number = place.get(theirs, _parse_number(theirs, num_teacher))
        if number >= num_teacher:
            known = f"names such as {teacher_names[0]} and " if teacher_names else ""
            raise UserError(
                f"{where}: the teacher has no class {theirs[:SHOWN]!r}; use {known}numbers from 0 "
                f"to {num_teacher - 1}"
            )
        if number in becomes:
            raise UserError(
                f"{where} contains the teacher's class {theirs[:SHOWN]!r} twice; remove one of them"
            )
        if ours is not None and ours not in wanted:
            raise UserError(
                f"{where}: class {ours[:SHOWN]!r} is not in the data ({data_names[0]!r} is); "
                "correct this name"
            )
        becomes[number] = wanted.get(ours)
    reached = set(becomes.values())
    without = [name for name, index in wanted.items() if index not in reached]
    if without:
        more = f" and {len(without) - 1} more" if without[1:] else ""
        raise UserError(
            f"{path}: no class of the teacher becomes {without[0]!r}{more}; assign one to each "
            "class of the data"
        )
    # Ascending, so that equal maps have equal hashes however the file orders its lines.
    pairs = sorted(pair for pair in becomes.items() if pair[1] is not None)
    source, target = torch.tensor(pairs).T.contiguous()
    return ClassMap(source, target, len(wanted))


def _parse_number(text: str, num_teacher: int) -> int:
    """Return the number that `text` is, or `num_teacher` if it is none below that."""
    digits = text.lstrip("0") or "0"
    # The length is compared first: `int` refuses more than 4,300 digits with an error of its own.
    if not text.isdecimal() or len(digits) > len(str(num_teacher)):
        return num_teacher
    return min(int(digits), num_teacher)


def _read_csv(path: Path) -> Iterator[tuple[str, str, str | None]]:
    """Yield where it stands, a class of the teacher, and a class of the data or None."""
    first = True
    for number, line in read_lines(path):
        where = f"{path}, line {number}"
        try:
            # Strict: a quote must be closed in its line.
            (row,) = csv.reader([line], strict=True)
        except csv.Error as error:
            raise UserError(f"{where} is not valid CSV ({error}); correct it") from None
        cells = [cell.strip() for cell in row]
        if not any(cells):
            continue
        is_title, first = first and [cell.lower() for cell in cells] == ["teacher", "data"], False
        if is_title:
            continue
        if len(cells) != 2:
            raise UserError(
                f"{where}: {','.join(cells)[:SHOWN]!r} has {len(cells):,} columns; a class map "
                "has two, teacher,data"
            )
        yield where, cells[0], cells[1] or None


def _read_json(path: Path) -> Iterator[tuple[str, str, str | None]]:
    """Yield what `_read_csv` yields."""
    pairs = read_json(path, "correct it", largest=MOST_BYTES, make=make_unique)
    for theirs, ours in pairs.items():
        if not isinstance(ours, str | None):
            raise UserError(
                f'{path} must be an object such as {{"teacher\'s class": "class of the data"}}, '
                "with null for none"
            )
        yield str(path), theirs, ours

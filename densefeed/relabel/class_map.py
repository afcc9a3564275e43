"""Class maps: let a teacher of other classes label this data.

A file assigns classes of the teacher to classes of the data.
"""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from densefeed.system.errors import UserError


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
    data's classes given that a cell shows one of them.
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


def read_class_map(
    path: Path, teacher_names: Sequence[str], num_teacher: int, data_names: Sequence[str]
) -> ClassMap:
    """Read a class map from a file.

    The file is JSON, an object from a teacher's class to a class of the data (null: none), or CSV,
    two columns of the same (second column empty: none), with or without the line `teacher,data`. A
    class of the teacher is one of `teacher_names` (empty if they are unknown) or its number, from
    0; a class of the data is its name. Classes that the file does not contain become none.

    Raises UserError if the file cannot be read, contains a class that does not exist or one of the
    teacher's twice, or assigns nothing to a class of the data.
    """
    place = {name: index for index, name in enumerate(teacher_names)}
    wanted = {name: index for index, name in enumerate(data_names)}
    becomes = {}
    for theirs, ours in _read_pairs(path):
        # A name goes first, because names can be numbers too. What is neither becomes
        # `num_teacher`, which is out of range.
        number = place.get(theirs, int(theirs) if theirs.isdecimal() else num_teacher)
        if number >= num_teacher:
            known = f"names such as {teacher_names[0]} and " if teacher_names else ""
            raise UserError(
                f"{path}: the teacher has no class {theirs!r}; use {known}numbers from 0 to "
                f"{num_teacher - 1}"
            )
        if number in becomes:
            raise UserError(
                f"{path} contains the teacher's class {theirs!r} twice; remove one of the lines"
            )
        if ours is not None and ours not in wanted:
            raise UserError(
                f"{path}: the data has no class {ours!r}, its first is {data_names[0]!r}; correct "
                "this name"
            )
        becomes[number] = wanted.get(ours)
    without = [name for name, index in wanted.items() if index not in becomes.values()]
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


def _read_pairs(path: Path) -> list[tuple[str, str | None]]:
    """Read pairs of a teacher's class and a class of the data, or None."""
    try:
        # Spreadsheets begin a CSV with a byte order mark.
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such class map; check the path") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text; a class map is JSON or CSV") from None
    if path.suffix.lower() == ".json":
        return _parse_json(path, text)
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    rows = [row for row in rows if any(row)]
    if rows and [cell.lower() for cell in rows[0]] == ["teacher", "data"]:
        rows = rows[1:]
    for row in rows:
        if len(row) != 2:
            raise UserError(
                f"{path}: {','.join(row)!r} has {len(row)} columns; a class map has two, "
                "teacher,data"
            )
    return [(theirs, ours or None) for theirs, ours in rows]


def _parse_json(path: Path, text: str) -> list[tuple[str, str | None]]:
    """Parse the pairs of `_read_pairs` from the text of a JSON file."""
    try:
        # A list of pairs, because a dictionary would hide a class that is there twice.
        pairs = json.loads(text, object_pairs_hook=list)
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}); correct it") from None
    # With this hook an object is a list of tuples, and an array a list of anything else.
    whole = isinstance(pairs, list) and all(isinstance(pair, tuple) for pair in pairs)
    if not whole or not all(isinstance(value, str | None) for _, value in pairs):
        raise UserError(
            f'{path} must be an object such as {{"teacher\'s class": "class of the data"}}, '
            "with null for none"
        )
    return pairs

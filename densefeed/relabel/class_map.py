"""Class maps: how a teacher of other classes labels this data. A file says which class of the data
each of its becomes.
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
    """Which of a teacher's classes become which of the data's."""

    source: (
        Tensor  # int64 [M], classes of the teacher, ascending; those that are not here become none
    )
    target: Tensor  # int64 [M], what each becomes; every class of the data at least once
    classes: int  # of the data


def merge_classes(logits: Tensor, class_map: ClassMap) -> Tensor:
    """Logits `[..., K]` of a teacher's classes as those of the data's, `[..., classes]`: the
    logsumexp of all that become one.

    So probabilities of merged classes add up. That of classes that become none is left out: what
    comes are the probabilities of the data's classes given that a cell shows one of them.
    """
    source, target, classes = class_map
    logits = logits.index_select(-1, source)
    peak = logits.new_full((*logits.shape[:-1], classes), -torch.inf)
    peak = peak.scatter_reduce(-1, target.expand_as(logits), logits, "amax")
    # Each class beside its own greatest: beside the cell's, e^-104 would be 0 and its log not
    # finite.
    return (
        peak
        + torch.zeros_like(peak)
        .index_add_(-1, target, (logits - peak.index_select(-1, target)).exp())
        .log()
    )


def read_class_map(
    path: Path, teacher_names: Sequence[str], num_teacher: int, data_names: Sequence[str]
) -> ClassMap:
    """The class map in a file.

    The file is JSON, an object of a teacher's class to a class of the data (null: none), or CSV,
    two columns of the same (a second column left empty: none) with or without the line
    `teacher,data`. A teacher's class is one of `teacher_names` (empty if nobody knows them) or its
    number, from 0; one of the data is its name. Classes that the file leaves out become none.

    Raises UserError if the file cannot be read, names a class that is not there, one of the teacher
    twice, or leaves a class of the data without any.
    """
    place = {name: index for index, name in enumerate(teacher_names)}
    wanted = {name: index for index, name in enumerate(data_names)}
    becomes: dict[int, int] = {}
    seen = set()
    for theirs, ours in _pairs(path):
        number = place.get(theirs, int(theirs) if theirs.isdecimal() else num_teacher)
        if number >= num_teacher:
            known = f"names as {teacher_names[0]} and " if teacher_names else ""
            raise UserError(
                f"{path}: the teacher has no class {theirs!r}; it takes {known}numbers from 0 to {num_teacher - 1}"
            )
        if number in seen:
            raise UserError(
                f"{path} names the teacher's class {theirs!r} twice; a class can become only one"
            )
        seen.add(number)
        if ours is None:
            continue
        if ours not in wanted:
            raise UserError(
                f"{path}: the data has no class {ours!r}, its first is {data_names[0]!r}; mend this name"
            )
        becomes[number] = wanted[ours]
    reached = set(becomes.values())
    without = [name for name, index in wanted.items() if index not in reached]
    if without:
        more = f" and {len(without) - 1} more" if without[1:] else ""
        raise UserError(
            f"{path}: no class of the teacher becomes {without[0]!r}{more}; name one for each class of the data"
        )
    source = sorted(becomes)
    return ClassMap(
        torch.tensor(source), torch.tensor([becomes[number] for number in source]), len(wanted)
    )


def _pairs(path: Path) -> list[tuple[str, str | None]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such class map; check the path") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text; a class map is JSON or CSV") from None
    if path.suffix.lower() == ".json":
        try:
            # A list of pairs and not a dictionary, which would hide what is said twice.
            pairs = json.loads(text, object_pairs_hook=list)
        except json.JSONDecodeError as error:
            raise UserError(f"{path} is not JSON ({error}); mend it") from None
        whole = isinstance(pairs, list) and all(isinstance(pair, tuple) for pair in pairs)
        if not whole or not all(value is None or isinstance(value, str) for _, value in pairs):
            raise UserError(
                f'{path} must be an object like {{"teacher\'s class": "class of the data"}}, null for none'
            )
        return pairs
    rows = [
        [cell.strip() for cell in row]
        for row in csv.reader(text.splitlines())
        if any(cell.strip() for cell in row)
    ]
    if rows and [cell.lower() for cell in rows[0]] == ["teacher", "data"]:
        rows = rows[1:]
    for row in rows:
        if len(row) != 2:
            raise UserError(
                f"{path}: {','.join(row)!r} has {len(row)} columns; a class map has two, teacher,data"
            )
    return [(theirs, ours or None) for theirs, ours in rows]

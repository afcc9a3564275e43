"""Read JSON from files that may be truncated, damaged or hostile: one sentence for every fault."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from densefeed.system.errors import UserError
from densefeed.system.file_kinds import name_kind
from densefeed.system.files import open_regular

# Bytes of a file. A list of empty lists takes 25 times as many in memory, here 100 MB and 2 s.
LARGEST = 2**22
# Digits of an integer: all of 64 bits fit. Longer ones overflow in floats and in NumPy.
MOST_DIGITS = 20
KINDS = {dict: "an object", list: "a list"}


def read_json(
    path: Path,
    remedy: str,
    kind: type = dict,
    largest: int = LARGEST,
    make: Callable[[list[tuple[str, Any]]], dict] = dict,
) -> Any:
    """Return the dict, or the list if that is the `kind`, which a JSON file holds.

    `largest` is the limit of its bytes; `make` makes each dict of its names and values. Raises
    UserError that names the file and ends in `remedy` for anything else in it, OSError if it cannot
    be read.
    """
    with open_regular(path) as file:
        content = file.read(largest + 1)
    try:
        if len(content) > largest:
            raise ValueError(f"it has more than {largest / 2**20:.0f} MiB")
        value = parse_json(content, make)
        if not isinstance(value, kind):
            raise ValueError(f"it does not hold {KINDS[kind]}")
    except ValueError as error:
        kind = name_kind(path)
        if kind not in ("", "a JSON file"):
            raise UserError(f"{path} is {kind}, and not a JSON file; {remedy}") from None
        raise UserError(f"{path} is damaged ({error}); {remedy}") from None
    return value


def parse_json(content: bytes, make: Callable[[list[tuple[str, Any]]], dict] = dict) -> Any:
    """Parse JSON strictly. Raises ValueError with the reason.

    Python's parser accepts NaN, infinite numbers, integers that no float can hold, and halves of
    surrogate pairs, which fail only where they are used.
    """
    # Some editors write a byte order mark.
    text = content.decode("utf-8-sig")
    try:
        value = json.loads(
            text,
            parse_constant=parse_float,
            parse_float=parse_float,
            parse_int=parse_int,
            object_pairs_hook=make,
        )
        # No file can be written with half of a surrogate pair, which only an escape can spell.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def make_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of an object. Raises ValueError if a name is in it twice."""
    value = {}
    for name, one in pairs:
        if name in value:
            raise ValueError(f"{name[:MOST_DIGITS]!r} is there twice")
        value[name] = one
    return value


def parse_float(text: str) -> float:
    """Convert a number. Raises ValueError if it is not finite."""
    value = float(text)
    if value - value != 0:
        raise ValueError(f"{text[:MOST_DIGITS]} is not a finite number")
    return value


def parse_int(text: str) -> int:
    """Convert an integer. Raises ValueError if it has too many digits."""
    if len(text) > MOST_DIGITS:
        raise ValueError(f"it has an integer of {len(text):,} digits")
    return int(text)


def is_number(value: object) -> bool:
    """Whether a value of a JSON file is a number; True and False are none."""
    return type(value) in (int, float)


def check_number(path: Path, name: str, value: object, most: float, remedy: str) -> None:
    """Raise UserError if a value of a JSON file is not a number from 0 to `most`.

    The error names the file and the value, and ends in `remedy`.
    """
    if not is_number(value) or not 0 <= value <= most:
        raise UserError(f"{path} is damaged ({name} is not a number from 0 to {most:,}); {remedy}")

"""Options: nested frozen dataclasses whose leaves are the options of a command.

A class of options derives from `Options` and declares the bounds of its values in the annotations.
The command line is flat, so every leaf of nested classes needs a unique name; where the name of the
field is too short for that, `tyro.conf.arg(name=...)` sets one.
"""

import ast
import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import tyro
from typeguard import CollectionCheckStrategy, TypeCheckError
from typeguard import check_type as check
from tyro.conf import arg
from tyro.constructors import PrimitiveConstructorSpec

from densefeed.system.errors import UserError
from densefeed.system.object_url import ObjectURL, parse_location

Nested = TypeVar("Nested")
Class = TypeVar("Class", bound=type)


@dataclass(frozen=True)
class Bounds:
    """Smallest and largest value of a number, both inclusive."""

    low: float
    high: float = math.inf

    def check(self, name: str, value: float) -> None:
        """Raise UserError with the name of the option for a number out of bounds or not finite."""
        check_integers(name, value)
        # Infinity lies within bounds that have no upper end.
        if self.low <= value <= self.high and math.isfinite(value):
            return
        finite = "" if math.isfinite(value) else " and finite"
        low, high, given = (f"{n:,}".removesuffix(".0") for n in (self.low, self.high, value))
        bounds = f"at least {low}{finite}" if self.high == math.inf else f"from {low} to {high}"
        raise UserError(f"{flag(name)} is {given}, and must be {bounds}")


TYPES = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    Path: "a Path",
}
Count = Annotated[int, Bounds(1)]
NonNegative = Annotated[float, Bounds(0)]
NonNegativeInt = Annotated[int, Bounds(0)]
Fraction = Annotated[float, Bounds(0, 1)]


def list_values(metavar: str, **how: str) -> Any:
    """Return the annotation of an option of several values, for a --help that is read with ease.

    tyro itself prints `[INT [INT ...]]` and `(default: )`. `how` are arguments of `tyro.conf.arg`.
    """

    def show(default: str) -> str:
        return f"(default: {default or 'none'})"

    return arg(metavar=f"{metavar} ...", help_behavior_hint=show, **how)


Texts = Annotated[tuple[str, ...], list_values("STR")]
Integers = Annotated[tuple[int, ...], list_values("INT")]
Numbers = Annotated[tuple[float, ...], list_values("FLOAT")]
# A local path, or a URL of object storage, which a Path would not keep.
Location = Annotated[
    Path | ObjectURL,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH|URL",
        instance_from_str=lambda words: parse_location(words[0]),
        is_instance=lambda value: isinstance(value, Path | ObjectURL),
        str_from_instance=lambda value: [str(value)],
    ),
]


class Beside(str):
    """What overrides an option in `Options.unused`, in place of what would give it an effect."""


class Options:
    """Base of all classes of options."""

    def __post_init__(self) -> None:
        """Raise UserError for a value of another type, out of its bounds or not in its Literal.

        Python callers are not checked by the command line. Their lists, arrays and numbers of NumPy
        become tuples and Python's numbers, which JSON and checkpoints can hold.
        """
        for name, hint in hints(type(self)).items():
            value, leaf = to_plain(getattr(self, name)), leaf_name(name, hint)
            object.__setattr__(self, name, value)
            # An option that every run must give has no value in a recipe.
            if value is tyro.MISSING:
                continue
            check_type(flag(leaf), hint, value)
            check_integers(leaf, value)
            for item in metadata(hint):
                if isinstance(item, Bounds):
                    item.check(leaf, value)

    def unused(self) -> dict[str, str]:
        """Return the leaves that these values leave without effect, and what would give them one.

        Both as on the command line, the leaf with underscores: `{"momentum": "--optimizer sgd"}`.
        Where another option overrides the leaf, it is named by `Beside("--frozen-statistics")`.
        """
        return {}

    @classmethod
    def check_known(cls, words: Iterable[str], command: str) -> None:
        """Raise UserError for an option of a command line that the command does not have."""
        check_known(words, [leaf_name(*field) for field in hints(cls).items()], command)

    def check_named(self, words: Iterable[str]) -> None:
        """Raise UserError for an option of a command line that has no effect beside the others."""
        refuse_unused(unused_leaves(self), named_options(words))


def own_first(options: Class) -> Class:
    """Order the fields of a dataclass for --help: its own, then those that it inherits."""
    fields = options.__dataclass_fields__
    own = {name: fields[name] for name in options.__annotations__}
    options.__dataclass_fields__ = own | fields
    return options


def check_type(name: str, hint: Any, value: Any) -> None:
    """Raise UserError, which calls the value `name`, if it is not of the type `hint`."""
    try:
        # By default it checks the first item of a tuple alone.
        check(value, hint, collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS)
        # Typeguard takes True for a number, as PEP 484 does.
        if has_bool(value):
            text = str(hint)
            if "bool" not in text and ("int" in text or "float" in text):
                raise TypeCheckError("True and False are not numbers")
    except TypeCheckError as error:
        kind = get_args(hint)[0] if metadata(hint) else hint
        if get_origin(kind) is Literal:
            known = ", ".join(map(str, get_args(kind)))
            raise UserError(f"{name} {value!r} is unknown; choose one of {known}") from None
        wanted = TYPES.get(kind, f"of type {kind}")
        raise UserError(f"{name} is {value!r}, and must be {wanted}") from error


def has_bool(value: Any) -> bool:
    """Whether a value is True or False, or a tuple with one of them."""
    return any(map(has_bool, value)) if isinstance(value, tuple) else isinstance(value, bool)


def check_integers(name: str, value: Any) -> None:
    """Raise UserError for an integer, or a tuple with one, that signed 64 bits do not hold.

    Larger ones fit neither C's integers nor a float.
    """
    for item in value if isinstance(value, tuple) else ():
        check_integers(name, item)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UserError(f"{flag(name)} is an integer beyond 64 bits; give a smaller one")


@functools.cache
def hints(options: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass, with their annotations."""
    found = get_type_hints(options, include_extras=True)
    return {field.name: found[field.name] for field in dataclasses.fields(options)}


def metadata(hint: Any) -> tuple:
    """Return the metadata that `Annotated` adds to a type."""
    return getattr(hint, "__metadata__", ())


def leaf_name(name: str, hint: Any) -> str:
    """Return the name of an option on the command line, with underscores."""
    # `tyro.conf.arg` has the name; Bounds have none.
    given = (getattr(item, "name", None) for item in metadata(hint))
    return next(filter(None, given), name).replace("-", "_")


def flag(name: str) -> str:
    """Return an option as written on the command line."""
    return f"--{name.replace('_', '-')}"


def named_options(words: Iterable[str]) -> set[str]:
    """Return the options that a command line names, with underscores: `--size=96` is `size`.

    `--no-x` is `no_x`.
    """
    names = (word[2:].partition("=")[0] for word in words if word.startswith("--"))
    return {name.replace("-", "_") for name in names}


def check_known(words: Iterable[str], known: Collection[str], command: str) -> None:
    """Raise UserError for an option of a command line that is not among the `known` names.

    tyro's own message has up to 40 lines.
    """
    for name in sorted(named_options(words)):
        bare = name.removeprefix("no_")
        # tyro's own print completions for a shell.
        if name and not name.startswith("tyro") and not {name, bare} & {*known, "help"}:
            close = ", ".join(map(flag, get_close_matches(bare, known, cutoff=0.5)))
            near = f"try {close}, or see" if close else "see"
            raise UserError(f"unknown option {flag(name)}; {near} {command} --help")


def leaves(options: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of every leaf of nested options."""
    for name, hint in hints(type(options)).items():
        value = getattr(options, name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value)
        else:
            yield leaf_name(name, hint), value


def unused_leaves(options: Any) -> dict[str, str]:
    """Return `Options.unused` of all classes of nested options."""
    found = dict(options.unused()) if isinstance(options, Options) else {}
    for field in dataclasses.fields(options):
        if dataclasses.is_dataclass(value := getattr(options, field.name)):
            found |= unused_leaves(value)
    return found


def refuse_unused(unused: Mapping[str, str], given: Collection[str]) -> None:
    """Raise UserError for a `given` option that is in `unused`, which is that of `Options`."""
    for name, needed in unused.items():
        if name in given:
            why = f"without {needed}; remove it, or give {needed}"
            if isinstance(needed, Beside):
                why = f"beside {needed}; give one of the two"
            raise UserError(f"{flag(name)} has no effect {why}")


def with_options(options: Nested, **values: Any) -> Nested:
    """Return nested options with other values of some leaves, or other classes of options.

    A leaf is set by its name on the command line, a class of options by the name of its field.
    TypeError for an unknown name.
    """
    changed = replace_leaves(options, values)
    # Config completes its sections when it is made: an objective may be registered since.
    if changed is options:
        changed = dataclasses.replace(options)
    # `replace_leaves` removed all names that it found.
    if values:
        raise TypeError(f"{type(options).__name__} has no option {next(iter(values))!r}")
    return changed


def replace_leaves(options: Nested, values: dict[str, Any]) -> Nested:
    """Return nested options with the `values` that they have, which are popped.

    A section in which nothing changes is the same object: a copy would be checked again.
    """
    changed = {}
    for name, hint in hints(type(options)).items():
        value, leaf = getattr(options, name), leaf_name(name, hint)
        if dataclasses.is_dataclass(values.get(name)):
            changed[name] = values.pop(name)
        elif dataclasses.is_dataclass(value):
            part = replace_leaves(value, values)
            if part is not value:
                changed[name] = part
        elif leaf in values:
            changed[name] = values.pop(leaf)
    return dataclasses.replace(options, **changed) if changed else options


def from_dict(template: Nested, values: Mapping[str, Any]) -> Nested:
    """Return nested options from the dictionary that `json` made of `dataclasses.asdict`.

    Classes are those of `template`. Raises KeyError or TypeError where fields differ.
    """
    # A checkpoint may have tensors anywhere, which raise errors of other types.
    if not isinstance(values, Mapping):
        raise TypeError(f"a {type(values).__name__} stands for {type(template).__name__}")
    found, kinds = {}, get_type_hints(type(template))
    for name in hints(type(template)):
        kind, value, own = kinds[name], values[name], getattr(template, name)
        if dataclasses.is_dataclass(own):
            found[name] = from_dict(own, value)
        elif value is not None and Path in (kind, *get_args(kind)):
            if not isinstance(value, str) or "\0" in value:
                raise TypeError(f"{name} is not a path")
            # JSON has no paths.
            found[name] = parse_location(value) if ObjectURL in get_args(kind) else Path(value)
        else:
            found[name] = value
    return type(template)(**found)


def to_plain(value: Any) -> Any:
    """Convert lists and NumPy's arrays to tuples, and NumPy's numbers to Python's."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    return tuple(map(to_plain, value)) if isinstance(value, list | tuple) else value


def parse_arguments(words: tuple[str, ...], option: str) -> dict[str, object]:
    """Parse the NAME=VALUE words of an option. Raises UserError for a word of another form."""
    arguments = {}
    for word in words:
        name, equals, value = word.partition("=")
        try:
            arguments[name.strip()] = ast.literal_eval(value.strip())
        # The last two are raised for a value that is nested too deep.
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            equals = ""
        if not equals or not name.strip().isidentifier():
            raise UserError(
                f"{option} {word[:100]!r} is not NAME=VALUE with a Python number, string or tuple, "
                "for example depth=12"
            )
    return arguments

"""A recipe: a name, a base, and the options in which it differs from the base."""

import shlex
from dataclasses import dataclass
from typing import Any

import tyro

from densefeed.system.options import flag, with_options
from densefeed.training.config import Config

PACKED = "--loader ffcv --data train.beton --val val.beton"
ADE20K = "--data ADEChallengeData2016 --val ADEChallengeData2016"
COCO = "--data coco --val coco/annotations/instances_val2017.json"
SCENE_FOLDERS = "--data photos/scenes --val photos/scenes"
SCENES = "--loader ffcv --data quickstart/train.beton --val quickstart/val.beton"


@dataclass(frozen=True)
class Recipe:
    """A named config.

    Attributes:
        text: what it is, its command, its source and published result, as --help prints it.
    """

    name: str
    base: "Config | Recipe"
    options: dict[str, Any]
    text: str

    def __call__(self) -> Config:
        """Return the config."""
        base = self.base() if isinstance(self.base, Recipe) else self.base
        return with_options(base, **self.options)


def table(
    about: str, base: Config | Recipe, source: str = "", data: str = PACKED, **rows: tuple
) -> dict[str, Recipe]:
    """Return recipes that share a description, a base, a paper's table and the command's data.

    A row is a tuple: the options that differ from the base; where there is one, the published
    top-1, or what the table states in place of it; and the weights to begin from. Recipes of the
    papers, whose data are PACKED, ADE20K or COCO, were not run.
    """
    recipes = {}
    for name, (options, *more) in rows.items():
        figure, init = (*more, "", "")[:2]
        start = f" --init {init}" if init else ""
        notes = [f"{source}: {figure}." if source and figure else source or figure]
        if isinstance(base, Recipe):
            notes.append(f"Otherwise as {base.name}.")
        notes.append(f"The row: {show_options(options)}.")
        if data in (PACKED, ADE20K, COCO):
            notes.append("Not run here.")
        command = f"densefeed train {name} {data} --out runs/{name}{start}"
        text = "\n\n".join([about, command, " ".join(filter(None, notes))])
        recipes[name] = Recipe(name, base, options, text)
    return recipes


def show_options(options: dict[str, Any]) -> str:
    """Return options as on a command line, without those that have no default."""
    words = []
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else flag(f"no_{name}"))
        elif value is not tyro.MISSING:
            words += [flag(name), *list_words(value)]
    return shlex.join(words)


def list_words(value: Any) -> list[str]:
    """Return the words of a value: of pairs all numbers one after the other, as tyro reads them."""
    if isinstance(value, tuple):
        return [word for part in value for word in list_words(part)]
    return [str(value)]

"""Commands and tables of documents: what train.py would run, and the models that it would build."""

import inspect
import shlex
from functools import cache

import densefeed.train as training
from densefeed.models.meta_device import meta_device
from densefeed.recipes import RECIPES, command_line
from densefeed.training.config import Config

from .runs import model_for

FOLDERS = ["--data", "a", "--val", "b", "--out", "c"]
# The help texts are read from the source in every call of `main`: a third of its time.
READ_SOURCE = cache(inspect.getsource)


def parse(command: str, monkeypatch) -> Config:
    """Return the config that train.py would run for a command as shown in a document.

    The command line has only the recipe of the command, because every call of `main` makes all
    recipes that it has, which takes six times as long.
    """
    words, given = shlex.split(command), []
    assert words[:2] == ["densefeed", "train"]
    monkeypatch.setattr(inspect, "getsource", READ_SOURCE)
    monkeypatch.setattr(command_line, "RECIPES", {words[2]: RECIPES[words[2]]})
    monkeypatch.setattr("sys.argv", [*words[1:], *(FOLDERS if "--data" not in words else [])])
    monkeypatch.setattr(training, "train", given.append)
    training.main()
    return given[0]


def count_parameters(config: Config, num_classes: int = 1000) -> int:
    """Count the parameters of the model of a config, on the meta device."""
    with meta_device():
        model = model_for(config, num_classes)
    return sum(parameter.numel() for parameter in model.parameters())


def table_rows(text: str, columns: int) -> list[list[str]]:
    """Return the cells of all Markdown table rows of `columns` columns, without heads and rules."""
    split = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    return [cells for cells in split if len(cells) == columns and "`" in "".join(cells)]

"""Recipes: functions that return a Config, and state their command, source and published result.

A recipe is a base and the options in which it differs. ABLATIONS.md, beside this file, lists the
commands for the tables of the papers.
"""

import inspect
from collections.abc import Callable
from types import ModuleType

from densefeed.recipes import bootstrapping, deit, dhvt, drloc, lvvit, micro, quickstart
from densefeed.training.config import Config


def collect(module: ModuleType) -> list[Callable[[], Config]]:
    """Return the recipes that a module defines: its functions without parameters."""
    functions = (f for f in vars(module).values() if inspect.isfunction(f))
    own = (f for f in functions if f.__module__ == module.__name__)
    return [f for f in own if not inspect.signature(f).parameters]


RECIPES = [
    recipe
    for module in (lvvit, deit, bootstrapping, drloc, dhvt, micro, quickstart)
    for recipe in collect(module)
]

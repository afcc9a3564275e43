"""Reads a command line that names a recipe and the options that differ from it."""

import sys

import tyro

from densefeed.objectives import check_unused
from densefeed.recipes import RECIPES
from densefeed.recipes.recipe import Recipe
from densefeed.system.options import named_options, with_options
from densefeed.system.terminal import STDOUT, name_stream
from densefeed.training.config import Config, check_recipe, choose_sizes


def read_config(about: str, **values: object) -> Config:
    """Read the command line: a recipe's name, then any option.

    `about` is the text of --help; `values` replace those of every recipe.
    """

    def describe(recipe: Recipe) -> str:
        """One line of each in the list of recipes; in a recipe's own --help its text."""
        return recipe.text if recipe.name in sys.argv else recipe.text.partition("\n")[0]

    recipes = {
        name: (describe(recipe), with_options(recipe(), **values))
        for name, recipe in RECIPES.items()
    }
    check_recipe(sys.argv[1:2], list(recipes))
    flat = (tyro.conf.OmitArgPrefixes,)
    with name_stream(STDOUT):
        config = tyro.extras.overridable_config_cli(recipes, description=about, config=flat)
    given = named_options(sys.argv[2:])
    # tyro does not return the name of the recipe that it chose.
    check_unused(config, recipes[sys.argv[1]][1], given)
    return choose_sizes(config, given)

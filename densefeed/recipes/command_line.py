"""Reads a command line that names a recipe and the options that differ from it."""

import sys
from itertools import groupby
from pathlib import Path

import tyro

from densefeed.objectives import check_unused
from densefeed.recipes import PAPERS, RECIPES
from densefeed.system.options import check_known, leaves, named_options, with_options
from densefeed.system.terminal import STDOUT, name_stream, print
from densefeed.training.config import Config, check_recipe, choose_sizes


def read_config(about: str, **values: object) -> Config:
    """Read the command line: a recipe's name, then any option.

    `about` is the text of --help; `values` replace those of every recipe.
    """

    paper, words = "", sys.argv[1:]
    if words and words[0] in PAPERS:
        paper, *words = words
    if words and words[0] in ("-h", "--help"):
        for line in list_recipes(paper) if paper else list_papers(about):
            print(line)
        sys.exit()
    recipes = {
        name: (recipe.text, with_options(recipe(), **values)) for name, recipe in RECIPES.items()
    }
    check_recipe(sys.argv[1:2], list(recipes), PAPERS)
    known = [name for name, _ in leaves(recipes[sys.argv[1]][1])]
    check_known(sys.argv[2:], known, f"{Path(sys.argv[0]).name} {sys.argv[1]}")
    flat = (tyro.conf.OmitArgPrefixes,)
    with name_stream(STDOUT):
        config = tyro.extras.overridable_config_cli(recipes, description=about, config=flat)
    given = named_options(sys.argv[2:])
    # tyro does not return the name of the recipe that it chose.
    check_unused(config, recipes[sys.argv[1]][1], given)
    return choose_sizes(config, given)


def list_papers(about: str) -> list[str]:
    """Return the lines of --help without a recipe: the papers and how many recipes each has."""
    program = Path(sys.argv[0]).name
    lines = [f"usage: {program} RECIPE [options]", "", *about.strip().splitlines(), ""]
    lines += ["Recipes, by paper:", ""]
    for short, paper in PAPERS.items():
        title = (paper.__doc__ or "").partition("\n")[0].removeprefix("Recipes of ")
        lines += [f"  {short:15}{title[:1].upper()}{title[1:]}"]
        lines += [f"{'':17}{len(paper.RECIPES)} recipes, e.g. {next(iter(paper.RECIPES))}"]
    return [
        *lines,
        "",
        f"{program} PAPER --help lists the recipes of a paper, as {program} "
        f"{next(iter(PAPERS))} --help;",
        f"{program} RECIPE --help prints what a recipe is, its source, and all options.",
    ]


def list_recipes(paper: str) -> list[str]:
    """Return the names of a paper's recipes, a line each, below their common description."""
    recipes, lines = PAPERS[paper].RECIPES.values(), []
    for about, alike in groupby(recipes, lambda recipe: recipe.text.partition("\n")[0]):
        lines += [about, *(f"    {recipe.name}" for recipe in alike)]
    return lines

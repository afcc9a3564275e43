"""Recipes: tables by paper, whose rows state their options, command, source and published result.

A recipe is a base and the options in which it differs. ABLATIONS.md, beside this file, lists the
commands for the tables of the papers.
"""

from densefeed.recipes import bootstrapping, deit, dhvt, drloc, lvvit, micro, quickstart

RECIPES = {
    name: recipe
    for paper in (lvvit, deit, bootstrapping, drloc, dhvt, micro, quickstart)
    for name, recipe in paper.RECIPES.items()
}

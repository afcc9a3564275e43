"""Recipes: tables by paper, whose rows state their options, command, source and published result.

A recipe is a base and the options in which it differs. ABLATIONS.md, beside this file, lists the
commands for the tables of the papers.
"""

from densefeed.recipes import (
    bootstrapping,
    deit,
    detection,
    dhvt,
    drloc,
    lvvit,
    micro,
    photos,
    quickstart,
    segmentation,
)

# Modules by their short names, by which the command line lists their recipes.
PAPERS = {
    paper.__name__.rpartition(".")[2]: paper
    for paper in (
        *(lvvit, deit, bootstrapping, drloc, dhvt, micro, quickstart, photos),
        *(segmentation, detection),
    )
}
RECIPES = {name: recipe for paper in PAPERS.values() for name, recipe in paper.RECIPES.items()}

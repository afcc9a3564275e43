"""The table of the papers' claims: no row is missing, commands parse, figures are the recipes'."""

import re
import shlex
from collections import Counter
from inspect import getdoc
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
import timm
import tyro

from benchmarks.step import StepBenchmark
from densefeed.storage.datasets import COUNTS
from densefeed.tools.model_costs import ModelCosts, costs_by_name
from densefeed.tools.pack_dataset import Packing
from densefeed.tools.validate import Validation
from densefeed.training.config import Config, check_unused

from .documents import FOLDERS, NAMED, count_parameters, parse, table_rows
from .runs import objective_for

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/results/papers.md"
ABLATIONS = (ROOT / "densefeed/recipes/ABLATIONS.md").read_text()
# Rows of each table, counted in the papers; one for a figure without commands, one for each curve.
# Table 9 of Token Labeling includes section 4.3; FLOPs are those of six networks in seven rows.
EXPECTED = {
    "Token Labeling (arXiv 2104.10858)": {
        **{"Figure 1": 1, "Figure 2": 1, "Figure 3": 1, "Table 1": 2, "Table 2": 3, "Table 3": 8},
        **{"Table 4": 7, "Table 5": 3, "Table 6": 3, "Table 7": 5, "Table 8": 4, "Table 9": 6},
        **{"Table 10": 36, "Table 10, FLOPs": 6},
    },
    "Token Labeling, supplementary material": {
        **{"Table 1": 1, "Table 2": 1, "Table 3": 1, "Table 4": 1, "Table 5": 1},
        **{"Figure 1": 1, "Figure 2": 1},
    },
    "DHVT, supplementary material (arXiv 2210.05958)": {
        **{"Table 1": 13, "Table 2": 4, "Table 3": 3, "Section 2.2.2": 4, "Table 4": 7},
        **{"Table 5": 12, "Section 2.1": 1, "Table 6": 6, "Table 7": 5, "Table 8": 5},
        **{"Table 9": 35, "Table 10": 6, "Table 11": 8, "Figure 1": 8, "Figure 2": 2},
        **{"Figure 3": 1, "Figure 4": 1, "Figure 5": 1, "Figure 6": 1, "Figure 7": 1},
    },
    "DRLoc, supplementary material (arXiv 2106.03746)": {
        **{"Figure 2": 1, "Table 6": 6, "Table 7": 4, "Table 8": 8, "Table 9": 2, "Table 10": 4},
        **{"Table 11": 4, "Table 12": 2, "Table 13": 2, "Figure 3": 6, "Table 14": 6},
        **{"Table 15": 1, "Table 16": 9},
    },
    "Bootstrapping ViTs (arXiv 2112.03552)": {
        **{"Figure 1": 1, "Figure 2": 1, "Figure 3": 1, "Figure 4": 1, "Table 1": 20},
        **{"Table 2": 4, "Table 3": 7, "Table 4": 7, "Table 5": 4, "Table 6": 2, "Table 7": 2},
        **{"Figure 5": 6, "Figure 6": 3, "Figure 7": 1, "Figure 8": 1, "Table 8": 1},
        **{"Table 9": 1, "Table 10": 1, "Table 11": 1},
    },
}
PROGRAMS = {
    "tools/validate.py": Validation,
    "tools/model_costs.py": ModelCosts,
    "tools/pack_dataset.py": Packing,
    "benchmarks.step": StepBenchmark,
}
NO_COMMAND = r"not built: |quoted there, with .* epochs: |no claim: |Table \d+ of the|the values of"
HERE = rf"{NO_COMMAND}|(quoted there; )?not run: needs |equal|[\d,.]+ |\[[\d.]+\s% on a CPU\]"
# Figures of docstrings that no table has: parameters in millions, DRLoc's published logs, epochs
# and accuracies of the published weights.
ELSEWHERE = {"29.1", "88.29", "86.17", "85.5", "86.4"}


class Claim(NamedTuple):
    """A row of the page."""

    paper: str
    where: str
    row: str
    command: str
    figures: str
    here: str


def read_claims() -> list[Claim]:
    """Return all rows of the page."""
    claims = []
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.M)[1:]:
        paper = section.partition("\n")[0]
        for line in section.splitlines():
            if line.startswith("| ") and not line.startswith("| where"):
                claims.append(Claim(paper, *(c.strip() for c in line.strip("| ").split(" | "))))
    return claims


CLAIMS = read_claims()
COMMANDS = sorted({claim.command.strip("`") for claim in CLAIMS if claim.command[0] == "`"})


def numbers(text: str) -> list[str]:
    """Return the decimal numbers of a text."""
    return re.findall(r"(?<![\d.,])\d+\.\d+(?![\d.])", text)


def linked_rows(claim: Claim) -> int:
    """Return the rows that a claim stands for: those behind its link, else one."""
    found = re.match(r"\[(\d+) commands\]", claim.command)
    return int(found[1]) if found else 1


def read_config(command: str) -> Config:
    """Return the config of a `train.py` command, by tyro as `main` does."""
    name, *words = shlex.split(command)[2:]
    recipe, flat = NAMED[name](), (tyro.conf.OmitArgPrefixes,)
    config = tyro.cli(Config, default=recipe, args=[*words, *FOLDERS], config=flat)
    check_unused(config, recipe)
    return config


def test_no_table_figure_or_row_is_missing():
    found = {paper: Counter() for paper in EXPECTED}
    for claim in CLAIMS:
        found[claim.paper][claim.where] += linked_rows(claim)
    assert {paper: dict(rows) for paper, rows in found.items()} == EXPECTED
    # No row twice.
    assert len({(c.paper, c.where, c.row) for c in CLAIMS}) == len(CLAIMS)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: f"{c.paper[:6]} {c.where} {c.row[:20]}")
def test_each_row_has_a_state_and_a_command_where_it_can_have_one(claim):
    assert re.match(HERE, claim.here), claim.here
    assert (claim.command == "–") == bool(re.match(NO_COMMAND, claim.here))
    for path in re.findall(r"tests/\S+\.py", claim.here):
        assert (ROOT / path).exists()
    # A figure that was measured is that of the page to which the row links.
    for page, figure in re.findall(r"\[digit scenes\]\((\S+)\) ([\d.]+\s±\s[\d.]+)", claim.here):
        assert f"| {figure} |" in (PAGE.parent / page).read_text()
    for figure in re.findall(r"\[([\d.]+\s%) on a CPU\]\(steps.md", claim.here):
        (row,) = re.findall(rf"\| {claim.row.split()[0]} \| (.*) \[", steps_of_drloc())
        assert row == figure


def steps_of_drloc() -> str:
    """Return the section of the measured costs of DRLoc."""
    return (PAGE.parent / "steps.md").read_text().partition("## DRLoc")[2].partition("\n## ")[0]


def section_of(anchor: str) -> str:
    """Return the section of the ablations with this anchor."""
    for section in re.split(r"^## ", ABLATIONS, flags=re.M)[1:]:
        title = section.partition("\n")[0]
        if re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") == anchor:
            return section
    raise AssertionError(f"no heading has the anchor {anchor}")


@pytest.mark.parametrize(
    "claim", [c for c in CLAIMS if linked_rows(c) > 1], ids=lambda c: f"{c.paper[:6]} {c.where}"
)
def test_linked_rows_are_those_of_the_ablations(claim):
    section = section_of(re.search(r"#([\w-]+)\)", claim.command)[1])
    if claim.figures == "curves":
        # The two figures share a curve.
        assert len(table_rows(section, 3)) == 9
        return
    rows = table_rows(section, 4)
    assert len(rows) == linked_rows(claim)
    assert claim.figures.split(" / ") == [paper for *_, paper in rows]


@pytest.mark.parametrize(
    "claim", [c for c in CLAIMS if "of the paper" in c.here], ids=lambda c: c.where
)
def test_tables_of_the_supplementary_are_in_the_paper(claim):
    where = re.match(r"Table \d+", claim.here)[0]
    main = [c.figures for c in CLAIMS if c.paper == CLAIMS[0].paper and c.where == where]
    assert set(claim.figures.split(" / ")) <= set(" / ".join(main).split(" / "))


def options_of(command: str) -> str:
    """Return what a parser can refuse: options with their values, for a tool their names alone."""
    if "train.py" in command:
        return re.sub(r"(train\.py) \w+", r"\1", command)
    return command.split()[1] + " ".join(re.findall(r" --[\w-]+", command))


@pytest.mark.parametrize(
    "command", {options_of(c): c for c in COMMANDS}.values(), ids=lambda c: c[7:]
)
def test_commands_parse(command):
    """One for each list of options: recipes differ in their defaults alone."""
    words = shlex.split(command)
    assert words[0] == "python"
    if words[1] == "train.py":
        objective_for(read_config(command))
        return
    program = words[1] if words[1] != "-m" else words[2]
    tyro.cli(PROGRAMS[program], args=words[words.index(program) + 1 :])


def test_models_and_recipes_of_commands_exist():
    named = {name for c in COMMANDS for name in re.findall(r"--model (\w+)|costs\.py (\w+)", c)}
    assert all(map(timm.is_model, filter(None, chain(*named))))
    assert {c.split()[2] for c in COMMANDS if "train.py" in c} <= set(NAMED)


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in COMMANDS if "train.py" in c], ids=lambda c: c[16:])
def test_training_commands_run_as_train_py_reads_them(command, monkeypatch):
    config = parse(command, monkeypatch)
    assert config == read_config(command)
    objective_for(config)
    assert count_parameters(config) > 1e6


def test_figures_of_a_recipe_are_those_of_its_help():
    """Commands without options that change a recipe; and no figure stands in the help alone."""
    own = [c for c in CLAIMS if c.command.startswith("`python train.py")]
    for claim in own:
        words = shlex.split(claim.command.strip("`"))[2:]
        if len(words) == 1 or (NAMED[words[0]]().model.init is tyro.MISSING and len(words) == 3):
            assert set(numbers(claim.figures)) <= set(numbers(getdoc(NAMED[words[0]]))), claim
    listed = {number for claim in CLAIMS for number in numbers(claim.figures)} | ELSEWHERE
    for name, recipe in NAMED.items():
        stated = {number for number in numbers(getdoc(recipe)) if 8 < float(number) < 100}
        assert stated <= listed, (name, stated - listed)


def test_sizes_of_domainnet_are_those_that_are_checked():
    rows = [c for c in CLAIMS if "DHVT" in c.paper and c.where == "Table 6"]
    for claim in rows:
        classes, splits = COUNTS[f"domainnet/{claim.row}"]
        assert claim.figures == f"{splits['train']:,} / {splits['test']:,} / {classes}"


COUNTED = [c for c in CLAIMS if re.match(r"[\d,.]+ ", c.here)]


@pytest.mark.slow
@pytest.mark.parametrize("claim", COUNTED, ids=lambda c: f"{c.where} {c.row}")
def test_counted_figures(claim):
    if "parameters at 100 classes" in claim.here:
        counted = count_parameters(read_config(claim.command.strip("`")), 100)
        assert claim.here == f"{counted:,} parameters at 100 classes"
        return
    options = tyro.cli(ModelCosts, args=shlex.split(claim.command.strip("`"))[2:])
    costs, _ = costs_by_name(options.models[0], options.size)
    assert claim.here in (
        f"{costs.parameters:,} / {costs.without_attention:.2f} G",
        f"{costs.whole:.2f} G",
    )

"""The table of the papers' claims: its rows and figures are the papers', and its commands parse."""

import re
import shlex
import tomllib
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest
import timm
import tyro
from torch import nn

from benchmarks.step import StepBenchmark
from densefeed.models.meta_device import meta_device
from densefeed.objectives import check_unused
from densefeed.recipes import RECIPES
from densefeed.storage.published_datasets import DOMAIN_CLASSES, DOMAINS
from densefeed.tools.explain import Explanations
from densefeed.tools.model_costs import Costs, ModelCosts, costs_by_name, measure_costs
from densefeed.tools.pack_dataset import Packing
from densefeed.tools.relabel_imagenet import Labeling
from densefeed.tools.validate import Validation
from densefeed.training.config import Config

from .documents import FOLDERS, count_parameters, parse, table_rows
from .runs import objective_for

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/results/papers.md"
ABLATIONS = (ROOT / "densefeed/recipes/ABLATIONS.md").read_text()
PROGRAMS = {
    "validate": Validation,
    "explain": Explanations,
    "costs": ModelCosts,
    "label": Labeling,
    "pack": Packing,
    "benchmarks.step": StepBenchmark,
}
NO_COMMAND = (
    r"not built: |quoted there, with .* epochs: |quoted there, no weights are published: "
    r"|no claim: |Table \d+ of the|the values of|the pages? of"
)
HERE = (
    rf"{NO_COMMAND}|(quoted there; )?not run: needs |equal|[\d,.]+ "
    r"|\[[\d.]+\s(% on a CPU|GB)\]"
)
# The figures of the papers' tables, row by row, and of the recipes' help.
PAPERS = tomllib.loads((ROOT / "tests/paper_figures.toml").read_text())
HELP = PAPERS.pop("help")


# Columns that are no results of the row's run, so the help of its recipe does not have them.
SIZES = {"ImageNet", "parameters", "FLOPs", "epochs", "pixels", "training pixels", "test pixels"}


class Claim(NamedTuple):
    """A row of the page."""

    paper: str
    where: str
    row: str
    command: str
    figures: str
    here: str


def read_claims() -> list[Claim]:
    """Return all rows of the page, but for those of its last section, the contradictions."""
    claims = []
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.M)[1:-1]:
        paper = section.partition("\n")[0]
        for line in section.splitlines():
            if line.startswith("| ") and not line.startswith("| where"):
                claims.append(Claim(paper, *(c.strip() for c in line.strip("| ").split(" | "))))
    return claims


def commands_of(claim: Claim) -> list[str]:
    """Return the commands of a row, in the order in which to run them."""
    return re.findall(r"`([^`]+)`", claim.command)


CLAIMS = read_claims()
ABLATION_COMMANDS = re.findall(r"`(densefeed train [^`]+)`", ABLATIONS)
COMMANDS = sorted({command for claim in CLAIMS for command in commands_of(claim)})
LINKED = re.compile(r"\[(\d+) commands\]\(\S+#([\w-]+)\)")
LINKS = [claim for claim in CLAIMS if LINKED.match(claim.command)]


def numbers(text: str) -> list[str]:
    """Return the decimal numbers of a text."""
    return re.findall(r"(?<![\d.,])\d+\.\d+(?!\d|\.\d)", text)


def split_row(line: str) -> tuple[str, str]:
    """Return the name and the figures of a line of a table of PAPERS."""
    name, _, figures = line.rpartition(" | ")
    return name, figures


def list_columns(row: str) -> list[str]:
    """Return the names of columns that a row's name ends with: `a / b / c` after its last comma."""
    found = re.search(r", ([^,]*(?: / [^,]*)+)$", row)
    return found[1].split(" / ") if found else []


def read_config(command: str) -> Config:
    """Return the config of a `train.py` command, by tyro as `main` does."""
    name, *words = shlex.split(command)[2:]
    recipe, flat = RECIPES[name](), (tyro.conf.OmitArgPrefixes,)
    config = tyro.cli(Config, default=recipe, args=[*words, *FOLDERS], config=flat)
    check_unused(config, recipe)
    return config


def expand(claim: Claim) -> list[tuple[str, str]]:
    """Return the names and figures of the rows that a claim stands for: those behind its link."""
    link = LINKED.match(claim.command)
    if not link or "curve" in claim.figures:
        return [(claim.row, claim.figures)]
    rows = [(row[0], row[-1]) for row in table_rows(section_of(link[2]), 4)]
    assert claim.figures == " / ".join(figures for _, figures in rows)
    return rows


@pytest.mark.parametrize("paper", PAPERS)
def test_rows_and_figures_are_those_of_the_paper(paper):
    """Every table and figure has its rows, in the paper's order, and no other."""
    assert {claim.paper for claim in CLAIMS} == set(PAPERS)
    found = {}
    for claim in CLAIMS:
        if claim.paper == paper:
            found.setdefault(claim.where, []).extend(expand(claim))
    for where, text in PAPERS[paper].items():
        assert found.pop(where) == [split_row(line) for line in text.strip().splitlines()], where
    assert not found


TABLES = [(paper, where) for paper, tables in PAPERS.items() for where in tables]


@pytest.mark.parametrize(("paper", "where"), TABLES, ids=lambda name: name[:16])
def test_outside_rows_have_a_figure_for_each_column_of_their_table(paper, where):
    """The columns that the table's first row names, or the row itself; one where none is named.

    A row that stands for several has a figure of each.
    """
    rows = [split_row(line) for line in PAPERS[paper][where].strip().splitlines()]
    for name, figures in rows:
        several = re.match(r"(?:all|both) ?(\d*) (?:rows|columns)", name)
        columns = len(list_columns(name) or list_columns(rows[0][0]) or [name])
        if several and figures != "settings":
            columns = int(several[1] or 2)
        given = figures.split(" / ")
        assert len(given) == columns, name
        assert all(figure.strip() for figure in given), name


def test_outside_tables_of_networks_have_their_parameters_and_operations():
    """The tables of the texts whose head has a column for them, by the number of their networks."""
    wanted = {
        ("Token Labeling (", "Table 1"): (["parameters", "FLOPs", "epochs"], 2),
        ("Token Labeling (", "Table 10"): (
            ["parameters", "FLOPs", "training pixels", "test pixels"],
            36,
        ),
        ("DHVT", "Table 1"): (["ImageNet", "FLOPs", "epochs", "pixels"], 13),
        ("DHVT", "Table 6"): (["classes", "images per class"], 6),
        ("DHVT", "Table 7"): (["parameters", "FLOPs"], 5),
        ("DHVT", "Table 8"): (["ImageNet", "FLOPs"], 5),
        ("DHVT", "Table 9"): (["parameters", "FLOPs", "pixels"], 35),
        ("DHVT", "Table 10"): (["parameters", "FLOPs"], 6),
        ("DHVT", "Table 11"): (["parameters", "FLOPs", "MLP", "S&E", "heads", "depth", "width"], 8),
    }
    for (paper, where), (columns, count) in wanted.items():
        rows = [c for c in CLAIMS if c.paper.startswith(paper) and c.where == where]
        assert list_columns(rows[0].row)[-len(columns) :] == columns
        assert len(rows) == count


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
    for figure in re.findall(r"\[([\d.]+ GB)\]\(labeling.md\)", claim.here):
        assert f" {figure} (c) |" in (PAGE.parent / "labeling.md").read_text()


def steps_of_drloc() -> str:
    """Return the section of the measured costs of DRLoc."""
    return (PAGE.parent / "steps.md").read_text().partition("## DRLoc")[2].partition("\n## ")[0]


def anchor_of(title: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_the_page_of_the_ablations_links_to_all_their_sections():
    titles = re.findall(r"^## (.+)$", ABLATIONS, flags=re.M)
    links = re.findall(r"ABLATIONS\.md#([\w-]+)", (PAGE.parent / "ablations.md").read_text())
    assert sorted(links) == sorted(map(anchor_of, titles))


@pytest.mark.parametrize("title", ["Other optimizers", "Published labels with RandAugment"])
def test_rows_of_three_seeds_have_commands(title):
    section = (PAGE.parent / "quickstart.md").read_text().partition(f"### {title}\n")[2]
    section = re.split(r"^###? ", section, flags=re.M)[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and "±" in line]
    commands = re.findall(r"`(densefeed train [^`]+)`", "\n".join(rows))
    assert len(rows) == len(set(commands)) > 3
    for command in commands:
        objective_for(read_config(command))


def section_of(anchor: str) -> str:
    """Return the section of the ablations with this anchor."""
    for section in re.split(r"^## ", ABLATIONS, flags=re.M)[1:]:
        title = section.partition("\n")[0]
        if anchor_of(title) == anchor:
            return section
    raise AssertionError(f"no heading has the anchor {anchor}")


def test_links_count_the_commands_behind_them():
    counts = {}
    for claim in LINKS:
        count, anchor = LINKED.match(claim.command).groups()
        counts[anchor] = counts.get(anchor, 0) + int(count)
    # DHVT's two figures share a curve.
    counts["dhvts-figures-1-and-2-curves"] -= 1
    for anchor, count in counts.items():
        section = section_of(anchor)
        assert len(table_rows(section, 4) + table_rows(section, 3)) == count, anchor


@pytest.mark.parametrize(
    ("panel", "option"),
    [
        ("weight of L_mutual", "--distill-weight"),
        ("weight of L_feat", "--feature-weight"),
        ("temperature", "--distill-temperature"),
    ],
)
def test_a_panel_of_figure_6_is_a_sweep_around_the_default(panel, option):
    rows = table_rows(section_of("bootstrappings-figure-6-weights-and-temperature"), 4)
    values = [name.removeprefix(f"{panel}, ") for name, *_ in rows if name.startswith(panel)]
    joint = "densefeed train bootstrapping_vit_s_joint"
    commands = [line.strip("`") for name, line, *_ in rows if name.startswith(panel)]
    assert commands == [f"{joint} {option} {value}" for value in values]
    field = option.removeprefix("--").replace("-", "_")
    default = getattr(RECIPES["bootstrapping_vit_s_joint"]().objective.bootstrap, field)
    steps = [float(value) for value in values]
    assert steps == sorted(steps)
    assert steps[1] < default < steps[2]


@pytest.mark.parametrize(("size", "depth"), [("S", 6), ("B", 12)])
def test_a_curve_of_figure_7_leaves_out_each_block(size, depth):
    rows = table_rows(section_of("bootstrappings-figure-7-blocks-without-feature-loss"), 4)
    commands = [line.strip("`") for name, line, *_ in rows if name.startswith(f"ViT-{size} ")]
    recipe = f"densefeed train bootstrapping_vit_{size.lower()}_joint --feature-blocks"
    blocks = [str(block) for block in range(1, depth + 1)]
    assert commands == [" ".join([recipe, *(b for b in blocks if b != left)]) for left in blocks]


@pytest.mark.parametrize(
    "claim", [c for c in CLAIMS if "of the paper" in c.here], ids=lambda c: c.where
)
def test_tables_of_the_supplementary_are_in_the_paper(claim):
    where = re.match(r"Table \d+", claim.here)[0]
    main = [c.figures for c in CLAIMS if c.paper == CLAIMS[0].paper and c.where == where]
    assert set(claim.figures.split(" / ")) <= set(" / ".join(main).split(" / "))


def options_of(command: str) -> str:
    """Return what a parser can refuse: options with their values, for a tool their names alone."""
    if command.startswith("densefeed train "):
        return re.sub(r"(train) \w+", r"\1", command, count=1)
    return command.split()[1] + " ".join(re.findall(r" --[\w-]+", command))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "command", {options_of(c): c for c in COMMANDS}.values(), ids=lambda c: c[10:]
)
def test_commands_parse(command):
    """One for each list of options: recipes differ in their defaults alone."""
    words = shlex.split(command)
    assert words[0] in ("densefeed", "python")
    if words[1] == "train":
        objective_for(read_config(command))
        return
    program = words[1] if words[1] != "-m" else words[2]
    tyro.cli(PROGRAMS[program], args=words[words.index(program) + 1 :])


def test_rows_of_a_table_have_commands_of_their_own():
    """But for the two networks of one run: a transformer and its agent."""
    rows = {}
    for claim in CLAIMS:
        if claim.command != "–" and not LINKED.match(claim.command):
            run = re.sub(r"^(joint|shared), (Agent|ViT)-", r"\1, ", claim.row)
            rows.setdefault((claim.paper, claim.where, claim.command), set()).add(run)
    assert [names for names in rows.values() if len(names) > 1] == []
    for section in re.split(r"^## ", ABLATIONS, flags=re.M)[1:]:
        commands = re.findall(r"`(densefeed train [^`]+)`", section)
        assert len(commands) == len(set(commands)), section.partition("\n")[0]


# What a row's name says of its command, and the words that this command has then.
NAMED_OPTIONS = {
    r"(\d+) neurons": "--drloc-hidden {}",
    r"batch (\d+)": "--batch {}",
    r"[C-F]: (\w+)": "--drloc {}",
    r"A: Swin-T": "--drloc none",
    r"^(BN|LN)-(BN|LN)": "norms=('{}', '{}')",
    r"ViT-([SB])-(SAM|Sparse)": "bootstrapping_vit_{}_{}",
    r"^Agent-([SB])$": "agent_{}",
    r"^DHVT-([TS])": "dhvt_{}",
    r"^LV-ViT-([SML])": "lvvit_{}",
}


def test_commands_have_what_their_row_names():
    checked = dict.fromkeys(NAMED_OPTIONS, 0)
    for claim in CLAIMS:
        for pattern, words in NAMED_OPTIONS.items():
            if claim.command == "–" or not (found := re.search(pattern, claim.row)):
                continue
            parts = [{"BN": "batch", "LN": "layer"}.get(p, p.lower()) for p in found.groups()]
            # DHVT's default is BatchNorm twice.
            wanted = words.format(*parts).replace("norms=('batch', 'batch')", "")
            assert re.search(re.escape(wanted) + r"(?!\d)", claim.command), claim
            checked[pattern] += 1
    assert all(checked.values()), checked


def test_models_and_recipes_of_commands_exist():
    named = {name for c in COMMANDS for name in re.findall(r"--model (\w+)|costs (\w+)", c)}
    assert all(map(timm.is_model, filter(None, chain(*named))))
    assert {c.split()[2] for c in COMMANDS if " train " in c} <= set(RECIPES)


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in COMMANDS if " train " in c], ids=lambda c: c[16:])
def test_training_commands_run_as_train_py_reads_them(command, monkeypatch):
    config = parse(command, monkeypatch)
    assert config == read_config(command)
    objective_for(config)
    assert count_parameters(config) > 1e6


def test_figures_of_the_help_are_those_of_the_papers():
    """All of them, in order: a line of `help` lists a recipe's figures as its text does."""
    stated = {name: " ".join(figures_of_help(name)) for name in RECIPES}
    assert {name: figures for name, figures in stated.items() if figures} == HELP


def figures_of_help(name: str) -> list[str]:
    """Return the accuracies in a recipe's text; other numbers are below 8 or above 100."""
    return [n for n in numbers(RECIPES[name].text) if 8 < float(n) < 100]


def test_a_recipe_has_the_figures_of_its_row_in_its_help():
    """The rows whose command is a recipe without options that change it."""
    columns = {}
    for claim in CLAIMS:
        table = columns.setdefault((claim.paper, claim.where), list_columns(claim.row))
        results = [
            figure
            for figure, column in zip_longest(claim.figures.split(" / "), table)
            if column not in SIZES
        ]
        for words in map(shlex.split, commands_of(claim)[-1:]):
            if words[1] != "train" or set(words[3::2]) - {"--init"}:
                continue
            stated = iter(figures_of_help(words[2]))
            figures = [n for n in numbers(" ".join(results)) if "after" not in claim.figures]
            # A subsequence: `in` consumes the iterator.
            assert all(figure in stated for figure in figures), claim


def test_outside_runs_that_are_read_are_made_by_a_command():
    """`runs/NAME` is the --out of the row's first command, or a run of a recipe of the page."""
    trained = {c.split()[2] for c in [*COMMANDS, *ABLATION_COMMANDS] if " train " in c}
    read = 0
    for claim in CLAIMS:
        made = set(trained)
        for command in commands_of(claim):
            names = re.findall(r"(?<!--out )runs/([\w-]+)", command)
            assert set(names) <= made, claim
            made |= set(re.findall(r"--out runs/(\w+)", command))
            read += len(names)
    assert read > 15


def test_sizes_of_domainnet_are_those_that_are_checked():
    rows = [c for c in CLAIMS if "DHVT" in c.paper and c.where == "Table 6"]
    for claim in rows:
        train, test = DOMAINS[claim.row.partition(",")[0]]
        mean = round(train / DOMAIN_CLASSES)
        assert claim.figures == f"{train:,} / {test:,} / {DOMAIN_CLASSES} / {mean}"


COUNTED = [c for c in CLAIMS if re.match(r"[\d,.]+ ", c.here)]


@pytest.mark.slow
@pytest.mark.parametrize("claim", COUNTED, ids=lambda c: f"{c.where} {c.row}")
def test_counted_figures(claim):
    if "parameters at 100 classes" in claim.here:
        counted = count_parameters(read_config(claim.command.strip("`")), 100)
        assert claim.here == f"{counted:,} parameters at 100 classes"
        return
    options = tyro.cli(ModelCosts, args=shlex.split(claim.command.strip("`"))[2:])
    costs, size = costs_by_name(options.models[0], options.size)
    if claim.where == "Table 1, sizes":
        check_sizes(claim.here, options.models[0], costs, size)
        return
    assert claim.here in (
        f"{costs.parameters:,} / {costs.without_attention:.2f} G",
        f"{costs.whole:.2f} G",
    )


def check_sizes(here: str, name: str, costs: Costs, size: int) -> None:
    """Compare a row of Bootstrapping's Table 1 with the model: at 10 and 100 classes, and G."""
    counts = [
        f"{sum(p.numel() for p in on_meta(name, num_classes=n).parameters()):,}" for n in (10, 100)
    ]
    row, _, later = here.partition("; ")
    assert row == " / ".join([*counts, f"{costs.whole:.2f} G"])
    if later:
        whole, *down = re.fullmatch(r"([\d.]+ G) with `down=\((\d+),(\d+)\)`", later).groups()
        agent = on_meta(name, down=tuple(map(int, down)))
        assert whole == f"{measure_costs(agent, size).whole:.2f} G"


def on_meta(name: str, **arguments: object) -> nn.Module:
    """Return a model without weights."""
    with meta_device():
        return timm.create_model(name, **arguments)

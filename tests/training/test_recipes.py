"""Recipes against the paper's Table 2 and the published commands; README's and ABLATIONS.md's tables against what is built."""

import re
import shlex
from dataclasses import replace
from inspect import getdoc
from itertools import pairwise
from pathlib import Path

import densefeed.train as run
import pytest
import torch
import tyro
from densefeed.relabel.files import UserError
from densefeed.training import recipes
from densefeed.training.config import Config, check_values
from densefeed.training.objective import mixing_of
from densefeed.training.schedule import learning_rate, peak_rate, total_epochs

ROOT = Path(__file__).parents[2]
NAMED = {recipe.__name__: recipe for recipe in recipes.RECIPES}
FOLDERS = ["--data", "a", "--val", "b", "--out", "c"]


def parsed(command: str, monkeypatch) -> Config:
    """The config that train.py would run, from a command as a document shows it."""
    words, given = shlex.split(command), []
    assert words[:2] == ["python", "train.py"]
    monkeypatch.setattr("sys.argv", [*words[1:], *(FOLDERS if "--data" not in words else [])])
    monkeypatch.setattr(run, "train", given.append)
    run.main()
    return given[0]


def parameters(config: Config, num_classes: int = 1000) -> int:
    """Of the model as train.py builds it, without memory for one number of it."""
    with torch.device("meta"):
        model, _ = run.build_model(config, num_classes)
    return sum(parameter.numel() for parameter in model.parameters())


def rows(text: str, columns: int) -> list[list[str]]:
    """The cells of every table row in Markdown of so many columns, without heads and rules."""
    split = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| ")]
    return [cells for cells in split if len(cells) == columns and "`" in "".join(cells)]


@pytest.mark.parametrize("recipe", recipes.RECIPES, ids=lambda r: r.__name__)
def test_a_recipe_states_its_command_and_source_and_its_model_is_built(recipe, monkeypatch):
    about = getdoc(recipe)
    assert f"python train.py {recipe.__name__} " in about
    micro = "micro" in recipe.__name__
    assert micro or ("Not run here." in about and re.search(r"Table|published|growing", about))
    command = re.search(r"python train.py(?:.*\\\n)*.*", about)[0].replace("\\\n", " ")
    config, given = recipe(), parsed(command, monkeypatch)
    free = ("data", "val", "out", "loader", "init")
    assert replace(given, **{name: getattr(config, name) for name in free}) == config
    assert config.data is tyro.MISSING
    check_values(given)
    mixing_of(given, plan=None)  # refuses what cannot be mixed together
    assert parameters(config) > 1e5


TABLE2 = {  # the paper's columns
    "standard": dict(objective="ce", lr=1e-3, mixup=0.8, mixtoken=False),
    "relabel": dict(objective="relabel", lr=1e-3, mixup=0.0, mixtoken=True),
    "token_label": dict(objective="token-label", lr=1e-3 * 1024 / 640, mixup=0.0, mixtoken=True),
}


@pytest.mark.parametrize("column", TABLE2)
@pytest.mark.parametrize(("size", "drop_path", "crop"), [("t", 0.1, 0.9), ("s", 0.1, 0.9), ("m", 0.2, 1.0), ("l", 0.3, 1.0)])
def test_table_2_and_the_published_drop_path(column, size, drop_path, crop):
    config = NAMED[f"lvvit_{size}_224_{column}"]()
    want = TABLE2[column]
    assert peak_rate(config) == pytest.approx(want["lr"])
    assert peak_rate(replace(config, batch=512)) == pytest.approx(want["lr"] / 2)
    assert (config.objective, config.mixup, config.mixtoken) == (want["objective"], want["mixup"], want["mixtoken"])
    assert (config.epochs, config.batch, config.weight_decay, config.warmup_epochs) == (300, 1024, 0.05, 5)
    assert (config.erase_probability, config.rand_augment) == (0.25, "rand-m9-mstd0.5-inc1")
    assert (config.model, config.size, config.drop_path, config.crop_pct) == (f"lvvit_{size}", 224, drop_path, crop)
    assert config.token_weight == 0.5


@pytest.mark.parametrize("size", "tsml")
def test_the_published_commands(size):
    config = NAMED[f"lvvit_{size}_224_token_label_published"]()
    large = size == "l"
    assert peak_rate(config) == pytest.approx(1e-3 if large else 1.6e-3)
    assert total_epochs(config) == 310
    assert config.ema == (0.0 if large else 0.99992)
    assert config.rand_augment == ("rand-n3-m9-mstd0.5-inc1" if large else "rand-m9-mstd0.5-inc1")
    assert (config.geometry, config.outside, config.token_weight) == ("compatible", "uniform", 1.0)
    assert learning_rate(config, 1250, 1251) == 1e-6
    assert (config.smoothing, config.erase_mode, config.min_lr) == (0.1, "pixel", 1e-5)


@pytest.mark.parametrize("name", [name for name in NAMED if "fine_tune" in name])
def test_fine_tuning_is_the_supplementarys(name, command):
    """And wants weights to begin from, by name."""
    config = NAMED[name]()
    assert (config.epochs, config.batch, peak_rate(config), config.weight_decay) == (30, 512, 5e-6, 1e-8)
    assert config.mixtoken
    assert config.objective == "token-label"
    assert {learning_rate(config, epoch * 10, 10) for epoch in range(5, 30)} == {5e-6}
    assert config.init is tyro.MISSING
    if name == "lvvit_s_384_fine_tune":
        done = command("train.py", name, *FOLDERS)
        assert done.returncode == 2
        assert "--init" in done.stdout + done.stderr


@pytest.mark.parametrize("name", [name for name in NAMED if name.startswith("bootstrapping") and "micro" not in name])
def test_bootstrapping_is_its_section_4_1(name):
    """240 epochs of 2 x 32 images, AdamW; the features' factor 10 and T = 4; the rate is 0 in the end and never warmed up."""
    config = NAMED[name]()
    assert (config.epochs, config.batch, peak_rate(config), config.weight_decay, config.size) == (240, 64, 1e-3, 0.05, 224)
    assert [learning_rate(config, step, 10) for step in (0, 9, 1200, 2400)] == pytest.approx([1e-3, 1e-3, 5e-4, 0])
    assert (config.feature_weight, config.distill_weight, config.distill_temperature) == (10, 1, 4)
    assert (config.feature_decay, config.feature_adapt, config.agent) == ("linear", "sequence", "res-like")
    assert (config.smoothing, config.mixup, config.cutmix, config.rand_augment, config.ema) == (0, 0, 0, "", 0)
    released = name.endswith("published")
    assert config.feature_norm == ("layernorm" if released else "l2-token")
    assert config.align == ("none" if released and "shared" in name else "global")
    kind = name.replace("_published", "").rpartition("_")[2]
    assert config.bootstrap == (kind if kind in ("joint", "shared") else "none")


ABLATIONS = rows((ROOT / "training" / "ABLATIONS.md").read_text(), 4)


@pytest.mark.parametrize(("row", "line", "count", "paper"), ABLATIONS, ids=lambda cell: cell.strip("`")[16:])
def test_every_ablation_is_a_command_whose_model_has_the_parameters_that_are_stated(row, line, count, paper, monkeypatch):
    config = parsed(line.strip("`"), monkeypatch)
    check_values(config)
    mixing_of(config, plan=None)
    assert parameters(config) == int(count.replace(",", ""))
    assert paper == "diverges" or 79 < float(paper) < 85.5


def test_all_of_the_papers_ablation_rows_are_there():
    """Tables 3 to 9 have 8, 7, 3, 3, 5, 4 and 5 rows, section 4.3 one; none is the same run as its neighbour."""
    assert len(ABLATIONS) == 8 + 7 + 3 + 3 + 5 + 4 + 5 + 1
    assert all(one[1] != other[1] for one, other in pairwise(ABLATIONS))


def expanded(pattern: str) -> list[str]:
    """`a_{b,c}` as a shell reads it."""
    head, brace, rest = pattern.partition("{")
    if not brace:
        return [pattern]
    inside, _, tail = rest.partition("}")
    return [head + word + end for word in inside.split(",") for end in expanded(tail)]


def test_readmes_table_names_every_recipe_with_its_parameters():
    section = (ROOT / "README.md").read_text().partition("\n## Recipes\n")[2].partition("\n## ")[0]
    listed = []
    for names, _, counts, *_ in rows(section, 5):
        found = expanded(names.strip("`"))
        listed += found
        millions = [float(count) for count in counts.removesuffix(" M").split(" / ")]
        assert len(millions) in (1, len(found))
        for name, million in zip(found, millions * (len(found) // len(millions)), strict=True):
            config = NAMED[name]()
            assert parameters(config, 10 if "micro" in name else 1000) / 1e6 == pytest.approx(
                million, abs=0.05 if million > 1 else 5e-4
            )
    assert listed == list(NAMED)


def test_the_list_of_recipes_has_a_line_each_and_one_recipes_help_its_docstring(command):
    listed, own = command("train.py", "--help"), command("train.py", "lvvit_t_224_relabel", "--help")
    assert listed.returncode == own.returncode == 0
    assert all(name in listed.stdout for name in NAMED)
    assert "Not run here" not in listed.stdout
    assert "nobody has published this figure. Not run here." in own.stdout


def test_mixtoken_and_cutmix_are_refused():
    with pytest.raises(UserError, match="--no-mixtoken"):
        mixing_of(replace(NAMED["lvvit_s_224_standard"](), mixtoken=True), plan=None)

"""Ablations: every row is a command with a model that can be built; runs are kept and tabulated."""

import json
import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from densefeed.models.meta_device import meta_device
from densefeed.recipes.ablations import RUNS, TABLES
from densefeed.system.errors import UserError
from densefeed.system.options import leaves
from densefeed.tools.ablations import Ablations
from densefeed.tools.quickstart import Quickstart
from densefeed.training.config import Config

from ..documents import parse, table_rows
from ..runs import model_for, objective_for

ROOT = Path(__file__).parents[2]


class Rows(dict):
    """The config of every row, as train.py parses its command line; parsed on first access."""

    def __missing__(self, name: str) -> Config:
        with pytest.MonkeyPatch.context() as patch:
            command = shlex.join(["densefeed", "train", *RUNS[name]])
            self[name] = Config.from_dict(parse(command, patch).to_dict())
        return self[name]


@pytest.fixture(scope="module")
def configs():
    return Rows()


# Every sixth row is fast: there are some of each family of models.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * bool(k % 6)) for k, n in enumerate(RUNS)]
)
def test_the_model_of_every_row_can_be_built(configs, name):
    with meta_device():
        model = model_for(configs[name], 10)
    if name.startswith("vit"):
        objective_for(configs[name]).check_sizes(model, 10)
        return
    if configs[name].model.name != "lvvit_micro":
        assert model.forward_features(torch.zeros(1, 3, 64, 64, device="meta")).shape == (1, 65, 96)
        return
    assert model.stem(torch.zeros(1, 3, 64, 64, device="meta")).shape == (1, 96, 8, 8)


@pytest.mark.slow
def test_all_rows_differ_and_every_row_is_in_a_table(configs):
    assert {name for names in TABLES.values() for name in names} == set(RUNS)
    assert len({repr(configs[name]) for name in RUNS}) == len(RUNS)


@pytest.mark.slow
def test_the_rows_of_a_table_differ_in_what_the_table_compares(configs):
    """Consecutive rows of the path (Table 3 of Token Labeling) differ by the paper's step alone.

    Each row of its Table 7 switches one thing off, or MixUp on.
    """

    def differing(one, other):
        one, other = dict(leaves(configs[one])), dict(leaves(configs[other]))
        return {name for name in one if one[name] != other[name]}

    path = TABLES["Table 3, path"]
    steps = [differing(*pair) for pair in pairwise(path)]
    assert steps == [{"model_kwargs"}] * 4 + [{"objective"}] * 2
    switches = [differing("augmented", name) for name in TABLES["Table 7, augmentation"][1:]]
    assert switches == [{"mixtoken"}, {"mixup"}, {"erase_probability"}, {"rand_augment"}]
    table = TABLES["Bootstrapping, Table 4"]
    switches = [differing("vit-joint", name) for name in (*table, "vit-joint-base")]
    fields = (
        "feature_weight",
        "distill_weight",
        "feature_decay",
        "feature_adapt",
        "feature_norm",
        "agent",
    )
    assert switches == [{field} for field in fields]
    assert differing("vit", "vit-joint") == differing("vit", "vit-shared") == {"bootstrap"}
    assert differing("vit", "vit-agent") == {"model"}
    assert differing(*TABLES["DHVT, beside DeiT"]) == {"model", "model_kwargs", "eval_every"}
    full, *others = reversed(TABLES["DHVT's Figures 1 and 2"])
    assert [differing(full, name) for name in others] == [{"model_kwargs"}] * 8
    none, *variants = TABLES["DRLoc's Table 6, variants"]
    assert [differing(none, name) for name in variants] == [{"drloc", "drloc_grid"}] * 5
    assert [configs[name].objective.drloc.variant for name in variants] == [
        "l1",
        "signed",
        "ce",
        "reg",
        "all",
    ]
    assert differing(*TABLES["DRLoc, beside token labels"]) == {"drloc", "drloc_grid"}


@pytest.mark.slow
def test_curves_of_dhvt_have_the_parts_of_those_at_full_size(configs):
    """In the same order; the full-size commands name DHVT-T."""
    text = (ROOT / "densefeed/recipes/ABLATIONS.md").read_text()
    section = text.partition("## DHVT's Figures 1 and 2")[2].partition("\n## ")[0]
    commands = [shlex.split(line.strip("`")) for _, line, _ in table_rows(section, 3)]
    full = [set(words[4:]) for words in commands]
    small = [set(configs[n].model.kwargs) for n in TABLES["DHVT's Figures 1 and 2"]]
    assert small == full
    assert len(small) == 9


def test_curves_in_the_docs_are_those_of_the_rows():
    """In the order of the tables: 8 epochs of a seed, and the last of another one."""
    text = (ROOT / "docs/results/small-datasets.md").read_text()
    section = text.partition("## DHVT's Figures 1 and 2")[2].partition("\n## ")[0]
    rows = table_rows(section, 12)
    assert [name.strip("`") for _, _, name, *_ in rows] == list(TABLES["DHVT's Figures 1 and 2"])
    assert all(5 < float(top1) < 100 for _, _, _, *curve, _ in rows for top1 in curve)
    named = section.partition("--rows ")[2].partition("\ndensefeed")[0].replace("\\", " ").split()
    assert named == list(TABLES["DHVT's Figures 1 and 2"])


@pytest.mark.slow
def test_rows_are_trained_kept_and_tabulated(command, tmp_path):
    """One row of the first seed is trained.

    The second seed is a copy of that folder with other results, and no step of it runs again.
    """
    rows = ("relabel-cutmix", "mlp-ratio-3")
    sizes = ("--train", 60, "--val", 20, "--epochs", 1)
    words = "tools/ablations.py", "--out", tmp_path, *sizes, "--rows", *rows, "--seeds"
    results = {name: tmp_path / "seed-1" / "rows" / name for name in rows}
    results["mlp-ratio-3"].mkdir(parents=True)
    # This row has finished earlier.
    (results["mlp-ratio-3"] / "result.json").write_text(json.dumps({"top1": 0.25}))
    done = command(*words, 1, descendants=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    config = json.loads((results["relabel-cutmix"] / "config.json").read_text())
    assert (config["run"]["seed"], config["optim"]["epochs"]) == (1, 1)
    assert (config["mix"]["cutmix"], config["objective"]["name"]) == (1.0, "relabel")
    shutil.copytree(tmp_path / "seed-1", tmp_path / "seed-2", symlinks=True)
    for name, path in results.items():
        top1 = json.loads((path / "result.json").read_text())["top1"]
        assert f"{name} " in done.stdout
        assert f"│ {100 * top1:.1f} % │" in done.stdout
        (tmp_path / "seed-2" / path.relative_to(tmp_path / "seed-1") / "result.json").write_text(
            json.dumps({"top1": top1 + 0.2})
        )
    again = command(*words, 1, 2)
    assert again.stdout.count(" exists; skipped") == 2 * (5 + 2)
    assert "$ python" not in again.stdout
    for path in results.values():
        top1 = json.loads((path / "result.json").read_text())["top1"]
        assert f"│ {100 * top1 + 10:.1f} ± 14.1 % │" in again.stdout  # 0.2 apart: 0.2 / sqrt(2)
        assert f" {100 * top1:.1f}, {100 * top1 + 20:.1f} │" in again.stdout
    assert [title for title in TABLES if title in again.stdout] == [
        "Table 3, path",
        "Table 4, stem",
        "Table 6, mixing",
    ]


@pytest.mark.parametrize("kind", [Quickstart, Ablations])
def test_a_flow_needs_a_seed(kind):
    with pytest.raises(UserError, match="--seeds names no seed; give at least one"):
        kind(seeds=())


def test_an_unknown_row_is_refused(command, tmp_path):
    done = command("tools/ablations.py", "--out", tmp_path / "a", "--rows", "nothing")
    assert done.returncode == 2
    assert "--rows nothing: unknown row; choose from deit, " in done.stderr
    assert not (tmp_path / "a").exists()

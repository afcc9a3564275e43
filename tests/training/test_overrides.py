"""Options that override each other are refused, or a line states which one counts."""

import pytest

import densefeed.train as training
from densefeed.models.meta_device import meta_device
from densefeed.objectives import check_unused
from densefeed.recipes import RECIPES, command_line
from densefeed.system.errors import UserError
from densefeed.system.options import with_options
from densefeed.training.build import build_model
from densefeed.training.config import Config

from ..runs import objective_for


def read(monkeypatch, *words: object) -> Config:
    """Return the config of a command line, whose recipe is the first word."""
    folders = "--data", "a", "--val", "b", "--out", "c"
    recipe, *others = map(str, words)
    # Every call makes all recipes that the command line has.
    monkeypatch.setattr(command_line, "RECIPES", {recipe: RECIPES[recipe]})
    monkeypatch.setattr("sys.argv", ["train.py", recipe, *folders, *others])
    return command_line.read_config("")


@pytest.mark.parametrize("words", [("--size", 128), ("--size=128",), ("--size", 128, "--sizes")])
def test_outside_size_replaces_the_sizes_of_a_recipe(words, monkeypatch):
    data = read(monkeypatch, "quickstart_token_label", *words).data
    assert data.sides == (128,)
    assert data.described_sizes == "trained and evaluated at 128 px"


def test_outside_size_of_the_recipe_is_trained_when_it_is_given(monkeypatch):
    assert read(monkeypatch, "quickstart_ce", "--size", 64).data.sides == (64,)
    assert read(monkeypatch, "quickstart_ce").data.sides == (48,)


@pytest.mark.parametrize(
    ("words", "option"), [(("--sizes", 0, 48), "--sizes"), (("--multi-scale", 48, 64), "--multi")]
)
def test_outside_size_beside_sizes_without_it_is_refused(words, option, monkeypatch):
    with pytest.raises(UserError, match=rf"--size 96 would be evaluated only, because {option}"):
        read(monkeypatch, "lvvit_micro_ce", "--size", 96, *words)
    config = read(monkeypatch, "lvvit_micro_ce", "--size", 48, *words)
    assert 48 in config.data.sides
    assert config.data.size == 48


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("lvvit_micro_ce", dict(maps_on_device=True), "--maps-on-device has no effect without --o"),
        (
            "lvvit_micro_token_label",
            dict(drop_path=0.3, model_kwargs=("drop_path_rate=0.1",)),
            "--drop-path has no effect beside --model-kwargs drop_path_rate; give one of the two",
        ),
        (
            "lvvit_micro_ce",
            dict(frozen_statistics=True, drop_path=0.3),
            "--drop-path has no effect beside --frozen-statistics",
        ),
        (
            "lvvit_micro_ce",
            dict(frozen_statistics=True, sync_batchnorm=True),
            "--sync-batchnorm has no effect beside --frozen-statistics",
        ),
        (
            "bootstrapping_micro_joint",
            dict(distill_weight=0.0, distill_temperature=2.0),
            "--distill-temperature has no effect without --distill-weight",
        ),
        (
            "bootstrapping_micro_joint",
            dict(feature_weight=0.0, feature_norm="layernorm"),
            "--feature-norm has no effect without --feature-weight",
        ),
    ],
)
def test_outside_option_that_another_overrides_is_refused(name, fields, message):
    recipe = RECIPES[name]()
    with pytest.raises(UserError, match=message):
        check_unused(with_options(recipe, **fields), recipe)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("lvvit_micro_ce", "--token-weight", 0.5), "--token-weight has no effect without"),
        (("lvvit_micro_ce", "--score-maps", "maps.h5"), "--score-maps has no effect without"),
        (("lvvit_micro_ce", "--momentum=0.9"), "--momentum has no effect without"),
    ],
)
def test_outside_option_without_effect_is_refused_at_its_default_too(words, message, monkeypatch):
    with pytest.raises(UserError, match=message):
        read(monkeypatch, *words)


def test_outside_model_arguments_that_options_override_are_refused():
    config = with_options(RECIPES["lvvit_micro_token_label"](), model_kwargs=("img_size=128",))
    message = "img_size=128 has no effect beside --size, which is 64; give --size"
    with meta_device(), pytest.raises(UserError, match=message):
        build_model(config.model, config.data, objective_for(config), 10)


def test_outside_start_line_has_sizes_and_a_warm_up_that_does_not_end(micro, tmp_path, capsys):
    fields = dict(sizes=((0, 16), (1, 32)), size=48, epochs=2, warmup_epochs=5, model_kwargs=())
    training.train(micro(tmp_path / "run", **fields))
    printed = capsys.readouterr().out
    assert "trained at 16 and 32 px, evaluated at 48 px; 2 epochs of 3 steps" in printed
    assert ", not reached in 5 epochs of warm-up" in printed
    training.train(micro(tmp_path / "one", epochs=1))
    printed = capsys.readouterr().out
    assert "; 1 epoch of 3 steps; " in printed
    assert ", not reached in 1 epoch of warm-up" in printed


def test_outside_resumed_run_says_that_init_is_not_read(micro, tmp_path, capsys):
    training.train(micro(tmp_path / "first", epochs=1))
    fields = dict(epochs=1, init=tmp_path / "first/last.pt", resume="auto")
    training.train(micro(tmp_path / "run", **fields))
    assert "is not read again" not in capsys.readouterr().out
    training.train(micro(tmp_path / "run", **fields))
    assert "continuing from its newest checkpoint; --init is not read again" in (
        capsys.readouterr().out
    )


def test_outside_graphs_on_a_cpu_are_said_to_be_whole(micro, tmp_path, capsys):
    training.train(micro(tmp_path / "run", compile="graph", dry_run=True))
    assert "--compile graph is --compile whole on this device" in capsys.readouterr().out

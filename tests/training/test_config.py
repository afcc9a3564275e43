"""Options without effect are refused on the command line, and accepted from a recipe."""

from dataclasses import dataclass
from pathlib import Path

import pytest

import densefeed.train as training
from densefeed.objectives import METHODS, OBJECTIVES, build_objective, check_unused
from densefeed.objectives.base import Method, Objective
from densefeed.recipes import RECIPES
from densefeed.recipes.recipe import show_options
from densefeed.system.errors import UserError
from densefeed.system.options import Options, leaves, with_options
from densefeed.training import ranks
from densefeed.training.config import Config, check_recipe, check_same_run

NAMED = {name: recipe() for name, recipe in RECIPES.items()}


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "lvvit_micro_ce",
            dict(agent_kwargs=("pool=3",)),
            "--agent-kwargs has no effect without --bootstrap; remove it, or give --bootstrap",
        ),
        ("lvvit_micro_ce", dict(agent="base"), "--agent has no effect"),
        ("lvvit_micro_ce", dict(align="none"), "--align has no effect without --bootstrap;"),
        ("lvvit_micro_ce", dict(distill_weight=0.0), "--distill-weight has no effect"),
        (
            "lvvit_micro_ce",
            dict(drloc_published=True),
            "--drloc-published has no effect without --drloc; remove it",
        ),
        ("lvvit_micro_ce", dict(drloc_weight=0.1), "--drloc-weight has no effect"),
        ("swin_t_drloc", dict(drloc="none", drloc_hidden=64), "--drloc-hidden has no effect"),
        (
            "bootstrapping_vit_s_joint",
            dict(align="none"),
            "--align has no effect without --bootstrap shared",
        ),
        ("bootstrapping_vit_s_joint", dict(agent="base", feature_weight=1.0), ""),
        ("bootstrapping_vit_s_shared", dict(align="none"), ""),
        ("lvvit_micro_ce", dict(drloc="l1", drloc_grid=4, drloc_published=True), ""),
        (
            "lvvit_micro_ce",
            dict(token_weight=0.3),
            "--token-weight has no effect without --objective token-label; remove it, or give",
        ),
        (
            "lvvit_micro_ce",
            dict(temperature=2.0),
            "--temperature has no effect without --objective relabel or token-label",
        ),
        ("lvvit_micro_ce", dict(geometry="published"), "--geometry has no effect"),
        ("lvvit_micro_ce", dict(smoothing=0.2), ""),
        ("lvvit_micro_ce", dict(objective="relabel", temperature=2.0), ""),
        ("lvvit_micro_token_label", dict(token_weight=0.3, temperature=2.0), ""),
        (
            "lvvit_micro_token_label",
            dict(objective="relabel", token_weight=0.3),
            "--token-weight has no effect without --objective token-label",
        ),
        ("lvvit_micro_ce", dict(shift_border="black"), "has no effect without --shift"),
        ("lvvit_micro_ce", dict(shift_border="black", shift=2), ""),
        ("lvvit_micro_ce", dict(augment_before_crop=True), "without --rand-augment"),
        ("lvvit_micro_ce", dict(mix_label="regions"), "without --mixtoken, --cutmix or --mixup"),
    ],
)
def test_error_on_option_without_effect(name, fields, message):
    given = with_options(NAMED[name], **fields)
    if not message:
        return check_unused(given, NAMED[name])
    with pytest.raises(UserError, match=message):
        check_unused(given, NAMED[name])


@dataclass(frozen=True, kw_only=True)
class FocalOptions(Options):
    focal_gamma: float = 2.0


class Focal(Objective):
    name, own = "focal", FocalOptions

    def loss(self, output, batch, step):
        raise AssertionError


@dataclass(frozen=True, kw_only=True)
class PeerOptions(Options):
    peer_weight: float = 0.0
    peer_depth: int = 2


class Peer(Method):
    name, own = "peer-weight", PeerOptions

    @staticmethod
    def is_on(options):
        return options.peer_weight > 0


def test_outside_own_options_of_what_is_not_chosen_are_refused(monkeypatch):
    """`foc.py quickstart_ce --focal-gamma 1` trained with cross entropy."""
    monkeypatch.setitem(OBJECTIVES, "focal", Focal)
    monkeypatch.setitem(METHODS, "peer-weight", Peer)
    recipe = RECIPES["quickstart_ce"]()
    for fields, message in (
        (dict(focal_gamma=1.0), "--focal-gamma has no effect without --objective focal; remove it"),
        (dict(peer_depth=3), "--peer-depth has no effect without --peer-weight"),
        (
            dict(objective="focal", smoothing=0.2),
            "--smoothing has no effect without --objective ce",
        ),
    ):
        with pytest.raises(UserError, match=message):
            check_unused(with_options(recipe, **fields), recipe)
    check_unused(with_options(recipe, objective="focal", focal_gamma=1.0), recipe)
    check_unused(with_options(recipe, peer_weight=1.0, peer_depth=3), recipe, {"peer_weight"})
    check_unused(recipe, recipe, {"peer_weight"})


def test_every_recipe_has_the_options_of_what_is_registered_later(monkeypatch):
    """Also a recipe that changes no option of its base, as segment_photos."""
    assert any(not recipe.options for recipe in RECIPES.values())
    monkeypatch.setitem(METHODS, "peer-weight", Peer)
    for recipe in RECIPES.values():
        for config in (recipe(), with_options(recipe())):
            assert dict(leaves(config))["peer_depth"] == 2
            build_objective(config.setting)


def test_outside_mixing_is_refused_unless_the_objective_mixes_labels(monkeypatch):
    """The images were mixed, the labels of an own objective not."""
    monkeypatch.setitem(OBJECTIVES, "focal", Focal)
    recipe = RECIPES["quickstart_ce"]()
    own = with_options(recipe, objective="focal")
    build_objective(own.setting)
    for fields, remedy in (
        (dict(mixup=0.2), "--mixup 0"),
        (dict(cutmix=1.0), "--cutmix 0"),
        (dict(mixtoken=True, mixup=0.2), "--no-mixtoken --mixup 0"),
    ):
        message = f"focal does not state that it mixes labels, .*; give {remedy}, or set mixes_la"
        with pytest.raises(UserError, match=message):
            build_objective(with_options(own, **fields).setting)
        for name in ("ce", "relabel", "token-label"):
            build_objective(with_options(recipe, objective=name, **fields).setting)
    monkeypatch.setattr(Focal, "mixes_labels", True)
    build_objective(with_options(own, mixup=0.2).setting)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "names no recipe; put one first, or see densefeed train --help"),
        (["--data", "a"], "begins with --data, which is not a recipe; put one first"),
        (["lvvit_mirco_ce"], "which is not a recipe; choose lvvit_micro_ce,"),
        # All that begin so, before others that are spelled alike.
        (
            ["lvvit_s", "--data", "a"],
            "is not a recipe; choose lvvit_s_224_token_label, lvvit_s_224_",
        ),
        (["lvvit_micro_ce"], ""),
        (["--help"], ""),
        (["-h"], ""),
        (["--tyro-print-completion", "bash"], ""),
    ],
)
def test_a_command_line_begins_with_a_recipe(words, message):
    if not message:
        return check_recipe(words, list(NAMED))
    with pytest.raises(UserError, match=message):
        check_recipe(words, list(NAMED))


@pytest.mark.parametrize("name", NAMED)
def test_recipe_with_its_method_off_is_its_baseline(name):
    check_unused(NAMED[name], NAMED[name])
    check_unused(with_options(NAMED[name], drloc="none", bootstrap="none"), NAMED[name])


@pytest.mark.slow
def test_command_compares_with_its_recipe(monkeypatch):
    """Before anything is opened, and with the values of the recipe."""
    trained: list[Config] = []
    monkeypatch.setattr(training, "train", trained.append)
    words = [
        "train.py",
        "lvvit_micro_drloc",
        "--data",
        "a",
        "--val",
        "b",
        "--out",
        "lvvit_micro_ce",
        "--drloc",
        "none",
    ]
    monkeypatch.setattr("sys.argv", words)
    training.main()
    assert [(config.run.out, config.objective.drloc.grid) for config in trained] == [
        (Path("lvvit_micro_ce"), 0)
    ]
    monkeypatch.setattr("sys.argv", [*words, "--drloc-grid", "7"])
    with pytest.raises(UserError, match="--drloc-grid has no effect"):
        training.main()
    assert len(trained) == 1


@pytest.mark.parametrize(("rank", "waited"), [(None, []), ("0", []), ("1", [ranks.WAIT])])
def test_only_rank_0_reports_a_shared_error(monkeypatch, rank, waited):
    """The other ranks wait, and torchrun ends them meanwhile."""
    slept: list[float] = []
    monkeypatch.setattr(ranks.time, "sleep", slept.append)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(UserError, match="of all"), ranks.raise_on_rank0():
        raise UserError("of all")
    assert slept == waited


@pytest.mark.parametrize("fields", [dict(cache=Path("/scratch")), dict(max_pixels=10**9)])
def test_how_data_are_read_may_change_on_resume(fields):
    before = with_options(Config(), out=Path("run"))
    check_same_run(with_options(before, **fields), before.to_dict())


def test_options_of_a_recipe_are_shown_as_on_a_command_line():
    shown = show_options({"sizes": ((0, 24), (1, 48)), "model_kwargs": ("stem=((7, 2),)",)})
    assert shown == "--sizes 0 24 1 48 --model-kwargs 'stem=((7, 2),)'"

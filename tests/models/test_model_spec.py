"""What a file may say of the model to build."""

import math

import pytest

from densefeed.models.model_spec import POSITIVE, find_forbidden, is_registered
from densefeed.recipes import RECIPES
from densefeed.recipes.ablations import RUNS
from densefeed.system.options import parse_arguments

FORBIDDEN = {
    # The table of pairs of cells in a window is not a weight: 0.8 GB.
    "window_size": 100,
    **{"checkpoint_path": "x.pt", "pretrained": True, "cache_dir": "/tmp", "features_only": True},
    **{"pretrained_cfg": {"file": "x"}, "act_layer": "gelu", "scriptable": True, "x" * 90: 1},
    **{"depth": 10**9, "depths": [600, 600], "img_size": 5000, "embed_dim": 10**7},
    **{"num_classes": 10**9, "mlp_ratio": math.inf, "drop_rate": math.nan, "pool": "a:b"},
    **{"norm": "../x", "stem": [[[1]]], "dims": [1] * 65, "down": {}, "shortcut": b"x"},
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_other_arguments_and_sizes_are_forbidden(name):
    found = find_forbidden({"num_heads": 3, name: FORBIDDEN[name]})
    assert found.startswith(f"{name[:40]} ")
    assert found.isprintable()


@pytest.mark.parametrize("name", sorted(POSITIVE))
@pytest.mark.parametrize("value", [0, -1, (3, 0)])
def test_sizes_that_divide_are_above_0(name, value):
    assert find_forbidden({name: value}) == f"{name} is not above 0"


@pytest.mark.parametrize(
    "overlay",
    [
        {"file": "x.pt"},
        {"mean": [0.5, 0.5]},
        {"mean": (0.5, 0.5, math.nan)},
        {"std": (0.2, 0.0, 0.2)},
        {"std": (0.2, -1, 0.2)},
        {"std": (0.2, 1e-320, 0.2)},
        {"mean": (0.2, 1e300, 0.2)},
        {"std": "abc"},
        {3: 4},
        [1],
    ],
)
def test_an_overlay_holds_mean_and_deviation(overlay):
    assert find_forbidden({"pretrained_cfg_overlay": overlay})
    good = {"mean": (0.5, 0.4, 0.3), "std": [0.2, 0.2, 1]}
    assert not find_forbidden({"pretrained_cfg_overlay": good})


def test_a_name_that_is_no_string_is_forbidden():
    assert find_forbidden({3: 1})
    assert find_forbidden({"\x1b[2J": 1}).isprintable()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_what_recipes_write_is_allowed(recipe):
    assert not find_forbidden(recipe().model.arguments)


def test_what_ablations_write_is_allowed():
    words = {word for _, *options in RUNS.values() for word in options if "=" in word}
    assert len(words) > 10
    assert not find_forbidden(parse_arguments(tuple(words), "--model-kwargs"))


def test_names_of_the_registry():
    assert is_registered("lvvit_s")
    assert is_registered("resnet18.a1_in1k")
    # timm.is_model knows these two, and create_model does not.
    assert not is_registered("resnet18.nope")
    assert not is_registered("lvvit_s.nope")
    others = ("hf-hub:timm/resnet18", "local-dir:/tmp", "resnet18.x/../y", "resnet18.a:b", "none")
    assert not any(map(is_registered, (*others, "", None, 3)))

"""timm's strings and levels against timm's own formulas; errors name the invalid value."""

import math
import random

import numpy as np
import pytest
from timm.data import auto_augment
from timm.data.auto_augment import LEVEL_TO_ARG

from densefeed.pipelines.augment.settings import (
    GEOMETRIC,
    Augment,
    RandAugmentSpec,
    find_code,
    level_to_argument,
)
from densefeed.system.errors import UserError

KNOWN = [name for name in LEVEL_TO_ARG if name in GEOMETRIC or find_code(name) is not None]


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("negative", [False, True])
def test_arguments_equal_timms(name, negative, monkeypatch):
    monkeypatch.setattr(random, "random", lambda: 0.9 if negative else 0.1)
    levels = np.concatenate([np.linspace(0, 10, 201), [11.3, 17, 30]])
    got = level_to_argument(name, levels, np.full(len(levels), negative))
    timms = LEVEL_TO_ARG[name]
    want = [float(timms(level, {})[0]) if timms else 0.0 for level in levels]
    if name == "Desaturate":
        # Its operation converts the level to this factor.
        want = [min(1.0, max(0.0, 1.0 - value)) for value in want]
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_every_operation_of_timms_sets_is_implemented():
    for text in ("rand-m9", "rand-m9-inc1", "rand-m7-tweights", "rand-m3-t3a", "rand-m3-t3aw-n3"):
        assert set(RandAugmentSpec.parse(text).names) <= set(KNOWN)


@pytest.mark.parametrize(
    "text",
    [
        "original",
        "rand-x9",
        "rand-m9.5",
        "augmix-m5",
        "rand-m9-n16-tweights",
        "rand-mstdx-m1.2.3",
        "9",
        # timm accepts each of these as another string, mostly rand-m10.
        "rand-mfoo",
        "rand-mnan",
        "rand-m9-rotate",
        "rand-m9-tfoo",
        "rand-m9-t0.3",
        "rand-",
        "rand-m9 ",
        # Numbers that no float holds.
        "rand-m" + "9" * 400,
        "rand-m9-mmax" + "9" * 400,
    ],
)
def test_an_invalid_string_is_refused(text):
    with pytest.raises(UserError, match=text):
        RandAugmentSpec.parse(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("erase_probability", 1.5),
        ("shift_border", "white"),
        ("color_jitter", (0.1, 0.2)),
        ("color_jitter", (-0.1,)),
        ("color_jitter", (0.1, 0.1, 0.1, 0.6)),
        ("color_jitter", (math.nan,)),
    ],
)
def test_an_invalid_value_is_refused(field, value):
    with pytest.raises(UserError, match=field.replace("_", ".")):
        Augment(**{field: value})


def test_timm_has_the_internals_that_we_use():
    """Fails if a newer timm names or weights its operations differently."""
    assert auto_augment._LEVEL_DENOM == 10
    assert RandAugmentSpec.parse("rand-m9-mstd0.5-inc1")[2:] == (2, 0.5, 9, 0.5, 10.0)
    assert RandAugmentSpec.parse("rand-m7-n3-mstd101-mmax20-p0.25")[2:] == (
        3,
        0.25,
        7,
        math.inf,
        20,
    )
    assert len(RandAugmentSpec.parse("rand-m9-mstd0.5-inc1").names) == 15


@pytest.mark.parametrize(
    ("text", "shears"),
    [("", False), ("rand-m9-mstd0.5-inc1", True), ("rand-m9-t3a", False), ("rand-tweights", True)],
)
def test_shears_follows_the_set_of_operations(text, shears):
    assert Augment(rand_augment=text).shears == shears

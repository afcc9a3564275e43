"""Values of options that no library takes end in one sentence."""

import re
from dataclasses import dataclass

import pytest
import tyro

from densefeed.system.errors import UserError
from densefeed.system.options import Bounds, Integers, Options, Texts, parse_arguments


@pytest.mark.parametrize("digits", [20, 400, 5000])
def test_numbers_beyond_64_bits_are_refused(digits):
    for number in (10**digits, -(10**digits)):
        with pytest.raises(UserError, match=r"--batch-size is an integer beyond 64 bits"):
            Bounds(1).check("batch_size", number)
    Bounds(1).check("batch_size", 2**63 - 1)


@pytest.mark.parametrize("value", ["-" * 100_000 + "1", "[" * 100_000, "9" * 5000, "1+" * 99_999])
def test_deep_or_long_arguments_are_refused(value):
    with pytest.raises(UserError, match=r"--x 'depth=.* is not NAME=VALUE") as error:
        parse_arguments((f"depth={value}",), "--x")
    assert len(str(error.value)) < 300


@dataclass(frozen=True, kw_only=True)
class Several(Options):
    """Options of several values."""

    words: Texts = ()
    sides: Integers = (1, 2)


def test_outside_the_help_of_options_of_several_values_reads_well(capsys):
    with pytest.raises(SystemExit):
        tyro.cli(Several, args=["--help"])
    text = capsys.readouterr().out
    assert re.search(r"--words STR \.\.\. +\(default: none\)", text)
    assert re.search(r"--sides INT \.\.\. +\(default: 1 2\)", text)
    assert tyro.cli(Several, args=["--words", "a", "b", "--sides"]) == Several(
        words=("a", "b"), sides=()
    )

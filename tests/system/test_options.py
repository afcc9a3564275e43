"""Values of options that no library takes end in one sentence."""

import pytest

from densefeed.system.errors import UserError
from densefeed.system.options import Bounds, parse_arguments


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

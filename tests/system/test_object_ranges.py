"""Ranges of objects: exact bytes, one version, faults."""

import numpy as np
import pytest

from densefeed.system.errors import UserError
from densefeed.system.object_ranges import find_remote_file, read_range, read_ranges
from densefeed.system.object_store import StorageError, connect

from ..object_storage import SECRET, cycle_faults

obstore = pytest.importorskip("obstore")

CONTENT = np.random.default_rng(0).bytes(100_000)
# More than obstore reads at once, neighbors and the whole among them.
RANGES = [(n * 999, n * 999 + 1 + n) for n in range(25)] + [(7, 8), (8, 9), (0, 100_000)]


@pytest.fixture
def file(bucket):
    obstore.put(connect(bucket), "x.beton", CONTENT)
    return find_remote_file(bucket / "x.beton")


def test_ranges_are_those_of_the_object_in_spite_of_faults(file, disturb):
    want = [CONTENT[start:stop] for start, stop in RANGES]
    assert [bytes(part) for part in read_ranges(file, RANGES)] == want
    disturb(cycle_faults(5, "InternalError", "SlowDown", "lost", "cut"))
    assert [bytes(part) for part in read_ranges(file, RANGES[:12])] == want[:12]


@pytest.mark.parametrize("content", [CONTENT[::-1], CONTENT[:-1]], ids=["other", "shorter"])
def test_ranges_of_a_replaced_object_are_refused(file, content):
    obstore.put(connect(file.url), file.url.key, content)
    for read in (lambda: read_ranges(file, RANGES[:3]), lambda: read_range(file, 0, 9)):
        with pytest.raises(UserError, match=f"^{file.url} was replaced while it was read; run"):
            read()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("NoSuchBucket", "there is no such bucket"),
        ("ExpiredToken", "the credentials have expired"),
        ("SlowDown", "the storage refuses more requests"),
    ],
)
def test_a_storage_that_fails_is_one_sentence(file, disturb, fault, said):
    disturb(lambda *_: fault)
    with pytest.raises(StorageError, match=said) as error:
        read_ranges(file, RANGES)
    assert SECRET not in str(error.value)

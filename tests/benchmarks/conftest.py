"""What the tests of the commands share."""

from types import SimpleNamespace

import pytest

from benchmarks import harness


@pytest.fixture(autouse=True)
def garbage_is_left(monkeypatch):
    """A benchmark collects garbage before each turn, 0.3 s where all of PyTorch's modules are
    loaded; nothing here is timed.
    """
    monkeypatch.setattr(harness, "gc", SimpleNamespace(collect=lambda: None))

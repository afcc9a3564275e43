"""Fixtures of the benchmark tests."""

from types import SimpleNamespace

import pytest

from benchmarks import harness


@pytest.fixture(autouse=True)
def skip_garbage_collection(monkeypatch):
    """Skip the garbage collection before each turn, 0.3 s where all of PyTorch's modules are
    loaded: no timing matters here.
    """
    monkeypatch.setattr(harness, "gc", SimpleNamespace(collect=lambda: None))

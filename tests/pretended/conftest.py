"""Fixtures of tests on the pretended CUDA runtime."""

from pathlib import Path

import pytest

from . import build


@pytest.fixture(scope="session")
def runtime(shared) -> Path:
    """The folder of the pretended CUDA runtime, built once in a test run."""
    if missing := build.find_missing():
        pytest.skip(missing)
    return build.build(shared / "runtime")

"""Fixtures of tests on the pretended CUDA runtime."""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from . import build


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A folder that all workers of this test run share."""
    root = tmp_path_factory.getbasetemp()
    # Workers of pytest-xdist have folders of their own beside each other. Its fixture is not there
    # where it is not installed, or switched off by `-p no:xdist`.
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "pretended"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def runtime(shared) -> Path:
    """The folder of the pretended CUDA runtime, built once in a test run."""
    if missing := build.find_missing():
        pytest.skip(missing)
    return build.build(shared / "runtime")


@pytest.fixture(scope="session")
def run_once(shared) -> Callable[[str, Callable[[], object]], object]:
    """`run_once(name, make)` returns the result of `make`, which one worker alone computes.

    Results are JSON. If it fails, every test that wants it fails with the same text.
    """

    def run(name: str, make: Callable[[], object]) -> object:
        path = shared / f"{name}.json"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                try:
                    found = {"result": make()}
                except Exception as error:
                    found = {"error": str(error)}
                path.write_text(json.dumps(found))
        found = json.loads(path.read_text())
        assert "error" not in found, found["error"]
        return found["result"]

    return run

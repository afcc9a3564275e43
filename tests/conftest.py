"""Settings of the process that pytest starts; the fixtures are in fixtures.py."""

import gc
import os
import sys
from collections import Counter

import pytest

# Without bytecode on disk every worker would compile and rewrite all tests (6 s), and every command
# all of this package (0.2 s).
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the fixtures, except in a process that only distributes tests to workers.

    It needs no PyTorch, whose import would delay all workers by 5 s.
    """
    if not config.pluginmanager.hasplugin("dsession"):
        # Until frozen_modules: with all modules and tests a collection takes up to 0.6 s.
        gc.disable()
        from . import fixtures

        config.pluginmanager.register(fixtures)
        # By default Python looks for cycles every 700 objects: 15 % of the time of test_recipes.py.
        # Tests that need a collection ask for it.
        gc.set_threshold(50_000)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the cases of a test that `one_in(n)` leaves out."""
    seen = Counter()
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            if seen[item.originalname, item.path] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[item.originalname, item.path] += 1


def pytest_xdist_auto_num_workers() -> int:
    """Return the processes of `-n auto`: one more than cores, at most 8.

    Tests wait for files, other processes and signals: with a process per core, 23 % of the
    processor time of 2 cores was idle (5:21 against 4:18 minutes).
    """
    cores = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
    return min(8, len(cores) + 1)

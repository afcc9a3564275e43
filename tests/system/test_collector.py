"""Garbage collection: disabled during imports, without the imported objects in commands."""

import gc
import subprocess
import sys
from contextlib import suppress

import pytest

from densefeed.system import collector


@pytest.mark.parametrize("enabled", [True, False])
def test_a_pause_ends_as_it_began(enabled):
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with suppress(ZeroDivisionError), collector.pause():
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if before else gc.disable()


@pytest.mark.slow
def test_only_what_a_command_made_is_collected():
    """No collection from the first module of PyTorch on to the last of the package.

    What was imported is frozen, and a cycle that the command made is finalized when it exits.
    """
    script = """
import gc, sys
counts = {False: 0, True: 0}
def count(phase, details):
    counts["torch" in sys.modules and not hasattr(sys.modules["densefeed"], "Config")] += 1
gc.callbacks.append(count)
import densefeed
gc.collect()
print(counts[True], counts[False] > 0, gc.isenabled())
gc.callbacks.remove(count)
from densefeed.system import errors
class Left:
    def __del__(self): print("finalized", flush=True)
def main():
    print(gc.get_freeze_count() > 100_000, flush=True)
    left = Left()
    left.self = left
errors.run(main)
# A second command freezes nothing: what the first one left can be freed.
errors.run(lambda: None)
gc.collect()
print("exits", flush=True)
"""
    command = [sys.executable, "-c", script]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == "0 True True\nTrue\nfinalized\nexits\n"

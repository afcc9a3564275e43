"""Run commands in which one call that changes a file fails, in processes under faults.c.

A fault is the number of a call, counted from 1, and what it does: SHORT writes half of the bytes,
an errno fails. Only calls on paths below one folder count.
"""

import ctypes
import errno
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .jpeg_files import compile_c
from .preloaded import LIBRARIES, ROOT, Preloaded

SHORT = -1
# Calls that may write a part of their bytes, or be interrupted.
WRITES = ("write", "pwrite", "writev")
INTERRUPTED = (*WRITES, "fsync", "ftruncate", "ftruncate64", "posix_fallocate", "posix_fallocate64")
SECONDS = 300
CALLS = 1 << 14
TOOLS = sorted(path.stem for path in (ROOT / "densefeed" / "tools").glob("[a-z]*.py"))
COMMANDS = (*LIBRARIES, "densefeed.train", *(f"densefeed.tools.{name}" for name in TOOLS))


def list_faults(call: str) -> list[int]:
    """Return the faults that a call may have."""
    name, faults = call.split()[0], [errno.EIO, errno.ENOSPC]
    # A quota shows where space is taken.
    faults += [errno.EDQUOT] * (name in (*INTERRUPTED, "close", "mkdir", "openat", "open64"))
    return faults + [SHORT] * (name in WRITES) + [errno.EINTR] * (name in INTERRUPTED)


class State(ctypes.Structure):
    """What faults.c reads and counts."""

    _fields_ = (
        ("count", ctypes.c_long),
        ("at", ctypes.c_long),
        ("fault", ctypes.c_long),
        ("folder", ctypes.c_char * 4096),
        ("calls", ctypes.c_char * 1024 * CALLS),
    )


class Done(NamedTuple):
    """A command that ended: its exit code, or minus a signal, what it printed, and its calls."""

    code: int
    stdout: str
    stderr: str
    calls: list[str]


class FaultServer:
    """Runs commands of the checkout, which find `modules` imported.

    `words` are those of `command`.
    """

    def __init__(self, folder: Path, modules: Iterable[str] = COMMANDS) -> None:
        library = compile_c(
            folder / "faults.so", [Path(__file__).with_suffix(".c")], "-O1", "-shared", "-fPIC"
        )
        with (folder / "state").open("w+b") as file:
            file.truncate(ctypes.sizeof(State))
            self._state = State.from_buffer(mmap.mmap(file.fileno(), 0))
        environment = {"LD_PRELOAD": str(library), "FAULT_STATE": str(folder / "state")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._command = Preloaded(modules, environment)
        self.close = self._command.close

    def __call__(self, *words: object, folder: Path, at: int = 0, fault: int = 0) -> Done:
        """Run a command whose call `at` below `folder` fails; 0: none."""
        state = self._state
        state.count, state.at, state.fault, state.folder = 0, at, fault, str(folder).encode()
        done = self._command(*words, timeout=SECONDS)
        calls = [state.calls[number % CALLS].value.decode() for number in range(1, state.count + 1)]
        state.folder = b""
        return Done(done.returncode, done.stdout, done.stderr, calls)

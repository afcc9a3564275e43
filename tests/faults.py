"""Run commands in which one call that changes a file fails: a server under faults.c, and a client.

The server imports DenseFeed once, with faults.c preloaded, and forks a process for each command. A
fault is the number of a call, counted from 1, and what it does: SHORT writes half of the bytes, an
errno fails. Only calls on paths below one folder count.
"""

import atexit
import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SHORT = -1
# Calls that may write a part of their bytes, or be interrupted.
WRITES = ("write", "pwrite", "writev")
INTERRUPTED = (*WRITES, "fsync", "ftruncate", "ftruncate64", "posix_fallocate", "posix_fallocate64")
SECONDS = 300


def list_faults(call: str) -> list[int]:
    """Return the faults that a call may have."""
    name, faults = call.split()[0], [errno.EIO, errno.ENOSPC]
    # A quota shows where space is taken.
    faults += [errno.EDQUOT] * (name in (*INTERRUPTED, "close", "mkdir", "openat", "open64"))
    return faults + [SHORT] * (name in WRITES) + [errno.EINTR] * (name in INTERRUPTED)


class Done(NamedTuple):
    """A command that ended: its exit code, or minus a signal, what it printed, and its calls."""

    code: int
    stdout: str
    stderr: str
    calls: list[str]


class FaultServer:
    """Runs commands of the checkout; `words` are those of `command`, or `-c` and code."""

    def __init__(self, library: Path) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            cwd=ROOT,
            env=os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: object, folder: Path, at: int = 0, fault: int = 0) -> Done:
        """Run a command whose call `at` below `folder` fails; 0: none."""
        request = dict(words=list(map(str, words)), folder=str(folder), at=at, fault=fault)
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return Done(*json.loads(self._server.stdout.readline()))

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait()


# ------------------------------------------------------------------------- Server side


def run_command(words: list[str], streams: list[int]) -> None:
    """Become `python WORDS`, except that all is imported, and exit."""
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
    sys.argv, code = words, 0
    try:
        if words[0] == "-c":
            exec(words[1], {"__name__": "__main__"})
        else:
            name = words[0].removesuffix(".py").replace("/", ".")
            importlib.import_module(f"densefeed.{name}").command()
    except SystemExit as stopped:
        code = stopped.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def wait(process: int) -> int:
    """Return the exit code of a process, which is killed after SECONDS."""
    deadline = time.monotonic() + SECONDS
    while not (found := os.waitpid(process, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(found[1])


def serve() -> None:
    library = ctypes.CDLL(None)
    library.fault_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
    library.fault_call.argtypes, library.fault_call.restype = [ctypes.c_long], ctypes.c_char_p
    library.fault_count.restype = ctypes.c_long
    sys.path.insert(0, str(ROOT))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    for tool in sorted((ROOT / "densefeed" / "tools").glob("[a-z]*.py")):
        importlib.import_module(f"densefeed.tools.{tool.stem}")
    importlib.import_module("densefeed.train")
    # Otherwise a forked process collects garbage among all that is imported: 0.3 of its 0.4 s.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            library.fault_arm(request["folder"].encode(), request["at"], request["fault"])
            process = os.fork()
            if not process:
                run_command(request["words"], [out.fileno(), err.fileno()])
            code = wait(process)
            count = library.fault_count()
            library.fault_arm(b"", 0, 0)
            calls = [library.fault_call(n).decode() for n in range(1, count + 1)]
            printed = []
            for stream in (out, err):
                stream.seek(0)
                printed.append(stream.read().decode())
        print(json.dumps([code, *printed, calls]), file=replies, flush=True)
    # Triton would print at finalization that its frozen objects were not freed.
    os._exit(0)


if __name__ == "__main__":
    serve()

"""Run commands in forked processes with limits, and find the rules that they broke.

A command must end in exit code 0, or in one sentence with exit code 2, without a traceback or a
signal, within MOST_SECONDS of processor time and MOST_BYTES of memory. It must change nothing but
its --out, and print no control characters.
"""

import contextlib
import importlib
import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

# Seconds of processor time. A machine that runs other processes too may take WAIT times as long.
MOST_SECONDS, WAIT = 10, 15
# Bytes of memory beyond those of the parent process.
MOST_BYTES = 2**29
# Address space beyond that of the parent process: enough to find what takes too much memory,
# without taking the machine's.
HEADROOM = 4 * 2**30
# Tabs and line breaks are no control characters here.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

# Autograd starts a thread per device in the first backward pass, and then no forked process can
# have one. Fake tensors, as of --dry-run, declare 255 devices; here, when tests are collected,
# there is none.
torch.ones(1, requires_grad=True).sum().backward()


class Outcome(NamedTuple):
    """How a process ended."""

    # Exit code, or the negative number of a signal.
    code: int
    output: str
    # Processor time.
    seconds: float
    # Bytes of memory beyond those of the parent process.
    peak: int


def run(action: Callable[[], object], folder: Path) -> Outcome:
    """Call `action` in a forked process, with `folder` as its working directory."""
    log = folder / "output.txt"
    sys.stdout.flush()
    size, own = measure_memory()
    process = os.fork()
    if not process:
        run_forked(action, folder, log, size + HEADROOM)
    _, status, used = os.wait4(process, 0)
    text = log.read_bytes().decode(errors="backslashreplace")
    log.unlink()
    seconds, peak = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 - own
    return Outcome(os.waitstatus_to_exitcode(status), text, seconds, peak)


def measure_memory() -> tuple[int, int]:
    """Return the bytes of this process: its address space, and what a fork of it has in memory."""
    # A fork begins without pages of files, which are counted as shared.
    size, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return size * resource.getpagesize(), (resident - shared) * resource.getpagesize()


def run_forked(action: Callable[[], object], folder: Path, log: Path, most_bytes: int) -> None:
    """Call `action` with limits and end this process; does not return."""
    code = 70
    try:
        open_streams(log)
        os.chdir(folder)
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        signal.alarm(WAIT * MOST_SECONDS)
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # A forked process must not wait for threads that it does not have.
        torch.set_num_threads(1)
        action()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def open_streams(log: Path) -> None:
    """Write stdout and stderr, of Python and of libraries, to `log`."""
    with open(log, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    # Those of pytest do not write to the descriptors 1 and 2.
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", errors="backslashreplace", closefd=False)


def run_command(words: list[str], folder: Path) -> Outcome:
    """Run a module of densefeed with its options, in a forked process."""

    def action() -> None:
        module, *sys.argv[1:] = words
        sys.argv[0] = f"{module}.py"
        importlib.import_module(f"densefeed.{module}").command()

    return run(action, folder)


def find_fault(outcome: Outcome, changed: list[str]) -> str:
    """Return the rule that a process broke, or an empty string.

    `changed` are the files that it changed and must not change.
    """
    output, sentences = outcome.output, re.findall("^error: ", outcome.output, re.MULTILINE)
    if outcome.code in (-signal.SIGPROF, -signal.SIGALRM):
        limit = MOST_SECONDS if outcome.code == -signal.SIGPROF else WAIT * MOST_SECONDS
        return f"killed after {limit} s"
    if outcome.code < 0:
        return f"signal {signal.Signals(-outcome.code).name}"
    if "Traceback (most recent call last)" in output:
        return "traceback"
    if outcome.code not in (0, 2):
        return f"exit code {outcome.code}"
    if len(sentences) != (outcome.code == 2):
        return f"exit code {outcome.code} with {len(sentences)} sentences"
    if changed:
        return f"file outside --out: {changed[0]!a}"
    if found := CONTROL.search(output):
        return f"control character {found[0]!a} in the output"
    if outcome.peak > MOST_BYTES:
        return f"{outcome.peak / 2**20:,.0f} MiB"
    return ""


def snapshot(folder: Path) -> dict[Path, tuple[int, ...]]:
    """Return everything below a folder, files with their size and time; links are not followed."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            about = path.lstat()
            found[path] = () if name in folders else (about.st_size, about.st_mtime_ns)
    return found


def compare(before: dict, after: dict) -> list[Path]:
    """Return the paths that two snapshots do not have in common, and changed files."""
    return sorted(path for path in before | after if before.get(path) != after.get(path))

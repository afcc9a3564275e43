"""Flows: each step is a command in its own process, skipped if it is finished."""

import multiprocessing
import os
import shlex
import signal
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path

import torch

from densefeed.recipes import RECIPES
from densefeed.system.commands import call
from densefeed.system.errors import UserError
from densefeed.system.files import make_folder, open_locked
from densefeed.system.json_files import check_number, read_json
from densefeed.system.options import Integers, Options
from densefeed.system.provenance import write_json
from densefeed.system.terminal import print

# Of <sys/prctl.h>: the signal that a process gets when its parent ends.
PR_SET_PDEATHSIG = 1
# The end of the remedy for a damaged file of a finished step.
AGAIN = "run the same command again"


@dataclass(frozen=True, kw_only=True)
class FlowOptions(Options):
    """The trainings of a flow."""

    seeds: Integers = (0,)  # seeds of the trainings
    epochs: int | None = None  # epochs of every training; default: those of the recipes

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.seeds:
            raise UserError("--seeds names no seed; give at least one")
        if len(set(self.seeds)) < len(self.seeds):
            raise UserError("--seeds names a seed twice; give each once")
        if min(self.seeds) < 0:
            raise UserError(f"--seeds has {min(self.seeds)}; give no seed below 0")
        if self.epochs is not None and self.epochs < 1:
            raise UserError(f"--epochs is {self.epochs}; train at least one epoch")


def check_students(students: Sequence[str], known: Iterable[str], recipes: Iterable[str]) -> None:
    """Raise UserError unless these are students, each once; `recipes` are the names of theirs."""
    if not students:
        raise UserError("--students names no student; give at least one")
    if len(set(students)) < len(students):
        raise UserError("--students names a student twice; give each once")
    for name, recipe in zip(students, recipes, strict=True):
        if recipe not in RECIPES:
            raise UserError(f"--students {name}: unknown student; choose from {', '.join(known)}")


@contextmanager
def begin_flow(folder: Path, **options: object) -> Iterator[None]:
    """Lock the folder of a flow, and write down the options that its steps depend on.

    UserError if another process runs a flow in it, and if it was begun with other options: finished
    steps would be kept, and show the old ones.
    """
    make_folder(folder)
    descriptor = open_locked(folder, os.O_RDONLY)
    try:
        keep_options(folder, options)
        yield
    finally:
        os.close(descriptor)


def keep_options(folder: Path, options: dict[str, object]) -> None:
    """Write down the options of a flow. UserError if it was begun with others."""
    path, remedy = folder / "flow.json", f"remove {folder} to start over"
    if not path.exists():
        write_json(path, options)
        return
    before = read_json(path, remedy)
    for name, value in options.items():
        if (was := before.get(name)) != value:
            option = f"--{name.replace('_', '-')}"
            begun = f"without {option}" if was is None else f"with {option} {was}"
            raise UserError(
                f"{folder} was begun {begun}; give the same, choose another --out, or {remedy}"
            )


def remove_outdated(page: Path, runs: Iterable[Path]) -> None:
    """Remove a report of finished runs if one of `runs` is still to be trained."""
    if not all((run / "result.json").exists() for run in runs):
        page.unlink(missing_ok=True)
        # Its numbers.
        page.with_suffix(".json").unlink(missing_ok=True)


def run_step(
    result: Path,
    purpose: str,
    name: str,
    *words: object,
    threads: int | None = None,
    **options: object,
) -> None:
    """Print and run the command `densefeed NAME`, unless its `result` exists.

    Those of the `options` that are not None become --options. `threads` is the number of PyTorch's
    threads, None for one per core.
    """
    if result.exists():
        print(f"{result} exists; skipped")
        return
    for option, value in options.items():
        if value is not None:
            words += f"--{option.replace('_', '-')}", value
    words = [name, *map(str, words)]
    # Flushed, since in a pipe the output of the command would come before it.
    setting = f"OMP_NUM_THREADS={threads} " if threads else ""
    for line in ("", f"# {purpose}", f"$ {setting}densefeed {shlex.join(words)}"):
        print(line, flush=True)
    if code := run_command(words, threads):
        sys.exit(code)
    # A training that a signal stopped has saved its state and exits with 0.
    if not result.exists():
        print("stopped; run the same command again to continue")
        # The exit code of a shell command that Ctrl-C stopped.
        sys.exit(130)


def run_command(words: list[str], threads: int | None = None) -> int:
    """Run a command in a process of its own; return its exit code. `threads` as in `run_step`."""
    # A forked process has PyTorch and timm already, whose import takes 4 s of every command. Only
    # Linux forks safely: macOS's libraries may hold locks.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    process = context.Process(target=call_command, args=(words, threads))
    process.start()
    process.join()
    return process.exitcode


def call_command(words: list[str], threads: int | None) -> None:
    """Run a command in this process, which ends with the one that started it."""
    # Otherwise it would go on for minutes, with the lock of the folder. macOS has no such signal.
    if sys.platform == "linux":
        CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if threads:
        torch.set_num_threads(threads)
    call(*words)


def train_model(
    out: Path, purpose: str, words: tuple[str, ...], data: dict, seed: int, options: FlowOptions
) -> None:
    """Train a model in the run folder `out`, unless it is finished; `data` become --options."""
    run_step(
        out / "result.json",
        purpose,
        "train",
        *words,
        **data,
        out=out,
        seed=seed,
        # An interrupted training continues from its last checkpoint.
        resume="auto",
        epochs=options.epochs,
        # With one thread a seed gives the same weights in every run. The steps are so small that a
        # second thread took 22 s where one took 25; on a machine with other work, where threads
        # wait for each other, it took up to 107 s.
        threads=1,
    )


def read_top1(folder: Path) -> float:
    """Return the top-1 of a finished run, 0 to 1. Raises UserError if its result is damaged."""
    return read_numbers(folder / "result.json", "top1")["top1"]


def read_numbers(path: Path, *keys: str) -> dict[str, float]:
    """Return the numbers of a JSON file; UserError if it is damaged. Shares are 0 to 1."""
    remedy = f"remove it, and {AGAIN}"
    found = read_json(path, remedy)
    for key in keys:
        check_number(path, key, found.get(key), 1 if key == "top1" else float("inf"), remedy)
    return found


def format_spread(values: list[float]) -> str:
    """Format shares as a percentage; of several, mean ± standard deviation."""
    mean = f"{100 * statistics.mean(values):.1f}"
    return f"{mean} ± {100 * statistics.stdev(values):.1f} %" if len(values) > 1 else f"{mean} %"

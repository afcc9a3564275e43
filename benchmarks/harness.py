"""Shared parts of the benchmarks: interleaved runs, spreads, ratios and results files.

Runs are pinned to cores. A result row holds the command, hardware, versions, commit, number of
runs, median and quartiles. Two rates are compared only within a round, where they were measured
seconds apart: on a shared machine the rate drifts from minute to minute by more than the
differences to be measured.
"""

import csv
import fcntl
import gc
import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from densefeed.system import provenance
from densefeed.system.devices import CORES
from densefeed.system.errors import UserError, make_command
from densefeed.system.files import open_locked, replace_file
from densefeed.system.options import Count as Count
from densefeed.system.options import Options
from densefeed.system.provenance import RESULTS, write_json

Key = TypeVar("Key")
# One value per round, by contestant.
Series = dict[str, list[float]]
# Their versions are recorded, of those that are installed.
PACKAGES = (
    *("torch", "torchvision", "timm", "numpy", "pillow", "h5py"),
    *("ffcv", "simplejpeg", "nvidia-dali-cuda130"),
)
QUARTILES = ("median", "p25", "p75")
COLUMNS = (
    *("date", "commit", "cpu", "cores", "versions", "command", "data", "name", "threads"),
    *(*QUARTILES, "unit", "runs"),
)


@dataclass(frozen=True, kw_only=True)
class Output(Options):
    """Options of every benchmark: where its results go."""

    json: Path | None = None  # write all results there as JSON
    record: bool = True  # append rows to --results
    results: Path = RESULTS  # CSV file of all results


def command(main: Callable, options: type[Output], description: str) -> None:
    """Run a benchmark's `main` with `options` from the command line."""
    make_command(main, options, description)()


def environment() -> dict[str, str | int]:
    """Return date, commit, hardware, versions and command of a measurement that begins."""
    return provenance.environment(PACKAGES)


def check_threads(*threads: int) -> None:
    """Raise UserError if --threads asks for more cores than this process may use, or for none."""
    if not threads or min(threads) < 1 or max(threads) > CORES:
        raise UserError(
            f"--threads {' '.join(map(str, threads))}: this process may use {CORES} cores"
        )


# ------------------------------------------------------------------------- measuring


def take_turns(
    works: dict[Key, Callable[[int], int]],
    rounds: int,
    before: Callable[[Key], None] = lambda key: None,
    done: Callable[[Key], None] = lambda key: None,
) -> dict[Key, list[float]]:
    """Measure the items per second of each work in each of `rounds` rounds.

    `works[key](n)` does its n-th run and returns its number of items. Every round runs every work
    once and starts with another one, so that a drift within a round favors none. One more round
    before them, the warm-up, is not counted. `before` and `done` are called outside the timed
    interval.
    """
    keys, rates = list(works), {key: [] for key in works}
    for number in range(rounds + 1):
        first = number % len(keys)
        for key in keys[first:] + keys[:first]:
            before(key)
            rate = time_work(works[key], number)
            # Round 0 is the warm-up: it includes compilation, ten seconds for stock FFCV alone.
            if number:
                rates[key].append(rate)
            done(key)
    return rates


def time_work(work: Callable[[int], int], number: int) -> float:
    """Do a run of a work and return its items per second."""
    # No work is timed while it collects the garbage of another.
    gc.collect()
    start = time.perf_counter()
    count = work(number)
    return count / (time.perf_counter() - start)


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or `CPU`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def choose_cores(count: int, allowed: set[int]) -> set[int]:
    """Choose `count` of the allowed logical CPUs, on distinct physical cores as far as possible."""
    seen, firsts, seconds = set(), [], []
    for cpu in sorted(allowed):
        # Logical CPUs of one physical core share its arithmetic units: two of them are slower than
        # two cores, and the ratio of two threads to one would measure that.
        shared = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings = shared.read_text().strip() if shared.exists() else str(cpu)
        (seconds if siblings in seen else firsts).append(cpu)
        seen.add(siblings)
    return set((firsts + seconds)[:count])


def pin(cpus: set[int]) -> None:
    """Confine every thread of this process and of its worker processes to `cpus`.

    sched_setaffinity alone moves a single thread: thread pools and workers that already run
    (OpenMP, numba, a DataLoader's workers) would keep all cores and speed up a contestant that is
    limited to one.
    """
    for process in ["self", *(child.pid for child in active_children())]:
        for task in Path(f"/proc/{process}/task").iterdir():
            try:
                os.sched_setaffinity(int(task.name), cpus)
            except ProcessLookupError:
                # The thread has ended since the folder was listed.
                continue


@contextmanager
def restore_cpus_after() -> Iterator[set[int]]:
    """Yield the CPUs that this process may use; at the end restore them and torch's thread count.

    All threads of the process get the CPUs back.
    """
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        yield allowed
    finally:
        torch.set_num_threads(threads)
        pin(allowed)


@contextmanager
def use_cores(threads: int, more: int = 0) -> Iterator[None]:
    """Give torch `threads` threads, and this process as many cores and `more`, if there are."""
    with restore_cpus_after() as allowed:
        torch.set_num_threads(threads)
        pin(choose_cores(threads + more, allowed))
        yield


# ------------------------------------------------------------------------- results


def spread_rows(values: Series, unit: str) -> list[dict]:
    """Return a row for each contestant: name, unit, number of runs, median and quartiles."""
    rows = []
    for name, runs in values.items():
        quartiles = zip(QUARTILES, np.percentile(runs, (50, 25, 75)).tolist(), strict=True)
        rows.append({"name": name, "unit": unit, "runs": len(runs)} | dict(quartiles))
    return rows


def compare(
    a: str, b: str, of_a: list[float], of_b: list[float], of: str = "", bar: str = ""
) -> dict:
    """Return the row of the ratio of contestant `a` to `b` within each round.

    `of` ends its name. `bar` is the value that the median must reach, as text.
    """
    (row,) = spread_rows({f"{a} / {b}{of}": np.divide(of_a, of_b).tolist()}, "ratio")
    return row | {"a": a, "b": b, "bar": bar}


def report(
    options: Output,
    rows: list[dict],
    ratios: list[dict],
    data: str,
    facts: dict,
    prefix: str = "",
    **more: object,
) -> dict:
    """Print and save the rows of contestants and their ratios; return the document of --json.

    `data` describes the inputs, `facts` the environment; both are in every row of --results, whose
    names get the `prefix`. `more` is only in the document.
    """
    document = {"rows": rows, "ratios": ratios, "data": data, "environment": facts, **more}
    print(data)
    for row in rows + ratios:
        # Only rows of loaders differ in their threads.
        name = f"{row['name']}, threads {row['threads']}" if "threads" in row else row["name"]
        median, low, high = (format(row[key], ",.3f") for key in QUARTILES)
        bar = f", required {row['bar']}" if row.get("bar") else ""
        print(f"{name:48} {median:>10} {row['unit']} ({low} to {high}){bar}")
    if options.json is not None:
        write_json(options.json, document)
    if options.record:
        common = facts | {"data": data}
        named = [common | row | {"name": prefix + row["name"]} for row in rows + ratios]
        append_rows(options.results, named)
    return document


def append_rows(path: Path, rows: list[dict]) -> None:
    """Append the COLUMNS of `rows` to a CSV file, all rows or none; a new file gets a header.

    Raises UserError if the file has other columns: rows of two layouts below one header would be
    misread.
    """
    # Two benchmarks may end at the same time.
    descriptor = open_locked(path.parent, os.O_RDONLY, fcntl.LOCK_EX)
    try:
        replace_rows(path, rows)
    finally:
        os.close(descriptor)


def replace_rows(path: Path, rows: list[dict]) -> None:
    """Write a CSV file again, with `rows` behind those that it has; see `append_rows`."""
    old = path.read_text() if path.exists() else ""
    if old and tuple(old.splitlines()[0].split(",")) != COLUMNS:
        raise UserError(
            f"{path} has other columns than {', '.join(COLUMNS)}; move it away to start a new file"
        )
    text = io.StringIO()
    # Rows also have fields that only the JSON document keeps. By default csv ends lines with
    # \r\n, unlike the file in the repository.
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    if not old:
        writer.writeheader()
    for row in rows:
        # No clock here resolves more than six digits.
        digits = {name: f"{value:.6g}" for name, value in row.items() if isinstance(value, float)}
        writer.writerow(row | digits)
    # The file is replaced as a whole: an append that is interrupted would leave half a row. The
    # last line may lack its newline if the file was edited by hand.
    with replace_file(path) as part:
        part.write_text(old + "\n" * (bool(old) and not old.endswith("\n")) + text.getvalue())

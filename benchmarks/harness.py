"""What every benchmark shares: runs in turns on pinned cores, median and quartiles, ratios pair by
pair, JSON and CSV.

A speed is a row: command, hardware, versions, commit, runs, middle and spread. Two speeds are
compared only within a round, where they were taken seconds apart: on a shared machine the rate of a
whole minute drifts by more than what is compared.
"""

import csv
import gc
import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import active_children
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from densefeed.system.errors import UserError
from densefeed.system.files import replace_file

Key = TypeVar("Key")
ROOT = Path(__file__).parent.parent
RESULTS = Path("benchmarks/results.csv")
COLUMNS = (
    "date",
    "commit",
    "cpu",
    "cores",
    "versions",
    "command",
    "data",
    "name",
    "threads",
    "median",
    "p25",
    "p75",
    "unit",
    "runs",
)


class Spread(NamedTuple):
    """The middle and the quartiles of a number of runs."""

    median: float
    p25: float
    p75: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        return cls(*(float(np.percentile(values, at)) for at in (50, 25, 75)))


def pairwise(a: list[float], b: list[float]) -> Spread:
    """a / b within each round."""
    return Spread.of([x / y for x, y in zip(a, b, strict=True)])


def take_turns(
    works: dict[Key, Callable[[int], int]],
    rounds: int,
    before: Callable[[Key], None],
    done: Callable[[Key], None],
    warm: int = 1,
) -> dict[Key, list[float]]:
    """Things per second of each work in each of `rounds` rounds.

    `works[key](n)` does its n-th run and says how many things it did. Every round runs every work
    once, beginning with another one each time; `warm` rounds before them are not counted. `before`
    and `done` stand outside the clock.
    """
    keys, rates = list(works), {key: [] for key in works}
    for number in range(warm + rounds):
        first = number % len(keys)
        for key in keys[first:] + keys[:first]:
            before(key)
            gc.collect()  # nobody pays for another's garbage
            start = time.perf_counter()
            count = works[key](number)
            took = time.perf_counter() - start
            if number >= warm:
                rates[key].append(count / took)
            done(key)
    return rates


def cores(count: int, allowed: set[int]) -> set[int]:
    """`count` of the allowed logical CPUs, on different physical cores as long as there are any."""
    seen, firsts, seconds = set(), [], []
    for cpu in sorted(allowed):
        shared = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings = shared.read_text().strip() if shared.exists() else str(cpu)
        (seconds if siblings in seen else firsts).append(cpu)
        seen.add(siblings)
    return set((firsts + seconds)[:count])


def pin(cpus: set[int]) -> None:
    """Confine every thread of this process, and of the worker processes it started, to `cpus`.

    sched_setaffinity alone moves one thread only: pools started earlier (OpenMP, numba, a
    DataLoader's workers) would keep all cores and help a contestant that was granted one.
    """
    for process in ["self", *(child.pid for child in active_children())]:
        for task in Path(f"/proc/{process}/task").iterdir():
            try:
                os.sched_setaffinity(int(task.name), cpus)
            except ProcessLookupError:  # a thread that ended meanwhile
                continue


@contextmanager
def unpinned_after() -> Iterator[set[int]]:
    """Gives the CPUs this process may use, and gives them back to all its threads at the end."""
    allowed = os.sched_getaffinity(0)
    try:
        yield allowed
    finally:
        pin(allowed)


def append_rows(path: Path, rows: list[dict]) -> None:
    """Append rows of COLUMNS to a CSV, all or none; it begins with its header.

    UserError if the file has other columns: rows of two layouts under one header would be read
    wrongly.
    """
    old = path.read_text() if path.exists() else ""
    if old and tuple(old.splitlines()[0].split(",")) != COLUMNS:
        raise UserError(
            f"{path} has other columns than {', '.join(COLUMNS)}; move it away, and a new one will be begun"
        )
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    if not old:
        writer.writeheader()
    short = {float: "{:.6g}".format}  # more digits than that no clock here gives
    writer.writerows(
        {name: short.get(type(value), str)(value) for name, value in row.items()} for row in rows
    )
    with replace_file(path) as part:
        part.write_text(old + "\n" * (bool(old) and not old.endswith("\n")) + text.getvalue())

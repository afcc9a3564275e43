"""One progress bar for everything that takes longer than a second."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Item = TypeVar("Item")
SAID_EVERY = 60.0  # seconds, in a log file


def columns(*more: ProgressColumn) -> tuple[ProgressColumn, ...]:
    """What every bar shows: name, bar, count, time spent, time left."""
    counted = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return *counted, TextColumn("left"), TimeRemainingColumn(), *more


def bar(items: Iterable[Item], what: str, total: int | None = None) -> Iterator[Item]:
    """Pass `items` on while a bar shows how many of `total` (default: their length) are through,
    and the time left.

    On a terminal the bar moves; in a log file it is one line, written at the end.
    """
    with Progress(*columns()) as progress:
        yield from progress.track(items, description=what, total=total)


@contextmanager
def steps_bar(what: str, total: int, done: int) -> Iterator[Callable[[int, str], None]]:
    """A bar over steps; the callable it gives advances it by a number of steps and shows a text
    beside it.
    """
    with Progress(*columns(TextColumn("{task.fields[text]}"))) as progress:
        task = progress.add_task(what, total=total, completed=done, text="")
        yield lambda steps, text: progress.update(task, advance=steps, text=text)


@contextmanager
def tally(what: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
    """A bar that is told how many of `total` are through, whoever did them. A log file gets a line
    every minute, and one at the end.
    """
    with Progress(*columns()) as progress:
        task, began, said = (
            progress.add_task(what, total=total, completed=done),
            time.monotonic(),
            time.monotonic(),
        )

        def tell(through: int) -> None:
            nonlocal said
            progress.update(task, completed=through)
            now = time.monotonic()
            if progress.console.is_terminal or now - said < SAID_EVERY or through <= done:
                return
            said, rate = now, (through - done) / (now - began)
            left = timedelta(seconds=round((total - through) / rate))
            progress.console.print(f"{what}: {through:,} of {total:,}, {rate:,.1f}/s, {left} left")

        yield tell

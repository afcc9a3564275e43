"""Progress bars for work that takes longer than a second."""

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

from densefeed.system.terminal import escape_controls

Item = TypeVar("Item")
# Seconds between lines in a log file.
LOG_INTERVAL = 60.0


def open_bar(*more: ProgressColumn) -> Progress:
    """Make a bar with name, bar, count, time elapsed, time left, and `more`."""
    return Progress(
        # Names of files may contain `[/b]`, which is an error in rich's markup.
        TextColumn("{task.description:<22}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        *more,
    )


def bar(items: Iterable[Item], what: str, total: int | None = None) -> Iterator[Item]:
    """Yield `items` and show progress out of `total` (default: their length) and the time left.

    On a terminal the bar moves; in a log file it is one line, written at the end.
    """
    with open_bar() as progress:
        yield from progress.track(items, description=escape_controls(what), total=total)


@contextmanager
def steps_bar(what: str, total: int, done: int) -> Iterator[Callable[[int, str], None]]:
    """Yield a function that advances the bar by a number of steps and shows a text beside it."""
    with open_bar(TextColumn("{task.fields[text]}")) as progress:
        task = progress.add_task(escape_controls(what), total=total, completed=done, text="")
        yield lambda steps, text: progress.update(task, advance=steps, text=text)


@contextmanager
def tally(what: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that sets how many of `total` are completed, by any process.

    A log file gets a line every minute and one at the end.
    """
    with open_bar() as progress:
        task = progress.add_task(escape_controls(what), total=total, completed=done)
        started = printed = time.monotonic()

        def update(completed: int) -> None:
            nonlocal printed
            progress.update(task, completed=completed)
            now = time.monotonic()
            # Nothing new has no rate, and the time left would be a division by zero.
            if progress.console.is_terminal or now - printed < LOG_INTERVAL or completed <= done:
                return
            # What earlier runs completed took no time in this one.
            printed, rate = now, (completed - done) / (now - started)
            left = timedelta(seconds=round((total - completed) / rate))
            text = f"{what}: {completed:,} of {total:,}, {rate:,.1f}/s, {left} left"
            progress.console.print(escape_controls(text), markup=False)

        yield update

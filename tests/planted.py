"""Links, pipes, devices and folders under the names of files that a command makes."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Each makes the file `path`; `victim` is a file that is not to be changed. Reading /dev/zero would
# take all memory, and /dev/null is a device as well.
PLANTS = {
    "pipe": lambda path, victim: os.mkfifo(path),
    "device": lambda path, victim: path.symlink_to("/dev/null"),
    "link": lambda path, victim: path.symlink_to(victim),
    "folder": lambda path, victim: path.mkdir(),
}


def plant(kind: str, path: Path) -> Path:
    """Make `path` of a kind of PLANTS; return the file that a link leads to."""
    victim = path.parent / "victim"
    path.parent.mkdir(parents=True, exist_ok=True)
    victim.write_bytes(b"mine")
    PLANTS[kind](path, victim)
    return victim


@contextmanager
def time_limit(seconds: float = 5.0) -> Iterator[None]:
    """Raise TimeoutError in what waits longer, as opening a pipe without a writer does."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

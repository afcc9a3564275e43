"""Print text that may contain names and messages from files, which must not control the terminal.

A file may be called `\\x1b[2J` or end in characters that reverse the order of the text behind them.
"""

import builtins
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, RenderableType

# Control characters (C0, DEL, C1), which terminals obey or start a line of their own; separators
# and marks that change the order of the text (Unicode's bidirectional controls); halves of
# surrogate pairs, which stand for bytes of a name that are not UTF-8 and which no stream encodes.
CONTROLS = re.compile(
    "[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
# The streams in errors of the operating system.
STDOUT, STDERR = "standard output", "standard error"


def escape_controls(text: object) -> str:
    r"""Write control characters as Python does in a string, such as `\x1b`."""
    return CONTROLS.sub(lambda match: repr(match[0])[1:-1], str(text))


def print(*values: object, sep: str = " ", file: TextIO | None = None, flush: bool = False) -> None:
    """Print values with `escape_controls` as one line.

    It replaces Python's function in all modules of the package, so that none forgets it.
    """
    line = sep.join(map(escape_controls, values))
    with name_stream(STDOUT if file in (None, sys.stdout) else STDERR):
        builtins.print(line, file=file or sys.stdout, flush=flush)


def warn(text: object) -> None:
    """Print a warning on standard error, immediately."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def print_table(*parts: RenderableType, least_width: int = 0) -> None:
    """Print rich tables, at least `least_width` characters wide; text in them must be escaped."""
    # rich ends the process with code 1 where a pipe is closed.
    console = Console()
    console.width = max(console.width, least_width)
    with console.capture() as text:
        console.print(*parts)
    with name_stream(STDOUT):
        builtins.print(text.get(), end="")


def flush_stdout() -> None:
    """Write what was printed."""
    # A daemon may have none.
    if sys.stdout and not sys.stdout.closed:
        with name_stream(STDOUT):
            sys.stdout.flush()


@contextmanager
def name_stream(name: str) -> Iterator[None]:
    """Let errors of the operating system name the stream, for example on a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or name
        raise

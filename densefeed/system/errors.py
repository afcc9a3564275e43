"""Errors of commands: one sentence on stderr and exit code 2."""

import errno
import os
import platform
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from densefeed.system.collector import ignore_imports
from densefeed.system.terminal import STDERR, STDOUT, flush_stdout, name_stream, print

# The root of a checkout; for an installed wheel, the folder of all packages.
ROOT = Path(__file__).parents[2]
REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space or choose another place",
    errno.EFBIG: "the file grew past the limit of this file system or shell (ulimit -f)",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another place",
    errno.EIO: "the disk failed to read or write; check it, or choose another place",
    errno.EACCES: "no permission; change its owner or mode, or choose another place",
    errno.EPERM: "no permission; change its owner or mode, or choose another place",
    errno.EROFS: "the file system is read-only; choose another place",
    errno.ENOENT: "there is no such file or folder; check the path",
    errno.EEXIST: "a file stands where a folder is needed; choose another place",
    errno.ENOTDIR: "a part of this path is a file, not a folder; check the path",
    errno.EISDIR: "this is a folder where a file is expected; check the path",
    errno.ELOOP: "symbolic links lead around in a circle; remove one of them",
    errno.ENAMETOOLONG: "this name is too long for the file system; shorten it",
    errno.EMFILE: "too many open files; raise the limit with `ulimit -n 4096`",
}

# What is left of a URL of object storage that was read as a path.
COLLAPSED_URL = re.compile(r"(s3|gs|az):/(?=[^/])")

# PyTorch's CPU allocator raises a plain RuntimeError with one of the first two, by system. The last
# is of tensors whose number of bytes has more than 64 bits.
NO_MEMORY = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")


class UserError(Exception):
    """Invalid input. The message is one sentence that names the file or option and the remedy.

    Commands print it and exit with code 2.
    """


class BusyError(UserError):
    """Another process is writing the file."""


def check_byte_order() -> None:
    """Raise UserError on a big-endian processor: files and decoder are little-endian."""
    if sys.byteorder != "little":
        raise UserError(
            f"DenseFeed needs a little-endian processor, and {platform.machine()} is big-endian;"
            " use x86-64 or arm64"
        )


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if it has no message."""
    return str(error).partition("\n")[0] or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, NumPy or PyTorch reports that memory is used up."""
    # torch.OutOfMemoryError is compared by name: commands that need no PyTorch do not import it.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY))
    )


def restore_url(path: str | Path) -> str | None:
    """Return the URL of object storage that was read as a path, which collapses its slashes."""
    text = str(path)
    return COLLAPSED_URL.sub(r"\1://", text) if COLLAPSED_URL.match(text) else None


def explain_os_error(error: OSError) -> str:
    """Describe an error of the operating system in one sentence: file, problem, remedy.

    Libraries (h5py, torch) wrap such errors and keep only their text, so the error number is also
    searched in the text.
    """
    text, number = str(error), error.errno
    # The remedies are for files.
    if error.filename in (STDOUT, STDERR):
        return f"{error.filename} cannot be written ({error.strerror}); redirect it to another file"
    # An error with the name of a file is not a wrapped one, and the name may contain anything.
    if not (number or error.filename):
        found = (n for n in REMEDIES if f"errno = {n}," in text or os.strerror(n) in text)
        number = next(found, None)
    if number == errno.ENOENT and (url := restore_url(error.filename)):
        return f"{url} is in object storage, which is not read here; copy it to a local disk"
    if number in REMEDIES:
        return f"{error.filename or text}: {REMEDIES[number]}"
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else text


def end_at_interrupt() -> None:
    """Let Ctrl-C end this process with a line, until `run`: nothing has begun yet.

    Imports take seconds, and a KeyboardInterrupt in them is a traceback.
    """
    # Another one was chosen for this process, for example to ignore it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


def end(*_: object) -> None:
    """Handle SIGINT: end at once, without what Python does when it exits."""
    with suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(130)


def run(main: Callable[[], object]) -> None:
    """Call `main` as the body of a command.

    UserError, OSError and errors of memory end in one sentence on stderr and exit code 2 instead of
    a traceback. A closed pipe exits with 141, Ctrl-C with 130.
    """
    if signal.getsignal(signal.SIGINT) is end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    open_streams()
    ignore_imports()
    # Names may have characters that the terminal's encoding lacks. In a notebook stdout is not a
    # file, and a file that was replaced by a pipe after Python opened it cannot be changed.
    with suppress(AttributeError, OSError):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        check_byte_order()
        # Printed text that Python writes when it exits has no sentence for an error.
        try:
            main()
        except SystemExit:
            flush_stdout()
            raise
        flush_stdout()
    except UserError as error:
        stop(str(error))
    except OSError as error:
        # The reader closed the pipe, as `... | head` does.
        if error.errno == errno.EPIPE:
            discard(sys.stdout)
            discard(sys.stderr)
            # 128 + SIGPIPE, as a shell reports it.
            sys.exit(141)
        stop(explain_os_error(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        stop(
            f"out of memory ({first_line(error)}); end other programs, or give a smaller --batch "
            "or fewer --threads where the command has them"
        )
    except KeyboardInterrupt:
        # 128 + SIGINT.
        leave("interrupted", 130)


def open_streams() -> None:
    """Open streams that were closed when the process began, to nowhere.

    A file that the process opens would get their numbers, and what libraries print would be in it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def make_command(
    main: Callable, options: type, description: str, sigterm: bool = False
) -> Callable[[], None]:
    """Return the command that calls `main` with `options` from the command line.

    `options` is a class of options (system/options.py).
    With `sigterm`, SIGTERM ends it as Ctrl-C does, and not at once.
    """

    def command() -> None:
        # Imported here: every module of the package imports this one for UserError.
        import tyro

        if sigterm:
            signal.signal(signal.SIGTERM, signal.default_int_handler)

        def call() -> None:
            # Not every command's class of options derives from Options.
            words, has_checks = sys.argv[1:], hasattr(options, "check_named")
            if has_checks:
                options.check_known(words, Path(sys.argv[0]).name)
            with name_stream(STDOUT):
                given = tyro.cli(options, description=description)
            if has_checks:
                given.check_named(words)
            main(given)

        run(call)

    return command


def install_extra(extra: str) -> str:
    """Return what to run for an optional part, an extra of pyproject.toml.

    An installed wheel needs no index for its extras: pip reads them from the installed package.
    """
    if (ROOT / "pyproject.toml").exists():
        return f'run `pip install ".[{extra}]"` in the checkout of densefeed'
    return f'run `pip install "densefeed[{extra}]"`'


def stop(sentence: str) -> None:
    """Print `sentence` on stderr and exit with code 2."""
    # Messages of libraries may have several lines.
    leave(f"error: {' '.join(sentence.split())}", 2)


def leave(line: str, code: int) -> None:
    """Print a line on stderr, after what was printed on stdout, and exit.

    A closed pipe or a full disk does not change the exit code.
    """
    try:
        flush_stdout()
    except OSError:
        discard(sys.stdout)
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)
    sys.exit(code)


def discard(stream: TextIO | None) -> None:
    """Let what a stream has not yet written go nowhere.

    Python writes it when it exits, and would fail again (Python's signal module, Note on SIGPIPE).
    """
    # Without a descriptor, as in a notebook, there is nothing that Python writes.
    with suppress(AttributeError, OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

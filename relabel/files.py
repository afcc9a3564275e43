"""How every command of ours fails and writes: one sentence and exit code 2, and never half a file under its final name."""

import errno
import fcntl
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space or choose another --out",
    errno.EFBIG: "the file grew past the limit of this file system or shell (ulimit -f)",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another --out",
    errno.EACCES: "no permission; change its owner or mode, or choose another place",
    errno.EPERM: "no permission; change its owner or mode, or choose another place",
    errno.EROFS: "the file system is read-only; choose another --out",
    errno.ENOENT: "there is no such file or folder; check the path",
    errno.EEXIST: "a file stands where a folder is needed; choose another --out",
    errno.ENOTDIR: "a part of this path is a file, not a folder; check the path",
    errno.EISDIR: "this is a folder where a file is expected; check the path",
    errno.EMFILE: "too many open files; raise the limit with `ulimit -n 4096`",
}


NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # some network disks know none; then nothing keeps two writers apart


class UserError(Exception):
    """Bad input. The message is one sentence that names the file and the remedy; commands print it and exit with 2."""


class BusyError(UserError):
    """Another process writes the file."""


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Give a temporary sibling of `path` to write; fsync and rename it over `path` on success, delete it on failure.

    A reader of `path` sees the whole old file or the whole new one, also after a power cut: the data is on disk before
    the name is. The sibling's name ends in `.part`, and it is locked; siblings that killed processes left are removed.
    """
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_orphans(path)
        descriptor = create_locked(part)
        try:
            yield part
            sync(part)
            os.replace(part, path)
            sync(path.parent)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)


def lock(descriptor: int, path: Path) -> None:
    """Lock an open file for us alone, until it is closed or the process ends, however it ends; BusyError if another has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BusyError(f"{path} is being written by another process; wait for it or choose another --out") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def open_locked(path: Path) -> int:
    """Open a file to be read and written by us alone. BusyError if another process has it, FileNotFoundError if it is gone."""
    while True:
        descriptor = os.open(path, os.O_RDWR)
        try:
            lock(descriptor, path)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # between our two calls the other process gave the file another name


def create_locked(path: Path) -> int:
    """The same for a file that is made if it is not there."""
    while True:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o666))
        with suppress(FileNotFoundError):  # for an instant it was nobody's, and taken for an orphan
            return open_locked(path)


def remove_orphans(path: Path) -> None:
    """Remove what killed processes left of making `path`: siblings `<path>.PID.part` that nobody holds locked."""
    pattern = re.compile(re.escape(path.name) + r"\.\d+\.part")
    for part in [file for file in path.parent.iterdir() if pattern.fullmatch(file.name)] if path.parent.is_dir() else []:
        try:
            descriptor = open_locked(part)
        except (BusyError, OSError):  # its maker lives, or it is none of ours
            continue
        part.unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Let an error of the operating system that names no file, as a failed write does, name `path`.

    torch.save meets a full disk and then fails an assertion of its own while it cleans up; the full disk is raised.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not (isinstance(cause, OSError) and cause.errno in REMEDIES):
            cause = cause.__context__
        if cause is None:
            raise
        cause.filename = cause.filename or str(path)
        raise cause from None


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def explain(error: OSError) -> str:
    """One sentence for an error of the operating system: the file, what happened, what to do.

    Libraries (h5py, torch) wrap such errors and keep only their text, so the number is also looked for there.
    """
    text = str(error)
    number = error.errno or next((n for n in REMEDIES if f"errno = {n}," in text or os.strerror(n) in text), None)
    if number in REMEDIES:
        return f"{error.filename or text}: {REMEDIES[number]}"
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else text


def run(main: Callable[[], object]) -> None:
    """Call `main` as the body of a command: bad input ends in one sentence on stderr and exit code 2, not a traceback."""
    try:
        main()
    except UserError as error:
        stop(str(error))
    except OSError as error:
        if error.errno == errno.EPIPE:  # `... | head` has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(141)
        stop(explain(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def stop(sentence: str) -> None:
    """Print the sentence of a failed command and exit with 2."""
    sys.stdout.flush()
    print(f"error: {' '.join(sentence.split())}", file=sys.stderr, flush=True)
    sys.exit(2)

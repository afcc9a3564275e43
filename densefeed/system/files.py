"""Atomic and locked files: a reader never sees half a file under its final name."""

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from densefeed.system.errors import REMEDIES, BusyError

# some network disks know none; then nothing keeps two writers apart
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def replace_file(path: Path | str) -> Iterator[Path]:
    """Give a temporary sibling of `path` to write; fsync and rename it over `path` on success,
    delete it on failure.

    A reader of `path` sees the whole old file or the whole new one, also after a power cut: the
    data is on disk before the name is. The sibling's name ends in `.part`, and it is locked;
    siblings that killed processes left are removed.
    """
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with name_errors(path):
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
    """Lock an open file for us alone, until it is closed or the process ends, however it ends;
    BusyError if another has it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BusyError(
            f"{path} is being written by another process; wait for it or choose another --out"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def open_locked(path: Path) -> int:
    """Open a file to be read and written by us alone. BusyError if another process has it,
    FileNotFoundError if it is gone.
    """
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
    """Remove what killed processes left of making `path`: siblings `<path>.PID.part` that nobody
    holds locked.
    """
    pattern = re.compile(re.escape(path.name) + r"\.\d+\.part")
    for part in (
        [file for file in path.parent.iterdir() if pattern.fullmatch(file.name)]
        if path.parent.is_dir()
        else []
    ):
        try:
            descriptor = open_locked(part)
        except (BusyError, OSError):  # its maker lives, or it is none of ours
            continue
        part.unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def name_errors(path: Path | str) -> Iterator[None]:
    """Let an error of the operating system that names no file, as a failed write does, name `path`.

    torch.save meets a full disk and then fails an assertion of its own while it cleans up; the full
    disk is raised.
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

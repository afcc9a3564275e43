"""Atomic and locked files: a reader never sees an incomplete file under its final name."""

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from densefeed.system.errors import REMEDIES, BusyError, UserError

# Errors of `flock` on network file systems without locks. There two writers are not kept apart.
# Linux has one number for the last two, macOS has two.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
# Bytes written at once where no system call reserves space.
RESERVE_BYTES = 2**24


def check_absent(path: Path) -> None:
    """Raise UserError if `path` exists."""
    if path.exists():
        raise UserError(f"{path} exists already; remove it or choose another --out")


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path`; on success rename it over `path`, else delete it.

    The file is fsynced before the rename, so a reader of `path` sees the complete old file or the
    complete new one, also after a power cut. The sibling `<path>.PID.part` is locked; siblings left
    by killed processes are removed, except on a file system without locks.
    """
    # With the PID, because two processes may replace one file at the same time.
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with name_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_orphans(path)
        descriptor = create_locked(part)
        try:
            yield part
            sync(part)
            os.replace(part, path)
            # The new name is on disk only when the folder is.
            sync(path.parent)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)


def lock(descriptor: int, path: Path) -> bool:
    """Lock an open file exclusively until it is closed or the process ends, even by a kill.

    Returns False on a file system without locks. Raises BusyError if another process holds the
    lock.
    """
    try:
        # Not `lockf`: its locks end when the process closes any descriptor of the file, and h5py
        # opens and closes a `.part` that is locked here.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BusyError(
            f"{path} is being written by another process; wait for it or choose another --out"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def open_locked(path: Path) -> int:
    """Open an existing file for reading and writing, with an exclusive lock.

    Raises BusyError if another process holds the lock, FileNotFoundError if the file is gone.
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
        # Another process renamed the file between `open` and `flock`.
        os.close(descriptor)


def create_locked(path: Path) -> int:
    """`open_locked`, but create the file if it does not exist."""
    while True:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o666))
        # Before it is locked another process may take it for an orphan and remove it.
        with suppress(FileNotFoundError):
            return open_locked(path)


def remove_orphans(path: Path) -> None:
    """Remove unlocked siblings `<path>.PID.part`, which killed processes left."""
    pattern = re.compile(re.escape(path.name) + r"\.\d+\.part")
    siblings = list(path.parent.iterdir()) if path.parent.is_dir() else []
    for part in siblings:
        if not pattern.fullmatch(part.name):
            continue
        try:
            descriptor = open_locked(part)
        # Its writer is alive, or this process may not open it.
        except (BusyError, OSError):
            continue
        # Before the lock is released, so no process can lock a file that is about to go. Without
        # locks its writer may be alive.
        if lock(descriptor, part):
            part.unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def name_errors(path: Path | str) -> Iterator[None]:
    """Add `path` to errors of the operating system that name no file, such as a failed write.

    On a full disk torch.save fails with an assertion of its own while it cleans up; the underlying
    OSError is raised instead.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error
        while cause is not None and not (isinstance(cause, OSError) and cause.errno in REMEDIES):
            cause = cause.__context__
        if cause is None:
            raise
        cause.filename = cause.filename or str(path)
        raise cause from None


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    # Folders open for reading only, which is enough for fsync.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        # On macOS fsync leaves the bytes in the drive's cache. Network drives refuse more.
        if hasattr(fcntl, "F_FULLFSYNC"):
            with suppress(OSError):
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    finally:
        os.close(descriptor)


def reserve_space(descriptor: int, size: int) -> None:
    """Allocate the first `size` bytes of a file on disk; its contents stay, new bytes are zero.

    Raises OSError if the disk cannot hold them.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    # macOS. Holes read as zeros; written back, they are allocated.
    for at in range(0, size, RESERVE_BYTES):
        length = min(RESERVE_BYTES, size - at)
        content = os.pread(descriptor, length, at).ljust(length, b"\0")
        while content:
            written = os.pwrite(descriptor, content, at)
            content, at = content[written:], at + written

"""Atomic and locked files: a reader never sees an incomplete file under its final name."""

import ctypes
import errno
import fcntl
import hashlib
import os
import re
import resource
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import SEEK_CUR, SEEK_END, SEEK_SET, BufferedReader, RawIOBase, TextIOWrapper
from pathlib import Path
from typing import BinaryIO

from densefeed.system.errors import REMEDIES, BusyError, UserError, explain_os_error, restore_url

# Bytes written at once where no system call reserves space.
RESERVE_BYTES = 2**24
# Errors of `flock` on network file systems without locks, and on folders in NFS (EBADF). There two
# writers are not kept apart. Linux has one number for the last two, macOS has two.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EBADF, errno.EOPNOTSUPP, errno.ENOTSUP)
# Errors of `link` on file systems without hard links.
NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
# Errors of fsync on file systems that cannot sync a folder, and of opening a folder that may be
# written but not read. Such a folder reaches the disk when the system writes it.
NO_FOLDER_SYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES)

# Files that a process has open beside many of one kind: images, libraries, sockets of workers.
SPARE_FILES = 512

# Errors of opening a link without following it (the second one on FreeBSD), a socket or a pipe that
# nobody reads, and a folder for writing.
NOT_REGULAR = (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR)
# Bytes of a small file of ours: leases, plans, records, indices.
MOST_OWN = 2**26

# Bytes of a path and of a name in it (Linux: PATH_MAX with the zero byte, NAME_MAX).
MOST_PATH, MOST_NAME = 4095, 255
# Bytes of a line of a list: more than a path has.
MOST_LINE = 16_384


class SizedReader(RawIOBase):
    """Base of files that are read only: `size` bytes, of which `at` is the next that is read."""

    def __init__(self, size: int) -> None:
        self.size, self.at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        start = {SEEK_SET: 0, SEEK_CUR: self.at, SEEK_END: self.size}[whence]
        self.at = max(0, start + offset)
        return self.at

    def buffered(self, size: int = 8192) -> BufferedReader:
        """Return it with a buffer of `size` bytes."""
        return BufferedReader(self, size)


def open_regular(path: Path | str) -> BufferedReader:
    """Open a regular file for reading bytes, also behind symbolic links.

    OSError for anything else: a named pipe would wait for a writer, and a device may never end.
    """
    problem = "this is not a regular file but a pipe, socket or device; remove it"
    try:
        # To open a named pipe would wait without O_NONBLOCK, which regular files ignore.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        # A socket cannot be opened.
        if error.errno == errno.ENXIO:
            raise OSError(None, problem, str(path)) from None
        raise
    found = os.fstat(descriptor)
    if is_regular(found):
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(None, problem, str(path))


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a regular file as hexadecimal digits."""
    with name_errors(path), open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_own(path: Path | str, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a file whose name is ours, and not the user's; return its descriptor.

    UserError unless it is a regular file, no link followed: a link may lead to a file that is not
    ours, a named pipe would wait, and a device may never end. FileNotFoundError as `os.open`.
    """
    problem = f"{path} must be a regular file, and is a link, pipe, device or folder; remove it"
    try:
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        if error.errno not in NOT_REGULAR:
            raise
        raise UserError(problem) from None
    if is_regular(os.fstat(descriptor)):
        return descriptor
    os.close(descriptor)
    raise UserError(problem)


def read_own(path: Path | str) -> bytes:
    """Return the content of a small file whose name is ours; UserError as `open_own`."""
    with open(open_own(path), "rb") as file:
        content = file.read(MOST_OWN + 1)
    if len(content) > MOST_OWN:
        raise UserError(f"{path} is damaged (it has more than {MOST_OWN:,} bytes); remove it")
    return content


def is_regular(found: os.stat_result) -> bool:
    """Whether a status is that of a regular file."""
    return stat.S_ISREG(found.st_mode)


def is_own(path: Path) -> bool:
    """Whether `path` is a regular file, and not a link to one."""
    return os.path.lexists(path) and is_regular(os.lstat(path))


def is_irregular(path: Path) -> bool:
    """Whether there is a link, pipe, device or folder where a file of ours is expected."""
    return os.path.lexists(path) and not is_regular(os.lstat(path))


def check_own_folder(path: Path) -> None:
    """Raise UserError if a folder whose name is ours is a link: what it leads to is not ours."""
    if path.is_symlink():
        raise UserError(f"{path} must be a folder, and is a link; remove it")


def read_lines(
    file: Path, opener: Callable[[Path], BinaryIO] = open_regular
) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not empty, numbered from 1. UserError if the file cannot be read."""
    number = 0
    try:
        # A file that a spreadsheet wrote begins with a byte order mark.
        with TextIOWrapper(opener(file), "utf-8-sig") as text:
            while line := text.readline(MOST_LINE):
                number += 1
                # Binary data may be valid UTF-8. A list has no zero bytes and no endless lines.
                if "\0" in line or len(line) == MOST_LINE:
                    raise UnicodeError("no text")
                if line := line.strip():
                    yield number, line
    # StorageError is an OSError too.
    except UserError:
        raise
    except OSError as error:
        # A read that fails after the file was opened names none.
        error.filename = str(file)
        raise UserError(explain_os_error(error)) from error
    except UnicodeError as error:
        raise UserError(
            f"{file} is not a text file with lines of at most {MOST_LINE:,} characters; choose "
            "another file"
        ) from error


def is_folder(entry: os.DirEntry) -> bool:
    """Whether an entry is a folder or a link to one."""
    try:
        return entry.is_dir()
    # A link that leads to itself.
    except OSError:
        return False


def cache_folder() -> Path:
    """Return the folder of copies that any command may use, and that can be removed at any time."""
    return Path("~/.cache/densefeed").expanduser()


def allow_open_files(count: int) -> None:
    """Raise the limit of open files for `count` more, as far as the system lets a process do that.

    If that is not enough, opening one of them has its own error.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        # macOS has a lower limit than it declares.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def find_path_fault(path: str) -> str:
    """Return why a path from a file is not one below a folder, or an empty string if it is.

    Only the text is judged: symbolic links below the folder are its owner's.
    """
    names = path.split("/")
    try:
        lengths = [len(name.encode()) for name in names]
    except UnicodeEncodeError:
        return "is not UTF-8"
    if "\0" in path:
        return "contains a zero byte"
    if not names[0] and names[1:]:
        return "is absolute"
    if ".." in names:
        return "leaves its folder by `..`"
    if "" in names:
        return "has an empty name in it"
    if max(lengths) > MOST_NAME or sum(lengths) + len(names) - 1 > MOST_PATH:
        return "is too long"
    return ""


def check_absent(path: Path) -> None:
    """Raise UserError if `path` exists, also as a link to nothing."""
    if os.path.lexists(path):
        raise UserError(f"{path} exists already; remove it or choose another --out")


def check_regular(path: Path) -> None:
    """Raise UserError if a file that is written under this name is a link, pipe, device or folder.

    A link may lead to any file, and to open a pipe may wait without end.
    """
    if is_irregular(path):
        raise UserError(f"{path} is not a regular file; remove it or choose another --out")


def check_ending(path: Path, ending: str, option: str) -> None:
    """Raise UserError unless the name of an output ends so: it might be that of another file."""
    if path.suffix != ending:
        raise UserError(f"{option} {path} must end in {ending}; choose another name")


def check_utf8(path: Path, option: str) -> None:
    """Raise UserError for an output whose name is not UTF-8, which some libraries cannot open."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"{option} {path} is not UTF-8; choose another name") from None


@contextmanager
def replace_file(path: Path, folder: bool = False) -> Iterator[Path]:
    """Yield a temporary sibling of `path`; on success rename it over `path`, else delete it.

    The file is fsynced before the rename, so a reader of `path` sees the complete old file or the
    complete new one, also after a power loss. The sibling `<path>.PID.part` is locked; those of
    killed processes are removed, except on a file system without locks. Errors of the operating
    system name `path`. `folder`: see `create_folder`.
    """
    with name_errors(path):
        if folder:
            check_absent(path)
        part, descriptor = create_part(path, folder)
        try:
            yield part
            if folder:
                # Not an fsync for each file: for a million files they would take an hour.
                sync_file_system(descriptor)
                check_absent(path)
            else:
                sync(part)
            os.replace(part, path)
            # The new name is on disk only when the folder is.
            sync_folder(path.parent)
        except BaseException:
            # What cannot be deleted, the next process removes as an orphan.
            shutil.rmtree(part, ignore_errors=True)
            with suppress(OSError):
                remove_any(part)
            raise
        finally:
            os.close(descriptor)


def create_folder(path: Path) -> AbstractContextManager[Path]:
    """`replace_file` for a folder that does not exist yet, with everything in it."""
    return replace_file(path, folder=True)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield an empty folder on the local disk (TMPDIR), which is removed at the end.

    Those that killed processes left are removed too.
    """
    base = Path(tempfile.gettempdir()) / f"densefeed-{os.getuid()}"
    remove_orphans(base, folders=True)
    descriptor = None
    while descriptor is None:
        folder = base.with_name(f"{base.name}.{secrets.randbits(64)}.part")
        with name_errors(folder):
            folder.mkdir(0o700)
            # Before it is locked another process may take it for an orphan.
            with suppress(FileNotFoundError):
                descriptor = open_locked(folder, os.O_RDONLY | os.O_NOFOLLOW, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def replace_link(path: Path, target: Path) -> None:
    """Make `path` a symbolic link to `target`, atomically."""
    # With the PID, because two processes may replace one link at the same time.
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with name_errors(path):
        part.unlink(missing_ok=True)
        try:
            part.symlink_to(target)
            os.replace(part, path)
            sync_folder(path.parent)
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            # That of `symlink` names the target.
            error.filename = str(path)
            raise


def create_part(path: Path, folder: bool = False) -> tuple[Path, int]:
    """Create the sibling `<path>.PID.part`; return it and its descriptor, which locks it.

    It is an empty file, or a `folder`. Siblings left by killed processes are removed.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    make_folder(path.parent)
    remove_orphans(path, folder)
    flags = os.O_RDONLY if folder else os.O_RDWR
    while True:
        # Also for a link to nothing.
        with suppress(FileExistsError):
            if folder:
                part.mkdir()
            else:
                part.touch(exist_ok=False)
        # Before it is locked another process may take it for an orphan and remove it.
        with suppress(FileNotFoundError):
            # Waits: who else locks a file of this process is about to remove it.
            # Never through a link of this name, which may lead anywhere.
            return part, open_locked(part, flags | os.O_NOFOLLOW, fcntl.LOCK_EX)


def lock(descriptor: int, path: Path, operation: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> None:
    """Lock an open file exclusively until it is closed or the process ends, even by a kill.

    Raises BusyError if another process holds the lock, unless `operation` waits for it.
    """
    try:
        # Not `lockf`: its locks end when the process closes any descriptor of the file.
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        raise BusyError(
            f"{path} is being written by another process; wait for it or choose another --out"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def open_locked(
    path: Path, flags: int = os.O_RDWR, operation: int = fcntl.LOCK_EX | fcntl.LOCK_NB
) -> int:
    """Open a file for reading and writing, or a folder (O_RDONLY), with an exclusive lock.

    Raises BusyError if another process holds the lock, FileNotFoundError if the file is gone, and
    UserError for a file as `open_own`.
    """
    while True:
        descriptor = open_own(path, flags) if flags & os.O_RDWR else os.open(path, flags)
        try:
            lock(descriptor, path, operation)
            if is_named(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # Another process renamed the file between `open` and `flock`.
        os.close(descriptor)


def is_named(descriptor: int, path: Path) -> bool:
    """Whether `path` is the open file; FileNotFoundError if there is no file of this name."""
    return os.path.samestat(os.fstat(descriptor), os.stat(path))


def create_locked(path: Path) -> int:
    """`open_locked`, but create the file if it does not exist. No links are followed."""
    while True:
        # Another process may finish with the file, and remove it, before it is locked here.
        with suppress(FileNotFoundError):
            return open_locked(path, os.O_RDWR | os.O_CREAT)


def remove_orphans(path: Path, folders: bool = False) -> None:
    """Remove unlocked siblings `<path>.PID.part`, files or `folders`, which killed processes left.

    On a file system without locks nothing is removed.
    """
    pattern = re.compile(re.escape(path.name) + r"\.\d+\.part")
    siblings = list(path.parent.iterdir()) if path.parent.is_dir() else []
    for part in siblings:
        if not pattern.fullmatch(part.name) or part.is_dir() != folders:
            continue
        # Its writer is alive, or this process may not open or remove it.
        with suppress(OSError):
            # NFS locks only what is open for writing, which a folder never is.
            flags = os.O_RDONLY if folders else os.O_RDWR
            descriptor = os.open(part, flags | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Before the lock is released, so no process can lock what is about to go.
                if is_named(descriptor, part):
                    shutil.rmtree(part) if folders else part.unlink()
            finally:
                os.close(descriptor)


def name_once(part: Path, path: Path) -> bool:
    """Rename a file to `path` and return True, unless there is a file of that name already."""
    try:
        # Unlike a rename, a link never replaces a file.
        os.link(part, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        # Else two processes could both find the name free.
        descriptor = open_locked(path.parent, os.O_RDONLY, fcntl.LOCK_EX)
        try:
            if os.path.lexists(path):
                return False
            os.replace(part, path)
        finally:
            os.close(descriptor)
    return True


@contextmanager
def name_errors(path: Path | str) -> Iterator[None]:
    """Let errors of the operating system name `path` if they name no file, or a part of `path`.

    Parts are the files in it, and temporary siblings, whose names begin with that of `path` and a
    dot. On a full disk torch.save fails with an assertion of its own while it cleans up; the
    underlying OSError is raised instead.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error
        while cause is not None and not (isinstance(cause, OSError) and cause.errno in REMEDIES):
            cause = cause.__context__
        if cause is None:
            raise
        # TensorBoard opens files by names of bytes.
        named = "" if cause.filename is None else os.fsdecode(cause.filename)
        if not named or named.startswith((f"{path}.", f"{path}/")):
            cause.filename = str(path)
        raise cause from None


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of `data` with `pwrite`.

    If the disk fills, a call writes only a part, and the next call raises the error.
    """
    view = memoryview(data)
    while len(view):
        put = os.pwrite(descriptor, view, offset)
        view, offset = view[put:], offset + put


def drop_cache(descriptor: int) -> None:
    """Let the next reads of a synced file come from the disk, where the system can do that."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, and fsync the folder of each new one.

    UserError for a URL of object storage that was read as a path: what is written would be lost
    with the machine.
    """
    if url := restore_url(folder):
        raise UserError(
            f"{url} is in object storage, and this is written to a disk; give a local path, and "
            "copy the result"
        )
    if folder.is_dir():
        return
    make_folder(folder.parent)
    # An fsync that fails names no file.
    with name_errors(folder):
        # Another process may make it at the same time.
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def remove_any(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; do nothing if there is neither."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """fsync a file."""
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
        write_at(descriptor, os.pread(descriptor, length, at).ljust(length, b"\0"), at)


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that names made, changed or removed in it are on disk."""
    try:
        sync(folder)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise


def sync_file_system(descriptor: int) -> None:
    """Write the whole file system of an open file or folder to disk.

    Raises OSError if a write failed since it was opened.
    """
    syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    # Only Linux reports the errors.
    if syncfs is None:
        os.sync()
    elif syncfs(descriptor):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

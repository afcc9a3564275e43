"""A local copy on disk of the samples of .beton files in object storage, shared by processes.

Every object has a sparse file of its size, in which the samples that were fetched lie at their
offsets: readers open it as a local .beton. The folder of a dataset holds

    objects.json    URL, size and version (ETag) of the objects; written once their fronts are here
    0.beton ...     the sparse files; fronts (header, metadata, notes) and tables are complete
    index           uint64 per sample: 2^32 + CRC-32 of its bytes, or 0 if it is not here
    pins.*          uint8 per sample, of one process each, which holds a lock on it while it lives
    lock, users     empty files to lock

A sample's bytes are written before its entry of the index, so a killed process leaves whole samples
only. After a power cut the file system may have kept the index and lost the bytes: what was here
when a process opened the copy is compared with its CRC-32 before the process uses it first.

Bytes are freed (holes are punched) under the lock, and only those of samples that no living process
has pinned. So a sample that is being read is never freed, whatever its next use.
"""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import secrets
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path

import numpy as np

from densefeed.storage.beton import Extents
from densefeed.storage.beton_format import front_ranges
from densefeed.system.errors import UserError
from densefeed.system.files import (
    is_irregular,
    is_own,
    make_folder,
    name_errors,
    open_own,
    remove_any,
    replace_file,
    reserve_space,
    write_at,
)
from densefeed.system.json_files import read_json
from densefeed.system.object_ranges import RemoteFile

Read = Callable[[RemoteFile, int, int], memoryview]
ReadMany = Callable[[RemoteFile, list[tuple[int, int]]], list[memoryview]]
OBJECTS = "objects.json"
PRESENT = 1 << 32
# Bytes that a file system stores and frees at once.
PAGE = 4096
# Ranges are joined over a gap of at most this share of the next sample: bytes fetched stay below
# 1.04 times the bytes needed, where a request costs as much time as 1 MB.
GAP_SHARE = 0.04
# Bytes of a joined range: it is in memory until it is written.
RANGE_BYTES = 2**23
# The share of the disk's free space that a copy may take.
DISK_SHARE = 0.9
# FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
PUNCH = 3
NextUse = Callable[[np.ndarray], np.ndarray]


class CachedFiles:
    """The folder of a dataset's local copy, with the fronts of its files.

    Several processes may open it at once: the first fetches the fronts, and the others wait. A copy
    of other versions of the objects is removed. Raises UserError if such a copy is in use.

    Attributes:
        files: the objects.
        paths: the sparse files, complete but for the samples.
    """

    def __init__(self, files: Sequence[RemoteFile], root: Path, read: Read) -> None:
        names = "\n".join(file.url for file in files)
        self.files = list(files)
        self.folder = root / hashlib.sha256(names.encode()).hexdigest()[:32]
        self.paths = [self.folder / f"{number}.beton" for number in range(len(files))]
        self._read, self.fetched, self._thread_lock = read, 0, threading.Lock()
        try:
            make_folder(self.folder)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(
                f"{error.filename} is a file, where a folder of local copies is needed; remove it, "
                "or name another folder with --cache"
            ) from None
        # A link may lead to a file that is not of a copy.
        for name in ("lock", "users", OBJECTS, "index"):
            if is_irregular(self.folder / name):
                remove_any(self.folder / name)
        with name_errors(self.folder), ExitStack() as stack:
            self._lock, self._users = (
                open_own(self.folder / name, os.O_RDWR | os.O_CREAT, 0o600)
                for name in ("lock", "users")
            )
            stack.callback(self.close)
            with self.locked():
                sums = self._read_sums()
                if sums is None or not all(map(is_own, self.paths)):
                    self._start_over()
                else:
                    self._mend(sums)
                fcntl.flock(self._users, fcntl.LOCK_SH)
            # Closed here only if it fails.
            stack.pop_all()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other processes and threads."""
        with self._thread_lock:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the files; the copy stays for the next run."""
        os.close(self._lock)
        os.close(self._users)

    def _read_sums(self) -> list[int] | None:
        """Read the CRC-32 of each file's front; None unless the copy is of these objects."""
        try:
            found = read_json(self.folder / OBJECTS, "it is fetched again", largest=2**26)
        except (FileNotFoundError, UserError):
            return None
        sums = found.pop("fronts", None)
        sound = isinstance(sums, list) and len(sums) == len(self.files)
        sound = sound and all(type(crc) is int for crc in sums)
        return sums if sound and found == self._describe() else None

    def _describe(self) -> dict:
        return {"version": 2, "files": [list(file) for file in self.files]}

    def _mend(self, sums: list[int]) -> None:
        """Fetch fronts again that are not on the disk as they were fetched.

        In place: other processes may read samples of these files. Those are not looked at, as each
        is compared with its checksum before its first use in a run.
        """
        for file, path, crc in zip(self.files, self.paths, sums, strict=True):
            if not has_front(path, file.size, crc):
                self._fetch_front(file, path)

    def _start_over(self) -> None:
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{self.files[0].url} was replaced, or its local copy removed, while another run "
                "reads it; stop that run, or name another folder with --cache"
            ) from None
        # First what makes the folder a copy.
        (self.folder / OBJECTS).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.name not in ("lock", "users"):
                remove_any(path)
        pairs = zip(self.files, self.paths, strict=True)
        sums = [self._fetch_front(file, path) for file, path in pairs]
        with replace_file(self.folder / OBJECTS) as part:
            part.write_text(json.dumps(self._describe() | {"fronts": sums}))

    def _fetch_front(self, file: RemoteFile, path: Path) -> int:
        """Make a sparse file and fetch all of it but the samples; return the CRC-32 of that."""
        crc = 0
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, file.size)
            for at, stop in front_parts(descriptor, file.size):
                content = self._read(file, at, stop)
                self.fetched += len(content)
                crc = zlib.crc32(content, crc)
                write_at(descriptor, content, at)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return crc


def has_front(path: Path, size: int, crc: int) -> bool:
    """Whether a file has `size` bytes, and the front that was fetched."""
    if path.stat().st_size != size:
        return False
    found = 0
    with open(open_own(path), "rb", buffering=0) as file:
        for at, stop in front_parts(file.fileno(), size):
            found = zlib.crc32(os.pread(file.fileno(), stop - at, at), found)
    return found == crc


def front_parts(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield `front_ranges` of a file of `size` bytes, in parts, which bounds the memory."""
    for start, stop in front_ranges(descriptor):
        for at in range(start, min(stop, size), RANGE_BYTES):
            yield at, min(at + RANGE_BYTES, stop, size)


class SampleCache:
    """The samples of a dataset's local copy: fetches, pins and frees them.

    Args:
        copy: the copy's folder.
        extents: the bytes of each of N samples; UserError if two samples share bytes.
        read: reads ranges of an object.

    Attributes:
        fetched: bytes that this process fetched.
        capacity: bytes that samples may take on the disk.
        is_bounded: whether the capacity is below what all samples take.
    """

    def __init__(self, copy: CachedFiles, extents: Extents, read: ReadMany) -> None:
        self._copy, self._read, self.fetched = copy, read, 0
        self._counting = threading.Lock()
        self._file, self._start = extents.file, extents.offset
        self._stop = extents.offset + extents.size
        check_disjoint(copy, extents)
        # A hole frees whole pages only.
        self._room = -(-self._stop // PAGE) * PAGE - self._start // PAGE * PAGE
        self._descriptors = []
        count = len(extents.file)
        with name_errors(copy.folder), copy.locked():
            self._index = open_map(copy.folder / "index", count, np.dtype("<u8"))
            self._pins_path = copy.folder / f"pins.{os.getpid()}.{secrets.token_hex(4)}"
            self._pins = open_map(self._pins_path, count, np.dtype("u1"))
            self._pins_lock = open_own(self._pins_path, os.O_RDWR)
            fcntl.flock(self._pins_lock, fcntl.LOCK_EX)
            self._descriptors += [open_own(path, os.O_RDWR) for path in copy.paths]
        # Present since before this process, so not known to be on the disk.
        self._unverified = self._index != 0
        here = int(self._room[self._unverified].sum())
        self.capacity = int(DISK_SHARE * (count_free(copy.folder) + here))
        self.is_bounded = int(self._room.sum()) > self.capacity

    def close(self) -> None:
        """Remove the pins of this process and close the files; what was fetched stays."""
        with self._copy.locked():
            self._pins_path.unlink(missing_ok=True)
        os.close(self._pins_lock)
        while self._descriptors:
            os.close(self._descriptors.pop())

    def room(self, count: int) -> int:
        """Return the bytes of disk that `count` samples take at most."""
        count = min(count, len(self._room))
        return int(np.partition(self._room, -count)[-count:].sum()) if count else 0

    def hold(self, ids: np.ndarray, next_use: NextUse) -> tuple[np.ndarray, np.ndarray] | None:
        """Pin samples, and free others if the copy would become larger than its capacity.

        Those with the farthest next use are freed (Belady's rule); `next_use` returns it for given
        samples. `ids` has no sample twice. Returns which samples must be fetched and which must be
        verified. Returns None, and pins nothing, while other pinned samples leave no room.
        """
        with self._copy.locked():
            new = (self._pins[ids] == 0).any()
            self._pins[ids] += 1
            # The index is read afterwards: until here another process may have freed samples.
            if self.is_bounded and new and not self._make_room(next_use):
                self._pins[ids] -= 1
                return None
            missing = self._index[ids] == 0
        return ids[missing], ids[~missing & self._unverified[ids]]

    def release(self, ids: np.ndarray) -> None:
        """Undo `hold`."""
        # Without the lock: other processes see the old or the new byte, and both are safe.
        self._pins[ids] -= 1

    def _make_room(self, next_use: NextUse) -> bool:
        held, present = self._find_held(), self._index != 0
        excess = int(self._room[present | held].sum()) - self.capacity
        if excess <= 0:
            return True
        candidates = np.flatnonzero(present & ~held)
        if int(self._room[candidates].sum()) < excess:
            return False
        # The last in the order of their use, as few as are needed.
        later = next_use(candidates)
        count = min(len(candidates), 2 * -(-excess * len(candidates) // int(self._room.sum())) + 16)
        last = np.argpartition(later, -count)[-count:]
        if int(self._room[candidates[last]].sum()) < excess:
            last = np.arange(len(candidates))
        order = candidates[last[np.argsort(-later[last], kind="stable")]]
        freed = np.cumsum(self._room[order])
        self._free(order[: int(np.searchsorted(freed, excess)) + 1])
        return True

    def _find_held(self) -> np.ndarray:
        """Return which samples living processes have pinned."""
        held = self._pins != 0
        for path in self._copy.folder.glob("pins.*"):
            if path == self._pins_path:
                continue
            descriptor = open_own(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its process has ended.
                path.unlink()
            except BlockingIOError:
                with open(descriptor, "rb", closefd=False) as file:
                    held |= np.memmap(file, np.uint8, "r") != 0
            finally:
                os.close(descriptor)
        return held

    def _free(self, ids: np.ndarray) -> None:
        # Before its bytes go.
        self._index[ids] = 0
        for file, start, stop in zip(
            self._file[ids].tolist(),
            self._start[ids].tolist(),
            self._stop[ids].tolist(),
            strict=True,
        ):
            with name_errors(self._copy.folder):
                punch_hole(self._descriptors[file], start, stop - start, self._copy.folder)

    def join(self, ids: np.ndarray) -> list[np.ndarray]:
        """Return samples in the order of storage, split into ranges that are fetched at once."""
        ids = ids[np.lexsort((self._start[ids], self._file[ids]))]
        last, following = ids[:-1], ids[1:]
        size = self._stop[following] - self._start[following]
        near = self._start[following] - self._stop[last] <= GAP_SHARE * size
        near &= self._file[last] == self._file[following]
        runs, first = [], 0
        for n, is_near in enumerate(near.tolist(), 1):
            if not is_near or self._stop[ids[n]] - self._start[ids[first]] > RANGE_BYTES:
                runs.append(ids[first:n])
                first = n
        return [*runs, ids[first:]] if len(ids) else []

    def fetch(self, runs: Sequence[np.ndarray]) -> None:
        """Fetch samples that `join` returned, one range each, and that are held."""
        for number, same in groupby(runs, lambda run: int(self._file[run[0]])):
            runs = list(same)
            ranges = [(int(self._start[run[0]]), int(self._stop[run[-1]])) for run in runs]
            contents = self._read(self._copy.files[number], ranges)
            with self._counting:
                self.fetched += sum(map(len, contents))
            for run, (begin, _), content in zip(runs, ranges, contents, strict=True):
                self._write(run, number, begin, content)

    def _write(self, run: np.ndarray, number: int, begin: int, content: memoryview) -> None:
        """Write the samples of a range of file `number`, which begins at `begin`."""
        for index in run.tolist():
            start, stop = int(self._start[index]), int(self._stop[index])
            part = content[start - begin : stop - begin]
            with name_errors(self._copy.folder):
                write_at(self._descriptors[number], part, start)
            # One store of 8 bytes, after the data.
            self._index[index] = PRESENT | zlib.crc32(part)
            self._unverified[index] = False

    def verify(self, ids: np.ndarray) -> None:
        """Compare samples that are held with their CRC-32, and fetch those that differ."""
        for index in ids.tolist():
            start, stop = int(self._start[index]), int(self._stop[index])
            content = os.pread(self._descriptors[self._file[index]], stop - start, start)
            if int(self._index[index]) == PRESENT | zlib.crc32(content):
                self._unverified[index] = False
            else:
                self.fetch([np.array([index])])


def check_disjoint(copy: CachedFiles, extents: Extents) -> None:
    """Raise UserError if two samples share bytes: freeing one would damage the other."""
    order = np.lexsort((extents.offset, extents.file))
    file, start = extents.file[order], extents.offset[order]
    stop = start + extents.size[order]
    shared = (file[1:] == file[:-1]) & (start[1:] < stop[:-1])
    if shared.any():
        number = int(file[1:][shared.argmax()])
        raise UserError(
            f"{copy.files[number].url} has samples that lie in one another; copy it to a local disk"
        )


def open_map(path: Path, count: int, dtype: np.dtype) -> np.memmap:
    """Open numbers that processes share in a file; new ones are 0."""
    descriptor = open_own(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # On a full disk, a store to a page that is not allocated would be SIGBUS.
        with name_errors(path):
            reserve_space(descriptor, count * dtype.itemsize)
        with open(descriptor, "r+b", closefd=False) as file:
            return np.memmap(file, dtype, "r+", shape=(count,))
    finally:
        os.close(descriptor)


def count_free(folder: Path) -> int:
    """Return the bytes that are free on the disk of a folder."""
    free = os.statvfs(folder)
    return free.f_bavail * free.f_frsize


def punch_hole(descriptor: int, offset: int, size: int, folder: Path) -> None:
    """Free the disk space of a part of a file, which reads as zeros then."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "fallocate"):
        at, length = ctypes.c_int64(offset), ctypes.c_int64(size)
        if libc.fallocate(descriptor, PUNCH, at, length) == 0:
            return
        if ctypes.get_errno() not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    raise UserError(
        f"{folder}: its file system cannot free parts of files and has no room for the dataset; "
        "name a folder on another with --cache"
    )

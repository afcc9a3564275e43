"""Shards of images on a disk or in object storage: one version of each file, and ranges of it."""

import io
import os
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from densefeed.system.files import SizedReader, open_regular
from densefeed.system.object_ranges import (
    FetchedFile,
    RangeReader,
    RemoteFile,
    find_remote_file,
    read_range,
)
from densefeed.system.object_url import ObjectURL


class ShardFile(NamedTuple):
    """A file that was opened before, with what shows that it changed since."""

    path: Path | ObjectURL
    state: tuple[int, int | str]  # see `find_state`

    def open(self) -> BinaryIO:
        """Open the file; each read of an object is a request.

        OSError if the file changed since; reading an object that was replaced raises UserError.
        """
        if isinstance(self.path, ObjectURL):
            return RangeReader(RemoteFile(self.path, *self.state))
        file = open_regular(self.path)
        if find_state(file) != self.state:
            file.close()
            problem = "this file changed while it was in use; run the command again"
            raise OSError(None, problem, str(self.path))
        return file

    def open_range(self, offset: int, size: int) -> io.BufferedReader:
        """Open these bytes as a file. Raises what `open` raises."""
        if isinstance(self.path, ObjectURL):
            file = RemoteFile(self.path, *self.state)
            return FetchedFile(partial(read_range, file, offset, offset + size), size).buffered()
        return io.BufferedReader(Range(self.open(), offset, size))


class Range(SizedReader):
    """A range of bytes of an open file, as a file of its own. Closing it closes the file."""

    def __init__(self, file: BinaryIO, offset: int, size: int) -> None:
        super().__init__(size)
        self._file, self._offset = file, offset

    def readall(self) -> bytes:
        # One system call, where the method of the base class makes several.
        content = os.pread(self._file.fileno(), max(0, self.size - self.at), self._place)
        self.at += len(content)
        return content

    def readinto(self, buffer: memoryview) -> int:
        room = min(len(buffer), max(0, self.size - self.at))
        count = os.preadv(self._file.fileno(), [memoryview(buffer)[:room]], self._place)
        self.at += count
        return count

    @property
    def _place(self) -> int:
        return self._offset + self.at

    def close(self) -> None:
        self._file.close()
        super().close()


def open_shard(path: Path | ObjectURL) -> BinaryIO:
    """Open a file as it is now. Raises what open_regular raises; StorageError for an object."""
    if isinstance(path, ObjectURL):
        return RangeReader(find_remote_file(path))
    return open_regular(path)


def find_state(file: BinaryIO) -> tuple[int, int | str]:
    """Return what a change of an open file's content changes: its size and the time of the change.

    Of an object it is the size and the version.
    """
    if isinstance(file, RangeReader):
        return file.file.size, file.file.version
    about = os.fstat(file.fileno())
    return about.st_size, about.st_mtime_ns

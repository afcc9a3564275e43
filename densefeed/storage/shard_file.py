"""Shards of images on a disk or in object storage: one version of each file, and ranges of it."""

import io
import os
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from densefeed.system.files import open_regular
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
        """Return these bytes as a file, which are read at once. Reads raise what `open` raises."""
        return FetchedFile(partial(self._read, offset, size), size).buffered()

    def _read(self, offset: int, size: int) -> bytes | memoryview:
        if isinstance(self.path, ObjectURL):
            return read_range(RemoteFile(self.path, *self.state), offset, offset + size)
        with self.open() as file:
            return os.pread(file.fileno(), size, offset)


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

"""Files in a folder that several machines share, with the calls that object stores have.

A file is created only if it does not exist, or replaced, or removed: always as a whole, so no
process ever reads a part of one. These calls are what leases and records need, and are all that
S3-like storage has: ObjectStore (object_store.py) has the same ones.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from densefeed.system.errors import UserError
from densefeed.system.files import (
    check_own_folder,
    is_own,
    make_folder,
    name_errors,
    name_once,
    read_own,
    replace_file,
    sync_folder,
)
from densefeed.system.object_store import ObjectStore
from densefeed.system.object_url import ObjectURL

# Where files are written before they get their names. A process that is killed leaves them here.
TEMPORARY = "parts"


class ObjectFolder:
    """The files below `root`, by names such as `leases/x`.

    `root` may be a link. Its files and folders may not: UserError for one that is a link, and for a
    file that is not a regular one.
    """

    # Longest time between looks at what others do.
    poll_seconds = 1.0

    def __init__(self, root: Path) -> None:
        self.root = root

    def _find(self, name: str) -> Path:
        """Return the path of a file or folder; UserError if a folder on the way is a link."""
        path = self.root / name
        for folder in path.parents:
            if folder == self.root:
                break
            check_own_folder(folder)
        return path

    def create(self, name: str, content: bytes) -> bool:
        """Write a file and return True, unless there is one of that name already.

        Of several processes that create one name at the same time, one gets True.
        """
        path = self._find(name)
        check_own_folder(self.root / TEMPORARY)
        while not os.path.lexists(path):
            make_folder(path.parent)
            make_folder(self.root / TEMPORARY)
            # Another process may remove a folder, once it is empty.
            with suppress(FileNotFoundError):
                return self._create(path, content)
        return False

    def _create(self, path: Path, content: bytes) -> bool:
        part = self.root / TEMPORARY / f"{uuid4().hex}.part"
        try:
            with name_errors(path):
                with open(part, "xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                created = name_once(part, path)
                sync_folder(path.parent)
                return created
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def replace(self, name: str, content: bytes) -> None:
        """Write a file, in place of one of that name if there is one."""
        with replace_file(self._find(name)) as part:
            part.write_bytes(content)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is none."""
        try:
            return read_own(self._find(name))
        except FileNotFoundError:
            return None

    def size(self, name: str) -> int | None:
        """Return the bytes of a regular file; None if there is none."""
        path = self._find(name)
        return path.stat().st_size if is_own(path) else None

    def list(self, folder: str) -> dict[str, float]:
        """Return the files of a folder: the time of their last change by name, seconds."""
        return {name: found.st_mtime for name, found in self._scan(folder)}

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of the files of a folder by name."""
        return {name: found.st_size for name, found in self._scan(folder)}

    def _scan(self, folder: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield name and status of the files of a folder."""
        path = self.root / folder
        check_own_folder(path)
        with suppress(FileNotFoundError), os.scandir(path) as entries:
            for entry in entries:
                # It may be removed in the meantime.
                with suppress(FileNotFoundError):
                    if not entry.name.endswith(".part"):
                        yield entry.name, entry.stat(follow_symlinks=False)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        self._find(name).unlink(missing_ok=True)

    def remove_all(self, folder: str, names: re.Pattern[str]) -> None:
        """Remove the files of a folder whose names match, and the folder once it is empty.

        Temporary files are removed by their names too, and folders in it are not.
        """
        path = self.root / folder
        check_own_folder(path)
        # Another process may do the same, or write a file, which then stays.
        with suppress(OSError):
            for file in path.iterdir():
                if names.fullmatch(file.name):
                    file.unlink(missing_ok=True)
            path.rmdir()

    @contextmanager
    def make_parts(self) -> Iterator[Path]:
        """Yield the folder of unfinished files, which other machines see and which stay."""
        check_own_folder(self.root / TEMPORARY)
        yield self.root / TEMPORARY

    def add_file(self, path: Path, name: str, sha256: str) -> None:
        """Give a file of this file system its name, which has the checksum `sha256` in it.

        A file of this name has the same bytes.
        """
        final = self._find(name)
        make_folder(final.parent)
        with name_errors(final):
            name_once(path, final)
            sync_folder(final.parent)


Objects = ObjectFolder | ObjectStore


def open_objects(place: Path | ObjectURL) -> Objects:
    """Return the files of a folder, or the objects below a URL; UserError for a file."""
    if isinstance(place, ObjectURL):
        return ObjectStore(place)
    if place.exists() and not place.is_dir():
        raise UserError(f"{place} is a file; name a folder, where workers label shards")
    return ObjectFolder(place)

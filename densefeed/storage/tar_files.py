"""Random access to the members of uncompressed tar files.

The index is made by one walk over the headers: 512 bytes for each member, and not its content.
Python's tarfile makes an object of each member and takes ten times as long.
"""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from densefeed.storage.shard_file import ShardFile
from densefeed.system.errors import UserError

BLOCK = 512
ZEROS = bytes(BLOCK)
# Bytes of an extended header. A path has 4,095.
MOST_HEADER = 2**16
# Bytes after the end mark: tar fills a record of 10 KiB by default, 20 times that is rare.
MOST_FILL = 2**18
# Types of members, from POSIX's ustar and pax and from GNU tar.
FILES, FOLDER = (b"0", b"\0", b"7"), b"5"
LONG_NAME, LONG_LINK, PAX, PAX_ALL = b"L", b"K", b"x", b"g"
REFUSED = {b"1": "a link", b"2": "a link", b"S": "a sparse file"}


class Member(NamedTuple):
    """A file in a tar: its content is `size` bytes from `offset` on."""

    name: str
    offset: int
    size: int


class TarImages(NamedTuple):
    """The N images of tar shards."""

    paths: list[str]
    labels: np.ndarray  # int64 [N]
    class_names: list[str]
    shards: list[ShardFile]
    # The shard of each image, and the first byte and the number of bytes in it.
    numbers: np.ndarray  # int64 [N]
    offsets: np.ndarray  # int64 [N]
    sizes: np.ndarray  # int64 [N]

    def where(self, index: int) -> str:
        """Name of sample `index` for error messages."""
        return f"{self.shards[self.numbers[index]].path}/{self.paths[index]}"

    def open(self, index: int) -> io.BufferedReader:
        """Open the encoded bytes of sample `index`."""
        place = int(self.offsets[index]), int(self.sizes[index])
        return self.shards[self.numbers[index]].open_range(*place)


def read_members(file: io.BufferedReader, path: Path) -> Iterator[Member]:
    """Yield the files in a tar, in its order; the caller may read `file` between them.

    Raises UserError for a file that is compressed, truncated or not a tar, and for members that are
    neither files nor folders.
    """
    size, at, extended = file.seek(0, io.SEEK_END), 0, {}
    while (head := read_block(file, at)) != ZEROS:
        kind, length = head[156:157], read_number(head[124:136])
        whole = len(head) == BLOCK and length is not None
        if not whole or read_number(head[148:156]) != checksum(head):
            raise explain_damage(path, head, at)
        length = extended.get("size", length) if kind in FILES else length
        data = at + BLOCK
        at = data + -(-length // BLOCK) * BLOCK
        if data + length > size:
            raise UserError(f"{path} is truncated: a member ends behind its end; copy it again")
        if kind in (LONG_NAME, LONG_LINK, PAX, PAX_ALL):
            extended |= read_extended(file, path, kind, data, length)
            continue
        name = extended.get("path", read_name(head))
        if kind in FILES and not name.endswith("/"):
            yield Member(name.removeprefix("./"), data, length)
        elif kind not in (*FILES, FOLDER):
            what = REFUSED.get(kind, "neither a file nor a folder")
            raise UserError(f"{path}: {name} is {what}; write the tar again with files alone")
        extended = {}
    check_end(file, path, at, size)


def read_block(file: io.BufferedReader, at: int) -> bytes:
    file.seek(at)
    return file.read(BLOCK)


def check_end(file: io.BufferedReader, path: Path, at: int, size: int) -> None:
    """Raise UserError if anything follows the end mark: its images would silently be missing."""
    file.seek(at)
    rest = file.read(MOST_FILL)
    if any(rest) or size - at > MOST_FILL:
        raise UserError(
            f"{path} holds data behind its end mark, as joined tars do; write it as one tar"
        )


def checksum(head: bytes) -> int:
    """Return the sum of a header's bytes; its own field counts as spaces."""
    return sum(head) - sum(head[148:156]) + 8 * ord(" ")


def read_number(field: bytes) -> int | None:
    """Read an octal number, or a binary one that begins with 0x80; None for anything else."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    # `int` also takes signs and underscores.
    return int(digits or b"0", 8) if re.fullmatch(b"[0-7]*", digits) else None


def read_name(head: bytes) -> str:
    """Read the name in a header, which POSIX may divide into two fields."""
    name = head[:100].partition(b"\0")[0]
    # GNU tar has other fields in the place of the second part.
    prefix = head[345:500].partition(b"\0")[0] if head[257:263] == b"ustar\0" else b""
    return decode_name(prefix + b"/" + name if prefix else name)


def decode_name(name: bytes) -> str:
    # Names that are not UTF-8 are refused with those of other faults, by `find_path_fault`.
    return name.decode("utf-8", "surrogateescape")


def read_extended(
    file: io.BufferedReader, path: Path, kind: bytes, at: int, length: int
) -> dict[str, str | int]:
    """Read the `path` and `size` that an extended header has for the next member.

    Raises UserError if it is damaged, makes the next member sparse, or is one for all members that
    has such values.
    """
    if length > MOST_HEADER:
        raise UserError(f"{path} has an extended header of {length:,} bytes; write the tar again")
    file.seek(at)
    content = file.read(length)
    if kind == LONG_NAME:
        return {"path": decode_name(content.rstrip(b"\0"))}
    if kind == LONG_LINK:
        return {}
    values = parse_pax(content)
    if values is None or (kind == PAX_ALL and not values.keys().isdisjoint((b"path", b"size"))):
        raise UserError(f"{path} has an extended header that is damaged; write the tar again")
    if any(name.startswith(b"GNU.sparse") for name in values):
        raise UserError(f"{path} holds a sparse file; write the tar again without --sparse")
    found = {"path": decode_name(values[b"path"])} if b"path" in values else {}
    return found | ({"size": int(values[b"size"])} if b"size" in values else {})


def parse_pax(content: bytes) -> dict[bytes, bytes] | None:
    """Parse records `LENGTH NAME=VALUE` and a line break; None if one is damaged."""
    values, at = {}, 0
    while at < len(content):
        # A length in decimal digits counts all of the record.
        found = re.match(rb"([1-9]\d{0,5}) ([^=]+)=", content[at : at + 512])
        end = at + int(found[1]) if found else 0
        if not found or not at + len(found[0]) < end <= len(content) or content[end - 1] != 10:
            return None
        values[found[2]] = content[at + len(found[0]) : end - 1]
        at = end
    size = values.get(b"size", b"0")
    return values if re.fullmatch(rb"\d{1,18}", size) else None


def explain_damage(path: Path, head: bytes, at: int) -> UserError:
    """Return the error of a block at byte `at` that is not a header, or not whole."""
    if at == 0:
        return UserError(
            f"{path} is not an uncompressed tar file; decompress, replace or remove it"
        )
    if len(head) < BLOCK:
        return UserError(f"{path} has no end mark, so it may be truncated; copy or write it again")
    return UserError(f"{path} is damaged at byte {at:,}; copy or write it again")

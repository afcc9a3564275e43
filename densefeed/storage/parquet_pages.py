"""Check the pages of a Parquet column chunk before pyarrow decodes them.

The footer states how many bytes a row group takes when it is decompressed. pyarrow does not compare
that with the header of each page, which states how many it allocates: a page of gigabytes of zeros
compresses to some kilobytes. A header is the struct PageHeader of parquet.thrift, in Thrift's
compact protocol.
"""

from collections.abc import Callable
from typing import Any, BinaryIO

# Types of Thrift's compact protocol. A header has no list, set or map.
STOP, TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, STRUCT = 0, 1, 2, 3, 4, 5, 6, 7, 8, 12
# Fields of a header, by their ids in it and in the struct within it.
DECOMPRESSED, COMPRESSED = (2,), (3,)
# Fields of a header; one with all statistics has about 30.
MOST_FIELDS = 100
# Bytes of a varint of 64 bits.
MOST_VARINT = 10


class CheckedFile:
    """A Parquet file that calls `check` with the bytes of each column chunk that pyarrow reads.

    pyarrow that has the footer and does not read ahead reads nothing else, and each by one call, so
    a check makes no request of its own.
    """

    def __init__(self, file: BinaryIO, check: Callable[[bytes], None]) -> None:
        self._file, self._check = file, check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, count: int) -> bytes:
        content = self._file.read(count)
        self._check(content)
        return content


def count_page_bytes(content: bytes, most_pages: int) -> int:
    """Return the bytes of all pages of a column chunk, decompressed, as their headers state them.

    `content` is the whole chunk. OSError if it has more than `most_pages` pages, or if a header is
    damaged or states fewer bytes than its page has.
    """
    at = total = pages = 0
    while at < len(content):
        fields, at = read_header(content, at)
        size, compressed = fields.get(DECOMPRESSED, -1), fields.get(COMPRESSED, -1)
        # No codec makes incompressible bytes longer than snappy, by a sixth and 32 bytes. Pages
        # that are not compressed have as many bytes as their file, whatever their header states.
        if min(size, compressed) < 0 or compressed > size + size // 6 + 64:
            raise OSError("the header of a page states wrong sizes")
        at, total, pages = at + compressed, total + size, pages + 1
        if at > len(content):
            raise OSError("a page is truncated")
        # Else small pages without a row would take minutes.
        if pages > most_pages:
            raise OSError("it has more pages than rows")
    return total


def read_header(content: bytes, at: int) -> tuple[dict[tuple[int, ...], int], int]:
    """Read the page header at `at`: its fields of 32 bits by their ids, and where it ends.

    Of a field that occurs twice the last counts, as for pyarrow. OSError if it is damaged.
    """
    # The ids of the struct's last field and of the structs around it.
    found, ids = {}, [0]
    try:
        for _ in range(MOST_FIELDS):
            delta, kind = content[at] >> 4, content[at] & 15
            at += 1
            if kind == STOP:
                ids.pop()
                if not ids:
                    return found, at
                continue
            ids[-1] += delta
            if not delta:
                ids[-1], at = read_integer(content, at)
            if kind in (I16, I32, I64):
                value, at = read_integer(content, at, 64 if kind == I64 else 32)
                if kind == I32:
                    found[tuple(ids)] = value
            elif kind == BINARY:
                size, at = read_varint(content, at)
                at += size
            elif kind == STRUCT:
                ids.append(0)
            elif kind in (BYTE, DOUBLE):
                at += 1 if kind == BYTE else 8
            elif kind not in (TRUE, FALSE):
                break
    except IndexError:
        raise OSError("the header of a page is truncated") from None
    raise OSError("the header of a page is damaged")


def read_integer(content: bytes, at: int, bits: int = 16) -> tuple[int, int]:
    """Read an integer of `bits` bits, and where it ends. OSError if it has more."""
    value, at = read_varint(content, at)
    # pyarrow drops the bits beyond, and would take the number for another.
    if value >> bits:
        raise OSError("the header of a page has an integer that is too large")
    return (value >> 1) ^ -(value & 1), at


def read_varint(content: bytes, at: int) -> tuple[int, int]:
    """Read an unsigned integer, and where it ends. OSError if it has too many bytes."""
    value = 0
    for shift in range(0, 7 * MOST_VARINT, 7):
        value |= (content[at] & 127) << shift
        if content[at] < 128:
            return value, at + 1
        at += 1
    raise OSError("the header of a page has an integer that is too large")

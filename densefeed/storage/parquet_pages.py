"""Check the pages of a Parquet column chunk before pyarrow decodes them.

The footer states how many bytes a row group takes when it is decompressed. pyarrow does not compare
that with the header of each page, which states how many it allocates: a page of gigabytes of zeros
compresses to some kilobytes. A header is the struct PageHeader of parquet.thrift, in Thrift's
compact protocol.
"""

from collections.abc import Callable
from typing import BinaryIO, NamedTuple

# Types of Thrift's compact protocol. A header has no list, set or map.
STOP, I16, I32, I64, BINARY, STRUCT = 0, 4, 5, 6, 8, 12
# Bytes of true, false, byte and double.
SIZES = {1: 0, 2: 0, 3: 1, 7: 8}
# Fields of a header, by their ids in it and in the struct within it: bytes, the entries of a
# dictionary, and the encodings of data pages of both versions.
DECOMPRESSED, COMPRESSED, ENTRIES, ENCODINGS = (2,), (3,), (7, 1), ((5, 2), (8, 4))
# Encodings that state a count within the page: pyarrow takes 4 bytes for each value of it.
DELTAS = {6: "DELTA_LENGTH_BYTE_ARRAY", 7: "DELTA_BYTE_ARRAY"}
# Entries of a dictionary. pyarrow takes 20 bytes for each, also if it is empty.
MOST_ENTRIES = 2**22
# Fields of a header; one with all statistics has about 30.
MOST_FIELDS = 100


class CheckedFile:
    """A Parquet file that calls `check` with the bytes of each column chunk that pyarrow reads.

    pyarrow that has the footer and does not read ahead reads nothing else, and each by one call, so
    a check makes no request of its own.
    """

    def __init__(self, file: BinaryIO, check: Callable[[bytes], None]) -> None:
        self._file, self._check = file, check
        self.seek, self.tell = file.seek, file.tell

    @property
    def closed(self) -> bool:
        return self._file.closed

    def read(self, count: int) -> bytes:
        content = self._file.read(count)
        self._check(content)
        return content


class Pages(NamedTuple):
    """The headers of a column chunk's pages."""

    size: int  # bytes of all, decompressed
    delta: str  # the first encoding of DELTAS, or empty


def read_pages(content: bytes, most_pages: int) -> Pages:
    """Read the headers of all pages of a column chunk.

    `content` is the whole chunk. OSError if it has more than `most_pages` pages, or a dictionary of
    more than MOST_ENTRIES, and if a header is damaged or states fewer bytes than its page has.
    """
    at = total = pages = 0
    delta = ""
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
        if fields.get(ENTRIES, 0) > MOST_ENTRIES:
            raise OSError(f"a dictionary has more than {MOST_ENTRIES:,} entries")
        delta = delta or next((DELTAS[e] for e in map(fields.get, ENCODINGS) if e in DELTAS), "")
        # Else small pages without a row would take minutes.
        if pages > most_pages:
            raise OSError("it has more pages than rows")
    return Pages(total, delta)


def read_header(content: bytes, at: int) -> tuple[dict[tuple[int, ...], int], int]:
    """Read the page header at `at`: its fields of 32 bits by their ids, and where it ends.

    Of a field that occurs twice the last counts, as for pyarrow. OSError if it is damaged.
    """
    # The ids of the structs around a field, and its own.
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
            if delta:
                ids[-1] += delta
            else:
                ids[-1], at = read_integer(content, at, 16)
            if kind == I32:
                found[tuple(ids)], at = read_integer(content, at, 32)
            elif kind in (I16, I64):
                _, at = read_integer(content, at, 64)
            elif kind == BINARY:
                size, at = read_integer(content, at, 32, signed=False)
                at += size
            elif kind == STRUCT:
                ids.append(0)
            elif kind in SIZES:
                at += SIZES[kind]
            else:
                break
    except IndexError:
        raise OSError("the header of a page is truncated") from None
    raise OSError("the header of a page is damaged")


def read_integer(content: bytes, at: int, bits: int, signed: bool = True) -> tuple[int, int]:
    """Read an integer of `bits` bits, and where it ends. OSError if it has more.

    pyarrow drops the bits beyond, and would take it for another.
    """
    value, byte, shift = 0, 128, 0
    while byte > 127:
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if value >> bits or shift > 70:
            raise OSError("the header of a page has an integer that is too large")
    return (value >> 1) ^ -(value & 1) if signed else value, at

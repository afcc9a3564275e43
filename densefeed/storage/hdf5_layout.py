"""Find the datasets and attributes of an HDF5 file without the HDF5 library.

Files of score maps are exchanged, and the library trusts what it reads: of 20,000 files with one to
five changed bytes of metadata, HDF5 2.0.0 never returned from 8, which not even Ctrl-C ends, and
took 2 GB of memory for 3. Therefore only the structures that HDF5 writes for a few contiguous
datasets are read here, with bounds: a superblock of version 0, a group with a symbol table, object
headers of version 1. What else a file can hold (links, other objects, chunks, filters, external or
virtual storage, shared types) is refused, so nothing in a file can name another file.

The names of the structures are those of the HDF5 File Format Specification, version 3.0.
"""

import math
import os
import struct
from collections.abc import Collection, Iterator
from typing import NamedTuple

import h5py
import numpy as np

# Signature; versions 0 of the superblock and its parts; offsets and lengths of 8 bytes.
SUPERBLOCK = b"\x89HDF\r\n\x1a\n" + bytes((0, 0, 0, 0, 0, 8, 8, 0))
# Messages of an object header.
DATASPACE, DATATYPE, EXTERNAL, LAYOUT, FILTERS = 1, 3, 7, 8, 11
ATTRIBUTE, CONTINUATION, SYMBOL_TABLE = 12, 16, 17
# Flag of a message that is stored elsewhere.
SHARED = 2
# Kind of a symbol table entry that is a soft link.
SOFT_LINK = 2
# Most bytes of a structure, messages of an object, nodes of a group and entries of a node. A store
# has 256 bytes, 5 messages, 2 nodes and 8 entries.
MOST_BYTES, MOST_PARTS = 2**16, 256
# Most bytes of a text: 65,535 class names of 256 bytes.
MOST_TEXT = 2**24


class LayoutError(Exception):
    """The file is truncated, damaged or of a kind that this module does not read."""


class Dataset(NamedTuple):
    """A contiguous dataset, within the file. `dtype` is None for a type that stores do not have."""

    dtype: np.dtype | None
    shape: tuple[int, ...]
    offset: int


class Layout(NamedTuple):
    """Datasets by name, and the values of attributes: bytes of a text, or a number."""

    datasets: dict[str, Dataset]
    attributes: dict[str, bytes | np.generic]


def read_layout(descriptor: int, attributes: Collection[str]) -> Layout:
    """Read where the datasets of a regular file lie, and those of `attributes` that it has.

    Raises LayoutError, and OSError if the file cannot be read.
    """
    file = Metadata(descriptor)
    start = file.read(0, 96)
    if not start.startswith(SUPERBLOCK[:8]):
        raise LayoutError("it is not an HDF5 file")
    base, end, root = (struct.unpack_from("<Q", start, at)[0] for at in (24, 40, 64))
    if not start.startswith(SUPERBLOCK) or base:
        raise LayoutError("its superblock is damaged or of another version than 0")
    if end > file.size:
        raise LayoutError(f"it is truncated: it has {file.size:,} of {end:,} bytes")
    groups, found = [], {}
    for kind, _, data in read_messages(file, root):
        if kind == SYMBOL_TABLE:
            groups.append(unpack("<QQ", data))
        elif kind == ATTRIBUTE:
            name, value = split_attribute(data)
            if name in attributes:
                found[name] = read_value(file, name, *value)
    if len(groups) != 1:
        raise LayoutError("its root group is not stored as a symbol table")
    names = read_names(file, *groups[0])
    return Layout({name: read_dataset(file, name, at) for name, at in names}, found)


class Metadata:
    """Bounded reads from a file of `size` bytes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self.size = descriptor, os.fstat(descriptor).st_size

    def read(self, offset: int, size: int, most: int = MOST_BYTES) -> bytes:
        """Read `size` bytes at `offset`; LayoutError if they are not all there, or too many."""
        if size > most or offset + size > self.size:
            raise LayoutError("its metadata is damaged")
        data = os.pread(self._descriptor, size, offset)
        # The file may have become shorter.
        if len(data) < size:
            raise LayoutError("it is truncated")
        return data

    def unpack(self, form: str, offset: int) -> tuple:
        """Read the numbers at `offset`, little endian, as `struct` does."""
        return struct.unpack(form, self.read(offset, struct.calcsize(form)))


def unpack(form: str, data: bytes, offset: int = 0) -> tuple:
    """`struct.unpack_from`; LayoutError if `data` is too short."""
    if len(data) < offset + struct.calcsize(form):
        raise LayoutError("its metadata is damaged")
    return struct.unpack_from(form, data, offset)


def read_messages(file: Metadata, offset: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield type, flags and data of the messages of an object header."""
    version, count, size = file.unpack("<BxH4xI", offset)
    if version != 1 or count > MOST_PARTS:
        raise LayoutError("an object header is damaged or of another version than 1")
    blocks, block = [(offset + 16, size)], b""
    # The number of messages bounds the loop: a block may name itself as its continuation.
    for _ in range(count):
        if not block and blocks:
            block = file.read(*blocks.pop(0))
        kind, length, flags = unpack("<HHB", block)
        data, block = block[8 : 8 + length], block[8 + length :]
        if len(data) < length:
            raise LayoutError("an object header is damaged")
        if kind == CONTINUATION:
            blocks.append(unpack("<QQ", data))
        yield kind, flags, data


def read_names(file: Metadata, tree: int, heap: int) -> Iterator[tuple[str, int]]:
    """Yield the name of every object of a group, once, and the offset of its object header."""
    signature, kind, level, used = file.unpack("<4sBBH", tree)
    heap_signature, version, size, at = file.unpack("<4sB3xQ8xQ", heap)
    whole = (signature, kind, level, heap_signature, version) == (b"TREE", 0, 0, b"HEAP", 0)
    if not whole or used > MOST_PARTS:
        raise LayoutError("its root group is damaged or holds too much")
    texts, seen = file.read(at, size), set()
    # Keys of 8 bytes lie before, between and after the addresses of the nodes.
    for n in range(used):
        (node,) = file.unpack("<Q", tree + 32 + 16 * n)
        signature, version, count = file.unpack("<4sBxH", node)
        if (signature, version) != (b"SNOD", 1) or count > MOST_PARTS:
            raise LayoutError("its root group is damaged")
        for k in range(count):
            name_at, header, cached = file.unpack("<QQI", node + 8 + 40 * k)
            name, ended, _ = texts[name_at:].partition(b"\0")
            if not ended or name in seen or len(seen) == MOST_PARTS:
                raise LayoutError("its root group is damaged or holds too much")
            seen.add(name)
            if cached == SOFT_LINK:
                raise LayoutError(f"{name!r} is a link")
            yield name.decode(errors="backslashreplace"), header


def read_dataset(file: Metadata, name: str, offset: int) -> Dataset:
    """Read the object header of a contiguous dataset; errors call it `name`."""
    parts = {}
    for kind, flags, data in read_messages(file, offset):
        if kind in (EXTERNAL, FILTERS):
            raise LayoutError(f"{name!r} has filters or lies in another file")
        if kind in (DATASPACE, DATATYPE, LAYOUT):
            if kind in parts or flags & SHARED:
                raise LayoutError(f"{name!r} has a damaged object header or a shared type")
            parts[kind] = data
    if len(parts) < 3:
        raise LayoutError(f"{name!r} is not a dataset")
    shape, dtype = parse_shape(parts[DATASPACE]), parse_type(parts[DATATYPE])
    # Version and class: others are stored in chunks, in the header itself, or in other files.
    if parts[LAYOUT][:2] != b"\3\1":
        raise LayoutError(f"{name!r} is not contiguous")
    start, size = unpack("<QQ", parts[LAYOUT], 2)
    if start + size > file.size or (dtype and size != math.prod(shape) * dtype.itemsize):
        raise LayoutError(f"{name!r} is empty, or reaches beyond the end of the file")
    return Dataset(dtype, shape, start)


def parse_shape(dataspace: bytes) -> tuple[int, ...]:
    """Parse a dataspace message; () for a scalar."""
    version, rank = unpack("<BB", dataspace)
    if version != 1 or rank > 8:
        raise LayoutError("a shape is damaged")
    return unpack(f"<{rank}Q", dataspace, 8)


# Numbers by their datatype messages, which follow two bytes in an encoded type.
NUMBERS = {
    h5py.h5t.py_create(np.dtype(name)).encode()[2:]: np.dtype(name)
    for name in ("|u1", "<u2", "<u4", "<i8", "<f2", "<f4", "<f8")
}


def parse_type(datatype: bytes) -> np.dtype | None:
    """Parse a datatype message; None unless it is a number or text of fixed length."""
    # Padded with zeros, ASCII.
    if datatype[:4] == b"\x13\1\0\0":
        (size,) = unpack("<I", datatype, 4)
        return np.dtype((np.bytes_, size)) if 0 < size < 2**31 else None
    return next((dtype for head, dtype in NUMBERS.items() if datatype.startswith(head)), None)


def split_attribute(message: bytes) -> tuple[str, tuple[bytes, bytes, bytes]]:
    """Return the name of an attribute, and its datatype, dataspace and value."""
    version, *sizes = unpack("<BxHHH", message)
    parts, at = [], 8
    for size in sizes:
        parts.append(message[at : at + size])
        # Each part is padded to a multiple of 8.
        at += -(-size // 8) * 8
    name = parts[0].rstrip(b"\0").decode(errors="replace") if version == 1 else ""
    return name, (parts[1], parts[2], message[at:])


def read_value(
    file: Metadata, name: str, datatype: bytes, dataspace: bytes, value: bytes
) -> bytes | np.generic:
    """Return the value of a scalar attribute: a number, or the bytes of a text of any length."""
    if parse_shape(dataspace) == ():
        # A text of variable length.
        if datatype[:1] == b"\x19" and datatype[1:2] and datatype[1] & 15 == 1:
            return read_text(file, *unpack("<IQI", value))
        dtype = parse_type(datatype)
        if dtype is not None and len(value) >= dtype.itemsize:
            return np.frombuffer(value, dtype, 1)[0]
    raise LayoutError(f"its attribute {name!r} is neither text nor a number")


def read_text(file: Metadata, length: int, heap: int, index: int) -> bytes:
    """Read an object of `length` bytes of a global heap collection."""
    signature, version, size = file.unpack("<4sB3xQ", heap)
    if (signature, version) != (b"GCOL", 1):
        raise LayoutError("its texts are damaged")
    at, end = heap + 16, heap + size
    # Their numbers have 16 bits; number 0 is the free space at the end.
    for _ in range(2**16):
        if at + 16 > end:
            break
        number, held = file.unpack("<H6xQ", at)
        if number == index and number and length == held:
            return file.read(at + 16, length, MOST_TEXT)
        at += 16 + -(-held // 8) * 8
    raise LayoutError("its texts are damaged")

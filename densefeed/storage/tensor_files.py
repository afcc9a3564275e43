"""Read one array from a small .pt or .npy file, fast, without running code from its pickle.

Score maps were published as a million files of one tensor each, and `torch.load` takes 0.3 ms per
file, which is more than reading and storing the map. The pickles of all files of a pack are equal
byte by byte, except for the name of the storage. So the first file of a kind is read with
`torch.load(weights_only=True)`, which gives the layout of the array in its storage. For other files
with the same pickle, the array is a view of the storage's bytes. No pickle is parsed here; a file
with an unknown pickle is read with `torch.load(weights_only=True)` again.

Two containers (PyTorch 1.6 changed the default from the second to the first):
- zip: members stored, not compressed; `NAME/data.pkl` is the pickle, `NAME/data/KEY` the storage,
  optionally `NAME/byteorder`.
- legacy: five pickles, which contain KEY twice; the number of elements, int64; the storage.
"""

import io
import re
import struct
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from densefeed.storage.torch_files import check_torch_file
from densefeed.system.errors import first_line
from densefeed.system.files import open_regular

# Bytes of a file. A map of 64 x 64 cells of 10 classes in float64 has 0.7 MB.
MAX_BYTES = 2**26
# Bytes of its pickle. That of one tensor has some hundreds.
MAX_PICKLE = 2**16
TOO_LARGE = f"is larger than {MAX_BYTES >> 20} MiB, which no score map is"
# Layouts kept. The limit bounds the memory for a folder of unrelated files.
MAX_LAYOUTS = 256
# Magic, version 1.0, bytes of the header.
NPY = struct.Struct("<6sBBH")
# Pickled name of a storage: its length, and digits.
KEY = re.compile(rb"X(.)\0\0\0([0-9]+)", re.DOTALL)


class TensorError(Exception):
    """The file holds no array that can be read. The message gives the reason, without the file."""


class Layout(NamedTuple):
    """Position of the elements of an array in the bytes of its storage."""

    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    offset: int  # bytes
    nbytes: int  # of the storage

    def view(self, storage: memoryview) -> np.ndarray:
        """View `storage`, which has `nbytes` bytes, as the array."""
        return np.ndarray(self.shape, self.dtype, storage, self.offset, self.strides)


class TensorFiles:
    """Read arrays from .pt and .npy files and cache the layouts found. Threads may share it."""

    def __init__(self) -> None:
        # Layout by the pickle without KEY.
        self._layouts = {}
        # Sizes in bytes of the storages of cached legacy layouts.
        self._legacy_sizes = set()

    def read(self, path: Path | str) -> np.ndarray:
        """Read the one array of a file, as stored: any shape, float or int.

        Raises TensorError if there is no such array, if it is damaged, or if reading it would need
        an unrestricted pickle. OSError is not wrapped.
        """
        with open_regular(path) as file:
            # One byte more than allowed shows a larger file without reading all of it.
            content = file.raw.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise TensorError(TOO_LARGE)
        if not content:
            raise TensorError("is empty")
        if content[:6] == b"\x93NUMPY":
            return self._read_npy(content)
        found = split_zip(content) if content[:2] == b"PK" else self._split_legacy(content)
        if found is not None:
            layout = self._layouts.get(found[0])
            # Nothing in a zip makes its storage as long as its pickle states.
            if layout is not None and layout.nbytes == len(found[1]):
                return layout.view(found[1])
        return self._load(content, found)

    def _read_npy(self, content: bytes) -> np.ndarray:
        if len(content) >= NPY.size and content[6:8] == b"\1\0":
            start = NPY.size + NPY.unpack_from(content)[3]
            layout = self._layouts.get(content[:start])
            if layout is not None and layout.nbytes == len(content) - start:
                return layout.view(memoryview(content)[start:])
        try:
            file = io.BytesIO(content)
            array = np.load(file, allow_pickle=False)
        # numpy does not limit the types of its exceptions: ValueError, EOFError, SyntaxError from
        # the header, ...
        except Exception as error:
            raise TensorError(
                f"is not a complete NumPy array ({first_line(error)[:120]})"
            ) from error
        if file.read(1):
            raise TensorError("has more bytes than its array")
        # numpy writes version 1.0 unless the header is longer than 64 KiB.
        if content[6:8] == b"\1\0" and array.size:
            layout = Layout(array.dtype, array.shape, array.strides, 0, array.nbytes)
            self._remember(content[:start], layout)
        return array

    def _load(self, content: bytes, found: tuple[bytes, memoryview] | None) -> np.ndarray:
        """Read with `torch.load`; cache the layout if it gives the same array for `found`."""
        tensor = load_tensor(content)
        try:
            array = tensor.detach().numpy()
        except (TypeError, RuntimeError) as error:
            raise TensorError(
                f"holds {tensor.dtype}, which is none of float16, float32, float64"
            ) from error
        # The storage of an expanded tensor is smaller than the tensor.
        if array.nbytes > MAX_BYTES:
            raise TensorError(TOO_LARGE)
        storage, offset = tensor.untyped_storage().nbytes(), tensor.storage_offset()
        layout = Layout(array.dtype, array.shape, array.strides, offset * array.itemsize, storage)
        legacy = found is None and content[:2] != b"PK"
        if legacy and array.size:
            found = split_legacy(content, storage)
        if found is not None and array.size and len(found[1]) == storage:
            again = layout.view(found[1])
            # A layout is used only after it gave the numbers of `torch.load`.
            if again.tobytes() == array.tobytes() and self._remember(found[0], layout) and legacy:
                self._legacy_sizes.add(storage)
        return array

    def _remember(self, front: bytes, layout: Layout) -> bool:
        if len(self._layouts) >= MAX_LAYOUTS:
            return False
        self._layouts[front] = layout
        return True

    def _split_legacy(self, content: bytes) -> tuple[bytes, memoryview] | None:
        """`split_legacy` for a known pickle, else None.

        Only the pickle contains the size of the storage, so all cached sizes are tried.
        """
        # A copy, because another thread may add a size meanwhile.
        for nbytes in tuple(self._legacy_sizes):
            found = split_legacy(content, nbytes)
            if found is not None and found[0] in self._layouts:
                return found
        return None


def load_tensor(content: bytes) -> torch.Tensor:
    """Load the one dense CPU tensor of a .pt file, without running code; else TensorError."""
    try:
        check_torch_file(io.BytesIO(content), MAX_PICKLE)
        # torch warns about damaged pickles. The caller counts these files.
        with warnings.catch_warnings(action="ignore"):
            tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    # torch does not limit the types of its exceptions: RuntimeError, UnpicklingError, KeyError, ...
    except Exception as error:
        raise TensorError(
            f"is not a tensor that can be read without running code ({first_line(error)[:120]})"
        ) from error
    if (
        type(tensor) is not torch.Tensor
        or tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
    ):
        raise TensorError(f"holds a {type(tensor).__name__}, and should hold one plain tensor")
    return tensor


def split_zip(content: bytes) -> tuple[bytes, memoryview] | None:
    """Split a zip file of one tensor into its pickle without KEY, and its storage.

    Returns None for any other file. Raises TensorError if pickle or storage do not match their
    CRC in the zip.
    """
    found = index_members(content)
    keys = [name[5:] for name in found if name.startswith("data/")]
    if len(keys) != 1 or not keys[0].isdigit() or "data.pkl" not in found:
        return None
    if "byteorder" in found and read_member(content, found["byteorder"]) != b"little":
        return None
    pickled = bytes(read_member(content, found["data.pkl"]))
    named = b"X" + struct.pack("<L", len(keys[0])) + keys[0].encode()
    # Two places could make different pickles equal once the key is removed.
    if pickled.count(named) != 1:
        return None
    return b"zip" + pickled.replace(named, b"X"), read_member(content, found[f"data/{keys[0]}"])


def index_members(content: bytes) -> dict[str, zipfile.ZipInfo]:
    """Index a zip's members by their names below NAME/; empty if PyTorch did not write it."""
    # The end of central directory without a comment: zipfile ignores bytes after it.
    if content[-22:-18] != b"PK\5\6":
        return {}
    try:
        members = zipfile.ZipFile(io.BytesIO(content)).infolist()
    # zipfile does not limit the types of its exceptions.
    except Exception:
        return {}
    found = {member.filename.partition("/")[2]: member for member in members}
    # PyTorch writes every name once and compresses nothing; torch.load decides about other files.
    if len(found) != len(members) or any(member.compress_type for member in members):
        return {}
    return found


def read_member(content: bytes, member: zipfile.ZipInfo) -> memoryview:
    """Read an uncompressed member of a zip; TensorError if it does not match its CRC.

    `ZipFile.read` takes twice as long.
    """
    # A header of 30 bytes comes first, whose end are the lengths of a name and an extra field.
    begin = member.header_offset + 30
    for at in (begin - 4, begin - 2):
        begin += int.from_bytes(content[at : at + 2], "little")
    stored = memoryview(content)[begin : begin + member.file_size]
    if zlib.crc32(stored) != member.CRC:
        raise TensorError("is damaged (its checksum differs)")
    return stored


def split_legacy(content: bytes, nbytes: int) -> tuple[bytes, memoryview] | None:
    """Split a legacy file into its pickles without KEY, and its storage of `nbytes` bytes.

    Returns None if the storage has another size.
    """
    at = len(content) - nbytes
    front = content[: max(at, 0)]
    keys = [match for match in KEY.finditer(front) if match[1][0] == len(match[2])]
    if len(keys) != 2 or keys[0][2] != keys[1][2]:
        return None
    # The number of elements before the storage is part of the bytes that must be equal.
    return b"legacy" + front.replace(keys[0][0], b"X"), memoryview(content)[at:]

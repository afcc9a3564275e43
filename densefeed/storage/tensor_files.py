"""One array out of a small .pt or .npy file, fast, and without ever running what a stranger
pickled.

Score maps were published as a million files of one tensor each, and `torch.load` takes 0.3 ms of
each: more than reading and storing the map. But all pickles of a tree are equal byte by byte, but
for the storage's name. So the first file of a kind goes through `torch.load(weights_only=True)`,
which says what its pickle means; where another file has the same pickle, its numbers are at hand.
No pickle is ever parsed here, and what is not known goes to `torch.load(weights_only=True)` again.

Two containers (PyTorch 1.6 changed the default from the second to the first):
- zip: stored, not compressed; `NAME/data.pkl` the pickle, `NAME/data/KEY` the numbers, perhaps
  `NAME/byteorder`.
- legacy: five pickles, in which KEY stands twice; the number of numbers, int64; the numbers.
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

MOST_BYTES = 2**26  # of a file; a map of 64 x 64 cells of 10 classes in float64 has 0.7 MB
LARGE = f"is larger than {MOST_BYTES >> 20} MiB, which no score map is"
LEARNED = 256  # pickles remembered; a tree of strange files shall not fill the memory
# of a zip file
END, ENTRY, LOCAL = (
    struct.Struct("<4s4H2LH"),
    struct.Struct("<4s6H3L5H2L"),
    struct.Struct("<4s5H3L2H"),
)
END64 = 56 + 20  # bytes of the 64-bit end and its locator
NPY = struct.Struct("<6sBBH")  # magic, version 1.0, bytes of the header
# a pickled name of a storage: its length, and digits
KEY = re.compile(rb"X(.)\0\0\0([0-9]+)", re.DOTALL)


class TensorError(Exception):
    """The file holds no array that can be read; the message says why, and does not name the
    file.
    """


class Layout(NamedTuple):
    """Where the numbers of an array lie in the bytes of its storage."""

    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    offset: int  # bytes
    nbytes: int  # of the storage

    def view(self, storage: memoryview) -> np.ndarray:
        """The array; `storage` has `nbytes` bytes."""
        return np.ndarray(self.shape, self.dtype, storage, self.offset, self.strides)


class TensorFiles:
    """Reads arrays from .pt and .npy files and remembers the layouts it met. Threads may share
    it.
    """

    def __init__(self) -> None:
        self._layouts: dict[bytes, Layout] = {}  # by the pickle, KEY taken out
        # bytes of a legacy storage, and how many of its layouts are known
        self._fronts: dict[int, int] = {}

    def read(self, path: Path | str) -> np.ndarray:
        """The one array of a file, as it is stored: any shape, float or int.

        Raises TensorError where there is no such array, or it is damaged, or only a pickle that may
        run could give it. OSError of the operating system passes.
        """
        with open(path, "rb", buffering=0) as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise TensorError(LARGE)
        if not content:
            raise TensorError("is empty")
        if content[:6] == b"\x93NUMPY":
            return self._npy(content)
        found = parts(content) if content[:2] == b"PK" else self._legacy_parts(content)
        if found is not None:
            layout = self._layouts.get(found[0])
            if layout is not None and layout.nbytes == len(found[1]):
                return layout.view(found[1])
        return self._learn(content, found)

    def _npy(self, content: bytes) -> np.ndarray:
        if len(content) >= NPY.size and content[6:8] == b"\1\0":
            start = NPY.size + NPY.unpack_from(content)[3]
            layout = self._layouts.get(content[:start])
            if layout is not None and layout.nbytes == len(content) - start:
                return layout.view(memoryview(content)[start:])
        try:
            file = io.BytesIO(content)
            array = np.load(file, allow_pickle=False)
        # numpy promises nothing: ValueError, EOFError, SyntaxError of the header, ...
        except Exception as error:
            raise TensorError(f"is no whole array of NumPy ({first_line(error)})") from error
        if file.read(1):
            raise TensorError("has more bytes than its array")
        if content[6:8] == b"\1\0" and array.size:
            self._remember(
                content[:start], Layout(array.dtype, array.shape, array.strides, 0, array.nbytes)
            )
        return array

    def _learn(self, content: bytes, found: tuple[bytes, memoryview] | None) -> np.ndarray:
        """Through `torch.load`; what its pickle means is remembered if the numbers lie where they
        are looked for.
        """
        try:
            # a thousandfold, if its members are zeros, compressed
            if content[:2] == b"PK" and inflated(content) > MOST_BYTES:
                raise TensorError(LARGE)
            # of files that no longer are what they were; the caller counts them
            with warnings.catch_warnings(action="ignore"):
                tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except (MemoryError, TensorError):
            raise
        except Exception as error:
            # torch promises nothing: RuntimeError, UnpicklingError, EOFError, KeyError, ...
            raise TensorError(
                f"is no tensor that can be read without running code ({first_line(error)})"
            ) from error
        if (
            type(tensor) is not torch.Tensor
            or tensor.layout is not torch.strided
            or tensor.device.type != "cpu"
        ):
            raise TensorError(f"holds a {type(tensor).__name__}, and should hold one plain tensor")
        try:
            array = tensor.detach().numpy()
        except (TypeError, RuntimeError) as error:
            raise TensorError(
                f"holds {tensor.dtype}, which is none of float16, float32, float64"
            ) from error
        if array.nbytes > MOST_BYTES:  # an expanded tensor needs few bytes in its file
            raise TensorError(LARGE)
        storage = tensor.untyped_storage().nbytes()
        layout = Layout(
            array.dtype,
            array.shape,
            array.strides,
            tensor.storage_offset() * array.itemsize,
            storage,
        )
        legacy = found is None and content[:2] != b"PK"
        if legacy and array.size:
            found = legacy_parts(content, storage)
        plain = not (tensor.is_conj() or tensor.is_neg())
        if found is not None and plain and array.size and len(found[1]) == storage:
            again = layout.view(found[1])
            if again.tobytes() == array.tobytes() and self._remember(found[0], layout) and legacy:
                self._fronts[storage] = self._fronts.get(storage, 0) + 1
        return array

    def _remember(self, front: bytes, layout: Layout) -> bool:
        if len(self._layouts) >= LEARNED:
            return False
        self._layouts[front] = layout
        return True

    def _legacy_parts(self, content: bytes) -> tuple[bytes, memoryview] | None:
        """How much of a legacy file is its storage only its pickle says, so the sizes met before
        are tried.
        """
        for nbytes in tuple(self._fronts):
            found = legacy_parts(content, nbytes)
            if found is not None and found[0] in self._layouts:
                return found
        return None


def parts(content: bytes) -> tuple[bytes, memoryview] | None:
    """The pickle, KEY taken out, and the storage of a zip that holds one tensor; None if it is
    anything else.

    Raises TensorError if pickle or storage do not match the CRC that the zip keeps of them.
    """
    size = len(content)
    if size < END.size:
        return None
    signature, disk, first_disk, here, count, length, start, comment = END.unpack_from(
        content, size - END.size
    )
    stop = start + length  # PyTorch puts the 64-bit form of the same end between here and there
    if content[stop : stop + 4] == b"PK\6\6":
        size -= END64
    if (
        signature != b"PK\5\6"
        or disk
        or first_disk
        or here != count
        or comment
        or stop != size - END.size
    ):
        return None
    root, found, at = None, {}, start
    for _ in range(count):
        if at + ENTRY.size > stop:
            return None
        entry = ENTRY.unpack_from(content, at)
        name_size, extra_size, comment_size = entry[10:13]
        name = content[at + ENTRY.size : at + ENTRY.size + name_size]
        at += ENTRY.size + name_size + extra_size + comment_size
        folder, _, member = name.partition(b"/")
        if entry[0] != b"PK\1\2" or (root is not None and folder != root) or member in found:
            return None
        root = folder
        if member in (b"data.pkl", b"byteorder") or member.startswith(b"data/"):
            found[member] = stored(content, entry, name, start)
            if found[member] is None:
                return None
    keys = [member[5:] for member in found if member.startswith(b"data/")]
    if (
        at != stop
        or b"data.pkl" not in found
        or len(keys) != 1
        or not keys[0].isdigit()
        or len(keys[0]) > 255
    ):
        return None
    if found.get(b"byteorder", b"little") != b"little":
        return None
    pickled = bytes(found[b"data.pkl"])
    named = b"X" + struct.pack("<L", len(keys[0])) + keys[0]
    if pickled.count(named) != 1:
        return None
    return b"zip" + pickled.replace(named, b"X"), found[b"data/" + keys[0]]


def stored(content: bytes, entry: tuple, name: bytes, directory: int) -> memoryview | None:
    """The bytes of a zip's member that is stored as it is, or None; TensorError if they do not
    match their CRC.
    """
    flags, method, crc, packed, nbytes, place = (
        entry[3],
        entry[4],
        entry[7],
        entry[8],
        entry[9],
        entry[16],
    )
    if method or packed != nbytes or flags & 1 or place + LOCAL.size > directory:
        return None
    local = LOCAL.unpack_from(content, place)
    begin = place + LOCAL.size + local[9] + local[10]
    if local[0] != b"PK\3\4" or local[3] or begin + nbytes > directory:
        return None
    if content[place + LOCAL.size : place + LOCAL.size + local[9]] != name:
        return None
    member = memoryview(content)[begin : begin + nbytes]
    if zlib.crc32(member) != crc:
        raise TensorError("is damaged (its checksum differs)")
    return member


def legacy_parts(content: bytes, nbytes: int) -> tuple[bytes, memoryview] | None:
    """The pickles, KEY taken out, and the storage of a legacy file whose storage has `nbytes`
    bytes; None if it has not.
    """
    at = len(content) - nbytes
    front = content[: max(at, 0)]
    keys = [match for match in KEY.finditer(front) if match[1][0] == len(match[2])]
    if len(keys) != 2 or keys[0][2] != keys[1][2]:
        return None
    # The number of numbers, before them, is part of what must be equal.
    return b"legacy" + front.replace(keys[0][0], b"X"), memoryview(content)[at:]


def inflated(content: bytes) -> int:
    """Bytes of a zip's members, once they are decompressed."""
    with zipfile.ZipFile(io.BytesIO(content)) as packed:
        return sum(member.file_size for member in packed.infolist())


def first_line(error: Exception) -> str:
    """What an error says, in short."""
    return (str(error).splitlines() or [""])[0].strip()[:120] or type(error).__name__

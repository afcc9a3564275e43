"""Read one array from a small .pt or .npy file, fast, without running code from its pickle.

Score maps were published as a million files of one tensor each, and `torch.load` takes 0.3 ms per
file, which is more than reading and storing the map. The pickles of all files of a pack are equal
byte by byte, except for the name of the storage. So the first file of a kind is read with
`torch.load(weights_only=True)`, which gives the layout of the array in its storage. For other files
with the same pickle, the array is a view of the storage's bytes. No pickle is parsed here; a file
with an unknown pickle is read with `torch.load(weights_only=True)` again.

That needs the zip that PyTorch writes since version 1.6: members stored, not compressed;
`NAME/data.pkl` is the pickle, `NAME/data/KEY` the storage, optionally `NAME/byteorder`. Files of
the earlier form are all read with `torch.load`, and arrays of NumPy with `numpy.load`.
"""

import io
import struct
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from densefeed.storage.torch_files import (
    TorchFileError,
    check_torch_file,
    read_member,
    read_members,
)
from densefeed.system.errors import first_line
from densefeed.system.files import open_regular

# Bytes of a file. A map of 64 x 64 cells of 10 classes in float64 has 0.7 MB.
MAX_BYTES = 2**26
# Bytes of its pickle. That of one tensor has some hundreds.
MAX_PICKLE = 2**16
TOO_LARGE = f"is larger than {MAX_BYTES >> 20} MiB, which no score map is"
# Layouts kept. The limit bounds the memory for a folder of unrelated files.
MAX_LAYOUTS = 256


class TensorError(Exception):
    """The file holds no array that can be read. The message gives the reason, without the file."""


class Layout(NamedTuple):
    """Position of the elements of an array in the bytes of its storage."""

    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    offset: int  # bytes
    nbytes: int  # of the storage

    def view(self, storage: bytes) -> np.ndarray:
        """View `storage`, which has `nbytes` bytes, as the array."""
        return np.ndarray(self.shape, self.dtype, storage, self.offset, self.strides)


class TensorFiles:
    """Read arrays from .pt and .npy files and cache the layouts found. Threads may share it."""

    def __init__(self) -> None:
        # Layout by the pickle without KEY.
        self._layouts = {}

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
            return load_numpy(content)
        if content[:2] != b"PK" or (found := split_zip(content)) is None:
            return load_torch(content)[0]
        pickled, storage = found
        layout = self._layouts.get(pickled)
        # Nothing in a zip makes its storage as long as its pickle states.
        if layout is not None and layout.nbytes == len(storage):
            return layout.view(storage)
        array, layout = load_torch(content)
        # A layout is used only after it gave the numbers of `torch.load`.
        same = array.size and layout.nbytes == len(storage)
        same = same and layout.view(storage).tobytes() == array.tobytes()
        if same and len(self._layouts) < MAX_LAYOUTS:
            self._layouts[pickled] = layout
        return array


def load_numpy(content: bytes) -> np.ndarray:
    """Load the array of a .npy file; else TensorError."""
    file = io.BytesIO(content)
    try:
        array = np.load(file, allow_pickle=False)
    # numpy does not limit the types of its exceptions: ValueError, EOFError, SyntaxError from the
    # header, ...
    except Exception as error:
        raise TensorError(f"is not a complete NumPy array ({first_line(error)[:120]})") from error
    if file.read(1):
        raise TensorError("has more bytes than its array")
    return array


def load_torch(content: bytes) -> tuple[np.ndarray, Layout]:
    """Load the array of a .pt file, and its layout in the tensor's storage; else TensorError."""
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
    return array, layout


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


def split_zip(content: bytes) -> tuple[bytes, bytes] | None:
    """Split a zip file of one tensor into its pickle without KEY, and its storage.

    Returns None for any other file. Raises TensorError if the storage does not match its CRC in the
    zip.
    """
    file = io.BytesIO(content)
    try:
        pickled, found = read_members(file, len(content), MAX_PICKLE)
    # `load_tensor` gives the reason.
    except TorchFileError:
        return None
    keys = [name[5:] for name in found if name.startswith("data/")]
    if len(keys) != 1 or not keys[0].isdigit():
        return None
    named = b"X" + struct.pack("<L", len(keys[0])) + keys[0].encode()
    # Two places could make different pickles equal once the key is removed.
    if pickled.count(named) != 1:
        return None
    try:
        if "byteorder" in found and read_member(file, found["byteorder"]) != b"little":
            return None
        storage = read_member(file, found[f"data/{keys[0]}"])
    except TorchFileError as error:
        raise TensorError(f"is damaged ({error})") from error
    return pickled.replace(named, b"X"), storage

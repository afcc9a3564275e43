"""Python interface of the native decoder: batches of crops, lossless transcoding, sizes of JPEGs.

`pip install` builds the library (setup.py) beside this file. It has a plain C interface and is
loaded by ctypes. This module does not depend on datasets or epoch plans.
"""

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Sequence
from ctypes import (
    CDLL,
    Structure,
    addressof,
    byref,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_ssize_t,
    c_void_p,
    create_string_buffer,
    py_object,
    pythonapi,
    sizeof,
    string_at,
)
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from densefeed.system.errors import UserError, check_byte_order

LIBRARY = Path(__file__).with_name("libdensefeed.so")
# Status of a sample.
OK, DAMAGED, UNSUPPORTED, UNREADABLE, NO_MEMORY = range(5)
# Kinds of stored image: RAW is rows of RGB, PLANES what a JPEG decodes to (`planes`).
JPEG, RAW, PLANES = range(3)
# Filters, antialiased like Pillow's.
BILINEAR, BICUBIC = range(2)
STAGES = ("labels", "read", "decode", "resample")
# Bytes of a message, as in native.h.
MESSAGE = 120
# Largest image by default, pixels: Pillow's MAX_IMAGE_PIXELS, above which it warns. As RGB it takes
# 256 MiB, and while it is decoded up to three times as much.
MAX_PIXELS = 89_478_485
# Seconds between checks for Python signals while waiting for a batch.
WAIT = 0.1
# Four times the cores of the largest machines. Running out of threads would hurt all processes.
MOST_THREADS = 4096

# One sample of a batch, `Sample` in native.h.
SAMPLE = np.dtype(
    [
        # Address of the encoded image; 0: read it from `file`.
        ("bytes", "u8"),
        ("offset", "i8"),
        ("length", "i8"),
        ("file", "i4"),  # file descriptor
        ("kind", "i4"),
        # As recorded in the dataset; a JPEG of another size is damaged.
        ("height", "i4"),
        ("width", "i4"),
        ("box_tlhw", "f8", 4),  # pixels
        ("flip", "i4"),
        # BILINEAR or BICUBIC, which resizes the crop.
        ("filter", "i4"),
        ("status", "i4"),
        # Microseconds, in the order of STAGES.
        ("took", "f4", 4),
        ("message", f"S{MESSAGE}"),
    ],
    align=True,
)

# A JPEG that contains a sample's crop, for another decoder; `Cut` in native.h.
CUT = np.dtype(
    [
        # In: address of a buffer of the sample's length. Out: address of the JPEG, maybe the
        # sample's own bytes.
        ("bytes", "u8"),
        # Size of the JPEG; 0: the image is not one, or its status is not OK.
        ("length", "i8"),
        # The JPEG's region of the stored image, pixels.
        ("top", "i4"),
        ("left", "i4"),
        ("height", "i4"),
        ("width", "i4"),
        # length << 32 | CRC-32 of the image, or of its header if it has an index. In: of an image
        # that passed validation before. Out: of the image of this call.
        ("sound", "u8"),
    ],
    align=True,
)


class _Packed(Structure):
    """`Packed` in native.h."""

    _fields_ = (("cells", c_int32), ("top_k", c_int32), ("palette", c_void_p), ("levels", c_void_p))


class _Parts(Structure):
    """`Parts` in native.h."""

    _fields_ = (
        ("count", c_int),
        ("file", c_void_p),
        ("offset", c_void_p),
        ("bytes", c_void_p),
        ("to", c_void_p),
        ("crc", c_void_p),
        ("packed", c_void_p),
        ("limits", c_void_p),
    )


class _Batch(Structure):
    """`Batch` in native.h."""

    _fields_ = (
        ("samples", c_void_p),
        ("count", c_int),
        ("height", c_int),
        ("width", c_int),
        ("pixels", c_void_p),
        ("cuts", c_void_p),
        ("first_row", c_int),
        ("parts", _Parts),
        ("next", c_int),
        ("done", c_int),
        ("cancelled", c_int),
        ("failed", c_int),
        ("after", c_void_p),
    )


@functools.cache
def library() -> CDLL:
    """Load the library. UserError if it was not built, or cannot be, for this processor."""
    check_byte_order()
    try:
        lib = CDLL(str(LIBRARY))
    except OSError as error:
        raise UserError(
            f"cannot load the native decoder ({error}); build it with `pip install -e .`"
        ) from error
    lib.densefeed_open.restype = c_void_p
    lib.densefeed_limit.restype = None
    encoded = [c_char_p, c_size_t]
    # Without these types ctypes would pass a pointer as a C int, which cuts it to 32 bits.
    arguments = {
        **dict.fromkeys(("open", "sizes"), (c_int,)),
        **dict.fromkeys(("close", "decode", "maps", "free"), (c_void_p,)),
        "submit": [c_void_p, c_void_p],
        "wait": [c_void_p, c_void_p, c_double, c_int],
        "transcode": [*encoded, c_int, c_void_p, c_void_p, c_char_p],
        "planes": [*encoded, c_int, c_int, c_void_p, c_void_p, c_char_p],
        "probe": [*encoded, c_void_p, c_void_p, c_char_p],
        "sampling": [*encoded, c_void_p, c_void_p, c_char_p],
        "scan": [*encoded, c_void_p, c_char_p],
        "check_frame": [*encoded, c_char_p],
        "limit": [c_int64],
    }
    for name, types in arguments.items():
        getattr(lib, f"densefeed_{name}").argtypes = types
    # A library of another version would read and write at wrong offsets.
    for struct, size in enumerate((SAMPLE.itemsize, sizeof(_Batch), CUT.itemsize)):
        assert lib.densefeed_sizes(struct) == size, "a struct differs between native.h and here"
    return lib


class JpegError(Exception):
    """An image that cannot be read: `status` is DAMAGED, or UNSUPPORTED if Pillow must decode it.

    If memory is missing, the functions below raise MemoryError instead.
    """

    def __init__(self, status: int, message: bytes) -> None:
        super().__init__(message.decode(errors="replace"))
        self.status = status


def _call(function: str, encoded: bytes, *arguments: object) -> str:
    """Call a function of the library with a JPEG; return its message. JpegError if it fails."""
    message = create_string_buffer(MESSAGE)
    call = getattr(library(), f"densefeed_{function}")
    if status := call(encoded, len(encoded), *arguments, message):
        raise _explain(status, message.value)
    return message.value.decode(errors="replace")


def _make_bytes(function: str, encoded: bytes, *arguments: object) -> bytes:
    """Return the bytes that such a function makes of a JPEG, and free the library's copy."""
    out, length = c_void_p(), c_size_t()
    _call(function, encoded, *arguments, byref(out), byref(length))
    try:
        return string_at(out, length.value)
    finally:
        library().densefeed_free(out)


def _explain(status: int, message: bytes) -> Exception:
    """Return the error for a status. A lack of memory is not a fault of the image."""
    error = JpegError(status, message)
    return MemoryError(str(error)) if status == NO_MEMORY else error


def probe(encoded: bytes) -> tuple[int, int]:
    """Read height and width of a JPEG. JpegError for anything this decoder does not support."""
    height, width = c_int(), c_int()
    _call("probe", encoded, byref(height), byref(width))
    return height.value, width.value


def sampling(encoded: bytes) -> list[tuple[int, int]]:
    """Read the sampling factors, across and down, of the components of a JPEG; JpegError."""
    count, factors = c_int(), (c_int * 8)()
    _call("sampling", encoded, byref(count), factors)
    return list(zip(factors[::2], factors[1::2], strict=True))[: count.value]


def scan(encoded: bytes) -> str:
    """Decode the entropy-coded data of a JPEG of any color; return what libjpeg warns of, or "".

    It warns of extraneous bytes before a marker, which the decoders ignore. JpegError if the file
    is damaged, as the decoders find it when a crop reaches its last row, or has too many scans.
    """
    warnings = c_int()
    first = _call("scan", encoded, byref(warnings))
    more = warnings.value - 1
    return f"{first} (and {more:,} more)" if more > 0 else first


def limit_pixels(pixels: int) -> None:
    """Refuse images of more pixels from now on, in this process; by default MAX_PIXELS."""
    library().densefeed_limit(pixels)


def check_frame(encoded: bytes) -> None:
    """Raise JpegError for a JPEG that not every decoder reads alike, or that is too large.

    These are codings of 12 bits, lossless and hierarchical ones, more pixels than the limit, and
    codings in several scans whose coefficients need more than 6 bytes for each pixel of the limit.
    """
    _call("check_frame", encoded)


def transcode(encoded: bytes, interval: int) -> bytes:
    """Rewrite a JPEG losslessly as one baseline scan with a restart marker every `interval` MCUs.

    The DCT coefficients are the same, the Huffman tables are optimized. Of the APP segments only
    JFIF and Adobe are kept. JpegError if the file is damaged or neither grayscale nor RGB.
    """
    return _make_bytes("transcode", encoded, interval)


def planes(encoded: bytes) -> bytes:
    """Decode a JPEG to its planes (Y, Cb and Cr in most files), for images of `kind` PLANES.

    The planes have the resolution that the file has, so crops of them have the same pixels as crops
    of the JPEG with an index; without one libjpeg decodes large crops at a smaller scale. JpegError
    if the file is damaged or neither grayscale nor RGB.
    """
    return _make_bytes("planes", encoded, *probe(encoded))


class Packed(NamedTuple):
    """Packing of the score maps of N samples (densefeed/storage/FORMAT.md)."""

    palette: np.ndarray  # integers [N], classes in each row's palette, which determine its length
    levels: np.ndarray | None  # float32 [256] for a compact store; None: lossless


class Limits(NamedTuple):
    """The values that score maps may have: what a step takes for granted."""

    classes: int  # of the dataset
    palette: int  # most distinct classes of a map


def memory_at(address: int, length: int) -> np.ndarray:
    """Wrap memory of a library as uint8 `[length]`. Its owner must outlive the returned array."""
    # 0x100 is PyBUF_READ.
    return np.frombuffer(_view(address, length, 0x100), np.uint8)


_view = pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = py_object, [c_void_p, c_ssize_t, c_int]


@dataclass(eq=False)
class Parts:
    """Byte ranges to read with each image, P per sample: its score map. Jobs may share them.

    If `packed` is given, P is 2: a packed row and its Window. With `packed` or `limits`, `to` holds
    four arrays: logits `[N, S, S, k]`, classes `[N, S, S, k]`, logsumexps `[N, S, S]` and Windows
    `[N, 4]`. With `limits`, a sample is DAMAGED if its map holds a number that is not finite, a
    class out of range or twice in a cell, more classes than the palette, or an invalid Window.
    """

    file: np.ndarray  # int32 [N, P], descriptors
    offset: np.ndarray  # int64 [N, P]
    # P arrays [N, ...], C-contiguous; a range is as long as a row. Empty until there is memory.
    to: Sequence[np.ndarray]
    # uint32 [N], zlib's CRC-32 over the ranges of a sample in order; None: not verified
    crc: np.ndarray | None
    packed: Packed | None = None
    limits: Limits | None = None

    def __len__(self) -> int:
        return len(self.file)

    def of(self, rows: slice) -> "Parts":
        """Select the parts of some samples, with the same destination."""
        packed = self.packed and self.packed._replace(palette=self.packed.palette[rows])
        crc = None if self.crc is None else self.crc[rows]
        to = [to[rows] for to in self.to]
        return Parts(self.file[rows], self.offset[rows], to, crc, packed, self.limits)

    @functools.cached_property
    def fields(self) -> _Parts:
        """The same for the library, valid while this object lives.

        Computed once, as it takes 10 microseconds: the attributes above must not change afterwards.
        """
        N, P = len(self), len(self.to)
        assert all(to.flags.c_contiguous and len(to) == N for to in self.to)
        assert self.file.shape == self.offset.shape == (N, 2 if self.packed else P)
        # In one array: making one takes a microsecond.
        numbers = [*(to.nbytes // N for to in self.to), *map(locate, self.to)] if N else [0]
        part_bytes = self._address(numbers, np.int64)
        files = self._address(self.file, np.int32), self._address(self.offset, np.int64)
        crc, packed, limits = self._address(self.crc, np.uint32), None, None
        if self.packed is not None or self.limits is not None:
            cells, top_k = self.to[2][0].size, self.to[0].shape[-1]
            assert [part.dtype for part in self.to] == ["<f2", "<u2", "<f2", "<f4"]
            assert [part[0].size for part in self.to] == [cells * top_k, cells * top_k, cells, 4]
        if self.packed is not None:
            palette, levels = self.packed
            assert palette.shape == (N,)
            assert palette.min(initial=1) > 0
            assert palette.max(initial=1) <= 65536
            assert levels is None or levels.shape == (256,)
            addresses = self._address(palette, np.int32), self._address(levels, np.float32)
            described = _Packed(cells, top_k, *addresses)
            # `addressof` keeps nothing alive.
            self._keep.append(described)
            packed = addressof(described)
        if self.limits is not None:
            # `Limits` in native.h; a class has 16 bits.
            classes, palette = self.limits
            limits = self._address([cells, top_k, min(classes, 65536), palette], np.int32)
        return _Parts(P, *files, part_bytes, part_bytes + 8 * P, crc, packed, limits)

    @functools.cached_property
    def _keep(self) -> list:
        """What `fields` holds addresses of."""
        return []

    def _address(self, numbers: np.ndarray | list[int] | None, dtype: type) -> int | None:
        """Return the address of a C-contiguous array of `numbers` and keep the array alive."""
        if numbers is None:
            return None
        array = np.ascontiguousarray(numbers, dtype)
        self._keep.append(array)
        return locate(array)


class PartRows(NamedTuple):
    """The rows of `parts` that belong to the samples of a job."""

    parts: Parts
    first: int = 0  # that of the first sample; the others follow
    check: bool = True  # whether values are compared with the limits of `parts`


def locate(array: np.ndarray) -> int:
    """Return the address of an array, C-contiguous, in a fifth of the time of `ctypes.data`."""
    # An exported buffer must be writable and have bytes.
    if array.flags.writeable and array.size:
        return addressof(c_char.from_buffer(array))
    return array.ctypes.data


class Job:
    """A batch of crops to decode, or to cut out for another decoder.

    It keeps alive all memory that the library reads and writes.

    Args:
        samples: `SAMPLE` `[N]`; the library sets `status`, `message` and `took`.
        pixels: uint8 `[N, height, width, 3]`, C-contiguous; rows of samples whose status is not OK
            are undefined. Or `CUT` `[N]`, to cut out JPEGs and decode nothing; the library sets all
            fields, and `bytes` only where it points to the sample's own bytes.
        rows: the score maps to read with the images.
        keep: other objects that must outlive the decoding (the bytes that samples point to).
    """

    def __init__(
        self,
        samples: np.ndarray,
        pixels: np.ndarray,
        rows: PartRows | None = None,
        keep: object = None,
    ) -> None:
        assert samples.dtype == SAMPLE
        assert samples.flags.c_contiguous
        assert pixels.flags.c_contiguous
        self.samples, self.pixels, self._keep = samples, pixels, (keep, rows)
        self.batch = _Batch(locate(samples), len(samples))
        if pixels.dtype == CUT:
            assert pixels.shape == samples.shape
            self.batch.cuts = pixels.ctypes.data
        else:
            assert pixels.dtype == np.uint8
            count, height, width, channels = pixels.shape
            assert (count, channels) == (len(samples), 3)
            # The library divides by both.
            assert min(height, width) > 0
            self.batch.height, self.batch.width = height, width
            self.batch.pixels = locate(pixels)
        if rows:
            assert 0 <= rows.first <= len(rows.parts) - len(samples)
            self.batch.first_row, self.batch.parts = rows.first, rows.parts.fields
            if not rows.check:
                self.batch.parts.limits = None

    @property
    def failed(self) -> int:
        """Number of samples whose status is not OK, once the job is finished."""
        return self.batch.failed

    def decode(self) -> None:
        """Decode on the calling thread."""
        library().densefeed_decode(byref(self.batch))


def read_maps(parts: Parts) -> np.ndarray:
    """Read and check only the parts, on the calling thread.

    Return each sample's status, int32 `[N]`.
    """
    samples = np.zeros(len(parts), SAMPLE)
    # The pixels are never written.
    job = Job(samples, np.empty((len(samples), 1, 1, 3), np.uint8), PartRows(parts))
    library().densefeed_maps(byref(job.batch))
    return samples["status"]


class Pool:
    """Threads that decode jobs in submission order. They never take Python's global lock.

    UserError for more threads than MOST_THREADS or than the system provides. RuntimeError on use
    after `close` or in a forked child, which does not have the threads.
    """

    def __init__(self, threads: int) -> None:
        if threads > MOST_THREADS:
            raise UserError(
                f"{threads:,} decoding threads are more than the useful maximum of"
                f" {MOST_THREADS:,}; give fewer --threads"
            )
        self._handle, self._pid, self._waiting = library().densefeed_open(threads), os.getpid(), []
        if not self._handle:
            raise UserError(
                f"cannot start {threads:,} threads: the system limit is reached;"
                " give fewer --threads"
            )
        # Held during calls of the library, so that `close` on another thread frees nothing in use.
        # It is reentrant because the garbage collector may close a generator, and so call this
        # class, on a thread that already holds it.
        self._lock = threading.RLock()
        state = self._handle, self._pid, self._waiting, self._lock
        self._close = weakref.finalize(self, _close, *state)

    def submit(self, job: Job) -> None:
        """Submit a job, which must then be waited for or cancelled."""
        self.check()
        with self._lock:
            self.check()
            # In the list first: the library must not hold a batch whose memory may be freed.
            self._waiting.append(job)
            library().densefeed_submit(self._handle, byref(job.batch))

    def wait(self, job: Job) -> None:
        """Wait until a job is finished."""
        while not self._poll(job):
            pass

    def ended(self, job: Job) -> bool:
        """Return whether a job is finished, without waiting.

        Threads that poll use this: a waiting thread blocks `submit` in other threads.
        """
        return self._poll(job, seconds=0)

    def cancel(self, job: Job) -> None:
        """Start no more samples of a job, and wait for those that are being decoded."""
        # RuntimeError: the pool is closed or of another process, so nothing is being decoded here.
        with contextlib.suppress(RuntimeError):
            while not self._poll(job, cancel=True):
                pass

    def _poll(self, job: Job, cancel: bool = False, seconds: float = WAIT) -> bool:
        """Wait up to `seconds`, and return whether the job is finished."""
        self.check()
        with self._lock:
            self.check()
            if job not in self._waiting:
                return True
            batch = byref(job.batch)
            if ended := library().densefeed_wait(self._handle, batch, seconds, cancel):
                self._waiting.remove(job)
            return bool(ended)

    def check(self) -> None:
        """Raise RuntimeError if the pool is closed or belongs to another process.

        Also before the lock is taken: in a forked child the thread that held it may not exist.
        """
        if not self._close.alive:
            raise RuntimeError("this loader is closed")
        if os.getpid() != self._pid:
            raise RuntimeError(
                "a loader cannot be used in a forked process; open it there, or start processes"
                " with the spawn method"
            )

    def close(self) -> None:
        """Stop the threads. Samples that were not started are dropped."""
        self._close()


def _close(handle: int, pid: int, waiting: list[Job], lock: threading.RLock) -> None:
    # In another process there are no threads to stop, and maybe no thread that releases the lock.
    if os.getpid() == pid:
        with lock:
            library().densefeed_close(handle)
    # The jobs' memory may be freed only after the threads stopped.
    waiting.clear()


def check(encoded: bytes, height: int, width: int, kind: int = JPEG) -> None:
    """Validate a JPEG by decoding it completely and verifying all checksums of its index.

    Of raw pixels and planes (`kind`) only the size is checked. JpegError if the image is damaged,
    has another size, or is not supported by this decoder.
    """
    # The smallest useful output: only the decoding matters, and it reads the whole image.
    decode(encoded, height, width, kind, (8, 8))


def decode(
    encoded: bytes, height: int, width: int, kind: int, size: tuple[int, int] | None = None
) -> np.ndarray:
    """Decode a whole stored image of `kind`: uint8 `[height, width, 3]`, or resized to `size`.

    JpegError as `check`.
    """
    content, sample = np.frombuffer(encoded, np.uint8), np.zeros(1, SAMPLE)
    sample["bytes"], sample["length"] = content.ctypes.data, len(content)
    sample["height"], sample["width"], sample["kind"] = height, width, kind
    sample["box_tlhw"] = 0, 0, height, width
    pixels = np.empty((1, *(size or (height, width)), 3), np.uint8)
    Job(sample, pixels, keep=content).decode()
    if sample["status"][0] != OK:
        raise _explain(int(sample["status"][0]), sample["message"][0])
    return pixels[0]

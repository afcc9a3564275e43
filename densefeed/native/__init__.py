"""The native decoder, through its plain C interface: batches of crops, lossless transcoding, sizes
of JPEGs.

The library is built by `pip install` (setup.py) and lies beside this file. Nothing here knows
datasets or plans.
"""

import contextlib
import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from densefeed.system.errors import UserError

LIBRARY = Path(__file__).with_name("libdensefeed.so")
OK, DAMAGED, UNSUPPORTED, UNREADABLE, NO_MEMORY = range(5)  # status of a sample
JPEG, RAW = range(2)  # kinds of encoded image; raw is rows of RGB
BILINEAR, BICUBIC = range(2)  # filters, antialiased as Pillow's
STAGES = ("labels", "read", "decode", "resample")
MESSAGE = 120
WAIT = 0.1  # seconds between looks at Python's signals while a batch is waited for
# four times the cores of the largest machines; a system that runs out of threads runs out for
# everybody
MOST_THREADS = 4096

# One sample of a batch, `Sample` in native.h.
SAMPLE = np.dtype(
    [
        ("bytes", "u8"),  # address of the encoded image, or 0: read it from `file`
        ("offset", "i8"),
        ("length", "i8"),
        ("file", "i4"),  # descriptor
        ("kind", "i4"),
        ("height", "i4"),  # of the stored image; a JPEG of another size is damaged
        ("width", "i4"),
        ("box_tlhw", "f8", 4),  # pixels
        ("flip", "i4"),
        ("status", "i4"),
        ("took", "f4", 4),  # microseconds, in the order of STAGES
        ("message", f"S{MESSAGE}"),
    ],
    align=True,
)

# A JPEG that shows a sample's crop, for another decoder; `Cut` in native.h.
CUT = np.dtype(
    [
        # in: address of as much room as the sample is long; out: of the JPEG, perhaps the sample's
        # own
        ("bytes", "u8"),
        ("length", "i8"),  # of the JPEG; 0: none, the image is raw or its sample's status is not OK
        ("top", "i4"),  # what it shows of the stored image, pixels
        ("left", "i4"),
        ("height", "i4"),
        ("width", "i4"),
        # length << 32 | CRC-32 of an image without index. In: what was found sound before; out: its
        # own
        ("sound", "u8"),
    ],
    align=True,
)


class _Packed(ctypes.Structure):
    """`Packed` in native.h."""

    _fields_ = (
        ("cells", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("palette", ctypes.c_void_p),
        ("levels", ctypes.c_void_p),
    )


class _Batch(ctypes.Structure):
    """`Batch` in native.h."""

    _fields_ = (
        ("samples", ctypes.c_void_p),
        ("count", ctypes.c_int),
        ("size", ctypes.c_int),
        ("pixels", ctypes.c_void_p),
        ("cuts", ctypes.c_void_p),
        ("parts", ctypes.c_int),
        ("part_file", ctypes.c_void_p),
        ("part_offset", ctypes.c_void_p),
        ("part_bytes", ctypes.c_void_p),
        ("part_to", ctypes.c_void_p),
        ("part_crc", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
        ("filter", ctypes.c_int),
        ("next", ctypes.c_int),
        ("done", ctypes.c_int),
        ("cancelled", ctypes.c_int),
        ("after", ctypes.c_void_p),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library; UserError if it was not built."""
    try:
        lib = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise UserError(
            f"the native decoder cannot be loaded ({error}); build it with `pip install -e .`"
        ) from error
    lib.densefeed_open.restype = ctypes.c_void_p
    arguments = {
        "open": [ctypes.c_int],
        "close": [ctypes.c_void_p],
        "submit": [ctypes.c_void_p, ctypes.c_void_p],
        "wait": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_double, ctypes.c_int],
        "decode": [ctypes.c_void_p],
        "maps": [ctypes.c_void_p],
        "free": [ctypes.c_void_p],
        "transcode": [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
        + 2 * [ctypes.c_void_p]
        + [ctypes.c_char_p],
        "probe": [ctypes.c_char_p, ctypes.c_size_t] + 2 * [ctypes.c_void_p] + [ctypes.c_char_p],
        "sizes": [ctypes.c_int],
    }
    for name, types in arguments.items():
        getattr(lib, f"densefeed_{name}").argtypes = types
    assert lib.densefeed_sizes(0) == SAMPLE.itemsize, "Sample differs between native.h and here"
    assert lib.densefeed_sizes(1) == ctypes.sizeof(_Batch), (
        "Batch differs between native.h and here"
    )
    assert lib.densefeed_sizes(2) == CUT.itemsize, "Cut differs between native.h and here"
    return lib


class JpegError(Exception):
    """A JPEG that cannot be read; `status` says whether it is damaged or only of a kind that is
    left to Pillow.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def probe(encoded: bytes) -> tuple[int, int]:
    """Height and width of a JPEG that this decoder reads; JpegError for anything else."""
    height, width, message = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(MESSAGE)
    status = library().densefeed_probe(
        encoded, len(encoded), ctypes.byref(height), ctypes.byref(width), message
    )
    if status != OK:
        raise JpegError(status, message.value.decode(errors="replace"))
    return height.value, width.value


def transcode(encoded: bytes, interval: int) -> bytes:
    """The same DCT coefficients as one baseline scan, Huffman tables optimized, a restart marker
    every `interval` MCUs.

    Of its APP segments JFIF's and Adobe's stay. JpegError if the file is damaged or its colors are
    neither gray nor RGB.
    """
    out, length, message = (
        ctypes.c_void_p(),
        ctypes.c_size_t(),
        ctypes.create_string_buffer(MESSAGE),
    )
    status = library().densefeed_transcode(
        encoded, len(encoded), interval, ctypes.byref(out), ctypes.byref(length), message
    )
    if status != OK:
        raise JpegError(status, message.value.decode(errors="replace"))
    try:
        return ctypes.string_at(out, length.value)
    finally:
        library().densefeed_free(out)


class Packed(NamedTuple):
    """How the score maps of N samples are packed (densefeed/storage/FORMAT.md), lossless or
    compact.
    """

    palette: np.ndarray  # int32 [N], classes in each row's palette, which says how long the row is
    levels: np.ndarray | None  # float32 [256], of a compact store


def memory_at(address: int, length: int) -> np.ndarray:
    """Memory that a library wrote, uint8 `[length]`; whoever owns it must outlive this view of
    it.
    """
    return np.frombuffer(_view(address, length, 0x100), np.uint8)  # PyBUF_READ


_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]


class Parts(NamedTuple):
    """Runs of bytes to copy beside each image, P a sample: its score map.

    If they are `packed`, P is 2, a packed row and its Window, and `to` are four arrays: logits `[N,
    S, S, k]`, classes, logsumexps `[N, S, S]` and Windows `[N, 4]`.
    """

    file: np.ndarray  # int32 [N, P], descriptors
    offset: np.ndarray  # int64 [N, P]
    to: Sequence[np.ndarray]  # P arrays, C-contiguous, [N, ...]; a run is as long as a row
    # uint32 [N], zlib's CRC-32 over a sample's runs in their order; None: not checked
    crc: np.ndarray | None
    packed: Packed | None = None

    def of(self, row: int) -> "Parts":
        """Those of one sample, to the same place."""
        here = slice(row, row + 1)
        packed = self.packed and self.packed._replace(palette=self.packed.palette[here])
        crc = None if self.crc is None else self.crc[here]
        return Parts(self.file[here], self.offset[here], [to[here] for to in self.to], crc, packed)


class Job:
    """A batch of crops to decode, or to cut out for another decoder. It keeps alive all memory that
    the library reads and writes.

    Args:
        samples: `SAMPLE` `[N]`; `status` and `message` are filled in.
        pixels: uint8 `[N, size, size, 3]`, C-contiguous; rows of samples whose status is not OK
            hold anything. Or, to cut out and decode nothing, `CUT` `[N]`; all but `bytes` is filled
            in.
        parts: what to copy beside the images.
        keep: what else must outlive the decoding (the bytes that samples point to).
        filter: BILINEAR or BICUBIC, by which crops are resized.
    """

    def __init__(
        self,
        samples: np.ndarray,
        pixels: np.ndarray,
        parts: Parts | None = None,
        keep: object = None,
        filter: int = BILINEAR,
    ) -> None:
        assert samples.dtype == SAMPLE
        assert samples.flags.c_contiguous
        assert pixels.flags.c_contiguous
        self.samples, self.pixels, self._keep = samples, pixels, [keep]
        if pixels.dtype == CUT:
            assert pixels.shape == samples.shape
            self.batch = _Batch(samples.ctypes.data, len(samples), cuts=pixels.ctypes.data)
        else:
            assert pixels.dtype == np.uint8
            assert pixels.shape == (len(samples), pixels.shape[1], pixels.shape[1], 3)
            assert pixels.shape[1] > 0  # the library divides by it
            self.batch = _Batch(
                samples.ctypes.data,
                len(samples),
                pixels.shape[1],
                pixels.ctypes.data,
                filter=filter,
            )
        if parts is not None:
            assert all(to.flags.c_contiguous and len(to) == len(samples) for to in parts.to)
            file, offset = (
                np.ascontiguousarray(parts.file, np.int32),
                np.ascontiguousarray(parts.offset, np.int64),
            )
            assert (
                file.shape == offset.shape == (len(samples), 2 if parts.packed else len(parts.to))
            )
            lengths = np.array([to[0].nbytes for to in parts.to], np.int64)
            addresses = np.array([to.ctypes.data for to in parts.to], np.uint64)
            crc = None if parts.crc is None else np.ascontiguousarray(parts.crc, np.uint32)
            self._keep += [file, offset, lengths, addresses, crc, parts.to]
            self.batch.parts, self.batch.part_file, self.batch.part_offset = (
                len(parts.to),
                file.ctypes.data,
                offset.ctypes.data,
            )
            self.batch.part_bytes, self.batch.part_to = lengths.ctypes.data, addresses.ctypes.data
            self.batch.part_crc = None if crc is None else crc.ctypes.data
            if parts.packed is not None:
                self._unpack(parts)

    def _unpack(self, parts: Parts) -> None:
        cells, top_k = parts.to[2][0].size, parts.to[0].shape[-1]
        assert [part.dtype for part in parts.to] == ["<f2", "<u2", "<f2", "<f4"]
        assert [part[0].size for part in parts.to] == [cells * top_k, cells * top_k, cells, 4]
        palette = np.ascontiguousarray(parts.packed.palette, np.int32)
        assert palette.shape == (len(self.samples),)
        assert palette.min(initial=1) > 0
        assert palette.max(initial=1) <= 65536
        levels = None
        if parts.packed.levels is not None:
            levels = np.ascontiguousarray(parts.packed.levels, np.float32)
            assert levels.shape == (256,)
        packed = _Packed(
            cells, top_k, palette.ctypes.data, None if levels is None else levels.ctypes.data
        )
        self._keep += [palette, levels, packed]
        self.batch.packed = ctypes.addressof(packed)

    def decode(self) -> None:
        """Decode on the calling thread."""
        library().densefeed_decode(ctypes.byref(self.batch))


def read_maps(parts: Parts) -> np.ndarray:
    """Read parts alone, on the calling thread; the status of each sample, int32 `[N]`."""
    samples = np.zeros(len(parts.file), SAMPLE)
    job = Job(samples, np.empty((len(samples), 1, 1, 3), np.uint8), parts)
    library().densefeed_maps(ctypes.byref(job.batch))
    return samples["status"]


class Pool:
    """Threads that decode jobs in the order they were submitted; none of them ever needs Python's
    lock.

    UserError for more threads than MOST_THREADS or than the system gives. Not usable in a forked
    child, which has no threads: RuntimeError there, and after `close`.
    """

    def __init__(self, threads: int) -> None:
        if threads > MOST_THREADS:
            raise UserError(
                f"{threads:,} decoding threads are more than the {MOST_THREADS:,} that can be of use; give fewer --threads"
            )
        self._handle, self._pid, self._waiting = library().densefeed_open(threads), os.getpid(), []
        if not self._handle:
            raise UserError(
                f"{threads:,} threads cannot be started, the system gives no more; give fewer --threads"
            )
        # Held by whoever is inside the library, so that another thread's `close` frees nothing
        # under it. The garbage collector may close a generator, and so come here, on a thread that
        # holds it already.
        self._lock = threading.RLock()
        self._close = weakref.finalize(
            self, _close, self._handle, self._pid, self._waiting, self._lock
        )

    def submit(self, job: Job) -> None:
        """Begin a job; it must be waited for, or cancelled."""
        with self._entered():
            self._waiting.append(job)
            library().densefeed_submit(self._handle, ctypes.byref(job.batch))

    def wait(self, job: Job) -> None:
        """Wait until a job is finished."""
        while not self._ended(job, cancel=False):
            pass

    def ended(self, job: Job) -> bool:
        """Whether a job is finished. For threads that look now and then: who waits, keeps others
        from submitting meanwhile.
        """
        return self._ended(job, cancel=False, seconds=0)

    def cancel(self, job: Job) -> None:
        """Begin no more of a job's samples, and wait for those that are being decoded."""
        # closed, or of another process: nothing of it is being decoded here
        with contextlib.suppress(RuntimeError):
            while not self._ended(job, cancel=True):
                pass

    def _ended(self, job: Job, cancel: bool, seconds: float = WAIT) -> bool:
        """Wait a little; whether the job is finished."""
        with self._entered():
            if job not in self._waiting:
                return True
            if ended := library().densefeed_wait(
                self._handle, ctypes.byref(job.batch), seconds, cancel
            ):
                self._waiting.remove(job)
            return bool(ended)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        self.check()  # before the lock: in a forked child nobody may be left who would free it
        with self._lock:
            self.check()
            yield

    def check(self) -> None:
        """RuntimeError if the pool is closed or of another process."""
        if not self._close.alive:
            raise RuntimeError("this loader is closed")
        if os.getpid() != self._pid:
            raise RuntimeError(
                "a loader cannot be used in a forked process; open it there, or start processes by spawn"
            )

    def close(self) -> None:
        """Stop the threads; samples not begun are dropped."""
        self._close()


def _close(handle: int, pid: int, waiting: list[Job], lock: threading.RLock) -> None:
    # else its threads, and perhaps the holder of the lock, live in another process
    if os.getpid() == pid:
        with lock:
            library().densefeed_close(handle)
    waiting.clear()  # until here no job's memory was freed


def check(encoded: bytes, height: int, width: int) -> None:
    """Decode a whole JPEG, all checksums of its index included; JpegError if it is damaged, of
    another size, or left to Pillow.
    """
    content, sample = np.frombuffer(encoded, np.uint8), np.zeros(1, SAMPLE)
    sample["bytes"], sample["length"], sample["height"], sample["width"] = (
        content.ctypes.data,
        len(content),
        height,
        width,
    )
    sample["box_tlhw"] = 0, 0, height, width
    Job(sample, np.empty((1, 8, 8, 3), np.uint8), keep=content).decode()
    if sample["status"][0] != OK:
        raise JpegError(int(sample["status"][0]), sample["message"][0].decode(errors="replace"))

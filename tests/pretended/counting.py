"""Counts of the pretended CUDA runtime, in a process that runs on it."""

import ctypes
import os
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Calls for which the host waits. A copy to pageable memory is waited for by the real runtime.
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "copy to pageable memory",
    "large copy from pageable memory",
)
# Smaller copies from pageable memory are staged at once, and nothing waits for them.
STAGED_BYTES = 64 << 10
# Calls that the first steps make; each of them makes the real device or the host wait.
PREPARATIONS = (
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
    "cudaFreeHost",
    "cudaHostRegister",
    "cudaStreamBeginCapture",
    "cudaGraphInstantiate",
    "load of a module",
)
COPIES = ("from pinned memory", "from pageable memory", "to pinned memory", "to pageable memory")
# Frames of Python that are named where a call is made.
FRAMES = 5

LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_long)


@dataclass
class Seen:
    """What happened while it was watched.

    Attributes:
        counts: calls of the runtime, launches in all and by device, copies by kind.
        kernels: launches by kernel.
        events: calls that a steady step must not make and copies between host and device, by name
            and by the Python stack that made them, the innermost frame first.
    """

    counts: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    events: Counter[tuple[str, str]] = field(default_factory=Counter)

    def named(self, names: tuple[str, ...]) -> dict[str, int]:
        """Return the events of some names, as `NAME at STACK`, with their numbers."""
        found = self.events.items()
        return {f"{name} at {stack}": n for (name, stack), n in sorted(found) if name in names}


def load_runtime() -> ctypes.CDLL:
    """Return the runtime that was preloaded. RuntimeError without one."""
    path = os.environ.get("PRETENDED_RUNTIME", "")
    if not path or path not in os.environ.get("LD_PRELOAD", ""):
        raise RuntimeError("the pretended CUDA runtime is not preloaded; see build.py")
    library = ctypes.CDLL(path)
    library.pretended_read.restype = ctypes.c_void_p
    library.pretended_listen.argtypes = [LISTENER]
    return library


RUNTIME = load_runtime()
FREE = ctypes.CDLL(None).free
FREE.argtypes = [ctypes.c_void_p]


def read(kernels: bool = False) -> Counter[str]:
    """Return the numbers since the last reset: of kernels, or of everything else."""
    pointer = RUNTIME.pretended_read(int(kernels))
    try:
        lines = ctypes.string_at(pointer).decode().splitlines()
    finally:
        FREE(pointer)
    found = Counter()
    for name, number in (line.rsplit("\t", 1) for line in lines):
        found[name] += int(number)
    return found


@contextmanager
def watch(seen: Seen | None = None) -> Iterator[Seen]:
    """Count from here to the end of the block. Do not nest it."""
    seen = seen or Seen()

    @LISTENER
    def listen(name: bytes, amount: int) -> None:
        large = name == b"copy from pageable memory" and amount > STAGED_BYTES
        seen.events["large " * large + name.decode(), find_caller()] += 1

    RUNTIME.pretended_reset()
    RUNTIME.pretended_listen(listen)
    try:
        yield seen
    finally:
        RUNTIME.pretended_listen(LISTENER())
        seen.counts, seen.kernels = read(), read(kernels=True)


def find_caller() -> str:
    """Describe the Python stack outside this module: `file:line < caller's file:line < ...`."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    # The autograd engine's threads run no Python, except for custom functions.
    if not frames:
        return "the backward pass"
    ours = [frame for frame in frames if frame.filename.startswith(f"{ROOT}/")][-FRAMES:]
    # The innermost frame of a library says which of its functions the line of ours called.
    last = [] if frames[-1] in ours else frames[-1:]
    return " < ".join(f"{shorten(f.filename)}:{f.lineno}" for f in [*last, *reversed(ours)])


def shorten(path: str) -> str:
    """Return a path below the checkout, or below site-packages."""
    return path.removeprefix(f"{ROOT}/").rpartition("site-packages/")[2]

"""JPEGs of every coding, written by libjpeg, and real photographs."""

import ctypes
import io
import os
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from densefeed.pipelines.dali import DaliLoader
from densefeed.pipelines.loader import ThreadedLoader

NATIVE = Path(__file__).parents[1] / "densefeed" / "native"
HERE = Path(__file__).parent / "native"
FLAGS = ("-std=gnu11", "-fwrapv", "-Wall", "-Wextra", "-Wno-psabi", f"-I{NATIVE}")
LIBRARIES = ("-ljpeg", "-lm", "-lpthread")
SOURCES = (
    *("batch", "checksum", "maps", "planes", "resample", "sample", "scratch", "segments"),
    "turbo",
)


def compile_c(out: Path, sources: list[Path], *flags: str) -> Path:
    """Compile C sources to a program or library at `out`, like setup.py except for `flags`."""
    # A caller's folder of headers is searched first.
    words = [os.environ.get("CC", "gcc"), *flags, *FLAGS, *map(str, sources), "-o", str(out)]
    done = subprocess.run([*words, *LIBRARIES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def header_jpeg(marker: int, side: int, precision: int = 8, components: int = 3) -> bytes:
    """Make a JPEG whose scan is nearly empty, in about 110 bytes.

    `marker` is that of its frame: C0 baseline, C1 extended, C2 progressive, C3 and CB lossless, C9
    and CA arithmetic, progressive too.
    """

    def segment(marker: int, body: bytes) -> bytes:
        return bytes([0xFF, marker]) + struct.pack(">H", 2 + len(body)) + body

    last = 0 if marker in (0xC2, 0xCA) else 63
    frame = struct.pack(">BHHB", precision, side, side, components)
    frame += b"".join(bytes([n, 0x11, 0]) for n in range(1, components + 1))
    tables = b"".join(bytes([n, 0]) for n in range(1, components + 1))
    file = b"\xff\xd8" + segment(0xDB, b"\0" + 64 * b"\1") + segment(marker, frame)
    return (
        file
        + segment(0xDA, bytes([components]) + tables + bytes([0, last, 0]))
        + bytes(8)
        + b"\xff\xd9"
    )


class Jpegs:
    """Python interface of jpegs.c."""

    def __init__(self, folder: Path) -> None:
        path = compile_c(folder / "jpegs.so", [HERE / "jpegs.c"], "-O1", "-shared", "-fPIC")
        self._lib = ctypes.CDLL(str(path))
        self._lib.write_jpeg.argtypes = [ctypes.c_char_p] + 10 * [ctypes.c_int] + [ctypes.c_void_p]
        self._lib.read_jpeg.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p]
        self._lib.write_jpeg.restype = self._lib.read_jpeg.restype = ctypes.c_size_t
        self._lib.free_jpeg.argtypes = [ctypes.c_void_p]
        self._lib.count_warnings.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self._lib.count_warnings.restype = ctypes.c_long

    def write(
        self,
        pixels: np.ndarray,
        sampling=(1, 1),
        rgb=0,
        progressive=0,
        arithmetic=0,
        restart=0,
        quality=90,
    ) -> bytes:
        """Encode `pixels`, uint8 `[H,W]` or `[H,W,C]` with C of 3 or 4, as a JPEG.

        `sampling` is that of luma; chroma is sampled 1 x 1.
        """
        planes = pixels.reshape(*pixels.shape[:2], -1)
        out = ctypes.c_void_p()
        coding = (*sampling, rgb, progressive, arithmetic, restart, quality)
        length = self._lib.write_jpeg(
            np.ascontiguousarray(planes).tobytes(), *planes.shape, *coding, ctypes.byref(out)
        )
        try:
            return ctypes.string_at(out, length)
        finally:
            self._lib.free_jpeg(out)

    def warnings(self, jpeg: bytes) -> int:
        """Decode with libjpeg and count its warnings; -1 if it gives up."""
        return self._lib.count_warnings(jpeg, len(jpeg))

    def contents(self, jpeg: bytes) -> np.ndarray:
        """Read sampling factors, sizes, quantization tables and all coefficients with libjpeg."""
        numbers = np.empty(self._lib.read_jpeg(jpeg, len(jpeg), None), np.int16)
        self._lib.read_jpeg(jpeg, len(jpeg), numbers.ctypes.data)
        return numbers


@pytest.fixture(scope="session")
def jpegs(tmp_path_factory) -> Jpegs:
    return Jpegs(tmp_path_factory.mktemp("jpegs"))


@pytest.fixture(scope="session")
def noise():
    """Factory of smooth colored noise, uint8 `[height, width, channels]`.

    Its spectrum is similar to that of a photograph.
    """

    def make(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
        rng = np.random.default_rng((seed, height, width))
        layers = []
        for _ in range(channels):
            coarse = Image.fromarray(
                rng.integers(0, 256, (height // 8 + 2, width // 8 + 2), dtype=np.uint8)
            )
            fine = rng.normal(0, 4, (height, width))
            layers.append(
                np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)) + fine
            )
        return np.stack(layers, -1).clip(0, 255).astype(np.uint8)

    return make


@pytest.fixture(scope="session")
def photographs() -> list[Image.Image]:
    """RGB photographs from scikit-image and scikit-learn, with a longer side of 500 px."""
    data = pytest.importorskip("skimage.data")
    sklearn = pytest.importorskip("sklearn.datasets")
    images = [
        data.astronaut(),
        data.coffee(),
        data.chelsea(),
        data.rocket(),
        *sklearn.load_sample_images().images,
    ]
    pictures = [Image.fromarray(image) for image in images]
    return [
        p.resize([round(side * 500 / max(p.size)) for side in p.size], Image.Resampling.LANCZOS)
        for p in pictures
    ]


def loader_class(decoder: str):
    """Return the loader class of a decoder, `native` or `dali`. Skips if DALI is not installed."""
    if decoder == "native":
        return ThreadedLoader
    pytest.importorskip("nvidia.dali", reason="DALI is not installed here")
    return DaliLoader


def encoded(image: Image.Image, **options) -> bytes:
    """Encode an image as JPEG with Pillow, by default at quality 90."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **{"quality": 90, **options})
    return buffer.getvalue()

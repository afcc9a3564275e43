"""The native decoder on mutated files: AddressSanitizer, UBSan, ThreadSanitizer, guard pages.

`make soak` runs it for minutes.
"""

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from densefeed.storage import indexed_jpeg

from ..jpeg_files import HERE, NATIVE, SOURCES, compile_c
from .test_native import progressive_bomb

MINUTES = float(os.environ.get("SOAK_MINUTES", 0))
SAMPLINGS = {
    "444": (1, 1),
    "422": (2, 1),
    "440": (1, 2),
    "420": (2, 2),
    "411": (4, 1),
    "410": (4, 2),
    "441": (1, 4),
}
# fuzz.c includes the other four.
LIBRARY = [f"{name}.c" for name in SOURCES if name not in ("batch", "planes", "scratch", "turbo")]


@pytest.fixture(scope="module")
def seeds(jpegs, noise, tmp_path_factory):
    """Small files of each kind, also with an index where possible, and the corpus of old bugs."""
    folder, made = tmp_path_factory.mktemp("seeds"), {}
    for name, sampling in SAMPLINGS.items():
        made[name] = jpegs.write(noise(37, 51), sampling)
    made["one"] = jpegs.write(noise(1, 1), (2, 2))
    made["long"] = jpegs.write(noise(9, 300), (2, 2), quality=60)
    made["tall"] = jpegs.write(noise(300, 9), (2, 2), quality=60)
    made["gray"] = jpegs.write(noise(40, 33, 1))
    made["gray-2x2"] = jpegs.write(noise(40, 33, 1), (2, 2))
    made["rgb"] = jpegs.write(noise(30, 30), rgb=1)
    made["cmyk"] = jpegs.write(noise(20, 20, 4))
    made["restarts"] = jpegs.write(noise(40, 64), (2, 2), restart=3)
    made["progressive"] = jpegs.write(noise(40, 48), (2, 2), progressive=1)
    made["progressive-gray"] = jpegs.write(noise(24, 40, 1), progressive=1)
    made["arithmetic"] = jpegs.write(noise(40, 48), (2, 2), arithmetic=1)
    made["arithmetic-progressive"] = jpegs.write(noise(24, 24), (2, 1), progressive=1, arithmetic=1)
    # More scans than any encoder writes.
    made["scans"] = progressive_bomb(16, 250)
    made["sharp"] = jpegs.write(
        np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8), quality=100
    )
    made["exif"] = (
        made["420"][:2]
        + b"\xff\xe1\x00\x22Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
        + made["420"][2:]
    )
    for name in (*SAMPLINGS, "one", "long", "tall", "gray", "rgb", "progressive", "sharp"):
        made[f"{name}-indexed"] = indexed_jpeg.transcode(made[name])
    for name, content in made.items():
        (folder / f"{name}.jpg").write_bytes(content)
    return [*sorted(folder.glob("*.jpg")), *sorted((HERE / "corpus").glob("*"))]


class Build(NamedTuple):
    """A build of fuzz.c."""

    flags: tuple[str, ...]
    seconds: float  # of processor time in `make test-slow`
    share: float  # of the minutes of `make soak`
    threaded: int = 1


SANITIZE = ("-O1", "-g", "-march=native", "-fno-sanitize-recover=all")
PORTABLE = ["-march=x86-64-v2"] if platform.machine() == "x86_64" else []
BUILDS = {
    "address": Build((*SANITIZE, "-fsanitize=address,undefined"), 4, 0.4),
    # The portable code: the inverse DCT and the CRC of other processors.
    "plain": Build((*SANITIZE, "-fsanitize=address,undefined", "-DDENSEFEED_PLAIN"), 2, 0.15),
    "thread": Build((*SANITIZE, "-fsanitize=thread"), 2, 0.1),
    # As installed, with the versions of functions for this processor (AVX-512, AVX2).
    "guarded": Build(("-O3", "-g", *PORTABLE, "-ffp-contract=off", "-DGUARDED"), 4, 0.35, 0),
}


def fuzz(folder, seeds, build: Build, seconds: float, seed: int, native=NATIVE):
    """Build fuzz.c with the library's sources in `native`, and run it in `folder`."""
    fuzzer = folder / "fuzz"
    try:
        compile_c(
            fuzzer,
            [HERE / "fuzz.c", *(native / name for name in LIBRARY)],
            f"-I{native}",
            *build.flags,
        )
    except AssertionError as error:
        if "cannot find" in str(error):
            pytest.skip(f"this compiler has no runtime for {build.flags}")
        raise
    options = {"ASAN_OPTIONS": "allocator_may_return_null=1", "TSAN_OPTIONS": "halt_on_error=1"}
    numbers = (seconds, 2**40, seed, build.threaded)
    return subprocess.run(
        [fuzzer, *map(str, numbers), *seeds],
        cwd=folder,
        env=os.environ | options,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDS)
def test_mutated_files_cause_no_errors(seeds, tmp_path, name):
    """Run a few seconds of fixed mutations; `make soak` runs minutes of random ones.

    A finding fails the test and is saved in `tmp_path`.
    """
    build, seed = BUILDS[name], int.from_bytes(os.urandom(4)) if MINUTES else 1
    seconds = 60 * MINUTES * build.share or build.seconds
    done = fuzz(tmp_path, seeds, build, seconds, seed)
    print(f"{name}, seed {seed}: {done.stdout}")
    assert done.returncode == 0, (
        f"{done.stdout}{done.stderr[:6000]}\nthe input is {tmp_path / 'crasher'}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["address", "guarded"])
@pytest.mark.parametrize(
    ("function", "short"), [("columns", "zeros + 2 * across"), ("rows", "2 * across")]
)
def test_a_buffer_that_is_two_rows_short_is_found(seeds, tmp_path, name, function, short):
    """With the slack of `grow`, a quarter of each buffer, this planted bug would stay hidden."""
    if function == "rows" and "avx512vbmi" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor resamples by columns")
    native = shutil.copytree(NATIVE, tmp_path / "native")
    source = native / "resample.c"
    before, start, after = source.read_text().partition(f"static int resample_{function}(")
    exact = "total * sizeof(int16_t) + ALIGNED"
    assert exact in after
    after = after.replace(exact, f"(total - ({short})) {exact[6:]}", 1)
    source.write_text(before + start + after)
    done = fuzz(tmp_path, seeds, BUILDS[name], 20, 1, native)
    assert done.returncode, done.stdout
    assert "buffer" in done.stderr
    assert (tmp_path / "crasher").exists()

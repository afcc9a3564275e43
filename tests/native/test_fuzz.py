"""The native decoder on mutated files under AddressSanitizer, UBSan and ThreadSanitizer.

`make soak` runs it for minutes.
"""

import os
import subprocess

import numpy as np
import pytest

from densefeed.storage import indexed_jpeg

from ..jpeg_files import HERE, NATIVE, SOURCES, compile_c

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
# fuzz.c includes batch.c and turbo.c.
LIBRARY = [NATIVE / f"{name}.c" for name in SOURCES if name not in ("batch", "turbo")]


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


def fuzz(folder, seeds, sanitizers: str, seconds: float, threaded: int, seed: int) -> None:
    """Build and run fuzz.c. A finding fails the test and is saved in `folder`."""
    fuzzer = folder / "fuzz"
    try:
        compile_c(
            fuzzer,
            [HERE / "fuzz.c", *LIBRARY],
            "-O1",
            "-g",
            "-march=native",
            f"-fsanitize={sanitizers}",
            "-fno-sanitize-recover=all",
        )
    except AssertionError as error:
        if "cannot find" in str(error):
            pytest.skip(f"this compiler has no runtime for -fsanitize={sanitizers}")
        raise
    options = {"ASAN_OPTIONS": "allocator_may_return_null=1", "TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(
        [fuzzer, str(seconds), str(seed), str(threaded), *seeds],
        cwd=folder,
        env=os.environ | options,
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0, (
        f"{done.stdout}{done.stderr[:6000]}\nthe input is {folder / 'crasher'}"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sanitizers", "short", "share"), [("address,undefined", 4, 0.9), ("thread", 2, 0.1)]
)
def test_mutated_files_cause_no_errors(seeds, tmp_path, sanitizers, short, share):
    """Run a few seconds of fixed mutations; `make soak` runs minutes of random ones."""
    if MINUTES:
        seed = int.from_bytes(os.urandom(4))
        print(f"seed {seed}")
        fuzz(tmp_path, seeds, sanitizers, 60 * MINUTES * share, threaded=1, seed=seed)
    else:
        fuzz(tmp_path, seeds, sanitizers, short, threaded=1, seed=1)

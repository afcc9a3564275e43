"""The native decoder for processors, systems and a libjpeg-turbo that this machine does not have.

`make test-ports` fetches what they need into .ports: a cross compiler and libjpeg-turbo 3.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..jpeg_files import FLAGS, HERE, NATIVE, SOURCES
from .test_fuzz import LIBRARY, seeds  # noqa: F401

CC = os.environ.get("CC", "gcc")
PORTS = Path(__file__).parents[2] / ".ports"
ZIG = [sys.executable, "-m", "ziglang", "cc"]
# As setup.py compiles.
RELEASE = (*FLAGS, "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Werror")
ALL = [NATIVE / f"{name}.c" for name in SOURCES]
FUZZ = [HERE / "fuzz.c", *(NATIVE / name for name in LIBRARY)]
# Mutated files of which the pixels are compared.
INPUTS = 3000
needs_zig = pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="no cross compiler: run make test-ports"
)


def run(*words: object, **environment: str) -> subprocess.CompletedProcess:
    command = [str(word) for word in words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def build(*words: object) -> None:
    done = run(*words)
    assert done.returncode == 0, done.stderr


def libjpeg(wheel: str) -> tuple[str, Path]:
    """Return the flag of the headers and the library of libjpeg-turbo 3 for a platform."""
    folder = PORTS / wheel / "libjpeg" / "install"
    if not folder.exists():
        pytest.skip("no libjpeg-turbo 3: run make test-ports")
    return f"-I{folder / 'include'}", folder / "lib" / "libjpeg.a"


def test_a_big_endian_processor_is_refused_in_one_sentence():
    done = run(
        CC,
        *FLAGS,
        "-fsyntax-only",
        "-U__BYTE_ORDER__",
        "-D__BYTE_ORDER__=__ORDER_BIG_ENDIAN__",
        NATIVE / "maps.c",
    )
    assert done.returncode
    assert "DenseFeed needs a little-endian processor, such as x86-64 or arm64" in done.stderr


@pytest.mark.slow
@needs_zig
@pytest.mark.parametrize("target", ["s390x-linux-gnu", "powerpc64-linux-musl"])
def test_big_endian_compilers_stop(target):
    done = run(*ZIG, "-target", target, *FLAGS, "-fsyntax-only", NATIVE / "maps.c")
    assert done.returncode
    assert "DenseFeed needs a little-endian processor" in done.stderr


@pytest.mark.slow
@needs_zig
def test_macos_builds(tmp_path):
    """Linked for arm64; for x86-64, without a libjpeg of that kind, only compiled."""
    headers, library = libjpeg("macosx_11_0_arm64")
    out = tmp_path / "libdensefeed.so"
    build(*ZIG, "-target", "aarch64-macos", *RELEASE, headers, *ALL, library, "-shared", "-o", out)
    # The magic number of Mach-O, 64 bits.
    assert out.read_bytes()[:4] == b"\xcf\xfa\xed\xfe"
    for source in ALL:
        compile_only = ("-c", source, "-o", tmp_path / f"{source.stem}.o")
        build(*ZIG, "-target", "x86_64-macos", *RELEASE, headers, *compile_only)


def digest(program: Path, seeds: list[Path], *launcher: str, **environment: str) -> str:  # noqa: F811
    done = run(*launcher, program, 10**6, INPUTS, 1, 0, *seeds, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.search(rf"^{INPUTS} inputs .* digest (\w+)$", done.stdout, re.M)[1]


@pytest.fixture(scope="module")
def here(seeds, tmp_path_factory) -> str:  # noqa: F811
    """The digest of this machine's processor and libjpeg-turbo."""
    program = tmp_path_factory.mktemp("here") / "fuzz"
    build(CC, *RELEASE, "-DGUARDED", *FUZZ, "-o", program, "-ljpeg", "-lm", "-lpthread")
    return digest(program, seeds)


@pytest.mark.slow
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="its libjpeg-turbo 3 is for x86-64")
@pytest.mark.parametrize("simd", ["", "1"], ids=["vectors", "plain"])
def test_libjpeg_turbo_3_gives_the_same_pixels(seeds, here, tmp_path, simd):  # noqa: F811
    headers, library = libjpeg("manylinux_2_28_x86_64")
    program = tmp_path / "fuzz"
    build(CC, *RELEASE, "-DGUARDED", headers, *FUZZ, library, "-o", program, "-lm", "-lpthread")
    assert digest(program, seeds, JSIMD_FORCENONE=simd) == here


@pytest.mark.slow
@needs_zig
def test_arm64_gives_the_same_pixels(seeds, here, tmp_path):  # noqa: F811
    """The decoder on mutated files with guard pages, and its pixels beside those of x86-64."""
    headers, library = libjpeg("manylinux_2_28_aarch64")
    qemu = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if qemu is None:
        pytest.skip("no qemu-aarch64: install the package qemu-user-static")
    program, target = tmp_path / "fuzz", "aarch64-linux-musl"
    build(*ZIG, "-target", target, *RELEASE, "-DGUARDED", headers, *FUZZ, library, "-o", program)
    assert digest(program, seeds, qemu) == here

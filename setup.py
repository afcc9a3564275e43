"""Build the package `densefeed` with its native decoder."""

import os
import platform
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = "densefeed/native"
SOURCES = (
    "batch",
    "checksum",
    "maps",
    "planes",
    "resample",
    "sample",
    "scratch",
    "segments",
    "turbo",
)


class BuildNative(build_ext):
    """Build a plain shared library for ctypes: no Python version in its name, no module init."""

    def get_ext_filename(self, name):
        return os.path.join(*name.split(".")) + ".so"

    def get_export_symbols(self, extension):
        # On Windows setuptools would export PyInit_libdensefeed, which the library does not define.
        return []


class WheelForAnyPython(bdist_wheel):
    """Tag the wheel with its platform alone: ctypes loads the library in every Python 3."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


def compile_flags() -> list[str]:
    """Return the compiler flags.

    On x86-64 the minimum is x86-64-v2 (2009); code for newer processors is selected when the
    library is loaded. Without contraction (a * b + c rounded once) every processor computes the
    same filter weights, and so the same pixels.
    """
    # Compilers for other processors refuse this option.
    machine = ["-march=x86-64-v2"] if platform.machine() in ("x86_64", "AMD64") else []
    common = ["-O3", "-std=gnu11", "-fwrapv", "-ffp-contract=off", "-fvisibility=hidden"]
    # GCC notes that 32-byte vectors are passed in another way with AVX. All such calls are inlined.
    return [*common, "-Wno-psabi", *machine]


def output(*words: str) -> str:
    """Return what a command prints, or nothing if it fails or does not exist."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def libjpeg_flags() -> tuple[list[str], list[str]]:
    """Return the compiler's and the linker's flags for a libjpeg outside their default folders.

    pkg-config knows those of conda and of a prefix of one's own; Homebrew, which keeps libraries in
    folders that Apple's compiler does not search, may be there without pkg-config.
    """
    if output("pkg-config", "--modversion", "libjpeg"):
        headers = output("pkg-config", "--cflags-only-I", "libjpeg").split()
        return headers, output("pkg-config", "--libs-only-L", "libjpeg").split()
    prefix = output("brew", "--prefix", "jpeg-turbo")
    return ([f"-I{prefix}/include"], [f"-L{prefix}/lib"]) if prefix else ([], [])


if sys.byteorder != "little":
    sys.exit("error: DenseFeed needs a little-endian processor, such as x86-64 or arm64")
if sys.platform == "darwin":
    # Python from python.org builds for two processors, Homebrew's libjpeg-turbo is for one.
    os.environ.setdefault("ARCHFLAGS", f"-arch {platform.machine()}")
headers, folders = libjpeg_flags()
setup(
    ext_modules=[
        Extension(
            "densefeed.native.libdensefeed",
            sources=[f"{NATIVE}/{source}.c" for source in SOURCES],
            # A change of a header alone must build the library again.
            depends=sorted(map(str, Path(NATIVE).glob("*.h"))),
            libraries=["jpeg", "m", "pthread"],
            extra_compile_args=[*compile_flags(), *headers],
            extra_link_args=folders,
        )
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": WheelForAnyPython},
)

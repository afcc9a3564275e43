"""Build the package `densefeed` with its native decoder."""

import os
import platform

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = "densefeed/native"
SOURCES = ("batch", "checksum", "maps", "resample", "sample", "scratch", "segments", "turbo")


class BuildNative(build_ext):
    """Build a plain shared library for ctypes: no Python version in its name, no module init."""

    def get_ext_filename(self, name):
        return os.path.join(*name.split(".")) + ".so"

    def get_export_symbols(self, extension):
        # On Windows setuptools would export PyInit_libdensefeed, which the library does not define.
        return []


def compile_flags() -> list[str]:
    """Return the compiler flags.

    On x86-64 the minimum is x86-64-v2 (2009); code for newer processors is selected when the
    library is loaded. Without contraction (a * b + c rounded once) every processor computes the
    same filter weights, and so the same pixels.
    """
    # Compilers for other processors refuse this option.
    machine = ["-march=x86-64-v2"] if platform.machine() in ("x86_64", "AMD64") else []
    common = ["-O3", "-std=gnu11", "-fwrapv", "-ffp-contract=off", "-fvisibility=hidden"]
    return [*common, *machine]


setup(
    ext_modules=[
        Extension(
            "densefeed.native.libdensefeed",
            sources=[f"{NATIVE}/{source}.c" for source in SOURCES],
            # A change of the header alone must build the library again.
            depends=[f"{NATIVE}/native.h"],
            libraries=["jpeg", "m", "pthread"],
            extra_compile_args=compile_flags(),
        )
    ],
    cmdclass={"build_ext": BuildNative},
)

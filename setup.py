"""The folders of this checkout, installed under the one name `densefeed`, and the native decoder beside its wrapper."""

import os
import platform

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

NAME = "densefeed"  # the one name this project puts in site-packages
FOLDERS = ("relabel", "pipelines", "models", "training", "tools")  # top-level here, densefeed.<folder> once installed
NATIVE = "pipelines/native"


class BuildPy(build_py):
    """Of the modules beside setup.py ship train.py alone, and no alias file."""

    def find_package_modules(self, package, package_dir):
        found = super().find_package_modules(package, package_dir)
        return [module for module in found if (module[1] == "train" if package == NAME else module[1] != NAME)]


class BuildNative(build_ext):
    """A plain shared library, loaded with ctypes: no Python version in its name, no module to export."""

    def get_ext_filename(self, name):
        return os.path.join(*name.split(".")) + ".so"

    def get_export_symbols(self, extension):
        return []


def flags() -> list[str]:
    """x86-64-v2 (2009) is the floor there; what newer processors know is chosen when the library is loaded.

    Without contraction (a * b + c rounded once) every processor computes the same weights, and so the same pixels.
    """
    machine = ["-march=x86-64-v2"] if platform.machine() in ("x86_64", "AMD64") else []
    return ["-O3", "-std=gnu11", "-fwrapv", "-ffp-contract=off", "-fvisibility=hidden", *machine]


inside = find_packages(include=[pattern for folder in FOLDERS for pattern in (folder, f"{folder}.*")])
setup(
    package_dir={NAME: "."},
    packages=[NAME, *(f"{NAME}.{package}" for package in inside)],
    package_data={f"{NAME}.relabel": ["FORMAT.md"], f"{NAME}.training": ["ABLATIONS.md"], f"{NAME}.tools": ["*.html"]},
    ext_modules=[
        Extension(
            f"{NAME}.pipelines.native.libdensefeed",
            sources=[f"{NATIVE}/{file}.c" for file in ("batch", "checksum", "maps", "resample", "sample", "scratch", "segments", "turbo")],
            depends=[f"{NATIVE}/native.h"],
            libraries=["jpeg", "m", "pthread"],
            extra_compile_args=flags(),
        )
    ],
    cmdclass={"build_py": BuildPy, "build_ext": BuildNative},
)

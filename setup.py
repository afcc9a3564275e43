"""The folders of this checkout, installed under the one name `densefeed`."""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

NAME = "densefeed"  # the one name this project puts in site-packages
FOLDERS = ("relabel", "pipelines", "models", "tools")  # top-level here, densefeed.<folder> once installed


class BuildPy(build_py):
    """Of the modules beside setup.py ship train.py alone, and no alias file."""

    def find_package_modules(self, package, package_dir):
        found = super().find_package_modules(package, package_dir)
        return [module for module in found if (module[1] == "train" if package == NAME else module[1] != NAME)]


inside = find_packages(include=[pattern for folder in FOLDERS for pattern in (folder, f"{folder}.*")])
setup(
    package_dir={NAME: "."},
    packages=[NAME, *(f"{NAME}.{package}" for package in inside)],
    package_data={f"{NAME}.relabel": ["FORMAT.md"], f"{NAME}.tools": ["*.html"]},
    cmdclass={"build_py": BuildPy},
)

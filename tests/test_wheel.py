"""The wheel that is built from a checkout, and its version, which is the tag."""

import ctypes
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Runs in a checkout. `get_tag` is what names a wheel.
READ_TAG = """
from setuptools import distutils
command = distutils.core.run_setup("setup.py", stop_after="init").get_command_obj("bdist_wheel")
command.ensure_finalized()
print(*command.get_tag())
"""


def run(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def git(*words: str, cwd: Path) -> None:
    run("git", "-c", "user.name=A", "-c", "user.email=a@example.org", *words, cwd=cwd)


def copy(files: list[str], out: Path) -> Path:
    for name in files:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, out / name, follow_symlinks=False)
    return out


@pytest.fixture
def files() -> list[str]:
    """What git tracks or would track, relative to the checkout."""
    listed = run("git", "ls-files", "-co", "--exclude-standard", "-z", cwd=ROOT)
    return [name for name in listed.split("\0") if name and (ROOT / name).exists()]


@pytest.fixture
def checkout(files, tmp_path) -> Path:
    """A repository of its own with these files, in which v1.2.3 is the last commit."""
    folder = copy(files, tmp_path / "checkout")
    git("init", "-q", cwd=folder)
    git("add", "-A", cwd=folder)
    git("commit", "-q", "-m", "all", cwd=folder)
    git("tag", "v1.2.3", cwd=folder)
    return folder


def read_version(folder: Path) -> str:
    pytest.importorskip("setuptools_scm", reason="setuptools-scm is not installed")
    return run(sys.executable, "setup.py", "--version", cwd=folder).strip()


@pytest.mark.slow
def test_outside_the_version_is_the_tag(checkout):
    assert read_version(checkout) == "1.2.3"
    git("commit", "-q", "--allow-empty", "-m", "more", cwd=checkout)
    assert read_version(checkout).startswith("1.2.4.dev1+g")


@pytest.mark.slow
def test_outside_an_archive_of_git_has_the_version(checkout, tmp_path):
    git("archive", "-o", str(tmp_path / "archive.tar"), "HEAD", cwd=checkout)
    with tarfile.open(tmp_path / "archive.tar") as archive:
        archive.extractall(tmp_path / "archive", filter="tar")
    assert read_version(tmp_path / "archive") == "1.2.3"


def test_outside_files_without_git_have_a_version(files, tmp_path):
    assert read_version(copy(files, tmp_path / "files")) == "0.0.0"


def platform_tag() -> str:
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def test_outside_one_wheel_is_for_every_python():
    """It had the tag of the Python that built it, as if it were an extension module."""
    interpreter, abi, platform = run(sys.executable, "-c", READ_TAG, cwd=ROOT).split()
    assert (interpreter, abi) == ("py3", "none")
    if sys.platform == "linux":
        assert platform == platform_tag()


@pytest.mark.slow
def test_outside_the_wheel_holds_the_package_and_licenses(checkout, tmp_path):
    """As `pip install .` builds it: `densefeed` alone, with its data files, at most 5 MB."""
    options = ("--no-deps", "--no-build-isolation", "-q", "-w", tmp_path, checkout)
    run(sys.executable, "-m", "pip", "wheel", *options, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-{platform_tag()}.whl")
    assert wheel.stat().st_size <= 5_000_000
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extract("densefeed/native/libdensefeed.so", tmp_path)
    assert ctypes.CDLL(str(tmp_path / "densefeed/native/libdensefeed.so")).densefeed_sizes
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"densefeed"}
    data = {
        "storage/FORMAT.md",
        "recipes/ABLATIONS.md",
        "recipes/photo_cutouts.csv",
        "recipes/photo_class_map.csv",
        "pages/report.html",
        "pages/audit.html",
        "pages/page.html",
        "pages/explain.html",
        "pages/heat.html",
    }
    assert {f"densefeed/{name}" for name in ("train.py", *data)} <= set(names)
    assert not any(name.endswith((".c", ".h")) or "test" in Path(name).name for name in names)
    licenses = {name.split(".dist-info/licenses/")[-1] for name in names if "/licenses/" in name}
    assert licenses == {
        "LICENSE",
        "licenses/libjpeg-turbo-LICENSE.md",
        "licenses/libjpeg-turbo-README.ijg",
    }

"""The set-up script names missing packages where there is no apt to install them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..jpeg_files import SOURCES

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bare(tmp_path):
    """A PATH without compiler, pkg-config and apt-get."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "dirname", "id"):
        (folder / name).symlink_to(shutil.which(name))
    (folder / "python3").symlink_to(sys.executable)
    return folder


def test_without_apt_it_names_every_missing_package(bare, tmp_path):
    done = subprocess.run(
        ["bash", ROOT / ".ci" / "set_up.sh", tmp_path / "venv"],
        env={"PATH": str(bare)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    for package in ("g++", "pkg-config", "libturbojpeg0-dev", "libopencv-dev"):
        assert package in done.stderr
    assert "install them with its package manager and run make again" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_an_old_python_is_refused(bare, tmp_path):
    """A python3 that prints version 3.9, on a machine that has everything else."""
    for name in ("c++", "pkg-config"):
        (bare / name).write_text("#!/bin/sh\nexit 0\n")
        (bare / name).chmod(0o755)
    (bare / "python3").unlink()
    (bare / "python3").write_text(
        '#!/bin/bash\ncase "$2" in *version_info*) exit 1;; esac\n'
        '[ "$1" = --version ] && echo Python 3.9.1\nexit 0\n'
    )
    (bare / "python3").chmod(0o755)
    done = subprocess.run(
        ["bash", ROOT / ".ci" / "set_up.sh", tmp_path / "venv"],
        env={"PATH": str(bare)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "Python 3.9.1 is too old; install Python 3.11 or newer" in done.stderr


@pytest.mark.parametrize(
    ("tool", "script", "flags"),
    [
        (
            "pkg-config",
            'case "$1" in --cflags*) echo -I/opt/jpeg/include;; *) echo -L/opt/jpeg/lib;; esac',
            ["-I/opt/jpeg/include", "-L/opt/jpeg/lib"],
        ),
        ("brew", "echo /opt/jpeg", ["-I/opt/jpeg/include", "-L/opt/jpeg/lib"]),
    ],
)
def test_the_decoder_is_built_with_a_libjpeg_in_its_own_folder(bare, tmp_path, tool, script, flags):
    """A compiler that only records its command line stands for one on another system."""
    for name, lines in (
        (tool, script),
        ("cc", f'echo "$@" >> {tmp_path}/log\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"'),
    ):
        (bare / name).write_text(f"#!/bin/sh\n{lines}\n")
        (bare / name).chmod(0o755)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "-b", tmp_path, "-t", tmp_path],
        cwd=ROOT,
        env={"PATH": str(bare), "CC": "cc", "LDSHARED": "cc"},
        check=True,
        capture_output=True,
    )
    *compiled, linked = (tmp_path / "log").read_text().splitlines()
    assert len(compiled) == len(SOURCES)
    assert all(flags[0] in line.split() for line in compiled)
    assert flags[1] in linked.split()

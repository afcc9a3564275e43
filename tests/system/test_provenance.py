"""The environment of a measurement."""

import math
import os
import platform
import subprocess
from pathlib import Path

import pytest

from densefeed.system import provenance
from densefeed.system.json_files import read_json
from densefeed.system.provenance import command, commit, cpu_model, write_json


def test_an_installed_package_has_no_commit(monkeypatch, tmp_path):
    """Git would find a repository of the user around the environment, and name its commit."""
    installed = tmp_path / "venv"
    installed.mkdir()
    monkeypatch.setattr(provenance, "ROOT", installed)
    for word in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        who = "-c", "user.name=a", "-c", "user.email=a@b"
        subprocess.run(["git", *who, *word], cwd=tmp_path, check=True)
    assert commit() == "unknown"
    # A checkout of ours, also behind a link.
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setattr(provenance, "ROOT", tmp_path / "link")
    assert len(commit().removesuffix("-dirty")) == 12


def test_without_proc_the_cpu_is_its_architecture(monkeypatch):
    """macOS has no /proc."""

    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert cpu_model() == platform.machine()


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        (
            "model name\t: AMD EPYC\ncpu family\t: 26\nmodel\t\t: 2\n\nmodel\t\t: 7",
            "AMD EPYC (family 26, model 2)",
        ),
        ("processor: 0\nmodel name: POWER9, altivec supported", "POWER9, altivec supported"),
        ("processor: 0\nCPU part: 0xd0c", platform.machine()),
    ],
)
def test_a_cpu_has_its_numbers(monkeypatch, lines, want):
    """As many virtual machines name all generations alike. POWER and arm64 have none."""
    monkeypatch.setattr(Path, "read_text", lambda path: lines)
    assert cpu_model() == want


def test_json_that_is_written_can_be_read(tmp_path):
    """Also of a folder whose name is not UTF-8."""
    path, name = tmp_path / "x.json", os.fsdecode(b"x\xffim")
    write_json(path, {"data": name, "loss": [math.nan, {"least": (-math.inf, 1.5)}]})
    wanted = {"data": r"x\udcffim", "loss": [None, {"least": [None, 1.5]}]}
    assert read_json(path, "remove it") == wanted


def test_settings_of_memory_precede_a_command():
    variables = {"HOME": "/root", "MALLOC_ARENA_MAX": "1"}
    assert command(["a/x.py", "--out=b/c"], variables) == "MALLOC_ARENA_MAX=1 x.py --out=c"

"""The environment of a measurement."""

import math
import os
import platform
from pathlib import Path

from densefeed.system.json_files import read_json
from densefeed.system.provenance import cpu_model, write_json


def test_without_proc_the_cpu_is_its_architecture(monkeypatch):
    """macOS has no /proc."""

    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert cpu_model() == platform.machine()


def test_json_that_is_written_can_be_read(tmp_path):
    """Also of a folder whose name is not UTF-8."""
    path, name = tmp_path / "x.json", os.fsdecode(b"x\xffim")
    write_json(path, {"data": name, "loss": [math.nan, {"least": (-math.inf, 1.5)}]})
    wanted = {"data": r"x\udcffim", "loss": [None, {"least": [None, 1.5]}]}
    assert read_json(path, "remove it") == wanted

"""The environment of a measurement."""

import platform
from pathlib import Path

from densefeed.system.provenance import cpu_model


def test_without_proc_the_cpu_is_its_architecture(monkeypatch):
    """macOS has no /proc."""

    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert cpu_model() == platform.machine()

"""Small shared files: created once, replaced and removed as a whole."""

import os
from pathlib import Path

import pytest

from densefeed.system.object_folder import ObjectFolder


def test_create_replace_read_list_and_remove(tmp_path):
    objects = ObjectFolder(tmp_path / "maps")
    assert objects.read("leases/a") is None
    assert objects.list("leases") == {}
    assert objects.create("leases/a", b"1")
    assert not objects.create("leases/a", b"2")
    assert objects.read("leases/a") == b"1"
    objects.replace("leases/a", b"3")
    objects.replace("leases/b", b"4")
    assert objects.read("leases/a") == b"3"
    assert objects.list("leases").keys() == {"a", "b"}
    objects.remove("leases/b")
    objects.remove("leases/b")
    objects.remove_all("parts")
    objects.remove_all("leases")
    objects.remove_all("leases")
    assert list((tmp_path / "maps").iterdir()) == []


def test_a_folder_that_another_process_removes_is_made_again(tmp_path, monkeypatch):
    objects, real, removed = ObjectFolder(tmp_path), os.link, []

    def link(part: Path, path: Path) -> None:
        if not removed:
            removed.append(path.parent.rmdir())
        real(part, path)

    monkeypatch.setattr(os, "link", link)
    assert objects.create("leases/a", b"1")
    assert removed


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path, monkeypatch):
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=str(tmp_path)):
        ObjectFolder(tmp_path).create("a", b"1")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []

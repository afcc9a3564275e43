"""Small shared files: created once, replaced and removed as a whole."""

import os
import re
import time
from pathlib import Path

import pytest

from densefeed.system.errors import UserError
from densefeed.system.object_folder import ObjectFolder, open_objects

from ..planted import PLANTS, plant, time_limit


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_create_replace_read_list_and_remove(kind, tmp_path, request):
    """The same calls have the same results on a disk and in object storage."""
    place = tmp_path if kind == "folder" else request.getfixturevalue("bucket")
    objects = open_objects(place / "maps")
    assert objects.read("leases/a") is None
    assert objects.size("leases/a") is None
    assert objects.list("leases") == objects.sizes("leases") == {}
    assert objects.create("leases/a", b"1")
    assert not objects.create("leases/a", b"2")
    assert objects.read("leases/a") == b"1"
    objects.replace("leases/a", b"345")
    objects.replace("leases/b", b"4")
    objects.replace("leases.txt", b"4")
    if kind == "bucket":
        objects.replace("leases/folder/c", b"4")
    assert objects.read("leases/a") == b"345"
    assert objects.size("leases/a") == 3
    assert objects.sizes("leases") == {"a": 3, "b": 1}
    assert objects.list("leases").keys() == {"a", "b"}
    assert abs(objects.list("leases")["a"] - time.time()) < 60
    objects.remove("leases/b")
    objects.remove("leases/b")
    objects.replace("leases/b", b"of another")
    for folder in ("parts", "leases", "leases"):
        objects.remove_all(folder, re.compile("[^b].*"))
    assert objects.list("leases").keys() == {"b"}
    objects.remove_all("leases", re.compile("b"))
    assert objects.list("leases") == {}
    if kind == "bucket":
        assert objects.read("leases/folder/c") == b"4"
    else:
        assert [path.name for path in (tmp_path / "maps").iterdir()] == ["leases.txt"]


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


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("name", ["plan.json", "leases/a.1"])
def test_outside_only_regular_files_are_read(tmp_path, name, kind):
    """A pipe would hang every worker, a device may never end; `root` itself may be a link."""
    (tmp_path / "real").mkdir()
    (tmp_path / "maps").symlink_to("real")
    victim, objects = plant(kind, tmp_path / "maps" / name), ObjectFolder(tmp_path / "maps")
    with time_limit(), pytest.raises(UserError, match=rf"{name} must be a regular file.*; remove"):
        objects.read(name)
    assert objects.size(name) is None
    assert victim.read_bytes() == b"mine"
    if kind != "folder":
        objects.replace(name, b"new")
        assert (objects.read(name), victim.read_bytes()) == (b"new", b"mine")


def test_outside_a_linked_folder_is_not_followed(tmp_path):
    """Its files would be taken for those of the labeling, and removed with them."""
    other, objects = tmp_path / "other", ObjectFolder(tmp_path / "maps")
    other.mkdir()
    (other / "a.1").write_bytes(b"mine")
    (tmp_path / "maps").mkdir()
    (tmp_path / "maps" / "leases").symlink_to(other)
    calls = (
        lambda: objects.create("leases/b.1", b""),
        lambda: objects.replace("leases/a.1", b""),
        lambda: objects.read("leases/a.1"),
        lambda: objects.size("leases/a.1"),
        lambda: objects.list("leases"),
        lambda: objects.remove("leases/a.1"),
        lambda: objects.remove_all("leases", re.compile(".*")),
        lambda: objects.add_file(other / "a.1", "leases/c.1", ""),
    )
    for call in calls:
        with pytest.raises(UserError, match=r"leases must be a folder, and is a link; remove it"):
            call()
    assert [path.read_bytes() for path in other.iterdir()] == [b"mine"]

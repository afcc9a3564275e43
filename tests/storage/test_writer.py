"""Two writers of one file, file systems without links, and what killed writers leave."""

import os
from pathlib import Path

import numpy as np
import pytest

from densefeed.storage.score_maps import ScoreMapWriter
from densefeed.system.errors import BusyError, UserError
from densefeed.system.files import lock, open_locked, replace_file

from ..stores import make_header


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


HEADER = make_header(side=2, top_k=2, num_classes=3, class_names=("a", "b", "c"))
WORDS = HEADER, list("abcd"), np.zeros(4, np.int64)


def test_two_writers_never_write_the_same_file(tmp_path, random_maps):
    maps, words = random_maps(4, 2, 2, 3), (tmp_path / "maps.h5", *WORDS)
    first = ScoreMapWriter(*words)
    with pytest.raises(
        BusyError, match=r"maps.h5.part is being written by another process; wait for it"
    ):
        ScoreMapWriter(*words)
    first.write(np.arange(4), maps)
    first.close()
    second = ScoreMapWriter(*words)
    assert second.done.all()
    second.finish()
    with pytest.raises(UserError, match=r"exists already"):
        ScoreMapWriter(*words)
    assert names(tmp_path) == ["maps.h5"]


def test_a_file_system_without_hard_links_works(tmp_path, monkeypatch):
    monkeypatch.setattr(
        os, "link", lambda *words: (_ for _ in ()).throw(PermissionError(1, "no links here"))
    )
    ScoreMapWriter(tmp_path / "maps.h5", *WORDS).close()
    assert names(tmp_path) == ["maps.h5.part"]


def test_files_of_killed_conversions_are_removed_and_those_of_running_ones_are_kept(tmp_path):
    out, orphan = tmp_path / "maps.h5", tmp_path / "maps.h5.123456.part"
    others = ["maps.h5.7.parts", "maps.h5.99.part"]
    for name in (orphan.name, *others):
        (tmp_path / name).write_bytes(b"")
    living = os.open(tmp_path / "maps.h5.99.part", os.O_RDWR)
    lock(living, out)
    ScoreMapWriter(out, *WORDS).close()
    assert names(tmp_path) == sorted([*others, "maps.h5.part"])
    orphan.write_bytes(b"")
    with replace_file(out) as part:
        # Another process that takes it for an orphan finds it locked.
        with pytest.raises(BusyError):
            open_locked(part)
        part.write_bytes(b"x")
    assert names(tmp_path) == sorted([*others, "maps.h5", "maps.h5.part"])
    os.close(living)

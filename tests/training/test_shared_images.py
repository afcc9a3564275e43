"""Validation on training images prints a warning, also in a dry run."""

import shutil

import pytest

import densefeed.train as training
from densefeed.system.options import with_options

SAME = "warning: the images of --val {} are training images of --data"


@pytest.fixture
def warned(micro, tmp_path, capsys):
    """Return a function that checks data without training and returns what stderr has."""

    def check(data, val, **fields) -> str:
        config = micro(tmp_path / "run", objective="ce", mixtoken=False, dry_run=True, **fields)
        training.train(with_options(config, data=data, val=val))
        return capsys.readouterr().err

    return check


def test_outside_validation_on_the_packed_training_images_warns(warned, packed, tmp_path):
    train, val = packed
    assert "training images" not in warned(train, val)
    said = warned(train, train)
    assert SAME.format(train) in said
    assert "--val-fraction" not in said
    # One file of several, by another path.
    shutil.copy(train, tmp_path / "a.beton")
    shutil.copy(train, tmp_path / "b.beton")
    (tmp_path / "link").symlink_to(tmp_path)
    part = tmp_path / "link/a.beton"
    assert SAME.format(part) in warned(tmp_path / "*.beton", part)


def test_outside_validation_on_a_training_folder_warns(warned, folder, tmp_path):
    assert "training images" not in warned(folder, folder, loader="folder")
    (tmp_path / "photos").symlink_to(folder / "train")
    said = warned(folder, folder / "train", loader="folder")
    assert SAME.format(folder / "train") in said
    assert "give --val other images, or give --val-fraction 0.15 in its place" in said
    assert SAME.format(tmp_path / "photos") in warned(folder, tmp_path / "photos", loader="folder")


def test_outside_validation_on_some_training_images_warns(warned, folder, tmp_path):
    first, *others = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / first).symlink_to(folder / "train" / first)
    for name in others:
        shutil.copytree(folder / "val" / name, tmp_path / "val" / name)
    said = warned(folder, tmp_path / "val", loader="folder")
    assert "% of the images of --val" in said
    assert "are training images" in said

"""Validation on training images prints a warning, also in a dry run."""

import shutil

import numpy as np
import pytest

import densefeed.train as training
from densefeed.system.options import with_options
from densefeed.tools import pack_dataset
from densefeed.training import shared_images

from ..fixtures import photograph

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


def pack(out, data, **fields):
    pack_dataset.main(pack_dataset.Packing(data=data, out=out, **fields))
    return out


def subset(folder, root, split, numbers):
    """Copy those images of a split to another folder."""
    for path in (folder / split).glob("*/*"):
        if int(path.stem) in numbers:
            target = root / path.parent.name / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def test_outside_packed_validation_images_of_the_training_set_warn(
    warned, packed, folder, tmp_path
):
    """The paths and the fingerprints differ: two files that were packed from the same images."""
    train, _ = packed
    subset(folder, tmp_path / "part", "train", range(4))
    part = pack(tmp_path / "part.beton", tmp_path / "part")
    assert SAME.format(part) in warned(train, part)
    # Two of four images are new.
    subset(folder, tmp_path / "mixed", "train", range(2))
    for path in (folder / "val").glob("*/*"):
        if int(path.stem) < 2:
            shutil.copy(path, tmp_path / "mixed" / path.parent.name / f"new{path.name}")
    mixed = pack(tmp_path / "mixed.beton", tmp_path / "mixed")
    assert "warning: about 50 % of the images of --val" in warned(train, mixed)


@pytest.mark.parametrize("how", [{}, {"index": False}, {"form": "planes"}])
def test_outside_validation_on_a_packed_part_of_the_training_folder_warns(
    warned, folder, tmp_path, how
):
    subset(folder, tmp_path / "part", "train", range(8))
    part = pack(tmp_path / "part.beton", tmp_path / "part", **how)
    assert SAME.format(part) in warned(folder / "train", part, loader="auto")
    new = pack(tmp_path / "new.beton", folder, split="val", **how)
    assert "training images" not in warned(folder / "train", new, loader="auto")


def test_outside_validation_on_a_folder_of_packed_training_images_warns(
    warned, packed, folder, tmp_path
):
    subset(folder, tmp_path / "val", "train", range(2, 6))
    said = warned(packed[0], tmp_path / "val", loader="auto")
    assert SAME.format(tmp_path / "val") in said
    assert "training images" not in warned(packed[0], folder / "val", loader="auto")


def test_outside_validation_on_small_pngs_of_the_training_set_warns(warned, tmp_path):
    """All images are stored as raw pixels of one size, so their bytes alone tell them apart."""
    rng = np.random.default_rng(3)
    for number in range(24):
        path = tmp_path / "all" / ("cat", "dog")[number % 2] / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph(rng, 32, 32).save(path)
    for number in range(24):
        source = next((tmp_path / "all").glob(f"*/{number:03d}.png"))
        target = tmp_path / ("train", "val")[number >= 16] / source.parent.name / source.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    whole, train, val = (
        pack(tmp_path / f"{name}.beton", tmp_path / name) for name in ("all", "train", "val")
    )
    assert SAME.format(val) in warned(whole, val)
    assert SAME.format(val) in warned(tmp_path / "all", val, loader="auto")
    assert "training images" not in warned(train, val)
    assert "training images" not in warned(tmp_path / "train", val, loader="auto")


def test_outside_damaged_images_do_not_stop_the_comparison(warned, folder, tmp_path):
    shutil.copytree(folder / "train", tmp_path / "train")
    val = pack(tmp_path / "val.beton", tmp_path / "train")
    broken = sorted((tmp_path / "train").glob("*/*"))[5]
    broken.write_bytes(broken.read_bytes()[:40])
    said = warned(tmp_path / "train", val, loader="auto", on_bad_sample="skip")
    assert "% of the images of --val" in said


@pytest.mark.parametrize("renamed", [False, True])
def test_outside_validation_on_copies_of_training_files_warns(
    warned, folder, tmp_path, monkeypatch, renamed
):
    """A part of them, also renamed; of a large training set those of the same path are found."""
    subset(folder, tmp_path / "part", "train", range(1, 4))
    for n, path in enumerate(sorted((tmp_path / "part").glob("*/*"))):
        if renamed:
            path.rename(path.with_name(f"photo{n}.jpg"))
    assert SAME.format(tmp_path / "part") in warned(folder, tmp_path / "part", loader="folder")
    monkeypatch.setattr(shared_images, "SIZED_COPIES", 1)
    assert ("training images" in warned(folder, tmp_path / "part", loader="folder")) != renamed
    # Other images have the same paths.
    monkeypatch.undo()
    shutil.copytree(folder / "val", tmp_path / "new")
    assert "training images" not in warned(folder, tmp_path / "new", loader="folder")


def test_outside_copies_of_files_of_one_size_are_compared_by_their_bytes(warned, tmp_path):
    """Of images without compression; one of each class of the validation set is a copy."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 2)):
        for label in ("cat", "dog"):
            place = tmp_path / split / label
            place.mkdir(parents=True)
            for n in range(count):
                pixels = rng.integers(0, 256, (40, 40, 3), np.uint8)
                (place / f"{split}{n}.ppm").write_bytes(b"P6 40 40 255\n" + pixels.tobytes())
    assert "training images" not in warned(tmp_path, tmp_path, loader="folder")
    for label in ("cat", "dog"):
        copied = tmp_path / "train" / label / "train3.ppm"
        shutil.copy(copied, tmp_path / "val" / label / "val0.ppm")
    assert "about 50 % of the images" in warned(tmp_path, tmp_path, loader="folder")

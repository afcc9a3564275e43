"""Maps selected by name are those of the same images, whatever holds these, or are refused."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from densefeed.pipelines.folder import FolderSource
from densefeed.storage import maintenance
from densefeed.storage.images import Images
from densefeed.storage.maintenance import convert, verify
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.storage.selection import match_names, select
from densefeed.system.errors import UserError
from tests.shard_files import write_parquet, write_tar

FORMS = ("raw", "lossless", "compact")


@pytest.fixture
def stores(maps, tmp_path, monkeypatch) -> dict[str, ScoreMapStore]:
    """The maps of the folder in every form. They are copied in chunks of 3, of 11."""
    monkeypatch.setattr(maintenance, "CHUNK", 3)
    raw = ScoreMapStore(maps)
    packed = {form: convert(raw, tmp_path / f"{form}.h5", form) for form in FORMS[1:]}
    return {"raw": raw} | packed


def write_flat_tars(images: Images, root: Path, ids: np.ndarray) -> Path:
    """Write images in this order as WebDataset does: no class folders, the label in a file."""
    for number, part in enumerate(np.array_split(ids, 3)):
        files = []
        for n in part.tolist():
            key = Path(images.paths[n]).stem
            files += [(f"{key}.jpg", images.read(n)), (f"{key}.cls", b"%d" % images.labels[n])]
        write_tar(root / f"train-{number:06d}.tar", files)
    return root


@pytest.mark.parametrize("form", FORMS)
def test_maps_of_a_folder_serve_its_images_in_tars(stores, folder, tmp_path, form):
    images = Images(folder)
    ids = np.random.default_rng(0).permutation(len(images))[:7]
    tars = write_flat_tars(images, tmp_path / "tars", ids)
    with pytest.raises(UserError, match=r"holds the maps of another dataset.*select"):
        FolderSource(tars, "train", stores[form].path)
    chosen = select(stores[form], Images(tars), tmp_path / "chosen.h5")
    assert not verify(chosen)
    assert chosen.header.form == form
    assert chosen.error == stores[form].error

    # Through the loader's source, image by image: the same file has the same map.
    there, here = FolderSource(folder, "train", stores[form].path), None
    here = FolderSource(tars, "train", chosen.path)
    by_name = {Path(path).stem: n for n, path in enumerate(images.paths)}
    assert len(here.labels) == 7
    for n, path in enumerate(Images(tars).paths):
        m = by_name[Path(path).stem]
        assert Images(tars).read(n) == images.read(m)
        for mine, theirs in zip(here.maps(np.array([n])), there.maps(np.array([m])), strict=True):
            assert mine.tobytes() == theirs.tobytes()
    here.close()
    there.close()


def test_all_images_of_a_folder_give_the_bytes_of_its_store(stores, folder, tmp_path):
    chosen = select(stores["lossless"], Images(folder), tmp_path / "chosen.h5")
    assert chosen.path.read_bytes() == stores["lossless"].path.read_bytes()


def test_the_command_selects_maps_of_parquet(stores, folder, tmp_path, command):
    images, data = Images(folder), tmp_path / "hub/data"
    rows = [(Path(images.paths[n]).name, images.read(n), int(images.labels[n])) for n in (4, 2, 9)]
    write_parquet(data / "train-00000-of-00001.parquet", rows, ["cat", "dog"])
    out = tmp_path / "chosen.h5"
    words = "tools/score_maps.py", "select", stores["raw"].path, "--data", data.parent, "--out", out
    done = command(*words)
    assert done.returncode == 0, done.stderr
    assert "3 raw maps of 6 x 6 cells" in done.stdout
    for mine, theirs in zip(
        ScoreMapStore(out).rows(np.arange(3)), stores["raw"].rows(np.array([4, 2, 9])), strict=True
    ):
        assert mine.tobytes() == theirs.tobytes()
    done = command(*words)
    assert done.returncode == 2
    assert f"{out} exists" in done.stderr


def test_what_cannot_be_selected_is_refused(stores, folder, tmp_path):
    images, out = Images(folder), tmp_path / "chosen.h5"

    def refuse(files: list[tuple[str, bytes]], message: str) -> None:
        tar = write_tar(tmp_path / "bad/train.tar", files)
        with pytest.raises(UserError, match=message):
            select(stores["raw"], Images(tar.parent), out)
        assert not out.exists()

    one, two = images.read(0), images.read(1)
    refuse(
        [("cat/000.jpg", one), ("cat/999.jpg", two), ("dog/001.jpg", two)],
        r"no map by name for each image.*: 1 have none, the first cat/999.jpg; label",
    )
    refuse(
        [("cat/001.jpg", two), ("dog/000.jpg", one)],
        r"cat/001.jpg has label 0, but its map in .* is of label 1: the classes are others",
    )
    refuse(
        [("cat/000.jpg", one)],
        r"is of 2 classes and .* has 1 \(only in the maps: dog\); select maps for images of the",
    )


def test_outside_other_images_of_the_same_names_are_refused(stores, folder, tmp_path, capsys):
    """They were selected without a word, and training on the result warned of nothing."""
    images, out = Images(folder), tmp_path / "chosen.h5"
    files = {path: images.read(n) for n, path in enumerate(images.paths)}
    # The same images in another order need no warning.
    tar = write_tar(tmp_path / "same/train.tar", list(files.items())[::-1])
    select(stores["raw"], Images(tar.parent), out)
    assert "warning" not in capsys.readouterr().err
    out.unlink()

    files[images.paths[3]] += bytes(1)
    tar = write_tar(tmp_path / "others/train.tar", list(files.items()))
    with pytest.raises(
        UserError, match=r"but its files have other sizes than the labeled ones: .*; l"
    ):
        select(stores["raw"], Images(tar.parent), out)
    assert not out.exists()

    # The fingerprint says nothing of a part.
    part = [(path, data) for path, data in files.items() if path != images.paths[3]]
    tar = write_tar(tmp_path / "part/train.tar", part)
    select(stores["raw"], Images(tar.parent), out)
    assert "holds other images of the same names and labels; compare" in capsys.readouterr().err


@given(st.lists(st.text("ab/", min_size=1).map(lambda t: f"{t}z.jpg"), unique=True), st.randoms())
def test_every_part_of_unique_names_is_found(stored, random):
    ids = random.sample(range(len(stored)), random.randint(0, len(stored)))
    found = match_names(stored, [stored[n] for n in ids])
    assert found.tolist() == ids


def test_the_most_exact_name_decides():
    stored = ["a/1.jpg", "a/1.png", "b/1.jpg", "b/2.jpg"]
    assert match_names(stored, ["b/1.jpg", "a/1.png"]).tolist() == [2, 1]
    assert match_names(stored, ["b/1.webp", "b/2.webp"]).tolist() == [2, 3]
    assert match_names(stored, ["x/2.tiff"]).tolist() == [3]
    with pytest.raises(LookupError, match="several images are called a/1"):
        match_names(stored, ["a/1.webp"])
    with pytest.raises(LookupError, match="several images are called 1"):
        match_names(stored, ["x/1.jpg"])
    with pytest.raises(LookupError, match=r"2 have none, the first x/3\.jpg"):
        match_names(stored, ["x/3.jpg", "x/4.jpg"])

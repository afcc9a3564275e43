"""Imported packs: values equal the files, faults are counted and named, kills lose nothing."""

import math
import os
import resource
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from densefeed.storage import packs
from densefeed.storage.images import Images
from densefeed.storage.packs import (
    FIRST_DOT,
    NAME_ALONE,
    NONE,
    SHARED,
    WHOLE_STEM,
    Pack,
    import_pack,
    label_rows,
    match,
    probe,
    to_rows,
)
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError

from ..shard_files import write_tar

ROOT = Path(__file__).parent.parent.parent
CLASSES, SIDE, TOP_K = ("ant", "bee", "cow", "doe", "eel", "fox"), 4, 3
SIZES = ((40, 30), (30, 50), (32, 32))  # width, height


def a_map(seed, side=SIDE, top_k=TOP_K, num_classes=6):
    """Make a map `[2, k, S, S]` as published: descending logits and class ids, float16."""
    rng = np.random.default_rng(seed)
    logit = -np.sort(-rng.normal(4, 3, (top_k, side, side)), axis=0)
    number = np.argsort(rng.random((num_classes, side, side)), axis=0)[:top_k]
    return np.stack([logit, number]).astype(np.float16)


def write(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(torch.from_numpy(array), path) if path.suffix == ".pt" else np.save(path, array)


@pytest.fixture
def pack(tmp_path):
    """30 images of three sizes in `images/train`, and a map of each in `labels`.

    Returns (images, labels, maps by path).
    """
    maps = {}
    for number in range(30):
        path = f"{CLASSES[number % 6]}/{number:03d}.jpg"
        (tmp_path / "images" / "train" / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", SIZES[number % 3]).save(tmp_path / "images" / "train" / path)
        maps[path] = a_map(number)
        write((tmp_path / "labels" / path).with_suffix(".pt"), maps[path])
    return Images(tmp_path / "images"), tmp_path / "labels", maps


def declared(images, labels, **fields):
    matching = match(images, labels)
    side, top_k = probe(images, matching)
    said = dict(footprint="squash", axes="row-column", teacher="t", input_size=64) | fields
    return Pack(matching=matching, side=side, top_k=top_k, **said)


@pytest.mark.parametrize("axes", ["row-column", "column-row"])
def test_every_value_is_at_its_position(pack, tmp_path, axes):
    images, labels, maps = pack
    store, report = import_pack(
        images, declared(images, labels, axes=axes), tmp_path / "maps.h5", 2
    )
    assert (report.kept, report.earlier, len(report.problems), len(store)) == (30, 0, 0, 30)
    assert store.header.absent == "zero-logit"
    assert store.header.num_classes == 6
    store.check(images.fingerprint(), images.labels, images.paths, tmp_path)
    store.check_values()
    rows = store.rows(np.arange(30))
    for row, path in enumerate(store.paths()):
        for r, c, k in np.ndindex(SIDE, SIDE, TOP_K):
            at = (k, r, c) if axes == "row-column" else (k, c, r)
            assert rows.logit[row, r, c, k] == maps[path][0][at]
            assert rows.cls[row, r, c, k] == maps[path][1][at]
            every = [*rows.logit[row, r, c].tolist(), 0.0, 0.0, 0.0]  # three classes are not named
            assert rows.lse[row, r, c] == pytest.approx(
                math.log(sum(map(math.exp, every))), rel=1e-3
            )
    assert (rows.window == np.array([0, 0, 1, 1])).all()


@pytest.mark.parametrize(("footprint", "square"), [("center-crop", min), ("letterbox", max)])
def test_the_window_is_the_square_in_or_around_the_image(pack, tmp_path, footprint, square):
    images, labels, _ = pack
    store, _ = import_pack(
        images, declared(images, labels, footprint=footprint), tmp_path / "maps.h5", 2
    )
    assert store.header.geometry == footprint
    store.check_values()
    for path, window in zip(store.paths(), store.rows(np.arange(30)).window, strict=True):
        width, height = SIZES[int(path[-7:-4]) % 3]
        side = square(width, height)
        want = [
            (height - side) / 2,
            (width - side) / 2,
            (height + side) / 2,
            (width + side) / 2,
        ] / np.array([height, width] * 2)
        assert np.allclose(window, want, atol=1e-6), path


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("suffix", [".pt", ".npy"])
def test_dtypes_and_numpy_files(pack, tmp_path, dtype, suffix):
    """Logits of float32 maps, such as ReLabel's, are rounded to the nearest float16."""
    images, _, maps = pack
    fine = {
        path: array.astype(dtype) * np.array([1 + 1e-4, 1]).reshape(2, 1, 1, 1).astype(dtype)
        for path, array in maps.items()
    }
    for path, array in fine.items():
        write((tmp_path / "other" / path).with_suffix(suffix), array)
    store, _ = import_pack(images, declared(images, tmp_path / "other"), tmp_path / "maps.h5", 2)
    logit = store.rows(np.arange(30)).logit
    for row, path in enumerate(store.paths()):
        assert np.array_equal(logit[row], np.moveaxis(fine[path][0], 0, 2).astype(np.float16))


def spoil(labels, path, kind):
    """Plant a fault into the map of an image."""
    file, array = (labels / path).with_suffix(".pt"), a_map(int(path[-7:-4]))
    if kind == "no file":
        file.unlink()
    elif kind == "damaged or no map":
        file.write_bytes(file.read_bytes()[:-200])
    elif kind == "another shape":
        write(file, a_map(0, side=5))
    else:
        plane, value = {
            "NaN": (0, np.nan),
            "infinite": (0, np.inf),
            "class beyond": (1, 6),
            "class below": (1, -1),
            "class between": (1, 1.5),
            "class NaN": (1, np.nan),
            "class twice": (1, array[1, 1, 2, 3]),
        }[kind]
        array[plane, 0, 2, 3] = value
        write(file, array)


FAULTS = {
    "no file": "no file",
    "damaged or no map": "damaged or no map",
    "another shape": "another shape",
    "NaN": "a logit that is NaN",
    "infinite": "a logit that is NaN",
    "class beyond": "none of 0 to 5",
    "class below": "none of 0 to 5",
    "class between": "none of 0 to 5",
    "class NaN": "none of 0 to 5",
    "class twice": "a class twice",
}


def test_every_fault_is_counted_and_named_and_fixing_it_completes_the_import(pack, tmp_path):
    images, labels, maps = pack
    bad = dict(zip(FAULTS, images.paths[3:], strict=False))
    for kind, path in bad.items():
        spoil(labels, path, kind)
    wanted, out = declared(images, labels), tmp_path / "maps.h5"
    log = tmp_path / "problems"
    with pytest.raises(UserError) as refused:
        import_pack(images, wanted, out, 2, log=log)
    assert len(log.read_text().splitlines()) == 10
    said = str(refused.value)
    assert said.startswith("10 images have no usable map")
    for kind, path in bad.items():
        assert FAULTS[kind] in said
        assert Path(path).stem in said
    assert "none of 0 to 5, the classes of the images: 4 (" in said
    assert not out.exists()

    for path in bad.values():
        write((labels / path).with_suffix(".pt"), maps[path])
    store, report = import_pack(images, declared(images, labels), out, 2)
    assert (report.earlier, report.kept) == (20, 10)
    clean, _ = import_pack(images, declared(images, labels), tmp_path / "clean.h5", 1)
    assert (tmp_path / "clean.h5").read_bytes() == out.read_bytes()
    assert len(clean) == len(store)


def test_missing_label_names_the_images_own_class_in_every_cell(pack, tmp_path):
    images, labels, _ = pack
    for path, kind in zip(images.paths[::7], FAULTS, strict=False):
        spoil(labels, path, kind)
    store, report = import_pack(images, declared(images, labels), tmp_path / "maps.h5", 2, "label")
    assert len(report.problems) == len(images.paths[::7])
    store.check_values()
    for row in range(30):
        maps = store.rows(np.array([row]))
        filled = (maps.cls[..., 0] == images.labels[row]).all() and (maps.logit[..., 1:] == 0).all()
        assert filled == (row % 7 == 0)
        if filled:
            probability = np.exp(maps.logit[..., 0].astype(float)) / (
                np.exp(maps.logit.astype(float)).sum(-1) + 3
            )
            assert (probability > 1 - 1e-5).all()


def test_labels_filled_in_by_a_killed_run_are_not_taken_for_maps(pack, tmp_path, monkeypatch):
    images, labels, maps = pack
    (labels / images.paths[7]).with_suffix(".pt").unlink()

    def killed(_):
        raise KeyboardInterrupt

    finish = packs.ScoreMapWriter.finish
    monkeypatch.setattr(packs.ScoreMapWriter, "finish", killed)
    with pytest.raises(KeyboardInterrupt):
        import_pack(images, declared(images, labels), tmp_path / "maps.h5", 2, "label")
    monkeypatch.setattr(packs.ScoreMapWriter, "finish", finish)
    with pytest.raises(UserError, match="1 image has no usable map - no file"):
        import_pack(images, declared(images, labels), tmp_path / "maps.h5", 2)
    write((labels / images.paths[7]).with_suffix(".pt"), maps[images.paths[7]])
    _, report = import_pack(images, declared(images, labels), tmp_path / "maps.h5", 2)
    assert (report.earlier, report.kept) == (29, 1)
    import_pack(images, declared(images, labels), tmp_path / "clean.h5", 2)
    assert (tmp_path / "clean.h5").read_bytes() == (tmp_path / "maps.h5").read_bytes()
    assert not list(tmp_path.glob("*.part*"))


@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_label_rows_name_each_class_once(top_k):
    rows = label_rows(np.arange(6), 6, 2, top_k)
    assert (rows.cls[..., 0] == np.arange(6)[:, None, None]).all()
    assert all(
        len(set(cell)) == top_k and max(cell) < 6 for cell in rows.cls.reshape(-1, top_k).tolist()
    )


def test_only_ranks_that_do_not_descend_are_sorted():
    array = np.stack([a_map(0), a_map(1)])
    array[1] = array[1][:, ::-1]
    logit, cls, _, wrong = to_rows(array, 6)
    want, named, _, _ = to_rows(np.stack([a_map(0), a_map(1)]), 6)
    assert np.array_equal(logit, want)
    assert np.array_equal(cls, named)
    assert not any(rows.any() for rows in wrong.values())


def test_very_low_logits_of_all_classes_have_a_finite_logsumexp():
    """No class is left unnamed, so exp(90), infinite in float32, must not be multiplied by 0."""
    logit = np.array([-90.0, -100.0], np.float32).reshape(1, 2, 1, 1)
    maps = np.stack([logit, np.arange(2, dtype=np.float32).reshape(1, 2, 1, 1)], axis=1)
    _, _, lse, wrong = to_rows(maps, num_classes=2)
    assert lse.item() == np.float16(-90 + math.log1p(math.exp(-10)))
    assert not any(rows.any() for rows in wrong.values())


def test_more_classes_than_float16_represents_are_refused_by_name(pack, tmp_path, monkeypatch):
    images, labels, maps = pack
    monkeypatch.setattr(images, "class_names", [f"{n:05d}" for n in range(2049)])
    with pytest.raises(
        UserError, match=r"000\.pt numbers 2,049 classes in float16, which is exact only to 2,048"
    ):
        import_pack(images, declared(images, labels), tmp_path / "maps.h5", 2)
    for path, array in maps.items():
        wide = array.astype(np.float32)
        wide[1, 0] += 2040
        write((labels / path).with_suffix(".pt"), wide)
    monkeypatch.setattr(images, "class_names", [f"{n:05d}" for n in range(2060)])
    store, _ = import_pack(images, declared(images, labels), tmp_path / "wide.h5", 2)
    assert store.rows(np.arange(30)).cls.max() > 2040


def test_the_rules_that_match_files_to_images(tmp_path):
    """The whole stem first, then, as in the published code, up to the first dot of class/file.

    A file that two images match belongs to neither.
    """
    paths = {
        "ant/1.jpg": WHOLE_STEM,
        "ant/2.x.jpg": WHOLE_STEM,
        "ant/3.x.jpg": FIRST_DOT,
        "ant/4.a.jpg": SHARED,
        "ant/4.b.jpg": SHARED,
        "ant/5.jpg": SHARED,
        "ant/5.png": SHARED,
        "ant/6.jpg": NONE,
        "ant/7.jpg": SHARED,
        "ant/7.x.jpg": SHARED,
        "b.old/1.jpg": WHOLE_STEM,
        "c.old/1.jpg": FIRST_DOT,
        "d.old/1.jpg": SHARED,
        "d.old/2.jpg": SHARED,
        "e.1/1.jpg": SHARED,
        "e.2/1.jpg": SHARED,
    }
    for path in paths:
        (tmp_path / "images" / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "images" / path)
    for stem in (
        "ant/1",
        "ant/2.x",
        "ant/3",
        "ant/4",
        "ant/5",
        "ant/7",
        "b.old/1",
        "c",
        "d",
        "e",
        "ant/99",
        "yak/1",
        "zoo",
    ):
        write(tmp_path / "labels" / f"{stem}.pt", a_map(0))
    (tmp_path / "labels" / "ant" / "notes.txt").touch()
    images = Images(tmp_path / "images")
    found = match(images, tmp_path / "labels")
    assert dict(zip(images.paths, found.rule.tolist(), strict=True)) == paths
    assert (found.extra, set(found.extra_names)) == (3, {"ant/99", "yak/1", "zoo"})
    for path, rule in paths.items():
        if rule in (WHOLE_STEM, FIRST_DOT):
            assert found.file(path, rule).is_file()


@pytest.fixture
def tars(pack, tmp_path):
    """The images of `pack` in a tar as WebDataset has them: the keys are the files' names."""
    images, _, _ = pack
    files = []
    for n, path in reversed(list(enumerate(images.paths))):
        key = Path(path).stem
        files += [(f"{key}.jpg", images.read(n)), (f"{key}.cls", b"%d" % images.labels[n])]
    return Images(write_tar(tmp_path / "tars" / "train-0.tar", files).parent)


def test_outside_images_in_tars_find_their_maps_by_name(pack, tars, tmp_path):
    _, labels, maps = pack
    (labels / "ant" / "000.pt").rename(labels / "ant" / "x.pt")
    found = match(tars, labels)
    assert found.rule.tolist() == [NONE if path == "000.jpg" else NAME_ALONE for path in tars.paths]
    assert (found.extra, found.extra_names) == (1, ["ant/x"])
    (labels / "ant" / "x.pt").rename(labels / "ant" / "000.pt")
    store, _ = import_pack(tars, declared(tars, labels), tmp_path / "maps.h5", 2)
    logit = store.rows(np.arange(30)).logit
    by_name = {Path(path).name: array for path, array in maps.items()}
    for row, path in enumerate(store.paths()):
        assert np.array_equal(logit[row], np.moveaxis(by_name[path][0], 0, 2)), path


def test_outside_maps_of_one_name_are_named_for_images_without_class_folders(pack, tars, tmp_path):
    images, labels, _ = pack
    write(labels / "fox" / "000.pt", a_map(0))
    with pytest.raises(
        UserError, match=r"has ant/000\.pt and fox/000\.pt, and one image of .*tars is called 000;"
    ):
        match(tars, labels)
    # In class folders of other names.
    for folder in CLASSES:
        (images.root / "train" / folder).rename(images.root / "train" / f"the {folder}")
    (labels / "fox" / "000.pt").unlink()
    shutil.copy(images.root / "train/the ant/000.jpg", images.root / "train/the fox")
    other = Images(images.root)
    with pytest.raises(
        UserError, match=r"has ant/000\.pt, and 2 images of .* are called 000; give the class folde"
    ):
        match(other, labels)
    (images.root / "train/the fox/000.jpg").unlink()
    assert (match(Images(images.root), labels).rule == NAME_ALONE).all()


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda labels: labels.rename(labels.with_name("gone")), "is not a folder"),
        (lambda labels: [path.unlink() for path in labels.rglob("*.pt")], "holds no .pt or .npy"),
        (lambda labels: np.save(labels / "ant" / "000.npy", a_map(0)), "both .pt and .npy"),
        (
            lambda labels: [path.write_bytes(b"") for path in labels.rglob("*.pt")],
            "holds no maps that can be read: .*000.pt is empty",
        ),
        (
            lambda labels: [
                path.rename(path.with_name(f"x{path.name}")) for path in labels.rglob("*.pt")
            ],
            "has no map of any image in .*, as ant/000.jpg; the names of maps and images",
        ),
    ],
)
def test_folders_that_are_no_pack_are_refused(pack, break_it, said):
    images, labels, _ = pack
    break_it(labels)
    with pytest.raises(UserError, match=said):
        declared(images, labels)


def test_outside_the_folder_that_holds_the_class_folders_is_named(pack):
    images, labels, _ = pack
    above = labels.with_name("pub")
    above.mkdir()
    labels.rename(above / "train")
    with pytest.raises(UserError, match=rf"the class folders: --labels {above}/train$"):
        declared(images, above)


def test_a_folder_of_labels_may_have_any_name(pack, tmp_path):
    images, labels, _ = pack
    other = shutil.copytree(labels, tmp_path / os.fsdecode(b"p\xff\n"))
    store, _ = import_pack(images, declared(images, other), tmp_path / "maps.h5", 2)
    assert store.header.teacher.endswith(r"(pack p\udcff\n, axes row-column)")


def test_a_killed_import_resumes_only_with_the_same_declarations(
    pack, tmp_path, monkeypatch, command
):
    images, labels, _ = pack
    wanted, out = declared(images, labels), tmp_path / "maps.h5"
    code = f"""
import os
from pathlib import Path
from densefeed.storage import packs, score_maps
from densefeed.storage.images import Images
packs.CHUNK, writes, write = 4, [], score_maps.ScoreMapWriter.write
def count(*arguments):
    if len(writes) == 3:
        os._exit(9)
    writes.append(write(*arguments))
score_maps.ScoreMapWriter.write = count
images = Images(Path({str(images.root)!r}))
matching = packs.match(images, Path({str(labels)!r}))
pack = packs.Pack(matching=matching, side={SIDE}, top_k={TOP_K}, footprint="squash",
                  axes="row-column", teacher="t", input_size=64)
packs.import_pack(images, pack, Path({str(out)!r}), 2)
"""
    assert command("-c", code).returncode == 9
    assert not out.exists()
    for other in (dict(axes="column-row"), dict(footprint="center-crop"), dict(teacher="u")):
        with pytest.raises(UserError, match="was started with another"):
            import_pack(images, replace(wanted, **other), out, 2)
    read = []
    whole = packs.read_part
    monkeypatch.setattr(
        packs,
        "read_part",
        lambda *arguments: read.extend(arguments[2].tolist()) or whole(*arguments),
    )
    _, report = import_pack(images, wanted, out, 2)
    assert (report.earlier, report.kept) == (12, 18)
    assert sorted(read) == list(range(12, 30))
    import_pack(images, wanted, tmp_path / "clean.h5", 2)
    assert (tmp_path / "clean.h5").read_bytes() == out.read_bytes()
    assert len(ScoreMapStore(out)) == 30


def test_the_list_of_labeled_rows_is_written_whole_or_not_at_all(pack, tmp_path, monkeypatch):
    """A limit on file sizes, for this file alone, stands for a full disk after its header."""
    images, labels, _ = pack
    (labels / images.paths[7]).with_suffix(".pt").unlink()
    before, replace_file = resource.getrlimit(resource.RLIMIT_FSIZE), packs.replace_file

    @contextmanager
    def limited(path):
        with replace_file(path) as part:
            resource.setrlimit(resource.RLIMIT_FSIZE, (130, before[1]))
            try:
                yield part
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(packs, "replace_file", limited)
    with pytest.raises(OSError, match="File too large") as error:
        import_pack(images, declared(images, labels), tmp_path / "maps.h5", 2, "label")
    assert error.value.filename == str(tmp_path / "maps.h5.part.labeled.npy")
    assert [path.name for path in tmp_path.iterdir() if "labeled" in path.name] == []


def test_an_image_without_a_size_is_named(pack, tmp_path):
    images, labels, _ = pack
    Path(images.where(4)).write_bytes(b"no image")
    wanted = declared(images, labels, footprint="center-crop")
    with pytest.raises(
        UserError,
        match=f"1 image has no usable map - not readable: 1 .*{images.paths[4]}: its size",
    ):
        import_pack(images, wanted, tmp_path / "maps.h5", 2)


def test_a_pipe_or_a_device_in_a_pack_is_reported_and_does_not_hang(pack, tmp_path):
    images, labels, _ = pack
    for name, make in (
        ("ant/000.pt", os.mkfifo),
        ("bee/001.pt", lambda path: path.symlink_to("/dev/zero")),
        ("cow/002.pt", lambda path: path.symlink_to(path)),
    ):
        (labels / name).unlink()
        make(labels / name)
    with pytest.raises(UserError, match=r"3 images have no usable map - not readable: 3 ") as error:
        import_pack(images, declared(images, labels), tmp_path / "maps.h5", 2)
    assert str(error.value).count("this is not a regular file") == 2


@pytest.mark.parametrize(
    "content", [b"", b"x", *map(np.array, ([30], [-1], [[1]], [1.0]))], ids=str
)
def test_a_damaged_record_of_filled_rows_is_refused(pack, tmp_path, content):
    images, labels, _ = pack
    (labels / "ant" / "000.pt").unlink()
    wanted, out = declared(images, labels), tmp_path / "maps.h5"
    with pytest.raises(UserError, match=r"no file: 1 "):
        import_pack(images, wanted, out, 2)
    filled = tmp_path / "maps.h5.part.labeled.npy"
    filled.write_bytes(content) if isinstance(content, bytes) else np.save(filled, content)
    with pytest.raises(UserError, match=rf"{filled} .*; remove it and .*part, and run this again"):
        import_pack(images, wanted, out, 2)

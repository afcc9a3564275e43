"""Packing: pixels or bytes kept, odd files encoded anew and counted, bad ones named all at once;
stopped, killed and continued.
"""

import dataclasses
import io
import os
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from densefeed.pipelines.ffcv import FfcvSource
from densefeed.storage import indexed_jpeg
from densefeed.storage.beton import Beton, verify, verify_files
from densefeed.storage.beton_writer import BetonWriter
from densefeed.storage.images import Images
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError
from densefeed.tools.pack_dataset import Packing, main

ROOT = Path(__file__).parents[2]


def pixels(encoded):
    """What any decoder sees in a JPEG's bytes, and whether crops can be read from it alone."""
    return Image.open(io.BytesIO(encoded)).convert("RGB").tobytes(), indexed_jpeg.MARK in encoded[
        :20
    ]


def test_jpegs_keep_every_pixel_and_without_index_every_byte(folder, tmp_path):
    images = Images(folder)
    for index in (True, False):
        main(Packing(data=folder, out=tmp_path / f"{index}.beton", index=index))
        beton = Beton(tmp_path / f"{index}.beton")
        assert beton.notes["class_names"] == ["cat", "dog"]
        assert beton.notes["fingerprint"] == images.fingerprint()
        np.testing.assert_array_equal(beton.labels, images.labels)
        for n in range(len(images)):
            stored, raw = beton.image(n)
            assert not raw
            assert pixels(stored) == (pixels(images.read(n))[0], index)
            assert (stored == images.read(n)) == (not index)


def test_large_images_are_made_smaller_and_all_else_is_left_alone(folder, tmp_path, capsys):
    """The set's longer sides go from 48 to 89 px. What is made smaller keeps its shape and looks
    like Pillow's own.
    """
    images = Images(folder)
    main(Packing(data=folder, out=tmp_path / "x.beton", max_side=64, quality=90))
    beton, anew = Beton(tmp_path / "x.beton"), 0
    for n in range(len(images)):
        original = Image.open(io.BytesIO(images.read(n)))
        stored, _ = beton.image(n)
        small = Image.open(io.BytesIO(stored))
        assert (small.height, small.width) == (beton.heights[n], beton.widths[n])
        if max(original.size) <= 64:
            assert pixels(stored)[0] == original.tobytes()
        else:
            anew += 1
            scale = 64 / max(original.size)
            assert small.size == tuple(round(extent * scale) for extent in original.size)
            assert max(small.size) == 64
            want = np.asarray(original.resize(small.size, Image.Resampling.LANCZOS)).astype(int)
            assert np.abs(np.asarray(small) - want).mean() < 4  # 4:2:0 at quality 90
    assert 0 < anew < len(images)
    assert f"encoded anew as JPEG at quality 90: {anew} images" in capsys.readouterr().out


def test_quality_is_of_what_is_encoded_anew(folder, tmp_path):
    sizes = {}
    for quality in (20, 95):
        main(Packing(data=folder, out=tmp_path / f"{quality}.beton", max_side=64, quality=quality))
        sizes[quality] = Beton(tmp_path / f"{quality}.beton")
    large = [
        n
        for n, path in enumerate(Images(folder).paths)
        if max(Image.open(Images(folder).where(n)).size) > 64
    ]
    ratio = sizes[20].images.size / sizes[95].images.size
    assert (ratio[large] < 0.6).all()
    assert (np.delete(ratio, large) == 1).all()


@pytest.mark.parametrize(
    "options", [{"max_side": -1}, {"quality": 0}, {"quality": 101}, {"threads": 0}]
)
def test_settings_that_mean_nothing_are_refused(folder, tmp_path, options):
    with pytest.raises(
        UserError,
        match=r"--threads must be at least 1, --max-side and --pixels-to no less .* from 1 to 100",
    ):
        main(Packing(data=folder, out=tmp_path / "x.beton", **options))
    assert not list(tmp_path.iterdir())


def test_odd_files_become_rgb_jpegs_and_are_counted(folder, tmp_path, capsys):
    root = shutil.copytree(folder, tmp_path / "odd")
    smooth = Image.open(next((root / "train" / "cat").glob("*.jpg"))).copy()
    for name, mode, kind in (
        ("a_png_named.jpg", "RGB", "PNG"),
        ("b_cmyk.jpg", "CMYK", "JPEG"),
        ("c_alpha.png", "RGBA", "PNG"),
    ):
        smooth.convert(mode).save(root / "train" / "cat" / name, kind)
    smooth.convert("L").save(root / "train" / "cat" / "d_gray.jpg")
    main(Packing(data=root, out=tmp_path / "x.beton"))
    assert "encoded anew as JPEG at quality 95: 3 images" in capsys.readouterr().out
    source, images = FfcvSource(tmp_path / "x.beton"), Images(root)
    for n, path in enumerate(images.paths):
        stored = Image.open(io.BytesIO(Beton(tmp_path / "x.beton").image(n)[0]))
        assert stored.format == "JPEG"
        assert stored.mode in ("RGB", "L")
        want = np.asarray(Image.open(images.where(n)).convert("RGB")).astype(int)
        # quality 95 on smooth images
        assert np.abs(np.asarray(source.image(n)) - want).mean() < 2, path


@pytest.fixture
def broken(folder, tmp_path):
    """The folder with its third and fourth training image damaged; these two files, and what they
    held.
    """
    root = shutil.copytree(folder, tmp_path / "broken")
    victims = sorted((root / "train").glob("*/*.jpg"))[2:4]
    whole = [victim.read_bytes() for victim in victims]
    victims[0].write_bytes(whole[0][:100])
    victims[1].write_text("no image")
    return root, victims, whole


def test_bad_files_are_all_named_and_mended_ones_packed_alone(
    broken, folder, tmp_path, capsys, monkeypatch
):
    root, victims, whole = broken
    packing = Packing(data=root, out=tmp_path / "out" / "x.beton")
    with pytest.raises(UserError, match="2 images cannot be packed") as refused:
        main(packing)
    # The first in libjpeg's words, the second, which is no JPEG at all, in Pillow's.
    for victim, reason in zip(victims, ("premature end of jpeg file", "not an image"), strict=True):
        assert re.search(
            rf"(?i){victim.name} cannot be decoded \([^)]*{reason}\); replace or remove",
            str(refused.value),
        )
    assert not packing.out.exists()
    with pytest.raises(UserError, match="2 images cannot be packed"):
        main(packing)
    assert "continuing, 9 of 11 images are packed already" in capsys.readouterr().out
    for victim, content in zip(victims, whole, strict=True):
        victim.write_bytes(content)
    written, write = [], BetonWriter.write
    monkeypatch.setattr(
        BetonWriter,
        "write",
        lambda self, index, *rest: written.append(index) or write(self, index, *rest),
    )
    main(packing)
    assert written == [2, 3]
    assert os.listdir(packing.out.parent) == ["x.beton"]
    beton, images = Beton(packing.out), Images(folder)
    assert [pixels(beton.image(n)[0]) for n in range(11)] == [
        (pixels(images.read(n))[0], True) for n in range(11)
    ]
    assert beton.fingerprint() == images.fingerprint()
    np.testing.assert_array_equal(beton.labels, images.labels)


def test_bad_files_may_be_left_out(broken, folder, maps, tmp_path, capsys):
    root, victims, _ = broken
    main(Packing(data=root, out=tmp_path / "x.beton", on_bad_sample="skip"))
    said = capsys.readouterr().out
    assert "x.beton: 9 images" in said
    assert "left out: 2 images cannot be packed" in said
    assert all(victim.name in said for victim in victims)
    beton, images = Beton(tmp_path / "x.beton"), Images(folder)
    kept = [0, 1, *range(4, 11)]
    assert [pixels(beton.image(n)[0])[0] for n in range(9)] == [
        pixels(images.read(n))[0] for n in kept
    ]
    np.testing.assert_array_equal(beton.labels, images.labels[kept])
    assert beton.notes["left_out"] == 2
    with pytest.raises(UserError, match=r"leaves out 2 images .* pack the maps into it"):
        FfcvSource(tmp_path / "x.beton", maps)


def test_maps_packed_inside_stay_with_their_images(folder, maps, tmp_path, monkeypatch):
    """One image turns unreadable after the labeling; its size stays, so the maps are still
    accepted.
    """
    root = shutil.copytree(folder, tmp_path / "later")
    victim = sorted((root / "train").glob("*/*.jpg"))[4]
    victim.write_bytes(bytes(victim.stat().st_size))
    main(Packing(data=root, maps=maps, out=tmp_path / "x.beton", on_bad_sample="skip"))
    source, store = FfcvSource(tmp_path / "x.beton"), ScoreMapStore(maps)
    got, want = source.maps(np.arange(10)), store.rows(np.array([0, 1, 2, 3, 5, 6, 7, 8, 9, 10]))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_existing_file_is_kept(folder, tmp_path):
    (tmp_path / "x.beton").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        main(Packing(data=folder, out=tmp_path / "x.beton"))
    assert (tmp_path / "x.beton").read_text() == "mine"
    assert os.listdir(tmp_path) == ["x.beton"]


# ----------------------------------------------------------------------- stopped and continued


@pytest.mark.parametrize("other", [{"max_side": 64}, {"quality": 90}, {"index": False}])
def test_what_was_begun_otherwise_is_not_continued(broken, tmp_path, other):
    """Else a file would hold images of both kinds. The number of threads is nobody's business."""
    packing = Packing(data=broken[0], out=tmp_path / "x.beton")
    with pytest.raises(UserError, match="2 images cannot be packed"):
        main(packing)
    name = next(iter(other)).replace("_", " ")
    with pytest.raises(
        UserError, match=rf"x\.beton\.part was started with another {name}; remove it"
    ):
        main(dataclasses.replace(packing, **other))
    with pytest.raises(UserError, match="2 images cannot be packed"):
        main(dataclasses.replace(packing, threads=1))


@pytest.fixture(scope="module")
def many(folder, tmp_path_factory):
    """A training set of 600 images, and its packed bytes: long enough to be killed on the way."""
    root, jpegs = tmp_path_factory.mktemp("many"), sorted((folder / "train").glob("*/*.jpg"))
    for number in range(600):
        path = root / "images" / "train" / ("cat", "dog")[number % 2] / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.hardlink_to(jpegs[number % 11])
    main(Packing(data=root / "images", out=root / "whole.beton"))
    return root / "images", (root / "whole.beton").read_bytes()


def packing_child(packing):
    """The process number of a child that packs, no faster than an image in a millisecond."""
    child = os.fork()
    if child == 0:
        try:
            write = BetonWriter.write
            BetonWriter.write = lambda *args: time.sleep(0.001) or write(*args)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            main(packing)
        finally:
            os._exit(0)
    return child


def test_killed_at_random_it_goes_on_to_the_same_bytes(many, tmp_path):
    """kill -9 at three random sizes of the journal; the packing after that finishes with the bytes
    of an undisturbed one.
    """
    images, want = many
    out, rows = tmp_path / "x.beton", tmp_path / "x.beton.part.rows"
    for records in np.sort(np.random.default_rng().integers(1, 400, 3)).tolist():
        child = packing_child(Packing(data=images, out=out))
        while not (rows.exists() and rows.stat().st_size > 48 * records) and not out.exists():
            time.sleep(0.001)
        assert not out.exists(), "it finished before it could be killed"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    main(Packing(data=images, out=out))
    assert out.read_bytes() == want
    assert os.listdir(tmp_path) == ["x.beton"]


def test_a_second_packer_is_refused_while_the_first_works(many, tmp_path):
    images, want = many
    packing = Packing(data=images, out=tmp_path / "x.beton")
    child = packing_child(packing)
    while not (tmp_path / "x.beton.part").exists():
        time.sleep(0.001)
    os.kill(child, signal.SIGSTOP)
    with pytest.raises(UserError, match="is being packed by another process"):
        main(packing)
    os.kill(child, signal.SIGCONT)
    os.waitpid(child, 0)
    assert packing.out.read_bytes() == want


def test_terminated_it_says_how_to_go_on(many, tmp_path, command):
    images, want = many
    words = ROOT / "tools" / "pack_dataset.py", "--data", images, "--out", "x.beton", "--threads", 1
    with command.start(*words, cwd=tmp_path) as done:
        rows = tmp_path / "x.beton.part.rows"
        while not (rows.exists() and rows.stat().st_size > 3000):  # its line of JSON is shorter
            time.sleep(0.001)
        done.send_signal(signal.SIGTERM)
        _, said = done.communicate(timeout=60)
    assert done.returncode == 130, said
    assert "x.beton.part keeps" in said
    assert "run the same command to go on" in said
    assert "Traceback" not in said
    main(Packing(data=images, out=tmp_path / "x.beton"))
    assert (tmp_path / "x.beton").read_bytes() == want


def test_images_that_changed_meanwhile_are_found(many, tmp_path):
    """Same names, labels and sizes, other content: only preparing packed images again can tell."""
    root = shutil.copytree(many[0], tmp_path / "images")
    child = packing_child(Packing(data=root, out=tmp_path / "x.beton"))
    rows = tmp_path / "x.beton.part.rows"
    while not (rows.exists() and rows.stat().st_size > 48 * 30):
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    first = Images(root).where(0)
    mirrored = bytearray(Path(first).read_bytes())
    mirrored[-30] ^= 255
    Path(first).write_bytes(mirrored)
    with pytest.raises(
        UserError, match=r"x\.beton\.part holds another version of image 0; remove it"
    ):
        main(Packing(data=root, out=tmp_path / "x.beton"))
    Path(first).rename(Path(first).with_name("zzz.jpg"))
    with pytest.raises(UserError, match=r"was started with another (fingerprint|images)"):
        main(Packing(data=root, out=tmp_path / "x.beton"))


def test_a_dangling_link_is_a_bad_sample_like_any_other(folder, tmp_path, capsys):
    root = shutil.copytree(folder, tmp_path / "linked")
    (root / "train" / "cat" / "zz.jpg").symlink_to(tmp_path / "nowhere.jpg")
    main(Packing(data=root, out=tmp_path / "x.beton", on_bad_sample="skip"))
    assert "zz.jpg" in capsys.readouterr().out
    assert len(Beton(tmp_path / "x.beton")) == 11


def test_an_edited_index_is_made_anew_even_where_bytes_are_kept(folder, tmp_path):
    """A comment behind our index: every decoder reads the file, but its index is not true any
    more.
    """
    root = shutil.copytree(folder, tmp_path / "edited")
    victim = sorted((root / "train").glob("*/*.jpg"))[2]
    indexed = indexed_jpeg.transcode(victim.read_bytes())
    behind = 4 + int.from_bytes(indexed[4:6], "big")
    victim.write_bytes(indexed[:behind] + b"\xff\xfe\0\x09comment" + indexed[behind:])
    main(Packing(data=root, out=tmp_path / "x.beton", index=False))
    assert verify(tmp_path / "x.beton", 1) == []


def test_verify_wants_files():
    with pytest.raises(UserError, match=r"no \.beton file was named"):
        verify_files(())

"""Packing: pixels and bytes are kept, odd files encoded, bad ones listed; runs are continued."""

import dataclasses
import io
import os
import re
import shutil
import signal
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from densefeed import native
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.relabel.run import Labeling, begin
from densefeed.storage import indexed_jpeg
from densefeed.storage.beton import Beton
from densefeed.storage.beton_format import JPEG, PLANES, RAW
from densefeed.storage.beton_verify import print_list, verify, verify_files
from densefeed.storage.beton_writer import BetonWriter
from densefeed.storage.images import Images
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError
from densefeed.tools.pack_dataset import Packing, main

from ..stores import write_reordered

ROOT = Path(__file__).parents[2]


def pixels(encoded):
    """Return the pixels of a JPEG, by any decoder, and whether it has an index."""
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
            stored, mode = beton.image(n)
            assert mode == JPEG
            assert pixels(stored) == (pixels(images.read(n))[0], index)
            assert (stored == images.read(n)) == (not index)


def test_outside_masks_are_not_left_out_silently(masked, tmp_path):
    with pytest.raises(UserError, match=r"by --dataset masks, and a \.beton holds none; train"):
        main(Packing(data=masked[0], dataset="masks", out=tmp_path / "x.beton"))
    assert not (tmp_path / "x.beton").exists()


@pytest.mark.parametrize("kind", ["folder", "tar", "list", "beton"])
def test_outside_one_class_alone_is_neither_packed_nor_labeled(folder, packed, tmp_path, kind):
    data = shutil.copytree(folder / "train" / "cat", tmp_path / "one" / "cat").parent
    dataset = ""
    if kind == "tar":
        shutil.make_archive(tmp_path / "tars" / "x", "tar", data)
        data = tmp_path / "tars"
    elif kind == "list":
        names = [f"cat/{path.name}" for path in sorted((data / "cat").iterdir())]
        (tmp_path / "x.txt").write_text("\n".join(names))
        dataset = f"list/{tmp_path / 'x.txt'}"
    elif kind == "beton":
        # Packed with --split val, of a data set whose other split has more classes.
        shutil.copytree(folder / "train", tmp_path / "two" / "train")
        shutil.copytree(data, tmp_path / "two" / "val")
        data = tmp_path / "val.beton"
        main(Packing(data=tmp_path / "two", split="val", out=data))
    refused = r" has one class alone, 'cat'; give images of two classes or more: the folder that"
    with pytest.raises(UserError, match=refused):
        main(Packing(data=data, dataset=dataset, out=tmp_path / "x.beton"))
    assert not (tmp_path / "x.beton").exists()
    labeling = Labeling(
        data=data, dataset=dataset, teacher=("test_resnet",), out=tmp_path / "maps.h5"
    )
    with pytest.raises(UserError, match=refused):
        begin(labeling, shows=False)


def test_outside_a_list_of_one_class_of_another_number_is_not_packed(folder, tmp_path):
    """The classes before it have no name and no image."""
    names = [f"cat/{path.name} 3" for path in sorted((folder / "train/cat").iterdir())]
    (tmp_path / "x.txt").write_text("\n".join(names))
    packing = Packing(
        data=folder / "train", dataset=f"list/{tmp_path / 'x.txt'}", out=tmp_path / "x.beton"
    )
    with pytest.raises(UserError, match=r"one class alone, '.*'; give images of two classes"):
        main(packing)
    (tmp_path / "x.txt").write_text("\n".join([*names[1:], names[0][:-1] + "1"]))
    main(packing)


def epoch(path):
    """Return the batches of a training epoch."""
    source = FfcvSource(path)
    plan = EpochPlan(
        num_samples=len(source.labels), batch=4, seed=0, mode="train", sizes=((0, 32),)
    )
    with closing(ThreadedLoader(source, plan, 2)) as loader:
        return list(loader.batches(0))


def test_planes_give_the_batches_of_the_jpegs(folder, tmp_path):
    """Images of several codings and one of raw pixels; `image` is close to Pillow's pixels."""
    root = shutil.copytree(folder, tmp_path / "data")
    files = sorted((root / "train").glob("*/*.jpg"))
    for n, options in enumerate(({"mode": "L"}, {"subsampling": 0}, {"progressive": True})):
        image = Image.open(files[n]).convert(options.pop("mode", "RGB"))
        image.save(files[n], quality=90, **options)
    Image.open(files[5]).save(files[5].with_suffix(".png"))
    files[5].unlink()
    paths = {form: tmp_path / f"{form}.beton" for form in ("jpeg", "planes")}
    for form, path in paths.items():
        main(Packing(data=root, out=path, form=form))
    kinds = [[RAW if n == 5 else kind for n in range(11)] for kind in (JPEG, PLANES)]
    assert [Beton(path).modes.tolist() for path in paths.values()] == kinds
    for jpeg, planes in zip(*map(epoch, paths.values()), strict=True):
        assert all(map(torch.equal, planes.tensors.values(), jpeg.tensors.values()))
    jpeg, planes = map(FfcvSource, paths.values())
    assert jpeg.fingerprint == planes.fingerprint
    for n in range(11):
        difference = np.asarray(jpeg.image(n)).astype(int) - np.asarray(planes.image(n))
        assert np.abs(difference).mean() < 0.6
    assert planes.estimate_planes() == 0 < jpeg.estimate_planes()


def test_damaged_planes_are_found(folder, tmp_path):
    main(Packing(data=folder, out=tmp_path / "x.beton", form="planes"))
    assert verify(tmp_path / "x.beton", 1) == []
    with closing(Beton(tmp_path / "x.beton")) as beton:
        at, size = int(beton.images.offset[3]), int(beton.images.size[3])
    content = bytearray((tmp_path / "x.beton").read_bytes())
    content[at + size - 1] ^= 1
    # The headers of other images: the mark, and whether the planes are Y, Cb and Cr.
    content[int(beton.images.offset[7])] ^= 1
    content[int(beton.images.offset[9]) + 7] ^= 1
    (tmp_path / "x.beton").write_bytes(content)
    for number, line in zip((3, 7, 9), verify(tmp_path / "x.beton", 1), strict=True):
        what = "is damaged: its planes do not match their checksum; pack or copy"
        assert f"image {number} {what}" in line
    with pytest.raises(UserError, match=r"image 7 cannot be decoded .its header is not one of"):
        epoch(tmp_path / "x.beton")


def test_images_whose_planes_exceed_a_page_stay_jpegs(tmp_path, capsys):
    """2,000 x 3,000 pixels are 9 MB in 4:2:0, and a page has 8.4 MB."""
    for name, size in (("a", (2000, 3000)), ("b", (200, 300))):
        (tmp_path / name).mkdir()
        Image.new("RGB", size, "red").save(tmp_path / name / "0.jpg")
    packing = Packing(data=tmp_path, out=tmp_path / "x.beton", form="planes")
    with pytest.raises(UserError, match="--form planes needs no index; leave out --no-index"):
        main(dataclasses.replace(packing, index=False))
    main(packing)
    assert Beton(tmp_path / "x.beton").modes.tolist() == [JPEG, PLANES]
    said = "stored as JPEG: 1 images whose planes exceed a page of 8,388,608 bytes"
    assert said in capsys.readouterr().out


def test_only_large_images_are_shrunk(folder, tmp_path, capsys):
    """The longer sides are 48 to 89 px. Shrunk images keep their shape and look like Pillow's."""
    images = Images(folder)
    main(Packing(data=folder, out=tmp_path / "x.beton", max_side=64, quality=90))
    beton, encoded = Beton(tmp_path / "x.beton"), 0
    for n in range(len(images)):
        original = Image.open(io.BytesIO(images.read(n)))
        stored, _ = beton.image(n)
        small = Image.open(io.BytesIO(stored))
        assert (small.height, small.width) == (beton.heights[n], beton.widths[n])
        if max(original.size) <= 64:
            assert pixels(stored)[0] == original.tobytes()
        else:
            encoded += 1
            scale = 64 / max(original.size)
            assert small.size == tuple(round(extent * scale) for extent in original.size)
            assert max(small.size) == 64
            want = np.asarray(original.resize(small.size, Image.Resampling.LANCZOS)).astype(int)
            assert np.abs(np.asarray(small) - want).mean() < 4  # 4:2:0 at quality 90
    assert 0 < encoded < len(images)
    assert f"encoded again as JPEG at quality 90: {encoded} images" in capsys.readouterr().out


def test_quality_applies_only_to_images_that_are_encoded_again(folder, tmp_path):
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
    ("options", "message"),
    [
        ({"max_side": -1}, "--max-side is -1, and must be at least 0"),
        ({"pixels_to": -1}, "--pixels-to is -1, and must be at least 0"),
        ({"quality": 0}, "--quality is 0, and must be from 1 to 100"),
        ({"quality": 101}, "--quality is 101, and must be from 1 to 100"),
        ({"threads": 0}, "--threads is 0, and must be at least 1"),
    ],
)
def test_options_out_of_range_are_refused(folder, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        main(Packing(data=folder, out=tmp_path / "x.beton", **options))
    assert not list(tmp_path.iterdir())


def test_pixels_are_not_kept_of_sides_that_a_beton_cannot_state(tmp_path):
    """A side has 16 bits."""
    for label, width in (("a", 70_000), ("b", 2)):
        (tmp_path / "data/train" / label).mkdir(parents=True)
        Image.new("RGB", (width, 2)).save(tmp_path / "data/train" / label / "0.png")
    with pytest.raises(UserError, match=r"0.png cannot be encoded as JPEG .*--max-side of at most"):
        main(Packing(data=tmp_path / "data", out=tmp_path / "x.beton", pixels_to=70_000))


def test_pixels_that_exceed_a_page_become_a_jpeg(tmp_path):
    for label, side in (("a", 1800), ("b", 20)):
        (tmp_path / "data/train" / label).mkdir(parents=True)
        Image.new("RGB", (side, side)).save(tmp_path / "data/train" / label / "0.png")
    main(Packing(data=tmp_path / "data", out=tmp_path / "x.beton", pixels_to=2000))
    with closing(Beton(tmp_path / "x.beton")) as beton:
        assert beton.modes.tolist() == [JPEG, RAW]


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
    assert "encoded again as JPEG at quality 95: 3 images" in capsys.readouterr().out
    source, images = FfcvSource(tmp_path / "x.beton"), Images(root)
    for n, path in enumerate(images.paths):
        stored = Image.open(io.BytesIO(Beton(tmp_path / "x.beton").image(n)[0]))
        assert stored.format == "JPEG"
        assert stored.mode in ("RGB", "L")
        want = np.asarray(Image.open(images.where(n)).convert("RGB")).astype(int)
        # The bound fits quality 95 on smooth images.
        assert np.abs(np.asarray(source.image(n)) - want).mean() < 2, path


@pytest.fixture
def broken(folder, tmp_path):
    """The folder with its third and fourth training image damaged, these files and their bytes."""
    root = shutil.copytree(folder, tmp_path / "broken")
    victims = sorted((root / "train").glob("*/*.jpg"))[2:4]
    whole = [victim.read_bytes() for victim in victims]
    victims[0].write_bytes(whole[0][:100])
    victims[1].write_text("no image")
    return root, victims, whole


def test_all_bad_files_are_listed_and_only_repaired_ones_are_packed_next(
    broken, folder, tmp_path, capsys, monkeypatch
):
    root, victims, whole = broken
    packing = Packing(data=root, out=tmp_path / "out" / "x.beton")
    with pytest.raises(UserError, match="2 images cannot be packed") as refused:
        main(packing)
    # libjpeg reports the first. Pillow reports the second, which is not a JPEG at all.
    for victim, reason in zip(victims, ("premature end of jpeg file", "not an image"), strict=True):
        assert re.search(
            rf"(?i){victim.name} cannot be decoded \([^)]*{reason}[^)]*\); replace or remove",
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
    assert beton.fingerprint == images.fingerprint()
    np.testing.assert_array_equal(beton.labels, images.labels)


def test_maps_of_another_split_are_refused_by_its_name(folder, maps, tmp_path):
    message = r"than the split val of .* \(11 maps for 5 images, fingerprints differ\); give"
    with pytest.raises(UserError, match=message):
        main(Packing(data=folder, split="val", maps=maps, out=tmp_path / "val.beton"))
    assert not os.listdir(tmp_path)


def test_after_a_bad_file_is_removed_packing_starts_over_as_the_error_says(folder, tmp_path):
    root, out = shutil.copytree(folder, tmp_path / "data"), tmp_path / "x.beton"
    victim = root / "train" / "cat" / "p.jpg"
    os.mkfifo(victim)
    with pytest.raises(UserError) as refused:
        main(Packing(data=root, out=out))
    assert str(refused.value) == (
        f"1 image cannot be packed: {victim}: this is not a regular file but a pipe, socket or "
        "device; remove it; replace this file and run this command again, which packs only it, or "
        f"add --on-bad-sample skip; after removing an image, remove {out}.part and "
        f"{out}.part.rows too"
    )
    victim.unlink()
    with pytest.raises(
        UserError, match=r"a packing that differs in images; remove it and x\.beton"
    ):
        main(Packing(data=root, out=out))
    for end in (".part", ".part.rows"):
        Path(f"{out}{end}").unlink()
    main(Packing(data=root, out=out))
    assert len(Beton(out)) == 11


def test_bad_files_can_be_left_out(broken, folder, maps, tmp_path, capsys):
    root, victims, _ = broken
    main(Packing(data=root, out=tmp_path / "x.beton", on_bad_sample="skip"))
    printed = capsys.readouterr().out
    assert "x.beton: 9 images" in printed
    assert "left out: 2 images cannot be packed" in printed
    assert all(victim.name in printed for victim in victims)
    beton, images = Beton(tmp_path / "x.beton"), Images(folder)
    kept = [0, 1, *range(4, 11)]
    assert [pixels(beton.image(n)[0])[0] for n in range(9)] == [
        pixels(images.read(n))[0] for n in kept
    ]
    np.testing.assert_array_equal(beton.labels, images.labels[kept])
    assert beton.notes["left_out"] == 2
    with pytest.raises(UserError, match=r"leaves out 2 images .* pack the maps into it"):
        FfcvSource(tmp_path / "x.beton", maps)


def test_outside_a_class_that_skipping_empties_is_named(folder, tmp_path, capsys):
    root = shutil.copytree(folder, tmp_path / "later")
    for victim in (root / "train" / "dog").glob("*"):
        victim.write_bytes(b"x")
    main(Packing(data=root, out=tmp_path / "x.beton", on_bad_sample="skip"))
    assert f"{tmp_path / 'x.beton'} has no images of 1 classes: dog\n" in capsys.readouterr().out


def test_packed_score_maps_stay_with_their_images(folder, maps, tmp_path):
    """One image becomes unreadable after the labeling.

    Its file size is the same, so the score maps are still accepted.
    """
    root = shutil.copytree(folder, tmp_path / "later")
    victim = sorted((root / "train").glob("*/*.jpg"))[4]
    victim.write_bytes(bytes(victim.stat().st_size))
    main(Packing(data=root, maps=maps, out=tmp_path / "x.beton", on_bad_sample="skip"))
    source, store = FfcvSource(tmp_path / "x.beton"), ScoreMapStore(maps)
    got, want = source.maps(np.arange(10)), store.rows(np.array([0, 1, 2, 3, 5, 6, 7, 8, 9, 10]))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_existing_file_is_not_overwritten(folder, tmp_path):
    (tmp_path / "x.beton").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        main(Packing(data=folder, out=tmp_path / "x.beton"))
    assert (tmp_path / "x.beton").read_text() == "mine"
    assert os.listdir(tmp_path) == ["x.beton"]


# ----------------------------------------------------------------------- stopped and continued


@pytest.mark.parametrize(
    "other", [{"max_side": 64}, {"quality": 90}, {"index": False}, {"form": "planes"}]
)
def test_a_run_with_other_options_is_not_continued(broken, tmp_path, other):
    """Otherwise a file would have images of both kinds. The number of threads may change."""
    packing = Packing(data=broken[0], out=tmp_path / "x.beton")
    with pytest.raises(UserError, match="2 images cannot be packed"):
        main(packing)
    name = next(iter(other)).replace("_", " ")
    with pytest.raises(
        UserError,
        match=rf"x\.beton\.part was started by a packing that differs in {name}; remove it",
    ):
        main(dataclasses.replace(packing, **other))
    with pytest.raises(UserError, match="2 images cannot be packed"):
        main(dataclasses.replace(packing, threads=1))


@pytest.fixture(scope="module")
def many(folder, tmp_path_factory):
    """A training set of 600 images, enough to kill a run in the middle, and its packed bytes."""
    root, jpegs = tmp_path_factory.mktemp("many"), sorted((folder / "train").glob("*/*.jpg"))
    for number in range(600):
        path = root / "images" / "train" / ("cat", "dog")[number % 2] / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.hardlink_to(jpegs[number % 11])
    main(Packing(data=root / "images", out=root / "whole.beton"))
    return root / "images", (root / "whole.beton").read_bytes()


def wait_until(condition):
    """Poll a condition; fail after a minute, since the packing may have died."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the packing does not proceed"
        time.sleep(0.001)


def longer_than(path, size):
    return path.exists() and path.stat().st_size > size


def fork_packing(packing):
    """Fork a process that packs at most an image per millisecond; return its process id."""
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


def test_a_run_killed_at_random_times_continues_to_the_same_bytes(many, tmp_path):
    """It is killed at three random sizes of the journal with SIGKILL.

    The run after that writes the bytes of an uninterrupted one.
    """
    images, want = many
    out, rows = tmp_path / "x.beton", tmp_path / "x.beton.part.rows"
    for records in np.sort(np.random.default_rng().integers(1, 400, 3)).tolist():
        child = fork_packing(Packing(data=images, out=out))
        wait_until(lambda size=48 * records: longer_than(rows, size) or out.exists())
        assert not out.exists(), "it finished before it could be killed"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    main(Packing(data=images, out=out))
    assert out.read_bytes() == want
    assert os.listdir(tmp_path) == ["x.beton"]


def test_a_second_packer_is_refused_while_the_first_works(many, tmp_path):
    images, want = many
    packing = Packing(data=images, out=tmp_path / "x.beton")
    child = fork_packing(packing)
    wait_until((tmp_path / "x.beton.part").exists)
    os.kill(child, signal.SIGSTOP)
    with pytest.raises(UserError, match="is being packed by another process"):
        main(packing)
    os.kill(child, signal.SIGCONT)
    os.waitpid(child, 0)
    assert packing.out.read_bytes() == want


def test_a_terminated_run_prints_how_to_continue(many, tmp_path, command):
    images, want = many
    words = ROOT / "tools" / "pack_dataset.py", "--data", images, "--out", "x.beton", "--threads", 1
    with command.start(*words, cwd=tmp_path) as done:
        rows = tmp_path / "x.beton.part.rows"
        wait_until(lambda: longer_than(rows, 3000))  # longer than its first line
        done.send_signal(signal.SIGTERM)
        _, printed = done.communicate(timeout=60)
    assert done.returncode == 130, printed
    assert "x.beton.part keeps" in printed
    assert "run the same command to continue" in printed
    assert "Traceback" not in printed
    main(Packing(data=images, out=tmp_path / "x.beton"))
    assert (tmp_path / "x.beton").read_bytes() == want


def test_outside_the_size_that_is_printed_is_that_on_the_disk(folder, tmp_path, capsys):
    """11 small images, where FFCV's pages have 8 MiB each."""
    main(Packing(data=folder, out=tmp_path / "x.beton"))
    size = float(re.search(r"images, ([\d.]+) MiB", capsys.readouterr().out)[1])
    assert size < 1


def test_images_that_changed_since_are_found(many, tmp_path):
    """Names, labels and sizes are equal; only preparing packed images again shows the change."""
    root = shutil.copytree(many[0], tmp_path / "images")
    child = fork_packing(Packing(data=root, out=tmp_path / "x.beton"))
    rows = tmp_path / "x.beton.part.rows"
    wait_until(lambda: longer_than(rows, 48 * 30))
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
    with pytest.raises(UserError, match=r"differs in (fingerprint|images)"):
        main(Packing(data=root, out=tmp_path / "x.beton"))


def test_a_dangling_link_is_a_bad_sample(folder, tmp_path, capsys):
    root = shutil.copytree(folder, tmp_path / "linked")
    (root / "train" / "cat" / "zz.jpg").symlink_to(tmp_path / "nowhere.jpg")
    main(Packing(data=root, out=tmp_path / "x.beton", on_bad_sample="skip"))
    assert "zz.jpg" in capsys.readouterr().out
    assert len(Beton(tmp_path / "x.beton")) == 11


def test_an_outdated_index_is_rewritten_even_with_no_index(folder, tmp_path):
    """A comment after our index: every decoder reads the file, but its index is wrong."""
    root = shutil.copytree(folder, tmp_path / "edited")
    victim = sorted((root / "train").glob("*/*.jpg"))[2]
    indexed = indexed_jpeg.transcode(victim.read_bytes())
    behind = 4 + int.from_bytes(indexed[4:6], "big")
    victim.write_bytes(indexed[:behind] + b"\xff\xfe\0\x09comment" + indexed[behind:])
    main(Packing(data=root, out=tmp_path / "x.beton", index=False))
    assert verify(tmp_path / "x.beton", 1) == []


def test_verify_needs_files():
    with pytest.raises(UserError, match=r"no \.beton file was named"):
        verify_files(())


def flip_bits(file, count=400):
    """Return copies of a JPEG, each with a bit of its compressed data flipped."""
    rng, start = np.random.default_rng(0), file.index(b"\xff\xda") + 14
    places = rng.integers(start, len(file) - 2, count).tolist()
    return [file[:at] + bytes([file[at] ^ 1 << rng.integers(8)]) + file[at + 1 :] for at in places]


@pytest.fixture
def damaged(folder, tmp_path):
    """The folder with one undamaged image, and others of every kind of damage, by name."""
    root = shutil.copytree(folder, tmp_path / "damaged")
    cat = root / "train" / "cat"
    for file in root.glob("train/*/*"):
        file.unlink()
    # A photograph of some detail, in which a decoder that lost its place finds codes for long.
    rng = np.random.default_rng(0)
    detail = rng.normal(128, 60, (60, 80, 3)).clip(0, 255).astype(np.uint8)
    image = Image.fromarray(detail)
    for name in ("whole.jpg", "cut.png", "cut.webp", "cut.jpg", "cmyk.jpg", "progressive.jpg"):
        picture = image.convert("CMYK") if name == "cmyk.jpg" else image
        kind = name.rpartition(".")[2].replace("jpg", "jpeg")
        picture.save(cat / name, kind, progressive=name == "progressive.jpg")
    (root / "train" / "dog" / "whole.jpg").write_bytes((cat / "whole.jpg").read_bytes())
    for file in cat.glob("cut.*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])
    # Pillow decodes these without a word.
    for name, fault in (
        ("cmyk.jpg", "Corrupt JPEG data"),
        ("progressive.jpg", "Corrupt JPEG data"),
        ("whole.jpg", "extraneous bytes"),
    ):
        for file in flip_bits((cat / name).read_bytes()):
            said = scan(file)
            if fault in said and ("extraneous" in said) == (fault == "extraneous bytes"):
                break
        else:
            raise AssertionError(name)
        Image.open(io.BytesIO(file)).load()
        (cat / name.replace("whole", "warned")).write_bytes(file)
    return root


def scan(file):
    """Return what libjpeg says of a JPEG, or an empty string."""
    try:
        return native.scan(file)
    except native.JpegError as error:
        return str(error)


DAMAGED = ("cmyk.jpg", "cut.jpg", "cut.png", "cut.webp", "progressive.jpg")


def test_outside_verify_of_a_folder_lists_its_damaged_images(damaged, command):
    cat = damaged / "train" / "cat"
    done = command("tools/beton.py", "verify", damaged / "train")
    assert done.returncode == 2
    lines = done.stdout.splitlines()
    assert [line for line in lines if "cannot be decoded (" in line] == [
        line for line in lines for name in DAMAGED if line.startswith(f"{cat / name} cannot be")
    ]
    assert sum("cannot be decoded (" in line for line in lines) == len(DAMAGED)
    assert any(
        line.startswith(f"{cat / 'warned.jpg'}: Corrupt JPEG data: ") and "extraneous" in line
        for line in lines
    )
    assert "8 images, " in done.stdout
    assert "libjpeg warns of 1 images" in done.stdout
    assert f"damage was found in {damaged / 'train'} (5); it is listed above" in done.stderr
    for name in DAMAGED:
        (cat / name).unlink()
    done = command("tools/beton.py", "verify", damaged / "train")
    # A warning is no fault: some encoders leave bytes behind the last row.
    assert done.returncode == 0, done.stderr
    assert f"{damaged / 'train'}: no faults" in done.stdout
    done = command("tools/beton.py", "verify", damaged / "nowhere", "--split", "val")
    assert done.returncode == 2
    assert "--dataset and --split are of folders of images" in done.stderr


def test_outside_a_terminal_gets_the_first_damaged_images(monkeypatch, capsys):
    lines = [f"{n}.jpg" for n in range(60)]
    print_list(lines)
    assert capsys.readouterr().out.splitlines() == lines
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_list(lines)
    out = capsys.readouterr().out.splitlines()
    assert out[:-1] == lines[:50]
    assert out[-1].startswith("and 10 more; ")


def test_outside_damage_that_pillow_ignores_is_not_packed(damaged, tmp_path, capsys):
    """Also where Pillow decodes the image, to encode it again."""
    for options in ({}, {"max_side": 40}, {"form": "planes"}):
        with pytest.raises(UserError, match="5 images cannot be packed") as refused:
            main(Packing(data=damaged, out=tmp_path / "x.beton", **options))
        assert all(name in str(refused.value) for name in DAMAGED)
        for part in tmp_path.glob("x.beton*"):
            part.unlink()
    main(Packing(data=damaged, out=tmp_path / "x.beton", on_bad_sample="skip"))
    said = capsys.readouterr().err
    assert "warning: libjpeg says that 1 packed image may be damaged: " in said
    assert "warned.jpg (Corrupt JPEG data: " in said


def test_outside_split_of_a_folder_without_splits_is_said_not_to_be_read(folder, tmp_path, capsys):
    (tmp_path / "names.txt").write_text("val/cat/000.jpg 0\n")
    out = dict(out=tmp_path / "x.beton", split="val")
    for data, dataset in ((folder / "val", ""), (folder, f"list/{tmp_path / 'names.txt'}")):
        main(Packing(data=data, dataset=dataset, **out))
        assert "warning: --split val is not read, because" in capsys.readouterr().err
        (tmp_path / "x.beton").unlink()
    main(Packing(data=folder, **out))
    assert "--split" not in capsys.readouterr().err


def test_outside_a_busy_machine_is_told_when_packing_starts(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.getloadavg", lambda: (1e4, 0.0, 0.0))
    main(Packing(data=folder, out=tmp_path / "x.beton"))
    assert capsys.readouterr().err.count("load average 10000.0 on ") == 1


def test_outside_maps_in_another_order_are_not_packed(folder, random_maps, tmp_path):
    images = Images(folder)
    rows = np.arange(len(images))[::-1]
    out = write_reordered(tmp_path / "m.h5", images, random_maps(len(rows), 6, 2, 2), rows)
    with pytest.raises(UserError, match=r"m\.h5 has .* maps of other images than .*relabel"):
        main(Packing(data=folder, out=tmp_path / "packed.beton", maps=out))
    assert not (tmp_path / "packed.beton").exists()

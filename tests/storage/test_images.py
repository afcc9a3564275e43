"""Images are in timm's order, and invalid input is refused."""

import io

import numpy as np
import pytest
from PIL import Image
from timm.data import ImageDataset

from densefeed.storage.images import Images, decode
from densefeed.system.errors import UserError


def test_order_labels_and_bytes_equal_timm(folder):
    images, theirs = Images(folder, split="train"), ImageDataset(str(folder / "train"))
    assert len(images) == len(theirs) == 11
    assert images.class_names == ["cat", "dog"]
    for index in range(len(images)):
        pixels, label = theirs[index]
        assert images.labels[index] == label
        np.testing.assert_array_equal(
            np.asarray(decode(images.read(index), "")), np.asarray(pixels)
        )
        assert images.where(index).endswith(images.paths[index])


def test_the_fingerprint_depends_on_names_labels_and_sizes(folder, tmp_path):
    import shutil

    same = shutil.copytree(folder, tmp_path / "same")
    assert Images(same).fingerprint() == Images(folder).fingerprint()
    victim = sorted((same / "train").glob("*/*.jpg"))[0]
    victim.write_bytes(victim.read_bytes() + b"\0")
    assert Images(same).fingerprint() != Images(folder).fingerprint()
    victim.rename(victim.with_name("zzz.jpg"))
    assert Images(same).fingerprint() != Images(folder).fingerprint()


def test_missing_and_empty_folders_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"nowhere is not a folder"):
        Images(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no images"):
        Images(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(UserError, match=r"no images"):
        Images(tmp_path)


@pytest.mark.parametrize("kind", ["text", "empty", "cut"])
def test_incomplete_images_are_refused_by_name(kind):
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(buffer, "JPEG")
    encoded = {
        "text": b"hello",
        "empty": b"",
        "cut": buffer.getvalue()[: len(buffer.getvalue()) // 2],
    }[kind]
    with pytest.raises(UserError, match=r"a/b.jpg cannot be decoded .*; replace or remove"):
        decode(encoded, "a/b.jpg")


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
def test_every_jpeg_becomes_rgb(mode):
    buffer = io.BytesIO()
    Image.new("RGB", (20, 10), (200, 30, 60)).convert(mode).save(buffer, "JPEG", quality=95)
    image = decode(buffer.getvalue(), "")
    assert image.mode == "RGB"
    assert image.size == (20, 10)


def test_16_bit_images_are_scaled_and_not_clipped():
    buffer = io.BytesIO()
    ramp = np.linspace(0, 65535, 256 * 8).astype(np.uint16).reshape(8, 256)
    Image.fromarray(ramp).save(buffer, "PNG")
    got = np.asarray(decode(buffer.getvalue(), ""))
    assert np.abs(got[..., 0] - ramp / 257).max() < 1
    assert (got[..., 0] == got[..., 2]).all()


def test_a_missing_split_is_refused(folder, tmp_path):
    """timm would read all splits as one.

    Training images would be used for validation, or validation images packed for training.
    """
    import shutil

    only = tmp_path / "only"
    shutil.copytree(folder / "train", only / "train")
    with pytest.raises(UserError, match=r"holds train but no folder 'val'"):
        Images(only, split="val")
    with pytest.raises(UserError, match=r"holds train, val but no folder 'vall'"):
        Images(folder, split="vall")
    assert len(Images(only / "train", split="val")) == 11  # a folder of classes has no splits
    (only / "train").rename(only / "training")
    assert len(Images(only, split="train")) == 11  # timm's synonym
    with pytest.raises(UserError, match=r"--dataset bogus/x"):
        Images(folder, dataset="bogus/x")

"""Packing: bytes kept, odd files transcoded and counted, unreadable ones named all at once."""

import io
import shutil

import numpy as np
import pytest
from densefeed.pipelines.beton import Beton
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.relabel.files import UserError
from densefeed.relabel.images import Images
from densefeed.tools.pack_dataset import Packing, main
from PIL import Image


def test_jpegs_keep_their_bytes(folder, tmp_path):
    main(Packing(data=folder, out=tmp_path / "x.beton"))
    beton, images = Beton(tmp_path / "x.beton"), Images(folder)
    assert beton.notes["class_names"] == ["cat", "dog"]
    assert beton.notes["fingerprint"] == images.fingerprint()
    np.testing.assert_array_equal(beton.labels, images.labels)
    for n in range(len(images)):
        assert beton.image(n) == (images.read(n), False)


def test_odd_files_become_rgb_jpegs_and_are_counted(folder, tmp_path, capsys):
    root = shutil.copytree(folder, tmp_path / "odd")
    smooth = Image.open(next((root / "train" / "cat").glob("*.jpg"))).copy()
    for name, mode, kind in (("a_png_named.jpg", "RGB", "PNG"), ("b_cmyk.jpg", "CMYK", "JPEG"), ("c_alpha.png", "RGBA", "PNG")):
        smooth.convert(mode).save(root / "train" / "cat" / name, kind)
    smooth.convert("L").save(root / "train" / "cat" / "d_grey.jpg")
    main(Packing(data=root, out=tmp_path / "x.beton"))
    assert "encoded anew as JPEG at quality 95: 3 images" in capsys.readouterr().out
    source, images = FfcvSource(tmp_path / "x.beton"), Images(root)
    for n, path in enumerate(images.paths):
        stored = Image.open(io.BytesIO(Beton(tmp_path / "x.beton").image(n)[0]))
        assert stored.format == "JPEG"
        assert stored.mode in ("RGB", "L")
        want = np.asarray(Image.open(images.where(n)).convert("RGB")).astype(int)
        assert np.abs(np.asarray(source.image(n)) - want).mean() < 2, path  # quality 95 on smooth images


def test_unreadable_files_are_all_named_and_nothing_is_written(folder, tmp_path):
    root = shutil.copytree(folder, tmp_path / "broken")
    victims = sorted((root / "train").glob("*/*.jpg"))[2:4]
    victims[0].write_bytes(victims[0].read_bytes()[:100])
    victims[1].write_text("no image")
    with pytest.raises(UserError, match="2 images cannot be packed") as refused:
        main(Packing(data=root, out=tmp_path / "out" / "x.beton"))
    assert all(victim.name in str(refused.value) for victim in victims)
    assert list((tmp_path / "out").iterdir()) == []


def test_an_existing_file_is_kept(folder, tmp_path):
    (tmp_path / "x.beton").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        main(Packing(data=folder, out=tmp_path / "x.beton"))
    assert (tmp_path / "x.beton").read_text() == "mine"

""".beton read and written both ways against stock ffcv 1.0.2, and against damage."""

import io
import os
import subprocess
import sys

import numpy as np
import pytest
from densefeed.pipelines.beton import NDARRAY, Beton, Field, Sample, write_beton
from densefeed.pipelines.ffcv import map_arrays, map_fields
from densefeed.relabel.files import UserError
from PIL import Image

NOTES = {"densefeed": 1, "class_names": ["a", "b", "c"], "fingerprint": "f"}


def jpegs(count, rng=None):
    rng = rng or np.random.default_rng(0)
    out = []
    for _ in range(count):
        height, width = rng.integers(20, 60, 2)
        buffer = io.BytesIO()
        coarse = Image.fromarray(rng.integers(0, 255, (3, 3, 3), dtype=np.uint8))
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=95)
        out.append((buffer.getvalue(), int(height), int(width)))
    return out


def write(path, random_maps, count=7):
    maps = random_maps(count, 6, 3, 9)
    images = jpegs(count)
    samples = [Sample(*image, n % 3, map_arrays(maps, n)) for n, image in enumerate(images)]
    write_beton(path, count, samples, map_fields(6, 3), NOTES)
    return images, maps


def test_what_is_written_comes_back(tmp_path, random_maps):
    images, maps = write(tmp_path / "x.beton", random_maps)
    beton = Beton(tmp_path / "x.beton")
    assert len(beton) == 7
    assert beton.notes == NOTES
    np.testing.assert_array_equal(beton.labels, np.arange(7) % 3)
    for n, (jpeg, height, width) in enumerate(images):
        assert beton.image(n) == (jpeg, False)
        assert (beton.heights[n], beton.widths[n]) == (height, width)
    ids = np.array([5, 0, 5])
    both = beton.array("map", ids)
    np.testing.assert_array_equal(both[:, 0].view("<f2"), maps.logit[ids])
    np.testing.assert_array_equal(both[:, 1].view("<u2"), maps.cls[ids])
    np.testing.assert_array_equal(beton.array("window", ids), maps.window[ids])


def test_samples_never_cross_a_page_and_arrays_are_aligned(tmp_path):
    """Three samples of 3 MB in pages of 8 MiB: the third must begin the second page."""
    noise = np.random.default_rng(0).bytes(3_000_001)
    field = Field(NDARRAY, "x", "<f4", (3,))
    samples = [Sample(noise, 10, 10, 0, (np.arange(3) + n,)) for n in range(3)]
    write_beton(tmp_path / "x.beton", 3, samples, [field], {})
    beton = Beton(tmp_path / "x.beton")
    for n in range(3):
        assert beton.image(n)[0] == noise
        np.testing.assert_array_equal(beton.array("x", np.array([n]))[0], np.arange(3) + n)
    table = np.array(beton._table)
    assert (table["ptr"] // 2**23 == (table["ptr"] + table["size"] - 1) // 2**23).all()
    assert (table["ptr"] % 16 == 0).all()


def test_a_sample_larger_than_a_page_is_refused_and_nothing_stays(tmp_path):
    with pytest.raises(UserError, match=r"do not fit a page"):
        write_beton(tmp_path / "x.beton", 1, [Sample(bytes(9_000_000), 1, 1, 0)], [], {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("share", [0.0, 1e-7, 1e-6, 1e-4, 0.3, 0.9, 0.99999])
def test_a_cut_file_is_refused(tmp_path, random_maps, share):
    path = tmp_path / "x.beton"
    write(path, random_maps)
    os.truncate(path, int(share * path.stat().st_size))
    with pytest.raises(UserError, match=r"x.beton"):
        Beton(path)


def test_refusals_name_the_file(tmp_path, random_maps):
    with pytest.raises(UserError, match=r"nowhere.beton: there is no such file"):
        Beton(tmp_path / "nowhere.beton")
    path = tmp_path / "x.beton"
    path.write_bytes(b"\x01" * 5000)
    with pytest.raises(UserError, match=r"not an FFCV dataset of version 2"):
        Beton(path)
    write(path, random_maps)
    data = bytearray(path.read_bytes())
    data[24] = 255  # the image field's type: a custom field
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"type 255"):
        Beton(path)


FFCV_READS = """
import sys
import numpy as np
from ffcv.fields.basics import IntDecoder
from ffcv.fields.ndarray import NDArrayDecoder
from ffcv.fields.rgb_image import CenterCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import ToTensor
loader = Loader(sys.argv[1], batch_size=4, num_workers=2, order=OrderOption.SEQUENTIAL, drop_last=False, pipelines={
    "image": [CenterCropRGBImageDecoder((16, 16), ratio=1.0), ToTensor()], "label": [IntDecoder(), ToTensor()],
    "map": [NDArrayDecoder(), ToTensor()], "lse": [NDArrayDecoder(), ToTensor()], "window": [NDArrayDecoder(), ToTensor()]})
parts = [[np.array(field) for field in batch] for batch in loader]
np.savez(sys.argv[2], *[np.concatenate(column) for column in zip(*parts)])
"""

FFCV_WRITES = """
import sys
import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.writer import DatasetWriter
images = np.load(sys.argv[1])
class Set:
    def __len__(self): return len(images)
    def __getitem__(self, n): return images[n], n % 3
if __name__ == "__main__":
    fields = {"picture": RGBImageField(write_mode=sys.argv[3], jpeg_quality=95), "class": IntField()}
    writer = DatasetWriter(sys.argv[2], fields, num_workers=2)
    writer.from_indexed_dataset(Set())
"""


def ffcv(code, *words):
    pytest.importorskip("ffcv", reason="ffcv could not be built here")
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.ffcv
def test_stock_ffcv_opens_our_file(tmp_path, random_maps):
    images, maps = write(tmp_path / "x.beton", random_maps)
    ffcv(FFCV_READS, tmp_path / "x.beton", tmp_path / "read.npz")
    image, label, both, lse, window = np.load(tmp_path / "read.npz").values()
    np.testing.assert_array_equal(label[:, 0], np.arange(7) % 3)
    np.testing.assert_array_equal(both[:, 0].view("<f2"), maps.logit)
    np.testing.assert_array_equal(both[:, 1].view("<u2"), maps.cls)
    np.testing.assert_array_equal(lse.view("<f2"), maps.lse)
    np.testing.assert_array_equal(window, maps.window)
    for got, (jpeg, height, width) in zip(image, images, strict=True):
        side = min(height, width)
        box = ((width - side) // 2, (height - side) // 2, (width + side) // 2, (height + side) // 2)
        want = np.asarray(Image.open(io.BytesIO(jpeg)).crop(box).resize((16, 16), Image.Resampling.BOX)).astype(int)
        assert np.abs(got - want).mean() < 4  # ffcv's fast DCT and area filter against Pillow's, on smooth images


@pytest.mark.ffcv
@pytest.mark.parametrize("mode", ["jpg", "raw"])
def test_we_open_what_stock_ffcv_wrote(tmp_path, mode):
    from densefeed.pipelines.ffcv import FfcvSource

    rng = np.random.default_rng(0)
    smooth = [np.asarray(Image.fromarray(rng.integers(0, 255, (4, 5, 3), dtype=np.uint8)).resize((50, 40))) for _ in range(9)]
    np.save(tmp_path / "images.npy", np.stack(smooth))
    ffcv(FFCV_WRITES, tmp_path / "images.npy", tmp_path / "x.beton", mode)
    source = FfcvSource(tmp_path / "x.beton")
    np.testing.assert_array_equal(source.labels, np.arange(9) % 3)
    assert source.class_names == ["0", "1", "2"]
    for n, want in enumerate(smooth):
        got = np.asarray(source.image(n)).astype(int)
        assert np.abs(got - want).mean() <= (0 if mode == "raw" else 3)  # quality 95 on smooth noise: mean 1 to 2

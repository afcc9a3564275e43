"""Values in a TIFF's tags, against Pillow's own reading."""

import io
import struct

import pytest
from PIL import Image, TiffImagePlugin

from densefeed.storage.tiff import MOST_VALUES, count_values

EXIF, EXPOSURE, DPI = 0x8769, 0x829A, (300, 300)


def count_with_pillow(file: io.BytesIO) -> int:
    """Count what Pillow has read of the image's own tags and of Exif's."""
    with Image.open(file) as image:
        own = image.tag_v2
        values = sum(len(v) if isinstance(v, tuple) else 1 for v in own.values())
        return values + len(image.getexif().get_ifd(EXIF))


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("order", ["II", "MM"])
def test_values_are_those_that_pillow_reads(order, big):
    tags = TiffImagePlugin.ImageFileDirectory_v2(order.encode() + b"*\0\0\0\0\0")
    exif = Image.Exif()
    exif.get_ifd(EXIF)[EXPOSURE] = 0.5
    tags[270], tags[EXIF] = "a description of many letters", dict(exif.get_ifd(EXIF))
    # A tag of its own.
    tags[65_000] = tuple(range(80))
    file = io.BytesIO()
    Image.new("RGB", (30, 40)).save(file, "TIFF", tiffinfo=tags, big_tiff=big, dpi=DPI)
    file.seek(0)
    count = count_values(file)
    assert count > 80
    file.seek(0)
    assert count == count_with_pillow(file)


def test_directories_in_a_circle_are_counted_once():
    entry = struct.pack("<HHII", EXIF, 4, 1, 8)
    file = io.BytesIO(b"II*\0" + struct.pack("<IH", 8, 2) + entry + entry + bytes(4))
    assert count_values(file) == 2


@pytest.mark.slow
def test_directories_without_end_are_not_read():
    """40 directories of 65,535 entries, of which each points to all others."""
    size, count = 2 + 12 * 65_535, 40
    entries = [struct.pack("<HHII", EXIF, 4, 0, 8 + size * (n % count)) for n in range(65_535)]
    directory = struct.pack("<H", 65_535) + b"".join(entries)
    file = io.BytesIO(b"II*\0" + struct.pack("<I", 8) + directory * count)
    assert MOST_VALUES < count_values(file) <= MOST_VALUES + 65_535


@pytest.mark.parametrize("size", range(10))
def test_a_file_that_ends_early_raises_one_error(size):
    content = b"II*\0" + struct.pack("<IH", 8, 2)
    with pytest.raises(struct.error):
        count_values(io.BytesIO(content[:size]))

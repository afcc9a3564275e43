"""Indexed JPEGs keep every coefficient, every decoder reads them, and their index is correct."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg

from densefeed import native
from densefeed.storage import indexed_jpeg

from ..jpeg_files import encoded

EXTENTS = [(1, 1), (7, 9), (8, 8), (16, 17), (17, 16), (33, 100), (1, 4000), (4000, 1)]
SAMPLINGS = [(1, 1), (2, 1), (1, 2), (2, 2)]


def reread(jpeg: bytes) -> dict:
    """Read the index by FORMAT.md with struct only, and check it against the file's markers."""
    assert jpeg[:4] == b"\xff\xd8\xff\xe9"
    assert jpeg[6:12] == b"DFSEG\1"
    (length,) = struct.unpack_from(">H", jpeg, 4)
    header, crc, rows = struct.unpack_from("<IIH", jpeg, 12)
    assert length == 2 + 16 + 8 * rows
    assert crc == zlib.crc32(jpeg[20:header], zlib.crc32(jpeg[:16]))
    table = np.frombuffer(jpeg, "<u4", 2 * rows, 22).reshape(rows, 2).astype(int)
    at, found = 22 + 8 * rows, {"rows": rows}
    while True:
        marker, size = jpeg[at + 1], struct.unpack_from(">H", jpeg, at + 2)[0]
        if marker == 0xC0:
            found["height"], found["width"], components = struct.unpack_from(">HHB", jpeg, at + 5)
            found["sampling"] = (
                (jpeg[at + 11] >> 4, jpeg[at + 11] & 15) if components > 1 else (1, 1)
            )
        elif marker == 0xDD:
            (found["interval"],) = struct.unpack_from(">H", jpeg, at + 4)
        at += 2 + size
        if marker == 0xDA:
            break
    assert at == header
    assert header + table[:, 0].sum() + 2 == len(jpeg)
    assert jpeg[-2:] == b"\xff\xd9"
    across = -(-found["width"] // (8 * found["sampling"][0]))
    assert rows == -(-found["height"] // (8 * found["sampling"][1]))
    assert across % found["interval"] == 0
    number, per_row = 0, across // found["interval"]
    for row, (size, crc) in enumerate(table.tolist()):
        scan = jpeg[at : at + size]
        assert zlib.crc32(scan) == crc
        markers = [scan[n + 1] for n in range(size - 1) if scan[n] == 0xFF and scan[n + 1]]
        want = per_row - (row == rows - 1)
        assert markers == [0xD0 + (number + n) % 8 for n in range(want)]
        if row < rows - 1:
            assert scan[-2:] == bytes([0xFF, markers[-1]])
        number, at = number + want, at + size
    return found


def check(jpegs, original: bytes) -> bytes:
    """Transcode, and compare coefficients and the pixels of two decoders with the original."""
    indexed = indexed_jpeg.transcode(original)
    np.testing.assert_array_equal(jpegs.contents(indexed), jpegs.contents(original))
    np.testing.assert_array_equal(
        *(np.asarray(Image.open(io.BytesIO(file))) for file in (indexed, original))
    )
    pair = (torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in (indexed, original))
    one, other = (decode_jpeg(file, ImageReadMode.UNCHANGED) for file in pair)
    assert torch.equal(one, other)
    assert native.probe(indexed) == native.probe(original) == tuple(one.shape[1:])
    return indexed


@pytest.mark.parametrize(("height", "width"), EXTENTS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_coefficient_is_kept(jpegs, noise, height, width, sampling):
    found = reread(check(jpegs, jpegs.write(noise(height, width), sampling)))
    assert (found["height"], found["width"], found["sampling"]) == (height, width, sampling)


@pytest.mark.parametrize(("height", "width"), EXTENTS)
def test_gray_stays_gray(jpegs, noise, height, width):
    # The sampling of a single component has no meaning, but some encoders write one.
    for sampling in ((1, 1), (2, 2)):
        assert reread(check(jpegs, jpegs.write(noise(height, width, 1), sampling)))["sampling"] == (
            1,
            1,
        )


@pytest.mark.parametrize(
    "coding",
    [
        {"progressive": 1},
        {"restart": 5},
        {"arithmetic": 1},
        {"rgb": 1},
        {"quality": 100},
        {"quality": 1},
    ],
    ids=lambda coding: "-".join(coding),
)
def test_every_coding_becomes_baseline(jpegs, noise, coding):
    original = jpegs.write(noise(70, 90), (1, 1) if "rgb" in coding else (2, 2), **coding)
    if "arithmetic" in coding:  # Pillow's own libjpeg may not support it
        indexed = indexed_jpeg.transcode(original)
        np.testing.assert_array_equal(jpegs.contents(indexed), jpegs.contents(original))
    else:
        indexed = check(jpegs, original)
    reread(indexed)
    assert check(jpegs, indexed) == indexed


@settings(max_examples=40)
@given(
    st.integers(1, 90),
    st.integers(1, 90),
    st.sampled_from(SAMPLINGS),
    st.integers(1, 100),
    st.booleans(),
)
def test_any_size_and_quality(jpegs, noise, height, width, sampling, quality, progressive):
    reread(
        check(
            jpegs,
            jpegs.write(noise(height, width), sampling, quality=quality, progressive=progressive),
        )
    )


def test_photographs_grow_by_at_most_1_5_percent(jpegs, photographs):
    for photograph in photographs:
        original = encoded(photograph)
        assert len(check(jpegs, original)) <= 1.015 * len(original)


@pytest.mark.parametrize("sampling", [(4, 1), (4, 2), (1, 4)])
def test_unusual_sampling_gets_no_index_but_is_baseline(jpegs, noise, sampling):
    plain = check(jpegs, jpegs.write(noise(50, 70), sampling, progressive=1))
    assert b"DFSEG" not in plain
    assert b"\xff\xc0" in plain


def test_the_tallest_and_the_widest_jpegs_have_an_index(jpegs):
    """libjpeg's limit of 65,500 px gives 8,188 rows of MCUs, which fit into one APP segment."""
    for shape, key, want in (((65500, 8), "rows", 8188), ((8, 65500), "interval", 4)):
        jpeg = jpegs.write(np.full(shape, 77, np.uint8), quality=50)
        assert reread(check(jpegs, jpeg))[key] == want


def test_the_interval_divides_the_row_and_is_near_four():
    for across in range(1, 300):
        interval = indexed_jpeg.choose_interval(across)
        assert across % interval == 0
        assert 2 <= interval <= 8 or interval == across
        assert interval == 4 or across % 4


def test_only_app_segments_that_decoders_need_are_kept(jpegs, photographs):
    exif = Image.Exif()
    exif[0x0112] = 6
    original = encoded(
        photographs[0], exif=exif, icc_profile=bytes(3000), comment=b"a comment", dpi=(72, 72)
    )
    indexed = indexed_jpeg.transcode(original)
    image = Image.open(io.BytesIO(indexed))
    assert not image.getexif()
    assert not {"icc_profile", "comment"} & image.info.keys()
    assert image.info["dpi"] == (72, 72)
    np.testing.assert_array_equal(jpegs.contents(indexed), jpegs.contents(original))


@pytest.mark.parametrize(
    ("broken", "status"),
    [
        (lambda jpeg, cmyk: b"", native.DAMAGED),
        (lambda jpeg, cmyk: b"GIF89a", native.DAMAGED),
        (lambda jpeg, cmyk: jpeg[:100], native.DAMAGED),
        (lambda jpeg, cmyk: jpeg[: len(jpeg) // 2], native.DAMAGED),
        (lambda jpeg, cmyk: jpeg[:700] + bytes(len(jpeg) - 700), native.DAMAGED),
        (lambda jpeg, cmyk: cmyk, native.UNSUPPORTED),
    ],
    ids=["empty", "gif", "header-cut", "half", "zeroed", "cmyk"],
)
def test_incomplete_files_are_refused(jpegs, noise, broken, status):
    with pytest.raises(native.JpegError) as caught:
        indexed_jpeg.transcode(
            broken(jpegs.write(noise(60, 60), (2, 2)), jpegs.write(noise(20, 20, 4)))
        )
    assert caught.value.status == status

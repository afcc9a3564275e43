"""Images are in timm's order, and invalid input is refused."""

import ast
import io
import math
import os
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image
from timm.data import ImageDataset

from densefeed import native
from densefeed.storage import images as images_module
from densefeed.storage.images import Images, crop_resize, decode, limit_pixels
from densefeed.system.errors import UserError

from ..jpeg_files import header_jpeg


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
    only = tmp_path / "only"
    shutil.copytree(folder / "train", only / "train")
    with pytest.raises(UserError, match=r"holds train but no folder 'val'"):
        Images(only, split="val")
    with pytest.raises(UserError, match=r"holds train, val but no folder 'vall'"):
        Images(folder, split="vall")
    both = tmp_path / "2024"
    shutil.copytree(folder, both)
    assert len(Images(tmp_path, split="2024/train")) == 11  # not those of 2024/val too
    with pytest.raises(UserError, match=r"but no folder '2024/test'"):
        Images(tmp_path, split="2024/test")
    assert len(Images(only / "train", split="val")) == 11  # a folder of classes has no splits
    (only / "train").rename(only / "training")
    assert len(Images(only, split="train")) == 11  # timm's synonym
    with pytest.raises(UserError, match=r"--dataset bogus/x"):
        Images(folder, dataset="bogus/x")


def chunked_png(*chunks: bytes) -> bytes:
    """Make a PNG of 8 x 8 pixels with more chunks, each its type and content, before the pixels."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, "PNG")
    png, at = buffer.getvalue(), 33
    made = (len(c[4:]).to_bytes(4, "big") + c + zlib.crc32(c).to_bytes(4, "big") for c in chunks)
    return png[:at] + b"".join(made) + png[at:]


def large_png(mode: str, width: int, height: int) -> bytes:
    """Make the header of a PNG of this size, and pixels that end at once."""
    buffer = io.BytesIO()
    Image.new(mode, (8, 8)).save(buffer, "PNG")
    png = bytearray(buffer.getvalue())
    png[16:24] = struct.pack(">II", width, height)
    png[29:33] = zlib.crc32(png[12:29]).to_bytes(4, "big")
    return bytes(png)


def large_tile() -> bytes:
    """Make a TIFF of 10 x 10 pixels in a compressed tile of 16,384 x 16,384."""
    side, tile = 16_384, zlib.compress(b"")
    tags = {256: 10, 257: 10, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side, 324: 150}
    tags[325] = len(tile)
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    head = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)
    return head.ljust(150, b"\0") + tile


def many_values() -> bytes:
    """Make a TIFF of 10 x 10 pixels whose one strip has three million places."""
    tags = {256: 10, 257: 10, 258: 8, 259: 1, 262: 1, 277: 1, 279: 100}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    entries += struct.pack("<HHII", 273, 4, 3_000_000, 150)
    head = b"II*\0" + struct.pack("<IH", 8, len(tags) + 1) + entries + bytes(4)
    return head.ljust(150, b"\0") + bytes(4 * 3_000_000)


def much_exif() -> bytes:
    """Make a JPEG with 65 segments of Exif data."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, "JPEG")
    segment = b"\xff\xe1" + struct.pack(">H", 8) + b"Exif\0\0"
    return buffer.getvalue()[:2] + 65 * segment + buffer.getvalue()[2:]


ZEROS = zlib.compress(bytes(2**27), 1)
BOMBS = {
    "JPEG": (header_jpeg(0xCA, 16_384), "--max-pixels 89478485"),
    "JPEG's coefficients": (header_jpeg(0xCA, 9_400, components=4), "--max-pixels 89478485"),
    "12-bit JPEG": (header_jpeg(0xC1, 64, precision=12), "12 bits per color"),
    "lossless JPEG": (header_jpeg(0xC3, 64), "lossless or hierarchical JPEG"),
    "PNG": (large_png("RGB", 2**16, 2**16), "--max-pixels 89478485"),
    "PNG that Pillow only warns of": (large_png("1", 9_460, 9_460), "--max-pixels 89478485"),
    "text of a PNG": (chunked_png(b"zTXta\0\0" + ZEROS), "too large"),
    "profile of a PNG": (chunked_png(b"iCCPa\0\0" + ZEROS), "too large"),
    "tile of a TIFF": (large_tile(), "--max-pixels 89478485"),
    "tags of a TIFF": (many_values(), "its tags hold more than 2,097,152 values"),
    "Exif of a JPEG": (much_exif(), "more than 64 segments of Exif data"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_by_name_before_memory_is_taken(name, little_memory):
    content, why = BOMBS[name]
    refusal = rf"^a/b.jpg cannot be decoded \(.*{why}.*\); replace or"
    with little_memory(), pytest.raises(UserError, match=refusal):
        decode(content, "a/b.jpg")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("kind", images_module.FORMATS)
def test_there_is_one_limit_of_pixels_and_half_of_it_for_webp_and_tiff(kind):
    """Pillow alone would warn from half of it on."""
    buffer, limit = io.BytesIO(), 1200 if kind in ("WEBP", "TIFF") else 600
    Image.new("RGB", (20, 30), "red").save(buffer, kind)
    try:
        limit_pixels(limit - 1)
        with pytest.raises(UserError, match=f"more than --max-pixels {limit - 1}"):
            decode(buffer.getvalue(), "it")
        limit_pixels(limit)
        assert decode(buffer.getvalue(), "it").size == (20, 30)
    finally:
        limit_pixels(native.MAX_PIXELS)


# The largest images that are read, of the formats and modes that take most memory.
LARGEST = {
    "WebP": ("RGB", 6_688, {"format": "WEBP", "method": 0}),
    "TIFF of one strip": ("RGBA", 6_688, {"format": "TIFF", "compression": "tiff_lzw"}),
    "TIFF of 16 bits": ("I;16", 6_688, {"format": "TIFF", "compression": "tiff_lzw"}),
    "PNG of 16 bits": ("I;16", 9_459, {"format": "PNG", "compress_level": 1}),
    "PGM of 16 bits": ("I;16", 9_459, {"format": "PPM"}),
    "PNG": ("RGBA", 9_459, {"format": "PNG", "compress_level": 1}),
    "CMYK JPEG": ("CMYK", 9_459, {"format": "JPEG"}),
    "progressive JPEG": ("RGB", 9_459, {"format": "JPEG", "progressive": True}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", LARGEST)
def test_no_image_that_is_read_takes_1_gb(name, little_memory):
    mode, side, options = LARGEST[name]
    buffer, image = io.BytesIO(), Image.new(mode, (side, side))
    image.save(buffer, strip_size=2**31 - 1, **options)
    image.close()
    with little_memory(10**9):
        assert np.asarray(decode(buffer.getvalue(), "it")).shape == (side, side, 3)


# ------------------------------------------------------------------------- hostile files

RED = Image.new("RGB", (20, 10), (250, 0, 0))


def encode(kind, **options):
    file = io.BytesIO()
    RED.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM"])
def test_the_formats_of_torchvision_and_gif_are_read_whatever_their_name(tmp_path, kind):
    """The pixels of all are a palette's or exact, except those of JPEG and WebP."""
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").write_bytes(encode(kind))
    images = Images(tmp_path)
    assert images.size(0) == (10, 20)
    pixels = np.asarray(decode(images.read(0), ""))
    assert np.abs(pixels - np.array([250, 0, 0])).max() <= 3


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_of_several_frames_is_the_image(kind):
    """As in torchvision and timm."""
    others = [Image.new("RGB", RED.size, color) for color in ("blue", "green")]
    encoded = encode(kind, save_all=True, append_images=others)
    with Image.open(io.BytesIO(encoded)) as image:
        assert image.n_frames == 3
    assert np.abs(np.asarray(decode(encoded, "")) - np.array([250, 0, 0])).max() <= 3


EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 9 9
%%EndComments
0 0 moveto 9 9 lineto stroke
"""


def test_postscript_in_a_jpeg_never_runs_a_program(tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    with pytest.raises(UserError, match=r"x.jpg cannot be decoded \(not an image of JPEG, PNG, "):
        decode(EPS, "x.jpg")
    assert not ran.exists()


@pytest.mark.parametrize("kind", ["ICO", "JPEG2000", "TGA", "PCX", "SGI", "DDS", "PDF", "EPS"])
def test_other_formats_are_refused(tmp_path, kind):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").write_bytes(encode(kind))
    images = Images(tmp_path)
    with pytest.raises(UserError, match=r"1.jpg cannot be decoded \(not an image of JPEG, PNG, "):
        decode(images.read(0), images.where(0))
    with pytest.raises(OSError, match=r"its size cannot be read"):
        images.size(0)


def test_pillow_opens_files_in_one_place_only():
    """Another call would open 43 formats again."""
    calls = [
        path.name
        for path in Path(images_module.__file__).parents[1].rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "Image.open"
    ]
    assert calls == ["images.py"]


def test_a_file_without_end_is_not_read(tmp_path):
    (tmp_path / "cat").mkdir()
    with (tmp_path / "cat" / "1.jpg").open("wb") as file:
        file.truncate(2**40)
    (tmp_path / "cat" / "2.jpg").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "cat" / "3.jpg")
    images = Images(tmp_path)
    with pytest.raises(OSError, match=r"this file has more than 320 MiB"):
        images.read(0)
    for index in (1, 2):
        with pytest.raises(OSError, match=r"this is not a regular file"):
            images.read(index)
    assert images.fingerprint()


@pytest.mark.parametrize("filter", [f for f in Image.Resampling if f != Image.Resampling.NEAREST])
def test_a_padded_crop_is_that_of_the_whole_square(monkeypatch, filter):
    """Bit by bit, though no more than a few rows of the square are in memory."""
    rng, fill = np.random.default_rng(0), (9, 99, 199)
    for number in range(40):
        monkeypatch.setattr(images_module, "ROWS_PIXELS", int(rng.choice([1, 300, 2**22])))
        width, height = (int(side) for side in rng.integers(1, 150, 2))
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        image, side, size = Image.fromarray(pixels), max(width, height), 1 + number
        left, top = (width - side) / 2, (height - side) / 2
        ends = left, top, left + side, top + side
        (x, y), (x_end, y_end) = map(math.floor, ends[:2]), map(math.ceil, ends[2:])
        canvas = Image.new("RGB", (x_end - x, y_end - y), fill)
        canvas.paste(image, (-x, -y))
        box = left - x, top - y, ends[2] - x, ends[3] - y
        got = crop_resize(image, ends, size, filter, fill)
        np.testing.assert_array_equal(got, np.asarray(canvas.resize((size, size), filter, box)))


def test_a_padded_crop_of_a_long_image_takes_little_memory(monkeypatch):
    """The square around it would have 400 million pixels."""
    made, new = [], Image.new

    def record(mode, size, *color):
        made.append(size[0] * size[1])
        return new(mode, size, *color)

    image = Image.new("RGB", (20_000, 10), (1, 2, 3))
    monkeypatch.setattr(Image, "new", record)
    out = crop_resize(image, (0, -9995, 20_000, 10_005), 100, fill=(7, 8, 9))
    assert max(made) <= images_module.ROWS_PIXELS
    assert (out[:45] == (7, 8, 9)).all()
    assert (out[55:] == (7, 8, 9)).all()

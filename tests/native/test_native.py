"""The native decoder against Pillow, libjpeg and its own build without SIMD; threads; bad input."""

import ctypes
import gc
import io
import itertools
import os
import platform
import re
import struct
import subprocess
import tempfile
import time
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from densefeed import native
from densefeed.storage import indexed_jpeg
from densefeed.storage.images import crop_resize
from densefeed.system.errors import UserError

from ..jpeg_files import NATIVE, SOURCES, compile_c, encoded, header_jpeg

MEAN = 0.6  # of 255: limit of the mean absolute difference from Pillow


def make_job(
    files: list[bytes],
    boxes,
    size: int | tuple[int, int],
    flips=0,
    kind=native.JPEG,
    extents=None,
    parts=None,
) -> native.Job:
    """Make a job over files in memory; `boxes` are (top, left, height, width)."""
    samples = np.zeros(len(files), native.SAMPLE)
    memory = [np.frombuffer(file, np.uint8) for file in files]
    samples["bytes"], samples["length"] = [m.ctypes.data for m in memory], [len(m) for m in memory]
    samples["height"], samples["width"] = np.array(
        extents or [native.probe(file) for file in files]
    ).T
    samples["box_tlhw"], samples["flip"], samples["kind"] = boxes, flips, kind
    shape = (size, size) if isinstance(size, int) else size
    pixels = np.full((len(files), *shape, 3), 99, np.uint8)
    return native.Job(samples, pixels, parts and native.PartRows(parts), keep=memory)


def crop(file: bytes, box, size: int | tuple[int, int], flip=0, **options) -> np.ndarray:
    """Decode one crop, which must succeed."""
    job = make_job([file], [box], size, flip, **options)
    job.decode()
    assert job.samples["status"][0] == native.OK, job.samples["message"][0]
    assert job.samples["message"][0] == b""
    return job.pixels[0]


def crop_with_pillow(image: Image.Image, box, size: int, flip=0) -> np.ndarray:
    top, left, height, width = box
    want = crop_resize(image.convert("RGB"), (left, top, left + width, top + height), size)
    return want[:, ::-1] if flip else want


def mean_difference(pixels: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(pixels.astype(int) - want).mean())


def random_box(rng, height, width, least=8) -> tuple[int, int, int, int]:
    tall, wide = (int(rng.integers(min(least, extent), extent + 1)) for extent in (height, width))
    return int(rng.integers(height - tall + 1)), int(rng.integers(width - wide + 1)), tall, wide


@pytest.fixture(scope="module")
def plain(shared, run_once):
    """The library for processors without AVX2 and carry-less multiplication.

    It decodes in integers, so -O1 gives the bytes of -O3 in a third of the time.
    """
    flags = ("-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-DDENSEFEED_PLAIN")
    sources = [NATIVE / f"{name}.c" for name in SOURCES]
    path = run_once("plain", lambda: str(compile_c(shared / "plain.so", sources, *flags)))
    return ctypes.CDLL(path)


def test_struct_offsets_match_c(tmp_path):
    fields = {
        "Sample": [*native.SAMPLE.names],
        "Batch": [name for name, _ in native._Batch._fields_],
        "Cut": [*native.CUT.names],
    }
    fields["Sample"][fields["Sample"].index("box_tlhw")] = "top"
    lines = [
        f'printf("%zu\\n", offsetof({kind}, {name}));'
        for kind, names in fields.items()
        for name in names
    ]
    source = tmp_path / "offsets.c"
    source.write_text(
        '#include <stdio.h>\n#include "native.h"\nint main(void) {'
        + "\n".join(lines)
        + "return 0;}"
    )
    printed = subprocess.check_output(
        [compile_c(tmp_path / "offsets", [source])], text=True
    ).split()
    ours = [native.SAMPLE.fields[name][1] for name in native.SAMPLE.names]
    ours += [getattr(native._Batch, name).offset for name, _ in native._Batch._fields_]
    ours += [native.CUT.fields[name][1] for name in native.CUT.names]
    assert [int(offset) for offset in printed] == ours


# ------------------------------------------------------------------------- Pixels


@pytest.mark.parametrize("subsampling", ["4:2:0", "4:2:2", "4:4:4"])
@pytest.mark.parametrize("index", [True, False], ids=["indexed", "plain"])
def test_crops_of_photographs_match_pillow(photographs, subsampling, index):
    rng = np.random.default_rng(0)
    for photograph in photographs:
        file = encoded(photograph, subsampling=subsampling)
        image = Image.open(io.BytesIO(file))
        file = indexed_jpeg.transcode(file) if index else file
        for size in (32, 97, 160, 224, 300):
            box, flip = random_box(rng, image.height, image.width), int(rng.integers(2))
            assert (
                mean_difference(
                    crop(file, box, size, flip), crop_with_pillow(image, box, size, flip)
                )
                <= MEAN
            ), (box, size)


@pytest.mark.parametrize("index", [True, False], ids=["indexed", "plain"])
def test_large_photographs_match_pillow_at_every_scale(photographs, index):
    """Crops of up to 33 times the output size.

    Without an index libjpeg decodes at 1/2, 1/4 or 1/8; with one the filter has 66 taps.
    """
    for photograph in photographs[:3]:
        file = encoded(
            photograph.resize([3 * side for side in photograph.size], Image.Resampling.LANCZOS)
        )
        image = Image.open(io.BytesIO(file))
        file = indexed_jpeg.transcode(file) if index else file
        for ratio in (5, 7.9, 8, 9, 15.9, 16, 17, 31.9, 32, 33):
            for size in (31, 48):
                side = min(int(ratio * size) + 1, image.height, image.width - 5)
                box = (image.height - side, 5, side, side)
                assert (
                    mean_difference(crop(file, box, size), crop_with_pillow(image, box, size))
                    <= MEAN
                ), (ratio, size)


@pytest.mark.parametrize("form", ["jpeg", "indexed", "planes"])
def test_narrow_images_have_the_chroma_of_libjpeg(form):
    """It does not smooth chroma of one or two columns, in neither direction."""
    rng = np.random.default_rng(0)
    for width in (1, 2, 3, 4):
        pixels = rng.integers(0, 256, (40, width, 3), dtype=np.uint8)
        file = encoded(Image.fromarray(pixels), subsampling="4:2:0")
        want = np.asarray(Image.open(io.BytesIO(file))).astype(float)
        stored = {"jpeg": lambda f: f, "indexed": indexed_jpeg.transcode, "planes": native.planes}
        kind = native.PLANES if form == "planes" else native.JPEG
        got = native.decode(stored[form](file), 40, width, kind)
        assert abs(got - want).mean() < 0.1, width


def resize_unclipped(image: Image.Image, box, size: int) -> np.ndarray:
    """Crop and resize in float32 with Pillow, and clip colors after that."""
    top, left, height, width = box
    image.draft("YCbCr", image.size)
    y, blue, red = np.moveaxis(np.asarray(image).astype(float), -1, 0) - np.array(
        [[[0]], [[128]], [[128]]]
    )
    colors = y + 1.402 * red, y - 0.344136 * blue - 0.714136 * red, y + 1.772 * blue
    resized = [
        Image.fromarray(color.astype(np.float32)[top : top + height, left : left + width]).resize(
            (size, size), Image.Resampling.BILINEAR
        )
        for color in colors
    ]
    return np.rint(np.stack(resized, -1)).clip(0, 255)


def test_outside_single_pixels_differ_from_pillow_only_by_the_time_of_clipping(photographs):
    """docs/results/loaders.md states the largest difference from Pillow.

    Pillow clips colors beyond 0 to 255 before it resizes. Each level equals that of floats which
    are clipped afterwards to 1.
    """
    rng, ours, pillows = np.random.default_rng(0), 0, 0
    for photograph in photographs:
        file = encoded(photograph, subsampling="4:2:0")
        indexed = indexed_jpeg.transcode(file)
        for _ in range(10):
            box = random_box(rng, *photograph.size[::-1], least=80)
            got = crop(indexed, box, 224).astype(int)
            want = resize_unclipped(Image.open(io.BytesIO(file)), box, 224)
            ours = max(ours, np.abs(got - want).max())
            want = crop_with_pillow(Image.open(io.BytesIO(file)), box, 224)
            pillows = max(pillows, np.abs(got - want).max())
    assert ours <= 1
    assert 10 < pillows <= 29


def test_fractional_boxes_as_in_evaluation_match_pillow(photographs):
    rng = np.random.default_rng(1)
    for photograph in photographs:
        file = encoded(photograph)
        indexed, image = indexed_jpeg.transcode(file), Image.open(io.BytesIO(file))
        for _ in range(6):
            tall, wide = rng.uniform(20, image.height), rng.uniform(20, image.width)
            top, left = rng.uniform(0, image.height - tall), rng.uniform(0, image.width - wide)
            box = (top, left, tall, wide)
            for each in (file, indexed):
                assert (
                    mean_difference(crop(each, box, 128), crop_with_pillow(image, box, 128)) <= MEAN
                ), box


def test_small_crops_are_enlarged_like_pillow(photographs):
    rng = np.random.default_rng(2)
    for photograph in photographs:
        file = encoded(photograph)
        indexed, image = indexed_jpeg.transcode(file), Image.open(io.BytesIO(file))
        for side in (1, 2, 3, 8, 33):
            top, left = (int(rng.integers(length - side)) for length in image.size[::-1])
            box = (top, left, side, side)
            # Like this decoder, Pillow interpolates chroma with neighbors outside the box, but it
            # rounds before it resamples.
            assert (
                mean_difference(crop(indexed, box, 100), crop_with_pillow(image, box, 100)) <= 1
            ), box


def test_unscaled_crop_equals_the_decoded_image(photographs, jpegs, noise):
    """Exactly for grayscale, which needs no color conversion; within 2 levels for color."""
    file = jpegs.write(noise(75, 91, 1))
    want = np.asarray(Image.open(io.BytesIO(file)))
    for each in (file, indexed_jpeg.transcode(file)):
        np.testing.assert_array_equal(
            crop(each, (0, 0, 75, 75), 75), np.repeat(want[:, :75, None], 3, 2)
        )
        np.testing.assert_array_equal(
            crop(each, (11, 27, 64, 64), 64, 1), np.repeat(want[11:75, 27:, None][:, ::-1], 3, 2)
        )
    file = encoded(photographs[0])
    want = np.asarray(Image.open(io.BytesIO(file)))[100:300, 100:300].astype(int)
    assert np.abs(crop(indexed_jpeg.transcode(file), (100, 100, 200, 200), 200) - want).max() <= 2


@pytest.mark.parametrize("from_file", [False, True], ids=["memory", "file"])
def test_raw_pixels_are_cropped_like_pillow(photographs, tmp_path, from_file):
    rng = np.random.default_rng(3)
    for photograph in photographs[:3]:
        content = photograph.tobytes()
        for size in (1, 64, 211):
            box, flip = random_box(rng, photograph.height, photograph.width), int(rng.integers(2))
            job = make_job(
                [content], [box], size, flip, native.RAW, [(photograph.height, photograph.width)]
            )
            if from_file:
                (tmp_path / "raw").write_bytes(b"before" + content)
                with open(tmp_path / "raw", "rb") as file:
                    job.samples["bytes"], job.samples["offset"] = 0, 6
                    job.samples["file"] = file.fileno()
                    job.decode()
            else:
                job.decode()
            assert job.samples["status"][0] == native.OK
            assert (
                mean_difference(job.pixels[0], crop_with_pillow(photograph, box, size, flip))
                <= MEAN
            )


@settings(max_examples=25)
@given(st.data())
def test_segments_decode_to_libjpegs_pixels_exactly(jpegs, noise, plain, data):
    """With and without SIMD, for any size, sampling, quality, box, output size and interval.

    Boxes touch the image borders often.
    """
    height, width = data.draw(st.integers(1, 120)), data.draw(st.integers(1, 120))
    channels = data.draw(st.sampled_from([1, 3]))
    sampling = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    rgb = channels == 3 and sampling == (1, 1) and data.draw(st.booleans())
    original = jpegs.write(
        noise(height, width, channels), sampling, rgb=rgb, quality=data.draw(st.integers(1, 100))
    )
    across = -(-width // (8 * (sampling[0] if channels == 3 else 1)))
    interval = data.draw(st.sampled_from([n for n in range(1, across + 1) if across % n == 0]))
    indexed = indexed_jpeg.add_index(native.transcode(original, interval))
    box = []
    for extent in (height, width):
        from_ = data.draw(st.sampled_from([0, extent - 1]) | st.integers(0, extent - 1))
        room = extent - from_
        box.append((from_, data.draw(st.sampled_from([1, room]) | st.integers(1, room))))
    (top, tall), (left, wide) = box
    # For smaller outputs the libjpeg path would decode at a smaller scale.
    size = data.draw(st.integers(max(tall, wide) // 8 + 1, 256))
    box, flip = (top, left, tall, wide), data.draw(st.integers(0, 1))
    ours = crop(indexed, box, size, flip)
    np.testing.assert_array_equal(ours, crop(original, box, size, flip))
    job = make_job([indexed, original], [box, box], size, flip)
    plain.densefeed_decode(ctypes.byref(job.batch))
    np.testing.assert_array_equal(job.pixels, [ours, ours])


@settings(max_examples=60)
@given(st.data())
def test_crops_of_one_image_equal_crops_decoded_alone(jpegs, noise, data):
    """Neighboring samples of one image share its planes, up to 8 at once, so 9 are two groups."""
    height, width = data.draw(st.integers(1, 120)), data.draw(st.integers(1, 120))
    file = jpegs.write(noise(height, width), data.draw(st.sampled_from([(1, 1), (2, 1), (2, 2)])))
    kind = data.draw(st.sampled_from(["indexed", "plain", "raw", "planes"]))
    if kind == "indexed":
        file = indexed_jpeg.transcode(file)
    if kind == "raw":
        file = np.asarray(Image.open(io.BytesIO(file))).tobytes()
    if kind == "planes":
        file = native.planes(file)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    count, size = data.draw(st.integers(2, 9)), data.draw(st.sampled_from([1, 7, 40]))
    boxes = [random_box(rng, height, width, least=1) for _ in range(count)]
    flips = rng.integers(2, size=count)
    stored = {"raw": native.RAW, "planes": native.PLANES}.get(kind, native.JPEG)
    alone = make_job([file] * count, boxes, size, flips, stored, [(height, width)] * count)
    alone.decode()
    together = make_job([file] * count, boxes, size, flips, stored, [(height, width)] * count)
    together.samples["bytes"] = together.samples["bytes"][0]
    together.decode()
    assert (together.samples["status"] == native.OK).all()
    np.testing.assert_array_equal(together.pixels, alone.pixels)
    # For smaller outputs libjpeg may decode crops at different scales, and then each alone.
    if size == 40:
        shared = together.samples["took"][:, 2] == 0
        assert shared.tolist() == [row % 8 > 0 for row in range(count)]


@settings(max_examples=60)
@given(st.data())
def test_crops_of_planes_equal_crops_of_the_jpeg(jpegs, noise, data):
    """Pixels are equal for every size, chroma sampling and filter, from memory and from a file."""
    height, width = data.draw(st.integers(1, 120)), data.draw(st.integers(1, 120))
    options = data.draw(
        st.sampled_from([{"sampling": s} for s in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))])
        | st.sampled_from([{"rgb": 1}, {"progressive": 1}])
    )
    channels = data.draw(st.sampled_from([3, 1]))
    if channels == 1:
        options = {}
    file = jpegs.write(noise(height, width, channels), **options)
    box = random_box(np.random.default_rng(data.draw(st.integers(0, 99))), height, width, least=1)
    # Smaller outputs would let libjpeg decode the JPEG at a smaller scale.
    size, flip = data.draw(st.integers(16, 80)), data.draw(st.integers(0, 1))
    want = crop(file, box, size, flip)
    planes, extents = native.planes(file), [(height, width)]
    got = crop(planes, box, size, flip, kind=native.PLANES, extents=extents)
    np.testing.assert_array_equal(got, want)
    with tempfile.TemporaryFile() as stored:
        stored.write(b"before" + planes + b"after")
        stored.flush()
        job = make_job([planes], [box], size, flip, kind=native.PLANES, extents=extents)
        job.samples["bytes"], job.samples["file"], job.samples["offset"] = 0, stored.fileno(), 6
        job.decode()
        assert job.samples["status"][0] == native.OK
        np.testing.assert_array_equal(job.pixels[0], want)


@pytest.mark.parametrize(
    ("at", "byte", "message"),
    [
        (0, b"d", "its header is not one of planes"),
        (6, b"\2", "its header is not one of planes"),
        (8, b"\x35", "its header is not one of planes"),
        (9, b"\x11", "it has 7516 bytes, but its planes have 11266"),
    ],
)
def test_damaged_headers_of_planes_are_refused(jpegs, noise, at, byte, message):
    planes = bytearray(native.planes(jpegs.write(noise(50, 100), (2, 2))))
    assert len(planes) == 16 + 50 * 100 + 2 * 25 * 50
    planes[at : at + 1] = byte
    with pytest.raises(native.JpegError, match=message) as caught:
        native.check(bytes(planes), 50, 100, native.PLANES)
    assert caught.value.status == native.DAMAGED
    with pytest.raises(native.JpegError, match="its header is cut"):
        native.check(bytes(planes[:15]), 50, 100, native.PLANES)


def test_damage_outside_a_crop_does_not_matter_to_it(jpegs, noise):
    file = bytearray(indexed_jpeg.transcode(jpegs.write(noise(70, 90), (2, 2))))
    # In the last row of MCUs.
    file[-40] ^= 8
    boxes = [(0, 0, 40, 90), (20, 0, 50, 90), (0, 10, 40, 80)]
    job = make_job([bytes(file)] * 3, boxes, 32, extents=[(70, 90)] * 3)
    job.samples["bytes"] = job.samples["bytes"][0]
    job.decode()
    assert job.samples["status"].tolist() == [native.OK, native.DAMAGED, native.OK]
    assert [bool(message) for message in job.samples["message"]] == [False, True, False]
    alone = crop(bytes(file), boxes[2], 32, extents=[(70, 90)])
    np.testing.assert_array_equal(job.pixels[2], alone)


def test_overflowing_coefficients_decode_alike_without_simd(jpegs, plain):
    """Quantization factors of 255 instead of 1 make every block overflow 16 bits.

    This stands for a damaged file with valid checksums.
    """
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    file = bytearray(indexed_jpeg.transcode(jpegs.write(pixels, (2, 2), quality=100)))
    for at in (n for n in range(len(file)) if file[n : n + 4] == b"\xff\xdb\0\x43"):
        file[at + 5 : at + 69] = 64 * b"\xff"
    (header,) = struct.unpack_from("<I", file, 12)
    struct.pack_into("<I", file, 16, zlib.crc32(file[20:header], zlib.crc32(file[:16])))
    ours = crop(bytes(file), (0, 0, 64, 64), 64)
    job = make_job([bytes(file)], [(0, 0, 64, 64)], 64)
    plain.densefeed_decode(ctypes.byref(job.batch))
    np.testing.assert_array_equal(job.pixels[0], ours)


@pytest.mark.parametrize("sampling", [(4, 1), (4, 2), (1, 4)])
def test_unusual_subsampling_is_decoded_by_libjpeg(jpegs, noise, sampling):
    file = jpegs.write(noise(90, 110), sampling)
    image = Image.open(io.BytesIO(file))
    assert (
        mean_difference(
            crop(file, (0, 0, 90, 110), 90), crop_with_pillow(image, (0, 0, 90, 110), 90)
        )
        <= 1
    )


def test_no_output_size_writes_outside_the_pixels(photographs):
    file = indexed_jpeg.transcode(encoded(photographs[0]))
    for size in range(1, 70):
        memory = np.full(3 * size * size + 256, 77, np.uint8)
        job = make_job([file], [(3, 5, 200, 300)], size)
        job.batch.pixels = memory[128:].ctypes.data
        job.decode()
        assert (memory[:128] == 77).all()
        assert (memory[-128:] == 77).all()
        np.testing.assert_array_equal(
            memory[128:-128].reshape(size, size, 3), crop(file, (3, 5, 200, 300), size)
        )


@pytest.mark.parametrize("index", [True, False], ids=["indexed", "plain"])
def test_oblong_crops_match_pillow_and_write_no_other_pixels(photographs, index):
    """Crops of any proportions to height x width; a scaled decoding keeps enough of both axes."""
    rng = np.random.default_rng(4)
    file = encoded(photographs[1])
    image = Image.open(io.BytesIO(file))
    file = indexed_jpeg.transcode(file) if index else file
    for height, width in ((1, 64), (64, 1), (31, 97), (176, 272), (256, 192), (24, 300), (40, 9)):
        (top, left, tall, wide), flip = random_box(rng, image.height, image.width), height % 2
        memory = np.full(3 * height * width + 256, 77, np.uint8)
        job = make_job([file], [(top, left, tall, wide)], (height, width), flip)
        job.batch.pixels = memory[128:].ctypes.data
        job.decode()
        assert job.samples["status"][0] == native.OK
        assert (memory[:128] == 77).all()
        assert (memory[-128:] == 77).all()
        cut = image.crop((left, top, left + wide, top + tall))
        want = np.asarray(cut.resize((width, height), Image.Resampling.BILINEAR))
        want = want[:, ::-1] if flip else want
        got = memory[128:-128].reshape(height, width, 3)
        assert mean_difference(got, want) <= MEAN, (height, width)


FLAGS = ("-O3", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off")
# The library's own code is that of level 4 where the processor has it.
LEVELS = {"DEFAULT": (2,), "AVX2": (2, 3), "AVX512": (2, 3)}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86-64")
@pytest.mark.parametrize(
    "level",
    [
        # Compiling takes 4 s of each. Level 2 has no instruction for a * b + c, unlike the library.
        pytest.param(level, marks=pytest.mark.slow)
        for level in LEVELS.get(torch.backends.cpu.get_cpu_capability(), ())
    ],
)
def test_every_instruction_set_gives_equal_pixels(photographs, tmp_path, level):
    """Both filters, crops at every scale, equal to the bit: no a * b + c is rounded once."""
    flags = (*FLAGS, f"-march=x86-64-v{level}", "-DDENSEFEED_ONE_CPU")
    sources = [NATIVE / f"{name}.c" for name in SOURCES]
    lib = ctypes.CDLL(str(compile_c(tmp_path / "one.so", sources, *flags)))
    rng = np.random.default_rng(0)
    files = [encoded(picture, subsampling="4:2:0") for picture in photographs]
    files += [indexed_jpeg.transcode(file) for file in files]
    # Rows end with 32, 1 and 29 pixels of a vector of 32.
    for size, kernel in itertools.product((224, 97, 61), (native.BILINEAR, native.BICUBIC)):
        boxes = [random_box(rng, *native.probe(file), 1) for file in files]
        ours, theirs = (make_job(files, boxes, size) for _ in range(2))
        ours.samples["filter"] = theirs.samples["filter"] = kernel
        ours.decode()
        lib.densefeed_decode(ctypes.byref(theirs.batch))
        assert (ours.samples["status"] == native.OK).all()
        np.testing.assert_array_equal(theirs.pixels, ours.pixels)


# ------------------------------------------------------------------------- Checksums and parts


def test_checksums_equal_zlibs(plain, tmp_path):
    rng = np.random.default_rng(0)
    # The library takes 512 bits at a time where the processor can, this one 128.
    narrow = compile_c(tmp_path / "one.so", [NATIVE / "checksum.c"], *FLAGS, "-DDENSEFEED_ONE_CPU")
    for lib in (native.library(), ctypes.CDLL(str(narrow)), plain):
        crc32 = lib.densefeed_crc32
        crc32.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint32]
        crc32.restype = ctypes.c_uint32
        for length in [*range(600), 1000, 4097, 100_003]:
            content = rng.bytes(length)
            assert crc32(content, length, 0) == zlib.crc32(content)
            assert crc32(content, length, 0xDEADBEEF) == zlib.crc32(content, 0xDEADBEEF)


@pytest.fixture
def maps(tmp_path, jpegs, noise):
    """A job of five samples with three parts each, the parts, their expected bytes, the file."""
    rng = np.random.default_rng(5)
    content = rng.bytes(5000)
    path = tmp_path / "maps"
    path.write_bytes(content)
    lengths = (24, 100, 7)
    offset = np.array(
        [
            [0, 24, 124],  # neighbors
            [1000, 1030, 1194],  # with gaps that are read too, the last of the maximum width
            [1000, 1030, 1195],  # with a gap that is too wide for that
            [4000, 3000, 2000],  # descending
            [500, 510, 505],  # overlapping
        ]
    )
    want = [
        [content[at : at + length] for at, length in zip(row, lengths, strict=True)]
        for row in offset
    ]
    crc = np.array([zlib.crc32(b"".join(row)) for row in want], np.uint32)
    to = [np.zeros((5, length), np.uint8) for length in lengths]
    with open(path, "rb") as file:
        parts = native.Parts(np.full((5, 3), file.fileno(), np.int32), offset, to, crc)
        image = jpegs.write(noise(20, 20))
        yield make_job(5 * [image], 5 * [(0, 0, 20, 20)], 16, parts=parts), parts, want, path


def test_parts_are_read_from_any_offsets(maps):
    job, parts, want, _ = maps
    job.decode()
    assert not job.samples["status"].any()
    for n, row in enumerate(want):
        assert [to[n].tobytes() for to in parts.to] == row


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rows", [slice(0, 5), slice(1, 4), slice(4, 5)], ids=str)
def test_parts_of_some_samples(maps, rows, shared):
    """Neither more is read, nor more written; the job keeps what it reads alive."""
    whole, parts, want, _ = maps
    copied = replace(
        parts, file=parts.file.copy(), offset=parts.offset.copy(), crc=parts.crc.copy()
    )
    read = native.PartRows(copied, rows.start) if shared else native.PartRows(copied.of(rows))
    pixels = np.zeros_like(whole.pixels)
    job = native.Job(whole.samples[rows], pixels[rows], read, keep=whole)
    del copied, read
    gc.collect()
    # Memory of the same sizes, which an allocator would give the next time.
    _others = [np.full_like(part, 77) for part in (parts.file, parts.offset, parts.crc)]
    job.decode()
    assert job.failed == 0
    for n, row in enumerate(want):
        inside = rows.start <= n < rows.stop
        empty = [bytes(len(part)) for part in row]
        assert [to[n].tobytes() for to in parts.to] == (row if inside else empty)
        assert pixels[n].any() == inside


@pytest.mark.parametrize("bad", [[], [3], [0, 4]])
@pytest.mark.parametrize("threads", [0, 2])
def test_jobs_count_the_samples_that_fail(maps, bad, threads):
    """On the calling thread and by a pool, and from 0 when a job runs again."""
    job, parts, *_ = maps
    parts.crc[bad] ^= 1
    pool = native.Pool(max(threads, 1))
    for _ in range(2):
        if threads:
            pool.submit(job)
            pool.wait(job)
        else:
            job.decode()
        assert job.failed == len(bad) == np.count_nonzero(job.samples["status"])
    pool.close()


@pytest.mark.skipif(
    not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER,
    reason="needs Linux and its default policy, which the threads replace",
)
def test_decoding_threads_do_not_preempt_others(photographs):
    before = set(os.listdir("/proc/self/task"))
    pool = native.Pool(3)
    job = make_job([encoded(photographs[0])], [(0, 0, 20, 20)], 16)
    pool.submit(job)
    pool.wait(job)
    mine = [int(thread) for thread in set(os.listdir("/proc/self/task")) - before]
    until = time.monotonic() + 60
    # A thread sets its policy when it first runs.
    while {os.sched_getscheduler(thread) for thread in mine} != {os.SCHED_BATCH}:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert len(mine) == 3
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    pool.close()


IDLE = """
import os, time
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
from densefeed import native
before = set(os.listdir("/proc/self/task"))
pool = native.Pool(2)
time.sleep(0.5)
mine = set(os.listdir("/proc/self/task")) - before
assert len(mine) == 2
assert {os.sched_getscheduler(int(thread)) for thread in mine} == {os.SCHED_IDLE}
pool.close()
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="a policy of Linux")
def test_decoding_threads_keep_a_policy_that_the_user_chose(command):
    done = command("-c", IDLE)
    assert done.returncode == 0, done.stderr


def test_crops_of_one_image_get_its_parts(maps):
    job, parts, want, _ = maps
    job.samples["bytes"] = job.samples["bytes"][0]
    # Rows 0 and 1 have one map, row 2 another; rows 3 and 4 differ in their checksums alone.
    for row, place in ((1, 0), (2, 4), (4, 3)):
        parts.offset[row], parts.crc[row] = parts.offset[place], parts.crc[place]
    parts.crc[4] ^= 1
    job = native.Job(job.samples, job.pixels, native.PartRows(parts), keep=job)
    job.decode()
    assert job.samples["status"].tolist() == [native.OK] * 4 + [native.DAMAGED]
    for row, place in enumerate((0, 0, 4, 3)):
        assert [to[row].tobytes() for to in parts.to] == want[place]


def test_damaged_or_truncated_part_fails_only_its_sample(maps):
    job, _parts, _, path = maps
    changed = bytearray(path.read_bytes())
    changed[3050] ^= 1  # in sample 3's second part
    path.write_bytes(changed[:4010])  # and its first is truncated
    job.decode()
    assert job.samples["status"].tolist() == [0, 0, 0, native.UNREADABLE, 0]
    assert b"cut or replaced" in job.samples["message"][3]
    path.write_bytes(changed)
    job.decode()
    assert job.samples["status"].tolist() == [0, 0, 0, native.DAMAGED, 0]
    assert b"checksum" in job.samples["message"][3]


def count_reads() -> int:
    """Return the calls of this process that read; skip where the system does not count them."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        pytest.skip("the system does not count reads")
    return int(dict(line.split(": ") for line in lines)["syscr"])


@pytest.mark.parametrize("side", [16, 200], ids=["shorter than a head", "longer"])
@pytest.mark.parametrize("gap", [0, 8])
def test_outside_a_map_is_read_with_the_head_of_the_image_behind_it(
    tmp_path, jpegs, noise, side, gap
):
    """As in a .beton. Pixels and map are those of separate reads, also where the file is cut."""
    image = indexed_jpeg.transcode(jpegs.write(noise(side, side)))
    assert (len(image) > 2048) == (side == 200)
    part = np.random.default_rng(0).bytes(500)
    path = tmp_path / "file"
    path.write_bytes(part + bytes(gap) + image)
    to, crc = [np.zeros((1, 500), np.uint8)], np.array([zlib.crc32(part)], np.uint32)
    with open(path, "rb") as file:
        number = file.fileno()
        parts = native.Parts(np.array([[number]]), np.array([[0]]), to, crc)
        alone = make_job([image], [(0, 0, side, side)], 16)
        alone.decode()
        job = make_job([image], [(0, 0, side, side)], 16, parts=parts)
        job.samples["bytes"], job.samples["file"], job.samples["offset"] = 0, number, 500 + gap
        before = count_reads()
        own = count_reads() - before
        before = count_reads()
        job.decode()
        # The map and the head, then the segments of the crop.
        assert count_reads() - before - own == 2 + (gap > 0)
        assert job.samples["status"].tolist() == [native.OK]
        np.testing.assert_array_equal(job.pixels, alone.pixels)
        assert to[0].tobytes() == part
        for length in (len(image) // 2, 30, 0):
            os.truncate(path, 500 + gap + length)
            to[0][:] = 0
            job.decode()
            assert job.samples["status"].tolist() == [native.UNREADABLE]
            assert b"cut or replaced" in job.samples["message"][0]
            assert to[0].tobytes() == part


# ------------------------------------------------------------------------- Bad input


@pytest.fixture(scope="module")
def whole(jpegs, noise):
    return jpegs.write(noise(70, 90), (2, 2))


DAMAGES = {
    "empty": lambda file: b"",
    "one byte": lambda file: file[:1],
    "header cut": lambda file: file[:30],
    "cut": lambda file: file[: len(file) * 2 // 3],
    "last byte gone": lambda file: file[:-1],
    "zeroed": lambda file: file[:900] + bytes(len(file) - 900),
    "all zeros": lambda file: bytes(len(file)),
    "no image": lambda file: b"hello " * 100,
    "bit in the scan": lambda file: file[:-200] + bytes([file[-200] ^ 8]) + file[-199:],
    "bit in the header": lambda file: file[:60] + bytes([file[60] ^ 1]) + file[61:],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_indexed_file_is_never_decoded(whole, name):
    """Checksums cover every bit of the header and of the rows that a crop reads."""
    job = make_job(
        [DAMAGES[name](indexed_jpeg.transcode(whole))], [(0, 0, 70, 90)], 32, extents=[(70, 90)]
    )
    job.decode()
    assert job.samples["status"][0] in (native.DAMAGED, native.UNREADABLE), name
    assert job.samples["message"][0]


@pytest.mark.parametrize(
    "name", ["empty", "one byte", "header cut", "cut", "zeroed", "all zeros", "no image"]
)
def test_truncated_or_zeroed_plain_file_is_never_decoded(whole, name):
    # The second box does not need the missing bytes.
    for box in ((0, 0, 70, 90), (0, 0, 8, 8)):
        job = make_job([DAMAGES[name](whole)], [box], 32, extents=[(70, 90)])
        job.decode()
        assert job.samples["status"][0] in (native.DAMAGED, native.UNREADABLE), name


def scan(file: bytes) -> str:
    """Return what a scan says of a file: "", a warning, or `damaged`."""
    try:
        return native.scan(file)
    except native.JpegError:
        return "damaged"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "coding", [{}, {"progressive": 1}, {"restart": 7}, {"arithmetic": 1}], ids=str
)
def test_outside_a_scan_finds_what_pillow_refuses_and_libjpeg_warns_of(jpegs, noise, coding):
    """Truncated at 60 places; a bit flipped at 600.

    A scan that says nothing leaves only files that libjpeg, with its own handling of errors,
    decodes without a warning. Of those many have other pixels: a JPEG has no checksum.
    """
    rng, whole = np.random.default_rng(0), jpegs.write(noise(120, 170), (2, 2), **coding)
    assert native.scan(whole) == ""
    damaged = [whole[:at] for at in np.linspace(3, len(whole) - 1, 60, dtype=int)]
    assert {*map(scan, damaged)} == {"damaged"}
    for at in rng.integers(2, len(whole), 600).tolist():
        damaged.append(whole[:at] + bytes([whole[at] ^ 1 << rng.integers(8)]) + whole[at + 1 :])
    found = [scan(file) for file in damaged]
    for file, said in zip(damaged, found, strict=True):
        try:
            Image.open(io.BytesIO(file)).load()
        # Pillow does not limit the types of its exceptions.
        except Exception:
            assert said == "damaged"
        assert said or jpegs.warnings(file) == 0
    assert "" in found
    warned = {said for said in found if said not in ("", "damaged")}
    assert warned or coding == {"arithmetic": 1}
    assert all("extraneous bytes before marker" in said for said in warned)


def test_outside_a_scan_counts_what_the_decoders_ignore(whole):
    """Bytes between the last row and the end marker, of which the decoder has read some."""
    padded = whole[:-2] + bytes(range(1, 10)) + whole[-2:]
    assert re.fullmatch(
        r"Corrupt JPEG data: [5-9] extraneous bytes before marker 0xd9", native.scan(padded)
    )
    np.testing.assert_array_equal(
        *(native.decode(file, 70, 90, native.JPEG) for file in (whole, padded))
    )
    # One more in front of a table of the header.
    table = whole.index(b"\xff\xdb")
    twice = padded[:table] + b"\0" + padded[table:]
    assert native.scan(twice).endswith(" (and 1 more)")


@settings(max_examples=300)
@given(st.data())
def test_any_changed_byte_of_an_indexed_file_is_detected(whole, data):
    """Except in the mark of an indexed file, and in the two bytes of EOI, which have no effect."""
    indexed = bytearray(indexed_jpeg.transcode(whole))
    at = data.draw(st.integers(16, len(indexed) - 3))
    indexed[at] ^= data.draw(st.integers(1, 255))
    job = make_job([bytes(indexed)], [(0, 0, 70, 90)], 16, extents=[(70, 90)])
    job.decode()
    assert job.samples["status"][0] == native.DAMAGED


@settings(max_examples=200)
@given(st.data())
def test_mutated_bytes_give_a_status(whole, data):
    file = bytearray(data.draw(st.sampled_from([whole, indexed_jpeg.transcode(whole)])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(file) - 1))
        file[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    job = make_job([bytes(file), whole], 2 * [(0, 0, 70, 90)], 16, extents=2 * [(70, 90)])
    job.decode()
    assert job.samples["status"][0] in range(5)
    assert bool(job.samples["message"][0]) == (job.samples["status"][0] != native.OK)
    assert job.samples["status"][1] == native.OK


@pytest.mark.parametrize(
    "box",
    [
        (-1, 0, 5, 5),
        (0, 0, 71, 5),
        (0, 88, 5, 3),
        (0, 0, 0, 5),
        (0, 0, np.nan, 5),
        (np.inf, 0, 5, 5),
        (0, 0, 1e300, 5),
    ],
)
def test_crop_outside_the_image_is_rejected(whole, box):
    for file in (whole, indexed_jpeg.transcode(whole)):
        job = make_job([file], [box], 16)
        job.decode()
        assert job.samples["status"][0] == native.UNSUPPORTED
        assert job.samples["message"][0] == b"the crop is not inside the image"


def test_image_of_another_size_than_recorded_is_damaged(whole):
    for file in (whole, indexed_jpeg.transcode(whole)):
        job = make_job([file], [(0, 0, 60, 60)], 16, extents=[(71, 90)])
        job.decode()
        assert job.samples["status"][0] == native.DAMAGED
        assert b"90 x 70 pixels, not 90 x 71" in job.samples["message"][0]


def test_truncated_and_closed_files_are_unreadable(whole, tmp_path):
    path = tmp_path / "image"
    for content in (whole, indexed_jpeg.transcode(whole)):
        path.write_bytes(content)
        with open(path, "rb") as file:
            job = make_job([content], [(0, 0, 70, 90)], 16)
            job.samples["bytes"], job.samples["file"] = 0, file.fileno()
            job.decode()
            assert job.samples["status"][0] == native.OK
            os.truncate(path, len(content) // 2)
            job.decode()
            assert job.samples["status"][0] == native.UNREADABLE
        job.decode()
        assert job.samples["status"][0] == native.UNREADABLE
        assert b"descriptor" in job.samples["message"][0]


def progressive_bomb(side: int, scans: int) -> bytes:
    """Make a small progressive file in which each scan visits every block of a large image."""

    def segment(marker, body):
        return bytes([0xFF, marker]) + struct.pack(">H", 2 + len(body)) + body

    file = (
        b"\xff\xd8"
        + segment(0xDB, b"\0" + 64 * b"\1")
        + segment(0xC2, struct.pack(">BHHBBBB", 8, side, side, 1, 1, 0x11, 0))
    )
    # DC differences of 0, and AC runs of 2^14 empty blocks.
    file += segment(0xC4, b"\0\1" + bytes(15) + b"\0") + segment(
        0xC4, b"\x10\1" + bytes(15) + b"\xe0"
    )
    blocks = (-(-side // 8)) ** 2
    file += segment(0xDA, bytes([1, 1, 0, 0, 0, 0])) + bytes(-(-blocks // 8))
    runs = -(-blocks // 2**14)
    return (
        file
        + scans * (segment(0xDA, bytes([1, 1, 0, 1, 63, 0])) + bytes(-(-15 * runs // 8)))
        + b"\xff\xd9"
    )


def test_coefficients_that_no_scan_sends_are_zero(jpegs, noise):
    """libjpeg would guess them, each version differently, and not those of an indexed file."""
    whole = jpegs.write(noise(40, 48), progressive=1)
    scans = [n for n in range(len(whole)) if whole[n : n + 2] == b"\xff\xda"]
    # The first scan holds the means of the blocks.
    means = whole[: scans[1]] + b"\xff\xd9"
    box = (0, 0, 40, 40)
    blocks = crop(means, box, 40).reshape(5, 8, 5, 8, 3)
    assert (blocks == blocks[:, :1, :, :1]).all()
    np.testing.assert_array_equal(
        crop(indexed_jpeg.transcode(means), box, 40), crop(means, box, 40)
    )


def test_progressive_bomb_is_rejected_early():
    bomb = progressive_bomb(8000, 190)
    assert len(bomb) < 300_000
    began = time.process_time()
    job = make_job([bomb], [(0, 0, 100, 100)], 16)
    job.decode()
    with pytest.raises(native.JpegError):
        native.transcode(bomb, 0)
    assert job.samples["status"][0] == native.UNSUPPORTED
    assert b"scans" in job.samples["message"][0]
    assert time.process_time() - began < 10  # seconds; usually 0.2


REFUSED = {
    "12 bits": (header_jpeg(0xC1, 64, precision=12), "it has 12 bits per color; convert it"),
    "12 bits, progressive": (header_jpeg(0xC2, 64, precision=12), "it has 12 bits per color"),
    "lossless": (header_jpeg(0xC3, 64), "it is a lossless or hierarchical JPEG; save it as"),
    "lossless, 12 bits": (header_jpeg(0xC3, 64, precision=12), "it is a lossless or hier"),
    "lossless, arithmetic": (header_jpeg(0xCB, 64), "it is a lossless or hierarchical JPEG"),
    "hierarchical": (header_jpeg(0xC5, 64), "it is a lossless or hierarchical JPEG"),
    "too large": (header_jpeg(0xCA, 16_384), "its 16384 x 16384 pixels are more than --max-pixels"),
    "baseline, too large": (header_jpeg(0xC0, 65_500), "its 65500 x 65500 pixels are more than"),
    "coefficients": (
        header_jpeg(0xCA, 9_400, components=4),
        "its coefficients take more memory than",
    ),
    "Huffman coefficients": (
        header_jpeg(0xC2, 9_400, components=4),
        "its coefficients take more memory than",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_codings_and_sizes_are_refused_before_a_decoder_sees_them(name, little_memory):
    """In every function, with one sentence, whatever libjpeg could do, and without the memory."""
    file, why = REFUSED[name]
    side = int.from_bytes(file[file.index(b"\xff\xdb") + 74 :][:2])
    job = make_job([file, file[:-20]], [(0, 0, 8, 8)] * 2, 8, extents=[(side, side)] * 2)
    with little_memory():
        job.decode()
        assert (job.samples["status"] == native.DAMAGED).all()
        messages = [message.decode() for message in job.samples["message"]]
        for call in (native.probe, native.check_frame, partial(native.transcode, interval=0)):
            with pytest.raises(native.JpegError) as refused:
                call(file)
            assert refused.value.status == native.DAMAGED
            messages.append(str(refused.value))
    assert all(message.startswith(why) for message in messages), messages


def test_transcoding_needs_memory_for_a_baseline_jpeg_too():
    with pytest.raises(native.JpegError, match="its coefficients take more memory"):
        native.transcode(header_jpeg(0xC0, 9_400, components=4), 0)


def test_the_limit_of_pixels_can_be_raised_and_lowered():
    file = encoded(Image.new("RGB", (20, 30)))
    raw = make_job([bytes(3 * 600)], [(0, 0, 30, 20)], 8, kind=native.RAW, extents=[(30, 20)])
    try:
        native.limit_pixels(599)
        with pytest.raises(native.JpegError, match="its 20 x 30 pixels are more than --max-pixels"):
            native.probe(file)
        raw.decode()
        assert raw.samples["status"][0] == native.DAMAGED
        native.limit_pixels(600)
        assert native.probe(file) == (30, 20)
        raw.decode()
        assert raw.samples["status"][0] == native.OK
    finally:
        native.limit_pixels(native.MAX_PIXELS)


# ------------------------------------------------------------------------- Threads


@pytest.fixture
def pool():
    pool = native.Pool(2)
    yield pool
    pool.close()


def slow_job(photographs, count=64) -> native.Job:
    """Make a job that takes a tenth of a second or more."""
    file = encoded(photographs[0], progressive=True)
    return make_job(count * [file], count * [(0, 0, *native.probe(file))], 224)


def test_pools_of_any_size_give_equal_pixels(photographs):
    file = indexed_jpeg.transcode(encoded(photographs[1]))
    rng = np.random.default_rng(0)
    boxes = [random_box(rng, *native.probe(file)) for _ in range(40)]
    want = make_job(40 * [file], boxes, 64)
    want.decode()
    pools = [native.Pool(threads) for threads in (1, 3, 4)]
    jobs = [[make_job(40 * [file], boxes, 64) for _ in range(3)] for _ in pools]
    for pool, mine in zip(pools, jobs, strict=True):
        for job in mine:
            pool.submit(job)
    for pool, mine in zip(pools, jobs, strict=True):
        for job in reversed(mine):
            pool.wait(job)
            np.testing.assert_array_equal(job.pixels, want.pixels)
        pool.close()


def test_cancelled_job_stops_early_and_the_next_completes(photographs, pool):
    job, after = slow_job(photographs, 2000), slow_job(photographs, 4)
    pool.submit(job)
    pool.submit(after)
    pool.cancel(job)
    assert job.batch.done == job.batch.next < 2000
    pool.wait(after)
    assert after.batch.done == 4
    assert not after.samples["status"].any()


def test_close_drops_pending_jobs_and_later_use_raises(photographs):
    pool = native.Pool(2)
    jobs = [slow_job(photographs, 2000) for _ in range(3)]
    for job in jobs:
        pool.submit(job)
    pool.close()
    pool.close()
    assert sum(job.batch.done for job in jobs) < 2000
    pool.cancel(jobs[0])
    with pytest.raises(RuntimeError, match="closed"):
        pool.wait(jobs[0])
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(jobs[0])


@pytest.mark.parametrize("threads", [0, -1])
def test_pool_needs_at_least_one_thread(threads):
    with pytest.raises(UserError, match=r"cannot start .* threads"):
        native.Pool(threads)

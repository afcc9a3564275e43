"""Every format and mode becomes the RGB that NumPy computes from the file's values, or is refused.

Most files are written here byte by byte, so that no writer scales or converts a value.
"""

import ast
import io
import logging
import re
import struct
import tarfile
import warnings
import zlib
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.folder import FolderSource
from densefeed.relabel.rendering import NativeRender, PillowRender
from densefeed.storage import samples
from densefeed.storage.geometry import TeacherView
from densefeed.storage.images import Images, decode
from densefeed.system.errors import UserError
from densefeed.tools.pack_dataset import Packing, main

from ..jpeg_files import header_jpeg

PAGE = Path(__file__).parents[2] / "docs/reference/data.md"
HEIGHT, WIDTH = 4, 64
RAMP = np.tile(np.linspace(0, 1, WIDTH), (HEIGHT, 1))
# Alpha of half-transparent images.
HALF = 128


def ramp(most: int, dtype: str = "u1", least: int = 0) -> np.ndarray:
    """Make rows that rise from `least` to `most`."""
    return (least + RAMP * (most - least)).round().astype(dtype)


def stack(*channels: np.ndarray) -> np.ndarray:
    return np.stack(channels, -1)


def color(most: int, dtype: str = "u1") -> np.ndarray:
    """Make an RGB image whose channels differ."""
    gray = ramp(most, dtype)
    return stack(gray, gray[:, ::-1], np.full_like(gray, most // 3))


# ------------------------------------------------------------------------- writers


def pack_bits(values: np.ndarray, bits: int) -> bytes:
    """Pack rows of values of 1, 2, 4 or 12 bits, the first in the highest bits."""
    bit = values[..., None] >> np.arange(bits)[::-1] & 1
    return np.packbits(bit.reshape(len(values), -1).astype(np.uint8), axis=1).tobytes()


def png(values: np.ndarray, depth: int, kind: int, *chunks: bytes) -> bytes:
    """Make a PNG of this color type; each of `chunks` begins with its type."""
    height, width = values.shape[:2]
    if depth < 8:
        rows = [pack_bits(row[None], depth) for row in values]
    else:
        rows = [row.astype(f">u{depth // 8}").tobytes() for row in values]
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    pixels = b"IDAT" + zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        for chunk in (head, *chunks, pixels, b"IEND")
    )


PALETTE = np.random.default_rng(0).integers(0, 256, (WIDTH, 3), np.uint8)
PLACES = np.tile(np.arange(WIDTH, dtype=np.uint8), (HEIGHT, 1))
COLORS = PALETTE[PLACES]
PLTE, TRNS = b"PLTE" + PALETTE.tobytes(), b"tRNS" + bytes(range(WIDTH))


def tiff(
    values: np.ndarray,
    photometric: int,
    *,
    bits: int = 0,
    order: str = "<",
    extra: tuple[int, ...] = (),
    more: dict[int, tuple[int, ...]] | None = None,
    planes: bool = False,
    packed: bool = False,
) -> bytes:
    """Make a TIFF of one strip; `extra` are the kinds of its extra samples.

    `planes`: of separate planes, each of strips of two rows; `packed`: compressed.
    """
    height, width, count = (*values.shape, 1)[:3]
    depth = bits or 8 * values.itemsize
    kind = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    strips, rows = [values], height
    if planes:
        rows = 2
        channels = np.moveaxis(values.reshape(height, width, count), 2, 0)
        strips = [channel[top : top + rows] for channel in channels for top in range(0, height, 2)]
    strips = [
        pack_bits(strip, bits) if bits else strip.astype(strip.dtype.newbyteorder(order)).tobytes()
        for strip in strips
    ]
    strips = [zlib.compress(strip) for strip in strips] if packed else strips
    sizes = tuple(map(len, strips))
    tags = {256: (width,), 257: (height,), 258: (depth,) * count, 259: (8 if packed else 1,)}
    tags |= {262: (photometric,), 273: (0,) * len(sizes), 277: (count,), 278: (rows,), 279: sizes}
    tags |= {284: (2,)} if planes else {}
    tags |= {339: (kind,) * count, **({338: extra} if extra else {}), **(more or {})}
    start, arrays = 8 + 2 + 12 * len(tags) + 4, b""
    start += sum(2 * len(numbers) for numbers in tags.values() if len(numbers) > 2)
    entries, starts = b"", tuple(start + sum(sizes[:n]) for n in range(len(sizes)))
    for tag, numbers in sorted({**tags, 273: starts}.items()):
        packed = struct.pack(f"{order}{len(numbers)}H", *numbers)
        place = packed.ljust(4, b"\0")
        if len(packed) > 4:
            place = struct.pack(order + "I", 8 + 2 + 12 * len(tags) + 4 + len(arrays))
            arrays += packed
        entries += struct.pack(order + "HHI", tag, 3, len(numbers)) + place
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, len(tags))
    return head + entries + bytes(4) + arrays + b"".join(strips)


def netpbm(kind: int, most: int, values: np.ndarray) -> bytes:
    """Make a PGM or PPM, P2, P3 in text and P5, P6 in bytes."""
    height, width = values.shape[:2]
    head = b"P%d %d %d %d\n" % (kind, width, height, most)
    if kind < 4:
        return head + b" ".join(b"%d" % value for value in values.ravel())
    return head + values.astype("u1" if most < 256 else ">u2").tobytes()


def pillow(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


# ------------------------------------------------------------------------- table

SAME, SCALED, INVERTED = "`v`", "`255 v / M`", "`255 - 255 v / M`"
WITHOUT_ALPHA, LOOKED_UP = "the color, without alpha", "the palette's colors"
FIRST_THREE, MIXED = "RGB, the others are left out", "`(255 - C) (255 - K) / 255`, ..."


class Row(NamedTuple):
    """A row of the table."""

    format: str
    samples: str
    # In words; empty for refused files, whose messages the table shows.
    becomes: str
    # Each file with the pixels it becomes, gray or RGB; None for a refusal.
    files: list[tuple[bytes, np.ndarray | None]]
    # Below this are the errors of rounding.
    error: float = 1


def scaled(values: np.ndarray, most: int) -> np.ndarray:
    return values * 255.0 / most


def from_lab(light: np.ndarray) -> np.ndarray:
    """Convert neutral colors of CIELAB, whose L is stored as 0 to 255, to sRGB."""
    light = light / 2.55
    linear = np.where(light > 8, ((light + 16) / 116) ** 3, light / 903.3)
    return 255 * np.where(linear > 0.0031308, 1.055 * linear ** (1 / 2.4) - 0.055, 12.92 * linear)


def from_ycc(ycc: np.ndarray) -> np.ndarray:
    """Convert by the equations of JFIF."""
    y, cb, cr = np.moveaxis(ycc - np.array([0.0, 128, 128]), -1, 0)
    return stack(y + 1.402 * cr, y - 0.344136 * cb - 0.714136 * cr, y + 1.772 * cb).clip(0, 255)


def from_cmyk(cmyk: np.ndarray) -> np.ndarray:
    return (255.0 - cmyk[..., :3]) * (255.0 - cmyk[..., 3:]) / 255


def make_rows() -> list[Row]:
    gray8, gray16, rgb8, rgb16 = ramp(255), ramp(65535, "u2"), color(255), color(65535, "u2")
    bit, crumb, nibble, deep = ramp(1), ramp(3), ramp(15), ramp(4095, "u2")
    half = ramp(HALF)
    alpha8, alpha16 = np.full_like(gray8, HALF), np.full_like(gray16, HALF * 257)
    want_gray16, want_rgb16 = scaled(gray16, 65535), scaled(rgb16, 65535)
    gray, picture, palette = map(Image.fromarray, (gray8, rgb8, PLACES))
    palette.putpalette(PALETTE.tobytes())
    flat = Image.new("CMYK", (WIDTH, HEIGHT), (200, 100, 0, 50))
    cmyk = stack(gray8, gray8[:, ::-1], half, ramp(100))
    ycc, neutral = stack(gray8, ramp(200), ramp(90)), stack(gray8, 0 * gray8, 0 * gray8)
    yccs = Image.frombytes("YCbCr", (WIDTH, HEIGHT), ycc.tobytes())
    table = np.zeros((256, 3), np.uint16)
    table[:WIDTH] = PALETTE.astype(np.uint16) * 257
    table = {320: tuple(table.T.ravel().tolist())}
    rgba8, floats = np.dstack([rgb8, alpha8]), RAMP.astype("<f4").tobytes()
    signed = [
        (tiff(ramp(2 ** (bits - 1) - 1, f"i{bits // 8}", -(2 ** (bits - 1))), 1), None)
        for bits in (8, 16, 32)
    ]
    mosts = 100, 255, 256, 1023, 4095, 65535
    return [
        Row(
            "JPEG",
            "gray, RGB",
            SAME,
            [
                (pillow(gray, "JPEG", quality=100), gray8),
                (pillow(gray.convert("RGB"), "JPEG", quality=100), gray8),
            ],
            2,
        ),
        Row(
            "JPEG",
            "CMYK",
            MIXED,
            [(pillow(flat, "JPEG", quality=100), from_cmyk(np.array(flat)))],
            2,
        ),
        Row("JPEG", "12 bits", "", [(header_jpeg(0xC1, WIDTH, 12), None)]),
        Row(
            "PNG",
            "gray, RGB, 8 bits",
            SAME,
            [(png(gray8, 8, 0), gray8), (png(rgb8, 8, 2), rgb8)],
            0,
        ),
        Row(
            "PNG",
            "gray, 1, 2, 4 and 16 bits; RGB, 16 bits",
            SCALED,
            [
                *(
                    (png(v, bits, 0), scaled(v, 2**bits - 1))
                    for bits, v in ((1, bit), (2, crumb), (4, nibble))
                ),
                (png(gray16, 16, 0), want_gray16),
                (png(gray16, 16, 0, b"tRNS\0\0"), want_gray16),
                (png(rgb16, 16, 2), want_rgb16),
            ],
        ),
        Row(
            "PNG",
            "gray or RGB with alpha, 8 and 16 bits",
            WITHOUT_ALPHA,
            [
                (png(stack(gray8, alpha8), 8, 4), gray8),
                (png(rgba8, 8, 6), rgb8),
                (png(stack(gray16, alpha16), 16, 4), want_gray16),
                (png(np.dstack([rgb16, alpha16]), 16, 6), want_rgb16),
            ],
        ),
        Row(
            "PNG",
            "palette, also with transparent colors",
            LOOKED_UP,
            [(png(PLACES, 8, 3, PLTE), COLORS), (png(PLACES, 8, 3, PLTE, TRNS), COLORS)],
            0,
        ),
        Row("TIFF", "gray, RGB, 8 bits", SAME, [(tiff(gray8, 1), gray8), (tiff(rgb8, 2), rgb8)], 0),
        Row(
            "TIFF",
            "gray, 1, 2, 4, 12 and 16 bits; RGB, 16 bits",
            SCALED,
            [
                *(
                    (tiff(v, 1, bits=bits, order=order), scaled(v, 2**bits - 1))
                    for bits, v in ((1, bit), (2, crumb), (4, nibble), (12, deep))
                    for order in "<>"
                    # Pillow reads 12 bits in one order.
                    if (bits, order) != (12, ">")
                ),
                *((tiff(gray16, 1, order=order), want_gray16) for order in "<>"),
                *((tiff(rgb16, 2, order=order), want_rgb16) for order in "<>"),
                (pillow(Image.fromarray(gray16), "TIFF", compression="tiff_lzw"), want_gray16),
            ],
        ),
        Row(
            "TIFF",
            "gray whose 0 is white, 1, 2, 4, 8 and 16 bits",
            INVERTED,
            [
                (tiff(bit, 0, bits=1), 255 - scaled(bit, 1)),
                (tiff(crumb, 0, bits=2), 255 - scaled(crumb, 3)),
                (tiff(nibble, 0, bits=4), 255 - scaled(nibble, 15)),
                (tiff(gray8, 0), 255.0 - gray8),
                (tiff(gray16, 0), 255 - want_gray16),
            ],
        ),
        Row(
            "TIFF",
            "RGB and one to three other channels, 8 bits",
            FIRST_THREE,
            [(tiff(np.dstack([rgb8] + [half] * n), 2, extra=(0,) * n), rgb8) for n in (1, 2, 3)],
            0,
        ),
        Row(
            "TIFF",
            "gray or RGB with alpha, 8 bits; RGB with alpha, 16 bits",
            WITHOUT_ALPHA,
            [
                (tiff(stack(gray8, alpha8), 1, extra=(2,)), gray8),
                (tiff(rgba8, 2, extra=(2,)), rgb8),
                (tiff(np.dstack([rgb16, alpha16]), 2, extra=(2,)), want_rgb16),
            ],
        ),
        Row(
            "TIFF",
            "RGB multiplied by alpha",
            "`255 v / alpha`",
            [(tiff(stack(half, half, half, alpha8), 2, extra=(1,)), scaled(half, HALF))],
        ),
        Row("TIFF", "palette", LOOKED_UP, [(tiff(PLACES, 3, more=table), COLORS)], 0),
        Row(
            "TIFF",
            "CMYK, 8 and 16 bits",
            MIXED,
            [(tiff(v, 5), from_cmyk(cmyk)) for v in (cmyk, cmyk.astype(np.uint16) * 257)],
        ),
        Row(
            "TIFF",
            "YCbCr, compressed",
            "RGB by the equations of JFIF",
            [(pillow(yccs, "TIFF", compression="tiff_lzw"), from_ycc(ycc))],
        ),
        Row(
            "TIFF",
            "separate planes: RGB, also with alpha, 8 and 16 bits; CMYK, 8 bits; one channel",
            "as without planes",
            [
                *(
                    (tiff(v, 2, order=order, planes=True), scaled(v, most))
                    for order in "<>"
                    for v, most in ((rgb8, 255), (rgb16, 65535))
                ),
                *(
                    (tiff(v, 2, extra=(2,), order=order, planes=True), want_rgb16)
                    for order in "<>"
                    for v in (rgba8, np.dstack([rgb16, alpha16]))
                ),
                (tiff(cmyk, 5, planes=True), from_cmyk(cmyk)),
                (tiff(bit, 0, bits=1, planes=True), 255 - scaled(bit, 1)),
                (tiff(nibble, 1, bits=4, planes=True), scaled(nibble, 15)),
                (tiff(gray8, 0, planes=True), 255.0 - gray8),
                *((tiff(gray16, 1, order=order, planes=True), want_gray16) for order in "<>"),
                (tiff(PLACES, 3, more=table, planes=True), COLORS),
            ],
        ),
        Row(
            "TIFF",
            "separate planes: CMYK, 16 bits; CIELAB; gray with alpha",
            "",
            [
                (tiff(cmyk.astype(np.uint16) * 257, 5, planes=True), None),
                (tiff(ycc, 8, planes=True), None),
                (tiff(ycc, 8, planes=True, packed=True), None),
                (tiff(stack(gray8, alpha8), 1, extra=(2,), planes=True), None),
            ],
        ),
        Row("TIFF", "CIELAB, 8 bits", "sRGB", [(tiff(neutral, 8), from_lab(gray8))], 2),
        Row("TIFF", "gray, signed, 8, 16 and 32 bits", "", signed),
        Row("TIFF", "gray, unsigned, 32 bits", "", [(tiff(ramp(2**32 - 1, "u4"), 1), None)]),
        Row(
            "TIFF",
            "gray, floats of 32 bits",
            "",
            [(tiff(RAMP.astype("f4"), photometric), None) for photometric in (0, 1)],
        ),
        Row(
            "TIFF",
            "floats of 16 and 64 bits; RGB and other channels, 16 bits; more than six channels",
            "",
            [
                (tiff(RAMP.astype("f2"), 1), None),
                (tiff(RAMP, 1), None),
                (tiff(np.dstack([rgb16, gray16, gray16]), 2, extra=(0, 0)), None),
                (tiff(np.dstack([gray8] * 13), 1, extra=(0,) * 12), None),
            ],
        ),
        Row(
            "TIFF",
            "gray of 12 bits that is big-endian or whose 0 is white; of 16 bits with both",
            "",
            [
                (tiff(deep, 1, bits=12, order=">"), None),
                (tiff(deep, 0, bits=12), None),
                (tiff(gray16, 0, order=">"), None),
            ],
        ),
        Row(
            "PBM",
            "P1, P4",
            "white for 0, black for 1",
            [
                (b"P1 64 4\n" + b" ".join(b"%d" % v for v in bit.ravel()), 255 - scaled(bit, 1)),
                (b"P4 64 4\n" + pack_bits(bit, 1), 255 - scaled(bit, 1)),
            ],
            0,
        ),
        *(
            Row(
                name,
                f"P{kinds[0]}, P{kinds[1]}, `M` from 1 to 65535",
                SCALED,
                [
                    (netpbm(kind, most, make(most, "u2")), scaled(make(most, "u2"), most))
                    for kind in kinds
                    for most in mosts
                ],
            )
            for name, kinds, make in (("PGM", (2, 5), ramp), ("PPM", (3, 6), color))
        ),
        Row("PFM", "gray", "", [(b"Pf\n64 4\n-1.0\n" + floats, None)]),
        Row("PFM", "RGB", "", [(b"PF\n64 4\n-1.0\n" + 3 * floats, None)]),
        Row(
            "GIF, BMP",
            "palette",
            LOOKED_UP,
            [(pillow(palette, k), COLORS) for k in ("GIF", "BMP")],
            0,
        ),
        Row(
            "BMP",
            "gray, RGB",
            SAME,
            [(pillow(gray, "BMP"), gray8), (pillow(picture, "BMP"), rgb8)],
            0,
        ),
        Row("WebP", "RGB", SAME, [(pillow(picture, "WEBP", lossless=True), rgb8)], 0),
        Row(
            "WebP",
            "RGB with alpha",
            WITHOUT_ALPHA,
            [(pillow(Image.fromarray(rgba8), "WEBP", lossless=True, exact=True), rgb8)],
            0,
        ),
    ]


ROWS = make_rows()


def find_result(row: Row) -> str:
    """Decode the files of a row; return what all of them become, as the table says it."""
    results = set()
    for file, want in row.files:
        try:
            image = decode(file, "x")
        except UserError as error:
            (reason,) = re.findall(r"^x cannot be decoded \((.*)\); (?:save|replace)", str(error))
            results.add(f"refused: {reason}")
            continue
        assert image.mode == "RGB"
        error = np.inf
        if want is not None:
            error = np.abs(np.asarray(image) - (want if want.ndim == 3 else want[..., None])).max()
        results.add(row.becomes if error == 0 or error < row.error else f"{error} off")
    return " or ".join(sorted(results))


def test_outside_the_table_of_formats_and_modes_is_on_its_page():
    """Prints the lines of the table."""
    lines = [f"| {row.format} | {row.samples} | {find_result(row)} |" for row in ROWS]
    print("\n".join(lines))
    _, _, table = PAGE.read_text().partition("| format | samples | become |\n|---|---|---|\n")
    assert table.partition("\n\n")[0].rstrip().splitlines() == lines


@pytest.mark.skipif(
    (b"II", 1, (1,), 1, (8, 8), (1,)) not in TiffImagePlugin.OPEN_INFO,
    reason="this Pillow does not read it",
)
def test_outside_gray_multiplied_by_alpha_is_divided_by_it():
    file = tiff(stack(ramp(HALF), np.full((HEIGHT, WIDTH), HALF, np.uint8)), 1, extra=(1,))
    want = scaled(ramp(HALF), HALF)[..., None]
    assert np.abs(np.asarray(decode(file, "a/b.tif")) - want).max() < 1


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("floats", tiff(RAMP.astype("f4"), 1)),
        ("signed samples", tiff(ramp(127, "i1", -128), 1)),
        ("samples of 32 bits", tiff(ramp(2**32 - 1, "u4"), 1)),
    ],
)
def test_outside_samples_without_a_known_range_are_refused_with_a_remedy(kind, file):
    with pytest.raises(UserError) as refused:
        decode(file, "a/b.tif")
    assert str(refused.value) == (
        f"a/b.tif cannot be decoded (it holds {kind}, whose black and white are unknown); save it "
        "with unsigned samples of 8 or 16 bits, or remove this file"
    )


def test_outside_transparent_palettes_and_many_channels_print_nothing(capfd, monkeypatch):
    """Pillow warns of the first and logs the second; Python prints both if nobody listens."""
    monkeypatch.setattr(logging.root, "handlers", [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(png(PLACES, 8, 3, PLTE, TRNS), "a/b.png")
    with pytest.raises(UserError, match="a TIFF"):
        decode(tiff(np.dstack([ramp(255)] * 13), 1, extra=(0,) * 12), "a/b.tif")
    assert capfd.readouterr() == ("", "")


def test_outside_large_gray_of_16_bits_is_scaled_in_parts(monkeypatch):
    """Parts of rows that do not divide the height, and rows wider than a part."""
    gray16 = np.random.default_rng(0).integers(0, 65536, (13, 50), np.uint16)
    for at_once in (1, 100, 250):
        monkeypatch.setattr(samples, "AT_ONCE", at_once)
        for file in (png(gray16, 16, 0), tiff(gray16, 1, order=">"), netpbm(5, 65535, gray16)):
            got = np.asarray(decode(file, ""))
            np.testing.assert_array_equal(got, np.repeat(np.rint(gray16 / 257)[..., None], 3, -1))


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("deep", [1, 257])
@pytest.mark.parametrize(
    ("photometric", "extra"),
    [
        *((1, kinds) for kinds in ((), (0,), (1,), (2,))),
        *((2, kinds) for kinds in ((), (0,), (1,), (2,), (0, 0), (2, 0))),
        *((5, kinds) for kinds in ((), (0,), (2,))),
        *((photometric, ()) for photometric in (0, 8)),
    ],
)
def test_outside_separate_planes_have_the_pixels_of_one_plane_or_are_refused(
    photometric, extra, deep, packed, order
):
    """In any kind of samples that Pillow opens; the same file in one plane is the reference."""
    count = {2: 3, 5: 4, 8: 3}.get(photometric, 1) + len(extra)
    values = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, count), np.uint8)
    # No color multiplied by alpha is larger than alpha.
    values = np.sort(values) if extra == (1,) else values
    values = values.astype(np.uint16) * 257 if deep > 1 else values
    file = tiff(values, photometric, extra=extra, order=order, packed=packed, planes=True)
    got = None
    # Refused.
    with suppress(UserError):
        got = decode(file, "")
    if got is None:
        return
    # The channels that are left out do not matter where Pillow does not open the reference.
    shown = values[..., : count - len(extra)] if set(extra) <= {0} else values
    extra = () if set(extra) <= {0} else extra
    want = decode(tiff(shown, photometric, extra=extra, order="<"), "")
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize(
    "make",
    [
        lambda v: png(v, 16, 0),
        lambda v: tiff(v, 1),
        lambda v: tiff(v, 1, order=">"),
        lambda v: tiff(65535 - v, 0),
        lambda v: netpbm(2, 65535, v),
        lambda v: netpbm(5, 65535, v),
    ],
)
def test_outside_gray_of_16_bits_is_rounded_to_nearest(make):
    """65520 of 65535 is 254.94 of 255."""
    values = np.array([[0, 128, 129, 32767, 65406, 65407, 65520, 65535]], np.uint16)
    got = np.asarray(decode(make(values), ""))[0, :, 0].tolist()
    assert got == [0, 0, 1, 127, 254, 255, 255, 255]


def test_outside_teacher_packing_and_loaders_see_the_same_pixels(tmp_path):
    """Of a PGM of 12 bits, in a folder, a tar and a .beton."""
    values = (np.add.outer(np.arange(32), np.arange(32)) * 66).astype("u2")
    want = np.repeat(scaled(values, 4095)[..., None], 3, -1)
    folder, tars, beton = (tmp_path / name for name in ("folder", "tars", "x.beton"))
    (folder / "cat").mkdir(parents=True)
    (folder / "dog").mkdir()
    for name in ("cat", "dog"):
        (folder / name / "1.pgm").write_bytes(netpbm(5, 4095, values))
    tars.mkdir()
    with tarfile.open(tars / "x.tar", "w") as tar:
        for name in ("cat", "dog"):
            tar.add(folder / name, name)
    main(Packing(data=folder, out=beton))
    rendered = np.empty((2, 1, 32, 32, 3), np.uint8)
    viewer = SimpleNamespace(input_size=32, interpolation=Image.Resampling.BILINEAR, fill=(0, 0, 0))
    viewer.views = lambda *size: [TeacherView((0, 0, 32, 32), False)]
    viewer.window = lambda *size: (0, 0, 1, 1)
    for render, out in zip((NativeRender, PillowRender), rendered, strict=True):
        render(Images(folder), viewer)(0, out)
    sources = FolderSource(folder, "train"), FolderSource(tars, "train"), FfcvSource(beton)
    for pixels in (*rendered[:, 0], *(np.asarray(source.image(0)) for source in sources)):
        assert np.abs(pixels - want).max() < 1
    for source in sources:
        source.close()


def test_outside_images_are_converted_to_rgb_in_one_place_only():
    """Another call of Pillow's `convert` would clip again."""
    calls = {
        path.name
        for path in Path(samples.__file__).parents[1].rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(".convert")
        and [ast.unparse(argument) for argument in node.args] == ["'RGB'"]
    }
    assert calls == {"samples.py"}

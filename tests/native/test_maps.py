"""maps.c against unpacking with numpy: smallest and largest palettes, and invalid bytes."""

import os
import zlib

import numpy as np
import pytest

from densefeed import native
from densefeed.storage.row_codecs import ScoreMaps, code_levels, row_sizes, unpack
from densefeed.storage.score_maps import find_faults

from ..stores import BAD_VALUES

PALETTES = np.array([1, 2, 3, 24, 32, 33, 64, 255, 256, 257, 1619, 1620, 5000, 65535])
SIDE, TOP_K = 18, 5
CELLS, ENTRIES = SIDE * SIDE, SIDE * SIDE * TOP_K


def packed_rows(form: str, rng: np.random.Generator, scales=None) -> list[np.ndarray]:
    """Make a row of random bytes for each of PALETTES, with all places inside the palette."""
    rows = []
    for size, palette in zip(
        row_sizes(form, SIDE, TOP_K, PALETTES).tolist(), PALETTES.tolist(), strict=True
    ):
        row = rng.integers(0, 256, size, dtype=np.uint8)
        at = 8 * (form == "compact")
        if at:
            row[:8] = np.array([-0.5, 1.0] if scales is None else scales[len(rows)], "<f4").view(
                np.uint8
            )
        bits = (palette - 1).bit_length()
        places = rng.integers(0, palette, ENTRIES)
        places[:2] = 0, palette - 1
        planes = np.packbits(
            (places >> np.arange(bits)[:, None] & 1).astype(np.uint8), axis=1, bitorder="little"
        )
        row[at + 2 * palette : at + 2 * palette + planes.size] = planes.reshape(-1)
        rows.append(row)
    return rows


def decode(
    path, rows: list[np.ndarray], levels: np.ndarray | None, crc=None, limits=None, order=None
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Unpack rows from a file with the library: samples, the four fields, the written Windows.

    The samples have the rows `order`, by default each once; all are crops of one image.
    """
    N, chosen = len(rows), np.arange(len(rows)) if order is None else np.array(order)
    window = np.arange(4 * N, dtype=np.float32).reshape(N, 4)
    path.write_bytes(b"".join(row.tobytes() for row in rows) + window.tobytes())
    lengths = np.array([len(row) for row in rows])
    offset = np.stack([np.cumsum(lengths) - lengths, lengths.sum() + 16 * np.arange(N)], 1)
    if crc is None:
        crc = np.array(
            [zlib.crc32(row.tobytes() + window[n].tobytes()) for n, row in enumerate(rows)],
            np.uint32,
        )
    offset, crc, window, N = offset[chosen], crc[chosen], window[chosen], len(chosen)
    cells = (N, SIDE, SIDE)
    to = [
        np.full((*cells, TOP_K), 7, np.float16),
        np.full((*cells, TOP_K), 7, np.uint16),
        np.full(cells, 7, np.float16),
        window * 0,
    ]
    samples = np.zeros(N, native.SAMPLE)
    pixels = np.arange(3, dtype=np.uint8)
    samples["bytes"], samples["length"], samples["kind"] = pixels.ctypes.data, 3, native.RAW
    samples["height"] = samples["width"] = 1
    samples["box_tlhw"] = 0, 0, 1, 1
    file = os.open(path, os.O_RDONLY)
    try:
        parts = native.Parts(
            np.full((N, 2), file), offset, to, crc, native.Packed(PALETTES[chosen], levels), limits
        )
        rows = native.PartRows(parts)
        native.Job(samples, np.zeros((N, 4, 4, 3), np.uint8), rows, keep=pixels).decode()
    finally:
        os.close(file)
    return samples, to, window


def assert_same_bits(fields: list[np.ndarray], want: tuple[np.ndarray, ...]) -> None:
    for got, expected in zip(fields, want, strict=True):
        np.testing.assert_array_equal(
            got.view(f"u{got.itemsize}"), expected.view(f"u{expected.itemsize}")
        )


@pytest.mark.parametrize("form", ["lossless", "compact"])
def test_rows_equal_numpys_exactly(tmp_path, form):
    rows = packed_rows(form, np.random.default_rng(0))
    levels = code_levels("tail") if form == "compact" else None
    samples, fields, window = decode(tmp_path / "rows", rows, levels)
    assert not samples["status"].any(), samples["message"]
    assert_same_bits(fields, (*unpack(form, SIDE, TOP_K, levels, PALETTES, rows), window))


@pytest.mark.parametrize("form", ["lossless", "compact"])
def test_crops_of_one_image_get_its_map(tmp_path, form):
    """It is read once and copied, also if two images of one batch are the same file."""
    rows = packed_rows(form, np.random.default_rng(0))
    levels = code_levels("tail") if form == "compact" else None
    order = [0, 0, 5, 5, 5, 1, 5]
    samples, fields, window = decode(tmp_path / "rows", rows, levels, order=order)
    assert not samples["status"].any(), samples["message"]
    want = unpack(form, SIDE, TOP_K, levels, PALETTES, rows)
    assert_same_bits(fields, (*(part[order] for part in want), window))
    # A damaged map is damaged for every crop.
    rows[5][-1] ^= 1
    crc = np.zeros(len(rows), np.uint32)
    samples, _, _ = decode(tmp_path / "rows", rows, levels, crc, order=[5, 5])
    assert samples["status"].tolist() == [native.DAMAGED] * 2


def test_logits_are_rounded_to_float16_like_numpy(tmp_path):
    """Logits of all magnitudes: overflowing, underflowing, halfway between two, negative."""
    rng = np.random.default_rng(1)
    exponents = rng.uniform(-30, 18, 256)
    # A float16 has 11 significant bits; these values have 12.
    halfway = (rng.integers(0x400, 0x800, 256) * 2 + 1) * 2.0 ** rng.integers(-26, 5, 256)
    levels = np.where(
        np.arange(256) % 2, halfway, 2.0**exponents * rng.choice([-1, 1], 256)
    ).astype(np.float32)
    levels[:6] = 0.0, -0.0, 65519.996, 65520, 2.0**-25, 2.0**-24
    scales = [
        (low, step) for low in (0.0, 1e-5, -3.0, 70000.0) for step in (1.0, -1.0, 2.0**-14, 0.3)
    ][: len(PALETTES)]
    rows = packed_rows("compact", rng, scales)
    samples, fields, _ = decode(tmp_path / "rows", rows, levels)
    assert not samples["status"].any()
    assert_same_bits(fields[:3], unpack("compact", SIDE, TOP_K, levels, PALETTES, rows))
    assert np.isinf(fields[0]).any()
    assert ((fields[0] != 0) & (np.abs(fields[0]) < 2.0**-14)).any()


@pytest.mark.parametrize("form", ["lossless", "compact"])
def test_invalid_or_changed_row_fails_only_its_sample(tmp_path, form):
    levels = code_levels("tail") if form == "compact" else None
    rows = packed_rows(form, np.random.default_rng(2))
    at = 8 * (form == "compact") + 2 * 3
    # Eight places of 3 in a palette of 3 classes, with a valid CRC.
    rows[2][at], rows[2][at + -(-ENTRIES // 8)] = (255, 255)
    samples, _, _ = decode(tmp_path / "rows", rows, levels)
    assert np.flatnonzero(samples["status"]).tolist() == [2]
    assert samples["status"][2] == native.DAMAGED
    assert samples["message"][2] == b"its score map refers to a class outside its palette"
    rows = packed_rows(form, np.random.default_rng(2))
    crc = np.array(
        [
            zlib.crc32(row.tobytes() + np.arange(4 * n, 4 * n + 4, dtype=np.float32).tobytes())
            for n, row in enumerate(rows)
        ]
    )
    rows[5][-1] ^= 1
    samples, _, _ = decode(tmp_path / "rows", rows, levels, crc.astype(np.uint32))
    assert np.flatnonzero(samples["status"]).tolist() == [5]
    assert b"does not match its checksum" in samples["message"][5]


def read_raw(path, maps: ScoreMaps, limits: native.Limits) -> np.ndarray:
    """Read maps from a file of raw rows with the library; return the status of each."""
    path.write_bytes(b"".join(part.tobytes() for part in maps))
    N, nbytes = len(maps.logit), np.array([part[0].nbytes for part in maps])
    offset = np.cumsum(N * nbytes) - N * nbytes + np.arange(N)[:, None] * nbytes
    to = [np.zeros_like(part) for part in maps]
    with open(path, "rb") as file:
        files = np.full((N, 4), file.fileno())
        return native.read_maps(native.Parts(files, offset, to, None, limits=limits))


@pytest.mark.parametrize("fault", BAD_VALUES)
def test_impossible_values_fail_only_their_sample(tmp_path, random_maps, fault):
    maps = random_maps(7, 6, 2, 3)
    assert not read_raw(tmp_path / "rows", maps, native.Limits(3, 3)).any()
    BAD_VALUES[fault](maps, 4)
    status = read_raw(tmp_path / "rows", maps, native.Limits(3, 3))
    assert status.tolist() == [0, 0, 0, 0, native.DAMAGED, 0, 0]


def test_values_are_refused_exactly_where_numpy_finds_a_fault(tmp_path, random_maps):
    """Random Windows and random replaced values, near and beyond the limits."""
    rng, N = np.random.default_rng(0), 4000
    maps = random_maps(N, 3, 2, 9, seed=1)
    edges = np.array(
        [-1e-6, -2e-6, 0, 0.2, 1, 1 + 1e-6, 1 + 2e-6, 1.5, -0.5, 3, -2, np.nan, np.inf]
    )
    half = rng.random(N) < 0.5
    maps.window[half] = rng.choice(edges.astype("f4"), (half.sum(), 4))
    for n in rng.permutation(N)[: N // 3]:
        cell = tuple(rng.integers(0, (3, 3, 2)))
        maps.cls[n][cell] = rng.integers(0, 11)
    for n in rng.permutation(N)[: N // 10]:
        bits = rng.choice([0x7BFF, 0x7C00, 0xFC00, 0xFBFF, 0x7E00], 1).astype("u2").view("f2")[0]
        maps.logit[n][1, 2, 0], maps.lse[n][1, 1] = rng.permutation([bits, 1])
    wrong = np.any(list(find_faults(maps, 9, np.array(6)).values()), axis=0)
    assert N // 4 < wrong.sum() < N
    status = read_raw(tmp_path / "rows", maps, native.Limits(9, 6))
    np.testing.assert_array_equal(status, np.where(wrong, native.DAMAGED, native.OK))


def test_packed_rows_are_checked_too(tmp_path):
    """A class of a palette may be out of range."""
    rows = packed_rows("lossless", np.random.default_rng(2))
    samples, _, _ = decode(tmp_path / "rows", rows, None, limits=native.Limits(1, 65536))
    assert (samples["status"] == native.DAMAGED).all()
    assert b"of 1" in samples["message"][3]

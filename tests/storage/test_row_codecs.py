"""Packed rows against FORMAT.md decoded by hand, dense float64 targets, and round trips."""

import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from densefeed.storage import row_codecs
from densefeed.storage.row_codecs import (
    ErrorSum,
    ScoreMaps,
    code_levels,
    pack,
    plane_bits,
    row_sizes,
    unpack,
)
from densefeed.storage.score_maps import palette_sizes, row_crcs

FORMAT = Path(row_codecs.__file__).with_name("FORMAT.md").read_text()


def back(form, absent, maps, packed=None):
    """Pack and unpack; the Window is not part of the row."""
    rows = [np.frombuffer(row, np.uint8) for row in packed or pack(form, absent, maps)]
    side, top_k = maps.logit.shape[2:]
    return ScoreMaps(
        *unpack(form, side, top_k, code_levels(absent), palette_sizes(maps.cls), rows), maps.window
    )


def documented(after: str) -> bytes:
    """The bytes of the indented block of FORMAT.md after a sentence, without the words in it."""
    block = re.match(r"\n*((?: {4}.*\n)+)", FORMAT[FORMAT.index(after) + len(after) :]).group(1)
    pairs = [
        re.match(r"(?: *[0-9a-f]{2}(?= |$))+", line[4:]).group() for line in block.splitlines()
    ]
    return bytes.fromhex("".join(pairs))


def by_hand(row: bytes, compact: bool) -> tuple[list[int], list[float], list[float]]:
    """Decode a row of S = 2, k = 2 and three classes by FORMAT.md only: classes, logits, lses."""
    at, scale = 0, (0.0, 0.0)
    if compact:
        at, scale = 8, struct.unpack("<2f", row[:8])
    palette = struct.unpack("<3H", row[at : at + 6])
    planes = row[at + 6], row[at + 7]
    places = [
        sum((plane >> entry & 1) << bit for bit, plane in enumerate(planes)) for entry in range(8)
    ]
    classes, at = [palette[place] for place in places], at + 8
    if not compact:
        return (
            classes,
            list(struct.unpack("<8e", row[at : at + 16])),
            list(struct.unpack("<4e", row[at + 16 :])),
        )
    level = [2 * np.log(code / 255 if code else 1 / 1020) for code in row[at:]]
    return classes, [scale[0] + scale[1] * one for one in level], 4 * [0.0]


def test_the_documented_row():
    compact, lossless = documented("Compact:\n"), documented("of which it was made:\n")
    classes = [281, 7, 281, 3, 7, 281, 3, 7]
    window = struct.pack("<4f", 0, 0.125, 1, 0.875)
    assert by_hand(lossless, False) == (
        classes,
        [5, 3, 4.5, 1.25, 2, 2, 6, -1],
        [5.25, 4.75, 3.5, 6.25],
    )
    assert by_hand(compact, True)[0] == classes
    assert by_hand(compact, True)[1] == pytest.approx(
        [-0.25, -2.246, -0.25, -3.508, -1.507, -1.507, -0.25, -7.172], abs=2e-3
    )
    assert f"{zlib.crc32(compact + window):08x}" == "3a08f1ca"
    assert f"{zlib.crc32(lossless + window):08x}" == "3bd5c6b0"
    assert "the CRC-32 is 3a08f1ca" in FORMAT
    assert "the CRC-32 3bd5c6b0" in FORMAT
    # The codec reads and writes the same bytes.
    cls = np.array(classes, np.uint16).reshape(1, 2, 2, 2)
    logit = np.array([5, 3, 4.5, 1.25, 2, 2, 6, -1], np.float16).reshape(1, 2, 2, 2)
    lse = np.array([5.25, 4.75, 3.5, 6.25], np.float16).reshape(1, 2, 2)
    maps = ScoreMaps(logit, cls, lse, np.frombuffer(window, np.float32)[None])
    for form, row in (("lossless", lossless), ("compact", compact)):
        assert pack(form, "tail", maps) == [row]
        assert row_sizes(form, 2, 2, np.array([3])) == [len(row)]
        got = back(form, "tail", maps, [row])
        np.testing.assert_array_equal(got.cls, cls)
        want = np.array(by_hand(row, form == "compact")[1], np.float16)
        np.testing.assert_array_equal(got.logit.reshape(-1), want)
        assert row_crcs(([np.frombuffer(row, np.uint8)], maps.window))[0] == zlib.crc32(
            row + window
        )


def test_the_documented_sizes():
    """Compact rows have at most half of the 8,069 bytes of a published file (S = 18, k = 5)."""
    for palette, planes, lossless, compact in ((32, 5, 4967, 2707), (64, 6, 5234, 2974)):
        assert plane_bits(np.array(palette)) == planes
        for form, size in (("lossless", lossless), ("compact", compact)):
            assert row_sizes(form, 18, 5, np.array([palette]))[0] == size
            assert f"{size:,}" in FORMAT


def test_bits_of_an_index():
    sizes = np.arange(1, 65537)
    np.testing.assert_array_equal(
        plane_bits(sizes), [(int(size) - 1).bit_length() for size in sizes]
    )


@st.composite
def many_maps(draw):
    """Maps of any shape and palette, with any values of float16."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, side, top_k = draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.integers(1, 6))
    classes = draw(
        st.sampled_from([top_k, top_k + 1, 40, 700, 65535]).filter(lambda classes: classes >= top_k)
    )
    scores = rng.random((count, side, side, min(classes, 800)))
    offset = rng.integers(0, classes - scores.shape[3] + 1, (count, 1, 1, 1))
    cls = (np.argsort(scores, -1)[..., :top_k] + offset).astype(np.uint16)
    spread = draw(st.sampled_from([0.0, 1e-6, 1.0, 30.0, 6e4]))
    logit = -np.sort(-(rng.random((count, side, side, top_k)) * 2 - 1) * spread, -1)
    lse = (
        np.log(np.exp(logit - logit[..., :1]).sum(-1))
        + logit[..., 0]
        + rng.random((count, side, side)) * draw(st.sampled_from([0, 3]))
    )
    window = np.tile(np.array([[0, 0, 1, 1]], np.float32), (count, 1))
    return ScoreMaps(
        logit.astype(np.float16), cls, lse.clip(-6e4, 6e4).astype(np.float16), window
    ), classes


@settings(max_examples=60)
@given(many_maps(), st.sampled_from(["tail", "zero-logit"]))
def test_lossless_rows_are_bit_equal(made, absent):
    maps, _ = made
    got = back("lossless", absent, maps)
    for a, b in zip(got, maps, strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


@settings(max_examples=60)
@given(many_maps())
def test_the_error_of_a_compact_probability_is_half_a_step_of_its_root(made):
    maps, _ = made
    got = back("compact", "tail", maps)
    np.testing.assert_array_equal(got.cls, maps.cls)
    assert (np.diff(got.logit.astype(np.float64), axis=-1) <= 0).all()
    assert not got.lse.any()
    want = np.minimum(maps.logit.astype(np.float64) - maps.lse.astype(np.float64)[..., None], 0)
    top = np.exp(want.reshape(len(want), -1).max(1))[:, None, None, None]
    got_p, want_p = np.exp(got.logit.astype(np.float64)), np.exp(want)
    # Rounding of the logit to float16.
    rounded = got_p * (np.abs(got.logit.astype(np.float64)) * 2.0**-11 + 2.0**-24)
    # |a^2 - b^2| <= (a + b) |a - b|, with square roots at most half a step apart.
    bound = np.sqrt(top) * (np.sqrt(want_p) + np.sqrt(got_p)) / 510 + rounded * 1.01 + 1e-7
    assert (np.abs(got_p - want_p) <= bound).all()


@settings(max_examples=60)
@given(many_maps())
def test_the_error_of_a_compact_logit_is_half_a_step(made):
    maps, _ = made
    got, want = (
        part.logit.astype(np.float64) for part in (back("compact", "zero-logit", maps), maps)
    )
    assert (np.diff(got, axis=-1) <= 0).all()
    span = np.ptp(want.reshape(len(want), -1), axis=1)[:, None, None, None]
    size = np.abs(want).reshape(len(want), -1).max(1)[:, None, None, None]
    assert (np.abs(got - want) <= span / 510 * 1.0001 + size * 2.0**-10 + 1e-7).all()


@pytest.mark.parametrize("absent", ["tail", "zero-logit"])
@pytest.mark.parametrize("classes", [3, 50])
def test_the_stored_error_is_that_of_dense_targets(absent, classes, random_maps):
    """Against dense targets over all K classes; with K = k there are no other classes."""
    before = random_maps(3, 4, 3, classes)
    after = back("compact", absent, before)
    found = ErrorSum(classes, absent)
    for n in range(3):
        found.add(*(ScoreMaps(*(part[n : n + 1] for part in maps)) for maps in (before, after)))

    def dense(maps):
        targets = np.zeros((3, 4, 4, classes))
        for at in np.ndindex(3, 4, 4):
            logit, cls = maps.logit[at].astype(np.float64), maps.cls[at]
            if absent == "zero-logit":
                full = np.zeros(classes)
                full[cls] = logit
                targets[at] = np.exp(full) / np.exp(full).sum()
            else:
                named = np.exp(logit - float(maps.lse[at]))
                named /= max(named.sum(), 1) if classes > 3 else named.sum()
                targets[at] = max(1 - named.sum(), 0) / max(classes - 3, 1)
                targets[at][cls] = named
        return targets

    one, other = dense(before), dense(after)
    variation = np.abs(one - other).sum(-1) / 2
    probability = np.abs(np.take_along_axis(one - other, before.cls.astype(np.int64), -1))
    want = probability.max(), probability.mean(), variation.max(), variation.mean()
    assert want[0] > 0
    np.testing.assert_allclose(found.result(), want, rtol=1e-9, atol=1e-12)
    assert found.result().variation_max < 0.02


def test_an_index_outside_the_palette_is_an_invalid_class(random_maps):
    maps = random_maps(1, 3, 2, 3)
    (row,) = pack("lossless", "tail", maps)
    broken = bytearray(row)
    broken[6] |= 1  # the first entry's index becomes 3 of 3
    broken[6 + 3] |= 1
    (_, cls, _) = unpack(
        "lossless", 3, 2, None, np.array([3]), [np.frombuffer(bytes(broken), np.uint8)]
    )
    assert cls[0, 0, 0, 0] == 65535
    assert (cls.reshape(-1)[1:] == maps.cls.reshape(-1)[1:]).all()

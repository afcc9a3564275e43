"""The segment-indexed JPEG: an ordinary baseline JPEG of which a crop's rows and columns can be
read alone.

Restart markers cut its scan into segments that decode by themselves, and an APP9 segment says where
each row of MCUs (the codec's blocks of 8 or 16 pixels) begins and what its checksum is. The bytes
are described in densefeed/storage/FORMAT.md; the reader is native/segments.c.
"""

import struct
import zlib

import numpy as np

from densefeed import native

MARK = b"DFSEG\1"
APP9, SOF0, DRI, SOS = 0xE9, 0xC0, 0xDD, 0xDA
# MCUs a segment. Of 500 px photographs (quality 90, 4:2:0): 2 cost 1.4 % more bytes than 4, 8 cost
# 3 % more time.
INTERVAL = 4
NAMED_SAMPLINGS = {(1, 1), (2, 1), (1, 2), (2, 2)}  # luma's; chroma's is 1 x 1


def interval_of(across: int) -> int:
    """MCUs a segment in a row of `across`: the divisor nearest to INTERVAL, by ratio, or the whole
    row if none is near.
    """
    divisors = [n for n in range(1, across + 1) if across % n == 0]
    nearest = min(divisors, key=lambda n: max(n / INTERVAL, INTERVAL / n))
    return nearest if INTERVAL / 2 <= nearest <= 2 * INTERVAL else across


def transcode(encoded: bytes) -> bytes:
    """A JPEG of any coding as a segment-indexed one; pixels stay, bit for bit.

    A file of unusual chroma sampling comes back as plain baseline JPEG, without index.
    native.JpegError if the file is damaged or its colors are neither gray nor RGB.
    """
    plain = native.transcode(encoded, 0)
    frame = _Frame(plain)
    if frame.sampling is None:
        return plain
    return _with_index(native.transcode(encoded, interval_of(frame.across)))


class _Frame:
    """Where the scan of a baseline JPEG begins, and its rows of MCUs."""

    def __init__(self, jpeg: bytes) -> None:
        at, self.interval, self.sampling = 2, 0, None
        while True:
            marker, length = jpeg[at + 1], struct.unpack_from(">H", jpeg, at + 2)[0]
            if marker == SOF0:
                height, width, components = struct.unpack_from(">HHB", jpeg, at + 5)
                factors = [
                    (jpeg[at + 11 + 3 * n] >> 4, jpeg[at + 11 + 3 * n] & 15)
                    for n in range(components)
                ]
                if components == 1:  # never interleaved: an MCU is one block
                    factors = [(1, 1)]
                if factors[0] in NAMED_SAMPLINGS and all(
                    factor == (1, 1) for factor in factors[1:]
                ):
                    self.sampling = factors[0]
                    self.across, self.down = (
                        -(-width // (8 * factors[0][0])),
                        -(-height // (8 * factors[0][1])),
                    )
            elif marker == DRI:
                (self.interval,) = struct.unpack_from(">H", jpeg, at + 4)
            at += 2 + length
            if marker == SOS:
                self.scan = at
                return


def _with_index(jpeg: bytes) -> bytes:
    """A baseline JPEG with restart markers, its index put behind SOI."""
    frame = _Frame(jpeg)
    scan = np.frombuffer(jpeg, np.uint8, offset=frame.scan)
    at = np.flatnonzero(scan[:-1] == 0xFF)
    restarts = at[(scan[at + 1] & 0xF8) == 0xD0] + 2
    per_row = frame.across // frame.interval
    # EOI ends the last row
    ends = [*restarts[per_row - 1 :: per_row].tolist(), len(scan) - 2][: frame.down]
    assert len(restarts) == frame.down * per_row - 1, "restart markers are missing"
    # libjpeg's limit of 65,500 px makes 8,188 of them at most, and an APP segment holds 8,189
    rows = b""
    for start, end in zip([0, *ends], ends, strict=False):
        rows += struct.pack("<II", end - start, zlib.crc32(scan[start:end]))
    head = (
        struct.pack(">HBBH", 0xFFD8, 0xFF, APP9, 2 + 16 + len(rows))
        + MARK
        + struct.pack("<I", frame.scan + 20 + len(rows))
    )
    rest = struct.pack("<H", frame.down) + rows + jpeg[2 : frame.scan]
    return head + struct.pack("<I", zlib.crc32(rest, zlib.crc32(head))) + rest + jpeg[frame.scan :]

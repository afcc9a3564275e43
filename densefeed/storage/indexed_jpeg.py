"""Write segment-indexed JPEGs: baseline JPEGs of which only the segments of a crop are read.

Restart markers split the scan into segments that can be decoded independently. An APP9 segment
holds the size and the checksum of each row of MCUs (the codec's blocks of 8 or 16 pixels). The
bytes are described in densefeed/storage/FORMAT.md; the reader is native/segments.c.
"""

import struct
import zlib

import numpy as np

from densefeed import native

# The last byte is the version of the index.
MARK = b"DFSEG\1"
APP9, SOF0, DRI, SOS = 0xE9, 0xC0, 0xDD, 0xDA
# MCUs per segment. For photographs of 500 px (quality 90, 4:2:0), 2 cost 1.4 % more bytes than 4,
# and 8 cost 3 % more time.
INTERVAL = 4
# Sampling factors of luma that get an index; chroma has 1 x 1.
INDEXED_SAMPLINGS = {(1, 1), (2, 1), (1, 2), (2, 2)}


def choose_interval(across: int) -> int:
    """Choose the MCUs per segment in a row of `across` MCUs.

    The divisor nearest to INTERVAL, by ratio; the whole row if none is within a factor of 2.
    """
    divisors = [n for n in range(1, across + 1) if across % n == 0]
    nearest = min(divisors, key=lambda n: max(n / INTERVAL, INTERVAL / n))
    return nearest if INTERVAL / 2 <= nearest <= 2 * INTERVAL else across


def transcode(encoded: bytes) -> bytes:
    """Transcode a JPEG of any coding losslessly to a segment-indexed one; pixels stay bit-equal.

    A file of another chroma sampling is returned as plain baseline JPEG, without index. Raises
    native.JpegError if the file is damaged or its colors are neither gray nor RGB.
    """
    if (mcu := find_mcu(native.sampling(encoded))) is None:
        return native.transcode(encoded, 0)
    across = -(-native.probe(encoded)[1] // (8 * mcu[0]))
    return add_index(native.transcode(encoded, choose_interval(across)))


def find_mcu(factors: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Return how many blocks of luma an MCU has across and down; None for one without index.

    `factors` are the sampling factors of the components.
    """
    # A single component is never interleaved: an MCU is one block.
    luma = (1, 1) if len(factors) == 1 else factors[0]
    return luma if luma in INDEXED_SAMPLINGS and {*factors[1:]} <= {(1, 1)} else None


class _Frame:
    """Scan offset, restart interval and MCU grid of a baseline JPEG that gets an index."""

    def __init__(self, jpeg: bytes) -> None:
        at, self.interval = 2, 0
        while True:
            marker, length = jpeg[at + 1], struct.unpack_from(">H", jpeg, at + 2)[0]
            if marker == SOF0:
                height, width, components = struct.unpack_from(">HHB", jpeg, at + 5)
                mcu = find_mcu([divmod(jpeg[at + 11 + 3 * n], 16) for n in range(components)])
                self.across, self.down = -(-width // (8 * mcu[0])), -(-height // (8 * mcu[1]))
            elif marker == DRI:
                (self.interval,) = struct.unpack_from(">H", jpeg, at + 4)
            at += 2 + length
            if marker == SOS:
                self.scan = at
                return


def find_index_damage(jpeg: bytes) -> str:
    """Return which part of a JPEG does not match the checksums of its index; "" if all match.

    Also "" without an index. For what is decoded by other means than the native decoder, which
    checks what it reads.
    """
    if jpeg[2:4] != bytes([0xFF, APP9]) or jpeg[6:12] != MARK:
        return ""
    if len(jpeg) < 22:
        return "its header is too short"
    at, crc, rows = struct.unpack_from("<IIH", jpeg, 12)
    found = zlib.crc32(jpeg[20:at], zlib.crc32(jpeg[:16]))
    if found != crc or not 22 + 8 * rows <= at <= len(jpeg):
        return "its header does not match its checksum"
    # The header matches, so add_index wrote this index.
    for length, crc in struct.iter_unpack("<II", jpeg[22 : 22 + 8 * rows]):
        if zlib.crc32(jpeg[at : at + length]) != crc:
            return "its compressed rows do not match their checksum"
        at += length
    return ""


def add_index(jpeg: bytes) -> bytes:
    """Insert the index after SOI of a baseline JPEG with restart markers."""
    frame = _Frame(jpeg)
    scan = np.frombuffer(jpeg, np.uint8, offset=frame.scan)
    at = np.flatnonzero(scan[:-1] == 0xFF)
    # In a scan FF is followed by 00 or is part of a marker, so these are RST0 to RST7.
    restarts = at[(scan[at + 1] & 0xF8) == 0xD0] + 2
    per_row = frame.across // frame.interval
    # EOI ends the last row.
    ends = [*restarts[per_row - 1 :: per_row].tolist(), len(scan) - 2][: frame.down]
    assert len(restarts) == frame.down * per_row - 1, "restart markers are missing"
    # libjpeg's limit of 65,500 px gives at most 8,188 rows, and an APP segment holds 8,189.
    rows = b""
    for start, end in zip([0, *ends], ends, strict=False):
        rows += struct.pack("<II", end - start, zlib.crc32(scan[start:end]))
    head = struct.pack(">HBBH", 0xFFD8, 0xFF, APP9, 2 + 16 + len(rows)) + MARK
    # The header is longer by the index: 20 bytes and the rows.
    head += struct.pack("<I", frame.scan + 20 + len(rows))
    rest = struct.pack("<H", frame.down) + rows + jpeg[2 : frame.scan]
    return head + struct.pack("<I", zlib.crc32(rest, zlib.crc32(head))) + rest + jpeg[frame.scan :]

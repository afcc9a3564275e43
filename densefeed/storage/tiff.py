"""Count the values in the tags of a TIFF, before Pillow makes a Python object of each.

Layout: TIFF 6.0, section 2; BigTIFF (magic number 43) has 64-bit offsets and counts.
"""

import struct
from typing import BinaryIO

# Pillow makes an object of 36 to 152 bytes of each value.
MOST_VALUES = 2**21
# Types whose values Pillow keeps as one bytes object: BYTE, ASCII, UNDEFINED.
IN_BYTES = (1, 2, 7)
# Tags that point to a directory of more tags, all of which Pillow reads: Exif, GPS, Exif's
# interoperability.
DIRECTORIES = (0x8769, 0x8825, 0xA005)


def count_values(file: BinaryIO) -> int:
    """Return how many values the tags of the first image hold, as the file states it.

    Counting ends above MOST_VALUES. Texts count as one value. Raises struct.error for a file that
    ends before its directories.
    """
    head = file.read(16)
    order = "<" if head[:2] == b"II" else ">"
    (magic,) = struct.unpack(order + "H", head[2:4])
    count, entry, offset = ("Q", "HHQQ", head[8:16]) if magic == 43 else ("H", "HHII", head[4:8])
    entry = struct.Struct(order + entry)
    todo, seen, values = list(struct.unpack(order + entry.format[-1], offset)), set(), 0
    while todo and values <= MOST_VALUES:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        file.seek(at)
        (entries,) = struct.unpack(order + count, file.read(struct.calcsize(count)))
        # The tags of a directory have numbers of 16 bits.
        table = file.read(min(entries, 2**16) * entry.size)
        whole = table[: len(table) // entry.size * entry.size]
        for tag, kind, number, value in entry.iter_unpack(whole):
            # At least 1, so that directories without end are not read.
            values += 1 if kind in IN_BYTES else max(number, 1)
            todo += [value] if tag in DIRECTORIES else []
    return values

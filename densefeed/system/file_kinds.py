"""Names the kind of a file by its first bytes, for messages about a file of another kind."""

import os
import struct
from pathlib import Path

# First bytes of a file, and what it then is.
KINDS = {
    b"\x89HDF\r\n\x1a\n": "an HDF5 file, as score maps are",
    b"PK\x03\x04": "a zip file, as checkpoints of PyTorch are",
    b"PAR1": "a Parquet file",
    b"\xff\xd8\xff": "a JPEG image",
    b"\x89PNG\r\n\x1a\n": "a PNG image",
    b"{": "a JSON file",
    b"[": "a JSON file",
}
# Where tar files have this mark, and the bytes that tell all kinds apart.
TAR_AT, HEAD = 257, 262


def name_kind(file: Path | int) -> str:
    """Return the kind of a regular file, by its path or descriptor; empty if it is not known."""
    descriptor = file if isinstance(file, int) else os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        head = os.pread(descriptor, HEAD, 0)
    finally:
        if descriptor is not file:
            os.close(descriptor)
    if head[TAR_AT:] == b"ustar":
        return "a tar file"
    # The length of a JSON header, and its begin.
    if head[8:10] == b'{"' and 2 <= int.from_bytes(head[:8], "little") < 2**32:
        return "a safetensors file"
    # FFCV's format has no magic number: version, number of fields, and bytes of a page.
    if len(head) >= 8:
        _, fields, page = struct.unpack_from("<HHI", head)
        if 0 < fields < 64 and page >= 2**16 and not page & (page - 1):
            return "a .beton"
    return next((kind for start, kind in KINDS.items() if head.startswith(start)), "")

"""The format of FFCV's datasets (.beton): records, fields, notes, and the front of a file.

FORMAT.md describes the bytes. Metadata that FFCV has no place for (class names, teacher,
fingerprint, checksums) is stored as notes between FFCV's metadata and the first page. The unused
tail of the image field's 1,024 argument bytes holds the position of the notes. FFCV reads neither.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from densefeed import native
from densefeed.storage.dataset_names import MOST_CLASSES
from densefeed.storage.row_codecs import Absent
from densefeed.storage.score_maps import ScoreMaps
from densefeed.system.errors import UserError
from densefeed.system.file_kinds import name_kind
from densefeed.system.json_files import parse_json

# Records of the file, little-endian. FORMAT.md describes them.
HEADER = np.dtype(
    [
        ("version", "<u2"),
        ("num_fields", "<u2"),
        ("page_size", "<u4"),
        ("num_samples", "<u8"),
        ("table", "<u8"),
    ]
)
FIELD = np.dtype([("type", "u1"), ("name", "S16"), ("arguments", "V1024")])
ALLOCATION = np.dtype([("sample", "<u8"), ("ptr", "<u8"), ("size", "<u8")])
# Packed: 13 bytes.
IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("ptr", "<u8")])
EXTENT = np.dtype([("ptr", "<u8"), ("size", "<u8")])
# FFCV's type ids. All are stock types: ffcv reads a custom one (255) only with its Python class.
FLOAT, INT, RGB, BYTES, NDARRAY, JSON, TENSOR = range(7)
METADATA = {
    FLOAT: "<f8",
    INT: "<i8",
    RGB: IMAGE,
    BYTES: EXTENT,
    NDARRAY: "<u8",
    JSON: EXTENT,
    TENSOR: "<u8",
}
# Types with one entry per sample in the allocation table.
ALLOCATED = (RGB, BYTES, NDARRAY, JSON, TENSOR)
# Modes of an image. JPEG and RAW (rows of RGB) are FFCV's, PLANES (native/planes.c) is DenseFeed's.
JPEG, RAW, PLANES = native.JPEG, native.RAW, native.PLANES
# Version of FFCV's format that ffcv 1.0.2 reads and writes, and the version of a file with PLANES.
# ffcv, which would read beyond the end of such images, refuses other versions than its own.
VERSION, PLANES_VERSION = 2, 0xDF02
# Bytes of the header of an image in PLANES; its last 4 are the CRC-32 of all others of the image.
PLANES_HEADER = 16
# Bytes, FFCV's default. A sample never crosses a page.
PAGE = 2**23
# Arrays start at multiples of it, so that readers can view the bytes without a copy.
ALIGN = 16
NOTES = np.dtype([("mark", "S8"), ("at", "<u8"), ("size", "<u8"), ("crc", "<u4")])
# Offset of NOTES in the image field's arguments; FFCV's own arguments are shorter.
NOTES_IN_ARGUMENTS = 512
NOTES_VERSION = 2
# Bytes. 21k class names take 0.6 MB, so a larger size is damaged.
NOTES_LIMIT = 2**26
MARK = b"densfeed"
# First bytes of every JPEG.
SOI = b"\xff\xd8"
# Fields of a score map.
MAP_FIELDS = ("map", "lse", "window")
# A dtype as FFCV writes it: numbers or booleans. NumPy would also parse expressions and objects.
DTYPE = re.compile(r"[<>|]?[biufc](1|2|4|8|16)")


class Field(NamedTuple):
    """One column of a .beton: FFCV's type id, its name, and for an ndarray its dtype and shape."""

    type: int
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of one sample's array."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)


def map_fields(side: int, top_k: int) -> list[Field]:
    """Return the .beton fields of a score map. FFCV cannot read float16: its bits are int16."""
    return [
        Field(NDARRAY, "map", "<i2", (2, side, side, top_k)),
        Field(NDARRAY, "lse", "<i2", (side, side)),
        Field(NDARRAY, "window", "<f4", (4,)),
    ]


def map_arrays(maps: ScoreMaps, row: int) -> tuple[np.ndarray, ...]:
    """Return row `row` of `maps` as the arrays of `map_fields`."""
    return (
        np.stack([maps.logit[row].view("<i2"), maps.cls[row].view("<i2")]),
        maps.lse[row].view("<i2"),
        maps.window[row],
    )


def metadata_dtype(fields: Sequence[Field]) -> np.dtype:
    """Return FFCV's record of a sample: the fields' records as a C struct.

    Structs have alignment 1, numbers their own size.
    """
    return np.dtype([(f"f{n}", METADATA[field.type]) for n, field in enumerate(fields)], align=True)


def arrays_crc(arrays: Iterable[bytes]) -> int:
    """Return the CRC-32 (zlib) over a sample's arrays in the order of the fields.

    With score maps it is the row's `crc32` in a raw HDF5 store.
    """
    crc = 0
    for array in arrays:
        crc = zlib.crc32(array, crc)
    return crc


class Front(NamedTuple):
    """Header, field descriptors and notes of one file."""

    path: Path | str  # its name in messages
    descriptor: int
    fields: list[Field]
    num_samples: int
    table: int  # offset of the allocation table, which ends the file
    metadata: int  # offset
    notes: dict  # empty for a file that FFCV wrote
    modes: tuple[int, ...]  # that images may have


def read_front(path: Path, descriptor: int) -> Front:
    """Read and check header, field descriptors and notes of a .beton; UserError as `Beton`."""
    size, head = os.fstat(descriptor).st_size, os.pread(descriptor, HEADER.itemsize, 0)
    header = np.frombuffer(head, HEADER)[0] if len(head) == HEADER.itemsize else None
    versions = {VERSION: (JPEG, RAW), PLANES_VERSION: (JPEG, RAW, PLANES)}
    modes = versions.get(int(header["version"])) if header is not None else None
    # FFCV's format has no magic number, so the number of fields must be plausible too.
    if modes is None or not 0 < header["num_fields"] < 64:
        kind = name_kind(descriptor)
        what = f" but {kind}" * (kind not in ("", "a .beton"))
        raise UserError(
            f"{path} is not an FFCV dataset of version {VERSION}{what}; pack it with densefeed pack"
        )
    _, num_fields, _, count, table = header.tolist()
    raw = os.pread(descriptor, FIELD.itemsize * num_fields, HEADER.itemsize)
    if len(raw) != FIELD.itemsize * num_fields:
        raise UserError(f"{path}: its header is truncated; pack or copy it again")
    notes = read_notes(path, descriptor, head + raw, table)
    fields = [parse_field(path, row) for row in np.frombuffer(raw, FIELD)]
    types = [field.type for field in fields]
    for kind, name in ((RGB, "image"), (INT, "label")):
        if kind not in types:
            raise UserError(f"{path} has no {name} field; pack it with densefeed pack")
    start = HEADER.itemsize + len(raw)
    entries = count * sum(kind in ALLOCATED for kind in types)
    end = start + count * metadata_dtype(fields).itemsize
    # The table ends the file, so its size shows a truncated copy.
    if end > table or size != table + entries * ALLOCATION.itemsize:
        raise UserError(
            f"{path} is truncated or corrupt ({size:,} bytes, {entries:,} allocations expected at "
            f"{table:,}); pack or copy it again"
        )
    if notes:
        check_notes(path, notes, fields, table)
    if count == 0:
        raise UserError(f"{path} holds no images; pack it again")
    return Front(path, descriptor, fields, count, table, start, notes, modes)


def front_ranges(descriptor: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges, start and stop, of all that `Beton` reads of a file when it opens it.

    For a copy of a file that is being fetched: it has its full size, and each range must be in it
    before the next is requested. Ranges of a damaged file may end early, which `Beton` reports.
    """
    yield 0, HEADER.itemsize
    header = np.frombuffer(os.pread(descriptor, HEADER.itemsize, 0).ljust(24, b"\0"), HEADER)[0]
    _, num_fields, _, count, table = header.tolist()
    start, size = HEADER.itemsize + FIELD.itemsize * num_fields, os.fstat(descriptor).st_size
    if num_fields >= 64 or not start <= table <= size:
        return
    yield HEADER.itemsize, start
    head = os.pread(descriptor, start, 0)
    kinds = [head[at] for at in range(HEADER.itemsize, start, FIELD.itemsize)]
    if not set(kinds) <= METADATA.keys():
        return
    end = start + count * metadata_dtype([Field(kind, "") for kind in kinds]).itemsize
    places = [
        np.frombuffer(head, NOTES, 1, notes_place(at))[0]
        for at in range(HEADER.itemsize, start, FIELD.itemsize)
    ]
    for place in places:
        if place["mark"] == MARK:
            at, notes_size = int(place["at"]), min(int(place["size"]), NOTES_LIMIT)
            yield at, at + notes_size
            sums = parse_notes(os.pread(descriptor, notes_size, at)).get("crc32")
            samples = sums.get("samples_at") if isinstance(sums, dict) else None
            if is_between(samples, 0, table, int):
                yield samples, samples + 4 * count
    yield start, min(end, table)
    yield table, size


def read_notes(path: Path, descriptor: int, head: bytes, table: int) -> dict:
    """Read the notes (JSON); empty if there are none, UserError if they are damaged.

    `head` is header and descriptors, which the checksum of the notes covers too.
    """
    damaged = UserError(f"{path}: its header is damaged; pack or copy it again")
    for at in range(HEADER.itemsize, len(head), FIELD.itemsize):
        place_at = notes_place(at)
        place = np.frombuffer(head, NOTES, 1, place_at)[0]
        if place["mark"] == MARK:
            break
        # FFCV writes zeros here.
        if head[at] == RGB and any(head[place_at : place_at + NOTES.itemsize]):
            raise damaged
    else:
        return {}
    notes_at, size = int(place["at"]), int(place["size"])
    if size > NOTES_LIMIT or notes_at + size > table:
        raise damaged
    text = os.pread(descriptor, size, notes_at)
    # The checksum was computed with zeros in its own place.
    summed = bytearray(head)
    np.frombuffer(summed, NOTES, 1, place_at)["crc"] = 0
    notes = parse_notes(text)
    version = notes.get("densefeed")
    if zlib.crc32(text, zlib.crc32(summed)) != place["crc"] or type(version) is not int:
        raise damaged
    if version != NOTES_VERSION:
        raise UserError(
            f"{path} was packed by another version of this program ({version}); pack it again"
        )
    return notes


def parse_notes(text: bytes) -> dict:
    """Parse the notes; empty if they are not a JSON object."""
    try:
        notes = parse_json(text)
    except ValueError:
        return {}
    return notes if isinstance(notes, dict) else {}


def check_notes(path: Path, notes: dict, fields: list[Field], table: int) -> None:
    """Raise UserError unless the notes hold what their readers take for granted.

    Their checksum says only that these bytes were written.
    """
    sums, names = notes.get("crc32"), notes.get("class_names", [])
    shape = next((field.shape for field in fields if field.name == "map"), ())
    has_maps = "absent" in notes and bool(shape)
    valid = {
        "fingerprint": isinstance(notes.get("fingerprint"), str),
        "class_names": isinstance(names, list) and all(isinstance(name, str) for name in names),
        "left_out": is_between(notes.get("left_out", 0), 0, table, int),
        "crc32": isinstance(sums, dict)
        and all(
            is_between(sums.get(key), 0, 2**32, int) for key in ("metadata", "table", "samples")
        )
        and is_between(sums.get("samples_at"), 0, table, int),
        "teacher": isinstance(notes.get("teacher", ""), str),
        "division": isinstance(notes.get("division", {}), dict),
        "absent": notes.get("absent", "tail") in get_args(Absent),
    }
    if has_maps:
        ours = map_fields(*shape[2:]) if len(shape) == 4 else None
        valid["class_names"] &= bool(names)
        valid["shape of the score maps"] = [f for f in fields if f.name in MAP_FIELDS] == ours
        # The step takes memory for each of them.
        most = math.prod(shape[1:])
        valid["max_palette"] = is_between(notes.get("max_palette"), 1, most, int)
        # The Window of a letterbox is longer than the image.
        valid["min_window_side"] = is_between(notes.get("min_window_side"), 1e-9, 1e9, float)
    for name, is_valid in valid.items():
        if not is_valid:
            raise UserError(f"{path}: {name} in its notes is invalid; pack it again")


def name_classes(path: Path, notes: dict, labels: np.ndarray) -> list[str]:
    """Return the class names of a file; UserError for labels that are none of these classes.

    Files that FFCV itself wrote have no notes: their classes get numbers for names.
    """
    low, high = int(labels.min()), int(labels.max())
    # Before classes get names: a file of two samples may have the label 10^9.
    if low < 0 or high >= MOST_CLASSES:
        raise UserError(
            f"{path} has labels from {low} to {high}, and a label is an integer from 0 to "
            f"{MOST_CLASSES - 1:,}; pack it again"
        )
    names = notes.get("class_names") or list(map(str, range(high + 1)))
    if high >= len(names):
        raise UserError(
            f"{path} has labels from {low} to {high}, outside its {len(names)} classes; pack it "
            "again"
        )
    return names


def is_between(value: object, low: float, high: float, kind: type) -> bool:
    """Whether a value of JSON is a number of this kind, at least `low` and at most `high`."""
    # True is an int in Python, and every int is a float in JSON.
    return type(value) in (int, kind) and low <= value <= high


def notes_place(descriptor_at: int) -> int:
    """Return the offset of NOTES in the file, given the offset of the image field's descriptor."""
    return descriptor_at + FIELD.fields["arguments"][1] + NOTES_IN_ARGUMENTS


def parse_field(path: Path, row: np.void) -> Field:
    """Decode a field descriptor; UserError for an unknown type or a damaged ndarray."""
    kind, name = int(row["type"]), row["name"].decode(errors="replace")
    if kind not in METADATA:
        raise UserError(
            f"{path}: field {name!r} has FFCV's type {kind}, which this program does not read"
        )
    if kind != NDARRAY:
        return Field(kind, name)
    raw = row["arguments"].tobytes()
    # Up to 32 extents, padded with zeros; then the length of the dtype's JSON, which follows.
    *extents, length = np.frombuffer(raw, "<u8", 33).tolist()
    shape = tuple(filter(None, extents))
    try:
        ((_, dtype),) = json.loads(raw[264 : 264 + length])
        if not DTYPE.fullmatch(dtype):
            raise ValueError
        np.dtype(dtype)
    except (ValueError, TypeError, RecursionError):
        raise UserError(
            f"{path}: the dtype of field {name!r} is damaged or not numeric; pack or copy it again"
        ) from None
    return Field(kind, name, dtype, shape)


def describe_field(field: Field) -> bytes:
    """Encode a field descriptor for FFCV."""
    arguments = b""
    if field.type == NDARRAY:
        described = json.dumps(np.dtype(field.dtype).descr).encode()
        # The arguments that ffcv 1.0.2's NDArrayField writes; `parse_field` reads them.
        shape = np.zeros(32, "<u8")
        shape[: len(field.shape)] = field.shape
        arguments = shape.tobytes() + np.uint64(len(described)).tobytes() + described
    return np.array((field.type, field.name.encode(), arguments), FIELD).tobytes()

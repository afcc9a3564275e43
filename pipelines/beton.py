"""FFCV datasets (.beton), read and written without the ffcv package. The bytes are described in relabel/FORMAT.md.

Only stock field types are used, so `ffcv.loader.Loader` 1.0.2 opens our files; we open any file whose first RGB image field
holds JPEGs (or raw pixels) and whose first int field is the label. What FFCV has no place for (class names, teacher,
fingerprint) stands as JSON in the gap between the metadata and the first page; the unused tail of the image field's 1,024
argument bytes says where. FFCV reads neither.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..relabel.files import UserError, replacing

HEADER = np.dtype([("version", "<u2"), ("num_fields", "<u2"), ("page_size", "<u4"), ("num_samples", "<u8"), ("table", "<u8")])
FIELD = np.dtype([("type", "u1"), ("name", "S16"), ("arguments", "V1024")])
ALLOCATION = np.dtype([("sample", "<u8"), ("ptr", "<u8"), ("size", "<u8")])
IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("ptr", "<u8")])  # packed: 13 bytes
METADATA = {
    0: np.dtype("<f8"),
    1: np.dtype("<i8"),
    2: IMAGE,
    3: np.dtype([("ptr", "<u8"), ("size", "<u8")]),
    4: np.dtype("<u8"),
}
FLOAT, INT, RGB, BYTES, NDARRAY = range(5)
JPEG, RAW = 0, 1
VERSION = 2
PAGE = 2**23  # FFCV's default; a sample never crosses a page
ALIGN = 16  # arrays start aligned, so that readers need not copy bytes before they view them
NOTES = np.dtype([("mark", "S8"), ("at", "<u8"), ("size", "<u8")])
NOTES_IN_ARGUMENTS = 512  # where NOTES stands in the image field's arguments; FFCV's own are shorter
MARK = b"densfeed"


class Field(NamedTuple):
    """One column of a .beton: FFCV's type id, its name, and for an ndarray its dtype and shape."""

    type: int
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()


def metadata_dtype(types: list[int]) -> np.dtype:
    """FFCV's record of a sample: the fields' records as a C struct (structs have alignment 1, numbers their own)."""
    return np.dtype([(f"f{n}", METADATA[kind]) for n, kind in enumerate(types)], align=True)


class Sample(NamedTuple):
    """What is written for one image: encoded JPEG, its height and width, its class, and arrays in the order of the fields."""

    jpeg: bytes
    height: int
    width: int
    label: int
    arrays: tuple[np.ndarray, ...] = ()


def write_beton(path: Path, num_samples: int, samples: Iterable[Sample], arrays: list[Field], notes: dict) -> None:
    """Write a .beton with fields `image`, `label` and `arrays`; `notes` is our JSON header.

    The file appears under its name only when it is whole. ValueError if there are not `num_samples` samples, UserError if
    one does not fit a page (8 MiB).
    """
    text = json.dumps(notes).encode()
    fields = [Field(RGB, "image"), Field(INT, "label"), *arrays]
    metadata = np.zeros(num_samples, metadata_dtype([field.type for field in fields]))
    table: list[tuple[int, int, int]] = []
    notes_at = HEADER.itemsize + FIELD.itemsize * len(fields) + metadata.nbytes
    first_page = -(-(notes_at + len(text)) // PAGE) * PAGE
    with replacing(path) as part, open(part, "wb") as file:
        at, count = first_page, 0
        file.seek(at)
        for count, sample in enumerate(samples, start=1):
            row = count - 1
            # Arrays first and the JPEG, whose length is odd as often as even, last: so every array is aligned.
            pieces = [np.ascontiguousarray(a, f.dtype).tobytes() for a, f in zip(sample.arrays, arrays, strict=True)]
            pieces.append(sample.jpeg)
            starts = np.cumsum([0] + [-(-len(piece) // ALIGN) * ALIGN for piece in pieces])
            needed = int(starts[-2]) + len(sample.jpeg)
            if needed > PAGE:
                raise UserError(f"sample {row}: {needed:,} bytes do not fit a page of {PAGE:,}; make this image smaller")
            at = -(-at // ALIGN) * ALIGN
            if at % PAGE + needed > PAGE:
                at = -(-at // PAGE) * PAGE
            for start, piece in zip(starts.tolist(), pieces, strict=False):
                file.seek(at + start)
                file.write(piece)
                table.append((row, at + start, len(piece)))
            metadata[row]["f0"] = (JPEG, sample.width, sample.height, at + int(starts[-2]))
            metadata[row]["f1"] = sample.label
            for n in range(len(arrays)):
                metadata[row][f"f{n + 2}"] = at + int(starts[n])
            at += needed
        if count != num_samples:
            raise ValueError(f"{count} samples came, {num_samples} were announced")
        end = -(-at // PAGE) * PAGE
        file.seek(end)
        file.write(np.array(table, "<u8").tobytes())
        file.seek(0)
        header = np.array((VERSION, len(fields), PAGE, num_samples, end), HEADER)
        file.write(header.tobytes())
        for field in fields:
            file.write(np.array((field.type, field.name.encode(), arguments(field, notes_at, len(text))), FIELD).tobytes())
        file.write(metadata.tobytes() + text)


def arguments(field: Field, notes_at: int, notes_size: int) -> bytes:
    """The 1,024 argument bytes of a field: FFCV's own, and in the image field's tail the place of our notes."""
    if field.type == NDARRAY:
        described = json.dumps(np.dtype(field.dtype).descr).encode()
        shape = np.zeros(32, "<u8")
        shape[: len(field.shape)] = field.shape
        return (shape.tobytes() + np.uint64(len(described)).tobytes() + described).ljust(1024, b"\0")
    if field.type == RGB:
        place = np.array((MARK, notes_at, notes_size), NOTES).tobytes()
        return (bytes(NOTES_IN_ARGUMENTS) + place).ljust(1024, b"\0")
    return bytes(1024)


class Beton:
    """A .beton, memory-mapped. UserError if it is no .beton, of another version, cut, or has no image and int field."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                head = file.read(HEADER.itemsize)
                header = np.frombuffer(head, HEADER)[0] if len(head) == HEADER.itemsize else None
                if header is None or header["version"] != VERSION or not 0 < header["num_fields"] < 64:
                    raise UserError(f"{path} is not an FFCV dataset of version {VERSION}; pack it with tools/pack_dataset.py")
                described = np.frombuffer(file.read(FIELD.itemsize * header["num_fields"]), FIELD)
        except FileNotFoundError:
            raise UserError(f"{path}: there is no such file; make it with tools/pack_dataset.py") from None
        except ValueError:
            raise UserError(f"{path} is cut in its header; pack or copy it again") from None
        self.fields = [self._field(row) for row in described]
        unknown = [field for field in self.fields if field.type not in METADATA]
        if unknown:
            raise UserError(
                f"{path}: field {unknown[0].name!r} has FFCV's type {unknown[0].type}, which this program does not read"
            )
        dtype = metadata_dtype([field.type for field in self.fields])
        start, table = HEADER.itemsize + described.nbytes, int(header["table"])
        self.num_samples = int(header["num_samples"])
        entries = self.num_samples * sum(field.type in (RGB, BYTES, NDARRAY) for field in self.fields)
        if start + self.num_samples * dtype.itemsize > table or size != table + entries * ALLOCATION.itemsize:
            raise UserError(
                f"{path} is cut or damaged ({size:,} bytes, {entries:,} allocations expected at {table:,}); pack or copy it again"
            )
        self._bytes, self._pages_end = np.memmap(self.path, np.uint8, "r"), table
        self._metadata = np.memmap(self.path, dtype, "r", start, (self.num_samples,))
        self._table = np.memmap(self.path, ALLOCATION, "r", table)
        # FFCV writes pages as its workers fill them, so its table is not in the order of the file.
        self._by_ptr = np.argsort(self._table["ptr"], kind="stable")
        self._ptrs = self._table["ptr"][self._by_ptr]
        self._image = self._column(RGB, "image")
        self.labels = np.asarray(self._metadata[self._column(INT, "label")])
        image = self._metadata[self._image]
        self.heights, self.widths = image["height"].astype(np.int64), image["width"].astype(np.int64)
        if self.num_samples == 0 or self.heights.min() == 0 or self.widths.min() == 0:
            raise UserError(f"{path} holds no images, or images without a size; pack it again")
        place = np.frombuffer(described["arguments"][int(self._image[1:])].tobytes(), NOTES, 1, NOTES_IN_ARGUMENTS)[0]
        text = self._bytes[int(place["at"]) : int(place["at"] + place["size"])].tobytes()
        try:
            self.notes = json.loads(text) if place["mark"] == MARK else {}
        except ValueError:
            raise UserError(f"{path}: the notes in its header are damaged; pack or copy it again") from None

    @staticmethod
    def _field(row: np.void) -> Field:
        kind, name, raw = int(row["type"]), row["name"].decode(errors="replace"), row["arguments"].tobytes()
        if kind != NDARRAY:
            return Field(kind, name)
        shape = tuple(int(n) for n in np.frombuffer(raw[:256], "<u8") if n)
        length = int(np.frombuffer(raw[256:264], "<u8")[0])
        described = json.loads(raw[264 : 264 + length])
        return Field(kind, name, described[0][1], shape)

    def _column(self, kind: int, what: str) -> str:
        found = [n for n, field in enumerate(self.fields) if field.type == kind]
        if not found:
            raise UserError(f"{self.path} has no {what} field; pack it with tools/pack_dataset.py")
        return f"f{found[0]}"

    def __len__(self) -> int:
        return self.num_samples

    def image(self, index: int) -> tuple[bytes, bool]:
        """The stored bytes of image `index` and whether they are raw pixels (`[height, width, 3]` uint8) and no JPEG."""
        record = self._metadata[index][self._image]
        return self._extents(np.array([index]), record["ptr"][None])[0].tobytes(), bool(record["mode"] == RAW)

    def fingerprint(self) -> str:
        """What the packer noted of the images; for a file that FFCV wrote, SHA-256 over its metadata."""
        return self.notes.get("fingerprint") or hashlib.sha256(self._metadata.tobytes()).hexdigest()

    def has(self, name: str) -> bool:
        """Whether there is a field of this name."""
        return any(field.name == name for field in self.fields)

    def array(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Rows `ids` of the ndarray field `name`: `[N, *shape]`, a copy."""
        number = next(n for n, field in enumerate(self.fields) if field.name == name)
        field = self.fields[number]
        rows = np.empty((len(ids), *field.shape), field.dtype)
        for row, extent in zip(rows, self._extents(ids, self._metadata[f"f{number}"][ids]), strict=True):
            if len(extent) != row.nbytes:
                raise UserError(
                    f"{self.path}: an array of field {name!r} has {len(extent)} bytes, not {row.nbytes}; pack it again"
                )
            row.reshape(-1).view(np.uint8)[:] = extent
        return rows

    def _extents(self, ids: np.ndarray, ptrs: np.ndarray) -> list[np.ndarray]:
        """The bytes that the samples `ids` have at `ptrs`; UserError where the allocation table says otherwise."""
        entries = self._table[self._by_ptr[np.minimum(np.searchsorted(self._ptrs, ptrs), len(self._ptrs) - 1)]]
        wrong = (entries["ptr"] != ptrs) | (entries["sample"] != ids) | (entries["ptr"] + entries["size"] > self._pages_end)
        if wrong.any():
            index = int(ids[wrong.argmax()])
            raise UserError(
                f"{self.path}: the allocation table does not know sample {index}; the file is damaged, pack it again"
            )
        return [self._bytes[at : at + size] for at, size in zip(entries["ptr"].tolist(), entries["size"].tolist(), strict=True)]

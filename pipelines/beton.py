"""FFCV datasets (.beton), read and written without the ffcv package. The bytes are described in relabel/FORMAT.md.

    python -m densefeed.pipelines.beton verify FILE...      reads every byte that counts and names every damaged sample

Only stock field types are used, so `ffcv.loader.Loader` 1.0.2 opens our files; we open any file whose first RGB image field
holds JPEGs (or raw pixels) and whose first int field is the label. What FFCV has no place for (class names, teacher,
fingerprint, checksums) stands between the metadata and the first page; the unused tail of the image field's 1,024 argument
bytes says where. FFCV reads neither.
"""

import fcntl
import hashlib
import json
import math
import os
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..relabel.files import UserError, naming, run, sync
from ..relabel.prefetch import ordered_map
from ..relabel.progress import bar
from . import native

HEADER = np.dtype([("version", "<u2"), ("num_fields", "<u2"), ("page_size", "<u4"), ("num_samples", "<u8"), ("table", "<u8")])
FIELD = np.dtype([("type", "u1"), ("name", "S16"), ("arguments", "V1024")])
ALLOCATION = np.dtype([("sample", "<u8"), ("ptr", "<u8"), ("size", "<u8")])
IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("ptr", "<u8")])  # packed: 13 bytes
EXTENT = np.dtype([("ptr", "<u8"), ("size", "<u8")])
FLOAT, INT, RGB, BYTES, NDARRAY, JSON, TENSOR = range(7)
METADATA = {
    FLOAT: np.dtype("<f8"), INT: np.dtype("<i8"), RGB: IMAGE, BYTES: EXTENT, NDARRAY: np.dtype("<u8"), JSON: EXTENT,
    TENSOR: np.dtype("<u8"),
}  # fmt: skip
ALLOCATED = (RGB, BYTES, NDARRAY, JSON, TENSOR)  # types with one entry a sample in the allocation table
JPEG, RAW = 0, 1
VERSION = 2
PAGE = 2**23  # FFCV's default; a sample never crosses a page
ALIGN = 16  # arrays start aligned, so that readers need not copy bytes before they view them
NOTES = np.dtype([("mark", "S8"), ("at", "<u8"), ("size", "<u8"), ("crc", "<u4")])
NOTES_IN_ARGUMENTS = 512  # where NOTES stands in the image field's arguments; FFCV's own are shorter
NOTES_VERSION = 2
NOTES_LIMIT = 2**26  # bytes; 21k class names take 0.6 MB, so more is a damaged size
MARK = b"densfeed"
SOI = b"\xff\xd8"  # how every JPEG starts
CHUNK = 2**16  # samples whose metadata and table entries are in memory at once: 3 and 8 MB with score maps
SYNC_BYTES = 2**30  # the packer makes its work durable this often
SHARED_NOTES = ("class_names", "teacher", "absent")  # what files opened as one dataset must agree on


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


class Extents(NamedTuple):
    """Where bytes stand: number of the file, offset in it, size in bytes; three arrays `[N]`."""

    file: np.ndarray  # int32
    offset: np.ndarray  # int64
    size: np.ndarray  # int64


def metadata_dtype(types: list[int]) -> np.dtype:
    """FFCV's record of a sample: the fields' records as a C struct (structs have alignment 1, numbers their own)."""
    return np.dtype([(f"f{n}", METADATA[kind]) for n, kind in enumerate(types)], align=True)


def arrays_crc(arrays: Iterable[bytes]) -> int:
    """CRC-32 (zlib) over a sample's arrays in the order of the fields; with score maps, that row's `crc32` of the HDF5 store."""
    crc = 0
    for array in arrays:
        crc = zlib.crc32(array, crc)
    return crc


# ----------------------------------------------------------------------- reading


class Front(NamedTuple):
    """What stands before the metadata of one file, and the notes behind it."""

    path: Path
    descriptor: int
    fields: list[Field]
    num_samples: int
    table: int  # offset of the allocation table; the file ends with it
    metadata: int  # offset
    notes: dict  # empty for a file that FFCV wrote


class Beton:
    """One .beton, or several that are read as one: the samples of the first, then those of the second, ...

    Everything but the samples is copied into memory and checked when the file is opened; no memory map is kept, so a file
    that is cut or replaced while it is open ends in an error and never in a signal. Samples are read with `pread`.

    Attributes, N samples in all:
        labels: int64 `[N]`.
        heights, widths: int32 `[N]`, pixels.
        raw: bool `[N]`; raw pixels `[height, width, 3]` uint8 and no JPEG.
        images: Extents `[N]` of the stored images; `file` indexes `descriptors`.
        crcs: uint32 `[N]`, `arrays_crc` of each sample; None for a file that FFCV wrote, or without arrays.
        fields: the columns. notes: our JSON, of several files those of the first with `max_palette`, `min_window_side` and
            `left_out` over all.
        descriptors: open file descriptors, one a file, valid until `close`.

    Raises UserError if a file is no .beton, of another version, cut or damaged, has no image and int field, or does not fit
    the others. A file of ours has checksums over everything but the samples' images; one that FFCV wrote has none, so there
    only structure is checked: sizes, pointers, and who owns what they point at.
    """

    def __init__(self, paths: Path | str | Sequence[Path | str]) -> None:
        self.paths = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
        if not self.paths:
            raise UserError("no .beton file was named; name one or several")
        self.descriptors: list[int] = []
        self._close = weakref.finalize(self, close_all, self.descriptors)
        try:
            fronts = [self._open(path) for path in self.paths]
            self._check_alike(fronts)
            self._load(fronts)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> Front:
        if not path.exists():
            raise UserError(f"{path}: there is no such file; make it with tools/pack_dataset.py")
        if not path.is_file():
            raise UserError(f"{path} is no file; name a .beton, made with tools/pack_dataset.py")
        self.descriptors.append(os.open(path, os.O_RDONLY))
        return read_front(path, self.descriptors[-1])

    def _check_alike(self, fronts: list[Front]) -> None:
        """UserError unless the files can be one dataset; sets `fields` and `notes`."""
        first, *others = fronts
        for other in others:
            if other.fields != first.fields:
                raise UserError(f"{other.path} has other fields than {first.path}; open them apart, or pack both alike")
            for key in SHARED_NOTES:
                if other.notes.get(key) != first.notes.get(key):
                    raise UserError(
                        f"{other.path} has another {key.replace('_', ' ')} than {first.path}; open them apart, or pack both alike"
                    )
        self.fields, self.notes = first.fields, {key: value for key, value in first.notes.items() if key != "crc32"}
        for key, merge in (("max_palette", max), ("min_window_side", min), ("left_out", sum)):
            if any(key in front.notes for front in fronts):
                self.notes[key] = merge([front.notes.get(key, 0) for front in fronts])

    def _load(self, fronts: list[Front]) -> None:
        self._starts = np.cumsum([0, *(front.num_samples for front in fronts)])
        count = int(self._starts[-1])
        self.labels = np.empty(count, np.int64)
        self.heights, self.widths = np.empty(count, np.int32), np.empty(count, np.int32)
        self.raw = np.empty(count, bool)
        self.images = Extents(np.empty(count, np.int32), np.empty(count, np.int64), np.empty(count, np.int64))
        self._arrays = [n for n, field in enumerate(self.fields) if field.type == NDARRAY]
        self._offsets = {n: np.empty(count, np.int64) for n in self._arrays}
        summed = self._arrays and all(front.notes for front in fronts)
        self.crcs = np.empty(count, np.uint32) if summed else None
        fingerprints = []
        for number, (front, start) in enumerate(zip(fronts, self._starts.tolist(), strict=False)):
            rows = slice(start, start + front.num_samples)
            self.images.file[rows] = number
            fingerprints.append(self._load_metadata(front, rows))
            self._load_table(front, rows)
        self._fingerprint = fingerprints[0]
        if len(fronts) > 1:
            self._fingerprint = hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()

    def _load_metadata(self, front: Front, rows: slice) -> str:
        """Fill the rows from the metadata and the samples' checksums; the fingerprint of the file."""
        types = [field.type for field in self.fields]
        image, label = (f"f{types.index(kind)}" for kind in (RGB, INT))
        dtype = metadata_dtype(types)
        crc, digest = 0, hashlib.sha256()
        for at, block in chunks(front, front.metadata, dtype, front.num_samples):
            here = slice(rows.start + at, rows.start + at + len(block))
            if front.notes:
                crc = zlib.crc32(block, crc)
            else:
                digest.update(block)
            self.labels[here] = block[label]
            self.heights[here], self.widths[here] = block[image]["height"], block[image]["width"]
            self.raw[here] = block[image]["mode"] == RAW
            self.images.offset[here] = block[image]["ptr"]
            for n, offsets in self._offsets.items():
                offsets[here] = block[f"f{n}"]
            if block[image]["mode"].max() > RAW or not (self.heights[here].min() and self.widths[here].min()):
                raise UserError(f"{front.path} holds images without a size or of unknown mode; pack or copy it again")
        if not front.notes:
            return digest.hexdigest()
        sums = front.notes["crc32"]
        if crc != sums["metadata"]:
            raise UserError(f"{front.path} is damaged in its metadata; pack or copy it again")
        if self.crcs is not None:
            self.crcs[rows] = read(front, sums["samples_at"], 4 * front.num_samples).view("<u4")
            if zlib.crc32(self.crcs[rows]) != sums["samples"]:
                raise UserError(f"{front.path} is damaged in its checksums; pack or copy it again")
        return front.notes["fingerprint"]

    def _load_table(self, front: Front, rows: slice) -> None:
        """Fill the rows' image sizes from the allocation table, and check every pointer against it.

        A writer finishes a sample before it begins the next, so the table is a row of entries per sample. Ours are in the
        order of the samples; FFCV's workers write theirs as they come. Either way each row says whose it is, and if all N
        rows name somebody and nobody is missing, each sample has its own: no sorting.
        """
        width = sum(field.type in ALLOCATED for field in self.fields)
        dtype = np.dtype([("entries", "<i8", (width, 3))])
        seen, crc = np.zeros(front.num_samples, bool), 0
        columns = dict.fromkeys((self._image, *self._arrays), 0)
        grouped = self._grouped(front, dtype)
        for at, block in grouped:
            entries = block["entries"]
            if front.notes:
                crc = zlib.crc32(block, crc)
            owners = entries[:, 0, 0]
            if (entries[:, :, 0] != owners[:, None]).any() or owners.min() < 0 or owners.max() >= front.num_samples:
                raise UserError(f"{front.path}: its allocation table is damaged; pack or copy it again")
            seen[owners] = True
            ordered = owners[0] == at and (np.diff(owners) == 1).all()
            here = slice(rows.start + at, rows.start + at + len(block)) if ordered else rows.start + owners
            for n in columns:
                offsets = self.images.offset if n == self._image else self._offsets[n]
                wanted, column = offsets[here], columns[n]
                if (entries[:, column, 1] == wanted).all():
                    sizes = entries[:, column, 2]
                else:  # another writer's order of fields
                    matches = entries[:, :, 1] == wanted[:, None]
                    if not matches.any(axis=1).all():
                        index = int(owners[~matches.any(axis=1)][0])
                        raise UserError(
                            f"{front.path}: the allocation table does not know sample {index}; the file is damaged, pack it again"
                        )
                    # An empty byte string shares its place with what follows it.
                    best = np.where(matches, entries[:, :, 2], -1).argmax(axis=1)
                    sizes, columns[n] = np.take_along_axis(entries[:, :, 2], best[:, None], axis=1)[:, 0], int(best[0])
                self._check_extents(front, n, owners, wanted, sizes)
                if n == self._image:
                    self.images.size[here] = sizes
        if not seen.all():
            raise UserError(
                f"{front.path}: the allocation table does not know sample {int(seen.argmin())}; pack or copy it again"
            )
        if front.notes and crc != front.notes["crc32"]["table"]:
            raise UserError(f"{front.path} is damaged in its allocation table; pack or copy it again")
        pixels = 3 * self.heights[rows].astype(np.int64) * self.widths[rows]
        if (self.raw[rows] & (self.images.size[rows] != pixels)).any():
            raise UserError(f"{front.path} holds raw images whose size in bytes is not 3 × height × width; pack it again")

    def _grouped(self, front: Front, dtype: np.dtype) -> Iterator[tuple[int, np.ndarray]]:
        """The table in chunks of whole samples; sorted first where a foreign writer scattered the entries, from the first on."""
        for at, block in chunks(front, front.table, dtype, front.num_samples):
            owners = block["entries"][:, :, 0]
            if at == 0 and not front.notes and (owners != owners[:, :1]).any():
                whole = read(front, front.table, front.num_samples * dtype.itemsize).view("<i8").reshape(-1, 3)
                ordered = whole[np.argsort(whole[:, 0], kind="stable")].reshape(front.num_samples, -1)
                yield 0, ordered.view(dtype).reshape(-1)
                return
            yield at, block

    def _check_extents(self, front: Front, n: int, owners: np.ndarray, offsets: np.ndarray, sizes: np.ndarray) -> None:
        pages = front.metadata + front.num_samples * metadata_dtype([field.type for field in self.fields]).itemsize
        wrong = (offsets < pages) | (sizes <= 0) | (offsets > front.table - sizes)
        if n != self._image:
            wrong |= sizes != self.fields[n].nbytes
        if wrong.any():
            field, index = self.fields[n].name, int(owners[wrong.argmax()])
            raise UserError(
                f"{front.path}: field {field!r} of sample {index} lies outside the pages or has a wrong size; pack or copy it again"
            )

    @property
    def _image(self) -> int:
        return next(n for n, field in enumerate(self.fields) if field.type == RGB)

    def __len__(self) -> int:
        return len(self.labels)

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
        self._close()

    def where(self, index: int) -> str:
        """How an error message should name sample `index`: its file, and its number there."""
        number = int(self.images.file[index])
        return f"{self.paths[number]} image {index - int(self._starts[number])}"

    def fingerprint(self) -> str:
        """What the packer noted of the images; SHA-256 over the metadata of a file that FFCV wrote, over all of several."""
        return self._fingerprint

    def image(self, index: int) -> tuple[bytes, bool]:
        """The stored bytes of image `index`, and whether they are raw pixels (`[height, width, 3]` uint8) and no JPEG."""
        stored = bytearray(int(self.images.size[index]))
        self._read_into(index, [stored], int(self.images.offset[index]))
        if not self.raw[index] and stored[:2] != SOI:
            raise UserError(f"{self.where(index)} is damaged: it is no JPEG; pack or copy the file again")
        return bytes(stored), bool(self.raw[index])

    def has(self, name: str) -> bool:
        """Whether there is an ndarray field of this name."""
        return any(self.fields[n].name == name for n in self._arrays)

    def field(self, name: str) -> Field:
        """The ndarray field of this name: its dtype and shape."""
        return self.fields[self._number(name)]

    def array_offsets(self, name: str, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """File descriptors (int32) and offsets (int64) of the ndarray field `name` of the samples `ids`, `[len(ids)]` each."""
        return np.array(self.descriptors, np.int32)[self.images.file[ids]], self._offsets[self._number(name)][ids]

    def array(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Rows `ids` of the ndarray field `name`: `[len(ids), *shape]`, a copy; checked as `arrays` does."""
        return self.arrays(ids, [name])[name]

    def arrays(self, ids: np.ndarray, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Rows `ids` of the ndarray fields `names` (default: all), `{name: [len(ids), *shape]}`, copies.

        UserError if a sample's arrays do not match their checksum; all of them are read for that, where there is one.
        """
        wanted = self._arrays if names is None else [self._number(name) for name in names]
        numbers = wanted if self.crcs is None else self._arrays
        columns = {n: np.empty((len(ids), *self.fields[n].shape), self.fields[n].dtype) for n in numbers}
        views = {n: column.reshape(len(ids), -1).view(np.uint8) for n, column in columns.items()}
        for row, index in enumerate(ids.tolist()):
            for n in numbers:
                self._read_into(index, [views[n][row]], int(self._offsets[n][index]))
            if self.crcs is not None and arrays_crc(views[n][row] for n in numbers) != self.crcs[index]:
                raise UserError(f"{self.where(index)}: its arrays are damaged; pack or copy the file again")
        return {self.fields[n].name: columns[n] for n in wanted}

    def _number(self, name: str) -> int:
        for n in self._arrays:
            if self.fields[n].name == name:
                return n
        raise UserError(f"{self.paths[0]} has no ndarray field {name!r}; pack it with tools/pack_dataset.py")

    def _read_into(self, index: int, buffers: list, offset: int) -> None:
        """Fill buffers from the file of sample `index`; UserError if it has become shorter."""
        if not self.descriptors:
            raise ValueError("the .beton is closed")
        number = int(self.images.file[index])
        with naming(self.paths[number]):
            got = os.preadv(self.descriptors[number], buffers, offset)
        if got != sum(len(buffer) for buffer in buffers):
            raise UserError(f"{self.where(index)} is gone: the file was cut or replaced while open; copy it again and rerun")


def close_all(descriptors: list[int]) -> None:
    """Close and forget file descriptors."""
    while descriptors:
        os.close(descriptors.pop())


def read(front: Front, offset: int, size: int) -> np.ndarray:
    """`size` bytes of the file at `offset`, uint8; UserError if they are not there."""
    buffer = np.empty(size, np.uint8)
    read_into(front.path, front.descriptor, buffer, offset)
    return buffer


def read_into(path: Path, descriptor: int, buffer: np.ndarray, offset: int) -> None:
    """Fill a contiguous array from a file; UserError if the file ends before."""
    view = memoryview(buffer).cast("B")
    while len(view):  # one call gives at most 2 GiB
        with naming(path):
            got = os.preadv(descriptor, [view], offset)
        if got == 0:
            raise UserError(f"{path} is cut or damaged; pack or copy it again")
        view, offset = view[got:], offset + got


def chunks(front: Front, offset: int, dtype: np.dtype, count: int) -> Iterator[tuple[int, np.ndarray]]:
    """`count` records at `offset`: (number of the first, up to CHUNK of them); the same memory every time."""
    buffer = np.empty(min(count, CHUNK), dtype)
    for at in range(0, count, CHUNK):
        block = buffer[: count - at]
        read_into(front.path, front.descriptor, block.view(np.uint8), offset + at * dtype.itemsize)
        yield at, block


def read_front(path: Path, descriptor: int) -> Front:
    """Header, field descriptors and notes of a .beton, all checked; UserError as `Beton`."""
    size, head = os.fstat(descriptor).st_size, os.pread(descriptor, HEADER.itemsize, 0)
    header = np.frombuffer(head, HEADER)[0] if len(head) == HEADER.itemsize else None
    if header is None or header["version"] != VERSION or not 0 < header["num_fields"] < 64:
        raise UserError(f"{path} is not an FFCV dataset of version {VERSION}; pack it with tools/pack_dataset.py")
    raw = os.pread(descriptor, FIELD.itemsize * int(header["num_fields"]), HEADER.itemsize)
    if len(raw) != FIELD.itemsize * header["num_fields"]:
        raise UserError(f"{path} is cut in its header; pack or copy it again")
    described = np.frombuffer(raw, FIELD)
    notes = read_notes(path, descriptor, head + raw, int(header["table"]))
    fields = [parse_field(path, row) for row in described]
    for kind, what in ((RGB, "image"), (INT, "label")):
        if kind not in [field.type for field in fields]:
            raise UserError(f"{path} has no {what} field; pack it with tools/pack_dataset.py")
    count, table, start = int(header["num_samples"]), int(header["table"]), HEADER.itemsize + len(raw)
    entries = count * sum(field.type in ALLOCATED for field in fields)
    if (
        start + count * metadata_dtype([f.type for f in fields]).itemsize > table
        or size != table + entries * ALLOCATION.itemsize
    ):
        raise UserError(
            f"{path} is cut or damaged ({size:,} bytes, {entries:,} allocations expected at {table:,}); pack or copy it again"
        )
    if count == 0:
        raise UserError(f"{path} holds no images; pack it again")
    return Front(path, descriptor, fields, count, table, start, notes)


def read_notes(path: Path, descriptor: int, head: bytes, table: int) -> dict:
    """Our JSON, given header and descriptors, which its checksum covers too; empty if there is none. UserError if damaged."""
    damaged = UserError(f"{path} is damaged in its header; pack or copy it again")
    for at in range(HEADER.itemsize, len(head), FIELD.itemsize):
        place_at = notes_place(at)
        place = np.frombuffer(head, NOTES, 1, place_at)[0]
        if place["mark"] == MARK:
            break
        if head[at] == RGB and any(head[place_at : place_at + NOTES.itemsize]):  # FFCV leaves zeros here
            raise damaged
    else:
        return {}
    notes_at, size = int(place["at"]), int(place["size"])
    if size > NOTES_LIMIT or notes_at + size > table:
        raise damaged
    text = os.pread(descriptor, size, notes_at)
    unsummed = head[: place_at + NOTES.fields["crc"][1]] + bytes(4) + head[place_at + NOTES.itemsize :]
    if zlib.crc32(text, zlib.crc32(unsummed)) != place["crc"]:
        try:  # before version 2 the mark stood there without a checksum
            earlier = place["crc"] == 0 and json.loads(text).get("densefeed", NOTES_VERSION) < NOTES_VERSION
        except (ValueError, AttributeError, TypeError):
            earlier = False
        if earlier:
            raise UserError(f"{path} was packed by an earlier version of this program; pack it again")
        raise damaged
    notes = json.loads(text)
    if notes["densefeed"] != NOTES_VERSION:
        raise UserError(f"{path} was packed by another version of this program ({notes['densefeed']}); pack it again")
    return notes


def notes_place(descriptor_at: int) -> int:
    """Where NOTES stands in the file, given where the descriptor that carries it does."""
    return descriptor_at + FIELD.fields["arguments"][1] + NOTES_IN_ARGUMENTS


def parse_field(path: Path, row: np.void) -> Field:
    """A field from its descriptor; UserError for a type whose record's size is unknown, and for a damaged ndarray."""
    kind, name, raw = int(row["type"]), row["name"].decode(errors="replace"), row["arguments"].tobytes()
    if kind not in METADATA:
        raise UserError(f"{path}: field {name!r} has FFCV's type {kind}, which this program does not read")
    if kind != NDARRAY:
        return Field(kind, name)
    shape = tuple(int(n) for n in np.frombuffer(raw[:256], "<u8") if n)
    length = int(np.frombuffer(raw[256:264], "<u8")[0])
    try:
        ((_, dtype),) = json.loads(raw[264 : 264 + length])
        if np.dtype(dtype).hasobject:
            raise TypeError
    except (ValueError, TypeError):
        raise UserError(f"{path}: the dtype of field {name!r} is damaged or no plain number; pack or copy it again") from None
    return Field(kind, name, dtype, shape)


def describe_field(field: Field) -> bytes:
    """The descriptor of a field, as FFCV reads it."""
    arguments = b""
    if field.type == NDARRAY:
        described = json.dumps(np.dtype(field.dtype).descr).encode()
        shape = np.zeros(32, "<u8")
        shape[: len(field.shape)] = field.shape
        arguments = shape.tobytes() + np.uint64(len(described)).tobytes() + described
    return np.array((field.type, field.name.encode(), arguments), FIELD).tobytes()


# ----------------------------------------------------------------------- writing


class Sample(NamedTuple):
    """What is written for one image: encoded JPEG, its height and width, its class, and arrays in the order of the fields."""

    jpeg: bytes
    height: int
    width: int
    label: int
    arrays: tuple[np.ndarray, ...] = ()


# A line of the journal: what was done with one image. `block` is the CRC-32 of all that was written for it, `arrays` that of
# its arrays, `crc` that of this record. `ptr` is where its first array stands; the JPEG is last.
ROW = np.dtype([
    ("index", "<u8"), ("ptr", "<u8"), ("label", "<i8"), ("size", "<u4"), ("height", "<u2"), ("width", "<u2"),
    ("block", "<u4"), ("arrays", "<u4"), ("state", "u1"), ("tag", "u1"), ("unused", "<u2"), ("crc", "<u4"),
])  # fmt: skip
UNTRIED, PACKED, FAILED = 0, 1, 2


class BetonWriter:
    """Writes a .beton image by image, under the name `<path>.part` until it is whole; `<path>.part.rows` is its journal.

    Args:
        path: the file to make.
        num_samples: how many images there are.
        arrays: fields of type NDARRAY that come with every image, beside `image` and `label`.
        notes: JSON that readers find in `Beton.notes`; `class_names` and `fingerprint` are ours to expect.
        identity: JSON, not stored in the file, that must be equal for a `.part` to be continued: which images, which options.

    A writer that finds the `.part` of an earlier one goes on behind its last whole image, and the finished file has the same
    bytes as if it had not been interrupted. Images that earlier could not be read are tried again, and stand last if they can.
    The journal is a JSON line and then ROWs; a ROW is written after its image, so what it names is whole after a kill; after
    a power cut, too, before the last 1 to 2 GiB, and those are read back and compared.

    Raises UserError if `path` exists, another process is writing it, the `.part` is not of this packing, or num_samples is 0.

    Attributes:
        state: uint8 `[num_samples]`, UNTRIED, PACKED or FAILED. tags: uint8 alike, what `write` was given.
        room: the most bytes a JPEG may have, since a sample does not cross a page.
    """

    def __init__(
        self, path: Path | str, num_samples: int, arrays: list[Field], notes: dict, identity: dict | None = None
    ) -> None:
        self.path, self.part, self.journal = Path(path), Path(f"{path}.part"), Path(f"{path}.part.rows")
        if num_samples < 1:
            raise UserError(f"{path} would hold no images")
        self.arrays, self.notes = arrays, {"densefeed": NOTES_VERSION} | notes
        self._fields = [Field(RGB, "image"), Field(INT, "label"), *arrays]
        self._dtype = metadata_dtype([field.type for field in self._fields])
        self._starts = np.cumsum([0] + [-(-field.nbytes // ALIGN) * ALIGN for field in arrays]).tolist()
        self.room = PAGE - self._starts[-1]
        # The notes may still grow by what `finish` finds: checksums, a longer fingerprint, how many images are missing.
        longest = self.notes | {
            "fingerprint": "0" * 64,
            "left_out": num_samples,
            "crc32": checksums(2**32, 2**32, 2**32, 2**64),
        }
        self._metadata = HEADER.itemsize + FIELD.itemsize * len(self._fields)
        front = self._metadata + num_samples * (self._dtype.itemsize + 4) + len(json.dumps(longest))
        self._first_page = -(-front // PAGE) * PAGE
        self._rows = np.zeros(num_samples, ROW)
        self._at, self._synced = self._first_page, self._first_page
        same = {"num_samples": num_samples, "arrays": [list(field) for field in arrays], "page": PAGE} | (identity or {})
        self.descriptors: list[int] = []
        self._close = weakref.finalize(self, close_all, self.descriptors)
        try:
            with naming(self.path):
                self._begin(json.loads(json.dumps(same | self.notes)))
        except BaseException:
            self.close()
            raise

    @property
    def state(self) -> np.ndarray:
        return self._rows["state"]

    @property
    def tags(self) -> np.ndarray:
        return self._rows["tag"]

    def todo(self) -> np.ndarray:
        """The images to write, in the order they should come: those never tried, then those that failed before."""
        return np.concatenate([np.nonzero(self.state == kind)[0] for kind in (UNTRIED, FAILED)])

    def _begin(self, identity: dict) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not self.journal.exists()
        if fresh and self.part.exists():
            raise UserError(f"{self.part} is in the way, and no packing left it; remove it or choose another --out")
        if fresh and self.path.exists():
            raise UserError(f"{self.path} exists already; remove it or choose another --out")
        self._lock()
        if self.path.exists():
            if not self.part.exists():  # killed between giving the name and removing the journal
                self.journal.unlink()
            raise UserError(f"{self.path} exists already; remove it or choose another --out")
        line, _, records = read_all(self.descriptors[0]).partition(b"\n")
        if not self.part.exists():  # killed, or out of space, before the first image
            os.ftruncate(self.descriptors[0], 0)
            line, records = json.dumps(identity).encode(), b""
            write_at(self.descriptors[0], line + b"\n", 0)
        self.descriptors.append(os.open(self.part, os.O_RDWR | os.O_CREAT, 0o666))
        self._next_row = len(line) + 1
        self._resume(line, records, identity)

    def _lock(self) -> None:
        """Open the journal for us alone; the system drops the lock when the process ends, however it ends."""
        while True:
            self.descriptors[:] = [os.open(self.journal, os.O_RDWR | os.O_CREAT, 0o666)]
            try:
                fcntl.flock(self.descriptors[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{self.path} is being packed by another process; wait for it or choose another --out"
                ) from None
            try:
                if os.path.samestat(os.fstat(self.descriptors[0]), os.stat(self.journal)):
                    return
            except FileNotFoundError:
                pass
            close_all(self.descriptors)  # the other process finished, and removed the file, between our two calls

    def _resume(self, line: bytes, records: bytes, identity: dict) -> None:
        rows = np.frombuffer(records[: len(records) // ROW.itemsize * ROW.itemsize], ROW)
        starts = range(0, rows.nbytes, ROW.itemsize)
        whole = rows["crc"] == np.fromiter((zlib.crc32(records[at : at + ROW.itemsize - 4]) for at in starts), "<u4", len(rows))
        rows = rows[: len(rows) if whole.all() else whole.argmin()]
        try:
            begun = json.loads(line)
        except ValueError:
            raise UserError(f"{self.journal}, left by an earlier packing, is damaged; remove it and {self.part}") from None
        differ = [key for key in begun.keys() | identity.keys() if begun.get(key) != identity.get(key)]
        if "fingerprint" in differ and (rows["state"] == FAILED).any():
            differ.remove("fingerprint")  # it covers file sizes, and files that failed are there to be mended
        if differ:
            key = min(differ).replace("_", " ")
            raise UserError(
                f"{self.part} was begun with another {key}; remove it and {self.journal.name}, or choose another --out"
            )
        rows = rows[: self._sound(rows)]
        self._rows[rows["index"]] = rows  # of two records of one image the later wins
        packed = rows[rows["state"] == PACKED]
        if len(packed):
            self._at = int(packed[-1]["ptr"]) + self._starts[-1] + int(packed[-1]["size"])
        self._next_row += rows.nbytes
        os.ftruncate(self.descriptors[0], self._next_row)
        os.ftruncate(self.descriptors[1], self._at if len(packed) else 0)
        self._synced = self._at

    def _sound(self, rows: np.ndarray) -> int:
        """How many records name images that are really there. Only those that may not have reached the disk are read."""
        packed = np.nonzero(rows["state"] == PACKED)[0]
        if not len(packed):
            return len(rows)
        ends = rows["ptr"] + self._starts[-1] + rows["size"]
        recent = packed[ends[packed] + 2 * SYNC_BYTES > ends[packed[-1]]]
        for n in bar(recent.tolist(), "check what is packed"):
            block = os.pread(self.descriptors[1], self._starts[-1] + int(rows[n]["size"]), int(rows[n]["ptr"]))
            if zlib.crc32(block) != rows[n]["block"]:
                return n
        return len(rows)

    def _block(self, index: int, sample: Sample, tag: int) -> tuple[np.ndarray, bytes]:
        """The record of a sample, without its place, and its bytes: arrays, each padded, then the JPEG."""
        arrays = [np.ascontiguousarray(a, f.dtype) for a, f in zip(sample.arrays, self.arrays, strict=True)]
        for array, field in zip(arrays, self.arrays, strict=True):
            if array.shape != field.shape:
                raise ValueError(f"{field.name} is {array.shape}, not {field.shape}")
        pieces = [array.tobytes() for array in arrays]
        block = b"".join([*(piece.ljust(-(-len(piece) // ALIGN) * ALIGN, b"\0") for piece in pieces), sample.jpeg])
        row = np.zeros((), ROW)
        row["index"], row["label"], row["size"] = index, sample.label, len(sample.jpeg)
        row["height"], row["width"], row["state"], row["tag"] = sample.height, sample.width, PACKED, tag
        row["block"], row["arrays"] = zlib.crc32(block), arrays_crc(pieces)
        return row, block

    def check(self, index: int, sample: Sample) -> None:
        """UserError unless what is packed of image `index` is this sample."""
        row, _ = self._block(index, sample, int(self.tags[index]))
        if any(row[name] != self._rows[index][name] for name in ("label", "size", "height", "width", "block")):
            raise self.changed(index)

    def changed(self, index: int) -> UserError:
        """What to raise where image `index` is not what was packed."""
        return UserError(f"{self.part} holds image {index} otherwise than it is now; remove it and {self.journal.name}")

    def write(self, index: int, sample: Sample, tag: int = 0) -> None:
        """Append image `index`; `tag`, 0 to 255, is kept for `tags` only. UserError if it does not fit a page (8 MiB)."""
        if len(sample.jpeg) > self.room:
            raise UserError(
                f"sample {index}: a JPEG of {len(sample.jpeg):,} bytes does not fit a page of {PAGE:,}; make this image smaller"
            )
        row, block = self._block(index, sample, tag)
        at = -(-self._at // ALIGN) * ALIGN
        if at % PAGE + len(block) > PAGE:
            at = -(-at // PAGE) * PAGE
        row["ptr"] = at
        with naming(self.path):
            write_at(self.descriptors[1], block, at)
            self._record(row)
            self._at = at + len(block)
            if self._at - self._synced > SYNC_BYTES:
                self._sync()

    def fail(self, index: int) -> None:
        """Note that image `index` cannot be packed; a later packing tries it again."""
        row = np.zeros((), ROW)
        row["index"], row["state"] = index, FAILED
        with naming(self.path):
            self._record(row)

    def _record(self, row: np.ndarray) -> None:
        row["crc"] = zlib.crc32(row.tobytes()[:-4])
        write_at(self.descriptors[0], row.tobytes(), self._next_row)
        self._next_row += ROW.itemsize
        self._rows[row["index"]] = row

    def _sync(self) -> None:
        for descriptor in reversed(self.descriptors):  # images before the records that vouch for them
            os.fsync(descriptor)
        self._synced = self._at

    def finish(self) -> None:
        """Write table, metadata, notes and header, and give the file its name. Images that failed are left out, in the notes
        `left_out` says how many, and the fingerprint is then another one; UserError if none is left."""
        if (self.state == UNTRIED).any():
            raise ValueError(f"image {int((self.state == UNTRIED).argmax())} was neither written nor failed")
        kept = np.nonzero(self.state == PACKED)[0]
        if not len(kept):
            raise UserError(f"{self.path}: none of the {len(self._rows)} images can be packed; there is nothing to write")
        notes = dict(self.notes)
        if len(kept) < len(self._rows):
            notes["left_out"] = len(self._rows) - len(kept)
            missing = np.nonzero(self.state != PACKED)[0].tolist()
            notes["fingerprint"] = hashlib.sha256(f"{notes.get('fingerprint')} without {missing}".encode()).hexdigest()
        with naming(self.path):
            self._write_front(kept, notes)
            os.fsync(self.descriptors[1])
            if self.path.exists():
                raise UserError(f"{self.path} exists already; remove it, and run this again")
            os.replace(self.part, self.path)
            sync(self.path.parent)
            self.journal.unlink()
        self.close()

    def _write_front(self, kept: np.ndarray, notes: dict) -> None:
        out, count = self.descriptors[1], len(kept)
        table = -(-self._at // PAGE) * PAGE
        os.ftruncate(out, table)
        sums_at = self._metadata + count * self._dtype.itemsize
        width = 1 + len(self.arrays)
        table_crc = metadata_crc = samples_crc = 0
        for at in range(0, count, CHUNK):
            rows = self._rows[kept[at : at + CHUNK]]
            metadata = np.zeros(len(rows), self._dtype)
            metadata["f0"]["mode"], metadata["f0"]["ptr"] = JPEG, rows["ptr"] + self._starts[-1]
            metadata["f0"]["height"], metadata["f0"]["width"] = rows["height"], rows["width"]
            metadata["f1"] = rows["label"]
            entries = np.zeros((len(rows), width), ALLOCATION)
            entries["sample"] = np.arange(at, at + len(rows))[:, None]
            entries["ptr"] = rows["ptr"][:, None] + np.array(self._starts, np.uint64)
            entries["size"] = [[field.nbytes for field in self.arrays] + [0]]
            entries["size"][:, -1] = rows["size"]
            for n in range(len(self.arrays)):
                metadata[f"f{n + 2}"] = entries["ptr"][:, n]
            sums = rows["arrays"].tobytes() if self.arrays else b""
            write_at(out, entries.tobytes(), table + at * width * ALLOCATION.itemsize)
            write_at(out, metadata.tobytes(), self._metadata + at * self._dtype.itemsize)
            write_at(out, sums, sums_at + 4 * at)
            table_crc, metadata_crc = zlib.crc32(entries.tobytes(), table_crc), zlib.crc32(metadata.tobytes(), metadata_crc)
            samples_crc = zlib.crc32(sums, samples_crc)
        notes["crc32"] = checksums(metadata_crc, table_crc, samples_crc, sums_at)
        text = json.dumps(notes).encode()
        notes_at = sums_at + (4 * count if self.arrays else 0)
        assert notes_at + len(text) <= self._first_page, "the notes grew into the first page"
        header = np.array((VERSION, len(self._fields), PAGE, count, table), HEADER).tobytes()
        head = bytearray(header + b"".join(describe_field(field) for field in self._fields))
        place = np.array((MARK, notes_at, len(text), 0), NOTES)
        place_at = notes_place(HEADER.itemsize)
        head[place_at : place_at + NOTES.itemsize] = place.tobytes()
        place["crc"] = zlib.crc32(text, zlib.crc32(head))
        head[place_at : place_at + NOTES.itemsize] = place.tobytes()
        # A packing killed in here leaves notes that may reach some digits further: the numbers in them differ.
        write_at(out, text.ljust(min(len(text) + 256, self._first_page - notes_at), b"\0"), notes_at)
        write_at(out, bytes(head), 0)

    def close(self) -> None:
        """Close the files and drop the lock; what is packed stays in `.part`."""
        self._close()

    def __enter__(self) -> "BetonWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_beton(path: Path, samples: Sequence[Sample], arrays: list[Field], notes: dict) -> None:
    """Write a .beton of samples that are in memory; on an error nothing stays, after a kill it is continued. Raises as
    `BetonWriter`."""
    with BetonWriter(path, len(samples), arrays, notes) as writer:
        try:
            for index, sample in enumerate(samples):
                if writer.state[index] == PACKED:
                    writer.check(index, sample)
                else:
                    writer.write(index, sample)
            writer.finish()
        except BaseException:
            writer.part.unlink(missing_ok=True)
            writer.journal.unlink(missing_ok=True)
            raise


def checksums(metadata: int, table: int, samples: int, samples_at: int) -> dict[str, int]:
    """The `crc32` of the notes: of metadata, table, and the samples' own checksums, and where those stand."""
    return {"metadata": metadata, "table": table, "samples": samples, "samples_at": samples_at}


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """pwrite all of it; a disk that fills in the middle takes a part, and the next call says why."""
    view = memoryview(data)
    while len(view):
        put = os.pwrite(descriptor, view, offset)
        view, offset = view[put:], offset + put


def read_all(descriptor: int) -> bytes:
    """The whole file."""
    with open(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return file.read()


# ----------------------------------------------------------------------- verifying


def verify(path: Path, threads: int) -> list[str]:
    """A sentence for every damaged sample of a .beton: arrays against their checksums, images decoded whole.

    UserError as `Beton` if the file does not even open.
    """
    beton = Beton(path)

    def check(index: int) -> str | None:
        try:
            beton.arrays(np.array([index]))
            stored, raw = beton.image(index)
            if not raw:
                native.check(stored, int(beton.heights[index]), int(beton.widths[index]))
        except UserError as error:
            return str(error)
        except native.JpegError as error:  # a stranger's CMYK image is no damage: the loaders let Pillow decode it
            if error.status != native.UNSUPPORTED:
                return f"{beton.where(index)} is damaged ({error}); pack or copy the file again"
        return None

    with ThreadPoolExecutor(threads) as pool:
        found = ordered_map(check, range(len(beton)), pool, 16 * threads)
        damaged = [said for said in bar(found, f"verify {path.name}", len(beton)) if said]
    beton.close()
    return damaged


def verify_files(files: tuple[Path, ...], /) -> None:
    """Read everything, decode every image, and name every damaged sample; UserError, after all files, if there is one."""
    bad = []
    for path in files:
        try:
            damaged = verify(path, os.cpu_count() or 1)
        except UserError as error:
            damaged = [str(error)]
        print("\n".join(damaged) if damaged else f"{path}: sound")
        if damaged:
            bad.append(f"{path} ({len(damaged)})")
    if bad:
        raise UserError(f"damage was found in {', '.join(bad)}; the lines above name it, pack or copy again")


if __name__ == "__main__":
    import tyro

    run(lambda: tyro.extras.subcommand_cli_from_dict({"verify": verify_files}, description=__doc__))

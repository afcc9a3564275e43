"""FFCV datasets (.beton), without the ffcv package: the format, and how it is read. The bytes are
described in densefeed/storage/FORMAT.md.

    python tools/beton.py verify FILE...      reads every byte that counts and names every damaged sample

Only stock field types are used, so `ffcv.loader.Loader` 1.0.2 opens our files; we open any file
whose first RGB image field holds JPEGs (or raw pixels) and whose first int field is the label. What
FFCV has no place for (class names, teacher, fingerprint, checksums) stands between the metadata and
the first page; the unused tail of the image field's 1,024 argument bytes says where. FFCV reads
neither.
"""

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

from densefeed import native
from densefeed.system.errors import UserError
from densefeed.system.files import name_errors
from densefeed.system.prefetch import ordered_map
from densefeed.system.progress import bar

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
# packed: 13 bytes
IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("ptr", "<u8")])
EXTENT = np.dtype([("ptr", "<u8"), ("size", "<u8")])
FLOAT, INT, RGB, BYTES, NDARRAY, JSON, TENSOR = range(7)
METADATA = {
    FLOAT: np.dtype("<f8"),
    INT: np.dtype("<i8"),
    RGB: IMAGE,
    BYTES: EXTENT,
    NDARRAY: np.dtype("<u8"),
    JSON: EXTENT,
    TENSOR: np.dtype("<u8"),
}
# types with one entry a sample in the allocation table
ALLOCATED = (RGB, BYTES, NDARRAY, JSON, TENSOR)
JPEG, RAW = 0, 1
VERSION = 2
PAGE = 2**23  # FFCV's default; a sample never crosses a page
GAP = 2**18  # bytes: a disk reads over them sooner than it seeks past them
ALIGN = 16  # arrays start aligned, so that readers need not copy bytes before they view them
NOTES = np.dtype([("mark", "S8"), ("at", "<u8"), ("size", "<u8"), ("crc", "<u4")])
# where NOTES stands in the image field's arguments; FFCV's own are shorter
NOTES_IN_ARGUMENTS = 512
NOTES_VERSION = 2
NOTES_LIMIT = 2**26  # bytes; 21k class names take 0.6 MB, so more is a damaged size
MARK = b"densfeed"
SOI = b"\xff\xd8"  # how every JPEG starts
# samples whose metadata and table entries are in memory at once: 3 and 8 MB with score maps
CHUNK = 2**16
# what files opened as one dataset must agree on
SHARED_NOTES = ("class_names", "teacher", "absent")


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
    """FFCV's record of a sample: the fields' records as a C struct (structs have alignment 1,
    numbers their own).
    """
    return np.dtype([(f"f{n}", METADATA[kind]) for n, kind in enumerate(types)], align=True)


def arrays_crc(arrays: Iterable[bytes]) -> int:
    """CRC-32 (zlib) over a sample's arrays in the order of the fields; with score maps, that row's
    `crc32` of the HDF5 store.
    """
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
    """One .beton, or several that are read as one: the samples of the first, then those of the
    second, ...

    Everything but the samples is copied into memory and checked when the file is opened; no memory
    map is kept, so a file that is cut or replaced while it is open ends in an error and never in a
    signal. Samples are read with `pread`.

    Attributes, N samples in all:
        labels: int64 `[N]`.
        heights, widths: int32 `[N]`, pixels.
        raw: bool `[N]`; raw pixels `[height, width, 3]` uint8 and no JPEG.
        images: Extents `[N]` of the stored images; `file` indexes `descriptors`.
        crcs: uint32 `[N]`, `arrays_crc` of each sample; None for a file that FFCV wrote, or without
            arrays.
        fields: the columns. notes: our JSON, of several files those of the first with
            `max_palette`, `min_window_side` and `left_out` over all.
        descriptors: open file descriptors, one a file, valid until `close`.

    Raises UserError if a file is no .beton, of another version, cut or damaged, has no image and
    int field, or does not fit the others. A file of ours has checksums over everything but the
    samples' images; one that FFCV wrote has none, so there only structure is checked: sizes,
    pointers, and who owns what they point at.
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
                raise UserError(
                    f"{other.path} has other fields than {first.path}; open them apart, or pack both alike"
                )
            for key in SHARED_NOTES:
                if other.notes.get(key) != first.notes.get(key):
                    raise UserError(
                        f"{other.path} has another {key.replace('_', ' ')} than {first.path}; open them apart, or pack both alike"
                    )
        self.fields, self.notes = (
            first.fields,
            {key: value for key, value in first.notes.items() if key != "crc32"},
        )
        for key, merge in (("max_palette", max), ("min_window_side", min), ("left_out", sum)):
            if any(key in front.notes for front in fronts):
                self.notes[key] = merge([front.notes.get(key, 0) for front in fronts])

    def _load(self, fronts: list[Front]) -> None:
        self._starts = np.cumsum([0, *(front.num_samples for front in fronts)])
        count = int(self._starts[-1])
        self.labels = np.empty(count, np.int64)
        self.heights, self.widths = np.empty(count, np.int32), np.empty(count, np.int32)
        self.raw = np.empty(count, bool)
        self.images = Extents(
            np.empty(count, np.int32), np.empty(count, np.int64), np.empty(count, np.int64)
        )
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
        """Fill the rows from the metadata and the samples' checksums; the fingerprint of the
        file.
        """
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
            if block[image]["mode"].max() > RAW or not (
                self.heights[here].min() and self.widths[here].min()
            ):
                raise UserError(
                    f"{front.path} holds images without a size or of unknown mode; pack or copy it again"
                )
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

        A writer finishes a sample before it begins the next, so the table is a row of entries per
        sample. Ours are in the order of the samples; FFCV's workers write theirs as they come.
        Either way each row says whose it is, and if all N rows name somebody and nobody is missing,
        each sample has its own: no sorting.
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
            if (
                (entries[:, :, 0] != owners[:, None]).any()
                or owners.min() < 0
                or owners.max() >= front.num_samples
            ):
                raise UserError(
                    f"{front.path}: its allocation table is damaged; pack or copy it again"
                )
            seen[owners] = True
            ordered = owners[0] == at and (np.diff(owners) == 1).all()
            here = (
                slice(rows.start + at, rows.start + at + len(block))
                if ordered
                else rows.start + owners
            )
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
                    sizes, columns[n] = (
                        np.take_along_axis(entries[:, :, 2], best[:, None], axis=1)[:, 0],
                        int(best[0]),
                    )
                self._check_extents(front, n, owners, wanted, sizes)
                if n == self._image:
                    self.images.size[here] = sizes
        if not seen.all():
            raise UserError(
                f"{front.path}: the allocation table does not know sample {int(seen.argmin())}; pack or copy it again"
            )
        if front.notes and crc != front.notes["crc32"]["table"]:
            raise UserError(
                f"{front.path} is damaged in its allocation table; pack or copy it again"
            )
        pixels = 3 * self.heights[rows].astype(np.int64) * self.widths[rows]
        if (self.raw[rows] & (self.images.size[rows] != pixels)).any():
            raise UserError(
                f"{front.path} holds raw images whose size in bytes is not 3 × height × width; pack it again"
            )

    def _grouped(self, front: Front, dtype: np.dtype) -> Iterator[tuple[int, np.ndarray]]:
        """The table in chunks of whole samples; sorted first where a foreign writer scattered the
        entries, from the first on.
        """
        for at, block in chunks(front, front.table, dtype, front.num_samples):
            owners = block["entries"][:, :, 0]
            if at == 0 and not front.notes and (owners != owners[:, :1]).any():
                whole = (
                    read(front, front.table, front.num_samples * dtype.itemsize)
                    .view("<i8")
                    .reshape(-1, 3)
                )
                ordered = whole[np.argsort(whole[:, 0], kind="stable")].reshape(
                    front.num_samples, -1
                )
                yield 0, ordered.view(dtype).reshape(-1)
                return
            yield at, block

    def _check_extents(
        self, front: Front, n: int, owners: np.ndarray, offsets: np.ndarray, sizes: np.ndarray
    ) -> None:
        pages = (
            front.metadata
            + front.num_samples * metadata_dtype([field.type for field in self.fields]).itemsize
        )
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
        """What the packer noted of the images; SHA-256 over the metadata of a file that FFCV wrote,
        over all of several.
        """
        return self._fingerprint

    def image(self, index: int) -> tuple[bytes, bool]:
        """The stored bytes of image `index`, and whether they are raw pixels (`[height, width, 3]`
        uint8) and no JPEG.
        """
        stored = bytearray(int(self.images.size[index]))
        self._read_into(index, [stored], int(self.images.offset[index]))
        if not self.raw[index] and stored[:2] != SOI:
            raise UserError(
                f"{self.where(index)} is damaged: it is no JPEG; pack or copy the file again"
            )
        return bytes(stored), bool(self.raw[index])

    def read_ahead(self, first: int, end: int) -> None:
        """Ask the system to read the samples `first` to `end` - 1 into its cache, images and
        arrays, in as few runs as they lie in.
        """
        for number in np.unique(self.images.file[first:end]).tolist():
            ids = first + np.flatnonzero(self.images.file[first:end] == number)
            starts = np.min(
                [self.images.offset[ids], *(offsets[ids] for offsets in self._offsets.values())],
                axis=0,
            )
            ids, starts = ids[np.argsort(starts)], np.sort(starts)
            stops = self.images.offset[ids] + self.images.size[ids]
            breaks = np.flatnonzero(starts[1:] - stops[:-1] > GAP) + 1
            for rows in np.split(np.arange(len(ids)), breaks):
                at = int(starts[rows[0]])
                os.posix_fadvise(
                    self.descriptors[number],
                    at,
                    int(stops[rows].max()) - at,
                    os.POSIX_FADV_WILLNEED,
                )

    def has(self, name: str) -> bool:
        """Whether there is an ndarray field of this name."""
        return any(self.fields[n].name == name for n in self._arrays)

    def field(self, name: str) -> Field:
        """The ndarray field of this name: its dtype and shape."""
        return self.fields[self._number(name)]

    def array_offsets(self, name: str, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """File descriptors (int32) and offsets (int64) of the ndarray field `name` of the samples
        `ids`, `[len(ids)]` each.
        """
        return np.array(self.descriptors, np.int32)[self.images.file[ids]], self._offsets[
            self._number(name)
        ][ids]

    def array(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Rows `ids` of the ndarray field `name`: `[len(ids), *shape]`, a copy; checked as `arrays`
        does.
        """
        return self.arrays(ids, [name])[name]

    def arrays(self, ids: np.ndarray, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Rows `ids` of the ndarray fields `names` (default: all), `{name: [len(ids), *shape]}`,
        copies.

        UserError if a sample's arrays do not match their checksum; all of them are read for that,
        where there is one.
        """
        wanted = self._arrays if names is None else [self._number(name) for name in names]
        numbers = wanted if self.crcs is None else self._arrays
        columns = {
            n: np.empty((len(ids), *self.fields[n].shape), self.fields[n].dtype) for n in numbers
        }
        views = {n: column.reshape(len(ids), -1).view(np.uint8) for n, column in columns.items()}
        for row, index in enumerate(ids.tolist()):
            for n in numbers:
                self._read_into(index, [views[n][row]], int(self._offsets[n][index]))
            if (
                self.crcs is not None
                and arrays_crc(views[n][row] for n in numbers) != self.crcs[index]
            ):
                raise UserError(
                    f"{self.where(index)}: its arrays are damaged; pack or copy the file again"
                )
        return {self.fields[n].name: columns[n] for n in wanted}

    def _number(self, name: str) -> int:
        for n in self._arrays:
            if self.fields[n].name == name:
                return n
        raise UserError(
            f"{self.paths[0]} has no ndarray field {name!r}; pack it with tools/pack_dataset.py"
        )

    def _read_into(self, index: int, buffers: list, offset: int) -> None:
        """Fill buffers from the file of sample `index`; UserError if it has become shorter."""
        if not self.descriptors:
            raise ValueError("the .beton is closed")
        number = int(self.images.file[index])
        with name_errors(self.paths[number]):
            got = os.preadv(self.descriptors[number], buffers, offset)
        if got != sum(len(buffer) for buffer in buffers):
            raise UserError(
                f"{self.where(index)} is gone: the file was cut or replaced while open; copy it again and rerun"
            )


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
        with name_errors(path):
            got = os.preadv(descriptor, [view], offset)
        if got == 0:
            raise UserError(f"{path} is cut or damaged; pack or copy it again")
        view, offset = view[got:], offset + got


def chunks(
    front: Front, offset: int, dtype: np.dtype, count: int
) -> Iterator[tuple[int, np.ndarray]]:
    """`count` records at `offset`: (number of the first, up to CHUNK of them); the same memory
    every time.
    """
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
        raise UserError(
            f"{path} is not an FFCV dataset of version {VERSION}; pack it with tools/pack_dataset.py"
        )
    raw = os.pread(descriptor, FIELD.itemsize * int(header["num_fields"]), HEADER.itemsize)
    if len(raw) != FIELD.itemsize * header["num_fields"]:
        raise UserError(f"{path} is cut in its header; pack or copy it again")
    described = np.frombuffer(raw, FIELD)
    notes = read_notes(path, descriptor, head + raw, int(header["table"]))
    fields = [parse_field(path, row) for row in described]
    for kind, what in ((RGB, "image"), (INT, "label")):
        if kind not in [field.type for field in fields]:
            raise UserError(f"{path} has no {what} field; pack it with tools/pack_dataset.py")
    count, table, start = (
        int(header["num_samples"]),
        int(header["table"]),
        HEADER.itemsize + len(raw),
    )
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
    """Our JSON, given header and descriptors, which its checksum covers too; empty if there is
    none. UserError if damaged.
    """
    damaged = UserError(f"{path} is damaged in its header; pack or copy it again")
    for at in range(HEADER.itemsize, len(head), FIELD.itemsize):
        place_at = notes_place(at)
        place = np.frombuffer(head, NOTES, 1, place_at)[0]
        if place["mark"] == MARK:
            break
        # FFCV leaves zeros here
        if head[at] == RGB and any(head[place_at : place_at + NOTES.itemsize]):
            raise damaged
    else:
        return {}
    notes_at, size = int(place["at"]), int(place["size"])
    if size > NOTES_LIMIT or notes_at + size > table:
        raise damaged
    text = os.pread(descriptor, size, notes_at)
    unsummed = (
        head[: place_at + NOTES.fields["crc"][1]] + bytes(4) + head[place_at + NOTES.itemsize :]
    )
    if zlib.crc32(text, zlib.crc32(unsummed)) != place["crc"]:
        try:  # before version 2 the mark stood there without a checksum
            earlier = (
                place["crc"] == 0
                and json.loads(text).get("densefeed", NOTES_VERSION) < NOTES_VERSION
            )
        except (ValueError, AttributeError, TypeError):
            earlier = False
        if earlier:
            raise UserError(
                f"{path} was packed by an earlier version of this program; pack it again"
            )
        raise damaged
    notes = json.loads(text)
    if notes["densefeed"] != NOTES_VERSION:
        raise UserError(
            f"{path} was packed by another version of this program ({notes['densefeed']}); pack it again"
        )
    return notes


def notes_place(descriptor_at: int) -> int:
    """Where NOTES stands in the file, given where the descriptor that carries it does."""
    return descriptor_at + FIELD.fields["arguments"][1] + NOTES_IN_ARGUMENTS


def parse_field(path: Path, row: np.void) -> Field:
    """A field from its descriptor; UserError for a type whose record's size is unknown, and for a
    damaged ndarray.
    """
    kind, name, raw = (
        int(row["type"]),
        row["name"].decode(errors="replace"),
        row["arguments"].tobytes(),
    )
    if kind not in METADATA:
        raise UserError(
            f"{path}: field {name!r} has FFCV's type {kind}, which this program does not read"
        )
    if kind != NDARRAY:
        return Field(kind, name)
    shape = tuple(int(n) for n in np.frombuffer(raw[:256], "<u8") if n)
    length = int(np.frombuffer(raw[256:264], "<u8")[0])
    try:
        ((_, dtype),) = json.loads(raw[264 : 264 + length])
        if np.dtype(dtype).hasobject:
            raise TypeError
    except (ValueError, TypeError):
        raise UserError(
            f"{path}: the dtype of field {name!r} is damaged or no plain number; pack or copy it again"
        ) from None
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


# ----------------------------------------------------------------------- verifying


def verify(path: Path, threads: int) -> list[str]:
    """A sentence for every damaged sample of a .beton: arrays against their checksums, images
    decoded whole.

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
        # a stranger's CMYK image is no damage: the loaders let Pillow decode it
        except native.JpegError as error:
            if error.status != native.UNSUPPORTED:
                return f"{beton.where(index)} is damaged ({error}); pack or copy the file again"
        return None

    with ThreadPoolExecutor(threads) as pool:
        found = ordered_map(check, range(len(beton)), pool, 16 * threads)
        damaged = [said for said in bar(found, f"verify {path.name}", len(beton)) if said]
    beton.close()
    return damaged


def verify_files(files: tuple[Path, ...], /) -> None:
    """Read everything, decode every image, and name every damaged sample; UserError, after all
    files, if there is one.
    """
    bad = []
    if not files:
        raise UserError("no .beton file was named; name one or several")
    for path in files:
        try:
            damaged = verify(path, os.cpu_count() or 1)
        except UserError as error:
            damaged = [str(error)]
        print("\n".join(damaged) if damaged else f"{path}: sound")
        if damaged:
            bad.append(f"{path} ({len(damaged)})")
    if bad:
        raise UserError(
            f"damage was found in {', '.join(bad)}; the lines above name it, pack or copy again"
        )

"""Read FFCV datasets (.beton) without the ffcv package. The bytes are described in FORMAT.md.

    densefeed beton verify FILE...      decode all images and list the damaged ones

Only stock field types are used, so `ffcv.loader.Loader` 1.0.2 opens files of DenseFeed, except
those with images stored as planes, which have another version number. Third-party files open too,
if the first RGB image field holds JPEGs or raw pixels and the first int field is the label.
Metadata that FFCV has no place for (class names, teacher, fingerprint, checksums) is stored as
notes between FFCV's metadata and the first page. The unused tail of the image field's 1,024
argument bytes holds the position of the notes. FFCV reads neither.
"""

import hashlib
import json
import math
import os
import re
import sys
import time
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from densefeed import native
from densefeed.native import MAX_PIXELS
from densefeed.storage.dataset_names import MOST_CLASSES
from densefeed.storage.image_shards import check_complete, list_names
from densefeed.storage.images import Images, MaxPixels, limit_pixels, verify_images
from densefeed.storage.row_codecs import Absent
from densefeed.storage.score_maps import ScoreMaps, find_faults
from densefeed.system.devices import CORES
from densefeed.system.errors import UserError
from densefeed.system.file_kinds import name_kind
from densefeed.system.files import name_errors
from densefeed.system.json_files import parse_json
from densefeed.system.object_url import check_local
from densefeed.system.options import Bounds
from densefeed.system.prefetch import ordered_map
from densefeed.system.progress import bar
from densefeed.system.terminal import print

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
# Damaged images that a terminal shows.
LISTED = 50
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
# Bytes. A disk reads over a gap of this size faster than it seeks past it.
GAP = 2**18
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
# Samples whose metadata and table entries are in memory at once: 3 and 8 MB with score maps.
CHUNK = 2**16
# Notes that must be equal in files that are opened as one dataset.
SHARED_NOTES = ("class_names", "teacher", "absent")
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


class Extents(NamedTuple):
    """Positions of bytes: index of the file, offset in it, size in bytes; three arrays `[N]`."""

    file: np.ndarray  # int32
    offset: np.ndarray  # int64
    size: np.ndarray  # int64


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


# ----------------------------------------------------------------------- reading


def is_beton(path: Path) -> bool:
    """Whether a path names .beton files: a file, or a pattern of files. One may be missing.

    FFCV's files may have any ending but those of shards.
    """
    is_other = path.is_file() and path.suffix not in (".tar", ".parquet")
    named = path.suffix == ".beton" or is_pattern(path) or is_other
    return named and not path.is_dir()


def is_pattern(path: Path) -> bool:
    return any(sign in path.name for sign in "*?[")


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


def open_matching(path: Path) -> "Beton":
    """Open a file, or all that match a pattern such as `train-*.beton`, in their names' order.

    UserError if files are missing of a number that their names state.
    """
    check_local(path)
    if not is_pattern(path):
        return Beton(path)
    paths = sorted(path.parent.glob(path.name))
    if not paths:
        raise UserError(f"{path} matches no file; check it, or pack files with densefeed pack")
    check_complete(path.parent, [each.name for each in paths], list_names(path.parent)[0])
    return Beton(paths)


class Beton:
    """Open one .beton, or several as one: the samples of the first, then of the second, ...

    Everything but the samples is copied into memory and checked when the file is opened. No memory
    map is kept, so a file that is truncated or replaced while it is open raises an error and never
    SIGBUS. Samples are read with `pread`. Messages name the files by `names` if they are given: the
    URLs of local copies.

    Attributes, N samples in all:
        labels: int64 `[N]`.
        heights, widths: int32 `[N]`, pixels.
        modes: uint8 `[N]`, how an image is stored: JPEG, RAW (uint8 `[height, width, 3]`), PLANES.
        images: Extents `[N]` of the stored images; `file` indexes `descriptors`.
        crcs: uint32 `[N]`, `arrays_crc` of each sample; None for a file that FFCV wrote, or without
            arrays.
        fields: the columns.
        notes: the JSON of the packer; for several files that of the first, with `max_palette`,
            `min_window_side` and `left_out` over all.
        fingerprint: of the images, from the notes. For a file that FFCV wrote it is SHA-256 over
            the metadata, for several files SHA-256 over their fingerprints.
        descriptors: open file descriptors, one per file, valid until `close`.

    Raises UserError if a file is not a .beton, of another version, truncated or damaged, has no
    image or no int field, or does not match the other files. Files of DenseFeed have checksums over
    everything but the images. Files that FFCV wrote have none, so only their structure is checked:
    sizes, pointers, and the sample of each allocation.
    """

    def __init__(
        self, paths: Path | str | Sequence[Path | str], names: Sequence[str] | None = None
    ) -> None:
        self.paths = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
        if not self.paths:
            raise UserError("no .beton file was named; name one or several")
        self.descriptors = []
        # The finalizer holds the list and not this object, which it would otherwise keep alive. So
        # the list is emptied in place and never replaced.
        self._close = weakref.finalize(self, close_all, self.descriptors)
        try:
            fronts = [
                self._open(path, names[number] if names else path)
                for number, path in enumerate(self.paths)
            ]
            self.paths = [front.path for front in fronts]
            self._merge_notes(fronts)
            self._load(fronts)
        # The files that are open already are closed, whatever went wrong.
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, name: Path | str) -> Front:
        check_local(path)
        if not path.exists():
            raise UserError(f"{path}: there is no such file; make it with densefeed pack")
        # To open a named pipe would wait for its writer.
        if not path.is_file():
            raise UserError(f"{path} is not a file; name a .beton, made with densefeed pack")
        # In the list before the file is read, so an error closes it too.
        self.descriptors.append(os.open(path, os.O_RDONLY))
        return read_front(name, self.descriptors[-1])

    def _merge_notes(self, fronts: list[Front]) -> None:
        """Set `fields` and `notes`; UserError unless the files can be one dataset."""
        first, *others = fronts
        for other in others:
            differ = ["other fields"] if other.fields != first.fields else []
            for key in SHARED_NOTES:
                if other.notes.get(key) != first.notes.get(key):
                    differ.append(f"another {key.replace('_', ' ')}")
            if differ:
                raise UserError(
                    f"{other.path} has {differ[0]} than {first.path}; "
                    "open them separately, or pack both alike"
                )
        self.fields, self.notes = first.fields, dict(first.notes)
        # The checksums of one file, which were checked when it was read.
        self.notes.pop("crc32", None)
        # Targets take memory for the largest palette, and samples of a token for the smallest side
        # of a Window.
        for key, merge in (("max_palette", max), ("min_window_side", min), ("left_out", sum)):
            if any(key in front.notes for front in fronts):
                self.notes[key] = merge([front.notes.get(key, 0) for front in fronts])

    def _load(self, fronts: list[Front]) -> None:
        self._starts = np.cumsum([0, *(front.num_samples for front in fronts)])
        count = int(self._starts[-1])
        self.labels, self.modes = np.empty(count, np.int64), np.empty(count, np.uint8)
        self.heights, self.widths = np.empty((2, count), np.int32)
        self.images = Extents(*(np.empty(count, dtype) for dtype in (np.int32, np.int64, np.int64)))
        types = [field.type for field in self.fields]
        self._image, self._label = types.index(RGB), types.index(INT)
        # By the numbers of the ndarray fields.
        self._offsets = {
            n: np.empty(count, np.int64) for n, kind in enumerate(types) if kind == NDARRAY
        }
        # Either every sample has a checksum or none: `arrays` treats all files alike.
        summed = self._offsets and all(front.notes for front in fronts)
        self.crcs = np.empty(count, np.uint32) if summed else None
        fingerprints = []
        for number, (front, start) in enumerate(zip(fronts, self._starts.tolist(), strict=False)):
            rows = slice(start, start + front.num_samples)
            self.images.file[rows] = number
            fingerprints.append(self._load_metadata(front, rows))
            self._load_table(front, rows)
        self.fingerprint = fingerprints[0]
        if len(fronts) > 1:
            self.fingerprint = hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()

    def _load_metadata(self, front: Front, rows: slice) -> str:
        """Load `rows` of the metadata and the samples' checksums; return the file's fingerprint."""
        dtype = metadata_dtype(self.fields)
        crc, digest = 0, hashlib.sha256()
        for at, block in chunks(front, front.metadata, dtype, front.num_samples):
            here = slice(rows.start + at, rows.start + at + len(block))
            if front.notes:
                crc = zlib.crc32(block, crc)
            else:
                # A file that FFCV wrote has no fingerprint. Its metadata stands for the images.
                digest.update(block)
            image = block[f"f{self._image}"]
            self.labels[here] = block[f"f{self._label}"]
            self.heights[here], self.widths[here] = image["height"], image["width"]
            self.modes[here], self.images.offset[here] = image["mode"], image["ptr"]
            for n, offsets in self._offsets.items():
                offsets[here] = block[f"f{n}"]
            known = np.isin(image["mode"], front.modes).all()
            if not (known and image["height"].min() and image["width"].min()):
                raise UserError(
                    f"{front.path} holds images without a size or of unknown mode; "
                    "pack or copy it again"
                )
        if not front.notes:
            return digest.hexdigest()
        sums = front.notes["crc32"]
        if crc != sums["metadata"]:
            raise UserError(f"{front.path}: its metadata is damaged; pack or copy it again")
        if self.crcs is not None:
            read_into(front, self.crcs[rows].view(np.uint8), sums["samples_at"])
            if zlib.crc32(self.crcs[rows]) != sums["samples"]:
                raise UserError(f"{front.path}: its checksums are damaged; pack or copy it again")
        return front.notes["fingerprint"]

    def _load_table(self, front: Front, rows: slice) -> None:
        """Load the image sizes of `rows` from the allocation table and check all pointers.

        A writer finishes a sample before it begins the next, so the table has a group of
        consecutive entries per sample. DenseFeed's groups are in the order of the samples, those of
        FFCV's workers are not. Each entry contains its sample. If all N groups have a valid sample
        and no sample is missing, the groups are a permutation of the samples, so no sorting is
        needed.
        """
        width = sum(field.type in ALLOCATED for field in self.fields)
        # FFCV's u64 as signed numbers, so that differences do not wrap. A damaged number above 2^63
        # becomes negative, which the checks below refuse.
        dtype = np.dtype([("entries", "<i8", (width, 3))])
        seen, crc = np.zeros(front.num_samples, bool), 0
        pointers = {self._image: self.images.offset} | self._offsets
        columns = dict.fromkeys(pointers, 0)
        for at, block in chunks(front, front.table, dtype, front.num_samples):
            entries = block["entries"]
            if front.notes:
                crc = zlib.crc32(block, crc)
            owners = entries[:, 0, 0]
            mixed = (entries[:, :, 0] != owners[:, None]).any()
            if mixed or owners.min() < 0 or owners.max() >= front.num_samples:
                raise refuse_table(front)
            seen[owners] = True
            here = rows.start + owners
            # In the order of the samples, as DenseFeed writes them, a slice replaces the list of
            # ids.
            if owners[0] == at and (np.diff(owners) == 1).all():
                here = slice(rows.start + at, rows.start + at + len(block))
            for n, pointer in pointers.items():
                offsets = pointer[here]
                sizes, columns[n] = match_entries(front, entries, offsets, columns[n])
                self._check_extents(front, n, owners, offsets, sizes)
                if n == self._image:
                    self.images.size[here] = sizes
        if not seen.all() or (front.notes and crc != front.notes["crc32"]["table"]):
            raise refuse_table(front)
        # Width and height have 16 bits, and 3 * 65,535^2 overflows int32.
        pixels = 3 * self.heights[rows].astype(np.int64) * self.widths[rows]
        if ((self.modes[rows] == RAW) & (self.images.size[rows] != pixels)).any():
            raise UserError(
                f"{front.path} holds raw images whose size in bytes is not 3 × height × width; "
                "pack it again"
            )

    def _check_extents(
        self, front: Front, n: int, owners: np.ndarray, offsets: np.ndarray, sizes: np.ndarray
    ) -> None:
        pages = front.metadata + front.num_samples * metadata_dtype(self.fields).itemsize
        # The difference cannot overflow; the sum of two damaged numbers can.
        wrong = (offsets < pages) | (sizes <= 0) | (offsets > front.table - sizes)
        if n != self._image:
            wrong |= sizes != self.fields[n].nbytes
        if wrong.any():
            field, index = self.fields[n].name, int(owners[wrong.argmax()])
            raise UserError(
                f"{front.path}: field {field!r} of sample {index} lies outside the pages or has a "
                "wrong size; pack or copy it again"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
        self._close()

    def where(self, index: int) -> str:
        """Name of sample `index` for error messages: its file, and its number there."""
        number = int(self.images.file[index])
        return f"{self.paths[number]} image {index - int(self._starts[number])}"

    @property
    def has_maps(self) -> bool:
        """Whether the samples have score maps: third-party files may have such fields only."""
        return "absent" in self.notes and any(field.name == "map" for field in self.fields)

    def check_map(self, index: int) -> None:
        """Raise UserError if the arrays of sample `index`, or values of its score map, are bad."""
        arrays = self.arrays(np.array([index]))
        if not self.has_maps:
            return
        both = arrays["map"]
        maps = ScoreMaps(
            both[:, 0].view("<f2"),
            both[:, 1].view("<u2"),
            arrays["lse"].view("<f2"),
            arrays["window"],
        )
        classes, palette = len(self.notes["class_names"]), self.notes["max_palette"]
        for fault, bad in find_faults(maps, classes, palette).items():
            if bad.any():
                raise UserError(
                    f"{self.where(index)}: its score map holds {fault}; "
                    "label the images again and pack them"
                )

    def image(self, index: int) -> tuple[bytes, int]:
        """Return the stored bytes of image `index` and its mode.

        Raises UserError if planes do not match their checksum, or if a JPEG does not begin as one:
        it has no other check before it is decoded.
        """
        stored, mode = bytearray(int(self.images.size[index])), int(self.modes[index])
        self._read_into(index, stored, self.images.offset[index])
        reason = ""
        if mode == JPEG and stored[:2] != SOI:
            reason = "it is not a JPEG"
        if mode == PLANES and not match_planes(memoryview(stored)):
            reason = "its planes do not match their checksum"
        if reason:
            raise UserError(
                f"{self.where(index)} is damaged: {reason}; pack or copy the file again"
            )
        return bytes(stored), mode

    def middle(self, index: int, most: int) -> bytes:
        """Return up to `most` bytes from the middle of image `index` as it is stored, unchecked."""
        size = int(self.images.size[index])
        stored = bytearray(min(size, most))
        self._read_into(index, stored, self.images.offset[index] + (size - len(stored)) // 2)
        return bytes(stored)

    def pixels(self, index: int, stored: bytes) -> np.ndarray:
        """Decode image `index`, which is not a JPEG, from its bytes: uint8 `[H, W, 3]`.

        Raises native.JpegError if they are damaged.
        """
        extent = int(self.heights[index]), int(self.widths[index])
        return native.decode(stored, *extent, int(self.modes[index]))

    def extents(self, rows: slice = slice(None)) -> Extents:
        """Return the bytes from each sample's first array, or its image, to the end of the last.

        A writer stores the fields of a sample after each other, so little else lies between.
        """
        starts = self.images.offset[rows].copy()
        ends = starts + self.images.size[rows]
        for n, offsets in self._offsets.items():
            np.minimum(starts, offsets[rows], out=starts)
            np.maximum(ends, offsets[rows] + self.fields[n].nbytes, out=ends)
        return Extents(self.images.file[rows], starts, ends - starts)

    def read_ahead(self, first: int, end: int) -> None:
        """Ask the system to read the samples `first` to `end` - 1 into its page cache.

        Images and arrays are requested in as few contiguous ranges as they lie in.
        """
        # macOS has no such hint; there the threads wait for each read.
        if not hasattr(os, "posix_fadvise"):
            return
        extents = self.extents(slice(first, end))
        for number in np.unique(extents.file).tolist():
            starts, sizes = (column[extents.file == number] for column in extents[1:])
            # In the order of the file, so that neighbors become one range.
            order = np.argsort(starts)
            starts, stops = starts[order], (starts + sizes)[order]
            breaks = np.flatnonzero(starts[1:] - stops[:-1] > GAP) + 1
            for rows in np.split(np.arange(len(starts)), breaks):
                at = int(starts[rows[0]])
                size = int(stops[rows].max()) - at
                os.posix_fadvise(self.descriptors[number], at, size, os.POSIX_FADV_WILLNEED)

    def field(self, name: str) -> Field:
        """Return the ndarray field of this name: its dtype and shape."""
        return self.fields[self._number(name)]

    def offsets(self, name: str) -> np.ndarray:
        """Return the offsets of an ndarray field of all samples in their files, int64."""
        return self._offsets[self._number(name)]

    def open_files(self, ids: np.ndarray) -> np.ndarray:
        """Return the file descriptors of samples, int32 `[N]`."""
        return np.array(self.descriptors, np.int32)[self.images.file[ids]]

    def arrays(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Copy the rows `ids` of all ndarray fields, `{name: [len(ids), *shape]}`.

        Raises UserError if a sample's arrays do not match their checksum.
        """
        fields = {n: self.fields[n] for n in self._offsets}
        columns = [np.empty((len(ids), *field.shape), field.dtype) for field in fields.values()]
        # Checksums are over the stored bytes, whatever the dtype.
        views = [column.reshape(len(ids), -1).view(np.uint8) for column in columns]
        for row, index in enumerate(ids.tolist()):
            for view, offsets in zip(views, self._offsets.values(), strict=True):
                self._read_into(index, view[row], offsets[index])
            if self.crcs is None:
                continue
            if arrays_crc(view[row] for view in views) != self.crcs[index]:
                raise UserError(
                    f"{self.where(index)}: its arrays are damaged; pack or copy the file again"
                )
        return {field.name: array for field, array in zip(fields.values(), columns, strict=True)}

    def _number(self, name: str) -> int:
        for n in self._offsets:
            if self.fields[n].name == name:
                return n
        raise UserError(
            f"{self.paths[0]} has no ndarray field {name!r}; pack it with densefeed pack"
        )

    def _read_into(self, index: int, buffer: bytearray | np.ndarray, offset: int) -> None:
        """Fill a buffer from the file of sample `index`; UserError if the file became shorter."""
        if not self.descriptors:
            # The number of a closed descriptor may belong to another file by now.
            raise ValueError("the .beton is closed")
        number = int(self.images.file[index])
        with name_errors(self.paths[number]):
            got = os.preadv(self.descriptors[number], [buffer], int(offset))
        # No loop as in `read_into`: a sample fits in a page (8 MiB by default), so only the end of
        # the file gives fewer bytes.
        if got != len(buffer):
            raise UserError(
                f"{self.where(index)} is gone: the file was truncated or replaced while open; "
                "copy it again and rerun"
            )


def close_all(descriptors: list[int]) -> None:
    """Close all file descriptors and clear the list."""
    while descriptors:
        os.close(descriptors.pop())


def read_into(front: Front, buffer: np.ndarray, offset: int) -> None:
    """Fill an array of uint8 from the file at `offset`; UserError if the file ends before."""
    # One call reads at most 2 GiB.
    while len(buffer):
        with name_errors(front.path):
            got = os.preadv(front.descriptor, [buffer], offset)
        if got == 0:
            raise UserError(f"{front.path} is truncated or corrupt; pack or copy it again")
        buffer, offset = buffer[got:], offset + got


def chunks(
    front: Front, offset: int, dtype: np.dtype, count: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield `count` records at `offset` in chunks: index of the first, up to CHUNK records.

    Every chunk is in the same memory.
    """
    # One buffer for all chunks: the memory of opening a file does not grow with its table.
    buffer = np.empty(min(count, CHUNK), dtype)
    for at in range(0, count, CHUNK):
        block = buffer[: count - at]
        read_into(front, block.view(np.uint8), offset + at * dtype.itemsize)
        yield at, block


def match_planes(stored: memoryview) -> bool:
    """Return whether an image in PLANES matches its checksum."""
    at = PLANES_HEADER - 4
    crc = zlib.crc32(stored[PLANES_HEADER:], zlib.crc32(stored[:at]))
    return crc == int.from_bytes(stored[at:PLANES_HEADER], "little")


def match_entries(
    front: Front, entries: np.ndarray, offsets: np.ndarray, column: int
) -> tuple[np.ndarray, int]:
    """Return the sizes of the entries with pointers `offsets`, `[N]`, and the first one's column.

    `entries` is `[N, entries per sample, (sample, pointer, size)]`; `column` is tried first.
    """
    if (entries[:, column, 1] == offsets).all():
        return entries[:, column, 2], column
    # Another writer's order of fields.
    matches = entries[:, :, 1] == offsets[:, None]
    if not matches.any(axis=1).all():
        raise refuse_table(front)
    # An empty byte string has the pointer of the part after it, so the largest entry is taken.
    best = np.where(matches, entries[:, :, 2], -1).argmax(axis=1)
    return entries[np.arange(len(entries)), best, 2], int(best[0])


def refuse_table(front: Front) -> UserError:
    """Return the error for an allocation table without a group of entries for each sample."""
    return UserError(
        f"{front.path}: its allocation table is damaged or in no writer's order; pack it again"
    )


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


# ----------------------------------------------------------------------- verification


def verify(path: Path, threads: int) -> list[str]:
    """Check labels, arrays against their checksums, and decode all images.

    Returns a sentence per damaged sample, and one for labels that are not classes.

    Raises UserError as `Beton` if the file cannot be opened.
    """
    faults = []
    with closing(Beton(path)) as beton, ThreadPoolExecutor(threads) as pool:
        try:
            name_classes(path, beton.notes, beton.labels)
        except UserError as error:
            faults.append(str(error))
        found = ordered_map(partial(find_damage, beton), range(len(beton)), pool, 16 * threads)
        # If it is interrupted, samples that no thread has begun are not checked any more.
        with closing(found):
            faults += filter(None, bar(found, f"verify {path.name}", len(beton)))
    return faults


def find_damage(beton: Beton, index: int) -> str | None:
    """Check a sample as `verify` does; return a sentence if it is damaged."""
    try:
        beton.check_map(index)
        stored, mode = beton.image(index)
        native.check(stored, int(beton.heights[index]), int(beton.widths[index]), mode)
    except UserError as error:
        return str(error)
    # A CMYK image of a third-party file is not damaged: the loaders decode it with Pillow.
    except native.JpegError as error:
        if error.status != native.UNSUPPORTED:
            return f"{beton.where(index)} is damaged ({error}); pack or copy the file again"
    return None


def verify_files(
    files: tuple[Path, ...],
    /,
    dataset: str = "",
    split: str = "train",
    max_pixels: MaxPixels = MAX_PIXELS,
) -> None:
    """Read all checked bytes, decode every image, and list every damaged one.

    If any is damaged, the exit code is 2, after the last file.

    Args:
        files: .beton files, and folders of images as densefeed pack reads them.
        dataset: name of the dataset in a folder, from the list in the --help of packing, if it is
            not a folder of class folders.
        split: split of the dataset in a folder.
    """
    Bounds(1).check("max_pixels", max_pixels)
    limit_pixels(max_pixels)
    bad = []
    if not files:
        raise UserError("no .beton file was named, and no folder of images; name one or several")
    for path in files:
        check_local(path)
    # All at once: the first may take minutes, and the name of the second may be wrong.
    folders = {path: Images(path, dataset, split) for path in files if path.is_dir()}
    for images in folders.values():
        images.describe_split()
    if (dataset or split != "train") and not folders:
        raise UserError("--dataset and --split are of folders of images; remove them")
    for path in files:
        images = folders.get(path)
        try:
            damaged = verify_folder(path, images) if images else verify(path, CORES)
        except UserError as error:
            damaged = [str(error)]
        print_list(damaged or [f"{path}: no faults"])
        if damaged:
            bad.append(f"{path} ({len(damaged):,})")
    if bad:
        raise UserError(
            f"damage was found in {', '.join(bad)}; it is listed above: replace or remove images, "
            "pack or copy .beton files again"
        )


def verify_folder(path: Path, images: Images) -> list[str]:
    """Decode all images of a folder, and print the speed and what libjpeg warns of.

    Returns a sentence per damaged image.
    """
    began = time.perf_counter()
    damaged, warned = verify_images(images, path.name, CORES)
    rate = len(images) / (time.perf_counter() - began)
    print(f"{path}: {len(images):,} images, {rate:,.0f} images/s on {CORES} threads")
    if warned:
        print_list(warned)
        print(
            f"{path}: libjpeg warns of {len(warned):,} images; they are read as they are, but "
            "may be damaged: compare them with their source"
        )
    return damaged


def print_list(lines: list[str]) -> None:
    """Print all lines to a file or pipe, and LISTED of them on a terminal."""
    shown = lines[:LISTED] if sys.stdout.isatty() else lines
    for line in shown:
        print(line)
    if len(shown) < len(lines):
        print(f"and {len(lines) - len(shown):,} more; redirect the output to a file to list all")

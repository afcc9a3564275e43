"""Read FFCV datasets (.beton) without the ffcv package. beton_format.py has their format.

Only stock field types are used, so `ffcv.loader.Loader` 1.0.2 opens files of DenseFeed, except
those with images stored as planes, which have another version number. Third-party files open too,
if the first RGB image field holds JPEGs or raw pixels and the first int field is the label.
"""

import hashlib
import os
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from densefeed import native
from densefeed.storage.beton_format import (
    ALLOCATED,
    INT,
    JPEG,
    NDARRAY,
    PLANES,
    PLANES_HEADER,
    RAW,
    RGB,
    SOI,
    Field,
    Front,
    arrays_crc,
    metadata_dtype,
    read_front,
)
from densefeed.storage.image_shards import check_complete, list_names
from densefeed.storage.indexed_jpeg import find_index_damage
from densefeed.storage.score_maps import ScoreMaps, find_faults
from densefeed.system.errors import UserError
from densefeed.system.files import name_errors
from densefeed.system.object_url import check_local

# Bytes. A disk reads over a gap of this size faster than it seeks past it.
GAP = 2**18
# Samples whose metadata and table entries are in memory at once: 3 and 8 MB with score maps.
CHUNK = 2**16
# Notes that must be equal in files that are opened as one dataset.
SHARED_NOTES = ("class_names", "teacher", "absent")


class Extents(NamedTuple):
    """Positions of bytes: index of the file, offset in it, size in bytes; three arrays `[N]`."""

    file: np.ndarray  # int32
    offset: np.ndarray  # int64
    size: np.ndarray  # int64


def is_beton(path: Path) -> bool:
    """Whether a path names .beton files: a file, or a pattern of files. One may be missing.

    FFCV's files may have any ending but those of shards.
    """
    is_other = path.is_file() and path.suffix not in (".tar", ".parquet")
    named = path.suffix == ".beton" or is_pattern(path) or is_other
    return named and not path.is_dir()


def is_pattern(path: Path) -> bool:
    return any(sign in path.name for sign in "*?[")


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

        Raises UserError if planes or an indexed JPEG do not match their checksums, or if a JPEG
        does not begin as one: without an index it has no other check before it is decoded.
        """
        stored, mode = bytearray(int(self.images.size[index])), int(self.modes[index])
        self._read_into(index, stored, self.images.offset[index])
        reason = ""
        if mode == JPEG:
            reason = find_index_damage(stored) if stored[:2] == SOI else "it is not a JPEG"
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

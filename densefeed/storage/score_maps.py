"""Store the score maps of a dataset in one HDF5 file, one row per image in dataset order.

    densefeed score-maps verify maps.h5
    densefeed score-maps convert maps.h5 --form compact --out small.h5

The bytes are described in FORMAT.md. HDF5 provides the layout, the names and the types. Every
dataset is contiguous and allocated when the file is created. Rows are then written with `pwrite`
and read with `pread`, so no HDF5 metadata changes while a labeling runs, and a killed run leaves a
file that opens.
"""

import io
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from densefeed.storage.dataset_names import MOST_NAMES, same_images
from densefeed.storage.geometry import are_windows
from densefeed.storage.row_codecs import FormError, ScoreMaps, code_levels, row_sizes, unpack
from densefeed.storage.store_file import (
    Arrays,
    StoreFile,
    StoreHeader,
    Types,
    count_undone,
    dataset_types,
    find_runs,
    row_types,
)
from densefeed.storage.store_folder import open_rows
from densefeed.system.errors import UserError
from densefeed.system.files import (
    check_absent,
    check_regular,
    create_part,
    drop_cache,
    name_errors,
    name_once,
    open_locked,
    remove_orphans,
    reserve_space,
    sync_folder,
    write_at,
)
from densefeed.system.options import check_type
from densefeed.system.progress import bar

# Bytes of the rows that are checked at once.
CHUNK_BYTES = 2**26


def row_crcs(parts: Iterable[Iterable[np.ndarray]]) -> np.ndarray:
    """Return the CRC-32 of each row over the bytes of its parts in order; uint32 `[N]`.

    `parts` holds the rows of each part: ScoreMaps (logit, cls, lse, window) for raw rows, or the
    packed rows and the windows.
    """
    crcs = []
    for row in zip(*parts, strict=True):
        crc = 0
        for part in row:
            # zlib takes contiguous memory only.
            crc = zlib.crc32(np.ascontiguousarray(part).data, crc)
        crcs.append(crc)
    return np.array(crcs, np.uint32)


def names_crc(label_N: np.ndarray, path_N: np.ndarray) -> np.uint32:
    """Return the CRC-32 over the bytes of the datasets `label` and `path`, in this order."""
    return np.uint32(zlib.crc32(path_N.tobytes(), zlib.crc32(np.asarray(label_N, "<i8").tobytes())))


def find_non_finite(half_NM: np.ndarray) -> np.ndarray:
    """Mark the rows of float16 that hold an infinity or NaN, bool `[N]`.

    The bits are compared, which is faster than `isfinite`.
    """
    return (half_NM.view(np.uint16) & 0x7FFF).max(1) >= 0x7C00


def find_valid_windows(window_N4: np.ndarray) -> np.ndarray:
    """Mark valid Windows, bool `[N]`, without NumPy's warnings of infinities and NaN."""
    with np.errstate(all="ignore"):
        return are_windows(window_N4)


def find_duplicate_classes(cls_NSSk: np.ndarray) -> np.ndarray:
    """Mark the rows that name a class twice in one cell, bool `[N]`."""
    N, k = len(cls_NSSk), cls_NSSk.shape[3]
    # Pairs are faster for few classes; the number of pairs grows with k squared.
    if k > 16:
        ordered = np.sort(cls_NSSk, axis=3)
        return (ordered[..., 1:] == ordered[..., :-1]).reshape(N, -1).any(1)
    ranks = [np.ascontiguousarray(cls_NSSk[..., rank]).reshape(N, -1) for rank in range(k)]
    duplicates = ((one == other).any(1) for one, other in combinations(ranks, 2))
    return sum(duplicates, np.zeros(N, bool))


def palette_sizes(cls: np.ndarray) -> np.ndarray:
    """Return the number of distinct classes that each row names; uint16 `[N]`."""
    flat = np.sort(cls.reshape(len(cls), -1), axis=1)
    return (1 + (flat[:, 1:] != flat[:, :-1]).sum(axis=1)).astype(np.uint16)


def find_faults(maps: ScoreMaps, num_classes: int, palette: np.ndarray) -> dict[str, np.ndarray]:
    """Return the faults that no teacher can produce, and the rows of `maps` that hold each.

    `palette` is the size of each row's palette, `[N]` or one for all. Returns bool `[N]` by the
    name of the fault. `map_check` in native/maps.c checks the same in the loaders.
    """
    logit, cls, lse, window = (part.reshape(len(part), -1) for part in maps)
    known = cls.max(1) < num_classes
    return {
        "a logit that is not finite": find_non_finite(logit),
        "a logsumexp that is not finite": find_non_finite(lse),
        "a Window that is not part of the image": ~find_valid_windows(window),
        f"class {cls.max()} of {num_classes}": ~known,
        "a class twice in one cell": find_duplicate_classes(maps.cls),
        "more classes than its palette size": known & (palette_sizes(cls) > palette),
    }


# A shard must be removed before it is labeled or fetched again.
FOLDER_REMEDY = "`densefeed score-maps verify` says what to do"


class PackedRows(NamedTuple):
    """What is needed to read the rows of a packed store; copies in memory."""

    start: np.ndarray  # int64 [N], offset of each row in `rows`
    size: np.ndarray  # int64 [N], bytes of each row
    levels: np.ndarray | None  # float32 [256], only in a compact store


class ScoreMapStore:
    """A finished store: a file, or a folder of shards with a manifest.

    `labels` int64, `crcs` uint32 and `palette` uint16 `[N]` (number of distinct classes that each
    row names) are copies in memory. `packed` is None in a raw store. `error` is the error of a
    compact store against the store it was converted from, else None. `min_window_side` is the
    smallest side of a valid Window. After `close` nothing more can be read.

    Raises UserError if the file is missing, truncated, of another version or not finished, or if a
    column holds impossible values; `rows` raises it for a damaged row.
    """

    def __init__(self, path: Path | str) -> None:
        check_type("path", str | os.PathLike, path)
        self.path = Path(path)
        self._file = file = open_rows(self.path)
        self.header, self.close = file.header, file.close
        if undone := count_undone(file.blocks("done"), file.rows):
            raise UserError(f"{path}: {undone} rows are not labeled; run the labeling again")
        self.labels, self.crcs, self.palette = map(file.read, ("label", "crc32", "palette"))
        self.check_columns()
        self.max_palette = int(self.palette.max())
        self.error = self.packed = None
        if self.header.form != "raw":
            self.packed = self._packed_rows()
        if self.header.form == "compact":
            self.error = FormError(*file.read("error").tolist())
        self.min_window_side = self._min_window_side()

    def check_columns(self) -> None:
        """Raise UserError that names the first row with an impossible label or palette."""
        header, classes = self.header, len(self.header.class_names)
        for what, values, low, high in (
            ("label", self.labels, 0, classes - 1),
            ("palette size", self.palette, 1, header.side**2 * header.top_k),
        ):
            if (bad := (values < low) | (values > high)).any():
                row = int(bad.argmax())
                raise UserError(
                    f"{self.path}: row {row} ({self.image_path(row)}) has {what} {values[row]}, "
                    f"but it must be from {low} to {high}; copy it again or relabel"
                )

    def _packed_rows(self) -> PackedRows:
        header, file, levels = self.header, self._file, None
        size = row_sizes(header.form, header.side, header.top_k, self.palette)
        start, total = file.read("start"), file.types["rows"][1][0]
        # The offsets follow from the palettes, so they need no checksum of their own.
        if (start != np.cumsum(size) - size).any() or total != size.sum():
            raise UserError(
                f"{self.path}: its row offsets do not match its palette sizes; "
                "copy it again or relabel"
            )
        if header.form == "compact":
            levels = file.read("levels")
            # They have no checksum, and a changed one would change labels. Computed in float64, no
            # level lies within 0.2 % of a float32 unit of a rounding boundary: all systems agree.
            valid = np.array_equal(levels, code_levels(header.absent))
            if not (valid and np.isfinite(file.read("error")).all()):
                raise UserError(
                    f"{self.path}: its levels or errors are damaged; copy it again or relabel"
                )
        return PackedRows(start, size, levels)

    def _min_window_side(self) -> float:
        smallest = np.inf
        for _, window in self._file.blocks("window"):
            # Others belong to damaged rows, which are reported where they are read.
            top, left, bottom, right = window[find_valid_windows(window)].T
            sides = (bottom - top).min(initial=np.inf), (right - left).min(initial=np.inf)
            smallest = min(smallest, *map(float, sides))
        if smallest == np.inf:
            raise UserError(f"{self.path} has no valid Window; copy it again or relabel")
        return smallest

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def size(self) -> int:
        """Bytes of all files of the store."""
        return self._file.size

    def places(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return open file descriptors and file offsets of the rows `ids`, int64.

        Raw store: `[len(ids), 4]` both, of logit, cls, lse and window. Packed store:
        `[len(ids), 2]`, of the packed row and the window.
        """
        at = dict.fromkeys(ScoreMaps._fields, ids)
        if self.packed:
            at = {"rows": self.packed.start[ids], "window": ids}
        return self._file.places(at)

    def paths(self) -> list[str]:
        """Return the path of each row's image, relative to the dataset; UserError if damaged."""
        return self._file.paths()

    def names_match(self) -> bool:
        """Whether labels and paths match their checksum; True for files without that checksum."""
        return all(
            file.names_crc is None
            or file.names_crc == names_crc(file.read("label"), file.read("path"))
            for file in self._file.files
        )

    def rows(self, ids: np.ndarray) -> ScoreMaps:
        """Return copies of the rows `ids`, each checked against its CRC and unpacked if packed."""
        stored = self.stored(ids)
        return self._unpack(ids, *stored) if self.packed else ScoreMaps(*stored)

    def stored(self, ids: np.ndarray) -> tuple:
        """Return copies of the stored parts of the rows `ids` (see `row_crcs`), checked as well.

        Those of a packed store are a list of rows, and the windows; else the fields of ScoreMaps.
        """
        if self.packed:
            parts = self._packed(ids), *self._file.take(("window",), ids)
        else:
            parts = tuple(self._file.take(ScoreMaps._fields, ids))
        bad = row_crcs(parts) != self.crcs[ids]
        if bad.any():
            row = int(ids[bad.argmax()])
            raise UserError(
                f"{self.path}: row {row} ({self.image_path(row)}) is damaged; "
                + ("relabel or copy it again" if self.path.is_file() else FOLDER_REMEDY)
            )
        return parts

    def image_path(self, row: int) -> str:
        """Return the path of a row's image; in a damaged file, the part that can be decoded."""
        return self._file.read("path", row, row + 1)[0].decode(errors="replace")

    def check_values(self) -> None:
        """Raise UserError if a row holds values that no teacher can produce.

        These are: a number that is not finite, a class out of range, an invalid Window, a class
        twice in a cell, more distinct classes than its palette size. The file is read once, from
        end to end: 8 GB for ImageNet-1k, at the disk's rate. Rows that do not match their CRC are
        left to the code that reads them, which may skip them.
        """
        for ids, stored, maps in self.chunks("check"):
            for fault, rows in self.impossible(ids, maps).items():
                for n in np.flatnonzero(rows):
                    if row_crcs([part[n : n + 1] for part in stored])[0] == self.crcs[ids[n]]:
                        raise self.invalid_map(ids[n], fault)

    def checked_rows(self, ids: np.ndarray) -> ScoreMaps:
        """Return the maps of rows; UserError for the first damaged or impossible one."""
        maps = self.rows(ids)
        for fault, bad in self.impossible(ids, maps).items():
            if bad.any():
                raise self.invalid_map(int(ids[bad.argmax()]), fault)
        return maps

    def invalid_map(self, row: int, fault: str) -> UserError:
        """Return the error for a row whose map holds values that no teacher can produce."""
        return UserError(
            f"{self.path}: the map of {self.image_path(row)} (row {row}) holds {fault}; "
            "label the images again"
        )

    def impossible(self, ids: np.ndarray, maps: ScoreMaps) -> dict[str, np.ndarray]:
        """Return the faults that no teacher can produce, and the rows of `ids` that hold each.

        `maps` are the maps of these rows. Returns bool `[len(ids)]` by the name of the fault.
        """
        return find_faults(maps, self.header.num_classes, self.palette[ids])

    def chunks(self, doing: str) -> Iterator[tuple[np.ndarray, tuple, ScoreMaps]]:
        """Yield all rows in order, in chunks: ids, stored parts (see `row_crcs`), maps.

        No CRC is checked. `doing` is the text of the progress bar.
        """
        stored = ("rows", "window") if self.packed else ScoreMaps._fields
        total = sum(self._file.stride(name) * self._file.types[name][1][0] for name in stored)
        chunks = np.array_split(np.arange(len(self)), -(-total // CHUNK_BYTES))
        # A bar only for more than 1 GiB.
        for ids in bar(chunks, f"{doing} {self.path.name}") if len(chunks) > 16 else chunks:
            first, end = ids[0], ids[-1] + 1
            if self.packed:
                stored = self._packed(ids), self._file.read("window", first, end)
                yield ids, stored, self._unpack(ids, *stored)
            else:
                maps = (self._file.read(name, first, end) for name in ScoreMaps._fields)
                maps = ScoreMaps(*maps)
                yield ids, maps, maps

    def _packed(self, ids: np.ndarray) -> list[np.ndarray]:
        """Read the packed rows `ids`."""
        rows, starts = [], self.packed.start[ids].tolist()
        ends = (self.packed.start[ids] + self.packed.size[ids]).tolist()
        for begin, stop, _ in find_runs(ids):
            first = starts[begin]
            run = self._file.read("rows", first, ends[stop - 1])
            places = zip(starts[begin:stop], ends[begin:stop], strict=True)
            rows += [run[start - first : end - first] for start, end in places]
        return rows

    def _unpack(self, ids: np.ndarray, rows: list[np.ndarray], window: np.ndarray) -> ScoreMaps:
        header, levels, palette = self.header, self.packed.levels, self.palette[ids]
        maps = unpack(header.form, header.side, header.top_k, levels, palette, rows)
        return ScoreMaps(*maps, window)

    def describes(self, fingerprint: str) -> bool:
        """Whether the maps are of the dataset of this fingerprint."""
        return same_images(fingerprint, self.header.fingerprint)

    def check(
        self,
        fingerprint: str,
        labels: np.ndarray,
        paths: list[str] | None,
        where: Path,
        split: str = "",
        is_object: bool = False,
    ) -> None:
        """Raise UserError unless the maps are of the dataset at `where`, row by row.

        `fingerprint`, `labels` and `paths` are those of the images, see `describes` and
        `check_rows`; `split` is what the command's `--split` has chosen there. Remedies are those
        of folders, or of a dataset object.
        """
        if not self.describes(fingerprint):
            remedy = "give the --split that was labeled, " if split else ""
            counts = ""
            # Packed images have no paths, and are not divided.
            if paths is not None and len(self) != len(labels):
                remedy = f"give the {'--split and ' * bool(split)}--val-fraction of the labeling, "
                counts = f"{len(self):,} maps for {len(labels):,} images, "
            if is_object:
                raise UserError(
                    f"{self.path} holds the maps of another dataset than {where} ({counts}"
                    "fingerprints differ); give the dataset that was labeled, with its items in "
                    f"that order, or label {where} to another file"
                )
            raise UserError(
                f"{self.path} holds the maps of another dataset than "
                f"{f'the split {split} of ' if split else ''}{where} ({counts}fingerprints "
                f"differ); {remedy}relabel {where}, or, if its images were labeled under the same "
                "names, run `densefeed score-maps select`"
            )
        self.check_rows(labels, paths, where)

    def check_rows(self, labels: np.ndarray, paths: list[str] | None, where: Path) -> None:
        """Raise UserError unless row n is the map of image n of `where`, by its label and path.

        `paths` is None where the images have none. A row belongs to an image by its number alone,
        and the fingerprint in the header is not computed from the rows. Every path is read: 36 MB
        and 0.3 s on one core for the 1.28 million images of ImageNet-1k, where hashing the paths of
        the images takes 0.5 s.
        """
        if len(self) != len(labels):
            raise self._others(len(labels), where, "their numbers differ")
        if not np.array_equal(self.labels, labels):
            raise self._others(len(labels), where, "their labels differ")
        if paths is None:
            return
        for start, block in self._file.blocks("path"):
            # In parts, which bounds the memory.
            for at in range(0, len(block), MOST_NAMES):
                stored, first = block[at : at + MOST_NAMES].tolist(), start + at
                names = paths[first : first + len(stored)]
                wanted = [name.encode(errors="surrogateescape") for name in names]
                if stored != wanted:
                    row = first + next(n for n, name in enumerate(wanted) if stored[n] != name)
                    difference = f"row {row} is of {self.image_path(row)}, not of {paths[row]}"
                    raise self._others(len(labels), where, difference)

    def _others(self, count: int, where: Path, difference: str) -> UserError:
        """Return the error for rows that are not those of the `count` images of `where`."""
        return UserError(
            f"{self.path} has {len(self):,} maps of other images than the {count:,} of {where} "
            f"({difference}); relabel {where}"
        )


class RecordedFile(io.RawIOBase):
    """A file for h5py that keeps what is written, by offset, and no zeros between.

    HDF5 itself must not write to the disk: when a write fails it crashes the interpreter, or the
    error is lost.
    """

    def __init__(self) -> None:
        self.size, self.writes, self._at = 0, [], 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def write(self, data: memoryview) -> int:
        self.writes.append((self._at, bytes(data)))
        self._at += len(self.writes[-1][1])
        self.size = max(self.size, self._at)
        return len(self.writes[-1][1])

    def readinto(self, out: memoryview) -> int:
        view, first = memoryview(out).cast("B"), self._at
        view[:] = bytes(len(view))
        for offset, data in self.writes:
            low, high = max(offset, first), min(offset + len(data), first + len(view))
            if low < high:
                view[low - first : high - first] = data[low - offset : high - offset]
        self._at += len(view)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        self.size = self._at if size is None else size
        return self.size


def allocate_store(
    descriptor: int, header: StoreHeader, types: Types, known: Arrays
) -> dict[str, int]:
    """Fill an empty file with contiguous HDF5 datasets of these types; return their offsets.

    They hold the arrays of `known`, else zeros. Raises OSError if the disk cannot hold the file.
    """
    laid_out = RecordedFile()
    with h5py.File(laid_out, "w") as file:
        file.attrs["densefeed"] = header.to_json()
        file.attrs["names_crc32"] = names_crc(known["label"], known["path"])
        # By default a contiguous dataset is allocated, and gets an offset, at its first write.
        early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        for name, (dtype, shape) in types.items():
            # No time stamps: the same rows must give the same bytes.
            file.create_dataset(name, shape, dtype, known.get(name), dcpl=early, track_times=False)
        offsets = {name: dataset.id.get_offset() for name, dataset in file.items()}
    # A full disk must show before the first row is computed.
    reserve_space(descriptor, laid_out.size)
    for offset, data in laid_out.writes:
        write_at(descriptor, data, offset)
    return offsets


class ScoreMapWriter:
    """Write a store row by row under the name `<path>.part`; `finish` renames it to `path`.

    A `.part` left by a killed run of the same labeling is resumed: rows whose bytes do not match
    their CRC count as not done. Raises UserError for a header that could not be read back, if the
    `.part` belongs to another labeling, or if the disk cannot hold the whole file (the space is
    reserved before the first row is computed), and BusyError if another process writes it.
    """

    def __init__(
        self, path: Path, header: StoreHeader, paths: list[str], labels: np.ndarray
    ) -> None:
        self.path, self.part, self._file = Path(path), Path(f"{path}.part"), None
        header.check(self.path)
        names = np.array([path.encode() for path in paths])
        self._header, self._names_crc = header, names_crc(labels, names)
        try:
            with name_errors(self.path):
                remove_orphans(self.path)
                check_regular(self.part)
                while self._file is None:
                    check_absent(self.path)
                    # FileNotFoundError: another process finished and renamed it in the meantime.
                    with suppress(FileNotFoundError):
                        self._file = open_locked(self.part)
                        continue
                    self._file = self._create(names, labels)
                # Another process may have finished after the check and before this one created a
                # new `.part`.
                if self.path.exists():
                    self.part.unlink()
                check_absent(self.path)
                self.done = self._read_back()
        except BaseException:
            self.close()
            raise

    def _create(self, names: np.ndarray, labels: np.ndarray) -> int | None:
        """Create `.part` and return its descriptor; None if another process created one."""
        types = dataset_types(self._header, len(labels), names.dtype.str)
        # If this process is killed, the next run removes this file.
        begun, held = create_part(self.path)
        try:
            allocate_store(held, self._header, types, {"label": labels, "path": names})
            # The layout must be on disk before the file gets the name that a later run resumes.
            os.fsync(held)
            # Locked until it has this name, or another process would remove it as an orphan.
            if name_once(begun, self.part):
                sync_folder(self.path.parent)
                return held
        except BaseException:
            os.close(held)
            raise
        finally:
            begun.unlink(missing_ok=True)
        os.close(held)
        return None

    def _read_back(self) -> np.ndarray:
        """Reopen the file and mark the rows that are done and match their CRC; bool `[N]`.

        Raises UserError if header, labels or paths are not those of this labeling.
        """
        # What the system could not write is still in its memory, which must not hide that.
        drop_cache(self._file)
        try:
            file = StoreFile(self.part)
        except UserError as error:
            raise self._damaged() from error
        self._header.check_same(file.header, self.part)
        crcs = {file.names_crc, names_crc(file.read("label"), file.read("path"))}
        # Files of earlier versions have no checksum.
        if not crcs <= {None, self._names_crc}:
            raise self._damaged()
        self._offsets = file.offsets
        return find_valid_rows(file)

    def _damaged(self) -> UserError:
        return UserError(f"{self.part} is damaged; remove it and run again")

    def write(self, ids: np.ndarray, maps: ScoreMaps) -> None:
        """Write the rows `ids` (consecutive, ascending), then mark them done."""
        if not (np.diff(ids) == 1).all():
            raise ValueError("rows must be consecutive and ascending")
        # After a power cut `done` may be on disk without the rest: `find_valid_rows` compares the
        # CRC.
        columns = maps._asdict() | {
            "crc32": row_crcs(maps),
            "palette": palette_sizes(maps.cls),
            # Written last: a row counts only when all else of it is there.
            "done": np.ones(len(ids)),
        }
        types = row_types(*maps.logit.shape[2:])
        for name, values in columns.items():
            dtype, shape = types[name]
            data = np.asarray(values, dtype)
            if data.shape != (len(ids), *shape):
                raise ValueError(f"{name} is {data.shape}, not {(len(ids), *shape)}")
            offset = self._offsets[name] + int(ids[0]) * data[0].nbytes
            with name_errors(self.path):
                write_at(self._file, data.tobytes(), offset)
        self.done[ids] = True

    def finish(self) -> None:
        """fsync the file, read it back and rename it to its final name; every row must be done.

        Raises UserError if a row is not on disk as it was written.
        """
        assert self.done.all(), "rows are missing"
        with name_errors(self.path):
            # The rows must be on disk before the file gets its name.
            os.fsync(self._file)
            if lost := int((~self._read_back()).sum()):
                raise UserError(
                    f"{self.path}: {lost:,} rows are not on disk as they were written; check the "
                    "disk, and run the same command again, which repeats them"
                )
            os.replace(self.part, self.path)
            sync_folder(self.path.parent)
            self.close()

    def close(self) -> None:
        """Close the file; the rows that are done stay in `.part`."""
        if self._file is not None:
            descriptor, self._file = self._file, None
            # An error loses nothing: a finished file was synced and read back, and the rows of an
            # unfinished one are checked when it is resumed.
            with suppress(OSError):
                os.close(descriptor)


def copy_rows(file: StoreFile, ids: np.ndarray) -> ScoreMaps:
    """Copy the rows `ids` of a raw store."""
    return ScoreMaps(*file.take(ScoreMaps._fields, ids))


def find_valid_rows(file: StoreFile) -> np.ndarray:
    """Mark the rows of a raw store that are done and match CRC and palette size; bool `[N]`."""
    done, crcs, palette = file.read("done") == 1, file.read("crc32"), file.read("palette")
    written = np.flatnonzero(done)
    # At most 29 MB of rows at once at S = 18, k = 5.
    for at in range(0, len(written), 4096):
        ids = written[at : at + 4096]
        maps = copy_rows(file, ids)
        # After a power cut a row may be on disk without its palette size.
        done[ids] = (row_crcs(maps) == crcs[ids]) & (palette_sizes(maps.cls) == palette[ids])
    return done


def split_runs(ids: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Split ascending ids into runs of consecutive ids, at most `size` each, in order."""
    for run in np.split(ids, np.flatnonzero(np.diff(ids) > 1) + 1):
        yield from (run[at : at + size] for at in range(0, len(run), size))

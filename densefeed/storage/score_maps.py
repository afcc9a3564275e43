"""ScoreMapStore: the score maps of a dataset in one HDF5 file, rows in dataset order. The bytes are
described in FORMAT.md.

    python tools/score_maps.py verify maps.h5
    python tools/score_maps.py convert maps.h5 --form compact --out small.h5
    python tools/score_maps.py merge maps.h5

HDF5 gives the layout, names and types. Every dataset is contiguous and allocated when the file is
made, so rows are afterwards written with `pwrite` and read through a memory map: no HDF5 metadata
changes while a labeling runs, and a killed run leaves a file that opens.
"""

import contextlib
import errno
import json
import math
import os
import weakref
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from densefeed.storage.geometry import are_windows
from densefeed.storage.row_codecs import Absent, Form, FormError, ScoreMaps, row_sizes, unpack
from densefeed.system.errors import UserError, explain_os_error
from densefeed.system.files import create_locked, name_errors, open_locked, remove_orphans, sync
from densefeed.system.progress import bar

VERSIONS = {"raw": 1, "lossless": 2, "compact": 2}  # of the file, by the form of its rows
CHECKED_AT_ONCE = 2**26  # bytes of rows
WINDOW_BYTES = 16
# of file systems that give a file one name only
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
HDF5_OVERHEAD = 2**16  # bytes of HDF5's own beside the rows; 11 kB measured


@dataclass(frozen=True, kw_only=True)
class StoreHeader:
    """What a store says of itself."""

    side: int  # S: cells along each side of a map
    top_k: int  # k: classes kept per cell
    num_classes: int  # K: classes of the teacher
    absent: Absent  # what the classes not kept mean, see FORMAT.md
    teacher: str  # timm name or checkpoint, and a hash of its weights
    input_size: int  # side of the teacher's input, pixels
    geometry: str  # how an image was fitted to it
    fingerprint: str  # of the dataset, see images.py
    class_names: tuple[str, ...]  # in label order; of the dataset
    form: Form = "raw"  # how a row is kept
    # of a part of a dataset: which, of how many, its first row, all rows
    shard: tuple[int, int, int, int] | None = None

    def describe(self) -> str:
        """As JSON. Version 1 knows no forms, and its files stay as they were."""
        fields = asdict(self) | {"version": VERSIONS[self.form]}
        if self.form == "raw":
            del fields["form"]
        if self.shard is None:
            del fields["shard"]
        return json.dumps(fields)

    @classmethod
    def parse(cls, text: str, where: Path) -> "StoreHeader":
        """From JSON; UserError for another version."""
        fields = json.loads(text)
        version, form = fields.pop("version", None), fields.setdefault("form", "raw")
        if version not in VERSIONS.values():
            raise UserError(
                f"{where}: score maps of version {version}, this program reads 1 and 2; relabel it"
            )
        if VERSIONS.get(form) != version:
            raise UserError(
                f"{where}: version {version} has no form {form!r}; label the images again"
            )
        if fields.get("absent") not in ("tail", "zero-logit"):
            raise UserError(
                f"{where}: absent is {fields.get('absent')!r}, and must be tail or zero-logit; label the images again"
            )
        shard = fields.get("shard")
        return cls(
            **fields
            | {
                "class_names": tuple(fields["class_names"]),
                "shard": None if shard is None else tuple(shard),
            }
        )

    def check_same(self, other: "StoreHeader", where: Path) -> None:
        """UserError, naming `where`, if its header `other` is not this one."""
        # Causes before what follows from them.
        for name, value in sorted(
            asdict(self).items(), key=lambda item: item[0] in ("side", "num_classes", "shard")
        ):
            if (found := getattr(other, name)) != value:
                what = (
                    "of another dataset"
                    if name in ("fingerprint", "class_names")
                    else f"with another {name.replace('_', ' ')}"
                )
                values = (
                    f" ({found}, not {value})"
                    if isinstance(value, int | str) and name != "fingerprint"
                    else ""
                )
                raise UserError(
                    f"{where} was begun {what}{values}; remove it or choose another --out"
                )


def row_types(side: int, top_k: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of one row of each dataset but `path`, whose width depends on the data."""
    return {
        "logit": ("<f2", (side, side, top_k)),
        "cls": ("<u2", (side, side, top_k)),
        "lse": ("<f2", (side, side)),
        "window": ("<f4", (4,)),
        "label": ("<i8", ()),
        "crc32": ("<u4", ()),
        "palette": ("<u2", ()),
        "done": ("|u1", ()),
    }


def whole_types(form: Form) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of datasets that are the same for all rows."""
    return (
        {"levels": ("<f4", (256,)), "error": ("<f8", (len(FormError._fields),))}
        if form == "compact"
        else {}
    )


def packed_types() -> dict[str, tuple[str, tuple[int, ...]]]:
    """The same of a packed store, whose maps stand in `rows`, a dataset of bytes."""
    kept = {
        name: kind for name, kind in row_types(0, 0).items() if name not in ("logit", "cls", "lse")
    }
    return kept | {"start": ("<i8", ())}


def row_crcs(parts: Iterable[Iterable[np.ndarray]]) -> np.ndarray:
    """CRC-32 of each row: over the bytes of its parts in their order (raw: logit, cls, lse,
    window); uint32 `[N]`.

    `parts` is, for each part, its rows: ScoreMaps, or packed rows and windows.
    """
    crcs = []
    for row in zip(*parts, strict=True):
        crc = 0
        for part in row:
            crc = zlib.crc32(np.ascontiguousarray(part).data, crc)
        crcs.append(crc)
    return np.array(crcs, np.uint32)


def names_crc(label_N: np.ndarray, path_N: np.ndarray) -> np.uint32:
    """CRC-32 over the bytes of the datasets `label` and `path`, in this order."""
    label = np.ascontiguousarray(label_N, row_types(0, 0)["label"][0])
    return np.uint32(
        zlib.crc32(np.ascontiguousarray(path_N).tobytes(), zlib.crc32(label.tobytes()))
    )


def not_finite(half_NM: np.ndarray) -> np.ndarray:
    """Which rows of float16 hold an infinity or NaN, bool `[N]`; by their bits, which is faster
    than `isfinite`.
    """
    return (half_NM.view(np.uint16) & 0x7FFF).max(1) >= 0x7C00


def repeats(cls_NSSk: np.ndarray) -> np.ndarray:
    """Which rows name a class twice in one cell, bool `[N]`."""
    ranks = [
        np.ascontiguousarray(cls_NSSk[..., rank]).reshape(len(cls_NSSk), -1)
        for rank in range(cls_NSSk.shape[3])
    ]
    return sum(
        ((one == other).any(1) for one, other in combinations(ranks, 2)),
        np.zeros(len(cls_NSSk), bool),
    )


def palette_sizes(cls: np.ndarray) -> np.ndarray:
    """How many distinct classes each row names; uint16 `[N]`."""
    flat = np.sort(cls.reshape(len(cls), -1), axis=1)
    return (1 + (flat[:, 1:] != flat[:, :-1]).sum(axis=1)).astype(np.uint16)


def map_datasets(path: Path) -> tuple[StoreHeader, dict[str, np.ndarray], dict[str, int]]:
    """Header, memory-mapped datasets (read only) and their offsets in the file; UserError if the
    file is damaged.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder; name the HDF5 file of score maps")
    try:
        # HDF5's own locks would meet the writer's; nothing that is read here changes after the file
        # was made.
        with h5py.File(path, "r", locking=False) as file:
            if "densefeed" not in file.attrs:
                raise UserError(
                    f"{path} holds no score maps of ours; make them with tools/relabel_imagenet.py"
                )
            header = StoreHeader.parse(file.attrs["densefeed"], path)
            places = {name: (d.dtype, d.shape, d.id.get_offset()) for name, d in file.items()}
    except FileNotFoundError:
        raise UserError(
            f"{path}: there is no such file; make it with tools/relabel_imagenet.py"
        ) from None
    except PermissionError:
        raise
    except (OSError, KeyError) as error:
        raise UserError(
            f"{path} is not a whole HDF5 file ({error}); copy it again or relabel"
        ) from error
    rows = places["label"][1][0] if "label" in places else 0
    if header.form == "raw":
        types = {
            name: (dtype, (rows, *shape))
            for name, (dtype, shape) in row_types(header.side, header.top_k).items()
        }
    else:
        types = {name: (dtype, (rows, *shape)) for name, (dtype, shape) in packed_types().items()}
        types |= {"rows": ("|u1", places.get("rows", (None, ()))[1][:1])} | whole_types(header.form)
    for name, (dtype, shape) in types.items():
        said, found = (np.dtype(dtype), shape), places.get(name, (None, ()))[:2]
        if said != found:
            raise UserError(
                f"{path}: its header says {name!r} is {said[1]} of {said[0]} but it is {found[1]} of {found[0]}; label the images again"
            )
    # Without their class, whose every slice costs a microsecond more.
    arrays = {
        name: np.asarray(np.memmap(path, dtype, "r", offset, shape))
        for name, (dtype, shape, offset) in places.items()
    }
    return header, arrays, {name: place[2] for name, place in places.items()}


class PackedRows(NamedTuple):
    """What it takes to unpack the rows of a packed store; copies in memory."""

    form: Form
    palette: np.ndarray  # int32 [N], classes in each row's palette
    size: np.ndarray  # int64 [N], bytes of each row
    levels: np.ndarray | None  # float32 [256], of a compact store


class ScoreMapStore:
    """A finished store, read through a memory map or, by whoever asks for `places`, from its file.

    `labels` int64, `crcs` uint32 and `palette` uint16 `[N]` (how many classes each row names) are
    copies in memory. `packed` is None if the rows stand as they are; `error` is, of a compact
    store, how far it is from what it was made of.

    Raises UserError if the file is missing, cut, of another version or not finished; `rows` raises
    it for a damaged row.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.header, self._arrays, self._offsets = map_datasets(self.path)
        header, arrays = self.header, self._arrays
        if header.shard:
            which, of = header.shard[:2]
            raise UserError(
                f"{path} is shard {which} of {of}, not all maps; merge them with `python tools/score_maps.py merge OUT`"
            )
        if not arrays["done"].all():
            raise UserError(
                f"{path}: {int((arrays['done'] == 0).sum())} rows are not labeled; run the labeling again"
            )
        self.labels, self.crcs = np.array(arrays["label"]), np.array(arrays["crc32"])
        self.palette = np.array(arrays["palette"])
        self.max_palette = int(self.palette.max())
        self.error = FormError(*arrays["error"].tolist()) if header.form == "compact" else None
        self.packed = None
        if header.form != "raw":
            size = row_sizes(header.form, header.side, header.top_k, self.palette)
            if (arrays["start"] != np.cumsum(size) - size).any() or len(
                arrays["rows"]
            ) != size.sum():
                raise UserError(
                    f"{path}: its rows do not stand where their palettes say; copy it again or relabel"
                )
            levels = np.array(arrays["levels"]) if header.form == "compact" else None
            self.packed = PackedRows(header.form, self.palette.astype(np.int32), size, levels)
        top, left, bottom, right = arrays["window"].T
        self.min_window_side = float(min((bottom - top).min(), (right - left).min()))

        self._file = os.open(self.path, os.O_RDONLY)
        # `rows` still works afterwards, `places` does not
        self.close = weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return len(self.labels)

    def places(self, ids: np.ndarray) -> tuple[int, np.ndarray]:
        """An open descriptor, and where the rows `ids` stand in it: of logit, cls, lse and window,
        int64 `[len(ids), 4]`; in a packed store of the packed row and window, `[len(ids), 2]`.
        """
        if self.packed:
            rows, windows = (
                self._offsets["rows"] + self._arrays["start"][ids],
                self._offsets["window"] + ids * WINDOW_BYTES,
            )
            return self._file, np.stack([rows, windows], 1)
        starts = np.array([self._offsets[name] for name in ScoreMaps._fields])
        strides = np.array([self._arrays[name][0].nbytes for name in ScoreMaps._fields])
        return self._file, starts + ids[:, None] * strides

    def paths(self) -> list[str]:
        """The path of each row's image, relative to the dataset's folder. UserError if they are
        damaged.
        """
        try:
            return [raw.decode() for raw in self._arrays["path"]]
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.path} names images by bytes that are no text; copy it again or relabel"
            ) from error

    def names_sound(self) -> bool:
        """Whether labels and paths are those that were written; also true of files that carry no
        checksum of them.
        """
        with h5py.File(self.path, "r", locking=False) as file:
            written = file.attrs.get("names_crc32")
        return written is None or written == names_crc(self.labels, self._arrays["path"])

    def rows(self, ids: np.ndarray) -> ScoreMaps:
        """Copies of the rows `ids`, each checked against its CRC, unpacked if they were packed."""
        if self.packed:
            ends = zip(
                self._arrays["start"][ids].tolist(), self.packed.size[ids].tolist(), strict=True
            )
            stored = (
                [np.array(self._arrays["rows"][start : start + size]) for start, size in ends],
                self._arrays["window"][ids],
            )
        else:
            stored = ScoreMaps(*(self._arrays[name][ids] for name in ScoreMaps._fields))
        bad = np.nonzero(row_crcs(stored) != self.crcs[ids])[0]
        if len(bad):
            row = int(ids[bad[0]])
            raise UserError(
                f"{self.path}: row {row} ({self.path_of(row)}) is damaged; relabel or copy it again"
            )
        return self._unpacked(ids, *stored) if self.packed else stored

    def path_of(self, row: int) -> str:
        """The path of a row's image; of a damaged file, as much of it as can be read."""
        return self._arrays["path"][row].decode(errors="replace")

    def check_values(self) -> None:
        """UserError if a row holds what no teacher can have said: a number that is not finite, a
        class there is not, a Window that is no part of the image, a class twice in a cell, or more
        classes than its palette says.

        Reads the file once, from end to end: 8 GB for ImageNet, at the disk's rate. A row that does
        not match its CRC is left to whoever reads it, who may want to skip it.
        """
        for ids, stored, maps in self.chunks("check"):
            for what, rows in self.impossible(ids, maps).items():
                for n in np.flatnonzero(rows):
                    if row_crcs([part[n : n + 1] for part in stored])[0] == self.crcs[ids[n]]:
                        where = f"{self.path_of(ids[n])} (row {ids[n]})"
                        raise UserError(
                            f"{self.path}: the map of {where} holds {what}; label the images again"
                        )

    def impossible(self, ids: np.ndarray, maps: ScoreMaps) -> dict[str, np.ndarray]:
        """What no teacher can have said, and which of the rows `ids`, whose maps are given, hold
        it: bool `[len(ids)]`.
        """
        logit, cls, lse, window = (part.reshape(len(ids), -1) for part in maps)
        known = cls.max(1) < self.header.num_classes
        return {
            "a logit that is not finite": not_finite(logit),
            "a logsumexp that is not finite": not_finite(lse),
            "a Window that is no part of the image": ~are_windows(window),
            f"class {cls.max()} of {self.header.num_classes}": ~known,
            "a class twice in one cell": repeats(maps.cls),
            "more classes than its palette says": known & (palette_sizes(cls) > self.palette[ids]),
        }

    def chunks(self, doing: str) -> Iterator[tuple[np.ndarray, tuple, ScoreMaps]]:
        """All rows in order, some at once: their ids, their parts as `row_crcs` takes them, and
        their maps. No CRC is checked.
        """
        row_bytes = len(self._arrays["rows"]) // len(self) if self.packed else 0
        row_bytes += sum(
            self._arrays[name][:1].nbytes for name in ScoreMaps._fields if name in self._arrays
        )
        chunks = np.array_split(np.arange(len(self)), -(-len(self) * row_bytes // CHECKED_AT_ONCE))
        for ids in bar(chunks, f"{doing} {self.path.name}") if len(chunks) > 16 else chunks:
            if not self.packed:
                maps = ScoreMaps(
                    *(self._read(name, ids[0], ids[-1] + 1) for name in ScoreMaps._fields)
                )
                yield ids, maps, maps
                continue
            start, size = int(self._arrays["start"][ids[0]]), self.packed.size[ids]
            rows = np.split(
                self._read("rows", start, start + int(size.sum())), np.cumsum(size)[:-1]
            )
            window = self._read("window", ids[0], ids[-1] + 1)
            yield ids, (rows, window), self._unpacked(ids, rows, window)

    def _unpacked(self, ids: np.ndarray, rows: list[np.ndarray], window: np.ndarray) -> ScoreMaps:
        side, top_k, packed = self.header.side, self.header.top_k, self.packed
        return ScoreMaps(
            *unpack(packed.form, side, top_k, packed.levels, packed.palette[ids], rows), window
        )

    def _read(self, name: str, first: int, end: int) -> np.ndarray:
        """Elements `first` to `end` - 1 of a dataset, by a read: a memory map would count as memory
        of ours.
        """
        like = self._arrays[name]
        each, first, count = like[:1].nbytes, int(first), int(end - first)
        with name_errors(self.path):
            read = os.pread(self._file, count * each, self._offsets[name] + first * each)
        if len(read) < count * each:
            raise UserError(f"{self.path} was cut while it was open; copy it again and rerun")
        return np.frombuffer(read, like.dtype).reshape(count, *like.shape[1:])

    def check(self, fingerprint: str, where: Path) -> None:
        """UserError unless the maps were made for the dataset of this fingerprint."""
        if fingerprint != self.header.fingerprint:
            raise UserError(
                f"{self.path} holds the maps of another dataset than {where} (fingerprints differ); relabel {where}"
            )


def lay_out(
    path: Path,
    header: StoreHeader,
    types: dict[str, tuple[str, tuple[int, ...]]],
    known: dict[str, np.ndarray],
) -> None:
    """Make an HDF5 file of contiguous datasets of these dtypes and shapes, zeros but for the
    `known` ones; OSError if the disk cannot hold it.
    """
    # HDF5 crashes the interpreter when the disk fills under it, so ask for the space first.
    sizes = (np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in types.values())
    with open(path, "wb") as file:
        os.posix_fallocate(
            file.fileno(), 0, sum(sizes) + HDF5_OVERHEAD + len(header.class_names) * 100
        )
    with h5py.File(path, "w", locking=False) as file:  # whoever makes it holds a lock of ours
        file.attrs["densefeed"] = header.describe()
        file.attrs["names_crc32"] = names_crc(known["label"], known["path"])
        early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        early.set_obj_track_times(False)  # the same rows shall give the same bytes
        for name, (dtype, shape) in types.items():
            space = h5py.h5s.create_simple(shape)
            h5py.h5d.create(
                file.id, name.encode(), h5py.h5t.py_create(np.dtype(dtype)), space, early
            )
        for name, values in known.items():
            file[name][:] = values
    with open(path, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, os.path.getsize(path))


class ScoreMapWriter:
    """Writes a store row by row under the name `<path>.part`; `finish` gives it its name.

    A `.part` left by a killed run of the same labeling is continued: rows whose bytes do not match
    their CRC count as undone. UserError if the `.part` belongs to another labeling, or if the disk
    cannot hold the whole file (the space is reserved before the first row is computed); BusyError
    if another process writes it.
    """

    def __init__(
        self, path: Path, header: StoreHeader, paths: list[str], labels: np.ndarray
    ) -> None:
        self.path, self.part, self._file = Path(path), Path(f"{path}.part"), None
        remove_orphans(self.path)
        try:
            while self._file is None:
                self._refuse_existing()
                if not self.part.exists():
                    self._create(header, paths, labels)
                # its last writer has finished it meanwhile
                with contextlib.suppress(FileNotFoundError):
                    self._file = open_locked(self.part)
            # finished by another process after we had looked, and before we made a new one
            if self.path.exists():
                self.part.unlink()
            self._refuse_existing()
            self._continue(header)
        except BaseException:
            self.close()
            raise

    def _refuse_existing(self) -> None:
        if self.path.exists():
            raise UserError(f"{self.path} exists already; remove it or choose another --out")

    def _continue(self, header: StoreHeader) -> None:
        try:
            found, arrays, self._offsets = map_datasets(self.part)
        except UserError as error:
            raise UserError(
                f"{self.part}, left by an earlier run, is damaged; remove it and run again"
            ) from error
        header.check_same(found, self.part)
        self.done = sound_rows(arrays)

    def _create(self, header: StoreHeader, paths: list[str], labels: np.ndarray) -> None:
        names = np.array([path.encode() for path in paths])
        types = row_types(header.side, header.top_k) | {"path": (names.dtype.str, ())}
        types = {name: (dtype, (len(labels), *shape)) for name, (dtype, shape) in types.items()}
        # removed by the next run if we are killed
        begun = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            held = create_locked(begun)
            try:
                lay_out(begun, header, types, {"label": labels, "path": names})
                sync(begun)
            finally:
                os.close(held)
            # Unlike a renaming, a link never takes the place of what another process made in the
            # meantime.
            try:
                os.link(begun, self.part)
            except FileExistsError:
                pass
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                os.replace(begun, self.part)
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise UserError(f"the score maps cannot be made: {explain_os_error(error)}") from error
        finally:
            begun.unlink(missing_ok=True)

    def write(self, ids: np.ndarray, maps: ScoreMaps) -> None:
        """Write the rows `ids` (ascending neighbors), then mark them done."""
        if not (np.diff(ids) == 1).all():
            raise ValueError("rows must be neighbors, ascending")
        columns = maps._asdict() | {
            "crc32": row_crcs(maps),
            "palette": palette_sizes(maps.cls),
            "done": np.ones(len(ids)),
        }
        for name, (dtype, shape) in row_types(*maps.logit.shape[2:]).items():
            if name in columns:
                data = np.ascontiguousarray(columns[name], dtype)
                if data.shape != (len(ids), *shape):
                    raise ValueError(f"{name} is {data.shape}, not {(len(ids), *shape)}")
                with name_errors(self.part):
                    os.pwrite(
                        self._file,
                        data.tobytes(),
                        self._offsets[name] + int(ids[0]) * data[0].nbytes,
                    )
        self.done[ids] = True

    def finish(self) -> None:
        """fsync and give the file its final name; every row must be done."""
        assert self.done.all(), "rows are missing"
        os.fsync(self._file)
        os.replace(self.part, self.path)
        sync(self.path.parent)
        self.close()

    def close(self) -> None:
        """Close the file; what is done stays in `.part`."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def sound_rows(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Which rows of an unfinished raw store are done, and match their CRC; bool `[N]`."""
    done = np.array(arrays["done"], bool)
    begun = np.nonzero(done)[0]
    for ids in np.array_split(begun, len(begun) // 4096 + 1):
        crcs = row_crcs(ScoreMaps(*(arrays[name][ids] for name in ScoreMaps._fields)))
        done[ids] = crcs == arrays["crc32"][ids]
    return done


def undone_batches(done: np.ndarray, batch: int) -> Iterable[np.ndarray]:
    """The undone rows in order, in runs of neighbors of at most `batch`."""
    undone = np.nonzero(~done)[0]
    for piece in np.split(undone, np.nonzero(np.diff(undone) > 1)[0] + 1):
        yield from (piece[at : at + batch] for at in range(0, len(piece), batch))

"""ScoreMapStore: the score maps of a dataset in one HDF5 file, rows in dataset order. The bytes are described in FORMAT.md.

HDF5 gives the layout, names and types. Every dataset is contiguous and allocated when the file is made, so rows are
afterwards written with `pwrite` and read through a memory map: no HDF5 metadata changes while a labelling runs, and a killed
run leaves a file that opens.
"""

import json
import math
import os
import weakref
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal, NamedTuple

import h5py
import numpy as np

from .files import UserError, explain, naming, sync
from .progress import bar

VERSION = 1
CHECKED_AT_ONCE = 2**26  # bytes of rows
EDGE = 1e-6  # by which rounding may put a Window outside its image
HDF5_OVERHEAD = 2**16  # bytes of HDF5's own beside the rows; 11 kB measured
Absent = Literal["tail", "zero-logit"]


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
    version: int = VERSION

    @classmethod
    def parse(cls, text: str, where: Path) -> "StoreHeader":
        """From JSON; UserError for another version."""
        fields = json.loads(text)
        if fields.get("version") != VERSION:
            raise UserError(f"{where}: score maps of version {fields.get('version')}, this program reads {VERSION}; relabel it")
        if fields.get("absent") not in ("tail", "zero-logit"):
            raise UserError(
                f"{where}: absent is {fields.get('absent')!r}, and must be tail or zero-logit; label the images again"
            )
        return cls(**fields | {"class_names": tuple(fields["class_names"])})


class ScoreMaps(NamedTuple):
    """Rows of a store. `logit` float16 `[N, S, S, k]` descending over k, `cls` uint16 alike, `lse` float16 `[N, S, S]`
    the logsumexp over all K classes, `window` float32 `[N, 4]`."""

    logit: np.ndarray
    cls: np.ndarray
    lse: np.ndarray
    window: np.ndarray


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


def row_crcs(maps: ScoreMaps) -> np.ndarray:
    """CRC-32 of each row: over the bytes of logit, cls, lse and window in that order; uint32 `[N]`."""
    crcs = np.zeros(len(maps.logit), np.uint32)
    for n in range(len(crcs)):
        crc = 0
        for part in maps:
            crc = zlib.crc32(np.ascontiguousarray(part[n]).data, crc)
        crcs[n] = crc
    return crcs


def not_finite(half_NM: np.ndarray) -> np.ndarray:
    """Which rows of float16 hold an infinity or NaN, bool `[N]`; by their bits, which is faster than `isfinite`."""
    return (half_NM.view(np.uint16) & 0x7FFF).max(1) >= 0x7C00


def repeats(cls_NSSk: np.ndarray) -> np.ndarray:
    """Which rows name a class twice in one cell, bool `[N]`."""
    ranks = [np.ascontiguousarray(cls_NSSk[..., rank]).reshape(len(cls_NSSk), -1) for rank in range(cls_NSSk.shape[3])]
    return sum(((one == other).any(1) for one, other in combinations(ranks, 2)), np.zeros(len(cls_NSSk), bool))


def palette_sizes(cls: np.ndarray) -> np.ndarray:
    """How many distinct classes each row names; uint16 `[N]`."""
    flat = np.sort(cls.reshape(len(cls), -1), axis=1)
    return (1 + (flat[:, 1:] != flat[:, :-1]).sum(axis=1)).astype(np.uint16)


def map_datasets(path: Path) -> tuple[StoreHeader, dict[str, np.ndarray], dict[str, int]]:
    """Header, memory-mapped datasets (read only) and their offsets in the file; UserError if the file is damaged."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name the HDF5 file of score maps")
    try:
        with h5py.File(path, "r") as file:
            if "densefeed" not in file.attrs:
                raise UserError(f"{path} holds no score maps of ours; make them with tools/relabel_imagenet.py")
            header = StoreHeader.parse(file.attrs["densefeed"], path)
            places = {name: (d.dtype, d.shape, d.id.get_offset()) for name, d in file.items()}
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; make it with tools/relabel_imagenet.py") from None
    except PermissionError:
        raise
    except (OSError, KeyError) as error:
        raise UserError(f"{path} is not a whole HDF5 file ({error}); copy it again or relabel") from error
    rows = places["label"][1][0] if "label" in places else 0
    for name, (dtype, shape) in row_types(header.side, header.top_k).items():
        said, found = (np.dtype(dtype), (rows, *shape)), places.get(name, (None, ()))[:2]
        if said != found:
            raise UserError(
                f"{path}: its header says {name!r} is {said[1]} of {said[0]} but it is {found[1]} of {found[0]}; label the images again"
            )
    arrays = {name: np.memmap(path, dtype, "r", offset, shape) for name, (dtype, shape, offset) in places.items()}
    return header, arrays, {name: place[2] for name, place in places.items()}


class ScoreMapStore:
    """A finished store, read through a memory map or, by whoever asks for `places`, from its file.

    `labels` int64 and `crcs` uint32 `[N]` are copies in memory.

    Raises UserError if the file is missing, cut, of another version or not finished; `rows` raises it for a damaged row.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.header, self._arrays, self._offsets = map_datasets(self.path)
        if not self._arrays["done"].all():
            raise UserError(f"{path}: {int((self._arrays['done'] == 0).sum())} rows are not labelled; run the labelling again")
        self.labels, self.crcs = np.array(self._arrays["label"]), np.array(self._arrays["crc32"])
        self.max_palette = int(self._arrays["palette"].max())
        top, left, bottom, right = self._arrays["window"].T
        self.min_window_side = float(min((bottom - top).min(), (right - left).min()))

        self._file = os.open(self.path, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self._file)  # `rows` still works afterwards, `places` does not

    def __len__(self) -> int:
        return len(self.labels)

    def places(self, ids: np.ndarray) -> tuple[int, np.ndarray]:
        """An open descriptor, and where the rows `ids` of logit, cls, lse and window stand in it: int64 `[len(ids), 4]`."""
        starts = np.array([self._offsets[name] for name in ScoreMaps._fields])
        strides = np.array([self._arrays[name][0].nbytes for name in ScoreMaps._fields])
        return self._file, starts + ids[:, None] * strides

    def paths(self) -> list[str]:
        """The path of each row's image, relative to the dataset's folder."""
        return [raw.decode() for raw in self._arrays["path"]]

    def rows(self, ids: np.ndarray) -> ScoreMaps:
        """Copies of the rows `ids`, each checked against its CRC."""
        maps = ScoreMaps(*(self._arrays[name][ids] for name in ScoreMaps._fields))
        bad = np.nonzero(row_crcs(maps) != self._arrays["crc32"][ids])[0]
        if len(bad):
            row = int(ids[bad[0]])
            raise UserError(
                f"{self.path}: row {row} ({self._arrays['path'][row].decode()}) is damaged; relabel or copy it again"
            )
        return maps

    def check_values(self) -> None:
        """UserError if a row holds what no teacher can have said: a number that is not finite, a class there is not, a Window
        that is no part of the image, a class twice in a cell, or more classes than its palette says.

        Reads the file once, from end to end: 8 GB for ImageNet, at the disk's rate. A row that does not match its CRC is
        left to whoever reads it, who may want to skip it.
        """
        row_bytes = sum(self._arrays[name][:1].nbytes for name in ScoreMaps._fields)
        chunks = np.array_split(np.arange(len(self)), -(-len(self) * row_bytes // CHECKED_AT_ONCE))
        for ids in bar(chunks, f"check {self.path.name}") if len(chunks) > 16 else chunks:
            maps = ScoreMaps(*(self._read(name, ids) for name in ScoreMaps._fields))
            logit, cls, lse, window = (part.reshape(len(ids), -1) for part in maps)
            top, left, bottom, right = window.T
            # Not the other way round: NaN is neither less nor more.
            within = (
                (top >= -EDGE) & (top < bottom) & (bottom <= 1 + EDGE) & (left >= -EDGE) & (left < right) & (right <= 1 + EDGE)
            )
            known = cls.max(1) < self.header.num_classes
            wrong = {
                "a logit that is not finite": not_finite(logit),
                "a logsumexp that is not finite": not_finite(lse),
                "a Window that is no part of the image": ~within,
                f"class {cls.max()} of {self.header.num_classes}": ~known,
                "a class twice in one cell": repeats(maps.cls),
                "more classes than its palette says": known & (palette_sizes(cls) > self._read("palette", ids)),
            }
            for what, rows in wrong.items():
                for n in np.flatnonzero(rows):
                    if row_crcs(ScoreMaps(*(part[n : n + 1] for part in maps)))[0] == self.crcs[ids[n]]:
                        path = self._arrays["path"][ids[n]].decode()
                        raise UserError(f"{self.path}: the map of {path} (row {ids[n]}) holds {what}; label the images again")

    def _read(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Rows `ids`, neighbours, of a dataset, by a read: a memory map would count as memory of ours."""
        like = self._arrays[name]
        with naming(self.path):
            read = os.pread(self._file, len(ids) * like[:1].nbytes, self._offsets[name] + int(ids[0]) * like[:1].nbytes)
        if len(read) < len(ids) * like[:1].nbytes:
            raise UserError(f"{self.path} was cut while it was open; copy it again and rerun")
        return np.frombuffer(read, like.dtype).reshape(len(ids), *like.shape[1:])

    def check(self, fingerprint: str, where: Path) -> None:
        """UserError unless the maps were made for the dataset of this fingerprint."""
        if fingerprint != self.header.fingerprint:
            raise UserError(
                f"{self.path} holds the maps of another dataset than {where} (fingerprints differ); relabel {where}"
            )


class ScoreMapWriter:
    """Writes a store row by row under the name `<path>.part`; `finish` gives it its name.

    A `.part` left by a killed run of the same labelling is continued: rows whose bytes do not match their CRC count as
    undone. UserError if the `.part` belongs to another labelling, or if the disk cannot hold the whole file (the space is
    reserved before the first row is computed).
    """

    def __init__(self, path: Path, header: StoreHeader, paths: list[str], labels: np.ndarray) -> None:
        self.path, self.part = Path(path), Path(f"{path}.part")
        if self.path.exists():
            raise UserError(f"{path} exists already; remove it or choose another --out")
        if not self.part.exists():
            self._create(header, paths, labels)
        try:
            found, arrays, self._offsets = map_datasets(self.part)
        except UserError as error:
            raise UserError(f"{self.part}, left by an earlier run, is damaged; remove it and run again") from error
        if asdict(found) != asdict(header):
            differs = next(name for name, value in asdict(header).items() if asdict(found)[name] != value)
            raise UserError(f"{self.part} was begun with another {differs}; remove it or choose another --out")
        self.done = np.array(arrays["done"], bool)
        begun = np.nonzero(self.done)[0]
        for ids in np.array_split(begun, len(begun) // 4096 + 1):
            crcs = row_crcs(ScoreMaps(*(arrays[name][ids] for name in ScoreMaps._fields)))
            self.done[ids] = crcs == arrays["crc32"][ids]
        self._file = os.open(self.part, os.O_RDWR)

    def _create(self, header: StoreHeader, paths: list[str], labels: np.ndarray) -> None:
        names = np.array([path.encode() for path in paths])
        begun = Path(f"{self.part}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            types = row_types(header.side, header.top_k) | {"path": (names.dtype.str, ())}
            # HDF5 crashes the interpreter when the disk fills under it, so ask for the space first.
            sizes = (np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in types.values())
            with open(begun, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, len(labels) * sum(sizes) + HDF5_OVERHEAD + len(header.class_names) * 100)
            with h5py.File(begun, "w") as file:
                file.attrs["densefeed"] = json.dumps(asdict(header))
                early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
                early.set_obj_track_times(False)  # the same rows shall give the same bytes
                for name, (dtype, shape) in types.items():
                    space = h5py.h5s.create_simple((len(labels), *shape))
                    h5py.h5d.create(file.id, name.encode(), h5py.h5t.py_create(np.dtype(dtype)), space, early)
                file["label"][:], file["path"][:] = labels, names
            with open(begun, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, os.path.getsize(begun))
            sync(begun)
            os.replace(begun, self.part)
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise UserError(f"the score maps cannot be made: {explain(error)}") from error
        finally:
            begun.unlink(missing_ok=True)

    def write(self, ids: np.ndarray, maps: ScoreMaps) -> None:
        """Write the rows `ids` (ascending neighbours), then mark them done."""
        if not (np.diff(ids) == 1).all():
            raise ValueError("rows must be neighbours, ascending")
        columns = maps._asdict() | {"crc32": row_crcs(maps), "palette": palette_sizes(maps.cls), "done": np.ones(len(ids))}
        for name, (dtype, shape) in row_types(*maps.logit.shape[2:]).items():
            if name in columns:
                data = np.ascontiguousarray(columns[name], dtype)
                if data.shape != (len(ids), *shape):
                    raise ValueError(f"{name} is {data.shape}, not {(len(ids), *shape)}")
                with naming(self.part):
                    os.pwrite(self._file, data.tobytes(), self._offsets[name] + int(ids[0]) * data[0].nbytes)
        self.done[ids] = True

    def finish(self) -> None:
        """fsync and give the file its final name; every row must be done."""
        assert self.done.all(), "rows are missing"
        os.fsync(self._file)
        self.close()
        os.replace(self.part, self.path)
        sync(self.path.parent)

    def close(self) -> None:
        """Close the file; what is done stays in `.part`."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def undone_batches(done: np.ndarray, batch: int) -> Iterable[np.ndarray]:
    """The undone rows in order, in runs of neighbours of at most `batch`."""
    undone = np.nonzero(~done)[0]
    for run in np.split(undone, np.nonzero(np.diff(undone) > 1)[0] + 1):
        yield from (run[at : at + batch] for at in range(0, len(run), batch))

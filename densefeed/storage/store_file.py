"""Open a file of score maps: its header and datasets, checked against one schema, and their bytes.

Whatever a file declares is checked here, before any of it is used; FORMAT.md states the rules. Data
is read with `pread`: a memory map of a file that is truncated while open would kill the process.
"""

import json
import math
import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from reprlib import repr as shorten
from typing import get_args

import numpy as np

from densefeed.storage.dataset_names import MOST_CLASSES
from densefeed.storage.hdf5_layout import Dataset, Layout, LayoutError, read_layout
from densefeed.storage.row_codecs import Absent, Form, FormError
from densefeed.system.errors import UserError, explain_os_error, first_line
from densefeed.system.file_kinds import name_kind
from densefeed.system.files import name_errors, open_regular
from densefeed.system.json_files import parse_json

Types = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape of datasets, by name
Arrays = dict[str, np.ndarray]  # datasets, by name

# Version of the file for each form of its rows.
VERSIONS = {"raw": 1, "lossless": 2, "compact": 2}
# Greatest values of the header's numbers: cells and pixels along a side, classes.
MOST = {"side": 1024, "top_k": MOST_CLASSES, "num_classes": MOST_CLASSES, "input_size": 4096}
# Most entries of a map: 1 MB of logits and classes. A published map has 1,620.
MOST_ENTRIES = 2**18
# Longest path of an image, bytes: PATH_MAX of Linux.
PATH_WIDTH = 4096
# Bytes of a dataset that are read at once.
BLOCK_BYTES = 2**24


@dataclass(frozen=True, kw_only=True)
class StoreHeader:
    """The metadata of a store."""

    side: int  # S: cells along each side of a map
    top_k: int  # k: classes kept per cell
    num_classes: int  # K: classes of the teacher
    absent: Absent  # meaning of the classes that are not kept, see FORMAT.md
    teacher: str  # timm name or checkpoint, and a hash of its weights
    input_size: int  # side of the teacher's input, pixels
    geometry: str  # how an image was fitted to the teacher's input
    fingerprint: str  # of the dataset, see images.py
    class_names: tuple[str, ...]  # of the dataset, in label order
    form: Form = "raw"  # encoding of a row

    def to_json(self) -> str:
        """Encode as JSON. Version 1 has no `form` key, so version 1 files keep their bytes."""
        fields = asdict(self) | {"version": VERSIONS[self.form]}
        if self.form == "raw":
            del fields["form"]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: bytes, where: Path) -> "StoreHeader":
        """Decode from JSON; UserError that names `where` for anything but a header of a store."""
        try:
            values = parse_json(text)
        except ValueError as error:
            raise UserError(
                f"{where}: its header is not JSON ({first_line(error)}); copy it again or relabel"
            ) from None
        if problem := find_header_fault(values):
            raise UserError(f"{where}: {problem}; label the images again")
        del values["version"]
        values["class_names"] = tuple(values["class_names"])
        return cls(**values)

    def check(self, where: Path) -> None:
        """Raise UserError, which names `where`, if no store that can be read has this header."""
        if problem := find_header_fault(json.loads(self.to_json())):
            raise UserError(
                f"{where} cannot be written: {problem}; choose a smaller --input-size, in labeling "
                "--top-k or --tiles, or another teacher"
            )

    def check_same(self, other: "StoreHeader", where: Path) -> None:
        """Raise UserError, which names `where`, unless its header `other` equals this one."""
        # A cause is reported before its effects: another teacher often has another `side` too.
        effects = "side", "num_classes"
        for name, value in sorted(asdict(self).items(), key=lambda item: item[0] in effects):
            found = getattr(other, name)
            if found == value:
                continue
            difference = f"with another {name.replace('_', ' ')}"
            # Both stand for the dataset.
            if name in ("fingerprint", "class_names"):
                difference = "for another dataset"
            elif isinstance(value, int | str):
                difference += f" ({found}, not {value})"
            raise UserError(f"{where} was started {difference}; remove it or choose another --out")


def find_header_fault(values: object) -> str | None:
    """Return what is invalid in a header from JSON; None if it has no fault."""
    if not isinstance(values, dict):
        return "its header is not a dictionary"
    version, form = values.get("version"), values.get("form", "raw")
    # True equals 1, but is not a version.
    if type(version) is not int or version not in VERSIONS.values():
        return f"score maps have version {shorten(version)}, this program reads versions 1 and 2"
    if not isinstance(form, str) or VERSIONS.get(form) != version:
        return f"version {version} has no form {shorten(form)}"
    if (absent := values.get("absent")) not in get_args(Absent):
        return f"absent is {shorten(absent)}, but must be one of {', '.join(get_args(Absent))}"
    names = {field.name for field in fields(StoreHeader)}
    if missing := sorted(names - {"form"} - values.keys()):
        return f"its header lacks {missing[0]}"
    if unknown := sorted(values.keys() - names - {"version"}):
        return f"its header has an unknown entry {shorten(unknown[0])}"
    return find_value_fault(values)


def find_value_fault(values: dict) -> str | None:
    """Describe a number of a complete header that is impossible, or a text of another type."""
    for name, most in MOST.items():
        if type(values[name]) is not int or not 1 <= values[name] <= most:
            return f"{name} is {shorten(values[name])}, but must be a number from 1 to {most:,}"
    side, top_k, num_classes = (values[name] for name in ("side", "top_k", "num_classes"))
    if top_k > num_classes or side * side * top_k > MOST_ENTRIES:
        return f"maps of {side} x {side} cells of {top_k} of {num_classes} classes are impossible"
    for name in ("teacher", "geometry", "fingerprint"):
        if not isinstance(values[name], str):
            return f"{name} is {shorten(values[name])}, but must be text"
    names = values["class_names"]
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        return "class_names must be a list of texts"
    return None


def row_types(side: int, top_k: int) -> Types:
    """Return dtype and shape of a row of each dataset but `path`, whose width varies."""
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


def dataset_types(
    header: StoreHeader, rows: int, path: str, packed_shape: tuple[int, ...] = ()
) -> Types:
    """Return dtype and shape of every dataset of a store, in file order.

    `path` is the dtype of the dataset `path`; `packed_shape` is the shape of the dataset `rows` of
    a packed store, which is its size in bytes.
    """
    types, packed = row_types(header.side, header.top_k), header.form != "raw"
    if packed:
        del types["logit"], types["cls"], types["lse"]
        types["start"] = "<i8", ()
    types["path"] = path, ()
    types = {name: (dtype, (rows, *shape)) for name, (dtype, shape) in types.items()}
    if packed:
        types["rows"] = "|u1", packed_shape
    if header.form == "compact":
        types |= {"levels": ("<f4", (256,)), "error": ("<f8", (len(FormError._fields),))}
    return types


# --------------------------------------------------------------------------------- the open file


class StoreFile:
    """An open file of score maps, finished or not, whose header and layout match the schema.

    `types` are dtype and shape, `offsets` the places in the file of all datasets by name; `rows` is
    the number of rows. `names_crc` is the checksum of labels and paths, None in older files.

    Raises UserError if the file is missing, truncated, damaged or not a store; reads raise it if
    the file was truncated since. The file is closed by `close`, or with the object.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.descriptor = path, open_store(path)
        self.close = weakref.finalize(self, os.close, self.descriptor)
        try:
            layout = read_layout(self.descriptor, ("densefeed", "names_crc32"))
        except LayoutError as error:
            kind = name_kind(self.descriptor)
            if kind and "HDF5" not in kind:
                raise UserError(
                    f"{path} is {kind}, and not a file of score maps; give the file that densefeed "
                    "label wrote"
                ) from None
            raise UserError(
                f"{path} is not a complete file of score maps ({error}); copy it again or relabel"
            ) from None
        text, self.names_crc = (layout.attributes.get(n) for n in ("densefeed", "names_crc32"))
        if not isinstance(text, bytes) or not isinstance(self.names_crc, np.uint32 | None):
            raise UserError(f"{path} is not a score map file; make one with densefeed label")
        self.header = StoreHeader.from_json(text, path)
        self.types = check_schema(path, self.header, layout)
        self.rows = self.types["label"][1][0]
        self.offsets = {name: layout.datasets[name].offset for name in self.types}

    @property
    def files(self) -> list["StoreFile"]:
        """The files of the store: this one."""
        return [self]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self.descriptor).st_size

    def stride(self, name: str) -> int:
        """Return the bytes of a row of a dataset; of `rows`, 1."""
        dtype, shape = self.types[name]
        return math.prod(shape[1:], start=dtype.itemsize)

    def read(self, name: str, first: int = 0, end: int | None = None) -> np.ndarray:
        """Read the rows `first` to `end` - 1 of a dataset, by default all."""
        dtype, shape = self.types[name]
        first, end = int(first), shape[0] if end is None else int(end)
        array = np.empty((end - first, *shape[1:]), dtype)
        self._fill(name, array, [(0, end - first, first)])
        return array

    def blocks(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """Yield a dataset in blocks: the number of the first row, at most BLOCK_BYTES of rows."""
        count, rows = self.types[name][1][0], max(1, BLOCK_BYTES // self.stride(name))
        for first in range(0, count, rows):
            yield first, self.read(name, first, min(first + rows, count))

    def paths(self) -> list[str]:
        """Read the path of each row's image; UserError for one that no file can have."""
        try:
            paths = [raw.decode() for _, block in self.blocks("path") for raw in block]
        except UnicodeDecodeError:
            problem = "are not valid UTF-8"
        else:
            if not any(not path or "\0" in path for path in paths):
                return paths
            problem = "are empty or hold a zero byte"
        raise UserError(f"{self.path}: its image paths {problem}; copy it again or relabel")

    def take(self, names: Iterable[str], ids: np.ndarray) -> list[np.ndarray]:
        """Read the rows `ids`, int64, of each of the datasets."""
        arrays, runs = [], find_runs(ids)
        for name in names:
            dtype, shape = self.types[name]
            arrays.append(np.empty((len(ids), *shape[1:]), dtype))
            self._fill(name, arrays[-1], runs)
        return arrays

    def places(self, at: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """Return open descriptors and file offsets, int64 `[N, len(at)]` both.

        `at` holds, for each dataset, int64 `[N]` numbers of rows; of the dataset `rows`, of bytes.
        """
        offsets = [self.offsets[name] + ids * self.stride(name) for name, ids in at.items()]
        offsets = np.stack(offsets, 1)
        return np.full(offsets.shape, self.descriptor), offsets

    def _fill(self, name: str, array: np.ndarray, runs: list[tuple[int, int, int]]) -> None:
        """Fill an array from the `runs` of rows of a dataset, see `find_runs`.

        Raises UserError if the file ends before.
        """
        if not self.close.alive:
            # The number of a closed descriptor may belong to another file by now.
            raise UserError(f"{self.path} was closed; open it again")
        # Slices of a memoryview take a tenth of the time of slices of an array.
        room, stride = memoryview(array.reshape(-1).view(np.uint8)), self.stride(name)
        with name_errors(self.path):
            for start, end, row in runs:
                rest, offset = room[start * stride : end * stride], row * stride
                # One call reads at most 2 GiB.
                while rest:
                    place = self.offsets[name] + offset
                    if not (got := os.preadv(self.descriptor, [rest], place)):
                        raise UserError(
                            f"{self.path} was truncated while it was open; copy it again and rerun"
                        )
                    rest, offset = rest[got:], offset + got


def find_runs(ids: np.ndarray) -> list[tuple[int, int, int]]:
    """Find the runs of consecutive ids: their first place in `ids`, the place after, the first id.

    Each run is read at once.
    """
    if len(ids) == 1:
        return [(0, 1, int(ids[0]))]
    bounds = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), len(ids)]
    return [(start, end, int(ids[start])) for start, end in pairwise(bounds) if start < end]


def count_undone(blocks: Iterable[tuple[int, np.ndarray]], rows: int) -> str:
    """Count the rows that are not labeled in the blocks of `done`; empty if there are none.

    A sparse file of a few kilobytes may state billions of rows, so the first block with such rows
    is enough.
    """
    for first, done in blocks:
        if undone := int((done != 1).sum()):
            return f"{undone}{' or more' if first + len(done) < rows else ''}"
    return ""


def open_store(path: Path) -> int:
    """Open a regular file for reading; UserError if it is missing or a folder."""
    try:
        with open_regular(path) as file:
            return os.dup(file.fileno())
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; make it with densefeed label") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; name the HDF5 file of score maps") from None
    except OSError as error:
        # Errors of the system keep their number, by which commands know the remedy.
        if error.errno is not None:
            raise
        raise UserError(explain_os_error(error)) from None


def check_schema(path: Path, header: StoreHeader, layout: Layout) -> dict[str, tuple]:
    """Return dtype and shape of the datasets of a store, after a check of all that it has.

    Raises UserError that names `path` unless exactly the datasets that the header requires are
    there, of its types and shapes, apart from each other.
    """
    found, missing = layout.datasets, Dataset(None, (), 0)
    label, packed, names = (found.get(name, missing) for name in ("label", "rows", "path"))
    rows = label.shape[0] if label.shape else 0
    # The width depends on the longest path.
    width = names.dtype.itemsize if names.dtype is not None and names.dtype.kind == "S" else 1
    types = dataset_types(header, rows, f"S{min(width, PATH_WIDTH)}", packed.shape[:1])
    types = {name: (np.dtype(dtype), shape) for name, (dtype, shape) in types.items()}
    for name, (dtype, shape) in types.items():
        at = found.get(name, missing)
        # A comparison with None would make it float64.
        if at.dtype is None or at[:2] != (dtype, shape):
            kind = "another type" if at.dtype is None else at.dtype
            is_there = f"{at.shape} of {kind}" if name in found else "missing"
            raise UserError(
                f"{path}: its header requires {name!r} to be {shape} of {dtype}, "
                f"but it is {is_there}; label the images again"
            )
    if unknown := sorted(found.keys() - types.keys()):
        problem = f"holds {shorten(unknown[0])}, which is not part of a store"
    elif not rows:
        problem = "holds no rows"
    elif overlap(found):
        problem = "has datasets that overlap"
    else:
        return types
    raise UserError(f"{path} {problem}; label the images again")


def overlap(datasets: dict[str, Dataset]) -> bool:
    """Whether datasets of known types share bytes of the file."""
    spans = sorted(
        (offset, offset + math.prod(shape, start=dtype.itemsize))
        for dtype, shape, offset in datasets.values()
    )
    return any(end > start for (_, end), (start, _) in pairwise(spans))

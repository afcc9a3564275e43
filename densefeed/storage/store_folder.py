"""Read a store of score maps that is a folder: a manifest, and shards that never change.

    maps/manifest.json               what the maps are, and the shards in the order of their rows
    maps/shards/<name>-<sum>.h5      an ordinary store of consecutive images

`StoreFolder` has the interface of `StoreFile`: a row is found by its shard and its offset in it,
so nothing is ever merged. relabel/workers.py writes such folders; FORMAT.md describes the bytes.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from densefeed.storage.row_codecs import FormError
from densefeed.storage.store_file import Arrays, StoreFile, StoreHeader, count_undone
from densefeed.system.errors import UserError
from densefeed.system.files import allow_open_files, check_own_folder, hash_file, name_errors
from densefeed.system.json_files import read_json
from densefeed.system.object_url import ObjectURL, find_url

MANIFEST = "manifest.json"
VERSION = 1
# Bytes of a manifest: 260 per shard, and the names of the classes. A billion images are 122,000
# shards by default.
MOST_BYTES = 2**26
# Files of a shard whose sizes are in its fingerprint.
SIZED_FILES = 16
# A name that a manifest may give: no other file can be meant by it.
SHARD_FILE = re.compile(r"shards/[0-9a-f]{16}-[0-9a-f]{16}\.h5")
HASH = re.compile(r"[0-9a-f]{64}")
REMEDY = "run the labeling again, or fetch it again if it is a copy"


class StoredShard(NamedTuple):
    """A finished shard."""

    file: str  # relative to the store
    rows: int
    bytes: int
    sha256: str  # of the file
    fingerprint: str  # of its images


@dataclass(frozen=True)
class Manifest:
    """What a store holds: the header of the whole, and its shards in the order of their rows."""

    header: StoreHeader
    shards: tuple[StoredShard, ...]

    def to_json(self) -> bytes:
        """Encode as JSON: the same store has the same bytes."""
        header = json.loads(self.header.to_json())
        shards = [shard._asdict() for shard in self.shards]
        return json.dumps({"version": VERSION, "header": header, "shards": shards}).encode()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a store; UserError if it is missing, damaged or of another version."""
    path = folder / MANIFEST
    try:
        return parse_manifest(read_json(path, REMEDY, largest=MOST_BYTES), path)
    except FileNotFoundError:
        raise UserError(
            f"{folder} is a folder without {MANIFEST}: name a file of score maps, or finish the "
            "labeling with densefeed label"
        ) from None


def parse_manifest(values: dict, path: Path | ObjectURL) -> Manifest:
    """Check a manifest from JSON; UserError, which names `path`, for one that none can be."""
    if problem := find_manifest_fault(values):
        raise UserError(f"{path}: {problem}; {REMEDY}")
    header = StoreHeader.from_json(json.dumps(values["header"]).encode(), path)
    return Manifest(header, tuple(StoredShard(**shard) for shard in values["shards"]))


def find_manifest_fault(values: dict) -> str | None:
    """Return what is invalid in a parsed manifest, but for its header; None if sound."""
    if values.get("version") != VERSION:
        return f"it has another version than {VERSION}"
    if values.keys() != {"version", "header", "shards"} or not isinstance(values["shards"], list):
        return "it must hold version, header and a list of shards"
    if not values["shards"]:
        return "it names no shard"
    for number, shard in enumerate(values["shards"]):
        if not is_shard(shard):
            return f"shard {number} is impossible"
    files = Counter(shard["file"] for shard in values["shards"])
    # The name of a shard is a hash of its images.
    (file, count), *_ = files.most_common(1)
    return f"it names {file} {count} times" if count > 1 else None


def is_shard(shard: object) -> bool:
    """Whether a value from JSON has the entries of a StoredShard."""
    if not isinstance(shard, dict) or shard.keys() != set(StoredShard._fields):
        return False
    texts = [shard[name] for name in ("file", "sha256", "fingerprint")]
    numbers = [shard[name] for name in ("rows", "bytes")]
    return (
        all(isinstance(text, str) for text in texts)
        and all(type(number) is int and number > 0 for number in numbers)
        and SHARD_FILE.fullmatch(shard["file"]) is not None
        and HASH.fullmatch(shard["sha256"]) is not None
    )


def check_local_rows(path: Path) -> None:
    """Raise UserError for score maps in object storage, whose URL was read as a path."""
    if url := find_url(path):
        # s3:///x was read as s3:/x too, and fetch would then not know the bucket x.
        place = url if url.key else "s3://BUCKET/FOLDER"
        raise UserError(
            f"{url} is in object storage; copy it with `densefeed score-maps fetch {place} "
            "maps`, and name the copy"
        )


def open_rows(path: Path) -> "StoreFile | StoreFolder":
    """Open score maps, finished or not: a file, or a folder with a manifest.

    UserError for a URL of object storage.
    """
    check_local_rows(path)
    return StoreFolder(path) if path.is_dir() else StoreFile(path)


class StoreFolder:
    """The open shards of a store, as one StoreFile.

    Raises UserError if the manifest or a shard is missing, damaged, or another than the manifest
    declares. The bytes of rows are not read: every row has a checksum, and `find_changed` compares
    whole files.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.manifest = path, read_manifest(path)
        check_own_folder(path / "shards")
        self.header, shards = self.manifest.header, self.manifest.shards
        # Rows are read by threads of the native library, so all files stay open.
        allow_open_files(len(shards))
        self.files = [self._open(shard) for shard in shards]
        self.close = partial(close_all, self.files)
        # For each dataset of rows its first element in every shard, and behind the last one.
        self._first = {
            name: np.array([0, *accumulate(file.types[name][1][0] for file in self.files)])
            for name in self.files[0].types
        }
        self.types = {}
        for name, (_, shape) in self.files[0].types.items():
            # Paths are as wide as the longest one of a shard.
            dtype = np.result_type(*(file.types[name][0] for file in self.files))
            self.types[name] = dtype, (int(self._first[name][-1]), *shape[1:])
        self.rows = self.types["label"][1][0]
        self._descriptors = np.array([file.descriptor for file in self.files])
        self._offsets = {
            name: np.array([file.offsets[name] for file in self.files]) for name in self._first
        }

    def _open(self, shard: StoredShard) -> StoreFile:
        """Open a shard; UserError if it is another file than the manifest declares."""
        file = StoreFile(self.path / shard.file)
        expected = replace(self.header, fingerprint=shard.fingerprint)
        if (file.header, file.rows, file.size) != (expected, shard.rows, shard.bytes):
            raise UserError(
                f"{file.path} is not the shard that {self.path / MANIFEST} names; remove it and "
                f"{REMEDY}"
            )
        return file

    @property
    def size(self) -> int:
        """Bytes of all shards."""
        return sum(file.size for file in self.files)

    def stride(self, name: str) -> int:
        """Return the bytes of a row of a dataset; of `rows`, 1."""
        return self.files[0].stride(name)

    def read(self, name: str, first: int = 0, end: int | None = None) -> np.ndarray:
        """Read the rows `first` to `end` - 1 of a dataset, by default all."""
        if name in ("levels", "error"):
            return self._read_whole(name)
        bounds = self._first[name]
        first, end = int(first), int(bounds[-1] if end is None else end)
        begin, stop = np.searchsorted(bounds, (first, end), side="right") - 1
        parts = []
        for number in range(begin, min(stop + 1, len(self.files))):
            low, high = bounds[number : number + 2].tolist()
            part = self.files[number].read(name, max(first, low) - low, min(end, high) - low)
            # The offset of a packed row, in its own shard.
            parts.append(part + self._first["rows"][number] if name == "start" else part)
        return np.concatenate(parts) if len(parts) != 1 else parts[0]

    def _read_whole(self, name: str) -> np.ndarray:
        """Read a dataset that describes all rows: `levels`, which are equal, or `error`."""
        values = [file.read(name) for file in self.files]
        if name == "levels":
            # A damaged one, which the caller refuses, if there is one.
            return next((v for v in values if not np.array_equal(v, values[0])), values[0])
        errors = FormError(*np.array(values).T)
        share = np.array([file.rows for file in self.files]) / self.rows
        # The caller refuses errors that are not finite.
        with np.errstate(all="ignore"):
            probability_mean = (errors.probability_mean * share).sum()
            variation_mean = (errors.variation_mean * share).sum()
        most = errors.probability_max.max(), errors.variation_max.max()
        return np.array([most[0], probability_mean, most[1], variation_mean])

    def blocks(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """Yield a dataset in blocks: the number of the first row, and rows of one shard."""
        for low, file in zip(self._first[name].tolist(), self.files, strict=False):
            for first, block in file.blocks(name):
                yield low + first, block

    def paths(self) -> list[str]:
        """Read the path of each row's image; UserError for one that no file can have."""
        return [path for file in self.files for path in file.paths()]

    def take(self, names: Iterable[str], ids: np.ndarray) -> list[np.ndarray]:
        """Read the rows `ids`, int64, of each of the datasets."""
        arrays, number_N = [], self._find_shards("label", ids)
        for name in names:
            dtype, shape = self.types[name]
            arrays.append(np.empty((len(ids), *shape[1:]), dtype))
            for number in np.unique(number_N).tolist():
                here = number_N == number
                local = ids[here] - self._first[name][number]
                (arrays[-1][here],) = self.files[number].take((name,), local)
        return arrays

    def places(self, at: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """Return open descriptors and file offsets, int64 `[N, len(at)]`; see StoreFile."""
        descriptors, offsets = [], []
        for name, ids in at.items():
            number_N = self._find_shards(name, ids)
            local = ids - self._first[name][number_N]
            descriptors.append(self._descriptors[number_N])
            offsets.append(self._offsets[name][number_N] + local * self.stride(name))
        return np.stack(descriptors, 1), np.stack(offsets, 1)

    def _find_shards(self, name: str, at: np.ndarray) -> np.ndarray:
        """Return the number of the shard of each element of a dataset."""
        return np.searchsorted(self._first[name], at, side="right") - 1


def find_changed(folder: Path, manifest: Manifest) -> dict[Path, str]:
    """Return the shards in a folder that are not those of the manifest, and what is wrong."""
    faults = {
        folder / shard.file: find_fault(folder / shard.file, shard) for shard in manifest.shards
    }
    return {path: fault for path, fault in faults.items() if fault}


def find_fault(path: Path, shard: StoredShard) -> str:
    """Return how a file differs from the recorded shard; empty if it does not.

    It is hashed last: a sparse file of a few kilobytes may have terabytes.
    """
    if not path.is_file():
        return "is missing"
    with name_errors(path):
        if path.stat().st_size != shard.bytes:
            return f"does not have the {shard.bytes:,} bytes that were recorded"
    try:
        file = StoreFile(path)
    except UserError:
        return "is not a complete file of score maps"
    with closing(file):
        if undone := count_undone(file.blocks("done"), file.rows):
            return f"has {undone} rows that are not labeled"
    return "" if hash_file(path) == shard.sha256 else "does not match its checksum"


def close_all(files: list[StoreFile]) -> None:
    """Close all files."""
    for file in files:
        file.close()

"""A store that many workers write: the shards of its images, their records, and the manifest.

    maps/plan.json                          header of the maps, and the shards of the images
    maps/leases/<name>.<generation>         who labels a shard
    maps/parts/<name>.<generation>.h5.part  rows of an unfinished shard
    maps/shards/<name>-<sum>.h5             a finished shard
    maps/shards/<name>.json                 its record
    maps/manifest.json                      all records: the finished store

A finished file is published under a name that contains its checksum. Its shard is finished once its
record exists, which is created once, so a late worker's file is the same one, or it is refused. The
last record completes the store: its manifest is written, and nothing is merged.

In object storage all of these are objects, except unfinished rows, which are on the worker's disk.

The name of a shard is a hash of its header and images. When images are removed, added or mended,
shards whose images are the same keep their names, and only the others are labeled again.
"""

import hashlib
import json
import re
import time
import zlib
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np

from densefeed.storage.images import FileSizes, Images
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.storage.store_file import StoreFile, StoreHeader
from densefeed.storage.store_folder import MANIFEST, SIZED_FILES, Manifest, StoredShard, is_shard
from densefeed.system.errors import UserError
from densefeed.system.files import check_own_folder, hash_file, scratch_folder
from densefeed.system.json_files import parse_json
from densefeed.system.leases import FOLDER as LEASES
from densefeed.system.leases import list_holders
from densefeed.system.object_folder import TEMPORARY as PARTS
from densefeed.system.object_folder import ObjectFolder, Objects, open_objects
from densefeed.system.object_url import ObjectURL
from densefeed.system.options import Location
from densefeed.system.terminal import print

PLAN, SHARDS = "plan.json", "shards"
# Images of a shard, on average: 59 MB of raw rows at S = 18, k = 5.
SHARD_IMAGES = 8192
# Endings of score maps in one file; any other name is that of a folder of shards.
FILE_ENDINGS = (".h5", ".hdf5")
# Requests in flight where many small files are read.
THREADS = 32
# Digits of a hash in names. Of a million shards two have the same 64 bits once in 3 x 10^7 stores.
DIGITS = 16
# Names that workers give to files of shards, leases and parts. A folder may hold files of others,
# such as the shards of a dataset, and only these are removed.
OWN = re.compile(
    r"[0-9a-f]{16}(-[0-9a-f]{16}\.h5|\.json|\.[0-9]+(\.h5)?)(\.[0-9]+)?(\.part)?"
    r"|[0-9a-f]{32}\.part"
)
# Seconds over which the rate of finished shards is measured.
RATE_SECONDS = 600.0


class PlannedShard(NamedTuple):
    """A shard of a dataset that is to be labeled."""

    name: str
    rows: range  # its images in the dataset
    header: StoreHeader  # of its file


class Plan(NamedTuple):
    """The division of a dataset into shards: every worker computes the same."""

    header: StoreHeader  # of the whole store
    shard_images: int
    shards: list[PlannedShard]
    # Sampled file sizes; a change reveals the shard of a replaced image.
    sizes: FileSizes

    def to_json(self) -> bytes:
        """Encode as JSON what a display needs, and what all workers must have in common."""
        header = json.loads(self.header.to_json())
        shards = [[shard.name, len(shard.rows)] for shard in self.shards]
        sizes = list(self.sizes.items())
        plan = {"header": header, "shard_images": self.shard_images, "shards": shards}
        return json.dumps(plan | {"sizes": sizes}).encode()


class StoredPlan(NamedTuple):
    """A plan as `to_json` wrote it."""

    header: StoreHeader
    shard_images: int
    shards: dict[str, int]  # images by name, in order
    sizes: FileSizes  # as in Plan
    # Whether shards share a name: an earlier version gave one to all shards of the same images.
    repeats: bool


class Status(NamedTuple):
    """Progress of all workers."""

    shards: int
    shards_done: int
    images: int
    images_done: int  # of finished and unfinished shards
    workers: int
    rate: float  # images per second of all workers that label now

    def lines(self) -> list[str]:
        """Describe it for the terminal."""
        remaining = ""
        if self.rate:
            seconds = round((self.images - self.images_done) / self.rate)
            remaining = f", {timedelta(seconds=seconds)} left"
        return [
            f"{self.shards_done:,} of {self.shards:,} shards are finished, "
            f"{self.images_done:,} of {self.images:,} images are labeled",
            f"{self.workers:,} workers, {self.rate:,.1f} images/s{remaining}",
        ]


# ---------------------------------------------------------------------------------------- the plan


def is_file_name(out: Location) -> bool:
    """Whether score maps at `out` are one file, and not a folder of shards."""
    return isinstance(out, Path) and out.suffix in FILE_ENDINGS and not out.is_dir()


def shards_folder(out: Path) -> Path:
    """Return the folder of the shards that the file `out` is made of."""
    return out.with_name(f"{out.name}.shards")


def plan_shards(images: Images, header: StoreHeader, size: int, batch: int = 0) -> Plan:
    """Divide images into shards of about `size` images each.

    With `batch`, shards begin at multiples of it, so that batches hold the same images as in one
    pass over all: a convolution may add in another order for others.
    """
    ranges = split_images(images.paths, size)
    if batch:
        count, even = len(images.paths), -(-size // batch) * batch
        ranges = [range(first, min(first + even, count)) for first in range(0, count, even)]
    shards, repeats = [], Counter()
    for rows in ranges:
        own = replace(header, fingerprint=images.fingerprint(rows, SIZED_FILES))
        content = own.to_json()
        # A list may repeat the images of a whole shard.
        text = f"{content}{repeats[content] or ''}"
        repeats[content] += 1
        name = hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
        shards.append(PlannedShard(name, rows, own))
    return Plan(header, size, shards, images.sample_sizes())


def split_images(paths: list[str], size: int) -> list[range]:
    """Divide images into consecutive ranges of half to twice `size` images, on average `size`.

    A range ends where the hash of the next path is a multiple of half the size. So where ranges end
    depends on the paths nearby, not on how many images come before: a removed image changes its own
    range and, with few exceptions, no other.
    """
    least, most = max(1, size // 2), 2 * size
    # Not a list of Python's numbers, which would take 40 bytes of memory for each.
    crcs = (zlib.crc32(path.encode(errors="surrogateescape")) for path in paths)
    hashes = np.fromiter(crcs, np.int64, len(paths))
    marks, ranges, first = np.flatnonzero(hashes % least == 0), [], 0
    while first < len(paths):
        after = marks[np.searchsorted(marks, first + least) :]
        end = int(after[0]) if len(after) else len(paths)
        ranges.append(range(first, min(end, first + most, len(paths))))
        first = ranges[-1].stop
    return ranges


def read_plan(objects: Objects) -> StoredPlan:
    """Read the plan of a labeling; UserError if there is none, or it is damaged."""
    path = objects.root / PLAN
    if (content := objects.read(PLAN)) is None:
        refuse_copy(objects)
        raise UserError(f"{path}: there is no such file; start the labeling with densefeed label")
    try:
        values = parse_json(content)
        rows = {str(name): int(count) for name, count in values["shards"]}
        sizes = {int(row): None if size is None else int(size) for row, size in values["sizes"]}
        text, size = json.dumps(values["header"]).encode(), values["shard_images"]
        if min(rows.values(), default=1) < 1:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path} is damaged; remove it and run the labeling again") from None
    repeats = len(rows) < len(values["shards"])
    return StoredPlan(StoreHeader.from_json(text, path), size, rows, sizes, repeats)


def refuse_copy(objects: Objects) -> None:
    """Raise UserError for a copy of `fetch`: it has a manifest, but neither plan nor records."""
    if objects.read(PLAN) is not None or objects.read(MANIFEST) is None:
        return
    if not any(name.endswith(".json") for name in objects.list(SHARDS)):
        raise UserError(
            f"{objects.root} is a copy of a finished store; name the folder or URL that was labeled"
        )


def read_all(objects: Objects, names: list[str]) -> list[bytes | None]:
    """Read many files, several at once; None for one that does not exist."""
    with ThreadPoolExecutor(THREADS, "read") as executor:
        return list(executor.map(objects.read, names))


def share_plan(objects: Objects, plan: Plan) -> None:
    """Write the plan, unless another worker did; UserError if that one labels something else.

    Images may have changed, as long as a shard of the earlier plan is left, or none was finished.
    The sizes of few files of each shard are compared, and those of more files of the whole dataset:
    shards in which only one of these differs keep their names, and are labeled again.
    """
    refuse_copy(objects)
    if objects.create(PLAN, plan.to_json()) or objects.read(PLAN) == plan.to_json():
        return
    theirs, out = read_plan(objects), objects.root
    replace(plan.header, fingerprint=theirs.header.fingerprint).check_same(theirs.header, out)
    if plan.shard_images != theirs.shard_images:
        raise UserError(
            f"{out} was started with --shard-images {theirs.shard_images}, not "
            f"{plan.shard_images}; give the same or choose another --out"
        )
    new = [shard for shard in plan.shards if shard.name not in theirs.shards]
    there = objects.list(SHARDS)
    if len(new) == len(plan.shards) and any(f"{name}.json" in there for name in theirs.shards):
        raise UserError(f"{out} was started for another dataset; remove it or choose another --out")
    same = not new and len(plan.shards) == len(theirs.shards)
    changed = find_changed_shards(plan, theirs)
    for name in changed:
        remove_shard(objects, name, there)
        print(f"shard {name} has an image of another size than before; it is labeled again")
    objects.replace(PLAN, plan.to_json())
    if not same:
        print(f"{out}: images have changed, {len(new):,} of {len(plan.shards):,} shards are new")


def find_changed_shards(plan: Plan, theirs: StoredPlan) -> list[str]:
    """Return the shards of both plans of which an image has two sizes, where both have sampled it.

    Images are compared by their places in a shard: rows before it may have been added or removed.
    """
    mine = locate_sizes({shard.name: len(shard.rows) for shard in plan.shards}, plan.sizes)
    before = locate_sizes(theirs.shards, theirs.sizes)
    return sorted({at[0] for at in mine.keys() & before.keys() if mine[at] != before[at]})


def locate_sizes(shards: dict[str, int], sizes: FileSizes) -> dict[tuple[str, int], int | None]:
    """Key the sizes of rows by the shard and the place in it; `shards` are the rows of each."""
    names, ends = list(shards), np.cumsum(list(shards.values()))
    found = {}
    for row, size in sizes.items():
        number = int(np.searchsorted(ends, row, side="right"))
        if number < len(names):
            first = int(ends[number]) - shards[names[number]]
            found[names[number], row - first] = size
    return found


def remove_shard(objects: Objects, name: str, there: Iterable[str]) -> None:
    """Remove all files of a shard, finished or not; `there` are the names in the folder SHARDS."""
    # The record first: a shard without one is not finished.
    objects.remove(record_key(name))
    for file in there:
        if file.startswith(f"{name}-"):
            objects.remove(f"{SHARDS}/{file}")
    if isinstance(objects, ObjectFolder):
        check_own_folder(objects.root / PARTS)
        for path in (objects.root / PARTS).glob(f"{name}.*"):
            path.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------- publication


def record_key(name: str) -> str:
    """Return the file of a shard's record."""
    return f"{SHARDS}/{name}.json"


def read_record(objects: Objects, name: str) -> StoredShard | None:
    """Read the record of a shard, None if it is not finished; UserError if it is damaged."""
    if (content := objects.read(record_key(name))) is None:
        return None
    if record := decode_record(name, content):
        return record
    raise UserError(f"{objects.root / record_key(name)} is damaged; run the labeling again")


def decode_record(name: str, content: bytes) -> StoredShard | None:
    """Decode the record of this shard; None if it is damaged."""
    try:
        values = parse_json(content)
    except ValueError:
        return None
    if not is_shard(values):
        return None
    record = StoredShard(**values)
    return record if record.file == f"{SHARDS}/{name}-{record.sha256[:DIGITS]}.h5" else None


def publish(objects: Objects, shard: PlannedShard, path: Path) -> bool:
    """Give the finished file at `path` its name and create its record.

    Returns False if another worker has published other bytes before, which stay.
    """
    digest, size, fingerprint = hash_file(path), path.stat().st_size, shard.header.fingerprint
    name = f"{SHARDS}/{shard.name}-{digest[:DIGITS]}.h5"
    objects.add_file(path, name, digest)
    record = StoredShard(name, len(shard.rows), size, digest, fingerprint)
    if objects.create(record_key(shard.name), json.dumps(record._asdict()).encode()):
        return True
    first = read_record(objects, shard.name)
    if first is None or first.sha256 == digest:
        return True
    objects.remove(name)
    print(f"shard {shard.name}: another worker published other bytes before; these are dropped")
    return False


def drop_damaged_shards(objects: Objects, shards: list[PlannedShard]) -> bool:
    """Remove finished shards that are damaged, so that they are labeled again.

    Their files are gone or truncated, or their records are damaged or of other images. Returns
    whether all shards are finished and sound.
    """
    there = objects.sizes(SHARDS)
    finished = [shard for shard in shards if f"{shard.name}.json" in there]
    contents = read_all(objects, [record_key(shard.name) for shard in finished])
    sound = 0
    for shard, content in zip(finished, contents, strict=True):
        if content is None:
            continue
        fault, path = "is damaged", objects.root / record_key(shard.name)
        record = decode_record(shard.name, content)
        planned = len(shard.rows), shard.header.fingerprint
        if record and (record.rows, record.fingerprint) == planned:
            fault, path = "is missing or truncated", objects.root / record.file
            # A list may be of before the file was published.
            if record.bytes == there.get(path.name) or record.bytes == objects.size(record.file):
                sound += 1
                continue
        # Another worker may have labeled it again since.
        if objects.read(record_key(shard.name)) == content:
            remove_shard(objects, shard.name, there)
            print(f"{path} {fault}; {len(shard.rows):,} images are labeled again")
    return sound == len(shards)


def redo_images(folder: Location, images: tuple[str, ...], /) -> None:
    """Remove the shards of images, by their paths in the dataset, so that they are labeled again.

    The same command as before then labels these shards, and writes the manifest again.

    Args:
        folder: a folder of score maps, or its s3://BUCKET/FOLDER.
        images: paths in the dataset, such as cat/001.jpg.
    """
    if not images:
        raise UserError("no image was named; name images by their paths in the dataset")
    objects, left = open_objects(folder), set(images)
    there = objects.list(SHARDS)
    for name in read_plan(objects).shards:
        # From object storage whole shards are read. A list may have an image in several.
        if (record := read_record(objects, name)) is None:
            continue
        if not (here := set(images).intersection(read_paths(objects, record))):
            continue
        left -= here
        remove_shard(objects, name, there)
        print(f"{folder / record.file} was removed; label its {record.rows:,} images again")
    if left:
        raise UserError(
            f"no finished shard of {folder} has the image {min(left)}; name images by their paths "
            "in the dataset, such as cat/001.jpg"
        )


def read_paths(objects: Objects, record: StoredShard) -> list[str]:
    """Read the paths of a finished shard's images. From object storage the file is copied first."""
    if isinstance(objects, ObjectFolder):
        return StoreFile(objects.root / record.file).paths()
    with scratch_folder() as folder:
        copy = folder / Path(record.file).name
        objects.fetch_file(record.file, copy, record.sha256)
        return StoreFile(copy).paths()


def check_stored(objects: Objects, plan: Plan) -> None:
    """Raise UserError if another worker has replaced the plan."""
    if objects.read(PLAN) != plan.to_json():
        raise UserError(
            f"another worker labels other images into {objects.root}: they have changed since this "
            "worker joined, or --data of the two is different; run it again, or choose another "
            "--out"
        )


def complete(objects: Objects, plan: Plan) -> ScoreMapStore | None:
    """Write the manifest of a store that has all shards, and remove all that does not belong to it.

    Returns None if another worker wrote it before, or if it is in object storage, which readers do
    not open. UserError if the images have changed since this worker joined.
    """
    check_stored(objects, plan)
    names = [shard.name for shard in plan.shards]
    contents = read_all(objects, [record_key(name) for name in names])
    pairs = zip(names, contents, strict=True)
    records = [content and decode_record(name, content) for name, content in pairs]
    if not all(records):
        raise UserError(f"shards of {objects.root} were removed or damaged; run it again")
    content = Manifest(plan.header, tuple(records)).to_json()
    first = objects.read(MANIFEST) != content
    if first:
        objects.replace(MANIFEST, content)
    shards = {record_key(name) for name in names} | {record.file for record in records}
    for name in objects.list(SHARDS):
        if OWN.fullmatch(name) and f"{SHARDS}/{name}" not in shards:
            objects.remove(f"{SHARDS}/{name}")
    objects.remove_all(PARTS, OWN)
    objects.remove_all(LEASES, OWN)
    return ScoreMapStore(objects.root) if first and isinstance(objects, ObjectFolder) else None


# ------------------------------------------------------------------------------------------ status


def measure_status(out: Path | ObjectURL) -> Status:
    """Count what all workers have done and do now, from the files of the store alone."""
    objects = open_objects(shards_folder(out) if is_file_name(out) else out)
    shards, there = read_plan(objects).shards, objects.list(SHARDS)
    # A shard whose file is gone is labeled again.
    files = {name.partition("-")[0] for name in there if name.endswith(".h5")}
    left = {name for name in shards if f"{name}.json" not in there or name not in files}
    done = [rows for name, rows in shards.items() if name not in left]
    beats = list_holders(objects, left)
    # A lease may be damaged.
    images = min(sum(done) + sum(beat.done for beat in beats), sum(shards.values()))
    rate = sum(beat.rate for beat in beats)
    # A lease shows a rate once it is renewed. Shards of a few seconds are finished before that.
    if not all(beat.rate for beat in beats):
        finished = [(there[f"{name}.json"], shards[name]) for name in shards if name not in left]
        rate = max(rate, measure_rate(finished))
    workers = len({beat.worker for beat in beats})
    return Status(len(shards), len(done), sum(shards.values()), images, workers, rate)


def measure_rate(finished: list[tuple[float, int]]) -> float:
    """Return the images per second of the last minutes; 0.0 if fewer than two shards tell it.

    `finished` are the times (seconds of `time.time`) and numbers of images of finished shards. When
    the first of them was begun is not known, so its images do not count.
    """
    now = time.time()
    recent = sorted(pair for pair in finished if now - pair[0] < RATE_SECONDS)
    if len(recent) < 2:
        return 0.0
    return sum(images for _, images in recent[1:]) / max(now - recent[0][0], 1e-9)


def print_status(out: Location, /) -> None:
    """Print the progress of the workers that label into OUT, their rate and the time left.

    It can be run on any machine that sees OUT.

    Args:
        out: the --out of the labeling.
    """
    if is_file_name(out) and out.exists() and not shards_folder(out).exists():
        print(f"{out} is finished")
        return
    for line in measure_status(out).lines():
        print(line)

"""Measure memory and start of labeling images in object storage, by synthetic listings.

    python -m benchmarks.label_plan
    python -m benchmarks.label_plan --scale 0.01 --no-record

Names are like ImageNet's, n00000012/n00000012_345.JPEG. For `start` a request for 1,000 of them
takes --latency, and otherwise no time. Nothing is decoded or scored, and a shard is published as a
file of a few bytes to a local folder. Each measurement is a process of its own; its memory is the
peak of the resident set, PyTorch and all imports included, without a teacher.

`whole` is --listing whole: list, fingerprint and divide all images. `folders` is --listing folders:
`start` ends when the first shard is claimed and its folder listed. `all` labels every shard and
writes the manifest. `last` joins a labeling of 1,000 folders of a million images whose shards are
finished but for those of one folder, labels these and writes the manifest: this is the largest
state that a worker of a billion images has.
"""

import json
import multiprocessing
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks.harness import Output, command, environment, print_rows, save, spread
from densefeed.relabel.folder_workers import FolderWorker, join_folders
from densefeed.relabel.labeling import Pass
from densefeed.storage import class_folders, object_images, shard_plan
from densefeed.storage.class_folders import ClassFolders
from densefeed.storage.folder_plan import FoldersPlan, folder_key
from densefeed.storage.images import Images
from densefeed.storage.object_images import read_objects
from densefeed.storage.shard_plan import SHARD_IMAGES, SHARDS, plan_shards, publish
from densefeed.storage.store_file import StoreHeader
from densefeed.storage.store_folder import StoredShard
from densefeed.system.devices import peak_rss
from densefeed.system.object_folder import ObjectFolder
from densefeed.system.object_store import ObjectURL

ROOT = ObjectURL("s3://bucket/photos")
# Objects of a reply.
PAGE = 1000
# Mode, folders, and images of each, which --scale multiplies.
CASES = (
    ("whole", 1000, 1_000),
    ("whole", 1000, 3_000),
    ("start", 1000, 1_000),
    ("start", 1000, 10_000),
    ("start", 1000, 1_000_000),
    ("all", 1000, 10_000),
    ("last", 1000, 1_000_000),
)


@dataclass(frozen=True, kw_only=True)
class PlanBenchmark(Output):
    """Options of the benchmark."""

    scale: float = 1.0  # part of the images of each folder
    latency: float = 0.05  # seconds of a request for 1,000 names
    rounds: int = 1  # runs of each


class Started(Exception):  # noqa: N818  (it is no error)
    """The first shard is claimed."""


class NoRender(NamedTuple):
    """Stands for a Render."""

    images: Any


class Listing(NamedTuple):
    """Object storage that computes its names."""

    folders: int
    images: int
    latency: float

    def list_objects(self, root: ObjectURL) -> dict[str, int]:
        """Return bytes by name, as object_images.list_objects."""
        if root == ROOT:
            names = self.list_folder(root)[1]
            parts = {name: self.list_objects(ROOT / name) for name in names}
            return {f"{n}/{key}": size for n in names for key, size in parts.pop(n).items()}
        time.sleep(self.latency * -(-self.images // PAGE))
        name = root.rpartition("/")[2]
        # Storage sorts by bytes: _10 comes before _9.
        keys = sorted(f"{name}_{number}.JPEG" for number in range(self.images))
        return {key: 100_000 + number % 1000 for number, key in enumerate(keys)}

    def list_folder(self, root: ObjectURL) -> tuple[list[Any], list[str]]:
        """Return no objects and the folders, as object_store.list_folder."""
        time.sleep(self.latency * -(-self.folders // PAGE))
        return [], [f"n{number:08d}" for number in range(self.folders)]


class StubWorker(FolderWorker):
    """A worker that labels nothing."""

    only_start = False

    def label_claimed(self, shard, lease, update):
        """Publish a few bytes."""
        self.open_work()
        if self.only_start:
            raise Started
        path = self.parts / f"{shard.name}.h5"
        path.write_text(shard.name)
        publish(self.objects, shard, path)
        lease.remove()
        self.finished.add(shard.name)


def make_header(names: list[str]) -> StoreHeader:
    """Return the header of a store of these classes."""
    options = dict(side=18, top_k=5, num_classes=len(names), absent="tail", teacher="t")
    options |= dict(input_size=576, geometry="squash", fingerprint="", class_names=tuple(names))
    return StoreHeader(**options)


def begin(folders: ClassFolders) -> Pass:
    """Return a pass without a teacher."""
    header = make_header(folders.class_names)
    return Pass(folders, header, None, NoRender(None), (1, 576, 576, 3), 32, 1)


def run_case(mode: str, listing: Listing, out: Path, pipe: Any) -> None:
    """Send seconds and peak bytes of one measurement; a process of its own runs it."""
    with (
        patch.object(object_images, "list_objects", listing.list_objects),
        patch.object(object_images, "list_folder", listing.list_folder),
        patch.object(class_folders, "list_folder", listing.list_folder),
        patch.object(shard_plan, "ScoreMapStore", lambda _: None),
        patch("densefeed.relabel.folder_workers.FolderWorker", StubWorker),
    ):
        if mode == "last":
            finish_most(ClassFolders(ROOT), ObjectFolder(out))
        imported, began = peak_rss(), time.perf_counter()
        if mode == "whole":
            images = Images.from_found(ROOT, read_objects(ROOT, "train"))
            images.fingerprint()
            plan_shards(images, make_header(images.class_names), SHARD_IMAGES)
        else:
            StubWorker.only_start = mode == "start"
            with suppress(Started):
                join_folders(begin(ClassFolders(ROOT)), out)
        pipe.send((time.perf_counter() - began, peak_rss(), imported))


def finish_most(folders: ClassFolders, objects: ObjectFolder) -> None:
    """Write a store whose shards are finished but for those of one folder."""
    plan = FoldersPlan(make_header(folders.class_names), SHARD_IMAGES, [None] * len(folders))
    plan.share(objects)
    plan.update(objects, 0, folders.read(0))
    counts = [len(shard.rows) for shard in plan.parts[0]]
    root = objects.root
    (root / SHARDS).mkdir()
    for number in range(1, len(folders)):
        rows = [[f"{number:08x}{n:08x}", count, "f" * 64] for n, count in enumerate(counts)]
        (root / folder_key(number)).write_text(json.dumps({"shards": rows}))
        for name, count, fingerprint in rows:
            file = f"{SHARDS}/{name}-{'0' * 16}.h5"
            (root / file).touch()
            record = StoredShard(file, count, 7200 * count, "0" * 64, fingerprint)
            (root / SHARDS / f"{name}.json").write_text(json.dumps(record._asdict()))


def measure(mode: str, listing: Listing) -> tuple[float, int, int]:
    """Run a measurement in a new process; return seconds, peak bytes, and those at its start."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "maps"
        process = context.Process(target=run_case, args=(mode, listing, out, send))
        process.start()
        send.close()
        try:
            return receive.recv()
        finally:
            process.join()


def main(benchmark: PlanBenchmark) -> None:
    """Measure all cases."""
    rows, facts = [], environment()
    for mode, folders, images in CASES:
        latency = benchmark.latency if mode == "start" else 0.0
        listing = Listing(folders, max(1, round(images * benchmark.scale)), latency)
        seconds, peaks, before = zip(
            *(measure(mode, listing) for _ in range(benchmark.rounds)), strict=True
        )
        name = f"{mode}, {folders:,} folders of {listing.images:,}"
        for what, values, unit in (
            ("time", seconds, "s"),
            ("peak memory", [n / 1e6 for n in peaks], "MB"),
            ("memory before", [n / 1e6 for n in before], "MB"),
        ):
            rows.append(
                {"name": f"{name}, {what}", "unit": unit, **spread(values), "runs": len(values)}
            )
        print_rows(rows[-3:])
    data = f"synthetic listing, {1000 * benchmark.latency:g} ms a request of {PAGE:,} names"
    save(benchmark, {"rows": rows, "environment": facts}, rows, **facts, data=data, threads=1)


if __name__ == "__main__":
    command(main, PlanBenchmark, __doc__)

"""Label a dataset too large to list at once: workers list one class folder at a time.

Memory is that of a worker, of the images of the largest folder, and of the plan's shards
(storage/folder_plan.py). The first shard is claimed once one folder is listed.
"""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from densefeed.relabel.labeling import Pass
from densefeed.relabel.workers import WORK, Worker
from densefeed.storage.folder_plan import FoldersPlan
from densefeed.storage.images import Images
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.storage.shard_plan import (
    FOLDERS,
    SHARD_IMAGES,
    SHARDS,
    PlannedShard,
    complete,
    drop_damaged_shards,
)
from densefeed.system.errors import UserError
from densefeed.system.leases import LEASE_SECONDS, Lease
from densefeed.system.object_folder import Objects, open_objects
from densefeed.system.object_store import ObjectURL, StorageError
from densefeed.system.progress import tally
from densefeed.system.terminal import print

# Seconds between listings of the finished shards: of a billion images 250 requests.
LOOK_SECONDS = 60.0


class FolderLeftError(Exception):
    """A folder has other images than its plan, or it cannot be listed."""


def join_folders(
    work: Pass,
    out: Path | ObjectURL,
    shard_images: int = SHARD_IMAGES,
    seconds: float = LEASE_SECONDS,
) -> ScoreMapStore | None:
    """Label shards of class folders, as `join_workers` does, until the store at `out` is finished.

    `work.images` are ClassFolders. Shards end where folders end; rows are in the same order.
    """
    objects, folders = open_objects(out), work.images
    plan = FoldersPlan(work.header, shard_images, [None] * len(folders))
    plan.share(objects)
    plan.load(objects, sorted(int(Path(name).stem) for name in objects.list(FOLDERS)))
    with objects.make_parts() as parts:
        FolderWorker(work, objects, plan, parts, seconds).run()
        # Only now the shards of all folders are known. Once: with the plan of before, shards that
        # another worker has removed would be labeled without end.
        if not drop_damaged_shards(objects, plan.shards):
            FolderWorker(work, objects, plan, parts, seconds).run()
    return complete(objects, plan)


class FolderWorker(Worker):
    """A process that labels shards of class folders."""

    def __init__(
        self, work: Pass, objects: Objects, plan: FoldersPlan, parts: Path, seconds: float
    ) -> None:
        super().__init__(work, objects, plan, parts, seconds)
        # Folder of the shard that is being labeled, the folder in memory with its images, and
        # folders that cannot be listed.
        self.number = 0
        self.folder: tuple[int, Images] | None = None
        self.unread: set[int] = set()
        # Names of finished shards, and when they were listed.
        self.finished, self.looked = set(), -LOOK_SECONDS

    def run(self) -> None:
        """Label shards until none is left."""
        # Workers that start together begin with different folders.
        order = random.sample(range(len(self.plan.parts)), len(self.plan.parts))
        with tally(WORK, None, self.count_done()) as update:
            while left := [number for number in order if not self.is_finished(number)]:
                claims = [self.label_folder(number, update) for number in left]
                if not any(claims):
                    time.sleep(min(self.objects.poll_seconds, self.seconds / 4))
        for fault in self.faults.values():
            raise fault

    def look(self) -> None:
        """List the finished shards, unless that was done a short time ago."""
        if (now := time.monotonic()) - self.looked >= min(LOOK_SECONDS, self.seconds):
            names = self.objects.list(SHARDS)
            self.finished = {n.removesuffix(".json") for n in names if n.endswith(".json")}
            self.looked = now

    def is_finished(self, number: int) -> bool:
        """Whether this worker can do nothing more for a folder."""
        shards = self.plan.parts[number]
        return number in self.unread or (
            shards is not None
            and all(shard.name in self.finished or shard.name in self.faults for shard in shards)
        )

    def is_done(self, shard: PlannedShard) -> bool:
        """Whether a shard is finished, by any worker."""
        if shard.name not in self.finished and super().is_done(shard):
            self.finished.add(shard.name)
        return shard.name in self.finished

    def count_done(self) -> int:
        """Return the number of images of finished shards, as far as this worker knows."""
        return sum(len(s.rows) for s in self.plan.shards if s.name in self.finished)

    def label_folder(self, number: int, update: Callable[[int], None]) -> bool:
        """Label those shards of a folder that no other worker has; False if there are none."""
        self.look()
        try:
            if self.plan.parts[number] is None:
                self.plan.load(self.objects, [number])
            if self.plan.parts[number] is None:
                self.open_folder(number)
            claimed = False
            for shard in self.plan.parts[number]:
                if shard.name not in self.finished and shard.name not in self.faults:
                    self.number = number
                    claimed |= self.label(shard, update)
            return claimed
        except FolderLeftError:
            # Its plan is that of the images in memory now.
            return number in self.unread or self.label_folder(number, update)

    def label_claimed(
        self, shard: PlannedShard, lease: Lease, update: Callable[[int], None]
    ) -> None:
        """Label a shard and publish it."""
        super().label_claimed(shard, lease, update)
        self.finished.add(shard.name)

    def open_work(self) -> Pass:
        """Return the pass over the images of the folder that is being labeled."""
        images = self.open_folder(self.number)
        return replace(self.work, images=images, render=self.work.render._replace(images=images))

    def open_folder(self, number: int) -> Images:
        """List the images of a folder and share its plan, unless it is still in memory.

        Raises FolderLeftError if its plan was another one, or if it cannot be listed.
        """
        if self.folder is None or self.folder[0] != number:
            # Not both at once in memory.
            self.folder = None
            try:
                self.folder = number, self.work.images.read(number)
            except StorageError:
                raise
            except UserError as error:
                name = self.work.images.folders[number]
                print(f"folder {name} is left: {error}")
                self.unread.add(number)
                self.faults[name] = error
                raise FolderLeftError from error
            if not self.plan.update(self.objects, number, self.folder[1]):
                raise FolderLeftError
        return self.folder[1]

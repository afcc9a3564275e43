"""Label a dataset with any number of workers, which join and leave at any time.

A worker claims a shard of images by a lease (system/leases.py), labels it into a file of its own,
and publishes the file (storage/shard_plan.py), until no shard is left.
"""

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from densefeed.relabel.labeling import Pass, label_rows
from densefeed.storage.score_maps import ScoreMapStore, ScoreMapWriter, StoreHeader
from densefeed.storage.shard_plan import (
    SHARD_IMAGES,
    SHARDS,
    Plan,
    PlannedShard,
    check_stored,
    complete,
    drop_damaged_shards,
    plan_shards,
    publish,
    record_key,
    share_plan,
)
from densefeed.storage.shards import absorb, finish
from densefeed.system.errors import UserError
from densefeed.system.leases import LEASE_SECONDS, Lease, LeaseLostError, Leases
from densefeed.system.object_folder import Objects, open_objects
from densefeed.system.object_store import ObjectURL, StorageError
from densefeed.system.progress import tally
from densefeed.system.terminal import print


def join_workers(
    work: Pass,
    out: Path | ObjectURL,
    shard_images: int = SHARD_IMAGES,
    seconds: float = LEASE_SECONDS,
) -> ScoreMapStore | None:
    """Label shards that no other worker labels, until the whole store at `out` is finished.

    A worker that waits takes the shard of one that has not renewed its lease for `seconds`. Rows
    that were written by then are kept in a folder; in object storage the shard is labeled again. A
    shard with an image that cannot be read is left, and the error is raised when no other shard is
    left.

    Returns the store in the worker that completes it, None in the others, and None for a URL.
    """
    objects, plan = open_objects(out), plan_shards(work.images, work.header, shard_images)
    share_plan(objects, plan)
    drop_damaged_shards(objects, plan.shards)
    with objects.make_parts() as parts:
        Worker(work, objects, plan, parts, seconds).run()
    return complete(objects, plan)


# Name of the bar.
WORK = "relabel, images"


class Worker:
    """A process that labels shards of a plan."""

    def __init__(
        self, work: Pass, objects: Objects, plan: Plan, parts: Path, seconds: float
    ) -> None:
        self.work, self.objects, self.plan, self.parts = work, objects, plan, parts
        self.leases, self.seconds = Leases(objects, seconds), seconds
        self.faults: dict[str, UserError] = {}

    def run(self) -> None:
        """Label shards until none is left."""
        # Workers that start together begin at different shards.
        at = random.randrange(len(self.plan.shards))
        order = self.plan.shards[at:] + self.plan.shards[:at]
        total = len(self.work.images)
        with tally(WORK, total, self.count_done()) as update:
            while left := self.list_left(order):
                claimed = False
                for shard in left:
                    # Not only at the end: by then all of a large dataset may be labeled in vain.
                    check_stored(self.objects, self.plan)
                    claimed |= self.label(shard, update)
                if not claimed:
                    time.sleep(min(self.objects.poll_seconds, self.seconds / 4))
                update(self.count_done())
        for fault in self.faults.values():
            raise fault

    def list_left(self, shards: list[PlannedShard]) -> list[PlannedShard]:
        """List the shards that are not finished, without those that this worker cannot finish."""
        there = self.objects.list(SHARDS)
        return [s for s in shards if f"{s.name}.json" not in there and s.name not in self.faults]

    def is_done(self, shard: PlannedShard) -> bool:
        """Whether a shard is finished, by any worker."""
        return self.objects.read(record_key(shard.name)) is not None

    def count_done(self) -> int:
        """Return the number of images of finished shards."""
        there = self.objects.list(SHARDS)
        return sum(len(s.rows) for s in self.plan.shards if f"{s.name}.json" in there)

    def label(self, shard: PlannedShard, update: Callable[[int], None]) -> bool:
        """Claim, label and publish a shard; False if another worker has it."""
        if self.is_done(shard) or (lease := self.leases.claim(shard.name)) is None:
            return False
        if self.is_done(shard):
            # It was finished, and its leases removed, since the first look.
            lease.remove()
            return False
        try:
            with lease.keep():
                self.label_claimed(shard, lease, update)
        except StorageError:
            # Not a fault of the shard.
            raise
        except (FileNotFoundError, UserError) as error:
            # Of a worker that was stopped for long, others have finished the shard, and removed its
            # unfinished file.
            if isinstance(error, LeaseLostError) or self.is_done(shard):
                print(
                    f"the lease of shard {shard.name} is another worker's now; this one leaves it"
                )
            elif isinstance(error, UserError):
                print(f"shard {shard.name} is left: {error}")
                self.faults[shard.name] = error
            else:
                raise
        return True

    def label_claimed(
        self, shard: PlannedShard, lease: Lease, update: Callable[[int], None]
    ) -> None:
        """Label a shard, from the rows that earlier holders of its lease wrote, and publish it."""
        path = self.parts / f"{shard.name}.{lease.generation}.h5"
        # Rows are written raw, and converted when all are there.
        work, header = self.open_work(), replace(shard.header, form="raw")
        images = work.images
        part = slice(shard.rows.start, shard.rows.stop)
        writer = ScoreMapWriter(path, header, images.paths[part], images.labels[part])
        try:
            for earlier in range(1, lease.generation):
                absorb_part(writer, header, path.with_name(f"{shard.name}.{earlier}.h5"))
            done, others, began = int(writer.done.sum()), self.count_done(), time.monotonic()

            def report(count: int) -> None:
                lease.report(count, (count - done) / max(time.monotonic() - began, 1e-9))
                update(others + count)

            report(done)
            speed = label_rows(work, writer, shard.rows.start, report)
            finish(writer, path, shard.header.form).close()
        finally:
            writer.close()
        if publish(self.objects, shard, path):
            print(f"shard {shard.name}: {speed}")
        self.remove_work(lease)

    def open_work(self) -> Pass:
        """Return the pass over the images of the shard that is being labeled."""
        return self.work

    def remove_work(self, lease: Lease) -> None:
        """Remove the files of all holders of the lease of a finished shard."""
        # The parts first: a lease of this generation may be created again.
        for generation in range(1, lease.generation + 1):
            for ending in ("", ".part"):
                path = self.parts / f"{lease.name}.{generation}.h5{ending}"
                path.unlink(missing_ok=True)
        lease.remove()


def absorb_part(writer: ScoreMapWriter, header: StoreHeader, path: Path) -> None:
    """Copy the rows of an earlier holder's file; from one that is damaged, none."""
    for file in (path, Path(f"{path}.part")):
        with suppress(UserError):
            absorb(writer, header, [file])

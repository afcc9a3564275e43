"""Label a dataset with any number of workers, which join and leave at any time.

A worker claims a shard of images by a lease (system/leases.py), labels it into a file of its own,
and publishes the file (storage/shard_plan.py), until no shard is left.
"""

import random
import re
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

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
    is_file_name,
    plan_shards,
    publish,
    record_key,
    shards_folder,
    share_plan,
)
from densefeed.storage.shards import absorb, finish, remove_shards, write_file
from densefeed.system.errors import UserError
from densefeed.system.leases import LEASE_SECONDS, Lease, LeaseLostError, Leases
from densefeed.system.object_folder import Objects, open_objects
from densefeed.system.object_store import StorageError
from densefeed.system.object_url import ObjectURL
from densefeed.system.progress import tally
from densefeed.system.terminal import print


class Share(NamedTuple):
    """Part `index` of `of` of the shards, from 0: what one of several machines labels."""

    index: int = 0
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> "Share":
        """Parse `index/of`; UserError for anything else."""
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        index, of = map(int, found.groups()) if found else (0, 0)
        if index >= of:
            raise UserError(f"--shard {text} is not a share; write it as 0/8, ..., 7/8")
        return cls(index, of)


ALL = Share()


def label(
    work: Pass,
    out: Path | ObjectURL,
    *,
    shard_images: int = SHARD_IMAGES,
    share: Share = ALL,
    shows: bool = True,
    seconds: float = LEASE_SECONDS,
) -> ScoreMapStore | None:
    """Label all images into `out`: one file if its name ends in .h5, else a folder of shards.

    Any number of processes, on machines that share the place of `out`, call this at any time and
    divide the work. A file is made of a folder of raw shards beside it, which is then removed.

    Args:
        shard_images: images of a shard, on average.
        share: shards that this process may label; of fewer than all, the folder stays unfinished.
        shows: whether this process shows the progress of all.
        seconds: a worker that waits takes the shard of one that has not renewed its lease for so
            long. Rows that were written by then are kept in a folder; in object storage the shard
            is labeled again.

    Returns the store in the process that completes it; None in the others, for a share, and for a
    URL. A shard with an image that cannot be read is left, and the error raised when no other shard
    is left. Raises UserError if `out` is of another labeling.
    """
    images, header = work.images, work.header
    if share != ALL and isinstance(out, ObjectURL):
        raise UserError(f"--shard is for machines that share no storage; remove it to join {out}")
    if not is_file_name(out):
        plan = plan_shards(images, header, shard_images)
        return join_workers(work, out, plan, share, shows, seconds)
    if share != ALL:
        raise UserError(
            f"--shard writes a folder, which `densefeed score-maps merge` joins with others; "
            f"give --out {out.stem}"
        )
    if out.exists():
        store = reopen(out, header)
        print(f"{out} is finished already")
        return store
    plan = plan_shards(images, replace(header, form="raw"), shard_images, work.batch)
    try:
        join_workers(work, shards_folder(out), plan, share, shows, seconds, out.exists)
        if store := write_file(out, header.form):
            return store
    except (UserError, FileNotFoundError):
        if not out.exists():
            raise
    # Another worker has finished the file and removed the shards, of which this one may have begun
    # some again.
    reopen(out, header)
    return None


def reopen(out: Path, header: StoreHeader) -> ScoreMapStore:
    """Return the finished file and remove its shards; UserError if it is of another labeling."""
    with suppress(UserError):
        store = ScoreMapStore(out)
        if store.header == header:
            remove_shards(out)
            return store
    raise UserError(f"{out} exists already; remove it or choose another --out")


def join_workers(
    work: Pass,
    out: Path | ObjectURL,
    plan: Plan,
    share: Share,
    shows: bool,
    seconds: float,
    is_finished: Callable[[], bool] = lambda: False,
) -> ScoreMapStore | None:
    """Label those shards of `plan` into the folder `out` that no other worker labels.

    None if all `is_finished` once the plan is there.
    """
    objects = open_objects(out)
    share_plan(objects, plan)
    if is_finished():
        return None
    shards = plan.shards[share.index :: share.of]
    drop_damaged_shards(objects, shards)
    with objects.make_parts() as parts:
        Worker(work, objects, plan, shards, parts, seconds).run(shows)
    return complete(objects, plan) if share == ALL else None


# Name of the bar.
WORK = "relabel, images"


class Worker:
    """A process that labels those `shards` of a plan that no other one labels."""

    def __init__(
        self,
        work: Pass,
        objects: Objects,
        plan: Plan,
        shards: list[PlannedShard],
        parts: Path,
        seconds: float,
    ) -> None:
        self.work, self.objects, self.plan, self.parts = work, objects, plan, parts
        self.shards = shards
        self.leases, self.seconds = Leases(objects, seconds), seconds
        self.faults: dict[str, UserError] = {}

    def run(self, shows: bool) -> None:
        """Label shards until none is left."""
        # Workers that start together begin at different shards.
        at = random.randrange(max(1, len(self.shards)))
        order = self.shards[at:] + self.shards[:at]
        total = sum(len(shard.rows) for shard in self.shards)
        showing = tally(WORK, total, self.count_done()) if shows else nullcontext(lambda _: None)
        # Another worker removes the shards once it has made one file of them.
        done = 0
        with showing as update:
            while left := self.list_left(order):
                claimed = False
                for shard in left:
                    # Not only at the end: by then all of a large dataset may be labeled in vain.
                    check_stored(self.objects, self.plan)
                    claimed |= self.label(shard, update)
                if not claimed:
                    time.sleep(min(self.objects.poll_seconds, self.seconds / 4))
                done = max(done, self.count_done())
                update(done)
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
        return sum(len(s.rows) for s in self.shards if f"{s.name}.json" in there)

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
            # If this worker was suspended, others finished its shard and removed its unfinished
            # file.
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
        header, images = replace(shard.header, form="raw"), self.work.images
        part = slice(shard.rows.start, shard.rows.stop)
        writer = ScoreMapWriter(path, header, images.paths[part], images.labels[part])
        try:
            for earlier in range(1, lease.generation):
                for ending in ("", ".part"):
                    absorb(writer, header, self.parts / f"{shard.name}.{earlier}.h5{ending}")
            done, others, began = int(writer.done.sum()), self.count_done(), time.monotonic()

            def report(count: int) -> None:
                lease.report(count, (count - done) / max(time.monotonic() - began, 1e-9))
                update(others + count)

            if done:
                print(f"shard {shard.name}: {done:,} of {len(shard.rows):,} are labeled already")
            report(done)
            speed = label_rows(self.work, writer, shard.rows.start, report)
            finish(writer, path, shard.header.form)
        finally:
            writer.close()
        if publish(self.objects, shard, path):
            print(f"shard {shard.name}: {speed}")
        self.remove_work(lease)

    def remove_work(self, lease: Lease) -> None:
        """Remove the files of all holders of the lease of a finished shard."""
        # The parts first: a lease of this generation may be created again.
        for generation in range(1, lease.generation + 1):
            for ending in ("", ".part"):
                path = self.parts / f"{lease.name}.{generation}.h5{ending}"
                path.unlink(missing_ok=True)
        lease.remove()

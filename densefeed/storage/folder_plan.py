"""The plan of a labeling that lists each class folder when its images are labeled.

    maps/plan.json              header of the maps, and the number of class folders
    maps/folders/<number>.json  name, images and fingerprint of each shard of a folder

The shards of a folder depend on its own images alone, so all workers compute the same ones, in any
order. Whoever lists a folder first writes its plan, and the others read that. A worker lists a
folder again before it labels a shard of it: if images have changed since, it replaces the plan.
Folders whose shards are all finished are not listed again until the store is finished, when the
plans are removed; the next run then lists every folder and finds what has changed.
"""

import json
from dataclasses import dataclass, replace

from densefeed.storage.images import Images
from densefeed.storage.shard_plan import (
    FOLDERS,
    PLAN,
    PlannedShard,
    check_same_plan,
    parse_folder,
    plan_shards,
    read_all,
    read_plan,
    refuse_copy,
)
from densefeed.storage.store_file import StoreHeader
from densefeed.storage.store_folder import join_fingerprints
from densefeed.system.object_folder import Objects
from densefeed.system.terminal import print


def folder_key(number: int) -> str:
    """Return the file of a folder's plan."""
    return f"{FOLDERS}/{number:05d}.json"


@dataclass(eq=False)
class FoldersPlan:
    """What one worker knows of the shards of all class folders.

    Attributes:
        head: header of the shards, without their fingerprints.
        parts: the shards of each folder; None for one that no worker has listed.
    """

    head: StoreHeader
    shard_images: int
    parts: list[list[PlannedShard] | None]

    @property
    def shards(self) -> list[PlannedShard]:
        """The shards that are known, in the order of the folders."""
        return [shard for part in self.parts for shard in part or []]

    @property
    def header(self) -> StoreHeader:
        """The header of the whole store, once all folders were listed."""
        joined = join_fingerprints(shard.header.fingerprint for shard in self.shards)
        return replace(self.head, fingerprint=joined)

    def to_json(self) -> bytes:
        """Encode what all workers must have in common, which is known before any listing."""
        header = json.loads(self.head.to_json())
        plan = {"header": header, "shard_images": self.shard_images, "folders": len(self.parts)}
        return json.dumps(plan).encode()

    def list_parts(self) -> list[str]:
        """List the files of the plan that a finished store has no more."""
        return [folder_key(number) for number in range(len(self.parts))]

    def encode_folder(self, number: int) -> bytes:
        """Encode the plan of a folder."""
        rows = [[s.name, len(s.rows), s.header.fingerprint] for s in self.parts[number]]
        return json.dumps({"shards": rows}).encode()

    def share(self, objects: Objects) -> None:
        """Write the plan without its folders; UserError if the store has one of other options."""
        refuse_copy(objects)
        if not objects.create(PLAN, self.to_json()) and objects.read(PLAN) != self.to_json():
            theirs, folders = read_plan(objects), len(self.parts)
            check_same_plan(self.head, self.shard_images, folders, theirs, objects.root)
            objects.replace(PLAN, self.to_json())

    def load(self, objects: Objects, numbers: list[int]) -> None:
        """Read the plans of folders that other workers have listed. UserError for a damaged one."""
        keys = [folder_key(number) for number in numbers]
        for number, key, content in zip(numbers, keys, read_all(objects, keys), strict=True):
            first, shards = 0, []
            for name, count, fingerprint in parse_folder(content, objects.root / key):
                # The name is not computed again: with 1,000 classes that takes half a millisecond.
                own = replace(self.head, fingerprint=fingerprint)
                shards.append(PlannedShard(name, range(first, first + count), own))
                first += count
            self.parts[number] = shards or None

    def update(self, objects: Objects, number: int, images: Images) -> bool:
        """Divide the images of a folder, which was listed now, and share that.

        Returns False if another division was known, because images have changed.
        """
        known, self.parts[number] = (
            self.parts[number],
            plan_shards(images, self.head, self.shard_images).shards,
        )
        if known == self.parts[number]:
            return True
        key, content = folder_key(number), self.encode_folder(number)
        if not objects.create(key, content) and objects.read(key) != content:
            objects.replace(key, content)
            known = known or []
        if known is not None:
            path = objects.root / key
            print(f"{path}: images have changed; {len(self.parts[number]):,} shards are planned")
        return known is None

    def is_stored(self, objects: Objects) -> bool:
        """Whether no other worker has found other images.

        The plans of folders are removed by the worker that completes the store, so none is there
        for one that comes later.
        """
        numbers = range(len(self.parts))
        contents = read_all(objects, [folder_key(number) for number in numbers])
        pairs = zip(numbers, contents, strict=True)
        return all(content in (None, self.encode_folder(number)) for number, content in pairs)

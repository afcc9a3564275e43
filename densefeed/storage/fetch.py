"""Copy a store of score maps from object storage: only the shards that the copy lacks, whole.

Every file gets its name once its bytes match the manifest's checksum, and the manifest is written
last. So a copy that was interrupted continues, and readers never open a part of one.
"""

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from densefeed.storage.dataset_names import find_system_entry
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.storage.shard_plan import PLAN, SHARDS
from densefeed.storage.store_folder import (
    MANIFEST,
    SHARD_FILE,
    Manifest,
    StoredShard,
    parse_manifest,
    read_manifest,
)
from densefeed.system.errors import UserError
from densefeed.system.files import (
    cache_folder,
    hash_file,
    is_irregular,
    is_own,
    lock,
    make_folder,
    name_errors,
    open_own,
    remove_any,
    replace_file,
)
from densefeed.system.json_files import parse_json
from densefeed.system.object_store import ObjectStore, StorageError
from densefeed.system.object_url import ObjectURL, find_url
from densefeed.system.progress import bar
from densefeed.system.terminal import print

# Files that are copied at once.
THREADS = 8
# Seconds after which a process compares the checksums of a local copy again.
TOGETHER_SECONDS = 60.0


def make_local(place: Path | ObjectURL, cache: Path | None = None) -> Path:
    """Return a store on the disk: `place`, or a copy of that URL in the folder `cache`.

    The copy is brought up to date and mended as `fetch` does. One process of a machine does it, and
    the others wait: of processes that start together, as the ranks of a training, one reads the
    shards. By default the folder is that of all copies. Raises UserError for an unfinished store.
    """
    url = place if isinstance(place, ObjectURL) else find_url(place)
    if url is None:
        return place
    copy = (cache or cache_folder()) / f"maps-{hashlib.sha256(url.encode()).hexdigest()[:32]}"
    objects = ObjectStore(url)
    manifest = read_remote_manifest(objects)
    if not copy.is_dir():
        remove_any(copy)
    make_folder(copy)
    for path in (copy / "lock", copy / MANIFEST):
        if is_irregular(path):
            remove_any(path)
    descriptor = open_own(copy / "lock", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    with name_errors(copy), open(descriptor, "r+b") as file:
        lock(file.fileno(), copy, fcntl.LOCK_EX)
        # Who held the lock before has written which manifest it has compared, and when.
        file.seek(0)
        digest = hashlib.sha256(manifest.to_json()).digest()
        known = file.read() == digest
        together = known and time.time() - os.fstat(file.fileno()).st_mtime < TOGETHER_SECONDS
        copy_store(objects, manifest, copy, has_size if together else is_whole)
        if not together:
            file.truncate(0)
            file.write(digest)
    return copy


def fetch(url: ObjectURL, out: Path) -> ScoreMapStore:
    """Copy a finished store at a URL to the folder `out`, and return the copy.

    An earlier copy is brought up to date, and what is damaged in it replaced. Raises UserError if
    the store is not finished, or if `out` holds anything else.
    """
    objects = ObjectStore(url)
    manifest = read_remote_manifest(objects)
    check_copy(out, manifest)
    make_folder(out)
    copy_store(objects, manifest, out, is_whole)
    return ScoreMapStore(out)


def copy_store(
    objects: ObjectStore,
    manifest: Manifest,
    out: Path,
    is_here: Callable[[Path, StoredShard], bool],
) -> None:
    """Copy the shards for whose paths `is_here` is False, and the manifest; remove other shards."""
    url = objects.root
    # Also a link to a folder, whose files are not of this copy.
    if not (out / SHARDS).is_dir() or (out / SHARDS).is_symlink():
        remove_any(out / SHARDS)

    def copy(shard: StoredShard) -> bool:
        """Copy a shard; False if it is here."""
        if is_here(out / shard.file, shard):
            return False
        if (out / shard.file).is_dir():
            remove_any(out / shard.file)
        with replace_file(out / shard.file) as part:
            try:
                objects.fetch_file(shard.file, part, shard.sha256)
            except StorageError:
                if objects.size(shard.file) == shard.bytes:
                    raise
                raise UserError(
                    f"{url / shard.file} is missing or truncated; run the labeling again"
                ) from None
        return True

    executor = ThreadPoolExecutor(THREADS, "fetch")
    try:
        shards = bar(executor.map(copy, manifest.shards), "fetch, shards", len(manifest.shards))
        copied = sum(shards)
    finally:
        executor.shutdown(cancel_futures=True)
    with replace_file(out / MANIFEST) as part:
        part.write_bytes(manifest.to_json())
    remove_others(out, manifest)
    print(f"{copied:,} of {len(manifest.shards):,} shards were copied from {url}")


def read_remote_manifest(objects: ObjectStore) -> Manifest:
    """Read the manifest of a store in object storage; UserError if it has none or a damaged one."""
    url = objects.root / MANIFEST
    if (content := objects.read(MANIFEST)) is None:
        raise UserError(
            f"{url}: there is no such object; correct the URL, or finish the labeling with "
            "densefeed label"
        )
    try:
        values = parse_json(content)
        if not isinstance(values, dict):
            raise ValueError("it does not hold an object")
    except ValueError as error:
        raise UserError(f"{url} is damaged ({error}); run the labeling again") from None
    return parse_manifest(values, url)


def check_copy(out: Path, manifest: Manifest) -> None:
    """Raise UserError if `out` holds what is not a copy, or a copy of another labeling."""
    theirs = None
    # A damaged manifest is replaced, as damaged shards are.
    with suppress(UserError):
        theirs = read_manifest(out).header
    if theirs:
        replace(manifest.header, fingerprint=theirs.fingerprint).check_same(theirs, out)
    others = theirs is None and holds_others(out)
    if (out / PLAN).exists() or (out.exists() and not out.is_dir()) or others:
        raise UserError(f"{out} is not a copy of a store; remove it or name another folder")


def holds_others(out: Path) -> bool:
    """Whether a folder without a sound manifest holds files that no copy leaves.

    A damaged manifest lies beside shards. Hidden files and those of systems count as nothing.
    """
    if not out.is_dir():
        return False
    shards = out / SHARDS
    if os.path.lexists(shards) and not shards.is_dir():
        return True
    there = [path.name for path in out.iterdir() if path.name != SHARDS]
    there += [f"{SHARDS}/{path.name}" for path in shards.iterdir()] if shards.is_dir() else []
    there = [name for name in there if not find_system_entry(name)]
    if MANIFEST in there and not shards.is_dir():
        return True
    own = re.compile(rf"({SHARD_FILE.pattern}|{re.escape(MANIFEST)})(\.[0-9]+\.part)?")
    return not all(map(own.fullmatch, there))


def has_size(path: Path, shard: StoredShard) -> bool:
    """Whether there is a regular file of the shard's size."""
    return is_own(path) and path.stat().st_size == shard.bytes


def is_whole(path: Path, shard: StoredShard) -> bool:
    """Whether there is a file of the shard's bytes."""
    return has_size(path, shard) and hash_file(path) == shard.sha256


def remove_others(out: Path, manifest: Manifest) -> None:
    """Remove shards of an earlier copy that the store has no more."""
    files = {shard.file for shard in manifest.shards}
    for path in (out / SHARDS).iterdir():
        name = f"{SHARDS}/{path.name}"
        if SHARD_FILE.fullmatch(name) and name not in files:
            path.unlink(missing_ok=True)

"""Join the shards of a labeling: rows of earlier workers, folders of several machines, one file."""

import errno
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np

from densefeed.storage.maintenance import check_form, convert, summary
from densefeed.storage.row_codecs import Form
from densefeed.storage.score_maps import (
    ScoreMapStore,
    ScoreMapWriter,
    copy_rows,
    find_valid_rows,
    split_runs,
)
from densefeed.storage.shard_plan import (
    MANIFEST,
    PLAN,
    SHARDS,
    StoredPlan,
    is_file_name,
    read_plan,
    read_record,
    shards_folder,
)
from densefeed.storage.store_file import StoreFile, StoreHeader
from densefeed.storage.store_folder import Manifest, StoredShard, check_local_rows, find_fault
from densefeed.system.errors import UserError
from densefeed.system.files import (
    NO_HARD_LINKS,
    check_absent,
    create_folder,
    lock,
    make_folder,
    name_errors,
    open_own,
    sync_folder,
)
from densefeed.system.object_folder import ObjectFolder
from densefeed.system.progress import bar
from densefeed.system.terminal import print

# Rows copied at once: 7 MB at S = 18, k = 5.
CHUNK = 1024
# Errors of a link to another disk, or on a file system without links.
NO_LINK = (errno.EXDEV, errno.EMLINK, *NO_HARD_LINKS)


def absorb(writer: ScoreMapWriter, header: StoreHeader, path: Path) -> None:
    """Copy the finished rows that `writer` lacks from an earlier worker's file of the same shard.

    Nothing is copied from a file that is gone, damaged, or of another header.
    """
    with suppress(UserError):
        file = StoreFile(path)
        header.check_same(file.header, path)
        wanted = np.flatnonzero(~writer.done)
        # A power cut may have left rows that are marked done and are not whole.
        wanted = wanted[find_valid_rows(file)[wanted]]
        for ids in split_runs(wanted, CHUNK):
            writer.write(ids, copy_rows(file, ids))


def finish(writer: ScoreMapWriter, out: Path, form: Form) -> None:
    """Give the file of a writer that has all rows its final name and form."""
    if form == "raw":
        writer.finish()
        return
    convert(ScoreMapStore(writer.part), out, form)
    # Only now: a conversion that fails or is killed is repeated from these rows.
    writer.part.unlink()


def write_file(out: Path, form: Form) -> ScoreMapStore | None:
    """Write the finished store in `shards_folder(out)` to the file `out`, and remove the folder.

    The same rows give the same bytes. Returns None if another process has done it meanwhile.
    """
    folder = shards_folder(out)
    # Not the folder itself, which NFS does not lock.
    with name_errors(folder), open(open_own(folder / MANIFEST, os.O_RDWR), "r+b") as file:
        lock(file.fileno(), folder, fcntl.LOCK_EX)
        if out.exists():
            return None
        store = convert(ScoreMapStore(folder), out, form)
        remove_shards(out)
        return store


def remove_shards(out: Path) -> None:
    """Remove the folder of the shards of a finished file."""
    folder = shards_folder(out)
    # First: without a plan no worker labels another shard.
    (folder / PLAN).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------- several folders


def merge_folders(folders: tuple[Path, ...], /, out: Path, form: Form | None = None) -> None:
    """Join the shards that lie in FOLDERS into one store, a file (OUT.h5) or a folder.

    For machines without a common disk: each labels --shard 0/N, ..., of the same images into a
    folder of its own. The folders stay.

    Args:
        folders: the --out folders of the machines, or one finished folder.
        out: where the store is written; a name that ends in .h5 is one file, else a folder.
        form: form of the maps in a file; by default they keep theirs.
    """
    if not folders:
        raise UserError("no folder of shards was named; name one or several")
    for folder in folders:
        check_local_rows(folder)
    is_file = is_file_name(out)
    if form and not is_file:
        raise UserError(f"--form {form} is for one file; let --out end in .h5, or remove --form")
    if is_file:
        check_absent(out)
    if is_file and len(folders) == 1 and (folders[0] / MANIFEST).exists():
        store = ScoreMapStore(folders[0])
        print(summary(convert(store, out, form or store.header.form)))
        return
    plan, found = find_shards(folders)
    if form:
        check_form(folders[0], plan.header, form)
    target = shards_folder(out) if is_file else out
    manifest = Manifest(plan.header, tuple(found)).to_json()
    # An earlier call may have ended after this.
    if ObjectFolder(target).read(MANIFEST) != manifest:
        with create_folder(target) as part:
            for shard, path in bar(list(found.items()), "merge, shards"):
                copy_shard(path, part / shard.file, shard)
            sync_folder(part / SHARDS)
            (part / MANIFEST).write_bytes(manifest)
    store = write_file(out, form or plan.header.form) if is_file else ScoreMapStore(out)
    print(summary(store or ScoreMapStore(out)))


def find_shards(folders: tuple[Path, ...]) -> tuple[StoredPlan, dict[StoredShard, Path]]:
    """Return the plan that all folders have, and the file of each of its shards, in order.

    Raises UserError for a folder of another labeling, and for shards that are in none.
    """
    plan, found = read_plan(ObjectFolder(folders[0])), {}
    for folder in folders:
        theirs = read_plan(ObjectFolder(folder))
        plan.header.check_same(theirs.header, folder)
        if theirs.repeats:
            raise UserError(
                f"{folder} was labeled by a version that lost rows of images that a list repeats; "
                "label them again"
            )
        if theirs.shards != plan.shards:
            raise UserError(
                f"{folder} has other shards than {folders[0]}: their images or --shard-images "
                "differ; label the same images with the same options"
            )
        for name in plan.shards:
            record = read_record(ObjectFolder(folder), name)
            if record and (folder / record.file).is_file():
                found.setdefault(name, (record, folder / record.file))
    if lacking := [name for name in plan.shards if name not in found]:
        numbers = list(plan.shards)
        raise UserError(
            f"{len(lacking):,} of {len(plan.shards):,} shards are in none of these folders, the "
            f"first is shard {numbers.index(lacking[0])} ({lacking[0]}); label what is left, or "
            "name the folder that has it"
        )
    return plan, dict(found[name] for name in plan.shards)


def copy_shard(path: Path, target: Path, shard: StoredShard) -> None:
    """Copy a finished shard, or link it on the same disk. UserError if its bytes are others."""
    if fault := find_fault(path, shard):
        raise UserError(f"{path} {fault}; remove it, and label its images again")
    make_folder(target.parent)
    # A shard never changes, so two folders can share its file, where the file system has links.
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno not in NO_LINK:
            # It names the source.
            error.filename = str(target)
            raise
        shutil.copyfile(path, target)

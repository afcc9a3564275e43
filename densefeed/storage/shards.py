"""Shards of a labeling: the rows and the file of each process, and merging the files into one.

Shard 2 of 8 of `maps.h5` is `maps.shard-2-of-8.h5`: a raw store of consecutive rows, created and
resumed like any other store. Readers refuse it because of the `shard` in its header. Merging copies
the rows into one file: readers find a row by its offset in one contiguous dataset, while HDF5's
virtual datasets would need HDF5 itself, and all shards, for every read.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from densefeed.storage.maintenance import convert, summary
from densefeed.storage.row_codecs import Form
from densefeed.storage.score_maps import (
    ScoreMapStore,
    ScoreMapWriter,
    StoreHeader,
    copy_rows,
    find_valid_rows,
    names_match,
    split_runs,
)
from densefeed.storage.store_file import StoreFile
from densefeed.storage.store_folder import check_local_rows
from densefeed.system.errors import BusyError, UserError
from densefeed.system.progress import bar
from densefeed.system.terminal import print

# Rows copied at once: 7 MB at S = 18, k = 5.
CHUNK = 1024
# Shards begin at multiples of this many rows, so batches of a power of two hold the same images for
# any number of shards.
GRAIN = 256


class Shard(NamedTuple):
    """Shard `index` of `of`, counted from 0."""

    index: int
    of: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Parse `index/of`; UserError for anything else."""
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        index, of = map(int, found.groups()) if found else (0, 0)
        if index >= of:
            raise UserError(f"--shard {text} is not a shard; write it as 0/8, ..., 7/8")
        return cls(index, of)

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"

    def rows(self, count: int) -> range:
        """Return the rows of this shard out of `count`. UserError for fewer images than shards."""
        if count < self.of:
            raise UserError(f"{count} images cannot be divided among {self.of} shards; use fewer")
        grain = GRAIN
        # Keeps the difference between the largest and the smallest shard below an eighth.
        while grain > max(1, count // (8 * self.of)):
            grain //= 2
        first, end = (
            min(round(n * count / self.of / grain) * grain, count)
            for n in (self.index, self.index + 1)
        )
        return range(first, count if self.index + 1 == self.of else end)

    def file(self, out: Path) -> Path:
        """Return its finished file, `<name>.part` until then. A single shard is `out` itself."""
        if self.of == 1:
            return out
        return out.with_name(f"{out.stem}.shard-{self.index}-of-{self.of}{out.suffix}")

    def header(self, whole: StoreHeader, count: int) -> StoreHeader:
        """Return the header of its file, given the header of all `count` rows."""
        if self.of == 1:
            return whole
        return replace(whole, shard=(*self, self.rows(count).start, count))


def find_leftovers(out: Path) -> dict[Path, Shard]:
    """Find the files of shards of `out`, of any number of shards, and `<out>.part`, in order.

    Finished and unfinished files are included.
    """
    pattern = re.compile(
        re.escape(out.stem) + r"\.shard-(\d+)-of-(\d+)" + re.escape(out.suffix) + r"(\.part)?"
    )
    there = out.parent.iterdir() if out.parent.is_dir() else ()
    found = {
        file: Shard(int(match[1]), int(match[2]))
        for file in there
        if (match := pattern.fullmatch(file.name))
    }
    if (part := Path(f"{out}.part")).exists():
        found[part] = Shard(0, 1)
    return dict(sorted(found.items(), key=lambda item: (item[1].of, item[1].index, item[0])))


def open_leftover(path: Path, header: StoreHeader) -> StoreFile | None:
    """Open a file of the labeling of `header`; None if it is gone.

    Raises UserError that names the file if it is damaged or of another labeling.
    """
    try:
        file = StoreFile(path)
    except UserError:
        # Else it was finished, or merged and removed, in the meantime.
        if path.exists():
            raise
        return None
    replace(header, shard=None).check_same(replace(file.header, shard=None), path)
    return file


def check_leftovers(out: Path, header: StoreHeader) -> None:
    """Raise UserError for a file of `find_leftovers` from another labeling than `header`.

    It is called before this labeling creates a file.
    """
    for path in find_leftovers(out):
        open_leftover(path, header)


def absorb(writer: ScoreMapWriter, header: StoreHeader, files: Iterable[Path]) -> None:
    """Copy finished rows that `writer` lacks from other files of the same labeling.

    `header` is the writer's. Raises UserError that names a file of another labeling, or a damaged
    one.
    """
    for path in files:
        if not (file := open_leftover(path, header)):
            continue
        # Difference between a row's number in `path` and in `writer`.
        shift = first_row(header) - first_row(file.header)
        # The rows of `writer` that `path` has too.
        low, high = max(0, -shift), min(len(writer.done), file.rows - shift)
        if low >= high or not (wanted := np.flatnonzero(~writer.done[low:high]) + low).size:
            continue
        # A power cut may have left rows that are marked done and are not whole.
        wanted = wanted[find_valid_rows(file)[wanted + shift]]
        for ids in split_runs(wanted, CHUNK):
            writer.write(ids, copy_rows(file, ids + shift))


def first_row(header: StoreHeader) -> int:
    """Return the number, in the dataset, of a file's first row."""
    return header.shard[2] if header.shard else 0


def finish(writer: ScoreMapWriter, out: Path, form: Form) -> ScoreMapStore:
    """Give the file of a writer that has all rows its final name and form; remove its shards."""
    if form == "raw":
        writer.finish()
    else:
        convert(ScoreMapStore(writer.part), out, form)
        # Only now: a conversion that fails or is killed is repeated from these rows.
        writer.part.unlink()
    store = ScoreMapStore(out)
    # The shards go only when the whole file has its name.
    clean_up(out, store.header)
    return store


def clean_up(out: Path, header: StoreHeader) -> None:
    """Remove the files of shards of a finished `out`, except those of another labeling."""
    # Shards are raw, whatever the form of the merged file.
    whole = replace(header, form="raw", shard=None)
    for path in find_leftovers(out):
        # A file that cannot be read may be of another labeling.
        try:
            if replace(StoreFile(path).header, shard=None) == whole:
                path.unlink(missing_ok=True)
        except UserError:
            continue


def find_missing(out: Path, of: int) -> Shard | None:
    """Return the first of the `of` shards of `out` that is not finished, None if all are.

    The name of one file may say that there are 10^20.
    """
    shards = (Shard(index, of) for index in range(of))
    return next((shard for shard in shards if not shard.file(out).exists()), None)


def check_complete(out: Path, of: int) -> None:
    """Raise UserError for the first of the `of` shards of `out` that is not finished."""
    if lacking := find_missing(out, of):
        path = lacking.file(out)
        unfinished = "; it is not finished" if Path(f"{path}.part").exists() else ""
        raise UserError(
            f"{path} is missing{unfinished}: run the same labeling with --shard {lacking}, "
            "and merge again"
        )


def merge(out: Path, of: int, form: Form = "raw") -> ScoreMapStore:
    """Copy the `of` finished shards of `out` into one file, and remove them.

    The same rows give the same bytes. Raises UserError that names a shard that is missing, damaged
    or of another labeling than shard 0, and BusyError if another process merges.
    """
    check_complete(out, of)
    files = [Shard(index, of).file(out) for index in range(of)]
    whole, paths, labels = read_shards(files)
    writer = ScoreMapWriter(out, whole, paths, labels)
    try:
        absorb(writer, whole, bar(files, "merge, shards"))
        if not writer.done.all():
            # Rows that do not match their CRC were not copied.
            row = int(writer.done.argmin())
            path = next(
                file for i, file in enumerate(files) if row in Shard(i, of).rows(len(paths))
            )
            raise UserError(
                f"{path}: the map of {paths[row]} is damaged; remove this file and label its "
                "images again"
            )
        return finish(writer, out, form)
    finally:
        writer.close()


def read_shards(files: list[Path]) -> tuple[StoreHeader, list[str], np.ndarray]:
    """Read the header, image paths and labels (int64) of all rows from all shards in order."""
    paths, labels, whole = [], [], None
    for path in files:
        file = StoreFile(path)
        header = file.header
        whole = whole or replace(header, shard=None)
        whole.check_same(replace(header, shard=None), path)
        if not header.shard or header.shard[2] != len(paths):
            raise UserError(
                f"{path} does not begin where the previous shard ends; remove it and label it again"
            )
        check_names(file)
        paths += file.paths()
        labels.append(file.read("label"))
    if len(paths) != header.shard[3]:
        raise UserError(
            f"{path} ends at row {len(paths)} of {header.shard[3]}; remove it and label it again"
        )
    return whole, paths, np.concatenate(labels)


def check_names(file: StoreFile) -> None:
    """Raise UserError for labels or paths of a shard that are damaged: merging copies them."""
    labels, classes = file.read("label"), len(file.header.class_names)
    if not names_match(file) or (len(labels) and not 0 <= labels.min() <= labels.max() < classes):
        raise UserError(
            f"{file.path} is damaged: its labels or paths are not those that were written; remove "
            "it and label its images again"
        )


def merge_if_complete(out: Path, of: int, form: Form) -> ScoreMapStore | None:
    """Merge if all shards are finished.

    Returns the merged store, or None if a shard is not finished or another process merges.
    """
    try:
        if not out.exists() and not find_missing(out, of):
            return merge(out, of, form)
    except BusyError:
        return None
    except UserError:
        # Else another process has merged the shards and removed their files.
        if not out.exists():
            raise
    return ScoreMapStore(out) if out.exists() else None


def merge_files(out: Path, /, form: Form | None = None) -> None:
    """Merge the finished shards of OUT into OUT, by default as raw rows, and remove them.

    The process that finishes the last shard does this by itself. Of a folder that workers labeled,
    all rows are written to the file OUT.h5 beside it, by default in their form, and the folder
    stays.
    """
    check_local_rows(out)
    if out.is_dir():
        # A path such as `.` has no name.
        whole = out if out.name not in ("", "..") else out.resolve()
        store = ScoreMapStore(out)
        file = whole.with_name(f"{whole.name}.h5")
        print(summary(convert(store, file, form or store.header.form)))
        return
    counts = sorted({shard.of for shard in find_leftovers(out).values() if shard.of > 1})
    if not counts:
        example = Shard(0, 8).file(out).name
        raise UserError(
            f"{out} has no shards ({example}, ...) beside it; name the file they are merged into"
        )
    if out.exists():
        # An earlier merge ended before it had removed all of them.
        store = ScoreMapStore(out)
        clean_up(out, store.header)
        if not find_leftovers(out):
            print(summary(store))
            return
    # If no set of shards is complete, `merge` names what the first set lacks.
    whole = [of for of in counts if not find_missing(out, of)]
    print(summary(merge(out, (whole or counts)[0], form or "raw")))

"""Parts of a labeling: which rows each of several processes labels, in which file, and how the
files become one.

Shard 2 of 8 of `maps.h5` is `maps.shard-2-of-8.h5`: a raw store of some neighboring rows, made and
continued like any other, which readers refuse by the `shard` in its header. Merging copies the rows
into one file: readers find a row by its place in one contiguous dataset, where HDF5's virtual
datasets would need HDF5 itself, and all shards, for every read.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from densefeed.storage.maintenance import convert, summary
from densefeed.storage.row_codecs import Form, ScoreMaps
from densefeed.storage.score_maps import (
    ScoreMapStore,
    ScoreMapWriter,
    StoreHeader,
    map_datasets,
    sound_rows,
)
from densefeed.system.errors import BusyError, UserError
from densefeed.system.progress import bar

CHUNK = 1024  # rows copied at once: 7 MB at S = 18, k = 5
# shards begin at multiples of it, so that batches of a power of two are the same images in any
# number of shards
GRAIN = 256


class Shard(NamedTuple):
    """Part `index` of `of`, counted from 0."""

    index: int
    of: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """From `index/of`; UserError for anything else."""
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if not found or int(found[1]) >= int(found[2]):
            raise UserError(f"--shard {text}: write it as 0/8, ..., 7/8")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"

    def rows(self, count: int) -> range:
        """Its rows of `count`. UserError if there are fewer images than shards."""
        if count < self.of:
            raise UserError(f"{count} images cannot be divided among {self.of} shards; take fewer")
        grain = GRAIN
        # no shard is larger than another by more than an eighth
        while grain > max(1, count // (8 * self.of)):
            grain //= 2
        first, end = (
            min(round(n * count / self.of / grain) * grain, count)
            for n in (self.index, self.index + 1)
        )
        return range(first, count if self.index + 1 == self.of else end)

    def file(self, out: Path) -> Path:
        """Its finished file; `<name>.part` until then. A single shard is the whole."""
        return (
            out.with_name(f"{out.stem}.shard-{self.index}-of-{self.of}{out.suffix}")
            if self.of > 1
            else out
        )

    def header(self, whole: StoreHeader, count: int) -> StoreHeader:
        """What its file says of itself."""
        return (
            whole
            if self.of == 1
            else replace(whole, shard=(self.index, self.of, self.rows(count).start, count))
        )


def left_over(out: Path) -> dict[Path, Shard]:
    """The files of shards of `out`, of any number of them, finished or not, and its own `.part`; in
    order.
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


def check_left_over(out: Path, header: StoreHeader) -> None:
    """UserError naming a file of a shard of `out`, or its `.part`, that another labeling left;
    before ours makes one.
    """
    for path in left_over(out):
        try:
            found = map_datasets(path)[0]
        except UserError:
            if path.exists():  # else finished, or merged and removed, while we looked
                raise
        else:
            replace(header, shard=None).check_same(replace(found, shard=None), path)


def absorb(writer: ScoreMapWriter, header: StoreHeader, files: list[Path]) -> int:
    """Copy the finished rows that `writer` lacks out of other files of the same labeling; how many
    were copied.

    `header` is the writer's. UserError names a file of another labeling, or a damaged one.
    """
    start, copied = first_row(header), 0
    for path in files:
        try:
            found, arrays, _ = map_datasets(path)
        except UserError:
            if not path.exists():  # it was finished, or merged and removed, while we looked
                continue
            raise
        replace(header, shard=None).check_same(replace(found, shard=None), path)
        shift = start - first_row(found)  # of a row's number here and there
        low, high = max(0, -shift), min(len(writer.done), len(arrays["done"]) - shift)
        if low >= high or not (wanted := np.flatnonzero(~writer.done[low:high]) + low).size:
            continue
        wanted = wanted[sound_rows(arrays)[wanted + shift]]
        for ids in pieces(wanted):
            writer.write(ids, ScoreMaps(*(arrays[name][ids + shift] for name in ScoreMaps._fields)))
            copied += len(ids)
    return copied


def first_row(header: StoreHeader) -> int:
    """The dataset's row that is a file's first."""
    return header.shard[2] if header.shard else 0


def pieces(ids: np.ndarray) -> Iterator[np.ndarray]:
    """Ascending ids in runs of neighbors of at most CHUNK."""
    for run in np.split(ids, np.flatnonzero(np.diff(ids) > 1) + 1):
        yield from (run[at : at + CHUNK] for at in range(0, len(run), CHUNK))


def finish(writer: ScoreMapWriter, out: Path, form: Form) -> ScoreMapStore:
    """Give a writer that has all rows its final name and form."""
    if form == "raw":
        writer.finish()
    else:
        convert(ScoreMapStore(writer.part), out, form)
        writer.part.unlink()
    return ScoreMapStore(out)


def clean_up(out: Path, header: StoreHeader) -> None:
    """Remove the files of shards of a finished `out`, but for those of another labeling."""
    whole = replace(header, form="raw", shard=None)
    for path in left_over(out):
        try:
            if replace(map_datasets(path)[0], shard=None) == whole:
                path.unlink(missing_ok=True)
        except UserError:  # not ours to judge
            continue


def missing(out: Path, of: int) -> list[Shard]:
    """Which of the `of` shards of `out` are not finished."""
    return [
        shard for shard in (Shard(index, of) for index in range(of)) if not shard.file(out).exists()
    ]


def merge(out: Path, of: int, form: Form = "raw") -> ScoreMapStore:
    """Copy the finished shards of `out`, `of` of them, into one file, and remove them. The same
    rows give the same bytes.

    UserError names a shard that is missing, damaged or of another labeling than shard 0; BusyError
    if another process merges.
    """
    if lacking := missing(out, of):
        unfinished = "; it is not finished" if Path(f"{lacking[0].file(out)}.part").exists() else ""
        raise UserError(
            f"{lacking[0].file(out)} is missing{unfinished}: run the same labeling with --shard {lacking[0]}, and merge again"
        )
    paths, labels, next_row, whole = [], [], 0, None
    files = [Shard(index, of).file(out) for index in range(of)]
    for path in files:
        header, arrays, _ = map_datasets(path)
        whole = whole or replace(header, shard=None)
        whole.check_same(replace(header, shard=None), path)
        if (
            not header.shard
            or header.shard[2] != next_row
            or len(arrays["label"]) != len(arrays["path"])
        ):
            raise UserError(
                f"{path} does not begin where the shard before it ends; remove it and label it again"
            )
        paths += [path.decode() for path in arrays["path"]]
        labels.append(arrays["label"])
        next_row += len(arrays["label"])
    if next_row != header.shard[3]:
        raise UserError(
            f"{path} ends at row {next_row} of {header.shard[3]}; remove it and label it again"
        )
    writer = ScoreMapWriter(out, whole, paths, np.concatenate(labels))
    try:
        for path in bar(files, "merge, shards"):
            absorb(writer, whole, [path])
        if not writer.done.all():
            row = int(writer.done.argmin())
            path = next(
                Shard(i, of).file(out) for i in range(of) if row in Shard(i, of).rows(next_row)
            )
            raise UserError(
                f"{path}: the map of {paths[row]} is damaged; remove this file and label its images again"
            )
        store = finish(writer, out, form)
    finally:
        writer.close()
    clean_up(out, whole)
    return store


def merge_if_complete(out: Path, of: int, form: Form) -> ScoreMapStore | None:
    """Merge if all shards are finished; None if they are not, or if another process does it."""
    try:
        if not out.exists() and not missing(out, of):
            return merge(out, of, form)
    except BusyError:
        return None
    except UserError:
        # else another process has merged them, and removed what we were looking at
        if not out.exists():
            raise
    return ScoreMapStore(out) if out.exists() else None


def merge_files(out: Path, /, form: Form = "raw") -> None:
    """Merge the finished shards of OUT, by default as raw rows, into OUT, and remove them. The last
    shard's job does it by itself.
    """
    counts = sorted({shard.of for shard in left_over(out).values() if shard.of > 1})
    if not counts:
        raise UserError(
            f"{out} has no shards ({Shard(0, 8).file(out).name}, ...) beside it; name the file they are to become"
        )
    whole = [of for of in counts if not missing(out, of)]
    print(summary(merge(out, (whole or counts)[0], form)))

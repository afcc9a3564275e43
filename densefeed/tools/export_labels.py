"""Write a store of score maps (HDF5) as a TokenLabeling tree: one .pt file an image, which the
published code can read.

    python tools/export_labels.py --maps maps.h5 --out label_top5_train

`<class>/<name>.pt` is one tensor, float16 [2, k, S, S]: logits and class numbers; the name ends at
the first dot of `class/file`, where published code looks. Logits and classes come back bit by bit
by tools/import_labels.py. What such files cannot hold is printed: the logsumexp, and which part of
the image a map covers. The folder gets its name when all files are in it.
"""

import io
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

from densefeed.storage.geometry import WHOLE
from densefeed.storage.packs import EXACT, stem_of, to_published
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError, run
from densefeed.system.files import name_errors
from densefeed.system.progress import bar

ROWS = 256  # of the store, at once
MOST_CLASSES = EXACT[np.dtype(np.float16).itemsize]


@dataclass(frozen=True, kw_only=True)
class Export:
    """What to export."""

    maps: Path  # the store, HDF5
    out: Path  # the folder to write


def main(wanted: Export) -> None:
    """Write every row's file, then say what the files do not."""
    store = ScoreMapStore(wanted.maps)
    header = store.header
    if header.num_classes > MOST_CLASSES:
        raise UserError(
            f"{wanted.maps} has {header.num_classes:,} classes, and float16 numbers only {MOST_CLASSES:,} exactly; "
            "train from the store itself"
        )
    part = wanted.out.with_name(f"{wanted.out.name}.part")
    for path, remedy in (
        (wanted.out, "remove it or choose another --out"),
        (part, "an export was stopped there; remove it"),
    ):
        if path.exists():
            raise UserError(f"{path} exists already; {remedy}")
    stems = distinct_stems(store)
    part.mkdir(parents=True)
    try:
        covers_part = write(store, stems, part)
        os.sync()  # a million fsyncs would take an hour
        os.replace(part, wanted.out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    print(
        f"{wanted.out}: {len(store):,} maps of {header.side} x {header.side} cells, top {header.top_k}, {header.geometry}"
    )
    print(
        "not in these files: the logsumexp of each cell; published code gives the classes not named logit 0",
        end="",
    )
    print(
        ", where this store knows their true remainder"
        if header.absent == "tail"
        else ", as this store does"
    )
    if covers_part:
        print(
            f"not in these files: that {covers_part:,} maps cover only a part of their image; published code reads them as if "
            f"they covered all of it, tools/import_labels.py must be told --footprint {header.geometry}"
        )


def distinct_stems(store: ScoreMapStore) -> list[str]:
    """The name of each row's file. UserError if two images would have the same."""
    owner: dict[str, str] = {}
    for path in store.paths():
        stem = stem_of(path, whole=False)
        if stem in owner:
            raise UserError(
                f"{store.path}: {owner[stem]} and {path} would both be {stem}.pt, since published code cuts names at the first dot; "
                "rename one of these images and label them again"
            )
        owner[stem] = path
    return list(owner)


def write(store: ScoreMapStore, stems: list[str], folder: Path) -> int:
    """Write the files; how many maps do not cover their whole image."""
    covers_part = 0
    for made in {str(Path(stem).parent) for stem in stems}:
        (folder / made).mkdir(parents=True, exist_ok=True)
    for ids in bar(np.array_split(np.arange(len(store)), -(-len(store) // ROWS)), "export maps"):
        maps = store.rows(ids)
        covers_part += int((maps.window != np.array(WHOLE, np.float32)).any(1).sum())
        for row, map_2kSS in zip(ids, torch.from_numpy(to_published(maps)), strict=True):
            encoded = io.BytesIO()
            torch.save(map_2kSS.clone(), encoded)  # a slice would carry the storage of all
            path = folder / f"{stems[row]}.pt"
            with name_errors(path):
                path.write_bytes(encoded.getbuffer())
    return covers_part


if __name__ == "__main__":
    run(lambda: main(tyro.cli(Export, description=__doc__)))

"""Export score maps as a TokenLabeling tree of .pt files, for the published code.

    densefeed export-labels --maps maps.h5 --out label_top5_train

`<class>/<name>.pt` is one tensor, float16 [2, k, S, S]: logits and class numbers. The name ends at
the first dot of `class/file`, where the published code cuts it. densefeed import restores
logits and classes bit by bit. The command prints what such files cannot hold: the logsumexp, and
the part of the image that a map covers. The folder gets its name when all files are in it.
"""

if not __package__:
    import script_start  # noqa: F401

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from densefeed.storage.geometry import WHOLE
from densefeed.storage.packs import EXACT, map_stem, to_published
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError, make_command
from densefeed.system.files import check_absent, create_folder, find_path_fault
from densefeed.system.options import Options
from densefeed.system.progress import bar
from densefeed.system.terminal import print

# Rows read from the store at once.
ROWS = 256
# The published files hold class numbers as float16.
MOST_CLASSES = EXACT[np.dtype(np.float16).itemsize]
# Characters of a path that a message shows.
SHOWN = 120


@dataclass(frozen=True, kw_only=True)
class ExportLabels(Options):
    """The score maps to export."""

    maps: Path  # the score maps: an HDF5 file, or a folder of shards
    out: Path  # the folder to write


def main(options: ExportLabels) -> None:
    """Write one file per row, then print what the files do not hold."""
    store, out = ScoreMapStore(options.maps), options.out
    if store.header.num_classes > MOST_CLASSES:
        raise UserError(
            f"{options.maps} has {store.header.num_classes:,} classes, and float16 represents only "
            f"{MOST_CLASSES:,} class numbers exactly; train from the score maps themselves"
        )
    check_absent(out)
    stems = distinct_stems(store)
    with create_folder(out) as part:
        partial = write_files(store, stems, part)
    print_summary(store, partial, out)


def print_summary(store: ScoreMapStore, partial: int, out: Path) -> None:
    """Print what was exported, and what the files do not hold of it."""
    header = store.header
    print(
        f"{out}: {len(store):,} maps of {header.side} x {header.side} cells, top {header.top_k}, "
        f"{header.geometry}"
    )
    remainder = "as does this store"
    if header.absent == "tail":
        remainder = "where this store has their true remainder of the probability"
    elif header.absent == "background":
        remainder = "where this store gives what the others leave to no class of the data"
    print(
        "not in these files: the logsumexp of each cell; the published code gives classes outside "
        f"the top {header.top_k} logit 0, {remainder}"
    )
    if partial:
        print(
            f"not in these files: {partial:,} maps cover only a part of their image; the published "
            "code reads them as if they covered all of it, and densefeed import needs "
            f"--footprint {header.geometry}"
        )


def distinct_stems(store: ScoreMapStore) -> list[str]:
    """Return the stem of each row's file.

    Raises UserError if two images would share one, or a path is none below the folder of images.
    """
    owner = {}
    for path in store.paths():
        stem = map_stem(path, whole=False)
        # The last two parts of `a//x.jpg` are `/x`, which is absolute.
        if fault := find_path_fault(path) or find_path_fault(f"{stem}.pt"):
            raise UserError(
                f"{store.path} names the image {path[:SHOWN]!r}, which {fault}; nothing can be "
                "written for it, label the images again"
            )
        if stem in owner:
            raise UserError(
                f"{store.path}: {owner[stem]} and {path} would both be {stem}.pt, since the "
                "published code cuts names at the first dot; "
                "rename one of these images and label them again"
            )
        owner[stem] = path
    return list(owner)


def write_files(store: ScoreMapStore, stems: list[str], folder: Path) -> int:
    """Write the files; return the number of maps that do not cover their whole image."""
    partial = 0
    for parent in {str(Path(stem).parent) for stem in stems}:
        (folder / parent).mkdir(parents=True, exist_ok=True)
    for ids in bar(np.array_split(np.arange(len(store)), -(-len(store) // ROWS)), "export maps"):
        maps = store.checked_rows(ids)
        # Windows are float32 in the store.
        partial += int((maps.window != np.array(WHOLE, np.float32)).any(1).sum())
        for row, map_2kSS in zip(ids, torch.from_numpy(to_published(maps)), strict=True):
            encoded = io.BytesIO()
            # Without clone() the slice would be saved with the storage of all rows.
            torch.save(map_2kSS.clone(), encoded)
            # "x": never through a link that another process made in this folder meanwhile.
            with open(folder / f"{stems[row]}.pt", "xb") as file:
                file.write(encoded.getbuffer())
    return partial


command = make_command(main, ExportLabels, __doc__)


if __name__ == "__main__":
    command()

"""Import published score maps, one small file an image, into a store (HDF5) for a folder of images.

    python tools/import_labels.py --labels label_top5_train_nfnet --data imagenet/train --out maps.h5
    python tools/import_labels.py --labels imagenet_efficientnet_l2_sz475_top5 --data imagenet/train --out maps.h5
    python tools/import_labels.py --labels arrays --data photos --teacher mine --input-size 384 --footprint squash --out maps.h5

Read are TokenLabeling's tree (.pt, float16 [2,5,18,18]), ReLabel's (.pt, float32 [2,5,15,15]) and folders of NumPy arrays (.npy) of
such shapes, for any number of classes a cell and cells. No pickle is ever run. Each image finds its file by class folder and name.
What a file does not say is declared: --footprint (the part of the image that its map covers) and --axes (which of the map's axes comes
first). Of the two published packs only the generators' code is known, and what it says is the default.

Run the same command again to continue a killed import. Images without a usable map are counted and named at the end.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from densefeed.relabel.files import UserError, run
from densefeed.relabel.geometry import Footprint
from densefeed.relabel.images import Images
from densefeed.relabel.packs import PUBLISHED, Axes, Matching, Pack, import_pack, match, probe


@dataclass(frozen=True, kw_only=True)
class Import:
    """What to import, and what is known of it."""

    labels: Path  # the pack: a folder of class folders with .pt or .npy files
    data: Path  # the images: a folder of class folders
    out: Path  # the store to write, HDF5
    footprint: Footprint | None = None  # what a map covers: all of the image, its centre square, or with padding; none: as published
    axes: Axes = "row-column"  # of a file's last two axes, which comes first
    teacher: str = ""  # who made the maps; empty: as published
    input_size: int = 0  # side of the teacher's input, pixels; 0: as published
    split: str = "train"  # of the images
    missing: Literal["raise", "label"] = "raise"  # an image without a usable map: no store, or its own label in every cell
    problems: Path | None = None  # text file to write: every image without a usable map, and why
    threads: int = os.cpu_count() or 1  # that read files


def main(wanted: Import) -> None:
    """Match, look at the pack, import."""
    if wanted.out.exists():
        raise UserError(f"{wanted.out} exists already; remove it or choose another --out")
    images = Images(wanted.data, split=wanted.split)
    matching = match(images, wanted.labels)
    side, top_k = probe(images, matching)
    pack = declared(wanted, matching, side, top_k)
    print(
        f"{wanted.labels}: maps of {side} x {side} cells, top {top_k}, by {pack.teacher} at {pack.input_size} px; "
        f"taken to cover {'the whole image' if pack.footprint == 'squash' else 'its centre square'}, axes {pack.axes}"
    )
    with open(wanted.problems or os.devnull, "w") as log:
        store, report = import_pack(images, pack, wanted.out, wanted.threads, wanted.missing, log)
    # Here an audit of the finished store can hold the declared footprint and axes against the images.
    print(
        f"{wanted.out}: {len(store):,} maps of {store.header.num_classes:,} classes ({report.kept:,} read now, {report.earlier:,} "
        f"earlier), {wanted.out.stat().st_size / len(store):,.0f} bytes an image"
    )
    if report.problems:
        print(f"labelled by their class folders: {report}")
    if matching.extra:
        print(f"left out: {matching.extra:,} maps that belong to no image ({', '.join(matching.extra_names)})")


def declared(wanted: Import, matching: Matching, side: int, top_k: int) -> Pack:
    """The pack as it was declared, and as published where it was not. UserError if neither says."""
    known = PUBLISHED.get((side, top_k))
    given = {"teacher": wanted.teacher, "input_size": wanted.input_size, "footprint": wanted.footprint}
    unsaid = [name for name, value in given.items() if not value]
    if known is None and unsaid:
        raise UserError(
            f"{wanted.labels} holds maps of {side} x {side} cells, top {top_k}, which are of no published pack; "
            f"give {' and '.join('--' + name.replace('_', '-') for name in unsaid)}"
        )
    if wanted.input_size < 0:
        raise UserError("--input-size must be at least 1 pixel")
    chosen = {name: value or getattr(known, name) for name, value in given.items()}
    return Pack(matching=matching, side=side, top_k=top_k, axes=wanted.axes, **chosen)


if __name__ == "__main__":
    run(lambda: main(tyro.cli(Import, description=__doc__)))

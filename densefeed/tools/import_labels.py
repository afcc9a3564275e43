"""Import published score maps, one small file an image, into a store (HDF5) for a folder of images.

    python tools/import_labels.py --labels label_top5_train_nfnet --data imagenet/train --out maps.h5
    python tools/import_labels.py --labels imagenet_efficientnet_l2_sz475_top5 --data imagenet/train --out maps.h5
    python tools/import_labels.py --labels arrays --data photos --teacher mine --input-size 384 --footprint squash --out maps.h5

Read are TokenLabeling's tree (.pt, float16 [2,5,18,18]), ReLabel's (.pt, float32 [2,5,15,15]) and
folders of NumPy arrays (.npy) of such shapes, for any number of classes a cell and cells. No pickle
is ever run. Each image finds its file by class folder and name. What a file does not say is
declared: --footprint (the part of the image that its map covers) and --axes (which of the map's
axes comes first). Of the two published packs only the generators' code is known, and what it says
is the default. With --reference, any model of the same classes that knows where things are, both
can be found: `--footprint find --axes find`. At the end the store is audited (as tools/audit.py
does, which also makes a page of it); exit code 2 says that a fault was found.

Run the same command again to continue a killed import. Images without a usable map are counted and
named at the end.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from densefeed.relabel.audit import audit, neighbors
from densefeed.relabel.reference_match import References, find_layout, look
from densefeed.storage.geometry import Footprint
from densefeed.storage.images import Images
from densefeed.storage.packs import (
    FIRST_DOT,
    PUBLISHED,
    WHOLE_STEM,
    Axes,
    Matching,
    Pack,
    import_pack,
    match,
    probe,
    read_part,
)
from densefeed.storage.row_codecs import ScoreMaps
from densefeed.storage.tensor_files import TensorFiles
from densefeed.system.errors import UserError, run
from densefeed.tools.audit import load_references, print_checks, raise_on_faults


@dataclass(frozen=True, kw_only=True)
class Import:
    """What to import, and what is known of it."""

    labels: Path  # the pack: a folder of class folders with .pt or .npy files
    data: Path  # the images: a folder of class folders
    out: Path  # the store to write, HDF5
    # all of the image, its center, or padding too; none: as published
    footprint: Footprint | Literal["find"] | None = None
    axes: Axes | Literal["find"] = "row-column"  # of a file's last two axes, which comes first
    teacher: str = ""  # who made the maps; empty: as published
    input_size: int = 0  # side of the teacher's input, pixels; 0: as published
    split: str = "train"  # of the images
    # an image without a usable map: no store, or its own label in every cell
    missing: Literal["raise", "label"] = "raise"
    problems: Path | None = None  # text file to write: every image without a usable map, and why
    threads: int = os.cpu_count() or 1  # that read files
    # a model to hold maps against: a timm model's name, a checkpoint, or a run folder of train.py
    reference: str = ""
    reference_model: str = ""  # timm's name of it, for a checkpoint that does not say
    reference_size: int = 0  # side of its input, pixels; 0: that of the teacher
    audit: bool = True  # the finished store
    audit_images: int = 300  # that the reference looks at


def main(wanted: Import) -> None:
    """Match, look at the pack, import."""
    if wanted.out.exists():
        raise UserError(f"{wanted.out} exists already; remove it or choose another --out")
    images = Images(wanted.data, split=wanted.split)
    matching = match(images, wanted.labels)
    side, top_k = probe(images, matching)
    finding = [name for name in ("footprint", "axes") if getattr(wanted, name) == "find"]
    if finding and not wanted.reference:
        raise UserError(
            f"--{finding[0]} find needs a model to hold the maps against; give --reference"
        )
    pack = declared(wanted, matching, side, top_k)
    found = None
    if wanted.reference:
        size = wanted.reference_size or pack.input_size
        found = load_references(wanted.reference, wanted.reference_model, size, images.class_names)
    if finding:
        pack = laid_out(wanted, pack, images, found)
    print(
        f"{wanted.labels}: maps of {side} x {side} cells, top {top_k}, by {pack.teacher} at {pack.input_size} px; "
        f"taken to cover {'the whole image' if pack.footprint == 'squash' else 'its center square'}, axes {pack.axes}"
    )
    with open(wanted.problems or os.devnull, "w") as log:
        store, report = import_pack(images, pack, wanted.out, wanted.threads, wanted.missing, log)
    print(
        f"{wanted.out}: {len(store):,} maps of {store.header.num_classes:,} classes ({report.kept:,} read now, {report.earlier:,} "
        f"earlier), {wanted.out.stat().st_size / len(store):,.0f} bytes an image"
    )
    if report.problems:
        print(f"labeled by their class folders: {report}")
    if matching.extra:
        print(
            f"left out: {matching.extra:,} maps that belong to no image ({', '.join(matching.extra_names)})"
        )
    if wanted.audit:
        result = audit(wanted.out, images, found, wanted.audit_images, threads=wanted.threads)
        print_checks(result)
        raise_on_faults(result, wanted.out, "the lines above say what to do")


def laid_out(wanted: Import, pack: Pack, images: Images, found: References) -> Pack:
    """The pack with the axes and the footprint that are to be found. UserError if the reference
    cannot tell them.
    """
    matched = np.flatnonzero((pack.matching.rule == WHOLE_STEM) | (pack.matching.rule == FIRST_DOT))
    as_it_lies = replace(pack, axes="row-column", footprint="squash")
    part = read_part(
        images,
        as_it_lies,
        np.unique(neighbors(images.labels, matched, wanted.audit_images)),
        TensorFiles(),
    )
    rows = neighbors(images.labels, part.ids, wanted.audit_images)
    if not len(rows):
        raise UserError(f"{wanted.labels}: none of its maps could be read; copy it again")

    def read(ids: np.ndarray) -> ScoreMaps:
        return ScoreMaps(*(column[np.searchsorted(part.ids, ids)] for column in part.maps))

    looks = look(
        read, pack.header(images), images, np.arange(len(images)), rows, found, wanted.threads
    )
    axes, footprint = find_layout(
        looks, wanted.labels, None if wanted.footprint == "find" else pack.footprint
    )
    return replace(pack, axes=axes if wanted.axes == "find" else wanted.axes, footprint=footprint)


def declared(wanted: Import, matching: Matching, side: int, top_k: int) -> Pack:
    """The pack as it was declared, and as published where it was not. UserError if neither says."""
    known = PUBLISHED.get((side, top_k))
    # What is to be found is read as if it were the usual until then.
    footprint: Footprint | None = "squash" if wanted.footprint == "find" else wanted.footprint
    axes: Axes = "row-column" if wanted.axes == "find" else wanted.axes
    given = {"teacher": wanted.teacher, "input_size": wanted.input_size, "footprint": footprint}
    unsaid = [name for name, value in given.items() if not value]
    if known is None and unsaid:
        raise UserError(
            f"{wanted.labels} holds maps of {side} x {side} cells, top {top_k}, which are of no published pack; "
            f"give {' and '.join('--' + name.replace('_', '-') for name in unsaid)}"
        )
    if wanted.input_size < 0:
        raise UserError("--input-size must be at least 1 pixel")
    chosen = {name: value or getattr(known, name) for name, value in given.items()}
    return Pack(matching=matching, side=side, top_k=top_k, axes=axes, **chosen)


if __name__ == "__main__":
    run(lambda: main(tyro.cli(Import, description=__doc__)))

"""Import published score maps, one small file per image, into one HDF5 file.

    densefeed import --labels label_top5_train --data imagenet --out maps.h5
    densefeed import --labels arrays --data photos --out maps.h5 \\
        --teacher mine --input-size 384 --footprint squash

It reads TokenLabeling's tree (.pt, float16 [2,5,18,18]), ReLabel's (.pt, float32 [2,5,15,15]) and
folders of NumPy arrays (.npy) of such shapes, with any number of cells and of classes per cell. No
pickle is ever executed. Each image finds its file by class folder and name or, if none does, by its
name alone, which is the key of WebDataset.

What a file does not contain is declared: --footprint (the part of the image that its map covers)
and --axes (which of the map's axes comes first). For the two published packs the defaults follow
the code that generated them; nothing else is known about them. With --reference, any model of the
same classes that responds to where objects are, both can be found: `--footprint find --axes find`.
At the end the store is audited (densefeed audit does the same and writes a page); exit code 2 means
that the audit found a fault.

Run the same command again to continue a killed import. Images without a usable map are counted and
listed at the end.
"""

if not __package__:
    import script_start  # noqa: F401

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from densefeed.relabel.audit import audit, print_checks, raise_on_faults
from densefeed.relabel.checks.images import neighbors
from densefeed.relabel.checks.reference import check_orientation
from densefeed.relabel.load_teacher import load_references
from densefeed.relabel.reference_match import FOOTPRINT_WORDS, References, find_layout, look
from densefeed.storage.geometry import Footprint
from densefeed.storage.images import DecodeOptions, Images, limit_pixels
from densefeed.storage.packs import (
    PUBLISHED,
    Axes,
    Matching,
    Pack,
    describe_doubt,
    import_pack,
    match,
    probe,
    read_part,
)
from densefeed.storage.row_codecs import ScoreMaps
from densefeed.storage.tensor_files import TensorFiles
from densefeed.system.devices import ThreadOptions
from densefeed.system.errors import UserError, make_command
from densefeed.system.files import check_absent, check_ending
from densefeed.system.options import Beside, Bounds, Location, NonNegativeInt, flag, own_first
from densefeed.system.terminal import print, warn


@own_first
@dataclass(frozen=True, kw_only=True)
class Import(DecodeOptions, ThreadOptions):
    """The score maps to import, and what is known about them."""

    labels: Path  # the score maps: a folder of class folders with .pt or .npy files
    # images: the folder that holds train/ and val/, a folder of class folders, or of tar or Parquet
    # files, all also as s3://BUCKET/FOLDER; the root of --dataset
    data: Location
    out: Path  # the score maps to write, HDF5
    # part of the image that a map covers: all, its center, or padding too; default: as published
    footprint: Footprint | Literal["find"] | None = None
    axes: Axes | Literal["find"] = "row-column"  # order of a file's last two axes
    teacher: str = ""  # the model that made the maps; default: as published
    input_size: NonNegativeInt = 0  # side of the teacher's input, pixels; 0: as published
    # name of the dataset, from the list in the --help of packing, if the data is not a folder of
    # class folders
    dataset: str = ""
    split: str = "train"  # split of the dataset
    # if an image has no usable map: write no file, or give every cell the image's own label
    missing: Literal["raise", "label"] = "raise"
    problems: Path | None = None  # text file to write: every image without a usable map, and why
    # a model to compare the maps with: a timm model, a checkpoint, or a run folder of densefeed
    # train
    reference: str = ""
    reference_model: str = ""  # timm's name of the reference, for a checkpoint without it
    # side of the reference's input, pixels; 0: that of the teacher
    reference_size: NonNegativeInt = 0
    audit: bool = True  # audit the finished store
    audit_images: Annotated[int, Bounds(2)] = 300  # images that the reference sees

    def unused(self) -> dict[str, str]:
        names = "reference_model", "reference_size", "audit_images"
        if not self.reference:
            return dict.fromkeys(names, "--reference")
        # The reference finds the layout, and is what the audit compares with.
        if self.audit or "find" in (self.footprint, self.axes):
            return {}
        return dict.fromkeys(("reference", *names), Beside("--no-audit"))


def main(options: Import) -> None:
    """Match files to images, find or declare the layout, import and audit."""
    limit_pixels(options.max_pixels)
    out = options.out
    check_absent(out)
    if options.problems:
        check_ending(options.problems, ".txt", "--problems")
    images = Images(options.data, options.dataset, options.split)
    images.describe_split()
    matching = match(images, options.labels)
    if matching.folders:
        print(f"images of {options.data} and maps are matched by their names without folders")
    side, top_k = probe(images, matching)
    pack = declare(options, matching, side, top_k)
    models = None
    if options.reference:
        size = options.reference_size or pack.input_size
        models = load_references(
            options.reference, options.reference_model, size, images.class_names
        )
        pack = find_pack_layout(options, pack, images, models)
    print(
        f"{options.labels}: maps of {side} x {side} cells, top {top_k}, by {pack.teacher} at "
        f"{pack.input_size} px; taken to cover {FOOTPRINT_WORDS[pack.footprint]}, axes {pack.axes}"
    )
    store, report = import_pack(
        images, pack, out, options.threads, options.missing, options.problems
    )
    size = out.stat().st_size / len(store)
    print(
        f"{out}: {len(store):,} maps of {store.header.num_classes:,} classes "
        f"({report.kept:,} read now, {report.earlier:,} earlier), {size:,.0f} bytes per image"
    )
    if report.problems:
        print(f"labeled by their class: {report}")
    if matching.extra:
        names = ", ".join(matching.extra_names)
        print(f"left out: {matching.extra:,} maps without an image ({names})")
    if options.audit:
        result = audit(out, images, models, options.audit_images, threads=options.threads)
        print_checks(result)
        raise_on_faults(result, out, "the lines above say what to do")
    if doubt := describe_doubt(store.header.teacher, out):
        warn(doubt)


def find_pack_layout(options: Import, pack: Pack, images: Images, models: References) -> Pack:
    """Return the pack with what the reference shows: the layout, where that was to be found.

    A declared order of the axes is kept, with the verdict of the audit's check. Raises UserError if
    what was to be found is not clear.
    """
    ids = np.unique(neighbors(images.labels, pack.matching.matched, options.audit_images))
    # The files are read without a crop, whatever they cover, and with the declared axes.
    raw = replace(pack, footprint="squash")
    part = read_part(images, raw, ids, TensorFiles())
    # Files that cannot be read are missing from the part, so the pairs are chosen again.
    rows = neighbors(images.labels, part.ids, options.audit_images)
    if not len(rows):
        raise UserError(f"{options.labels}: none of its maps could be read; copy it again")

    def read(ids: np.ndarray) -> ScoreMaps:
        # `part.ids` are ascending.
        return ScoreMaps(*(column[np.searchsorted(part.ids, ids)] for column in part.maps))

    # Row and image have the same number before there is a store.
    everything = np.arange(len(images))
    looks = look(read, pack.header(images), images, everything, rows, models, options.threads)
    axes, footprint, verdict = pack.axes, pack.footprint, check_orientation(looks, False)[0]
    if "find" in (options.axes, options.footprint):
        # A declared footprint is taken as it is here, and judged by the audit at the end.
        declared = None if options.footprint == "find" else pack.footprint
        found, footprint = find_layout(looks, options.labels, declared)
        if options.axes == "find":
            axes, verdict = found, "sound"
    return replace(pack, axes=axes, footprint=footprint, orientation=verdict)


def declare(options: Import, matching: Matching, side: int, top_k: int) -> Pack:
    """Return the pack as declared, or as published where nothing was declared.

    Raises UserError, which names all missing options, if neither is known.
    """
    known = PUBLISHED.get((side, top_k))
    # A layout that is still to be found is the usual one until then.
    footprint = "squash" if options.footprint == "find" else options.footprint
    axes = "row-column" if options.axes == "find" else options.axes
    given = {"teacher": options.teacher, "input_size": options.input_size, "footprint": footprint}
    missing, why = [], []
    if known is None:
        missing = [flag(name) for name, value in given.items() if not value]
    if missing:
        why += [
            f"{options.labels} has maps of {side} x {side} cells, top {top_k}, which no "
            "published pack has"
        ]
    found = [name for name in ("footprint", "axes") if getattr(options, name) == "find"]
    if found and not options.reference:
        why += [f"--{found[0]} find needs a model to hold the maps against"]
        missing += ["--reference"]
    # All at once: each is found out only after the images have been listed.
    if missing:
        raise UserError(f"{', and '.join(why)}; give {' and '.join(missing)}")
    chosen = {name: value or getattr(known, name) for name, value in given.items()}
    chosen["reference"] = options.reference
    return Pack(matching=matching, side=side, top_k=top_k, axes=axes, **chosen)


command = make_command(main, Import, __doc__)


if __name__ == "__main__":
    command()

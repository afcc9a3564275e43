"""Pack images, and their score maps, into one FFCV dataset (.beton) that stock ffcv 1.0.2 opens
too.

    python tools/pack_dataset.py --data imagenet/train --maps maps.h5 --out train.beton
    python tools/pack_dataset.py --data imagenet/val --split val --out val.beton
    python tools/pack_dataset.py --dataset cifar100 --root data --out cifar100-train.beton

--dataset: cifar10, cifar100, svhn, flowers102 (as torchvision keeps them below --root, downloaded
if they are not there); domainnet/clipart (... infograph, painting, quickdraw, real, sketch; with
their lists); list/FILE of lines "path label" or "class/file" (give a_train.txt and a_test.txt names
that differ in that word alone: then both count for the classes of each); classes/FILE, the class
folders that it names (ImageNet-100); share/10, so many percent of every class folder's images;
hfds/NAME, as timm reads it.

JPEGs keep every pixel: they are rewritten losslessly, with an index from which a crop can be read
alone (--no-index keeps their bytes too). What is no gray or RGB JPEG (PNG, CMYK, ...), or larger
than --max-side, is encoded anew, and counted; what is no JPEG and no larger than --pixels-to
(CIFAR, SVHN) is kept as its pixels. Every image is tried; those that cannot be packed are named at
the end. Then mend these files and run the same command again, which packs nothing twice, or leave
them out with --on-bad-sample skip. A packing that was stopped or killed, or filled the disk, goes
on in the same way: what is done stands in OUT.part and OUT.part.rows.
"""

import hashlib
import io
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import tyro
from PIL import Image

from densefeed import native
from densefeed.pipelines.ffcv import map_arrays, map_fields
from densefeed.pipelines.folder import score_map_spec
from densefeed.storage import indexed_jpeg
from densefeed.storage.beton import PAGE
from densefeed.storage.beton_writer import FAILED, PACKED, BetonWriter, Sample
from densefeed.storage.images import Images, decode
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError, run
from densefeed.system.prefetch import ordered_map
from densefeed.system.progress import bar

NAMED = 10  # unreadable files named in the message
# packed images that a continued packing prepares again, to see that they still come out the same
PROBES = 64
KEPT, ANEW, PIXELS = 0, 1, 2  # what became of an image's bytes; the writer's journal remembers it


@dataclass(frozen=True, kw_only=True)
class Packing:
    """What to pack."""

    # folder of class folders, or where --dataset is kept
    data: Annotated[Path, tyro.conf.arg(aliases=["--root"])]
    out: Path  # the .beton to write
    maps: Path | None = None  # score maps (HDF5) made for this data
    dataset: str = ""  # a name from the list above, if not a folder of class folders
    split: str = "train"  # of the dataset
    max_side: int = 0  # images with a longer side are made smaller, to this, pixels; 0: none is
    # images that are no JPEG and whose sides are no longer keep their pixels as they are, without a
    # checksum
    pixels_to: int = 64
    quality: int = 95  # of what must be encoded anew, JPEG's 1 to 100
    # rewrite JPEGs losslessly with an index of their segments, which makes crops faster to read
    index: bool = True
    threads: int = os.cpu_count() or 1  # threads that read and check images
    # an image that cannot be packed: no file, or a file without it
    on_bad_sample: Literal["raise", "skip"] = "raise"


class Prepared(NamedTuple):
    """An image, ready to be written, or why it cannot be."""

    sample: Sample | None
    became: int = KEPT
    reason: str = ""


def main(packing: Packing) -> None:
    """Pack. UserError, once all images were tried, if one cannot be packed and shall not be left
    out.
    """
    if (
        packing.threads < 1
        or min(packing.max_side, packing.pixels_to) < 0
        or not 1 <= packing.quality <= 100
    ):
        raise UserError(
            "--threads must be at least 1, --max-side and --pixels-to no less than 0, and --quality from 1 to 100"
        )
    images = Images(packing.data, packing.dataset, packing.split)
    notes = {"class_names": images.class_names, "fingerprint": images.fingerprint()}
    store, fields = None, []
    if packing.maps is not None:
        store = ScoreMapStore(packing.maps)
        store.check(notes["fingerprint"], packing.data)
        if store.error:
            print(
                f"{packing.maps} is compact, and the .beton takes over what it lost: {store.error}"
            )
        spec = score_map_spec(store, len(images.class_names))
        notes |= {
            "teacher": store.header.teacher,
            "absent": spec.absent,
            "max_palette": spec.max_palette,
        }
        notes |= {"min_window_side": spec.min_window_side}
        fields = map_fields(spec.side, spec.top_k)
    # The fingerprint also covers file sizes, which mending a file changes.
    listing = "\n".join(
        f"{path}\t{label}" for path, label in zip(images.paths, images.labels, strict=True)
    )
    identity = {"images": hashlib.sha256(listing.encode()).hexdigest()}
    identity |= {
        name: getattr(packing, name) for name in ("max_side", "pixels_to", "quality", "index")
    }

    with BetonWriter(packing.out, len(images), fields, notes, identity) as writer:

        def prepare(index: int) -> Prepared:
            try:
                stored, size, became = as_stored(images.read(index), images.where(index), packing)
                arrays = map_arrays(store.rows(np.array([index])), 0) if store else ()
            except (UserError, OSError) as error:
                return Prepared(None, reason=str(error))
            if len(stored) > writer.room:
                long = f"is a JPEG of {len(stored):,} bytes, and a page holds {PAGE:,} (make it smaller)"
                return Prepared(None, reason=f"{images.where(index)} {long}")
            return Prepared(
                Sample(stored, *size, int(images.labels[index]), arrays, became == PIXELS), became
            )

        try:
            reasons = pack(writer, prepare, packing.threads)
            if reasons and packing.on_bad_sample == "raise":
                raise UserError(
                    f"{named(reasons)}; mend these files and run this again, which packs only them, or add --on-bad-sample skip"
                )
            writer.finish()
        except (KeyboardInterrupt, OSError):
            done = int((writer.state == PACKED).sum())
            print(
                f"{writer.part} keeps {done:,} of {len(images):,} images; run the same command to go on",
                file=sys.stderr,
            )
            raise
        packed, anew = writer.state == PACKED, np.nonzero(writer.tags == ANEW)[0]
        pixels = int((writer.tags[packed] == PIXELS).sum())
    size = packing.out.stat().st_size
    print(
        f"{packing.out}: {packed.sum():,} images{' with score maps' if store else ''}, {size / 2**20:,.1f} MiB"
    )
    if pixels:
        print(
            f"kept as pixels: {pixels:,} images that are no JPEG and no larger than {packing.pixels_to}"
        )
    if len(anew):
        print(
            f"encoded anew as JPEG at quality {packing.quality}: {len(anew)} images, the first is {images.where(int(anew[0]))}"
        )
    if reasons:
        print(f"left out: {named(reasons)}")


def pack(writer: BetonWriter, prepare: Callable[[int], Prepared], threads: int) -> list[str]:
    """Write all that is still to be packed; why some could not be. UserError if what is packed is
    of other images.
    """
    todo, packed = writer.todo().tolist(), np.nonzero(writer.state == PACKED)[0]
    if len(packed):
        print(
            f"{writer.path}: continuing, {len(packed):,} of {len(writer.state):,} images are packed already"
        )
    probes = packed[np.linspace(0, len(packed) - 1, min(len(packed), PROBES)).astype(int)].tolist()
    reasons = []
    # Leaving the pool waits for its threads; closing the map first drops what they have not begun.
    with (
        ThreadPoolExecutor(threads) as pool,
        closing(ordered_map(prepare, probes + todo, pool, 8 * threads)) as prepared,
    ):
        for index, ready in zip(bar(probes + todo, "pack"), prepared, strict=True):
            if writer.state[index] == PACKED:
                if ready.sample is None:
                    raise writer.changed(index)
                writer.check(index, ready.sample)
            elif ready.sample is not None:
                writer.write(index, ready.sample, ready.became)
            else:
                if writer.state[index] != FAILED:
                    writer.fail(index)
                reasons.append(ready.reason)
    return reasons


def named(reasons: list[str]) -> str:
    """The first of them, and how many there are."""
    more = f" (and {len(reasons) - NAMED} more)" if len(reasons) > NAMED else ""
    return f"{len(reasons)} images cannot be packed: {'; '.join(reasons[:NAMED])}{more}"


def as_stored(encoded: bytes, where: str, packing: Packing) -> tuple[bytes, tuple[int, int], int]:
    """An image's bytes as they are packed, its height and width, and what became of it. UserError
    if it cannot be read whole.
    """
    try:
        side, readable = max(native.probe(encoded)), True
    except native.JpegError as error:
        if error.status == native.DAMAGED:
            raise UserError(
                f"{where} cannot be decoded ({error}); replace or remove this file"
            ) from error
        readable = False
    anew = not readable or 0 < packing.max_side < side
    if anew:
        image = decode(encoded, where)
        if 0 < packing.max_side < max(image.size):
            scale = packing.max_side / max(image.size)
            image = image.resize(
                [max(1, round(extent * scale)) for extent in image.size], Image.Resampling.LANCZOS
            )
        if not readable and max(image.size) <= packing.pixels_to:
            return np.asarray(image).tobytes(), (image.height, image.width), PIXELS
        buffer = io.BytesIO()
        try:  # what was no JPEG keeps its colors at full resolution
            image.save(buffer, "JPEG", quality=packing.quality, subsampling=2 if readable else 0)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{where} cannot be encoded as JPEG ({error}); give a --max-side of at most 65,500"
            ) from error
        encoded = buffer.getvalue()
    try:
        # The rewriting reads every coefficient, so it is also the check that the file is whole.
        indexed = indexed_jpeg.transcode(encoded)
    except native.JpegError as error:
        raise UserError(
            f"{where} cannot be decoded ({error}); replace or remove this file"
        ) from error
    # An index that is there already may not be true any more: the file may have been edited.
    kept = indexed if packing.index or indexed_jpeg.MARK in encoded[:64] else encoded
    return kept, native.probe(kept), ANEW if anew else KEPT


def command() -> None:
    """The command line. SIGTERM, with which schedulers stop a job, ends it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main(tyro.cli(Packing, description=__doc__))


if __name__ == "__main__":
    run(command)

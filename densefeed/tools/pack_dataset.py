"""Pack images, and their score maps, into one FFCV dataset (.beton).

    densefeed pack --data imagenet --maps maps.h5 --out train.beton
    densefeed pack --data imagenet --split val --out val.beton
    densefeed pack --dataset cifar100 --data data --out cifar100-train.beton
    densefeed pack --data photos --val-fraction 0.15 --split val --out val.beton

Stock ffcv 1.0.2 opens these files too, except those of --form planes.

--val-fraction 0.15 divides images that have no validation set: --split train packs 85 % of each
class, and --split val the others. Give label, pack and train the same fraction and --val-seed.

--dataset is one of: cifar10, cifar100, svhn, flowers102 (in torchvision's layout below --data,
downloaded if missing); domainnet/clipart (or infograph, painting, quickdraw, real, sketch; with
their lists); list/FILE, lines of "path label" or "class/file" (if two lists have names that differ
only in train and test, as a_train.txt and a_test.txt, both define the classes of each);
classes/FILE, the class folders that the file names (ImageNet-100); share/10, that percentage of the
images of every class folder; tar (WebDataset) or parquet (Hugging Face), shards, which are also
recognized without it; hfds/NAME and torch/NAME, read by timm. Or, in place of --data,
package.module:factory: a function that is called without arguments and returns a dataset with len()
and (image, label) for [index].

JPEGs keep every pixel: they are transcoded losslessly and get an index, so that a crop can be
decoded without the rest (--no-index keeps their bytes too). Images that are not gray or RGB JPEGs
(PNG, CMYK and others), or are larger than --max-side, are encoded again as JPEG and counted. Images
that are not JPEGs and no larger than --pixels-to (CIFAR, SVHN) are stored as raw pixels.

--form planes stores what the JPEGs decode to: crops have the same pixels and are read with half of
the work, but 4:2:0 photographs take 1.5 bytes a pixel instead of 0.2 to 0.6. It pays where decoding
limits the training and the file fits in memory, or lies on a disk that keeps up.

Every image is tried, and those that cannot be packed are listed at the end. Replace these files and
run the same command again, which packs only them; or leave them out with --on-bad-sample skip. A
run that was stopped or killed, or filled the disk, is continued in the same way: its progress is in
OUT.part and OUT.part.rows. Remove both after images were added or removed.
"""

if not __package__:
    import script_start  # noqa: F401

import io
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from PIL import Image

from densefeed import native
from densefeed.pipelines.folder import score_map_spec
from densefeed.storage import indexed_jpeg
from densefeed.storage.beton_format import JPEG, PAGE, PLANES, RAW, map_arrays, map_fields
from densefeed.storage.beton_images import open_images
from densefeed.storage.beton_writer import FAILED, PACKED, BetonWriter, Sample
from densefeed.storage.dataset_names import (
    SPLITS,
    check_two_classes,
    find_unused,
    hash_images,
    list_some,
)
from densefeed.storage.fetch import make_local
from densefeed.storage.images import (
    DecodeOptions,
    Images,
    SplitOptions,
    check_jpeg,
    decode,
    limit_pixels,
    sample_evenly,
)
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.storage.selection import find_rows
from densefeed.system.devices import ThreadOptions, warn_busy
from densefeed.system.errors import UserError, explain_os_error, make_command
from densefeed.system.options import Bounds, Location, NonNegativeInt, own_first
from densefeed.system.prefetch import ordered_map
from densefeed.system.progress import bar
from densefeed.system.terminal import print, warn

# Unreadable files that a message lists.
NAMED = 10
# Packed images that a continued run prepares again, to check that the result is still the same.
PROBES = 64
# A .beton has 16 bits for a side of an image, pixels.
MOST_SIDE = 2**16 - 1
# How an image is stored. The writer's journal records it, so the values are part of its format.
KEPT, ENCODED, PIXELS = 0, 1, 2


@own_first
@dataclass(frozen=True, kw_only=True)
class Packing(SplitOptions, DecodeOptions, ThreadOptions):
    """The images to pack, and how."""

    # folder that holds train/ and val/, folder of class folders, or of tar or Parquet files, all
    # also as s3://BUCKET/FOLDER; a .beton; the root of --dataset
    data: Location | None = None
    out: Path  # the .beton to write
    # score maps of this data: HDF5 file, or folder of shards, also s3://BUCKET/FOLDER
    maps: Location | None = None
    # a name from the list above, if not a folder of class folders; or, in place of --data,
    # package.module:factory
    dataset: str = ""
    # split of the dataset; with --val-fraction, train or val
    split: str = "train"
    # shrink images with a longer side to this side, pixels; 0: never
    max_side: NonNegativeInt = 0
    # images that are not JPEGs and have no longer side are stored as raw pixels, without a checksum
    pixels_to: NonNegativeInt = 64
    # JPEG quality, 1 to 100, of images that are encoded again
    quality: Annotated[int, Bounds(1, 100)] = 95
    # what to store: JPEGs, or the color planes that they decode to
    form: Literal["jpeg", "planes"] = "jpeg"
    # transcode JPEGs losslessly with an index of their segments, which makes crops faster to decode
    index: bool = True
    # if an image cannot be packed: write no file, or a file without it
    on_bad_sample: Literal["raise", "skip"] = "raise"


class Prepared(NamedTuple):
    """An image that is ready to be written, or the reason why it cannot be packed."""

    sample: Sample | None
    stored: int = KEPT
    reason: str = ""
    warning: str = ""  # of libjpeg, about an image that was packed


def main(packing: Packing) -> None:
    """Pack the images and print a summary.

    Raises UserError after all images were tried, if one cannot be packed and --on-bad-sample is
    raise.
    """
    if packing.form == "planes" and not packing.index:
        raise UserError("--form planes needs no index; leave out --no-index")
    warn_busy()
    limit_pixels(packing.max_pixels)
    images = open_images(packing.data, packing.dataset, packing.split, packing)
    images.describe_split()
    if images.masks is not None:
        raise UserError(
            f"{packing.data} is read with masks by --dataset {packing.dataset}, and a .beton holds "
            "none; train from the folder itself"
        )
    # A validation split may have images of one class.
    if packing.split in SPLITS[0]:
        check_two_classes(images.root, images.class_names, images.labels)
    fingerprint, fields = images.fingerprint(), []
    store, rows = open_maps(packing, images) if packing.maps else (None, None)
    notes = {"class_names": images.class_names, "fingerprint": fingerprint}
    notes["names"] = hash_images(images.paths, images.labels)
    if packing.val_fraction:
        names = "dataset", "val_fraction", "val_seed"
        notes["division"] = {name: getattr(packing, name) for name in names}
    if store:
        spec = score_map_spec(store, len(images.class_names))
        notes |= {"teacher": store.header.teacher, "absent": spec.absent}
        notes |= {"max_palette": spec.max_palette, "min_window_side": spec.min_window_side}
        fields = map_fields(spec.side, spec.top_k)
    with BetonWriter(packing.out, len(images), fields, notes, identify(packing, images)) as writer:
        prepare = partial(prepare_image, images, store, rows, packing, writer.room)
        try:
            reasons, warned = pack(writer, prepare, packing.threads)
            if reasons and packing.on_bad_sample == "raise":
                refuse(reasons, writer)
            writer.finish()
        # Ctrl-C, SIGTERM (see `command`) or a full disk.
        except (KeyboardInterrupt, OSError):
            done = int((writer.state == PACKED).sum())
            print(
                f"{writer.part} keeps {done:,} of {len(images):,} images; "
                "run the same command to continue",
                file=sys.stderr,
            )
            raise
        stored = writer.tags[writer.state == PACKED]
        encoded = np.nonzero(writer.tags == ENCODED)[0]
        jpegs = int((writer.modes[writer.state == PACKED] == JPEG).sum())
    with_maps, blocks = " with score maps" if store else "", packing.out.stat().st_blocks
    # Pages of 8 MiB and their alignment leave holes, which take no space: units of 512 bytes.
    print(f"{packing.out}: {len(stored):,} images{with_maps}, {512 * blocks / 2**20:,.1f} MiB")
    if pixels := (stored == PIXELS).sum():
        print(
            f"stored as raw pixels: {pixels:,} images that are not JPEGs "
            f"and not larger than {packing.pixels_to} px"
        )
    if packing.form == "planes" and jpegs:
        print(
            f"stored as JPEG: {jpegs:,} images whose planes exceed a page of {PAGE:,} bytes, or "
            "of a rare chroma subsampling"
        )
    if len(encoded):
        print(
            f"encoded again as JPEG at quality {packing.quality}: {len(encoded)} images, "
            f"the first is {images.where(int(encoded[0]))}"
        )
    if warned:
        count = "1 packed image" if len(warned) == 1 else f"{len(warned):,} packed images"
        warn(
            f"libjpeg says that {count} may be damaged: {'; '.join(warned[:NAMED])}; "
            "`densefeed beton verify FOLDER` lists them all"
        )
    if reasons:
        print(f"left out: {list_reasons(reasons)}")
        if emptied := find_unused(images.labels[writer.state == PACKED], images.class_names):
            print(f"{packing.out} has no images of {len(emptied):,} classes: {list_some(emptied)}")


def refuse(reasons: list[str], writer: BetonWriter) -> None:
    """Raise UserError for images that cannot be packed."""
    these, them = ("this file", "it") if len(reasons) == 1 else ("these files", "them")
    raise UserError(
        f"{list_reasons(reasons)}; replace {these} and run this command again, which packs only "
        f"{them}, or add --on-bad-sample skip; after removing an image, remove {writer.part} and "
        f"{writer.journal} too"
    )


def open_maps(packing: Packing, images: Images) -> tuple[ScoreMapStore, np.ndarray]:
    """Open the score maps; return them and the row of each image. UserError as `find_rows`."""
    store = ScoreMapStore(make_local(packing.maps))
    rows = find_rows(store, images, images.root, packing.split)
    if store.error:
        print(f"{packing.maps} is compact; the .beton inherits its error: {store.error}")
    return store, rows


def identify(packing: Packing, images: Images) -> dict[str, object]:
    """Return all that a continued run must have in common with the first."""
    # The fingerprint of the images is not used here: it also covers file sizes, which change when
    # a file is repaired.
    options = ("max_side", "pixels_to", "quality", "form", "index")
    return {"images": hash_images(images.paths, images.labels)} | {
        name: getattr(packing, name) for name in options
    }


def prepare_image(
    images: Images,
    store: ScoreMapStore | None,
    rows: np.ndarray | None,
    packing: Packing,
    room: int,
    index: int,
) -> Prepared:
    """Prepare an image and its score map for the writer, whose pages have `room` bytes.

    `rows` are those of the images' maps in `store`.
    """
    where, arrays = images.where(index), ()
    try:
        encoded = images.read(index)
        warning = check_jpeg(encoded, where)
        encoded, size, stored = encode(encoded, where, packing, room)
        mode = RAW if stored == PIXELS else JPEG
        if packing.form == "planes" and mode == JPEG:
            encoded, mode = decode_planes(encoded, room)
        if store:
            arrays = map_arrays(store.rows(rows[[index]]), 0)
    # Not raised: every image is tried, so that one run lists all that are damaged.
    except UserError as error:
        return Prepared(None, reason=str(error))
    except native.JpegError as error:
        return Prepared(None, reason=f"{where} cannot be decoded ({error})")
    except OSError as error:
        return Prepared(None, reason=explain_os_error(error))
    if len(encoded) > room:
        reason = f"is a JPEG of {len(encoded):,} bytes, and a page holds {PAGE:,} (make it smaller)"
        return Prepared(None, reason=f"{where} {reason}")
    label = int(images.labels[index])
    warning = warning and f"{where} ({warning})"
    return Prepared(Sample(encoded, *size, label, arrays, mode), stored, warning=warning)


def decode_planes(encoded: bytes, room: int) -> tuple[bytes, int]:
    """Return the planes of a JPEG that was checked, and PLANES.

    The JPEG itself, and JPEG, if the planes take more than `room` bytes or the native decoder does
    not support its chroma subsampling.
    """
    try:
        planes = native.planes(encoded)
    except native.JpegError as error:
        if error.status != native.UNSUPPORTED:
            raise
        return encoded, JPEG
    return (planes, PLANES) if len(planes) <= room else (encoded, JPEG)


def pack(
    writer: BetonWriter, prepare: Callable[[int], Prepared], threads: int
) -> tuple[list[str], list[str]]:
    """Write all images that are not packed yet.

    Returns the reasons why some cannot be packed, and libjpeg's warnings about others.

    Raises UserError if images that were packed earlier have changed since.
    """
    todo, packed = writer.todo().tolist(), np.nonzero(writer.state == PACKED)[0]
    if len(packed):
        print(
            f"{writer.path}: continuing, {len(packed):,} of {len(writer.state):,} images are "
            "packed already"
        )
    # A file can change without a new name. Only preparing packed images again shows it.
    probes = packed[sample_evenly(len(packed), PROBES)].tolist()
    reasons, warned = [], []
    # The pool's exit waits for its threads. The iterator is closed before that, which drops the
    # images that no thread has begun.
    with (
        ThreadPoolExecutor(threads) as pool,
        closing(ordered_map(prepare, probes + todo, pool, 8 * threads)) as prepared,
    ):
        for index, ready in zip(bar(probes + todo, "pack"), prepared, strict=True):
            write_prepared(writer, index, ready)
            if ready.sample is None:
                reasons.append(ready.reason)
            if ready.warning:
                warned.append(ready.warning)
    return reasons, warned


def write_prepared(writer: BetonWriter, index: int, ready: Prepared) -> None:
    """Write an image or record that it cannot be packed; of a packed one, check that it is equal.

    Raises UserError if it is not.
    """
    if writer.state[index] == PACKED:
        if ready.sample is None:
            raise writer.changed(index)
        writer.check(index, ready.sample)
    elif ready.sample is not None:
        writer.write(index, ready.sample, ready.stored)
    # An earlier run may have recorded it in the journal already.
    elif writer.state[index] != FAILED:
        writer.fail(index)


def list_reasons(reasons: list[str]) -> str:
    """Return the number of reasons and the first of them."""
    more = f" (and {len(reasons) - NAMED} more)" if len(reasons) > NAMED else ""
    images = "1 image" if len(reasons) == 1 else f"{len(reasons):,} images"
    return f"{images} cannot be packed: {'; '.join(reasons[:NAMED])}{more}"


def encode(
    encoded: bytes, where: str, packing: Packing, room: int
) -> tuple[bytes, tuple[int, int], int]:
    """Return an image's bytes as they are packed, its (height, width), and how it is stored.

    Pixels of more than `room` bytes are encoded as JPEG.
    `check_jpeg` has passed it. Raises UserError if it cannot be decoded as a whole.
    """

    def damaged(error: native.JpegError) -> UserError:
        return UserError(f"{where} cannot be decoded ({error}); replace or remove this file")

    try:
        side, readable = max(native.probe(encoded)), True
    except native.JpegError as error:
        # UNSUPPORTED is a format or a color that Pillow may read.
        if error.status == native.DAMAGED:
            raise damaged(error) from error
        side, readable = 0, False
    again = not readable or 0 < packing.max_side < side
    if again:
        image = shrink(decode(encoded, where), packing.max_side)
        # Small images such as CIFAR's stay exact; JPEG would change their pixels.
        is_small = max(image.size) <= min(packing.pixels_to, MOST_SIDE)
        if not readable and is_small and 3 * image.height * image.width <= room:
            return np.asarray(image).tobytes(), (image.height, image.width), PIXELS
        buffer = io.BytesIO()
        try:
            # Images that were not JPEGs keep their color at full resolution (4:4:4).
            image.save(buffer, "JPEG", quality=packing.quality, subsampling=2 if readable else 0)
        # libjpeg encodes sides of at most 65,500 pixels.
        except (OSError, ValueError) as error:
            raise UserError(
                f"{where} cannot be encoded as JPEG ({error}); give a --max-side of at most 65,500"
            ) from error
        encoded = buffer.getvalue()
    try:
        # Transcoding reads every coefficient, so it also checks that the file is whole.
        indexed = indexed_jpeg.transcode(encoded)
    except native.JpegError as error:
        raise damaged(error) from error
    # An index that is there already may be out of date: the file may have been edited since.
    if packing.index or indexed_jpeg.MARK in encoded[:64]:
        encoded = indexed
    return encoded, native.probe(encoded), ENCODED if again else KEPT


def shrink(image: Image.Image, max_side: int) -> Image.Image:
    """Resize an image whose longer side exceeds `max_side` pixels to that side; 0: never."""
    if not 0 < max_side < max(image.size):
        return image
    scale = max_side / max(image.size)
    size = [max(1, round(extent * scale)) for extent in image.size]
    return image.resize(size, Image.Resampling.LANCZOS)


# Schedulers stop a job with SIGTERM.
command = make_command(main, Packing, __doc__, sigterm=True)


if __name__ == "__main__":
    command()

"""Verify .beton files and folders of images: read all checked bytes, decode every image."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

from densefeed import native
from densefeed.native import MAX_PIXELS
from densefeed.storage.beton import Beton
from densefeed.storage.beton_format import name_classes
from densefeed.storage.images import Images, MaxPixels, limit_pixels, verify_images
from densefeed.system.devices import CORES
from densefeed.system.errors import UserError
from densefeed.system.object_url import check_local
from densefeed.system.options import Bounds
from densefeed.system.prefetch import ordered_map
from densefeed.system.progress import bar
from densefeed.system.terminal import print

# Damaged images that a terminal shows.
LISTED = 50


def verify(path: Path, threads: int) -> list[str]:
    """Check labels, arrays against their checksums, and decode all images.

    Returns a sentence per damaged sample, and one for labels that are not classes.

    Raises UserError as `Beton` if the file cannot be opened.
    """
    faults = []
    with closing(Beton(path)) as beton, ThreadPoolExecutor(threads) as pool:
        try:
            name_classes(path, beton.notes, beton.labels)
        except UserError as error:
            faults.append(str(error))
        found = ordered_map(partial(find_damage, beton), range(len(beton)), pool, 16 * threads)
        # If it is interrupted, samples that no thread has begun are not checked any more.
        with closing(found):
            faults += filter(None, bar(found, f"verify {path.name}", len(beton)))
    return faults


def find_damage(beton: Beton, index: int) -> str | None:
    """Check a sample as `verify` does; return a sentence if it is damaged."""
    try:
        beton.check_map(index)
        stored, mode = beton.image(index)
        native.check(stored, int(beton.heights[index]), int(beton.widths[index]), mode)
    except UserError as error:
        return str(error)
    # A CMYK image of a third-party file is not damaged: the loaders decode it with Pillow.
    except native.JpegError as error:
        if error.status != native.UNSUPPORTED:
            return f"{beton.where(index)} is damaged ({error}); pack or copy the file again"
    return None


def verify_files(
    files: tuple[Path, ...],
    /,
    dataset: str = "",
    split: str = "train",
    max_pixels: MaxPixels = MAX_PIXELS,
) -> None:
    """Read all checked bytes, decode every image, and list every damaged one.

    If any is damaged, the exit code is 2, after the last file.

    Args:
        files: .beton files, and folders of images as densefeed pack reads them.
        dataset: name of the dataset in a folder, from the list in the --help of packing, if it is
            not a folder of class folders.
        split: split of the dataset in a folder.
    """
    Bounds(1).check("max_pixels", max_pixels)
    limit_pixels(max_pixels)
    bad = []
    if not files:
        raise UserError("no .beton file was named, and no folder of images; name one or several")
    for path in files:
        check_local(path)
    # All at once: the first may take minutes, and the name of the second may be wrong.
    folders = {path: Images(path, dataset, split) for path in files if path.is_dir()}
    for images in folders.values():
        images.describe_split()
    if (dataset or split != "train") and not folders:
        raise UserError("--dataset and --split are of folders of images; remove them")
    for path in files:
        images = folders.get(path)
        try:
            damaged = verify_folder(path, images) if images else verify(path, CORES)
        except UserError as error:
            damaged = [str(error)]
        print_list(damaged or [f"{path}: no faults"])
        if damaged:
            bad.append(f"{path} ({len(damaged):,})")
    if bad:
        raise UserError(
            f"damage was found in {', '.join(bad)}; it is listed above: replace or remove images, "
            "pack or copy .beton files again"
        )


def verify_folder(path: Path, images: Images) -> list[str]:
    """Decode all images of a folder, and print the speed and what libjpeg warns of.

    Returns a sentence per damaged image.
    """
    began = time.perf_counter()
    damaged, warned = verify_images(images, path.name, CORES)
    rate = len(images) / (time.perf_counter() - began)
    print(f"{path}: {len(images):,} images, {rate:,.0f} images/s on {CORES} threads")
    if warned:
        print_list(warned)
        print(
            f"{path}: libjpeg warns of {len(warned):,} images; they are read as they are, but "
            "may be damaged: compare them with their source"
        )
    return damaged


def print_list(lines: list[str]) -> None:
    """Print all lines to a file or pipe, and LISTED of them on a terminal."""
    shown = lines[:LISTED] if sys.stdout.isatty() else lines
    for line in shown:
        print(line)
    if len(shown) < len(lines):
        print(f"and {len(lines) - len(shown):,} more; redirect the output to a file to list all")

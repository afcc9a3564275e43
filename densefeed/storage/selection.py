"""Copy the maps of some images of a store, found by the images' names, to a new store.

So maps that were labeled from a folder also serve its images in tar or Parquet files, a part of
them, or the same files in another order.
"""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np

from densefeed.storage.dataset_names import describe_difference, hash_images
from densefeed.storage.images import SIZED_FILES, Images, sample_evenly
from densefeed.storage.maintenance import copy, summary
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.storage.shard_plan import PLAN, read_plan
from densefeed.system.errors import UserError
from densefeed.system.object_folder import ObjectFolder
from densefeed.system.object_url import ObjectURL
from densefeed.system.options import Location
from densefeed.system.terminal import print, warn


def remove_ending(path: str) -> str:
    return os.path.splitext(path)[0]


def find_ending(path: str) -> str:
    return os.path.splitext(path)[1]


def take_name(path: str) -> str:
    return PurePosixPath(path).stem


# What identifies an image, the most exact first: the path; the path without its ending, for images
# in another format; the file's name alone, WebDataset's key where tars hold no class folders.
KEYS: tuple[Callable[[str], str], ...] = (str, remove_ending, take_name)


def match_names(stored: list[str], wanted: list[str]) -> np.ndarray:
    """Return for each wanted path the row of the same image among the stored ones, int64.

    The first of KEYS that finds all decides. Raises LookupError, which names a path, if none does
    or if the key of a path is that of several.
    """
    for key in KEYS:
        rows = {key(path): row for row, path in enumerate(stored)}
        keys = [key(path) for path in wanted]
        missing = [path for path, name in zip(wanted, keys, strict=True) if name not in rows]
        if missing:
            continue
        known = Counter(map(key, stored))
        if doubled := [name for name, n in Counter(keys).items() if n > 1 or known[name] > 1]:
            raise LookupError(f"several images are called {doubled[0]}")
        return np.array([rows[name] for name in keys], np.int64)
    raise LookupError(f"{len(missing):,} have none, the first {missing[0]}")


def find_rows(
    store: ScoreMapStore, images: Images, where: Path | ObjectURL, split: str = ""
) -> np.ndarray:
    """Return the row of each image's map, int64.

    The images may be a part of those that were labeled, if they were divided by SplitOptions.

    Raises UserError, which calls the images `where` and `split`, if the store is of others.
    """
    whole = images.whole
    if whole is not None and store.describes(whole.fingerprint()):
        store.check_rows(whole.labels, whole.paths, where)
        return images.rows
    facts = images.fingerprint(), images.labels, images.paths
    store.check(*facts, where, split, images.is_object)
    return np.arange(len(images))


def select(store: ScoreMapStore, images: Images, out: Path) -> ScoreMapStore:
    """Write the maps of `images` in their order to `out`, unchanged, and return the new store.

    `out` appears only when it is complete. Raises UserError if it exists, if a row is damaged, or
    unless each image has one map by its name, of its label. Other images of the same names and
    labels are noticed by their sizes (`compare_sizes`). Where these cannot be compared, it prints a
    warning.
    """
    header = store.header
    if len(header.class_names) != len(images.class_names):
        names = header.class_names, images.class_names
        difference = describe_difference(names[0], "in the maps", names[1], "in the images")
        raise UserError(
            f"{store.path} is of {len(header.class_names)} classes and {images.root} has "
            f"{len(images.class_names)} ({difference}); select maps for images of the same classes"
        )
    try:
        rows = match_names(store.paths(), images.paths)
    except LookupError as error:
        raise UserError(
            f"{store.path} has no map by name for each image of {images.root}: "
            f"{error}; label {images.root}"
        ) from None
    if (wrong := store.labels[rows] != images.labels).any():
        n = int(wrong.argmax())
        raise UserError(
            f"{images.where(n)} has label {images.labels[n]}, but its map in {store.path} is of "
            f"label {store.labels[rows[n]]}: the classes are others; label {images.root}"
        )
    if not compare_sizes(store, images, rows):
        warn(
            f"{store.path} does not tell whether {images.root} holds other images of the "
            "same names and labels; compare them with densefeed audit"
        )
    header = replace(
        header, fingerprint=images.fingerprint(), class_names=tuple(images.class_names)
    )
    return copy(store, out, header, rows, images.labels, images.paths)


def compare_sizes(store: ScoreMapStore, images: Images, rows: np.ndarray) -> bool:
    """Compare sizes of images with those at the labeling; return whether there were any to compare.

    A folder of shards has the sizes of up to 1,024 files in its plan. Those of an HDF5 file are in
    its fingerprint alone, which needs all labeled images. Files of another type have other sizes.
    Raises UserError if an image has another size.
    """
    if not store.path.is_dir() or not (store.path / PLAN).exists():
        return compare_fingerprint(store, images, rows)
    sizes, is_compared = read_plan(ObjectFolder(store.path)).sizes, False
    for n in np.flatnonzero(np.isin(rows, list(sizes))).tolist():
        before, path = sizes[int(rows[n])], store.image_path(int(rows[n]))
        if before is None or find_ending(path) != find_ending(images.paths[n]):
            continue
        size, is_compared = images.sample_sizes(range(n, n + 1))[n], True
        if size != before:
            raise UserError(
                f"{images.where(n)} has {size or 0:,} bytes, and had {before:,} when {path} was "
                f"labeled: it is another image of the same name; label {images.root}"
            )
    return is_compared


def compare_fingerprint(store: ScoreMapStore, images: Images, rows: np.ndarray) -> bool:
    """Compare the fingerprint of a store with that of `images` under their labeled names.

    Returns False, and compares nothing, unless they are all images of the store in files of the
    same types. Raises UserError if the fingerprints differ.
    """
    paths = store.paths()
    if len(rows) != len(paths):
        return False
    image_of_row = np.argsort(rows)
    stored, now = (list(map(find_ending, each)) for each in (paths, images.paths))
    if stored != [now[n] for n in image_of_row.tolist()]:
        return False
    sampled = image_of_row[sample_evenly(len(paths), SIZED_FILES)].tolist()
    sizes = [images.sample_sizes(range(n, n + 1))[n] for n in sampled]
    if not store.describes(hash_images(paths, store.labels, sizes)):
        raise UserError(
            f"{images.root} has the names and labels of the maps in {store.path}, but its files "
            "have other sizes than the labeled ones: they are other images, or were written again; "
            f"label {images.root}"
        )
    return True


def select_maps(
    store: Path, /, data: Location, out: Path, dataset: str = "", split: str = "train"
) -> None:
    """Write the maps of the images of DATA, found by their names, to a file.

    For images of STORE that are now in tar or Parquet files, in another order, or fewer.

    Args:
        store: score maps, an HDF5 file or a folder of shards.
        data: images as for labeling: a folder of class folders, or of tar or Parquet files.
        out: HDF5 file to write.
        dataset: name of the dataset, if DATA is not a folder of class folders.
        split: split of the dataset.
    """
    print(summary(select(ScoreMapStore(store), Images(data, dataset, split), out)))

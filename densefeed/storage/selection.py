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

from densefeed.storage.dataset_names import describe_difference
from densefeed.storage.images import Images
from densefeed.storage.maintenance import copy, summary
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.storage.shard_plan import PLAN, read_plan
from densefeed.system.errors import UserError
from densefeed.system.object_folder import ObjectFolder
from densefeed.system.object_url import ObjectURL
from densefeed.system.options import Location
from densefeed.system.terminal import print


def remove_ending(path: str) -> str:
    return os.path.splitext(path)[0]


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
    store.check(images.fingerprint(), images.labels, images.paths, where, split)
    return np.arange(len(images))


def select(store: ScoreMapStore, images: Images, out: Path) -> ScoreMapStore:
    """Write the maps of `images` in their order to `out`, unchanged, and return the new store.

    `out` appears only when it is complete. Raises UserError if it exists, if a row is damaged, or
    unless each image has one map by its name, of its label. Another image of the same name and
    label is noticed only by its size, where the plan of the labeling holds that.
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
    check_sizes(store, images, rows)
    header = replace(
        header, fingerprint=images.fingerprint(), class_names=tuple(images.class_names)
    )
    return copy(store, out, header, rows, images.labels, images.paths)


def check_sizes(store: ScoreMapStore, images: Images, rows: np.ndarray) -> None:
    """Raise UserError if an image has another size than when it was labeled.

    A folder of shards has the sizes of up to 1,024 files in its plan, an HDF5 file has none.
    """
    if not store.path.is_dir() or not (store.path / PLAN).exists():
        return
    sizes = read_plan(ObjectFolder(store.path)).sizes
    for n in np.flatnonzero(np.isin(rows, list(sizes))).tolist():
        before, path = sizes[int(rows[n])], store.image_path(int(rows[n]))
        if before is None or os.path.splitext(path)[1] != os.path.splitext(images.paths[n])[1]:
            continue
        with images.open(n) as file:
            size = file.seek(0, os.SEEK_END)
        if size != before:
            raise UserError(
                f"{images.where(n)} has {size:,} bytes, and had {before:,} when {path} was "
                f"labeled: it is another image of the same name; label {images.root}"
            )


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
    print(
        "images and maps were matched by name and label; if other images may have the same names, "
        "as those of another split, compare them with densefeed audit"
    )

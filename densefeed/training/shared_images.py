"""Find out whether images of the validation set are training images too."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial

import numpy as np

from densefeed import native
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.folder import FolderSource
from densefeed.pipelines.loader import Source
from densefeed.pipelines.open import DataOptions
from densefeed.storage.beton import Beton
from densefeed.storage.beton_format import JPEG, PLANES, RAW
from densefeed.storage.images import Images, decode, sample_evenly
from densefeed.storage.indexed_jpeg import transcode
from densefeed.system.errors import UserError
from densefeed.system.object_url import ObjectURL
from densefeed.system.terminal import warn

# Training files that are looked for among those of the validation set, and most of the latter.
COMPARED_FILES, MOST_FILES = 1024, 2**17
# Packed validation images that are looked for among packed training images, and the images of equal
# sizes there that are read.
COMPARED_IMAGES, MOST_IMAGES = 1024, 4096
# Files of a folder that are looked for in a .beton. To transcode a JPEG of 500 pixels takes 3 ms.
TRANSCODED = 32
# Files of a folder that are looked for among those of another folder, and files there whose sizes
# are compared: path and stat take 7 us. Of these, the most whose bytes are compared.
COMPARED_COPIES, SIZED_COPIES, READ_COPIES = 256, 10_000, 256
# Bytes of an image that are compared, from its middle: all of the largest that packing stores as
# raw pixels by default, whose middle may be blank.
COMPARED_BYTES = 3 * 64 * 64
# A smaller share of equal images may be those that a data set holds twice.
LEAST_SHARE = 0.01

# Bits of a mode and two sides.
EXTENT_BITS = 34

# How an image may be stored: its bytes, mode and sides as a number, and a function that returns the
# bytes to compare.
Form = tuple[int, Callable[[], bytes]]


def warn_shared_images(data: DataOptions, train: Source, val: Source) -> None:
    """Warn if images of the validation set are training images too, see `estimate_shared`."""
    share = estimate_shared(train, val)
    if not share:
        return
    about = "" if share == 1 else f"about {100 * share:.0f} % of "
    is_folder = not isinstance(data.train, ObjectURL) and data.train.is_dir()
    instead = ", or give --val-fraction 0.15 in its place" if is_folder else ""
    warn(
        f"{about}the images of --val {data.val} are training images of --data "
        f"{data.train} too, so its accuracy is not that of new images; give --val other images"
        f"{instead}"
    )


def estimate_shared(train: Source, val: Source) -> float:
    """Estimate the share of validation images that are training images too, from samples; 0 to 1.

    It finds
      - sets of equal fingerprints;
      - files of both sets, also through links in their folders;
      - copies of files, also renamed ones, in another folder: 256 files of the validation set are
        compared by their sizes, then by the bytes in their middle, with training files of the same
        path below the split, and with up to 10,000 evenly spaced others. A share of 1 % is found in
        92 of 100 cases; of renamed copies in a larger training set, a smaller part;
      - images of two .beton files that were packed alike: up to 1,024 of the validation set are
        compared by their sizes, then by the bytes in their middle;
      - images of a folder, of tar or Parquet files in a .beton that holds their pixels unchanged:
        JPEGs as they are, with an index or as planes, and small images as raw pixels. Of the folder
        32 images are compared, so a share of 10 % of them is found in 97 of 100 cases, and one of
        1 % in 28.

    It does not find images that were resized or encoded again (--max-side, PNGs of more than 64
    pixels, files of FFCV), copies of files in tar or Parquet files, two .beton files of different
    --form or --index, and images in object storage. A share of equal bytes below 1 % counts as
    none.
    """
    if train.fingerprint == val.fingerprint:
        return 1.0
    share = compare_files(train, val)
    # What cannot be read is reported when its sample comes.
    try:
        share = share or compare_contents(train, val)
    except (UserError, OSError):
        return 0.0
    return min(1.0, share)


def compare_files(train: Source, val: Source) -> float:
    """Estimate the share of the validation set's files that are training files."""
    own = set(resolve_folders(val.files(MOST_FILES)))
    sampled = train.files(COMPARED_FILES)
    hits = sum(path in own for path in resolve_folders(sampled))
    if not hits:
        return 0.0
    count = len(sampled) if len(sampled) < COMPARED_FILES else len(train.labels)
    return hits / len(sampled) * count / len(own)


def resolve_folders(paths: Sequence[str]) -> Iterator[str]:
    """Yield absolute paths without links in their folders; a folder is looked up once."""
    resolve = cache(os.path.realpath)
    return (os.path.join(resolve(folder), name) for folder, name in map(os.path.split, paths))


def compare_contents(train: Source, val: Source) -> float:
    """Estimate the share of the validation images whose bytes are those of training images.

    Raises UserError or OSError for a file that cannot be read.
    """
    betons = [each.beton if isinstance(each, FfcvSource) else None for each in (train, val)]
    train_beton, val_beton = betons
    share = 0.0
    if train_beton and val_beton:
        sampled = sample_evenly(len(val_beton), COMPARED_IMAGES)
        keys = combine_sizes(val_beton)[sampled].tolist()
        forms = [
            [(key, partial(val_beton.middle, index, COMPARED_BYTES))]
            for key, index in zip(keys, sampled.tolist(), strict=True)
        ]
        share = find_share(forms, train_beton)
    elif train_beton and isinstance(val, FolderSource):
        share = find_share(sample_forms(val.images, train_beton), train_beton)
    elif val_beton and isinstance(train, FolderSource):
        share = find_share(sample_forms(train.images, val_beton), val_beton)
        share *= len(train.labels) / len(val.labels)
    elif isinstance(train, FolderSource) and isinstance(val, FolderSource):
        share = find_copies(train.images, val.images)
    return share if share >= LEAST_SHARE else 0.0


def find_copies(train: Images, val: Images) -> float:
    """Estimate the share of validation files of a folder that are copies of training files.

    0 for images that are no files, as in object storage and in tars.
    """
    places = sample_evenly(len(val), COMPARED_COPIES).tolist()
    wanted = {val.paths[place] for place in places}
    named = [row for row, path in enumerate(train.paths) if path in wanted]
    spaced = sample_evenly(len(train), SIZED_COPIES).tolist()
    mine, theirs = measure_files(val, places), measure_files(train, {*named, *spaced})
    known = set(mine.values())
    equal = np.array([row for row, size in theirs.items() if size in known], np.int64)
    # Files without compression may all be of one size. Those of the same path are always read.
    read = {*equal[sample_evenly(len(equal), READ_COPIES)].tolist()} if len(equal) else set()
    read |= {row for row in named if theirs.get(row) in known}
    there = {(theirs[row], read_middle(train, row)): train.paths[row] for row in read}
    found = [there.get((size, read_middle(val, place))) for place, size in mine.items() if there]
    certain = sum(path in wanted for path in found)
    others = len(found) - found.count(None) - certain
    others *= len(train) / len(spaced) * max(1, len(equal) / max(1, len(read)))
    return (certain + others) / len(places)


def measure_files(images: Images, rows: Iterable[int]) -> dict[int, int]:
    """Return the bytes of images' files by their rows, without those that are no files."""
    sizes = {}
    for row in rows:
        with suppress(OSError):
            sizes[row] = os.stat(images.where(row)).st_size
    return sizes


def read_middle(images: Images, row: int) -> bytes:
    """Read the bytes in the middle of a file that `cut_middle` returns of all."""
    with images.open(row) as file:
        end = file.seek(0, os.SEEK_END)
        size = min(end, COMPARED_BYTES)
        file.seek((end - size) // 2)
        return file.read(size)


def combine_sizes(beton: Beton) -> np.ndarray:
    """Combine bytes, mode, height and width of each stored image into a number, int64 `[N]`."""
    return beton.images.size << EXTENT_BITS | combine_extents(beton)


def combine_extents(beton: Beton) -> np.ndarray:
    """Combine mode, height and width of each stored image into a number, int64 `[N]`."""
    sides = beton.modes, beton.heights, beton.widths
    return combine_extent(*(side.astype(np.int64) for side in sides))


def combine_extent(mode: int, height: int, width: int) -> int:
    """Combine mode, height and width, also int64 arrays; a mode has 2 bits, a side 16."""
    return mode << 32 | height << 16 | width


def find_share(forms: list[list[Form]], beton: Beton) -> float:
    """Estimate the share of images, each with its possible forms, that a .beton holds.

    Only images of equal sizes are read. UserError or OSError for one that cannot be read.
    """
    keys, own = [key for image in forms for key, _ in image], combine_sizes(beton)
    ids = np.flatnonzero(np.isin(own, keys))
    # Images of raw pixels may all be of one size.
    read = ids[sample_evenly(len(ids), MOST_IMAGES)].tolist()
    there = {(int(own[index]), beton.middle(index, COMPARED_BYTES)) for index in read}
    known = {key for key, _ in there}
    hits = sum(
        any(key in known and (key, content()) in there for key, content in image) for image in forms
    )
    return hits / len(forms) * len(ids) / len(read) if hits else 0.0


def sample_forms(images: Images, beton: Beton) -> list[list[Form]]:
    """Read up to 32 images of a folder; return the forms that the .beton may hold of each."""
    extents = set(np.unique(combine_extents(beton)).tolist())
    sampled = sample_evenly(len(images), TRANSCODED).tolist()
    # The native decoder runs on several threads at once.
    with ThreadPoolExecutor() as pool:
        return list(pool.map(partial(list_forms, images, extents), sampled))


def list_forms(images: Images, extents: set[int], index: int) -> list[Form]:
    """Return what packing may store of an image, in the modes and sizes that `extents` combine.

    Empty for an image that cannot be read.
    """
    found = []
    try:
        encoded = images.read(index)
        try:
            extent = native.probe(encoded)
            if combine_extent(JPEG, *extent) in extents:
                found += [(JPEG, encoded), (JPEG, transcode(encoded))]
            if combine_extent(PLANES, *extent) in extents:
                found.append((PLANES, native.planes(encoded)))
        # Packing decodes with Pillow what the native decoder does not support.
        except native.JpegError:
            extent = images.size(index)
            if combine_extent(RAW, *extent) in extents:
                found.append((RAW, np.asarray(decode(encoded, images.where(index))).tobytes()))
    except (UserError, OSError):
        return []
    return [
        (len(stored) << EXTENT_BITS | combine_extent(mode, *extent), partial(cut_middle, stored))
        for mode, stored in found
    ]


def cut_middle(stored: bytes) -> bytes:
    """Return what `Beton.middle` returns of these bytes."""
    size = min(len(stored), COMPARED_BYTES)
    start = (len(stored) - size) // 2
    return stored[start : start + size]

"""`--loader folder`: a folder of images, with the score maps in an HDF5 store beside it.

The images are files in class folders, or lie in tar or Parquet shards.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from densefeed import native
from densefeed.pipelines.batch import ScoreMapSpec, allocate_maps
from densefeed.pipelines.loader import Encoded, Source

# Importing it registers its kinds of datasets.
from densefeed.storage import instances  # noqa: F401
from densefeed.storage.dataset_items import DatasetItems
from densefeed.storage.images import UNDIVIDED, Images, SplitOptions, decode, sample_evenly
from densefeed.storage.indexed_jpeg import find_index_damage
from densefeed.storage.score_maps import ScoreMaps, ScoreMapStore
from densefeed.storage.selection import find_rows
from densefeed.system.errors import UserError, explain_os_error
from densefeed.system.progress import bar

# Files per task of a reading thread.
CHUNK = 16
# Bytes of a JPEG that are read to find its size, one after the other, before all of it. The size is
# in the first kilobyte, and behind Exif data with a thumbnail mostly in the first 64.
HEADS = 2**12, 2**16
# Files of a task that reads sizes.
SIZED = 1024


class StoreMaps(Source):
    """Base of sources whose score maps lie in an HDF5 store beside the images: `_store`.

    `_rows` are those of the samples, int64 `[N]`. A source of maps that lie elsewhere overrides
    `map_parts` and `check_map`.
    """

    _store: ScoreMapStore | None = None

    def map_parts(self, ids: np.ndarray) -> native.Parts:
        return locate_rows(self._store, self._rows[ids])

    def maps(self, ids: np.ndarray) -> ScoreMaps:
        maps, failed = read_parts(self.map_parts(ids), self.score_maps)
        for index in ids[failed].tolist():
            # Raises the reason. A map that failed once and now reads well has none to give.
            self.check_map(index)
            raise UserError(f"the map of {self.where(index)} cannot be read; copy the file again")
        return maps

    def check_map(self, index: int) -> None:
        self._store.checked_rows(self._rows[[index]])

    def close(self) -> None:
        if self._store:
            self._store.close()


class FolderSource(StoreMaps):
    """The images of a folder and, if `maps` names a store, their score maps.

    `dataset`, `split`, `division` and `whole` are those of Images. The store must be made for
    exactly these images, or for the whole set that they were divided from. Files are read on
    `threads` threads. Pillow decodes there what the native decoder does not support: anything but
    gray and RGB JPEGs (PNG, WebP, CMYK, ...).
    """

    remedy = (
        "replace or remove this file; `densefeed beton verify FOLDER` lists all that are damaged"
    )

    def __init__(
        self,
        root: str | Path,
        split: str,
        maps: str | Path | None = None,
        threads: int = 1,
        dataset: str | DatasetItems = "",
        division: SplitOptions = UNDIVIDED,
        whole: Images | None = None,
    ) -> None:
        self.images = Images(Path(root), dataset, split, division, whole)
        self.blocks = self.images.blocks
        self.labels, self.class_names = self.images.labels, self.images.class_names
        self.where = self.images.where
        if folder := self.images.masks:
            rows = range(len(folder)) if self.images.rows is None else self.images.rows
            self.masks = sum(folder.masks[row] is not None for row in rows)
            self.instances = getattr(folder, "instances", False)
        self.fingerprint = self.images.fingerprint()
        if maps is not None:
            self._store = ScoreMapStore(maps)
            self._rows = find_rows(self._store, self.images, root)
            self.score_maps = score_map_spec(self._store, len(self.class_names))
            self.teacher = self._store.header.teacher
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="read")

    def files(self, most: int) -> list[str]:
        return [self.where(index) for index in sample_evenly(len(self.labels), most).tolist()]

    def begin(self, ids: np.ndarray) -> Encoded:
        encoded = Encoded.in_memory(len(ids))
        encoded.tasks = [
            self._readers.submit(self._read, encoded, ids, range(at, min(at + CHUNK, len(ids))))
            for at in range(0, len(ids), CHUNK)
        ]
        return encoded

    def _read(self, encoded: Encoded, ids: np.ndarray, rows: range) -> None:
        """Read the files of these rows into `encoded`, or the reason why one cannot be read."""
        before = None
        for row, index in zip(rows, ids[rows].tolist(), strict=True):
            # Repeats of an image follow each other. They share its memory, so it is decoded once.
            if index == before:
                encoded.samples[row] = encoded.samples[row - 1]
                if row - 1 in encoded.errors:
                    encoded.errors[row] = encoded.errors[row - 1]
                continue
            before = index
            encoded.fill(row, partial(self._read_one, index))

    def _read_one(self, index: int) -> tuple[np.ndarray, int, tuple[int, int]]:
        """Read a file, or its pixels if Pillow must decode it; return its kind and extent too."""
        file = self.images.read(index)
        try:
            extent = native.probe(file)
            return np.frombuffer(file, np.uint8), native.JPEG, extent
        except native.JpegError:
            # Pillow decodes it, or raises UserError with the reason.
            pixels = np.asarray(decode(file, self.where(index)))
            return pixels, native.RAW, pixels.shape[:2]

    def extents(self) -> tuple[np.ndarray, np.ndarray]:
        """Read the sizes of all images, see `Source`. UserError for a file that cannot be read."""
        firsts = range(0, len(self.labels), SIZED)
        chunks = [
            self._readers.submit(self._extents, range(first, min(first + SIZED, len(self.labels))))
            for first in firsts
        ]
        # After an error the bar ends here. Collected as garbage it may end on the thread of another
        # bar, and wait for it forever.
        with closing(bar(chunks, "sizes of images")) as waited:
            extents = [chunk.result() for chunk in waited]
        return tuple(np.concatenate(extents).T)

    def _extents(self, indices: range) -> np.ndarray:
        """Read the sizes of these images, int64 `[N, 2]`."""
        return np.array([self._extent(index) for index in indices], np.int64)

    def _extent(self, index: int) -> tuple[int, int]:
        """Read the height and width of a file; 1 x 1 if it is damaged."""
        try:
            with self.images.open(index) as file:
                head = b""
                for more in HEADS:
                    head += file.read(more)
                    with suppress(native.JpegError):
                        return native.probe(head)
            return self.images.size(index)
        except OSError as error:
            # Damage is reported, or skipped, when the file's turn in a batch comes. A file that the
            # system does not give now may be given to another rank, or to a resumed run, and their
            # batches would differ.
            if error.errno or getattr(error.__cause__, "errno", None):
                problem = explain_os_error(error)
                raise UserError(f"{problem}; --aspects needs the size of every image") from error
            return 1, 1

    def image(self, index: int) -> Image.Image:
        encoded, where = self.images.read(index), self.where(index)
        # As the native decoder does.
        if damage := find_index_damage(encoded):
            raise UserError(f"{where} cannot be decoded ({damage}); replace or remove this file")
        return decode(encoded, where)

    def _mask_row(self, index: int) -> int:
        rows = self.images.rows
        return index if rows is None else int(rows[index])

    def mask(self, index: int, height: int, width: int) -> Tensor:
        row, masks = self._mask_row(index), self.images.masks
        mask = masks.mask(row)
        masks.check_size(row, mask, height, width)
        return mask

    def objects(self, index: int, height: int, width: int) -> list[dict]:
        # It checks the size.
        self.mask(index, height, width)
        return self.images.masks.objects(self._mask_row(index))

    def close(self) -> None:
        self._readers.shutdown(cancel_futures=True)
        super().close()


def read_parts(parts: native.Parts, spec: ScoreMapSpec) -> tuple[ScoreMaps, np.ndarray]:
    """Read and check score maps on the calling thread; return them and which failed, bool `[N]`."""
    maps = ScoreMaps(*(field.numpy() for field in allocate_maps(len(parts), spec, torch.empty)))
    # The native library takes 3 microseconds for a compact row, numpy 17.
    status = native.read_maps(replace(parts, to=maps, limits=spec.limits))
    return maps, status != native.OK


def locate_rows(store: ScoreMapStore, ids: np.ndarray) -> native.Parts:
    """Locate the score maps of the samples `ids` in an HDF5 store, for the native threads."""
    files, offsets = store.places(ids)
    packed = native.Packed(store.palette[ids], store.packed.levels) if store.packed else None
    return native.Parts(files, offsets, (), store.crcs[ids], packed)


def score_map_spec(store: ScoreMapStore, num_classes: int) -> ScoreMapSpec:
    """Return the specification of a store's maps, after a check of all of its values.

    UserError if the store scores other classes than the dataset has, or holds impossible values.
    """
    header = store.header
    if header.num_classes != num_classes:
        raise UserError(
            f"{store.path} scores {header.num_classes} classes but the data has {num_classes}; "
            "relabel with a teacher of the same classes"
        )
    store.check_values()
    return map_spec(store)


def map_spec(store: ScoreMapStore) -> ScoreMapSpec:
    """Return the specification of a store's maps, whose values it does not check."""
    header = store.header
    return ScoreMapSpec(
        header.side,
        header.top_k,
        header.num_classes,
        header.absent,
        store.max_palette,
        store.min_window_side,
    )

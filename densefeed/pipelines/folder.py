"""`--loader folder`: a folder of images (any dataset that timm reads), with the score maps in an
HDF5 file beside it.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from densefeed import native
from densefeed.pipelines.batch import ScoreMapSpec
from densefeed.pipelines.loader import Encoded, Fetch, MapRows, Memory
from densefeed.storage.images import Images, decode
from densefeed.storage.score_maps import ScoreMaps, ScoreMapStore
from densefeed.system.errors import UserError, explain_os_error

CHUNK = 16  # files a thread reads at once


class _File(NamedTuple):
    """A file as the native decoder takes it."""

    content: np.ndarray  # uint8: its bytes, or the pixels of what is no JPEG of ours
    kind: int
    height: int
    width: int


class FolderSource:
    """Images of a folder, and their score maps if `maps` names a store made for exactly this
    folder.

    Files are read on `threads` threads; what is no gray or RGB JPEG (PNG, WebP, CMYK, ...) is
    decoded there by Pillow.
    """

    remedy = "replace or remove this file"

    def __init__(self, root: Path, split: str, maps: Path | None = None, threads: int = 1) -> None:
        self._images = Images(root, split=split)
        self.labels, self.class_names = self._images.labels, self._images.class_names
        self.where = self._images.where
        self.fingerprint = self._images.fingerprint()
        self.score_maps, self._store = None, None
        if maps is not None:
            self._store = ScoreMapStore(maps)
            self._store.check(self.fingerprint, root)
            self.score_maps = score_map_spec(self._store, len(self.class_names))
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="read")

    def read_ahead(self, first: int, end: int) -> None:
        """Files lie anywhere, so there is no long run to read."""

    def begin(self, ids: np.ndarray) -> Fetch:
        chunks = [
            self._readers.submit(self._read, ids[at : at + CHUNK])
            for at in range(0, len(ids), CHUNK)
        ]

        def fetched() -> Encoded:
            files = [file for chunk in chunks for file in chunk.result()]
            good = [
                file if isinstance(file, _File) else _File(np.empty(0, np.uint8), native.JPEG, 1, 1)
                for file in files
            ]
            samples = np.zeros(len(files), native.SAMPLE)
            samples["bytes"], samples["length"] = (
                [f.content.ctypes.data for f in good],
                [len(f.content) for f in good],
            )
            samples["kind"], samples["height"], samples["width"] = np.array([f[1:] for f in good]).T
            return Encoded(
                samples, {n: file for n, file in enumerate(files) if isinstance(file, str)}, good
            )

        return Fetch(fetched, lambda: [chunk.cancel() for chunk in chunks])

    def _read(self, ids: np.ndarray) -> list[_File | str]:
        """The files of the samples `ids`, or why one cannot be read."""
        files: list[_File | str] = []
        for index in ids.tolist():
            try:
                content = self._images.read(index)
                try:
                    files.append(
                        _File(np.frombuffer(content, np.uint8), native.JPEG, *native.probe(content))
                    )
                except native.JpegError:  # Pillow reads it, or says what is wrong
                    pixels = np.asarray(decode(content, self.where(index)))
                    files.append(_File(pixels.reshape(-1), native.RAW, *pixels.shape[:2]))
            except UserError as error:
                files.append(str(error))
            except OSError as error:
                files.append(explain_os_error(error))
        return files

    def image(self, index: int) -> Image.Image:
        return decode(self._images.read(index), self.where(index))

    def map_rows(self, ids: np.ndarray, memory: Memory) -> MapRows:
        return store_rows(self._store, ids, memory)

    def maps(self, ids: np.ndarray) -> ScoreMaps:
        return store_maps(self._store, ids)

    def check_map(self, index: int) -> None:
        check_row(self._store, index)

    def close(self) -> None:
        self._readers.shutdown(cancel_futures=True)
        if self._store:
            self._store.close()


def store_rows(store: ScoreMapStore, ids: np.ndarray, memory: Memory) -> MapRows:
    """Where the maps of the samples `ids` lie in an HDF5 store."""
    side, top_k = store.header.side, store.header.top_k
    fields = map_tensors(len(ids), side, top_k, memory)
    file, offsets = store.places(ids)
    packed = native.Packed(store.packed.palette[ids], store.packed.levels) if store.packed else None
    parts = native.Parts(
        np.full(offsets.shape, file), offsets, [f.numpy() for f in fields], store.crcs[ids], packed
    )
    return MapRows(parts, fields)


def store_maps(store: ScoreMapStore, ids: np.ndarray) -> ScoreMaps:
    """`store.rows(ids)`, read by the library: compact rows in 3 microseconds each, where numpy
    needs 17.
    """
    rows = store_rows(store, ids, Memory())
    for n in np.flatnonzero(native.read_maps(rows.parts)):
        check_row(store, int(ids[n]))  # says what is wrong
        raise UserError(f"{store.path}: row {ids[n]} cannot be read; copy the file again")
    return ScoreMaps(*(field.numpy() for field in rows.fields))


def check_row(store: ScoreMapStore, index: int) -> None:
    """UserError if row `index` of a store is not there any more, or damaged."""
    file, offsets = store.places(np.array([index]))
    last = max(offsets.max(), offsets[0, 0] + (store.packed.size[index] - 1 if store.packed else 0))
    if os.fstat(file).st_size <= last:  # the memory map would end the process
        raise UserError(f"{store.path} was cut while it was open; copy it again and rerun")
    store.rows(np.array([index]))


def map_tensors(count: int, side: int, top_k: int, memory: Memory) -> ScoreMaps:
    """Memory for the maps of a batch, as Batch has them."""
    return ScoreMaps(
        memory.empty((count, side, side, top_k), torch.float16),
        memory.empty((count, side, side, top_k), torch.uint16),
        memory.empty((count, side, side), torch.float16),
        memory.empty((count, 4), torch.float32),
    )


def score_map_spec(store: ScoreMapStore, num_classes: int) -> ScoreMapSpec:
    """What the step must know of a store. UserError if it scores other classes than the dataset
    has, or holds impossible values.
    """
    header = store.header
    if header.num_classes != num_classes:
        raise UserError(
            f"{store.path} scores {header.num_classes} classes but the data has {num_classes}; relabel with a teacher of the same classes"
        )
    store.check_values()
    return ScoreMapSpec(
        header.side,
        header.top_k,
        num_classes,
        header.absent,
        store.max_palette,
        store.min_window_side,
    )

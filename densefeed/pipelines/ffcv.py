"""`--loader ffcv`: an FFCV dataset (.beton), its score maps inside or in an HDF5 file beside it."""

from pathlib import Path

import numpy as np
from PIL import Image

from densefeed import native
from densefeed.pipelines.batch import ScoreMapSpec
from densefeed.pipelines.folder import StoreMaps, score_map_spec
from densefeed.pipelines.loader import Encoded
from densefeed.storage.beton import Beton, open_matching
from densefeed.storage.beton_format import MAP_FIELDS, name_classes
from densefeed.storage.beton_images import MARK, name_images
from densefeed.storage.dataset_names import hash_images
from densefeed.storage.images import decode
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError


class FfcvSource(StoreMaps):
    """Samples of a .beton file, or of all files that match a pattern such as `train-*.beton`.

    Matching files are read as one dataset in the order of their names. `maps` names a score-map
    store for files that carry no maps of their own. UserError if files, labels or maps do not fit
    together.
    """

    remedy = "copy the file again, or pack it again"

    def __init__(self, path: str | Path, maps: str | Path | None = None) -> None:
        self._beton = self._open(path)
        self.where = self._beton.where
        self.labels, self.fingerprint = self._beton.labels, self._beton.fingerprint
        notes = self._beton.notes
        self.division = notes.get("division")
        self.class_names = name_classes(path, notes, self.labels)
        num_classes = len(self.class_names)
        if maps is not None:
            self._store = ScoreMapStore(maps)
            self._check_store(path, maps)
            self._rows = np.arange(len(self.labels))
            self.score_maps = score_map_spec(self._store, num_classes)
            self.teacher = self._store.header.teacher
        elif self._beton.has_maps:
            self.score_maps = ScoreMapSpec(
                *self._beton.field("map").shape[2:],
                num_classes,
                notes["absent"],
                notes["max_palette"],
                notes["min_window_side"],
            )
            self.teacher = notes.get("teacher", "")
            # Looked up once, which is a third of the time of `map_parts`.
            self._map_offsets = [self._beton.offsets(name) for name in MAP_FIELDS]

    @property
    def beton(self) -> Beton | None:
        """The open file; None where its samples are fetched when they are needed."""
        return self._beton

    def _open(self, path: str | Path) -> Beton:
        return open_matching(Path(path))

    def _check_store(self, path: str | Path, maps: str | Path) -> None:
        """Raise UserError if the maps beside the file are not those of its images."""
        notes = self._beton.notes
        # The maps of these images, or of those of another file.
        if self._store.image_path(0).startswith(MARK):
            self._store.check_rows(self.labels, name_images(self._beton), path)
            return
        if notes.get("left_out"):
            raise UserError(
                f"{path} leaves out {notes['left_out']} images that could not be packed, so {maps} "
                "has other rows; pack the maps into it with densefeed pack --maps"
            )
        # A file that FFCV itself wrote has no fingerprint: only its labels can be compared.
        if not notes:
            self._store.check_rows(self.labels, None, path)
            return
        self._store.check(self.fingerprint, self.labels, None, path)
        # The file has no paths but their hash, and those of earlier versions not even that.
        names = notes.get("names")
        if names is not None and names != hash_images(self._store.paths(), self._store.labels):
            raise UserError(
                f"{maps} has the maps of the images of {path} in another order; label the images "
                "again, or pack the maps into it with densefeed pack --maps"
            )

    def files(self, most: int) -> list[str]:
        return [str(path) for path in self._beton.paths[:most]]

    def read_ahead(self, first: int, end: int) -> None:
        self._beton.read_ahead(first, end)

    def begin(self, ids: np.ndarray) -> Encoded:
        beton = self._beton
        samples = np.zeros(len(ids), native.SAMPLE)
        samples["file"] = beton.open_files(ids)
        samples["offset"], samples["length"] = beton.images.offset[ids], beton.images.size[ids]
        samples["kind"] = beton.modes[ids]
        samples["height"], samples["width"] = beton.heights[ids], beton.widths[ids]
        return Encoded(samples)

    def image(self, index: int) -> Image.Image:
        encoded, mode = self._beton.image(index)
        if mode == native.JPEG:
            return decode(encoded, self.where(index))
        try:
            return Image.fromarray(self._beton.pixels(index, encoded))
        except native.JpegError as error:
            raise UserError(f"{self.where(index)} is damaged ({error}); {self.remedy}") from error

    def extents(self) -> tuple[np.ndarray, np.ndarray]:
        return self._beton.heights, self._beton.widths

    def estimate_planes(self) -> int:
        """Estimate the bytes that its JPEGs would take as planes of 4:2:0; 0 if it has none."""
        jpegs = self._beton.modes == native.JPEG
        return int(1.5 * (self._beton.heights * self._beton.widths.astype(np.int64))[jpegs].sum())

    def map_parts(self, ids: np.ndarray) -> native.Parts:
        if self._store is not None:
            return super().map_parts(ids)
        offsets = np.empty((len(ids), 4), np.int64)
        # The field `map` is the logits, then the classes. The checksum covers these four arrays in
        # this order.
        for column, field in zip((0, 2, 3), self._map_offsets, strict=True):
            offsets[:, column] = field[ids]
        np.add(offsets[:, 0], 2 * self.score_maps.side**2 * self.score_maps.top_k, offsets[:, 1])
        files, crcs = np.repeat(self._beton.open_files(ids), 4).reshape(-1, 4), self._beton.crcs
        return native.Parts(files, offsets, (), None if crcs is None else crcs[ids])

    def check_map(self, index: int) -> None:
        if self._store is not None:
            super().check_map(index)
        else:
            self._beton.check_map(index)

    def close(self) -> None:
        self._beton.close()
        super().close()

"""`--loader folder`: a folder of images (any dataset that timm reads), with the score maps in an HDF5 file beside it."""

from pathlib import Path

import numpy as np
from PIL import Image

from ..relabel.files import UserError
from ..relabel.images import Images, decode
from ..relabel.store import ScoreMaps, ScoreMapStore
from .batch import LabelSpec


class FolderSource:
    """Images of a folder, and their score maps if `maps` names a store made for exactly this folder."""

    def __init__(self, root: Path, split: str, maps: Path | None = None) -> None:
        self._images = Images(root, split=split)
        self.labels, self.class_names = self._images.labels, self._images.class_names
        self.where = self._images.where
        self.fingerprint = self._images.fingerprint()
        self.spec = None
        if maps is not None:
            self._store = ScoreMapStore(maps)
            self._store.check(self.fingerprint, root)
            self.spec = spec_of(self._store, len(self.class_names))

    def image(self, index: int) -> Image.Image:
        return decode(self._images.read(index), self.where(index))

    def maps(self, ids: np.ndarray) -> ScoreMaps:
        return self._store.rows(ids)


def spec_of(store: ScoreMapStore, num_classes: int) -> LabelSpec:
    """What the step must know of a store; UserError if it scores another number of classes than the dataset has."""
    header = store.header
    if header.num_classes != num_classes:
        raise UserError(
            f"{store.path} scores {header.num_classes} classes but the data has {num_classes}; relabel with a teacher of the same classes"
        )
    return LabelSpec(header.side, header.top_k, num_classes, header.absent, store.max_palette, store.min_window_side)

"""The samples of a dataset whose images are files of their own, or pixels in memory."""

import io
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from densefeed.system.files import open_regular


class Listed(NamedTuple):
    """The N samples of a dataset, in order."""

    paths: list[str]  # relative to `root`; made-up names for pixel arrays
    labels: np.ndarray  # int64 [N]
    class_names: list[str]
    root: Path
    pixels: np.ndarray | None = None  # uint8 [N, height, width, 3], only for pixel arrays
    masks: Any = None  # MaskFolder, if the dataset has hard masks, or a reader of objects

    def where(self, index: int) -> str:
        """Name of sample `index` for error messages."""
        return str(self.root / self.paths[index])

    def open(self, index: int) -> io.BufferedIOBase:
        """Open the encoded bytes of sample `index`."""
        if self.pixels is None:
            # 3 of 17 microseconds less than an object of pathlib.
            return open_regular(os.path.join(self.root, self.paths[index]))
        file = io.BytesIO()
        # The fastest level: the bytes are decoded at once and dropped.
        Image.fromarray(self.pixels[index]).save(file, "PNG", compress_level=1)
        file.seek(0)
        return file


def subset(whole: Listed, ids: np.ndarray, labels: np.ndarray, names: list[str]) -> Listed:
    """Return the samples `ids` of a folder, with the labels that `labels` has for them."""
    return Listed([whole.paths[i] for i in ids], labels[ids], names, whole.root)

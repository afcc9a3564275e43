"""Score map stores of any maps, for tests that do not label."""

from pathlib import Path

import numpy as np

from densefeed.storage.images import Images
from densefeed.storage.row_codecs import ScoreMaps
from densefeed.storage.score_maps import ScoreMapWriter, StoreHeader


def write_store(
    path: Path, images: Images, maps: ScoreMaps, num_classes: int, **fields: object
) -> Path:
    """Write a finished store of the maps of `images`; `fields` are those of its header."""
    _, side, _, top_k = maps.logit.shape
    header = dict(absent="tail", teacher="random", input_size=96, geometry="squash")
    header |= dict(fingerprint=images.fingerprint(), class_names=tuple(images.class_names))
    header |= dict(side=side, top_k=top_k, num_classes=num_classes)
    writer = ScoreMapWriter(path, StoreHeader(**header | fields), images.paths, images.labels)
    writer.write(np.arange(len(images)), maps)
    writer.finish()
    return path

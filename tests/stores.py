"""Score map stores of any maps, for tests that do not label."""

from pathlib import Path

import numpy as np

from densefeed.storage.images import Images
from densefeed.storage.row_codecs import ScoreMaps
from densefeed.storage.score_maps import ScoreMapWriter, StoreHeader


def make_header(**fields: object) -> StoreHeader:
    """Return the header of a small store of two classes, with these fields."""
    header = dict(side=4, top_k=3, num_classes=9, absent="tail", teacher="random", input_size=64)
    header |= dict(geometry="squash", fingerprint="f", class_names=("a", "b"))
    return StoreHeader(**header | fields)


def write_store(
    path: Path, images: Images, maps: ScoreMaps, num_classes: int, **fields: object
) -> Path:
    """Write a finished store of the maps of `images`; `fields` are those of its header."""
    _, side, _, top_k = maps.logit.shape
    header = dict(side=side, top_k=top_k, num_classes=num_classes, input_size=96)
    header |= dict(fingerprint=images.fingerprint(), class_names=tuple(images.class_names))
    writer = ScoreMapWriter(path, make_header(**header | fields), images.paths, images.labels)
    writer.write(np.arange(len(images)), maps)
    writer.finish()
    return path


def write_reordered(path: Path, images: Images, maps: ScoreMaps, rows: np.ndarray) -> Path:
    """Write a finished store of `rows` of `images`, under the fingerprint of all of them."""
    side, top_k = maps.logit.shape[2:]
    header = make_header(
        side=side,
        top_k=top_k,
        num_classes=max(top_k, len(images.class_names)),
        fingerprint=images.fingerprint(),
        class_names=tuple(images.class_names),
    )
    writer = ScoreMapWriter(path, header, [images.paths[row] for row in rows], images.labels[rows])
    writer.write(np.arange(len(rows)), maps.select(rows))
    writer.finish()
    return path


# Values that no teacher produces, under checksums that are right: name of the fault, and what
# writes them to row `n` of ScoreMaps of `K` classes.
BAD_VALUES = {
    "class 3 of 3": lambda maps, n: maps.cls[n].__setitem__((2, 3, 1), 3),
    "class 65535 of 3": lambda maps, n: maps.cls[n].__setitem__((0, 0, 0), 65535),
    "a logit that is not finite": lambda maps, n: maps.logit[n].__setitem__((5, 5, 1), np.nan),
    "a logsumexp that is not finite": lambda maps, n: maps.lse[n].__setitem__((5, 5), -np.inf),
    "a class twice in one cell": lambda maps, n: maps.cls[n].__setitem__((1, 1), 2),
    "a Window that is not part of the image": lambda maps, n: maps.window.__setitem__(
        n, (0.9, 0, 0.1, 1)
    ),
}

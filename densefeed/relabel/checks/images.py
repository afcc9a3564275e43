"""Check a store against the images it was made for: their names, labels and sizes."""

import numpy as np

from densefeed.relabel.checks.outcome import MAX_NAMED, Outcome, name_rows
from densefeed.storage.geometry import teacher_window
from densefeed.storage.images import Images, sample_evenly
from densefeed.storage.score_maps import ScoreMapStore

OTHER_FOLDER = "Pass the folder that the maps were made for, or label the images again."


def check_files(store: ScoreMapStore, images: Images, image_of: np.ndarray) -> Outcome:
    """Check that rows and image files correspond, in order, and that the files are unchanged."""
    paths, parts = store.paths(), []
    without = sorted(set(images.paths) - set(paths))
    if without:
        parts.append(
            f"{len(without):,} of {len(images):,} images have no row "
            f"({', '.join(without[:MAX_NAMED])})"
        )
    gone = [path for path, at in zip(paths, image_of, strict=True) if at < 0]
    if gone:
        parts.append(
            f"{len(gone):,} of {len(store):,} rows have no image ({', '.join(gone[:MAX_NAMED])})"
        )
    # A missing image or row shifts all that follow, so the order is judged only if none is.
    moved = np.flatnonzero(image_of != np.arange(len(store)))
    if not parts and len(moved):
        parts = [
            f"every image has its row, but the order differs, from {name_rows(store, moved[:1])} on"
        ]
    # The fingerprint does not show what has changed, so the other comparisons go first.
    if not parts and not store.describes(images.fingerprint()):
        parts = [
            f"all {len(images):,} names agree, but the fingerprint does not: files or labels have "
            "changed"
        ]
    if parts:
        return "fault", "; ".join(parts), OTHER_FOLDER
    return "sound", f"each of {len(images):,} images has its row, in order, files unchanged"


def check_class_names(store: ScoreMapStore, images: Images, image_of: np.ndarray) -> Outcome:
    """Check that class names and labels are those of `images`."""
    names, known = list(store.header.class_names), np.flatnonzero(image_of >= 0)
    if names != images.class_names:
        shared = sum(a == b for a, b in zip(names, images.class_names, strict=False))
        return (
            "fault",
            f"{shared:,} of {len(names):,} class names equal, place by place, those of the "
            f"folder, which has {len(images.class_names):,}",
            OTHER_FOLDER,
        )
    others = known[images.labels[image_of[known]] != store.labels[known]]
    if not len(others):
        return "sound", f"all {len(names):,} names and all labels are the folder's"
    first = name_rows(store, others[:1])
    return (
        "fault",
        f"rows whose label is not that of their image: {len(others):,} (first: {first})",
        OTHER_FOLDER,
    )


def neighbors(labels: np.ndarray, usable: np.ndarray, count: int) -> np.ndarray:
    """Choose about `count` evenly spaced rows of `usable`, in pairs of neighbors.

    Rows [0] and [1] of the result are a pair, [2] and [3], and so on; a pair has one label if
    possible. Int64.
    """
    if len(usable) < 2 or count < 2:
        return np.empty(0, np.int64)
    pairs = min(count, len(usable)) // 2
    # The last place is len - 2, because a pair needs the row after it.
    at = sample_evenly(len(usable) - 1, pairs)
    label = labels[usable]
    # The last row of a class is paired with the row before it.
    back = (at > 0) & (label[at] != label[at + 1]) & (label[at] == label[at - 1])
    return usable[np.stack([at, np.where(back, at - 1, at + 1)], 1).ravel()]


def check_windows(
    store: ScoreMapStore, images: Images, image_of: np.ndarray, rows: np.ndarray
) -> Outcome:
    """Compare stored windows with those that follow from image sizes and the header's geometry."""
    geometry = store.header.geometry
    if geometry not in ("squash", "center-crop", "letterbox"):
        return "unchecked", (
            f"the windows of geometry {geometry} do not follow from the image sizes"
        )
    stored = store.rows(rows).window
    sizes = map(images.size, image_of[rows].tolist())
    want = np.array([teacher_window(geometry, *size) for size in sizes], np.float32)
    # A generator that crops at whole pixels differs by up to half of one: 1/600 of an image of 300.
    wrong = np.flatnonzero(np.abs(stored - want).max(1) > 2e-3)
    if not len(wrong):
        return "sound", f"all {len(rows):,} rows compared have the window of geometry {geometry}"
    n = wrong[0]
    have, expected = (tuple(part[n].round(3).tolist()) for part in (stored, want))
    return (
        "fault",
        f"{len(wrong):,} of {len(rows):,} rows do not have the window of geometry {geometry}: "
        f"{store.image_path(rows[n])} has {have}, not {expected}",
        "Remove the maps and label again, or import the pack again with its --footprint.",
    )

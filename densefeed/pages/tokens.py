"""The labels of tokens, or of the cells of a map, as pages draw them over a picture."""

from collections.abc import Sequence

import numpy as np

from densefeed.pages.templates import INKS
from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.shapes import Grid
from densefeed.pipelines.targets import PLAIN, TargetRules, sparse_targets
from densefeed.storage.geometry import TLBR, WHOLE

# Classes in the key of a picture, and the least share of the whole that each of them has.
KEYED, LEAST_SHARE = 4, 0.02


def label_tokens(
    batch: Batch, spec: ScoreMapSpec, grid: Grid, rules: TargetRules = PLAIN
) -> tuple[np.ndarray, np.ndarray]:
    """Return every token's most probable class, and its probability times the token's weight.

    Both are `[N, T]`.
    """
    targets = sparse_targets(batch, spec, grid, rules)
    best = (targets.extra + targets.base[..., None]).max(-1)
    return targets.palette.gather(1, best.indices).numpy(), (best.values * targets.weight).numpy()


def draw_labels(
    class_RC: np.ndarray, probability_RC: np.ndarray, names: Sequence[str], window: TLBR = WHOLE
) -> dict:
    """Return the rectangles of labels, placed in their picture (0 to 1), and a key of main classes.

    `names` are those of all classes, and `window` is the part of the picture that the labels cover.
    A class ranks by the sum over its cells of the squared probability.
    """
    mass = np.bincount(class_RC.ravel(), probability_RC.ravel() ** 2)
    ranked = [int(c) for c in np.argsort(-mass, kind="stable") if mass[c] > 0]
    # Few classes have the same color in every picture; of many those of one picture differ.
    few = len(names) <= len(INKS)
    ink = {c: INKS[c if few else at % len(INKS)] for at, c in enumerate(ranked)}
    top, left, bottom, right = window
    rows, columns = class_RC.shape
    width, height = (right - left) / columns, (bottom - top) / rows
    cells = [
        {
            "x": round(left + x * width, 4),
            "y": round(top + y * height, 4),
            "w": round(width, 4),
            "h": round(height, 4),
            "ink": ink[int(class_RC[y, x])],
            "opacity": round(0.62 * float(probability_RC[y, x]) ** 2, 2),
        }
        # At 0.2 the opacity is 0.02: what is left out would not be seen.
        for y, x in np.argwhere(probability_RC > 0.2).tolist()
    ]
    key = [
        {"name": names[c], "ink": ink[c]}
        for c in ranked[:KEYED]
        if mass[c] > LEAST_SHARE * mass.sum()
    ]
    return {"cells": cells, "key": key}

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
    class_RC: np.ndarray,
    probability_RC: np.ndarray,
    names: Sequence[str],
    window: TLBR = WHOLE,
    beside: Sequence[tuple[np.ndarray, np.ndarray]] = (),
) -> dict:
    """Return the rectangles of labels, placed in their picture (0 to 1), and a key of main classes.

    `names` are those of all classes, and `window` is the part of the picture that the labels cover.
    A class ranks by the sum over its cells of the squared probability. `beside` are further labels
    of the same picture; their rectangles have the same colors and are listed in `beside`.
    """
    tables = [(class_RC, probability_RC), *beside]
    classes, probabilities = (
        np.concatenate([part.ravel() for part in parts]) for parts in zip(*tables, strict=True)
    )
    mass = np.bincount(classes, probabilities**2)
    ranked = [int(c) for c in np.argsort(-mass, kind="stable") if mass[c] > 0]
    # Few classes have the same color in every picture; of many those of one picture differ.
    few = len(names) <= len(INKS)
    ink = {c: INKS[c if few else at % len(INKS)] for at, c in enumerate(ranked)}
    key = [
        {"name": names[c], "ink": ink[c]}
        for c in ranked[:KEYED]
        if mass[c] > LEAST_SHARE * mass.sum()
    ]
    cells, *others = (place_cells(*table, ink, window) for table in tables)
    return {"cells": cells, "key": key, "beside": [{"cells": other} for other in others]}


def place_cells(
    class_RC: np.ndarray, probability_RC: np.ndarray, ink: dict[int, str], window: TLBR
) -> list[dict]:
    """Return the rectangles of a table of labels; those of low probability are left out."""
    top, left, bottom, right = window
    rows, columns = class_RC.shape
    width, height = (right - left) / columns, (bottom - top) / rows
    return [
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

"""The labels of tokens, as pages draw them over a picture."""

from collections.abc import Sequence

import numpy as np

from densefeed.pages.templates import INKS
from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.shapes import Grid
from densefeed.pipelines.targets import PLAIN, TargetRules, sparse_targets


def label_tokens(
    batch: Batch, spec: ScoreMapSpec, grid: Grid, rules: TargetRules = PLAIN
) -> tuple[np.ndarray, np.ndarray]:
    """Return every token's most probable class, and its probability times the token's weight.

    Both are `[N, T]`.
    """
    targets = sparse_targets(batch, spec, grid, rules)
    best = (targets.extra + targets.base[..., None]).max(-1)
    return targets.palette.gather(1, best.indices).numpy(), (best.values * targets.weight).numpy()


def make_cells(class_T: np.ndarray, probability_T: np.ndarray, names: Sequence[str]) -> list[dict]:
    """Return how each token of a crop is drawn, row by row."""
    return [
        {
            "name": names[c],
            "ink": INKS[c % len(INKS)],
            "opacity": round(0.62 * float(p) ** 2, 3),
            "sure": bool(p > 0.5),
        }
        for c, p in zip(class_T.tolist(), probability_T.tolist(), strict=True)
    ]

"""Measure how often a label of a token is the class of the object that the token lies on."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from densefeed.pages.tokens import label_tokens
from densefeed.pages.true_objects import Truth, boxes_in_crop, read_mask
from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.targets import TargetRules

# N crops   T tokens   H, W pixels of a mask

PUBLISHED = TargetRules(geometry="published", outside="uniform")
# Share of a token's samples that must lie in one mask, and samples along each of its axes.
PURE, SAMPLES = 0.9, 8
# Bins of a crop's area and of an object's, as shares of the image: name, from, to.
AREAS = (("crop < 0.25", 0, 0.25), ("crop 0.25-0.5", 0.25, 0.5), ("crop > 0.5", 0.5, 2))
SIZES = (("object < 0.03", 0, 0.03), ("object 0.03-0.1", 0.03, 0.1), ("object > 0.1", 0.1, 2))
PARTS = ("all", "largest", "others", *(name for name, _, _ in AREAS + SIZES))
# 97.5 % quantile of the normal distribution.
QUANTILE = 1.96

# What labels the tokens of a batch: `[N, T]`, or `[N, 1]` where all of a crop have one label.
Labels = Callable[[Batch], np.ndarray]


class Counts(NamedTuple):
    """Tokens of a crop, and how many of them each kind of label names correctly, by part."""

    tokens: np.ndarray  # [parts]
    hits: np.ndarray  # [kinds, parts]


def usual_labels(spec: ScoreMapSpec, grid: int) -> dict[str, Labels]:
    """Return the labels that a page compares, by kind.

    `image`: the image's label, with which plain cross entropy supervises every token. `crop`: the
    dense label of the whole crop (objective relabel). `token`: the dense label of the token.
    `published`: the same, read at the coordinates of the published code.
    """
    return {
        "image": lambda batch: batch.label.numpy()[:, None],
        "crop": lambda batch: label_tokens(batch, spec, 1)[0],
        "token": lambda batch: label_tokens(batch, spec, grid)[0],
        "published": lambda batch: label_tokens(batch, spec, grid, PUBLISHED)[0],
    }


def measure_labels(
    batches: Iterable[Batch], truths: Sequence[Truth], grid: int, kinds: dict[str, Labels]
) -> dict:
    """Measure the share of tokens whose label is the class of the object that they lie on.

    It counts the tokens that lie on exactly one true object, in crops before augmentation: inside
    its box and no other, or with PURE of their area in its mask.

    Returns for each kind the shares by part of PARTS: `all` such tokens, those on the `largest`
    object of their image, which is its label, those on the `others`, those of crops of an area, and
    those on objects of a size; parts without tokens are left out. `tokens` are their numbers, and
    `intervals` half the widths of the 95 % intervals of the shares, over scenes.
    """
    counts: dict[int, Counts] = {}
    for batch in batches:
        labels = [label(batch) for label in kinds.values()]
        # The last batch is padded with weight 0, and its images must not count twice.
        for n in np.nonzero(batch.weight.numpy())[0]:
            index = int(batch.index[n])
            found = count_tokens(truths[index], batch.view[n].numpy(), grid, [x[n] for x in labels])
            # Crops of one scene are not independent.
            before = counts.get(index)
            counts[index] = Counts(*map(np.add, before, found)) if before else found
    return summarize(list(counts.values()), list(kinds))


def count_tokens(truth: Truth, view: np.ndarray, grid: int, labels: Sequence[np.ndarray]) -> Counts:
    """Count the tokens of one crop; `labels` are those of each kind, `[T]` or `[1]`."""
    if truth.mask is None:
        owner_T = find_owners(boxes_in_crop(truth.boxes_ltrb, view), grid).ravel()
        share_n = np.prod(truth.boxes_ltrb[:, 2:] - truth.boxes_ltrb[:, :2], axis=1)
    else:
        mask_HW = read_mask(truth)
        owner_T = find_owners_in_mask(mask_HW, view, grid)
        numbers = np.bincount(mask_HW.ravel(), minlength=len(truth.classes) + 1)
        share_n = numbers[1:] / mask_HW.size
    area, share_T = abs(np.linalg.det(view[:, :2])), share_n[owner_T]
    on = owner_T >= 0
    chosen_PT = np.stack(
        [on, owner_T == 0, owner_T > 0]
        + [on & (low <= area < high) for _, low, high in AREAS]
        + [on & (low <= share_T) & (share_T < high) for _, low, high in SIZES]
    )
    right = np.stack([np.broadcast_to(x, owner_T.shape) for x in labels])
    right_KT = right == truth.classes[owner_T]
    return Counts(chosen_PT.sum(1), right_KT.astype(np.int64) @ chosen_PT.T)


def find_owners(boxes_ltrb_n4: np.ndarray, grid: int) -> np.ndarray:
    """Return, for each token of a `grid` x `grid` table, the box that contains it, else -1.

    A token that overlaps several boxes, or lies only partly inside its box, has none.
    """
    edges = np.arange(grid) / grid
    low = np.stack(np.meshgrid(edges, edges), -1)[:, :, None]
    high = low + 1 / grid
    box_low, box_high = np.split(boxes_ltrb_n4, 2, axis=1)
    # A token that ends at the edge of a box is inside, whatever the rounding.
    inside = ((low >= box_low - 1e-6) & (high <= box_high + 1e-6)).all(-1)
    overlaps = ((low < box_high) & (high > box_low)).all(-1)
    return np.where((overlaps.sum(-1) == 1) & inside.any(-1), inside.argmax(-1), -1)


def find_owners_in_mask(
    mask_HW: np.ndarray, view: np.ndarray, grid: int, pure: float = PURE
) -> np.ndarray:
    """Return for each token, row by row, the object that covers `pure` of it, else -1; `[T]`.

    `pure` is above 0.5. Values of the mask are 0 for the background and n + 1 for object n. SAMPLES
    x SAMPLES points of a token are looked up; those outside the image are background.
    """
    ticks = (np.arange(grid * SAMPLES) + 0.5) / (grid * SAMPLES)
    points = np.stack([*np.meshgrid(ticks, ticks), np.ones((len(ticks),) * 2)])
    x, y = np.einsum("ij,jrc->irc", view.astype(np.float64), points)
    (height, width), inside = mask_HW.shape, (x >= 0) & (x < 1) & (y >= 0) & (y < 1)
    columns, rows = (
        (np.where(inside, part, 0) * extent).astype(np.int64)
        for part, extent in ((x, width), (y, height))
    )
    value = np.where(inside, mask_HW[rows, columns], 0)
    tokens = value.reshape(grid, SAMPLES, grid, SAMPLES).swapaxes(1, 2).reshape(grid * grid, -1)
    # A value that more than half of the samples have is their median.
    owner_T = np.median(tokens, axis=1).astype(np.int64)
    is_pure = (tokens == owner_T[:, None]).mean(1) >= pure
    return np.where(is_pure, owner_T, 0) - 1


def summarize(counts: Sequence[Counts], kinds: Sequence[str]) -> dict:
    """Return the shares over scenes, as `measure_labels` does."""
    tokens_CP = np.stack([one.tokens for one in counts])
    hits_CKP = np.stack([one.hits for one in counts])
    total_P = tokens_CP.sum(0)
    known = [(place, name) for place, name in enumerate(PARTS) if total_P[place]]
    shares_KP = hits_CKP.sum(0) / np.maximum(total_P, 1)
    # The error of a ratio of sums over independent scenes, linearized.
    rest_CKP = hits_CKP - shares_KP * tokens_CP[:, None]
    scale = np.sqrt(len(counts) / max(len(counts) - 1, 1)) * QUANTILE
    error_KP = scale * np.sqrt((rest_CKP**2).sum(0)) / np.maximum(total_P, 1)

    def by_part(values_P: np.ndarray) -> dict[str, float]:
        return {name: float(values_P[place]) for place, name in known}

    found = {kind: by_part(shares_KP[k]) for k, kind in enumerate(kinds)}
    intervals = {kind: by_part(error_KP[k]) for k, kind in enumerate(kinds)}
    tokens = {name: int(total_P[place]) for place, name in known}
    return found | {"tokens": tokens, "intervals": intervals, "scenes": len(counts)}

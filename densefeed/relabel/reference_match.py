"""Compare stored maps with those of a reference model: how they are oriented and what they cover.

A reference is any trained model of the same classes. The statistic is, for each image, the
correlation over cells and classes between the stored map, put upright from each of 8 orientations,
and the reference's own map of the image. It is computed from square roots of probabilities, each
class less its mean over the cells, which no orientation changes.

Orientations are compared by paired differences over the images, because an image that is difficult
in one orientation is difficult in all of them.
"""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from densefeed.relabel.teacher import Teacher
from densefeed.storage.images import Images, decode
from densefeed.storage.row_codecs import Absent, ScoreMaps, cell_targets
from densefeed.storage.score_maps import StoreHeader
from densefeed.system.errors import UserError
from densefeed.system.prefetch import ordered_map
from densefeed.system.progress import bar

# N images   G footprints   S cells along a side of a map   P classes of a map's palette   K classes

# Images through the reference.
BATCH = 16
# Paired t for a verdict. A t of 5 happens by chance once in 3 million: 24 layouts of a thousand
# clean stores give no alarm.
ALARM_T, SURE_T = 5.0, 3.0
# A smaller difference of correlations, however significant, is not due to geometry.
MIN_DIFFERENCE = 0.05
# Least correlation for a verdict. A student trained on image labels alone names classes but does
# not locate them: on digit scenes, where 0.64 of its images were right, its cells correlated at
# -0.09 with the maps as stored and at -0.03 with the maps rotated by 180 degrees (t = 5).
MIN_CORRELATION = 0.1
# Images for a t.
MIN_IMAGES = 30
# Ratio of an image's sides from which its center square is another picture.
ELONGATED = 1.1
# Correlation of a map with the same map made again: 0.99 where the store kept 5 of 10 classes.
SAME_MAP = 0.95

# What the maps of each reference cover.
FOOTPRINT_WORDS = {
    "squash": "the whole image",
    "center-crop": "its center square",
    "letterbox": "the image and its padding",
}
ORIENTATIONS = (
    "upright",
    "mirrored left-right",
    "rotated by 180 degrees",
    "mirrored top-bottom",
    "transposed (rows and columns exchanged)",
    "rotated by 90 degrees clockwise",
    "transposed along the other diagonal",
    "rotated by 90 degrees counter-clockwise",
)


def orient(map_SS: np.ndarray, orientation: int) -> np.ndarray:
    """Bring an upright map `[S, S, ...]` into one of ORIENTATIONS.

    0 to 3 mirror nothing, columns, both, rows; 4 to 7 do so after exchanging rows and columns.
    """
    out = map_SS.swapaxes(0, 1) if orientation >= 4 else map_SS
    out = out[:, ::-1] if orientation in (1, 2, 5, 6) else out
    return out[::-1] if orientation in (2, 3, 6, 7) else out


def upright(map_SS: np.ndarray, orientation: int) -> np.ndarray:
    """Invert `orient`. All orientations but the two quarter turns are their own inverses."""
    return orient(map_SS, {5: 7, 7: 5}.get(orientation, orientation))


# By geometry: the same model, shown the whole image and its center square.
References = Mapping[str, Teacher]


@dataclass
class MapCorrelation:
    """Correlations between stored maps and those of the reference.

    They are taken over cells and classes, each class less its mean over the cells, which no
    orientation changes. NaN where a map is flat.
    """

    rows: np.ndarray  # int64 [N]; neighbors are partners, see audit.neighbors
    footprints: tuple[str, ...]  # G
    # float64 [N, G, 8]: with the image's own map, put upright from each orientation
    own: np.ndarray
    other: np.ndarray  # the same, with the partner's map
    elongated: np.ndarray  # bool [N]: the image's sides differ
    # bool [N]: the class of the reference's greatest mean probability is the label
    agrees: np.ndarray

    def best(self) -> tuple[int, int]:
        """Return footprint and orientation of the greatest mean correlation."""
        # -1 is the least correlation: a layout without a value is never the best.
        mean_G8 = np.nan_to_num(mean_known(self.own), nan=-1.0)
        return divmod(int(mean_G8.argmax()), len(ORIENTATIONS))

    def in_best_layout(self, correlation_NG8: np.ndarray) -> np.ndarray:
        """Select the values of `own` or `other` under the layout that fits best, float64 `[N]`."""
        g, o = self.best()
        return correlation_NG8[:, g, o]

    def is_reproduced(self) -> bool:
        """Whether the reference makes these maps itself."""
        # The median, so that a few maps of other images do not hide that the rest is reproduced.
        own = self.in_best_layout(self.own)
        own = own[~np.isnan(own)]
        return len(own) > 0 and bool(np.median(own) > SAME_MAP)

    def is_located(self) -> bool:
        """Whether the reference locates objects in these images, which evidence of layout needs."""
        own, other = self.in_best_layout(self.own), self.in_best_layout(self.other)
        return bool(mean_known(own) >= MIN_CORRELATION and paired_t(own - other) >= SURE_T)

    def summarize(self) -> dict:
        """Return plain numbers for JSON: means over the images, NaN where all maps are flat."""
        return {
            "images": len(self.rows),
            "elongated": int(self.elongated.sum()),
            "reference_agreement": float(self.agrees.mean()),
            "correlation": {
                footprint: dict(zip(ORIENTATIONS, mean_8, strict=True))
                for footprint, mean_8 in zip(
                    self.footprints, mean_known(self.own).tolist(), strict=True
                )
            },
            "neighbor": float(mean_known(self.in_best_layout(self.other))),
        }


def look(
    read: Callable[[np.ndarray], ScoreMaps],
    header: StoreHeader,
    images: Images,
    image_of: np.ndarray,
    rows: np.ndarray,
    references: References,
    threads: int,
) -> MapCorrelation:
    """Correlate stored maps with the reference's maps of the same images, in every layout.

    Args:
        read: gives the maps of rows.
        header: says how these maps are read (`num_classes` and `absent`).
        image_of: index in `images` of each row.
        rows: rows to compare; neighbors are partners, see audit.neighbors.

    Raises UserError if the reference has another number of classes.
    """
    count, index_N = len(rows), image_of[rows]
    ratio_N, agrees_N = np.empty(count), np.empty(count, bool)
    own, other = np.full((2, count, len(references), 8), np.nan)

    def load(index: int) -> tuple[list[np.ndarray], float]:
        image = decode(images.read(index), images.where(index))
        ratio = max(image.size) / min(image.size)
        # All geometries show the same picture of a square image, so one will do.
        shown = list(references.values())[: None if ratio > 1 else 1]
        return [reference.prepare(image)[0] for reference in shown], ratio

    starts = range(0, count, BATCH)
    with (
        # The iterator is closed before the pool's exit waits for its threads, which drops the
        # images that no thread has begun. Up to two batches are decoded ahead of the model.
        ThreadPoolExecutor(threads) as pool,
        closing(ordered_map(load, index_N.tolist(), pool, 2 * BATCH)) as loaded,
    ):
        for start in bar(starts, "audit, images") if len(starts) > 4 else starts:
            at = np.arange(start, min(start + BATCH, count))
            pixels, ratio_N[at] = zip(*(next(loaded) for _ in at), strict=True)
            scored = score_geometries(references, pixels, header.num_classes)
            top = [maps[0].mean((0, 1)).argmax() for maps in scored]
            agrees_N[at] = top == images.labels[index_N[at]]
            maps = read(rows[at])
            for n in range(len(at)):
                palette, stored = root_probabilities(maps, n, header.num_classes, header.absent)
                # Partners are 0 and 1, 2 and 3, and so on; a last image may have none.
                for values, m in ((own, n), (other, n ^ 1)):
                    if m < len(at):
                        values[at[n]] = [correlate(stored, palette, score) for score in scored[m]]
    return MapCorrelation(rows, tuple(references), own, other, ratio_N >= ELONGATED, agrees_N)


@torch.inference_mode()
def score_geometries(
    references: References, pixels: tuple[list[np.ndarray], ...], num_classes: int
) -> list[list[np.ndarray]]:
    """Score a batch of images: for each a list of probabilities `[S, S, K]`, one per geometry.

    Images with a single picture have the same map for all geometries. Raises UserError if K is not
    `num_classes`.
    """
    scored = [[] for _ in pixels]
    for g, reference in enumerate(references.values()):
        have = [n for n, pictures in enumerate(pixels) if g < len(pictures)]
        if have:
            pictures = torch.from_numpy(np.stack([pixels[n][g] for n in have]))
            logits_NSSK = reference(pictures.to(reference.mean.device))
            probability_NSSK = logits_NSSK.softmax(-1).cpu().numpy()
        for n, maps in enumerate(scored):
            maps.append(probability_NSSK[have.index(n)] if n in have else maps[0])
    found = scored[0][0].shape[-1]
    if found != num_classes:
        raise UserError(
            f"the reference scores {found:,} classes, the maps have {num_classes:,}; choose a "
            "reference of the same classes"
        )
    return scored


def root_probabilities(
    maps: ScoreMaps, n: int, num_classes: int, absent: Absent
) -> tuple[np.ndarray, np.ndarray]:
    """Return the palette of a row and the square roots of its probabilities, `[S, S, P]`.

    Without roots, confident cells would dominate the others. The inner product of roots is that of
    the Hellinger distance.
    """
    named, other = cell_targets(maps.select([n]), num_classes, absent)
    palette, place = np.unique(maps.cls[n], return_inverse=True)
    # Where a cell does not name a class of the palette, it has its share of the remainder.
    dense = np.repeat(np.sqrt(other[0])[..., None], len(palette), axis=2)
    np.put_along_axis(dense, place.reshape(maps.cls[n].shape), np.sqrt(named[0]), axis=2)
    return palette, dense


def correlate(stored_SSP: np.ndarray, palette: np.ndarray, reference_SSK: np.ndarray) -> np.ndarray:
    """Correlate a stored map, put upright from each of 8 orientations, with the reference's.

    Float64 `[8]`, NaN if one of the maps is flat.
    """
    side = len(stored_SSP)
    root_SSP = torch.from_numpy(np.sqrt(reference_SSK[..., palette].astype(np.float64)))
    # The reference may have another number of cells than the teacher, for example a student.
    if len(root_SSP) != side:
        root_1PSS = root_SSP.permute(2, 0, 1)[None]
        root_1PSS = F.interpolate(root_1PSS, (side, side), mode="bilinear", antialias=True)
        root_SSP = root_1PSS[0].permute(1, 2, 0)
    # Without its mean a class counts by where it is, not by how much of it there is.
    reference = root_SSP.numpy() - root_SSP.numpy().mean((0, 1))
    stored = stored_SSP - stored_SSP.mean((0, 1))
    size = math.sqrt((reference**2).sum() * (stored**2).sum())
    if size < 1e-9:
        return np.full(8, np.nan)
    return np.array([(upright(stored, o) * reference).sum() / size for o in range(8)])


def mean_known(values: np.ndarray) -> np.ndarray:
    """Average over the first axis the values that are not NaN; NaN where there are none."""
    known = (~np.isnan(values)).sum(0)
    # Unlike nanmean, without a warning.
    return np.nansum(values, 0) / np.where(known, known, np.nan)


def paired_t(difference_N: np.ndarray) -> float:
    """Compute Student's t of differences against 0; NaN values are left out.

    It is 0 for fewer than two differences, and infinite where they are equal and not 0.
    """
    difference_N = difference_N[~np.isnan(difference_N)]
    if len(difference_N) < 2:
        return 0.0
    mean, error = difference_N.mean(), difference_N.std(ddof=1) / math.sqrt(len(difference_N))
    # Equal differences have an error of rounding only.
    if error > 1e-12:
        return float(mean / error)
    return math.copysign(math.inf, mean) if abs(mean) > 1e-9 else 0.0


class BestHypothesis(NamedTuple):
    """The hypothesis of the greatest mean score among several."""

    best: int
    mean: np.ndarray  # score of each hypothesis
    count: int  # images
    t_over: np.ndarray  # paired t of the best against each, infinite against itself

    def runner_up(self) -> int:
        """Return the hypothesis of the second greatest mean.

        The smallest t may be against another one; certainty needs both.
        """
        return int(np.argsort(-self.mean, kind="stable")[1])

    def beats(self, other: int, t: float) -> bool:
        """Whether the best is better than one other by at least `t` and by a relevant amount."""
        difference = self.mean[self.best] - self.mean[other]
        return self.t_over[other] >= t and difference >= MIN_DIFFERENCE

    def is_sure(self, t: float) -> bool:
        """Whether the best beats every other hypothesis."""
        return all(self.beats(other, t) for other in range(len(self.mean)) if other != self.best)


def choose_best(scores_NH: np.ndarray) -> BestHypothesis:
    """Choose the hypothesis of the greatest mean score, over images that have a score for all."""
    # Paired differences need the same images for all hypotheses.
    scores_NH = scores_NH[~np.isnan(scores_NH).any(1)]
    if not len(scores_NH):
        zero_H = np.zeros(scores_NH.shape[1])
        return BestHypothesis(0, zero_H, 0, zero_H)
    mean = scores_NH.mean(0)
    best = int(mean.argmax())
    t_over = np.array([paired_t(scores_NH[:, best] - score_N) for score_N in scores_NH.T])
    t_over[best] = math.inf
    return BestHypothesis(best, mean, len(scores_NH), t_over)


def find_layout(
    match: MapCorrelation, source: object, footprint: str | None = None
) -> tuple[str, str]:
    """Find which of a pack's axes comes first, and what its maps cover.

    `match` is of maps read as row-column; a known `footprint` is returned as it is. Where no image
    has sides that differ, `squash` and `center-crop` are the same, and `squash` is returned.

    Returns values of `Axes` and `Geometry`. Raises UserError, naming `source`, if the evidence does
    not suffice.
    """
    g, o = match.best()
    choice = choose_best(match.own[:, g])
    if choice.count < MIN_IMAGES or not match.is_located() or not choice.is_sure(ALARM_T):
        second = choice.runner_up()
        raise UserError(
            f"{source}: the reference does not show how these maps are oriented "
            f"({ORIENTATIONS[choice.best]} {choice.mean[choice.best]:.3f}, {ORIENTATIONS[second]} "
            f"{choice.mean[second]:.3f}, smallest t {choice.t_over.min():.1f}, {choice.count} "
            "images); use more images or a better reference, or declare --axes and --footprint"
        )
    # Orientation 4 is the transposition that --axes corrects.
    if o not in (0, 4):
        raise UserError(
            f"{source}: these maps are {ORIENTATIONS[o]}, which no --axes corrects; turn them "
            "upright before the import"
        )
    axes = "column-row" if o else "row-column"
    # The center square of a square image is the whole image, so either footprint is right.
    if footprint or not match.elongated.any():
        return axes, footprint or "squash"
    cover = choose_best(match.own[match.elongated][:, :, o])
    if cover.count < MIN_IMAGES or not cover.is_sure(ALARM_T):
        raise UserError(
            f"{source}: the reference does not show what these maps cover ({cover.count} images "
            f"whose sides differ, t = {cover.t_over.min():.1f}); use more images or a better "
            "reference, or declare --footprint"
        )
    return axes, match.footprints[cover.best]

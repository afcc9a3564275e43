"""A reference, any trained model of the same classes, laid over stored maps: which way they lie,
and what they cover.

The statistic is, for each image, the correlation over cells and classes between the stored map, put
upright from each of the 8 orientations, and the reference's own map of the image: of roots of
probabilities, each class less its mean over the cells, which no turning changes. Orientations are
compared by paired differences over the images, so that what makes one image hard makes it hard for
all.
"""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from densefeed.storage.images import Images, decode
from densefeed.storage.row_codecs import Absent, ScoreMaps, cell_targets
from densefeed.system.errors import UserError
from densefeed.system.prefetch import ordered_map
from densefeed.system.progress import bar

# N images   G footprints   S cells along a side of a map   P classes of a map's palette   K classes

LOOKS_AT_ONCE = 16  # images through the reference
# What a verdict takes. A paired t of 5 happens by chance once in 3 million: 24 layouts of a
# thousand clean stores give no alarm.
ALARM_T, SURE_T = 5.0, 3.0
EFFECT = 0.05  # of a correlation, below which even a sure difference is none of geometry
# Least correlation for a verdict. A student trained on image labels alone names classes but does
# not know where they are: digit scenes, 0.64 of images right, its cells correlated at -0.09 with
# the maps as they lie and -0.03 turned by 180 degrees (t = 5).
FLOOR = 0.1
FEWEST = 30  # images, for a t
ELONGATED = 1.1  # ratio of an image's sides from which its center square is another picture
SAME = 0.95  # correlation of a map with itself made anew: 0.99 where the store kept 5 of 10 classes

ORIENTATIONS = (
    "upright",
    "mirrored left-right",
    "turned by 180 degrees",
    "mirrored top-bottom",
    "transposed (rows for columns)",
    "turned by 90 degrees clockwise",
    "transposed along the other diagonal",
    "turned by 90 degrees counter-clockwise",
)


def turned(map_SS: np.ndarray, orientation: int) -> np.ndarray:
    """A map `[S, S, ...]` as a fault of this number in ORIENTATIONS leaves it.

    0 to 3 mirror columns, both, rows; 4 to 7 do so after rows and columns were exchanged.
    """
    out = map_SS.swapaxes(0, 1) if orientation >= 4 else map_SS
    out = out[:, ::-1] if orientation in (1, 2, 5, 6) else out
    return out[::-1] if orientation in (2, 3, 6, 7) else out


def upright(map_SS: np.ndarray, orientation: int) -> np.ndarray:
    """The inverse of `turned`. All orientations but the two quarter turns undo themselves."""
    return turned(map_SS, {5: 7, 7: 5}.get(orientation, orientation))


class Reference(Protocol):
    """A model that scores cells; relabel.teacher.Teacher is one."""

    def prepare(
        self, image: Image.Image
    ) -> tuple[np.ndarray, tuple[float, float, float, float]]: ...

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor: ...


# by geometry: the same model, shown the whole image and its center square
References = Mapping[str, Reference]


@dataclass
class MapCorrelation:
    """How like the reference's maps the stored ones are, as correlations over cells and classes,
    each class less its mean over the cells (which no turning of the map changes). NaN where a map
    is flat.
    """

    rows: np.ndarray  # int64 [N]; neighbors are partners, see `neighbors`
    footprints: tuple[str, ...]  # G
    own: np.ndarray  # float64 [N, G, 8]: with the image's own, put upright from each orientation
    other: np.ndarray  # the same, with the partner's
    elongated: np.ndarray  # bool [N]: the image's sides differ
    reference_top: np.ndarray  # int64 [N]: the class of the reference's greatest mean probability
    labels: np.ndarray  # int64 [N]

    def best(self) -> tuple[int, int]:
        """Footprint and orientation of the greatest mean correlation."""
        mean = np.nan_to_num(
            np.nanmean(self.own, axis=0) if len(self.own) else np.zeros(self.own.shape[1:]),
            nan=-1.0,
        )
        return tuple(int(at) for at in np.unravel_index(mean.argmax(), mean.shape))

    def reproduced(self) -> bool:
        """Does the reference make these maps itself?"""
        return bool(np.nanmedian(self.of_best(self.own)) > SAME)

    def of_best(self, likeness_NG8: np.ndarray) -> np.ndarray:
        """`own` or `other` under the layout that fits best, float64 `[N]`."""
        g, o = self.best()
        return likeness_NG8[:, g, o]

    def located(self) -> bool:
        """Does the reference know where in these very images things are? Only then is it a witness
        of layout.
        """
        own = self.of_best(self.own)
        return bool(np.nanmean(own) >= FLOOR and paired_t(own - self.of_best(self.other)) >= SURE_T)


def look(
    read: Callable[[np.ndarray], ScoreMaps],
    kept: "Kept",
    images: Images,
    image_of: np.ndarray,
    rows: np.ndarray,
    references: References,
    threads: int,
) -> MapCorrelation:
    """Lay the reference's maps of the images of `rows` over the stored ones, in every orientation
    and each of its geometries.

    Args:
        read: gives the maps of rows.
        kept: num_classes and absent of these maps, as a StoreHeader has them.
    """
    footprints, count = tuple(references), len(rows)
    looks = MapCorrelation(
        rows,
        footprints,
        np.full((count, len(footprints), 8), np.nan),
        np.full((count, len(footprints), 8), np.nan),
        np.zeros(count, bool),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
    )

    def load(n: int) -> tuple[list[np.ndarray], float]:
        index = int(image_of[rows[n]])
        image = decode(images.read(index), images.where(index))
        ratio = max(image.size) / min(image.size)
        # The same picture from all: one look will do.
        shown = list(references.values())[: None if ratio > 1 else 1]
        return [reference.prepare(image)[0] for reference in shown], ratio

    starts = range(0, count, LOOKS_AT_ONCE)
    with (
        ThreadPoolExecutor(threads) as pool,
        closing(ordered_map(load, range(count), pool, 2 * LOOKS_AT_ONCE)) as loaded,
    ):
        for start in bar(starts, "audit, looks") if len(starts) > 4 else starts:
            at = np.arange(start, min(start + LOOKS_AT_ONCE, count))
            pixels, ratios = zip(*(next(loaded) for _ in at), strict=True)
            looks.elongated[at] = np.array(ratios) >= ELONGATED
            maps = read(rows[at])
            scored = [
                scores(reference, pixels, g) for g, reference in enumerate(references.values())
            ]
            scored_classes = next(iter(scored[0].values())).shape[-1]
            if scored_classes != kept.num_classes:
                raise UserError(
                    f"the reference scores {scored_classes:,} classes, the maps have {kept.num_classes:,}; choose one of the same classes"
                )
            looks.labels[at] = images.labels[image_of[rows[at]]]
            looks.reference_top[at] = [scored[0][n].mean((0, 1)).argmax() for n in range(len(at))]
            palettes, stored = zip(
                *(roots(maps, n, kept.num_classes, kept.absent) for n in range(len(at))),
                strict=True,
            )
            for n in range(len(at)):
                partner = n ^ 1  # of row 0 it is 1, of 1 it is 0, of 2 it is 3
                for g in range(len(footprints)):
                    looks.own[at[n], g] = likeness(
                        stored[n], palettes[n], scored[g].get(n, scored[0].get(n))
                    )
                    if partner < len(at):
                        looks.other[at[n], g] = likeness(
                            stored[n], palettes[n], scored[g].get(partner, scored[0].get(partner))
                        )
    return looks


class Kept(Protocol):
    """What of a StoreHeader says how maps are to be read."""

    num_classes: int
    absent: Absent


@torch.inference_mode()
def scores(
    reference: Reference, pixels: tuple[list[np.ndarray], ...], g: int
) -> dict[int, np.ndarray]:
    """The reference's probabilities `[S, S, K]` of those images that have a look `g`, by their
    place.
    """
    have = [n for n, looks in enumerate(pixels) if g < len(looks)]
    if not have:
        return {}
    device = next(iter(getattr(reference, "buffers", lambda: iter(()))()), torch.empty(0)).device
    logits_NSSK = reference(torch.from_numpy(np.stack([pixels[n][g] for n in have])).to(device))
    return dict(zip(have, logits_NSSK.softmax(-1).cpu().numpy(), strict=True))


def roots(
    maps: ScoreMaps, n: int, num_classes: int, absent: Absent
) -> tuple[np.ndarray, np.ndarray]:
    """The palette of a row and the square roots of its probabilities, `[S, S, P]`.

    Roots, because cells that are sure would else drown the others: their inner product is that of
    Hellinger's distance.
    """
    named, other = cell_targets(ScoreMaps(*(part[n : n + 1] for part in maps)), num_classes, absent)
    palette, place = np.unique(maps.cls[n], return_inverse=True)
    dense = np.repeat(np.sqrt(other[0])[..., None], len(palette), axis=2)
    np.put_along_axis(dense, place.reshape(maps.cls[n].shape), np.sqrt(named[0]), axis=2)
    return palette, dense


def likeness(
    stored_SSP: np.ndarray, palette: np.ndarray, reference_SSK: np.ndarray | None
) -> np.ndarray:
    """Correlation of a stored map, put upright from each of 8 orientations, with the reference's;
    float64 `[8]`, NaN if one is flat.
    """
    if reference_SSK is None:
        return np.full(8, np.nan)
    side = len(stored_SSP)
    seen = torch.from_numpy(np.sqrt(reference_SSK[..., palette].astype(np.float64)))
    if len(seen) != side:  # a student's tokens are others than the teacher's cells
        seen = F.interpolate(
            seen.permute(2, 0, 1)[None], size=(side, side), mode="bilinear", antialias=True
        )[0].permute(1, 2, 0)
    seen = seen.numpy() - seen.numpy().mean((0, 1))
    stored = stored_SSP - stored_SSP.mean((0, 1))
    size = math.sqrt((seen**2).sum() * (stored**2).sum())
    if size < 1e-9:
        return np.full(8, np.nan)
    return np.array([(upright(stored, o) * seen).sum() / size for o in range(8)])


def paired_t(difference_N: np.ndarray) -> float:
    """Student's t of differences against 0; 0 for fewer than two, infinite where they are equal and
    not 0.
    """
    difference_N = difference_N[~np.isnan(difference_N)]
    if len(difference_N) < 2:
        return 0.0
    mean, error = difference_N.mean(), difference_N.std(ddof=1) / math.sqrt(len(difference_N))
    return (
        float(mean / error)
        if error > 1e-12
        else math.copysign(math.inf, mean)
        if abs(mean) > 1e-9
        else 0.0
    )


class Choice(NamedTuple):
    """Of several hypotheses the likeliest."""

    best: int
    mean: np.ndarray  # of the scores of each
    count: int
    over: np.ndarray  # t of the best against each, infinite against itself

    def runner_up(self) -> int:
        """The hypothesis of the second greatest mean. Not always that of the smallest t, which it
        takes to be sure.
        """
        return max((h for h in range(len(self.mean)) if h != self.best), key=self.mean.__getitem__)

    def sure_against(self, other: int, t: float) -> bool:
        """Is the best better than that one beyond doubt?"""
        return self.over[other] >= t and self.mean[self.best] - self.mean[other] >= EFFECT

    def sure(self, t: float) -> bool:
        """Is the best better than every other beyond doubt?"""
        return all(
            self.sure_against(other, t) for other in range(len(self.mean)) if other != self.best
        )


def choose(scores_NH: np.ndarray) -> Choice:
    """The hypothesis of the greatest mean score over the images where all have one."""
    scores_NH = scores_NH[~np.isnan(scores_NH).any(1)]
    if not len(scores_NH):
        return Choice(0, np.zeros(scores_NH.shape[1]), 0, np.zeros(scores_NH.shape[1]))
    mean = scores_NH.mean(0)
    best = int(mean.argmax())
    over = np.array(
        [
            math.inf if h == best else paired_t(scores_NH[:, best] - scores_NH[:, h])
            for h in range(len(mean))
        ]
    )
    return Choice(best, mean, len(scores_NH), over)


def find_layout(
    looks: MapCorrelation, where: object, footprint: str | None = None
) -> tuple[str, str]:
    """Which of a pack's axes comes first, and what its maps cover, as `Axes` and `Geometry` name
    it; UserError if that is not sure.

    `looks` are of maps read as row-column; `footprint` is given back if it is known. Where no
    image's sides differ, `squash` is right and so is `center-crop`.
    """
    g, o = looks.best()
    choice = choose(looks.own[:, g])
    if choice.count < FEWEST or not looks.located() or not choice.sure(ALARM_T):
        raise UserError(
            f"{where}: the reference does not tell how these maps lie ({ORIENTATIONS[choice.best]} {choice.mean[choice.best]:.3f}, "
            f"{ORIENTATIONS[choice.runner_up()]} {choice.mean[choice.runner_up()]:.3f}, smallest t {choice.over.min():.1f}, {choice.count} "
            "images); give more images or a better reference, or declare --axes and --footprint"
        )
    if o not in (0, 4):
        raise UserError(
            f"{where}: these maps are {ORIENTATIONS[o]}, which no --axes mends; turn them before the import"
        )
    axes = "column-row" if o else "row-column"
    if footprint or not looks.elongated.any():
        return axes, footprint or "squash"
    cover = choose(looks.own[looks.elongated][:, :, o])
    if cover.count < FEWEST or not cover.sure(ALARM_T):
        raise UserError(
            f"{where}: the reference does not tell what these maps cover ({cover.count} images whose sides differ, "
            f"t = {cover.over.min():.1f}); give more images or a better reference, or declare --footprint"
        )
    return axes, looks.footprints[cover.best]


def what(footprint: str) -> str:
    """A footprint in words."""
    return {"squash": "the whole image", "center-crop": "its center square"}.get(
        footprint, footprint
    )

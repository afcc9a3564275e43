"""The forms in which a store keeps a row: raw, lossless, compact. What stands where is described in
FORMAT.md.

Both packed forms name the row's classes by their place in its palette, the sorted distinct classes,
and write the places as planes of bits: a row of 18 x 18 cells of 5 classes that names 32 classes
needs 5 bits an entry where raw needs 16. `lossless` keeps the bits of logits and logsumexps.
`compact` keeps 8 bits of an entry's probability, or of its logit where pooling averages logits, and
no logsumexp.
"""

from typing import Literal, NamedTuple

import numpy as np

Absent = Literal["tail", "zero-logit"]
Form = Literal["raw", "lossless", "compact"]
SCALE_BYTES = 8  # of a compact row: low and step, float32 each

# Letters: N rows, S cells along a side, k classes a cell, E = S * S * k entries of a row, P classes
# in its palette


class ScoreMaps(NamedTuple):
    """Rows of a store. `logit` float16 `[N, S, S, k]` descending over k, `cls` uint16 alike, `lse`
    float16 `[N, S, S]` the logsumexp over all K classes, `window` float32 `[N, 4]`.
    """

    logit: np.ndarray
    cls: np.ndarray
    lse: np.ndarray
    window: np.ndarray


class FormError(NamedTuple):
    """How far a lossy form is from what it was made of, over all rows."""

    probability_max: float  # of a named class in a cell
    probability_mean: float
    variation_max: float  # total variation between a cell's targets over all K classes, 0 to 1
    variation_mean: float

    def __str__(self) -> str:
        return (
            f"error of a probability {self.probability_mean:.2e} on average, {self.probability_max:.2e} at most; total variation "
            f"of a cell's target {self.variation_mean:.2e} on average, {self.variation_max:.2e} at most"
        )


def plane_bits(palette: np.ndarray) -> np.ndarray:
    """Bits of an entry's place in palettes of these sizes, int64: 0 for 1 class, 5 for 17 to 32."""
    # log2 of a power of two is exact
    return np.ceil(np.log2(np.maximum(palette, 1).astype(np.float64))).astype(np.int64)


def row_sizes(form: Form, side: int, top_k: int, palette: np.ndarray) -> np.ndarray:
    """Bytes of packed rows with palettes of these sizes, int64."""
    entries = side * side * top_k
    values = SCALE_BYTES + entries if form == "compact" else 2 * entries + 2 * side * side
    return values + 2 * palette.astype(np.int64) + plane_bits(palette) * -(-entries // 8)


def levels_of(absent: Absent) -> np.ndarray:
    """The 256 levels of a compact store, float32: an entry's logit is low + step * level.

    `tail`: the square roots of probabilities are spread evenly, so log p = low + 2 ln(code / 255),
    low being the log of the row's greatest. Half a step is then 0.4 % of that one and less of the
    smaller; evenly spread logs of 16 units would miss by 3 % of each. Code 0 stands for what is
    nearly nothing and needs a finite log: a quarter of a step.

    `zero-logit`: logits themselves are averaged by whoever pools them, so these are spread evenly
    from the row's least to its greatest.
    """
    codes = np.arange(256.0)
    return (codes if absent == "zero-logit" else 2 * np.log(np.maximum(codes, 0.25) / 255)).astype(
        np.float32
    )


# ------------------------------------------------------------------------------------------------ raw to packed


def pack(form: Form, absent: Absent, maps: ScoreMaps) -> list[bytes]:
    """The bytes of each row but its Window. The maps must be finite."""
    N, E = len(maps.logit), maps.cls[0].size
    if form == "compact":
        low_N, step_N, codes_NE = quantize(absent, maps)
        before, after = np.stack([low_N, step_N], 1).astype("<f4"), [codes_NE]
    else:
        before, after = (
            np.empty((N, 0), "<f4"),
            [maps.logit.astype("<f2").reshape(N, E), maps.lse.astype("<f2").reshape(N, -1)],
        )
    rows = []
    for n, classes_E in enumerate(maps.cls.reshape(N, E)):
        palette, place_E = np.unique(classes_E, return_inverse=True)
        bits = int(plane_bits(np.array(len(palette))))
        planes = (place_E[None] >> np.arange(bits)[:, None] & 1).astype(np.uint8)
        parts = [
            before[n],
            palette.astype("<u2"),
            np.packbits(planes, axis=1, bitorder="little"),
            *(part[n] for part in after),
        ]
        rows.append(b"".join(part.tobytes() for part in parts))
    return rows


def quantize(absent: Absent, maps: ScoreMaps) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`low` and `step`, float32 `[N]`, and codes, uint8 `[N, E]`, of compact rows. Larger values
    never get smaller codes.
    """
    value = maps.logit.astype(np.float64)
    if absent == "zero-logit":
        value = value.reshape(len(value), -1)
        low = value.min(1)
        step = (value.max(1) - low) / 255
        code = (value - low[:, None]) / np.where(step > 0, step, 1)[:, None]
    else:  # float16 lets a logit pass its logsumexp by a rounding
        value = np.minimum(value - maps.lse.astype(np.float64)[..., None], 0).reshape(
            len(value), -1
        )
        low, step = value.max(1), np.ones(len(value))
        code = 255 * np.exp((value - low[:, None]) / 2)
    return (
        low.astype(np.float32),
        step.astype(np.float32),
        np.rint(code).clip(0, 255).astype(np.uint8),
    )


# ------------------------------------------------------------------------------------------------ packed to raw


def unpack(
    form: Form,
    side: int,
    top_k: int,
    levels: np.ndarray | None,
    palette: np.ndarray,
    rows: list[np.ndarray],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`logit`, `cls` and `lse` of packed rows, as ScoreMaps has them.

    Args:
        levels: float32 `[256]`, of a compact store.
        palette: classes in each row's palette, `[N]`.
        rows: uint8, as long as `row_sizes` says.

    A place outside the palette, which only a wrong writer leaves under a right CRC, gives class
    65,535: no store has so many.
    """
    N, cells = len(rows), side * side
    entries = cells * top_k
    plane = -(-entries // 8)
    logit, cls = np.empty((N, entries), np.float16), np.empty((N, entries), np.uint16)
    lse = np.zeros((N, cells), np.float16)
    for size in np.unique(palette).tolist():  # rows of one palette size have one layout
        ids = np.flatnonzero(palette == size)
        stack = np.stack([rows[n] for n in ids])
        at = SCALE_BYTES if form == "compact" else 0
        bits = int(plane_bits(np.array(size)))
        planes = stack[:, at + 2 * size : at + 2 * size + bits * plane].reshape(
            len(ids), bits, plane
        )
        places = np.zeros((len(ids), entries), np.uint16)
        for bit in range(bits):
            places |= (
                np.unpackbits(planes[:, bit], axis=1, count=entries, bitorder="little").astype(
                    np.uint16
                )
                << bit
            )
        table = np.full((len(ids), 1 << bits), 65535, np.uint16)
        table[:, :size] = column(stack, at, size, "<u2")
        cls[ids] = np.take_along_axis(table, places.astype(np.intp), 1)
        at += 2 * size + bits * plane
        if form == "compact":
            low, step = column(stack, 0, 2, "<f4").T
            with np.errstate(over="ignore"):  # left to whoever checks that values are finite
                level = (low[:, None] + step[:, None] * levels).astype(np.float16)
            logit[ids] = np.take_along_axis(level, stack[:, at:].astype(np.intp), 1)
        else:
            logit[ids], lse[ids] = (
                column(stack, at, entries, "<f2"),
                column(stack, at + 2 * entries, cells, "<f2"),
            )
    return (
        logit.reshape(N, side, side, top_k),
        cls.reshape(N, side, side, top_k),
        lse.reshape(N, side, side),
    )


def column(stack: np.ndarray, at: int, count: int, dtype: str) -> np.ndarray:
    """`count` numbers that begin at byte `at` of each row."""
    return np.ascontiguousarray(stack[:, at : at + count * np.dtype(dtype).itemsize]).view(dtype)


# ------------------------------------------------------------------------------------------------ what is lost


def cell_targets(
    maps: ScoreMaps, num_classes: int, absent: Absent
) -> tuple[np.ndarray, np.ndarray]:
    """What each cell says: probabilities of its classes, float64 `[N, S, S, k]`, and of any other
    class, `[N, S, S]`.
    """
    logit, others = maps.logit.astype(np.float64), num_classes - maps.logit.shape[3]
    if absent == "zero-logit":
        peak = np.maximum(logit.max(-1, keepdims=True), 0)
        named, other = np.exp(logit - peak), np.exp(-peak)[..., 0]
        total = named.sum(-1) + others * other
        return named / total[..., None], other / total
    named = np.exp(logit - maps.lse.astype(np.float64)[..., None])
    kept = named.sum(-1, keepdims=True)  # passes 1 by roundings
    named = named / (np.maximum(kept, 1) if others else kept)
    return named, np.maximum(1 - named.sum(-1), 0) / max(others, 1)


class ErrorSum:
    """FormError, gathered from rows before and after."""

    def __init__(self, num_classes: int, absent: Absent) -> None:
        self._of = num_classes, absent
        self._max, self._sum, self._count = np.zeros(2), np.zeros(2), np.zeros(2)

    def add(self, before: ScoreMaps, after: ScoreMaps) -> None:
        (named, other), (named_after, other_after) = (
            cell_targets(before, *self._of),
            cell_targets(after, *self._of),
        )
        probability = np.abs(named - named_after)
        others = self._of[0] - named.shape[3]
        variation = (probability.sum(-1) + others * np.abs(other - other_after)) / 2
        for at, error in enumerate((probability, variation)):
            self._max[at] = max(self._max[at], error.max(initial=0))
            self._sum[at] += error.sum()
            self._count[at] += error.size

    def result(self) -> FormError:
        mean = self._sum / np.maximum(self._count, 1)
        return FormError(float(self._max[0]), float(mean[0]), float(self._max[1]), float(mean[1]))

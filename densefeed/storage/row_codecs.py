"""Encode and decode the rows of a store: raw, lossless or compact.

The bytes are described in FORMAT.md. Both packed forms store the row's palette, its sorted distinct
classes, and the index of each entry's class in it as bit planes: a row of 18 x 18 cells of 5
classes with a palette of 32 needs 5 bits per entry where raw needs 16. `lossless` keeps the bits of
logits and logsumexps. `compact` keeps 8 bits per entry, of its probability, or of its logit where
pooling averages logits, and no logsumexp.
"""

from typing import Literal, NamedTuple

import numpy as np

# What the classes outside a cell's top k have: the remaining probability, spread evenly; logit 0;
# nothing, because what remains belongs to no class of the data. See FORMAT.md.
Absent = Literal["tail", "zero-logit", "background"]
Form = Literal["raw", "lossless", "compact"]
# Bytes of `low` and `step` of a compact row, float32 each.
SCALE_BYTES = 8

# Shape letters: N rows, S cells along a side, k classes per cell, E = S * S * k entries of a row,
# P classes in its palette


class ScoreMaps(NamedTuple):
    """Rows of a store.

    `logit` float16 `[N, S, S, k]`, descending over k; `cls` uint16 `[N, S, S, k]`, its classes;
    `lse` float16 `[N, S, S]`, logsumexp over all K classes; `window` float32 `[N, 4]`.
    """

    logit: np.ndarray
    cls: np.ndarray
    lse: np.ndarray
    window: np.ndarray

    def select(self, rows: np.ndarray | list[int]) -> "ScoreMaps":
        """Select rows by their numbers, or by a mask."""
        return ScoreMaps(*(part[rows] for part in self))


class FormError(NamedTuple):
    """Error of a lossy form against the maps it was made from, over all rows."""

    probability_max: float  # of a named class in a cell
    probability_mean: float
    variation_max: float  # total variation between a cell's targets over all K classes, 0 to 1
    variation_mean: float

    def __str__(self) -> str:
        return (
            f"error of a probability: mean {self.probability_mean:.2e}, "
            f"maximum {self.probability_max:.2e}; total variation of a cell's target: "
            f"mean {self.variation_mean:.2e}, maximum {self.variation_max:.2e}"
        )


def plane_bits(palette: np.ndarray | int) -> np.ndarray:
    """Return the bits of an index into such palettes, int64: 0 for 1 class, 5 for 17 to 32."""
    # log2 of a power of two is exact.
    return np.ceil(np.log2(np.maximum(palette, 1).astype(np.float64))).astype(np.int64)


def row_sizes(form: Form, side: int, top_k: int, palette: np.ndarray) -> np.ndarray:
    """Return the bytes of packed rows with palettes of these sizes, int64."""
    entries = side * side * top_k
    values = SCALE_BYTES + entries if form == "compact" else 2 * entries + 2 * side * side
    return values + 2 * palette.astype(np.int64) + plane_bits(palette) * -(-entries // 8)


def code_levels(absent: Absent) -> np.ndarray:
    """Return the 256 levels of a compact store, float32: an entry's logit is low + step * level.

    `tail`, `background`: the square roots of probabilities are spaced evenly, so log p = low +
    2 ln(code / 255), where low is the log of the row's largest probability. Half a step is then at
    most 0.4 % of the largest probability, and a smaller absolute error for smaller ones; logs
    spaced evenly over 16 units would be off by 3 % of each. Code 0 stands for nearly nothing and
    needs a finite log: it is decoded as a quarter of a step.

    `zero-logit`: pooling averages the logits themselves, so these are spaced evenly from the row's
    smallest to its largest.
    """
    levels = np.arange(256.0)
    if absent != "zero-logit":
        levels = 2 * np.log(np.maximum(levels, 0.25) / 255)
    return levels.astype(np.float32)


# ------------------------------------------------------------------------------- raw to packed


def pack(form: Form, absent: Absent, maps: ScoreMaps) -> list[bytes]:
    """Encode each row without its Window. The maps must be finite."""
    N, E = len(maps.logit), maps.cls[0].size
    if form == "compact":
        before, codes_NE = quantize(absent, maps)
        after = [codes_NE]
    else:
        before = np.empty((N, 0), "<f4")
        after = [part.astype("<f2").reshape(N, -1) for part in (maps.logit, maps.lse)]
    rows = []
    for n, classes_E in enumerate(maps.cls.reshape(N, E)):
        palette, place_E = np.unique(classes_E, return_inverse=True)
        bits = plane_bits(len(palette))
        planes = (place_E[None] >> np.arange(bits)[:, None] & 1).astype(np.uint8)
        packed = np.packbits(planes, axis=1, bitorder="little")
        parts = [before[n], palette.astype("<u2"), packed, *(part[n] for part in after)]
        rows.append(b"".join(part.tobytes() for part in parts))
    return rows


def quantize(absent: Absent, maps: ScoreMaps) -> tuple[np.ndarray, np.ndarray]:
    """Return (low, step), float32 `[N, 2]`, and the codes, uint8 `[N, E]`, of compact rows.

    Codes are monotonic: a larger value never has a smaller code.
    """
    N, value = len(maps.logit), maps.logit.astype(np.float64)
    if absent == "zero-logit":
        value = value.reshape(N, -1)
        low = value.min(1)
        step = (value.max(1) - low) / 255
        # If all logits of a row are equal, the step is 0 and so is every code.
        code = (value - low[:, None]) / np.where(step > 0, step, 1)[:, None]
    else:
        # Rounded to float16, a logit may exceed its logsumexp.
        value = np.minimum(value - maps.lse.astype(np.float64)[..., None], 0).reshape(N, -1)
        low, step = value.max(1), np.ones(N)
        # Half of the log is the square root of the probability, relative to the row's largest.
        code = 255 * np.exp((value - low[:, None]) / 2)
    return np.stack([low, step], 1).astype("<f4"), np.rint(code).clip(0, 255).astype(np.uint8)


# ------------------------------------------------------------------------------- packed to raw


def unpack(
    form: Form,
    side: int,
    top_k: int,
    levels: np.ndarray | None,
    palette: np.ndarray,
    rows: list[np.ndarray],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Decode packed rows into `logit`, `cls` and `lse` as in ScoreMaps; `lse` is 0 if compact.

    Args:
        levels: float32 `[256]`, only for compact rows.
        palette: size of each row's palette, `[N]`.
        rows: uint8, each as long as `row_sizes` gives.

    An index outside the palette, which only a faulty writer leaves under a valid CRC, is decoded as
    class 65,535, which is out of range in every store.
    """
    # Loaders unpack rows in native/maps.c, which must give the same bits.
    N, cells = len(rows), side * side
    entries = cells * top_k
    logit, cls = np.empty((N, entries), np.float16), np.empty((N, entries), np.uint16)
    lse = np.zeros((N, cells), np.float16)
    # Rows with palettes of one size have one layout.
    for size in np.unique(palette).tolist():
        ids = np.flatnonzero(palette == size)
        stack = np.stack([rows[n] for n in ids])
        cls[ids] = unpack_classes(stack, SCALE_BYTES if form == "compact" else 0, size, entries)
        if form == "compact":
            low, step = read_column(stack, 0, 2, "<f4").T
            # The caller checks that values are finite.
            with np.errstate(over="ignore", invalid="ignore"):
                level = (low[:, None] + step[:, None] * levels).astype(np.float16)
            logit[ids] = np.take_along_axis(level, stack[:, -entries:].astype(np.intp), 1)
        else:
            values = read_column(stack[:, -2 * (entries + cells) :], 0, entries + cells, "<f2")
            logit[ids], lse[ids] = values[:, :entries], values[:, entries:]
    shape = N, side, side
    return logit.reshape(*shape, top_k), cls.reshape(*shape, top_k), lse.reshape(shape)


def unpack_classes(stack: np.ndarray, at: int, size: int, entries: int) -> np.ndarray:
    """Decode the classes, uint16 `[N, entries]`, of rows whose palette begins at byte `at`.

    `stack` uint8 `[N, bytes]` holds rows whose palettes have `size` classes.
    """
    N, bits, plane_bytes = len(stack), plane_bits(size), -(-entries // 8)
    planes = stack[:, at + 2 * size :][:, : bits * plane_bytes].reshape(N, bits, plane_bytes)
    places = np.zeros((N, entries), np.uint16)
    for bit in range(bits):
        plane = np.unpackbits(planes[:, bit], axis=1, count=entries, bitorder="little")
        places |= plane.astype(np.uint16) << bit
    # 65,535 remains where an index is outside the palette.
    table = np.full((N, 1 << bits), 65535, np.uint16)
    table[:, :size] = read_column(stack, at, size, "<u2")
    return np.take_along_axis(table, places.astype(np.intp), 1)


def read_column(stack: np.ndarray, at: int, count: int, dtype: str) -> np.ndarray:
    """View `count` numbers that begin at byte `at` of each row."""
    # A view of wider numbers needs contiguous bytes.
    return np.ascontiguousarray(stack[:, at : at + count * np.dtype(dtype).itemsize]).view(dtype)


# ------------------------------------------------------------------------------- error of a form


def cell_targets(
    maps: ScoreMaps, num_classes: int, absent: Absent
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the target distribution of each cell.

    Returns the probabilities of its named classes, float64 `[N, S, S, k]`, and of each other class,
    `[N, S, S]`. With `background` they sum to the share of a cell that shows classes of the data.
    """
    logit, others = maps.logit.astype(np.float64), num_classes - maps.logit.shape[3]
    if absent == "zero-logit":
        # Without the peak exp would overflow: float16 holds logits up to 65,504, float64 only
        # e^709.
        peak = np.maximum(logit.max(-1, keepdims=True), 0)
        named, other = np.exp(logit - peak), np.exp(-peak)[..., 0]
        total = named.sum(-1) + others * other
        return named / total[..., None], other / total
    # Only a faulty writer leaves probabilities above 1; those of float16 could overflow.
    named = np.exp(np.minimum(logit - maps.lse.astype(np.float64)[..., None], 600))
    # Rounding can make this sum exceed 1.
    kept = named.sum(-1, keepdims=True)
    if absent == "background":
        return named / np.maximum(kept, 1), np.zeros(kept.shape[:-1])
    # If every class is named, no other class can take a remainder, so the sum becomes 1.
    named = named / (np.maximum(kept, 1) if others else kept)
    return named, np.maximum(1 - named.sum(-1), 0) / max(others, 1)


class ErrorSum:
    """Accumulate a FormError from rows before and after a conversion."""

    def __init__(self, num_classes: int, absent: Absent) -> None:
        self._convention = num_classes, absent
        self._max, self._sum, self._count = np.zeros((3, 2))

    def add(self, before: ScoreMaps, after: ScoreMaps) -> None:
        """Add rows."""
        named, other = cell_targets(before, *self._convention)
        named_after, other_after = cell_targets(after, *self._convention)
        probability = np.abs(named - named_after)
        rest = (self._convention[0] - named.shape[3]) * np.abs(other - other_after)
        if self._convention[1] == "background":
            # What belongs to no class of the data is one more class here.
            rest = np.abs(named.sum(-1) - named_after.sum(-1))
        # Total variation is half the sum of absolute differences.
        variation = (probability.sum(-1) + rest) / 2
        for at, error in enumerate((probability, variation)):
            self._max[at] = max(self._max[at], error.max(initial=0))
            self._sum[at] += error.sum()
            self._count[at] += error.size

    def result(self) -> FormError:
        """Return the error over all rows added so far."""
        mean = self._sum / np.maximum(self._count, 1)
        return FormError(*np.stack([self._max, mean], 1).ravel().tolist())

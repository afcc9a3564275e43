"""Shapes of training batches: aspect buckets, and the order of an epoch that keeps them apart.

Aspect-ratio bucketing: an image belongs to the bucket whose aspect is nearest to its own, a batch
holds images of one bucket, and all its crops have the bucket's aspect. So a crop is neither
squeezed nor padded. A bucket has one shape for each resolution, of about as many tokens as the
square of that side, and both of its sides are multiples of the patch.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import NamedTuple

import numpy as np

from densefeed.system.errors import UserError

# N images   B batches of an epoch

Shape = tuple[int, int]  # height and width of the network's input, pixels
Grid = int | tuple[int, int]  # of tokens: the side of a square, or rows and columns


def split_grid(grid: Grid) -> tuple[int, int]:
    """Return rows and columns of a grid; an integer is the side of a square.

    UserError unless they are numbers of tokens.
    """
    return split_sides(
        grid, f"grid is {grid!r}; give the number of tokens along a side, or (rows, columns)"
    )


def split_size(size: int | Sequence[int]) -> Shape:
    """Return height and width in pixels; an integer is the side of a square.

    UserError unless they are numbers of pixels.
    """
    return split_sides(size, f"size is {size!r}; give the pixels of a side, or (height, width)")


def split_sides(sides: int | Sequence[int], message: str) -> tuple[int, int]:
    """Return two positive integers, or one twice. UserError with `message` for anything else."""
    # A loop of one's own may give anything. A DataLoader turns tuples into lists.
    pair = tuple(sides) if isinstance(sides, list | tuple) else (sides, sides)
    if len(pair) != 2 or not all(isinstance(side, Integral) and side > 0 for side in pair):
        raise UserError(message)
    return int(pair[0]), int(pair[1])


def token_grid(shape: Shape, patch: int) -> tuple[int, int]:
    """Return rows and columns of tokens of an input, at least one of each; `patch` in pixels."""
    height, width = shape
    return max(1, height // patch), max(1, width // patch)


def describe_shape(shape: Shape) -> str:
    """Return a shape for messages: `224 px`, or `192 x 256 px`."""
    height, width = shape
    return f"{height:,} px" if height == width else f"{height:,} x {width:,} px"


@lru_cache(maxsize=256)
def bucket_shape(side: int, aspect: float, multiple: int) -> Shape:
    """Return the height and width of an aspect (width / height) at a resolution, in pixels.

    Both are multiples of `multiple`. Of the four pairs that round them down and up it is the one
    with the least sum of |log| of two ratios: its aspect to `aspect`, and its area to side * side.
    """
    exact = side / math.sqrt(aspect) / multiple, side * math.sqrt(aspect) / multiple
    # At least one, and 1e-9 so that sqrt's rounding moves no whole number.
    ends = [(max(1, math.floor(x + 1e-9)), max(1, math.ceil(x - 1e-9))) for x in exact]

    def distance(rows_columns: tuple[int, int]) -> float:
        rows, columns = rows_columns
        area = rows * columns * (multiple / side) ** 2
        return abs(math.log(columns / rows / aspect)) + abs(math.log(area))

    rows, columns = min(itertools.product(*ends), key=distance)
    return rows * multiple, columns * multiple


def list_shapes(
    sides: Sequence[int], aspects: Sequence[float] = (), multiple: int = 1
) -> list[Shape]:
    """Return the shapes of all `sides` and all `aspects`; without aspects the squares.

    UserError for a side below 1, and where two aspects have the same shape at a side.
    """
    if min(sides) < 1:
        raise UserError(
            f"an input of {min(sides)} px is too small; give a larger --size, --sizes or "
            "--multi-scale"
        )
    shapes = []
    for side in sides:
        found = {}
        for aspect in aspects:
            shape = bucket_shape(side, aspect, multiple)
            if other := found.get(shape):
                raise UserError(
                    f"--aspects {other:g} and {aspect:g} both have inputs of "
                    f"{describe_shape(shape)} at {side} px; remove one of them, or give a smaller "
                    "--side-multiple"
                )
            found[shape] = aspect
        shapes += found or [(side, side)]
    return shapes


class BucketOrder(NamedTuple):
    """The samples of an epoch in the order of its batches, and the bucket of each batch."""

    index: np.ndarray  # int64 [N]
    bucket: np.ndarray  # int64 [B]


@dataclass(frozen=True, eq=False)
class AspectBuckets:
    """The aspect bucket of every image of a dataset.

    Args:
        aspects: width / height of each bucket, ascending.
        multiple: heights and widths of inputs are multiples of it, pixels.
        heights, widths: of the stored images, pixels, `[N]`.

    Attributes:
        bucket_N: number of each image's bucket, int16.

    UserError for aspects that do not ascend.
    """

    aspects: tuple[float, ...]
    multiple: int
    heights: np.ndarray
    widths: np.ndarray

    def __post_init__(self) -> None:
        check_aspects(self.aspects)
        ratio_N = np.log(np.asarray(self.widths, float) / np.asarray(self.heights, float))
        # Halfway between neighbors on the logarithmic axis, where 1 / 2 and 2 are as far from 1.
        between = np.log(self.aspects)
        between = (between[1:] + between[:-1]) / 2
        object.__setattr__(self, "bucket_N", np.searchsorted(between, ratio_N).astype(np.int16))

    def shape(self, side: int, bucket: int) -> Shape:
        """Return the height and width of a bucket's inputs at a resolution, pixels."""
        return bucket_shape(side, self.aspects[bucket], self.multiple)

    def order(
        self, ids_N: np.ndarray, batch: int, cut: float, shuffled_B: np.ndarray
    ) -> BucketOrder:
        """Rearrange an epoch's permutation into batches of one bucket each.

        The samples are sorted by bucket, within it in the order of `ids_N`, and cut into batches;
        the batches are shuffled. So all but at most `len(aspects) - 1` batches have images of one
        bucket alone. Each of those others holds what two or more neighboring buckets leave, and
        has the shape of its middle image. The last batch is the only one that is not full.

        Args:
            ids_N: a permutation of the samples.
            batch: samples of a batch.
            cut: from 0 to 1 (exclusive): which part of the sorted samples is the last batch. Drawn
                uniformly, it makes the last batch one of any bucket, by the number of its images.
            shuffled_B: a permutation of the numbers of the batches but the last.
        """
        # Stable, so that images of a bucket keep the order of the permutation.
        ids_N = ids_N[np.argsort(self.bucket_N[ids_N], kind="stable")]
        full, count = len(shuffled_B), len(ids_N)
        first = int(cut * (full + 1)) * batch
        last = ids_N[first : first + count - full * batch]
        rest = np.delete(ids_N, slice(first, first + len(last)))
        rows = rest.reshape(full, batch)[shuffled_B]
        middle_B = np.append(rows[:, batch // 2], last[len(last) // 2])
        return BucketOrder(np.append(rows.ravel(), last), self.bucket_N[middle_B].astype(np.int64))


def check_aspects(aspects: Sequence[float]) -> None:
    """Raise UserError unless these are positive numbers that ascend."""
    if list(aspects) != sorted(set(aspects)) or min(aspects, default=1) <= 0:
        given = " ".join(f"{aspect:g}" for aspect in aspects)
        raise UserError(
            f"--aspects {given}: give the width / height of each bucket once, above 0 and ascending"
        )

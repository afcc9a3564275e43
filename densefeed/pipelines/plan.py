"""EpochPlan: the order, crops, flips and mixing boxes of every epoch of a run.

Every draw is a function of (seed, epoch, sample id) and comes from the counter-based generator of
philox.py: the same counter gives the same number anywhere. So two loaders, any number of threads
or ranks and a resumed run see the same samples, and no generator state needs saving. The key is
the seed, the counter (epoch, sample id or step, stream | repeat << 16, block).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from densefeed.pipelines.philox import philox
from densefeed.pipelines.shapes import (
    AspectBuckets,
    BucketOrder,
    Grid,
    Shape,
    list_shapes,
    split_grid,
)
from densefeed.storage.geometry import center_box
from densefeed.system.errors import UserError
from densefeed.system.options import check_type, hints, to_plain

# Streams. A new kind of draw takes a new number, so that old runs stay reproducible.
ORDER, CROP, MIX, STEP, BLOCKS, AUGMENT, JITTER, ERASE, NOISE, SHIFT, PAIRS, OPERATION = range(12)
SCALE, BATCHES, CUT, ZOOM = range(12, 16)
# Attempts at a crop, as in torchvision's RandomResizedCrop. A crop reads numbers 0 to 9 for its
# areas, 10 to 19 for its ratios, 20 to 23 for top, left, flip and filter.
TRIES = 10
# Samples whose sort keys are drawn at once. With more, the 64-bit words leave the cache: ImageNet's
# order took 0.1 to 0.2 s longer in one piece.
CHUNK = 2048
# Width by height, least and most: the default of torchvision's RandomResizedCrop.
CROP_RATIO = 3 / 4, 4 / 3

Interpolation = Literal["bilinear", "bicubic", "random"]


class RankRows(NamedTuple):
    """One rank's rows of every batch of an epoch, or of one batch.

    The rows from batch `start` on are `index[start:]` (likewise the other fields).
    """

    index: np.ndarray  # int64 [batches, local batch], sample ids
    repeat: np.ndarray  # int64 [batches, local batch], which repeat of the sample
    weight: np.ndarray  # float32 [batches, local batch], 0 for padding


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The plan of every epoch of a run.

    `train` shuffles, crops as torchvision's RandomResizedCrop (area uniform in `crop_scale`, log of
    the aspect ratio uniform in CROP_RATIO, ten tries, then the largest centered box of an allowed
    ratio) and flips; `evaluate` keeps the order, shows each sample once and takes the centered
    square of `crop_pct` times the shorter side.

    Order `random` is a uniform permutation. `blocks` is for disks and network file systems: blocks
    of `block` neighbors in storage are shuffled, then samples within every `window` blocks. The
    W = block * window samples of a window then lie in at most `window` runs of storage, and a
    reader that prefetches those runs reads sequentially: 128 ImageNet files are 14 MB, a read of
    0.1 s of which a disk spends a tenth seeking. The price: two neighbors in storage share a batch
    with probability (1 - 1 / block) (batch - 1) / (W - 1), which is num_samples / W times that of
    `random` (with 1.28 M samples, batches of 1,024 and the defaults 6 % instead of 0.08 %), and
    where storage is sorted by class, a window of ImageNet shows at most 2 * window of its classes.

    Repeated augmentation (Hoffer et al., arXiv 1901.09335): each sample comes `repeats` times, with
    another crop and flip, next to each other and so in the same global batch. DeiT's RASampler cuts
    the repeated sequence to the length of the dataset, so an epoch shows a third of the samples (of
    3 repeats), and it spreads the repeats over ranks. Here an epoch is `repeats` times longer and
    shows every sample; for as many steps as DeiT, divide the epochs by `repeats`.

    Args:
        num_samples: samples in storage.
        batch: rows of a global batch, over all ranks; a multiple of `ranks` and of `repeats`.
        seed: key of every draw, 64 bits.
        hflip: probability of a left-right flip.
        crop_interpolation: the filter that resizes crops, antialiased; `random`, in training, draws
            one of the two for each crop.
        rank, ranks: the rank whose rows `rank_rows` returns, and the number of ranks.
        microbatches: forward passes that a global batch is divided into, over all ranks; a
            multiple of `ranks`; 0: one per rank. In training, row i and its mixing partner, row
            batch - 1 - i, lie in one microbatch, and a reversed microbatch gives its partners: the
            pairs that are mixed do not depend on microbatches and ranks.
        sizes: progressive resolution, (from epoch, side of the network's input in pixels) ascending
            from epoch 0.
        multi_scale: in place of `sizes`, the sides of which every batch draws one, all equally
            likely.
        buckets: in training, batches of images of one aspect, whose crops have the aspect of their
            input; see `AspectBuckets.order`. Not with order `blocks`.

    Raises UserError where these are inconsistent.
    """

    num_samples: int
    batch: int
    seed: int
    mode: Literal["train", "evaluate"]
    order: Literal["random", "blocks"] = "random"
    block: int = 128
    window: int = 128
    repeats: int = 1
    rank: int = 0
    ranks: int = 1
    microbatches: int = 0
    sizes: tuple[tuple[int, int], ...] = ((0, 224),)
    multi_scale: tuple[int, ...] = ()
    buckets: AspectBuckets | None = None
    crop_scale: tuple[float, float] = (0.08, 1.0)
    hflip: float = 0.5
    crop_pct: float = 1.0
    crop_interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        for name, hint in hints(EpochPlan).items():
            check_type(name, hint, to_plain(getattr(self, name)))
        batch, ranks, microbatches = self.batch, self.ranks, self._microbatches
        for name in ("batch", "block", "window", "repeats", "ranks"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)} and must be at least 1")
        # The key of Philox.
        if not 0 <= self.seed < 2**64:
            raise UserError(f"seed is {self.seed} and must be from 0 to {2**64 - 1}")
        for name in ("ranks", "repeats"):
            if batch % (count := getattr(self, name)):
                raise UserError(
                    f"a batch of {batch} is not a multiple of the {count} {name}; "
                    "choose a batch that is"
                )
        if microbatches % ranks or batch % microbatches:
            raise UserError(
                f"{microbatches} microbatches of a batch of {batch} cannot be shared by {ranks} "
                "ranks; choose a multiple of the ranks that divides the batch"
            )
        if not 0 <= self.rank < ranks:
            raise UserError(f"rank {self.rank} is out of range for {ranks} ranks, counted from 0")
        starts = [start for start, _ in self.sizes]
        if starts[:1] != [0] or starts != sorted(set(starts)):
            raise UserError(
                f"sizes {self.sizes} must be pairs (epoch, pixels) whose epochs ascend from 0"
            )
        if self.buckets and (self.order != "random" or self.mode == "evaluate"):
            raise UserError(
                "--aspects reorders the training set, so it cannot keep an order of storage; give "
                "--order random, or remove --aspects"
            )
        if self.mode == "evaluate" and self.crop_interpolation == "random":
            raise UserError(
                "crop_interpolation random draws a filter for each training crop; choose bilinear "
                "or bicubic to evaluate"
            )
        # Refuses sides that are not positive and aspects with equal shapes.
        self.shapes()

    @property
    def batches(self) -> int:
        """Number of batches of an epoch; the last one is padded with weight 0."""
        return -(-self.num_samples * self._repeats // self.batch)

    @property
    def _microbatches(self) -> int:
        return self.microbatches or self.ranks

    @property
    def rows(self) -> np.ndarray:
        """This rank's rows of a global batch, part after part: int64 `[batch / ranks]`."""
        size, local = self.batch // self.ranks, self._microbatches // self.ranks
        # Evaluation mixes nothing, and a single part contains both rows of every pair.
        if self.mode == "evaluate" or self._microbatches == 1:
            return np.arange(self.rank * size, (self.rank + 1) * size)
        # Partners in reverse order, because a part is mixed with itself reversed (mixing.py). The
        # middle row of a part of odd size has none; `mixing.check_pairs` refuses it.
        half, odd = divmod(self.batch // self._microbatches, 2)
        part = np.arange(self.rank * local, (self.rank + 1) * local)[:, None]
        low, middle = part * half + np.arange(half), (part + self._microbatches * half)[:, :odd]
        return np.concatenate([low, middle, self.batch - 1 - low[:, ::-1]], axis=1).ravel()

    def count_images(self, first: int, end: int) -> int:
        """Count the images of steps `first` to `end` - 1 of a training, all ranks, no padding."""
        epochs = end // self.batches - first // self.batches
        padding = self.batches * self.batch - self.num_samples * self._repeats
        return (end - first) * self.batch - epochs * padding

    def part_weights(self, step: int) -> list[float]:
        """Weight the mean loss of each of this rank's microbatches in a step.

        The mean over all microbatches of all ranks is then the mean over the global batch. Every
        weight is 1 except in the padded last batch of an epoch.
        """
        real = min(self.batch, self.num_samples * self._repeats - step * self.batch)
        # All microbatches of all ranks are averaged alike, hence the product with their number.
        counted = (self.rows < real).reshape(self._microbatches // self.ranks, -1).sum(1)
        return (counted * (self._microbatches / real)).tolist()

    @property
    def _repeats(self) -> int:
        return self.repeats if self.mode == "train" else 1

    def _sides(self, epoch: int) -> tuple[int, ...]:
        """Return the sides that a batch of this epoch may have, pixels."""
        return self.multi_scale or ([pixels for start, pixels in self.sizes if start <= epoch][-1],)

    def shape(self, epoch: int, step: int) -> Shape:
        """Return the height and width of the network's input in a batch of an epoch, pixels."""
        sides = self._sides(epoch)
        drawn = self.draws(epoch, step, SCALE, (0,)).item() if len(sides) > 1 else 0
        side = sides[int(drawn * len(sides))]
        if self.buckets is None:
            return side, side
        return self.buckets.shape(side, int(bucket_order(self, epoch).bucket[step]))

    def shapes(self, epoch: int | None = None) -> list[Shape]:
        """Return the shapes that batches of an epoch may have, or of the whole run."""
        every = self.multi_scale or sorted({pixels for _, pixels in self.sizes})
        sides = every if epoch is None else self._sides(epoch)
        if self.buckets is None:
            return list_shapes(sides)
        return list_shapes(sides, self.buckets.aspects, self.buckets.multiple)

    def permutation(self, epoch: int) -> np.ndarray:
        """Return the sample ids in the order of the epoch, each once: int64 `[num_samples]`."""
        if self.mode == "evaluate":
            return np.arange(self.num_samples)
        if self.buckets:
            return bucket_order(self, epoch).index
        ids = self._shuffle(epoch, self.num_samples, ORDER)
        if self.order == "random":
            return ids
        # argsort of a permutation is its inverse: the place of each block in the shuffled order.
        window_of_block = np.argsort(self._shuffle_blocks(epoch)) // self.window
        # Stable, so that the samples of a window keep the random order of `ids`.
        return ids[np.argsort(window_of_block[ids // self.block], kind="stable")]

    def _shuffle_blocks(self, epoch: int) -> np.ndarray:
        return self._shuffle(epoch, -(-self.num_samples // self.block), BLOCKS)

    def runs(self, epoch: int, start: int = 0) -> Iterator[list[tuple[int, int]]]:
        """Yield the runs of storage, (first id, end), to prefetch before each batch.

        From batch `start` on, for order `blocks`. Before the first batch that is its whole window
        and one batch more, then as much again as a batch holds: prefetching stays one window
        ahead, at an even rate. Empty lists for other orders.
        """
        if self.order != "blocks" or self.mode == "evaluate":
            yield from ([] for _ in range(start, self.batches))
            return
        firsts, block_rows = self._shuffle_blocks(epoch) * self.block, self.block * self._repeats
        # From the start of the window, as the samples of a batch may lie in any of its blocks.
        done = start * self.batch // block_rows
        done -= done % self.window
        for number in range(start, self.batches):
            until = -(-(number + 1) * self.batch // block_rows) + self.window
            yield [
                (first, min(first + self.block, self.num_samples))
                for first in firsts[done:until].tolist()
            ]
            done = max(done, until)

    def _shuffle(self, epoch: int, count: int, stream: int) -> np.ndarray:
        """Return the numbers below `count`, sorted by 64 random bits of each."""
        parts = np.split(np.arange(count), range(CHUNK, count, CHUNK))
        blocks = (philox(self.seed, (epoch, ids, stream, 0)) for ids in parts)
        # 64 bits: with 32, about 190 pairs of ImageNet's 1.28 M samples would have equal keys.
        keys = np.concatenate([high << np.uint64(32) | low for high, low, _, _ in blocks])
        # Stable: numpy's default sort may order equal keys differently by processor.
        return np.argsort(keys, kind="stable")

    def rank_rows(self, epoch: int) -> RankRows:
        """Return this rank's rows of every batch of the epoch.

        Global batch b is rows b * batch to (b + 1) * batch of the epoch's sequence, the permutation
        with each sample `repeats` times; the rank has its `rows` of it. The last batch is padded
        from the start of the sequence with weight 0, so every row is a real sample on every rank,
        and no sample has weight twice.
        """
        rows = np.arange(self.batches)[:, None] * self.batch + self.rows
        total = self.num_samples * self._repeats
        sample, repeat = np.divmod(rows % total, self._repeats)
        return RankRows(self.permutation(epoch)[sample], repeat, (rows < total).astype(np.float32))

    def draws(
        self,
        epoch: int,
        ids_N: np.ndarray | int,
        stream: int,
        numbers: Sequence[int],
        repeat_N: np.ndarray | int = 0,
    ) -> np.ndarray:
        """Draw uniform numbers in [0, 1), multiples of 2^-32: float64 `[len(numbers), N]`.

        Use it for every kind of draw of a sample or step. `stream` is the kind, `numbers` selects
        from the stream's endless numbers (only the Philox blocks of four that hold them are
        computed), `repeat_N` is the repeat (below 2^16) of each sample.
        """
        blocks = sorted({number // 4 for number in numbers})
        kind = stream | np.asarray(repeat_N) << 16
        words = philox(self.seed, (epoch, ids_N, kind, np.array(blocks)[:, None]))
        drawn = np.stack([words[number % 4][blocks.index(number // 4)] for number in numbers])
        # Exact in float64, so no draw is rounded up to 1.
        return drawn / 2.0**32

    def crop_draws(
        self, epoch: int, ids_N: np.ndarray, repeat_N: np.ndarray | int = 0
    ) -> np.ndarray:
        """Draw the numbers that `crops` and `cubic_crops` read: float64 `[24, N]`.

        In evaluation there are none, `[0, N]`.
        """
        if self.mode == "evaluate":
            return np.empty((0, len(ids_N)))
        return self.draws(epoch, ids_N, CROP, range(2 * TRIES + 4), repeat_N)

    def crops(
        self,
        epoch: int,
        ids_N: np.ndarray,
        height_N: np.ndarray,
        width_N: np.ndarray,
        repeat_N: np.ndarray | int = 0,
        u: np.ndarray | None = None,
        shape: Shape = (1, 1),
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw the crops of stored images: boxes, float64 `[N, 4]`, and flips, bool `[N]`.

        Boxes are (top, left, height, width) in pixels. `repeat_N` distinguishes the repeats of a
        sample. Heights and widths may be of any integer type. `u` is `crop_draws` of the samples,
        if the caller has it. `shape` is that of the batch: with `buckets` crops have its aspect.
        """
        # A product of uint16 would wrap.
        height_N, width_N = np.asarray(height_N, np.int64), np.asarray(width_N, np.int64)
        if self.mode == "evaluate":
            return center_box(height_N, width_N, self.crop_pct), np.zeros(len(height_N), bool)
        u = self.crop_draws(epoch, ids_N, repeat_N) if u is None else u
        down, right = u[2 * TRIES : 2 * TRIES + 2]
        least, most = self.crop_scale
        area = height_N * width_N * (least + (most - least) * u[:TRIES])
        ratios = (shape[1] / shape[0],) * 2 if self.buckets else CROP_RATIO
        low, high = np.log(ratios)
        ratio = np.exp(low + (high - low) * u[TRIES : 2 * TRIES])
        # rint rounds halves to even, as Python's round does in torchvision.
        w, h = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
        fits = (w > 0) & (w <= width_N) & (h > 0) & (h <= height_N)
        first = fits.argmax(0), np.arange(len(height_N))
        h, w, found = h[first], w[first], fits[first]
        # The fallback keeps an allowed ratio: a wide image loses width, a tall one height.
        low, high = ratios
        # At least a pixel: aspects may be far from those of tiny images.
        w = np.where(found, w, np.minimum(width_N, np.rint(height_N * high)).clip(1))
        h = np.where(found, h, np.minimum(height_N, np.rint(width_N / low)).clip(1))
        # `down` and `right` are below 1, so no box passes the last row or column.
        top = np.where(found, np.floor(down * (height_N - h + 1)), (height_N - h) // 2)
        left = np.where(found, np.floor(right * (width_N - w + 1)), (width_N - w) // 2)
        return np.stack([top, left, h, w], axis=1), self.flips(u)

    def flips(self, u: np.ndarray) -> np.ndarray:
        """Return which training crops are flipped, bool `[N]`, from their `crop_draws`."""
        return u[2 * TRIES + 2] < self.hflip

    def cubic_crops(self, u: np.ndarray) -> np.ndarray:
        """Return which crops are resized bicubically, the others bilinearly: bool `[N]`.

        `u` is `crop_draws` of the samples.
        """
        if self.crop_interpolation != "random":
            return np.full(u.shape[1], self.crop_interpolation == "bicubic")
        return u[-1] >= 0.5

    def mix_box(
        self, epoch: int, step: int, grid: Grid, kept: float | None = None
    ) -> tuple[int, int, int, int]:
        """Draw the box that a step exchanges: (top, left, bottom, right).

        It is in pixels or tokens of an image of `grid`: (rows, columns), or the side of a square.
        CutMix's rule: the center is uniform, the box has the image's aspect and covers the share of
        the area that is not `kept` (default: uniform, as in MixToken), halves are rounded down, and
        the box is clipped.
        """
        share, row, column = self.draws(epoch, step, MIX, range(3))[:, 0]
        root = np.sqrt(1 - (share if kept is None else kept))
        ends = []
        for extent, center in zip(split_grid(grid), (row, column), strict=True):
            # Both roundings are the published code's: a box of side 1 is empty.
            middle, half = int(center * extent), int(extent * root) // 2
            ends.append((max(middle - half, 0), min(middle + half, extent)))
        (top, bottom), (left, right) = ends
        return top, left, bottom, right

    def mix_switch(self, epoch: int, step: int) -> float:
        """Draw a step's uniform number in [0, 1) that chooses between CutMix and MixUp."""
        return float(self.draws(epoch, step, MIX, (5,))[0, 0])

    def beta(self, epoch: int, step: int, alpha: float) -> float:
        """Draw a number from Beta(alpha, alpha) for a step.

        numpy's generator draws it, seeded by the plan: the fixed number of uniforms of a counter
        does not suffice for every alpha.
        """
        # Block 2 of the stream: mix_box reads block 0, mix_switch block 1.
        words = philox(self.seed, (epoch, step, MIX, 2))
        generator = np.random.Generator(np.random.PCG64([int(word) for word in words]))
        return float(generator.beta(alpha, alpha))

    def step_seed(self, epoch: int, step: int, microbatch: int = 0) -> int:
        """Return the 64-bit seed of the device's generator for this rank's microbatch of a step.

        `microbatch` is its number. Stochastic depth uses the generator.
        """
        # Numbered over all ranks, so a microbatch has the same seed whichever rank computes it.
        first = self.rank * self._microbatches // self.ranks
        high, low, _, _ = philox(self.seed, (epoch, step, STEP | (first + microbatch) << 16, 0))
        return int(high) << 32 | int(low)


# A loader may begin an epoch while the step that ends the one before is computed.
@lru_cache(maxsize=2)
def bucket_order(plan: EpochPlan, epoch: int) -> BucketOrder:
    """Return the order of an epoch of a plan with buckets, which its batches and shapes share."""
    ids = plan._shuffle(epoch, plan.num_samples, ORDER)
    shuffled = plan._shuffle(epoch, plan.batches - 1, BATCHES)
    # Repeats of a sample share a batch.
    samples, cut = plan.batch // plan.repeats, plan.draws(epoch, 0, CUT, (0,)).item()
    order = plan.buckets.order(ids, samples, cut, shuffled)
    for array in order:
        array.flags.writeable = False
    return order

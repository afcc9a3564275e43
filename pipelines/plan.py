"""EpochPlan: which samples, in which order, which crop, flipped or not, mixed where: all from (seed, epoch, sample id).

Every draw comes from Philox 4x32-10, a counter-based generator (Salmon et al., SC 2011): the same counter gives the same
number anywhere. So two loaders, any number of threads and a resumed run see the same samples, and no generator state needs
saving. The counter is (epoch, sample id or step, stream, block), the key the seed.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..relabel.geometry import centre_box

ORDER, CROP, MIX, STEP = range(4)  # streams; a new kind of draw takes a new number, so that old runs stay equal
TRIES = 10  # torchvision's RandomResizedCrop


def philox(key: int, counter_N4: np.ndarray) -> np.ndarray:
    """Philox 4x32 with 10 rounds: uint32 `[N, 4]` for counters `[N, 4]` (values below 2^32) and a 64-bit key."""
    c0, c1, c2, c3 = np.asarray(counter_N4, np.uint64).T
    low, high = np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32 & 0xFFFFFFFF)
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (product1 >> shift) ^ c1 ^ low, product1 & mask, (product0 >> shift) ^ c3 ^ high, product0 & mask
        low, high = (low + np.uint64(0x9E3779B9)) & mask, (high + np.uint64(0xBB67AE85)) & mask
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniforms(seed: int, epoch: int, ids_N: np.ndarray, stream: int, count: int) -> np.ndarray:
    """Uniform numbers in [0, 1), float64 `[N, count]`, of multiples of 2^-32."""
    ids_N = np.asarray(ids_N)
    blocks = -(-count // 4)
    counter = np.empty((len(ids_N), blocks, 4), np.uint64)
    counter[..., 0], counter[..., 1], counter[..., 2], counter[..., 3] = epoch, ids_N[:, None], stream, np.arange(blocks)
    return philox(seed, counter.reshape(-1, 4)).reshape(len(ids_N), -1)[:, :count] / 2.0**32


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The plan of every epoch of a run.

    `train` shuffles, crops as torchvision's RandomResizedCrop (area uniform in `crop_scale`, log of the aspect ratio
    uniform in `crop_ratio`, ten tries, then the largest centred box of an allowed ratio) and flips; `evaluate` keeps order
    and takes the centred square of `crop_pct` times the shorter side.
    """

    num_samples: int
    batch: int
    seed: int
    mode: Literal["train", "evaluate"]
    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    hflip: float = 0.5
    crop_pct: float = 1.0

    @property
    def batches(self) -> int:
        """Batches of an epoch; the last one is padded with weight 0."""
        return -(-self.num_samples // self.batch)

    def order(self, epoch: int) -> np.ndarray:
        """Sample ids of the epoch, int64 `[num_samples]`."""
        ids = np.arange(self.num_samples)
        if self.mode == "evaluate":
            return ids
        keys = uniforms(self.seed, epoch, ids, ORDER, 2)
        return np.lexsort((keys[:, 1], keys[:, 0]))

    def crops(self, epoch: int, ids_N: np.ndarray, height_N: np.ndarray, width_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Boxes (top, left, height, width) in pixels, float64 `[N, 4]`, and flips, bool `[N]`, of stored images."""
        height_N, width_N = np.asarray(height_N), np.asarray(width_N)
        if self.mode == "evaluate":
            return centre_box(height_N, width_N, self.crop_pct), np.zeros(len(ids_N), bool)
        u = uniforms(self.seed, epoch, ids_N, CROP, 2 * TRIES + 3)
        low, high = np.log(self.crop_ratio)
        area = (height_N * width_N)[:, None] * (self.crop_scale[0] + (self.crop_scale[1] - self.crop_scale[0]) * u[:, :TRIES])
        ratio = np.exp(low + (high - low) * u[:, TRIES : 2 * TRIES])
        widths, heights = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
        fits = (widths > 0) & (widths <= width_N[:, None]) & (heights > 0) & (heights <= height_N[:, None])
        pick, found = fits.argmax(1), fits.any(1)
        rows = np.arange(len(ids_N))
        # The fallback keeps an allowed ratio: a wide image loses width, a tall one height.
        wide = np.where(width_N > height_N * self.crop_ratio[1], np.rint(height_N * self.crop_ratio[1]), width_N)
        tall = np.where(width_N < height_N * self.crop_ratio[0], np.rint(width_N / self.crop_ratio[0]), height_N)
        w, h = np.where(found, widths[rows, pick], wide), np.where(found, heights[rows, pick], tall)
        top = np.where(found, np.floor(u[:, -3] * (height_N - h + 1)), (height_N - h) // 2)
        left = np.where(found, np.floor(u[:, -2] * (width_N - w + 1)), (width_N - w) // 2)
        return np.stack([top, left, h, w], axis=1), u[:, -1] < self.hflip

    def mix_box(self, epoch: int, step: int, grid: int) -> tuple[int, int, int, int]:
        """MixToken's box of a batch: (top, left, bottom, right) in tokens of a `grid` x `grid` table.

        CutMix's rule as MixToken uses it: the kept share is uniform, the centre uniform over tokens, the box clipped.
        """
        share, row, column = uniforms(self.seed, epoch, np.array([step]), MIX, 3)[0]
        half = int(grid * np.sqrt(1 - share)) // 2
        row, column = int(row * grid), int(column * grid)
        return max(row - half, 0), max(column - half, 0), min(row + half, grid), min(column + half, grid)

    def step_seed(self, epoch: int, step: int) -> int:
        """The seed of the device's generator (drop-path) in this step: 64 bits."""
        counter = np.array([[epoch, step, STEP, 0]])
        high, low = philox(self.seed, counter)[0, :2]
        return int(high) << 32 | int(low)

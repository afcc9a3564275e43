"""Which operations a crop gets, and where it is erased: chosen on the host, from the plan's draws
alone.

A `AugmentPlan` of a batch names for each operation the rows it is for, so the device works on those
alone and nothing ever waits to learn what was chosen. Every draw depends on (seed, epoch, sample
id, repeat), so neither the batch nor the rank matters. Distributions are timm's (auto_augment.py,
random_erasing.py) and, for color jitter, torchvision's.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from densefeed.pipelines.augment.operations import OPERATIONS
from densefeed.pipelines.augment.settings import (
    CODES,
    GEOMETRIC,
    LEAST_AREA,
    LEAST_ASPECT,
    TABLES,
    Augment,
    RandAugmentSpec,
    argument_of,
    code_of,
    step_of,
    tables_of,
)
from densefeed.pipelines.plan import AUGMENT, ERASE, JITTER, SHIFT, EpochPlan

# N samples   L operations a sample at most   R operations of a batch   M warped samples

NAMES = ("Table",) * len(TABLES) + tuple(OPERATIONS)  # of a code's group
ATTEMPTS = 10  # at a box that is smaller than the image
# A layer of RandAugment reads eight numbers: operation, whether, two for the magnitude, sign,
# interpolation, two spare.
LAYER_NUMBERS = 8
LEAST_NOISE = 2**20
# An erased box reads 24: ten areas, ten ratios, top, left, where its noise begins, one spare.
BOX_NUMBERS = 2 * ATTEMPTS + 4


class Group(NamedTuple):
    """One operation for some samples: `start` to `stop` of the Choice's rows, arguments and
    tables.
    """

    name: str
    start: int
    stop: int


class EraseBox(NamedTuple):
    """A box of a sample to erase, in pixels, and where in the table of noise its numbers begin."""

    sample: int
    top: int
    left: int
    height: int
    width: int
    noise: int


class AugmentPlan(NamedTuple):
    """What happens to each sample of a batch. First `before`, then the warp, then `after`; boxes
    last, once normalized.

    What the device must know lies in three tensors, so that a copy of a batch's choice is three
    copies.
    """

    before: tuple[Group, ...]
    after: tuple[Group, ...]
    boxes: tuple[EraseBox, ...]
    row: Tensor  # int64 [R + M], the samples of the groups, then those that are warped
    # float32 [R + 13 M]: arguments; then matrices in pixels, the same normalized, and 1 for bicubic
    number: Tensor
    table: Tensor  # uint8 [R, 256], of the groups named Table

    def to(self, device: torch.device) -> "AugmentPlan":
        """On `device`; a GPU is not waited for."""
        if device.type != "cuda":
            return self._replace(
                row=self.row.to(device), number=self.number.to(device), table=self.table.to(device)
            )
        row, number, table = (
            part.pin_memory().to(device, non_blocking=True)
            for part in (self.row, self.number, self.table)
        )
        return self._replace(row=row, number=number, table=table)

    @property
    def warped(self) -> int:
        """M."""
        return len(self.row) - len(self.table)

    @property
    def warp_row(self) -> Tensor:
        """Samples that are warped: int64 `[M]`."""
        return self.row[len(self.table) :]

    @property
    def pixel_matrix(self) -> Tensor:
        """Output to source in pixels of the crop: float32 `[M, 2, 3]`."""
        return self._part(0, 6).view(-1, 2, 3)

    @property
    def matrix(self) -> Tensor:
        """The same, normalized: what the View is composed with."""
        return self._part(6, 12).view(-1, 2, 3)

    @property
    def cubic(self) -> Tensor:
        """1 for bicubic, 0 for bilinear: float32 `[M]`."""
        return self._part(12, 13)

    def _part(self, first: int, end: int) -> Tensor:
        start, M = len(self.table), self.warped
        return self.number[start + first * M : start + end * M]


class Chooser:
    """Chooses for the samples of a batch what `augment` says, with the plan's draws. UserError for
    a string it cannot use.
    """

    def __init__(self, plan: EpochPlan, augment: Augment) -> None:
        self.plan, self.augment, self.noise = plan, augment, noise_length(plan)
        self.layers = RandAugmentSpec.of(augment.rand_augment) if augment.rand_augment else None
        # As timm: RandAugment switches color jitter off, but for the sets of three augmentations,
        # which come with it.
        self.jitters = any(augment.jitter) and (self.layers is None or "3a" in augment.rand_augment)

    def choose(
        self, epoch: int, index_N: np.ndarray, repeat_N: np.ndarray, height: int, width: int
    ) -> AugmentPlan:
        """For crops of `height` x `width` of the samples `index_N`, whose repeats in this epoch are
        `repeat_N`.
        """
        index_N, repeat_N = np.asarray(index_N), np.asarray(repeat_N)
        N = len(index_N)
        code_NL, argument_NL = np.full((N, 0), -1), np.zeros((N, 0))
        last_N, matrix_N33, cubic_N = (
            np.full(N, -1),
            np.tile(np.eye(3), (N, 1, 1)),
            np.zeros(N, bool),
        )
        if self.layers is not None:
            code_NL, argument_NL, last_N, matrix_N33, cubic_N = self._rand_augment(
                epoch, index_N, repeat_N, height, width
            )
        if self.augment.shift:  # as a geometric layer before all others
            code_NL, argument_NL = (
                np.pad(part, ((0, 0), (1, 0)), constant_values=-1)
                for part in (code_NL, argument_NL)
            )
            last_N, matrix_N33 = last_N + 1, self._shift(epoch, index_N, repeat_N) @ matrix_N33
        if self.jitters:
            jitter_code_NL, jitter_argument_NL = self._jitter(epoch, index_N, repeat_N)
            code_NL = np.concatenate([code_NL, jitter_code_NL], 1)
            argument_NL = np.concatenate([argument_NL, jitter_argument_NL], 1)
        before, after, row_R, argument_R, table_R256 = groups(code_NL, argument_NL, last_N)
        row_M = np.flatnonzero(last_N >= 0)
        matrix_M33 = matrix_N33[row_M]
        scale = np.diag([width, height, 1.0])
        normalized_M33 = np.linalg.inv(scale) @ matrix_M33 @ scale
        number = (
            argument_R,
            matrix_M33[:, :2].ravel(),
            normalized_M33[:, :2].ravel(),
            cubic_N[row_M],
        )
        boxes = (
            self._boxes(epoch, index_N, repeat_N, height, width)
            if self.augment.erase_probability
            else ()
        )
        return AugmentPlan(
            before,
            after,
            boxes,
            torch.from_numpy(np.concatenate([row_R, row_M])),
            torch.from_numpy(np.concatenate(number).astype(np.float32)),
            torch.from_numpy(table_R256),
        )

    def _rand_augment(
        self, epoch: int, index_N: np.ndarray, repeat_N: np.ndarray, height: int, width: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Codes (-1: nothing photometric) and arguments, `[N, L]`; and of the samples, `[N, ...]`:
        the layer of the last geometric operation (-1: none), the composed map of all, and whether
        it is read bicubically.
        """
        layers = self.layers
        N, L = len(index_N), layers.layers
        code_NL, argument_NL = np.full((N, L), -1), np.zeros((N, L))
        last_N, matrix_N33, cubic_N = (
            np.full(N, -1),
            np.tile(np.eye(3), (N, 1, 1)),
            np.zeros(N, bool),
        )
        if not L:
            return code_NL, argument_NL, last_N, matrix_N33, cubic_N
        numbers = [LAYER_NUMBERS * layer + number for layer in range(L) for number in range(6)]
        drawn = self.plan.draws(epoch, index_N, AUGMENT, numbers, repeat_N).reshape(L, 6, N)
        which_LN = self._chosen(epoch, index_N, repeat_N, drawn[:, 0])
        applied_LN = (drawn[:, 1] < layers.probability) | (layers.probability >= 1)
        level_LN = np.full((L, N), float(layers.magnitude))
        if layers.std == math.inf:
            level_LN = layers.magnitude * drawn[:, 2]
        elif layers.std > 0:  # Box and Muller; 1 - u is never 0
            normal_LN = np.sqrt(-2 * np.log(1 - drawn[:, 2])) * np.cos(2 * np.pi * drawn[:, 3])
            level_LN = layers.magnitude + layers.std * normal_LN
        level_LN = np.clip(level_LN, 0, layers.most)
        negative_LN = drawn[:, 4] > 0.5
        bicubic_LN = (
            drawn[:, 5] >= 0.5
            if self.augment.interpolation == "random"
            else self.augment.interpolation == "bicubic"
        )
        bicubic_LN = np.broadcast_to(bicubic_LN, (L, N))
        step_LN33 = np.tile(np.eye(3), (L, N, 1, 1))
        is_geometric_LN = np.zeros((L, N), bool)
        for number in np.unique(which_LN[applied_LN]).tolist():
            name = layers.names[number]
            mine = np.nonzero(applied_LN & (which_LN == number))
            argument = argument_of(name, level_LN[mine], negative_LN[mine])
            if name in GEOMETRIC:
                is_geometric_LN[mine], step_LN33[mine] = (
                    True,
                    step_of(name, argument, height, width),
                )
            else:
                code_NL.T[mine], argument_NL.T[mine] = code_of(name), argument
        for layer in range(L):
            # a point of the output goes through the last operation's map first
            matrix_N33 = matrix_N33 @ step_LN33[layer]
            last_N[is_geometric_LN[layer]] = layer
        cubic_N = bicubic_LN[last_N, np.arange(N)]
        return code_NL, argument_NL, last_N, matrix_N33, cubic_N

    def _shift(self, epoch: int, index_N: np.ndarray, repeat_N: np.ndarray) -> np.ndarray:
        """Translations by whole pixels, uniform from -shift to shift along each axis: float64 `[N,
        3, 3]`.
        """
        drawn = self.plan.draws(epoch, index_N, SHIFT, (0, 1), repeat_N)
        step_N33 = np.tile(np.eye(3), (len(index_N), 1, 1))
        step_N33[:, :2, 2] = np.floor((2 * self.augment.shift + 1) * drawn.T) - self.augment.shift
        return step_N33

    def _chosen(
        self, epoch: int, index_N: np.ndarray, repeat_N: np.ndarray, drawn_LN: np.ndarray
    ) -> np.ndarray:
        """Numbers of the operations, int64 `[L, N]`."""
        layers = self.layers
        if layers.weights is None:
            return (drawn_LN * len(layers.names)).astype(np.int64)
        # One after the other without replacement, in proportion to the weights: the order of
        # exponential waiting times (Efraimidis and Spirakis, "Weighted random sampling with a
        # reservoir", 2006).
        numbers = range(
            LAYER_NUMBERS * layers.layers, LAYER_NUMBERS * layers.layers + len(layers.names)
        )
        wait = (
            -np.log(1 - self.plan.draws(epoch, index_N, AUGMENT, numbers, repeat_N))
            / layers.weights[:, None]
        )
        return np.argsort(wait, axis=0, kind="stable")[: layers.layers]

    def _jitter(
        self, epoch: int, index_N: np.ndarray, repeat_N: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Color jitter's operations in each sample's own order: codes and arguments, `[N, 4]`."""
        drawn = self.plan.draws(epoch, index_N, JITTER, range(8), repeat_N)
        strength = np.array(self.augment.jitter)[:, None]
        center = np.array([1.0, 1.0, 1.0, 0.0])[:, None]
        low = np.where(center > 0, np.maximum(center - strength, 0), -strength)
        argument_4N = low + (center + strength - low) * drawn[4:]
        code_4 = np.array([CODES[name] for name in ("Brightness", "Contrast", "Color", "Hue")])
        code_4N = np.where(strength > 0, code_4[:, None], -1).repeat(len(index_N), 1)
        order = np.argsort(drawn[:4], axis=0, kind="stable")
        return np.take_along_axis(code_4N, order, 0).T, np.take_along_axis(argument_4N, order, 0).T

    def _boxes(
        self, epoch: int, index_N: np.ndarray, repeat_N: np.ndarray, height: int, width: int
    ) -> tuple[EraseBox, ...]:
        """timm's boxes: how many, then each the first of ten whose sides are both less than the
        image's, if any is.
        """
        augment = self.augment
        whether, count = self.plan.draws(epoch, index_N, ERASE, (0, 1), repeat_N)
        picked = np.flatnonzero(whether < augment.erase_probability)
        if not len(picked):
            return ()
        count = 1 + (count[picked] * augment.erase_count).astype(np.int64)
        low, high = math.log(LEAST_ASPECT), -math.log(LEAST_ASPECT)
        boxes = []
        for number in range(count.max()):
            samples, of = picked[count > number], count[count > number]
            first = 4 + number * BOX_NUMBERS
            u = self.plan.draws(
                epoch, index_N[samples], ERASE, range(first, first + BOX_NUMBERS), repeat_N[samples]
            )
            share = LEAST_AREA + (augment.erase_max_area - LEAST_AREA) * u[:ATTEMPTS]
            area, aspect = (
                share * (height * width) / of,
                np.exp(low + (high - low) * u[ATTEMPTS : 2 * ATTEMPTS]),
            )
            heights, widths = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
            fits = (heights < height) & (widths < width)
            pick = fits.argmax(0), np.arange(len(samples))
            box_height, box_width = heights[pick], widths[pick]
            top, left = (
                ((height - box_height + 1) * u[-4]).astype(int),
                ((width - box_width + 1) * u[-3]).astype(int),
            )
            noise = (u[-2] * (self.noise - 3 * height * width)).astype(int)
            columns = (samples, top, left, box_height.astype(int), box_width.astype(int), noise)
            boxes += [EraseBox(*row) for row in np.stack(columns, 1)[fits[pick]].tolist()]
        return tuple(boxes)


def groups(
    code_NL: np.ndarray, argument_NL: np.ndarray, last_N: np.ndarray
) -> tuple[tuple[Group, ...], tuple[Group, ...], np.ndarray, np.ndarray, np.ndarray]:
    """Groups before the warp and after it; of all of them the samples, arguments and tables, `[R,
    ...]`.

    Each sample keeps the order of its operations. One warp serves the batch: what a warped sample
    does before its own stands before it, what it does later after it; samples that are not warped
    fill the rounds from the first. With two layers that is at most one round before and one after.
    """
    used_NL = code_NL >= 0
    earlier_N = (used_NL & (np.arange(code_NL.shape[1]) < last_N[:, None])).sum(1)
    rounds_before = earlier_N.max(initial=0)
    delay_N = np.where(last_N >= 0, rounds_before - earlier_N, 0)
    is_later_NL = np.arange(code_NL.shape[1]) > last_N[:, None]
    round_NL = used_NL.cumsum(1) - 1 + np.where(is_later_NL, delay_N[:, None], 0)
    row_R, layer_R = np.nonzero(used_NL)
    code_R = code_NL[row_R, layer_R]
    # All operations that are tables are one group of a round.
    key_R = round_NL[row_R, layer_R] * len(CODES) + np.maximum(code_R, len(TABLES) - 1)
    order = np.argsort(key_R, kind="stable")
    key_R, code_R, row_R, argument_R = (
        key_R[order],
        code_R[order],
        row_R[order],
        argument_NL[row_R, layer_R][order],
    )
    keys, starts = np.unique(key_R, return_index=True)
    before, after = [], []
    for key, (start, stop) in zip(
        keys.tolist(), pairwise([*starts.tolist(), len(key_R)]), strict=True
    ):
        (before if key // len(CODES) < rounds_before else after).append(
            Group(NAMES[key % len(CODES)], start, stop)
        )
    return tuple(before), tuple(after), row_R, argument_R, tables_of(code_R, argument_R)


def noise_length(plan: EpochPlan) -> int:
    """Of the table of normals: twice what the largest crop holds, so that a box can begin anywhere
    in the first half.
    """
    return max(LEAST_NOISE, 2 * 3 * max(pixels for _, pixels in plan.sizes) ** 2)

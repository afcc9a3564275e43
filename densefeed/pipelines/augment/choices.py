"""Choose operations and erased boxes for each crop, on the host, from the plan's draws alone.

The `AugmentPlan` of a batch lists the rows of each operation, so the device works on those alone
and nothing waits for it. Every draw depends on (seed, epoch, sample id, repeat) and so neither on
the batch nor on the rank. Distributions are timm's (auto_augment.py, random_erasing.py) and, for
color jitter, torchvision's.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from densefeed.pipelines.augment.operations import OPERATIONS
from densefeed.pipelines.augment.settings import (
    CODES,
    GEOMETRIC,
    LEAST_AREA,
    LEAST_ASPECT,
    MOST_AREA,
    OWN,
    TABLES,
    Augment,
    RandAugmentSpec,
    find_code,
    level_to_argument,
    make_matrix,
    make_tables,
)
from densefeed.pipelines.plan import AUGMENT, ERASE, JITTER, OPERATION, SHIFT, ZOOM, EpochPlan
from densefeed.system.devices import send

# N samples   L operations per sample at most   R operations of a batch   M warped samples

# Attempts at a box that is smaller than the image, as in timm's RandomErasing.
ATTEMPTS = 10
# A layer of RandAugment reads eight numbers: operation, whether to apply it, two for the magnitude,
# sign, interpolation, two spare.
LAYER_NUMBERS = 8
# Numbers of the noise table, at least: 4 MiB of float32.
LEAST_NOISE = 2**20
# An erased box reads 24 numbers: ten areas, ten ratios, top, left, offset of its noise, one spare.
BOX_NUMBERS = 2 * ATTEMPTS + 4


# Uniform numbers `[len(numbers), N]` of a stream for the samples of a batch, or those at `rows`.
Draw = Callable[..., np.ndarray]


class Group(NamedTuple):
    """One operation for some samples: rows, arguments, tables `start:stop` of the AugmentPlan.

    A sample has at most one operation in each round.
    """

    name: str
    start: int
    stop: int
    round: int


class EraseBox(NamedTuple):
    """A box of a sample to erase, in pixels, and the offset of its numbers in the noise table."""

    sample: int
    top: int
    left: int
    height: int
    width: int
    noise: int


class Step(NamedTuple):
    """An operation of RandAugment on one image."""

    name: str  # timm's
    argument: float  # 0 for operations without one
    cubic: bool  # whether a geometric one samples bicubically


class AugmentPlan(NamedTuple):
    """The operations for each sample of a batch, in order: `before`, the warp, `after`, the boxes.

    The boxes are erased after normalization.
    """

    before: tuple[Group, ...]
    after: tuple[Group, ...]
    boxes: tuple[EraseBox, ...]
    row: Tensor  # int64 [R], the samples of the groups
    argument: Tensor  # float32 [R]
    table: Tensor  # uint8 [R, 256], of the groups named Table
    warp_row: Tensor  # int64 [M], the warped samples
    pixel_matrix: Tensor  # float32 [M, 2, 3], output to source in pixels of the crop
    # float32 [M, 2, 3], the same map in normalized coordinates, to compose the View with; it has
    # black shifts too, which are among the groups
    matrix: Tensor
    cubic: Tensor  # float32 [M], 1 for bicubic, 0 for bilinear

    def to(self, device: torch.device) -> "AugmentPlan":
        """Copy the tensors to `device`, without waiting for a GPU."""
        return AugmentPlan(*self[:3], *(send(part, device) for part in self[3:]))


class Chooser:
    """Chooses operations and boxes for the samples of a batch, with the plan's draws.

    UserError for a RandAugment string that is not supported, and an operation that is not
    registered.
    """

    def __init__(self, plan: EpochPlan, augment: Augment) -> None:
        augment.check_operations()
        self.plan, self.augment, self.noise = plan, augment, noise_length(plan)
        text = augment.rand_augment
        self.spec = RandAugmentSpec.parse(text) if text else None

    def choose(
        self, epoch: int, index_N: np.ndarray, repeat_N: np.ndarray, height: int, width: int
    ) -> AugmentPlan:
        """Choose operations and boxes for `height` x `width` crops of the samples `index_N`.

        The samples are repeats `repeat_N` in this epoch.
        """
        index_N, repeat_N = np.asarray(index_N), np.asarray(repeat_N)
        draw = self._make_draw(epoch, index_N, repeat_N)
        *layer, last_N, matrix_N33, cubic_N = self._rand_augment(draw, len(index_N), height, width)
        # Codes and arguments of layers, in order.
        layers = [layer]
        shown_N33 = matrix_N33
        # RandomCrop with padding precedes RandAugment: geometric layers before all others.
        if self.augment.shift:
            shift_N33 = self._draw_shifts(draw)
            shown_N33 = shift_N33 @ matrix_N33
            if self.augment.shift_border == "mean":
                # Composed into the warp, which fills with the same color: an empty layer.
                empty = np.full((len(index_N), 1), -1), np.zeros((len(index_N), 1))
                matrix_N33, layers, last_N = shown_N33, [empty, *layers], last_N + 1
            else:
                # By operations of its own, for its color is not the warp's.
                codes = np.tile([CODES["ShiftX"], CODES["ShiftY"]], (len(index_N), 1))
                layers, last_N = [(codes, shift_N33[:, :2, 2]), *layers], last_N + 2
        if self.augment.zoom_out < 1:
            # Last of the geometric operations, in an empty layer before the photometric ones.
            zoom_N33, zoomed_N = self._draw_zooms(draw, height, width)
            matrix_N33, shown_N33 = matrix_N33 @ zoom_N33, shown_N33 @ zoom_N33
            empty = np.full((len(index_N), 1), -1), np.zeros((len(index_N), 1))
            layers.append(empty)
            last_N = np.where(zoomed_N, sum(code.shape[1] for code, _ in layers) - 1, last_N)
        if any(self.augment.jitter):
            layers.append(self._jitter(draw))
        for number, name in enumerate(self.augment.operations):
            layers.append(self._draw_own(draw, number, name))
        code_NL, argument_NL = (np.concatenate(parts, 1) for parts in zip(*layers, strict=True))
        before, after, row_R, argument_R, table_R256 = group_operations(
            code_NL, argument_NL, last_N
        )
        row_M = np.flatnonzero(last_N >= 0)
        scale = np.diag([width, height, 1.0])
        normalized_M33 = np.linalg.inv(scale) @ shown_N33[row_M] @ scale
        numbers = argument_R, matrix_N33[row_M, :2], normalized_M33[:, :2], cubic_N[row_M]
        argument, *warp = (torch.from_numpy(part.astype(np.float32)) for part in numbers)
        row_R, table_R256, row_M = map(torch.from_numpy, (row_R, table_R256, row_M))
        boxes = self._choose_boxes(draw, height, width)
        return AugmentPlan(before, after, boxes, row_R, argument, table_R256, row_M, *warp)

    def _make_draw(self, epoch: int, index_N: np.ndarray, repeat_N: np.ndarray) -> Draw:
        def draw(stream: int, numbers: Sequence[int], rows: Any = slice(None)) -> np.ndarray:
            return self.plan.draws(epoch, index_N[rows], stream, numbers, repeat_N[rows])

        return draw

    def _rand_augment(self, draw: Draw, N: int, height: int, width: int) -> tuple[np.ndarray, ...]:
        """Choose RandAugment's layers; none without RandAugment.

        Returns the photometric operations' codes (-1: none) and arguments, `[N, L]`, and for each
        sample the layer of the last geometric operation (-1: none), the composed map of all
        geometric operations, `[N, 3, 3]`, and whether it is sampled bicubically.
        """
        spec = self.spec
        L = spec.layers if spec else 0
        code_NL, argument_NL = np.full((N, L), -1), np.zeros((N, L))
        last_N, matrix_N33 = np.full(N, -1), np.tile(np.eye(3), (N, 1, 1))
        if not L:
            return code_NL, argument_NL, last_N, matrix_N33, np.zeros(N, bool)
        cubic_LN, operations = self._draw_layers(draw, N)
        matrix_LN33 = np.tile(np.eye(3), (L, N, 1, 1))
        for name, mine, argument in operations:
            if name in GEOMETRIC:
                matrix_LN33[mine] = make_matrix(name, argument, height, width)
                # A sample may have this operation in two layers, and another one in a later layer.
                np.maximum.at(last_N, mine[1], mine[0])
            else:
                code_NL.T[mine], argument_NL.T[mine] = find_code(name), argument
        # A point of the output goes through the map of the last operation first.
        for matrix in matrix_LN33:
            matrix_N33 = matrix_N33 @ matrix
        # One resampling has one filter, the last layer's. Where last_N is -1, nothing reads it.
        cubic_N = cubic_LN[last_N, np.arange(N)]
        return code_NL, argument_NL, last_N, matrix_N33, cubic_N

    def choose_steps(
        self, epoch: int, index_N: np.ndarray, repeat_N: np.ndarray
    ) -> tuple[np.ndarray, list[list[Step]]]:
        """Choose what happens to whole images before the crop: flips, then RandAugment.

        Returns flips, bool `[N]`, and the operations of each image, in order. The samples are
        repeats `repeat_N` in this epoch. RandAugment's string must not be empty.
        """
        flips = self.plan.flips(self.plan.crop_draws(epoch, index_N, repeat_N))
        steps = [[] for _ in index_N]
        if not self.spec.layers:
            return flips, steps
        draw = self._make_draw(epoch, index_N, repeat_N)
        cubic_LN, operations = self._draw_layers(draw, len(index_N))
        found = []
        for name, (layer, sample), argument in operations:
            cubic = cubic_LN[layer, sample]
            columns = (part.tolist() for part in (sample, layer, argument, cubic))
            found += [(n, at, Step(name, *rest)) for n, at, *rest in zip(*columns, strict=True)]
        for n, _, step in sorted(found, key=itemgetter(0, 1)):
            steps[n].append(step)
        return flips, steps

    def _draw_layers(self, draw: Draw, N: int) -> tuple[np.ndarray, list[tuple[str, tuple, Any]]]:
        """Draw the layers of RandAugment, which must not be off.

        Returns the filter of geometric operations, bool `[L, N]`, true for bicubic, and for each
        operation that is applied its name, the layers and samples, and the arguments.
        """
        spec, L = self.spec, self.spec.layers
        numbers = [LAYER_NUMBERS * layer + number for layer in range(L) for number in range(6)]
        drawn = draw(AUGMENT, numbers).reshape(L, 6, N)
        which_LN = self._choose_operations(draw, drawn[:, 0])
        applied_LN = (drawn[:, 1] < spec.probability) | (spec.probability >= 1)
        level_LN = self._levels(drawn[:, 2], drawn[:, 3])
        # The comparison of timm's _randomly_negate.
        negative_LN, found = drawn[:, 4] > 0.5, []
        for number in np.unique(which_LN[applied_LN]).tolist():
            name, mine = spec.names[number], np.nonzero(applied_LN & (which_LN == number))
            found.append((name, mine, level_to_argument(name, level_LN[mine], negative_LN[mine])))
        return drawn[:, 5] >= 0.5, found

    def _levels(self, first_LN: np.ndarray, second_LN: np.ndarray) -> np.ndarray:
        """Compute the magnitudes from two uniform draws: float64 `[L, N]`."""
        spec = self.spec
        if spec.std == math.inf:
            level_LN = spec.magnitude * first_LN
        else:
            # Box and Muller; 1 - u is never 0, whose logarithm is infinite.
            normal_LN = np.sqrt(-2 * np.log(1 - first_LN)) * np.cos(2 * np.pi * second_LN)
            level_LN = spec.magnitude + spec.std * normal_LN
        return np.clip(level_LN, 0, spec.most)

    def _draw_shifts(self, draw: Draw) -> np.ndarray:
        """Draw whole-pixel shifts, uniform from -shift to shift per axis: float64 `[N, 3, 3]`."""
        drawn = draw(SHIFT, (0, 1))
        matrix_N33 = np.tile(np.eye(3), (drawn.shape[1], 1, 1))
        matrix_N33[:, :2, 2] = np.floor((2 * self.augment.shift + 1) * drawn.T) - self.augment.shift
        return matrix_N33

    def _draw_zooms(self, draw: Draw, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw zooms out, uniform from `zoom_out` to 1, for a third of the samples.

        A third as of scales that are uniform from 0.5 to 2. The crop lies anywhere in its input.
        Returns float64 `[N, 3, 3]`, and which samples have one, bool `[N]`.
        """
        drawn, least = draw(ZOOM, range(4)), self.augment.zoom_out
        zoomed_N = drawn[0] < 1 / 3
        scale_N = np.where(zoomed_N, least + (1 - least) * drawn[1], 1)
        matrix_N33 = np.tile(np.eye(3), (len(scale_N), 1, 1))
        matrix_N33[:, 0, 0] = matrix_N33[:, 1, 1] = 1 / scale_N
        free_N2 = (1 - 1 / scale_N)[:, None] * (width, height)
        matrix_N33[:, :2, 2] = free_N2 * drawn[2:].T
        return matrix_N33, zoomed_N

    def _choose_operations(self, draw: Draw, drawn_LN: np.ndarray) -> np.ndarray:
        """Choose the operations of each layer, as indices of `names`: int64 `[L, N]`."""
        spec = self.spec
        if spec.weights is None:
            return (drawn_LN * len(spec.names)).astype(np.int64)
        # One after the other without replacement, in proportion to the weights: the order of
        # exponential waiting times (Efraimidis and Spirakis, "Weighted random sampling with a
        # reservoir", 2006).
        first = LAYER_NUMBERS * spec.layers
        drawn = draw(AUGMENT, range(first, first + len(spec.names)))
        wait = -np.log(1 - drawn) / spec.weights[:, None]
        return np.argsort(wait, axis=0, kind="stable")[: spec.layers]

    def _draw_own(self, draw: Draw, number: int, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Choose the registered operation `name`: codes and arguments, `[N, 1]`."""
        applied_N, argument_N = draw(OPERATION, (2 * number, 2 * number + 1))
        own = OWN[name]
        code_N = np.where(applied_N < own.probability, CODES[name], -1)
        return code_N[:, None], own.draw(argument_N)[:, None]

    def _jitter(self, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        """Choose color jitter operations in each sample's own order: codes, arguments `[N, 4]`."""
        drawn = draw(JITTER, range(8))
        strength = np.array(self.augment.jitter)[:, None]
        # torchvision's ranges: factors from max(0, 1 - s) to 1 + s, hue from -s to s.
        center = np.array([1.0, 1.0, 1.0, 0.0])[:, None]
        low = np.where(center > 0, np.maximum(center - strength, 0), -strength)
        argument_4N = low + (center + strength - low) * drawn[4:]
        code_4 = np.array([CODES[name] for name in ("Brightness", "Contrast", "Color", "Hue")])
        code_4N = np.where(strength > 0, code_4[:, None], -1).repeat(drawn.shape[1], 1)
        order = np.argsort(drawn[:4], axis=0, kind="stable")
        return np.take_along_axis(code_4N, order, 0).T, np.take_along_axis(argument_4N, order, 0).T

    def _choose_boxes(self, draw: Draw, height: int, width: int) -> tuple[EraseBox, ...]:
        """Choose the boxes to erase by timm's rule.

        The rule takes the first of ten whose sides are both shorter than the image's, if there is
        one.
        """
        probability = self.augment.erase_probability
        if not probability:
            return ()
        samples = np.flatnonzero(draw(ERASE, (0,))[0] < probability)
        # Number 0 is above; the boxes begin with the next Philox block of four.
        u = draw(ERASE, range(4, 4 + BOX_NUMBERS), samples)
        area = (LEAST_AREA + (MOST_AREA - LEAST_AREA) * u[:ATTEMPTS]) * (height * width)
        low, high = math.log(LEAST_ASPECT), -math.log(LEAST_ASPECT)
        aspect = np.exp(low + (high - low) * u[ATTEMPTS : 2 * ATTEMPTS])
        heights, widths = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
        fits = (heights < height) & (widths < width)
        pick = fits.argmax(0), np.arange(len(samples))
        box_height, box_width = heights[pick], widths[pick]
        top, left = (height - box_height + 1) * u[-4], (width - box_width + 1) * u[-3]
        # The last offset leaves as many numbers as the largest box needs.
        noise = u[-2] * (self.noise - 3 * height * width)
        columns = np.stack((samples, top, left, box_height, box_width, noise), 1).astype(int)
        return tuple(EraseBox(*row) for row in columns[fits[pick]].tolist())


def group_operations(
    code_NL: np.ndarray, argument_NL: np.ndarray, last_N: np.ndarray
) -> tuple[tuple[Group, ...], tuple[Group, ...], np.ndarray, np.ndarray, np.ndarray]:
    """Group the photometric operations of a batch by operation.

    Return the groups before the warp and after it, and the samples, arguments and tables of all of
    them, `[R, ...]`. Each sample keeps the order of its operations. One warp serves the batch:
    operations of a warped sample that precede its warp are in groups before it, later ones in
    groups after it; those of samples that are not warped fill the rounds from the first. With two
    layers that is at most one round before and one after.
    """
    used_NL = code_NL >= 0
    is_later_NL = np.arange(code_NL.shape[1]) > last_N[:, None]
    earlier_N = (used_NL & ~is_later_NL).sum(1)
    rounds_before = earlier_N.max(initial=0)
    delay_N = np.where(last_N >= 0, rounds_before - earlier_N, 0)
    round_NL = used_NL.cumsum(1) - 1 + is_later_NL * delay_N[:, None]
    row_R, layer_R = np.nonzero(used_NL)
    code_R = code_NL[row_R, layer_R]
    # All table operations of a round are one group.
    key_R = round_NL[row_R, layer_R] * len(CODES) + np.maximum(code_R, len(TABLES) - 1)
    order = np.argsort(key_R, kind="stable")
    row_R, layer_R, code_R = row_R[order], layer_R[order], code_R[order]
    argument_R = argument_NL[row_R, layer_R]
    keys, starts = np.unique(key_R[order], return_index=True)
    before, after = [], []
    # In the order of CODES, so that a code is an index.
    names = ("Table",) * len(TABLES) + tuple(OPERATIONS)
    edges = pairwise([*starts.tolist(), len(key_R)])
    for key, (start, stop) in zip(keys.tolist(), edges, strict=True):
        number, code = divmod(key, len(CODES))
        half = before if number < rounds_before else after
        half.append(Group(names[code], start, stop, number))
    return tuple(before), tuple(after), row_R, argument_R, make_tables(code_R, argument_R)


def noise_length(plan: EpochPlan) -> int:
    """Return the length of the noise table.

    It is twice the numbers of the largest crop, so a box can begin anywhere in the first half.
    """
    return max(LEAST_NOISE, 2 * 3 * max(height * width for height, width in plan.shapes()))

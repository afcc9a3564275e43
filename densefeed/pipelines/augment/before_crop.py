"""RandAugment on whole images before the crop, the order of Token Labeling's published code.

There an image is flipped, augmented as a whole, then cropped and resized. So a geometric operation
moves pixels into the crop that the other order has lost, and AutoContrast, Equalize and Contrast
take their statistics from the whole image. The images are decoded and augmented by Pillow, one
operation after the other, on threads of the loader, which crops the result like any stored image.
One composed map per crop would be cheaper, but not the same: each operation of the published code
resamples and rounds again, and colors change before the resize, which does not commute with them.

Labels follow in one of two ways. The View of a crop is that of the stored image: crop, operations
and flip are one map. Or, for the published geometry, the score map is flipped and warped cell by
cell as the published code warps it, and the View is that of the augmented image.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from PIL import Image
from timm.data.auto_augment import NAME_TO_OP
from torch import Tensor

from densefeed import native
from densefeed.pipelines.augment.choices import Chooser, Step
from densefeed.pipelines.augment.settings import (
    CODES,
    GEOMETRIC,
    TABLES,
    find_code,
    make_matrix,
    make_tables,
)
from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.loader import Encoded, Source
from densefeed.pipelines.plan import RankRows
from densefeed.storage.geometry import visible_boxes

# N samples   H, W pixels   S side of a map in cells   k classes of a cell

# The largest number of float16, a logsumexp beside which a logit of 0 has no probability.
MOST_LOGIT = torch.finfo(torch.float16).max
# Operations without an argument.
PLAIN = ("AutoContrast", "Equalize")


class WholeImages:
    """Flips and augments the images of a batch as a whole, for `ThreadedLoader.batches`.

    Args:
        chooser: chooses the flips and operations of RandAugment, by the plan's draws.
        fill: color where an operation reaches beyond the image, 0 to 255.
        warps_maps: warp score maps as the published code does, for `--geometry published`. Views
            are then those of the augmented image, which the warped maps belong to.
    """

    def __init__(self, chooser: Chooser, fill: tuple[int, int, int], warps_maps: bool) -> None:
        self._chooser, self._fill, self.warps_maps = chooser, fill, warps_maps

    def begin(
        self, source: Source, threads: ThreadPoolExecutor, epoch: int, rows: RankRows
    ) -> Encoded:
        """Start to decode and augment the images of a batch, without waiting.

        The images of the result are raw pixels, and no crop of them is to be flipped.
        """
        N = len(rows.index)
        flips, steps = self._chooser.choose_steps(epoch, rows.index, rows.repeat)
        # Augmented images to stored ones, normalized.
        matrix_N33 = np.tile(np.eye(3), (N, 1, 1))

        def prepare(row: int) -> tuple[np.ndarray, int, tuple[int, int]]:
            """Decode and augment one image; return its pixels, kind and extent."""
            image = source.image(int(rows.index[row]))
            matrix_N33[row] = compose_steps(flips[row], steps[row], image.height, image.width)
            if flips[row]:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            for step in steps[row]:
                image = apply_step(image, step, self._fill)
            pixels = np.asarray(image)
            return pixels, native.RAW, pixels.shape[:2]

        def follow(batch: Batch) -> Batch:
            """Let the labels of a batch of crops follow, see `Encoded.follow`."""
            if not self.warps_maps:
                aligned = not self._chooser.augment.shears
                return move_views(batch, matrix_N33)._replace(axis_aligned=aligned)
            if batch.map_logit is None:
                return batch
            return warp_maps(batch, flips, steps, source.score_maps)

        encoded = Encoded.in_memory(N)
        encoded.tasks = [
            threads.submit(encoded.fill, row, partial(prepare, row)) for row in range(N)
        ]
        encoded.follow = follow
        return encoded


def apply_step(image: Image.Image, step: Step, fill: tuple[int, int, int]) -> Image.Image:
    """Apply one operation to an RGB image by timm's function or, if it is one, by its table."""
    if step.name in GEOMETRIC:
        resample = Image.Resampling.BICUBIC if step.cubic else Image.Resampling.BILINEAR
        return NAME_TO_OP[step.name](image, step.argument, resample=resample, fillcolor=fill)
    code = find_code(step.name)
    # Pillow refuses some arguments of tables that older versions took.
    if code < len(TABLES):
        (table,) = make_tables(np.array([code]), np.array([step.argument]))
        return image.point(table.tolist() * 3)
    # The name without its variant, whose argument is computed already.
    name = list(CODES)[code]
    return NAME_TO_OP[name](image, *(() if name in PLAIN else (step.argument,)))


# ---------------------------------------------------------------- labels


def compose_steps(flip: bool, steps: list[Step], height: int, width: int) -> np.ndarray:
    """Compose flip and geometric operations of an image of this size, pixels: float64 `[3, 3]`.

    The result maps a point of the augmented image to one of the stored image, both normalized.
    Where two operations follow each other, the second may show the fill color of the first, though
    the map is back inside the image there.
    """
    matrix = np.diag([-1.0 if flip else 1.0, 1.0, 1.0])
    matrix[0, 2] = width if flip else 0
    for step in steps:
        if step.name in GEOMETRIC:
            argument = np.array([step.argument])
            matrix = matrix @ make_matrix(step.name, argument, height, width)[0]
    scale = np.diag([width, height, 1.0])
    return np.linalg.inv(scale) @ matrix @ scale


def move_views(batch: Batch, matrix_N33: np.ndarray) -> Batch:
    """Turn Views of augmented images into those of the stored images.

    What is shown is the box around the crop's corners in the stored image: of a crop without
    rotation and shear exactly the crop, and zoom or shift later brings fill from beyond it.
    """
    view, matrix = batch.view.double(), torch.from_numpy(matrix_N33)
    moved = matrix[:, :2, :2] @ view
    moved[:, :, 2] += matrix[:, :2, 2]
    shown = torch.from_numpy(visible_boxes(moved.float().numpy()))
    return batch._replace(view=moved.float(), shown=shown)


def warp_maps(
    batch: Batch, flips: np.ndarray, steps: list[list[Step]], spec: ScoreMapSpec
) -> Batch:
    """Flip and warp the score maps of a batch as the published code does.

    A cell takes the logits and classes of the nearest cell of the map; one from beyond the centers
    of the outermost cells gives all classes the same probability, or none with `background`.
    """
    N, S = batch.map_logit.shape[:2]
    pairs = [warp_cells(S, flip, some) for flip, some in zip(flips, steps, strict=True)]
    cell_NT, inside_NT = (np.stack(part) for part in zip(*pairs, strict=True))

    def take(field: Tensor, outside: float | None = None) -> Tensor:
        # PyTorch does not index uint16.
        moved = field.flatten(1, 2).numpy()[np.arange(N)[:, None], cell_NT]
        if outside is not None:
            moved[~inside_NT] = outside
        return torch.from_numpy(moved).view(field.shape)

    # Classes that are not kept have logit 0 or, if they share the remainder, the same logsumexp.
    # With `background` the classes kept would have more than the others, so none has anything, and
    # `--outside` decides.
    lse = MOST_LOGIT if spec.absent == "background" else math.log(spec.num_classes)
    return batch._replace(
        map_logit=take(batch.map_logit, 0.0),
        map_class=take(batch.map_class),
        map_lse=take(batch.map_lse, lse),
    )


def warp_cells(side: int, flip: bool, steps: list[Step]) -> tuple[np.ndarray, np.ndarray]:
    """Find the cell of a map of `side` cells that each cell of the warped map takes.

    Returns its number, int64 `[S * S]`, and whether it lies inside the map, bool `[S * S]`. Rows
    and columns are whole numbers at the centers of cells, where pixels are at halves: the published
    code rotates about `side` / 2, half a cell beyond the center, and takes a map for a square image
    of the whole.
    """
    cell = np.arange(side * side).reshape(side, side)
    cell, inside = (cell[:, ::-1] if flip else cell), np.ones((side, side), bool)
    row, column = np.mgrid[:side, :side].astype(float)
    for step in steps:
        if step.name not in GEOMETRIC:
            continue
        across, down, _ = make_matrix(step.name, np.array([step.argument]), side, side)[0]
        x = row * across[1] + column * across[0] + across[2]
        y = row * down[1] + column * down[0] + down[2]
        within = (np.minimum(x, y) >= 0) & (np.maximum(x, y) <= side - 1)
        x, y = (np.floor(part.clip(0, side - 1) + 0.5).astype(int) for part in (x, y))
        cell, inside = cell[y, x], inside[y, x] & within
    return cell.ravel(), inside.ravel()

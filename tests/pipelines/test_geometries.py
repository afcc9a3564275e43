"""From pixels to targets through every geometry: the classes of a synthetic picture, scored by a
teacher, come back at the right tokens.
"""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.targets import TargetRules, check_batch, sparse_targets
from densefeed.relabel.scoring import keep, to_maps
from densefeed.relabel.teacher import Teacher
from densefeed.storage.geometry import crop_views, visible_boxes
from densefeed.storage.score_maps import palette_sizes

CELL, SIZE, BLOCKS = 4, 192, (2, 3)
LEVELS = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "interpolation": "bilinear"}
CORNERS = torch.tensor([[r, g, b] for r in (-1.0, 1) for g in (-1.0, 1) for b in (-1.0, 1)])
COLORS = torch.cat([CORNERS, torch.zeros(1, 3)])  # eight classes, and gray: the padding
PADDING, CLASSES = 8, 9


class Colors(nn.Module):
    """Classifies a cell of CELL x CELL pixels as the nearest of COLORS, with certainty."""

    def forward_token_logits(self, image_NCHW):
        cells = F.avg_pool2d(image_NCHW, CELL)
        far = (cells[:, None] - COLORS[None, :, :, None, None]).square().sum(2)
        return -30 * far


def make_blocks(height, width, seed):
    """Make a picture of BLOCKS, and their classes."""
    classes = np.random.default_rng(seed).integers(0, 8, BLOCKS)
    rows = np.arange(height) * BLOCKS[0] // height
    columns = np.arange(width) * BLOCKS[1] // width
    pixels = ((CORNERS.numpy()[classes[rows[:, None], columns]] + 1) * 127.5).astype(np.uint8)
    return Image.fromarray(pixels), classes


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("height", "width", "seed", "views", "flip"),
    [
        (120, 300, 0, 1, False),
        (300, 130, 1, 2, True),
        (173, 211, 2, 4, False),
        (88, 88, 3, 2, True),
    ],
)
@pytest.mark.parametrize("geometry", ["squash", "center-crop", "letterbox", "tile"])
@pytest.mark.parametrize("sheared", [False, True])
def test_every_token_has_the_label_of_its_pixels(
    sheared, geometry, height, width, seed, views, flip
):
    image, classes = make_blocks(height, width, seed)
    teacher = Teacher(
        Colors(), SIZE, geometry, LEVELS, tta_views=views, tiles=2 if geometry == "tile" else 1
    )
    pictures, window = teacher.prepare(image)
    maps = to_maps(
        keep(teacher(torch.from_numpy(pictures)[None]), 3), np.array([window], np.float32)
    )
    assert maps.logit.shape[1] == (84 if geometry == "tile" else 48)
    plan = EpochPlan(num_samples=8, batch=1, seed=seed, mode="train")
    boxes, _ = plan.crops(0, np.arange(8), np.full(8, height), np.full(8, width))
    view = crop_views(boxes, np.full(8, flip), np.full(8, height), np.full(8, width))
    shown = visible_boxes(view)
    if sheared:
        turn = np.array([[0.9, -0.3, 0.2], [0.25, 0.95, -0.1], [0, 0, 1]])
        view = (view.astype(np.float64) @ turn).astype(np.float32)
    logit, cls, lse, windows = (
        torch.from_numpy(np.repeat(part.astype(kind), 8, 0))
        for part, kind in zip(maps, (np.float16, np.uint16, np.float16, np.float32), strict=True)
    )
    batch = Batch(
        torch.zeros(8, 1, 1, 3, dtype=torch.uint8),
        torch.zeros(8, dtype=torch.long),
        torch.from_numpy(view),
        torch.from_numpy(shown),
        torch.arange(8),
        torch.zeros(8, dtype=torch.long),
        torch.ones(8),
        logit,
        cls,
        lse,
        windows,
        axis_aligned=not sheared,
    )
    side = maps.logit.shape[1]
    reach = min(window[2] - window[0], window[3] - window[1])
    spec = ScoreMapSpec(side, 3, CLASSES, "tail", int(palette_sizes(maps.cls).max()), reach)
    check_batch(batch, spec, "these maps")
    grid = 7
    targets = sparse_targets(batch, spec, grid, TargetRules())
    dense = targets.base[..., None].expand(-1, -1, CLASSES).clone()
    dense = dense.scatter_add_(
        2, targets.palette[:, None].expand(-1, grid * grid, -1), targets.extra
    ).view(8, grid, grid, CLASSES)
    weight = targets.weight.view(8, grid, grid)

    cell = np.array([window[3] - window[1], window[2] - window[0]]) / side  # x, y
    checked = 0
    for n, row, column in np.ndindex(8, grid, grid):
        u, v = (np.arange(9)[None] / 8 + [[column], [row]]) / grid
        ones = np.ones(81)
        # x, y of the points that the token shows.
        points = view[n] @ np.stack([*(part.ravel() for part in np.meshgrid(u, v)), ones])
        low, high = points.min(1), points.max(1)
        # The intersection of crop and Window.
        begin, end = (np.maximum(shown[n], window)[[1, 0]], np.minimum(shown[n], window)[[3, 2]])
        if (low >= begin - 1e-6).all() and (high <= end + 1e-6).all():
            assert weight[n, row, column] == 1
        elif (low > end + 1e-6).any() or (high < begin - 1e-6).any():
            assert weight[n, row, column] == 0
        # One cell for the bilinear samples, half a cell for the average, and a pixel for Pillow. At
        # the image's edge test_targets.py checks the cells that contain half padding.
        margin = 1.6 * cell + 1 / np.array([width, height])
        low, high = low - margin, high + margin
        if geometry == "letterbox" and ((low < 0).any() or (high > 1).any()):
            continue
        first, last = (
            np.floor(np.clip(ends, 0, 1 - 1e-9) * BLOCKS[::-1]).astype(int) for ends in (low, high)
        )
        seen = np.unique(classes[first[1] : last[1] + 1, first[0] : last[0] + 1])
        if len(seen) == 1 and weight[n, row, column] > 0:
            assert dense[n, row, column, seen[0]] > 0.95, (n, row, column, window)
            checked += 1
    assert checked > 20

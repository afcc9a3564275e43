"""Measures of a map of a class: how much of it lies in true boxes, and how the class depends on it.

Two need boxes: the share of a map inside them (relevance mass accuracy, arXiv 2003.07258) and the
pointing game (arXiv 1608.00507). Deletion and insertion curves (RISE, arXiv 1806.07421) need none:
the class should lose its probability soon when the pixels of the greatest values are removed, and
gain it soon when they are inserted.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms.v2.functional import gaussian_blur

from densefeed.models.token_transformer import Grid

# N images   C, H, W channels and pixels   R x C a grid, rows and columns   P = H W pixels

Baseline = Literal["gray", "blur"]
# Coverage of whole patches is a sum of areas, which rounds.
ROUNDING = 1e-9
# RISE's blur: sigma and radius of the kernel, pixels of an image of 224.
BLUR_SIGMA, BLUR_SIDE = 5, 224


# ------------------------------------------------------------------------- boxes


def box_coverage(boxes_ltrb_n4: np.ndarray, grid: Grid) -> Tensor:
    """Return the share of each patch's area that lies in at least one box, float64 `[R, C]`.

    Boxes are (left, top, right, bottom), normalized to the input; parts beyond it do not count.
    The shares are exact, also where boxes cut patches or overlap each other.
    """
    boxes = np.clip(np.asarray(boxes_ltrb_n4, np.float64).reshape(-1, 4), 0, 1)
    (columns, width, in_x_nX), (rows, height, in_y_nY) = (
        cut_axis(boxes[:, axis], boxes[:, axis + 2], cells) for axis, cells in enumerate(grid[::-1])
    )
    covered_YX = (in_y_nY[:, :, None] & in_x_nX[:, None]).any(0)
    coverage = np.zeros(grid)
    # In units of a patch's area.
    np.add.at(coverage, (rows[:, None], columns), covered_YX * height[:, None] * width)
    return torch.from_numpy(coverage)


def cut_axis(
    low_n: np.ndarray, high_n: np.ndarray, cells: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut an axis at the ends of all cells and boxes, so that each piece is in a box or outside.

    Returns each piece's cell and length, in cells, `[X]`, and whether it is in each box, `[n, X]`.
    """
    ends = np.unique(np.concatenate([np.arange(cells + 1), low_n * cells, high_n * cells]))
    middle = (ends[1:] + ends[:-1]) / 2
    inside_nX = (low_n[:, None] * cells < middle) & (middle < high_n[:, None] * cells)
    return middle.astype(int), np.diff(ends), inside_nX


def box_share(map_NRC: Tensor, coverage_NRC: Tensor) -> Tensor:
    """Return the share of each map inside boxes, 0 to 1, float64 `[N]`.

    A patch's value is spread evenly over its area, so a uniform map has the share of the boxes'
    area. A map that is 0 everywhere counts as uniform.

    Args:
        map_NRC: at least 0.
        coverage_NRC: from `box_coverage`, for the grid of the maps.
    """
    flat = map_NRC.double().flatten(1)
    flat = torch.where((flat > 0).any(1, keepdim=True), flat, 1)
    return (flat * coverage_NRC.to(flat).flatten(1)).sum(1) / flat.sum(1)


def pointing_hits(map_NRC: Tensor, coverage_NRC: Tensor) -> Tensor:
    """Return whether the maximum of each map is inside a box, 0 or 1, float64 `[N]`.

    The maximum is a patch. It is inside if boxes cover at least half of it; if they cover half of
    none, as boxes smaller than a patch may, the patches that they cover most are inside. Several
    equal maxima count with the share of them that is inside, which is the mean over ways to choose
    one. There is no tolerance around the boxes; the paper's is 15 pixels. Arguments are those of
    `box_share`.
    """
    flat, covered = map_NRC.flatten(1), coverage_NRC.to(map_NRC.device).flatten(1)
    best = flat == flat.amax(1, keepdim=True)
    enough = covered.amax(1, keepdim=True).clamp(max=0.5) - ROUNDING
    inside = (covered >= enough) & (covered > 0)
    return (best & inside).sum(1).double() / best.sum(1)


# ------------------------------------------------------------------------- curves


def baseline_image(image_NCHW: Tensor, kind: Baseline) -> Tensor:
    """Return what replaces the pixels of normalized images.

    `gray` is 0, the mean color of the normalization. `blur` is RISE's Gaussian, of a standard
    deviation of 5 pixels cut off at 5, at 224 pixels, and in proportion at other sizes. Small
    inputs remain recognizable under it.
    """
    if kind == "gray":
        return torch.zeros_like(image_NCHW)
    sigma = BLUR_SIGMA * image_NCHW.shape[-1] / BLUR_SIDE
    return gaussian_blur(image_NCHW, [2 * max(1, round(sigma)) + 1] * 2, [sigma] * 2)


def rank_pixels(map_NRC: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the place of each pixel in descending order of the map, int64 `[N, H, W]` from 0.

    Maps are enlarged to `size` (H, W) bilinearly. Equal pixels come in one random order, the same
    in every call: in that of their rows the class would depend on where it is in the image.
    """
    large = F.interpolate(map_NRC.double()[:, None], size, mode="bilinear", align_corners=False)
    value_NP = large.flatten(1)
    P = value_NP.shape[1]
    shuffled_P = torch.randperm(P, generator=torch.Generator().manual_seed(0)).to(map_NRC.device)
    order_NP = shuffled_P[value_NP[:, shuffled_P].argsort(stable=True, dim=1, descending=True)]
    place_NP = torch.arange(P, device=map_NRC.device).expand_as(order_NP)
    return torch.empty_like(order_NP).scatter_(1, order_NP, place_NP).view(-1, *size)


@torch.no_grad()
def class_curve(
    model: nn.Module,
    begin_NCHW: Tensor,
    end_NCHW: Tensor,
    rank_NHW: Tensor,
    target_N: Tensor,
    steps: int,
    batch: int,
) -> Tensor:
    """Return the probability of each image's class while pixels are replaced, `[N, steps + 1]`.

    Pixels of `begin` become those of `end` in `steps` equal parts, rounded to pixels: from the
    image to a baseline this is a deletion curve, from a baseline to the image an insertion curve.

    Args:
        model: in evaluation mode; its logits are its own, as in an evaluation.
        begin_NCHW, end_NCHW: normalized images.
        rank_NHW: order of the pixels, from `rank_pixels`.
        target_N: int64 classes.
        steps: number of parts, at least 1.
        batch: images per forward pass.
    """
    N, (H, W) = len(begin_NCHW), rank_NHW.shape[1:]
    count_S = torch.linspace(0, H * W, steps + 1, dtype=torch.float64).round().to(rank_NHW)
    places = torch.arange(N * (steps + 1), device=rank_NHW.device)
    found = []
    for place in places.split(batch):
        n, step = place // (steps + 1), place % (steps + 1)
        replaced = rank_NHW[n] < count_S[step, None, None]
        image_NCHW = torch.where(replaced[:, None], end_NCHW[n], begin_NCHW[n])
        probability = model(image_NCHW).float().softmax(-1)
        found.append(probability.gather(1, target_N[n, None])[:, 0])
    return torch.cat(found).view(N, steps + 1)


def area_under(curve_NS: Tensor) -> Tensor:
    """Return the area under curves over the share of pixels, 0 to 1, by the trapezoid rule, `[N]`.

    The lower the better of deletion, the higher the better of insertion.
    """
    return torch.trapezoid(curve_NS.double(), dx=1 / (curve_NS.shape[1] - 1))

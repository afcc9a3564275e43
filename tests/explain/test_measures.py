"""Measures of maps against rasters, loops and SciPy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage
from torch import nn
from torch.nn import functional as F

from densefeed.explain.measures import (
    area_under,
    baseline_image,
    box_coverage,
    box_share,
    class_curve,
    pointing_hits,
    rank_pixels,
)

FINE = 24
ends = st.tuples(*[st.integers(0, FINE)] * 2).map(sorted).filter(lambda pair: pair[0] < pair[1])
# (left, top, right, bottom) in 24ths.
box = st.tuples(ends, ends).map(lambda xy: (xy[0][0], xy[1][0], xy[0][1], xy[1][1]))
grids = st.tuples(*[st.sampled_from([1, 2, 3, 5, 8])] * 2)


def raster(boxes) -> np.ndarray:
    """Mark the squares of a 120 x 120 raster that lie in a box."""
    inside = np.zeros((5 * FINE, 5 * FINE))
    for left, top, right, bottom in 5 * np.array(boxes):
        inside[top:bottom, left:right] = 1
    return inside


def draw_maps(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.lists(box, max_size=4), grids)
def test_coverage_is_exact_where_boxes_cut_patches_and_overlap(boxes, grid):
    R, C = grid
    expected = raster(boxes).reshape(R, 120 // R, C, 120 // C).mean((1, 3))
    found = box_coverage(np.array(boxes).reshape(-1, 4) / FINE, grid)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@given(st.lists(box, min_size=1, max_size=3), grids, st.integers(0, 99))
def test_share_is_that_of_the_map_as_a_picture(boxes, grid, seed):
    (R, C), inside = grid, raster(boxes)
    coverage = box_coverage(np.array(boxes) / FINE, grid)[None]
    uniform = box_share(torch.full((1, R, C), 0.3), coverage).item()
    assert uniform == pytest.approx(inside.mean(), rel=1e-12)
    # A map without any relevance has none to place.
    assert box_share(torch.zeros(1, R, C), coverage).item() == pytest.approx(uniform, rel=1e-12)
    maps = draw_maps(seed, 1, R, C)
    picture = maps[0].numpy().repeat(120 // R, 0).repeat(120 // C, 1)
    expected = (picture * inside).sum() / picture.sum()
    assert box_share(maps, coverage).item() == pytest.approx(expected, rel=1e-9)
    assert box_share(7 * maps, coverage).item() == pytest.approx(expected, rel=1e-9)


def test_a_map_inside_the_box_has_share_and_hit_1():
    # Patches 1 and 2 of row 1, in 4 x 4 patches; the third box ends beyond the input.
    boxes = [[0.25, 0.25, 0.75, 0.5], [0.2, 0.2, 0.8, 0.6], [0.2, 0.2, 1.8, 1.5]]
    maps = torch.zeros(3, 4, 4)
    maps[:, 1, 1:3] = torch.tensor([0.7, 0.3])
    coverage = torch.stack([box_coverage(np.array(b), (4, 4)) for b in boxes])
    assert box_share(maps, coverage).tolist() == pytest.approx([1, 1, 1], abs=1e-15)
    assert pointing_hits(maps, coverage).tolist() == [1, 1, 1]
    assert pointing_hits(maps.flip(1, 2), coverage).tolist() == [0, 0, 1]
    assert box_share(maps.flip(1), coverage)[0] == 0


def hit(patch: tuple[int, int], *boxes: list[float]) -> float:
    maps = torch.zeros(1, 4, 4)
    maps[0][patch] = 1
    return pointing_hits(maps, box_coverage(np.array(boxes), (4, 4))[None]).item()


def test_a_patch_that_the_box_cuts_is_inside_by_half():
    # It covers half of column 0, all of column 1, 0.4 of column 2.
    box = [0.125, 0.0, 0.6, 1.0]
    assert [hit((2, column), box) for column in range(4)] == [1, 1, 0, 0]


def test_a_box_smaller_than_a_patch_can_be_hit():
    small = [0.55, 0.55, 0.6, 0.6]
    assert hit((2, 2), small) == 1
    assert hit((2, 1), small) == 0
    # Over a corner of four patches, a little more in one.
    assert [hit(patch, [0.2, 0.2, 0.31, 0.31]) for patch in ((0, 0), (1, 1), (0, 1))] == [0, 1, 0]
    assert [hit(patch, [0.2, 0.2, 0.3, 0.3]) for patch in ((0, 0), (1, 1), (0, 1))] == [1, 1, 1]
    # Beside another box which is larger, only that one counts.
    assert hit((2, 2), small, [0, 0, 0.5, 0.5]) == 0
    # A class without a visible box is never hit.
    assert hit((0, 0), [0.5, 1.2, 0.7, 1.4]) == 0


def test_equal_maxima_count_by_their_share():
    coverage = box_coverage(np.array([[0.0, 0.0, 0.5, 0.5]]), (4, 4))[None]
    assert pointing_hits(torch.ones(1, 4, 4), coverage).item() == 4 / 16
    two = torch.zeros(1, 4, 4)
    two[0, 0, 0] = two[0, 3, 3] = 2
    assert pointing_hits(two, coverage).item() == 0.5


# ------------------------------------------------------------------------- curves


class Linear(nn.Module):
    """Logits of three classes, each a weighted sum of pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = draw_maps(5, 3, 3, 6, 8) - 0.5, []

    def forward(self, image_NCHW: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(image_NCHW))
        return torch.einsum("nchw,kchw->nk", image_NCHW, self.weight)


def curve_written_out(model, begin, end, values_HW, target, steps) -> list[float]:
    """One image in NumPy, a pixel after the other."""
    image, width = begin.numpy().copy(), values_HW.shape[1]
    order = sorted(range(values_HW.size), key=lambda pixel: -values_HW.flat[pixel])
    found, done = [], 0
    for step in range(steps + 1):
        while done < round(step * values_HW.size / steps):
            y, x = divmod(order[done], width)
            image[:, y, x] = end[:, y, x]
            done += 1
        logits = [float((image * w).sum()) for w in model.weight.numpy()]
        found.append(np.exp(logits[target]) / sum(map(np.exp, logits)))
    return found


@pytest.mark.parametrize("steps", [1, 4, 7])
def test_curves_equal_a_loop_over_pixels(steps):
    model, maps = Linear(), draw_maps(0, 2, 2, 2)
    image, blank = draw_maps(1, 2, 3, 6, 8), draw_maps(2, 2, 3, 6, 8)
    target = torch.tensor([2, 0])
    values = F.interpolate(maps[:, None], (6, 8), mode="bilinear")[:, 0].numpy()
    # Pixels at the edges of a bilinear map are equal; the order of the loop is that of the rows.
    values += np.linspace(1e-9, 0, 48).reshape(6, 8)
    rank = rank_pixels(torch.from_numpy(values), (6, 8))
    for begin, end in ((image, blank), (blank, image)):
        found = class_curve(model, begin, end, rank, target, steps, batch=3)
        for n in range(2):
            expected = curve_written_out(model, begin[n], end[n], values[n], target[n], steps)
            np.testing.assert_allclose(found[n], expected, rtol=1e-6)
            # The formula of RISE's code.
            area = (sum(expected) - expected[0] / 2 - expected[-1] / 2) / steps
            assert area_under(found)[n].item() == pytest.approx(area, rel=1e-6)
    assert max(model.calls) == 3


def test_ranks_descend_and_equal_pixels_are_not_in_the_order_of_rows():
    maps = draw_maps(3, 2, 3, 4)
    maps[1] = 0
    rank = rank_pixels(maps, (12, 16))
    large = F.interpolate(maps[:, None], (12, 16), mode="bilinear")
    for n in range(2):
        values = torch.empty(192, dtype=torch.float64)
        values[rank[n].flatten()] = large[n].flatten()
        assert (values.diff() <= 0).all()
        assert sorted(rank[n].flatten().tolist()) == list(range(192))
    # Of a map without information the first half is everywhere: 96 pixels of 192, 48 of the top.
    top = (rank[1][:6] < 96).sum().item()
    assert 30 <= top <= 66
    assert torch.equal(rank, rank_pixels(maps, (12, 16)))


def test_the_map_that_finds_the_class_has_the_better_curves():
    model = Linear()
    model.weight[0] = 0
    model.weight[0, :, :3, :4] = 4
    model.weight[1:] = 0
    image, target = torch.ones(1, 3, 6, 8), torch.tensor([0])
    good = torch.tensor([[[1.0, 0], [0, 0]]])
    areas = {}
    for name, maps in {"good": good, "bad": 1 - good}.items():
        rank, blank = rank_pixels(maps, (6, 8)), baseline_image(image, "gray")
        for kind, ends in {"deletion": (image, blank), "insertion": (blank, image)}.items():
            areas[name, kind] = area_under(
                class_curve(model, *(e.double() for e in ends), rank, target, 12, 64)
            ).item()
    assert areas["good", "deletion"] < 0.6 < 0.9 < areas["bad", "deletion"]
    assert areas["bad", "insertion"] < 0.6 < 0.9 < areas["good", "insertion"]


@pytest.mark.parametrize(("side", "radius"), [(224, 5), (112, 2), (16, 1)])
def test_baselines(side, radius):
    image = draw_maps(4, 1, 3, side, side)
    assert not baseline_image(image, "gray").any()
    expected = ndimage.gaussian_filter(
        image.numpy(), 5 * side / 224, mode="mirror", radius=radius, axes=(2, 3)
    )
    np.testing.assert_allclose(baseline_image(image, "blur"), expected, atol=1e-6)

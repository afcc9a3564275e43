"""Views, Windows and Frames against pixels computed by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from densefeed.storage.geometry import (
    WHOLE,
    are_windows,
    center_box,
    crop_in_pixels,
    crop_views,
    labeling_cells,
    published_frame,
    samples_per_bin,
    teacher_window,
    visible_boxes,
    window_frame,
)


def at(view, x, y):
    return view @ np.array([x, y, 1.0])


def test_the_corners_of_a_view_are_those_of_its_crop():
    view = crop_views(
        np.array([[10.0, 20.0, 30.0, 40.0]]), np.array([False]), np.array([100]), np.array([200])
    )[0]
    np.testing.assert_allclose(at(view, 0, 0), (20 / 200, 10 / 100), atol=1e-6)
    np.testing.assert_allclose(at(view, 1, 1), (60 / 200, 40 / 100), atol=1e-6)


@given(
    st.floats(0, 0.5),
    st.floats(0, 0.5),
    st.floats(0.1, 0.5),
    st.floats(0.1, 0.5),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_a_flip_only_mirrors_the_crop(top, left, height, width, x, y):
    box = np.array([[top, left, height, width]]) * 100
    plain, flipped = (
        crop_views(box, np.array([f]), np.array([100]), np.array([100]))[0] for f in (False, True)
    )
    np.testing.assert_allclose(at(flipped, x, y), at(plain, 1 - x, y), atol=1e-5)


def test_a_view_gives_the_pixel_that_a_crop_shows():
    """An image with unique pixel values, cropped, flipped and read back through the View."""
    height, width = 12, 20
    picture = np.arange(height * width).reshape(height, width)
    box, flip = (3, 5, 6, 8), True
    crop = picture[3:9, 5:13][:, ::-1]
    view = crop_views(
        np.array([box], float), np.array([flip]), np.array([height]), np.array([width])
    )[0]
    for row in range(6):
        for column in range(8):
            x, y = at(view, (column + 0.5) / 8, (row + 0.5) / 6)
            assert picture[int(y * height), int(x * width)] == crop[row, column]


def test_visible_boxes_are_the_crop_boxes_with_and_without_flip():
    box, extent = np.array([[10.0, 20.0, 30.0, 50.0]] * 2), np.array([100, 100])
    view = crop_views(box, np.array([False, True]), extent, 2 * extent)
    np.testing.assert_allclose(visible_boxes(view), [[0.1, 0.1, 0.4, 0.35]] * 2, atol=1e-7)


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 375), (1, 4000), (64, 64)])
def test_center_crop_window_is_the_centered_square(height, width):
    left, top, right, bottom = crop_in_pixels(
        teacher_window("center-crop", height, width), height, width
    )
    side = min(height, width)
    assert right - left == pytest.approx(side)
    assert bottom - top == pytest.approx(side)
    assert left + right == pytest.approx(width)
    assert top + bottom == pytest.approx(height)
    assert teacher_window("squash", height, width) == teacher_window("tile", height, width) == WHOLE


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 375), (1, 4000), (64, 64)])
def test_a_letterbox_is_the_square_around_the_image(height, width):
    left, top, right, bottom = crop_in_pixels(
        teacher_window("letterbox", height, width), height, width
    )
    side = max(height, width)
    assert right - left == pytest.approx(side)
    assert bottom - top == pytest.approx(side)
    assert left + right == pytest.approx(width)
    assert top + bottom == pytest.approx(height)


def test_windows_are_parts_of_an_image_or_reach_around_it():
    every = [
        teacher_window(how, h, w)
        for how in ("squash", "center-crop", "letterbox")
        for h, w in [(1, 4000), (375, 500), (333, 7)]
    ]
    every += [(0.1, 0.2, 0.3, 0.4), (-1e-7, 0, 1 + 1e-7, 1)]
    for kind in (np.asarray, torch.tensor):
        assert are_windows(kind(np.array(every, np.float32))).all()
    nan, inf = float("nan"), float("inf")
    none = [
        (0, 0, 375, 500),
        (0.5, 0, 0.5, 1),
        (0.7, 0, 0.3, 1),
        (-0.2, 0, 0.9, 1),
        (-0.5, 0, 1, 1),
        (0, 1.1, 1, 1.2),
        (0, -2, 1, 2.9),
        (nan, 0, 1, 1),
        (0, 0, 1, nan),
        (0, -inf, 1, 1),
        (0, 0, 1, inf),
    ]
    for kind in (np.asarray, torch.tensor):
        assert not are_windows(kind(np.array(none, np.float32))).any()


@given(
    st.integers(1, 4000),
    st.integers(1, 4000),
    st.integers(1, 64),
    st.sampled_from(["squash", "center-crop", "letterbox"]),
)
def test_labeling_cells_have_their_center_in_the_image(height, width, side, geometry):
    window = teacher_window(geometry, height, width)
    cells = labeling_cells(window_frame(torch.tensor([window])), side)[0].int().tolist()
    for (first, last), low, high in zip(
        cells, (window[1], window[0]), (window[3], window[2]), strict=True
    ):
        centers = low + (np.arange(side) + 0.5) / side * (high - low)
        edge = 1e-3 / side * (high - low)  # float32; a center on the edge may be either
        assert 0 <= first <= last < side
        inside = (centers > edge) & (centers < 1 - edge)
        near = (centers > -edge) & (centers < 1 + edge)
        if near.any():
            assert inside[first + 1 : last].all()
            assert near[[first, last]].all()
            assert not np.delete(inside, np.arange(first, last + 1)).any()
        else:  # the image lies between two centers: a cell that overlaps it
            assert last - first <= 1
            assert centers[first] - (high - low) / side / 2 <= 1 + edge
            assert centers[last] + (high - low) / side / 2 >= -edge


def test_center_box_is_the_evaluation_crop_of_timm():
    """timm resizes the shorter side to floor(224 / 0.875) = 256 and crops 224: the same region."""
    ((top, left, height, width),) = center_box(np.array([480]), np.array([640]), 0.875)
    assert (height, width) == (420, 420)
    assert (top, left) == (30, 110)


def test_samples_per_bin_follows_roi_align():
    assert samples_per_bin(18, 14, 1.0) == 2
    assert samples_per_bin(14, 14, 1.0) == 1
    assert samples_per_bin(18, 1, 1.0) == 18
    assert samples_per_bin(18, 14, 0.75) == 2
    assert samples_per_bin(18, 14, 0.5) == 3
    assert (
        samples_per_bin(18, 14, 1 / 4000) == 64
    )  # an extreme image must not slow down every batch


def test_samples_of_sheared_views_are_limited_to_twice_the_width_of_the_map():
    assert samples_per_bin(18, 14, 1.0, sheared=True) == 2
    assert samples_per_bin(18, 1, 1.0, sheared=True) == 26  # sqrt(2) * 18
    assert samples_per_bin(18, 32, 1.0, sheared=True) == 1
    for side in (7, 18, 60):
        for grid in (1, 7, 14, 32):
            assert grid * samples_per_bin(side, grid, 1 / 4000, sheared=True) <= 2 * side + grid


def test_the_frame_of_a_window_maps_its_corners_to_those_of_the_map():
    window = torch.tensor([[0.1, 0.2, 0.9, 0.7], WHOLE], dtype=torch.float64)
    frame = window_frame(window)
    for corner, (y, x) in enumerate((window[:, :2].T, window[:, 2:].T)):
        np.testing.assert_allclose(frame[:, 0, 0] * x + frame[:, 0, 1], corner, atol=1e-12)
        np.testing.assert_allclose(frame[:, 1, 0] * y + frame[:, 1, 1], corner, atol=1e-12)


@given(
    st.floats(0, 0.7),
    st.floats(0, 0.7),
    st.floats(0.01, 0.3),
    st.floats(0.01, 0.3),
    st.booleans(),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_the_published_frame_swaps_rows_and_columns(top, left, height, width, flip, u, v):
    """By the published steps: flip image and map, cut the crop, pass (t, l, b, r) as x, y, x, y."""
    side = 18
    view = crop_views(
        np.array([[top, left, height, width]]) * 1000,
        np.array([flip]),
        np.array([1000]),
        np.array([1000]),
    )
    shown = torch.tensor([[top, left, top + height, left + width]], dtype=torch.float64)
    (scale_x, shift_x), (scale_y, shift_y) = published_frame(shown, torch.from_numpy(view), side)[
        0
    ].tolist()
    # Position of the point (u, v) of the crop in the image.
    x, y = (left + width * (1 - u if flip else u), top + height * v)
    cut_left = 1 - left - width if flip else left
    column, row = top + u * max(height, 1 / side), cut_left + v * max(width, 1 / side)
    assert scale_x * x + shift_x == pytest.approx(1 - column if flip else column, abs=1e-9)
    assert scale_y * y + shift_y == pytest.approx(row, abs=1e-9)

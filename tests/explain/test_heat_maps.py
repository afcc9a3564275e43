"""Maps as pictures: gray values, colors and sizes against arithmetic."""

import base64
import io

import numpy as np
import torch
from PIL import Image

from densefeed.explain.heat_maps import (
    HEAT,
    INKS_A3,
    OPACITY,
    colorize,
    encode_map,
    matrix_picture,
    overlay,
)


def decode_url(url: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))


def test_a_map_is_a_gray_picture_of_its_tokens():
    """It keeps its rows and columns and goes from its minimum to its maximum."""
    map_RC = torch.tensor([[-2.0, 0.0, 2.0], [-1.0, 1.0, 1.5]])
    want = (255 * (map_RC + 2) / 4).round()
    np.testing.assert_array_equal(decode_url(encode_map(map_RC)), want)
    assert not decode_url(encode_map(torch.ones(2, 3))).any()


def test_a_browser_and_a_file_have_the_same_colors():
    """The table of the filter is that of `colorize`, which is linear between its colors."""
    table = np.array([[float(value) for value in text.split()] for text in HEAT["channels"]])
    places = torch.linspace(0, 1, len(INKS_A3))
    colors = np.asarray(colorize(places[None]))[0]
    np.testing.assert_array_equal(colors, INKS_A3)
    np.testing.assert_allclose(255 * table.T, colors, atol=0.2)
    middle = np.asarray(colorize(places[1:2, None] / 2))[0, 0]
    np.testing.assert_allclose(middle, INKS_A3[:2].mean(0), atol=0.51)
    # Each color is lighter than the one before, so gray prints keep the order.
    assert (np.diff(INKS_A3 @ (0.299, 0.587, 0.114)) > 0).all()


def test_an_overlay_blends_colors_with_the_image():
    image = Image.fromarray(np.full((4, 6, 3), 200, np.uint8))
    drawn = np.asarray(overlay(image, torch.tensor([[0.0, 1.0]]))).astype(float)
    assert drawn.shape == (4, 6, 3)
    for column, ink in ((0, INKS_A3[0]), (5, INKS_A3[-1])):
        np.testing.assert_allclose(drawn[0, column], (1 - OPACITY) * 200 + OPACITY * ink, atol=1)


def test_a_matrix_keeps_its_pixels_up_to_a_limit():
    weights = torch.rand(40, 30, generator=torch.Generator().manual_seed(0))
    whole = matrix_picture(weights)
    assert whole.size == (30, 40)
    np.testing.assert_array_equal(
        np.asarray(whole), (255 * (weights / weights.max()).sqrt()).round()
    )
    assert matrix_picture(weights, 20).size == (15, 20)

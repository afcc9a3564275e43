"""Labels over a picture: where their rectangles lie, their colors and the key."""

import numpy as np

from densefeed.pages.templates import INKS
from densefeed.pages.tokens import draw_labels


def test_outside_names_stand_in_a_key_and_not_in_the_cells():
    """Two rows and three columns of labels on the right half of a picture."""
    classes = np.array([[0, 0, 2], [2, 1, 0]])
    probability = np.array([[1.0, 0.9, 0.51], [0.4, 0.1, 0.6]])
    drawn = draw_labels(classes, probability, ["Aqua", "Buoy", "Crag"], (0.0, 0.5, 1.0, 1.0))
    # No cell of Buoy is sure enough to be seen.
    assert [(one["name"], one["ink"]) for one in drawn["key"]] == [
        ("Aqua", INKS[0]),
        ("Crag", INKS[2]),
    ]
    assert [cell["ink"] for cell in drawn["cells"]] == [INKS[c] for c in (0, 0, 2, 2, 0)]
    assert [(cell["x"], cell["y"]) for cell in drawn["cells"]] == [
        *((0.5, 0.0), (0.6667, 0.0), (0.8333, 0.0)),
        *((0.5, 0.5), (0.8333, 0.5)),
    ]
    assert {(cell["w"], cell["h"]) for cell in drawn["cells"]} == {(0.1667, 0.5)}
    assert [cell["opacity"] for cell in drawn["cells"]] == [0.62, 0.5, 0.16, 0.1, 0.22]


def test_outside_main_classes_of_a_picture_never_share_a_color():
    """Classes 3 and 13 did, as do 13 and 23: there are ten colors."""
    names = [f"class {number}" for number in range(30)]
    drawn = draw_labels(np.array([[3, 13], [23, 13]]), np.full((2, 2), 0.9), names)
    assert [one["name"] for one in drawn["key"]] == ["class 13", "class 3", "class 23"]
    assert len({one["ink"] for one in drawn["key"]}) == 3

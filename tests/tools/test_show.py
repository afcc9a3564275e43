"""The report's geometry against hand-made cases."""

import numpy as np
import pytest
from densefeed.relabel.files import UserError
from densefeed.relabel.geometry import crop_views
from densefeed.tools.show import in_crop, owner_of_tokens, read_run


@pytest.mark.parametrize("flip", [False, True])
def test_boxes_in_a_crop(flip):
    """A crop of the right half: a box there doubles its width; flipped it is mirrored."""
    view = crop_views(np.array([[0.0, 50.0, 100.0, 50.0]]), np.array([flip]), np.array([100]), np.array([100]))[0]
    (box,) = in_crop(np.array([[0.5, 0.2, 0.75, 0.4]]), view)
    want = [0.5, 0.2, 1.0, 0.4] if flip else [0.0, 0.2, 0.5, 0.4]
    np.testing.assert_allclose(box, want, atol=1e-6)


def test_a_token_has_an_owner_only_if_wholly_inside_exactly_one_box():
    boxes = np.array([[0.0, 0.0, 0.5, 0.5], [0.45, 0.45, 1.0, 1.0]])
    owner = owner_of_tokens(boxes, 4)
    np.testing.assert_array_equal(owner, [[0, 0, -1, -1], [0, -1, -1, -1], [-1, -1, 1, 1], [-1, -1, 1, 1]])


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"is no finished run \(config.json is missing\)"):
        read_run(tmp_path)

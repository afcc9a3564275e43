"""The picture of a crop and its token labels."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from densefeed.system.errors import UserError
from densefeed.tools import crop_figure
from densefeed.tools.crop_figure import CropFigure


def check_picture(path: Path, side: int) -> None:
    picture = np.asarray(Image.open(path).convert("RGB"))
    assert picture.shape == (180 + side, 120 + 2 * side, 3)
    crop, labels = (
        picture[84 : 84 + side, 40 : 40 + side],
        picture[84 : 84 + side, -40 - side : -40],
    )
    assert crop.std() > 5
    assert labels.std() > 5


def test_a_packed_file_and_a_sample_give_a_picture(packed, tmp_path, monkeypatch):
    """A quarter of its side: choosing 256 colors for the noise of these images takes 14 s."""
    monkeypatch.setattr(crop_figure, "SIDE", 160)
    out = tmp_path / "crop.png"
    crop_figure.main(CropFigure(source=packed[0], index=3, grid=8, out=out))
    check_picture(out, 160)
    with pytest.raises(UserError, match="no sample 11"):
        crop_figure.main(CropFigure(source=packed[0], index=11, out=out))


@pytest.mark.slow
def test_the_command_draws_a_small_picture(packed, tmp_path, command):
    out = tmp_path / "crop.png"
    done = command("tools/crop_figure.py", packed[0], "--index", 3, "--grid", 8, "--out", out)
    assert done.returncode == 0, done.stderr
    check_picture(out, 640)
    assert out.stat().st_size < 400_000
    refused = command("tools/crop_figure.py", packed[0], "--index", 11, "--out", out)
    assert refused.returncode == 2
    assert "no sample 11" in refused.stderr

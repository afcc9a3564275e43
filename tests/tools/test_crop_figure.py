"""The picture of a crop and its token labels."""

import numpy as np
from PIL import Image


def test_a_packed_file_and_a_sample_give_a_small_picture(packed, tmp_path, command):
    out = tmp_path / "crop.png"
    done = command("tools/crop_figure.py", packed[0], "--index", 3, "--grid", 8, "--out", out)
    assert done.returncode == 0, done.stderr
    picture = np.asarray(Image.open(out).convert("RGB"))
    assert picture.shape == (820, 1400, 3)
    crop, labels = picture[84:724, 40:680], picture[84:724, 720:1360]
    assert crop.std() > 5
    assert labels.std() > 5
    assert out.stat().st_size < 400_000
    refused = command("tools/crop_figure.py", packed[0], "--index", 11, "--out", out)
    assert refused.returncode == 2
    assert "no sample 11" in refused.stderr

"""Digit scenes: deterministic, split by source scan, with boxes around the ink."""

import json
import sys

import numpy as np
import pytest
from PIL import Image

from densefeed.system.errors import UserError
from densefeed.tools.make_digit_scenes import Scenes, load_scans, main


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    out = tmp_path_factory.mktemp("scenes") / "scenes"
    main(Scenes(out=out, train=30, val=20))
    return out


def files(root):
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(scenes, tmp_path):
    main(Scenes(out=tmp_path / "again", train=30, val=20))
    main(Scenes(out=tmp_path / "other", train=30, val=20, seed=1))
    assert files(tmp_path / "again") == files(scenes)
    other = files(tmp_path / "other")
    assert all(
        other[name] != content for name, content in files(scenes).items() if name.endswith(".jpg")
    )


def test_outside_missing_packages_of_the_scenes_are_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage", None)
    with pytest.raises(UserError, match=r'run `pip install "\.\[demo\]"` in the checkout'):
        main(Scenes(out=tmp_path / "scenes", train=10, val=10))


def test_every_scan_is_in_exactly_one_split():
    # This import takes 0.9 s.
    from sklearn.datasets import load_digits

    scans = load_scans()
    seen = {split: {scan.tobytes() for group in scans[split] for scan in group} for split in scans}
    assert not seen["train"] & seen["val"]
    assert sum(len(group) for split in scans.values() for group in split) == len(
        load_digits().images
    )


def test_the_label_is_the_largest_digit_and_boxes_contain_bright_ink(scenes):
    document = json.loads((scenes / "boxes.json").read_text())
    assert len(document["scenes"]) == 50
    for name, digits in document["scenes"].items():
        assert name.split("/")[1] == digits[0]["class"]
        gray = np.asarray(Image.open(scenes / name).convert("L"), float)
        areas = []
        for digit in digits:
            left, top, right, bottom = digit["box"]
            assert 0 <= left < right <= 96
            assert 0 <= top < bottom <= 96
            areas.append(max(right - left, bottom - top))
            assert gray[top:bottom, left:right].max() > 150
        assert areas[0] == max(areas)
        assert all(digit["class"] != digits[0]["class"] for digit in digits[1:])

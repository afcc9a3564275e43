"""Checks of a run's data: are its score maps those that the published label geometry needs?"""

import numpy as np
import pytest

from densefeed.storage.geometry import teacher_window
from densefeed.storage.images import Images
from densefeed.system.options import with_options
from densefeed.training.ranks import ALONE
from densefeed.training.setup import setup_run

from ..stores import write_store


@pytest.fixture
def make_run(folder, random_maps, micro, tmp_path):
    """`make_run(kind, absent, **fields)` sets up a run on maps of this kind."""

    def make(kind, absent, **fields):
        images = Images(folder, split="train")
        scores = random_maps(len(images), 6, 2, 2)
        windows = [teacher_window(kind, *images.size(n)) for n in range(len(images))]
        scores = scores._replace(window=np.array(windows, np.float32))
        store = write_store(tmp_path / "maps.h5", images, scores, 2, absent=absent, geometry=kind)
        paths = dict(loader="folder", data=folder, val=folder, score_maps=store)
        run = setup_run(with_options(micro(tmp_path / "run"), **(paths | fields)), ALONE)
        run.loader.close()
        run.val.close()

    return make


@pytest.mark.parametrize(
    ("geometry", "absent", "faults"),
    [
        ("center-crop", "zero-logit", []),
        ("squash", "zero-logit", ["do not cover the center square"]),
        ("letterbox", "zero-logit", ["do not cover the center square"]),
        ("center-crop", "tail", ["what probability remains"]),
        ("squash", "tail", ["what probability remains", "do not cover the center square"]),
    ],
)
def test_maps_unlike_the_published_ones_are_warned_of(make_run, capsys, geometry, absent, faults):
    make_run(geometry, absent, geometry="published", outside="uniform")
    told = capsys.readouterr().err
    every = ["what probability remains", "do not cover the center square"]
    assert [fault for fault in every if fault in told] == faults
    assert ("--geometry center-crop --absent zero-logit" in told) == bool(faults)


def test_the_aligned_geometry_takes_any_maps(make_run, capsys):
    make_run("squash", "tail")
    assert "warning" not in capsys.readouterr().err

"""The report: geometry against cases by hand, and the table of results."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from densefeed.pipelines.plan import EpochPlan
from densefeed.recipes import micro
from densefeed.storage.geometry import crop_views
from densefeed.system.errors import UserError
from densefeed.system.options import with_options
from densefeed.tools.report import (
    RunRecord,
    boxes_in_crop,
    build_augmentation,
    curve,
    find_owners,
    make_row,
    read_run,
)


@pytest.mark.parametrize("flip", [False, True])
def test_boxes_in_a_crop(flip):
    """In a crop of the right half a box is twice as wide; in a flipped one it is mirrored."""
    view = crop_views(
        np.array([[0.0, 50.0, 100.0, 50.0]]), np.array([flip]), np.array([100]), np.array([100])
    )[0]
    (box,) = boxes_in_crop(np.array([[0.5, 0.2, 0.75, 0.4]]), view)
    want = [0.5, 0.2, 1.0, 0.4] if flip else [0.0, 0.2, 0.5, 0.4]
    np.testing.assert_allclose(box, want, atol=1e-6)


def test_a_token_has_an_owner_only_inside_exactly_one_box():
    boxes = np.array([[0.0, 0.0, 0.5, 0.5], [0.45, 0.45, 1.0, 1.0]])
    owner = find_owners(boxes, 4)
    np.testing.assert_array_equal(
        owner, [[0, 0, -1, -1], [0, -1, -1, -1], [-1, -1, 1, 1], [-1, -1, 1, 1]]
    )


def test_the_token_grid_of_a_run_is_that_of_its_first_epoch():
    config = with_options(
        micro.lvvit_micro_token_label(),
        data=Path("t.beton"),
        val=Path("v.beton"),
        out=Path("run"),
        sizes=((0, 32), (1, 64)),
    )
    run = RunRecord("run", config, {}, [], [])
    plan = EpochPlan(num_samples=1, batch=1, seed=0, mode="train", sizes=config.data.sizes)
    assert build_augmentation(run, SimpleNamespace(plan=plan, num_classes=2))[0] == 4


def test_a_box_in_a_rotated_crop_is_the_box_around_its_corners():
    # The crop shows at (x, y) what is at (y, 1 - x) in the image.
    quarter = np.array([[0.0, 1.0, 0.0], [-1.0, 0.0, 1.0]])
    np.testing.assert_allclose(
        boxes_in_crop(np.array([[0.1, 0.2, 0.4, 0.3]]), quarter), [[0.7, 0.1, 0.8, 0.4]], atol=1e-12
    )


def test_a_folder_that_is_not_a_run_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"is not a run folder \(config.json is missing\)"):
        read_run(tmp_path)


def test_runs_are_compared_by_the_options_that_differ(tmp_path):
    """The runs are in progress: their last lines are incomplete."""
    runs = []
    for name, more in (("a", {"lr": 0.1}), ("b", {"lr": 0.2, "ema": 0.9})):
        folder = tmp_path / name
        folder.mkdir()
        paths = {"data": Path(name), "val": Path(name), "out": folder}
        config = with_options(micro.lvvit_micro_ce(), epochs=4, **paths, **more)
        (folder / "config.json").write_text(json.dumps(config.to_dict()))
        same = {"kind": "train", "mfu": 0.1, "loss": 1.0}
        lines = [same | {"step": n, "epoch": n / 2, "images_per_s": 10 * n} for n in (1, 2, 3)]
        val = {"kind": "val", "step": 3, "epoch": 1.5, "top1": 0.25}
        lines += [val | ({"top1_ema": 0.5} if name == "b" else {})]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text + '{"kind": "tr')
        runs.append(read_run(folder))
        assert runs[-1].config == config
    runs[0].train[1].pop("loss")  # an interval in which every update was skipped
    lines = curve(runs, "train", "loss", percent=False)["lines"]
    assert [len(line["points"]) for line in lines] == [2, 3]
    one, other = (make_row(run, runs) for run in runs)
    assert (one["differs"], other["differs"]) == ("lr 0.1, ema 0.0", "lr 0.2, ema 0.9")
    assert (one["tops"], other["tops"]) == ([(0.25, "")], [(0.25, ""), (0.5, "EMA")])
    assert (one["epoch"], one["epochs"], one["result"], one["images_per_s"]) == (1.5, 4, {}, 20)

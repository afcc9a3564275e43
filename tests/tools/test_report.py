"""The report's geometry against hand-made cases."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from densefeed.pipelines.plan import EpochPlan
from densefeed.storage.geometry import crop_views
from densefeed.system.errors import UserError
from densefeed.tools.report import (
    Report,
    Run,
    curve,
    in_crop,
    main,
    owner_of_tokens,
    read_run,
    row_of,
    student_of,
)
from densefeed.training import config as configuration
from densefeed.training import recipes


@pytest.mark.parametrize("flip", [False, True])
def test_boxes_in_a_crop(flip):
    """A crop of the right half: a box there doubles its width; flipped it is mirrored."""
    view = crop_views(
        np.array([[0.0, 50.0, 100.0, 50.0]]), np.array([flip]), np.array([100]), np.array([100])
    )[0]
    (box,) = in_crop(np.array([[0.5, 0.2, 0.75, 0.4]]), view)
    want = [0.5, 0.2, 1.0, 0.4] if flip else [0.0, 0.2, 0.5, 0.4]
    np.testing.assert_allclose(box, want, atol=1e-6)


def test_a_token_has_an_owner_only_if_wholly_inside_exactly_one_box():
    boxes = np.array([[0.0, 0.0, 0.5, 0.5], [0.45, 0.45, 1.0, 1.0]])
    owner = owner_of_tokens(boxes, 4)
    np.testing.assert_array_equal(
        owner, [[0, 0, -1, -1], [0, -1, -1, -1], [-1, -1, 1, 1], [-1, -1, 1, 1]]
    )


def test_a_runs_config_is_read_back_and_its_tokens_are_those_of_the_first_epoch():
    told = replace(
        recipes.lvvit_micro_token_label(),
        data=Path("t.beton"),
        val=Path("v.beton"),
        out=Path("run"),
        sizes=((0, 32), (1, 64)),
    )
    run = Run("run", configuration.plain(told), {}, [], [])
    assert configuration.config_from_dict(run.config) == told
    plan = EpochPlan(num_samples=1, batch=1, seed=0, mode="train", sizes=told.sizes)
    assert student_of(run, SimpleNamespace(plan=plan, num_classes=2))[0] == 4


def test_a_box_in_a_turned_crop_is_the_box_around_its_corners():
    # what is seen at (x, y) lies at (y, 1 - x) in the image
    quarter = np.array([[0.0, 1.0, 0.0], [-1.0, 0.0, 1.0]])
    np.testing.assert_allclose(
        in_crop(np.array([[0.1, 0.2, 0.4, 0.3]]), quarter), [[0.7, 0.1, 0.8, 0.4]], atol=1e-12
    )


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"is no run \(config.json is missing\)"):
        read_run(tmp_path)


def test_score_maps_are_refused_with_the_command_that_audits_them(tmp_path):
    """Alone and beside a run, whether the file exists or not."""
    for runs in [(tmp_path / "maps.h5",), (tmp_path, tmp_path / "maps.hdf5")]:
        with pytest.raises(
            UserError, match=r"is not a run folder; audit score maps with tools/audit"
        ):
            main(Report(runs=runs))
    with pytest.raises(UserError, match="name at least one run folder"):
        main(Report(runs=()))


def test_runs_are_compared_by_what_they_do_not_share(tmp_path):
    """Also one that has not ended, whose last line is half written."""
    runs = []
    for name, more in (("a", {"lr": 0.1}), ("b", {"lr": 0.2, "ema": 0.9})):
        folder = tmp_path / name
        folder.mkdir()
        told = configuration.plain(
            replace(
                recipes.lvvit_micro_ce(),
                data=Path(name),
                val=Path(name),
                out=folder,
                epochs=4,
                **more,
            )
        )
        (folder / "config.json").write_text(json.dumps(told))
        lines = [
            {
                "kind": "train",
                "step": n,
                "epoch": n / 2,
                "images_per_s": 10 * n,
                "mfu": 0.1,
                "loss": 1.0,
            }
            for n in (1, 2, 3)
        ]
        lines += [
            {"kind": "val", "step": 3, "epoch": 1.5, "top1": 0.25}
            | ({"top1_ema": 0.5} if name == "b" else {})
        ]
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tr'
        )
        runs.append(read_run(folder))
    runs[0].train[1].pop("loss")  # an interval all of whose updates were skipped
    assert [
        len(line["points"]) for line in curve(runs, "train", "loss", percent=False)["lines"]
    ] == [2, 3]
    one, other = (row_of(run, runs) for run in runs)
    assert (one["told"], other["told"]) == ("lr 0.1, ema 0.0", "lr 0.2, ema 0.9")
    assert (one["tops"], other["tops"]) == ([(0.25, "")], [(0.25, ""), (0.5, "averaged")])
    assert (one["epoch"], one["epochs"], one["result"], one["images_per_s"]) == (1.5, 4, {}, 20)

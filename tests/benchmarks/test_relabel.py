"""Small runs of the relabeling benchmark: both label every image alike; results are complete."""

import csv
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import relabel
from benchmarks.relabel import OURS, PEER, TEACHER, RelabelBenchmark, main
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError

SMALL = dict(
    images=10,
    classes=6,
    teacher="test_resnet",
    input_size=96,
    top_k=3,
    batch=4,
    threads=1,
    rounds=2,
)


def test_both_label_every_image_alike(tmp_path, monkeypatch):
    """The top classes in the .pt files and in the store, and their logits, agree approximately:
    the two resize differently and sum in another order.
    """
    seen = []

    def take_turns(works, rounds, done):
        works[OURS](0)
        assert works[PEER](0) == 10
        store, (folder,) = ScoreMapStore(next(tmp_path.glob("*/maps.h5"))), tmp_path.glob("*/pt")
        maps = store.rows(np.arange(10))
        theirs = [
            torch.load(folder / Path(path).with_suffix(".pt"), weights_only=True)
            for path in store.paths()
        ]
        assert all(t.dtype == torch.float16 and t.shape == (2, 3, 3, 3) for t in theirs)
        theirs = torch.stack(theirs).permute(0, 1, 3, 4, 2).numpy()
        seen.append((maps, theirs))
        done(OURS)
        assert not list(tmp_path.glob("*/pt"))
        return {name: [2.0, 4.0] for name in works}

    monkeypatch.setattr(relabel, "take_turns", take_turns)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    main(RelabelBenchmark(**SMALL, record=False))
    ((maps, theirs),) = seen
    spread = maps.logit.astype(float).std()
    assert np.abs(maps.logit - theirs[:, 0].astype(float)).mean() < 0.05 * spread
    assert (maps.cls[..., 0] == theirs[:, 1, ..., 0]).mean() > 0.9


def test_the_stand_in_can_be_left_out(monkeypatch):
    monkeypatch.setattr(relabel, "generate", None)
    document = main(RelabelBenchmark(**SMALL | {"rounds": 1}, stand_in=False, record=False))
    assert [(ratio["a"], ratio["b"]) for ratio in document["ratios"]] == [(OURS, TEACHER)]


def test_small_run_writes_rows(tmp_path):
    results = tmp_path / "results.csv"
    document = main(RelabelBenchmark(**SMALL, results=results))
    assert [(ratio["a"], ratio["b"]) for ratio in document["ratios"]] == [
        (OURS, PEER),
        (OURS, TEACHER),
    ]
    rows = list(csv.DictReader(results.open()))
    assert [row["name"] for row in rows][:3] == [
        f"relabel {name}" for name in (OURS, PEER, TEACHER)
    ]
    assert [row["unit"] for row in rows] == ["images/s"] * 3 + ["ratio"] * 2
    assert all(0 < float(row["p25"]) <= float(row["median"]) <= float(row["p75"]) for row in rows)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(rounds=0), "--rounds"),
        (dict(top_k=0), "--top-k"),
        (dict(images=3), "fewer than"),
        (dict(teacher="x"), "not a timm"),
        pytest.param(
            dict(device="cuda"),
            "--device cuda cannot be used here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_invalid_options_raise(fields, message):
    with pytest.raises(UserError, match=message):
        main(RelabelBenchmark(**SMALL | fields))

"""The benchmark in small: both label every image alike, and its numbers are those it measured."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import relabel
from benchmarks.relabel import FLOOR, OURS, PEER, Benchmark, main
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
    """The classes that the .pt files and the store name first, and their logits: other pixels and
    orders of sums, so nearly.
    """
    seen = []

    def take_turns(works, rounds, before, done):
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
    main(Benchmark(**SMALL, record=False, work=tmp_path))
    ((maps, theirs),) = seen
    spread = maps.logit.astype(float).std()
    assert np.abs(maps.logit - theirs[:, 0].astype(float)).mean() < 0.05 * spread
    assert (maps.cls[..., 0] == theirs[:, 1, ..., 0]).mean() > 0.9


def test_a_small_run_is_whole(tmp_path):
    paths = {"json": tmp_path / "out.json", "results": tmp_path / "results.csv"}
    document = main(Benchmark(**SMALL, **paths))
    assert json.loads(paths["json"].read_text()) == json.loads(json.dumps(document))
    assert [(ratio["a"], ratio["b"]) for ratio in document["ratios"]] == [
        (OURS, PEER),
        (OURS, FLOOR),
    ]
    rows = list(csv.DictReader(paths["results"].open()))
    assert [row["name"] for row in rows][:3] == [f"relabel {name}" for name in (OURS, PEER, FLOOR)]
    assert [row["unit"] for row in rows] == ["images/s"] * 3 + ["ratio"] * 2
    assert all(0 < float(row["p25"]) <= float(row["median"]) <= float(row["p75"]) for row in rows)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(rounds=0), "--rounds"),
        (dict(top_k=0), "--top-k"),
        (dict(images=3), "fewer than"),
        (dict(teacher="x"), "not a timm"),
    ],
)
def test_what_cannot_be_measured_is_said(fields, said):
    with pytest.raises(UserError, match=said):
        main(Benchmark(**SMALL | fields))

"""The benchmark in small: its numbers are those it measured, and what cannot be measured is said in
a sentence.
"""

import csv
import json

import numpy as np
import pytest
import torch

from benchmarks.augment import OURS, TIMMS, Benchmark, crops_of, main
from benchmarks.photographs import photographs
from densefeed.pipelines.plan import EpochPlan
from densefeed.system.errors import UserError

pytest.importorskip("skimage")
pytest.importorskip("sklearn")


def test_a_small_run_is_whole(tmp_path):
    paths = {"json": tmp_path / "out.json", "results": tmp_path / "results.csv"}
    document = main(Benchmark(batch=3, batches=2, size=32, rounds=2, record=True, **paths))
    assert json.loads(paths["json"].read_text()) == json.loads(json.dumps(document))
    (ratio,) = document["ratios"]
    assert (ratio["a"], ratio["b"], ratio["what"]) == (OURS, TIMMS, "time")
    assert 0 < ratio["p25"] <= ratio["median"] <= ratio["p75"]
    rows = list(csv.DictReader(paths["results"].open()))
    assert [row["unit"] for row in rows] == ["ms/image"] * 3 + ["ratio"]
    assert rows[-1]["name"] == f"{OURS} / {TIMMS}"


def test_the_crops_are_the_photographs_own():
    plan = EpochPlan(num_samples=9, batch=3, seed=0, mode="train", sizes=((0, 40),))
    crops = crops_of(photographs(), plan)
    assert crops.shape == (9, 40, 40, 3)
    assert len({crop.tobytes() for crop in crops}) == 9
    assert np.array_equal(crops, crops_of(photographs(), plan))


@pytest.mark.parametrize(
    ("options", "said"),
    [({"rounds": 0}, "--rounds"), ({"device": "tpu"}, "tpu"), ({"policy": "x"}, "'x'")],
)
def test_what_cannot_be_measured_is_said(options, said):
    with pytest.raises(UserError, match=said):
        main(Benchmark(**{"batch": 1, "batches": 1, "size": 16, **options}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_no_device_is_said():
    with pytest.raises(UserError, match="no CUDA device"):
        main(Benchmark(device="cuda"))

"""Small runs of the RandAugment benchmark: complete results, and clear errors."""

import csv
import json

import numpy as np
import pytest
import torch

from benchmarks.augment import OURS, TIMM, AugmentBenchmark, main, make_crops
from benchmarks.photographs import load_photographs
from densefeed.pipelines.plan import EpochPlan
from densefeed.system.errors import UserError

pytest.importorskip("skimage")
pytest.importorskip("sklearn")


def test_small_run_writes_json_and_csv(tmp_path):
    paths = {"json": tmp_path / "out.json", "results": tmp_path / "results.csv"}
    document = main(AugmentBenchmark(batch=3, batches=2, size=32, rounds=2, record=True, **paths))
    assert json.loads(paths["json"].read_text()) == json.loads(json.dumps(document))
    (ratio,) = document["ratios"]
    assert (ratio["a"], ratio["b"], ratio["what"]) == (OURS, TIMM, "time")
    assert 0 < ratio["p25"] <= ratio["median"] <= ratio["p75"]
    rows = list(csv.DictReader(paths["results"].open()))
    assert [row["unit"] for row in rows] == ["ms/image"] * 3 + ["ratio"]
    assert rows[-1]["name"] == f"{OURS} / {TIMM}"


def test_crops_are_distinct_and_reproducible():
    plan = EpochPlan(num_samples=9, batch=3, seed=0, mode="train", sizes=((0, 40),))
    crops = make_crops(load_photographs(), plan)
    assert crops.shape == (9, 40, 40, 3)
    assert len({crop.tobytes() for crop in crops}) == 9
    assert np.array_equal(crops, make_crops(load_photographs(), plan))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"rounds": 0}, "--rounds"), ({"device": "tpu"}, "tpu"), ({"policy": "x"}, "'x'")],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(UserError, match=message):
        main(AugmentBenchmark(**{"batch": 1, "batches": 1, "size": 16, **options}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_missing_cuda_device_raises():
    with pytest.raises(UserError, match="--device cuda cannot be used here"):
        main(AugmentBenchmark(device="cuda"))

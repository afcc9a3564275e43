"""Small runs of the RandAugment benchmark: complete results, and clear errors."""

import csv
import json
import time
from importlib.util import find_spec
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.augment import (
    BUSY_CYCLES,
    BUSY_SECONDS,
    OURS,
    TIMM,
    AugmentBenchmark,
    main,
    make_batches,
    make_crops,
    time_gpu,
)
from benchmarks.photographs import load_photographs
from densefeed.pipelines.plan import EpochPlan
from densefeed.system.errors import UserError

pytestmark = pytest.mark.skipif(
    not (find_spec("skimage") and find_spec("sklearn")), reason="skimage or sklearn is missing"
)


@pytest.mark.slow
def test_small_run_writes_json_and_csv(tmp_path):
    paths = {"json": tmp_path / "out.json", "results": tmp_path / "results.csv"}
    document = main(AugmentBenchmark(batch=3, batches=2, size=32, rounds=2, record=True, **paths))
    assert json.loads(paths["json"].read_text()) == json.loads(json.dumps(document))
    (ratio,) = document["ratios"]
    assert (ratio["a"], ratio["b"]) == (OURS, TIMM)
    assert 0 < ratio["p25"] <= ratio["median"] <= ratio["p75"]
    rows = list(csv.DictReader(paths["results"].open()))
    assert [row["unit"] for row in rows] == ["ms/image"] * 3 + ["ratio"]
    assert rows[-1]["name"] == f"{OURS} / {TIMM}"
    assert rows[0]["data"].endswith(", CPU")


class PretendedEvent:
    """Times 6 ms between any two events."""

    def __init__(self, enable_timing):
        pass

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 6.0


def test_the_time_of_the_gpu_alone_is_refused_where_the_host_is_slower(monkeypatch):
    busy, (batch,) = [], make_batches(torch.zeros(3, 8, 8, 3, dtype=torch.uint8), 1)
    monkeypatch.setattr(torch.cuda, "Event", PretendedEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", busy.append)
    work = mock.Mock()
    assert time_gpu(work, batch, 5) == 2.0
    assert busy == [BUSY_CYCLES]
    assert work.choose.call_args[0][0] == 5
    work.side_effect = lambda *_: time.sleep(BUSY_SECONDS)
    with pytest.raises(UserError, match=r"needs over 0.2 s for a batch; give a smaller --batch"):
        time_gpu(work, batch, 5)


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

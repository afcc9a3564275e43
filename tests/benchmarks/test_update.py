"""Small runs of the benchmark of updates: equal contestants, complete results, clear errors."""

import csv
import json

import pytest
import timm
import torch

from benchmarks.update import ModelUpdate, UpdateBenchmark, add_gradients, main
from densefeed.system.errors import UserError


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return add_gradients(timm.create_model("lvvit_micro"))


def test_small_run_writes_json_and_csv(tmp_path):
    paths = {"json": tmp_path / "out.json", "results": tmp_path / "results.csv"}
    document = main(UpdateBenchmark(model="lvvit_micro", updates=1, rounds=2, **paths))
    assert json.loads(paths["json"].read_text()) == json.loads(json.dumps(document))
    pairs = [(ratio["a"], ratio["b"]) for ratio in document["ratios"]]
    assert pairs == [("adamw, EMA in parts", "adamw, EMA")]
    rows = list(csv.DictReader(paths["results"].open()))
    assert [row["unit"] for row in rows] == ["ms/update"] * 5 + ["ratio"]
    assert rows[0]["name"] == "update adamw"
    assert all(float(row["median"]) > 0 for row in rows)


@pytest.mark.parametrize("name", ["adamw", "momentum"])
@pytest.mark.parametrize("tensors", [1, 4, 1000])
def test_parts_are_the_two_passes_to_the_bit(model, name, tensors):
    whole, parts = ModelUpdate(name, model), ModelUpdate(name, model, tensors)
    for _ in range(3):
        whole.update_in_two_passes()
        parts.update_in_parts()
    for one, other in ((whole.model, parts.model), (whole.ema.module, parts.ema.module)):
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(parts.model.head.weight, model.head.weight)
    assert not torch.equal(parts.model.head.weight, parts.ema.module.head.weight)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"optimizers": ()}, "--optimizers is empty"),
        ({"optimizers": ("adamv",)}, "--optimizers adamv is unknown to timm"),
        ({"model": "lvvit"}, "--model lvvit is unknown to timm"),
        ({"threads": 10**4}, "--threads 10000"),
    ],
)
def test_wrong_options_are_refused(options, problem):
    with pytest.raises(UserError, match=problem):
        main(UpdateBenchmark(**options))

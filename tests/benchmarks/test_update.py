"""Small runs of the benchmark of updates: equal contestants, complete results, clear errors."""

import csv
import json
from unittest import mock

import pytest
import timm
import torch
from timm.optim import muon

from benchmarks.update import (
    ModelUpdate,
    UpdateBenchmark,
    add_gradients,
    main,
    orthogonalize_in_float32,
)
from densefeed.system.errors import UserError
from densefeed.training import optimizers


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return add_gradients(timm.create_model("lvvit_micro"))


def test_small_run_writes_json_and_csv(tmp_path):
    paths = {"json": tmp_path / "out.json", "results": tmp_path / "results.csv"}
    document = main(UpdateBenchmark(model="lvvit_micro", updates=1, rounds=2, **paths))
    assert json.loads(paths["json"].read_text()) == json.loads(json.dumps(document))
    pairs = [(ratio["a"], ratio["b"]) for ratio in document["ratios"]]
    assert pairs == [("adamw, EMA in parts", "adamw, EMA"), ("muon", "muon, timm's products")]
    rows = list(csv.DictReader(paths["results"].open()))
    assert [row["unit"] for row in rows] == ["ms/update"] * 6 + ["ratio"] * 2
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


def test_products_are_ours_and_timms(model, monkeypatch):
    product = mock.Mock(side_effect=lambda a, b: a @ b.T)
    monkeypatch.setattr(optimizers, "is_faster", lambda: True)
    monkeypatch.setattr(optimizers, "LEAST_WORK", 0)
    monkeypatch.setattr(optimizers, "multiply", product)
    ours, timms = ModelUpdate("muon", model), ModelUpdate("muon", model)
    monkeypatch.setattr(muon, "zeropower_via_newtonschulz", optimizers.orthogonalize)
    ours.optimizer.step()
    assert product.called
    product.reset_mock()
    monkeypatch.setattr(muon, "zeropower_via_newtonschulz", orthogonalize_in_float32)
    timms.optimizer.step()
    assert not product.called
    # Weights change by up to 1e-4. Orthogonalized gradients differ by 1e-6, which the rate of 1e-4
    # makes 1e-10; then the new weight, below 2, is rounded to 1.2e-7.
    for a, b in zip(ours.model.parameters(), timms.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-7)


def test_muon_is_left_as_trainings_have_it():
    # With as many rounds as contestants, the last one runs with timm's function.
    main(UpdateBenchmark(model="lvvit_micro", updates=1, rounds=6, record=False))
    assert muon.zeropower_via_newtonschulz is optimizers.orthogonalize


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

"""Small runs of the engines benchmark: complete results, clear errors."""

import csv
import json

import pytest

from benchmarks import engines
from benchmarks.engines import EnginesBenchmark, main
from densefeed.system.errors import UserError

SMALL = dict(engines=("local",), images=16, shard_images=4, input_size=64, batch=4, rounds=1)


@pytest.mark.slow
def test_small_run_writes_json_and_csv(tmp_path):
    paths = {"json": tmp_path / "out.json", "results": tmp_path / "results.csv"}
    document = main(EnginesBenchmark(**SMALL, **paths))
    assert json.loads(paths["json"].read_text()) == json.loads(json.dumps(document))
    rows = list(csv.DictReader(paths["results"].open()))
    assert [row["unit"] for row in rows] == ["s", "s", "ms", "ms", "ratio", "ratio"]
    assert rows[4]["name"] == "engines local, whole command / torchrun, whole command"
    assert float(rows[4]["median"]) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "--rounds"),
        ({"engines": ("torchrun",)}, "give local, ray, or both"),
        ({"engines": ()}, "give local, ray, or both"),
        ({"images": 15}, "give at least 16"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(UserError, match=message):
        main(EnginesBenchmark(**SMALL | options))


def test_without_ray_the_error_names_the_package(monkeypatch):
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"Ray is not installed; run `pip install \"densefeed\[ray"):
        main(EnginesBenchmark(**SMALL | {"engines": ("ray",)}))


@pytest.mark.slow
def test_a_command_that_fails_is_reported(tmp_path):
    with pytest.raises(UserError, match="torchrun did not label all images"):
        engines.label(tmp_path, EnginesBenchmark(**SMALL), "", "torchrun", 4, 0)

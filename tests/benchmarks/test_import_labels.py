"""The benchmark in small: both read every file, and its numbers are those it measured."""

import csv
import json

import pytest
import torch

from benchmarks import import_labels as benchmark
from benchmarks.import_labels import OURS, PEER, Benchmark, main
from densefeed.system.errors import UserError
from densefeed.tools import import_labels


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_a_small_run_is_whole(tmp_path, monkeypatch, form):
    monkeypatch.setattr(benchmark, "CLASSES", 5)
    loaded, stores, load, imported = [], [], torch.load, import_labels.main

    def counted(file, **options):
        loaded.append(file)
        return load(file, **options)

    monkeypatch.setattr(torch, "load", counted)
    monkeypatch.setattr(
        import_labels,
        "main",
        lambda wanted: stores.append(imported(wanted)) or stores.append(wanted.out.exists()),
    )
    paths = {"json": tmp_path / "out.json", "results": tmp_path / "results.csv"}
    document = main(Benchmark(files=20, form=form, footprint="center-crop", rounds=2, **paths))
    # The peer's own calls name a path; ours learns a few layouts from what it has read already.
    assert len([file for file in loaded if str(file).endswith(".pt")]) == 3 * 20
    assert stores == [None, True] * 3
    assert json.loads(paths["json"].read_text()) == json.loads(json.dumps(document))
    (ratio,) = document["ratios"]
    assert (ratio["a"], ratio["b"]) == (OURS, PEER)
    assert 0 < ratio["p25"] <= ratio["median"] <= ratio["p75"]
    rows = list(csv.DictReader(paths["results"].open()))
    assert [row["unit"] for row in rows] == ["files/s", "files/s", "ratio"]
    assert rows[0]["data"] == f"20 files, {form}, center-crop"


@pytest.mark.parametrize(
    ("options", "said"), [({"files": 0}, "--files"), ({"threads": 0}, "--threads")]
)
def test_what_cannot_be_measured_is_said(options, said):
    with pytest.raises(UserError, match=said):
        main(Benchmark(**options))

"""Small runs of the label import benchmark: every file is read, and results are complete."""

import csv
import json

import pytest
import torch

from benchmarks import import_labels as benchmark
from benchmarks.import_labels import OURS, PEER, ImportBenchmark, main
from densefeed.system.errors import UserError
from densefeed.tools import import_labels


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_small_run_reads_every_file_and_writes_json_and_csv(tmp_path, monkeypatch, form):
    monkeypatch.setattr(benchmark, "CLASSES", 5)
    loaded, stores, load, imported = [], [], torch.load, import_labels.main

    def counted(file, **options):
        loaded.append(file)
        return load(file, **options)

    monkeypatch.setattr(torch, "load", counted)
    monkeypatch.setattr(
        import_labels,
        "main",
        lambda options: stores.append(imported(options)) or stores.append(options.out.exists()),
    )
    paths = {"json": tmp_path / "out.json", "results": tmp_path / "results.csv"}
    document = main(
        ImportBenchmark(files=20, form=form, footprint="center-crop", rounds=2, **paths)
    )
    # The peer passes a path to torch.load; ours only loads buffers, to detect a few layouts.
    assert len([file for file in loaded if str(file).endswith(".pt")]) == 3 * 20
    assert stores == [None, True] * 3
    assert json.loads(paths["json"].read_text()) == json.loads(json.dumps(document))
    (ratio,) = document["ratios"]
    assert (ratio["a"], ratio["b"]) == (OURS, PEER)
    assert 0 < ratio["p25"] <= ratio["median"] <= ratio["p75"]
    rows = list(csv.DictReader(paths["results"].open()))
    assert [row["unit"] for row in rows] == ["files/s", "files/s", "ratio"]
    assert rows[0]["data"] == f"20 files, {form}, center-crop"


@pytest.mark.parametrize("files", [5, 7, 28])
def test_fewer_files_than_classes(files):
    """The maps then name only the classes that have an image, each once in a cell."""
    document = main(ImportBenchmark(files=files, rounds=1, record=False))
    assert [row["name"] for row in document["rows"]] == [OURS, PEER]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"files": 0}, "--files"), ({"files": 4}, "at least 5"), ({"threads": 0}, "--threads")],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(UserError, match=message):
        main(ImportBenchmark(**options))

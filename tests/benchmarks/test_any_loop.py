"""A small run of the benchmark of dense labels beside a torchvision pipeline."""

import csv

import pytest

from benchmarks.any_loop import LoopBenchmark, main


@pytest.mark.slow
def test_small_run_writes_rows(tmp_path):
    results = tmp_path / "results.csv"
    options = LoopBenchmark(
        images=8, classes=8, batch=4, rounds=2, cache=tmp_path / "bench", results=results
    )
    document = main(options)
    rows = {row["name"].removeprefix("any loop "): row for row in csv.DictReader(results.open())}
    assert list(rows) == [
        *("pipeline", "pipeline with Views", "targets", "rows"),
        *("Views, added / pipeline", "targets / pipeline"),
    ]
    assert rows["rows"]["unit"] == "rows/s"
    assert float(rows["rows"]["median"]) > 0
    assert document["ratios"][1]["bar"] == "at most 0.05"
    assert "8 photographs of 500 px, maps of 18 x 18 cells, top 5 of 8" in document["data"]

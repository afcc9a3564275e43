"""Memory and start of labeling by synthetic listings, for a few images."""

import csv

import pytest

from benchmarks import label_plan
from benchmarks.label_plan import PlanBenchmark, main


@pytest.mark.slow
def test_each_case_is_measured(tmp_path, monkeypatch):
    cases = [(mode, 2, 50) for mode in ("whole", "start", "all", "last")]
    monkeypatch.setattr(label_plan, "CASES", cases)
    main(PlanBenchmark(latency=0.5, results=tmp_path / "results.csv"))
    with open(tmp_path / "results.csv") as file:
        rows = {row["name"]: float(row["median"]) for row in csv.DictReader(file)}
    assert len(rows) == 12
    # Three requests: the folders twice, and the images of one.
    assert 1.5 <= rows["start, 2 folders of 50, time"] < 3
    assert rows["all, 2 folders of 50, peak memory"] >= rows["all, 2 folders of 50, memory before"]

"""Small runs of the score map store benchmark: the same maps everywhere, complete results, clear
errors.
"""

import csv

import numpy as np
import pytest
import torch

from benchmarks.store import FORMS, StoreBenchmark, main, make_stores
from densefeed.system.errors import UserError

SMALL = dict(images=9, reads=10, batch=4, side=5, top_k=2, classes=30, palette=6, rounds=2)


def test_small_run_writes_rows(tmp_path):
    results = tmp_path / "results.csv"
    document = main(StoreBenchmark(**SMALL, results=results))
    assert len(document["ratios"]) == 6
    assert all(0 < ratio["p25"] <= ratio["median"] <= ratio["p75"] for ratio in document["ratios"])
    rows = list(csv.DictReader(results.open()))
    assert [row["unit"] for row in rows] == 5 * ["rows/s"] + 4 * ["bytes/image"] + 6 * ["ratio"]
    rates = {row["name"]: float(row["median"]) for row in rows[:5]}
    assert rates["store raw"] > 0


def test_all_contestants_read_the_same_maps(tmp_path):
    benchmark = StoreBenchmark(**SMALL)
    stores = make_stores(tmp_path, benchmark)
    raw, lossless, compact = (stores[form].rows(np.arange(9)) for form in FORMS)
    np.testing.assert_array_equal(raw.logit, lossless.logit)
    np.testing.assert_array_equal(raw.cls, compact.cls)
    for n in range(9):
        logit, cls = (
            torch.load(tmp_path / "pt" / f"{n}.pt", weights_only=True).permute(0, 2, 3, 1).numpy()
        )
        np.testing.assert_array_equal(logit, raw.logit[n])
        np.testing.assert_array_equal(cls, raw.cls[n])


def test_pt_file_has_the_published_size(tmp_path):
    """TokenLabeling's files have 8,069 bytes; torch.save's overhead differs between versions."""
    make_stores(tmp_path, StoreBenchmark(images=1))
    assert 6480 < (tmp_path / "pt" / "0.pt").stat().st_size < 8200


@pytest.mark.parametrize(
    ("options", "message"),
    [({"rounds": 0}, "--rounds"), ({"palette": 1}, "--palette"), ({"classes": 5000}, "2,049")],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(UserError, match=message):
        main(StoreBenchmark(**SMALL | options))

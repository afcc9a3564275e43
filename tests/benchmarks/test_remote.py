"""The benchmark of training from object storage: its server, its rates, a small run."""

import csv
import os

import numpy as np
import pytest

from benchmarks.remote import RemoteBenchmark, main, mean_rate, serve
from densefeed.system.errors import UserError
from densefeed.system.object_ranges import find_remote_file, read_range
from densefeed.system.object_store import ObjectURL, open_bucket

obstore = pytest.importorskip("obstore")


def test_rates_of_the_first_seconds_do_not_count():
    # Intervals of 100 images that take 1, 1, 0.5 and 0.25 s.
    rates, images = [100.0, 100.0, 200.0, 400.0], np.array([100] * 4)
    assert mean_rate(rates, images, 0) == pytest.approx(400 / 2.75)
    assert mean_rate(rates, images, 1.5) == pytest.approx(200 / 0.75)
    with pytest.raises(UserError, match="an epoch took less than --skip 3 s"):
        mean_rate(rates, images, 3)


def test_the_server_answers_ranges_as_s3_does(tmp_path, monkeypatch):
    content = np.random.default_rng(0).bytes(10_000)
    (tmp_path / "x.beton").write_bytes(content)
    with serve(tmp_path, 1, os.sched_getaffinity(0)) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        open_bucket.cache_clear()
        file = find_remote_file(ObjectURL("s3://bucket/x.beton"))
        assert file.size == 10_000
        for start, stop in ((0, 10_000), (0, 1), (9_999, 10_000), (17, 4_000)):
            assert bytes(read_range(file, start, stop)) == content[start:stop]
        with pytest.raises(UserError, match="there is no such object"):
            find_remote_file(ObjectURL("s3://bucket/y.beton"))
        assert obstore.get(open_bucket("s3://bucket"), "x.beton").bytes() == content
    open_bucket.cache_clear()


@pytest.mark.slow
def test_small_run_writes_csv(packed, tmp_path):
    small = dict(recipe="lvvit_micro_token_label", threads=(1,), batch=1, skip=0.0, rounds=1)
    results = tmp_path / "results.csv"
    document = main(RemoteBenchmark(data=packed[0], val=packed[1], results=results, **small))
    rows = list(csv.DictReader(results.open()))
    assert [row["unit"] for row in rows] == ["images/s", "images/s", "ratio"]
    assert float(rows[2]["median"]) == pytest.approx(document["ratios"][0]["median"], rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"), [({"threads": (99,)}, "--threads 99"), ({}, "make quickstart writes")]
)
def test_invalid_options_raise(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        main(RemoteBenchmark(data=tmp_path / "x.beton", val=tmp_path / "y.beton", **options))

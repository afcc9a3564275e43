"""The division of images into shards, and what a display reads of it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from densefeed.storage import shard_plan
from densefeed.storage.shard_plan import (
    PLAN,
    SHARDS,
    Status,
    measure_rate,
    measure_status,
    print_status,
    read_record,
    split_images,
)
from densefeed.system.errors import UserError
from densefeed.system.object_folder import ObjectFolder


def make_paths(count: int) -> list[str]:
    return [f"n{number // 40:04d}/{number:06d}.jpg" for number in range(count)]


@given(st.integers(0, 400), st.integers(1, 50), st.integers(0, 10**6))
def test_ranges_are_consecutive_and_bounded(count, size, start):
    paths = make_paths(start + count)[start:] if start < 1000 else make_paths(count)
    ranges = split_images(paths, size)
    assert [row for rows in ranges for row in rows] == list(range(count))
    assert all(len(rows) <= 2 * size for rows in ranges)
    assert all(len(rows) >= max(1, size // 2) for rows in ranges[:-1])


def test_the_average_shard_has_the_size_that_was_asked_for():
    count, size = 200_000, 500
    assert len(split_images(make_paths(count), size)) == pytest.approx(count / size, rel=0.1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("change", ["remove", "add"])
def test_a_changed_image_changes_few_shards(change):
    """On average the shard of the image, and a tenth of one beside it."""
    paths = make_paths(20_000)
    before = {tuple(paths[row] for row in rows) for rows in split_images(paths, 200)}
    changed = 0
    for at in range(37, 20_000, 199):
        new = list(paths)
        new[at : at + 1] = [] if change == "remove" else [paths[at], f"{paths[at]}.new.jpg"]
        after = {tuple(new[row] for row in rows) for rows in split_images(new, 200)}
        assert len(after - before) <= 6
        changed += len(after - before)
    assert changed / 101 < 1.3


def test_a_status_has_progress_rate_and_time_left():
    slow = Status(100, 25, 800_000, 203_000, 8, 64.0)
    assert slow.lines() == [
        "25 of 100 shards are finished, 203,000 of 800,000 images are labeled",
        "8 workers, 64.0 images/s, 2:35:28 left",
    ]
    assert slow._replace(rate=1000.0).lines()[1] == "8 workers, 1,000.0 images/s, 0:09:57 left"
    assert slow._replace(workers=0, rate=0.0).lines()[1] == "0 workers, 0.0 images/s"


def test_finished_shards_have_a_rate(monkeypatch):
    """Where no worker has renewed its lease yet, as for shards of a few seconds."""
    monkeypatch.setattr(shard_plan.time, "time", lambda: 1000.0)
    assert measure_rate([]) == measure_rate([(990.0, 8)]) == 0
    # The first was finished 100 s ago, and another one too long ago.
    assert measure_rate([(950.0, 40), (900.0, 30), (300.0, 7), (1000.0, 10)]) == 0.5
    assert measure_rate([(1000.0, 1), (1000.0, 1)]) > 0


def test_a_missing_or_damaged_plan_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"plan.json: there is no such file; start the labeling"):
        print_status(tmp_path)
    begun = {"header": 1, "shard_images": 1}
    for values in (
        *([], {"header": 1}, begun | {"shards": 3}, begun | {"shards": []}),
        *(begun | {"sizes": [], "shards": [["x", count]]} for count in (0, -5)),
        *(begun | {"shards": [], "sizes": sizes} for sizes in (3, [0], [[0, "x"]], [[0, [1]]])),
    ):
        (tmp_path / PLAN).write_text(json.dumps(values))
        with pytest.raises(UserError, match=r"plan.json is damaged; remove it and run .*again$"):
            measure_status(tmp_path)
    (tmp_path / PLAN).write_bytes(b"")
    with pytest.raises(UserError, match=r"plan.json is damaged"):
        measure_status(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"file": "shards/x"}'])
def test_a_damaged_record_is_one_sentence(tmp_path, content):
    objects = ObjectFolder(tmp_path)
    assert read_record(objects, "x") is None
    objects.create(f"{SHARDS}/x.json", content)
    with pytest.raises(UserError, match=r"shards/x.json is damaged; run the labeling again"):
        read_record(objects, "x")

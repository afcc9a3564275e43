"""Records: the page shows what the file holds, and a record keeps the rules of its track."""

import pytest

from benchmarks import record
from benchmarks.record import COLUMNS, FOLDER, TRACKS, Record, Training, fill_page, read_records
from densefeed.system.errors import UserError

FIVE = [Training(20 + seed, 0.9 + seed / 1000, 350_000) for seed in (3, 0, 4, 1, 2)]


def test_the_page_shows_the_records():
    """It holds nothing that `make record` did not write between its comments."""
    rows, page = read_records(FOLDER / "records.csv"), (FOLDER / "README.md").read_text()
    assert fill_page(page, rows) == page
    for row in rows:
        track = TRACKS[row["track"]]
        assert tuple(row) == COLUMNS
        assert float(row["lowest_top1"]) >= track.target
        assert int(row["parameters"]) <= track.parameters
        assert float(row["fastest_s"]) <= float(row["median_s"]) <= float(row["slowest_s"])
        assert not row["commit"].endswith("-dirty")


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A folder of records that `main` writes to, with trainings that were not run."""
    for name in ("README.md", "records.csv"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    begun = {"date": "2000-01-01 00:00", "commit": "abc", "cpu": "a CPU", "versions": "torch 9"}
    monkeypatch.setattr(record, "environment", lambda: begun)
    monkeypatch.setattr(record, "train_seed", lambda options, seed: FIVE[seed])
    monkeypatch.setattr(record, "CORES", 2)
    return tmp_path


def test_a_record_is_a_row_of_its_own_table(measured):
    rows = read_records(measured / "records.csv")
    record.main(Record(change="a wider stem"))
    *before, row = read_records(measured / "records.csv")
    assert before == rows
    known = {"track": "micro", "commit": "abc", "machine": "2 cores of a CPU", "median_s": "22.0"}
    assert row.items() >= {**known, "fastest_s": "20.0", "slowest_s": "24.0"}.items()
    page = (measured / "README.md").read_text()
    line = "| abc | a wider stem | 22.0 s | 20.0 to 24.0 s | 90.00 % | 350,000 | 2 cores of a CPU |"
    assert line in page.partition("<!-- end of micro -->")[0]
    assert page.count("abc") == 1


def test_without_a_change_nothing_is_written(measured, capsys):
    before = {path: path.read_bytes() for path in measured.iterdir()}
    record.main(Record())
    assert "median 22.0 s" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in measured.iterdir()} == before


@pytest.mark.parametrize(
    ("training", "reason"),
    [
        (Training(1, 0.89999, 1), "a seed reached 89.999 % and not 90 %; train longer"),
        (Training(1, 1.0, 600_001), "has 600,001 parameters and may have 600,000"),
    ],
)
def test_what_breaks_a_rule_is_no_record(measured, monkeypatch, training, reason):
    monkeypatch.setattr(record, "train_seed", lambda options, seed: [*FIVE[:4], training][seed])
    before = (measured / "records.csv").read_bytes()
    with pytest.raises(UserError, match=reason):
        record.main(Record(change="too much"))
    assert (measured / "records.csv").read_bytes() == before


def test_a_record_is_a_commit_on_its_machine(measured, monkeypatch):
    with pytest.raises(UserError, match=r"runs on one H100; this machine has no GPU"):
        record.main(Record(track="imagenet", data=measured, val=measured))
    monkeypatch.setattr(record, "CORES", 1)
    with pytest.raises(UserError, match="runs on two cores"):
        record.main(Record())
    dirty = {**record.environment(), "commit": "abc-dirty"}
    monkeypatch.setattr(record, "environment", lambda: dirty)
    with pytest.raises(UserError, match="a record is a commit; commit your changes"):
        record.main(Record(change="not yet"))


@pytest.mark.parametrize("words", [{"track": "imagenet"}, {"data": FOLDER}])
def test_only_imagenet_takes_data(words):
    with pytest.raises(UserError, match="--data and --val are the sets of --track imagenet"):
        Record(**words)

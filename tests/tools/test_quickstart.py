"""The quickstart reads the results of finished steps, which may be damaged, and prints its paths.

tests/test_readme.py runs the whole flow.
"""

import json
import sys

import pytest

from densefeed.recipes.flow import run_command
from densefeed.system.errors import UserError
from densefeed.tools import ablations
from densefeed.tools.ablations import Ablations
from densefeed.tools.quickstart import LABELS, PARTS, Quickstart, main

PURITY = {kind: dict.fromkeys(PARTS, 0.25) for kind in LABELS}


def make_flow(out):
    """Make the files of a finished flow with two students, `ce` and `relabel`."""
    (out / "scenes").mkdir(parents=True)
    for name in ("maps.h5", "train.beton", "val.beton", "report.html"):
        (out / name).touch()
    (out / "report.json").write_text(json.dumps(PURITY))
    for name in ("teacher", "ce", "relabel"):
        (out / "runs" / name).mkdir(parents=True)
        (out / "runs" / name / "result.json").write_text('{"top1": 0.5}')


@pytest.fixture
def flow(tmp_path):
    """The options of a finished flow."""
    make_flow(tmp_path / "flow")
    return Quickstart(out=tmp_path / "flow", students=("ce", "relabel"))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "Expecting value"),
        *(
            (b'{"top1": %s}' % value, "top1 is not a number from 0 to 1")
            for value in (b"null", b'"0.5"', b"[0.5]", b"true", b"1e308", b"-0.1")
        ),
        (b"{}", "top1 is not a number from 0 to 1"),
    ],
)
def test_a_damaged_result_of_a_finished_run_is_named(flow, content, fault):
    path = flow.out / "runs/ce/result.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{path} is damaged \(.*\); remove it, and run") as error:
        main(flow)
    assert fault in str(error.value)
    seed = flow.out.rename(flow.out.with_name("seed-0"))
    (seed / "rows").mkdir()
    (seed / "runs/ce").rename(seed / "rows/ce")
    with pytest.raises(UserError, match=rf"^{seed}/rows/ce/result.json is damaged \("):
        ablations.main(Ablations(out=seed.parent, rows=("ce",)))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "Expecting value"),
        ("{}", "image.all is not a number from 0 to 1"),
        (json.dumps(PURITY | {"token": 1}), "token.all is not a number from 0 to 1"),
        (json.dumps(PURITY | {"token": {"all": 0.5}}), "token.largest is not a number from 0 to 1"),
        (json.dumps(PURITY | {"token": dict.fromkeys(PARTS, 1e308)}), "token.all is not a number"),
        (json.dumps(PURITY | {"token": dict.fromkeys(PARTS)}), "token.all is not a number"),
    ],
)
def test_damaged_shares_of_correct_labels_are_named(flow, content, fault):
    path = flow.out / "report.json"
    path.write_text(content)
    remedy = "remove it and report.html, and run the same command again"
    with pytest.raises(UserError, match=rf"^{path} is damaged \(.*\); {remedy}$") as error:
        main(flow)
    assert fault in str(error.value)


@pytest.mark.parametrize("name", ["x[/b]", "[red]x", ":smiley:", "x" * 120])
def test_the_path_of_the_report_is_printed_as_it_is(tmp_path, capsys, name):
    make_flow(tmp_path / name)
    main(Quickstart(out=tmp_path / name, students=("ce", "relabel")))
    printed = capsys.readouterr().out
    assert printed.endswith(f"Open the report in a browser: {tmp_path / name}/report.html\n")
    assert "50.0 %" in printed
    assert "25.0 %" in printed


def test_a_flow_without_dense_labels_has_no_shares_of_correct_ones(tmp_path, capsys):
    """The report with true boxes refused such runs, after all trainings."""
    make_flow(tmp_path)
    (tmp_path / "report.json").unlink()
    main(Quickstart(out=tmp_path, students=("ce",)))
    printed = capsys.readouterr().out
    assert "50.0 %" in printed
    assert "Correct labels" not in printed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(students=()), "--students names no student; give at least one"),
        (dict(students=("ce", "ce")), "--students names a student twice; give each once"),
        (dict(seeds=(0, 1, 0)), "--seeds names a seed twice; give each once"),
    ],
)
def test_students_and_seeds_are_named_once(tmp_path, fields, message):
    with pytest.raises(UserError, match=f"^{message}$"):
        main(Quickstart(out=tmp_path / "flow", **fields))
    assert not (tmp_path / "flow").exists()


def test_commands_run_in_processes_of_their_own(capfd, monkeypatch):
    """With their own arguments, output and exit code; this process keeps its own arguments."""
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert run_command(["scenes", "--help"]) == 0
    assert "--out" in capfd.readouterr().out
    assert run_command(["scenes", "--out", "x", "--train", "9"]) == 2
    assert "--train" in capfd.readouterr().err
    assert sys.argv == ["pytest"]

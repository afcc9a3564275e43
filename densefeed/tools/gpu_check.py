"""Run the tests that need a CUDA device, then measure there, and compare with the goals.

    python tools/gpu_check.py
    python tools/gpu_check.py --seconds 570 --out gpu-check
    python tools/gpu_check.py --only step-lvvit-s teacher --device cpu --small

Each stage is a process with a time limit of its own, and the next one runs whether it fails or not.
Its result is saved at once; run again, the command resumes with the stages that are missing, then
with those that failed. Nothing is installed or downloaded. The folder --out gets results.json (of
every stage its state, seconds and rows), results.csv (rows for benchmarks/results.csv) and log.txt.
Without a .git folder, the environment variable DENSEFEED_COMMIT names the commit.
"""

if not __package__:
    import script_start  # noqa: F401

import csv
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from rich.table import Table

from densefeed.recipes.method_costs import METHOD_COSTS
from densefeed.system.devices import choose_device
from densefeed.system.errors import UserError, make_command
from densefeed.system.json_files import read_json
from densefeed.system.options import Count, Options
from densefeed.system.provenance import ROOT, commit, environment, write_json
from densefeed.system.terminal import escape_controls, print, print_table

# Seconds that must be left for a stage: PyTorch alone takes several to import.
LEAST = 20
# Lines of the output that are printed below the table for a stage that failed.
TAIL = 3


class Goal(NamedTuple):
    """What a row of a stage should reach."""

    name: str  # of the row in results.csv
    value: float
    more: bool = True  # whether more is better


class Stage(NamedTuple):
    """A command in a process of its own."""

    name: str
    limit: int  # seconds
    words: str  # after `python -m`
    small: str  # what --small adds: sizes for a CPU
    goals: tuple[Goal, ...] = ()


# Sizes of steps and loaders on a CPU.
SMALL_STEP = (
    "--model lvvit_micro --size 64 --batch 4 --classes 10 --steps 1 --rounds 1 --modes eager"
)
SMALL_LOADERS = "--loaders ffcv+labels,folder --images 16 --rounds 1 --threads 1"
# Ratios of steps and targets are the bars of their benchmarks. A benchmark writes its rows at its
# end, and before compiles three networks in each mode: on two cores with other work beside it,
# `compiled` took 196 s for LV-ViT-S, `whole` and `captured` together 386 s.
STAGES = (
    # Six processes took 111 s on an H200, most of it compilation.
    Stage("tests", 300, "pytest -q -m gpu -n 6 --dist worksteal", "--co"),
    Stage(
        "step-lvvit-s",
        240,
        "benchmarks.step --objective token-label --batch 256 --modes eager compiled",
        SMALL_STEP,
        (Goal("step ours+labels, compiled", 8000), Goal("step ours+labels / ours, compiled", 0.97)),
    ),
    Stage(
        "augmentation",
        60,
        "benchmarks.augment --batch 256",
        "--batch 4 --batches 1 --size 32 --rounds 1",
        # 3 % of a step at 8,000 images per second.
        (Goal("augment+normalize+erase, GPU alone", 0.00375, more=False),),
    ),
    Stage(
        "step-lvvit-s-captured",
        360,
        "benchmarks.step --objective token-label --batch 256 --modes whole captured",
        SMALL_STEP,
        (Goal("step ours+labels, captured", 8000),),
    ),
    Stage(
        "step-loader",
        240,
        "benchmarks.step --loader ffcv --objective token-label --batch 256 --steps 32 --rounds 5 "
        "--modes compiled",
        SMALL_STEP,
        (Goal("step ours+labels+loader / ours+labels, compiled", 0.97),),
    ),
    Stage(
        "step-deit-s",
        240,
        "benchmarks.step --model lvvit_deit_s --objective token-label --batch 256",
        SMALL_STEP,
        (Goal("step ours+labels, compiled", 12000),),
    ),
    Stage(
        "teacher",
        300,
        "benchmarks.relabel --teacher dm_nfnet_f6 --input-size 576 --batch 128 --images 1024 "
        "--rounds 1 --compile --precision bf16 --threads 8 --no-stand-in",
        "--teacher nfnet_micro --input-size 64 --batch 4 --images 8 --classes 5 --threads 1 "
        "--no-compile --precision fp32",
        (Goal("relabel teacher", 430),),
    ),
    # Below the goal, remove training/mixed_linear.py, which serves `--compile blocks` alone.
    Stage(
        "step-casts",
        240,
        "benchmarks.step --batch 256 --casts --modes compiled",
        SMALL_STEP,
        (Goal("step ours / ours+casts, compiled", 1.02),),
    ),
    Stage(
        "targets",
        60,
        "benchmarks.targets",
        "--batch 4 --classes 30 --rounds 1",
        (
            Goal("targets sparse / dense, time", 1 / 15, more=False),
            Goal("targets sparse / dense, memory", 1 / 20, more=False),
        ),
    ),
    Stage(
        "fused-head",
        60,
        "benchmarks.targets --compare head --batch 64 --classes 21841",
        "--batch 2 --classes 50 --rounds 1",
        (Goal("targets fused / whole, memory", 1 / 20, more=False),),
    ),
    *(
        Stage(
            f"step-{cost.name}",
            360,
            f"benchmarks.step --model {cost.model} --variants {cost.variant} --batch {cost.batch}",
            f"{SMALL_STEP} {cost.small}",
            (Goal(f"step ours+{cost.variant} / {cost.beside}, compiled", cost.goal),),
        )
        for cost in METHOD_COSTS
    ),
    Stage(
        "loaders",
        120,
        "benchmarks.loaders --loaders ffcv+labels,folder+labels --rounds 3",
        SMALL_LOADERS,
    ),
    # Apart, because it fails where DALI's decoder does.
    Stage(
        "loaders-dali",
        120,
        "benchmarks.loaders --rounds 3 "
        "--loaders ffcv+labels,dali-gpu+labels,dali-gpu,nvidia-dali-gpu",
        SMALL_LOADERS,
    ),
)
NAMES = tuple(stage.name for stage in STAGES)


@dataclass(frozen=True, kw_only=True)
class GpuCheck(Options):
    """What to run, and where the results go."""

    out: Path = Path("gpu-check")  # folder of the results
    seconds: Count = 570  # begin no stage, and stop the running one, after this time
    only: tuple[str, ...] = ()  # stages to run, by name; default: all
    device: Literal["cuda", "cpu"] = "cuda"  # where to measure
    small: bool = False  # sizes for a CPU: shows that every stage runs, measures nothing of use

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.only:
            if name not in NAMES:
                raise UserError(f"--only {name} is not a stage; choose of {', '.join(NAMES)}")


def main(check: GpuCheck) -> None:
    """Run the stages, print the table, and exit with 1 if one failed or is missing."""
    if not (ROOT / "benchmarks").is_dir():
        raise UserError("there is no folder benchmarks beside the package; run this in a checkout")
    choose_device(check.device)
    make_folder(check.out)
    results = load_results(check)
    began = time.monotonic()
    # A stage that fails each time must not take the time of those that were never begun.
    for stage in sorted(STAGES, key=lambda stage: stage.name in results["stages"]):
        if check.only and stage.name not in check.only:
            continue
        if results["stages"].get(stage.name, {}).get("state") == "done":
            print(f"{stage.name}: done before; skipped")
            continue
        left = check.seconds - (time.monotonic() - began)
        if left < LEAST:
            print(f"{stage.name}: {left:.0f} s are left; run the same command again to continue")
            break
        results["stages"][stage.name] = run_stage(stage, check, min(stage.limit, left))
        write_json(check.out / "results.json", results)
    show(results)
    wanted = check.only or NAMES
    if any(results["stages"].get(name, {}).get("state") != "done" for name in wanted):
        sys.exit(1)


def make_folder(out: Path) -> None:
    """Make the folder of the results, which git ignores if it was not there or empty."""
    out.mkdir(parents=True, exist_ok=True)
    # Otherwise these files would make a checkout dirty: the rows would name another commit than the
    # results, and the next call would not resume.
    if not any(out.iterdir()):
        (out / ".gitignore").write_text("*\n")


def load_results(check: GpuCheck) -> dict:
    """Return the results of an earlier call of the same commit, device and sizes, or none yet."""
    fresh = {
        "kind": "gpu-check",
        "commit": commit(),
        "device": check.device,
        "small": check.small,
        "environment": environment(("torch", "triton", "timm")),
        "stages": {},
    }
    path = check.out / "results.json"
    if not path.exists():
        return fresh
    found = read_json(path, "remove it, or choose another --out")
    same = ("kind", "commit", "device", "small")
    if any(found.get(name) != fresh[name] for name in same):
        raise UserError(
            f"{path} holds results of another commit, device or size; choose another --out"
        )
    return found


def run_stage(stage: Stage, check: GpuCheck, seconds: float) -> dict:
    """Run a stage for at most `seconds`; return its state, seconds, rows and last lines."""
    words = [sys.executable, "-m", *stage.words.split()]
    words += stage.small.split() if check.small else []
    print(f"{stage.name}: {' '.join(words[1:])}", flush=True)
    rows, out = check.out / "results.csv", check.out.resolve()
    before = len(read_rows(rows))
    if stage.name != "tests":
        words += ["--results", str(out / rows.name)]
        # A loader's name says where it decodes.
        is_loader = "benchmarks.loaders" in words
        words += [] if is_loader else ["--device", check.device]
        # Not the folder of generated files that another run may be filling.
        generates = is_loader or "--loader" in words
        words += ["--cache", str(out / "cache")] if generates and check.small else []
    began = time.monotonic()
    state, text = run_limited(words, seconds)
    with (check.out / "log.txt").open("a", errors="replace") as log:
        log.write(f"$ {' '.join(words[1:])}\n{text}\n{state}\n\n")
    kept = "name", "median", "p25", "p75", "unit"
    return {
        "state": state,
        "seconds": round(time.monotonic() - began, 1),
        "rows": [{key: row[key] for key in kept} for row in read_rows(rows)[before:]],
        "last": text.splitlines()[-TAIL:] if state != "done" else [],
    }


def run_limited(words: list[str], seconds: float) -> tuple[str, str]:
    """Run a command and its children for at most `seconds`; return its state and its output."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        child = subprocess.Popen(
            words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = child.wait(seconds)
            state = "done" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            state = f"stopped after {seconds:.0f} s"
        finally:
            # Loaders have processes of their own.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        return state, output.read()


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of a results file, of which there may be none yet."""
    return list(csv.DictReader(path.open())) if path.exists() else []


def show(results: dict) -> None:
    """Print every stage and its goals beside what was measured."""
    title = f"Commit {results['commit']}, device {results['device']}"
    table = Table(title=title, title_justify="left")
    for column in ("stage", "state", "row", "measured", "goal", "met"):
        table.add_column(column, justify="right" if column in ("measured", "goal") else "left")
    for stage in STAGES:
        found = results["stages"].get(stage.name)
        state = f"{found['state']}, {found['seconds']:.0f} s" if found else "missing"
        values = {row["name"]: row for row in found["rows"]} if found else {}
        table.add_row(stage.name, escape_controls(state), *[""] * 4)
        for goal in stage.goals:
            table.add_row("", "", goal.name, *compare(goal, values.get(goal.name)))
    print_table(table, least_width=120)
    for name, found in results["stages"].items():
        for line in found["last"]:
            print(f"{name}: {line}")


def compare(goal: Goal, row: dict | None) -> tuple[str, str, str]:
    """Return a measured value, its goal, and whether it is met, as text."""
    wanted = f"{'at least' if goal.more else 'at most'} {round_to_4(goal.value)}"
    if row is None:
        return "", wanted, ""
    value = float(row["median"])
    met = value >= goal.value if goal.more else value <= goal.value
    return f"{round_to_4(value)} {row['unit']}", wanted, "yes" if met else "no"


def round_to_4(value: float) -> str:
    """Write a number with four digits, or as an integer."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


# SIGTERM as of `timeout`: the running stage, which has a session of its own, would otherwise go on
# beside the next measurement.
command = make_command(main, GpuCheck, __doc__, sigterm=True)


if __name__ == "__main__":
    command()

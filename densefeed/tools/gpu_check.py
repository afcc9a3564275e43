"""Run the tests that need a CUDA device, then measure there, and compare with the goals.

    python tools/gpu_check.py
    python tools/gpu_check.py --only steps --out gpu-check
    python tools/gpu_check.py --only photographs --pictures pictures --work work
    python tools/gpu_check.py --only step-captured teacher --device cpu --small

Each stage is a process with a time limit of its own, and the next one runs whether it fails or not.
Its result is saved at once; run again, the command resumes with the stages that are missing, then
with those that failed. Nothing is downloaded. The folder --out gets results.json (of every stage
its state, seconds and rows), results.csv (rows for benchmarks/results.csv), log.txt, and
curves.jsonl (the logs of all trainings); data and runs go to --work. Without a .git folder, the
environment variable DENSEFEED_COMMIT names the commit.

--only takes stages and groups of stages. Three groups are half an hour on a GPU, each below ten
minutes, and at most 25 in all where the files of --quickstart are there: `steps` (kernels and the
captured step, in several forms), `recipes` (the loader, a whole recipe, four ways of compiling) and
`options` (DeiT-S, options that few use, tests). `photographs` trains LV-ViT-S on photo scenes that
it makes of --pictures: a folder with cutouts/CLASS/*.png, backgrounds/ and class_map.csv, see
densefeed photo-scenes and densefeed label. `dali` measures DALI on the GPU, installed in --work
from --wheels, if given: a folder with the pieces of a tar file of wheels, in the order of their
names. `levers` measures the captured step with each of the forms of layers that are under test
(densefeed/models/kernels/levers.py). `goals` has all others.

The trainings of `recipes` and `options` read train.beton and val.beton of --quickstart, where
densefeed quickstart makes them if they are missing.
"""

if not __package__:
    import script_start  # noqa: F401

import csv
import lzma
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from rich.table import Table

from densefeed.models.kernels.levers import LEVERS
from densefeed.recipes.method_costs import METHOD_COSTS
from densefeed.system.devices import choose_device
from densefeed.system.errors import UserError, make_command
from densefeed.system.json_files import read_json
from densefeed.system.options import Count, Options
from densefeed.system.provenance import ROOT, commit, environment, write_json
from densefeed.system.terminal import escape_controls, print, print_table

# Seconds that must be left for a stage: PyTorch alone takes several to import.
LEAST = 20
# Folder of packages that a stage installs, in --work.
SITE = "installed"
# Modules of stages that write no rows.
NO_BENCHMARKS = "densefeed", "pip", "pytest"
# Lines of the output that are printed below the table for a stage that failed.
TAIL = 3


class Goal(NamedTuple):
    """What a row of a stage should reach."""

    name: str  # of the row in results.csv
    value: float
    more: bool = True  # whether more is better


class Stage(NamedTuple):
    """A command in a process of its own.

    Its words may name folders and files of `list_places` in braces.
    """

    name: str
    limit: int  # seconds
    words: str  # after `python -m`
    small: str  # what --small adds: sizes for a CPU
    goals: tuple[Goal, ...] = ()
    group: str = "goals"
    settings: str = ""  # environment variables, NAME=VALUE
    needs: str = ""  # an option, without which the stage is left out
    makes: str = ""  # a file that another call, or a person, may have made


# Sizes of steps, loaders and trainings on a CPU.
SMALL_STEP = (
    "--model lvvit_micro --size 64 --batch 4 --classes 10 --steps 1 --rounds 1 --modes eager"
)
SMALL_LOADERS = "--loaders ffcv+labels,folder --images 16 --rounds 1 --threads 1"
SMALL_TRAININGS = "size=32,batch=4,microbatch=0,epochs=1,warmup_epochs=0,threads=1"
# The generated photographs of the stages `step-loader` and `recipe`: their number and classes.
PHOTOGRAPHS, SMALL_PHOTOGRAPHS = "photographs-8192-1000", "photographs-4-4"
# One contestant, which is compiled alone.
STEP = "benchmarks.step --objective token-label --batch 256 --rounds 5 --only ours+labels "
CAPTURED = (Goal("step ours+labels, captured", 8000),)
TRAININGS = "benchmarks.trainings --out {work}/runs --curves {out}/curves.jsonl "
RECIPE = "lvvit_s_224_token_label"
MICRO, STUDENT = "lvvit_micro_token_label", "photos_token_label"


def equal(name: str) -> Goal:
    """Return the goal of a training's last loss: within 1 % of the first training's."""
    return Goal(f"training {name}, loss's difference", 0.01, more=False)


# In the order of calls on a machine that is lent for minutes.
STEPS = (
    Stage(
        "kernels",
        120,
        "benchmarks.kernels",
        "--model lvvit_micro --batch 2 --size 32 --classes 10 --calls 1 --rounds 1 --side 64 "
        "--threads 1",
        # 0.33 ms for each of 16 blocks: below it the lever `attention` stays.
        (Goal("kernel packed attention, both passes", 16 * 0.33, more=False),),
    ),
    Stage("step-captured", 75, STEP + "--modes captured", SMALL_STEP, CAPTURED),
    Stage(
        "step-half-residual",
        75,
        STEP + "--modes captured --half-residual",
        SMALL_STEP + " --precision bf16",
        CAPTURED,
    ),
    # Settings of the compiler: bytes of fused kernels, and Triton's products beside cuBLAS's.
    Stage(
        "step-tuned",
        110,
        STEP + "--modes captured",
        SMALL_STEP,
        CAPTURED,
        settings="TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1",
    ),
    Stage(
        "step-autotuned",
        165,
        STEP + "--modes captured",
        SMALL_STEP,
        CAPTURED,
        settings="TORCHINDUCTOR_MAX_AUTOTUNE_GEMM=1",
    ),
)
RECIPES = (
    Stage(
        "step-loader",
        140,
        STEP + "ours+labels+loader --loader ffcv --steps 32 --modes compiled",
        SMALL_STEP,
        (Goal("step ours+labels+loader / ours+labels, compiled", 0.97),),
    ),
    # 12 epochs, batches of 1,024, MixToken, drop-path, RandAugment, EMA, CUDA graphs.
    Stage(
        "recipe",
        200,
        TRAININGS + "--data {photographs} --val {photographs} --dry-run --equal "
        "--options epochs=12,warmup_epochs=1,log_every=8,eval_every=6,compile=graph "
        f"--trainings {RECIPE} {RECIPE},maps_on_device=True",
        f"--options {SMALL_TRAININGS},compile=never,model=lvvit_micro,lr=1e-4",
        (
            # As a step at 8,000, with a loader at 0.97 of that.
            Goal(f"training {RECIPE}, speed", 7760),
            Goal(f"training {RECIPE}, dry run's / peak memory", 0.9),
            Goal(f"training {RECIPE}, dry run's / peak memory", 1.1, more=False),
            equal(f"{RECIPE},maps_on_device=True"),
        ),
    ),
    Stage(
        "quickstart",
        150,
        "densefeed quickstart --out {quickstart} --students token-label",
        "--train 60 --val 20 --epochs 1",
        makes="{quickstart}/val.beton",
    ),
    Stage(
        "compile",
        170,
        TRAININGS + "--data {quickstart}/train.beton --val {quickstart}/val.beton --equal "
        f"--trainings {MICRO},compile=never {MICRO},compile=blocks {MICRO},compile=whole "
        f"{MICRO},compile=graph {MICRO},compile=never,device=cpu",
        f"--options {SMALL_TRAININGS} --trainings {MICRO},compile=never "
        f"{MICRO},compile=never,device=cpu",
        (
            *map(equal, (f"{MICRO},compile={how}" for how in ("blocks", "whole", "graph"))),
            equal(f"{MICRO},compile=never,device=cpu"),
            Goal(f"training {MICRO},compile=never,device=cpu, top-1's difference", 0.02, False),
        ),
    ),
)
OPTIONS = (
    Stage(
        "step-deit-s",
        75,
        STEP + "--model lvvit_deit_s --modes captured",
        SMALL_STEP,
        (Goal("step ours+labels, captured", 12000),),
    ),
    Stage(
        "options",
        190,
        TRAININGS + "--data {quickstart}/train.beton --val {quickstart}/val.beton "
        f"--options epochs=2 --trainings {MICRO},sam_rho=0.1 {MICRO},model_kwargs=fused_head=True "
        f"'{MICRO},multi_scale=48 64 80,compile=graph' lvvit_micro_drloc "
        "bootstrapping_micro_joint",
        f"--options {SMALL_TRAININGS} --trainings {MICRO},sam_rho=0.1 "
        f"{MICRO},model_kwargs=fused_head=True '{MICRO},multi_scale=32 48' lvvit_micro_drloc "
        "bootstrapping_micro_joint",
    ),
    Stage("nvjpeg", 35, "benchmarks.loaders --loaders nvjpeg-full,ffcv --rounds 3", SMALL_LOADERS),
    # Six processes took 111 s on an H200, most of it compilation.
    Stage("tests", 140, "pytest -q -m gpu -n 8 --dist worksteal", "--co"),
)
ON_SCENES = (
    Stage(
        "scenes",
        100,
        "densefeed photo-scenes --out {work}/scenes --cutouts {pictures}/cutouts "
        "--backgrounds {pictures}/backgrounds --hold-out 0.2 --held-out 0 "
        "--train 9000 --val 1500 --width 480 --height 360",
        "--train 12 --val 6 --width 160 --height 120",
        needs="pictures",
        makes="{work}/scenes",
    ),
    # The teacher was trained at 260 pixels. Of 120 such scenes its maps name the label in 83 % at
    # 320 pixels, in 72 % at 416, and in 33 % at 576.
    Stage(
        "scene-labels",
        90,
        "densefeed label --data {work}/scenes --teacher densefeed.models.efficientnet_lite:lite2 "
        "--input-size 320 --class-map {pictures}/class_map.csv --top-k 5 --out {work}/maps.h5 "
        "--device {device}",
        "--input-size 64 --batch 4 --threads 1",
        needs="pictures",
        makes="{work}/maps.h5",
    ),
    Stage(
        "scene-pack",
        40,
        "densefeed pack --data {work}/scenes --maps {work}/maps.h5 --out {work}/train.beton",
        "--threads 1",
        needs="pictures",
        makes="{work}/train.beton",
    ),
    Stage(
        "scene-pack-val",
        20,
        "densefeed pack --data {work}/scenes --split val --out {work}/val.beton",
        "--threads 1",
        needs="pictures",
        makes="{work}/val.beton",
    ),
    # Equal steps; only the labels differ.
    Stage(
        "scene-students",
        330,
        TRAININGS + "--data {work}/train.beton --val {work}/val.beton "
        "--options model=lvvit_s,model_kwargs=,size=224,sizes=,optimizer=adamw,batch=256,lr=1e-3,"
        "lr_batch=256,epochs=45,warmup_epochs=5,drop_path=0.1,eval_every=5,compile=graph "
        f"--trainings photos_ce {STUDENT} {STUDENT}_published",
        f"--options {SMALL_TRAININGS},sizes=",
        needs="pictures",
    ),
)
DALI = (
    Stage(
        "dali-install",
        60,
        f"pip install -q --no-index --no-deps --no-cache-dir --target {{work}}/{SITE} {{wheels}}",
        "",
        needs="wheels",
    ),
    Stage("dali-tests", 120, "pytest -q -m 'gpu and dali'", "--co"),
    # It fails where DALI's decoder does.
    Stage(
        "loaders-dali",
        180,
        "benchmarks.loaders --rounds 3 --threads 4 16 "
        "--loaders ffcv+labels,dali-gpu+labels,dali-gpu,nvidia-dali-gpu",
        SMALL_LOADERS,
    ),
)
# Ratios of steps and targets are the bars of their benchmarks. A benchmark writes its rows at its
# end, and before compiles three networks in each mode: on two cores with other work beside it,
# `compiled` took 196 s for LV-ViT-S, `whole` and `captured` together 386 s.
OTHERS = (
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
)
# Each by itself, beside `step-captured`: what is not faster is to be removed.
WITH_LEVERS = (
    *(
        Stage(f"lever-{name}", 90, STEP + f"--modes captured --levers {name}", SMALL_STEP, CAPTURED)
        for name in LEVERS
    ),
    Stage(
        "levers",
        110,
        STEP + f"--modes captured --half-residual --levers {' '.join(LEVERS)}",
        SMALL_STEP + " --precision bf16",
        CAPTURED,
    ),
)
GROUPS = {
    "steps": STEPS,
    "recipes": RECIPES,
    "options": OPTIONS,
    "photographs": ON_SCENES,
    "dali": DALI,
    "levers": WITH_LEVERS,
    "goals": OTHERS,
}
STAGES = tuple(stage._replace(group=group) for group, stages in GROUPS.items() for stage in stages)
NAMES = tuple(stage.name for stage in STAGES)


@dataclass(frozen=True, kw_only=True)
class GpuCheck(Options):
    """What to run, and where the results go."""

    out: Path = Path("gpu-check")  # folder of the results
    work: Path | None = None  # folder of data and runs; default: work in --out
    seconds: Count = 570  # begin no stage, and stop the running one, after this time
    only: tuple[str, ...] = ()  # stages and groups of stages to run, by name; default: all
    device: Literal["cuda", "cpu"] = "cuda"  # where to measure
    small: bool = False  # sizes for a CPU: shows that every stage runs, measures nothing of use
    # folder of densefeed quickstart, of which two files are read; default: quickstart in --work
    quickstart: Path | None = None
    pictures: Path | None = None  # folder with cutouts, backgrounds and class_map.csv
    wheels: Path | None = None  # folder with the pieces of a tar file of DALI's wheels

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.only:
            if name not in (*NAMES, *GROUPS):
                raise UserError(
                    f"--only {name} is not a stage; choose of the groups {', '.join(GROUPS)}, or "
                    f"of {', '.join(NAMES)}"
                )
            stages = [stage for stage in STAGES if name in (stage.name, stage.group)]
            if stages and not any(map(self._can_run, stages)):
                raise UserError(f"--only {name} needs --{stages[0].needs}; give that folder")
        for name in ("quickstart", "pictures", "wheels"):
            folder = getattr(self, name)
            if folder is not None and not folder.is_dir():
                raise UserError(f"--{name} {folder} is not a folder; give one, or leave it out")

    def chooses(self, stage: Stage) -> bool:
        """Return whether a stage is to run: it was named, or makes what such a stage reads."""
        named = not self.only or {stage.name, stage.group} & {*self.only}
        needed = stage.makes and any(
            stage.makes in one.words and self.chooses(one) for one in STAGES if one is not stage
        )
        return bool(named or needed) and self._can_run(stage)

    def _can_run(self, stage: Stage) -> bool:
        """Return whether a stage has the folder that it needs."""
        return not stage.needs or getattr(self, stage.needs) is not None


def main(check: GpuCheck) -> None:
    """Run the stages, print the table, and exit with 1 if one failed or is missing."""
    if not (ROOT / "benchmarks").is_dir():
        raise UserError("there is no folder benchmarks beside the package; run this in a checkout")
    choose_device(check.device)
    make_folder(check.out)
    results = load_results(check)
    began = time.monotonic()
    # A stage that fails each time must not take the time of those that were never begun.
    chosen = list(filter(check.chooses, STAGES))
    for stage in sorted(chosen, key=lambda stage: stage.name in results["stages"]):
        before = results["stages"].get(stage.name, {})
        if before.get("state") == "done":
            print(f"{stage.name}: done before; skipped")
            continue
        left = check.seconds - (time.monotonic() - began)
        if left < LEAST:
            print(f"{stage.name}: {left:.0f} s are left; run the same command again to continue")
            break
        found = run_stage(stage, check, min(stage.limit, left))
        # Trainings that ended before their stage was stopped are not repeated.
        found["rows"] = before.get("rows", []) + found["rows"]
        results["stages"][stage.name] = found
        write_json(check.out / "results.json", results)
    show(results, check)
    if any(results["stages"].get(one.name, {}).get("state") != "done" for one in chosen):
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


def list_places(check: GpuCheck) -> dict[str, str]:
    """Return the folders and files that stages name, absolute: a stage runs in the checkout."""
    out = check.out.resolve()
    work = check.work.resolve() if check.work else out / "work"
    # Not the folder of generated files that another run may be filling.
    cache = work / "cache" if check.small else ROOT / "bench"
    photographs = SMALL_PHOTOGRAPHS if check.small else PHOTOGRAPHS
    places = {"out": out, "work": work, "cache": cache}
    places["photographs"] = cache / photographs / "train.beton"
    places["quickstart"] = (check.quickstart or work / "quickstart").resolve()
    places["pictures"] = (check.pictures or work / "pictures").resolve()
    return {name: str(path) for name, path in places.items()} | {"device": check.device}


def list_words(stage: Stage, check: GpuCheck, places: dict[str, str]) -> list[str]:
    """Return the words of a stage after `python -m`."""
    words = shlex.split(f"{stage.words} {stage.small if check.small else ''}")
    found: list[str] = []
    for word in words:
        if word == "{wheels}":
            # pip leaves what is there, perhaps a part of a package, as it is.
            shutil.rmtree(Path(places["work"], SITE), ignore_errors=True)
            found += unpack_wheels(check.wheels, Path(places["work"], "wheels"))
        else:
            found.append(word.format(**places))
    module = found[0]
    if module in NO_BENCHMARKS:
        return found
    found += ["--results", f"{places['out']}/results.csv"]
    if module == "benchmarks.loaders" or "--loader" in found:
        found += ["--cache", places["cache"]]
    # A loader's name says where it decodes.
    return found if module == "benchmarks.loaders" else [*found, "--device", check.device]


def unpack_wheels(pieces: Path, to: Path) -> list[str]:
    """Unpack a tar file that lies in pieces, in the order of their names; return its wheels."""
    with tempfile.TemporaryFile() as whole:
        for piece in sorted(pieces.iterdir()):
            with piece.open("rb") as part:
                shutil.copyfileobj(part, whole)
        whole.seek(0)
        try:
            with tarfile.open(fileobj=whole) as archive:
                archive.extractall(to, filter="data")
        # A piece is missing, or is of another file.
        except (tarfile.TarError, EOFError, OSError, lzma.LZMAError) as error:
            raise UserError(
                f"--wheels {pieces}: its files are not the pieces of a tar file ({error}); give a "
                "folder with all of them and nothing else"
            ) from error
    return sorted(map(str, to.rglob("*.whl")))


def run_stage(stage: Stage, check: GpuCheck, seconds: float) -> dict:
    """Run a stage for at most `seconds`; return its state, seconds, rows and last lines."""
    places = list_places(check)
    if stage.makes and Path(stage.makes.format(**places)).exists():
        print(f"{stage.name}: {stage.makes.format(**places)} exists")
        return {"state": "done", "seconds": 0.0, "rows": [], "last": []}
    try:
        words = [sys.executable, "-m", *list_words(stage, check, places)]
    except UserError as error:
        return {"state": "failed", "seconds": 0.0, "rows": [], "last": [str(error)]}
    # Benchmarks and trainings make no folders above their own.
    Path(places["work"]).mkdir(parents=True, exist_ok=True)
    settings = dict(word.split("=") for word in stage.settings.split())
    if (site := Path(places["work"], SITE)).exists():
        paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
        settings["PYTHONPATH"] = os.pathsep.join(paths)
    shown = " ".join(filter(None, (stage.settings, shlex.join(words[1:]))))
    print(f"{stage.name}: {shown}", flush=True)
    rows = check.out / "results.csv"
    before = len(read_rows(rows))
    began = time.monotonic()
    state, text = run_limited(words, seconds, settings)
    with (check.out / "log.txt").open("a", errors="replace") as log:
        log.write(f"$ {shown}\n{text}\n{state}\n\n")
    kept = "name", "median", "p25", "p75", "unit"
    return {
        "state": state,
        "seconds": round(time.monotonic() - began, 1),
        "rows": [{key: row[key] for key in kept} for row in read_rows(rows)[before:]],
        "last": text.splitlines()[-TAIL:] if state != "done" else [],
    }


def run_limited(words: list[str], seconds: float, settings: dict[str, str]) -> tuple[str, str]:
    """Run a command and its children for at most `seconds`; return its state and its output.

    `settings` are added to the environment variables.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        child = subprocess.Popen(
            words,
            cwd=ROOT,
            env=os.environ | settings,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
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


def show(results: dict, check: GpuCheck) -> None:
    """Print the chosen stages and their goals beside what was measured."""
    title = f"Commit {results['commit']}, device {results['device']}"
    table = Table(title=title, title_justify="left")
    for column in ("stage", "state", "row", "measured", "goal", "met"):
        table.add_column(column, justify="right" if column in ("measured", "goal") else "left")
    for stage in filter(check.chooses, STAGES):
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

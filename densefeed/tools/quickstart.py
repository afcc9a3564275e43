"""The whole flow on real images, from nothing to a report: what `make quickstart` runs.

    python tools/quickstart.py --out quickstart

Makes digit scenes, trains a teacher, labels every cell of every image, packs, trains students that
differ in nothing but what they are told, and writes a report. It only runs the commands a user
would type, and prints them. What is there already is kept, so a second call is quick and a killed
one goes on; remove the folder to start anew.
"""

import json
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from densefeed.system.errors import UserError, run
from densefeed.training.recipes import RECIPES

STUDENTS = ("ce", "relabel", "token-label", "token-label-mixtoken")
LABELS = {
    "image": "image label",
    "crop": "crop's dense label",
    "token": "token's dense label",
    "published": "token's, read as published",
}
PARTS = {"all": "all digits", "largest": "the largest digit", "others": "the others"}
# its input when it labels: a little over a scene, where it names both large and small digits
TEACHER_SIZE = 112


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """What to run."""

    out: Path = Path("quickstart")  # folder for everything
    # one whole flow each; more than one: out/seed-N, and a table of mean and deviation
    seeds: tuple[int, ...] = (0,)
    train: int = 3000  # training scenes
    val: int = 1000  # validation scenes
    epochs: int | None = None  # of every training; default: the recipes'
    # of the recipes lvvit_micro_...; there is token-label-published too
    students: tuple[str, ...] = STUDENTS


def call(made: Path, *words: object) -> None:
    """Run one command of ours, unless `made` is there already."""
    if made.exists():
        print(f"have {made}")
        return
    print(f"\n$ python {shlex.join(map(str, words))}", flush=True)
    module = "densefeed." + str(words[0]).removesuffix(".py").replace("/", ".")
    done = subprocess.run([sys.executable, "-m", module, *map(str, words[1:])])
    if done.returncode:
        sys.exit(done.returncode)
    if not made.exists():  # a training that a signal stopped has saved itself and ends well
        print("stopped; the same command goes on")
        sys.exit(130)


def prepared(out: Path, seed: int, options: Quickstart) -> tuple[Path, Path]:
    """Scenes, a teacher, its score maps and packed files in `out`; the training and the validation
    set.
    """
    scenes, teacher, maps = out / "scenes", out / "runs/teacher", out / "maps.h5"
    packed, val = out / "train.beton", out / "val.beton"
    call(
        scenes,
        "tools/make_digit_scenes.py",
        "--out",
        scenes,
        "--train",
        options.train,
        "--val",
        options.val,
        "--seed",
        seed,
    )
    call(
        teacher / "result.json",
        "train.py",
        "nfnet_micro_ce",
        "--loader",
        "folder",
        "--data",
        scenes,
        "--val",
        scenes,
        "--out",
        teacher,
        *common(seed, options),
    )
    call(
        maps,
        "tools/relabel_imagenet.py",
        "--data",
        scenes,
        "--teacher",
        teacher,
        "--input-size",
        TEACHER_SIZE,
        "--top-k",
        5,
        "--out",
        maps,
    )
    call(packed, "tools/pack_dataset.py", "--data", scenes, "--maps", maps, "--out", packed)
    call(val, "tools/pack_dataset.py", "--data", scenes, "--split", "val", "--out", val)
    return packed, val


def common(seed: int, options: Quickstart) -> tuple[object, ...]:
    """What all trainings are told."""
    epochs = () if options.epochs is None else ("--epochs", options.epochs)
    return ("--seed", seed, "--resume", "auto", *epochs)


def flow(out: Path, seed: int, options: Quickstart) -> dict:
    """One whole flow; its accuracies and how right the labels are."""
    packed, val = prepared(out, seed, options)
    runs = {name: out / "runs" / name for name in ("teacher", *options.students)}
    for name in options.students:
        recipe = f"lvvit_micro_{name.replace('-', '_')}"
        call(
            runs[name] / "result.json",
            "train.py",
            recipe,
            "--loader",
            "ffcv",
            "--data",
            packed,
            "--val",
            val,
            "--out",
            runs[name],
            *common(seed, options),
        )
    report = out / "report.html"
    call(
        report,
        "tools/report.py",
        *runs.values(),
        "--boxes",
        out / "scenes/boxes.json",
        "--out",
        report,
    )
    results = {
        name: json.loads((folder / "result.json").read_text()) for name, folder in runs.items()
    }
    purity = json.loads(report.with_suffix(".json").read_text())
    return {
        "top1": {name: r["top1"] for name, r in results.items()},
        "purity": {kind: purity[kind] for kind in LABELS},
    }


def spread(values: list[float]) -> str:
    """Percent, and over several seeds mean ± standard deviation."""
    mean = f"{100 * statistics.mean(values):.1f}"
    return f"{mean} ± {100 * statistics.stdev(values):.1f} %" if len(values) > 1 else f"{mean} %"


def main(options: Quickstart) -> None:
    """Run the flow of every seed and print the table."""
    known = {recipe.__name__ for recipe in RECIPES}
    for name in options.students:
        if f"lvvit_micro_{name.replace('-', '_')}" not in known:
            raise UserError(
                f"--students {name}: there is no such student; {', '.join(STUDENTS)}, token-label-published are"
            )
    many = len(options.seeds) > 1
    flows = [
        flow(options.out / f"seed-{seed}" if many else options.out, seed, options)
        for seed in options.seeds
    ]
    table = Table(title=f"Digit scenes, {len(flows)} seed{'s' * many}", title_justify="left")
    table.add_column("what")
    table.add_column("top-1", justify="right")
    table.add_row(
        "teacher (nfnet_micro)", spread([f["top1"]["teacher"] for f in flows]), end_section=True
    )
    for name in options.students:
        table.add_row(f"student (lvvit_micro), {name}", spread([f["top1"][name] for f in flows]))
    console = Console()
    console.print()
    console.print(table)
    judged = Table(
        title="Tokens inside exactly one digit whose label is that digit", title_justify="left"
    )
    judged.add_column("label")
    for name in PARTS.values():
        judged.add_column(f"on {name}", justify="right")
    for kind, name in LABELS.items():
        judged.add_row(name, *(spread([f["purity"][kind][part] for f in flows]) for part in PARTS))
    console.print(judged)
    where = ", ".join(
        str((options.out / f"seed-{s}" if many else options.out) / "report.html")
        for s in options.seeds
    )
    console.print(f"Report: {where}", soft_wrap=True)


if __name__ == "__main__":
    run(lambda: main(tyro.cli(Quickstart, description=__doc__)))

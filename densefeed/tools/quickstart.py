"""Run the whole flow on real images, from nothing to a report.

    python tools/quickstart.py --out quickstart

`make quickstart` runs this. It composes digit scenes, trains a teacher, labels every cell of every
training image with it, packs images and score maps, trains students that differ only in their
supervision, and writes a report.
Each step is a command that you can type yourself, and is printed before it runs. Finished steps are
kept, so a second call is quick and an interrupted one continues; remove the folder to start over.
"""

import multiprocessing
import shlex
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from densefeed.recipes import RECIPES
from densefeed.system.commands import call
from densefeed.system.errors import UserError, make_command
from densefeed.system.json_files import check_number, read_json
from densefeed.system.options import Count, Options
from densefeed.system.terminal import print, print_table

STUDENTS = {
    "ce": "the image labels",
    "relabel": "the dense label of each crop",
    "token-label": "a dense label on every token",
    "token-label-mixtoken": "a dense label on every token, and MixToken",
    "token-label-published": "a dense label on every token, read at the published coordinates",
}
LABELS = {
    "image": "image label",
    "crop": "crop's dense label",
    "token": "token's dense label",
    "published": "token's, as published",
}
PARTS = {"all": "all digits", "largest": "the largest digit", "others": "the others"}
# The teacher's input when it labels: a scene's own size. At it, after training on crops that show
# digits 0.7 to 1.3 times as large, it recognizes both large and small digits.
TEACHER_SIZE = 96
# The end of the remedy for a damaged file of a finished step.
AGAIN = "run the same command again"


@dataclass(frozen=True, kw_only=True)
class FlowOptions(Options):
    """The scenes and the trainings of a flow."""

    # one whole flow per seed, each with its own scenes, teacher and students
    seeds: tuple[int, ...] = (0,)
    train: Count = 3000  # training scenes
    val: Count = 2000  # validation scenes; of 1000, chance alone scatters 90 % by 1 point
    epochs: int | None = None  # epochs of every training; default: those of the recipes

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.seeds:
            raise UserError("--seeds names no seed; give at least one")


@dataclass(frozen=True, kw_only=True)
class Quickstart(FlowOptions):
    """The size of the quickstart."""

    # With 3000 and the rounding of AVX2 code the student on image labels had 93.5 ± 1.8 % in five
    # seeds, with 3600 95.7 ± 0.4.
    train: Count = 3600  # training scenes
    # folder for everything; several seeds have a folder seed-N each, and give mean and standard
    # deviation
    out: Path = Path("quickstart")
    # students to train, by the names of their recipes quickstart_..., e.g. also
    # token-label-published
    students: tuple[str, ...] = tuple(STUDENTS)[:-1]


def run_step(
    result: Path,
    purpose: str,
    name: str,
    *words: object,
    threads: int | None = None,
    **options: object,
) -> None:
    """Print and run the command `densefeed NAME`, unless its `result` exists.

    Those of the `options` that are not None become --options. `threads` is the number of PyTorch's
    threads, None for one per core.
    """
    if result.exists():
        print(f"{result} exists; skipped")
        return
    for option, value in options.items():
        if value is not None:
            words += f"--{option.replace('_', '-')}", value
    words = [name, *map(str, words)]
    # Flushed, since in a pipe the output of the command would come before it.
    setting = f"OMP_NUM_THREADS={threads} " if threads else ""
    for line in ("", f"# {purpose}", f"$ {setting}densefeed {shlex.join(words)}"):
        print(line, flush=True)
    if code := run_command(words, threads):
        sys.exit(code)
    # A training that a signal stopped has saved its state and exits with 0.
    if not result.exists():
        print("stopped; run the same command again to continue")
        # The exit code of a shell command that Ctrl-C stopped.
        sys.exit(130)


def run_command(words: list[str], threads: int | None = None) -> int:
    """Run a command in a process of its own; return its exit code. `threads` as in `run_step`."""
    # A forked process has PyTorch and timm already, whose import takes 4 s of every command. Only
    # Linux forks safely: macOS's libraries may hold locks.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    process = context.Process(target=call_command, args=(words, threads))
    process.start()
    process.join()
    return process.exitcode


def call_command(words: list[str], threads: int | None) -> None:
    """Run a command in this process."""
    if threads:
        torch.set_num_threads(threads)
    call(*words)


def prepare_data(out: Path, seed: int, options: FlowOptions) -> tuple[Path, Path]:
    """Make scenes, teacher, score maps and packed files; return the training and validation set."""
    scenes, teacher, maps = out / "scenes", out / "runs/teacher", out / "maps.h5"
    packed, val = out / "train.beton", out / "val.beton"
    run_step(
        scenes,
        "Compose scenes: one large handwritten digit, which is the image label, and small others",
        "scenes",
        out=scenes,
        train=options.train,
        val=options.val,
        seed=seed,
    )
    purpose = "Train the teacher, a CNN, on the image labels"
    data = {"loader": "folder", "data": scenes, "val": scenes}
    train_model(teacher, purpose, ("quickstart_teacher",), data, seed, options)
    run_step(
        maps,
        "Label every cell of every training image with the teacher: the score maps",
        "label",
        data=scenes,
        teacher=teacher,
        input_size=TEACHER_SIZE,
        top_k=5,
        out=maps,
    )
    purpose = "Pack the training images and their score maps into one file"
    run_step(packed, purpose, "pack", data=scenes, maps=maps, out=packed)
    run_step(val, "Pack the validation images", "pack", data=scenes, split="val", out=val)
    return packed, val


def train_model(
    out: Path, purpose: str, words: tuple[str, ...], data: dict, seed: int, options: FlowOptions
) -> None:
    """Train a model in the run folder `out`, unless it is finished; `data` become --options."""
    run_step(
        out / "result.json",
        purpose,
        "train",
        *words,
        **data,
        out=out,
        seed=seed,
        # An interrupted training continues from its last checkpoint.
        resume="auto",
        epochs=options.epochs,
        # With one thread a seed gives the same weights in every run. The steps are so small that a
        # second thread took 22 s where one took 25; on a machine with other work, where threads
        # wait for each other, it took up to 107 s.
        threads=1,
    )


def read_top1(folder: Path) -> float:
    """Return the top-1 of a finished run, 0 to 1. Raises UserError if its result is damaged."""
    path, remedy = folder / "result.json", f"remove it, and {AGAIN}"
    top1 = read_json(path, remedy).get("top1")
    check_number(path, "top1", top1, 1, remedy)
    return top1


def read_purity(report: Path) -> dict[str, dict[str, float]]:
    """Return the shares of correct labels, which tools/report.py writes beside its page `report`.

    They are those of each kind in LABELS, on each part in PARTS. Raises UserError if the file is
    damaged.
    """
    # The step of the report is skipped as long as its page exists.
    path, remedy = report.with_suffix(".json"), f"remove it and {report.name}, and {AGAIN}"
    purity = read_json(path, remedy)
    for kind in LABELS:
        shares = purity.get(kind)
        for part in PARTS:
            share = shares.get(part) if isinstance(shares, dict) else None
            check_number(path, f"{kind}.{part}", share, 1, remedy)
    return purity


def recipe_name(student: str) -> str:
    """Return the name of a student's recipe."""
    return f"quickstart_{student.replace('-', '_')}"


def run_flow(out: Path, seed: int, options: Quickstart) -> dict:
    """Run the whole flow in `out`; return top-1 of all models and the shares of correct labels."""
    packed, val = prepare_data(out, seed, options)
    runs = {name: out / "runs" / name for name in ("teacher", *options.students)}
    data = {"loader": "ffcv", "data": packed, "val": val}
    for name in options.students:
        purpose = f"Train the student {name} on {STUDENTS.get(name, 'the labels of its recipe')}"
        train_model(runs[name], purpose, (recipe_name(name),), data, seed, options)
    report, boxes = out / "report.html", out / "scenes/boxes.json"
    purpose = "Write the report: results, curves, and what the students saw"
    run_step(report, purpose, "report", *runs.values(), boxes=boxes, out=report)
    top1 = {name: read_top1(folder) for name, folder in runs.items()}
    return {"top1": top1, "purity": read_purity(report)}


def format_spread(values: list[float]) -> str:
    """Format shares as a percentage; of several, mean ± standard deviation."""
    mean = f"{100 * statistics.mean(values):.1f}"
    return f"{mean} ± {100 * statistics.stdev(values):.1f} %" if len(values) > 1 else f"{mean} %"


def main(options: Quickstart) -> None:
    """Run the flow of every seed and print the summary."""
    for name in options.students:
        if recipe_name(name) not in RECIPES:
            raise UserError(
                f"--students {name}: unknown student; choose from {', '.join(STUDENTS)}"
            )
    folders = [options.out / f"seed-{seed}" for seed in options.seeds]
    # A single seed has no folder of its own.
    folders = folders if len(folders) > 1 else [options.out]
    flows = [run_flow(out, seed, options) for out, seed in zip(folders, options.seeds, strict=True)]
    show(flows, options.students)
    reports = ", ".join(str(folder / "report.html") for folder in folders)
    # Not by rich, which reads markup and names of emoji in a path.
    print(f"Open the report in a browser: {reports}")


def show(flows: list[dict], students: tuple[str, ...]) -> None:
    """Print the accuracy of teacher and students, and how often their labels are correct."""
    title = f"Accuracy on the validation scenes, {len(flows)} seed{'s' * (len(flows) > 1)}"
    accuracy = Table("model", title=title, title_justify="left")
    accuracy.add_column("top-1", justify="right")
    names = {"teacher": "teacher (nfnet_micro)"}
    names |= {name: f"student (lvvit_micro), {name}" for name in students}
    for name, text in names.items():
        top1 = format_spread([flow["top1"][name] for flow in flows])
        accuracy.add_row(text, top1, end_section=name == "teacher")
    title = "Correct labels, share of the training tokens that lie inside exactly one digit"
    labels = Table("label", title=title, title_justify="left")
    for part in PARTS.values():
        labels.add_column(f"on {part}", justify="right")
    for kind, name in LABELS.items():
        shares = ([flow["purity"][kind][part] for flow in flows] for part in PARTS)
        labels.add_row(name, *map(format_spread, shares))
    print()
    print_table(accuracy, labels)


command = make_command(main, Quickstart, __doc__)


if __name__ == "__main__":
    command()

"""Run the whole flow on real images, from nothing to a report.

    densefeed quickstart --out quickstart

`make quickstart` runs this. It composes digit scenes, trains a teacher, labels every cell of every
training image with it, packs images and score maps, trains students that differ only in their
supervision, and writes a report.
Each step is a command that you can type yourself, and is printed before it runs. Finished steps are
kept, so a second call is quick and an interrupted one continues; remove the folder to start over.
"""

if not __package__:
    import script_start  # noqa: F401

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from densefeed.recipes.digit_flow import DigitOptions, prepare_data
from densefeed.recipes.flow import (
    AGAIN,
    begin_flow,
    check_students,
    format_spread,
    read_top1,
    remove_outdated,
    run_step,
    train_model,
)
from densefeed.system.errors import make_command
from densefeed.system.json_files import check_number, read_json
from densefeed.system.options import Count, Texts
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


@dataclass(frozen=True, kw_only=True)
class Quickstart(DigitOptions):
    """The size of the quickstart."""

    # With 3000 and the rounding of AVX2 code the student on image labels had 93.5 ± 1.8 % in five
    # seeds, with 3600 95.7 ± 0.4.
    train: Count = 3600  # training scenes
    # folder for everything; several seeds have a folder seed-N each, and give mean and standard
    # deviation
    out: Path = Path("quickstart")
    # students to train, by the names of their recipes quickstart_..., e.g. also
    # token-label-published
    students: Texts = tuple(STUDENTS)[:-1]


def read_purity(report: Path) -> dict[str, dict[str, float]]:
    """Return the shares of correct labels, which densefeed report writes beside its page `report`.

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
    report, boxes = out / "report.html", out / "scenes/boxes.json"
    remove_outdated(report, runs.values())
    for name in options.students:
        purpose = f"Train the student {name} on {STUDENTS.get(name, 'the labels of its recipe')}"
        train_model(runs[name], purpose, (recipe_name(name),), data, seed, options)
    purpose = "Write the report: results, curves, and what the students saw"
    # Without dense labels there are none to judge.
    judged = set(options.students) != {"ce"}
    boxes = boxes if judged else None
    run_step(report, purpose, "report", *runs.values(), boxes=boxes, out=report)
    top1 = {name: read_top1(folder) for name, folder in runs.items()}
    return {"top1": top1, "purity": read_purity(report) if judged else {}}


def main(options: Quickstart) -> None:
    """Run the flow of every seed and print the summary."""
    check_students(options.students, STUDENTS, map(recipe_name, options.students))
    folders = [options.out / f"seed-{seed}" for seed in options.seeds]
    # A single seed has no folder of its own.
    folders = folders if len(folders) > 1 else [options.out]
    flows, kept = [], dict(train=options.train, val=options.val, epochs=options.epochs)
    for out, seed in zip(folders, options.seeds, strict=True):
        with begin_flow(out, **kept, seeds=seed):
            flows.append(run_flow(out, seed, options))
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
    print()
    if not flows[0]["purity"]:
        print_table(accuracy)
        return
    title = "Correct labels, share of the training tokens that lie inside exactly one digit"
    labels = Table("label", title=title, title_justify="left")
    for part in PARTS.values():
        labels.add_column(f"on {part}", justify="right")
    for kind, name in LABELS.items():
        shares = ([flow["purity"][kind][part] for flow in flows] for part in PARTS)
        labels.add_row(name, *map(format_spread, shares))
    print_table(accuracy, labels)


command = make_command(main, Quickstart, __doc__)


if __name__ == "__main__":
    command()

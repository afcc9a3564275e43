"""Train students on photo scenes, labeled by an ImageNet teacher, and report.

    densefeed photos --out photos

`make photos` runs this. It composes scenes of photographic cut-outs with true masks (densefeed
photo-scenes), labels every cell of every training scene with EfficientNet-Lite2, which ImageNet
trained, packs images and score maps, trains students that differ only in their supervision, and
writes a report. All seeds share the scenes and the labels.

Two numbers describe a student: top-1 on validation scenes, of the same cut-outs on other
backgrounds, and on held-out scenes, whose label is the group of a cut-out that no training scene
shows, as bird; there the student's classes are merged into their groups.

Each step is a command that you can type yourself, and is printed before it runs. Finished steps are
kept, so a second call is quick and an interrupted one continues; remove the folder to start over.
"""

if not __package__:
    import script_start  # noqa: F401

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from densefeed.models.efficientnet_lite import find_weights
from densefeed.recipes.flow import (
    AGAIN,
    FlowOptions,
    begin_flow,
    check_students,
    format_spread,
    read_numbers,
    remove_outdated,
    run_step,
    train_model,
)
from densefeed.storage.scenes import BOXES, check_counts, count_classes
from densefeed.system.errors import make_command
from densefeed.system.json_files import read_json
from densefeed.system.options import Count, NonNegativeInt, Texts
from densefeed.system.terminal import print, print_table

TEACHER = "densefeed.models.efficientnet_lite:lite2"
# With 10 x 10 cells for scenes of 320 x 240 pixels.
TEACHER_SIZE = 320
# Scenes whose stored labels are compared with the teacher's of four crops each.
AUDITED = 100
# In each run folder: what densefeed validate measured on the held-out scenes.
HELD_OUT = "held-out.json"
STUDENTS = {
    "ce": "the image labels",
    "relabel": "the dense label of each crop",
    "relabel-published": "the dense label of each crop, read at the published coordinates",
    "relabel-ground-truth": "the dense label of each crop, mixed with the image label",
    "token-label": "a dense label on every token",
    "token-label-published": "a dense label on every token, read at the published coordinates",
    "token-label-mixtoken": "a dense label on every token, with MixToken",
    "token-label-mixtoken-published": "the labels of token-label-published, with MixToken",
    "token-label-ground-truth": "a dense label on every token, and the image label",
    "token-label-published-ground-truth": "the labels of token-label-published, and the image "
    "label",
    "token-label-mixtoken-ground-truth": "a dense label on every token, with MixToken, and the "
    "image label",
}
# Options that finished steps depend on.
KEPT = "train", "val", "held_out", "scenes_seed", "epochs"
USUAL = "ce", "token-label", "token-label-published-ground-truth", "token-label-ground-truth"


@dataclass(frozen=True, kw_only=True)
class Photos(FlowOptions):
    """The size of the flow."""

    train: Count = 3600  # training scenes, at least 60
    val: Count = 1500  # validation scenes, at least 60
    held_out: NonNegativeInt = 600  # scenes of held-out cut-outs, 0 or at least 9
    scenes_seed: NonNegativeInt = 0  # seed of the scenes
    # folder for everything; several seeds have a folder runs/seed-N each, and give mean and
    # standard deviation
    out: Path = Path("photos")
    # students to train, by the names of their recipes photos_..., e.g. also token-label-mixtoken
    students: Texts = USUAL
    # folder of the cut-outs' packages, see densefeed photo-scenes
    cache: Path | None = None


class Score(NamedTuple):
    """A finished student."""

    top1: float  # on the validation scenes, 0 to 1
    held_out: float | None  # on the held-out scenes, by groups; None if there are none
    seconds: float  # of its training


def main(options: Photos) -> None:
    """Run the flow and print the summary."""
    check_students(options.students, STUDENTS, map(recipe_name, options.students))
    # Before the folder is begun with numbers that no step takes, or minutes before they are missed.
    counts = {"train": options.train, "val": options.val, "held-out": options.held_out}
    if not options.held_out:
        del counts["held-out"]
    check_counts(counts, *count_classes())
    if not (options.out / "maps.h5").exists():
        find_weights("lite2")
    kept = {name: getattr(options, name) for name in KEPT}
    with begin_flow(options.out, **kept):
        run_flow(options)


def run_flow(options: Photos) -> None:
    """Run the steps, and print the scores of the students."""
    scenes, packed, val = prepare_scenes(options)
    audit, report = options.out / "audit.html", options.out / "report.html"
    scores: dict[str, list[Score]] = {name: [] for name in options.students}
    for seed in options.seeds:
        runs = options.out / "runs"
        if len(options.seeds) > 1:
            runs /= f"seed-{seed}"
        remove_outdated(report, (runs / name for name in options.students))
        for name in options.students:
            scores[name].append(
                train_student(runs / name, name, scenes, packed, val, seed, options)
            )
    # Its numbers, which it writes last.
    costs = audit.with_suffix(".json")
    run_step(
        costs,
        "Compare the stored labels of crops with those of the teacher on the crops",
        "audit",
        options.out / "maps.h5",
        data=scenes,
        teacher=TEACHER,
        class_map=scenes / "class_map.csv",
        images=AUDITED,
        crops=4,
        out=audit,
    )
    read_json(costs, f"remove it, and {AGAIN}")
    # Those of the last seed.
    folders = [runs / name for name in options.students]
    run_step(
        report,
        "Write the report: results, correct labels, and what the students saw",
        "report",
        *folders,
        # Without dense labels there are none to judge.
        boxes=None if set(options.students) == {"ce"} else scenes / BOXES,
        audit=costs,
        validated=HELD_OUT if options.held_out else None,
        out=report,
    )
    print()
    print_table(show_scores(scores, len(options.seeds)))
    # Not by rich, which reads markup and names of emoji in a path.
    print(f"Open the report in a browser: {report}")
    print("Its pictures, and those of the audit, show cut-outs under the GPL, version 2.")


def prepare_scenes(options: Photos) -> tuple[Path, Path, Path]:
    """Make scenes, labels and packed files; return scenes, training and validation set."""
    scenes, maps = options.out / "scenes", options.out / "maps.h5"
    packed, val = options.out / "train.beton", options.out / "val.beton"
    run_step(
        scenes,
        "Compose scenes: one large cut-out, which is the image label, and small ones of others",
        "photo-scenes",
        out=scenes,
        train=options.train,
        val=options.val,
        held_out=options.held_out,
        seed=options.scenes_seed,
        cache=options.cache,
    )
    run_step(
        maps,
        "Label every cell of every training scene with the teacher: the score maps",
        "label",
        data=scenes,
        teacher=TEACHER,
        input_size=TEACHER_SIZE,
        class_map=scenes / "class_map.csv",
        top_k=5,
        out=maps,
    )
    purpose = "Pack the training scenes and their score maps into one file"
    run_step(packed, purpose, "pack", data=scenes, maps=maps, out=packed)
    run_step(val, "Pack the validation scenes", "pack", data=scenes, split="val", out=val)
    return scenes, packed, val


def train_student(
    out: Path, name: str, scenes: Path, packed: Path, val: Path, seed: int, options: Photos
) -> Score:
    """Train a student, unless it is finished, and evaluate it on the held-out scenes."""
    purpose = f"Train the student {name} on {STUDENTS.get(name, 'the labels of its recipe')}"
    data = {"loader": "ffcv", "data": packed, "val": val}
    train_model(out, purpose, (recipe_name(name),), data, seed, options)
    result = read_numbers(out / "result.json", "top1", "seconds")
    if not options.held_out:
        return Score(result["top1"], None, result["seconds"])
    held_out = out / HELD_OUT
    run_step(
        held_out,
        f"Evaluate {name} on the held-out scenes, its classes merged into groups",
        "validate",
        out,
        data=scenes / "held-out",
        class_map=scenes / "held_out_map.csv",
        json=held_out,
    )
    return Score(result["top1"], read_numbers(held_out, "top1")["top1"], result["seconds"])


def recipe_name(student: str) -> str:
    """Return the name of a student's recipe."""
    return f"photos_{student.replace('-', '_')}"


def show_scores(scores: dict[str, list[Score]], seeds: int) -> Table:
    """Return the table of the students' accuracies and times."""
    title = f"Accuracy of the students (lvvit_micro), {seeds} seed{'s' * (seeds > 1)}"
    found = Table(title=title, title_justify="left")
    # A long name takes two lines, instead of losing its end.
    found.add_column("trained on", overflow="fold")
    for head in ("validation scenes", "held-out scenes", "time"):
        found.add_column(head, justify="right")
    for name, runs in scores.items():
        held_out = [run.held_out for run in runs if run.held_out is not None]
        seconds = sum(run.seconds for run in runs) / len(runs)
        found.add_row(
            name,
            format_spread([run.top1 for run in runs]),
            format_spread(held_out) if held_out else "–",
            f"{seconds:.0f} s",
        )
    return found


command = make_command(main, Photos, __doc__)


if __name__ == "__main__":
    command()

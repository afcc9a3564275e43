"""Measure a record of the speedrun by the rules of records/README.md; `make record` runs this.

    python -m benchmarks.record --change "wider stem"
    python -m benchmarks.record --track imagenet --recipe RECIPE --data train.beton --val val.beton

It prepares the data of every seed, which is kept and not timed, and times a training of each. Given
--change, in a checkout without uncommitted changes, it adds a row to records/records.csv and writes
the tables of records/README.md.
"""

import csv
import os
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from rich.table import Table

from benchmarks.harness import environment, use_cores
from densefeed.recipes.digit_flow import DigitOptions, prepare_data
from densefeed.recipes.flow import read_top1
from densefeed.system.devices import CORES
from densefeed.system.errors import UserError, make_command
from densefeed.system.files import replace_file
from densefeed.system.options import Options
from densefeed.system.terminal import print, print_table
from densefeed.training.load_model import open_trained

SEEDS = range(5)
FOLDER = Path(__file__).parents[1] / "records"
COLUMNS = ("track", "date", "commit", "change", "median_s", "fastest_s", "slowest_s")
COLUMNS += ("lowest_top1", "parameters", "machine", "versions")
HEAD = ("date", "commit", "what changed", "median", "range", "lowest top-1", "parameters", "on")


class Track(NamedTuple):
    """A task of the speedrun."""

    target: float  # top-1 that every seed must reach, 0 to 1
    parameters: int  # largest number of parameters


TRACKS = {"micro": Track(0.9, 600_000), "imagenet": Track(0.8, 26_000_000)}


class Training(NamedTuple):
    """A timed training."""

    seconds: float  # from the start of its command to the end
    top1: float  # of its last evaluation, 0 to 1
    parameters: int  # of the model that was evaluated


@dataclass(frozen=True, kw_only=True)
class Record(Options):
    """A record to measure."""

    track: Literal["micro", "imagenet"] = "micro"  # task, see records/README.md
    change: str = ""  # what changed since the last record; empty: only measure
    recipe: str = "speedrun_micro"  # recipe to train
    data: Path | None = None  # packed training set; micro makes its own
    val: Path | None = None  # packed validation set; micro makes its own
    out: Path = Path("speedrun")  # folder of data and runs

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.data is not None, self.val is not None
        if any(given) if self.track == "micro" else not all(given):
            raise UserError(
                "--data and --val are the sets of --track imagenet; give both there, and none "
                "elsewhere"
            )


def main(options: Record) -> None:
    """Train all seeds, print their times, and write the record."""
    begun = environment()
    if options.change and str(begun["commit"]).endswith("-dirty"):
        raise UserError("a record is a commit; commit your changes, or give no --change")
    machine = check_machine(options.track, str(begun["cpu"]))
    trainings = [train_seed(options, seed) for seed in SEEDS]
    show(trainings)
    check_trainings(TRACKS[options.track], trainings)
    if options.change:
        known = {name: begun[name] for name in ("date", "commit", "versions")}
        row = known | {"track": options.track, "change": options.change, "machine": machine}
        write_record(FOLDER, row | summarize(trainings))


def check_machine(track: str, cpu: str) -> str:
    """Return what a record names as its machine. UserError if the track asks for another."""
    if track == "micro":
        if CORES < 2:
            raise UserError("--track micro runs on two cores; this process may use one")
        return f"2 cores of {cpu}"
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    if "H100" not in name:
        raise UserError(f"--track {track} runs on one H100; this machine has {name}")
    return name


def train_seed(options: Record, seed: int) -> Training:
    """Prepare the data of a seed and time its training."""
    folder, micro = options.out / f"seed-{seed}", options.track == "micro"
    data, val = options.data, options.val
    if micro:
        data, val = prepare_data(folder, seed, DigitOptions())
    out = folder / "record"
    shutil.rmtree(out, ignore_errors=True)
    words = [options.recipe, "--loader", "ffcv", "--data", data, "--val", val]
    words += ["--out", out, "--seed", seed]
    # Two threads of PyTorch took 20 s where one took 24, but up to 107 s on a machine with other
    # work. With one the second core decodes, and a seed gives the same weights in every run.
    variables = os.environ | ({"OMP_NUM_THREADS": "1"} if micro else {})
    command = [sys.executable, "-m", "densefeed.train", *map(str, words)]
    # Child processes inherit the cores.
    with use_cores(2) if micro else nullcontext():
        start = time.perf_counter()
        done = subprocess.run(command, env=variables)
        seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(done.returncode)
    parameters = sum(weight.numel() for weight in open_trained(out).model.parameters())
    return Training(seconds, read_top1(out), parameters)


def check_trainings(track: Track, trainings: list[Training]) -> None:
    """Raise UserError if one of the trainings breaks a rule of its track."""
    lowest, most = (f([t[n] for t in trainings]) for f, n in ((min, 1), (max, 2)))
    if lowest < track.target:
        raise UserError(
            f"a seed reached {100 * lowest:.3f} % and not {100 * track.target:g} %; train longer"
        )
    if most > track.parameters:
        raise UserError(
            f"the model has {most:,} parameters and may have {track.parameters:,}; make it smaller"
        )


def summarize(trainings: list[Training]) -> dict[str, object]:
    """Return the columns of a record that its trainings give."""
    seconds, top1, parameters = zip(*trainings, strict=True)
    return {
        "median_s": f"{statistics.median(seconds):.1f}",
        "fastest_s": f"{min(seconds):.1f}",
        "slowest_s": f"{max(seconds):.1f}",
        # Cut, not rounded: 89.996 % has not reached 90.
        "lowest_top1": int(10_000 * min(top1)) / 10_000,
        "parameters": max(parameters),
    }


def show(trainings: list[Training]) -> None:
    """Print the time and the accuracy of every seed."""
    table = Table("seed", title=f"Trainings, {trainings[0].parameters:,} parameters")
    for column in ("seconds", "top-1"):
        table.add_column(column, justify="right")
    for seed, training in zip(SEEDS, trainings, strict=True):
        table.add_row(str(seed), f"{training.seconds:.1f}", f"{100 * training.top1:.2f} %")
    print_table(table)
    print(f"median {statistics.median(training.seconds for training in trainings):.1f} s")


def write_record(folder: Path, row: dict[str, object]) -> None:
    """Add a row to the records in `folder`, and write the tables of its page."""
    path, page = folder / "records.csv", folder / "README.md"
    rows = [*read_records(path), {name: str(row[name]) for name in COLUMNS}]
    with replace_file(path) as part, part.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    with replace_file(page) as part:
        part.write_text(fill_page(page.read_text(), rows))


def read_records(path: Path) -> list[dict[str, str]]:
    """Read the records of all tracks, oldest first."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def fill_page(text: str, rows: list[dict[str, str]]) -> str:
    """Replace the tables of a page, each between two comments that name its track."""
    for track in TRACKS:
        begin, end = f"<!-- {track} -->\n", f"<!-- end of {track} -->\n"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        lines = [row for row in rows if row["track"] == track]
        text = before + begin + format_table(lines) + end + after
    return text


def format_table(rows: list[dict[str, str]]) -> str:
    """Format the records of a track as a Markdown table, or a line that says there are none."""
    if not rows:
        return "\nNo record yet.\n\n"
    cells = [HEAD, ("---",) * len(HEAD)]
    for row in rows:
        top1 = f"{100 * float(row['lowest_top1']):.2f} %"
        seconds = f"{row['median_s']} s", f"{row['fastest_s']} to {row['slowest_s']} s"
        known = row["date"], row["commit"], row["change"], *seconds, top1
        cells.append((*known, f"{int(row['parameters']):,}", row["machine"]))
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in cells) + "\n"


if __name__ == "__main__":
    make_command(main, Record, __doc__)()

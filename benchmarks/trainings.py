"""Run whole trainings and record their speed, memory, loss and accuracy.

    python -m benchmarks.trainings --data train.beton --val val.beton --out runs --equal \
        --trainings lvvit_micro_token_label,compile=blocks lvvit_micro_token_label,compile=graph
    python -m benchmarks.trainings --data train.beton --val val.beton --out runs --dry-run \
        --options epochs=12,log_every=8 --trainings lvvit_s_224_token_label,compile=graph

Each word of --trainings is a recipe of `densefeed train` and options of it, NAME=VALUE with
underscores; --options are those of all trainings. An option of several values has spaces between
them: "multi_scale=48 64 80".

A training is `densefeed train` in a process of its own, and its rows are written when it ends: the
images per second and the share of time spent waiting for data of its log intervals, its peak
memory, seconds, last loss and top-1. --dry-run adds the memory that `densefeed train --dry-run`
states, and its ratio to the peak. --equal adds how far last loss and top-1 are from those of the
first training, the loss as a share of it.

One that fails stops no other. A finished one is not repeated: run again, the command continues.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Output, command, device_name, environment, report, spread_rows
from densefeed.system.devices import choose_device
from densefeed.system.errors import UserError
from densefeed.system.json_files import read_json
from densefeed.system.options import flag

# The end of what --dry-run prints.
TAKES = re.compile(r"take about ([\d.]+) GB")


@dataclass(frozen=True, kw_only=True)
class TrainingsBenchmark(Output):
    """Options of this benchmark."""

    trainings: tuple[str, ...]  # each a recipe and its options: RECIPE[,NAME=VALUE...]
    data: Path  # packed training set
    val: Path  # packed validation set
    out: Path  # folder of the runs, each in a folder of its own
    options: str = ""  # of all trainings: NAME=VALUE[,NAME=VALUE...]
    dry_run: bool = False  # compare the peak memory with that of --dry-run
    equal: bool = False  # compare the last losses with that of the first training
    curves: Path | None = None  # file that the log of every run is appended to, as JSON lines
    device: str = "auto"  # auto: cuda if available, else cpu


def main(benchmark: TrainingsBenchmark) -> None:
    """Run the trainings one after the other; exit with 1 if one failed.

    If the first failed, nothing is compared with it.
    """
    jobs = {name: parse_training(benchmark, name) for name in benchmark.trainings}
    failed, first = False, None
    for name, (recipe, options) in jobs.items():
        out = benchmark.out / re.sub(r"[^\w.=-]+", "-", name)
        done, facts = (out / "result.json").exists(), environment()
        words = ["train", recipe, *write_options(options | {"out": out})]
        # A dry run has no run folder, so it also comes before a training that continues.
        estimate = None if done or not benchmark.dry_run else estimate_memory(words)
        if not done and run([*words, "--resume", "auto"]).returncode:
            failed = True
            continue
        end = read_log(out)["loss"][-1], read_result(out)["top1"]
        first = end if name == benchmark.trainings[0] else first
        if done:
            continue
        rows = describe(out, estimate)
        if benchmark.equal and first and name != benchmark.trainings[0]:
            far = {"loss's difference": [abs(end[0] / first[0] - 1)]}
            far["top-1's difference"] = [abs(end[1] - first[1])]
            rows += spread_rows(far, "ratio")
        device = choose_device(str(options["device"]))
        data = f"{name}; {benchmark.options or 'no other options'}; {device_name(device)}"
        rows = [row | {"name": f"{name}, {row['name']}"} for row in rows]
        report(benchmark, rows, [], data, facts, "training ")
        if benchmark.curves is not None:
            append_curve(benchmark.curves, name, out)
    if failed:
        sys.exit(1)


def parse_training(benchmark: TrainingsBenchmark, word: str) -> tuple[str, dict[str, object]]:
    """Return recipe and options of a word of --trainings. UserError for another form."""
    recipe, *own = word.split(",")
    shared = list(filter(None, benchmark.options.split(",")))
    options: dict[str, object] = {"loader": "ffcv", "data": benchmark.data, "val": benchmark.val}
    options["device"] = benchmark.device
    for pair in shared + own:
        name, equals, value = pair.partition("=")
        if not (equals and name.isidentifier()):
            raise UserError(f"{pair!r} of the trainings is not NAME=VALUE, as epochs=2")
        options[name] = value
    return recipe, options


def write_options(options: dict[str, object]) -> list[str]:
    """Return options as words of a command line."""
    words = []
    for name, value in options.items():
        text = str(value)
        if text in ("True", "False"):
            words.append(flag(name if text == "True" else f"no_{name}"))
        else:
            # A path may have spaces.
            words += [flag(name), *([text] if isinstance(value, Path) else text.split())]
    return words


def run(words: list[str], **how: object) -> subprocess.CompletedProcess:
    """Run a command `densefeed` in a process of its own."""
    print(f"$ densefeed {' '.join(words)}", flush=True)
    return subprocess.run([sys.executable, "-m", "densefeed", *words], **how)


def estimate_memory(words: list[str]) -> float | None:
    """Return the GB that a dry run states; None if it fails, which the training then shows too."""
    done = run([*words, "--dry-run"], stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="", flush=True)
    found = TAKES.search(done.stdout)
    return float(found[1]) if found else None


def read_log(out: Path) -> dict[str, list[float]]:
    """Return the values of a run's log intervals, by name."""
    found: dict[str, list[float]] = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name, value in record.items() if record["kind"] == "train" else ():
            found.setdefault(name, []).append(value)
    return found


def read_result(out: Path) -> dict:
    """Return the result of a finished run."""
    return read_json(out / "result.json", "remove the folder of the run")


def append_curve(path: Path, name: str, out: Path) -> None:
    """Append the log of a run, all its evaluations too, to a file of several runs."""
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    with path.open("a") as file:
        file.writelines(json.dumps({"training": name} | record) + "\n" for record in records)


def describe(out: Path, estimate: float | None) -> list[dict]:
    """Return the rows of a finished run; `estimate` is the dry run's memory in GB."""
    log, result = read_log(out), read_result(out)
    # The first interval has the compilation in it, unless it is the only one.
    rates, waits = (log.get(name, []) for name in ("images_per_s", "data_wait_share"))
    peak = max(log["peak_memory_gb"])
    rows = spread_rows({"speed": rates[1:] or rates} if rates else {}, "images/s")
    rows += spread_rows({"waits for data": waits[1:] or waits} if waits else {}, "ratio")
    rows += spread_rows({"peak memory": [peak]}, "GB")
    if estimate is not None:
        rows += spread_rows({"dry run's memory": [estimate]}, "GB")
        rows += spread_rows({"dry run's / peak memory": [estimate / peak]}, "ratio")
    rows += spread_rows({"time": [result["seconds"]]}, "s")
    rows += spread_rows({"last loss": log["loss"][-1:]}, "nats")
    names = [name for name in sorted(result) if name.startswith("top1")]
    accuracies = {name.replace("top1", "top-1"): [result[name]] for name in names}
    return rows + spread_rows(accuracies, "ratio")


if __name__ == "__main__":
    command(main, TrainingsBenchmark, __doc__)

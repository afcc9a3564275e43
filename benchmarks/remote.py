"""Measure training from object storage against training from the same file on a disk.

    python -m benchmarks.remote --data quickstart/train.beton --val quickstart/val.beton

Each run is a whole `train.py` of one epoch with an empty local copy, so that every sample is
fetched. Its rate is that after the first --skip seconds, from the run's log. The server
(range_server.py) is a process on the loopback that answers each request after --latency. On one
core, training has a core and the server another one; on two cores training has both and shares
them with the server, which a real one would not.

A ratio is that of the rates within a round; larger is better. Rows are appended to --results.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness import (
    Count,
    Output,
    Series,
    check_threads,
    choose_cores,
    command,
    compare,
    environment,
    print_rows,
    ratio_rows,
    save,
    spread_rows,
)
from densefeed.system.errors import UserError

LOCAL, REMOTE = "local file", "object storage"
# Times the rate of the local file: required.
BAR = 0.95


@dataclass(frozen=True, kw_only=True)
class RemoteBenchmark(Output):
    """Options of this benchmark."""

    data: Path  # .beton to train from
    val: Path  # .beton to validate with, from the disk
    recipe: str = "quickstart_token_label"  # of train.py
    batch: Count = 16  # images of a step
    threads: tuple[int, ...] = (1, 2)  # cores of a run
    latency: float = 20.0  # of a request, ms
    skip: float = 2.0  # first seconds that do not count
    rounds: Count = 7  # measured rounds


def main(benchmark: RemoteBenchmark) -> dict:
    """Measure, print and record; return the document that --json writes."""
    check(benchmark)
    facts, rows, ratios = environment(), [], []
    for cores in benchmark.threads:
        rates = measure(benchmark, cores)
        few = [ratio := compare(REMOTE, LOCAL, rates[REMOTE], rates[LOCAL], threads=cores)]
        ratios.append(ratio)
        found = spread_rows(rates, "images/s") + ratio_rows(few)
        print(f"{cores} {'core' if cores == 1 else 'cores'}")
        print_rows(found)
        rows += [row | {"threads": cores} for row in found]
    print(f"required: {BAR}")
    data = (
        f"{benchmark.recipe}, {benchmark.latency:g} ms, after {benchmark.skip:g} s; "
        f"{benchmark.data.stat().st_size / 1e6:.1f} MB"
    )
    document = {"rows": rows, "ratios": ratios, "environment": facts}
    save(benchmark, document, rows, "training, ", **facts, data=data, runs=benchmark.rounds)
    return document


def check(benchmark: RemoteBenchmark) -> None:
    """Raise UserError for invalid options."""
    check_threads(*benchmark.threads)
    for path in (benchmark.data, benchmark.val):
        if not path.is_file():
            raise UserError(f"{path} is no file; make quickstart writes quickstart/train.beton")


def measure(benchmark: RemoteBenchmark, cores: int) -> Series:
    """Return the images per second of each contestant, one value per round."""
    own = choose_cores(cores, os.sched_getaffinity(0))
    others = os.sched_getaffinity(0) - own or own
    works: dict[str, Callable[[str], float]] = {LOCAL: partial(train, benchmark, own, {})}
    rates = {LOCAL: [], REMOTE: []}
    with serve(benchmark.data.parent, benchmark.latency, others) as variables:
        works[REMOTE] = partial(train, benchmark, own, variables)
        places = {LOCAL: str(benchmark.data), REMOTE: f"s3://bucket/{benchmark.data.name}"}
        # The first round warms the page cache.
        for number in range(benchmark.rounds + 1):
            for name in (LOCAL, REMOTE) if number % 2 else (REMOTE, LOCAL):
                rate = works[name](places[name])
                if number:
                    rates[name].append(rate)
    return rates


@contextmanager
def serve(folder: Path, latency: float, cores: set[int]) -> Iterator[dict[str, str]]:
    """Serve the files of a folder; yield the variables that let a process use the server."""
    words = ["-m", "benchmarks.range_server", folder, "--latency", latency]
    server = subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=partial(os.sched_setaffinity, 0, cores),
    )
    try:
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{int(server.stdout.readline())}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "none",
            "AWS_SECRET_ACCESS_KEY": "none",
            "AWS_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
    finally:
        server.kill()
        server.wait()


def train(
    benchmark: RemoteBenchmark, cores: set[int], variables: dict[str, str], data: str
) -> float:
    """Train for an epoch with an empty copy; return the rate after the first seconds."""
    with tempfile.TemporaryDirectory() as folder:
        words = [benchmark.recipe, "--loader", "ffcv", "--data", data, "--val", benchmark.val]
        words += ["--out", f"{folder}/run", "--epochs", 1, "--log-every", 10]
        words += ["--batch", benchmark.batch]
        words += ["--cache", f"{folder}/cache"] if variables else []
        words += ["--threads", len(cores), "--device", "cpu"]
        done = subprocess.run(
            [sys.executable, "-m", "densefeed.train", *map(str, words)],
            env=os.environ | variables | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            preexec_fn=partial(os.sched_setaffinity, 0, cores),
        )
        if done.returncode:
            raise UserError(f"training from {data} failed: {done.stderr[-1000:]}")
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    entries = [entry for entry in map(json.loads, lines) if entry["kind"] == "train"]
    return mean_rate(
        [entry["images_per_s"] for entry in entries],
        np.diff([0, *(entry["step"] for entry in entries)]) * benchmark.batch,
        benchmark.skip,
    )


def mean_rate(rates: list[float], images: np.ndarray, skip: float) -> float:
    """Return the rate of all intervals but those that begin in the first `skip` seconds.

    `rates` are in images per second, `images` those of each interval. UserError if none is left.
    """
    seconds = images / np.array(rates)
    counted = np.cumsum(seconds) - seconds >= skip
    if not counted.any():
        raise UserError(f"an epoch took less than --skip {skip:g} s; give more data")
    return float(images[counted].sum() / seconds[counted].sum())


if __name__ == "__main__":
    command(main, RemoteBenchmark, __doc__)

"""Measure what starts two labeling workers: torchrun, --engine local and --engine ray.

    python -m benchmarks.engines
    python -m benchmarks.engines --engines local --json bench/engines.json

Each contestant is a whole command that labels the same images with the same teacher in two
processes of one thread each: torchrun writes a file that its ranks merge, the engines a folder of
shards. A round runs each of them with a quarter of the images and with all. The difference of the
two is the time per image; `whole command` includes the imports, the start of the processes and the
teacher's loading. The cluster of Ray is started once, before the rounds, as users do.

A ratio is the time of an engine / that of torchrun, so smaller is better: the median of the ratios
within a round. Rows are appended to --results.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import timm
import torch
from safetensors.torch import save_file

from benchmarks.harness import (
    Count,
    Output,
    check_threads,
    command,
    compare,
    environment,
    print_rows,
    ratio_rows,
    save,
    spread_rows,
    take_turns,
)
from benchmarks.photographs import write_crops
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError

MODULE = "densefeed.tools.relabel_imagenet"
WORKERS = 2
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}", "-m"]
ENGINES = {"torchrun": TORCHRUN, "local": ["-m"], "ray": ["-m"]}
PEER = "torchrun"
# Of the images, the part that the short command labels.
PART = 4
# Times that of torchrun: allowed.
BAR = 1.05


@dataclass(frozen=True, kw_only=True)
class EnginesBenchmark(Output):
    """Options of this benchmark."""

    engines: tuple[str, ...] = ("local", "ray")  # compared with torchrun
    images: Count = 1024  # crops of photographs, 500 pixels on the longer side
    model: str = "resnet18"  # the teacher, with random weights
    input_size: Count = 224  # pixels
    shard_images: Count = 64  # images of a shard of the engines, on average
    batch: Count = 16  # images that the teacher scores at once
    rounds: Count = 5  # measured rounds, after one for warm-up


def main(benchmark: EnginesBenchmark) -> dict:
    """Write the images, measure, print and record; return the document that --json writes."""
    check(benchmark)
    facts = environment()
    with tempfile.TemporaryDirectory() as folder, start_ray(benchmark.engines) as address:
        seconds = measure(Path(folder), benchmark, address)
    data = (
        f"{benchmark.images} images, {benchmark.model} at {benchmark.input_size} pixels, "
        f"{WORKERS} processes, shards of {benchmark.shard_images} images"
    )
    more = benchmark.images - benchmark.images // PART
    whole = {f"{name}, whole command": long for name, (_, long) in seconds.items()}
    slope = {
        f"{name}, an image": (1e3 * np.subtract(long, short) / more).tolist()
        for name, (short, long) in seconds.items()
    }
    ratios = [
        compare(f"{engine}, {what}", peer, times[f"{engine}, {what}"], times[peer], what=what)
        for what, times in (("whole command", whole), ("an image", slope))
        for engine in benchmark.engines
        for peer in [f"{PEER}, {what}"]
    ]
    rows = spread_rows(whole, "s") + spread_rows(slope, "ms")
    print(data)
    print_rows(rows + ratio_rows(ratios))
    print(f"{' and '.join(benchmark.engines)} / {PEER}: allowed {BAR}")
    document = {"rows": rows, "ratios": ratios, "environment": facts}
    common = {"data": data, "threads": WORKERS, "runs": benchmark.rounds}
    save(benchmark, document, rows + ratio_rows(ratios), "engines ", **facts, **common)
    return document


def check(benchmark: EnginesBenchmark) -> None:
    """Raise UserError for invalid options, or if Ray is missing."""
    check_threads(WORKERS)
    if not benchmark.engines or not {*benchmark.engines} <= {"local", "ray"}:
        raise UserError(f"--engines {' '.join(benchmark.engines)}: give local, ray, or both")
    if benchmark.images < PART * benchmark.shard_images:
        raise UserError(
            f"--images {benchmark.images} are fewer than {PART} shards of --shard-images; give "
            f"at least {PART * benchmark.shard_images}"
        )
    if "ray" in benchmark.engines and not find_spec("ray"):
        raise UserError(
            'Ray is not installed; run `pip install "densefeed[ray]"`, or give --engines local'
        )


@contextmanager
def start_ray(engines: Sequence[str]) -> Iterator[str]:
    """Start a cluster of Ray on this machine, if it is an engine; yield its address."""
    if "ray" not in engines:
        yield ""
        return
    from ray.cluster_utils import Cluster

    # Its processes, and so the workers, get the environment of this one.
    os.environ |= worker_environment("")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": WORKERS})
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


def worker_environment(address: str) -> dict[str, str]:
    """Return the variables of a command: one thread per process, and the cluster of Ray."""
    return {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": address}


def measure(
    folder: Path, benchmark: EnginesBenchmark, address: str
) -> dict[str, tuple[list[float], list[float]]]:
    """Return the seconds of the short and of the long command of each contestant, by round."""
    sizes = benchmark.images // PART, benchmark.images
    for size in sizes:
        (folder / f"{size}").mkdir()
        write_crops(folder / f"{size}", size, 2)
    torch.manual_seed(0)
    weights = timm.create_model(benchmark.model, num_classes=2).state_dict()
    save_file(weights, folder / "teacher.safetensors")
    run = partial(label, folder, benchmark, address)
    works: dict[tuple[str, int], Callable[[int], int]] = {
        (name, size): partial(run, name, size)
        for name in (PEER, *benchmark.engines)
        for size in sizes
    }
    rates = take_turns(works, benchmark.rounds)
    return {
        name: tuple((size / np.array(rates[name, size])).tolist() for size in sizes)
        for name in (PEER, *benchmark.engines)
    }


def label(
    folder: Path, benchmark: EnginesBenchmark, address: str, name: str, size: int, number: int
) -> int:
    """Run one command; return its number of images. UserError if it fails or loses images."""
    out = folder / f"{name}-{size}-{number}"
    words = ["--data", folder / f"{size}", "--teacher", folder / "teacher.safetensors"]
    words += ["--model", benchmark.model, "--input-size", benchmark.input_size, "--top-k", 2]
    words += ["--batch", benchmark.batch, "--threads", 1, "--device", "cpu"]
    if name == PEER:
        out = out.with_suffix(".h5")
    else:
        words += ["--engine", name, "--num-workers", WORKERS]
        words += ["--shard-images", benchmark.shard_images]
    done = subprocess.run(
        [sys.executable, *ENGINES[name], MODULE, *map(str, words), "--out", out],
        env=os.environ | worker_environment(address),
        capture_output=True,
        text=True,
    )
    if done.returncode or len(ScoreMapStore(out)) != size:
        raise UserError(
            f"{name} did not label all images: {done.stdout[-500:]}{done.stderr[-500:]}"
        )
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    return size


if __name__ == "__main__":
    command(main, EnginesBenchmark, __doc__)

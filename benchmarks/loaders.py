"""How fast loaders deliver random-resized crops, ours and others, in one run on the same images.

    python -m benchmarks.loaders                                   # everything that can run here, on its own photographs
    python -m benchmarks.loaders --data train.beton --loaders ffcv+labels,ffcv-stock --threads 1 2 --json out.json

Each round runs one epoch of every loader, from asking for the first batch to holding the last, in
an order that rotates; a ratio is the median of the rounds' own ratios. Loaders are made anew
--makings times, as two of a kind are not equally fast. With --threads n the process and its workers
are confined to n cores. What each loader is: benchmarks/peers.py. Without --data the images are
made once, below --cache, from photographs that ship with scikit-image and scikit-learn. Rows are
appended to --results.
"""

import os
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.harness import (
    COLUMNS,
    Spread,
    append_rows,
    cores,
    pairwise,
    pin,
    take_turns,
    unpinned_after,
)
from benchmarks.peers import PEERS, BenchmarkSet, FullDecode, Peer, Work, why_missing
from benchmarks.photographs import sample_dataset, set_of
from densefeed import native
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.loader import Memory
from densefeed.storage.beton import Beton
from densefeed.system.errors import UserError, run
from densefeed.system.progress import steps_bar
from densefeed.system.provenance import RESULTS, ROOT, environment, write_json

PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "numpy",
    "pillow",
    "ffcv",
    "simplejpeg",
    "spdl-core",
    "nvidia-dali-cuda130",
)
OURS = "ffcv+labels"
LIMIT = "turbojpeg-full"
# What a median ratio should reach, and the aim beyond it: one thread, 500 pixel q90 4:2:0 JPEGs,
# 224 pixels out.
BARS = {
    (OURS, "ffcv-stock"): (3.0, 4.0),
    (OURS, "token-labeling+labels"): (12.0, 20.0),
    (OURS, "ffcv"): (0.97, 0.99),
    ("dali-cpu+labels", "nvidia-dali-cpu"): (1.0, 1.0),
    ("dali-cpu+labels", "dali-cpu"): (0.97, 0.99),
    **{
        (OURS, peer): (2.0, 3.0)
        for peer in ("simplejpeg", "spdl", "torchvision", "torchvision-tensor", "timm")
    },
}
SCALING = (1.8, 1.9)  # two threads to one
FIRST_BATCHES = 5  # processes started
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What to measure."""

    data: Path | None = None  # a .beton of JPEGs; default: photographs of its own
    # the folder --data was packed from, for the peers; default: its JPEGs, unpacked below
    # --cache
    folder: Path | None = None
    cache: Path = Path("bench")  # folder for what is made once
    images: int = 1024  # of its own set
    classes: int = 1000  # of its own set, and of its score maps, at most one an image
    loaders: str = ""  # names, separated by commas; default: all that can run here
    threads: tuple[int, ...] = (1, 2)[:CORES]  # one measurement each
    rounds: int = 9  # epochs of each loader
    # times each loader is made, for as many rounds each and one to warm up: see measure()
    makings: int = 3
    batch: int = 64  # images
    size: int = 224  # side of the output, pixels
    stages: bool = False  # also our loader's stages apart, on one core
    # also the time from a process's start to its first batch, imports of torch excluded
    first_batch: bool = False
    json: Path | None = None  # write rows and ratios there
    record: bool = True  # append rows to --results
    results: Path = RESULTS  # CSV


def main(benchmark: Benchmark) -> dict:
    """Measure, print, record; the document that --json writes."""
    check(benchmark)
    names = chosen(benchmark.loaders)
    if benchmark.data is None:
        data = sample_dataset(
            benchmark.cache, benchmark.images, min(benchmark.classes, benchmark.images)
        )
    else:
        data = set_of(benchmark.data, benchmark.folder, benchmark.cache)
    names = [name for name in names if readable(name, data, asked=bool(benchmark.loaders))]
    size_kb = np.mean([os.path.getsize(path) for path in data.paths]) / 1000
    what = f"{len(data.paths):,} JPEGs of {size_kb:.1f} kB"
    facts = environment(PACKAGES)
    rates, gpu_memory = measure(names, data, benchmark)
    document = {
        "rows": [row(*key, rates[key]) for key in sorted(rates, key=lambda key: key[1])],
        "ratios": ratios(rates),
        "data": what,
        "environment": facts,
    }
    if gpu_memory:
        document |= {"gpu_memory_gb": gpu_memory / 1e9}
    if benchmark.stages:
        document |= {"stages": stages(data, benchmark)}
    if benchmark.first_batch:
        document |= {"first_batch_s": Spread.of(first_batches(data, benchmark))._asdict()}
    show(document)
    if benchmark.json is not None:
        write_json(benchmark.json, document)
    if benchmark.record:
        append_rows(
            benchmark.results,
            [facts | {"data": what, "runs": benchmark.rounds} | line for line in lines(document)],
        )
    return document


def chosen(loaders: str) -> list[str]:
    """The names asked for, or all that can run here. UserError for one that does not exist or
    cannot run.
    """
    asked = [name.strip() for name in loaders.split(",") if name.strip()]
    for name in asked:
        if name not in PEERS:
            raise UserError(
                f"--loaders: there is no loader {name!r}; choose from {', '.join(PEERS)}"
            )
    names = []
    for name in asked or PEERS:
        reason = why_missing(name)
        if reason and asked:
            raise UserError(f"--loaders {name}: {reason}; {PEERS[name].remedy}")
        if reason:
            print(f"{name}: left out, {reason}; {PEERS[name].remedy}")
        else:
            names.append(name)
    return list(dict.fromkeys(names))


def check(benchmark: Benchmark) -> None:
    """UserError for numbers that make no sense here."""
    small = [
        name
        for name in ("rounds", "makings", "batch", "size", "images", "classes")
        if getattr(benchmark, name) < 1
    ]
    if small:
        raise UserError(f"--{small[0]} must be at least 1")
    if min(benchmark.threads, default=0) < 1 or max(benchmark.threads) > CORES:
        raise UserError(
            f"--threads {' '.join(map(str, benchmark.threads))}: from 1 to the {CORES} cores this process may use"
        )
    if benchmark.folder is not None and benchmark.data is None:
        raise UserError(
            "--folder goes with --data: it is the folder that the .beton was packed from"
        )


def readable(name: str, data: BenchmarkSet, asked: bool) -> bool:
    """Whether the set has what a peer reads; UserError if it was asked for by name and the set has
    not.
    """
    if name.startswith("token-labeling") and data.maps is not None and data.published is None:
        reason = f"its layout cannot number {data.num_classes:,} classes"
    elif PEERS[name].maps and data.maps is None:
        reason = f"{data.beton} has no score maps"
    else:
        return True
    if asked:
        raise UserError(f"--loaders {name}: {reason}; leave it out, or give another --data")
    print(f"{name}: left out, {reason}")
    return False


# ------------------------------------------------------------------------- measuring


def measure(
    names: list[str], data: BenchmarkSet, benchmark: Benchmark
) -> tuple[dict[tuple[str, int], list[float]], int]:
    """Images per second of every loader with every number of threads, a value a round; and the
    bytes of the GPU's memory that are in use at the end, by all loaders together: DALI's pools are
    no single loader's, so name one for its own.

    Loaders are made anew for each share of the rounds, in another order each time. Two that do the
    same differ by up to 6 % of processor time for as long as they live (DALI's, twins made in one
    process), and no number of rounds averages that out.
    """
    # A loader's thread counts stand beside each other: their ratio is the one that a drifting
    # machine would blur most.
    keys = [(name, threads) for name in names for threads in dict.fromkeys(benchmark.threads)]
    shares = [
        len(share)
        for share in np.array_split(
            np.arange(benchmark.rounds), min(benchmark.makings, benchmark.rounds)
        )
    ]
    rates: dict[tuple[str, int], list[float]] = {key: [] for key in keys}
    with ExitStack() as stack:
        allowed = stack.enter_context(unpinned_after())
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        advance = stack.enter_context(
            steps_bar("benchmark", len(keys) * (benchmark.rounds + len(shares)), 0)
        )

        def before(key: tuple[str, int]) -> None:
            # Threads and processes are the peers' own; a torch that splits each resize again halves
            # simplejpeg's rate on two cores. Stock ffcv sets it for everyone.
            torch.set_num_threads(1)
            pin(cores(key[1], allowed))

        for making, share in enumerate(shares):
            with ExitStack() as alive:
                # All are made before the first is confined to a core: numba fixes its most threads
                # when it is imported.
                pin(allowed)
                first = making % len(keys)
                peers = {
                    key: alive.enter_context(
                        closing(
                            PEERS[key[0]].make(Work(data, key[1], benchmark.batch, benchmark.size))
                        )
                    )
                    for key in keys[first:] + keys[:first]
                }
                works = {key: lambda number, peer=peers[key]: deliver(peer, number) for key in keys}
                some = take_turns(
                    works, share, before, lambda key: advance(1, f"{key[0]}, {key[1]} threads")
                )
                for key in keys:
                    rates[key] += some[key]
                free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
        return rates, total - free


def deliver(peer: Peer, epoch: int) -> int:
    """Run an epoch to its last batch; the images that came."""
    return sum(batch.count for batch in peer.batches(epoch))


def row(name: str, threads: int, values: list[float]) -> dict:
    """A loader's row of the JSON document."""
    return {
        "loader": name,
        "threads": threads,
        "images_per_s": Spread.of(values)._asdict(),
        "runs": len(values),
    }


def ratios(rates: dict[tuple[str, int], list[float]]) -> list[dict]:
    """Round by round: ours with labels to every other loader, each of ours with labels to without,
    through DALI to NVIDIA's own pipeline, more threads to the fewest.
    """
    pairs = []
    counts = list(dict.fromkeys(threads for _, threads in rates))
    names = list(dict.fromkeys(name for name, _ in rates))
    for threads in counts:
        pairs += [((OURS, threads), (name, threads)) for name in names if name != OURS]
        others = [("folder+labels", "folder")]
        for kind in ("dali-cpu", "dali-gpu"):
            others += [(f"{kind}+labels", kind), (f"{kind}+labels", f"nvidia-{kind}")]
        pairs += [((a, threads), (b, threads)) for a, b in others]
    pairs += [
        ((name, most), (name, min(counts)))
        for most in counts
        for name in names
        if most != min(counts)
    ]
    return [
        {
            "a": a[0],
            "b": b[0],
            "threads": a[1],
            "b_threads": b[1],
            **pairwise(rates[a], rates[b])._asdict(),
        }
        for a, b in pairs
        if a in rates and b in rates
    ]


def stages(data: BenchmarkSet, benchmark: Benchmark) -> dict:
    """Microseconds an image that reading, decoding, resampling and labels take, timed apart on one
    core.

    `share_of_limit` is the time of libjpeg-turbo's decode of the whole file over all of theirs: 1
    would mean that a crop with its labels costs no more than decoding the file it is cut from.
    `bytes_to_original` is what the packer's rewriting makes of the JPEGs' size.
    """
    work = Work(data, 1, benchmark.batch, benchmark.size)
    passes, shares = [], []
    with ExitStack() as stack:
        pin(cores(1, stack.enter_context(unpinned_after())))
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        limit = (
            stack.enter_context(closing(FullDecode(work))) if why_missing(LIMIT) is None else None
        )
        for number in range(benchmark.rounds + 1):
            taken = stage_seconds(work, number)
            start = time.perf_counter()
            whole = (
                deliver(limit, number) and time.perf_counter() - start if limit else float("nan")
            )
            if number:  # the first warms up
                passes.append(taken)
                shares.append(whole / sum(taken.values()))
    spreads = {
        name: Spread.of([1e6 * taken[name] / len(data.labels) for taken in passes])
        for name in passes[0]
    }
    packed = sum(Beton(data.beton).images.size.tolist()) / sum(
        os.path.getsize(path) for path in data.paths
    )
    document = {
        "microseconds_per_image": {name: spread._asdict() for name, spread in spreads.items()}
    }
    document |= {"bytes_to_original": packed}
    return document | ({"share_of_limit": Spread.of(shares)._asdict()} if limit else {})


def stage_seconds(work: Work, epoch: int) -> dict[str, float]:
    """Seconds that each stage of our .beton loader takes over an epoch, as its native code clocks
    them, and Python's planning.
    """
    source, plan, memory = FfcvSource(work.data.beton), work.plan(), Memory()
    taken = dict.fromkeys((*native.STAGES, "plan"), 0.0)
    pixels = np.zeros((work.batch, work.size, work.size, 3), np.uint8)
    for ids in plan.shard(epoch).index:
        start = time.perf_counter()
        samples = source.begin(ids).wait().samples
        samples["box_tlhw"], samples["flip"] = plan.crops(
            epoch, ids, samples["height"], samples["width"]
        )
        parts = source.map_rows(ids, memory).parts if source.score_maps else None
        job = native.Job(samples, pixels, parts)
        taken["plan"] += time.perf_counter() - start
        job.decode()
        for name, microseconds in zip(native.STAGES, samples["took"].sum(0).tolist(), strict=True):
            taken[name] += microseconds / 1e6
    source.close()
    return taken


FIRST_BATCH = """
import sys, time
import torch
start = time.perf_counter()
from benchmarks.peers import first_batch
first_batch(*sys.argv[1:])
print(time.perf_counter() - start)
"""


def first_batches(data: BenchmarkSet, benchmark: Benchmark) -> list[float]:
    """Seconds from `import torch` to our first batch with labels (without, where there are none),
    each in a new process.
    """
    words = [
        sys.executable,
        "-c",
        FIRST_BATCH,
        data.beton.resolve(),
        benchmark.threads[0],
        benchmark.batch,
        benchmark.size,
    ]
    seconds = []
    for _ in range(FIRST_BATCHES + 1):
        done = subprocess.run([*map(str, words)], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the process that waits for a first batch failed:\n{done.stderr}")
        seconds.append(float(done.stdout.split()[-1]))
    return seconds[1:]  # the first one warms the page cache


# ------------------------------------------------------------------------- telling


def bar_of(ratio: dict) -> str:
    """The bar and the aim of a ratio, where it has one."""
    if (
        ratio["a"] == ratio["b"]
        and (ratio["threads"], ratio["b_threads"]) == (2, 1)
        and ratio["a"] == OURS
    ):
        bar, aim = SCALING
    elif ratio["threads"] == ratio["b_threads"] == 1 and (ratio["a"], ratio["b"]) in BARS:
        bar, aim = BARS[ratio["a"], ratio["b"]]
    else:
        return ""
    return f"{bar:g} ({aim:g})"


def show(document: dict) -> None:
    """Print the document as tables."""
    console = Console()
    console.width = max(console.width, 110)  # names in full, also in a log file
    table = Table(title=f"Images per second, {document['data']}", title_justify="left")
    for name in ("loader", "threads", "median", "p25", "p75"):
        table.add_column(name, justify="left" if name == "loader" else "right")
    for line in document["rows"]:
        speed = line["images_per_s"]
        table.add_row(
            line["loader"],
            str(line["threads"]),
            *(f"{speed[k]:,.0f}" for k in ("median", "p25", "p75")),
        )
    console.print(table)
    table = Table(title="Ratios, round by round", title_justify="left")
    for name in ("a", "to b", "threads", "median", "p25", "p75", "bar (aim)"):
        table.add_column(name, justify="left" if name in ("a", "to b") else "right")
    for line in document["ratios"]:
        threads = (
            str(line["threads"])
            if line["threads"] == line["b_threads"]
            else f"{line['threads']} to {line['b_threads']}"
        )
        table.add_row(
            line["a"],
            line["b"],
            threads,
            *(f"{line[k]:.2f}" for k in ("median", "p25", "p75")),
            bar_of(line),
        )
    console.print(table)
    if "stages" in document:
        table = Table(title="Our stages, one core, microseconds an image", title_justify="left")
        for name in ("stage", "median", "p25", "p75"):
            table.add_column(name, justify="left" if name == "stage" else "right")
        for name, spread in document["stages"]["microseconds_per_image"].items():
            table.add_row(name, *(f"{spread[k]:,.1f}" for k in ("median", "p25", "p75")))
        console.print(table)
        console.print(
            f"bytes of a packed JPEG to the original's: {document['stages']['bytes_to_original']:.4f} (bar 1.015)"
        )
        if "share_of_limit" in document["stages"]:
            console.print(
                f"share of libjpeg-turbo's full decode reached: {document['stages']['share_of_limit']['median']:.2f}"
            )
    if "gpu_memory_gb" in document:
        console.print(f"GPU memory in use: {document['gpu_memory_gb']:.2f} GB")
    if "first_batch_s" in document:
        console.print(
            f"first batch after `import torch`: {document['first_batch_s']['median']:.2f} s"
        )


def lines(document: dict) -> list[dict]:
    """What the CSV gets: a line per loader, ratio, stage and waiting time."""
    found = [
        line | line["images_per_s"] | {"name": line["loader"], "unit": "images/s"}
        for line in document["rows"]
    ]
    for line in document["ratios"]:
        same = line["threads"] == line["b_threads"]
        threads = line["threads"] if same else f"{line['threads']}/{line['b_threads']}"
        found.append(
            line | {"name": f"{line['a']} / {line['b']}", "threads": threads, "unit": "ratio"}
        )
    for name, spread in document.get("stages", {}).get("microseconds_per_image", {}).items():
        found.append(spread | {"name": f"stage {name}", "threads": 1, "unit": "µs/image"})
    if "stages" in document:
        found.append(
            {
                "median": document["stages"]["bytes_to_original"],
                "name": "bytes to original",
                "unit": "ratio",
            }
        )
    if "share_of_limit" in document.get("stages", {}):
        found.append(
            document["stages"]["share_of_limit"]
            | {"name": "share of full decode", "threads": 1, "unit": "ratio"}
        )
    if "gpu_memory_gb" in document:
        names = ", ".join(dict.fromkeys(line["loader"] for line in document["rows"]))
        found.append(
            {"median": document["gpu_memory_gb"], "name": f"GPU memory with {names}", "unit": "GB"}
        )
    if "first_batch_s" in document:
        found.append(
            document["first_batch_s"]
            | {"name": "first batch", "threads": "", "unit": "s", "runs": FIRST_BATCHES}
        )
    return [{name: line[name] for name in COLUMNS if name in line} for line in found]


if __name__ == "__main__":
    run(lambda: main(tyro.cli(Benchmark, description=__doc__)))

"""Measure images per second of loaders, ours and others, with random-resized crops.

    python -m benchmarks.loaders        # all that can run here, on generated crops of photographs
    python -m benchmarks.loaders --data train.beton --loaders ffcv+labels,ffcv-stock \\
        --threads 1 2 --json out.json

All loaders read the same images in one run. Each round runs one epoch of every loader, from
requesting the first batch to receiving the last, in rotating order; a ratio is the median of the
ratios within a round. Loaders are built --makings times, as two instances of one loader are not
equally fast. With --threads n the process and its workers are confined to n cores.
benchmarks/peers.py describes the loaders. Without --data the images are generated once, below
--cache, from photographs that ship with scikit-image and scikit-learn. Rows are appended to
--results.
"""

import os
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import (
    CORES,
    QUARTILES,
    Count,
    Output,
    check_threads,
    choose_cores,
    command,
    compare,
    device_name,
    environment,
    format_spread,
    pin,
    print_rows,
    print_table,
    ratio_rows,
    restore_cpus_after,
    save,
    spread,
    take_turns,
    use_cores,
)
from benchmarks.peers import PEERS, BenchmarkSet, FullDecode, Peer, PeerConfig, explain_missing
from benchmarks.photographs import beton_dataset, sample_dataset
from densefeed import native
from densefeed.pipelines.batch import allocate_maps
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.loader import Memory
from densefeed.storage.beton import Beton
from densefeed.system.errors import UserError
from densefeed.system.progress import steps_bar
from densefeed.system.provenance import ROOT

OURS = "ffcv+labels"
LIMIT = "turbojpeg-full"
# Required median ratio, and the goal beyond it: with one thread (of a loader to itself: two threads
# to one), from 500 pixel JPEGs of quality 90 and 4:2:0 subsampling, to 224 pixels.
BARS = {
    (OURS, OURS): (1.8, 1.9),
    (OURS, "ffcv-stock"): (3.0, 4.0),
    (OURS, "token-labeling+labels"): (12.0, 20.0),
    (OURS, "ffcv"): (0.97, 0.99),
    ("dali-cpu+labels", "nvidia-dali-cpu"): (1.0, 1.0),
    ("dali-cpu+labels", "dali-cpu"): (0.97, 0.99),
    **{
        (OURS, peer): (2.0, 3.0)
        for peer in ("simplejpeg", "torchvision", "torchvision-tensor", "timm")
    },
}
# Ratios beside those of OURS to every other loader.
RATIOS = [
    # Above 4/3 the second crop of an image costs less than half of the first.
    ("ffcv-2-crops+labels", OURS),
    ("ffcv-2-crops", "ffcv"),
    ("folder+labels", "folder"),
    ("folder-augmented-before", "folder-augmented"),
    ("dali-cpu+labels", "dali-cpu"),
    ("dali-cpu+labels", "nvidia-dali-cpu"),
    ("dali-gpu+labels", "dali-gpu"),
    ("dali-gpu+labels", "nvidia-dali-gpu"),
]
# Processes to start, after one that warms the page cache.
FIRST_BATCHES = 5

Key = tuple[str, int]  # loader, threads
Rates = dict[Key, list[float]]  # images per second, one value per round


@dataclass(frozen=True, kw_only=True)
class LoaderBenchmark(Output):
    """Options of this benchmark."""

    data: Path | None = None  # a .beton of JPEGs; default: generated crops of photographs
    # the folder --data was packed from, or its `train/`; default: its JPEGs, unpacked in --cache
    folder: Path | None = None
    cache: Path = Path("bench")  # folder for generated files, which later runs use again
    images: Count = 1024  # number of generated crops
    classes: Count = 1000  # of the generated crops and score maps; at most the number of images
    loaders: str = ""  # names, separated by commas; default: all that can run here
    threads: tuple[int, ...] = (1, 2)[:CORES]  # numbers of threads to measure
    rounds: Count = 9  # epochs of each loader
    # times each loader is built; each instance runs an equal share of the rounds and one warm-up
    makings: Count = 3
    batch: Count = 64  # images per batch
    size: Count = 224  # side of the output, pixels
    stages: bool = False  # also measure the stages of our loader separately, on one core
    # also measure the time from a process's start to its first batch, without importing torch, timm
    first_batch: bool = False


def main(benchmark: LoaderBenchmark) -> dict:
    """Measure, print and record; return the document that --json writes."""
    check(benchmark)
    names = choose_loaders(benchmark.loaders)
    if benchmark.data is None:
        classes = min(benchmark.classes, benchmark.images)
        data = sample_dataset(benchmark.cache, benchmark.images, classes)
    else:
        data = beton_dataset(benchmark.data, benchmark.folder, benchmark.cache)
    names = [name for name in names if can_read(name, data, required=bool(benchmark.loaders))]
    summary, facts = describe(data.paths, names), environment()
    rates, gpu_memory = measure(names, data, benchmark)
    document = {
        "rows": [
            {
                "loader": name,
                "threads": threads,
                "images_per_s": spread(values),
                "runs": len(values),
            }
            for (name, threads), values in sorted(rates.items(), key=lambda item: item[0][1])
        ],
        "ratios": ratios(rates),
        "data": summary,
        "environment": facts,
    }
    if gpu_memory:
        document["gpu_memory_gb"] = gpu_memory / 1e9
    if benchmark.stages:
        document["stages"] = measure_stages(data, benchmark)
    if benchmark.first_batch:
        document["first_batch_s"] = spread(time_first_batches(data, benchmark))
    show(document)
    save(benchmark, document, csv_rows(document), **facts, data=summary, runs=benchmark.rounds)
    return document


def describe(paths: list[str], names: list[str]) -> str:
    """Describe the images, and the GPU if one of the loaders uses it."""
    size_kb = np.mean(list(map(os.path.getsize, paths))) / 1000
    images = f"{len(paths):,} JPEGs of {size_kb:.1f} kB"
    on_gpu = any("gpu" in name for name in names)
    return f"{images}; {device_name(torch.device('cuda'))}" if on_gpu else images


def check(benchmark: LoaderBenchmark) -> None:
    """Raise UserError for invalid options."""
    check_threads(*benchmark.threads)
    if benchmark.folder is not None and benchmark.data is None:
        raise UserError("--folder needs --data: it is the folder that the .beton was packed from")


def choose_loaders(option: str) -> list[str]:
    """Return the loaders that --loaders names, by default all that can run here.

    Raises UserError for a named loader that does not exist or cannot run.
    """
    given = [name.strip() for name in option.split(",") if name.strip()]
    for name in given:
        if name not in PEERS:
            raise UserError(
                f"--loaders: there is no loader {name!r}; choose from {', '.join(PEERS)}"
            )
    names = []
    for name in given or PEERS:
        reason = explain_missing(name)
        if reason and given:
            raise UserError(f"--loaders {name}: {reason}; {PEERS[name].remedy}")
        if reason:
            print(f"{name}: skipped, {reason}; {PEERS[name].remedy}")
        else:
            names.append(name)
    # Twice the same name would be twice the same key of the rates.
    return list(dict.fromkeys(names))


def can_read(name: str, data: BenchmarkSet, required: bool) -> bool:
    """Return whether `data` has what a loader reads; if `required`, raise UserError if not."""
    if name.startswith("token-labeling") and data.maps is not None and data.published is None:
        reason = f"its file format cannot number {data.num_classes:,} classes"
    elif PEERS[name].maps and data.maps is None:
        reason = f"{data.beton} has no score maps"
    elif name.startswith("ffcv-planes") and data.planes is None:
        reason = "only the generated images are packed as planes"
    else:
        return True
    if required:
        raise UserError(f"--loaders {name}: {reason}; leave it out, or give another --data")
    print(f"{name}: skipped, {reason}")
    return False


# ------------------------------------------------------------------------- measuring


def measure(names: list[str], data: BenchmarkSet, benchmark: LoaderBenchmark) -> tuple[Rates, int]:
    """Return images per second of every loader with every number of threads, and GPU bytes in use.

    Rates have one value per round. The GPU bytes are those that all loaders together use at the
    end, because DALI's pools belong to no single loader; run one loader alone to get its own.

    Loaders are built again for each share of the rounds, in another order each time. Two identical
    ones differ by up to 6 % of processor time for their whole lifetime (measured for two of DALI's
    in one process), and no number of rounds averages that out.
    """
    # The thread counts of a loader are neighbors: drift of the machine would blur their ratio most.
    keys = [(name, threads) for name in names for threads in dict.fromkeys(benchmark.threads)]
    makings = min(benchmark.makings, benchmark.rounds)
    shares = list(map(len, np.array_split(range(benchmark.rounds), makings)))
    rates = {key: [] for key in keys}
    # Each making adds a round of warm-up.
    turns = len(keys) * (benchmark.rounds + len(shares))
    with restore_cpus_after() as allowed, steps_bar("benchmark", turns, 0) as advance:

        def before(key: Key) -> None:
            # The peers have their own threads and processes; a torch that splits each resize again
            # halves simplejpeg's rate on two cores. Stock ffcv sets the number for the process.
            torch.set_num_threads(1)
            pin(choose_cores(key[1], allowed))

        for making, share in enumerate(shares):
            with ExitStack() as alive:
                # All are built before the first is pinned to a core: numba fixes its maximum number
                # of threads when it is imported.
                pin(allowed)
                first, works = making % len(keys), {}
                for key in keys[first:] + keys[:first]:
                    config = PeerConfig(data, key[1], benchmark.batch, benchmark.size)
                    peer = alive.enter_context(closing(PEERS[key[0]].build(config)))
                    works[key] = partial(run_epoch, peer)
                new = take_turns(
                    works, share, before, lambda key: advance(1, f"{key[0]}, {key[1]} threads")
                )
                for key, values in new.items():
                    rates[key] += values
                # Asked while the loaders are alive and hold their memory.
                free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    return rates, total - free


def run_epoch(peer: Peer, epoch: int) -> int:
    """Consume an epoch and return its number of images."""
    return sum(batch.count for batch in peer.batches(epoch))


def ratios(rates: Rates) -> list[dict]:
    """Return the ratios within rounds between loaders and between numbers of threads.

    They are: ours with labels to every other loader, each of ours with labels to the same without,
    ours through DALI to NVIDIA's own pipeline, and every number of threads to the smallest.
    """
    names, counts = (list(dict.fromkeys(part)) for part in zip(*rates, strict=True))
    others, few = [(OURS, name) for name in names if name != OURS], min(counts)
    pairs = [((a, n), (b, n)) for n in counts for a, b in others + RATIOS]
    pairs += [((name, n), (name, few)) for n in counts for name in names if n != few]
    return [
        compare(a[0], b[0], rates[a], rates[b], threads=a[1], b_threads=b[1])
        for a, b in pairs
        if a in rates and b in rates
    ]


def measure_stages(data: BenchmarkSet, benchmark: LoaderBenchmark) -> dict:
    """Time reading, decoding, resampling and labels separately on one core: microseconds per image.

    `share_of_limit` is the time of libjpeg-turbo's decode of the whole file divided by the sum of
    the stages: at 1, a crop with its labels would cost no more than decoding its whole file.
    `bytes_to_original` is the size of the packer's rewritten JPEGs relative to the originals, which
    must be at most 1.015.
    """
    config = PeerConfig(data, 1, benchmark.batch, benchmark.size)
    passes, shares = [], []
    # In each pass the limit follows the stages, so the machine's drift cancels in the share.
    limit = FullDecode(config) if explain_missing(LIMIT) is None else None
    with use_cores(1):
        for number in range(benchmark.rounds + 1):
            taken = time_stages(config, number)
            start = time.perf_counter()
            if limit:
                run_epoch(limit, number)
            # The first pass is for warm-up.
            if number:
                shares.append((time.perf_counter() - start) / sum(taken.values()))
                passes.append(taken)
    images = len(data.labels)
    original = sum(map(os.path.getsize, data.paths))
    document = {
        "microseconds_per_image": {
            name: spread([1e6 * taken[name] / images for taken in passes]) for name in passes[0]
        },
        "bytes_to_original": sum(Beton(data.beton).images.size.tolist()) / original,
    }
    if limit:
        document["share_of_limit"] = spread(shares)
    return document


def time_stages(config: PeerConfig, epoch: int) -> dict[str, float]:
    """Return the seconds of planning and of each stage of our .beton loader over an epoch.

    Planning is in Python; the stages are timed by the clocks of the loader's native code.
    """
    source, plan, memory = FfcvSource(config.data.beton), config.plan(), Memory()
    taken = dict.fromkeys((*native.STAGES, "plan"), 0.0)
    pixels = np.zeros((config.batch, config.size, config.size, 3), np.uint8)
    for ids in plan.rank_rows(epoch).index:
        start = time.perf_counter()
        samples = source.begin(ids).wait().samples
        sides = samples["height"], samples["width"]
        samples["box_tlhw"], samples["flip"] = plan.crops(epoch, ids, *sides)
        parts, spec = None, source.score_maps
        if spec:
            to = [field.numpy() for field in allocate_maps(len(ids), spec, memory.empty)]
            parts = source.map_parts(ids)._replace(to=to, limits=spec.limits)
        job = native.Job(samples, pixels, parts)
        taken["plan"] += time.perf_counter() - start
        job.decode()
        for name, microseconds in zip(native.STAGES, samples["took"].sum(0).tolist(), strict=True):
            taken[name] += microseconds / 1e6
    source.close()
    return taken


FIRST_BATCH = """
import sys, time
import timm, torch
start = time.perf_counter()
from benchmarks.peers import load_first_batch
load_first_batch(*sys.argv[1:])
print(time.perf_counter() - start)
"""


def time_first_batches(data: BenchmarkSet, benchmark: LoaderBenchmark) -> list[float]:
    """Return the seconds from the end of `import timm, torch` to our first batch.

    Each is measured in a new process. Every training needs these imports. The batch has its score
    maps if there are any.
    """
    # The new process starts in the repository, where it finds `benchmarks`, so a relative path
    # would lead elsewhere.
    options = data.beton.resolve(), benchmark.threads[0], benchmark.batch, benchmark.size
    words = [sys.executable, "-c", FIRST_BATCH, *map(str, options)]
    printed = [
        subprocess.check_output(words, cwd=ROOT, text=True) for _ in range(FIRST_BATCHES + 1)
    ]
    # The first process warms the page cache.
    return [float(text.split()[-1]) for text in printed[1:]]


# ------------------------------------------------------------------------- results


def format_bar(ratio: dict) -> str:
    """Format the required value and the goal of a ratio; empty if it has none."""
    pair = ratio["a"], ratio["b"]
    threads = 2 if ratio["a"] == ratio["b"] else 1
    if pair not in BARS or (ratio["threads"], ratio["b_threads"]) != (threads, 1):
        return ""
    required, goal = BARS[pair]
    return f"{required:g} ({goal:g})"


def format_threads(ratio: dict, between: str) -> str:
    """Format a ratio's number of threads, or both numbers if they differ."""
    more, few = ratio["threads"], ratio["b_threads"]
    return str(more) if more == few else f"{more}{between}{few}"


def show(document: dict) -> None:
    """Print the document: two tables, and a line for each other measurement."""
    rows = [
        (row["loader"], str(row["threads"]), *format_spread(row["images_per_s"], ",.0f"))
        for row in document["rows"]
    ]
    title = f"Images per second, {document['data']}"
    print_table(title, ("loader", "threads", *QUARTILES), rows)
    rows = [
        (
            *(ratio["a"], ratio["b"], format_threads(ratio, " to ")),
            *(*format_spread(ratio, ".2f"), format_bar(ratio)),
        )
        for ratio in document["ratios"]
    ]
    columns = ("a", "to b", "threads", *QUARTILES, "required (goal)")
    print_table("Ratios within a round", columns, rows, texts=2)
    print_rows(other_rows(document))


def csv_rows(document: dict) -> list[dict]:
    """Return CSV rows: one per loader, ratio, stage and other measurement."""
    rows = [
        row | row["images_per_s"] | {"name": row["loader"], "unit": "images/s"}
        for row in document["rows"]
    ]
    rows += [row | {"threads": format_threads(row, "/")} for row in ratio_rows(document["ratios"])]
    return rows + other_rows(document)


def other_rows(document: dict) -> list[dict]:
    """Return the rows of stages, GPU memory and first batch, where these were measured."""
    stages, rows = document.get("stages", {}), []
    for name, stage in stages.get("microseconds_per_image", {}).items():
        rows.append(stage | {"name": f"stage {name}", "threads": 1, "unit": "µs/image"})
    if stages:
        packed = stages["bytes_to_original"]
        rows.append({"median": packed, "name": "bytes to original", "unit": "ratio"})
    if "share_of_limit" in stages:
        name = "share of full decode"
        rows.append(stages["share_of_limit"] | {"name": name, "threads": 1, "unit": "ratio"})
    if "gpu_memory_gb" in document:
        names = ", ".join(dict.fromkeys(row["loader"] for row in document["rows"]))
        memory = document["gpu_memory_gb"]
        rows.append({"median": memory, "name": f"GPU memory with {names}", "unit": "GB"})
    if "first_batch_s" in document:
        more = {"name": "first batch after imports", "unit": "s", "runs": FIRST_BATCHES}
        rows.append(document["first_batch_s"] | more)
    return rows


if __name__ == "__main__":
    command(main, LoaderBenchmark, __doc__)

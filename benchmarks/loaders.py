"""Measure images per second of loaders, ours and others, with random-resized crops.

    python -m benchmarks.loaders        # all that can run here, on generated crops of photographs
    python -m benchmarks.loaders --data train.beton --loaders ffcv+labels,ffcv-stock \\
        --threads 1 2 --json out.json

All loaders read the same images in one run. Each round runs one epoch of every loader, from
requesting the first batch to receiving the last, in rotating order; a ratio is the median of the
ratios within a round. Loaders are built --makings times, as two instances of one loader are not
equally fast. What labels cost is also a ratio of processor time, to which other processes matter
less. With --threads n the process and its workers are confined to n cores.
benchmarks/peers.py describes the loaders. Without --data the images are generated once, below
--cache, from photographs that ship with scikit-image and scikit-learn. Rows are appended to
--results.
"""

import os
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.harness import (
    CORES,
    Count,
    Output,
    Series,
    check_threads,
    choose_cores,
    command,
    compare,
    device_name,
    environment,
    pin,
    report,
    restore_cpus_after,
    spread_rows,
    take_turns,
    use_cores,
)
from benchmarks.peers import PEERS, BenchmarkSet, Peer, PeerConfig, explain_missing
from benchmarks.photographs import beton_dataset, sample_dataset
from densefeed import native
from densefeed.pipelines.batch import allocate_maps
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.loader import Memory
from densefeed.system.errors import UserError
from densefeed.system.progress import steps_bar

OURS = "ffcv+labels"
# Required median ratio, and the goal beyond it: with one thread (of a loader to itself: two threads
# to one), from 500 pixel JPEGs of quality 90 and 4:2:0 subsampling, to 224 pixels.
BARS = {
    (OURS, OURS): "1.8, goal 1.9",
    (OURS, "ffcv-stock"): "3, goal 4",
    (OURS, "token-labeling+labels"): "12, goal 20",
    (OURS, "ffcv"): "0.97, goal 0.99",
    ("dali-cpu+labels", "nvidia-dali-cpu"): "1",
    ("dali-cpu+labels", "dali-cpu"): "0.97, goal 0.99",
    **{
        (OURS, peer): "2, goal 3"
        for peer in ("simplejpeg", "torchvision", "torchvision-tensor", "timm")
    },
}
# Loaders with and without labels that have no worker processes, whose time would not count.
LABELS = [(f"{name}+labels", name) for name in ("ffcv-2-crops", "ffcv", "folder")]
# Ratios beside those of OURS to every other loader.
RATIOS = [
    # Above 4/3 the second crop of an image costs less than half of the first.
    ("ffcv-2-crops+labels", OURS),
    ("ffcv-2-crops", "ffcv"),
    ("folder+labels", "folder"),
    ("dali-cpu+labels", "dali-cpu"),
    ("dali-cpu+labels", "nvidia-dali-cpu"),
    ("dali-gpu+labels", "dali-gpu"),
    ("dali-gpu+labels", "nvidia-dali-gpu"),
]

Key = tuple[str, int]  # loader, threads
Rates = dict[Key, list[float]]  # images per second, one value per round


class Measured(NamedTuple):
    """Rates of all loaders."""

    rates: Rates  # by wall-clock time
    processor: Rates  # by the processor time of this process


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
    facts, measured = environment(), measure(names, data, benchmark)
    rows = []
    for (name, threads), values in sorted(measured.rates.items(), key=lambda item: item[0][1]):
        rows += [row | {"threads": threads} for row in spread_rows({name: values}, "images/s")]
    if benchmark.stages:
        stages = spread_rows(measure_stages(data, benchmark), "µs/image")
        rows += [row | {"threads": 1} for row in stages]
    return report(benchmark, rows, ratios(measured), describe(data.paths, names), facts)


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


def measure(names: list[str], data: BenchmarkSet, benchmark: LoaderBenchmark) -> Measured:
    """Return images per second of every loader with every number of threads, a value per round.

    Loaders are built again for each share of the rounds, in another order each time. Two identical
    ones differ by up to 6 % of processor time for their whole lifetime (measured for two of DALI's
    in one process), and no number of rounds averages that out.
    """
    # The thread counts of a loader are neighbors: drift of the machine would blur their ratio most.
    keys = [(name, threads) for name in names for threads in dict.fromkeys(benchmark.threads)]
    makings = min(benchmark.makings, benchmark.rounds)
    shares = list(map(len, np.array_split(range(benchmark.rounds), makings)))
    rates, processor = ({key: [] for key in keys} for _ in range(2))
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
                first, works, spent = making % len(keys), {}, {key: [] for key in keys}
                for key in keys[first:] + keys[:first]:
                    config = PeerConfig(data, key[1], benchmark.batch, benchmark.size)
                    peer = alive.enter_context(closing(PEERS[key[0]].build(config)))
                    works[key] = partial(run_epoch, peer, spent[key])
                new = take_turns(
                    works, share, before, lambda key: advance(1, f"{key[0]}, {key[1]} threads")
                )
                for key, values in new.items():
                    rates[key] += values
                    # Without the warm-up, as `take_turns`.
                    processor[key] += spent[key][1:]
    return Measured(rates, processor)


def run_epoch(peer: Peer, rates: list[float], epoch: int) -> int:
    """Consume an epoch and return its number of images; append those per second of processor."""
    start = time.process_time()
    count = sum(batch.count for batch in peer.batches(epoch))
    rates.append(count / (time.process_time() - start))
    return count


def ratios(measured: Measured) -> list[dict]:
    """Return the ratios within rounds between loaders and between numbers of threads.

    They are: ours with labels to every other loader, each of ours with labels to the same without,
    ours through DALI to NVIDIA's own pipeline, and every number of threads to the smallest; then
    those of processor time with and without labels.
    """
    rates, processor = measured
    names, counts = (list(dict.fromkeys(part)) for part in zip(*rates, strict=True))
    others, few = [(OURS, name) for name in names if name != OURS], min(counts)
    pairs = [((a, n), (b, n)) for n in counts for a, b in others + RATIOS]
    pairs += [((name, n), (name, few)) for n in counts for name in names if n != few]
    found = [
        compare(a[0], b[0], rates[a], rates[b], bar=find_bar(a, b))
        | {"threads": a[1] if a[1] == b[1] else f"{a[1]}/{b[1]}"}
        for a, b in pairs
        if a in rates and b in rates
    ]
    return found + [
        compare(a, b, processor[a, n], processor[b, n], ", processor time") | {"threads": n}
        for n in counts
        for a, b in LABELS
        if a in names and b in names
    ]


def find_bar(a: Key, b: Key) -> str:
    """Return the required value and the goal of the ratio of `a` to `b`; empty if it has none."""
    measured_there = (a[1], b[1]) == (2 if a[0] == b[0] else 1, 1)
    return BARS.get((a[0], b[0]), "") if measured_there else ""


def measure_stages(data: BenchmarkSet, benchmark: LoaderBenchmark) -> Series:
    """Time planning, reading, decoding, resampling and labels separately on one core.

    Microseconds per image, one value per round.
    """
    config = PeerConfig(data, 1, benchmark.batch, benchmark.size)
    with use_cores(1):
        # The first pass is for warm-up.
        _, *passes = [time_stages(config, number) for number in range(benchmark.rounds + 1)]
    return {
        f"stage {name}": [1e6 * taken[name] / len(data.labels) for taken in passes]
        for name in passes[0]
    }


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
        rows, spec = None, source.score_maps
        if spec:
            to = [field.numpy() for field in allocate_maps(len(ids), spec, memory.empty)]
            parts = replace(source.map_parts(ids), to=to, limits=spec.limits)
            rows = native.PartRows(parts)
        job = native.Job(samples, pixels, rows)
        taken["plan"] += time.perf_counter() - start
        job.decode()
        for name, microseconds in zip(native.STAGES, samples["took"].sum(0).tolist(), strict=True):
            taken[name] += microseconds / 1e6
    source.close()
    return taken


if __name__ == "__main__":
    command(main, LoaderBenchmark, __doc__)

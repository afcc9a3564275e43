"""Recommend a loader and a number of threads for a training on this machine.

    densefeed advise lvvit_s_224_token_label --data train.beton
    densefeed advise deit_s_224 --data imagenet --batch 512

It takes the recipe and the options of the training; --val, --out, --loader and --threads may be
left out. Every loader that can read the data, or the one that --loader names, is timed alone with
each number of threads, or with --threads. The step
is that of the training, from the copy to the device and the augmentation to the update and the EMA;
it is timed alone, on one batch that a loader made. The combined rate is an estimate, not a
measurement: it is limited by the slower of the two, and by the cores, of which each image costs a
share in the loader and a share in the step (on a GPU, the thread that launches kernels). The
measurements take seconds and are not a benchmark: nothing is appended to benchmarks/results.csv.
"""

if not __package__:
    import script_start  # noqa: F401

import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import torch
from rich.markup import escape
from rich.table import Table

from densefeed.objectives import build_objective
from densefeed.pipelines.batch import Batch
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.open import LOADERS, DataOptions, open_dataset
from densefeed.recipes.command_line import read_config
from densefeed.step import Step
from densefeed.system.devices import CORES, choose_device, describe_load, synchronize
from densefeed.system.errors import UserError, is_out_of_memory, run
from densefeed.system.malloc import tune_malloc
from densefeed.system.options import flag, named_options, with_options
from densefeed.system.precision import autocast_dtype
from densefeed.system.progress import steps_bar
from densefeed.system.terminal import print, print_table
from densefeed.training.build import build_model
from densefeed.training.captured_update import choose_update
from densefeed.training.compile import compile_step
from densefeed.training.config import Config
from densefeed.training.monitor import TrainMonitor
from densefeed.training.ranks import Ranks
from densefeed.training.setup import build_trainable, choose_compile, divide_batch, open_loader

# The cores that this process may use: fewer than the machine has under taskset or a batch system.
# Seconds of each measurement in each round.
SECONDS = 1.0
ROUNDS = 3
# Steps before the first measurement on a GPU: cuDNN selects kernels, torch.compile compiles, and
# the caching allocator grows. One step is enough on a CPU.
WARM_STEPS = 3
# Images per forward pass on a CPU. Its images/s hardly depend on the batch, and LV-ViT-S takes
# seconds for a batch of 64.
CPU_BATCH = 8
# Images per batch of a loader that is measured without --batch.
LOADER_BATCH = 64
# Low enough for the same images in every step without warm-up.
LEARNING_RATE = 1e-4
# Load average, as a share of the machine's cores, that makes the measurements unreliable.
BUSY = 0.5
# Rates above this share of the best one count as equal: a measurement of one second cannot tell
# them apart.
EQUAL = 0.98


class Throughput(NamedTuple):
    """What a loader or a training step does alone."""

    images_per_s: float
    cores: float  # processor seconds per second, all threads of this process


class Candidate(NamedTuple):
    """A loader with a number of threads."""

    loader: str
    threads: int
    speed: Throughput


class Advice(NamedTuple):
    """The recommended loader and the rate to expect from the training."""

    choice: Candidate
    images_per_s: float
    bottleneck: Literal["loader", "step"]  # the slower of the two


# ------------------------------------------------------------------------- decision


def combine(loader: Throughput, step: Throughput, cores: int) -> float:
    """Estimate the images/s of a training that runs `loader` and `step` together on `cores`."""
    core_seconds = loader.cores / loader.images_per_s + step.cores / step.images_per_s
    # A coarse clock may have counted no processor time.
    limit = cores / core_seconds if core_seconds else float("inf")
    return min(loader.images_per_s, step.images_per_s, limit)


def choose(candidates: list[Candidate], step: Throughput, cores: int) -> Advice:
    """Choose the candidate with the fastest training.

    Among equal rates it is the one with the fewest threads, then the least processor time per
    image.
    """
    rates = {one: combine(one.speed, step, cores) for one in candidates}
    best = [one for one, rate in rates.items() if rate >= EQUAL * max(rates.values())]
    choice = min(best, key=lambda one: (one.threads, one.speed.cores / one.speed.images_per_s))
    slower = "loader" if choice.speed.images_per_s < step.images_per_s else "step"
    return Advice(choice, rates[choice], slower)


def thread_counts(cores: int) -> tuple[int, ...]:
    """Return the powers of two up to `cores`, and `cores`."""
    return tuple(sorted({cores, *(2**power for power in range(cores.bit_length()))}))


def format_rate(rate: float) -> str:
    """Format a rate; below 10 with one decimal, since a CPU may train less than one image/s."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def recommend(
    advice: Advice, step: Throughput, words: list[str], packed: bool, planes: int = 0
) -> str:
    """Return the recommendation: a command line of densefeed train, its rate and its bottleneck.

    `words` are those of the training as it was given, whose images are `packed` or not. `planes` is
    the size of the images as planes, bytes; 0 if they are not JPEGs of a .beton.
    """
    loader, threads, speed = advice.choice
    given, words = named_options(words), ["densefeed", "train", *words]
    if "val_fraction" in given:
        given.add("val")
    for name, value in (("loader", loader), ("threads", threads), ("val", "VAL"), ("out", "RUN")):
        words += [] if name in given else [flag(name), value]
    trains = f"`{shlex.join(map(str, words))}` trains about {format_rate(advice.images_per_s)}"
    loader_rate, step_rate = format_rate(speed.images_per_s), format_rate(step.images_per_s)
    if advice.bottleneck == "step":
        return (
            f"{trains} images/s; the training step is the bottleneck ({step_rate} images/s alone, "
            f"this loader {loader_rate}), so another loader or more threads would not help."
        )
    pack = "pack them smaller (densefeed pack --max-side)"
    if not packed:
        pack = "pack the images with densefeed pack"
    # DALI decodes JPEGs only; planes would not pass through it.
    elif planes and loader == "ffcv":
        pack = (
            "pack the images with densefeed pack --form planes, which about doubles this "
            f"rate if their {planes / 2**30:,.1f} GiB fit in memory, or smaller (--max-side)"
        )
    return (
        f"{trains} images/s; the loader is the bottleneck ({loader_rate} images/s alone, "
        f"the step {step_rate}): {pack}, or use more cores."
    )


# ------------------------------------------------------------------------- measurement


def measure_speed(turn: Callable[[], int], wait: Callable[[], object] = int) -> Throughput:
    """Call `turn`, which returns its number of images, for SECONDS; `wait` ends what it queued."""
    began, used, images = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < SECONDS:
        images += turn()
    # Once at the end, because the loop of train.py does not wait for the device between steps.
    wait()
    took = time.perf_counter() - began
    return Throughput(images / took, (time.process_time() - used) / took)


def median_speed(speeds: list[Throughput]) -> Throughput:
    """Return the median of each field."""
    return Throughput(*map(median, zip(*speeds, strict=True)))


def open_loaders(
    data: DataOptions, batch: int, given: Collection[str] = ()
) -> dict[tuple[str, int], ThreadedLoader]:
    """Open every kind of loader that can read the data, with each number of threads.

    Where `loader` or `threads` is a `given` option, it is the only one. `batch` is that of the
    training. Raises UserError if none can read the data.
    """
    kinds = [data.loader] if "loader" in given else LOADERS
    counts = [data.threads] if "threads" in given else thread_counts(CORES)
    batch = min(batch, LOADER_BATCH // data.repeats * data.repeats)
    opened, errors = {}, []
    for kind in kinds:
        try:
            for threads in counts:
                one = replace(data, loader=kind, threads=threads)
                opened[kind, threads] = open_dataset(one, "train", batch=batch, seed=0)
        except UserError as error:
            errors.append(error)
            print(f"--loader {kind}: skipped, {error}")
    if not opened:
        raise errors[-1 if is_packed(data) else 0]
    return opened


def is_packed(data: DataOptions) -> bool:
    """Whether the training set is not a folder of images."""
    return not Path(str(data.train)).is_dir()


def measure_loaders(loaders: dict[tuple[str, int], ThreadedLoader]) -> list[Candidate]:
    """Measure each loader alone, in rounds of all of them."""
    speeds = {key: [] for key in loaders}
    with steps_bar("loaders", ROUNDS * len(loaders), 0) as advance:
        # Every round measures all loaders, so that a slow moment of the machine hits all alike.
        for number in range(ROUNDS):
            for key, loader in loaders.items():
                with closing(count_images(loader, number)) as stream:
                    # The first batch starts the threads and puts further batches in flight.
                    next(stream)
                    speeds[key].append(measure_speed(lambda stream=stream: next(stream)))
                advance(1, f"{key[0]}, {key[1]} threads")
    return [Candidate(*key, median_speed(values)) for key, values in speeds.items()]


def count_images(loader: ThreadedLoader, epoch: int) -> Iterator[int]:
    """Yield the number of images of each batch, epoch after epoch without end."""
    while True:
        with closing(loader.batches(epoch)) as batches:
            for batch in batches:
                # The last batch of an epoch is padded with weight 0.
                yield int((batch.weight > 0).sum())
        epoch += 1


def build_step(config: Config, device: torch.device) -> Callable[[], int]:
    """Build the step of train.py's loop; it returns its images, and does not wait for the device.

    All steps get the first batch of the training set as the loader made it, and copy, augment and
    split it, with other draws in each.
    """
    ranks, options = Ranks(0, 1, device), config.model
    objective, optim = build_objective(config.setting), divide_batch(config.optim, ranks)
    run = choose_compile(config.run, ranks, objective)
    with closing(open_loader(config.data, optim, run.seed, objective, "train", ranks)) as loader:
        with closing(loader.batches(0)) as batches:
            first = next(batches)
        model, _ = build_model(options, config.data, objective, loader.num_classes)
        student = build_trainable(options, optim, run, objective, model, ranks)
        dtype, trainable = autocast_dtype(run.precision, device), student.trainable
        compute = compile_step(run.compile, trainable)
        step = Step(loader, trainable, objective, config.data, config.augment, dtype, compute)
    nothing_seen = torch.zeros(2, dtype=torch.float64)
    monitor = TrainMonitor(student, step, ranks, run.out, nothing_seen, 0)
    student.train()
    numbers, stream = count(), step.batches(0, 0, partial(repeat_batch, first))
    do_update = choose_update(run.compile, ranks)

    def do_step() -> int:
        student.set_rate(LEARNING_RATE)
        losses = step.losses(student.network, next(stream))
        loss, _ = do_update(student, ranks, next(numbers), losses)
        monitor.add(loss)
        return optim.batch

    return do_step


def repeat_batch(batch: Batch, _: Iterator[Batch]) -> Iterator[Batch]:
    """Yield a batch without end, each time as of another epoch, by which augmentation draws."""
    return (batch._replace(epoch=epoch) for epoch in count())


def shrink_batch(config: Config) -> Config:
    """Return the config of the step that a CPU measures: one with fewer images."""
    batch, microbatch = config.optim.batch, config.optim.microbatch
    if batch <= CPU_BATCH:
        return config
    # Two forward passes show what it costs to accumulate gradients.
    images = min(microbatch or CPU_BATCH, CPU_BATCH)
    whole = not microbatch or microbatch == batch
    return with_options(config, batch=images * (1 if whole else 2), microbatch=images)


def measure_step(config: Config) -> tuple[Throughput, dict]:
    """Measure the training step alone; also return its objective, batch and device for the report.

    Raises UserError where memory runs out.
    """
    device = choose_device(config.run.device)
    on_gpu = device.type == "cuda"
    if not on_gpu:
        config = shrink_batch(config)
        # As train.py does: without it page faults take 8 % of a step of LV-ViT-S
        # (system/malloc.py).
        tune_malloc()
    images = config.optim.batch
    try:
        step = build_step(config, device)
        for _ in range(WARM_STEPS if on_gpu else 1):
            step()
        wait = partial(synchronize, device)
        wait()
        speed = median_speed([measure_speed(step, wait) for _ in range(ROUNDS)])
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"a step with {config.optim.microbatch or images} images per forward pass needs more "
            f"memory than {device} has; give a smaller --microbatch, or a smaller --batch"
        ) from error
    about = {"model": config.model.name, "objective": config.objective.name}
    return speed, about | {"batch": images, "device": str(device)}


# ------------------------------------------------------------------------- command


def main() -> dict:
    """Measure, choose and print; return what was measured."""
    config = read_config(__doc__, out=Path("RUN"))
    # The load is read before anything is measured, which would itself be load.
    load, given = describe_load(BUSY), named_options(sys.argv[2:])
    loaders = open_loaders(config.data, config.optim.batch, given)
    with ExitStack() as stack:
        first, *_ = [stack.enter_context(closing(loader)) for loader in loaders.values()]
        candidates = measure_loaders(loaders)
    step, about = measure_step(with_options(config, loader=candidates[0].loader, threads=1))
    advice = choose(candidates, step, CORES)
    planes = first.source.estimate_planes() if isinstance(first.source, FfcvSource) else 0
    packed, maps = is_packed(config.data), "with" if first.score_maps is not None else "without"
    document = {
        "loaders": [
            {"loader": loader, "threads": threads, **speed._asdict()}
            | {"training": combine(speed, step, CORES)}
            for loader, threads, speed in candidates
        ],
        "step": about | step._asdict(),
        "data": f"{first.plan.num_samples:,} images, {maps} score maps",
        "advice": recommend(advice, step, sys.argv[1:], packed, planes),
    }
    show(document, advice)
    if load:
        print(
            f"Other processes used this machine before the measurement started ({load}); repeat it "
            "on an idle machine."
        )
    return document


def show(document: dict, advice: Advice) -> None:
    """Print the measurements as a table, and the recommendation."""
    step = document["step"]
    title = f"Loaders and the training step on {CORES} cores, {document['data']}"
    table = Table("", title=title, title_justify="left")
    for name in ("threads", "images/s alone", "share of the cores", "training, images/s"):
        table.add_column(name, justify="right")
    for line in document["loaders"]:
        chosen = (line["loader"], line["threads"]) == advice.choice[:2]
        table.add_row(
            f"--loader {line['loader']}",
            str(line["threads"]),
            format_rate(line["images_per_s"]),
            f"{line['cores'] / CORES:.0%}",
            format_rate(line["training"]),
            style="bold" if chosen else None,
        )
    name = f"step of {step['model']}, {step['objective']}, {step['batch']} images, {step['device']}"
    rate, share = format_rate(step["images_per_s"]), f"{step['cores'] / CORES:.0%}"
    table.add_row(escape(name), "", rate, share, "")
    # Names stay whole in a log file too.
    print_table(table, least_width=110)
    # Not by rich, which reads names of emoji in a path, also without markup.
    print(document["advice"])


def command() -> None:
    """Run `densefeed advise`."""
    run(main)


if __name__ == "__main__":
    command()

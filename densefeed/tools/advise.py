"""`benchmarks/loaders.py --advise`: which loader, with how many threads, a training on this machine
should be given.

Each loader that can read the data delivers alone for a moment, with each number of threads, and the
model trains alone on a constant batch. What they would do together is reckoned, not measured: no
more than either alone, and no more than the cores allow, of which an image takes so many seconds of
the loader and so many of the step (on a GPU its launching thread's). A moment's advice is no
benchmark: nothing is appended to --results.
"""

import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple, get_args, get_type_hints

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import step as step_benchmark
from densefeed.models.token_transformer import has_tokens
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.system.devices import choose_device, synchronize
from densefeed.system.errors import UserError
from densefeed.system.malloc import tune_malloc
from densefeed.system.progress import steps_bar
from densefeed.system.provenance import environment, write_json
from densefeed.train import build_model, open_loader
from densefeed.training.config import Config
from densefeed.training.recipes import RECIPES

SECONDS = 1.0  # of each measurement in each round
ROUNDS = 3
WARM_STEPS = 3  # cuDNN chooses, the compiler compiles, memory is asked for
# images of a step on a CPU, whose rate hardly depends on it: LV-ViT-S takes seconds for 64
CPU_BATCH = 8
BUSY = 0.5  # load average of the last minute, of the cores
ALIKE = 0.98  # of the best rate: what no measurement of a second tells apart
LOADERS = get_args(get_type_hints(Config)["loader"])


class Speed(NamedTuple):
    """What a loader or a step does alone."""

    images_per_s: float
    cores: float  # seconds of processor time in a second, all threads of this process


class Candidate(NamedTuple):
    """A loader with a number of threads."""

    loader: str
    threads: int
    speed: Speed


class Advice(NamedTuple):
    """What to choose, and what to expect of it."""

    choice: Candidate
    images_per_s: float  # of the training
    bottleneck: Literal["loader", "step"]  # the slower of the two


class Request(NamedTuple):
    """What advice is asked for."""

    data: Path
    labels: Path | None
    model: str
    batch: int  # images
    size: int  # side of the network's input, pixels
    threads: tuple[int, ...]
    cores: int  # that this process may use


# ------------------------------------------------------------------------- deciding


def together(loader: Speed, step: Speed, cores: int) -> float:
    """Images per second of a training: as its slower half, or as the cores that both share
    allow.
    """
    core_seconds = loader.cores / loader.images_per_s + step.cores / step.images_per_s
    return min(
        loader.images_per_s,
        step.images_per_s,
        cores / core_seconds if core_seconds else float("inf"),
    )


def advise(candidates: list[Candidate], step: Speed, cores: int) -> Advice:
    """The candidate whose training is fastest; of those alike, the fewest threads, then the least
    processor time an image.
    """
    rates = {one: together(one.speed, step, cores) for one in candidates}
    alike = [one for one, rate in rates.items() if rate >= ALIKE * max(rates.values())]
    choice = min(alike, key=lambda one: (one.threads, one.speed.cores / one.speed.images_per_s))
    return Advice(
        choice, rates[choice], "loader" if choice.speed.images_per_s < step.images_per_s else "step"
    )


def thread_counts(cores: int) -> tuple[int, ...]:
    """1, 2, 4, ... and all cores."""
    return tuple(
        sorted({cores, *(2**power for power in range(cores.bit_length()) if 2**power <= cores)})
    )


def recipe_of(model: str, objective: str, size: int) -> list[str]:
    """Words of train.py for a model and an objective: the first recipe of both at this size, or
    another one with what differs.
    """
    recipes = {recipe.__name__: recipe() for recipe in RECIPES}
    plain = {
        name: config
        for name, config in recipes.items()
        if config.drloc == config.bootstrap == "none"
    }
    same = [name for name, config in plain.items() if config.objective == objective]
    fitting = [
        name for name in same if recipes[name].model == model and not recipes[name].model_kwargs
    ]
    name = next((name for name in fitting if recipes[name].size == size), (fitting or same)[0])
    words = [name] if recipes[name].model == model else [name, "--model", model]
    if recipes[name].mixtoken and not has_tokens(model):
        words.append("--no-mixtoken")
    return words if recipes[name].size == size else [*words, "--size", str(size)]


def shown(rate: float) -> str:
    """A rate as text: a step on a CPU may do less than one image a second."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def sentence(advice: Advice, step: Speed, request: Request, objective: str) -> str:
    """The advice with the words of train.py that follow it."""
    loader, threads, speed = advice.choice
    words = [
        "python",
        "train.py",
        *recipe_of(request.model, objective, request.size),
        "--loader",
        loader,
        "--data",
        request.data,
    ]
    words += ["--labels", request.labels] if request.labels else []
    words += ["--threads", threads, "--val", "VAL", "--out", "RUN"]
    told = f"`{shlex.join(map(str, words))}` trains about {shown(advice.images_per_s)} images/s"
    if advice.bottleneck == "step":
        return (
            f"{told}; the training step is the bottleneck ({shown(step.images_per_s)} images/s alone, "
            f"this loader {shown(speed.images_per_s)}), so another loader or more threads would gain nothing."
        )
    pack = (
        "pack the images with tools/pack_dataset.py"
        if Path(request.data).is_dir()
        else "pack them smaller (tools/pack_dataset.py --max-side)"
    )
    return (
        f"{told}; the loader is the bottleneck ({shown(speed.images_per_s)} images/s alone, "
        f"the step {shown(step.images_per_s)}): {pack}, or give it more cores."
    )


# ------------------------------------------------------------------------- measuring


def speed_of(turn: Callable[[], int]) -> Speed:
    """What `turn`, which says how many images it did, does in SECONDS."""
    began, used, images = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < SECONDS:
        images += turn()
    took = time.perf_counter() - began
    return Speed(images / took, (time.process_time() - used) / took)


def middle(speeds: list[Speed]) -> Speed:
    """The medians of both."""
    return Speed(*(median(values) for values in zip(*speeds, strict=True)))


def opened(request: Request) -> dict[tuple[str, int], ThreadedLoader]:
    """A loader of each kind that can read the data with each number of threads. UserError if no
    kind can.
    """
    found, reasons = {}, []
    for kind in LOADERS:
        try:
            for threads in request.threads:
                config = Config(
                    data=request.data,
                    labels=request.labels,
                    loader=kind,
                    threads=threads,
                    size=request.size,
                    batch=request.batch,
                    objective="relabel",
                )
                found[kind, threads] = open_loader(config, "train")
        except UserError as error:
            reasons.append(error)
            print(f"--loader {kind}: left out, {error}")
    if not found:
        raise reasons[0]
    return found


def loader_speeds(loaders: dict[tuple[str, int], ThreadedLoader]) -> list[Candidate]:
    """What each delivers, in rounds that take turns."""
    speeds: dict[tuple[str, int], list[Speed]] = {key: [] for key in loaders}
    with steps_bar("loaders", ROUNDS * len(loaders), 0) as advance:
        for number in range(ROUNDS):
            for key, loader in loaders.items():
                with closing(endless(loader, number)) as stream:
                    next(stream)  # threads start, the first batches are in the making
                    speeds[key].append(speed_of(lambda stream=stream: next(stream)))
                advance(1, f"{key[0]}, {key[1]} threads")
    return [Candidate(*key, middle(values)) for key, values in speeds.items()]


def endless(loader: ThreadedLoader, epoch: int) -> Iterator[int]:
    """Images of each batch of one epoch after the other, from `epoch` on."""
    while True:
        with closing(loader.batches(epoch)) as batches:
            for batch in batches:
                yield int((batch.weight > 0).sum())
        epoch += 1


def busy_note(cores: int) -> str:
    """What to say if others use this machine. Two threads of a step then wait for each other: a
    seventh of one's rate was seen.
    """
    load = os.getloadavg()[0]
    if load <= BUSY * cores:
        return ""
    return f"Other processes kept {load:.1f} of {cores} cores busy before this began; ask again on an idle machine."


def step_speed(
    request: Request, classes: int, objective: str, device: torch.device
) -> tuple[Speed, int]:
    """The inside of train.py's loop on a constant batch; and of how many images."""
    images = request.batch if device.type == "cuda" else min(request.batch, CPU_BATCH)
    shape = step_benchmark.Benchmark(
        model=request.model, batch=images, size=request.size, classes=classes
    )
    config = step_benchmark.config_of(
        shape, objective, "blocks" if device.type == "cuda" else "never"
    )
    if device.type == "cpu":
        tune_malloc()
    try:
        model = build_model(config, classes)[0].to(device, memory_format=torch.channels_last)
        batch, spec = step_benchmark.constant_batch(shape, model, classes, device)
        step = step_benchmark.our_step(config, model, device, spec)

        def turn() -> int:
            step(batch)
            synchronize(device)  # or what is counted is how fast steps are queued
            return images

        for _ in range(WARM_STEPS if device.type == "cuda" else 1):
            turn()
        return middle([speed_of(turn) for _ in range(ROUNDS)]), images
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"--batch {images}: memory ran out on {device}; give a smaller one"
        ) from error


# ------------------------------------------------------------------------- telling


def main(request: Request, json: Path | None) -> dict:
    """Measure, decide, print; the document that --json writes."""
    note, device, loaders = busy_note(request.cores), choose_device("auto"), opened(request)
    with ExitStack() as stack:
        first, *_ = [stack.enter_context(closing(loader)) for loader in loaders.values()]
        candidates = loader_speeds(loaders)
    classes, dense, images = first.num_classes, first.score_maps is not None, first.plan.num_samples
    objective = ("token-label" if has_tokens(request.model) else "relabel") if dense else "ce"
    step, step_batch = step_speed(request, classes, objective, device)
    advice = advise(candidates, step, request.cores)
    document = {
        "loaders": [
            {
                "loader": one.loader,
                "threads": one.threads,
                **one.speed._asdict(),
                "training": together(one.speed, step, request.cores),
            }
            for one in candidates
        ],
        "step": {
            "model": request.model,
            "objective": objective,
            "batch": step_batch,
            "device": str(device),
            **step._asdict(),
        },
        "data": f"{images:,} images, {'with' if dense else 'without'} dense labels",
        "bottleneck": advice.bottleneck,
        "advice": sentence(advice, step, request, objective),
        "environment": environment(("torch", "torchvision", "timm", "numpy", "pillow")),
    }
    show(document, advice, request.cores)
    if note:
        print(note)
    if json is not None:
        write_json(json, document)
    return document


def show(document: dict, advice: Advice, cores: int) -> None:
    """Print the document as a table and a sentence."""
    console, step = Console(), document["step"]
    console.width = max(console.width, 110)
    table = Table(
        title=f"Alone and together on {cores} cores, {document['data']}", title_justify="left"
    )
    for name in ("", "threads", "images/s alone", "share of the cores", "training, images/s"):
        table.add_column(name, justify="right" if name else "left")
    for line in document["loaders"]:
        chosen = (line["loader"], line["threads"]) == advice.choice[:2]
        numbers = (
            shown(line["images_per_s"]),
            f"{line['cores'] / cores:.0%}",
            shown(line["training"]),
        )
        table.add_row(
            f"--loader {line['loader']}",
            str(line["threads"]),
            *numbers,
            style="bold" if chosen else None,
        )
    numbers = shown(step["images_per_s"]), f"{step['cores'] / cores:.0%}"
    table.add_row(
        f"step of {step['model']}, {step['objective']}, {step['batch']} images, {step['device']}",
        "",
        *numbers,
        "",
    )
    console.print(table)
    console.print(document["advice"], markup=False, soft_wrap=True)

"""Measure whole training steps: ours and timm's on the same network and images, and a lower bound
of their time on this device.

    python -m benchmarks.step --model lvvit_s --batch 8 --objective token-label --json step.json
    python -m benchmarks.step --model deit_small_patch16_224 --batch 256 --device cuda
    python -m benchmarks.step --loader ffcv --data train.beton --objective token-label --device cuda
    python -m benchmarks.step --model swin_tiny_patch4_window7_224 --drloc --batch 8

`ours` is the work of train.py between two batches on the device: forward, loss, backward, gradient
norm, non-finite guard, fused AdamW, EMA. `timm` is the step of timm's train.py, built from timm's
own parts: autocast around network and LabelSmoothingCrossEntropy, NativeScaler in float16,
`create_optimizer_v2("adamw")` with its defaults (foreach on CUDA, a loop on a CPU; not fused),
ModelEmaV3 with warm-up, and `loss.item()`, a host sync in every step. Both train one network from
equal weights on equal normalized images in channels_last with the image's label; their losses
before and after the first update are printed with their relative difference. Both have a constant
learning rate, and no stochastic depth or mixing.

`--bootstrap joint` (or `shared`) adds `agent`, the same step of the model's agent CNN alone, and
`both`, a step of the two together (Bootstrapping ViTs, densefeed/objectives/bootstrapping.py);
`both` is compared with `ours` and `agent` run one after the other.

`--objective token-label` adds `ours+labels`: the same step with a dense label on every token. Its
network has a second head, which `ours` lacks, so its ratio to `ours` is the full cost. `--loader
ffcv` adds a contestant that gets --data's batches from train.py's loader, timed from the request of
the first batch to the end of the last step, and the share of that time spent waiting for data.

`--drloc` adds `ours+drloc`: the step with DRLoc's loss, whose ratio to `ours` is its cost. Table 14
in the supplement of the DRLoc paper (arXiv 2106.03746) gives it for CvT-13, Swin-T and T2T-ViT-14:
2.43, 2.36 and 1.77 %.

On a CPU, ours keeps freed memory (`tune_malloc`); timm's turns run with the C library's default
behavior.

Modes other than `eager` compile what the respective train.py compiles: ours the blocks and the loss
(`compiled`), the step from image to loss (`whole`), or that as CUDA graphs (`captured`); timm's the
network, in `captured` with PyTorch's CUDA graphs too.

The floor is the least possible time of a step: its matrix products at the highest rate measured
here, or its bytes at the highest copy rate, whichever takes longer. A ratio is a / b in images per
second of the same round, so larger is better. Rows are appended to --results.
"""

import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3, NativeScaler
from torch import Tensor, nn

from benchmarks import targets
from benchmarks.harness import (
    COLUMNS,
    Spread,
    append_rows,
    choose_cores,
    pairwise,
    pin,
    restore_cpus_after,
    take_turns,
)
from densefeed.models.agent_cnn import AgentCNN
from densefeed.models.token_transformer import FAMILIES, has_tokens
from densefeed.objectives import build_objective
from densefeed.objectives.base import StepContext, step_loss
from densefeed.pipelines.augment.augmentation import Augmentation, augment_batches
from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.system.devices import choose_device, synchronize
from densefeed.system.errors import UserError, run
from densefeed.system.malloc import set_malloc, tune_malloc
from densefeed.system.options import with_options
from densefeed.system.progress import steps_bar
from densefeed.system.provenance import RESULTS, environment, write_json
from densefeed.training.build import autocast_dtype, build_model, flops_per_size
from densefeed.training.compile import compile_step, get_networks
from densefeed.training.config import Config
from densefeed.training.ranks import Ranks
from densefeed.training.setup import open_loader
from densefeed.training.speed import SECONDS, ActivationBytes, RunClock, matmul_rate, training_flops
from densefeed.training.student import build_student, update

PACKAGES = ("torch", "torchvision", "timm", "numpy")
OURS, TIMM, LABELS, DRLOC, LOADER = "ours", "timm", "ours+labels", "ours+drloc", "+loader"
AGENT, BOTH, IN_TURN = "agent", "both", "ours, then agent"
CORES = len(os.sched_getaffinity(0))
# Required median ratios: labels cost at most 3 % of the step and of the loader, DRLoc at most 2 %;
# two networks together take at most 1.15 times as long as one after the other.
BARS = {
    (LABELS, OURS): 0.97,
    (DRLOC, OURS): 1 / 1.02,
    (OURS + LOADER, OURS): 0.97,
    (LABELS + LOADER, LABELS): 0.97,
    (BOTH, IN_TURN): 1 / 1.15,
}
# Largest relative difference of two losses that are equal up to rounding: bfloat16 resolves 2^-8,
# and part of that remains in the sums.
EQUAL = {None: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SCALES = 16  # halvings from GradScaler's initial scale, 65,536, to 1
RATE = 1e-4  # learning rate, without warm-up, for the same images in every step
# Bytes of the copy whose rate is measured: more than caches hold.
COPIED = {"cpu": 2**28, "cuda": 2**30}

Mode = Literal["eager", "compiled", "whole", "captured"]
# Values of train.py's --compile.
COMPILED = {"eager": "never", "compiled": "blocks", "whole": "whole", "captured": "graph"}
Key = tuple[str, str]  # contestant, mode
# The state that glibc's own adaptation reaches once a tensor of 32 MiB was freed: larger ones are
# mapped, and at most 64 MiB of free memory are kept.
LEFT_ALONE = {"mmap_max": 65536, "mmap_threshold": 2**25, "trim_threshold": 2**26}
Step = Callable[[Batch], Tensor | float]  # trains on a batch and returns its loss


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Options of this benchmark."""

    # any timm classifier; token-label needs a token head (lvvit_*, dhvt_*, t2t_vit_*)
    model: str = "lvvit_s"
    batch: int = 64  # images per batch
    size: int = 224  # side of the network's input, pixels
    classes: int = 1000  # of the constant batch; a --data file has its own
    # token-label: also measure ours with a dense label on every token
    objective: Literal["ce", "token-label"] = "ce"
    drloc: bool = False  # also measure ours with DRLoc's loss
    drloc_grid: int = 7  # side to which the token grid is pooled for DRLoc; 0: no pooling
    # also measure an agent CNN alone, and ours together with it
    bootstrap: Literal["none", "joint", "shared"] = "none"
    # synthetic: a constant batch; ffcv: also measure ours with batches from --data
    loader: Literal["synthetic", "ffcv"] = "synthetic"
    data: Path | None = None  # a .beton, for --loader ffcv; tools/pack_dataset.py makes it
    # RandAugment policy of --loader ffcv in timm's notation; empty: none
    rand_augment: str = ""
    # auto: bf16 autocast on CUDA, float32 on a CPU
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if available, else cpu
    modes: tuple[Mode, ...] = ("eager", "compiled")  # measured in the same rounds
    steps: int = 4  # steps of each contestant in a round
    rounds: int = 9  # measured rounds, after one for warm-up
    threads: int = CORES  # of torch on a CPU, each on its own core, and of the loader
    json: Path | None = None  # write all results there as JSON
    record: bool = True  # append rows to --results
    results: Path = RESULTS  # CSV file of all results


class Floor(NamedTuple):
    """Least work of a network's step."""

    flops_per_image: float  # forward and backward
    bytes_per_step: float  # read and written, if no cache holds anything between two uses


@dataclass
class Contest:
    """The contestants, and results that precede the measurement or are collected by it."""

    works: dict[Key, Callable[[int], int]] = field(default_factory=dict)
    losses: dict[Key, Tensor | float] = field(default_factory=dict)  # of the last step
    # share of each turn spent waiting for data, of contestants with the loader
    waits: dict[Key, list[float]] = field(default_factory=dict)
    equality: list[dict] = field(default_factory=list)
    floors: dict[str, Floor] = field(default_factory=dict)  # by contestant, without the loader


def main(benchmark: Benchmark) -> dict:
    """Measure, print and record; return the document that --json writes."""
    check(benchmark)
    device, facts = choose_device(benchmark.device), environment(PACKAGES)
    if device.type != "cuda" and "captured" in benchmark.modes:
        raise UserError(
            f"--modes captured: CUDA graphs need a GPU, and the device is {device}; "
            "remove it, or give --device cuda"
        )
    with ExitStack() as stack:
        allowed = stack.enter_context(restore_cpus_after())
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(benchmark.threads)
        loader = None
        if benchmark.loader == "ffcv":
            config = make_config(
                benchmark, LABELS if benchmark.objective == "token-label" else OURS
            )
            loader = stack.enter_context(
                closing(open_loader(config, build_objective(config.setting), "train"))
            )
            check_loader(benchmark, loader)
        try:
            contest = build_contest(benchmark, device, loader)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"--batch {benchmark.batch}: out of memory on {device}; give a smaller batch"
            ) from error
        pin(choose_cores(benchmark.threads, allowed))
        dtype = autocast_dtype(make_config(benchmark, OURS), device) or torch.float32
        flops, traffic = matmul_rate(device, dtype), copy_rate(device)
        advance = stack.enter_context(
            steps_bar("benchmark", len(contest.works) * (benchmark.rounds + 1), 0)
        )
        rates = take_turns(
            contest.works,
            benchmark.rounds,
            lambda key: own_memory(key, device),
            lambda key: advance(1, ", ".join(key)),
        )
    if broken := [key for key, loss in contest.losses.items() if not math.isfinite(loss)]:
        # Our guard skips a non-finite update, so the time of such a step is meaningless.
        raise UserError(
            f"the loss of {', '.join(broken[0])} is {float(contest.losses[broken[0]])}; "
            "choose another --precision"
        )
    ceiling = {"matmul_flops_per_s": flops, "copy_bytes_per_s": traffic}
    document = summarize(contest, rates, ceiling, benchmark)
    document |= {"data": what_of(benchmark, device, loader), "environment": facts}
    show(document)
    if benchmark.json is not None:
        write_json(benchmark.json, document)
    if benchmark.record:
        shared = facts | {
            "data": document["data"],
            "threads": benchmark.threads,
            "runs": benchmark.rounds,
        }
        append_rows(benchmark.results, [shared | line for line in lines(document)])
    return document


def summarize(
    contest: Contest, rates: dict[Key, list[float]], ceiling: dict[str, float], benchmark: Benchmark
) -> dict:
    """Return rates, ratios, equality and floor of a contest."""
    # The first turn is the warm-up.
    waits = {key: values[-benchmark.rounds :] for key, values in contest.waits.items()}
    return {
        "rows": [
            {
                "name": name,
                "mode": mode,
                "images_per_s": Spread.of(values)._asdict(),
                "runs": len(values),
            }
            for (name, mode), values in rates.items()
        ],
        "ratios": ratios(rates),
        "equality": contest.equality,
        "floor": ceiling | {"rows": floor_rows(contest.floors, ceiling, rates, benchmark.batch)},
        "data_wait_share": [
            {"name": name, "mode": mode, **Spread.of(values)._asdict()}
            for (name, mode), values in waits.items()
        ],
    }


def check(benchmark: Benchmark) -> None:
    """Raise UserError for invalid options."""
    small = [
        name
        for name in ("batch", "size", "classes", "steps", "rounds", "threads")
        if getattr(benchmark, name) < 1
    ]
    if small:
        raise UserError(f"--{small[0]} must be at least 1")
    if not benchmark.modes:
        raise UserError("--modes is empty; give one or more of eager, compiled, whole and captured")
    if benchmark.threads > CORES:
        raise UserError(f"--threads {benchmark.threads}: this process may use {CORES} cores")
    if (benchmark.loader == "ffcv") != (benchmark.data is not None):
        raise UserError("--loader ffcv and --data need each other: the loader reads that .beton")
    if benchmark.rand_augment and benchmark.loader != "ffcv":
        raise UserError("--rand-augment needs --loader ffcv: constant batches are not augmented")
    if benchmark.objective == "token-label" and not has_tokens(benchmark.model):
        known = [f"{family}_*" for family in FAMILIES]
        raise UserError(
            f"--model {benchmark.model} has no token head; choose one of {', '.join(known)}, "
            "or --objective ce"
        )
    if benchmark.bootstrap != "none" and (benchmark.objective, benchmark.loader) != (
        "ce",
        "synthetic",
    ):
        raise UserError(
            "--bootstrap needs --objective ce and constant batches; remove --objective and --loader"
        )
    if benchmark.objective == "token-label" and benchmark.classes > 2**16:
        raise UserError(
            f"--classes {benchmark.classes}: a score map can hold at most 65,536 classes"
        )


def make_config(benchmark: Benchmark, name: str, mode: str = "never") -> Config:
    """Return the training config of a contestant; timm's step reads the options that both share."""
    return with_options(
        Config(),
        data=benchmark.data,
        loader="ffcv",
        threads=benchmark.threads,
        model=benchmark.model,
        size=benchmark.size,
        objective="token-label" if name == LABELS else "ce",
        mixtoken=False,
        drop_path=0.0,
        drloc="l1" if name == DRLOC else "none",
        drloc_grid=benchmark.drloc_grid,
        bootstrap=benchmark.bootstrap if name == BOTH else "none",
        rand_augment=benchmark.rand_augment,
        batch=benchmark.batch,
        microbatch=benchmark.batch,
        lr=RATE,
        lr_batch=benchmark.batch,
        precision=benchmark.precision,
        compile=mode,
    )


def check_loader(benchmark: Benchmark, loader: ThreadedLoader) -> None:
    """Raise UserError if --data has too few images, or lacks score maps that are needed."""
    if benchmark.objective == "token-label" and loader.score_maps is None:
        raise UserError(
            f"{benchmark.data} has no score maps, which --objective token-label needs; "
            "pack it with --maps, or give --objective ce"
        )
    if (whole := loader.plan.num_samples // benchmark.batch) < benchmark.steps:
        raise UserError(
            f"--steps {benchmark.steps}: {benchmark.data} has {whole} whole batches "
            f"of {benchmark.batch} images"
        )


# ------------------------------------------------------------------------- the contestants


class Contestant(NamedTuple):
    """One of our contestants before its blocks are compiled."""

    trainable: nn.Module  # copied for every mode
    batch: Batch
    spec: ScoreMapSpec | None


def build_contest(
    benchmark: Benchmark, device: torch.device, loader: ThreadedLoader | None
) -> Contest:
    """Build every contestant in every mode; first steps show whether ours and timm's agree."""
    classes = loader.num_classes if loader else benchmark.classes
    contest, ours = Contest(), build_ours(benchmark, classes, device)
    for name, contestant in ours.items():
        contest.floors[name] = measure_floor(make_config(benchmark, name), contestant, classes)
    contest.floors[TIMM] = contest.floors[OURS]
    dtype = autocast_dtype(make_config(benchmark, OURS), device)
    for mode in dict.fromkeys(benchmark.modes):
        compile = COMPILED[mode]
        steps = {
            name: our_step(make_config(benchmark, name, compile), contestant, device)
            for name, contestant in ours.items()
        }
        plain = deepcopy(ours[OURS].trainable)
        steps[TIMM] = timm_step(make_config(benchmark, OURS, compile), plain, device)
        contest.equality.append(compare_losses(steps, ours[OURS].batch, mode, dtype))
        for name, step in steps.items():
            batch = ours[LABELS if name == LABELS else OURS].batch
            contest.works[name, mode] = constant_turn(
                (name, mode), contest, step, batch, benchmark.steps, device
            )
        if loader is not None:
            name = LABELS if LABELS in ours else OURS
            config = make_config(benchmark, name, compile)
            # An equal but separate student: the first continues with its constant batch.
            step = our_step(config, ours[name]._replace(spec=loader.score_maps), device)
            key, model = (name + LOADER, mode), ours[name].trainable
            contest.works[key] = loader_turn(
                key, contest, step, config, model, loader, benchmark.steps, device
            )
    return contest


def build_ours(benchmark: Benchmark, classes: int, device: torch.device) -> dict[str, Contestant]:
    """Build our contestants: the model, alone and with additions, and its agent alone."""
    names = [OURS, *[LABELS] * (benchmark.objective == "token-label"), *[DRLOC] * benchmark.drloc]
    names += [AGENT, BOTH] if benchmark.bootstrap != "none" else []
    found: dict[str, Contestant] = {}
    for name in names:
        config = make_config(benchmark, name)
        if name == AGENT:
            config = with_options(config, bootstrap="joint")
        objective = build_objective(config.setting)
        torch.manual_seed(config.run.seed)
        model = build_model(config, objective, classes)[0]
        model.to(device, memory_format=torch.channels_last)
        batch, spec = constant_batch(benchmark, model, classes, device)
        torch.manual_seed(config.run.seed)

        def place(network: nn.Module) -> nn.Module:
            return network.to(device, memory_format=torch.channels_last)

        trainable = objective.wrap(model, classes, place)
        if name == AGENT:
            trainable = trainable.agent
        found[name] = Contestant(trainable, batch, spec)
    return found


def constant_batch(
    benchmark: Benchmark, model: nn.Module, classes: int, device: torch.device
) -> tuple[Batch, ScoreMapSpec]:
    """Draw normalized noise with crops and smooth random score maps, on the device; the same on
    every call.
    """
    # The defaults of benchmarks.targets, as far as there are so many classes.
    palette = min(24, classes)
    shape = targets.TargetBenchmark(
        batch=benchmark.batch,
        classes=classes,
        grid=grid_of(model, benchmark.size),
        palette=palette,
        top_k=min(5, palette),
    )
    step = targets.make_step(shape, device, logits=False)
    rng = torch.Generator().manual_seed(1)
    image = torch.randn(benchmark.batch, 3, benchmark.size, benchmark.size, generator=rng).to(
        device
    )
    return step.batch._replace(image=image.contiguous(memory_format=torch.channels_last)), step.spec


def grid_of(model: nn.Module, size: int) -> int:
    """Return the side of the token grid, computed as in train.py."""
    return max(1, size // getattr(model, "patch_size", 16))


def our_step(config: Config, contestant: Contestant, device: torch.device) -> Step:
    """Build the body of train.py's loop for one device, on a copy of the contestant."""
    trainable, dtype = deepcopy(contestant.trainable), autocast_dtype(config, device)
    ranks, objective = Ranks(0, 1, device), build_objective(config.setting)
    model = get_networks(trainable)[0]
    student = build_student(config.optim, model, trainable, ranks, dtype)
    compute_loss, plan = compile_step(config.run.compile, trainable), constant_plan(config)
    grid, numbers = grid_of(model, config.data.size), count()
    seen = torch.zeros(2, dtype=torch.float64, device=device)

    def step(batch: Batch) -> Tensor:
        number = next(numbers)
        trainable.train()

        def compute() -> Tensor:
            torch.manual_seed(plan.step_seed(0, number))
            # The step's number serves as the epoch, so that pairs of tokens differ as in training.
            inputs = objective.inputs(plan, number % config.optim.epochs, batch)
            context = StepContext(contestant.spec, grid, None, inputs)
            return compute_loss(objective, student.network, batch, context, dtype)

        loss, _ = update(student, ranks, number, [compute])
        seen[0] += loss
        seen[1] += 1
        return loss

    return step


def constant_plan(config: Config) -> EpochPlan:
    """Return the plan of the constant batch."""
    batch = config.optim.batch
    return EpochPlan(num_samples=batch, batch=batch, seed=config.run.seed, mode="train")


def timm_step(config: Config, model: nn.Module, device: torch.device) -> Step:
    """Build the step of timm's train.py for one device from timm's public parts with their
    defaults.
    """
    dtype = autocast_dtype(config, device)
    how = "reduce-overhead" if config.run.compile == "graph" else None
    network = model if config.run.compile == "never" else torch.compile(model, mode=how)
    loss_of = LabelSmoothingCrossEntropy(config.labels.smoothing)
    optimizer = create_optimizer_v2(
        model, opt="adamw", lr=config.optim.lr, weight_decay=config.optim.weight_decay
    )
    scaler = NativeScaler(device=device.type) if dtype == torch.float16 else None
    ema, numbers = ModelEmaV3(model, decay=config.optim.ema, use_warmup=True), count(1)
    model.train()

    def step(batch: Batch) -> float:
        with torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = loss_of(network(batch.image), batch.label)
        if scaler is not None:
            scaler(loss, optimizer)
        else:
            loss.backward()
            optimizer.step()
        # timm's train.py updates its running mean of the loss in every step.
        found = loss.item()
        optimizer.zero_grad()
        ema.update(model, step=next(numbers))
        return found

    return step


def compare_losses(
    steps: dict[str, Step], batch: Batch, mode: str, dtype: torch.dtype | None
) -> dict:
    """Return our and timm's losses before and after the first update from equal weights, and their
    largest relative difference.
    """
    losses = {name: first_losses(steps[name], batch) for name in (OURS, TIMM)}
    far = max(abs(a / b - 1) for a, b in zip(losses[OURS], losses[TIMM], strict=True))
    return {"mode": mode, **losses, "rel_error": far, "bar": EQUAL[dtype]}


def first_losses(step: Step, batch: Batch) -> tuple[float, float]:
    """Return the first loss and the first different one: float16's scaler skips updates until it
    has found its scale.
    """
    before = after = float(step(batch))
    for _ in range(SCALES):
        after = float(step(batch))
        if after != before:
            break
    return before, after


# ------------------------------------------------------------------------- measuring


def constant_turn(
    key: Key, contest: Contest, step: Step, batch: Batch, steps: int, device: torch.device
) -> Callable[[int], int]:
    """Build a turn of `steps` steps on one batch."""

    def turn(_: int) -> int:
        for _ in range(steps):
            contest.losses[key] = step(batch)
        synchronize(device)
        return steps * len(batch.label)

    return turn


def loader_turn(
    key: Key,
    contest: Contest,
    step: Step,
    config: Config,
    model: nn.Module,
    loader: ThreadedLoader,
    steps: int,
    device: torch.device,
) -> Callable[[int], int]:
    """Build a turn of `steps` steps on an epoch's first batches, whose decoding starts within the
    turn.
    """
    mean, std = (model.pretrained_cfg[name] for name in ("mean", "std"))
    augmentation = Augmentation(loader.plan, config.augment, mean, std).to(device)
    shares = contest.waits[key] = []

    def turn(epoch: int) -> int:
        clock, images = RunClock(0, np.zeros(2)), 0
        with closing(loader.batches(epoch)) as batches:
            for batch in islice(
                augment_batches(clock.time_data(batches), augmentation, device), steps
            ):
                contest.losses[key] = step(batch)
                images += len(batch.label)
            synchronize(device)
            seconds, waited = clock.total()
            shares.append(waited / seconds)
        return images

    return turn


def copy_rate(device: torch.device) -> float:
    """Return the highest rate of a copy within the device's memory, in bytes read and written per
    second, measured for SECONDS.
    """
    one = torch.zeros(COPIED[device.type], dtype=torch.uint8, device=device)
    other, best, until = torch.ones_like(one), 0.0, time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        synchronize(device)
        began = time.perf_counter()
        other.copy_(one)
        synchronize(device)
        best = max(best, 2 * one.nbytes / (time.perf_counter() - began))
    return best


def measure_floor(config: Config, contestant: Contestant, classes: int) -> Floor:
    """Return the least work of a step; an eager forward pass measures the saved activations.

    The forward and backward passes read the weights, and gradients are written. The update reads
    both and two moments, and writes weights and moments. EMA weights are read and written. The sum
    is 12 times the weights' bytes. Saved activations are written and read once.
    """
    trainable, batch = deepcopy(contestant.trainable), contestant.batch
    objective, device = build_objective(config.setting), batch.label.device
    size, grid = config.data.size, grid_of(get_networks(trainable)[0], config.data.size)
    inputs = objective.inputs(constant_plan(config), 0, batch)
    context = StepContext(contestant.spec, grid, None, inputs)
    with ActivationBytes(trainable.train()) as saved:
        step_loss(objective, trainable, batch, context, autocast_dtype(config, device))
    if isinstance(trainable, AgentCNN):
        flops = training_flops(deepcopy(contestant.trainable).to("meta"), size)
    else:
        flops = flops_per_size(config, objective, classes)[size]
    # The weights of each DRLoc head multiply every pair of an image: forward, and twice as much
    # backward.
    heads = getattr(trainable, "localizer", nn.Identity()).modules()
    matrices = sum(layer.weight.numel() for layer in heads if isinstance(layer, nn.Linear))
    flops += 3 * 2 * config.objective.drloc.pairs * matrices
    weights = sum(p.nbytes for p in trainable.parameters())
    return Floor(flops, 12 * weights + 2 * saved.bytes)


def own_memory(key: Key, device: torch.device) -> None:
    """On a CPU, set how the C library treats freed memory to what that train.py has."""
    if device.type != "cpu":
        return
    if key[0] == "timm":
        set_malloc(**LEFT_ALONE)
    else:
        tune_malloc()


def floor_rows(
    floors: dict[str, Floor], ceilings: dict[str, float], rates: dict[Key, list[float]], images: int
) -> list[dict]:
    """Return the least time of each contestant's step, its two bounds, and its share of the
    measured time.
    """
    found = []
    for (name, mode), values in rates.items():
        floor = floors[name.removesuffix(LOADER)]
        compute = floor.flops_per_image * images / ceilings["matmul_flops_per_s"]
        traffic = floor.bytes_per_step / ceilings["copy_bytes_per_s"]
        took, least = images / Spread.of(values).median, max(compute, traffic)
        found.append(
            {
                "name": name,
                "mode": mode,
                **floor._asdict(),
                "compute_s": compute,
                "traffic_s": traffic,
                "least_s": least,
                "step_s": took,
                "share": least / took,
            }
        )
    return found


def ratios(rates: dict[Key, list[float]]) -> list[dict]:
    """Return the ratios within rounds: ours to timm's, with to without labels, with to without
    DRLoc, the loader's batches to constant ones, two networks together to one after the other.
    """
    pairs = [
        (OURS, TIMM),
        (LABELS, OURS),
        (DRLOC, OURS),
        (OURS + LOADER, OURS),
        (LABELS + LOADER, LABELS),
        (BOTH, IN_TURN),
    ]
    rates = dict(rates)
    for mode in dict.fromkeys(mode for name, mode in rates if name == AGENT):
        # Images that both have processed, per second of the two running one after the other.
        rates[IN_TURN, mode] = [
            1 / (1 / a + 1 / b) for a, b in zip(rates[OURS, mode], rates[AGENT, mode], strict=True)
        ]
    return [
        {
            "a": a,
            "b": b,
            "what": "images_per_s",
            "mode": mode,
            **pairwise(rates[a, mode], rates[b, mode])._asdict(),
        }
        for mode in dict.fromkeys(mode for _, mode in rates)
        for a, b in pairs
        if (a, mode) in rates and (b, mode) in rates
    ]


# ------------------------------------------------------------------------- results


def what_of(benchmark: Benchmark, device: torch.device, loader: ThreadedLoader | None) -> str:
    """Describe model, batch, precision and device."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    dtype = autocast_dtype(make_config(benchmark, OURS), device) or torch.float32
    classes = loader.num_classes if loader else benchmark.classes
    return (
        f"{benchmark.model}, {benchmark.batch} images of {benchmark.size} px, {classes} classes, "
        f"{str(dtype).removeprefix('torch.')}; {where}"
    )


def show(document: dict) -> None:
    """Print the document as tables."""
    console = Console()
    # Wide enough for whole tables in a log file too.
    console.width = max(console.width, 110)
    print(document["data"])
    table = Table(title="Images per second, whole steps", title_justify="left")
    for name in ("step", "mode", "median", "p25", "p75"):
        table.add_column(name, justify="left" if name in ("step", "mode") else "right")
    for line in document["rows"]:
        table.add_row(
            line["name"],
            line["mode"],
            *(f"{line['images_per_s'][at]:,.1f}" for at in ("median", "p25", "p75")),
        )
    console.print(table)
    table = Table(title="Ratios within a round", title_justify="left")
    for name in ("a", "to b", "mode", "median", "p25", "p75", "required"):
        table.add_column(name, justify="left" if name in ("a", "to b", "mode") else "right")
    for line in document["ratios"]:
        bar = BARS.get((line["a"], line["b"]))
        spread = (f"{line[at]:.3f}" for at in ("median", "p25", "p75"))
        table.add_row(line["a"], line["b"], line["mode"], *spread, f"{bar:.3g}" if bar else "")
    console.print(table)
    for line in document["ratios"]:
        if line["a"] == DRLOC:
            paid = 100 * (1 / line["median"] - 1)
            console.print(
                f"{line['mode']}: DRLoc costs {paid:+.1f} % of a step; "
                "Table 14 of its paper: +1.8 to +2.4 %"
            )
    for line in document["equality"]:
        ours, theirs = (" and ".join(f"{loss:.6f}" for loss in line[name]) for name in (OURS, TIMM))
        console.print(
            f"{line['mode']}: losses before and after the first update {ours}, timm's {theirs}: "
            f"relative difference {line['rel_error']:.1e} (at most {line['bar']:g})"
        )
    floor = document["floor"]
    table = Table(
        title=f"Least time of a step at the measured {floor['matmul_flops_per_s'] / 1e12:,.3g} "
        f"TFLOP/s of products and {floor['copy_bytes_per_s'] / 1e9:,.3g} GB/s of copies",
        title_justify="left",
    )
    for name in (
        "step",
        "mode",
        "GFLOP/image",
        "MB/step",
        "products",
        "bytes",
        "least",
        "took",
        "share",
    ):
        table.add_column(name, justify="left" if name in ("step", "mode") else "right")
    for line in floor["rows"]:
        times = (
            f"{1e3 * line[name]:,.2f} ms"
            for name in ("compute_s", "traffic_s", "least_s", "step_s")
        )
        numbers = f"{line['flops_per_image'] / 1e9:,.3f}", f"{line['bytes_per_step'] / 1e6:,.1f}"
        table.add_row(line["name"], line["mode"], *numbers, *times, f"{100 * line['share']:.1f} %")
    console.print(table)
    for line in document["data_wait_share"]:
        console.print(
            f"{line['name']}, {line['mode']}: {100 * line['median']:.1f} % of the time "
            "spent waiting for data"
        )


def lines(document: dict) -> list[dict]:
    """Return CSV rows: one per contestant, ratio, share of the floor and share of waiting."""
    found = [
        line | line["images_per_s"] | {"name": line["name"], "unit": "images/s"}
        for line in document["rows"]
    ]
    found += [
        line | {"name": f"{line['a']} / {line['b']}", "unit": "ratio"}
        for line in document["ratios"]
    ]
    found += [
        line | {"name": f"least time of {line['name']}", "median": line["share"], "unit": "ratio"}
        for line in document["floor"]["rows"]
    ]
    found += [
        line | {"name": f"{line['name']} waits for data", "unit": "ratio"}
        for line in document["data_wait_share"]
    ]
    found = [line | {"name": f"step {line['name']}, {line['mode']}"} for line in found]
    return [{name: line[name] for name in COLUMNS if name in line} for line in found]


if __name__ == "__main__":
    run(lambda: main(tyro.cli(Benchmark, description=__doc__)))

"""Measure whole training steps, ours and timm's.

    python -m benchmarks.step --model lvvit_s --batch 8 --objective token-label --json step.json
    python -m benchmarks.step --model deit_small_patch16_224 --batch 256 --device cuda
    python -m benchmarks.step --loader ffcv --objective token-label --device cuda --steps 32
    python -m benchmarks.step --model vit_small_patch16_224 --variants sam_rho=0.1 optimizer=sgd

`ours` is the work of train.py between two batches on the device: forward, loss, backward, gradient
norm, non-finite guard, fused AdamW, EMA. `timm` is the step of timm's train.py, built from timm's
own parts: autocast around network and LabelSmoothingCrossEntropy, NativeScaler in float16,
`create_optimizer_v2("adamw")` with its defaults (foreach on CUDA, a loop on a CPU; not fused),
ModelEmaV3 with warm-up, and `loss.item()`, a host sync in every step. Both train one network from
equal weights on equal normalized images in channels_last with the image's label; their losses
before and after the first update are printed with their relative difference. Both have a constant
learning rate and no mixing. Both have `--drop-path`, by default 0, and drop the same samples.

`--objective token-label` adds `ours+labels`: the same step with a dense label on every token. Its
network has a second head, which `ours` lacks, so its ratio to `ours` is the full cost. `--loader
ffcv` adds a contestant that gets its batches from train.py's loader, timed from the request of the
first batch to the end of the last step, and the share of that time spent waiting for data. A turn
begins with an epoch: the more --steps, the smaller the share of the time until its first batch,
which has a row of its own. On a GPU the process has a core more than --threads, for launches.

`--variants` adds a contestant for each of its words, `ours` with other options of train.py, as
`sam_rho=0.1` (names with underscores; several joined by commas, without spaces). If they add
networks that are evaluated too, each of these that shares no weights is a contestant of its own,
and the variant is compared with `ours` and these run one after the other.

`--only` leaves out all contestants but these. Without ours or timm no losses are compared.
`--half-residual` is that of train.py, for all contestants. `--levers` gives ours faster forms of
layers that are under test (densefeed/models/kernels/levers.py).

`--casts` adds `ours+casts`: the compiled step without training/mixed_linear.py, whose layers each
cast their own weights. It tells what that file gains.

On a CPU, ours keeps freed memory (`tune_malloc`); timm's turns run with the C library's default
behavior.

Modes other than `eager` compile what the respective train.py compiles: ours the blocks and the loss
(`compiled`), the step from image to loss (`whole`), or that as CUDA graphs (`captured`); timm's the
network, in `captured` with PyTorch's CUDA graphs too.

A ratio is a / b in images per
second of the same round, so larger is better. Rows are appended to --results.
"""

import ast
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal
from unittest import mock

import numpy as np
import torch
import tyro
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3, NativeScaler
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import (
    CORES,
    Count,
    Output,
    check_threads,
    command,
    compare,
    device_name,
    environment,
    report,
    spread_rows,
    take_turns,
    use_cores,
)
from benchmarks.photographs import sample_beton
from benchmarks.targets import TargetBenchmark, make_step
from densefeed.models.kernels.levers import VARIABLE
from densefeed.models.wrapped_model import WrappedModel, get_networks
from densefeed.objectives import build_objective
from densefeed.pipelines.batch import Batch
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.step import Step
from densefeed.system.devices import choose_device, synchronize
from densefeed.system.errors import UserError
from densefeed.system.malloc import set_malloc, tune_malloc
from densefeed.system.options import Bounds, with_options
from densefeed.system.precision import autocast_dtype
from densefeed.system.progress import steps_bar
from densefeed.training import compile as compilation
from densefeed.training.build import build_model
from densefeed.training.captured_update import choose_update
from densefeed.training.compile import compile_step
from densefeed.training.config import Config
from densefeed.training.mixed_linear import WeightCopies
from densefeed.training.monitor import TrainMonitor
from densefeed.training.ranks import Ranks
from densefeed.training.setup import build_trainable, open_loader
from densefeed.training.speed import RunClock
from densefeed.training.student import build_student

OURS, TIMM, LABELS, LOADER, CASTS = "ours", "timm", "ours+labels", "+loader", "ours+casts"
# The ratios beside those of variants, and the required medians: labels cost at most 3 % of the step
# and of the loader, and weights cast together save 2 %.
BARS = {
    (OURS, TIMM): "",
    (LABELS, OURS): "0.97",
    (OURS + LOADER, OURS): "0.97",
    (LABELS + LOADER, LABELS): "0.97",
    (OURS, CASTS): "1.02",
}
# Largest relative difference of two losses that are equal up to rounding: bfloat16 resolves 2^-8,
# and part of that remains in the sums.
EQUAL = {None: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# Environment variables that a row names.
SETTINGS = "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING", "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM", VARIABLE
# Halvings from GradScaler's initial scale, 65,536, to 1.
SCALES = 16
# Learning rate, without warm-up, for the same images in every step.
RATE = 1e-4
Mode = Literal["eager", "compiled", "whole", "captured"]
# Values of train.py's --compile.
COMPILED = {"eager": "never", "compiled": "blocks", "whole": "whole", "captured": "graph"}
Key = tuple[str, str]  # contestant, mode
Rates = dict[Key, list[float]]  # images per second, one value per round
# The state that glibc's own adaptation reaches once a tensor of 32 MiB was freed: larger ones are
# mapped, and at most 64 MiB of free memory are kept.
LEFT_ALONE = {"mmap_max": 65536, "mmap_threshold": 2**25, "trim_threshold": 2**26}
Train = Callable[[Batch], Tensor | float]  # trains on a batch and returns its loss
Through = Callable[[Iterator[Batch]], Iterator[Batch]]  # passes batches on and times them
Batches = Callable[[int, Through], Iterator[Batch]]  # the batches of an epoch


@dataclass(frozen=True, kw_only=True)
class StepBenchmark(Output):
    """Options of this benchmark."""

    # any timm classifier; token-label adds a token head to one that has none
    model: str = "lvvit_s"
    batch: Count = 64  # images per batch
    size: Count = 224  # side of the network's input, pixels
    classes: Count = 1000  # of the constant batch; a --data file has its own
    drop_path: Annotated[float, Bounds(0, 0.99)] = 0.0  # stochastic depth of the last block
    # token-label: also measure ours with a dense label on every token
    objective: Literal["ce", "token-label"] = "ce"
    # also measure ours with other options of train.py, each word NAME=VALUE[,NAME=VALUE...]
    variants: tuple[str, ...] = ()
    casts: bool = False  # also measure ours without training/mixed_linear.py
    half_residual: bool = False  # keep the residual stream in 16 bits
    levers: tuple[str, ...] = ()  # forms of layers that are under test, for ours alone
    only: tuple[str, ...] = ()  # names of contestants, e.g. ours+labels; default: all
    # synthetic: a constant batch; ffcv: also measure ours with batches of train.py's loader
    loader: Literal["synthetic", "ffcv"] = "synthetic"
    # a .beton, for --loader ffcv; default: generated crops of photographs, a batch for each step
    data: Path | None = None
    cache: Path = Path("bench")  # folder for generated files, which later runs use again
    # auto: bf16 autocast on GPUs that compute it, else fp32
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if available, else cpu
    modes: tuple[Mode, ...] = ("eager", "compiled")  # measured in the same rounds
    steps: Count = 4  # steps of each contestant in a round
    rounds: Count = 9  # measured rounds, after one for warm-up
    threads: Count = CORES  # of torch on a CPU, each on its own core, and of the loader


class Contest:
    """The contestants, and results that precede the measurement or are collected by it.

    Attributes:
        works: the turn of each contestant in each mode.
        losses: of its last step.
        waits: the share of each of its turns spent waiting for data.
        firsts: milliseconds of each of its turns until its first batch arrived.
        equality: how far our losses and timm's differ, in each mode.
        added: for each variant the contestants that are networks it adds.
    """

    def __init__(self, steps: int, device: torch.device) -> None:
        self.steps, self.device = steps, device
        self.works, self.losses, self.waits, self.firsts, self.equality = {}, {}, {}, {}, []
        self.added: dict[str, Sequence[str]] = {}

    def add(self, key: Key, step: Train, batches: Batches) -> None:
        """Add a contestant, whose turn is a few steps on the first batches of an epoch.

        A loader's decoding starts within the turn.
        """
        shares, firsts = self.waits[key], self.firsts[key] = [], []

        def turn(epoch: int) -> int:
            clock, images = RunClock(0, np.zeros(2), self.device), 0
            # Closing ends the loader's work on further batches, which would slow the next turn.
            with closing(batches(epoch, clock.time_data)) as source:
                for number, batch in enumerate(islice(source, self.steps)):
                    if number == 0:
                        firsts.append(1000 * clock.total()[0])
                    # Kept as step returns it: float() would wait for the device in every step.
                    self.losses[key] = step(batch)
                    images += len(batch.label)
                # On a GPU the steps are only queued so far.
                synchronize(self.device)
                seconds, waited = clock.total()
                shares.append(waited / seconds)
            return images

        self.works[key] = turn

    def measure(self, rounds: int) -> Rates:
        """Return images per second of every contestant, one value per round."""
        with steps_bar("benchmark", len(self.works) * (rounds + 1), 0) as advance:
            rates = take_turns(
                self.works,
                rounds,
                lambda key: own_memory(key, self.device),
                lambda key: advance(1, ", ".join(key)),
            )
        for key, loss in self.losses.items():
            # Our guard skips a non-finite update, so the time of such a step is meaningless.
            if not math.isfinite(loss):
                raise UserError(
                    f"the loss of {', '.join(key)} is {float(loss)}; choose another --precision"
                )
        return rates


def main(benchmark: StepBenchmark) -> dict:
    """Measure, print and record; return the document that --json writes."""
    check(benchmark)
    device, facts = choose_device(benchmark.device), environment()
    facts |= {"threads": benchmark.threads}
    if device.type != "cuda" and "captured" in benchmark.modes:
        raise UserError(
            f"--modes captured: CUDA graphs need a GPU, and the device is {device}; "
            "remove it, or give --device cuda"
        )
    if benchmark.loader == "ffcv" and benchmark.data is None:
        images = benchmark.steps * benchmark.batch
        *_, beton = sample_beton(benchmark.cache, images, min(benchmark.classes, images))
        benchmark = replace(benchmark, data=beton)
    config = make_config(benchmark, LABELS if benchmark.objective == "token-label" else OURS)
    dtype = autocast_dtype(config.run.precision, device) or torch.float32
    classes, loader = benchmark.classes, None
    levers = {VARIABLE: " ".join(benchmark.levers)} if benchmark.levers else {}
    with use_cores(benchmark.threads, int(device.type == "cuda")), ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, levers))
        if benchmark.loader == "ffcv":
            objective = build_objective(config.setting)
            loader = open_loader(config.data, config.optim, config.run.seed, objective, "train")
            stack.enter_context(closing(loader))
            check_loader(benchmark, loader)
            classes = loader.num_classes
        try:
            contest = build_contest(benchmark, classes, device, loader)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"--batch {benchmark.batch}: out of memory on {device}; give a smaller batch"
            ) from error
        rates = contest.measure(benchmark.rounds)
    named = os.environ | levers
    settings = [f"{name}={value}" for name in SETTINGS if (value := named.get(name))]
    data = (
        f"{benchmark.model}, {benchmark.batch} images of {benchmark.size} px, {classes} classes, "
        f"{', '.join([str(dtype).removeprefix('torch.'), *settings])}; {device_name(device)}"
    )
    rows = spread_rows({", ".join(key): values for key, values in rates.items()}, "images/s")
    # The first turn is the warm-up.
    waits = {
        f"{name} waits for data, {mode}": shares[1:]
        for (name, mode), shares in contest.waits.items()
        if name.endswith(LOADER)
    }
    rows += spread_rows(waits, "ratio")
    firsts = {
        f"{name} until the first batch, {mode}": times[1:]
        for (name, mode), times in contest.firsts.items()
        if name.endswith(LOADER)
    }
    rows += spread_rows(firsts, "ms")
    found = contest.equality
    document = report(
        benchmark, rows, ratios(rates, contest.added), data, facts, "step ", equality=found
    )
    for row in found:
        ours, theirs = (" and ".join(f"{loss:.6f}" for loss in row[name]) for name in (OURS, TIMM))
        print(
            f"{row['mode']}: losses before and after the first update {ours}, timm's {theirs}: "
            f"relative difference {row['rel_error']:.1e} (at most {row['bar']:g})"
        )
    return document


def check(benchmark: StepBenchmark) -> None:
    """Raise UserError for invalid options."""
    if not benchmark.modes:
        raise UserError("--modes is empty; give one or more of eager, compiled, whole and captured")
    check_threads(benchmark.threads)
    if benchmark.data is not None and benchmark.loader != "ffcv":
        raise UserError("--data needs --loader ffcv, which reads that .beton")
    if benchmark.objective == "token-label" and benchmark.classes > 2**16:
        raise UserError(
            f"--classes {benchmark.classes}: a score map can hold at most 65,536 classes"
        )


def make_config(benchmark: StepBenchmark, name: str, compile: str = "never") -> Config:
    """Return the training config of a contestant; timm's step reads the options that both share.

    UserError for a variant with unknown options.
    """
    config = with_options(
        Config(),
        data=benchmark.data or tyro.MISSING,
        loader="ffcv",
        threads=benchmark.threads,
        model=benchmark.model,
        size=benchmark.size,
        objective="token-label" if name == LABELS else "ce",
        # timm's step has none.
        mixtoken=False,
        drop_path=benchmark.drop_path,
        batch=benchmark.batch,
        # One forward pass per step, as in timm's.
        microbatch=benchmark.batch,
        lr=RATE,
        lr_batch=benchmark.batch,
        precision=benchmark.precision,
        half_residual=benchmark.half_residual,
        compile=compile,
    )
    for word in benchmark.variants:
        if name == f"{OURS}+{word}":
            return with_variant(config, word)
    return config


def with_variant(config: Config, word: str) -> Config:
    """Return a config with the options of a word of --variants. UserError for unknown ones."""
    values = {}
    for pair in word.split(","):
        name, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"--variants {word}: {pair!r} is not NAME=VALUE, as sam_rho=0.1")
        # Texts need no quotes.
        with suppress(ValueError, SyntaxError):
            value = ast.literal_eval(value)
        values[name.replace("-", "_")] = value
    try:
        return with_options(config, **values)
    except TypeError as error:
        raise UserError(f"--variants {word}: {error}; see densefeed train RECIPE --help") from error


def check_loader(benchmark: StepBenchmark, loader: ThreadedLoader) -> None:
    """Raise UserError if --data has too few images, or lacks score maps that are needed."""
    if benchmark.objective == "token-label" and loader.score_maps is None:
        raise UserError(
            f"{benchmark.data} has no score maps, which --objective token-label needs; "
            "pack it with --maps, or give --objective ce"
        )
    # A turn takes its batches from a single epoch, whose last one may be incomplete.
    if (whole := loader.plan.num_samples // benchmark.batch) < benchmark.steps:
        raise UserError(
            f"--steps {benchmark.steps}: {benchmark.data} has {whole} whole batches "
            f"of {benchmark.batch} images"
        )


# ------------------------------------------------------------------------- the contestants


def build_contest(
    benchmark: StepBenchmark, classes: int, device: torch.device, loader: ThreadedLoader | None
) -> Contest:
    """Build every contestant in every mode; first steps show whether ours and timm's agree."""
    contest, ours = Contest(benchmark.steps, device), build_ours(benchmark, classes, device)
    for word in benchmark.variants:
        name = f"{OURS}+{word}"
        names = ours[name].evaluated if isinstance(ours[name], WrappedModel) else ()
        contest.added[name] = [name for name in names if name in ours]
    batch, constant = constant_batch(benchmark, classes, device)

    def batches(_: int, through: Through) -> Iterator[Batch]:
        return through(repeat(batch))

    for mode in dict.fromkeys(benchmark.modes):
        compile = COMPILED[mode]
        # OurStep copies its network: every mode starts from equal weights, or losses could not be
        # compared.
        steps = {
            name: build_step(
                name, make_config(benchmark, name, compile), trainable, constant, device
            )
            for name, trainable in ours.items()
            # timm's step draws as ours does.
            if is_wanted(benchmark, name) or (name == OURS and is_wanted(benchmark, TIMM))
        }
        config = make_config(benchmark, OURS, compile)
        if is_wanted(benchmark, TIMM):
            steps[TIMM] = timm_step(config, deepcopy(ours[OURS]), device, steps[OURS].seed)
        bar = EQUAL[autocast_dtype(config.run.precision, device)]
        if is_wanted(benchmark, OURS) and TIMM in steps:
            # These first steps also compile, before anything is timed.
            contest.equality.append(compare_losses(steps, batch, mode, bar))
        for name in filter(partial(is_wanted, benchmark), steps):
            contest.add((name, mode), steps[name], batches)
        name = LABELS if benchmark.objective == "token-label" else OURS
        if loader is not None and is_wanted(benchmark, name + LOADER):
            # An equal but separate student: the first continues with its constant batch.
            step = OurStep(make_config(benchmark, name, compile), ours[name], loader, device)
            contest.add((name + LOADER, mode), step, step.batches)
    names = dict.fromkeys(name for name, _ in contest.works)
    if unknown := [name for name in benchmark.only if name not in names]:
        raise UserError(
            f"--only {unknown[0]}: the other options give no such contestant; without --only they "
            "give " + ", ".join(list_names(benchmark))
        )
    return contest


def is_wanted(benchmark: StepBenchmark, name: str) -> bool:
    """Return whether a contestant is measured."""
    return not benchmark.only or name in benchmark.only


def list_names(benchmark: StepBenchmark) -> list[str]:
    """Return the names of the contestants, without networks that variants add."""
    labels = benchmark.objective == "token-label"
    names = [OURS, *[LABELS] * labels, *(f"{OURS}+{word}" for word in benchmark.variants)]
    names += [*[CASTS] * benchmark.casts, TIMM]
    return names + [(LABELS if labels else OURS) + LOADER] * (benchmark.loader == "ffcv")


def build_ours(
    benchmark: StepBenchmark, classes: int, device: torch.device
) -> dict[str, nn.Module]:
    """Build what each of ours trains: the model, alone and with additions, and these alone."""
    names = [OURS, *[LABELS] * (benchmark.objective == "token-label")]
    names += [f"{OURS}+{word}" for word in dict.fromkeys(benchmark.variants)]
    names += [CASTS] * benchmark.casts
    found = {}
    for name in names:
        config = make_config(benchmark, name)
        objective = build_objective(config.setting)
        torch.manual_seed(config.run.seed)
        model, _ = build_model(config.model, config.data, objective, classes)
        # The networks and heads beside the model have equal weights whatever the model has drawn.
        torch.manual_seed(config.run.seed)
        sections = config.model, config.optim, config.run
        trainable = build_trainable(*sections, objective, model, Ranks(0, 1, device)).trainable
        for added, network in added_networks(trainable).items():
            # A step reads mean and deviation of its network, which an added one may lack.
            network.pretrained_cfg = model.pretrained_cfg
            found.setdefault(added, network)
        found[name] = trainable
    return found


def added_networks(trainable: nn.Module) -> dict[str, nn.Module]:
    """Return the networks that are evaluated beside the model and share no weights, by name."""
    if not isinstance(trainable, WrappedModel) or trainable.aliases:
        return {}
    return dict(trainable.evaluated)


def constant_batch(
    benchmark: StepBenchmark, classes: int, device: torch.device
) -> tuple[Batch, SimpleNamespace]:
    """Draw a batch of normalized noise on the device, with crops and smooth random score maps.

    The namespace describes it as a loader does.
    """
    size, images = benchmark.size, benchmark.batch
    # The defaults of benchmarks.targets, as far as there are so many classes.
    palette = min(24, classes)
    shape = TargetBenchmark(batch=images, classes=classes, palette=palette, top_k=min(5, palette))
    step = make_step(shape, device, logits=False)
    rng = torch.Generator().manual_seed(1)
    image = torch.randn(images, 3, size, size, generator=rng).to(device)
    plan = EpochPlan(num_samples=images, batch=images, seed=0, mode="train", sizes=((0, size),))
    batch = step.batch._replace(image=image.contiguous(memory_format=torch.channels_last))
    return batch, SimpleNamespace(plan=plan, score_maps=step.spec)


class OurStep:
    """The body of train.py's loop for one device, on a copy of `trainable`.

    `loader` gives the plan and the properties of the score maps; only `batches` reads its data.
    """

    def __init__(
        self, config: Config, trainable: nn.Module, loader: ThreadedLoader, device: torch.device
    ) -> None:
        # A check of its sizes may have left the model in evaluation mode.
        trainable, run = deepcopy(trainable).train(), config.run
        self.config, self.ranks = config, Ranks(0, 1, device)
        dtype, model = autocast_dtype(run.precision, device), get_networks(trainable)[0]
        self.student = build_student(config.optim, model, trainable, self.ranks, dtype)
        compute = compile_step(run.compile, trainable)
        sections = build_objective(config.setting), config.data, config.augment
        self.step = Step(loader, trainable, *sections, dtype, compute)
        seen = torch.zeros(2, dtype=torch.float64)
        self.monitor = TrainMonitor(self.student, self.step, self.ranks, run.out, seen, skips=0)
        self.update, self.numbers = choose_update(run.compile, self.ranks), count()
        # A constant batch's images and what the step takes in their place.
        self._images: tuple[Tensor, Tensor] | None = None

    def __call__(self, batch: Batch) -> Tensor:
        """Train on a batch and return its loss."""
        number = next(self.numbers)
        losses = self.losses(batch, number)
        loss, _ = self.update(self.student, self.ranks, number, losses)
        self.monitor.add(loss)
        return loss

    def losses(self, batch: Batch, number: int) -> list[Callable[[], Tensor]]:
        """Return a list of one function, which computes the loss of step `number`."""
        # Always the first batch: the plan of a constant batch has no other.
        batch = batch._replace(image=self.widen(batch.image), epoch=self.epoch(number), step=0)
        return self.step.losses(self.student.network, batch)

    def widen(self, image: Tensor) -> Tensor:
        """Return images with the channels that the augmentation writes; of one batch once."""
        if more := self.step.augmentation.channels - image.shape[1]:
            if self._images is None or self._images[0] is not image:
                self._images = image, F.pad(image, (0, 0, 0, 0, 0, more))
            return self._images[1]
        return image

    def epoch(self, number: int) -> int:
        """Return the epoch that step `number` counts as, so that pairs of tokens differ."""
        return number % self.config.optim.epochs

    def seed(self, number: int) -> int:
        """Return the seed of drop-path in step `number`."""
        return self.step.loader.plan.step_seed(self.epoch(number), 0, 0)

    def batches(self, epoch: int, through: Through) -> Iterator[Batch]:
        """Yield the loader's batches, augmented."""
        return self.step.batches(epoch, 0, through)


def build_step(
    name: str, config: Config, trainable: nn.Module, loader: ThreadedLoader, device: torch.device
) -> OurStep:
    """Build the step of one of ours."""
    leave = mock.patch.object(compilation, "WeightCopies", cast_nothing)
    with leave if name == CASTS else nullcontext():
        return OurStep(config, trainable, loader, device)


def cast_nothing(regions: Sequence[nn.Module], **options: bool) -> WeightCopies:
    """Leave the weights of all layers to autocast, in place of WeightCopies."""
    return WeightCopies((), **options)


def timm_step(
    config: Config, model: nn.Module, device: torch.device, seed: Callable[[int], int]
) -> Train:
    """Build the one-device step of timm's train.py from timm's public parts with their defaults.

    `seed` gives that of drop-path in step number n, from 0.
    """
    dtype = autocast_dtype(config.run.precision, device)
    # reduce-overhead is PyTorch's mode with CUDA graphs.
    how = "reduce-overhead" if config.run.compile == "graph" else None
    network = model if config.run.compile == "never" else torch.compile(model, mode=how)
    loss_of = LabelSmoothingCrossEntropy(config.labels.smoothing)
    optimizer = create_optimizer_v2(
        model, opt="adamw", lr=config.optim.lr, weight_decay=config.optim.weight_decay
    )
    # bfloat16 has float32's range and needs no scale, as in timm's train.py.
    scaler = NativeScaler(device=device.type) if dtype == torch.float16 else None
    ema, numbers = ModelEmaV3(model, decay=config.optim.ema, use_warmup=True), count()
    model.train()

    def step(batch: Batch) -> float:
        number = next(numbers)
        torch.manual_seed(seed(number))
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = loss_of(network(batch.image), batch.label)
        if scaler is not None:
            scaler(loss, optimizer)
        else:
            loss.backward()
            optimizer.step()
        # timm's train.py updates its running mean of the loss in every step.
        found = loss.item()
        optimizer.zero_grad()
        ema.update(model, step=number + 1)
        return found

    return step


def compare_losses(steps: dict[str, Train], batch: Batch, mode: str, bar: float) -> dict:
    """Return our and timm's losses and their largest relative difference.

    The losses are those before and after the first update from equal weights.
    """
    losses = {name: first_losses(steps[name], batch) for name in (OURS, TIMM)}
    far = max(abs(a / b - 1) for a, b in zip(losses[OURS], losses[TIMM], strict=True))
    return {"mode": mode, **losses, "rel_error": far, "bar": bar}


def first_losses(step: Train, batch: Batch) -> tuple[float, float]:
    """Return the first loss and the first different one.

    The scaler of float16 skips updates until it has found its scale.
    """
    before = after = float(step(batch))
    for _ in range(SCALES):
        after = float(step(batch))
        if after != before:
            break
    return before, after


# ------------------------------------------------------------------------- measuring


def own_memory(key: Key, device: torch.device) -> None:
    """On a CPU, set how the C library treats freed memory to what that train.py has."""
    if device.type != "cpu":
        return
    if key[0] == "timm":
        set_malloc(**LEFT_ALONE)
    else:
        tune_malloc()


def ratios(rates: Rates, added: Mapping[str, Sequence[str]]) -> list[dict]:
    """Return the ratios of contestants within rounds: those of BARS, and every variant to ours.

    `added` names for each variant the networks that it adds. If there are any, the variant is
    compared with ours and these run one after the other.
    """
    rates, pairs = dict(rates), dict(BARS)
    for name, networks in added.items():
        alone = (OURS, *networks)
        pairs[name, ", then ".join(alone)] = ""
        if networks:
            for mode in dict.fromkeys(mode for _, mode in rates):
                # Images that all have processed, per second.
                turns = zip(*(rates[one, mode] for one in alone), strict=True)
                rates[", then ".join(alone), mode] = [
                    1 / sum(1 / rate for rate in turn) for turn in turns
                ]
    return [
        compare(a, b, rates[a, mode], rates[b, mode], f", {mode}", bar)
        for mode in dict.fromkeys(mode for _, mode in rates)
        for (a, b), bar in pairs.items()
        if (a, mode) in rates and (b, mode) in rates
    ]


if __name__ == "__main__":
    command(main, StepBenchmark, __doc__)

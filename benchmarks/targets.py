"""What targets and loss cost, sparse and dense: time and memory of a step between the score maps
and the student's gradient.

    python -m benchmarks.targets --batch 128 --classes 1000 --grid 14 --device cpu --json out.json
    python -m benchmarks.targets --compare head --batch 64 --classes 21841 --rounds 3
    python -m benchmarks.targets --compare step --model lvvit_s --device cuda

`sparse` is ours: `sparse_targets` for class token and tokens, their losses, backward. `dense` is
the published recipe with boxes where they belong: a map scattered for each image in a loop,
torchvision's RoIAlign to grid x grid and to 1 x 1, softmax, smoothing, log-softmax, backward. Both
begin with the same maps, crops and logits, and end with the logits' gradient.

`--compare head` begins a layer earlier, with tokens of --width numbers and the head's weights:
`fused` is our loss fused with the head's product, `whole` the product and then the sparse loss,
whose logits [N * T, K] exist.

`--compare step` takes a whole step of --model (forward, backward, AdamW; bfloat16 autocast on a
GPU): `labels` with dense labels for class token and tokens, `none` the same network with the
image's label for all of them.

A ratio is ours / the other, so small is good. Time: the median of the rounds' own ratios. Memory:
the peak of what PyTorch's allocator gave out from the first to the last operation, without what it
begins with and without the gradients it ends with. Our loss and gradients are printed with their
distance from float64. Rows are appended to --results.
"""

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import timm
import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import roi_align

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
from densefeed.models import checkpoints  # noqa: F401  (registers our models with timm)
from densefeed.models.token_transformer import FAMILIES, TokenLogits, has_tokens
from densefeed.objectives.losses import class_token_loss, fused_token_loss, token_loss
from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.targets import SparseTargets, TargetRules, palette_maps, sparse_targets
from densefeed.storage.geometry import WHOLE, crop_views, visible_boxes
from densefeed.storage.score_maps import palette_sizes
from densefeed.system.devices import choose_device
from densefeed.system.errors import UserError, run
from densefeed.system.progress import steps_bar
from densefeed.system.provenance import RESULTS, environment, write_json

# N images   S map side   k classes a cell   K classes   P grid side   T = P * P tokens

PACKAGES = ("torch", "torchvision", "timm", "numpy")
BARS = {  # (bar, aim) of a ratio
    ("dense", "time", "cpu"): (1 / 5, 1 / 8),
    ("dense", "time", "cuda"): (1 / 8, 1 / 15),
    ("dense", "memory", "cpu"): (1 / 10, 1 / 20),
    ("dense", "memory", "cuda"): (1 / 10, 1 / 20),
    ("head", "memory", "cpu"): (1 / 4, 1 / 20),
    ("head", "memory", "cuda"): (1 / 4, 1 / 20),
    ("step", "time", "cuda"): (1.03, 1.01),
}
# Pixels of the images the crops are of. Primes: half of a width of 500 spans 9 of 18 cells up to a
# rounding, and RoIAlign, which takes ceil(9) samples, may take 10; so no two dense recipes would
# agree on every crop, whatever their precision.
HEIGHT, WIDTH = 373, 499
SMOOTHING, TOKEN_WEIGHT = 0.1, 0.5  # as published
MEMORY_RUNS = 3
SLICE = 16  # images at once of the float64 reference


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What to measure."""

    batch: int = 128  # images
    classes: int = 1000  # K
    grid: int = 14  # P, tokens along a side
    # dense: with the dense recipe; head: a fused head with logits; step: with a step without labels
    compare: Literal["dense", "head", "step"] = "dense"
    width: int = 384  # D, of a token, for --compare head
    model: str = "lvvit_s"  # for --compare step
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if there is one, else cpu
    side: int = 18  # S, cells along a side of a map
    top_k: int = 5  # k, classes a cell names
    palette: int = 24  # classes that the map of an image may name
    rounds: int = 9  # steps of each, after one to warm up
    threads: int = 1  # of torch on a CPU, each on a core of its own
    json: Path | None = None  # write ratios and errors there
    record: bool = True  # append rows to --results
    results: Path = RESULTS  # CSV


class Step(NamedTuple):
    """What a training step begins with once the student has answered."""

    batch: Batch  # of maps, crops and flips
    spec: ScoreMapSpec
    grid: int
    cls: Tensor  # [N, K], logits of the class token
    tokens: Tensor  # [N, T, K], logits of the tokens

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What gets a gradient."""
        return self.cls, self.tokens


class TrainStep(NamedTuple):
    """A network before a step, and what it is given."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    tokens: Tensor  # [N, 3, H, W], what the network is given
    label: Tensor  # [N]
    batch: Batch
    spec: ScoreMapSpec
    grid: int

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What gets a gradient."""
        return tuple(self.model.parameters())


class HeadStep(NamedTuple):
    """What the end of a step begins with before the head: tokens, the head's weights, targets."""

    tokens: Tensor  # [N, T, D]
    weight: Tensor  # [K, D]
    bias: Tensor  # [K]
    targets: SparseTargets

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What gets a gradient."""
        return self.tokens, self.weight, self.bias


def main(benchmark: Benchmark) -> dict:
    """Measure, print, record; the document that --json writes."""
    check(benchmark)
    device = choose_device(benchmark.device)
    if benchmark.compare == "dense":
        step = make_step(benchmark, device)
        contestants = {"sparse": sparse_loss, "dense": dense_loss}
    elif benchmark.compare == "head":
        step = make_head_step(benchmark, device)
        contestants = {"fused": fused_loss, "whole": whole_loss}
    else:
        step = make_train_step(benchmark, device)
        contestants = {"labels": labeled_loss, "none": unlabeled_loss}
    a, b = contestants
    with ExitStack() as stack:
        allowed = stack.enter_context(unpinned_after())
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        if benchmark.threads > len(allowed):
            raise UserError(
                f"--threads {benchmark.threads}: this process may use {len(allowed)} cores"
            )
        torch.set_num_threads(benchmark.threads)
        pin(cores(benchmark.threads, allowed))
        advance = stack.enter_context(
            steps_bar("benchmark", len(contestants) * (benchmark.rounds + 1), 0)
        )
        works = {
            name: lambda number, loss=loss: backward(loss, step)
            for name, loss in contestants.items()
        }
        rates = take_turns(
            works, benchmark.rounds, lambda name: forget(step), lambda name: advance(1, name)
        )
        peaks = {
            name: [peak_bytes(loss, step) for _ in range(MEMORY_RUNS)]
            for name, loss in contestants.items()
        }
    far = {"dense": errors, "head": head_errors}.get(benchmark.compare)
    loss_error, grad_error = far(step) if far else (None, None)
    document = {
        "ratios": [
            {"a": a, "b": b, "what": "time", **pairwise(rates[b], rates[a])._asdict()},
            {"a": a, "b": b, "what": "memory", **pairwise(peaks[a], peaks[b])._asdict()},
        ],
        "loss_rel_error": loss_error,
        "grad_abs_error": grad_error,
    }
    show(document, rates, peaks, benchmark, device)
    if benchmark.json is not None:
        write_json(benchmark.json, document)
    if benchmark.record:
        append_rows(benchmark.results, rows(document, rates, peaks, benchmark, device))
    return document


def check(benchmark: Benchmark) -> None:
    """UserError for numbers that make no sense here."""
    positive = (
        "batch",
        "classes",
        "grid",
        "width",
        "side",
        "top_k",
        "palette",
        "rounds",
        "threads",
    )
    small = [name for name in positive if getattr(benchmark, name) < 1]
    if small:
        raise UserError(f"--{small[0].replace('_', '-')} must be at least 1")
    if not benchmark.top_k <= benchmark.palette <= benchmark.classes <= 2**16:
        raise UserError(
            "--top-k, --palette and --classes must ascend, and a map numbers at most 65,536 classes"
        )


def make_step(benchmark: Benchmark, device: torch.device, logits: bool = True) -> Step:
    """Random crops and flips of smooth random maps, as a teacher's are: neighbors name much the
    same classes.

    Without `logits` these are empty.
    """
    N, S, K = benchmark.batch, benchmark.side, benchmark.classes
    rng = torch.Generator().manual_seed(0)
    palette = torch.rand(N, K, generator=rng).argsort(1)[:, : benchmark.palette]
    coarse = 4 + 3 * torch.randn(N, benchmark.palette, 5, 5, generator=rng)
    top = F.interpolate(coarse, (S, S), mode="bicubic", align_corners=True).topk(benchmark.top_k, 1)
    named = (
        palette.gather(1, top.indices.flatten(1))
        .view(N, benchmark.top_k, S, S)
        .permute(0, 2, 3, 1)
        .contiguous()
    )
    logit = top.values.permute(0, 2, 3, 1).half().contiguous()
    ids, height, width = np.arange(N), np.full(N, HEIGHT), np.full(N, WIDTH)
    boxes, flips = EpochPlan(num_samples=N, batch=N, seed=0, mode="train").crops(
        0, ids, height, width
    )
    view = crop_views(boxes, flips, height, width)
    batch = Batch(
        image=torch.zeros(N, 1, 1, 3, dtype=torch.uint8),
        label=palette[:, 0],
        view=torch.from_numpy(view),
        shown=torch.from_numpy(visible_boxes(view)),
        index=torch.arange(N),
        repeat=torch.zeros(N, dtype=torch.long),
        weight=torch.ones(N),
        map_logit=logit,
        map_class=named.to(torch.uint16),
        map_lse=torch.zeros(N, S, S).half(),
        window=torch.tensor([WHOLE]).repeat(N, 1),
    )
    spec = ScoreMapSpec(
        S, benchmark.top_k, K, "zero-logit", int(palette_sizes(named.numpy()).max()), 1.0
    )
    count = N if logits else 0
    answers = (
        2 * torch.randn(count, *shape, generator=rng) for shape in ((K,), (benchmark.grid**2, K))
    )
    return Step(
        batch.to(device),
        spec,
        benchmark.grid,
        *(answer.to(device).requires_grad_() for answer in answers),
    )


def make_head_step(benchmark: Benchmark, device: torch.device) -> HeadStep:
    """Tokens and a head whose logits spread as a trained student's might, and the targets of
    `make_step`'s maps.
    """
    step = make_step(benchmark, device, logits=False)
    rules, rng = TargetRules(smoothing=SMOOTHING), torch.Generator().manual_seed(1)
    shapes = (
        (benchmark.batch, benchmark.grid**2, benchmark.width),
        (benchmark.classes, benchmark.width),
        (benchmark.classes,),
    )
    tokens, weight, bias = (torch.randn(shape, generator=rng) for shape in shapes)
    leaves = (
        part.to(device).requires_grad_()
        for part in (tokens, weight * 2 / benchmark.width**0.5, bias / 10)
    )
    return HeadStep(*leaves, sparse_targets(step.batch, step.spec, benchmark.grid, rules))


def make_train_step(benchmark: Benchmark, device: torch.device) -> TrainStep:
    """A new network and noise to look at; the grid is the network's own."""
    if not has_tokens(benchmark.model):
        known = [f"{family}_*" for family in FAMILIES]
        raise UserError(
            f"--model {benchmark.model} has no token head; choose one of {', '.join(known)}"
        )
    model = timm.create_model(
        benchmark.model, num_classes=benchmark.classes, drop_path_rate=0.1, token_head=True
    )
    model = model.to(device, memory_format=torch.channels_last).train()
    step = make_step(replace(benchmark, grid=model.grid_size), device, logits=False)
    side = model.grid_size * model.patch_size
    image = torch.randn(benchmark.batch, 3, side, side, device=device).contiguous(
        memory_format=torch.channels_last
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return TrainStep(
        model, optimizer, image, step.batch.label, step.batch, step.spec, model.grid_size
    )


# ------------------------------------------------------------------------- the contestants


def sparse_loss(step: Step) -> Tensor:
    """Ours, as train.py has it."""
    rules = TargetRules(smoothing=SMOOTHING)
    maps = palette_maps(step.batch, step.spec, rules)
    whole, tokens = (
        sparse_targets(step.batch, step.spec, side, rules, maps) for side in (1, step.grid)
    )
    return class_token_loss(step.cls, whole) + TOKEN_WEIGHT * token_loss(step.tokens, tokens)


def dense_loss(step: Step) -> Tensor:
    """The published recipe in the logits' dtype: maps are flipped first, boxes are those of the
    flipped image.
    """
    batch, dtype, K = step.batch, step.cls.dtype, step.spec.num_classes
    flipped = batch.view[:, 0, 0] < 0
    turn = flipped[:, None, None, None]
    logit, named = batch.map_logit.to(dtype), batch.map_class.long()
    logit, named = torch.where(turn, logit.flip(2), logit), torch.where(turn, named.flip(2), named)
    top, left, bottom, right = batch.shown.to(dtype).unbind(1)
    left, right = torch.where(flipped, 1 - right, left), torch.where(flipped, 1 - left, right)
    number = torch.arange(len(left), dtype=dtype, device=left.device)
    boxes = torch.cat(
        [number[:, None], torch.stack([left, top, right, bottom], 1) * step.spec.side], 1
    )
    dense = torch.zeros(
        len(left), K, step.spec.side, step.spec.side, dtype=dtype, device=left.device
    )
    for row, values, classes in zip(dense, logit, named, strict=True):
        row.scatter_(0, classes.permute(2, 0, 1), values.permute(2, 0, 1))
    pooled = torch.cat(
        [roi_align(dense, boxes, side, aligned=True).flatten(2) for side in (1, step.grid)], 2
    )
    off = SMOOTHING / K
    target = pooled.softmax(1) * (1 - SMOOTHING + off) + off
    table = target[:, :, 1:].transpose(1, 2).reshape(-1, K)
    whole = torch.sum(-target[:, :, 0] * F.log_softmax(step.cls, -1), -1).mean()
    return (
        whole
        + TOKEN_WEIGHT
        * torch.sum(-table * F.log_softmax(step.tokens.reshape(-1, K), -1), -1).mean()
    )


def fused_loss(step: HeadStep) -> Tensor:
    """Ours, without logits that exist whole."""
    return fused_token_loss(step.tokens, step.weight, step.bias, step.targets)


def whole_loss(step: HeadStep) -> Tensor:
    """The head, then our sparse loss: in float64 where the step is."""
    return token_loss(F.linear(step.tokens, step.weight, step.bias), step.targets)


def answered(step: TrainStep) -> TokenLogits:
    """The network's answer, in bfloat16 on a GPU as train.py has it."""
    with torch.autocast(step.tokens.device.type, torch.bfloat16, enabled=step.tokens.is_cuda):
        return step.model(step.tokens)


def labeled_loss(step: TrainStep) -> Tensor:
    """Equation 7."""
    cls, tokens = answered(step)
    return sparse_loss(Step(step.batch, step.spec, step.grid, cls, tokens))


def unlabeled_loss(step: TrainStep) -> Tensor:
    """The image's label for the class token and for every token, as published code has it where
    there are no maps.
    """
    cls, tokens = answered(step)
    every = step.label[:, None].expand(-1, tokens.shape[1]).flatten()
    hard = [
        F.cross_entropy(logits.float(), label, label_smoothing=SMOOTHING)
        for logits, label in ((cls, step.label), (tokens.flatten(0, 1), every))
    ]
    return hard[0] + TOKEN_WEIGHT * hard[1]


# ------------------------------------------------------------------------- measuring


def forget(step: Step | HeadStep | TrainStep) -> None:
    """Drop the gradients."""
    for leaf in step.leaves:
        leaf.grad = None


def backward(
    loss: Callable[[Step | HeadStep | TrainStep], Tensor], step: Step | HeadStep | TrainStep
) -> int:
    """A loss and its gradient, to the end; the images it was of."""
    loss(step).backward()
    if isinstance(step, TrainStep):
        step.optimizer.step()
    if step.tokens.is_cuda:
        torch.cuda.synchronize(step.tokens.device)
    return len(step.tokens)


def peak_bytes(
    loss: Callable[[Step | HeadStep | TrainStep], Tensor], step: Step | HeadStep | TrainStep
) -> float:
    """The most memory that a step holds at once beside what it begins with and the gradients it
    ends with.

    From the allocator's own record, so that what an operation takes and gives back inside itself
    counts too.
    """
    forget(step)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it reports a missing GPU as an error
    kind = 1 if step.tokens.is_cuda else 0  # as the trace numbers devices
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        backward(loss, step)
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    changes = [
        event["args"]
        for event in events
        if event["name"] == "[memory]" and event["args"]["Device Type"] == kind
    ]
    changes.sort(key=lambda change: change["Ev Idx"])
    # The gradient lies where the last allocation at its address put it, and is not counted from
    # then on.
    lasting = {change["Addr"]: at for at, change in enumerate(changes) if change["Bytes"] > 0}
    gradients = {lasting.get(leaf.grad.data_ptr()) for leaf in step.leaves}
    held = np.cumsum(
        [0 if at in gradients else change["Bytes"] for at, change in enumerate(changes)]
    )
    return float(held.max())


def errors(step: Step) -> tuple[float, float]:
    """Relative error of our loss and the largest error of its gradient, against the dense recipe in
    float64.
    """
    forget(step)
    loss = sparse_loss(step)
    loss.backward()
    N, want, far = len(step.cls), 0.0, 0.0
    for at in range(0, N, SLICE):  # all at once, float64 maps of 21,841 classes would take 7 GB
        part = slice(at, at + SLICE)
        logits = [
            logits.detach()[part].double().requires_grad_() for logits in (step.cls, step.tokens)
        ]
        batch = Batch(*(field[part] for field in step.batch))
        share = len(logits[0]) / N
        reference = dense_loss(Step(batch, step.spec, step.grid, *logits)) * share
        reference.backward()
        want += reference.item()
        for ours, theirs in zip((step.cls, step.tokens), logits, strict=True):
            far = max(far, (ours.grad[part] - theirs.grad).abs().max().item())
    forget(step)
    return abs(loss.item() / want - 1), far


def head_errors(step: HeadStep) -> tuple[float, float]:
    """Relative error of the fused loss and the largest error of its gradients, against the head and
    loss in float64.
    """
    forget(step)
    loss = fused_loss(step)
    loss.backward()
    double = [leaf.detach().double() for leaf in step.leaves]
    weight, bias = (part.requires_grad_() for part in double[1:])
    N, want, far = len(step.tokens), 0.0, 0.0
    for n in range(N):
        tokens = double[0][n : n + 1].requires_grad_()
        targets = SparseTargets(*(part[n : n + 1] for part in step.targets))
        reference = whole_loss(HeadStep(tokens, weight, bias, targets)) * (
            targets.weight.sum() / step.targets.weight.sum()
        )
        reference.backward()
        want += reference.item()
        far = max(far, (step.tokens.grad[n : n + 1] - tokens.grad).abs().max().item())
    pairs = ((step.weight, weight), (step.bias, bias))
    far = max(far, *((ours.grad - theirs.grad).abs().max().item() for ours, theirs in pairs))
    forget(step)
    return abs(loss.item() / want - 1), far


# ------------------------------------------------------------------------- telling


def what_of(benchmark: Benchmark, device: torch.device) -> str:
    """What was measured, in words."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    shape = f"{benchmark.side} x {benchmark.side} cells of {benchmark.top_k} of {benchmark.palette} classes"
    if benchmark.compare == "head":
        shape += f", tokens of {benchmark.width}"
    if benchmark.compare == "step":
        shape += f", {benchmark.model}"
    return f"{benchmark.batch} images, {benchmark.classes} classes, grid {benchmark.grid}, maps of {shape}; {where}"


def show(
    document: dict, rates: dict, peaks: dict, benchmark: Benchmark, device: torch.device
) -> None:
    """Print the document as a table."""
    print(what_of(benchmark, device))
    console = Console()
    console.width = max(console.width, 110)  # the table in full, also in a log file
    table = Table(title="Targets, loss and gradient", title_justify="left")
    a, b = rates
    for name in ("", a, b, f"{a} / {b}", "p25", "p75", "bar (aim)"):
        table.add_column(name, justify="right" if name else "left")
    milliseconds = {
        name: 1e3 * benchmark.batch / Spread.of(values).median for name, values in rates.items()
    }
    megabytes = {name: Spread.of(values).median / 1e6 for name, values in peaks.items()}
    for ratio, unit, values in zip(
        document["ratios"], ("ms", "MB"), (milliseconds, megabytes), strict=True
    ):
        goal = BARS.get((benchmark.compare, ratio["what"], device.type))
        table.add_row(
            ratio["what"],
            *(f"{values[name]:,.1f} {unit}" for name in (a, b)),
            *(part(ratio[at]) for at in ("median", "p25", "p75")),
            f"{part(goal[0])} ({part(goal[1])})" if goal else "",
        )
    console.print(table)
    if document["loss_rel_error"] is not None:
        console.print(
            f"against float64: loss {document['loss_rel_error']:.1e} relative (bar 2e-06), "
            f"gradient {document['grad_abs_error']:.1e} absolute (bar 1e-07)"
        )


def part(ratio: float) -> str:
    """A small ratio as a part of one."""
    return f"{ratio:.3f}" if ratio > 0.7 else f"1 / {1 / ratio:.1f}"


def rows(
    document: dict, rates: dict, peaks: dict, benchmark: Benchmark, device: torch.device
) -> list[dict]:
    """What the CSV gets: a line per contestant and ratio."""
    facts = environment(PACKAGES) | {
        "data": what_of(benchmark, device),
        "threads": benchmark.threads,
    }
    found = [
        {"name": f"targets {name}", "unit": "images/s", **Spread.of(rates[name])._asdict()}
        for name in rates
    ]
    megabytes = {name: [value / 1e6 for value in values] for name, values in peaks.items()}
    found += [
        {"name": f"targets {name}", "unit": "MB", **Spread.of(megabytes[name])._asdict()}
        for name in peaks
    ]
    found += [
        ratio | {"name": f"targets {ratio['a']} / {ratio['b']}, {ratio['what']}", "unit": "ratio"}
        for ratio in document["ratios"]
    ]
    runs = {"images/s": benchmark.rounds, "MB": MEMORY_RUNS}
    for line in found:
        line["runs"] = runs.get(
            line["unit"], benchmark.rounds if line.get("what") == "time" else MEMORY_RUNS
        )
    return [facts | {name: line[name] for name in COLUMNS if name in line} for line in found]


if __name__ == "__main__":
    run(lambda: main(tyro.cli(Benchmark, description=__doc__)))

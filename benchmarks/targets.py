"""Measure time and memory from score maps to the student's gradient, for sparse and dense targets.

    python -m benchmarks.targets --batch 128 --classes 1000 --grid 14 --device cpu --json out.json
    python -m benchmarks.targets --compare head --batch 64 --classes 21841 --rounds 3
    python -m benchmarks.targets --compare masks --batch 2 --classes 150 --grid 512 --side 64

`sparse` is ours: `sparse_targets` for class token and tokens, their losses, backward. `dense` is
the published recipe with corrected boxes: each image's map scattered in a loop, torchvision's
RoIAlign to grid x grid and to 1 x 1, softmax, smoothing, log-softmax, backward. Both start from the
same maps, crops and logits, and end with the logits' gradient.

`--compare head` starts one layer earlier, with tokens of --width features and the head's weights.
`fused` is our loss fused with the head's matrix product; `whole` is the product followed by the
sparse loss, with its logits [N * T, K] in memory.

`--compare masks` has logits of grid x grid pixels, [N, K, h, w]. `stripes` is our loss of
SoftMasks; `dense` spreads the maps to all classes, samples their probabilities bilinearly at the
pixels, and calls PyTorch's cross entropy. Crops are inside the image, maps have the teacher's tail.

A ratio is ours / the other, so smaller is better. Time: the median of the ratios within a round.
Memory: the peak of PyTorch's allocations from the first to the last operation, without the inputs
and the final gradients. The errors of our loss and gradients against float64 are printed too. Rows
are appended to --results.
"""

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import (
    Count,
    Output,
    Series,
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
from benchmarks.peers import SMOOTHING, pool_maps
from densefeed.models import checkpoints  # noqa: F401  (registers our models with timm)
from densefeed.objectives.losses import fused_token_loss, sparse_loss
from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.masks import SoftMasks
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.targets import SparseTargets, TargetRules, palette_maps, sparse_targets
from densefeed.storage.geometry import WHOLE, crop_views, visible_boxes
from densefeed.storage.score_maps import palette_sizes
from densefeed.system.devices import choose_device, synchronize
from densefeed.system.errors import UserError
from densefeed.system.progress import steps_bar

# N images   S map side   k classes per cell   K classes   P grid side   T = P * P tokens   D width

# Required ratio and goal, by --compare, quantity and device.
BARS = {
    ("dense", "time", "cpu"): "1 / 5, goal 1 / 8",
    ("dense", "time", "cuda"): "1 / 8, goal 1 / 15",
    ("dense", "memory", "cpu"): "1 / 10, goal 1 / 20",
    ("dense", "memory", "cuda"): "1 / 10, goal 1 / 20",
    ("head", "memory", "cpu"): "1 / 4, goal 1 / 20",
    ("head", "memory", "cuda"): "1 / 4, goal 1 / 20",
    ("masks", "time", "cpu"): "1 / 3",
    ("masks", "time", "cuda"): "1 / 3",
    ("masks", "memory", "cpu"): "1 / 20",
    ("masks", "memory", "cuda"): "1 / 20",
}
# Pixels of the uncropped images. They are primes: half of a width of 500 would span 9 of 18 cells
# up to rounding, and RoIAlign, which takes ceil(9) samples, might take 10. Then no two dense
# implementations would agree on every crop, at any precision.
HEIGHT, WIDTH = 373, 499
# Beta of equation 7 of TokenLabeling's paper (arXiv 2104.10858); its code defaults to 1.
TOKEN_WEIGHT = 0.5
MEMORY_RUNS = 3
# Images of the float64 reference at once.
SLICE = 16


@dataclass(frozen=True, kw_only=True)
class TargetBenchmark(Output):
    """Options of this benchmark."""

    batch: Count = 128  # N, images
    classes: Count = 1000  # K, number of classes
    grid: Count = 14  # P, tokens, or pixels, along a side
    # dense: sparse and dense targets; head: a fused head and one with logits in memory; masks:
    # sparse and dense targets of pixels
    compare: Literal["dense", "head", "masks"] = "dense"
    bits: Literal[32, 16] = 32  # of the logits of --compare masks; 16 are bfloat16, under autocast
    width: Count = 384  # D, features of a token, for --compare head
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if available, else cpu
    side: Count = 18  # S, cells along a side of a map
    top_k: Count = 5  # k, classes stored per cell
    palette: Count = 24  # distinct classes in an image's map, at most
    rounds: Count = 9  # steps of each contestant, after one warm-up step
    threads: Count = 1  # of torch on a CPU, each on its own core


class LossStep(NamedTuple):
    """Inputs of the loss: a batch with score maps, and the student's logits."""

    batch: Batch  # maps, crops and flips
    spec: ScoreMapSpec
    grid: int
    cls: Tensor  # [N, K], logits of the class token
    tokens: Tensor  # [N, T, K], logits of the tokens


class HeadStep(NamedTuple):
    """Inputs of the head and its loss: tokens, the head's weights, targets."""

    tokens: Tensor  # [N, T, D]
    weight: Tensor  # [K, D]
    bias: Tensor  # [K]
    targets: SparseTargets


class MaskStep(NamedTuple):
    """Inputs of the loss of pixels."""

    masks: SoftMasks
    tokens: Tensor  # [N, K, h, w], logits of the pixels


AnyStep = LossStep | HeadStep | MaskStep
Loss = Callable[[AnyStep], Tensor]


def main(benchmark: TargetBenchmark) -> dict:
    """Measure, print and record; return the document that --json writes."""
    check(benchmark)
    device = choose_device(benchmark.device)
    make, losses, errors = CONTESTS[benchmark.compare]
    step = make(benchmark, device)
    rates, megabytes = measure(losses, step, benchmark)
    loss_error, grad_error = errors(step)
    # Times are the inverse of rates.
    times = {name: [1 / rate for rate in values] for name, values in rates.items()}
    (a, b), ratios = losses, []
    for what, values in (("time", times), ("memory", megabytes)):
        bar = BARS.get((benchmark.compare, what, device.type), "")
        ratios.append(compare(a, b, values[a], values[b], f", {what}", bar))
    rows = spread_rows(rates, "images/s") + spread_rows(megabytes, "MB")
    facts = environment() | {"threads": benchmark.threads}
    found = {"loss_rel_error": loss_error, "grad_abs_error": grad_error}
    data = describe(benchmark, device)
    document = report(benchmark, rows, ratios, data, facts, "targets ", **found)
    print(
        f"error against float64: loss {loss_error:.1e} relative (at most 2e-06), "
        f"gradient {grad_error:.1e} absolute (at most 1e-07)"
    )
    return document


def check(benchmark: TargetBenchmark) -> None:
    """Raise UserError for invalid options."""
    if not benchmark.top_k <= benchmark.palette <= benchmark.classes <= 2**16:
        raise UserError(
            "--top-k, --palette and --classes must ascend, "
            "and a map can hold at most 65,536 classes"
        )
    if benchmark.bits == 16 and benchmark.compare != "masks":
        raise UserError("--bits is that of --compare masks; remove it")
    check_threads(benchmark.threads)


def make_step(benchmark: TargetBenchmark, device: torch.device, logits: bool = True) -> LossStep:
    """Draw smooth random maps with random crops and flips.

    Neighbors name mostly the same classes, as in a teacher's maps. Without `logits`, `cls` and
    `tokens` are empty.
    """
    N, S, K, k = benchmark.batch, benchmark.side, benchmark.classes, benchmark.top_k
    rng = torch.Generator().manual_seed(0)
    palette = torch.rand(N, K, generator=rng).argsort(1)[:, : benchmark.palette]
    coarse = 4 + 3 * torch.randn(N, benchmark.palette, 5, 5, generator=rng)
    top = F.interpolate(coarse, (S, S), mode="bicubic", align_corners=True).topk(k, 1)
    named = palette.gather(1, top.indices.flatten(1)).view(N, k, S, S)
    named = named.permute(0, 2, 3, 1).contiguous()
    ids, height, width = np.arange(N), np.full(N, HEIGHT), np.full(N, WIDTH)
    plan = EpochPlan(num_samples=N, batch=N, seed=0, mode="train")
    view = crop_views(*plan.crops(0, ids, height, width), height, width)
    batch = Batch(
        # No pixel is read: the loss takes maps, views and flips.
        image=torch.zeros(N, 1, 1, 3, dtype=torch.uint8),
        label=palette[:, 0],
        view=torch.from_numpy(view),
        shown=torch.from_numpy(visible_boxes(view)),
        index=torch.arange(N),
        repeat=torch.zeros(N, dtype=torch.long),
        weight=torch.ones(N),
        map_logit=top.values.permute(0, 2, 3, 1).half().contiguous(),
        map_class=named.to(torch.uint16),
        # Only targets with the teacher's tail read it.
        map_lse=torch.zeros(N, S, S).half(),
        window=torch.tensor([WHOLE]).repeat(N, 1),
        # As the loaders mark their crops; rotated views take a slower path.
        axis_aligned=True,
    )
    max_palette = int(palette_sizes(named.numpy()).max())
    spec = ScoreMapSpec(S, k, K, "zero-logit", max_palette, 1.0)
    count = N if logits else 0
    leaves = (
        (2 * torch.randn(count, *shape, generator=rng)).to(device).requires_grad_()
        for shape in ((K,), (benchmark.grid**2, K))
    )
    return LossStep(batch.to(device), spec, benchmark.grid, *leaves)


def make_head_step(benchmark: TargetBenchmark, device: torch.device) -> HeadStep:
    """Draw tokens and a head whose logits spread like a trained student's.

    The targets are those of `make_step`'s maps.
    """
    N, D, K = benchmark.batch, benchmark.width, benchmark.classes
    step = make_step(benchmark, device, logits=False)
    rules, rng = TargetRules(smoothing=SMOOTHING), torch.Generator().manual_seed(1)
    tokens = torch.randn(N, benchmark.grid**2, D, generator=rng)
    # Tokens of unit variance then have logits of deviation 2, as in make_step.
    weight = torch.randn(K, D, generator=rng) * 2 / D**0.5
    bias = torch.randn(K, generator=rng) / 10
    leaves = (part.to(device).requires_grad_() for part in (tokens, weight, bias))
    return HeadStep(*leaves, sparse_targets(step.batch, step.spec, benchmark.grid, rules))


def make_mask_step(benchmark: TargetBenchmark, device: torch.device) -> MaskStep:
    """Draw the maps and crops of `make_step` with a tail of 5 %, and logits of pixels."""
    N, K, side = benchmark.batch, benchmark.classes, benchmark.grid
    step = make_step(benchmark, device, logits=False)
    lse = step.batch.map_logit.float().logsumexp(-1) + 0.05
    spec = step.spec._replace(absent="tail")
    batch = step.batch._replace(map_lse=lse.half())
    logits = 2 * torch.randn(N, K, side, side, generator=torch.Generator().manual_seed(1))
    logits = logits.to(device, torch.bfloat16 if benchmark.bits == 16 else torch.float32)
    masks = SoftMasks(batch, spec, (side, side), TargetRules())
    return MaskStep(masks, logits.requires_grad_())


# ------------------------------------------------------------------------- the contestants

soft_cross_entropy = SoftTargetCrossEntropy()


def train_loss(step: LossStep) -> Tensor:
    """Compute our loss as train.py does."""
    rules = TargetRules(smoothing=SMOOTHING)
    # Both grids share the maps' palettes, half the time of a call of sparse_targets.
    maps = palette_maps(step.batch, step.spec, rules)
    whole, tokens = (
        sparse_targets(step.batch, step.spec, side, rules, maps) for side in (1, step.grid)
    )
    return sparse_loss(step.cls, whole) + TOKEN_WEIGHT * sparse_loss(step.tokens, tokens)


def dense_loss(step: LossStep) -> Tensor:
    """Compute the published loss in the logits' dtype.

    Maps are flipped first, and boxes are those in the flipped image.
    """
    batch, side, K = step.batch, step.spec.side, step.spec.num_classes
    # A view with a negative horizontal scale is mirrored.
    dtype, flipped = step.cls.dtype, batch.view[:, 0, 0] < 0
    logit, named = (
        torch.where(flipped[:, None, None, None], part.flip(2), part).permute(0, 3, 1, 2)
        for part in (batch.map_logit.to(dtype), batch.map_class.long())
    )
    top, left, bottom, right = batch.shown.to(dtype).unbind(1)
    left, right = torch.where(flipped, 1 - right, left), torch.where(flipped, 1 - left, right)
    corners = torch.stack([left, top, right, bottom], 1) * side
    pooled = pool_maps(logit, named, corners, K, step.grid, aligned=True)
    off = SMOOTHING / K
    target = pooled.softmax(1) * (1 - SMOOTHING + off) + off
    tokens = target[:, :, 1:].transpose(1, 2).reshape(-1, K)
    whole = soft_cross_entropy(step.cls, target[:, :, 0])
    return whole + TOKEN_WEIGHT * soft_cross_entropy(step.tokens.reshape(-1, K), tokens)


def fused_loss(step: HeadStep) -> Tensor:
    """Compute our loss fused with the head, without ever holding all logits."""
    return fused_token_loss(step.tokens, step.weight, step.bias, step.targets)


def whole_loss(step: HeadStep) -> Tensor:
    """Compute the head's logits, then our sparse loss, in the tokens' dtype."""
    return sparse_loss(F.linear(step.tokens, step.weight, step.bias), step.targets)


def stripes_loss(step: MaskStep) -> Tensor:
    """Compute our loss of pixels."""
    return sparse_loss(step.tokens, step.masks)


def pixels_loss(step: MaskStep) -> Tensor:
    """Compute PyTorch's loss of pixels on dense targets."""
    batch, spec, size, _, _, _ = step.masks
    # A float64 reference has float64 maps; logits of 16 bits have targets of 32, as autocast does.
    dtype = torch.promote_types(step.tokens.dtype, torch.float32)
    top = (batch.map_logit.to(dtype) - batch.map_lse.to(dtype)[..., None]).exp()
    K, k = spec.num_classes, spec.top_k
    rest = (1 - top.sum(-1, keepdim=True)).clamp(min=0) / (K - k)
    dense = rest.expand(*rest.shape[:-1], K).scatter(3, batch.map_class.long(), top)
    view = batch.view.to(dtype)
    # From -1 to 1 instead of from 0 to 1.
    shift = view[:, :, :2].sum(2) + 2 * view[:, :, 2] - 1
    theta = torch.cat([view[:, :, :2], shift[..., None]], 2)
    points = F.affine_grid(theta, [len(view), 1, *size], align_corners=False)
    target = F.grid_sample(
        dense.permute(0, 3, 1, 2), points, padding_mode="border", align_corners=False
    )
    low = step.tokens.dtype == torch.bfloat16
    with torch.autocast(step.tokens.device.type, torch.bfloat16, enabled=low):
        return F.cross_entropy(step.tokens, target)


# ------------------------------------------------------------------------- measuring


def measure(
    losses: dict[str, Loss], step: AnyStep, benchmark: TargetBenchmark
) -> tuple[Series, Series]:
    """Return each contestant's images per second and its peak memory in MB.

    Rates have one value per round, peak memory one value for each of MEMORY_RUNS.
    """
    total = len(losses) * (benchmark.rounds + 1)
    # `loss=loss` binds the current one; the closure would see the last of the loop.
    works = {name: lambda _, loss=loss: backward_sync(loss, step) for name, loss in losses.items()}
    with use_cores(benchmark.threads), steps_bar("benchmark", total, 0) as advance:
        rates = take_turns(
            works, benchmark.rounds, lambda _: drop_gradients(step), lambda name: advance(1, name)
        )
        megabytes = {
            name: [peak_bytes(loss, step) / 1e6 for _ in range(MEMORY_RUNS)]
            for name, loss in losses.items()
        }
    return rates, megabytes


def get_leaves(step: AnyStep) -> list[Tensor]:
    """Return the tensors that receive a gradient."""
    return [part for part in step if isinstance(part, Tensor) and part.requires_grad]


def drop_gradients(step: AnyStep) -> None:
    """Set all gradients to None."""
    for leaf in get_leaves(step):
        leaf.grad = None


def backward_sync(loss: Loss, step: AnyStep) -> int:
    """Compute a loss and its gradient, and wait; return the number of images."""
    loss(step).backward()
    synchronize(step.tokens.device)
    return len(step.tokens)


def peak_bytes(loss: Loss, step: AnyStep) -> float:
    """Return a step's peak of allocated bytes, without its inputs and its final gradients.

    The allocator's own record also counts what an operation allocates and frees internally.
    """
    drop_gradients(step)
    # Otherwise the profiler reports a missing GPU as an error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        backward_sync(loss, step)
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    changes = [event["args"] for event in events if event["name"] == "[memory]"]
    # The trace's numbers of the two kinds of devices are 0 and 1.
    changes = [change for change in changes if change["Device Type"] == step.tokens.is_cuda]
    changes.sort(key=itemgetter("Ev Idx"))
    # A final gradient is the last allocation at its address, which is not counted.
    lasting = {change["Addr"]: at for at, change in enumerate(changes) if change["Bytes"] > 0}
    gradients = {lasting.get(leaf.grad.data_ptr()) for leaf in get_leaves(step)}
    held = np.cumsum(
        [0 if at in gradients else change["Bytes"] for at, change in enumerate(changes)]
    )
    return float(held.max())


def loss_errors(step: LossStep) -> tuple[float, float]:
    """Return the errors of our loss and its gradient against the dense recipe in float64.

    The loss's error is relative; the gradient's is the largest absolute one.
    """
    drop_gradients(step)
    loss = train_loss(step)
    loss.backward()
    N, want, errors = len(step.cls), 0.0, []
    # All at once, float64 maps of 21,841 classes would take 7 GB.
    for at in range(0, N, SLICE):
        part = slice(at, at + SLICE)
        logits = [leaf.detach()[part].double().requires_grad_() for leaf in get_leaves(step)]
        batch = step.batch.map_tensors(lambda field, part=part: field[part])
        # The loss is a mean over images, so a slice counts by its number of images.
        share = len(logits[0]) / N
        cls, tokens = logits
        reference = dense_loss(step._replace(batch=batch, cls=cls, tokens=tokens)) * share
        reference.backward()
        want += reference.item()
        for ours, theirs in zip(get_leaves(step), logits, strict=True):
            errors.append((ours.grad[part] - theirs.grad).abs().max().item())
    return abs(loss.item() / want - 1), max(errors)


def head_errors(step: HeadStep) -> tuple[float, float]:
    """Return the errors of the fused loss and its gradients against the head and loss in float64.

    The loss's error is relative; the gradients' is the largest absolute one.
    """
    drop_gradients(step)
    loss = fused_loss(step)
    loss.backward()
    double = [leaf.detach().double().requires_grad_() for leaf in get_leaves(step)]
    tokens, weight, bias = double
    want = 0.0
    # All at once, float64 logits of 64 images of 196 tokens and 21,841 classes would take 2.2 GB.
    for n in range(len(tokens)):
        targets = SparseTargets(*(part[n : n + 1] for part in step.targets))
        share = targets.weight.sum() / step.targets.weight.sum()
        reference = whole_loss(HeadStep(tokens[n : n + 1], weight, bias, targets)) * share
        reference.backward()
        want += reference.item()
    pairs = zip(get_leaves(step), double, strict=True)
    error = max((ours.grad - theirs.grad).abs().max().item() for ours, theirs in pairs)
    return abs(loss.item() / want - 1), error


def mask_errors(step: MaskStep) -> tuple[float, float]:
    """Return the errors of our loss of pixels and its gradient against dense targets in float64.

    The loss's error is relative; the gradient's is the largest absolute one.
    """
    drop_gradients(step)
    loss = stripes_loss(step)
    loss.backward()
    want, errors, N = 0.0, [], len(step.tokens)
    for n in range(N):
        logits = step.tokens.detach()[n : n + 1].double().requires_grad_()
        batch = step.masks.batch.map_tensors(lambda field, n=n: field[n : n + 1])
        reference = pixels_loss(MaskStep(step.masks._replace(batch=batch), logits)) / N
        reference.backward()
        want += reference.item()
        errors.append((step.tokens.grad[n].double() - logits.grad[0]).abs().max().item())
    return abs(loss.item() / want - 1), max(errors)


# What --compare compares: the inputs, the two losses, and the errors of the first.
CONTESTS = {
    "dense": (make_step, {"sparse": train_loss, "dense": dense_loss}, loss_errors),
    "head": (make_head_step, {"fused": fused_loss, "whole": whole_loss}, head_errors),
    "masks": (make_mask_step, {"stripes": stripes_loss, "dense": pixels_loss}, mask_errors),
}


# ------------------------------------------------------------------------- results


def describe(benchmark: TargetBenchmark, device: torch.device) -> str:
    """Describe the inputs and the device."""
    images = f"{benchmark.batch} images, {benchmark.classes} classes, grid {benchmark.grid}"
    cells = f"{benchmark.side} x {benchmark.side} cells"
    maps = f"maps of {cells} of {benchmark.top_k} of {benchmark.palette} classes"
    extra = f", tokens of {benchmark.width}" if benchmark.compare == "head" else ""
    extra = f", logits of {benchmark.bits} bits" if benchmark.compare == "masks" else extra
    return f"{images}, {maps}{extra}; {device_name(device)}"


if __name__ == "__main__":
    command(main, TargetBenchmark, __doc__)

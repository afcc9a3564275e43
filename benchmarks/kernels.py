"""Time the kernels of an LV-ViT's training step one by one, each beside its floor.

    python -m benchmarks.kernels --device cuda
    python -m benchmarks.kernels --model lvvit_deit_s --batch 256 --device cuda --json kernels.json

Products, attention, convolutions, norms, GELU and BatchNorm have the shapes of the model's step,
random operands, and the form that PyTorch gives them without compilation. A row is the time of all
calls of a step: milliseconds of a call times the number of its layers. The gradients of products
and convolutions are timed apart, for the input and for the weight. Within a compiled step, kernels
that only move numbers are fused and take less. On a GPU the forms of layers that are under test
(densefeed/models/kernels/levers.py) follow, and their plain twins, compiled.

The floor of a call is the larger of two times: its operations at the rate of a large product, and
its bytes, each operand read or written once, at the rate of a large copy. Both rates are measured
here, with random numbers: a product of equal numbers takes less power and runs at a higher clock. A
ratio is the floor by the time of the same round, so 1 is perfect.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import timm
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch
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
from densefeed.models.kernels import (
    add_norm,
    four_channels,
    norm_relu,
    packed_attention,
    shared_gelu,
    space_to_depth,
)
from densefeed.models.lvvit import LVViT, PatchProjection, multiply_patches
from densefeed.system.devices import choose_device, synchronize
from densefeed.system.errors import UserError
from densefeed.system.progress import steps_bar
from densefeed.training.mixed_linear import float32_product

# N images   T tokens   D width   P side of the token grid   R rows of a product

# The rates that floors are computed from.
PRODUCT, COPY = "large product", "large copy"


@dataclass(frozen=True, kw_only=True)
class KernelBenchmark(Output):
    """Options of this benchmark."""

    model: str = "lvvit_s"  # an LV-ViT
    batch: Count = 256  # images per batch
    size: Count = 224  # side of the network's input, pixels
    classes: Count = 1000  # of both heads
    device: str = "auto"  # auto: cuda if available, else cpu
    calls: Count = 20  # of a kernel in a round
    rounds: Count = 9  # measured rounds, after one for warm-up
    side: Count = 8192  # rows and columns of the large product and the large copy
    threads: Count = CORES  # of torch on a CPU


class Kernel(NamedTuple):
    """A call and what it must compute and move."""

    call: Callable[[], object]
    layers: int  # calls of a step
    operations: float
    bytes: float


def main(benchmark: KernelBenchmark) -> dict:
    """Measure, print and record; return the document that --json writes."""
    check_threads(benchmark.threads)
    device, facts = choose_device(benchmark.device), environment()
    facts |= {"threads": benchmark.threads}
    model = timm.create_model(
        benchmark.model, img_size=benchmark.size, num_classes=benchmark.classes
    )
    if not isinstance(model, LVViT):
        raise UserError(f"--model {benchmark.model} is not an LV-ViT; give lvvit_s or another one")
    kernels = list_kernels(benchmark, model, device) | list_forms(benchmark, model, device)
    with (
        use_cores(benchmark.threads),
        steps_bar("benchmark", len(kernels) * (benchmark.rounds + 1), 0) as advance,
    ):
        works = {
            name: partial(repeat_call, kernel.call, benchmark.calls, device)
            for name, kernel in kernels.items()
        }
        rates = take_turns(works, benchmark.rounds, done=lambda name: advance(1, name))
    times = {
        name: [1000 * kernels[name].layers / rate for rate in found]
        for name, found in rates.items()
    }
    ratios = [
        compare("floor", name, floors(kernels, rates, name), times[name])
        for name in kernels
        if name not in (PRODUCT, COPY)
    ]
    data = (
        f"{benchmark.model}, {benchmark.batch} images of {benchmark.size} px, {benchmark.classes} "
        f"classes, bfloat16; {device_name(device)}"
    )
    return report(benchmark, spread_rows(times, "ms/step"), ratios, data, facts, "kernel ")


def repeat_call(call: Callable[[], object], count: int, device: torch.device, _: int) -> int:
    """Call a kernel `count` times, one after the other; return the number."""
    for _ in range(count):
        call()
    synchronize(device)
    return count


def floors(kernels: dict[str, Kernel], rates: dict[str, list[float]], name: str) -> list[float]:
    """Return the least milliseconds that a step's calls of a kernel take, in each round."""
    kernel = kernels[name]
    return [
        1000
        * kernel.layers
        * max(
            kernel.operations / (kernels[PRODUCT].operations * product),
            kernel.bytes / (kernels[COPY].bytes * copy),
        )
        for product, copy in zip(rates[PRODUCT], rates[COPY], strict=True)
    ]


def list_kernels(
    benchmark: KernelBenchmark, model: LVViT, device: torch.device
) -> dict[str, Kernel]:
    """Return the kernels of a step by name, the two that give the rates first."""
    random = partial(torch.randn, device=device, dtype=torch.bfloat16)
    N, P = benchmark.batch, benchmark.size // model.patch_size
    T, block, side = P * P + 1, model.blocks[0], benchmark.side
    one, other = random(side, side), random(side, side)
    found = {
        PRODUCT: Kernel(lambda: one @ other, 1, 2 * side**3, 6 * side**2),
        COPY: Kernel(lambda: one.copy_(other), 1, 0, 4 * side**2),
    }
    layers = {
        "qkv": block.attn.qkv,
        "proj": block.attn.proj,
        "fc1": block.mlp.fc1,
        "fc2": block.mlp.fc2,
    }
    for name, layer in layers.items():
        found |= products(name, N * T, layer, len(model.blocks), random)
    D, hidden = model.embed_dim, block.mlp.fc1.out_features
    found |= products("class head", N, nn.Linear(D, benchmark.classes), 1, random)
    found |= products("token head", N * P * P, nn.Linear(D, benchmark.classes), 1, random)
    heads = block.attn.num_heads
    qkv = random(N, T, 3, heads, D // heads)

    def attend(qkv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(p.transpose(1, 2) for p in qkv.unbind(2)))

    # The backward pass recomputes the weights: five products for the two of the forward pass.
    operations = 4 * N * heads * T * T * (D // heads)
    found |= both("attention", attend, [qkv], len(model.blocks), operations, 2.5 * operations)
    norm = nn.LayerNorm(D, device=device)
    stream = torch.randn(N, T, D, device=device)
    normalize = partial(F.layer_norm, normalized_shape=(D,), eps=norm.eps)
    inputs = [stream, norm.weight.detach(), norm.bias.detach()]
    found |= both(
        "norm in float32",
        lambda x, weight, bias: normalize(x, weight=weight, bias=bias),
        inputs,
        2 * len(model.blocks) + 1,
    )
    found |= both("gelu", F.gelu, [random(N, T, hidden)], len(model.blocks))
    return found | dict(stem_kernels(model, N, benchmark.size, random))


def list_forms(benchmark: KernelBenchmark, model: LVViT, device: torch.device) -> dict[str, Kernel]:
    """Return other forms of a step's kernels, by name: those under test, and what they are beside.

    The first is the weight's gradient as autocast has it. What is plain PyTorch is compiled, which
    a GPU needs, and so is its twin.
    """
    random = partial(torch.randn, device=device, dtype=torch.bfloat16)
    N, block, stem, found = benchmark.batch, model.blocks[0], model.stem, {}
    T, L = (benchmark.size // model.patch_size) ** 2 + 1, len(model.blocks)
    for name, layer in {"fc1": block.mlp.fc1, "fc2": block.mlp.fc2}.items():
        x, grad = random(N * T, layer.in_features), random(N * T, layer.out_features)
        moved = x.nbytes + grad.nbytes + 2 * layer.weight.numel()
        operations = 2 * N * T * layer.weight.numel()
        multiply = partial(torch.mm, grad.T, x)
        found[f"{name}, weight's gradient in 16 bits"] = Kernel(multiply, L, operations, moved)
    if device.type != "cuda":
        return found
    # A backward pass that is timed is repeated, so nothing of it may be overwritten.
    functorch.donated_buffer = False
    heads, D = block.attn.num_heads, model.embed_dim
    qkv = random(N, T, 3, heads, D // heads)
    if packed_attention.can_run(qkv):
        operations = 4 * N * heads * T * T * (D // heads)

        def attend(qkv: Tensor) -> Tensor:
            return packed_attention.forward(qkv, (D // heads) ** -0.5)[0]

        more = operations, 2.5 * operations
        found |= both("packed attention", attend, [qkv], L, *more)
        found |= together("packed attention", attend, qkv, L, sum(more))
    if stem[0].kernel_size == space_to_depth.KERNEL:
        plain = partial(F.conv2d, stride=stem[0].stride, padding=stem[0].padding)
        convolutions = {
            "convolution 0, compiled": (plain, 3),
            "convolution 0 over pairs": (partial(space_to_depth.convolve, bias_O=None), 3),
            "convolution 0 over four channels": (partial(four_channels.convolve, bias_O=None), 4),
        }
        for name, (function, C) in convolutions.items():
            image = random(N, C, benchmark.size, benchmark.size)
            image = image.to(memory_format=torch.channels_last)
            weight = random(stem[0].weight.shape).to(memory_format=torch.channels_last)
            found |= both(name, torch.compile(partial(function, image)), [weight], 1)
    found |= add_norms(N, T, D, 2 * L, random)
    functions = {"gelu": F.gelu, "shared gelu": shared_gelu.SharedGELU()}
    hidden = random(N, T, block.mlp.fc1.out_features)
    if len(stem) > 1:
        norm = nn.BatchNorm2d(stem[1].num_features, device=device)
        joined = copy.deepcopy(norm)
        joined.__class__ = norm_relu.NormReLU
        functions |= {"norm and relu": nn.Sequential(norm, nn.ReLU()), "joined": joined}
        side = benchmark.size // stem[0].stride[0]
        pixels = random(N, norm.num_features, side, side).to(memory_format=torch.channels_last)
    for name, function in functions.items():
        x, layers = (hidden, L) if "gelu" in name else (pixels, len(stem) // 3)
        found |= both(f"{name}, compiled", torch.compile(function), [x], layers)
    return found


def add_norms(
    N: int, T: int, D: int, layers: int, random: Callable[..., Tensor]
) -> dict[str, Kernel]:
    """Return a residual sum and the norm after it, in one kernel each way and compiled."""
    scale = torch.ones(N, device=random.keywords["device"])
    stream, bias, weight, norm_bias = (random(*shape).float() for shape in ((N, T, D), *[(D,)] * 3))
    inputs = [stream, random(N, T, D), bias, weight, norm_bias]

    def joined(x: Tensor, branch: Tensor, bias: Tensor, *norm: Tensor) -> tuple[Tensor, ...]:
        return add_norm.forward(x, branch, scale, bias, *norm, 1e-6)[:2]

    def plain(x: Tensor, branch: Tensor, bias: Tensor, *norm: Tensor) -> tuple[Tensor, ...]:
        # The bias gets its gradient from the sum, as there.
        total = x + (branch + (bias - bias.detach()).to(branch.dtype)) * scale[:, None, None]
        return total, F.layer_norm(total, (D,), *norm, 1e-6).to(branch.dtype)

    found = both("residual sum and norm, compiled", torch.compile(plain), inputs, layers)
    return found | both("residual sum and norm in one", joined, inputs, layers)


def products(
    name: str, R: int, layer: nn.Linear, count: int, random: Callable[..., Tensor]
) -> dict[str, Kernel]:
    """Return the product of a linear layer and those of its two gradients."""
    weight = random(layer.weight.shape)
    x, grad = random(R, layer.in_features), random(R, layer.out_features)
    operations, moved = 2 * R * weight.numel(), x.nbytes + grad.nbytes
    calls = {
        "forward": (lambda: x @ weight.T, weight.nbytes),
        "input's gradient": (lambda: grad @ weight, weight.nbytes),
        # In float32.
        "weight's gradient": (lambda: float32_product(grad.T, x), 2 * weight.nbytes),
    }
    return {
        f"{name}, {what}": Kernel(call, count, operations, moved + more)
        for what, (call, more) in calls.items()
    }


def both(
    name: str,
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    layers: int,
    forward: float = 0,
    backward: float = 0,
) -> dict[str, Kernel]:
    """Return forward and backward pass of a function; `forward`, `backward` are operations."""
    leaves = [tensor.requires_grad_() for tensor in inputs]
    out = function(*leaves)
    outs = (out,) if isinstance(out, Tensor) else out
    grads = [torch.randn_like(tensor) for tensor in outs]
    read, written = (sum(tensor.nbytes for tensor in tensors) for tensors in (leaves, outs))

    @torch.no_grad()
    def run() -> object:
        return function(*leaves)

    def differentiate() -> tuple[Tensor, ...]:
        return torch.autograd.grad(outs, leaves, grads, retain_graph=True)

    return {
        f"{name}, forward": Kernel(run, layers, forward, read + written),
        f"{name}, backward": Kernel(differentiate, layers, backward, 2 * read + written),
    }


def together(
    name: str, function: Callable[[Tensor], Tensor], x: Tensor, layers: int, operations: float
) -> dict[str, Kernel]:
    """Return both passes of a function as one call, for goals of their sum."""
    leaf = x.requires_grad_()
    grad = torch.randn_like(function(leaf))

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(leaf), leaf, grad)

    moved = 3 * leaf.nbytes + 2 * grad.nbytes
    return {f"{name}, both passes": Kernel(run, layers, operations, moved)}


def layer_function(layer: nn.Conv2d, random: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return what a GPU computes in a convolution, as a function of input and weight."""
    if isinstance(layer, PatchProjection):
        return partial(multiply_patches, bias_D=random(layer.out_channels))
    return partial(F.conv2d, stride=layer.stride, padding=layer.padding)


def stem_kernels(
    model: LVViT, N: int, size: int, random: Callable[..., Tensor]
) -> Iterator[tuple[str, Kernel]]:
    """Yield the convolutions and norms of the patch embedding, all layers apart."""
    x = random(N, 3, size, size).to(memory_format=torch.channels_last)
    for number, layer in enumerate(model.stem):
        if isinstance(layer, nn.Conv2d):
            weight = random(layer.weight.shape).to(memory_format=torch.channels_last)
            name, convolve = f"convolution {number}", layer_function(layer, random)
            leaves = x.requires_grad_(), weight.requires_grad_()
            out = convolve(*leaves)
            grad = torch.randn_like(out)
            operations = 2 * out.numel() * weight[0].numel()
            moved = x.nbytes + out.nbytes + weight.nbytes
            yield (
                f"{name}, forward",
                Kernel(torch.no_grad()(partial(convolve, *leaves)), 1, operations, moved),
            )
            # The images have no gradient.
            for of, leaf in [("input", x)] * (number > 0) + [("weight", weight)]:
                gradient = partial(torch.autograd.grad, out, leaf, grad, retain_graph=True)
                yield f"{name}, {of}'s gradient", Kernel(gradient, 1, operations, moved)
            x = out.detach()
        elif isinstance(layer, nn.BatchNorm2d):
            parameters = [p.detach().to(x.device) for p in (layer.weight, layer.bias)]

            def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
                return F.batch_norm(x, None, None, weight, bias, training=True)

            yield from both(f"batch norm {number}", norm, [x, *parameters], 1).items()
            x = x.detach()


if __name__ == "__main__":
    command(main, KernelBenchmark, __doc__)

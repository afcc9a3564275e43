"""Layer-wise relevance propagation of Chefer et al. (arXiv 2012.09838) through a forward pass.

Relevance flows from a class to every attention matrix. A `RelevanceTracer` is a
`TorchFunctionMode`: while it is active, every operation on a tensor that depends on the patches
becomes an autograd function whose backward is the operation's rule. So `torch.autograd.grad` of the
logits gives relevance where it would give gradients, and no model needs code for it. An operation
without a rule is refused by name. captum's LRP has rules of modules alone, and sums and products
inside attention are none.

Published rules: alpha-beta (1, 0) without bias for linear layers; x * dZ/dx * R / Z for products,
both operands halved; sums of branches split by the size of their relevance; softmax, LayerNorm,
GELU and dropout pass relevance on, and so does what LV-ViT divides its branches by. A choice of
tokens passes too, where the published gradient rule gives x / (x + 1e-9) of it.

Ours, for layers that the method does not have: convolutions, means and average pools are linear
layers with their kernels; BatchNorm in evaluation, layer scale and other constant factors pass
relevance on, like the affine part of LayerNorm; products of two tensors follow the rule of products
(a sigmoid passes, so that QuickGELU passes too); entmax passes like softmax; statistics of a
norm that is written out (in cvt.py) are constants.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from densefeed.explain.capture import AttentionTracer, explicit_attention, find_embedding
from densefeed.models.cvt import CvT
from densefeed.models.sparse_attention import SparseAttention
from densefeed.system.errors import UserError

EPS = 1e-9


def divide(a: Tensor, b: Tensor) -> Tensor:
    """Return a / (b + 1e-9), and 0 where that has no value."""
    b = b + torch.where(b == 0, 0, EPS)
    return torch.where(b == 0, 0, a / torch.where(b == 0, 1, b))


class Pass(Function):
    """`compute(x)`, of the shape of x or of one that it broadcasts to; relevance passes."""

    @staticmethod
    def forward(ctx, x: Tensor, compute: Callable) -> Tensor:
        ctx.shape = x.shape
        return compute(x)

    @staticmethod
    def backward(ctx, R: Tensor) -> tuple[Tensor, None]:
        return R.sum_to_size(ctx.shape), None


class AlphaBeta(Function):
    """A linear map of x: positive contributions share the relevance of what they contribute to.

    `compute(x)` is its value with bias, `run(x, weight)` its value without, for any weight.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, compute: Callable, run: Callable) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.run = run
        return compute(x)

    @staticmethod
    def backward(ctx, R: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            parts = [x.clamp(min=0).requires_grad_(), x.clamp(max=0).requires_grad_()]
            weights = weight.clamp(min=0), weight.clamp(max=0)
            Z = sum(ctx.run(part, w) for part, w in zip(parts, weights, strict=True))
        shares = torch.autograd.grad(Z, parts, divide(R, Z.detach()))
        return sum(p.detach() * s for p, s in zip(parts, shares, strict=True)), None, None, None


class Product(Function):
    """`run(a, b)`, linear in both: each gets half of x * dZ/dx * R / Z."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, run: Callable) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.run = run
        return run(a, b)

    @staticmethod
    def backward(ctx, R: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            Z = ctx.run(a, b)
        slopes = torch.autograd.grad(Z, (a, b), divide(R, Z.detach()))
        return *(x.detach() * slope / 2 for x, slope in zip((a, b), slopes, strict=True)), None


class Add(Function):
    """a + b of one shape `[N, ...]`: an image's relevance in proportion to that of its branches."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a + b

    @staticmethod
    def backward(ctx, R: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        per_element = divide(R, a + b)
        parts = a * per_element, b * per_element
        sums = [image_sums(part) for part in parts]
        total = sums[0].abs() + sums[1].abs()
        whole = image_sums(R)
        return tuple(
            part * divide(divide(own.abs(), total) * whole, own)
            for part, own in zip(parts, sums, strict=True)
        )


def image_sums(x: Tensor) -> Tensor:
    """Sum all but the first dimension, which remain with size 1."""
    return x.sum(tuple(range(1, x.ndim)), keepdim=True)


# ---------------------------------------------------------- rules of torch's functions, by name


def is_traced(value: Any) -> bool:
    """Return whether a tensor, or one in a list, depends on the patches.

    Everything else is computed without gradients, except for the parameters themselves.
    """
    if isinstance(value, list | tuple):
        return any(map(is_traced, value))
    return isinstance(value, Tensor) and value.requires_grad and not isinstance(value, nn.Parameter)


def pass_on(func: Callable, args: tuple, kwargs: dict) -> Tensor | None:
    """Pass relevance to the only operand that depends on the patches."""
    (place, *more) = [place for place, value in enumerate(args) if is_traced(value)] or [None]
    if place is None or more or any(map(is_traced, kwargs.values())):
        return None
    return Pass.apply(args[place], lambda x: func(*args[:place], x, *args[place + 1 :], **kwargs))


def pass_first(func: Callable, args: tuple, kwargs: dict) -> Tensor | None:
    """Pass relevance to the first operand, from which or by which a constant is taken."""
    return pass_on(func, args, kwargs) if is_traced(args[0]) else None


def add(func: Callable, args: tuple, kwargs: dict) -> Tensor | None:
    """Split relevance between two branches; a constant, like a bias, gets none."""
    if kwargs:
        return None
    if all(map(is_traced, args)):
        return Add.apply(*args) if args[0].shape == args[1].shape else None
    return pass_on(func, args, kwargs)


def multiply(func: Callable, args: tuple, kwargs: dict) -> Tensor | None:
    """Halve relevance between two operands; a constant factor gets none."""
    return Product.apply(*args, func) if all(map(is_traced, args)) else pass_on(func, args, kwargs)


def matmul(func: Callable, args: tuple, kwargs: dict) -> Tensor | None:
    """Halve relevance between two operands."""
    return Product.apply(*args, func) if all(map(is_traced, args)) else None


def linear(func: Callable, args: tuple, kwargs: dict) -> Tensor | None:
    """Apply the rule of linear maps to `F.linear` or `F.conv2d`, whose third argument is a bias."""
    # timm's BEiT gives weight and bias by name.
    weight = kwargs["weight"] if "weight" in kwargs else args[1]
    if is_traced(weight):
        return None
    more, options = args[3:], {k: v for k, v in kwargs.items() if k not in ("weight", "bias")}

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return func(x, weight, None, *more, **options)

    return AlphaBeta.apply(args[0], weight, lambda x: func(x, *args[1:], **kwargs), run)


def average(func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """Apply the rule of linear maps to a mean or an average pool."""

    def run(x: Tensor, factor: Tensor) -> Tensor:
        return factor * func(x, *args[1:], **kwargs)

    one = args[0].new_ones(())
    return AlphaBeta.apply(args[0], one, lambda x: run(x, one), run)


def rearrange(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Do what autograd does: relevance follows the elements."""
    return func(*args, **kwargs)


def constant(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Compute statistics, which get no relevance."""
    with torch.no_grad():
        return func(*args, **kwargs)


PASSING = "softmax layer_norm group_norm batch_norm gelu sigmoid dropout masked_fill"
# `__get__` is that of attributes such as mT and shape.
REARRANGING = (
    "reshape view view_as permute transpose flatten unflatten unbind chunk split cat expand "
    "contiguous squeeze unsqueeze to __getitem__ __get__ dim size"
)
RULES: dict[str, Callable] = {
    **dict.fromkeys(PASSING.split(), pass_first),
    **dict.fromkeys(REARRANGING.split(), rearrange),
    **dict.fromkeys(("div", "sub"), pass_first),
    **dict.fromkeys(("linear", "conv2d"), linear),
    **dict.fromkeys(("mean", "avg_pool2d"), average),
    **{"add": add, "mul": multiply, "matmul": matmul, "var_mean": constant},
}


class RelevanceTracer(AttentionTracer):
    """Records attention matrices in a graph whose gradients are relevance.

    The forward pass must run without gradients: the rules alone build the graph, from the patches
    on. Of CvT only the last stage, whose patches are those of its classifier.
    """

    scores: Tensor | None = None  # of a sparse layer, before entmax

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_traced(args) and not is_traced(list(kwargs.values())):
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            with self:
                return explicit_attention(*args, **kwargs)
        name = getattr(func, "__name__", "")
        with torch.enable_grad():
            result = RULES[name](func, args, kwargs) if name in RULES else None
        if result is None and name != "__get__":
            raise UserError(
                f"{type(self.model).__name__} computes {name or func} where there is no rule of "
                "relevance for it; choose rollout or gradient x attention"
            )
        if self.running and name == "softmax":
            self.record(result)
        sparse = self.running and isinstance(self.running[-1][1], SparseAttention)
        if name == "matmul" and self.scores is None and sparse:
            # No mode sees the autograd function of entmax, so it gets scores without a graph.
            self.scores = result
            return result.detach()
        return result

    def add_hooks(self) -> Iterator[torch.utils.hooks.RemovableHandle]:
        """Add the hooks one by one, also where tracing begins."""
        yield from super().add_hooks()
        model = self.model
        begin = model.stages[-1].patch_embed if isinstance(model, CvT) else find_embedding(model)
        yield begin.register_forward_hook(self.begin_trace)

    def begin_trace(self, embedding: nn.Module, args: tuple, output: Any) -> Any:
        if isinstance(output, tuple):
            return output[0].detach().requires_grad_(), *output[1:]
        return output.detach().requires_grad_()

    def record_sparse(self, dropout: nn.Module, args: tuple) -> tuple[Tensor]:
        with torch.enable_grad():
            weights = Pass.apply(self.scores, lambda _: args[0].clone())
        return (self.record(weights),)

    def leave_layer(self, layer: nn.Module, args: tuple, output: Any) -> None:
        super().leave_layer(layer, args, output)
        self.scores = None

"""Layers in NumPy, each with its derivative and its relevance rule written out by hand.

A `Node` is one array of one image. `backward` gives every node that an output depends on its
gradient, or its relevance by the rules of Chefer et al. (arXiv 2012.09838).
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

Array = np.ndarray
Rule = Literal["gradient", "relevance"]


class Node:
    """An array, the nodes that it is computed from, and how results return to these."""

    def __init__(
        self,
        value: Array,
        inputs: Sequence["Node"] = (),
        gradient: Callable | None = None,
        relevance: Callable | None = None,
    ) -> None:
        self.value, self.inputs = value, inputs
        self.rules = {"gradient": gradient, "relevance": relevance or gradient}
        self.result: Array | None = None


def backward(output: Node, seed: Array, rule: Rule) -> None:
    """Set `result` of every node to its gradient or relevance, for `seed` at the output."""
    order, seen = [], set()

    def visit(node: Node) -> None:
        if id(node) not in seen:
            seen.add(id(node))
            for parent in node.inputs:
                visit(parent)
            order.append(node)

    visit(output)
    for node in order:
        node.result = np.zeros_like(node.value)
    output.result = seed
    for node in reversed(order):
        if node.inputs:
            for parent, part in zip(node.inputs, node.rules[rule](node.result), strict=True):
                parent.result = parent.result + part


def divide(a: Array, b: Array) -> Array:
    """Return a / (b + 1e-9), and 0 where b is 0."""
    return np.where(b == 0, 0, a / np.where(b == 0, 1, b + 1e-9))


def keep(R: Array) -> tuple[Array]:
    return (R,)


def signs(x: Array) -> tuple[Array, Array]:
    return np.maximum(x, 0), np.minimum(x, 0)


def dense(x: Node, w: dict, name: str) -> Node:
    weight, bias = w[f"{name}.weight"], w.get(f"{name}.bias", 0)
    weight = weight.reshape(weight.shape[:2])

    def relevance(R: Array) -> tuple[Array]:
        (px, nx), (pw, nw) = signs(x.value), signs(weight)
        S = divide(R, px @ pw.T + nx @ nw.T)
        return (px * (S @ pw) + nx * (S @ nw),)

    return Node(x.value @ weight.T + bias, [x], lambda g: (g @ weight,), relevance)


def layer_norm(x: Node, w: dict, name: str, eps: float) -> Node:
    centered = x.value - x.value.mean(-1, keepdims=True)
    deviation = np.sqrt((centered**2).mean(-1, keepdims=True) + eps)
    normed = centered / deviation

    def gradient(g: Array) -> tuple[Array]:
        g = g * w[f"{name}.weight"]
        along = (g * normed).mean(-1, keepdims=True)
        return ((g - g.mean(-1, keepdims=True) - normed * along) / deviation,)

    return Node(normed * w[f"{name}.weight"] + w[f"{name}.bias"], [x], gradient, keep)


erf = np.vectorize(math.erf)


def gelu(x: Node) -> Node:
    phi = (1 + erf(x.value / math.sqrt(2))) / 2
    slope = phi + x.value * np.exp(-(x.value**2) / 2) / math.sqrt(2 * math.pi)
    return Node(x.value * phi, [x], lambda g: (g * slope,), keep)


def quick_gelu(x: Node) -> Node:
    gate = 1 / (1 + np.exp(-1.702 * x.value))
    slope = gate + 1.702 * x.value * gate * (1 - gate)
    return Node(x.value * gate, [x], lambda g: (g * slope,), keep)


def softmax(x: Node) -> Node:
    p = np.exp(x.value - x.value.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return Node(p, [x], lambda g: (p * (g - (g * p).sum(-1, keepdims=True)),), keep)


def add(a: Node, b: Node) -> Node:
    """Add branches of one shape: relevance in proportion to the branches' sums."""

    def relevance(R: Array) -> tuple[Array, Array]:
        S = divide(R, a.value + b.value)
        parts = a.value * S, b.value * S
        sizes = [abs(part.sum()) for part in parts]
        shares = [divide(size, sum(sizes)) * R.sum() for size in sizes]
        return tuple(p * divide(s, p.sum()) for p, s in zip(parts, shares, strict=True))

    return Node(a.value + b.value, [a, b], lambda g: (g, g), relevance)


def shift(x: Node, constant: Array) -> Node:
    return Node(x.value + constant, [x], keep)


def scale(x: Node, factor: Array | float) -> Node:
    return Node(x.value * factor, [x], lambda g: (g * factor,), keep)


def matmul(a: Node, b: Node) -> Node:
    x, y = a.value, b.value

    def gradient(g: Array) -> tuple[Array, Array]:
        return g @ y.swapaxes(-1, -2), x.swapaxes(-1, -2) @ g

    def relevance(R: Array) -> tuple[Array, Array]:
        first, second = gradient(divide(R, x @ y))
        return x * first / 2, y * second / 2

    return Node(x @ y, [a, b], gradient, relevance)


def times(a: Node, b: Node) -> Node:
    x, y = a.value, b.value
    return Node(
        x * y,
        [a, b],
        lambda g: (g * y, g * x),
        lambda R: (x * y * divide(R, x * y) / 2, x * y * divide(R, x * y) / 2),
    )


def arrange(x: Node, there: Callable, back: Callable) -> Node:
    """Apply a rearrangement, with its inverse."""
    return Node(there(x.value), [x], lambda g: (back(g),))


def take(x: Node, start: int, stop: int) -> Node:
    """Take rows of `[T, D]`."""

    def gradient(g: Array) -> tuple[Array]:
        whole = np.zeros_like(x.value)
        whole[start:stop] = g
        return (whole,)

    return Node(x.value[start:stop], [x], gradient)


def concat(*parts: Node) -> Node:
    """Concatenate rows."""
    ends = np.cumsum([len(part.value) for part in parts])[:-1]
    value = np.concatenate([part.value for part in parts])
    return Node(value, parts, lambda g: np.split(g, ends))


def mean(x: Node) -> Node:
    """Return the mean of rows as one row: for relevance a linear layer of equal weights."""
    T = len(x.value)
    positive = np.maximum(x.value, 0)

    def relevance(R: Array) -> tuple[Array]:
        return (positive / T * divide(R, positive.mean(0, keepdims=True)),)

    return Node(x.value.mean(0, keepdims=True), [x], lambda g: (np.repeat(g, T, 0) / T,), relevance)


def convolve(x: Array, kernel: Array, stride: int, padding: int, groups: int = 1) -> Array:
    """Convolve `[C, H, W]`."""
    x = np.pad(x, ((0, 0), (padding, padding), (padding, padding)))
    side = kernel.shape[-1]
    read = np.lib.stride_tricks.sliding_window_view(x, (side, side), (1, 2))[:, ::stride, ::stride]
    if groups > 1:
        return np.einsum("crsuv,cuv->crs", read, kernel[:, 0])
    return np.einsum("crsuv,ocuv->ors", read, kernel)


def depthwise(x: Node, w: dict, name: str, stride: int = 1) -> Node:
    """Convolve `[C, R, S]` with a 3 x 3 kernel per channel, padded by 1."""
    kernel, bias = w[f"{name}.weight"], w.get(f"{name}.bias", np.zeros(1))
    C, R_, S_ = x.value.shape

    def run(x: Array, kernel: Array) -> Array:
        return convolve(x, kernel, stride, 1, C)

    def transposed(g: Array, kernel: Array) -> Array:
        out = np.zeros((C, R_ + 2, S_ + 2))
        for u in range(3):
            for v in range(3):
                rows, columns = (
                    slice(p, p + stride * n, stride) for p, n in ((u, g.shape[1]), (v, g.shape[2]))
                )
                out[:, rows, columns] += g * kernel[:, 0, u, v, None, None]
        return out[:, 1:-1, 1:-1]

    def relevance(R: Array) -> tuple[Array]:
        (px, nx), (pk, nk) = signs(x.value), signs(kernel)
        S = divide(R, run(px, pk) + run(nx, nk))
        return (px * transposed(S, pk) + nx * transposed(S, nk),)

    value = run(x.value, kernel) + bias[:, None, None]
    return Node(value, [x], lambda g: (transposed(g, kernel),), relevance)


def batch_norm(x: Node, w: dict, name: str, eps: float = 1e-5) -> Node:
    """Apply running statistics to `[C, R, S]`."""
    one = (-1, 1, 1)
    factor = w[f"{name}.weight"] / np.sqrt(w[f"{name}.running_var"] + eps)
    constant = w[f"{name}.bias"] - w[f"{name}.running_mean"] * factor
    return shift(scale(x, factor.reshape(one)), constant.reshape(one))


def to_map(x: Node, grid: tuple[int, int]) -> Node:
    return arrange(x, lambda v: v.T.reshape(-1, *grid), lambda g: g.reshape(len(g), -1).T)


def to_tokens(x: Node) -> Node:
    shape = x.value.shape
    return arrange(x, lambda v: v.reshape(len(v), -1).T, lambda g: g.T.reshape(shape))


def split_heads(x: Node, heads: int) -> Node:
    """`[T, D]` to `[M, T, E]`."""
    return arrange(
        x,
        lambda v: v.reshape(len(v), heads, -1).swapaxes(0, 1),
        lambda g: g.swapaxes(0, 1).reshape(g.shape[1], -1),
    )


def join_heads(x: Node, heads: int) -> Node:
    return arrange(
        x,
        lambda v: v.swapaxes(0, 1).reshape(v.shape[1], -1),
        lambda g: g.reshape(len(g), heads, -1).swapaxes(0, 1),
    )


def flip(x: Node) -> Node:
    """Transpose the last two dimensions."""
    return arrange(x, lambda v: v.swapaxes(-1, -2), lambda g: g.swapaxes(-1, -2))


def columns(x: Node, start: int, stop: int) -> Node:
    """Take columns of `[T, D]`."""
    return flip(take(flip(x), start, stop))

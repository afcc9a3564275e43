"""Two-block models of each family written out in NumPy, for one image, from their state dicts.

Each function returns the logits `[1, K]` and the attention matrices `[M, Q, K]`, all of them nodes.
"""

import math
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from .numpy_graph import (
    Array,
    Node,
    add,
    arrange,
    batch_norm,
    columns,
    concat,
    convolve,
    dense,
    depthwise,
    flip,
    gelu,
    join_heads,
    layer_norm,
    matmul,
    mean,
    quick_gelu,
    scale,
    shift,
    softmax,
    split_heads,
    take,
    times,
    to_map,
    to_tokens,
)

Output = tuple[Node, list[Node]]


def attend(
    q: Node, k: Node, v: Node, heads: int, factor: float, normalize: Callable = softmax
) -> tuple[Node, Node]:
    """Return attention's output `[T, D]` and its matrix."""
    q, k, v = (split_heads(x, heads) for x in (q, k, v))
    weights = normalize(scale(matmul(q, flip(k)), factor))
    return join_heads(matmul(weights, v), heads), weights


def self_attention(
    x: Node, w: dict, name: str, heads: int, normalize: Callable = softmax
) -> tuple[Node, Node]:
    D = x.value.shape[1]
    qkv = dense(x, w, f"{name}.qkv")
    q, k, v = (columns(qkv, part * D, (part + 1) * D) for part in range(3))
    out, weights = attend(q, k, v, heads, (D / heads) ** -0.5, normalize)
    return dense(out, w, f"{name}.proj"), weights


def mlp(x: Node, w: dict, name: str, activation=gelu) -> Node:
    return dense(activation(dense(x, w, f"{name}.fc1")), w, f"{name}.fc2")


def with_class_token(w: dict, patches: Array) -> Node:
    """The input of the first block, from patches `[D, R, C]`."""
    tokens = np.concatenate([w["cls_token"][0], patches.reshape(len(patches), -1).T])
    return Node(tokens + w.get("pos_embed", np.zeros((1, 1, 1)))[0])


def vit(
    x: Node,
    w: dict,
    heads: int,
    eps: float,
    divisor: float = 1.0,
    normalize: Sequence[Callable] = (softmax, softmax),
) -> Output:
    """The blocks of ViT, LV-ViT and T2T-ViT, and the class token's classifier."""
    matrices = []
    for number in range(2):
        name = f"blocks.{number}"
        normed = layer_norm(x, w, f"{name}.norm1", eps)
        branch, weights = self_attention(normed, w, f"{name}.attn", heads, normalize[number])
        x = add(x, scale_branch(branch, divisor))
        branch = mlp(layer_norm(x, w, f"{name}.norm2", eps), w, f"{name}.mlp")
        x = add(x, scale_branch(branch, divisor))
        matrices.append(weights)
    return dense(take(layer_norm(x, w, "norm", eps), 0, 1), w, "head"), matrices


def scale_branch(x: Node, divisor: float) -> Node:
    """Divide; relevance passes."""
    return Node(x.value / divisor, [x], lambda g: (g / divisor,), lambda R: (R,))


def affine(x: Array, w: dict, name: str) -> Array:
    factor = w[f"{name}.weight"] / np.sqrt(w[f"{name}.running_var"] + 1e-5)
    return (x - w[f"{name}.running_mean"][:, None, None]) * factor[:, None, None] + w[
        f"{name}.bias"
    ][:, None, None]


def vit_patches(image: Array, w: dict) -> Array:
    kernel = w["patch_embed.proj.weight"]
    return convolve(image, kernel, kernel.shape[-1], 0) + w["patch_embed.proj.bias"][:, None, None]


def lvvit_patches(image: Array, w: dict) -> Array:
    for number, (stride, padding) in enumerate([(2, 3), (1, 1), (1, 1)]):
        image = convolve(image, w[f"stem.{3 * number}.weight"], stride, padding)
        image = np.maximum(affine(image, w, f"stem.{3 * number + 1}"), 0)
    kernel = w["stem.9.weight"]
    return convolve(image, kernel, kernel.shape[-1], 0) + w["stem.9.bias"][:, None, None]


def dhvt_patches(image: Array, w: dict) -> Array:
    """SOPE of patch size 4: affine, conv, norm, GELU, conv, norm, affine."""
    image = image * w["embedding.0.alpha"][0] + w["embedding.0.beta"][0]
    image = affine(convolve(image, w["embedding.1.weight"], 2, 1), w, "embedding.2")
    image = gelu(Node(image)).value
    image = affine(convolve(image, w["embedding.4.weight"], 2, 1), w, "embedding.5")
    return image * w["embedding.6.alpha"][0] + w["embedding.6.beta"][0]


def daff(x: Node, w: dict, name: str, grid: tuple[int, int]) -> Node:
    def conv1x1(m: Node, layer: str) -> Node:
        tokens = dense(to_tokens(m), w, f"{name}.{layer}")
        return to_map(tokens, grid)

    cls, m = take(x, 0, 1), to_map(take(x, 1, len(x.value)), grid)
    m = gelu(batch_norm(conv1x1(m, "conv1"), w, f"{name}.norm1"))
    local = gelu(batch_norm(depthwise(m, w, f"{name}.conv2"), w, f"{name}.norm2"))
    m = batch_norm(conv1x1(add(m, local), "conv3"), w, f"{name}.norm3")
    patches, name = to_tokens(m), f"{name}.aggregation"
    factor = dense(gelu(dense(mean(patches), w, f"{name}.compress")), w, f"{name}.excite")
    return concat(times(cls, factor), patches)


def head_tokens(x: Node, w: dict, name: str, heads: int) -> Node:
    D = x.value.shape[1]
    rows = split_heads(mean(x), heads)
    # [M, 1, E] to [M, D], and each row to M parts of width E, normalized one by one.
    rows = Node(rows.value[:, 0], [rows], lambda g: (g[:, None],))
    rows = dense(rows, w, f"{name}.head_proj")
    shape = (heads * heads, D // heads)
    parts = Node(rows.value.reshape(shape), [rows], lambda g: (g.reshape(heads, D),))
    parts = gelu(layer_norm(parts, w, f"{name}.head_norm", 1e-5))
    rows = Node(parts.value.reshape(heads, D), [parts], lambda g: (g.reshape(shape),))
    return shift(rows, w[f"{name}.head_pos"][0])


def dhvt(x: Node, w: dict, heads: int, grid: tuple[int, int]) -> Output:
    matrices, T = [], len(x.value)
    for number in range(2):
        name = f"blocks.{number}"
        z = layer_norm(x, w, f"{name}.norm1", 1e-6)
        joined = concat(z, head_tokens(z, w, f"{name}.attn", heads))
        out, weights = self_attention(joined, w, f"{name}.attn.attn", heads)
        cls = add(take(out, 0, 1), mean(take(out, T, T + heads)))
        x = add(x, concat(cls, take(out, 1, T)))
        z = layer_norm(x, w, f"{name}.norm2", 1e-6)
        x = add(x, daff(z, w, f"{name}.feed_forward", grid))
        matrices.append(weights)
    return dense(take(layer_norm(x, w, "norm", 1e-6), 0, 1), w, "head"), matrices


def performer(x: Array, w: dict, name: str) -> Array:
    """A block of T2T's token module; its attention has no matrix."""
    k, q, v = np.split(
        dense(layer_norm(Node(x), w, f"{name}.norm1", 1e-5), w, f"{name}.kqv").value, 3, -1
    )
    features = w[f"{name}.w"]

    def positive(x: Array) -> Array:
        return np.exp(x @ features.T - (x**2).sum(-1, keepdims=True) / 2) / math.sqrt(len(features))

    k, q = positive(k), positive(q)
    out = (q @ k.T @ v) / (q @ k.sum(0)[:, None] + 1e-8)
    x = v + dense(Node(out), w, f"{name}.proj").value
    hidden = gelu(dense(layer_norm(Node(x), w, f"{name}.norm2", 1e-5), w, f"{name}.mlp.0"))
    return x + dense(hidden, w, f"{name}.mlp.2").value


def t2t_patches(image: Array, w: dict) -> Array:
    for number, (side, stride, padding) in enumerate([(7, 4, 2), (3, 2, 1), (3, 2, 1)]):
        image = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
        read = np.lib.stride_tricks.sliding_window_view(image, (side, side), (1, 2))
        read = read[:, ::stride, ::stride]
        grid = read.shape[1:3]
        tokens = read.transpose(1, 2, 0, 3, 4).reshape(math.prod(grid), -1)
        if number < 2:
            tokens = performer(tokens, w, f"tokens_to_token.attention{number + 1}")
        else:
            tokens = dense(Node(tokens), w, "tokens_to_token.project").value
        image = tokens.T.reshape(-1, *grid)
    return image


def cvt(image: Array, w: dict, depths: tuple[int, ...], heads: tuple[int, ...]) -> Output:
    """CvT of its authors, with a class token in the last stage."""
    matrices, m = [], image
    for stage, (stride, padding) in enumerate([(4, 2), (2, 1), (2, 1)]):
        prefix = f"stages.{stage}"
        m = convolve(m, w[f"{prefix}.patch_embed.proj.weight"], stride, padding)
        m += w[f"{prefix}.patch_embed.proj.bias"][:, None, None]
        grid = m.shape[1:]
        x = Node(m.reshape(len(m), -1).T)
        x = layer_norm(x, w, f"{prefix}.patch_embed.norm", 1e-5)
        cls = 1 if stage == 2 else 0
        if cls:
            x = concat(Node(w[f"{prefix}.cls_token"][0]), x)
        for block in range(depths[stage]):
            x, weights = cvt_block(x, w, f"{prefix}.blocks.{block}", heads[stage], grid, cls)
            matrices.append(weights)
        m = to_map(take(x, cls, len(x.value)), grid).value
    return dense(take(layer_norm(x, w, "norm", 1e-5), 0, 1), w, "head"), matrices


def cvt_block(
    x: Node, w: dict, name: str, heads: int, grid: tuple[int, int], cls: int
) -> tuple[Node, Node]:
    z = layer_norm(x, w, f"{name}.norm1", 1e-5)
    m = to_map(take(z, cls, len(z.value)), grid)

    def project(letter: str, stride: int) -> Node:
        conv = f"{name}.attn.conv_proj_{letter}"
        out = to_tokens(batch_norm(depthwise(m, w, f"{conv}.conv", stride), w, f"{conv}.bn"))
        joined = concat(take(z, 0, cls), out) if cls else out
        return dense(joined, w, f"{name}.attn.proj_{letter}")

    parts = project("q", 1), project("k", 2), project("v", 2)
    out, weights = attend(*parts, heads, x.value.shape[1] ** -0.5)
    x = add(x, dense(out, w, f"{name}.attn.proj"))
    z = layer_norm(x, w, f"{name}.norm2", 1e-5)
    return add(x, mlp(z, w, f"{name}.mlp", quick_gelu)), weights


def swin(image: Array, w: dict, heads: int, side: int) -> Output:
    """One stage of timm's Swin of two blocks, the second with shifted windows of `side` patches.

    Its matrices are those of all windows, `[W, M, Q, K]`, row by row.
    """
    m = vit_patches(image, w)
    grid, matrices = m.shape[1:], []
    x = layer_norm(Node(m.reshape(len(m), -1).T), w, "patch_embed.norm", 1e-5)
    for number in range(2):
        name = f"layers.0.blocks.{number}"
        z = layer_norm(x, w, f"{name}.norm1", 1e-5)
        out, weights = window_attention(z, w, f"{name}.attn", heads, grid, side, number)
        x = add(x, out)
        x = add(x, mlp(layer_norm(x, w, f"{name}.norm2", 1e-5), w, f"{name}.mlp"))
        matrices.append(weights)
    return dense(mean(layer_norm(x, w, "norm", 1e-5)), w, "head.fc"), matrices


def window_attention(
    x: Node, w: dict, name: str, heads: int, grid: tuple[int, int], side: int, shift_by: int
) -> tuple[Node, Node]:
    (R, C), D = grid, x.value.shape[1]
    # Patches by window, and whether they have come around an edge of the map.
    places, around = [], []
    for top, left in product(range(0, R, side), range(0, C, side)):
        for r, c in product(range(top, top + side), range(left, left + side)):
            r, c = r + shift_by, c + shift_by
            places.append(r % R * C + c % C)
            around.append((r >= R, c >= C))
    back = np.argsort(places)
    x = arrange(x, lambda v: v[places], lambda g: g[back])
    qkv = dense(x, w, f"{name}.qkv")
    shape = (len(places) // side**2, side**2, heads, D // heads)
    q, k, v = (
        arrange(
            columns(qkv, part * D, (part + 1) * D),
            lambda v: v.reshape(shape).swapaxes(1, 2),
            lambda g: g.swapaxes(1, 2).reshape(-1, D),
        )
        for part in range(3)
    )
    scores = scale(matmul(q, flip(k)), (D / heads) ** -0.5)
    table, tokens = w[f"{name}.relative_position_bias_table"], list(np.ndindex(side, side))
    bias = np.zeros((heads, side**2, side**2))
    for (i, (r, c)), (j, (s, d)) in product(enumerate(tokens), repeat=2):
        bias[:, i, j] = table[(r - s + side - 1) * (2 * side - 1) + c - d + side - 1]
    region = np.array(around).reshape(len(scores.value), side**2, 2)
    # Patches from opposite edges do not see each other.
    apart = (region[:, :, None] != region[:, None]).any(-1)
    weights = softmax(shift(scores, bias - 100.0 * apart[:, None]))
    out = arrange(
        matmul(weights, v),
        lambda v: v.swapaxes(1, 2).reshape(-1, D),
        lambda g: g.reshape(shape).swapaxes(1, 2),
    )
    out = dense(out, w, f"{name}.proj")
    return arrange(out, lambda v: v[back], lambda g: g[places]), weights

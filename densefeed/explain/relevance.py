"""Maps of a class: relevance (arXiv 2012.09838), and rollout and gradient x attention beside it.

Relevance is the method of Token Labeling's supplementary Figures 1 and 2. The cheaper two are
attention rollout (arXiv 2005.00928), which no class changes, and the last layer's attention times
its gradient.
"""

import torch
from torch import Tensor, nn

from densefeed.explain.attention_maps import reading_row
from densefeed.explain.capture import (
    WINDOWED,
    AttentionMatrix,
    TokenLayout,
    attention_layers,
    capture_attention,
    choose_layers,
    find_attention,
)
from densefeed.explain.rules import RelevanceTracer
from densefeed.models.cvt import CvT
from densefeed.models.token_transformer import TokenTransformer
from densefeed.system.errors import UserError

# N images   J classes asked for   L classes of the model   M heads   Q queries   K keys
# T tokens: class token and patches   R x C a grid, rows and columns


def class_logits(model: nn.Module, image_NCHW: Tensor) -> Tensor:
    """Return the logits `[N, L]` that are explained: of a token head's model the class token's.

    Those of LV-ViT's evaluation add half of the maximum over its tokens.
    """
    if not isinstance(model, TokenTransformer):
        return model(image_NCHW)
    return model.head(model.forward_head(model.forward_features(image_NCHW), pre_logits=True))


def class_relevance(model: nn.Module, image_NCHW: Tensor, target_NJ: Tensor) -> Tensor:
    """Return the relevance of patches for classes, `[N, J, R, C]`, at least 0.

    C_l is the mean over heads of the positive part of gradient times relevance of layer l's
    attention; the map is the class token's row of (I + C_L) ... (I + C_1), without normalization
    of rows. `densefeed.explain.rules` lists the rules and which of them are ours. Ours are also:
    the mean of the patches' rows where the classifier reads their mean; `square` for DHVT's head
    tokens and CvT's keys; of CvT the last stage alone, since patches of other stages are others.

    Two forward passes, and for each class a backward pass of both: of an LV-ViT-S at 224 pixels the
    relevance of two classes takes 12 times a forward pass. The rule of sums divides by differences
    of branches, which amplifies rounding: of an untrained LV-ViT-S, float32 and float64 maps
    correlate at 0.999 and differ by up to 16 % at a patch.

    Args:
        model: in evaluation mode, float32 or float64.
        image_NCHW: one batch; each image is explained independently of the others. The graph of
            LV-ViT-S at 224 pixels takes 0.3 GB an image.
        target_NJ: int64 classes, J of each image, as `logits_NL.topk(2).indices`.

    Raises UserError, naming the model, for one without attention or with an operation that has no
    rule, such as Swin's windows, or in training mode.
    """
    layers = relevance_layers(model)
    check_target(model, image_NCHW, target_NJ)
    with capture_attention(model, layers) as captured, torch.enable_grad():
        logits_NL = class_logits(model, image_NCHW)
    tracer = RelevanceTracer(model, choose_layers(model, layers))
    with torch.no_grad(), tracer.hooked(), tracer:
        traced_NL = class_logits(model, image_NCHW)
    maps = []
    for target_N in target_NJ.T:
        gradients = differentiate(logits_NL, captured, target_N)
        relevances = differentiate(traced_NL, tracer.records, target_N)
        matrices = [
            (gradient * relevance).clamp(min=0).mean(1)
            for gradient, relevance in zip(gradients, relevances, strict=True)
        ]
        maps.append(multiply_out(matrices, [record.layout for record in captured], 1.0))
    return torch.stack(maps, 1)


def attention_rollout(captured: list[AttentionMatrix]) -> Tensor:
    """Return the product over layers of (I + mean over heads) / 2, as a map `[N, R, C]`.

    The row is that of `class_relevance`. Of a pyramid the last stage's layers count. Raises
    UserError for windows, between which no product is defined.
    """
    layouts = [record.layout for record in captured]
    if any(layout.windows for layout in layouts):
        raise UserError(
            f"{captured[0].layer} attends within windows, for which rollout is not defined; choose "
            "gradient x attention"
        )
    last = [n for n, layout in enumerate(layouts) if layout == layouts[-1]]
    matrices = [captured[n].weights.detach().mean(1) for n in last]
    return multiply_out(matrices, [layouts[n] for n in last], 0.5)


def gradient_attention(model: nn.Module, image_NCHW: Tensor, target_NJ: Tensor) -> Tensor:
    """Return the last layer's attention times its gradient, positive part, `[N, J, R, C]`.

    Mean over heads and the row of what the classifier reads; of Swin each patch has the mean over
    its window. CvT's map has the grid of its keys. Arguments and errors are those of
    `class_relevance`, but every model with attention has this map.
    """
    check_target(model, image_NCHW, target_NJ)
    with capture_attention(model, attention_layers(model)[-1:]) as captured, torch.enable_grad():
        logits_NL = class_logits(model, image_NCHW)
    (record,) = captured
    row_Q = reading_row(record.layout, record.weights.detach())
    maps = []
    for target_N in target_NJ.T:
        (gradient,) = differentiate(logits_NL, captured, target_N)
        matrix_NQK = (gradient * record.weights.detach()).clamp(min=0).mean(1)
        maps.append(record.layout.key_map(row_Q @ matrix_NQK))
    return torch.stack(maps, 1)


def relevance_layers(model: nn.Module) -> list[str]:
    """Return the layers whose matrices are multiplied. Raises UserError."""
    layers = find_attention(model)
    if any(isinstance(layer, WINDOWED) for layer in layers.values()):
        raise UserError(
            f"{type(model).__name__} attends within windows, between which relevance is not "
            "defined; choose gradient x attention"
        )
    stage = f"stages.{len(model.stages) - 1}." if isinstance(model, CvT) else ""
    return [name for name in layers if name.startswith(stage)]


def check_target(model: nn.Module, image_NCHW: Tensor, target_NJ: Tensor) -> None:
    """Raise UserError for a model in training or without classes, or other classes than its own."""
    name, classes = type(model).__name__, getattr(model, "num_classes", 0)
    if model.training:
        raise UserError(f"{name} is in training mode; call eval() before explaining it")
    if not classes:
        raise UserError(f"{name} has no classifier; build it with num_classes")
    if target_NJ.ndim != 2 or len(target_NJ) != len(image_NCHW):
        raise UserError(
            f"classes of shape {list(target_NJ.shape)} must have a row for each of "
            f"{len(image_NCHW)} images"
        )
    if target_NJ.numel() and not 0 <= target_NJ.min() <= target_NJ.max() < classes:
        raise UserError(f"classes to explain must be from 0 to {classes - 1}")


def differentiate(
    logits_NL: Tensor, captured: list[AttentionMatrix], target_N: Tensor
) -> tuple[Tensor, ...]:
    """Return the derivative of each image's class in every matrix; keeps the graph."""
    one_hot_NL = torch.zeros_like(logits_NL).scatter(1, target_N[:, None], 1)
    matrices = [record.weights for record in captured]
    return torch.autograd.grad(logits_NL, matrices, one_hot_NL, retain_graph=True)


def multiply_out(matrices: list[Tensor], layouts: list[TokenLayout], weight: float) -> Tensor:
    """Return the read row of the product of (I + C), later layers on the left, as `[N, R, C]`.

    `matrices` are C, `[N, Q, K]`. With a weight of 0.5 they are averaged with I instead, and their
    rows must sum to 1.
    """
    keep = 1.0 if weight == 1 else 1 - weight
    last = layouts[-1]
    T = last.queries - last.head_tokens
    row_N1T = reading_row(last, matrices[-1])[:T].expand(len(matrices[-1]), 1, T)
    for matrix_NQK, layout in zip(reversed(matrices), reversed(layouts), strict=True):
        row_N1T = keep * row_N1T + weight * row_N1T @ square(matrix_NQK, layout, weight != 1)
    return row_N1T[:, 0, last.prefix :].unflatten(-1, last.query_grid)


def square(matrix_NQK: Tensor, layout: TokenLayout, stochastic: bool) -> Tensor:
    """Return a matrix over class token and patches alone, `[N, T, T]`.

    DHVT's head tokens exist inside a layer only. Each is computed from the mean of all tokens, so
    its column is spread over them; its output is added to the class token's, and so is its row
    (averaged with it where rows must stay `stochastic`, that is, sum to 1). The column of a CvT key
    is spread over the patches at its place.
    """
    if layout.head_tokens:
        h = layout.head_tokens
        T = layout.queries - h
        matrix_NQK = matrix_NQK[..., :T] + matrix_NQK[..., T:].sum(-1, keepdim=True) / T
        heads_N1K, class_N1K = matrix_NQK[:, T:], matrix_NQK[:, :1]
        if stochastic:
            class_N1K = (class_N1K + heads_N1K.mean(1, keepdim=True)) / 2
        else:
            class_N1K = class_N1K + heads_N1K.sum(1, keepdim=True)
        matrix_NQK = torch.cat([class_N1K, matrix_NQK[:, 1:T]], 1)
    if layout.key_grid != layout.query_grid:
        first, patches = matrix_NQK[..., : layout.prefix], matrix_NQK[..., layout.prefix :]
        matrix_NQK = torch.cat([first, spread(patches, layout)], -1)
    return matrix_NQK


def spread(keys: Tensor, layout: TokenLayout) -> Tensor:
    """Divide the values of CvT's keys `[..., K]` among the patches at their places, `[..., T]`."""
    (R, C), like = layout.query_grid, {"device": keys.device}
    rows, columns = (torch.arange(side, **like) // 2 for side in (R, C))
    # At an odd edge a key stands for one row or column.
    sizes = rows.bincount()[:, None] * columns.bincount()
    values = keys.unflatten(-1, layout.key_grid) / sizes
    return values[..., rows, :][..., columns].flatten(-2)

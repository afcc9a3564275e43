"""Capture of attention matrices in a forward pass, without a line of it in any model.

timm's `AttentionExtract` traces a model with torch.fx or hooks its attention dropout. It finds
nothing under fused attention, which is the default of timm and the only path of the families here,
and its FX graph has no place for entmax. Here a `TorchFunctionMode`, active only inside
`capture_attention`, computes fused attention by its definition and records every softmax of an
attention layer. Outside of the context nothing is left.
"""

import math
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.models import swin_transformer, swin_transformer_v2
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from densefeed.models.agent_cnn import PLAIN
from densefeed.models.cvt import ConvAttention, CvT
from densefeed.models.dhvt import DHVT
from densefeed.models.sparse_attention import SparseAttention
from densefeed.models.t2t import TokenPerformer
from densefeed.models.token_transformer import Grid, TokenTransformer
from densefeed.system.errors import UserError

# N images   M heads   Q queries   K keys   R x C a grid, rows and columns   W windows of an image

WINDOWED = (swin_transformer.WindowAttention, swin_transformer_v2.WindowAttention)
WINDOWED_BLOCKS = (
    swin_transformer.SwinTransformerBlock,
    swin_transformer_v2.SwinTransformerV2Block,
)
# Layers with one softmax or entmax over the keys of each query and head.
ATTENTION = {*PLAIN, ConvAttention, *WINDOWED}
FAMILIES = "a ViT, DeiT, Swin, LV-ViT, DHVT, CvT or T2T-ViT"


class Windows(NamedTuple):
    """The windows of a Swin block, which partition the map after a cyclic shift and padding."""

    grid: Grid  # of the block's map
    size: Grid  # rows and columns of a window
    shift: Grid  # up and left, before the partition

    @property
    def counts(self) -> Grid:
        """Rows and columns of windows, the padded ones included."""
        return tuple(math.ceil(g / s) for g, s in zip(self.grid, self.size, strict=True))


class TokenLayout(NamedTuple):
    """Order of the queries and keys of an attention matrix.

    Both begin with `prefix` tokens, the class token first if there is one, then distillation and
    register tokens. Patches follow, row by row. DHVT's `head_tokens` come last.
    """

    prefix: int
    # How many of them, from the first on, the classifier reads: one class token, 2 with DeiT's
    # distillation token, or none where it reads the mean of the patches.
    class_tokens: int
    query_grid: Grid  # of the patches; of one window with `windows`
    key_grid: Grid  # CvT's keys have half the rows and columns, rounded up
    head_tokens: int = 0
    windows: Windows | None = None

    @property
    def queries(self) -> int:
        """The number Q."""
        return self.prefix + math.prod(self.query_grid) + self.head_tokens

    @property
    def keys(self) -> int:
        """The number K."""
        return self.prefix + math.prod(self.key_grid) + self.head_tokens

    def key_map(self, values: Tensor) -> Tensor:
        """Arrange values of all keys, `[N, ..., K]`, as maps of the patches `[N, ..., R, C]`.

        Of windows, `[N W, ..., K]`, each value returns to its place in the block's map.
        """
        patches = values[..., self.prefix : self.prefix + math.prod(self.key_grid)]
        maps = patches.unflatten(-1, self.key_grid)
        return maps if self.windows is None else merge_windows(maps, self.windows)


class AttentionMatrix(NamedTuple):
    """The attention of one layer in one forward pass."""

    layer: str  # module name
    # [N, M, Q, K] after softmax or entmax and before dropout; rows sum to 1. At least float32
    # where attention is fused. Swin: [N W, M, Q, K], an image's windows row by row.
    weights: Tensor
    layout: TokenLayout


def merge_windows(maps: Tensor, windows: Windows) -> Tensor:
    """Return `[N, ..., R, C]` from windows `[N W, ..., r, c]`: Swin's partition undone."""
    counts, (R, C) = windows.counts, windows.grid
    maps = maps.unflatten(0, (-1, *counts)).movedim((1, 2), (-4, -2))
    maps = maps.flatten(-4, -3).flatten(-2)[..., :R, :C]
    return maps.roll(windows.shift, (-2, -1))


def find_attention(model: nn.Module) -> dict[str, nn.Module]:
    """Return the attention layers that can be captured, by module name in forward order.

    Raises UserError for a model that has none, for a compiled one, whose layers cannot be
    observed, and for one whose patches cannot be located.
    """
    name = type(model).__name__
    parts = list(model.modules())
    if any(type(part).__name__ == "OptimizedModule" or part._compiled_call_impl for part in parts):
        raise UserError(
            f"{name} is compiled, which hides its attention; give the model from before "
            "torch.compile"
        )
    found = {path: part for path, part in model.named_modules() if type(part) in ATTENTION}
    if not found:
        raise UserError(f"{name} has no attention that can be captured; choose {FAMILIES}")
    if not hasattr(find_embedding(model), "register_forward_hook"):
        raise UserError(f"{name} has no patch embedding that is known here; choose {FAMILIES}")
    return found


def attention_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that `capture_attention` captures, in forward order.

    Raises UserError for a model without any, such as a CNN.
    """
    return list(find_attention(model))


def find_embedding(model: nn.Module) -> nn.Module | None:
    """Return the module that creates the patches, which every forward pass calls first."""
    if isinstance(model, TokenTransformer):
        return getattr(model, model.embedding_name)
    if isinstance(model, CvT):
        return model.stages[0].patch_embed
    return getattr(model, "patch_embed", None)


def choose_layers(model: nn.Module, layers: Collection[str] | None) -> dict[str, nn.Module]:
    """Return the modules of `layers`, all for None. Raises UserError."""
    found = find_attention(model)
    for name in layers or ():
        if name in found:
            continue
        part = dict(model.named_modules()).get(name)
        kind = "is a Performer, which" if isinstance(part, TokenPerformer) else "is a layer that"
        kind = "is not a layer of the model and" if part is None else kind
        raise UserError(
            f"{name} {kind} computes no attention matrix; choose from {', '.join(found)}"
        )
    return {name: part for name, part in found.items() if layers is None or name in layers}


@contextmanager
def capture_attention(
    model: nn.Module, layers: Collection[str] | None = None
) -> Iterator[list[AttentionMatrix]]:
    """Record the attention matrices of the model's forward passes inside the context.

        with capture_attention(model) as captured:
            logits_NK = model(image_NCHW)
        captured[0].weights  # [N, M, Q, K]

    The list holds the matrices of the last pass in forward order, and stays valid afterwards. With
    gradients on, matrices belong to the graph of the output, also if no parameter is trained, so
    `torch.autograd.grad(logits_NK[:, k].sum(), captured[0].weights)` works. Outputs are those of
    the model up to rounding. Recomputation of activations is off inside the context. The model may
    be called by any of its methods (`forward_features`, `forward_intermediates`).

    Args:
        model: in training or evaluation mode, of any device and floating dtype.
        layers: names from `attention_layers`; None for all. Others keep fused attention.

    Raises UserError, naming the model or layer, for what cannot be captured; in the forward pass
    also for tokens that are not the whole grid, as with patch dropout in training.
    """
    tracer = AttentionTracer(model, choose_layers(model, layers))
    with tracer.hooked(), tracer:
        yield tracer.records


@torch.no_grad()
def forward_attention(model: nn.Module, image_NCHW: Tensor) -> list[AttentionMatrix]:
    """Return the attention matrices of one forward pass, without a graph. Raises UserError."""
    with capture_attention(model) as captured:
        model(image_NCHW)
    return captured


class AttentionTracer(TorchFunctionMode):
    """Computes attention of the chosen layers by its definition and records the weights.

    Hooks, present inside `hooked` only, find the layer that runs and the grid of its tokens.
    """

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.model, self.layers = model, layers
        self.records: list[AttentionMatrix] = []
        # The layers that run, outermost first, with their arguments.
        self.running: list[tuple[str, nn.Module, tuple]] = []
        self.grid: Grid = (0, 0)
        self.windows: Windows | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.running and func is F.scaled_dot_product_attention:
            # Once more with this mode, which records its softmax.
            with self:
                return explicit_attention(*args, **kwargs)
        result = func(*args, **kwargs)
        # torch.softmax, Tensor.softmax and F.softmax have this name.
        is_softmax = getattr(func, "__name__", "") == "softmax"
        return self.record(result) if self.running and is_softmax else result

    def record(self, weights: Tensor) -> Tensor:
        """Record attention weights `[N, M, Q, K]` of the running layer; return them."""
        name, layer, args = self.running[-1]
        layout = self.find_layout(layer, args)
        if weights.shape[-2:] != (layout.queries, layout.keys):
            raise UserError(
                f"{name} of {type(self.model).__name__} attends over {weights.shape[-2]} x "
                f"{weights.shape[-1]} tokens, where its patches need {layout.queries} x "
                f"{layout.keys}; remove patch dropout or choose another model"
            )
        if torch.is_grad_enabled() and not weights.requires_grad:
            weights.requires_grad_()
        self.records.append(AttentionMatrix(name, weights, layout))
        return weights

    def find_layout(self, layer: nn.Module, args: tuple) -> TokenLayout:
        """Return the order of tokens of a layer that is called with `args`."""
        if isinstance(layer, ConvAttention):
            x_NTD, grid = args
            prefix = x_NTD.shape[1] - math.prod(grid)
            # Keys are made by convolutions of stride 2.
            halved = tuple(-(-side // 2) for side in grid)
            return TokenLayout(prefix, self.class_tokens(prefix), tuple(grid), halved)
        if isinstance(layer, WINDOWED):
            size = tuple(layer.window_size)
            return TokenLayout(0, 0, size, size, windows=self.windows)
        prefix = getattr(self.model, "num_prefix_tokens", 0)
        tokens = prefix + math.prod(self.grid)
        # None with DHVT(head_tokens=False).
        heads = args[0].shape[1] - tokens if isinstance(self.model, DHVT) else 0
        return TokenLayout(prefix, self.class_tokens(prefix), self.grid, self.grid, heads)

    def class_tokens(self, prefix: int) -> int:
        """Return how many of the first tokens the classifier reads."""
        if not prefix or self.model.global_pool not in ("token", ""):
            return 0
        return 2 if hasattr(self.model, "head_dist") else 1

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hook the model and stop recomputation; undo both, also after an error."""
        with ExitStack() as stack:
            for handle in self.add_hooks():
                stack.callback(handle.remove)
            for part in self.model.modules():
                if getattr(part, "grad_checkpointing", False):
                    # A second pass would record everything twice.
                    part.grad_checkpointing = False
                    stack.callback(setattr, part, "grad_checkpointing", True)
            yield

    def add_hooks(self) -> Iterator[torch.utils.hooks.RemovableHandle]:
        """Add the hooks one by one."""
        embedding = find_embedding(self.model)
        yield embedding.register_forward_pre_hook(self.begin_pass)
        yield embedding.register_forward_hook(self.end_embedding)
        for name, layer in self.layers.items():
            yield layer.register_forward_pre_hook(partial(self.enter_layer, name))
            yield layer.register_forward_hook(self.leave_layer, always_call=True)
            if isinstance(layer, SparseAttention):
                # No mode sees the result of an autograd.Function, and its next use is a dropout.
                yield layer.attn_drop.register_forward_pre_hook(self.record_sparse)
        for part in self.model.modules():
            if isinstance(part, WINDOWED_BLOCKS):
                yield part.register_forward_pre_hook(self.enter_windows)

    def begin_pass(self, embedding: nn.Module, args: tuple) -> None:
        self.records.clear()
        # An error of an earlier pass may have left a layer.
        self.running.clear()
        if hasattr(embedding, "dynamic_feat_size"):
            self.grid = tuple(embedding.dynamic_feat_size(args[0].shape[-2:]))

    def end_embedding(self, embedding: nn.Module, args: tuple, output: Any) -> None:
        if isinstance(self.model, TokenTransformer):
            self.grid = tuple(output.shape[2:])

    def enter_layer(self, name: str, layer: nn.Module, args: tuple) -> None:
        self.running.append((name, layer, args))

    def leave_layer(self, layer: nn.Module, args: tuple, output: Any) -> None:
        self.running.pop()

    def enter_windows(self, block: nn.Module, args: tuple) -> None:
        size, shift = tuple(block.window_size), tuple(block.shift_size)
        self.windows = Windows(tuple(args[0].shape[1:3]), size, shift)

    def record_sparse(self, dropout: nn.Module, args: tuple) -> tuple[Tensor]:
        return (self.record(args[0]),)


def explicit_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Compute `F.scaled_dot_product_attention` by its definition; arguments are its own.

    Softmax has at least float32, as in fused kernels.
    """
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return F.dropout(weights, dropout_p).to(v.dtype) @ v

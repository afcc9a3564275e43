"""The base of vision transformers with a class token and a grid of tokens.

A family provides its patch embedding and its blocks. Heads, MixToken and timm's interface are the
same for all families, so token labeling, intermediate features and dense teachers work with each
of them.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from timm.layers import resample_abs_pos_embed, trunc_normal_
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import global_pool_nlc
from torch import Tensor, nn

from densefeed.models.recompute import run_blocks

# N images   T tokens without the class token   D width   K classes
# P x P, or R x C, the grid of tokens

Grid = tuple[int, int]  # rows and columns of tokens

# From this number of classes on, the tokens' loss is computed without storing all logits. Below,
# whole logits take less memory than the rest of a step, and less time.
FUSED_FROM = 4096
# Prefixes of the names of these families' models.
FAMILIES = ("lvvit", "dhvt", "t2t_vit")


def to_map(x_NTD: Tensor, grid: Grid) -> Tensor:
    """Arrange tokens, without class token, as a map `[N, D, R, C]`; this copies nothing."""
    return x_NTD.transpose(1, 2).unflatten(2, grid)


def to_tokens(x_NDRC: Tensor) -> Tensor:
    """Return the positions of a map as tokens `[N, R C, D]`, row by row."""
    return x_NDRC.flatten(2).transpose(1, 2)


def has_tokens(name: str) -> bool:
    """Return whether the model of this name is a `TokenTransformer`.

    Such a model takes `token_head` and `fused_head`, and `mix_PP` in forward.
    """
    return name.startswith(FAMILIES)


class TokenLogits(NamedTuple):
    """The training output of a model with a token head, row-major over the grid."""

    cls: Tensor  # [N, K]
    tokens: Tensor  # [N, T, K]


class TokenFeatures(NamedTuple):
    """The training output of a model with a fused head, which the loss applies to the tokens.

    It is the input of `losses.fused_token_loss`, which never holds all token logits at once.
    """

    cls: Tensor  # [N, K]
    tokens: Tensor  # [N, T, D]
    head: nn.Linear


def check_choice(name: str, value: Any, choices: Collection) -> None:
    """Raise ValueError if the argument `name` has a value that is not one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} {value!r} must be one of {', '.join(map(str, choices))}")


def name_multiples(extent: int, multiple: int) -> str:
    """Name the nearest positive multiples of `multiple` below and above `extent`, for messages."""
    low = extent // multiple * multiple
    return f"{low} or {low + multiple}" if low > 0 else f"{multiple}"


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """Return stochastic depth rates that rise linearly from 0 to `rate` over the blocks."""
    return [rate * block / max(depth - 1, 1) for block in range(depth)]


def init_linear(module: nn.Module) -> None:
    """Initialize a linear layer as LV-ViT's published code does: std 0.02 truncated, bias 0.

    Other layers keep PyTorch's defaults.
    """
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class PrunableLayers:
    """What timm's `features_only` calls on a model with its layers in the attribute `layers_name`.

    The layers are those that `forward_intermediates` counts.
    """

    layers_name = "blocks"

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove what `forward_intermediates` does not need for `indices`.

        Returns the indices counted from the first layer.
        """
        layers = getattr(self, self.layers_name)
        taken, last = feature_take_indices(len(layers), indices)
        setattr(self, self.layers_name, layers[: last + 1])
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return taken


class TokenTransformer(PrunableLayers, nn.Module):
    """The base class of such networks.

    A family's constructor calls this one, then creates `pos_embed` (`[1, 1 + T, D]`, a parameter, a
    buffer or None), `blocks`, `norm` and the patch embedding that `embedding_name` names, and ends
    with `_make_heads`. Raises ValueError for sizes that do not fit together.

    Forward takes images `[N, in_chans, H, W]`. For a size other than `img_size` the position table
    is resampled (bicubic, antialiased) without the class token's row. Forward returns `[N, K]`
    logits. In training a model with a token head returns `TokenLogits` instead, or with a fused
    head `TokenFeatures`. In evaluation a token head adds 0.5 times the maximum over tokens, as
    LV-ViT's published code does. The rest is timm's interface, by timm's names.
    """

    pos_embed: Tensor | None
    blocks: nn.ModuleList
    embedding_name: str
    blocks_take_grid = False  # whether blocks convolve and take the tokens' (R, C)

    def __init__(
        self,
        img_size: int | tuple[int, int],
        patch_size: int,
        embed_dim: int,
        depth: int,
        num_heads: int,
        token_head: bool,
        fused_head: bool,
    ) -> None:
        super().__init__()
        if fused_head and not token_head:
            raise ValueError("fused_head needs token_head")
        rows, columns = (img_size, img_size) if isinstance(img_size, int) else img_size
        if rows != columns or rows % patch_size:
            raise ValueError(
                f"img_size {rows} x {columns} must be square, and a multiple of patch_size "
                f"{patch_size}, such as {name_multiples(rows, patch_size)}"
            )
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} must be a multiple of num_heads {num_heads}")
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.num_prefix_tokens = 1
        self.patch_size, self.grid_size = patch_size, rows // patch_size
        self.grad_checkpointing = False
        # Whether, in training under autocast, the sum that runs through the blocks has its dtype.
        self.half_residual = False
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.feature_info = [
            dict(module=f"blocks.{i}", num_chs=embed_dim, reduction=patch_size)
            for i in range(depth)
        ]
        self.with_token_head, self.fused_head = token_head, fused_head

    def _make_heads(self, num_classes: int, global_pool: str) -> None:
        if global_pool not in ("token", "avg", "") or (num_classes and not global_pool):
            raise ValueError(
                f"global_pool {global_pool!r} must be 'token', 'avg', or '' where num_classes is 0"
            )
        self.num_classes, self.global_pool = num_classes, global_pool
        # A model that was moved or converted gets new heads of the same device and dtype.
        like = {"device": self.cls_token.device, "dtype": self.cls_token.dtype}
        with_tokens = self.with_token_head and num_classes > 0
        self.head = nn.Linear(self.embed_dim, num_classes, **like) if num_classes else nn.Identity()
        self.token_head = nn.Linear(self.embed_dim, num_classes, **like) if with_tokens else None

    def no_weight_decay(self) -> set[str]:
        """Return names that AdamW must not decay, in addition to biases and vectors."""
        return {"pos_embed", "cls_token"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns of parameter names by depth, for timm's layer-wise learning-rate decay.

        `coarse` has no effect, since the blocks have no stages.
        """
        return {
            "stem": rf"^cls_token|^pos_embed|^{self.embedding_name}",
            # timm's number for the group before: the final norm goes with the last block.
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of every block in the backward pass. Same gradients."""
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module | tuple[nn.Module, nn.Module]:
        """Return the classifier of the class token, or both, as timm's distilled models do."""
        return self.head if self.token_head is None else (self.head, self.token_head)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Create new heads for `num_classes`, in the model's device and dtype; 0 removes them.

        `global_pool` is the constructor's. Raises ValueError for an unknown pool, or "" with heads.
        """
        self._make_heads(num_classes, self.global_pool if global_pool is None else global_pool)
        for head in filter(None, (self.head, self.token_head)):
            # A new module begins in training mode, whatever mode the model is in.
            head.apply(init_linear).train(self.training)

    def token_grid(self, image_NCHW: Tensor) -> Grid:
        """Return rows and columns of tokens. Raises ValueError for partial patches."""
        H, W = image_NCHW.shape[2:]
        if H % self.patch_size or W % self.patch_size:
            raise ValueError(
                f"inputs of {H} x {W} pixels must be multiples of patch_size {self.patch_size}, "
                f"such as {name_multiples(H if H % self.patch_size else W, self.patch_size)}"
            )
        return H // self.patch_size, W // self.patch_size

    def _embed(self, image_NCHW: Tensor, mix_PP: Tensor | None = None) -> Tensor:
        """Return the input of the first block, `[N, 1 + T, D]`, positions included."""
        grid = self.token_grid(image_NCHW)
        x_NDPP = getattr(self, self.embedding_name)(image_NCHW)
        if mix_PP is not None:
            # Before positions are added, so a token gets the position of its place in this image.
            x_NDPP = torch.where(mix_PP, x_NDPP.flip(0), x_NDPP)
        x_NTD = to_tokens(x_NDPP)
        x_NTD = torch.cat([self.cls_token.expand(x_NTD.shape[0], -1, -1), x_NTD], dim=1)
        if self.pos_embed is None:
            return x_NTD
        # At the size that the table was built for this returns the table itself.
        return x_NTD + resample_abs_pos_embed(self.pos_embed, list(grid), [self.grid_size] * 2)

    def _run(self, blocks: Sequence[nn.Module], x_NTD: Tensor, grid: Grid) -> Tensor:
        more = (grid,) if self.blocks_take_grid else ()
        # Gradients, not `training`, because of --frozen-statistics.
        half = self.half_residual and torch.is_grad_enabled()
        if half and torch.is_autocast_enabled(x_NTD.device.type):
            # Positions are float32, and so would be every sum of the blocks.
            x_NTD = x_NTD.to(torch.get_autocast_dtype(x_NTD.device.type))
        return run_blocks(blocks, x_NTD, *more, grad_checkpointing=self.grad_checkpointing)

    def forward_features(self, image_NCHW: Tensor, mix_PP: Tensor | None = None) -> Tensor:
        """Return normalized tokens `[N, 1 + T, D]`, class token first.

        `mix_PP` (bool `[P, P]`, the input's grid; MixToken) marks the tokens that come from the
        mixing partner, the batch in reversed order. Tokens are exchanged after the patch embedding
        and before positions are added (Token Labeling, equation 8).
        """
        return self.norm(self._forward_blocks(image_NCHW, mix_PP))

    def _forward_blocks(self, image_NCHW: Tensor, mix_PP: Tensor | None) -> Tensor:
        """Return the output of the last block, `[N, 1 + T, D]`."""
        x_NTD = self._embed(image_NCHW, mix_PP)
        return self._run(self.blocks, x_NTD, self.token_grid(image_NCHW))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list | tuple[Tensor, list]:
        """Return final features of the images `x` and a list of outputs of the blocks at `indices`.

        Arguments and their order are those of timm's vision transformer.

        Args:
            x: images `[N, in_chans, H, W]`.
            indices: block numbers; None for all blocks, an int for the last ones.
            return_prefix_tokens: make each list entry a pair with the class token `[N, 1, D]`.
            norm: apply the final norm to the list's entries.
            stop_early: run no block after the last one in `indices`.
            output_fmt: "NCHW" for entries `[N, D, P, P]`, "NLC" for `[N, T, D]`.
            intermediates_only: return the list alone.

        Raises ValueError for another format, AssertionError for a block that does not exist.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt {output_fmt!r} must be NCHW or NLC")
        taken, last = feature_take_indices(len(self.blocks), indices)
        grid = self.token_grid(x)
        x_NTD, kept = self._embed(x), []
        for number, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x_NTD = self._run((block,), x_NTD, grid)
            if number in taken:
                kept.append(self.norm(x_NTD) if norm else x_NTD)
        outputs = [y_NTD[:, 1:] for y_NTD in kept]
        if output_fmt == "NCHW":
            outputs = [to_map(y_NTD, grid).contiguous() for y_NTD in outputs]
        if return_prefix_tokens:
            outputs = list(zip(outputs, [y_NTD[:, :1] for y_NTD in kept], strict=True))
        return outputs if intermediates_only else (self.norm(x_NTD), outputs)

    def forward_head(
        self, x_NTD: Tensor, pre_logits: bool = False, mix_PP: Tensor | None = None
    ) -> Tensor | TokenLogits | TokenFeatures:
        """Return the output of forward from that of `forward_features`, with the same `mix_PP`.

        With `pre_logits`, or without heads, returns the pooled features.
        """
        pooled_ND = global_pool_nlc(x_NTD, pool_type=self.global_pool, num_prefix_tokens=1)
        if pre_logits or not self.num_classes:
            return pooled_ND
        cls_NK = self.head(pooled_ND)
        if self.token_head is None:
            return cls_NK
        x_NTD = x_NTD[:, 1:]
        # Tokens return to the image that they show, so token labels need no mixing. The published
        # code exchanges logits. The head processes each token independently, so exchanging features
        # gives the same result at D / K of the memory traffic.
        if mix_PP is not None:
            x_NTD = torch.where(mix_PP.flatten()[:, None], x_NTD.flip(0), x_NTD)
        if self.training and self.fused_head:
            # Under autocast a CUDA layer norm gives float32. The head is applied outside of it, in
            # the dtype of its input.
            return TokenFeatures(cls_NK, x_NTD.to(cls_NK.dtype), self.token_head)
        tokens_NTK = self.token_head(x_NTD)
        if self.training:
            return TokenLogits(cls_NK, tokens_NTK)
        # As LV-ViT's published code evaluates; the paper's first version does not mention it.
        return cls_NK + 0.5 * tokens_NTK.amax(1)

    def forward(
        self, image_NCHW: Tensor, mix_PP: Tensor | None = None
    ) -> Tensor | TokenLogits | TokenFeatures:
        return self._forward_end(self._forward_blocks(image_NCHW, mix_PP), mix_PP)

    def _forward_end(
        self, x_NTD: Tensor, mix_PP: Tensor | None
    ) -> Tensor | TokenLogits | TokenFeatures:
        """Return the output of forward from that of the last block: what is compiled as one."""
        return self.forward_head(self.norm(x_NTD), mix_PP=mix_PP)

    def forward_token_logits(self, image_NCHW: Tensor) -> Tensor:
        """Return the logits of every token as a map `[N, K, P, P]`, for use as a dense teacher."""
        head = self.head if self.token_head is None else self.token_head
        logits_NTK = head(self.forward_features(image_NCHW)[:, 1:])
        return to_map(logits_NTK, self.token_grid(image_NCHW))


def fit_weights(state_dict: Mapping[str, Any], model: TokenTransformer) -> dict[str, Any]:
    """Adapt a state dict to this model: resize the position table, drop an unused token head.

    The table is resized as LV-ViT's published code does: bicubic, not antialiased, with the class
    token's row kept. This differs from the table that forward resamples for another input size:
    that one is antialiased, and even when it grows PyTorch uses its other bicubic kernel. A table
    that is not a square grid and a class token stays as it is, so that `load_state_dict` raises.
    """
    fitted = {
        name: tensor
        for name, tensor in state_dict.items()
        if model.token_head is not None or not name.startswith("token_head.")
    }
    table, own = fitted.get("pos_embed"), model.pos_embed
    if table is not None and own is not None and table.ndim == 3:
        rows = table.shape[1]
        side = math.isqrt(max(rows - 1, 0))
        if rows != own.shape[1] and side and side**2 + 1 == rows:
            fitted["pos_embed"] = resample_abs_pos_embed(
                table, [model.grid_size] * 2, [side] * 2, antialias=False
            )
    return fitted

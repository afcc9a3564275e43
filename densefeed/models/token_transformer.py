"""What vision transformers with a class token and a grid of tokens share here: heads, MixToken's
place, timm's interface.

A family gives its patch embedding and its blocks; everything from there to the logits is the same
for all, so that whatever reads one (token labels, intermediate features, a dense teacher) reads
each.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.layers import resample_abs_pos_embed, trunc_normal_
from timm.models import checkpoint_seq
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import global_pool_nlc
from torch import Tensor, nn

# N images   T tokens without the class token   D width   K classes   P, or R x C, the grid of tokens

FAMILIES = ("lvvit", "dhvt", "t2t_vit")  # how the names of their models begin


def has_tokens(name: str) -> bool:
    """Whether the model of this name is a `TokenTransformer`: takes `token_head`, `fused_head`, and
    `mix_PP` in forward.
    """
    return name.startswith(FAMILIES)


class TokenLogits(NamedTuple):
    """What a model with a token head returns in training: `cls` `[N, K]` and `tokens` `[N, T, K]`,
    row-major over the grid.
    """

    cls: Tensor
    tokens: Tensor


class TokenFeatures(NamedTuple):
    """What a model with a fused head returns in training: `cls` `[N, K]`, `tokens` `[N, T, D]` and
    the head that is due on them.

    For `token_labeling.fused_token_loss`, which never holds the tokens' logits whole.
    """

    cls: Tensor
    tokens: Tensor
    head: nn.Linear


def init_linear(module: nn.Module) -> None:
    """Truncated normal, std 0.02, and no bias for linear layers (reference 1.5); the others keep
    PyTorch's defaults.
    """
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class TokenTransformer(nn.Module):
    """Base of such networks.

    A family's constructor calls `_begin`, then makes `pos_embed` (`[1, 1 + T, D]`, parameter or
    buffer, or None), `blocks`, `norm` and whatever `embed_patches` needs, and ends with
    `_make_heads`. Forward takes images `[N, in_chans, H, W]`; for another size than `img_size` a
    position table is resampled, bicubic and antialiased, the class token's place kept. It returns
    `[N, K]` logits; in training a model with a token head returns `TokenLogits` instead, or with a
    fused head `TokenFeatures`. At evaluation a token head adds 0.5 times the maximum over tokens
    (as LV-ViT's published code does). The rest is timm's interface, by timm's names.
    """

    pos_embed: Tensor | None
    blocks: nn.ModuleList
    norm: nn.Module

    def _begin(
        self,
        img_size: int | tuple[int, int],
        patch_size: int,
        in_chans: int,
        embed_dim: int,
        depth: int,
        num_heads: int,
        token_head: bool,
        fused_head: bool,
    ) -> None:
        """What every family states. ValueError for sizes that do not fit together."""
        if fused_head and not token_head:
            raise ValueError("fused_head needs token_head")
        rows, columns = (img_size, img_size) if isinstance(img_size, int) else img_size
        if rows != columns:
            raise ValueError(f"img_size {rows} x {columns} must be square")
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} must be a multiple of num_heads {num_heads}")
        self.in_chans = in_chans
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.num_prefix_tokens = 1
        self.patch_size, self.grid_size = patch_size, rows // patch_size
        self.grad_checkpointing = False
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
        like = {"device": self.cls_token.device, "dtype": self.cls_token.dtype}
        with_tokens = self.with_token_head and num_classes > 0
        self.head = nn.Linear(self.embed_dim, num_classes, **like) if num_classes else nn.Identity()
        self.token_head = nn.Linear(self.embed_dim, num_classes, **like) if with_tokens else None

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names that AdamW must not decay, beside biases and one-dimensional tables."""
        return {"pos_embed", "cls_token"}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute every block a second time in the backward pass instead of keeping what it
        computed. Same gradients.
        """
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module | tuple[nn.Module, nn.Module]:
        """The classifier of the class token; with a token head, both (as timm's distilled models
        do).
        """
        return self.head if self.token_head is None else (self.head, self.token_head)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """New heads for `num_classes`, on the device and in the dtype of the rest; 0: none.
        `global_pool` as in the class.

        Raises ValueError for a pool that is not known, or "" beside heads.
        """
        self._make_heads(num_classes, self.global_pool if global_pool is None else global_pool)
        for head in filter(None, (self.head, self.token_head)):
            head.apply(init_linear).train(self.training)

    def grid_of(self, image_NCHW: Tensor) -> tuple[int, int]:
        """Rows and columns of tokens of these images. ValueError if their size is no multiple of
        the patch size.
        """
        H, W = image_NCHW.shape[2:]
        if H % self.patch_size or W % self.patch_size:
            raise ValueError(
                f"inputs of {H} x {W} pixels must be multiples of patch_size {self.patch_size}"
            )
        return H // self.patch_size, W // self.patch_size

    def embed_patches(self, image_NCHW: Tensor) -> Tensor:
        """Images `[N, in_chans, H, W]` to a map of tokens `[N, D, R, C]`, whose size is
        `grid_of`'s.
        """
        raise NotImplementedError

    def run_block(self, block: nn.Module, x_NTD: Tensor, grid: tuple[int, int]) -> Tensor:
        """One block; a family whose blocks look at neighbors gives them `grid`, rows and columns
        of the tokens.
        """
        return block(x_NTD)

    def _embed(self, image_NCHW: Tensor, mix_PP: Tensor | None = None) -> Tensor:
        """What the first block reads: class token and patches, with their positions, `[N, 1 + T,
        D]`.
        """
        x_NDPP = self.embed_patches(image_NCHW)
        if mix_PP is not None:
            x_NDPP = torch.where(mix_PP, x_NDPP.flip(0), x_NDPP)
        x_NTD = x_NDPP.flatten(2).transpose(1, 2)
        x_NTD = torch.cat([self.cls_token.expand(x_NTD.shape[0], -1, -1), x_NTD], dim=1)
        if self.pos_embed is None:
            return x_NTD
        return x_NTD + resample_abs_pos_embed(
            self.pos_embed, list(self.grid_of(image_NCHW)), [self.grid_size] * 2
        )

    def _run(self, blocks: Sequence[nn.Module], x_NTD: Tensor, grid: tuple[int, int]) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint_seq(
                [partial(self.run_block, block, grid=grid) for block in blocks], x_NTD
            )
        for block in blocks:
            x_NTD = self.run_block(block, x_NTD, grid)
        return x_NTD

    def forward_features(self, image_NCHW: Tensor, mix_PP: Tensor | None = None) -> Tensor:
        """Normalized tokens `[N, 1 + T, D]`, class token first.

        `mix_PP` (bool `[P, P]`, the input's grid; MixToken) marks the tokens that come from the
        partner image, which is the batch reversed; they are exchanged after the patch embedding and
        before positions are added (equation 8).
        """
        return self.norm(
            self._run(self.blocks, self._embed(image_NCHW, mix_PP), self.grid_of(image_NCHW))
        )

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
        """What the blocks at `indices` (None: all; a number: the last so many) say of the images
        `x` `[N, in_chans, H, W]`.

        Each is `[N, D, P, P]`, or `[N, T, D]` with `output_fmt="NLC"`, through the final norm if
        `norm`; with `return_prefix_tokens` a pair of it and the class token `[N, 1, D]`. The answer
        is (final features, list), or with `intermediates_only` the list. `stop_early` runs no block
        after the last that is asked for. Arguments and order are those of timm's vision
        transformer. Raises ValueError for another format, AssertionError for a block that is not
        there.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt {output_fmt!r} must be NCHW or NLC")
        taken, last = feature_take_indices(len(self.blocks), indices)
        rows, columns = self.grid_of(x)
        x_NTD, found = self._embed(x), []
        for number, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x_NTD = self._run((block,), x_NTD, (rows, columns))
            if number in taken:
                found.append(self.norm(x_NTD) if norm else x_NTD)
        prefixes, patches = [y_NTD[:, :1] for y_NTD in found], [y_NTD[:, 1:] for y_NTD in found]
        if output_fmt == "NCHW":
            patches = [
                y_NTD.transpose(1, 2).unflatten(2, (rows, columns)).contiguous()
                for y_NTD in patches
            ]
        answers = list(zip(patches, prefixes, strict=True)) if return_prefix_tokens else patches
        return answers if intermediates_only else (self.norm(x_NTD), answers)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what `forward_intermediates` does not need for these `indices`; returns them counted
        from the first block.
        """
        taken, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return taken

    def forward_head(
        self, x_NTD: Tensor, pre_logits: bool = False, mix_PP: Tensor | None = None
    ) -> Tensor | TokenLogits | TokenFeatures:
        """From `forward_features` to what forward returns; with `pre_logits`, or without heads, the
        pooled features.

        `mix_PP` is what `forward_features` was given.
        """
        pooled_ND = global_pool_nlc(x_NTD, pool_type=self.global_pool, num_prefix_tokens=1)
        if pre_logits or not self.num_classes:
            return pooled_ND
        cls_NK = self.head(pooled_ND)
        if self.token_head is None:
            return cls_NK
        x_NTD = x_NTD[:, 1:]
        # Back to the image that each token shows, so that token labels need no mixing. The
        # published code exchanges logits; the head sees one token at a time, so features give the
        # same at D / K of the traffic.
        if mix_PP is not None:
            x_NTD = torch.where(mix_PP.flatten()[:, None], x_NTD.flip(0), x_NTD)
        if self.training and self.fused_head:
            return TokenFeatures(cls_NK, x_NTD, self.token_head)
        tokens_NTK = self.token_head(x_NTD)
        if self.training:
            return TokenLogits(cls_NK, tokens_NTK)
        return cls_NK + 0.5 * tokens_NTK.amax(1)

    def forward(
        self, image_NCHW: Tensor, mix_PP: Tensor | None = None
    ) -> Tensor | TokenLogits | TokenFeatures:
        return self.forward_head(self.forward_features(image_NCHW, mix_PP), mix_PP=mix_PP)

    def forward_token_logits(self, image_NCHW: Tensor) -> Tensor:
        """Logits of every token as a map, `[N, K, P, P]`: what this model says as a dense
        teacher.
        """
        head = self.head if self.token_head is None else self.token_head
        logits_NTK = head(self.forward_features(image_NCHW)[:, 1:])
        return logits_NTK.transpose(1, 2).unflatten(2, self.grid_of(image_NCHW))


def fit_weights(state_dict: Mapping[str, Any], model: TokenTransformer) -> dict[str, Any]:
    """A state dict by our names made to fit this model: the position table at its size, no token
    head where it has none.

    The table is resized as LV-ViT's published code does: bicubic, not antialiased, the class
    token's row kept (reference 5.4). That differs from the table that forward resamples for another
    size, which is antialiased, and by PyTorch's other bicubic kernel even where it grows. A table
    that is no square grid and a class token stays as it is, for `load_state_dict` to refuse.
    """
    fitting = dict(state_dict)
    if model.token_head is None:
        fitting = {
            name: tensor for name, tensor in fitting.items() if not name.startswith("token_head.")
        }
    table, own = fitting.get("pos_embed"), model.pos_embed
    if table is not None and own is not None and table.ndim == 3 and table.shape[1] != own.shape[1]:
        side = math.isqrt(max(table.shape[1] - 1, 0))
        if side and side**2 + 1 == table.shape[1]:
            fitting["pos_embed"] = resample_abs_pos_embed(
                table, [model.grid_size] * 2, [side] * 2, antialias=False
            )
    return fitting

"""CvT-13: a three-stage pyramid with convolutional token embeddings and projections of q, k and v.

CvT (arXiv 2103.15808), Table 2. Two networks have this name: the one of CvT's authors, with a class
token in the last stage, and the one that DRLoc (arXiv 2106.03746) trained, without it. The
parameter counts of both equal the published ones exactly (tests/models/test_cvt.py).
"""

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.layers import Mlp, QuickGELU, trunc_normal_
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.models.drop_path import add_branch, branch_drop_path
from densefeed.models.map_norm import MapNorm
from densefeed.models.recompute import run_blocks
from densefeed.models.registration import pretrained_cfg, register_family
from densefeed.models.token_transformer import (
    Grid,
    PrunableLayers,
    drop_path_rates,
    init_linear,
    to_map,
    to_tokens,
)

# N images   T tokens, class token first where there is one   X class tokens, 0 or 1   D width
# R x C the grid of patches

# Kernel, stride and padding of the stages' embeddings.
EMBEDDINGS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))


class DeviationNorm(nn.LayerNorm):
    """LayerNorm as in DRLoc's CvT: eps is added to the standard deviation, not the variance."""

    def forward(self, x_NTD: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x_NTD, dim=-1, correction=0, keepdim=True)
        return (x_NTD - mean) / (variance.sqrt() + self.eps) * self.weight + self.bias


def depthwise_conv(dim: int, stride: int) -> nn.Sequential:
    """Build the depth-wise 3 x 3 convolution and BatchNorm that precede a projection."""
    return nn.Sequential(
        OrderedDict(conv=nn.Conv2d(dim, dim, 3, stride, 1, groups=dim, bias=False), bn=MapNorm(dim))
    )


def split_tokens(x_NTD: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return the class token `[N, X, D]` and the patches as a map `[N, D, R, C]`."""
    patches = grid[0] * grid[1]
    class_NXD, patch_NTD = x_NTD.split([x_NTD.shape[1] - patches, patches], dim=1)
    return class_NXD, to_map(patch_NTD, grid)


def join_tokens(class_NXD: Tensor, patch_NDRC: Tensor) -> Tensor:
    """Return tokens `[N, T, D]` from a class token and a map of patches."""
    return torch.cat([class_NXD, to_tokens(patch_NDRC)], dim=1)


class ConvAttention(nn.Module):
    """Attention of `[N, T, D]` with queries of every patch, keys and values of every second one.

    A class token bypasses the convolutions. In the network of CvT's authors q, k and v have a
    convolution and a projection with bias each, and products are scaled by D^-1/2. In DRLoc's
    (`drloc`) k and v share both, projections have no bias, and the scale is that of a head's width.
    """

    def __init__(self, dim: int, num_heads: int, drloc: bool) -> None:
        super().__init__()
        # A scale of None is scaled_dot_product_attention's default, by the width of a head.
        self.num_heads, self.drloc, self.scale = num_heads, drloc, None if drloc else dim**-0.5
        self.conv_proj_q, self.proj_q = depthwise_conv(dim, 1), nn.Linear(dim, dim, bias=not drloc)
        if drloc:
            self.conv_proj_kv = depthwise_conv(dim, 2)
            self.proj_kv = nn.Linear(dim, 2 * dim, bias=False)
        else:
            self.conv_proj_k, self.proj_k = depthwise_conv(dim, 2), nn.Linear(dim, dim)
            self.conv_proj_v, self.proj_v = depthwise_conv(dim, 2), nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x_NTD: Tensor, grid: Grid) -> Tensor:
        class_NXD, patch_NDRC = split_tokens(x_NTD, grid)

        def project(conv: nn.Module, linear: nn.Module) -> Tensor:
            return linear(join_tokens(class_NXD, conv(patch_NDRC)))

        def split_heads(y_NTD: Tensor) -> Tensor:
            return y_NTD.unflatten(2, (self.num_heads, -1)).transpose(1, 2)

        q = project(self.conv_proj_q, self.proj_q)
        if self.drloc:
            k, v = project(self.conv_proj_kv, self.proj_kv).chunk(2, dim=-1)
        else:
            k, v = project(self.conv_proj_k, self.proj_k), project(self.conv_proj_v, self.proj_v)
        out = F.scaled_dot_product_attention(*map(split_heads, (q, k, v)), scale=self.scale)
        return self.proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm block."""

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: float, drop_path: float, drloc: bool
    ) -> None:
        super().__init__()
        norm = DeviationNorm if drloc else nn.LayerNorm
        self.norm1, self.norm2 = norm(dim), norm(dim)
        self.attn = ConvAttention(dim, num_heads, drloc)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=nn.GELU if drloc else QuickGELU)
        # Two, as in timm's blocks: a compiled step draws a mask for each module.
        self.drop_path1, self.drop_path2 = (
            branch_drop_path(drop_path, *branch)
            for branch in ((self.norm1, self.attn), (self.norm2, self.mlp))
        )

    def forward(self, x_NTD: Tensor, grid: Grid) -> Tensor:
        x_NTD = add_branch(x_NTD, lambda y_NTD: self.attn(self.norm1(y_NTD), grid), self.drop_path1)
        return add_branch(x_NTD, lambda y_NTD: self.mlp(self.norm2(y_NTD)), self.drop_path2)


class Embedding(nn.Module):
    """An overlapping convolution and a norm of each token.

    Maps `[N, C, H, W]` to `[N, R C, D]` and the grid (R, C).
    """

    def __init__(
        self, in_chans: int, dim: int, kernel: int, stride: int, padding: int, drloc: bool
    ) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, kernel, stride, padding)
        self.norm = DeviationNorm(dim) if drloc else nn.LayerNorm(dim)

    def forward(self, x_NCHW: Tensor) -> tuple[Tensor, Grid]:
        x_NDRC = self.proj(x_NCHW)
        return self.norm(to_tokens(x_NDRC)), x_NDRC.shape[2:]


class Stage(nn.Module):
    """Maps `[N, C, H, W]` to a map `[N, D, R, C]` and the class token `[N, X, D]`.

    Forward appends the map after every block to `maps`, if it gets such a list.
    """

    def __init__(
        self, embedding: Embedding, blocks: Sequence[Block], dim: int, class_token: bool
    ) -> None:
        super().__init__()
        self.patch_embed, self.blocks = embedding, nn.ModuleList(blocks)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if class_token else None
        self.grad_checkpointing = False

    def forward(self, x_NCHW: Tensor, maps: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        x_NTD, grid = self.patch_embed(x_NCHW)
        if self.cls_token is not None:
            x_NTD = torch.cat([self.cls_token.expand(x_NTD.shape[0], -1, -1), x_NTD], dim=1)
        for block in self.blocks:
            x_NTD = run_blocks([block], x_NTD, grid, grad_checkpointing=self.grad_checkpointing)
            if maps is not None:
                maps.append(split_tokens(x_NTD, grid)[1])
        class_NXD, patch_NDRC = split_tokens(x_NTD, grid)
        return patch_NDRC, class_NXD


class CvT(PrunableLayers, nn.Module):
    """CvT.

    Args:
        num_classes: K; 0 builds no head, and forward returns the pooled features.
        global_pool: input of `head`: the class token ("token"), the mean of the others ("avg"), or
            ("", without a head) all of them. None: class token; mean
            with `drloc`, which has no class token.
        dims, depths, num_heads: of the three stages.
        drop_path_rate: stochastic depth, rising linearly from 0 to this rate over the last stage's
            blocks (published: 0.1).
        drloc: DRLoc's network: no class token and no final norm, the stem padded by 3 (not 2), one
            projection for keys and values, no bias on q, k and v, GELU (not its sigmoid
            approximation), and eps on the standard deviation.

    Forward takes images `[N, in_chans, H, W]` of any size and returns `[N, K]` logits.
    `forward_features` returns normalized tokens `[N, 1 + T, D]`, class token first; with `drloc`
    the last stage's map `[N, D, R, C]`. 224 pixels give grids of 56, 28 and 14. The rest is timm's
    interface, by timm's names. Raises ValueError for an unknown pool.
    """

    layers_name = "stages"

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str | None = None,
        dims: Sequence[int] = (64, 192, 384),
        depths: Sequence[int] = (1, 2, 10),
        num_heads: Sequence[int] = (1, 3, 6),
        mlp_ratio: float = 4.0,
        drop_path_rate: float = 0.0,
        drloc: bool = False,
    ) -> None:
        super().__init__()
        self.drloc, self.num_prefix_tokens = drloc, 0 if drloc else 1
        self.num_features = self.head_hidden_size = dims[-1]
        self.stages = nn.ModuleList()
        sizes = zip(dims, depths, num_heads, EMBEDDINGS, strict=True)
        for number, (dim, depth, heads, (kernel, stride, padding)) in enumerate(sizes):
            last = number == len(dims) - 1
            # DRLoc's code pads the stem by one pixel more.
            padding = 3 if drloc and number == 0 else padding
            embedding = Embedding(in_chans, dim, kernel, stride, padding, drloc)
            blocks = [
                Block(dim, heads, mlp_ratio, rate, drloc)
                # As published: 0.1 in the last stage, none before it.
                for rate in drop_path_rates(drop_path_rate if last else 0.0, depth)
            ]
            self.stages.append(Stage(embedding, blocks, dim, class_token=last and not drloc))
            in_chans = dim
        self.feature_info = [
            dict(module=f"stages.{number}", num_chs=dim, reduction=4 * 2**number)
            for number, dim in enumerate(dims)
        ]
        self.norm = nn.Identity() if drloc else nn.LayerNorm(dims[-1])
        self._make_head(num_classes, global_pool)
        if not drloc:
            trunc_normal_(self.stages[-1].cls_token, std=0.02)
        self.apply(init_linear)

    def _make_head(self, num_classes: int, global_pool: str | None) -> None:
        known = ("avg",) if self.drloc else ("token", "avg")
        pool = known[0] if global_pool is None else global_pool
        if pool not in (*known, "") or (num_classes and not pool):
            raise ValueError(
                f"global_pool {pool!r} must be one of {', '.join(known)}, "
                "or '' where num_classes is 0"
            )
        self.num_classes, self.global_pool = num_classes, pool
        self.head = nn.Identity()
        if num_classes:
            # A model that was moved or converted gets a new head of the same device and dtype.
            like = self.stages[0].patch_embed.proj.weight
            self.head = nn.Linear(
                self.num_features, num_classes, device=like.device, dtype=like.dtype
            )

    def no_weight_decay(self) -> set[str]:
        """Return names that AdamW must not decay, in addition to biases and norms."""
        return set() if self.drloc else {f"stages.{len(self.stages) - 1}.cls_token"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns of parameter names by depth, for timm's layer-wise learning-rate decay.

        Groups are blocks, or with `coarse` stages.
        """
        stage = [(r"^stages\.(\d+)", None)]
        block = [
            (r"^stages\.(\d+)\.(?:patch_embed|cls_token)", (0,)),
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
        ]
        return {
            "stem": r"^stages\.0\.patch_embed",
            # timm's number for the group before: the final norm goes with the last block.
            "blocks": [*(stage if coarse else block), (r"^norm", (99999,))],
        }

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of every block in the backward pass. Same gradients."""
        for stage in self.stages:
            stage.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        """Return the classifier."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Create a new head for `num_classes`; 0 removes it. ValueError for an unknown pool."""
        self._make_head(num_classes, self.global_pool if global_pool is None else global_pool)
        self.head.apply(init_linear)

    def _final(self, class_NXD: Tensor, x_NDRC: Tensor) -> Tensor:
        return x_NDRC if self.drloc else self.norm(join_tokens(class_NXD, x_NDRC))

    def forward_features(self, image_NCHW: Tensor, maps: list[Tensor] | None = None) -> Tensor:
        x_NDRC = image_NCHW
        for stage in self.stages:
            x_NDRC, class_NXD = stage(x_NDRC, maps)
        return self._final(class_NXD, x_NDRC)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list | tuple[Tensor, list]:
        """Return final features of the images `x` and maps `[N, D, R, C]` of stages at `indices`.

        Arguments and their order are those of timm's pyramids. `norm` applies the final norm to the
        last stage's map, as in timm's Swin. Raises ValueError for a format other than NCHW.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt {output_fmt!r} must be NCHW")
        taken, last = feature_take_indices(len(self.stages), indices)
        maps = []
        for number, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            x, class_NXD = stage(x)
            if number in taken:
                normed = norm and number == len(self.stages) - 1
                # LayerNorm normalizes the last axis, so channels go there and back.
                maps.append(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if normed else x)
        return maps if intermediates_only else (self._final(class_NXD, x), maps)

    def forward_blocks(self, image_NCHW: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return final features, and the map `[N, D, R, C]` after every block of every stage."""
        maps = []
        return self.forward_features(image_NCHW, maps), maps

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits from the output of `forward_features`.

        With `pre_logits`, or without a head, returns the pooled features.
        """
        if self.global_pool == "avg":
            x = x.mean((2, 3)) if self.drloc else x[:, 1:].mean(1)
        elif self.global_pool == "token":
            x = x[:, 0]
        return x if pre_logits else self.head(x)

    def forward(self, image_NCHW: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(image_NCHW))


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: CvT) -> dict[str, Any]:
    """Return the state dict by this module's names; those of CvT's authors begin with `stage0`."""
    return {
        re.sub(r"^stage(\d+)\.", r"stages.\1.", name): tensor for name, tensor in state_dict.items()
    }


_CFG = pretrained_cfg("stages.0.patch_embed.proj", "head", crop_pct=0.875)

register_family(
    __name__,
    CvT,
    {
        # 20.0 M parameters, as published by its authors
        "cvt_13": (_CFG, {}),
        # 19.9 M parameters, as trained by DRLoc
        "cvt_13_drloc": (_CFG, dict(drloc=True)),
    },
    checkpoint_filter_fn,
)

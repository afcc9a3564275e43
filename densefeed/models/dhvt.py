"""DHVT: a vision transformer for small datasets, with convolutions and interaction between heads.

Dynamic Hybrid Vision Transformer (NeurIPS 2022, arXiv 2210.05958) and its supplementary material.
Three parts replace those of a ViT: SOPE the patch embedding and the positions, DAFF the
feed-forward network, HI-MHSA the attention. Parameter counts of Table 11 equal those of the
published code exactly (tests/models/test_dhvt.py). The rows of the ablations (Tables 2 to 5,
section 2.2.2) are arguments.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from timm.layers import LayerNorm2d, Mlp, trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.models.drop_path import add_branch, branch_drop_path
from densefeed.models.lvvit import Attention
from densefeed.models.map_norm import MapNorm
from densefeed.models.registration import pretrained_cfg, register_family
from densefeed.models.token_transformer import (
    Grid,
    TokenTransformer,
    check_choice,
    drop_path_rates,
    fit_weights,
    init_linear,
    to_map,
    to_tokens,
)

# N images   T tokens, class token first   D width   M heads   E width of a head
# R x C the grid of patches

Norm = Literal["batch", "layer"]
NORMS = {"batch": MapNorm, "layer": partial(LayerNorm2d, eps=1e-6)}
# Divisors of the width that give the channels after each convolution (supplementary, section 1.2,
# which does not have patches of 8).
SOPE_WIDTHS = {2: (1,), 4: (2, 1), 8: (4, 2, 1), 16: (8, 4, 2, 1)}
# Divides the width inside squeeze and excitation, in every published model.
REDUCTION = 4


class Affine(nn.Module):
    """A scale and a shift of each channel of `[N, C, H, W]`, initially the identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.beta = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return x_NCHW * self.alpha + self.beta


class SOPE(nn.Sequential):
    """Sequential overlapping patch embedding: 3 x 3 convolutions of stride 2.

    With `affine` they lie between two affine layers. Maps `[N, in_chans, H, W]` to
    `[N, embed_dim, R, C]`, where R = H / `patch_size` rounded up, and C likewise. Convolutions have
    no bias: the paper's pseudo-code has one, the published code and therefore Table 11's counts do
    not. A norm follows each convolution; GELU follows all but the last, and the single one of patch
    size 2. Raises ValueError for patch sizes other than 2, 4, 8 and 16.
    """

    def __init__(
        self, patch_size: int, in_chans: int, embed_dim: int, affine: bool, norm: Norm
    ) -> None:
        check_choice("patch_size", patch_size, SOPE_WIDTHS)
        layers = [Affine(in_chans)] if affine else []
        divisors = SOPE_WIDTHS[patch_size]
        for divisor in divisors:
            width = embed_dim // divisor
            layers += [nn.Conv2d(in_chans, width, 3, 2, 1, bias=False), NORMS[norm](width)]
            layers += [nn.GELU()] if divisor > 1 or len(divisors) == 1 else []
            in_chans = width
        super().__init__(*layers, *([Affine(embed_dim)] if affine else []))


class Aggregation(nn.Module):
    """Squeeze and excitation without a sigmoid: a factor of each channel from the patches' mean.

    Forward takes the class token `[N, 1, D]` and the patches `[N, T - 1, D]` and returns both as
    one `[N, T, D]`. The factor multiplies the class token ("class", as published), all tokens
    ("all", Table 3), or none ("none").
    """

    def __init__(self, dim: int, aggregate: Literal["class", "all", "none"]) -> None:
        super().__init__()
        self.aggregate = aggregate
        if aggregate != "none":
            self.compress = nn.Linear(dim, dim // REDUCTION)
            self.excite = nn.Linear(dim // REDUCTION, dim)

    def forward(self, class_N1D: Tensor, patch_NTD: Tensor) -> Tensor:
        if self.aggregate == "none":
            return torch.cat([class_N1D, patch_NTD], dim=1)
        factor_N1D = self.excite(F.gelu(self.compress(patch_NTD.mean(1, keepdim=True))))
        if self.aggregate == "all":
            return torch.cat([class_N1D, patch_NTD], dim=1) * factor_N1D
        return torch.cat([class_N1D * factor_N1D, patch_NTD], dim=1)


class DAFF(nn.Module):
    """Dynamic aggregation feed-forward: convolutions on the patches; the class token bypasses them.

    Takes `[N, T, D]` and the grid (R, C) of its T - 1 patches and returns `[N, T, D]`. The
    convolutions are 1 x 1, depth-wise 3 x 3 and 1 x 1. With `shortcut` the depth-wise one is added
    to its input (Table 3).
    """

    def __init__(
        self, dim: int, hidden: int, norm: Norm, shortcut: bool, aggregation: Aggregation
    ) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(dim, hidden, 1), NORMS[norm](hidden)
        self.conv2 = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.norm2 = NORMS[norm](hidden)
        self.conv3, self.norm3 = nn.Conv2d(hidden, dim, 1), NORMS[norm](dim)
        self.shortcut, self.aggregation = shortcut, aggregation

    def forward(self, x_NTD: Tensor, grid: Grid) -> Tensor:
        # This is channels_last without a copy.
        x_NDRC = to_map(x_NTD[:, 1:], grid)
        x_NDRC = F.gelu(self.norm1(self.conv1(x_NDRC)))
        local_NDRC = F.gelu(self.norm2(self.conv2(x_NDRC)))
        x_NDRC = self.norm3(self.conv3(x_NDRC + local_NDRC if self.shortcut else local_NDRC))
        return self.aggregation(x_NTD[:, :1], to_tokens(x_NDRC))


class SplitMlp(nn.Module):
    """A ViT's MLP on the patches alone, bypassed by the class token (Table 2); else as `DAFF`.

    With `pool` a 3 x 3 mean over patches, zero-padded, lies between the two layers. The paper
    describes it as a depth-wise convolution whose weights are all 1/9.
    """

    def __init__(self, dim: int, hidden: int, pool: bool, aggregation: Aggregation) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.pool, self.aggregation = pool, aggregation

    def forward(self, x_NTD: Tensor, grid: Grid) -> Tensor:
        hidden_NTD = F.gelu(self.fc1(x_NTD[:, 1:]))
        if self.pool:
            hidden_NTD = to_tokens(F.avg_pool2d(to_map(hidden_NTD, grid), 3, 1, 1))
        return self.aggregation(x_NTD[:, :1], self.fc2(hidden_NTD))


class PlainMlp(Mlp):
    """A ViT's MLP for all tokens; it ignores the grid."""

    def forward(self, x_NTD: Tensor, grid: Grid) -> Tensor:
        return super().forward(x_NTD)


def build_feed_forward(
    kind: str, dim: int, hidden: int, aggregation: Aggregation, norm: Norm, shortcut: bool
) -> nn.Module:
    """Build a block's feed-forward network; `kind` is `DHVT`'s argument `feed_forward`."""
    if kind == "mlp":
        return PlainMlp(dim, hidden)
    if kind == "daff":
        return DAFF(dim, hidden, norm, shortcut, aggregation)
    return SplitMlp(dim, hidden, kind == "split-pool", aggregation)


class HeadInteractedAttention(nn.Module):
    """HI-MHSA: self-attention over T tokens and one head token per head, `[N, T, D]` to the same.

    A head token is computed from the mean, over all tokens, of the channels that this head reads.
    Head tokens are queries and keys like all others. The mean of their outputs is added to the
    class token, and they are dropped.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, width = num_heads, dim // num_heads
        # This norm has PyTorch's eps of 1e-5, where the others have 1e-6, as in the published code.
        self.head_proj, self.head_norm = nn.Linear(width, dim), nn.LayerNorm(width)
        self.head_pos = nn.Parameter(torch.zeros(1, num_heads, dim))
        self.attn = Attention(dim, num_heads, qkv_bias=True)
        trunc_normal_(self.head_pos, std=0.02)

    def forward(self, x_NTD: Tensor) -> Tensor:
        # The class token counts in the mean, as in the published code.
        mean_NME = x_NTD.mean(1).unflatten(1, (self.num_heads, -1))
        head_NMME = self.head_proj(mean_NME).unflatten(2, (self.num_heads, -1))
        head_NMD = F.gelu(self.head_norm(head_NMME)).flatten(2) + self.head_pos
        out_NTD = self.attn(torch.cat([x_NTD, head_NMD], dim=1))
        sizes = [1, x_NTD.shape[1] - 1, self.num_heads]
        class_N1D, patch_NTD, head_NMD = out_NTD.split(sizes, dim=1)
        return torch.cat([class_N1D + head_NMD.mean(1, keepdim=True), patch_NTD], dim=1)


class Block(nn.Module):
    """Pre-norm block: each branch is added to its input."""

    def __init__(
        self, dim: int, attn: nn.Module, feed_forward: nn.Module, drop_path: float
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn, self.feed_forward = attn, feed_forward
        # Two, as in timm's blocks: a compiled step draws a mask for each module.
        self.drop_path1, self.drop_path2 = (
            branch_drop_path(drop_path, branch) for branch in (attn, feed_forward)
        )

    def forward(self, x_NTD: Tensor, grid: Grid) -> Tensor:
        x_NTD = add_branch(x_NTD, lambda y_NTD: self.attn(self.norm1(y_NTD)), self.drop_path1)
        return add_branch(
            x_NTD, lambda y_NTD: self.feed_forward(self.norm2(y_NTD), grid), self.drop_path2
        )


def check_options(norms: Sequence[str], embedding: str, feed_forward: str, aggregate: str) -> None:
    """Raise ValueError for unknown values of `DHVT`'s options, or values that do not fit."""
    check_choice("embedding", embedding, ("sope", "patch"))
    check_choice("feed_forward", feed_forward, ("daff", "mlp", "split", "split-pool"))
    check_choice("aggregate", aggregate, ("class", "all", "none"))
    for number, norm in enumerate(norms):
        check_choice(f"norms[{number}]", norm, NORMS)
    if len(norms) != 2:
        raise ValueError(f"norms {norms!r} must be two: of the embedding and of DAFF")
    if feed_forward == "mlp" and aggregate != "none":
        raise ValueError(
            'feed_forward="mlp" does not separate the class token; give aggregate="none"'
        )


class DHVT(TokenTransformer):
    """DHVT.

    Args:
        img_size: side of the input in pixels, or both; used only with `pos_embed` and
            `embedding="patch"`, which need a square and a multiple of `patch_size`.
        patch_size: side of a token in pixels: 2, 4, 8 or 16, or any with `embedding="patch"`.
        num_classes: K; 0 builds no heads, and forward returns the pooled features.
        global_pool: input of `head`: the class token ("token"), the mean of the others ("avg"), or
            ("", without heads) all of them.
        num_heads: M; more heads have fewer parameters, because `head_proj` maps D / M to D.
        drop_path_rate: stochastic depth, rising linearly from 0 to this rate over the blocks
            (published recipes: 0.1).
        norms: norm of the embedding, norm of DAFF: "batch" or "layer", the latter over the channels
            of each position (Table 5).
        embedding: SOPE, or a ViT's patch embedding, one convolution without overlap.
        affine: SOPE's affine layers (section 2.2.2).
        head_tokens: HI-MHSA; without it a ViT's attention (Figures 1 and 2).
        pos_embed: add a ViT's position table (Figure 1).
        feed_forward: DAFF; or a ViT's MLP ("mlp"), the same without the class token ("split"), or
            that with the mean of neighbors ("split-pool") (Table 2).
        aggregate: tokens that squeeze and excitation multiply (Tables 2 and 3); "none" with
            `feed_forward="mlp"`.
        shortcut: a residual connection around DAFF's depth-wise convolution (Table 3).
        token_head: a second classifier on every token, as in LV-ViT, for dense labels; MixToken
            then mixes after the embedding.
        fused_head: leave that classifier to the loss in training.
        published: apply weight decay where the published code does, which includes the positions of
            head tokens and the affine layers. The paper does not mention it; the default excludes
            them, like tables, norms and biases.

    Forward takes any size, also not square; the grid has H / `patch_size` rows, rounded up. With
    `pos_embed` or `embedding="patch"` it takes only multiples of `patch_size`. The rest is that of
    `TokenTransformer`. Raises ValueError for arguments that do not fit together.
    """

    embedding_name = "embedding"
    blocks_take_grid = True

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 3,
        mlp_ratio: float = 4.0,
        drop_path_rate: float = 0.0,
        norms: Sequence[Norm] = ("batch", "batch"),
        embedding: Literal["sope", "patch"] = "sope",
        affine: bool = True,
        head_tokens: bool = True,
        pos_embed: bool = False,
        feed_forward: Literal["daff", "mlp", "split", "split-pool"] = "daff",
        aggregate: Literal["class", "all", "none"] = "class",
        shortcut: bool = True,
        token_head: bool = False,
        fused_head: bool = False,
        published: bool = False,
    ) -> None:
        whole_patches = pos_embed or embedding == "patch"
        if not whole_patches:
            # The base class takes squares alone, and only a position table depends on them.
            side = img_size if isinstance(img_size, int) else max(img_size)
            img_size = side // patch_size * patch_size
        super().__init__(img_size, patch_size, embed_dim, depth, num_heads, token_head, fused_head)
        check_options(norms, embedding, feed_forward, aggregate)
        self.whole_patches, self.published = whole_patches, published
        if embedding == "sope":
            self.embedding = SOPE(patch_size, in_chans, embed_dim, affine, norms[0])
        else:
            self.embedding = nn.Sequential(nn.Conv2d(in_chans, embed_dim, patch_size, patch_size))
        table = torch.zeros(1, 1 + self.grid_size**2, embed_dim)
        self.pos_embed = nn.Parameter(table) if pos_embed else None
        attention = partial(Attention, qkv_bias=True)
        if head_tokens:
            attention = HeadInteractedAttention
        self.blocks = nn.ModuleList()
        for rate in drop_path_rates(drop_path_rate, depth):
            attn = attention(embed_dim, num_heads)
            aggregation = Aggregation(embed_dim, aggregate)
            hidden = int(embed_dim * mlp_ratio)
            mlp = build_feed_forward(
                feed_forward, embed_dim, hidden, aggregation, norms[1], shortcut
            )
            self.blocks.append(Block(embed_dim, attn, mlp, rate))
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self._make_heads(num_classes, global_pool)
        trunc_normal_(self.cls_token, std=0.02)
        if self.pos_embed is not None:
            trunc_normal_(self.pos_embed, std=0.02)
        # The classifiers too, as in the published code; convolutions keep PyTorch's default.
        self.apply(init_linear)

    def token_grid(self, image_NCHW: Tensor) -> Grid:
        """Return rows and columns of tokens.

        Raises ValueError for partial patches where a part of a ViT needs whole ones.
        """
        if self.whole_patches:
            return super().token_grid(image_NCHW)
        H, W = image_NCHW.shape[2:]
        return -(-H // self.patch_size), -(-W // self.patch_size)

    def no_weight_decay(self) -> set[str]:
        """Return names that AdamW must not decay, in addition to biases and vectors."""
        names = super().no_weight_decay()
        if not self.published:
            tables = (".head_pos", ".alpha", ".beta")
            names |= {name for name, _ in self.named_parameters() if name.endswith(tables)}
        return names


# No weights were ever published, so only sizes need fitting.
checkpoint_filter_fn = fit_weights

# ImageNet's mean and deviation for all datasets, as in the published code. CIFAR's images are not
# cropped. Models have the number of classes that is stated here.
_cfg = partial(pretrained_cfg, "embedding.1", ("head", "token_head"))
_CIFAR, _DOMAIN = _cfg(32, 1.0, 100), _cfg(224, 0.875, 345)
_IMAGENET = _cfg(224, 0.875)

# Table 11, except for the first. The constructor's defaults are DHVT-T for ImageNet.
register_family(
    __name__,
    DHVT,
    {
        # For demonstrations at 64 px on a CPU: 8 x 8 tokens and 4 blocks of width 96 like
        # lvvit_micro, and 4 heads like DHVT-T on CIFAR.
        "dhvt_micro": (
            _cfg(64, 1.0),
            dict(img_size=64, patch_size=8, embed_dim=96, num_heads=4, depth=4),
        ),
        # 8 x 8 tokens, 6.0 M parameters
        "dhvt_tiny_cifar_patch4": (_CIFAR, dict(img_size=32, patch_size=4, num_heads=4)),
        # 16 x 16 tokens, 5.8 M parameters
        "dhvt_tiny_cifar_patch2": (_CIFAR, dict(img_size=32, patch_size=2, num_heads=4)),
        # 8 x 8 tokens, 23.4 M parameters
        "dhvt_small_cifar_patch4": (
            _CIFAR,
            dict(img_size=32, patch_size=4, embed_dim=384, num_heads=8),
        ),
        # 16 x 16 tokens, 22.8 M parameters
        "dhvt_small_cifar_patch2": (
            _CIFAR,
            dict(img_size=32, patch_size=2, embed_dim=384, num_heads=8),
        ),
        # 6.1 M parameters
        "dhvt_tiny_domain_patch16": (_DOMAIN, dict(num_heads=4)),
        # 23.8 M parameters
        "dhvt_small_domain_patch16": (_DOMAIN, dict(embed_dim=384, num_heads=6)),
        # 6.3 M parameters; the paper gives 6.2 M
        "dhvt_tiny_imagenet_patch16": (_IMAGENET, {}),
        # 24.0 M parameters; the paper gives 24.1 M
        "dhvt_small_imagenet_patch16": (_IMAGENET, dict(embed_dim=384, num_heads=6)),
    },
    checkpoint_filter_fn,
)

"""T2T-ViT: tokens form an image that is split again with overlap, twice, before a plain ViT.

Tokens-to-Token ViT (arXiv 2101.11986), in the variant whose token module is a Performer. The
parameter counts equal the published ones exactly (tests/models/test_t2t.py).
"""

import math
from contextlib import nullcontext

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.models.lvvit import Block
from densefeed.models.registration import pretrained_cfg, register_family
from densefeed.models.token_transformer import (
    TokenTransformer,
    drop_path_rates,
    fit_weights,
    init_linear,
    to_map,
)

# N images   T tokens   D width   E width of a token inside the token module
# M random features   R x C a grid

# Kernel, stride and padding of the soft splits.
SPLITS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))
# In the token module, as published.
DROPOUT = 0.1


class TokenPerformer(nn.Module):
    """A one-head block with attention that costs T M instead of T^2: FAVOR+ (arXiv 2009.14794).

    Maps `[N, T, in_dim]` to `[N, T, dim]`. exp(q k) is estimated by the product of
    exp(w q - |q|^2 / 2) / sqrt(M) and the same function of k, over M = dim / 2 rows w that are
    orthogonal, have length sqrt(M), and are never trained. This is computed in float32, also under
    autocast: with 16-bit exponentials it gave NaN. The residual is v, since the width changes.
    """

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        features = dim // 2
        self.norm1, self.norm2 = nn.LayerNorm(in_dim), nn.LayerNorm(dim)
        self.kqv, self.proj = nn.Linear(in_dim, 3 * dim), nn.Linear(dim, dim)
        self.drop = nn.Dropout(DROPOUT)
        self.mlp = nn.Sequential(
            nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim), nn.Dropout(DROPOUT)
        )
        self.register_buffer(
            "w", nn.init.orthogonal_(torch.empty(features, dim)) * math.sqrt(features)
        )

    def random_features(self, x_NTE: Tensor) -> Tensor:
        """Return positive features `[N, T, M]`, whose products estimate exp of products of `x`."""
        exponent_NTM = F.linear(x_NTE, self.w) - x_NTE.square().sum(-1, keepdim=True) / 2
        return torch.exp(exponent_NTM) / math.sqrt(self.w.shape[0])

    def forward(self, x_NTE: Tensor) -> Tensor:
        # Keys come first in the published weights.
        k, q, v = self.kqv(self.norm1(x_NTE)).chunk(3, dim=-1)
        device = x_NTE.device.type
        # The meta device, where operations are counted, has no autocast.
        with (
            torch.autocast(device, enabled=False)
            if torch.amp.is_autocast_available(device)
            else nullcontext()
        ):
            dtype = torch.promote_types(v.dtype, torch.float32)
            k_NTM, q_NTM = self.random_features(k.to(dtype)), self.random_features(q.to(dtype))
            sums_NT1 = q_NTM @ k_NTM.sum(1).unsqueeze(-1)
            # k with v first: M x E numbers, where queries with keys would give T x T. 1e-8, the
            # published value, keeps the quotient finite.
            attended_NTE = q_NTM @ (k_NTM.transpose(1, 2) @ v.to(dtype)) / (sums_NT1 + 1e-8)
        x_NTE = v + self.drop(self.proj(attended_NTE.to(v.dtype)))
        return x_NTE + self.mlp(self.norm2(x_NTE))


class TokensToToken(nn.Module):
    """Maps images `[N, in_chans, H, W]` to tokens `[N, embed_dim, H / 16, W / 16]`.

    H and W are multiples of 16.
    """

    def __init__(self, in_chans: int, embed_dim: int, token_dim: int) -> None:
        super().__init__()
        first, second, last = (kernel**2 for kernel, _, _ in SPLITS)
        self.attention1 = TokenPerformer(first * in_chans, token_dim)
        self.attention2 = TokenPerformer(second * token_dim, token_dim)
        self.project = nn.Linear(last * token_dim, embed_dim)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        layers = self.attention1, self.attention2, self.project
        for (kernel, stride, padding), layer in zip(SPLITS, layers, strict=True):
            grid = [size // stride for size in x_NCHW.shape[2:]]
            x_NTE = layer(F.unfold(x_NCHW, kernel, padding=padding, stride=stride).transpose(1, 2))
            x_NCHW = to_map(x_NTE, grid)
        return x_NCHW


def sinusoids(tokens: int, width: int) -> Tensor:
    """Return positions `[1, tokens, width]`: sines in even channels, cosines in odd ones.

    Wavelengths rise from 2 pi to 10,000 times that.
    """
    # In float64 and rounded once, as the published code does with NumPy.
    pair = torch.arange(width, dtype=torch.float64).div(2, rounding_mode="floor")
    angle = torch.arange(tokens, dtype=torch.float64)[:, None] * 10000 ** -(pair * 2 / width)
    return torch.where(torch.arange(width) % 2 == 0, angle.sin(), angle.cos()).float()[None]


class T2TViT(TokenTransformer):
    """T2T-ViT.

    Args:
        img_size: side in pixels of the input that the positions are built for, or two equal sides;
            a multiple of 16.
        num_classes: K; 0 builds no heads, and forward returns the pooled features.
        global_pool: input of `head`: the class token ("token"), the mean of the others ("avg"), or
            ("", without heads) all of them.
        token_dim: width of a token inside the token module.
        drop_path_rate: stochastic depth, rising linearly from 0 to this rate over the blocks
            (published: 0.1).
        token_head: a second classifier on every token, as in LV-ViT, for dense labels; MixToken
            then mixes after the token module.
        fused_head: leave that classifier to the loss in training.
        published: scale attention's products by embed_dim^-1/2, as the published weights were
            trained, instead of (embed_dim / num_heads)^-1/2.

    Positions and the random rows of the Performers are buffers: saved, never trained. Forward and
    the rest are those of `TokenTransformer`. Raises ValueError for sizes that do not fit together.
    """

    embedding_name = "tokens_to_token"
    # The first layer is a norm, in float32 under autocast.
    exact_images = True

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 384,
        depth: int = 14,
        num_heads: int = 6,
        mlp_ratio: float = 3.0,
        token_dim: int = 64,
        drop_path_rate: float = 0.0,
        token_head: bool = False,
        fused_head: bool = False,
        published: bool = False,
    ) -> None:
        super().__init__(img_size, 16, embed_dim, depth, num_heads, token_head, fused_head)
        self.tokens_to_token = TokensToToken(in_chans, embed_dim, token_dim)
        self.register_buffer("pos_embed", sinusoids(1 + self.grid_size**2, embed_dim))
        self.blocks = nn.ModuleList(
            Block(embed_dim, num_heads, mlp_ratio, rate)
            for rate in drop_path_rates(drop_path_rate, depth)
        )
        if published:
            for block in self.blocks:
                block.attn.scale = embed_dim**-0.5
        self.norm = nn.LayerNorm(embed_dim)
        self._make_heads(num_classes, global_pool)
        trunc_normal_(self.cls_token, std=0.02)
        self.apply(init_linear)


# The published names are used here too, so only sizes need fitting.
checkpoint_filter_fn = fit_weights

_CFG = pretrained_cfg("tokens_to_token.project", ("head", "token_head"))

register_family(
    __name__,
    T2TViT,
    {
        # 4.3 M parameters
        "t2t_vit_7": (_CFG, dict(embed_dim=256, depth=7, num_heads=4, mlp_ratio=2.0)),
        # 21.5 M parameters
        "t2t_vit_14": (_CFG, {}),
    },
    checkpoint_filter_fn,
)

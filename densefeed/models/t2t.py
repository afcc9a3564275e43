"""T2T-ViT-14: tokens are made of tokens, twice re-arranged into an image and split anew with
overlap, before a plain transformer.

Tokens-to-Token ViT (arXiv 2101.11986), the variant whose token module is a Performer; counts are
met to the unit (tests/models/test_t2t.py).
"""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from timm.layers import trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.models.lvvit import Block
from densefeed.models.token_transformer import TokenTransformer, fit_weights, init_linear

# N images   T tokens   D width   E width of a token while it is made   M random features   R x C a grid

SPLITS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))  # kernel, stride and padding of the soft splits


class TokenPerformer(nn.Module):
    """A block of one head whose attention costs T M, not T^2: FAVOR+ (arXiv 2009.14794), `[N, T,
    in_dim]` to `[N, T, dim]`.

    exp(q k) is estimated by exp(w q - |q|^2 / 2) / sqrt(M) and likewise of k, over M = dim / 2 rows
    w that are orthogonal, of length sqrt(M), and never trained. All of it is in float32, under
    autocast too: exponentials of 16 bits gave NaN. What is added to the attention is v, since the
    width changes.
    """

    def __init__(self, in_dim: int, dim: int, dropout: float) -> None:
        super().__init__()
        features = dim // 2
        self.norm1, self.norm2 = nn.LayerNorm(in_dim), nn.LayerNorm(dim)
        self.kqv, self.proj = nn.Linear(in_dim, 3 * dim), nn.Linear(dim, dim)
        self.drop = nn.Dropout(dropout)
        self.mlp = nn.Sequential(
            nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim), nn.Dropout(dropout)
        )
        self.register_buffer(
            "w", nn.init.orthogonal_(torch.empty(features, dim)) * math.sqrt(features)
        )

    def features_of(self, x_NTE: Tensor) -> Tensor:
        """Positive features `[N, T, M]`, whose products estimate exp of the products of `x`."""
        return torch.exp(
            F.linear(x_NTE, self.w) - x_NTE.square().sum(-1, keepdim=True) / 2
        ) / math.sqrt(self.w.shape[0])

    def forward(self, x_NTE: Tensor) -> Tensor:
        k, q, v = self.kqv(self.norm1(x_NTE)).chunk(3, dim=-1)
        device = x_NTE.device.type
        with (
            torch.autocast(device, enabled=False)
            if torch.amp.is_autocast_available(device)
            else nullcontext()
        ):
            at_least = torch.promote_types(v.dtype, torch.float32)
            k_NTM, q_NTM = self.features_of(k.to(at_least)), self.features_of(q.to(at_least))
            sums_NT1 = q_NTM @ k_NTM.sum(1).unsqueeze(-1)
            attended_NTE = q_NTM @ (k_NTM.transpose(1, 2) @ v.to(at_least)) / (sums_NT1 + 1e-8)
        x_NTE = v + self.drop(self.proj(attended_NTE.to(v.dtype)))
        return x_NTE + self.mlp(self.norm2(x_NTE))


class TokensToToken(nn.Module):
    """Images `[N, in_chans, H, W]` to a map of tokens `[N, embed_dim, H / 16, W / 16]`, both
    multiples of 16.
    """

    def __init__(self, in_chans: int, embed_dim: int, token_dim: int, dropout: float) -> None:
        super().__init__()
        first, again, last = (kernel**2 for kernel, _, _ in SPLITS)
        self.attention1 = TokenPerformer(first * in_chans, token_dim, dropout)
        self.attention2 = TokenPerformer(again * token_dim, token_dim, dropout)
        self.project = nn.Linear(last * token_dim, embed_dim)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        for (kernel, stride, padding), make in zip(
            SPLITS, (self.attention1, self.attention2, self.project), strict=True
        ):
            grid = [size // stride for size in x_NCHW.shape[2:]]
            x_NTE = make(F.unfold(x_NCHW, kernel, padding=padding, stride=stride).transpose(1, 2))
            x_NCHW = x_NTE.transpose(1, 2).unflatten(2, grid)
        return x_NCHW


def sinusoids(tokens: int, width: int) -> Tensor:
    """Positions `[1, tokens, width]`: sines of even channels, cosines of odd ones, wave lengths
    from 2 pi to 10,000 times that.
    """
    rate = 10000 ** -(
        torch.arange(width, dtype=torch.float64).div(2, rounding_mode="floor") * 2 / width
    )
    angle = torch.arange(tokens, dtype=torch.float64)[:, None] * rate
    return torch.where(torch.arange(width) % 2 == 0, angle.sin(), angle.cos()).float()[None]


class T2TViT(TokenTransformer):
    """T2T-ViT.

    Args:
        img_size: side of the input that the positions are made for, pixels; a multiple of 16. Or a
            pair of equals.
        num_classes: K; 0 builds no heads, and forward returns the pooled features.
        global_pool: what `head` reads: the class token, the mean ("avg") of the others, or ("",
            without heads) all of them.
        token_dim: width of a token while it is made.
        token_dropout: inside the token module (published: 0.1), on in training.
        drop_path_rate: stochastic depth, rising linearly from 0 to this rate over the blocks
            (published: 0.1).
        token_head: a second classifier on every token, as LV-ViT's, for token labels; MixToken then
            mixes after the token module.
        fused_head: in training leave that classifier to the loss.
        published: scale products by embed_dim^-1/2, with which the published weights were trained,
            instead of a head's width.

    Positions and the Performers' random rows are buffers: saved, never trained. Forward and the
    rest are `TokenTransformer`'s. Raises ValueError for sizes that do not fit together.
    """

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
        token_dropout: float = 0.1,
        drop_path_rate: float = 0.0,
        token_head: bool = False,
        fused_head: bool = False,
        published: bool = False,
    ) -> None:
        super().__init__()
        self._begin(img_size, 16, in_chans, embed_dim, depth, num_heads, token_head, fused_head)
        side = 16 * self.grid_size
        if img_size not in (side, (side, side)):
            raise ValueError(f"img_size {img_size} must be a multiple of 16")
        self.tokens_to_token = TokensToToken(in_chans, embed_dim, token_dim, token_dropout)
        self.register_buffer("pos_embed", sinusoids(1 + self.grid_size**2, embed_dim))
        rates = [drop_path_rate * number / max(depth - 1, 1) for number in range(depth)]
        plain = dict(residual_divisor=1.0, qkv_bias=False, norm_groups=0, post_norm=False)
        self.blocks = nn.ModuleList(
            Block(embed_dim, num_heads, mlp_ratio, rate, **plain) for rate in rates
        )
        if published:
            for block in self.blocks:
                block.attn.scale = embed_dim**-0.5
        self.norm = nn.LayerNorm(embed_dim)
        self._make_heads(num_classes, global_pool)
        trunc_normal_(self.cls_token, std=0.02)
        self.apply(init_linear)

    def embed_patches(self, image_NCHW: Tensor) -> Tensor:
        self.grid_of(image_NCHW)  # refuses what would lose pixels
        return self.tokens_to_token(image_NCHW)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns of parameter names by depth, for timm's layer-wise decay; `coarse` changes
        nothing, as blocks have no parts.
        """
        return {
            "stem": r"^cls_token|^pos_embed|^tokens_to_token",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: T2TViT) -> dict[str, Any]:
    """A state dict made to fit this model: positions at its size, no token head where it has none;
    the published names are ours.
    """
    return fit_weights(state_dict, model)


_CFG = {
    "input_size": (3, 224, 224),
    "crop_pct": 0.9,
    "interpolation": "bicubic",
    "num_classes": 1000,
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "first_conv": "tokens_to_token.project",
    "classifier": ("head", "token_head"),
}
default_cfgs = generate_default_cfgs({"t2t_vit_7": _CFG, "t2t_vit_14": _CFG})


def _build(name: str, pretrained: bool, sizes: dict, kwargs: dict) -> nn.Module:
    return build_model_with_cfg(
        T2TViT,
        name,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **(sizes | kwargs),
    )


@register_model
def t2t_vit_7(pretrained: bool = False, **kwargs) -> nn.Module:
    """T2T-ViT-7: 4.3 M parameters."""
    return _build(
        "t2t_vit_7", pretrained, dict(embed_dim=256, depth=7, num_heads=4, mlp_ratio=2.0), kwargs
    )


@register_model
def t2t_vit_14(pretrained: bool = False, **kwargs) -> nn.Module:
    """T2T-ViT-14: 21.5 M parameters."""
    return _build("t2t_vit_14", pretrained, {}, kwargs)

"""LV-ViT: a vision transformer with a convolutional stem, scaled residuals and a head on every token.

Token Labeling (arXiv 2104.10858), sections 3.2 and 4; the layers are those of the published models, whose parameter
counts are met to the unit (tests/models/test_lvvit.py).
"""

from typing import NamedTuple

import torch
from timm.layers import DropPath, Mlp, resample_abs_pos_embed, trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.nn import functional as F

# N images   T tokens without the class token   D width   K classes   P side of the token grid


class TokenLogits(NamedTuple):
    """What a model with a token head returns in training: `cls` `[N, K]` and `tokens` `[N, T, K]`, row-major over the grid."""

    cls: Tensor
    tokens: Tensor


class TokenFeatures(NamedTuple):
    """What a model with a fused head returns in training: `cls` `[N, K]`, `tokens` `[N, T, D]` and the head that is due on them.

    For `token_labeling.fused_token_loss`, which never holds the tokens' logits whole.
    """

    cls: Tensor
    tokens: Tensor
    head: nn.Linear


class Stem(nn.Sequential):
    """Patch embedding "4_2" of the paper's Table 4: 7x7/2, two 3x3/1, then a convolution whose kernel is its stride."""

    def __init__(self, in_chans: int, width: int, embed_dim: int, patch_size: int) -> None:
        layers: list[nn.Module] = []
        for kernel, stride in ((7, 2), (3, 1), (3, 1)):
            layers += [
                nn.Conv2d(in_chans, width, kernel, stride, kernel // 2, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ]
            in_chans = width
        super().__init__(*layers, nn.Conv2d(width, embed_dim, patch_size // 2, patch_size // 2))


class Attention(nn.Module):
    """Multi-head self-attention; q, k and v carry no bias."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x_NTD: Tensor) -> Tensor:
        N, T, D = x_NTD.shape
        q, k, v = self.qkv(x_NTD).view(N, T, 3, self.num_heads, D // self.num_heads).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(N, T, D))


class Block(nn.Module):
    """Pre-norm block of equation 5: each branch is divided by `residual_divisor` (1/alpha in the paper)."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, drop_path: float, residual_divisor: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.residual_divisor = residual_divisor

    def forward(self, x_NTD: Tensor) -> Tensor:
        x_NTD = x_NTD + self.drop_path(self.attn(self.norm1(x_NTD))) / self.residual_divisor
        return x_NTD + self.drop_path(self.mlp(self.norm2(x_NTD))) / self.residual_divisor


class LVViT(nn.Module):
    """LV-ViT.

    Args:
        img_size: side of the input that the position table is built for, pixels; a multiple of `patch_size`.
        patch_size: side of a token, pixels; even, since the stem halves the input before it cuts patches.
        stem_width: channels of the stem's convolutions (64; 128 for L).
        residual_divisor: divides every residual branch (1, 2, 2, 3 for T, S, M, L).
        drop_path_rate: stochastic depth, rising linearly from 0 to this rate over the blocks.
        token_head: a second classifier on every token, trained by token labels and added to the class token's answer.
        fused_head: in training leave that classifier to the loss, which saves memory where classes are many (21,841).

    Forward takes images `[N, in_chans, H, W]`; for another size than `img_size` (H and W multiples of `patch_size`, else
    ValueError) the position table is resampled, bicubic and antialiased, the class token's place kept. It returns `[N, K]`
    logits; in training a model with a token head returns `TokenLogits` instead, or with a fused head `TokenFeatures`.
    At evaluation a token head adds 0.5 times the maximum over tokens (as published).
    """

    def __init__(
        self,
        img_size: int = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 384,
        depth: int = 16,
        num_heads: int = 6,
        mlp_ratio: float = 3.0,
        stem_width: int = 64,
        residual_divisor: float = 2.0,
        drop_path_rate: float = 0.0,
        token_head: bool = True,
        fused_head: bool = False,
    ) -> None:
        super().__init__()
        if fused_head and not token_head:
            raise ValueError("fused_head needs token_head")
        if img_size % patch_size or patch_size % 2:
            raise ValueError(f"img_size {img_size} must be a multiple of patch_size {patch_size}, and that even")
        self.num_classes, self.num_features = num_classes, embed_dim
        self.patch_size, self.grid_size = patch_size, img_size // patch_size
        self.stem = Stem(in_chans, stem_width, embed_dim, patch_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + self.grid_size**2, embed_dim))
        rates = [drop_path_rate * number / max(depth - 1, 1) for number in range(depth)]
        self.blocks = nn.ModuleList(Block(embed_dim, num_heads, mlp_ratio, rate, residual_divisor) for rate in rates)
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, num_classes)
        self.token_head = nn.Linear(embed_dim, num_classes) if token_head else None
        self.fused_head = fused_head
        self._init_weights()

    def _init_weights(self) -> None:
        """Truncated normal, std 0.02, for tables and linear layers; convolutions and norms keep PyTorch's defaults."""
        trunc_normal_(self.pos_embed, std=0.02)
        trunc_normal_(self.cls_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names that AdamW must not decay, beside biases and one-dimensional tables."""
        return {"pos_embed", "cls_token"}

    def grid_of(self, image_NCHW: Tensor) -> tuple[int, int]:
        """Rows and columns of tokens of these images. ValueError if their size is no multiple of the patch size."""
        H, W = image_NCHW.shape[2:]
        if H % self.patch_size or W % self.patch_size:
            raise ValueError(f"inputs of {H} x {W} pixels must be multiples of patch_size {self.patch_size}")
        return H // self.patch_size, W // self.patch_size

    def forward_features(self, image_NCHW: Tensor, mix_PP: Tensor | None = None) -> Tensor:
        """Normalised tokens `[N, 1 + T, D]`, class token first.

        `mix_PP` (bool `[P, P]`, the input's grid; MixToken) marks the tokens that come from the partner image, which is the batch reversed;
        they are exchanged after the patch embedding and before positions are added (equation 8).
        """
        pos_embed = resample_abs_pos_embed(self.pos_embed, list(self.grid_of(image_NCHW)), [self.grid_size] * 2)
        x_NDPP = self.stem(image_NCHW)
        if mix_PP is not None:
            x_NDPP = torch.where(mix_PP, x_NDPP.flip(0), x_NDPP)
        x_NTD = x_NDPP.flatten(2).transpose(1, 2)
        x_NTD = torch.cat([self.cls_token.expand(len(x_NTD), -1, -1), x_NTD], dim=1) + pos_embed
        for block in self.blocks:
            x_NTD = block(x_NTD)
        return self.norm(x_NTD)

    def forward(self, image_NCHW: Tensor, mix_PP: Tensor | None = None) -> Tensor | TokenLogits | TokenFeatures:
        x_NTD = self.forward_features(image_NCHW, mix_PP)
        cls_NK = self.head(x_NTD[:, 0])
        if self.token_head is None:
            return cls_NK
        x_NTD = x_NTD[:, 1:]
        # Back to the image that each token shows, so that token labels need no mixing. The published code exchanges logits;
        # the head sees one token at a time, so features give the same at D / K of the traffic.
        if mix_PP is not None:
            x_NTD = torch.where(mix_PP.flatten()[:, None], x_NTD.flip(0), x_NTD)
        if self.training and self.fused_head:
            return TokenFeatures(cls_NK, x_NTD, self.token_head)
        tokens_NTK = self.token_head(x_NTD)
        if self.training:
            return TokenLogits(cls_NK, tokens_NTK)
        return cls_NK + 0.5 * tokens_NTK.amax(1)

    def forward_token_logits(self, image_NCHW: Tensor) -> Tensor:
        """Logits of every token as a map, `[N, K, P, P]`: what this model says as a dense teacher."""
        head = self.head if self.token_head is None else self.token_head
        logits_NTK = head(self.forward_features(image_NCHW)[:, 1:])
        return logits_NTK.transpose(1, 2).unflatten(2, self.grid_of(image_NCHW))


def _cfg(crop_pct: float, size: int = 224) -> dict:
    return {
        "input_size": (3, size, size), "crop_pct": crop_pct, "interpolation": "bicubic", "num_classes": 1000,
        "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225),
        "first_conv": "stem.0", "classifier": ("head", "token_head"),
    }  # fmt: skip


# timm reads this table by its name when a model registers; crop_pct as in the published evaluation.
default_cfgs = generate_default_cfgs(
    {
        "lvvit_micro": _cfg(1.0, 64),
        "lvvit_t": _cfg(0.9),
        "lvvit_s": _cfg(0.9),
        "lvvit_m": _cfg(1.0),
        "lvvit_l": _cfg(1.0),
    }
)


@register_model
def lvvit_micro(pretrained: bool = False, **kwargs) -> LVViT:
    """For demonstrations at 64 px on a CPU: patch 8, narrow stem."""
    sizes = dict(img_size=64, patch_size=8, embed_dim=96, depth=4, num_heads=3, stem_width=16, residual_divisor=1.0)
    return build_model_with_cfg(LVViT, "lvvit_micro", pretrained, **(sizes | kwargs))


@register_model
def lvvit_t(pretrained: bool = False, **kwargs) -> LVViT:
    """LV-ViT-T: 8.5 M parameters."""
    return build_model_with_cfg(
        LVViT, "lvvit_t", pretrained, **(dict(embed_dim=240, depth=12, num_heads=4, residual_divisor=1.0) | kwargs)
    )


@register_model
def lvvit_s(pretrained: bool = False, **kwargs) -> LVViT:
    """LV-ViT-S: 26.2 M parameters."""
    return build_model_with_cfg(LVViT, "lvvit_s", pretrained, **(dict(embed_dim=384, depth=16, num_heads=6) | kwargs))


@register_model
def lvvit_m(pretrained: bool = False, **kwargs) -> LVViT:
    """LV-ViT-M: 55.8 M parameters."""
    return build_model_with_cfg(LVViT, "lvvit_m", pretrained, **(dict(embed_dim=512, depth=20, num_heads=8) | kwargs))


@register_model
def lvvit_l(pretrained: bool = False, **kwargs) -> LVViT:
    """LV-ViT-L: 150.0 M parameters."""
    sizes = dict(embed_dim=768, depth=24, num_heads=12, stem_width=128, residual_divisor=3.0)
    return build_model_with_cfg(LVViT, "lvvit_l", pretrained, **(sizes | kwargs))

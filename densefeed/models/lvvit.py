"""LV-ViT: a vision transformer with a convolutional stem, scaled residuals and a head on every
token.

Token Labeling (arXiv 2104.10858), sections 3.2 and 4; the layers are those of the published models,
whose parameter counts are met to the unit (tests/models/test_lvvit.py). The rows of its ablations
(Tables 3, 4, 5 and 9) are arguments.
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import DropPath, Mlp, trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.models.token_transformer import TokenTransformer, fit_weights, init_linear

# N images   T tokens without the class token   D width   K classes   P side of the token grid


class Stem(nn.Sequential):
    """Patch embedding: convolutions given as (kernel, stride), the last of which projects to
    `embed_dim` (Table 4).

    All but the last carry no bias and are followed by BatchNorm and ReLU; the last has a bias and
    no norm. Forward takes `[N, in_chans, H, W]` and returns `[N, embed_dim, H / S, W / S]`, S the
    product of the strides, which must divide H and W. Raises ValueError for a kernel with which no
    equal padding on both sides gives that size.
    """

    def __init__(
        self, in_chans: int, width: int, embed_dim: int, convs: Sequence[tuple[int, int]]
    ) -> None:
        layers: list[nn.Module] = []
        for number, (kernel, stride) in enumerate(convs, start=1):
            # Exactly size / stride outputs need kernel - stride <= 2 * padding < kernel; the least
            # such padding is the published one: 3 for 7/2, 1 for 3/1, 0 for 8/8. The paper gives
            # none for 3/2 and 8/4: 1 and 2.
            padding = math.ceil((kernel - stride) / 2)
            if not 1 <= stride <= kernel or 2 * padding >= kernel:
                raise ValueError(
                    f"stem: kernel {kernel} with stride {stride} leaves out pixels or shifts them; "
                    "choose a kernel that is no smaller than its stride, and odd where the stride is 1"
                )
            if number == len(convs):
                layers.append(nn.Conv2d(in_chans, embed_dim, kernel, stride, padding))
            else:
                layers += [
                    nn.Conv2d(in_chans, width, kernel, stride, padding, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(inplace=True),
                ]
                in_chans = width
        super().__init__(*layers)


class TokenGroupNorm(nn.GroupNorm):
    """GroupNorm over the channels of each token of `[N, T, D]`; with one group it is LayerNorm.

    Section 4.3 names no axes. Tokens are not normalized together: the paper's GroupNorm of one
    group scores as LayerNorm does (Table 9), and a token's value must not depend on how many tokens
    there are.
    """

    def forward(self, x_NTD: Tensor) -> Tensor:
        return super().forward(x_NTD.flatten(0, -2)).view_as(x_NTD)


class Attention(nn.Module):
    """Multi-head self-attention; q, k and v carry no bias unless `qkv_bias`. `scale`: of the
    products, None for width^-1/2 of a head.
    """

    def __init__(
        self, dim: int, num_heads: int, qkv_bias: bool, scale: float | None = None
    ) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, scale
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x_NTD: Tensor) -> Tensor:
        N, T, D = x_NTD.shape
        q, k, v = (
            self.qkv(x_NTD)
            .view(N, T, 3, self.num_heads, D // self.num_heads)
            .permute(2, 0, 3, 1, 4)
        )
        return self.proj(
            F.scaled_dot_product_attention(q, k, v, scale=self.scale)
            .transpose(1, 2)
            .reshape(N, T, D)
        )


class Block(nn.Module):
    """Pre-norm block of equation 5: each branch is divided by `residual_divisor` (1/alpha in the
    paper).

    With `post_norm` the norms follow the sums (section 4.3) instead of opening the branches.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        drop_path: float,
        residual_divisor: float,
        qkv_bias: bool,
        norm_groups: int,
        post_norm: bool,
    ) -> None:
        super().__init__()
        norm = partial(TokenGroupNorm, norm_groups) if norm_groups else nn.LayerNorm
        self.norm1, self.norm2 = norm(dim), norm(dim)
        self.attn = Attention(dim, num_heads, qkv_bias)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.residual_divisor, self.post_norm = residual_divisor, post_norm

    def forward(self, x_NTD: Tensor) -> Tensor:
        for branch, norm in ((self.attn, self.norm1), (self.mlp, self.norm2)):
            branch_NTD = (
                self.drop_path(branch(x_NTD if self.post_norm else norm(x_NTD)))
                / self.residual_divisor
            )
            x_NTD = norm(x_NTD + branch_NTD) if self.post_norm else x_NTD + branch_NTD
        return x_NTD


class LVViT(TokenTransformer):
    """LV-ViT.

    Args:
        img_size: side of the input that the position table is built for, pixels; a multiple of
            `patch_size`. Or a pair of equals.
        patch_size: side of a token, pixels; even unless `stem` is given, since the published stem
            halves the input first.
        num_classes: K; 0 builds no heads, and forward returns the pooled features.
        global_pool: what `head` reads: the class token, the mean ("avg") of the others, or ("",
            without heads) all of them.
        stem: (kernel, stride) of the stem's convolutions, the last the projection (Table 4); their
            strides multiply to `patch_size`. None: as published, (7, 2), (3, 1), (3, 1), then
            kernel = stride = `patch_size` / 2.
        stem_width: channels of the stem's convolutions (64; 128 for L).
        residual_divisor: divides every residual branch (1, 2, 2, 3 for T, S, M, L; Table 5).
        qkv_bias: a bias on q, k and v, as in DeiT (Table 3's first row).
        norm_groups: 0 for LayerNorm, else the groups of a GroupNorm in the blocks (Table 9).
        post_norm: norms after the sums; the final norm stays. Diverges in the paper (section 4.3).
        drop_path_rate: stochastic depth, rising linearly from 0 to this rate over the blocks.
        token_head: a second classifier on every token, trained by token labels and added to the
            class token's answer.
        fused_head: in training leave that classifier to the loss, which saves memory where classes
            are many (21,841).

    Forward and the rest of the interface are `TokenTransformer`'s; H and W must be multiples of
    `patch_size`. Raises ValueError for sizes that do not fit together.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 384,
        depth: int = 16,
        num_heads: int = 6,
        mlp_ratio: float = 3.0,
        stem: Sequence[tuple[int, int]] | None = None,
        stem_width: int = 64,
        residual_divisor: float = 2.0,
        qkv_bias: bool = False,
        norm_groups: int = 0,
        post_norm: bool = False,
        drop_path_rate: float = 0.0,
        token_head: bool = True,
        fused_head: bool = False,
    ) -> None:
        super().__init__()
        self._begin(
            img_size, patch_size, in_chans, embed_dim, depth, num_heads, token_head, fused_head
        )
        side = self.grid_size * patch_size
        if img_size not in (side, (side, side)) or (stem is None and patch_size % 2):
            raise ValueError(
                f"img_size {img_size} must be a multiple of patch_size {patch_size}, and that even"
            )
        convs = (
            ((7, 2), (3, 1), (3, 1), (patch_size // 2, patch_size // 2)) if stem is None else stem
        )
        if not convs or not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in convs):
            raise ValueError(f"stem {stem!r} must be pairs (kernel, stride), as ((16, 16),) is")
        if math.prod(stride for _, stride in convs) != patch_size:
            raise ValueError(
                f"stem: the strides of {tuple(convs)} must multiply to patch_size {patch_size}"
            )
        self.stem = Stem(in_chans, stem_width, embed_dim, convs)
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + self.grid_size**2, embed_dim))
        rates = [drop_path_rate * number / max(depth - 1, 1) for number in range(depth)]
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                num_heads,
                mlp_ratio,
                rate,
                residual_divisor,
                qkv_bias,
                norm_groups,
                post_norm,
            )
            for rate in rates
        )
        self.norm = nn.LayerNorm(embed_dim)
        self._make_heads(num_classes, global_pool)
        trunc_normal_(self.pos_embed, std=0.02)
        trunc_normal_(self.cls_token, std=0.02)
        self.apply(init_linear)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns of parameter names by depth, for timm's layer-wise decay; `coarse` changes
        nothing, as blocks have no parts.
        """
        return {
            "stem": r"^cls_token|^pos_embed|^stem",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def embed_patches(self, image_NCHW: Tensor) -> Tensor:
        self.grid_of(image_NCHW)  # refuses what would lose pixels
        return self.stem(image_NCHW)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As every module's, and takes the published names too: timm's `checkpoint_path=` passes
        through no filter.
        """
        return super().load_state_dict(with_our_names(state_dict, self), strict, assign)


# Stem tensors of published files. `convN` and `proj` are the layers of the reference's table 1.2;
# `bnN` is how torchvision's networks name what follows them and `normN` the other habit; `conv.N`
# is the stem as one sequence, as timm's VOLO, by the same authors, has it: its numbers are ours. Of
# the rest, `cls_token`, `pos_embed`, `blocks.N.norm1`, `attn.qkv`, `attn.proj`, `mlp.fc1`,
# `mlp.fc2`, `norm` and `head` are timm's and ours alike; `aux_head` (1.3) is our `token_head`.
STEM_NAME = re.compile(r"^patch_embed\.(?:(conv|bn|norm)(\d+)|conv\.(\d+)|(proj))\.")


def with_our_names(state_dict: Mapping[str, Any], model: LVViT) -> Mapping[str, Any]:
    """Tensors by our names, from a state dict by the published names, timm's (DeiT) or ours, which
    stays as it is.
    """

    def ours(name: str) -> str:
        found = STEM_NAME.match(name)
        if found:
            layer, number, place, _ = found.groups()
            if layer:
                # convolution, norm and ReLU take three places
                place = 3 * (int(number) - 1) + (layer != "conv")
            name = f"stem.{len(model.stem) - 1 if place is None else place}.{name[found.end() :]}"
        return re.sub(r"^aux_head\.", "token_head.", name)

    if not any(name.startswith(("patch_embed.", "aux_head.")) for name in state_dict):
        return state_dict
    return {ours(name): tensor for name, tensor in state_dict.items()}


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: LVViT) -> dict[str, Any]:
    """A state dict made to fit this model: our names, the position table at its size, no token head
    where it has none.
    """
    return fit_weights(with_our_names(state_dict, model), model)


def _cfg(crop_pct: float, size: int = 224) -> dict:
    return {
        "input_size": (3, size, size),
        "crop_pct": crop_pct,
        "interpolation": "bicubic",
        "num_classes": 1000,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "stem.0",
        "classifier": ("head", "token_head"),
    }


# timm reads this table by its name when a model registers; crop_pct as in the published evaluation.
default_cfgs = generate_default_cfgs(
    {
        "lvvit_micro": _cfg(1.0, 64),
        "lvvit_deit_s": _cfg(0.9),
        "lvvit_t": _cfg(0.9),
        "lvvit_s": _cfg(0.9),
        "lvvit_m": _cfg(1.0),
        "lvvit_l": _cfg(1.0),
    }
)


def _build(name: str, pretrained: bool, sizes: dict, kwargs: dict) -> nn.Module:
    return build_model_with_cfg(
        LVViT,
        name,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **(sizes | kwargs),
    )


@register_model
def lvvit_micro(pretrained: bool = False, **kwargs) -> nn.Module:
    """For demonstrations at 64 px on a CPU: patch 8, narrow stem."""
    sizes = dict(
        img_size=64,
        patch_size=8,
        embed_dim=96,
        depth=4,
        num_heads=3,
        stem_width=16,
        residual_divisor=1.0,
    )
    return _build("lvvit_micro", pretrained, sizes, kwargs)


@register_model
def lvvit_deit_s(pretrained: bool = False, **kwargs) -> nn.Module:
    """DeiT-S (Table 3's first row), with a head on every token: 22.4 M parameters, 22.1 M with
    `token_head=False`.
    """
    sizes = dict(
        embed_dim=384,
        depth=12,
        num_heads=6,
        mlp_ratio=4.0,
        stem=((16, 16),),
        qkv_bias=True,
        residual_divisor=1.0,
    )
    return _build("lvvit_deit_s", pretrained, sizes, kwargs)


@register_model
def lvvit_t(pretrained: bool = False, **kwargs) -> nn.Module:
    """LV-ViT-T: 8.5 M parameters."""
    return _build(
        "lvvit_t",
        pretrained,
        dict(embed_dim=240, depth=12, num_heads=4, residual_divisor=1.0),
        kwargs,
    )


@register_model
def lvvit_s(pretrained: bool = False, **kwargs) -> nn.Module:
    """LV-ViT-S: 26.2 M parameters."""
    return _build("lvvit_s", pretrained, dict(embed_dim=384, depth=16, num_heads=6), kwargs)


@register_model
def lvvit_m(pretrained: bool = False, **kwargs) -> nn.Module:
    """LV-ViT-M: 55.8 M parameters."""
    return _build("lvvit_m", pretrained, dict(embed_dim=512, depth=20, num_heads=8), kwargs)


@register_model
def lvvit_l(pretrained: bool = False, **kwargs) -> nn.Module:
    """LV-ViT-L: 150.0 M parameters."""
    sizes = dict(embed_dim=768, depth=24, num_heads=12, stem_width=128, residual_divisor=3.0)
    return _build("lvvit_l", pretrained, sizes, kwargs)

"""LV-ViT: a vision transformer with a convolutional stem, scaled residuals and token heads.

Token Labeling (arXiv 2104.10858), sections 3.2 and 4. The layers are those of the published models,
and the parameter counts equal theirs exactly (tests/models/test_lvvit.py). The rows of the paper's
ablations (Tables 3, 4, 5 and 9) are arguments.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import Mlp, trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.models.drop_path import add_branch, branch_drop_path
from densefeed.models.registration import pretrained_cfg, register_family
from densefeed.models.token_transformer import (
    TokenTransformer,
    drop_path_rates,
    fit_weights,
    init_linear,
)

# N images   T tokens without the class token   D width   K classes   P side of the token grid


class PatchProjection(nn.Conv2d):
    """A convolution whose stride is the side of its square kernel: patches that do not overlap.

    On a GPU, and in 16 bits, it is a matrix product. In a step of LV-ViT-S with 256 images on an
    H200, cuDNN's kernel for the gradient of the input took 6.4 of 48 ms; the products of all three
    passes take 1.8, in one profile.
    """

    def forward(self, x_NCHW: Tensor) -> Tensor:
        # On processors with AMX, oneDNN 3.12 returns noise for some of these convolutions in
        # bfloat16, such as one with 16 channels and a side of 4. Similar issues are
        # pytorch/pytorch#169688 and uxlfoundation/oneDNN#5494.
        low = x_NCHW.dtype.itemsize == 2 or torch.is_autocast_enabled("cpu")
        if x_NCHW.is_cuda or low:
            return multiply_patches(x_NCHW, self.weight, self.bias)
        return super().forward(x_NCHW)


def multiply_patches(
    x_NCHW: Tensor,
    weight_DCQQ: Tensor,
    bias_D: Tensor,
    linear: Callable[[Tensor, Tensor, Tensor], Tensor] = F.linear,
) -> Tensor:
    """Compute `F.conv2d(x, weight, bias, stride=Q)` by a product, `linear`; Q divides H and W.

    The result has the memory format channels_last. The input is copied once, and the copy kept for
    the backward pass: 411 MB for 256 images of LV-ViT-S in bfloat16.
    """
    Q = weight_DCQQ.shape[-1]
    # Channels last, unlike F.pixel_unshuffle, so that the copy moves whole pixels.
    x_NHQWQC = x_NCHW.movedim(1, -1).unflatten(2, (-1, Q)).unflatten(1, (-1, Q))
    patches_NHWI = x_NHQWQC.transpose(2, 3).flatten(3)
    return linear(patches_NHWI, flatten_kernel(weight_DCQQ), bias_D).movedim(-1, 1)


def flatten_kernel(weight_DCQQ: Tensor) -> Tensor:
    """Return the matrix that `multiply_patches` multiplies by, `[D, Q Q C]`."""
    return weight_DCQQ.movedim(1, -1).flatten(1)


class Stem(nn.Sequential):
    """Patch embedding by convolutions, given as (kernel, stride); the last one projects (Table 4).

    All but the last have no bias and are followed by BatchNorm and ReLU; the last one has a bias
    and no norm. Forward maps `[N, in_chans, H, W]` to `[N, embed_dim, H / S, W / S]`, where S is
    the product of the strides and must divide H and W. Raises ValueError for a kernel with which no
    symmetric padding gives that size.
    """

    def __init__(
        self, in_chans: int, width: int, embed_dim: int, convs: Sequence[tuple[int, int]]
    ) -> None:
        layers = []
        for number, (kernel, stride) in enumerate(convs, start=1):
            # Exactly size / stride outputs need kernel - stride <= 2 * padding < kernel. The
            # smallest such padding is the published one: 3 for 7/2, 1 for 3/1, 0 for 8/8. The paper
            # gives none for 3/2 and 8/4; these get 1 and 2.
            padding = math.ceil((kernel - stride) / 2)
            if not 1 <= stride <= kernel or 2 * padding >= kernel:
                raise ValueError(
                    f"stem: kernel {kernel} with stride {stride} skips or shifts pixels; use a "
                    "kernel that is at least as large as its stride, and odd where the stride is 1"
                )
            if number == len(convs):
                last = PatchProjection if kernel == stride else nn.Conv2d
                layers.append(last(in_chans, embed_dim, kernel, stride, padding))
            else:
                layers += [
                    nn.Conv2d(in_chans, width, kernel, stride, padding, bias=False),
                    nn.BatchNorm2d(width),
                    # BatchNorm's backward pass reads its input, so ReLU may overwrite the output.
                    nn.ReLU(inplace=True),
                ]
                in_chans = width
        super().__init__(*layers)


def check_stem(convs: Sequence[tuple[int, int]], patch_size: int) -> None:
    """Raise ValueError unless these are (kernel, stride) pairs whose strides give `patch_size`."""
    if not convs or not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in convs):
        raise ValueError(f"stem {convs!r} must be pairs (kernel, stride), such as ((16, 16),)")
    if math.prod(stride for _, stride in convs) != patch_size:
        raise ValueError(
            f"stem: the strides of {tuple(convs)} must multiply to patch_size {patch_size}"
        )


class TokenGroupNorm(nn.GroupNorm):
    """GroupNorm over the channels of each token of `[N, T, D]`; with one group it is LayerNorm.

    Section 4.3 names no axes. Tokens are not normalized together: the paper's GroupNorm with one
    group scores like LayerNorm (Table 9), and a token's value must not depend on the number of
    tokens.
    """

    def forward(self, x_NTD: Tensor) -> Tensor:
        return super().forward(x_NTD.flatten(0, -2)).view_as(x_NTD)


class Attention(nn.Module):
    """Multi-head self-attention; q, k and v have a bias only with `qkv_bias`.

    `scale` multiplies the products of queries and keys; None is (D / heads)^-1/2.
    """

    scale: float | None = None

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x_NTD: Tensor) -> Tensor:
        N, T, D = x_NTD.shape
        qkv = self.qkv(x_NTD).view(N, T, 3, self.num_heads, D // self.num_heads)
        return self.proj(self.attend(qkv).reshape(N, T, D))

    def attend(self, qkv_NT3HD: Tensor) -> Tensor:
        """Return the mean of the values by softmax, `[N, T, H, D]`, of H heads of width D."""
        # Taken apart along its own axis, so the three gradients are put together by one copy.
        q, k, v = (part.transpose(1, 2) for part in qkv_NT3HD.unbind(2))
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale).transpose(1, 2)


class Block(nn.Module):
    """Pre-norm block of equation 5: each branch is divided by `residual_divisor` (1 / alpha).

    With `post_norm` the norms follow the sums (section 4.3) instead of opening the branches.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        drop_path: float,
        residual_divisor: float = 1.0,
        qkv_bias: bool = False,
        norm_groups: int = 0,
        post_norm: bool = False,
    ) -> None:
        super().__init__()
        # PyTorch's eps of 1e-5, as published; timm's ViT has 1e-6.
        norm = partial(TokenGroupNorm, norm_groups) if norm_groups else nn.LayerNorm
        self.norm1, self.norm2 = norm(dim), norm(dim)
        self.attn = Attention(dim, num_heads, qkv_bias)
        # GELU is timm's default here, and both layers have a bias, as published.
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        # Two, as in timm's blocks: a compiled step draws a mask for each module.
        self.drop_path1, self.drop_path2 = (
            branch_drop_path(drop_path, branch) for branch in (self.attn, self.mlp)
        )
        self.residual_divisor, self.post_norm = residual_divisor, post_norm

    def forward(self, x_NTD: Tensor) -> Tensor:
        path1, path2, divisor = self.drop_path1, self.drop_path2, self.residual_divisor
        if self.post_norm:
            x_NTD = self.norm1(add_branch(x_NTD, self.attn, path1, divisor))
            return self.norm2(add_branch(x_NTD, self.mlp, path2, divisor))
        x_NTD = add_branch(x_NTD, lambda y_NTD: self.attn(self.norm1(y_NTD)), path1, divisor)
        return add_branch(x_NTD, lambda y_NTD: self.mlp(self.norm2(y_NTD)), path2, divisor)


class LVViT(TokenTransformer):
    """LV-ViT.

    Args:
        img_size: side in pixels of the input that the position table is built for, or two equal
            sides; a multiple of `patch_size`.
        patch_size: side of a token in pixels; even unless `stem` is given, since the published stem
            starts with a stride of 2.
        num_classes: K; 0 builds no heads, and forward returns the pooled features.
        global_pool: input of `head`: the class token ("token"), the mean of the others ("avg"), or
            ("", without heads) all of them.
        stem: (kernel, stride) of the stem's convolutions, the last one the projection (Table 4);
            their strides multiply to `patch_size`. None is the published stem: (7, 2), (3, 1),
            (3, 1), then kernel = stride = `patch_size` / 2.
        stem_width: channels of the stem's convolutions (64; 128 for L).
        residual_divisor: divides every residual branch (1, 2, 2, 3 for T, S, M, L; Table 5).
        qkv_bias: a bias on q, k and v, as in DeiT (Table 3's first row).
        norm_groups: 0 for LayerNorm, else the groups of a GroupNorm in the blocks (Table 9).
        post_norm: norms after the sums; the final norm stays. Diverges in the paper (section 4.3).
        drop_path_rate: stochastic depth, rising linearly from 0 to this rate over the blocks.
        token_head: a second classifier on every token, trained with dense labels and added to the
            logits of the class token.
        fused_head: leave that classifier to the loss in training, which saves memory with many
            classes (21,841).

    Forward and the rest of the interface are those of `TokenTransformer`; H and W must be multiples
    of `patch_size`. Raises ValueError for sizes that do not fit together.
    """

    embedding_name = "stem"

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
        super().__init__(img_size, patch_size, embed_dim, depth, num_heads, token_head, fused_head)
        if stem is None and patch_size % 2:
            raise ValueError(f"patch_size {patch_size} must be even with the published stem")
        last = patch_size // 2
        convs = ((7, 2), (3, 1), (3, 1), (last, last)) if stem is None else stem
        check_stem(convs, patch_size)
        self.stem = Stem(in_chans, stem_width, embed_dim, convs)
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + self.grid_size**2, embed_dim))
        options = residual_divisor, qkv_bias, norm_groups, post_norm
        self.blocks = nn.ModuleList(
            Block(embed_dim, num_heads, mlp_ratio, rate, *options)
            for rate in drop_path_rates(drop_path_rate, depth)
        )
        self.norm = nn.LayerNorm(embed_dim)
        self._make_heads(num_classes, global_pool)
        trunc_normal_(self.pos_embed, std=0.02)
        trunc_normal_(self.cls_token, std=0.02)
        self.apply(init_linear)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load as any module does, from the published names too.

        timm's `checkpoint_path=` applies no `checkpoint_filter_fn`.
        """
        return super().load_state_dict(rename_published(state_dict, self), strict, assign)


# Stem tensors of published files. `convN` and `proj` are the layers of LV-ViT's published code;
# `bnN` is torchvision's name for the norms that follow them, `normN` the other common one; `conv.N`
# is the stem as one sequence, as in timm's VOLO by the same authors, with the same numbers as here.
# `aux_head` is `token_head`. The other names (`cls_token`, `pos_embed`, `blocks.N.norm1`,
# `attn.qkv`, `attn.proj`, `mlp.fc1`, `mlp.fc2`, `norm` and `head`) are timm's and the ones here.
STEM_NAME = re.compile(r"^patch_embed\.(?:(conv|bn|norm)(\d+)|conv\.(\d+)|(proj))\.")


def rename_published(state_dict: Mapping[str, Any], model: LVViT) -> Mapping[str, Any]:
    """Return the state dict by this module's names, from published ones or those of timm's DeiT.

    The argument is not modified.
    """

    def rename(name: str) -> str:
        found = STEM_NAME.match(name)
        if found:
            layer, number, place, _ = found.groups()
            if layer:
                # Convolution, norm and ReLU take three positions of the sequence.
                place = 3 * (int(number) - 1) + (layer != "conv")
            name = f"stem.{len(model.stem) - 1 if place is None else place}.{name[found.end() :]}"
        return re.sub(r"^aux_head\.", "token_head.", name)

    if not any(name.startswith(("patch_embed.", "aux_head.")) for name in state_dict):
        return state_dict
    return {rename(name): tensor for name, tensor in state_dict.items()}


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: LVViT) -> dict[str, Any]:
    """Rename published tensors, resize the position table and drop an unused token head."""
    return fit_weights(rename_published(state_dict, model), model)


_cfg = partial(pretrained_cfg, "stem.0", ("head", "token_head"))

# crop_pct is that of the published evaluation.
register_family(
    __name__,
    LVViT,
    {
        # For demonstrations at 64 px on a CPU: patch 8, narrow stem.
        "lvvit_micro": (
            _cfg(64, 1.0),
            dict(
                img_size=64,
                patch_size=8,
                embed_dim=96,
                depth=4,
                num_heads=3,
                stem_width=16,
                residual_divisor=1.0,
            ),
        ),
        # DeiT-S (Table 3's first row) with a head on every token: 22.4 M parameters, 22.1 M with
        # `token_head=False`.
        "lvvit_deit_s": (
            _cfg(),
            dict(
                embed_dim=384,
                depth=12,
                num_heads=6,
                mlp_ratio=4.0,
                stem=((16, 16),),
                qkv_bias=True,
                residual_divisor=1.0,
            ),
        ),
        # 8.5 M parameters
        "lvvit_t": (_cfg(), dict(embed_dim=240, depth=12, num_heads=4, residual_divisor=1.0)),
        # 26.2 M parameters
        "lvvit_s": (_cfg(), dict(embed_dim=384, depth=16, num_heads=6)),
        # 55.8 M parameters
        "lvvit_m": (_cfg(crop_pct=1.0), dict(embed_dim=512, depth=20, num_heads=8)),
        # 150.0 M parameters
        "lvvit_l": (
            _cfg(crop_pct=1.0),
            dict(embed_dim=768, depth=24, num_heads=12, stem_width=128, residual_divisor=3.0),
        ),
    },
    checkpoint_filter_fn,
)

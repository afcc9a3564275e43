"""DHVT: a vision transformer for small data, whose tokens meet their neighbors and whose heads
meet each other.

Dynamic Hybrid Vision Transformer (NeurIPS 2022, arXiv 2210.05958) and its supplementary: three
parts replace a ViT's, SOPE the patch embedding and the positions, DAFF the feed-forward network,
HI-MHSA the attention. Counts of Table 11 are met to the unit of the published code
(tests/models/test_dhvt.py). The rows of its ablations (Tables 2 to 5, section 2.2.2) are arguments.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from timm.layers import DropPath, LayerNorm2d, Mlp, trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.models.lvvit import Attention
from densefeed.models.recompute import recompute
from densefeed.models.token_transformer import TokenTransformer, fit_weights, init_linear

# N images   T tokens, class token first   D width   M heads   E width of a head   R x C the grid of patches

Norm = Literal["batch", "layer"]
NORMS = {"batch": nn.BatchNorm2d, "layer": partial(LayerNorm2d, eps=1e-6)}
# Channels after each convolution, as shares of the width (the supplementary's section 1.2, which
# has no patches of 8).
SOPE_WIDTHS = {2: (1,), 4: (2, 1), 8: (4, 2, 1), 16: (8, 4, 2, 1)}


class Affine(nn.Module):
    """A scale and a shift of each channel of `[N, C, H, W]`; at first they change nothing."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.beta = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return x_NCHW * self.alpha + self.beta


class SOPE(nn.Sequential):
    """Sequential overlapping patch embedding: 3 x 3 convolutions of stride 2 between two affine
    layers (unless not `affine`).

    `[N, in_chans, H, W]` to `[N, embed_dim, R, C]`, R = H / `patch_size` rounded up, C likewise.
    Convolutions carry no bias (the pseudo-code has one, the published code and so Table 11's counts
    do not); each is followed by its norm, all but the last by GELU, and the only one of patch size
    2 too. Raises ValueError for patch sizes other than 2, 4, 8 and 16.
    """

    def __init__(
        self, patch_size: int, in_chans: int, embed_dim: int, affine: bool, norm: Norm
    ) -> None:
        if patch_size not in SOPE_WIDTHS:
            raise ValueError(
                f"patch_size {patch_size} must be one of {', '.join(map(str, SOPE_WIDTHS))}"
            )
        layers: list[nn.Module] = [Affine(in_chans)] if affine else []
        shares = SOPE_WIDTHS[patch_size]
        for share in shares:
            width = embed_dim // share
            layers += [nn.Conv2d(in_chans, width, 3, 2, 1, bias=False), NORMS[norm](width)]
            layers += [nn.GELU()] if share > 1 or len(shares) == 1 else []
            in_chans = width
        super().__init__(*layers, *([Affine(embed_dim)] if affine else []))


class Aggregation(nn.Module):
    """What the patches say of the whole image, as a factor of each channel: squeeze and excitation
    without a sigmoid.

    Forward takes the class token `[N, 1, D]` and the patches `[N, T - 1, D]` and returns both as
    one `[N, T, D]`, the class token multiplied ("class", as published), all tokens ("all", Table
    3), or none ("none").
    """

    def __init__(
        self, dim: int, reduction: int, aggregate: Literal["class", "all", "none"]
    ) -> None:
        super().__init__()
        self.aggregate = aggregate
        if aggregate != "none":
            self.compress, self.excite = (
                nn.Linear(dim, dim // reduction),
                nn.Linear(dim // reduction, dim),
            )

    def forward(self, class_N1D: Tensor, patch_NTD: Tensor) -> Tensor:
        if self.aggregate == "none":
            return torch.cat([class_N1D, patch_NTD], dim=1)
        factor_N1D = self.excite(F.gelu(self.compress(patch_NTD.mean(1, keepdim=True))))
        if self.aggregate == "all":
            return torch.cat([class_N1D, patch_NTD], dim=1) * factor_N1D
        return torch.cat([class_N1D * factor_N1D, patch_NTD], dim=1)


class DAFF(nn.Module):
    """Dynamic aggregation feed-forward: patches through 1 x 1, depth-wise 3 x 3 and 1 x 1
    convolutions, the class token around them.

    `[N, T, D]` and the grid (R, C) of its T - 1 patches to `[N, T, D]`. The depth-wise convolution
    is added to what it reads unless not `shortcut` (Table 3).
    """

    def __init__(
        self, dim: int, hidden: int, norm: Norm, shortcut: bool, aggregation: Aggregation
    ) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(dim, hidden, 1), NORMS[norm](hidden)
        self.conv2, self.norm2 = (
            nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden),
            NORMS[norm](hidden),
        )
        self.conv3, self.norm3 = nn.Conv2d(hidden, dim, 1), NORMS[norm](dim)
        self.shortcut, self.aggregation = shortcut, aggregation

    def forward(self, x_NTD: Tensor, grid: tuple[int, int]) -> Tensor:
        x_NDRC = x_NTD[:, 1:].transpose(1, 2).unflatten(2, grid)  # channels_last without a copy
        x_NDRC = F.gelu(self.norm1(self.conv1(x_NDRC)))
        near_NDRC = F.gelu(self.norm2(self.conv2(x_NDRC)))
        x_NDRC = self.norm3(self.conv3(x_NDRC + near_NDRC if self.shortcut else near_NDRC))
        return self.aggregation(x_NTD[:, :1], x_NDRC.flatten(2).transpose(1, 2))


class SplitMlp(nn.Module):
    """A ViT's MLP for the patches alone, the class token around it (Table 2); as `DAFF` otherwise.

    With `pool` the mean over 3 x 3 patches, zeros beyond the edge, stands between the layers: a
    depth-wise convolution whose weights are all 1/9, which is what the paper takes it for.
    """

    def __init__(self, dim: int, hidden: int, pool: bool, aggregation: Aggregation) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.pool, self.aggregation = pool, aggregation

    def forward(self, x_NTD: Tensor, grid: tuple[int, int]) -> Tensor:
        hidden_NTD = F.gelu(self.fc1(x_NTD[:, 1:]))
        if self.pool:
            hidden_NDRC = F.avg_pool2d(hidden_NTD.transpose(1, 2).unflatten(2, grid), 3, 1, 1)
            hidden_NTD = hidden_NDRC.flatten(2).transpose(1, 2)
        return self.aggregation(x_NTD[:, :1], self.fc2(hidden_NTD))


class PlainMlp(Mlp):
    """A ViT's MLP, for all tokens alike; it knows no grid."""

    def forward(self, x_NTD: Tensor, grid: tuple[int, int]) -> Tensor:
        return super().forward(x_NTD)


class HeadInteractedAttention(nn.Module):
    """HI-MHSA: multi-head self-attention among T tokens and one token of each head, `[N, T, D]` to
    `[N, T, D]`.

    A head's token is made of the mean, over all tokens, of the channels that this head reads. Head
    tokens are queries and keys as all others are; the mean of what they become is added to the
    class token, and they end here.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_proj, self.head_norm = (
            nn.Linear(dim // num_heads, dim),
            nn.LayerNorm(dim // num_heads),
        )
        self.head_pos = nn.Parameter(torch.zeros(1, num_heads, dim))
        self.attn = Attention(dim, num_heads, qkv_bias=True)
        trunc_normal_(self.head_pos, std=0.02)

    def forward(self, x_NTD: Tensor) -> Tensor:
        T = x_NTD.shape[1]
        of_head_NME = x_NTD.mean(1).unflatten(1, (self.num_heads, -1))
        head_NMME = self.head_proj(of_head_NME).unflatten(2, (self.num_heads, -1))
        head_NMD = F.gelu(self.head_norm(head_NMME)).flatten(2) + self.head_pos
        class_N1D, patch_NTD, head_NMD = self.attn(torch.cat([x_NTD, head_NMD], dim=1)).split(
            [1, T - 1, self.num_heads], dim=1
        )
        return torch.cat([class_N1D + head_NMD.mean(1, keepdim=True), patch_NTD], dim=1)


class Block(nn.Module):
    """Pre-norm block: each branch is added to what it reads."""

    def __init__(
        self, dim: int, attn: nn.Module, feed_forward: nn.Module, drop_path: float
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn, self.feed_forward = attn, feed_forward
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x_NTD: Tensor, grid: tuple[int, int]) -> Tensor:
        x_NTD = x_NTD + self.drop_path(self.attn(self.norm1(x_NTD)))
        return x_NTD + self.drop_path(self.feed_forward(self.norm2(x_NTD), grid))


class DHVT(TokenTransformer):
    """DHVT.

    Args:
        img_size: side of the input, pixels, or both; counts only for `pos_embed` and
            `embedding="patch"`, and then is a multiple of `patch_size` and square.
        patch_size: side of a token, pixels: 2, 4, 8 or 16, or any with `embedding="patch"`.
        num_classes: K; 0 builds no heads, and forward returns the pooled features.
        global_pool: what `head` reads: the class token, the mean ("avg") of the others, or ("",
            without heads) all of them.
        num_heads: M; with more heads there are fewer parameters, as `head_proj` maps D / M to D.
        reduction: divides the width inside squeeze and excitation.
        drop_path_rate: stochastic depth, rising linearly from 0 to this rate over the blocks
            (published recipes: 0.1).
        norms: norm of the embedding, norm of DAFF: "batch" or "layer", the latter over the channels
            of each place (Table 5).
        embedding: SOPE, or a ViT's patch embedding, one convolution without overlap.
        affine: SOPE's affine layers (section 2.2.2).
        head_tokens: HI-MHSA's; without, a ViT's attention (Figures 1 and 2).
        pos_embed: a ViT's table of positions beside all this (Figure 1).
        feed_forward: DAFF; or a ViT's MLP, the same without the class token, or that with
            neighbors' mean (Table 2).
        aggregate: which tokens squeeze and excitation multiply (Tables 2 and 3); "none" with
            `feed_forward="mlp"`.
        shortcut: around DAFF's depth-wise convolution (Table 3).
        token_head: a second classifier on every token, as LV-ViT's, for token labels; MixToken then
            mixes after the embedding.
        fused_head: in training leave that classifier to the loss.
        published: decay what the published code decays: positions of head tokens and affine layers
            too. The paper says nothing of it; here they are spared as tables, norms and biases are.

    Forward takes any size, also not square; a grid has H / `patch_size` rows, rounded up (with
    `pos_embed` or `embedding="patch"` multiples of `patch_size` alone). The rest is
    `TokenTransformer`'s. Raises ValueError for arguments that do not fit together.
    """

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
        reduction: int = 4,
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
        super().__init__()
        self.exact = pos_embed or embedding == "patch"  # takes whole patches only
        begun = img_size if self.exact or isinstance(img_size, int) else max(img_size)
        self._begin(
            begun, patch_size, in_chans, embed_dim, depth, num_heads, token_head, fused_head
        )
        choices = {
            "embedding": (embedding, ("sope", "patch")),
            "feed_forward": (feed_forward, ("daff", "mlp", "split", "split-pool")),
            "aggregate": (aggregate, ("class", "all", "none")),
        } | {f"norms[{place}]": (norm, tuple(NORMS)) for place, norm in enumerate(norms)}
        for name, (value, known) in choices.items():
            if value not in known:
                raise ValueError(f"{name} {value!r} must be one of {', '.join(known)}")
        if len(norms) != 2:
            raise ValueError(f"norms {norms!r} must be two: of the embedding and of DAFF")
        if feed_forward == "mlp" and aggregate != "none":
            raise ValueError('feed_forward="mlp" has no class token apart; give aggregate="none"')
        side = self.grid_size * patch_size
        if self.exact and img_size not in (side, (side, side)):
            raise ValueError(f"img_size {img_size} must be a multiple of patch_size {patch_size}")
        self.published = published
        if embedding == "sope":
            self.embedding = SOPE(patch_size, in_chans, embed_dim, affine, norms[0])
        else:
            self.embedding = nn.Sequential(nn.Conv2d(in_chans, embed_dim, patch_size, patch_size))
        self.pos_embed = (
            nn.Parameter(torch.zeros(1, 1 + self.grid_size**2, embed_dim)) if pos_embed else None
        )

        def feed_forward_of() -> nn.Module:
            hidden = int(embed_dim * mlp_ratio)
            if feed_forward == "mlp":
                return PlainMlp(embed_dim, hidden)
            aggregation = Aggregation(embed_dim, reduction, aggregate)
            if feed_forward == "daff":
                return DAFF(embed_dim, hidden, norms[1], shortcut, aggregation)
            return SplitMlp(embed_dim, hidden, feed_forward == "split-pool", aggregation)

        attention = partial(HeadInteractedAttention, embed_dim, num_heads)
        if not head_tokens:
            attention = partial(Attention, embed_dim, num_heads, qkv_bias=True)
        rates = [drop_path_rate * number / max(depth - 1, 1) for number in range(depth)]
        self.blocks = nn.ModuleList(
            Block(embed_dim, attention(), feed_forward_of(), rate) for rate in rates
        )
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self._make_heads(num_classes, global_pool)
        trunc_normal_(self.cls_token, std=0.02)
        if self.pos_embed is not None:
            trunc_normal_(self.pos_embed, std=0.02)
        self.apply(init_linear)

    def grid_of(self, image_NCHW: Tensor) -> tuple[int, int]:
        """Rows and columns of tokens of these images. ValueError if a ViT's parts are in it and
        they are no whole patches.
        """
        if self.exact:
            return super().grid_of(image_NCHW)
        H, W = image_NCHW.shape[2:]
        return -(-H // self.patch_size), -(-W // self.patch_size)

    def embed_patches(self, image_NCHW: Tensor) -> Tensor:
        self.grid_of(image_NCHW)  # refuses what would lose pixels
        return self.embedding(image_NCHW)

    def run_block(self, block: nn.Module, x_NTD: Tensor, grid: tuple[int, int]) -> Tensor:
        return block(x_NTD, grid)

    def _run(self, blocks: Sequence[nn.Module], x_NTD: Tensor, grid: tuple[int, int]) -> Tensor:
        if not (self.grad_checkpointing and torch.is_grad_enabled()):
            return super()._run(blocks, x_NTD, grid)
        for block in blocks:
            x_NTD = recompute(block, x_NTD, grid)
        return x_NTD

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names that AdamW must not decay, beside biases and one-dimensional tables."""
        spared = super().no_weight_decay()
        if not self.published:
            spared |= {
                name
                for name, _ in self.named_parameters()
                if name.endswith((".head_pos", ".alpha", ".beta"))
            }
        return spared

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns of parameter names by depth, for timm's layer-wise decay; `coarse` changes
        nothing, as blocks have no parts.
        """
        return {
            "stem": r"^cls_token|^pos_embed|^embedding",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: DHVT) -> dict[str, Any]:
    """A state dict made to fit this model: positions at its size, no token head where it has none.
    (No weights were ever published.)
    """
    return fit_weights(state_dict, model)


def _cfg(size: int, num_classes: int, crop_pct: float) -> dict:
    # ImageNet's mean and deviation for all data, as in the published code; CIFAR's images are seen
    # whole.
    return {
        "input_size": (3, size, size),
        "crop_pct": crop_pct,
        "interpolation": "bicubic",
        "num_classes": num_classes,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "embedding.1",
        "classifier": ("head", "token_head"),
    }


default_cfgs = generate_default_cfgs(
    {
        "dhvt_micro": _cfg(64, 1000, 1.0),
        "dhvt_tiny_cifar_patch4": _cfg(32, 100, 1.0),
        "dhvt_tiny_cifar_patch2": _cfg(32, 100, 1.0),
        "dhvt_small_cifar_patch4": _cfg(32, 100, 1.0),
        "dhvt_small_cifar_patch2": _cfg(32, 100, 1.0),
        "dhvt_tiny_domain_patch16": _cfg(224, 345, 0.875),
        "dhvt_small_domain_patch16": _cfg(224, 345, 0.875),
        "dhvt_tiny_imagenet_patch16": _cfg(224, 1000, 0.875),
        "dhvt_small_imagenet_patch16": _cfg(224, 1000, 0.875),
    }
)


def _build(name: str, pretrained: bool, sizes: dict, kwargs: dict) -> nn.Module:
    about = default_cfgs[name].default
    sizes |= {"num_classes": about.num_classes, "img_size": about.input_size[-1]}
    return build_model_with_cfg(
        DHVT,
        name,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **(sizes | kwargs),
    )


@register_model
def dhvt_micro(pretrained: bool = False, **kwargs) -> nn.Module:
    """For demonstrations at 64 px on a CPU: 8 x 8 tokens and 4 blocks of width 96, as lvvit_micro
    has; 4 heads, as DHVT-T on CIFAR.
    """
    return _build(
        "dhvt_micro", pretrained, dict(patch_size=8, embed_dim=96, depth=4, num_heads=4), kwargs
    )


@register_model
def dhvt_tiny_cifar_patch4(pretrained: bool = False, **kwargs) -> nn.Module:
    """Table 11: CIFAR at 32 pixels, 8 x 8 tokens, 6.0 M parameters at 100 classes."""
    return _build(
        "dhvt_tiny_cifar_patch4", pretrained, dict(patch_size=4, embed_dim=192, num_heads=4), kwargs
    )


@register_model
def dhvt_tiny_cifar_patch2(pretrained: bool = False, **kwargs) -> nn.Module:
    """Table 11: CIFAR at 32 pixels, 16 x 16 tokens, 5.8 M parameters at 100 classes."""
    return _build(
        "dhvt_tiny_cifar_patch2", pretrained, dict(patch_size=2, embed_dim=192, num_heads=4), kwargs
    )


@register_model
def dhvt_small_cifar_patch4(pretrained: bool = False, **kwargs) -> nn.Module:
    """Table 11: CIFAR at 32 pixels, 8 x 8 tokens, 23.4 M parameters at 100 classes."""
    return _build(
        "dhvt_small_cifar_patch4",
        pretrained,
        dict(patch_size=4, embed_dim=384, num_heads=8),
        kwargs,
    )


@register_model
def dhvt_small_cifar_patch2(pretrained: bool = False, **kwargs) -> nn.Module:
    """Table 11: CIFAR at 32 pixels, 16 x 16 tokens, 22.8 M parameters at 100 classes."""
    return _build(
        "dhvt_small_cifar_patch2",
        pretrained,
        dict(patch_size=2, embed_dim=384, num_heads=8),
        kwargs,
    )


@register_model
def dhvt_tiny_domain_patch16(pretrained: bool = False, **kwargs) -> nn.Module:
    """Table 11: DomainNet at 224 pixels, 6.1 M parameters at 345 classes."""
    return _build(
        "dhvt_tiny_domain_patch16",
        pretrained,
        dict(patch_size=16, embed_dim=192, num_heads=4),
        kwargs,
    )


@register_model
def dhvt_small_domain_patch16(pretrained: bool = False, **kwargs) -> nn.Module:
    """Table 11: DomainNet at 224 pixels, 23.8 M parameters at 345 classes."""
    return _build(
        "dhvt_small_domain_patch16",
        pretrained,
        dict(patch_size=16, embed_dim=384, num_heads=6),
        kwargs,
    )


@register_model
def dhvt_tiny_imagenet_patch16(pretrained: bool = False, **kwargs) -> nn.Module:
    """Table 11: ImageNet at 224 pixels, 6.3 M parameters at 1,000 classes (the paper says 6.2)."""
    return _build(
        "dhvt_tiny_imagenet_patch16",
        pretrained,
        dict(patch_size=16, embed_dim=192, num_heads=3),
        kwargs,
    )


@register_model
def dhvt_small_imagenet_patch16(pretrained: bool = False, **kwargs) -> nn.Module:
    """Table 11: ImageNet at 224 pixels, 24.0 M parameters at 1,000 classes (the paper says
    24.1).
    """
    return _build(
        "dhvt_small_imagenet_patch16",
        pretrained,
        dict(patch_size=16, embed_dim=384, num_heads=6),
        kwargs,
    )

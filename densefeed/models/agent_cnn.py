"""The agent of a vision transformer: a network of convolutions of its width, depth and heads (arXiv
2112.03552).

Section 3.2 and Tables 6 and 7: attention becomes CONV, a convolution of as many taps as there are
heads, the MLPs become 1 x 1 convolutions, the class token a global average. Built from a
transformer it can use that one's weights in place of its own.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from timm.layers import Attention, AttentionRope, GELUTanh, Mlp
from timm.layers.activations import GELU
from timm.models import (
    beit,
    build_model_with_cfg,
    eva,
    generate_default_cfgs,
    register_model,
    vision_transformer_relpos,
)
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.models import lvvit
from densefeed.models.dhvt import DHVT
from densefeed.models.patch_dropout import refuse_patch_dropout
from densefeed.models.token_transformer import TokenLogits

# N images   D width   H heads, that is taps   Y, X rows and columns of the map   K classes


class SharedWeights(NamedTuple):
    """Weights of a transformer's block that its agent's block uses: tensors of their own that share
    the block's storage.

    A backward pass gives them gradients of their own, so what the agent asks of a weight and what
    the transformer asks stay apart until they are combined. Biases may be None.
    """

    # [D, D], the rows of qkv that make v; q, k and all their biases have no part in a CONV
    value: Tensor
    proj: Tensor  # [D, D]
    proj_bias: Tensor | None
    fc1: Tensor  # [4 D, D]
    fc1_bias: Tensor | None
    fc2: Tensor  # [D, 4 D]
    fc2_bias: Tensor | None


class ViTSpec(NamedTuple):
    """What an agent must know of its transformer."""

    width: int
    heads: int
    hidden: int
    depth: int
    patch: int


# Attention whose heads give proj a mean of their values and nothing else: they differ in where the
# weights of that mean come from (positions, relative or rotary), which taps replace. CaiT's heads
# talk, XCiT's are of channels, differential ones subtract: none of these is equation 4's sum of
# W_h^V W_h^O.
PLAIN = {
    Attention,
    AttentionRope,
    beit.Attention,
    eva.EvaAttention,
    vision_transformer_relpos.RelPosAttention,
    lvvit.Attention,
}


def vit_spec(vit: nn.Module) -> ViTSpec:
    """Of a transformer in timm's manner: DeiT, BEiT, EVA with a plain MLP, relative or rotary
    positions, a CNN before its blocks.

    Norms, layer scales and what is before the blocks stay each network's own. ValueError, which
    says what is missing or stands between the shared weights, for what can have no agent, and where
    patches are left out in training.
    """
    if isinstance(vit, DHVT):
        raise ValueError(
            "DHVT's attention adds tokens of heads and its MLP, DAFF, convolves; an agent has neither"
        )
    missing = "has no blocks of attention (qkv, proj) and MLP (fc1, fc2) that all have the width of its tokens"
    blocks = getattr(vit, "blocks", None)
    if (
        not isinstance(blocks, nn.Module)
        or not len(blocks)
        or not hasattr(vit, "forward_intermediates")
    ):
        raise ValueError(f"{missing}, or does not tell what they say (forward_intermediates)")
    for block in blocks:
        attn, mlp, D = (
            getattr(block, "attn", None),
            getattr(block, "mlp", None),
            getattr(vit, "embed_dim", 0),
        )
        shapes = [
            getattr(getattr(attn, name, None), "weight", torch.empty(0)).shape
            for name in ("qkv", "proj")
        ]
        plain = shapes == [(3 * D, D), (D, D)] and getattr(attn, "gate", None) is None
        if not (
            plain
            and isinstance(mlp, Mlp)
            and isinstance(mlp.fc1, nn.Linear)
            and mlp.fc2.in_features == mlp.fc1.out_features
        ):
            raise ValueError(missing)
        if type(attn) not in PLAIN:
            name = f"{type(attn).__module__.rpartition('.')[2]}.{type(attn).__name__}"
            raise ValueError(
                f"its attention, {name}, is none that is known to give no more than a mean of values for each head"
            )
        if not all(
            isinstance(getattr(part, "norm", None), nn.Identity | None) for part in (attn, mlp)
        ):
            raise ValueError(
                "a norm stands between the weights of its attention or MLP that an agent shares"
            )
        if not isinstance(mlp.act, nn.GELU | GELU | GELUTanh):
            raise ValueError(f"its MLP has {type(mlp.act).__name__} where an agent has GELU")
    refuse_patch_dropout(vit)
    heads, hidden = blocks[0].attn.num_heads, blocks[0].mlp.fc1.out_features
    return ViTSpec(vit.embed_dim, heads, hidden, len(blocks), patch_of(vit))


def patch_of(vit: nn.Module) -> int:
    """Side of what a token shows, pixels; of a CNN with patches behind it that of both. ValueError
    where there is none.
    """
    if hasattr(vit, "patch_size"):
        return vit.patch_size
    embed = getattr(vit, "patch_embed", None)
    if not hasattr(embed, "feat_ratio"):
        raise ValueError("it has no patch_embed that tells the side of its patches")
    rows, columns = embed.feat_ratio(as_scalar=False)
    if rows != columns:
        raise ValueError(f"its patches, {rows} x {columns} pixels, are no squares")
    return rows


def lent_by(vit: nn.Module) -> list[SharedWeights]:
    """The weights that each block of `vit` shares with its agent. No copies: an update of the block
    is one of these.
    """

    def alias(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().requires_grad_()

    found = []
    for block in vit.blocks:
        attn, mlp = block.attn, block.mlp
        weights = attn.qkv.weight[2 * vit.embed_dim :], attn.proj.weight, attn.proj.bias
        found.append(
            SharedWeights(
                *map(alias, (*weights, mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias))
            )
        )
    return found


def conv_taps(heads: int) -> list[tuple[int, int]]:
    """Where each head's tap looks, as (rows down, columns right) of the place that it writes
    (section 3.2.1).

    The first `heads` of a square's places, row by row from the top left; the square's side is the
    root of `heads`, rounded up. The paper takes "a set" of that many; the first is the published
    code's choice, so 6 heads never look down. ValueError where that side is even, as a square of
    even side has no middle (2-4 and 10-16 heads, 26-36, ...).
    """
    side = math.isqrt(heads - 1) + 1 if heads > 0 else 0
    if side % 2 == 0:
        raise ValueError(
            f"{heads} heads have no CONV: their square of {side} x {side} taps has no middle; 1, 5 to 9 or 17 to 25 heads have one"
        )
    return [(at // side - side // 2, at % side - side // 2) for at in range(heads)]


class Conv(nn.Module):
    """CONV with weights of its own, equation 3: `[N, D, Y, X]` to the same, zeros beyond the
    border.

    `weight` is `[D, D, H]`: out, in, tap.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        taps = conv_taps(num_heads)
        self.reach, self.rows = -taps[0][0], taps[-1][0] - taps[0][0] + 1
        self.weight, self.bias = (
            nn.Parameter(torch.empty(dim, dim, num_heads)),
            nn.Parameter(torch.zeros(dim)),
        )
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x_NDYX: Tensor) -> Tensor:
        # Rows that hold no tap are not computed, and neither are they padded for: 6 heads are a
        # kernel of 2 x 3.
        side = 2 * self.reach + 1
        kernel = F.pad(self.weight, (0, self.rows * side - self.weight.shape[2])).unflatten(
            2, (self.rows, side)
        )
        below = self.rows - 1 - self.reach
        if below == self.reach:
            return F.conv2d(x_NDYX, kernel, self.bias, padding=self.reach)
        return F.conv2d(
            F.pad(x_NDYX, (self.reach, self.reach, self.reach, below)), kernel, self.bias
        )


def shared_conv(x_NDYX: Tensor, lent: SharedWeights, num_heads: int) -> Tensor:
    """CONV with a transformer's weights, equation 4: attention in which head h looks at its tap
    alone.

    Each head's share of the values is moved by its tap and then projected: 2 D² products a place,
    where the kernels W_h = W_h^V W_h^O would take H D² and as much again to make.
    """
    taps = conv_taps(num_heads)
    reach, (Y, X) = -taps[0][0], x_NDYX.shape[2:]
    values = F.pad(one_by_one(x_NDYX, lent.value, None), (reach, reach, reach, reach)).chunk(
        num_heads, 1
    )
    moved = [
        value[:, :, reach + down : reach + down + Y, reach + right : reach + right + X]
        for value, (down, right) in zip(values, taps, strict=True)
    ]
    return one_by_one(torch.cat(moved, 1), lent.proj, lent.proj_bias)


def one_by_one(x_NDYX: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer at every place."""
    return F.conv2d(x_NDYX, weight[:, :, None, None], bias)


class AgentBlock(nn.Module):
    """CONV and MLP, each with a BatchNorm and added to what it read."""

    def __init__(self, dim: int, num_heads: int, hidden: int, norm: str, own: bool) -> None:
        super().__init__()
        self.num_heads, self.norm_first = num_heads, norm == "before"
        self.norm1, self.norm2 = nn.BatchNorm2d(dim), nn.BatchNorm2d(dim)
        if own:
            self.conv = Conv(dim, num_heads)
            self.fc1, self.fc2 = nn.Conv2d(dim, hidden, 1), nn.Conv2d(hidden, dim, 1)
            for layer in (self.fc1, self.fc2):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)

    def _mlp(self, x_NDYX: Tensor, lent: SharedWeights | None) -> Tensor:
        if lent is None:
            return self.fc2(F.gelu(self.fc1(x_NDYX)))
        return one_by_one(
            F.gelu(one_by_one(x_NDYX, lent.fc1, lent.fc1_bias)), lent.fc2, lent.fc2_bias
        )

    def forward(self, x_NDYX: Tensor, lent: SharedWeights | None = None) -> Tensor:
        def conv(y_NDYX: Tensor) -> Tensor:
            return self.conv(y_NDYX) if lent is None else shared_conv(y_NDYX, lent, self.num_heads)

        if self.norm_first:
            x_NDYX = x_NDYX + conv(self.norm1(x_NDYX))
            return x_NDYX + self._mlp(self.norm2(x_NDYX), lent)
        x_NDYX = x_NDYX + self.norm1(conv(x_NDYX))
        return x_NDYX + self.norm2(self._mlp(x_NDYX, lent))


class AgentCNN(nn.Module):
    """An agent CNN.

    Args:
        stem: "res-like" (Table 7: two convolutions and a max-pool, 8 pixels a place, and a pyramid
            behind) or "base" (Table 6: one convolution of `patch_size`, no pyramid).
        down: after which blocks, counted from 1, a 2 x 2 average halves the map; None: as Table 7
            has it, after a sixth and two sixths of the blocks, (1, 2) of 6 and (2, 4) of 12; none
            in a base agent. Published code: (3, 9) of 12.
        pool: side of the res-like stem's max-pool: 2 in Table 7, 3 in the published code.
        norm: "before" CONV and MLP or "after" them, on the branch; the paper does not say, the
            published Agent-B has "after".
        token_head: a second classifier on every place of the last map, for dense labels; at
            evaluation half its maximum is added.
        own_weights: False leaves out what a transformer lends (`lend`).

    Forward takes images `[N, in_chans, H, W]` of any size and gives logits `[N, K]`, in training
    with a token head `TokenLogits`. Raises ValueError for heads that have no CONV (`conv_taps`),
    and for images that leave no 2 x 2 places to halve.
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 288,
        depth: int = 6,
        num_heads: int = 9,
        mlp_ratio: float = 4.0,
        patch_size: int = 16,
        stem: Literal["res-like", "base"] = "res-like",
        down: Sequence[int] | None = None,
        pool: Literal[2, 3] = 2,
        norm: Literal["before", "after"] = "before",
        token_head: bool = False,
        own_weights: bool = True,
    ) -> None:
        super().__init__()
        options = {
            "stem": (stem, ("res-like", "base")),
            "norm": (norm, ("before", "after")),
            "pool": (pool, (2, 3)),
        }
        for name, (value, known) in options.items():
            if value not in known:
                raise ValueError(f"{name} {value!r} must be {known[0]!r} or {known[1]!r}")
        if stem == "base" and pool != 2:
            raise ValueError(f"pool {pool} is a res-like stem's, and a base one has no max-pool")
        conv_taps(num_heads)  # refuses heads without a CONV, also where the weights are lent
        if down is None:
            each = max(1, round(depth / 6))
            down = (each, 2 * each) if stem == "res-like" else ()
        if not isinstance(down, Sequence) or not all(
            type(at) is int and 1 <= at <= depth for at in down
        ):
            raise ValueError(f"down {down!r} must be numbers of blocks, from 1 to {depth}")
        self.num_classes, self.num_features, self.embed_dim = num_classes, embed_dim, embed_dim
        self.down, self.lent = frozenset(down), [None] * depth
        if stem == "base":
            self.stem = nn.Sequential(nn.Conv2d(in_chans, embed_dim, patch_size, patch_size))
        else:
            self.stem = nn.Sequential(
                nn.Conv2d(in_chans, 64, 7, 2, 3, bias=False),
                nn.BatchNorm2d(64),
                nn.GELU(),
                nn.MaxPool2d(pool, 2, pool // 3),
                nn.Conv2d(64, embed_dim, 3, 2, 1),
            )
        hidden = int(embed_dim * mlp_ratio)
        self.blocks = nn.ModuleList(
            AgentBlock(embed_dim, num_heads, hidden, norm, own_weights) for _ in range(depth)
        )
        self.norm = nn.BatchNorm2d(embed_dim)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        self.token_head = nn.Linear(embed_dim, num_classes) if token_head else None

    def lend(self, vit: nn.Module) -> None:
        """Use the weights of `vit` from now on. Both must be on their device: moving either would
        part them.
        """
        self.lent = lent_by(vit)

    def borrowed(self) -> list[Tensor]:
        """What it has been lent, which has gradients of its own; none for an agent with weights of
        its own.
        """
        return [
            tensor
            for lent in self.lent
            if lent is not None
            for tensor in lent
            if tensor is not None
        ]

    def forward_maps(self, image_NCHW: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The normalized last map, and what every block says, before any halving: `[N, D, Y, X]`
        each.
        """
        x_NDYX, maps = self.stem(image_NCHW), []
        for number, (block, lent) in enumerate(zip(self.blocks, self.lent, strict=True), start=1):
            x_NDYX = block(x_NDYX, lent)
            maps.append(x_NDYX)
            if number in self.down:
                if min(x_NDYX.shape[2:]) < 2:
                    raise ValueError(
                        f"block {number} has {x_NDYX.shape[2]} x {x_NDYX.shape[3]} places, which cannot be halved"
                    )
                x_NDYX = F.avg_pool2d(x_NDYX, 2)
        return F.gelu(self.norm(x_NDYX)), maps

    def forward_features(self, image_NCHW: Tensor) -> Tensor:
        """The normalized last map, `[N, D, Y, X]`: timm's name for what `forward_head` reads."""
        return self.forward_maps(image_NCHW)[0]

    def forward_head(self, x_NDYX: Tensor) -> Tensor | TokenLogits:
        """From the normalized last map to what forward returns."""
        cls_NK = self.head(x_NDYX.mean((2, 3)))
        if self.token_head is None:
            return cls_NK
        tokens_NTK = self.token_head(x_NDYX.flatten(2).transpose(1, 2))
        return (
            TokenLogits(cls_NK, tokens_NTK) if self.training else cls_NK + 0.5 * tokens_NTK.amax(1)
        )

    def forward(self, image_NCHW: Tensor) -> Tensor | TokenLogits:
        return self.forward_head(self.forward_features(image_NCHW))


def make_agent(vit: nn.Module, num_classes: int, shared: bool, **options: object) -> AgentCNN:
    """An agent for `vit`, on its device and, if `shared`, with its weights; `options` are
    AgentCNN's.

    ValueError where `vit` can have none. `lend` is due once both are where they stay.
    """
    width, heads, hidden, depth, patch = vit_spec(vit)
    ours = dict(
        embed_dim=width, depth=depth, num_heads=heads, mlp_ratio=hidden / width, patch_size=patch
    )
    return AgentCNN(num_classes=num_classes, own_weights=not shared, **(ours | options))


def _cfg() -> dict:
    return {
        "input_size": (3, 224, 224),
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "num_classes": 1000,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "stem.0",
        "classifier": "head",
    }


default_cfgs = generate_default_cfgs(
    {name: _cfg() for name in ("agent_micro", "agent_s", "agent_b")}
)


@register_model
def agent_micro(pretrained: bool = False, **kwargs) -> nn.Module:
    """The agent of bootstrapping_vit_micro, on its own."""
    sizes = dict(embed_dim=108, depth=4, num_heads=9, patch_size=8)
    return build_model_with_cfg(AgentCNN, "agent_micro", pretrained, **(sizes | kwargs))


@register_model
def agent_s(pretrained: bool = False, **kwargs) -> nn.Module:
    """Agent-S on its own, res-like: 8.68 M parameters at 100 classes; `stem="base"`: 8.73 M (Table
    1 mixes the two).
    """
    return build_model_with_cfg(AgentCNN, "agent_s", pretrained, **kwargs)


@register_model
def agent_b(pretrained: bool = False, **kwargs) -> nn.Module:
    """Agent-B on its own, res-like: 25.09 M parameters at 100 classes (Table 1 says 25.91)."""
    return build_model_with_cfg(
        AgentCNN, "agent_b", pretrained, **(dict(embed_dim=384, depth=12, num_heads=6) | kwargs)
    )

"""The agent of a vision transformer: a CNN of the same width, depth and number of heads.

Bootstrapping ViTs (arXiv 2112.03552), section 3.2 and Tables 6 and 7. Attention becomes CONV, a
convolution with as many taps as there are heads; the MLPs become 1 x 1 convolutions; the class
token becomes global average pooling. An agent built from a transformer can share its weights.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from timm.layers import Attention, AttentionRope, GELUTanh, Mlp
from timm.layers.activations import GELU
from timm.models import beit, eva, vision_transformer_relpos
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.models import lvvit
from densefeed.models.dhvt import DHVT
from densefeed.models.patch_dropout import refuse_patch_dropout
from densefeed.models.registration import pretrained_cfg, register_family
from densefeed.models.sparse_attention import SparseAttention
from densefeed.models.token_transformer import TokenLogits, check_choice, to_tokens

# N images   D width   H heads, which are the taps   Y, X rows and columns of the map   K classes


class SharedWeights(NamedTuple):
    """A transformer block's weights for its agent's block: separate tensors on shared storage.

    A backward pass gives them gradients of their own, so the agent's and the transformer's gradient
    of a weight stay separate until they are combined. Biases may be None.
    """

    # The rows of qkv for v; q, k and the biases of all three have no part in a CONV.
    value: Tensor  # [D, D]
    proj: Tensor  # [D, D]
    proj_bias: Tensor | None
    fc1: Tensor  # [4 D, D]
    fc1_bias: Tensor | None
    fc2: Tensor  # [D, 4 D]
    fc2_bias: Tensor | None


class ViTSpec(NamedTuple):
    """The sizes of a transformer that define its agent; `patch` is in pixels."""

    width: int
    heads: int
    hidden: int
    depth: int
    patch: int


# Attention modules whose heads pass a weighted mean of their values to proj and nothing else. They
# differ in how the weights of that mean depend on positions (relative, rotary) and on scores
# (softmax, entmax), which the taps replace. Not equation 4's sum of W_h^V W_h^O are CaiT's
# talking-heads attention, XCiT's attention over channels and differential attention, which
# subtracts.
PLAIN = {
    Attention,
    AttentionRope,
    beit.Attention,
    eva.EvaAttention,
    vision_transformer_relpos.RelPosAttention,
    lvvit.Attention,
    SparseAttention,
}
NO_BLOCKS = (
    "it has no blocks of attention (qkv, proj) and MLP (fc1, fc2), all with the width of its tokens"
)


def vit_spec(vit: nn.Module) -> ViTSpec:
    """Return the sizes of a transformer with timm's structure, for which an agent can be built.

    These are DeiT, BEiT, EVA with a plain MLP, ViTs with relative or rotary positions, and hybrids
    with a CNN before the blocks. Norms, layer scales and everything before the blocks are not
    shared. Raises ValueError, naming what is missing or lies between the shared weights, for a
    model that can have no agent or that uses patch dropout in training.
    """
    if isinstance(vit, DHVT):
        raise ValueError(
            "DHVT's attention adds head tokens and its MLP, DAFF, contains convolutions; "
            "an agent has neither"
        )
    blocks = getattr(vit, "blocks", None)
    has_blocks = isinstance(blocks, nn.Module) and len(blocks)
    if not has_blocks or not hasattr(vit, "forward_intermediates"):
        raise ValueError(f"{NO_BLOCKS}, or no forward_intermediates")
    for block in blocks:
        check_block(block, getattr(vit, "embed_dim", 0))
    refuse_patch_dropout(vit)
    heads, hidden = blocks[0].attn.num_heads, blocks[0].mlp.fc1.out_features
    return ViTSpec(vit.embed_dim, heads, hidden, len(blocks), patch_side(vit))


def check_block(block: nn.Module, D: int) -> None:
    """Raise ValueError for a block of width D whose weights an agent cannot share."""
    attn, mlp = getattr(block, "attn", None), getattr(block, "mlp", None)
    shapes = [
        getattr(getattr(attn, name, None), "weight", torch.empty(0)).shape
        for name in ("qkv", "proj")
    ]
    # timm's gated attention multiplies a head's mean of values by a sigmoid, which a CONV lacks.
    plain = shapes == [(3 * D, D), (D, D)] and getattr(attn, "gate", None) is None
    plain = plain and isinstance(mlp, Mlp) and isinstance(mlp.fc1, nn.Linear)
    if not plain or mlp.fc2.in_features != mlp.fc1.out_features:
        raise ValueError(NO_BLOCKS)
    if type(attn) not in PLAIN:
        name = f"{type(attn).__module__.rpartition('.')[2]}.{type(attn).__name__}"
        raise ValueError(
            f"its attention, {name}, is not known to return a mean of values for each head "
            "and nothing else"
        )
    if not all(isinstance(getattr(part, "norm", None), nn.Identity | None) for part in (attn, mlp)):
        raise ValueError(
            "a norm lies between the weights of its attention or MLP that an agent shares"
        )
    if not isinstance(mlp.act, nn.GELU | GELU | GELUTanh):
        raise ValueError(f"its MLP uses {type(mlp.act).__name__}, an agent uses GELU")


def patch_side(vit: nn.Module) -> int:
    """Return the side of a token in pixels; for a hybrid, that of CNN and patches together.

    Raises ValueError if the patches are not square or their size is unknown.
    """
    if hasattr(vit, "patch_size"):
        return vit.patch_size
    embed = getattr(vit, "patch_embed", None)
    if not hasattr(embed, "feat_ratio"):
        raise ValueError("it has no patch_embed that gives the size of its patches")
    rows, columns = embed.feat_ratio(as_scalar=False)
    if rows != columns:
        raise ValueError(f"its patches, {rows} x {columns} pixels, are not square")
    return rows


def read_shared(vit: nn.Module, read: Callable[[Tensor], Tensor]) -> list[SharedWeights]:
    """Return `read` of each weight that a block of `vit` shares with its agent, block by block.

    Of qkv only the rows of v are shared; q and k belong to the transformer alone.
    """
    shared = []
    for block in vit.blocks:
        layers = block.attn.proj, block.mlp.fc1, block.mlp.fc2
        tensors = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
        rest = [None if tensor is None else read(tensor) for tensor in tensors]
        # The rows of qkv are those of q, k and v in turn. The slice is a view, so a gradient that
        # is read here can be written in place.
        shared.append(SharedWeights(read(block.attn.qkv.weight)[2 * vit.embed_dim :], *rest))
    return shared


def conv_taps(heads: int) -> list[tuple[int, int]]:
    """Return each head's tap as (rows down, columns right) of the output position (section 3.2.1).

    These are the first `heads` positions of a square, row by row from the top left; its side S is
    the square root of `heads`, rounded up. The paper takes "a set" of that many; taking the first
    ones is the published code's choice, so 6 heads never read the row below. The square begins
    (S - 1) // 2 rows above and columns left of the output. So one with an even side, which the
    published code refuses, has its additional row below and column right, as `padding="same"` of
    F.conv2d has. Raises ValueError without a head.
    """
    if heads < 1:
        raise ValueError(f"{heads} heads have no CONV; give at least one")
    side = math.isqrt(heads - 1) + 1
    before = (side - 1) // 2
    return [(tap // side - before, tap % side - before) for tap in range(heads)]


def conv_margins(taps: Sequence[tuple[int, int]]) -> tuple[int, int, int, int]:
    """Return how many positions the taps reach beyond a map: left, right, above and below."""
    downs, rights = zip(*taps, strict=True)
    return -min(rights), max(rights), -min(downs), max(downs)


class Conv(nn.Module):
    """CONV with its own weights, equation 3: `[N, D, Y, X]` to the same, zero-padded.

    `weight` is `[D, D, H]`: out, in, tap.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.margins = conv_margins(conv_taps(num_heads))
        self.weight = nn.Parameter(torch.empty(dim, dim, num_heads))
        self.bias = nn.Parameter(torch.zeros(dim))
        # As in the published code; nn.Conv2d's default is Kaiming's.
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x_NDYX: Tensor) -> Tensor:
        # Rows of the kernel without a tap are neither computed nor padded for: 6 heads use a
        # 2 x 3 kernel. In a row that some heads fill, the missing ones have weights of 0.
        left, right, above, below = self.margins
        rows, columns = above + 1 + below, left + 1 + right
        kernel = F.pad(self.weight, (0, rows * columns - self.weight.shape[2]))
        kernel = kernel.unflatten(2, (rows, columns))
        if left == right and above == below:
            return F.conv2d(x_NDYX, kernel, self.bias, padding=(above, left))
        return F.conv2d(F.pad(x_NDYX, self.margins), kernel, self.bias)


def shared_conv(x_NDYX: Tensor, shared: SharedWeights, num_heads: int) -> Tensor:
    """Apply CONV with a transformer's weights, equation 4: head h attends to its tap alone.

    Each head's values are shifted by its tap and then projected: 2 D² products per position, where
    the kernels W_h = W_h^V W_h^O would take H D², and as many again to compute the kernels.
    """
    taps, (Y, X) = conv_taps(num_heads), x_NDYX.shape[2:]
    left, _, above, _ = margins = conv_margins(taps)
    values = F.pad(linear_1x1(x_NDYX, shared.value, None), margins)
    corners = [(above + down, left + right) for down, right in taps]
    shifted = [
        value[:, :, top : top + Y, left : left + X]
        for value, (top, left) in zip(values.chunk(num_heads, 1), corners, strict=True)
    ]
    return linear_1x1(torch.cat(shifted, 1), shared.proj, shared.proj_bias)


def linear_1x1(x_NDYX: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear layer at every position of a map."""
    return F.conv2d(x_NDYX, weight[:, :, None, None], bias)


class AgentBlock(nn.Module):
    """CONV and MLP, each with a BatchNorm and a residual connection.

    Without `own` weights it uses those that forward gets from a transformer.
    """

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

    def _conv(self, x_NDYX: Tensor, shared: SharedWeights | None) -> Tensor:
        return self.conv(x_NDYX) if shared is None else shared_conv(x_NDYX, shared, self.num_heads)

    def _mlp(self, x_NDYX: Tensor, shared: SharedWeights | None) -> Tensor:
        if shared is None:
            return self.fc2(F.gelu(self.fc1(x_NDYX)))
        hidden = F.gelu(linear_1x1(x_NDYX, shared.fc1, shared.fc1_bias))
        return linear_1x1(hidden, shared.fc2, shared.fc2_bias)

    def forward(self, x_NDYX: Tensor, shared: SharedWeights | None = None) -> Tensor:
        if self.norm_first:
            x_NDYX = x_NDYX + self._conv(self.norm1(x_NDYX), shared)
            return x_NDYX + self._mlp(self.norm2(x_NDYX), shared)
        x_NDYX = x_NDYX + self.norm1(self._conv(x_NDYX, shared))
        return x_NDYX + self.norm2(self._mlp(x_NDYX, shared))


def res_like_stem(in_chans: int, embed_dim: int, pool: int) -> nn.Sequential:
    """Build Table 7's stem, which gives a map at 1/8 of the input's size."""
    return nn.Sequential(
        nn.Conv2d(in_chans, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.GELU(),
        # A padding of 0 for 2 and of 1 for 3: both halve the map.
        nn.MaxPool2d(pool, 2, pool // 3),
        nn.Conv2d(64, embed_dim, 3, 2, 1),
    )


class AgentCNN(nn.Module):
    """An agent CNN.

    Args:
        stem: "res-like" (Table 7: two convolutions and a max-pool to 1/8 of the input's size,
            followed by a pyramid) or "base" (Table 6: one convolution of `patch_size`, no pyramid).
        down: blocks, counted from 1, after which a 2 x 2 average pooling halves the map. None
            halves as in Table 7, after one sixth and two sixths of the blocks, (1, 2) of 6 and
            (2, 4) of 12, and not at all in a base agent. Published code: (3, 9) of 12. The
            operations that Table 1 gives, 3.37 and 9.46 G, need (2, 5) of 6 (3.36 G) and (4, 10) of
            12 (9.40 G); Table 7's have 1.91 and 5.15 G.
        pool: side of the res-like stem's max-pool: 2 in Table 7, 3 in the published code.
        norm: norms "before" CONV and MLP or "after" them, on the branch. The paper does not specify
            it; the published Agent-B has "after".
        token_head: a second classifier on every position of the last map, for dense labels; in
            evaluation half its maximum is added.
        own_weights: False omits the weights that a transformer shares (`share_weights`).

    Forward takes images `[N, in_chans, H, W]` of any size and returns logits `[N, K]`, in training
    with a token head `TokenLogits`. Raises ValueError for images whose map becomes too small to be
    halved.
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
        check_choice("stem", stem, ("res-like", "base"))
        check_choice("norm", norm, ("before", "after"))
        check_choice("pool", pool, (2, 3))
        if stem == "base" and pool != 2:
            raise ValueError(f"pool {pool} is for a res-like stem; a base stem has no max-pool")
        if down is None:
            sixth = max(1, round(depth / 6))
            down = (sixth, 2 * sixth) if stem == "res-like" else ()
        # isinstance of int would take True for block 1.
        if not isinstance(down, Sequence) or not all(
            type(number) is int and 1 <= number <= depth for number in down
        ):
            raise ValueError(f"down {down!r} must be numbers of blocks, from 1 to {depth}")
        self.num_classes, self.num_features = num_classes, embed_dim
        # A list of tensors, no parameters: state dict and optimizer hold a shared weight once, with
        # the transformer.
        self.down, self.shared_weights = frozenset(down), [None] * depth
        if stem == "base":
            self.stem = nn.Sequential(nn.Conv2d(in_chans, embed_dim, patch_size, patch_size))
        else:
            self.stem = res_like_stem(in_chans, embed_dim, pool)
        hidden = int(embed_dim * mlp_ratio)
        self.blocks = nn.ModuleList(
            AgentBlock(embed_dim, num_heads, hidden, norm, own_weights) for _ in range(depth)
        )
        self.norm = nn.BatchNorm2d(embed_dim)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        self.token_head = nn.Linear(embed_dim, num_classes) if token_head else None

    def share_weights(self, vit: nn.Module) -> None:
        """Use the weights of `vit` from now on, not copies of them.

        Both must already be on their device: moving either would break weight sharing.
        """
        # A detached tensor has the same storage; its gradient is then its own.
        self.shared_weights = read_shared(vit, Tensor.detach)
        for tensor in self.shared_tensors():
            tensor.requires_grad_()

    def shared_tensors(self) -> list[Tensor]:
        """Return the shared tensors, which have gradients of their own; empty with own weights."""
        return [
            tensor
            for shared in self.shared_weights
            for tensor in shared or ()
            if tensor is not None
        ]

    def forward_maps(self, image_NCHW: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the normalized last map and every block's output before any halving.

        Each is `[N, D, Y, X]`.
        """
        x_NDYX, maps = self.stem(image_NCHW), []
        for number, (block, shared) in enumerate(
            zip(self.blocks, self.shared_weights, strict=True), start=1
        ):
            x_NDYX = block(x_NDYX, shared)
            maps.append(x_NDYX)
            if number in self.down:
                rows, columns = x_NDYX.shape[2:]
                # avg_pool2d's own error would not name the block.
                if min(rows, columns) < 2:
                    raise ValueError(
                        f"block {number} has a map of {rows} x {columns}, which cannot be halved"
                    )
                x_NDYX = F.avg_pool2d(x_NDYX, 2)
        return F.gelu(self.norm(x_NDYX)), maps

    def forward_features(self, image_NCHW: Tensor) -> Tensor:
        """Return the normalized last map `[N, D, Y, X]`, the input of `forward_head`."""
        return self.forward_maps(image_NCHW)[0]

    def forward_head(self, x_NDYX: Tensor) -> Tensor | TokenLogits:
        """Return the output of forward from the normalized last map."""
        cls_NK = self.head(x_NDYX.mean((2, 3)))
        if self.token_head is None:
            return cls_NK
        tokens_NTK = self.token_head(to_tokens(x_NDYX))
        if self.training:
            return TokenLogits(cls_NK, tokens_NTK)
        return cls_NK + 0.5 * tokens_NTK.amax(1)

    def forward(self, image_NCHW: Tensor) -> Tensor | TokenLogits:
        return self.forward_head(self.forward_features(image_NCHW))


def make_agent(vit: nn.Module, num_classes: int, shared: bool, **options: object) -> AgentCNN:
    """Build an agent for `vit`; `options` are arguments of `AgentCNN`.

    If `shared`, call `share_weights` once both are on their device. Raises ValueError if `vit` can
    have no agent.
    """
    width, heads, hidden, depth, patch = vit_spec(vit)
    return AgentCNN(
        num_classes=num_classes,
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        mlp_ratio=hidden / width,
        patch_size=patch,
        own_weights=not shared,
        **options,
    )


_CFG = pretrained_cfg("stem.0", "head")

# Agents of the transformers in vit.py, as models of their own.
register_family(
    __name__,
    AgentCNN,
    {
        "agent_micro": (_CFG, dict(embed_dim=108, depth=4, num_heads=9, patch_size=8)),
        # Res-like: 8.68 M parameters at 100 classes. `stem="base"` has 8.73 M; Table 1 mixes the
        # two.
        "agent_s": (_CFG, {}),
        # Res-like: 25.09 M parameters at 100 classes. Table 1 gives 25.91 M.
        "agent_b": (_CFG, dict(embed_dim=384, depth=12, num_heads=6)),
    },
)

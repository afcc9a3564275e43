"""DRLoc: two tokens of a grid are shown, and a small head says how far apart they lie (arXiv
2106.03746 and its supplementary).

The loss is added to whatever else a network is trained on. It needs no labels but places, and every
network with a grid of tokens or a map of features has these. Equations and tables are those of the
supplementary; `published` is what its public code does instead, where that differs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from timm.models import SwinTransformer, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F
from tyro.conf import arg

from densefeed.models.patch_dropout import refuse_patch_dropout
from densefeed.objectives.base import Objective, Place, Setting, StepContext
from densefeed.pipelines.batch import Batch
from densefeed.pipelines.pairs import Pairs, draw_pairs
from densefeed.pipelines.plan import EpochPlan
from densefeed.system.errors import UserError
from densefeed.system.options import Bounds, Count, NonNegative, Options

# N images   D width   R x C a grid, rows and columns   T = R C   M pairs of an image   B offsets that ce and reg tell apart

Variant = Literal["l1", "signed", "ce", "reg", "all"]
RISING_EPOCHS = 20  # of the loss's weight, in the published code
HIDDEN = 512  # Table 16: 256 and 1,024 gain less
ALPHA = 1e-3  # of equation 6
# keeps equation 6 finite where a distribution is one single offset; the public code's number
LEAST_VARIANCE = 1e-8


class PoolError(ValueError):
    """A grid that cannot be pooled as it was asked; `sides` are what it can be pooled to, 0 (not at
    all) first, perhaps none.
    """

    def __init__(self, why: str, grid: tuple[int, int]) -> None:
        super().__init__(f"its grid of {grid[0]} x {grid[1]} {why}")
        R, C = grid
        smaller = [
            R // factor for factor in range(2, min(R, C) // 2 + 1) if R % factor == C % factor == 0
        ]
        self.sides = [0, *smaller] if min(R, C) > 1 else []


def pool_factor(grid: tuple[int, int], side: int) -> int:
    """How many places of a grid of (rows, columns), along each axis, become one, so that `side`
    rows are left; 1 for side 0.

    PoolError, a ValueError, if the grid is smaller than that, is no whole multiple of it, or leaves
    nothing to compare.
    """
    R, C = grid
    if side and min(R, C) < side:
        raise PoolError(f"is smaller than a pool to {side} x {side}", grid)
    factor = R // side if side else 1
    if side and (R % side or C % factor):
        raise PoolError(f"is no multiple of {side} x {side}", grid)
    if min(R, C) // factor < 2:
        raise PoolError(
            f"leaves {R // factor} x {C // factor} places, too few to have a distance", grid
        )
    return factor


def pooled(map_NDRC: Tensor, factor: int) -> Tensor:
    """Means over windows of 2 `factor` - 1 places, `factor` apart, zeros beyond the edge not
    counted: `[N, D, R / factor, ...]`.

    For a factor of 2 that is the published pool of 14 x 14 to 7 x 7.
    """
    if factor == 1:
        return map_NDRC
    return F.avg_pool2d(map_NDRC, 2 * factor - 1, factor, factor - 1, count_include_pad=False)


def places(words_NM4: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Uniform rows and columns of both places of a pair from 32 random bits each, all int64: `[N,
    M, 2]` each.

    Of k rows each has the probability 1 / k to within 2^-32. Both places of a pair may be one.
    """
    R, C = grid
    return words_NM4[..., 0::2] * R >> 32, words_NM4[..., 1::2] * C >> 32


def gather_pairs(map_NDRC: Tensor, row_NM2: Tensor, column_NM2: Tensor) -> Tensor:
    """The embeddings at both places of each pair, one behind the other: `[N, D, R, C]`, int64 `[N,
    M, 2]` to `[N, M, 2 D]`.

    An embedding lookup, because its backward pass adds up what falls on one place in a fixed order
    on every device.
    """
    N, D, R, C = map_NDRC.shape
    image = torch.arange(N, device=map_NDRC.device)[:, None, None]
    return F.embedding(
        (image * R + row_NM2) * C + column_NM2, map_NDRC.permute(0, 2, 3, 1).reshape(N * R * C, D)
    ).flatten(2)


def offset_classes(side: int, published: bool = False) -> int:
    """How many offsets along an axis of `side` places `ce` and `reg` tell apart.

    2 k + 1 in the paper (equation 4), of which -k and k never occur; 2 k - 1 in the public code.
    """
    return 2 * side - 1 if published else 2 * side + 1


class LocalizationHead(nn.Sequential):
    """Table 15: `[..., 2 width]`, the embeddings of a pair one behind the other, to `[...,
    outputs]`.

    With `deep` a third linear layer without an activation stands before the last, as in the public
    code of `ce` and `reg`.
    """

    def __init__(self, width: int, outputs: int, hidden: int = HIDDEN, deep: bool = False) -> None:
        super().__init__(
            nn.Linear(2 * width, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            *([nn.Linear(hidden, hidden)] if deep else []),
            nn.Linear(hidden, outputs),
        )


def at_least_float32(x: Tensor) -> Tensor:
    """Losses are no matter for 16 bits, whatever the products before them were computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def regression_loss(
    said_NM: Tensor, offset_NM: Tensor, side: int, signed: bool, published: bool
) -> Tensor:
    """Equations 1 to 3 along one axis of `side` places: how far off the offset (first place less
    second) is said. `[N, M]`.

    Offsets without their sign, or `signed`, are divided by `side`, so that they lie in [0, 1) or
    (-1, 1); `published` leaves them in places, signed ones counted from 0 to 2 k - 2.
    """
    target_NM = offset_NM if signed else offset_NM.abs()
    target_NM = target_NM + (side - 1) * signed if published else target_NM / side
    return (at_least_float32(said_NM) - target_NM).abs()


def classification_loss(logits_NMB: Tensor, offset_NM: Tensor) -> Tensor:
    """Equation 5 along one axis: cross entropy with the offset, of which that of 0 is the middle
    class. `[N, M]`.
    """
    B = logits_NMB.shape[-1]
    label_NM = offset_NM + B // 2
    logits_LB = at_least_float32(logits_NMB).flatten(0, 1)
    return F.cross_entropy(logits_LB, label_NM.flatten(), reduction="none").view_as(label_NM)


def expectation_loss(logits_NMB: Tensor, offset_NM: Tensor, published: bool) -> Tensor:
    """Equation 6 along one axis: the squared distance from the mean of what is said, over its
    variance. `[N, M]`.

    ALPHA log(sigma) is added; `published` adds ALPHA log(sigma^2).
    """
    p_NMB = at_least_float32(logits_NMB).softmax(-1)
    B = p_NMB.shape[-1]
    classes_B = torch.arange(B, device=p_NMB.device) - B // 2
    mean_NM1 = (p_NMB * classes_B).sum(-1, keepdim=True)
    variance_NM = (p_NMB * (classes_B - mean_NM1).square()).sum(-1) + LEAST_VARIANCE
    spread = ALPHA * (1 if published else 0.5) * variance_NM.log()
    return (offset_NM - mean_NM1.squeeze(-1)).square() / variance_NM + spread


class LocalizationLoss(nn.Module):
    """The loss, with its heads.

    Args:
        variant: `l1` (L_drloc), `signed` (L*_drloc, equation 3), `ce` (equation 5), `reg` (equation
            6), or `all` (equation 7): l1 on every map, each with its own head, summed.
        widths: D of each map; one, but for `all`.
        side: rows to which the last map is pooled, the others as it is; 0: none is.
        grid: rows and columns of the last map, pooled; `ce` and `reg` have a class for each of its
            offsets, and take no other.
        published: targets count places and are no shares of the grid, so the same weight weighs 2 k
            times as much in `signed` and k times in `l1`; in `ce` and `reg` other classes, a deeper
            head and twice the logarithm of equation 6.

    Forward takes maps `[N, D, R, C]`, 32 random bits for each number of each pair (int64 `[N, M,
    4]`: row and column of the first place, then of the second) and a weight of each image, float
    `[N]`. It returns the mean over pairs and over images by weight, float32 `[]`. Gradients reach
    both embeddings of a pair. All maps are asked for the same shares of their sides: that changes
    none of equation 7's expectations. Raises ValueError for maps that cannot be pooled so.
    """

    def __init__(
        self,
        variant: Variant,
        widths: Sequence[int],
        side: int,
        grid: tuple[int, int],
        published: bool,
    ) -> None:
        super().__init__()
        self.variant, self.side, self.published = variant, side, published
        classes = variant in ("ce", "reg")
        # along each axis
        self.outputs = [offset_classes(places, published) if classes else 1 for places in grid]
        self.heads = nn.ModuleList(
            LocalizationHead(width, sum(self.outputs), deep=published and classes)
            for width in widths
        )

    def forward(self, maps: Sequence[Tensor], words_NM4: Tensor, weight_N: Tensor) -> Tensor:
        factor = pool_factor(tuple(maps[-1].shape[2:]), self.side)
        losses = [
            self._of_pairs(head, pooled(map_NDRC, factor), words_NM4)
            for head, map_NDRC in zip(self.heads, maps, strict=True)
        ]
        return (sum(losses).mean(1) * weight_N).sum() / weight_N.sum().clamp(min=1e-6)

    def _of_pairs(self, head: nn.Module, map_NDRC: Tensor, words_NM4: Tensor) -> Tensor:
        grid = tuple(map_NDRC.shape[2:])
        row_NM2, column_NM2 = places(words_NM4, grid)
        said = head(gather_pairs(map_NDRC, row_NM2, column_NM2)).split(self.outputs, -1)
        offsets = [place_NM2[..., 0] - place_NM2[..., 1] for place_NM2 in (row_NM2, column_NM2)]
        if self.variant == "ce":
            return sum(map(classification_loss, said, offsets))
        if self.variant == "reg":
            return sum(
                expectation_loss(logits, offset, self.published)
                for logits, offset in zip(said, offsets, strict=True)
            )
        # The mean of both axes, as in the published pseudocode; equation 2 writes the sum, which is
        # twice that.
        signed = self.variant == "signed"
        return sum(
            regression_loss(one.squeeze(-1), offset, side, signed, self.published) / 2
            for one, offset, side in zip(said, offsets, grid, strict=True)
        )


class LocalizedOutput(NamedTuple):
    """What a `LocalizedModel` network returns: what its model does, and the loss of the places,
    float32 `[]`.
    """

    output: Any
    loss: Tensor


def feature_map(features: Any, model: nn.Module, image_NCHW: Tensor) -> Tensor:
    """What timm's `forward_features` gives, `[N, T, D]` with or without prefix tokens, `[N, D, R,
    C]` or `[N, R, C, D]`, as `[N, D, R, C]`. ValueError if it is none of these, or the class token
    alone.
    """
    if isinstance(features, Tensor) and features.ndim == 4:
        return (
            features.permute(0, 3, 1, 2)
            if getattr(model, "output_fmt", "NCHW") == "NHWC"
            else features
        )
    if isinstance(features, Tensor) and features.ndim == 3:
        tokens_NTD, (H, W) = (
            features[:, getattr(model, "num_prefix_tokens", 0) :],
            image_NCHW.shape[2:],
        )
        T = tokens_NTD.shape[1]
        # PiT, which tells no number of prefix tokens, keeps its map to itself.
        if (
            not hasattr(model, "num_prefix_tokens")
            and getattr(model, "cls_token", tokens_NTD[:, :0]).shape[1] == T
        ):
            raise ValueError(
                "its features are the class token alone, and no grid of tokens; choose another model"
            )
        R = round(math.sqrt(T * H / W))
        if R and T % R == 0:
            return tokens_NTD.transpose(1, 2).unflatten(2, (R, T // R))
    raise ValueError("it gives no map and no grid of tokens; choose another model")


class LocalizedModel(nn.Module):
    """A network of timm's kind and a `LocalizationLoss` that reads its last map, or all of its
    maps, in the same forward pass.

    Args:
        model: has `forward_features` and `forward_head`, which one after the other are its forward.
        variant, side, published: see `LocalizationLoss`.
        sizes: sides of the inputs that it will see, pixels.

    The map is what `forward_features` gives, after the final norm; `all` reads those of
    `forward_intermediates`, without norm: of every block, or of every stage of a pyramid.
    `published` takes Swin's and ViT's before the norm, as the public code does. Under MixToken it
    is the map of the mixed image: what is exchanged keeps its place, so offsets stay true.

    Forward takes images `[N, C, H, W]`, bits and weights as `LocalizationLoss` does, and what else
    the model takes. Raises ValueError where the model gives no such map, one that cannot be pooled
    so, or leaves out patches in training.
    """

    def __init__(
        self,
        model: nn.Module,
        variant: Variant,
        side: int,
        sizes: Sequence[int],
        published: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.indices = None if variant == "all" else 1  # of forward_intermediates: all, or the last
        self.from_blocks = variant == "all" or (
            published and isinstance(model, SwinTransformer | VisionTransformer)
        )
        needed = (
            "forward_features",
            "forward_head",
            *(("forward_intermediates",) if self.from_blocks else ()),
        )
        if missing := [name for name in needed if not callable(getattr(model, name, None))]:
            other = ", or another variant" if missing[0] == "forward_intermediates" else ""
            raise ValueError(f"it has no {missing[0]}; choose another model{other}")
        refuse_patch_dropout(model)
        shapes = [self._shapes(size) for size in sizes]
        grids = []
        for *_, (_, R, C) in shapes:
            factor = pool_factor((R, C), side)
            grids.append((R // factor, C // factor))
        if variant in ("ce", "reg") and len(set(grids)) > 1:
            raise ValueError(
                f"its offsets differ in number between input sizes, with {variant} a class each; choose one size"
            )
        self.localizer = LocalizationLoss(
            variant, [D for D, _, _ in shapes[0]], side, grids[0], published
        )

    @property
    def networks(self) -> tuple[nn.Module]:
        """The model, without the heads."""
        return (self.model,)

    @torch.no_grad()
    def _shapes(self, size: int) -> list[tuple[int, int, int]]:
        """D, R and C of each map of an input of `size` pixels, learned from a blank image."""
        like, training = next(self.model.parameters()), self.model.training
        try:
            self.model.eval()
            _, maps = self._features(
                torch.zeros(1, 3, size, size, device=like.device, dtype=like.dtype)
            )
        finally:
            self.model.train(training)
        return [tuple(map_NDRC.shape[1:]) for map_NDRC in maps]

    def _features(self, image_NCHW: Tensor, **more: Any) -> tuple[Tensor, list[Tensor]]:
        """What the model's head reads, and the maps."""
        if self.from_blocks:
            return self.model.forward_intermediates(image_NCHW, indices=self.indices)
        features = self.model.forward_features(image_NCHW, **more)
        return features, [feature_map(features, self.model, image_NCHW)]

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """The model's own exceptions; of the heads timm's rule finds all, which are biases."""
        return {f"model.{name}" for name in getattr(self.model, "no_weight_decay", set)()}

    def forward(
        self, image_NCHW: Tensor, words_NM4: Tensor, weight_N: Tensor, **more: Any
    ) -> LocalizedOutput:
        features, maps = self._features(image_NCHW, **more)
        return LocalizedOutput(
            self.model.forward_head(features, **more), self.localizer(maps, words_NM4, weight_N)
        )


# ---------------------------------------------------------------- the objective


@dataclass(frozen=True, kw_only=True)
class DRLocOptions(Options):
    """Options of `--drloc`."""

    # also predict the relative offset of pairs of tokens, in this variant of the loss
    variant: Annotated[Literal["none", "l1", "signed", "ce", "reg", "all"], arg(name="drloc")] = (
        "none"
    )
    # weight of that loss, lambda of the paper
    weight: Annotated[NonNegative, arg(name="drloc-weight")] = 0.5
    # pairs of tokens per image
    pairs: Annotated[Count, arg(name="drloc-pairs")] = 64
    # rows to which the grid of tokens is pooled for it; 0: not pooled
    grid: Annotated[int, Bounds(0), arg(name="drloc-grid")] = 7
    # as the published code: offsets counted in places, a weight that rises and falls, other heads
    published: Annotated[bool, arg(name="drloc-published")] = False


class DRLoc(Objective):
    """`--drloc`: adds the localization loss to another objective."""

    name = "drloc"

    def __init__(self, setting: Setting, base: Objective) -> None:
        super().__init__(setting)
        self.base, self.options = base, setting.options.drloc
        self.needs_score_maps, self.needs_tokens = base.needs_score_maps, base.needs_tokens

    def check(self) -> None:
        self.base.check()
        if self.options.variant == "all" and self.setting.mix.mixtoken:
            raise UserError(
                "--drloc all reads the tokens of every block, and models return these without "
                "MixToken only; give --no-mixtoken"
            )

    def wrap(self, model: nn.Module, num_classes: int, place: Place) -> nn.Module:
        options = self.options
        try:
            heads = LocalizedModel(
                model, options.variant, options.grid, self.setting.sizes, options.published
            )
        except (ValueError, RuntimeError, AssertionError, AttributeError, TypeError) as error:
            why = str(error).partition("\n")[0]
            if isinstance(error, PoolError):
                fit = ", ".join(map(str, error.sides))
                give = f"give --drloc-grid one of {fit}"
                why += f"; {give if fit else 'choose a larger --size or another --model'}"
            raise UserError(
                f"--drloc {options.variant} cannot be computed of {self.setting.model}: {why}"
            ) from error
        return heads.to(next(model.parameters()).device)

    def inputs(self, plan: EpochPlan, epoch: int, batch: Batch) -> tuple[Pairs, Any]:
        pairs = draw_pairs(plan, epoch, batch, self.options.pairs, self.weight(epoch))
        return pairs, self.base.inputs(plan, epoch, batch)

    def forward(
        self, network: nn.Module, image: Tensor, batch: Batch, step: StepContext
    ) -> LocalizedOutput:
        words = step.inputs[0].words
        return network(image, words, batch.weight, **self.mix_arguments(step))

    def loss(self, output: LocalizedOutput, batch: Batch, step: StepContext) -> Tensor:
        pairs, inputs = step.inputs
        base = self.base.loss(output.output, batch, step._replace(inputs=inputs))
        return base + pairs.weight * output.loss

    def weight(self, epoch: int) -> float:
        """Return lambda: constant in the paper; the published code raises it and lowers it to 0."""
        if not self.options.published:
            return self.options.weight
        falling = (self.setting.epochs - epoch) / max(self.setting.epochs - RISING_EPOCHS, 1)
        return self.options.weight * max(0.0, min(epoch / RISING_EPOCHS, falling))

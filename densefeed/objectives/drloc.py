"""DRLoc: a small head predicts the relative offset of two tokens of a grid (arXiv 2106.03746).

The loss is added to that of another objective. It needs no labels but positions, which every
network with a grid of tokens or a feature map has. Equations and tables are those of the paper's
supplementary; `published` is what its public code does instead, where that differs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from timm.models import SwinTransformer, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F
from tyro.conf import arg

from densefeed.models.block_maps import feature_map, forward_block_maps, forward_merged_maps
from densefeed.models.patch_dropout import refuse_patch_dropout
from densefeed.models.token_transformer import Grid
from densefeed.models.wrapped_model import WrappedModel
from densefeed.objectives.base import Method, Place, StepContext
from densefeed.objectives.losses import weighted_mean
from densefeed.pipelines.batch import Batch
from densefeed.pipelines.philox import philox_on_device
from densefeed.pipelines.plan import PAIRS, EpochPlan
from densefeed.pipelines.shapes import Shape, split_grid
from densefeed.system.errors import UserError, first_line
from densefeed.system.options import Bounds, NonNegative, NonNegativeInt, Options

# N images   D width   R x C a grid, rows and columns   T = R C tokens   M pairs per image
# B classes of offsets in ce and reg

Variant = Literal["l1", "signed", "ce", "reg", "all"]
# Pairs of tokens of each image, as in the paper.
PAIRS_PER_IMAGE = 64
# Epochs in which the published code raises the weight of the loss. The paper mentions no schedule.
RISING_EPOCHS = 20
ALPHA = 1e-3  # of equation 6
# Keeps equation 6 finite where a distribution has a single offset; the value of the public code.
MIN_VARIANCE = 1e-8


class PoolError(ValueError):
    """A grid that cannot be pooled as requested.

    `sides` are the values that it can be pooled to, 0 (no pooling) first; it may be empty.
    """

    def __init__(self, why: str, grid: Grid) -> None:
        super().__init__(f"its grid of {grid[0]} x {grid[1]} {why}")
        R, C = grid
        # A pooled side of one position would have no offsets.
        factors = range(2, min(R, C) // 2 + 1)
        smaller = [R // factor for factor in factors if R % factor == C % factor == 0]
        self.sides = [0, *smaller] if min(R, C) > 1 else []


def pool_factor(grid: Grid, side: int) -> int:
    """Return the stride that pools a grid of (rows, columns) to `side` rows; 1 for side 0.

    Raises PoolError, a ValueError, if the grid is smaller than that, is not a multiple of it, or
    leaves nothing to compare.
    """
    R, C = grid
    if side and min(R, C) < side:
        raise PoolError(f"is smaller than {side} x {side}", grid)
    factor = R // side if side else 1
    if side and (R % side or C % factor):
        raise PoolError(f"is not a multiple of {side} x {side}", grid)
    if min(R, C) // factor < 2:
        left = f"{R // factor} x {C // factor}"
        raise PoolError(f"leaves {left} positions, too few for an offset", grid)
    return factor


def pool_map(map_NDRC: Tensor, factor: int) -> Tensor:
    """Average-pool with a stride of `factor`: `[N, D, R, C]` to `[N, D, R / factor, C / factor]`.

    The kernel has 2 `factor` - 1 positions a side, and padding does not count. For a factor of 2
    this is the published pooling of 14 x 14 to 7 x 7.
    """
    if factor == 1:
        return map_NDRC
    return F.avg_pool2d(map_NDRC, 2 * factor - 1, factor, factor - 1, count_include_pad=False)


class Pairs(NamedTuple):
    """The pairs of one step and the weight of their loss."""

    # int64 [N, M, 4], 32 random bits each: row and column of the first place, of the second
    words: Tensor
    weight: Tensor  # float32 [], lambda: the weight of the loss


def draw_pairs(plan: EpochPlan, epoch: int, batch: Batch, count: int, weight: float) -> Pairs:
    """Draw `count` pairs for each image of a batch on its device, without a host sync.

    They depend on (seed, epoch, sample id, repeat) alone. A batch of 1,024 images needs 262,144
    numbers a step, and their counters are sample ids, which are on the device already.
    """
    device = batch.index.device
    # The word of EpochPlan.draws: the stream below, the repeat in the upper 16 bits.
    kind = (batch.repeat << 16 | PAIRS)[:, None]
    words = philox_on_device(
        plan.seed, (epoch, batch.index[:, None], kind, torch.arange(count, device=device))
    )
    return Pairs(words, torch.full((), weight, device=device))


def select_positions(words_NM4: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Select uniform rows and columns of pairs from 32 random bits each, all int64: `[N, M, 2]`.

    Each of k rows has the probability 1 / k to within 2^-32. Both positions of a pair may be equal.
    """
    R, C = grid
    # 32 bits times a side fit int64, and a shift needs no division.
    return words_NM4[..., 0::2] * R >> 32, words_NM4[..., 1::2] * C >> 32


def gather_pairs(map_NDRC: Tensor, row_NM2: Tensor, column_NM2: Tensor) -> Tensor:
    """Concatenate the embeddings of each pair: `[N, D, R, C]`, int64 `[N, M, 2]` to `[N, M, 2 D]`.

    Uses an embedding lookup, because its backward pass sums the gradients of one position in a
    fixed order on every device.
    """
    N, D, R, C = map_NDRC.shape
    image = torch.arange(N, device=map_NDRC.device)[:, None, None]
    table_LD = map_NDRC.permute(0, 2, 3, 1).reshape(N * R * C, D)
    return F.embedding((image * R + row_NM2) * C + column_NM2, table_LD).flatten(2)


def offset_classes(side: int, published: bool = False) -> int:
    """Return the number of classes that `ce` and `reg` have for offsets along `side` positions.

    It is 2 k + 1 in the paper (equation 4), where -k and k never occur; 2 k - 1 in the public code.
    """
    return 2 * side - 1 if published else 2 * side + 1


class LocalizationHead(nn.Sequential):
    """Head of Table 15: concatenated embeddings of a pair `[..., 2 width]` to `[..., outputs]`.

    Each of the two hidden layers has `hidden` neurons (Table 16). With `deep` a third linear layer
    without an activation precedes the last, as in the public code of `ce` and `reg`.
    """

    def __init__(self, width: int, outputs: int, hidden: int, deep: bool = False) -> None:
        super().__init__(
            nn.Linear(2 * width, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            *([nn.Linear(hidden, hidden)] if deep else []),
            nn.Linear(hidden, outputs),
        )


def upcast(x: Tensor) -> Tensor:
    """Convert to float32 at least: losses need more than 16 bits, whatever autocast computes in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def regression_loss(
    predicted_NM: Tensor, offset_NM: Tensor, side: int, signed: bool, published: bool
) -> Tensor:
    """Compute equations 1 to 3 along one axis: absolute error of the predicted offset, `[N, M]`.

    The offset is the first position minus the second. Its absolute value, or itself if `signed`, is
    divided by the `side` positions of the axis and lies in [0, 1) or (-1, 1). `published` keeps it
    in positions, and counts signed ones from 0 to 2 k - 2.
    """
    target_NM = offset_NM if signed else offset_NM.abs()
    target_NM = target_NM + (side - 1) * signed if published else target_NM / side
    return (upcast(predicted_NM) - target_NM).abs()


def classification_loss(logits_NMB: Tensor, offset_NM: Tensor) -> Tensor:
    """Compute equation 5 along one axis: cross entropy with the offset, `[N, M]`.

    The middle class is the offset 0.
    """
    B = logits_NMB.shape[-1]
    # B is odd in both numberings, so this is the middle class.
    label_NM = offset_NM + B // 2
    logits_LB = upcast(logits_NMB).flatten(0, 1)
    return F.cross_entropy(logits_LB, label_NM.flatten(), reduction="none").view_as(label_NM)


def expectation_loss(logits_NMB: Tensor, offset_NM: Tensor, published: bool) -> Tensor:
    """Compute equation 6 along one axis: squared error of the predicted mean, over its variance.

    Returns `[N, M]`. ALPHA log(sigma) is added; `published` adds ALPHA log(sigma^2).
    """
    p_NMB = upcast(logits_NMB).softmax(-1)
    B = p_NMB.shape[-1]
    classes_B = torch.arange(B, device=p_NMB.device) - B // 2
    mean_NM1 = (p_NMB * classes_B).sum(-1, keepdim=True)
    variance_NM = (p_NMB * (classes_B - mean_NM1).square()).sum(-1) + MIN_VARIANCE
    # log(sigma) is half of log(sigma^2) and needs no square root.
    spread = ALPHA * (1 if published else 0.5) * variance_NM.log()
    return (offset_NM - mean_NM1.squeeze(-1)).square() / variance_NM + spread


class LocalizationLoss(nn.Module):
    """The localization loss with its heads.

    Args:
        variant: `l1` (L_drloc), `signed` (L*_drloc, equation 3), `ce` (equation 5), `reg` (equation
            6), or `all` (equation 7): the sum of l1 on every map, each with its own head.
        widths: D of each map; one map, except for `all`.
        side: rows to which the last map is pooled, the others by the same factor; 0: no pooling.
        grid: rows and columns of the last map after pooling. `ce` and `reg` have a class for each
            offset in it and accept no other grid.
        published: targets count positions and are not fractions of the grid, so the same weight
            counts 2 k times as much in `signed` and k times in `l1`; `ce` and `reg` have other
            classes, a deeper head and twice the logarithm of equation 6.
        hidden: neurons of each hidden layer of the heads.

    Forward takes maps `[N, D, R, C]`, 32 random bits for each coordinate of each pair (int64 `[N,
    M, 4]`: row and column of the first position, then of the second) and a weight for each image,
    float `[N]`. It returns the mean over pairs and the weighted mean over images, float32 `[]`.
    Gradients reach both embeddings of a pair. All maps use the same random bits, so the same
    fractions of their sides, which changes none of the expectations of equation 7. Raises
    ValueError for maps that cannot be pooled so.
    """

    def __init__(
        self,
        variant: Variant,
        widths: Sequence[int],
        side: int,
        grid: Grid,
        published: bool,
        hidden: int = 512,
    ) -> None:
        super().__init__()
        self.variant, self.side, self.published = variant, side, published
        classes = variant in ("ce", "reg")
        self.outputs = [offset_classes(k, published) if classes else 1 for k in grid]  # per axis
        self.heads = nn.ModuleList(
            LocalizationHead(width, sum(self.outputs), hidden, published and classes)
            for width in widths
        )

    def forward(self, maps: Sequence[Tensor], words_NM4: Tensor, weight_N: Tensor) -> Tensor:
        # The last map of a pyramid is the smallest, and `side` is meant for it.
        factor = pool_factor(tuple(maps[-1].shape[2:]), self.side)
        losses = [
            self._pair_loss(head, pool_map(map_NDRC, factor), words_NM4)
            for head, map_NDRC in zip(self.heads, maps, strict=True)
        ]
        return weighted_mean(sum(losses).mean(1), weight_N)

    def _pair_loss(self, head: nn.Module, map_NDRC: Tensor, words_NM4: Tensor) -> Tensor:
        """Return the loss of each pair of one map, summed over both axes, `[N, M]`."""
        grid = tuple(map_NDRC.shape[2:])
        positions = select_positions(words_NM4, grid)
        predictions = head(gather_pairs(map_NDRC, *positions)).split(self.outputs, -1)
        offsets = [at_NM2[..., 0] - at_NM2[..., 1] for at_NM2 in positions]
        if self.variant == "ce":
            return sum(map(classification_loss, predictions, offsets))
        if self.variant == "reg":
            return sum(
                expectation_loss(logits, offset, self.published)
                for logits, offset in zip(predictions, offsets, strict=True)
            )
        # The mean of both axes, as in the published pseudocode; equation 2 has the sum, which is
        # twice that.
        signed = self.variant == "signed"
        return sum(
            regression_loss(one.squeeze(-1), offset, side, signed, self.published) / 2
            for one, offset, side in zip(predictions, offsets, grid, strict=True)
        )


class LocalizedOutput(NamedTuple):
    """Output of `LocalizedModel`: that of its model, and the localization loss, float32 `[]`."""

    output: Any
    loss: Tensor


def forward_last_map(model: nn.Module, image_NCHW: Tensor) -> tuple[Any, list[Tensor]]:
    """Return the input of the model's head, and its last map before the final norm."""
    return model.forward_intermediates(image_NCHW, indices=1)


def choose_maps(
    model: nn.Module, variant: Variant, published: bool
) -> Callable[[nn.Module, Tensor], tuple[Any, list[Tensor]]] | None:
    """Return the function that runs a model and reads its maps; None: `forward_features`."""
    if variant == "all":
        merged = published and isinstance(model, SwinTransformer)
        return forward_merged_maps if merged else forward_block_maps
    before_norm = published and isinstance(model, SwinTransformer | VisionTransformer)
    return forward_last_map if before_norm else None


class LocalizedModel(WrappedModel):
    """A timm model with a `LocalizationLoss` on its last map, or on all, in one forward pass.

    Args:
        model: has `forward_features` and `forward_head`, whose composition is its forward.
        variant, side, published, hidden: see `LocalizationLoss`.
        shapes: of the inputs in training, sides or (height, width), pixels.

    The map is the output of `forward_features`, after the final norm. `all` reads the maps of
    `forward_block_maps`, without norm. `published` reads the map of Swin and ViT before the norm,
    and for `all` of Swin the maps of `forward_merged_maps`, both as the public code does. Under
    MixToken it is the map of the mixed image: exchanged tokens keep their position, so offsets stay
    correct.

    Forward takes images `[N, C, H, W]`, bits and weights as `LocalizationLoss` does, and further
    arguments of the model. Raises ValueError if the model has no such map, one that cannot be
    pooled so, or patch dropout.
    """

    def __init__(
        self,
        model: nn.Module,
        variant: Variant,
        side: int,
        shapes: Sequence[int | Shape],
        published: bool = False,
        hidden: int = 512,
    ) -> None:
        super().__init__()
        self.model, self.read_maps = model, choose_maps(model, variant, published)
        needed = ["forward_features", "forward_head"]
        # Not every timm model has it.
        if self.read_maps:
            needed.append("forward_intermediates")
        if missing := [name for name in needed if not callable(getattr(model, name, None))]:
            other = ", or another variant" if missing[0] == "forward_intermediates" else ""
            raise ValueError(f"it has no {missing[0]}; choose another model{other}")
        # The blank image below goes through in evaluation mode, where patch dropout is off.
        refuse_patch_dropout(model)
        maps = [self._map_shapes(shape) for shape in shapes]
        grids = []
        for *_, (_, R, C) in maps:
            factor = pool_factor((R, C), side)
            grids.append((R // factor, C // factor))
        if variant in ("ce", "reg") and len(set(grids)) > 1:
            raise ValueError(
                f"the sizes of its inputs change the number of offsets, and {variant} has a class "
                "for each; choose one --size"
            )
        widths = [D for D, _, _ in maps[0]]
        self.localizer = LocalizationLoss(variant, widths, side, grids[0], published, hidden)
        self.networks = (model,)

    @torch.no_grad()
    def _map_shapes(self, shape: int | Shape) -> list[tuple[int, int, int]]:
        """Return D, R and C of each map for inputs of `shape` pixels, from a blank image."""
        like, training = next(self.model.parameters()), self.model.training
        try:
            # BatchNorm must not average the blank image.
            self.model.eval()
            _, maps = self._features(like.new_zeros(1, 3, *split_grid(shape)))
        finally:
            self.model.train(training)
        return [tuple(map_NDRC.shape[1:]) for map_NDRC in maps]

    def _features(self, image_NCHW: Tensor, **more: Any) -> tuple[Tensor, list[Tensor]]:
        """Return the input of the model's head, and the maps."""
        if self.read_maps:
            return self.read_maps(self.model, image_NCHW)
        features = self.model.forward_features(image_NCHW, **more)
        return features, [feature_map(features, self.model, image_NCHW)]

    def forward(
        self, image_NCHW: Tensor, words_NM4: Tensor, weight_N: Tensor, **more: Any
    ) -> LocalizedOutput:
        features, maps = self._features(image_NCHW, **more)
        output = self.model.forward_head(features, **more)
        return LocalizedOutput(output, self.localizer(maps, words_NM4, weight_N))


# ---------------------------------------------------------------- the objective


# The square of it, the weights of a layer, takes 1 GiB.
MAX_HIDDEN = 2**14


@dataclass(frozen=True, kw_only=True)
class DRLocOptions(Options):
    """DRLoc (arXiv 2106.03746), a loss beside that of the objective."""

    # also predict relative token offsets, with this variant of the loss
    variant: Annotated[Literal["none", Variant], arg(name="drloc")] = "none"
    # weight of the localization loss, lambda of the paper
    weight: Annotated[NonNegative, arg(name="drloc-weight")] = 0.5
    # rows to which the grid of tokens is pooled for the localization loss; 0: no pooling
    grid: Annotated[NonNegativeInt, arg(name="drloc-grid")] = 7
    # neurons of each hidden layer of the localization heads; the paper also has 256 and 1024
    hidden: Annotated[int, Bounds(1, MAX_HIDDEN), arg(name="drloc-hidden")] = 512
    # as the published code: offsets counted in positions, a weight schedule, other heads
    published: Annotated[bool, arg(name="drloc-published")] = False


class DRLoc(Method):
    """`--drloc`: adds the localization loss to another objective."""

    name, own = "drloc", DRLocOptions

    @staticmethod
    def is_on(options: DRLocOptions) -> bool:
        return options.variant != "none"

    def check(self) -> None:
        super().check()
        if self.options.variant == "all" and self.setting.mix.mixtoken:
            raise UserError(
                "--drloc all reads the tokens of every block, which models return only without "
                "MixToken; give --no-mixtoken"
            )

    def wrap(self, model: nn.Module, num_classes: int, place: Place) -> WrappedModel:
        options = self.options
        try:
            heads = LocalizedModel(
                model,
                options.variant,
                options.grid,
                self.setting.shapes,
                options.published,
                options.hidden,
            )
        # Any of timm's models may be given, and they fail in all these ways.
        except (ValueError, RuntimeError, AssertionError, AttributeError, TypeError) as error:
            why = first_line(error)
            if isinstance(error, PoolError):
                fit = ", ".join(map(str, error.sides))
                give = f"give --drloc-grid one of {fit}"
                why += f"; {give if fit else 'choose a larger --size or another --model'}"
            raise UserError(
                f"--drloc {options.variant} cannot be computed for {self.setting.model}: {why}"
            ) from error
        return heads.to(next(model.parameters()).device)

    def inputs(self, plan: EpochPlan, epoch: int, batch: Batch) -> tuple[Pairs, Any]:
        pairs = draw_pairs(plan, epoch, batch, PAIRS_PER_IMAGE, self.weight(epoch))
        return pairs, super().inputs(plan, epoch, batch)

    def forward(
        self, network: nn.Module, image: Tensor, batch: Batch, step: StepContext
    ) -> LocalizedOutput:
        words = step.inputs[0].words
        return network(image, words, batch.weight, **self.mix_arguments(step))

    def loss(self, output: LocalizedOutput, batch: Batch, step: StepContext) -> Tensor:
        pairs, inputs = step.inputs
        # The base reads its own inputs, which `inputs` stored behind the pairs.
        base = super().loss(output.output, batch, step._replace(inputs=inputs))
        return base + pairs.weight * output.loss

    def weight(self, epoch: int) -> float:
        """Return lambda: constant in the paper; the published code raises it, then lowers it."""
        if not self.options.published:
            return self.options.weight
        # Runs of 20 epochs or fewer only rise.
        falling = (self.setting.epochs - epoch) / max(self.setting.epochs - RISING_EPOCHS, 1)
        return self.options.weight * max(0.0, min(epoch / RISING_EPOCHS, falling))

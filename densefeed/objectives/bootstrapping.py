"""Bootstrapping ViTs (arXiv 2112.03552): a transformer and its agent CNN in one step, and what they
learn of each other.

    L = sum over both of [ own loss + distill_weight L_KD ] + feature_weight share sum over blocks
    L_feat

The paper's equation 9 gives the factor 10 to the mutual term, its section 4.5 and the published
code to L_feat; so do we.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tyro.conf import arg

from densefeed.models.agent_cnn import AgentCNN, SharedWeights, make_agent, vit_spec
from densefeed.models.token_transformer import TokenFeatures, TokenLogits
from densefeed.objectives.base import Objective, Place, Setting, StepContext
from densefeed.objectives.losses import weighted_mean
from densefeed.pipelines.batch import Batch
from densefeed.pipelines.plan import EpochPlan
from densefeed.system.errors import UserError
from densefeed.system.options import Bounds, NonNegative, Options, parse_arguments

# N images   T tokens   D width   K classes   Y, X rows and columns of the agent's map

Norm = Literal["l2-token", "l2-whole", "layernorm"]
Adapt = Literal["sequence", "pool-2d"]
Align = Literal["global", "layer", "tensor", "none"]


class JointOutput(NamedTuple):
    """What transformer and agent say of the same images."""

    vit: Tensor | TokenLogits | TokenFeatures
    agent: Tensor | TokenLogits
    tokens: list[Tensor]  # [N, T, D] of each supervised block, no class token
    maps: list[Tensor]  # [N, D, Y, X] of the same blocks, before any halving


class JointModel(nn.Module):
    """A transformer and its agent as one network; forward gives `JointOutput`.

    Args:
        vit: any that `agent_cnn.wiring_of` knows.
        agent: its agent, on the same device. If it has no weights of its own it gets those of
            `vit`, which stay one set: they are parameters of `vit` alone, so checkpoints, optimizer
            and averages hold each once.
        blocks: which are supervised, counted from 1; none given: all.
        align: which shared weights' gradients are aligned together.

    Raises ValueError for blocks that are not there. Move it no more: what is shared would part.
    """

    def __init__(
        self, vit: nn.Module, agent: AgentCNN, blocks: Sequence[int] = (), align: Align = "global"
    ) -> None:
        super().__init__()
        depth = len(vit.blocks)
        if wrong := [number for number in blocks if not 1 <= number <= depth]:
            raise ValueError(f"{wrong[0]} is no number of a block; they go from 1 to {depth}")
        self.vit, self.agent, self.align = vit, agent, align
        self.taken = sorted({number - 1 for number in blocks}) or list(range(depth))
        self.shared = not hasattr(agent.blocks[0], "conv")
        if self.shared:
            agent.lend(vit)

    @property
    def networks(self) -> tuple[nn.Module, nn.Module]:
        """Transformer and agent."""
        return self.vit, self.agent

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """The transformer's tables."""
        return {f"vit.{name}" for name in getattr(self.vit, "no_weight_decay", set)()}

    def forward(self, image_NCHW: Tensor) -> JointOutput:
        x_NTD, tokens = self.vit.forward_intermediates(
            image_NCHW, indices=self.taken, output_fmt="NLC"
        )
        vit = self.vit.forward_head(x_NTD)
        x_NDYX, maps = self.agent.forward_maps(image_NCHW)
        return JointOutput(
            vit, self.agent.forward_head(x_NDYX), tokens, [maps[number] for number in self.taken]
        )

    @torch.no_grad()
    def combine_gradients(self, over_ranks: Callable[[list[Tensor]], None]) -> None:
        """Give every shared weight the mean of the transformer's gradient and the aligned one of
        the agent (Algorithm 1, line 8).

        `over_ranks` averages the agent's gradients over the ranks, in place, as DDP has averaged
        the transformer's. A loss may be scaled: the projection does not depend on the gradients'
        length. No wait. Without shared weights there is nothing to do.
        """
        if not self.shared:
            return
        # of each block: the transformer's gradient, the agent's
        pairs: list[list[tuple[Tensor, Tensor]]] = []
        for own, lent in zip(shared_gradients(self.vit), self.agent.lent, strict=True):
            pairs.append(
                [
                    (mine, seen.grad)
                    for mine, seen in zip(own, lent, strict=True)
                    if seen is not None
                ]
            )
        over_ranks([agents for block in pairs for _, agents in block])
        groups = {
            "global": [[pair for block in pairs for pair in block]],
            "layer": pairs,
            "tensor": [[pair] for block in pairs for pair in block],
            "none": [],
        }[self.align]
        for group in groups:
            for agents, turned in zip(
                [a for _, a in group],
                align_gradients([a for _, a in group], [v for v, _ in group]),
                strict=True,
            ):
                agents.copy_(turned)
        for block in pairs:
            for mine, agents in block:
                mine.add_(agents).mul_(0.5)
        for seen in self.agent.borrowed():
            seen.grad = None


def shared_gradients(vit: nn.Module) -> list[SharedWeights]:
    """Those of what `agent_cnn.lent_by` lends.

    Of qkv only the rows of v: q and k are the transformer's alone, so they neither count in its
    length nor get any of the agent's.
    """
    found = []
    for block in vit.blocks:
        layers = block.attn.proj, block.mlp.fc1, block.mlp.fc2
        rest = [
            None if tensor is None else tensor.grad
            for layer in layers
            for tensor in (layer.weight, layer.bias)
        ]
        found.append(SharedWeights(block.attn.qkv.weight.grad[2 * vit.embed_dim :], *rest))
    return found


def align_gradients(agent: Sequence[Tensor], vit: Sequence[Tensor]) -> list[Tensor]:
    """The agent's gradients without what is against the transformer's: g_A - min(0, <g_A, g_V>) /
    |g_V|² g_V.

    PCGrad's projection (arXiv 2001.06782) in one direction; each list is one vector, of any shapes.
    The inner product with `vit` is then not negative, and 0 where it was.
    """
    product = torch.stack([(a * v).sum() for a, v in zip(agent, vit, strict=True)]).sum()
    square = torch.stack([v.square().sum() for v in vit]).sum()
    against = torch.where(product < 0, product / square, 0.0)
    return [a - against * v for a, v in zip(agent, vit, strict=True)]


def pool_sequence(x_NTD: Tensor, length: int) -> Tensor:
    """Sequence interpolation: means of neighbors in the sequence, `[N, length, D]`. ValueError
    where `length` does not divide T.

    Rows of an image follow each other in the sequence, so neighbors at a row's end lie far apart;
    the paper's default all the same.
    """
    if x_NTD.shape[1] % length:
        raise ValueError(f"{x_NTD.shape[1]} tokens cannot be averaged to {length}")
    return x_NTD.unflatten(1, (length, -1)).mean(2)


def pool_squares(x_NTD: Tensor, length: int) -> Tensor:
    """AP-2D: the same in squares of a square grid. ValueError where that leaves no whole
    squares.
    """
    side, small = math.isqrt(x_NTD.shape[1]), math.isqrt(length)
    if side**2 != x_NTD.shape[1] or small**2 != length or side % small:
        raise ValueError(f"{x_NTD.shape[1]} tokens cannot be averaged to {length} in squares")
    return (
        x_NTD.unflatten(1, (small, side // small, small, side // small)).mean((2, 4)).flatten(1, 2)
    )


def feature_loss(
    tokens: Sequence[Tensor],
    maps: Sequence[Tensor],
    weight_N: Tensor,
    norm: Norm = "l2-token",
    adapt: Adapt = "sequence",
) -> Tensor:
    """Equation 7: the sum over blocks of equation 6, the squared distance of normalized features;
    float32 `[]`.

    The agent's maps are constants. Whichever of the two has more places is averaged to the other's
    number. `norm`: each token by its length and the mean over tokens ("l2-token"; the paper names
    no axis, the published code normalizes tokens), the whole sequence by its length ("l2-whole"),
    or each token by its mean and deviation and the mean over channels, too ("layernorm", the
    published code: 2 - 2 times the correlation). ValueError where the numbers of places do not fit.
    """
    pool, total = (
        {"sequence": pool_sequence, "pool-2d": pool_squares}[adapt],
        weight_N.new_zeros((), dtype=torch.float32),
    )
    for x_NTD, x_NDYX in zip(tokens, maps, strict=True):
        agent = x_NDYX.detach().flatten(2).transpose(1, 2).float()
        vit, length = x_NTD.float(), min(x_NTD.shape[1], agent.shape[1])
        vit, agent = (x if x.shape[1] == length else pool(x, length) for x in (vit, agent))
        if norm == "l2-whole":
            vit, agent = (F.normalize(x.flatten(1), dim=1) for x in (vit, agent))
            loss_N = (agent - vit).square().sum(1)
        elif norm == "l2-token":
            vit, agent = (F.normalize(x, dim=2) for x in (vit, agent))
            loss_N = (agent - vit).square().sum(2).mean(1)
        else:
            vit, agent = (F.layer_norm(x, x.shape[2:]) for x in (vit, agent))
            loss_N = (agent - vit).square().mean((1, 2))
        total = total + weighted_mean(loss_N, weight_N)
    return total


def distillation_loss(
    student_NK: Tensor, teacher_NK: Tensor, weight_N: Tensor, temperature: float
) -> Tensor:
    """T² KL(softmax(teacher / T) || softmax(student / T)), the soft part of L_KD in equation 8; the
    teacher is a constant.
    """
    of_teacher, of_student = (
        F.log_softmax(x.float() / temperature, -1) for x in (teacher_NK.detach(), student_NK)
    )
    loss_N = F.kl_div(of_student, of_teacher, reduction="none", log_target=True).sum(-1)
    return temperature**2 * weighted_mean(loss_N, weight_N)


def class_logits(output: Tensor | TokenLogits | TokenFeatures) -> Tensor:
    """The class token's answer `[N, K]`."""
    return output if isinstance(output, Tensor) else output.cls


# ---------------------------------------------------------------- the objective

AGENT_KWARGS = ("down", "pool", "norm")  # all else of an agent follows from its transformer


@dataclass(frozen=True, kw_only=True)
class BootstrapOptions(Options):
    """Options of `--bootstrap`."""

    # train an agent CNN beside the model; shared: with the model's weights
    mode: Annotated[Literal["none", "joint", "shared"], arg(name="bootstrap")] = "none"
    # architecture of the agent: Tables 7 and 6 of Bootstrapping ViTs
    agent: Literal["res-like", "base"] = "res-like"
    # more arguments of the agent, each NAME=VALUE as in --model-kwargs: down, pool, norm
    agent_kwargs: tuple[str, ...] = ()
    distill_weight: NonNegative = 1.0  # weight of the mutual distillation
    distill_temperature: Annotated[float, Bounds(1e-3)] = 4.0  # of the mutual distillation
    feature_weight: NonNegative = 10.0  # weight of the agent's features as targets of the blocks
    feature_decay: Literal["linear", "none"] = "linear"  # of that weight, to 0 after the last epoch
    feature_blocks: tuple[int, ...] = ()  # blocks with such a target, from 1; empty: all
    # normalization of features before they are compared; layernorm: as published
    feature_norm: Norm = "l2-token"
    # match numbers of tokens and places: average neighbors in the sequence, or squares of the grid
    feature_adapt: Adapt = "sequence"
    # shared weights whose gradients are aligned together
    align: Align = "global"


class Bootstrapping(Objective):
    """`--bootstrap`: equations 6 to 9, around another objective for each of the two networks."""

    name = "bootstrap"
    adds_network = True

    def __init__(self, setting: Setting, base: Objective) -> None:
        super().__init__(setting)
        self.base, self.options = base, setting.options.bootstrap
        self.needs_score_maps, self.needs_tokens = base.needs_score_maps, base.needs_tokens

    def check(self) -> None:
        self.base.check()
        options = self.options
        if self.setting.options.drloc.variant != "none":
            raise UserError(
                "--drloc and --bootstrap: the heads of DRLoc read the last map of one network, and "
                "no paper says which of the two; give one of the two options"
            )
        if self.setting.mix.mixtoken:
            raise UserError(
                "--bootstrap: MixToken exchanges tokens, which an agent CNN does not have, so the "
                "two networks would see different images; give --no-mixtoken, and --cutmix 1 to "
                "exchange pixels instead"
            )
        uneven = options.agent == "res-like" and options.feature_adapt == "sequence"
        if uneven and options.feature_weight > 0 and self.needs_tokens:
            raise UserError(
                "--feature-adapt sequence compares a token with other places of the agent's map "
                "than the token shows, which contradicts token labels; give --feature-adapt "
                "pool-2d, or --agent base, whose maps are as large as the grid of tokens"
            )

    def check_sizes(self, twin: nn.Module, num_classes: int) -> None:
        with torch.device("meta"):
            joint = self.wrap(twin, num_classes, lambda network: network).eval()
            for side in self.setting.sizes:
                try:
                    output = joint(torch.empty(1, 3, side, side))
                    self.feature_loss(output.tokens, output.maps, torch.ones(1))
                except (ValueError, RuntimeError, AssertionError) as error:
                    why = str(error).partition("\n")[0]
                    option = "--sizes" if len(self.setting.sizes) > 1 else "--size"
                    fit = " or ".join(map(str, self.nearby_sizes(joint, side)))
                    raise UserError(
                        f"--bootstrap {self.options.mode} cannot train at {side} px ({why}); choose "
                        f"another {option}{f' ({fit} px fit)' if fit else ''}, --agent, "
                        "--agent-kwargs or --feature-adapt"
                    ) from error

    def nearby_sizes(self, joint: JointModel, side: int) -> list[int]:
        """Find the next smaller and larger sizes, up to twice as large, that can be trained at."""
        patch, width = vit_spec(joint.vit).patch, joint.vit.embed_dim

        def fits(other: int) -> bool:
            try:
                maps = joint.agent.forward_maps(torch.empty(1, 3, other, other))[1]
                tokens = [torch.empty(1, (other // patch) ** 2, width)] * len(joint.taken)
                self.feature_loss(tokens, [maps[n] for n in joint.taken], torch.ones(1))
            except (ValueError, RuntimeError):
                return False
            return True

        below = range((side - 1) // patch * patch, 0, -patch)
        above = range((side // patch + 1) * patch, 2 * side + 1, patch)
        return [found for sides in (below, above) if (found := next(filter(fits, sides), 0))]

    def feature_loss(
        self, tokens: Sequence[Tensor], maps: Sequence[Tensor], weight_N: Tensor
    ) -> Tensor:
        """Compute `feature_loss` as the options have it."""
        options = self.options
        return feature_loss(tokens, maps, weight_N, options.feature_norm, options.feature_adapt)

    def wrap(self, model: nn.Module, num_classes: int, place: Place) -> JointModel:
        options, where = self.options, f"--bootstrap {self.options.mode}"
        agent = place(self.build_agent(model, num_classes))
        try:
            return JointModel(model, agent, options.feature_blocks, options.align)
        except ValueError as error:
            blocks = " ".join(map(str, options.feature_blocks))
            raise UserError(f"{where}: --feature-blocks {blocks}: {error}") from error

    def build_agent(self, model: nn.Module, num_classes: int) -> AgentCNN:
        """Build the agent of `model`; with token labels it has a head on every place of its map.

        Raises UserError where the model can have none.
        """
        options = self.options
        given = parse_arguments(options.agent_kwargs, "--agent-kwargs")
        if unknown := [name for name in given if name not in AGENT_KWARGS]:
            raise UserError(
                f"--agent-kwargs takes {', '.join(AGENT_KWARGS[:-1])} and {AGENT_KWARGS[-1]}, not "
                f"{unknown[0]}; everything else of an agent follows from its transformer and --agent"
            )
        kwargs = {"stem": options.agent, "token_head": self.needs_tokens} | given
        try:
            return make_agent(model, num_classes, shared=options.mode == "shared", **kwargs)
        except (ValueError, TypeError) as error:
            raise UserError(
                f"--bootstrap {options.mode}: {self.setting.model} can have no such agent "
                f"({error}); choose another --model, --model-kwargs or --agent-kwargs"
            ) from error

    def inputs(self, plan: EpochPlan, epoch: int, batch: Batch) -> tuple[Tensor, Any]:
        """Return what the decay leaves of the features' weight, float32 `[]`.

        It is a tensor because the compiler specializes on numbers and would compile every epoch.
        """
        linear = self.options.feature_decay == "linear"
        factor = torch.tensor(1 - epoch / self.setting.epochs if linear else 1.0)
        device = batch.image.device
        return factor.to(device, non_blocking=True), self.base.inputs(plan, epoch, batch)

    def loss(self, output: JointOutput, batch: Batch, step: StepContext) -> Tensor:
        """Each network's own loss, mutual distillation, and the agent's features.

        The agent's dense targets are those of the grid of its own last map.
        """
        options, (factor, inputs) = self.options, step.inputs
        step = step._replace(inputs=inputs)
        agent_grid = step.grid
        if isinstance(output.agent, TokenLogits):
            agent_grid = math.isqrt(output.agent.tokens.shape[1])
        total = self.base.loss(output.vit, batch, step)
        total = total + self.base.loss(output.agent, batch, step._replace(grid=agent_grid))
        if options.distill_weight:
            vit, agent = class_logits(output.vit), class_logits(output.agent)
            temperature = options.distill_temperature
            to_vit = distillation_loss(vit, agent, batch.weight, temperature)
            to_agent = distillation_loss(agent, vit, batch.weight, temperature)
            total = total + options.distill_weight * (to_vit + to_agent)
        if options.feature_weight:
            features = self.feature_loss(output.tokens, output.maps, batch.weight)
            total = total + options.feature_weight * factor * features
        return total

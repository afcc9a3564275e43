"""Bootstrapping ViTs (arXiv 2112.03552): train a transformer and its agent CNN together.

    L = sum over both of [ own loss + distill_weight L_KD ]
        + feature_weight decay sum over blocks L_feat

The paper's equation 9 gives the factor 10 to the mutual term; its section 4.5 and the published
code give it to L_feat, as this file does. The paper's L_KD has the labels' loss in it, so its
weight of L_mutual scales that loss too; distill_weight does not, or the rows of its Table 4 without
mutual distillation would have no labels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tyro.conf import arg

from densefeed.models.agent_cnn import AgentCNN, make_agent, read_shared, vit_spec
from densefeed.models.meta_device import meta_device
from densefeed.models.token_transformer import TokenFeatures, TokenLogits, to_tokens
from densefeed.models.wrapped_model import WrappedModel
from densefeed.objectives.base import Method, Place, StepContext
from densefeed.objectives.losses import weighted_mean
from densefeed.pipelines.batch import Batch
from densefeed.pipelines.plan import EpochPlan
from densefeed.system.devices import send
from densefeed.system.errors import UserError, first_line
from densefeed.system.options import Bounds, Integers, NonNegative, Options, Texts, parse_arguments

# N images   T tokens   D width   K classes   Y, X rows and columns of the agent's map

Norm = Literal["l2-token", "layernorm"]
Adapt = Literal["sequence", "pool-2d"]
Align = Literal["global", "none"]


class JointOutput(NamedTuple):
    """Outputs of transformer and agent for the same images."""

    vit: Tensor | TokenLogits | TokenFeatures
    agent: Tensor | TokenLogits
    tokens: list[Tensor]  # [N, T, D] of each block, no class token
    maps: list[Tensor]  # [N, D, Y, X] of the same blocks, before any halving


class JointModel(WrappedModel):
    """A transformer and its agent CNN as one network; forward returns `JointOutput`.

    Args:
        vit: any transformer that `agent_cnn.vit_spec` supports.
        agent: its agent, on the same device. If it has no weights of its own it uses those of
            `vit`. These remain parameters of `vit` alone, so checkpoints, optimizer and EMA hold
            each once.
        align: whether gradients of shared weights are aligned, all together.

    Do not move the module to another device: moving the module would break weight sharing.
    """

    def __init__(self, vit: nn.Module, agent: AgentCNN, align: Align = "global") -> None:
        super().__init__()
        self.vit, self.agent, self.align = vit, agent, align
        # An agent that was built to share weights has no convolutions of its own.
        self.shared = not hasattr(agent.blocks[0], "conv")
        if self.shared:
            agent.share_weights(vit)
        self.networks, self.evaluated = (vit, agent), {"agent": agent}

    @property
    def aliases(self) -> list[Tensor]:
        """The weights that the agent shares."""
        return self.agent.shared_tensors()

    def forward(self, image_NCHW: Tensor) -> JointOutput:
        x_NTD, tokens = self.vit.forward_intermediates(image_NCHW, output_fmt="NLC")
        vit = self.vit.forward_head(x_NTD)
        x_NDYX, maps = self.agent.forward_maps(image_NCHW)
        agent = self.agent.forward_head(x_NDYX)
        return JointOutput(vit, agent, tokens, maps)

    @torch.no_grad()
    def combine_gradients(self, average: Callable[[list[Tensor]], None]) -> None:
        """Set the gradient of every shared weight (Algorithm 1, line 8), without waiting.

        It becomes the mean of the transformer's gradient and the aligned gradient of the agent.
        `average` averages the agent's gradients over ranks, in place, as DDP has averaged the
        transformer's. The loss may be scaled: the projection does not depend on the norm of the
        gradients. Without shared weights there is nothing to do.
        """
        # DDP averages all gradients of two networks with their own weights.
        if not self.shared:
            return
        # q and k are not shared: they neither count in the norm of the transformer's gradient nor
        # receive any of the agent's.
        blocks = read_shared(self.vit, lambda weight: weight.grad)
        owns = [gradient for block in blocks for gradient in block if gradient is not None]
        shared = self.aliases
        agents = [lent.grad for lent in shared]
        average(agents)
        if self.align == "global":
            agents = align_gradients(agents, owns)
        # In place: `owns` are views of the transformer's gradients, of qkv the rows of v.
        for own, agent in zip(owns, agents, strict=True):
            own.add_(agent).mul_(0.5)
        # The optimizer does not hold the aliases, so it does not clear their gradients.
        for lent in shared:
            lent.grad = None


def align_gradients(agent: Sequence[Tensor], vit: Sequence[Tensor]) -> list[Tensor]:
    """Return the agent's gradients with the conflicting component removed.

    g_A - min(0, <g_A, g_V>) / |g_V|² g_V: PCGrad's projection (arXiv 2001.06782) in one direction.
    Each list is one vector, of tensors of any shapes. The inner product of the result with the
    transformer's gradients is not negative, and 0 where it was negative.
    """
    product = torch.stack([(a * v).sum() for a, v in zip(agent, vit, strict=True)]).sum()
    square = torch.stack([v.square().sum() for v in vit]).sum()
    # torch.where, because a branch on the sign would wait for the device.
    conflict = torch.where(product < 0, product / square, 0.0)
    return [a - conflict * v for a, v in zip(agent, vit, strict=True)]


def pool_sequence(x_NTD: Tensor, length: int) -> Tensor:
    """Sequence interpolation: average neighbors in the sequence, `[N, length, D]`.

    The rows of an image follow each other in the sequence, so neighbors at the end of a row are far
    apart; it is the paper's default nevertheless. Raises ValueError if `length` does not divide T.
    """
    if x_NTD.shape[1] % length:
        raise ValueError(f"{x_NTD.shape[1]} tokens cannot be averaged to {length}")
    return x_NTD.unflatten(1, (length, -1)).mean(2)


def pool_squares(x_NTD: Tensor, length: int) -> Tensor:
    """AP-2D: average in squares of a square grid, `[N, length, D]`.

    Raises ValueError if the grid cannot be divided into such squares.
    """
    side, small = math.isqrt(x_NTD.shape[1]), math.isqrt(length)
    if side**2 != x_NTD.shape[1] or small**2 != length or side % small:
        raise ValueError(f"{x_NTD.shape[1]} tokens cannot be averaged to {length} in squares")
    factor = side // small
    return x_NTD.unflatten(1, (small, factor, small, factor)).mean((2, 4)).flatten(1, 2)


def feature_loss(
    tokens: Sequence[Tensor],
    maps: Sequence[Tensor],
    weight_N: Tensor,
    norm: Norm = "l2-token",
    adapt: Adapt = "sequence",
) -> Tensor:
    """Compute equation 7, float32 `[]`: the sum over blocks of equation 6.

    Equation 6 is the squared distance of normalized features. The agent's maps are constants. If
    one of the two has more positions, it is averaged to the number of the other. `norm` is one of
        l2-token: each token by its norm, mean over tokens. The paper names no axis; the published
            code normalizes tokens.
        layernorm: each token by its mean and standard deviation, mean over tokens and channels, as
            the published code does: 2 - 2 times the correlation.
    Raises ValueError if the numbers of positions do not fit.
    """
    # At 224 pixels the agent of Table 7 has 28 x 28 positions before its first halving and 7 x 7 at
    # the end, the transformer 14 x 14 in every block.
    pool = {"sequence": pool_sequence, "pool-2d": pool_squares}[adapt]
    total = weight_N.new_zeros((), dtype=torch.float32)
    for x_NTD, x_NDYX in zip(tokens, maps, strict=True):
        # Only the transformer learns from the features: the published weight of the agent's side is
        # 0.
        agent = to_tokens(x_NDYX.detach()).float()
        vit, length = x_NTD.float(), min(x_NTD.shape[1], agent.shape[1])
        vit, agent = (x if x.shape[1] == length else pool(x, length) for x in (vit, agent))
        if norm == "l2-token":
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
    """Compute T² KL(softmax(teacher / T) || softmax(student / T)), float32 `[]`.

    This is the soft part of L_KD in equation 8; the teacher is a constant.
    """
    target, prediction = (
        F.log_softmax(x.float() / temperature, -1) for x in (teacher_NK.detach(), student_NK)
    )
    loss_N = F.kl_div(prediction, target, reduction="none", log_target=True).sum(-1)
    # The gradient of the soft part falls with 1 / T²; the factor keeps its size (arXiv 1503.02531,
    # section 2).
    return temperature**2 * weighted_mean(loss_N, weight_N)


def class_logits(output: Tensor | TokenLogits | TokenFeatures) -> Tensor:
    """Return the logits of the class token, `[N, K]`."""
    return output if isinstance(output, Tensor) else output.cls


# ---------------------------------------------------------------- the objective

# Arguments that the user may set; the others follow from the transformer and --agent.
AGENT_KWARGS = ("down", "pool", "norm")


@dataclass(frozen=True, kw_only=True)
class BootstrapOptions(Options):
    """Bootstrapping ViTs (arXiv 2112.03552), an agent CNN trained beside the transformer."""

    # also train an agent CNN; joint: with its own weights; shared: with the weights of the model
    mode: Annotated[Literal["none", "joint", "shared"], arg(name="bootstrap")] = "none"
    # architecture of the agent: Tables 7 and 6 of Bootstrapping ViTs
    agent: Literal["res-like", "base"] = "res-like"
    # more arguments of the agent, each NAME=VALUE as in --model-kwargs: down, pool, norm. Table 1's
    # 3.37 and 9.46 G FLOPs are those of 'down=(2,5)' for ViT-S and 'down=(4,10)' for ViT-B
    agent_kwargs: Texts = ()
    # mutual distillation weight; the losses with labels, which the paper's L_KD includes, keep 1
    distill_weight: NonNegative = 1.0
    distill_temperature: Annotated[float, Bounds(1e-3)] = 4.0  # mutual distillation temperature
    # weight of the feature loss, which fits blocks to the features of the agent
    feature_weight: NonNegative = 10.0
    # numbers from 1 of the blocks in the feature loss; empty: all
    feature_blocks: Integers = ()
    # decay of the weight of the feature loss; linear: to 0 after the last epoch
    feature_decay: Literal["linear", "none"] = "linear"
    # normalization in the feature loss; layernorm: as published
    feature_norm: Norm = "l2-token"
    # pooling that matches tokens to the agent's map: neighbors in the sequence, or squares
    feature_adapt: Adapt = "sequence"
    # align the gradients of shared weights, all together; none: as published
    align: Align = "global"

    def unused(self) -> dict[str, str]:
        found = {} if self.mode == "shared" else {"align": "--bootstrap shared"}
        if not self.distill_weight:
            found["distill_temperature"] = "--distill-weight"
        if not self.feature_weight:
            names = ("feature_blocks", "feature_decay", "feature_norm", "feature_adapt")
            found |= dict.fromkeys(names, "--feature-weight")
        return found


def parse_agent_arguments(words: Sequence[str]) -> dict[str, object]:
    """Parse the NAME=VALUE words of `--agent-kwargs`. Raises UserError for other arguments."""
    given = parse_arguments(tuple(words), "--agent-kwargs")
    if unknown := [name for name in given if name not in AGENT_KWARGS]:
        raise UserError(
            f"--agent-kwargs takes {', '.join(AGENT_KWARGS[:-1])} and {AGENT_KWARGS[-1]}, not "
            f"{unknown[0]}; the rest of an agent follows from its transformer and --agent"
        )
    return given


class Bootstrapping(Method):
    """`--bootstrap`: equations 6 to 9, around another objective for each of the two networks."""

    name, own = "bootstrap", BootstrapOptions
    adds_network = True

    @staticmethod
    def is_on(options: BootstrapOptions) -> bool:
        return options.mode != "none"

    def check(self) -> None:
        super().check()
        options = self.options
        if self.setting.mix.mixtoken:
            raise UserError(
                "--bootstrap: MixToken exchanges tokens, which an agent CNN does not have, so the "
                "two networks would see different images; give --no-mixtoken, and --cutmix 1 to "
                "exchange pixels instead"
            )
        if any(height != width for height, width in self.setting.shapes):
            raise UserError("--bootstrap compares maps of square inputs; remove --aspects")
        # Neighbors in the sequence cross the ends of rows, and token labels have positions.
        uneven = options.agent == "res-like" and options.feature_adapt == "sequence"
        if uneven and options.feature_weight > 0 and self.needs_tokens:
            raise UserError(
                "--feature-adapt sequence compares a token with positions of the agent's map "
                "outside that token, which contradicts token labels; give --feature-adapt "
                "pool-2d, or --agent base, whose maps are as large as the grid of tokens"
            )

    def check_sizes(self, twin: nn.Module, num_classes: int) -> None:
        # The meta device computes shapes alone and takes no memory.
        with meta_device():
            joint = self.wrap(twin, num_classes, lambda network: network).eval()
        with torch.device("meta"):
            for side, _ in self.setting.shapes:
                try:
                    output = joint(torch.empty(1, 3, side, side))
                    self.feature_loss(output.tokens, output.maps, torch.ones(1))
                except (ValueError, RuntimeError, AssertionError) as error:
                    why = first_line(error)
                    several = len(self.setting.shapes) > 1
                    option = "--sizes or --multi-scale" if several else "--size"
                    fit = " or ".join(map(str, self.nearby_sizes(joint, side)))
                    raise UserError(
                        f"--bootstrap {self.options.mode} cannot train at {side} px ({why}); "
                        f"choose another {option}{f' ({fit} px fit)' if fit else ''}, --agent, "
                        "--agent-kwargs or --feature-adapt"
                    ) from error

    def nearby_sizes(self, joint: JointModel, side: int) -> list[int]:
        """Find the next smaller and larger training size that fits, up to twice as large."""
        # The caller has set the meta device, so the tensors below are shapes alone.
        patch, width = vit_spec(joint.vit).patch, joint.vit.embed_dim

        def fits(other: int) -> bool:
            try:
                maps = joint.agent.forward_maps(torch.empty(1, 3, other, other))[1]
                tokens = [torch.empty(1, (other // patch) ** 2, width)] * len(maps)
                self.feature_loss(tokens, maps, torch.ones(1))
            except (ValueError, RuntimeError):
                return False
            return True

        below = range((side - 1) // patch * patch, 0, -patch)
        above = range((side // patch + 1) * patch, 2 * side + 1, patch)
        return [found for sides in (below, above) if (found := next(filter(fits, sides), 0))]

    def feature_loss(
        self, tokens: Sequence[Tensor], maps: Sequence[Tensor], weight_N: Tensor
    ) -> Tensor:
        """Compute `feature_loss` of the blocks and with the options of the run."""
        options = self.options
        if options.feature_blocks:
            tokens, maps = ([x[n - 1] for n in options.feature_blocks] for x in (tokens, maps))
        return feature_loss(tokens, maps, weight_N, options.feature_norm, options.feature_adapt)

    def wrap(self, model: nn.Module, num_classes: int, place: Place) -> JointModel:
        # The agent is placed first, because moving it later would break weight sharing.
        return JointModel(model, place(self.build_agent(model, num_classes)), self.options.align)

    def build_agent(self, model: nn.Module, num_classes: int) -> AgentCNN:
        """Build the agent of `model`; with token labels it has a head on every position of its map.

        Raises UserError if the model cannot have one.
        """
        options = self.options
        given = parse_agent_arguments(options.agent_kwargs)
        given = {"stem": options.agent, "token_head": self.needs_tokens} | given
        try:
            agent = make_agent(model, num_classes, shared=options.mode == "shared", **given)
        except (ValueError, TypeError) as error:
            raise UserError(
                f"--bootstrap {options.mode}: {self.setting.model} cannot have this agent "
                f"({error}); choose another --model, --model-kwargs or --agent-kwargs"
            ) from error
        chosen, depth = options.feature_blocks, len(agent.blocks)
        if not set(chosen) <= set(range(1, depth + 1)) or len(set(chosen)) < len(chosen):
            raise UserError(
                f"--feature-blocks {' '.join(map(str, chosen))}: {self.setting.model} has blocks 1 "
                f"to {depth}; name each at most once"
            )
        return agent

    def inputs(self, plan: EpochPlan, epoch: int, batch: Batch) -> tuple[Tensor, Any]:
        """Return the decay factor of the feature loss, float32 `[]`, and the base's inputs.

        The factor is a tensor because the compiler specializes on numbers and would recompile every
        epoch.
        """
        linear = self.options.feature_decay == "linear"
        factor = torch.tensor(1 - epoch / self.setting.epochs if linear else 1.0)
        factor = send(factor, batch.image.device)
        return factor, super().inputs(plan, epoch, batch)

    def loss(self, output: JointOutput, batch: Batch, step: StepContext) -> Tensor:
        """Sum the loss of each network, mutual distillation and the feature loss.

        The agent's dense targets have the grid of its own last map.
        """
        options, (factor, inputs) = self.options, step.inputs
        step = step._replace(inputs=inputs)
        # At 224 pixels a res-like agent ends with 7 x 7 positions where the transformer has 14 x 14
        # tokens.
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

"""Bootstrapping ViTs (arXiv 2112.03552): a transformer and its agent CNN in one step, and what they
learn of each other.

    L = sum over both of [ own loss + distill_weight L_KD ] + feature_weight share sum over blocks
    L_feat

The paper's equation 9 gives the factor 10 to the mutual term, its section 4.5 and the published
code to L_feat; so do we.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.models.agent_cnn import AgentCNN, SharedWeights
from densefeed.models.token_transformer import TokenFeatures, TokenLogits
from densefeed.objectives.losses import weighted_mean

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

    Raises ValueError for blocks that are not there. Move it no more: what is shared would part.
    """

    def __init__(self, vit: nn.Module, agent: AgentCNN, blocks: Sequence[int] = ()) -> None:
        super().__init__()
        depth = len(vit.blocks)
        if wrong := [number for number in blocks if not 1 <= number <= depth]:
            raise ValueError(f"{wrong[0]} is no number of a block; they go from 1 to {depth}")
        self.vit, self.agent = vit, agent
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
    def combine_gradients(self, align: Align, over_ranks: Callable[[list[Tensor]], None]) -> None:
        """Give every shared weight the mean of the transformer's gradient and the aligned one of
        the agent (Algorithm 1, line 8).

        `over_ranks` averages the agent's gradients over the ranks, in place, as DDP has averaged
        the transformer's. A loss may be scaled: the projection does not depend on the gradients'
        length. No wait.
        """
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
        }[align]
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

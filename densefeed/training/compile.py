"""What of a step is compiled, and how few times."""

from collections.abc import Callable
from functools import partial

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from densefeed.objectives.bootstrapping import JointModel
from densefeed.objectives.drloc import LocalizedModel
from densefeed.training.objective import objective_loss, step_loss


class SharedDropPath(nn.Module):
    """timm's DropPath with its rate in a tensor, which is in no checkpoint.

    The compiler takes a module's numbers for constants, and every block of a network has another
    rate: it would compile each block anew, up to its limit of 8, and leave those behind to eager
    mode.
    """

    def __init__(self, of: DropPath) -> None:
        super().__init__()
        self.scale_by_keep = of.scale_by_keep
        self.register_buffer("keep", torch.tensor(1 - of.drop_prob), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = torch.bernoulli(self.keep.expand(x.shape[0], *[1] * (x.ndim - 1)))
        return x * (kept / self.keep if self.scale_by_keep else kept).to(x.dtype)


def get_networks(trained: nn.Module) -> tuple[nn.Module, ...]:
    """The networks in what a run trains, the model first: without DRLoc's heads, with the agent."""
    return trained.networks if isinstance(trained, LocalizedModel | JointModel) else (trained,)


def compile_step(how: str, trained: nn.Module) -> Callable[..., Tensor]:
    """`step_loss` of `trained`, with what `how` says compiled.

    `blocks`: one compilation serves all blocks that are alike, whose DropPath then is a
    SharedDropPath. `graph`: forward and backward pass are CUDA graphs that PyTorch captures and
    replays; on a CPU the same as `whole`. The update stays outside: it takes the learning rate and
    the averaging's decay from the host, in some ten launches of fused and foreach operations.
    """
    if how == "never":
        return step_loss
    if how == "graph":
        whole = torch.compile(step_loss, dynamic=False, mode="reduce-overhead")

        def captured(*args: object, **more: object) -> Tensor:
            # what the graphs of the last step gave has been used up
            torch.compiler.cudagraph_mark_step_begin()
            return whole(*args, **more)

        return captured
    networks = get_networks(trained)
    if how == "whole" or not all(
        isinstance(getattr(network, "blocks", None), nn.Module) for network in networks
    ):
        return torch.compile(step_loss, dynamic=False)
    device = next(trained.parameters()).device
    for block in (block for network in networks for block in network.blocks):
        for name, part in list(block.named_modules()):
            if isinstance(part, DropPath):
                block.set_submodule(name, SharedDropPath(part).to(device).train(part.training))
        block.compile(dynamic=False)
    return partial(step_loss, measure=torch.compile(objective_loss, dynamic=False))

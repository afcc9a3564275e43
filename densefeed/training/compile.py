"""torch.compile modes of a step."""

from collections.abc import Callable
from functools import partial

import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch._dynamo import config as dynamo

from densefeed.objectives.base import objective_loss, step_loss
from densefeed.system.devices import tag_compiled_code
from densefeed.training.ranks import Ranks

# Compilations of one function, at the least. Each input size compiles a block twice, with drop-path
# and without, and beyond the limit, by default 8, PyTorch runs it in eager mode and says nothing.
RECOMPILATIONS = 256


class SharedDropPath(nn.Module):
    """timm's DropPath with its rate in a tensor, which is in no checkpoint.

    The compiler specializes on a module's numbers, and every block of a network has another rate.
    It would compile each block, up to its limit of 8, and run the others in eager mode.
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


def get_networks(trainable: nn.Module) -> tuple[nn.Module, ...]:
    """Return the networks in what a run trains, the model first: without DRLoc's heads."""
    return getattr(trainable, "networks", (trainable,))


def can_capture(mode: str, ranks: Ranks) -> bool:
    """Return whether updates are CUDA graphs, which they cannot be on a CPU."""
    return mode == "graph" and ranks.device.type == "cuda"


def compile_step(mode: str, trainable: nn.Module) -> Callable[..., Tensor]:
    """Return `step_loss`, compiled as `--compile` says.

    `blocks`: one compilation serves all blocks that are alike; their DropPath becomes a
    SharedDropPath. `graph` compiles as `whole` does; captured_update.py captures the result. The
    optimizer is not compiled: its operations are fused and foreach ones, about ten launches.
    """
    if mode == "never":
        return step_loss
    tag_compiled_code()
    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILATIONS)
    networks = get_networks(trainable)
    has_blocks = all(isinstance(getattr(net, "blocks", None), nn.Module) for net in networks)
    # Networks without blocks, such as timm's ResNets, are compiled whole.
    if mode in ("whole", "graph") or not has_blocks:
        return torch.compile(step_loss, dynamic=False)
    device = next(trainable.parameters()).device
    for block in (block for network in networks for block in network.blocks):
        share_drop_path(block, device)
        block.compile(dynamic=False)
    return partial(step_loss, measure=torch.compile(objective_loss, dynamic=False))


def share_drop_path(block: nn.Module, device: torch.device) -> None:
    """Replace every DropPath of a block by a SharedDropPath."""
    # A list, because replacing a module changes what named_modules walks.
    for name, part in list(block.named_modules()):
        if isinstance(part, DropPath):
            block.set_submodule(name, SharedDropPath(part).to(device).train(part.training))

"""torch.compile modes of a step."""

from collections.abc import Callable, Sequence
from types import MethodType

import torch
import torch.distributed as dist
from timm.layers import DropPath
from torch import Tensor, nn
from torch._dynamo import config as dynamo

from densefeed.models.drop_path import skip_dropped
from densefeed.models.kernels.levers import use_levers
from densefeed.models.token_transformer import TokenTransformer
from densefeed.models.wrapped_model import get_networks
from densefeed.objectives.base import Objective, StepContext, objective_loss, step_loss, token_mask
from densefeed.pipelines.batch import Batch
from densefeed.system.devices import tag_compiled_code
from densefeed.training.mixed_linear import WeightCopies
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
        # What `DropPathMasks` drew for the next forward pass, `[N]`.
        self.mask_N: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        mask_N = self.mask_N
        if mask_N is None or len(mask_N) != len(x):
            mask_N = torch.bernoulli(self.keep.expand(len(x)))
            mask_N = mask_N / self.keep if self.scale_by_keep else mask_N
        return x * mask_N.view(-1, *[1] * (x.ndim - 1)).to(x.dtype)


class DropPathMasks:
    """Draws the masks of SharedDropPaths in one call, instead of three kernels for each.

    Each of them has one mask, so it must be called once per forward pass.
    """

    def __init__(self, paths: Sequence[SharedDropPath]) -> None:
        self.paths = paths
        self.keep_L1 = self.scale_L1 = None
        if paths:
            self.keep_L1 = torch.stack([path.keep for path in paths])[:, None]
            scaled = [path.keep if path.scale_by_keep else path.keep.new_ones(()) for path in paths]
            self.scale_L1 = torch.stack(scaled)[:, None]

    def draw(self, images: int) -> None:
        """Draw the masks of a forward pass of `images` images from torch's generator."""
        if not self.paths:
            return
        # Every row begins at a multiple of 16 bytes: the compiler copies other inputs first.
        columns = -(-images // 4) * 4
        mask_LN = torch.bernoulli(self.keep_L1.expand(-1, columns)) / self.scale_L1
        for path, mask_N in zip(self.paths, mask_LN[:, :images].unbind(), strict=True):
            path.mask_N = mask_N


def can_capture(mode: str, ranks: Ranks) -> bool:
    """Return whether updates are CUDA graphs, which they cannot be on a CPU."""
    return mode == "graph" and ranks.device.type == "cuda"


def compile_step(mode: str, trainable: nn.Module) -> Callable[..., Tensor]:
    """Return `step_loss`, compiled as `--compile` says.

    `blocks`: one compilation serves all blocks that are alike; their DropPath becomes a
    SharedDropPath. Patch embedding, heads and loss are compiled apart from them. `graph` compiles
    as `whole` does; captured_update.py captures the result. The optimizer is not compiled: its
    operations are fused and foreach ones, about ten launches. On a CPU, `never` leaves out what
    stochastic depth drops (drop_path.py).
    """
    # The number of kept samples changes from step to step: a GPU would wait for it, and a compiler
    # would compile each.
    eager = mode == "never" and next(trainable.parameters()).device.type == "cpu"
    skip_dropped(trainable, eager)
    use_levers(trainable)
    if mode == "never":
        return step_loss
    tag_compiled_code()
    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILATIONS)
    networks = get_networks(trainable)
    has_blocks = all(isinstance(getattr(net, "blocks", None), nn.Module) for net in networks)
    # Networks without blocks, such as timm's ResNets, are compiled whole.
    if mode in ("whole", "graph") or not has_blocks:
        return torch.compile(step_loss, dynamic=False)
    return compile_regions(trainable, networks)


def compile_regions(trainable: nn.Module, networks: Sequence[nn.Module]) -> Callable[..., Tensor]:
    """Compile blocks, ends of networks and the loss; return `step_loss` with what they need."""
    device = next(trainable.parameters()).device
    blocks = [block for network in networks for block in network.blocks]
    masks = DropPathMasks([path for block in blocks for path in share_drop_path(block, device)])
    regions = [network for network in networks if isinstance(network, TokenTransformer)]
    regions += [b for net in networks if net not in regions for b in net.blocks]
    # A CPU has no launches to save.
    alone = not (dist.is_available() and dist.is_initialized())
    copies = WeightCopies(regions if device.type == "cuda" else (), by_image=alone)
    for block in blocks:
        block.compile(dynamic=False)
    for network in networks:
        compile_ends(network, device)
    measure = torch.compile(objective_loss, dynamic=False)
    mask = torch.compile(token_mask, dynamic=False)

    def compute(
        objective: Objective,
        network: nn.Module,
        batch: Batch,
        step: StepContext,
        dtype: torch.dtype | None,
    ) -> Tensor:
        images = len(batch.image)
        masks.draw(images)
        copies.update(dtype, images)
        if objective.setting.mix.mixtoken:
            step = step._replace(mask=mask(step.mix, step.grid))
        return step_loss(objective, network, batch, step, dtype, measure)

    return compute


def compile_ends(network: nn.Module, device: torch.device) -> None:
    """Compile what comes before the blocks of a network and, of this package's, after them."""
    # SyncBatchNorm waits for other ranks, and the compiler would break the graph there.
    synced = any(isinstance(part, nn.SyncBatchNorm) for part in network.modules())
    if isinstance(network, TokenTransformer):
        ends = ["forward_head"] if synced else ["_embed", "forward_head"]
        # With the last norm, which alone would read and write float32: 77 MB each for 256 images of
        # LV-ViT-S. On a CPU it stays alone, and losses are those of earlier versions to the bit.
        if device.type == "cuda":
            ends.append("_forward_end")
        for name in ends:
            compiled = torch.compile(getattr(type(network), name), dynamic=False)
            # A method, because a copy of the network must not call that of the original.
            setattr(network, name, MethodType(compiled, network))
    elif isinstance(embedding := getattr(network, "patch_embed", None), nn.Module) and not synced:
        embedding.compile(dynamic=False)


def share_drop_path(block: nn.Module, device: torch.device) -> list[SharedDropPath]:
    """Replace every DropPath of a block by a SharedDropPath.

    Returns those that are called once per forward pass.
    """
    single = []
    # A list, because replacing a module changes what named_modules walks.
    for name, part in list(block.named_modules()):
        if isinstance(part, DropPath):
            shared = SharedDropPath(part).to(device).train(part.training)
            block.set_submodule(name, shared)
            # timm numbers the modules of a block that has one for each branch. A `drop_path` may be
            # called for all branches, as in CaiT, and then draws a mask for each.
            if name[-1].isdigit():
                single.append(shared)
    return single

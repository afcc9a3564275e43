"""Gradient checkpointing of blocks: less memory, same gradients and BatchNorm statistics."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@contextmanager
def keep_running_statistics(block: nn.Module) -> Iterator[None]:
    """Keep the running statistics of BatchNorm in a second pass, by a momentum of 0."""
    norms = [
        module for module in block.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def recompute(block: nn.Module, *inputs: Any) -> Tensor:
    """Return `block(*inputs)`, keeping only the inputs; the backward pass recomputes activations.

    BatchNorm's batch counter (`num_batches_tracked`) counts both passes; it is read only where a
    momentum is None.
    """
    # Under torch.compile a second pass writes no buffers, and a context manager of ours would
    # break the graph.
    if torch.compiler.is_compiling():
        return checkpoint(block, *inputs, use_reentrant=False)
    return checkpoint(
        block,
        *inputs,
        use_reentrant=False,
        # The first context is for the forward pass, the second for its repetition.
        context_fn=lambda: (nullcontext(), keep_running_statistics(block)),
    )


def run_blocks(
    blocks: Iterable[nn.Module], x: Tensor, *more: Any, grad_checkpointing: bool
) -> Tensor:
    """Run blocks in order, each as `block(x, *more)`; recompute them with `grad_checkpointing`."""
    # Without a backward pass there is nothing to recompute for.
    recomputing = grad_checkpointing and torch.is_grad_enabled()
    for block in blocks:
        x = recompute(block, x, *more) if recomputing else block(x, *more)
    return x

"""Gradient checkpointing of blocks that hold BatchNorm: less memory, the same gradients and the
same running statistics.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@contextmanager
def keep_running_statistics(block: nn.Module) -> Iterator[None]:
    """BatchNorm does not count a second pass: with momentum 0 its running statistics stay as they
    are.
    """
    norms = [
        module for module in block.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum


def recompute(block: nn.Module, *inputs: Any) -> Tensor:
    """`block(*inputs)`, of which the backward pass keeps the inputs alone and computes the rest a
    second time.

    The number of batches that a BatchNorm has seen (`num_batches_tracked`) counts both passes; it
    is read only where a momentum is None.
    """
    # Under the compiler a second pass writes no buffers, and a context of ours would break the
    # graph.
    if torch.compiler.is_compiling():
        return checkpoint(block, *inputs, use_reentrant=False)
    return checkpoint(
        block,
        *inputs,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), keep_running_statistics(block)),
    )

"""Sharpness-Aware Minimization (SAM, arXiv 2010.01412): the gradient at the worst weights nearby.

With gradient g at the weights w, the worst weights within a distance rho are about w + rho g / |g|.
An update of w reads the gradient there, of the same batch. So a step has two forward and backward
passes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# Keeps a gradient of zeros from a division by 0.
SMALL = 1e-12


@contextmanager
def worst_weights(trainable: nn.Module, rho: float) -> Iterator[None]:
    """Move the weights by `rho` along their gradients, all as one vector, and clear these.

    At the end, weights and buffers are to the bit what they were: running statistics are those of
    the first pass. A gradient that is not finite moves nothing. Then the second one, at the same
    weights, is not finite either, and the guard or float16's scaler sees that. Nothing waits for
    the device.
    """
    moved = [p for p in trainable.parameters() if p.grad is not None]
    kept = [*moved, *trainable.buffers()]
    before = [tensor.detach().clone() for tensor in kept]
    norm = torch.nn.utils.get_total_norm([p.grad for p in moved], foreach=True)
    # SGD uphill, because its fused kernel reads rate and flag on the device. Its constructor would
    # wait for the rate. Gradients that are scaled for float16 have the same direction.
    ascent = torch.optim.SGD(moved, lr=0.0, maximize=True, fused=True)
    ascent.param_groups[0]["lr"] = rho / (norm + SMALL)
    ascent.found_inf = (norm - norm).ne(0).float()
    ascent.step()
    ascent.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(kept, before)

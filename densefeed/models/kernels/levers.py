"""Faster forms of a model's layers on a GPU, each of which is measured before it stays.

The environment variable DENSEFEED_LEVERS names those that trainings use, with spaces between them;
`python -m benchmarks.step --levers NAMES` sets it. By default there are none. A model keeps its
parameters and their names. In types or shapes that a kernel does not have, and Triton's on a CPU,
layers compute as before.
"""

import os
from collections.abc import Callable

from torch import nn

from densefeed.models.kernels import (
    add_norm,
    four_channels,
    norm_relu,
    packed_attention,
    shared_gelu,
    space_to_depth,
)
from densefeed.system.errors import UserError

VARIABLE = "DENSEFEED_LEVERS"
LEVERS: dict[str, Callable[[nn.Module], None]] = {
    "attention": packed_attention.use,
    "space-to-depth": space_to_depth.use,
    # Takes the place of space-to-depth where both are named.
    "four-channels": four_channels.use,
    "gelu": shared_gelu.use,
    "add-norm": add_norm.use,
    "norm-relu": norm_relu.use,
}


def use_levers(model: nn.Module) -> None:
    """Give a model the forms that DENSEFEED_LEVERS names. UserError for an unknown name."""
    named = os.environ.get(VARIABLE, "").split()
    for name in named:
        if name not in LEVERS:
            raise UserError(f"{VARIABLE}: {name} is not among {', '.join(LEVERS)}; leave it out")
    # In the order above, whatever that of the names.
    for name, use in LEVERS.items():
        if name in named:
            use(model)

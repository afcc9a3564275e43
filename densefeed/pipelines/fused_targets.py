"""Sparse targets on a GPU in few kernels: one for the maps of a batch, one for each grid.

targets.py has the same in plain PyTorch, which computes on a CPU and defines the results. These are
operators of `torch.library`, so that `torch.compile` keeps them whole; the kernels are in
fused_targets_triton.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from densefeed.system.devices import has_triton

# N images   S map side   k classes per cell   M palette   R x C, the grid of tokens   T = R * C

# Elements of a program's table of tokens (or samples) by slots. 8 tokens by 64 slots take 96
# registers of a thread, 16 take 167, and 64 more than there are (compiled for sm_90).
TILE = 512
# A program has at least one token, whose slots then take 32 registers of a thread.
MOST_SLOTS = 4096


class SlotMaps(NamedTuple):
    """A batch's score maps as the kernels pool them: entry by entry, not over the whole palette."""

    palette: Tensor  # int64 [N, M]
    slot: Tensor  # int32 [N, S, S, k], the place of each entry in its palette
    # float32 [N, S, S, k]: zero-logit: logits; else: probabilities beyond what every class has
    value: Tensor
    share: Tensor  # float32 [N, S, S], what every class has; zero-logit: empty
    # float32 [N, 21]: the fields of `Places` and the weight of the image
    place: Tensor


def can_run(view: Tensor, slots: int) -> bool:
    """Return whether the kernels can make targets with palettes of `slots` classes."""
    return view.is_cuda and view.dtype == torch.float32 and slots <= MOST_SLOTS and has_triton()


def round_up_to_power(number: int) -> int:
    """Return the smallest power of two that is not smaller: Triton's tables have such sides."""
    return 1 << (number - 1).bit_length()


def run_spread_kernel(
    map_class: Tensor,
    map_logit: Tensor,
    map_lse: Tensor,
    classes: int,
    slots: int,
    absent: str,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the first four fields of SlotMaps; see `targets.palette_maps`.

    `absent` is that of ScoreMapSpec.
    """
    # Imported here, because importing Triton takes a second, or fails.
    from densefeed.pipelines import fused_targets_triton as kernels

    N, side, _, top_k = map_class.shape
    made = allocate_maps(map_class, classes, slots, absent)
    rank_NK = map_class.new_empty(N, classes, dtype=torch.int32)
    maps = (part.contiguous() for part in (map_class, map_logit, map_lse))
    kernels.launch(
        kernels.palette_kernel,
        (N,),
        *(*maps, rank_NK, *made),
        *(side * side, top_k, classes, slots, temperature),
        TAIL=absent != "zero-logit",
        BACKGROUND=absent == "background",
        SOFTENED=temperature != 1,
    )
    return made


def run_pool_kernel(
    slot: Tensor,
    value: Tensor,
    share: Tensor,
    place: Tensor,
    numbers: list[float],
    classes: int,
    slots: int,
    grid_rows: int,
    grid_columns: int,
    most: int,
    uniform: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pool maps to the targets of a table of tokens; see `sparse_targets`.

    The tensors are fields of SlotMaps. `numbers` are how far outside of map and image a point still
    counts as inside, and `on`, `off` and the sum of a target. `most` limits the samples of a token
    along an axis. Returns extra, float32 `[N, T, M]`, and base, weight and total, `[N, T]`.
    """
    from densefeed.pipelines import fused_targets_triton as kernels

    N, side, _, top_k = value.shape
    tokens = grid_rows * grid_columns
    made = allocate_targets(value, slots, tokens)
    columns = round_up_to_power(slots)
    # The whole crop is one token, whose samples are the rows.
    whole = tokens == 1
    rows = round_up_to_power(most * most if whole else tokens)
    rows = min(rows, max(TILE // columns, 1))
    kernels.launch(
        kernels.pool_kernel,
        (N, -(-tokens // rows)),
        *(slot, value, share, place, *made),
        *(side, top_k, classes, slots, grid_rows, grid_columns, most, *numbers),
        TAIL=share.numel() > 0,
        UNIFORM=uniform,
        WHOLE=whole,
        ROWS=rows,
        SLOTS=columns,
    )
    return made


def allocate_maps(
    map_class: Tensor, classes: int, slots: int, absent: str, *_
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate what `run_spread_kernel` returns."""
    shape = map_class.shape
    return (
        map_class.new_empty(shape[0], slots, dtype=torch.long),
        map_class.new_empty(shape, dtype=torch.int32),
        map_class.new_empty(shape, dtype=torch.float32),
        map_class.new_empty((0,) if absent == "zero-logit" else shape[:3], dtype=torch.float32),
    )


def allocate_targets(
    value: Tensor, slots: int, tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate what `run_pool_kernel` returns."""
    shape = len(value), tokens
    base, weight, total = (value.new_empty(shape) for _ in range(3))
    return value.new_empty(*shape, slots), base, weight, total


spread_maps, pool_targets = (
    torch.library.custom_op(f"densefeed::{name}", run, mutates_args=(), device_types="cuda")
    for name, run in (("spread_maps", run_spread_kernel), ("pool_targets", run_pool_kernel))
)


@spread_maps.register_fake
def _(map_class, map_logit, map_lse, *numbers):
    return allocate_maps(map_class, *numbers)


@pool_targets.register_fake
def _(slot, value, share, place, numbers, classes, slots, grid_rows, grid_columns, *more):
    return allocate_targets(value, slots, grid_rows * grid_columns)

"""The pairs of places that DRLoc compares (densefeed/objectives/drloc.py), drawn on the device.

A batch of 1,024 images needs 262,144 random numbers a step, and their counters are sample ids,
which are on the device already, so the plan's generator runs there (`philox_on_device`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from densefeed.pipelines.batch import Batch
from densefeed.pipelines.philox import philox_on_device
from densefeed.pipelines.plan import PAIRS, EpochPlan


class Pairs(NamedTuple):
    """The pairs of one step and the weight of their loss."""

    # int64 [N, M, 4], 32 random bits each: row and column of the first place, of the second
    words: Tensor
    weight: Tensor  # float32 [], lambda: the weight of the loss


def draw_pairs(plan: EpochPlan, epoch: int, batch: Batch, count: int, weight: float) -> Pairs:
    """Draw `count` pairs for each image of a batch on a device, without a host sync.

    They depend on (seed, epoch, sample id, repeat) alone.
    """
    device = batch.index.device
    # The word of EpochPlan.draws: the stream below, the repeat in the upper 16 bits.
    kind = (batch.repeat << 16 | PAIRS)[:, None]
    words = philox_on_device(
        plan.seed, (epoch, batch.index[:, None], kind, torch.arange(count, device=device))
    )
    return Pairs(words, torch.full((), weight, device=device))

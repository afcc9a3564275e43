"""The pairs of places that DRLoc compares (densefeed/objectives/drloc.py), drawn on the device by
the plan's generator.

A batch of 1,024 images needs 262,144 numbers a step, and their counters are sample ids, which lie
on the device already: so Philox runs there, on int64, where a product of two 32-bit words wraps and
keeps its bits. Words are those of `plan.philox`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from densefeed.pipelines.batch import Batch
from densefeed.pipelines.plan import EpochPlan

PAIRS = 10  # this stream's number; those below are plan.py's
MASK = 2**32 - 1


class Pairs(NamedTuple):
    """What a step localizes."""

    # int64 [N, M, 4], 32 random bits each: row and column of the first place, of the second
    words: Tensor
    weight: Tensor  # float32 [], lambda: the weight of the loss


def philox_on_device(key: int, counter: tuple[int | Tensor, ...]) -> Tensor:
    """`plan.philox` of words that are numbers or int64 tensors which broadcast; all four words,
    int64 `[..., 4]`, no wait.
    """
    c0, c1, c2, c3 = counter
    for number in range(10):
        low = (key + number * 0x9E3779B9) & MASK
        high = ((key >> 32) + number * 0xBB67AE85) & MASK
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (product1 >> 32 & MASK) ^ (c1 ^ low),
            product1 & MASK,
            (product0 >> 32 & MASK) ^ (c3 ^ high),
            product0 & MASK,
        )
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), -1)


def draw_pairs(plan: EpochPlan, epoch: int, batch: Batch, count: int, weight: float) -> Pairs:
    """`count` pairs of each image of a batch on a device: a function of (seed, epoch, sample id,
    view) alone, no wait.
    """
    device = batch.index.device
    kind = (batch.repeat << 16 | PAIRS)[:, None]
    words = philox_on_device(
        plan.seed, (epoch, batch.index[:, None], kind, torch.arange(count, device=device))
    )
    return Pairs(words, torch.full((), weight, device=device))

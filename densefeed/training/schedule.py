"""The learning rate of every step: linear warm-up, cosine, then epochs at the lowest rate.

Token Labeling (arXiv 2104.10858), Table 2, states epochs, warm-up and cosine. The published code
changes the rate once per epoch and adds ten epochs at the lowest rate (its defaults, with the
schedule of timm 0.4.5).
"""

import math

from densefeed.training.config import OptimOptions

# The rate of the first step, in the published code and in DeiT's.
WARMUP_FROM = 1e-6


def learning_rate(optim: OptimOptions, step: int, steps_per_epoch: int) -> float:
    """Compute the learning rate of a step; steps count from 0 over all epochs.

    Warm-up does not delay the cosine: where it ends, the cosine is as far as if it had begun with
    the first step, so the rate falls a little short of the peak (timm's default). From epoch
    `epochs` on the rate is `min_lr`.
    """
    per_epoch = optim.lr_updates == "epoch"
    now, unit = (step // steps_per_epoch, 1) if per_epoch else (step, steps_per_epoch)
    warmup, whole, peak = optim.warmup_epochs * unit, optim.epochs * unit, optim.peak_lr
    # The order of operations is timm's, so rates are equal to the bit
    # (tests/training/test_schedule.py).
    if now < warmup:
        return WARMUP_FROM + now * ((peak - WARMUP_FROM) / warmup)
    if now >= whole:
        return optim.min_lr
    return optim.min_lr + 0.5 * (peak - optim.min_lr) * (1 + math.cos(math.pi * now / whole))

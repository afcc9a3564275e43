"""The learning rate of every step: linear warm-up, cosine, and then perhaps some epochs at the
lowest rate.

Token Labeling (arXiv 2104.10858), Table 2, states epochs, warm-up and cosine. The published code
changes the rate once an epoch and runs ten epochs more at the lowest rate than the paper says
(reference: its defaults, timm 0.4.5's schedule).
"""

import math

from densefeed.training.config import Config

WARMUP_FROM = 1e-6  # the rate of the first step, of both the published code and DeiT


def peak_rate(config: Config) -> float:
    """The highest learning rate: `lr` is meant for a batch of `lr_batch` images, and grows linearly
    with the batch.
    """
    return config.lr * config.batch / config.lr_batch


def total_epochs(config: Config) -> int:
    """Passes over the training set: those of the cosine and those at the lowest rate after it."""
    return config.epochs + config.cooldown_epochs


def learning_rate(config: Config, step: int, steps_per_epoch: int) -> float:
    """The learning rate of step number `step`, which counts from 0 over all epochs.

    Warm-up does not delay the cosine: where it ends, the cosine is as far as if it had begun with
    the first step, so the rate falls a little short of the peak (as timm does unless told
    otherwise). From epoch `epochs` on it is `min_lr`.
    """
    each_epoch = config.lr_updates == "epoch"
    now, unit = (step // steps_per_epoch, 1) if each_epoch else (step, steps_per_epoch)
    warmup, whole, peak = config.warmup_epochs * unit, config.epochs * unit, peak_rate(config)
    if now < warmup:
        return WARMUP_FROM + now * ((peak - WARMUP_FROM) / warmup)
    if now >= whole:
        return config.min_lr
    return config.min_lr + 0.5 * (peak - config.min_lr) * (1 + math.cos(math.pi * now / whole))

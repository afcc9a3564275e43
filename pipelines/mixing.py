"""MixToken on the data side: the tokens of a batch that come from the partner image, and the class token's share."""

import torch
from torch import Tensor

from .plan import EpochPlan


def mix_mask(plan: EpochPlan, epoch: int, step: int, grid: int) -> Tensor:
    """Bool `[grid, grid]`: where tokens come from the partner, which is the batch reversed (paper, equation 8)."""
    top, left, bottom, right = plan.mix_box(epoch, step, grid)
    mask = torch.zeros(grid, grid, dtype=torch.bool)
    mask[top:bottom, left:right] = True
    return mask


def partner_share(mask_PP: Tensor) -> Tensor:
    """The share of tokens from the partner, 1 - M̄ of equation 10: the true area after clipping. A scalar on the mask's device."""
    return mask_PP.float().mean()

"""Accuracy."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


@torch.inference_mode()
def top1_waits(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor, Tensor]]) -> float:
    """Top-1 accuracy over batches of (normalised images, labels, weights); weight 0 does not count. Waits for the device once."""
    model.eval()
    right = total = None
    for image_NCHW, label_N, weight_N in batches:
        hit_N = (model(image_NCHW).argmax(-1) == label_N).float()
        right = (hit_N * weight_N).sum() + (0 if right is None else right)
        total = weight_N.sum() + (0 if total is None else total)
    return (right / total).item()

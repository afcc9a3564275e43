"""Accuracy."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


@torch.inference_mode()
def sums(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Right answers and how many there were, float64 `[2]` on the device, over batches of (normalised images, labels, weights);
    weight 0 does not count."""
    model.eval()
    total = None
    for image_NCHW, label_N, weight_N in batches:
        hit_N = (model(image_NCHW).argmax(-1) == label_N).double()
        counted = torch.stack([(hit_N * weight_N).sum(), weight_N.double().sum()])
        total = counted if total is None else total + counted
    return total


def top1_waits(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor, Tensor]]) -> float:
    """Top-1 accuracy over such batches. Waits for the device once."""
    right, total = sums(model, batches).tolist()
    return right / total

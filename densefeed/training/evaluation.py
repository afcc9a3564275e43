"""Accuracy and loss: sums that stay on the device, and what is read from them."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# N images   K classes

TOP = 5  # as ImageNet counts its second accuracy

# images float32 [N, 3, H, W] or logits float32 [N, K]; labels int64 [N]; weights float32 [N]
Told = tuple[Tensor, Tensor, Tensor]


class MetricSums(NamedTuple):
    """Weighted sums over images, float64 scalars on the device: `Sums(*torch.stack(sums))` after an
    all-reduce of the stack.
    """

    right: Tensor  # images whose best class is their label
    right5: Tensor  # whose label is among the best five, or all where there are fewer
    loss: Tensor  # cross entropy, nats
    total: Tensor  # images


class Metrics(NamedTuple):
    """What sums say of one image on average."""

    top1: float  # 0 to 1
    top5: float  # 0 to 1
    loss: float  # nats


@torch.inference_mode()
def predict(
    model: nn.Module,
    batches: Iterable[Told],
    columns_C: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[Told]:
    """What the model says, in evaluation mode, to batches of (normalized images `[N, 3, H, W]`,
    labels, weights); no wait.

    `columns_C` (int64 `[C]`, on the device) picks and orders classes: logit c of an answer is the
    model's logit `columns_C[c]`, so classes that are not named take no part. `dtype` is that of
    autocast, None for none; logits are float32.
    """
    model.eval()
    for image_NCHW, label_N, weight_N in batches:
        with torch.autocast(
            image_NCHW.device.type, dtype or torch.bfloat16, enabled=dtype is not None
        ):
            logits_NK = model(image_NCHW)
        yield (
            (logits_NK if columns_C is None else logits_NK[:, columns_C]).float(),
            label_N,
            weight_N,
        )


@torch.inference_mode()
def sum_metrics(predict: Iterable[Told]) -> MetricSums:
    """The sums over all answers; an image of weight 0, as padding is, does not count. No wait.
    ValueError if there is none.
    """
    sums = None
    for logits_NK, label_N, weight_N in predict:
        best_NM = logits_NK.topk(min(TOP, logits_NK.shape[1])).indices
        right_N = logits_NK.argmax(-1) == label_N
        right5_N = (best_NM == label_N[:, None]).any(-1)
        loss_N = F.cross_entropy(logits_NK, label_N, reduction="none")
        # float64: a sum of 50,000 losses keeps every digit of each, in whatever batches they come.
        weight_N = weight_N.double()
        new = torch.stack(
            [
                (value_N * weight_N).sum()
                for value_N in (right_N, right5_N, loss_N, torch.ones_like(loss_N))
            ]
        )
        sums = new if sums is None else sums + new
    if sums is None:
        raise ValueError("there is no batch to evaluate")
    return MetricSums(*sums)


def mean_metrics_sync(sums: MetricSums) -> Metrics:
    """Averages over the images that count; waits for the device."""
    right, right5, loss, total = torch.stack(sums).tolist()
    return Metrics(right / total, right5 / total, loss / total)

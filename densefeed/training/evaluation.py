"""Accuracy and loss: sums that stay on the device, and the metrics computed from them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.objectives.base import Evaluation, Objective
from densefeed.pipelines.augment.augmentation import Normalize
from densefeed.pipelines.batch import to_device
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.system.errors import UserError
from densefeed.training.ranks import Ranks

# N images   K classes

# ImageNet's second accuracy.
TOP = 5

# Images float32 [N, 3, H, W], or logits float32 [N, K]; labels int64 [N]; weights float32 [N].
Weighted = tuple[Tensor, Tensor, Tensor]


class Metrics(NamedTuple):
    """Means over the images that were evaluated: padding and unreadable images do not count."""

    top1: float  # 0 to 1, images whose best class is their label
    top5: float  # 0 to 1, whose label is among the best five (all, with fewer classes)
    loss: float  # cross entropy, nats
    images: int  # number of these images
    nonfinite: int = 0  # of these, images whose outputs are not finite; they count as wrong

    def named(self, suffix: str) -> dict[str, float]:
        """Return the means, with a suffix to their names."""
        return {f"{name}{suffix}": getattr(self, name) for name in ("top1", "top5", "loss")}


def describe_nonfinite(metrics: Any) -> str:
    """Say how many evaluated images have outputs that are not finite; "" if none has."""
    if not metrics.nonfinite:
        return ""
    return f"the outputs of {metrics.nonfinite:,} of {metrics.images:,} images are not finite"


@torch.inference_mode()
def predict(
    model: nn.Module,
    batches: Iterable[Weighted],
    columns_C: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[Weighted]:
    """Yield (logits, labels, weights) for batches of (normalized images, labels, weights).

    The model is put in evaluation mode; nothing waits. `columns_C` (int64 `[C]`, on the device)
    selects and orders classes: logit c of the result is the model's logit `columns_C[c]`, and other
    classes take no part. `dtype` is that of autocast, None for none; logits are float32.
    """
    model.eval()
    for image_NCHW, label_N, weight_N in batches:
        with torch.autocast(image_NCHW.device.type, dtype, enabled=dtype is not None):
            logits_NK = model(image_NCHW)
        if columns_C is not None:
            logits_NK = logits_NK[:, columns_C]
        yield logits_NK.float(), label_N, weight_N


@torch.inference_mode()
def sum_metrics(predictions: Iterable[Weighted]) -> Tensor:
    """Sum the fields of `Metrics` over all images: float64 `[5]`.

    An image of weight 0, as padding, does not count. Nothing waits. ValueError without any batch.
    """
    sums = None
    for logits_NK, label_N, weight_N in predictions:
        best_NM = logits_NK.topk(min(TOP, logits_NK.shape[1])).indices
        loss_N = F.cross_entropy(logits_NK, label_N, reduction="none")
        # NaN ranks first, so class 0 would be right where all logits are NaN.
        finite_N = loss_N.isfinite()
        right_N = (logits_NK.argmax(-1) == label_N) & finite_N
        right5_N = (best_NM == label_N[:, None]).any(-1) & finite_N
        # float64: a sum of 50,000 losses keeps every digit of each, whatever the batches.
        weight_N = weight_N.double()
        values = right_N, right5_N, loss_N, torch.ones_like(loss_N), ~finite_N
        new = torch.stack([(value_N * weight_N).sum() for value_N in values])
        sums = new if sums is None else sums + new
    if sums is None:
        raise ValueError("there is no batch to evaluate")
    return sums


def mean_metrics_sync(sums: Tensor) -> Metrics:
    """Divide by the number of images; waits for the device. UserError if there are none."""
    *values, total, nonfinite = sums.tolist()
    if not total:
        raise UserError(
            "none of the images of the evaluation can be read; see the messages above for the "
            "reasons"
        )
    means = (value / total for value in values)
    return Metrics(*means, images=round(total), nonfinite=round(nonfinite))


class Accuracy(Evaluation):
    """The label of each image: top-1, top-5 and cross entropy."""

    rated = "top1"

    def sum(
        self,
        model: nn.Module,
        loader: ThreadedLoader,
        normalize: Normalize,
        device: torch.device,
        dtype: torch.dtype | None,
        advance: Callable[[int, str], None],
    ) -> Tensor:
        def batches() -> Iterator[Weighted]:
            for number, batch in enumerate(to_device(loader.batches(0), device), start=1):
                yield normalize(batch.image), batch.label, batch.weight
                advance(0, f"evaluating, {number} of {len(loader)}")

        return sum_metrics(predict(model, batches(), dtype=dtype))

    def mean_sync(self, sums: Tensor) -> Metrics:
        return mean_metrics_sync(sums)


def find_evaluation(objective: Objective) -> Evaluation:
    """Return how the models of an objective are evaluated."""
    return objective.evaluation or Accuracy()


def evaluate_sync(
    evaluation: Evaluation,
    model: nn.Module,
    loader: ThreadedLoader,
    normalize: Normalize,
    ranks: Ranks,
    dtype: torch.dtype | None,
    advance: Callable[[int, str], None],
) -> Metrics:
    """Evaluate on a validation set, each image once, over all ranks; see `Evaluation.sum`."""
    sums = evaluation.sum(model, loader, normalize, ranks.device, dtype, advance)
    # An all-reduce writes in place, which a tensor of inference mode does not allow.
    return evaluation.mean_sync(ranks.sum(sums.clone()))

"""Accuracy and loss against counts by hand and plain loops in float64."""

import math

import pytest
import torch
from torch import nn

from densefeed.system.errors import UserError
from densefeed.training.evaluation import (
    describe_nonfinite,
    mean_metrics_sync,
    predict,
    sum_metrics,
)


class LogitTable(nn.Module):
    """Classifier of one pixel, whose first channel is a row of a table of logits."""

    def __init__(self, table_RK):
        super().__init__()
        self.register_buffer("table_RK", table_RK)

    def forward(self, image_NCHW):
        assert not self.training
        return self.table_RK[image_NCHW[:, 0, 0, 0].long()]


def make_batches(label_N, weight_N, sizes):
    """Make images that hold their own number, in batches of these sizes."""
    image_NCHW = torch.arange(len(label_N)).float().view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
    return list(
        zip(image_NCHW.split(sizes), label_N.split(sizes), weight_N.split(sizes), strict=True)
    )


@pytest.mark.parametrize(
    ("count", "classes", "sizes"), [(1, 2, [1]), (7, 3, [4, 3]), (33, 40, [16, 16, 1])]
)
def test_sums_match_plain_loop(count, classes, sizes):
    rng = torch.Generator().manual_seed(count)
    logits_NK = 3 * torch.randn(count, classes, generator=rng)
    label_N = torch.randint(classes, (count,), generator=rng)
    weight_N = (torch.rand(count, generator=rng) < 0.7).float()
    weight_N[0] = 1
    right = right5 = loss = 0.0
    for logits, label, weight in zip(
        logits_NK.tolist(), label_N.tolist(), weight_N.tolist(), strict=True
    ):
        order = sorted(range(classes), key=lambda k: -logits[k])
        right += weight * (order[0] == label)
        right5 += weight * (label in order[:5])
        loss += weight * (math.log(sum(map(math.exp, logits))) - logits[label])
    sums = sum_metrics(
        predict(LogitTable(logits_NK).train(), make_batches(label_N, weight_N, sizes))
    )
    assert sums[[0, 1, 3]].tolist() == [right, right5, float(weight_N.sum())]
    assert float(sums[2]) == pytest.approx(loss, rel=1e-6)
    shares = mean_metrics_sync(sums)
    assert shares.images == weight_N.sum()
    assert shares.top1 == right / float(weight_N.sum())
    assert shares.loss == pytest.approx(loss / float(weight_N.sum()), rel=1e-6)


def test_accuracy_matches_count_by_hand():
    """Eight classes, ranked 7 6 5 4 3 2 1 0 in every image: label 7 is first, 3 fifth, 2 sixth."""
    logits_NK = torch.arange(8.0).expand(5, 8)
    label_N, weight_N = torch.tensor([7, 3, 2, 7, 7]), torch.tensor([1.0, 1, 1, 1, 0])
    sums = sum_metrics(predict(LogitTable(logits_NK), make_batches(label_N, weight_N, [5])))
    assert sums[[0, 1, 3]].tolist() == [2, 3, 4]


def test_top5_with_fewer_than_five_classes():
    sums = sum_metrics(
        predict(LogitTable(torch.eye(3)), make_batches(torch.tensor([1, 2, 2]), torch.ones(3), [3]))
    )
    assert sums[:2].tolist() == [1, 3]


def test_unselected_classes_are_ignored():
    """Class 0 has the highest logit everywhere; of columns 3 and 1, in this order, 1, 0, 0 win."""
    logits_NK = torch.tensor([[9.0, 2, 0, 1], [9, 2, 0, 3], [9, 0, 7, 4]])
    batch = make_batches(torch.tensor([1, 1, 0]), torch.ones(3), [3])
    (prediction,) = predict(LogitTable(logits_NK), batch, torch.tensor([3, 1]))
    assert prediction[0].tolist() == [[1, 2], [3, 2], [4, 0]]
    sums = sum_metrics([prediction])
    assert float(sums[0]) == 2
    want = (
        math.log(math.exp(1 - 2) + 1)
        + math.log(math.exp(3 - 2) + 1)
        + math.log(1 + math.exp(0 - 4))
    )
    assert float(sums[2]) == pytest.approx(want, rel=1e-6)


def test_sums_of_parts_add_up():
    """As ranks do: each sums its own rows, and the sums are added."""
    rng = torch.Generator().manual_seed(0)
    logits_NK, label_N = torch.randn(24, 9, generator=rng), torch.randint(9, (24,), generator=rng)
    model, parts = LogitTable(logits_NK), make_batches(label_N, torch.ones(24), [8, 8, 8])
    ranks = [sum_metrics(predict(model, part)) for part in (parts[:1], parts[1:])]
    assert mean_metrics_sync(sum(ranks)) == pytest.approx(
        mean_metrics_sync(sum_metrics(predict(model, parts))), rel=1e-12
    )


def test_sums_do_not_sync(no_host_read):
    model, batch = LogitTable(torch.eye(6)), make_batches(torch.arange(6), torch.ones(6), [3, 3])
    columns = torch.tensor([0, 1, 2, 3, 4, 5])
    with no_host_read():
        sums = sum_metrics(predict(model, batch, columns, dtype=torch.bfloat16))
    assert float(sums[0]) == 6


def test_bfloat16_logits_are_float32_and_close():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    image_NCHW = torch.randn(4, 3, 2, 2)
    batch = [(image_NCHW, torch.zeros(4, dtype=torch.int64), torch.ones(4))]
    ((plain, *_),), ((half, *_),) = (
        list(predict(model, batch, dtype=dtype)) for dtype in (None, torch.bfloat16)
    )
    assert half.dtype == torch.float32
    # bfloat16 has 8 bits of mantissa, in sums of 12 products below 1.
    assert 0 < (half - plain).abs().max() < 0.05


def test_error_without_a_readable_image():
    sums = sum_metrics(
        predict(LogitTable(torch.eye(3)), make_batches(*torch.zeros(2, 3).long(), [3]))
    )
    with pytest.raises(
        UserError, match="none of the images of the evaluation can be read; see the"
    ):
        mean_metrics_sync(sums)


def test_error_without_batches():
    with pytest.raises(ValueError, match="no batch"):
        sum_metrics([])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_outside_outputs_that_are_not_finite_count_as_wrong(bad, no_host_read):
    """Three of four images are of class 0, which argmax and topk name for NaN."""
    logits_NK = torch.full((4, 3), bad)
    logits_NK[1] = torch.tensor([2.0, 1, -math.inf])
    batch = make_batches(torch.tensor([0, 0, 0, 1]), torch.ones(4), [2, 2])
    with no_host_read():
        sums = sum_metrics(predict(LogitTable(logits_NK), batch))
    metrics = mean_metrics_sync(sums)
    assert (metrics.top1, metrics.top5, metrics.images, metrics.nonfinite) == (0.25, 0.25, 4, 3)
    assert math.isnan(metrics.loss)
    assert describe_nonfinite(metrics).startswith("the outputs of 3 of 4 images are not finite")
    assert not describe_nonfinite(mean_metrics_sync(sums[:].index_fill(0, torch.tensor([4]), 0)))

"""The sparse losses against dense cross entropy in float64."""

import pytest
import torch
from densefeed.models.token_labeling import class_token_loss, hard_label_loss, sparse_cross_entropy, token_loss
from densefeed.pipelines.mixing import mixed
from densefeed.pipelines.targets import SparseTargets
from hypothesis import given, settings
from hypothesis import strategies as st


def random_targets(count, tokens, palette, classes, seed=0, total=1.1):
    """Targets that sum to `total`, and the same dense."""
    rng = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randperm(classes, generator=rng)[:palette] for _ in range(count)])
    dense = torch.rand(count, tokens, 1, generator=rng, dtype=torch.float64).expand(-1, -1, classes).clone()
    extra = torch.rand(count, tokens, palette, generator=rng, dtype=torch.float64)
    base = dense[..., 0].clone()
    dense.scatter_add_(2, index[:, None].expand(-1, tokens, -1), extra)
    scale = total / dense.sum(-1, keepdim=True)
    weight = (torch.rand(count, tokens, generator=rng) > 0.2).double()
    return SparseTargets(index, extra * scale, base * scale[..., 0], weight, torch.full_like(weight, total)), dense * scale


def dense_loss(logits, dense, weight):
    loss = -(dense * logits.log_softmax(-1)).sum(-1)
    return (loss * weight).sum() / weight.sum()


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.integers(5, 30), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_sparse_is_dense(count, tokens, palette, classes, seed):
    targets, dense = random_targets(count, tokens, palette, classes, seed)
    logits = torch.randn(count, tokens, classes, generator=torch.Generator().manual_seed(seed)) * 5
    got = sparse_cross_entropy(logits.bfloat16(), targets.palette, targets.extra, targets.base, targets.total)
    want = -(dense * logits.bfloat16().double().log_softmax(-1)).sum(-1)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)  # sums of up to 30 float32 terms of size 30


def test_token_loss_is_the_mean_over_labelled_tokens():
    targets, dense = random_targets(3, 5, 4, 11)
    logits = torch.randn(3, 5, 11, dtype=torch.float64)
    torch.testing.assert_close(
        token_loss(logits, targets).double(), dense_loss(logits, dense, targets.weight), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("count", [1, 4, 5])
def test_class_token_label_is_mixed_with_the_partners_by_area(count):
    """Equation 10, with the dense label mixed first."""
    targets, dense = random_targets(count, 1, 4, 11)
    targets = targets._replace(weight=torch.ones(count, 1, dtype=torch.float64))
    logits, share = torch.randn(count, 11, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    want = dense_loss(logits[:, None], 0.7 * dense + 0.3 * dense.flip(0), targets.weight)
    torch.testing.assert_close(class_token_loss(logits, mixed(targets, share)).double(), want, rtol=1e-5, atol=1e-5)
    plain = dense_loss(logits[:, None], dense, targets.weight)
    torch.testing.assert_close(class_token_loss(logits, targets).double(), plain, rtol=1e-5, atol=1e-5)


def test_samples_of_weight_zero_do_not_count():
    targets, dense = random_targets(4, 1, 3, 7)
    weight = torch.tensor([[1.0], [0.0], [1.0], [1.0]], dtype=torch.float64)
    logits = torch.randn(4, 7, dtype=torch.float64)
    kept = torch.tensor([0, 2, 3])
    want = dense_loss(logits[kept, None], dense[kept], torch.ones(3, 1))
    torch.testing.assert_close(class_token_loss(logits, targets._replace(weight=weight)).double(), want, rtol=1e-5, atol=1e-5)
    label = torch.tensor([1, 2, 3, 4])
    hard = hard_label_loss(logits, label, weight[:, 0])
    torch.testing.assert_close(
        hard.double(), torch.nn.functional.cross_entropy(logits[kept], label[kept]), rtol=1e-5, atol=1e-5
    )


def test_hard_labels_under_mixing_are_cutmix():
    logits, label = torch.randn(5, 7, dtype=torch.float64), torch.tensor([1, 2, 3, 4, 0])
    soft = torch.nn.functional.one_hot(label, 7).double() * 0.9 + 0.1 / 7
    mixed = 0.6 * soft + 0.4 * soft.flip(0)
    want = torch.nn.functional.cross_entropy(logits, mixed)
    got = hard_label_loss(logits, label, torch.ones(5), 0.1, torch.tensor(0.4))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)

"""The sparse losses against dense cross entropy in float64."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from densefeed.models.kernels import fused_head
from densefeed.models.kernels import sparse_cross_entropy as kernels
from densefeed.models.kernels.fused_head import chunk_rows
from densefeed.models.token_transformer import TokenFeatures, TokenLogits
from densefeed.objectives.losses import (
    fused_token_loss,
    hard_label_loss,
    sparse_cross_entropy,
    sparse_loss,
    token_labeling_loss,
)
from densefeed.pipelines.mixing import mix_targets
from densefeed.pipelines.targets import SparseTargets

# Tolerances: relative error of the loss, and absolute error of the gradient of a mean. The loss is
# rounded about three times, by 2^-24 each (at most 1.6e-7 in 300 cases, with offsets of 300); the
# fused head adds the roundings of its products, sums of up to 48 terms. An element of the gradient
# is the difference of two rounded numbers of at most 1: 2^-23.
LOSS, GRADIENT = 2e-6, 1e-7


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def random_targets(
    count, tokens, palette, classes, seed=0, total=1.1, repeats=False, dtype=torch.float64
):
    """Make sparse targets that sum to `total`, and the same dense.

    With `repeats` a palette has classes twice.
    """
    rng = torch.Generator().manual_seed(seed)
    if repeats:
        index = torch.randint(max(1, palette // 2), (count, palette), generator=rng)
    else:
        index = torch.stack(
            [torch.randperm(classes, generator=rng)[:palette] for _ in range(count)]
        )
    base = torch.rand(count, tokens, generator=rng, dtype=torch.float64)
    extra = (
        torch.rand(count, tokens, palette, generator=rng, dtype=torch.float64) * classes / palette
    )
    extra[..., 0] = -0.5 * base  # a class below all others
    scale = total / (classes * base + extra.sum(-1))
    extra, base = (extra * scale[..., None]).to(dtype), (base * scale).to(dtype)
    dense = base.double()[..., None].repeat(1, 1, classes)
    dense.scatter_add_(2, index[:, None].expand(-1, tokens, -1), extra.double())
    weight = (torch.rand(count, tokens, generator=rng) > 0.2).to(dtype)
    return SparseTargets(index, extra, base, weight, dense.sum(-1).to(dtype)), dense


def random_logits(*shape, seed=0, dtype=torch.float32):
    return (
        (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 5)
        .to(dtype)
        .requires_grad_()
    )


def dense_loss(logits, dense, weight):
    loss = -(dense * logits.log_softmax(-1)).sum(-1)
    return (loss * weight).sum() / weight.sum()


def losses_and_gradients(logits, targets, dense):
    """Return loss and gradient of the mean, ours and the dense reference's in float64."""
    ours = sparse_cross_entropy(logits, targets).mean()
    (gradient,) = torch.autograd.grad(ours, logits)
    exact = logits.detach().double().requires_grad_()
    want = -(dense * exact.log_softmax(-1)).sum(-1).mean()
    return ours.double().detach(), want.detach(), gradient, torch.autograd.grad(want, exact)[0]


@given(
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(6, 40),
    st.booleans(),
    st.integers(0, 99),
)
@settings(max_examples=60)
def test_sparse_matches_dense(count, tokens, palette, classes, repeats, seed):
    targets, dense = random_targets(
        count, tokens, palette, classes, seed, repeats=repeats, dtype=torch.float32
    )
    ours, want, gradient, want_gradient = losses_and_gradients(
        random_logits(count, tokens, classes, seed=seed), targets, dense
    )
    torch.testing.assert_close(ours, want, rtol=LOSS, atol=0)
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=2e-6, atol=GRADIENT)


@pytest.mark.parametrize("offset", [0.0, 300.0, -300.0])
@pytest.mark.parametrize(
    ("count", "tokens", "classes"), [(3, 100, 1000), (1, 50, 21_841), (2, 1, 70_001)]
)
def test_sparse_matches_dense_for_many_classes(count, tokens, classes, offset):
    """A shared offset of the logits changes nothing.

    A plain float32 sum of 21,841 of them would be inaccurate.
    """
    targets, dense = random_targets(count, tokens, 40, classes, dtype=torch.float32)
    logits = (random_logits(count, tokens, classes).detach() + offset).requires_grad_()
    ours, want, gradient, want_gradient = losses_and_gradients(logits, targets, dense)
    torch.testing.assert_close(ours, want, rtol=LOSS, atol=0)
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=2e-6, atol=GRADIENT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_float32(dtype):
    """The gradient is rounded once, to the dtype of the logits: half a unit in the last place."""
    targets, dense = random_targets(3, 50, 40, 1000, dtype=torch.float32)
    ours, want, gradient, want_gradient = losses_and_gradients(
        random_logits(3, 50, 1000, dtype=dtype), targets, dense
    )
    assert gradient.dtype == dtype
    torch.testing.assert_close(ours, want, rtol=LOSS, atol=0)
    # 2e-6 covers rounding in the other direction where the exact value lies between two numbers.
    torch.testing.assert_close(
        gradient.double(), want_gradient, rtol=torch.finfo(dtype).eps / 2 + 2e-6, atol=GRADIENT
    )


def test_gradcheck():
    targets, _ = random_targets(2, 3, 4, 7, repeats=True)
    assert (
        sparse_cross_entropy(random_logits(2, 3, 7, dtype=torch.float64), targets).dtype
        == torch.float64
    )
    assert torch.autograd.gradcheck(
        lambda x: sparse_cross_entropy(x, targets), random_logits(2, 3, 7, dtype=torch.float64)
    )


@pytest.mark.parametrize("size", [1, 200, 1000, 5000])
def test_result_is_independent_of_block_size(size, monkeypatch):
    """Rows of 44 bytes; blocks of a part of an image's tokens, of one image, of several.

    Each with a remainder.
    """
    targets, _ = random_targets(5, 7, 4, 11, dtype=torch.float32)

    def results(dtype):
        logits = random_logits(5, 7, 11, dtype=dtype)
        loss = sparse_cross_entropy(logits, targets)
        return loss, *torch.autograd.grad((loss * targets.weight).sum(), logits)

    want = [results(dtype) for dtype in (torch.float32, torch.bfloat16)]
    monkeypatch.setattr(kernels, "BLOCK_BYTES", size)
    got = [results(dtype) for dtype in (torch.float32, torch.bfloat16)]
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_noncontiguous_logits():
    targets, _ = random_targets(3, 5, 4, 11, dtype=torch.float32)
    wide = random_logits(3, 6, 11)
    for view in (wide[:, 1:], wide.mT.contiguous().mT[:, :5]):
        (gradient,) = torch.autograd.grad(sparse_cross_entropy(view, targets).sum(), view)
        apart = view.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        torch.testing.assert_close(
            gradient, torch.autograd.grad(sparse_cross_entropy(apart, targets).sum(), apart)[0]
        )


def test_backward_twice_and_gradients_of_logits_only():
    targets, _ = random_targets(2, 3, 4, 7, dtype=torch.float32)
    targets.extra.requires_grad_()
    logits = random_logits(2, 3, 7)
    loss = sparse_cross_entropy(logits, targets).sum()
    first, again = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    loss.backward()
    assert targets.extra.grad is None
    with torch.no_grad():
        assert not sparse_cross_entropy(logits, targets).requires_grad
    with pytest.raises(RuntimeError):
        torch.autograd.grad(
            sparse_cross_entropy(logits, targets).square().sum(), logits, create_graph=True
        )[0].sum().backward()


def test_outside_a_class_that_the_logits_lack_is_named():
    """It was an IndexError of gather, which named neither."""
    targets, _ = random_targets(2, 4, 3, 7)
    targets = targets._replace(palette=torch.full_like(targets.palette, 6))
    said = "logits of 5 classes, and targets of class 6; give the model as many classes as the lab"
    with pytest.raises(ValueError, match=said):
        sparse_loss(torch.zeros(2, 4, 5), targets)
    with pytest.raises(ValueError, match=said):
        fused_token_loss(torch.zeros(2, 4, 3), torch.zeros(5, 3), torch.zeros(5), targets)


def test_error_on_targets_of_another_grid():
    targets, _ = random_targets(2, 4, 3, 7)
    with pytest.raises(
        ValueError, match="2 images of 9 tokens; make targets for the grid of the model"
    ):
        sparse_loss(torch.zeros(2, 9, 7), targets)
    with pytest.raises(ValueError, match="2 images of 9 tokens"):
        fused_token_loss(torch.zeros(2, 9, 5), torch.zeros(7, 5), torch.zeros(7), targets)
    with pytest.raises(ValueError, match="3 images of 1 tokens"):
        sparse_loss(torch.zeros(3, 7), random_targets(1, 1, 3, 7)[0])


@pytest.mark.parametrize("logits", [np.zeros((2, 4, 7)), torch.zeros(2, 4, 7, dtype=torch.int64)])
def test_outside_logits_of_other_types_are_one_sentence(logits):
    targets, _ = random_targets(2, 4, 3, 7)
    with pytest.raises(TypeError, match=r"logits are (ndarray|torch.int64); give the network's"):
        sparse_loss(logits, targets)


@pytest.mark.parametrize("targets", [None, torch.zeros(2, 4, 7), torch.zeros(2, 4).long()])
def test_outside_targets_of_other_types_are_one_sentence(targets):
    with pytest.raises(TypeError, match=r"^targets are a (NoneType|Tensor); give SparseTargets or"):
        sparse_loss(torch.zeros(2, 4, 7), targets)


def test_token_loss_is_the_mean_over_labeled_tokens():
    targets, dense = random_targets(3, 5, 4, 11)
    logits = torch.randn(3, 5, 11, dtype=torch.float64)
    torch.testing.assert_close(
        sparse_loss(logits, targets), dense_loss(logits, dense, targets.weight)
    )


@pytest.mark.parametrize("count", [1, 4, 5])
def test_class_token_loss_with_mixed_targets(count):
    """Equation 10 with the dense label mixed first.

    Ours has the classes of both images, some of them twice.
    """
    targets, dense = random_targets(count, 1, 4, 11)
    logits, weight = (
        torch.randn(count, 11, dtype=torch.float64),
        torch.ones(count, 1, dtype=torch.float64),
    )
    share = torch.tensor(0.3, dtype=torch.float64)
    want = dense_loss(logits[:, None], 0.7 * dense + 0.3 * dense.flip(0), weight)
    torch.testing.assert_close(
        sparse_loss(logits, mix_targets(targets._replace(weight=weight), share)), want
    )
    plain = dense_loss(logits[:, None], dense, weight)
    torch.testing.assert_close(sparse_loss(logits, targets._replace(weight=weight)), plain)


@pytest.mark.parametrize("fused", [False, True])
def test_loss_is_zero_if_all_weights_are_zero(fused):
    targets, _ = random_targets(2, 3, 4, 7, dtype=torch.float32)
    targets = targets._replace(weight=torch.zeros_like(targets.weight))
    head, features = torch.nn.Linear(5, 7), torch.randn(2, 3, 5, requires_grad=True)
    loss = (
        fused_token_loss(features, head.weight, head.bias, targets)
        if fused
        else sparse_loss(head(features), targets)
    )
    loss.backward()
    assert loss == 0
    assert (features.grad == 0).all()
    assert (head.weight.grad == 0).all()


def test_samples_of_weight_zero_do_not_count():
    targets, dense = random_targets(4, 1, 3, 7)
    weight = torch.tensor([[1.0], [0.0], [1.0], [1.0]], dtype=torch.float64)
    logits = torch.randn(4, 7, dtype=torch.float64)
    kept = torch.tensor([0, 2, 3])
    want = dense_loss(logits[kept, None], dense[kept], torch.ones(3, 1))
    torch.testing.assert_close(sparse_loss(logits, targets._replace(weight=weight)), want)
    label = torch.tensor([1, 2, 3, 4])
    hard = hard_label_loss(logits, label, weight[:, 0])
    torch.testing.assert_close(
        hard.double(),
        torch.nn.functional.cross_entropy(logits[kept], label[kept]),
        rtol=1e-5,
        atol=1e-5,
    )


def test_hard_label_loss_with_partner_is_cutmix():
    logits, label = torch.randn(5, 7, dtype=torch.float64), torch.tensor([1, 2, 3, 4, 0])
    soft = torch.nn.functional.one_hot(label, 7).double() * 0.9 + 0.1 / 7
    mix_targets = 0.6 * soft + 0.4 * soft.flip(0)
    want = torch.nn.functional.cross_entropy(logits, mix_targets)
    got = hard_label_loss(logits, label, torch.ones(5), 0.1, torch.tensor(0.4))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------- fused head and loss


def materialized_loss(features, head, targets, dense=None):
    """Compute the same loss with all logits: ours, or with `dense` the float64 reference.

    Returns it and its three gradients.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in (features, head.weight, head.bias)]
    if dense is not None:
        leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
        loss = dense_loss(F.linear(*leaves), dense, targets.weight.double())
    else:
        loss = sparse_loss(F.linear(*leaves), targets)
    return loss, *torch.autograd.grad(loss, leaves)


def fused_loss(features, head, targets):
    leaves = [tensor.detach().requires_grad_() for tensor in (features, head.weight, head.bias)]
    loss = fused_token_loss(*leaves, targets)
    return loss, *torch.autograd.grad(loss, leaves)


def relative_error(got, want):
    """Return the largest error of a tensor, relative to its largest value."""
    return ((got.double() - want.double()).abs().max() / want.abs().max()).item()


@pytest.fixture
def small_chunks(monkeypatch):
    """Use chunks of two and a half images of 7 tokens and 31 classes, in float32."""
    monkeypatch.setattr(fused_head, "CHUNK_BYTES", 17 * 31 * 4)


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_fused_loss_matches_dense(count, small_chunks):
    targets, dense = random_targets(count, 7, 5, 31, dtype=torch.float32)
    head, features = torch.nn.Linear(16, 31), torch.randn(count, 7, 16)
    ours, want = (
        fused_loss(features, head, targets),
        materialized_loss(features, head, targets, dense),
    )
    torch.testing.assert_close(ours[0].double(), want[0], rtol=LOSS, atol=0)
    for got, exact in zip(ours[1:], want[1:], strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=2e-6, atol=GRADIENT)


def test_fused_loss_of_21841_classes():
    targets, dense = random_targets(2, 49, 40, 21_841, dtype=torch.float32)
    head, features = torch.nn.Linear(48, 21_841), torch.randn(2, 49, 48)
    ours, want = (
        fused_loss(features, head, targets),
        materialized_loss(features, head, targets, dense),
    )
    torch.testing.assert_close(ours[0].double(), want[0], rtol=LOSS, atol=0)
    for got, exact in zip(ours[1:], want[1:], strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=0, atol=GRADIENT)


def test_chunks_on_a_gpu_are_few_and_keep_the_peak_memory():
    """Two chunks and the weight gradient, beside logits, their gradient and the weight gradient."""
    classes, width, cpu, gpu = 21841, 384, torch.device("cpu"), torch.device("cuda")
    for images, dtype in ((64, torch.float32), (256, torch.bfloat16), (1024, torch.bfloat16)):
        rows = images * 196
        assert chunk_rows(rows, classes, dtype, cpu) == (12 << 20) // (classes * dtype.itemsize)
        few = chunk_rows(rows, classes, dtype, gpu)
        assert few >= rows / 32
        weight = classes * width * 4
        bytes_per_row = 2 * classes * dtype.itemsize
        assert few * bytes_per_row + weight < (rows * bytes_per_row + weight) / 21
    # one product of a small batch
    assert chunk_rows(100, classes, torch.bfloat16, gpu) == 288


def test_fused_gradcheck(small_chunks):
    targets, _ = random_targets(2, 3, 4, 7)
    shapes = ((2, 3, 5), (7, 5), (7,))
    leaves = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda *leaves: fused_token_loss(*leaves, targets), leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 17])
def test_fused_loss_under_autocast_is_as_accurate_as_with_logits(dtype, rows, monkeypatch):
    """Both multiply in half precision.

    Ours sums its chunks, 280 of one row or 17 of 17, in float32.
    """
    monkeypatch.setattr(fused_head, "CHUNK_BYTES", rows * 31 * 2)
    targets, dense = random_targets(40, 7, 5, 31, dtype=torch.float32)
    head, features = torch.nn.Linear(16, 31), torch.randn(40, 7, 16)
    exact = materialized_loss(features, head, targets, dense)
    with torch.autocast("cpu", dtype):
        ours, theirs = (
            fused_loss(features, head, targets),
            materialized_loss(features, head, targets),
        )
    for got, other, want in zip(ours, theirs, exact, strict=True):
        assert got.dtype == torch.float32
        # A product of D = 16 terms rounded to half precision on the way in and out: two units in
        # the last place.
        assert relative_error(got, want) < 2 * torch.finfo(dtype).eps
        assert relative_error(got, want) < 1.5 * relative_error(other, want) + 1e-6


def test_no_gradient_for_frozen_head(small_chunks):
    targets, _ = random_targets(5, 7, 5, 31, dtype=torch.float32)
    head, features = (
        torch.nn.Linear(16, 31).requires_grad_(False),
        torch.randn(5, 7, 16, requires_grad=True),
    )
    loss = fused_token_loss(features, head.weight, head.bias, targets)
    loss.backward(retain_graph=True)
    torch.testing.assert_close(features.grad, fused_loss(features, head, targets)[1])
    loss.backward()  # gradients accumulate
    torch.testing.assert_close(features.grad, 2 * fused_loss(features, head, targets)[1])
    with torch.no_grad():
        alone = fused_token_loss(features, head.weight, head.bias, targets)
    assert not alone.requires_grad
    torch.testing.assert_close(alone, loss.detach())
    loss = fused_token_loss(features.detach(), head.weight.requires_grad_(), head.bias, targets)
    loss.backward()
    torch.testing.assert_close(head.weight.grad, fused_loss(features, head, targets)[2])
    assert head.bias.grad is None


def test_token_labeling_loss_accepts_logits_or_features():
    tokens, _ = random_targets(3, 7, 5, 31, dtype=torch.float32)
    whole, _ = random_targets(3, 1, 5, 31, seed=1, dtype=torch.float32)
    whole = whole._replace(weight=torch.ones_like(whole.weight))
    head, features, cls = torch.nn.Linear(16, 31), torch.randn(3, 7, 16), torch.randn(3, 31)
    with_logits = token_labeling_loss(TokenLogits(cls, head(features)), whole, tokens, 0.5)
    torch.testing.assert_close(
        with_logits, sparse_loss(cls, whole) + 0.5 * sparse_loss(head(features), tokens)
    )
    torch.testing.assert_close(
        token_labeling_loss(TokenFeatures(cls, features, head), whole, tokens, 0.5), with_logits
    )


# ------------------------------------------------------------------------- cost


def step(cls, features, head, whole, tokens):
    """Compute both forms of the loss, so that one compilation covers them all."""
    with_logits = token_labeling_loss(
        TokenLogits(cls, F.linear(features, head.weight, head.bias)), whole, tokens, 0.5
    )
    return with_logits + token_labeling_loss(TokenFeatures(cls, features, head), whole, tokens, 0.5)


def step_arguments(seed):
    torch.manual_seed(seed)
    tokens, _ = random_targets(3, 7, 5, 31, seed, dtype=torch.float32)
    whole, _ = random_targets(3, 1, 5, 31, seed + 1, dtype=torch.float32)
    head, features, cls = torch.nn.Linear(16, 31), torch.randn(3, 7, 16), torch.randn(3, 31)
    return (
        cls.requires_grad_(),
        features.requires_grad_(),
        head,
        whole._replace(weight=whole.weight + 0.1),
        tokens,
    )


def loss_and_gradients(function, cls, features, head, whole, tokens):
    loss = function(cls, features, head, whole, tokens)
    return [loss, *torch.autograd.grad(loss, (cls, features, head.weight, head.bias))]


def test_step_does_not_sync(no_host_read, small_chunks):
    arguments = step_arguments(0)
    with no_host_read():
        loss_and_gradients(step, *arguments)


@pytest.mark.slow
def test_step_compiles_once_without_graph_break():
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    for seed in (0, 1):
        arguments = step_arguments(seed)
        with torch.compiler.set_stance("fail_on_recompile" if seed else "default"):
            got = loss_and_gradients(compiled, *arguments)
        torch.testing.assert_close(got, loss_and_gradients(step, *arguments))


def peak_bytes(function, tmp_path):
    """Measure the peak of the memory that `function` allocates itself, in bytes."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        function()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    held = most = 0
    for event in sorted(
        (event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]
    ):
        held += event["args"]["Bytes"]
        most = max(most, held)
    assert most
    return most


def test_extra_memory_is_a_tenth_of_the_dense_path(tmp_path):
    """Without the dense path's score maps and RoIAlign, which would add to its side."""
    targets, dense = random_targets(64, 196, 40, 1000, dtype=torch.float32)
    dense, logits = dense.float(), torch.randn(64, 196, 1000, requires_grad=True)
    gradient = logits.nbytes
    ours = (
        peak_bytes(lambda: torch.autograd.grad(sparse_loss(logits, targets), logits), tmp_path)
        - gradient
    )
    theirs = (
        peak_bytes(
            lambda: torch.autograd.grad(dense_loss(logits, dense, targets.weight), logits), tmp_path
        )
        - gradient
    )
    assert theirs > 2 * gradient
    assert ours < theirs / 10


def test_fused_loss_never_stores_all_logits(tmp_path, monkeypatch):
    """At a width of 16 gradients are small: two chunks of 1 MiB and a block of 1 MiB remain."""
    monkeypatch.setattr(fused_head, "CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(kernels, "BLOCK_BYTES", 1 << 20)
    targets, _ = random_targets(16, 196, 10, 4096, dtype=torch.float32)
    head, features = torch.nn.Linear(16, 4096), torch.randn(16, 196, 16, requires_grad=True)
    leaves = (features, head.weight, head.bias)

    def ours():
        torch.autograd.grad(fused_token_loss(*leaves, targets), leaves)

    def theirs():
        torch.autograd.grad(sparse_loss(F.linear(*leaves), targets), leaves)

    assert peak_bytes(ours, tmp_path) < peak_bytes(theirs, tmp_path) / 15

"""Relevance, rollout and gradient x attention against NumPy, model by model."""

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from densefeed.explain.capture import attention_layers, capture_attention, choose_layers
from densefeed.explain.relevance import (
    attention_rollout,
    class_logits,
    class_relevance,
    gradient_attention,
    relevance_layers,
)
from densefeed.explain.rules import RelevanceTracer
from densefeed.system.errors import UserError

from . import numpy_graph as plain
from .small_models import CVT, WRITTEN, build_written, draw_images, randomize, write_out
from .test_capture import traces
from .written_out import swin, vit, vit_patches, with_class_token

FAMILIES = pytest.mark.parametrize("family", WRITTEN)
GRIDS = {"vit": (3, 3), "lvvit": (3, 3), "dhvt": (4, 4), "t2t": (2, 2), "cvt": (4, 4)}
TARGET_NJ = torch.tensor([[1, 3], [0, 2]])


def fold(family: str, matrix: np.ndarray, stochastic: bool) -> np.ndarray:
    """Return a matrix over class token and patches, by products with explicit matrices."""
    T = 1 + np.prod(GRIDS[family])
    rows, columns = np.eye(T, len(matrix)), np.eye(matrix.shape[1], T)
    if family == "dhvt":
        columns[T:] = 1 / T
        if stochastic:
            rows[0, 0], rows[0, T:] = 1 / 2, 1 / 2 / (len(matrix) - T)
        else:
            rows[0, T:] = 1
    if family == "cvt":
        # Each of the 2 x 2 keys stands for a square of 2 x 2 patches.
        columns = np.zeros((5, T))
        columns[0, 0] = 1
        for r in range(4):
            for c in range(4):
                columns[1 + 2 * (r // 2) + c // 2, 1 + 4 * r + c] = 1 / 4
    return rows @ matrix @ columns


def multiply(family: str, matrices: list[np.ndarray]) -> np.ndarray:
    """Return the class token's row of the product, later matrices on the left, as a map."""
    product = np.eye(len(matrices[0]))
    for matrix in matrices:
        product = matrix @ product
    return product[0, 1:].reshape(GRIDS[family])


def results(nodes: list, output, target: int, rule: str) -> list[np.ndarray]:
    seed = np.zeros_like(output.value)
    seed[0, target] = 1
    plain.backward(output, seed, rule)
    return [node.result for node in nodes]


@FAMILIES
def test_relevance_is_that_written_out_in_numpy(family):
    model, images = build_written(family), draw_images(family)
    actual = class_relevance(model, images, TARGET_NJ)
    assert actual.shape == (2, 2, *GRIDS[family])
    for n, image in enumerate(images):
        output, matrices = write_out(family, model, image)
        matrices = matrices[-2:]
        for j, target in enumerate(TARGET_NJ[n]):
            gradients = results(matrices, output, target, "gradient")
            parts = zip(gradients, results(matrices, output, target, "relevance"), strict=True)
            squares = [fold(family, np.maximum(g * r, 0).mean(0), False) for g, r in parts]
            expected = multiply(family, [np.eye(len(s)) + s for s in squares])
            np.testing.assert_allclose(actual[n, j], expected, rtol=1e-7)
    assert (actual[:, 0] - actual[:, 1]).abs().max() > 1e-6


@FAMILIES
def test_every_matrix_has_the_relevance_written_out_in_numpy(family):
    model, images = build_written(family), draw_images(family, 1)
    tracer = RelevanceTracer(model, choose_layers(model, relevance_layers(model)))
    with torch.no_grad(), tracer.hooked(), tracer:
        logits = class_logits(model, images)
    with torch.no_grad():
        torch.testing.assert_close(logits, class_logits(model, images))
    output, matrices = write_out(family, model, images[0])
    expected = results(matrices[-2:], output, 3, "relevance")
    actual = torch.autograd.grad(logits[0, 3], [record.weights for record in tracer.records])
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one[0], other, atol=1e-9 * abs(other).max())


@FAMILIES
def test_rollout_and_gradient_attention_are_those_of_numpy(family):
    model, images = build_written(family), draw_images(family)
    with capture_attention(model) as captured, torch.no_grad():
        model(images)
    rollout, weighted = attention_rollout(captured), gradient_attention(model, images, TARGET_NJ)
    for n, image in enumerate(images):
        output, matrices = write_out(family, model, image)
        means = [fold(family, node.value.mean(0), True) for node in matrices[-2:]]
        for mean in means:
            np.testing.assert_allclose(mean.sum(1), 1)
        expected = multiply(family, [(np.eye(len(mean)) + mean) / 2 for mean in means])
        np.testing.assert_allclose(rollout[n], expected, rtol=1e-9)
        for j, target in enumerate(TARGET_NJ[n]):
            (gradient,) = results(matrices[-1:], output, target, "gradient")
            row = np.maximum(gradient * matrices[-1].value, 0).mean(0)[0]
            keys = row[1 : len(row) - (4 if family == "dhvt" else 0)]
            np.testing.assert_allclose(weighted[n, j].flatten(), keys, rtol=1e-9)


def test_entmax_passes_relevance():
    torch.manual_seed(0)
    model = timm.create_model(
        "bootstrapping_vit_s_sparse", num_classes=5, img_size=48, embed_dim=12, num_heads=3, depth=2
    )
    model = randomize(model).eval()
    for block in model.blocks:
        # So that some weights are exactly 0.
        block.attn.qkv.weight.data *= 4
    image = torch.randn(1, 3, 48, 48, dtype=torch.float64)
    tracer = RelevanceTracer(model, choose_layers(model, None))
    with torch.no_grad(), tracer.hooked(), tracer:
        logits = model(image)
    assert sum((record.weights == 0).sum() for record in tracer.records) > 0
    w = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    x = with_class_token(w, vit_patches(image[0].numpy(), w))

    def entmax(record):
        weights = record.weights[0].detach().numpy()
        return lambda scores: plain.Node(weights, [scores], None, plain.keep)

    output, matrices = vit(x, w, 3, 1e-5, normalize=[entmax(r) for r in tracer.records])
    np.testing.assert_allclose(logits.detach(), output.value)
    actual = torch.autograd.grad(logits[0, 2], [record.weights for record in tracer.records])
    for one, other in zip(actual, results(matrices, output, 2, "relevance"), strict=True):
        np.testing.assert_allclose(one[0], other, atol=1e-9 * abs(other).max())


SMALL_DHVT = dict(img_size=16, patch_size=4, embed_dim=16, num_heads=4, depth=2)
SMALL_VIT = dict(img_size=24, patch_size=8, embed_dim=12, num_heads=3, depth=2)
# Every option that changes what is computed between the patches and the classes.
VARIANTS = {
    "post-norm": ("lvvit_micro", dict(SMALL_VIT, stem_width=4, post_norm=True, norm_groups=2)),
    "mean": ("lvvit_micro", dict(SMALL_VIT, stem_width=4, global_pool="avg", qkv_bias=True)),
    "no-head-tokens": ("dhvt_micro", dict(SMALL_DHVT, head_tokens=False, pos_embed=True)),
    "split-pool": ("dhvt_micro", dict(SMALL_DHVT, feed_forward="split-pool", aggregate="all")),
    "layer-norm": ("dhvt_micro", dict(SMALL_DHVT, norms=("layer", "layer"), shortcut=False)),
    "mlp": ("dhvt_micro", dict(SMALL_DHVT, feed_forward="mlp", aggregate="none")),
    "drloc": ("cvt_13_drloc", CVT),
    "distilled": ("deit_tiny_distilled_patch16_224", dict(SMALL_VIT)),
    "layer-scale": ("vit_tiny_patch16_224", dict(SMALL_VIT, init_values=0.1, qk_norm=True)),
    "gap": ("vit_tiny_patch16_224", dict(SMALL_VIT, class_token=False, global_pool="avg")),
    "beit": ("beit_base_patch16_224", dict(SMALL_VIT)),
}


def build_variant(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, fields = VARIANTS[name]
    model = randomize(timm.create_model(model, num_classes=5, **fields)).eval()
    side = fields.get("img_size", 64)
    return model, torch.randn(2, 3, side, side, dtype=torch.float64)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_have_rules_and_images_are_independent(name):
    model, images = build_variant(name)
    before = list(traces(model))
    whole = class_relevance(model, images, TARGET_NJ)
    # Relevance of the patches, beyond the identity of a mean's rows.
    assert (whole.flatten(2).std(-1) > 0).all()
    assert whole.isfinite().all()
    assert (whole >= 0).all()
    for n in range(2):
        one = class_relevance(model, images[n : n + 1], TARGET_NJ[n : n + 1, 1:])
        torch.testing.assert_close(one[0, 0], whole[n, 1], rtol=1e-9, atol=0)
    with capture_attention(model) as captured, torch.no_grad():
        model(images)
    rollout, weighted = attention_rollout(captured), gradient_attention(model, images, TARGET_NJ)
    assert rollout.shape == (2, *whole.shape[2:])
    assert (weighted >= 0).all()
    assert weighted.any()
    assert list(traces(model)) == before


def test_keys_of_an_odd_grid_are_spread_over_their_patches():
    """CvT at 40 pixels: 3 x 3 patches with 2 x 2 keys."""
    model = randomize(timm.create_model("cvt_13", num_classes=5, **CVT)).eval()
    with capture_attention(model) as captured, torch.no_grad():
        model(torch.randn(1, 3, 40, 40, dtype=torch.float64))
    record = captured[-1]
    mean = record.weights.mean(1)[0].numpy()
    columns = np.zeros((5, 10))
    columns[0, 0] = 1
    for r in range(3):
        for c in range(3):
            share = 1 / ((2 if r < 2 else 1) * (2 if c < 2 else 1))
            columns[1 + 2 * (r // 2) + c // 2, 1 + 3 * r + c] = share
    expected = (np.eye(10) + mean @ columns)[0, 1:] / 2
    np.testing.assert_allclose(attention_rollout(captured[-1:])[0].flatten(), expected)


def test_the_class_tokens_logit_is_explained():
    """What LV-ViT's token head adds in evaluation has no part in it."""
    model, images = build_written("lvvit"), draw_images("lvvit")
    before = class_relevance(model, images, TARGET_NJ)
    nn.init.normal_(model.token_head.weight)
    assert torch.equal(class_relevance(model, images, TARGET_NJ), before)
    with torch.no_grad():
        assert not torch.allclose(model(images), class_logits(model, images))


@pytest.mark.parametrize("frozen", [False, True])
def test_float32_and_frozen_models(frozen):
    model, images = build_written("dhvt"), draw_images("dhvt")
    exact = class_relevance(model, images, TARGET_NJ)
    model.float().requires_grad_(not frozen)
    # Quotients by sums near 0 make relevance more sensitive to rounding than the logits are.
    actual = class_relevance(model, images.float(), TARGET_NJ)
    limit = 0.02 * exact.max().item()
    torch.testing.assert_close(actual.double(), exact, rtol=0, atol=limit)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("side", [2, 3])
def test_windows_are_those_written_out_in_numpy(side):
    """Matrices, logits and gradient x attention of a Swin, windows of even and odd size."""
    torch.manual_seed(0)
    fields = dict(window_size=side, embed_dim=12, depths=(2,), num_heads=(3,), img_size=24)
    model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **fields)
    model, rng = randomize(model).eval(), torch.Generator().manual_seed(1)
    images = torch.randn(2, 3, 24, 24, generator=rng, dtype=torch.float64)
    with capture_attention(model) as captured, torch.no_grad():
        logits = model(images)
    assert [record.layout.windows.shift for record in captured] == [(0, 0), (1, 1)]
    weighted = gradient_attention(model, images, TARGET_NJ)
    w = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    for n, image in enumerate(images):
        output, matrices = swin(image.numpy(), w, 3, side)
        np.testing.assert_allclose(logits[n : n + 1], output.value, atol=1e-10)
        for record, node in zip(captured, matrices, strict=True):
            weights = record.weights.unflatten(0, (2, -1))[n]
            np.testing.assert_allclose(weights, node.value, rtol=0, atol=1e-12)
        for j, target in enumerate(TARGET_NJ[n]):
            (gradient,) = results(matrices[-1:], output, target, "gradient")
            rows = np.maximum(gradient * matrices[-1].value, 0).mean((1, 2))
            # The map as it was shifted, window by window.
            expected, count = np.zeros((6, 6)), 6 // side
            for place, row in enumerate(rows):
                top, left = side * (place // count), side * (place % count)
                expected[top : top + side, left : left + side] = row.reshape(side, side)
            expected = np.roll(expected, (1, 1), (0, 1))
            np.testing.assert_allclose(weighted[n, j], expected, rtol=1e-9)


def test_windows_have_gradient_attention_alone():
    fields = dict(window_size=2, embed_dim=12, depths=(2, 2), num_heads=(1, 2), img_size=24)
    model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **fields).eval()
    images = torch.randn(2, 3, 24, 24)
    with pytest.raises(UserError, match="SwinTransformer attends within windows"):
        class_relevance(model, images, TARGET_NJ)
    with capture_attention(model) as captured:
        logits = model(images)
    with pytest.raises(UserError, match=r"blocks.1.attn attends within windows"):
        attention_rollout(captured[1:])
    # The last block has a shift of a row and a column, and windows that the map's edges pad.
    record = captured[-1]
    (gradient,) = torch.autograd.grad(logits[[0, 1], [1, 0]].sum(), record.weights)
    part = (gradient * record.weights).clamp(min=0).mean((1, 2)).view(2, 2, 2, 2, 2)
    expected = (
        part.transpose(2, 3).reshape(2, 4, 4)[:, :3, :3].roll(record.layout.windows.shift, (1, 2))
    )
    actual = gradient_attention(model, images, TARGET_NJ[:, :1])
    torch.testing.assert_close(actual[:, 0], expected)


def test_refusals_name_the_model_and_the_operation():
    model, images = build_written("vit"), draw_images("vit")
    for target, message in (
        (TARGET_NJ[:1], r"classes of shape \[1, 2\] must have a row for each of 2 images"),
        (TARGET_NJ + 2, "classes to explain must be from 0 to 4"),
    ):
        with pytest.raises(UserError, match=message):
            class_relevance(model, images, target)
    with pytest.raises(UserError, match="VisionTransformer is in training mode; call eval"):
        gradient_attention(model.train(), images, TARGET_NJ)
    model.eval().reset_classifier(0)
    with pytest.raises(UserError, match="VisionTransformer has no classifier"):
        class_relevance(model, images, TARGET_NJ)
    resnet = timm.create_model("resnet10t", num_classes=5).eval()
    with pytest.raises(UserError, match="ResNet has no attention that can be captured"):
        class_relevance(resnet, images, TARGET_NJ)
    eva = timm.create_model(
        "vit_small_patch16_dinov3",
        **dict(depth=1, embed_dim=48, num_heads=3, img_size=64, num_classes=5),
    )
    before = list(traces(eva.eval()))
    with pytest.raises(UserError, match=r"Eva computes .* no rule of relevance for it; choose"):
        class_relevance(eva, torch.zeros(1, 3, 64, 64), TARGET_NJ[:1])
    assert list(traces(eva)) == before
    assert attention_layers(eva) == ["blocks.0.attn"]

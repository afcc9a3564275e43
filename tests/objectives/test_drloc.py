"""DRLoc against plain loops in float64, hand-counted heads and timm's maps."""

import math

import pytest
import timm
import torch
from torch import nn

from densefeed.models import checkpoints  # noqa: F401  (registers our models)
from densefeed.models.block_maps import forward_block_maps, forward_merged_maps
from densefeed.models.meta_device import meta_device
from densefeed.models.wrapped_model import WrappedModel
from densefeed.objectives.drloc import (
    ALPHA,
    LocalizationHead,
    LocalizationLoss,
    LocalizedModel,
    PoolError,
    classification_loss,
    expectation_loss,
    feature_map,
    gather_pairs,
    offset_classes,
    pool_factor,
    pool_map,
    regression_loss,
    select_positions,
)

VARIANTS = ("l1", "signed", "ce", "reg", "all")
SWIN = dict(
    img_size=64,
    window_size=2,
    embed_dim=12,
    depths=(1, 1, 2, 1),
    num_heads=(1, 2, 3, 4),
    num_classes=5,
)
# Arguments, and width and grid of the last map at 64 pixels.
MODELS = {
    "test_vit": (dict(img_size=64, num_classes=5), (64, 4, 4)),
    "lvvit_micro": (dict(num_classes=5, token_head=False), (96, 8, 8)),
    "swin_tiny_patch4_window7_224": (SWIN, (96, 2, 2)),
    "resnet18": (dict(num_classes=5), (512, 2, 2)),
    "cvt_13": (dict(num_classes=5), (384, 4, 4)),
    "cvt_13_drloc": (dict(num_classes=5), (384, 4, 4)),
    "t2t_vit_14": (dict(img_size=64, depth=2, num_classes=5), (384, 4, 4)),
    "dhvt_tiny_imagenet_patch16": (dict(img_size=64, depth=2, num_classes=5), (192, 4, 4)),
    "nfnet_micro": (dict(num_classes=5), (128, 4, 4)),
    "resmlp_12_224": (dict(img_size=64, num_classes=5), (384, 4, 4)),
}


def network(name: str, **more) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **(MODELS[name][0] | more))


def words_of(row1: int, column1: int, row2: int, column2: int, grid: tuple[int, int]) -> list[int]:
    """Return the words in the middle of the ranges that give these positions."""
    return [
        (2 * at + 1) * 2**31 // side
        for at, side in zip((row1, column1, row2, column2), 2 * grid, strict=True)
    ]


def drawn(N: int, M: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2**32, (N, M, 4), generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------- the head


@pytest.mark.parametrize(("width", "count"), [(384, 657_410), (768, 1_050_626), (2048, 2_361_346)])
def test_head_has_published_parameters(width, count):
    """CvT-13 and T2T-ViT-14; Swin-T and ViT-B; ResNet-50.

    Counted by hand: two hidden layers of 512, two outputs, biases.
    """
    assert count == (2 * width + 1) * 512 + 513 * 512 + 513 * 2
    assert sum(p.numel() for p in LocalizationHead(width, 2, 512).parameters()) == count
    assert (
        sum(
            p.numel()
            for p in LocalizationLoss("signed", [width], 7, (7, 7), published=False).parameters()
        )
        == count
    )


@pytest.mark.parametrize(("hidden", "count"), [(256, 459_778), (512, 1_050_626), (1024, 2_625_538)])
def test_hidden_neurons_of_table_16(hidden, count):
    """For Swin-T, counted by hand as above."""
    assert count == (2 * 768 + 1) * hidden + (hidden + 1) * hidden + (hidden + 1) * 2
    loss = LocalizationLoss("l1", [768], 7, (7, 7), published=False, hidden=hidden)
    assert sum(p.numel() for p in loss.parameters()) == count


@pytest.mark.parametrize(
    ("published", "heads", "count"), [(False, 12, 7_692_312), (True, 4, 3_219_464)]
)
def test_all_of_swin_t_has_a_head_for_every_block(published, heads, count):
    """Equation 7, and the four heads of the public code; built on the meta device."""
    with meta_device():
        model = timm.create_model("swin_tiny_patch4_window7_224")
        localizer = LocalizedModel(model, "all", 7, [224], published).localizer
    widths = 2 * [96] + 2 * [192] + 6 * [384] + 2 * [768]
    own = sum((2 * width + 1) * 512 + 513 * 512 + 513 * 2 for width in widths)
    assert published or own == count
    assert len(localizer.heads) == heads
    assert sum(p.numel() for p in localizer.parameters()) == count


@pytest.mark.parametrize(
    ("name", "widths"),
    [("t2t_vit_14", 14 * [384]), ("resnet50", [64, 256, 512, 1024, 2048])],
    ids=["t2t_vit_14", "resnet50"],
)
def test_outside_all_has_a_head_for_each_block_or_stage(name, widths):
    """14 blocks, none of the T2T module; a stem and four stages."""
    with meta_device():
        localizer = LocalizedModel(timm.create_model(name), "all", 7, [224]).localizer
    inputs = [next(head.parameters()).shape[1] for head in localizer.heads]
    assert inputs == [2 * width for width in widths]


def test_heads_of_other_variants_have_published_parameters():
    """The four maps of the public code's `all`.

    15 classes per axis (2 k + 1) in the paper; 13 and one more layer in the code.
    """
    assert (
        sum(
            p.numel()
            for p in LocalizationLoss("all", [192, 384, 768, 768], 0, (7, 7), True).parameters()
        )
        == 3_219_464
    )
    body = (2 * 768 + 1) * 512 + 513 * 512
    for variant in ("ce", "reg"):
        for published, count in ((False, body + 513 * 30), (True, body + 513 * 512 + 513 * 26)):
            assert (
                sum(
                    p.numel()
                    for p in LocalizationLoss(variant, [768], 0, (7, 7), published).parameters()
                )
                == count
            )
    assert [offset_classes(k) for k in (7, 14)] == [15, 29]
    assert [offset_classes(k, published=True) for k in (7, 14)] == [13, 27]


def test_head_is_three_linear_layers_with_relu_between():
    torch.manual_seed(0)
    head, x = LocalizationHead(3, 2, 512), torch.randn(4, 6)
    first, second, last = (layer for layer in head if isinstance(layer, nn.Linear))
    want = (x @ first.weight.T + first.bias).clamp(min=0)
    want = (want @ second.weight.T + second.bias).clamp(min=0) @ last.weight.T + last.bias
    torch.testing.assert_close(head(x), want)
    assert bool((head(torch.randn(200, 6)) < 0).any())


# ------------------------------------------------------------------------- places and maps


@pytest.mark.parametrize("grid", [(7, 7), (3, 5)])
def test_positions_are_uniform_and_reach_the_last_one(grid):
    edges = torch.tensor([[[0, 0, 2**32 - 1, 2**32 - 1]]])
    row, column = select_positions(edges, grid)
    assert (row.tolist(), column.tolist()) == ([[[0, grid[0] - 1]]], [[[0, grid[1] - 1]]])
    for side, place in zip(grid, select_positions(drawn(70, 1000), grid), strict=True):
        counts = torch.bincount(place.flatten(), minlength=side).double()
        expected = place.numel() / side
        assert len(counts) == side
        # Chi-square of side - 1 degrees of freedom: mean side - 1, variance twice that; six
        # deviations.
        assert ((counts - expected) ** 2 / expected).sum() < side - 1 + 6 * math.sqrt(
            2 * (side - 1)
        )


def test_gather_pairs_on_any_grid():
    """The published code multiplies rows by the height, which is wrong on this 3 x 5 grid."""
    map_NDRC = torch.randn(2, 4, 3, 5)
    row, column = select_positions(drawn(2, 6), (3, 5))
    got = gather_pairs(map_NDRC, row, column)
    assert got.shape == (2, 6, 8)
    for n in range(2):
        for m in range(6):
            pair = [map_NDRC[n, :, row[n, m, p], column[n, m, p]] for p in (0, 1)]
            assert torch.equal(got[n, m], torch.cat(pair))


@pytest.mark.parametrize(
    ("grid", "factor"), [((14, 14), 2), ((6, 10), 2), ((9, 6), 3), ((7, 7), 1)]
)
def test_pooling_ignores_padding(grid, factor):
    map_NDRC = torch.randn(2, 3, *grid, dtype=torch.float64)
    got = pool_map(map_NDRC, factor)
    assert got.shape == (2, 3, grid[0] // factor, grid[1] // factor)
    for r in range(got.shape[2]):
        for c in range(got.shape[3]):
            window = map_NDRC[
                :,
                :,
                max(0, factor * r - factor + 1) : factor * r + factor,
                max(0, factor * c - factor + 1) : factor * c + factor,
            ]
            torch.testing.assert_close(got[:, :, r, c], window.mean((2, 3)))
    if factor == 2:
        torch.testing.assert_close(got, nn.AvgPool2d(3, 2, 1, count_include_pad=False)(map_NDRC))


@pytest.mark.parametrize(
    ("grid", "side", "message"),
    [
        ((4, 4), 7, "grid of 4 x 4 is smaller than 7 x 7"),
        ((8, 8), 7, "grid of 8 x 8 is not a multiple of 7 x 7"),
        ((12, 18), 7, "grid of 12 x 18 is not a multiple of 7 x 7"),
        ((5, 4), 2, "grid of 5 x 4 is not a multiple of 2 x 2"),
        ((4, 4), 1, "leaves 1 x 1 positions, too few"),
        ((1, 1), 0, "leaves 1 x 1 positions, too few"),
    ],
)
def test_pool_error_lists_all_possible_sides(grid, side, message):
    def fits(side):
        try:
            return bool(pool_factor(grid, side))
        except PoolError:
            return False

    with pytest.raises(PoolError, match=message) as refused:
        pool_factor(grid, side)
    # A pool to all rows is none.
    assert sorted(refused.value.sides) == [side for side in range(grid[0]) if fits(side)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", MODELS)
def test_map_and_output_match_timm(name):
    """Against timm's own forward_intermediates where it normalizes, and the plain forward pass."""
    model, (_, shape) = network(name).eval(), MODELS[name]
    image = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        got = feature_map(model.forward_features(image), model, image)
        assert got.shape == (2, *shape)
        (want,) = model.forward_intermediates(image, indices=1, norm=True, intermediates_only=True)
        # An NFNet's activation comes last, which timm leaves out of its intermediates.
        torch.testing.assert_close(
            got, model.final_act(model.final_conv(want)) if name == "nfnet_micro" else want
        )
        for variant in ("l1", "all"):
            both = LocalizedModel(model, variant, 0, [64]).eval()
            assert not both.model.training
            torch.testing.assert_close(both(image, drawn(2, 3), torch.ones(2)).output, model(image))


def test_map_of_oblong_image():
    model = network("test_vit", dynamic_img_size=True).eval()
    image = torch.randn(1, 3, 32, 80)
    with torch.no_grad():
        got = feature_map(model.forward_features(image), model, image)
        want = model.forward_intermediates(image, indices=1, norm=True, intermediates_only=True)[0]
    assert got.shape == (1, 64, 2, 5)
    torch.testing.assert_close(got, want)


def test_published_reads_before_norm_and_all_reads_every_block():
    """`all` with `published` reads the four maps of the public code's Swin."""
    image = torch.randn(2, 3, 64, 64)
    for name in ("test_vit", "swin_tiny_patch4_window7_224", "lvvit_micro"):
        model = network(name).eval()
        maps = model.forward_intermediates(image, intermediates_only=True)
        _, blocks = forward_block_maps(model, image)
        swin = "swin" in name
        _, merged = forward_merged_maps(model, image) if swin else (None, blocks)
        assert len(blocks) == (5 if swin else len(model.blocks))
        for variant, published, want in (
            ("l1", True, maps[-1:]),
            ("all", False, blocks),
            ("all", True, merged),
        ):
            both = LocalizedModel(model, variant, 0, [64], published)
            assert len(both.localizer.heads) == len(want)
            if variant == "l1" and name == "lvvit_micro":
                want = model.forward_intermediates(
                    image, indices=1, norm=True, intermediates_only=True
                )
            for got, map_NDRC in zip(both._features(image)[1], want, strict=True):
                torch.testing.assert_close(got, map_NDRC)


class Flat(nn.Module):
    """Features `[N, D]`, which have no positions."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight, self.shape = nn.Parameter(torch.zeros(1)), shape

    def forward_features(self, image):
        return torch.zeros(len(image), *self.shape)

    def forward_head(self, x):
        return x


@pytest.mark.parametrize(
    ("model", "variant", "message"),
    [
        (nn.Linear(2, 2), "l1", "it has no forward_features"),
        (Flat(7), "l1", "its features are neither a map nor a grid of tokens"),
        (Flat(15, 7), "l1", "its features are neither a map nor a grid of tokens"),
        (Flat(16, 7), "all", "it has no forward_intermediates"),
    ],
)
def test_error_on_model_without_map(model, variant, message):
    with pytest.raises(ValueError, match=message):
        LocalizedModel(model, variant, 0, [64])


@pytest.mark.parametrize("name", ["pit_ti_224", "pit_ti_distilled_224"])
def test_error_on_class_tokens_alone(name):
    """PiT returns one or two."""
    with torch.device("meta"):
        model = timm.create_model(name, img_size=64, depth=(1, 1, 1), num_classes=5)
        with pytest.raises(ValueError, match="its features are the class token alone"):
            LocalizedModel(model, "l1", 0, [64])


@pytest.mark.parametrize("name", ["test_vit", "eva02_tiny_patch14_224"])
@pytest.mark.parametrize("published", [False, True])
def test_error_on_patch_dropout(name, published):
    for rate in (0.0, 0.5):
        with torch.device("meta"):
            model = timm.create_model(
                name, img_size=56 if "eva" in name else 64, depth=1, patch_drop_rate=rate
            )
            if not rate:
                LocalizedModel(model, "l1", 0, [model.patch_embed.img_size[0]], published)
                continue
            with pytest.raises(
                ValueError, match=r"it uses patch dropout in training, .*remove patch_drop_rate"
            ):
                LocalizedModel(model, "l1", 0, [model.patch_embed.img_size[0]], published)


def test_map_of_agent_is_its_last():
    torch.manual_seed(0)
    model, image = (
        timm.create_model("agent_micro", num_classes=5, embed_dim=18, depth=2).eval(),
        torch.randn(2, 3, 64, 64),
    )
    both = LocalizedModel(model, "l1", 0, [64])
    with torch.no_grad():
        last = model.forward_maps(image)[0]
        assert last.shape[2:] == (2, 2)
        assert torch.equal(both._features(image)[1][0], last)
        assert torch.equal(both(image, drawn(2, 3), torch.ones(2)).output, model(image))
    with pytest.raises(
        ValueError,
        match="it has no forward_intermediates; choose another model, or another variant",
    ):
        LocalizedModel(model, "all", 0, [64])


def test_error_on_several_grids_with_offset_classes():
    model = network("resnet18")
    for variant in ("ce", "reg"):
        with pytest.raises(ValueError, match=rf"and {variant} has a class for each"):
            LocalizedModel(model, variant, 0, [64, 96])
        # Both are pooled to one grid.
        LocalizedModel(model, variant, 2, [64, 128])
    assert model.training
    LocalizedModel(model, "l1", 0, [64, 96])


# ------------------------------------------------------------------------- the loss


def plain_loss(variant, heads, maps, words, weights, side, published):
    """Compute the loss one number after the other, in float64.

    Maps are lists of tensors with gradients.
    """
    total = torch.zeros((), dtype=torch.float64)
    for head, map_NDRC in zip(heads, maps, strict=True):
        factor = maps[-1].shape[2] // side if side else 1
        if factor > 1:
            map_NDRC = nn.AvgPool2d(2 * factor - 1, factor, factor - 1, count_include_pad=False)(
                map_NDRC
            )
        N, _, R, C = map_NDRC.shape
        for n in range(N):
            loss = torch.zeros((), dtype=torch.float64)
            for row1, column1, row2, column2 in words[n].tolist():
                r1, r2 = (math.floor(word / 2**32 * R) for word in (row1, row2))
                c1, c2 = (math.floor(word / 2**32 * C) for word in (column1, column2))
                predicted = head(torch.cat([map_NDRC[n, :, r1, c1], map_NDRC[n, :, r2, c2]]))
                if variant in ("ce", "reg"):
                    B = [2 * k - 1 if published else 2 * k + 1 for k in (R, C)]
                    for logits, offset in zip(predicted.split(B), (r1 - r2, c1 - c2), strict=True):
                        p, half = logits.exp() / logits.exp().sum(), len(logits) // 2
                        if variant == "ce":
                            loss = loss - p[offset + half].log()
                            continue
                        mean = sum(p[i] * (i - half) for i in range(len(p)))
                        variance = sum(p[i] * (i - half - mean) ** 2 for i in range(len(p)))
                        sigma = variance.sqrt()
                        spread = (variance if published else sigma).log()
                        loss = loss + (offset - mean) ** 2 / variance + 0.001 * spread
                    continue
                for one, (a, b), k in zip(predicted, ((r1, r2), (c1, c2)), (R, C), strict=True):
                    if variant == "signed":
                        target = a - b + k - 1 if published else (a - b) / k
                    else:
                        target = abs(a - b) if published else abs(a - b) / k
                    loss = loss + abs(one - target) / 2
            total = total + weights[n] * loss / words.shape[1]
    return total / weights.sum()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize(("grid", "side"), [((3, 5), 0), ((6, 4), 3)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_and_gradients_match_plain_loops(variant, grid, side, published):
    """Oblong grids, pooled ones, an image of weight 0; `all` on maps of two sizes.

    In float64 up to rounding.
    """
    torch.manual_seed(1)
    sizes = [(2 * grid[0], 2 * grid[1]), grid] if variant == "all" else [grid]
    widths = list(range(4, 4 + len(sizes)))
    maps = [
        torch.randn(3, D, *size, dtype=torch.float64, requires_grad=True)
        for D, size in zip(widths, sizes, strict=True)
    ]
    factor = grid[0] // side if side else 1
    ours = LocalizationLoss(
        variant, widths, side, (grid[0] // factor, grid[1] // factor), published
    ).double()
    words, weights = drawn(3, 7), torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    grads = []
    for loss in (
        ours(maps, words, weights),
        plain_loss(variant, ours.heads, maps, words, weights, side, published),
    ):
        grads.append((loss, *torch.autograd.grad(loss, [*maps, *ours.parameters()])))
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-6, atol=1e-9)
    assert all(grad.any() for grad in grads[0][1:])


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradcheck(variant):
    torch.manual_seed(0)
    ours = LocalizationLoss(variant, [3], 2, (2, 2), published=False).double()
    map_NDRC = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    words, weights = drawn(2, 3), torch.ones(2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda map_NDRC: ours([map_NDRC], words, weights), (map_NDRC,))


def test_gradients_reach_exactly_both_positions_of_a_pair():
    torch.manual_seed(0)
    map_NDRC = torch.randn(1, 6, 4, 4, requires_grad=True)
    words = torch.tensor([[words_of(0, 1, 3, 2, (4, 4))]])
    LocalizationLoss("l1", [6], 0, (4, 4), published=False)(
        [map_NDRC], words, torch.ones(1)
    ).backward()
    assert map_NDRC.grad[0].abs().sum(0).nonzero().tolist() == [[0, 1], [3, 2]]


@pytest.mark.parametrize(
    ("k", "raw", "share"), [(7, 2.2857, 0.3265), (8, 2.625, 0.3281), (14, 4.6429, 0.3316)]
)
def test_loss_of_constant_0_is_mean_distance_of_uniform_positions(k, raw, share):
    """(k^2 - 1) / (3 k) over all pairs of positions; an untrained head starts near it."""
    offset = torch.arange(k)[:, None] - torch.arange(k)
    zero = torch.zeros(k, k)
    assert regression_loss(zero, offset, k, False, True).mean().item() == pytest.approx(
        raw, abs=5e-5
    )
    assert regression_loss(zero, offset, k, False, False).mean().item() == pytest.approx(
        share, abs=5e-5
    )
    targets = regression_loss(zero, offset, k, True, False)
    assert targets.max() == (k - 1) / k
    assert regression_loss(zero + k - 1, offset, k, True, True).mean().item() == pytest.approx(
        raw, abs=5e-5
    )


@pytest.mark.parametrize(("published", "start"), [(False, 5.416), (True, 5.130)])
def test_ce_of_uniform_logits_is_log_of_classes(published, start):
    offset = torch.arange(-6, 7)[None]
    loss = classification_loss(torch.zeros(1, 13, offset_classes(7, published)), offset)
    assert torch.equal(loss, loss[:, :1].expand_as(loss))
    assert 2 * loss[0, 0].item() == pytest.approx(start, abs=5e-4)


def test_expectation_loss_is_finite_for_a_single_offset():
    """The variance of such a distribution is 0, so only MIN_VARIANCE is left."""
    logits = torch.full((1, 2, 15), -200.0)
    logits[0, :, 7 + 3] = 200.0
    offset = torch.tensor([[3, 2]])
    for published, factor in ((False, 0.5), (True, 1.0)):
        right, wrong = expectation_loss(logits, offset, published)[0].tolist()
        assert right == pytest.approx(factor * ALPHA * math.log(1e-8), rel=1e-4)
        assert wrong == pytest.approx(1e8, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_is_float32_under_autocast(variant, dtype):
    torch.manual_seed(0)
    ours, maps = (
        LocalizationLoss(variant, [16], 0, (4, 4), published=False),
        [torch.randn(4, 16, 4, 4)],
    )
    words, weights = drawn(4, 32), torch.ones(4)
    with torch.autocast("cpu", dtype):
        got = ours(maps, words, weights)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, ours(maps, words, weights), rtol=2e-2, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "name",
    [
        "lvvit_micro",
        "swin_tiny_patch4_window7_224",
        "resnet18",
        "cvt_13_drloc",
        "dhvt_tiny_imagenet_patch16",
    ],
)
def test_model_with_heads_compiles_to_one_graph(name, variant):
    torch._dynamo.reset()
    both = LocalizedModel(network(name), variant, 0, [64]).eval()
    image, words, weights = torch.randn(2, 3, 64, 64), drawn(2, 5), torch.ones(2)
    compiled = torch.compile(both, fullgraph=True, backend="eager", dynamic=False)
    torch.testing.assert_close(compiled(image, words, weights), both(image, words, weights))


def test_forward_and_backward_do_not_sync(no_host_read):
    both = LocalizedModel(network("lvvit_micro"), "all", 4, [64])
    image, words, weights = torch.randn(2, 3, 64, 64), drawn(2, 5), torch.ones(2)
    with no_host_read():
        both(image, words, weights).loss.backward()
    assert all(head[0].weight.grad.any() for head in both.localizer.heads)
    assert both.model.stem[0].weight.grad.any()


def test_map_under_mixtoken_is_that_of_the_mixed_image():
    """Exchanged tokens keep their position; only the logits of tokens return to their images."""
    model = network("lvvit_micro", token_head=True).eval()
    image, mask = torch.randn(2, 3, 64, 64), torch.zeros(8, 8, dtype=torch.bool)
    mask[2:5, 1:7] = True
    both = LocalizedModel(model, "l1", 0, [64])
    with torch.no_grad():
        _, (map_NDRC,) = both._features(image, mix_PP=mask)
        want = model.forward_features(image, mask)[:, 1:]
        torch.testing.assert_close(map_NDRC.flatten(2).mT, want)
        assert not torch.allclose(want, model.forward_features(image)[:, 1:])
        torch.testing.assert_close(
            both(image, drawn(2, 5), torch.ones(2), mix_PP=mask).output, model(image, mask)
        )


def test_no_weight_decay_of_the_model_is_kept():
    both = LocalizedModel(network("swin_tiny_patch4_window7_224"), "l1", 0, [64])
    assert len(both.no_weight_decay()) == 5  # a table of relative positions for each block
    assert both.no_weight_decay() <= {name for name, _ in both.named_parameters()}
    # Wrappers of methods from outside the package inherit it.
    other = WrappedModel()
    other.peer = network("lvvit_micro")
    assert other.no_weight_decay() == {"peer.pos_embed", "peer.cls_token"}


@pytest.mark.slow
def test_head_learns_from_a_map_of_coordinates():
    """The head alone reduces the error from 0.33 to below 0.05."""
    torch.manual_seed(0)
    ours, weight = LocalizationLoss("l1", [2], 0, (4, 4), published=False), torch.ones(8)
    grid = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")).expand(
        8, 2, 4, 4
    )
    optimizer, losses = torch.optim.Adam(ours.parameters(), 1e-3), []
    for step in range(150):
        words = torch.randint(2**32, (8, 64, 4), generator=torch.Generator().manual_seed(step))
        loss = ours([grid], words, weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.2
    assert losses[-1] < 0.05

"""Captured attention against NumPy, the models' own outputs, and the absence of any trace."""

import gc
from collections.abc import Iterator

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.explain.capture import (
    AttentionMatrix,
    TokenLayout,
    Windows,
    attention_layers,
    capture_attention,
    explicit_attention,
    merge_windows,
)
from densefeed.models.agent_cnn import make_agent
from densefeed.system.errors import UserError

from .small_models import CVT, WRITTEN, build_written, draw_images, write_out

FAMILIES = pytest.mark.parametrize("family", WRITTEN)
SWIN = dict(window_size=2, embed_dim=12, depths=(2, 2), num_heads=(1, 2), img_size=24)
# Name, arguments, side of the images: one model of every kind of attention.
MODELS = {
    "lvvit_micro": (dict(depth=2), 64),
    "dhvt_micro": (dict(depth=2), 64),
    "dhvt_micro-no-head-tokens": (dict(depth=2, head_tokens=False), 64),
    "t2t_vit_7": (dict(depth=2, embed_dim=32), 64),
    "cvt_13": (CVT, 64),
    "cvt_13_drloc": (CVT, 56),
    "bootstrapping_vit_s": (dict(depth=2, img_size=64), 64),
    "bootstrapping_vit_s_sparse": (dict(depth=2, img_size=64), 64),
    "vit_tiny_patch16_224": (dict(depth=2, init_values=0.1, qk_norm=True, img_size=64), 64),
    "deit_tiny_distilled_patch16_224": (dict(depth=2, img_size=64), 64),
    "vit_small_patch16_dinov3": (dict(depth=2, embed_dim=48, num_heads=3, img_size=64), 64),
    "beit_base_patch16_224": (dict(depth=2, embed_dim=48, num_heads=3, img_size=64), 64),
    "swin_tiny_patch4_window7_224": (SWIN, 24),
    "swinv2_tiny_window8_256": (SWIN, 24),
}


def build(name: str, **more) -> nn.Module:
    torch.manual_seed(0)
    arguments = MODELS[name][0] if name in MODELS else {}
    return timm.create_model(name.partition("-")[0], num_classes=5, **arguments, **more).eval()


def images_for(name: str) -> Tensor:
    side = MODELS[name][1]
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))


def traces(model: nn.Module) -> Iterator[object]:
    """Everything of a model that a capture could leave behind."""
    for name, part in model.named_modules():
        # Parameters and buffers by identity, whose values need no comparison.
        for key, value in vars(part).items():
            yield name, key, list(map(id, value)) if isinstance(value, dict) else value
            if isinstance(value, dict):
                yield name, key, list(map(id, value.values()))
    yield [parameter.requires_grad for parameter in model.parameters()]
    yield F.scaled_dot_product_attention, torch.softmax, Tensor.softmax


@FAMILIES
def test_matrices_are_those_written_out_in_numpy(family):
    model, images = build_written(family), draw_images(family)
    with capture_attention(model) as captured, torch.no_grad():
        model(images)
    for number, image in enumerate(images):
        logits, matrices = write_out(family, model, image)
        assert len(matrices) == len(captured)
        for record, node in zip(captured, matrices, strict=True):
            expected = torch.from_numpy(node.value)
            torch.testing.assert_close(record.weights[number], expected, rtol=0, atol=1e-12)
        with torch.no_grad():
            features = model.forward_features(images[number : number + 1])
            actual = model.head(model.forward_head(features, pre_logits=True))
        torch.testing.assert_close(actual, torch.from_numpy(logits.value), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_every_model_has_equal_outputs_and_rows_that_sum_to_one(name):
    model, images = build(name), images_for(name)
    expected = model(images)
    with capture_attention(model) as captured:
        actual = model(images)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    assert [record.layer for record in captured] == attention_layers(model)
    for _, weights, layout in captured:
        assert weights.shape[-2:] == (layout.queries, layout.keys)
        torch.testing.assert_close(
            weights.sum(-1), torch.ones(weights.shape[:-1]), rtol=0, atol=1e-6
        )
        windows = 1 if layout.windows is None else len(weights) // 2
        assert len(weights) == 2 * windows


@pytest.mark.parametrize(
    ("name", "fields", "side", "tokens", "heads"),
    [
        ("dhvt_tiny_cifar_patch4", dict(depth=1), 32, 69, 4),
        ("dhvt_small_imagenet_patch16", dict(depth=1), 224, 203, 6),
    ],
)
@torch.no_grad()
def test_sizes_of_the_papers_pictures(name, fields, side, tokens, heads):
    """Figures 3 to 5 and 7 of DHVT's supplementary material."""
    model = timm.create_model(name, **fields).eval()
    with capture_attention(model) as captured:
        model(torch.zeros(1, 3, side, side))
    (record,) = captured
    assert record.weights.shape == (1, heads, tokens, tokens)
    grid = (side // model.patch_size,) * 2
    assert record.layout == TokenLayout(1, 1, grid, grid, head_tokens=heads)


@torch.no_grad()
def test_layouts():
    def layouts(name: str, images: Tensor) -> list[TokenLayout]:
        with capture_attention(model := build(name)) as captured:
            model(images)
        return [record.layout for record in captured]

    # Not square, which DHVT and CvT take; keys of an odd grid are rounded up.
    wide = torch.zeros(1, 3, 64, 96)
    assert layouts("dhvt_micro", wide)[0] == TokenLayout(1, 1, (8, 12), (8, 12), 4)
    assert layouts("dhvt_micro-no-head-tokens", wide)[0] == TokenLayout(1, 1, (8, 12), (8, 12))
    first, _, third, _ = layouts("cvt_13", wide)
    assert first == TokenLayout(0, 0, (16, 24), (8, 12))
    assert third == TokenLayout(1, 1, (4, 6), (2, 3))
    assert layouts("cvt_13_drloc", torch.zeros(1, 3, 40, 40))[1].key_grid == (3, 3)
    assert layouts("deit_tiny_distilled_patch16_224", torch.zeros(1, 3, 64, 64))[0] == TokenLayout(
        2, 2, (4, 4), (4, 4)
    )
    shifted = layouts("swin_tiny_patch4_window7_224", torch.zeros(1, 3, 24, 24))[1]
    assert shifted.windows == Windows((6, 6), (2, 2), (1, 1))
    assert shifted.windows.counts == (3, 3)


def test_windows_return_to_their_places():
    """Against Swin's own partition, for a map that needs padding and a shift."""
    windows = Windows((5, 7), (2, 4), (1, 2))
    assert windows.counts == (3, 2)
    maps = torch.arange(2 * 5 * 7.0).view(2, 5, 7)
    padded = F.pad(maps.roll((-1, -2), (1, 2)), (0, 1, 0, 1))
    parts = padded.unfold(1, 2, 2).unfold(2, 4, 4).flatten(0, 2)
    assert torch.equal(merge_windows(parts, windows), maps)
    layout = TokenLayout(0, 0, (2, 4), (2, 4), windows=windows)
    values = parts.flatten(1)[:, None].expand(-1, 3, -1)
    assert torch.equal(layout.key_map(values), maps[:, None].expand(-1, 3, -1, -1))


def test_key_map_takes_the_patches_alone():
    layout = TokenLayout(2, 1, (2, 3), (2, 3), head_tokens=1)
    assert layout.queries == layout.keys == 9
    values = torch.arange(9.0)[None]
    assert torch.equal(layout.key_map(values), torch.arange(2.0, 8).view(1, 2, 3))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_nothing_is_left_on_the_model(name, fails):
    model, images = build(name), images_for(name)
    before = list(traces(model))
    with pytest.raises(ZeroDivisionError) if fails else torch.no_grad(), capture_attention(model):
        if fails:
            # In the middle of the first attention layer.
            layer = model.get_submodule(attention_layers(model)[0])
            handle = layer.proj.register_forward_hook(lambda *_: 1 / 0)
            try:
                model(images)
            finally:
                handle.remove()
        model(images)
    gc.collect()
    assert list(traces(model)) == before


def test_a_pass_after_a_failed_one_is_whole():
    model, images = build("lvvit_micro"), images_for("lvvit_micro")
    with capture_attention(model) as captured, torch.no_grad():
        with pytest.raises(ValueError, match="multiples of patch_size"):
            model(images[..., :60])
        for _ in range(2):
            model(images)
            assert [record.layer for record in captured] == attention_layers(model)
        # The features' path too.
        model.forward_intermediates(images)
    assert len(captured) == 2


@pytest.mark.parametrize("name", ["lvvit_micro", "bootstrapping_vit_s_sparse", "cvt_13"])
@pytest.mark.parametrize("frozen", [False, True])
def test_matrices_belong_to_the_graph(name, frozen):
    model, images = build(name).requires_grad_(not frozen), images_for(name)
    with capture_attention(model) as captured:
        logits = model(images)
    matrices = [record.weights for record in captured]
    for gradient in torch.autograd.grad(logits[:, 1].sum(), matrices):
        assert gradient.abs().sum() > 0
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["dhvt_micro-no-head-tokens", "cvt_13"])
def test_gradients_of_one_image_are_those_in_a_batch(name):
    """With `nn.BatchNorm2d` for `MapNorm`, PyTorch 2.15 is off by 4 % with a DHVT on CPUs."""
    model, images = build(name).double(), images_for(name).double()

    def gradients(images: Tensor) -> list[Tensor]:
        with capture_attention(model) as captured:
            logits = model(images)
        matrices = [record.weights for record in captured]
        return [part[:1] for part in torch.autograd.grad(logits[:, 1].sum(), matrices)]

    for one, other in zip(gradients(images[:1]), gradients(images), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9 * other.abs().max().item())


def test_recomputation_is_off_inside_and_on_again():
    model, images = build("lvvit_micro"), images_for("lvvit_micro")
    model.set_grad_checkpointing()
    with capture_attention(model) as captured:
        model(images).sum().backward()
        assert not model.grad_checkpointing
    assert len(captured) == 2
    assert model.grad_checkpointing


@torch.no_grad()
def test_chosen_layers():
    model, images = build("dhvt_micro"), images_for("dhvt_micro")
    with capture_attention(model, ["blocks.1.attn.attn"]) as captured:
        model(images)
    with capture_attention(model) as everything:
        model(images)
    assert [record.layer for record in captured] == ["blocks.1.attn.attn"]
    torch.testing.assert_close(captured[0].weights, everything[1].weights)


@torch.no_grad()
def test_dropout_acts_after_the_record():
    model = build("vit_tiny_patch16_224", attn_drop_rate=0.5).train()
    images = images_for("vit_tiny_patch16_224")
    with capture_attention(model) as captured:
        model(images)
    for record in captured:
        assert record.weights.all()


@torch.no_grad()
def test_half_precision_rows_still_sum_to_one():
    model, images = build("lvvit_micro").bfloat16(), images_for("lvvit_micro").bfloat16()
    with capture_attention(model) as captured:
        model(images)
    sums = captured[0].weights.sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums, dtype=torch.float32))


@pytest.mark.parametrize("case", ["plain", "scale", "causal", "bool", "float"])
def test_explicit_attention_is_pytorchs(case):
    rng = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 5, 4, generator=rng, dtype=torch.float64)
    mask = torch.rand(5, 5, generator=rng) < 0.7
    mask.fill_diagonal_(True)
    kwargs = {
        "plain": {},
        "scale": {"scale": 0.3},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": mask},
        "float": {"attn_mask": mask.double()},
    }[case]
    expected = F.scaled_dot_product_attention(q, k, v, **kwargs)
    torch.testing.assert_close(explicit_attention(q, k, v, **kwargs), expected)


@pytest.mark.parametrize("name", ["resnet10t", "dm_nfnet_f0", "cait_xxs24_224", "resnest14d"])
def test_models_without_attention_are_refused_by_name(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(UserError, match=f"^{type(model).__name__} has no attention"):
        attention_layers(model)


def test_agents_and_performers_are_refused_by_name():
    agent = make_agent(build("bootstrapping_vit_s"), 5, shared=False)
    with pytest.raises(UserError, match=r"^AgentCNN has no attention"), capture_attention(agent):
        pass
    performer = "tokens_to_token.attention1"
    model = build("t2t_vit_7")
    with (
        pytest.raises(UserError, match=f"{performer} is a Performer, .* choose from blocks.0.attn"),
        capture_attention(model, [performer]),
    ):
        pass
    with pytest.raises(UserError, match=r"blocks.9.attn is not a layer of the model and"):
        capture_attention(model, ["blocks.9.attn"]).__enter__()
    with pytest.raises(UserError, match="norm is a layer that computes no attention matrix"):
        capture_attention(model, ["norm"]).__enter__()


def test_compiled_models_are_refused():
    model = build("lvvit_micro")
    with pytest.raises(UserError, match="is compiled"):
        attention_layers(torch.compile(model))
    model.blocks[0].compile()
    with pytest.raises(UserError, match="LVViT is compiled"):
        attention_layers(model)


def test_patch_dropout_is_refused_in_training_only():
    model = build("vit_tiny_patch16_224", patch_drop_rate=0.5)
    images = images_for("vit_tiny_patch16_224")
    with capture_attention(model) as captured, torch.no_grad():
        model(images)
        assert isinstance(captured[0], AttentionMatrix)
        with pytest.raises(UserError, match="remove patch dropout"):
            model.train()(images)

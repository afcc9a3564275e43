"""Both CvT-13: parameter counts, a float64 reference, and timm's interface."""

import pytest
import timm
import torch
from timm.models import group_parameters

from densefeed.models import checkpoints
from densefeed.models.cvt import CvT
from densefeed.models.meta_device import meta_device
from densefeed.tools.model_costs import costs_by_name

from . import plain_layers as plain
from .laws import check_compiles, check_heads, check_training_step

MICRO = dict(dims=(8, 16, 32), depths=(1, 2, 2), num_heads=(1, 2, 4), num_classes=5)
BOTH = pytest.mark.parametrize("drloc", [False, True], ids=["authors", "drloc"])


def small(drloc: bool, **fields) -> CvT:
    torch.manual_seed(0)
    return timm.create_model("cvt_13_drloc" if drloc else "cvt_13", **MICRO | fields)


def count(module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "params", "multiply_adds"),
    [("cvt_13", 19_997_480, 4.59), ("cvt_13_drloc", 19_936_296, 4.55)],
)
def test_parameter_counts_are_exact_and_multiply_adds_match(name, params, multiply_adds):
    """Parameters counted by hand; billions of multiply-adds as measured on the published code.

    The latter to the rounding of two digits, and of norms.
    """
    with meta_device():
        model = timm.create_model(name)
    drloc, channels, by_hand = name == "cvt_13_drloc", 3, 0
    for dim, depth, kernel in ((64, 1, 7), (192, 2, 3), (384, 10, 3)):
        # A depth-wise convolution and its BatchNorm.
        near = 9 * dim + 2 * dim
        attention = 4 * dim**2 + dim + (2 * near if drloc else 3 * near + 3 * dim)
        block = 2 * 2 * dim + attention + 4 * dim**2 + 4 * dim + 4 * dim**2 + dim
        by_hand += channels * dim * kernel**2 + dim + 2 * dim + depth * block
        channels = dim
    # The head, and the class token and final norm.
    by_hand += 1000 * 384 + 1000 + (0 if drloc else 384 + 2 * 384)
    assert count(model) == by_hand == params
    costs, _ = costs_by_name(name)
    assert costs.whole == pytest.approx(multiply_adds, abs=0.012)


def reference_logits(model: CvT, image: torch.Tensor, drloc: bool) -> torch.Tensor:
    """Compute logits layer by layer from the model's weights (CvT, sections 3.2 and 3.3)."""
    w, x = {name: tensor.double() for name, tensor in model.state_dict().items()}, image.double()

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        if not drloc:
            return plain.layer_norm(w, name, x, 1e-5)
        deviation = (x - x.mean(-1, keepdim=True)).square().mean(-1, keepdim=True).sqrt()
        normed = (x - x.mean(-1, keepdim=True)) / (deviation + 1e-5)
        return normed * w[f"{name}.weight"] + w[f"{name}.bias"]

    for number, (dim, depth, heads) in enumerate(
        zip(MICRO["dims"], MICRO["depths"], MICRO["num_heads"], strict=True)
    ):
        stage = f"stages.{number}"
        stride, padding = (4, 3 if drloc else 2) if number == 0 else (2, 1)
        x = plain.conv(w, f"{stage}.patch_embed.proj", x, stride, padding)
        grid = tuple(x.shape[2:])
        x = norm(f"{stage}.patch_embed.norm", plain.to_tokens(x))
        extra = int(number == 2 and not drloc)
        if extra:
            x = torch.cat([w[f"{stage}.cls_token"].expand(len(x), -1, -1), x], 1)
        for place in range(depth):
            name = f"{stage}.blocks.{place}"
            z = norm(f"{name}.norm1", x)

            def project(letter: str, stride: int, attn=f"{name}.attn", z=z, grid=grid, extra=extra):
                conv, patches = f"{attn}.conv_proj_{letter}", plain.to_map(z[:, extra:], grid)
                y = plain.conv(w, f"{conv}.conv", patches, stride, 1)
                y = plain.to_tokens(plain.batch_norm(w, f"{conv}.bn", y, model.training))
                return plain.dense(w, f"{attn}.proj_{letter}", torch.cat([z[:, :extra], y], 1))

            q = project("q", 1)
            k, v = project("kv", 2).split(dim, -1) if drloc else (project("k", 2), project("v", 2))
            scale = (dim // heads) ** -0.5 if drloc else dim**-0.5
            x = x + plain.dense(w, f"{name}.attn.proj", plain.attention(q, k, v, heads, scale))
            z = plain.dense(w, f"{name}.mlp.fc1", norm(f"{name}.norm2", x))
            z = plain.erf_gelu(z) if drloc else z / (1 + torch.exp(-1.702 * z))
            x = x + plain.dense(w, f"{name}.mlp.fc2", z)
        x = x if number == 2 else plain.to_map(x, grid)
    pooled = x.mean(1) if drloc else norm("norm", x)[:, 0]
    return plain.dense(w, "head", pooled)


@BOTH
@pytest.mark.parametrize("size", [(64, 64), (72, 100)])
def test_output_equals_the_reference(drloc, size):
    """With running statistics and the batch's.

    The second size has grids with odd sides, of which every second position is a key.
    """
    model = plain.randomize(small(drloc))
    image = torch.randn(
        3, 3, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    with torch.no_grad():
        for training in (False, True):
            want = reference_logits(model.train(training), image, drloc)
            torch.testing.assert_close(model(image), want, rtol=1e-9, atol=1e-9)


@BOTH
def test_a_training_step_lowers_the_loss_and_only_the_last_stage_has_drop_path(drloc):
    model = small(drloc, drop_path_rate=0.1)
    rates = [
        [getattr(block.drop_path2, "drop_prob", 0.0) for block in stage.blocks]
        for stage in model.stages
    ]
    assert rates == [[0.0], [0.0, 0.0], [0.0, 0.1]]
    # With a class token the logits do not depend on the last queries of patches. Its own query
    # bypasses the convolution.
    query = "stages.2.blocks.1.attn.conv_proj_q"
    check_training_step(model, 64, lambda name: not drloc and name.startswith(query))


@pytest.mark.slow
@BOTH
def test_compiles_without_a_graph_break(drloc):
    check_compiles(small(drloc), torch.randn(2, 3, 64, 64))


@BOTH
def test_timm_interface(drloc):
    model, image = small(drloc).eval(), torch.randn(2, 3, 96, 64)
    features = check_heads(model, "cvt_13_drloc" if drloc else "cvt_13", image)
    assert features.shape == ((2, 32, 6, 4) if drloc else (2, 1 + 24, 32))
    assert model.num_prefix_tokens == (not drloc)
    with torch.no_grad():
        final, maps = model.forward_intermediates(image, norm=True)
        assert torch.equal(final, features)
        assert [tuple(m.shape) for m in maps] == [(2, 8, 24, 16), (2, 16, 12, 8), (2, 32, 6, 4)]
        torch.testing.assert_close(
            maps[-1], features if drloc else features[:, 1:].mT.unflatten(2, (6, 4))
        )
        (early,) = model.forward_intermediates(
            image, indices=[1], stop_early=True, intermediates_only=True
        )
        assert torch.equal(early, maps[1])
        with pytest.raises(ValueError, match="output_fmt 'NLC'"):
            model.forward_intermediates(image, output_fmt="NLC")
        only = timm.create_model(
            "cvt_13_drloc" if drloc else "cvt_13", **MICRO, features_only=True
        ).eval()
        assert [tuple(m.shape) for m in only(image)] == [tuple(m.shape) for m in maps]
        assert only.feature_info.channels() == [8, 16, 32]
        assert only.feature_info.reduction() == [4, 8, 16]
        model.reset_classifier(3, "avg")
        tokens = features.flatten(2).mT if drloc else features[:, 1:]
        torch.testing.assert_close(model(image), model.head(tokens.mean(1)))
    with pytest.raises(ValueError, match="global_pool 'max'"):
        model.reset_classifier(3, "max")
    if drloc:
        with pytest.raises(ValueError, match="global_pool 'token'"):
            model.reset_classifier(3, "token")


def test_layers_are_grouped_by_depth_and_the_class_token_is_not_decayed():
    model = small(False)
    assert (
        model.no_weight_decay()
        == {"stages.2.cls_token"}
        <= {name for name, _ in model.named_parameters()}
    )
    # Groups are stages, or blocks, where a stage's first block includes its embedding, as in timm's
    # Swin.
    for coarse, groups in ((True, 3), (False, 5)):
        found = group_parameters(model, model.group_matcher(coarse), reverse=True)
        assert found.keys() == {name for name, _ in model.named_parameters()}
        # The stem comes first, the head last.
        assert set(found.values()) == set(range(groups + 2))
        assert found["stages.0.patch_embed.proj.weight"] == 0
        assert found["head.weight"] == max(found.values())


def test_published_names_are_loaded(tmp_path):
    model = small(False)
    published = {
        name.replace("stages.", "stage", 1): tensor + 1
        for name, tensor in model.state_dict().items()
    }
    assert "stage2.blocks.0.attn.conv_proj_q.conv.weight" in published
    torch.save(published, tmp_path / "published.pth")
    checkpoints.initialize(model, tmp_path / "published.pth")
    assert torch.equal(model.stages[2].cls_token, published["stage2.cls_token"])

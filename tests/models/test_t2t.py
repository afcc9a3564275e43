"""T2T-ViT: parameter counts, a float64 reference, exact attention, and timm's interface."""

import copy
import math

import pytest
import timm
import torch
from timm.models import group_parameters
from torch.nn import functional as F

from densefeed.models import checkpoints
from densefeed.models.meta_device import meta_device
from densefeed.models.t2t import T2TViT, TokenPerformer, sinusoids
from densefeed.tools.model_costs import costs_by_name

from . import plain_layers as plain
from .laws import check_compiles, check_heads, check_training_step

MICRO = dict(img_size=64, embed_dim=24, depth=2, num_heads=3, token_dim=8, num_classes=5)


def small(**fields) -> T2TViT:
    torch.manual_seed(0)
    return timm.create_model("t2t_vit_14", **MICRO | fields)


def count(tensors) -> int:
    return sum(tensor.numel() for tensor in tensors)


def test_parameter_counts_are_exact_and_multiply_adds_match():
    """Parameters counted by hand, 21.5 M in the paper.

    Buffers are frozen parameters in the published code, 79,744 numbers.
    """
    with meta_device():
        model = timm.create_model("t2t_vit_14")

    def performer(read: int) -> int:
        return 2 * read + 3 * (read * 64 + 64) + 64 * 64 + 64 + 2 * 64 + 2 * (64 * 64 + 64)

    block = 4 * 384 + 3 * 384**2 + 384**2 + 384 + 2 * 3 * 384**2 + 3 * 384 + 384
    token_module = performer(3 * 49) + performer(64 * 9) + 64 * 9 * 384 + 384
    by_hand = token_module + 384 + 14 * block + 2 * 384 + 385 * 1000
    assert count(model.parameters()) == by_hand == 21_465_806
    assert count(model.buffers()) == 197 * 384 + 2 * 32 * 64 == 21_545_550 - 21_465_806
    costs, _ = costs_by_name("t2t_vit_14")
    # Billions of multiply-adds as measured on the published code.
    assert costs.whole == pytest.approx(4.80, abs=0.005)


def test_t2t_vit_7_has_the_published_parameter_count():
    with meta_device():
        assert count(timm.create_model("t2t_vit_7").parameters()) == 4_255_694


def reference_logits(model: T2TViT, image: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute evaluation logits layer by layer from the model's weights."""
    w, x = {name: tensor.double() for name, tensor in model.state_dict().items()}, image.double()
    for number, (kernel, stride, padding) in enumerate([(7, 4, 2), (3, 2, 1), (3, 2, 1)], start=1):
        padded = F.pad(x, [padding] * 4)
        rows, columns = ((size - kernel) // stride + 1 for size in padded.shape[2:])
        # Channels first, then the kernel's rows and columns, as in a convolution's weight.
        corners = [(r * stride, c * stride) for r in range(rows) for c in range(columns)]
        read = [padded[:, :, r : r + kernel, c : c + kernel].flatten(1) for r, c in corners]
        x = torch.stack(read, 1)
        if number < 3:
            name = f"tokens_to_token.attention{number}"
            normed = plain.layer_norm(w, f"{name}.norm1", x, 1e-5)
            k, q, v = plain.dense(w, f"{name}.kqv", normed).chunk(3, -1)
            features = []
            for y in (k, q):
                products = torch.einsum("nte,me->ntm", y, w[f"{name}.w"])
                exponent = products - (y * y).sum(-1, keepdim=True) / 2
                features.append(exponent.exp() / w[f"{name}.w"].shape[0] ** 0.5)
            # The weights of every query and key, which the model never builds.
            weight = torch.einsum("nsm,ntm->nst", features[1], features[0])
            y = weight @ v / (weight.sum(-1, keepdim=True) + 1e-8)
            x = v + plain.dense(w, f"{name}.proj", y)
            normed = plain.layer_norm(w, f"{name}.norm2", x, 1e-5)
            y = plain.erf_gelu(plain.dense(w, f"{name}.mlp.0", normed))
            x = x + plain.dense(w, f"{name}.mlp.2", y)
            x = plain.to_map(x, (rows, columns))
    x = plain.dense(w, "tokens_to_token.project", x)
    x = torch.cat([w["cls_token"].expand(len(x), -1, -1), x], 1) + w["pos_embed"]
    for number in range(len(model.blocks)):
        name = f"blocks.{number}"
        normed = plain.layer_norm(w, f"{name}.norm1", x, 1e-5)
        q, k, v = plain.dense(w, f"{name}.attn.qkv", normed).chunk(3, -1)
        x = x + plain.dense(w, f"{name}.attn.proj", plain.attention(q, k, v, 3, scale))
        normed = plain.layer_norm(w, f"{name}.norm2", x, 1e-5)
        y = plain.erf_gelu(plain.dense(w, f"{name}.mlp.fc1", normed))
        x = x + plain.dense(w, f"{name}.mlp.fc2", y)
    return plain.dense(w, "head", plain.layer_norm(w, "norm", x, 1e-5)[:, 0])


@pytest.mark.parametrize(("published", "scale"), [(False, 8**-0.5), (True, 24**-0.5)])
def test_output_equals_the_reference(published, scale):
    model = plain.randomize(small(published=published)).eval()
    image = torch.randn(
        2, 3, 64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    with torch.no_grad():
        torch.testing.assert_close(
            model(image), reference_logits(model, image, scale), rtol=1e-9, atol=1e-9
        )
        assert (model(image) - reference_logits(model, image, 0.5 * scale)).abs().max() > 1e-5


@pytest.mark.slow
def test_random_features_estimate_exact_attention():
    """Over many draws of `w` the products of features have the mean exp(q k), unnormalized."""
    torch.manual_seed(0)
    q = 0.5 * torch.randn(1, 3, 8, dtype=torch.float64)
    k = 0.5 * torch.randn(1, 4, 8, dtype=torch.float64)
    draws = []
    for _ in range(4000):
        performer = TokenPerformer(8, 8).double()
        draws.append(performer.random_features(q) @ performer.random_features(k).mT)
        assert performer.w.shape == (4, 8)
    torch.testing.assert_close(
        performer.w @ performer.w.mT, 4 * torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-5
    )
    # The mean of exp(w (q + k)) is exp(|q + k|^2 / 2) for normal w; rows of fixed length sqrt(M)
    # make it smaller where M is not E.
    draws = torch.stack(draws).mean(0)
    length = (q[:, :, None] + k[:, None]).square().sum(-1)
    order = torch.arange(40, dtype=torch.float64)
    # A row is sqrt(M) u, with u uniform on the sphere in E dimensions. The mean of
    # exp(sqrt(M) u x) is Gamma(E/2) sum_j (M |x|^2 / 4)^j / (j! Gamma(j + E/2)).
    log_terms = order * (4 * length[..., None] / 4).log() - torch.lgamma(order + 1)
    log_terms = log_terms - torch.lgamma(order + 4) + math.lgamma(4)
    outside = (-(q.square().sum(-1)[:, :, None] + k.square().sum(-1)[:, None]) / 2).exp()
    torch.testing.assert_close(draws, log_terms.exp().sum(-1) * outside, rtol=0.05, atol=0)


def test_positions_are_sines_and_cosines():
    table = sinusoids(5, 6)[0]
    for position in range(5):
        for channel in range(6):
            angle = position / 10000 ** (2 * (channel // 2) / 6)
            assert table[position, channel].item() == pytest.approx(
                math.cos(angle) if channel % 2 else math.sin(angle), abs=1e-6
            )


def test_the_performer_computes_in_float32_under_autocast():
    """With 16-bit exponents, a |k|^2 of some hundreds gave NaN and zeros."""
    torch.manual_seed(0)
    performer = TokenPerformer(8, 8).eval()
    seen = []
    original = performer.random_features
    performer.random_features = lambda x: seen.append(x.dtype) or original(x)
    with torch.no_grad():
        exact = performer(x := torch.randn(2, 50, 8))
        with torch.autocast("cpu", torch.bfloat16):
            half = performer(x)
    assert seen == 4 * [torch.float32]
    assert (half.float() - exact).abs().max() < 0.05


@pytest.mark.parametrize(
    "fields", [{}, dict(token_head=True), dict(published=True, drop_path_rate=0.1)]
)
def test_a_training_step_lowers_the_loss(fields):
    model = small(**fields)
    frozen = {name: buffer.clone() for name, buffer in model.named_buffers()}
    check_training_step(model, 64)
    assert set(frozen) == {
        "pos_embed",
        "tokens_to_token.attention1.w",
        "tokens_to_token.attention2.w",
    }
    assert all(torch.equal(buffer, frozen[name]) for name, buffer in model.named_buffers())


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, dict(token_head=True)])
def test_compiles_without_a_graph_break(fields):
    model, image = small(**fields).eval(), torch.randn(2, 3, 64, 64)
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[1:3] = True
    check_compiles(model, image, mask)
    torch.compile(copy.deepcopy(model).train(), backend="eager", fullgraph=True)(image, mask)
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)(image, mask)


def test_timm_interface():
    model, image = small().eval(), torch.randn(2, 3, 64, 96)
    features = check_heads(model, "t2t_vit_14", image)
    assert features.shape == (2, 1 + 24, 24)
    with torch.no_grad():
        final, (last,) = model.forward_intermediates(image, indices=1, norm=True)
        assert torch.equal(final, features)
        assert torch.equal(last.flatten(2).mT, features[:, 1:])
        maps = timm.create_model(
            "t2t_vit_14", **MICRO | dict(depth=3), features_only=True, out_indices=(0, 2)
        ).eval()(image)
        assert [tuple(m.shape) for m in maps] == 2 * [(2, 24, 4, 6)]
    groups = group_parameters(small(), small().group_matcher(), reverse=True)
    assert groups.keys() == {name for name, _ in small().named_parameters()}
    assert groups["tokens_to_token.project.weight"] == 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (dict(img_size=70), "img_size 70 x 70 must be square, and a multiple of patch_size 16"),
        (dict(num_heads=5), "multiple of num_heads"),
        (dict(fused_head=True), "fused_head needs token_head"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, why):
    with torch.device("meta"), pytest.raises(ValueError, match=why):
        small(**arguments)


def test_images_with_partial_patches_are_refused():
    with pytest.raises(ValueError, match="inputs of 64 x 70 pixels must be multiples"):
        small()(torch.zeros(1, 3, 64, 70))


@pytest.mark.slow
def test_published_names_and_positions_of_another_size_are_loaded(tmp_path):
    """The published file's names are the model's.

    `initialize` resizes positions to the model's size; `build` builds the model at the file's size.
    """
    trained = small(img_size=96)
    torch.save({"state_dict_ema": trained.state_dict()}, tmp_path / "81.5_T2T_ViT_14.pth.tar")
    model = small()
    assert "position table resized from 37 to 17 rows" in checkpoints.initialize(
        model, tmp_path / "81.5_T2T_ViT_14.pth.tar"
    )
    assert torch.equal(model.pos_embed[:, 0], trained.pos_embed[:, 0])
    assert torch.equal(model.tokens_to_token.attention2.w, trained.tokens_to_token.attention2.w)
    fine = timm.create_model("t2t_vit_14", img_size=96, num_classes=3)
    torch.save(fine.state_dict(), tmp_path / "bare.pth")
    built, _ = checkpoints.build(tmp_path / "bare.pth", "t2t_vit_14")
    assert built.grid_size == 6
    assert built.num_classes == 3

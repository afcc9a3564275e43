"""Agents: CONV against explicit matrices and attention, parameter counts, weight sharing."""

import inspect

import pytest
import timm
import torch
from timm.layers import Attention, AttentionRope
from timm.models import beit, eva, vision_transformer_relpos
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from densefeed.models.agent_cnn import (
    PLAIN,
    AgentBlock,
    AgentCNN,
    Conv,
    SharedWeights,
    conv_taps,
    make_agent,
    read_shared,
    shared_conv,
    vit_spec,
)
from densefeed.models.meta_device import meta_device
from densefeed.models.token_transformer import TokenLogits

# Squares of 1 to 6 taps a side, filled and not.
HEADS = range(1, 37)


def phi(heads: int, Y: int, X: int) -> torch.Tensor:
    """Return the matrices of equations 13 and 15, `[H, Y X, Y X]`, by a loop over positions.

    The taps are the first H of a square, row by row. Its center is the output position; of an even
    side it is the position above and left of the middle.
    """
    side = next(side for side in range(1, 99) if side * side >= heads)
    center = {1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 6: 2}[side]
    matrices = torch.zeros(heads, Y * X, Y * X, dtype=torch.float64)
    for tap in range(heads):
        down, right = tap // side - center, tap % side - center
        for y in range(Y):
            for x in range(X):
                if 0 <= y + down < Y and 0 <= x + right < X:
                    matrices[tap, y * X + x, (y + down) * X + x + right] = 1
    return matrices


def test_the_matrices_have_sums_counted_by_hand():
    """With 9 taps a corner reads 4 positions and the center 9.

    With 6 taps the top left reads 2, the bottom right 4. With 4 taps the top left reads all, the
    bottom right itself. With 3, the last row has no third one to read.
    """
    sums = {heads: phi(heads, 4, 5).sum((0, 2)).unflatten(0, (4, 5)) for heads in (9, 6, 4, 3)}
    assert (sums[9][0, 0], sums[9][1, 1], sums[9][3, 4]) == (4, 9, 4)
    assert (sums[6][0, 0], sums[6][1, 1], sums[6][3, 4]) == (2, 6, 4)
    assert (sums[4][0, 0], sums[4][1, 1], sums[4][3, 4]) == (4, 4, 1)
    assert (sums[3][0, 0], sums[3][3, 0], sums[3][0, 4]) == (3, 2, 2)
    assert all(phi(heads, 4, 5).sum(2).max() == 1 for heads in HEADS)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("grid", [(5, 5), (4, 7), (2, 1)])
def test_conv_is_the_sum_of_phi_x_w(heads, grid):
    torch.manual_seed(0)
    conv, x = Conv(6, heads).double(), torch.randn(2, 6, *grid, dtype=torch.float64)
    torch.nn.init.normal_(conv.bias)
    tokens = x.flatten(2).mT
    terms = [
        matrix @ tokens @ conv.weight[:, :, tap].T for tap, matrix in enumerate(phi(heads, *grid))
    ]
    want = sum(terms) + conv.bias
    torch.testing.assert_close(conv(x).flatten(2).mT, want, rtol=1e-12, atol=1e-12)


def test_conv_of_9_heads_is_a_3_x_3_convolution_and_of_6_one_without_the_last_row():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    for heads in (9, 6):
        conv = Conv(4, heads).double()
        kernel = torch.zeros(4, 4, 9, dtype=torch.float64)
        kernel[:, :, :heads] = conv.weight.detach()
        want = F.conv2d(x, kernel.unflatten(2, (3, 3)), conv.bias, padding=1)
        torch.testing.assert_close(conv(x), want)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("side", [2, 3, 4, 5, 6])
def test_a_full_square_is_pytorchs_convolution_of_the_same_size(side):
    """Even sides too, whose padding PyTorch adds below and right."""
    torch.manual_seed(0)
    conv, x = Conv(3, side**2).double(), torch.randn(2, 3, 7, 8, dtype=torch.float64)
    want = F.conv2d(x, conv.weight.unflatten(2, (side, side)), conv.bias, padding="same")
    torch.testing.assert_close(conv(x), want)


@pytest.mark.parametrize("heads", HEADS)
def test_shared_conv_is_the_sum_of_phi_x_w_for_any_number_of_heads(heads):
    """Equation 4, by the kernels W_h^V W_h^O."""
    torch.manual_seed(heads)
    D, x = 2 * heads, torch.randn(2, 2 * heads, 5, 7, dtype=torch.float64)
    value, proj = (torch.randn(D, D, dtype=torch.float64) for _ in range(2))
    want = 0
    for head, matrix in enumerate(phi(heads, 5, 7)):
        part = slice(2 * head, 2 * head + 2)
        want = want + matrix @ x.flatten(2).mT @ (proj[:, part] @ value[part]).T
    got = shared_conv(x, SharedWeights(value, proj, *5 * [None]), heads).flatten(2).mT
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_no_heads_have_no_conv():
    with pytest.raises(ValueError, match="0 heads have no CONV; give at least one"):
        conv_taps(0)


@pytest.mark.parametrize("name", ["bootstrapping_vit_micro", "lvvit_micro"])
def test_shared_conv_is_attention_to_one_tap_per_head(name):
    """Equation 4, by the kernels W_h^V W_h^O, which `shared_conv` never computes.

    Each is D x D; V's bias is omitted.
    """
    torch.manual_seed(0)
    vit = timm.create_model(name, num_heads=6, embed_dim=96, num_classes=3).double()
    block, x = vit.blocks[1], torch.randn(2, 96, 4, 5, dtype=torch.float64)
    torch.nn.init.normal_(block.attn.proj.bias)
    value, proj = block.attn.qkv.weight[2 * 96 :], block.attn.proj.weight
    want, tokens = block.attn.proj.bias, x.flatten(2).mT
    for head, matrix in enumerate(phi(6, 4, 5)):
        part = slice(16 * head, 16 * head + 16)
        want = want + matrix @ tokens @ (proj[:, part] @ value[part]).T
    got = shared_conv(x, read_shared(vit, torch.Tensor.detach)[1], 6).flatten(2).mT
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "attention",
    [
        Attention(18, 9),
        AttentionRope(18, 9, qkv_bias=False, num_prefix_tokens=0),
        beit.Attention(18, 9),
        eva.EvaAttention(18, 9, qk_norm=False, scale_norm=False, num_prefix_tokens=0),
        vision_transformer_relpos.RelPosAttention(18, 9),
    ],
    ids=lambda attention: type(attention).__name__,
)
def test_every_plain_attention_becomes_shared_conv(attention):
    """A bias on the module's attention logits restricts each head to its tap.

    Compared away from the border, where all taps are inside the map.
    """
    assert type(attention) in PLAIN
    torch.manual_seed(0)
    attention, x = attention.eval().double(), torch.randn(2, 18, 4, 5, dtype=torch.float64)
    torch.nn.init.normal_(attention.proj.bias)
    names = inspect.signature(attention.forward).parameters
    bias = next(
        name for name in ("attn_mask", "shared_rel_pos_bias", "shared_rel_pos") if name in names
    )
    with torch.no_grad():
        got = attention(x.flatten(2).mT, **{bias: 1e4 * phi(9, 4, 5)[None]}).mT.unflatten(2, (4, 5))
        shared = SharedWeights(
            attention.qkv.weight[36:], attention.proj.weight, attention.proj.bias, *4 * [None]
        )
        want = shared_conv(x, shared, 9)
    torch.testing.assert_close(
        got[:, :, 1:-1, 1:-1], want[:, :, 1:-1, 1:-1], rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize(
    ("name", "size", "patch"),
    [
        ("vit_small_r26_s32_224", 224, 32),
        ("vit_small_resnet26d_224", 224, 32),
        ("flexivit_small", 240, 16),
    ],
)
def test_an_agent_of_a_hybrid_has_the_patch_size_of_both_its_parts(name, size, patch):
    """So a base agent has the grid of the tokens."""
    with meta_device():
        vit = timm.create_model(name, depth=1, num_heads=6, embed_dim=96)
        assert vit_spec(vit).patch == patch
        (tokens,) = vit.forward_intermediates(
            torch.empty(1, 3, size, size), intermediates_only=True
        )
    assert tokens.shape[2:] == (size // patch, size // patch)


def test_patches_that_are_not_square_are_refused():
    with meta_device():
        vit = timm.create_model("test_vit", patch_size=(16, 8))
    with pytest.raises(ValueError, match="its patches, 16 x 8 pixels, are not square"):
        vit_spec(vit)


def test_a_block_with_shared_weights_equals_one_with_the_composed_kernels():
    """With MLP and norms, before and after; in training mode, so that BatchNorm normalizes."""
    torch.manual_seed(0)
    vit = timm.create_model("bootstrapping_vit_micro", num_classes=3).double()
    block, shared = vit.blocks[0], read_shared(vit, torch.Tensor.detach)[0]
    for norm in ("before", "after"):
        own, borrower = (AgentBlock(108, 9, 432, norm, own=own).double() for own in (True, False))
        with torch.no_grad():
            value, proj = shared.value.unflatten(0, (9, 12)), shared.proj.unflatten(1, (9, 12))
            own.conv.weight.copy_(torch.einsum("ohk,hki->oih", proj, value))
            own.conv.bias.copy_(shared.proj_bias)
            own.fc1.weight.copy_(block.mlp.fc1.weight[:, :, None, None])
            own.fc2.weight.copy_(block.mlp.fc2.weight[:, :, None, None])
            own.fc1.bias.copy_(block.mlp.fc1.bias)
            own.fc2.bias.copy_(block.mlp.fc2.bias)
        x = torch.randn(3, 108, 4, 4, dtype=torch.float64)
        torch.testing.assert_close(borrower(x, shared), own(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "kwargs", "counts"),
    [
        ("bootstrapping_vit_s", {}, (6_276_394, 6_302_404)),
        ("bootstrapping_vit_b", {}, (21_669_514, 21_704_164)),
        ("agent_s", {"stem": "base"}, (8_702_506, 8_728_516)),
        ("agent_s", {}, (8_656_746, 8_682_756)),
        ("agent_b", {"stem": "base"}, (25_118_602, 25_153_252)),
        ("agent_b", {"norm": "after", "pool": 3, "down": (3, 9)}, (25_054_410, 25_089_060)),
    ],
)
def test_parameter_counts_are_those_of_table_1(name, kwargs, counts):
    with meta_device():
        models = [timm.create_model(name, num_classes=classes, **kwargs) for classes in (10, 100)]
    assert tuple(sum(p.numel() for p in model.parameters()) for model in models) == counts


@pytest.mark.parametrize(
    ("name", "down", "billion"),
    [
        ("agent_s", None, 1.91),
        ("agent_s", (2, 5), 3.37),
        ("agent_b", None, 5.15),
        ("agent_b", (4, 10), 9.46),
    ],
)
def test_operations_are_those_that_the_help_names(name, down, billion):
    """Multiply-adds at 224 px: of Table 7's agents, and of those that meet Table 1 within 1 %."""
    with meta_device():
        agent = timm.create_model(name, down=down, num_classes=100).eval()
        with FlopCounterMode(display=False) as counter:
            agent(torch.empty(1, 3, 224, 224))
    assert counter.get_total_flops() / 2e9 == pytest.approx(billion, rel=0.01)


@pytest.mark.parametrize(
    ("vit", "stem", "private", "total"),
    [
        ("bootstrapping_vit_s", "res-like", 212_100, 6_514_504),
        ("bootstrapping_vit_s", "base", 257_860, 6_560_264),
        ("bootstrapping_vit_b", "res-like", 288_804, 21_992_968),
    ],
)
def test_an_agent_with_shared_weights_has_few_of_its_own(vit, stem, private, total):
    with meta_device():
        vit = timm.create_model(vit, num_classes=100)
        agent = make_agent(vit, 100, shared=True, stem=stem)
        alone = make_agent(vit, 100, shared=False, stem=stem)
    count = sum(p.numel() for p in agent.parameters())
    assert (count, count + sum(p.numel() for p in vit.parameters())) == (private, total)
    table_1 = {
        (288, "res-like"): 8_682_756,
        (288, "base"): 8_728_516,
        (384, "res-like"): 25_089_060,
    }
    assert sum(p.numel() for p in alone.parameters()) == table_1[vit.embed_dim, stem]


@pytest.mark.parametrize(
    ("kwargs", "sides"),
    [
        ({"stem": "base"}, 6 * [14]),
        ({}, [28, 14, 7, 7, 7, 7]),
        ({"depth": 12, "num_heads": 6}, 2 * [28] + 2 * [14] + 8 * [7]),
        ({"depth": 12, "num_heads": 6, "down": (3, 9), "pool": 3}, 3 * [28] + 6 * [14] + 3 * [7]),
    ],
)
def test_maps_have_the_sizes_of_tables_6_and_7(kwargs, sides):
    with meta_device():
        agent = AgentCNN(num_classes=10, **kwargs)
        last, maps = agent.forward_maps(torch.empty(2, 3, 224, 224))
    assert [block_map.shape[2:] for block_map in maps] == [(side, side) for side in sides]
    assert last.shape[2] == sides[-1]


def test_a_base_agent_has_the_grid_of_its_transformer_at_any_patch_size():
    with meta_device():
        vit = timm.create_model("bootstrapping_vit_micro", num_classes=2)
        agent = make_agent(vit, 2, shared=False, stem="base")
        assert agent.forward_maps(torch.empty(2, 3, 64, 64))[0].shape[2:] == (8, 8)


def test_an_agent_with_a_token_head_returns_what_lvvit_returns():
    torch.manual_seed(0)
    agent = AgentCNN(num_classes=5, embed_dim=18, depth=3, num_heads=9, token_head=True)
    image = torch.randn(2, 3, 64, 64)
    output = agent.train()(image)
    assert isinstance(output, TokenLogits)
    assert (output.cls.shape, output.tokens.shape) == ((2, 5), (2, 4, 5))
    last, _ = agent.eval().forward_maps(image)
    want = agent.head(last.mean((2, 3))) + 0.5 * agent.token_head(last.flatten(2).mT).amax(1)
    torch.testing.assert_close(agent(image), want)


def test_shared_weights_are_the_transformers_also_after_an_update():
    vit = timm.create_model("bootstrapping_vit_micro", num_classes=2)
    shared = read_shared(vit, torch.Tensor.detach)
    optimizer = torch.optim.AdamW(vit.parameters(), lr=0.1, fused=True)
    vit(torch.randn(2, 3, 64, 64)).sum().backward()
    optimizer.step()
    for block, weights in zip(vit.blocks, shared, strict=True):
        assert weights.value.data_ptr() == block.attn.qkv.weight[2 * 108 :].data_ptr()
        assert torch.equal(weights.value, block.attn.qkv.weight[2 * 108 :])
        assert torch.equal(weights.fc2, block.mlp.fc2.weight)
        assert weights.fc2.grad is None


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("resnet18", {}),
        ("nfnet_micro", {}),
        ("swin_tiny_patch4_window7_224", {}),
        ("cvt_13", {"depths": (1, 1, 1)}),
        ("test_vit", {"depth": 0}),
        ("test_vit", {"mlp_layer": timm.layers.GluMlp}),
    ],
)
def test_models_that_can_have_no_agent_are_refused(name, kwargs):
    with meta_device():
        model = timm.create_model(name, num_classes=2, **kwargs)
    with pytest.raises(ValueError, match="has no blocks of attention"):
        vit_spec(model)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"stem": "vgg"}, "^stem 'vgg' must be one of res-like, base$"),
        ({"norm": "none"}, "^norm 'none' must be one of before, after$"),
        ({"pool": 5}, "^pool 5 must be one of 2, 3$"),
        ({"pool": 3, "stem": "base"}, "pool 3 is for a res-like stem"),
        ({"down": (True,)}, r"down \(True,\) must be numbers of blocks"),
        ({"down": (0,)}, r"down \(0,\) must be numbers of blocks, from 1 to 6"),
        ({"down": (7,)}, "from 1 to 6"),
        ({"down": 3}, r"down 3 must be numbers of blocks, from 1 to 6"),
        ({"num_heads": 0}, "0 heads have no CONV"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        AgentCNN(num_classes=2, **kwargs)


def test_images_whose_map_is_too_small_to_halve_are_refused():
    with pytest.raises(ValueError, match="block 2 has a map of 1 x 1, which cannot be halved"):
        AgentCNN(num_classes=2, embed_dim=18, num_heads=9).eval()(torch.zeros(1, 3, 16, 16))

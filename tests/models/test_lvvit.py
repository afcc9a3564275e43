"""LV-ViT against its published parameter counts and the laws of MixToken."""

import pytest
import timm
import torch
from densefeed.models.lvvit import LVViT, TokenFeatures, TokenLogits


def tiny(**fields):
    torch.manual_seed(0)
    return timm.create_model("lvvit_micro", num_classes=5, depth=2, **fields)


@pytest.mark.parametrize(
    ("name", "params", "stem"),
    [
        ("lvvit_t", 8_534_720, 1_066_800),
        ("lvvit_s", 26_151_824, 1_656_768),
        ("lvvit_m", 55_830_544, 2_181_184),
        ("lvvit_l", 150_021_968, 6_606_720),
    ],
)
def test_parameters_to_the_unit(name, params, stem):
    """At 224 px and 1,000 classes, counted from the layer tables of the paper and the published stem counts."""
    with torch.device("meta"):
        model = timm.create_model(name)
    width, depth, classes, tokens = model.num_features, len(model.blocks), 1000, 14 * 14
    hidden = 3 * width
    block = 2 * 2 * width + 3 * width**2 + width**2 + width + 2 * width * hidden + hidden + width
    by_hand = stem + (1 + tokens) * width + width + depth * block + 2 * width + 2 * (width + 1) * classes
    assert sum(p.numel() for p in model.parameters()) == params == by_hand
    assert sum(p.numel() for p in model.stem.parameters()) == stem


def test_evaluation_adds_half_the_strongest_token():
    model, image = tiny().eval(), torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        x = model.forward_features(image)
        want = model.head(x[:, 0]) + 0.5 * model.token_head(x[:, 1:]).max(1).values
        torch.testing.assert_close(model(image), want)


def test_training_returns_both_heads():
    out = tiny()(torch.randn(3, 3, 64, 64))
    assert isinstance(out, TokenLogits)
    assert out.cls.shape == (3, 5)
    assert out.tokens.shape == (3, 64, 5)
    assert tiny(token_head=False)(torch.randn(3, 3, 64, 64)).shape == (3, 5)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_unmixed_tokens_belong_to_their_own_image(count):
    """Without blocks and positions a token's logits depend on its pixels alone, so un-mixing must undo mixing exactly."""
    model = tiny().eval()
    model.blocks = torch.nn.ModuleList()
    torch.nn.init.zeros_(model.pos_embed)
    image = torch.randn(count, 3, 64, 64)
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[2:5, 1:7] = True
    model.train()
    for module in model.stem:
        module.eval()  # batch statistics would differ with nothing mixed, too
    plain, mixed = model(image), model(image, mask)
    torch.testing.assert_close(mixed.tokens, plain.tokens)


@pytest.mark.parametrize("count", [1, 4, 5])
def test_features_unmixed_are_the_logits_unmixed(count):
    """The published code exchanges the logits back after the head (reference 1.4, step 6)."""
    model, image = tiny(), torch.randn(count, 3, 64, 64)
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[2:5, 1:7] = True
    with torch.no_grad():
        mixed = model.token_head(model.forward_features(image, mask)[:, 1:])
        inside = mask.flatten()[:, None]
        torch.testing.assert_close(model(image, mask).tokens, torch.where(inside, mixed.flip(0), mixed))


def test_a_fused_head_is_left_to_the_loss():
    """Same weights, same checkpoint, same gradients; at evaluation the same logits."""
    plain, fused = tiny(), tiny(fused_head=True)
    assert plain.state_dict().keys() == fused.state_dict().keys()
    image, mask = torch.randn(3, 3, 64, 64), torch.zeros(8, 8, dtype=torch.bool)
    mask[2:5, 1:7] = True
    want, out = plain(image, mask), fused(image, mask)
    assert isinstance(out, TokenFeatures)
    assert out.tokens.shape == (3, 64, 96)
    torch.testing.assert_close(out.cls, want.cls)
    torch.testing.assert_close(out.head(out.tokens), want.tokens)
    torch.testing.assert_close(fused.eval()(image), plain.eval()(image))
    with pytest.raises(ValueError, match="fused_head needs token_head"):
        tiny(fused_head=True, token_head=False)


def test_mixing_swaps_tokens_with_the_reversed_batch():
    """What the blocks see: inside the box the partner's patches."""
    model = tiny().eval()
    seen = []
    model.blocks[0].register_forward_hook(lambda _module, args, _out: seen.append(args[0]))
    image = torch.randn(4, 3, 64, 64)
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[2:5, 1:7] = True
    with torch.no_grad():
        model(image)
        model(image, mask)
    plain, mixed = (x[:, 1:] for x in seen)
    inside = mask.flatten()
    torch.testing.assert_close(mixed[:, inside], plain.flip(0)[:, inside])
    torch.testing.assert_close(mixed[:, ~inside], plain[:, ~inside])


def test_an_empty_box_changes_nothing():
    model, image = tiny().eval(), torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(image, torch.zeros(8, 8, dtype=torch.bool)), model(image))


def test_the_block_divides_its_branches():
    """Equation 5, written out with alpha = 1/3."""
    torch.manual_seed(0)
    block = LVViT(img_size=32, embed_dim=48, depth=1, num_heads=3, residual_divisor=3.0, num_classes=2).blocks[0]
    x = torch.randn(2, 5, 48)
    attended = x + block.attn(block.norm1(x)) / 3
    torch.testing.assert_close(block(x), attended + block.mlp(block.norm2(attended)) / 3)


def test_attention_is_softmax_of_scaled_products():
    torch.manual_seed(0)
    attn = tiny().blocks[0].attn
    x = torch.randn(2, 5, 96, dtype=torch.float64)
    attn = attn.double()
    q, k, v = attn.qkv(x).chunk(3, -1)
    heads = []
    for h in range(3):
        part = slice(32 * h, 32 * h + 32)
        weights = (q[..., part] @ k[..., part].mT / 32**0.5).softmax(-1)
        heads.append(weights @ v[..., part])
    torch.testing.assert_close(attn(x), attn.proj(torch.cat(heads, -1)), rtol=0, atol=1e-12)


def test_decay_spares_tables_norms_and_biases():
    from timm.optim import param_groups_weight_decay

    model = tiny()
    groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    spared = {id(p) for p in groups[0]["params"]}
    for name, parameter in model.named_parameters():
        expected = parameter.ndim <= 1 or name in ("pos_embed", "cls_token")
        assert (id(parameter) in spared) == expected, name


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="multiple of patch_size"):
        LVViT(img_size=100, patch_size=16)
    with pytest.raises(ValueError, match="inputs of 60 x 64 pixels must be multiples of patch_size 8"):
        tiny()(torch.zeros(1, 3, 60, 64))


def seen_positions(model, height, width):
    """What is added to the tokens of an image of this size: with zero tokens, what the first block sees."""
    seen = []
    model.blocks[0].register_forward_hook(lambda _module, args, _out: seen.append(args[0]))
    for parameter in (*model.stem[-1].parameters(), model.cls_token):
        torch.nn.init.zeros_(parameter)
    with torch.no_grad():
        model(torch.zeros(1, 3, height, width))
    return seen[0][0]


def test_at_the_built_size_the_position_table_is_the_parameter_itself():
    model = tiny().eval()
    assert torch.equal(seen_positions(model, 64, 64), model.pos_embed[0])


@pytest.mark.parametrize(("height", "width"), [(32, 32), (96, 96), (32, 128)])
def test_at_another_size_the_table_is_resampled_and_the_class_token_kept(height, width):
    """Bicubic, antialiased and edge-clamped resampling sums to 1 and keeps a plane's values away from the edges."""
    model = tiny().eval()
    rows, columns = height // 8, width // 8
    centre = (torch.arange(8) + 0.5) / 8
    with torch.no_grad():
        model.pos_embed[0, 1:, 0] = 3.0
        model.pos_embed[0, 1:, 1] = centre.repeat_interleave(8)
        model.pos_embed[0, 1:, 2] = centre.repeat(8)
    table = seen_positions(model, height, width)
    assert table.shape == (1 + rows * columns, 96)
    assert torch.equal(table[0], model.pos_embed[0, 0])
    grid = table[1:].view(rows, columns, 96)
    torch.testing.assert_close(grid[..., 0], torch.full((rows, columns), 3.0))
    want_row, want_column = (torch.arange(rows) + 0.5) / rows, (torch.arange(columns) + 0.5) / columns
    row, column = (slice(count // 4 + 1, -(count // 4 + 1)) for count in (rows, columns))
    torch.testing.assert_close(grid[row, :, 1], want_row[row, None].expand(-1, columns), rtol=0, atol=1e-5)
    torch.testing.assert_close(grid[:, column, 2], want_column[None, column].expand(rows, -1), rtol=0, atol=1e-5)


def test_another_size_trains_every_parameter_and_keeps_the_grid():
    """Gradients reach the table; token logits, training tokens and the mask of MixToken follow the input's grid."""
    model = tiny()
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[1:3, 2:5] = True
    out = model(torch.randn(2, 3, 32, 48), mask)
    assert out.tokens.shape == (2, 24, 5)
    (out.tokens.sum() + out.cls.sum()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert (model.pos_embed.grad != 0).any(-1).all()
    model.eval()
    with torch.no_grad():
        logits = model.forward_token_logits(torch.randn(2, 3, 32, 48))
        assert logits.shape == (2, 5, 4, 6)
        assert model(torch.randn(2, 3, 96, 96)).shape == (2, 5)


def test_initialisation_is_the_published_one():
    torch.manual_seed(0)
    model = timm.create_model("lvvit_t", num_classes=1000)
    for name in ("pos_embed", "blocks.0.attn.qkv.weight", "head.weight", "token_head.weight"):
        assert model.get_parameter(name).std().item() == pytest.approx(0.02, rel=0.05), name
    assert (model.head.bias == 0).all()
    assert model.norm.eps == 1e-5
    assert model.blocks[0].attn.qkv.bias is None

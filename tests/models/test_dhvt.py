"""DHVT against its published counts, its formulas written out in float64, timm's DeiT, and the
rules of its kind.
"""

import copy

import pytest
import timm
import torch
from timm.models import group_parameters
from timm.optim import param_groups_weight_decay
from torch.nn import functional as F

from densefeed.models import checkpoints
from densefeed.models.dhvt import DHVT, SOPE
from densefeed.models.token_transformer import TokenFeatures, TokenLogits
from densefeed.tools.model_costs import costs_by_name

from . import plain_layers as plain

# Table 11, a row a model: parameters as published code counts them, then parameters (M) and G of
# the table; conv and linear layers' G, fvcore's total without and with its matmul (reference 1.8).
TABLE11 = {
    "dhvt_tiny_cifar_patch4": (6_008_650, 6.0, 0.4, 0.366, 0.370, 0.392),
    "dhvt_tiny_cifar_patch2": (5_845_162, 5.8, 1.4, 1.391, 1.409, 1.723),
    "dhvt_small_cifar_patch4": (23_425_450, 23.4, 1.5, 1.480, 1.489, 1.538),
    "dhvt_small_cifar_patch2": (22_766_698, 22.8, 5.6, 5.547, 5.582, 6.230),
    "dhvt_tiny_domain_patch16": (6_105_975, 6.1, 1.2, 1.172, 1.186, 1.373),
    "dhvt_small_domain_patch16": (23_788_431, 23.8, 4.7, 4.653, 4.682, 5.062),
    "dhvt_tiny_imagenet_patch16": (6_267_334, 6.2, 1.2, 1.170, 1.185, 1.369),
    "dhvt_small_imagenet_patch16": (24_040_606, 24.1, 4.7, 4.653, 4.682, 5.062),
}
# the embedding's channels, as shares of the width
SHARES = {2: [1], 4: [2, 1], 8: [4, 2, 1], 16: [8, 4, 2, 1]}
MICRO = dict(patch_size=4, embed_dim=16, depth=2, num_heads=4, num_classes=5)


def small(**fields) -> DHVT:
    torch.manual_seed(0)
    return timm.create_model("dhvt_tiny_cifar_patch4", **MICRO | fields)


def answers(out) -> list[torch.Tensor]:
    """What a model said, of one head or two."""
    return [out] if torch.is_tensor(out) else [out.cls, out.tokens]


def count(module) -> int:
    return sum(p.numel() for p in module.parameters())


# ------------------------------------------------------------------------------------------------- Table 11


@pytest.mark.parametrize("name", TABLE11)
def test_table_11_to_the_unit(name):
    """By the formula of the reference (1.7), part by part, and as near to the printed table as that
    is to itself.
    """
    exact, millions, *_ = TABLE11[name]
    with torch.device("meta"):
        model = timm.create_model(name)
    d, h, classes = model.num_features, len(model.blocks[0].attn.head_pos[0]), model.num_classes
    channels, embedding = 3, 6 + 2 * d
    for share in SHARES[model.patch_size]:
        embedding += 9 * channels * (d // share) + 2 * (d // share)
        channels = d // share
    attention = 4 * d**2 + 4 * d + d * (d // h) + d + 2 * (d // h) + h * d
    feed_forward = 8.5 * d**2 + 64.25 * d
    assert count(model.embedding) == embedding
    assert count(model.blocks[0].attn) == attention
    assert count(model.blocks[0].feed_forward) == feed_forward
    by_hand = (
        embedding + d + 12 * (4 * d + attention + feed_forward) + 2 * d + d * classes + classes
    )
    assert count(model) == by_hand == exact
    assert abs(exact / 1e6 - millions) < 0.07
    assert not [n for n, _ in model.named_parameters() if n == "pos_embed"]


@pytest.mark.parametrize("name", TABLE11)
def test_multiply_adds_both_ways(name):
    """By hand, as the reference measured them, and rounded as the table prints them: without
    attention's products.
    """
    _, _, table, layers, without, whole = TABLE11[name]
    costs, size = costs_by_name(name)
    with torch.device("meta"):
        model = timm.create_model(name)
    d, h, classes = model.num_features, len(model.blocks[0].attn.head_pos[0]), model.num_classes
    tokens = (size // model.patch_size) ** 2
    side, channels, by_hand = size, 3, d * classes
    for share in SHARES[model.patch_size]:
        side, by_hand, channels = (
            side // 2,
            by_hand + 9 * channels * (d // share) * (side // 2) ** 2,
            d // share,
        )
    by_hand += 12 * ((tokens + 1 + h) * 4 * d**2 + d**2 + tokens * (8 * d**2 + 36 * d) + d**2 // 2)
    assert costs.layers == by_hand
    assert costs.attention == 12 * 2 * (tokens + 1 + h) ** 2 * d
    assert round(costs.layers / 1e9, 3) == layers
    # fvcore counts a number that is averaged once; model_costs does not
    pools = 12 * tokens * d / 1e9
    assert costs.without_attention + pools == pytest.approx(without, abs=6e-4)
    assert costs.whole + pools == pytest.approx(whole, abs=1.1e-3)
    assert round(costs.without_attention + pools, 1) == table


def test_table_10s_models():
    """224 pixels, 100 classes: 6.0 M and 23.7 M in the paper."""
    with torch.device("meta"):
        counts = [
            count(timm.create_model(f"dhvt_{size}_domain_patch16", num_classes=100))
            for size in ("tiny", "small")
        ]
    assert counts == [6_058_690, 23_694_106]


@pytest.mark.parametrize(
    ("width", "heads", "block"),
    [
        (192, 3, 487_856),
        (192, 4, 484_944),
        (384, 4, 1_909_920),
        (384, 6, 1_898_336),
        (384, 8, 1_892_928),
    ],
)
def test_table_4s_blocks(width, heads, block):
    """More heads have fewer parameters (reference 1.7)."""
    with torch.device("meta"):
        model = DHVT(embed_dim=width, num_heads=heads, depth=1)
    assert count(model.blocks[0]) == block


# ------------------------------------------------------------------------------------------------- the formulas, in float64


def written_out(model: DHVT, image: torch.Tensor, **options) -> torch.Tensor:
    """Logits by the supplementary's section 1, layer by layer, from the model's weights alone."""
    how = (
        dict(
            norms=("batch", "batch"),
            embedding="sope",
            affine=True,
            head_tokens=True,
            pos_embed=False,
            feed_forward="daff",
            aggregate="class",
            shortcut=True,
        )
        | options
    )
    w, training = (
        {name: tensor.double() for name, tensor in model.state_dict().items()},
        model.training,
    )

    def norm(kind: str, name: str, x: torch.Tensor) -> torch.Tensor:
        return (
            plain.batch_norm(w, name, x, training)
            if kind == "batch"
            else plain.layer_norm(w, name, x, 1e-6, dim=1)
        )

    x, P = image.double(), model.patch_size
    if how["embedding"] == "sope":
        number = int(how["affine"])
        if how["affine"]:
            x = x * w["embedding.0.alpha"] + w["embedding.0.beta"]
        for _ in SHARES[P]:
            x = norm(
                how["norms"][0],
                f"embedding.{number + 1}",
                plain.conv(w, f"embedding.{number}", x, 2, 1),
            )
            number += 2
            if f"embedding.{number + 1}.weight" in w or P == 2:  # another convolution follows
                x, number = plain.erf_gelu(x), number + 1
        if how["affine"]:
            x = x * w[f"embedding.{number}.alpha"] + w[f"embedding.{number}.beta"]
    else:
        x = plain.conv(w, "embedding.0", x, P)
    grid = tuple(x.shape[2:])
    x = torch.cat([w["cls_token"].expand(len(x), -1, -1), plain.to_tokens(x)], 1)
    if how["pos_embed"]:
        x = x + w["pos_embed"]
    for number in range(len(model.blocks)):
        name = f"blocks.{number}"
        z = plain.layer_norm(w, f"{name}.norm1", x, 1e-6)
        if how["head_tokens"]:
            h = w[f"{name}.attn.head_pos"].shape[1]
            # [N, E] each, class token included
            of_heads = [part.mean(1) for part in z.chunk(h, -1)]
            rows = []
            for mean in of_heads:
                projected = plain.dense(w, f"{name}.attn.head_proj", mean).chunk(h, -1)
                rows.append(
                    torch.cat(
                        [
                            plain.erf_gelu(plain.layer_norm(w, f"{name}.attn.head_norm", p, 1e-5))
                            for p in projected
                        ],
                        -1,
                    )
                )
            joined = torch.cat([z, torch.stack(rows, 1) + w[f"{name}.attn.head_pos"]], 1)
            q, k, v = plain.dense(w, f"{name}.attn.attn.qkv", joined).chunk(3, -1)
            out = plain.dense(
                w, f"{name}.attn.attn.proj", plain.attention(q, k, v, h, (q.shape[-1] / h) ** -0.5)
            )
            out = torch.cat([out[:, :1] + out[:, -h:].mean(1, keepdim=True), out[:, 1:-h]], 1)
        else:
            h = model.blocks[number].attn.num_heads
            q, k, v = plain.dense(w, f"{name}.attn.qkv", z).chunk(3, -1)
            out = plain.dense(
                w, f"{name}.attn.proj", plain.attention(q, k, v, h, (q.shape[-1] / h) ** -0.5)
            )
        x = x + out
        z, name = plain.layer_norm(w, f"{name}.norm2", x, 1e-6), f"{name}.feed_forward"
        if how["feed_forward"] == "mlp":
            x = x + plain.dense(w, f"{name}.fc2", plain.erf_gelu(plain.dense(w, f"{name}.fc1", z)))
            continue
        class_token, patches = z[:, :1], z[:, 1:]
        if how["feed_forward"] == "daff":
            u = plain.to_map(patches, grid)
            u = plain.erf_gelu(
                norm(how["norms"][1], f"{name}.norm1", plain.conv(w, f"{name}.conv1", u))
            )
            near = plain.erf_gelu(
                norm(how["norms"][1], f"{name}.norm2", plain.conv(w, f"{name}.conv2", u, 1, 1))
            )
            u = u + near if how["shortcut"] else near
            patches = plain.to_tokens(
                norm(how["norms"][1], f"{name}.norm3", plain.conv(w, f"{name}.conv3", u))
            )
        else:
            u = plain.erf_gelu(plain.dense(w, f"{name}.fc1", patches))
            if how["feed_forward"] == "split-pool":
                ninths = {
                    "pool.weight": torch.full((u.shape[-1], 1, 3, 3), 1 / 9, dtype=torch.float64)
                }
                u = plain.to_tokens(plain.conv(ninths, "pool", plain.to_map(u, grid), 1, 1))
            patches = plain.dense(w, f"{name}.fc2", u)
        out = torch.cat([class_token, patches], 1)
        if how["aggregate"] != "none":
            squeezed = plain.erf_gelu(
                plain.dense(w, f"{name}.aggregation.compress", patches.mean(1))
            )
            factor = plain.dense(w, f"{name}.aggregation.excite", squeezed)[:, None]
            out = (
                out * factor
                if how["aggregate"] == "all"
                else torch.cat([class_token * factor, patches], 1)
            )
        x = x + out
    return plain.dense(w, "head", plain.layer_norm(w, "norm", x, 1e-6)[:, 0])


D, HIDDEN, DEPTH = 16, 64, 2
SE = 2 * D * D // 4 + D // 4 + D  # squeeze and excitation of one block
LIKE_DAFF = 2 * D * HIDDEN + HIDDEN + D  # both 1 x 1 convolutions, or an MLP's two layers
# the depth-wise convolution and three norms
ONLY_DAFF = 9 * HIDDEN + HIDDEN + 2 * (HIDDEN + HIDDEN + D)
HEAD_TOKENS = 4 * D + D + 2 * 4 + 4 * D  # projection, its norm, positions, of heads of 4 channels
VIT = dict(
    embedding="patch", pos_embed=True, head_tokens=False, feed_forward="mlp", aggregate="none"
)
CONVS = 9 * 3 * 8 + 9 * 8 * 16 + 2 * (8 + 16)  # SOPE's for patches of 4 without its affine layers
AFFINES = 6 + 2 * D
PATCHES = 3 * 4 * 4 * D + D  # a ViT's embedding
TABLE_OF_65 = 65 * D  # positions of 8 x 8 patches
AS_VIT = PATCHES + TABLE_OF_65 - CONVS - AFFINES - DEPTH * (HEAD_TOKENS + ONLY_DAFF)
ABLATIONS = {  # arguments, then by how many parameters the model differs from DHVT
    "DHVT": ({}, 0),
    "table 2, ViT": (VIT, AS_VIT - DEPTH * SE),
    "table 2, split": (VIT | dict(feed_forward="split"), AS_VIT - DEPTH * SE),
    "table 2, split and aggregate": (VIT | dict(feed_forward="split", aggregate="class"), AS_VIT),
    "table 2, split and pool": (VIT | dict(feed_forward="split-pool"), AS_VIT - DEPTH * SE),
    "table 3, all tokens": (dict(aggregate="all"), 0),
    "table 3, no shortcut": (dict(shortcut=False), 0),
    "2.2.2, no affine": (dict(affine=False), -AFFINES),
    "2.2.2, ViT with SOPE": (
        VIT | dict(embedding="sope"),
        AS_VIT - DEPTH * SE - PATCHES + CONVS + AFFINES,
    ),
    "2.2.2, the same without affine": (
        VIT | dict(embedding="sope", affine=False),
        AS_VIT - DEPTH * SE - PATCHES + CONVS,
    ),
    "table 5, BN-LN": (dict(norms=("batch", "layer")), 0),
    "table 5, LN-BN": (dict(norms=("layer", "batch")), 0),
    "table 5, LN-LN": (dict(norms=("layer", "layer")), 0),
    "figure 1, head tokens alone": (
        VIT | dict(head_tokens=True),
        AS_VIT - DEPTH * SE + DEPTH * HEAD_TOKENS,
    ),
    "figure 1, positions": (dict(pos_embed=True), TABLE_OF_65),
    "figure 2, no head tokens": (dict(head_tokens=False), -DEPTH * HEAD_TOKENS),
}


@pytest.mark.parametrize("row", ABLATIONS)
def test_every_ablation_computes_its_formula_and_counts_by_hand(row):
    """In training mode with the batch's statistics and at evaluation, 32 pixels and, without a
    ViT's parts, 20 x 35.
    """
    options, differs = ABLATIONS[row]
    model = small(**options)
    assert count(model) == count(small()) + differs
    plain.randomized(model)
    with torch.no_grad():
        for size in ((32, 32), (20, 35)):
            if size != (32, 32) and model.exact:
                continue
            image = torch.randn(
                3, 3, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64
            )
            for training in (False, True):
                want = written_out(model.train(training), image, **options)
                torch.testing.assert_close(model(image), want, rtol=1e-9, atol=1e-9)


def test_no_two_ablations_compute_the_same():
    """Where counts are equal the formulas must differ; the weights that two have in common are
    equal here.
    """
    image, said = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)), {}
    whole = plain.randomized(small()).float().state_dict()
    for row, (options, _) in ABLATIONS.items():
        if set(options) <= {"aggregate", "shortcut", "norms"}:
            model = small(**options)
            model.load_state_dict(whole, strict=False)
            with torch.no_grad():
                said[row] = model.train()(image)
    assert len(said) == 6
    assert all(
        (one - other).abs().max() > 1e-3
        for a, one in said.items()
        for b, other in said.items()
        if a < b
    )


@pytest.mark.parametrize("patch", [2, 8, 16])
def test_the_other_patch_sizes_compute_their_formula(patch):
    model = plain.randomized(small(patch_size=patch))
    image = torch.randn(
        2, 3, 48, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    with torch.no_grad():
        assert model.forward_features(image).shape == (2, 1 + (48 // patch) * (32 // patch), 16)
        torch.testing.assert_close(model(image), written_out(model, image), rtol=1e-9, atol=1e-9)


def test_a_vit_of_its_parts_is_timms():
    """Table 2's first row: DeiT-T of 4 heads, for which timm's network is the judge."""
    torch.manual_seed(0)
    ours = timm.create_model("dhvt_tiny_cifar_patch4", num_classes=7, depth=3, **VIT).eval()
    timms = timm.create_model(
        "deit_tiny_patch16_224", img_size=32, patch_size=4, num_heads=4, num_classes=7, depth=3
    ).eval()
    renamed = {
        name.replace("patch_embed.proj", "embedding.0").replace(".mlp.", ".feed_forward."): tensor
        for name, tensor in timms.state_dict().items()
    }
    ours.load_state_dict(renamed)
    image = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(image), timms(image), rtol=1e-4, atol=1e-5)


def test_class_token_and_patches_meet_as_they_should():
    """In DAFF the class token learns of the patches, and the patches nothing of it."""
    block = plain.randomized(small()).eval().blocks[0].feed_forward
    x = torch.randn(2, 65, 16, dtype=torch.float64)
    other_class, other_patch = x.clone(), x.clone()
    other_class[:, 0] += 1
    other_patch[:, 30] += 1
    with torch.no_grad():
        out, changed_class, changed_patch = (
            block(y, (8, 8)) for y in (x, other_class, other_patch)
        )
    assert torch.equal(out[:, 1:], changed_class[:, 1:])
    assert (out[:, 0] - changed_class[:, 0]).abs().max() > 1e-3
    assert (out[:, 0] - changed_patch[:, 0]).abs().max() > 1e-6
    near = ((out - changed_patch).abs().amax((0, 2))[1:] > 0).view(8, 8)
    want = torch.zeros(8, 8, dtype=torch.bool)
    want[2:5, 4:7] = True  # patch 29 is row 3, column 5
    assert torch.equal(near, want)


@pytest.mark.parametrize(("patch", "trailing"), [(2, True), (4, False), (8, False), (16, False)])
def test_only_the_smallest_patches_end_in_gelu(patch, trailing):
    kinds = [type(layer).__name__ for layer in SOPE(patch, 3, 16, True, "batch")]
    assert (kinds[-2] == "GELU") == trailing
    assert kinds.count("Conv2d") == {2: 1, 4: 2, 8: 3, 16: 4}[patch]
    assert not SOPE(patch, 3, 16, True, "batch")[1].bias


# ------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize(
    "fields",
    [{}, *(options for options, _ in ABLATIONS.values() if options), dict(token_head=True)],
)
def test_every_variant_trains_a_step(fields):
    """Every parameter gets a finite gradient, and following it lowers the loss."""
    model = small(**fields, drop_path_rate=0.1)
    image, label = torch.randn(6, 3, 32, 32), torch.tensor([0, 1, 2, 3, 4, 0])

    def loss():
        return sum(
            F.cross_entropy(out if out.ndim == 2 else out.mean(1), label)
            for out in answers(model(image))
        )

    torch.manual_seed(1)
    before = loss()
    before.backward()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert parameter.grad.isfinite().all(), name
            # Where nothing goes from patches to the class token, what the last block does to
            # patches reaches no head.
            split = (
                str(fields.get("feed_forward")).startswith("split")
                and fields["aggregate"] == "none"
            )
            assert parameter.grad.any() != (split and name.startswith("blocks.1.feed_forward")), (
                name
            )
            parameter -= 0.01 * parameter.grad
    torch.manual_seed(1)
    assert loss() < before
    assert model.eval()(image).shape == (6, 5)


def test_mixtoken_exchanges_embedded_patches_and_the_head_gives_them_back():
    """What the first block sees; without blocks a token's answer then belongs to its own image
    again.
    """
    model, image = small(token_head=True).eval(), torch.randn(4, 3, 32, 32)
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[2:5, 1:7] = True
    seen = []
    model.blocks[0].register_forward_hook(lambda _module, args, _out: seen.append(args[0]))
    with torch.no_grad():
        model(image)
        model(image, mask)
        plain_NTD, mixed_NTD = (x[:, 1:] for x in seen)
        inside = mask.flatten()
        assert torch.equal(mixed_NTD[:, inside], plain_NTD.flip(0)[:, inside])
        assert torch.equal(mixed_NTD[:, ~inside], plain_NTD[:, ~inside])
        model.blocks = torch.nn.ModuleList()
        model.train()
        model.embedding.eval()  # batch statistics would differ with nothing mixed, too
        one, other = model(image), model(image, mask)
    assert isinstance(one, TokenLogits)
    assert one.tokens.shape == (4, 64, 5)
    torch.testing.assert_close(one.tokens, other.tokens)


def test_a_fused_head_is_left_to_the_loss():
    whole, fused, image = (
        small(token_head=True),
        small(token_head=True, fused_head=True),
        torch.randn(2, 3, 32, 32),
    )
    want, out = whole(image), fused(image)
    assert isinstance(out, TokenFeatures)
    torch.testing.assert_close(out.head(out.tokens), want.tokens)


@pytest.mark.parametrize(
    "fields", [{}, dict(token_head=True), dict(feed_forward="split-pool"), VIT]
)
def test_it_compiles_without_a_graph_break(fields):
    model, image = small(**fields).train(), torch.randn(2, 3, 32, 32)
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[1:3] = True
    torch._dynamo.reset()
    step = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    for got, want in zip(answers(step(image, mask)), answers(model(image, mask)), strict=True):
        torch.testing.assert_close(got, want)


def test_positions_of_another_size_are_taken(tmp_path):
    """Figure 1's models alone have a table; LV-ViT's rule resizes it, and keeps the class token's
    row.
    """
    trained = small(pos_embed=True)
    torch.save(trained.state_dict(), tmp_path / "at-32.pth")
    model = small(pos_embed=True, img_size=48)
    assert "position table resized from 65 to 145 rows" in checkpoints.initialize(
        model, tmp_path / "at-32.pth"
    )
    assert torch.equal(model.pos_embed[:, 0], trained.pos_embed[:, 0])
    table = trained.pos_embed[:, 1:].detach().mT.unflatten(2, (8, 8))
    want = F.interpolate(table, (12, 12), mode="bicubic", align_corners=False)
    torch.testing.assert_close(model.pos_embed[:, 1:].detach(), want.flatten(2).mT)


def test_decay_spares_tables_norms_and_biases_and_released_code_does_not():
    def decayed(model) -> set[str]:
        groups = param_groups_weight_decay(
            model, 0.05, no_weight_decay_list=model.no_weight_decay()
        )
        ids = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
        return {name for name, p in model.named_parameters() if id(p) in ids}

    paper, published = decayed(small()), decayed(small(published=True))
    tables = {
        n for n, _ in small().named_parameters() if n.endswith((".head_pos", ".alpha", ".beta"))
    }
    assert len(tables) == 2 + 4
    assert published - paper == tables
    assert all(n.endswith(".weight") and ".norm" not in n for n in paper)


def test_initialization_is_the_published_one():
    torch.manual_seed(0)
    model = timm.create_model("dhvt_small_imagenet_patch16", depth=1)
    for name in (
        "cls_token",
        "blocks.0.attn.head_pos",
        "blocks.0.attn.head_proj.weight",
        "blocks.0.attn.attn.qkv.weight",
        "head.weight",
    ):
        assert model.get_parameter(name).std().item() == pytest.approx(0.02, rel=0.1), name
    assert torch.equal(model.embedding[0].alpha, torch.ones(1, 3, 1, 1))
    assert not model.embedding[-1].beta.any()
    bound = 1 / (9 * 3) ** 0.5  # PyTorch's, of a convolution
    assert model.embedding[1].weight.abs().max().item() == pytest.approx(bound, rel=0.02)


# ------------------------------------------------------------------------------------------------- timm's interface


@pytest.mark.parametrize("name", TABLE11)
def test_timms_rules_for_models_hold(name):
    model = timm.create_model(name, depth=2, num_classes=5).eval()
    size = 32 if "cifar" in name else 64
    image = torch.randn(2, 3, size, size)
    with torch.no_grad():
        features = model.forward_features(image)
        assert features.shape == (
            2,
            model.num_prefix_tokens + (size // model.patch_size) ** 2,
            model.num_features,
        )
        torch.testing.assert_close(model.forward_head(features), model(image))
        pooled = model.forward_head(features, pre_logits=True)
        final, (last,) = model.forward_intermediates(image, indices=1, norm=True)
        assert torch.equal(final, features)
        assert torch.equal(last.flatten(2).mT, features[:, 1:])
        cfg = timm.get_pretrained_cfg(name)
        names = model.state_dict().keys()
        assert f"{cfg.first_conv}.weight" in names
        assert model.state_dict()[f"{cfg.first_conv}.weight"].shape[1] == 3
        assert cfg.input_size == (3, 32, 32) if "cifar" in name else (3, 224, 224)
        assert cfg.num_classes == timm.create_model(name, depth=0).num_classes
        assert model.get_classifier() is model.head
        model.reset_classifier(0)
        assert torch.equal(model(image), pooled)
        maps = timm.create_model(name, depth=3, features_only=True, out_indices=(0, 2)).eval()(
            image
        )
        assert [tuple(m.shape) for m in maps] == 2 * [
            (2, model.num_features, size // model.patch_size, size // model.patch_size)
        ]


def test_layers_are_grouped_by_depth():
    model = small(token_head=True)
    groups = group_parameters(model, model.group_matcher(), reverse=True)
    assert groups.keys() == {name for name, _ in model.named_parameters()}
    assert {
        name.split(".")[0]: group for name, group in groups.items() if "blocks" not in name
    } == {"cls_token": 0, "embedding": 0, "norm": 2, "head": 3, "token_head": 3}
    assert {groups[f"blocks.{i}.norm1.weight"] for i in range(2)} == {1, 2}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (dict(patch_size=6), "patch_size 6 must be one of 2, 4, 8, 16"),
        (dict(num_heads=5), "multiple of num_heads"),
        (dict(norms=("batch",)), "must be two"),
        (dict(norms=("batch", "group")), "'group' must be one of batch, layer"),
        (dict(embedding="conv"), "embedding 'conv'"),
        (dict(feed_forward="leff"), "feed_forward 'leff'"),
        (dict(aggregate="patches"), "aggregate 'patches'"),
        (dict(feed_forward="mlp"), 'give aggregate="none"'),
        (dict(pos_embed=True, img_size=33), "must be a multiple of patch_size 4"),
        (dict(pos_embed=True, img_size=(32, 64)), "must be square"),
        (dict(fused_head=True), "fused_head needs token_head"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, why):
    with torch.device("meta"), pytest.raises(ValueError, match=why):
        small(**arguments)


def test_with_a_vits_parts_cut_patches_are_refused():
    with pytest.raises(ValueError, match="inputs of 33 x 32 pixels"):
        small(**VIT)(torch.zeros(1, 3, 33, 32))


def test_fine_tuning_begins_from_another_models_weights(tmp_path):
    """Tables 1 and 8: ImageNet's classes go, everything else stays, at another size too."""
    torch.manual_seed(0)
    fields = dict(embed_dim=48, depth=2)
    trained = timm.create_model("dhvt_tiny_imagenet_patch16", **fields)
    torch.save({"model": trained.state_dict()}, tmp_path / "last.pt")
    torch.manual_seed(1)
    model = timm.create_model("dhvt_tiny_imagenet_patch16", **fields, num_classes=100)
    before = model.head.weight.clone()
    assert "new: head (1,000 classes in the file)" in checkpoints.initialize(
        model, tmp_path / "last.pt"
    )
    assert torch.equal(model.head.weight, before)
    image = torch.randn(2, 3, 96, 64)
    with torch.no_grad():
        assert torch.equal(
            model.eval().forward_features(image), trained.eval().forward_features(image)
        )
    other = timm.create_model("dhvt_tiny_imagenet_patch16", **fields | dict(num_heads=4))
    with pytest.raises(checkpoints.CheckpointError, match="has in another shape"):
        checkpoints.initialize(other, tmp_path / "last.pt")

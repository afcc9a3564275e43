"""DHVT: published counts, a float64 reference of every ablation, timm's DeiT and interface."""

import itertools

import pytest
import timm
import torch
from timm.optim import param_groups_weight_decay
from torch.nn import functional as F

from densefeed.models import checkpoints
from densefeed.models.dhvt import DHVT, SOPE
from densefeed.models.meta_device import meta_device
from densefeed.tools.model_costs import costs_by_name

from . import plain_layers as plain
from .laws import check_compiles, check_heads, check_training_step

# Table 11, one row per model: parameters as counted by the published code; parameters (M) and
# multiply-adds (G) of the table; measured G of convolutions and linear layers, and fvcore's total
# without and with attention's products.
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
# Divisors of the width that give the embedding's channels.
SHARES = {2: [1], 4: [2, 1], 8: [4, 2, 1], 16: [8, 4, 2, 1]}
MICRO = dict(patch_size=4, embed_dim=16, depth=2, num_heads=4, num_classes=5)


def small(**fields) -> DHVT:
    torch.manual_seed(0)
    return timm.create_model("dhvt_tiny_cifar_patch4", **MICRO | fields)


def count(module) -> int:
    return sum(p.numel() for p in module.parameters())


# ---------------------------------------------------------------- Table 11


@pytest.mark.parametrize("name", TABLE11)
def test_parameter_counts_of_table_11_are_exact(name):
    """By hand, part by part; the printed table's millions are off by up to 0.07."""
    exact, millions, *_ = TABLE11[name]
    with meta_device():
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
    blocks = 12 * (4 * d + attention + feed_forward)
    by_hand = embedding + d + blocks + 2 * d + d * classes + classes
    assert count(model) == by_hand == exact
    assert abs(exact / 1e6 - millions) < 0.07
    assert not [n for n, _ in model.named_parameters() if n == "pos_embed"]


# Both widths, and every kind of patches once; each takes 0.6 s.
QUICK = {
    "dhvt_tiny_cifar_patch4",
    "dhvt_small_cifar_patch2",
    "dhvt_tiny_domain_patch16",
    "dhvt_small_imagenet_patch16",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in TABLE11]
)
def test_multiply_adds_with_and_without_attention(name):
    """By hand, as measured on the published code, and as printed.

    The table's numbers are without attention's products.
    """
    _, _, table, layers, without, whole = TABLE11[name]
    with meta_device():
        costs, size = costs_by_name(name)
    with meta_device():
        model = timm.create_model(name)
    d, h, classes = model.num_features, len(model.blocks[0].attn.head_pos[0]), model.num_classes
    tokens = (size // model.patch_size) ** 2
    side, channels, by_hand = size, 3, d * classes
    for share in SHARES[model.patch_size]:
        side //= 2
        by_hand += 9 * channels * (d // share) * side**2
        channels = d // share
    by_hand += 12 * ((tokens + 1 + h) * 4 * d**2 + d**2 + tokens * (8 * d**2 + 36 * d) + d**2 // 2)
    assert costs.layers == by_hand
    assert costs.attention == 12 * 2 * (tokens + 1 + h) ** 2 * d
    assert round(costs.layers / 1e9, 3) == layers
    # fvcore counts one operation per averaged value; model_costs does not count pooling.
    pools = 12 * tokens * d / 1e9
    assert costs.without_attention + pools == pytest.approx(without, abs=6e-4)
    assert costs.whole + pools == pytest.approx(whole, abs=1.1e-3)
    assert round(costs.without_attention + pools, 1) == table


def test_parameter_counts_of_table_10():
    """224 pixels, 100 classes: 6.0 M and 23.7 M in the paper."""
    with meta_device():
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
def test_parameter_counts_of_table_4(width, heads, block):
    """More heads have fewer parameters."""
    with meta_device():
        model = DHVT(embed_dim=width, num_heads=heads, depth=1)
    assert count(model.blocks[0]) == block


# ---------------------------------------------------------------- float64 reference


def reference_logits(model: DHVT, image: torch.Tensor, **arguments) -> torch.Tensor:
    """Compute logits by the supplementary's section 1, layer by layer, from the model's weights."""
    options = dict(norms=("batch", "batch"), embedding="sope", affine=True, head_tokens=True)
    options |= dict(pos_embed=False, feed_forward="daff", aggregate="class", shortcut=True)
    options |= arguments
    w = {name: tensor.double() for name, tensor in model.state_dict().items()}

    def norm(kind: str, name: str, x: torch.Tensor) -> torch.Tensor:
        if kind == "batch":
            return plain.batch_norm(w, name, x, model.training)
        return plain.layer_norm(w, name, x, 1e-6, dim=1)

    x, P = image.double(), model.patch_size
    if options["embedding"] == "sope":
        number = int(options["affine"])
        if options["affine"]:
            x = x * w["embedding.0.alpha"] + w["embedding.0.beta"]
        for _ in SHARES[P]:
            x = plain.conv(w, f"embedding.{number}", x, 2, 1)
            x = norm(options["norms"][0], f"embedding.{number + 1}", x)
            number += 2
            # GELU follows if another convolution does, and with patches of 2.
            if f"embedding.{number + 1}.weight" in w or P == 2:
                x, number = plain.erf_gelu(x), number + 1
        if options["affine"]:
            x = x * w[f"embedding.{number}.alpha"] + w[f"embedding.{number}.beta"]
    else:
        x = plain.conv(w, "embedding.0", x, P)
    grid = tuple(x.shape[2:])
    x = torch.cat([w["cls_token"].expand(len(x), -1, -1), plain.to_tokens(x)], 1)
    if options["pos_embed"]:
        x = x + w["pos_embed"]
    for number in range(len(model.blocks)):
        name = f"blocks.{number}"
        z = plain.layer_norm(w, f"{name}.norm1", x, 1e-6)
        if options["head_tokens"]:
            h = w[f"{name}.attn.head_pos"].shape[1]
            # `[N, E]` each, class token included.
            means = [part.mean(1) for part in z.chunk(h, -1)]
            rows = []
            for mean in means:
                parts = plain.dense(w, f"{name}.attn.head_proj", mean).chunk(h, -1)
                parts = [plain.layer_norm(w, f"{name}.attn.head_norm", p, 1e-5) for p in parts]
                rows.append(torch.cat([plain.erf_gelu(p) for p in parts], -1))
            joined = torch.cat([z, torch.stack(rows, 1) + w[f"{name}.attn.head_pos"]], 1)
            q, k, v = plain.dense(w, f"{name}.attn.attn.qkv", joined).chunk(3, -1)
            out = plain.attention(q, k, v, h, (q.shape[-1] / h) ** -0.5)
            out = plain.dense(w, f"{name}.attn.attn.proj", out)
            out = torch.cat([out[:, :1] + out[:, -h:].mean(1, keepdim=True), out[:, 1:-h]], 1)
        else:
            h = model.blocks[number].attn.num_heads
            q, k, v = plain.dense(w, f"{name}.attn.qkv", z).chunk(3, -1)
            out = plain.attention(q, k, v, h, (q.shape[-1] / h) ** -0.5)
            out = plain.dense(w, f"{name}.attn.proj", out)
        x = x + out
        z, name = plain.layer_norm(w, f"{name}.norm2", x, 1e-6), f"{name}.feed_forward"
        if options["feed_forward"] == "mlp":
            x = x + plain.dense(w, f"{name}.fc2", plain.erf_gelu(plain.dense(w, f"{name}.fc1", z)))
            continue
        class_token, patches = z[:, :1], z[:, 1:]
        if options["feed_forward"] == "daff":
            kind = options["norms"][1]
            u = plain.conv(w, f"{name}.conv1", plain.to_map(patches, grid))
            u = plain.erf_gelu(norm(kind, f"{name}.norm1", u))
            local = plain.conv(w, f"{name}.conv2", u, 1, 1)
            local = plain.erf_gelu(norm(kind, f"{name}.norm2", local))
            u = plain.conv(w, f"{name}.conv3", u + local if options["shortcut"] else local)
            patches = plain.to_tokens(norm(kind, f"{name}.norm3", u))
        else:
            u = plain.erf_gelu(plain.dense(w, f"{name}.fc1", patches))
            if options["feed_forward"] == "split-pool":
                ninths = torch.full((u.shape[-1], 1, 3, 3), 1 / 9, dtype=torch.float64)
                ninths = {"pool.weight": ninths}
                u = plain.to_tokens(plain.conv(ninths, "pool", plain.to_map(u, grid), 1, 1))
            patches = plain.dense(w, f"{name}.fc2", u)
        out = torch.cat([class_token, patches], 1)
        if options["aggregate"] != "none":
            squeezed = plain.dense(w, f"{name}.aggregation.compress", patches.mean(1))
            squeezed = plain.erf_gelu(squeezed)
            factor = plain.dense(w, f"{name}.aggregation.excite", squeezed)[:, None]
            scaled = torch.cat([class_token * factor, patches], 1)
            out = out * factor if options["aggregate"] == "all" else scaled
        x = x + out
    return plain.dense(w, "head", plain.layer_norm(w, "norm", x, 1e-6)[:, 0])


D, HIDDEN, DEPTH = 16, 64, 2
# Squeeze and excitation of one block.
SE = 2 * D * D // 4 + D // 4 + D
# The depth-wise convolution and three norms, which an MLP does not have.
ONLY_DAFF = 9 * HIDDEN + HIDDEN + 2 * (HIDDEN + HIDDEN + D)
# Projection, its norm and positions of head tokens, for heads of 4 channels.
HEAD_TOKENS = 4 * D + D + 2 * 4 + 4 * D
VIT = dict(
    embedding="patch", pos_embed=True, head_tokens=False, feed_forward="mlp", aggregate="none"
)
# SOPE for patches of 4 without its affine layers.
CONVS = 9 * 3 * 8 + 9 * 8 * 16 + 2 * (8 + 16)
AFFINES = 6 + 2 * D
# A ViT's patch embedding.
PATCHES = 3 * 4 * 4 * D + D
# Positions of 8 x 8 patches and the class token.
TABLE_OF_65 = 65 * D
AS_VIT = PATCHES + TABLE_OF_65 - CONVS - AFFINES - DEPTH * (HEAD_TOKENS + ONLY_DAFF)
# Arguments, and the difference of the number of parameters from DHVT's.
ABLATIONS = {
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
def test_every_ablation_equals_the_reference_and_the_count_by_hand(row):
    """In training mode, with the batch's statistics, and in evaluation.

    At 32 pixels, and at 20 x 35 without parts of a ViT.
    """
    options, differs = ABLATIONS[row]
    model = small(**options)
    assert count(model) == count(small()) + differs
    plain.randomize(model)
    with torch.no_grad():
        for size in ((32, 32), (20, 35)):
            if size != (32, 32) and model.whole_patches:
                continue
            image = torch.randn(
                3, 3, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64
            )
            for training in (False, True):
                want = reference_logits(model.train(training), image, **options)
                torch.testing.assert_close(model(image), want, rtol=1e-9, atol=1e-9)


def test_no_two_ablations_have_the_same_output():
    """Ablations with equal parameter counts, with the same weights where they share them."""
    image, outputs = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)), {}
    whole = plain.randomize(small()).float().state_dict()
    for row, (options, _) in ABLATIONS.items():
        if set(options) <= {"aggregate", "shortcut", "norms"}:
            model = small(**options)
            model.load_state_dict(whole, strict=False)
            with torch.no_grad():
                outputs[row] = model.train()(image)
    assert len(outputs) == 6
    for one, other in itertools.combinations(outputs.values(), 2):
        assert (one - other).abs().max() > 1e-3


@pytest.mark.parametrize("patch", [2, 8, 16])
def test_the_other_patch_sizes_equal_the_reference(patch):
    model = plain.randomize(small(patch_size=patch))
    image = torch.randn(
        2, 3, 48, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    with torch.no_grad():
        assert model.forward_features(image).shape == (2, 1 + (48 // patch) * (32 // patch), 16)
        torch.testing.assert_close(
            model(image), reference_logits(model, image), rtol=1e-9, atol=1e-9
        )


def test_with_the_parts_of_a_vit_it_equals_timms_deit():
    """Table 2's first row, DeiT-T with 4 heads, against timm's model."""
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


def test_daff_passes_information_from_patches_to_the_class_token_only():
    """In DAFF the class token depends on the patches, and they do not depend on it."""
    block = plain.randomize(small()).eval().blocks[0].feed_forward
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
    changed = ((out - changed_patch).abs().amax((0, 2))[1:] > 0).view(8, 8)
    want = torch.zeros(8, 8, dtype=torch.bool)
    # Patch 29 is in row 3, column 5.
    want[2:5, 4:7] = True
    assert torch.equal(changed, want)


@pytest.mark.parametrize(("patch", "trailing"), [(2, True), (4, False), (8, False), (16, False)])
def test_only_the_smallest_patches_end_in_gelu(patch, trailing):
    kinds = [type(layer).__name__ for layer in SOPE(patch, 3, 16, True, "batch")]
    assert (kinds[-2] == "GELU") == trailing
    assert kinds.count("Conv2d") == {2: 1, 4: 2, 8: 3, 16: 4}[patch]
    assert not SOPE(patch, 3, 16, True, "batch")[1].bias


# ---------------------------------------------------------------- training


@pytest.mark.parametrize(
    "fields",
    [{}, *(options for options, _ in ABLATIONS.values() if options), dict(token_head=True)],
)
def test_a_training_step_lowers_the_loss_of_every_variant(fields):

    def is_unused(name: str) -> bool:
        """If nothing passes from patches to the class token, the last block's feed-forward network
        has no effect on the logits.
        """
        split = str(fields.get("feed_forward")).startswith("split")
        return split and fields["aggregate"] == "none" and name.startswith("blocks.1.feed_forward")

    check_training_step(small(**fields, drop_path_rate=0.1), 32, is_unused)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{}, dict(token_head=True), dict(feed_forward="split-pool"), VIT]
)
def test_compiles_without_a_graph_break(fields):
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[1:3] = True
    check_compiles(small(**fields).train(), torch.randn(2, 3, 32, 32), mask)


def test_positions_of_another_size_are_loaded(tmp_path):
    """Only Figure 1 has a table; it is resized like LV-ViT's, the class token's row kept."""
    trained = small(pos_embed=True)
    torch.save(trained.state_dict(), tmp_path / "at-32.pth")
    model = small(pos_embed=True, img_size=48)
    line = checkpoints.initialize(model, tmp_path / "at-32.pth")
    assert "position table resized from 65 to 145 rows" in line
    assert torch.equal(model.pos_embed[:, 0], trained.pos_embed[:, 0])
    table = trained.pos_embed[:, 1:].detach().mT.unflatten(2, (8, 8))
    want = F.interpolate(table, (12, 12), mode="bicubic", align_corners=False)
    torch.testing.assert_close(model.pos_embed[:, 1:].detach(), want.flatten(2).mT)


def test_weight_decay_excludes_tables_norms_and_biases_but_not_all_in_published_code():
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
    # PyTorch's initialization of a convolution.
    bound = 1 / (9 * 3) ** 0.5
    assert model.embedding[1].weight.abs().max().item() == pytest.approx(bound, rel=0.02)


# ---------------------------------------------------------------- timm's interface


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", TABLE11)
def test_timm_interface(name):
    model = timm.create_model(name, depth=2, num_classes=5).eval()
    size = 32 if "cifar" in name else 64
    image = torch.randn(2, 3, size, size)
    features, side = check_heads(model, name, image), size // model.patch_size
    assert features.shape == (2, model.num_prefix_tokens + side**2, model.num_features)
    with torch.no_grad():
        final, (last,) = model.forward_intermediates(image, indices=1, norm=True)
        assert torch.equal(final, features)
        assert torch.equal(last.flatten(2).mT, features[:, 1:])
        cfg = timm.get_pretrained_cfg(name)
        assert model.state_dict()[f"{cfg.first_conv}.weight"].shape[1] == 3
        assert cfg.input_size == ((3, 32, 32) if "cifar" in name else (3, 224, 224))
        assert cfg.num_classes == timm.create_model(name, depth=0).num_classes
        mapper = timm.create_model(name, depth=3, features_only=True, out_indices=(0, 2)).eval()
        shapes = [tuple(feature_map.shape) for feature_map in mapper(image)]
        assert shapes == 2 * [(2, model.num_features, side, side)]


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
        (dict(pos_embed=True, img_size=33), "a multiple of patch_size 4"),
        (dict(pos_embed=True, img_size=(32, 64)), "must be square"),
        (dict(fused_head=True), "fused_head needs token_head"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, why):
    with torch.device("meta"), pytest.raises(ValueError, match=why):
        small(**arguments)


def test_partial_patches_are_refused_with_parts_of_a_vit():
    with pytest.raises(ValueError, match="inputs of 33 x 32 pixels"):
        small(**VIT)(torch.zeros(1, 3, 33, 32))

"""Recipes against the papers' tables and published commands; tables in the docs against models."""

import math
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import timm
import tyro
from torch import nn

from densefeed.models.meta_device import meta_device
from densefeed.pipelines.plan import EpochPlan
from densefeed.recipes import PAPERS, RECIPES
from densefeed.system.errors import UserError
from densefeed.system.options import leaves, with_options
from densefeed.tools.model_costs import costs_by_name
from densefeed.training.schedule import learning_rate

from ..documents import FOLDERS, count_parameters, parse, table_rows
from ..runs import model_for, objective_for, wrap

ROOT = Path(__file__).parents[2]


def num_classes(name: str) -> int:
    """Return the classes of a recipe's dataset: of scenes, DomainNet, CIFAR-100 or ImageNet."""
    known = {
        "segment_photos": 61,
        "ade20k": 150,
        "coco": 80,
        "photos": 60,
        "micro": 10,
        "quickstart": 10,
        "domain": 345,
        "cifar": 100,
        "100_epochs": 100,
        "dhvt_t_fine": 100,
        "dhvt_s_fine": 100,
    }
    return next((count for word, count in known.items() if word in name), 1000)


def expand(pattern: str) -> list[str]:
    """Expand `a_{b,c}` as a shell does."""
    head, brace, rest = pattern.partition("{")
    if not brace:
        return [pattern]
    inside, _, tail = rest.partition("}")
    return [head + word + end for word in inside.split(",") for end in expand(tail)]


def read_listed() -> dict[str, float]:
    """Return the millions of parameters of every recipe on its page."""
    listed = []
    for names, _, counts, *_ in table_rows((ROOT / "docs/reference/recipes.md").read_text(), 5):
        found = expand(names.strip("`"))
        millions = [float(count) for count in counts.removesuffix(" M").split(" / ")]
        assert len(millions) in (1, len(found))
        listed += zip(found, millions * (len(found) // len(millions)), strict=True)
    assert len(dict(listed)) == len(listed)
    return dict(listed)


LISTED = read_listed()


def test_docs_list_every_recipe():
    assert LISTED.keys() == RECIPES.keys()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_recipe_text_and_model(recipe, monkeypatch):
    about = recipe.text
    assert f"densefeed train {recipe.name} " in about
    # On scenes that a command makes.
    micro = num_classes(recipe.name) in (10, 60, 61)
    prose = " ".join(about.split())
    assert micro or ("Not run here." in prose and re.search(r"Table|published", prose))
    command = re.search(r"densefeed train(?:.*\\\n)*.*", about)[0].replace("\\\n", " ")
    config, given = recipe(), parse(command, monkeypatch)
    own = dict(leaves(config))
    free = ("data", "val", "out", "loader", "init", "score_maps")
    assert with_options(given, **{name: own[name] for name in free}) == config
    assert config.data.train is tyro.MISSING
    objective_for(given)
    counted, listed = count_parameters(config, num_classes(recipe.name)), LISTED[recipe.name]
    assert counted / 1e6 == pytest.approx(listed, abs=0.05 if listed > 1 else 5e-4)


TABLE2 = {  # the paper's columns
    "standard": dict(objective="ce", lr=1e-3, mixup=0.8, mixtoken=False),
    "relabel": dict(objective="relabel", lr=1e-3, mixup=0.0, mixtoken=True),
    "token_label": dict(objective="token-label", lr=1e-3 * 1024 / 640, mixup=0.0, mixtoken=True),
}


@pytest.mark.parametrize(
    ("name", "drop_path", "crop"),
    [
        ("lvvit_s_224_standard", 0.1, 0.9),
        ("lvvit_s_224_relabel", 0.1, 0.9),
        ("lvvit_t_224_token_label", 0.1, 0.9),
        ("lvvit_s_224_token_label", 0.1, 0.9),
        ("lvvit_m_224_token_label", 0.2, 1.0),
        ("lvvit_l_288_token_label", 0.3, 1.0),
    ],
)
def test_lvvit_recipes_match_table_2(name, drop_path, crop):
    config = RECIPES[name]()
    model, size, column = re.fullmatch(r"(lvvit_.)_(\d+)_(\w+)", name).groups()
    want = TABLE2[column]
    assert config.optim.peak_lr == pytest.approx(want["lr"])
    assert with_options(config, batch=512).optim.peak_lr == pytest.approx(want["lr"] / 2)
    assert (config.objective.name, config.mix.mixup, config.mix.mixtoken) == (
        want["objective"],
        want["mixup"],
        want["mixtoken"],
    )
    assert (
        config.optim.epochs,
        config.optim.batch,
        config.optim.weight_decay,
        config.optim.warmup_epochs,
    ) == (300, 1024, 0.05, 5)
    assert (config.augment.erase_probability, config.augment.rand_augment) == (
        0.25,
        "rand-m9-mstd0.5-inc1",
    )
    assert (config.model.name, config.data.size, config.model.drop_path, config.data.crop_pct) == (
        model,
        int(size),
        drop_path,
        crop,
    )
    assert config.objective.token_labeling.token_weight == 0.5


@pytest.mark.parametrize("size", "tsml")
def test_published_lvvit_recipes_match_published_commands(size):
    config = RECIPES[f"lvvit_{size}_224_token_label_published"]()
    large = size == "l"
    assert config.optim.peak_lr == pytest.approx(1e-3 if large else 1.6e-3)
    assert config.optim.total_epochs == 310
    assert config.optim.ema == (0.0 if large else 0.99992)
    assert config.augment.rand_augment == (
        "rand-n3-m9-mstd0.5-inc1" if large else "rand-m9-mstd0.5-inc1"
    )
    assert (
        config.labels.geometry,
        config.labels.outside,
        config.objective.token_labeling.token_weight,
    ) == ("published", "uniform", 1.0)
    assert config.augment.augment_before_crop
    assert config.data.crop_interpolation == "random"
    assert config.data.eval_interpolation == "bicubic"
    assert learning_rate(config.optim, 1250, 1251) == 1e-6
    assert (config.labels.smoothing, config.optim.min_lr) == (0.1, 1e-5)


@pytest.mark.parametrize("size", "tsml")
def test_help_of_published_lvvit_recipes_names_the_steps_of_an_epoch(size):
    """The published loader drops the last images of an epoch; a plan here has a batch of them."""
    recipe = RECIPES[f"lvvit_{size}_224_token_label_published"]
    images, batch = 1_281_167, recipe().optim.batch
    ours = EpochPlan(num_samples=images, batch=batch, seed=0, mode="train").batches
    told = f"({ours:,} steps of ImageNet, not {images // batch:,})"
    assert told in " ".join(recipe.text.split())


@pytest.mark.parametrize("name", [name for name in RECIPES if re.match("lvvit.*fine_tune$", name)])
def test_outside_lvvit_fine_tune_matches_supplementary(name, command):
    """Section 1: 30 epochs, batch 512, 5e-6, weight decay 1e-8, the rest as in Table 1: a cosine.

    Also that --init is required, by name.
    """
    config = RECIPES[name]()
    assert (
        config.optim.epochs,
        config.optim.batch,
        config.optim.peak_lr,
        config.optim.weight_decay,
    ) == (30, 512, 5e-6, 1e-8)
    assert config.mix.mixtoken
    assert config.objective.name == "token-label"
    assert config.optim.warmup_epochs == 5
    rates = [learning_rate(config.optim, epoch * 10, 10) for epoch in range(5, 31)]
    cosine = [2.5e-6 * (1 + math.cos(math.pi * epoch / 30)) for epoch in range(5, 31)]
    assert rates == pytest.approx(cosine, abs=1e-12)
    assert config.model.init is tyro.MISSING
    text = " ".join(RECIPES[name].text.split())
    assert "a cosine from 5e-6" in text
    assert "the rate constant after the warm-up: --min-lr 5e-6" in text
    if name == "lvvit_s_384_fine_tune":
        done = command("train.py", name, *FOLDERS)
        assert done.returncode == 2
        assert "--init" in done.stdout + done.stderr


def test_outside_published_fine_tune_keeps_the_rate_of_the_published_command():
    """5e-6 from the fifth epoch on, also in the code's ten epochs after the last."""
    tuned = RECIPES["lvvit_s_384_fine_tune_published"]()
    optim = tuned.optim
    assert {learning_rate(optim, epoch * 10, 10) for epoch in range(5, 40)} == {5e-6}
    assert (optim.batch, optim.epochs, optim.total_epochs, optim.weight_decay, optim.ema) == (
        512,
        30,
        40,
        1e-8,
        0,
    )
    assert (tuned.data.size, tuned.model.drop_path, tuned.model.init) == (384, 0.1, tyro.MISSING)
    trained = RECIPES["lvvit_s_224_token_label_published"]()
    assert tuned.labels == trained.labels
    assert tuned.augment == trained.augment
    assert tuned.objective == trained.objective


def test_outside_help_of_lvvit_names_what_the_tables_do_not_list():
    for name, words in {
        "lvvit_s_224_token_label": "smoothing of 0.1 and the EMA",
        "lvvit_l_288_token_label": "smoothing of 0.1 and the EMA of T, S and M",
        "lvvit_s_224_relabel": "smoothing of 0.1 and the EMA",
        "lvvit_s_224_standard": "Table 2 lists neither CutMix, here as in DeiT, nor smoothing",
    }.items():
        config = RECIPES[name]()
        assert words in " ".join(RECIPES[name].text.split())
        assert (config.labels.smoothing, config.optim.ema) == (0.1, 0.99992)
        assert config.mix.cutmix == (1.0 if "standard" in name else 0.0)


@pytest.mark.parametrize(
    "name",
    [name for name in RECIPES if re.match("dhvt_[ts]_|(swin_t|cvt|t2t|resnet_50)_drloc$", name)],
)
def test_outside_help_names_repeats_of_dhvt_and_the_best_epoch(name):
    text = " ".join(RECIPES[name].text.split())
    assert "accuracies are those of the best epoch on the test set" in text
    if "dhvt" in name:
        assert "repeat each image three times" in text
        assert "--repeats 3" in text


BOOTSTRAPPING = [n for n in RECIPES if n.startswith("bootstrapping") and "micro" not in n]


@pytest.mark.parametrize("name", BOOTSTRAPPING)
def test_bootstrapping_recipes_match_section_4_1(name):
    """240 epochs of 2 x 32 images, AdamW or SGD, feature weight 10 and T = 4.

    The learning rate ends at 0 and has no warm-up.
    """
    config = RECIPES[name]()
    cnn = "efficientnet" in name or "resnet" in name
    optim = config.optim
    assert (optim.epochs, optim.batch, config.data.size) == (240, 64, 224)
    # The published configuration of SGD names no momentum.
    assert (optim.optimizer, optim.peak_lr, optim.weight_decay) == (
        ("sgd", 5e-2, 5e-4) if cnn else ("adamw", 1e-3, 0.05)
    )
    assert optim.momentum == (0.0 if cnn else 0.9)
    assert optim.sam_rho == (0.1 if "sam" in name else 0.0)
    assert [learning_rate(optim, step, 10) / optim.peak_lr for step in (0, 9, 1200, 2400)] == (
        pytest.approx([1, 1, 0.5, 0])
    )
    assert (config.model.init is tyro.MISSING) == ("fine_tune" in name)
    bootstrap = config.objective.bootstrap
    assert (bootstrap.feature_weight, bootstrap.distill_weight, bootstrap.distill_temperature) == (
        10,
        1,
        4,
    )
    assert (bootstrap.feature_decay, bootstrap.feature_adapt, bootstrap.agent) == (
        "linear",
        "sequence",
        "res-like",
    )
    assert (
        config.labels.smoothing,
        config.mix.mixup,
        config.mix.cutmix,
        config.augment.rand_augment,
        optim.ema,
    ) == (0, 0, 0, "", 0)
    kind = name.replace("_published", "").rpartition("_")[2]
    assert bootstrap.mode == (kind if kind in ("joint", "shared") else "none")


@pytest.mark.parametrize("name", BOOTSTRAPPING)
def test_only_published_bootstrapping_recipes_do_as_the_published_code(name):
    """The others follow the paper's text: random-resized crops, equation 6, Align, ImageNet's mean.

    CIFAR's published crop is of an image padded by an eighth of its side.
    """
    config, published = RECIPES[name](), name.endswith("published")
    assert config.objective.bootstrap.feature_norm == ("layernorm" if published else "l2-token")
    assert config.objective.bootstrap.align == (
        "none" if published and "shared" in name else "global"
    )
    with meta_device():
        mean = model_for(config, 100).pretrained_cfg["mean"]
    assert mean == ((0.5071, 0.4867, 0.4408) if published else (0.485, 0.456, 0.406))
    crop = (224 * 4 // 32, "black", (1.0, 1.0)) if published else (0, "mean", (0.6, 1.0))
    augment = config.augment
    assert (augment.shift, augment.shift_border, config.data.crop_scale) == crop
    assert config.data.crop_pct == (0.875 if "imagenet" in name else 1.0)
    assert config.optim.decay_all == published


@pytest.mark.parametrize(
    ("size", "norm_first", "down"), [("s", True, {1, 2}), ("b", False, {3, 9})]
)
@pytest.mark.parametrize("kind", ["joint", "shared"])
def test_outside_published_bootstrapping_recipes_have_the_published_agent(
    size, norm_first, down, kind
):
    """Norms before (S) or after (B) the branch, pools after these blocks, a max-pool of 3."""
    config = RECIPES[f"bootstrapping_vit_{size}_{kind}_published"]()
    with meta_device():
        agent = wrap(config, model_for(config, 100), 100).agent
    assert agent.down == down
    assert {block.norm_first for block in agent.blocks} == {norm_first}
    (pool,) = [part for part in agent.stem if isinstance(part, nn.MaxPool2d)]
    assert (pool.kernel_size, pool.stride) == (3, 2)


PAGES = ("docs/results/papers.md", "docs/reference/methods.md")


@pytest.mark.parametrize("page", PAGES)
def test_outside_flags_of_the_published_agent_b_are_those_of_its_recipe(page):
    """In a shell's words; a flag replaces all arguments of the agent, so it repeats the norm."""
    text = " ".join((ROOT / page).read_text().split())
    (flags,) = re.findall(r"-kwargs (\"norm='after'\" pool=3 'down=\(3,9\)')", text)
    recipe = RECIPES["bootstrapping_vit_b_joint_published"]()
    assert set(shlex.split(flags)) == set(recipe.objective.bootstrap.agent_kwargs)


@pytest.mark.parametrize("name", [n for n in BOOTSTRAPPING if not n.endswith("published")])
def test_outside_help_of_bootstrapping_names_what_is_the_codes(name):
    """ViT-S's dropout, Agent-B's norms, rates that change once per epoch: none is in the text."""
    text, config = " ".join(RECIPES[name].text.split()), RECIPES[name]()
    for words in ("dropout of 0.1", "Agent-B's branches", "once per epoch", "60 to 100 %"):
        assert words in text
    assert config.optim.lr_updates == "epoch"
    assert config.data.crop_scale == (0.6, 1.0)
    assert ("attn_drop_rate=0.1" in config.model.kwargs) == ("_vit_s_" in name)


def test_help_of_published_bootstrapping_recipes_names_what_remains():
    """Weights begin as timm's: as in vit.py, whose docstring has the published code's."""
    for kind in ("s_shared", "s_joint", "b_shared", "b_joint"):
        text = " ".join(RECIPES[f"bootstrapping_vit_{kind}_published"].text.split())
        assert "differences remain" in text
        assert "initial weights are others" in text
        assert "in joint training: on several give --sync-batchnorm" in text
    vit = timm.create_model("bootstrapping_vit_s", num_classes=2, depth=1)
    assert vit.patch_embed.proj.weight.std() < 0.1
    assert vit.blocks[0].mlp.fc1.bias.abs().max() < 1e-4


def test_padded_crops_have_the_published_border_wherever_they_are_named():
    """28 of 224 pixels, in the documents and the recipes' help."""
    files = [*ROOT.glob("docs/**/*.md"), ROOT / "densefeed/recipes/ABLATIONS.md"]
    texts = [file.read_text() for file in files] + [recipe.text for recipe in RECIPES.values()]
    texts = [" ".join(text.split()) for text in texts]
    named = [after for text in texts for after in re.findall(r"--shift 28(.{21})", text)]
    assert len(named) > 10
    assert set(named) == {" --shift-border black"}


def test_drloc_recipes_match_supplementary():
    """Section 6 and Table 9; lambda of Swin and ViT, the rest as in the public commands."""
    weights = {
        "swin_t_drloc": 0.5,
        "vit_b_drloc": 0.01,
        "resnet_50_drloc": 0.1,
        "cvt_drloc": 0.1,
        "t2t_drloc": 0.1,
    }
    for name, weight in weights.items():
        config = RECIPES[name]()
        assert (
            config.optim.epochs,
            config.optim.warmup_epochs,
            config.optim.batch,
            config.optim.peak_lr,
        ) == (100, 20, 1024, 1e-3)
        assert (
            config.data.size,
            config.optim.weight_decay,
            config.optim.clip_grad,
            config.mix.mixup,
            config.mix.cutmix,
        ) == (224, 0.05, 5.0, 0.8, 1.0)
        assert (
            config.objective.drloc.variant,
            config.objective.drloc.weight,
            config.objective.drloc.grid,
        ) == ("l1", weight, 7)
        assert (
            config.objective.name,
            config.objective.drloc.published,
            config.model.drop_path,
        ) == ("ce", False, 0.2 if "swin" in name else 0)
        # The published rates: 5e-7, 5e-4 and 5e-6 a batch of 512.
        assert learning_rate(config.optim, 0, 10) == pytest.approx(1e-6)
        assert config.optim.min_lr == 1e-5
    for name in weights.keys() - {"vit_b_drloc"}:
        tuned, free = RECIPES[f"{name}_fine_tune"](), dict(init=None, lr=1e-3, warmup_epochs=20)
        assert (
            tuned.optim.epochs,
            tuned.optim.warmup_epochs,
            tuned.optim.peak_lr,
            tuned.model.init,
        ) == (100, 10, 5e-4, tyro.MISSING)
        assert with_options(tuned, **free) == RECIPES[name]()
    micro, plain = RECIPES["lvvit_micro_drloc"](), RECIPES["lvvit_micro_ce"]()
    assert with_options(micro, drloc="none", drloc_grid=7) == plain


@pytest.mark.parametrize(
    ("name", "positions"), [("swin_t", 7), ("cvt", 7), ("t2t", 7), ("vit_b", 14)]
)
def test_help_of_drloc_recipes_has_the_scale_of_the_public_code(name, positions):
    """It does not divide offsets by the positions of the grid; ViT-B's is not pooled there."""
    recipe = RECIPES[f"{name}_drloc"]
    scaled = recipe().objective.drloc.weight * positions
    assert re.search(rf"--drloc-weight {scaled:.2g}\b(?!\.\d)", recipe.text)


def test_published_vit_b_of_drloc_has_the_parameters_in_the_help():
    """86.4 M in the paper; without the biases of q, k and v as counted on the public code."""
    about = " ".join(RECIPES["vit_b_drloc"].text.split())
    words = re.search(r"--model-kwargs (qkv_bias=False proj_drop_rate=0.1),", about)[1].split()
    config = with_options(RECIPES["vit_b_drloc"](), model_kwargs=tuple(words))
    counts = re.search(r"([\d,]+) parameters, not ([\d,]+)\.", about).groups()
    want = [int(count.replace(",", "")) for count in counts]
    assert [count_parameters(config), count_parameters(RECIPES["vit_b_drloc"]())] == want
    assert want[0] == 86_540_008


DHVT = {  # peak rate at the recipe's batch, batch, epochs of warm-up, epochs, size
    "cifar_patch4": (1e-3, 512, 5, 300, 32),
    "cifar_patch2": (1e-3, 512, 5, 300, 32),
    "domain": (5e-4, 256, 20, 300, 224),
    "imagenet": (5e-4, 512, 10, 300, 224),
    "100_epochs": (1e-3, 1024, 20, 100, 224),
    "fine_tune": (5e-4, 256, 2, 100, 224),
}


@pytest.mark.parametrize("kind", DHVT)
@pytest.mark.parametrize("size", ["t", "s"])
def test_dhvt_recipes_match_supplementary(size, kind):
    """Sections 2.1, 3.3 and 4.1, and the published commands where it has no value."""
    config = RECIPES[f"dhvt_{size}_{kind}"]()
    assert (
        config.optim.peak_lr,
        config.optim.batch,
        config.optim.warmup_epochs,
        config.optim.epochs,
        config.data.size,
    ) == pytest.approx(DHVT[kind])
    width = {"t": "tiny", "s": "small"}[size]
    stem = {"100_epochs": "domain_patch16", "fine_tune": "imagenet_patch16"}.get(kind, kind)
    assert config.model.name in (f"dhvt_{width}_{stem}", f"dhvt_{width}_{stem}_patch16")
    assert (
        config.objective.name,
        config.mix.mixtoken,
        config.mix.mixup,
        config.mix.cutmix,
        config.labels.smoothing,
    ) == ("ce", False, 0.8, 1.0, 0.1)
    assert (
        config.augment.rand_augment,
        config.augment.erase_probability,
        config.model.drop_path,
    ) == ("rand-m9-mstd0.5-inc1", 0.25, 0.1)
    assert config.optim.weight_decay == (1e-8 if kind == "fine_tune" else 0.05)
    assert config.optim.min_lr == (1e-6 if kind == "fine_tune" else 1e-5)
    assert (config.model.init is tyro.MISSING) == (kind == "fine_tune")
    # Table 10 is trained "under the same training scheme" as DRLoc.
    drloc = RECIPES["swin_t_drloc"]().optim.clip_grad
    assert config.optim.clip_grad == (drloc if kind == "100_epochs" else 0) <= 5
    if "cifar" in kind:
        assert (config.augment.shift, config.data.crop_scale, config.data.crop_pct) == (
            4,
            (1.0, 1.0),
            1.0,
        )
        assert config.augment.shift_border == "black"
    else:
        assert (config.augment.shift, config.data.crop_scale, config.data.crop_pct) == (
            0,
            (0.08, 1.0),
            0.875,
        )


@pytest.mark.parametrize(
    ("name", "filter"),
    [
        ("deit_s_224", "bicubic"),
        ("swin_t_drloc", "bicubic"),
        ("resnet_50_drloc_fine_tune", "bicubic"),
        ("dhvt_t_imagenet", "bicubic"),
        ("dhvt_s_domain", "bicubic"),
        ("dhvt_s_fine_tune", "bicubic"),
        ("swin_t_drloc_published", "bicubic"),
        ("lvvit_s_224_token_label", "bilinear"),
    ],
)
def test_crop_filters_are_those_of_the_papers_code(name, filter):
    """DeiT's, DHVT's and Swin's code: timm's bicubic. Token Labeling's text has no filter."""
    data = RECIPES[name]().data
    assert (data.crop_interpolation, data.eval_interpolation) == (filter, filter)


def test_steps_of_table_3_have_one_filter(monkeypatch):
    """So no step changes the filter beside what its row names."""
    text = (ROOT / "densefeed" / "recipes" / "ABLATIONS.md").read_text()
    steps = table_rows(text.partition("## Table 3")[2].partition("\n## ")[0], 4)
    configs = [parse(line.strip("`"), monkeypatch) for _, line, *_ in steps]
    filters = [(c.data.crop_interpolation, c.data.eval_interpolation) for c in configs]
    assert filters == [("bilinear", "bilinear")] * 8


ABLATIONS = table_rows((ROOT / "densefeed" / "recipes" / "ABLATIONS.md").read_text(), 4)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("row", "line", "count", "paper"), ABLATIONS, ids=lambda cell: cell.strip("`")[16:]
)
def test_ablation_commands_and_parameters(row, line, count, paper, monkeypatch):
    config = parse(line.strip("`"), monkeypatch)
    objective_for(config)
    cifar = "dhvt" in line or "bootstrapping" in line
    assert count_parameters(config, 100 if cifar else 1000) == int(count.replace(",", ""))
    for figure in paper.split(" / ") if paper not in ("diverges", "figure") else ():
        assert (61 if cifar else 79) < float(figure) < 85.5


def test_ablation_table_is_complete():
    """Tables 3 to 9 have 8, 7, 3, 3, 5, 4 and 5 rows, section 4.3 one.

    DHVT's Tables 2 to 5 have 4, 3, 7 and 4 rows, its section 2.2.2 three. Bootstrapping's Tables 4
    and 5 have 7 and 4, its Figure 6 four values of three options, and Figure 7 the 6 blocks of
    ViT-S and the 12 of ViT-B. No two neighbors are the same run.
    """
    rows = (8, 7, 3, 3, 5, 4, 5, 1, *(4, 3, 3, 7, 4), *(7, 4, 12, 18))
    assert len(ABLATIONS) == sum(rows)
    assert all(one[1] != other[1] for one, other in pairwise(ABLATIONS))


CURVES = table_rows((ROOT / "densefeed" / "recipes" / "ABLATIONS.md").read_text(), 3)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("curve", "line", "count"), CURVES, ids=lambda cell: cell[-24:])
def test_curves_of_dhvt_are_commands_of_unlike_models(curve, line, count, monkeypatch):
    config = parse(line.strip("`"), monkeypatch)
    assert count_parameters(config, 100) == int(count.replace(",", ""))
    assert len({other[2] for other in CURVES}) == len(CURVES) == 9


COMPARED = [
    row
    for row in table_rows((ROOT / "docs/reference/comparison-models.md").read_text(), 5)
    if not row[1].isdigit()
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("table", "theirs", "ours", "count", "paper"), COMPARED, ids=lambda cell: cell.strip("`")
)
def test_docs_parameters_of_paper_models(table, theirs, ours, count, paper):
    """Exact for the models here.

    Those of the paper agree to rounding and one million, except those that the text below the table
    names.
    """
    name, *arguments = ours.replace("`", "").split()
    with meta_device():
        model = timm.create_model(
            name, **{key: int(value) for key, value in (word.split("=") for word in arguments)}
        )
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert f"{counted:,}" == count
    named = {("DHVT, 10", "ResNet-50"), ("DHVT, 10", "Swin-T"), ("Token Labeling, 10", "ViT-L/16")}
    assert (abs(counted / 1e6 - float(paper.removesuffix(" M"))) > 1) == ((table, theirs) in named)


COSTS = [
    row
    for row in table_rows((ROOT / "docs/reference/comparison-models.md").read_text(), 5)
    if row[1].isdigit()
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("row", "pixels", "model", "here", "paper"), COSTS)
def test_docs_multiply_adds_of_lvvit(row, pixels, model, here, paper):
    """Within 1.3 % of the paper's, but for 16.0, which the text below the table names."""
    with meta_device():
        counted = costs_by_name(model.strip("`"), int(pixels))[0].whole
    assert f"{counted:.2f}" == here
    assert (counted == pytest.approx(float(paper), rel=0.013)) == (paper != "16.0")


def test_docs_list_all_models_of_the_papers():
    """Models of DHVT's Tables 7, 9, 10 and 11, and all models of this package.

    Of the 35 rows of Table 9, 12 are missing, which timm does not have.
    """
    assert [sum(row[0] == f"DHVT, {table}" for row in COMPARED) for table in (9, 7, 10, 11)] == [
        23,
        5,
        6,
        4,
    ]
    built = {row[2].replace("`", "").split()[0] for row in COMPARED}
    assert set(timm.list_models(["dhvt*", "cvt*", "t2t*"], exclude_filters="*micro")) <= built


@pytest.mark.slow
def test_outside_help_lists_papers_and_each_its_recipes(command):
    """The list of all recipes was the first screen of --help, and 400 lines long."""
    listed, own, *papers = (
        command("train.py", *words, "--help")
        for words in ([], ["lvvit_s_224_relabel"], *([short] for short in PAPERS))
    )
    assert all(done.returncode == 0 for done in (listed, own, *papers))
    assert len(listed.stdout.splitlines()) < 35
    counts = re.findall(r"^ +(\d+) recipes, e\.g\. ", listed.stdout, re.M)
    assert sum(map(int, counts)) == len(RECIPES)
    assert re.findall(r"^  (\w+)  +\S", listed.stdout, re.M) == list(PAPERS)
    names = [re.findall(r"^    (\w+)$", done.stdout, re.M) for done in papers]
    assert [str(len(found)) for found in names] == counts
    assert [name for found in names for name in found] == list(RECIPES)
    assert "Not run here" not in listed.stdout
    assert "Not run here." in own.stdout


def test_error_on_mixtoken_with_cutmix():
    with pytest.raises(UserError, match="--no-mixtoken"):
        with_options(RECIPES["lvvit_s_224_standard"](), mixtoken=True)

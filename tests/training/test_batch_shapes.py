"""Training with aspect buckets and several scales: images, masks and targets of one shape, models
that take it or are refused by name.
"""

import math
from collections import Counter

import pytest
import torch
from timm.models.naflexvit import batch_patchify

import densefeed
import densefeed.train as training
from densefeed.models import checkpoints
from densefeed.models.lvvit import LVViT
from densefeed.models.meta_device import meta_device
from densefeed.objectives import base
from densefeed.objectives.drloc import LocalizedModel
from densefeed.pipelines.mixing import Mix, box_map
from densefeed.system.errors import UserError
from densefeed.training.speed import mean_flops_share, training_flops

from ..runs import model_for, train_loader, wrapped_and_first_batch

BUCKETS = dict(aspects=(0.75, 4 / 3), side_multiple=8, size=48)
SHAPES = [(56, 40), (40, 56)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "fields", [BUCKETS | dict(multi_scale=(48, 64)), dict(sizes=((0, 16), (2, 48)))]
)
def test_images_mask_and_targets_have_the_shape_of_the_batch(micro, tmp_path, monkeypatch, fields):
    """The plan's shapes reach the network; tokens of 8 px have a mask and a target each.

    Each shape is tried before the first step. Evaluations, of a batch of 4 and one of 1, have the
    size of the model.
    """
    seen, evaluated, grids = [], [], []
    forward, targets = LVViT.forward, base.sparse_targets

    def spied(model, image, mix_PP=None):
        if model.training and not image.is_meta:
            seen.append((tuple(image.shape[2:]), tuple(mix_PP.shape)))
        elif not image.is_meta:
            evaluated.append(tuple(image.shape[2:]))
        return forward(model, image, mix_PP)

    def spied_targets(batch, spec, grid, *rest):
        grids.append(grid)
        made = targets(batch, spec, grid, *rest)
        assert made.weight.shape[1] == (1 if grid == 1 else math.prod(grid))
        return made

    monkeypatch.setattr(LVViT, "forward", spied)
    monkeypatch.setattr(base, "sparse_targets", spied_targets)
    config = micro(tmp_path / "run", epochs=3, ema=0.0, **fields)
    training.train(config)
    loader = train_loader(config)
    want = [loader.plan.shape(epoch, step) for epoch in range(3) for step in range(3)]
    loader.close()
    assert len(set(want)) > 1
    assert seen == [(shape, (shape[0] // 8, shape[1] // 8)) for shape in want]
    assert grids == [grid for _, tokens in seen for grid in (tokens, 1)]
    assert evaluated == config.data.shapes + [(config.data.size,) * 2] * 2 * 3
    model, _ = checkpoints.build(tmp_path / "run" / "last.pt")
    assert model.grid_size == config.data.size // 8


def test_mixtoken_exchanges_tokens_of_an_oblong_grid(micro, tmp_path):
    """Patch embeddings inside the box are the partner's, at the same row and column."""
    model = model_for(micro(tmp_path, **BUCKETS)).train()
    mask = box_map(Mix(torch.tensor([1.0, 2, 6, 4]), torch.tensor(0.0), (7, 5)), (7, 5)) > 0.5
    assert mask.sum() == 10
    image = torch.randn(2, 3, 56, 40)
    mixed, plain = (model._embed(image, each)[:, 1:].unflatten(1, (7, 5)) for each in (mask, None))
    assert torch.equal(mixed[0][~mask], plain[0][~mask])
    # Both have the position of their place.
    assert torch.equal(mixed[0][mask], plain[1][mask])
    assert not torch.equal(mixed[0][mask], plain[0][mask])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            dict(model="resmlp_12_224", objective="ce", mixtoken=False),
            r"resmlp_12_224 cannot train at 56 x 40 px .*; choose other --aspects, another "
            "--side-multiple or another model$",
        ),
        (
            dict(side_multiple=10, size=40),
            r"lvvit_micro cannot train at 30 x 40 px \(inputs of 30 x 40 pixels must be multiples",
        ),
        (
            dict(model="dhvt_tiny_cifar_patch4", side_multiple=6),
            "would see partial patches at .* choose a multiple of 4 px as --side-multiple",
        ),
        (
            dict(
                model="bootstrapping_vit_micro", objective="ce", mixtoken=False, bootstrap="shared"
            ),
            "--bootstrap compares maps of square inputs; remove --aspects",
        ),
        # 9 x 16 tokens are as many as the 12 x 12 of its tables, which are not resized.
        (
            dict(
                model="levit_128s",
                objective="ce",
                mixtoken=False,
                aspects=(16 / 9,),
                side_multiple=16,
                size=192,
            ),
            "levit_128s cannot train at 144 x 256 px",
        ),
        (dict(order="blocks"), "--order random, or remove --aspects"),
        (dict(aspects=(1.0, 0.75)), "--aspects 1 0.75: give the width / height"),
    ],
)
def test_what_cannot_train_on_buckets_is_refused(micro, tmp_path, fields, said):
    with pytest.raises(UserError, match=said):
        training.train(micro(tmp_path / "run", **BUCKETS | fields))


NAFLEX = dict(
    model="naflexvit_base_patch16_gap",
    model_kwargs=("embed_dim=24", "depth=2", "num_heads=2", "patch_size=8", "reg_tokens=0"),
)


@pytest.mark.parametrize(
    "fields",
    [NAFLEX, dict(model="test_vit", side_multiple=16, size=64), dict(model="test_resnet")],
    ids=["naflex", "vit", "cnn"],
)
def test_models_of_timm_train_on_buckets(micro, tmp_path, fields):
    fields = BUCKETS | dict(objective="ce", mixtoken=False, cutmix=1.0, drop_path=0.0) | fields
    result = training.train(micro(tmp_path / "run", epochs=1, **fields))
    assert 0 <= result["top1"] <= 1
    model, _ = checkpoints.build(tmp_path / "run" / "last.pt")
    assert model(torch.zeros(1, 3, 64, 32)).shape == (1, 2)


def test_naflex_takes_images_as_it_takes_their_patches(micro, tmp_path):
    """The plain tensor of a bucket, and timm's dictionary of patches and coordinates."""
    model = model_for(micro(tmp_path, **BUCKETS | dict(objective="ce", mixtoken=False) | NAFLEX))
    image = torch.randn(2, 3, 56, 40)
    patches, (rows, columns) = batch_patchify(image, (8, 8))
    assert (rows, columns) == (7, 5)
    coordinates = torch.cartesian_prod(torch.arange(7), torch.arange(5)).expand(2, -1, -1)
    words = {"patches": patches, "patch_coord": coordinates}
    words["patch_valid"] = torch.ones(2, 35, dtype=torch.bool)
    torch.testing.assert_close(model.eval()(image), model(words), rtol=1e-4, atol=1e-5)


def test_drloc_draws_pairs_in_an_oblong_grid(micro, tmp_path):
    config = micro(tmp_path, **BUCKETS | dict(aspects=(0.75,), drloc="l1", drloc_grid=0))
    trained, run = wrapped_and_first_batch(config)
    assert isinstance(trained, LocalizedModel)
    assert tuple(run.batch.image.shape[2:]) == (56, 40)
    assert run.loss(trained.train(), (7, 5), run.mixing.draw(0, 0, (56, 40), (7, 5))).isfinite()
    with pytest.raises(UserError, match="the sizes of its inputs change the number of offsets"):
        wrapped_and_first_batch(micro(tmp_path, **BUCKETS | dict(drloc="ce", drloc_grid=0)))


def test_a_loop_of_ones_own_reads_the_shape_from_the_batch(micro, packed, tmp_path):
    model = model_for(micro(tmp_path, **BUCKETS)).train()
    options = {**BUCKETS, "multi_scale": (48, 64)}
    with densefeed.open_loader(packed[0], batch=4, threads=1, **options) as loader:
        step, shapes = densefeed.build_step(loader, model, mixtoken=True), set()
        for batch in step.batches(1):
            shapes.add(tuple(batch.image.shape[2:]))
            assert step(model, batch).isfinite()
        assert shapes == {loader.plan.shape(1, step) for step in range(3)}
        assert len(shapes) > 1


def test_the_mfu_of_an_interval_counts_its_own_shapes(micro, tmp_path):
    with meta_device():
        model = model_for(micro(tmp_path))
    flops = [training_flops(model, shape) for shape in SHAPES]
    # As many tokens, as many operations.
    assert flops[0] == flops[1] != training_flops(model, 48)
    loader = train_loader(micro(tmp_path, **BUCKETS | dict(multi_scale=(48, 64))))
    shapes = [loader.plan.shape(*divmod(step, 3)) for step in range(2, 6)]
    loader.close()
    share = {shape: float(number) for number, shape in enumerate(loader.plan.shapes())}
    want = sum(count * share[shape] for shape, count in Counter(shapes).items()) / 4
    assert mean_flops_share(share, loader.plan, 6, 4) == pytest.approx(want)
    assert mean_flops_share({}, loader.plan, 6, 4) is None

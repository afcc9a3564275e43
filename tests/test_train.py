"""Training runs: objectives, exact resuming, and errors for invalid configurations."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from timm.layers import DropPath

import densefeed.train as training
from densefeed.models import checkpoints
from densefeed.models.token_transformer import TokenLogits
from densefeed.objectives import build_objective
from densefeed.objectives.base import StepContext, step_loss
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.mixing import Mix
from densefeed.pipelines.open import DataOptions
from densefeed.pipelines.targets import TargetRules, sparse_targets
from densefeed.recipes import RECIPES, command_line
from densefeed.storage.images import Images
from densefeed.system.errors import UserError
from densefeed.system.options import flag, leaves, with_options
from densefeed.training import setup
from densefeed.training.build import build_model
from densefeed.training.config import Config
from densefeed.training.evaluation import Metrics
from densefeed.training.ranks import ALONE
from densefeed.training.run_checkpoints import Checkpoints

from .runs import first_batch, model_for, objective_for, records, train_loader
from .stores import write_store


def config(packed, out, **fields):
    small = dict(
        loader="ffcv",
        batch=4,
        epochs=2,
        size=32,
        ema=0.9,
        drop_path=0.2,
        threads=2,
        eval_every=1,
        log_every=1,
        device="cpu",
    )
    return with_options(
        RECIPES["lvvit_micro_token_label"](),
        data=packed[0],
        val=packed[1],
        out=out,
        **(small | fields),
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "fields",
    [
        dict(objective="token-label"),
        dict(objective="token-label", mixtoken=False, ema=0.0),
        dict(objective="relabel"),
        dict(objective="ce"),
        dict(model="nfnet_micro", objective="ce", mixtoken=False),
        dict(model="nfnet_micro", objective="ce", mixtoken=False, sizes=((0, 32), (1, 48))),
        dict(order="blocks"),
        dict(mixtoken=True),
        dict(mixtoken=True, mix_label="regions"),
        dict(cutmix=1.0, mixup=0.8),
        dict(mixtoken=True, mixup=0.8),
        dict(mixtoken=True, mixup=0.8, mix_label="regions", objective="relabel"),
        dict(cutmix=1.0, mix_label="regions"),
        dict(cutmix=1.0, objective="ce"),
        dict(model="nfnet_micro", objective="relabel", cutmix=1.0, mix_label="regions"),
        dict(rand_augment="rand-m9-mstd0.5-inc1", erase_probability=0.5, mixtoken=True),
        dict(color_jitter=(0.4,)),
        dict(color_jitter=(0.4, 0.4, 0.4, 0.1), erase_probability=0.5),
        dict(
            geometry="published",
            outside="uniform",
            temperature=2.0,
            ground_truth="published",
            mixtoken=True,
        ),
        dict(maps_on_device=True, objective="ce"),
        dict(model_kwargs=("depth=2", "mlp_ratio=4.0")),
        dict(
            model="dhvt_tiny_cifar_patch4", model_kwargs=("depth=2", "embed_dim=32"), mixtoken=True
        ),
        dict(
            model="dhvt_tiny_cifar_patch2",
            model_kwargs=("depth=1", "embed_dim=32", "fused_head=True"),
        ),
        dict(
            model="dhvt_tiny_cifar_patch4",
            model_kwargs=("depth=2", "embed_dim=32"),
            objective="ce",
            mixtoken=False,
            cutmix=1.0,
            shift=4,
        ),
        dict(
            model="dhvt_tiny_cifar_patch4",
            model_kwargs=("depth=2", "embed_dim=32"),
            mixtoken=True,
            shift=4,
            grad_checkpointing=True,
        ),
        dict(
            model="t2t_vit_14",
            model_kwargs=("depth=1", "embed_dim=24", "token_dim=8"),
            mixtoken=True,
        ),
        dict(
            model="cvt_13",
            model_kwargs=("depths=(1,1,1)", "dims=(8,16,24)", "num_heads=(1,2,3)"),
            objective="relabel",
            mixtoken=False,
        ),
        dict(
            model="cvt_13_drloc",
            model_kwargs=("depths=(1,1,1)", "dims=(8,16,24)", "num_heads=(1,2,3)"),
            objective="ce",
            mixtoken=False,
        ),
    ],
)
def test_every_objective_trains_and_writes_a_complete_run_folder(packed, tmp_path, fields):
    epochs = 2 if "sizes" in fields else 1
    result = training.train(config(packed, tmp_path / "run", epochs=epochs, **fields))
    assert 0 <= result["top1"] <= 1
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "best.pt",
        "checkpoints",
        "config.json",
        "environment.json",
        "last.pt",
        "metrics.jsonl",
        "result.json",
        "tensorboard",
    }
    steps = records(tmp_path / "run")
    assert [r["step"] for r in steps] == list(range(1, 3 * epochs + 1))
    model, checkpoint = checkpoints.build(tmp_path / "run" / "last.pt")
    assert checkpoint["class_names"] == ["cat", "dog"]
    assert model(torch.zeros(2, 3, 32, 32)) is not None


def test_ffcv_and_folder_loaders_give_equal_losses(packed, folder, maps, tmp_path):
    """The plan, the crops and the labels are equal, and so are the losses."""
    training.train(config(packed, tmp_path / "ffcv"))
    training.train(config((folder, folder), tmp_path / "folder", loader="folder", score_maps=maps))
    for one, other in zip(records(tmp_path / "ffcv"), records(tmp_path / "folder"), strict=True):
        assert one["loss"] == other["loss"]


AUGMENTED = dict(rand_augment="rand-m9-mstd0.5-inc1", erase_probability=0.5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fused", [False, True])
def test_maps_on_the_device_and_a_fused_head_keep_the_loss(packed, tmp_path, fused):
    """Exactly with resident maps; to 1e-4 with the fused head, which sums in another order."""
    common = AUGMENTED | dict(mixtoken=True)
    training.train(config(packed, tmp_path / "plain", **common))
    head = dict(model_kwargs=("fused_head=True",))
    other = head if fused else dict(maps_on_device=True)
    training.train(config(packed, tmp_path / "other", **common, **other))
    for one, same in zip(records(tmp_path / "plain"), records(tmp_path / "other"), strict=True):
        assert same["loss"] == (pytest.approx(one["loss"], rel=1e-4) if fused else one["loss"])


def first_step(run, device):
    """The network and the first batch of a run."""
    torch.manual_seed(0)
    model = model_for(run)
    mean, std = model.pretrained_cfg["mean"], model.pretrained_cfg["std"]
    return model.to(device), first_batch(run, device, mean, std)


@pytest.mark.parametrize(
    "fields",
    [
        dict(mixtoken=True),
        dict(cutmix=1.0, mix_label="regions"),
        dict(mixup=0.8, ground_truth="intended"),
        dict(objective="ce"),
    ],
)
def test_step_does_not_sync_with_the_host(packed, tmp_path, no_host_read, fields):
    """No value is read back from the augmented batch to the gradient.

    Augmentation is tested in pipelines/augment/test_augmentation.py.
    """
    run = config(packed, tmp_path / "run", **AUGMENTED, **fields)
    model, first = first_step(run, torch.device("cpu"))
    mix = first.mixing.draw(0, 0, 32, 4) if run.mix else None
    with no_host_read():
        first.loss(model, 4, mix).backward()
    assert any(
        parameter.grad is not None and parameter.grad.any() for parameter in model.parameters()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [dict(mixtoken=True, mixup=0.8), dict(cutmix=1.0, mixup=0.8, mix_label="regions")]
)
def test_one_compiled_step_handles_every_box(packed, tmp_path, fields):
    """No graph break, no recompilation, and the same loss and gradient as in eager mode."""
    run = config(packed, tmp_path / "run", drop_path=0.0, **AUGMENTED, **fields)
    model, first = first_step(run, torch.device("cpu"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(step_loss, fullgraph=True, backend="aot_eager", dynamic=False)
    for number in range(3):
        context, grads = first.context(4, first.mixing.draw(0, number, 32, 4)), []
        for function in (step_loss, step):
            model.zero_grad()
            loss = function(first.objective, model, first.batch, context, None)
            loss.backward()
            grads.append(
                (loss.detach(), *(parameter.grad.clone() for parameter in model.parameters()))
            )
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)
        if number == 0:
            compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_step_does_not_sync_and_can_be_captured(packed, tmp_path):
    """Use CUDA's sync debug mode around the step, then replay one CUDA graph for every box."""
    run = config(packed, tmp_path / "run", drop_path=0.0, mixtoken=True, device="cuda", **AUGMENTED)
    device = torch.device("cuda")
    model, first = first_step(run, device)
    mixing = first.mixing
    mix = mixing.draw(0, 0, 32, 4).to(device)

    def step():
        loss = first.loss(model, 4, mix, torch.bfloat16)
        loss.backward()
        return loss

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        captured = step()
    for number in (1, 2):
        mix.box_tlbr.copy_(mixing.draw(0, number, 32, 4).box_tlbr)
        graph.replay()
        eager = first.loss(model, 4, mix, torch.bfloat16)
        torch.testing.assert_close(captured, eager, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_captured_updates_equal_compiled_ones(packed, tmp_path):
    """Twenty steps; the graph begins with the fourth."""
    fields = dict(mixtoken=True, device="cuda", precision="fp32", epochs=7, **AUGMENTED)
    for how in ("whole", "graph"):
        training.train(config(packed, tmp_path / how, compile=how, **fields))
    whole, graph = ([r["loss"] for r in records(tmp_path / how)] for how in ("whole", "graph"))
    assert graph == pytest.approx(whole, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "fields",
    [
        dict(),
        dict(microbatch=2, clip_grad=1.0),
        dict(precision="fp16"),
        dict(compile="never"),
        dict(compile="graph"),
    ],
)
def test_gpu_update_does_not_sync(packed, tmp_path, monkeypatch, fields):
    """Use CUDA's sync debug mode from the third step on.

    It covers losses, gradients, guard, optimizer and EMA weights.
    """
    update = training.update

    def trapped(student, ranks, step, losses):
        torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")
        try:
            return update(student, ranks, step, losses)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(training, "update", trapped)
    result = training.train(
        config(packed, tmp_path / "run", mixtoken=True, device="cuda", **AUGMENTED, **fields)
    )
    assert 0 <= result["top1"] <= 1


DRLOC = dict(drloc="l1", drloc_grid=2)


# test_captured_update.py compares the updates of graph.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "more"), [("blocks", {}), ("graph", {}), ("blocks", DRLOC), ("whole", DRLOC)]
)
def test_compiled_training_equals_eager_training(packed, tmp_path, monkeypatch, how, more):
    """Uses the aot_eager backend, because code generation takes a minute."""
    compiler, modes = torch.compile, []

    def traced(function, mode=None, **options):
        modes.append(mode)
        return compiler(function, backend="aot_eager", **options)

    fields = dict(epochs=1, drop_path=0.0, log_every=1, model_kwargs=("depth=1",), **more)
    training.train(config(packed, tmp_path / "plain", **fields))
    monkeypatch.setattr(torch, "compile", traced)
    torch._dynamo.reset()
    training.train(config(packed, tmp_path / how, compile=how, **fields))
    assert set(modes) == {None}
    losses = [[r["loss"] for r in records(tmp_path / name)] for name in ("plain", how)]
    # aot_eager calls the kernels of eager mode: the losses of the three steps were equal bit by bit
    # with PyTorch's default and AVX2 kernels. Sums in another order differ by units of 2^-23.
    assert losses[1] == pytest.approx(losses[0], rel=64 * 2**-23)


def test_the_first_batch_is_checked_before_the_first_step(packed, tmp_path, monkeypatch):
    """A Window that no store of ours would hold."""
    batches = ThreadedLoader.batches

    def spoilt(loader, epoch, start=0):
        for batch in batches(loader, epoch, start):
            yield batch if batch.window is None else batch._replace(window=batch.window * torch.nan)

    monkeypatch.setattr(ThreadedLoader, "batches", spoilt)
    with pytest.raises(
        UserError,
        match=r"the score maps of .*train.beton: sample \d+ has a Window that is not part",
    ):
        training.train(config(packed, tmp_path / "run"))
    assert not (tmp_path / "run" / "last.pt").exists()


def test_mixed_step_equals_the_published_formula(packed, tmp_path):
    """Compare with CutMix by slices and dense targets in float64.

    The middle sample of the batch of 3 is its own partner.
    """
    fields = dict(cutmix=1.0, objective="token-label", size=32, smoothing=0.1)
    torch.manual_seed(0)
    cls, tokens = torch.randn(3, 2), torch.randn(3, 16, 2)
    run = config(packed, tmp_path / "run", batch=3, **fields)
    loader = train_loader(run)
    batch = next(loader.batches(0))
    mix = Mix(torch.tensor([8.0, 0.0, 20.0, 32.0]), torch.tensor(0.0), 32)
    rules = TargetRules(smoothing=0.1)
    context = StepContext(loader.score_maps, 4, mix)
    loss = objective_for(run).loss(TokenLogits(cls, tokens), batch, context)
    loader.close()

    def dense(grid):
        targets = sparse_targets(batch, loader.score_maps, grid, rules)
        full = targets.base.double()[..., None].expand(-1, -1, 2).clone()
        index = targets.palette[:, None].expand(-1, grid * grid, -1)
        return full.scatter_add_(2, index, targets.extra.double()), targets.weight.double()

    whole, seen = dense(1)
    area = 12 / 32
    # Token rows of 8 pixels; pixel rows 8 to 20 are exchanged.
    share = torch.tensor([0.0, 1.0, 0.5, 0.0], dtype=torch.float64).repeat_interleave(4)
    want = 0.0
    for logits, target, weight, part in (
        (cls[:, None], whole, seen, area),
        (tokens, *dense(4), share),
    ):
        own, partner = (1 - part) * weight, part * weight.flip(0)
        # Weighted targets, not yet normalized.
        mixed = own[..., None] * target + partner[..., None] * target.flip(0)
        losses = -(mixed * logits.double().log_softmax(-1)).sum()
        want += (
            (1.0 if logits.shape[1] == 1 else run.objective.token_labeling.token_weight)
            * losses
            / (own + partner).sum()
        )
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)


def test_repeats_make_an_epoch_longer(packed, tmp_path):
    """11 images in batches of 4 give three steps per epoch, and six with two repeats."""
    training.train(config(packed, tmp_path / "run", epochs=1, repeats=2))
    assert [r["step"] for r in records(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_cooldown_adds_epochs_at_the_minimum_rate(packed, tmp_path):
    """Two epochs of three steps with a rate per epoch, plus one cooldown epoch.

    The log holds the rates that the optimizer used.
    """
    fields = dict(
        cooldown_epochs=1, lr_updates="epoch", warmup_epochs=1, lr=3e-3, lr_batch=4, min_lr=1e-3
    )
    result = training.train(config(packed, tmp_path / "run", **fields))
    assert [r["lr"] for r in records(tmp_path / "run")] == pytest.approx(
        [1e-6] * 3 + [2e-3] * 3 + [1e-3] * 3
    )
    assert result["epochs"] == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("order", "blocks"),
        ("repeats", 2),
        ("sizes", ((0, 16), (1, 32))),
        ("multi_scale", (16, 32)),
        ("aspects", (1.0,)),
    ],
)
def test_order_repeats_and_shapes_cannot_change_on_resume(packed, tmp_path, field, value):
    training.train(config(packed, tmp_path / "run", epochs=1))
    with pytest.raises(UserError, match=rf"was trained with {field}="):
        training.train(config(packed, tmp_path / "run", epochs=1, resume="auto", **{field: value}))


def test_finished_run_is_not_overwritten_or_resumed_with_other_options(packed, tmp_path):
    training.train(config(packed, tmp_path / "run", epochs=1))
    with pytest.raises(UserError, match=r"holds a run already; continue it with --resume auto"):
        training.train(config(packed, tmp_path / "run", epochs=1))
    with pytest.raises(UserError, match=r"trained with lr=0.001;"):
        training.train(config(packed, tmp_path / "run", epochs=1, lr=1.0, resume="auto"))


@pytest.mark.parametrize("log_every", [1, 1000])
def test_nonfinite_loss_stops_the_run_before_a_checkpoint(packed, tmp_path, log_every):
    """Also if an epoch is shorter than log_every."""
    with pytest.raises(
        UserError,
        match=r"the gradients of step 2 are not finite; the output of .* is the first that is not",
    ):
        training.train(
            config(
                packed, tmp_path / "run", lr=1e30, epochs=4, warmup_epochs=0, log_every=log_every
            )
        )
    # The weights after step 1 are finite, but 1e30.
    assert not (tmp_path / "run" / "last.pt").exists()
    assert not (tmp_path / "run" / "result.json").exists()


def test_the_config_of_another_version_is_refused_with_its_folder(packed, tmp_path):
    wanted, out = config(packed, tmp_path / "run", epochs=1), tmp_path / "run"
    training.train(wanted)
    kept = Checkpoints(out, 2)
    path = kept.folder / kept.newest()
    checkpoint = checkpoints.load(path)
    del checkpoint["config"]["optim"]["clip_grad"]
    torch.save(checkpoint, path)
    manifest = json.loads(kept.manifest.read_text())
    manifest[-1]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    kept.manifest.write_text(json.dumps(manifest))
    message = f"the run in {out} was written by another version of densefeed; train again"
    with pytest.raises(UserError, match=message):
        training.train(config(packed, out, epochs=1, resume="auto"))


def test_third_party_checkpoint_is_not_resumed(packed, tmp_path):
    (tmp_path / "run").mkdir()
    torch.save({"model": {}}, tmp_path / "run" / "last.pt")
    with pytest.raises(UserError, match=r"holds no checkpoint of densefeed"):
        training.train(config(packed, tmp_path / "run", resume="auto"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(model_kwargs=("num_classes=5",)), "--model-kwargs num_classes: data and objective"),
        (dict(lr_batch=0), "--lr-batch is 0, and must be at least 1"),
        (dict(crop_scale=(0.0, 0.0)), "--crop-scale 0 0: give the smallest"),
        (dict(smoothing=2.0), "--smoothing is 2, and must be from 0 to 0.999"),
        (dict(device="foo"), "--device foo cannot be used here"),
        (dict(mixtoken=True, cutmix=1.0), "MixToken already exchanges a box in every step"),
        (dict(objective="ce", mix_label="regions"), "pools dense labels"),
        (
            dict(ground_truth="intended", mixtoken=True, mix_label="regions"),
            "mixes one label per image",
        ),
        (dict(rand_augment="augmix-m5"), "--rand-augment 'augmix-m5' is not a RandAugment string"),
        (dict(erase_probability=2.0), "--erase-probability is 2, and must be from 0 to 1"),
        (dict(temperature=0.0), "--temperature is 0, and must be at least 0.001"),
        (dict(cutmix=float("nan")), "--cutmix is nan, and must be at least 0"),
        (dict(lr=float("nan")), "--lr is nan, and must be at least 1e-12"),
        (dict(drop_path=2.0), "--drop-path is 2, and must be from 0 to 0.99"),
        (dict(ema=2.0), "--ema is 2, and must be from 0 to 1"),
        (dict(token_weight=float("inf")), "--token-weight is inf"),
        (dict(color_jitter=(0.1, 0.2)), "must have one, three or four"),
        (dict(color_jitter=(1e308,)), "must be from 0 to 10"),
        (dict(color_jitter=(float("nan"),)), "must be from 0 to 10"),
        (dict(color_jitter=(0.1, 0.1, 0.1, 0.6)), "at most 0.5"),
        (dict(rand_augment="rand-m9-n101"), "is 101 operations per image; lower"),
        (
            dict(color_jitter=(0.4,), rand_augment="rand-m9"),
            "--color-jitter is off beside --rand-augment",
        ),
        (dict(rand_augment="rand-m9-rotate"), "is not a RandAugment string"),
        (dict(model_kwargs=("depth",)), "--model-kwargs 'depth' is not NAME=VALUE"),
        (dict(model_kwargs=("depth=two",)), "--model-kwargs 'depth=two' is not NAME=VALUE"),
        (dict(model_kwargs=("token_dim=1",)), "lvvit_micro cannot be built: .*token_dim"),
        (dict(model_kwargs=("patch_size=0",)), "--model-kwargs patch_size is not above 0"),
        (dict(model_kwargs=("stem_width=-1",)), "lvvit_micro cannot be built: Trying to create"),
        (
            dict(model="test_vit", objective="ce", mixtoken=False, model_kwargs=("num_heads=7",)),
            r"test_vit cannot be built: .* by num_heads; change --model-kwargs, or give it bare",
        ),
        (dict(seed=2**70), "--seed is"),
        (
            dict(model_kwargs=("no_such=1",)),
            "--model-kwargs no_such is not an argument that a checkp",
        ),
        (dict(model_kwargs=("checkpoint_path='x'",)), "--model-kwargs checkpoint_path is not an"),
        (
            dict(model="vgg11", objective="ce", mixtoken=False, drop_path=0.1),
            "vgg11 cannot be built: .*give --drop-path 0",
        ),
        (dict(repeats=0), "--repeats is 0, and must be at least 1"),
        (dict(repeats=3), "a batch of 4 is not a multiple of the 3 repeats"),
        (dict(sizes=((1, 16),)), "epochs ascend from 0"),
        (
            dict(sizes=((0, 16), (1, 20))),
            r"lvvit_micro cannot train at 20 px \(inputs of 20 x 20 pixels must be multiples",
        ),
    ],
)
def test_invalid_values_are_rejected(packed, tmp_path, fields, said):
    with pytest.raises(UserError, match=said):
        training.train(config(packed, tmp_path / "run", **fields))


@pytest.mark.parametrize(
    ("objective", "fused"), [("token-label", True), ("relabel", False), ("ce", False)]
)
def test_of_many_classes_the_token_heads_logits_are_left_to_the_loss(
    packed, tmp_path, objective, fused
):
    run = config(packed, tmp_path / "run", objective=objective)
    assert model_for(run, 5000).fused_head == fused
    assert not model_for(run, 4000).fused_head
    if fused:
        never = with_options(run, model_kwargs=("fused_head=False",))
        assert not model_for(never, 5000).fused_head


def test_timm_transformer_is_built_for_the_size(packed, tmp_path):
    training.train(
        config(
            packed,
            tmp_path / "run",
            model="test_vit",
            objective="ce",
            mixtoken=False,
            size=48,
            epochs=1,
        )
    )
    model, _ = checkpoints.build(tmp_path / "run" / "last.pt")
    assert model(torch.zeros(1, 3, 48, 48)).shape == (1, 2)


def test_other_models_train_with_progressive_sizes_or_raise(packed, tmp_path):
    """A timm transformer resamples its position embedding; an MLP-Mixer has a fixed token count."""
    sizes = dict(objective="ce", mixtoken=False, size=48, sizes=((0, 32), (1, 64)))
    result = training.train(config(packed, tmp_path / "run", model="test_vit", **sizes))
    assert 0 <= result["top1"] <= 1
    model, _ = checkpoints.build(tmp_path / "run" / "last.pt")
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 2)
    with pytest.raises(
        UserError,
        match=r"resmlp_12_224 cannot train at 32 px .*; choose other --sizes or another model$",
    ):
        training.train(config(packed, tmp_path / "mlp", model="resmlp_12_224", **sizes))
    with pytest.raises(
        UserError,
        match=r"levit_128s cannot train at 100 px .*; choose another --size or another model$",
    ):
        model_for(
            config(packed, tmp_path, model="levit_128s", objective="ce", mixtoken=False, size=100)
        )


def test_the_best_checkpoint_is_chosen_by_the_weights_that_tools_load(
    packed, tmp_path, monkeypatch
):
    """The model is best after the first of three evaluations, its EMA after the second."""
    accuracies = iter([0.9, 0.1, 0.5, 0.4, 0.6, 0.3])  # of model and EMA in turn

    def evaluate(*_: object) -> Metrics:
        return Metrics(next(accuracies), top5=1.0, loss=1.0, images=5)

    monkeypatch.setattr(training, "evaluate_sync", evaluate)
    run = config(packed, tmp_path / "run", epochs=3, eval_every=1, keep=1)
    assert run.optim.ema
    training.train(run)
    step = records(tmp_path / "run", "val")[1]["step"]
    assert (tmp_path / "run" / "best.pt").resolve().name == f"step-{step:08d}.pt"


def test_outside_an_evaluation_of_outputs_that_are_not_finite_makes_no_best_checkpoint(
    packed, tmp_path, monkeypatch, capsys
):
    """The EMA, which tools load, diverges after the first of two evaluations."""
    found = iter([(0.5, 0), (0.2, 0), (0.9, 0), (0.8, 4)])  # of model and EMA in turn

    def evaluate(*_: object) -> Metrics:
        top1, nonfinite = next(found)
        return Metrics(top1, top5=1.0, loss=1.0, images=5, nonfinite=nonfinite)

    monkeypatch.setattr(training, "evaluate_sync", evaluate)
    training.train(config(packed, tmp_path / "run", epochs=2, eval_every=1))
    first, second = (line["step"] for line in records(tmp_path / "run", "val"))
    assert (tmp_path / "run" / "best.pt").resolve().name == f"step-{first:08d}.pt"
    warning = f"warning: top1_ema after step {second}: the outputs of 4 of 5 images are not finite"
    assert capsys.readouterr().err.count(warning) == 1


def test_resumed_run_adds_up_its_time_and_rejects_other_maps(
    packed, folder, maps, random_maps, tmp_path
):
    """The seconds of earlier processes count, here 100, with 50 of waiting for data.

    Maps of another teacher are rejected.
    """
    training.train(config(packed, tmp_path / "run"))
    state = checkpoints.load(tmp_path / "run" / "last.pt")
    assert state["spent"][0] > state["spent"][1] > 0
    Checkpoints(tmp_path / "run", 2).save(state | {"spent": [100.0, 50.0]}, 6)
    # the same maps, beside the images
    again = training.train(config(packed, tmp_path / "run", resume="auto", score_maps=maps))
    assert 100 <= again["seconds"] < 160
    assert 0.3 < again["data_wait_share"] <= 0.5
    scores = random_maps(11, 6, 2, 2, seed=1, window=(0.0, 0.1, 1.0, 0.9))
    header = dict(teacher="another", geometry="center-crop")
    others = write_store(tmp_path / "others.h5", Images(folder), scores, 2, **header)
    with pytest.raises(UserError, match=r"was trained with other score maps than these"):
        training.train(config(packed, tmp_path / "run", resume="auto", score_maps=others))


@pytest.mark.parametrize(
    "fields",
    [
        dict(sizes=((0, 16), (1, 48))),
        dict(batch=1024, size=224),
        dict(repeats=2, mixtoken=True, aspects=(0.75, 1.0), side_multiple=8, multi_scale=(40, 48)),
    ],
)
def test_dry_run_uses_two_images_with_any_recipe(packed, tmp_path, capsys, fields):
    """Also for a large batch. The estimated memory is proportional to the microbatch.

    The tensors kept for two images are not views of the whole batch.
    """
    said = {}
    for small in (8, 32):
        chosen = config(
            packed, tmp_path / "run", **{"batch": 32} | fields, microbatch=small, dry_run=True
        )
        assert training.train(chosen) == {}
        out = capsys.readouterr().out
        said[small] = float(re.search(r"take about ([\d.]+) GB", out)[1])
        assert "2 images" in out or "4 images" in out
    assert said[8] <= said[32] < 4.2 * said[8] + 0.02
    assert not (tmp_path / "run").exists()


def test_resume_rejects_other_images(packed, folder, tmp_path):
    training.train(
        config((folder, folder), tmp_path / "run", loader="folder", objective="ce", epochs=1)
    )
    other = (folder / "val", folder / "val")
    with pytest.raises(UserError, match=r"trained on other images"):
        training.train(
            config(
                other, tmp_path / "run", loader="folder", objective="ce", epochs=1, resume="auto"
            )
        )


def test_mismatched_data_and_options_are_rejected(packed, folder, maps, tmp_path, random_maps):
    with pytest.raises(UserError, match=r"has no score maps, which --objective token-label needs"):
        training.train(config((packed[1], packed[1]), tmp_path / "a"))
    with pytest.raises(UserError, match=r"is a folder; pack it"):
        training.train(config((folder, folder), tmp_path / "a"))
    with pytest.raises(UserError, match=r"is a file; --loader folder reads folders"):
        training.train(config(packed, tmp_path / "a", loader="folder"))
    with pytest.raises(UserError, match=r"pit_ti_224: its features are the class token alone"):
        training.train(config(packed, tmp_path / "a", model="pit_ti_224"))
    with pytest.raises(UserError, match=r"timm knows no model 'resnet1'"):
        training.train(
            config(packed, tmp_path / "a", model="resnet1", objective="ce", mixtoken=False)
        )
    with pytest.raises(UserError, match=r"cannot be built"):
        training.train(config(packed, tmp_path / "a", size=36))
    assert not (tmp_path / "a").exists()


def test_other_classes_in_validation_are_rejected(packed, folder, tmp_path, command):
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "val" / "dog").rename(other / "val" / "wolf")
    assert (
        command(
            "tools/pack_dataset.py",
            "--data",
            other,
            "--split",
            "val",
            "--out",
            tmp_path / "v.beton",
        ).returncode
        == 0
    )
    with pytest.raises(
        UserError, match=r"has 1 of 2 classes that .* lacks \(wolf\), which has 2 \(cat, dog\)"
    ):
        training.train(config((packed[0], tmp_path / "v.beton"), tmp_path / "a"))


def test_outside_validation_images_may_lack_a_class(folder, tmp_path, capsys):
    """The classes keep the numbers of training, whichever of them has no images."""
    some = tmp_path / "some"
    shutil.copytree(folder, some)
    shutil.rmtree(some / "val" / "cat")
    run = setup.setup_run(
        config((folder, some), tmp_path / "a", loader="folder", objective="ce"), ALONE
    )
    assert run.val.class_names == run.loader.class_names == ["cat", "dog"]
    labels = torch.cat([batch.label for batch in run.val.batches(0)])
    assert set(labels.tolist()) == {1}
    assert f"{some} has no images of 1 of the 2 classes of {folder}: cat" in capsys.readouterr().out


def test_outside_validation_classes_may_have_another_unicode_form(folder, tmp_path):
    """Validation images from a Mac: é is two characters there. They were refused."""
    nfc, nfd, home = "caf\u00e9", "cafe\u0301", tmp_path / "home"
    shutil.copytree(folder, home)
    (home / "train" / "dog").rename(home / "train" / nfc)
    (home / "val" / "dog").rename(home / "val" / nfd)
    run = setup.setup_run(
        config((home, home), tmp_path / "a", loader="folder", objective="ce"), ALONE
    )
    assert run.val.class_names == run.loader.class_names == [nfc, "cat"]
    images = Images(home, split="val")
    want = [nfc if images.class_names[n] == nfd else "cat" for n in images.labels]
    labels = torch.cat([batch.label[batch.weight > 0] for batch in run.val.batches(0)])
    assert [run.val.class_names[n] for n in labels] == want


def named(class_names):
    """A loader of classifiers, as far as its classes are compared."""
    source = SimpleNamespace(instances=False)
    return SimpleNamespace(class_names=class_names, source=source, with_masks=False)


def test_outside_validation_classes_that_look_equal_are_explained():
    with pytest.raises(UserError) as error:
        setup.align_classes(
            DataOptions(train=Path("a"), val=Path("a")),
            named(["Dog", "caf\u00e9", "cafe\u0301"]),
            named(["caf\u00e9", "dog"]),
            None,
        )
    assert str(error.value) == (
        "--val a has 1 of 2 classes that --data a lacks (dog), which has 3 (Dog, caf\u00e9, "
        "cafe\u0301); validate on the classes of the training set; 'Dog' and 'dog' differ in case "
        "or Unicode form only"
    )


def test_outside_validation_classes_without_names_are_explained():
    with pytest.raises(UserError, match="stock FFCV has no class names"):
        setup.align_classes(
            DataOptions(train=Path("a"), val=Path("b")),
            named(["cat", "dog"]),
            named(["0", "1"]),
            None,
        )


def test_maps_with_another_class_count_are_rejected(folder, random_maps, tmp_path):
    seven = write_store(tmp_path / "seven.h5", Images(folder), random_maps(11, 6, 2, 7), 7)
    with pytest.raises(UserError, match=r"seven.h5 scores 7 classes but the data has 2"):
        training.train(config((folder, folder), tmp_path / "a", loader="folder", score_maps=seven))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no_such_recipe"], "no_such_recipe"),
        (
            ["lvvit_micro_ce", "--data", "a", "--val", "b", "--out", "c", "--no-such-flag", "1"],
            "no-such-flag",
        ),
        (
            ["lvvit_micro_ce", "--data", "a", "--val", "b", "--out", "c", "--loader", "tfdata"],
            "tfdata",
        ),
        (
            [
                "lvvit_micro_ce",
                "--data",
                "nowhere.beton",
                "--val",
                "b.beton",
                "--out",
                "c",
                "--loader",
                "ffcv",
            ],
            "nowhere.beton: there is no such file",
        ),
        (
            ["lvvit_micro_ce", "--data", "nowhere", "--val", "b", "--out", "c"],
            "nowhere is not a folder",
        ),
    ],
)
def test_invalid_command_line_prints_an_error_and_exits_with_2(words, said, monkeypatch, capsys):
    # Every call makes all recipes that the command line has.
    few = {name: RECIPES[name] for name in ("lvvit_micro_ce", "nfnet_micro_ce")}
    monkeypatch.setattr(command_line, "RECIPES", few)
    monkeypatch.setattr("sys.argv", ["train.py", *words])
    with pytest.raises(SystemExit) as stopped:
        training.command()
    assert stopped.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert "Traceback" not in printed


def test_table_of_sizes_is_given_as_pairs(monkeypatch):
    words = "lvvit_micro_ce --data a --val b --out c --sizes 0 16 1 32 --repeats 2 --order blocks"
    given = []
    monkeypatch.setattr("sys.argv", ["train.py", *words.split()])
    monkeypatch.setattr(training, "train", given.append)
    training.main()
    data = given[0].data
    assert (data.sizes, data.repeats, data.order) == (((0, 16), (1, 32)), 2, "blocks")


def test_help_lists_every_field(command):
    done = command("train.py", "lvvit_micro_ce", "--help")
    assert done.returncode == 0
    for name, _ in leaves(Config()):
        assert flag(name) in done.stdout, name


# Relative difference of the first loss in bfloat16 from that in float32. On a CPU, 1.1e-4 at most
# was measured with four seeds, and 1.4e-3 at least between runs that differ in their augmentation.
BF16 = 1e-3


@pytest.fixture
def first_loss(packed, tmp_path):
    """Return a function that trains and returns the first loss; equal work for any options.

    Later steps amplify differences of rounding.
    """

    def run(device: str, precision: str) -> float:
        out = tmp_path / f"{device}-{precision}"
        fields = dict(drop_path=0.0, mixtoken=True, maps_on_device=True, epochs=1, **AUGMENTED)
        training.train(config(packed, out, device=device, precision=precision, **fields))
        return records(out)[0]["loss"]

    return run


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_losses_equal_cpu_losses(first_loss):
    """Up to rounding, which differs less in float32."""
    want = first_loss("cpu", "fp32")
    assert first_loss("cuda", "fp32") == pytest.approx(want, rel=1e-4)
    assert first_loss("cuda", "bf16") == pytest.approx(want, rel=BF16)


def test_losses_in_bfloat16_equal_those_in_float32(first_loss):
    """But not exactly, which would mean that autocast is off."""
    want, found = first_loss("cpu", "fp32"), first_loss("cpu", "bf16")
    assert found == pytest.approx(want, rel=BF16)
    assert found != want


def test_skipped_samples_are_reported_at_the_end(folder, tmp_path, capsys):
    """A short run may end before its first log line."""
    root = shutil.copytree(folder, tmp_path / "broken")
    victim = sorted((root / "train").glob("*/*.jpg"))[3]
    victim.write_bytes(victim.read_bytes()[:200])
    training.train(
        config(
            (root, root),
            tmp_path / "run",
            loader="folder",
            objective="ce",
            epochs=1,
            on_bad_sample="skip",
        )
    )
    assert "; skipped 1 unreadable" in capsys.readouterr().out


def test_skipped_samples_of_all_processes_of_a_run_are_counted(folder, tmp_path, monkeypatch):
    """One in each of two epochs, before and after a stop; also by a run that had finished."""
    root = shutil.copytree(folder, tmp_path / "broken")
    victim = sorted((root / "train").glob("*/*.jpg"))[3]
    victim.write_bytes(victim.read_bytes()[:200])
    fields = dict(loader="folder", objective="ce", epochs=2, on_bad_sample="skip", resume="auto")
    run = config((root, root), tmp_path / "run", **fields)
    save = training.save

    def save_and_stop(run, monitor, clock, step):
        save(run, monitor, clock, step)
        if step == len(run.loader):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training, "save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            training.train(run)
    assert training.train(run)["skipped"] == 2
    assert training.train(run)["skipped"] == 2


def test_the_environment_of_a_run_states_its_precision(packed, tmp_path):
    training.train(config(packed, tmp_path / "run", epochs=1, precision="auto"))
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["precision"] == "fp32"


def test_a_dry_run_refuses_a_loss_that_is_not_finite(packed, tmp_path):
    fields = dict(dry_run=True, model_kwargs=("residual_divisor=0",))
    with pytest.raises(UserError, match="the loss of the first 2 images is nan; check --model-kw"):
        training.train(config(packed, tmp_path / "run", **fields))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("in_chans=1", "in_chans is not 3, the channels of an image; remove it"),
        ("drop_path_rate=2.0", "drop_path_rate is not from 0 to below 1; remove it"),
        ("drop_path_rate=-1.0", "drop_path_rate is not from 0 to below 1; remove it"),
        ("norm_groups=-1", "norm_groups is below 0; remove it"),
    ],
)
def test_model_arguments_that_no_step_can_use_are_one_sentence(packed, tmp_path, word, message):
    with pytest.raises(UserError, match=f"^--model-kwargs {message}$"):
        training.train(config(packed, tmp_path / "run", model_kwargs=(word,), drop_path=0.1))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("swin_tiny_patch4_window7_224", ("embed_dim=24", "depths=(1,1)", "num_heads=(2,2)")),
        ("upernet", ("backbone='swin_tiny_patch4_window7_224'", "embed_dim=24", "depths=(1,1)")),
        # It has no stochastic depth, and no such argument.
        ("vgg11", ()),
    ],
)
def test_no_drop_path_is_none_in_any_model(name, words):
    """timm's Swin has 0.1 by default."""
    size = 56 if name != "vgg11" else 224
    run = with_options(Config(), model=name, model_kwargs=words, drop_path=0.0, size=size)
    kind = "segment" if name == "upernet" else "ce"
    run = with_options(run, objective=kind, mixtoken=False)
    with torch.device("meta"):
        model, spec = build_model(run.model, run.data, build_objective(run.setting), 3)
    rates = [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
    assert set(rates) <= {0.0}
    assert spec.kwargs.get("drop_path_rate") == (None if name == "vgg11" else 0.0)


def test_accuracy_is_over_the_images_that_were_evaluated(folder, tmp_path, capsys):
    """One of the five of the validation set is damaged; each of two evaluations skips it."""
    root = shutil.copytree(folder, tmp_path / "broken")
    victim = sorted((root / "val").glob("*/*.jpg"))[1]
    victim.write_bytes(victim.read_bytes()[:200])
    fields = dict(loader="folder", objective="ce", on_bad_sample="skip", ema=0.0)
    result = training.train(config((root, root), tmp_path / "run", **fields))
    line = capsys.readouterr().out
    assert f"top-1 {100 * result['top1']:.1f} % on 4 of 5 images, " in line
    assert "; 1 unreadable image was not evaluated" in line
    assert "skipped" not in line
    assert (result["images"], result["unreadable"], result["skipped"]) == (4, 1, 0)
    assert 4 * result["top1"] == round(4 * result["top1"])
    assert [(r["images"], r["unreadable"]) for r in records(tmp_path / "run", "val")] == [
        (4, 1)
    ] * 2


DHVT = dict(model="dhvt_tiny_cifar_patch4", model_kwargs=("depth=2", "embed_dim=32"))


def test_frozen_statistics_stay_while_weights_train(packed, tmp_path):
    """DHVT's published fine-tuning runs in evaluation mode.

    BatchNorm keeps the statistics of the file given by --init, and dropout is off.
    """
    ce = DHVT | dict(objective="ce", mixtoken=False, drop_path=0.9)
    training.train(config(packed, tmp_path / "first", **ce))
    training.train(
        config(
            packed,
            tmp_path / "second",
            **ce,
            init=tmp_path / "first" / "last.pt",
            frozen_statistics=True,
            ema=0.0,
        )
    )
    before = checkpoints.select_weights(checkpoints.load(tmp_path / "first" / "last.pt"), tmp_path)
    after = checkpoints.select_weights(checkpoints.load(tmp_path / "second" / "last.pt"), tmp_path)
    running = [name for name in before if name.endswith(("running_mean", "running_var"))]
    assert len(running) == 2 * (2 + 2 * 3)
    assert all(torch.equal(before[name], after[name]) for name in running)
    assert not torch.equal(
        before["blocks.1.attn.attn.qkv.weight"], after["blocks.1.attn.attn.qkv.weight"]
    )
    training.train(
        config(packed, tmp_path / "third", **ce, init=tmp_path / "first" / "last.pt", ema=0.0)
    )
    moved = checkpoints.select_weights(checkpoints.load(tmp_path / "third" / "last.pt"), tmp_path)
    assert not any(torch.equal(before[name], moved[name]) for name in running)
    with pytest.raises(UserError, match="--frozen-statistics trains in evaluation mode"):
        training.train(config(packed, tmp_path / "fourth", **DHVT, frozen_statistics=True))


def test_an_operation_that_is_not_registered_is_refused_before_the_data_is_read(tmp_path):
    paths = tmp_path / "none.beton", tmp_path / "none.beton"
    with pytest.raises(UserError, match="--operations gamma: no such operation is registered"):
        training.train(config(paths, tmp_path / "run", operations=("gamma",)))
    assert not (tmp_path / "run").exists()


def test_outside_a_size_that_the_patch_does_not_divide_comes_with_the_nearest(packed, tmp_path):
    with pytest.raises(
        UserError,
        match=r"^lvvit_micro cannot be built: .* of patch_size 8, such as 96 or 104; give another "
        "--size$",
    ):
        training.train(config(packed, tmp_path / "run", size=100))
    with pytest.raises(
        UserError,
        match=r"cannot train at 100 px .* patch_size 8, such as 96 or 104\); choose other --sizes",
    ):
        training.train(config(packed, tmp_path / "run", size=64, sizes=((0, 100), (1, 64))))
    assert not list((tmp_path / "run").glob("*.json*"))


def test_partial_tokens_have_no_labels(packed, tmp_path):
    """DHVT accepts any image size; token labels and MixToken need whole tokens."""
    with pytest.raises(
        UserError,
        match=r"partial patches at 34 px, which have no labels; choose a multiple of 4 px, such as "
        "32 or 36$",
    ):
        training.train(config(packed, tmp_path / "run", **DHVT, size=34))
    assert (
        training.train(
            config(packed, tmp_path / "ce", **DHVT, size=34, objective="ce", mixtoken=False)
        )["epochs"]
        == 2
    )


def test_a_residual_stream_in_16_bits_trains_or_is_refused(packed, tmp_path):
    fields = dict(half_residual=True, epochs=1, model_kwargs=("depth=1",))
    with pytest.raises(UserError, match="--half-residual has no effect in float32"):
        training.train(config(packed, tmp_path / "float32", **fields))
    other = fields | dict(model="test_vit", objective="ce", mixtoken=False, model_kwargs=())
    with pytest.raises(UserError, match="test_vit has no such option; remove --half-residual"):
        training.train(config(packed, tmp_path / "vit", precision="bf16", **other))
    result = training.train(config(packed, tmp_path / "run", precision="bf16", **fields))
    assert 0 <= result["top1"] <= 1


def test_outside_parts_of_three_images_train_without_mixing(packed, tmp_path):
    odd = config(packed, tmp_path / "run", batch=6, microbatch=3, epochs=1, mixtoken=False)
    assert 0 <= training.train(odd)["top1"] <= 1
    with pytest.raises(UserError, match=r"6 in 2 parts has 3 images in each, and an image and its"):
        training.train(with_options(odd, out=tmp_path / "b", mixtoken=True))

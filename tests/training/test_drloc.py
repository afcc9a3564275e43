"""Runs with DRLoc: training, resume, several ranks, refused options and exports."""

import math

import pytest
import timm
import torch

import densefeed.train as training
from densefeed.models import checkpoints
from densefeed.objectives.base import StepContext, step_loss
from densefeed.objectives.drloc import LocalizedModel, draw_pairs
from densefeed.system.errors import UserError
from densefeed.system.options import with_options
from densefeed.tools import export, validate
from densefeed.training.config import Config
from densefeed.training.ranks import Ranks
from densefeed.training.student import build_student

from ..runs import model_for, objective_for, records, wrap, wrapped_and_first_batch

ALONE = Ranks(0, 1, torch.device("cpu"))
CE = dict(objective="ce", mixtoken=False)
SWIN = ("embed_dim=12", "depths=(1,1,2,1)", "num_heads=(1,2,3,4)", "window_size=2")
COMBINED = {
    "token-label, mixtoken": dict(drloc="l1", drloc_grid=4),
    "token-label, mixtoken, mixup": dict(drloc="signed", drloc_grid=2, mixup=0.8, compile="never"),
    "relabel, cutmix, regions": dict(
        drloc="ce",
        drloc_grid=0,
        objective="relabel",
        mixtoken=False,
        cutmix=1.0,
        mix_label="regions",
    ),
    "ce, cutmix, mixup": dict(CE, drloc="reg", drloc_grid=4, cutmix=1.0, mixup=0.8),
    "all, token-label": dict(drloc="all", drloc_grid=2, mixtoken=False),
    "published, fused head": dict(
        drloc="ce", drloc_grid=0, drloc_published=True, model_kwargs=("depth=2", "fused_head=True")
    ),
    "vit": dict(CE, drloc="l1", drloc_grid=2, model="test_vit"),
    "vit, published": dict(CE, drloc="reg", drloc_grid=0, model="test_vit", drloc_published=True),
    "resnet": dict(CE, drloc="l1", drloc_grid=2, model="test_resnet", size=64),
    "resnet, all": dict(CE, drloc="all", drloc_grid=0, model="test_resnet", size=64),
    "nfnet, views": dict(CE, drloc="l1", drloc_grid=0, model="nfnet_micro", repeats=2),
    "swin": dict(
        CE,
        drloc="l1",
        drloc_grid=0,
        model="swin_tiny_patch4_window7_224",
        model_kwargs=SWIN,
        size=64,
    ),
    "swin, all, checkpointing": dict(
        CE,
        drloc="all",
        drloc_grid=0,
        model="swin_tiny_patch4_window7_224",
        model_kwargs=SWIN,
        size=64,
        grad_checkpointing=True,
    ),
    "swin, all, published": dict(
        CE,
        drloc="all",
        drloc_grid=0,
        drloc_hidden=16,
        drloc_published=True,
        model="swin_tiny_patch4_window7_224",
        model_kwargs=SWIN,
        size=64,
    ),
    "dhvt, token labels": dict(
        drloc="l1", drloc_grid=8, model="dhvt_tiny_cifar_patch4", model_kwargs=("depth=2",)
    ),
    "dhvt, all": dict(
        CE, drloc="all", drloc_grid=4, model="dhvt_tiny_cifar_patch4", model_kwargs=("depth=2",)
    ),
    "t2t, token labels": dict(
        drloc="ce", drloc_grid=0, model="t2t_vit_14", model_kwargs=("depth=2",), size=64
    ),
    "cvt": dict(
        CE, drloc="reg", drloc_grid=2, model="cvt_13_drloc", size=64, frozen_statistics=True
    ),
    "cvt, all": dict(CE, drloc="all", drloc_grid=2, model="cvt_13", size=64),
    "sizes": dict(drloc="l1", drloc_grid=2, sizes=((0, 16), (1, 32))),
    "checkpointing, clipping": dict(
        drloc="l1", drloc_grid=2, grad_checkpointing=True, clip_grad=0.1, on_nonfinite="skip"
    ),
    "all, checkpointing": dict(drloc="all", drloc_grid=2, mixtoken=False, grad_checkpointing=True),
    "bf16": dict(drloc="l1", drloc_grid=2, precision="bf16"),
    "fp16": dict(drloc="reg", drloc_grid=0, precision="fp16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINED)
def test_combinations_train_and_change_heads(micro, tmp_path, name):
    fields = dict(epochs=1) if name != "sizes" else {}
    config = micro(tmp_path / "run", **fields, **COMBINED[name])
    training.train(config)
    saved = checkpoints.load(tmp_path / "run" / "last.pt")
    torch.manual_seed(config.run.seed)
    model = model_for(config)
    begun = wrap(config, model).localizer.state_dict()
    assert list(begun) == list(saved["localizer"])
    assert all(tensor.isfinite().all() for tensor in saved["localizer"].values())
    assert any(not torch.equal(tensor, begun[key]) for key, tensor in saved["localizer"].items())
    assert list(saved["model"]) == list(model.state_dict())
    assert not any("localizer" in key for part in ("model", "ema") for key in saved[part])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            dict(drloc_grid=7),
            r"--drloc l1 cannot be computed for lvvit_micro: its grid of 4 x 4 is smaller than "
            r"7 x 7; give --drloc-grid one of 0, 2$",
        ),
        (
            dict(drloc_grid=3),
            r"grid of 4 x 4 is not a multiple of 3 x 3; give --drloc-grid one of 0, 2$",
        ),
        (
            dict(drloc_grid=7, model="dhvt_tiny_cifar_patch4"),
            r"grid of 8 x 8 .* 7 x 7; give --drloc-grid one of 0, 4, 2$",
        ),
        (
            dict(CE, drloc_grid=0, model="test_vit", model_kwargs=("patch_drop_rate=0.5",)),
            "--drloc l1 cannot be computed for test_vit: it uses patch dropout in training",
        ),
        (dict(drloc_grid=1), r"leaves 1 x 1 positions, too few"),
        (dict(drloc="all"), r"--drloc all reads the tokens of every block, .*give --no-mixtoken"),
        (
            dict(CE, drloc="ce", drloc_grid=0, sizes=((0, 16), (1, 32))),
            r"ce has a class for each; choose one --size$",
        ),
        (
            dict(CE, drloc_grid=0, model="resnet18"),
            r"resnet18: its grid of 1 x 1 leaves .*; choose a larger --size or another",
        ),
        (
            dict(CE, drloc_grid=0, model="crossvit_tiny_240", size=240),
            r"for crossvit_tiny_240: its features are neither a map nor a grid of tokens",
        ),
        (dict(drloc_hidden=0), "--drloc-hidden is 0, and must be from 1 to 16,384"),
        (dict(drloc_weight=-1.0), "--drloc-weight is -1, and must be at least 0$"),
        (dict(drloc_weight=math.inf), "--drloc-weight is inf, and must be at least 0 and finite"),
        (dict(drloc_grid=-1), "--drloc-grid is -1, and must be at least 0"),
    ],
)
def test_error_on_conflicting_options_before_first_step(micro, tmp_path, fields, message):
    with pytest.raises(UserError, match=message):
        training.train(micro(tmp_path / "run", **{"drloc": "l1", **fields}))
    assert not (tmp_path / "run").exists()


def test_dry_run_computes_localization_loss(micro, tmp_path, capsys, monkeypatch):
    """For its two images, and for twice as many."""
    losses = []
    monkeypatch.setattr(
        LocalizedModel,
        "forward",
        lambda both, *a, f=LocalizedModel.forward, **k: (
            out := f(both, *a, **k),
            losses.append(out.loss),
        )[0],
    )
    assert training.train(micro(tmp_path / "run", drloc="l1", drloc_grid=0, dry_run=True)) == {}
    assert "dry run: data, labels and recipe fit together" in capsys.readouterr().out
    assert [0.1 < loss.item() < 1 for loss in losses] == [True, True]
    assert not (tmp_path / "run").exists()


def make_context(first, grid, mix, pairs):
    """Make the context of a step with these pairs."""
    return StepContext(first.spec, grid, mix, (pairs, None))


@pytest.mark.parametrize("variant", ["l1", "all"])
def test_step_loss_is_base_loss_plus_weighted_localization(micro, tmp_path, variant):
    """The base loss is that of a run without DRLoc at the same weights.

    The localization loss is computed from timm's maps and the heads themselves.
    """
    config = with_options(
        micro(tmp_path),
        drloc=variant,
        drloc_grid=0,
        drloc_weight=0.3,
        drop_path=0.0,
        mixtoken=False,
    )
    both, first = wrapped_and_first_batch(config)
    pairs = draw_pairs(first.plan, 0, first.batch, 5, 0.3)
    batch = first.batch._replace(weight=torch.tensor([1.0, 1.0, 0.0, 1.0]))
    model = both.model
    # BatchNorm must be the same in every pass.
    model.stem.eval()
    plain = objective_for(with_options(config, drloc="none"))
    without = step_loss(plain, model, batch, StepContext(first.spec, 4, None), None)
    maps = model.forward_intermediates(batch.image, intermediates_only=True, norm=variant == "l1")
    away = both.localizer(maps if variant == "all" else maps[-1:], pairs.words, batch.weight)
    got = step_loss(first.objective, both, batch, make_context(first, 4, None, pairs), None)
    torch.testing.assert_close(got, without + 0.3 * away)
    assert away > 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        dict(drloc="l1", drloc_grid=2),
        dict(drloc="all", drloc_grid=0, mixtoken=False),
        dict(
            drloc="ce",
            drloc_grid=4,
            model="dhvt_tiny_cifar_patch4",
            model_kwargs=("depth=1", "embed_dim=32"),
        ),
    ],
)
def test_step_compiles_once(micro, tmp_path, no_host_read, fields):
    """No graph break, one compilation for all draws and weights, no host sync."""
    config = micro(tmp_path, drop_path=0.0, **fields)
    both, first = wrapped_and_first_batch(config)
    grid = 32 // both.model.patch_size
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(step_loss, fullgraph=True, backend="eager", dynamic=False)
    for number in range(3):
        mix = first.mixing.draw(0, number, 32, grid) if config.mix else None
        pairs = draw_pairs(first.plan, number, first.batch, 6, 0.1 * number)
        step = first.objective, both, first.batch, make_context(first, grid, mix, pairs), None
        with no_host_read():
            want = step_loss(*step)
        torch.testing.assert_close(compiled(*step), want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_validate_and_export_ignore_heads(micro, packed, tmp_path):
    training.train(micro(tmp_path / "run", drloc="l1", drloc_grid=0))
    for weights in ("ema", "raw"):
        row = validate.main(
            validate.Validation(
                checkpoint=tmp_path / "run",
                data=packed[1],
                weights=weights,
                device="cpu",
                threads=2,
            )
        )
        record = records(tmp_path / "run", "val")[-1]
        assert row["top1"] == record["top1" + "_ema" * (weights == "ema")]
        plain = model_for(micro(tmp_path))
        assert row["parameters"] == sum(p.numel() for p in plain.parameters())
        export.main(
            export.Export(checkpoint=tmp_path / "run", out=tmp_path / weights, weights=weights)
        )
        model = timm.create_model(f"local-dir:{tmp_path / weights}", pretrained=True)
        saved = checkpoints.load(tmp_path / "run" / "last.pt")[
            "ema" if weights == "ema" else "model"
        ]
        assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())


def test_fine_tune_from_drloc_run_has_new_heads(micro, tmp_path):
    training.train(micro(tmp_path / "run", epochs=1, drloc="ce", drloc_grid=0))
    training.train(
        micro(
            tmp_path / "tuned",
            epochs=1,
            drloc="l1",
            drloc_grid=0,
            init=tmp_path / "run" / "last.pt",
        )
    )
    trained, tuned = (checkpoints.load(tmp_path / n / "last.pt") for n in ("run", "tuned"))
    last = [list(saved["localizer"].values())[-1].shape for saved in (trained, tuned)]
    assert last == [(2 * 9,), (2,)]  # a class for each offset on 4 positions, two distances
    training.train(micro(tmp_path / "plain", epochs=1, init=tmp_path / "run" / "last.pt"))
    assert "localizer" not in checkpoints.load(tmp_path / "plain" / "last.pt")


def test_weight_decay_covers_only_matrices_of_heads():
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=32, num_classes=3)
    students = []
    for drloc in ("none", "l1"):
        config = with_options(Config(), model="test_vit", size=32, objective="ce", drloc=drloc)
        config = with_options(config, drloc_grid=0, mixtoken=False)
        trainable = wrap(config, model, 3)
        students.append(build_student(config.optim, model, trainable, ALONE, None))
    plain, ours = students
    assert plain.trainable is plain.model is model
    assert ours.model is model
    assert isinstance(ours.trainable, LocalizedModel)
    names = {id(p): name for name, p in ours.trainable.named_parameters()}
    decayed, before = (
        [
            {names[id(p)] for p in group["params"]}
            for group in student.optimizer.param_groups
            if group["weight_decay"]
        ]
        for student in (ours, plain)
    )
    (decayed,), (before,) = decayed, before
    assert decayed - before == {f"localizer.heads.0.{layer}.weight" for layer in (0, 2, 4)}
    assert before <= decayed
    assert "model.pos_embed" not in decayed
    assert sum(len(group["params"]) for group in ours.optimizer.param_groups) == len(names)
    assert ours.averaged[0] is ours.trainable
    assert not any(isinstance(part, LocalizedModel) for part in ours.ema.module.modules())


@pytest.mark.parametrize(
    ("epoch", "share"),
    [(0, 0.0), (5, 0.25), (20, 1.0), (21, 279 / 280), (100, 200 / 280), (299, 1 / 280), (305, 0.0)],
)
def test_published_weight_rises_for_20_epochs_then_falls_to_0(epoch, share):
    config = with_options(Config(), drloc="l1", drloc_weight=0.5, epochs=300)
    assert objective_for(config).weight(epoch) == 0.5
    published = with_options(config, drloc_published=True)
    assert objective_for(published).weight(epoch) == pytest.approx(0.5 * share)
    assert math.isfinite(objective_for(with_options(published, epochs=8)).weight(epoch))


def test_log_shows_parameters_of_heads(micro, tmp_path, capsys):
    training.train(micro(tmp_path / "run", epochs=1, drloc="l1", drloc_grid=0))
    count = (2 * 96 + 1) * 512 + 513 * 512 + 513 * 2
    assert f", and {count:,} that --drloc l1 trains beside them, on cpu" in capsys.readouterr().out

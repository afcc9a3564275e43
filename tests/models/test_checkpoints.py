"""Weights from elsewhere: published files by their names, timm's, ours at another size; what does
not fit is refused whole.
"""

import argparse
import json
import pickle
from dataclasses import replace

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

import densefeed.train as training
from densefeed.models import checkpoints
from densefeed.models.lvvit import LVViT, checkpoint_filter_fn
from densefeed.pipelines.augment.augmentation import Normalize
from densefeed.pipelines.batch import to_device
from densefeed.training import compile, recipes
from densefeed.training.config import Config

# What the published module calls the tensors that we call otherwise (reference 1.1 to 1.3).
PUBLISHED = {
    "stem.0": "patch_embed.conv1",
    "stem.1": "patch_embed.bn1",
    "stem.3": "patch_embed.conv2",
    "stem.4": "patch_embed.bn2",
    "stem.6": "patch_embed.conv3",
    "stem.7": "patch_embed.bn3",
    "stem.9": "patch_embed.proj",
    "token_head": "aux_head",
}
NORM = PUBLISHED | {
    f"stem.{place}": f"patch_embed.norm{number}" for number, place in enumerate((1, 4, 7), start=1)
}
SEQUENCE = PUBLISHED | {
    f"stem.{place}": f"patch_embed.conv.{place}" for place in (0, 1, 3, 4, 6, 7)
}


def published(model, names=PUBLISHED):
    """The model's state dict by the published names."""
    renamed = {}
    for name, tensor in model.state_dict().items():
        module, _, tensor_name = name.rpartition(".")
        renamed[f"{names.get(module, module)}.{tensor_name}".removeprefix(".")] = tensor.clone()
    assert len(renamed) == len(model.state_dict())
    return renamed


def made(name="lvvit_micro", seed=0, **fields):
    """A model whose every tensor, running statistics too, is its own and random."""
    torch.manual_seed(seed)
    model = timm.create_model(name, **fields).eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.add_(
                    0.05 * torch.rand_like(tensor)
                    if key.endswith("running_var")
                    else 0.05 * torch.randn_like(tensor)
                )
    return model


def answer(model, side=64):
    image = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        return model.eval()(image)


def saved(content, path):
    (save_file if path.suffix == ".safetensors" else torch.save)(content, path)
    return path


@pytest.mark.parametrize(
    ("name", "size", "rows", "count"),
    [
        ("lvvit_t", 224, 197, 8_534_720),
        ("lvvit_s", 224, 197, 26_151_824),
        ("lvvit_s", 384, 577, 26_297_744),
    ],
)
def test_published_files_answer_to_the_bit_by_every_way_in(name, size, rows, count, tmp_path):
    """Counts as published: 8.53, 26.15 and 26.30 million (reference 6.1)."""
    source = made(name, img_size=size)
    names = published(source)
    assert names["pos_embed"].shape[1] == rows
    assert sum(p.numel() for p in source.parameters()) == count
    path = saved(names, tmp_path / f"{name}.pth.tar")
    want = answer(source, size)
    begun = timm.create_model(name, img_size=size)
    assert checkpoints.initialize(begun, path) == f"begins from {path}"
    assert torch.equal(answer(begun, size), want)
    built, _ = checkpoints.build(path, name)
    assert built.grid_size == size // 16
    assert torch.equal(answer(built, size), want)
    overlay = dict(file=str(path))
    assert torch.equal(
        answer(
            timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, img_size=size),
            size,
        ),
        want,
    )
    assert torch.equal(
        answer(timm.create_model(name, checkpoint_path=str(path), img_size=size), size), want
    )


def wrap(kind, state, other):
    dated = {"epoch": 300, "arch": "lvvit_s", "args": argparse.Namespace(lr=1e-3), "metric": 83.3}
    distributed = {f"module.{name}": tensor for name, tensor in state.items()}
    return {
        "bare": state,
        "distributed": distributed,
        "compiled, then distributed": {
            f"module._orig_mod.{name}": tensor for name, tensor in state.items()
        },
        "model": {"model": state},
        "timm's trainer": dated | {"state_dict": distributed},
        "timm's trainer with EMA": dated | {"state_dict": other, "state_dict_ema": distributed},
        "model_ema": {"model": other, "model_ema": state},
        "ours": {"model": other, "ema": state, "step": 7},
        "ours without EMA": {"model": state, "ema": None, "step": 7},
    }[kind]


@pytest.mark.parametrize(
    "names", [PUBLISHED, NORM, SEQUENCE, {}], ids=["bn", "norm", "sequence", "ours"]
)
@pytest.mark.parametrize(
    "kind",
    [
        "bare",
        "distributed",
        "compiled, then distributed",
        "model",
        "timm's trainer",
        "timm's trainer with EMA",
        "model_ema",
        "ours",
        "ours without EMA",
    ],
)
def test_wrappers_and_spellings_are_seen_through(names, kind, tmp_path):
    source, other = made(num_classes=5), made(num_classes=5, seed=1)
    path = saved(
        wrap(kind, published(source, names), published(other, names)), tmp_path / "weights.pt"
    )
    model = timm.create_model("lvvit_micro", num_classes=5)
    line = checkpoints.initialize(model, path)
    assert torch.equal(answer(model), answer(source))
    assert ("averaged" in line) == (kind in ("timm's trainer with EMA", "model_ema", "ours"))


def test_safetensors_are_read(tmp_path):
    source = made(num_classes=5)
    path = saved(published(source), tmp_path / "weights.safetensors")
    model = timm.create_model("lvvit_micro", num_classes=5)
    checkpoints.initialize(model, path)
    assert torch.equal(answer(model), answer(source))


def resized(table, side):
    """The published rule (reference 5.4), by PyTorch's own function."""
    old = round((table.shape[1] - 1) ** 0.5)
    grid = table[:, 1:].reshape(1, old, old, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(
        grid, size=(side, side), mode="bicubic", align_corners=False, antialias=False
    )
    return torch.cat([table[:, :1], grid.flatten(2).mT], 1)


@pytest.mark.parametrize(("size", "side"), [(384, 24), (160, 10)])
def test_the_position_table_is_resized_as_published(size, side, tmp_path):
    source = made("lvvit_t", depth=1)
    path = saved(published(source), tmp_path / "t.pth.tar")
    want = resized(source.pos_embed.detach(), side)
    begun = timm.create_model("lvvit_t", depth=1, img_size=size)
    line = checkpoints.initialize(begun, path)
    assert f"position table resized from 197 to {side**2 + 1} rows" in line
    torch.testing.assert_close(begun.pos_embed.detach(), want, rtol=0, atol=1e-6)
    assert torch.equal(begun.pos_embed[:, 0], source.pos_embed[:, 0])
    through_timm = timm.create_model(
        "lvvit_t",
        depth=1,
        img_size=size,
        pretrained=True,
        pretrained_cfg_overlay=dict(file=str(path)),
    )
    assert torch.equal(through_timm.pos_embed, begun.pos_embed)
    assert torch.equal(begun.head.weight, source.head.weight)


def test_heads_of_other_classes_stay_as_built_and_that_is_said(tmp_path):
    source = made("lvvit_t", depth=1)
    path = saved(published(source), tmp_path / "t.pth.tar")
    model = timm.create_model("lvvit_t", depth=1, num_classes=5)
    built = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    line = checkpoints.initialize(model, path)
    assert line == f"begins from {path}; new: head and token_head (1,000 classes in the file)"
    for name, tensor in model.state_dict().items():
        kept = name.startswith(("head", "token_head"))
        assert torch.equal(tensor, (built if kept else source.state_dict())[name]), name
    through_timm = timm.create_model(
        "lvvit_t",
        depth=1,
        num_classes=5,
        pretrained=True,
        pretrained_cfg_overlay=dict(file=str(path)),
    )
    assert torch.equal(through_timm.blocks[0].mlp.fc1.weight, source.blocks[0].mlp.fc1.weight)
    features = timm.create_model(
        "lvvit_t",
        depth=1,
        features_only=True,
        out_indices=1,
        pretrained=True,
        pretrained_cfg_overlay=dict(file=str(path)),
    )
    assert torch.equal(features.model.pos_embed, source.pos_embed)


def test_a_head_that_only_one_side_has(tmp_path):
    """A file without token head leaves the model's as it was built; a model without one leaves out
    the file's.
    """
    both, single = made(num_classes=5), made(num_classes=5, token_head=False)
    path = saved(published(single), tmp_path / "single.pt")
    model = timm.create_model("lvvit_micro", num_classes=5)
    built = model.token_head.weight.clone()
    assert checkpoints.initialize(model, path) == f"begins from {path}; new: token_head"
    assert torch.equal(model.token_head.weight, built)
    assert torch.equal(model.head.weight, single.head.weight)

    path = saved(published(both), tmp_path / "both.pt")
    model = timm.create_model("lvvit_micro", num_classes=5, token_head=False)
    assert (
        checkpoints.initialize(model, path) == f"begins from {path}; 2 tensors of the file left out"
    )
    with torch.no_grad():
        image = torch.randn(2, 3, 64, 64)
        assert torch.equal(model.eval()(image), both.head(both.forward_features(image)[:, 0]))
    headless = timm.create_model("lvvit_micro", num_classes=0)
    checkpoints.initialize(headless, path)
    assert torch.equal(headless.norm.weight, both.norm.weight)


def test_deit_s_begins_from_timms_file(tmp_path):
    """timm's weights of DeiT-S, as timm writes them; the token head is new."""
    torch.manual_seed(0)
    source = timm.create_model("deit_small_patch16_224", depth=2).eval()
    path = saved(source.state_dict(), tmp_path / "deit.safetensors")
    model = timm.create_model("lvvit_deit_s", depth=2).eval()
    assert checkpoints.initialize(model, path) == f"begins from {path}; new: token_head"
    single = timm.create_model("lvvit_deit_s", depth=2, token_head=False).eval()
    checkpoints.initialize(single, path)
    for module in single.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-6
    torch.testing.assert_close(answer(single, 224), answer(source, 224), rtol=1e-4, atol=1e-5)
    assert torch.equal(model.stem[0].weight, source.patch_embed.proj.weight)


@pytest.mark.parametrize("name", ["deit_small_patch16_224", "nfnet_micro", "resnet18"])
def test_models_of_timm_begin_from_their_own_files(name, tmp_path):
    """Theirs is timm's filter, where the family has one, and the head's name in their config."""
    fields = dict(depth=1) if name.startswith("deit") else {}
    sized = (dict(img_size=96), dict(img_size=128)) if name.startswith("deit") else ({}, {})
    source = made(name, num_classes=7, **fields, **sized[0])
    path = saved({"state_dict": source.state_dict()}, tmp_path / "weights.pt")
    model = timm.create_model(name, num_classes=7, **fields, **sized[0])
    checkpoints.initialize(model, path)
    assert torch.equal(answer(model, 96), answer(source, 96))
    other = timm.create_model(name, num_classes=3, **fields, **sized[1])
    line = checkpoints.initialize(other, path)
    assert "(7 classes in the file)" in line
    assert ("position table resized from 37 to 65 rows" in line) == name.startswith("deit")
    assert answer(other, 128).shape == (1, 3)


def damaged(kind, state):
    """What is wrong with these weights for `lvvit_micro` of 5 classes."""
    if kind == "a tensor is missing":
        del state["blocks.3.mlp.fc2.bias"]
    elif kind == "two are missing":
        del state["blocks.3.mlp.fc2.bias"], state["norm.weight"]
    elif kind == "one is too much":
        state["blocks.4.norm1.weight"] = torch.zeros(96)
    elif kind == "no square table":
        state["pos_embed"] = torch.zeros(1, 61, 96)
    elif kind == "numbers":
        return {"epoch": 3, "lr": 0.1}
    elif kind == "nothing":
        return {}
    return state


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("a tensor is missing", r"it lacks blocks\.3\.mlp\.fc2\.bias; give the --model"),
        ("two are missing", r"it lacks blocks\.3\.mlp\.fc2\.bias and 1 more; give"),
        ("one is too much", r"it has besides blocks\.4\.norm1\.weight; give"),
        ("no square table", r"it has in another shape pos_embed; give"),
        ("numbers", "holds no dictionary of weights"),
        ("nothing", "holds no dictionary of weights"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence_and_changes_nothing(kind, why, tmp_path):
    path = saved(damaged(kind, published(made(num_classes=5))), tmp_path / "bad.pt")
    model = made(num_classes=5, seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(checkpoints.CheckpointError, match=why) as caught:
        checkpoints.initialize(model, path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_another_model_is_refused_with_both_counts(tmp_path):
    source = made("lvvit_t", depth=1)
    path = saved(published(source), tmp_path / "t.pt")
    count = sum(tensor.numel() for tensor in source.state_dict().values())
    with pytest.raises(
        checkpoints.CheckpointError,
        match=rf"\({count:,} numbers there, .* here\): it lacks blocks\.1\.",
    ):
        checkpoints.initialize(timm.create_model("lvvit_t", depth=2), path)
    with pytest.raises(checkpoints.CheckpointError, match="does not fit"):
        checkpoints.initialize(timm.create_model("deit_small_patch16_224", depth=1), path)
    with pytest.raises(checkpoints.CheckpointError, match="does not fit"):
        checkpoints.initialize(timm.create_model("resnet18"), path)
    with pytest.raises(RuntimeError, match="Missing key"):  # timm's own way in is as strict
        timm.create_model(
            "lvvit_t", depth=2, pretrained=True, pretrained_cfg_overlay=dict(file=str(path))
        )
    with pytest.raises(checkpoints.CheckpointError, match="there is no such checkpoint"):
        checkpoints.initialize(source, tmp_path / "none.pt")


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_code_in_a_file_never_runs(tmp_path):
    path = tmp_path / "trap.pt"
    torch.save({"state_dict": published(made()), "args": Trap(tmp_path / "sprung")}, path)
    with pytest.raises(checkpoints.CheckpointError, match="no checkpoint that loads safely"):
        checkpoints.initialize(timm.create_model("lvvit_micro"), path)
    bare = tmp_path / "bare.pt"
    bare.write_bytes(pickle.dumps(Trap(tmp_path / "sprung"), protocol=2))
    with pytest.raises(checkpoints.CheckpointError, match="no checkpoint that loads safely"):
        checkpoints.load(bare)
    assert not (tmp_path / "sprung").exists()


def test_old_files_without_batch_norms_counter_and_in_half_precision(tmp_path):
    source = made(num_classes=5)
    state = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in published(source).items()
        if "num_batches_tracked" not in name
    }
    model = timm.create_model("lvvit_micro", num_classes=5)
    checkpoints.initialize(model, saved(state, tmp_path / "old.pt"))
    assert model.pos_embed.dtype == torch.float32
    torch.testing.assert_close(answer(model), answer(source), rtol=0, atol=0.02)


def test_the_filter_leaves_its_input_alone():
    source = made(num_classes=5)
    state = published(source)
    before = dict(state)
    fitted = checkpoint_filter_fn(state, LVViT(img_size=64, patch_size=8, token_head=False))
    assert state == before
    assert not [
        name for name in fitted if name.startswith(("patch_embed", "aux_head", "token_head"))
    ]


# ------------------------------------------------------------------------------------------------------------ train.py --init


def run_of(folder, maps, out, **fields):
    small = dict(
        data=folder,
        val=folder,
        labels=maps,
        out=out,
        batch=4,
        epochs=1,
        threads=2,
        eval_every=1,
        log_every=1,
        device="cpu",
        drop_path=0.0,
    )
    return replace(recipes.lvvit_micro_token_label(), **(small | fields))


def first_state(monkeypatch, config: Config):
    """The weights that a run's first step sees, and the run's result."""
    seen, real = [], compile.step_loss

    def step_loss(run, model, *others, **named):
        seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return real(run, model, *others, **named)

    monkeypatch.setattr(compile, "step_loss", step_loss)
    result = training.train(config)
    monkeypatch.setattr(compile, "step_loss", real)
    return seen[0], result


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_a_run_begins_from_anothers_weights_at_a_larger_size(
    folder, maps, tmp_path, monkeypatch, capsys, ema
):
    """64 to 96 px: all but the resized table as it was saved, averaged if it was, and evaluated as
    that model is.
    """
    training.train(run_of(folder, maps, tmp_path / "small", ema=ema))
    last = tmp_path / "small" / "last.pt"
    saved_weights = torch.load(last, weights_only=True)["ema" if ema else "model"]
    capsys.readouterr()
    config = run_of(folder, maps, tmp_path / "large", size=96, init=last, ema=ema)
    state, result = first_state(monkeypatch, config)
    notes = (
        f"begins from {last}"
        + " (averaged weights)" * bool(ema)
        + "; position table resized from 65 to 145 rows"
    )
    assert capsys.readouterr().out.splitlines()[0] == notes
    assert 0 <= result["top1"] <= 1

    table = resized(saved_weights["pos_embed"], 12)
    torch.testing.assert_close(state["pos_embed"], table, rtol=0, atol=1e-6)
    want = saved_weights | {"pos_embed": state["pos_embed"]}
    assert state.keys() == want.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in want.items())

    by_hand = timm.create_model("lvvit_micro", num_classes=2, img_size=96)
    by_hand.load_state_dict(saved_weights | {"pos_embed": table})
    begun = timm.create_model("lvvit_micro", num_classes=2, img_size=96)
    begun.load_state_dict(state)
    torch.testing.assert_close(answer(begun, 96), answer(by_hand, 96), rtol=1e-5, atol=1e-5)
    assert json.loads((tmp_path / "large" / "config.json").read_text())["init"] == str(last)
    final = torch.load(tmp_path / "large" / "last.pt", weights_only=True)["model"]
    assert not torch.equal(final["head.weight"], state["head.weight"])


def test_a_first_evaluation_is_the_resized_models(folder, maps, tmp_path, monkeypatch):
    """With no learning and BatchNorm at rest a run reports the accuracy of the model that was put
    in.
    """
    training.train(run_of(folder, maps, tmp_path / "small", epochs=3, lr=3e-3))
    last = tmp_path / "small" / "last.pt"
    config = run_of(
        folder,
        maps,
        tmp_path / "large",
        size=96,
        init=last,
        lr=1e-12,
        min_lr=0,
        weight_decay=0,
        warmup_epochs=0,
    )
    real = training.build_model

    def resting(*arguments):
        model, recipe = real(*arguments)
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 0.0
        return model, recipe

    monkeypatch.setattr(training, "build_model", resting)
    reported = training.train(config)["top1"]
    monkeypatch.undo()
    model = timm.create_model("lvvit_micro", num_classes=2, img_size=96)
    weights = checkpoints.load(last)["model"]
    model.load_state_dict(weights | {"pos_embed": resized(weights["pos_embed"], 12)})
    ended, _ = checkpoints.build(tmp_path / "large" / "last.pt")
    torch.testing.assert_close(answer(ended, 96), answer(model, 96), rtol=1e-4, atol=1e-4)
    loader = training.open_loader(config, "evaluate")
    normalize = Normalize(model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
    hits = images = 0
    with torch.no_grad():
        for batch in to_device(loader.batches(0), torch.device("cpu")):
            right = model.eval()(normalize(batch.image)).argmax(1) == batch.label
            hits, images = (
                hits + (right * batch.weight).sum().item(),
                images + batch.weight.sum().item(),
            )
    loader.close()
    assert images == 5
    assert reported == pytest.approx(hits / images)


def test_a_run_that_resumes_does_not_begin_again(folder, maps, tmp_path, capsys):
    training.train(run_of(folder, maps, tmp_path / "small"))
    last = tmp_path / "small" / "last.pt"
    config = run_of(folder, maps, tmp_path / "next", init=last, epochs=2)
    training.train(config)
    whole = checkpoints.load(tmp_path / "next" / "last.pt")["model"]
    last.unlink()  # no longer needed
    capsys.readouterr()
    again = training.train(replace(config, resume="auto"))
    assert "begins from" not in capsys.readouterr().out
    assert again["top1"] is not None
    now = checkpoints.load(tmp_path / "next" / "last.pt")["model"]
    assert all(torch.equal(now[name], tensor) for name, tensor in whole.items())


def test_the_command_refuses_a_file_that_does_not_fit_and_writes_nothing(
    folder, maps, tmp_path, command
):
    path = saved(published(made("lvvit_t", depth=1)), tmp_path / "t.pth.tar")
    done = command(
        "train.py",
        "lvvit_micro_token_label",
        "--loader",
        "folder",
        "--data",
        folder,
        "--val",
        folder,
        "--labels",
        maps,
        "--out",
        tmp_path / "run",
        "--device",
        "cpu",
        "--init",
        path,
    )
    assert done.returncode == 2
    assert f"{path} does not fit this LVViT" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("lvvit_deit_s", ("depth=1", "embed_dim=48", "num_heads=3")),
        (
            "lvvit_micro",
            ("stem=((7, 2), (3, 2), (4, 2))", "norm_groups=3", "qkv_bias=True", "post_norm=True"),
        ),
    ],
)
def test_ablations_train_from_the_command_line_with_mixtoken_and_are_built_again(
    folder, maps, tmp_path, model, arguments
):
    training.train(
        run_of(folder, maps, tmp_path / "run", model=model, model_kwargs=arguments, mixtoken=True)
    )
    built, checkpoint = checkpoints.build(tmp_path / "run" / "last.pt")
    assert checkpoint["recipe"]["name"] == model
    assert answer(built).shape == (1, 2)

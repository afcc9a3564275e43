"""Initialization from files: published ones, timm's, and ours at another size.

A file that does not fit is refused and changes nothing.
"""

import argparse
import json
import math
import os
import pickle
import struct
from collections import OrderedDict
from contextlib import nullcontext

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

import densefeed.train as training
from densefeed.models import checkpoints
from densefeed.models.lvvit import LVViT, checkpoint_filter_fn
from densefeed.models.meta_device import meta_device
from densefeed.models.model_spec import build_on_meta
from densefeed.objectives import build_objective
from densefeed.pipelines.augment.augmentation import Normalize
from densefeed.pipelines.batch import to_device
from densefeed.recipes import RECIPES
from densefeed.relabel.load_teacher import load_network
from densefeed.system.errors import UserError
from densefeed.system.options import with_options
from densefeed.training import compile, setup
from densefeed.training.config import Config
from densefeed.training.load_model import open_trained
from densefeed.training.run_checkpoints import Checkpoints

# The published names of modules that have another name here.
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


def published_state(model, names=PUBLISHED):
    """Return the model's state dict by the published names."""
    renamed = {}
    for name, tensor in model.state_dict().items():
        module, _, tensor_name = name.rpartition(".")
        renamed[f"{names.get(module, module)}.{tensor_name}".removeprefix(".")] = tensor.clone()
    assert len(renamed) == len(model.state_dict())
    return renamed


def build_random(name="lvvit_micro", seed=0, **fields):
    """Build a model in which every tensor, running statistics too, is random."""
    torch.manual_seed(seed)
    model = timm.create_model(name, **fields).eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                draw = torch.rand_like if key.endswith("running_var") else torch.randn_like
                tensor.add_(0.05 * draw(tensor))
    return model


def predict(model, side=64):
    image = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        return model.eval()(image)


def save(content, path):
    (save_file if path.suffix == ".safetensors" else torch.save)(content, path)
    return path


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "size", "rows", "count"),
    [
        ("lvvit_t", 224, 197, 8_534_720),
        ("lvvit_s", 224, 197, 26_151_824),
        pytest.param("lvvit_s", 384, 577, 26_297_744, marks=pytest.mark.slow),
    ],
)
def test_published_files_give_bit_identical_logits_however_loaded(
    name, size, rows, count, tmp_path, monkeypatch
):
    """Parameter counts as published: 8.53, 26.15 and 26.30 million.

    Three of the 12 or 16 blocks are loaded.
    """
    with meta_device():
        whole = timm.create_model(name, img_size=size)
    assert sum(p.numel() for p in whole.parameters()) == count
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda *a, **named: create(*a, depth=3, **named))
    source = build_random(name, img_size=size)
    names = published_state(source)
    assert names["pos_embed"].shape[1] == rows
    path = save(names, tmp_path / f"{name}.pth.tar")
    want = predict(source, size)
    begun = timm.create_model(name, img_size=size)
    assert checkpoints.initialize(begun, path) == f"initialized from {path}"
    assert torch.equal(predict(begun, size), want)
    built, _ = checkpoints.build(path, name)
    assert built.grid_size == size // 16
    assert torch.equal(predict(built, size), want)
    for arguments in (
        dict(pretrained=True, pretrained_cfg_overlay=dict(file=str(path))),
        dict(checkpoint_path=str(path)),
    ):
        loaded = timm.create_model(name, img_size=size, **arguments)
        assert torch.equal(predict(loaded, size), want)


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


@pytest.mark.one_in(5)
@pytest.mark.parametrize("prefix", ["model.", "net.", "backbone.", "module.net._orig_mod."])
@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", ""])
def test_outside_prefixes_that_all_weights_share_are_removed(tmp_path, prefix, key):
    """As of a LightningModule, of a class of one's own, and of both and what PyTorch adds."""
    model = timm.create_model("test_resnet", num_classes=3)
    weights = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    path = tmp_path / "wrapped.ckpt"
    torch.save({key: weights, "epoch": 3} if key else weights, path)
    built, _ = checkpoints.build(path, "test_resnet")
    other = timm.create_model("test_resnet", num_classes=3)
    checkpoints.initialize(other, path)
    for got in (built, other):
        assert all(map(torch.equal, got.state_dict().values(), model.state_dict().values()))


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("others", "taken"),
    [
        (["criterion"], "model"),
        (["ema"], "model"),
        (["model_ema.module", "criterion"], "net"),
        (["teacher", "metric"], "student"),
        (["model.ema"], "model"),
        (["ema"], ""),
        (["criterion"], "ema.module"),
    ],
)
@pytest.mark.parametrize("head", [True, False])
def test_outside_the_network_is_taken_from_among_other_tensors(
    tmp_path, capsys, others, taken, head
):
    """As of a LightningModule with a weighted loss, with EMA weights or a teacher."""
    model, average = (timm.create_model("test_resnet", num_classes=3) for _ in range(2))
    state = model.state_dict()
    if not head:
        state = {name: t for name, t in state.items() if not name.startswith("fc.")}
    dot = taken and f"{taken}."
    weights, left_out = {}, 0
    # The averages stand first.
    for other in others:
        lone = other in ("criterion", "metric")
        rest = {"weight": torch.ones(3)} if lone else average.state_dict()
        weights |= {f"{other}.{name}": tensor for name, tensor in rest.items()}
        left_out += len(rest)
    weights |= {dot + name: tensor for name, tensor in state.items()}
    path = tmp_path / "wrapped.ckpt"
    torch.save({"state_dict": weights, "epoch": 3}, path)
    note = f"{left_out:,} other tensors of the file left out"
    if taken:
        note = f"took the tensors of {taken}.*; {note}"
    if head:
        built, _ = checkpoints.build(path, "test_resnet")
        assert note in capsys.readouterr().out
        assert all(map(torch.equal, built.state_dict().values(), state.values()))
    else:
        with pytest.raises(checkpoints.CheckpointError, match=r"another name than fc.weight \("):
            checkpoints.build(path, "test_resnet")
    other = timm.create_model("test_resnet", num_classes=3)
    assert note in checkpoints.initialize(other, path)
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in state.items())


def test_outside_one_nested_dictionary_of_weights_is_taken_under_any_key(tmp_path):
    model = timm.create_model("test_resnet", num_classes=3)
    path, state = tmp_path / "x.pth", model.state_dict()
    torch.save({"network": state, "epoch": 3, "optimizer": {"state": {}, "lr": 0.1}}, path)
    other = timm.create_model("test_resnet", num_classes=3)
    checkpoints.initialize(other, path)
    assert all(map(torch.equal, other.state_dict().values(), state.values()))
    torch.save({"student": state, "teacher": state}, path)
    with pytest.raises(checkpoints.CheckpointError, match=r"keys student, teacher; save one of"):
        checkpoints.initialize(other, path)


def test_a_prefix_of_the_model_stays(tmp_path):
    model = torch.nn.Sequential(OrderedDict(net=torch.nn.Linear(2, 3)))
    torch.save(model.state_dict(), tmp_path / "x.pth")
    other = torch.nn.Sequential(OrderedDict(net=torch.nn.Linear(2, 3)))
    checkpoints.initialize(other, tmp_path / "x.pth")
    assert torch.equal(other.net.weight, model.net.weight)


@pytest.mark.one_in(5)
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
def test_wrappers_and_other_names_are_recognized(names, kind, tmp_path):
    source, other = build_random(num_classes=5), build_random(num_classes=5, seed=1)
    path = save(
        wrap(kind, published_state(source, names), published_state(other, names)),
        tmp_path / "weights.pt",
    )
    model = timm.create_model("lvvit_micro", num_classes=5)
    line = checkpoints.initialize(model, path)
    assert torch.equal(predict(model), predict(source))
    assert ("EMA" in line) == (kind in ("timm's trainer with EMA", "model_ema", "ours"))


def test_safetensors_are_read(tmp_path):
    source = build_random(num_classes=5)
    path = save(published_state(source), tmp_path / "weights.safetensors")
    model = timm.create_model("lvvit_micro", num_classes=5)
    checkpoints.initialize(model, path)
    assert torch.equal(predict(model), predict(source))


def resized(table, side):
    """Resize a position table by the published rule, with PyTorch's function."""
    old = round((table.shape[1] - 1) ** 0.5)
    grid = table[:, 1:].reshape(1, old, old, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(
        grid, size=(side, side), mode="bicubic", align_corners=False, antialias=False
    )
    return torch.cat([table[:, :1], grid.flatten(2).mT], 1)


@pytest.mark.parametrize(("size", "side"), [(384, 24), (160, 10)])
def test_the_position_table_is_resized_as_published(size, side, tmp_path):
    source = build_random("lvvit_t", depth=1)
    path = save(published_state(source), tmp_path / "t.pth.tar")
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


def test_heads_with_other_classes_keep_their_initial_weights_and_are_reported(tmp_path):
    source = build_random("lvvit_t", depth=1)
    path = save(published_state(source), tmp_path / "t.pth.tar")
    model = timm.create_model("lvvit_t", depth=1, num_classes=5)
    built = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    line = checkpoints.initialize(model, path)
    assert line == f"initialized from {path}; new: head and token_head (1,000 classes in the file)"
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


def test_the_heads_of_a_detector_are_renumbered_behind_their_background():
    """One row of scores and masks and four of boxes for the background and each class."""
    for rows in (1, 4):
        tensor = torch.arange(4 * rows * 2.0).reshape(4 * rows, 2)
        want = tensor.reshape(4, rows, 2)[[0, 3, 1, 2]].reshape(4 * rows, 2)
        assert torch.equal(checkpoints.order_rows(tensor, [2, 0, 1]), want)
    assert checkpoints.order_rows(torch.arange(3), [2, 0, 1]).tolist() == [2, 0, 1]


def test_a_detector_with_classes_in_another_order_keeps_its_heads(tmp_path):
    kwargs = dict(backbone="lvvit_micro", decoder_width=16, samples=8, num_classes=3, img_size=64)
    torch.manual_seed(0)
    source = timm.create_model("mask_rcnn", **kwargs)
    path = save({"model": source.state_dict(), "class_names": ["a", "b", "c"]}, tmp_path / "x.pt")
    model = timm.create_model("mask_rcnn", **kwargs)
    line = checkpoints.initialize(model, path, ["c", "a", "b"])
    assert line == f"initialized from {path}; classes of its head renumbered by name"
    order = torch.tensor([0, 3, 1, 2])
    for name in ("cls_score", "bbox_pred"):
        bias = f"roi_heads.box_predictor.{name}.bias"
        new, old = (network.get_parameter(bias) for network in (model, source))
        assert torch.equal(new.unflatten(0, (4, -1)), old.unflatten(0, (4, -1))[order])


@pytest.mark.parametrize("key", ["class_names", "class_to_idx"])
def test_outside_a_head_in_another_order_is_renumbered_by_name(tmp_path, key):
    source, names = build_random(num_classes=3), ["1", "10", "2"]
    numbers = {name: number for number, name in enumerate(names)}
    stated = {key: numbers if key == "class_to_idx" else names}
    path = save({"model": source.state_dict()} | stated, tmp_path / "file.pt")
    model = timm.create_model("lvvit_micro", num_classes=3)
    line = checkpoints.initialize(model, path, ["1", "2", "10"])
    assert line == f"initialized from {path}; classes of its head renumbered by name"
    for name, tensor in model.state_dict().items():
        want = source.state_dict()[name]
        heads = name.startswith(("head", "token_head"))
        assert torch.equal(tensor, want[[0, 2, 1]] if heads else want), name
    assert checkpoints.initialize(model, path, names) == f"initialized from {path}"
    assert torch.equal(model.head.weight, source.head.weight)


def test_outside_a_head_of_as_many_other_classes_is_new(tmp_path):
    source = build_random(num_classes=3)
    state = {"model": source.state_dict(), "class_names": ["ant", "bee", "cat"]}
    path = save(state, tmp_path / "file.pt")
    model = timm.create_model("lvvit_micro", num_classes=3)
    built = model.head.weight.clone()
    line = checkpoints.initialize(model, path, ["ant", "bee", "dog"])
    assert line.endswith("; new: head and token_head (3 other classes in the file)")
    assert torch.equal(model.head.weight, built)


@pytest.mark.parametrize("stated", [{}, {"class_names": ["0", "1", "2"]}])
def test_outside_a_head_without_names_is_said_to_go_by_order(tmp_path, stated, capsys):
    source = build_random(num_classes=3)
    path = save({"model": source.state_dict()} | stated, tmp_path / "file.pt")
    model = timm.create_model("lvvit_micro", num_classes=3)
    line = checkpoints.initialize(model, path, ["ant", "bee", "cat"])
    assert line.endswith("; classes of its head matched with those of the data by their order")
    assert torch.equal(model.head.weight, source.head.weight)
    # Numbers are names too, those of a set of digits.
    differ = "the head (0, 1, 2) have other names than those of the data (ant, bee, cat)"
    assert (differ in capsys.readouterr().err) == bool(stated)


def test_a_head_that_only_the_file_or_the_model_has(tmp_path):
    """A file without a token head leaves the model's as built; a model without one ignores it."""
    both, single = build_random(num_classes=5), build_random(num_classes=5, token_head=False)
    path = save(published_state(single), tmp_path / "single.pt")
    model = timm.create_model("lvvit_micro", num_classes=5)
    built = model.token_head.weight.clone()
    assert checkpoints.initialize(model, path) == f"initialized from {path}; new: token_head"
    assert torch.equal(model.token_head.weight, built)
    assert torch.equal(model.head.weight, single.head.weight)

    path = save(published_state(both), tmp_path / "both.pt")
    model = timm.create_model("lvvit_micro", num_classes=5, token_head=False)
    line = f"initialized from {path}; 2 tensors of the file not used"
    assert checkpoints.initialize(model, path) == line
    with torch.no_grad():
        image = torch.randn(2, 3, 64, 64)
        assert torch.equal(model.eval()(image), both.head(both.forward_features(image)[:, 0]))
    headless = timm.create_model("lvvit_micro", num_classes=0)
    checkpoints.initialize(headless, path)
    assert torch.equal(headless.norm.weight, both.norm.weight)


def test_deit_s_is_initialized_from_timms_file(tmp_path):
    """timm's DeiT-S weights in timm's format; the token head is new."""
    torch.manual_seed(0)
    source = timm.create_model("deit_small_patch16_224", depth=2).eval()
    path = save(source.state_dict(), tmp_path / "deit.safetensors")
    model = timm.create_model("lvvit_deit_s", depth=2).eval()
    assert checkpoints.initialize(model, path) == f"initialized from {path}; new: token_head"
    single = timm.create_model("lvvit_deit_s", depth=2, token_head=False).eval()
    checkpoints.initialize(single, path)
    for module in single.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-6
    torch.testing.assert_close(predict(single, 224), predict(source, 224), rtol=1e-4, atol=1e-5)
    assert torch.equal(model.stem[0].weight, source.patch_embed.proj.weight)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["deit_small_patch16_224", "nfnet_micro", "resnet18"])
def test_timm_models_are_initialized_from_their_own_files(name, tmp_path):
    """With timm's filter, if the family has one, and the head's name from timm's configuration."""
    fields = dict(depth=1) if name.startswith("deit") else {}
    sized = (dict(img_size=96), dict(img_size=128)) if name.startswith("deit") else ({}, {})
    source = build_random(name, num_classes=7, **fields, **sized[0])
    path = save({"state_dict": source.state_dict()}, tmp_path / "weights.pt")
    model = timm.create_model(name, num_classes=7, **fields, **sized[0])
    checkpoints.initialize(model, path)
    assert torch.equal(predict(model, 96), predict(source, 96))
    other = timm.create_model(name, num_classes=3, **fields, **sized[1])
    line = checkpoints.initialize(other, path)
    assert "(7 classes in the file)" in line
    assert ("position table resized from 37 to 65 rows" in line) == name.startswith("deit")
    assert predict(other, 128).shape == (1, 3)


def damage(kind, state):
    """Return weights that do not fit `lvvit_micro` with 5 classes."""
    if kind == "a tensor is missing":
        del state["blocks.3.mlp.fc2.bias"]
    elif kind == "two are missing":
        del state["blocks.3.mlp.fc2.bias"], state["norm.weight"]
    elif kind == "one is unexpected":
        state["blocks.4.norm1.weight"] = torch.zeros(96)
    elif kind == "the table is not square":
        state["pos_embed"] = torch.zeros(1, 61, 96)
    elif kind == "numbers":
        return {"epoch": 3, "lr": 0.1}
    elif kind == "nothing":
        return {}
    return state


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("a tensor is missing", r"missing: blocks\.3\.mlp\.fc2\.bias; give the --model"),
        ("two are missing", r"missing: blocks\.3\.mlp\.fc2\.bias and 1 more; give"),
        ("one is unexpected", r"unexpected: blocks\.4\.norm1\.weight; give"),
        ("the table is not square", r"of another shape: pos_embed; give"),
        ("numbers", "holds no dictionary of weights"),
        ("nothing", "holds no dictionary of weights"),
    ],
)
def test_files_that_do_not_fit_are_refused_and_change_nothing(kind, why, tmp_path):
    path = save(damage(kind, published_state(build_random(num_classes=5))), tmp_path / "bad.pt")
    model = build_random(num_classes=5, seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(checkpoints.CheckpointError, match=why) as caught:
        checkpoints.initialize(model, path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_cut_file_or_a_folder_is_refused_with_a_remedy(tmp_path):
    path = save(build_random(num_classes=5).state_dict(), tmp_path / "cut.pt")
    path.write_bytes(path.read_bytes()[:-5_000])
    with pytest.raises(checkpoints.CheckpointError, match=r"cut\.pt .*; copy .*again"):
        checkpoints.load(path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(checkpoints.CheckpointError, match="folder: this is a folder where a file"):
        checkpoints.load(tmp_path / "folder")


def test_outside_name_of_another_model_than_a_run_holds_is_refused(tmp_path):
    spec = checkpoints.ModelSpec("test_resnet", {"num_classes": 2})
    content = {"model": spec.build().state_dict(), "recipe": spec._asdict()}
    path = save(content, tmp_path / "run.pt")
    checkpoints.build(path, "test_resnet")
    with pytest.raises(checkpoints.CheckpointError, match=r"holds a model test_.*--model resnet18"):
        checkpoints.build(path, "resnet18")


def test_of_hundreds_of_missing_weights_the_first_are_named(tmp_path):
    path = save({"model": {"no.such": torch.zeros(1)}}, tmp_path / "none.pt")
    with pytest.raises(
        checkpoints.CheckpointError, match=r"Missing key.*conv1.*check --model"
    ) as e:
        checkpoints.build(path, "resnet18")
    assert len(str(e.value)) < 500


def test_the_file_of_another_model_is_refused_with_both_sizes(tmp_path):
    source = build_random("lvvit_t", depth=1)
    path = save(published_state(source), tmp_path / "t.pt")
    count = sum(tensor.numel() for tensor in source.state_dict().values())
    with pytest.raises(
        checkpoints.CheckpointError,
        match=rf"\({count:,} values in the file, .* in the model\): missing: blocks\.1\.",
    ):
        checkpoints.initialize(timm.create_model("lvvit_t", depth=2), path)
    with pytest.raises(checkpoints.CheckpointError, match="does not fit"):
        checkpoints.initialize(timm.create_model("deit_small_patch16_224", depth=1), path)
    with pytest.raises(checkpoints.CheckpointError, match="does not fit"):
        checkpoints.initialize(timm.create_model("resnet18"), path)
    # timm's own loading is as strict.
    with pytest.raises(RuntimeError, match="Missing key"):
        timm.create_model(
            "lvvit_t", depth=2, pretrained=True, pretrained_cfg_overlay=dict(file=str(path))
        )
    with pytest.raises(checkpoints.CheckpointError, match="there is no such file"):
        checkpoints.initialize(source, tmp_path / "none.pt")


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_code_in_a_file_is_never_run(tmp_path):
    path = tmp_path / "trap.pt"
    torch.save(
        {"state_dict": published_state(build_random()), "args": Trap(tmp_path / "sprung")}, path
    )
    with pytest.raises(checkpoints.CheckpointError, match="not a checkpoint that loads safely"):
        checkpoints.initialize(timm.create_model("lvvit_micro"), path)
    bare = tmp_path / "bare.pt"
    bare.write_bytes(pickle.dumps(Trap(tmp_path / "sprung"), protocol=2))
    with pytest.raises(checkpoints.CheckpointError, match="not a checkpoint that loads safely"):
        checkpoints.load(bare)
    assert not (tmp_path / "sprung").exists()


def test_files_without_batch_norms_counter_and_in_half_precision_are_loaded(tmp_path):
    source = build_random(num_classes=5)
    state = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in published_state(source).items()
        if "num_batches_tracked" not in name
    }
    model = timm.create_model("lvvit_micro", num_classes=5)
    checkpoints.initialize(model, save(state, tmp_path / "old.pt"))
    assert model.pos_embed.dtype == torch.float32
    torch.testing.assert_close(predict(model), predict(source), rtol=0, atol=0.02)


def test_the_filter_does_not_modify_its_input():
    source = build_random(num_classes=5)
    state = published_state(source)
    before = dict(state)
    fitted = checkpoint_filter_fn(state, LVViT(img_size=64, patch_size=8, token_head=False))
    assert state == before
    assert not [
        name for name in fitted if name.startswith(("patch_embed", "aux_head", "token_head"))
    ]


# ---------------------------------------------------------------- files from anywhere

OURS = {"mean": [0.5] * 3, "std": [0.2] * 3, "class_names": list("abcde"), "step": 3}


def save_run(out, source, **changes):
    """Save a run folder as train.py does, with other entries; return the newest checkpoint."""
    state = {
        "model": source.state_dict(),
        "recipe": {"name": "lvvit_micro", "kwargs": {"num_classes": 5, "img_size": 64}},
        "config": {"data": {"size": 64, "crop_pct": 0.9}},
    }
    Checkpoints(out, 2).save(state | OURS | changes, 3)
    return out / "last.pt"


@pytest.fixture(scope="module")
def source():
    return build_random(num_classes=5)


def loads(path):
    """Every way to load a model of a checkpoint."""
    return [
        lambda: checkpoints.initialize(timm.create_model("lvvit_micro", num_classes=5), path),
        lambda: open_trained(path),
        lambda: open_trained(path.parent),
        lambda: load_network(str(path.parent), "", 64),
    ]


def test_a_run_folder_loads(source, tmp_path):
    for load in loads(save_run(tmp_path, source)):
        load()


def test_another_hash_than_in_the_manifest_is_refused(source, tmp_path, capsys):
    path = save_run(tmp_path, source)
    content = bytearray(path.read_bytes())
    at = content.rindex(struct.pack("<f", source.head.weight[0, 0].item()))
    content[at] ^= 1
    path.write_bytes(content)
    for load in loads(path):
        with pytest.raises(checkpoints.CheckpointError, match=r"SHA-256 .*manifest\.json"):
            load()
    # A lone file has no manifest; zip's own checksum finds this one where torch compares it.
    manifest = tmp_path / "checkpoints" / "manifest.json"
    manifest.write_text("[{")
    save({"model": source.state_dict()}, tmp_path / "checkpoints" / "lone.pt")
    checkpoints.load(tmp_path / "checkpoints" / "lone.pt")
    assert "no SHA-256" in capsys.readouterr().err


KWARGS = {"num_classes": 5, "img_size": 64}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recipe": {"name": "lvvit_micro", "kwargs": KWARGS | {"depth": 10**9}}}, "above 1,000"),
        ({"recipe": {"name": "lvvit_micro", "kwargs": KWARGS | {"embed_dim": 960_000}}}, "not fit"),
        ({"recipe": {"name": "lvvit_micro", "kwargs": KWARGS, "more": 1}}, "its recipe is not"),
        ({"recipe": {"name": "lvvit_micro", "kwargs": [3]}}, "its recipe is not"),
        ({"recipe": [1]}, "its recipe is not"),
        ({"class_names": ["\ud800"]}, "its class_names is not a list of names"),
        ({"config": {"data": {"crop_pct": 1e-320}}}, "its crop_pct is not from 0.001 to 1"),
        ({"config": {"data": {"eval_interpolation": 3}}}, "is not bilinear or bicubic"),
        ({"recipe": {"name": "hf-hub:timm/resnet18", "kwargs": {}}}, "timm knows no model"),
        ({"recipe": {"name": "local-dir:/tmp", "kwargs": {}}}, "timm knows no model"),
        ({"recipe": {"name": "lvvit_micro", "kwargs": {"pretrained": True}}}, "not an argument"),
        ({"mean": [0.5, 0.5]}, "its mean is not three numbers"),
        ({"std": [0.5, 0.5, 0.0]}, "its std is not three numbers from 1e-6 to 1e6"),
        ({"std": [0.5, 0.5, 1e-320]}, "its std is not three numbers from 1e-6 to 1e6"),
        ({"std": [0.5, 0.5, -0.1]}, "its std is not three numbers from 1e-6 to 1e6"),
        ({"mean": [0.5, 0.5, math.nan]}, "its mean is not three numbers from -1e6 to 1e6"),
        ({"mean": [0.5, 0.5, 1e300]}, "its mean is not three numbers from -1e6 to 1e6"),
        ({"mean": "abc"}, "its mean is not three numbers"),
        ({"class_names": [1, 2, 3, 4, 5]}, "its class_names is not a list of names"),
        ({"class_names": 5}, "its class_names is not a list of names"),
        ({"config": {"data": {"size": "64"}}}, "its size is not a number of pixels"),
        ({"config": {"data": {"size": -64}}}, "its size is not a number of pixels"),
        ({"config": {"data": {"crop_pct": 2.0}}}, "its crop_pct is not from 0.001 to 1"),
        ({"model": [1]}, "no dictionary of weights"),
        ({"model": {"a": 1}}, "no dictionary of weights"),
        ({"model": {3: torch.zeros(1)}}, "no dictionary of weights"),
        ({"model": {"a": torch.zeros(1).expand(10**9)}}, "not a dense tensor"),
        ({"model": {str(n): torch.zeros(5) for n in range(3)} | {"b": None}}, "no dictionary"),
    ],
)
def test_altered_checkpoints_are_refused_in_one_sentence(changes, said, source, tmp_path):
    path = save_run(tmp_path, source, **changes)
    for load in (lambda: open_trained(path), lambda: load_network(str(path), "", 64)):
        with pytest.raises(UserError, match=said) as caught:
            load()
        assert str(path) in str(caught.value)
        assert str(caught.value).isprintable()


def test_weights_that_repeat_a_storage_are_refused(source, tmp_path):
    one = torch.zeros(1000)
    path = save({"model": {str(n): one for n in range(9)}}, tmp_path / "x.pt")
    with pytest.raises(checkpoints.CheckpointError, match="repeat a few storages"):
        checkpoints.build(path, "lvvit_micro")


def test_tables_beside_small_weights_are_refused_before_they_take_memory(source, tmp_path):
    """A file of 50 kB: Swin's masks of its windows are no weights, and take 4 GB."""
    kwargs = {"img_size": 4096, "window_size": 32, "embed_dim": 4, "depths": [2], "num_heads": [1]}
    spec = checkpoints.ModelSpec("swin_tiny_patch4_window7_224", kwargs)
    state = {name: torch.zeros(t.shape) for name, t in build_on_meta(spec).state_dict().items()}
    path = save_run(tmp_path, source, recipe=spec._asdict(), model=state)
    with pytest.raises(
        checkpoints.CheckpointError, match=r"builds tables of 4(,[0-9]{3}){3} bytes"
    ):
        checkpoints.build(path)


def test_the_tables_of_a_large_model_may_be_larger(tmp_path):
    """beit_large at 640 pixels has 0.5 GB of them beside 1.2 GB of weights."""
    for bytes_of_weights, fits in ((2**20, False), (2**28, True)):
        with torch.device("meta"):
            twin = torch.nn.Linear(bytes_of_weights // 4, 1, bias=False)
            twin.register_buffer("table", torch.zeros(2**27))
        with nullcontext() if fits else pytest.raises(checkpoints.CheckpointError, match="tables"):
            checkpoints.check_tables(twin, tmp_path)


def test_the_header_of_safetensors_is_limited(tmp_path):
    """Its parser takes 35 times its bytes."""
    path = tmp_path / "x.safetensors"
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps(dict.fromkeys(map(str, range(80_000)), empty)).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(
        checkpoints.CheckpointError, match="has a header of more than 4,194,304 byt"
    ):
        checkpoints.load(path)


def test_out_of_memory_is_not_called_a_model_that_does_not_fit(source, tmp_path, monkeypatch):
    def fail(_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    path = save_run(tmp_path, source)
    monkeypatch.setattr(checkpoints.ModelSpec, "build", fail)
    with pytest.raises(RuntimeError, match="can't allocate"):
        checkpoints.build(path)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused_by_name(value, source, tmp_path):
    state = source.state_dict()
    state["blocks.1.mlp.fc1.bias"] = torch.full_like(state["blocks.1.mlp.fc1.bias"], value)
    path = save_run(tmp_path, source, model=state)
    for load in loads(path):
        with pytest.raises(checkpoints.CheckpointError, match=r"blocks\.1\.mlp\.fc1\.bias has val"):
            load()


def test_no_second_file_is_read(source, tmp_path):
    """timm 1.0.20 and 1.0.24 unpickled the file that `checkpoint_path` names."""
    torch.save(Trap(tmp_path / "sprung"), tmp_path / "second.pt")
    for name in ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay"):
        second = str(tmp_path / "second.pt")
        value = second if name == "checkpoint_path" else {"file": second}
        recipe = {"name": "lvvit_micro", "kwargs": KWARGS | {name: value}}
        path = save_run(tmp_path / name, source, recipe=recipe)
        for load in (
            lambda path=path: open_trained(path),
            lambda path=path: load_network(str(path), "", 64),
        ):
            with pytest.raises(checkpoints.CheckpointError, match="its recipe cannot be used"):
                load()
    assert not (tmp_path / "sprung").exists()


def test_a_file_does_not_choose_the_size_of_the_first_forward_pass(source, tmp_path):
    path = save_run(tmp_path, source, config={"data": {"size": 100_000}})
    with pytest.raises(UserError, match=r"states inputs of 100,000 px, above [0-9,]+; give --size"):
        open_trained(path)
    assert open_trained(path, size=64).size == 64


@pytest.mark.parametrize("place", ["pipe", "/dev/zero", "loop"])
def test_what_is_no_regular_file_is_refused(place, tmp_path):
    path = tmp_path / place
    if place == "pipe":
        os.mkfifo(path)
    elif place == "loop":
        path.symlink_to(path)
    with pytest.raises(checkpoints.CheckpointError, match=r"not a regular file|in a circle"):
        checkpoints.load(path)


# ---------------------------------------------------------------- train.py --init


def make_config(folder, maps, out, **fields):
    small = dict(
        data=folder,
        val=folder,
        score_maps=maps,
        out=out,
        batch=4,
        epochs=1,
        threads=2,
        eval_every=1,
        log_every=1,
        device="cpu",
        drop_path=0.0,
    )
    return with_options(RECIPES["lvvit_micro_token_label"](), **(small | fields))


def first_state(monkeypatch, config: Config):
    """Return the weights at a run's first step, and the run's result."""
    seen, real = [], compile.step_loss

    def step_loss(run, model, *others, **named):
        seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return real(run, model, *others, **named)

    monkeypatch.setattr(compile, "step_loss", step_loss)
    result = training.train(config)
    monkeypatch.setattr(compile, "step_loss", real)
    return seen[0], result


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_a_run_is_initialized_from_another_runs_weights_at_a_larger_size(
    folder, maps, tmp_path, monkeypatch, capsys, ema
):
    """From 64 to 96 px: all but the resized table as save, EMA weights if there are any.

    The model evaluates like one that loads these weights by hand.
    """
    training.train(make_config(folder, maps, tmp_path / "small", ema=ema))
    last = tmp_path / "small" / "last.pt"
    saved_weights = torch.load(last, weights_only=True)["ema" if ema else "model"]
    capsys.readouterr()
    config = make_config(folder, maps, tmp_path / "large", size=96, init=last, ema=ema)
    state, result = first_state(monkeypatch, config)
    weights = " (EMA weights)" if ema else ""
    notes = f"initialized from {last}{weights}; position table resized from 65 to 145 rows"
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
    torch.testing.assert_close(predict(begun, 96), predict(by_hand, 96), rtol=1e-5, atol=1e-5)
    assert json.loads((tmp_path / "large" / "config.json").read_text())["model"]["init"] == str(
        last
    )
    final = torch.load(tmp_path / "large" / "last.pt", weights_only=True)["model"]
    assert not torch.equal(final["head.weight"], state["head.weight"])


@pytest.mark.slow
def test_the_first_evaluation_is_that_of_the_resized_model(folder, maps, tmp_path, monkeypatch):
    """Without learning and with constant BatchNorm a run reports the initial accuracy."""
    training.train(make_config(folder, maps, tmp_path / "small", epochs=3, lr=3e-3))
    last = tmp_path / "small" / "last.pt"
    config = make_config(
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
    real = setup.build_model

    def build_frozen(*arguments):
        model, recipe = real(*arguments)
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 0.0
        return model, recipe

    monkeypatch.setattr(setup, "build_model", build_frozen)
    reported = training.train(config)["top1"]
    monkeypatch.undo()
    model = timm.create_model("lvvit_micro", num_classes=2, img_size=96)
    weights = checkpoints.load(last)["model"]
    model.load_state_dict(weights | {"pos_embed": resized(weights["pos_embed"], 12)})
    ended, _ = checkpoints.build(tmp_path / "large" / "last.pt")
    torch.testing.assert_close(predict(ended, 96), predict(model, 96), rtol=1e-4, atol=1e-4)
    objective = build_objective(config.setting)
    loader = setup.open_loader(config.data, config.optim, 0, objective, "evaluate")
    normalize = Normalize(model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
    hits = images = 0
    with torch.no_grad():
        for batch in to_device(loader.batches(0), torch.device("cpu")):
            right = model.eval()(normalize(batch.image)).argmax(1) == batch.label
            hits += (right * batch.weight).sum().item()
            images += batch.weight.sum().item()
    loader.close()
    assert images == 5
    assert reported == pytest.approx(hits / images)


def test_a_resumed_run_is_not_initialized_again(folder, maps, tmp_path, capsys):
    training.train(make_config(folder, maps, tmp_path / "small"))
    last = tmp_path / "small" / "last.pt"
    config = make_config(folder, maps, tmp_path / "next", init=last, epochs=2)
    training.train(config)
    whole = checkpoints.load(tmp_path / "next" / "last.pt")["model"]
    # The file is no longer needed.
    last.unlink()
    capsys.readouterr()
    again = training.train(with_options(config, resume="auto"))
    assert "initialized from" not in capsys.readouterr().out
    assert again["top1"] is not None
    now = checkpoints.load(tmp_path / "next" / "last.pt")["model"]
    assert all(torch.equal(now[name], tensor) for name, tensor in whole.items())


def test_the_command_refuses_a_file_that_does_not_fit_and_writes_nothing(
    folder, maps, tmp_path, command
):
    path = save(published_state(build_random("lvvit_t", depth=1)), tmp_path / "t.pth.tar")
    done = command(
        "train.py",
        "lvvit_micro_token_label",
        "--loader",
        "folder",
        "--data",
        folder,
        "--val",
        folder,
        "--score-maps",
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
def test_ablations_train_with_mixtoken_and_are_built_again_from_the_checkpoint(
    folder, maps, tmp_path, model, arguments
):
    training.train(
        make_config(
            folder, maps, tmp_path / "run", model=model, model_kwargs=arguments, mixtoken=True
        )
    )
    built, checkpoint = checkpoints.build(tmp_path / "run" / "last.pt")
    assert checkpoint["recipe"]["name"] == model
    assert predict(built).shape == (1, 2)

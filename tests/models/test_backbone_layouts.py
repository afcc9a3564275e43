"""Exported backbones, loaded by transformers, by timm, and by a forward pass of mmdetection's form.

mmdetection and mmsegmentation are not installed: `forward_mm` computes what their modules do, from
the file's names alone.
"""

import math
import os
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import densefeed  # noqa: F401
from densefeed.models.mask_rcnn import MaskRCNN
from densefeed.models.upernet import UperNet
from densefeed.system.errors import UserError
from densefeed.tools import export
from densefeed.tools.export import Export
from densefeed.training.load_model import open_trained

SWIN = "swin_tiny_patch4_window7_224"
# Maps of 16, 8 and 4 cells: in the last stage only unshifted blocks.
TINY = {
    "num_classes": 5,
    "img_size": 64,
    "window_size": 4,
    "embed_dim": 16,
    "depths": (2, 2, 1),
    "num_heads": (2, 4, 4),
}
OWN = {
    "lvvit_s": (dict(img_size=64, embed_dim=24, depth=16, num_heads=2), (6, 9, 12, 15)),
    "dhvt_tiny_cifar_patch4": (dict(embed_dim=16, depth=3, num_heads=2), (0, 2)),
    "cvt_13": (dict(dims=(8, 16, 16), depths=(1, 2, 1), num_heads=(1, 2, 2)), (0, 1, 2)),
    "cvt_13_drloc": (dict(dims=(8, 16, 16), depths=(1, 1, 1), num_heads=(1, 2, 2)), (1, 2)),
}


def build(name, seed=2, **kwargs):
    torch.manual_seed(seed)
    model = timm.create_model(name, **kwargs).eval()
    with torch.no_grad():  # so that weights that are initialized to zero or one matter too
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def write_run(folder, name, size=64, **kwargs):
    """A run folder as train.py writes it, with EMA weights that differ from the raw ones."""
    folder.mkdir()
    state = {key: build(name, n, **kwargs).state_dict() for n, key in enumerate(("model", "ema"))}
    state |= {"recipe": {"name": name, "kwargs": kwargs}, "config": {"data": {"size": size}}}
    torch.save(state, folder / "last.pt")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("swin") / "run", SWIN, **TINY)


def stage_outputs(image, weights="ema", **kwargs):
    """What both other packages return: timm's maps, normalized, the last with trained weights."""
    model = build(SWIN, 1 if weights == "ema" else 0, **TINY)
    any_size = timm.create_model(SWIN, **TINY | {"strict_img_size": False} | kwargs).eval()
    any_size.load_state_dict(model.state_dict())
    maps = any_size.forward_intermediates(image, norm=True, intermediates_only=True)
    return [F.layer_norm(y.movedim(1, -1), y.shape[1:2]).movedim(-1, 1) for y in maps[:-1]] + [
        maps[-1]
    ]


def equal(got, want):
    assert [y.shape for y in got] == [y.shape for y in want]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def attend_mm(x_NRCD, weight, window, shift, heads):
    """Window attention as one over the whole map, where a mask leaves the pairs of a window."""
    rows, columns, D = x_NRCD.shape[1:]
    x_NRCD = F.pad(x_NRCD, (0, 0, 0, -columns % window, 0, -rows % window))
    R, C = x_NRCD.shape[1:3]
    row, column = (part.flatten() for part in torch.meshgrid(
        (torch.arange(R) - shift) % R, (torch.arange(C) - shift) % C, indexing="ij"
    ))  # fmt: skip
    # Cells that the roll brings to the other border attend among themselves.
    groups = torch.stack([row // window, column // window, row >= R - shift, column >= C - shift])
    same = (groups[:, :, None] == groups[:, None]).all(0)
    down = row[:, None] % window - row % window + window - 1
    right = column[:, None] % window - column % window + window - 1
    bias_HTT = weight("relative_position_bias_table")[down * (2 * window - 1) + right].movedim(2, 0)
    qkv = F.linear(x_NRCD.flatten(1, 2), weight("qkv.weight"), weight("qkv.bias"))
    q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    logits = q @ k.mT / math.sqrt(D // heads) + bias_HTT
    out = logits.masked_fill(~same, -math.inf).softmax(-1) @ v
    out = F.linear(out.transpose(1, 2).flatten(2), weight("proj.weight"), weight("proj.bias"))
    return out.unflatten(1, (R, C))[:, :rows, :columns]


def forward_mm(state, image, sizes):
    """mmdetection's SwinTransformer: pad, then shift; merge by unfold; a norm for each output."""
    state = {name.removeprefix("backbone."): tensor for name, tensor in state.items()}

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])

    def linear(x, name):
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    patch, outputs = sizes["patch_size"], []
    image = F.pad(image, (0, -image.shape[3] % patch, 0, -image.shape[2] % patch))
    projection = (state[f"patch_embed.projection.{part}"] for part in ("weight", "bias"))
    x = norm(F.conv2d(image, *projection, stride=patch).movedim(1, -1), "patch_embed.norm")
    for i, depth in enumerate(sizes["depths"]):
        for j in range(depth):
            block, window = f"stages.{i}.blocks.{j}", sizes["window_size"]
            x = x + attend_mm(
                norm(x, f"{block}.norm1"),
                lambda name, block=block: state[f"{block}.attn.w_msa.{name}"],
                window,
                window // 2 if j % 2 else 0,
                sizes["num_heads"][i],
            )
            hidden = F.gelu(linear(norm(x, f"{block}.norm2"), f"{block}.ffn.layers.0.0"))
            x = x + linear(hidden, f"{block}.ffn.layers.1")
        outputs.append(norm(x, f"norm{i}").movedim(-1, 1))
        if i + 1 < len(sizes["depths"]):
            R, C = x.shape[1:3]
            x = F.pad(x, (0, 0, 0, C % 2, 0, R % 2)).movedim(-1, 1)
            merged = F.unfold(x, 2, stride=2).mT.unflatten(1, ((R + 1) // 2, (C + 1) // 2))
            x = linear(
                norm(merged, f"stages.{i}.downsample.norm"), f"stages.{i}.downsample.reduction"
            )
    return outputs


def load_mm(run, tmp_path):
    path = tmp_path / "backbone.pth"
    assert export.main(Export(checkpoint=run, out=path, to="mmdet-swin")) == [path]
    return torch.load(path, weights_only=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_transformers_loads_a_swin_backbone(run, tmp_path, weights):
    transformers = pytest.importorskip("transformers")
    files = export.main(Export(checkpoint=run, out=tmp_path / "out", to="hf-swin", weights=weights))
    assert [path.name for path in files] == ["config.json", "model.safetensors"]
    with pytest.raises(UserError, match=r"config.json exists already; remove it"):
        export.main(Export(checkpoint=run, out=tmp_path / "out", to="hf-swin"))
    stages = ["stage1", "stage2", "stage3"]
    model, found = transformers.SwinBackbone.from_pretrained(
        tmp_path / "out", out_features=stages, output_loading_info=True
    )
    assert not any(found.values()), found
    # 96 pixels are other maps, of which those of shifted windows are multiples of the window.
    for side in (64, 96):
        image = torch.randn(2, 3, side, side)
        equal(model.eval()(image).feature_maps, stage_outputs(image, weights))
    trained = open_trained(run, weights).model
    image = torch.randn(1, 3, 64, 64)
    last = trained.forward_intermediates(image, [2], norm=True, intermediates_only=True)
    equal(model(image).feature_maps[-1:], last)


def test_the_names_are_those_that_transformers_saves(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    export.main(Export(checkpoint=run, out=tmp_path / "out", to="hf-swin"))
    model = transformers.SwinBackbone.from_pretrained(tmp_path / "out")
    model.save_pretrained(tmp_path / "again")
    ours, theirs = (
        {name: tensor.shape for name, tensor in load_file(folder / "model.safetensors").items()}
        for folder in (tmp_path / "out", tmp_path / "again")
    )
    # The index is in files of version 4. A file may lack the norm that a backbone does not apply.
    names = {name for name in ours if not name.endswith("relative_position_index")}
    assert names == {name for name in theirs if not name.startswith("swin.layernorm.")}
    assert all(ours[name] == theirs[name] for name in names)


def test_a_part_of_the_stages_leaves_only_their_norms_unused(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    export.main(Export(checkpoint=run, out=tmp_path / "out", to="hf-swin"))
    model, found = transformers.SwinBackbone.from_pretrained(
        tmp_path / "out", out_features=["stage2"], output_loading_info=True
    )
    unused = {f"hidden_states_norms.stage{n}.{part}" for n in (1, 3) for part in ("weight", "bias")}
    assert set(found.pop("unexpected_keys")) == unused
    assert not any(found.values())
    image = torch.randn(1, 3, 64, 64)
    equal(model.eval()(image).feature_maps, stage_outputs(image)[1:2])


def test_a_forward_pass_of_mmdetection_gives_the_outputs(run, tmp_path):
    state = load_mm(run, tmp_path)
    for side in (64, 96):
        image = torch.randn(2, 3, side, side)
        equal(forward_mm(state, image, TINY | {"patch_size": 4}), stage_outputs(image))


@pytest.mark.parametrize("shape", [(68, 84), (61, 50)])
def test_both_others_pad_alike_where_timm_does_not(run, tmp_path, shape):
    """timm shifts a map before it pads it to whole windows, the others after."""
    transformers = pytest.importorskip("transformers")
    export.main(Export(checkpoint=run, out=tmp_path / "out", to="hf-swin"))
    model = transformers.SwinBackbone.from_pretrained(tmp_path / "out").eval()
    image = torch.randn(1, 3, *shape)
    got = model(image).feature_maps
    equal(got, forward_mm(load_mm(run, tmp_path), image, TINY | {"patch_size": 4}))
    if shape == (68, 84):
        assert (got[0] - stage_outputs(image)[0]).abs().max() > 1e-3


def test_the_names_and_shapes_are_those_of_mmdetection(run, tmp_path):
    """Written out from mmdet/models/backbones/swin.py of mmdetection 3."""
    want = {"patch_embed.projection.weight": (16, 3, 4, 4), "patch_embed.projection.bias": (16,)}
    want |= {f"patch_embed.norm.{part}": (16,) for part in ("weight", "bias")}
    for i, (depth, heads) in enumerate(zip(TINY["depths"], TINY["num_heads"], strict=True)):
        D = 16 * 2**i
        want |= {f"norm{i}.weight": (D,), f"norm{i}.bias": (D,)}
        for j in range(depth):
            linear = {"attn.w_msa.qkv": (3 * D, D), "attn.w_msa.proj": (D, D)}
            linear |= {"ffn.layers.0.0": (4 * D, D), "ffn.layers.1": (D, 4 * D)}
            block = {f"{name}.weight": shape for name, shape in linear.items()}
            block |= {f"{name}.bias": shape[:1] for name, shape in linear.items()}
            block |= {f"norm{n}.{part}": (D,) for n in (1, 2) for part in ("weight", "bias")}
            block["attn.w_msa.relative_position_bias_table"] = (49, heads)
            block["attn.w_msa.relative_position_index"] = (16, 16)
            want |= {f"stages.{i}.blocks.{j}.{name}": shape for name, shape in block.items()}
        if i < 2:
            want[f"stages.{i}.downsample.reduction.weight"] = (2 * D, 4 * D)
            want |= {f"stages.{i}.downsample.norm.{part}": (4 * D,) for part in ("weight", "bias")}
    state = load_mm(run, tmp_path)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        f"backbone.{name}": shape for name, shape in want.items()
    }
    # Each has a storage of its own, so the file has no bytes of others.
    assert all(t.nbytes == t.untyped_storage().nbytes() for t in state.values())
    # The row of a pair is the difference of rows and columns, counted from the window's last cell.
    steps = (7 * torch.arange(4)[:, None] + torch.arange(4)).flatten()
    index = (steps[:, None] + steps[None]).flip(1)
    assert torch.equal(
        state["backbone.stages.0.blocks.0.attn.w_msa.relative_position_index"], index
    )


@pytest.mark.parametrize("size", [0, 128])
def test_timm_loads_the_features_of_swin(run, tmp_path, capsys, size):
    """With --size its windows grow as the maps do; the printed call states them."""
    path = tmp_path / "backbone.safetensors"
    export.main(Export(checkpoint=run, out=path, to="timm-features", size=size))
    [line] = [row for row in capsys.readouterr().out.splitlines() if row.startswith("load it")]
    model = eval(line.removeprefix("load it with "), {"timm": timm}).eval()
    trained = open_trained(run, size=size).model
    image = torch.randn(2, 3, size or 64, size or 64)
    want = trained.forward_intermediates(image, intermediates_only=True)
    equal([y.movedim(-1, 1) for y in model(image)], want)
    if not size:
        with pytest.raises(AssertionError, match="Input height"):
            model(torch.randn(1, 3, 96, 96))
        any_size = timm.create_model(
            SWIN, **TINY, features_only=True, strict_img_size=False, checkpoint_path=path
        )
        image = torch.randn(1, 3, 96, 96)
        [last] = any_size.eval()(image)[-1:]
        final = timm.create_model(SWIN, **TINY, strict_img_size=False).eval()
        final.load_state_dict(trained.state_dict())
        want = final.forward_intermediates(image, [2], intermediates_only=True)
        equal([last.movedim(-1, 1)], want)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", OWN)
def test_timm_loads_the_features_of_our_models(tmp_path, name):
    kwargs, indices = OWN[name]
    run = write_run(tmp_path / "run", name, **kwargs)
    path = tmp_path / "backbone.safetensors"
    export.main(Export(checkpoint=run, out=path, to="timm-features"))
    model = timm.create_model(
        name, features_only=True, out_indices=indices, checkpoint_path=path, **kwargs
    ).eval()
    trained = open_trained(run).model
    for shape in ((64, 64), (96, 64)):
        image = torch.randn(2, 3, *shape)
        want = trained.forward_intermediates(image, indices, intermediates_only=True)
        equal(model(image), want)
        assert model.feature_info.channels() == [y.shape[1] for y in want]


@pytest.mark.parametrize("name", ["upernet", pytest.param("mask_rcnn", marks=pytest.mark.slow)])
def test_the_backbone_of_a_dense_network_is_exported_with_its_norms(tmp_path, name, capsys):
    """Both other packages return the maps that its decoder gets."""
    transformers = pytest.importorskip("transformers")
    sizes = {key: value for key, value in TINY.items() if key != "num_classes"}
    sizes |= {"decoder_width": 8, "auxiliary": 0} if name == "upernet" else {}
    run = write_run(tmp_path / "run", name, num_classes=5, backbone=SWIN, **sizes)
    export.main(Export(checkpoint=run, out=tmp_path / "out", to="hf-swin"))
    state = load_mm(run, tmp_path)
    model, found = transformers.SwinBackbone.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(found.values()), found
    network = open_trained(run, others=(UperNet, MaskRCNN)).model
    for side in (64, 96):
        image = torch.randn(2, 3, side, side)
        want = network.make_maps(image)
        equal(model.eval()(image).feature_maps, want)
        equal(forward_mm(state, image, TINY | {"patch_size": 4}), want)
    capsys.readouterr()
    path = tmp_path / "backbone.safetensors"
    export.main(Export(checkpoint=run, out=path, to="timm-features"))
    [line] = [row for row in capsys.readouterr().out.splitlines() if row.startswith("load it")]
    features = eval(line.removeprefix("load it with "), {"timm": timm}).eval()
    want = network.backbone.forward_intermediates(image, intermediates_only=True)
    equal([y.movedim(-1, 1) for y in features(image)], want)


def test_the_features_of_a_plain_transformer_in_a_dense_network_are_exported(tmp_path):
    kwargs, indices = OWN["lvvit_s"]
    decoder = {"num_classes": 5, "decoder_width": 8, "auxiliary": 0, "backbone": "lvvit_s"}
    run = write_run(tmp_path / "run", "upernet", **decoder, **kwargs)
    path = tmp_path / "backbone.safetensors"
    export.main(Export(checkpoint=run, out=path, to="timm-features"))
    features = timm.create_model(
        "lvvit_s", features_only=True, out_indices=indices, checkpoint_path=path, **kwargs
    ).eval()
    network = open_trained(run, others=(UperNet,)).model
    image = torch.randn(2, 3, 64, 64)
    maps = features(image)
    equal(
        [branch(y) for branch, y in zip(network.branches, maps, strict=True)],
        network.make_maps(image),
    )
    with pytest.raises(UserError, match=r"lvvit_s is not a Swin, .* use --to timm-features"):
        export.main(Export(checkpoint=run, out=tmp_path / "out", to="hf-swin"))


def test_a_map_of_one_window_is_named(tmp_path, capsys):
    """There timm does not shift, and the others do: the blocks before agree."""
    run = write_run(tmp_path / "run", SWIN, **TINY | {"depths": (2, 2, 2)})
    export.main(Export(checkpoint=run, out=tmp_path / "out", to="hf-swin"))
    assert "note: at 64 px a map of the model is one window" in capsys.readouterr().out
    transformers = pytest.importorskip("transformers")
    model = transformers.SwinBackbone.from_pretrained(tmp_path / "out").eval()
    image, trained = torch.randn(1, 3, 64, 64), open_trained(run).model
    got, (want,) = model(image).feature_maps, trained.forward_intermediates(image, [1])[1]
    equal([got[1]], [F.layer_norm(want.movedim(1, -1), want.shape[1:2]).movedim(-1, 1)])
    shifts = timm.create_model(SWIN, **TINY | {"depths": (2, 2, 2)}, always_partition=True).eval()
    shifts.load_state_dict(trained.state_dict())
    equal(got[2:], shifts.forward_intermediates(image, [2], norm=True, intermediates_only=True))
    assert (got[2] - trained.forward_intermediates(image, [2], norm=True)[1][0]).abs().max() > 1e-3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("to", ["hf-swin", "mmdet-swin"])
@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("test_vit", dict(img_size=64), "test_vit is not a Swin, .* use --to timm-features"),
        (
            "swinv2_tiny_window8_256",
            dict(img_size=64, window_size=8, embed_dim=16, depths=(1, 1), num_heads=(2, 2)),
            r"Swin V2 is another",
        ),
        (SWIN, TINY | {"window_size": 7}, "windows of 4 x 4 and 7 x 7, .* window_size=4,"),
        (SWIN, TINY | {"window_size": (4, 2)}, "windows of 4 x 2, and .* one square window"),
        (SWIN, TINY | {"mlp_ratio": (2, 4, 4)}, "stages whose heads or MLPs differ"),
    ],
)
def test_a_model_that_a_format_cannot_hold_leaves_nothing(tmp_path, to, name, kwargs, message):
    run = write_run(tmp_path / "run", name, **kwargs)
    out = tmp_path / ("new" if to == "hf-swin" else "new/backbone.pth")
    with pytest.raises(UserError, match=rf"^{run / 'last.pt'}: .*{message}"):
        export.main(Export(checkpoint=run, out=out, to=to))
    assert os.listdir(tmp_path) == ["run"]


def test_a_model_without_features_leaves_nothing(tmp_path):
    run = write_run(tmp_path / "run", "agent_micro")
    path = tmp_path / "backbone.safetensors"
    with pytest.raises(UserError, match="agent_micro has no form with features_only in timm"):
        export.main(Export(checkpoint=run, out=path, to="timm-features"))
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(out="a.pt", to="mmdet-swin"), r"--out a.pt must end in \.pth"),
        (dict(out="a.pth", to="timm-features"), r"--out a.pth must end in \.safetensors"),
        (dict(out="taken", to="hf-swin"), "taken is a file, and --out must be a folder"),
        (dict(out="taken.pth", to="mmdet-swin"), "taken.pth exists already"),
        (dict(out="a", to="hf-swin", format="onnx"), "--format onnx writes a classifier; leave it"),
    ],
)
def test_options_that_do_not_fit_leave_nothing(run, tmp_path, monkeypatch, fields, message):
    monkeypatch.chdir(tmp_path)
    for name in ("taken", "taken.pth"):
        Path(name).write_text("")
    with pytest.raises(UserError, match=message):
        export.main(Export(checkpoint=run, **fields | {"out": Path(fields["out"])}))
    assert sorted(os.listdir()) == ["taken", "taken.pth"]


@pytest.mark.slow
def test_outside_the_command_writes_a_backbone_or_one_sentence(run, tmp_path, command):
    words = "tools/export.py", run, "--to", "mmdet-swin", "--out", tmp_path / "new" / "b.pth"
    # Stands for a full disk.
    full = command(*words, limit=20_000)
    assert full.returncode == 2
    assert "b.pth: the file grew past the limit" in full.stderr
    assert not (tmp_path / "new").exists()
    done = command(*words)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.partition("load it with backbone=")[2].splitlines()[0]
    assert eval(printed) == {
        "type": "SwinTransformer",
        **{"embed_dims": 16, "in_channels": 3, "patch_size": 4, "window_size": 4, "mlp_ratio": 4},
        **{"depths": [2, 2, 1], "num_heads": [2, 4, 4], "qkv_bias": True, "strides": [4, 2, 2]},
        "out_indices": [0, 1, 2],
        "init_cfg": {"type": "Pretrained", "checkpoint": str(tmp_path / "new" / "b.pth")},
    }

"""Exported models, loaded by timm and by ONNX Runtime: equal logits."""

import fcntl
import importlib.util
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors import safe_open
from timm.data import create_transform, resolve_data_config

from densefeed.models.checkpoints import initialize
from densefeed.relabel.load_teacher import load_network
from densefeed.system.errors import BusyError, UserError
from densefeed.tools import export
from densefeed.tools.export import Export
from densefeed.training.load_model import open_trained

ROOT = Path(__file__).parents[2]
NAMES = ["ant", "bee", "cat", "dog", "eel"]
MODELS = {
    "lvvit_micro": {
        "num_classes": 5,
        "img_size": 32,
        "depth": 2,
        "token_head": True,
        "drop_path_rate": 0.1,
    },
    "nfnet_micro": {"num_classes": 5},
    # timm accepts the overlay only once.
    "test_vit": {
        "num_classes": 5,
        "img_size": 32,
        "pretrained_cfg_overlay": {"mean": (0.4, 0.5, 0.6)},
    },
}
needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in export.NEEDED),
    reason="the group `export` is not installed",
)


def network(name, seed, **kwargs):
    torch.manual_seed(seed)
    model = timm.create_model(name, **(MODELS[name] | kwargs)).eval()
    with torch.no_grad():  # so that weights that are initialized to zero matter too
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run folder for each model, as train.py writes it."""
    root = tmp_path_factory.mktemp("runs")
    for name, kwargs in MODELS.items():
        (root / name).mkdir()
        state = {
            "model": network(name, 1).state_dict(),
            "ema": network(name, 2).state_dict(),
            "class_names": NAMES,
        }
        state |= {
            "recipe": {"name": name, "kwargs": kwargs},
            "config": {"data": {"size": 32, "crop_pct": 0.85}},
        }
        torch.save(
            state | {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.25, 0.3]}, root / name / "last.pt"
        )
    return root


def load(folder):
    """Load the model as any user of timm does."""
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


@pytest.mark.parametrize("weights", ["ema", "raw"])
@pytest.mark.parametrize("name", MODELS)
def test_timm_loads_the_model_bit_by_bit(runs, tmp_path, name, weights):
    files = export.main(Export(checkpoint=runs / name, out=tmp_path / "out", weights=weights))
    names = ["config.json", "model.safetensors"]
    assert sorted(os.listdir(tmp_path / "out")) == sorted(path.name for path in files) == names
    model, want = load(tmp_path / "out"), network(name, 2 if weights == "ema" else 1)
    image = torch.randn(3, 3, 32, 32)
    assert torch.equal(model(image), want(image))
    assert not torch.equal(model(image), network(name, 1 if weights == "ema" else 2)(image))
    assert model.num_classes == 5
    assert model.pretrained_cfg["label_names"] == NAMES


@pytest.mark.parametrize("name", MODELS)
def test_outside_an_exported_folder_is_a_model_a_teacher_and_initial_weights(runs, tmp_path, name):
    export.main(Export(checkpoint=runs / name, out=tmp_path / "out"))
    run, exported = open_trained(runs / name), open_trained(tmp_path / "out")
    assert exported.path == tmp_path / "out" / "model.safetensors"
    for field in ("name", "class_names", "size", "crop_pct", "interpolation", "mean", "std"):
        assert getattr(exported, field) == getattr(run, field), field
    image = torch.randn(2, 3, 32, 32)
    assert torch.equal(exported.model(image), run.model(image))
    network = load_network(str(tmp_path / "out"), "", 32)
    assert (network.class_names, network.config["mean"]) == (NAMES, (0.4, 0.5, 0.6))
    model = timm.create_model(name, **run.kwargs)
    line = initialize(model, tmp_path / "out", NAMES)
    assert line == f"initialized from {tmp_path / 'out' / 'model.safetensors'}"
    assert torch.equal(model.eval()(image), run.model(image))


def test_outside_a_model_whose_outputs_are_not_finite_is_not_exported(runs, tmp_path):
    """Its weights are finite, and their products are not."""
    name = next(iter(MODELS))
    state = torch.load(runs / name / "last.pt", weights_only=True)
    for tensor in state["ema"].values():
        if tensor.is_floating_point() and tensor.ndim > 1:
            tensor.fill_(1e30)
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(UserError, match=r"x.pt: the outputs of its model are not finite; export"):
        export.main(Export(checkpoint=tmp_path / "x.pt", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_config_of_a_run_is_not_replaced(runs, tmp_path):
    (tmp_path / "config.json").write_text('{"data": {}}')
    checkpoint = next(iter(sorted(runs.rglob("*.pt"))))
    with pytest.raises(
        UserError, match=r"config.json is not an earlier output, and would be replaced"
    ):
        export.main(Export(checkpoint=checkpoint, out=tmp_path))
    assert (tmp_path / "config.json").read_text() == '{"data": {}}'


def test_two_exports_at_once_do_not_mix(runs, tmp_path):
    checkpoint = next(iter(sorted(runs.rglob("*.pt"))))
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=rf"^{tmp_path} is being written by another process"):
            export.main(Export(checkpoint=checkpoint, out=tmp_path))
    finally:
        os.close(other)
    assert not list(tmp_path.iterdir())
    export.main(Export(checkpoint=checkpoint, out=tmp_path))


def test_the_new_folder_of_another_export_is_not_removed(runs, tmp_path, monkeypatch):
    """The other has locked it, and not yet begun a file in it."""
    checkpoint, out = next(iter(sorted(runs.rglob("*.pt")))), tmp_path / "out"

    def make_and_fail(*_):
        out.mkdir()
        raise BusyError(f"{out} is being written by another process")

    monkeypatch.setattr(export, "write_files", make_and_fail)
    with pytest.raises(BusyError):
        export.main(Export(checkpoint=checkpoint, out=out))
    assert out.is_dir()


def test_a_name_that_is_not_utf8_is_refused_before_anything_is_written(runs, tmp_path):
    """ONNX Runtime cannot open it."""
    checkpoint = next(iter(sorted(runs.rglob("*.pt"))))
    out = Path(os.fsdecode(os.fsencode(tmp_path) + b"/x\xff"))
    with pytest.raises(UserError, match="is not UTF-8; choose another name"):
        export.main(Export(checkpoint=checkpoint, out=out))
    assert not list(tmp_path.iterdir())


def test_an_end_between_two_names_leaves_no_config(runs, tmp_path, monkeypatch):
    """Else the folder would load: weights of one model, classes of another."""
    checkpoint = next(iter(sorted(runs.rglob("*.pt"))))
    options = Export(checkpoint=checkpoint, out=tmp_path)
    replace_file, named = os.replace, []

    def interrupted(part, path):
        named.append(Path(path).name)
        if len(named) == 2:
            raise KeyboardInterrupt
        replace_file(part, path)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export.main(options)
    assert named == ["model.safetensors", "config.json"]
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("locked", [False, True])
def test_outside_an_export_does_not_replace_another(runs, tmp_path, monkeypatch, locked):
    """Neither one that is there, nor one that ends while this one loads its model."""
    first, second = sorted(path.parent for path in runs.rglob("*.pt"))[:2]
    export.main(Export(checkpoint=first, out=tmp_path))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    if locked:
        check, calls = export.check_new, []
        monkeypatch.setattr(
            export, "check_new", lambda f: calls.append(f) or (calls[1:] and check(f))
        )
    with pytest.raises(UserError, match=r"config.json exists already; remove it or choose another"):
        export.main(Export(checkpoint=second, out=tmp_path))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_in_place_of_a_file_changes_nothing(runs, tmp_path):
    checkpoint = next(iter(sorted(runs.rglob("*.pt"))))
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(UserError, match=r"model.safetensors is not a regular file; remove it"):
        export.main(Export(checkpoint=checkpoint, out=tmp_path))
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_timm_finds_the_preprocessing(runs, tmp_path):
    export.main(Export(checkpoint=runs / "lvvit_micro", out=tmp_path))
    data = resolve_data_config(model=load(tmp_path))
    assert [tuple(data[name]) for name in ("input_size", "mean", "std")] == [
        (3, 32, 32),
        (0.4, 0.5, 0.6),
        (0.2, 0.25, 0.3),
    ]
    assert [data[name] for name in ("crop_pct", "interpolation", "crop_mode")] == [
        0.85,
        "bilinear",
        "center",
    ]
    resize = create_transform(**data, is_training=False).transforms[0]
    assert resize.size == int(32 / 0.85)


def test_the_config_has_the_fields_of_the_hub(runs, tmp_path):
    export.main(Export(checkpoint=runs / "lvvit_micro", out=tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architecture"] == "lvvit_micro"
    assert (config["num_classes"], config["num_features"]) == (5, 96)
    assert config["label_names"] == NAMES
    assert "drop_path_rate" not in config["model_args"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(network("lvvit_micro", 0).state_dict())


@pytest.mark.parametrize("name", ["lvvit_micro", "test_vit"])
def test_another_size_is_stored_in_the_file(runs, tmp_path, name):
    """At 48 px the position table is resampled once and stored."""
    export.main(Export(checkpoint=runs / name, out=tmp_path, size=48))
    model, was = load(tmp_path), network(name, 2)
    assert tuple(model.pretrained_cfg["input_size"]) == (3, 48, 48)
    assert model.pos_embed.shape[1] > was.pos_embed.shape[1]
    image = torch.randn(2, 3, 48, 48)
    if name == "test_vit":
        was.set_input_size(img_size=(48, 48))
    assert torch.equal(model(image), was(image))


def test_an_exported_maxvit_is_read_again(tmp_path):
    """timm states arguments of its windows, which are those of no other family."""
    name, size = "maxvit_rmlp_pico_rw_256", 64
    kwargs = {"num_classes": 5, "img_size": size, "depths": (1,) * 4, "embed_dim": (32,) * 4}
    torch.manual_seed(0)
    state = {"model": timm.create_model(name, **kwargs).state_dict(), "class_names": NAMES}
    state |= {"recipe": {"name": name, "kwargs": kwargs}, "config": {"data": {"size": size}}}
    torch.save(state, tmp_path / "last.pt")
    export.main(Export(checkpoint=tmp_path / "last.pt", out=tmp_path / "exported"))
    stated = json.loads((tmp_path / "exported" / "config.json").read_text())["model_args"]
    assert any(argument.startswith("transformer_") for argument in stated)
    image = torch.randn(2, 3, size, size)
    read = open_trained(tmp_path / "exported").model
    with torch.no_grad():
        assert torch.equal(read(image), load(tmp_path / "exported")(image))


# ------------------------------------------------------------------------- ONNX


@pytest.fixture(scope="module")
def exported(runs, tmp_path_factory) -> Path:
    """lvvit_micro in every format."""
    out = tmp_path_factory.mktemp("exported") / "out"
    files = export.main(Export(checkpoint=runs / "lvvit_micro", out=out, format="both"))
    names = ["config.json", "model.onnx", "model.safetensors"]
    assert sorted(os.listdir(out)) == sorted(path.name for path in files) == names
    return out


def check_graph(path, name, side):
    """Check signature, metadata, and the logits of four batch sizes that were not traced."""
    import onnxruntime

    session, want = onnxruntime.InferenceSession(str(path)), network(name, 2)
    (image_in,), (logits_out,) = session.get_inputs(), session.get_outputs()
    assert (image_in.name, image_in.shape) == ("image", ["batch", 3, side, side])
    assert (logits_out.name, logits_out.shape) == ("logits", ["batch", 5])
    assert image_in.type == logits_out.type == "tensor(float)"
    for batch in (1, 4, 5, 7):
        image = torch.randn(batch, 3, side, side)
        (logits,) = session.run(None, {"image": image.numpy()})
        np.testing.assert_allclose(logits, want(image).detach().numpy(), rtol=1e-4, atol=1e-4)
    metadata = session.get_modelmeta().custom_metadata_map
    assert {
        key: json.loads(metadata[key])
        for key in ("architecture", "size", "mean", "std", "crop_pct", "class_names")
    } == {
        "architecture": name,
        "size": side,
        "mean": [0.4, 0.5, 0.6],
        "std": [0.2, 0.25, 0.3],
        "crop_pct": 0.85,
        "class_names": NAMES,
    }


@needs_onnx
def test_onnx_runtime_gives_equal_logits_in_any_batch(exported):
    check_graph(exported / "model.onnx", "lvvit_micro", 32)


@pytest.mark.slow
@needs_onnx
@pytest.mark.parametrize(
    ("name", "size"), [("lvvit_micro", 48), ("nfnet_micro", 40), ("test_vit", 48)]
)
def test_onnx_of_other_models_and_sizes(runs, tmp_path, name, size):
    """A position table resampled before the export, a CNN, a transformer of timm."""
    export.main(Export(checkpoint=runs / name, out=tmp_path, format="onnx", size=size))
    assert os.listdir(tmp_path) == ["model.onnx"]
    check_graph(tmp_path / "model.onnx", name, size)


@needs_onnx
def test_the_exported_logits_are_those_of_evaluation(exported):
    """They are the class token's logits plus half the maximum over the tokens."""
    import onnxruntime

    model, image = network("lvvit_micro", 2), torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        x_NTD = model.forward_features(image)
        cls_NK, tokens_NTK = model.head(x_NTD[:, 0]), model.token_head(x_NTD[:, 1:])
    (logits,) = onnxruntime.InferenceSession(str(exported / "model.onnx")).run(
        None, {"image": image.numpy()}
    )
    np.testing.assert_allclose(
        logits, (cls_NK + 0.5 * tokens_NTK.amax(1)).numpy(), rtol=1e-4, atol=1e-4
    )
    assert np.abs(logits - cls_NK.numpy()).max() > 0.01


@needs_onnx
def test_a_graph_with_other_logits_leaves_no_file(runs, exported, tmp_path, monkeypatch):
    """The graph has the EMA weights instead of the raw ones."""
    out = tmp_path / "a" / "out"
    monkeypatch.setattr(
        export, "write_onnx", lambda _, path: shutil.copy(exported / "model.onnx", path)
    )
    with pytest.raises(UserError, match=r"has other logits as ONNX .* in a batch of 1"):
        export.main(Export(checkpoint=runs / "lvvit_micro", out=out, format="both", weights="raw"))
    assert not out.exists()


@needs_onnx
def test_a_graph_with_nan_is_refused(runs, exported, tmp_path, monkeypatch):
    """NaN logits fail the comparison."""

    def write(trained, path):
        shutil.copy(exported / "model.onnx", path)
        with torch.no_grad():
            trained.model.head.bias.fill_(torch.nan)

    monkeypatch.setattr(export, "write_onnx", write)
    with pytest.raises(UserError, match="has other logits as ONNX"):
        export.main(Export(checkpoint=runs / "lvvit_micro", out=tmp_path / "out", format="onnx"))


def test_missing_packages_are_named_with_the_command_that_installs_them(
    runs, tmp_path, monkeypatch
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("onnx", "onnxruntime") else find(name),
    )
    with pytest.raises(
        UserError, match=r'needs onnx, onnxruntime; run `pip install "\.\[export\]"`'
    ):
        export.main(Export(checkpoint=runs / "lvvit_micro", out=tmp_path / "out", format="onnx"))
    assert not (tmp_path / "out").exists()


def test_weights_above_the_limit_of_an_onnx_file_are_refused(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "ONNX_LIMIT", 100_000)
    with pytest.raises(UserError, match="more than one ONNX file can hold"):
        export.main(Export(checkpoint=runs / "lvvit_micro", out=tmp_path / "out", format="both"))
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(checkpoint=Path("nowhere")), "there is no such file"),
        (dict(size=33), "cannot take inputs of 33 px"),
        (dict(out=Path("file")), "file is a file, and --out must be a folder"),
    ],
)
def test_invalid_exports_leave_no_files(runs, tmp_path, monkeypatch, fields, message):
    """tests/training/test_load_model.py has the other checkpoints that are refused."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    options = Export(checkpoint=runs / "lvvit_micro", out=Path("out"))
    with pytest.raises(UserError, match=message):
        export.main(replace(options, **fields))
    assert os.listdir() == ["file"]


def test_the_command_prints_its_files_or_one_error(runs, tmp_path, command):
    words = "tools/export.py", runs / "lvvit_micro", "--out", tmp_path / "out", "--size", 48
    full = command(*words, limit=200_000)  # stands for a full disk
    assert full.returncode == 2
    assert [line for line in full.stderr.splitlines() if line.startswith("error: ")] == [
        f"error: {tmp_path / 'out' / 'model.safetensors'}: the file grew past the limit of this "
        "file system or shell (ulimit -f)"
    ]
    assert not (tmp_path / "out").exists()
    done = command(*words)
    assert done.returncode == 0, done.stderr
    assert "lvvit_micro, ema weights, 5 classes, 48 px" in done.stdout
    assert f"{(tmp_path / 'out' / 'model.safetensors').stat().st_size:,} bytes" in done.stdout

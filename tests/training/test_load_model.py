"""Loading a trained model: its weights, size and classes."""

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.data import ImageNetInfo
from torch.nn import functional as F

from densefeed.models import checkpoints
from densefeed.system.errors import UserError
from densefeed.training.load_model import at_size, open_trained


def weights(name, seed, **kwargs):
    torch.manual_seed(seed)
    return timm.create_model(name, **kwargs)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder as train.py writes it, with different raw and EMA weights."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    folder.mkdir()
    kwargs = {"num_classes": 3, "img_size": 32, "token_head": True}
    raw, ema = (weights("lvvit_micro", seed, **kwargs).state_dict() for seed in (1, 2))
    saved = {
        "recipe": {"name": "lvvit_micro", "kwargs": kwargs},
        "class_names": ["a", "b", "c"],
        "mean": [0.1, 0.2, 0.3],
    }
    saved |= {"std": [0.4, 0.5, 0.6], "config": {"data": {"size": 40, "crop_pct": 0.8}}}
    torch.save(saved | {"model": raw, "ema": ema}, folder / "last.pt")
    torch.save(saved | {"model": raw, "ema": None}, folder / "raw.pt")
    torch.save(saved | {"model": raw, "model_ema": ema}, folder / "timm.pt")
    flat = {"data": "scenes", "size": 40, "crop_pct": 0.8}
    torch.save(saved | {"model": raw, "config": flat}, folder / "flat.pt")
    torch.save(saved | {"model": raw, "class_names": ["a", "b"]}, folder / "short.pt")
    return folder


def test_a_run_folder_loads_its_last_checkpoint(run):
    trained = open_trained(run)
    assert (trained.path, trained.name) == (run / "last.pt", "lvvit_micro")
    assert trained.class_names == ["a", "b", "c"]
    assert (trained.size, trained.crop_pct, trained.interpolation) == (40, 0.8, "bilinear")
    assert (trained.mean, trained.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert not trained.model.training


def test_a_checkpoint_of_an_earlier_version_loads(run):
    trained = open_trained(run / "flat.pt")
    assert (trained.size, trained.crop_pct) == (40, 0.8)


@pytest.mark.parametrize(
    ("file", "weights_option", "loaded", "seed"),
    [
        ("last.pt", "ema", "ema", 2),
        ("last.pt", "raw", "raw", 1),
        # timm's other name of EMA weights
        ("timm.pt", "ema", "ema", 2),
        ("timm.pt", "raw", "raw", 1),
        ("raw.pt", "ema", "raw", 1),
        ("raw.pt", "raw", "raw", 1),
    ],
)
def test_ema_or_raw_weights(run, file, weights_option, loaded, seed):
    trained = open_trained(run / file, weights_option, size=32)
    assert trained.weights == loaded
    want = weights("lvvit_micro", seed, num_classes=3, img_size=32).eval()
    image = torch.randn(2, 3, 32, 32)
    assert torch.equal(trained.model(image), want(image))


@pytest.mark.parametrize("size", [48, 24])
def test_lvvit_at_another_size_has_a_resampled_position_table(run, size):
    trained = open_trained(run, size=size)
    was = weights("lvvit_micro", 2, num_classes=3, img_size=32).eval()
    table = was.pos_embed[:, 1:].detach().view(1, 4, 4, 96).permute(0, 3, 1, 2)
    table = F.interpolate(table, size=(size // 8, size // 8), mode="bicubic", antialias=True)
    table = table.flatten(2).transpose(1, 2)
    want = timm.create_model("lvvit_micro", num_classes=3, img_size=size).eval()
    want.load_state_dict(
        was.state_dict() | {"pos_embed": torch.cat([was.pos_embed[:, :1].detach(), table], 1)}
    )
    image = torch.randn(2, 3, size, size)
    torch.testing.assert_close(trained.model(image), want(image), rtol=0, atol=1e-5)
    assert torch.equal(trained.model(image), was(image))  # it resamples in every forward pass
    assert trained.kwargs["img_size"] == size


def foreign(tmp_path, name, **kwargs):
    model = weights(name, 0, **kwargs).eval()
    save_file(model.state_dict(), tmp_path / "foreign.safetensors")
    return model, tmp_path / "foreign.safetensors"


def test_a_foreign_cnn_takes_any_size_and_gets_the_class_names_of_imagenet(tmp_path):
    model, path = foreign(tmp_path, "test_resnet")
    trained = open_trained(path, model_name="test_resnet", size=72)
    image = torch.randn(1, 3, 72, 72)
    assert torch.equal(trained.model(image), model(image))
    assert trained.class_names == ImageNetInfo().label_names()
    for name in ("interpolation", "crop_pct"):
        assert getattr(trained, name) == model.pretrained_cfg[name], name
    assert open_trained(path, model_name="test_resnet").size == 160


def test_timms_transformers_are_resized_by_timm(tmp_path):
    model, path = foreign(tmp_path, "test_vit")
    trained = open_trained(path, model_name="test_vit", size=96)
    want = timm.create_model(
        "test_vit", img_size=96, pretrained=True, pretrained_cfg_overlay=dict(file=str(path))
    ).eval()
    image = torch.randn(2, 3, 96, 96)
    torch.testing.assert_close(trained.model(image), want(image), rtol=0, atol=1e-5)
    assert trained.model.pos_embed.shape == want.pos_embed.shape != model.pos_embed.shape


def stored(tmp_path, name, **kwargs):
    model = weights(name, 0, **kwargs).eval()
    torch.save(
        {"recipe": {"name": name, "kwargs": kwargs}, "model": model.state_dict()},
        tmp_path / f"{name}.pt",
    )
    return model, tmp_path / f"{name}.pt"


def test_invalid_checkpoints_are_refused_in_one_sentence(run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("hello")
    cut = tmp_path / "cut.pt"
    cut.write_bytes((run / "last.pt").read_bytes()[:-5000])
    _, path = foreign(tmp_path, "test_resnet", num_classes=7)
    # timm cannot resample the position table of this model.
    _, pit = stored(tmp_path, "pit_ti_224", num_classes=5)
    cases = [
        ((tmp_path / "empty",), "empty has no last.pt"),
        ((tmp_path / "nowhere.pt",), "there is no such file"),
        ((tmp_path / "text.pt",), "text.pt is not a checkpoint that loads safely"),
        ((cut,), "cut.pt is not a checkpoint that loads safely"),
        ((run / "short.pt",), "short.pt names 2 classes but its model has 3"),
        ((path,), "does not contain its model's name"),
        ((path, "ema", "test_vit"), "does not fit the model test_vit"),
        ((run, "ema", "", 33), "lvvit_micro cannot take inputs of 33 px"),
        ((run, "ema", "", -1), "--size is -1"),
        ((pit, "ema", "", 96), "pit_ti_224 cannot take inputs of 96 px"),
    ]
    for arguments, message in cases:
        with pytest.raises(UserError, match=message) as error:
            open_trained(*arguments)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("dhvt_tiny_cifar_patch4", dict(depth=1, embed_dim=16)),
        ("t2t_vit_14", dict(depth=1, embed_dim=12, token_dim=8, img_size=64)),
    ],
)
def test_small_data_models_at_another_size_equal_their_own_forward_pass(tmp_path, name, fields):
    """The position table of T2T-ViT is resampled once; DHVT has none and is unchanged."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, **fields).eval()
    at_96, kwargs = at_size(
        model, checkpoints.ModelSpec(name, dict(num_classes=3, **fields)), 96, tmp_path
    )
    assert (at_96 is model) == (name != "t2t_vit_14")
    assert kwargs.get("img_size") == (96 if name == "t2t_vit_14" else None)
    image = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        torch.testing.assert_close(at_96(image), model(image), rtol=1e-4, atol=1e-5)

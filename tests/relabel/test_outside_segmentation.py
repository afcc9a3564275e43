"""Segmentation networks as teachers: any module that gives a map of logits is labeled with."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Subset
from torchvision.models.segmentation import lraspp_mobilenet_v3_large

import densefeed
from densefeed.relabel.network import Network
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError

from ..fixtures import photograph

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "interpolation": "bilinear"}
SIZE, K = 64, 3


class Segmenter(nn.Module):
    """Logits of every pixel: its color times a constant; `wrap` makes the form of the output."""

    def __init__(self, wrap=lambda logits: logits, scale: int = 1) -> None:
        super().__init__()
        self.wrap, self.scale = wrap, scale
        self.gain = nn.Parameter(torch.tensor(6.0))

    def forward(self, image_NCHW):
        return self.wrap(F.avg_pool2d(image_NCHW * self.gain, self.scale))


FORMS = {
    "tensor": lambda logits: logits,
    "torchvision": lambda logits: {"out": logits, "aux": logits[:, :, :2]},
    "transformers": lambda logits: SimpleNamespace(logits=logits, loss=None),
}


def pictures(count=2, size=SIZE):
    generator = torch.Generator().manual_seed(0)
    shape = count, size, size, 3
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", [0, 4, 16, 64])
def test_outside_any_form_of_output_is_averaged_in_probability(form, side):
    picture = pictures()
    with torch.no_grad():
        found = Network(Segmenter(FORMS[form]), SIZE, CONFIG, map_side=side)(picture)
    side = side or SIZE // 8
    exact = np.exp(picture.double().numpy() / 255 * 6)
    cell = SIZE // side
    blocks = (2, side, cell, side, cell, 3)
    share = (exact / exact.sum(-1, keepdims=True)).reshape(blocks).mean((2, 4))
    lse = np.log(exact.sum(-1)).reshape(blocks[:-1]).mean((2, 4))
    np.testing.assert_allclose(found.numpy(), np.log(share) + lse[..., None], rtol=0, atol=1e-5)


def test_outside_a_coarse_output_stays_as_it_is():
    with torch.no_grad():
        assert Network(Segmenter(scale=16), SIZE, CONFIG)(pictures()).shape == (2, 4, 4, 3)


@pytest.mark.slow
def test_outside_torchvisions_and_transformers_networks_are_teachers():
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    torch.manual_seed(0)
    config = SegformerConfig(
        num_labels=K,
        depths=[1] * 4,
        hidden_sizes=[8, 8, 16, 16],
        decoder_hidden_size=16,
        num_attention_heads=[1, 1, 2, 2],
    )
    with torch.no_grad():
        for network, side in (
            (SegformerForSemanticSegmentation(config), 8),
            (lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=K), 8),
        ):
            maps = Network(network, SIZE, CONFIG)(pictures())
            assert maps.shape == (2, side, side, K)
            assert maps.isfinite().all()


@pytest.mark.parametrize(
    ("model", "side", "said"),
    [
        (nn.Flatten(), 0, r"Flatten gives shape \(2, 12288\), not logits of shape \[N, K, h, w\]"),
        (Segmenter(lambda x: {"masks": x}), 0, "Segmenter gives a dict, not logits"),
        (Segmenter(scale=8), 9, "gives 8 x 8 cells, fewer than --map-side 9; give at most as many"),
        (Segmenter(lambda x: x[:, :, :32]), 0, "gives 32 x 64 cells"),
    ],
)
def test_outside_other_outputs_are_refused_in_one_sentence(model, side, said):
    with pytest.raises(UserError, match=said):
        Network(model, SIZE, CONFIG, map_side=side)(pictures())


# ------------------------------------------------------------------------- the labeling pass


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(7):
        path = root / ("a", "b", "c")[number % 3] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        photograph(rng, *rng.integers(30, 80, 2).tolist()).save(path)
    return root


HOW = dict(input_size=SIZE, top_k=2, device="cpu", threads=2, batch=4)


@pytest.mark.parametrize("side", [0, 32])
def test_outside_maps_of_a_segmentation_network_are_stored_at_the_side_that_was_asked_for(
    photos, tmp_path, side, capsys
):
    store = densefeed.label(photos, Segmenter(), tmp_path / "maps.h5", map_side=side, **HOW)
    side = side or 8
    assert store.header.side == side
    densefeed.label(photos, Segmenter(), tmp_path / "none.h5", dry_run=True, map_side=side, **HOW)
    # logit, class and logsumexp of 16 bits; the rest of a row has less than 100 bytes.
    raw = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("raw:"))
    size = int(raw.split()[1].replace(",", ""))
    assert 0 < size - side * side * (2 * 2 * 2 + 2) < 100
    with densefeed.open_score_maps(tmp_path / "maps.h5") as labels:
        targets = labels.targets([3], torch.eye(2, 3)[None], side)
        assert targets.weight.eq(1).all()


def test_outside_a_pass_is_not_resumed_at_another_side(photos, tmp_path):
    folder = tmp_path / "maps"
    densefeed.label(photos, Segmenter(), folder, shard_images=3, **HOW)
    with pytest.raises(UserError, match="side"):
        densefeed.label(photos, Segmenter(), folder, shard_images=3, map_side=32, **HOW)


@pytest.fixture
def with_masks(tmp_path):
    """Four images with masks, in the plain layout."""
    rng, root = np.random.default_rng(0), tmp_path / "masked"
    for name in ("images", "masks"):
        (root / name).mkdir(parents=True)
    for number in range(4):
        photograph(rng, 40, 40).save(root / "images" / f"{number}.png")
        Image.fromarray(rng.integers(0, 3, (40, 40), np.uint8)).save(root / f"masks/{number}.png")
    (root / "classes.txt").write_text("a\nb\nc\n")
    return root


@pytest.mark.parametrize("way", ["object", "part", "factory", "command"])
def test_outside_no_accuracy_is_printed_for_images_with_masks(
    with_masks, tmp_path, capsys, monkeypatch, way
):
    """It compared each map with one class, and advised on training classifiers."""
    factory = SimpleNamespace(make=lambda: densefeed.MaskFolder(with_masks))
    monkeypatch.setitem(sys.modules, "masks_of_a_user", factory)
    data = {"object": factory.make(), "factory": "masks_of_a_user:make", "command": with_masks}
    data["part"] = ConcatDataset([Subset(factory.make(), [3, 0]), Subset(factory.make(), [1, 2])])
    options = HOW | dict(dataset="masks") if way == "command" else HOW
    store = densefeed.label(data[way], Segmenter(), tmp_path / "maps.h5", **options)
    assert len(store) == 4
    printed = capsys.readouterr().out
    assert "4 raw maps" in printed
    assert "accuracy of" not in printed
    assert "has no images of" not in printed


def make_teacher():
    model = Segmenter()
    model.mean, model.std, model.num_classes = (0.0,) * 3, (1.0,) * 3, 3
    return model


@pytest.mark.slow
def test_outside_a_pass_in_two_parts_and_the_audit_take_such_maps(photos, tmp_path, command):
    whole = densefeed.label(photos, make_teacher(), tmp_path / "whole.h5", map_side=16, **HOW)
    words = ["-m", "densefeed", "label", "--data", photos, "--teacher", f"{__name__}:make_teacher"]
    words += ["--map-side", "16", "--out", tmp_path / "maps", "--shard-images", "3"]
    for name, value in HOW.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    for more in (["--shard", "0/2"], []):
        done = command(*words, *more)
        assert done.returncode == 0, done.stderr
    store, rows = ScoreMapStore(tmp_path / "maps"), np.arange(7)
    for one, two in zip(store.rows(rows), whole.rows(rows), strict=True):
        np.testing.assert_array_equal(one, two)
    audit = ["-m", "densefeed", "audit", tmp_path / "maps", "--data", photos, "--device", "cpu"]
    audit += ["--teacher", f"{__name__}:make_teacher", "--crops", "2"]
    done = command(*audit, "--out", tmp_path / "audit.html")
    assert done.returncode == 0, done.stderr + done.stdout

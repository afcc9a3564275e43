"""Measures of a model's maps on a folder, against a plain loop over Pillow images."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from densefeed.explain.attention_maps import mean_map
from densefeed.explain.capture import capture_attention
from densefeed.explain.measures import area_under, class_curve, rank_pixels
from densefeed.explain.relevance import class_relevance
from densefeed.models import checkpoints  # noqa: F401  (registers our models)
from densefeed.system.errors import UserError
from densefeed.tools import validate_explanations
from densefeed.tools.validate_explanations import CHANCE, MAPS, MapMaker, MapValidation, main

# Images of 50 pixels, of which the evaluation crop shows 40 from 5 on: 5 for each of 8 patches.
SIDE, CROP, EDGE, PATCH = 50, 0.8, 5, 5
CLASSES = (3, 7)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Path:
    """Six images of two classes, each with one box of its class and up to two of the other."""
    root, boxes = tmp_path_factory.mktemp("scenes"), {}
    rng = np.random.default_rng(0)
    for number in range(6):
        label, other = CLASSES[number % 2], CLASSES[1 - number % 2]
        name = f"val/{label}/{number}.png"
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / name)
        objects = [{"digit": label, "box": [2, 7, 23 + number, 31]}]
        # One overlaps another, one is beyond the crop.
        objects += [{"digit": other, "box": [30, 30, 44, 49]}] * (number > 1)
        objects += [{"digit": other, "box": [27, 33, 38, 40]}] * (number > 3)
        objects += [{"digit": other, "box": [46, 0, 50, 4]}]
        boxes[name] = objects
    (root / "boxes.json").write_text(json.dumps({"size": SIDE, "scenes": boxes}))
    return root


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    model = timm.create_model("lvvit_micro", depth=4).eval()
    nn.init.normal_(model.head.weight)
    path = tmp_path_factory.mktemp("weights") / "lvvit.safetensors"
    save_file(model.state_dict(), path)
    return model, path


def options(path, scenes, **fields) -> MapValidation:
    plain = dict(checkpoints=(path,), data=scenes, model="lvvit_micro", crop_pct=CROP, batch=4)
    boxes = scenes / "boxes.json"
    return replace(MapValidation(boxes=boxes, device="cpu", size=64, **plain), **fields)


def draw_boxes(objects: list[dict], digit: int) -> np.ndarray:
    """Mark the pixels of the crop that lie in a box of the digit."""
    inside = np.zeros((SIDE, SIDE))
    for item in objects:
        left, top, right, bottom = item["box"]
        inside[top:bottom, left:right] += item["digit"] == digit
    return inside[EDGE:-EDGE, EDGE:-EDGE].clip(max=1)


def read(scenes: Path, name: str) -> torch.Tensor:
    """Return an image as the model sees it."""
    cut = Image.open(scenes / name).crop((EDGE, EDGE, SIDE - EDGE, SIDE - EDGE))
    # The filter of timm's configuration of the model.
    pixels = np.asarray(cut.resize((64, 64), Image.Resampling.BICUBIC)) / 255
    mean, std = (np.array(part) for part in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return torch.tensor((pixels - mean) / std, dtype=torch.float32).permute(2, 0, 1)[None]


def loop(model: nn.Module, scenes: Path) -> dict[tuple[str, str], dict[str, float]]:
    """Measure relevance and mean attention image by image, on pixels of the crop."""
    values = {}
    for name, objects in json.loads((scenes / "boxes.json").read_text())["scenes"].items():
        label, image = int(name.split("/")[1]), read(scenes, name)
        for digit in CLASSES:
            inside = draw_boxes(objects, digit)
            if not inside.any():
                continue
            with capture_attention(model) as captured:
                model(image)
            maps = {
                "relevance": class_relevance(model, image, torch.tensor([[digit]]))[0, 0],
                "mean attention": mean_map(captured[-1])[0].detach(),
                CHANCE: torch.ones(8, 8),
            }
            group = "label" if digit == label else "others"
            for kind, map_RC in maps.items():
                picture = map_RC.numpy().repeat(PATCH, 0).repeat(PATCH, 1)
                share = (picture * inside).sum() / picture.sum()
                hit = inside[picture == picture.max()].mean() >= 0.5
                values.setdefault((kind, group), []).append((share, hit, digit))
    return values


def test_measures_equal_a_loop_over_images(model, scenes, tmp_path):
    row = main(options(model[1], scenes, json=tmp_path / "out.json"))["explanations"][0]
    assert list(row["maps"]) == [*MAPS, CHANCE]
    values = loop(model[0].requires_grad_(False), scenes)
    assert {key: len(found) for key, found in values.items() if key[0] == CHANCE} == {
        (CHANCE, "label"): 6,
        (CHANCE, "others"): 4,
    }
    for (kind, group), found in values.items():
        share, hit, digit = map(np.array, zip(*found, strict=True))
        assert row["maps"][kind][f"{group}_share"] == pytest.approx(share.mean(), rel=1e-4)
        # Ties are the tests' of the measures.
        if kind != CHANCE:
            by_class = [hit[digit == c].mean() for c in np.unique(digit)]
            assert row["maps"][kind][f"{group}_pointing"] == np.mean(by_class)
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["explanations"] == [row]
    assert (written["images"], written["steps"], written["baseline"]) == (6, 0, None)


def test_curves_of_a_subset_of_a_folder_without_boxes(model, scenes):
    """The result is the mean over images that the seed chooses, of the probability of the label."""
    fields = dict(boxes=None, max_images=3, seed=1, steps=5, baseline="gray")
    row = main(options(model[1], scenes / "val", **fields))["explanations"][0]
    assert {tuple(measures) for measures in row["maps"].values()} == {("deletion", "insertion")}
    names = sorted(f"val/{path.parent.name}/{path.name}" for path in scenes.rglob("*.png"))
    chosen = [names[n] for n in sorted(np.random.default_rng(1).permutation(6)[:3])]
    areas = []
    for name in chosen:
        image, target = read(scenes, name), torch.tensor([int(name.split("/")[1])])
        with capture_attention(model[0]) as captured:
            model[0](image)
        rank = rank_pixels(mean_map(captured[-1]).detach(), (64, 64))
        for ends in ((image, 0 * image), (0 * image, image)):
            areas.append(area_under(class_curve(model[0], *ends, rank, target, 5, 2)).item())
    found = row["maps"]["mean attention"]
    assert found["deletion"] == pytest.approx(np.mean(areas[::2]), rel=1e-3)
    assert found["insertion"] == pytest.approx(np.mean(areas[1::2]), rel=1e-3)


def test_a_table_has_a_row_for_each_model_and_a_reason_for_each_dash(
    model, scenes, monkeypatch, capsys
):
    """Swin has no relevance; of a network without attention nothing is left but the reason."""
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=64,
        window_size=4,
        **dict(embed_dim=12, depths=(1, 1), num_heads=(1, 2), num_classes=1000),
    )
    resnet = timm.create_model("test_resnet", num_classes=1000)
    opened = validate_explanations.open_trained(model[1], "ema", "lvvit_micro", 64)
    built = {"a/swin": swin, "a/resnet": resnet, "a/lvvit": model[0]}
    monkeypatch.setattr(
        validate_explanations,
        "open_trained",
        lambda path, *_: opened._replace(path=path, model=built[str(path)].eval()),
    )
    rows = main(options(model[1], scenes, checkpoints=tuple(map(Path, built))))["explanations"]
    assert [list(row["maps"]) for row in rows] == [
        ["gradient x attention", "class attention", "mean attention", CHANCE],
        [],
        [*MAPS, CHANCE],
    ]
    assert [row["top1"] is None for row in rows] == [False, True, False]
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if line.startswith("│ a/resnet")]
    assert len(lines) == 4
    assert all(line.count("–") == len(MAPS) + 2 for line in lines)
    assert text.count("│ a/swin ") == text.count("│ a/lvvit ") == 4
    assert "a/swin has no relevance: SwinTransformer attends within windows" in text
    assert "a/resnet has no relevance, gradient x attention, rollout, class attention" in text
    # The table of the label has a dash for relevance and rollout.
    (line, *_) = (line for line in text.splitlines() if line.startswith("│ a/swin"))
    assert line.count("–") == 2


def test_refusals(model, scenes, tmp_path):
    given = options(model[1], scenes)
    with pytest.raises(UserError, match="--steps 0 leaves nothing to measure without --boxes"):
        main(replace(given, boxes=None, steps=0))
    with pytest.raises(UserError, match="--steps is -1"):
        main(replace(given, steps=-1))
    with pytest.raises(UserError, match="no model is given"):
        main(replace(given, checkpoints=()))
    with pytest.raises(UserError, match="--crop-pct is 2"):
        main(replace(given, crop_pct=2.0))
    config = tmp_path / "config.json"
    config.write_text("{}")
    with pytest.raises(UserError, match=r"config\.json is no earlier output"):
        main(replace(given, json=config))


def test_a_fault_of_the_second_model_is_found_before_the_first_is_measured(
    model, scenes, tmp_path, monkeypatch
):
    monkeypatch.setattr(validate_explanations, "measure", None)
    damaged, few = tmp_path / "damaged.safetensors", tmp_path / "few.safetensors"
    damaged.write_bytes(b"damaged")
    small = timm.create_model("lvvit_micro", img_size=64, num_classes=5)
    save_file(small.state_dict(), few)
    for path, message in ((damaged, "damaged.safetensors"), (few, "5 classes of the model")):
        with pytest.raises(UserError, match=message):
            main(options(model[1], scenes, checkpoints=(model[1], path)))


def test_boxes_of_other_images_are_refused(model, scenes, tmp_path):
    """Scenes of another seed have the same names."""
    other = shutil.copytree(scenes, tmp_path / "other")
    Image.new("RGB", (SIDE, SIDE)).save(other / "val/3/0.png")
    with pytest.raises(UserError, match=r"boxes.json describes other images than those of .*scene"):
        main(options(model[1], scenes, boxes=other / "boxes.json"))
    shutil.rmtree(other / "val")
    with pytest.raises(UserError, match=r"describes other images"):
        main(options(model[1], scenes, boxes=other / "boxes.json"))
    document = json.loads((scenes / "boxes.json").read_text())
    document["scenes"].pop("val/7/1.png")
    shutil.copytree(scenes / "val", other / "val")
    (other / "boxes.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"is damaged \(the objects of val/7/1.png\)"):
        main(options(model[1], scenes, boxes=other / "boxes.json"))


def test_a_model_without_attention_alone_is_an_error(scenes, tmp_path):
    path = tmp_path / "resnet.safetensors"
    save_file(timm.create_model("test_resnet").state_dict(), path)
    with pytest.raises(UserError, match=r"^ResNet has no attention that can be captured"):
        main(options(path, scenes, model="test_resnet"))


def test_maps_of_a_model_that_refuses_some():
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=32,
        window_size=4,
        **dict(embed_dim=12, depths=(1, 1), num_heads=(1, 2), num_classes=5),
    ).eval()
    make = MapMaker(swin)
    for _ in range(2):
        maps = make(torch.randn(2, 3, 32, 32), torch.tensor([[1, 2, 3], [4, 0, 1]]))
        assert {name: tuple(m.shape) for name, m in maps.items()} == {
            "gradient x attention": (2, 3, 4, 4),
            "class attention": (2, 1, 4, 4),
            "mean attention": (2, 1, 4, 4),
        }
    assert list(make.refused) == ["relevance", "rollout"]

"""Relevance side by side: the chosen scene, the runs that have it, and what is left out."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from densefeed.explain.relevance import class_relevance
from densefeed.models import checkpoints  # noqa: F401  (registers our models)
from densefeed.tools.student_relevance import choose_scene, compare_relevance

from .test_heat_maps import decode_url

SIZE = 32
# Objects of each validation scene, the largest first: class, left, top, right, bottom.
SCENES = {
    "val/0/0.png": [(0, 0, 0, 20, 20)],
    "val/0/1.png": [(0, 0, 0, 20, 20), (1, 22, 22, 26, 26)],
    "val/1/2.png": [(1, 0, 0, 20, 20), (0, 21, 21, 31, 31)],
    "val/1/3.png": [(1, 0, 0, 16, 16), (0, 17, 17, 31, 31), (1, 17, 0, 31, 10)],
}


@pytest.fixture
def boxes(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    for name in SCENES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
    scenes = {
        name: [{"digit": c, "box": box} for c, *box in objects] for name, objects in SCENES.items()
    }
    (tmp_path / "boxes.json").write_text(json.dumps({"size": SIZE, "scenes": scenes}))
    return tmp_path / "boxes.json"


def save_run(folder: Path, name: str, class_names: list[str], **kwargs) -> Path:
    kwargs |= {"num_classes": len(class_names)}
    torch.manual_seed(0)
    weights = timm.create_model(name, **kwargs).state_dict()
    # Of zeros every map would be constant.
    weights = {
        n: w + 0.05 * torch.randn(w.shape) if w.is_floating_point() else w
        for n, w in weights.items()
    }
    saved = {"recipe": {"name": name, "kwargs": kwargs}, "class_names": class_names}
    saved |= {"config": {"data": {"size": SIZE, "crop_pct": 0.9}}, "model": weights}
    folder.mkdir()
    torch.save(saved, folder / "last.pt")
    return folder


def test_the_scene_has_two_objects_and_the_largest_second_one(boxes):
    scene = choose_scene(boxes)
    assert scene.name == "2.png"
    assert scene.truth.classes.tolist() == [1, 0]


def test_students_stand_side_by_side(boxes, tmp_path, capsys):
    """A CNN, a run of other classes and a damaged one are left out; the last is named."""
    small = dict(img_size=SIZE, embed_dim=24, num_heads=2, depth=2, stem_width=4)
    names = ["0", "1"]
    runs = [
        save_run(tmp_path / "teacher", "test_resnet", names),
        save_run(tmp_path / "student", "lvvit_micro", names, **small),
        save_run(tmp_path / "stranger", "lvvit_micro", ["a", "b"], **small),
        tmp_path / "nothing",
    ]
    runs[-1].mkdir()
    shown = compare_relevance(runs, boxes)
    assert (shown["names"], shown["file"]) == (["1", "0"], "2.png")
    (column,) = shown["columns"]
    assert column["name"] == "student"
    model = timm.create_model("lvvit_micro", num_classes=2, **small).eval()
    model.load_state_dict(torch.load(runs[1] / "last.pt", weights_only=True)["model"])
    # The scene has the size of the input, so nothing is resized.
    pixels = torch.tensor(np.asarray(Image.open(tmp_path / "val/1/2.png")))
    mean, std = (torch.tensor(model.pretrained_cfg[name]) for name in ("mean", "std"))
    image = ((pixels / 255 - mean) / std).permute(2, 0, 1)[None]
    relevance = class_relevance(model, image, torch.tensor([[1, 0]]))[0]
    for url, map_RC in zip(column["maps"], relevance, strict=True):
        scaled = (map_RC - map_RC.min()) / (map_RC.max() - map_RC.min())
        # Relevance in float32 amplifies the rounding of the pixels.
        np.testing.assert_allclose(decode_url(url), 255 * scaled, atol=8)
    probability = model(image)[0].softmax(-1).detach()
    np.testing.assert_allclose(column["probabilities"], probability[[1, 0]], atol=1e-5)
    assert "no relevance of nothing: " in capsys.readouterr().err


@pytest.mark.parametrize("scenes", [{}, {"val/0/0.png": SCENES["val/0/0.png"]}])
def test_a_report_without_validation_scenes_has_no_relevance(boxes, tmp_path, scenes, capsys):
    run = save_run(tmp_path / "run", "lvvit_micro", ["0", "1"], img_size=SIZE)
    boxes.write_text(json.dumps({"size": SIZE, "scenes": scenes}))
    assert compare_relevance([run], boxes) is None
    assert "the report shows no relevance" in capsys.readouterr().err

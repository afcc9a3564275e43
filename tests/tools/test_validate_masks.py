"""Validation of networks of segmentation and detection: as their runs evaluated themselves."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import densefeed.train as training
from densefeed.models.upernet import UperNet
from densefeed.objectives.segmentation import Segmentation
from densefeed.pipelines.augment.augmentation import Normalize
from densefeed.system.errors import UserError
from densefeed.system.options import with_options
from densefeed.tools import export, validate
from densefeed.tools.export import Export
from densefeed.tools.validate import Validation
from densefeed.training.load_model import open_trained
from densefeed.training.setup import open_loader

from ..runs import objective_for, stopped_after

CPU = torch.device("cpu")
# So that several classes are predicted.
LEARNS = dict(epochs=6, lr=1e-2, ema=0.5, eval_every=6, drop_path=0.0, warmup_epochs=0)
MASKS = ("miou", "macc", "pixels")
BOXES = ("map_box", "map_box_50", "map_box_75", "map_mask", "map_mask_50", "map_mask_75")


@pytest.fixture(scope="module")
def segmenter(segments, tmp_path_factory):
    """A run of segmentation that was evaluated at two scales."""
    out = tmp_path_factory.mktemp("runs") / "masks"
    training.train(segments(out, **LEARNS, eval_scales=(0.75, 1.5), eval_interpolation="bicubic"))
    return out


@pytest.fixture(scope="module")
def detector(detects, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "boxes"
    training.train(detects(out, epochs=1))
    return out


def options(checkpoint, data, **fields) -> Validation:
    return Validation(checkpoint=checkpoint, data=data, device="cpu", threads=2, **fields)


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_a_segmentation_run_has_the_metrics_of_its_last_evaluation(
    segmenter, masked, tmp_path, weights
):
    want = json.loads((segmenter / "result.json").read_text())
    path = tmp_path / "row.json"
    row = validate.main(options(segmenter, masked[0], weights=weights, json=path))
    suffix = "_ema" if weights == "ema" else ""
    assert [row[name] for name in MASKS] == [want[name + suffix] for name in MASKS]
    assert (row["images"], row["classes"], row["eval_scales"]) == (5, 4, (0.75, 1.5))
    assert [each["class"] for each in row["iou"]] == ["ground", "red", "green", "blue"]
    assert np.nanmean([each["iou"] for each in row["iou"]]) == pytest.approx(row["miou"])
    assert json.loads(path.read_text())["iou"] == row["iou"]


def test_scales_and_size_may_be_others_than_the_runs(segmenter, segments, masked):
    """As by a run with those options that had these weights."""
    row = validate.main(options(segmenter, masked[0], eval_scales=(1.0, 2.0), size=40, batch=3))
    given = dict(eval_scales=(1.0, 2.0), size=40, eval_interpolation="bicubic")
    config = segments(segmenter, **given)
    trained = open_trained(segmenter, size=40, others=(UperNet,))
    normalize, evaluation = Normalize(trained.mean, trained.std), objective_for(config).evaluation
    with closing(open_loader(config.data, config.optim, 0, Segmentation, "evaluate")) as loader:
        sums = evaluation.sum(trained.model, loader, normalize, CPU, None, lambda *_: None)
    want = evaluation.mean_sync(sums)
    # Windows pass in groups of another size, which may change the class of a pixel.
    assert [row[name] for name in MASKS] == pytest.approx(list(want[:3]), abs=1e-3)
    own = validate.main(options(segmenter, masked[0]))
    assert (own["batch"], row["batch"]) == (8, 3)
    assert row["miou"] != own["miou"]


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_a_detectors_run_has_the_precisions_of_its_last_evaluation(detector, coco, capsys, weights):
    want = json.loads((detector / "result.json").read_text())
    dataset = f"coco/{coco}/annotations/instances_val2017.json"
    row = validate.main(options(detector, coco, dataset=dataset, weights=weights))
    suffix = "_ema" if weights == "ema" else ""
    assert [row[name] for name in BOXES] == [want[name + suffix] for name in BOXES]
    assert row["map_box"] > 0
    assert (row["images"], row["classes"]) == (4, 3)
    assert "AP of masks, IoU 0.75" in capsys.readouterr().out


def test_an_exported_network_is_evaluated_at_the_scale_of_its_input(segmenter, masked, tmp_path):
    export.main(Export(checkpoint=segmenter, out=tmp_path / "out"))
    row = validate.main(options(tmp_path / "out", masked[0]))
    run = validate.main(options(segmenter, masked[0], eval_scales=(1.0,)))
    assert row["eval_scales"] == (1.0,)
    assert row["iou"] == run["iou"]


def test_outside_what_a_run_divided_is_evaluated_on_what_it_held_out(segments, tmp_path, capsys):
    """Images in the plain layout, which has no splits."""
    rng = np.random.default_rng(0)
    for kind in ("images", "masks"):
        (tmp_path / "data" / kind).mkdir(parents=True)
    (tmp_path / "data/classes.txt").write_text("ground\nred\n")
    for n in range(12):
        mask = rng.integers(0, 2, (40, 40)).astype(np.uint8)
        Image.fromarray(mask).save(tmp_path / f"data/masks/{n}.png")
        Image.fromarray(np.repeat(200 * mask[..., None], 3, -1)).save(
            tmp_path / f"data/images/{n}.png"
        )
    data = dict(data=tmp_path / "data", val=None, val_fraction=0.25)
    training.train(with_options(segments(tmp_path / "run", epochs=1), **data))
    row = validate.main(options(tmp_path / "run", tmp_path / "data"))
    want = json.loads((tmp_path / "run/result.json").read_text())
    assert (row["images"], row["miou"]) == (3, want["miou_ema"])
    assert "evaluating the 3 images that it held out" in capsys.readouterr().out


REFUSED = {
    "no effect on .*last.pt, a segmentation network; leave it out": (
        dict(crop_pct=0.9),
        dict(real="timm"),
        dict(class_map=Path("map.csv")),
    ),
    "/val.beton is not a folder; give --data the folder of the images that a segmentation": (
        dict(data="packed"),
    ),
    "--loader dali has no effect on .*, a segmentation network": (dict(loader="dali"),),
    "is read with objects, which detection needs": (dict(data="coco", dataset="coco"),),
    "--eval-scales: give up to 20 numbers from 0.1 to 4": (
        dict(eval_scales=(9.0,)),
        dict(eval_scales=(1.0,) * 21),
    ),
    "--size is 100,000, and must be a number of pixels up to 4,096": (dict(size=100_000),),
    r"has 4 classes \(ground, green.*, and the model 4 \(ground, red.*; give data with": (
        dict(data="other"),
    ),
}


@pytest.mark.parametrize(
    ("message", "fields"),
    [(message, fields) for message, cases in REFUSED.items() for fields in cases],
)
def test_what_does_not_fit_a_segmentation_network_is_refused(
    segmenter, masked, coco, packed, tmp_path, message, fields
):
    shutil.copytree(masked[0], tmp_path / "other")
    (tmp_path / "other/classes.txt").write_text("ground\ngreen\nred\nblue\n")
    roots = {"packed": packed[1], "coco": coco, "other": tmp_path / "other"}
    fields = dict(fields)
    data = roots.get(fields.pop("data", ""), masked[0])
    if "dataset" in fields:
        fields["dataset"] = f"coco/{coco}/annotations/instances_val2017.json"
    with pytest.raises(UserError, match=message):
        validate.main(options(segmenter, data, json=tmp_path / "row.json", **fields))
    assert not (tmp_path / "row.json").exists()


def test_a_detector_needs_the_objects_of_its_images(detector, coco):
    with pytest.raises(UserError, match="give --dataset coco/FILE, the annotation file of"):
        validate.main(options(detector, coco))
    with pytest.raises(UserError, match=r"val2017.json is not a folder; .* --dataset coco/FILE"):
        validate.main(options(detector, coco / "annotations/instances_val2017.json"))
    with pytest.raises(UserError, match=r"--batch has no effect on .*, a detector; leave it out"):
        validate.main(options(detector, coco, batch=2))
    with pytest.raises(UserError, match=r"--eval-scales has no effect on .*, a detector; leave"):
        validate.main(options(detector, coco, eval_scales=(0.5,)))


def test_scales_have_no_effect_on_a_classifier(micro, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "signal_handler", stopped_after(1))
        training.train(micro(tmp_path))
    data = micro(tmp_path).data.val
    with pytest.raises(UserError, match=r"--eval-scales has no effect on .*, a classifier; leave"):
        validate.main(options(tmp_path, data, eval_scales=(0.5,)))


def test_outside_classes_of_equal_names_are_told_apart(segmenter, masked, tmp_path):
    shutil.copytree(masked[0], tmp_path / "data")
    (tmp_path / "data/classes.txt").write_text("ground\nred\nred\nblue\n")
    checkpoint = torch.load(segmenter / "last.pt", weights_only=True)
    torch.save(checkpoint | {"class_names": ["ground", "red", "red", "blue"]}, tmp_path / "last.pt")
    row, own = (
        validate.main(options(path, data))
        for path, data in ((tmp_path, tmp_path / "data"), (segmenter, masked[0]))
    )
    assert [each["iou"] for each in row["iou"]] == [each["iou"] for each in own["iou"]]


def test_outside_a_dataset_that_a_checkpoint_states_is_not_opened(segmenter, masked, tmp_path):
    checkpoint = torch.load(segmenter / "last.pt", weights_only=True)
    checkpoint["config"]["data"]["dataset"] = "hfds/some/dataset"
    torch.save(checkpoint, tmp_path / "last.pt")
    assert validate.main(options(tmp_path, masked[0]))["images"] == 5


def test_a_damaged_checkpoint_states_no_scales(segmenter, masked, tmp_path):
    for scales, what in ((("a",), "must be"), ((9.0,), "give up to 20 numbers")):
        checkpoint = torch.load(segmenter / "last.pt", weights_only=True)
        checkpoint["config"]["objective"]["segmentation"]["eval_scales"] = scales
        torch.save(checkpoint, tmp_path / "last.pt")
        with pytest.raises(UserError, match=f"last.pt: --eval-scales.*{what}.*; train it again"):
            validate.main(options(tmp_path, masked[0]))

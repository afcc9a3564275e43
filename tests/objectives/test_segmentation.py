"""Segmentation: losses, views of masks and metrics, against float64, NumPy and by hand."""

import json
import shutil
import sys
from contextlib import closing
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import densefeed.train as training
from densefeed import open_score_maps
from densefeed.models import checkpoints
from densefeed.models.upernet import PixelLogits
from densefeed.objectives.base import StepContext
from densefeed.objectives.segmentation import (
    MaskEvaluation,
    class_iou,
    count_pairs,
    mean_pairs,
    place_windows,
    slide,
)
from densefeed.pipelines.augment.augmentation import Normalize
from densefeed.pipelines.masks import sample_masks
from densefeed.step import Step
from densefeed.storage.mask_folder import MaskFolder
from densefeed.system.errors import UserError
from densefeed.system.options import with_options
from densefeed.training.ranks import ALONE
from densefeed.training.setup import open_loader

from ..runs import objective_for, stopped_after, train_loader


def open_step(config, model=None):
    """Return the loader and the step of a run, which close together."""
    objective = objective_for(config)
    loader = train_loader(config)
    model = model or Flat()
    return loader, Step(loader, model, objective, config.data, config.augment)


class Flat(nn.Module):
    """A network whose logits of pixels are a matrix times their colors."""

    def __init__(self, K=4):
        super().__init__()
        self.pretrained_cfg = dict(mean=(0.5,) * 3, std=(0.25,) * 3)
        rng = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(K, 3, generator=rng))

    def forward(self, image):
        logits = torch.einsum("kc,nchw->nkhw", self.weight, image)
        return PixelLogits(logits, 2 * logits) if self.training else logits


# ---------------------------------------------------------------- losses


def write_out(logits_NKHW, target_NKHW, weight_NHW):
    """The mean cross entropy of pixels in float64."""
    log = torch.log_softmax(logits_NKHW.double(), 1)
    loss_NHW = -(target_NKHW * log).sum(1)
    return (loss_NHW * weight_NHW).sum() / weight_NHW.sum()


def one_hot(mask_NHW, K):
    return nn.functional.one_hot(mask_NHW.long().clamp(min=0), K).movedim(-1, 1).double()


def test_hard_loss_equals_float64_and_padding_has_no_part(segments, tmp_path):
    loader, step = open_step(segments(tmp_path, batch=8, hflip=1.0))
    batch = list(step.batches(0))[-1]
    loader.close()
    assert 0 < batch.weight.sum() < len(batch.weight)
    objective, model = step.objective, step.model
    output = model.train()(batch.image)
    loss = objective.loss(output, batch, StepContext(None, 4, None))
    labeled = (batch.mask != -1) & (batch.weight[:, None, None] > 0)
    assert 0 < labeled.double().mean() < 1
    target = one_hot(batch.mask, 4)
    want = write_out(output.logits, target, labeled) + 0.4 * write_out(
        2 * output.logits, target, labeled
    )
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_soft_loss_equals_float64(segments, masked, tmp_path, share):
    """Against the targets of a grid of pixels, which other tests compare with float64."""
    config = segments(tmp_path, objective="segment-soft", soft_share=share, batch=8)
    loader, step = open_step(config)
    batch = list(step.batches(0))[-1]
    output = step.model.train()(batch.image)
    loss = step.objective.loss(output, batch, StepContext(loader.score_maps, 4, None))
    loader.close()
    ids, size = batch.index.tolist(), (32, 32)
    soft = open_score_maps(masked[1]).targets(ids, batch.view, grid=size)
    dense = soft.dense(4).double().unflatten(1, size).movedim(-1, 1)
    real = (batch.weight > 0)[:, None, None]
    known = soft.weight.double().unflatten(1, size) * real
    labeled = ((batch.mask != -1) & real).double()
    mixed = share * known + (1 - share) * labeled
    both = (known > 0) & (labeled > 0)
    # Where one of both is not known, the other counts alone.
    part = torch.where(both, share * known, known)[:, None]
    rest = torch.where(both, (1 - share) * labeled, labeled)[:, None]
    weight = torch.where(both, mixed, known + labeled)
    target = (part * dense + rest * one_hot(batch.mask, 4)) / weight[:, None].clamp(min=1e-9)
    want = write_out(output.logits, target, weight) + 0.4 * write_out(
        2 * output.logits, target, weight
    )
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)


# ---------------------------------------------------------------- views


@pytest.mark.parametrize(
    "options",
    [
        dict(hflip=0.5),
        dict(zoom_out=0.4),
        dict(rand_augment="rand-m9-n2-mstd0.5"),
        dict(rand_augment="rand-m9", augment_before_crop=True),
    ],
    ids=["flip", "zoom", "rand-augment", "before-crop"],
)
def test_masks_follow_their_images(segments, masked, tmp_path, options):
    """Squares have the color of their class, and the stored masks the same class at the View."""
    config = segments(tmp_path / "run", crop_scale=(0.5, 1.0), batch=13, **options)
    loader, step = open_step(config)
    batch = next(step.batches(0))
    loader.close()
    image = step.augmentation.normalize.pixels(batch.image).float()
    inside = 0
    for n in range(13):
        for number in range(1, 4):
            where = batch.mask[n] == number
            # Away from the edges of squares, which filters blur.
            solid = nn.functional.avg_pool2d(where[None].float(), 5, 1, 2)[0] == 1
            if solid.sum() < 8:
                continue
            inside += int(solid.sum())
            if not options.get("rand_augment"):
                # The color of the class is the brightest channel.
                best = image[n][solid].argmax(-1) == number - 1
                assert best.float().mean() > 0.9, (n, number)
    assert inside > 500
    data = MaskFolder(masked[0])
    rows = [n for n in range(13) if data.masks[int(batch.index[n])]]
    stored = [data.mask(int(batch.index[n])) for n in rows]
    direct, mask = sample_masks(stored, batch.view[rows], (32, 32)), batch.mask[rows]
    labeled = (mask != -1) & (direct != -1)
    assert labeled.float().mean() > 0.4
    # Pixels at the edges of squares differ in masks that are sampled twice.
    assert (mask == direct)[labeled].float().mean() > 0.97
    if "zoom_out" in options:
        rows = [n for n in range(13) if torch.linalg.det(batch.view[n, :, :2].double()) > 1.05]
        assert rows
        # Beyond the crop is the mean color and no label.
        corner = [(batch.mask[n] == -1).float().mean() for n in rows]
        assert min(corner) > 0.04


def test_skipped_masks_have_no_weight_and_others_stop_the_run(segments, masked, tmp_path, capsys):
    root = tmp_path / "copy"
    shutil.copytree(masked[0], root)
    config = with_options(segments(tmp_path / "run", batch=13), data=root)
    loader, step = open_step(config)
    Image.new("L", (5, 5)).save(root / "annotations/training/7.png")
    with pytest.raises(
        UserError, match=r"7.png has 5 x 5 pixels and .*7.jpg 56 x 42; give the mask"
    ):
        next(step.batches(0))
    loader.close()
    loader, step = open_step(with_options(config, on_bad_sample="skip"))
    batch = next(step.batches(0))
    loader.close()
    assert loader.skipped == 1
    assert (batch.weight == 0).sum() == 1
    assert "skipped sample" in capsys.readouterr().err


# ---------------------------------------------------------------- evaluation


def count_by_numpy(masks, found, K):
    """Mean IoU, mean accuracy and share of right pixels, class by class, in plain NumPy."""
    ious, accuracies, right, labeled = [], [], 0, 0
    for number in range(K):
        both = sum(
            int(((m == number) & (f == number)).sum()) for m, f in zip(masks, found, strict=True)
        )
        of_mask = sum(int((m == number).sum()) for m in masks)
        named = sum(
            int(((f == number) & (m >= 0)).sum()) for m, f in zip(masks, found, strict=True)
        )
        if of_mask + named:
            ious.append(both / (of_mask + named - both))
        if of_mask:
            accuracies.append(both / of_mask)
        right, labeled = right + both, labeled + of_mask
    return np.mean(ious), np.mean(accuracies), right / labeled, ious


def test_mean_iou_equals_numpy_on_200_scenes():
    rng, K = np.random.default_rng(0), 9
    # Class 8 is neither in a mask nor predicted, class 7 in no mask.
    masks = [rng.integers(-1, 7, (20 + n % 3, 30)) for n in range(200)]
    noise = [rng.random(mask.shape) < 0.3 for mask in masks]
    found = [
        np.where(n, rng.integers(0, 8, m.shape), m.clip(0))
        for n, m in zip(noise, masks, strict=True)
    ]
    pairs = sum(
        count_pairs(torch.from_numpy(f), torch.from_numpy(m), K).double()
        for f, m in zip(found, masks, strict=True)
    )
    *means, ious = count_by_numpy(masks, found, K)
    assert mean_pairs(pairs) == pytest.approx(means, rel=1e-12)
    assert class_iou(pairs).tolist() == pytest.approx([*ious, np.nan], rel=1e-12, nan_ok=True)


@pytest.mark.slow
def test_evaluation_equals_numpy_and_torchmetrics_on_200_scenes(segments, drawn_scenes, tmp_path):
    """A pointwise network, by hand on the files: their masks number the objects of boxes.json."""
    config = segments(tmp_path, size=96)
    config = with_options(config, data=drawn_scenes, val=drawn_scenes)
    objective, model = objective_for(config), Flat().eval()
    # Bars are blue, discs red and rings green. Random parts avoid equal logits.
    colors = torch.tensor([[1.0, 1, 1], [-1, -1, 2], [2, -1, -1], [-1, 2, -1]])
    model.weight.data = model.weight.data / 50 + colors
    normalize = Normalize((0.5,) * 3, (0.25,) * 3)
    with closing(open_loader(config.data, config.optim, 0, objective, "evaluate")) as loader:
        sums = objective.evaluation.sum(
            model, loader, normalize, torch.device("cpu"), None, lambda *_: None
        )
    metrics = objective.evaluation.mean_sync(sums)
    classes, masks, found = ["background", "bar", "disc", "ring"], [], []
    weight = model.weight.detach().numpy()
    for name, objects in json.loads((drawn_scenes / "boxes.json").read_text())["scenes"].items():
        if name.startswith("val/"):
            numbers = np.array([0, *(classes.index(each["class"]) for each in objects)])
            path = (drawn_scenes / "masks" / name).with_suffix(".png")
            masks.append(numbers[np.array(Image.open(path))])
            pixels = (np.array(Image.open(drawn_scenes / name)) / 255 - 0.5) / 0.25
            found.append((pixels @ weight.T).argmax(-1))
    assert len(masks) == metrics.images == 200
    # Logits are float32 there and float64 here: a pixel may differ, up to 1e-5 of a class.
    *want, ious = count_by_numpy(masks, found, 4)
    assert metrics[:3] == pytest.approx(want, abs=1e-5)
    assert objective.evaluation.iou_sync(sums) == pytest.approx(ious, abs=1e-5)
    metric = pytest.importorskip("torchmetrics").JaccardIndex("multiclass", num_classes=4)
    for one, truth in zip(found, masks, strict=True):
        metric.update(torch.from_numpy(one), torch.from_numpy(truth))
    assert metrics.miou == pytest.approx(metric.compute().item(), abs=1e-5)
    assert 0.01 < min(ious) < max(ious) < 0.9


@pytest.mark.parametrize(("extent", "side"), [(32, 32), (20, 32), (33, 32), (100, 32), (1000, 512)])
def test_windows_cover_an_image_and_overlap_by_a_third(extent, side):
    places = place_windows(extent, side)
    seen = np.zeros(max(extent, side))
    for place in places:
        seen[place : place + side] += 1
    assert seen.min() == 1 or len(places) > 1
    assert seen.all()
    assert places[-1] == max(0, extent - side)
    assert all(0 < b - a <= side * 341 / 512 for a, b in pairwise(places))


def test_sliding_windows_of_a_pointwise_network_give_its_logits():
    model, normalize = Flat().eval(), Normalize((0.5,) * 3, (0.25,) * 3)
    rng = torch.Generator().manual_seed(2)
    image = torch.randint(0, 256, (45, 20, 3), generator=rng, dtype=torch.uint8)
    want = model(normalize(image[None]))[0]
    for most in (1, 3):
        assert torch.allclose(slide(model, image, normalize, 24, most), want, atol=1e-5)


def test_evaluation_equals_numpy_on_whole_images(segments, masked, tmp_path):
    """At the size of the images nothing is resized, so a pointwise network can be done by hand."""
    config = segments(tmp_path, size=42)
    objective, model = objective_for(config), Flat().eval()
    normalize = Normalize((0.5,) * 3, (0.25,) * 3)
    with closing(open_loader(config.data, config.optim, 0, objective, "evaluate")) as loader:
        sums = objective.evaluation.sum(
            model, loader, normalize, torch.device("cpu"), None, lambda *_: None
        )
        metrics = objective.evaluation.mean_sync(ALONE.sum(sums.clone()))
    data = MaskFolder(masked[0], "val")
    # The first has no mask.
    masks = [data.mask(n).numpy() for n in range(1, 5)]
    weight, found = model.weight.detach().numpy(), []
    for n in range(1, 5):
        pixels = (np.array(Image.open(data.images[n])) / 255 - 0.5) / 0.25
        found.append((pixels @ weight.T).argmax(-1))
    *want, ious = count_by_numpy(masks, found, 4)
    assert (metrics.images, metrics.nonfinite) == (5, 0)
    assert metrics[:3] == pytest.approx(want, abs=2e-3)
    assert objective.evaluation.iou_sync(sums) == pytest.approx(ious, abs=4e-3)
    model.weight.data[0, 0] = torch.nan
    with closing(open_loader(config.data, config.optim, 0, objective, "evaluate")) as loader:
        sums = MaskEvaluation((0.5, 1.0)).sum(
            model, loader, normalize, torch.device("cpu"), None, lambda *_: None
        )
    broken = objective.evaluation.mean_sync(sums.clone())
    assert (broken.nonfinite, broken.images, broken.miou) == (4, 5, 0)


# ---------------------------------------------------------------- guards


def test_a_training_without_torchmetrics_stops_before_it_begins(segments, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics.functional", None)
    with pytest.raises(UserError, match=r"^segmentation needs the package torchmetrics; run `pip"):
        training.train(segments(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


REFUSED = {
    r"--drloc trains classifiers; pretrain with it": dict(drloc="l1"),
    r"does not state that it mixes labels": dict(mixup=0.5),
    r"--frozen-statistics .* no logits of its auxiliary": dict(frozen_statistics=True),
    r"returns no logits of the pixels of its input, .* --model-kwargs \"backbone='NAME'\"": dict(
        model="lvvit_micro", model_kwargs=("depth=2",)
    ),
    r"is read without masks, which segmentation needs; give --dataset masks": "folder",
    r"has no score maps, which --objective segment-soft needs": dict(
        objective="segment-soft", score_maps=None
    ),
    r"which needs two; give a larger --batch": dict(microbatch=1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_runs_that_cannot_be_are_refused(segments, folder, tmp_path, message):
    fields = REFUSED[message]
    if fields == "folder":
        config = with_options(segments(tmp_path), dataset="", data=folder, val=folder)
    else:
        config = with_options(segments(tmp_path), **fields)
    with pytest.raises(UserError, match=message):
        training.train(config)
    assert not (tmp_path / "last.pt").exists()


def test_masks_do_not_follow_images_as_published_maps_do(segments, tmp_path):
    """They were mirrored and warped unlike their images."""
    fields = dict(objective="segment-soft", geometry="published", rand_augment="rand-m9")
    config = segments(tmp_path, augment_before_crop=True, **fields)
    with pytest.raises(UserError, match="published warps score maps, but no masks; give --geom"):
        open_step(config)


def test_a_validation_set_without_masks_is_refused(segments, masked, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(masked[0], root)
    for path in (root / "annotations/validation").iterdir():
        path.unlink()
    config = with_options(segments(tmp_path / "run", epochs=1), val=root)
    with pytest.raises(UserError, match="copy has no masks of its images for validation"):
        training.train(config)
    with pytest.raises(UserError, match="no image of the validation set has a mask"):
        MaskEvaluation((1.0,)).mean_sync(torch.zeros(18))


def test_outside_masks_without_a_labeled_pixel_are_warned_of(segments, masked, tmp_path, capsys):
    """They trained nothing, without a word."""
    root = tmp_path / "copy"
    shutil.copytree(masked[0], root)
    for path in (root / "annotations/training").iterdir():
        Image.new("L", Image.open(path).size).save(path)
    for data in (masked[0], root):
        loader, step = open_step(with_options(segments(tmp_path / "run"), data=data))
        list(step.batches(0))
        loader.close()
        warned = "no pixel of the first batch has a class" in capsys.readouterr().err
        assert warned == (data == root)


def test_masks_with_other_classes_are_refused_before_the_first_step(segments, masked, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(masked[0], root)
    (root / "classes.txt").write_text("ground\nred\ngreen\n")
    config = with_options(segments(tmp_path / "run"), data=root, val=root)
    with pytest.raises(UserError, match="has class 4, and there are 3 classes from 1 on; correct"):
        training.train(config)


# ---------------------------------------------------------------- initial weights and files


def test_a_classifiers_run_begins_the_backbone(micro, segments, tmp_path, monkeypatch):
    kwargs = segments(tmp_path).model.kwargs
    own = tuple(word for word in kwargs if word.split("=")[0] not in OF_DECODER)
    with monkeypatch.context() as patch:
        patch.setattr(training, "signal_handler", stopped_after(1))
        training.train(micro(tmp_path / "ce", model_kwargs=own, ema=0.0))
        config = segments(tmp_path / "segment", init=tmp_path / "ce", lr=1e-12, ema=0.0)
        training.train(config)
    before, after = (
        checkpoints.load(tmp_path / run / "last.pt")["model"] for run in ("ce", "segment")
    )
    kept = [name for name in before if f"backbone.{name}" in after]
    assert {name.split(".")[0] for name in before.keys() - set(kept)} == {
        "head",
        "norm",
        "token_head",
    }
    for name in (name for name in kept if "running" not in name and "batches" not in name):
        assert torch.allclose(before[name], after[f"backbone.{name}"], atol=1e-6), name


OF_DECODER = ("backbone", "decoder_width", "auxiliary")

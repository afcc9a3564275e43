"""Detection: objects of crops, losses and precision, against torchvision, pycocotools and NumPy."""

import contextlib
import io
import json
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torchvision.models.detection import MaskRCNN as TorchMaskRCNN
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.ops import box_iou

import densefeed.train as training
from densefeed.models import checkpoints
from densefeed.models.mask_rcnn import MaskRCNN
from densefeed.objectives.base import StepContext
from densefeed.objectives.detection import (
    BoxEvaluation,
    Seen,
    average_precision,
    describe_found,
    find_objects,
)
from densefeed.pipelines.augment.augmentation import Normalize
from densefeed.pipelines.masks import sample_masks
from densefeed.step import Step
from densefeed.storage.instances import OBJECTS, CocoInstances, SceneInstances
from densefeed.system.errors import UserError
from densefeed.system.options import with_options
from densefeed.tools import export
from densefeed.tools.export import Export
from densefeed.training.load_model import open_trained
from densefeed.training.setup import open_loader

from ..runs import objective_for, stopped_after, train_loader
from ..storage.test_outside_mask_folder import write_scenes

pytest.importorskip("pycocotools")
CPU = torch.device("cpu")
MICRO = dict(
    backbone="lvvit_micro",
    depth=2,
    stem=((7, 2), (3, 2), (4, 2)),
    stem_width=8,
    img_size=32,
    decoder_width=8,
    samples=16,
)


def annotations(coco, split="train"):
    return coco / f"annotations/instances_{split}2017.json"


def open_coco(coco, split="train"):
    return CocoInstances(coco, annotations(coco, split))


# ---------------------------------------------------------------- precision


def shake(objects, rng, K):
    """Make results up: most objects moved, some with another class, and some of nothing."""
    from pycocotools import mask as coder

    found = []
    for each in objects:
        if rng.random() < 0.15:
            continue
        x, y, w, h = each["bbox"]
        box = [x + rng.normal(0, 2), y + rng.normal(0, 2), w * rng.uniform(0.8, 1.2), h]
        shape = np.roll(coder.decode(each["segmentation"]), int(rng.integers(-3, 4)), 1)
        category = each["category_id"] if rng.random() < 0.8 else int(rng.integers(K))
        found.append({"category_id": category, "score": float(rng.random()), "bbox": box})
        found[-1]["segmentation"] = coder.encode(np.asfortranarray(shape))
    return found


def test_precision_equals_pycocotools_on_a_file_of_coco(coco):
    """Read by pycocotools itself, with the ids of the file."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    data, rng = open_coco(coco), np.random.default_rng(2)
    assert data.classes == ["green", "blue", "red"]
    assert sum(each["iscrowd"] for each in data.objects(0)) == 1
    assert data.objects(2) == []
    seen = [
        Seen(n, (48, 64 - 8 * (n % 2)), data.objects(n), shake(data.objects(n), rng, 3))
        for n in range(len(data))
    ]
    values, ids = average_precision(seen[::-1], 3), [2, 5, 9]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(annotations(coco)))
        found = [
            each | {"image_id": 100 - one.index, "category_id": ids[each["category_id"]]}
            for one in seen
            for each in one.found
        ]
        want = []
        for kind in ("bbox", "segm"):
            judge = COCOeval(truth, truth.loadRes(found), kind)
            judge.evaluate()
            judge.accumulate()
            judge.summarize()
            want += judge.stats[:3].tolist()
    assert values == pytest.approx(want, abs=1e-12)
    assert 0.1 < values[0] < values[1] < 1


def precision_by_numpy(seen, K, threshold):
    """AP of boxes at one IoU, one class at a time, interpolated at 101 recalls."""
    precisions = []
    for k in range(K):
        truth = {
            one.index: [o["bbox"] for o in one.objects if o["category_id"] == k] for one in seen
        }
        count = sum(map(len, truth.values()))
        if not count:
            continue
        found = [(f["score"], one.index, f["bbox"]) for one in seen for f in one.found]
        kinds = [f["category_id"] for one in seen for f in one.found]
        own = sorted((f for f, kind in zip(found, kinds, strict=True) if kind == k), reverse=True)
        taken, right = {index: set() for index in truth}, []
        for _, index, box in own:
            best, at = threshold, None
            for number, other in enumerate(truth[index]):
                if number in taken[index]:
                    continue
                w = min(box[0] + box[2], other[0] + other[2]) - max(box[0], other[0])
                h = min(box[1] + box[3], other[1] + other[3]) - max(box[1], other[1])
                shared = max(w, 0) * max(h, 0)
                iou = shared / (box[2] * box[3] + other[2] * other[3] - shared)
                if iou >= best:
                    best, at = iou, number
            right.append(at is not None)
            taken[index].add(at)
        recall = np.cumsum(right) / count
        precision = np.cumsum(right) / np.arange(1, len(right) + 1)
        best = [max(precision[recall >= point], default=0) for point in np.linspace(0, 1, 101)]
        precisions.append(np.mean(best))
    return np.mean(precisions)


def test_precision_equals_numpy_on_200_scenes():
    from pycocotools import mask as coder

    rng, K, seen = np.random.default_rng(0), 6, []
    for index in range(200):
        objects = []
        for _ in range(int(rng.integers(0, 5))):
            mask = np.zeros((60, 80), np.uint8, order="F")
            y, x = rng.integers(0, 40), rng.integers(0, 60)
            mask[y : y + rng.integers(8, 20), x : x + rng.integers(8, 20)] = 1
            rle = coder.encode(mask)
            objects.append({"category_id": int(rng.integers(K)), "segmentation": rle, "iscrowd": 0})
            objects[-1] |= {"bbox": coder.toBbox(rle).tolist(), "area": float(coder.area(rle))}
        seen.append(Seen(index, (60, 80), objects, shake(objects, rng, K)))
    values = average_precision(seen, K)
    steps = np.linspace(0.5, 0.95, 10)
    by_numpy = [precision_by_numpy(seen, K, threshold) for threshold in steps]
    assert values[:3] == pytest.approx([np.mean(by_numpy), by_numpy[0], by_numpy[5]], abs=1e-6)
    assert average_precision([one._replace(found=[]) for one in seen], K) == [0] * 6
    assert average_precision([one._replace(objects=[]) for one in seen], K) == [-1] * 6


class Shaken(nn.Module):
    """A network that returns boxes of whole scenes, given at the size of the scenes."""

    def __init__(self, boxes, scale):
        super().__init__()
        self.boxes, self.scale, self.shown = boxes, scale, 0

    def forward(self, image):
        rows = self.boxes[self.shown]
        self.shown += 1
        boxes = torch.tensor([row[:4] for row in rows]).reshape(-1, 4) * self.scale
        labels, scores = ([row[n] for row in rows] for n in (4, 5))
        masks = torch.ones(len(rows), 1, 28, 28)
        return [
            {"boxes": boxes, "labels": torch.tensor(labels, dtype=torch.int64) + 1, "masks": masks}
            | {"scores": torch.tensor(scores), "finite": torch.tensor(True)}
        ]


@pytest.mark.slow
def test_evaluation_equals_pycocotools_and_numpy_on_200_scenes(detects, drawn_scenes, tmp_path):
    """pycocotools reads files that this test writes of boxes.json and of the masks."""
    from pycocotools import mask as coder
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    fields = dict(data=drawn_scenes, val=drawn_scenes, dataset="instances")
    # The network sees the scenes at half their size.
    config = with_options(detects(tmp_path, size=48), **fields)
    classes, rng, boxes = ["bar", "disc", "ring"], np.random.default_rng(4), []
    truth = {"images": [], "annotations": [], "categories": [{"id": n} for n in range(3)]}
    results, seen = [], []
    scenes = json.loads((drawn_scenes / "boxes.json").read_text())["scenes"]
    for index, name in enumerate(sorted(name for name in scenes if name.startswith("val/"))):
        numbers = np.array(Image.open((drawn_scenes / "masks" / name).with_suffix(".png")))
        truth["images"].append({"id": index, "width": 128, "height": 96})
        objects, rows = [], []
        for number, each in enumerate(scenes[name], 1):
            rle = coder.encode(np.asfortranarray(numbers == number, np.uint8))
            x, y, right, bottom = each["box"]
            kind = classes.index(each["class"])
            objects.append({"category_id": kind, "bbox": [x, y, right - x, bottom - y]})
            truth["annotations"].append(
                objects[-1]
                | {"id": len(truth["annotations"]) + 1, "image_id": index, "iscrowd": 0}
                | {"segmentation": rle, "area": int((numbers == number).sum())}
            )
            if rng.random() < 0.8:
                left, top = x + rng.uniform(-4, 4), y + rng.uniform(-4, 4)
                kind = kind if rng.random() < 0.8 else int(rng.integers(3))
                # Cut at the image's edges, as Mask R-CNN does.
                ends = np.clip([left, top, left + right - x, top + bottom - y], 0, [128, 96] * 2)
                rows.append([*ends.tolist(), kind, float(rng.random())])
        boxes.append(rows)
        found = []
        for left, top, right, bottom, kind, score in rows:
            box = [left, top, right - left, bottom - top]
            found.append({"category_id": kind, "bbox": box, "score": score})
        results += [each | {"image_id": index} for each in found]
        seen.append(SimpleNamespace(index=index, objects=objects, found=found))
    objective, normalize = objective_for(config), Normalize((0.5,) * 3, (0.25,) * 3)
    with closing(open_loader(config.data, config.optim, 0, objective, "evaluate")) as loader:
        sums = objective.evaluation.sum(
            Shaken(boxes, 0.5), loader, normalize, CPU, None, lambda *_: None
        )
    metrics = objective.evaluation.mean_sync(sums)
    assert metrics.images == len(seen) == 200

    def judge(kind, results):
        with contextlib.redirect_stdout(io.StringIO()):
            coco = COCO()
            coco.dataset = truth
            coco.createIndex()
            judge = COCOeval(coco, coco.loadRes(results), kind)
            for step in (judge.evaluate, judge.accumulate, judge.summarize):
                step()
        return judge.stats[:3].tolist()

    by_numpy = [precision_by_numpy(seen, 3, level) for level in np.linspace(0.5, 0.95, 10)]
    assert metrics[:3] == pytest.approx(judge("bbox", results), abs=1e-9)
    assert metrics[:3] == pytest.approx([np.mean(by_numpy), by_numpy[0], by_numpy[5]], abs=1e-9)
    for each in results:
        x, y, w, h = each["bbox"]
        box = torch.tensor([[x, y, x + w, y + h]])
        (mask,) = paste_masks_in_image(torch.ones(1, 1, 28, 28), box, (96, 128))[0] > 0.5
        each["segmentation"] = coder.encode(np.asfortranarray(mask.numpy(), np.uint8))
        del each["bbox"]
    assert metrics[3:6] == pytest.approx(judge("segm", results), abs=1e-9)
    assert 0.05 < metrics.map_mask < metrics.map_box < metrics.map_box_50 < 0.9


class Oracle(nn.Module):
    """A network that finds all objects of the images that it is shown one after the other."""

    def __init__(self, data):
        super().__init__()
        self.weight, self.data, self.shown = nn.Parameter(torch.zeros(1)), data, 0

    def forward(self, image):
        objects = [o for o in self.data.objects(self.shown) if not o["iscrowd"]]
        H, W = self.data._sizes[self.shown]
        scale = torch.tensor([image.shape[3] / W, image.shape[2] / H] * 2)
        boxes = torch.tensor([o["bbox"] for o in objects]).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        self.shown += 1
        return [
            {
                "boxes": boxes * scale,
                "labels": torch.tensor([o["category_id"] + 1 for o in objects]),
                "scores": torch.rand(len(objects)),
                "masks": torch.ones(len(objects), 1, 28, 28),
                "finite": torch.tensor(self.shown != 2) & self.weight.isfinite(),
            }
        ]


def test_evaluation_maps_boxes_back_to_stored_images(coco, detects, tmp_path):
    """At another size than the images'; an image whose features are not finite counts as empty."""
    config = detects(tmp_path, size=96)
    objective, normalize = objective_for(config), Normalize((0.5,) * 3, (0.25,) * 3)

    def evaluate(model):
        with closing(open_loader(config.data, config.optim, 0, objective, "evaluate")) as loader:
            return BoxEvaluation().sum(model, loader, normalize, CPU, None, lambda *_: None)

    data, model = open_coco(coco, "val"), Oracle(open_coco(coco, "val"))
    metrics = objective.evaluation.mean_sync(evaluate(model))
    assert (metrics.images, metrics.nonfinite) == (4, 1)
    # The second of four images counts as empty.
    seen = [
        Seen(n, data._sizes[n], data.objects(n), [] if n == 1 else list(perfect(data, n)))
        for n in range(4)
    ]
    want = average_precision(seen, 3)
    assert metrics[:3] == pytest.approx(want[:3], abs=1e-6)
    assert metrics.map_box == metrics.map_box_75 < 1
    # Masks of whole boxes are right for rectangles alone.
    assert 0 < metrics.map_mask < metrics.map_box
    broken = Oracle(data)
    broken.weight.data[0] = torch.nan
    assert objective.evaluation.mean_sync(evaluate(broken))[:7] == (0,) * 6 + (4,)
    with pytest.raises(UserError, match="no image of the validation set that can be read has an"):
        objective.evaluation.mean_sync(torch.tensor([-1.0] * 6 + [4, 0]))


def test_masks_lie_in_their_boxes_of_the_stored_image():
    """A network saw the image at twice its width and three times its height."""
    from pycocotools import mask as coder

    left = torch.zeros(1, 1, 28, 28)
    left[..., :14] = 0.9
    output = {"boxes": torch.tensor([[20.0, 30.0, 100.0, 120.0]]), "labels": torch.tensor([3])}
    output |= {"scores": torch.tensor([0.5]), "masks": left}
    (found,) = describe_found(output, (1 / 2, 1 / 3), (60, 80))
    assert (found["category_id"], found["bbox"]) == (2, [10, 10, 40, 30])
    rows, columns = coder.decode(found["segmentation"]).nonzero()
    ends = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
    assert ends == tuple(pytest.approx(end, abs=1) for end in (10, 40, 10, 30))


def perfect(data, index):
    for each in data.objects(index):
        if not each["iscrowd"]:
            yield each | {"score": 0.5}


# ---------------------------------------------------------------- objects of crops


def test_maps_of_objects_are_cut_as_pillow_cuts(coco, detects, tmp_path):
    """Nearest neighbor, on the crops that training draws."""
    config = detects(tmp_path, crop_scale=(0.1, 1.0), hflip=0.0, batch=9, repeats=3)
    data, checked = open_coco(coco), 0
    with closing(train_loader(config)) as loader:
        for batch in loader.batches(0):
            for n, index in enumerate(batch.index.tolist()):
                codes, (x, y) = data.mask(index), batch.view[n]
                H, W = codes.shape
                box = (x[2] * W, y[2] * H, (x[0] + x[2]) * W, (y[1] + y[2]) * H)
                box = tuple(round(float(side), 3) for side in box)
                image = Image.fromarray(codes.numpy().astype(np.int32))
                want = np.array(image.resize((32, 32), Image.Resampling.NEAREST, box=box))
                assert batch.mask[n].dtype == torch.int32
                assert (batch.mask[n].numpy() == want).all()
                checked += (want >= 0).any()
    assert checked > 15


def test_objects_of_a_map_are_what_is_visible(coco):
    data = open_coco(coco)
    codes = data.mask(1)
    found, known = find_objects(codes), data.objects(1)
    for number, box, label, mask in zip(
        (codes[codes >= 0].unique() % OBJECTS).tolist(), *found.values(), strict=True
    ):
        assert label == known[number]["category_id"] + 1
        rows, columns = mask.nonzero().T
        assert box.tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        left, top, width, height = known[number]["bbox"]
        # Polygons of integers show as many pixels, and hidden ones less.
        whole = torch.tensor([[left - 1, top - 1, left + width + 1, top + height + 1]])
        assert box_iou(box[None], whole)[0, 0] > 0
        assert (whole[0, :2] <= box[:2]).all()
        assert (box[2:] <= whole[0, 2:]).all()
    tiny = torch.full((8, 8), -1)
    tiny[0, :3], tiny[4, :4] = 5, OBJECTS
    assert find_objects(tiny)["labels"].tolist() == [2]
    assert find_objects(tiny)["boxes"].tolist() == [[0, 4, 4, 5]]
    assert find_objects(torch.full((8, 8), -1))["boxes"].shape == (0, 4)


def test_smaller_objects_are_painted_over_larger_and_crowds_are_not(coco):
    data = open_coco(coco)
    for n in range(len(data)):
        from pycocotools import mask as coder

        codes, objects = data.mask(n), data.objects(n)
        areas = [coder.area(each["segmentation"]) for each in objects]
        shown = [each for each in range(len(objects)) if not objects[each]["iscrowd"]]
        covers = np.stack(
            [coder.decode(objects[each]["segmentation"]) for each in shown]
            or [np.zeros(codes.shape)]
        )
        assert ((codes >= 0).numpy() == covers.any(0)).all()
        if shown:
            least = min(shown, key=lambda each: areas[each])
            whole = coder.decode(objects[least]["segmentation"]) > 0
            assert (codes.numpy()[whole] % OBJECTS == least).all()


def test_scenes_have_the_objects_of_their_masks(tmp_path):
    write_scenes(tmp_path)
    data = SceneInstances(tmp_path)
    assert data.classes == ["ant", "bee", "cat"]
    # An ant; then a cat (2) and an ant (0).
    assert data.mask(0).tolist() == [[0, -1, -1, -1, -1, -1]] * 4
    assert data.mask(1).tolist() == [[2 * OBJECTS, 1, -1, -1, -1, -1]] * 4
    first, second = sorted(data.objects(1), key=lambda one: -one["category_id"])
    assert (first["category_id"], first["bbox"], first["area"]) == (2, [0, 0, 1, 4], 4)
    assert (second["category_id"], second["bbox"]) == (0, [1, 0, 1, 4])
    (tmp_path / "masks/train/cat/a.png").unlink()
    with pytest.raises(UserError, match=r"a.jpg has no mask, so its objects are not known"):
        SceneInstances(tmp_path)


# ---------------------------------------------------------------- losses


def make_model(K=3):
    torch.manual_seed(1)
    return timm.create_model("mask_rcnn", num_classes=K, **MICRO)


class Pyramid(nn.Module):
    """The backbone of torchvision's detector: the maps of ours."""

    def __init__(self, model):
        super().__init__()
        self.model, self.out_channels = model, 8

    def forward(self, image):
        maps = self.model.make_maps(image)
        return self.model.fpn({str(n): x for n, x in enumerate(maps)})


def test_losses_equal_torchvisions(coco):
    """With targets from the file, whose boxes are those of the visible masks."""
    model = make_model().train()
    other = TorchMaskRCNN(
        Pyramid(model),
        rpn_anchor_generator=model.rpn.anchor_generator,
        box_roi_pool=model.roi_heads.box_roi_pool,
        box_head=model.roi_heads.box_head,
        box_predictor=model.roi_heads.box_predictor,
        mask_roi_pool=model.roi_heads.mask_roi_pool,
        mask_head=model.roi_heads.mask_head,
        mask_predictor=model.roi_heads.mask_predictor,
        box_batch_size_per_image=16,
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
        size_divisible=8,
        _skip_resize=True,
    ).train()
    other.rpn.head = model.rpn.head
    data = open_coco(coco)
    codes = [data.mask(n)[:, :56] for n in (1, 2, 3)]
    image, targets = torch.randn(3, 3, 48, 56), []
    for one in codes:
        numbers = sorted({code for code in one.flatten().tolist() if code >= 0})
        numbers = [code for code in numbers if (one == code).sum() >= 4]
        masks = [(one == code).numpy() for code in numbers]
        boxes = [
            [*(m.any(axis).argmax() for axis in (0, 1))]
            + [m.shape[1 - axis] - m.any(axis)[::-1].argmax() for axis in (0, 1)]
            for m in masks
        ]
        targets.append(
            {
                "boxes": torch.tensor(np.array(boxes).reshape(-1, 4), dtype=torch.float32),
                "labels": torch.tensor([code // 65536 + 1 for code in numbers], dtype=torch.int64),
                "masks": torch.tensor(np.array(masks).reshape(-1, 48, 56), dtype=torch.uint8),
            }
        )
    assert sum(len(each["labels"]) for each in targets) > 3
    torch.manual_seed(3)
    want = other(list(image), targets)
    torch.manual_seed(3)
    found = model(image, [find_objects(one) for one in codes])
    assert want.keys() == found.keys()
    assert {name: loss.item() for name, loss in found.items()} == {
        name: pytest.approx(loss.item(), rel=1e-6) for name, loss in want.items()
    }


def test_gradients_are_finite_and_samples_of_weight_0_have_no_part(detects, tmp_path):
    config = detects(tmp_path, batch=4)
    objective, model = objective_for(config), make_model()
    with closing(train_loader(config)) as loader:
        step = Step(loader, model, objective, config.data, config.augment)
        batch = list(step.batches(0))[-1]
    assert 0 < batch.weight.sum() < len(batch.weight)
    model.train()

    def loss_of(batch):
        torch.manual_seed(0)
        context = StepContext(None, 4, None)
        return objective.loss(objective.forward(model, batch.image, batch, context), batch, context)

    loss = loss_of(batch)
    kept = batch.map_tensors(lambda field: field[batch.weight > 0])
    # BatchNorm sees the images that count, too.
    assert loss.item() == loss_of(kept).item()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.zero_grad()
    nothing = loss_of(batch._replace(weight=torch.zeros_like(batch.weight)))
    nothing.backward()
    assert nothing.item() == 0
    assert all((p.grad == 0).all() for p in model.parameters())


def test_boxes_are_in_float32_under_autocast():
    """bfloat16 has no number between 256 and 258."""
    model = make_model().eval()
    # Every proposal is kept, as the first class.
    model.roi_heads.score_thresh, model.roi_heads.nms_thresh = 0.0, 1.0
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        (found,) = model(torch.randn(1, 3, 320, 320))
    boxes = found["boxes"]
    assert (boxes.dtype, len(boxes)) == (torch.float32, 100)
    assert (boxes[boxes > 256] % 2 != 0).float().mean() > 0.5


def test_a_detector_of_swin_t_has_the_published_parameters():
    """Swin's paper: 48 M."""
    with torch.device("meta"):
        model = MaskRCNN(num_classes=80, img_size=800)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(47.8, abs=0.05)
    assert (model.strides, model.rpn.anchor_generator.sizes[0]) == ([4, 8, 16, 32], (32,))


@pytest.mark.parametrize("backbone", ["test_resnet", "test_vit", "lvvit_micro"])
def test_detectors_take_images_of_any_size(backbone):
    kwargs = MICRO if backbone == "lvvit_micro" else dict(backbone=backbone, decoder_width=8)
    kwargs = kwargs | (dict(img_size=32) if backbone == "test_vit" else {})
    model = timm.create_model("mask_rcnn", num_classes=3, **kwargs).eval()
    with torch.inference_mode():
        (found,) = model(torch.randn(1, 3, 37, 53))
    assert (found["boxes"] <= torch.tensor([53, 37, 53, 37])).all()
    assert bool(found["finite"])
    with pytest.raises(UserError, match=r"mask_rcnn learns from objects, .* --objective detect"):
        model.train()(torch.randn(2, 3, 32, 32))


# ---------------------------------------------------------------- runs and files


REFUSED = {
    r"--compile whole needs shapes that do not depend on values": dict(compile="whole"),
    r"--drloc trains classifiers; pretrain with it": dict(drloc="l1"),
    r"does not state that it mixes labels": dict(mixup=0.5),
    r"finds no objects, which --objective detect trains; give --model mask_rcnn": dict(
        model="lvvit_micro", model_kwargs=("depth=2",)
    ),
    r"--frozen-statistics trains in evaluation mode, where a detector": dict(
        frozen_statistics=True, drop_path=0.0
    ),
    r"mask_rcnn learns from objects, .* give --objective detect": dict(objective="ce"),
    r"is read with objects, .* segmentation needs classes of pixels": dict(objective="segment"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_runs_that_cannot_be_are_refused(detects, tmp_path, message):
    with pytest.raises(UserError, match=message):
        training.train(with_options(detects(tmp_path), **REFUSED[message]))
    assert not (tmp_path / "last.pt").exists()


def test_data_without_objects_and_missing_packages_are_refused(
    detects, masked, folder, tmp_path, monkeypatch
):
    for dataset, root in (("", folder), ("masks", masked[0])):
        config = with_options(detects(tmp_path), dataset=dataset, data=root, val=root)
        with pytest.raises(UserError, match="is read without objects, which detection needs; give"):
            training.train(config)
    config = with_options(detects(tmp_path), dataset="instances", data=masked[0], val=masked[0])
    with pytest.raises(UserError, match="has masks without objects; give photo scenes"):
        training.train(config)
    monkeypatch.setitem(__import__("sys").modules, "pycocotools", None)
    with pytest.raises(UserError, match=r"needs the package pycocotools; run `pip install"):
        training.train(detects(tmp_path))


def test_a_classifiers_run_begins_the_backbone(micro, detects, tmp_path, monkeypatch):
    kwargs = detects(tmp_path).model.kwargs
    own = tuple(
        w for w in kwargs if w.split("=")[0] not in ("backbone", "decoder_width", "samples")
    )
    with monkeypatch.context() as patch:
        patch.setattr(training, "signal_handler", stopped_after(1))
        training.train(micro(tmp_path / "ce", model_kwargs=own, ema=0.0))
        training.train(detects(tmp_path / "detect", init=tmp_path / "ce", lr=1e-12, ema=0.0))
    before, after = (
        checkpoints.load(tmp_path / run / "last.pt")["model"] for run in ("ce", "detect")
    )
    kept = [name for name in before if f"backbone.{name}" in after]
    assert {n.split(".")[0] for n in before.keys() - set(kept)} == {"head", "norm", "token_head"}
    for name in (name for name in kept if "running" not in name and "batches" not in name):
        assert torch.allclose(before[name], after[f"backbone.{name}"], atol=1e-6), name
    with pytest.raises(UserError, match="holds a detector, which returns boxes and not"):
        open_trained(tmp_path / "detect")


@pytest.mark.parametrize("form", ["safetensors", pytest.param("both", marks=[pytest.mark.slow])])
def test_an_exported_detector_finds_the_same(detects, tmp_path, monkeypatch, form):
    """By timm, whose `pretrained=True` once left random weights, and by ONNX Runtime."""
    monkeypatch.setattr(training, "signal_handler", stopped_after(1))
    training.train(detects(tmp_path / "run"))
    export.main(Export(checkpoint=tmp_path / "run", out=tmp_path / "out", format=form))
    ours = open_trained(tmp_path / "run", others=(MaskRCNN,)).model
    theirs = timm.create_model(f"local-dir:{tmp_path}/out", pretrained=True).eval()
    image = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        [want], [got] = ours(image), theirs(image)
    assert len(want["boxes"])
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert timm.data.resolve_data_config(model=theirs)["input_size"] == [3, 32, 32]
    names = open_trained(tmp_path / "run", others=(MaskRCNN,)).class_names
    assert theirs.pretrained_cfg["label_names"] == names
    if form == "both":
        onnxruntime = pytest.importorskip("onnxruntime")
        graph = onnxruntime.InferenceSession(str(tmp_path / "out/model.onnx"))
        names = [output.name for output in graph.get_outputs()]
        assert names == ["boxes", "labels", "scores", "masks"]
        for name, found in zip(names, graph.run(names, {"image": image.numpy()}), strict=True):
            np.testing.assert_allclose(found, want[name], atol=1e-4)


@pytest.mark.slow
def test_an_export_at_another_size_resamples_the_table_once(detects, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "signal_handler", stopped_after(1))
    training.train(detects(tmp_path / "run"))
    options = dict(checkpoint=tmp_path / "run", out=tmp_path / "out")
    # A detector fills its images up to whole cells of 8 pixels.
    export.main(Export(size=44, **options))
    ours = open_trained(tmp_path / "run", others=(MaskRCNN,)).model
    theirs = timm.create_model(f"local-dir:{tmp_path}/out", pretrained=True).eval()
    assert theirs.backbone.grid_size == 6
    image = torch.randn(1, 3, 44, 44)
    with torch.inference_mode():
        [want], [got] = ours(image), theirs(image)
    assert len(want["boxes"])
    torch.testing.assert_close(got["boxes"], want["boxes"])


def test_an_outputs_difference_is_that_of_its_numbers():
    """Of no object it is 0, and of another number of objects infinite."""
    none, boxes = np.zeros((0, 4), np.float32), np.full((2, 4), 50, np.float32)
    assert export.compare(none, none) == 0
    assert export.compare(boxes, boxes[:1]) == np.inf
    assert np.isclose(export.compare(boxes + 0.5, boxes), 0.01)
    assert np.isnan(export.compare(boxes * np.nan, boxes))


def change(where, value):
    """Return a function that sets one value inside the content of a file."""

    def work(content):
        *path, last = where
        place = content
        for name in path:
            place = place[name]
        place[last] = value
        return content

    return work


SHAPE = ("annotations", 0, "segmentation")
HOSTILE = {
    "text": ("not JSON", r"is damaged \("),
    "a list": (lambda content: [content], "does not hold an object"),
    "no images": (change(("images",), {}), "has no list images"),
    "twice": (change(("images", 1, "id"), 100), "an id of image is there twice"),
    "no id": (change(("categories", 0, "id"), True), "a record of category has no valid id"),
    "no name": (change(("categories", 0, "name"), 7), "a category has no valid name"),
    "same name": (change(("categories", 0, "name"), "blue"), "of different names"),
    "no categories": (change(("categories",), []), "has the category .*|of different names"),
    "huge": (change(("images", 0, "width"), 10**9), "an image has 1000000000 x 48 pixels"),
    "above": (change(("images", 0, "file_name"), "../x.png"), "is not a path below the folder"),
    "absolute": (change(("images", 0, "file_name"), "/etc/passwd"), "is not a path below"),
    "missing": (change(("images", 3, "file_name"), "x.png"), "names x.png, which is not below"),
    "unknown image": (change(("annotations", 0, "image_id"), 3), "is of the image 3, which it"),
    "unknown class": (change(("annotations", 0, "category_id"), 3), "has the category 3, which"),
    "no objects": (change(("annotations",), []), "train2017.json lists no objects; give a file"),
    "no shape": (change(SHAPE, []), r"annotations\[0\] has no segmentation"),
    "a box": (change(SHAPE, [[0, 0, 5, 5]]), "a polygon that is not 3 or more pairs"),
    "odd": (change(SHAPE, [[0, 0, 5, 5, 1, 2, 3]]), "a polygon that is not 3 or more pairs"),
    "words": (change(SHAPE, [["a"] * 6]), "a polygon that is not 3 or more pairs"),
    "short": (change(SHAPE, {"size": [48, 64], "counts": [0, 3]}), "runs that are not those of"),
    "long": (change(SHAPE, {"size": [48, 64], "counts": [0, 10**9]}), "runs that are not those"),
    "letters": (change(SHAPE, {"size": [48, 64], "counts": "zzzz\u00ff"}), "runs that are not"),
    "other size": (change(SHAPE, {"size": [1, 1], "counts": [1]}), "not those of 64 x 48 pixels"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_damaged_files_are_one_sentence(coco, tmp_path, case):
    work, message = HOSTILE[case]
    path = tmp_path / "instances_train2017.json"
    content = json.loads(annotations(coco).read_text())
    path.write_text(work if isinstance(work, str) else json.dumps(work(content)))
    with pytest.raises(UserError, match=message) as caught:
        CocoInstances(coco, path)
    assert "\n" not in str(caught.value)


def test_polygons_far_outside_and_compressed_runs_are_read(coco, tmp_path):
    from pycocotools import mask as coder

    content = json.loads(annotations(coco).read_text())
    far = [[-1e12, -1e12, 1e12, -1e12, 1e12, 1e12, -1e12, 1e12]]
    content["annotations"][0]["segmentation"] = far
    first = content["annotations"][-1]
    own = open_coco(coco)
    row = 100 - first["image_id"]
    H, W = own._sizes[row]
    drawn = np.zeros((H, W), np.uint8, order="F")
    drawn[3:9, 5:30] = 1
    runs = coder.encode(drawn)
    first["segmentation"] = {"size": [H, W], "counts": runs["counts"].decode()}
    path = tmp_path / "instances_train2017.json"
    path.write_text(json.dumps(content))
    data = CocoInstances(coco, path)
    assert data.objects(0)[0]["segmentation"]["size"] == [48, 64]
    assert (coder.decode(data.objects(row)[-1]["segmentation"]) == drawn).all()


def test_an_image_of_another_size_and_other_classes_of_val_are_refused(coco, detects, tmp_path):
    for field, message in (
        ("height", "has .* x 48 pixels, and .* states"),
        ("id", "other classes"),
    ):
        content = json.loads(annotations(coco, "val").read_text())
        if field == "height":
            content["images"][3]["height"] = 50
            content["annotations"] = [a for a in content["annotations"] if a["image_id"] != 97]
        else:
            content["categories"][0]["name"] = "pink"
        path = tmp_path / "instances_val2017.json"
        path.write_text(json.dumps(content))
        config = with_options(detects(tmp_path / field, epochs=1), val=path)
        with pytest.raises(UserError, match=message):
            training.train(config)


def test_a_folder_is_no_validation_set_of_coco(coco, detects, tmp_path):
    """The annotation file of the training set would name its images."""
    with pytest.raises(UserError, match=r"is a folder, and .*; give --val the annotation file"):
        training.train(with_options(detects(tmp_path), val=coco))
    parts = with_options(detects(tmp_path), val=None, val_fraction=0.3, epochs=1)
    assert 0 < training.train(parts)["images"] < 9


def test_views_of_any_kind_move_objects_as_masks(coco):
    """A code is a class of sample_masks, whatever its size: none is lost to 16 bits."""
    codes = open_coco(coco).mask(1)
    view = torch.tensor([[[0.0, -1.0, 1.0], [1.0, 0.0, 0.0]]])
    turned = sample_masks([codes], view, (codes.shape[1], codes.shape[0]))[0]
    assert torch.equal(turned, torch.rot90(codes, 1)) or torch.equal(turned, torch.rot90(codes, -1))
    assert SimpleNamespace(most=int(codes.max())).most >= OBJECTS

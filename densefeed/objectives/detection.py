"""Detection and instance segmentation: Mask R-CNN's losses, and COCO's average precision.

Boxes and masks of a crop are those of what it shows of each object: of the map of codes that the
loader cuts (storage/instances.py). Evaluation is COCO's: whole images, their shorter side resized
to the input's, one at a time; boxes and masks are resized to the stored image.
"""

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from timm.data.transforms import str_to_pil_interp
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.ops import masks_to_boxes

from densefeed.models.mask_rcnn import MaskRCNN
from densefeed.objectives.base import Evaluation, Objective, Place, Setting, StepContext
from densefeed.objectives.segmentation import read_whole, scale_image
from densefeed.pipelines.augment.augmentation import Normalize
from densefeed.pipelines.batch import Batch
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.storage.instances import OBJECTS, import_masks
from densefeed.system.errors import UserError

# N images   K classes   H, W pixels   n objects

# Pixels of an object that a crop must show.
LEAST = 4
# The longer side of an image in an evaluation over the size, at most: 1,333 to 800 pixels.
LONGEST = 1333 / 800
# Numbers of COCO's summary: AP, AP50, AP75.
SHOWN = 3


class BoxMetrics(NamedTuple):
    """Average precision of the images that were evaluated, 0 to 1: means over classes."""

    map_box: float  # of boxes, mean over IoU from 0.5 to 0.95
    map_box_50: float
    map_box_75: float
    map_mask: float  # of masks, likewise
    map_mask_50: float
    map_mask_75: float
    images: int
    nonfinite: int = 0  # of these, images whose outputs are not finite; nothing is found in them

    def named(self, suffix: str) -> dict[str, float]:
        """Return the precisions, with a suffix to their names."""
        return {f"{name}{suffix}": getattr(self, name) for name in self._fields[: 2 * SHOWN]}


class Seen(NamedTuple):
    """An image that was evaluated."""

    index: int
    size: tuple[int, int]  # H, W
    objects: list[dict]  # annotations of COCO, see CocoInstances.objects
    found: list[dict]  # results of COCO, without the image


def find_objects(map_HW: Tensor) -> dict[str, Tensor]:
    """Return the objects of a map of codes as torchvision's targets; waits for the device.

    An object that shows fewer than LEAST pixels is left out.
    """
    codes, counts = map_HW.unique(return_counts=True)
    codes = codes[(codes >= 0) & (counts >= LEAST)]
    masks = map_HW == codes[:, None, None]
    boxes = masks_to_boxes(masks)
    # Its last pixels are inside.
    boxes[:, 2:] += 1
    return {"boxes": boxes, "labels": codes.long() // OBJECTS + 1, "masks": masks.to(torch.uint8)}


def describe_found(output: dict[str, Tensor], scale: Sequence[float], size: tuple) -> list[dict]:
    """Return what a network found in an image as results of COCO.

    Args:
        output: of the network in evaluation mode.
        scale: width and height of the stored image over those that the network saw.
        size: H and W of the stored image.
    """
    coder, found = import_masks(), []
    boxes = output["boxes"].float().cpu() * torch.tensor([*scale, *scale])
    masks = output["masks"].float().cpu()
    numbers = output["labels"].tolist(), output["scores"].tolist()
    # One at a time: a hundred masks of a large photograph would take gigabytes.
    for n, (label, score) in enumerate(zip(*numbers, strict=True)):
        mask = paste_masks_in_image(masks[n : n + 1], boxes[n : n + 1], size)[0, 0] > 0.5
        left, top, right, bottom = boxes[n].tolist()
        found.append(
            {
                "category_id": label - 1,
                "score": score,
                "bbox": [left, top, right - left, bottom - top],
                "segmentation": coder.encode(np.asfortranarray(mask.numpy(), np.uint8)),
            }
        )
    return found


def scale_whole(image: Image.Image, side: int, filter: Image.Resampling) -> Tensor:
    """Resize an image as in an evaluation at `side` pixels, uint8 `[H, W, 3]`."""
    return scale_image(image, min(side, side * LONGEST * min(image.size) / max(image.size)), filter)


def paint_found(found: Sequence[dict], size: tuple[int, int]) -> np.ndarray:
    """Paint what `describe_found` returns as classes of pixels, int64 `[H, W]`, -1 elsewhere.

    Scores are at least a half, and higher ones above.
    """
    coder, map_HW = import_masks(), np.full(size, -1)
    for one in sorted(found, key=lambda one: one["score"]):
        if one["score"] >= 0.5:
            map_HW[coder.decode(one["segmentation"]) > 0] = one["category_id"]
    return map_HW


def average_precision(seen: Sequence[Seen], K: int) -> list[float]:
    """Return COCO's AP, AP50 and AP75 of boxes, then of masks; -1 without any object.

    The images may be in any order.
    """
    import_masks()
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    # Equal scores keep their order, which may not depend on the number of ranks.
    seen = sorted(seen, key=lambda one: one.index)
    objects = [each | {"image_id": one.index} for one in seen for each in one.objects]
    found = [each | {"image_id": one.index} for one in seen for each in one.found]
    truth = COCO()
    truth.dataset = {
        "images": [{"id": one.index, "height": one.size[0], "width": one.size[1]} for one in seen],
        "categories": [{"id": number} for number in range(K)],
        # Id 0 would count as no match.
        "annotations": [each | {"id": n} for n, each in enumerate(objects, start=1)],
    }
    values = []
    # It prints its progress.
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        if not found:
            return [0.0 if objects else -1.0] * (2 * SHOWN)
        results = truth.loadRes(found)
        for kind in ("bbox", "segm"):
            judge = COCOeval(truth, results, kind)
            judge.evaluate()
            judge.accumulate()
            judge.summarize()
            values += judge.stats[:SHOWN].tolist()
    return values


class BoxEvaluation(Evaluation):
    """Average precision of boxes and masks in whole images."""

    rated = "map_box"

    @torch.inference_mode()
    def sum(
        self,
        model: nn.Module,
        loader: ThreadedLoader,
        normalize: Normalize,
        device: torch.device,
        dtype: torch.dtype | None,
        advance: Callable[[int, str], None],
    ) -> Tensor:
        """Gather what all ranks found on rank 0, whose sums hold the precisions of all images."""
        model.eval()
        plan, source = loader.plan, loader.source
        ((side, _),) = plan.shapes()
        rows, filter = plan.rank_rows(0), str_to_pil_interp(plan.crop_interpolation)
        own, own_seen = rows.index[rows.weight > 0].tolist(), []
        # Heads hide numbers that are not finite: boxes with such scores are dropped.
        sound = all(bool(weight.isfinite().all()) for weight in model.parameters())
        nonfinite = 0

        def read(index: int) -> tuple[Tensor, tuple[int, int], list[dict]]:
            image = source.image(index)
            size = image.height, image.width
            return scale_whole(image, side, filter), size, source.objects(index, *size)

        for number, (index, read_one) in enumerate(read_whole(loader, own, read), start=1):
            advance(0, f"evaluating, {number} of {len(own)}")
            if read_one is None:
                continue
            image, (H, W), objects = read_one
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                (output,) = model(normalize(image.to(device)[None]))
            fine = sound and bool(output.pop("finite"))
            nonfinite += not fine
            scale = W / image.shape[1], H / image.shape[0]
            found = describe_found(output, scale, (H, W)) if fine else []
            own_seen.append(Seen(index, (H, W), objects, found))
        seen, first = [own_seen], True
        if dist.is_initialized():
            seen, first = [None] * dist.get_world_size(), dist.get_rank() == 0
            dist.all_gather_object(seen, own_seen)
        seen = [one for part in seen for one in part]
        values = average_precision(seen, loader.num_classes) if first else [0.0] * (2 * SHOWN)
        counts = [float(len(own_seen)), float(nonfinite)]
        return torch.tensor(values + counts, dtype=torch.float64, device=device)

    def mean_sync(self, sums: Tensor) -> BoxMetrics:
        *values, images, nonfinite = sums.tolist()
        if values[0] < 0:
            raise UserError(
                "no image of the validation set that can be read has an object; give a set with "
                "objects, or see the messages above, if there are any"
            )
        return BoxMetrics(*values, images=round(images), nonfinite=round(nonfinite))


class Detection(Objective):
    """`--objective detect`: the sum of Mask R-CNN's losses."""

    name = "detect"
    needs_masks = "instances"
    waits = True
    unused: ClassVar = dict.fromkeys(
        ("smoothing", "ground_truth", "crop_pct"), "--objective ce, relabel or token-label"
    ) | dict.fromkeys(
        ("score_maps", "maps_on_device", "temperature", "geometry", "outside"),
        "--objective ce, relabel or token-label",
    )

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.evaluation = BoxEvaluation()

    def check(self) -> None:
        # Before a training that would end at its first evaluation.
        import_masks()

    def wrap(self, model: nn.Module, num_classes: int, place: Place) -> nn.Module:
        if not isinstance(model, MaskRCNN):
            raise UserError(
                f"{self.setting.model} finds no objects, which {self.flag} trains; give --model "
                "mask_rcnn, and the classifier as --model-kwargs \"backbone='NAME'\""
            )
        return model

    def forward(
        self, network: nn.Module, image: Tensor, batch: Batch, step: StepContext
    ) -> dict[str, Tensor]:
        # Without any object a sample of weight 0 would teach that its image is empty.
        kept = (batch.weight > 0).nonzero()[:, 0]
        if len(kept):
            return network(image[kept], [find_objects(batch.mask[n]) for n in kept.tolist()])
        losses = network(image[:1], [find_objects(torch.full_like(batch.mask[0], -1))])
        return {name: 0 * loss for name, loss in losses.items()}

    def loss(self, output: Any, batch: Batch, step: StepContext) -> Tensor:
        return torch.stack(list(output.values())).sum()

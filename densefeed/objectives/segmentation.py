"""Segmentation: cross entropy of all pixels with hard masks, and with soft maps of a teacher.

Evaluation is OpenMMLab's: whole images, their shorter side resized to the input's, under sliding
windows of the input's size that are two thirds of it apart; logits of windows are averaged,
resized to the mask, and probabilities of several scales are averaged.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from PIL import Image
from timm.data.transforms import str_to_pil_interp
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.models.upernet import PixelLogits, resize
from densefeed.objectives.base import Evaluation, Objective, Setting, StepContext
from densefeed.objectives.losses import sparse_loss
from densefeed.pipelines.augment.augmentation import Normalize
from densefeed.pipelines.batch import Batch
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.masks import SoftMasks
from densefeed.pipelines.shapes import Shape
from densefeed.storage.mask_folder import UNLABELED
from densefeed.system.errors import UserError, install_extra
from densefeed.system.options import Fraction, Numbers, Options
from densefeed.system.prefetch import ordered_map

# N images   K classes   H, W pixels of an image   S side of the input   P pixels

# Distance of sliding windows over their side: 341 of 512 pixels.
STRIDE = 341 / 512
# Weight of the auxiliary head's loss in UperNet.
AUXILIARY = 0.4
# Images that are read ahead of their evaluation, at the least.
AHEAD = 4
# Largest scale of an evaluation, and how many there may be.
MOST_SCALE, MOST_SCALES = 4, 20


@dataclass(frozen=True, kw_only=True)
class SegmentationOptions(Options):
    """Options of --objective segment and segment-soft."""

    # scales of the images of an evaluation, whose probabilities are averaged; 1: the shorter side
    # is --size
    eval_scales: Numbers = (1.0,)
    # share of the soft target where the mask is known too; 1: masks only fill what maps do not
    # cover
    soft_share: Fraction = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        # Written as `not <=`, so that NaN fails too.
        fitting = all(0.1 <= each <= MOST_SCALE for each in self.eval_scales)
        if not 1 <= len(self.eval_scales) <= MOST_SCALES or not fitting:
            raise UserError(
                f"--eval-scales: give up to {MOST_SCALES} numbers from 0.1 to {MOST_SCALE}, as 0.5 "
                "1 1.5"
            )


class MaskMetrics(NamedTuple):
    """Means over classes or labeled pixels of the images that were evaluated."""

    miou: float  # 0 to 1, mean over classes of intersection over union
    macc: float  # 0 to 1, mean over classes of the share of their pixels that are right
    pixels: float  # 0 to 1, share of pixels that are right
    images: int  # number of these images, those without a mask included
    nonfinite: int = 0  # of these, images whose outputs are not finite; their pixels are wrong

    def named(self, suffix: str) -> dict[str, float]:
        """Return the means, with a suffix to their names."""
        return {f"{name}{suffix}": getattr(self, name) for name in ("miou", "macc", "pixels")}


def import_metrics() -> ModuleType:
    """Import torchmetrics' functional metrics of classification; UserError if it is missing."""
    # It takes a second, which no other training should wait for.
    try:
        from torchmetrics.functional import classification
    except ImportError as error:
        raise UserError(
            f"segmentation needs the package torchmetrics; {install_extra('segment')}"
        ) from error
    return classification


def count_pairs(predicted: Tensor, mask: Tensor, K: int) -> Tensor:
    """Count the pixels of each pair (class of the mask, predicted class), int64 `[K, K]`.

    The counts are torchmetrics' confusion matrix. Unlabeled pixels do not count.
    """
    return import_metrics().multiclass_confusion_matrix(
        predicted, mask, K, ignore_index=UNLABELED, validate_args=False
    )


def class_iou(pairs: Tensor) -> Tensor:
    """Return the intersection over union of each class, `[K]`; NaN for one that is nowhere."""
    right, of_mask, predicted = pairs.diagonal(), pairs.sum(1), pairs.sum(0)
    return right / (of_mask + predicted - right)


def mean_pairs(pairs: Tensor) -> tuple[float, float, float]:
    """Return mean IoU, mean accuracy and share of right pixels from `count_pairs`.

    A class that is neither in a mask nor predicted does not count in the mean IoU, one that is in
    no mask not in the mean accuracy.
    """
    right, of_mask = pairs.diagonal(), pairs.sum(1)
    accuracy = (right / of_mask).nanmean()
    shares = class_iou(pairs).nanmean(), accuracy, right.sum() / of_mask.sum()
    iou, accuracy, pixels = (share.item() for share in shares)
    return iou, accuracy, pixels


def place_windows(extent: int, side: int) -> list[int]:
    """Return the first pixels of windows of `side` that cover `extent` pixels."""
    stride = max(1, int(side * STRIDE))
    count = max(0, -(-(extent - side) // stride)) + 1
    return [max(0, min(number * stride, extent - side)) for number in range(count)]


def slide(
    model: nn.Module, image_HW3: Tensor, normalize: Normalize, side: int, most: int
) -> Tensor:
    """Return the mean logits of sliding windows, float32 `[K, H, W]`.

    Args:
        image_HW3: uint8 `[H, W, 3]`. A side below the windows' is filled with the mean color, whose
            logits are dropped.
        side: of the windows, pixels.
        most: windows of a forward pass.
    """
    H, W = image_HW3.shape[:2]
    image = normalize(image_HW3[None])
    image = F.pad(image, (0, max(0, side - W), 0, max(0, side - H)))
    tops, lefts = (place_windows(extent, side) for extent in image.shape[2:])
    places = [(top, left) for top in tops for left in lefts]
    total, count = None, image.new_zeros(image.shape[2:])
    for first in range(0, len(places), most):
        part = places[first : first + most]
        cut = torch.cat([image[:, :, y : y + side, x : x + side] for y, x in part])
        for (y, x), logits in zip(part, model(cut).float(), strict=True):
            if total is None:
                total = logits.new_zeros(len(logits), *image.shape[2:])
            total[:, y : y + side, x : x + side] += logits
            count[y : y + side, x : x + side] += 1
    return (total / count)[:, :H, :W]


def sum_scales(
    model: nn.Module,
    images: Sequence[Tensor],
    normalize: Normalize,
    side: int,
    most: int,
    size: Shape,
) -> Tensor:
    """Return the sum of the probabilities of an image at several scales, float32 `[K, *size]`.

    The other arguments are those of `slide`.
    """
    total = 0
    for image in images:
        logits = resize(slide(model, image, normalize, side, most)[None], size)[0]
        total = total + logits.softmax(0)
    return total


def scale_image(image: Image.Image, shorter: float, filter: Image.Resampling) -> Tensor:
    """Resize an image to a shorter side of `shorter` pixels, uint8 `[H, W, 3]`."""
    factor = shorter / min(image.size)
    size = [max(1, round(extent * factor)) for extent in image.size]
    return torch.from_numpy(np.array(image.resize(size, filter)))


class MaskEvaluation(Evaluation):
    """Mean IoU of whole images under sliding windows."""

    rated = "miou"

    def __init__(self, scales: tuple[float, ...]) -> None:
        self.scales = scales

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
        model.eval()
        plan, K = loader.plan, loader.num_classes
        ((side, _),) = plan.shapes()
        rows = plan.rank_rows(0)
        own = rows.index[rows.weight > 0].tolist()
        # Pairs, images and images whose outputs are not finite.
        sums = torch.zeros(K * K + 2, dtype=torch.float64, device=device)
        for number, read in enumerate(read_images(loader, own, side, self.scales), start=1):
            advance(0, f"evaluating, {number} of {len(own)}")
            if read is None:
                continue
            images, mask = read
            sums[-2] += 1
            if not images:
                continue
            mask, images = mask.to(device), [image.to(device) for image in images]
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                sizes = side, len(plan.rows), tuple(mask.shape)
                probability = sum_scales(model, images, normalize, *sizes)
            finite = probability.isfinite().all()
            best = probability.argmax(0)
            # NaN ranks first: every pixel becomes one of another class than its own.
            best = torch.where(finite, best, (mask + 1) % K)
            sums[:-2] += count_pairs(best, mask, K).flatten()
            sums[-1] += ~finite
        return sums

    def mean_sync(self, sums: Tensor) -> MaskMetrics:
        *pairs, images, nonfinite = sums.tolist()
        if not sum(pairs):
            raise UserError(
                "no image of the validation set has a mask with labeled pixels that can be read; "
                "give a set with masks, or see the messages above, if there are any"
            )
        return MaskMetrics(
            *mean_pairs(square(pairs)), images=round(images), nonfinite=round(nonfinite)
        )

    def iou_sync(self, sums: Tensor) -> list[float]:
        """Return the intersection over union of each class; NaN for one that is nowhere."""
        return class_iou(square(sums.tolist()[:-2])).tolist()


def square(pairs: list[float]) -> Tensor:
    """Return a list of the pairs of K classes as a table, float64 `[K, K]`."""
    K = round(len(pairs) ** 0.5)
    return torch.tensor(pairs, dtype=torch.float64).view(K, K)


def read_images(
    loader: ThreadedLoader, ids: list[int], side: int, scales: tuple[float, ...]
) -> Iterator[tuple[list[Tensor], Tensor] | None]:
    """Yield the images `ids` at all scales, uint8 `[H, W, 3]`, and their masks, int64 `[H, W]`.

    None for one that is skipped; no images for one without a mask.
    """
    source, filter = loader.source, str_to_pil_interp(loader.plan.crop_interpolation)

    def read(index: int) -> tuple[list[Tensor], Tensor]:
        image = source.image(index)
        mask = source.mask(index, image.height, image.width)
        used = scales if mask.numel() else ()
        return [scale_image(image, scale * side, filter) for scale in used], mask

    for _, found in read_whole(loader, ids, read):
        yield found


def read_whole(
    loader: ThreadedLoader, ids: list[int], read: Callable[[int], Any]
) -> Iterator[tuple[int, Any]]:
    """Yield `(index, read(index))` of whole images, read ahead on threads; None if it is skipped.

    UserError for an image that cannot be read, unless such samples are skipped.
    """

    def try_read(index: int) -> Any:
        try:
            return read(index)
        except (UserError, OSError) as error:
            return error

    ahead = max(AHEAD, loader.threads)
    with ThreadPoolExecutor(loader.threads) as pool:
        for index, found in zip(ids, ordered_map(try_read, ids, pool, ahead), strict=True):
            if isinstance(found, Exception):
                loader.report(index, found)
                found = None
            yield index, found


def hard_loss(logits_NKHW: Tensor, mask_NHW: Tensor) -> Tensor:
    """Return the mean cross entropy of labeled pixels, float32 `[]`; 0 without any."""
    total = F.cross_entropy(
        logits_NKHW.float(), mask_NHW.long(), ignore_index=UNLABELED, reduction="sum"
    )
    return total / (mask_NHW != UNLABELED).sum().clamp(min=1)


# A compiler would unroll its loops over stripes of pixels.
soft_loss = torch.compiler.disable(sparse_loss)


class Segmentation(Objective):
    """`--objective segment`: hard masks; the loss is the mean over labeled pixels."""

    name = "segment"
    needs_masks = True
    own, section = SegmentationOptions, "segmentation"
    unused: ClassVar = dict.fromkeys(
        ("smoothing", "ground_truth", "crop_pct"), "--objective ce, relabel or token-label"
    ) | dict.fromkeys(
        ("score_maps", "maps_on_device", "temperature", "geometry", "outside", "soft_share"),
        "--objective segment-soft",
    )

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.evaluation = MaskEvaluation(self.options.eval_scales)

    def check(self) -> None:
        # Before a training that would end at its first evaluation.
        import_metrics()

    def loss(self, output: PixelLogits | Tensor, batch: Batch, step: StepContext) -> Tensor:
        # A network of one's own, or one in evaluation mode.
        output = PixelLogits(output, None) if isinstance(output, Tensor) else output
        self.check_logits(output, tuple(batch.image.shape[2:]))
        masks = self.targets(batch, step)
        measure = hard_loss if isinstance(masks, Tensor) else soft_loss
        loss = measure(output.logits, masks)
        if output.auxiliary is None:
            return loss
        return loss + AUXILIARY * measure(output.auxiliary, masks)

    def targets(self, batch: Batch, step: StepContext) -> Tensor | SoftMasks:
        """Return the targets of all pixels; samples of weight 0 have none."""
        return batch.mask.masked_fill(batch.weight[:, None, None] == 0, UNLABELED)

    def check_logits(self, output: Any, size: Shape = (0, 0)) -> None:
        shape = tuple(output.logits.shape) if isinstance(output, PixelLogits) else ()
        if shape[2:] != size:
            raise UserError(
                f"{self.setting.model} returns no logits of the pixels of its input, which "
                f"{self.flag} needs; give --model upernet, and the classifier as --model-kwargs "
                "\"backbone='NAME'\""
            )


class SoftSegmentation(Segmentation):
    """`--objective segment-soft`: soft maps of a teacher, mixed with the hard masks there are."""

    name = "segment-soft"
    needs_score_maps = True
    unused: ClassVar = dict.fromkeys(
        ("smoothing", "ground_truth", "crop_pct"), "--objective ce, relabel or token-label"
    )

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.rules = replace(setting.labels, smoothing=0.0)

    def targets(self, batch: Batch, step: StepContext) -> SoftMasks:
        bare = batch._replace(image=batch.image[:, :0], mask=None)
        soft = SoftMasks(bare, step.score_maps, tuple(batch.image.shape[2:]), self.rules)
        return soft.mix(super().targets(batch, step), self.options.soft_share)

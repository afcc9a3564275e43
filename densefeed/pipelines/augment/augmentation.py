"""Augmentation of batches on the device: RandAugment or color jitter, normalization, erasing.

The order is timm's: crop, resize and flip (the loader), RandAugment or color jitter on bytes,
normalize, erase. With `augment_before_crop` RandAugment comes first instead (before_crop.py). The
operations are chosen on the host (choices.py); the device applies each of them only to the samples
that it was chosen for (operations.py, on a GPU fused.py), so the cost is that of the applied
operations and there is no host sync.

Labels follow: rotations, shears and translations of a sample are composed into one map, the image
is resampled once, and the sample's View becomes the old one after that map. Where the new View
reaches beyond `Batch.shown`, the crop, the image has the fill color. Resampling once deviates from
timm: where a sample of three layers or more has a photometric operation between two geometric
ones, it acts before both. With two layers the order is exactly timm's, but two geometric operations
blur once instead of twice, and the second can bring back pixels that the first moved out of view.
A shift with a black border is not composed, but done before all operations: it is exactly timm's,
and where a geometric operation shows fill from beyond the shifted crop, the label is that of the
image.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from densefeed.pipelines.augment import fused
from densefeed.pipelines.augment.before_crop import WholeImages
from densefeed.pipelines.augment.choices import AugmentPlan, Chooser, noise_length
from densefeed.pipelines.augment.groups import apply_group, apply_rows
from densefeed.pipelines.augment.settings import Augment
from densefeed.pipelines.augment.warp import warp_images
from densefeed.pipelines.batch import Batch, to_device
from densefeed.pipelines.masks import sample_masks
from densefeed.pipelines.philox import philox
from densefeed.pipelines.plan import NOISE, EpochPlan
from densefeed.system.devices import send


class Normalize(torch.nn.Module):
    """Normalize uint8 `[N, H, W, 3]` to float `[N, 3, H, W]` in channels_last memory.

    (x / 255 - mean) / std, as one multiply-add.
    """

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        mean, std = (torch.tensor(color, dtype=torch.float32) for color in (mean, std))
        scale = 1 / (255 * std)
        self.register_buffer("scale", scale)
        self.register_buffer("shift", -mean * 255 * scale)

    def forward(self, image_NHWC: Tensor) -> Tensor:
        # Rows of 3 W numbers: an innermost axis of three costs a CPU ten times as much.
        byte_NHL, width = image_NHWC.flatten(2), image_NHWC.shape[2]
        scale_L, shift_L = self.scale.repeat(width), self.shift.repeat(width)
        out_NHL = torch.empty_like(byte_NHL, dtype=torch.float32)
        # On a CPU one image at a time, so that the floats to multiply are still in its cache.
        pairs = zip(byte_NHL, out_NHL, strict=True) if byte_NHL.is_cpu else [(byte_NHL, out_NHL)]
        for byte, out in pairs:
            torch.addcmul(shift_L, byte.float(), scale_L, out=out)
        # NHWC memory, permuted to NCHW, is channels_last: nothing is copied.
        return out_NHL.view_as(image_NHWC).permute(0, 3, 1, 2)

    def pixels(self, image_NCHW: Tensor) -> Tensor:
        """Invert the normalization for display: uint8 `[N, H, W, 3]`.

        These are the very bytes that were normalized; erased pixels are clipped.
        """
        value_NHWC = (image_NCHW.permute(0, 2, 3, 1) - self.shift) / self.scale
        return value_NHWC.round().clamp(0, 255).to(torch.uint8)


class Augmentation(torch.nn.Module):
    """Augment and normalize training batches.

    Call `choose` on the host, then the module with the batch on the device.

    Args:
        plan: its draws decide; the result is equal for every batch size, rank and device.
        augment: the operations.
        mean, std: of the network's input; the mean is also the fill color where a warp reaches
            beyond the crop, as in timm.
        dtype: of the augmented images.
        warps_maps: for `whole`, see WholeImages.
        channels: of the augmented images; a fourth is 0, for models/kernels/four_channels.py.

    Attributes:
        whole: what augments whole images before they are cropped, with `augment_before_crop`; None
            otherwise. The loader gets it as `prepare`.
    """

    def __init__(
        self,
        plan: EpochPlan,
        augment: Augment,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        dtype: torch.dtype = torch.float32,
        warps_maps: bool = False,
        channels: Literal[3, 4] = 3,
    ) -> None:
        super().__init__()
        self.dtype, self.channels, self.whole = dtype, channels, None
        self.normalize = Normalize(mean, std)
        # The rounding of timm's transforms_factory.py.
        self.fill = tuple(min(255, round(255 * value)) for value in mean)
        noise = make_noise_table(plan) if augment.erase_probability else torch.empty(0)
        # Not in checkpoints: the seed determines it.
        self.register_buffer("noise", noise, persistent=False)
        if augment.augment_before_crop and augment.rand_augment:
            self.whole = WholeImages(Chooser(plan, augment), self.fill, warps_maps)
            augment = replace(augment, rand_augment="")
        self.shears = augment.shears
        self.choose = Chooser(plan, augment).choose

    def forward(self, batch: Batch, choice: AugmentPlan) -> Batch:
        """Return the augmented and normalized batch, without a host sync.

        Its `image` is `dtype [N, channels, H, W]` in channels_last memory, its `view` that after
        the warp.
        `choice` is that of this batch, on the host:
        `choose(batch.epoch, batch.index, batch.repeat, H, W)`. The batch itself is not modified.
        """
        image, view = (self._fused if fused.can_run(batch.image) else self._plain)(batch, choice)
        aligned = batch.axis_aligned and not self.shears
        mask = warp_masks(batch, choice)
        return batch._replace(image=image, view=view, mask=mask, axis_aligned=aligned)

    def crops(self, batch: Batch, choice: AugmentPlan) -> Tensor:
        """Return the augmented crops before normalization and erasing: uint8 `[N, H, W, 3]`."""
        if fused.can_run(batch.image):
            plan = fused.pack(choice, len(batch.image), batch.image.device)
            return fused.augment_crops(batch.image, plan, choice, self.fill)
        return self._operate(batch.image, choice.to(batch.image.device))

    def _fused(self, batch: Batch, choice: AugmentPlan) -> tuple[Tensor, Tensor]:
        """Compute image and View with the kernels of fused.py."""
        plan = fused.pack(choice, len(batch.image), batch.image.device)
        image = fused.augment_crops(batch.image, plan, choice, self.fill)
        colors = self.normalize.scale, self.normalize.shift, self.noise
        image = fused.normalize_and_erase(image, plan, *colors, self.dtype, self.channels)
        return image, fused.compose_views(batch.view, plan)

    def _plain(self, batch: Batch, choice: AugmentPlan) -> tuple[Tensor, Tensor]:
        """Compute image and View in plain PyTorch."""
        choice = choice.to(batch.image.device)
        image = self.normalize(self._operate(batch.image, choice))
        self._erase(image, choice)
        image = image.to(self.dtype)
        if self.channels > 3:
            # The padding keeps channels_last memory.
            image = pad(image, (0, 0, 0, 0, 0, self.channels - 3))
        return image, compose_views(batch, choice)

    def _operate(self, image: Tensor, choice: AugmentPlan) -> Tensor:
        """Do the operations and the warp, chosen on the images' device, in plain PyTorch."""
        if len(choice.row) + len(choice.warp_row):
            # The operations work in place, and the caller's batch must not change.
            image = image.clone(memory_format=torch.contiguous_format)
        for group in choice.before:
            apply_group(image, group, choice)
        if len(choice.warp_row):
            warp = partial(warp_images, fill=self.fill)
            apply_rows(image, choice.warp_row, warp, choice.pixel_matrix, choice.cubic)
        for group in choice.after:
            apply_group(image, group, choice)
        return image

    def _erase(self, image_NCHW: Tensor, choice: AugmentPlan) -> None:
        """Erase the boxes, in place."""
        for sample, top, left, height, width, at in choice.boxes:
            hole = image_NCHW[sample, :, top : top + height, left : left + width]
            noise = self.noise[at : at + hole.numel()]
            hole.copy_(noise.view(height, width, 3).permute(2, 0, 1))


def compose_views(batch: Batch, choice: AugmentPlan) -> Tensor:
    """Return the batch's Views after the warp: float32 `[N, 2, 3]`.

    Those of samples that are not warped stay bit for bit.
    """
    if not len(choice.warp_row):
        return batch.view
    view, matrix = batch.view.index_select(0, choice.warp_row), choice.matrix
    # Sums of products instead of a matmul, which would run in bfloat16 under autocast and with ten
    # bits under TF32.
    composed = (view[:, :, :2, None] * matrix[:, None]).sum(2)
    composed[:, :, 2] += view[:, :, 2]
    return batch.view.index_copy(0, choice.warp_row, composed)


def warp_masks(batch: Batch, choice: AugmentPlan) -> Tensor | None:
    """Return the batch's hard masks after the warp; pixels that show fill are unlabeled."""
    if batch.mask is None or not len(choice.warp_row):
        return batch.mask
    row, matrix = (send(part, batch.mask.device) for part in (choice.warp_row, choice.matrix))
    mask = batch.mask.index_select(0, row)
    warped = sample_masks(mask, matrix, tuple(mask.shape[1:])).to(mask.dtype)
    return batch.mask.index_copy(0, row, warped)


def augment_batches(
    batches: Iterator[Batch], augmentation: Augmentation, device: torch.device
) -> Iterator[Batch]:
    """Yield the batches on `device`, augmented: on a GPU on the stream of the copies.

    The operations are chosen on the host, before the batch is copied.
    """
    choices = deque()

    def choose() -> Iterator[Batch]:
        for batch in batches:
            size = batch.image.shape[1:3]
            choices.append(augmentation.choose(batch.epoch, batch.index, batch.repeat, *size))
            yield batch

    yield from to_device(choose(), device, lambda batch: augmentation(batch, choices.popleft()))


def make_noise_table(plan: EpochPlan) -> Tensor:
    """Draw the standard normals that erased boxes are filled from: float32 `[noise_length]`.

    They depend on the seed alone; each box reads them from an offset drawn for it. With a table
    instead of a generator on the device, a sample's noise is the same on every device, rank and
    batch size.
    """
    words = philox(plan.seed, (0, np.arange(-(-noise_length(plan) // 4)), NOISE, 0))
    # Half a step is added because the logarithm of 0 is infinite.
    uniform = (np.stack(words) + 0.5) / 2.0**32
    radius, angle = np.sqrt(-2 * np.log(uniform[:2])), 2 * np.pi * uniform[2:]
    normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return torch.from_numpy(normal.T.ravel()[: noise_length(plan)].astype(np.float32))

"""What happens to a batch of pixels on the device: RandAugment or color jitter, normalization,
random erasing.

The order is timm's: crop, resize and flip (the loader), RandAugment or color jitter on bytes,
normalize, erase. What to do is chosen on the host (choices.py); the device applies each operation
to the samples that were chosen for it (operations.py), so the cost is of what is applied and
nothing waits for the device.

Labels follow: rotations, shears and translations of a sample are composed into one map, the image
is resampled once, and the sample's View becomes the old one after that map. What the View then
reaches beyond `Batch.shown`, the crop, is fill color in the image. Resampling once has a price in
faithfulness: where a sample of three layers or more has a photometric operation between two
geometric ones, it acts before both. With two layers the order is timm's exactly, but two geometric
operations blur once instead of twice, and what the first pushed out of sight the second can bring
back.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from densefeed.pipelines.augment.choices import AugmentPlan, Chooser, Group, noise_length
from densefeed.pipelines.augment.operations import OPERATIONS, apply_tables
from densefeed.pipelines.augment.settings import Augment
from densefeed.pipelines.augment.warp import warped
from densefeed.pipelines.batch import Batch, to_device
from densefeed.pipelines.plan import NOISE, EpochPlan, philox


class Normalize(torch.nn.Module):
    """uint8 `[N, H, W, 3]` to float `[N, 3, H, W]` in channels_last memory: (x / 255 - mean) / std,
    one multiply-add.
    """

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        scale, mean = 1 / (255 * torch.tensor(std)), torch.tensor(mean)
        self.register_buffer("scale", scale)
        self.register_buffer("shift", -mean * 255 * scale)

    def forward(self, image_NHWC: Tensor) -> Tensor:
        # Rows of 3 W numbers: an innermost axis of three costs a CPU ten times as much.
        byte_NHL, width = image_NHWC.flatten(2), image_NHWC.shape[2]
        scale_L, shift_L = self.scale.repeat(width), self.shift.repeat(width)
        out_NHL = torch.empty_like(byte_NHL, dtype=torch.float32)
        # On a CPU one by one, so that what is multiplied is still in its cache.
        for byte, out in (
            [(byte_NHL, out_NHL)] if not byte_NHL.is_cpu else zip(byte_NHL, out_NHL, strict=True)
        ):
            torch.addcmul(shift_L, byte.float(), scale_L, out=out)
        return out_NHL.view_as(image_NHWC).permute(0, 3, 1, 2)  # permuting NHWC is channels_last

    def pixels(self, image_NCHW: Tensor) -> Tensor:
        """Back to uint8 `[N, H, W, 3]`, to look at: the very bytes that were normalized; what was
        erased is clipped.
        """
        value_NHWC = (image_NCHW.permute(0, 2, 3, 1) - self.shift) / self.scale
        return value_NHWC.round().clamp(0, 255).to(torch.uint8)


class Augmentation(torch.nn.Module):
    """Batches as the network sees them in training. `choose` on the host, then call it with the
    batch on the device.

    Args:
        plan: whose draws decide; equal for every batch size, rank and device.
        augment: what is done.
        mean, std: of the network's input; the mean is also what shows where a warp reaches beyond
            the crop, as in timm.
    """

    def __init__(
        self, plan: EpochPlan, augment: Augment, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> None:
        super().__init__()
        self.normalize = Normalize(mean, std)
        self.fill = tuple(min(255, round(255 * value)) for value in mean)
        self.mode = augment.erase_mode
        noisy = augment.erase_probability and self.mode != "const"
        self.register_buffer(
            "noise", noise_table(plan) if noisy else torch.empty(0), persistent=False
        )
        self.shears = augment.shears
        self.choose = Chooser(plan, augment).choose

    def forward(self, batch: Batch, choice: AugmentPlan) -> Batch:
        """The batch with `image` float32 `[N, 3, H, W]` in channels_last memory and `view` after
        the warp; no wait.

        `choice` is that of this batch: `choose(epoch, batch.index, batch.repeat, H, W)`. The batch
        is left as it is.
        """
        choice = choice.to(batch.image.device)
        return batch._replace(
            image=self._erased(self.normalize(self.crops(batch, choice)), choice),
            view=views(batch, choice),
            axis_aligned=batch.axis_aligned and not self.shears,
        )

    def crops(self, batch: Batch, choice: AugmentPlan) -> Tensor:
        """The augmented crops before normalization and erasing: uint8 `[N, H, W, 3]`; `choice` on
        the batch's device.
        """
        image = batch.image
        if len(choice.row):
            image = image.clone(memory_format=torch.contiguous_format)
        for group in choice.before:
            apply(image, group, choice)
        if choice.warped:
            change(
                image,
                choice.warp_row,
                partial(warped, fill=self.fill),
                choice.pixel_matrix,
                choice.cubic,
            )
        for group in choice.after:
            apply(image, group, choice)
        return image

    def _erased(self, image_NCHW: Tensor, choice: AugmentPlan) -> Tensor:
        """Erases the boxes, in place."""
        for sample, top, left, height, width, at in choice.boxes:
            hole = image_NCHW[sample, :, top : top + height, left : left + width]
            if self.mode == "const":
                hole.zero_()
            elif self.mode == "rand":
                hole.copy_(self.noise[at : at + 3].view(3, 1, 1).expand_as(hole))
            else:
                hole.copy_(
                    self.noise[at : at + hole.numel()].view(height, width, 3).permute(2, 0, 1)
                )
        return image_NCHW


def apply(image_NHWC: Tensor, group: Group, choice: AugmentPlan) -> None:
    """One operation on the samples of its group, in place."""
    part = slice(group.start, group.stop)
    if group.name == "Table":
        change(image_NHWC, choice.row[part], apply_tables, choice.table[part][:, None])
    else:
        change(image_NHWC, choice.row[part], OPERATIONS[group.name], choice.number[part])


def change(
    image_NHWC: Tensor, row_M: Tensor, work: Callable[..., Tensor], *arguments: Tensor
) -> None:
    """Replaces the samples `row_M` by what `work` makes of them and of its arguments `[M, ...]`.

    On a GPU at once. On a CPU one by one: the floats of one crop of 224 px fit its second cache,
    those of two do not.
    """
    if not image_NHWC.is_cpu:
        image_NHWC.index_copy_(0, row_M, work(image_NHWC.index_select(0, row_M), *arguments))
        return
    for at, row in enumerate(row_M.tolist()):
        sample = image_NHWC[row : row + 1]
        sample.copy_(work(sample, *(argument[at : at + 1] for argument in arguments)))


def views(batch: Batch, choice: AugmentPlan) -> Tensor:
    """The batch's Views after the warp: float32 `[N, 2, 3]`; those of samples that are not warped
    stay bit for bit.
    """
    if not choice.warped:
        return batch.view
    view, matrix = batch.view.index_select(0, choice.warp_row), choice.matrix
    # Sums of products and no matmul: under autocast that would be bfloat16, under TF32 ten bits.
    composed = (view[:, :, :2, None] * matrix[:, None]).sum(2)
    composed[:, :, 2] += view[:, :, 2]
    return batch.view.index_copy(0, choice.warp_row, composed)


def augment_batches(
    batches: Iterator[Batch], augmentation: Augmentation, epoch: int, device: torch.device
) -> Iterator[Batch]:
    """The epoch's batches on `device`, augmented; each is chosen for on the host before it is
    copied, a step ahead.
    """
    choices = deque()

    def chosen() -> Iterator[Batch]:
        for batch in batches:
            choices.append(
                augmentation.choose(epoch, batch.index, batch.repeat, *batch.image.shape[1:3])
            )
            yield batch

    for batch in to_device(chosen(), device):
        yield augmentation(batch, choices.popleft())


def noise_table(plan: EpochPlan) -> Tensor:
    """Standard normals that erased boxes are filled from, read from a place drawn for each box:
    float32, from the seed alone.

    A table instead of a generator on the device makes a sample's noise the same on every device,
    rank and batch size.
    """
    words = philox(plan.seed, (0, np.arange(-(-noise_length(plan) // 4)), NOISE, 0))
    uniform = (np.stack(words) + 0.5) / 2.0**32  # never 0
    radius, angle = np.sqrt(-2 * np.log(uniform[:2])), 2 * np.pi * uniform[2:]
    normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return torch.from_numpy(normal.T.ravel()[: noise_length(plan)].astype(np.float32))

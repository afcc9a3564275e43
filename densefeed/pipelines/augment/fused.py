"""Augmentation on a GPU in few kernels: a batch of LV-ViT's recipes is seven launches.

operations.py and warp.py launch several kernels for each operation, some 600 for a batch. Here one
kernel does a whole round of operations, at most one for each sample, and one each the warp,
normalization with erasing, and the Views. The kernels (fused_triton.py) read the choice by sample;
`pack` lays it out so, and it is copied to the device at once.

Blur and registered operations have no kernel. They run as before, after the others of their round.
"""

from itertools import chain, groupby
from operator import attrgetter
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from densefeed.pipelines.augment.choices import AugmentPlan, Group
from densefeed.pipelines.augment.groups import apply_group
from densefeed.pipelines.augment.settings import CODES
from densefeed.pipelines.augment.warp import ALMOST
from densefeed.system.devices import has_triton, send

# N samples   H, W pixels   R operations of a batch   M warped samples

# Operations whose result for a byte depends on it and numbers of the image: one table each.
BY_TABLE = ("Table", "AutoContrast", "Equalize", "Contrast")
WITH_KERNEL = (*BY_TABLE, "Color", "Sharpness", "Hue")


class Round(NamedTuple):
    """Operations of a batch, at most one for each sample."""

    entry: Tensor  # int32 [N], which of the plan's operations; -1: none that has a kernel
    by_table: bool  # whether one of them is by table
    others: tuple[Group, ...]  # those without a kernel


class SamplePlan(NamedTuple):
    """An AugmentPlan by sample, on the device; tensors may have zeros at their end."""

    before: tuple[Round, ...]
    after: tuple[Round, ...]
    code: Tensor  # int32 [R], settings.CODES
    argument: Tensor  # float32 [R]
    table: Tensor  # uint8 [256 R]
    warp: Tensor  # int32 [N], which of the matrices; -1: not warped
    pixel_matrix: Tensor  # float32 [6 M], output to source in pixels of the crop
    matrix: Tensor  # float32 [6 M], the same map in normalized coordinates
    cubic: Tensor  # float32 [M], 1 for bicubic, 0 for bilinear
    box: Tensor  # int32 [5 N]: top, left, height, width (0: no box), offset in the noise table


def can_run(image: Tensor) -> bool:
    """Return whether the kernels can run where the images are."""
    return image.is_cuda and has_triton()


def pack(choice: AugmentPlan, samples: int, device: torch.device) -> SamplePlan:
    """Lay out a choice on the host for a batch of `samples`; one copy, without waiting for a GPU.

    Everything has four bytes or is a multiple of them, so it is copied as int32.
    """
    row_R, row_M = choice.row.numpy(), choice.warp_row.numpy()
    code_R, warp_N = np.zeros(len(row_R), np.int32), np.full(samples, -1, np.int32)
    warp_N[row_M] = np.arange(len(row_M))
    halves, entries = [split_rounds(choice.before), split_rounds(choice.after)], []
    for groups in chain(*halves):
        entries.append(np.full(samples, -1, np.int32))
        for name, start, stop, _ in groups:
            if name in WITH_KERNEL:
                entries[-1][row_R[start:stop]] = np.arange(start, stop)
                # The operations of a group named Table all do the same here: look up their tables.
                code_R[start:stop] = CODES.get(name, 0)
    box_B6 = np.array(choice.boxes, np.int32).reshape(-1, 6)
    box_N5 = np.zeros((samples, 5), np.int32)
    box_N5[box_B6[:, 0]] = box_B6[:, 1:]
    kept = choice.argument, choice.pixel_matrix, choice.matrix, choice.cubic, choice.table
    kept = (part.numpy().ravel().view(np.int32) for part in kept)
    parts = [code_R, warp_N, box_N5.ravel(), *entries, *kept]
    # Triton compiles another variant of a kernel where a pointer is not a multiple of 16 bytes.
    parts = [np.pad(part, (0, -len(part) % 4)) for part in parts]
    words = torch.from_numpy(np.concatenate(parts))
    words = send(words, device).split([len(part) for part in parts])
    code, warp, box, *entries = words[:-5]
    numbers, table = [part.view(torch.float32) for part in words[-5:-1]], words[-1]
    argument, pixel_matrix, matrix, cubic = numbers
    left = iter(entries)
    before, after = (tuple(make_round(next(left), groups) for groups in half) for half in halves)
    table = table.view(torch.uint8)
    return SamplePlan(before, after, code, argument, table, warp, pixel_matrix, matrix, cubic, box)


def split_rounds(groups: tuple[Group, ...]) -> list[tuple[Group, ...]]:
    """Return the groups of each round, in order."""
    return [tuple(part) for _, part in groupby(groups, attrgetter("round"))]


def make_round(entry: Tensor, groups: tuple[Group, ...]) -> Round:
    """Make a round of its groups and of its entries on the device."""
    others = tuple(group for group in groups if group.name not in WITH_KERNEL)
    return Round(entry, any(group.name in BY_TABLE for group in groups), others)


def augment_crops(
    image_NHWC: Tensor, plan: SamplePlan, choice: AugmentPlan, fill: tuple[int, int, int]
) -> Tensor:
    """Do the operations and the warp: uint8 `[N, H, W, 3]`; the images given do not change.

    `plan` is that of `choice`. `fill` is the color where a warp reaches beyond the crop.
    """
    image_NHWC = image_NHWC.contiguous()
    if any(part.others for part in (*plan.before, *plan.after)):
        choice = choice.to(image_NHWC.device)
    for part in plan.before:
        image_NHWC = apply_round(image_NHWC, part, plan, choice)
    if len(choice.warp_row):
        image_NHWC = warp_images(image_NHWC, plan, fill)
    for part in plan.after:
        image_NHWC = apply_round(image_NHWC, part, plan, choice)
    return image_NHWC


def apply_round(image_NHWC: Tensor, part: Round, plan: SamplePlan, choice: AugmentPlan) -> Tensor:
    """Apply the operations of a round: new images, uint8 `[N, H, W, 3]`."""
    N, H, W, _ = image_NHWC.shape
    kernels, out_NHWC = load_kernels(), torch.empty_like(image_NHWC)
    tables = image_NHWC.new_empty(N * 768 if part.by_table else 0)
    given = part.entry, plan.code, plan.argument
    if part.by_table:
        block = kernels.COUNT_BLOCK
        data = image_NHWC, *given, plan.table, tables, H * W
        kernels.launch(kernels.table_kernel, (N, 3), *data, PIXELS=block)
    grid = N, -(-H * W // kernels.BLOCK)
    data = image_NHWC, out_NHWC, *given, tables, H, W
    kernels.launch(kernels.photometric_kernel, grid, *data, PIXELS=kernels.BLOCK)
    for group in part.others:
        apply_group(out_NHWC, group, choice)
    return out_NHWC


def warp_images(image_NHWC: Tensor, plan: SamplePlan, fill: tuple[int, int, int]) -> Tensor:
    """Warp the samples that are to be warped and copy the others: uint8 `[N, H, W, 3]`."""
    N, H, W, _ = image_NHWC.shape
    kernels, out_NHWC = load_kernels(), torch.empty_like(image_NHWC)
    data = image_NHWC, out_NHWC, plan.warp, plan.pixel_matrix, plan.cubic, H, W, *fill, ALMOST
    grid = N, -(-H * W // kernels.BLOCK)
    kernels.launch(kernels.warp_kernel, grid, *data, PIXELS=kernels.BLOCK)
    return out_NHWC


def normalize_and_erase(
    image_NHWC: Tensor,
    plan: SamplePlan,
    scale: Tensor,
    shift: Tensor,
    noise: Tensor,
    dtype: torch.dtype,
    channels: int = 3,
) -> Tensor:
    """Normalize, and fill the boxes with noise: `dtype [N, channels, H, W]`, channels_last memory.

    `scale` and `shift` are those of Normalize, `noise` the noise table. Channels after the third
    are 0.
    """
    kernels, (N, H, W, _) = load_kernels(), image_NHWC.shape
    out_NHWC = image_NHWC.new_empty((N, H, W, channels), dtype=dtype)
    data = image_NHWC, out_NHWC, scale, shift, plan.box, noise, H, W
    grid, sizes = (N, -(-channels * H * W // kernels.BLOCK)), {"NUMBERS": kernels.BLOCK}
    kernels.launch(kernels.normalize_kernel, grid, *data, **sizes, CHANNELS=channels)
    # NHWC memory, permuted to NCHW, is channels_last: nothing is copied.
    return out_NHWC.permute(0, 3, 1, 2)


def compose_views(view_N23: Tensor, plan: SamplePlan) -> Tensor:
    """Return the Views after the warp; those of other samples stay bit for bit."""
    if not len(plan.matrix):
        return view_N23
    kernels, N = load_kernels(), len(view_N23)
    view_N23 = view_N23.contiguous()
    out_N23 = torch.empty_like(view_N23)
    data, block = (view_N23, out_N23, plan.warp, plan.matrix, N), kernels.VIEWS
    kernels.launch(kernels.view_kernel, (-(-N // block),), *data, BLOCK_N=block)
    return out_N23


def load_kernels() -> ModuleType:
    """Import the kernels; here, because importing Triton takes a second."""
    from densefeed.pipelines.augment import fused_triton

    return fused_triton

"""Masks of the pixels of crops: a teacher's soft maps, true hard masks, and both mixed.

Soft targets of 512 x 512 pixels over 150 classes would take 157 MB an image. SoftMasks holds the
stored maps instead, and the loss makes the targets of some rows of pixels at a time (`blocks`).
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.shapes import Shape, split_size
from densefeed.pipelines.targets import (
    PaletteMaps,
    SparseTargets,
    TargetRules,
    finish_targets,
    most_samples,
    places,
    pool_points,
    spread_palettes,
    table_points,
)
from densefeed.storage.mask_folder import UNLABELED
from densefeed.system.errors import UserError

# N images   h x w pixels   T pixels of some rows   S map side   M classes of an image's map
# G samples per pixel and axis

# Values of classes at sampled points that are made at once. To make fewer takes as long as the
# loss; more take memory and show more classes.
VALUES = 2**20
# Points that are placed at once, at 50 bytes each.
POINTS = 2**16
# The most parts into which the classes of a map are divided for the threads of a CPU.
MOST_PARTS = 4


class PixelRows(NamedTuple):
    """Some rows of the pixels of one image, and their targets."""

    image: int
    rows: slice
    soft: SparseTargets  # of 1 image and T pixels
    hard: Tensor | None  # int64 [T], UNLABELED where no class is known


class SoftMasks(NamedTuple):
    """Soft targets of all pixels of N crops, as the maps that they are sampled from.

    A pixel is a token of a grid of h x w: its target and its weight are those of
    `StoredLabels.targets(ids, view, grid=(h, w))`. With `hard`, see `mix`.
    """

    batch: Batch  # maps and Views; it has no images
    spec: ScoreMapSpec
    size: Shape  # h, w
    rules: TargetRules
    hard: Tensor | None = None  # int [N, h, w], UNLABELED where no class is known
    share: float = 1.0  # of the soft target, where both are known

    def mix(self, hard: Tensor, share: float = 0.5) -> "SoftMasks":
        """Mix in hard masks of the same pixels, int `[N, h, w]`; -1 is unlabeled.

        A pixel gets `share` of its soft target and 1 - `share` of its hard class. Where one of both
        is not known, the other counts alone: with `share` 1 hard masks only fill what the maps do
        not cover, with 0 the maps fill what the masks leave. Raises TypeError unless `hard` is a
        tensor, ValueError for other shapes and dtypes, on a CPU for ids of no class, and for a
        share that is not a number from 0 to 1.
        """
        wanted = len(self.batch.view), *self.size
        if not isinstance(hard, Tensor):
            raise TypeError(f"hard masks are a {type(hard).__name__}; give a tensor of class ids")
        if tuple(hard.shape) != wanted or hard.is_floating_point():
            raise ValueError(
                f"hard masks are {hard.dtype} of shape {tuple(hard.shape)}; give class ids of shape"
                f" {wanted}, as sample_masks returns them"
            )
        try:
            part = float(share)
        except (TypeError, ValueError):
            part = math.nan
        if not 0 <= part <= 1:
            raise ValueError(f"the share of soft targets is {share!r}; give a number from 0 to 1")
        # On a GPU this would wait.
        if hard.device.type == "cpu" and hard.numel():
            last, ends = self.spec.num_classes - 1, [end.item() for end in hard.aminmax()]
            if wrong := [end for end in ends if not UNLABELED <= end <= last]:
                raise ValueError(
                    f"hard masks hold {wrong[0]}; give classes from 0 to {last}, and -1 where none "
                    "is known"
                )
        return self._replace(hard=hard, share=part)

    def to(self, device: torch.device | str) -> "SoftMasks":
        """Copy the masks to `device`."""
        hard = None if self.hard is None else self.hard.to(device)
        return self._replace(batch=self.batch.to(device), hard=hard)

    def blocks(self, count: int) -> Iterator[PixelRows]:
        """Yield the targets of multiples of `count` rows of pixels one after another."""
        (h, w), spec, rules = self.size, self.spec, self.rules
        most = most_samples(self.batch, spec, self.size, rules)
        points = count * w * most**2
        # Rounded up: the overhead of a block, about 60 operations, is that of two stripes.
        blocks = min(-(-VALUES // (points * spec.max_palette)), max(1, POINTS // points))
        block = count * blocks
        band = block * max(1, POINTS // (blocks * points))
        for image in range(len(self.batch.view)):
            batch = self.batch.map_tensors(lambda field, n=image: field[n : n + 1])
            maps = channels_first(spread_palettes(batch, spec, rules))
            for top in range(0, h, band):
                size = min(band, h - top), w
                part = batch._replace(view=cut_rows(batch.view, top, size[0], h))
                at = places(part, spec.side, rules)
                table = table_points(at, spec.side, size, most)
                for first in range(0, size[0], block):
                    end = min(first + block, size[0])
                    sampled = slice(first * most, end * most)
                    points, share = table[0][:, sampled], table[1][:, :, sampled]
                    inside = table[2][:, first:end].flatten(1)
                    pool_map = partial(pool_classes, points, share, most)
                    seen, rows = drop_unseen(maps, points), slice(top + first, top + end)
                    soft = finish_targets(seen, pool_map, inside, batch.weight, spec, rules)
                    hard = None if self.hard is None else self.hard[image, rows].flatten().long()
                    yield PixelRows(image, rows, soft, hard)


def cut_rows(view_N23: Tensor, first: int, count: int, height: int) -> Tensor:
    """Return the Views of `count` rows, from row `first` on, of inputs of `height` rows."""
    x, y, shift = view_N23.unbind(2)
    return torch.stack([x, y * (count / height), shift + y * (first / height)], 2)


def channels_first(maps: PaletteMaps) -> PaletteMaps:
    """Return the maps in memory class after class, as the logits of pixels are.

    So are then the targets that are pooled from them.
    """
    value = maps.value.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    return maps._replace(value=value)


def pool_classes(points: Tensor, share: Tensor, most: int, map_NSSM: Tensor) -> Tensor:
    """Pool the map of one image as `pool_points` does, on up to 4 threads of a CPU.

    PyTorch's grid_sample divides maps among its threads, and not their classes: two threads sampled
    128 classes in 0.45 of the time as two maps of 64.
    """
    threads = 1 if map_NSSM.is_cuda else torch.get_num_threads()
    parts = math.gcd(map_NSSM.shape[3], min(threads, MOST_PARTS))
    map_PSSM = map_NSSM.unflatten(3, (parts, -1)).squeeze(0).permute(2, 0, 1, 3)
    pooled_PTM = pool_points(points.expand(parts, -1, -1, -1), share, most, map_PSSM)
    return pooled_PTM.permute(1, 0, 2).flatten(1)[None]


def drop_unseen(maps: PaletteMaps, points: Tensor) -> PaletteMaps:
    """Return the map of one image without the classes that no cell around `points` names.

    `points` are those of `table_points`. Some rows of pixels show few of the classes of an image,
    whose palette has the length of the store's largest. On a GPU, which would have to wait, all
    classes stay.
    """
    palette, value, share = maps
    if palette.is_cuda:
        return maps
    side = value.shape[1]
    # On a CPU, aminmax took 3 times as long for the points, and any 4 times for the cells below.
    low, high = points.amin((0, 1, 2)), points.amax((0, 1, 2))
    # Cells whose centers are less than a cell away, and some more.
    first = ((low + 1) / 2 * side - 1).floor().int().clamp(0, side - 1).tolist()
    last = ((high + 1) / 2 * side + 1).ceil().int().clamp(1, side).tolist()
    value_NMSS = value.permute(0, 3, 1, 2)
    near = value_NMSS[0, :, first[1] : last[1], first[0] : last[0]]
    seen = (near.amin((1, 2)) != 0) | (near.amax((1, 2)) != 0)
    # One stays, so that there is a greatest, and up to 3 more, so that pool_classes can divide all.
    seen[0] = True
    more = -seen.sum() % min(torch.get_num_threads(), MOST_PARTS)
    seen[(~seen).nonzero()[:more, 0]] = True
    # A mask as an index took 3.6 times as long.
    kept = seen.nonzero()[:, 0]
    value = value_NMSS.index_select(1, kept).permute(0, 2, 3, 1)
    return PaletteMaps(palette.index_select(1, kept), value, share)


def sample_masks(
    masks: Tensor | Sequence[Tensor], view: Tensor, size: int | Shape, outside: int = UNLABELED
) -> Tensor:
    """Sample hard masks at the pixels of crops by nearest neighbor: int64 `[N, h, w]`.

    A pixel has the class of the stored pixel that contains its center: torchvision's
    "nearest-exact". Beyond the image, and beyond what a View shows of it, it has `outside`. The
    result is on the device of the masks, without waiting for it if `view` is there too.

    Args:
        masks: class ids, int `[N, H, W]`, or N tensors `[H, W]` of any sizes; of size 0 without a
            mask, which has `outside` everywhere.
        view: `[N, 2, 3]`, takes a point (x, y, 1) of the network's input to one of the stored
            image, both from (0, 0) at the top-left corner to (1, 1), as `Batch.view`; or collated
            `densefeed.View`s, `[N, 2, 6]`.
        size: (h, w) in pixels, or the side of a square.
        outside: class of pixels outside.

    Raises UserError for masks and views of other types and shapes.
    """
    size = split_size(size)
    if not isinstance(masks, Tensor | Sequence) or not isinstance(view, Tensor):
        raise UserError(
            f"masks are a {type(masks).__name__} and view a {type(view).__name__}; give a tensor "
            "[N, H, W] or N tensors [H, W], and a tensor of views"
        )
    if isinstance(masks, Tensor) and masks.ndim != 3:
        raise UserError(f"masks have the shape {tuple(masks.shape)}; give class ids [N, H, W]")
    for mask in masks:
        check_mask(mask)
    if view.shape not in ((len(masks), 2, 3), (len(masks), 2, 6)):
        raise UserError(
            f"view is {tuple(view.shape)}; for {len(masks)} masks give an affine view "
            f"[{len(masks)}, 2, 3] from the network's input to the image, or collated Views"
        )
    sampled = [sample_mask(mask, one, size, outside) for mask, one in zip(masks, view, strict=True)]
    if not sampled:
        return torch.empty(0, *size, dtype=torch.int64, device=view.device)
    return torch.stack(sampled)


def check_mask(mask: Any) -> None:
    """Raise UserError unless a mask is a tensor of integers `[H, W]`."""
    if not isinstance(mask, Tensor):
        kind = type(mask).__name__
    elif mask.ndim != 2 or mask.is_floating_point() or mask.is_complex():
        kind = f"tensor of {str(mask.dtype).removeprefix('torch.')}, {tuple(mask.shape)}"
    else:
        return
    raise UserError(
        f"a mask is a {kind}; give class ids as a tensor of integers [N, H, W], or as N tensors "
        "[H, W]"
    )


def sample_mask(mask_HW: Tensor, view: Tensor, size: Shape, outside: int) -> Tensor:
    """Sample one mask, see `sample_masks`."""
    (H, W), device = mask_HW.shape, mask_HW.device
    mask_HW = mask_HW.as_subclass(Tensor)
    # The image has no mask.
    if not mask_HW.numel():
        return torch.full(size, outside, device=device)
    # In float64: pixels of crops that are not resized lie at whole pixels to the last bit.
    view = view.as_subclass(Tensor).to(device, torch.float64)
    y, x = (
        ((torch.arange(count, device=device, dtype=torch.float64) + 0.5) / count) for count in size
    )
    # x and y in the image, [h, w].
    places = [a * x + b * y[:, None] + shift for a, b, shift in view[:, :3]]
    inside = mask_HW.new_ones(size, dtype=torch.bool)
    for place, low, high in zip(places, *shown_ends(view), strict=True):
        inside &= (place >= low) & (place < high)
    # float32 views are off by 1e-7 of a side, which must not move a center on the edge of pixels.
    column, row = (
        (place * side + 1e-3).floor().long().clamp(0, side - 1)
        for place, side in zip(places, (W, H), strict=True)
    )
    return mask_HW[row, column].long().masked_fill_(~inside, outside)


def shown_ends(view: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and last coordinate (x, y) of the image that one view shows, `[2]` each."""
    if view.shape[1] == 6:
        return view[:, 3], view[:, 4]
    ends = torch.arange(2, device=view.device, dtype=view.dtype)
    return ends[:1].expand(2), ends[1:].expand(2)

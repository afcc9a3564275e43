"""Batch: the contract between every loader and the training step."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from densefeed.native import Limits
from densefeed.pipelines.plan import RankRows
from densefeed.storage.geometry import crop_views, visible_boxes
from densefeed.storage.score_maps import ScoreMaps, StoreHeader

# N samples   H, W pixels   S cells along a map's side   k classes of a cell   K classes


class ScoreMapSpec(NamedTuple):
    """What a step must know of a dataset's score maps before the first batch."""

    side: int  # S
    top_k: int  # k
    num_classes: int  # K
    absent: str  # what classes outside a cell's top k have, see row_codecs.Absent
    max_palette: int  # largest number of distinct classes in one map
    min_window_side: float  # smallest side of a Window: how far a crop may exceed the map

    @property
    def nbytes(self) -> int:
        """Bytes of one image's map: logits and classes, logsumexps, Window."""
        # Per cell two bytes for each logit, class and logsumexp; a Window is four float32.
        return self.side**2 * (4 * self.top_k + 2) + 16

    @property
    def limits(self) -> Limits:
        """The values that a map may hold: others would be indices out of bounds in the step."""
        return Limits(self.num_classes, self.max_palette)


class Batch(NamedTuple):
    """N samples on one device. The map fields are None where the dataset has no score maps.

    Fields of a loader's batches may be views of larger tensors, score maps of up to 4 MB: change
    them in place, do not resize them, and clone what you keep or save.
    """

    # uint8 [N, H, W, 3], cropped, resized and flipped; augmented [N, 3 or 4, H, W], float32 or the
    # dtype of autocast
    image: Tensor
    label: Tensor  # int64 [N], class ids
    view: Tensor  # float32 [N, 2, 3], network input to image, see storage/geometry.py
    # float32 [N, 4], (top, left, bottom, right): the crop. Beyond it `view` shows fill color.
    shown: Tensor
    index: Tensor  # int64 [N], sample ids
    repeat: Tensor  # int64 [N], which repeat of a sample in this epoch
    weight: Tensor  # float32 [N], 0 for padding and skipped samples
    map_logit: Tensor | None  # float16 [N, S, S, k], descending over k
    # uint16 [N, S, S, k], as stored. PyTorch can do little with uint16 but widen it.
    map_class: Tensor | None
    map_lse: Tensor | None  # float16 [N, S, S], logsumexp over all K classes
    window: Tensor | None  # float32 [N, 4], the part of the image that the map covers
    # Whether no View rotates or shears. True allows a faster sampling of the maps, and is wrong
    # where one does: loaders set it for their crops, augmentation that may rotate takes it back.
    axis_aligned: bool = False
    epoch: int = 0
    step: int = 0  # position of the batch in its epoch
    # int16 [N, H, W], classes of pixels, -1 unlabeled; for segmentation. For detection int32, codes
    # of objects (storage/instances.py).
    mask: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The fields that are tensors, by name."""
        return {name: part for name, part in self._asdict().items() if isinstance(part, Tensor)}

    def map_tensors(self, work: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply `work` to every tensor."""
        return self._replace(**{name: work(part) for name, part in self.tensors.items()})

    def add_maps(self, maps: ScoreMaps) -> "Batch":
        """Set the map fields."""
        return self._replace(
            map_logit=maps.logit, map_class=maps.cls, map_lse=maps.lse, window=maps.window
        )

    def to(self, device: torch.device | str) -> "Batch":
        """Copy the batch to `device`; from pinned memory to a GPU without waiting."""
        # Copied to the host without waiting, it could be read before the copy has ended.
        non_blocking = torch.device(device).type != "cpu"
        return self.map_tensors(lambda field: field.to(device, non_blocking=non_blocking))

    def split(self, count: int) -> "list[Batch]":
        """Cut the batch into `count` equal parts, row by row."""
        fields = [f.chunk(count) if isinstance(f, Tensor) else [f] * count for f in self]
        return [Batch(*part) for part in zip(*fields, strict=True)]


def crop_batch(
    image: Tensor,
    label: Tensor,
    crops: Sequence[np.ndarray],
    rows: RankRows,
    maps: Sequence[Tensor | None],
) -> Batch:
    """Make a batch of crops that are not warped.

    Args:
        crops: what `crop_views` takes: boxes, flips, heights and widths of the stored images.
        rows: the samples; copied, as they are part of an epoch's table.
        maps: the four map fields.
    """
    view_N23 = crop_views(*crops)
    arrays = view_N23, visible_boxes(view_N23), *map(np.copy, rows)
    return Batch(image, label, *map(torch.from_numpy, arrays), *maps, axis_aligned=True)


def allocate_maps(
    count: int, spec: ScoreMapSpec | StoreHeader, empty: Callable[..., Tensor]
) -> ScoreMaps:
    """Allocate the map fields of `count` samples: logit, class, lse and window, as in Batch.

    `empty` takes a shape and a `dtype`, as torch.empty and `Memory.empty` do.
    """
    cells = count, spec.side, spec.side
    return ScoreMaps(
        empty((*cells, spec.top_k), dtype=torch.float16),
        empty((*cells, spec.top_k), dtype=torch.uint16),
        empty(cells, dtype=torch.float16),
        empty((count, 4), dtype=torch.float32),
    )


# Steps that the host may queue behind the one that a GPU computes. A loop that reads nothing would
# queue all steps until the next log line, and their batches: 8 GB for 50 of 1,024 images. Two are
# enough for a loader that is late now and then.
LEAD = 2


@cache
def copy_stream(device: torch.device) -> "torch.cuda.Stream":
    """Return the side stream of all copies to a GPU.

    The allocator keeps the memory of each stream apart: a stream for each epoch would reserve
    126 MB more in each, at 256 images of 224 pixels.
    """
    return torch.cuda.Stream(device)


def to_device(
    batches: Iterator[Batch],
    device: torch.device,
    prepare: Callable[[Batch], Batch] = lambda batch: batch,
) -> Iterator[Batch]:
    """Copy batches to `device`, and `prepare` them there.

    On a GPU each is copied from pinned memory and prepared on a side stream while the step before
    it runs: it is fetched as soon as that step is queued. The step's stream waits for the result,
    and memory is reused only after both streams have finished with it. The host waits for the step
    that is LEAD steps before.
    """
    if device.type != "cuda":
        yield from (prepare(batch.to(device)) for batch in batches)
        return
    side, ends = copy_stream(device), deque()
    # What `prepare` reads, as a table of noise, was written on the other stream.
    side.wait_stream(torch.cuda.current_stream(device))
    for batch in batches:
        step = torch.cuda.current_stream(device)
        with torch.cuda.stream(side):
            moved = prepare(batch.to(device))
            step.wait_event(side.record_event())
        # The fields belong to the side stream: without record_stream, their memory would be reused
        # there once Python drops them, perhaps before the step has read it.
        for field in moved.tensors.values():
            field.record_stream(step)
        yield moved
        # Blocking: by default the host would poll, on a core that decodes images meanwhile.
        ends.append(torch.cuda.Event(blocking=True))
        ends[-1].record(torch.cuda.current_stream(device))
        if len(ends) > LEAD:
            ends.popleft().synchronize()

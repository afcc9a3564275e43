"""Batch: the one contract between every loader and the training step."""

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from densefeed.pipelines.plan import EpochPlan


class ScoreMapSpec(NamedTuple):
    """What a step must know of a dataset's score maps before the first batch."""

    side: int  # S
    top_k: int  # k
    num_classes: int  # K
    absent: str  # tail | zero-logit, see densefeed/storage/FORMAT.md
    max_palette: int  # most distinct classes any one map names
    min_window_side: float  # smallest side of a Window: how far a crop may exceed the map


class Batch(NamedTuple):
    """N samples on one device. The map fields are None where the dataset has no score maps."""

    image: Tensor  # uint8 [N, H, W, 3], cropped, resized and flipped
    label: Tensor  # int64 [N]
    view: Tensor  # float32 [N, 2, 3], see densefeed/storage/geometry.py
    # float32 [N, 4], (top, left, bottom, right): the crop; what `view` reaches beyond it is fill
    # color
    shown: Tensor
    index: Tensor  # int64 [N], sample ids
    # int64 [N], which of a sample's `repeats` in this epoch; 0 without repeated augmentation
    repeat: Tensor
    weight: Tensor  # float32 [N], 0 for padding and skipped samples
    map_logit: Tensor | None  # float16 [N, S, S, k], descending over k
    # uint16 [N, S, S, k], as stored: PyTorch can do little with it but widen it
    map_class: Tensor | None
    map_lse: Tensor | None  # float16 [N, S, S]
    window: Tensor | None  # float32 [N, 4]

    def to(self, device: torch.device) -> "Batch":
        """The batch on `device`; from pinned memory the copy does not wait."""
        return Batch(
            *(None if field is None else field.to(device, non_blocking=True) for field in self)
        )


def to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on `device`. On a GPU each is copied from pinned memory on a side stream while
    the step before it runs.

    Nothing waits on the host: the step's stream waits for the copy, and memory is reused only after
    both are through with it.
    """
    if device.type != "cuda":
        yield from (batch.to(device) for batch in batches)
        return
    side = torch.cuda.Stream(device)

    def copy(batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        with torch.cuda.stream(side):
            return batch.to(device), side.record_event()

    # The next batch is fetched, and its copy begun, before the step that uses this one is.
    copies = (copy(batch) for batch in batches)
    for (batch, event), _ in pairwise(chain(copies, [(None, None)])):
        step = torch.cuda.current_stream(device)
        step.wait_event(event)
        for field in batch:
            if field is not None:
                field.record_stream(step)
        yield batch


class Loader(Protocol):
    """What `train.py` asks of a loader. An error in any thread surfaces from `batches`, with the
    sample's id and path.
    """

    plan: EpochPlan
    num_classes: int
    class_names: list[str]
    score_maps: ScoreMapSpec | None
    fingerprint: str  # of the images: the same set, the same string
    skipped: int  # samples that could not be read, under on_bad_sample="skip"

    def __len__(self) -> int: ...

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]: ...

    def close(self) -> None: ...

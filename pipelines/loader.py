"""The loader behind `--loader folder` and `--loader ffcv`: the plan's crops of a source, decoded on threads.

A source says where images and maps lie; everything else (plan, crop, resize, labels, errors) is here, once, so that the two
loaders cannot differ in anything but the bytes they read.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from PIL import Image

from ..relabel.files import UserError
from ..relabel.geometry import crop_views
from ..relabel.images import crop_resize
from ..relabel.prefetch import ordered_map
from ..relabel.store import ScoreMaps
from .batch import Batch, LabelSpec
from .plan import EpochPlan

AHEAD = 3  # batches being decoded or waiting while the step works
CHUNK = 16  # samples a thread takes at once


Result = TypeVar("Result")


class Source(Protocol):
    """Where a loader's samples lie."""

    labels: np.ndarray  # int64 [num_samples]
    fingerprint: str  # of the images
    class_names: list[str]
    spec: LabelSpec | None  # of its score maps, if it has any

    def where(self, index: int) -> str:
        """How an error message should name sample `index`."""

    def image(self, index: int) -> Image.Image:
        """Sample `index`, RGB; pixels may be decoded later. UserError if it cannot be."""

    def maps(self, ids: np.ndarray) -> ScoreMaps:
        """Score maps of the samples `ids`."""


class Decoded(NamedTuple):
    """One sample, cropped."""

    pixels: np.ndarray | None  # uint8 [size, size, 3]; None: unreadable, and skipped
    view: np.ndarray  # float32 [2, 3]


class ThreadedLoader:
    """Batches of a source under a plan.

    Args:
        source: the samples.
        plan: which samples, crops and flips, and the side of the network's input in each epoch.
        threads: decoding threads.
        on_bad_sample: `raise` stops at a sample that cannot be read, naming its id and path; `skip` gives it weight 0 and
            the pixels of another sample of its batch (never a black image), and counts it in `skipped`.
    """

    def __init__(
        self, source: Source, plan: EpochPlan, threads: int, on_bad_sample: Literal["raise", "skip"] = "raise"
    ) -> None:
        self.source, self.plan, self.on_bad_sample = source, plan, on_bad_sample
        self.num_classes, self.class_names, self.labels = len(source.class_names), source.class_names, source.spec
        self.fingerprint, self.skipped = source.fingerprint, 0
        self._pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="decode")

    def __len__(self) -> int:
        return self.plan.batches

    def close(self) -> None:
        """Stop the threads; what they work on is finished, what waits is dropped."""
        self._pool.shutdown(cancel_futures=True)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This rank's rows of the batches of an epoch from batch `start` on; padding has weight 0."""
        index, view, weight = (part[start:] for part in self.plan.shard(epoch))
        local = index.shape[1]
        chunks = [np.array_split(rows, -(-local // CHUNK), axis=1) for rows in np.stack([index, view], axis=1)]
        decoded = ordered_map(
            lambda rows: self._decode(epoch, *rows),
            [c for batch in chunks for c in batch],
            self._pool,
            AHEAD * -(-local // CHUNK),
        )
        try:
            for ids, weights in zip(index, weight, strict=True):
                samples: list[Decoded] = []
                while len(samples) < local:
                    samples += next(decoded)
                yield self._collate(ids, weights, samples)
        finally:
            decoded.close()

    def _decode(self, epoch: int, ids: np.ndarray, sample_views: np.ndarray) -> list[Decoded]:
        """Crops of the samples `ids`; one call of the plan for all of them, since small numpy calls cost as much as a decode."""
        images = [self._try(index, lambda index=index: self.source.image(index)) for index in ids.tolist()]
        extents = np.array([(image.height, image.width) if image else (1, 1) for image in images])
        boxes, flips = self.plan.crops(epoch, ids, *extents.T, sample_views)
        views = crop_views(boxes, flips, *extents.T)
        samples, size = [], self.plan.size(epoch)
        for index, image, (top, left, height, width), flip, view in zip(ids.tolist(), images, boxes, flips, views, strict=True):
            box = (left, top, left + width, top + height)
            pixels = self._try(index, lambda image=image, box=box: crop_resize(image, box, size)) if image else None
            samples.append(Decoded(pixels[:, ::-1] if flip and pixels is not None else pixels, view))
        return samples

    def _try(self, index: int, work: Callable[[], Result]) -> Result | None:
        try:
            return work()
        except (UserError, OSError, SyntaxError) as error:
            where = self.source.where(index)
            what = f"sample {index}: {error}" if where in str(error) else f"sample {index}, {where}: {error}"
            if self.on_bad_sample == "raise":
                raise UserError(what) from error
            print(f"skipped {what}", file=sys.stderr)
            return None

    def _collate(self, ids: np.ndarray, weight: np.ndarray, samples: list[Decoded]) -> Batch:
        good = [n for n, sample in enumerate(samples) if sample.pixels is not None]
        bad = [n for n, sample in enumerate(samples) if sample.pixels is None]
        self.skipped += int(weight[bad].sum())
        if not good:
            raise UserError(
                f"none of the {len(ids)} samples of a batch can be read, the first is {self.source.where(int(ids[0]))}"
            )
        # A skipped sample repeats a good one, with weight 0.
        rows = [n if sample.pixels is not None else good[0] for n, sample in enumerate(samples)]
        weight, ids = weight.copy(), ids[rows]
        weight[bad] = 0
        logit = cls = lse = window = None
        if self.labels is not None:
            maps = self.source.maps(ids)
            logit, lse, window = (torch.from_numpy(part) for part in (maps.logit, maps.lse, maps.window))
            cls = torch.from_numpy(maps.cls.astype(np.int32))
        batch = Batch(
            image=torch.from_numpy(np.stack([samples[n].pixels for n in rows])),
            label=torch.from_numpy(self.source.labels[ids]),
            view=torch.from_numpy(np.stack([samples[n].view for n in rows])),
            index=torch.from_numpy(ids), weight=torch.from_numpy(weight),
            map_logit=logit, map_class=cls, map_lse=lse, window=window,
        )  # fmt: skip
        if torch.cuda.is_available():
            batch = Batch(*(None if field is None else field.pin_memory() for field in batch))
        return batch

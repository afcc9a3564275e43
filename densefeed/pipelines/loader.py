"""The loader behind `--loader folder` and `--loader ffcv`: the plan's crops of a source, decoded by
native threads.

A source says where images and maps lie; everything else (plan, crop, resize, labels, errors) is
here, once, so that the two loaders cannot differ in anything but the bytes they read. Python plans
a batch and submits it; the threads decode it without ever waiting for Python's lock, which a
training loop in eager mode holds nearly always.
"""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, count
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from densefeed import native
from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.plan import EpochPlan
from densefeed.storage.geometry import crop_views, visible_boxes
from densefeed.storage.score_maps import ScoreMaps
from densefeed.system.errors import UserError, explain_os_error

AHEAD = 3  # batches being decoded or waiting while the step works


class Encoded(NamedTuple):
    """Where the images of a batch lie, N samples."""

    samples: np.ndarray  # native.SAMPLE [N]: place, kind and size are filled in
    errors: dict[int, str]  # row: why its image cannot be read
    keep: object = None  # memory that must live until the batch is decoded


class Fetch(NamedTuple):
    """Samples being fetched. Without `cancel` a process that ends would first read all that was
    asked for.
    """

    wait: Callable[[], Encoded]
    cancel: Callable[[], object]


class MapRows(NamedTuple):
    """Where the score maps of a batch lie, and what they are once they were copied."""

    parts: native.Parts
    fields: tuple[Tensor, Tensor, Tensor, Tensor]  # logit, class, lse, window, as in Batch


class Source(Protocol):
    """Where a loader's samples lie."""

    labels: np.ndarray  # int64 [num_samples]
    fingerprint: str  # of the images
    class_names: list[str]
    score_maps: ScoreMapSpec | None  # of its score maps, if it has any
    remedy: str  # what to do about a sample that cannot be decoded

    def where(self, index: int) -> str:
        """How an error message should name sample `index`."""

    def read_ahead(self, first: int, end: int) -> None:
        """The samples `first` to `end` - 1 will be needed: if they lie together, have the system
        read them, without waiting.
        """

    def begin(self, ids: np.ndarray) -> Fetch:
        """Begin to fetch the samples `ids`."""

    def image(self, index: int) -> Image.Image:
        """Sample `index` decoded by Pillow, RGB: for what the native decoder leaves to it.
        UserError if it cannot be.
        """

    def map_rows(self, ids: np.ndarray, memory: "Memory") -> MapRows:
        """Where the score maps of the samples `ids` lie; only if `score_maps` is not None."""

    def maps(self, ids: np.ndarray) -> ScoreMaps:
        """Copies of the score maps of the samples `ids`, each checked; only if `score_maps` is not
        None.
        """

    def check_map(self, index: int) -> None:
        """UserError if the score map of sample `index` cannot be read, or is damaged; only if
        `score_maps` is not None.
        """

    def close(self) -> None:
        """Free files and threads."""


class Memory:
    """Tensors for batches. Memory is used again only after the last tensor that shares it is gone,
    however the consumer keeps it.

    With CUDA it is pinned, and PyTorch's own allocator does this (it also waits for copies that a
    stream has not finished).
    """

    def __init__(self) -> None:
        self.pinned = torch.cuda.is_available()
        self._free: dict[int, list[np.ndarray]] = {}
        self._size = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor on the CPU."""
        if self.pinned:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        free = self._free.setdefault(nbytes, [])
        block = free.pop() if free else np.empty(nbytes, np.uint8)
        # the tensor holds this view, so the view dies with the tensor's last relative
        view = block[:]
        weakref.finalize(view, free.append, block).atexit = False
        return torch.from_numpy(view).view(dtype).view(shape)

    def prepare(self, size: int) -> None:
        """Give free memory back if batches will have another `size`: other tensors than before."""
        if size != self._size:
            self._free.clear()
        self._size = size


class Decoding(Protocol):
    """Images of a batch being decoded."""

    job: native.Job  # its samples' status says how each of them went, its parts are the score maps
    image: Tensor  # uint8 [N, size, size, 3], valid once it was waited for


class _Native(NamedTuple):
    """Images being decoded by our own threads."""

    job: native.Job
    image: Tensor


class _Begun(NamedTuple):
    """A batch being decoded."""

    decoding: Decoding
    encoded: Encoded
    ids: np.ndarray
    repeat: np.ndarray
    weight: np.ndarray
    views: np.ndarray
    maps: MapRows | None


class ThreadedLoader:
    """Batches of a source under a plan.

    Args:
        source: the samples.
        plan: which samples, crops and flips, and the side of the network's input in each epoch.
        threads: decoding threads.
        on_bad_sample: `raise` stops at a sample that cannot be read, naming its id and path; `skip`
            gives it weight 0 and the pixels of another sample of its batch (never a black image),
            and counts it in `skipped`.
        maps: whether batches carry score maps, if the source has any; not for maps that are on the
            device (resident.py).

    At most AHEAD batches are in the making, beside those the consumer holds. A batch of the
    consumer's is never overwritten.
    """

    def __init__(
        self,
        source: Source,
        plan: EpochPlan,
        threads: int,
        on_bad_sample: Literal["raise", "skip"] = "raise",
        maps: bool = True,
    ) -> None:
        self.source, self.plan, self.on_bad_sample, self._maps = source, plan, on_bad_sample, maps
        self.num_classes, self.class_names, self.score_maps = (
            len(source.class_names),
            source.class_names,
            source.score_maps,
        )
        self.fingerprint, self.skipped = source.fingerprint, 0
        self._pool, self._memory = native.Pool(max(1, threads)), Memory()

    def __len__(self) -> int:
        return self.plan.batches

    def close(self) -> None:
        """Stop the threads; what they work on is finished, what waits is dropped."""
        self._pool.close()
        self.source.close()

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This rank's rows of the batches of an epoch from batch `start` on; padding has weight
        0.
        """
        index, view, weight = (part[start:] for part in self.plan.shard(epoch))
        rows, size = zip(index, view, weight, strict=True), self.plan.size(epoch)
        self._memory.prepare(size)
        # One batch more is being fetched than decoded: a folder's files are read while earlier ones
        # are decoded.
        fetching = self._fetch(zip(rows, self.plan.runs(epoch, start), strict=True))
        fetched: deque = deque()
        decoding: deque[_Begun] = deque()
        steps = count(start)
        try:
            for fetch in chain(fetching, [None] * (AHEAD + 1)):
                if fetch:
                    fetched.append(fetch)
                if fetched and (len(fetched) > 1 or not fetch):
                    decoding.append(self._submit(epoch, size, *fetched[0]))
                    fetched.popleft()
                if decoding and (len(decoding) == AHEAD or not fetch):
                    self._wait(decoding[0].decoding)
                    batch = self._finish(decoding.popleft())
                    yield batch._replace(epoch=epoch, step=next(steps))
        except Exception:
            # closed meanwhile, or in a forked child: that is the reason, whatever it broke first
            self._pool.check()
            raise
        finally:
            for fetch, *_ in fetched:
                fetch.cancel()
            for begun in decoding:
                self._cancel(begun.decoding)

    def _begin(
        self, samples: np.ndarray, ids: np.ndarray, size: int, maps: MapRows | None, keep: object
    ) -> Decoding:
        """Have the crops of `samples` decoded, at `size` pixels a side, and their `maps` copied;
        without waiting.
        """
        image = self._memory.empty((len(ids), size, size, 3), torch.uint8)
        job = native.Job(samples, image.numpy(), maps.parts if maps else None, keep)
        self._pool.submit(job)
        return _Native(job, image)

    def _wait(self, decoding: Decoding) -> None:
        """Wait until it is decoded."""
        self._pool.wait(decoding.job)

    def _cancel(self, decoding: Decoding) -> None:
        """Nobody waits for it any more."""
        self._pool.cancel(decoding.job)

    def _fetch(self, rows: Iterator[tuple]) -> Iterator[tuple]:
        """Begin to fetch one batch after the other, and have the storage read what will be needed a
        window later.
        """
        for (ids, views, weights), runs in rows:
            for first, end in runs:
                self.source.read_ahead(first, end)
            yield self.source.begin(ids), ids, views, weights

    def _submit(
        self,
        epoch: int,
        size: int,
        fetch: Fetch,
        ids: np.ndarray,
        repeat: np.ndarray,
        weight: np.ndarray,
    ) -> _Begun:
        """Plan a batch's crops and have them decoded."""
        encoded = fetch.wait()
        samples = encoded.samples
        samples["box_tlhw"], samples["flip"] = self.plan.crops(
            epoch, ids, samples["height"], samples["width"], repeat
        )
        views = crop_views(
            samples["box_tlhw"], samples["flip"], samples["height"], samples["width"]
        )
        maps = self.source.map_rows(ids, self._memory) if self.score_maps and self._maps else None
        decoding = self._begin(samples, ids, size, maps, encoded.keep)
        return _Begun(decoding, encoded, ids, repeat, weight, views, maps)

    def _finish(self, begun: _Begun) -> Batch:
        """Look after a decoded batch's bad samples, and make tensors of it."""
        ids, weight, views = begun.ids.copy(), begun.weight.copy(), begun.views
        bad = [
            row
            for row in np.flatnonzero(begun.decoding.job.samples["status"]).tolist()
            if not self._mend(begun, row)
        ]
        batch = Batch(
            image=begun.decoding.image,
            label=torch.from_numpy(self.source.labels[ids]),
            view=torch.from_numpy(views),
            shown=torch.from_numpy(visible_boxes(views)),
            index=torch.from_numpy(ids),
            repeat=torch.from_numpy(begun.repeat.copy()),
            weight=torch.from_numpy(weight),
            map_logit=None,
            map_class=None,
            map_lse=None,
            window=None,
            axis_aligned=True,
        )
        if begun.maps:
            batch = batch._replace(
                **dict(
                    zip(
                        ("map_logit", "map_class", "map_lse", "window"),
                        begun.maps.fields,
                        strict=True,
                    )
                )
            )
        if bad:
            self.skipped += int(weight[bad].sum())
            good = next((row for row in range(len(ids)) if row not in bad), None)
            if good is None:
                where = self.source.where(int(ids[0]))
                raise UserError(
                    f"none of the {len(ids)} samples of a batch can be read, {where} first; the lines above say why"
                )
            for row in bad:  # a skipped sample repeats a good one, with weight 0
                for field in batch:
                    if isinstance(field, Tensor):
                        field[row] = field[good]
                weight[row] = 0
        # Memory is pinned already where it is large; for the small tensors this copies.
        if not self._memory.pinned:
            return batch
        return batch.map_tensors(lambda field: field if field.is_cuda else field.pin_memory())

    def _mend(self, begun: _Begun, row: int) -> bool:
        """Decode a sample with Pillow that the native decoder leaves to it. False if it is to be
        skipped.
        """
        image, samples = begun.decoding.image, begun.decoding.job.samples
        sample, index = samples[row], int(begun.ids[row])
        where, why = self.source.where(index), sample["message"].decode(errors="replace")
        if sample["status"] == native.NO_MEMORY:  # no fault of the sample's, so it is not skipped
            raise UserError(
                f"sample {index}, {where}: memory is used up; choose a smaller --batch or fewer --threads"
            )
        try:
            if row in begun.encoded.errors:
                raise UserError(begun.encoded.errors[row])
            if sample["status"] != native.UNSUPPORTED:
                if begun.maps:  # the decoder tells the map's damage from the image's only in words
                    self.source.check_map(index)
                raise UserError(f"{where} cannot be decoded ({why}); {self.source.remedy}")
            pixels = np.asarray(self.source.image(index))
            if pixels.shape[:2] != (sample["height"], sample["width"]):
                raise UserError(
                    f"{where} has another size than the dataset says; {self.source.remedy}"
                )
            again, crop = samples[row : row + 1].copy(), np.empty((1, *image.shape[1:]), np.uint8)
            again["bytes"], again["length"], again["kind"] = (
                pixels.ctypes.data,
                pixels.nbytes,
                native.RAW,
            )
            native.Job(again, crop, keep=pixels).decode()
            if again["status"][0] != native.OK:
                raise UserError(
                    f"{where} cannot be resized ({again['message'][0].decode()}); {self.source.remedy}"
                )
            image[row] = torch.from_numpy(crop[0])
            return True
        except (UserError, OSError) as error:
            why = explain_os_error(error) if isinstance(error, OSError) else str(error)
            what = f"sample {index}: {why}" if where in why else f"sample {index}, {where}: {why}"
            if self.on_bad_sample == "raise":
                raise UserError(what) from error
            print(f"skipped {what}", file=sys.stderr)
            return False

"""Load crops of a source, decoded by native threads, for `--loader folder` and `--loader ffcv`.

A source locates images and maps; everything else (plan, crop, resize, labels, errors) is here,
once, so that two loaders can differ only in the bytes they read. Python plans a batch and submits
it; the threads decode it without ever waiting for Python's lock, which a training loop in eager
mode holds nearly all the time.
"""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, count, repeat
from typing import ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from densefeed import native
from densefeed.pipelines.batch import Batch, ScoreMapSpec, allocate_maps
from densefeed.pipelines.plan import EpochPlan, RankRows
from densefeed.pipelines.shapes import Shape
from densefeed.storage.geometry import crop_views, visible_boxes
from densefeed.storage.score_maps import ScoreMaps
from densefeed.system.errors import UserError, explain_os_error
from densefeed.system.terminal import print

CPU = torch.device("cpu")
# Batches in flight while the step works: being decoded, or waiting for the consumer.
AHEAD = 3
# Samples whose crops are planned at once. Decoding and steps displace numpy's code from the caches,
# and loading it again takes longer than the computation. Beside decoding on the same core, the
# loader's Python takes 0.38 to 0.41 ms for a batch of 64; with 512 samples at once it takes 0.46 to
# 0.47 (EPYC, Zen 4).
PLANNED = 2048


class Encoded(NamedTuple):
    """The location of the encoded images of a batch, N samples.

    A source starts from `np.zeros(N, native.SAMPLE)` and fills these fields, the loader the others:

    - `kind`: `native.JPEG`, `native.RAW` for rows of RGB bytes, 3 * height * width of them, or
      `native.PLANES`.
    - `height`, `width` of the stored image, pixels. The decoder refuses a JPEG of another size.
    - In memory: `bytes`, the address of the encoded image, and `length` in bytes.
    - In a file: `bytes` 0, `file`, a descriptor that stays open until `Source.close`, and `offset`
      and `length` in bytes.

    A sample in `errors` needs values that the decoder refuses, for example an empty JPEG of
    1 x 1 pixels; its error is then reported in place of the decoder's.
    """

    samples: np.ndarray  # native.SAMPLE [N]
    errors: dict[int, str]  # row -> reason why its image cannot be read
    keep: object = None  # owner of the memory behind `bytes`; it lives until the batch is decoded
    # For images that were flipped and augmented as a whole: turns Views and maps of a batch of
    # their crops into those of the stored images.
    follow: Callable[[Batch], Batch] | None = None


class Fetch(NamedTuple):
    """Samples that are being fetched.

    `wait` blocks until they are there. `cancel` drops the reads that have not started; without it,
    a process that ends would first finish all requested reads.
    """

    wait: Callable[[], Encoded]
    cancel: Callable[[], object]


class MapPlaces(NamedTuple):
    """Where the score maps of N samples lie, as in native.Parts."""

    file: np.ndarray  # int32 [N, parts]
    offset: np.ndarray  # int64 [N, parts]
    crc: np.ndarray | None  # uint32 [N]


class Located(NamedTuple):
    """Where samples of several batches lie."""

    samples: np.ndarray  # as in Encoded
    maps: MapPlaces | None


class MapRows(NamedTuple):
    """The location of the score maps of a batch, and the tensors that they are copied to."""

    # Runs of bytes to copy, in the order of `fields`; `to` is the numpy view of each field.
    parts: native.Parts
    fields: tuple[Tensor, Tensor, Tensor, Tensor]  # logit, class, lse, window, as in Batch


class Source(Protocol):
    """Images, labels and score maps of a dataset: the interface between storage and the loaders.

    Implement it to train from a new storage format; `ThreadedLoader(source, plan, threads)` and
    `DaliLoader` accept any object with these members, no base class is needed. FolderSource reads
    one file per sample into memory on threads of its own, FfcvSource locates samples in a large
    file.

    Samples are numbered from 0 to `len(labels)` - 1 in storage order, and the numbering must not
    change between runs. The plan of the loader has that `num_samples`. `ids` are int64 `[N]`, in
    any order, and may repeat.

    For every batch the loader calls `read_ahead` (order `blocks` only), `begin`, `Fetch.wait` and,
    if there are maps, `map_rows`, all from the thread that iterates over the batches. `begin` is
    called one batch before its `wait`, and several batches are in flight, so it must not block and
    must not reuse the memory of an earlier batch. The bytes are then read, decoded and checked by
    native threads. `image` and `check_map` are called for samples that failed there. Where whole
    images are augmented before the crop, `image` takes the place of `begin`.

    A source that knows where its samples lie without reading them may have `locate(ids)`, which
    returns Located: the same samples as `Encoded`, and the places of the maps, if they are stored
    as in Batch; then `map_rows` is not called. So the crops of several batches are planned, and
    their samples located, at once: beside a training, whose data fill the caches, a call of numpy
    takes several times as long. `begin` is called for such a source only if it has `follow`.

    A source that is slow to read in random order may have `blocks()`: the Blocks of the order in
    which training must read it, or None (storage/parquet_files.py).

    A source may have `follow(plan, epoch, step, index)` too: it is called before every batch with
    the samples of all batches of this rank in the epoch, `[batches, local batch]`, so that those of
    later ones can be fetched early (remote.py).

    Raise UserError, a sentence with the cause and the remedy, for a sample that cannot be read; the
    loader adds the sample's number and applies `on_bad_sample`. An error from `begin`, `wait` or
    `map_rows` ends the run.
    """

    labels: np.ndarray  # int64 [num_samples], class ids
    fingerprint: str  # identifies the set of images: equal for equal sets; checkpoints compare it
    class_names: list[str]  # one for each class id
    score_maps: ScoreMapSpec | None  # shape and meaning of the score maps; None without maps
    remedy: str  # what to do about an image that cannot be decoded, ends the error message

    def where(self, index: int) -> str:
        """Name sample `index` in an error message: its path, or file and number in the file."""

    def read_ahead(self, first: int, end: int) -> None:
        """Prefetch samples `first` to `end` - 1, which will be needed within a window of the plan.

        Have the operating system read them if they are contiguous (posix_fadvise), without
        waiting; do nothing if they are not.
        """

    def begin(self, ids: np.ndarray) -> Fetch:
        """Start to fetch the samples `ids`, without waiting; see Fetch and Encoded.

        A sample that cannot be fetched becomes an entry of `Encoded.errors`.
        """

    def image(self, index: int) -> Image.Image:
        """Decode all of sample `index` with Pillow, RGB.

        For images that the native decoder does not support, and for those that are augmented before
        the crop; then it is called by several threads at once. Its size must be that of `samples`.
        Raises UserError if it cannot be decoded.
        """

    def map_rows(self, ids: np.ndarray, memory: "Memory") -> MapRows:
        """Locate the score maps of the samples `ids`; called only if `score_maps` is not None.

        Allocate the tensors from `memory` with the shapes and dtypes of Batch (`allocate_maps` in
        batch.py). native.Parts names the bytes of each of them by file descriptor and offset, and
        optionally a checksum; the native threads copy them beside the images, and refuse values
        that `score_maps` does not allow.
        """

    def maps(self, ids: np.ndarray) -> ScoreMaps:
        """Read the score maps of the samples `ids` and check them; for maps held on the device.

        Returns copies. Raises UserError for a damaged map. Called only if `score_maps` is not None.
        """

    def check_map(self, index: int) -> None:
        """Raise UserError if the score map of sample `index` is damaged or cannot be read.

        Called only if `score_maps` is not None.
        """

    def extents(self) -> tuple[np.ndarray, np.ndarray]:
        """Return heights and widths of all stored images, pixels, integers `[num_samples]`.

        Called before the first batch, and only with `--aspects`, which is refused for sources
        without this member. All ranks and resumed runs must get the same sizes; a damaged image has
        any positive one.
        """

    def close(self) -> None:
        """Close files and stop threads. Called once the loader's own threads have stopped."""


class Preparation(Protocol):
    """Prepares whole images for the crop, in place of `Source.begin`: see WholeImages."""

    def begin(
        self, source: Source, threads: ThreadPoolExecutor, epoch: int, rows: RankRows
    ) -> Fetch:
        """Start to prepare the images of a batch on `threads`, without waiting.

        Their `Encoded` has `follow`.
        """


class Memory:
    """An allocator of the tensors of batches.

    Memory is reused only after the last tensor that shares it is gone, whatever the consumer keeps.
    With CUDA it is pinned, and PyTorch's own allocator does this (it also waits for copies that a
    stream has not finished).
    """

    def __init__(self) -> None:
        self.pinned = torch.cuda.is_available()
        # Free blocks by their shape and dtype; blocks in use by their identity.
        self._free, self._lent = {}, {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor on the CPU."""
        if self.pinned:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        free, lent = self._free.setdefault((shape, dtype), []), self._lent
        block = free.pop() if free else torch.empty(shape, dtype=dtype).numpy()
        # The tensor holds this view, so the view dies with the last tensor that shares the memory.
        view, key = block[:], id(block)

        def take_back(_: weakref.ref) -> None:
            free.append(lent.pop(key)[0])

        lent[key] = block, weakref.ref(view, take_back)
        return torch.from_numpy(view)


class Crops(NamedTuple):
    """Planned crops of N samples."""

    box_tlhw: np.ndarray  # float64 [N, 4], pixels of the stored image
    flip: np.ndarray  # bool [N]
    filter: np.ndarray  # uint8 [N], native.BILINEAR or BICUBIC
    view: np.ndarray  # float32 [N, 2, 3], as in Batch
    shown: np.ndarray  # float32 [N, 4], as in Batch


class Fields(NamedTuple):
    """The fields of a Batch that are known before its images."""

    label: Tensor
    view: Tensor
    shown: Tensor
    index: Tensor
    repeat: Tensor
    weight: Tensor

    def split(self, size: int) -> "Iterator[Fields]":
        """Yield the fields of each `size` samples; they share the memory of all."""
        return map(Fields._make, zip(*(field.split(size) for field in self), strict=True))


class Planned(NamedTuple):
    """A batch that was planned and located together with others, before its images are fetched."""

    # Of all these batches:
    rows: native.Rows
    maps: MapPlaces | None
    # Of this batch:
    first: int  # row of its first sample
    count: int  # of its samples
    fields: Fields
    checked: bool  # whether all its maps were read before and hold no impossible values

    @property
    def samples(self) -> np.ndarray:
        """The samples of this batch."""
        return self.rows.samples[self.first : self.first + self.count]


# Of a source that fetches nothing.
NO_FETCH = Fetch(lambda: None, lambda: None)


@dataclass(eq=False)
class Decoding:
    """The images of a batch while they are decoded."""

    job: native.Job  # its samples' status is the outcome of each; its parts are the score maps
    image: Tensor | None  # uint8 [N, H, W, 3], valid after the wait


class _Begun(NamedTuple):
    """A batch in flight."""

    decoding: Decoding
    encoded: Encoded
    rows: RankRows  # of this batch alone: each field is `[N]`
    fields: Fields
    maps: Sequence[Tensor] | None  # the fields of MapRows
    limits: native.Limits | None  # of values, if the maps are checked


class ThreadedLoader:
    """Batches of a source, in the order and with the crops of a plan.

    Args:
        source: the samples.
        plan: order, crops and flips, and the shape of the network's input in each batch.
        threads: decoding threads.
        on_bad_sample: `raise` stops at a sample that cannot be read, with its id and path; `skip`
            gives it weight 0 and the pixels of another sample of its batch (never a black image),
            and counts it in `skipped`.
        maps: whether batches carry score maps, if the source has any; False if the maps are on the
            device (resident.py).
        device: where a derived class may decode; this class decodes on the CPU.

    Attributes:
        prepares: whether `batches` takes whole images that were augmented before the crop.
        class_names, num_classes, score_maps, fingerprint: of the source.
        skipped: unreadable samples so far, under on_bad_sample="skip".

    At most AHEAD batches are in flight, beside those that the consumer holds. A batch that the
    consumer holds is never overwritten. An error in any thread is raised from `batches`, with the
    sample's id and path.
    """

    prepares: ClassVar[bool] = True

    def __init__(
        self,
        source: Source,
        plan: EpochPlan,
        threads: int,
        on_bad_sample: Literal["raise", "skip"] = "raise",
        maps: bool = True,
        device: torch.device = CPU,
    ) -> None:
        self.source, self.plan, self.on_bad_sample, self._maps = source, plan, on_bad_sample, maps
        self.class_names, self.num_classes = source.class_names, len(source.class_names)
        self.score_maps, self.fingerprint = source.score_maps, source.fingerprint
        self.skipped, self._device = 0, device
        # Samples whose score maps were read and hold no impossible values.
        self._checked = np.zeros(len(source.labels), bool)
        self._shapes, self._memory = [], Memory()
        self._pool = native.Pool(max(1, threads))
        # Starts its threads when they are needed.
        self._preparing = ThreadPoolExecutor(max(1, threads), thread_name_prefix="prepare")

    def __len__(self) -> int:
        return self.plan.batches

    def close(self) -> None:
        """Stop the threads: samples being decoded are finished, queued ones are dropped."""
        self._pool.close()
        self._preparing.shutdown(cancel_futures=True)
        self.source.close()

    def batches(
        self, epoch: int, start: int = 0, prepare: Preparation | None = None
    ) -> Iterator[Batch]:
        """Yield this rank's part of the batches of an epoch from batch `start` on.

        `prepare` flips and augments whole images before they are cropped. Padding has weight 0.
        RuntimeError if the loader is closed meanwhile, or in a forked child.
        """
        shard, shapes = self.plan.shard(epoch), self.plan.shapes(epoch)
        rows = map(RankRows, *(part[start:] for part in shard))
        planned = self._plan(epoch, shard, start, prepare is None)
        # Free blocks of other shapes would never be used again. Those of these are kept: for 1,024
        # images an epoch, new pages cost 5 % of the images per second (2 threads, 224 px).
        if shapes != self._shapes:
            self._shapes, self._memory = shapes, Memory()
        # One more batch is fetched than decoded: the files of a folder are read while earlier ones
        # are decoded.
        upcoming = zip(rows, self.plan.runs(epoch, start), strict=True)
        if hasattr(self.source, "follow"):
            upcoming = self._announce(upcoming, epoch, start, shard.index)
        fetching = self._fetch(upcoming, epoch, prepare)
        fetched, decoding, steps = deque(), deque(), count(start)
        shape = (self.plan.shape(epoch, step) for step in count(start))
        if len(shapes) == 1:
            shape = repeat(shapes[0])
        try:
            # The rounds without a fetch empty both queues at the end of the epoch.
            for fetch in chain(fetching, [None] * (AHEAD + 1)):
                if fetch:
                    fetched.append(fetch)
                if fetched and (len(fetched) > 1 or not fetch):
                    # Removed only afterwards, as below: `finally` cancels what Ctrl-C interrupts.
                    decoding.append(self._submit(epoch, next(shape), *fetched[0], *next(planned)))
                    fetched.popleft()
                if decoding and (len(decoding) == AHEAD or not fetch):
                    self._wait(decoding[0].decoding)
                    yield self._finish(decoding.popleft(), epoch, next(steps))
        except Exception:
            # If the loader was closed meanwhile, or this is a forked child, report that instead of
            # the error that it caused first.
            self._pool.check()
            raise
        finally:
            for fetch, *_ in fetched:
                fetch.cancel()
            for begun in decoding:
                self._cancel(begun.decoding)

    def _announce(
        self, batches: Iterator[tuple], epoch: int, start: int, index: np.ndarray
    ) -> Iterator[tuple]:
        """Yield batch after batch; announce each to the source before."""
        for step, batch in enumerate(batches, start):
            self.source.follow(self.plan, epoch, step, index)
            yield batch

    def _begin(
        self, encoded: Encoded, ids: np.ndarray, shape: Shape, maps: MapRows | None
    ) -> Decoding:
        """Start to decode crops of the samples `ids` and to copy their `maps`, without waiting.

        The crops become images of `shape`, height and width in pixels.
        """
        image = self._memory.empty((len(ids), *shape, 3), torch.uint8)
        job = native.Job(encoded.samples, image.numpy(), maps and maps.parts, encoded.keep)
        self._pool.submit(job)
        return Decoding(job, image)

    def _begin_planned(
        self, planned: Planned, shape: Shape, maps: Sequence[Tensor], limits: native.Limits | None
    ) -> Decoding:
        """Do `_begin` for samples that were located; `maps` are the tensors that maps become."""
        image = self._memory.empty((planned.count, *shape, 3), torch.uint8)
        job = native.Job.of_rows(planned.rows, planned.first, image, maps, limits)
        self._pool.submit(job)
        return Decoding(job, image)

    def _wait(self, decoding: Decoding) -> None:
        """Wait until the images are decoded."""
        self._pool.wait(decoding.job)

    def _has_failed(self, decoding: Decoding) -> bool:
        """Return whether a sample of a finished batch has failed."""
        return decoding.job.failed > 0

    def _cancel(self, decoding: Decoding) -> None:
        """Drop a batch that will not be waited for."""
        self._pool.cancel(decoding.job)

    def _fetch(
        self, batches: Iterator[tuple], epoch: int, prepare: Preparation | None
    ) -> Iterator[tuple[Fetch, RankRows]]:
        """Start to fetch batch after batch, and prefetch the storage needed a window later."""
        located = prepare is None and self._locates() and not hasattr(self.source, "follow")
        for rows, runs in batches:
            for first, end in runs:
                self.source.read_ahead(first, end)
            if located:
                yield NO_FETCH, rows
            elif prepare is None:
                yield self.source.begin(rows.index), rows
            else:
                # A forked child would wait for threads that it does not have.
                self._pool.check()
                yield prepare.begin(self.source, self._preparing, epoch, rows), rows

    def _plan(
        self, epoch: int, shard: RankRows, start: int, early: bool
    ) -> Iterator[tuple[np.ndarray, Planned | None]]:
        """Draw the random numbers of the crops of every batch from `start` on, and plan them.

        `early` plans before the images are fetched, where the source can locate them; what cannot
        be planned yet is None.
        """
        batches, size = shard.index.shape
        early = early and self._locates()
        step = max(1, PLANNED // size)
        for first in range(start, batches, step):
            rows = RankRows(*(field[first : first + step].ravel() for field in shard))
            u = self.plan.crop_draws(epoch, rows.index, rows.repeat)
            planned = repeat(None)
            if early:
                planned = self._locate(epoch, rows, u, self.plan.shape(epoch, first), size)
            splits = np.split(u, range(size, len(rows.index), size), axis=1)
            yield from zip(splits, planned, strict=False)

    def _locate(
        self, epoch: int, rows: RankRows, u: np.ndarray, shape: Shape, size: int
    ) -> Iterator[Planned]:
        """Locate samples and plan their crops; yield them in batches of `size`."""
        samples, maps = self.source.locate(rows.index)
        crops = self._crop(epoch, rows, (samples["height"], samples["width"]), u, shape)
        samples["box_tlhw"], samples["flip"], samples["filter"] = crops[:3]
        together = native.Rows(samples, *(maps or ()))
        # Without a checksum a map may hold other values the next time.
        sure = maps is not None and maps.crc is not None
        checked = (sure & self._checked[rows.index].reshape(-1, size).all(1)).tolist()
        for n, fields in enumerate(self._fields(rows, crops).split(size)):
            yield Planned(together, maps, n * size, size, fields, checked[n])

    def _fields(self, rows: RankRows, crops: Crops) -> Fields:
        # Copies: rows are part of an epoch's table.
        arrays = self.source.labels[rows.index], crops.view, crops.shown, *map(np.copy, rows)
        return Fields(*map(torch.from_numpy, arrays))

    def _locates(self) -> bool:
        """Whether the source can locate samples. With buckets each batch has another aspect."""
        return self.plan.buckets is None and hasattr(self.source, "locate")

    def _crop(
        self,
        epoch: int,
        rows: RankRows,
        extents: tuple[np.ndarray, np.ndarray],
        u: np.ndarray,
        shape: Shape,
        flipped: bool = False,
    ) -> Crops:
        """Plan the crops of `rows`, images with these heights and widths.

        `u` was drawn for them. Images that are `flipped` already are not flipped again.
        """
        box, flip = self.plan.crops(epoch, rows.index, *extents, rows.repeat, u, shape)
        flip &= not flipped
        kind = np.where(self.plan.cubic_crops(u), native.BICUBIC, native.BILINEAR)
        view = crop_views(box, flip, *extents)
        return Crops(box, flip, kind, view, visible_boxes(view))

    def _submit(
        self,
        epoch: int,
        shape: Shape,
        fetch: Fetch,
        rows: RankRows,
        u: np.ndarray,
        planned: Planned | None,
    ) -> _Begun:
        """Submit a batch for decoding; the last two are what `_plan` yields for it."""
        encoded, ids = fetch.wait(), rows.index
        if planned:
            encoded, fields = Encoded(planned.samples, {}), planned.fields
        else:
            samples = encoded.samples
            extents = samples["height"], samples["width"]
            crops = self._crop(epoch, rows, extents, u, shape, flipped=bool(encoded.follow))
            samples["box_tlhw"], samples["flip"], samples["filter"] = crops[:3]
            fields = self._fields(rows, crops)
        wanted, limits = self.score_maps and self._maps, None
        # A map that matches its checksum again holds the same values: 2 % of the loader's time.
        if wanted and not (planned.checked if planned else self._checked[ids].all()):
            limits = self.score_maps.limits
        if planned and (planned.maps or not wanted):
            maps = allocate_maps(len(ids), self.score_maps, self._memory.empty) if wanted else None
            decoding = self._begin_planned(planned, shape, maps or (), limits)
            return _Begun(decoding, encoded, rows, fields, maps, limits)
        maps = self.source.map_rows(ids, self._memory) if wanted else None
        if maps and (limits or maps.parts.crc is None):
            parts = maps.parts._replace(limits=self.score_maps.limits)
            maps = maps._replace(parts=parts)
        decoding = self._begin(encoded, ids, shape, maps)
        return _Begun(decoding, encoded, rows, fields, maps and maps.fields, limits)

    def _finish(self, begun: _Begun, epoch: int, step: int) -> Batch:
        """Handle the bad samples of a decoded batch, and make tensors of it."""
        bad = []
        if self._has_failed(begun.decoding):
            status = begun.decoding.job.samples["status"]
            good, failed = np.flatnonzero(status == native.OK), np.flatnonzero(status).tolist()
            self._checked[begun.rows.index[good]] = begun.maps is not None
            bad = [row for row in failed if not self._mend(begun, row)]
        elif begun.limits:
            self._checked[begun.rows.index] = True
        maps = begun.maps or [None] * 4
        fields = begun.decoding.image, *begun.fields, *maps
        batch = Batch(*fields, axis_aligned=True, epoch=epoch, step=step)
        if begun.encoded.follow:
            batch = begun.encoded.follow(batch)
        if bad:
            self._replace_samples(batch, bad)
        if not self._memory.pinned:
            return batch
        # Large tensors are in pinned memory already; this copies the small ones.
        return batch.map_tensors(lambda field: field if field.is_cuda else field.pin_memory())

    def _replace_samples(self, batch: Batch, bad: list[int]) -> None:
        """Replace the rows `bad` by the first good one, in place, with weight 0."""
        # Padding has weight 0, so a sample that is shown again as padding is counted once.
        self.skipped += int(batch.weight[bad].sum())
        good = next((row for row in range(len(batch.index)) if row not in bad), None)
        if good is None:
            where = self.source.where(int(batch.index[0]))
            raise UserError(
                f"none of the {len(bad)} samples of a batch can be read (the first is {where}); "
                "see the messages above for the reasons"
            )
        for row in bad:
            for field in batch.tensors.values():
                field[row] = field[good]
            # After the loop, which has copied the good row's weight too.
            batch.weight[row] = 0

    def _mend(self, begun: _Begun, row: int) -> bool:
        """Decode with Pillow a sample that the native decoder refused; return False to skip it."""
        index = int(begun.rows.index[row])
        where = self.source.where(index)
        # This is no fault of the sample, so it is not skipped.
        if begun.decoding.job.samples["status"][row] == native.NO_MEMORY:
            raise UserError(
                f"sample {index}, {where}: out of memory; choose a smaller --batch or --threads"
            )
        try:
            self._decode_by_pillow(begun, row, index, where)
            return True
        except (UserError, OSError) as error:
            why = explain_os_error(error) if isinstance(error, OSError) else str(error)
            what = f"sample {index}: {why}" if where in why else f"sample {index}, {where}: {why}"
            if self.on_bad_sample == "raise":
                raise UserError(what) from error
            print(f"skipped {what}", file=sys.stderr)
            return False

    def _decode_by_pillow(self, begun: _Begun, row: int, index: int, where: str) -> None:
        """Decode a sample with Pillow into its row. UserError if it cannot be read."""
        # `sample` is a view of the record, so what is assigned to it is in `samples`.
        samples = begun.decoding.job.samples[row : row + 1].copy()
        sample, remedy = samples[0], self.source.remedy
        if row in begun.encoded.errors:
            raise UserError(begun.encoded.errors[row])
        if sample["status"] != native.UNSUPPORTED:
            # Only the message of the native decoder distinguishes a damaged map from an image.
            if begun.maps:
                self.source.check_map(index)
            why = sample["message"].decode(errors="replace")
            raise UserError(f"{where} cannot be decoded ({why}); {remedy}")
        pixels = np.asarray(self.source.image(index))
        # The box was drawn for the recorded size, and the View is computed from both.
        if pixels.shape[:2] != (sample["height"], sample["width"]):
            raise UserError(f"{where} has another size than the dataset records; {remedy}")
        image = begun.decoding.image[row]
        crop = np.empty((1, *image.shape), np.uint8)
        sample["bytes"], sample["length"] = pixels.ctypes.data, pixels.nbytes
        sample["kind"] = native.RAW
        native.Job(samples, crop, keep=pixels).decode()
        if sample["status"] != native.OK:
            raise UserError(f"{where} cannot be resized ({sample['message'].decode()}); {remedy}")
        image.copy_(torch.from_numpy(crop[0]))

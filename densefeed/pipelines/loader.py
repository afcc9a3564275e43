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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, repeat
from typing import ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from densefeed import native
from densefeed.pipelines.batch import Batch, ScoreMapSpec, allocate_maps, crop_batch
from densefeed.pipelines.masks import sample_masks
from densefeed.pipelines.plan import EpochPlan, RankRows
from densefeed.pipelines.shapes import Shape
from densefeed.storage.dataset_names import match_forms
from densefeed.storage.parquet_files import Blocks
from densefeed.storage.score_maps import ScoreMaps
from densefeed.system.errors import UserError, explain_os_error
from densefeed.system.terminal import print

CPU = torch.device("cpu")
# Batches in flight while the step works: being decoded, or waiting for the consumer.
AHEAD = 3
# Samples whose random numbers are drawn at once. Decoding and steps displace numpy's code from the
# caches, and loading it again takes longer than the computation.
DRAWN = 2048
# Samples that are drawn before the first batch is submitted, at least a batch. Twice as many follow
# each time, up to DRAWN.
FIRST = 512
# Score maps of small batches are allocated together, in blocks of at most this many bytes: a block
# takes Python 0.3 ms. Larger ones would not stay in the caches.
BLOCK = 4 << 20
# What batches carry beside images: nothing, classes of pixels, or codes of objects.
Masks = bool | Literal["instances"]
# In place of an image that cannot be read: the decoder refuses an empty JPEG.
MISSING = np.empty(0, np.uint8)


@dataclass(eq=False)
class Encoded:
    """The location of N encoded images, perhaps while they are being read.

    A source starts from `np.zeros(N, native.SAMPLE)` and fills these fields, the loader the others:

    - `kind`: `native.JPEG`, `native.RAW` for rows of RGB bytes, 3 * height * width of them, or
      `native.PLANES`.
    - `height`, `width` of the stored image, pixels. The decoder refuses a JPEG of another size.
    - In memory: `bytes`, the address of the encoded image, and `length` in bytes.
    - In a file: `bytes` 0, `file`, a descriptor that stays open until `Source.close`, and `offset`
      and `length` in bytes.

    A sample in `errors` needs values that the decoder refuses, for example MISSING as a JPEG of
    1 x 1 pixels; its error is then reported in place of the decoder's.
    """

    samples: np.ndarray  # native.SAMPLE [N]
    errors: dict[int, str] = field(default_factory=dict)  # row -> why its image cannot be read
    keep: object = None  # owner of the memory behind `bytes`; it lives until the batch is decoded
    # What fetches the samples; all fields are valid once these are done. They are cancelled if the
    # samples are no longer needed, unless they are `shared` with other batches.
    tasks: Sequence[Future] = ()
    shared: bool = False
    # For images that were flipped and augmented as a whole: turns Views and maps of a batch of
    # their crops into those of the stored images.
    follow: Callable[[Batch], Batch] | None = None

    @classmethod
    def in_memory(cls, count: int) -> "Encoded":
        """Return room for the images that `fill` puts into memory."""
        return cls(np.zeros(count, native.SAMPLE), keep=[MISSING] * count)

    def fill(self, row: int, read: Callable[[], tuple[np.ndarray, int, tuple[int, int]]]) -> None:
        """Store what `read` returns: bytes, kind, height and width. An error is that of the row."""
        content, kind, extent = MISSING, native.JPEG, (1, 1)
        try:
            content, kind, extent = read()
        except UserError as error:
            self.errors[row] = str(error)
        except OSError as error:
            self.errors[row] = explain_os_error(error)
        self.keep[row], sample = content, self.samples[row]
        sample["bytes"], sample["length"] = content.ctypes.data, content.nbytes
        sample["kind"], (sample["height"], sample["width"]) = kind, extent

    def wait(self) -> "Encoded":
        """Wait until the samples are fetched."""
        for task in self.tasks:
            task.result()
        return self

    def cancel(self) -> None:
        """Drop the reads that have not started: a process that ends would first finish them."""
        for task in () if self.shared else self.tasks:
            task.cancel()


class Source:
    """Images, labels and score maps of a dataset: the interface between storage and the loaders.

    Derive from it to train from a new storage format. Required are the first four attributes below,
    `where`, `begin` and `image`; with `score_maps` also `map_parts`, `maps` and `check_map`.
    FolderSource reads one file per sample into memory on threads of its own, FfcvSource locates
    samples in a large file.

    Samples are numbered from 0 to `len(labels)` - 1 in storage order, and the numbering must not
    change between runs. `ids` are int64 `[N]`, in any order, and may repeat.

    The loader calls `read_ahead`, `follow`, `begin` and `map_parts` from the thread that iterates
    over the batches. Native threads then read, decode and check the bytes. `image` and `check_map`
    are called for samples that failed there.

    Raise UserError, a sentence with the cause and the remedy, for a sample that cannot be read; the
    loader adds the sample's number and applies `on_bad_sample`. An error from `begin`, its tasks or
    `map_parts` ends the run.
    """

    labels: np.ndarray  # int64 [num_samples], class ids
    fingerprint: str  # identifies the set of images: equal for equal sets; checkpoints compare it
    class_names: list[str]  # one for each class id
    remedy: str  # what to do about an image that cannot be decoded, ends the error message
    score_maps: ScoreMapSpec | None = None  # shape and meaning of the score maps; None without maps
    masks: int | None = None  # samples that have a hard mask; None: `mask` reads none
    instances: bool = False  # whether masks are maps of objects (storage/instances.py)
    teacher: str = ""  # of the score maps, as their store names it; empty: not known
    # of a part that was divided from a folder when it was packed: its dataset, val_fraction and
    # val_seed; checkpoints keep it
    division: dict | None = None

    def where(self, index: int) -> str:
        """Name sample `index` in an error message: its path, or file and number in the file."""
        raise NotImplementedError

    def files(self, most: int) -> list[str]:
        """Return the paths of up to `most` files of samples, evenly spaced, to compare two sets.

        Several samples of a file may follow its path by their names. Empty: not known.
        """
        return []

    def blocks(self) -> Blocks | None:
        """Return the order in which training must read a source that is slow in random order."""

    def extents(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return heights and widths of all stored images, pixels, integers `[num_samples]`.

        Called before the first batch, and only with `--aspects`, which is refused where this is
        None. All ranks and resumed runs must get the same sizes; a damaged image has any positive
        one.
        """

    def read_ahead(self, first: int, end: int) -> None:
        """Prefetch samples `first` to `end` - 1, which will be needed within a window of the plan.

        Have the operating system read them if they are contiguous (posix_fadvise), without
        waiting. Called with order `blocks` only.
        """

    def follow(self, plan: EpochPlan, epoch: int, step: int, index: np.ndarray) -> None:
        """Prepare for `begin` of step `step`, and of later ones, which may be fetched early.

        `index` is the samples of all batches of this rank in the epoch, `[batches, local batch]`.
        """

    def begin(self, ids: np.ndarray) -> Encoded:
        """Start to fetch the samples `ids`, without waiting.

        Several batches are in flight, so it must not reuse the memory of an earlier one. A sample
        that cannot be fetched becomes an entry of `Encoded.errors`.
        """
        raise NotImplementedError

    def image(self, index: int) -> Image.Image:
        """Decode all of sample `index` with Pillow, RGB.

        For images that the native decoder does not support, and for those that are augmented before
        the crop, in place of `begin`; then it is called by several threads at once. Its size must
        be that of `samples`. Raises UserError if it cannot be decoded.
        """
        raise NotImplementedError

    def mask(self, index: int, height: int, width: int) -> Tensor:
        """Return the hard mask of sample `index`: class ids, int64 `[H, W]`, -1 unlabeled.

        `[0, 0]` for a sample without a mask. Only where `masks` is a number; called by several
        threads at once. Raises UserError for a mask that cannot be read, or of another size than
        the image's.
        """
        raise NotImplementedError

    def objects(self, index: int, height: int, width: int) -> list[dict]:
        """Return the objects of sample `index`, see `CocoInstances.objects`; with `instances`.

        Otherwise as `mask`.
        """
        raise NotImplementedError

    def map_parts(self, ids: np.ndarray) -> native.Parts:
        """Locate the score maps of the samples `ids`, without the memory that they are copied to.

        The samples are those of several batches, most of which `begin` has not seen yet.

        The parts are the map fields of Batch in their order, or packed rows. Native threads copy
        them beside the images, and refuse values that `score_maps` does not allow.
        """
        raise NotImplementedError

    def maps(self, ids: np.ndarray) -> ScoreMaps:
        """Read the score maps of the samples `ids` and check them; for maps held on the device.

        Returns copies. Raises UserError for a damaged map.
        """
        raise NotImplementedError

    def check_map(self, index: int) -> None:
        """Raise UserError if the score map of sample `index` is damaged or cannot be read."""

    def close(self) -> None:
        """Close files and stop threads. Called once the loader's own threads have stopped."""


class Preparation(Protocol):
    """Prepares whole images for the crop, in place of `Source.begin`: see WholeImages."""

    def begin(
        self, source: Source, threads: ThreadPoolExecutor, epoch: int, rows: RankRows
    ) -> Encoded:
        """Start to prepare the images of a batch on `threads`, without waiting, with `follow`."""


class Memory:
    """An allocator of the tensors of batches.

    Memory is reused only after the last tensor that shares it is gone, whatever the consumer keeps.
    Where this process uses CUDA it is pinned, and PyTorch's own allocator does this (it also waits
    for copies that a stream has not finished).
    """

    def __init__(self) -> None:
        # Free blocks by their shape and dtype; blocks in use by their identity.
        self._free, self._lent = {}, {}

    @property
    def pinned(self) -> bool:
        """Whether tensors are pinned: not for a CPU, as it would open a context on a GPU."""
        return torch.cuda.is_initialized()

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


@dataclass(eq=False)
class Decoding:
    """The images of a batch while they are decoded."""

    job: native.Job  # its samples' status is the outcome of each; its parts are the score maps
    image: Tensor | None  # uint8 [N, H, W, 3], valid after the wait


class _Maps(NamedTuple):
    """Where the score maps of a batch are read to: rows of memory that other batches share."""

    rows: native.PartRows
    fields: ScoreMaps  # the batch's rows of that memory


class _Planned(NamedTuple):
    """A batch whose images are being fetched."""

    encoded: Encoded
    maps: _Maps | None
    rows: RankRows
    u: np.ndarray  # random numbers of its crops


class _Begun(NamedTuple):
    """A batch in flight."""

    decoding: Decoding
    batch: Batch  # without its image
    encoded: Encoded
    check: bool  # whether the values of its score maps are checked
    masks: Sequence[Future] = ()  # of whole images, if batches carry masks


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
        with_masks: whether batches carry hard masks; the source must have them.

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
        # A plan may have integers of numpy, which Tensor.split refuses.
        self._size = int(plan.batch // plan.ranks)
        self.with_masks: Masks = False
        # Samples whose score maps were read and hold no impossible values.
        self._checked = np.zeros(len(source.labels), bool)
        self._shapes, self._memory = [], Memory()
        self.threads = max(1, threads)
        self._pool = native.Pool(self.threads)
        # Starts its threads when they are needed.
        self._preparing = ThreadPoolExecutor(self.threads, thread_name_prefix="prepare")

    def __len__(self) -> int:
        return self.plan.batches

    def renumber(self, class_names: list[str]) -> None:
        """Number the classes as in `class_names`, which names all of this loader's, and more."""
        numbers = {name: number for number, name in enumerate(class_names)}
        own = match_forms(self.class_names, class_names)
        new = np.array([numbers[name] for name in own], np.int64)
        self.source.labels, self.source.class_names = new[self.source.labels], class_names
        self.class_names, self.num_classes = class_names, len(class_names)

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
        shapes = self.plan.shapes(epoch)
        # Free blocks of other shapes would never be used again. Those of these are kept: for 1,024
        # images an epoch, new pages cost 5 % of the images per second (2 threads, 224 px).
        if shapes != self._shapes:
            self._shapes, self._memory = shapes, Memory()
        fetched, decoding = deque(), deque()
        try:
            # The rounds without a batch empty the queue at the end of the epoch.
            for planned in chain(self._plan(epoch, start, prepare, fetched), repeat(None, AHEAD)):
                if planned:
                    decoding.append(self._submit(*planned))
                if decoding and (len(decoding) == AHEAD or not planned):
                    # Removed only afterwards: `finally` cancels what Ctrl-C interrupts.
                    self._wait(decoding[0].decoding)
                    yield self._finish(decoding.popleft())
        except Exception:
            # If the loader was closed meanwhile, or this is a forked child, report that instead of
            # the error that it caused first.
            self._pool.check()
            raise
        finally:
            for planned in fetched:
                planned.encoded.cancel()
            for begun in decoding:
                self._cancel(begun.decoding)
                for task in begun.masks:
                    task.cancel()

    def _begin(
        self,
        ids: np.ndarray,
        samples: np.ndarray,
        shape: Shape,
        maps: native.PartRows | None,
        keep: object,
    ) -> Decoding:
        """Start to decode crops of `samples`, whose ids are `ids`, and to copy their maps.

        The crops become images of `shape`, height and width in pixels. `keep` is alive until then.
        Does not wait.
        """
        image = self._memory.empty((len(samples), *shape, 3), torch.uint8)
        job = native.Job(samples, image.numpy(), maps, keep)
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

    def _fetch(self, epoch: int, start: int, prepare: Preparation | None) -> Iterator[_Planned]:
        """Start to fetch the batches from `start` on, and draw the numbers of their crops."""
        source, plan, size = self.source, self.plan, self._size
        shard, many = plan.rank_rows(epoch), max(1, DRAWN // size)
        batches = len(shard.index)
        bounds, count = [start], min(max(1, FIRST // size), many)
        while bounds[-1] < batches:
            bounds.append(min(bounds[-1] + count, batches))
            count = min(2 * count, many)
        for first, end in pairwise(bounds):
            drawn = RankRows(*(part[first:end].ravel() for part in shard))
            u = plan.crop_draws(epoch, drawn.index, drawn.repeat)
            maps = self._locate_maps(drawn.index)
            for step in range(first, end):
                here = slice((step - first) * size, (step - first + 1) * size)
                rows = RankRows(*(part[here] for part in drawn))
                source.follow(plan, epoch, step, shard.index)
                # Before `begin`: if this raises, no read of images has been started.
                own = next(maps)
                if prepare is None:
                    encoded = source.begin(rows.index)
                else:
                    # A forked child would wait for threads that it does not have.
                    self._pool.check()
                    encoded = prepare.begin(source, self._preparing, epoch, rows)
                yield _Planned(encoded, own, rows, u[:, here])

    def _locate_maps(self, ids: np.ndarray) -> Iterator[_Maps | None]:
        """Locate the score maps of the samples `ids`, and give memory to each of their batches."""
        if not self.score_maps or not self._maps:
            yield from repeat(None)
        whole, size = self.source.map_parts(ids), self._size
        block = max(1, BLOCK // (self.score_maps.nbytes * size)) * size
        for start in range(0, len(ids), block):
            here = slice(start, start + block)
            # A map that matches its checksum again holds the same values: 2 % of the loader's time.
            check = whole.crc is None or not self._checked[ids[here]].all()
            yield from self._share_block(whole.of(here), check)

    def _share_block(self, parts: native.Parts, check: bool) -> Iterator[_Maps]:
        """Allocate the memory of some batches, and yield the rows of each."""
        fields = allocate_maps(len(parts), self.score_maps, self._memory.empty)
        to = [field.numpy() for field in fields]
        parts = replace(parts, to=to, limits=self.score_maps.limits)
        rows = zip(*(field.split(self._size) for field in fields), strict=True)
        for number, own in enumerate(rows):
            yield _Maps(native.PartRows(parts, number * self._size, check), ScoreMaps(*own))

    def _plan(
        self, epoch: int, start: int, prepare: Preparation | None, fetched: deque[_Planned]
    ) -> Iterator[tuple[Batch, Encoded, _Maps | None]]:
        """Plan the crops of batches from `start` on; yield the arguments of `_submit`.

        `fetched` holds what is being fetched. After the first batch there is one more than is
        needed: the files of a folder are read while earlier ones are decoded.
        """
        step, runs = start, self.plan.runs(epoch, start)
        for planned in chain(self._fetch(epoch, start, prepare), [None]):
            if planned:
                fetched.append(planned)
            if not fetched or (planned and len(fetched) == 1 and step > start):
                continue
            batch = self._crop(epoch, step, fetched[0])
            for run in next(runs):
                self.source.read_ahead(*run)
            yield batch, fetched[0].encoded, fetched[0].maps
            step += 1
            # Removed only afterwards, as in `batches`.
            fetched.popleft()

    def _crop(self, epoch: int, step: int, planned: _Planned) -> Batch:
        """Plan the crops of batch `step`: a batch whose images and maps are not read yet."""
        encoded, maps, rows, u = planned
        samples = encoded.wait().samples
        extents = samples["height"], samples["width"]
        shape = self.plan.shape(epoch, step)
        box, flip = self.plan.crops(epoch, rows.index, *extents, rows.repeat, u, shape)
        # Images that were augmented before the crop are flipped already.
        flip &= encoded.follow is None
        cubic = self.plan.cubic_crops(u)
        samples["box_tlhw"], samples["flip"] = box, flip
        samples["filter"] = np.where(cubic, native.BICUBIC, native.BILINEAR)
        label = torch.from_numpy(self.source.labels[rows.index])
        crops, image = (box, flip, *extents), torch.empty(len(label), 0)
        fields = maps.fields if maps else [None] * 4
        return crop_batch(image, label, crops, rows, fields)._replace(epoch=epoch, step=step)

    def _submit(self, batch: Batch, encoded: Encoded, maps: _Maps | None) -> _Begun:
        """Submit a batch for decoding."""
        ids, rows = batch.index.numpy(), maps and maps.rows
        shape = self.plan.shape(batch.epoch, batch.step)
        decoding = self._begin(ids, encoded.samples, shape, rows, encoded.keep)
        masks = []
        if self.with_masks:
            extents = (encoded.samples[name].tolist() for name in ("height", "width"))
            read, columns = self._preparing.submit, zip(ids.tolist(), *extents, strict=True)
            masks = [read(self.source.mask, *each) for each in columns]
        return _Begun(decoding, batch, encoded, rows is not None and rows.check, masks)

    def _finish(self, begun: _Begun) -> Batch:
        """Handle the bad samples of a decoded batch, and make tensors of it."""
        good, bad = begun.batch.index.numpy(), []
        if self._has_failed(begun.decoding):
            status = begun.decoding.job.samples["status"]
            good = good[status == native.OK]
            bad = [row for row in np.flatnonzero(status).tolist() if not self._mend(begun, row)]
        if begun.check:
            self._checked[good] = True
        batch = begun.batch._replace(image=begun.decoding.image)
        if begun.encoded.follow:
            batch = begun.encoded.follow(batch)
        if self.with_masks:
            batch = self._add_masks(batch, begun.masks, bad)
        if bad:
            self._replace_samples(batch, bad)
        if not self._memory.pinned:
            return batch
        # Large tensors are in pinned memory already; this copies the small ones.
        return batch.map_tensors(lambda field: field if field.is_cuda else field.pin_memory())

    def _add_masks(self, batch: Batch, tasks: Sequence[Future], bad: list[int]) -> Batch:
        """Add the masks at the pixels of the crops; append rows whose mask is skipped to `bad`."""
        size, masks = tuple(batch.image.shape[1:3]), []
        dtype = torch.int32 if self.source.instances else torch.int16
        for row, task in enumerate(tasks):
            mask = torch.empty(0, 0, dtype=torch.int64)
            try:
                mask = task.result()
            except (UserError, OSError) as error:
                index = int(batch.index[row])
                # The image of such a row has been reported already.
                if row not in bad:
                    self.report(index, error)
                    bad.append(row)
            masks.append(mask)

        def sample(pair: tuple[Tensor, Tensor]) -> Tensor:
            return sample_masks([pair[0]], pair[1][None], size)[0].to(dtype)

        # Each on a thread, as it takes milliseconds for 512 x 512 pixels.
        pairs = zip(masks, batch.view, strict=True)
        return batch._replace(mask=torch.stack(list(self._preparing.map(sample, pairs))))

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
            for tensor in batch.tensors.values():
                tensor[row] = tensor[good]
            # After the loop, which has copied the good row's weight too.
            batch.weight[row] = 0

    def _mend(self, begun: _Begun, row: int) -> bool:
        """Decode with Pillow a sample that the native decoder refused; return False to skip it."""
        index = int(begun.batch.index[row])
        where = self.source.where(index)
        # This is not a fault of the sample, so it is not skipped.
        if begun.decoding.job.samples["status"][row] == native.NO_MEMORY:
            raise UserError(
                f"sample {index}, {where}: out of memory; choose a smaller --batch or --threads"
            )
        try:
            self._decode_by_pillow(begun, row, index, where)
            return True
        except (UserError, OSError) as error:
            self.report(index, error)
            return False

    def report(self, index: int, error: UserError | OSError) -> None:
        """Report a sample that cannot be read; UserError unless such samples are skipped."""
        where = self.source.where(index)
        why = explain_os_error(error) if isinstance(error, OSError) else str(error)
        what = f"sample {index}: {why}" if where in why else f"sample {index}, {where}: {why}"
        if self.on_bad_sample == "raise":
            raise UserError(what) from error
        print(f"skipped {what}", file=sys.stderr)

    def _decode_by_pillow(self, begun: _Begun, row: int, index: int, where: str) -> None:
        """Decode a sample with Pillow into its row. UserError if it cannot be read."""
        # `sample` is a view of the record, so what is assigned to it is in `samples`.
        samples = begun.decoding.job.samples[row : row + 1].copy()
        sample, remedy = samples[0], self.source.remedy
        if error := begun.encoded.errors.get(row):
            raise UserError(error)
        if sample["status"] != native.UNSUPPORTED:
            # Only the message of the native decoder distinguishes a damaged map from an image.
            if begun.batch.map_logit is not None:
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

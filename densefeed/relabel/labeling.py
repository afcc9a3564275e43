"""Label a dataset: show every image to the teacher once, and store its top-k logits per cell.

Decoding threads, the teacher and a writing thread work in parallel: a batch is rendered while
earlier ones are scored and written. Several processes, on any machines, label parts of one dataset
(storage/shards.py); they share nothing but their files.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from densefeed.relabel.rendering import PillowRender, Render
from densefeed.relabel.scoring import Precision, Scored, Scorer, choose_precision, find_batch_size
from densefeed.relabel.teacher import Teacher, weights_hash
from densefeed.storage.class_folders import ClassFolders
from densefeed.storage.datasets import MOST_CLASSES
from densefeed.storage.images import Images
from densefeed.storage.row_codecs import Absent, Form
from densefeed.storage.score_maps import ScoreMapStore, ScoreMapWriter, StoreHeader
from densefeed.storage.shards import (
    Shard,
    absorb,
    check_leftovers,
    clean_up,
    find_leftovers,
    find_missing,
    finish,
    merge_if_complete,
)
from densefeed.storage.store_file import MOST, StoreFile
from densefeed.system.errors import UserError, first_line
from densefeed.system.options import Bounds
from densefeed.system.progress import tally
from densefeed.system.terminal import escape_controls, print

# Batches being rendered while one is scored, and batches on the device or being written.
AHEAD, IN_FLIGHT = 3, 2
WHOLE_SET = Shard(0, 1)
# Seconds between reads of other processes' files.
POLL_SECONDS = 1.0

# N images   L pictures of each   H, W side of the teacher's input, pixels
# S cells along a side of a map   K classes


@dataclass
class Speed:
    """Throughput of a labeling pass, and what the teacher waited for."""

    images: int = 0
    seconds: float = 0.0
    images_wait: float = 0.0  # seconds the teacher was idle because images were not yet rendered
    disk_wait: float = 0.0  # seconds it was idle because rows were not yet written

    def __str__(self) -> str:
        seconds = max(self.seconds, 1e-9)
        return (
            f"{self.images:,} images, {self.images / seconds:,.1f} images/s; the teacher waited "
            f"{100 * self.images_wait / seconds:.1f} % of the time for images and "
            f"{100 * self.disk_wait / seconds:.1f} % for the disk"
        )


@dataclass(frozen=True)
class Pass:
    """A teacher ready to label images: what one process needs besides its rows.

    `begin_pass` makes it.
    """

    images: Images | ClassFolders
    header: StoreHeader  # of the whole store
    scorer: Scorer
    render: Render
    pictures_shape: tuple[int, int, int, int]  # L, H, W, 3
    batch: int
    threads: int


def begin_pass(
    images: Images | ClassFolders,
    teacher: Teacher,
    name: str,
    *,
    top_k: int,
    batch: int | Literal["auto"],
    threads: int,
    absent: Absent,
    form: Form = "raw",
    render: Render | None = None,
    precision: Precision = "fp32",
    compiled: bool = False,
) -> Pass:
    """Score one blank image to find the shapes, check the options, choose precision and batch.

    Of a teacher with fewer classes than `top_k` all are kept. Raises UserError for options that are
    impossible, such as a teacher of other classes.
    """
    Bounds(1, MOST["input_size"]).check("input_size", teacher.input_size)
    device, shape = teacher.mean.device, teacher.shape
    scorer = Scorer(teacher, device, choose_precision(precision, device), compiled)
    side, num_classes = score_blank(scorer, name, shape)
    # The caller's teacher lists the pictures, and the scorer's copy of it has counted the cells.
    teacher.cells = scorer.teacher.cells
    if batch != "auto":
        Bounds(1).check("batch", batch)
    if len(images.class_names) != num_classes:
        raise UserError(
            f"{images.root} has {len(images.class_names)} classes but the teacher {name} scores "
            f"{num_classes}; choose a teacher of the same classes, or pass a --class-map"
        )
    kept = min(top_k, num_classes)
    # A lower precision rounds differently, so its name is a part of the teacher's.
    suffix = "" if scorer.precision == "fp32" else f" {scorer.precision}"
    header = StoreHeader(
        side=side,
        top_k=kept,
        num_classes=num_classes,
        absent=absent,
        form=form,
        # A file's name may have bytes that are not UTF-8, which a JSON text cannot hold.
        teacher=f"{escape_controls(name)} {weights_hash(teacher.model)}{suffix}",
        input_size=teacher.input_size,
        geometry=teacher.geometry,
        # That of class folders is known once all were listed (storage/folder_plan.py).
        fingerprint=images.fingerprint() if isinstance(images, Images) else "",
        class_names=tuple(images.class_names),
    )
    if batch == "auto":
        batch = find_batch_size(
            lambda count: scorer.try_out_sync(torch.zeros(count, *shape, dtype=torch.uint8), kept),
            device,
        )
    render = render or PillowRender(images, teacher)
    if isinstance(images, Images):
        # Larger batches are cut at the last image anyway, but their buffers are not.
        batch = min(batch, len(images))
    return Pass(images, header, scorer, render, shape, batch, threads)


def score_blank(scorer: Scorer, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Score one blank image; return S and K.

    Raises UserError if the teacher cannot do that, or has more classes than a store holds.
    """
    blank = torch.zeros(1, *shape, dtype=torch.uint8, device=scorer.device)
    try:
        _, side, _, num_classes = scorer.logits(blank).shape
    except torch.OutOfMemoryError:
        raise UserError(
            f"{name} does not fit into the GPU's memory with one image; choose a smaller "
            "--input-size"
        ) from None
    except (AssertionError, RuntimeError) as error:
        raise UserError(
            f"{name} does not take images of {shape[1]} px ({first_line(error)}); choose another "
            "--input-size"
        ) from error
    if num_classes > MOST_CLASSES:
        raise UserError(
            f"{name} has {num_classes} classes, and a store holds at most {MOST_CLASSES:,}; choose "
            "another teacher"
        )
    return side, num_classes


def finish_pass(
    work: Pass, out: Path, shard: Shard = WHOLE_SET, ranks: bool = False
) -> ScoreMapStore | None:
    """Label every image of a shard that is not labeled yet, and return the finished store.

    Results are written batch by batch, so a killed run resumes at its first unfinished batch, with
    any number of shards: rows that are in the files of another number are copied. A form other than
    raw is made at the end, from the raw rows in `<out>.part`.

    Args:
        shard: the part of the dataset; the process that finishes the last shard merges them.
        ranks: the shards are processes of one command: only the first shows progress, for all of
            them, and it waits for the others.

    Returns None if this shard is finished but others are not. Raises UserError for an image that
    cannot be read or a file of another labeling, BusyError if another process labels this shard.
    """
    count, whole, leads = len(work.images), replace(work.header, form="raw"), shard.index == 0
    if out.exists():
        made = is_made(out, work.header)
        if made:
            # It was killed between the last two steps.
            clean_up(out, whole)
        if not made or shard.of == 1:
            raise UserError(f"{out} exists already; remove it or choose another --out")
        print(f"{out} is finished already")
        return ScoreMapStore(out)
    # Before this labeling creates a file, so that one of another labeling is never mixed with it.
    check_leftovers(out, whole)
    own = shard.file(out)
    if shard.of == 1 or not own.exists():
        store = label_shard(work, out, shard, ranks)
        if store is not None:
            return store
    else:
        shard.header(whole, count).check_same(StoreFile(own).header, own)
        with show_progress(out, shard, ranks, count, np.ones(1, bool)) as update:
            if ranks and leads:
                wait_for_all(out, shard.of, update)
    # Among ranks only the first merges, because it has waited for the others. Independent jobs all
    # try, and the last one to finish succeeds.
    return merge_if_complete(out, shard.of, work.header.form) if leads or not ranks else None


def is_made(out: Path, header: StoreHeader) -> bool:
    """Whether `out` is the finished store of this labeling."""
    try:
        return StoreFile(out).header == header
    except UserError:
        return False


# ------------------------------------------------------------------------------------- one process


def label_shard(work: Pass, out: Path, shard: Shard, ranks: bool) -> ScoreMapStore | None:
    """Label the rows of a shard into its file; return the finished store of a single shard."""
    images, count, own = work.images, len(work.images), shard.file(out)
    header = shard.header(replace(work.header, form="raw"), count)
    rows = shard.rows(count)
    part = slice(rows.start, rows.stop)
    writer = ScoreMapWriter(own, header, images.paths[part], images.labels[part])
    try:
        # Rows that an earlier run with another number of shards has labeled are copied.
        absorb(writer, header, [path for path in find_leftovers(out) if path != writer.part])
        done = int(writer.done.sum())
        if done:
            print(f"{own}: resuming, {done:,} of {len(rows):,} images are labeled already")
        with show_progress(out, shard, ranks, count, writer.done) as update:
            speed = label_rows(work, writer, rows.start, update)
            print(f"{f'shard {shard}: ' if shard.of > 1 else ''}{speed}")
            if shard.of > 1:
                writer.finish()
            if ranks and shard.index == 0:
                wait_for_all(out, shard.of, update)
        return finish(writer, out, work.header.form) if shard.of == 1 else None
    finally:
        writer.close()


def label_rows(
    work: Pass, writer: ScoreMapWriter, start: int, update: Callable[[int], None]
) -> Speed:
    """Label the rows that a writer lacks; its first row is row `start` of the dataset.

    `update` is called with the number of rows done so far.
    """

    def write(ids: np.ndarray, scored: Scored, window_N4: np.ndarray) -> None:
        writer.write(ids - start, scored.maps_sync(window_N4))

    count, done = len(writer.done), int(writer.done.sum())
    batches = [ids + start for ids in unfinished_batches(writer.done, work.batch)]
    return score_batches(work, batches, write, lambda images: update(min(done + images, count)))


def unfinished_batches(done: np.ndarray, batch: int) -> list[np.ndarray]:
    """List the whole batches, cut at multiples of `batch`, in which a row is not done.

    A convolution may add in another order for another number of images. Only if a batch always has
    the same images does a killed and resumed run end with the bytes of an uninterrupted one.
    """
    first = np.unique(np.flatnonzero(~done) // batch) * batch
    return [np.arange(at, min(at + batch, len(done))) for at in first.tolist()]


def score_batches(
    work: Pass,
    batches: list[np.ndarray],
    write: Callable[[np.ndarray, Scored, np.ndarray], None],
    update: Callable[[int], None],
) -> Speed:
    """Render and score batches of images, and pass them to `write` in order, on its own thread.

    An error of rendering or writing is raised here, after the batches scored before it are written.
    `update` is called with the number of images done so far.
    """
    speed, began, cuda = Speed(), time.perf_counter(), work.scorer.device.type == "cuda"
    # A buffer is not overwritten before it is scored and written, so more are never needed. The
    # oldest batch is finished before another one is rendered.
    free = [
        # Copies to a GPU are asynchronous only from pinned memory.
        torch.zeros(work.batch, *work.pictures_shape, dtype=torch.uint8, pin_memory=cuda)
        for _ in range(min(AHEAD + IN_FLIGHT - 1, len(batches)))
    ]
    writing, before = deque(), None
    # One writing thread keeps the rows in order.
    pool, writers = ThreadPoolExecutor(work.threads), ThreadPoolExecutor(1)

    def render_all() -> Iterator[tuple[np.ndarray, Tensor, list[Future]]]:
        for ids in batches:
            pictures = free.pop()
            out = pictures.numpy()
            futures = [pool.submit(work.render, i, out[n]) for n, i in enumerate(ids.tolist())]
            yield ids, pictures, futures

    def finish_oldest_sync() -> None:
        nonlocal before
        written, scored, pictures, images = writing.popleft()
        # First, so that the time of the device does not count as time of the disk.
        scored.wait_sync()
        speed.disk_wait += wait_seconds(written)
        if before is not None:
            speed.images_wait += scored.idle_since(before)
        before = scored
        speed.images += images
        free.append(pictures)
        update(speed.images)

    rendering = render_all()
    ahead = deque(islice(rendering, AHEAD))
    try:
        while ahead:
            ids, pictures, windows = ahead.popleft()
            waited = wait_seconds(*windows)
            # On CUDA, `idle_since` measures it on the device.
            speed.images_wait += 0 if cuda else waited
            scored = work.scorer.begin(pictures, len(ids), work.header.top_k)
            window_N4 = np.array([window.result() for window in windows], np.float32)
            # The writing thread waits for the device, and this one starts the next batch meanwhile.
            future = writers.submit(write, ids, scored, window_N4)
            writing.append((future, scored, pictures, len(ids)))
            if len(writing) == IN_FLIGHT:
                finish_oldest_sync()
            ahead.extend(islice(rendering, 1))
        while writing:
            finish_oldest_sync()
    finally:
        # After an error no further image is rendered, but the batches scored before are written.
        pool.shutdown(cancel_futures=True)
        writers.shutdown()
    speed.seconds = time.perf_counter() - began
    return speed


def wait_seconds(*futures: Future) -> float:
    """Wait for all futures and return the seconds that took; raises the first error in order."""
    began = time.perf_counter()
    for future in futures:
        future.result()
    return time.perf_counter() - began


# ----------------------------------------------------------------------------------- all processes


@contextmanager
def show_progress(
    out: Path, shard: Shard, ranks: bool, count: int, done: np.ndarray
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar over the rows of this process, or of all ranks in the first of them.

    Yields a function that takes the number of rows this process has done; in the other ranks it
    does nothing.
    """
    if ranks and shard.index:
        yield lambda _: None
    elif ranks:
        rows = DoneRows(out, shard.of)
        with tally("relabel, images", count, rows.count()) as update:
            yield lambda _: update(rows.count())
            # The first rank has waited for all.
            update(count)
    else:
        with tally("relabel, images", len(done), int(done.sum())) as update:
            yield update


class DoneRows:
    """Counts the rows that are done in the files of all shards."""

    def __init__(self, out: Path, of: int) -> None:
        self._files = [Shard(index, of).file(out) for index in range(of)]
        self._open: dict[Path, StoreFile] = {}
        # Long enough ago for the first call to read.
        self._count, self._read_at = 0, -POLL_SECONDS

    def count(self) -> int:
        """Return the number of rows done, at most a second old."""
        if time.monotonic() - self._read_at < POLL_SECONDS:
            return self._count
        for file in self._files:
            for path in (file, Path(f"{file}.part")):
                if file not in self._open and path.exists():
                    # Another rank may rename the file at any time. What is open stays valid; if
                    # it was renamed before, the next call finds it.
                    with suppress(UserError):
                        self._open[file] = StoreFile(path)
        self._count = sum(np.count_nonzero(file.read("done")) for file in self._open.values())
        self._read_at = time.monotonic()
        return self._count


def wait_for_all(out: Path, of: int, update: Callable[[int], None]) -> None:
    """Wait until the other ranks have finished their shards.

    If one of them fails, the process that started the ranks ends this one too.
    """
    while not out.exists() and find_missing(out, of):
        time.sleep(POLL_SECONDS / 4)
        update(0)

"""Label a dataset: show every image to the teacher once, and store its top-k logits per cell.

Decoding threads, the teacher and a writing thread work in parallel: a batch is rendered while
earlier ones are scored and written. workers.py divides a dataset among processes.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from densefeed.relabel.rendering import PillowRender, Render
from densefeed.relabel.scoring import Scored, Scorer, find_batch_size
from densefeed.relabel.teacher import Teacher, explain_failures, weights_hash
from densefeed.storage.dataset_names import MOST_CLASSES
from densefeed.storage.images import Images
from densefeed.storage.row_codecs import Absent, Form
from densefeed.storage.score_maps import ScoreMapWriter, StoreHeader
from densefeed.storage.store_file import MOST
from densefeed.system.errors import UserError
from densefeed.system.options import Bounds
from densefeed.system.precision import Precision, choose_precision
from densefeed.system.terminal import escape_controls

# Batches being rendered while one is scored, and batches on the device or being written.
AHEAD, IN_FLIGHT = 3, 2

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

    images: Images
    header: StoreHeader  # of the whole store
    scorer: Scorer
    render: Render
    pictures_shape: tuple[int, int, int, int]  # L, H, W, 3
    batch: int
    threads: int


def begin_pass(
    images: Images,
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

    Of a teacher with fewer classes than `top_k` all are kept. `absent` is `background` of a teacher
    with an unmapped class, whatever is passed. Raises UserError for options that are
    impossible, such as a teacher of other classes.
    """
    Bounds(1, MOST["input_size"]).check("input_size", teacher.input_size)
    device, shape = teacher.mean.device, teacher.shape
    if precision == "fp16" and device.type == "cpu":
        raise UserError("--precision fp16 needs a GPU; choose bf16 or fp32 on a CPU")
    scorer = Scorer(teacher, device, choose_precision(precision, device), compiled)
    side, num_classes = score_blank(scorer, name, shape)
    if teacher.unmapped:
        num_classes, absent = num_classes - 1, "background"
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
        fingerprint=images.fingerprint(),
        class_names=tuple(images.class_names),
    )
    if batch == "auto":
        batch = find_batch_size(
            lambda count: scorer.try_out_sync(torch.zeros(count, *shape, dtype=torch.uint8), kept),
            device,
        )
    render = render or PillowRender(images, teacher)
    # Larger batches are cut at the last image anyway, but their buffers are not.
    batch = min(batch, len(images))
    return Pass(images, header, scorer, render, shape, batch, threads)


def score_blank(scorer: Scorer, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Score one blank image; return S and K.

    Raises UserError if the teacher cannot do that, or has more classes than a store holds.
    """
    blank = torch.zeros(1, *shape, dtype=torch.uint8, device=scorer.device)
    try:
        with explain_failures(name, shape[1], "--input-size"):
            _, *scorer.map_shape = scorer.logits(blank).shape
    except torch.OutOfMemoryError:
        raise UserError(
            f"{name} does not fit into the GPU's memory with one image; choose a smaller "
            "--input-size"
        ) from None
    side, _, num_classes = scorer.map_shape
    if num_classes > MOST_CLASSES:
        raise UserError(
            f"{name} has {num_classes} classes, and a store holds at most {MOST_CLASSES:,}; choose "
            "another teacher"
        )
    return side, num_classes


def label_rows(
    work: Pass, writer: ScoreMapWriter, start: int, update: Callable[[int], None]
) -> Speed:
    """Label the rows that a writer lacks; its first row is row `start` of the dataset.

    `update` is called with the number of rows done so far.
    """

    def write(ids: np.ndarray, scored: Scored, window_N4: np.ndarray) -> None:
        writer.write(ids - start, scored.maps_sync(window_N4, partial(name_image, work, ids)))

    count, done = len(writer.done), int(writer.done.sum())
    batches = [ids + start for ids in unfinished_batches(writer.done, work.batch)]
    return score_batches(work, batches, write, lambda images: update(min(done + images, count)))


def name_image(work: Pass, ids: np.ndarray, row: int) -> str:
    """Return the name of the image in a row of the batch `ids`, for messages."""
    return work.images.where(int(ids[row]))


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
            scored = begin_scoring(work, ids, pictures)
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


def begin_scoring(work: Pass, ids: np.ndarray, pictures: Tensor) -> Scored:
    """Begin to score a batch. UserError that names its first image if the teacher fails."""
    header = work.header
    images = f"{len(ids):,} images from {name_image(work, ids, 0)} on"
    with explain_failures(header.teacher, header.input_size, images=images):
        return work.scorer.begin(pictures, len(ids), header.top_k)


def wait_seconds(*futures: Future) -> float:
    """Wait for all futures and return the seconds that took; raises the first error in order."""
    began = time.perf_counter()
    for future in futures:
        future.result()
    return time.perf_counter() - began

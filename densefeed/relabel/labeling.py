"""The pass: every image once through the teacher, its top-k logits per cell into the store.

Decoding threads, the teacher and a writing thread work side by side: a batch is rendered while the
ones before it are scored and written. Several processes, anywhere, label parts of one dataset
(shards.py); they share nothing but their files.
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
from densefeed.storage.datasets import MOST_CLASSES
from densefeed.storage.images import Images
from densefeed.storage.row_codecs import Form
from densefeed.storage.score_maps import (
    Absent,
    ScoreMapStore,
    ScoreMapWriter,
    StoreHeader,
    map_datasets,
)
from densefeed.storage.shards import (
    Shard,
    absorb,
    check_left_over,
    clean_up,
    finish,
    left_over,
    merge_if_complete,
    missing,
)
from densefeed.system.errors import UserError
from densefeed.system.progress import bar, tally

AHEAD = 3  # batches being rendered while one is scored
IN_FLIGHT = 2  # batches on the device or being written
WHOLE_SET = Shard(0, 1)
LOOK_AGAIN = 1.0  # seconds between looks at other processes' files

# N images   L looks at each   H, W side of the teacher's input   S cells along a side of a map   K classes


@dataclass
class Speed:
    """How a labeling went."""

    images: int = 0
    seconds: float = 0.0
    # seconds that the teacher had nothing to do because images were not rendered yet
    images_wait: float = 0.0
    disk_wait: float = 0.0  # seconds that it waited because rows were not written yet

    def __str__(self) -> str:
        seconds = max(self.seconds, 1e-9)
        return (
            f"{self.images:,} images, {self.images / seconds:,.1f} images/s; of the time the teacher waited "
            f"{100 * self.images_wait / seconds:.1f} % for images and {100 * self.disk_wait / seconds:.1f} % for the disk"
        )


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A teacher ready to label images: all that one process of a pass needs but its rows. Made by
    `begin_pass`.
    """

    images: Images
    header: StoreHeader  # of the whole store
    scorer: Scorer
    render: Render
    look_shape: tuple[int, int, int, int]  # L, H, W, 3
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
    """Look at one image, decide precision and batch. UserError for wishes that cannot be met, as a
    `top_k` beyond the teacher's classes.
    """
    device = teacher.mean.device
    scorer = Scorer(teacher, device, choose_precision(precision, device), compiled)
    look_shape = (
        len(teacher.looks(teacher.input_size, teacher.input_size)),
        teacher.input_size,
        teacher.input_size,
        3,
    )
    try:
        _, side, _, num_classes = scorer.logits(
            torch.zeros(1, *look_shape, dtype=torch.uint8, device=device)
        ).shape
    except torch.OutOfMemoryError:
        raise UserError(
            f"{name} does not fit into the GPU's memory with one image; choose a smaller --input-size"
        ) from None
    except (AssertionError, RuntimeError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{name} does not take images of {teacher.input_size} px ({said}); choose another --input-size"
        ) from error
    if top_k < 1 or threads < 1 or (batch != "auto" and batch < 1):
        raise UserError("--top-k, --batch and --threads must be at least 1")
    if top_k > num_classes:
        raise UserError(f"--top-k {top_k} is more than the {num_classes} classes of {name}")
    if num_classes > MOST_CLASSES:
        raise UserError(
            f"{name} has {num_classes} classes; a store numbers at most {MOST_CLASSES:,}"
        )
    if len(images.class_names) != num_classes:
        raise UserError(
            f"{images.root} has {len(images.class_names)} classes but the teacher {name} scores {num_classes}; "
            "choose a teacher of the same classes, or give a --class-map"
        )
    # other products round otherwise: another teacher
    said = "" if scorer.precision == "fp32" else f" {scorer.precision}"
    header = StoreHeader(
        side=side,
        top_k=top_k,
        num_classes=num_classes,
        absent=absent,
        form=form,
        teacher=f"{name} {weights_hash(teacher.model)}{said}",
        input_size=teacher.input_size,
        geometry=teacher.geometry,
        fingerprint=images.fingerprint(),
        class_names=tuple(images.class_names),
    )
    if batch == "auto":
        batch = find_batch_size(
            lambda count: scorer.try_out(torch.zeros(count, *look_shape, dtype=torch.uint8), top_k),
            device,
        )
    return Pass(
        images=images,
        header=header,
        scorer=scorer,
        render=render or PillowRender(images, teacher),
        look_shape=look_shape,
        batch=batch,
        threads=threads,
    )


def label_images(
    images: Images,
    teacher: Teacher,
    name: str,
    out: Path,
    *,
    shard: Shard = WHOLE_SET,
    ranks: bool = False,
    **options,
) -> ScoreMapStore | None:
    """`begin_pass`, with these options, and `finish_pass`."""
    return finish_pass(begin_pass(images, teacher, name, **options), out, shard, ranks)


def finish_pass(
    work: Pass, out: Path, shard: Shard = WHOLE_SET, ranks: bool = False
) -> ScoreMapStore | None:
    """Label every image of a shard that no file of this labeling holds yet, and return the
    finished store.

    Work is written batch by batch, so a killed run continues at its first unfinished batch, in any
    number of shards: rows that another number of them left are copied. Another form than raw is
    made at the end, of the raw rows in `<out>.part`.

    Args:
        shard: which part of the dataset; whoever finishes the last one merges them.
        ranks: the shards are processes of one command: only the first tells progress, of all, and
            it waits for the others.

    None if this shard is finished but others are not. UserError names an image that cannot be read,
    or a file of another labeling; BusyError if another process labels the same shard.
    """
    images, count = work.images, len(work.images)
    whole, form = replace(work.header, form="raw"), work.header.form
    mine, own, leads = shard.header(whole, count), shard.file(out), shard.index == 0
    if out.exists():
        made = is_made(out, work.header)
        if made:
            clean_up(out, whole)  # killed between the last two steps
        if not made or shard.of == 1:
            raise UserError(f"{out} exists already; remove it or choose another --out")
        print(f"{out} is finished already")
        return ScoreMapStore(out)
    check_left_over(out, whole)
    if shard.of > 1 and own.exists():
        mine.check_same(map_datasets(own)[0], own)
        with telling(out, shard, ranks, count, np.ones(1, bool)) as tell:
            if ranks and leads:
                wait_for_all(out, shard.of, tell)
    else:
        rows = shard.rows(count)
        writer = ScoreMapWriter(
            own, mine, images.paths[rows.start : rows.stop], images.labels[rows.start : rows.stop]
        )
        try:
            absorb(writer, mine, [path for path in left_over(out) if path != writer.part])
            if writer.done.any():
                print(
                    f"{own}: continuing, {int(writer.done.sum()):,} of {len(rows):,} images are labeled already"
                )
            with telling(out, shard, ranks, count, writer.done) as tell:
                speed = label_rows(work, writer, rows.start, tell)
                print(f"{f'shard {shard}: ' if shard.of > 1 else ''}{speed}")
                if shard.of > 1:
                    writer.finish()
                if ranks and leads:
                    wait_for_all(out, shard.of, tell)
            if shard.of == 1:
                store = finish(writer, out, form)
                clean_up(out, whole)
                return store
        finally:
            writer.close()
    return merge_if_complete(out, shard.of, form) if leads or not ranks else None


def is_made(out: Path, header: StoreHeader) -> bool:
    """Whether `out` is the finished store of this labeling."""
    try:
        return map_datasets(out)[0] == header
    except UserError:
        return False


# ------------------------------------------------------------------------------------------------ one process


def label_rows(
    work: Pass, writer: ScoreMapWriter, start: int, tell: Callable[[int], None]
) -> Speed:
    """Label the rows that a writer lacks; its first row is the dataset's `start`. `tell` hears how
    many it has.
    """

    def write(ids: np.ndarray, scored: Scored, window_N4: np.ndarray) -> None:
        writer.write(ids - start, scored.maps(window_N4))

    batches, done = (
        [ids + start for ids in unfinished_batches(writer.done, work.batch)],
        int(writer.done.sum()),
    )
    return score_batches(
        work, batches, write, lambda images: tell(min(done + images, len(writer.done)))
    )


def unfinished_batches(done: np.ndarray, batch: int) -> list[np.ndarray]:
    """The batches, cut at multiples of `batch`, with a row that is not done, whole.

    A convolution's sums may be taken in another order for another number of images: only if a batch
    is always the same images does a run that was killed end with the bytes of one that was not.
    """
    first = np.unique(np.flatnonzero(~done) // batch) * batch
    return [np.arange(at, min(at + batch, len(done))) for at in first.tolist()]


def score_batches(
    work: Pass,
    batches: list[np.ndarray],
    write: Callable[[np.ndarray, Scored, np.ndarray], None],
    tell: Callable[[int], None],
) -> Speed:
    """Render, score and hand on to `write`, in order and on a thread of its own, batches of images.

    An error of rendering or writing surfaces here, after what was scored before it was written.
    `tell` hears how many images are through.
    """
    scorer, speed, began = work.scorer, Speed(), time.perf_counter()
    cuda = scorer.device.type == "cuda"
    # Not overwritten before they are scored and written, so no more are ever needed.
    free = [
        torch.zeros(work.batch, *work.look_shape, dtype=torch.uint8, pin_memory=cuda)
        for _ in range(AHEAD + IN_FLIGHT)
    ]
    writing: deque[tuple[Future, Scored, Tensor, int]] = deque()
    before: Scored | None = None
    pool, writers = ThreadPoolExecutor(work.threads), ThreadPoolExecutor(1)

    def render_all() -> Iterator[tuple[np.ndarray, Tensor, list[Future]]]:
        for ids in batches:
            looks = free.pop()
            out = looks.numpy()
            yield (
                ids,
                looks,
                [pool.submit(work.render, index, out[n]) for n, index in enumerate(ids.tolist())],
            )

    def settle() -> None:
        nonlocal before
        written, scored, looks, images = writing.popleft()
        scored.wait()
        speed.disk_wait += seconds_until(written)
        if before is not None:
            speed.images_wait += scored.idle_since(before)
        before = scored
        speed.images += images
        free.append(looks)
        tell(speed.images)

    rendering = render_all()
    ahead = deque(islice(rendering, AHEAD))
    try:
        while ahead:
            ids, looks, windows = ahead.popleft()
            waited = seconds_until(*windows)
            speed.images_wait += 0 if cuda else waited
            scored = scorer.begin(looks, len(ids), work.header.top_k)
            window_N4 = np.array([window.result() for window in windows], np.float32)
            writing.append((writers.submit(write, ids, scored, window_N4), scored, looks, len(ids)))
            if len(writing) == IN_FLIGHT:
                settle()
            ahead.extend(islice(rendering, 1))
        while writing:
            settle()
    finally:
        pool.shutdown(cancel_futures=True)
        writers.shutdown()
    speed.seconds = time.perf_counter() - began
    return speed


def seconds_until(*futures: Future) -> float:
    """How long it took until all were done; the first one's error in their order, if one has
    failed.
    """
    began = time.perf_counter()
    for future in futures:
        future.result()
    return time.perf_counter() - began


# ------------------------------------------------------------------------------------------------ all processes


@contextmanager
def telling(
    out: Path, shard: Shard, ranks: bool, count: int, done: np.ndarray
) -> Iterator[Callable[[int], None]]:
    """A bar over this process's rows, or of ranks: the first's over all rows, the others' none. It
    is told how many rows this process has.
    """
    if ranks and shard.index:
        yield lambda _: None
    elif ranks:
        rows = DoneRows(out, shard.of)
        with tally("relabel, images", count, rows.count()) as tell:
            yield lambda _: tell(rows.count())
            tell(count)  # the first has waited for all
    else:
        with tally("relabel, images", len(done), int(done.sum())) as tell:
            yield tell


class DoneRows:
    """How many rows of all shards are done, as their files say."""

    def __init__(self, out: Path, of: int) -> None:
        self._files = [Shard(index, of).file(out) for index in range(of)]
        self._done: dict[Path, np.ndarray] = {}
        self._count, self._looked = 0, -LOOK_AGAIN

    def count(self) -> int:
        """As of at most a second ago."""
        if time.monotonic() - self._looked < LOOK_AGAIN:
            return self._count
        for file in self._files:
            for path in (file, Path(f"{file}.part")):
                if file not in self._done and path.exists():
                    # It may get its final name in between; a mapped file stays what it is.
                    with suppress(UserError):
                        self._done[file] = map_datasets(path)[1]["done"]
        self._count = sum(int(np.count_nonzero(done)) for done in self._done.values())
        self._looked = time.monotonic()
        return self._count


def wait_for_all(out: Path, of: int, tell: Callable[[int], None]) -> None:
    """Wait until the other ranks have finished their shards, or one of them has failed and whoever
    began them ends us all.
    """
    while not out.exists() and missing(out, of):
        time.sleep(LOOK_AGAIN / 4)
        tell(0)


def stored_accuracy(store: ScoreMapStore, batch: int = 1024) -> float:
    """Top-1 accuracy of the stored maps: the class of the highest mean logit over the cells,
    against the image labels.

    That mean is what a teacher with a linear head answers itself, so the figure should be close to
    the teacher's own accuracy; if it is not, the maps are wrong. A class that a cell does not name
    counts there with the logit it is stored with: 0, or its even share of the remaining probability
    (at least 1e-3, below which float16 leaves nothing of it).
    """
    header, right = store.header, 0
    for ids in bar(np.array_split(np.arange(len(store)), -(-len(store) // batch)), "read back"):
        maps = store.rows(ids)
        logit, lse = maps.logit.astype(np.float64), maps.lse.astype(np.float64)
        remainder = np.maximum(1 - np.exp(logit - lse[..., None]).sum(-1), 1e-3) / max(
            header.num_classes - header.top_k, 1
        )
        unnamed = lse + np.log(remainder) if header.absent == "tail" else np.zeros_like(lse)
        # Every class begins with the sum of `unnamed` over the cells; where it is named, its own
        # logit takes that place.
        score = np.repeat(unnamed.sum((1, 2))[:, None], header.num_classes, axis=1)
        rows = np.broadcast_to(np.arange(len(ids))[:, None], (len(ids), logit[0].size))
        np.add.at(
            score,
            (rows, maps.cls.reshape(len(ids), -1)),
            (logit - unnamed[..., None]).reshape(len(ids), -1),
        )
        right += int((score.argmax(1) == store.labels[ids]).sum())
    return right / len(store)

"""The thread that runs DALI for a loader: batches in, their images out, and DALI's failures."""

import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from densefeed import native
from densefeed.pipelines.dali_pipeline import INSIDE, build, cover_boxes, feed
from densefeed.pipelines.loader import Decoding, Source
from densefeed.pipelines.shapes import Shape
from densefeed.system.errors import UserError
from densefeed.system.terminal import print

# Pixels of a run's JPEGs per thread: 22 images of 500 x 375. One image is always allowed, whatever
# its size; one of 12 megapixels takes 0.1 s.
RUN_PIXELS = 2**22
# Seconds between polls of the native threads.
PAUSE = 0.0005
# After this many runs in a row that break in DALI, though our decoder finds no damage in them, DALI
# itself is at fault.
FAILURES = 3
# Polls of native.WAIT seconds, together 5 minutes, after which a call of DALI counts as hung. The
# longest one builds the first pipeline. Polls are counted instead of time, because a process that
# was stopped (SIGSTOP) loses time and hangs nowhere.
HUNG_POLLS = round(300 / native.WAIT)


@dataclass(eq=False)
class Work(Decoding):
    """A batch in flight through the native threads and DALI.

    On a GPU `image` is None until the engine allocates it.
    """

    maps: native.PartRows | None
    cuts: np.ndarray
    ids: np.ndarray
    size: Shape
    # Started and not yet finished; the first is the call that starts the others.
    runs: int = 1
    cancelled: bool = False
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Run(NamedTuple):
    """Some rows of a batch, inside DALI. The work owns the memory of the JPEGs."""

    work: Work
    rows: np.ndarray
    jpegs: list[np.ndarray]


class Engine:
    """The thread that owns the pipeline; no other thread touches it.

    It feeds DALI in runs of up to `rows` samples and moves the output into the batch's own memory:
    on a CPU the native threads resize it on the way, on a GPU it is copied. The copy is what makes
    a batch safe on a GPU: PyTorch's allocator does not manage DALI's memory, so it could not wait
    for streams that still use it. The copies finish before the batch is returned, so the streams
    of the consumer need not wait for them.

    An error of a batch becomes that of its work, with a note that names the samples. An error that
    ends the thread is in `error`. `find_hung` finds a call of DALI that does not return.
    """

    alive: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    def __init__(
        self,
        pool: native.Pool,
        threads: int,
        rows: int,
        device: torch.device,
        regions: bool,
        source: Source,
    ) -> None:
        self.pool, self.works, self.closing = pool, queue.SimpleQueue(), False
        self.error: BaseException | None = None
        # Which bytes were checked as a whole and found undamaged, see native.CUT.
        self.sound = np.zeros(len(source.labels), np.uint64)
        self._source, self._number = source, device.index if device.type == "cuda" else None
        self._threads, self._rows, self._device, self._regions = threads, rows, device, regions
        # Built by the first run, on the thread that owns it; the runs inside it.
        self._pipeline, self._inside = None, deque()
        self._failures, self._pid = 0, os.getpid()
        # The run whose call of DALI has not returned yet, in a tuple of its own for every call;
        # that tuple at the last poll, and the polls since then.
        self._call: tuple[Run] | None = None
        self._polled, self._polls = None, 0
        self._thread = threading.Thread(target=self._run, name="dali", daemon=True)
        self._thread.start()
        self.alive.add(self)

    def stop(self) -> None:
        """Stop this thread and the native ones; a forked child has none of them."""
        if os.getpid() == self._pid:
            self.closing = True
            self.works.put(None)
            self.pool.close()
            # The garbage collector may call this on any thread, this one included. A thread that
            # hangs in DALI is left alone; it keeps its memory.
            other = threading.current_thread() is not self._thread
            while other and self._thread.is_alive() and self.find_hung() is None:
                self._thread.join(native.WAIT)

    def find_hung(self) -> "Run | None":
        """Return the run in which DALI hangs, None if it does not.

        Call this every native.WAIT seconds while waiting for the thread.
        """
        call, same = self._call, self._call is self._polled
        self._polls = self._polls + 1 if call and same else 0
        self._polled = call
        return call[0] if call and self._polls >= HUNG_POLLS else None

    def check(self, work: Work) -> None:
        """Raise the error that ended the thread, or UserError if DALI hangs in a call.

        Call this every native.WAIT seconds while waiting for `work`.
        """
        if self.error:
            first = self.name(Run(work, np.arange(len(work.ids)), []))
            # Its type is kept, by which an out-of-memory error is recognized.
            self.error.add_note(f"while --loader dali was to decode {first}")
            raise self.error
        if run := self.find_hung():
            raise UserError(
                f"DALI has hung for {HUNG_POLLS * native.WAIT:.0f} s in a run of {self.name(run)}"
                "; remove this file if it hangs there again, or use --loader ffcv or folder"
            )

    def name(self, run: Run) -> str:
        """Name the samples of a run in an error message."""
        ids = run.work.ids[run.rows]
        more = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
        return f"sample {ids[0]}, {self._source.where(int(ids[0]))}{more}"

    def _run(self) -> None:
        """Process works until the sentinel, None, or an error that is not of a single batch."""
        try:
            with ExitStack() as stack:
                if self._number is not None:
                    # The current device of a new thread is 0, whatever that of others is.
                    stack.enter_context(torch.cuda.device(self._device))
                    stack.enter_context(torch.cuda.stream(torch.cuda.Stream(self._device)))
                stack.callback(self._drain)
                self._process()
        except BaseException as error:
            self.error = error

    def _process(self) -> None:
        """Process works until the sentinel."""
        while not self.closing:
            if self._inside and self.works.empty():
                self._collect()
                continue
            work = self.works.get()
            if work is None:
                break
            self._guard(Run(work, np.arange(len(work.ids)), []), self._begin, work)
            self._end_run(work)
            # Otherwise the batch would live until the next one arrives.
            del work

    def _drain(self) -> None:
        """Wait for the runs inside DALI, which still reads their bytes, and drop the pipeline."""
        for run in self._inside:
            with suppress(Exception), self._calling(run):
                self._pipeline.outputs()
        self._pipeline = None
        self._inside.clear()

    @contextmanager
    def _calling(self, run: Run) -> Iterator[None]:
        """Mark a call of DALI, for `find_hung`."""
        self._call = (run,)
        try:
            yield
        finally:
            self._call = None

    def _guard(self, run: Run, call: Callable, *arguments) -> None:
        """Call a function; an error becomes that of the run's work and wakes the consumer."""
        work = run.work
        try:
            call(*arguments)
        except BaseException as error:
            # The first error is reported: later ones may follow from it.
            if work.error is None:
                if not isinstance(error, UserError):
                    error.add_note(f"while --loader dali decoded {self.name(run)}")
                work.error = error
            work.cancelled = True
            work.done.set()

    def _end_run(self, work: Work) -> None:
        """Wake the thread that waits for a work after the last of its runs."""
        work.runs -= 1
        if not work.runs:
            work.done.set()

    def _begin(self, work: Work) -> None:
        """Feed to DALI the rows of a work that it supports, and decode the others natively."""
        self._wait_native(work.job)
        if work.cancelled:
            return
        samples, cuts = work.job.samples, work.cuts
        good = samples["status"] == native.OK
        self.sound[work.ids[good]] = cuts["sound"][good]
        if work.image is None:
            shape = len(samples), *work.size, 3
            work.image = torch.empty(shape, dtype=torch.uint8, device=self._device)
        rows = np.flatnonzero(good & (cuts["length"] > 0))
        others = np.flatnonzero(good & (cuts["length"] == 0))
        pixels = cuts["height"][rows].astype(np.int64) * cuts["width"][rows]
        for some in self._split_runs(rows, pixels):
            if work.cancelled or self.closing:
                break
            jpegs = [native.memory_at(*place) for place in cuts[["bytes", "length"]][some].tolist()]
            while len(self._inside) >= INSIDE:
                self._collect()
            work.runs += 1
            self._feed(Run(work, some, jpegs))
        if len(others):
            self._decode(work, others)
        # The check covers all of a JPEG, so the damage may lie outside the crop: our own decoder
        # decides whether the crop can be used, as in the other loaders, and checks the map too.
        for row in np.flatnonzero(~good):
            maps = work.maps and work.maps._replace(first=work.maps.first + int(row))
            self._decode(work, row[None], maps)

    def _wait_native(self, job: native.Job) -> None:
        """Wait until the native threads finish a job, and collect DALI's runs meanwhile.

        This way earlier batches are not delayed.
        """
        while not self.pool.ended(job):
            if self._inside:
                self._collect()
            else:
                time.sleep(PAUSE)

    def _split_runs(self, rows: np.ndarray, pixels: np.ndarray) -> list[np.ndarray]:
        """Split rows whose JPEGs have `pixels` pixels each into runs of at least one row."""
        ends, load = [0], 0
        for n, more in enumerate(pixels.tolist()):
            full = load + more > RUN_PIXELS * self._threads
            if n and (n - ends[-1] == self._rows or full):
                ends.append(n)
                load = 0
            load += more
        return np.split(rows, ends[1:]) if len(rows) else []

    def _feed(self, run: Run) -> None:
        work, rows = run.work, run.rows
        samples, cuts = work.job.samples[rows], work.cuts[rows]
        box_tlhw, flip = samples["box_tlhw"].copy(), samples["flip"] != 0
        box_tlhw[:, 0] -= cuts["top"]
        box_tlhw[:, 1] -= cuts["left"]
        on_gpu = self._number is not None
        try:
            with self._calling(run):
                if self._pipeline is None:
                    self._pipeline = build(
                        self._rows, self._threads, self._number, self._regions, on_gpu
                    )
                size = work.size if on_gpu else None
                feed(self._pipeline, run.jpegs, box_tlhw, flip, size, samples["filter"])
        except Exception as error:
            # The error may be that of a run before this one. Those runs are finished first, because
            # recovery drops the pipeline with all that it holds.
            while self._inside:
                self._collect()
            self._guard(run, self._recover, run, error)
            self._end_run(work)
        else:
            self._inside.append(run)

    def _collect(self) -> None:
        """Wait for the oldest run inside DALI, and move its pixels into the batch."""
        run = self._inside.popleft()
        try:
            with self._calling(run):
                (out,) = self._pipeline.outputs()
        except Exception as error:
            self._guard(run, self._recover, run, error)
        else:
            if not run.work.cancelled:
                if self._number is None:
                    self._guard(run, self._resample, run, out)
                else:
                    self._guard(run, self._copy, run.work, run.rows, out.as_tensor())
            self._failures = 0
        self._end_run(run.work)

    def _copy(self, work: Work, rows: np.ndarray, pixels: object) -> None:
        """Copy `pixels` to these rows of the work's image.

        `pixels` is DALI's tensor or an array, uint8 `[len(rows), H, W, 3]`.
        """
        if self._number is None:
            work.image.numpy()[rows] = np.asarray(pixels)
        else:
            where = torch.from_numpy(rows).to(self._device)
            work.image[where] = torch.from_dlpack(pixels).to(self._device)
            # DALI may reuse the memory of `pixels` as soon as this returns.
            torch.cuda.current_stream().synchronize()

    def _resample(self, run: Run, crops: object) -> None:
        """Resize and mirror `crops` with the native threads into the work's image.

        `crops` is DALI's list of uint8 `[height, width, 3]`.
        """
        work, rows = run.work, run.rows
        some = work.job.samples[rows]
        low, high = cover_boxes(some["box_tlhw"])
        some["box_tlhw"][:, :2] -= low
        some["height"], some["width"] = (high - low).T
        some["bytes"] = [crops[n].data_ptr() for n in range(len(rows))]
        some["length"] = 3 * some["height"].astype(np.int64) * some["width"]
        some["kind"] = native.RAW
        # Rows without a gap are written in place.
        pixels = work.image.numpy()[rows[0] : rows[-1] + 1]
        has_gaps = len(pixels) > len(rows)
        if has_gaps:
            pixels = np.empty_like(pixels[: len(rows)])
        # The crops are in DALI's memory, which its list owns.
        job = native.Job(some, pixels, keep=crops)
        self.pool.submit(job)
        # Not _wait_native: it requests the next outputs, and DALI then reuses the memory of these.
        while not self.pool.ended(job):
            time.sleep(PAUSE)
        # `some` is a copy, as is every selection by an array of rows.
        for name in ("status", "message"):
            work.job.samples[name][rows] = some[name]
        if has_gaps:
            self._copy(work, rows, pixels)

    def _decode(self, work: Work, rows: np.ndarray, maps: native.PartRows | None = None) -> None:
        """Decode these rows with the native decoder, and copy their `maps` if these are given.

        Store the outcome in the work's samples.
        """
        some = work.job.samples[rows]
        pixels = np.empty((len(rows), *work.size, 3), np.uint8)
        job = native.Job(some, pixels, maps, keep=work.job)
        self.pool.submit(job)
        self._wait_native(job)
        work.job.samples[rows] = some
        self._copy(work, rows, pixels)

    def _recover(self, run: Run, error: Exception) -> None:
        """Decode a run that failed in DALI natively, and feed the runs behind it to a new pipeline.

        A pipeline is unusable after an error. The native decoder identifies the run's bad samples,
        if there are any.
        """
        later, self._pipeline = list(self._inside), None
        self._inside.clear()
        work, rows = run.work, run.rows
        try:
            # DALI failed on bytes that had passed the check: check them again next time.
            self.sound[work.ids[rows]] = 0
            # The outcome of the samples of a cancelled work is not needed.
            if work.cancelled:
                return
            self._decode(work, rows)
            bad = work.job.samples["status"][rows] != native.OK
            self._failures = 0 if bad.any() else self._failures + 1
            why = " ".join(str(error).partition("encountered:")[2].split() or str(error).split())
            if self._failures >= FAILURES:
                raise UserError(
                    f"DALI failed in {FAILURES} runs whose samples are all readable ({why}), most "
                    f"recently of {self.name(run)}; if it is out of memory, give fewer --threads "
                    "or a smaller --batch; or use --loader ffcv or folder"
                ) from error
            if not bad.any():
                print(
                    f"DALI failed in a run of {len(rows)} samples, {work.ids[rows[0]]} first "
                    f"({why}); decoded natively instead",
                    file=sys.stderr,
                )
        finally:
            # Whatever happened to this run, those behind it need a new pipeline.
            for other in later:
                self._guard(other, self._feed, other)


def stop_all() -> None:
    for engine in list(Engine.alive):
        engine.stop()

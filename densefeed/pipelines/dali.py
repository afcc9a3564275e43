"""`--loader dali`: the plan's crops of a .beton or a folder, decoded and cropped by NVIDIA DALI, on
a GPU resized there too.

Which sample, which crop, flip and map row are the plan's, exactly as with `ffcv` and `folder`; DALI
is fed with encoded bytes and boxes and draws nothing. Its pixels differ: it decodes with full-size
chroma and rounds to 8 bits before they are resized, where our decoder resamples planes. On a CPU a
crop of a photograph is within 0.3 of 255 gray levels of Pillow's crop and resize, and within 0.6 of
the other loaders', each on average over the crop (tests/pipelines/test_dali.py; images one to three
pixels wide up to 4.4); on a GPU the JPEG decoder is another one.

What stands before DALI: our threads read the bytes, cut the segments that the crop needs out of an
indexed JPEG (their checksums looked at), and look for damage in all of a JPEG without index whose
bytes were not looked at before (the CRC-32 of 33 kB takes 3 µs), since DALI takes most of it for
pixels, and the rest breaks its pipeline. What DALI cannot have (raw pixels, JPEGs in which damage
was found, perhaps outside the crop, and whatever breaks the pipeline anyway) our own decoder
decodes, or refuses as in the other loaders. Cut JPEGs are 0.34 as long as whole ones on average
over 500 px photographs, and on a CPU DALI then decodes 1.2 times as many as with its own region
decoder on whole JPEGs. There our threads resize and mirror what it has decoded, straight into the
batch: DALI's own resize takes 1.2 ms of the 1.65 ms that an image would take with it.
"""

import atexit
import ctypes
import functools
import io
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from densefeed import native
from densefeed.pipelines.loader import MapRows, Source, ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.system.errors import UserError

if TYPE_CHECKING:
    from nvidia.dali import Pipeline

INSIDE = 2  # runs of DALI at once, so that it need not wait for Python between them
# Samples of a run: enough for every thread to have several, few enough that what a run decodes
# takes little memory and that a loader which is left ends soon.
LEAST_RUN, RUN_PER_THREAD = 64, 8
# of a run's JPEGs, for each thread: 22 images of 500 x 375, or one of 12 megapixels, which takes
# 0.1 s
RUN_PIXELS = 2**22
# of the JPEGs that the GPU's own engine takes, where it has one; DALI's default
HARDWARE_SHARE = 0.65
CPU = torch.device("cpu")
_built: weakref.WeakSet["Pipeline"] = weakref.WeakSet()  # by this process
_forked = False  # from a process that had built some
PAUSE = 0.0005  # seconds between looks at what the native threads have ready
PROBE_SECONDS = 120  # importing PyTorch and DALI from a network disk takes most of it
# runs in a row that DALI breaks off though our decoder finds nothing wrong: then DALI itself is
# what is wrong
FAILURES = 3


@functools.cache
def check_installed() -> None:
    """UserError if DALI cannot be imported."""
    try:
        import nvidia.dali.pipeline  # noqa: F401
    except (ImportError, OSError) as error:
        raise UserError(
            f"--loader dali needs NVIDIA DALI ({error}); pip install nvidia-dali-cuda130 (nvidia-dali-cuda120 for older drivers)"
        ) from error
    os.register_at_fork(after_in_child=_forget)
    # When the interpreter ends, what was registered last comes first: our threads are to be gone
    # before DALI ends its pipelines.
    atexit.register(_stop_all)


def _forget() -> None:
    """In a forked child: DALI's threads are not there, and at its end DALI would wait for them, or
    crash. So its pipelines are left alone for ever, and it is used no more.
    """
    global _forked
    _forked = bool(_built)
    for pipeline in _built:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pipeline._pipe))
        pipeline._pipe = None


def _stop_all() -> None:
    for engine in list(_Engine.alive):
        engine.stop()


def build(run: int, threads: int, device: int | None, regions: bool, resize: bool) -> "Pipeline":
    """DALI's pipeline of up to `run` samples: JPEGs and boxes in, uint8 `[N, size, size, 3]` or the
    boxes' own pixels out.

    Args:
        device: number of the GPU, None for a CPU pipeline.
        regions: decode only the box of each JPEG; else all of it, and cut the box out then. The
            same pixels.
        resize: without, what comes out are the boxes' pixels as they are, uint8 `[height, width,
            3]` each.
    """
    from nvidia.dali import Pipeline, fn, types

    # A queue of one: a longer one would have DALI ask for several runs before it begins the first.
    # It takes more all the same.
    pipeline = Pipeline(
        batch_size=run,
        num_threads=threads,
        device_id=device,
        prefetch_queue_depth=1,
        exec_dynamic=True,
    )
    with pipeline:
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1, no_copy=True)
        anchor, shape = (
            fn.external_source(name=name, dtype=types.INT32, ndim=1) for name in ("anchor", "shape")
        )
        if resize:
            start, end, size = (
                fn.external_source(name=name, dtype=types.FLOAT, ndim=1)
                for name in ("start", "end", "size")
            )
        how = {"output_type": types.RGB, "adjust_orientation": False}
        if device is not None:  # chroma interpolated as libjpeg does
            how |= {
                "device": "mixed",
                "hw_decoder_load": HARDWARE_SHARE,
                "jpeg_fancy_upsampling": True,
            }
        if regions:
            image = fn.decoders.image_slice(encoded, anchor, shape, axis_names="HW", **how)
        else:
            image = fn.slice(fn.decoders.image(encoded, **how), anchor, shape, axis_names="HW")
        if resize:
            image = fn.resize(
                image,
                size=size,
                roi_start=start,
                roi_end=end,
                interp_type=types.INTERP_TRIANGULAR,
                antialias=True,
            )
        pipeline.set_outputs(image)
    pipeline.build()
    _built.add(pipeline)
    return pipeline


def pixels_of(box_tlhw_N4: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pixels that boxes touch, the native decoder's rule: first row and column, and those
    behind the last, `[N, 2]` each.
    """
    return np.floor(box_tlhw_N4[:, :2]), np.ceil(box_tlhw_N4[:, :2] + box_tlhw_N4[:, 2:] - 1e-9)


def feed(
    pipeline: "Pipeline",
    jpegs: list[np.ndarray],
    box_tlhw_N4: np.ndarray,
    flip_N: np.ndarray,
    size: int | None,
) -> None:
    """Begin a run. `jpegs` must live until it is over.

    Args:
        jpegs: uint8, N of any lengths.
        box_tlhw_N4: crops (top, left, height, width) in pixels of these JPEGs, float64.
        flip_N: whether a crop is mirrored left-right, bool.
        size: of what comes out, pixels; None if the pipeline resizes (and mirrors) nothing.
    """
    low, high = pixels_of(box_tlhw_N4)
    inputs = {
        "encoded": jpegs,
        "anchor": low.astype(np.int32),
        "shape": (high - low).astype(np.int32),
    }
    start = (box_tlhw_N4[:, :2] - low).astype(np.float32)
    end = start + box_tlhw_N4[:, 2:].astype(np.float32)
    # from right to left: mirrored, and no further pass
    start[flip_N, 1], end[flip_N, 1] = (end[flip_N, 1], start[flip_N, 1])
    if size is not None:
        inputs |= {"start": start, "end": end, "size": np.full((len(jpegs), 2), size, np.float32)}
    for name, value in inputs.items():
        pipeline.feed_input(name, value)
    pipeline.schedule_run()


# ------------------------------------------------------------------------- can the GPU decode regions?


def try_regions(device: int) -> None:
    """Decode boxes of JPEGs on a GPU, and compare with a CPU. An exception if they differ; it may
    as well end the process.
    """
    rng = np.random.default_rng(0)
    jpegs, boxes = [], []
    for number in range(32):
        height, width = int(rng.integers(40, 400)), int(rng.integers(40, 400))
        out = io.BytesIO()
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(
            out, "JPEG", quality=90, subsampling=(0, 2)[number % 2]
        )
        jpegs.append(np.frombuffer(out.getvalue(), np.uint8))
        tall, wide = int(rng.integers(8, height)), int(rng.integers(8, width))
        boxes.append((rng.integers(height - tall), rng.integers(width - wide), tall, wide))
    shown = []
    for where in (None, device):
        pipeline = build(len(jpegs), 2, where, regions=True, resize=True)
        feed(pipeline, jpegs, np.array(boxes, float), np.arange(len(jpegs)) % 3 == 0, 96)
        (out,) = pipeline.outputs()
        shown.append(torch.from_dlpack(out.as_tensor()).float().cpu())
    difference = (shown[0] - shown[1]).abs().mean((1, 2, 3)).max().item()
    if difference > 4:
        raise RuntimeError(f"its pixels differ from the CPU's by {difference:.1f} gray levels")


def failure_of(words: list[str], seconds: float) -> str:
    """Run a command in a process of its own: why it failed, or nothing if it did not."""
    # The child finds our modules where this process found them, installed or not.
    known = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            words,
            env=known,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return f"did not answer within {seconds:g} s"
    if done.returncode < 0:
        return f"died of signal {-done.returncode}"
    lines = done.stderr.strip().splitlines()
    return (
        f"failed ({lines[-1].strip() if lines else f'exit code {done.returncode}'})"
        if done.returncode
        else ""
    )


@functools.cache
def why_no_regions(device: int) -> str:
    """Why this GPU's decoder cannot be given regions; empty if it can.

    Tried in a child, since nvImageCodec 0.9, which DALI 2.3 and 2.4 come with, was reported to end
    the process with SIGSEGV on H100 and B200, and to refuse regions on A100 (NVIDIA/nvImageCodec,
    issue 55).
    """
    return failure_of(
        [sys.executable, "-c", f"from {__name__} import try_regions; try_regions({device})"],
        PROBE_SECONDS,
    )


# ------------------------------------------------------------------------- the thread that has the pipeline


class _Work:
    """A batch on its way through the native threads and DALI."""

    def __init__(
        self,
        job: native.Job,
        parts: native.Parts | None,
        cuts: np.ndarray,
        ids: np.ndarray,
        size: int,
        image: Tensor | None,
    ) -> None:
        self.job, self.parts, self.cuts, self.ids, self.size, self.image = (
            job,
            parts,
            cuts,
            ids,
            size,
            image,
        )
        self.runs = 0  # begun and not yet over
        self.cancelled = False
        self.error: BaseException | None = None
        self.done = threading.Event()


class _Run(NamedTuple):
    """Some rows of a batch, inside DALI. The memory of its JPEGs is the work's."""

    work: _Work
    rows: np.ndarray
    jpegs: list[np.ndarray]


class _Engine:
    """A thread that alone touches the pipeline, from its making to its end.

    It feeds DALI in runs of `rows` samples, and what comes out is put into the batch's own memory:
    on a CPU by the native threads, which resize it on its way, on a GPU by a copy. That makes a
    batch safe there: PyTorch's allocator does not know DALI's memory, so it could not wait for the
    streams that still use it. The copies are over before the batch is handed on; streams of the
    consumer need not wait for any.
    """

    alive: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    def __init__(
        self,
        pool: native.Pool,
        threads: int,
        rows: int,
        device: torch.device,
        regions: bool,
        samples: int,
    ) -> None:
        self.pool, self.works, self.closing = pool, queue.SimpleQueue(), False
        # which bytes were looked at as a whole and no damage found, see native.CUT
        self.sound = np.zeros(samples, np.uint64)
        self._number = None if device.type == "cpu" else device.index or 0
        self._threads, self._rows, self._device, self._regions = threads, rows, device, regions
        self._pipeline: Pipeline | None = None
        self._inside: deque[_Run] = deque()
        self._failures, self._pid = 0, os.getpid()
        self._thread = threading.Thread(target=self._run, name="dali", daemon=True)
        self._thread.start()
        self.alive.add(self)

    def stop(self) -> None:
        """End the thread, and the native ones; in a forked child there is none."""
        if os.getpid() == self._pid:
            self.closing = True
            self.works.put(None)
            self.pool.close()
            # the garbage collector may run anywhere
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _run(self) -> None:
        """Work until there is None to do."""
        with ExitStack() as stack:
            if self._number is not None:
                stack.enter_context(torch.cuda.device(self._device))
                stack.enter_context(torch.cuda.stream(torch.cuda.Stream(self._device)))
            while not self.closing:
                if self._inside and self.works.empty():
                    self._collect()
                    continue
                work = self.works.get()
                if work is None:
                    break
                self._guarded(work, self._begin, work)
                self._end(work)
                del work  # else a batch would live until the next one comes
            for _ in self._inside:
                with suppress(Exception):  # nobody waits for them, but DALI still reads their bytes
                    self._pipeline.outputs()
            self._pipeline = None
            self._inside.clear()

    def _guarded(self, work: _Work, do, *arguments) -> None:
        """Call `do`; its error is the work's, and whoever waits for it is told."""
        try:
            do(*arguments)
        except BaseException as error:
            work.error, work.cancelled = work.error or error, True
            work.done.set()

    def _end(self, work: _Work) -> None:
        """If all of a work is over, tell whoever waits."""
        if not work.runs:
            work.done.set()

    def _begin(self, work: _Work) -> None:
        """Give the rows of a work to DALI that it can have, and decode the others here."""
        self._prepared(work.job)
        if work.cancelled:
            return
        samples, cuts = work.job.samples, work.cuts
        good = samples["status"] == native.OK
        self.sound[work.ids[good]] = cuts["sound"][good]
        if work.image is None:
            work.image = torch.empty(
                (len(samples), work.size, work.size, 3), dtype=torch.uint8, device=self._device
            )
        rows, others = (
            np.flatnonzero(good & (cuts["length"] > 0)),
            np.flatnonzero(good & (cuts["length"] == 0)),
        )
        work.runs += 1  # this one
        for some in self._runs(rows, cuts["height"][rows].astype(np.int64) * cuts["width"][rows]):
            if work.cancelled or self.closing:
                break
            jpegs = [native.memory_at(*place) for place in cuts[["bytes", "length"]][some].tolist()]
            while len(self._inside) >= INSIDE:
                self._collect()
            work.runs += 1
            self._feed(_Run(work, some, jpegs))
        if len(others):
            self._decode(work, others)
        # The check looks at all of a JPEG, so its damage may lie outside the crop: whether it can
        # be used our own decoder says, as it does in the other loaders, and of the map with it.
        for row in np.flatnonzero(~good):
            self._decode(work, row[None], work.parts and work.parts.of(row))
        work.runs -= 1

    def _prepared(self, job: native.Job) -> None:
        """Wait for the native threads. Who waits for an earlier batch, gets it meanwhile."""
        while not self.pool.ended(job):
            if self._inside:
                self._collect()
            else:
                time.sleep(PAUSE)

    def _runs(self, rows: np.ndarray, pixels: np.ndarray) -> list[np.ndarray]:
        """Rows whose JPEGs have so many pixels, in runs; one at least in each."""
        ends, load = [], 0
        for n, more in enumerate(pixels.tolist()):
            if n and (
                n - (ends[-1] if ends else 0) == self._rows
                or load + more > RUN_PIXELS * self._threads
            ):
                ends.append(n)
                load = 0
            load += more
        return np.split(rows, ends) if len(rows) else []

    def _feed(self, run: _Run) -> None:
        work, rows = run.work, run.rows
        samples, cuts = work.job.samples[rows], work.cuts[rows]
        box_tlhw = samples["box_tlhw"].copy()
        box_tlhw[:, 0] -= cuts["top"]
        box_tlhw[:, 1] -= cuts["left"]
        try:
            if self._pipeline is None:
                self._pipeline = build(
                    self._rows, self._threads, self._number, self._regions, self._number is not None
                )
            feed(
                self._pipeline,
                run.jpegs,
                box_tlhw,
                samples["flip"] != 0,
                None if self._number is None else work.size,
            )
        except Exception as error:  # of this run, or of one before it
            while self._inside:
                self._collect()
            self._guarded(work, self._recover, run, error)
            work.runs -= 1
            self._end(work)
        else:
            self._inside.append(run)

    def _collect(self) -> None:
        """Wait for the oldest run inside DALI, and put its pixels where they belong."""
        run = self._inside.popleft()
        try:
            (out,) = self._pipeline.outputs()
        except Exception as error:
            self._guarded(run.work, self._recover, run, error)
        else:
            if not run.work.cancelled:
                if self._number is None:
                    self._guarded(run.work, self._resample, run, out)
                else:
                    self._guarded(run.work, self._copy, run.work, run.rows, out.as_tensor())
            self._failures = 0
        run.work.runs -= 1
        self._end(run.work)

    def _copy(self, work: _Work, rows: np.ndarray, pixels: object) -> None:
        """`pixels`, DALI's tensor or an array, uint8 `[len(rows), size, size, 3]`, to these rows of
        the work's image.
        """
        if self._number is None:
            work.image.numpy()[rows] = np.asarray(pixels)
        else:
            work.image[torch.from_numpy(rows).to(self._device)] = torch.from_dlpack(pixels).to(
                self._device
            )
            # DALI may use the memory of `pixels` again from here on
            torch.cuda.current_stream().synchronize()

    def _resample(self, run: _Run, crops: object) -> None:
        """Have the native threads resize and mirror `crops`, DALI's list of uint8 `[height, width,
        3]`, into the work's image.
        """
        work, rows = run.work, run.rows
        some = work.job.samples[rows]
        low, high = pixels_of(some["box_tlhw"])
        some["box_tlhw"][:, :2] -= low
        some["height"], some["width"] = (high - low).T
        some["bytes"] = [crops[n].data_ptr() for n in range(len(rows))]
        some["kind"], some["length"] = (
            native.RAW,
            3 * some["height"].astype(np.int64) * some["width"],
        )
        together = rows[-1] - rows[0] + 1 == len(rows)
        pixels = (
            work.image.numpy()[rows[0] : rows[-1] + 1]
            if together
            else np.empty((len(rows), *work.image.shape[1:]), np.uint8)
        )
        job = native.Job(some, pixels, keep=crops)
        self.pool.submit(job)
        while not self.pool.ended(job):
            time.sleep(PAUSE)
        for field in ("status", "message"):
            work.job.samples[field][rows] = some[field]
        if not together:
            self._copy(work, rows, pixels)

    def _decode(self, work: _Work, rows: np.ndarray, parts: native.Parts | None = None) -> None:
        """Decode these rows with the native decoder, and their maps if `parts` says so; note in the
        work's samples how it went.
        """
        some, pixels = (
            work.job.samples[rows],
            np.empty((len(rows), work.size, work.size, 3), np.uint8),
        )
        job = native.Job(some, pixels, parts, keep=work.job)
        self.pool.submit(job)
        self._prepared(job)
        work.job.samples[rows] = some
        self._copy(work, rows, pixels)

    def _recover(self, run: _Run, error: Exception) -> None:
        """DALI broke a run off, and its pipeline is of no use any more: decode that run here, which
        names its bad samples, if any, and give the runs behind it to a new pipeline.
        """
        later, self._pipeline = list(self._inside), None
        self._inside.clear()
        work, rows = run.work, run.rows
        try:
            self.sound[work.ids[rows]] = 0
            if work.cancelled:  # nobody will ask how its samples are
                return
            self._decode(work, rows)
            bad = work.job.samples["status"][rows] != native.OK
            self._failures = 0 if bad.any() else self._failures + 1
            why = " ".join(str(error).partition("encountered:")[2].split() or str(error).split())
            if self._failures >= FAILURES:
                raise UserError(
                    f"DALI broke off {FAILURES} runs in which nothing is wrong ({why}); give fewer --threads or a smaller --batch "
                    "if its memory is used up, or use --loader ffcv or folder"
                ) from error
            if not bad.any():
                named = f"{len(rows)} samples, {work.ids[rows[0]]} first"
                print(
                    f"DALI broke off a run of {named} ({why}); our own decoder has read them",
                    file=sys.stderr,
                    flush=True,
                )
        finally:
            for other in later:
                self._guarded(other.work, self._feed, other)


# ------------------------------------------------------------------------- the loader


class DaliLoader(ThreadedLoader):
    """Batches of a source under a plan, as ThreadedLoader's, decoded by DALI.

    Args:
        source: the samples: FfcvSource or FolderSource.
        device: where DALI decodes. With CUDA a batch's image is there already, and all else in
            pinned memory.
        plan, threads, on_bad_sample, maps: as ThreadedLoader's.

    Raises UserError if DALI is not installed, and in a process that was forked while DALI was at
    work.
    """

    def __init__(
        self,
        source: Source,
        plan: EpochPlan,
        threads: int,
        on_bad_sample: Literal["raise", "skip"] = "raise",
        maps: bool = True,
        device: torch.device = CPU,
    ) -> None:
        check_installed()
        if _forked:
            raise UserError(
                "this process was forked from one that used DALI, which works in none; start processes by spawn"
            )
        super().__init__(source, plan, threads, on_bad_sample, maps)
        regions, self._device = True, device
        if device.type != "cpu":
            why = why_no_regions(device.index or 0)
            regions = not why
            if plan.rank == 0:
                print(
                    f"DALI decodes {f'whole JPEGs on {device}: its decoder of regions {why}' if why else f'regions on {device}'}"
                )
        rows = min(len(plan.rows), max(LEAST_RUN, RUN_PER_THREAD * threads))
        self._engine = _Engine(self._pool, max(1, threads), rows, device, regions, plan.num_samples)
        self._end = weakref.finalize(self, self._engine.stop)

    def close(self) -> None:
        """Stop the threads; what they work on is finished, what waits is dropped."""
        self._end()
        super().close()

    def _begin(
        self, samples: np.ndarray, ids: np.ndarray, size: int, maps: MapRows | None, keep: object
    ) -> _Work:
        lengths = np.where(samples["kind"] == native.RAW, 0, samples["length"])
        room, cuts = np.empty(int(lengths.sum()), np.uint8), np.zeros(len(ids), native.CUT)
        cuts["bytes"] = room.ctypes.data + np.cumsum(lengths) - lengths
        cuts["sound"] = self._engine.sound[ids]
        parts = maps.parts if maps else None
        job = native.Job(samples, cuts, parts, [keep, room])
        image = (
            self._memory.empty((len(ids), size, size, 3), torch.uint8)
            if self._device.type == "cpu"
            else None
        )
        work = _Work(job, parts, cuts, ids, size, image)
        self._pool.submit(job)
        self._engine.works.put(work)
        return work

    def _wait(self, decoding: _Work) -> None:
        while not decoding.done.wait(native.WAIT):
            self._pool.check()
        if decoding.error:
            raise decoding.error
        if decoding.image.is_cuda:
            decoding.image.record_stream(torch.cuda.current_stream(self._device))

    def _cancel(self, decoding: _Work) -> None:
        decoding.cancelled = True
        self._pool.cancel(decoding.job)

"""`--loader dali`: the plan's crops of a .beton or a folder, decoded and cropped by NVIDIA DALI.

On a GPU the crops are also resized there. Samples, crops, flips and map rows come from the plan,
exactly as with `ffcv` and `folder`; DALI receives encoded bytes and boxes and draws nothing. Its
pixels differ: it decodes with full-size chroma and rounds to 8 bits before the resize, where our
decoder resamples planes. On a CPU a crop of a photograph is within 0.3 of 255 gray levels of
Pillow's crop and resize, and within 0.6 of the other loaders', each on average over the crop
(tests/pipelines/test_dali.py; up to 4.4 for images one to three pixels wide). Single pixels are
within 1 of Pillow's, and within 30 of the other loaders', which clip colors after the resize. On a
GPU the JPEG decoder is another one.

Before DALI, the native threads read the bytes and cut the segments that the crop needs out of an
indexed JPEG, checking their checksums. They check all of a JPEG that was not checked before, which
the CRC-32 of its header (with index) or of its bytes tells (33 kB take 3 µs), since DALI decodes
most damage as pixels, and the rest breaks its pipeline. The native decoder decodes, or refuses as
in the other loaders, what DALI cannot: raw pixels, planes, JPEGs with damage (without an index
perhaps outside the crop), and any run that breaks the pipeline.

Over 500 px photographs cut JPEGs are on average 0.34 as long as whole ones, and on a CPU DALI then
decodes 1.2 times as many as with its own region decoder on whole JPEGs. On a CPU the native threads
resize and mirror the decoded crops straight into the batch: DALI's own resize takes 1.2 ms of the
1.65 ms that an image would take with it.
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image

from densefeed import native
from densefeed.pipelines.loader import CPU, Decoding, Source, ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.shapes import Shape
from densefeed.storage import indexed_jpeg
from densefeed.system.errors import UserError, install_extra
from densefeed.system.terminal import print

if TYPE_CHECKING:
    from nvidia.dali import Pipeline

# Runs in flight inside DALI, so that it does not wait for Python between them.
INSIDE = 2
# Samples of a run: enough for every thread to have several, few enough that the decoded pixels take
# little memory and that a loader stops soon after an epoch is left early.
LEAST_RUN, RUN_PER_THREAD = 64, 8
# Pixels of a run's JPEGs per thread: 22 images of 500 x 375. One image is always allowed, whatever
# its size; one of 12 megapixels takes 0.1 s.
RUN_PIXELS = 2**22
# Pipelines of this process.
_built: weakref.WeakSet["Pipeline"] = weakref.WeakSet()
# Whether this process was forked from one that had built pipelines.
_forked = False
# Seconds between polls of the native threads.
PAUSE = 0.0005
# Importing PyTorch and DALI from a network disk takes most of it.
PROBE_SECONDS = 120
# The last line that a probe prints if regions were decoded.
PROBE_RESULT = "regions decoded"
# After this many runs in a row that break in DALI, though our decoder finds no damage in them, DALI
# itself is at fault.
FAILURES = 3
# Polls of native.WAIT seconds, together 5 minutes, after which a call of DALI counts as hung. The
# longest one builds the first pipeline. Polls are counted instead of time, because a process that
# was stopped (SIGSTOP) loses time and hangs nowhere.
HUNG_POLLS = round(300 / native.WAIT)


@functools.cache
def check_installed() -> None:
    """Raise UserError if DALI cannot be imported; register its clean-up otherwise."""
    try:
        import nvidia.dali.pipeline  # noqa: F401
    except (ImportError, OSError) as error:
        raise UserError(
            f"--loader dali needs NVIDIA DALI ({error}); {install_extra('dali')}, or, for older "
            "drivers, `pip install nvidia-dali-cuda120`"
        ) from error
    os.register_at_fork(after_in_child=_forget)
    # At exit, functions run in reverse order of registration: our threads must stop before DALI
    # destroys its pipelines.
    atexit.register(_stop_all)


def _forget() -> None:
    """Leak all pipelines in a forked child, and refuse further use of DALI there.

    The child lacks DALI's threads; destroying a pipeline would wait for them forever, or crash.
    """
    global _forked
    _forked = bool(_built)
    for pipeline in _built:
        # An extra reference that is never released, so that its destructor never runs.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pipeline._pipe))
        pipeline._pipe = None


def _stop_all() -> None:
    for engine in list(_Engine.alive):
        engine.stop()


def build(run: int, threads: int, device: int | None, regions: bool, resize: bool) -> "Pipeline":
    """Build DALI's pipeline for up to `run` samples: JPEGs and boxes in, pixels out.

    Args:
        threads: DALI's CPU threads.
        device: number of the GPU; None for a CPU pipeline.
        regions: decode only the box of each JPEG; otherwise decode all of it and cut the box out,
            with the same pixels.
        resize: return uint8 `[N, H, W, 3]`; otherwise the pixels of each box as they are,
            uint8 `[height, width, 3]`.
    """
    from nvidia.dali import Pipeline, fn, types

    # With a longer queue DALI would require several runs before it starts the first. A queue of one
    # accepts more than one run all the same.
    pipeline = Pipeline(
        batch_size=run,
        num_threads=threads,
        device_id=device,
        prefetch_queue_depth=1,
        exec_dynamic=True,
    )
    with pipeline:
        # no_copy: DALI reads the bytes in place, so a _Run keeps them alive.
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1, no_copy=True)

        def pair(name: str, dtype: object) -> object:
            return fn.external_source(name=name, dtype=dtype, ndim=1)

        def number(name: str) -> object:
            return fn.external_source(name=name, dtype=types.INT32, ndim=0)

        anchor, shape = pair("anchor", types.INT32), pair("shape", types.INT32)
        # The teacher of the maps and the other loaders ignore EXIF orientation too.
        options = {"adjust_orientation": False}
        if device is not None:
            # Fancy upsampling interpolates chroma as libjpeg does.
            options |= {"device": "mixed", "jpeg_fancy_upsampling": True}
        # By default DALI expects (x, y), which would swap the axes of our boxes.
        if regions:
            image = fn.decoders.image_slice(encoded, anchor, shape, axis_names="HW", **options)
        else:
            image = fn.slice(fn.decoders.image(encoded, **options), anchor, shape, axis_names="HW")
        if resize:
            image = fn.resize(
                image,
                size=pair("size", types.FLOAT),
                roi_start=pair("start", types.FLOAT),
                roi_end=pair("end", types.FLOAT),
                # DALI refuses integers in place of its own type.
                interp_type=fn.reinterpret(number("filter"), dtype=types.INTERP_TYPE),
                antialias=True,
            )
        pipeline.set_outputs(image)
    pipeline.build()
    _built.add(pipeline)
    return pipeline


def cover_boxes(box_tlhw_N4: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round boxes outward to the pixels they touch, by the native decoder's rule.

    Return the first row and column, and those behind the last, `[N, 2]` each.
    """
    # 1e-9: a box that rounding ends just behind a pixel does not touch the next (resample.c).
    return np.floor(box_tlhw_N4[:, :2]), np.ceil(box_tlhw_N4[:, :2] + box_tlhw_N4[:, 2:] - 1e-9)


def feed(
    pipeline: "Pipeline",
    jpegs: list[np.ndarray],
    box_tlhw_N4: np.ndarray,
    flip_N: np.ndarray,
    size: int | Shape | None,
    filter_N: np.ndarray | None = None,
) -> None:
    """Start a run. `jpegs` must live until the run is finished.

    Args:
        jpegs: N arrays, uint8 of any lengths.
        box_tlhw_N4: crops (top, left, height, width) in pixels of these JPEGs, float64.
        flip_N: whether a crop is mirrored left-right, bool.
        size: side of the output, or height and width, pixels; None if the pipeline neither resizes
            nor mirrors.
        filter_N: native.BILINEAR or native.BICUBIC for each crop; None: all bilinear.
    """
    low, high = cover_boxes(box_tlhw_N4)
    inputs = {
        "encoded": jpegs,
        "anchor": low.astype(np.int32),
        "shape": (high - low).astype(np.int32),
    }
    if size is not None:
        start = (box_tlhw_N4[:, :2] - low).astype(np.float32)
        end = start + box_tlhw_N4[:, 2:].astype(np.float32)
        # A region of interest from right to left mirrors the image without a further pass.
        start[flip_N, 1], end[flip_N, 1] = end[flip_N, 1], start[flip_N, 1]
        inputs |= {"start": start, "end": end, "size": np.full((len(jpegs), 2), size, np.float32)}
        inputs["filter"] = dali_filters(np.zeros(len(jpegs)) if filter_N is None else filter_N)
    for name, value in inputs.items():
        pipeline.feed_input(name, value)
    pipeline.schedule_run()


def dali_filters(filter_N: np.ndarray) -> np.ndarray:
    """Translate native.BILINEAR and BICUBIC to DALI's numbers of the same filters: int32 `[N]`."""
    from nvidia.dali import types

    # Both are Pillow's. DALI deprecates the other name of the first, triangular.
    cubic, linear = int(types.INTERP_CUBIC), int(types.INTERP_LINEAR)
    return np.where(filter_N == native.BICUBIC, cubic, linear).astype(np.int32)


# --------------------------------------------------------------- can the GPU decode regions?


def try_regions(device: int) -> None:
    """Decode boxes of JPEGs on a GPU and compare the pixels with a CPU's.

    Raises an exception if they differ by more than 4 gray levels; it may also kill the process.
    """
    jpegs, boxes = make_probe_jpegs(64)
    flips, shown = np.arange(len(jpegs)) % 3 == 0, []
    for where in (None, device):
        pipeline = build(len(jpegs), 2, where, regions=True, resize=True)
        # As many runs in flight as a loader has.
        for _ in range(INSIDE):
            feed(pipeline, jpegs, boxes, flips, 96)
        runs = [pipeline.outputs()[0].as_tensor() for _ in range(INSIDE)]
        shown.append(torch.stack([torch.from_dlpack(run).float().cpu() for run in runs]))
    difference = (shown[0] - shown[1]).abs().mean((2, 3, 4)).max().item()
    if difference > 4:
        raise RuntimeError(f"its pixels differ from the CPU's by {difference:.1f} gray levels")


def make_probe_jpegs(count: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Make JPEGs of the kinds that a loader feeds, and a box in each, `[count, 4]` float64.

    They are 4:4:4, 4:2:0, gray, and 4:2:0 with the restart markers of a segment index.
    """
    rng, jpegs, boxes = np.random.default_rng(0), [], []
    for number in range(count):
        extent, out = rng.integers(40, 600, 2), io.BytesIO()
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        image, kind = coarse.resize(extent[::-1].tolist()), number % 4
        image = image.convert("L") if kind == 2 else image
        image.save(out, "JPEG", subsampling=0 if kind in (0, 2) else 2)
        jpeg = indexed_jpeg.transcode(out.getvalue()) if kind == 3 else out.getvalue()
        jpegs.append(np.frombuffer(jpeg, np.uint8))
        side = rng.integers(8, extent)
        boxes.append((*rng.integers(extent - side), *side))
    return jpegs, np.array(boxes, float)


def explain_failure(command: list[str], seconds: float) -> str:
    """Run a command in a child process; return why it failed, or an empty string.

    It succeeds if it ends with exit code 0 within `seconds` and PROBE_RESULT is the last line of
    its standard output: a child that ran something else has proven nothing.
    """
    # The child imports our modules from where this process found them, installed or not.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command,
            env=environment,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return f"did not finish within {seconds:g} s"
    if done.returncode < 0:
        return f"was killed by signal {-done.returncode}"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return f"failed ({lines[-1].strip()})"
    return "" if done.stdout.strip().endswith(PROBE_RESULT) else "ended without a result"


@functools.cache
def probe_regions(device: int) -> str:
    """Test whether this GPU's decoder supports regions: why not, or an empty string.

    Runs in a child process: nvImageCodec 0.9, part of DALI 2.3 and 2.4, was reported to end the
    process with SIGSEGV on H100 and B200, and to refuse regions on A100 (NVIDIA/nvImageCodec,
    issue 55).
    """
    return explain_failure(probe_command(device), PROBE_SECONDS)


def probe_command(device: int) -> list[str]:
    """Return the command of the child process that decodes regions on this GPU."""
    code = f"from {__name__} import try_regions; try_regions({device}); print({PROBE_RESULT!r})"
    return [sys.executable, "-c", code]


# ----------------------------------------------------------- the thread that owns the pipeline


@dataclass(eq=False)
class _Work(Decoding):
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


class _Run(NamedTuple):
    """Some rows of a batch, inside DALI. The work owns the memory of the JPEGs."""

    work: _Work
    rows: np.ndarray
    jpegs: list[np.ndarray]


class _Engine:
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
        self._call: tuple[_Run] | None = None
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

    def find_hung(self) -> "_Run | None":
        """Return the run in which DALI hangs, None if it does not.

        Call this every native.WAIT seconds while waiting for the thread.
        """
        call, same = self._call, self._call is self._polled
        self._polls = self._polls + 1 if call and same else 0
        self._polled = call
        return call[0] if call and self._polls >= HUNG_POLLS else None

    def name(self, run: _Run) -> str:
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
            self._guard(_Run(work, np.arange(len(work.ids)), []), self._begin, work)
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
    def _calling(self, run: _Run) -> Iterator[None]:
        """Mark a call of DALI, for `find_hung`."""
        self._call = (run,)
        try:
            yield
        finally:
            self._call = None

    def _guard(self, run: _Run, call: Callable, *arguments) -> None:
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

    def _end_run(self, work: _Work) -> None:
        """Wake the thread that waits for a work after the last of its runs."""
        work.runs -= 1
        if not work.runs:
            work.done.set()

    def _begin(self, work: _Work) -> None:
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
            self._feed(_Run(work, some, jpegs))
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

    def _feed(self, run: _Run) -> None:
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

    def _copy(self, work: _Work, rows: np.ndarray, pixels: object) -> None:
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

    def _resample(self, run: _Run, crops: object) -> None:
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

    def _decode(self, work: _Work, rows: np.ndarray, maps: native.PartRows | None = None) -> None:
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

    def _recover(self, run: _Run, error: Exception) -> None:
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


# ------------------------------------------------------------------------------- the loader


class DaliLoader(ThreadedLoader):
    """ThreadedLoader, decoded by DALI.

    Args:
        source: the samples, for example FfcvSource or FolderSource.
        device: where DALI decodes. With CUDA the image of a batch is on that device already, and
            the other fields are in pinned memory. `cuda` without an index is the current device
            of the calling thread.
        plan, threads, on_bad_sample, maps: as in ThreadedLoader.

    Raises UserError if DALI is not installed, and in a process that was forked from one that used
    DALI. `batches` raises UserError where DALI hangs; the thread that hangs is not stopped.
    """

    # It would decode no JPEG at all.
    prepares = False

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
                "DALI does not survive a fork of a process that used it; start processes by spawn"
            )
        if device.type == "cuda" and device.index is None:
            # Resolved here, because DALI takes a number, and every thread has a current device.
            device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(source, plan, threads, on_bad_sample, maps, device)
        why = "" if device.type == "cpu" else probe_regions(device.index)
        if device.type != "cpu" and plan.rank == 0:
            what = f"whole JPEGs, as its region decoder {why}" if why else "regions"
            print(f"DALI on {device} decodes {what}")
        rows = min(len(plan.rows), max(LEAST_RUN, RUN_PER_THREAD * threads))
        self._engine = _Engine(self._pool, max(1, threads), rows, device, not why, source)
        # A loader that is dropped without `close` stops its threads too.
        self._end = weakref.finalize(self, self._engine.stop)

    def close(self) -> None:
        """Stop the threads: samples being decoded are finished, queued ones are dropped."""
        # The engine uses the pool and the source's memory, so it stops first.
        self._end()
        super().close()

    def _begin(
        self,
        ids: np.ndarray,
        samples: np.ndarray,
        shape: Shape,
        maps: native.PartRows | None,
        keep: object,
    ) -> _Work:
        # DALI gets no raw images and no planes, so they need no room.
        lengths = np.where(samples["kind"] == native.JPEG, samples["length"], 0)
        room = np.empty(int(lengths.sum()), np.uint8)
        cuts = np.zeros(len(ids), native.CUT)
        cuts["bytes"] = room.ctypes.data + np.cumsum(lengths) - lengths
        cuts["sound"] = self._engine.sound[ids]
        job = native.Job(samples, cuts, maps, [keep, room])
        image = None
        if self._device.type == "cpu":
            image = self._memory.empty((len(ids), *shape, 3), torch.uint8)
        work = _Work(job, image, maps, cuts, ids, shape)
        self._pool.submit(job)
        self._engine.works.put(work)
        return work

    def _has_failed(self, decoding: _Work) -> bool:
        # The engine decodes again what failed natively.
        return bool(decoding.job.samples["status"].any())

    def _wait(self, decoding: _Work) -> None:
        # With a timeout: in a forked child, or once the pool is closed, nothing sets the event.
        while not decoding.done.wait(native.WAIT):
            self._pool.check()
            self._check_engine(decoding)
        if decoding.error:
            raise decoding.error
        if decoding.image.is_cuda:
            # Allocated on the engine's stream, which must not reuse its memory while it is read.
            decoding.image.record_stream(torch.cuda.current_stream(self._device))

    def _check_engine(self, decoding: _Work) -> None:
        """Raise the error that ended the engine's thread, or UserError if DALI hangs in a call."""
        engine = self._engine
        if engine.error:
            first = engine.name(_Run(decoding, np.arange(len(decoding.ids)), []))
            # Its type is kept, by which an out-of-memory error is recognized.
            engine.error.add_note(f"while --loader dali was to decode {first}")
            raise engine.error
        if run := engine.find_hung():
            raise UserError(
                f"DALI has hung for {HUNG_POLLS * native.WAIT:.0f} s in a run of {engine.name(run)}"
                "; remove this file if it hangs there again, or use --loader ffcv or folder"
            )

    def _cancel(self, decoding: _Work) -> None:
        decoding.cancelled = True
        self._pool.cancel(decoding.job)

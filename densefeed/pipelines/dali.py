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
import functools
import os
import weakref
from typing import Literal

import numpy as np
import torch

from densefeed import native
from densefeed.pipelines import dali_pipeline
from densefeed.pipelines.dali_engine import Engine, Work, stop_all
from densefeed.pipelines.dali_probe import probe_regions
from densefeed.pipelines.loader import CPU, Source, ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.shapes import Shape
from densefeed.system.errors import UserError, install_extra
from densefeed.system.terminal import print

# Samples of a run: enough for every thread to have several, few enough that the decoded pixels take
# little memory and that a loader stops soon after an epoch is left early.
LEAST_RUN, RUN_PER_THREAD = 64, 8


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
    os.register_at_fork(after_in_child=dali_pipeline.forget)
    # At exit, functions run in reverse order of registration: our threads must stop before DALI
    # destroys its pipelines.
    atexit.register(stop_all)


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
        if dali_pipeline.was_forked():
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
        self._engine = Engine(self._pool, max(1, threads), rows, device, not why, source)
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
    ) -> Work:
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
        work = Work(job, image, maps, cuts, ids, shape)
        self._pool.submit(job)
        self._engine.works.put(work)
        return work

    def _has_failed(self, decoding: Work) -> bool:
        # The engine decodes again what failed natively.
        return bool(decoding.job.samples["status"].any())

    def _wait(self, decoding: Work) -> None:
        # With a timeout: in a forked child, or once the pool is closed, nothing sets the event.
        while not decoding.done.wait(native.WAIT):
            self._pool.check()
            self._engine.check(decoding)
        if decoding.error:
            raise decoding.error
        if decoding.image.is_cuda:
            # Allocated on the engine's stream, which must not reuse its memory while it is read.
            decoding.image.record_stream(torch.cuda.current_stream(self._device))

    def _cancel(self, decoding: Work) -> None:
        decoding.cancelled = True
        self._pool.cancel(decoding.job)

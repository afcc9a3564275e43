"""Estimate the cost of a labeling pass: hours, bytes on disk, and memory.

A few batches are labeled and not kept.
"""

import math
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from densefeed.relabel.labeling import Pass, name_image, score_batches
from densefeed.relabel.scoring import Scored
from densefeed.storage.images import sample_evenly
from densefeed.storage.row_codecs import Form, row_sizes
from densefeed.storage.score_maps import palette_sizes, row_types
from densefeed.system.devices import peak_rss

# Batches timed, after one to warm up.
BATCHES = 8
# Images rendered alone, on one thread.
RENDERED = 64
DEVICES = (1, 8, 64)
# Images of ImageNet-1k's training split.
IMAGENET = 1_281_167


class Estimate(NamedTuple):
    """Measurements on one device, and the cost for a dataset that follows from them."""

    images: int  # of the dataset
    rate: float  # images a second on one device
    images_wait: float  # share of the time, 0 to 1, that the teacher waited for images
    # Images a second that one thread reads, decodes and resizes while nothing else runs.
    render_rate: float
    row_bytes: dict[Form, float]  # on disk, an image
    memory_bytes: int  # peak, of the device; on a CPU, of the process
    batch: int

    def hours(self, images: int, devices: int) -> float:
        """Compute the hours for `images` on devices with the cores and disk that this one has."""
        return images / self.rate / devices / 3600

    def lines(self) -> Iterator[str]:
        """Format the estimate for printing, line by line."""
        yield (
            f"{self.rate:,.1f} images/s in batches of {self.batch}; the teacher waited "
            f"{100 * self.images_wait:.0f} % of the time for images"
        )
        threads = math.ceil(self.rate / self.render_rate)
        yield (
            f"one decoding thread renders {self.render_rate:,.0f} images/s: {threads} "
            f"keep{'s' if threads == 1 else ''} this device busy"
        )
        counts = (self.images, IMAGENET)
        for devices in DEVICES:
            hours = [f"{self.hours(n, devices):,.2f} h for {n:,} images" for n in counts]
            yield f"{devices:2} such device{'s' if devices > 1 else ''}: {', '.join(hours)}"
        for form, each in self.row_bytes.items():
            sizes = [f"{each * n / 1e9:,.3f} GB for {n:,}" for n in counts]
            yield f"{form}: {each:,.0f} bytes an image, {', '.join(sizes)}"
        yield f"memory: {self.memory_bytes / 1e9:.2f} GB at most; nothing was written"


def estimate_pass(work: Pass) -> Estimate:
    """Label a few batches of images spread evenly over the dataset, and write nothing.

    Raises UserError as a real pass does.
    """
    count, sizes = len(work.images), []
    ids = sample_evenly(count, BATCHES * work.batch)
    batches = [ids[at : at + work.batch] for at in range(0, len(ids), work.batch)]

    def measure(ids: np.ndarray, scored: Scored, window_N4: np.ndarray) -> None:
        maps = scored.maps_sync(window_N4, partial(name_image, work, ids))
        sizes.append(palette_sizes(maps.cls))

    # Warm up: libraries choose their kernels, a compiler compiles.
    score_batches(work, batches[:1], measure, lambda _: None)
    if work.scorer.device.type == "cuda":
        # cuDNN has taken as much memory as was free to time its algorithms, and returned it.
        torch.cuda.reset_peak_memory_stats(work.scorer.device)
    speed = score_batches(work, batches, measure, lambda _: None)
    return Estimate(
        count,
        speed.images / speed.seconds,
        speed.images_wait / speed.seconds,
        measure_rendering(work, ids[:RENDERED].tolist()),
        # The first batch was scored twice, the first time to warm up.
        predict_row_bytes(work, np.concatenate(sizes[1:])),
        measure_memory(work.scorer.device),
        work.batch,
    )


def measure_rendering(work: Pass, ids: list[int]) -> float:
    """Measure how many of these images one thread renders a second while nothing else runs."""
    out, began = np.empty(work.pictures_shape, np.uint8), time.perf_counter()
    for index in ids:
        work.render(index, out)
    return len(ids) / (time.perf_counter() - began)


def measure_memory(device: torch.device) -> int:
    """Measure the peak memory in bytes, of the device; on a CPU, of the process."""
    if device.type == "cuda":
        # Reserved and not only allocated: the allocator's free blocks are lost to others too.
        return torch.cuda.max_memory_reserved(device)
    return peak_rss()


def predict_row_bytes(work: Pass, palette: np.ndarray) -> dict[Form, float]:
    """Compute the bytes of a row on disk in each form, for maps with these palette sizes."""
    side, top_k = work.header.side, work.header.top_k
    per_row = {
        name: np.dtype(dtype).itemsize * math.prod(shape)
        for name, (dtype, shape) in row_types(side, top_k).items()
    }
    maps = sum(per_row.pop(name) for name in ("logit", "cls", "lse"))
    # HDF5 stores every path in the width of the longest.
    beside = sum(per_row.values()) + max(len(path.encode()) for path in work.images.paths)
    row_bytes = {"raw": beside + maps}
    # These forms also store where each row begins, in 8 bytes.
    for form in ("lossless", "compact"):
        row_bytes[form] = beside + 8 + float(row_sizes(form, side, top_k, palette).mean())
    return row_bytes

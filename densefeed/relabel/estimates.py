"""What a labeling will cost, from a few batches of it that are not kept: hours, bytes on disk,
memory.
"""

import math
import resource
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from densefeed.relabel.labeling import Pass, score_batches
from densefeed.relabel.scoring import Scored
from densefeed.storage.row_codecs import Form, row_sizes
from densefeed.storage.score_maps import palette_sizes, row_types

BATCHES = 8  # timed, after as many as it takes to fill the queue
RENDERED = 64  # images rendered alone, on one thread
DEVICES = (1, 8, 64)
IMAGENET = 1_281_167  # images of ImageNet-1k's training split


class Estimate(NamedTuple):
    """What was measured on one device, and what follows for a dataset."""

    images: int  # of the dataset
    rate: float  # images a second of one device
    images_wait: float  # share of the time, 0 to 1, that the teacher waited for images
    render_rate: (
        float  # images a second that one thread reads, decodes and resizes, with nothing beside it
    )
    row_bytes: dict[Form, float]  # on disk, an image
    memory_bytes: int  # at most, of the device, on a CPU of the process
    batch: int

    def hours(self, images: int, devices: int) -> float:
        """Of so many devices, each with cores and disk as this one has."""
        return images / self.rate / devices / 3600

    def lines(self) -> Iterator[str]:
        """As the command prints it."""
        waited = f"the teacher waited {100 * self.images_wait:.0f} % of the time for images"
        yield f"{self.rate:,.1f} images/s in batches of {self.batch}; {waited}"
        threads = math.ceil(self.rate / self.render_rate)
        yield f"a decoding thread renders {self.render_rate:,.0f} images/s: {threads} keep{'s' * (threads == 1)} this device busy"
        for devices in DEVICES:
            hours = (
                f"{self.hours(count, devices):,.2f} h for {count:,} images"
                for count in (self.images, IMAGENET)
            )
            yield f"{devices:2} such device{'s' if devices > 1 else ''}: {', '.join(hours)}"
        for form, each in self.row_bytes.items():
            whole = (
                f"{each * count / 1e9:,.3f} GB for {count:,}" for count in (self.images, IMAGENET)
            )
            yield f"{form}: {each:,.0f} bytes an image, {', '.join(whole)}"
        yield f"memory: {self.memory_bytes / 1e9:.2f} GB at most; nothing was written"


def try_out(work: Pass) -> Estimate:
    """Label a few batches, of images spread evenly over the dataset, and write nothing. UserError
    as of a real pass.
    """
    count, sizes = len(work.images), []
    device = work.scorer.device
    ids = np.linspace(0, count - 1, min(count, BATCHES * work.batch)).astype(np.int64)
    batches = [ids[at : at + work.batch] for at in range(0, len(ids), work.batch)]

    def look(_ids: np.ndarray, scored: Scored, window_N4: np.ndarray) -> None:
        sizes.append(palette_sizes(scored.maps(window_N4).cls))

    # libraries choose their kernels, a compiler compiles
    score_batches(work, batches[:1], look, lambda _: None)
    speed = score_batches(work, batches, look, lambda _: None)
    out, some = np.empty(work.look_shape, np.uint8), ids[:RENDERED].tolist()
    began = time.perf_counter()
    for index in some:
        work.render(index, out)
    render_rate = len(some) / (time.perf_counter() - began)
    header, palette = work.header, np.concatenate(sizes[1:])
    per_row = {
        name: np.dtype(dtype).itemsize * int(np.prod(shape, dtype=int))
        for name, (dtype, shape) in row_types(header.side, header.top_k).items()
    }
    maps = per_row["logit"] + per_row["cls"] + per_row["lse"]
    beside = sum(per_row.values()) - maps + max(len(path.encode()) for path in work.images.paths)
    row_bytes: dict[Form, float] = {"raw": beside + maps}
    for form in ("lossless", "compact"):  # which also say where a row begins
        row_bytes[form] = (
            beside + 8 + float(row_sizes(form, header.side, header.top_k, palette).mean())
        )
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type == "cuda":
        memory = torch.cuda.max_memory_reserved(device)
    return Estimate(
        count,
        speed.images / speed.seconds,
        speed.images_wait / speed.seconds,
        render_rate,
        row_bytes,
        memory,
        work.batch,
    )

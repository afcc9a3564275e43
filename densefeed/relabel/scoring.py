"""A teacher on its device: uint8 looks in, the top-k logits of every cell out, of which only the
kept numbers reach the host.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from densefeed.storage.row_codecs import ScoreMaps
from densefeed.system.errors import UserError

# N images   L looks at each   S cells along a side of a map   K classes   k of them kept

Precision = Literal["auto", "bf16", "fp16", "fp32"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BATCH_ON_CPU = 32
MOST_BATCH = 256  # on a GPU; larger ones have no more work for each weight that is read
MOST_MEMORY = 0.9  # of the device's; the allocator's rounding and the next library need the rest


def choose_precision(precision: Precision, device: torch.device) -> str:
    """What `auto` stands for on this device: bf16 on CUDA devices that compute it, else fp32.
    UserError for fp16 on a CPU.
    """
    if precision == "fp16" and device.type == "cpu":
        raise UserError("--precision fp16 needs a GPU; take bf16 or fp32 on a CPU")
    if precision != "auto":
        return precision
    # 8.0: older ones emulate bf16, slower than fp32.
    return (
        "bf16"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        else "fp32"
    )


class Kept(NamedTuple):
    """What is kept of a batch's logits, tensors on one device."""

    logit: Tensor  # float16 [N, S, S, k], descending
    cls: Tensor  # int16 [N, S, S, k], the bits of uint16
    lse: Tensor  # float16 [N, S, S]
    sound: Tensor  # bool []: all logits are finite, and in float16 too


def keep(logits_NSSK: Tensor, top_k: int) -> Kept:
    """The top-k logits, their classes, and the logsumexp over all classes; nothing waits for the
    device.
    """
    top, lse = logits_NSSK.topk(top_k, dim=-1), logits_NSSK.logsumexp(-1)
    # NaN is not less than anything, so it is not sound either.
    sound = (logits_NSSK.abs() <= torch.finfo(torch.float16).max).all()
    return Kept(top.values.half(), top.indices.to(torch.int16), lse.half(), sound)


def to_maps(kept: Kept, window_N4: np.ndarray) -> ScoreMaps:
    """The rows to store, of what is on the host already; UserError if they are not finite."""
    if not bool(kept.sound):
        raise UserError(
            "the teacher gave logits that are not finite in float16; check its weights and preprocessing"
        )
    return ScoreMaps(
        kept.logit.numpy(), kept.cls.numpy().view(np.uint16), kept.lse.numpy(), window_N4
    )


def keep_top(logits_NSSK: Tensor, top_k: int, window_N4: np.ndarray) -> ScoreMaps:
    """The rows to store of logits float `[N, S, S, K]`; waits for the device."""
    return to_maps(Kept(*(part.cpu() for part in keep(logits_NSSK, top_k))), window_N4)


class Scored:
    """A batch that is being scored. `maps` waits for it."""

    def __init__(self, kept: Kept, rows: int, began: torch.cuda.Event | None) -> None:
        self._kept, self._rows, self.began, self.ended = kept, rows, began, None
        if kept.logit.is_cuda:
            # Pinned memory, else the copy would wait for the device.
            self._kept = Kept(
                *(
                    torch.empty(p.shape, dtype=p.dtype, pin_memory=True).copy_(p, non_blocking=True)
                    for p in kept
                )
            )
            self.ended = torch.cuda.Event(enable_timing=True)
            self.ended.record()

    def wait(self) -> None:
        """Wait until the numbers are on the host, and the looks may be overwritten."""
        if self.ended is not None:
            self.ended.synchronize()

    def idle_since(self, before: "Scored") -> float:
        """Seconds that the device had nothing to do between a batch and this one, both waited for;
        0 on a CPU.
        """
        return before.ended.elapsed_time(self.began) / 1000 if self.ended is not None else 0.0

    def maps(self, window_N4: np.ndarray) -> ScoreMaps:
        """The rows to store."""
        self.wait()
        kept = Kept(*(part[: self._rows] for part in self._kept[:3]), self._kept.sound)
        return to_maps(kept, window_N4)


class Scorer:
    """A teacher, ready to score batches.

    Args:
        teacher: as Teacher: uint8 `[N, L, size, size, 3]` in, logits float32 `[N, S, S, K]` out.
        top_k: classes kept a cell.
        precision: of the teacher's products; their sums and what is kept are at least float16.
        compiled: whether torch.compile makes it. A batch is then always filled up to the same size.
    """

    def __init__(
        self,
        teacher: nn.Module,
        device: torch.device,
        precision: str = "fp32",
        compiled: bool = False,
    ) -> None:
        self.teacher, self.device, self.precision, self.compiled = (
            teacher,
            device,
            precision,
            compiled,
        )
        # tensor cores read channels together; on a CPU the library lays out its own
        if device.type == "cuda":
            teacher.to(memory_format=torch.channels_last)
        self._keep: Callable[[Tensor, int], Kept] = (
            torch.compile(self._score, dynamic=False) if compiled else self._score
        )

    def _score(self, looks: Tensor, top_k: int) -> Kept:
        return keep(self.logits(looks), top_k)

    def logits(self, look_NLHWC: Tensor) -> Tensor:
        """Logits of uint8 looks on the device, float32 `[N, S, S, K]`."""
        fp32 = self.precision == "fp32"
        # inference_mode would be the same, but for torch.compile, which fails on its tensors (torch
        # 2.15).
        with (
            torch.no_grad(),
            nullcontext() if fp32 else torch.autocast(self.device.type, DTYPES[self.precision]),
        ):
            return self.teacher(look_NLHWC).float()

    def try_out(self, look_NLHWC: Tensor, top_k: int) -> None:
        """Score a batch as `begin` does, but never compiled, and wait for it."""
        with torch.no_grad():
            Scored(self._score(look_NLHWC.to(self.device), top_k), len(look_NLHWC), None).wait()

    def begin(self, look_NLHWC: Tensor, rows: int, top_k: int) -> Scored:
        """Begin to score the first `rows` images of a batch on the host, which must not change
        until it was waited for.
        """
        began = None
        if self.device.type == "cuda":
            began = torch.cuda.Event(enable_timing=True)
            began.record()
        looks = look_NLHWC if self.compiled else look_NLHWC[:rows]
        with torch.no_grad():
            return Scored(self._keep(looks.to(self.device, non_blocking=True), top_k), rows, began)


def find_batch_size(attempt: Callable[[int], None], device: torch.device) -> int:
    """The largest power of two, at most 256, of images that `attempt` scores within 0.9 of the
    device's memory; 32 on a CPU.

    UserError if not even one image fits.
    """
    if device.type != "cuda":
        return BATCH_ON_CPU
    fits, total = 0, torch.cuda.get_device_properties(device).total_memory
    while 2 * fits <= MOST_BATCH:
        torch.cuda.reset_peak_memory_stats(device)
        try:
            attempt(max(1, 2 * fits))
        except torch.OutOfMemoryError:
            break
        if torch.cuda.max_memory_reserved(device) > MOST_MEMORY * total:
            break
        fits = max(1, 2 * fits)
    torch.cuda.empty_cache()
    if not fits:
        raise UserError(
            "the teacher does not fit into the GPU's memory with one image; choose a smaller --input-size or teacher"
        )
    return fits

"""Score batches on a device: uint8 pictures in, the top-k logits of every cell out.

Only the numbers that are kept are copied to the host.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from densefeed.relabel.frozen_weights import freeze_weights
from densefeed.storage.row_codecs import ScoreMaps
from densefeed.system.devices import has_triton, tag_compiled_code
from densefeed.system.errors import UserError
from densefeed.system.precision import DTYPES

# N images   L pictures of each   S cells along a side of a map   K classes   k of them kept

Compile = Literal["auto", "never", "whole"]
CPU_BATCH = 32
# On a GPU. Larger batches do no more work for each weight that is read.
MAX_BATCH = 256
# The largest number of float16. Rows of a store hold logits in it.
MOST_LOGIT = torch.finfo(torch.float16).max
# Share of the device's memory. The allocator's rounding and the next library need the rest.
MAX_MEMORY = 0.9


def choose_compile(mode: Compile, device: torch.device) -> bool:
    """Resolve `auto`: compile the teacher on CUDA devices, if Triton can be used.

    The compiler's kernels between the convolutions of an NFNet-F0 read and write 2.5 to 2.8 times
    fewer bytes than the eager ones. Compiling takes minutes for a large teacher, in which a CPU
    labels few images, and a GPU many thousands.
    """
    return mode == "whole" or (mode == "auto" and device.type == "cuda" and has_triton())


@contextmanager
def timed_convolutions(device: torch.device) -> Iterator[None]:
    """Let cuDNN time its algorithms for each convolution, on CUDA; then restore the setting.

    The algorithms round differently, so labels of two runs may differ in their last bits, and so
    may those before and after a resume. Labels that are equal to the bit are promised on a CPU
    only, where this changes nothing. On a GPU the compiler too chooses kernels by their time.
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class TopLogits(NamedTuple):
    """The numbers that are kept of a batch's logits, tensors on one device."""

    logit: Tensor  # float16 [N, S, S, k], descending
    cls: Tensor  # int16 [N, S, S, k], the bits of uint16
    lse: Tensor  # float16 [N, S, S]
    finite: Tensor  # bool [N]: all logits are finite, in float16 too


def keep(logits_NSSK: Tensor, top_k: int, unmapped: bool = False) -> TopLogits:
    """Select the top-k logits, their classes, and the logsumexp over all classes; does not sync.

    `unmapped`: the last class is that of `name_unmapped`, which counts in the logsumexp alone.
    """
    named_NSSK = logits_NSSK[..., :-1] if unmapped else logits_NSSK
    top, lse = named_NSSK.topk(top_k, dim=-1), logits_NSSK.logsumexp(-1)
    # NaN compares as False, so it is not finite either. Where every class is mapped, the logit of
    # the last is minus infinity.
    finite = (named_NSSK.abs() <= MOST_LOGIT).all(-1) & (logits_NSSK[..., -1] <= MOST_LOGIT)
    finite = finite.flatten(1).all(1)
    # int16 with the bits of uint16, a type for which torch has few operations.
    return TopLogits(top.values.half(), top.indices.to(torch.int16), lse.half(), finite)


def to_maps(
    kept: TopLogits, window_N4: np.ndarray, where: Callable[[int], str] = "image {}".format
) -> ScoreMaps:
    """Convert numbers on the host to rows of a store.

    Raises UserError, which names the first such image by `where` of its row, if logits are not
    finite.
    """
    logit, cls, lse = (part.numpy() for part in kept[:3])
    if bad := (~kept.finite).nonzero().flatten().tolist():
        # A logsumexp is NaN if a logit is.
        what = f"above {MOST_LOGIT:,.0f}, the largest number of float16"
        what = "NaN" if np.isnan(lse[bad[0]]).any() else what
        more = f" (and of {len(bad) - 1:,} more of its batch)" if len(bad) > 1 else ""
        raise UserError(
            f"the teacher's scores of {where(bad[0])}{more} are {what}; check its weights and "
            "preprocessing"
        )
    return ScoreMaps(logit, cls.view(np.uint16), lse, window_N4)


class Scored:
    """A batch that is being scored."""

    def __init__(self, kept: TopLogits, rows: int, began: torch.cuda.Event | None) -> None:
        self._kept, self._rows, self.began, self.ended = kept, rows, began, None
        if kept.logit.is_cuda:
            # Pinned memory, because a copy to other memory would wait for the device.
            self._kept = TopLogits(
                *(
                    torch.empty(p.shape, dtype=p.dtype, pin_memory=True).copy_(p, non_blocking=True)
                    for p in kept
                )
            )
            self.ended = torch.cuda.Event(enable_timing=True)
            self.ended.record()

    def wait_sync(self) -> None:
        """Wait until the numbers are on the host, and the pictures may be overwritten."""
        if self.ended is not None:
            self.ended.synchronize()

    def idle_since(self, before: "Scored") -> float:
        """Return the seconds that the device was idle between an earlier batch and this one.

        Both must have been waited for. 0 on a CPU.
        """
        return before.ended.elapsed_time(self.began) / 1000 if self.ended is not None else 0.0

    def maps_sync(
        self, window_N4: np.ndarray, where: Callable[[int], str] = "image {}".format
    ) -> ScoreMaps:
        """Wait for the batch and return the rows to store. UserError as `to_maps`."""
        self.wait_sync()
        kept = TopLogits(*(part[: self._rows] for part in self._kept))
        return to_maps(kept, window_N4, where)


class Scorer:
    """A teacher that is ready to score batches.

    Weights that the teacher would standardize in each batch are standardized once, in a copy of it
    (`freeze_weights`). On CUDA, and if compiled, batches are always filled up to the same size.

    Args:
        teacher: as Teacher: uint8 `[N, L, size, size, 3]` in, logits float32 `[N, S, S, K]` out.
            Its weights are not changed; on CUDA they become channels_last.
        precision: of the teacher's products; sums and results have at least float16.
        compiled: use torch.compile.
    """

    def __init__(
        self,
        teacher: nn.Module,
        device: torch.device,
        precision: str = "fp32",
        compiled: bool = False,
    ) -> None:
        self.teacher, self.device = freeze_weights(teacher, DTYPES[precision]), device
        self.precision = precision
        # [S, S, K] of the first image; empty: any. Not set in a forward pass, which is compiled.
        self.map_shape: list[int] = []
        # The compiler would recompile, and cuDNN time again, for the last, smaller batch.
        self.fixed_size = compiled or device.type == "cuda"
        # Tensor cores read the channels together. On a CPU the library chooses its own layout.
        if device.type == "cuda":
            self.teacher.to(memory_format=torch.channels_last)
        if compiled:
            tag_compiled_code()
        # Every batch has the same size (see `begin`), so one graph of fixed shapes is enough.
        self._keep = torch.compile(self._score, dynamic=False) if compiled else self._score

    def _score(self, picture_NLHWC: Tensor, top_k: int) -> TopLogits:
        return keep(self.logits(picture_NLHWC), top_k, self.teacher.unmapped)

    def logits(self, picture_NLHWC: Tensor) -> Tensor:
        """Compute logits, float32 `[N, S, S, K]`, of uint8 pictures on the device."""
        precision = nullcontext()
        if self.precision != "fp32":
            precision = torch.autocast(self.device.type, DTYPES[self.precision])
        # Not inference_mode: torch.compile fails on its tensors (torch 2.15).
        with torch.no_grad(), precision:
            logits_NSSK = self.teacher(picture_NLHWC).float()
        found, wanted = list(logits_NSSK.shape), [len(picture_NLHWC), *self.map_shape]
        # A module of the user's own may give any other shape than for its first image.
        if self.map_shape and found != wanted:
            raise ValueError(f"logits of the shape {found} in place of {wanted}")
        return logits_NSSK

    def try_out_sync(self, picture_NLHWC: Tensor, top_k: int) -> None:
        """Score a batch as `begin` does, and wait for it, but in eager mode and not timed.

        cuDNN takes as much memory as is free to time an algorithm, which would count as memory that
        the batch needs.
        """
        with torch.no_grad():
            kept = self._score(picture_NLHWC.to(self.device), top_k)
            Scored(kept, len(picture_NLHWC), None).wait_sync()

    def begin(self, picture_NLHWC: Tensor, rows: int, top_k: int) -> Scored:
        """Begin to score the first `rows` images of a batch on the host.

        The pictures must not change until the result was waited for.
        """
        began = None
        if self.device.type == "cuda":
            began = torch.cuda.Event(enable_timing=True)
            began.record()
        pictures = picture_NLHWC if self.fixed_size else picture_NLHWC[:rows]
        with torch.no_grad(), timed_convolutions(self.device):
            kept = self._keep(pictures.to(self.device, non_blocking=True), top_k)
            return Scored(kept, rows, began)


def find_batch_size(attempt: Callable[[int], None], device: torch.device) -> int:
    """Find the largest batch that fits, a power of two of at most 256; 32 on a CPU.

    A batch fits if `attempt` scores that many images within 0.9 of the device's memory. Raises
    UserError if not even one image fits.
    """
    if device.type != "cuda":
        return CPU_BATCH
    fits, count = 0, 1
    while count <= MAX_BATCH and fits_memory(attempt, count, device):
        fits, count = count, 2 * count
    # The allocator still holds blocks of the last batch, and its peak is that of the search.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    if not fits:
        raise UserError(
            "the teacher does not fit into the GPU's memory with one image; choose a smaller "
            "--input-size or another teacher"
        )
    return fits


def fits_memory(attempt: Callable[[int], None], count: int, device: torch.device) -> bool:
    """Whether `attempt` scores `count` images within 0.9 of the device's memory."""
    # Blocks that the allocator holds of smaller batches would count as memory that this one needs:
    # 29.2 GB instead of 18.0 GB for 256 images of NFNet-F6.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        attempt(count)
    except torch.OutOfMemoryError:
        return False
    total = torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.max_memory_reserved(device) <= MAX_MEMORY * total

"""Speed and memory of a run, and the peak rate of the device."""

import time
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from densefeed.pipelines.batch import Batch
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.shapes import Shape, split_grid

# Dense peak in 16 bits, operations per second, from the vendors' data sheets. The first key counts
# whose words are all in the device's name: boards with PCIe have lower clocks than those with SXM.
PEAKS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100 PCIE": 112e12,
    "V100": 125e12,
}


def training_flops(model: nn.Module, size: int | Shape) -> float:
    """Count the floating-point operations of one image, forward and backward.

    `size` is its side, or height and width, pixels. `model` is on the meta device. A multiply-add
    counts as two operations. The backward pass counts as two forward passes: each product has two
    of the same size in it.
    """
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        # With gradients enabled the counter hooks autograd functions, which fails for CaiT, whose
        # class token has none. BatchNorm needs two images.
        model.train().requires_grad_(False)(torch.empty(2, 3, *split_grid(size), device="meta"))
    return 3 * counter.get_total_flops() / 2


def mean_flops_share(
    shares: dict[Shape, float], plan: EpochPlan, step: int, steps: int
) -> float | None:
    """Average the `flops_shares` of the last `steps` steps before `step`; None without shares."""
    if not shares:
        return None
    shapes = (plan.shape(*divmod(n, plan.batches)) for n in range(step - steps, step))
    return sum(shares[shape] for shape in shapes) / steps


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak rate of matrix products of `dtype`, operations per second.

    None for a device without a data sheet in PEAKS, as a CPU, and in float32.
    """
    # A CPU's rate is not constant: other processes, the clock and the number of threads change it
    # within a run. Runs on a busy CPU showed an MFU of 125 %.
    if device.type != "cuda" or dtype == torch.float32:
        return None
    words = set(torch.cuda.get_device_name(device).replace("-", " ").split())
    return next((p for name, p in PEAKS.items() if words.issuperset(name.split())), None)


class ActivationBytes(torch.autograd.graph.saved_tensors_hooks):
    """Context that counts the bytes autograd keeps for the backward pass.

    Parameters are not counted, and each storage is counted once.
    """

    def __init__(self, model: nn.Module) -> None:
        # Tensors are only looked at: unpacking returns what packing got.
        super().__init__(self._pack, lambda tensor: tensor)
        self.held = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.bytes = 0

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # Views of one tensor share its storage.
        if storage.data_ptr() not in self.held:
            self.held.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor


class RunClock:
    """Measures the seconds of a run and the share of them that its device waits for data.

    A GPU waits from the end of the last step that is queued until the next batch arrives. The host
    is ahead of it and may wait longer. What a GPU has not reached is counted later.

    Args:
        step: first step of the first interval.
        spent: float64 `[2]`, seconds and seconds waited in earlier processes of the run.
        device: of the steps.
    """

    def __init__(self, step: int, spent: np.ndarray, device: torch.device) -> None:
        self._spent, self._began, self._device = spent, time.perf_counter(), device
        # Marks before and after waits that are not in the sum yet; of a GPU there may be several.
        self._sum, self._marks = 0.0, deque()
        self.restart(step)

    def time_data(self, items: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches and sum the time that the device waits for each."""
        while True:
            began = self._mark()
            item = next(items, None)
            self._marks.append((began, self._mark()))
            self._waited()
            if item is None:
                return
            yield item

    def _mark(self) -> "float | torch.cuda.Event":
        """Return the time, in seconds, or an event of the stream that steps are queued on."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _waited(self) -> float:
        """Return the seconds waited so far, without waiting."""
        gpu = self._device.type == "cuda"
        while self._marks and (not gpu or self._marks[0][1].query()):
            before, after = self._marks.popleft()
            self._sum += before.elapsed_time(after) / 1000 if gpu else after - before
        return self._sum

    def restart(self, step: int) -> None:
        """Begin an interval at `step`."""
        self._interval = step, time.perf_counter(), self._waited()

    def interval(self, step: int) -> tuple[int, float, float]:
        """Return steps, seconds and seconds waited since the interval began."""
        first, began, waited = self._interval
        return step - first, time.perf_counter() - began, self._waited() - waited

    def total(self) -> np.ndarray:
        """Return seconds and seconds waited of the whole run, float64 `[2]`."""
        return self._spent + np.array([time.perf_counter() - self._began, self._waited()])

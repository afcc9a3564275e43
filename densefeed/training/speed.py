"""Speed and memory of a run, and the peak rate of the device."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from densefeed.pipelines.batch import Batch
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.shapes import Shape, split_grid
from densefeed.system.devices import synchronize

# Dense peak in 16 bits, operations per second, from the vendors' data sheets. For other devices the
# rate of a matrix product is measured. The first key counts whose words are all in the device's
# name: boards with PCIe have lower clocks than those with SXM.
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
SECONDS = 0.3  # duration of that measurement


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
    """Return the peak rate of matrix products of `dtype`, operations per second; None on a CPU.

    It is taken from the data sheet if the device is known, else measured.
    """
    # A CPU's rate is not constant: other processes, the clock and the number of threads change it
    # within a run. Runs on a busy CPU showed an MFU of 125 %.
    if device.type == "cpu":
        return None
    if device.type == "cuda" and dtype != torch.float32:
        words = set(torch.cuda.get_device_name(device).replace("-", " ").split())
        if known := [peak for name, peak in PEAKS.items() if words.issuperset(name.split())]:
            return known[0]
    return matmul_rate(device, dtype)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the best rate of a square matrix product, operations per second."""
    side = 8192 if device.type == "cuda" else 1024
    one = torch.rand(side, side, device=device).to(dtype)
    out = torch.empty_like(one)
    return best_rate(lambda: torch.mm(one, one, out=out), 2 * side**3, device)


def best_rate(work: Callable[[], object], amount: float, device: torch.device) -> float:
    """Do `work` for SECONDS and return the best `amount` per second of a single call."""
    best, until = 0.0, time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        # The best call, because other work on the machine only slows calls down.
        best = max(best, amount / (time.perf_counter() - began))
    return best


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

    def __enter__(self) -> "ActivationBytes":
        super().__enter__()
        return self


class RunClock:
    """Measures the seconds of a run and the share of them that it waits for data.

    Args:
        step: first step of the first interval.
        spent: float64 `[2]`, seconds and seconds waited in earlier processes of the run.
    """

    def __init__(self, step: int, spent: np.ndarray) -> None:
        self._spent, self._began, self._waited = spent, time.perf_counter(), 0.0
        self.restart(step)

    def time_data(self, items: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches and sum the time that each took to arrive."""
        while True:
            began = time.perf_counter()
            item = next(items, None)
            self._waited += time.perf_counter() - began
            if item is None:
                return
            yield item

    def restart(self, step: int) -> None:
        """Begin an interval at `step`."""
        self._interval = step, time.perf_counter(), self._waited

    def interval(self, step: int) -> tuple[int, float, float]:
        """Return steps, seconds and seconds waited since the interval began."""
        first, began, waited = self._interval
        return step - first, time.perf_counter() - began, self._waited - waited

    def total(self) -> np.ndarray:
        """Return seconds and seconds waited of the whole run, float64 `[2]`."""
        return self._spent + np.array([time.perf_counter() - self._began, self._waited])

"""How fast a run is, and how fast it could be: floating-point operations of a model, what the
device can do, memory.
"""

import time

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from densefeed.system.devices import synchronize

# Dense peak in 16 bits, operations per second, from the makers' data sheets; of others the rate of
# a product is measured.
PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
}
SECONDS = 0.3  # of measuring


def training_flops(model: nn.Module, size: int) -> float:
    """Floating-point operations of one image of `size` pixels, forward and backward, of a model on
    the meta device.

    A multiply-add is two; backward is twice forward, as each product has two of its size behind it.
    """
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        # Without gradients the counter hooks none: in CaiT it finds a class token whose gradient
        # has no function, and stops.
        # BatchNorm wants two
        model.train().requires_grad_(False)(torch.empty(2, 3, size, size, device="meta"))
    return 3 * counter.get_total_flops() / 2


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second that the device can do at best, in products of `dtype`: its data
    sheet's, or measured here.
    """
    if device.type == "cuda" and dtype != torch.float32:
        words = torch.cuda.get_device_name(device).replace("-", " ").split()
        if known := [peak for name, peak in PEAKS.items() if name in words]:
            return known[0]
    return matmul_rate(device, dtype)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """The best rate of a square product, operations per second, measured for a moment."""
    side = 8192 if device.type == "cuda" else 1024
    one = torch.rand(side, side, device=device).to(dtype)
    out, best, until = torch.empty_like(one), 0.0, time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        synchronize(device)
        began = time.perf_counter()
        torch.mm(one, one, out=out)
        synchronize(device)
        best = max(best, 2 * side**3 / (time.perf_counter() - began))
    return best


class ActivationBytes:
    """Bytes that autograd keeps for the backward pass while this context is open; what is no
    parameter, each storage once.
    """

    def __init__(self, model: nn.Module) -> None:
        self.held = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.bytes = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.held:
            self.held.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor

    def __enter__(self) -> "ActivationBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

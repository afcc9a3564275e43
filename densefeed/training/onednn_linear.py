"""Linear layers computed with oneDNN, on processors where PyTorch's default library is slower.

PyTorch multiplies float32 matrices with Intel's MKL, which has only AVX2 on AMD's processors, and
computes convolutions with oneDNN, which also has AVX-512 there. On one core of an EPYC (Zen 5)
MKL reaches 118 GFLOP/s in the products of LV-ViT-S and oneDNN 260, and there with AVX2 alone, as on
Zen 3, 114 and 129. On Zen 4, which computes vectors of 512 bits in halves, it is 90 and 97. On
Intel's processors MKL reaches the peak.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from densefeed.system.provenance import cpu_model

# The operator that inductor calls for a linear layer. PyTorch has no public name for it.
PRODUCT = "_linear_pointwise"
# The least number of multiplications for which oneDNN is faster. On Zen 5, a layer from 96 to 10
# features takes MKL 3 us and oneDNN 11 for 16 rows, 29 and 19 for 576 rows.
LEAST_WORK = 2**18


@cache
def is_faster() -> bool:
    """Return whether oneDNN multiplies float32 matrices faster than PyTorch does here.

    By the maker of the processor and not by a measurement, so that a run can be repeated.
    """
    backends = torch.backends.mkl, torch.backends.mkldnn
    available = all(b.is_available() for b in backends) and hasattr(torch.ops.mkldnn, PRODUCT)
    return available and "AMD" in cpu_model()


def multiply(a_RI: Tensor, b_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return `a b^T + bias` with oneDNN, for dense float32 on the CPU in any memory format."""
    return getattr(torch.ops.mkldnn, PRODUCT)(a_RI, b_OI, bias_O, "none", [], "")


class LinearProduct(torch.autograd.Function):
    """`F.linear` of a matrix whose three products are oneDNN's."""

    @staticmethod
    def forward(ctx, x_RI, weight_OI, bias_O):
        ctx.save_for_backward(x_RI, weight_OI)
        return multiply(x_RI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx, grad_RO):
        x_RI, weight_OI = ctx.saved_tensors
        # With `create_graph` the backward pass is differentiated too, and oneDNN's product cannot.
        product = F.linear if torch.is_grad_enabled() else multiply
        grads: list[Tensor | None] = [None] * 3
        if ctx.needs_input_grad[0]:
            grads[0] = product(grad_RO, weight_OI.T)
        if ctx.needs_input_grad[1]:
            # The left operand is copied if it is transposed: the narrower one, 10 % faster.
            narrow = x_RI.shape[1] < grad_RO.shape[1]
            grads[1] = product(x_RI.T, grad_RO.T).T if narrow else product(grad_RO.T, x_RI.T)
        if ctx.needs_input_grad[2]:
            grads[2] = grad_RO.sum(0)
        return tuple(grads)


class OnednnLinear(nn.Linear):
    """A linear layer whose large products in float32 are oneDNN's.

    Compiled, under autocast and for small inputs it is its base; else outputs and gradients differ
    from its by rounding. Tools that look into layers (torch.fx, torch.func, relevance of
    densefeed.explain) take its base only: `use_onednn(module, False)`.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not self._fits(x):
            return super().forward(x)
        out_RO = LinearProduct.apply(x.flatten(0, -2), self.weight, self.bias)
        # Outside: what follows may change the output in place, but no view that a Function made.
        return out_RO.unflatten(0, x.shape[:-1])

    def _fits(self, x: Tensor) -> bool:
        dense = x.dtype == self.weight.dtype == torch.float32 and x.device.type == "cpu"
        large = x.ndim > 1 and x.numel() * self.out_features >= LEAST_WORK
        return dense and large and not torch.is_autocast_enabled("cpu")


def use_onednn(module: nn.Module, use: bool = True) -> None:
    """Let all layers of class `nn.Linear` in a module use oneDNN, or MKL again.

    Parameters, names and hooks stay as they are.
    """
    before, after = (nn.Linear, OnednnLinear) if use else (OnednnLinear, nn.Linear)
    for part in module.modules():
        # Not what computes something else: a subclass.
        if type(part) is before:
            part.__class__ = after

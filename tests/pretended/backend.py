"""What is replaced in PyTorch, in every process on the pretended CUDA runtime.

cuDNN brings a CUDA runtime of its own, which is not the pretended one. Without it PyTorch would
launch a kernel for each image of a convolution. Here a convolution is one launch, and its backward
pass one for each gradient. Attention is FlashAttention, and BatchNorm is that of PyTorch.

PyTorch calls `load` at the end of its import, because build.py declares it as a backend.
"""

import ctypes
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from .counting import RUNTIME

# PyTorch forgets what a library registered when the library is gone.
LIBRARY = torch.library.Library("aten", "IMPL")
UNTIL_THE_END = ExitStack()
FORMAT_OF_BACKEND = torch._C._conv_determine_backend_memory_format


def load() -> None:
    """Replace cuDNN; with PRETENDED_ONES in the environment, also the numbers that are read.

    Then `densefeed train` judges no values either.
    """
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Compiled code has the strides of cuDNN's results too.
    torch._C._conv_determine_backend_memory_format = choose_format
    with warnings.catch_warnings():
        # PyTorch warns that its own function is replaced.
        warnings.simplefilter("ignore")
        for function in (convolution, convolution_backward):
            LIBRARY.impl(function.__name__, function, "CUDA")
    if "PRETENDED_ONES" in os.environ:
        for name in ("item", "tolist", "__float__"):
            setattr(Tensor, name, read_ones(name))
        sys.meta_path.insert(0, WithoutJudges())


class WithoutJudges(MetaPathFinder):
    """Finds `densefeed.train`, and replaces what judges values when it has been imported."""

    def find_spec(self, name: str, *more: object) -> ModuleSpec | None:
        if name != "densefeed.train":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            from .runs import without_judges

            UNTIL_THE_END.enter_context(without_judges())

        spec.loader.exec_module = exec_module
        return spec


def read_ones(name: str) -> Callable[[Tensor], object]:
    """Return a method that reads a tensor, and returns ones for real numbers on a CUDA device.

    Programs that divide by a loss, or require a finite one, continue with it.
    """
    read = getattr(Tensor, name)

    def method(tensor: Tensor) -> object:
        found = read(tensor)
        real = tensor.is_cuda and tensor.is_floating_point()
        return read(torch.ones(tensor.shape)) if real else found

    return method


def choose_format(input: Tensor, weight: Tensor, backend: object = None) -> torch.memory_format:
    """Return the memory format of a convolution's results: on a CUDA device that of cuDNN."""
    cudnn = torch._C._ConvBackend.Cudnn
    return FORMAT_OF_BACKEND(input, weight, cudnn if input.is_cuda else backend)


def launch(name: bytes) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    RUNTIME.pretended_launch(name, ctypes.c_void_p(stream))


def convolution(input: Tensor, weight: Tensor, bias: Tensor | None, *options: object) -> Tensor:
    """The result of torch.convolution, without values."""
    # Tensors on the meta device compute the shape.
    shape = torch.convolution(input.to("meta"), weight.to("meta"), None, *options).shape
    launch(b"convolution")
    memory_format = choose_format(input, weight)
    out = torch.empty(shape, dtype=input.dtype, device=input.device, memory_format=memory_format)
    if bias is not None:
        out.add_(bias.view(1, -1, *[1] * (out.ndim - 2)))
    return out


def convolution_backward(
    gradient: Tensor, input: Tensor, weight: Tensor, *options: object
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of a convolution's input, weight and bias, without values."""
    of_input, of_weight, of_bias = options[-1]
    found, memory_format = [], choose_format(input, weight)
    for wanted, tensor in ((of_input, input), (of_weight, weight)):
        if wanted:
            launch(b"convolution, a gradient")
        found.append(torch.empty_like(tensor, memory_format=memory_format) if wanted else None)
    other = [d for d in range(gradient.ndim) if d != 1]
    return (*found, gradient.sum(other) if of_bias else None)

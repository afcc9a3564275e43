"""Reference layers for the tests of the model families, in float64 and without PyTorch's modules.

Each takes `w`, a state dict in float64, and the name of the layer in it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def randomize(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Return the model in float64, with every parameter and running statistic changed.

    So each of them has an effect on the output.
    """
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer += 0.5 * torch.rand(buffer.shape, generator=rng, dtype=torch.float64)
    return model


def erf_gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def dense(w: dict, name: str, x: Tensor) -> Tensor:
    """Apply a linear layer, with a bias if the state dict has one."""
    out = torch.einsum("...d,ed->...e", x, w[f"{name}.weight"])
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def layer_norm(w: dict, name: str, x: Tensor, eps: float, dim: int = -1) -> Tensor:
    """Normalize over `dim`, the dimension of weight and bias."""
    centered = x - x.mean(dim, keepdim=True)
    normed = centered / (centered.square().mean(dim, keepdim=True) + eps).sqrt()
    shape = [-1 if place == dim % x.ndim else 1 for place in range(x.ndim)]
    return normed * w[f"{name}.weight"].view(shape) + w[f"{name}.bias"].view(shape)


def batch_norm(w: dict, name: str, x: Tensor, training: bool) -> Tensor:
    """Normalize `[N, C, H, W]`, with the batch's statistics or the running ones."""
    mean, var = w[f"{name}.running_mean"], w[f"{name}.running_var"]
    if training:
        mean = x.mean((0, 2, 3))
        var = (x - mean.view(1, -1, 1, 1)).square().mean((0, 2, 3))
    one = (1, -1, 1, 1)
    normed = (x - mean.view(one)) / (var.view(one) + 1e-5).sqrt()
    return normed * w[f"{name}.weight"].view(one) + w[f"{name}.bias"].view(one)


def conv(w: dict, name: str, x: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    """Apply a convolution as a product with the patches that it reads.

    It is depth-wise if its kernel has one input channel and the input has several.
    """
    kernel = w[f"{name}.weight"]
    out_chans, per_group, side, _ = kernel.shape
    grid = [(size + 2 * padding - side) // stride + 1 for size in x.shape[2:]]
    read = F.unfold(x, side, padding=padding, stride=stride).unflatten(1, (x.shape[1], side * side))
    if per_group == x.shape[1]:
        out = torch.einsum("nckp,ock->nop", read, kernel.flatten(2))
    else:
        assert per_group == 1
        assert out_chans == x.shape[1]
        out = torch.einsum("nckp,ck->ncp", read, kernel.flatten(1))
    if f"{name}.bias" in w:
        out = out + w[f"{name}.bias"][None, :, None]
    return out.unflatten(2, grid)


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
    """Return attention of `[N, T, D]` tensors, one head at a time, with softmax by definition."""
    out, width = [], q.shape[-1] // heads
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        weight = torch.exp(scale * q[..., part] @ k[..., part].mT)
        out.append(weight / weight.sum(-1, keepdim=True) @ v[..., part])
    return torch.cat(out, -1)


def to_map(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Reshape `[N, R C, D]` to `[N, D, R, C]`."""
    return x.mT.unflatten(2, grid)


def to_tokens(x: Tensor) -> Tensor:
    """Reshape `[N, D, R, C]` to `[N, R C, D]`."""
    return x.flatten(2).mT

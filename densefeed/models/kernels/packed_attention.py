"""Exact attention with few tokens on a GPU: packed queries, keys and values, packed gradients.

`F.scaled_dot_product_attention` gives three gradients, which are copied to put them together: 0.9
of 41 ms of a step of LV-ViT-S (once, on an H200). The kernels of packed_attention_triton.py
write them in place. The plain twin is `Attention.attend`.
"""

import torch
from torch import Tensor, nn

from densefeed.models.lvvit import Attention
from densefeed.system.devices import has_triton

# N images   T tokens   H heads   D width of a head

MOST_TOKENS = 256
WIDTHS = 32, 64


class PackedAttention(Attention):
    """Attention by the kernels, where they can run."""

    def attend(self, qkv_NT3HD: Tensor) -> Tensor:
        if not can_run(qkv_NT3HD):
            return super().attend(qkv_NT3HD)
        scale = qkv_NT3HD.shape[-1] ** -0.5 if self.scale is None else self.scale
        return forward(qkv_NT3HD, scale)[0]


def use(model: nn.Module) -> None:
    """Let every Attention of a model use the kernels."""
    for module in model.modules():
        if type(module) is Attention:
            module.__class__ = PackedAttention


def can_run(qkv_NT3HD: Tensor) -> bool:
    """Return whether the kernels can compute the attention of a tensor."""
    _, T, _, _, D = qkv_NT3HD.shape
    fits = T <= MOST_TOKENS and D in WIDTHS and qkv_NT3HD.dtype in (torch.bfloat16, torch.float16)
    return qkv_NT3HD.is_cuda and fits and has_triton()


@torch.library.custom_op("densefeed::packed_attention", mutates_args=(), device_types="cuda")
def forward(qkv_NT3HD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output `[N, T, H, D]`, and for the backward pass a float32 `[N, H, T]`."""
    # Imported here, because importing Triton takes a second, or fails.
    from densefeed.models.kernels import packed_attention_triton

    return packed_attention_triton.forward(qkv_NT3HD.contiguous(), scale)


@torch.library.custom_op(
    "densefeed::packed_attention_backward", mutates_args=(), device_types="cuda"
)
def backward(
    grad_NTHD: Tensor, qkv_NT3HD: Tensor, out_NTHD: Tensor, lse_NHT: Tensor, scale: float
) -> Tensor:
    """Return the gradient of `qkv`, packed as it is."""
    from densefeed.models.kernels import packed_attention_triton

    tensors = grad_NTHD.contiguous(), qkv_NT3HD.contiguous(), out_NTHD, lse_NHT
    return packed_attention_triton.backward(*tensors, scale)


@forward.register_fake
def _(qkv_NT3HD, scale):
    N, T, _, H, D = qkv_NT3HD.shape
    return qkv_NT3HD.new_empty(N, T, H, D), qkv_NT3HD.new_empty(N, H, T, dtype=torch.float32)


@backward.register_fake
def _(grad_NTHD, qkv_NT3HD, *more):
    return torch.empty_like(qkv_NT3HD, memory_format=torch.contiguous_format)


def keep(ctx, inputs, output) -> None:
    """Keep what the backward pass reads."""
    ctx.save_for_backward(inputs[0], *output)
    ctx.scale = inputs[1]


def differentiate(ctx, grad_NTHD, _) -> tuple[Tensor, None]:
    """Return the gradients of `forward`'s arguments."""
    return backward(grad_NTHD, *ctx.saved_tensors, ctx.scale), None


forward.register_autograd(differentiate, setup_context=keep)

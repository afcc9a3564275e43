"""Attention with packed gradients against float64: interpreted, compiled for GPUs, on a GPU."""

import pytest
import torch
from torch.nn import functional as F

from densefeed.models.kernels import packed_attention
from densefeed.models.lvvit import Attention

from ...interpreter import compile_kernel, interpreted, read_resources, run_interpreted

triton = pytest.importorskip("triton")

# Tokens: those of 224 px; a rest of one token, of the most, and none; fewer than a chunk.
TOKENS = (197, 193, 208, 145, 101, 128, 256, 17)


def example(N, T, H, D, dtype=torch.float32):
    rng = torch.Generator().manual_seed(T)
    qkv = 1.5 * torch.randn(N, T, 3, H, D, generator=rng)
    return qkv.to(dtype), torch.randn(N, T, H, D, generator=rng).to(dtype)


def exact(qkv, grad, scale):
    """Return output and gradient by softmax in float64."""
    x = qkv.detach().double().requires_grad_()
    q, k, v = x.unbind(2)
    weights = (torch.einsum("nthd,nshd->nhts", q, k) * scale).softmax(-1)
    out = torch.einsum("nhts,nshd->nthd", weights, v)
    return out.detach(), torch.autograd.grad(out, x, grad.double())[0]


def error(a, b):
    return float((a.double() - b).norm() / b.norm())


@interpreted
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", packed_attention.WIDTHS)
def test_interpreted_attention(tokens, width):
    from densefeed.models.kernels import packed_attention_triton as subject

    qkv, grad = example(2, tokens, 2, width)
    want, want_grad = exact(qkv, grad, 0.2)
    out, lse = subject.forward(qkv, 0.2)
    found = subject.backward(grad, qkv, out, lse, 0.2)
    assert error(out, want) < 1e-6
    assert error(found, want_grad) < 1e-6
    plain = Attention(2 * width, 2, False)
    plain.scale = 0.2
    assert error(plain.attend(qkv), want) < 1e-6


@interpreted
def test_interpreted_attention_in_16_bits():
    """Not further off than PyTorch's in the same type; the interpreter truncates to bfloat16."""
    from densefeed.models.kernels import packed_attention_triton as subject

    qkv, grad = example(1, 197, 2, 64, torch.float16)
    want, want_grad = exact(qkv, grad, 0.125)
    x = qkv.requires_grad_()
    plain = F.scaled_dot_product_attention(*(p.transpose(1, 2) for p in x.unbind(2)))
    (plain_grad,) = torch.autograd.grad(plain.transpose(1, 2), x, grad)
    out, lse = subject.forward(qkv.detach(), 0.125)
    assert error(out, want) < 1.1 * error(plain.transpose(1, 2), want)
    found = subject.backward(grad, qkv.detach(), out, lse, 0.125)
    assert error(found, want_grad) < 1.1 * error(plain_grad, want_grad)


@pytest.mark.slow
def test_outside_attention_in_the_interpreter():
    assert run_interpreted(__file__) == 2 * len(TOKENS) + 1


# By architecture, as docs/results/gpu.md has them.
MOST_REGISTERS = {
    "forward_kernel": {80: 168, 90: 132, 100: 152},
    "query_kernel": {80: 210, 90: 172, 100: 144},
    "key_kernel": {80: 255, 90: 250, 100: 233},
}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", ["forward_kernel", "query_kernel", "key_kernel"])
def test_outside_attention_compiles_without_spills(name, capability):
    from densefeed.models.kernels import packed_attention_triton as subject

    names = "qkv", "out", "grad", "grad_qkv"
    types = dict.fromkeys(names, "*bf16") | dict.fromkeys(("lse", "delta"), "*fp32")
    warps = 8 if capability < 90 and name == "query_kernel" else 4
    constants = subject.chunk_sizes(197) | {"D": 64}
    kernel, types = getattr(subject, name), types | {"scale": "fp32"}
    code = compile_kernel(kernel, types, constants, capability, True, warps, aligned=True)
    stack, registers = read_resources(code)
    assert (stack, registers <= MOST_REGISTERS[name][capability]) == (0, True), registers


def test_outside_chunks_cover_all_tokens():
    """The rest takes the smallest power of two that a product has."""
    from densefeed.models.kernels.packed_attention_triton import chunk_sizes

    for tokens in range(1, packed_attention.MOST_TOKENS + 1):
        _, full, tail = chunk_sizes(tokens).values()
        assert 64 * full + tail >= tokens
        assert tail in (0, 16, 32, 64)
        assert tail == 16 or 64 * full + tail // 2 < tokens or not tail


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("tokens", TOKENS)
def test_on_a_gpu_attention_is_as_exact_as_pytorchs(tokens):
    qkv, grad = (x.cuda() for x in example(4, tokens, 6, 64, torch.bfloat16))
    want, want_grad = exact(qkv, grad, 0.125)
    attention = Attention(384, 6, False)
    errors = []
    for use in (lambda model: None, packed_attention.use):
        use(attention)
        x = qkv.clone().requires_grad_()
        out = attention.attend(x)
        (found,) = torch.autograd.grad(out, x, grad)
        errors.append((error(out, want), error(found, want_grad)))
    assert all(ours < 1.1 * theirs for theirs, ours in zip(*errors, strict=True))

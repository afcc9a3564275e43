"""Triton kernels of attention with at most 256 tokens, for CUDA; see packed_attention.py.

Queries and keys are taken in chunks of 64, and the rest in one of 16, 32 or 64: 197 tokens are 208,
where tiles of powers of two would have 256. Exponentials are of base 2, so `scale` has a factor of
log2(e).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# N images   T tokens   H heads   D width of a head

CHUNK = 64
# log2(e), by which the kernels multiply gradients too.
LN_2 = 0.6931471805599453


@triton.jit
def load_rows(base, first, stride, tokens, R: tl.constexpr, D: tl.constexpr):
    row = first + tl.arange(0, R)
    at = base + row[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(at, mask=(row < tokens)[:, None], other=0.0)


@triton.jit
def store_rows(base, first, stride, tokens, value, R: tl.constexpr, D: tl.constexpr):
    row = first + tl.arange(0, R)
    at = base + row[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(at, value.to(base.dtype.element_ty), mask=(row < tokens)[:, None])


# ------------------------------------------------------------------------- forward


@triton.jit
def attend_keys(
    q, k0, v0, first, step, tokens, scale, out, peak, total, R: tl.constexpr, D: tl.constexpr
):
    """Add a chunk of keys to the sums of queries, which belong to their largest score so far."""
    k = load_rows(k0, first, step, tokens, R, D)
    v = load_rows(v0, first, step, tokens, R, D)
    score = tl.dot(q, tl.trans(k)) * scale
    score = tl.where((first + tl.arange(0, R) < tokens)[None, :], score, -float("inf"))
    new = tl.maximum(peak, tl.max(score, 1))
    p = tl.exp2(score - new[:, None])
    less = tl.exp2(peak - new)
    out = tl.dot(p.to(v.dtype), v, out * less[:, None])
    return out, new, total * less + tl.sum(p, 1)


@triton.jit
def forward_rows(
    qkv,
    out,
    lse,
    tokens,
    step,
    out_step,
    scale,
    first,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    FULL: tl.constexpr,
    TAIL: tl.constexpr,
    D: tl.constexpr,
):
    q = load_rows(qkv, first, step, tokens, R, D)
    k0, v0 = qkv + out_step, qkv + 2 * out_step
    total = tl.zeros([R], tl.float32)
    peak = tl.full([R], -float("inf"), tl.float32)
    sum = tl.zeros([R, D], tl.float32)
    for i in range(FULL):
        sum, peak, total = attend_keys(
            q, k0, v0, i * CHUNK, step, tokens, scale, sum, peak, total, CHUNK, D
        )
    if TAIL > 0:
        sum, peak, total = attend_keys(
            q, k0, v0, FULL * CHUNK, step, tokens, scale, sum, peak, total, TAIL, D
        )
    store_rows(out, first, out_step, tokens, sum / total[:, None], R, D)
    row = first + tl.arange(0, R)
    tl.store(lse + row, peak + tl.log2(total), mask=row < tokens)


@triton.jit
def forward_kernel(
    qkv,
    out,
    lse,
    tokens,
    heads,
    scale,
    CHUNK: tl.constexpr,
    FULL: tl.constexpr,
    TAIL: tl.constexpr,
    D: tl.constexpr,
):
    image, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    out_step = heads * D
    step = 3 * out_step
    qkv += image * tokens * step + head * D
    out += image * tokens * out_step + head * D
    lse += tl.program_id(0) * tokens
    chunk = tl.program_id(1)
    if chunk < FULL:
        forward_rows(
            qkv, out, lse, tokens, step, out_step, scale, chunk * CHUNK, CHUNK, CHUNK, FULL, TAIL, D
        )
    elif TAIL > 0:
        forward_rows(
            qkv, out, lse, tokens, step, out_step, scale, FULL * CHUNK, TAIL, CHUNK, FULL, TAIL, D
        )


# ------------------------------------------------------------------------- backward: queries


@triton.jit
def query_gradient(
    q, grad, lse, delta, k0, v0, first, step, tokens, scale, sum, R: tl.constexpr, D: tl.constexpr
):
    k = load_rows(k0, first, step, tokens, R, D)
    v = load_rows(v0, first, step, tokens, R, D)
    p = tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
    p = tl.where((first + tl.arange(0, R) < tokens)[None, :], p, 0.0)
    score_grad = p * (tl.dot(grad, tl.trans(v)) - delta[:, None])
    return tl.dot(score_grad.to(q.dtype), k, sum)


@triton.jit
def query_rows(
    qkv,
    out,
    grad,
    lse,
    delta,
    grad_qkv,
    tokens,
    step,
    out_step,
    scale,
    first,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    FULL: tl.constexpr,
    TAIL: tl.constexpr,
    D: tl.constexpr,
):
    row = first + tl.arange(0, R)
    q = load_rows(qkv, first, step, tokens, R, D)
    g = load_rows(grad, first, out_step, tokens, R, D)
    o = load_rows(out, first, out_step, tokens, R, D)
    d = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    # The kernel of keys reads it, instead of `out`.
    tl.store(delta + row, d, mask=row < tokens)
    e = tl.load(lse + row, mask=row < tokens, other=float("inf"))
    k0, v0 = qkv + out_step, qkv + 2 * out_step
    sum = tl.zeros([R, D], tl.float32)
    for i in range(FULL):
        sum = query_gradient(q, g, e, d, k0, v0, i * CHUNK, step, tokens, scale, sum, CHUNK, D)
    if TAIL > 0:
        sum = query_gradient(q, g, e, d, k0, v0, FULL * CHUNK, step, tokens, scale, sum, TAIL, D)
    store_rows(grad_qkv, first, step, tokens, sum * (scale * 0.6931471805599453), R, D)


@triton.jit
def query_kernel(
    qkv,
    out,
    grad,
    lse,
    delta,
    grad_qkv,
    tokens,
    heads,
    scale,
    CHUNK: tl.constexpr,
    FULL: tl.constexpr,
    TAIL: tl.constexpr,
    D: tl.constexpr,
):
    image, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    out_step = heads * D
    step = 3 * out_step
    qkv += image * tokens * step + head * D
    grad_qkv += image * tokens * step + head * D
    out += image * tokens * out_step + head * D
    grad += image * tokens * out_step + head * D
    lse += tl.program_id(0) * tokens
    delta += tl.program_id(0) * tokens
    chunk = tl.program_id(1)
    if chunk < FULL:
        query_rows(
            qkv,
            out,
            grad,
            lse,
            delta,
            grad_qkv,
            tokens,
            step,
            out_step,
            scale,
            chunk * CHUNK,
            CHUNK,
            CHUNK,
            FULL,
            TAIL,
            D,
        )
    elif TAIL > 0:
        query_rows(
            qkv,
            out,
            grad,
            lse,
            delta,
            grad_qkv,
            tokens,
            step,
            out_step,
            scale,
            FULL * CHUNK,
            TAIL,
            CHUNK,
            FULL,
            TAIL,
            D,
        )


# ------------------------------------------------------------------------- backward: keys, values


@triton.jit
def key_gradient(
    qkv,
    grad,
    lse,
    delta,
    at,
    step,
    out_step,
    tokens,
    scale,
    k,
    v,
    visible,
    k_sum,
    v_sum,
    R: tl.constexpr,
    D: tl.constexpr,
):
    q = load_rows(qkv, at, step, tokens, R, D)
    g = load_rows(grad, at, out_step, tokens, R, D)
    row = at + tl.arange(0, R)
    # Queries beyond the last token have weights of zero.
    e = tl.load(lse + row, mask=row < tokens, other=float("inf"))
    d = tl.load(delta + row, mask=row < tokens, other=0.0)
    p = tl.exp2(tl.dot(k, tl.trans(q)) * scale - e[None, :])
    p = tl.where(visible[:, None], p, 0.0)
    v_sum = tl.dot(p.to(q.dtype), g, v_sum)
    score_grad = p * (tl.dot(v, tl.trans(g)) - d[None, :])
    return tl.dot(score_grad.to(q.dtype), q, k_sum), v_sum


@triton.jit
def key_rows(
    qkv,
    grad,
    lse,
    delta,
    grad_qkv,
    tokens,
    step,
    out_step,
    scale,
    first,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    FULL: tl.constexpr,
    TAIL: tl.constexpr,
    D: tl.constexpr,
):
    k = load_rows(qkv + out_step, first, step, tokens, R, D)
    v = load_rows(qkv + 2 * out_step, first, step, tokens, R, D)
    visible = first + tl.arange(0, R) < tokens
    k_sum, v_sum = tl.zeros([R, D], tl.float32), tl.zeros([R, D], tl.float32)
    for i in range(FULL):
        k_sum, v_sum = key_gradient(
            qkv, grad, lse, delta, i * CHUNK, step, out_step, tokens, scale, k, v, visible,
            k_sum, v_sum, CHUNK, D,
        )  # fmt: skip
    if TAIL > 0:
        k_sum, v_sum = key_gradient(
            qkv, grad, lse, delta, FULL * CHUNK, step, out_step, tokens, scale, k, v, visible,
            k_sum, v_sum, TAIL, D,
        )  # fmt: skip
    store_rows(grad_qkv + out_step, first, step, tokens, k_sum * (scale * 0.6931471805599453), R, D)
    store_rows(grad_qkv + 2 * out_step, first, step, tokens, v_sum, R, D)


@triton.jit
def key_kernel(
    qkv,
    grad,
    lse,
    delta,
    grad_qkv,
    tokens,
    heads,
    scale,
    CHUNK: tl.constexpr,
    FULL: tl.constexpr,
    TAIL: tl.constexpr,
    D: tl.constexpr,
):
    image, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    out_step = heads * D
    step = 3 * out_step
    qkv += image * tokens * step + head * D
    grad_qkv += image * tokens * step + head * D
    grad += image * tokens * out_step + head * D
    lse += tl.program_id(0) * tokens
    delta += tl.program_id(0) * tokens
    chunk = tl.program_id(1)
    if chunk < FULL:
        key_rows(
            qkv,
            grad,
            lse,
            delta,
            grad_qkv,
            tokens,
            step,
            out_step,
            scale,
            chunk * CHUNK,
            CHUNK,
            CHUNK,
            FULL,
            TAIL,
            D,
        )
    elif TAIL > 0:
        key_rows(
            qkv,
            grad,
            lse,
            delta,
            grad_qkv,
            tokens,
            step,
            out_step,
            scale,
            FULL * CHUNK,
            TAIL,
            CHUNK,
            FULL,
            TAIL,
            D,
        )


# ------------------------------------------------------------------------- launches


def chunk_sizes(tokens: int) -> dict[str, int]:
    """Return the number of whole chunks of this many tokens, and the rows of the rest, if any."""
    full, rest = divmod(tokens, CHUNK)
    # tl.dot takes powers of two from 16 on.
    tail = max(16, triton.next_power_of_2(rest)) if rest else 0
    return {"CHUNK": CHUNK, "FULL": full, "TAIL": tail}


def launch(kernel: triton.JITFunction, tensors: list[Tensor], scale: float) -> None:
    """Run a kernel on every image, head and chunk of packed queries, keys and values."""
    N, T, _, H, D = tensors[0].shape
    sizes = chunk_sizes(T)
    # Triton launches on the current device.
    with torch.cuda.device_of(tensors[0]):
        options = sizes | {"D": D, "num_warps": choose_warps(kernel)}
        grid = N * H, sizes["FULL"] + (sizes["TAIL"] > 0)
        kernel[grid](*tensors, T, H, scale / LN_2, **options, enable_fp_fusion=True)


def choose_warps(kernel: triton.JITFunction) -> int:
    """Return the warps of a program."""
    # Before Hopper sums of products lie in registers as their factors do: four warps would spill.
    before = torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0)
    return 8 if before and kernel is query_kernel else 4


def forward(qkv_NT3HD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output `[N, T, H, D]`, and the logarithm of each query's sum `[N, H, T]`."""
    N, T, _, H, D = qkv_NT3HD.shape
    out = qkv_NT3HD.new_empty(N, T, H, D)
    lse = qkv_NT3HD.new_empty(N, H, T, dtype=torch.float32)
    launch(forward_kernel, [qkv_NT3HD, out, lse], scale)
    return out, lse


def backward(
    grad_NTHD: Tensor, qkv_NT3HD: Tensor, out_NTHD: Tensor, lse_NHT: Tensor, scale: float
) -> Tensor:
    """Return the gradient of `qkv`, packed as it is."""
    grad_qkv, delta = torch.empty_like(qkv_NT3HD), torch.empty_like(lse_NHT)
    launch(query_kernel, [qkv_NT3HD, out_NTHD, grad_NTHD, lse_NHT, delta, grad_qkv], scale)
    launch(key_kernel, [qkv_NT3HD, grad_NTHD, lse_NHT, delta, grad_qkv], scale)
    return grad_qkv

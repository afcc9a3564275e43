"""The Triton kernels against float64: in Triton's interpreter, compiled for GPUs, and on a GPU.

Compiling needs no GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from densefeed.models.kernels import sparse_cross_entropy as kernels
from densefeed.objectives.losses import sparse_cross_entropy
from densefeed.pipelines.targets import SparseTargets

from ...interpreter import interpreted, run_interpreted

ROOT = Path(__file__).parents[3]
triton = pytest.importorskip("triton")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# N, T, K, M: one block and several, of classes and of slots; odd numbers; one of everything.
SHAPES = (
    (3, 5, 11, 4),
    (1, 1, 5, 1),
    (2, 3, 1000, 70),
    (1, 2, 4096, 64),
    (1, 2, 9001, 130),
    (1, 1, 21_841, 300),
)


def example(N, T, K, M, dtype, device):
    """Return gradient, logits and targets.

    Logits have an offset, the palette has most classes more than once, and gradients have both
    signs.
    """
    rng = torch.Generator().manual_seed(N + K)
    palette = torch.randint(K - max(1, M // 3), K, (N, M), generator=rng)
    base = torch.rand(N, T, generator=rng) / K
    extra = (torch.rand(N, T, M, generator=rng) - 0.3) / M
    logits = (torch.randn(N, T, K, generator=rng) * 5 - 20).to(dtype)
    grad = torch.randn(N, T, generator=rng)
    return [
        tensor.to(device)
        for tensor in (grad, logits, palette, extra, base, K * base + extra.sum(-1))
    ]


def dense(grad, logits, palette, extra, base, total):
    """Return the loss and the gradient of the logits from a dense target in float64."""
    x = logits.detach().double().requires_grad_()
    target = base.double()[..., None].repeat(1, 1, x.shape[2])
    target.scatter_add_(2, palette[:, None].expand(extra.shape), extra.double())
    loss = -(target * x.log_softmax(-1)).sum(-1)
    return loss.detach(), torch.autograd.grad(loss, x, grad.double())[0]


def check(loss, gradient, example, rounding=0.5):
    """Compare with `dense`, within rounding errors.

    A gradient in half precision may be off by `rounding` units in the last place.
    """
    want, want_gradient = dense(*example)
    torch.testing.assert_close(loss.double(), want, rtol=2e-6, atol=2e-6)
    assert gradient.dtype == example[1].dtype
    units = 0 if gradient.dtype == torch.float32 else rounding * torch.finfo(gradient.dtype).eps
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=units + 3e-6, atol=1e-7)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_interpreted_kernels(shape, dtype):
    from densefeed.models.kernels import sparse_cross_entropy_triton as subject

    grad, logits, *targets = case = example(*shape, dtype, "cpu")
    loss, *sums = subject.forward(logits, *targets)
    # The interpreter truncates to bfloat16.
    check(loss, subject.backward(grad, logits, *sums, *targets), case, rounding=1)
    plain_loss, *plain_sums = kernels.plain_forward(logits, *targets)
    torch.testing.assert_close([loss, *sums], [plain_loss, *plain_sums], rtol=2e-6, atol=2e-6)


@interpreted
def test_interpreted_kernels_read_logits_that_are_not_contiguous():
    from densefeed.models.kernels import sparse_cross_entropy_triton as subject

    grad, logits, *targets = case = example(3, 4, 50, 6, torch.float32, "cpu")
    wide = torch.randn(3, 9, 60)
    wide[:, 1::2, :50] = logits
    for view in (wide[:, 1::2, :50], logits.mT.contiguous().mT):
        loss, *sums = subject.forward(view, *targets)
        check(loss, subject.backward(grad.T.contiguous().T, view, *sums, *targets), case)


@interpreted
@pytest.mark.parametrize("wrong", [50, 65_535, -1, 2**32])
def test_interpreted_kernels_write_nothing_beyond_a_row(wrong):
    """A class beyond the logits makes the rows of its image NaN, and no other number."""
    from densefeed.models.kernels import sparse_cross_entropy_triton as subject

    grad, logits, *targets = case = example(3, 4, 50, 6, torch.float32, "cpu")
    want = subject.backward(grad, logits, *subject.forward(logits, *targets)[1:], *targets)
    targets[0][1, 2] = wrong
    # Enough memory around the tensors that stores beyond them would not end the process.
    room = torch.zeros(2**18)
    out = room[2**17 :][: logits.numel()].view_as(logits)
    wide = torch.zeros(2**18)
    wide[2**17 :][: logits.numel()] = logits.flatten()
    logits = wide[2**17 :][: logits.numel()].view_as(logits)
    loss, *sums = subject.forward(logits, *targets)
    read = subject.prepare(logits, *targets, grad)
    subject.launch(subject.backward_kernel, *read, *sums, out)
    assert loss[1].isnan().all()
    assert out[1].isnan().all()
    torch.testing.assert_close(out[[0, 2]], want[[0, 2]], rtol=0, atol=0)
    check(loss[[0, 2]], out[[0, 2]], [x[[0, 2]] for x in case])
    assert not room[: 2**17].any()
    assert not room[2**17 + logits.numel() :].any()


@pytest.mark.slow
def test_in_the_interpreter():
    assert run_interpreted(__file__) == len(SHAPES) * len(DTYPES) + 5


@pytest.mark.slow
def test_a_cpu_needs_no_triton():
    """CPU builds of PyTorch come without Triton.

    `None` in `sys.modules` makes importing it an ImportError; nothing may import it before.
    """
    code = """if True:
        import sys, torch
        sys.modules["triton"] = None
        from densefeed.objectives.losses import sparse_cross_entropy
        from densefeed.pipelines.targets import SparseTargets
        logits = torch.zeros(1, 1, 2, requires_grad=True)
        ones = torch.ones(1, 1)
        targets = SparseTargets(ones.long(), ones[None], 0 * ones, ones, ones)
        sparse_cross_entropy(logits, targets).sum().backward()
        assert logits.grad.squeeze().tolist() == [0.5, -0.5]
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 90, pytest.param(100, marks=pytest.mark.slow)])
def test_compiles_without_a_gpu(capability):
    """To the binary, ptxas included, which finds errors that the interpreter accepts."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from densefeed.models.kernels import sparse_cross_entropy_triton as subject

    for pointer in ("*fp32", "*bf16", "*fp16"):
        for classes, slots in ((1000, 40), (21_841, 512)):
            sizes = subject.block_sizes(classes, slots)
            warps = sizes.pop("num_warps")
            for kernel in (subject.forward_kernel, subject.backward_kernel):
                types = {
                    name: "constexpr" if name in sizes else "*fp32" for name in kernel.arg_names
                }
                types |= {"logits": pointer, "palette": "*i64"} | (
                    {"out": pointer} if "out" in types else {}
                )
                types |= dict.fromkeys(
                    ("tokens", "classes", "slots", "image_stride", "token_stride"), "i32"
                )
                source = ASTSource(kernel, types, constexprs=sizes)
                compiled = triton.compile(
                    source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps}
                )
                assert compiled.asm["cubin"].startswith(b"\x7fELF")


# ---------------------------------------------------------------- on a GPU


def on_gpu(test):
    return pytest.mark.gpu(
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")(test)
    )


def compute_loss(logits, *targets, function=sparse_cross_entropy):
    palette, extra, base, total = targets
    return function(logits, SparseTargets(palette, extra, base, total, total))


def loss_and_gradient(grad, logits, *targets):
    loss = compute_loss(logits, *targets)
    return loss, *torch.autograd.grad(loss, logits, grad)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (8, 196, 1000, 40), (4, 49, 21_841, 512)])
def test_gpu_kernels(shape, dtype):
    case = example(*shape, dtype, "cuda")
    case[1].requires_grad_()
    check(*loss_and_gradient(*case), case)


@on_gpu
def test_gpu_float64_takes_the_plain_path():
    case = example(2, 3, 50, 6, torch.float64, "cuda")
    case[1].requires_grad_()
    loss, gradient = loss_and_gradient(*case)
    want, want_gradient = dense(*case)
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-6)  # targets are float32
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-6, atol=1e-6)


@on_gpu
def test_gpu_has_no_host_sync_and_can_be_captured():
    """One CUDA graph of forward and backward, replayed on other numbers."""
    case = example(8, 196, 1000, 40, torch.bfloat16, "cuda")
    case[1].requires_grad_()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        # Kernels are compiled and loaded at first use.
        loss_and_gradient(*case)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss_and_gradient(*case)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = loss_and_gradient(*case)
    with torch.no_grad():
        case[1].mul_(-0.5)
    graph.replay()
    torch.testing.assert_close(got, loss_and_gradient(*case))


@on_gpu
def test_gpu_compiles_without_a_graph_break():
    case = example(8, 49, 1000, 40, torch.bfloat16, "cuda")
    case[1].requires_grad_()
    loss = compute_loss(*case[1:], function=torch.compile(sparse_cross_entropy, fullgraph=True))
    check(loss, *torch.autograd.grad(loss, case[1], case[0]), case)

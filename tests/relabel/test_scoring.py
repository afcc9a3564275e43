"""Numbers kept of a batch, precision and batch size, against float64 and by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from densefeed.relabel import scoring
from densefeed.relabel.scoring import (
    Scorer,
    choose_compile,
    find_batch_size,
    keep,
    timed_convolutions,
    to_maps,
)
from densefeed.relabel.teacher import Teacher
from densefeed.system.errors import UserError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def scorer(device=CPU, name="test_resnet", **options):
    torch.manual_seed(0)
    config = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "interpolation": "bilinear"}
    model = timm.create_model(name, num_classes=7)
    return Scorer(Teacher(model, 64, "squash", config), device, **options)


def random_pictures(count=3):
    return torch.randint(
        0, 256, (count, 1, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def test_kept_numbers_are_top_k_and_classes_beyond_int16():
    """40,000 classes: numbers that do not fit int16 are read as uint16."""
    logits = torch.randn(1, 2, 2, 40_000, generator=torch.Generator().manual_seed(0))
    maps = to_maps(keep(logits, 3), np.zeros((1, 4), np.float32))
    order = np.argsort(-logits.double().numpy(), axis=-1)[..., :3]
    np.testing.assert_array_equal(maps.cls, order)
    assert maps.cls.max() > 32767
    np.testing.assert_allclose(maps.lse, logits.double().exp().sum(-1).log(), rtol=1e-3)
    assert (maps.logit.dtype, maps.cls.dtype, maps.lse.dtype) == (np.float16, np.uint16, np.float16)


def test_keep_does_not_sync(no_host_read):
    with no_host_read():
        assert keep(torch.zeros(1, 2, 2, 9), 4).logit.shape == (1, 2, 2, 4)


def test_bf16_agrees_with_fp32_to_its_eight_bits():
    with torch.no_grad():
        exact, rounded = (
            scorer(precision=precision).logits(random_pictures()).double()
            for precision in ("fp32", "bf16")
        )
    error = (exact - rounded).abs().max()
    assert 0 < error < 10 * 2.0**-8 * exact.abs().max()  # roundings of ten layers


@pytest.mark.slow
def test_a_compiled_scorer_keeps_the_same_numbers(monkeypatch):
    """The graph of the compiler's front end is run as it is.

    The last batch is filled up, so nothing is compiled twice.
    """
    shapes, compile_ = [], torch.compile

    def run_as_it_is(graph, inputs):
        shapes.extend(len(x) for x in inputs if x.dtype == torch.uint8)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=run_as_it_is, inference_compiler=run_as_it_is)
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, **more: compile_(function, backend=backend, fullgraph=True, **more),
    )
    plain, compiled = scorer(), scorer(compiled=True)
    for rows in (3, 2):
        want, got = (
            one.begin(random_pictures(), rows, 2).maps_sync(np.zeros((rows, 4), np.float32))
            for one in (plain, compiled)
        )
        assert len(got.logit) == rows
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(ours.astype(float), theirs.astype(float), atol=2e-3)
    assert shapes == [3]


@pytest.mark.parametrize(
    ("mode", "device", "want"),
    [
        ("auto", CUDA, True),
        ("auto", CPU, False),
        ("whole", CUDA, True),
        ("whole", CPU, True),
        ("never", CUDA, False),
        ("never", CPU, False),
    ],
)
def test_auto_compiles_on_a_gpu(mode, device, want):
    assert choose_compile(mode, device) is want


def test_outside_auto_compiles_nothing_without_a_compiler(monkeypatch):
    monkeypatch.setattr(scoring, "has_triton", lambda: False)
    assert choose_compile("auto", CUDA) is False
    assert choose_compile("whole", CUDA) is True


@pytest.mark.parametrize("before", [False, True])
def test_convolutions_are_timed_on_a_gpu_only_and_the_setting_is_restored(monkeypatch, before):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    with timed_convolutions(CPU):
        assert torch.backends.cudnn.benchmark is before

    @timed_convolutions(CUDA)
    def fail():
        assert torch.backends.cudnn.benchmark
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.backends.cudnn.benchmark is before


def test_scored_batches_are_timed_and_those_of_the_search_for_a_batch_are_not(monkeypatch):
    """The search measures memory, of which the timing takes as much as is free."""
    monkeypatch.setattr(scoring, "timed_convolutions", lambda device: timed_convolutions(CUDA))
    ours, timed = scorer(), []
    ours.teacher.register_forward_pre_hook(lambda *_: timed.append(torch.backends.cudnn.benchmark))
    ours.try_out_sync(random_pictures(), 2)
    ours.begin(random_pictures(), 3, 2)
    assert timed == [False, True]


def test_on_a_gpu_weights_are_channels_last_and_batches_of_one_size():
    """A scorer is built without a driver if the teacher stays on the CPU."""
    ours = scorer(device=CUDA, name="test_nfnet")
    weights = [p for p in ours.teacher.parameters() if p.ndim == 4 and min(p.shape[1:3]) > 1]
    # Those of convolutions that were frozen too.
    assert len(weights) > 10
    assert all(w.is_contiguous(memory_format=torch.channels_last) for w in weights)
    assert ours.fixed_size
    assert not scorer().fixed_size


class FakeAllocator:
    """PyTorch's caching allocator, for batches whose blocks fit no other batch; an image takes 1.

    It holds freed blocks until `empty_cache`, or until memory runs out.
    """

    def __init__(self, total):
        self.total, self.cached, self.peak = total, 0, 0

    def score(self, count):
        if self.cached + count > self.total:
            self.cached = 0
        if count > self.total:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.cached += count
        self.peak = max(self.peak, self.cached)

    def empty_cache(self):
        self.cached = 0

    def reset_peak_memory_stats(self, device):
        self.peak = self.cached

    def max_memory_reserved(self, device):
        return self.peak

    def get_device_properties(self, device):
        return SimpleNamespace(total_memory=self.total)


@pytest.mark.parametrize(
    ("total", "want"), [(100, 64), (560, 256), (1000, 256), (17, 8), (2, 1), (1, None)]
)
def test_the_search_counts_each_batch_alone_and_releases_its_memory(monkeypatch, total, want):
    """The largest power of two of at most 0.9 of the memory, and of at most 256.

    Of 560, the batches up to 256 take 511 together, more than 0.9; of 1, one image is more.
    """
    memory = FakeAllocator(total)
    for name in ("empty_cache", "reset_peak_memory_stats", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, getattr(memory, name))
    monkeypatch.setattr(torch.cuda, "get_device_properties", memory.get_device_properties)
    if want:
        assert find_batch_size(memory.score, CUDA) == want
    else:
        with pytest.raises(UserError, match=r"does not fit into the GPU's memory with one image"):
            find_batch_size(memory.score, CUDA)
    assert find_batch_size(lambda count: pytest.fail("nothing is tried on a CPU"), CPU) == 32
    # What is measured later is not that of the search.
    assert (memory.cached, memory.peak) == (0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_numbers_of_the_cpu():
    torch.manual_seed(0)
    config = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "interpolation": "bilinear"}
    teacher = Teacher(timm.create_model("test_resnet", num_classes=7), 64, "squash", config)
    window = np.zeros((3, 4), np.float32)
    want = Scorer(teacher, CPU).begin(random_pictures(), 3, 7).maps_sync(window)
    ours = Scorer(teacher.cuda(), CUDA)
    first, second = (ours.begin(random_pictures().pin_memory(), 3, 7) for _ in range(2))
    got = second.maps_sync(window)
    assert second.idle_since(first) >= 0
    np.testing.assert_allclose(got.logit.astype(float), want.logit.astype(float), atol=2e-2)
    assert find_batch_size(lambda count: ours.try_out_sync(random_pictures(count), 7), CUDA) == 256

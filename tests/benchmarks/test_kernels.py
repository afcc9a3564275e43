"""Small runs of the benchmark of kernels: every kernel of a step, and floors by hand."""

import pytest
import timm
import torch

from benchmarks.kernels import COPY, PRODUCT, Kernel, KernelBenchmark, floors, list_kernels, main
from densefeed.models import lvvit  # noqa: F401  (registers its models)
from densefeed.models.meta_device import meta_device
from densefeed.system.errors import UserError
from densefeed.training.speed import training_flops

SMALL = dict(model="lvvit_micro", batch=2, size=32, classes=7, device="cpu", threads=1)
SMALL |= dict(calls=1, rounds=2, side=64, record=False)


def test_a_row_and_a_floor_for_every_kernel(tmp_path):
    document = main(KernelBenchmark(**SMALL, json=tmp_path / "out.json"))
    names = [row["name"] for row in document["rows"]]
    assert names[:2] == [PRODUCT, COPY]
    assert [ratio["b"] for ratio in document["ratios"]] == names[2:]
    assert all(row["p25"] > 0 for row in document["rows"] + document["ratios"])
    kinds = ("qkv", "class head", "token head", "attention", "norm in float32", "gelu")
    kinds = (*kinds, "convolution", "batch")
    assert all(any(name.startswith(kind) for name in names) for kind in kinds)


def test_operations_are_those_of_a_step():
    """Compared with PyTorch's counter. It has two products where attention's gradient has five."""
    benchmark = KernelBenchmark(**SMALL)
    model = timm.create_model("lvvit_micro", img_size=32, num_classes=7)
    kernels = list_kernels(benchmark, model, torch.device("cpu"))
    seen = {
        name: kernel.layers * kernel.operations
        for name, kernel in kernels.items()
        if name not in (PRODUCT, COPY)
    }
    attention = sum(n for name, n in seen.items() if name.startswith("attention"))
    forward = seen["attention, forward"]
    assert attention == 3.5 * forward
    ours = sum(seen.values()) - attention + 3 * forward
    # The images have no gradient.
    ours += seen["convolution 0, forward"]
    with meta_device():
        other = timm.create_model("lvvit_micro", img_size=32, num_classes=7)
    assert ours == 2 * training_flops(other, 32)


def test_a_floor_is_the_larger_of_two_times():
    """A product of 10 operations takes 2 s, and a copy of 10 bytes 1 s."""
    kernels = {
        PRODUCT: Kernel(print, 1, 10, 0),
        COPY: Kernel(print, 1, 0, 10),
        "computes": Kernel(print, 3, 20, 10),
        "moves": Kernel(print, 1, 1, 40),
    }
    rates = {PRODUCT: [0.5], COPY: [1.0]}
    assert floors(kernels, rates, "computes") == [3 * 4000]
    assert floors(kernels, rates, "moves") == [4000]


def test_another_model_is_refused():
    with pytest.raises(UserError, match="--model test_vit is not an LV-ViT"):
        main(KernelBenchmark(**SMALL | {"model": "test_vit"}))

"""A step on tensors of a CUDA device that is not there: it waits for nothing.

FakeTensorMode gives tensors a device and no data. It raises an exception where a value is read or
two devices meet; `Watch` records what else makes the host wait, and the dtypes of products.
"""

import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import densefeed
from densefeed import recipes
from densefeed.models.checkpoints import ModelSpec
from densefeed.objectives import OBJECTIVES
from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.plan import EpochPlan
from densefeed.system.options import with_options
from densefeed.system.precision import autocast_dtype
from densefeed.training.build import build_model
from densefeed.training.config import Config
from densefeed.training.optimizers import FUSED
from densefeed.training.ranks import Ranks
from densefeed.training.setup import build_trainable
from densefeed.training.student import update

from ..runs import objective_for, step_for

CUDA, IMAGES, CLASSES = torch.device("cuda"), 8, 100
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention")
PACKAGE = f"{Path(densefeed.__file__).parent}/"


class Watch(TorchDispatchMode):
    """Records copies that wait, masks as indices (their count is read), and products."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        # Where products of each dtype are.
        self.products: dict[torch.dtype, set[str]] = defaultdict(set)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        # PyTorch has no such kernel for fake tensors. It works in place and returns nothing.
        if name == "_fused_sgd_":
            return None
        out = func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in ("copy_", "_to_copy"):
            source, target = (given[1], given[0]) if name == "copy_" else (given[0], out)
            positional = args[2] if len(args) > 2 else False
            if source.is_cuda != target.is_cuda and not kwargs.get("non_blocking", positional):
                self.record(f"a copy of {tuple(source.shape)} between devices")
        if name in ("index", "index_put", "index_put_") and has_mask(args[1]):
            self.record("a mask as an index")
        if name in PRODUCTS and given[0].is_cuda:
            self.products[given[-1].dtype].add(find_caller().partition(":")[0])
        # The fused head is one operator, and an argument is the dtype of its products.
        if name == "fused_token_loss":
            self.products[args[8]].add(name)
        return out

    def record(self, what: str) -> None:
        self.waits.append(f"{what} at {find_caller()}")


def find_caller() -> str:
    """Return file and line of the package that runs the current operation, or of a library."""
    ours = [f for f in traceback.extract_stack() if f.filename.startswith(PACKAGE)]
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "elsewhere"


def has_mask(indices: list[Tensor | None]) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def fake_batch(size: int, spec: ScoreMapSpec) -> Batch:
    """A batch as loaders make it, pinned on the host."""
    n, cells = IMAGES, (IMAGES, spec.side, spec.side)
    shapes = {
        "image": ((n, size, size, 3), torch.uint8),
        "label": ((n,), torch.int64),
        "view": ((n, 2, 3), torch.float32),
        "shown": ((n, 4), torch.float32),
        "index": ((n,), torch.int64),
        "repeat": ((n,), torch.int64),
        "weight": ((n,), torch.float32),
        "map_logit": ((*cells, spec.top_k), torch.float16),
        "map_class": ((*cells, spec.top_k), torch.uint16),
        "map_lse": (cells, torch.float16),
        "window": ((n, 4), torch.float32),
        "mask": ((n, size, size), torch.int16),
    }
    return Batch(
        **{name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()},
        axis_aligned=True,
    )


class HostTorch:
    """The module torch for timm's EMA, whose generator would need a driver."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def Generator(self, device: torch.device) -> torch.Generator:  # noqa: N802
        return torch.Generator()


def build_meta(*arguments) -> tuple[nn.Module, ModelSpec]:
    """Build a model without values. timm's read rates from a tensor, which a fake one refuses."""
    with unset_fake_temporarily(), torch.device("meta"):
        return build_model(*arguments)


def replace_tensors(
    module: nn.Module, device: torch.device, memory_format: torch.memory_format | None = None
) -> nn.Module:
    """Move a module as `module.to` does, with new parameters; those that are shared stay so."""

    def move(tensor: Tensor) -> Tensor:
        layout = (memory_format if tensor.ndim == 4 else None) or torch.contiguous_format
        # Not empty_like, which computes where the mode knows a tensor's value.
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device, memory_format=layout)

    moved = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if parameter not in moved:
                    moved[parameter] = nn.Parameter(move(parameter), parameter.requires_grad)
                part._parameters[name] = moved[parameter]
        part._buffers.update({n: move(b) for n, b in part._buffers.items() if b is not None})
    return module


def copy_module(module: nn.Module) -> nn.Module:
    """Copy a module. PyTorch 2.15 crashes where `deepcopy` copies fake tensors of a device."""
    copies = {id(p): nn.Parameter(p.detach().clone()) for p in module.parameters()}
    return deepcopy(module, copies | {id(buffer): buffer.clone() for buffer in module.buffers()})


def multiply(query: Tensor, key: Tensor, value: Tensor, *_, **options) -> Tensor:
    """The products of scaled_dot_product_attention."""
    return query @ key.mT @ value


def add_gradients(module: nn.Module, *_: Tensor) -> None:
    """Do what a backward pass leaves: the gradients, also of weights that networks share."""
    for parameter in [*module.parameters(), *getattr(module, "aliases", ())]:
        parameter.grad = torch.empty_like(parameter)


def to_numpy(tensor: Tensor, tensor_numpy: Callable = Tensor.numpy) -> np.ndarray:
    """Return the numbers of a real tensor; the mode would make it fake."""
    with unset_fake_temporarily():
        return tensor_numpy(tensor)


@contextmanager
def fake_cuda():
    """Fake tensors, and what else PyTorch asks of a driver."""
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        for name, value in (
            # Otherwise autocast and GradScaler switch themselves off.
            ("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
            ("torch.cuda.is_bf16_supported", lambda *_: True),
            ("torch.cuda.get_device_capability", lambda *_: (9, 0)),
            ("torch.Tensor.pin_memory", lambda tensor: tensor),
            ("torch.Tensor.numpy", to_numpy),
            # Fake tensors have no memory for a kernel; tests/pretended has the launches.
            ("densefeed.pipelines.augment.fused_triton.launch", lambda *_, **constants: None),
            ("timm.utils.model_ema.deepcopy", copy_module),
            ("timm.utils.model_ema.torch", HostTorch()),
            # `module.to` would swap parameters, and refuses those that the mode remembers.
            ("torch.nn.Module.to", replace_tensors),
            # Without a driver PyTorch takes its plain form, in float32.
            ("torch.nn.functional.scaled_dot_product_attention", multiply),
        ):
            stack.enter_context(mock.patch(name, value))
        yield


def run_step(config: Config) -> Watch:
    """Watch a step of a run: augmentation, mixing, targets, losses, guard, update, EMA."""
    optim = replace(config.optim, batch=IMAGES, microbatch=IMAGES)
    config = replace(config, optim=optim, run=replace(config.run, compile="never"))
    size, objective, ranks = config.data.size, objective_for(config), Ranks(0, 1, CUDA)
    plan = EpochPlan(num_samples=IMAGES, batch=IMAGES, seed=0, mode="train", sizes=((0, size),))
    spec = ScoreMapSpec(18, 5, CLASSES, "tail", 40, 0.5)
    loader = SimpleNamespace(plan=plan, score_maps=spec, prepares=True)
    with fake_cuda():
        model, _ = build_meta(config.model, config.data, objective, CLASSES)
        sections = config.model, optim, config.run
        student = build_trainable(*sections, objective, model, ranks)
        trainable, dtype = student.trainable.train(), autocast_dtype(config.run.precision, CUDA)
        step = step_for(config, loader, trainable, dtype)
        draws = np.arange(IMAGES), np.zeros(IMAGES, np.int64)
        # Real tensors, because the choice is laid out for kernels with NumPy.
        with unset_fake_temporarily():
            choice = step.augmentation.choose(0, *draws, size, size)
        with Watch() as watch:
            batch = step.augmentation(fake_batch(size, spec).to(CUDA), choice)
            losses = step.losses(student.network, batch)
            # The autograd engine needs a driver.
            with mock.patch("torch.Tensor.backward", partial(add_gradients, trainable)):
                update(student, ranks, 0, losses)
    return watch


# Options that take other ways through a step than the recipes do.
OPTIONS = {
    "regions": {"mixtoken": False, "cutmix": 1.0, "mix_label": "regions"},
    "ground truth": {"ground_truth": "intended"},
    "fused head": {"model_kwargs": ("depth=2", "fused_head=True")},
    "no augmentation": {"rand_augment": "", "erase_probability": 0.0},
    "much augmentation": {"rand_augment": "rand-m9-n10-inc1"},
    "color jitter": {"rand_augment": "", "color_jitter": (0.4, 0.4, 0.4), "shift": 4},
    "black border": {"shift": 4, "shift_border": "black"},
    "published sampling": {"geometry": "published", "outside": "uniform"},
    "float16": {"precision": "fp16", "clip_grad": 1.0, "on_nonfinite": "skip"},
    "sgd": {"optimizer": "sgd", "on_nonfinite": "skip"},
    "sam": {"sam_rho": 0.1, "on_nonfinite": "skip"},
}
LVVIT = recipes.RECIPES["lvvit_s_224_token_label"]
# A recipe of each family with few blocks; all whole recipes are slow.
FAMILIES = {
    "lvvit_s_224_token_label": "depth=2",
    "deit_s_224_token_label": "depth=2",
    "bootstrapping_vit_s_joint": "depth=2",
    "bootstrapping_vit_s_shared": "depth=2",
    "swin_t_drloc": "depths=(2,1,1,1)",
    "dhvt_t_imagenet": "depth=2",
}
# A detector waits: it has as many boxes as it finds.
WAIT = {
    name for name, recipe in recipes.RECIPES.items() if OBJECTIVES[recipe().objective.name].waits
}
RECIPES = [
    *FAMILIES.items(),
    *(
        pytest.param(name, "", marks=pytest.mark.slow)
        for name in recipes.RECIPES
        if name not in WAIT
    ),
]
# Pooling of score maps, because bfloat16 keeps 8 bits of a logit, and T2T-ViT's performers, whose
# 16-bit exponentials gave NaN.
IN_FLOAT32 = {"targets.py", "t2t.py"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("recipe", "depth"), RECIPES)
def test_a_step_of_a_recipe_waits_for_nothing_and_multiplies_in_16_bits(recipe, depth):
    config = recipes.RECIPES[recipe]()
    if depth:
        config = with_options(config, model_kwargs=(*config.model.kwargs, depth))
    if config.optim.optimizer not in FUSED:
        # Any other optimizer reads one number in a step, which fake tensors cannot; test_optimizers
        # tests its updates.
        config = with_options(config, optimizer="adamw")
    watch = run_step(config)
    assert watch.waits == []
    assert watch.products.pop(torch.bfloat16)
    assert watch.products.pop(torch.float32, set()) <= IN_FLOAT32
    assert not watch.products


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_waits_for_nothing_whatever_its_options(name):
    watch = run_step(with_options(LVVIT(), **{"model_kwargs": ("depth=2",)} | OPTIONS[name]))
    assert watch.waits == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["much augmentation", "color jitter"])
def test_a_step_waits_for_nothing_without_triton(monkeypatch, name):
    """Augmentation and targets have plain PyTorch for builds that come without."""
    for module in ("augment.fused", "fused_targets"):
        monkeypatch.setattr(f"densefeed.pipelines.{module}.has_triton", lambda: False)
    watch = run_step(with_options(LVVIT(), **{"model_kwargs": ("depth=2",)} | OPTIONS[name]))
    assert watch.waits == []
    half = torch.float16 if name == "float16" else torch.bfloat16
    assert ("fused_token_loss" in watch.products[half]) == (name == "fused head")
    assert watch.products.pop(half)
    assert watch.products.pop(torch.float32, set()) <= IN_FLOAT32


def test_detectors_alone_wait():
    assert {"detect_photos", "detect_coco_swin_t"} == WAIT


def test_what_waits_is_found():
    with fake_cuda(), Watch() as watch:
        tensor = torch.zeros(4, device=CUDA)
        tensor[[1, 2]] = 1
        tensor.index_put_((tensor > 0,), torch.ones(1, device=CUDA))
        tensor.to("cpu")
        tensor.to("cpu", non_blocking=True)
        with pytest.raises(DataDependentOutputException):
            tensor.sum().item()
        with pytest.raises(DynamicOutputShapeException):
            tensor[tensor > 0]
    copies, masks = ([w for w in watch.waits if what in w] for what in ("a copy", "a mask"))
    assert (len(copies), len(masks)) == (2, 1)

"""Whole updates as CUDA graphs, for `--compile graph`.

A graph holds forward and backward pass, clipping, the guard and the optimizer; its launch replaces
about a thousand. With several ranks they are two graphs, and between them one all-reduce of all
gradients. What changes from step to step is copied before: the tensors of the batch, the learning
rate, the step's number and the seed. The EMA follows outside, in a few launches, because its decay
is a number of the host.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from densefeed.step import PartLoss
from densefeed.training.compile import can_capture
from densefeed.training.ranks import Ranks
from densefeed.training.student import (
    Student,
    apply_gradients,
    backward,
    copy_statistics,
    descend,
    update,
)

# Updates before the capture, as PyTorch's guide to CUDA graphs has them: compilation, the
# optimizer's moments and the workspaces of libraries must not fall into a capture.
WARM_UP = 3
# Graphs of one run: one for each input size, and one for the padded last batch of an epoch. Each
# holds the memory of a step, so a run with more shapes than these does the others without a graph.
MOST_GRAPHS = 8

Work = Callable[[], Any]


class Capture(NamedTuple):
    """A captured update and the memory that it reads and writes."""

    replay: Work
    inputs: list[Tensor]
    rates: list[Tensor]  # learning rates of the optimizer's groups, float32 []
    outputs: tuple[Tensor, Tensor]
    pool: Any


def choose_update(mode: str, ranks: Ranks, plain: Callable = update) -> Callable:
    """Return a CapturedUpdate where `--compile` asks for one, otherwise `plain`."""
    return CapturedUpdate() if can_capture(mode, ranks) else plain


class CapturedUpdate:
    """`student.update` with CUDA graphs, one for each shape of the inputs.

    The results of a call are valid until the next one. Parts of a batch draw from one seed, the
    first one's, so with several parts drop-path differs from that of other modes. The learning rate
    is rounded to float32.
    """

    def __init__(self) -> None:
        self._captures: dict[Any, Capture] = {}
        self._seen: dict[Any, int] = {}

    def __call__(
        self, student: Student, ranks: Ranks, step: int, losses: Sequence[PartLoss]
    ) -> tuple[Tensor, Tensor]:
        """Do step number `step`; what `student.update` does and returns."""
        leaves, spec = pytree.tree_flatten([one.data for one in losses])
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = tuple(describe(leaf) for leaf in leaves)
        # A graph reads seed and offset of the generator at each launch.
        torch.manual_seed(losses[0].seed)
        student.guard.begin(step)
        for group in student.optimizer.param_groups:
            # As in a graph. A resumed run begins without one, and must compute the same.
            group["lr"] = float(np.float32(group["lr"]))
        if key not in self._captures and not self._is_due(key):
            results = run_update(student, ranks, [one._replace(seed=None) for one in losses])
        else:
            if key not in self._captures:
                own = [tensor.clone() for tensor in tensors]
                left = iter(own)
                data = [next(left) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                data = zip(losses, pytree.tree_unflatten(data, spec), strict=True)
                fixed = [one._replace(data=part, seed=None) for one, part in data]
                self._captures[key] = self._capture(student, ranks, own, fixed)
            capture = self._captures[key]
            torch._foreach_copy_(capture.inputs, tensors)
            for group, rate in zip(student.optimizer.param_groups, capture.rates, strict=True):
                rate.fill_(group["lr"])
            capture.replay()
            results = capture.outputs
        student.average(step)
        return results

    def _is_due(self, key: Any) -> bool:
        """Count an update of these inputs; return whether it is to be captured."""
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key] > WARM_UP and len(self._captures) < MOST_GRAPHS

    def _capture(
        self, student: Student, ranks: Ranks, inputs: list[Tensor], losses: Sequence[PartLoss]
    ) -> Capture:
        """Record an update that reads `inputs`; nothing is computed."""
        pool, replays = next((one.pool for one in self._captures.values()), None), []

        def record(work: Work) -> Any:
            nonlocal pool
            graph = torch.cuda.CUDAGraph()
            # Threads of the loader pin memory meanwhile, which the default mode forbids.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                results = work()
            pool = graph.pool()
            replays.append(graph.replay)
            return results

        def exchange(flat: Tensor) -> None:
            replays.append(lambda: ranks.sum(flat))

        with rates_on_device(student.optimizer, ranks.device) as rates:
            outputs = run_update(student, ranks, losses, record, exchange)

        def replay() -> None:
            for one in replays:
                one()

        return Capture(replay, inputs, rates, outputs, pool)


def run_update(
    student: Student,
    ranks: Ranks,
    losses: Sequence[PartLoss],
    run: Callable[[Work], Any] = lambda work: work(),
    exchange: Callable[[Tensor], object] | None = None,
) -> tuple[Tensor, Tensor]:
    """Do an update but its EMA in one part, with several ranks in two; return loss and norm.

    `run` does a part, or records it. `exchange` sums a tensor over ranks, by default at once.
    """
    if ranks.size == 1:
        return run(lambda: descend(student, ranks, losses))
    # The gradients are averaged here, so all that follows is as with one rank.
    alone = replace(ranks, size=1)

    def gather() -> tuple[Tensor, Tensor, list]:
        before = copy_statistics(student)
        mean = backward(student, alone, losses)
        flat = torch.empty(sum(p.numel() for p in trained) + 1, device=ranks.device)
        torch._foreach_copy_(views_of(flat, trained), [p.grad for p in trained])
        flat[-1] = mean
        return mean, flat, before

    def spread() -> Tensor:
        flat.div_(ranks.size)
        for parameter, part in zip(trained, views_of(flat, trained), strict=True):
            parameter.grad = part
        return apply_gradients(student, alone, flat[-1], before)

    trained = [p for p in student.trainable.parameters() if p.requires_grad]
    mean, flat, before = run(gather)
    (exchange or ranks.sum)(flat)
    return mean, run(spread)


def views_of(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return parts of `flat` in the shapes and strides of the tensors `like`.

    Strides count: the fused optimizer walks weight and gradient as they lie in memory, and weights
    of convolutions are channels_last.
    """
    parts = flat[: sum(tensor.numel() for tensor in like)].split([t.numel() for t in like])
    return [
        part.as_strided(tensor.shape, tensor.stride(), part.storage_offset())
        for part, tensor in zip(parts, like, strict=True)
    ]


def describe(leaf: object) -> object:
    """Return what a graph depends on: shape and layout of a tensor, the value of anything else."""
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf


@contextmanager
def rates_on_device(
    optimizer: torch.optim.Optimizer, device: torch.device
) -> Iterator[list[Tensor]]:
    """Let the optimizer read its learning rates from tensors, which are yielded."""
    numbers = [group["lr"] for group in optimizer.param_groups]
    rates = [torch.tensor(number, device=device, dtype=torch.float32) for number in numbers]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group |= {"lr": rate, "capturable": True}
    try:
        yield rates
    finally:
        for group, number in zip(optimizer.param_groups, numbers, strict=True):
            group |= {"lr": number, "capturable": False}

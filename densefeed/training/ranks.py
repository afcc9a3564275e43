"""Ranks: one process a device, started by torchrun; a process alone is a run of one rank, and pays
for nothing here.
"""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from inspect import signature

import torch
import torch.distributed as dist
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn

from densefeed.system.devices import choose_device
from densefeed.system.errors import UserError

WAIT = 5.0  # seconds; torchrun looks ten times a second whether a rank has ended
# a first evaluation or a large resident store may keep the other ranks waiting
PATIENCE = timedelta(minutes=30)


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this one is, and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this rank speaks and writes files."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place, queued on the device: nothing waits. All ranks must ask."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def average_gradients(self, gradients: list[Tensor]) -> None:
        """Replace tensors by their means over ranks, in place, in one exchange; for what DDP does
        not know. All ranks must ask.
        """
        if self.size > 1:
            flat = self.sum(torch.cat([gradient.flatten() for gradient in gradients])).div_(
                self.size
            )
            for gradient, mean in zip(
                gradients, flat.split([g.numel() for g in gradients]), strict=True
            ):
                gradient.copy_(mean.view_as(gradient))

    def broadcast_sync(self, word: object) -> object:
        """What the first rank says, on all."""
        words = [word]
        if self.size > 1:
            dist.broadcast_object_list(words, device=torch.device("cpu"))
        return words[0]

    def average(self, modules: Iterable[nn.Module]) -> None:
        """Replace each floating buffer (BatchNorm's running statistics) by its mean over ranks."""
        if self.size > 1:
            buffers = [b for module in modules for b in module.buffers() if b.is_floating_point()]
            for buffer in buffers:
                dist.all_reduce(buffer)
                buffer /= self.size

    def synchronized(self, model: nn.Module) -> nn.Module:
        """The model with BatchNorm over the images of all ranks in place of each rank's own; a rank
        alone keeps it as it is.

        UserError on a CPU, for which PyTorch has no such layer.
        """
        if self.size == 1:
            return model
        if self.device.type == "cpu":
            raise UserError(
                "--sync-batchnorm needs CUDA devices; leave it away, or give --device cuda"
            )
        return convert_sync_batchnorm(model)

    def parallel(self, model: nn.Module) -> nn.Module:
        """The model whose backward pass averages gradients over ranks. Each rank keeps its own
        running statistics.
        """
        if self.size == 1:
            return model
        parallel = nn.parallel.DistributedDataParallel
        # PyTorch 2.15 gave the option a new name, and warns of the old one.
        names = ("forward_sync_buffers", "broadcast_buffers")
        own_buffers = next(name for name in names if name in signature(parallel).parameters)
        return parallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **{own_buffers: False},
        )


class Agreement:
    """Lets all ranks act on a flag of any of them after the same step: each call gives what was
    said in the call before it.

    So the exchange goes on while the step runs, and no rank waits for another. A rank alone acts at
    once.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.size, self._said, self._work = ranks.size, torch.zeros(1, dtype=torch.int32), None

    def __call__(self, flag: bool) -> bool:
        if self.size == 1:
            return flag
        if self._work is not None:
            self._work.wait()
        # on the CPU: gloo carries it beside nccl
        before, self._said = (bool(self._said), torch.tensor([flag], dtype=torch.int32))
        self._work = dist.all_reduce(self._said, dist.ReduceOp.MAX, async_op=True)
        return before


@contextmanager
def raise_on_rank0() -> Iterator[None]:
    """Lets the first rank alone say a UserError that all meet: torchrun ends the others, which
    wait, as soon as it has ended.

    What the first does not meet the others say after that wait.
    """
    try:
        yield
    except UserError:
        if int(os.environ.get("RANK", 0)) > 0:
            time.sleep(WAIT)
        raise


@contextmanager
def init_distributed(device: str) -> Iterable[Ranks]:
    """The ranks that torchrun began, or one alone. UserError for a device that cannot be used, or
    is one for several ranks.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    chosen = choose_device(device)
    if size == 1:
        yield Ranks(0, 1, chosen)
        return
    if chosen.type == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        if chosen.index is not None:
            raise UserError(
                f"--device {device} is one device; under torchrun give --device cuda, and each rank takes its own"
            )
        if local >= torch.cuda.device_count():
            raise UserError(
                f"torchrun began {local + 1} or more ranks on a machine of {torch.cuda.device_count()} CUDA devices; "
                "give --nproc-per-node as many as there are"
            )
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo", timeout=PATIENCE
    )
    try:
        yield Ranks(rank, size, chosen)
    finally:
        dist.destroy_process_group()

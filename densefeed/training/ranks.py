"""Ranks: one process per device, started by torchrun.

A single process is a run of one rank, for which nothing here has any overhead.
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

from densefeed.system.devices import choose_rank_device
from densefeed.system.errors import UserError

# Seconds that rank 0 has to end first; torchrun polls its ranks ten times a second.
WAIT = 5.0
# In errors of gloo, of NCCL and of torchrun's store where the process of another rank has ended.
LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    *("ncclRemoteError", "failed to recv, got 0 bytes"),
)
# The other ranks may wait this long for a first evaluation or for a large resident store.
PATIENCE = timedelta(minutes=30)


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, the number of ranks, and the device of this rank."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which logs and writes files."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over ranks, in place and without waiting; all ranks must call it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def average_gradients(self, gradients: list[Tensor]) -> None:
        """Average tensors over ranks, in place, in one all-reduce; all ranks must call it.

        For gradients that DDP does not average.
        """
        if self.size > 1:
            flat = self.sum(torch.cat([g.flatten() for g in gradients])).div_(self.size)
            means = flat.split([g.numel() for g in gradients])
            for gradient, mean in zip(gradients, means, strict=True):
                gradient.copy_(mean.view_as(gradient))

    def broadcast_sync(self, value: object) -> object:
        """Return the value of rank 0, on all ranks."""
        values = [value]
        if self.size > 1:
            # On the CPU by gloo; nccl would copy the pickled object to the device.
            dist.broadcast_object_list(values, device=torch.device("cpu"))
        return values[0]

    def gather_sync(self, value: object) -> list[object]:
        """Return the values of all ranks, on all ranks."""
        values = [value] * self.size
        if self.size > 1:
            # By gloo: PyTorch gathers objects on the CPU wherever a group has a backend for it.
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, module: nn.Module) -> None:
        """Give the weights and buffers of rank 0 to all ranks, as DDP does."""
        if self.size > 1:
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, 0)

    def average(self, modules: Iterable[nn.Module]) -> None:
        """Average floating-point buffers (BatchNorm's running statistics) over ranks, in place."""
        if self.size > 1:
            # Integers, which are BatchNorm's batch counters, are equal on all ranks.
            for buffer in [b for m in modules for b in m.buffers() if b.is_floating_point()]:
                self.sum(buffer).div_(self.size)

    def synchronized(self, model: nn.Module) -> nn.Module:
        """Convert BatchNorm to SyncBatchNorm, over the images of all ranks.

        A single rank keeps its model unchanged. Raises UserError on a CPU, for which PyTorch has no
        such layer.
        """
        if self.size == 1:
            return model
        if self.device.type == "cpu":
            raise UserError("--sync-batchnorm needs CUDA devices; remove it, or give --device cuda")
        return convert_sync_batchnorm(model)

    def parallel(self, model: nn.Module) -> nn.Module:
        """Wrap the model in DDP, whose backward pass averages gradients over ranks.

        Each rank keeps its own running statistics. A single rank gets the model itself.
        """
        if self.size == 1:
            return model
        parallel = nn.parallel.DistributedDataParallel
        # PyTorch 2.15 renamed the option and warns about the old name.
        names = ("forward_sync_buffers", "broadcast_buffers")
        own_buffers = next(name for name in names if name in signature(parallel).parameters)
        return parallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            # Gradients lie in DDP's buckets, which saves a second copy of them all.
            gradient_as_bucket_view=True,
            **{own_buffers: False},
        )


ALONE = Ranks(0, 1, torch.device("cpu"))  # a single process


class StopVote:
    """Lets all ranks act after the same step on a flag that any of them raised.

    Each call starts an all-reduce of the flag and returns the result of the call before, so the
    exchange overlaps with the step and no rank waits for another. A single rank gets its flag back
    at once.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.size, self._flag, self._work = ranks.size, torch.zeros(1, dtype=torch.int32), None

    def __call__(self, flag: bool) -> bool:
        if self.size == 1:
            return flag
        if self._work is not None:
            self._work.wait()
        previous = bool(self._flag)
        # The tensor is on the CPU, so gloo carries it beside nccl.
        self._flag = torch.tensor([flag], dtype=torch.int32)
        self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, async_op=True)
        return previous


@contextmanager
def raise_on_rank0() -> Iterator[None]:
    """Let rank 0 alone report a UserError that all ranks raise, and one rank its own error.

    The other ranks wait, and torchrun ends them as soon as rank 0 has ended. An error that rank 0
    does not raise is reported by the others after that wait. A rank that loses its connection to
    one that ended waits twice as long, and then raises UserError, which says so.
    """
    # torchrun's variable, because there may be no process group yet.
    rank = int(os.environ.get("RANK", 0))
    try:
        yield
    except UserError:
        if rank > 0:
            time.sleep(WAIT)
        raise
    except RuntimeError as error:
        if not any(text in str(error) for text in LOST):
            raise
        time.sleep(2 * WAIT)
        raise UserError(
            f"rank {rank} stopped, because another rank ended; its message says why, and --resume "
            "auto continues from the newest checkpoint"
        ) from error


@contextmanager
def init_distributed(device: str) -> Iterator[Ranks]:
    """Join the process group that torchrun started; without torchrun yield a single rank.

    Raises UserError for a device that cannot be used, or one device for several ranks.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    chosen = choose_rank_device(device)
    if size == 1:
        yield Ranks(0, 1, chosen)
        return
    # gloo carries what is on the CPU: the stop vote and objects that are broadcast.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo", timeout=PATIENCE
    )
    try:
        yield Ranks(rank, size, chosen)
    finally:
        dist.destroy_process_group()

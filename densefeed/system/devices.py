"""Choose a device, wait for it, and measure its memory."""

import importlib.util
import os
import resource
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.compiler import config as compiler

from densefeed.system.errors import UserError, first_line
from densefeed.system.options import Count, Options
from densefeed.system.terminal import warn


def count_cores() -> int:
    """Count the cores that this process may use."""
    # os.cpu_count() also counts those that a container or taskset denies it. macOS has neither.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


CORES = count_cores()
# Decoding threads of a rank. torchrun sets LOCAL_WORLD_SIZE: the ranks of a machine share
# its cores.
THREADS = max(1, CORES // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
# Load average, as a share of the machine's cores, above which work is slow enough for a warning.
BUSY = 1.5


@dataclass(frozen=True, kw_only=True)
class ThreadOptions(Options):
    """The option of every command that reads images in threads."""

    threads: Count = THREADS  # threads of each rank that read and decode images


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(Options):
    """The option of every command that runs a network."""

    device: str = "auto"  # auto: cuda if there is one, else cpu


def describe_load(share: float) -> str:
    """Describe the load of this machine if it is above this share of its cores, else return "".

    The threads of a training step then wait for each other: on a busy machine two threads were seen
    to reach a seventh of one thread's rate.
    """
    # The load average counts the whole machine, also cores that taskset or a batch system denies
    # this process and gives to others.
    cores = os.cpu_count() or 1
    try:
        load = os.getloadavg()[0]
    # Some containers have none.
    except OSError:
        return ""
    return f"load average {load:.1f} on {cores} cores" if load > share * cores else ""


def warn_busy() -> None:
    """Print a warning if other processes use this machine so much that work is slow.

    Not where the remedy that it names was taken.
    """
    if os.environ.get("OMP_NUM_THREADS") != "1" and (load := describe_load(BUSY)):
        warn(
            f"other processes keep this machine busy ({load}), and until they end this "
            "may take several times as long; with OMP_NUM_THREADS=1 it may take less "
            "(docs/faq.md)"
        )


def can_build() -> bool:
    """Return whether there are a C compiler and Python's headers, where Triton looks for them."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = sysconfig.get_path("include", "posix_prefix")
    return compiler is not None and Path(headers, "Python.h").exists()


# A constant, because torch.compile of PyTorch 2.11 warns of a call of a cached function.
TRITON = importlib.util.find_spec("triton") is not None and can_build()


def has_triton() -> bool:
    """Return whether Triton can be used.

    Some builds of PyTorch for CUDA come without, and Triton builds what starts its kernels.
    """
    return TRITON


def choose_device(name: str) -> torch.device:
    """Return the device `name`; `auto` is CUDA if available, else the CPU.

    A CUDA device with an index becomes the current one. Raises UserError if it cannot be used.
    """
    return use_device(parse_device(name), name)


def choose_rank_device(name: str) -> torch.device:
    """Return the device of this process; of several that torchrun started, each has its own.

    Raises UserError for a device that cannot be used, or one device for several ranks.
    """
    device = parse_device(name)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and device.type == "cuda":
        if device.index is not None:
            raise UserError(
                f"--device {name} is one device; under torchrun give --device cuda, and each rank "
                "takes its own"
            )
        local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if 0 < count <= local:
            raise UserError(
                f"torchrun started {local + 1} or more ranks on a machine of {count} CUDA devices; "
                f"give --nproc-per-node {count}"
            )
        # Before any tensor: one on `cuda` would give every rank a context on the first GPU.
        device = torch.device("cuda", local)
    return use_device(device, name)


def parse_device(name: str) -> torch.device:
    """Return the device that `name` describes, without using it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise refuse_device(name, error) from error


def use_device(device: torch.device, name: str) -> torch.device:
    """Make the device `name` the current one, and float32 exact; return the device.

    Raises UserError if it cannot be used.
    """
    try:
        # Triton, nccl, CUDA events, and `cuda` without an index mean the current device.
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
        # By default cuDNN rounds the operands of float32 convolutions to TF32, of 10 bits.
        torch.backends.cudnn.allow_tf32 = False
        # Only a copy back shows whether the device can be used: `meta` allocates.
        torch.zeros(1, device=device).item()
    # ImportError for a device whose package is missing.
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise refuse_device(name, error) from error
    return device


def refuse_device(name: str, error: Exception) -> UserError:
    return UserError(
        f"--device {name} cannot be used here ({first_line(error)}); take auto, cpu or cuda"
    )


def tag_compiled_code() -> None:
    """Keep compiled CPU code of different vector widths apart in PyTorch's cache on disk.

    PyTorch up to 2.15 leaves the width out of the cache's key. Code for vectors of 16 numbers then
    runs on a processor, or under an ATEN_CPU_CAPABILITY, that has 8: it returns NaN or crashes.
    """
    tag = torch.backends.cpu.get_cpu_capability()
    if tag not in compiler.cache_key_tag.split():
        compiler.cache_key_tag = f"{compiler.cache_key_tag} {tag}".strip()


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to `device` without waiting."""
    # From memory that is not pinned, even a non_blocking copy may wait.
    tensor = tensor.pin_memory() if device.type == "cuda" else tensor
    return tensor.to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Block until all queued work of the device is done; no-op on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> int:
    """Free bytes of a device; for a CPU, memory available without swapping (MemAvailable)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            return next(
                int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")
            )
    # Not Linux: the whole memory is the best known bound.
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_memory(device: torch.device) -> int:
    """Return peak bytes so far: of tensors on a CUDA device, or of this process (RSS) on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_rss()


def peak_rss() -> int:
    """Return the peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts it in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024

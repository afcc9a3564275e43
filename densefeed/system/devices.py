"""Devices: choosing one, waiting for it, and its memory."""

import os
import resource

import torch

from densefeed.system.errors import UserError


def choose_device(name: str) -> torch.device:
    """The device called `name`; `auto` is CUDA if there is one, else the CPU. UserError if it
    cannot be used.
    """
    try:
        device = torch.device(
            ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
        )
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"--device {name} cannot be used here ({str(error).splitlines()[0]}); take auto, cpu or cuda"
        ) from error
    return device


def synchronize(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> int:
    """Free bytes of a device; of a CPU, what the system would give without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            return next(
                int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")
            )
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_memory(device: torch.device) -> int:
    """Most bytes held so far: of the device by tensors, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

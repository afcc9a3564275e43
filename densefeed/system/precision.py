"""The precision of matrix products that `--precision` asks for."""

from typing import Literal

import torch

Precision = Literal["auto", "fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_precision(precision: Precision, device: torch.device) -> str:
    """Resolve `auto`: bf16 on CUDA devices that compute it, else fp32."""
    if precision != "auto":
        return precision
    # Devices below capability 8.0 emulate bf16, which is slower than fp32.
    bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return "bf16" if bf16 else "fp32"


def autocast_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast that `--precision` asks for, None for float32."""
    chosen = choose_precision(precision, device)
    return None if chosen == "fp32" else DTYPES[chosen]

"""Mean and standard deviation of the channels, as teachers and checkpoints state them."""

import torch

# Bounds of mean and std. They are computed in float32, where 1e-320 is 0 and 1e300 infinite.
LEAST_STD, MOST_CHANNEL = 1e-6, 1e6
CHANNEL_RANGES = {"mean": "from -1e6 to 1e6", "std": "from 1e-6 to 1e6"}


def parse_channels(name: str, value: object) -> tuple[float, ...] | None:
    """Return `mean` or `std` as three numbers, None if it is not that or outside CHANNEL_RANGES."""
    try:
        # On the CPU also where a model is built on the meta device, whose tensors have no values.
        values = torch.as_tensor(value, dtype=torch.float64, device="cpu").flatten().tolist()
    # as_tensor raises one of these, depending on what is not a number.
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    low = LEAST_STD if name == "std" else -MOST_CHANNEL
    fits = len(values) == 3 and all(low <= value <= MOST_CHANNEL for value in values)
    return tuple(values) if fits else None

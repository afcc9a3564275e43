"""Philox 4x32-10, the counter-based generator behind every random draw of a run.

The same key and counter give the same four words anywhere, so nothing depends on the order of the
draws and no generator state needs saving. Source: Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC 2011; the tests compare with the known answers of its library, Random123.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

MASK = 2**32 - 1


def philox(key: int, counter: Sequence[int | np.ndarray]) -> tuple[np.ndarray, ...]:
    """Compute four random words below 2^32, as uint64 arrays, for each counter.

    `counter` has four words below 2^32, numbers or arrays of any shapes that broadcast; work that
    all samples share is done once. `key` has 64 bits.
    """
    words = (np.asarray(word, np.uint64) for word in counter)
    return _run_rounds(key, words, np.uint64, lambda product: product >> np.uint64(32))


def philox_on_device(key: int, counter: tuple[int | Tensor, ...]) -> Tensor:
    """Compute the words of `philox` on the device of the counter: int64 `[..., 4]`, no host sync.

    The words of `counter` are numbers or int64 tensors that broadcast. A product of two 32-bit
    words wraps in int64 and keeps its bits, but its right shift copies the sign, hence the mask.
    """
    words = _run_rounds(key, counter, int, lambda product: product >> 32 & MASK)
    return torch.stack(torch.broadcast_tensors(*words), -1)


def _run_rounds(key: int, counter: Sequence, word: type, upper: Callable) -> tuple:
    """Run ten rounds; `word` converts a constant, `upper` takes the upper half of a product."""
    c0, c1, c2, c3 = counter
    mask = word(MASK)
    for number in range(10):
        # The key's increments: the fractions of the golden ratio and of the root of 3, times 2^32.
        low = word((key + number * 0x9E3779B9) & MASK)
        high = word(((key >> 32) + number * 0xBB67AE85) & MASK)
        # The multipliers of Philox 4x32, PHILOX_M4x32_0 and _1 in Random123.
        product0, product1 = c0 * word(0xD2511F53), c2 * word(0xCD9E8D57)
        c0, c1 = upper(product1) ^ (c1 ^ low), product1 & mask
        c2, c3 = upper(product0) ^ (c3 ^ high), product0 & mask
    return c0, c1, c2, c3

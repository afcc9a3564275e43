"""Philox against published vectors, and its two implementations against each other."""

import numpy as np
import pytest
import torch

from densefeed.pipelines.philox import philox, philox_on_device


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, 0xFFFFFFFFFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_reproduces_the_published_vectors(counter, key, want):
    """Known answers of Random123 (Salmon et al., SC 2011), philox4x32 with 10 rounds."""
    np.testing.assert_array_equal(philox(key, counter), want)


@pytest.mark.parametrize("key", [0, 1, 2**32 - 1, 2**63 - 1, 0x123456789ABCDEF])
def test_both_implementations_give_the_same_words(key):
    """Bit for bit, also for counters beyond 2^31, whose products overflow into int64's sign."""
    ids, blocks = np.array([0, 1, 2**31, 2**32 - 1]), np.arange(5)
    want = np.stack(np.broadcast_arrays(*philox(key, (7, ids[:, None], 9 | 3 << 16, blocks))), -1)
    got = philox_on_device(
        key,
        (
            7,
            torch.from_numpy(ids)[:, None],
            torch.full((4, 1), 9 | 3 << 16),
            torch.from_numpy(blocks),
        ),
    )
    np.testing.assert_array_equal(got.numpy(), want.astype(np.int64))

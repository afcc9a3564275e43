"""Normalisation against torchvision's."""

import torch
from densefeed.pipelines.augment import Normalise
from torchvision.transforms.v2 import functional as tv


def test_normalise_is_torchvisions_and_channels_last():
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    image = torch.randint(0, 256, (3, 5, 7, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    got = Normalise(mean, std)(image)
    want = tv.normalize(image.permute(0, 3, 1, 2).double() / 255, mean, std)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)  # float32 on values up to 2.7
    assert got.is_contiguous(memory_format=torch.channels_last)

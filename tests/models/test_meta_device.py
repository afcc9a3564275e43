"""Models built without values."""

import pytest
import timm
import torch
from torch import nn

from densefeed.models.meta_device import meta_device


@pytest.mark.parametrize("name", ["lvvit_micro", "resnet18", "swin_tiny_patch4_window7_224"])
def test_names_shapes_and_types_are_those_of_the_model(name):
    with meta_device():
        twin = timm.create_model(name, num_classes=3)
    model = timm.create_model(name, num_classes=3)

    def described(module):
        tensors = [*module.named_parameters(), *module.named_buffers()]
        return [(key, t.shape, t.dtype, t.requires_grad) for key, t in tensors]

    assert described(twin) == described(model)
    assert all(tensor.is_meta for tensor in [*twin.parameters(), *twin.buffers()])


def test_tensors_on_another_device_are_initialized():
    with meta_device():
        weight = torch.full((2, 2), 3.0, device="cpu")
        nn.init.constant_(weight, 1.0)
        assert weight.add_(1).tolist() == [[2, 2], [2, 2]]
        nn.init.zeros_(tensor=weight)
    assert not weight.any()

"""Gradient checkpointing must not change gradients or the running statistics of BatchNorm."""

import copy

import pytest
import timm
import torch

import densefeed.models  # noqa: F401  (registers its models)

# Small sizes, and the name of the last block.
MODELS = {
    "dhvt_tiny_cifar_patch4": (dict(embed_dim=32, depth=2, num_heads=4), "blocks.1"),
    "cvt_13": (dict(dims=(8, 16, 32), depths=(1, 2, 2), num_heads=(1, 2, 4)), "stages.2.blocks.1"),
    "cvt_13_drloc": (
        dict(dims=(8, 16, 32), depths=(1, 2, 2), num_heads=(1, 2, 4)),
        "stages.2.blocks.1",
    ),
    "t2t_vit_7": (dict(img_size=64, embed_dim=32, depth=2, num_heads=2), "blocks.1"),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_running_statistics_equal_those_of_one_pass(name):
    fields, last = MODELS[name]
    torch.manual_seed(0)
    plain = timm.create_model(name, num_classes=5, drop_path_rate=0.5, **fields)
    recomputing = copy.deepcopy(plain)
    recomputing.set_grad_checkpointing()
    image, calls = torch.randn(6, 3, 64, 64), []
    for model in (plain, recomputing):
        seen = []
        model.get_submodule(last).register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        torch.manual_seed(1)
        (model(image) * torch.linspace(-1, 1, 5)).sum().backward()
        calls.append(len(seen))
    assert calls == [1, 2]
    for (path, one), other in zip(plain.named_parameters(), recomputing.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=0, msg=path)
    for (path, one), other in zip(plain.named_buffers(), recomputing.buffers(), strict=True):
        # num_batches_tracked counts both passes; with a momentum it is never read.
        if not path.endswith("num_batches_tracked"):
            assert torch.equal(one, other), path
    momenta = {
        module.momentum
        for module in recomputing.modules()
        if isinstance(module, torch.nn.BatchNorm2d)
    }
    assert momenta <= {0.1}

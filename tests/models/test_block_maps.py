"""Maps after blocks against forward hooks on the blocks themselves, and the counts of Swin-T."""

import pytest
import timm
import torch
from torch import Tensor, nn

from densefeed.models import checkpoints  # noqa: F401  (registers our models)
from densefeed.models.block_maps import forward_block_maps, forward_merged_maps
from densefeed.models.meta_device import meta_device

SMALL = dict(window_size=2, embed_dim=12, depths=(1, 2, 2, 1), num_heads=(1, 2, 3, 4))
CVT = dict(dims=(8, 16, 32), depths=(1, 2, 2), num_heads=(1, 2, 4))
MODELS = {
    "swin_tiny_patch4_window7_224": dict(SMALL, img_size=64),
    "swinv2_tiny_window8_256": dict(SMALL, img_size=64),
    "cvt_13": CVT,
    "cvt_13_drloc": CVT,
    "test_vit": dict(img_size=64),
    "lvvit_micro": {},
}


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=5, **MODELS[name])


def blocks_of(model: nn.Module) -> list[nn.Module]:
    stages = getattr(model, "layers", getattr(model, "stages", [model]))
    return [block for stage in stages for block in stage.blocks]


def hooked(modules: list[nn.Module], model: nn.Module, image: Tensor) -> list[Tensor]:
    """Return the outputs of modules in a forward pass."""
    outputs = []
    for module in modules:
        module.register_forward_hook(lambda *call: outputs.append(call[-1]))
    model.forward_features(image)
    return outputs


def as_map(output: Tensor, map_NDRC: Tensor) -> Tensor:
    """Arrange a block's output as a map, without the class token that comes first."""
    N, D, R, C = map_NDRC.shape
    tokens_NTD = output.reshape(N, -1, D)[:, -R * C :]
    return tokens_NTD.mT.reshape(N, D, R, C)


@pytest.mark.parametrize("name", MODELS)
def test_maps_are_the_outputs_of_all_blocks(name):
    model, image = network(name).eval(), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        features, maps = forward_block_maps(model, image)
        torch.testing.assert_close(features, model.forward_features(image))
        outputs = hooked(blocks_of(model), model, image)
    assert len(maps) == len(outputs) > 1
    for map_NDRC, output in zip(maps, outputs, strict=True):
        torch.testing.assert_close(map_NDRC, as_map(output, map_NDRC))


def test_merged_maps_are_the_outputs_of_patch_merging_and_of_the_last_block():
    model, image = network("swin_tiny_patch4_window7_224").eval(), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        features, maps = forward_merged_maps(model, image)
        torch.testing.assert_close(features, model.forward_features(image))
        merging = [stage.downsample for stage in model.layers[1:]]
        outputs = hooked([*merging, model.layers[-1].blocks[-1]], model, image)
    assert len(maps) == len(outputs) == 4
    for map_NDRC, output in zip(maps, outputs, strict=True):
        torch.testing.assert_close(map_NDRC, as_map(output, map_NDRC))


def test_swin_t_has_12_blocks_and_4_merged_maps():
    with meta_device():
        model, image = (
            timm.create_model("swin_tiny_patch4_window7_224"),
            torch.empty(1, 3, 224, 224),
        )
        maps, merged = forward_block_maps(model, image)[1], forward_merged_maps(model, image)[1]
    grids = [(96, 56, 56)] * 2 + [(192, 28, 28)] * 2 + [(384, 14, 14)] * 6 + [(768, 7, 7)] * 2
    assert [tuple(m.shape[1:]) for m in maps] == grids
    sides = [(192, 28, 28), (384, 14, 14), (768, 7, 7), (768, 7, 7)]
    assert [tuple(m.shape[1:]) for m in merged] == sides


def test_maps_of_a_resnet_are_those_of_its_stages():
    model, image = timm.create_model("test_resnet").eval(), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        maps = forward_block_maps(model, image)[1]
        want = model.forward_intermediates(image, intermediates_only=True)
    assert all(torch.equal(one, other) for one, other in zip(maps, want, strict=True))


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "cvt_13"])
def test_checkpointed_blocks_have_equal_gradients(name):
    """Also that something is recomputed: every block begins twice."""
    image, gradients, runs = torch.randn(1, 3, 64, 64), [], []
    for enable in (False, True):
        model, calls = network(name).eval(), []
        model.set_grad_checkpointing(enable)
        for block in blocks_of(model):
            block.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        loss = sum(map_NDRC.square().mean() for map_NDRC in forward_block_maps(model, image)[1])
        loss.backward()
        used = [p.grad for p in model.parameters() if p.grad is not None]
        gradients.append(used)
        runs.append(len(calls))
    assert runs[1] == 2 * runs[0]
    torch.testing.assert_close(gradients[0], gradients[1])

"""Maps of features against hooks and a loop over channels."""

import numpy as np
import pytest
import timm
import torch

from densefeed.explain.features import block_features, feature_picture
from densefeed.models.agent_cnn import make_agent
from densefeed.system.errors import UserError


def test_block_features_of_a_transformer_and_its_agent():
    torch.manual_seed(0)
    vit = timm.create_model("bootstrapping_vit_micro", num_classes=5).eval()
    agent = make_agent(vit, 5, shared=False, stem="base").eval()
    images = torch.randn(2, 3, 64, 64)
    for model, D in ((vit, 108), (agent, 108)):
        outputs = []
        for block in model.blocks:
            block.register_forward_hook(lambda *call, out=outputs: out.append(call[-1]))
        with torch.no_grad():
            maps = block_features(model, images)
        assert list(maps) == [0, 1, 2, 3]
        for number, map_NDRC in maps.items():
            assert map_NDRC.shape == (2, D, 8, 8)
            expected = outputs[number]
            if expected.ndim == 3:
                # The class token comes first.
                expected = expected[:, 1:].mT.reshape(2, D, 8, 8)
            assert torch.equal(map_NDRC, expected)
    with pytest.raises(UserError, match="Linear returns no intermediate features"):
        block_features(torch.nn.Linear(1, 1), images)


@pytest.mark.parametrize("D", [1, 4, 5, 10])
def test_picture_is_the_loop_over_channels(D):
    maps = torch.randn(2, D, 3, 2, generator=torch.Generator().manual_seed(D), dtype=torch.float64)
    maps[0, 0, 0, 0] = 50
    side = int(np.ceil(np.sqrt(D)))
    pictures = feature_picture(maps)
    assert pictures.shape == (2, 3 * side, 2 * side)
    for one, picture in zip(maps.numpy(), pictures.numpy(), strict=True):
        expected = np.full((3 * side, 2 * side), 0.5)
        for number, channel in enumerate(one):
            score = np.clip((channel - one.mean()) / one.std(), -3, 3)
            row, column = divmod(number, side)
            expected[3 * row : 3 * row + 3, 2 * column : 2 * column + 2] = (score + 3) / 6
        np.testing.assert_allclose(picture, expected, atol=1e-12)


def test_equal_features_are_the_mean():
    assert torch.equal(feature_picture(torch.ones(1, 4, 2, 2)), torch.full((1, 4, 4), 0.5))

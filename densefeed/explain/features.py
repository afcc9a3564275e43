"""Intermediate features of transformers and CNNs as pictures (arXiv 2112.03552, Tables 10, 11).

The tables do not say how they were drawn: here each channel is a map, in units of standard
deviations of all channels together.
"""

import math

import torch
from torch import Tensor, nn

from densefeed.models.agent_cnn import AgentCNN
from densefeed.models.block_maps import forward_block_maps
from densefeed.system.errors import UserError

# N images   D channels   R x C a grid, rows and columns

# Values are clamped to this number of standard deviations.
SIGMAS = 3


def block_features(model: nn.Module, image_NCHW: Tensor) -> dict[int, Tensor]:
    """Return the outputs of all blocks, from 0, as maps `[N, D, R, C]` without the class token.

    Of transformers here, timm's and agents every block has its map; of other pyramids and CNNs,
    such as ResNets, every stage. Maps have no final norm. Raises UserError for a model
    without such an interface.
    """
    if isinstance(model, AgentCNN):
        return dict(enumerate(model.forward_maps(image_NCHW)[1]))
    if hasattr(model, "forward_intermediates"):
        return dict(enumerate(forward_block_maps(model, image_NCHW)[1]))
    raise UserError(
        f"{type(model).__name__} returns no intermediate features; choose a model of timm that has "
        "forward_intermediates"
    )


def feature_picture(map_NDRC: Tensor) -> Tensor:
    """Return all channels of each image side by side as one picture, `[N, S R, S C]`, from 0 to 1.

    S x S is the smallest square that holds D maps. Values are standardized over all channels and
    positions of an image and clamped to 3 standard deviations, so 0.5 is the mean; the places
    without a channel are 0.5 too.
    """
    D, R, C = map_NDRC.shape[1:]
    side = math.isqrt(D - 1) + 1
    flat = map_NDRC.detach().flatten(1)
    deviation, mean = torch.std_mean(flat, 1, correction=0, keepdim=True)
    # The features of an image may all be equal.
    score = (flat - mean) / torch.where(deviation > 0, deviation, 1)
    score = (score.clamp(-SIGMAS, SIGMAS) / SIGMAS + 1) / 2
    padded = score.new_full((len(score), side * side * R * C), 0.5)
    padded[:, : score.shape[1]] = score
    return padded.view(-1, side, side, R, C).transpose(2, 3).reshape(-1, side * R, side * C)

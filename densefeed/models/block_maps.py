"""The last map of a network, and its maps after every block, of which timm returns one a stage."""

import math
from itertools import chain
from typing import Any

from timm.models import SwinTransformer, SwinTransformerV2
from torch import Tensor, nn

from densefeed.models.cvt import CvT
from densefeed.models.recompute import run_blocks
from densefeed.models.token_transformer import to_map

# N images   D width   R x C a grid, rows and columns

Swin = SwinTransformer | SwinTransformerV2


def feature_map(features: Any, model: nn.Module, image_NCHW: Tensor) -> Tensor:
    """Reshape the output of timm's `forward_features` to a map `[N, D, R, C]`.

    Accepts `[N, T, D]` with or without prefix tokens, `[N, D, R, C]` and `[N, R, C, D]`. Raises
    ValueError if it is none of these, or the class token alone.
    """
    ndim = features.ndim if isinstance(features, Tensor) else 0
    if ndim == 4:
        channels_last = getattr(model, "output_fmt", "NCHW") == "NHWC"
        return features.permute(0, 3, 1, 2) if channels_last else features
    if ndim == 3:
        tokens_NTD = features[:, getattr(model, "num_prefix_tokens", 0) :]
        T, (H, W) = tokens_NTD.shape[1], image_NCHW.shape[2:]
        # PiT has no num_prefix_tokens, and returns its class tokens without its map.
        unprefixed = not hasattr(model, "num_prefix_tokens")
        if unprefixed and getattr(model, "cls_token", tokens_NTD[:, :0]).shape[1] == T:
            raise ValueError(
                "its features are the class token alone, without a grid of tokens; choose another "
                "model"
            )
        # Tokens are square, so the grid has the proportions of the image.
        R = round(math.sqrt(T * H / W))
        if R and T % R == 0:
            return to_map(tokens_NTD, (R, T // R))
    raise ValueError("its features are neither a map nor a grid of tokens; choose another model")


def forward_block_maps(model: nn.Module, image_NCHW: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the final features of images and the map `[N, D, R, C]` after every block.

    The features are those of `forward_features`, the maps have no final norm. Among pyramids only
    Swin and CvT have their blocks here: 12 maps for Swin-T, 13 for CvT-13. Others, such as ResNets,
    have the maps after every stage, as timm returns them.
    """
    if isinstance(model, Swin):
        features, stages = run_swin(model, image_NCHW)
        return features, [to_channels_first(x) for _, *blocks in stages for x in blocks]
    if isinstance(model, CvT):
        return model.forward_blocks(image_NCHW)
    return model.forward_intermediates(image_NCHW)


def forward_merged_maps(model: Swin, image_NCHW: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the final features of images and the maps after every stage of Swin's authors.

    Their stages end with the patch merging, with which timm's begin: the four maps of Swin-T at 224
    pixels have sides of 28, 14, 7 and 7 and widths of 192, 384, 768 and 768.
    """
    features, stages = run_swin(model, image_NCHW)
    merged = [inputs for inputs, *_ in stages[1:]]
    return features, [to_channels_first(x) for x in chain(merged, stages[-1][-1:])]


def run_swin(model: Swin, image_NCHW: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
    """Return final features `[N, R, C, D]`, and of each stage its input and all blocks' outputs."""
    x_NRCD, stages = model.patch_embed(image_NCHW), []
    for stage in model.layers:
        outputs = [stage.downsample(x_NRCD)]
        for block in stage.blocks:
            again = stage.grad_checkpointing
            outputs.append(run_blocks([block], outputs[-1], grad_checkpointing=again))
        stages.append(outputs)
        x_NRCD = outputs[-1]
    return model.norm(x_NRCD), stages


def to_channels_first(x_NRCD: Tensor) -> Tensor:
    """Permute to `[N, D, R, C]`; this copies nothing."""
    return x_NRCD.permute(0, 3, 1, 2)

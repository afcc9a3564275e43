"""Maps of one layer's attention: the pictures of DHVT and of arXiv 2112.03552.

The matrix of DHVT's Figures 3 to 5 (a) and 7, averaged over heads, is `record.weights.mean(1)`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from densefeed.explain.capture import AttentionMatrix, TokenLayout
from densefeed.system.errors import UserError

# N images   M heads   Q queries   K keys   R x C the grid of the keys, rows and columns


def reading_row(layout: TokenLayout, like: Tensor) -> Tensor:
    """Return the weights `[Q]` of queries in what the classifier reads, which sum to 1.

    That is the class token, or the mean of the patches. `like` gives device and dtype.
    """
    row = like.new_zeros(layout.queries)
    patches = slice(layout.prefix, layout.queries - layout.head_tokens)
    row[: layout.class_tokens] = 1
    if not layout.class_tokens:
        row[patches] = 1
    return row / row.sum()


def class_map(record: AttentionMatrix) -> Tensor:
    """Return the class token's attention to the patches, mean over heads, `[N, R, C]`.

    Without a class token it is the mean of the patches' rows; in Swin each patch gets the mean of
    the rows of its window.
    """
    averaged_NQK = record.weights.mean(1)
    row_NK = reading_row(record.layout, averaged_NQK) @ averaged_NQK
    return record.layout.key_map(row_NK)


def mean_map(record: AttentionMatrix) -> Tensor:
    """Return the attention that patches get, mean over heads and all queries, `[N, R, C]`."""
    return record.layout.key_map(record.weights.mean((1, 2)))


def head_token_maps(record: AttentionMatrix) -> Tensor:
    """Return what each of DHVT's head tokens attends to in its own head, `[N, M, R, C]`.

    Figures 3 to 5 (b): of head i the row of head token i. Raises UserError without head tokens.
    """
    M = record.layout.head_tokens
    if not M:
        raise UserError(f"{record.layer} has no head tokens; choose a DHVT that has them")
    rows_NMMK = record.weights[:, :, -M:]
    return record.layout.key_map(rows_NMMK.diagonal(dim1=1, dim2=2).mT)


def to_picture(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Return maps `[..., R, C]` at an image's `size` (H, W), `[..., H, W]` from 0 to 1.

    Bilinear, then each map from its minimum to its maximum, as relevance is shown in the papers.
    A constant map is 0.
    """
    flat = maps.detach().reshape(-1, 1, *maps.shape[-2:])
    large = F.interpolate(flat, size, mode="bilinear", align_corners=False)
    low, high = large.amin((2, 3), keepdim=True), large.amax((2, 3), keepdim=True)
    # Interpolation of a constant map may round.
    varies = flat.amax((2, 3), keepdim=True) > flat.amin((2, 3), keepdim=True)
    picture = torch.where(varies, (large - low) / torch.where(varies, high - low, 1), 0)
    return picture.view(*maps.shape[:-2], *size)

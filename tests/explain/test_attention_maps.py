"""Maps of one layer against loops over tokens."""

import pytest
import torch
from torch.nn import functional as F

from densefeed.explain.attention_maps import class_map, head_token_maps, mean_map, to_picture
from densefeed.explain.capture import AttentionMatrix, TokenLayout, Windows
from densefeed.system.errors import UserError


def draw_record(layout: TokenLayout, N: int = 2, M: int = 3) -> AttentionMatrix:
    rng = torch.Generator().manual_seed(0)
    scores = torch.randn(N, M, layout.queries, layout.keys, generator=rng, dtype=torch.float64)
    return AttentionMatrix("blocks.0.attn", scores.softmax(-1), layout)


def test_maps_with_class_and_head_tokens():
    """DHVT: class token, 2 x 4 patches, 3 head tokens."""
    record = draw_record(TokenLayout(1, 1, (2, 4), (2, 4), head_tokens=3))
    rows, means, heads = class_map(record), mean_map(record), head_token_maps(record)
    assert rows.shape == means.shape == (2, 2, 4)
    assert heads.shape == (2, 3, 2, 4)
    for n in range(2):
        for r in range(2):
            for c in range(4):
                key = 1 + 4 * r + c
                column = record.weights[n, :, :, key]
                torch.testing.assert_close(rows[n, r, c], sum(column[m, 0] for m in range(3)) / 3)
                torch.testing.assert_close(means[n, r, c], column.mean())
                for m in range(3):
                    assert heads[n, m, r, c] == column[m, 9 + m]


def test_rows_of_other_layouts():
    # DeiT: the classifier reads two tokens; without a class token it reads the patches.
    record = draw_record(TokenLayout(2, 2, (2, 2), (2, 2)))
    expected = record.weights[:, :, :2, 2:].mean((1, 2)).view(2, 2, 2)
    torch.testing.assert_close(class_map(record), expected)
    record = draw_record(TokenLayout(1, 0, (2, 2), (1, 1)))
    expected = record.weights[:, :, 1:, 1:].mean((1, 2)).view(2, 1, 1)
    torch.testing.assert_close(class_map(record), expected)
    with pytest.raises(UserError, match=r"blocks.0.attn has no head tokens"):
        head_token_maps(record)


def test_windows_give_maps_of_the_image():
    """Two windows of one image, side by side, without a shift."""
    layout = TokenLayout(0, 0, (2, 2), (2, 2), windows=Windows((2, 4), (2, 2), (0, 0)))
    record = draw_record(layout)
    left, right = record.weights.mean((1, 2)).view(2, 2, 2)
    expected = torch.cat([left, right], 1)[None]
    torch.testing.assert_close(mean_map(record), expected)
    torch.testing.assert_close(class_map(record), expected)


def test_picture_has_the_size_of_the_image_and_the_whole_range():
    maps = torch.tensor([[[1.0, 3], [5, 2]], [[7, 7], [7, 7]]])[None]
    picture = to_picture(maps, (32, 48))
    assert picture.shape == (1, 2, 32, 48)
    assert (picture[0, 0].min(), picture[0, 0].max()) == (0, 1)
    assert not picture[0, 1].any()
    large = F.interpolate(maps[:, :1], (32, 48), mode="bilinear")[0, 0]
    torch.testing.assert_close(picture[0, 0], (large - 1) / 4)

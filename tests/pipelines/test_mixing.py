"""MixToken's mask and share."""

import torch
from densefeed.pipelines.mixing import mix_mask, partner_share
from densefeed.pipelines.plan import EpochPlan


def test_the_share_is_the_boxes_true_area():
    plan = EpochPlan(num_samples=10, batch=2, seed=1, mode="train")
    shares = []
    for step in range(50):
        top, left, bottom, right = plan.mix_box(0, step, 8)
        mask = mix_mask(plan, 0, step, 8)
        assert mask.shape == (8, 8)
        assert mask.sum() == (bottom - top) * (right - left)
        if mask.any():
            assert mask[top, left]
            assert mask[bottom - 1, right - 1]
        shares.append(partner_share(mask).item())
        assert shares[-1] == (bottom - top) * (right - left) / 64
    assert 0.1 < sum(shares) / 50 < 0.5
    assert torch.tensor(shares).std() > 0.1

"""Stochastic depth without the dropped samples: timm's DropPath, in float64 and by expectation."""

import copy

import pytest
import timm
import torch
from timm.layers import DropPath
from torch import nn

from densefeed.models.drop_path import BranchDropPath, add_branch, branch_drop_path, skip_dropped

DIVISOR = 2.0


class Branch(nn.Module):
    """A norm and an MLP, which count the samples that they get."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5), nn.GELU())
        self.counts = []

    def forward(self, x):
        self.counts.append(len(x))
        return self.layers(x)


def run(path, x, seed, dtype=None):
    """Output, gradients of input and weights, and the samples computed, of one add_branch."""
    torch.manual_seed(0)
    branch, x = Branch().to(x.dtype), x.clone().requires_grad_()
    torch.manual_seed(seed)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        out = add_branch(x, branch, path, DIVISOR)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return out, [x.grad, *(p.grad for p in branch.parameters())], branch.counts


@pytest.mark.one_in(5)
@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("scale", [True, False])
def test_skipping_equals_the_mask_of_timm(rate, count, scale):
    """In float64, over draws that keep all, some and no samples."""
    x = torch.randn(count, 3, 5, dtype=torch.float64)
    skipping, timms = BranchDropPath(rate, scale), DropPath(rate, scale)
    skipping.skip, kept = True, set()
    for seed in range(30):
        out, grads, (computed,) = run(skipping, x, seed)
        want, want_grads, _ = run(timms, x, seed)
        torch.testing.assert_close((out, grads), (want, want_grads), rtol=1e-12, atol=1e-12)
        torch.manual_seed(seed)
        drawn = int(torch.empty(count, 1, 1).bernoulli_(1 - rate).sum())
        # One sample is computed where none is kept: weights without gradients would be left alone.
        assert computed == max(drawn, 1)
        kept.add(drawn)
    assert len(kept) > 1


def test_timm_draws_the_same_samples_under_autocast():
    x, path = torch.randn(16, 3, 5), BranchDropPath(0.5)
    masked, _, _ = run(path, x, 1, torch.bfloat16)
    path.skip = True
    skipped, _, _ = run(path, x, 1, torch.bfloat16)
    assert skipped.dtype == masked.dtype == torch.float32
    dropped = (masked == x).flatten(1).all(1)
    assert torch.equal(dropped, (skipped == x).flatten(1).all(1))
    assert 0 < int(dropped.sum()) < 16
    # The mask multiplies in bfloat16, which resolves 2^-8.
    torch.testing.assert_close(skipped, masked, rtol=2**-7, atol=2**-7)


def test_mean_over_draws_is_the_branch():
    """Within 4 standard deviations of a Bernoulli mean, sqrt(p / (1 - p) / n)."""
    torch.manual_seed(0)
    path, draws, rate = BranchDropPath(0.4), 4000, 0.4
    path.skip = True
    total = torch.zeros(3, 1, 1, dtype=torch.float64)
    for _ in range(draws):
        total += add_branch(torch.zeros_like(total), lambda x: x + 1, path, DIVISOR)
    bound = 4 * (rate / (1 - rate) / draws) ** 0.5
    torch.testing.assert_close(total * DIVISOR / draws, torch.ones_like(total), rtol=0, atol=bound)


def test_masked_form_is_timms_to_the_bit():
    """The form in evaluation and, without `skip`, in training; divided after the mask."""
    x, linear = torch.randn(6, 3, 5), nn.Linear(5, 5)
    for path in (BranchDropPath(0.5), BranchDropPath(0.5).eval(), nn.Identity()):
        torch.manual_seed(3)
        out = add_branch(x, linear, path, 3.0)
        torch.manual_seed(3)
        timms = DropPath(0.5 if isinstance(path, DropPath) else 0.0).train(path.training)
        assert torch.equal(out, x + timms(linear(x)) / 3.0)


def test_branches_with_batch_statistics_keep_their_samples():
    paths = {
        name: [type(p) for p in model.modules() if isinstance(p, DropPath)]
        for name, options in (("dhvt_tiny_cifar_patch4", {}), ("cvt_13", {}), ("t2t_vit_7", {}))
        for model in [timm.create_model(name, drop_path_rate=0.5, **options)]
    }
    # Attention of DHVT and MLP of CvT have no BatchNorm.
    assert paths["dhvt_tiny_cifar_patch4"] == [BranchDropPath, DropPath] * 11
    assert paths["cvt_13"] == [DropPath, BranchDropPath] * 9
    assert paths["t2t_vit_7"] == [BranchDropPath] * 12
    assert isinstance(branch_drop_path(0.0, nn.Linear(1, 1)), nn.Identity)


SMALL = dict(img_size=32, num_classes=3, drop_path_rate=0.6, embed_dim=24, depth=3)
MODELS = {
    "lvvit_micro": SMALL,
    "dhvt_tiny_cifar_patch4": SMALL | dict(num_heads=2, token_head=True),
    "t2t_vit_7": SMALL | dict(num_heads=2, token_head=True),
    "cvt_13": dict(num_classes=3, drop_path_rate=0.6, dims=(8, 16, 32), num_heads=(1, 2, 4)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("name", MODELS)
def test_networks_compute_the_same_in_both_forms(name, recompute):
    """Outputs and all gradients, in float64; with MixToken, whose partners are other samples."""
    torch.manual_seed(0)
    masked = timm.create_model(name, **MODELS[name]).double()
    skipping = copy.deepcopy(masked)
    skip_dropped(skipping)
    image, grads = torch.randn(4, 3, 32, 32, dtype=torch.float64), []
    for model in (masked, skipping):
        model.set_grad_checkpointing(recompute)
        torch.manual_seed(5)
        if name == "cvt_13":
            out = model(image)
        else:
            grid = model.token_grid(image)
            cls, tokens = model(image, torch.arange(grid[0] * grid[1]).view(grid) % 3 == 0)
            out = torch.cat([cls[:, None], tokens], dim=1)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        grads.append([out, *(p.grad for p in model.parameters())])
    assert all(grad is not None for grad in grads[1])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-9)

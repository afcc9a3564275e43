"""MixToken after MixUp: loss of a step against the paper's equations, written with slices."""

import pytest
import torch

from densefeed.pipelines.mixing import Mix
from densefeed.pipelines.targets import TargetRules, sparse_targets
from densefeed.recipes import RECIPES
from densefeed.system.options import with_options

from ..runs import first_batch, model_for

BOX, BLEND = (1, 0, 3, 3), 0.3  # 6 of 4 x 4 tokens are the partner's
RULES = TargetRules(smoothing=0.1)


@pytest.fixture(scope="module")
def three(folder, maps):
    """A config with batches of 3 images, the middle of which is its own partner."""
    return with_options(
        RECIPES["lvvit_micro_token_label"](),
        data=folder,
        val=folder,
        score_maps=maps,
        loader="folder",
        batch=3,
        size=32,
        threads=2,
        mixtoken=True,
        mixup=0.8,
    )


def dense_targets(batch, spec, grid):
    """Return targets [N, T, K] and their weights [N, T, 1] in float64."""
    targets = sparse_targets(batch, spec, grid, RULES)
    full = targets.base.double()[..., None].repeat(1, 1, 2)
    full.scatter_add_(
        2, targets.palette[:, None].expand(-1, grid * grid, -1), targets.extra.double()
    )
    return full, targets.weight.double()[..., None]


def mixed_features(model, image):
    """Compute class token and tokens of blended images.

    Tokens are exchanged by a slice and not put back.
    """
    top, left, bottom, right = BOX
    x = model.stem((1 - BLEND) * image + BLEND * image.flip(0))
    other = x.flip(0).clone()
    x[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
    x = torch.cat([model.cls_token.expand(len(x), -1, -1), x.flatten(2).mT], 1) + model.pos_embed
    for block in model.blocks:
        x = block(x)
    x = model.norm(x)
    return x[:, :1], x[:, 1:]


@pytest.mark.parametrize("kind", ["token-label", "relabel", "ce"])
def test_mixtoken_after_mixup_matches_paper(three, kind):
    """Equation 9 exchanges labels with the tokens; un-mixing the logits instead must agree."""
    config = with_options(three, objective=kind)
    step = first_batch(config)
    batch, spec = step.batch, step.spec
    torch.manual_seed(0)
    model = model_for(config)
    mix = Mix(torch.tensor(BOX, dtype=torch.float32), torch.tensor(BLEND), 4)
    ours = step.loss(model, 4, mix)

    def blended(whole):
        return (1 - BLEND) * whole + BLEND * whole.flip(0)

    def loss(logits, target, weight):
        """Targets are already multiplied by their weight, the share of them that is known."""
        return -(target * logits.double().log_softmax(-1)).sum() / weight.sum()

    area = 6 / 16
    if kind == "ce":
        target = 0.9 * torch.nn.functional.one_hot(batch.label, 2).double()[:, None] + 0.1 / 2
        weight = torch.ones(3, 1, 1, dtype=torch.float64)
    else:
        target, weight = dense_targets(batch, spec, 1)
    known = blended(weight)
    whole = blended(target * weight)
    cls, tokens = mixed_features(model, batch.image)
    want = loss(
        model.head(cls),
        (1 - area) * whole + area * whole.flip(0),
        (1 - area) * known + area * known.flip(0),
    )
    if kind == "token-label":
        target, weight = dense_targets(batch, spec, 4)
        # The windows of the maps leave some tokens without a label.
        assert weight.min() < 0.99 < weight.max()
        shown, seen = (blended(part).unflatten(1, (4, 4)) for part in (target * weight, weight))
        top, left, bottom, right = BOX
        for part in (shown, seen):
            part[:, top:bottom, left:right] = part.flip(0).clone()[:, top:bottom, left:right]
        want = want + config.objective.token_labeling.token_weight * loss(
            model.token_head(tokens), shown.flatten(1, 2), seen
        )
    assert ours.item() == pytest.approx(want.item(), rel=1e-5)

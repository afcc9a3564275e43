"""Learning rates against hand formulas and timm's scheduler; which tensors AdamW decays."""

import math

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler

from densefeed.system.options import with_options
from densefeed.training.config import Config, OptimOptions
from densefeed.training.schedule import learning_rate

PUBLISHED = OptimOptions(
    lr=1.6e-3,
    lr_batch=1024,
    batch=1024,
    min_lr=1e-5,
    warmup_epochs=5,
    epochs=300,
    cooldown_epochs=10,
    lr_updates="epoch",
)


@pytest.mark.parametrize(
    ("epoch", "want"),
    [
        (0, 1e-6),
        (1, 1e-6 + (1.6e-3 - 1e-6) / 5),
        (5, 1e-5 + 0.5 * 1.59e-3 * (1 + math.cos(math.pi / 60))),
        (150, 1e-5 + 0.5 * 1.59e-3),
        (299, 1e-5 + 0.5 * 1.59e-3 * (1 - math.cos(math.pi / 300))),
        (300, 1e-5),
        (305, 1e-5),
        (309, 1e-5),
    ],
)
def test_published_schedule_per_epoch(epoch, want):
    """One rate in all 1,251 steps of an epoch.

    The angles of the cosine are reduced by hand.
    """
    for step in (0, 1, 1250):
        assert learning_rate(PUBLISHED, epoch * 1251 + step, 1251) == pytest.approx(want, abs=1e-12)
    assert PUBLISHED.total_epochs == 310


def timm_scheduler(config, **arguments):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.optim.peak_lr)
    scheduler = CosineLRScheduler(
        optimizer, lr_min=config.optim.min_lr, warmup_lr_init=1e-6, **arguments
    )
    return optimizer, scheduler


@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict(batch=192),
        dict(warmup_epochs=0.5),
        dict(warmup_epochs=0),
        dict(min_lr=5e-6, lr=5e-6),
    ],
)
def test_rate_per_step_matches_timm(fields):
    """Bit for bit: earlier versions of this program used a scheduler of timm."""
    config = Config(optim=PUBLISHED)
    config = with_options(config, epochs=7, cooldown_epochs=2, lr_updates="step", **fields)
    optimizer, scheduler = timm_scheduler(
        config, t_initial=7 * 12, warmup_t=int(config.optim.warmup_epochs * 12), t_in_epochs=False
    )
    for step in range(9 * 12):
        scheduler.step_update(step)
        assert learning_rate(config.optim, step, 12) == optimizer.param_groups[0]["lr"]


def test_rate_per_epoch_matches_timm():
    optimizer, scheduler = timm_scheduler(Config(optim=PUBLISHED), t_initial=300, warmup_t=5)
    for epoch in range(310):
        assert learning_rate(PUBLISHED, epoch * 12 + 7, 12) == optimizer.param_groups[0]["lr"]
        scheduler.step(epoch + 1)


def test_peak_scales_with_the_batch():
    """The paper's rule with token labels, 1e-3 * batch / 640; the lowest rate is not scaled."""
    config = with_options(Config(), batch=1280)
    assert config.optim.peak_lr == 2e-3
    assert with_options(config, batch=64).optim.peak_lr == pytest.approx(1e-4)
    assert learning_rate(with_options(config.optim, warmup_epochs=0), 0, 10) == 2e-3
    assert learning_rate(config.optim, 300 * 10, 10) == config.optim.min_lr == 1e-5


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("lvvit_micro", {}), ("test_vit", {}), ("test_vit", dict(class_token=True, reg_tokens=1))],
)
def test_weight_decay_excludes_biases_norms_and_tables(name, arguments):
    """Parameter groups of timm against a rule by name and shape.

    Vectors and the tables of positions and classes are not decayed.
    """
    import densefeed.models.checkpoints  # noqa: F401  (registers our models)

    model = timm.create_model(name, num_classes=10, **arguments)
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    seen = {True: 0, False: 0}
    for parameter_name, parameter in model.named_parameters():
        table = parameter_name in ("pos_embed", "cls_token", "reg_token")
        kept = table or parameter.squeeze().ndim == 1
        assert decay[id(parameter)] == (0.0 if kept else 0.05), parameter_name
        seen[kept] += 1
    assert seen[True] > 10
    assert seen[False] > 8

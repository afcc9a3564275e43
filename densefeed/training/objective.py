"""The loss of a step, as a config states it: augmented batch in, equation 7 of the paper (or its
first term alone) out.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from densefeed.models.token_transformer import TokenLogits
from densefeed.objectives.bootstrapping import (
    JointOutput,
    class_logits,
    distillation_loss,
    feature_loss,
)
from densefeed.objectives.drloc import LocalizedModel, PoolError
from densefeed.objectives.losses import class_token_loss, hard_label_loss, token_labeling_loss
from densefeed.pipelines.augment.settings import Augment
from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.mixing import (
    Mix,
    Mixing,
    box_map,
    label_share,
    mix_images,
    mix_targets,
    pooled,
    share_map,
)
from densefeed.pipelines.pairs import Pairs
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.targets import (
    SparseTargets,
    TargetRules,
    mix_ground_truth,
    palette_maps,
    sparse_targets,
)
from densefeed.system.errors import UserError
from densefeed.training.config import Config

RISING_EPOCHS = 20  # of the weight of DRLoc's loss, in its public code


def augment_settings(config: Config) -> Augment:
    """What happens to a crop before the network sees it."""
    jitter = config.color_jitter or (0.0,)
    return Augment(
        rand_augment=config.rand_augment,
        color_jitter=jitter if len(jitter) > 1 else jitter[0],
        shift=config.shift,
        interpolation=config.interpolation,
        erase_probability=config.erase_probability,
        erase_mode=config.erase_mode,
        erase_count=config.erase_count,
        erase_max_area=config.erase_max_area,
    )


def mixing_settings(config: Config, plan: EpochPlan) -> Mixing:
    """What is mixed with what."""
    return Mixing(
        plan=plan,
        mixtoken=config.mixtoken,
        cutmix=config.cutmix,
        mixup=config.mixup,
        prob=config.mix_prob,
        switch_prob=config.switch_prob,
    )


def dense_targets(
    config: Config, batch: Batch, spec: ScoreMapSpec, rules: TargetRules, grid: int, mix: Mix | None
) -> tuple[SparseTargets, SparseTargets | None]:
    """Targets of the class token, and of the grid of tokens if they are asked for; both mixed as
    the logits are.
    """
    regions = mix is not None and config.mix_label == "regions"
    maps, tokens, shown = palette_maps(batch, spec, rules), None, None
    if regions or config.objective == "token-label":
        tokens = shown = sparse_targets(batch, spec, grid, rules, maps)
        if mix is not None and (regions or not config.mixtoken):
            shown = mix_targets(tokens, share_map(mix, grid))
    whole = pooled(shown) if regions else sparse_targets(batch, spec, 1, rules, maps)
    if config.ground_truth != "none":
        whole = mix_ground_truth(
            whole, batch.label, spec.num_classes, config.smoothing, config.ground_truth
        )
    if mix is not None and not regions:
        whole = mix_targets(whole, label_share(mix))
    if not config.mixtoken or tokens is None:
        return whole, shown
    # The model un-mixes what MixToken has exchanged, so that every token answers for its own image,
    # which MixUp has blended.
    return whole, mix_targets(tokens, mix.blend) if mix is not None and config.mixup else tokens


def objective_loss(
    config: Config,
    output,
    batch: Batch,
    spec: ScoreMapSpec | None,
    rules: TargetRules,
    grid: int,
    mix: Mix | None,
    share: Tensor | None = None,
) -> Tensor:
    """The loss of a step: equation 7, or its first term alone; of two networks `loss_of_both`."""
    if isinstance(output, JointOutput):
        return loss_of_both(config, output, batch, spec, rules, grid, mix, share)
    if config.objective == "ce":
        partners = None if mix is None else label_share(mix)
        return hard_label_loss(output, batch.label, batch.weight, config.smoothing, partners)
    whole, tokens = dense_targets(config, batch, spec, rules, grid, mix)
    if config.objective == "relabel":
        return class_token_loss(output, whole)
    return token_labeling_loss(output, whole, tokens, config.token_weight)


def loss_of_both(
    config: Config,
    output: JointOutput,
    batch: Batch,
    spec: ScoreMapSpec | None,
    rules: TargetRules,
    grid: int,
    mix: Mix | None,
    share: Tensor,
) -> Tensor:
    """Equations 6 to 9 of Bootstrapping ViTs: each network's own loss, the other's answers, the
    agent's features.

    `share` is what the decay leaves of the features' weight. The agent's dense targets are those of
    its last map's own grid.
    """
    agent_grid = (
        math.isqrt(output.agent.tokens.shape[1]) if isinstance(output.agent, TokenLogits) else grid
    )
    total = objective_loss(config, output.vit, batch, spec, rules, grid, mix)
    total = total + objective_loss(config, output.agent, batch, spec, rules, agent_grid, mix)
    if config.distill_weight:
        vit, agent, T = (
            class_logits(output.vit),
            class_logits(output.agent),
            config.distill_temperature,
        )
        soft = distillation_loss(vit, agent, batch.weight, T) + distillation_loss(
            agent, vit, batch.weight, T
        )
        total = total + config.distill_weight * soft
    if config.feature_weight:
        features = feature_loss(
            output.tokens, output.maps, batch.weight, config.feature_norm, config.feature_adapt
        )
        total = total + config.feature_weight * share * features
    return total


def step_loss(
    config: Config,
    model: nn.Module,
    batch: Batch,
    spec: ScoreMapSpec | None,
    rules: TargetRules,
    grid: int,
    mix: Mix | None,
    dtype: torch.dtype | None,
    *,
    pairs: Pairs | None = None,
    share: Tensor | None = None,
    measure: Callable[..., Tensor] = objective_loss,
) -> Tensor:
    """The loss of a batch on the device, augmented; nothing in it waits for the device.

    `grid` is the side of the network's table of tokens (a network without one still needs it, to
    say what the regions of a mixed image show), `dtype` that of autocast, None for none, `pairs`
    what a `LocalizedModel` model is asked and `share` that of `loss_of_both`, None of any other,
    `measure` `objective_loss` or its compiled twin.
    """
    image = batch.image
    if mix is not None and (config.cutmix or config.mixup):
        image = mix_images(image, mix.blend if config.mixtoken else share_map(mix, image.shape[-1]))
    with torch.autocast(image.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
        more = {"mix_PP": box_map(mix, grid) > 0.5} if config.mixtoken else {}
        output = (
            model(image, **more)
            if pairs is None
            else model(image, pairs.words, batch.weight, **more)
        )
    if pairs is None:
        return measure(config, output, batch, spec, rules, grid, mix, share)
    return (
        measure(config, output.output, batch, spec, rules, grid, mix) + pairs.weight * output.loss
    )


def add_drloc_heads(config: Config, model: nn.Module) -> nn.Module:
    """The model with the heads of `config.drloc` beside it, or as it is without. UserError where
    the two do not go together.
    """
    if config.drloc == "none":
        return model
    sizes = sorted({side for _, side in config.sizes} or {config.size})
    try:
        heads = LocalizedModel(
            model, config.drloc, config.drloc_grid, sizes, config.drloc_published
        )
    except (ValueError, RuntimeError, AssertionError, AttributeError, TypeError) as error:
        why = str(error).partition("\n")[0]
        if isinstance(error, PoolError):
            fit = ", ".join(map(str, error.sides))
            why += (
                f"; give --drloc-grid one of {fit}"
                if fit
                else "; choose a larger --size or another --model"
            )
        raise UserError(
            f"--drloc {config.drloc} cannot be computed of {config.model}: {why}"
        ) from error
    return heads.to(next(model.parameters()).device)


def localization_weight(config: Config, epoch: int) -> float:
    """Lambda in this epoch: constant in the paper; the public code raises it over 20 epochs and
    then lowers it to 0.
    """
    if not config.drloc_published:
        return config.drloc_weight
    rising, falling = (
        epoch / RISING_EPOCHS,
        (config.epochs - epoch) / max(config.epochs - RISING_EPOCHS, 1),
    )
    return config.drloc_weight * max(0.0, min(rising, falling))

"""Build the model of a run, and check that it can train at every size of the run."""

import torch
from torch import nn

from densefeed.models import checkpoints
from densefeed.models.meta_device import meta_device
from densefeed.models.model_spec import CANNOT_BUILD, build_on_meta, find_forbidden, is_registered
from densefeed.models.token_transformer import (
    FUSED_FROM,
    TokenTransformer,
    has_tokens,
    name_multiples,
)
from densefeed.models.wrapped_model import get_networks
from densefeed.objectives.base import Objective
from densefeed.pipelines.open import DataOptions
from densefeed.pipelines.shapes import Shape, describe_shape
from densefeed.step import read_patch_size
from densefeed.system.errors import UserError, first_line, is_out_of_memory
from densefeed.training.config import ModelOptions
from densefeed.training.ranks import Ranks
from densefeed.training.speed import peak_flops, training_flops


def model_arguments(
    options: ModelOptions, objective: Objective, num_classes: int
) -> dict[str, object]:
    """Return the arguments of the model. UserError for arguments that other options set."""
    kwargs: dict[str, object] = {"num_classes": num_classes}
    # For a model without a token head of its own, `build_model` leaves it out.
    if has_tokens(options.name) or objective.needs_tokens:
        kwargs["token_head"] = objective.needs_tokens
    kwargs["drop_path_rate"] = options.drop_path
    if taken := {"num_classes", "token_head"} & options.arguments.keys():
        raise UserError(f"--model-kwargs {min(taken)}: data and objective set it; remove it")
    # Later than --drop-path: the recipe's value, which --model-kwargs may replace.
    kwargs |= options.arguments
    # config.json too may come from anywhere, and a report builds its model.
    if forbidden := find_forbidden(kwargs):
        raise UserError(f"--model-kwargs {forbidden}; remove it")
    rate = kwargs["drop_path_rate"]
    if not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise UserError("--model-kwargs drop_path_rate is not from 0 to below 1; remove it")
    if objective.needs_tokens and has_tokens(options.name) and num_classes >= FUSED_FROM:
        kwargs.setdefault("fused_head", True)
    return kwargs


def leave_out(name: str, kwargs: dict[str, object]) -> dict[str, object]:
    """Return the arguments without one of them."""
    return {key: value for key, value in kwargs.items() if key != name}


def check_tokens(name: str, model: nn.Module, objective: Objective) -> None:
    """Raise UserError for a model without the token head, patch size or MixToken of a run."""
    mixes, ours = objective.setting.mix.mixtoken, "an lvvit, dhvt or t2t_vit model"
    if objective.needs_tokens and getattr(model, "with_token_head", False):
        read_patch_size(model, objective)
    elif objective.needs_tokens:
        # Objective.wrap adds a token head, which exchanges patches of pixels.
        if type(objective).wrap is not Objective.wrap:
            instead = "--objective relabel" + " --no-mixtoken" * mixes
            raise UserError(
                f"{name} has no token head of its own, which {objective.flag} needs for token "
                f"labels; choose {ours}, or {instead}, which any model can train with"
            )
        return
    if mixes and not isinstance(model, TokenTransformer):
        raise UserError(
            f"{name} cannot exchange tokens (MixToken); choose {ours}, or --no-mixtoken"
        )


def build_model(
    options: ModelOptions, data: DataOptions, objective: Objective, num_classes: int
) -> tuple[nn.Module, checkpoints.ModelSpec]:
    """Build the model, on the default device; return it and how to build it again.

    Raises UserError for a model that is unknown, cannot be built, or cannot train at a size, alone
    or with what the objective adds.
    """
    name = options.name
    if not is_registered(name):
        raise UserError(
            f"timm knows no model {name!r}; timm.list_models(include_tags=True) lists those it "
            "knows; for one of your own start the file that registers it, as docs/extending.md "
            "shows"
        )
    kwargs = model_arguments(options, objective, num_classes)
    if (built := kwargs.get("img_size", data.size)) not in (data.size, (data.size, data.size)):
        raise UserError(
            f"--model-kwargs img_size={built} has no effect beside --size, which is {data.size}; "
            "give --size alone"
        )
    # CNNs take any size; transformers are built for one, and some take others if built for it.
    sized = kwargs | {"img_size": data.size}
    ways = [sized, kwargs]
    if data.varies:
        ways.insert(0, sized | {"dynamic_img_size": True})
    if not kwargs["drop_path_rate"]:
        # A model without stochastic depth has no such argument, and one with it may default to
        # another rate: 0.1 in Swin.
        ways = [each for way in ways for each in (way, leave_out("drop_path_rate", way))]
    if "token_head" in kwargs and not has_tokens(name):
        # A model of one's own may bring a head; the objective adds it to others.
        ways += [leave_out("token_head", way) for way in ways]
    for way in ways:
        try:
            spec = checkpoints.ModelSpec(name, way)
            model = spec.build()
            # Some models accept any argument without an effect.
            if not way.get("token_head") or getattr(model, "with_token_head", False):
                break
        except CANNOT_BUILD as error:
            if is_out_of_memory(error):
                raise
            # A TypeError means that this model has no such argument: try the next way.
            if way is ways[-1] or not isinstance(error, TypeError):
                remedy = "; change --model-kwargs" if options.kwargs else ""
                if remedy:
                    remedy += ", or give it bare to remove those of the recipe"
                if "drop_path_rate" in str(error) and options.drop_path:
                    remedy = "; give --drop-path 0"
                elif "img_size" in str(error):
                    remedy = "; give another --size"
                raise UserError(f"{name} cannot be built: {first_line(error)}{remedy}") from error
    check_tokens(name, model, objective)
    check_model_sizes(name, data, objective, model)
    if objective.adds_network and not next(model.parameters()).is_meta:
        # A twin on the meta device gives the shapes at every size and computes nothing.
        objective.check_sizes(build_on_meta(spec), num_classes)
    return model, spec


def check_model_sizes(name: str, data: DataOptions, objective: Objective, model: nn.Module) -> None:
    """Raise UserError for a size of the input that the model cannot train at."""
    ours = isinstance(model, TokenTransformer)
    # A transformer of this package is never built for a size that it cannot take. Some of timm's
    # are, and others take no second size. Twins on the meta device were checked as real models.
    tried = (data.varies or not ours) and not next(model.parameters()).is_meta
    for shape in data.shapes if tried else ():
        height, width = shape
        # A table of positions of fixed length fits another grid of as many tokens, at wrong places.
        # One column more shows it.
        coincides = height != width and height * width == data.size**2
        widths = (width, width + data.side_multiple) if coincides else (width,)
        try:
            with torch.inference_mode():
                for each in widths:
                    model.eval()(torch.zeros(1, 3, height, each))
        except CANNOT_BUILD as error:
            if is_out_of_memory(error):
                raise
            raise UserError(
                f"{name} cannot train at {describe_shape(shape)} ({first_line(error)}); choose "
                f"{data.size_option} or another model"
            ) from error
    if ours and (objective.needs_tokens or objective.setting.mix.mixtoken):
        for shape in data.shapes:
            if partial := [extent for extent in shape if extent % model.patch_size]:
                option = f", such as {name_multiples(partial[0], model.patch_size)}"
                option = " as --side-multiple" if data.aspects else option
                raise UserError(
                    f"{name} would see partial patches at {describe_shape(shape)}, which have no "
                    f"labels; choose a multiple of {model.patch_size} px{option}"
                )


def flops_shares(
    spec: checkpoints.ModelSpec,
    objective: Objective,
    num_classes: int,
    passes: int,
    ranks: Ranks,
    dtype: torch.dtype | None,
) -> dict[Shape, float]:
    """Return the operations of a training image over those that all devices do in a second.

    For each shape of the network's input; times the images per second this is the MFU. Empty where
    `peak_flops` knows no rate, or the objective waits. `passes` is 2 with SAM; `dtype` is that of
    autocast.
    """
    peak = peak_flops(ranks.device, dtype or torch.float32)
    if peak is None or objective.waits:
        return {}
    with meta_device():
        # `place` does nothing here, so that added networks stay on the meta device too.
        networks = get_networks(objective.wrap(spec.build(), num_classes, lambda network: network))
    return {
        shape: passes * sum(training_flops(net, shape) for net in networks) / (peak * ranks.size)
        for shape in objective.setting.shapes
    }

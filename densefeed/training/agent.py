"""The second network of a run: the agent CNN of `--bootstrap joint` and `shared`, made and checked
before the first step.
"""

import torch
from torch import Tensor, nn

from densefeed.models.agent_cnn import AgentCNN, make_agent, vit_spec
from densefeed.objectives.bootstrapping import JointModel, feature_loss
from densefeed.system.errors import UserError
from densefeed.training.config import Config, parse_arguments
from densefeed.training.schedule import total_epochs

AGENT_KWARGS = ("down", "pool", "norm")  # all else of an agent is its transformer's


def build_agent(config: Config, model: nn.Module, num_classes: int) -> AgentCNN | None:
    """The agent of `model`, on the CPU or where the default device is; None for a run without one.

    With token labels it has a head on every place of its last map. UserError where the model can
    have none.
    """
    if config.bootstrap == "none":
        return None
    given = parse_arguments(config.agent_kwargs, "--agent-kwargs")
    if unknown := [name for name in given if name not in AGENT_KWARGS]:
        raise UserError(
            f"--agent-kwargs knows {', '.join(AGENT_KWARGS[:-1])} and {AGENT_KWARGS[-1]}, and no {unknown[0]}; what else an agent "
            "has is its transformer's, or --agent's"
        )
    options = {"stem": config.agent, "token_head": config.objective == "token-label"} | given
    try:
        return make_agent(model, num_classes, shared=config.bootstrap == "shared", **options)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"--bootstrap {config.bootstrap}: {config.model} can have no such agent ({error}); "
            "choose another --model, --model-kwargs or --agent-kwargs"
        ) from error


def joint_model(config: Config, model: nn.Module, agent: AgentCNN | None) -> nn.Module:
    """All that a run trains: the model, or model and agent as one network. UserError for blocks
    that are not there.
    """
    if agent is None:
        return model
    try:
        return JointModel(model, agent, config.feature_blocks)
    except ValueError as error:
        raise UserError(
            f"--feature-blocks {' '.join(map(str, config.feature_blocks))}: {error}"
        ) from error


def check_agent_sizes(config: Config, model: nn.Module, num_classes: int) -> None:
    """UserError if the features of model and agent cannot be compared at a size that the run trains
    at.

    `model` is on the meta device, which computes shapes alone.
    """
    with torch.device("meta"):
        agent = build_agent(config, model, num_classes)
        if agent is None:
            return
        both = joint_model(config, model, agent).eval()
        for side in sorted({side for _, side in config.sizes} or {config.size}):
            try:
                said = both(torch.empty(1, 3, side, side))
                feature_loss(
                    said.tokens, said.maps, torch.ones(1), config.feature_norm, config.feature_adapt
                )
            except (ValueError, RuntimeError, AssertionError) as error:
                why, option = str(error).partition("\n")[0], "--sizes" if config.sizes else "--size"
                fit = " or ".join(map(str, nearby_sizes(config, both, side)))
                raise UserError(
                    f"--bootstrap {config.bootstrap} cannot train at {side} px ({why}); choose another {option}"
                    f"{f' ({fit} px fit)' if fit else ''}, --agent, --agent-kwargs or --feature-adapt"
                ) from error


def nearby_sizes(config: Config, both: JointModel, side: int) -> list[int]:
    """The next smaller and larger sides, up to twice as large, of whole patches and features that
    can be compared.
    """
    patch, width = vit_spec(both.vit).patch, both.vit.embed_dim

    def fits(other: int) -> bool:
        try:
            maps = both.agent.forward_maps(torch.empty(1, 3, other, other))[1]
            tokens = [torch.empty(1, (other // patch) ** 2, width)] * len(both.taken)
            said = [maps[number] for number in both.taken]
            feature_loss(tokens, said, torch.ones(1), config.feature_norm, config.feature_adapt)
        except (ValueError, RuntimeError):
            return False
        return True

    below = range((side - 1) // patch * patch, 0, -patch)
    above = range((side // patch + 1) * patch, 2 * side + 1, patch)
    return [found for sides in (below, above) if (found := next(filter(fits, sides), 0))]


def feature_weight_factor(config: Config, epoch: int) -> Tensor | None:
    """What is left of `feature_weight` in an epoch, float32 `[]` on the CPU; None for a run without
    agent.

    A tensor, as the compiler takes a number for a constant and would compile every epoch anew.
    """
    if config.bootstrap == "none":
        return None
    return torch.tensor(
        1 - epoch / total_epochs(config) if config.feature_decay == "linear" else 1.0
    )

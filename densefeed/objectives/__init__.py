"""Objectives: what a run can be trained for, one method per file.

`--objective` names one of OBJECTIVES. `--drloc` and `--bootstrap` wrap it.
"""

from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from tyro.conf import arg

from densefeed.objectives.base import Objective, ObjectiveOptions, Setting
from densefeed.objectives.bootstrapping import BootstrapOptions, Bootstrapping
from densefeed.objectives.ce import CrossEntropy
from densefeed.objectives.drloc import DRLoc, DRLocOptions
from densefeed.objectives.relabel import ReLabel
from densefeed.objectives.token_labeling import TokenLabeling, TokenLabelingOptions
from densefeed.system.errors import UserError
from densefeed.system.options import Options

Registered = TypeVar("Registered", bound=type[Objective])
OBJECTIVES: dict[str, type[Objective]] = {}


def register(objective: Registered) -> Registered:
    """Make an objective known by its `name`; usable as a decorator. ValueError if it is taken."""
    if objective.name in OBJECTIVES:
        raise ValueError(f"there is an objective {objective.name!r} already")
    OBJECTIVES[objective.name] = objective
    return objective


for builtin in (CrossEntropy, ReLabel, TokenLabeling):
    register(builtin)


@dataclass(frozen=True, kw_only=True)
class Objectives(Options):
    """The section `objective` of a run's options."""

    # ce: image labels; relabel: dense label of the crop; token-label: dense label of every token
    name: Annotated[str, arg(name="objective")] = "token-label"
    # options of --objective token-label
    token_labeling: TokenLabelingOptions = field(default_factory=TokenLabelingOptions)
    # DRLoc (arXiv 2106.03746), a loss beside that of the objective
    drloc: DRLocOptions = field(default_factory=DRLocOptions)
    # Bootstrapping ViTs (arXiv 2112.03552), an agent CNN trained beside the transformer
    bootstrap: BootstrapOptions = field(default_factory=BootstrapOptions)
    # options of an objective that is registered from outside the package
    own: ObjectiveOptions = field(default_factory=ObjectiveOptions)


def build_objective(setting: Setting) -> Objective:
    """Build and check the objective of a run. UserError where options contradict each other."""
    options = setting.options
    if options.name not in OBJECTIVES:
        raise UserError(
            f"--objective {options.name} is unknown; choose one of {', '.join(OBJECTIVES)}"
        )
    kind = OBJECTIVES[options.name]
    if not isinstance(options.own, kind.own):
        raise UserError(
            f"--objective {options.name} has options of its own, {kind.own.__name__}; choose a "
            "recipe that has them"
        )
    objective = kind(setting)
    # Both wrap any objective; Bootstrapping.check refuses them together.
    if options.drloc.variant != "none":
        objective = DRLoc(setting, objective)
    if options.bootstrap.mode != "none":
        objective = Bootstrapping(setting, objective)
    objective.check()
    return objective

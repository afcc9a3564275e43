"""An objective of your own: cross entropy minus the entropy of the prediction (arXiv 1701.06548).

python objective.py confidence_penalty --data DATA --val DATA --out OUT --penalty-weight 0.2
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from densefeed import Batch, Config, Objective, ObjectiveOptions, register_objective, train
from densefeed.objectives.base import StepContext
from densefeed.recipes import RECIPES
from densefeed.recipes.micro import lvvit_micro_ce
from densefeed.system.options import with_options


@dataclass(frozen=True, kw_only=True)
class PenaltyOptions(ObjectiveOptions):
    """Options of the confidence penalty."""

    # weight of the entropy
    penalty_weight: float = 0.1


@register_objective
class ConfidencePenalty(Objective):
    """Cross entropy with the image's label minus the weighted entropy of the prediction."""

    name = "confidence-penalty"
    own = PenaltyOptions

    def loss(self, output: Tensor, batch: Batch, step: StepContext) -> Tensor:
        log_NK = F.log_softmax(output.float(), -1)
        entropy_N = -(log_NK.exp() * log_NK).sum(-1)
        cross_N = F.nll_loss(log_NK, batch.label, reduction="none")
        loss_N = cross_N - self.setting.options.own.penalty_weight * entropy_N
        return (loss_N * batch.weight).sum() / batch.weight.sum().clamp(min=1)


def confidence_penalty() -> Config:
    """lvvit_micro with a confidence penalty."""
    return with_options(lvvit_micro_ce(), objective="confidence-penalty", own=PenaltyOptions())


if __name__ == "__main__":
    RECIPES.append(confidence_penalty)
    train.command()

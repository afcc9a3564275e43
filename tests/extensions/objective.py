"""An objective of your own: cross entropy minus the entropy of the prediction (arXiv 1701.06548).

python objective.py lvvit_micro_ce --objective confidence-penalty --penalty-weight 0.2 --data ...
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from densefeed import Batch, Objective, Options, register_objective, train
from densefeed.objectives.base import StepContext


@dataclass(frozen=True, kw_only=True)
class PenaltyOptions(Options):
    """Options of `--objective confidence-penalty`."""

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
        loss_N = cross_N - self.options.penalty_weight * entropy_N
        return (loss_N * batch.weight).sum() / batch.weight.sum().clamp(min=1)


if __name__ == "__main__":
    train.command()

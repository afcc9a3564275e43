"""ReLabel (arXiv 2101.05022): the dense label of the crop."""

from torch import Tensor

from densefeed.objectives.base import DenseObjective, StepContext
from densefeed.objectives.losses import sparse_loss
from densefeed.pipelines.batch import Batch


class ReLabel(DenseObjective):
    """`--objective relabel`: one dense label per crop, for any classifier."""

    name = "relabel"

    def loss(self, output: Tensor, batch: Batch, step: StepContext) -> Tensor:
        self.check_logits(output)
        return sparse_loss(output, self.targets(batch, step)[0])

"""Cross entropy with the image's label."""

from typing import ClassVar

from torch import Tensor

from densefeed.objectives.base import Objective, StepContext
from densefeed.objectives.losses import hard_label_loss
from densefeed.pipelines.batch import Batch
from densefeed.pipelines.mixing import label_share
from densefeed.system.errors import UserError


class CrossEntropy(Objective):
    """`--objective ce`: class ids as labels; mixed images have both labels, by area."""

    name = "ce"
    mixes_labels = True
    unused: ClassVar = dict.fromkeys(
        ("score_maps", "maps_on_device", "temperature", "ground_truth", "geometry", "outside"),
        "--objective relabel or token-label",
    )

    def check(self) -> None:
        if self.setting.mix.mix_label == "regions":
            raise UserError(
                "--mix-label regions pools dense labels, which --objective ce does not use; "
                "give --mix-label area"
            )

    def loss(self, output: Tensor, batch: Batch, step: StepContext) -> Tensor:
        self.check_logits(output)
        share = None if step.mix is None else label_share(step.mix)
        smoothing = self.setting.labels.smoothing
        return hard_label_loss(output, batch.label, batch.weight, smoothing, share)

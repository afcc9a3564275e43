"""Watch: what a log interval finds out of the steps behind it, and where it ends a run that has
gone wrong.
"""

import math
import sys

import torch
from torch import Tensor

from densefeed.system.errors import UserError
from densefeed.training.config import Config
from densefeed.training.guards import LossSpikes, first_not_finite
from densefeed.training.ranks import Ranks
from densefeed.training.step_inputs import StepInputs
from densefeed.training.student import Student

LEAST_SCALE = 2**-10  # of a float16 loss; it begins at 2^16 and each overflow halves it


class TrainMonitor:
    """Adds up losses on the device, and looks at them, and at what the student's guard has counted,
    when it is asked.

    Args:
        seen: what the checkpoint of a continued run holds, else None.
        skips: updates skipped so far.

    Attributes:
        seen: float64 `[2]`, the sum of the losses since the last log line, and how many they are.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        student: Student,
        feed: StepInputs,
        seen: Tensor | None = None,
        skips: int = 0,
    ) -> None:
        self._config, self._ranks, self._student, self._feed, self.skips = (
            config,
            ranks,
            student,
            feed,
            skips,
        )
        self.seen = torch.zeros(2, dtype=torch.float64, device=ranks.device)
        if seen is not None:
            self.seen.copy_(seen)
        self._leaps = LossSpikes()

    def add(self, loss: Tensor) -> None:
        """Another step's loss, float32 `[]`; no wait. Where steps may be skipped, one that is not
        finite counts as skipped.
        """
        counted = loss.isfinite() | (self._config.on_nonfinite == "stop")
        self.seen += torch.stack([torch.where(counted, loss, 0), counted])

    def mean_loss_sync(self, step: int) -> float:
        """The mean loss since the last log line, NaN of no steps; waits for the device.

        UserError, which names step, samples and first bad tensor, if numbers are not finite and may
        not be, or were too often.
        """
        config, student = self._config, self._student
        bad, when = student.finite.poll_sync()
        self.skips += bad
        if bad and config.on_nonfinite == "stop":
            raise UserError(f"{config.out}: {self._why_not_finite(when)}")
        if bad and self.skips > config.max_skips:
            raise UserError(
                f"{config.out}: {self.skips} updates were skipped, as their gradients were not finite, of the last ones step "
                f"{when + 1} first; that is more than --max-skips {config.max_skips}; lower --lr, or give --clip-grad 1"
            )
        if student.scaler.is_enabled() and student.scaler.get_scale() < LEAST_SCALE:
            raise UserError(
                f"{config.out}: gradients overflow in float16 at any scale of the loss, up to step {step}; "
                "give --precision bf16 or fp32, or lower --lr"
            )
        if bad:
            self._say(
                f"skipped {bad} updates whose gradients were not finite, of step {when + 1} first"
            )
        total, count = self._ranks.sum(self.seen.clone()).tolist()
        mean = total / count if count else math.nan
        if count and not math.isfinite(mean):  # though its gradients were
            raise UserError(
                f"the loss is {mean} at step {step} of {config.out}; lower --lr, or give --clip-grad 1"
            )
        return mean

    def next_interval(self, step: int, mean: float) -> None:
        """Begin to add up anew after a log line of the loss `mean`; tells a loss that leapt."""
        if told := self._leaps.seen(mean):
            self._say(f"step {step}: {told}")
        self.seen.zero_()

    def _say(self, text: str) -> None:
        if self._ranks.first:
            print(text, file=sys.stderr, flush=True)

    def _why_not_finite(self, when: int) -> str:
        """One sentence on a step whose gradients were not finite. Weights are still those before
        it, so it is done again.
        """
        feed, model = self._feed, self._student.trained
        epoch, at = divmod(when, len(feed.loader))
        parts, cause = next(feed.batches(epoch, at)), ""
        for part, compute in zip(parts, feed.losses(model, parts, epoch, at), strict=True):
            found = first_not_finite(model.train(not self._config.frozen_statistics), compute)
            if found and not cause:
                cause = f"{found} is the first that is not, with samples {', '.join(map(str, part.index[:8].tolist()))} ..."
        return (
            f"the gradients of step {when + 1} are not finite; {cause or 'of this rank all are'}; "
            "lower --lr, or give --clip-grad 1 or --on-nonfinite skip"
        )

"""TrainMonitor: statistics of the steps between two log lines, and the end of a run gone wrong."""

import math
import sys
from pathlib import Path

from torch import Tensor

from densefeed.step import Step
from densefeed.system.errors import UserError
from densefeed.system.terminal import print
from densefeed.training.guards import LossSpikes, find_first_nonfinite
from densefeed.training.ranks import Ranks
from densefeed.training.student import Student

# Smallest scale of a float16 loss. It begins at 2^16 and each overflow halves it.
LEAST_SCALE = 2**-10
# Updates that `--on-nonfinite skip` may skip in a run.
MOST_SKIPS = 10


class TrainMonitor:
    """Sums losses on the device and reads the sums, and the guard's counts, at log lines.

    Args:
        out: the run folder, for messages.
        seen: float64 `[2]`, the sum of the losses since the last log line, and their number. It is
            also an attribute, on the device.
        skips: updates skipped so far.
    """

    def __init__(
        self, student: Student, step: Step, ranks: Ranks, out: Path, seen: Tensor, skips: int
    ) -> None:
        self._student, self._step, self._ranks, self._out = student, step, ranks, out
        self.skips = skips
        self.seen = seen.to(ranks.device)
        self._spikes = LossSpikes()

    def add(self, loss: Tensor) -> None:
        """Add a step's loss, float32 `[]`, without waiting.

        Where steps may be skipped, a loss that is not finite counts as skipped.
        """
        total, count = self.seen.unbind()
        # In place, and without torch.where, which copies its numbers: 2 or 7 launches, not 9.
        if not self._student.guard.skip:
            # A loss that stops the run stays in the sum, so that the mean shows it.
            total += loss
            count += 1
        else:
            total += loss.nan_to_num(0, 0, 0)
            count += loss.isfinite()

    def mean_loss_sync(self, step: int) -> float:
        """Return the mean loss since the last log line, NaN without steps.

        Raises UserError, which names step, samples and first bad tensor, if numbers are not finite
        and must be, or were not too often.
        """
        out, student = self._out, self._student
        bad, first = student.guard.poll_sync()
        self.skips += bad
        if bad and not student.guard.skip:
            raise UserError(f"{out}: {self._why_not_finite(first)}")
        if bad and self.skips > MOST_SKIPS:
            raise UserError(
                f"{out}: {self.skips} updates were skipped because their gradients were not "
                f"finite, most recently from step {first + 1} on; that is more than the "
                f"{MOST_SKIPS} that a run may skip; lower --lr, or give --clip-grad 1"
            )
        if student.scaler.is_enabled() and student.scaler.get_scale() < LEAST_SCALE:
            raise UserError(
                f"{out}: gradients overflow in float16 at any scale of the loss, up to step {step};"
                " give --precision bf16 or fp32, or lower --lr"
            )
        if bad:
            self._report(
                f"skipped {bad} updates whose gradients were not finite, from step {first + 1} on"
            )
        # A copy, because the all-reduce is in place and `seen` is this rank's own.
        total, count = self._ranks.sum(self.seen.clone()).tolist()
        mean = total / count if count else math.nan
        # The gradients of a loss that is not finite may be finite.
        if count and not math.isfinite(mean):
            raise UserError(
                f"the loss is {mean} at step {step} of {out}; lower --lr, or give --clip-grad 1"
            )
        return mean

    def next_interval(self, step: int, mean: float) -> None:
        """Begin a new interval after a log line with the loss `mean`; report a loss spike."""
        if text := self._spikes.describe(mean):
            self._report(f"step {step}: {text}")
        self.seen.zero_()

    def _report(self, text: str) -> None:
        if self._ranks.is_first:
            print(text, file=sys.stderr, flush=True)

    def _why_not_finite(self, when: int) -> str:
        """Name the first bad tensor of a step. Weights are those before it, so it is repeated."""
        # Not the DDP module: ranks stop at different tensors, and an all-reduce would wait for all.
        step, trainable = self._step, self._student.trainable
        self._student.train()
        # Batches and losses are pure functions of epoch and step, so these are the same again.
        batch, cause = next(step.batches(*divmod(when, len(step.loader)))), ""
        for compute in step.losses(trainable, batch):
            found = find_first_nonfinite(trainable, compute)
            if found and not cause:
                samples = ", ".join(map(str, compute.data[0].index[:8].tolist()))
                cause = f"{found} is the first that is not, with samples {samples} ..."
        remedy = "lower --lr, or give --clip-grad 1 or --on-nonfinite skip"
        if self._student.optim.sam_rho and not cause:
            # Only the weights themselves were tried, not those that SAM moved.
            remedy = f"lower --sam-rho; or {remedy}"
        return (
            f"the gradients of step {when + 1} are not finite; {cause or 'on this rank all are'}; "
            f"{remedy}"
        )

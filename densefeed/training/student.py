"""The student: what a step changes, and what a checkpoint holds to resume a run."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from densefeed.models.wrapped_model import WrappedModel
from densefeed.system.errors import UserError, first_line
from densefeed.training.config import OptimOptions
from densefeed.training.ema import WeightAverage
from densefeed.training.guards import NonFiniteGuard
from densefeed.training.optimizers import build_optimizer, step_unless
from densefeed.training.ranks import Ranks
from densefeed.training.sam import worst_weights


class Student(NamedTuple):
    """A network in training."""

    model: nn.Module  # the model that is evaluated, averaged (EMA) and exported
    trainable: nn.Module  # what is optimized: the model, or a module that holds it and more
    network: nn.Module  # `trainable`, under several ranks wrapped in DDP
    ema: WeightAverage | None
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # enabled for float16 only
    guard: NonFiniteGuard
    optim: OptimOptions
    frozen: bool  # trains in evaluation mode

    @property
    def evaluated(self) -> dict[str, nn.Module]:
        """The networks that are evaluated, by what follows the names of their metrics."""
        ema = {"_ema": self.ema.module} if self.ema else {}
        beside = self.trainable.evaluated if isinstance(self.trainable, WrappedModel) else {}
        return {"": self.model} | ema | {f"_{name}": network for name, network in beside.items()}

    @property
    def averaged(self) -> list[nn.Module]:
        """Modules whose buffers differ between ranks until they are averaged."""
        return [self.trainable, self.ema.module] if self.ema else [self.trainable]

    @property
    def parts(self) -> dict[str, Any]:
        """Objects whose state a checkpoint holds, by name; `ema` is None in a run without EMA."""
        parts = {
            "model": self.model,
            "ema": self.ema.module if self.ema else None,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
        }
        # What is trained beside the model.
        beside = () if self.trainable is self.model else self.trainable.named_children()
        return parts | {name: part for name, part in beside if part is not self.model}

    def train(self) -> None:
        """Put what is trained into the mode in which it is trained."""
        self.trainable.train(not self.frozen)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next update."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def average(self, step: int) -> None:
        """Let the EMA follow the weights of step `step`, from 0."""
        if self.ema:
            # timm counts from 1: the first update copies the weights.
            self.ema.update(self.model, step + 1)

    def state(self) -> dict:
        """Return what `restore` needs."""
        parts = self.parts.items()
        return {name: None if part is None else part.state_dict() for name, part in parts}

    def restore(self, checkpoint: dict, out: Path) -> None:
        """Load a checkpoint of the run in `out` that holds `state`; UserError for another state."""
        try:
            for name, part in self.parts.items():
                if part is not None:
                    part.load_state_dict(checkpoint[name])
        except (KeyError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"the checkpoint in {out} does not fit its run ({first_line(error)}); copy it "
                "again, or choose another --out"
            ) from error


def build_student(
    optim: OptimOptions,
    model: nn.Module,
    trainable: nn.Module,
    ranks: Ranks,
    dtype: torch.dtype | None,
    captured: bool = False,
    frozen: bool = False,
) -> Student:
    """Give `trainable`, which holds `model`, an optimizer, an EMA and guards.

    `dtype` is that of autocast. All modules must be on the device, BatchNorm synchronized if it is
    to be. What is trained beside the model has no EMA: the EMA is for evaluation, which needs the
    model alone. A `captured` update averages gradients over ranks itself, without DDP. A `frozen`
    student trains in evaluation mode.
    """
    if captured:
        ranks.broadcast(trainable)
    return Student(
        model=model,
        trainable=trainable,
        network=trainable if captured else ranks.parallel(trainable),
        ema=WeightAverage(model, optim.ema) if optim.ema else None,
        optimizer=build_optimizer(
            optim.optimizer,
            trainable,
            optim.peak_lr,
            optim.weight_decay,
            optim.momentum,
            optim.decay_all,
        ),
        scaler=torch.amp.GradScaler(ranks.device.type, enabled=dtype == torch.float16),
        guard=NonFiniteGuard(ranks.device, optim.on_nonfinite == "skip"),
        optim=optim,
        frozen=frozen,
    )


def update(
    student: Student, ranks: Ranks, step: int, losses: Sequence[Callable[[], Tensor]]
) -> tuple[Tensor, Tensor]:
    """Do step number `step`, from 0: the gradient of the mean of `losses`, then new weights.

    Each of `losses` computes the loss of a part of this rank's batch, twice with SAM. Returns
    their mean and the norm of the gradient before clipping, float32 `[]` each. Nothing waits for
    the device but an optimizer that is not fused.
    """
    student.guard.begin(step)
    results = descend(student, ranks, losses)
    student.average(step)
    return results


def descend(
    student: Student, ranks: Ranks, losses: Sequence[Callable[[], Tensor]]
) -> tuple[Tensor, Tensor]:
    """Do the part of `update` that a CUDA graph can hold: all but the EMA."""
    before = copy_statistics(student)
    mean = backward(student, ranks, losses)
    if student.optim.sam_rho:
        with worst_weights(student.trainable, student.optim.sam_rho):
            worst = backward(student, ranks, losses)
        # The mean is that of the weights themselves, unless the guard must see the other.
        mean = torch.where(worst.isfinite(), mean, worst)
    return mean, apply_gradients(student, ranks, mean, before)


def copy_statistics(student: Student) -> list[tuple[Tensor, Tensor]]:
    """Return what a skipped step must restore, with copies: BatchNorm's running statistics.

    They change in the forward pass, before it is known whether the gradients are finite.
    """
    if not student.guard.skip:
        return []
    return [(b, b.clone()) for b in student.trainable.buffers() if b.is_floating_point()]


def backward(student: Student, ranks: Ranks, losses: Sequence[Callable[[], Tensor]]) -> Tensor:
    """Accumulate the gradients of all losses; return their mean, float32 `[]`."""
    mean = None
    for number, compute in enumerate(losses, start=1):
        last = number == len(losses)
        # DDP averages gradients over ranks once, in the last of these backward passes.
        with nullcontext() if last or ranks.size == 1 else student.network.no_sync():
            # A division by 1 would be two launches on a GPU, here and in the backward pass.
            loss = compute() / len(losses) if len(losses) > 1 else compute()
            student.scaler.scale(loss).backward()
        mean = loss.detach() if mean is None else mean + loss.detach()
    if isinstance(student.trainable, WrappedModel):
        # Before SAM, clipping and the guard, which read the gradient that the optimizer applies.
        student.trainable.combine_gradients(ranks.average_gradients)
    return mean


def apply_gradients(
    student: Student, ranks: Ranks, mean: Tensor, before: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Clip the gradients, update the weights unless the guard objects; return the norm before.

    `mean` is the loss, `before` what `copy_statistics` returned before the forward pass.
    """
    trainable, scaler, optimizer = student.trainable, student.scaler, student.optimizer
    gradients = [p.grad for p in trainable.parameters() if p.grad is not None]
    if scaler.is_enabled():
        # Overflows of scaled gradients are part of the method: the scaler skips them by itself. The
        # guard judges the loss, and puts a NaN into a gradient where the step must be skipped.
        flag = student.guard.update(ranks.sum(mean.clone()))
        gradients[0].add_(torch.where(flag > 0, torch.nan, 0.0))
    # The maximum norm is that of unscaled gradients. Without float16 this does nothing.
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    if clip := student.optim.clip_grad:
        torch.nn.utils.clip_grads_with_norm_(trainable.parameters(), clip, norm, foreach=True)
    if scaler.is_enabled():
        scaler.step(optimizer)
        scaler.update()
    else:
        step_unless(student.guard.update(norm), optimizer)
    optimizer.zero_grad(set_to_none=True)
    # Before the EMA, which averages buffers too.
    for buffer, old in before:
        buffer.copy_(torch.where(student.guard.flag > 0, old, buffer))
    return norm

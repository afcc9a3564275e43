"""The student: what a step changes, and what a checkpoint must hold to go on as if nothing had
happened.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from densefeed.models.agent_cnn import AgentCNN
from densefeed.objectives.bootstrapping import Align, JointModel
from densefeed.training.agent import joint_model
from densefeed.training.config import Config
from densefeed.training.guards import NonFiniteGuard
from densefeed.training.objective import add_drloc_heads
from densefeed.training.ranks import Ranks
from densefeed.training.schedule import peak_rate


class Student(NamedTuple):
    """A network in training."""

    model: nn.Module  # what is judged, averaged and given away
    # what is optimized: the model, or it and DRLoc's heads or its agent beside it
    trained: nn.Module
    # that as the backward pass wants it: under several ranks it averages gradients
    network: nn.Module
    ema: ModelEmaV3 | None
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # of float16's losses; else it does nothing
    finite: NonFiniteGuard
    clip_grad: float
    align: Align

    @property
    def agent(self) -> nn.Module | None:
        """The second network, if there is one."""
        return self.beside.get("agent")

    @property
    def beside(self) -> dict[str, nn.Module]:
        """What is trained and is not the model, by its name in a checkpoint."""
        if self.trained is self.model:
            return {}
        return {
            name: part for name, part in self.trained.named_children() if part is not self.model
        }

    def state(self) -> dict:
        """What `restore` needs."""
        return {
            "model": self.model.state_dict(),
            "ema": self.ema.module.state_dict() if self.ema else None,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        } | {name: part.state_dict() for name, part in self.beside.items()}

    def restore(self, checkpoint: dict) -> None:
        """Go on from a checkpoint that holds `state`."""
        self.model.load_state_dict(checkpoint["model"])
        for name, part in self.beside.items():
            part.load_state_dict(checkpoint[name])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.scaler.load_state_dict(checkpoint["scaler"])
        if self.ema:
            self.ema.module.load_state_dict(checkpoint["ema"])

    def averaged(self) -> list[nn.Module]:
        """Models whose buffers differ between ranks until they are averaged."""
        return [self.trained, self.ema.module] if self.ema else [self.trained]


def build_student(
    config: Config,
    model: nn.Module,
    ranks: Ranks,
    dtype: torch.dtype | None,
    agent: AgentCNN | None = None,
) -> Student:
    """`model` with its optimizer, averaged weights and guards, and perhaps an agent that learns
    beside it.

    `dtype` is that of autocast. Model and agent must be on the device already, and synchronized if
    they are to be.

    AdamW decays no biases, norms and tables (timm's grouping). Its fused form takes `found_inf`, on
    which the guard relies. DRLoc's heads and the agent are trained and saved, but have no averaged
    weights: those are for judging, which needs the model alone. UserError where the model cannot
    have such heads.
    """
    trained = add_drloc_heads(config, joint_model(config, model, agent))
    return Student(
        model=model,
        trained=trained,
        network=ranks.parallel(trained),
        ema=ModelEmaV3(model, decay=config.ema, use_warmup=True, foreach=True)
        if config.ema
        else None,
        optimizer=create_optimizer_v2(
            trained, "adamw", lr=peak_rate(config), weight_decay=config.weight_decay, fused=True
        ),
        scaler=torch.amp.GradScaler(ranks.device.type, enabled=dtype == torch.float16),
        finite=NonFiniteGuard(ranks.device, config.on_nonfinite == "skip"),
        clip_grad=config.clip_grad,
        align=config.align,
    )


def update(
    student: Student, ranks: Ranks, step: int, losses: Sequence[Callable[[], Tensor]]
) -> tuple[Tensor, Tensor]:
    """Step number `step`, from 0: gradients of the mean of `losses`, then new weights; nothing
    waits for the device.

    Each of `losses` computes that of a part of this rank's batch. Returns their mean and the norm
    of the gradients, before they are clipped: float32 `[]` each.
    """
    model, scaler, mean = student.trained, student.scaler, torch.zeros((), device=ranks.device)
    # BatchNorm's running statistics change in the forward pass, before anybody knows whether it was
    # finite.
    running = [b for b in model.buffers() if b.is_floating_point()] if student.finite.skip else []
    before = [b.clone() for b in running]
    for number, loss_of in enumerate(losses, start=1):
        with (
            nullcontext() if number == len(losses) or ranks.size == 1 else student.network.no_sync()
        ):
            loss = loss_of() / len(losses)
            scaler.scale(loss).backward()
        mean += loss.detach()
    if isinstance(model, JointModel) and model.shared:
        model.combine_gradients(student.align, ranks.average_gradients)
    if scaler.is_enabled():
        # Overflows of scaled gradients are part of the method: the scaler steps over them by
        # itself. The guard judges the loss, and shows the scaler a gradient that is not finite
        # where the step must be left out.
        flag = student.finite.update(ranks.sum(mean.clone()), step)
        next(p.grad for p in model.parameters() if p.grad is not None).add_(
            torch.where(flag > 0, torch.nan, 0.0)
        )
    scaler.unscale_(student.optimizer)
    norm = torch.nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None], foreach=True
    )
    if student.clip_grad:
        torch.nn.utils.clip_grads_with_norm_(
            model.parameters(), student.clip_grad, norm, foreach=True
        )
    if scaler.is_enabled():
        scaler.step(student.optimizer)
        scaler.update()
    else:
        student.optimizer.found_inf = student.finite.update(norm, step)
        student.optimizer.step()
    student.optimizer.zero_grad(set_to_none=True)
    for buffer, old in zip(running, before, strict=True):
        buffer.copy_(torch.where(student.finite.flag > 0, old, buffer))
    if student.ema:
        student.ema.update(student.model, step + 1)
    return mean, norm

"""What watches over a run: numbers that are not finite, losses that leap, memory that runs out,
signals that ask it to stop.
"""

import math
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from densefeed.system.errors import UserError

ECHO = 1.0  # seconds
# SIGUSR1: what Slurm sends with --signal=USR1@120
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class NonFiniteGuard:
    """Keeps an update whose gradients are not finite from the weights, on the device: nobody waits
    to learn whether it was.

    `update` gives the flag that a fused optimizer takes as `found_inf`: 1 leaves weights and
    moments as they are. Without `skip` the flag stays 1 from the first bad step on, so that weights
    are still those of that step when the log looks, and the step can be done again to find the
    cause.
    """

    def __init__(self, device: torch.device, skip: bool) -> None:
        self.skip = skip
        self.flag = torch.zeros((), device=device)
        self.count = torch.zeros((), device=device)  # bad steps so far
        # the first of them
        self.first = torch.full((), math.inf, dtype=torch.float64, device=device)

    def update(self, norm: Tensor, step: int) -> Tensor:
        """The flag of step `step`, whose gradients have the norm `norm`; no wait."""
        bad = (~norm.isfinite()).float()
        self.first = torch.minimum(self.first, torch.where(bad > 0, float(step), math.inf))
        self.count += bad
        self.flag = bad if self.skip else torch.maximum(self.flag, bad)
        return self.flag

    def poll_sync(self) -> tuple[int, int | None]:
        """How many steps were bad since the last look, and the first of them; waits for the
        device.
        """
        count, first = int(self.count), self.first.item()
        if self.skip:
            self.count.zero_()
            self.first.fill_(math.inf)
        return count, None if math.isinf(first) else int(first)


def first_not_finite(model: nn.Module, loss_of: Callable[[], Tensor]) -> str | None:
    """Which tensor of a step is the first that is not finite, in the order of computation; None if
    all are. Waits.

    Looks at weights, then at what each module without parts gives, then at the loss, then at the
    gradients from the loss back.
    """
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f"the weight {name}"
    found: list[str] = []

    def look(name: str) -> Callable:
        def hook(module: nn.Module, inputs: tuple, output: object) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            if not found and any(isinstance(t, Tensor) and not t.isfinite().all() for t in tensors):
                found.append(f"the output of {name} ({type(module).__name__})")

        return hook

    handles = [
        m.register_forward_hook(look(name))
        for name, m in model.named_modules()
        if not any(m.children())
    ]
    try:
        model.zero_grad(set_to_none=True)
        loss = loss_of()
        if found:
            return found[0]
        if not loss.isfinite().all():
            return "the loss"
        loss.backward()
        for name, parameter in reversed(list(model.named_parameters())):
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                return f"the gradient of {name}"
        return None
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)


class LossSpikes:
    """Detects loss spikes: a loss above `factor` times the median of the last `window` intervals.

    At least five intervals are needed.
    """

    def __init__(self, factor: float = 1.5, window: int = 21) -> None:
        self.factor, self.last = factor, deque[float](maxlen=window)

    def describe(self, loss: float) -> str:
        """Describe the spike, if the mean loss of another interval is one; else return "".

        The loss of an interval whose steps were all skipped is NaN.
        """
        if math.isnan(loss):
            return ""
        usual = statistics.median(self.last) if len(self.last) >= 5 else math.inf
        self.last.append(loss)
        if loss <= self.factor * usual:
            return ""
        return f"loss spike: {loss:.3f}; the median of the last intervals is {usual:.3f}"


@contextmanager
def signal_handler() -> Iterator[Callable[[], str]]:
    """Asks for the name of the signal that wants the run to stop, empty if none. A second one of it
    acts as ever.

    Unless it comes within ECHO seconds: Slurm signals every process of a job, torchrun among them,
    which passes it on.
    """
    came: list[str] = []
    before, when = {}, {}

    def handler(number: int, _frame: object) -> None:
        came.append(signal.Signals(number).name)
        if time.monotonic() - when.setdefault(number, time.monotonic()) > ECHO:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    for number in STOPPING:
        before[number] = signal.signal(number, handler)
    try:
        yield lambda: came[0] if came else ""
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def explain_oom(images: int, where: str) -> Iterator[None]:
    """Turns a failure to get memory into a sentence that says which knob to turn; `images` go
    through the network at once.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not (
            isinstance(error, torch.OutOfMemoryError | MemoryError)
            or "can't allocate memory" in str(error)
        ):
            raise
        raise UserError(
            f"{where}: memory ran out with {images} images at once; give --microbatch {max(2, images // 4 * 2)} (same batch, same "
            "learning rate, more passes), or try --grad-checkpointing, --fused-head always, --no-labels-on-device, --ema 0"
        ) from error

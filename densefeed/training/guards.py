"""Guards of a run: non-finite gradients, loss spikes, out-of-memory errors and stop signals."""

import math
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from densefeed.system.errors import UserError, is_out_of_memory

# Seconds in which a repeated signal counts as the same one.
ECHO = 1.0
# Slurm sends SIGUSR1 with --signal=USR1@120.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class NonFiniteGuard:
    """Keeps non-finite gradients away from the weights, without a host sync.

    `update` returns the flag that a fused optimizer takes as `found_inf`: at 1 it leaves weights
    and moments unchanged. Without `skip` the flag stays 1 from the first bad step on. The weights
    are then still those of that step at the next `poll_sync`, and the step can be repeated to find
    the cause.
    """

    def __init__(self, device: torch.device, skip: bool) -> None:
        self.skip = skip
        # Changed in place, because a CUDA graph reads and writes where they were when it was made.
        self.flag = torch.zeros((), device=device)
        # Bad steps so far.
        self.count = torch.zeros((), device=device)
        # This step and the first bad one. float64 holds every step, float32 only those up to 2^24.
        self.step = torch.zeros((), dtype=torch.float64, device=device)
        self.first = torch.full_like(self.step, math.inf)

    def begin(self, step: int) -> None:
        """Note the number of the step that is about to begin."""
        self.step.fill_(step)

    def update(self, norm: Tensor) -> Tensor:
        """Return the flag of this step, whose gradient norm is `norm`, without waiting."""
        # Inf - inf and NaN - NaN are NaN. With isfinite and a torch.where of numbers this would be
        # 14 launches on a GPU, not 6.
        bad = (norm - norm).ne(0)
        torch.where(bad, torch.minimum(self.first, self.step), self.first, out=self.first)
        self.count += bad
        if self.skip:
            self.flag.copy_(bad)
        else:
            self.flag.masked_fill_(bad, 1)
        return self.flag

    def poll_sync(self) -> tuple[int, int | None]:
        """Return the number of bad steps and the first of them; waits for the device.

        With `skip` they are counted since the last call, otherwise since the start.
        """
        count, first = int(self.count), self.first.item()
        if self.skip:
            self.count.zero_()
            self.first.fill_(math.inf)
        return count, None if math.isinf(first) else int(first)


def find_first_nonfinite(model: nn.Module, compute_loss: Callable[[], Tensor]) -> str | None:
    """Find the first tensor of a step that is not finite, in order of computation; waits.

    Checks the weights, the outputs of modules without children, the loss, then the gradients from
    the loss back. What is compiled runs in eager mode. Returns None if all are finite.
    """
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f"the weight {name}"
    found = []

    def check_output(name: str) -> Callable:
        def hook(module: nn.Module, inputs: tuple, output: object) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            if not found and any(isinstance(t, Tensor) and not t.isfinite().all() for t in tensors):
                found.append(f"the output of {name} ({type(module).__name__})")

        return hook

    handles = [
        module.register_forward_hook(check_output(name))
        for name, module in model.named_modules()
        if not any(module.children())
    ]
    try:
        model.zero_grad(set_to_none=True)
        # Compiled code ignores hooks that were set after its compilation.
        with torch.compiler.set_stance("force_eager"):
            loss = compute_loss()
        if found:
            return found[0]
        if not loss.isfinite().all():
            return "the loss"
        loss.backward()
        # Reversed, because the backward pass begins at the last layers.
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
        self.factor, self.last = factor, deque(maxlen=window)

    def describe(self, loss: float) -> str:
        """Describe the spike, if the mean loss of another interval is one; else return "".

        The loss of an interval whose steps were all skipped is NaN.
        """
        if math.isnan(loss):
            return ""
        # A median, because earlier spikes stay among the last intervals.
        usual = statistics.median(self.last) if len(self.last) >= 5 else math.inf
        self.last.append(loss)
        if loss <= self.factor * usual:
            return ""
        return f"loss spike: {loss:.3f}; the median of the last intervals is {usual:.3f}"


@contextmanager
def signal_handler() -> Iterator[Callable[[], str]]:
    """Catch stop signals; yields a function that returns the name of the first one, or "".

    A second signal of the same kind triggers the previous handler, unless it comes within ECHO
    seconds: Slurm signals every process of a job, and torchrun, which is one of them, passes the
    signal on.
    """
    received, previous, received_at = [], {}, {}

    def handler(number: int, _frame: object) -> None:
        received.append(signal.Signals(number).name)
        if time.monotonic() - received_at.setdefault(number, time.monotonic()) > ECHO:
            # The previous handler of SIGTERM ends the process, of SIGINT raises KeyboardInterrupt.
            signal.signal(number, previous[number])
            signal.raise_signal(number)

    for number in STOPPING:
        previous[number] = signal.signal(number, handler)
    try:
        yield lambda: received[0] if received else ""
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


@contextmanager
def explain_oom(images: int, where: str) -> Iterator[None]:
    """Turn an out-of-memory error into a UserError that names the options to change.

    `images` is the number of images in a forward pass; 0 while the run is set up.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        if not images:
            raise UserError(
                f"{where}: out of memory before the first step; give a smaller --size, --batch or "
                "--model, or fewer --threads"
            ) from error
        # At most half of them, in whole parts, and even: an image and its mixing partner share one.
        parts = [n for n in range(2, images // 2 + 1, 2) if images % n == 0]
        fewer = "a smaller --size or --batch"
        if parts:
            fewer = f"--microbatch {parts[-1]} (same batch and learning rate, more passes)"
        raise UserError(
            f"{where}: out of memory with {images} images per forward pass; give {fewer}, or try "
            "--grad-checkpointing, --no-maps-on-device, --ema 0"
        ) from error

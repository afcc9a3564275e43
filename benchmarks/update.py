"""Time updates of a model's weights, and of their EMA, with the gradients of a step given.

    python -m benchmarks.update
    python -m benchmarks.update --optimizers adamw --threads 2 --json update.json

`NAME` is the update alone. `NAME, EMA` is followed by that of the EMA as in train.py, in a second
pass over the weights. `NAME, EMA in parts` does both for a few tensors, which stay in the cache,
before those of the next: only where the optimizer is fused. `NAME, timm's products` is Muon or a
relative of it that orthogonalizes by timm's function in float32; ours may multiply with another
library (optimizers.py). All have the same random weights and gradients.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import timm
import torch
from timm.optim import muon
from torch import Tensor, nn

from benchmarks.harness import (
    Count,
    Output,
    check_threads,
    command,
    device_name,
    environment,
    report,
    take_turns,
    use_cores,
)
from densefeed.system.devices import choose_device, synchronize
from densefeed.system.errors import UserError
from densefeed.training.ema import WeightAverage
from densefeed.training.optimizers import (
    ORTHOGONALIZE,
    build_optimizer,
    check_optimizer,
    is_fused,
    orthogonalize,
)

RATE, WEIGHT_DECAY, DECAY = 1e-4, 0.05, 0.9999
EMA, PARTS, TIMM = ", EMA", ", EMA in parts", ", timm's products"


@dataclass(frozen=True, kw_only=True)
class UpdateBenchmark(Output):
    """Options of this benchmark."""

    model: str = "lvvit_s"  # any model of timm or of this package
    optimizers: tuple[str, ...] = ("adamw", "muon")  # timm's names
    tensors: Count = 4  # updated together, their EMA too, in the form in parts
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if available, else cpu
    threads: Count = 1  # of torch on a CPU, each on its own core
    updates: Count = 2  # of each contestant in a round
    rounds: Count = 15  # measured rounds, after one for warm-up


def main(benchmark: UpdateBenchmark) -> dict:
    """Measure, print and record; return the document that --json writes."""
    device, facts = choose_device(benchmark.device), environment()
    check_threads(benchmark.threads)
    if not benchmark.optimizers:
        raise UserError("--optimizers is empty; give one or more of timm's names, such as adamw")
    for name in benchmark.optimizers:
        check_optimizer(name)
    if not timm.is_model(benchmark.model):
        raise UserError(f"--model {benchmark.model} is unknown to timm; give a name it lists")
    torch.manual_seed(0)
    model = with_gradients(timm.create_model(benchmark.model).to(device))
    works = {}
    for name in benchmark.optimizers:
        works |= contestants(name, model, benchmark.tensors)

    def turn(update: Callable[[], None]) -> Callable[[int], int]:
        def run(_: int) -> int:
            for _ in range(benchmark.updates):
                update()
            synchronize(device)
            return benchmark.updates

        return run

    def choose(key: str) -> None:
        # The one that timm's Muon and its relatives call.
        muon.zeropower_via_newtonschulz = in_float32 if key.endswith(TIMM) else orthogonalize

    with use_cores(benchmark.threads):
        rates = take_turns(
            {key: turn(work) for key, work in works.items()}, benchmark.rounds, choose
        )
    found = {name: [1000 / rate for rate in values] for name, values in rates.items()}
    pairs = [(n + PARTS, n + EMA) for n in benchmark.optimizers if n + PARTS in found]
    pairs += [(n, n + TIMM) for n in benchmark.optimizers if n + TIMM in found]
    data = f"{benchmark.model}, {sum(p.numel() for p in model.parameters()):,} parameters; "
    return report(
        benchmark,
        found,
        "ms/update",
        pairs,
        facts,
        data + device_name(device),
        benchmark.threads,
        what="time",
        prefix="update ",
    )


def with_gradients(model: nn.Module) -> nn.Module:
    """Give every parameter of a model a random gradient; return the model."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def contestants(name: str, model: nn.Module, tensors: int) -> dict[str, Callable[[], None]]:
    """Return functions that each update a model of their own, equal to `model`, once."""
    alone = Updated(name, model)
    updates = {name: alone.optimizer.step, name + EMA: Updated(name, model).in_two_passes}
    # These have no state that tensors share.
    if is_fused(alone.optimizer):
        updates[name + PARTS] = Updated(name, model, tensors).in_parts
    if isinstance(alone.optimizer, muon.Muon):
        updates[name + TIMM] = Updated(name, model).optimizer.step
    return updates


def in_float32(*arguments: Any, **options: Any) -> Tensor:
    """Orthogonalize as timm does, in float32."""
    return ORTHOGONALIZE(*arguments, **options | {"dtype": torch.float32})


class Updated:
    """A copy of `model` with gradients, an optimizer and an EMA."""

    def __init__(self, name: str, model: nn.Module, tensors: int = 0) -> None:
        self.model, self.numbers = deepcopy(model), count(1)
        # A copy of a parameter has no gradient.
        for own, given in zip(self.model.parameters(), model.parameters(), strict=True):
            own.grad = given.grad.clone()
        self.optimizer = build_optimizer(name, self.model, RATE, WEIGHT_DECAY)
        self.ema = WeightAverage(self.model, DECAY)
        if tensors:
            self.parts = list(self._divide(tensors))

    def in_two_passes(self) -> None:
        """Update all weights, then all of the EMA."""
        self.optimizer.step()
        self.ema.update(self.model, next(self.numbers))

    @torch.no_grad()
    def in_parts(self) -> None:
        """Update the weights and the EMA of a part before those of the next."""
        decay = self.ema.get_decay(next(self.numbers))
        for optimizer, own, weights in self.parts:
            optimizer.step()
            torch._foreach_lerp_(own, weights, weight=1 - decay)

    def _divide(self, tensors: int) -> Iterator[tuple]:
        averages = dict(zip(self.model.parameters(), self.ema.module.parameters(), strict=True))
        for group in self.optimizer.param_groups:
            for first in range(0, len(group["params"]), tensors):
                weights = group["params"][first : first + tensors]
                part = type(self.optimizer)([group | {"params": weights}])
                yield part, [averages[weight] for weight in weights], weights


if __name__ == "__main__":
    command(main, UpdateBenchmark, __doc__)

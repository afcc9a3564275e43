"""Time updates of a model's weights, and of their EMA, with the gradients of a step given.

    python -m benchmarks.update
    python -m benchmarks.update --optimizers adamw --threads 2 --json update.json

`NAME` is the update alone. `NAME, EMA` is followed by that of the EMA as in train.py, in a second
pass over the weights. `NAME, EMA in parts` updates a few tensors and their EMA before the next
ones, which a cache may still hold then: only with fused optimizers, and without the EMA of buffers,
387 numbers of LV-ViT-S. All have the same random weights and gradients.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from typing import Literal

import timm
import torch
from torch import nn

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
from densefeed.system.malloc import tune_malloc
from densefeed.training.ema import WeightAverage
from densefeed.training.optimizers import build_optimizer, check_optimizer, is_fused

RATE, WEIGHT_DECAY, DECAY = 1e-4, 0.05, 0.9999
EMA, PARTS = ", EMA", ", EMA in parts"


@dataclass(frozen=True, kw_only=True)
class UpdateBenchmark(Output):
    """Options of this benchmark."""

    model: str = "lvvit_s"  # any model of timm or of this package
    optimizers: tuple[str, ...] = ("adamw", "muon")  # timm's names
    tensors: Count = 4  # of a part of `EMA in parts`
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
        check_optimizer(name, "--optimizers")
    if not timm.is_model(benchmark.model):
        raise UserError(f"--model {benchmark.model} is unknown to timm; give a name it lists")
    torch.manual_seed(0)
    model = add_gradients(timm.create_model(benchmark.model).to(device))
    works = {}
    for name in benchmark.optimizers:
        works |= build_contestants(name, model, benchmark.tensors)
    if device.type == "cpu":
        # As train.py does.
        tune_malloc()

    def turn(update: Callable[[], None]) -> Callable[[int], int]:
        def run(_: int) -> int:
            for _ in range(benchmark.updates):
                update()
            synchronize(device)
            return benchmark.updates

        return run

    with use_cores(benchmark.threads):
        turns = {key: turn(work) for key, work in works.items()}
        rates = take_turns(turns, benchmark.rounds)
    found = {name: [1000 / rate for rate in values] for name, values in rates.items()}
    names = dict.fromkeys(benchmark.optimizers)
    pairs = [(name + PARTS, name + EMA) for name in names if name + PARTS in found]
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


def add_gradients(model: nn.Module) -> nn.Module:
    """Give every parameter of a model a random gradient; return the model."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def build_contestants(name: str, model: nn.Module, tensors: int) -> dict[str, Callable[[], None]]:
    """Return functions that each update a model of their own, equal to `model`, once."""
    alone = ModelUpdate(name, model)
    updates = {
        name: alone.optimizer.step,
        name + EMA: ModelUpdate(name, model).update_in_two_passes,
    }
    # A fused optimizer has no state that tensors share, so parts give the same weights.
    if is_fused(alone.optimizer):
        updates[name + PARTS] = ModelUpdate(name, model, tensors).update_in_parts
    return updates


class ModelUpdate:
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

    def update_in_two_passes(self) -> None:
        """Update all weights, then all of the EMA."""
        self.optimizer.step()
        self.ema.update(self.model, next(self.numbers))

    @torch.no_grad()
    def update_in_parts(self) -> None:
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

"""CUDA graphs imitated on a CPU: a tape records the operations of a capture, and replays them.

As with a graph, nothing that was recorded has an effect until it is replayed, a replay reads and
writes the same memory, and Python does not run again. Unlike a graph a capture does compute, so
what it wrote is put back.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import densefeed.train as training
from densefeed.objectives.base import step_loss
from densefeed.training import captured_update, setup


def tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Tape(TorchDispatchMode):
    """Imitates CUDAGraph, and as a context manager torch.cuda.graph."""

    replayed = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.before = [], {}

    def __enter__(self) -> "Tape":
        self.random = torch.get_rng_state()
        return super().__enter__()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        self.keep(function, arguments, options)
        results = function(*arguments, **options)
        self.calls.append((function, arguments, options, results))
        return results

    def keep(self, function, arguments, options) -> None:
        """Copy the memory that the operation overwrites, the first time."""
        for number, place in enumerate(function._schema.arguments):
            # batch_norm updates its running statistics and does not declare it.
            undeclared = place.name.startswith("running_")
            written = place.alias_info is not None and place.alias_info.is_write
            if not (written or undeclared):
                continue
            given = arguments[number] if number < len(arguments) else options.get(place.name)
            for tensor in tensors(given):
                memory = tensor.untyped_storage()
                self.before.setdefault(memory.data_ptr(), (memory, memory.clone()))

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        for memory, before in self.before.values():
            memory.copy_(before)
        torch.set_rng_state(self.random)

    @torch.no_grad()
    def replay(self) -> None:
        Tape.replayed += 1
        for function, arguments, options, results in self.calls:
            again = tensors(function(*arguments, **options))
            for old, new in zip(tensors(results), again, strict=True):
                # Views, and what was written in place, are there already.
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def pool(self) -> None:
        return None


# Patches (module, name, value) with which `--compile graph` replays tapes on a CPU, not compiled.
PATCHES = (
    (torch.cuda, "CUDAGraph", Tape),
    (torch.cuda, "graph", lambda tape, **_: tape),
    *(
        (module, "can_capture", lambda mode, _: mode == "graph")
        for module in (captured_update, setup)
    ),
    (training, "compile_step", lambda *_: step_loss),
)

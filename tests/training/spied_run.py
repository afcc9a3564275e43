"""A training of one or several ranks that also writes which rows every step trained on.

    torchrun --nproc-per-node 2 spied_run.py SPIED CONFIG.json [STEPS]

SPIED.RANK gets a line a step, `{"step": 0, "rows": [[index, repeat, view, weight], ...]}`; with
STEPS the run is asked to stop after so many, on its last rank alone. The config is what
`Config.to_dict` returned.
"""

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import timm
import torch
from torch import nn

import densefeed.train as training
from densefeed.pipelines.batch import Batch
from densefeed.training.config import Config

RANK, SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


@timm.models.register_model
def lvvit_groupnorm(pretrained: bool = False, **kwargs) -> nn.Module:
    """lvvit_micro without batch statistics."""
    model = timm.create_model("lvvit_micro", **kwargs)
    for number, layer in enumerate(model.stem):
        if isinstance(layer, nn.BatchNorm2d):
            model.stem[number] = nn.GroupNorm(1, layer.num_features)
    return model


def spied(path: Path) -> tuple[tuple, ...]:
    """What to put where, (module, name, function), to have the rows of each step written down
    before it is done.
    """
    cut, update, rows = Batch.split, training.update, []

    def split(batch, count):
        fields = batch.index, batch.repeat, batch.view.flatten(1), batch.weight
        rows[:] = zip(*(field.tolist() for field in fields), strict=True)
        return cut(batch, count)

    def written(student, ranks, step, losses):
        with open(f"{path}.{RANK}", "a") as file:
            file.write(json.dumps({"step": step, "rows": rows}) + "\n")
        return update(student, ranks, step, losses)

    return (Batch, "split", split), (training, "update", written)


def stopped_after(steps: int):
    """In place of `stopping`: the last rank alone is asked to stop."""

    @contextmanager
    def stopping():
        asks = iter(range(1, 10**9))
        yield lambda: "SIGTERM" if next(asks) >= steps and RANK == SIZE - 1 else ""

    return stopping


if __name__ == "__main__":
    torch.set_num_threads(1)
    for module, name, function in spied(Path(sys.argv[1])):
        setattr(module, name, function)
    if len(sys.argv) > 3:
        training.signal_handler = stopped_after(int(sys.argv[3]))
    training.run_command(
        lambda: training.train(Config.from_dict(json.loads(Path(sys.argv[2]).read_text())))
    )

"""Train on one or several ranks and record the rows of every step.

    torchrun --nproc-per-node 2 spied_run.py SPIED CONFIG.json [STEPS]

SPIED.RANK gets one line per step, `{"step": 0, "rows": [[index, repeat, view, weight], ...]}`. With
STEPS the last rank alone receives a stop signal after that number of steps. The config is the
result of `Config.to_dict`.
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
from tests.training.tape import PATCHES

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
    """Return patches (module, name, function) that record the rows of each step."""
    cut, update, rows = Batch.split, training.update, []

    def split(batch, count):
        fields = batch.index, batch.repeat, batch.view.flatten(1), batch.weight
        rows[:] = zip(*(field.tolist() for field in fields), strict=True)
        return cut(batch, count)

    def record(student, ranks, step, losses):
        with open(f"{path}.{RANK}", "a") as file:
            file.write(json.dumps({"step": step, "rows": rows}) + "\n")
        return update(student, ranks, step, losses)

    return (Batch, "split", split), (training, "update", record)


def stopped_after(steps: int):
    """Replace `signal_handler`: the last rank alone receives a signal after `steps` steps."""

    @contextmanager
    def handler():
        polls = iter(range(1, 10**9))
        yield lambda: "SIGTERM" if next(polls) >= steps and RANK == SIZE - 1 else ""

    return handler


if __name__ == "__main__":
    torch.set_num_threads(1)
    config = Config.from_dict(json.loads(Path(sys.argv[2]).read_text()))
    patches = PATCHES if config.run.compile == "graph" else ()
    for module, name, function in (*spied(Path(sys.argv[1])), *patches):
        setattr(module, name, function)
    if len(sys.argv) > 3:
        training.signal_handler = stopped_after(int(sys.argv[3]))
    training.errors.run(lambda: training.train(config))

"""Train on one or several ranks with torch.compile, without generating code.

    torchrun --nproc-per-node 2 compiled_run.py CONFIG.json ...

Each config is the result of `Config.to_dict`. OUT.RANK.json, beside the folder OUT of a run, gets
the number of its graphs and the reasons of their breaks. A break under `--compile blocks` is an
error.
"""

import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

import densefeed.train as training
from densefeed.training.config import Config
from densefeed.training.ranks import Ranks, init_distributed


def run(config: Config, ranks: Ranks) -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    # The graphs run in eager mode: generating code takes a minute.
    strict, compile = config.run.compile == "blocks", torch.compile
    torch.compile = partial(compile, backend="eager", fullgraph=strict)
    try:
        training.train(config)
    finally:
        torch.compile = compile
    found = {"graphs": counters["stats"]["unique_graphs"], "breaks": [*counters["graph_break"]]}
    Path(f"{config.run.out}.{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with init_distributed("cpu") as ranks:
        # Joining a second group of these processes can find addresses of the first.
        training.init_distributed = lambda device: nullcontext(ranks)
        for file in sys.argv[1:]:
            run(Config.from_dict(json.loads(Path(file).read_text())), ranks)

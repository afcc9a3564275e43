"""Print what a training step costs the host: launches, copies, waits and processor time.

    python -m tests.pretended.steps lvvit_s_224_token_label
    python -m tests.pretended.steps lvvit_s_224_token_label --compile graph
    python -m tests.pretended.steps deit_s_224_token_label mixtoken=False --kernels 20 --where

The step runs on the pretended CUDA runtime (runtime.cpp), so numbers of launches, copies and waits
are exact, and kernels take no time. `| c++filt -p` makes their names readable. Convolutions count
as one launch. Times are of the processor, all threads together; what the real CUDA driver takes for
a launch, a few microseconds, is missing. `batch` is what comes before the model: the copy to the
device and the augmentation.
"""

import argparse
import gc
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import build

CLASSES, MAP_SIDE, TOP_K, PALETTE = 1000, 18, 5, 40
# Steps before the first that is counted. The fourth is captured, and the fifth allocates what the
# capture holds.
WARM_UP = 6
SECONDS = 1500


class ConstantLoader:
    """Yields one batch again and again, as a loader does: in pinned memory.

    Large fields are pinned once, because a loader decodes into pinned memory, small ones each time.
    """

    prepares = True

    def __init__(self, config: Any, images: int, masks: bool) -> None:
        import torch

        from densefeed.pipelines.batch import Batch, ScoreMapSpec
        from densefeed.pipelines.plan import EpochPlan

        size, batches = config.data.size, 10_000
        self.plan = EpochPlan(
            num_samples=images * batches, batch=images, seed=0, mode="train", sizes=((0, size),)
        )
        self.score_maps = ScoreMapSpec(MAP_SIDE, TOP_K, CLASSES, "tail", PALETTE, 0.5)
        cells = (images, MAP_SIDE, MAP_SIDE)
        self.large = {
            "image": torch.zeros(images, size, size, 3, dtype=torch.uint8),
            "map_logit": torch.zeros(*cells, TOP_K, dtype=torch.float16),
            "map_class": torch.zeros(*cells, TOP_K, dtype=torch.uint16),
            "map_lse": torch.zeros(cells, dtype=torch.float16),
            "window": torch.tensor([[0.0, 0, 1, 1]]).repeat(images, 1),
        }
        if masks:
            self.large["mask"] = torch.zeros(images, size, size, dtype=torch.int16)
        self.large = {name: tensor.pin_memory() for name, tensor in self.large.items()}
        small = {
            "label": torch.zeros(images, dtype=torch.int64),
            "view": torch.eye(2, 3).repeat(images, 1, 1),
            "shown": torch.tensor([[0.0, 0, 1, 1]]).repeat(images, 1),
            "index": torch.arange(images),
            "repeat": torch.zeros(images, dtype=torch.int64),
            "weight": torch.ones(images),
        }
        self.batch = Batch(**self.large, **small, axis_aligned=True)

    def batches(self, epoch: int, start: int = 0, prepare: object = None) -> Iterator[Any]:
        for step in range(start, self.plan.batches):
            pinned = self.batch.map_tensors(lambda t: t if t.is_pinned() else t.pin_memory())
            yield pinned._replace(epoch=epoch, step=step)


class Steps:
    """The steps of a recipe as train.py does them, each in two halves.

    `next_batch` copies a batch and augments it; `train` computes losses and updates the weights.
    """

    def __init__(self, recipe: str, images: int, **options: object) -> None:
        import torch

        from densefeed.objectives import build_objective
        from densefeed.recipes import RECIPES
        from densefeed.system.devices import choose_device
        from densefeed.system.options import with_options
        from densefeed.system.precision import autocast_dtype
        from densefeed.training.build import build_model
        from densefeed.training.captured_update import choose_update
        from densefeed.training.monitor import TrainMonitor
        from densefeed.training.ranks import Ranks
        from densefeed.training.setup import build_trainable

        from ..runs import step_for

        config = RECIPES[recipe]()
        config = with_options(config, **{"batch": images} | options)
        if not config.optim.microbatch:
            config = replace(config, optim=replace(config.optim, microbatch=config.optim.batch))
        device = choose_device(config.run.device if config.run.device != "auto" else "cuda")
        ranks, objective = Ranks(0, 1, device), build_objective(config.setting)
        loader = ConstantLoader(config, config.optim.batch, objective.needs_masks)
        model, _ = build_model(config.model, config.data, objective, CLASSES)
        sections = config.model, config.optim, config.run
        self.student = build_trainable(*sections, objective, model, ranks)
        trainable, nothing = self.student.trainable.train(), torch.zeros(2, dtype=torch.float64)
        dtype = autocast_dtype(config.run.precision, device)
        self.step = step_for(config, loader, trainable, dtype)
        # Nothing is computed on this device, so the values of score maps are none.
        self.step.check_sync = lambda batch: None
        self.monitor = TrainMonitor(self.student, self.step, ranks, config.run.out, nothing, 0)
        self.update = choose_update(config.run.compile, ranks)
        self.config, self.ranks, self.done = config, ranks, 0
        self._batches = self.step.batches(0)

    def next_batch(self) -> None:
        self._batch = next(self._batches)

    def train(self) -> None:
        from densefeed.training.schedule import learning_rate

        batches = self.step.loader.plan.batches
        self.student.set_rate(learning_rate(self.config.optim, self.done, batches))
        losses = self.step.losses(self.student.network, self._batch)
        loss, _ = self.update(self.student, self.ranks, self.done, losses)
        self.monitor.add(loss)
        self.done += 1

    @property
    def halves(self) -> dict[str, Callable[[], None]]:
        return {"batch": self.next_batch, "step": self.train}


def count(steps: Steps) -> dict[str, Any]:
    """Return what the first steps do, and then the two halves of one, as counting.Seen."""
    from .counting import watch

    found = {}
    with watch() as found["first"]:
        for _ in range(WARM_UP):
            steps.next_batch()
            steps.train()
    for name, half in steps.halves.items():
        with watch() as found[name]:
            half()
    return found


def measure(steps: Steps, rounds: int) -> dict[str, list[float]]:
    """Return the processor time of the halves of each step, in ms, sorted."""
    found = {name: [] for name in steps.halves}
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for name, half in steps.halves.items():
            before = time.process_time()
            half()
            found[name].append(1000 * (time.process_time() - before))
    # Triton prints at exit which of its objects were not freed.
    gc.unfreeze()
    return {name: sorted(times) for name, times in found.items()}


def show(name: str, seen: Any, times: list[float], kernels: int, where: bool) -> None:
    """Print the counts of a half of a step."""
    from .counting import COPIES, PREPARATIONS, WAITS

    copies = {kind: n for kind in COPIES if (n := seen.counts[f"copy {kind}"])}
    calls = {c: n for c in (*WAITS, *PREPARATIONS) if (n := seen.counts[c])}
    print(
        f"{name:6}{seen.counts['launch']:6,} launches, {seen.counts['graph launch']} graphs of "
        f"{seen.counts['kernels in graphs']:,} kernels, {seen.counts['memset']} memsets, "
        f"{seen.counts['copy on the device']} copies on the device, copies {copies}; "
        f"waits and preparations {calls or 'none'}"
    )
    if times:
        print(f"{'':6}{times[0]:6.2f} ms of the processor at least, median {middle(times):.2f}")
    for kernel, launches in seen.kernels.most_common(kernels):
        print(f"{'':6}{launches:6,}  {kernel}")
    if where:
        for (event, stack), n in sorted(seen.events.items()):
            print(f"{'':6}{n:6,}  {event} at {stack}")


def middle(values: list[float]) -> float:
    return values[len(values) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="a recipe of train.py")
    parser.add_argument("options", nargs="*", help="options of the recipe, as NAME=VALUE")
    parser.add_argument("--compile", default="never", help="as of train.py")
    parser.add_argument("--batch", type=int, default=256, help="images of a batch")
    parser.add_argument("--rounds", type=int, default=20, help="steps that are timed")
    parser.add_argument("--kernels", type=int, default=0, help="number of kernels to print")
    parser.add_argument("--where", action="store_true", help="print who copies, waits, allocates")
    given = parser.parse_args()
    if "PRETENDED_RUNTIME" not in os.environ:
        sys.exit(restart())
    from densefeed.system.options import parse_arguments

    options = parse_arguments(given.options, "options") | {"compile": given.compile}
    steps = Steps(given.recipe, given.batch, **options)
    found = count(steps)
    times = measure(steps, given.rounds) if given.rounds else {}
    for name in steps.halves:
        show(name, found[name], times.get(name, []), given.kernels, given.where)


def restart() -> int:
    """Run this command again on the runtime, built in a folder that is kept; return its code."""
    if missing := build.find_missing():
        sys.exit(missing)
    texts = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.cpp"))]
    texts += [Path(build.__file__).read_bytes(), sys.prefix.encode()]
    key = hashlib.sha256(b"".join(texts)).hexdigest()[:12]
    folder = Path(tempfile.gettempdir(), f"densefeed-pretended-{os.getuid()}-{key}")
    words = ["-m", "tests.pretended.steps", *sys.argv[1:]]
    done = build.run(words, build.build(folder), SECONDS)
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    main()

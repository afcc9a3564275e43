"""Trainings and steps on the pretended CUDA runtime, and what they ask of the device.

    python -m tests.pretended.runs JOBS.json RESULTS.json

JOBS.json holds a list of Job, as dictionaries, which are run one after the other in this process;
RESULTS.json gets a dictionary of their results by name. What judges values is replaced, because on
this device they have no meaning.
"""

import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple
from unittest import mock

import torch

import densefeed.train as training
from densefeed.models.kernels.fused_head import chunk_rows, chunked_loss_and_gradients
from densefeed.objectives.losses import sparse_cross_entropy
from densefeed.pipelines.augment.augmentation import Augmentation
from densefeed.pipelines.augment.settings import Augment
from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.targets import SparseTargets, sparse_targets
from densefeed.step import Step
from densefeed.system.errors import UserError
from densefeed.training import evaluation
from densefeed.training.config import Config
from densefeed.training.evaluation import Metrics
from densefeed.training.monitor import TrainMonitor
from densefeed.training.ranks import Ranks
from densefeed.training.setup import Run
from densefeed.training.student import Student

from .counting import PREPARATIONS, WAITS, Seen, watch
from .steps import Steps, count

# Steps of an epoch that are watched.
FIRST, STEADY = 2, 5


class Job(NamedTuple):
    """Something to run and to watch.

    `steady` trains, and watches steps in its second epoch; `whole` trains, and watches all of it;
    `step` watches the first steps of a recipe, and then a batch and a step; `calls` makes each call
    that a steady step must not make; `kernels` launches ours on another device than the current;
    `head` computes a fused head with and without the gradient of its weight.
    """

    name: str
    kind: Literal["steady", "whole", "step", "calls", "kernels", "head"]
    config: dict | None = None  # of Config, for a training
    recipe: str = ""
    images: int = 4  # a batch of the recipe
    options: dict | None = None  # of the recipe


def run_job(job: Job) -> dict:
    """Run a job; return its counts, and where the calls were made that a steady step must not make.

    A training also returns the bytes that PyTorch has reserved after each epoch, and a steady one
    its steps that were watched and what its last evaluation does.
    """
    if job.kind == "calls":
        return make_calls()
    if job.kind == "kernels":
        return launch_elsewhere()
    if job.kind == "head":
        return fuse_head()
    if job.kind == "step":
        halves = count(Steps(job.recipe, job.images, **job.options or {}))
        return {name: summarize(seen) for name, seen in halves.items()}
    config, reserved, evaluated = Config.from_dict(job.config), [], Seen()
    with ExitStack() as stack:
        seen = stack.enter_context(watch()) if job.kind == "whole" else watch_steps(stack)
        stack.enter_context(without_judges())
        evaluate = training.evaluate

        def note(*args: object) -> dict:
            nonlocal evaluated
            with nullcontext(evaluated) if job.kind == "whole" else watch() as evaluated:
                result = evaluate(*args)
            reserved.append(torch.cuda.memory_reserved(config.run.device))
            return result

        stack.enter_context(mock.patch.object(training, "evaluate", note))
        training.train(config)
    found = {"steps": STEADY, "reserved": reserved, "evaluation": summarize(evaluated)}
    return summarize(seen) | found


def make_calls() -> dict:
    """Make calls that wait, allocate or capture, each of which must be found."""
    one, stream = torch.ones(1, device="cuda"), torch.cuda.Stream()
    batch = Batch(*[one] * 7, None, None, None, None)
    calls = {
        "item": one.item,
        "synchronize": torch.cuda.synchronize,
        "event": stream.record_event().synchronize,
        "allocation": lambda: torch.empty(2**28, device="cuda"),
        "pinned allocation": lambda: torch.empty(2**20, pin_memory=True),
        "large copy": lambda: torch.empty(2**20).to("cuda", non_blocking=True),
        "mask": lambda: one[one > 0],
        "capture": partial(capture, one),
        "batch to the host": lambda: batch.to("cpu"),
    }
    found = {}
    for name, call in calls.items():
        with watch() as seen:
            call()
        found[name] = summarize(seen)["calls"]
    return found


def launch_elsewhere() -> dict:
    """Augment images, make targets and a loss on the second device, as in a loop of one's own."""
    plan = EpochPlan(num_samples=8, batch=8, seed=0, mode="train", sizes=((0, 32),))
    options = Augment(rand_augment="rand-m9-p1-n2", erase_probability=1.0)
    augmentation = Augmentation(plan, options, (0.5,) * 3, (0.5,) * 3).to("cuda:1")
    index, repeat = torch.arange(8), torch.zeros(8, dtype=torch.int64)
    choice = augmentation.choose(0, index.numpy(), repeat.numpy(), 32, 32)
    fields = torch.zeros(8, 32, 32, 3, dtype=torch.uint8), index, torch.zeros(8, 2, 3)
    fields += torch.zeros(8, 4), index, repeat, torch.ones(8)
    maps = torch.zeros(8, 6, 6, 2).half(), torch.zeros(8, 6, 6, 2, dtype=torch.uint16)
    maps += torch.zeros(8, 6, 6).half(), torch.tensor([[0.0, 0, 1, 1]] * 8)
    batch = Batch(*fields, *maps).to("cuda:1")
    logits = torch.zeros(8, 4, 10, device="cuda:1")
    palette, ones = index[:, None].to("cuda:1"), torch.ones(8, 4, device="cuda:1")
    with watch() as seen:
        augmentation(batch, choice)
        sparse_targets(batch, ScoreMapSpec(6, 2, 10, "tail", 10, 1.0), 2)
        targets = SparseTargets(palette, ones[..., None], ones, ones, ones)
        sparse_cross_entropy(logits, targets)
    return summarize(seen)


def fuse_head() -> dict:
    """Return the chunks of a fused head in bfloat16, and its launches by what it computes."""
    N, T, D, K, M = 8, 196, 64, 4096, 5
    empty = partial(torch.zeros, device="cuda")
    inputs = empty(N, T, D, dtype=torch.bfloat16), empty(K, D), empty(K)
    targets = empty(N, M, dtype=torch.int64), empty(N, T, M), *[empty(N, T)] * 3
    rows = chunk_rows(N * T, K, torch.bfloat16, inputs[0].device)
    found = {"chunks": -(-N * T // rows)}
    for name, weight_wanted in (("without", False), ("with", True)):
        with watch() as seen:
            chunked_loss_and_gradients(*inputs, *targets, torch.bfloat16, True, weight_wanted, True)
        found[name] = seen.counts["launch"]
    return found


def capture(tensor: torch.Tensor) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        tensor.add(1)


def summarize(seen: Seen) -> dict:
    return {"counts": seen.counts, "calls": seen.named((*WAITS, *PREPARATIONS))}


def watch_steps(stack: ExitStack) -> Seen:
    """Watch the steps FIRST to FIRST + STEADY of the second epoch of a training.

    Each ends where the next update begins, so all that happens between two updates is seen.
    """
    seen, window, loaders = Seen(), ExitStack(), []
    choose_update, setup_run = training.choose_update, training.setup_run

    def set_up(*args: object) -> Run:
        run = setup_run(*args)
        loaders.append(run.loader)
        return run

    def choose(*given: object) -> Callable:
        update = choose_update(*given)

        def watched(student: Student, ranks: Ranks, step: int, losses: list) -> tuple:
            at = step - len(loaders[0])
            if at == FIRST:
                window.enter_context(watch(seen))
            if at == FIRST + STEADY:
                window.close()
            return update(student, ranks, step, losses)

        return watched

    stack.push(window)
    stack.enter_context(mock.patch.object(training, "setup_run", set_up))
    stack.enter_context(mock.patch.object(training, "choose_update", choose))
    return seen


@contextmanager
def without_judges() -> Iterator[None]:
    """Replace what raises an error because of values; it reads them all the same."""
    mean_loss_sync = TrainMonitor.mean_loss_sync

    def mean_loss(monitor: TrainMonitor, step: int) -> float:
        with suppress(UserError):
            mean_loss_sync(monitor, step)
        return 1.0

    def mean_metrics(sums: torch.Tensor) -> Metrics:
        sums.tolist()
        return Metrics(top1=0.5, top5=0.5, loss=1.0, images=1)

    with (
        mock.patch.object(TrainMonitor, "mean_loss_sync", mean_loss),
        mock.patch.object(evaluation, "mean_metrics_sync", mean_metrics),
        mock.patch.object(Step, "check_sync", return_value=None),
    ):
        yield


def main() -> None:
    jobs, results = json.loads(Path(sys.argv[1]).read_text()), {}
    for fields in jobs:
        job = Job(**fields)
        # Free memory of the jobs before would hide that a job takes more and more.
        gc.collect()
        torch.cuda.empty_cache()
        results[job.name] = run_job(job)
        Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()

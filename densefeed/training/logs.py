"""Logging: metrics.jsonl, TensorBoard, Weights & Biases if asked for, and a bar; rank 0 only."""

import json
import math
import os
import platform
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import timm
import torch
from torch.utils.tensorboard import SummaryWriter

from densefeed.system.devices import CORES
from densefeed.system.errors import UserError
from densefeed.system.files import name_errors, open_own, open_regular, read_own, replace_file
from densefeed.system.json_files import is_number, parse_json
from densefeed.system.precision import Precision, choose_precision
from densefeed.system.progress import steps_bar
from densefeed.system.provenance import cpu_model, own_version, write_json
from densefeed.system.terminal import print, warn
from densefeed.training.config import RunOptions
from densefeed.training.ranks import Ranks
from densefeed.training.setup import Run, import_wandb

Values = dict[str, float]
# Bytes of a line of metrics.jsonl. A training writes about 250.
LONGEST = 2**16
# Metrics by which checkpoints are rated, and their names in messages.
RATED = {"top1": "top-1", "miou": "mIoU", "map_box": "box AP"}
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
# Beyond all numbers of a record, which are float32: larger ones overflow in a page's curves.
MOST = 2.0**128


class RunLog:
    """The log of a run; without arguments, as on other ranks than rank 0, it does nothing.

    Attributes:
        text: what the bar shows beside the steps.
    """

    def __init__(
        self,
        record: Callable[[str, int, float, Values], None] = lambda *_: None,
        show: Callable[[int, str], None] = lambda *_: None,
    ) -> None:
        self._record, self.show_progress, self.text = record, show, ""

    def write(self, kind: str, step: int, epoch: float, values: Values) -> None:
        """Write a record; values that are not finite, which JSON cannot hold, are left out."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._record(kind, step, epoch, finite)

    def advance(self, steps: int) -> None:
        """Move the bar by a number of steps."""
        self.show_progress(steps, self.text)


@contextmanager
def open_log(
    options: RunOptions, config: dict, step: int, steps: int, evaluated: bool = True
) -> Iterator[RunLog]:
    """Open the log of a run that is at `step` of `steps`.

    Records that a resumed run will write again are dropped: later steps and, unless `evaluated`,
    the evaluation at `step`. Raises UserError if Weights & Biases is asked for and not available.
    """
    out, project = options.out, options.wandb
    with ExitStack() as stack:
        wandb_log = start_wandb(out, config, project, stack) if project else None
        truncate_metrics(step, out / "metrics.jsonl", evaluated)
        board = stack.enter_context(open_board(out / "tensorboard", step))
        show = stack.enter_context(steps_bar(f"train {out.name}", steps, step))

        def record(kind: str, step: int, epoch: float, values: Values) -> None:
            line = {"kind": kind, "step": step, "epoch": round(epoch, 4)} | values
            # Closed each time: a killed run keeps every line that it has logged.
            path = out / "metrics.jsonl"
            with name_errors(path), open(open_own(path, APPEND), "a") as metrics:
                metrics.write(json.dumps(line) + "\n")
            named = {f"{kind}/{name}": value for name, value in values.items()}
            with name_errors(out / "tensorboard"):
                for name, value in named.items():
                    board.add_scalar(name, value, step)
            if wandb_log:
                wandb_log({"step": step} | named)

        yield RunLog(record, show)


@contextmanager
def open_board(folder: Path, step: int) -> Iterator[SummaryWriter]:
    """Open TensorBoard's writer. Errors name the folder."""

    def report(failed: threading.ExceptHookArgs) -> None:
        # Its thread fails with the error that the next call of the writer raises.
        if not type(failed.thread).__module__.startswith("tensorboard"):
            hook(failed)

    hook, threading.excepthook = threading.excepthook, report
    try:
        with name_errors(folder):
            # TensorBoard hides the events of later steps, which the run will write again. Those of
            # this step stay, and an evaluation that is repeated is there twice.
            board = SummaryWriter(folder, purge_step=step + 1)
        try:
            yield board
        finally:
            with name_errors(folder):
                board.close()
    finally:
        threading.excepthook = hook


def truncate_metrics(step: int, path: Path, evaluated: bool = True) -> None:
    """Drop the records of what a resumed run will do again."""
    if path.exists():
        with replace_file(path) as part, open(part, "wb") as kept:
            # A line that a kill or a full disk truncated is dropped too.
            for number, line in complete_lines(path):
                try:
                    record = parse_record(line)
                except ValueError as error:
                    warn(f"dropping a damaged line of {path} (line {number:,}: {error})")
                    continue
                at = record["step"]
                if at < step or (at == step and (evaluated or record["kind"] == "train")):
                    kept.write(line)


def complete_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of every line of metrics.jsonl, without one that is incomplete.

    A line of more than LONGEST bytes is yielded in part, which cannot be parsed.
    """
    with open_regular(path) as file:
        for number in count(1):
            line = file.readline(LONGEST)
            # The last line of a run in progress may be incomplete.
            if len(line) < LONGEST and not line.endswith(b"\n"):
                return
            yield number, line
            while len(line) == LONGEST and not line.endswith(b"\n"):
                line = file.readline(LONGEST)


def parse_record(line: bytes) -> dict:
    """Parse a line of metrics.jsonl: its kind, step and epoch, and numbers.

    Raises ValueError with the reason if it is damaged.
    """
    record = parse_json(line)
    if not isinstance(record, dict) or not record.keys() >= {"kind", "step", "epoch"}:
        raise ValueError("it is not an object with kind, step and epoch")
    if type(record["kind"]) is not str or type(record["step"]) is not int or record["step"] < 0:
        raise ValueError("its kind is not a text, or its step not an integer from 0")
    for name in (name for name in record if name != "kind"):
        value = record[name]
        if not is_number(value) or abs(value) >= MOST:
            raise ValueError(f"{name!r} is not a number, or beyond float32")
        if name.startswith((*RATED, "top5")) and not 0 <= value <= 1:
            raise ValueError(f"{name!r} is {value:g}, but a share is from 0 to 1")
    return record


def start_wandb(
    out: Path, config: dict, project: str, stack: ExitStack
) -> Callable[[Values], None]:
    """Start Weights & Biases and return its log function; a resumed run keeps its identity.

    The step is a value like others and the horizontal axis of all: W&B's own count never goes back,
    as a resumed run does. TensorBoard files are not copied: wandb 0.31 waited 10 s for that at the
    end of each run, and copied nothing of short ones.
    """
    wandb = import_wandb()
    identity = out / "wandb-id"
    if not identity.exists():
        with replace_file(identity) as part:
            # Made here, because W&B's package no longer makes identities.
            part.write_text(uuid.uuid4().hex[:8])
    options = {"name": out.name, "id": read_own(identity).decode(), "resume": "allow", "dir": out}
    try:
        run = wandb.init(project=project, config=config, **options)
    except wandb.Error as error:
        raise UserError(
            f"--wandb {project}: {error}; log in with `wandb login`, or set WANDB_MODE=offline"
        ) from error
    stack.callback(run.finish)
    run.define_metric("*", step_metric="step")
    return run.log


# ---------------------------------------------------------------- the header of a run


def describe_environment(precision: Precision, ranks: Ranks) -> dict:
    """Describe the software and hardware environment, which a result depends on."""
    cuda = ranks.device.type == "cuda"
    return {
        "command": sys.argv,
        "densefeed": own_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "device": torch.cuda.get_device_name(ranks.device) if cuda else cpu_model(),
        "ranks": ranks.size,
        "cores": CORES,
        "precision": choose_precision(precision, ranks.device),
    }


def write_run_header(run: Run) -> None:
    """Write config and environment to the run folder, and print a summary of the run."""
    config, out = run.config, run.config.run.out
    write_json(out / "config.json", config.to_dict())
    write_json(out / "environment.json", describe_environment(config.run.precision, run.ranks))
    print(describe_run(run), flush=True)


def describe_run(run: Run) -> str:
    """Summarize a run in one line: model, device, objective, data, length and learning rate."""
    config, ranks, student = run.config, run.ranks, run.student
    count, whole = (
        sum(p.numel() for p in part.parameters()) for part in (student.model, student.trainable)
    )
    optim, extra = config.optim, whole - count
    epochs, steps = optim.total_epochs, len(run.loader)
    beside = f", and {extra:,} that {run.objective.flag} trains beside them," if extra else ""
    others = f" and {ranks.size - 1} more" if ranks.size > 1 else ""
    short = optim.warmup_epochs >= epochs
    plural = "s" * (optim.warmup_epochs != 1)
    warmup = f", not reached in {optim.warmup_epochs:g} epoch{plural} of warm-up" if short else ""
    resumed = f"; continuing at step {run.done}" if run.done else ""
    return (
        f"{run.spec.name}: {count:,} parameters{beside} on {ranks.device}{others}; objective "
        f"{config.objective.name}; {run.described_images}, "
        f"{config.data.described_sizes}; {epochs} epoch{'s' * (epochs > 1)} of {steps} "
        f"step{'s' * (steps > 1)}; "
        f"peak lr {optim.peak_lr:.2g} = {optim.lr:.2g} x {optim.batch} / {optim.lr_batch}"
        f"{warmup}{resumed}"
    )


def describe_accuracy(result: dict, rated: str) -> str:
    """Name the metric `rated` of an evaluation, and that of the EMA, if there is one."""
    average = result.get(f"{rated}_ema")
    ema = f", EMA {100 * average:.1f} %" if average is not None else ""
    return f"{RATED.get(rated, rated)} {100 * result[rated]:.1f} %{ema}"


def describe_result(result: dict, rated: str) -> str:
    """Summarize the result of a run in one line: accuracy, images it was measured on, and time.

    `rated` is the metric that rates it.
    """
    images, unreadable, skipped = (result[name] for name in ("images", "unreadable", "skipped"))
    of = f" of {images + unreadable:,}" if unreadable else ""
    were = "image was" if unreadable == 1 else "images were"
    rest = f"; {unreadable:,} unreadable {were} not evaluated" if unreadable else ""
    samples = "sample" if skipped == 1 else "samples"
    rest += f"; skipped {skipped:,} unreadable training {samples}" if skipped else ""
    accuracy, seconds = describe_accuracy(result, rated), result["seconds"]
    return f"{accuracy} on {images:,}{of} images, {seconds:.0f} s{rest}"

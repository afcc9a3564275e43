"""What a run tells: metrics.jsonl, TensorBoard, Weights & Biases if asked for, and a bar."""

import json
import math
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from densefeed.system.errors import UserError
from densefeed.system.files import replace_file
from densefeed.system.progress import steps_bar

Write = Callable[[str, int, float, dict[str, float]], None]
Advance = Callable[[int, str], None]


def truncate_metrics(step: int, path: Path, evaluated: bool = True) -> None:
    """Drop the records of what a continued run will do again: later steps, and unless `evaluated`
    the accuracy at this one.
    """
    if path.exists():
        # A line that a kill or a full disk cut short ends in no newline; it is forgotten too.
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        told = [(line, record) for line in whole if (record := parse_record(line))]
        kept = [
            line
            for line, r in told
            if r["step"] < step or (r["step"] == step and (evaluated or r["kind"] == "train"))
        ]
        with replace_file(path) as part:
            part.write_text("".join(kept))


def parse_record(line: str) -> dict | None:
    """The record of a line; None, told on stderr, if it is damaged."""
    try:
        record = json.loads(line)
        if isinstance(record, dict) and {"kind", "step"} <= set(record):
            return record
    except ValueError:
        pass
    print(
        f"warning: a line of metrics.jsonl is damaged and left out: {line.strip()[:60]!r}",
        file=sys.stderr,
        flush=True,
    )
    return None


@contextmanager
def logging(
    out: Path,
    step: int,
    steps: int,
    config: dict,
    wandb_project: str,
    speaks: bool,
    evaluated: bool = True,
) -> Iterator[tuple[Write, Advance]]:
    """`write(kind, step, epoch, values)` and `advance(steps, text)` of a run that is at `step` of
    `steps`.

    `evaluated` says whether what is recorded of an evaluation at `step` holds, or it is to be made
    again. Of several ranks one speaks; the others' calls do nothing. UserError if Weights & Biases
    is asked for and cannot be had.
    """
    if not speaks:
        yield lambda kind, step, epoch, values: None, lambda steps, text: None
        return
    with ExitStack() as stack:
        follower = start_wandb(out, config, wandb_project, stack) if wandb_project else None
        truncate_metrics(step, out / "metrics.jsonl", evaluated)
        metrics = stack.enter_context(open(out / "metrics.jsonl", "a"))
        board = stack.enter_context(SummaryWriter(out / "tensorboard", purge_step=step))
        advance = stack.enter_context(steps_bar(f"train {out.name}", steps, step))

        def write(kind: str, step: int, epoch: float, values: dict[str, float]) -> None:
            # JSON has no word for NaN
            values = {name: value for name, value in values.items() if math.isfinite(value)}
            metrics.write(
                json.dumps({"kind": kind, "step": step, "epoch": round(epoch, 4)} | values) + "\n"
            )
            metrics.flush()
            for name, value in values.items():
                board.add_scalar(f"{kind}/{name}", value, step)
            if follower:
                follower(
                    {"step": step} | {f"{kind}/{name}": value for name, value in values.items()}
                )

        yield write, advance


def start_wandb(
    out: Path, config: dict, project: str, stack: ExitStack
) -> Callable[[dict[str, float]], None]:
    """What Weights & Biases is told through; a continued run goes on under its old identity.

    Steps are a value like others and the horizontal axis of all: W&B's own count never goes back,
    as a continued run does. (Its copying of TensorBoard's files waited 10 s at the end of each run,
    and copied nothing of short ones: wandb 0.31.)
    """
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            "--wandb needs the package wandb; `pip install wandb`, or leave it away"
        ) from error
    named = out / "wandb-id"
    if not named.exists():
        with replace_file(named) as part:
            part.write_text(uuid.uuid4().hex[:8])
    try:
        run = wandb.init(
            project=project,
            name=out.name,
            id=named.read_text(),
            resume="allow",
            config=config,
            dir=out,
        )
    except wandb.Error as error:
        raise UserError(
            f"--wandb {project}: {error}; log in with `wandb login`, or set WANDB_MODE=offline"
        ) from error
    stack.callback(run.finish)
    run.define_metric("*", step_metric="step")
    return run.log

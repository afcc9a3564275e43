"""What a run tells: metrics.jsonl, TensorBoard, Weights & Biases if asked for, and a bar."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from ..relabel.files import UserError, replacing
from ..relabel.progress import steps_bar

Write = Callable[[str, int, float, dict[str, float]], None]
Advance = Callable[[int, str], None]


def forget_after(step: int, path: Path) -> None:
    """Drop the records of steps that a continued run will do again."""
    if path.exists():
        # A line that a kill or a full disk cut short ends in no newline; it is forgotten too.
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        kept = [line for line in whole if json.loads(line)["step"] <= step]
        with replacing(path) as part:
            part.write_text("".join(kept))


@contextmanager
def logging(
    out: Path, step: int, steps: int, config: dict, wandb_project: str, speaks: bool
) -> Iterator[tuple[Write, Advance]]:
    """`write(kind, step, epoch, values)` and `advance(steps, text)` of a run that is at `step` of `steps`.

    Of several ranks one speaks; the others' calls do nothing. UserError if Weights & Biases is asked for and not installed.
    """
    if not speaks:
        yield lambda kind, step, epoch, values: None, lambda steps, text: None
        return
    with ExitStack() as stack:
        if wandb_project:  # before TensorBoard begins, whose scalars it takes over
            follow(out, config, wandb_project, stack)
        forget_after(step, out / "metrics.jsonl")
        metrics = stack.enter_context(open(out / "metrics.jsonl", "a"))
        board = stack.enter_context(SummaryWriter(out / "tensorboard", purge_step=step))
        advance = stack.enter_context(steps_bar(f"train {out.name}", steps, step))

        def write(kind: str, step: int, epoch: float, values: dict[str, float]) -> None:
            metrics.write(json.dumps({"kind": kind, "step": step, "epoch": round(epoch, 4)} | values) + "\n")
            metrics.flush()
            for name, value in values.items():
                board.add_scalar(f"{kind}/{name}", value, step)

        yield write, advance


def follow(out: Path, config: dict, project: str, stack: ExitStack) -> None:
    """Have Weights & Biases follow the TensorBoard of this run; a continued run goes on under its old identity."""
    try:
        import wandb
    except ImportError as error:
        raise UserError("--wandb needs the package wandb; `pip install wandb`, or leave it away") from error
    named = out / "wandb-id"
    if not named.exists():
        with replacing(named) as part:
            part.write_text(wandb.util.generate_id())
    run = wandb.init(
        project=project, name=out.name, id=named.read_text(), resume="allow", config=config, dir=out, sync_tensorboard=True
    )
    stack.callback(run.finish)

"""The run folder: one training at a time writes to it, and only where no other files are."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from densefeed.system.errors import BusyError, UserError, explain_os_error
from densefeed.system.files import check_utf8, create_locked, is_own, make_folder, name_errors
from densefeed.system.json_files import read_json
from densefeed.training.config import RunOptions
from densefeed.training.ranks import Ranks
from densefeed.training.run_checkpoints import Checkpoints

CONFIG, LOCK = "config.json", "train.lock"
# Names that a new training writes over, or adds to.
REPLACED = (CONFIG, "environment.json", "metrics.jsonl", "result.json", "best.pt", "tensorboard")
FILES = (*REPLACED[:4], "wandb-id", LOCK)
LINKS = ("last.pt", "best.pt")
FOLDERS = ("checkpoints", "tensorboard")
# Sections of every config.json of train.py.
SECTIONS = {"data", "model", "optim", "run"}


@contextmanager
def lock_run_folder(options: RunOptions, ranks: Ranks) -> Iterator[None]:
    """Make the run folder, and keep other trainings out of it until the end of the context.

    Rank 0 does so for all ranks. A dry run writes nothing and needs no lock. Raises UserError, on
    all ranks, if another training has the folder, or if it holds files that are not of a run.
    """
    with ExitStack() as stack:
        problem = ""
        if ranks.is_first and not options.dry_run:
            try:
                stack.enter_context(own_folder(options.out))
            except UserError as error:
                problem = str(error)
            except OSError as error:
                problem = explain_os_error(error)
        # An error of rank 0 alone would leave the others waiting.
        if problem := ranks.broadcast_sync(problem):
            raise UserError(problem)
        yield


@contextmanager
def own_folder(out: Path) -> Iterator[None]:
    """Lock OUT/train.lock. At the end remove it, and the folder if it is new and still empty."""
    new = [folder for folder in (out, *out.parents) if not folder.exists()]
    check_kinds(out)
    path = out / LOCK
    with ExitStack() as stack:
        for folder in reversed(new):
            make_folder(folder)
            stack.callback(remove_empty, folder)
        # Raises FileExistsError where `out` is a file.
        make_folder(out)
        try:
            # A killed training leaves the file, but not the lock.
            descriptor = create_locked(path)
        except BusyError:
            raise UserError(
                f"another training is writing to {out}; wait for its end, or choose another --out"
            ) from None
        stack.callback(close, descriptor, path)
        # While it is locked, so that nobody can have locked a file that is about to go.
        stack.callback(path.unlink, missing_ok=True)
        check_owner(out)
        yield


def close(descriptor: int, path: Path) -> None:
    """Close the file `path`; an error names it."""
    with name_errors(path):
        os.close(descriptor)


def remove_empty(folder: Path) -> None:
    """Remove a folder if nothing is in it."""
    with suppress(OSError):
        folder.rmdir()


def check_kinds(out: Path) -> None:
    """Raise UserError if something is in the folder that cannot be written or replaced."""
    check_utf8(out, "--out")
    for name in FILES:
        path = out / name
        # Also a link: the log would be written to wherever it leads.
        if os.path.lexists(path) and not is_own(path):
            raise UserError(f"{path} must be a regular file; remove it, or choose another --out")
    for name in (*FOLDERS, *LINKS):
        path = out / name
        # A linked folder would be written to, and old checkpoints deleted, outside of `out`.
        is_folder = path.is_dir() and not path.is_symlink()
        if os.path.lexists(path) and is_folder != (name in FOLDERS):
            kind = "be a folder" if name in FOLDERS else "not be a folder"
            raise UserError(f"{path} must {kind}; remove it, or choose another --out")


def check_owner(out: Path) -> None:
    """Raise UserError if a new training would write over files that no training has written.

    A config.json of train.py shows that they are of a run that ended before its first checkpoint.
    """
    found = [out / name for name in REPLACED if os.path.lexists(out / name)]
    if not found or Checkpoints(out, 1).exist():
        return
    path, remedy = found[0], "remove it, or choose another --out"
    if path.name != CONFIG or not read_json(path, remedy).keys() >= SECTIONS:
        raise UserError(f"{path} is not of a training, and a training would replace it; {remedy}")

"""The run folder: one training at a time, no file of the user is lost, odd files are refused."""

import errno
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import densefeed.train as training
from densefeed.system.errors import UserError
from densefeed.training import setup
from densefeed.training.config import RunOptions
from densefeed.training.ranks import ALONE, Ranks
from densefeed.training.run_folder import lock_run_folder


def lock(out, **options):
    return lock_run_folder(RunOptions(out=out, **options), ALONE)


def test_a_second_training_of_a_folder_is_refused(tmp_path):
    out = tmp_path / "runs" / "a"
    message = rf"^another training is writing to {out}; wait for its end, or choose another --out$"
    with lock(out):
        assert [path.name for path in out.iterdir()] == ["train.lock"]
        for resume in ("auto", "never"):
            with pytest.raises(UserError, match=message), lock(out, resume=resume):
                pass
        with lock(out, dry_run=True), lock(tmp_path / "runs" / "b"):
            pass
    # Nothing was written, so nothing stays.
    assert list(tmp_path.iterdir()) == []


def test_a_killed_training_leaves_no_lock(tmp_path):
    child = os.fork()
    if child == 0:
        try:
            with lock(tmp_path):
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / "train.lock").exists()
    with lock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_every_rank_gets_the_error_of_rank_0(tmp_path):
    """Rank 1 does not look at the folder: it may be on another machine."""

    class Broadcast(Ranks):
        def broadcast_sync(self, value):
            return sent.setdefault("value", value)

    sent = {}
    with lock(tmp_path):
        for rank in (0, 1):
            ranks = Broadcast(rank, 2, ALONE.device)
            with (
                pytest.raises(UserError, match="another training is writing to"),
                lock_run_folder(RunOptions(out=tmp_path), ranks),
            ):
                pass
    sent = {}
    first, second = (Broadcast(rank, 2, ALONE.device) for rank in (0, 1))
    other = RunOptions(out=tmp_path / "b")
    with lock_run_folder(other, first), lock_run_folder(other, second):
        pass


def test_a_training_keeps_the_folder_to_itself_until_its_end(micro, tmp_path, monkeypatch):
    """A second one begins while the first evaluates, which is after its config is written."""
    config, evaluate, refused = micro(tmp_path / "run", epochs=1), training.evaluate_sync, []

    def both(*arguments):
        before = (tmp_path / "run" / "metrics.jsonl").read_text()
        for resume in ("auto", "never"):
            second = replace(config, run=replace(config.run, resume=resume))
            with pytest.raises(UserError, match="another training is writing to"):
                training.train(second)
            refused.append(resume)
        assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
        return evaluate(*arguments)

    monkeypatch.setattr(training, "evaluate_sync", both)
    training.train(config)
    assert set(refused) == {"auto", "never"}
    assert not (tmp_path / "run" / "train.lock").exists()


def test_a_new_training_keeps_files_of_the_user(micro, tmp_path):
    """Also those that end in .part, or whose names begin like checkpoints."""
    out = tmp_path / "run"
    mine = [
        "thesis.tex.part",
        "last.pt.bak.part",
        "checkpoints/step-notes.pt",
        "checkpoints/x.part",
    ]
    mine += ["checkpoints/step-1.pt", "checkpoints/step-00000001.pt.old.part"]
    for name in mine:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    training.train(micro(out, epochs=1))
    assert [(out / name).read_text() for name in mine] == ["mine"] * len(mine)
    (out / "result.json").unlink()
    training.train(micro(out, epochs=1, resume="auto"))
    assert [(out / name).read_text() for name in mine] == ["mine"] * len(mine)


@pytest.mark.parametrize(
    "name", ["config.json", "environment.json", "metrics.jsonl", "result.json", "best.pt"]
)
def test_a_new_training_replaces_only_files_of_a_training(tmp_path, name):
    """A config.json of ours shows that the others are of a run without a checkpoint."""
    (tmp_path / name).write_text('{"architecture": "vit"}')
    with (
        pytest.raises(UserError, match=rf"{name} is not of a training, and a training would repl"),
        lock(tmp_path),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [name]
    sections = {name: {} for name in ("data", "model", "labels", "optim", "run")}
    (tmp_path / "config.json").write_text(json.dumps(sections))
    with lock(tmp_path):
        pass


NAMES = ["config.json", "environment.json", "metrics.jsonl", "result.json", "wandb-id"]
PLANTED = [
    (name, kind) for name in [*NAMES, "train.lock"] for kind in ("pipe", "folder", "nothing")
]
PLANTED += [(name, kind) for name in ("checkpoints", "tensorboard") for kind in ("pipe", "nothing")]
PLANTED += [(name, "folder") for name in ("last.pt", "best.pt")] + [("metrics.jsonl", "device")]
PLANTED += [(name, "link") for name in ("checkpoints", "tensorboard")]
PLANTED += [(".", kind) for kind in ("pipe", "nothing", "file")]


@pytest.mark.parametrize(("name", "kind"), PLANTED)
def test_what_cannot_be_written_is_refused_before_the_first_step(tmp_path, name, kind):
    out = tmp_path / "run"
    path = out / name
    path.parent.mkdir(exist_ok=True) if name != "." else None
    make = {
        "pipe": lambda: os.mkfifo(path),
        "folder": lambda: path.mkdir(),
        "nothing": lambda: path.symlink_to(tmp_path / "elsewhere"),
        # Checkpoints in the linked folder would be deleted.
        "link": lambda: path.symlink_to(tmp_path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "file": lambda: path.write_text(""),
    }
    make[kind]()
    with pytest.raises(UserError, match=rf"{path}( must |: a file stands)"), lock(out):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_missing_wandb_is_refused_before_anything_is_written(micro, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"^--wandb needs the package wandb; run `pip install"):
        training.train(micro(tmp_path / "run", wandb="densefeed"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fields", [dict(), dict(dry_run=True)])
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("not enough memory: you tried")])
def test_out_of_memory_during_set_up_is_one_sentence(micro, tmp_path, monkeypatch, error, fields):
    def fail(*_):
        raise error

    monkeypatch.setattr(setup, "build_model", fail)
    with pytest.raises(UserError, match=r"run: out of memory before the first step; give a small"):
        training.train(micro(tmp_path / "run", **fields))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fields", [dict(size=8_000_000), dict(batch=10**12)])
@pytest.mark.parametrize("dry_run", [False, True])
def test_images_that_no_memory_holds_are_one_sentence(micro, tmp_path, fields, dry_run):
    with pytest.raises(UserError, match=r"^--batch .* GB are free; give a smaller --batch or"):
        training.train(micro(tmp_path / "run", **fields, dry_run=dry_run))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fields", [dict(size=10**30), dict(batch=10**400), dict(lr_batch=2**63)])
def test_integers_beyond_64_bits_are_refused(micro, tmp_path, fields):
    with pytest.raises(UserError, match=r"^--(size|batch|lr-batch) is an integer beyond 64 bits"):
        micro(tmp_path / "run", **fields)


def test_a_name_that_is_not_utf8_is_refused_before_anything_is_written(tmp_path):
    """TensorBoard cannot open it."""
    out = Path(os.fsdecode(os.fsencode(tmp_path) + b"/x\xff"))
    with pytest.raises(UserError, match="is not UTF-8; choose another name"), lock(out):
        pass
    assert not list(tmp_path.iterdir())


def test_each_folder_is_made_once(tmp_path, monkeypatch):
    """`mkdir(exist_ok=True)` of a folder that exists hides any error of the file system."""
    made, mkdir = [], os.mkdir
    monkeypatch.setattr(os, "mkdir", lambda path, *mode: (made.append(Path(path)), mkdir(path)))
    with lock(tmp_path / "runs" / "a"):
        assert made == [tmp_path / "runs", tmp_path / "runs" / "a"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's names of descriptors")
def test_a_lock_that_cannot_be_closed_is_named(tmp_path, monkeypatch):
    close = os.close

    def fail(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        close(descriptor)
        if "train.lock" in name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "close", fail)
    with pytest.raises(OSError, match=r"error: '.*/run/train.lock'"), lock(tmp_path / "run"):
        pass


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "train.lock"])
def test_outside_a_link_to_a_file_is_not_written_through(tmp_path, name):
    victim, out = tmp_path / "victim", tmp_path / "run"
    victim.write_text("mine")
    out.mkdir()
    (out / name).symlink_to(victim)
    with pytest.raises(UserError, match=rf"{name} must be a regular file; remove it"), lock(out):
        pass
    assert victim.read_text() == "mine"

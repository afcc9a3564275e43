"""Checkpoints: a complete one is found after any kill or damage, and user files are kept."""

import hashlib
import json
import os
import sys

import pytest
import torch

from densefeed.system.errors import UserError
from densefeed.training.run_checkpoints import Checkpoints

# Names of Python's audit events for calls that change a folder.
WRITING = {"open", "os.rename", "os.remove", "os.symlink", "os.mkdir"}


def save_steps(out, keep, *steps):
    """Save a run folder after these steps: (step, top1 or None)."""
    kept = Checkpoints(out, keep)
    for step, top1 in steps:
        kept.save({"weights": torch.full((100,), float(step))}, step)
        if top1 is not None:
            kept.rate(step, top1)
    return kept


def read_manifest(out):
    return json.loads((out / "checkpoints" / "manifest.json").read_text())


def check_checkpoints(out):
    """Check manifest, files, hashes and links; return the step of the newest checkpoint."""
    entries = read_manifest(out)
    for entry in entries:
        content = (out / "checkpoints" / entry["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["sha256"]
        loaded = torch.load(out / "checkpoints" / entry["file"], weights_only=True)
        assert torch.equal(loaded["weights"], torch.full((100,), float(entry["step"])))
    for link in {"last.pt", "best.pt"} & {path.name for path in out.iterdir()}:
        torch.load(out / link, weights_only=True)
    assert (out / "last.pt").exists()
    assert Checkpoints(out, 1).newest() == entries[-1]["file"]
    return entries[-1]["step"]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_newest_and_best_are_kept(tmp_path, keep):
    save_steps(tmp_path, keep, (10, None), (20, 0.9), (30, 0.5), (40, None), (50, 0.7), (60, None))
    steps = {1: [20, 60], 2: [20, 50, 60], 3: [20, 40, 50, 60]}[keep]
    assert [entry["step"] for entry in read_manifest(tmp_path)] == steps
    names = {f"step-{step:08d}.pt" for step in steps} | {"manifest.json"}
    assert set(os.listdir(tmp_path / "checkpoints")) == names
    assert os.readlink(tmp_path / "last.pt") == "checkpoints/step-00000060.pt"
    assert os.readlink(tmp_path / "best.pt") == "checkpoints/step-00000020.pt"
    assert check_checkpoints(tmp_path) == 60


def save_and_die(out, number):
    """Save step 3 in a process that ends at its call `number`.

    Returns its exit code: 9, or 0 if it finished before.
    """
    child = os.fork()
    if child == 0:
        calls = iter(range(1, 1000))
        sys.addaudithook(
            lambda event, _: event in WRITING and next(calls) == number and os._exit(9)
        )
        save_steps(out, 1, (3, 0.6))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
def test_kill_at_any_call_leaves_valid_checkpoints(tmp_path):
    """A child ends in `save` at its first open, rename, remove or link, at its second, ...

    It does not clean up.
    """
    ends = 0
    for number in range(1, 100):
        out = tmp_path / str(number)
        save_steps(out, 1, (1, 0.5), (2, 0.4))
        ended = save_and_die(out, number)
        assert check_checkpoints(out) in ((2, 3) if ended else (3,))
        save_steps(out, 1, (3, 0.6), (4, None))  # the resumed run cleans up
        assert check_checkpoints(out) == 4
        assert set(os.listdir(out / "checkpoints")) == {
            "manifest.json",
            "step-00000003.pt",
            "step-00000004.pt",
        }
        ends += ended == 9
        if not ended:
            break
    assert ended == 0
    # Two files are written and renamed, two links made and renamed, two old files removed.
    assert ends >= 8


@pytest.mark.parametrize("harm", ["cut", "flipped", "deleted", "emptied"])
def test_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, capsys, harm):
    kept = save_steps(tmp_path, 2, (1, None), (2, None))
    newest = tmp_path / "checkpoints" / "step-00000002.pt"
    damage(newest, harm)
    assert Checkpoints(tmp_path, 2).newest() == "step-00000001.pt"
    warning = capsys.readouterr().err
    assert warning.startswith("warning: ")
    assert "step-00000002.pt" in warning
    damage(tmp_path / "checkpoints" / "step-00000001.pt", harm)
    with pytest.raises(
        UserError,
        match=r"no checkpoint in .* can be read; copy them again, or choose another --out",
    ):
        kept.newest()


def damage(path, harm):
    content = path.read_bytes()
    if harm == "deleted":
        path.unlink()
    elif harm == "flipped":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        path.write_bytes(content[: len(content) // 2 if harm == "cut" else 0])


def test_damaged_checkpoint_does_not_displace_a_valid_one(tmp_path):
    """The run continues from step 1; its next checkpoint has a later step than the damaged one."""
    save_steps(tmp_path, 2, (1, 0.5), (2, 0.9))
    damage(tmp_path / "checkpoints" / "step-00000002.pt", "cut")
    kept = Checkpoints(tmp_path, 2)
    kept.newest()
    kept.save({"weights": torch.full((100,), 3.0)}, 3)
    assert [entry["step"] for entry in read_manifest(tmp_path)] == [1, 3]
    assert os.readlink(tmp_path / "best.pt") == "checkpoints/step-00000001.pt"
    assert check_checkpoints(tmp_path) == 3


def test_best_link_is_removed_when_its_step_is_repeated(tmp_path):
    save_steps(tmp_path, 2, (1, None), (2, 0.9))
    save_steps(tmp_path, 2, (2, None))
    assert not os.path.lexists(tmp_path / "best.pt")


@pytest.mark.parametrize("content", [None, "", "[]", '["x"]', "{}", "\0\xff"])
def test_missing_or_damaged_manifest_is_rebuilt_from_files(tmp_path, capsys, content):
    """Includes the best one and a damaged file; the next checkpoint writes a manifest again."""
    save_steps(tmp_path, 3, (1, 0.9), (2, 0.4), (3, None))
    manifest = tmp_path / "checkpoints" / "manifest.json"
    manifest.unlink() if content is None else manifest.write_bytes(content.encode("latin-1"))
    damage(tmp_path / "checkpoints" / "step-00000003.pt", "cut")
    kept = Checkpoints(tmp_path, 1)
    assert kept.newest() == "step-00000002.pt"
    warning = capsys.readouterr().err
    assert "manifest.json" in warning
    assert "step-00000003.pt" in warning
    kept.save({"weights": torch.full((100,), 4.0)}, 4)
    kept.rate(4, 0.5)
    assert [entry["step"] for entry in read_manifest(tmp_path)] == [1, 4]
    assert os.readlink(tmp_path / "best.pt") == "checkpoints/step-00000001.pt"
    assert check_checkpoints(tmp_path) == 4


def test_any_flipped_bit_in_the_manifest_is_survived(tmp_path):
    """One bit in each of its bytes: a checkpoint of the run is found."""
    save_steps(tmp_path, 2, (1, 0.9), (2, 0.4))
    manifest = tmp_path / "checkpoints" / "manifest.json"
    content = manifest.read_bytes()
    for at in range(len(content)):
        manifest.write_bytes(
            content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :]
        )
        assert Checkpoints(tmp_path, 2).newest() in ("step-00000001.pt", "step-00000002.pt")


def test_user_files_are_kept(tmp_path):
    save_steps(tmp_path, 1, (1, None))
    mine = ["before-the-talk.pt", "step-notes.pt", "step-1.pt", "thesis.tex.part"]
    mine += ["step-00000009.pt.part", "step-notes.pt.77.part"]
    for name in mine:
        (tmp_path / "checkpoints" / name).write_text("mine")
    (tmp_path / "checkpoints" / "step-00000007.pt").mkdir()
    (tmp_path / "checkpoints" / "manifest.json.77.part").write_text("half")
    for name in ("last.pt.77.part", "last.pt.x.part", "last.pt.part"):
        (tmp_path / name).symlink_to("checkpoints/step-00000001.pt")
    (tmp_path / "checkpoints" / "step-00000009.pt.77.part").write_text("half")
    save_steps(tmp_path, 1, (2, None))
    assert set(os.listdir(tmp_path / "checkpoints")) == {
        *mine,
        "manifest.json",
        "step-00000002.pt",
        "step-00000007.pt",
    }
    assert set(os.listdir(tmp_path)) == {"checkpoints", "last.pt", "last.pt.part", "last.pt.x.part"}


def test_files_of_the_user_are_no_run(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-notes.pt").write_text("mine")
    assert not Checkpoints(tmp_path, 1).exist()


def test_devices_and_pipes_as_checkpoints_are_skipped(tmp_path):
    save_steps(tmp_path, 3, (1, None), (2, None), (3, None))
    folder = tmp_path / "checkpoints"
    for step in (2, 3):
        (folder / f"step-0000000{step}.pt").unlink()
    (folder / "step-00000002.pt").symlink_to("/dev/zero")
    os.mkfifo(folder / "step-00000003.pt")
    assert Checkpoints(tmp_path, 1).newest() == "step-00000001.pt"
    (folder / "manifest.json").unlink()
    assert Checkpoints(tmp_path, 1).newest() == "step-00000001.pt"


def test_folder_without_a_run(tmp_path):
    assert not Checkpoints(tmp_path, 1).exist()
    assert Checkpoints(tmp_path, 1).newest() is None
    save_steps(tmp_path, 1, (1, None))
    assert Checkpoints(tmp_path, 1).exist()
    (tmp_path / "last.pt").unlink()  # killed before the first link
    assert Checkpoints(tmp_path, 1).exist()

"""No incomplete file under a final name; every failure is one sentence and exit code 2."""

import errno
import fcntl
import os

import pytest

from densefeed.system import files
from densefeed.system.errors import UserError, explain_os_error, run
from densefeed.system.files import replace_file, reserve_space


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path):
    target = tmp_path / "file"
    target.write_text("old")

    def fail():
        with replace_file(target) as part:
            part.write_text("half")
            raise OSError(errno.ENOSPC, "full", str(part))

    with pytest.raises(OSError, match="full"):
        fail()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_write_replaces_the_old_file(tmp_path):
    target = tmp_path / "folder" / "file"
    with replace_file(target) as part:
        part.write_text("new")
        assert not target.exists()
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UserError("maps.h5 is damaged; relabel"), "maps.h5 is damaged; relabel"),
        (OSError(errno.ENOSPC, "No space left on device", "x.pt"), "x.pt: the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "x.pt"), "x.pt: no permission"),
        (
            OSError("unable to write (errno = 28, error message = 'No space left on device')"),
            "the disk is full",
        ),
    ],
)
def test_invalid_input_is_one_sentence_and_exit_code_2(error, said, capsys):
    def main():
        raise error

    with pytest.raises(SystemExit) as stopped:
        run(main)
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert said in lines[0]


def test_a_bug_keeps_its_traceback():
    def main():
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        run(main)


def test_explain_os_error_names_the_file_and_the_remedy():
    sentence = explain_os_error(PermissionError(errno.EACCES, "Permission denied", "maps.h5"))
    assert sentence.startswith("maps.h5: ")
    assert "change its owner or mode" in sentence


@pytest.mark.slow
def test_a_full_disk_ends_in_one_sentence(tmp_path, command):
    """A file size limit in place of a full disk: a real write fails half-way with an errno."""
    code = f"""
from pathlib import Path
from densefeed.system.errors import run
from densefeed.system.files import replace_file
def main():
    with replace_file(Path({str(tmp_path / "big")!r})) as part:
        part.write_bytes(bytes(5000))
run(main)
"""
    done = command("-c", code, limit=1000)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(params=["ENOLCK", "ENOTSUP", "ENOSYS"])
def no_locks(monkeypatch, request):
    """A file system without locks, as some network file systems are."""

    def flock(*_: object) -> None:
        raise OSError(getattr(errno, request.param), "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)


def test_without_locks_a_writer_keeps_the_files_of_others(tmp_path, no_locks):
    """Nothing says whether the writer of a `.part` is alive, so it is not an orphan."""
    target, other = tmp_path / "file", tmp_path / "file.1.part"
    other.write_text("of a process that is writing")
    with replace_file(target) as part:
        part.write_text("new")
    assert target.read_text() == "new"
    assert other.read_text() == "of a process that is writing"


def test_space_is_reserved_without_posix_fallocate(tmp_path, monkeypatch):
    """macOS has no such call. Contents stay, holes and the rest become zeros on disk."""
    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(files, "RESERVE_BYTES", 5000)
    path = tmp_path / "file"
    with open(path, "w+b") as file:
        file.write(b"begin")
        file.seek(60_000)
        file.write(b"end")
        file.flush()
        holes = os.stat(path).st_blocks
        reserve_space(file.fileno(), 100_003)
    assert path.read_bytes() == b"begin" + bytes(59_995) + b"end" + bytes(40_000)
    assert os.stat(path).st_blocks * 512 >= 100_003 > holes * 512


@pytest.mark.parametrize("refused", [False, True])
def test_macos_flushes_the_cache_of_the_drive(tmp_path, monkeypatch, refused):
    """fsync does not do it there. Network drives refuse the call, and fsync must be enough."""
    calls = []

    def full_sync(_: int, operation: int) -> None:
        calls.append(operation)
        if refused:
            raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", full_sync)
    files.sync(tmp_path)
    assert calls == [51]

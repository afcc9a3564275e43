"""No incomplete file under a final name; every failure is one sentence and exit code 2."""

import errno
import fcntl
import os
import socket
from pathlib import Path
from threading import Timer

import pytest

from densefeed.system import files
from densefeed.system.errors import UserError, explain_os_error, run
from densefeed.system.files import (
    check_absent,
    create_locked,
    find_path_fault,
    open_regular,
    replace_file,
    reserve_space,
)

from ..planted import PLANTS, plant, time_limit


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


def test_a_folder_that_is_not_synced_is_named(tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output error") as error:
        files.make_folder(tmp_path / "new")
    assert error.value.filename == str(tmp_path / "new")


def test_a_write_replaces_the_old_file(tmp_path):
    target = tmp_path / "folder" / "file"
    with replace_file(target) as part:
        part.write_text("new")
        assert not target.exists()
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


def test_a_file_is_made_again_if_it_is_removed_as_an_orphan_before_it_is_locked(
    tmp_path, monkeypatch
):
    """Another process finds the file without a lock, locks it and is about to remove it."""
    target, flock, orphans = tmp_path / "file", fcntl.flock, []
    part = tmp_path / f"file.{os.getpid()}.part"

    def remove(descriptor):
        part.unlink()
        os.close(descriptor)

    def late(descriptor, operation):
        if not orphans:
            orphans.append(other := os.open(part, os.O_RDWR))
            flock(other, fcntl.LOCK_EX)
            Timer(0.05, remove, [other]).start()
        return flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with replace_file(target) as new:
        new.write_text("new")
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_user_files_named_like_temporary_ones_are_kept(tmp_path):
    """A folder of such a name was deleted with all in it, and a link written through."""
    target, mine = tmp_path / "x.h5", tmp_path / "x.h5.2024.part"
    mine.mkdir()
    (mine / "thesis.tex").write_text("mine")
    with replace_file(target) as part:
        part.write_text("new")
    assert (target.read_text(), (mine / "thesis.tex").read_text()) == ("new", "mine")
    victim, link = tmp_path / "victim", tmp_path / f"y.h5.{os.getpid()}.part"
    victim.write_text("mine")
    link.symlink_to(victim)
    with pytest.raises(UserError, match="is a link"), replace_file(tmp_path / "y.h5") as part:
        part.write_text("new")
    assert victim.read_text() == "mine"
    assert not (tmp_path / "y.h5").exists()


def test_a_file_is_not_created_through_a_link(tmp_path):
    """Another process may make the link after the path was checked."""
    victim, link = tmp_path / "victim", tmp_path / "x.rows"
    victim.write_text("mine")
    link.symlink_to(victim)
    with pytest.raises(UserError, match="is a link"):
        os.close(create_locked(link))
    link.unlink()
    link.symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match="is a link"):
        os.close(create_locked(link))
    assert victim.read_text() == "mine"
    assert not (tmp_path / "nothing").exists()


def test_a_file_is_named_once_where_there_are_no_hard_links(tmp_path, monkeypatch):
    def link(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    target = tmp_path / "file"
    for text in ("first", "second"):
        part = tmp_path / "part"
        part.write_text(text)
        assert files.name_once(part, target) == (text == "first")
    assert target.read_text() == "first"


@pytest.mark.parametrize("there", [False, True])
def test_a_url_is_no_folder_of_the_disk(tmp_path, monkeypatch, there):
    monkeypatch.chdir(tmp_path)
    if there:
        Path("s3:/bucket").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    for write in (files.make_folder, lambda path: files.replace_file(path).__enter__()):
        with pytest.raises(UserError, match=r"^s3://bucket(/run)? is in object storage"):
            write(Path("s3://bucket/run"))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_appears_whole_and_a_killed_one_is_removed(tmp_path, command):
    target = tmp_path / "new" / "folder"
    code = f"""
import os
from pathlib import Path
from densefeed.system.files import create_folder
with create_folder(Path({str(target)!r})) as part:
    (part / "half").write_text("half")
    os._exit(9)
"""
    assert command("-c", code).returncode == 9
    (left,) = target.parent.iterdir()
    with files.create_folder(target) as part:
        assert not left.exists()
        (part / "file").write_text("new")
        assert not target.exists()
    assert list(target.parent.iterdir()) == [target]
    with pytest.raises(UserError, match="exists already"), files.create_folder(target):
        pass


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="full") as error, files.create_folder(tmp_path / "x") as part:
        raise OSError(errno.ENOSPC, "full", str(part / "file"))
    assert error.value.filename == str(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_the_folders_of_new_names_are_synced(tmp_path, monkeypatch):
    """Else a power cut could take a file with the folders above it."""
    synced, fsync = [], os.fsync

    def record(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with replace_file(tmp_path / "a" / "b" / "file") as part:
        part.write_text("new")
    assert synced == [
        *(str(tmp_path / name) for name in ("", "a")),
        str(part),
        str(tmp_path / "a" / "b"),
    ]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_folder_without_fsync_is_no_error_and_a_failed_disk_is(tmp_path, monkeypatch, number):
    def fsync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))

    def write():
        with replace_file(tmp_path / "x"):
            pass

    monkeypatch.setattr(os, "fsync", fsync)
    if number == errno.EINVAL:
        write()
    else:
        with pytest.raises(OSError, match="error") as error:
            write()
        assert explain_os_error(error.value).startswith(f"{tmp_path / 'x'}: the disk failed")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UserError("maps.h5 is damaged; relabel"), "maps.h5 is damaged; relabel"),
        (OSError(errno.ENOSPC, "No space left on device", "x.pt"), "x.pt: the disk is full"),
        (
            PermissionError(errno.EACCES, "Permission denied", "x"),
            "x: no permission; change its owner or",
        ),
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


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "this is not a regular file"),
        (make_socket, "this is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "this is not a regular file"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.symlink_to("nowhere"), "No such file or directory"),
    ],
)
def test_only_regular_files_are_opened(tmp_path, make, message):
    """To open a pipe would wait, and to read a device may never end."""
    path = tmp_path / "file"
    make(path)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=rf"{message}.*: '{path}'"):
        open_regular(path)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_link_to_a_regular_file_is_opened(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"content"


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("cat/1.jpg", ""),
        ("./cat/..1.jpg", ""),
        ("c" * 255, ""),
        ("\x1b[2J/\u202e", ""),
        ("/cat/1.jpg", "is absolute"),
        ("//1.jpg", "is absolute"),
        ("../1.jpg", "leaves its folder by `..`"),
        ("cat/../../1.jpg", "leaves its folder by `..`"),
        ("cat//1.jpg", "has an empty name in it"),
        ("cat/", "has an empty name in it"),
        ("", "has an empty name in it"),
        ("cat\0/1.jpg", "contains a zero byte"),
        ("cat/\udcff.jpg", "is not UTF-8"),
        ("é" * 128, "is too long"),
        ("c/" * 2047 + "12", "is too long"),
    ],
)
def test_paths_from_files_stay_below_their_folder(path, fault):
    assert find_path_fault(path) == fault


def test_a_link_to_nothing_is_in_the_way(tmp_path):
    (tmp_path / "out").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"out exists already"):
        check_absent(tmp_path / "out")


def test_a_file_name_is_not_searched_for_the_reason():
    """h5py keeps only the text of an error, so the reason is searched there, but not in a name."""
    error = OSError(None, "has a fault", "Permission denied.jpg")
    assert explain_os_error(error) == "Permission denied.jpg: has a fault"


@pytest.mark.parametrize("kind", PLANTS)
def test_outside_files_of_our_own_are_locked_only_if_regular(tmp_path, kind):
    path = tmp_path / "x.rows"
    victim = plant(kind, path)
    with time_limit(), pytest.raises(UserError, match=rf"^{path} must be a regular file.*remove"):
        os.close(create_locked(path))
    assert victim.read_bytes() == b"mine"

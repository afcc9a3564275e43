"""No incomplete file under a final name; every failure is one sentence and exit code 2."""

import errno

import pytest

from densefeed.system.errors import UserError, explain_os_error, run
from densefeed.system.files import replace_file


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

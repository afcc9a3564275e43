"""Errors of commands end in one sentence and an exit code."""

import io
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from densefeed import native
from densefeed.system import errors, terminal
from densefeed.system.errors import UserError


def test_a_big_endian_processor_is_refused_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "byteorder", "big")
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    with pytest.raises(SystemExit) as stopped:
        errors.run(lambda: print("ran"))
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.splitlines() == [
        "error: DenseFeed needs a little-endian processor, and s390x is big-endian; "
        "use x86-64 or arm64"
    ]
    native.library.cache_clear()
    with pytest.raises(UserError, match="s390x is big-endian"):
        native.library()


@pytest.mark.parametrize(
    "take",
    [lambda: np.zeros(2**62, np.int8), lambda: torch.zeros(2**62), lambda: torch.zeros(2**62, 2)],
)
def test_a_command_without_memory_ends_in_one_sentence(capsys, take):
    with pytest.raises(SystemExit) as stopped:
        errors.run(take)
    assert stopped.value.code == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 1
    assert re.fullmatch(
        r"error: out of memory \(.+\); end other programs, or .* --batch .*", printed[0]
    )


def test_a_command_without_stdout_ends_in_its_sentence(monkeypatch, capsys):
    """As a daemon, or after `>&-`."""
    monkeypatch.setattr(sys, "stdout", None)

    def fail():
        raise UserError("x is damaged; copy it again")

    with pytest.raises(SystemExit) as stopped:
        errors.run(fail)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: x is damaged; copy it again\n"


def test_a_stdout_without_the_characters_of_a_name_escapes_them(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    errors.run(lambda: terminal.print("ü.beton: 6 images"))
    stream.flush()
    assert stream.buffer.getvalue() == rb"\xfc.beton: 6 images" + b"\n"


# Imports `densefeed.system` without the package itself, whose imports take 5 s of processor time in
# a new process. The modules of errors and of the terminal need none of them.
ALONE = f"""
import sys, types
package = types.ModuleType("densefeed")
package.__path__ = {[str(Path(errors.__file__).parents[1])]!r}
sys.modules["densefeed"] = package
from densefeed.system import errors, terminal
assert "torch" not in sys.modules
"""


def run_writing_to(path: str | int, body: str, stream: str = "stdout") -> tuple[int, str]:
    """Return exit code and stderr of a command whose stdout is `path`, buffered as in a pipe."""
    script = f"{ALONE}def main():\n    {body}\nerrors.run(main)"
    variables = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
    with open(path, "wb") as full:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full}
        done = subprocess.run([sys.executable, "-c", script], text=True, env=variables, **streams)
    return done.returncode, done.stderr


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_process_without_streams_does_not_print_into_its_files(closed, tmp_path):
    """The first file that it opens would have the number of a stream, which libraries print to."""
    script = f"import os{ALONE}"
    script += "def main():\n    with open('made', 'wb') as file:\n"
    script += "        file.write(b'pixels'), file.flush()\n"
    script += "        os.write(1, b'a message'), os.write(2, b'a message')\n"
    script += "        print('a message'), print('a message', file=sys.stderr)\n"
    script += "errors.run(main)"
    command = shlex.join([sys.executable, "-c", script])
    assert subprocess.run(f"{command} {closed}", shell=True, cwd=tmp_path).returncode == 0
    assert (tmp_path / "made").read_bytes() == b"pixels"


FULL = "standard output cannot be written (No space left on device); redirect it to another file"


@pytest.mark.slow
@pytest.mark.parametrize(("to", "code"), [(">&-", 0), (">/dev/full", 2)])
def test_a_help_text_that_a_new_process_cannot_print(to, code):
    command = shlex.join([sys.executable, "-m", "densefeed.tools.model_costs", "--help"])
    done = subprocess.run(f"{command} {to}", shell=True, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (code, f"error: {FULL}\n" if code else "")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("replace", "code"),
    [("os.close(1); sys.stdout = None", 0), ("os.dup2(os.open('/dev/full', os.O_WRONLY), 1)", 2)],
    ids=["closed", "full"],
)
def test_a_help_text_that_cannot_be_printed(replace, code, command):
    """In a forked process, whose stdout becomes what a shell would open or close."""
    script = f"import os, runpy, sys; {replace}; sys.argv = ['model_costs', '--help']; "
    script += "runpy.run_module('densefeed.tools.model_costs', run_name='__main__')"
    done = command("-c", script, teardown=True)
    assert (done.returncode, done.stderr) == (code, f"error: {FULL}\n" if code else "")


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("print('6 images')", (141, "")),
        ("print('6 images'); raise SystemExit(0)", (141, "")),
        ("terminal.print_table('6 images')", (141, "")),
        ("print('6 images'); raise errors.UserError('x is cut')", (2, "error: x is cut\n")),
        ("print('6 images'); raise KeyboardInterrupt", (130, "interrupted\n")),
    ],
)
def test_a_command_whose_reader_is_gone_has_no_traceback(body, want):
    """As in `verify ... | head -0`: a short text is written when the command ends."""
    reader, writer = os.pipe()
    os.close(reader)
    assert run_writing_to(writer, body) == want


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
def test_a_full_disk_under_stdout_is_one_sentence():
    assert run_writing_to("/dev/full", "print('6 images')") == (2, f"error: {FULL}\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
def test_a_full_disk_under_stderr_keeps_the_exit_code():
    for body, code in (("raise errors.UserError('x')", 2), ("raise KeyboardInterrupt", 130)):
        assert run_writing_to("/dev/full", body, "stderr") == (code, None)


def test_other_errors_of_a_command_keep_their_traceback():
    def fail():
        raise RuntimeError("no kernel image is available")

    with pytest.raises(RuntimeError, match="no kernel image"):
        errors.run(fail)


def test_a_url_that_was_read_as_a_path_is_not_said_to_be_missing():
    with pytest.raises(OSError, match="No such file") as raised:
        Path("s3://bucket/weights.pt").read_bytes()
    said = errors.explain_os_error(raised.value)
    assert said.startswith("s3://bucket/weights.pt is in object storage, which is not read here")


ROOT = Path(errors.__file__).parents[2]


# Before tyro the command imports torch, which takes 2.5 s.
@pytest.mark.parametrize("package", ["torch", pytest.param("tyro", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "words",
    [
        ("-m", "densefeed", "pack"),
        pytest.param((ROOT / "tools/pack_dataset.py",), marks=pytest.mark.slow),
        pytest.param((ROOT / "train.py",), marks=pytest.mark.slow),
    ],
    ids=["densefeed", "tools", "train"],
)
def test_outside_ctrl_c_while_packages_are_imported_is_one_word(tmp_path, package, words):
    """These packages press it, when the command's first module and its function import them."""
    pressed = "import os, signal; os.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / f"{package}.py").write_text(pressed)
    done = subprocess.run(
        [sys.executable, *words, "--data", "x", "--out", "y"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("name", ["tools/report.py", "train.py"])
def test_outside_a_python_without_the_packages_is_told_the_environment(name):
    """-S leaves out the packages of this environment."""
    bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = sys.executable, "-S", ROOT / name, "--help"
    done = subprocess.run(words, capture_output=True, text=True, env=bare)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {sys.executable} lacks the package densefeed; activate")
    assert "source .venv/bin/activate" in done.stderr
    assert done.stderr.count("\n") == 1


def test_outside_the_command_without_its_packages_is_one_sentence():
    bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = sys.executable, "-S", "-m", "densefeed", "--help"
    done = subprocess.run(words, capture_output=True, text=True, env=bare, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"error: {sys.executable} lacks the package ")


@pytest.mark.slow
def test_outside_a_script_of_a_user_keeps_pythons_ctrl_c():
    script = "import densefeed, signal; print(signal.getsignal(2) is signal.default_int_handler)"
    words = sys.executable, "-c", script
    done = subprocess.run(
        words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert (done.stdout, done.stderr) == ("True\n", "")

"""A forked command behaves like one in a fresh interpreter."""

import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest

from .preloaded import ROOT, Preloaded

# Print everything that a program can see of its process, except the differences that preloaded.py
# lists.
VISIBLE = """
import atexit, json, os, resource, signal, sys, tempfile, threading, time
sys.stderr.write("on stderr\\n")
os.write(1, b"written below Python\\n")
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread"))).start()
main, streams, numbers = sys.modules["__main__"], (sys.stdin, sys.stdout, sys.stderr), range(20)
limits = [name for name in sorted(dir(resource)) if name.startswith("RLIMIT_")]
print(json.dumps({
    "main": [__name__, main.__dict__ is globals(), __spec__ is None, __package__],
    "file": os.path.basename(globals().get("__file__", "")),
    "argv": [sys.argv, sys.orig_argv, sys.path, sys.executable, str(sys.flags)],
    "streams": [[s.encoding, s.errors, s.line_buffering, s.write_through] for s in streams],
    "terminals": [[s.isatty(), s.fileno()] for s in streams],
    "open": [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")],
    "folder": [os.getcwd(), tempfile.gettempdir()],
    "environment": dict(os.environ),
    "signals": [str(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
    "mask": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "group": [os.getpgid(0), os.getsid(0), os.umask(0)],
    "limits": [resource.getrlimit(getattr(resource, name)) for name in limits],
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["script", "-c", "-m"])
def test_program_sees_the_same_as_in_a_fresh_interpreter(command, tmp_path, form, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "seen.py").write_text(VISIBLE)
    (tmp_path / "linked.py").symlink_to("real/seen.py")
    (tmp_path / "seen.py").write_text(VISIBLE)
    words = {"script": ["linked.py"], "-c": ["-c", VISIBLE], "-m": ["-m", "seen"]}[form]
    command("-c", "pass")
    monkeypatch.setenv("SET_LATE", "yes")  # the server is already running
    monkeypatch.delenv("HOME", raising=False)
    environment = {
        "TMPDIR": str(tmp_path / "elsewhere"),
        "PYTHONPATH": f"{tmp_path / 'real'}:/nowhere",
    }
    how = {"cwd": tmp_path, "environment": environment, "limit": 12_345}
    forked, fresh = (
        command(*words, "--word", "two words", fresh=fresh, **how) for fresh in (False, True)
    )
    assert (forked.args, forked.returncode, forked.stderr) == (fresh.args, 0, "on stderr\n")
    outputs = [done.stdout.splitlines() for done in (forked, fresh)]
    seen = [json.loads(next(line for line in lines if line[0] == "{")) for lines in outputs]
    others = [[line for line in lines if line[0] != "{"] for lines in outputs]
    assert others == 2 * [["written below Python", "a thread", "at exit"]]
    assert seen[0]["folder"] == [str(tmp_path), str(tmp_path / "elsewhere")]
    assert seen[0]["environment"]["SET_LATE"] == "yes"
    assert "HOME" not in seen[0]["environment"]
    for name, value in seen[1].items():
        assert seen[0][name] == value, name


# Exit codes by program; a wrong 0 would let other tests pass.
EXITS = {
    "import sys; sys.exit('no such thing')": 1,
    "import sys; sys.exit(7)": 7,
    "import sys; sys.exit()": 0,
    "import sys; sys.exit(-1)": 255,
    "import os; os._exit(9)": 9,
    "import os, signal; os.kill(os.getpid(), signal.SIGINT)": -2,
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": -11,
    "1 / 0": 1,
    "1 +": 1,
    "import atexit; atexit.register(lambda: 1 / 0)": 0,
    "open('x', 'wb', 0).write(bytes(100)); open('x', 'ab', 0).write(b'x')": 1,
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("code", EXITS)
def test_program_exits_as_in_a_fresh_interpreter(command, code, tmp_path):
    assert command("-c", code, limit=100, cwd=tmp_path).returncode == EXITS[code]


@pytest.mark.slow
def test_teardown_frees_remaining_objects(command):
    code = (
        "import os\n"
        "class Left:\n"
        "    def __del__(self, write=os.write): write(1, b'freed')\n"
        "left = Left()"
    )
    printed = [command("-c", code, teardown=teardown).stdout for teardown in (False, True)]
    assert printed == ["", "freed"]


def test_variables_read_at_start_get_a_fresh_interpreter(command, monkeypatch):
    code = "import sys; print(sys.flags.optimize, 'torch' in sys.modules)"
    assert command("-c", code).stdout.split() == ["0", "True"]
    optimized = command("-c", code, environment={"PYTHONOPTIMIZE": "1"})
    assert optimized.stdout.split() == ["1", "False"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert command("-c", code).stdout.split() == ["0", "False"]


# The server of a command, which is a child of its child.
PARENT = "-c", "import os; print(open(f'/proc/{os.getppid()}/stat').read().split()[3], end='')"


def test_processes_share_the_server_of_a_folder(tmp_path):
    """Until the last one is closed; then another server is started there."""
    first, second = (Preloaded(("json",), folder=tmp_path) for _ in range(2))
    one, other = first(*PARENT), second(*PARENT)
    assert (one.returncode, one.stderr) == (0, "")
    assert one.stdout == other.stdout == str(first._server.pid)
    assert second._server is None
    first.close()
    assert second(*PARENT).stdout == one.stdout
    with second.start("-c", "import time; time.sleep(600)") as endless:
        second.close()
        assert endless.wait(60) == -signal.SIGKILL
    assert first._server.wait(60) == 0
    with closing(Preloaded(("json",), folder=tmp_path)) as third:
        assert third(*PARENT).stdout == str(third._server.pid) != one.stdout


def test_a_server_that_was_killed_is_started_again(tmp_path):
    first, second = (Preloaded(("json",), folder=tmp_path) for _ in range(2))
    with closing(first), closing(second):
        assert first(*PARENT).stdout == second(*PARENT).stdout
        first._server.kill()
        first._server.wait()
        assert second(*PARENT).stdout == first(*PARENT).stdout == str(second._server.pid)


def test_one_may_leave_while_another_comes(tmp_path):
    """The server that has seen the last one leave took no commands."""
    for number in range(4):
        first, second = (Preloaded(("json",), folder=tmp_path) for _ in range(2))
        first(*PARENT)
        leaving = threading.Timer(number / 2_000, first.close)
        leaving.start()
        with closing(second):
            assert second("-c", "print(1)").stdout == "1\n"
        leaving.join()


def test_who_starts_the_server_may_be_killed(tmp_path):
    """While it imports; whoever comes next then starts another."""
    (tmp_path / "slowly.py").write_text("import time; time.sleep(1)")
    modules = ("json", "slowly")
    environment = {"PYTHONPATH": str(tmp_path)}
    start = f"from tests.preloaded import Preloaded; from pathlib import Path; Preloaded({modules},"
    start += f" {environment}, Path({str(tmp_path)!r}))('-c', '')"
    with subprocess.Popen([sys.executable, "-c", start], cwd=ROOT) as starter:
        while not (tmp_path / "socket").exists():
            time.sleep(0.01)
        starter.kill()
    with closing(Preloaded(modules, environment, tmp_path)) as next_one:
        assert next_one("-c", "print(1)").stdout == "1\n"


def test_variables_are_those_of_the_server(tmp_path, monkeypatch):
    first, second = (Preloaded(("json",), folder=tmp_path) for _ in range(2))
    with closing(first), closing(second):
        first(*PARENT)
        monkeypatch.setenv("PYTHONOPTIMIZE", "1")
        assert second("-c", "import sys; print(sys.flags.optimize)").stdout == "1\n"
        monkeypatch.delenv("PYTHONOPTIMIZE")
        assert second(*PARENT).stdout == str(first._server.pid)


def test_an_import_that_fails_is_shown(tmp_path):
    with pytest.raises(AssertionError, match="No module named 'no_such_module'"):
        Preloaded(("no_such_module",))("-c", "")

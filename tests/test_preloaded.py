"""A forked command behaves like one in a fresh interpreter."""

import json
import os
import signal
import subprocess
import time

import pytest

from .preloaded import Preloaded

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
    "ours": [name for name in sys.modules if name.startswith("densefeed")],
}))
"""


@pytest.mark.parametrize(
    "form", ["script", *(pytest.param(form, marks=pytest.mark.slow) for form in ("-c", "-m"))]
)
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


EXITS = {
    "message": "import sys; sys.exit('no such thing')",
    "number": "import sys; sys.exit(7)",
    "no code": "import sys; sys.exit()",
    "_exit": "import os; os._exit(9)",
    "Ctrl-C": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "crash": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "error": "print('before'); 1 / 0",
    "error at exit": "import atexit; atexit.register(lambda: 1 / 0)",
    "syntax error": "1 +",
    "-1": "import sys; sys.exit(-1)",
    "closed stream": "import os; print('x'); os.close(1)",
    "full disk": "open('x', 'wb', 0).write(bytes(100)); open('x', 'ab', 0).write(b'x')",
}


# A fresh interpreter for each takes a second; here two, the others are slow.
@pytest.mark.parametrize(
    "how",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in ("number", "error"))) for n in EXITS],
)
def test_program_exits_as_in_a_fresh_interpreter(command, how, tmp_path):
    forked, fresh = (
        command("-c", EXITS[how], fresh=fresh, limit=100, cwd=tmp_path) for fresh in (False, True)
    )
    assert (forked.returncode, forked.stdout) == (fresh.returncode, fresh.stdout)
    # Only the last line: the traceback has two more frames of the server.
    assert forked.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


WORKS = """
import multiprocessing, os, random, sys
def double(x): return 2 * x
if __name__ == "__main__":
    import numpy as np, torch
    from torch.utils.data import DataLoader
    print(torch.get_num_threads(), random.random(), np.random.rand())
    x = torch.randn(400, 400, requires_grad=True)
    assert not torch.cuda._is_in_bad_fork()  # True if the server had initialized CUDA
    torch.set_num_threads(3)
    (x @ x).relu().sum().backward()
    assert torch.isfinite(x.grad).all() and len(os.listdir("/proc/self/task")) > 1
    print([batch.tolist() for batch in DataLoader(range(4), batch_size=2, num_workers=2)])
    for way in ("fork", "spawn"):
        with multiprocessing.get_context(way).Pool(1) as pool: print(pool.map(double, [1, 2]))
"""


def test_threads_and_processes_work_and_random_numbers_differ(command, tmp_path):
    """If the server had started OpenMP's threads, forked processes would wait for them forever."""
    (tmp_path / "works.py").write_text(WORKS)
    forked = [command("works.py", cwd=tmp_path, timeout=120) for _ in range(2)]
    fresh = command("works.py", cwd=tmp_path, fresh=True)
    assert [done.stderr for done in (*forked, fresh)] == ["", "", ""]
    first = [done.stdout.splitlines()[0].split() for done in (*forked, fresh)]
    assert len({threads for threads, *_ in first}) == 1
    assert len({draw for _, *draws in first for draw in draws}) == 6
    assert [done.stdout.splitlines()[1:] for done in forked] == 2 * [fresh.stdout.splitlines()[1:]]


def test_teardown_frees_remaining_objects(command):
    code = (
        "import os\n"
        "class Left:\n"
        "    def __del__(self, write=os.write): write(1, b'freed')\n"
        "left = Left()"
    )
    options = ({}, {"teardown": True}, {"fresh": True})
    printed = [command("-c", code, **how).stdout for how in options]
    assert printed == ["", "freed", "freed"]


def test_no_state_is_left_in_the_server(command):
    change = "import sys, os; sys.left = os.environ['LEFT'] = 'x'; os.chdir('/')"
    assert command("-c", change).returncode == 0
    seen = "import sys, os; print(hasattr(sys, 'left'), 'LEFT' in os.environ, os.getcwd() == '/')"
    assert command("-c", seen).stdout.split() == 3 * ["False"]


@pytest.mark.parametrize("_run", range(2))
def test_the_next_test_does_not_see_a_changed_environment(_run):
    assert "CUDA_LEFT_BEHIND" not in os.environ
    os.environ["CUDA_LEFT_BEHIND"] = "1"


def test_variables_read_at_start_get_a_fresh_interpreter(command, monkeypatch):
    code = "import sys; print(sys.flags.optimize, 'torch' in sys.modules)"
    assert command("-c", code).stdout.split() == ["0", "True"]
    # PyTorch sets this variable in the test process when a test compiles.
    cache = {"TORCHINDUCTOR_CACHE_DIR": "/nowhere"}
    assert command("-c", code, environment=cache).stdout.split() == ["0", "True"]
    optimized = command("-c", code, environment={"PYTHONOPTIMIZE": "1"})
    assert optimized.stdout.split() == ["1", "False"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert command("-c", code).stdout.split() == ["0", "False"]
    assert command("-O", "-c", code).stdout.split() == ["1", "False"]


def test_parallel_commands_get_signals_and_are_waited_for(command):
    sleep = "import time; print('here', flush=True); time.sleep(60)"
    with (
        command.start("-c", sleep) as killed,
        command.start("-c", sleep) as interrupted,
        command.start("-c", sleep) as left,
    ):
        assert [child.stdout.readline() for child in (killed, interrupted, left)] == 3 * ["here\n"]
        assert killed.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            killed.wait(timeout=0.01)
        killed.kill()
        interrupted.send_signal(signal.SIGINT)
        assert killed.wait() == killed.poll() == -signal.SIGKILL
        assert interrupted.communicate()[1].endswith("KeyboardInterrupt\n")
        assert interrupted.returncode == -signal.SIGINT
    assert left.returncode == -signal.SIGKILL
    assert not os.path.exists(f"/proc/{left.pid}")
    with pytest.raises(subprocess.TimeoutExpired):
        command("-c", sleep, timeout=0.1)


def test_large_output_does_not_block_a_program(command):
    write = "sys.stderr.write(9999 * 'e'); sys.stdout.write(9999 * 'o')"
    done = command("-c", f"import sys\nfor _ in range(20): {write}")
    assert (done.stdout, done.stderr) == (20 * 9999 * "o", 20 * 9999 * "e")


def exits(process: int) -> bool:
    """Return whether a process exits, or becomes a zombie, within ten seconds."""
    for _ in range(1000):
        try:
            with open(f"/proc/{process}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def test_dropped_command_is_killed_and_dead_server_is_noticed():
    preloaded = Preloaded(libraries=False)
    dropped = preloaded.start("-c", "import time; time.sleep(60)")
    dropped.close()
    assert exits(dropped.pid)
    kept = preloaded.start("-c", "import time; time.sleep(60)")
    preloaded._server.kill()
    with pytest.raises(RuntimeError, match="the command server exited while running"):
        kept.wait()
    os.kill(kept.pid, signal.SIGKILL)
    kept.close()
    with pytest.raises(ConnectionRefusedError):
        preloaded("-c", "pass")
    preloaded.close()


STARTS = """
import os, subprocess, sys
def run(code, **how):
    return subprocess.run([sys.executable, "-c", code, "two words"], text=True, **how)
preloaded = "import sys; print('torch' in sys.modules, sys.flags.optimize)"
code = "import os, sys; print(sys.argv, os.getcwd(), os.environ['A']); sys.stderr.write('e')"
environment = os.environ | {"A": "b"}
done = run(code + "; sys.exit(5)", capture_output=True, cwd="/", env=environment)
print(done.stdout.strip(), done.stderr, done.returncode)
print(run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").returncode, flush=True)
run(preloaded)
run(preloaded, env=os.environ | {"PYTHONOPTIMIZE": "1"})
run(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {preloaded!r}])")
"""


def test_descendants_of_a_command_can_be_forked_too(command):
    done = command("-c", STARTS, descendants=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "['-c', 'two words'] / b e 5",
        "-9",
        "True 0",
        "False 1",
        "True 0",
    ]
    assert command("-c", STARTS).stdout == done.stdout.replace("True 0", "False 0")

"""Commands without their imports: a server that imported the libraries once forks a process for each command.

`python train.py ...` works for some 4 s of processor time before its first own line, which is PyTorch, timm and what they
import. The server, this file run as a script, imports them and nothing of ours, then waits; for a command it forks a process
that becomes what `python WORDS` would be. The process leaves `serve` and goes through the interpreter's own end, so exit
codes, tracebacks (with two frames of this file above), atexit handlers and waiting for threads are Python's.

What is not a fresh interpreter's: the libraries are in sys.modules though the command may not import them, /proc/PID/cmdline
is the server's, and children of one server share their seed of string hashes. Environment variables that are read where a
process or library begins cannot be given anew; `Preloaded.start` then starts a fresh interpreter, as it does for `fresh`.
"""

import builtins
import contextlib
import gc
import importlib
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path

ROOT = Path(__file__).parent.parent
FIRST = (
    "numpy", "h5py", "PIL.Image", "PIL.JpegImagePlugin", "tyro", "rich.console", "rich.table", "rich.progress", "jinja2", "torch",
    "safetensors.torch", "torch.distributed",
)  # fmt: skip
THEN = (
    "torchvision.ops", "torchvision.transforms.v2", "torchvision.datasets", "timm", "timm.data", "timm.optim", "timm.utils",
    "torch.utils.tensorboard", "torch.utils.flop_counter",
)  # fmt: skip
# Read when Python, the C library, OpenMP, PyTorch or Triton begins: too late for a process that is forked.
READ_AT_START = ("PYTHON", "OMP_", "OPENBLAS_", "MKL_", "TORCH", "PYTORCH", "TRITON", "CUDA", "LD_", "MALLOC_", "LANG", "LC_")

# ------------------------------------------------------------------------- the tests' side


def read_at_start(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_START)}


class Forked:
    """A running command: what these tests use of subprocess.Popen. Who drops it unfinished has it killed."""

    def __init__(self, words: list[str], connection: socket.socket, stdout: int, stderr: int) -> None:
        self.args, self.returncode, self._connection = words, None, connection
        self.stdout, self.stderr = open(stdout), open(stderr)  # noqa: SIM115 (closed by communicate or __exit__)
        self.pid = int.from_bytes(self._told(None))

    def _told(self, timeout: float | None) -> bytes:
        self._connection.settimeout(timeout)
        told = self._connection.recv(4)
        if not told:
            raise RuntimeError(f"the server of commands ended under {self.args}")
        return told

    def poll(self) -> int | None:
        with contextlib.suppress(BlockingIOError):
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(int.from_bytes(self._told(0)))
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        try:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(int.from_bytes(self._told(timeout)))
        except TimeoutError as error:
            raise subprocess.TimeoutExpired(self.args, timeout) from error
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All it writes, once it has ended. Each stream has a reader of its own: a full pipe would stop it."""
        said = {}
        readers = [
            threading.Thread(target=lambda name=name: said.update({name: getattr(self, name).read()}), daemon=True)
            for name in ("stdout", "stderr")
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        self.close()
        return said["stdout"], said["stderr"]

    def close(self) -> None:
        for end in (self.stdout, self.stderr, self._connection):
            end.close()

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_error: object) -> None:
        if not self._connection._closed:
            self.kill()
            self.wait()
            self.close()


class Preloaded:
    """The server, started with the first command."""

    def __init__(self) -> None:
        self._server, self._control = None, None

    def _started(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = read_at_start(os.environ)
        with theirs, tempfile.TemporaryFile() as said:
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                pass_fds=[theirs.fileno()],
            )  # fmt: skip
            theirs.close()
            ready = self._control.recv(1)
            if not ready:
                self._server.wait()
            said.seek(0)
            complaints = said.read().decode()
        # What imports print would be missing from what commands print.
        assert (ready, complaints) == (b"+", ""), f"the libraries cannot be preloaded in silence:\n{complaints}"

    def start(
        self, *words: object, cwd: Path = ROOT, environment: dict[str, str] | None = None, limit: int | None = None, fresh=False
    ) -> "Forked | subprocess.Popen":
        """`python WORDS` in `cwd`, by default the checkout; its output in pipes.

        `environment` is added to this process's; `limit` bytes is the most that a file may grow to, which stands for a full
        disk; `fresh` asks for an interpreter of its own.
        """
        words, environment = list(map(str, words)), {**os.environ, **(environment or {})}
        if self._server is None:
            self._started()
        options = words[0].startswith("-") and words[0] not in ("-c", "-m")
        if fresh or options or read_at_start(environment) != self._environment:
            return subprocess.Popen(
                [sys.executable, *words], cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                preexec_fn=None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
            )  # fmt: skip
        request = {"words": words, "cwd": str(cwd), "environment": environment, "limit": limit}
        connection, theirs = socket.socketpair()
        (stdout, out), (stderr, err) = os.pipe(), os.pipe()
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], [0, out, err, theirs.fileno()])
        finally:
            for end in (out, err, theirs.detach()):
                os.close(end)
        return Forked([sys.executable, *words], connection, stdout, stderr)

    def __call__(self, *words: object, timeout: float | None = None, **how: object) -> subprocess.CompletedProcess:
        """`start(*words, **how)`, its end and all that it said; killed if that takes longer than `timeout` seconds."""
        with self.start(*words, **how) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
            return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def close(self) -> None:
        """End the server, and with it what it still runs."""
        if self._server is not None:
            self._control.close()
            self._server.wait()
            self._server = None


# ------------------------------------------------------------------------- the server


def serve(control: socket.socket) -> dict:
    """Fork a process for each request; return in that process, with what was requested."""
    waiting = selectors.DefaultSelector()
    waiting.register(control, selectors.EVENT_READ)
    running = {}  # the descriptor of a process: its id, and the connection that is told how it ended
    while True:
        event = waiting.select()[0][0]  # one at a time: it may be that others of the list are over then
        if event.fileobj is control:
            content, streams, *_ = socket.recv_fds(control, 2**20, 4)
            if not content:  # the tests are over
                for process, _ in running.values():
                    os.kill(process, signal.SIGKILL)
                os._exit(0)
            connection = socket.socket(fileno=streams.pop())
            process = os.fork()
            if not process:
                for key in list(waiting.get_map().values()):
                    os.close(key.fd) if key.fileobj == key.fd else key.fileobj.close()
                waiting.close()
                connection.close()
                return json.loads(content) | {"streams": streams}
            for stream in streams:
                os.close(stream)
            connection.sendall(process.to_bytes(4))
            running[descriptor := os.pidfd_open(process)] = process, connection
            waiting.register(descriptor, selectors.EVENT_READ)
            waiting.register(connection, selectors.EVENT_READ, process)
        elif event.data is not None:  # nobody listens any more
            os.kill(event.data, signal.SIGKILL)
            waiting.unregister(event.fileobj)
        else:
            process, connection = running.pop(event.fd)
            waiting.unregister(event.fd)
            os.close(event.fd)
            with contextlib.suppress(KeyError):
                waiting.unregister(connection)
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(os.waitpid(process, 0)[1].to_bytes(4))
            connection.close()


def become(words: list[str], cwd: str, environment: dict[str, str], limit: int | None, streams: list[int]) -> None:
    """Run `python WORDS` here, as the interpreter would: a script, `-m MODULE` or `-c CODE`."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    importlib.invalidate_caches()
    tempfile.tempdir = None  # TMPDIR may be another
    importlib.import_module("numpy").random.seed()  # of all generators this one alone is not seeded anew in a forked process
    sys.orig_argv = [sys.executable, *words]
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], cwd
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = builtins
    if words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        code = compile(words[1], "<string>", "exec", dont_inherit=True)
    else:
        sys.argv, sys.path[0] = words, os.path.dirname(os.path.realpath(words[0]))
        main.__file__ = os.path.abspath(words[0])
        code = compile(Path(words[0]).read_bytes(), main.__file__, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def preload(control: socket.socket) -> None:
    for library in FIRST:
        importlib.import_module(library)
    # What is there now is left out of collections, those at a process's end too: 0.9 s instead of 1.4 s. Were Triton, which
    # torchvision imports, left out as well, it would be 0.5 s, but Triton would print that its objects were not freed.
    gc.collect()
    gc.freeze()
    for library in THEN:
        importlib.import_module(library)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which then end this
    control.send(b"+")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as control:
        preload(control)
        requested = serve(control)
    become(**requested)

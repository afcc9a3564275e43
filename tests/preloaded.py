"""Commands without their imports: a server that imported the libraries once forks a process for
each command.

`python train.py ...` works for some 4 s of processor time before its first own line, which is
PyTorch, timm and what they import. The server, this file run as a script, imports them and nothing
of ours, then waits; for a command it forks a process that becomes what `python WORDS` would be.
Exit codes, tracebacks (with two frames of this file above), waiting for threads and atexit handlers
are the interpreter's own; when they are done the process ends at once, without freeing its objects
one by one, which takes 0.9 s. `teardown` asks for that too.

What is not a fresh interpreter's: the libraries are in sys.modules though the command may not
import them, /proc/PID/cmdline is the server's, and children of one server share their seed of
string hashes. Environment variables that are read where a process or library begins cannot be given
anew; `Preloaded.start` then starts a fresh interpreter, as it does for `fresh`.
"""

import atexit
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
    "numpy",
    "h5py",
    "PIL.Image",
    "PIL.JpegImagePlugin",
    "tyro",
    "rich.console",
    "rich.table",
    "rich.progress",
    "jinja2",
    "torch",
    "safetensors.torch",
    "torch.distributed",
)
THEN = (
    "torchvision.ops",
    "torchvision.transforms.v2",
    "torchvision.datasets",
    "timm",
    "timm.data",
    "timm.optim",
    "timm.utils",
    "torch.utils.tensorboard",
    "torch.utils.flop_counter",
)
# Read when Python, the C library, OpenMP, PyTorch or Triton begins: too late for a process that is
# forked.
READ_AT_START = (
    "PYTHON",
    "OMP_",
    "OPENBLAS_",
    "MKL_",
    "TORCH",
    "PYTORCH",
    "TRITON",
    "CUDA",
    "LD_",
    "MALLOC_",
    "LANG",
    "LC_",
)
# The first by this file; the caches' PyTorch sets itself where it compiles, which tests do.
READ_LATER = (
    "PYTHONPATH",
    "TORCHELASTIC_",
    "TORCH_NCCL_",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
)

# ------------------------------------------------------------------------- the tests' side


def read_at_start(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_START) and not name.startswith(READ_LATER)
    }


def needs_interpreter(
    words: list[str], environment: dict[str, str], servers: dict[str, str]
) -> bool:
    """Whether these words or variables are for the start of an interpreter."""
    options = words[0].startswith("-") and words[0] not in ("-c", "-m", "-u")
    return options or read_at_start(environment) != servers


def connected(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    return connection


class Forked:
    """A running command: what these tests use of subprocess.Popen. Who drops it unfinished has it
    killed.
    """

    def __init__(
        self, address: str, words: list[str], request: dict, streams: tuple[int, int, int]
    ) -> None:
        self.args, self.returncode = [sys.executable, *words], None
        self._connection = connected(address)
        socket.send_fds(
            self._connection, [json.dumps({"words": words, **request}).encode()], streams
        )
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
        """All it writes, once it has ended. Each stream has a reader of its own: a full pipe would
        stop it.
        """
        said = {}
        readers = [
            threading.Thread(
                target=lambda name=name: said.update({name: getattr(self, name).read()}),
                daemon=True,
            )
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
        self._server = None

    def _started(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._address, self._relay = (
            os.path.join(self._folder.name, name) for name in ("socket", "python")
        )
        self._environment = read_at_start(os.environ)
        known = f"{self._address!r}, {sys.executable!r}, {self._environment!r}"
        relay = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from preloaded import relay; relay({known})"
        Path(self._relay).write_text(f"#!{sys.executable} -SE\n{relay}\n")
        os.chmod(self._relay, 0o700)
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
            tempfile.TemporaryFile() as said,
        ):
            listener.bind(self._address)
            listener.listen(64)
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=[listener.fileno()],
            )
            self._life = connected(self._address)
            listener.close()
            ready = self._life.recv(1)
            if not ready:
                self._server.wait()
            said.seek(0)
            complaints = said.read().decode()
        # What imports print would be missing from what commands print.
        assert (ready, complaints) == (b"+", ""), (
            f"the libraries cannot be preloaded in silence:\n{complaints}"
        )

    def start(
        self,
        *words: object,
        cwd: Path = ROOT,
        environment: dict[str, str] | None = None,
        limit: int | None = None,
        fresh: bool = False,
        descendants: bool = False,
        teardown: bool = False,
    ) -> "Forked | subprocess.Popen":
        """`python WORDS` in `cwd`, by default the checkout; its output in pipes.

        `environment` is added to this process's; `limit` bytes is the most that a file may grow to,
        which stands for a full disk; `fresh` asks for an interpreter of its own. With `descendants`
        what the command starts by sys.executable is forked too: that is the path of a program that
        asks the server. `teardown`: to the very end of the interpreter.
        """
        words, environment = list(map(str, words)), {**os.environ, **(environment or {})}
        if self._server is None:
            self._started()
        if fresh or needs_interpreter(words, environment, self._environment):
            return subprocess.Popen(
                [sys.executable, *words],
                cwd=cwd,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=None
                if limit is None
                else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
            )
        executable = self._relay if descendants else sys.executable
        request = {
            "cwd": str(cwd),
            "environment": environment,
            "limit": limit,
            "executable": executable,
            "teardown": teardown,
        }
        (stdout, out), (stderr, err) = os.pipe(), os.pipe()
        try:
            process = Forked(self._address, words, request, (0, out, err))
        except BaseException:
            os.close(stdout)
            os.close(stderr)
            raise
        finally:
            os.close(out)
            os.close(err)
        process.stdout, process.stderr = open(stdout), open(stderr)  # noqa: SIM115 (closed by communicate or __exit__)
        return process

    def __call__(
        self, *words: object, timeout: float | None = None, **how: object
    ) -> subprocess.CompletedProcess:
        """`start(*words, **how)`, its end and all that it said; killed if that takes longer than
        `timeout` seconds.
        """
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
            self._life.close()
            self._server.wait()
            self._server = None
            self._folder.cleanup()


def relay(address: str, interpreter: str, environment: dict[str, str]) -> None:
    """Be `python WORDS`, by a process of the server's: with its output, and its end."""
    words = sys.argv[1:]
    if needs_interpreter(words, dict(os.environ), environment):
        os.execv(interpreter, [interpreter, *words])
    here = {"cwd": os.getcwd(), "environment": dict(os.environ), "executable": sys.argv[0]}
    process = Forked(address, words, here | {"limit": None, "teardown": False}, (0, 1, 2))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal's Ctrl-C the process hears itself
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    code = process.wait()
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL's cannot be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


# ------------------------------------------------------------------------- the server


def serve(listener: socket.socket, life: socket.socket) -> dict:
    """Fork a process for each request; return in that process, with what was requested."""
    waiting = selectors.DefaultSelector()
    for one in (listener, life):
        waiting.register(one, selectors.EVENT_READ)
    # the descriptor of a process: its id, and the connection that is told how it ended
    running = {}
    while True:
        # one at a time: it may be that others of the list are over then
        event = waiting.select()[0][0]
        if event.fileobj is life:  # the tests are over
            for process, _ in running.values():
                os.kill(process, signal.SIGKILL)
            os._exit(0)
        elif event.fileobj is listener:
            waiting.register(listener.accept()[0], selectors.EVENT_READ, "new")
        elif event.data == "new":
            connection = event.fileobj
            waiting.unregister(connection)
            content, streams, *_ = socket.recv_fds(connection, 2**20, 3)
            if not content:
                connection.close()
                continue
            process = os.fork()
            if not process:
                for key in list(waiting.get_map().values()):
                    os.close(key.fd) if key.fileobj == key.fd else key.fileobj.close()
                for _, other in running.values():
                    other.close()
                waiting.close()
                connection.close()
                return json.loads(content) | {"streams": streams}
            for stream in streams:
                os.close(stream)
            running[descriptor := os.pidfd_open(process)] = process, connection
            waiting.register(descriptor, selectors.EVENT_READ)
            waiting.register(connection, selectors.EVENT_READ, process)
            with contextlib.suppress(BrokenPipeError):
                connection.send(process.to_bytes(4))
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
                connection.send(os.waitpid(process, 0)[1].to_bytes(4))
            connection.close()


def search_path(environment: dict[str, str]) -> list[str]:
    """What PYTHONPATH adds to sys.path."""
    return [
        os.path.abspath(path)
        for path in environment.get("PYTHONPATH", "").split(os.pathsep)
        if path
    ]


def become(
    words: list[str],
    cwd: str,
    environment: dict[str, str],
    limit: int | None,
    executable: str,
    streams: list[int],
) -> None:
    """Run `python WORDS` here, as the interpreter would: a script, `-m MODULE` or `-c CODE`."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(cwd)
    for path in search_path(dict(os.environ)):
        sys.path.remove(path)
    sys.path[1:1] = search_path(environment)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    importlib.invalidate_caches()
    tempfile.tempdir = None  # TMPDIR may be another
    # of all generators this one alone is not seeded anew in a forked process
    importlib.import_module("numpy").random.seed()
    sys.executable, sys.orig_argv = executable, [executable, *words]
    if words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        sys.stderr.reconfigure(write_through=True)
        words = words[1:]
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


def end(requested: dict) -> None:
    """The last handler of atexit: the process is over, unless it must be torn down or ends by a
    signal.
    """
    if "status" in requested:
        with contextlib.suppress(OSError, ValueError):  # else the interpreter says so
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(requested["status"])


def preload() -> None:
    for library in FIRST:
        importlib.import_module(library)
    # What is there now is left out of collections, which would copy its pages. Not what follows:
    # torchvision imports Triton, which prints at a teardown that its objects were not freed.
    gc.collect()
    gc.freeze()
    for library in THEN:
        importlib.import_module(library)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which then end this


if __name__ == "__main__":
    requested = {}
    atexit.register(end, requested)  # first, so that it is called last
    with socket.socket(fileno=int(sys.argv[1])) as listener, listener.accept()[0] as life:
        preload()
        life.send(b"+")
        words = serve(listener, life)
    teardown, status = words.pop("teardown"), 1
    try:
        become(**words)
        status = 0
    except SystemExit as error:
        status = (
            0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1
        )
        raise
    except KeyboardInterrupt:
        teardown = True
        raise
    finally:
        if not teardown:
            requested["status"] = status

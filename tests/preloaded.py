"""Run commands without import time: a server imports the libraries once and forks per command.

`densefeed train ...` spends about 4 s of processor time on imports (PyTorch, timm and their
dependencies) before its own first line. The server is this file run as a script. It imports those
libraries and DenseFeed, but none of its commands, and waits. For each command it forks a process
that becomes what `python WORDS` would be. Exit codes, tracebacks (with two extra frames of this
file), joining of threads and atexit handlers are those of the interpreter. After them the process
exits immediately, without freeing its objects one by one, which takes 0.9 s; `teardown` requests
that too.

Differences from a fresh interpreter: the libraries are in sys.modules even if the command does not
import them, /proc/PID/cmdline is that of the server, and all children of a server share one seed of
string hashes. Environment variables that are read at the start of a process or library cannot be
changed later. `Preloaded.start` then starts a fresh interpreter, as it does for `fresh`.
"""

import atexit
import builtins
import contextlib
import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIBRARIES = (
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
    "torchvision.ops",
    "torchvision.transforms.v2",
    "torchvision.datasets",
    "timm",
    "timm.data",
    "timm.optim",
    "timm.utils",
    "torch.utils.tensorboard",
    "torch.utils.flop_counter",
    "densefeed",
)
# Read when Python, the C library, OpenMP, PyTorch or Triton starts: too late in a forked process.
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
# Exceptions. This file applies PYTHONPATH. PyTorch sets the cache variables itself when it
# compiles, as some tests do.
READ_LATER = (
    "PYTHONPATH",
    "TORCHELASTIC_",
    "TORCH_NCCL_",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
)

QUESTION = b"?"  # whether there is a server

# ------------------------------------------------------------------------- Client side


def start_variables(environment: dict[str, str]) -> dict[str, str]:
    """Select the variables that are read at the start of a process."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_START) and not name.startswith(READ_LATER)
    }


def needs_interpreter(
    words: list[str], environment: dict[str, str], servers: dict[str, str]
) -> bool:
    """Return whether these words or variables require a new interpreter."""
    options = words[0].startswith("-") and words[0] not in ("-c", "-m", "-u")
    return options or start_variables(environment) != servers


def connect(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    return connection


def answers(address: str) -> bool:
    """Return whether a server is there, and not one that is about to end."""
    with contextlib.suppress(OSError), connect(address) as connection:
        connection.send(QUESTION)
        return bool(connection.recv(1))
    return False


class Forked:
    """A running command, with the part of the interface of subprocess.Popen that tests use.

    The process is killed if the connection is dropped before it exits.
    """

    def __init__(
        self, address: str, words: list[str], request: dict, streams: tuple[int, int, int]
    ) -> None:
        self.args, self.returncode = [sys.executable, *words], None
        self._connection = connect(address)
        socket.send_fds(
            self._connection, [json.dumps({"words": words, **request}).encode()], streams
        )
        self.pid = int.from_bytes(self._receive(None))

    def _receive(self, timeout: float | None) -> bytes:
        self._connection.settimeout(timeout)
        number = self._connection.recv(4)
        if not number:
            raise RuntimeError(f"the command server exited while running {self.args}")
        return number

    def poll(self) -> int | None:
        with contextlib.suppress(BlockingIOError):
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(int.from_bytes(self._receive(0)))
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        try:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(int.from_bytes(self._receive(timeout)))
        except TimeoutError as error:
            raise subprocess.TimeoutExpired(self.args, timeout) from error
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the exit and return all output. Kills the process after `timeout` seconds.

        Each stream has its own reader, because a full pipe would block the process.
        """
        with ThreadPoolExecutor(2) as readers:
            output = [readers.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except BaseException:
                self.kill()
                raise
        self.close()
        return output[0].result(), output[1].result()

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
    """The command server, which is started by the first command.

    It imports `modules` and runs with `environment` added to the variables of this process. With
    the same `folder`, processes share a server; the last one that is closed stops it.
    """

    def __init__(
        self,
        modules: Iterable[str] = LIBRARIES,
        environment: dict[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._modules, self._own, self._given = modules, environment or {}, folder
        self._server, self._life = None, None

    def _open_server(self) -> None:
        """Start the server, or find that of the folder."""
        if self._life is not None:  # the server has died
            self.close()
        self._temporary = None if self._given else tempfile.TemporaryDirectory()
        folder = self._given or Path(self._temporary.name)
        self._address, self._relay, life = (
            str(folder / name) for name in ("socket", "python", "life")
        )
        variables = folder / "variables.json"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(FileExistsError):
                os.mkfifo(life)
            # The server ends when nobody has this pipe open for writing. Opened for both, it does
            # not wait for the server.
            self._life = os.open(life, os.O_RDWR)
            if not answers(self._address):
                self._environment = start_variables(os.environ | self._own)
                variables.write_text(json.dumps(self._environment))
                self._start_server(life)
            self._environment = json.loads(variables.read_text())

    def _start_server(self, life: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._address)  # of a server that has ended
        environment = os.environ | self._own
        arguments = f"{self._address!r}, {sys.executable!r}, {self._environment!r}"
        relay = (
            f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
            f"from preloaded import relay; relay({arguments})"
        )
        Path(self._relay).write_text(f"#!{sys.executable} -SE\n{relay}\n")
        os.chmod(self._relay, 0o700)
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
            tempfile.TemporaryFile() as log,
        ):
            listener.bind(self._address)
            listener.listen(64)
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno()), life, *self._modules],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
            )
            with connect(self._address) as first:
                listener.close()
                ready = first.recv(1)
            if not ready:
                self._server.wait()
            log.seek(0)
            printed = log.read().decode()
        # Output of imports would be missing from the output of the commands.
        assert (ready, printed) == (b"+", ""), f"preloading the libraries prints:\n{printed}"

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
        """Start `python WORDS` with its output in pipes.

        Args:
            cwd: working directory, by default the checkout.
            environment: variables added to those of this process.
            limit: maximum size of files in bytes, to simulate a full disk.
            fresh: use a new interpreter instead of a fork.
            descendants: also fork the processes that the command starts with sys.executable, which
                is then the path of a relay to the server.
            teardown: run the complete finalization of the interpreter.
        """
        words = list(map(str, words))
        environment = os.environ | self._own | (environment or {})
        if self._life is None:
            self._open_server()
        if fresh or needs_interpreter(words, environment, self._environment):

            def set_limit() -> None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

            return subprocess.Popen(
                [sys.executable, *words],
                cwd=cwd,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=None if limit is None else set_limit,
            )
        executable = self._relay if descendants else sys.executable
        request = dict(cwd=str(cwd), environment=environment, limit=limit, executable=executable)
        request["teardown"] = teardown
        (stdout, out), (stderr, err) = os.pipe(), os.pipe()
        try:
            try:
                process = Forked(self._address, words, request, (0, out, err))
            except OSError:
                self._open_server()
                request["executable"] = self._relay if descendants else sys.executable
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
        """Run `start(*words, **how)` to its end and return its output.

        It is killed if it takes longer than `timeout` seconds.
        """
        with self.start(*words, **how) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
            return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def close(self) -> None:
        """Leave the server; the last one stops it and all commands that still run."""
        if self._life is not None:
            os.close(self._life)
            self._life = None
            if self._temporary:
                self._server.wait()
                self._temporary.cleanup()


def relay(address: str, interpreter: str, environment: dict[str, str]) -> None:
    """Run `python WORDS` in a process of the server, with its output and its exit status."""
    words = sys.argv[1:]
    if needs_interpreter(words, dict(os.environ), environment):
        os.execv(interpreter, [interpreter, *words])
    here = {"cwd": os.getcwd(), "environment": dict(os.environ), "executable": sys.argv[0]}
    process = Forked(address, words, here | {"limit": None, "teardown": False}, (0, 1, 2))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to the process too
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    code = process.wait()
    if code < 0:
        with contextlib.suppress(OSError):  # the handler of SIGKILL cannot be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


# ------------------------------------------------------------------------- Server side


def serve(listener: socket.socket, life: int) -> dict:
    """Fork a process for each connection, which forks the command and reports its exit.

    Returns only in the process of a command, with its request.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that report
    while life not in select.select([listener, life], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        content, streams, *_ = socket.recv_fds(connection, 2**20, 3)
        if content == QUESTION:
            connection.send(b"+")
            break
        process = os.fork()
        if not process:
            connection.close()
            os.close(life)
            return json.loads(content) | {"streams": streams}
        for stream in streams:
            os.close(stream)
        connection.send(process.to_bytes(4))
        end = os.pidfd_open(process)
        # The client dropped the connection, or the tests have finished.
        if end not in select.select([end, connection, life], [], [])[0]:
            os.kill(process, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):
            connection.send(os.waitpid(process, 0)[1].to_bytes(4))
        break
    os._exit(0)


def search_path(environment: dict[str, str]) -> list[str]:
    """Return the entries that PYTHONPATH adds to sys.path."""
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    return [os.path.abspath(path) for path in paths if path]


def run_program(
    words: list[str],
    cwd: str,
    environment: dict[str, str],
    limit: int | None,
    executable: str,
    streams: list[int],
) -> None:
    """Run `python WORDS` in this process: a script, `-m MODULE` or `-c CODE`."""
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
    tempfile.tempdir = None  # TMPDIR may differ
    # NumPy's global generator is the only one that is not reseeded in a forked process.
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


def exit_early(requested: dict) -> None:
    """Exit as the last atexit handler, except for a full finalization or an end by a signal."""
    if "status" in requested:
        # On an error the interpreter continues and reports it.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(requested["status"])


def preload(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    # Exclude the present objects from garbage collection, which would copy their memory pages.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the tests, which stop the server


if __name__ == "__main__":
    requested = {}
    atexit.register(exit_early, requested)  # registered first, so it runs last
    # Whoever starts the server may be killed before, and then nobody has the pipe open for writing.
    life = os.open(sys.argv[2], os.O_RDONLY | os.O_NONBLOCK)
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        with listener.accept()[0] as first:
            preload(sys.argv[3:])
            first.send(b"+")
        request = serve(listener, life)
    teardown, status = request.pop("teardown"), 1
    try:
        run_program(**request)
        status = 0
    except SystemExit as error:
        if error.code is None:
            status = 0
        elif isinstance(error.code, int):
            status = error.code & 0xFF
        raise
    except KeyboardInterrupt:
        teardown = True
        raise
    finally:
        if teardown:
            gc.unfreeze()  # Triton prints at finalization which of its objects were not freed
        else:
            requested["status"] = status

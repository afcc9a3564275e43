"""Build the pretended CUDA runtime, and run a command on it.

The libraries are built for the PyTorch that is installed: what its libraries want of CUDA and
runtime.cpp or driver.cpp does not define becomes a function that returns 0.
"""

import fcntl
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

SOURCES = Path(__file__).parent
ROOT = SOURCES.parent.parent
SITE = Path(sysconfig.get_path("purelib"))
RUNTIME, DRIVER = "libpretended_cudart.so", "libcuda.so.1"
# PyTorch's libraries that call CUDA. Not all of them are in every release.
CALLERS = (
    "libc10_cuda.so",
    "libcaffe2_nvrtc.so",
    "libtorch_cpu.so",
    "libtorch_cuda.so",
    "libtorch_cuda_linalg.so",
    "libtorch_nvshmem.so",
    "libtorch_python.so",
)
# Functions of cuBLAS that are products, and launch a kernel or more.
PRODUCT = re.compile(r"cublas.*(gemm|gemv|dot|trsm)", re.IGNORECASE)
ENTRY_POINT = "[torch.backends]\npretended_cuda = tests.pretended.backend:load\n"
# Bytes that a command and its children may take: comparisons read garbage, and a loop that follows
# them could fill the machine.
MEMORY = 6 * 2**30


# ------------------------------------------------------------------------- Building


def find_missing() -> str:
    """Return why the runtime cannot be built here, or "" if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the pretended CUDA runtime is for Linux on x86-64, not {platform.platform()}"
    for tool in ("gcc", "g++", "nm"):
        if not shutil.which(tool):
            return f"the pretended CUDA runtime is built with {tool}, which is not installed"
    import torch

    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    if int(torch.version.cuda.partition(".")[0]) < 13:
        return f"the pretended CUDA runtime has the functions of CUDA 13, not {torch.version.cuda}"
    for header in ("cuda.h", "cuda_runtime_api.h", "cublasLt.h", "crt/host_defines.h"):
        if not any((folder / header).exists() for folder in find_headers()):
            return f"{header}, which the wheels of PyTorch and Triton bring, is not in {SITE}"
    return ""


def find_headers() -> list[Path]:
    """Return the folders of CUDA's headers in the packages that PyTorch requires."""
    return [*sorted(SITE.glob("nvidia/cu*/include")), SITE / "triton/backends/nvidia/include"]


def build(folder: Path) -> Path:
    """Build both libraries in a folder, unless they are there, and return it.

    Processes that build in the same folder wait for the first one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # The runtime is last: where it is, both are complete.
        if not (folder / RUNTIME).exists():
            callers = [path for name in CALLERS if (path := SITE / "torch/lib" / name).exists()]
            callers += sorted(SITE.glob("torchvision/*.so"))
            wanted = undefined_symbols(callers)
            driver = {name for name in wanted if re.match("cu[A-Z]", name)} | driver_functions()
            write_library(folder, "driver", DRIVER, driver)
            runtime = {name for name in wanted if re.match("cuda[A-Z]|__cuda|cublas", name)}
            # PyTorch counts devices with it where it can be loaded; an empty file cannot.
            (folder / "libnvidia-ml.so.1").touch()
            # PyTorch calls the entry points of this group at the end of its import.
            package = folder / "pretended_cuda-0.dist-info"
            package.mkdir(exist_ok=True)
            (package / "METADATA").write_text("Name: pretended_cuda\nVersion: 0\n")
            (package / "entry_points.txt").write_text(ENTRY_POINT)
            write_library(folder, "runtime", RUNTIME, runtime)
    return folder


def undefined_symbols(libraries: Iterable[Path]) -> set[str]:
    """Return the names of functions that libraries want of others."""
    words = ["nm", "-D", "--undefined-only", *map(str, libraries)]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r" U (\w+)", text))


def driver_functions() -> set[str]:
    """Return the functions of cuda.h: who loads a driver looks its functions up by name."""
    header = next(path for folder in find_headers() if (path := folder / "cuda.h").exists())
    text = header.read_text()
    declared = re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(", text)
    # The header renames functions to their newest versions.
    renamed = re.findall(r"#define\s+cu\w+\s+(cu[A-Z]\w+)", text)
    return {*declared, *(f"{name}_v2" for name in declared), *renamed}


def write_library(folder: Path, source: str, library: str, wanted: set[str]) -> None:
    """Compile a source file, and a function for every wanted name that it does not define."""
    text = (SOURCES / f"{source}.cpp").read_text()
    defined = set(re.findall(r"^API [^(]*?(\w+)\(", text, re.MULTILINE))
    stubs = folder / f"{source}_stubs.c"
    stubs.write_text(write_stubs(sorted(wanted - defined), counted=source == "runtime"))
    # With PyTorch 2.11 comes cuda_fp16.h without this header, whose macros choose device code.
    (folder / "nv").mkdir(exist_ok=True)
    macros = ("NV_IF_TARGET", "NV_IF_ELSE_TARGET", "NV_DISPATCH_TARGET")
    text = "".join(f"#define {macro}(...)\n" for macro in macros)
    (folder / "nv/target").write_text(text)
    headers = [*(f"-I{path}" for path in find_headers()), f"-idirafter{folder}"]
    unfinished = folder / f"{library}.part"
    objects = stubs.with_suffix(".o")
    compile_c = ["gcc", "-O1", "-fPIC", "-w", "-c", stubs, "-o", objects]
    compile_cpp = ["g++", "-O2", "-fPIC", "-w", "-shared", f"-Wl,-soname,{library}", *headers]
    compile_cpp += [SOURCES / f"{source}.cpp", objects, "-ldl", "-o", unfinished]
    for words in (compile_c, compile_cpp):
        subprocess.run(list(map(str, words)), check=True)
    unfinished.rename(folder / library)


def write_stubs(names: Sequence[str], counted: bool) -> str:
    """Return C code of functions that return 0 and, of the runtime, are counted."""
    lines = ["void pretended_count(const char *);", "void pretended_product(const char *, void *);"]
    for name in names:
        if PRODUCT.match(name):
            body = f'int {name}(void *handle) {{ pretended_product("{name}", handle); return 0; }}'
        elif counted:
            body = f'int {name}(void) {{ pretended_count("{name}"); return 0; }}'
        else:
            body = f"int {name}(void) {{ return 0; }}"
        lines.append(body)
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------- Running


def environment(folder: Path, devices: int = 1) -> dict[str, str]:
    """Return the environment variables of a command that sees `devices` pretended devices."""
    own = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return own | {
        "LD_PRELOAD": str(folder / RUNTIME),
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        # In this process, whose memory and time are limited.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PRETENDED_RUNTIME": str(folder / RUNTIME),
        "PRETENDED_DEVICES": str(devices),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{folder}:{os.environ.get('PYTHONPATH', '')}",
    }


def run(
    words: Sequence[object], folder: Path, seconds: float, devices: int = 1
) -> subprocess.CompletedProcess:
    """Run `python WORDS` in the checkout on the pretended runtime of a folder.

    It and its children are killed after `seconds`, or when they take more than MEMORY.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=ROOT,
            env=environment(folder, devices),
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        why, end = "", time.monotonic() + seconds
        try:
            while child.poll() is None and not why:
                # Reading the memory of all processes takes milliseconds.
                with suppress(subprocess.TimeoutExpired):
                    child.wait(0.5)
                if (taken := group_memory(child.pid)) > MEMORY:
                    why = f"killed: it took {taken / 2**30:.1f} GiB of memory"
                elif time.monotonic() > end:
                    why = f"killed after {seconds:.0f} s"
        finally:
            kill_group(child.pid)
            child.wait()
        for stream in (out, err):
            stream.seek(0)
        return subprocess.CompletedProcess(words, child.returncode, out.read(), err.read() + why)


def kill_group(group: int) -> None:
    """Kill the processes of a group, if there are any."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def group_memory(group: int) -> int:
    """Return the bytes of resident memory of all processes of a group."""
    pages = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The second field is the name in brackets, which may hold anything.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            pages += int(fields[21])
    return pages * os.sysconf("SC_PAGE_SIZE")

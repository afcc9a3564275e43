"""Run the test suite as on other x86-64 processors, with 1, 2 and 4 threads; a line per run.

`python tests/processors.py [--instructions ...] [--threads ...] [words of pytest]`. Exits with 1 if
tests fail in any run. Instruction sets that this processor lacks are left out.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from time import perf_counter

import torch

# By PyTorch's name of an instruction set, the environment in which libraries choose their code as
# on a processor without the sets above it. ATEN_CPU_CAPABILITY reaches only PyTorch's own and
# generated code; convolutions are oneDNN's, products MKL's (which disregards
# MKL_ENABLE_INSTRUCTIONS on AMD's processors), math functions those of the C library. The clones in
# densefeed/native are chosen by the processor alone; tests/native/test_native.py compares them.
ENVIRONMENTS = {
    "default": {
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
        "OPENBLAS_CORETYPE": "Nehalem",
        "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX2,-FMA",
    },
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_CBWR": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
        "NPY_DISABLE_CPU_FEATURES": "X86_V4",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F",
    },
    "avx512": {},
}
THREADS = (1, 2, 4)
PYTEST = ["pytest", "-q", "-n", "auto", "--dist", "worksteal"]


def environments(instructions: list[str], threads: list[int]) -> Iterator[dict[str, str]]:
    """Yield the variables of each run."""
    for name in instructions:
        for count in threads:
            chosen = {"ATEN_CPU_CAPABILITY": name, "OMP_NUM_THREADS": str(count)}
            # Threads that wait actively take the cores from the others.
            chosen |= {"OMP_WAIT_POLICY": "passive"}
            yield chosen | ENVIRONMENTS[name]


def run(variables: dict[str, str], words: list[str]) -> bool:
    """Run the tests once, print a line, and the failed tests' lines; return whether all passed."""
    start = perf_counter()
    # A cache of compiled code of its own, so that each run also generates its code.
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", *PYTEST, f"--basetemp={folder}/tests", *words],
            env=os.environ | variables | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled"},
            stdout=subprocess.PIPE,
            text=True,
        )
    lines = done.stdout.splitlines() or ["no output"]
    name = f"{variables['ATEN_CPU_CAPABILITY']:8} {variables['OMP_NUM_THREADS']} threads"
    print(f"{name}  {lines[-1].strip(' =')}  {perf_counter() - start:.0f} s", flush=True)
    if done.returncode:
        print(*(line for line in lines if line.startswith(("FAILED", "ERROR"))), sep="\n")
    return done.returncode == 0


def main(words: list[str]) -> int:
    """Run the tests in every environment and return the exit status."""
    best = torch.backends.cpu.get_cpu_capability().lower()
    names = list(ENVIRONMENTS)
    # A processor of another kind, such as arm64, has PyTorch's default only.
    names = names[: names.index(best) + 1] if best in names else ["default"]
    parser = argparse.ArgumentParser()
    parser.add_argument("--instructions", nargs="+", choices=names, default=names)
    parser.add_argument("--threads", nargs="+", type=int, default=THREADS)
    options, rest = parser.parse_known_args(words)
    rest = [word for word in rest if word != "--"]
    runs = environments(options.instructions, options.threads)
    return int(not all([run(variables, rest or ["-m", "not slow"]) for variables in runs]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

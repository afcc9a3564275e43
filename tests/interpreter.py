"""Tests of Triton kernels in Triton's interpreter."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

# Triton reads the variable when it is imported, so these tests run in a process of their own.
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="started by test_in_the_interpreter"
)


def compile_kernel(
    kernel: object,
    types: dict[str, str],
    constants: dict[str, int],
    capability: int,
    fusion: bool,
    warps: int = 4,
    aligned: bool = False,
) -> dict:
    """Compile a kernel to the binary of a GPU, ptxas included; return its forms by name.

    `types` are those of the arguments that are neither int32 nor constants. `aligned`: pointers are
    multiples of 16 bytes, as those of PyTorch's tensors.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    pointers = [n for n, name in enumerate(kernel.arg_names) if signature[name].startswith("*")]
    attributes = {(n,): [["tt.divisibility", 16]] for n in pointers if aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    options = {"enable_fp_fusion": fusion, "num_warps": warps}
    compiled = triton.compile(source, target=target, options=options)
    assert compiled.asm["cubin"].startswith(b"\x7fELF")
    return compiled.asm


def read_resources(forms: dict) -> tuple[int, int]:
    """Return bytes of stack and registers of a compiled kernel, by Triton's disassembler."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton brings no cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(forms["cubin"])
        file.flush()
        words = [tool, "-res-usage", file.name]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return tuple(int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("STACK", "REG"))


def run_interpreted(*files: object, chosen: str = "interpreted") -> int:
    """Run the tests of files that pytest's -k chooses; return how many passed."""
    words = "-m", "pytest", "-q", f"-k{chosen}", "-pno:cacheprovider"
    done = subprocess.run(
        [sys.executable, *words, *map(str, files)],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout
    return int(re.search(r"(\d+) passed", done.stdout)[1])

"""The runs of `make test-processors`."""

import subprocess

import torch

from . import processors


def test_every_instruction_set_runs_on_each_number_of_threads(monkeypatch, capsys):
    """One run fails; its tests are named, and the others are still made."""
    seen = []

    def fake(words, env, **_):
        seen.append((env["ATEN_CPU_CAPABILITY"], env["OMP_NUM_THREADS"], words[-1]))
        failed = seen[-1][:2] == ("avx2", "1")
        text = "FAILED tests/a.py::b\n1 failed, 2 passed in 3s" if failed else "= 3 passed in 4s ="
        return subprocess.CompletedProcess(words, int(failed), text)

    monkeypatch.setattr(subprocess, "run", fake)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert processors.main([]) == 1
    names = [(name, threads) for name in ("default", "avx2") for threads in "124"]
    assert seen == [(*pair, "not slow") for pair in names]
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in out if "threads" in line] == [list(p) for p in names]
    assert out[3].startswith("avx2     1 threads  1 failed, 2 passed")
    assert out[4] == "FAILED tests/a.py::b"
    assert processors.main(["--instructions", "default", "--threads", "2", "--", "x"]) == 0
    assert seen[6:] == [("default", "2", "x")]

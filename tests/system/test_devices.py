"""The choice of a device; cores and memory on systems that lack Linux's interfaces."""

import os
import resource
import sys
import sysconfig
from types import SimpleNamespace

import pytest
import torch

from densefeed.system.devices import (
    can_build,
    choose_device,
    choose_rank_device,
    count_cores,
    describe_load,
    peak_rss,
    warn_busy,
)
from densefeed.system.errors import UserError


def test_cores_are_those_of_this_process_where_the_system_says_so(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert count_cores() == 1
    monkeypatch.delattr(os, "sched_getaffinity")
    assert count_cores() == os.cpu_count()


@pytest.mark.parametrize("missing", [None, "compiler", "headers"])
def test_outside_triton_needs_a_compiler_and_headers(missing, tmp_path, monkeypatch):
    """On a GPU its kernels ended with a traceback where an installation has neither."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: tmp_path)
    names = {"compiler": "clang", "headers": "Python.h"}
    for name in (name for what, name in names.items() if what != missing):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert can_build() == (missing is None)


def test_peak_memory_is_in_bytes_on_linux_and_macos(monkeypatch):
    usage = SimpleNamespace(ru_maxrss=2_000_000)
    monkeypatch.setattr(resource, "getrusage", lambda _: usage)
    monkeypatch.setattr(sys, "platform", "linux")
    assert peak_rss() == 2_000_000 * 1024
    monkeypatch.setattr(sys, "platform", "darwin")
    assert peak_rss() == 2_000_000


@pytest.mark.parametrize(("load", "told"), [(5.9, ""), (6.1, "load average 6.1 on 4 cores")])
def test_outside_a_busy_machine_is_told_once_in_a_line(load, told, monkeypatch, capsys):
    """Its load is that of all cores, though this process may use one alone."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert describe_load(1.5) == told
    # The remedy was taken.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    warn_busy()
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("OMP_NUM_THREADS")
    warn_busy()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == bool(told)
    assert told in printed.err
    assert ("OMP_NUM_THREADS=1" in printed.err) == bool(told)


def test_a_system_without_load_average_is_not_called_busy(monkeypatch, capsys):
    def refuse():
        raise OSError

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "getloadavg", refuse)
    warn_busy()
    assert capsys.readouterr().err == ""


@pytest.fixture
def four_gpus(monkeypatch):
    """Pretend that there are four CUDA devices; return what is asked of them, in order."""
    calls, zeros = [], torch.zeros

    def allocate(count: int, device: torch.device) -> torch.Tensor:
        calls.append(("allocate", device))
        return zeros(count)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set", device)))
    monkeypatch.setattr(torch, "zeros", allocate)
    return calls


@pytest.mark.parametrize("choose", [choose_device, choose_rank_device])
def test_a_named_gpu_becomes_the_current_one_before_it_is_used(choose, four_gpus):
    """Triton launches its kernels on the current device, whatever the device of their tensors."""
    device = torch.device("cuda:1")
    assert choose("cuda:1") == device
    assert four_gpus == [("set", device), ("allocate", device)]


def test_float32_is_not_rounded_to_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    choose_device("cpu")
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


def test_a_rank_touches_no_gpu_but_its_own(four_gpus, monkeypatch):
    """A tensor on `cuda` would give every rank a context on the first, of some 500 MB each."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    device = torch.device("cuda", 3)
    for name in ("auto", "cuda"):
        assert choose_rank_device(name) == device
    assert four_gpus == 2 * [("set", device), ("allocate", device)]


def test_a_rank_that_has_no_gpu_is_refused(four_gpus, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(UserError, match="machine of 4 CUDA devices; give --nproc-per-node 4"):
        choose_rank_device("cuda")
    with pytest.raises(UserError, match="--device cuda:1 is one device; under torchrun"):
        choose_rank_device("cuda:1")
    assert not four_gpus


def test_a_device_whose_package_is_missing_is_one_sentence():
    for name in ("hpu", "privateuseone", "meta"):
        with pytest.raises(UserError, match=f"--device {name} cannot be used here .*; take auto"):
            choose_device(name)

"""FLOPs and bytes against counts by hand, and dry-run estimates against a measured step."""

import json
import os
import re
import shutil
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from torch import nn

import densefeed.train as training
from densefeed.models import lvvit  # noqa: F401  (registers its models)
from densefeed.models.meta_device import meta_device
from densefeed.system.devices import peak_memory
from densefeed.system.errors import UserError
from densefeed.system.options import with_options
from densefeed.tools.report import Report
from densefeed.tools.report import main as report
from densefeed.training import dry_run, speed
from densefeed.training.build import build_model, flops_shares
from densefeed.training.ranks import ALONE, Ranks
from densefeed.training.setup import setup_run
from densefeed.training.speed import ActivationBytes, RunClock, peak_flops, training_flops

from ..runs import SHARED_AGENT, model_for, objective_for, records

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "size", "D", "depth", "hidden", "published"),
    [
        ("lvvit_s", 224, 384, 16, 1152, 6.55),
        ("lvvit_t", 224, 240, 12, 720, 2.87),
        ("lvvit_s", 160, 384, 16, 1152, None),
    ],
)
def test_flops_match_count_by_hand(name, size, D, depth, hidden, published):
    """Forward multiply-adds, layer by layer; two operations each, and backward is twice forward."""
    with meta_device():
        model = timm.create_model(name)
    half, T = size // 2, (size // 16) ** 2
    stem = half**2 * 64 * (3 * 49 + 2 * 64 * 9) + T * D * 64 * 64
    block = (T + 1) * D * (3 * D + D + 2 * hidden) + 2 * (T + 1) ** 2 * D
    macs = stem + depth * block + (1 + T) * D * 1000
    assert training_flops(model, size) == 6 * macs
    if published:
        assert macs / 1e9 == pytest.approx(published, abs=0.005)


@pytest.mark.parametrize(
    ("name", "kwargs"), [("cait_xxs24_224", dict(depth=1)), ("pit_ti_224", dict(depth=(1, 1, 1)))]
)
def test_flops_of_models_with_separate_class_token(name, kwargs):
    """PyTorch's counter hooks the gradient of such a token, which has no autograd function."""
    with meta_device():
        model = timm.create_model(name, **kwargs)
    assert training_flops(model, 224) > 6e7


def test_saved_bytes_match_count_by_hand():
    """5 samples: the input, for the gradient of the first weight, and the output of ReLU.

    The latter is used for its own gradient and that of the second weight, and counts once.
    """
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    saved = ActivationBytes(model)
    with saved:
        out = model(torch.randn(5, 4))
    assert saved.bytes == 4 * (5 * 4 + 5 * 8)
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_saved_bytes_exclude_weights_and_duplicates():
    model, x = nn.Linear(16, 16, bias=False), torch.randn(3, 16, requires_grad=True)
    saved = ActivationBytes(model)
    with saved:
        (model(x) + model(x.view(3, 16))).sum()
    assert saved.bytes == 4 * 3 * 16


def test_peak_rate_is_that_of_the_data_sheet(monkeypatch):
    for name, peak in {
        "NVIDIA H200 141GB HBM3e": 989e12,
        "NVIDIA H200 NVL": 835e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H100 NVL": 835e12,
        "NVIDIA L40S-48C": 362e12,
        "Tesla V100-PCIE-32GB": 112e12,
        "Tesla V100-SXM2-32GB": 125e12,
        "NVIDIA GeForce RTX 4090": None,
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(torch.device("cuda"), torch.bfloat16) == peak
        assert peak_flops(torch.device("cuda"), torch.float32) is None
    assert peak_flops(CPU, torch.float32) is None
    status = Path("/proc/self/status").read_text()
    peak = 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])
    # The kernel updates the two counts of pages at different times.
    assert peak_memory(CPU) == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize(
    "fields",
    [dict(sizes=((0, 32), (1, 48))), dict(drloc="l1", drloc_grid=2), SHARED_AGENT],
    ids=["two sizes", "drloc", "bootstrap"],
)
def test_mfu_is_the_share_of_the_peak_of_all_devices(micro, tmp_path, monkeypatch, fields):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    config, ranks = micro(tmp_path, **fields), Ranks(0, 4, torch.device("cuda"))
    with meta_device():
        model = model_for(config)
        _, spec = build_model(config.model, config.data, objective_for(config), 2)
    shares = flops_shares(spec, objective_for(config), 2, 1, ranks, torch.bfloat16)
    for side, share in zip(config.data.sides, shares.values(), strict=True):
        own = training_flops(model, side) / (4 * 989e12)
        # Bootstrapping trains an agent beside the model.
        assert share > own if "bootstrap" in fields else share == own


def test_a_run_on_a_cpu_has_no_mfu(micro, tmp_path):
    """It would be the share of a rate that other processes change: 125 % was seen."""
    training.train(micro(tmp_path / "run", epochs=1))
    # The first step has no rate.
    lines = records(tmp_path / "run")[1:]
    assert all(line["images_per_s"] > 0 and "mfu" not in line for line in lines)
    report(Report(runs=(tmp_path / "run",)))
    text = (tmp_path / "run" / "report.html").read_text()
    row = re.search(r"<td>[\d,]+</td><td>(.*?)</td>\n<td>\d+ s</td>", text)
    assert row[1] == "–"


class PretendedGpu:
    """A host with a clock, and a GPU that begins to be free at some time."""

    def __init__(self, monkeypatch):
        self.now = self.free = 0.0
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream):
                self.time = max(gpu.now, gpu.free)

            def query(self):
                return self.time <= gpu.now

            def elapsed_time(self, later):
                return 1000 * (later.time - self.time)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: gpu.now))

    def load(self, count, seconds):
        for number in range(count):
            self.now += seconds
            yield number

    def step(self, seconds):
        self.free = max(self.now, self.free) + seconds


@pytest.mark.parametrize(
    ("device", "loading", "waited"),
    # The first step of 10 s waits for its batch, the other three only for a slower loader.
    [("cuda", 4, 4), ("cuda", 12, 12 + 3 * 2), ("cpu", 4, 4 * 4)],
)
def test_outside_a_wait_for_data_is_that_of_the_device(monkeypatch, device, loading, waited):
    """The host waits for a batch while a GPU computes the step before it."""
    gpu = PretendedGpu(monkeypatch)
    clock = RunClock(0, np.zeros(2), torch.device(device))
    for _ in clock.time_data(gpu.load(4, loading)):
        gpu.step(10)
    gpu.now = gpu.free
    assert clock.total().tolist() == pytest.approx([gpu.free, waited])
    steps, seconds, shown = clock.interval(4)
    assert (steps, seconds, shown) == pytest.approx((4, gpu.free, waited))
    clock.restart(4)
    assert clock.interval(4) == (0, 0, 0)


def test_outside_a_busy_machine_is_told_when_training_starts(micro, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.getloadavg", lambda: (1e4, 0.0, 0.0))
    training.train(micro(tmp_path / "run", dry_run=True))
    assert capsys.readouterr().err.count("load average 10000.0 on ") == 1


def test_dry_run_writes_nothing_and_is_short(micro, tmp_path, capsys):
    began = time.process_time()  # wall-clock time depends on other processes
    assert training.train(micro(tmp_path / "run", dry_run=True)) == {}
    assert time.process_time() - began < 10
    assert (
        "fit together, 11 training and 5 validation images, trained and evaluated at 32 px; loss "
        in capsys.readouterr().out
    )
    assert list(tmp_path.iterdir()) == []
    training.train(micro(tmp_path / "run", dry_run=True, maps_on_device=True, compile="whole"))
    assert (
        "gradients, moments, all score maps and 4 images per forward pass take about"
        in capsys.readouterr().out
    )
    training.train(micro(tmp_path / "run", epochs=1))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for resume in ("auto", "never"):
        training.train(micro(tmp_path / "run", epochs=1, dry_run=True, resume=resume))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("split", ["train", "val"])
def test_outside_dry_run_names_empty_files(micro, folder, tmp_path, split, capsys):
    """Those of the last images, which the dry run does not decode."""
    data = shutil.copytree(folder, tmp_path / "images")
    files = sorted((data / split).rglob("*.jpg"))
    for path in files[-2:]:
        path.write_bytes(b"")
    fields = dict(objective="ce", mixtoken=False, loader="folder", dry_run=True)
    config = with_options(micro(tmp_path / "run", **fields), data=data, val=data)
    fault = f"2 of {len(files)} image files are empty (0 bytes), the first is {files[-2]}; "
    with pytest.raises(UserError, match="^" + re.escape(fault + "replace or remove them, or give")):
        training.train(config)
    training.train(with_options(config, on_bad_sample="skip"))
    assert f"warning: {fault}they are skipped\n" in capsys.readouterr().err


def test_dry_run_raises_the_errors_of_a_run(micro, tmp_path):
    with pytest.raises(UserError, match="pit_ti_224: its features are the class token alone"):
        training.train(micro(tmp_path / "run", dry_run=True, model="pit_ti_224"))
    with pytest.raises(UserError, match="cannot be divided into parts of 3 images"):
        training.train(micro(tmp_path / "run", dry_run=True, microbatch=3))


def test_dry_run_error_if_memory_is_too_small(micro, tmp_path, monkeypatch):
    """The error names the largest part of the batch that fits, and that part does fit."""
    monkeypatch.setattr(dry_run, "free_memory", lambda device: 10_000_000)
    with pytest.raises(
        UserError,
        match=r"64 images per forward pass take about 0\.\d\d GB .* 0\.01 GB .*--microbatch",
    ) as raised:
        training.train(micro(tmp_path / "run", batch=64, dry_run=True))
    fits = int(str(raised.value).rpartition(" ")[2])
    assert 64 % fits == 0
    assert training.train(micro(tmp_path / "run", batch=64, microbatch=fits, dry_run=True)) == {}
    with pytest.raises(UserError, match="images per forward pass take about"):
        training.train(micro(tmp_path / "run", batch=64, microbatch=2 * fits, dry_run=True))


def test_outside_dry_run_counts_copies_of_weights_once(micro, tmp_path, capsys):
    """Autocast's copies of 8 million weights are 17 MB, whatever the number of images."""
    needed = {}
    for precision in ("fp32", "bf16"):
        fields = dict(model="lvvit_t", batch=64, precision=precision, dry_run=True)
        training.train(micro(tmp_path / "run", **fields))
        found = re.search(r"take about ([\d.]+) GB", capsys.readouterr().out)
        needed[precision] = float(found[1])
    # With the copies in each of 64 images it was half a gigabyte more than float32.
    assert needed["bf16"] < needed["fp32"]


def test_outside_dry_run_bytes_do_not_depend_on_its_number_of_images(micro, tmp_path):
    config = micro(tmp_path / "run", model="lvvit_t", precision="bf16")
    run = setup_run(config, ALONE)
    with closing(run.loader), closing(run.val):
        _, kept, per_image = dry_run.first_loss(run, 2)
        _, _, other = dry_run.first_loss(run, 8)
    weights = sum(p.numel() for p in run.student.trainable.parameters())
    assert kept == pytest.approx(2 * weights, rel=0.1)
    assert per_image == pytest.approx(other, rel=0.02)


MEASURED = r"""
import json, os, re, sys

import densefeed.train as training
import torch
from densefeed.training.config import Config

torch.set_num_threads(1)
grown, update = [], training.update

def measured(*arguments):
    held = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    open("/proc/self/clear_refs", "w").write("5")  # resets the peak
    given = update(*arguments)
    peak = int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) * 1024
    grown.append((peak - held) / 1e9)
    return given

training.update = measured
training.train(Config.from_dict(json.loads(sys.argv[1])))
print(json.dumps(grown))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="not Linux")
def test_dry_run_estimate_matches_a_step(micro, tmp_path, command, capsys):
    """Growth of a process in its first step, within a factor of 1.5.

    16 images of 96 pixels (0.2 GB).
    """
    config = micro(
        tmp_path / "run", model="lvvit_t", size=96, batch=16, epochs=1, eval_every=9, ema=0.0
    )
    training.train(with_options(config, dry_run=True))
    estimate = float(re.search(r"take about ([\d.]+) GB", capsys.readouterr().out)[1])
    done = command("-c", MEASURED, json.dumps(config.to_dict()))
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])[0]
    assert 1 / 1.5 < estimate / measured < 1.5, (estimate, measured)


FAULTS = """
import resource, sys
import torch
from densefeed.system.malloc import set_malloc, tune_malloc
if sys.argv[1] == "kept":
    tune_malloc()
for number in range(15):
    if number == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2**20 * size) for size in (1, 3, 9, 17)]  # 4 to 68 MiB
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
def test_freed_memory_is_reused(command):
    """Five times the same 120 MiB: 30,720 pages of 4 KiB each time if memory were returned."""
    faults = {how: int(command("-c", FAULTS, how).stdout) for how in ("kept", "left")}
    assert faults["kept"] < 250
    assert faults["left"] > 2.5 * 30_720 * 17 / 30

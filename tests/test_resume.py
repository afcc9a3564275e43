"""No run is ever lost: stopped, killed or damaged anywhere, it goes on as if nothing had happened."""

import json
import math
from contextlib import contextmanager
from pathlib import Path

import densefeed.train as training
import pytest
import torch
from densefeed.models import checkpoints

TIMINGS = {"images_per_s", "mfu", "data_wait_share", "peak_memory_gb"}
# Everything that a step depends on: two sizes, two parts a batch, every kind of draw, log lines that end in another epoch.
EVERYTHING = dict(
    rand_augment="rand-m9-mstd0.5-inc1", erase_probability=0.5, erase_count=2, microbatch=2, clip_grad=0.5, sizes=((0, 16), (1, 32)),
    log_every=4,
)  # fmt: skip


@pytest.fixture
def one_thread():
    """Sums in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def records(out: Path) -> list[dict]:
    """What metrics.jsonl says, but for what depends on the clock."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in TIMINGS} for line in lines]


def differences(one: object, other: object, path: str = "") -> list[str]:
    """Where two checkpoints differ, to the bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        missing = [f"{path}/{name}" for name in one.keys() ^ other.keys()]
        return missing + [d for name in one.keys() & other.keys() for d in differences(one[name], other[name], f"{path}/{name}")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [path]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [d for at, (a, b) in enumerate(zip(one, other, strict=True)) for d in differences(a, b, f"{path}/{at}")]
    return [] if one == other else [path]


def state(out: Path) -> dict:
    """The newest checkpoint but for the config, whose `out` and `resume` differ."""
    return {name: value for name, value in checkpoints.load(out / "last.pt").items() if name != "config"}


def stopped_after(steps: int):
    """In place of `stopping`: asks for a stop after so many steps of this process, and goes on asking."""

    @contextmanager
    def stopping():
        asks = iter(range(1, 10**9))
        yield lambda: "SIGTERM" if next(asks) >= steps else ""

    return stopping


@pytest.mark.parametrize(
    "fields",
    [
        EVERYTHING,
        dict(objective="ce", mixtoken=False, cutmix=1.0, mixup=0.8, precision="fp16", log_every=2, eval_every=2),
        dict(objective="relabel", precision="bf16", views=2, epochs=1, order="blocks", labels_on_device=True, ema=0.0),
    ],
    ids=["everything", "fp16", "bf16"],
)
def test_a_run_stopped_after_every_step_is_the_uninterrupted_one(micro, tmp_path, monkeypatch, one_thread, fields):
    """Six processes of a step each against one of six: records, weights, averages, moments and loss scale to the bit."""
    whole = training.train(micro(tmp_path / "whole", **fields))
    with monkeypatch.context() as patch:
        patch.setattr(training, "stopping", stopped_after(1))
        for step in range(1, 6):
            assert training.train(micro(tmp_path / "cut", resume="auto", **fields)) == {}
            assert checkpoints.load(tmp_path / "cut" / "last.pt")["step"] == step
        result = training.train(micro(tmp_path / "cut", resume="auto", **fields))
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    assert all(math.isfinite(r.get("loss", 0.0)) for r in records(tmp_path / "whole"))
    assert differences(state(tmp_path / "cut"), state(tmp_path / "whole")) == []
    assert result["top1"] == whole["top1"]
    if fields.get("precision") == "fp16":
        assert state(tmp_path / "whole")["scaler"]["scale"] > 0

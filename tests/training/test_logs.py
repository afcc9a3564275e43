"""Logs: truncation on resume, valid JSON, and one Weights & Biases run per run folder."""

import json
import math

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import densefeed.train as training
from densefeed.training.config import RunOptions
from densefeed.training.logs import describe_result, open_log, truncate_metrics

from ..runs import records


def read_records(out):
    return [
        json.loads(line, parse_constant=pytest.fail)
        for line in (out / "metrics.jsonl").read_text().splitlines()
    ]


def write_log(out, *records, step=0, steps=10, project="", evaluated=True):
    options = RunOptions(out=out, wandb=project)
    with open_log(options, {"seed": 0}, step, steps, evaluated) as log:
        for kind, at, values in records:
            log.write(kind, at, at / 4, values)
            log.advance(1)


def test_resume_drops_records_of_repeated_steps(tmp_path):
    write_log(
        tmp_path,
        *(("train", at, {"loss": at / 2}) for at in range(1, 6)),
        ("val", 5, {"top1": 0.5}),
    )
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 6, "lo')  # killed in the middle of a line
    write_log(tmp_path, ("train", 4, {"loss": 7.0}), step=3)
    assert [(r["step"], r["loss"]) for r in read_records(tmp_path)] == [
        (1, 0.5),
        (2, 1.0),
        (3, 1.5),
        (4, 7.0),
    ]
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("train/loss")][-1] == (4, 7.0)


def test_accuracy_is_kept_unless_evaluated_again(tmp_path):
    """A run killed after its last step is only evaluated, and writes its line again."""
    records = ("train", 5, {"loss": 1.0}), ("val", 5, {"top1": 0.5})
    write_log(tmp_path, *records)
    write_log(tmp_path, step=5, steps=10)
    assert [r["kind"] for r in read_records(tmp_path)] == ["train", "val"]
    write_log(tmp_path, ("val", 5, {"top1": 0.5}), step=5, steps=5, evaluated=False)
    assert [r["kind"] for r in read_records(tmp_path)] == ["train", "val"]
    truncate_metrics(4, tmp_path / "nothing.jsonl")  # a folder without records is valid
    assert not (tmp_path / "nothing.jsonl").exists()


def test_damaged_line_is_dropped_with_a_warning(tmp_path, capsys):
    write_log(tmp_path, ("train", 1, {"loss": 1.0}))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write("garbage\n[1]\n")
    write_log(tmp_path, ("train", 2, {"loss": 0.5}), step=1)
    assert [r["step"] for r in read_records(tmp_path)] == [1, 2]
    assert capsys.readouterr().err.count("dropping a damaged line") == 2


RECORD = b'{"kind": "train", "step": 1, "epoch": 0.5, "loss": 2}'
DAMAGED = {
    b"[" * 60_000: "it is nested too deeply",
    RECORD.replace(b"2}", b"NaN}"): "NaN is not a finite number",
    RECORD.replace(b"2}", b"7" * 5000 + b"}"): "an integer of 5,000 digits",
    RECORD.replace(b"2}", b"true}"): "'loss' is not a number",
    RECORD.replace(b"2}", b'"2"}'): "'loss' is not a number",
    RECORD.replace(b": 1,", b": 1.5,"): "its kind is not a text, or its step not an integer",
    RECORD.replace(b'"train"', b"[]"): "its kind is not a text, or its step not an integer",
    RECORD.replace(b'"epoch": 0.5, ', b""): "it is not an object with kind, step and epoch",
    RECORD.replace(b"loss", b"\xff"): "can't decode byte",
    b" " * 200_000: "Expecting value",
}


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
def test_any_damage_of_a_line_is_a_warning(tmp_path, capsys, line):
    path = tmp_path / "metrics.jsonl"
    # The last line is incomplete, as after a kill.
    path.write_bytes(RECORD + b"\n" + line + b"\n" + RECORD + b"\n" + RECORD)
    truncate_metrics(9, path)
    assert path.read_bytes() == (RECORD + b"\n") * 2
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: dropping a damaged line of {path} (line 2: ")
    assert DAMAGED[line] in warning
    assert warning.count("\n") == 1


def test_json_has_no_nan(tmp_path):
    write_log(tmp_path, ("train", 1, {"loss": math.nan, "grad_norm": math.inf, "lr": 0.5}))
    assert read_records(tmp_path) == [{"kind": "train", "step": 1, "epoch": 0.25, "lr": 0.5}]


def test_wandb_keeps_one_run_id_on_resume(tmp_path, monkeypatch, command):
    """Offline, in a separate process: its files hold the data to send as uncompressed records."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    program = f"""
import time
from pathlib import Path
from densefeed.training.config import RunOptions
from densefeed.training.logs import open_log
options = RunOptions(out=Path({str(tmp_path / "run")!r}), wandb="densefeed")
for step, loss in ((0, 0.515625), (1, 0.265625)):
    with open_log(options, dict(seed=0), step, 2) as log:
        log.write("train", step + 1, 1.0, dict(loss=loss))
    time.sleep(1.1)  # W&B names the offline folder by the second
"""
    (tmp_path / "run").mkdir()
    done = command("-c", program)
    assert done.returncode == 0, done.stderr
    identity = (tmp_path / "run" / "wandb-id").read_text()
    sent = [
        path.read_bytes()
        for path in sorted((tmp_path / "run").glob(f"wandb/offline-run-*-{identity}/*.wandb"))
    ]
    assert len(sent) == 2
    for content, loss in zip(sent, (b"0.515625", b"0.265625"), strict=True):
        assert identity.encode() in content
        assert b"train/loss" in content
        assert loss in content


def test_the_result_says_how_many_images_were_evaluated():
    result = {"top1": 0.5, "seconds": 3.2, "images": 1059, "unreadable": 0, "skipped": 0}
    assert describe_result(result, "top1") == "top-1 50.0 % on 1,059 images, 3 s"
    assert describe_result(result | {"top1_ema": 0.625}, "top1").startswith(
        "top-1 50.0 %, EMA 62.5 % on"
    )
    result |= {"images": 52, "unreadable": 7, "skipped": 3}
    assert describe_result(result, "top1") == (
        "top-1 50.0 % on 52 of 59 images, 3 s; 7 unreadable images were not evaluated; skipped 3 "
        "unreadable training samples"
    )
    result |= {"unreadable": 1, "skipped": 1}
    assert describe_result(result, "top1").endswith(
        "; 1 unreadable image was not evaluated; skipped 1 unreadable training sample"
    )


def test_a_metric_of_ones_own_rates_a_run():
    result = {"margin": 0.5, "margin_ema": 0.25, "seconds": 3, "images": 5, "unreadable": 0}
    line = describe_result(result | {"skipped": 0}, "margin")
    assert line == "margin 50.0 %, EMA 25.0 % on 5 images, 3 s"


def test_tensorboard_keeps_the_last_records_before_a_stop(tmp_path):
    """They are at the step that a resumed run begins with, and are not written again."""
    write_log(tmp_path, ("train", 4, {"loss": 1.0}), ("val", 4, {"top1": 0.5}))
    write_log(tmp_path, ("train", 8, {"loss": 2.0}), ("val", 8, {"top1": 0.6}), step=4)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    for name in ("train/loss", "val/top1"):
        assert [event.step for event in board.Scalars(name)] == [4, 8], name


def test_outside_a_short_run_has_a_line_at_least_each_epoch(micro, tmp_path):
    """Two epochs of three steps. The losses are means of those that a line for each step has."""
    for name, every in (("each", 1), ("two", 2), ("rare", 1000)):
        training.train(micro(tmp_path / name, log_every=every))
    each, two, rare = (records(tmp_path / name) for name in ("each", "two", "rare"))
    assert [line["step"] for line in each] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in two] == [1, 2, 4, 6]
    assert [line["step"] for line in rare] == [1, 3, 6]
    losses = [line["loss"] for line in each]
    want = losses[0], np.mean(losses[1:3]), np.mean(losses[3:])
    np.testing.assert_allclose([line["loss"] for line in rare], want, rtol=1e-6)
    # The first step compiles and allocates, so it has no rate.
    assert ["images_per_s" in line for line in rare] == [False, True, True]

"""Small runs of the targets benchmark: both contestants give the same loss, and the results are
computed and written correctly.
"""

import csv
import json

import pytest
import torch

from benchmarks.targets import (
    TargetBenchmark,
    backward_sync,
    dense_loss,
    drop_gradients,
    main,
    make_step,
    peak_bytes,
    train_loss,
)
from densefeed.system.errors import UserError

CPU = torch.device("cpu")


def small(**options):
    sizes = {"batch": 5, "classes": 30, "grid": 4, "side": 6, "top_k": 3, "palette": 8}
    return TargetBenchmark(**{**sizes, "device": "cpu", "rounds": 2, "record": False, **options})


def test_sparse_and_dense_give_the_same_loss_and_gradient():
    step = make_step(small(batch=17), CPU)
    assert {float(turned) for turned in step.batch.view[:, 0, 0].sign()} == {-1.0, 1.0}
    results = []
    for loss in (train_loss, dense_loss):
        drop_gradients(step)
        value = loss(step)
        value.backward()
        results.append((value.detach(), step.cls.grad, step.tokens.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_document_and_csv_rows(tmp_path, capsys):
    out, results = tmp_path / "out.json", tmp_path / "results.csv"
    # 17 images take two slices of the reference.
    main(small(batch=17, rounds=1, json=out, record=True, results=results))
    document = json.loads(out.read_text())
    names = ["sparse / dense, time", "sparse / dense, memory"]
    assert [ratio["name"] for ratio in document["ratios"]] == names
    assert 0 <= document["loss_rel_error"] < 2e-6
    assert 0 <= document["grad_abs_error"] < 1e-7
    rows = list(csv.DictReader(results.open()))
    assert [(row["name"], row["unit"], row["runs"]) for row in rows] == [
        ("targets sparse", "images/s", "1"),
        ("targets dense", "images/s", "1"),
        ("targets sparse", "MB", "3"),
        ("targets dense", "MB", "3"),
        ("targets sparse / dense, time", "ratio", "1"),
        ("targets sparse / dense, memory", "ratio", "3"),
    ]
    for row in rows:
        assert float(row["p25"]) <= float(row["median"]) <= float(row["p75"])
    assert float(rows[4]["median"]) == pytest.approx(
        float(rows[1]["median"]) / float(rows[0]["median"]), rel=1e-4
    )
    assert float(rows[5]["median"]) == pytest.approx(
        float(rows[2]["median"]) / float(rows[3]["median"]), rel=1e-4
    )
    printed = capsys.readouterr().out
    assert "17 images, 30 classes, grid 4, maps of 6 x 6 cells of 3 of 8 classes; CPU" in printed
    assert "required 1 / 5, goal 1 / 8" in printed


def test_compare_head(tmp_path, capsys, monkeypatch):
    """The head has enough classes for its logits, 1.6 MB, to be most of the memory; the fused
    head's chunks are a sixth of that.
    """
    monkeypatch.setattr("densefeed.models.kernels.fused_head.CHUNK_BYTES", 2**18)
    document = main(small(compare="head", classes=5000, width=8, json=tmp_path / "out.json"))
    names = ["fused / whole, time", "fused / whole, memory"]
    assert [ratio["name"] for ratio in document["ratios"]] == names
    assert document["ratios"][1]["median"] < 1
    assert 0 <= document["loss_rel_error"] < 2e-6
    assert 0 <= document["grad_abs_error"] < 1e-7
    assert "tokens of 8; CPU" in capsys.readouterr().out


def test_peak_memory_excludes_the_final_gradients():
    """Three buffers of known size are allocated, two of them alive at once, and gradients."""
    step = make_step(small(), CPU)

    def loss(step):
        first = torch.zeros(1_000_000)
        second = first + 1
        del first
        third = second + 1
        return step.cls.sum() + step.tokens.sum() + third[0] * 0

    assert 8e6 <= peak_bytes(loss, step) < 8.1e6
    big = step._replace(tokens=torch.zeros(1000, 1000, requires_grad=True))
    # Its gradient alone has 4 MB.
    assert peak_bytes(lambda step: step.cls.sum() + step.tokens.sum(), big) < 0.1e6
    # A product also holds a copy of its gradient's size.
    assert 4e6 <= peak_bytes(lambda step: step.cls.sum() + (step.tokens * 2).sum(), big) < 8.1e6


def test_drop_gradients():
    step = make_step(small(), CPU)
    assert backward_sync(train_loss, step) == 5
    assert step.tokens.grad.abs().sum() > 0
    drop_gradients(step)
    assert step.tokens.grad is step.cls.grad is None


def test_invalid_options_raise():
    for options, words in [
        ({"grid": 0}, "--grid is 0, and must be at least 1"),
        ({"top_k": 9}, "--top-k, --palette and --classes must ascend"),
        ({"palette": 31}, "must ascend"),
        ({"classes": 2**16 + 1}, "at most 65,536 classes"),
        ({"threads": 999}, r"--threads 999: this process may use \d+ cores"),
    ]:
        with pytest.raises(UserError, match=words):
            main(small(**options))


def test_outside_compare_masks(tmp_path, capsys):
    """PyTorch's dense loss of pixels in float64 is the reference: loss and gradient agree."""
    out = tmp_path / "out.json"
    # Dense targets have 1.2 MB an image, so they are most of the memory.
    main(small(compare="masks", batch=2, grid=100, bits=32, rounds=1, json=out))
    document = json.loads(out.read_text())
    assert 0 <= document["loss_rel_error"] < 2e-6
    assert 0 <= document["grad_abs_error"] < 1e-7
    assert [row["name"] for row in document["ratios"]] == [
        "stripes / dense, time",
        "stripes / dense, memory",
    ]
    assert "required 1 / 20" in capsys.readouterr().out
    with pytest.raises(UserError, match="--bits is that of --compare masks"):
        main(small(bits=16))

"""The benchmark of whole trainings: rows, comparisons, and what a second call does."""

import csv
import io
import json
import subprocess
import sys
from contextlib import redirect_stdout

import pytest

from benchmarks import trainings
from benchmarks.trainings import TrainingsBenchmark, main, parse_training, write_options
from densefeed.system.commands import call
from densefeed.system.errors import UserError

NAME = "lvvit_micro_token_label"
SMALL = "size=32,batch=4,epochs=1,warmup_epochs=0,threads=1,log_every=1"


@pytest.fixture
def calls(monkeypatch):
    """The commands that were run: in this process, because an import of PyTorch takes seconds."""
    done = []

    def run(words, **how):
        done.append(words)
        monkeypatch.setattr(sys, "argv", sys.argv)
        with redirect_stdout(io.StringIO()) as out:
            try:
                code = call(*map(str, words)) or 0
            except SystemExit as error:
                code = error.code or 0
        return subprocess.CompletedProcess(words, code, out.getvalue())

    monkeypatch.setattr(trainings, "run", run)
    return done


@pytest.fixture
def benchmark(packed, tmp_path):
    def make(*trainings, **options):
        paths = dict(data=packed[0], val=packed[1], out=tmp_path / "runs")
        paths |= dict(results=tmp_path / "rows.csv", curves=tmp_path / "curves.jsonl")
        return TrainingsBenchmark(
            trainings=trainings, device="cpu", options=SMALL, **paths, **options
        )

    return make


def rows(benchmark):
    found = csv.DictReader(benchmark.results.open())
    return {row["name"].removeprefix(f"training {NAME},"): float(row["median"]) for row in found}


@pytest.mark.slow
def test_outside_trainings_have_rows_at_once_and_finished_ones_are_not_repeated(benchmark, calls):
    """The second one fails, and neither stops the third nor takes the first one's rows."""
    names = f"{NAME},seed=0", f"{NAME},seed=x", f"{NAME},seed=1"
    one = benchmark(*names, dry_run=True, equal=True)
    with pytest.raises(SystemExit, match="1"):
        main(one)
    found = rows(one)
    assert not any(name.startswith("seed=x") for name in found)
    log = [json.loads(line) for line in one.curves.read_text().splitlines()]
    losses = {
        seed: [r["loss"] for r in log if r["training"] == f"{NAME},{seed}" and r["kind"] == "train"]
        for seed in ("seed=0", "seed=1")
    }
    for seed, values in losses.items():
        assert found[f"{seed}, last loss"] == pytest.approx(values[-1], rel=1e-5)
        assert found[f"{seed}, speed"] > 0
        peak, estimate = found[f"{seed}, peak memory"], found[f"{seed}, dry run's memory"]
        assert found[f"{seed}, dry run's / peak memory"] == pytest.approx(estimate / peak, rel=1e-4)
    far = abs(losses["seed=1"][-1] / losses["seed=0"][-1] - 1)
    assert found["seed=1, loss's difference"] == pytest.approx(far, rel=1e-4)
    assert "seed=0, loss's difference" not in found

    calls.clear()
    main(benchmark(names[0], names[2], equal=True))
    assert (rows(one), calls) == (found, [])


def test_outside_options_of_a_training_are_those_of_the_command(benchmark):
    word = f"{NAME},multi_scale=48 64,sizes=,maps_on_device=True,mixtoken=False,size=64"
    recipe, options = parse_training(benchmark(word), word)
    assert recipe == NAME
    text = " ".join(write_options(options | {"data": "d", "val": "v"}))
    assert text == (
        "--loader ffcv --data d --val v --device cpu --size 64 --batch 4 --epochs 1 "
        "--warmup-epochs 0 --threads 1 --log-every 1 --multi-scale 48 64 --sizes "
        "--maps-on-device --no-mixtoken"
    )
    with pytest.raises(UserError, match="'64' of the trainings is not NAME=VALUE, as epochs=2"):
        parse_training(benchmark(), f"{NAME},multi_scale=48,64")


def test_nothing_is_compared_with_a_first_training_that_failed(benchmark, calls):
    names = f"{NAME},seed=x", f"{NAME},seed=0", f"{NAME},seed=1"
    one = benchmark(*names, equal=True)
    with pytest.raises(SystemExit, match="1"):
        main(one)
    found = rows(one)
    assert "seed=0, last loss" in found
    assert not [name for name in found if "difference" in name]

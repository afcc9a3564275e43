"""Advice in small: the decision against hand counts, the words against train.py itself, and one
whole run.
"""

import json
import shlex
from pathlib import Path

import pytest

from benchmarks.loaders import Benchmark, main
from densefeed import train
from densefeed.system.errors import UserError
from densefeed.tools import advise
from densefeed.tools.advise import (
    Candidate,
    Request,
    Speed,
    recipe_of,
    sentence,
    thread_counts,
    together,
)


def test_a_training_is_as_fast_as_its_slower_half_or_as_the_cores_allow():
    gpu = Speed(6000, 1.0)
    assert together(Speed(4000, 1.0), gpu, 16) == 4000  # one core decodes 4,000
    assert together(Speed(8000, 2.0), gpu, 16) == 6000
    # On two cores, both of which a step of 10 images/s fills: 0.2 s of an image for the step,
    # 0.0005 s for the loader.
    assert together(Speed(4000, 2.0), Speed(10, 2.0), 2) == pytest.approx(2 / (0.2 + 0.0005))
    # Alike and each on all cores: half.
    assert together(Speed(100, 2.0), Speed(100, 2.0), 2) == pytest.approx(50)
    # as a clock that saw no processor time would have it
    assert together(Speed(100, 0.0), Speed(50, 0.0), 2) == 50


def ladder(loader, rate, cost, threads=(1, 2, 4, 8)):
    """A loader that scales, with `cost` cores a thread."""
    return [Candidate(loader, n, Speed(rate * n, cost * n)) for n in threads]


@pytest.mark.parametrize(
    ("step", "cores", "choice", "rate", "bottleneck"),
    [
        (Speed(6000, 1.0), 16, ("ffcv", 2), 6000, "step"),  # a GPU: 4,000 a thread, so two feed it
        (Speed(3950, 1.0), 16, ("ffcv", 1), 3950, "step"),
        (Speed(90_000, 1.0), 16, ("ffcv", 8), 32_000, "loader"),  # none is enough: the fastest
        # 1 % less than eight threads give, and half the threads
        (Speed(16_100, 1.0), 16, ("ffcv", 4), 16_000, "loader"),
        (Speed(10, 2.0), 2, ("ffcv", 1), 2 / (0.2 + 1 / 4000), "step"),  # a CPU: any will do
    ],
)
def test_the_fewest_threads_that_are_as_fast_as_any(step, cores, choice, rate, bottleneck):
    candidates = ladder("folder", 2300, 1.0) + ladder("ffcv", 4000, 1.0)
    for order in (candidates, candidates[::-1]):
        advice = advise.advise(order, step, cores)
        assert (advice.choice[:2], advice.bottleneck) == (choice, bottleneck)
        assert advice.images_per_s == pytest.approx(rate)


def test_alike_but_for_processor_time_the_cheaper_one():
    thrifty, lavish = Candidate("ffcv", 1, Speed(4000, 0.5)), Candidate("dali", 1, Speed(4000, 1.0))
    assert advise.advise([lavish, thrifty], Speed(1000, 1.0), 16).choice == thrifty


def test_thread_counts():
    assert [thread_counts(cores) for cores in (1, 2, 6, 16)] == [
        (1,),
        (1, 2),
        (1, 2, 4, 6),
        (1, 2, 4, 8, 16),
    ]


@pytest.mark.parametrize(
    ("model", "objective", "size", "words"),
    [
        ("lvvit_s", "token-label", 224, "lvvit_s_224_token_label"),
        ("lvvit_l", "token-label", 288, "lvvit_l_288_token_label"),
        ("lvvit_s", "token-label", 256, "lvvit_s_224_token_label --size 256"),
        ("lvvit_m", "ce", 224, "lvvit_m_224_standard"),
        ("deit_small_patch16_224", "ce", 224, "deit_s_224"),
        ("resnet50", "ce", 224, "lvvit_t_224_standard --model resnet50"),
        (
            "resnet50",
            "relabel",
            160,
            "lvvit_t_224_relabel --model resnet50 --no-mixtoken --size 160",
        ),
    ],
)
def test_the_words_are_a_training_of_that_model(model, objective, size, words, monkeypatch):
    assert " ".join(recipe_of(model, objective, size)) == words
    request = Request("my data/*.beton", "maps.h5", model, 64, size, (1, 2), 2)
    advice = advise.advise(ladder("ffcv", 4000, 1.0, (1, 2)), Speed(6000, 0.1), 2)
    said = sentence(advice, Speed(6000, 0.1), request, objective)
    asked = []
    monkeypatch.setattr(train, "train", asked.append)
    monkeypatch.setattr("sys.argv", shlex.split(said.split("`")[1])[1:])
    train.main()
    (config,) = asked
    assert (config.model, config.objective, config.size, config.loader, config.threads) == (
        model,
        objective,
        size,
        "ffcv",
        2,
    )
    assert (str(config.data), str(config.labels), str(config.val)) == (
        "my data/*.beton",
        "maps.h5",
        "VAL",
    )
    assert not config.mixtoken or model.startswith("lvvit")


@pytest.mark.parametrize(
    ("loader", "packed", "remedy"),
    [
        ("folder", False, "pack the images with"),
        ("dali", False, "pack the images with"),
        ("dali", True, "pack them smaller"),
        ("ffcv", True, "pack them smaller"),
    ],
)
def test_a_slow_loader_comes_with_a_remedy(tmp_path, loader, packed, remedy):
    request = Request(Path("x-*.beton") if packed else tmp_path, None, "lvvit_s", 64, 224, (1,), 2)
    step = Speed(6000, 0.1)
    said = sentence(advise.advise(ladder(loader, 1000, 1.0, (1,)), step, 2), step, request, "ce")
    assert f"the loader is the bottleneck (1,000 images/s alone, the step 6,000): {remedy}" in said


@pytest.mark.parametrize(
    ("load", "said"),
    [(1.9, ""), (2.1, "Other processes kept 2.1 of 4 cores busy before this began; ")],
)
def test_a_busy_machine_is_said_to_be_one(load, said, monkeypatch):
    monkeypatch.setattr(advise.os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert advise.busy_note(4).startswith(said)
    assert bool(advise.busy_note(4)) == bool(said)


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(advise, "SECONDS", 0.02)


def advised(data, tmp_path, **options):
    small = {
        "model": "lvvit_micro",
        "batch": 4,
        "size": 32,
        "threads": (1, 2),
        "json": tmp_path / "advice.json",
    }
    return main(Benchmark(advise=True, data=data, **(small | options)))


def test_its_words_run(packed, tmp_path, hasty, capsys, command):
    document = advised(packed[0], tmp_path)
    said = capsys.readouterr().out
    assert json.loads((tmp_path / "advice.json").read_text()) == document
    measured = [(line["loader"], line["threads"]) for line in document["loaders"]]
    assert measured[:2] == [("ffcv", 1), ("ffcv", 2)]  # a --loader dali would follow
    assert "--loader folder: left out" in said
    for line in document["loaders"]:
        assert 0 < line["training"] <= min(line["images_per_s"], document["step"]["images_per_s"])
    assert (document["step"]["objective"], document["data"]) == (
        "token-label",
        "11 images, with dense labels",
    )
    assert document["advice"] in said.replace("\n", " ")
    words = shlex.split(document["advice"].split("`")[1])[1:]
    words = [{"VAL": packed[1], "RUN": tmp_path / "run"}.get(word, word) for word in words]
    done = command(*words, "--batch", 4, "--dry-run")
    assert done.returncode == 0, done.stderr


def test_a_folder_with_maps_beside_it_or_without(folder, maps, tmp_path, hasty):
    document = advised(folder, tmp_path, labels=maps, model="resnet10t", threads=(1,))
    assert document["step"]["objective"] == "relabel"
    assert f"--loader folder --data {folder} --labels {maps} --threads 1" in document["advice"]
    assert advised(folder, tmp_path, threads=(1,))["step"]["objective"] == "ce"


def test_requests_without_sense_are_refused(packed, tmp_path):
    with pytest.raises(UserError, match=r"--advise is about a data set of yours; give --data"):
        advised(None, tmp_path)
    with pytest.raises(UserError, match=r"--labels and --model go with --advise"):
        main(Benchmark(labels=tmp_path / "maps.h5"))
    with pytest.raises(UserError, match=r"nowhere"):
        advised(tmp_path / "nowhere.beton", tmp_path)

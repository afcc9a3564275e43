"""Advice: the choice against hand counts, the command line against train.py, and whole runs."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from timm.utils import ModelEmaV3

from densefeed import train
from densefeed.pipelines.augment.augmentation import Augmentation
from densefeed.step import Step
from densefeed.system.errors import UserError
from densefeed.tools import advise
from densefeed.tools.advise import (
    AdviceOptions,
    Candidate,
    Throughput,
    choose,
    choose_training,
    combine,
    make_config,
    recommend,
    thread_counts,
)
from densefeed.training import compile
from densefeed.training.monitor import TrainMonitor

CPU = torch.device("cpu")


def test_a_training_is_as_fast_as_its_slower_half_or_as_the_cores_allow():
    gpu = Throughput(6000, 1.0)
    assert combine(Throughput(4000, 1.0), gpu, 16) == 4000  # one core decodes 4,000
    assert combine(Throughput(8000, 2.0), gpu, 16) == 6000
    # On two cores, both busy with a step of 10 images/s: an image takes 0.2 core seconds in the
    # step and 0.0005 in the loader.
    assert combine(Throughput(4000, 2.0), Throughput(10, 2.0), 2) == pytest.approx(
        2 / (0.2 + 0.0005)
    )
    # Equal rates, each on all cores: half.
    assert combine(Throughput(100, 2.0), Throughput(100, 2.0), 2) == pytest.approx(50)
    # A coarse clock may count no processor time at all.
    assert combine(Throughput(100, 0.0), Throughput(50, 0.0), 2) == 50


def scaling(loader, rate, cores, threads=(1, 2, 4, 8)):
    """A loader with linear scaling: `rate` images/s and `cores` cores per thread."""
    return [Candidate(loader, n, Throughput(rate * n, cores * n)) for n in threads]


@pytest.mark.parametrize(
    ("step", "cores", "choice", "rate", "bottleneck"),
    [
        (Throughput(6000, 1.0), 16, ("ffcv", 2), 6000, "step"),  # a GPU: two suffice
        (Throughput(3950, 1.0), 16, ("ffcv", 1), 3950, "step"),
        (Throughput(90_000, 1.0), 16, ("ffcv", 8), 32_000, "loader"),  # none suffices: the fastest
        # 1 % less than eight threads give, with half the threads
        (Throughput(16_100, 1.0), 16, ("ffcv", 4), 16_000, "loader"),
        (Throughput(10, 2.0), 2, ("ffcv", 1), 2 / (0.2 + 1 / 4000), "step"),  # a CPU: any suffices
    ],
)
def test_the_choice_has_the_fewest_threads_of_the_fastest(step, cores, choice, rate, bottleneck):
    candidates = scaling("folder", 2300, 1.0) + scaling("ffcv", 4000, 1.0)
    for order in (candidates, candidates[::-1]):
        advice = choose(order, step, cores)
        assert (advice.choice[:2], advice.bottleneck) == (choice, bottleneck)
        assert advice.images_per_s == pytest.approx(rate)


def test_of_equal_rates_and_threads_the_choice_uses_less_processor_time():
    thrifty, lavish = (
        Candidate("ffcv", 1, Throughput(4000, 0.5)),
        Candidate("dali", 1, Throughput(4000, 1.0)),
    )
    assert choose([lavish, thrifty], Throughput(1000, 1.0), 16).choice == thrifty


def test_thread_counts():
    assert [thread_counts(cores) for cores in (1, 2, 6, 16)] == [
        (1,),
        (1, 2),
        (1, 2, 4, 6),
        (1, 2, 4, 8, 16),
    ]


def get_sections(config):
    """Return what decides the work of a step."""
    run = config.run.precision, config.run.compile
    parts = config.model, config.augment, config.mix, config.labels, config.objective, config.optim
    data = config.data
    return *parts, run, data.size, data.sizes, data.repeats, data.maps_on_device


@pytest.mark.parametrize(
    ("model", "objective", "size", "words"),
    [
        ("lvvit_s", "token-label", 224, "lvvit_s_224_token_label"),
        ("lvvit_l", "token-label", 288, "lvvit_l_288_token_label"),
        ("lvvit_s", "token-label", 256, "lvvit_s_224_token_label --size 256"),
        ("lvvit_m", "ce", 224, "lvvit_s_224_standard --model lvvit_m"),
        ("deit_small_patch16_224", "ce", 224, "deit_s_224"),
        ("resnet50", "ce", 224, "lvvit_s_224_standard --model resnet50"),
        (
            "resnet50",
            "relabel",
            160,
            "lvvit_s_224_relabel --model resnet50 --no-mixtoken --size 160",
        ),
        # No recipe of fine-tuning, which needs a checkpoint.
        ("lvvit_s", "token-label", 384, "lvvit_s_224_token_label --size 384"),
        ("vgg11", "ce", 224, "lvvit_s_224_standard --model vgg11 --drop-path 0.0"),
    ],
)
def test_the_recommended_command_trains_that_model(model, objective, size, words, monkeypatch):
    options = AdviceOptions(
        data=Path("my data/*.beton"),
        score_maps=Path("maps.h5"),
        model=model,
        size=size,
        threads=(1, 2),
        max_pixels=10**8,
    )
    advice = choose(scaling("ffcv", 4000, 1.0, (1, 2)), Throughput(6000, 0.1), 2)
    training = choose_training(options, objective)
    assert " ".join(training.words) == words
    text = recommend(advice, Throughput(6000, 0.1), options, training)
    configs = []
    monkeypatch.setattr(train, "train", configs.append)
    # Every call makes all recipes that the command line has.
    name = words.split()[0]
    monkeypatch.setattr(train, "RECIPES", {name: train.RECIPES[name]})
    monkeypatch.setattr("sys.argv", shlex.split(text.split("`")[1])[1:])
    train.main()
    (config,) = configs
    measured = make_config(options, "ffcv", training, on_gpu=True)
    assert get_sections(measured) == get_sections(config)
    data = config.data
    trained = config.model.name, config.objective.name, data.size
    assert trained == (model, objective, size)
    assert (data.loader, data.threads, data.max_pixels) == ("ffcv", 2, 10**8)
    assert (str(data.train), str(data.score_maps)) == ("my data/*.beton", "maps.h5")
    assert str(data.val) == "VAL"
    assert not config.mix.mixtoken or model.startswith("lvvit")


@pytest.mark.parametrize(
    ("loader", "packed", "planes", "remedy"),
    [
        ("folder", False, 0, "pack the images with tools/pack_dataset.py, or"),
        ("dali", False, 0, "pack the images with tools/pack_dataset.py, or"),
        ("dali", True, 2**31, "pack them smaller"),
        # Planes or raw pixels already.
        ("ffcv", True, 0, "pack them smaller"),
        ("ffcv", True, 2**31, "pack the images with tools/pack_dataset.py --form planes"),
    ],
)
def test_a_slow_loader_comes_with_a_remedy(tmp_path, loader, packed, planes, remedy):
    options = AdviceOptions(data=Path("x-*.beton") if packed else tmp_path)
    step = Throughput(6000, 0.1)
    training = choose_training(options, "ce")
    advice = choose(scaling(loader, 1000, 1.0, (1,)), step, 2)
    text = recommend(advice, step, options, training, planes)
    assert f"the loader is the bottleneck (1,000 images/s alone, the step 6,000): {remedy}" in text
    assert ("their 2.0 GiB fit in memory" in text) == ("--form planes" in text)


@pytest.mark.parametrize(
    ("load", "warning"),
    [(1.9, ""), (2.1, "Other processes used 2.1 of 4 cores before the measurement started; ")],
)
def test_a_busy_machine_gets_a_warning(load, warning, monkeypatch):
    monkeypatch.setattr(advise.os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert advise.describe_load(4).startswith(warning)
    assert bool(advise.describe_load(4)) == bool(warning)


@pytest.fixture
def short_measurements(monkeypatch):
    monkeypatch.setattr(advise, "SECONDS", 0.02)


@pytest.fixture
def events(monkeypatch):
    """What happens in a step, in order, with the options that decide its cost."""
    seen = []

    def spy(owner, name, describe):
        function = getattr(owner, name)

        def recorded(*arguments, **options):
            seen.append((name, *describe(*arguments)))
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, recorded)

    def describe_forward(_objective, network, batch, _context, dtype):
        layout = network.stem[0].weight.is_contiguous(memory_format=torch.channels_last)
        return len(batch.image), layout, network.training, dtype

    spy(compile, "step_loss", describe_forward)
    for module in (train, advise):
        spy(module, "compile_step", lambda mode, *_: [mode])
    spy(Augmentation, "__call__", lambda _, batch, plan: [len(batch.image), batch.image.dtype])
    spy(torch.nn.utils, "clip_grads_with_norm_", lambda _parameters, most, _norm: [most])
    spy(ModelEmaV3, "update", lambda *_: [])
    spy(TrainMonitor, "add", lambda *_: [])
    return seen


def test_the_step_does_what_the_loop_of_a_training_does(micro, tmp_path, events):
    """Copies of the batch, augmentation, microbatches, autocast, layout, clipping, EMA, the sum of
    losses.
    """
    fields = dict(clip_grad=1.0, precision="bf16", rand_augment="rand-m9-mstd0.5-inc1")
    config = micro(tmp_path / "run", batch=8, microbatch=4, epochs=2, eval_every=9, **fields)
    # A training of 11 images has two steps per epoch.
    train.train(config)
    want = list(events)
    events.clear()
    step = advise.build_step(config, CPU)
    assert [step() for _ in range(4)] == [8] * 4
    assert events == want
    names = [name for name, *_ in want]
    assert [names.count(name) for name in ("__call__", "step_loss", "update", "add")] == [
        4,
        8,
        4,
        4,
    ]
    assert names.count("clip_grads_with_norm_") == 4


def test_augmentation_draws_anew_in_each_step(micro, tmp_path, monkeypatch):
    images, losses = [], Step.losses

    def record(self, network, batch):
        images.append(batch.image)
        return losses(self, network, batch)

    monkeypatch.setattr(Step, "losses", record)
    step = advise.build_step(micro(tmp_path, rand_augment="rand-m9-mstd0.5-inc1"), CPU)
    step()
    step()
    first, second = images
    assert first.shape == second.shape
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("given", "on_gpu", "on_cpu"),
    [((0, 0), (1024, 0), (8, 8)), ((6, 0), (6, 0), (6, 0)), ((64, 16), (64, 16), (16, 8))],
)
def test_on_a_cpu_the_step_has_fewer_images(tmp_path, given, on_gpu, on_cpu):
    """Batch and microbatch. Of several microbatches two are left, to include accumulation."""
    options = AdviceOptions(data=tmp_path, batch=given[0], microbatch=given[1])
    training = choose_training(options, "token-label")
    measured = [make_config(options, "folder", training, gpu).optim for gpu in (True, False)]
    assert [(optim.batch, optim.microbatch) for optim in measured] == [on_gpu, on_cpu]


def test_a_gpu_is_waited_for_once_per_measurement(short_measurements):
    """The loop of a training does not wait between steps."""
    waits, turns = [], []
    advise.measure_speed(lambda: turns.append(1) or 1, lambda: waits.append(len(turns)))
    assert waits == [len(turns)]
    assert len(turns) > 1


def small(data, tmp_path, **options):
    fields = {"model": "lvvit_micro", "batch": 4, "size": 32, "threads": (1, 2)}
    return AdviceOptions(data=data, json=tmp_path / "advice.json", **(fields | options))


def test_the_recommended_command_runs(packed, tmp_path, short_measurements, capsys, command):
    document = advise.main(small(packed[0], tmp_path))
    printed = capsys.readouterr().out
    assert json.loads((tmp_path / "advice.json").read_text()) == document
    measured = [(line["loader"], line["threads"]) for line in document["loaders"]]
    assert measured[:2] == [("ffcv", 1), ("ffcv", 2)]  # --loader dali follows where it is installed
    assert "--loader folder: skipped" in printed
    for line in document["loaders"]:
        assert 0 < line["training"] <= min(line["images_per_s"], document["step"]["images_per_s"])
    assert document["step"]["objective"] == "token-label"
    assert document["data"] == "11 images, with score maps"
    assert document["advice"] in printed.replace("\n", " ")
    words = shlex.split(document["advice"].split("`")[1])[1:]
    words = [{"VAL": packed[1], "RUN": tmp_path / "run"}.get(word, word) for word in words]
    done = command("-m", "densefeed", *words, "--dry-run")
    assert done.returncode == 0, done.stderr


def test_a_folder_with_and_without_score_maps(folder, maps, tmp_path, short_measurements):
    options = small(folder, tmp_path, score_maps=maps, model="resnet10t", threads=(1,))
    document = advise.main(options)
    assert document["step"]["objective"] == "relabel"
    assert f"--loader folder --data {folder} --score-maps {maps} --threads 1" in document["advice"]
    document = advise.main(small(folder, tmp_path, threads=(1,)))
    assert document["step"]["objective"] == "ce"


def test_the_recommended_command_is_printed_as_it_is(folder, tmp_path, short_measurements, capsys):
    odd = tmp_path / ":smiley:[red]"
    odd.symlink_to(folder)
    document = advise.main(small(odd, tmp_path, threads=(1,)))
    assert str(odd) in document["advice"]
    assert document["advice"] in capsys.readouterr().out


def test_the_command_needs_data(command, tmp_path):
    done = command("tools/advise.py", "--model", "lvvit_micro")
    assert done.returncode == 2
    assert "--data" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": (advise.CORES + 1,)}, "--threads must be from 1 to"),
        ({"threads": (0,)}, "--threads must be from 1 to"),
        ({"size": 0}, "--size is 0, and must be at least 1"),
        ({"batch": -1}, "--batch is -1, and must be at least 0"),
        ({}, r"nowhere\.beton: there is no such file; make it with tools/pack_dataset"),
    ],
)
def test_invalid_options_are_refused(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        advise.main(small(tmp_path / "nowhere.beton", tmp_path, **options))

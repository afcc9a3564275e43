"""Advice: the choice against hand counts, the command line against train.py, and whole runs."""

import shlex
from pathlib import Path

import pytest
import torch
from timm.utils import ModelEmaV3

from densefeed import train
from densefeed.pipelines.augment.augmentation import Augmentation
from densefeed.recipes import command_line
from densefeed.step import Step
from densefeed.system.errors import UserError
from densefeed.system.options import with_options
from densefeed.tools import advise
from densefeed.tools.advise import Candidate, Throughput, choose, combine, recommend, thread_counts
from densefeed.training import compile
from densefeed.training.config import Config
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


RECIPE = "lvvit_s_224_token_label"


def test_the_recommended_command_trains_what_was_given(monkeypatch):
    words = [RECIPE, "--data", "my data/*.beton", "--score-maps", "maps.h5", "--size", "256"]
    advice = choose(scaling("ffcv", 4000, 1.0, (1, 2)), Throughput(6000, 0.1), 2)
    configs = []
    monkeypatch.setattr(train, "train", configs.append)
    # Every call makes all recipes that the command line has.
    monkeypatch.setattr(command_line, "RECIPES", {RECIPE: command_line.RECIPES[RECIPE]})
    for given, val, out in (
        ([], Path("VAL"), "RUN"),
        (["--val", "v", "--out", "o"], Path("v"), "o"),
        (["--val-fraction", "0.2"], None, "RUN"),
    ):
        text = recommend(advice, Throughput(6000, 0.1), [*words, *given], packed=True)
        recommended = shlex.split(text.split("`")[1])
        assert recommended[:2] == ["densefeed", "train"]
        monkeypatch.setattr("sys.argv", recommended[1:])
        train.main()
        monkeypatch.setattr("sys.argv", ["advise", *words, *given])
        measured = command_line.read_config("", out=Path("RUN"))
        assert configs.pop() == with_options(measured, loader="ffcv", threads=2, val=val)
        assert str(measured.run.out) == out


@pytest.mark.parametrize(
    ("loader", "packed", "planes", "remedy"),
    [
        ("folder", False, 0, "pack the images with densefeed pack, or"),
        ("dali", False, 0, "pack the images with densefeed pack, or"),
        ("dali", True, 2**31, "pack them smaller"),
        # Planes or raw pixels already.
        ("ffcv", True, 0, "pack them smaller"),
        ("ffcv", True, 2**31, "pack the images with densefeed pack --form planes"),
    ],
)
def test_a_slow_loader_comes_with_a_remedy(loader, packed, planes, remedy):
    step = Throughput(6000, 0.1)
    advice = choose(scaling(loader, 1000, 1.0, (1,)), step, 2)
    text = recommend(advice, step, [RECIPE], packed, planes)
    assert f"the loader is the bottleneck (1,000 images/s alone, the step 6,000): {remedy}" in text
    assert ("their 2.0 GiB fit in memory" in text) == ("--form planes" in text)


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
    ("given", "on_cpu"), [((1024, 1024), (8, 8)), ((6, 6), (6, 6)), ((64, 16), (16, 8))]
)
def test_on_a_cpu_the_step_has_fewer_images(given, on_cpu):
    """Batch and microbatch. Of several microbatches two are left, to include accumulation."""
    config = with_options(Config(), batch=given[0], microbatch=given[1])
    optim = advise.shrink_batch(config).optim
    assert (optim.batch, optim.microbatch) == on_cpu


def test_a_gpu_is_waited_for_once_per_measurement(short_measurements):
    """The loop of a training does not wait between steps."""
    waits, turns = [], []
    advise.measure_speed(lambda: turns.append(1) or 1, lambda: waits.append(len(turns)))
    assert waits == [len(turns)]
    assert len(turns) > 1


@pytest.fixture
def run(monkeypatch, short_measurements):
    """Run the command with these words; return what was measured."""
    monkeypatch.setattr(advise, "thread_counts", lambda _: (1, 2))

    def run_words(*words):
        names = [word for word in words if str(word).startswith("lvvit_micro")]
        chosen = {name: command_line.RECIPES[name] for name in names}
        monkeypatch.setattr(command_line, "RECIPES", chosen)
        monkeypatch.setattr("sys.argv", ["densefeed advise", *map(str, words)])
        return advise.main()

    return run_words


SMALL = "--batch", "4", "--size", "32"


def test_the_recommended_command_runs(packed, tmp_path, run, capsys, command):
    document = run("lvvit_micro_token_label", "--data", packed[0], *SMALL)
    printed = capsys.readouterr().out
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


def test_a_folder_with_and_without_score_maps(folder, maps, run):
    words = "--data", folder, "--score-maps", maps, *SMALL
    document = run("lvvit_micro_relabel", *words)
    assert document["step"]["objective"] == "relabel"
    assert document["data"] == "11 images, with score maps"
    assert "--loader folder --threads" in document["advice"]


def test_the_recommended_command_is_printed_as_it_is(folder, tmp_path, run, capsys):
    odd = tmp_path / ":smiley:[red]"
    odd.symlink_to(folder)
    document = run("lvvit_micro_ce", "--data", odd, *SMALL)
    assert document["step"]["objective"] == "ce"
    assert str(odd) in document["advice"]
    assert document["advice"] in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_needs_a_recipe_and_data(command):
    done = command("tools/advise.py", "lvvit_micro_ce")
    assert done.returncode == 2
    assert "--data" in done.stderr
    done = command("tools/advise.py", "--data", "x.beton")
    assert done.returncode == 2
    assert "not a recipe" in done.stderr


def test_data_that_no_loader_reads_is_refused(tmp_path, run):
    with pytest.raises(UserError, match=r"there is no such file; make it with densefeed pack"):
        run("lvvit_micro_ce", "--data", tmp_path / "nowhere.beton", *SMALL)

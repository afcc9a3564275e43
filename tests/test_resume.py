"""Resuming: a run that was stopped, killed or damaged anywhere continues to the same result."""

import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import densefeed.step
import densefeed.train as training
from densefeed.models import checkpoints
from densefeed.system.errors import UserError
from densefeed.system.options import with_options
from densefeed.training import monitor
from densefeed.training.guards import STOPPING, NonFiniteGuard

from .runs import mark_slow, stopped_after, train_loader

ROOT = Path(__file__).parent.parent
KILLS = int(os.environ.get("SOAK_KILLS", 3))
pytestmark = pytest.mark.usefixtures("one_thread")
TIMINGS = {"images_per_s", "mfu", "data_wait_share", "peak_memory_gb"}
# Everything that a step depends on: four image shapes, two microbatches per batch, every kind of
# random draw, log intervals that cross epochs.
EVERYTHING = dict(
    rand_augment="rand-m9-mstd0.5-inc1",
    erase_probability=0.5,
    microbatch=2,
    clip_grad=0.5,
    multi_scale=(48, 64),
    aspects=(0.75, 4 / 3),
    side_multiple=8,
    log_every=4,
)


def records(out: Path) -> list[dict]:
    """Read metrics.jsonl without the fields that depend on the clock."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in TIMINGS} for line in lines]


def differences(one: object, other: object, path: str = "") -> list[str]:
    """Return the paths at which two checkpoints are not exactly equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        missing = [f"{path}/{name}" for name in one.keys() ^ other.keys()]
        return missing + [
            d
            for name in one.keys() & other.keys()
            for d in differences(one[name], other[name], f"{path}/{name}")
        ]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [path]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            d
            for at, (a, b) in enumerate(zip(one, other, strict=True))
            for d in differences(a, b, f"{path}/{at}")
        ]
    return [] if one == other else [path]


def state(out: Path) -> dict:
    """Load the newest checkpoint without the fields that may differ between equal runs.

    These are the config (its `out` and `resume`), the time spent, and the accuracies of older
    checkpoints.
    """
    other = ("config", "spent", "accuracies")
    return {
        name: value
        for name, value in checkpoints.load(out / "last.pt").items()
        if name not in other
    }


SPARSE = dict(
    model="bootstrapping_vit_s_sparse",
    model_kwargs=("depth=2",),
    objective="ce",
    mixtoken=False,
    drop_path=0.1,
)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "fp16"])
def test_sparse_attention_resumes_to_the_bit(micro, tmp_path, monkeypatch, precision):
    """Learned exponents, their moments and their EMA included; of fp16 the scale too."""
    fields = SPARSE | dict(precision=precision)
    training.train(micro(tmp_path / "whole", **fields))
    with monkeypatch.context() as patch:
        patch.setattr(training, "signal_handler", stopped_after(2))
        training.train(micro(tmp_path / "cut", **fields))
    assert checkpoints.load(tmp_path / "cut" / "last.pt")["step"] == 2
    training.train(micro(tmp_path / "cut", resume="auto", **fields))
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    whole = state(tmp_path / "whole")
    assert differences(state(tmp_path / "cut"), whole) == []
    exponents = [v for k, v in whole["model"].items() if "alpha" in k]
    assert len(exponents) == 2
    assert all(map(bool, exponents))
    assert bool(whole["scaler"]) == (precision == "fp16")


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        EVERYTHING,
        dict(
            objective="ce",
            mixtoken=False,
            cutmix=1.0,
            mixup=0.8,
            precision="fp16",
            log_every=2,
            eval_every=2,
        ),
        dict(
            objective="relabel",
            precision="bf16",
            repeats=2,
            epochs=1,
            order="blocks",
            maps_on_device=True,
            ema=0.0,
        ),
        dict(optimizer="sgd", sam_rho=0.1, microbatch=2, precision="fp16", decay_all=True),
    ],
    ids=["everything", "fp16", "bf16", "sam"],
)
def test_run_stopped_after_every_step_equals_the_uninterrupted_one(
    micro, tmp_path, monkeypatch, fields
):
    """Compare six runs of one step each with one run of six steps.

    Records, weights, EMA weights, optimizer moments and loss scale are exactly equal.
    """
    whole = training.train(micro(tmp_path / "whole", **fields))
    with monkeypatch.context() as patch:
        patch.setattr(training, "signal_handler", stopped_after(1))
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


SEGMENT = {
    "segment": dict(objective="segment", microbatch=2, zoom_out=0.5, rand_augment="rand-m9"),
    "segment-soft": dict(objective="segment-soft", color_jitter=(0.4,), ema=0.0),
    "scales": dict(objective="segment", eval_scales=(0.5, 1.0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("fields", SEGMENT.values(), ids=list(SEGMENT))
def test_segmentation_resumes_to_the_bit(segments, tmp_path, monkeypatch, fields):
    """After a step of the first epoch, and after one of the second."""
    training.train(segments(tmp_path / "whole", **fields))
    for steps in (2, 4):
        with monkeypatch.context() as patch:
            patch.setattr(training, "signal_handler", stopped_after(steps))
            training.train(segments(tmp_path / "cut", resume="auto", **fields))
    assert checkpoints.load(tmp_path / "cut" / "last.pt")["step"] == 5
    result = training.train(segments(tmp_path / "cut", resume="auto", **fields))
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    assert differences(state(tmp_path / "cut"), state(tmp_path / "whole")) == []
    assert 0 < result["miou"] < 1


DETECT = {
    "parts": dict(microbatch=2, zoom_out=0.5, rand_augment="rand-m9"),
    "sam": dict(color_jitter=(0.4,), ema=0.0, sam_rho=0.05),
    "bf16": dict(precision="bf16", on_nonfinite="skip"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fields", DETECT.values(), ids=list(DETECT))
def test_detection_resumes_to_the_bit(detects, tmp_path, monkeypatch, fields):
    """Boxes are sampled by torch's generator, which a resumed run seeds as an uncut one."""
    training.train(detects(tmp_path / "whole", **fields))
    for steps in (2, 3):
        with monkeypatch.context() as patch:
            patch.setattr(training, "signal_handler", stopped_after(steps))
            training.train(detects(tmp_path / "cut", resume="auto", **fields))
    assert checkpoints.load(tmp_path / "cut" / "last.pt")["step"] == 4
    result = training.train(detects(tmp_path / "cut", resume="auto", **fields))
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    assert differences(state(tmp_path / "cut"), state(tmp_path / "whole")) == []
    assert 0 <= result["map_box"] < 1


# ------------------------------------------------------------------------- Kills


TRAIN = """
import json, sys, torch
from densefeed.train import train
from densefeed.training.config import Config
torch.set_num_threads(1)
train(Config.from_dict(json.loads(sys.argv[1])))
"""


@pytest.fixture
def training_of(command):
    """A maker of processes that train with a config."""
    return lambda config: command.start("-c", TRAIN, json.dumps(config.to_dict()))


def assert_whole(out: Path) -> int:
    """Check that all checkpoints of the manifest and all links load and match their checksums.

    Returns the step of the newest checkpoint, or 0.
    """
    manifest = out / "checkpoints" / "manifest.json"
    entries = json.loads(manifest.read_text()) if manifest.exists() else []
    for entry in entries:
        content = (out / "checkpoints" / entry["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["sha256"]
        assert (
            torch.load(out / "checkpoints" / entry["file"], weights_only=True)["step"]
            == entry["step"]
        )
    for link in (out / "last.pt", out / "best.pt"):
        if link.is_symlink():
            torch.load(link, weights_only=True)
    return entries[-1]["step"] if entries else 0


@pytest.mark.slow
def test_run_killed_at_random_times_loses_only_unsaved_steps(micro, tmp_path, training_of):
    """Send SIGKILL repeatedly until the run finishes; `make soak` kills 20 times."""
    fields = dict(epochs=3, save_every=2, keep=1, ema=0.0)
    began = time.monotonic()
    with training_of(micro(tmp_path / "whole", **fields)) as whole:
        complaints = whole.communicate()[1]
        assert whole.returncode == 0, complaints
    lasts, seed = time.monotonic() - began, 0 if KILLS == 3 else int.from_bytes(os.urandom(4))
    print(f"seed {seed}, a run lasts {lasts:.1f} s")
    draws, kills, rounds, cut = random.Random(seed), 0, 0, tmp_path / "cut-0"
    while kills < KILLS:
        with training_of(micro(cut, resume="auto", **fields)) as child:
            with suppress(subprocess.TimeoutExpired):
                child.wait(draws.uniform(0.1, 0.9) * lasts)
            child.kill()
            child.wait()
        killed = child.returncode == -signal.SIGKILL
        kills += killed
        step = assert_whole(cut)
        logged = [r["step"] for r in records(cut)] if (cut / "metrics.jsonl").exists() else []
        assert step >= max(logged, default=0) - fields["save_every"]
        if not killed:  # it finished first
            assert child.returncode == 0
            assert_equal(cut, tmp_path / "whole")
            rounds += 1
            cut = tmp_path / f"cut-{rounds}"
    # Files that a kill leaves in rare cases.
    for left in (cut / "config.json.1.part", cut / "checkpoints" / "step-00000001.pt.1.part"):
        left.parent.mkdir(parents=True, exist_ok=True)
        left.write_text("{")
    training.train(micro(cut, resume="auto", **fields))
    assert_equal(cut, tmp_path / "whole")


def assert_equal(cut: Path, whole: Path) -> None:
    """Check that a finished run equals the uninterrupted one and left no partial files."""
    assert records(cut) == records(whole)
    assert differences(state(cut), state(whole)) == []
    assert not list(cut.rglob("*.part"))
    results = [json.loads((out / "result.json").read_text()) for out in (cut, whole)]
    assert results[0]["top1"] == results[1]["top1"]


def test_run_killed_after_its_last_checkpoint_records_its_accuracy_once(micro, tmp_path):
    training.train(micro(tmp_path / "run", epochs=1))
    before = records(tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    training.train(micro(tmp_path / "run", epochs=1, resume="auto"))
    assert records(tmp_path / "run") == before


# ------------------------------------------------------------------------- Signals


@pytest.mark.parametrize("number", STOPPING)
def test_signal_saves_after_the_step_and_prints_how_to_resume(
    micro, tmp_path, monkeypatch, capsys, number
):
    """Send it twice during step 2 of 6: torchrun forwards signals that Slurm also sends."""
    update = training.update

    def signalled(student, ranks, step, losses):
        for _ in range(2 if step == 1 else 0):
            os.kill(os.getpid(), number)
        return update(student, ranks, step, losses)

    monkeypatch.setattr(training, "update", signalled)
    before = signal.getsignal(number)
    assert training.train(micro(tmp_path / "run")) == {}
    assert signal.getsignal(number) == before
    assert (
        "stopped after step 2 of 6, all saved; the same command with --resume auto continues"
        in capsys.readouterr().out
    )
    assert checkpoints.load(tmp_path / "run" / "last.pt")["step"] == 2
    assert not (tmp_path / "run" / "result.json").exists()


def test_second_interrupt_exits_immediately(micro, tmp_path, monkeypatch, capsys):
    """The exit code is 130, in the middle of step 5; earlier checkpoints are kept."""
    update = training.update

    def interrupted(student, ranks, step, losses):
        for _ in range(2 if step == 4 else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return update(student, ranks, step, losses)

    monkeypatch.setattr(training, "update", interrupted)
    monkeypatch.setattr("densefeed.training.guards.ECHO", 0.0)
    with pytest.raises(SystemExit) as ended:
        training.errors.run(lambda: training.train(micro(tmp_path / "run")))
    assert ended.value.code == 130
    assert "interrupted" in capsys.readouterr().err
    assert assert_whole(tmp_path / "run") == 3


def words(config, *more: object) -> list[object]:
    """Return the command line of a run."""
    return [
        ROOT / "train.py",
        "lvvit_micro_token_label",
        "--loader",
        "ffcv",
        "--data",
        config.data.train,
        "--val",
        config.data.val,
        "--out",
        config.run.out,
        "--batch",
        4,
        "--size",
        32,
        "--log-every",
        1,
        "--device",
        "cpu",
        "--threads",
        1,
        "--resume",
        "auto",
        *more,
    ]


def test_command_exits_with_0_after_a_signal(micro, tmp_path, command):
    config = micro(tmp_path / "run")
    with command.start(
        *words(config, "--epochs", 5000, "--eval-every", 5000), cwd=tmp_path
    ) as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while process.poll() is None and not (
            metrics.exists() and len(metrics.read_text().splitlines()) > 3
        ):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "all saved; the same command with --resume auto continues" in out
    assert assert_whole(tmp_path / "run") == records(tmp_path / "run")[-1]["step"]


# ------------------------------------------------------------------------- Damage


# One block instead of four: checkpoints are loaded some ten times in each test.
SAVED = dict(save_every=1, keep=9, model_kwargs=("depth=1",))


@pytest.fixture(scope="module")
def finished(micro, tmp_path_factory, one_thread) -> Path:
    """Two epochs of three steps, all six checkpoints kept."""
    out = tmp_path_factory.mktemp("finished") / "run"
    training.train(micro(out, **SAVED))
    return out


@pytest.fixture(scope="module")
def stopped_once(micro, tmp_path_factory, one_thread) -> Path:
    """The same run, stopped after step 5."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as patch:
        # it is asked once more where an epoch ends
        patch.setattr(training, "signal_handler", stopped_after(6))
        training.train(micro(out, **SAVED))
    assert assert_whole(out) == 5
    return out


@pytest.fixture
def stopped(finished, stopped_once, tmp_path) -> Path:
    """A copy of the stopped run."""
    return shutil.copytree(stopped_once, tmp_path / "run", symlinks=True)


def damaged(path: Path, harm: str) -> None:
    content = path.read_bytes()
    if harm == "deleted":
        path.unlink()
    elif harm == "flipped":
        path.write_bytes(content[:1000] + bytes([content[1000] ^ 64]) + content[1001:])
    else:
        path.write_bytes(content[: len(content) // 2] if harm == "cut" else b"{]")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("what", "harm"),
    [
        ("step-00000005.pt", "cut"),
        ("step-00000005.pt", "flipped"),
        pytest.param("step-00000005.pt", "deleted", marks=pytest.mark.slow),
        pytest.param("manifest.json", "cut", marks=pytest.mark.slow),
        pytest.param("manifest.json", "deleted", marks=pytest.mark.slow),
        ("manifest.json", "garbage"),
        ("both", "cut"),
    ],
)
def test_damaged_run_resumes_from_the_newest_valid_checkpoint(
    micro, finished, stopped, capsys, what, harm
):
    """The result equals that of the undamaged run."""
    names = ("step-00000005.pt", "manifest.json") if what == "both" else (what,)
    for name in names:
        damaged(stopped / "checkpoints" / name, harm)
    training.train(micro(stopped, resume="auto", **SAVED))
    said = capsys.readouterr()
    assert all(
        any(line.startswith("warning: ") and name in line for line in said.err.splitlines())
        for name in names
    )
    assert f"continuing at step {5 if what == 'manifest.json' else 4}" in said.out
    assert records(stopped) == records(finished)
    assert differences(state(stopped), state(finished)) == []
    assert assert_whole(stopped) == 6
    assert (stopped / "best.pt").resolve().name == (finished / "best.pt").resolve().name


@pytest.mark.slow
def test_the_resumed_run_does_not_keep_a_damaged_checkpoint(micro, tmp_path, monkeypatch):
    """A signal saves step 5, which no later save repeats. Step 3 is the best valid one."""
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(training, "signal_handler", stopped_after(6))
        training.train(micro(out))
    damaged(out / "checkpoints" / "step-00000005.pt", "cut")
    training.train(micro(out, resume="auto"))
    manifest = json.loads((out / "checkpoints" / "manifest.json").read_text())
    assert [entry["step"] for entry in manifest] == [3, 6]
    assert assert_whole(out) == 6


def refused(done: subprocess.CompletedProcess) -> str:
    """Return the only error line of a command that exits with 2."""
    assert done.returncode == 2, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    return error


def test_error_if_all_checkpoints_are_damaged(micro, stopped, command):
    for path in (stopped / "checkpoints").glob("step-*.pt"):
        damaged(path, "cut")
    done = command(*words(micro(stopped)))
    assert (
        refused(done)
        == f"error: no checkpoint in {stopped}/checkpoints can be read; copy them again, "
        "or choose another --out"
    )


@pytest.mark.slow
def test_full_disk_keeps_the_previous_checkpoint(micro, stopped, command):
    """A limit of 2 MB per file, less than a checkpoint, stands for a full disk."""
    given = "--epochs", 2, "--drop-path", 0.2, "--ema", 0.9, "--mixtoken"
    given += "--model-kwargs", *SAVED["model_kwargs"]
    done = command(*words(micro(stopped), *given), limit=2_000_000)
    assert f"{stopped}/checkpoints/step-00000006.pt: the file grew past the limit" in refused(done)
    assert not list(stopped.rglob("*.part"))
    assert assert_whole(stopped) == 5


# ------------------------------------------------------------------------- Guards


def poisoned(monkeypatch, *steps: int) -> list[dict]:
    """Make the loss of these steps (from 0) infinite; collect the weights before each step."""
    update, seen = training.update, []

    def spoilt(student, ranks, step, losses):
        seen.append(
            {name: parameter.clone() for name, parameter in student.model.named_parameters()}
        )
        bad = [lambda loss=loss: loss() * math.inf for loss in losses] if step in steps else losses
        return update(student, ranks, step, bad)

    monkeypatch.setattr(training, "update", spoilt)
    return seen


def test_nonfinite_step_stops_the_run_and_changes_no_weight(micro, tmp_path, monkeypatch):
    """The log line two steps later detects it and names the step.

    The newest checkpoint is still that of the previous epoch.
    """
    seen = poisoned(monkeypatch, 3)
    with pytest.raises(
        UserError,
        match=r"run: the gradients of step 4 are not finite; .*lower --lr, or give --clip-grad 1",
    ):
        training.train(micro(tmp_path / "run", log_every=6, microbatch=2))
    assert len(seen) == 6
    saved = checkpoints.load(tmp_path / "run" / "last.pt")
    assert saved["step"] == 3
    for weights in seen[3:]:
        assert all(torch.equal(saved["model"][name], tensor) for name, tensor in weights.items())


def test_the_cause_of_a_bad_step_is_found_by_doing_it_again(micro, tmp_path, monkeypatch):
    """A sample whose pixels are spoilt: the step, its samples and the first tensor."""
    augmented = densefeed.step.augment_batches

    def spoilt(batches, augmentation, device):
        for batch in augmented(batches, augmentation, device):
            bad = (batch.index == 7) & (batch.epoch == 1)
            yield batch._replace(image=torch.where(bad[:, None, None, None], math.nan, batch.image))

    monkeypatch.setattr(densefeed.step, "augment_batches", spoilt)
    plan = train_loader(micro(tmp_path / "run")).plan
    index = plan.rank_rows(1)[0]
    at = int((index == 7).any(1).argmax())
    with pytest.raises(UserError) as error:
        training.train(micro(tmp_path / "run"))
    assert f"step {3 + at + 1} are not finite; the output of stem.0 (Conv2d) is the first" in str(
        error.value
    )
    samples = ", ".join(map(str, index[at].tolist()))
    assert f"with samples {samples} ..." in str(error.value)


def test_skipped_steps_are_counted_and_their_losses_are_excluded(
    micro, tmp_path, monkeypatch, capsys
):
    fields = dict(on_nonfinite="skip", log_every=3, epochs=3)
    with monkeypatch.context() as patch:
        patch.setattr(monitor, "MOST_SKIPS", 2)
        seen = poisoned(patch, 1, 3, 4, 5)
        with pytest.raises(
            UserError, match=r"4 updates were skipped .* from step 4 on; .* more than the 2 that"
        ):
            training.train(micro(tmp_path / "run", **fields))
    assert (
        "skipped 1 updates whose gradients were not finite, from step 2 on"
        in capsys.readouterr().err
    )
    assert all(torch.equal(seen[1][name], seen[2][name]) for name in seen[1])
    assert not all(torch.equal(seen[2][name], seen[3][name]) for name in seen[2])
    # After the first step, and after three.
    lines = [r for r in records(tmp_path / "run") if r["kind"] == "train"]
    assert [math.isfinite(line["loss"]) for line in lines] == [True, True]
    # The skip of the first epoch still counts after a resume: one more is allowed.
    assert checkpoints.load(tmp_path / "run" / "last.pt")["skips"] == 1
    monkeypatch.setattr(monitor, "MOST_SKIPS", 2)
    poisoned(monkeypatch, 3, 4)
    with pytest.raises(UserError, match=r"3 updates were skipped"):
        training.train(micro(tmp_path / "run", resume="auto", **fields))
    monkeypatch.undo()
    poisoned(monkeypatch, 3)
    assert training.train(micro(tmp_path / "run", resume="auto", **fields))["top1"] >= 0
    assert checkpoints.load(tmp_path / "run" / "last.pt")["skips"] == 2


def test_guard_does_not_sync_between_log_lines(micro, tmp_path, monkeypatch):
    """The guard is read once per log line and once per checkpoint, not at every step."""
    looks, look = [], NonFiniteGuard.poll_sync
    monkeypatch.setattr(NonFiniteGuard, "poll_sync", lambda finite: looks.append(1) or look(finite))
    training.train(micro(tmp_path / "run", log_every=6, save_every=100))
    # Log lines after steps 1, 3 and 6, and two checkpoints of epochs.
    assert len(looks) == 5


def test_other_number_of_epochs_cannot_resume(micro, finished):
    """The learning rate schedule would be different."""
    with pytest.raises(UserError, match=r"was trained with epochs=2; give .* another --out$"):
        training.train(micro(finished, **SAVED, epochs=1, resume="auto"))


def test_outside_a_finished_run_is_trained_longer_from_its_folder(micro, finished, tmp_path):
    longer = micro(finished, **SAVED, epochs=3, resume="auto")
    with pytest.raises(
        UserError,
        match=f"epochs=2; give the same value, or train longer .* --init {finished} and another",
    ):
        training.train(longer)
    fresh = with_options(longer, out=tmp_path / "longer", init=finished, epochs=1)
    training.train(fresh)


JOINT = dict(
    model="bootstrapping_vit_micro", model_kwargs=("depth=2",), objective="ce", mixtoken=False
)
SHARED = dict(model_kwargs=("num_heads=6", "depth=2"), mixtoken=False, feature_adapt="pool-2d")
# Options of killed runs: what changes between epochs, and what is trained beside the model.
KILLED = {
    "one size": {},
    "in the middle of another size": dict(sizes=((0, 16), (1, 48))),
    "buckets of two scales": EVERYTHING | dict(log_every=1),
    "drloc": dict(drloc="l1", drloc_grid=2),
    "drloc, published": dict(drloc="reg", drloc_grid=0, drloc_published=True, microbatch=2),
    "joint": JOINT | dict(bootstrap="joint", microbatch=2, cutmix=1.0),
    "shared, dense": SHARED | dict(bootstrap="shared", precision="fp16"),
}


@pytest.mark.parametrize("fields", mark_slow(KILLED, "one size"))
def test_run_killed_in_an_evaluation_repeats_only_the_evaluation(
    micro, tmp_path, monkeypatch, fields
):
    """The epoch is saved before its evaluation; the resumed run evaluates first.

    All records and the last state equal those of an uninterrupted run: EMA, moments, the heads of
    DRLoc, both networks of Bootstrapping ViTs.
    """
    training.train(micro(tmp_path / "whole", **fields))
    evaluate = training.evaluate_sync
    for epoch in (1, 2):
        calls = []

        def killed(*arguments, calls=calls):
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return evaluate(*arguments)

        # raw weights are judged, the averaged ones no more
        monkeypatch.setattr(training, "evaluate_sync", killed)
        with pytest.raises(KeyboardInterrupt):
            training.train(micro(tmp_path / "cut", resume="auto", **fields))
        monkeypatch.undo()
        saved = checkpoints.load(tmp_path / "cut" / "last.pt")
        assert saved["step"] == 3 * epoch
        if epoch == 1:
            monkeypatch.setattr(training, "signal_handler", stopped_after(1))
            assert training.train(micro(tmp_path / "cut", resume="auto", **fields)) == {}
            monkeypatch.undo()
    result = training.train(micro(tmp_path / "cut", resume="auto", **fields))
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    assert differences(state(tmp_path / "cut"), state(tmp_path / "whole")) == []
    assert result["top1"] == json.loads((tmp_path / "whole" / "result.json").read_text())["top1"]

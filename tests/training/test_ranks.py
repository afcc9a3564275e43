"""Several ranks are one: the same samples, losses and accuracy, and one decision to stop."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch

import densefeed.train as training
from densefeed.models import checkpoints
from densefeed.system.errors import UserError
from densefeed.training.ranks import StopVote, Ranks, init_distributed
from densefeed.training.setup import resolve

from . import spied_run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def begun(command):
    """What `torchrun --nproc-per-node 2 WORDS` says, a thread a rank; README's torchrun has
    interpreters of its own.
    """

    def begun(*words: object) -> str:
        torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = command(*torchrun, *words, environment=environment, descendants=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return begun


@pytest.fixture
def run(begun):
    """Train on two ranks."""

    def run(spied: Path, config, steps: int | None = None) -> None:
        file = spied.with_suffix(".json")
        file.write_text(json.dumps(config.to_dict()))
        begun(HERE / "spied_run.py", spied, file, *([] if steps is None else [steps]))

    return run


@pytest.fixture
def alone(monkeypatch):
    """Train on one rank: in this process."""

    def run(spied: Path, config, steps: int | None = None) -> None:
        with monkeypatch.context() as patch:
            for place in spied_run.spied(spied):
                patch.setattr(*place)
            if steps is not None:
                patch.setattr(training, "signal_handler", spied_run.stopped_after(steps))
            training.train(config)

    return run


def hashes(*spied: Path) -> dict[int, str]:
    """For each step the SHA-256 of its rows, of all ranks, in order of sample and view."""
    rows: dict[int, list] = {}
    for path in (file for one in spied for file in one.parent.glob(f"{one.name}.[0-9]")):
        for line in map(json.loads, path.read_text().splitlines()):
            rows.setdefault(line["step"], []).extend(line["rows"])
    return {
        step: hashlib.sha256(json.dumps(sorted(rows[step])).encode()).hexdigest()
        for step in sorted(rows)
    }


def told(out: Path, kind: str, *names: str) -> list[tuple]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [
        tuple(line[name] for name in ("step", *names)) for line in lines if line["kind"] == kind
    ]


def assert_alike(one: Path, other: Path, rel: float = 1e-5) -> None:
    """The same losses and gradients up to the order of sums, and exactly the same accuracies."""
    for kind, names in (("train", ("loss", "grad_norm", "lr")), ("val", ("top1",))):
        first, second = told(one, kind, *names), told(other, kind, *names)
        assert [step for step, *_ in first] == [step for step, *_ in second]
        assert [v for _, *values in second for v in values] == pytest.approx(
            [v for _, *values in first for v in values], rel=rel
        )


LAWS = {
    # Batch statistics, drop-path and the weight of tokens without labels are of a part: equal if
    # parts are.
    "parts": dict(microbatch=2, drop_path=0.2, mixtoken=True),
    # Nothing in these networks joins samples but mixing, whose partners lie in one part whatever
    # the ranks.
    "mixtoken": dict(model="lvvit_groupnorm", drop_path=0.0, mixtoken=True, outside="uniform"),
    "cutmix": dict(model="test_vit", objective="ce", drop_path=0.0, mixtoken=False, cutmix=1.0),
    # The heads are inside what averages gradients, and a sample's pairs are its own.
    "drloc": dict(
        model="lvvit_groupnorm",
        drop_path=0.0,
        mixtoken=True,
        outside="uniform",
        drloc="l1",
        drloc_grid=2,
    ),
    "drloc, parts": dict(
        model="test_vit", objective="ce", microbatch=2, mixtoken=False, drloc="all", drloc_grid=0
    ),
    # Gradients of both networks are averaged before they are aligned.
    "bootstrap": dict(
        model="bootstrapping_vit_micro",
        model_kwargs=("depth=2",),
        objective="ce",
        mixtoken=False,
        microbatch=4,
        drop_path=0.0,
        bootstrap="shared",
        agent="base",
        align="layer",
    ),
}


@pytest.mark.parametrize("law", LAWS)
def test_two_ranks_are_one(micro, tmp_path, alone, run, law):
    """Also the padded last batch of an epoch (3 images of 8), and an evaluation of 5 images, which
    2 does not divide.
    """
    fields = (
        dict(batch=8, log_every=1, rand_augment="rand-m9-mstd0.5-inc1", erase_probability=0.5)
        | LAWS[law]
    )
    alone(tmp_path / "rows-1", micro(tmp_path / "1", threads=2, **fields))
    run(tmp_path / "rows-2", micro(tmp_path / "2", threads=1, **fields))
    one, two = (hashes(tmp_path / f"rows-{ranks}") for ranks in (1, 2))
    assert one == two
    assert len(set(one.values())) == 4  # steps
    assert_alike(tmp_path / "1", tmp_path / "2")
    # Each of the 5 images counts once: padding to a batch of 8 would give eighths.
    assert all(
        5 * top1 == pytest.approx(round(5 * top1))
        for _, top1 in told(tmp_path / "2", "val", "top1")
    )


def test_a_run_moves_between_numbers_of_ranks(micro, tmp_path, alone, run):
    """One rank, two, one: samples of an uninterrupted run of one; log lines are of four steps, on
    one rank and on two.
    """
    fields = dict(batch=8, microbatch=2, repeats=4, log_every=4)
    alone(tmp_path / "whole-rows", micro(tmp_path / "whole", **fields))
    alone(tmp_path / "rows-0", micro(tmp_path / "moved", **fields), 2)
    run(tmp_path / "rows-1", micro(tmp_path / "moved", resume="auto", threads=1, **fields), 2)
    # Asked after step 4, on one of two ranks: both stop after step 5, an exchange later.
    assert checkpoints.load(tmp_path / "moved" / "last.pt")["step"] == 5
    alone(tmp_path / "rows-2", micro(tmp_path / "moved", resume="auto", threads=3, **fields))
    assert hashes(*(tmp_path / f"rows-{part}" for part in range(3))) == hashes(
        tmp_path / "whole-rows"
    )
    assert_alike(tmp_path / "whole", tmp_path / "moved")
    one, other = (
        checkpoints.load(tmp_path / name / "last.pt")["model"] for name in ("whole", "moved")
    )
    # Running statistics are not compared: each rank keeps those of its own parts, and they are
    # averaged where they are read.
    names = [
        name for name in one if ".running_" not in name and not name.endswith("num_batches_tracked")
    ]
    far = {name: (one[name] - other[name]).abs().max().item() for name in names}
    # the rate is 2.5e-4 at most: no weight went another way for a step
    assert max(far.values()) < 1e-4, far


def test_a_batch_that_ranks_cannot_share_is_refused(micro, tmp_path):
    two = Ranks(0, 2, torch.device("cpu"))
    for fields in (dict(batch=5), dict(batch=8, microbatch=3)):
        with pytest.raises(
            UserError, match=r"a batch of \d on 2 ranks cannot be divided into parts of \d images"
        ):
            resolve(micro(tmp_path, **fields), two, None)
    # A run of one rank goes on with as many images at once where it can, else with all that a rank
    # has.
    for before, after in ((2, 2), (8, 4)):
        resumed = resolve(micro(tmp_path, batch=8), two, {"microbatch": before})
        assert resumed.optim.microbatch == after


def test_buffers_are_averaged_and_sums_are_over_ranks(tmp_path, begun):
    """Two processes, by hand: means of floating buffers, counters left alone; flags are acted on a
    call later, by both.
    """
    program = """
import sys, torch
from densefeed.training.ranks import StopVote, init_distributed
with init_distributed("cpu") as ranks:
    norm = torch.nn.BatchNorm1d(2)
    norm.running_mean[:] = torch.tensor([1.0, 2.0]) * (1 + 2 * ranks.rank)
    norm.num_batches_tracked += ranks.rank
    ranks.average([norm])
    vote = StopVote(ranks)
    flags = [vote(flag) for flag in (False, ranks.rank == 1, False, False)]
    total = ranks.sum(torch.tensor([1.0, ranks.rank])).tolist()
    word = ranks.broadcast_sync("first" if ranks.is_first else None)
    said = (ranks.rank, norm.running_mean.tolist(), int(norm.num_batches_tracked), flags, total, word)
    sys.stdout.write(f"{said}\\n")
"""
    (tmp_path / "program.py").write_text(program)
    said = begun(tmp_path / "program.py")
    flags = [False, False, True, False]
    assert sorted(said.splitlines()) == [
        str((rank, [2.0, 4.0], rank, flags, [2.0, 1.0], "first")) for rank in range(2)
    ]


def test_a_rank_alone_acts_at_once_and_pays_nothing():
    alone = Ranks(0, 1, torch.device("cpu"))
    vote, model = StopVote(alone), torch.nn.Linear(1, 1)
    assert [vote(flag) for flag in (False, True, False)] == [False, True, False]
    assert alone.parallel(model) is model
    assert alone.broadcast_sync("word") == "word"
    assert replace(alone, rank=1).is_first is False


def test_one_device_for_several_ranks_is_refused(monkeypatch):
    """Before any process waits for another."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("densefeed.training.ranks.choose_device", lambda name: torch.device(name))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with (
        pytest.raises(
            UserError, match=r"--device cuda:0 is one device; under torchrun give --device cuda"
        ),
        init_distributed("cuda:0"),
    ):
        pass
    with (
        pytest.raises(
            UserError,
            match=r"2 or more ranks on a machine of 1 CUDA devices; give --nproc-per-node",
        ),
        init_distributed("cuda"),
    ):
        pass


def test_batchnorm_is_joined_over_several_cuda_ranks_alone():
    """Same weights under the same names; a rank alone keeps its model, and a CPU has no such
    layer.
    """
    model = timm.create_model("dhvt_tiny_cifar_patch4", depth=1, embed_dim=16)
    names, several = list(model.state_dict()), Ranks(0, 2, torch.device("cuda"))
    assert Ranks(0, 1, torch.device("cuda")).synchronized(model) is model
    with pytest.raises(UserError, match="--sync-batchnorm needs CUDA"):
        Ranks(0, 2, torch.device("cpu")).synchronized(model)
    assert sum(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules()) == 5
    joined = several.synchronized(model)
    assert sum(isinstance(module, torch.nn.SyncBatchNorm) for module in joined.modules()) == 5
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in joined.modules())
    assert list(joined.state_dict()) == names

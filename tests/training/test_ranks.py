"""Several ranks equal one: same samples, losses, accuracy and stop step."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from PIL import Image

import densefeed.train as training
from densefeed.models import checkpoints
from densefeed.system.errors import UserError
from densefeed.system.options import with_options
from densefeed.training import setup
from densefeed.training.ranks import Ranks, StopVote, init_distributed, raise_on_rank0
from densefeed.training.setup import divide_batch

from ..runs import student_for
from . import spied_run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def torchrun(command):
    """Return the output of `torchrun --nproc-per-node 2 WORDS`, with one thread per rank.

    The torchrun of the README starts interpreters of its own.
    """

    def run(*words: object) -> str:
        launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = command(*launcher, *words, environment=environment, descendants=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def run(torchrun):
    """Train on two ranks."""

    def run(spied: Path, config, steps: int | None = None) -> None:
        file = spied.with_suffix(".json")
        file.write_text(json.dumps(config.to_dict()))
        torchrun(HERE / "spied_run.py", spied, file, *([] if steps is None else [steps]))

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


def hash_rows(*spied: Path) -> dict[int, str]:
    """Return for each step the SHA-256 of the rows of all ranks, sorted by sample and view."""
    rows: dict[int, list] = {}
    for path in (file for one in spied for file in one.parent.glob(f"{one.name}.[0-9]")):
        for line in map(json.loads, path.read_text().splitlines()):
            rows.setdefault(line["step"], []).extend(line["rows"])
    return {
        step: hashlib.sha256(json.dumps(sorted(rows[step])).encode()).hexdigest()
        for step in sorted(rows)
    }


def read_metrics(out: Path, kind: str, *names: str) -> list[tuple]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [
        tuple(line[name] for name in ("step", *names)) for line in lines if line["kind"] == kind
    ]


# Losses and gradient norms of up to four steps sum the same float32 in another order: at most 5
# units of 2^-23 were measured (default and avx2), and a wrong weight of a rank is above 1 %.
SUMMED = 64 * 2**-23


def assert_alike(one: Path, other: Path, rel: float = SUMMED) -> None:
    """Check for equal accuracies, and equal losses and gradients up to the order of sums."""
    for kind, names in (("train", ("loss", "grad_norm", "lr")), ("val", ("top1",))):
        first, second = read_metrics(one, kind, *names), read_metrics(other, kind, *names)
        assert [step for step, *_ in first] == [step for step, *_ in second]
        assert [v for _, *values in second for v in values] == pytest.approx(
            [v for _, *values in first for v in values], rel=rel
        )


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["segment", "segment-soft"])
def test_outside_segmentation_on_two_ranks_has_the_losses_of_one(
    segments, tmp_path, run, alone, objective
):
    """With equal microbatches; of the evaluation only the number of images is equal.

    Running statistics of BatchNorm are averaged over ranks, and not updated by one after the other.
    """
    fields = dict(objective=objective, microbatch=2, zoom_out=0.5, sync_batchnorm=False)
    alone(tmp_path / "one", segments(tmp_path / "alone", **fields))
    run(tmp_path / "two", segments(tmp_path / "both", **fields))
    names = "loss", "grad_norm"
    one, two = (read_metrics(tmp_path / out, "train", *names) for out in ("alone", "both"))
    assert len(one) == 8
    # Eight updates of AdamW, not the four of SUMMED.
    assert two == [pytest.approx(line, rel=1e-3) for line in one]
    assert two[0] == pytest.approx(one[0], rel=SUMMED)
    seen = [read_metrics(tmp_path / out, "val", "images") for out in ("alone", "both")]
    assert seen[0] == seen[1] == [(4, 5), (8, 5)]


@pytest.mark.slow
def test_detection_on_two_ranks_has_the_losses_and_the_precision_of_one(
    detects, tmp_path, run, alone
):
    """With equal microbatches, and without BatchNorm, whose statistics would differ.

    The precision is that of the boxes of both ranks together.
    """
    small = "embed_dim=16", "depths=(1,1,1,1)", "num_heads=(1,2,2,2)", "window_size=4"
    kwargs = "backbone='swin_tiny_patch4_window7_224'", *small, "decoder_width=8", "samples=16"
    fields = dict(microbatch=2, model_kwargs=kwargs, drop_path=0.0, warmup_epochs=0.0, ema=0.0)
    alone(tmp_path / "one", detects(tmp_path / "alone", **fields))
    run(tmp_path / "two", detects(tmp_path / "both", **fields))
    names = "loss", "grad_norm"
    one, two = (read_metrics(tmp_path / out, "train", *names) for out in ("alone", "both"))
    assert len(one) == 6
    assert two == [pytest.approx(line, rel=1e-5) for line in one]
    names = "images", "map_box", "map_mask_50"
    seen = [read_metrics(tmp_path / out, "val", *names) for out in ("alone", "both")]
    assert [line[:2] for line in seen[0]] == [(3, 4), (6, 4)]
    assert seen[1] == [pytest.approx(line, rel=1e-3) for line in seen[0]]
    assert seen[0][1][2] > 0


CASES = {
    # Batch statistics, drop-path and the weight of tokens without labels belong to a microbatch, so
    # they are equal if microbatches are.
    "parts": dict(microbatch=2, drop_path=0.2, mixtoken=True),
    # Only mixing combines samples in these networks, and partners are in one microbatch for any
    # number of ranks.
    "mixtoken": dict(model="lvvit_groupnorm", drop_path=0.0, mixtoken=True, outside="uniform"),
    "cutmix": dict(
        model="test_vit", objective="ce", drop_path=0.0, mixtoken=False, cutmix=1.0, optimizer="sgd"
    ),
    # The heads are inside the DDP module, and every sample has its own pairs. Both ranks have
    # batches of one aspect in the same steps, so a step has one grid.
    "drloc": dict(
        model="lvvit_groupnorm",
        drop_path=0.0,
        mixtoken=True,
        outside="uniform",
        drloc="l1",
        drloc_grid=0,
        aspects=(0.75, 4 / 3),
        side_multiple=8,
        size=48,
    ),
    "drloc, parts": dict(
        model="test_vit", objective="ce", microbatch=2, mixtoken=False, drloc="all", drloc_grid=0
    ),
    # SAM moves the weights of all ranks along the same gradient. Each rank has a part of that of
    # sparse attention's learned alpha.
    "sam, sparse": dict(
        model="bootstrapping_vit_s_sparse",
        model_kwargs=("depth=1",),
        objective="ce",
        microbatch=2,
        drop_path=0.0,
        mixtoken=False,
        optimizer="sgd",
        sam_rho=0.1,
    ),
    # Muon makes a matrix orthogonal, of whatever length: each rank must begin from the same one.
    "nadamuon": dict(
        model="test_vit", objective="ce", microbatch=2, mixtoken=False, optimizer="nadamuon"
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
    ),
}


# Much like `parts`, or longer.
SLOW = ("sam, sparse", "mixtoken", "cutmix", "drloc", "drloc, parts", "nadamuon", "bootstrap")


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES]
)
def test_two_ranks_match_one(micro, tmp_path, alone, run, case):
    """Includes a padded last batch of an epoch (3 images of 8), and 5 evaluated images.

    2 does not divide 5.
    """
    fields = (
        dict(batch=8, log_every=1, rand_augment="rand-m9-mstd0.5-inc1", erase_probability=0.5)
        | CASES[case]
    )
    alone(tmp_path / "rows-1", micro(tmp_path / "1", threads=2, **fields))
    run(tmp_path / "rows-2", micro(tmp_path / "2", threads=1, **fields))
    one, two = (hash_rows(tmp_path / f"rows-{ranks}") for ranks in (1, 2))
    assert one == two
    assert len(set(one.values())) == 4  # steps
    assert_alike(tmp_path / "1", tmp_path / "2")
    # Each of the 5 images counts once: padding to a batch of 8 would give eighths.
    assert all(
        5 * top1 == pytest.approx(round(5 * top1))
        for _, top1 in read_metrics(tmp_path / "2", "val", "top1")
    )


@pytest.mark.slow
def test_two_ranks_with_captured_updates_match_one_without(micro, tmp_path, alone, run):
    """Graphs are tapes here (tape.py); gradients are averaged between two of them, without DDP."""
    fields = dict(
        batch=8, epochs=6, model="lvvit_groupnorm", drop_path=0.0, outside="uniform", clip_grad=1.0
    )
    alone(tmp_path / "rows-1", micro(tmp_path / "1", **fields))
    run(tmp_path / "rows-2", micro(tmp_path / "2", threads=1, compile="graph", **fields))
    # Twelve updates, of which each of two kinds is captured from its fourth on.
    assert_alike(tmp_path / "1", tmp_path / "2")


def test_shared_weights_refuse_captured_updates_on_several_ranks(micro, tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "can_capture", lambda mode, _: mode == "graph")
    run = micro(
        tmp_path,
        compile="graph",
        model="bootstrapping_vit_micro",
        objective="ce",
        mixtoken=False,
        bootstrap="shared",
        agent="base",
    )
    with pytest.raises(UserError, match="--compile graph on several ranks"):
        student_for(run, Ranks(0, 2, torch.device("cpu")))


def test_captured_updates_need_an_optimizer_that_does_not_wait(micro, tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "can_capture", lambda mode, _: mode == "graph")
    run = micro(tmp_path, compile="graph", optimizer="nadamuon")
    with pytest.raises(UserError, match=r"no update by nadamuon, .* only by adam or adamw"):
        student_for(run)


@pytest.mark.slow
def test_compiled_ranks_match_one_that_is_not_compiled(micro, tmp_path, alone, torchrun):
    """With two microbatches per rank, of which the first does not average its gradients.

    Blocks are compiled inside DDP without a break. DDP's own forward breaks the graph of a whole
    step, and nothing else does.
    """
    fields = dict(batch=8, microbatch=2, drop_path=0.0, epochs=1, threads=1)
    alone(tmp_path / "rows", micro(tmp_path / "one", **fields))
    modes = ("blocks", "whole")
    files = [tmp_path / f"{mode}.config" for mode in modes]
    for mode, file in zip(modes, files, strict=True):
        file.write_text(json.dumps(micro(tmp_path / mode, compile=mode, **fields).to_dict()))
    torchrun(HERE / "compiled_run.py", *files)
    for mode in modes:
        assert_alike(tmp_path / "one", tmp_path / mode)
        for rank in range(2):
            found = json.loads((tmp_path / f"{mode}.{rank}.json").read_text())
            if mode == "blocks":
                # Patch embedding, a block and heads, in training and in evaluation, the loss, and
                # MixToken's mask.
                assert found == {"graphs": 8, "breaks": []}
            else:
                assert found["graphs"] >= 1
                ddp = re.compile("Reducer|Logger|DistributedDataParallel")
                assert [reason for reason in found["breaks"] if not ddp.search(reason)] == []


@pytest.mark.slow
def test_resume_on_other_number_of_ranks(micro, tmp_path, alone, run):
    """One rank, two, one: samples of an uninterrupted run on one rank.

    A log line covers four steps, on one rank and on two.
    """
    fields = dict(batch=8, microbatch=2, repeats=4, log_every=4)
    alone(tmp_path / "whole-rows", micro(tmp_path / "whole", **fields))
    alone(tmp_path / "rows-0", micro(tmp_path / "moved", **fields), 2)
    run(tmp_path / "rows-1", micro(tmp_path / "moved", resume="auto", threads=1, **fields), 2)
    # The signal arrives after step 4, on one of two ranks: both stop after step 5, one vote later.
    assert checkpoints.load(tmp_path / "moved" / "last.pt")["step"] == 5
    alone(tmp_path / "rows-2", micro(tmp_path / "moved", resume="auto", threads=3, **fields))
    assert hash_rows(*(tmp_path / f"rows-{part}" for part in range(3))) == hash_rows(
        tmp_path / "whole-rows"
    )
    assert_alike(tmp_path / "whole", tmp_path / "moved")
    one, other = (
        checkpoints.load(tmp_path / name / "last.pt")["model"] for name in ("whole", "moved")
    )
    # Running statistics are not compared: each rank keeps its own, and they are averaged where they
    # are read.
    names = [
        name for name in one if ".running_" not in name and not name.endswith("num_batches_tracked")
    ]
    far = {name: (one[name] - other[name]).abs().max().item() for name in names}
    # The learning rate is at most 2.5e-4: no weight differs by a whole step.
    assert max(far.values()) < 1e-4, far


def test_error_if_batch_cannot_be_divided(micro, tmp_path):
    two = Ranks(0, 2, torch.device("cpu"))
    for fields in (dict(batch=5), dict(batch=8, microbatch=3)):
        with pytest.raises(
            UserError, match=r"a batch of \d on 2 ranks cannot be divided into parts of \d images"
        ):
            divide_batch(micro(tmp_path, **fields).optim, two)
    # A run of one rank continues with the same microbatch if possible, otherwise with all images of
    # a rank.
    for before, after in ((2, 2), (8, 4)):
        resumed = divide_batch(micro(tmp_path, batch=8).optim, two, before)
        assert resumed.microbatch == after


def test_collectives_on_two_processes(tmp_path, torchrun):
    """Means of floating-point buffers, unchanged counters, a flag that both read one call later."""
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
    counted = int(norm.num_batches_tracked)
    result = (ranks.rank, norm.running_mean.tolist(), counted, flags, total, word)
    sys.stdout.write(f"{result}\\n")
"""
    (tmp_path / "program.py").write_text(program)
    output = torchrun(tmp_path / "program.py")
    flags = [False, False, True, False]
    assert sorted(output.splitlines()) == [
        str((rank, [2.0, 4.0], rank, flags, [2.0, 1.0], "first")) for rank in range(2)
    ]


def test_outside_a_rank_whose_neighbor_ended_says_one_sentence(tmp_path, torchrun):
    """Rank 1 ends as after an error. Rank 0 waits for its gradient, then for torchrun's signal."""
    (tmp_path / "program.py").write_text(
        """
import os, time, torch
from densefeed.system.errors import UserError
from densefeed.training.ranks import WAIT, init_distributed, raise_on_rank0

waits, time.sleep = [], lambda seconds: waits.append(seconds)
try:
    with raise_on_rank0(), init_distributed("cpu") as ranks:
        ranks.sum(torch.ones(1))
        if ranks.rank == 1:
            os._exit(0)
        ranks.sum(torch.ones(1))
except UserError as error:
    print(waits == [2 * WAIT], error, flush=True)
# Without what gloo does at the end of a process.
os._exit(0)
"""
    )
    want = (
        "True rank 0 stopped, because another rank ended; its message says why, and --resume auto"
    )
    assert torchrun(tmp_path / "program.py").startswith(want)


def test_outside_other_errors_of_a_rank_keep_their_traceback():
    with pytest.raises(RuntimeError, match="no kernel image"), raise_on_rank0():
        raise RuntimeError("no kernel image is available")


def test_single_rank_has_no_delay_and_no_wrapper():
    alone = Ranks(0, 1, torch.device("cpu"))
    vote, model = StopVote(alone), torch.nn.Linear(1, 1)
    assert [vote(flag) for flag in (False, True, False)] == [False, True, False]
    assert alone.parallel(model) is model
    assert alone.broadcast_sync("word") == "word"
    assert replace(alone, rank=1).is_first is False


def test_error_if_ranks_share_a_device(monkeypatch):
    """Before any process waits for another."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
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


def test_sync_batchnorm_on_several_cuda_ranks_only():
    """Same weights under the same names.

    A single rank keeps its model, and a CPU has no such layer.
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


class OtherRank:
    """Rank 0 of two, of which the other has `theirs`."""

    def __init__(self, theirs):
        self.theirs = theirs

    def gather_sync(self, value):
        return [value, self.theirs]


SET = (3, ["ant", "bee"], "f")


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ([(2, ["ant", "bee"], "g"), SET], r"training data than rank 0 \(2 images, not 3\).*--data"),
        ([(3, ["ant", "dog"], "g"), SET], r"training data .*\(class dog, not bee\).*at --data"),
        ([SET, (3, ["ant", "bee", "cat"], "g")], r"validation .*\(class cat, not None\).*at --val"),
        ([SET, (3, ["ant", "bee"], "g")], r"validation .*\(with other paths, labels or sizes"),
    ],
)
def test_outside_ranks_that_read_other_data_are_refused(theirs, message):
    count, names, fingerprint = SET
    loader = SimpleNamespace(
        source=SimpleNamespace(labels=[0] * count), class_names=names, fingerprint=fingerprint
    )
    with pytest.raises(UserError, match=f"^rank 1 reads other {message}"):
        setup.check_same_on_ranks(OtherRank(theirs), loader, loader)
    setup.check_same_on_ranks(OtherRank([SET, SET]), loader, loader)
    setup.check_same_on_ranks(Ranks(0, 1, torch.device("cpu")), loader, loader)


def test_outside_two_ranks_with_other_copies_stop_with_one_sentence(micro, tmp_path, torchrun):
    """Rank 1 has a class of another name: its labels are other ones."""
    for rank, names in enumerate((("ant", "bee", "cat"), ("bee", "cat", "dog"))):
        for name in (f"{split}/{name}" for split in ("train", "val") for name in names):
            for number in range(4):
                file = tmp_path / f"data-{rank}" / name / f"{number}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (40, 40), (60 * number, 0, 0)).save(file)
        data = {"data": tmp_path / f"data-{rank}", "val": tmp_path / f"data-{rank}"}
        config = micro(tmp_path / "run", loader="folder", objective="ce", mixtoken=False)
        config = with_options(config, **data, threads=1)
        (tmp_path / f"{rank}.json").write_text(json.dumps(config.to_dict()))
    program = """
import json, os, sys
from densefeed.system.errors import UserError
from densefeed.train import train
from densefeed.training.config import Config
text = open(f"{sys.argv[1]}/{os.environ['RANK']}.json").read()
try:
    train(Config.from_dict(json.loads(text)))
except UserError as error:
    sys.stdout.write(f"{error}\\n")
"""
    (tmp_path / "program.py").write_text(program)
    output = torchrun(tmp_path / "program.py", tmp_path)
    (line,) = set(output.splitlines())
    assert line == (
        "rank 1 reads other training data than rank 0 (class bee, not ant); give every rank the "
        "same copy at --data"
    )
    assert len(output.splitlines()) == 2
    assert not (tmp_path / "run" / "metrics.jsonl").exists()

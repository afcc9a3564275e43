"""Shards: their rows, their files, merging, locks, and labelings that are killed at any time.

The reference is one uninterrupted labeling, compared byte by byte.
"""

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from densefeed.relabel.teacher import Teacher
from densefeed.storage import shards
from densefeed.storage.images import Images
from densefeed.storage.score_maps import ScoreMaps, ScoreMapStore, ScoreMapWriter, StoreHeader
from densefeed.storage.shards import Shard, check_leftovers, find_leftovers, merge
from densefeed.storage.store_file import StoreFile
from densefeed.system.errors import BusyError, UserError
from densefeed.system.files import lock, open_locked, replace_file
from densefeed.tools import relabel_imagenet

from ..runs import label_images

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("SOAK_KILLS", 3))
OPTIONS = dict(top_k=2, batch=4, threads=1, absent="tail")
COUNT = 64
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """64 small JPEGs in two classes: two shards of whole batches of 4."""
    root, rng = tmp_path_factory.mktemp("many"), np.random.default_rng(0)
    for number in range(COUNT):
        path = root / ("cat", "dog")[number % 2] / f"{number:03d}.jpg"
        path.parent.mkdir(exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
        coarse.resize((int(rng.integers(40, 90)), 50), Image.Resampling.BICUBIC).save(path)
    return root


def teacher(size=64):
    torch.manual_seed(0)
    config = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "interpolation": "bilinear"}
    return Teacher(timm.create_model("test_resnet", num_classes=2), size, "squash", config)


def label(folder: Path, out: Path, index: int = 0, of: int = 1, **options):
    """Run one process of a labeling; a process of its own has one thread too."""
    torch.set_num_threads(1)
    return label_images(
        Images(folder),
        teacher(options.pop("size", 64)),
        "t",
        out,
        shard=Shard(index, of),
        **(OPTIONS | options),
    )


@pytest.fixture(scope="module")
def whole(many, tmp_path_factory, one_thread) -> bytes:
    """Bytes of one uninterrupted labeling."""
    return label(many, tmp_path_factory.mktemp("whole") / "maps.h5").path.read_bytes()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------------- rows and files


@pytest.mark.parametrize("count", [1, 7, 11, 64, 1000, 54321, 1281167])
def test_shards_partition_the_rows_nearly_evenly(count):
    for of in (1, 2, 3, 7, 8, 64):
        if count < of:
            with pytest.raises(
                UserError, match=f"{count} images cannot be divided among {of} shards"
            ):
                Shard(0, of).rows(count)
            continue
        rows = [Shard(index, of).rows(count) for index in range(of)]
        assert [(rows[0].start, rows[-1].stop), *((part.start, part.stop) for part in rows)] == [
            (0, count),
            *zip(
                [0, *(part.stop for part in rows[:-1])], [part.stop for part in rows], strict=True
            ),
        ]
        assert max(map(len, rows)) <= 1.25 * count / of + 1
        # Batches of a power of two up to 256 then hold the same images for any number of shards.
        if count == 1281167:
            assert all(part.start % 256 == 0 for part in rows)


@pytest.mark.parametrize("text", ["8/8", "1", "-1/8", "1/0", "a/b", "1/8/2"])
def test_a_shard_is_parsed_as_index_of_count(text):
    assert Shard.parse("7/8") == Shard(7, 8)
    with pytest.raises(UserError, match=r"--shard .* is not a shard; write it as 0/8"):
        Shard.parse(text)


@pytest.mark.parametrize("form", ["raw", "lossless", "compact"])
def test_jobs_in_any_order_equal_one_labeling(many, whole, tmp_path, form):
    out = tmp_path / "maps.h5"
    assert label(many, out, 2, 3, form=form) is None
    assert label(many, out, 0, 3, form=form) is None
    assert names(tmp_path) == ["maps.shard-0-of-3.h5", "maps.shard-2-of-3.h5"]
    with pytest.raises(
        UserError, match=r"shard-0-of-3.h5 is shard 0 of 3 and not the whole dataset; merge"
    ):
        ScoreMapStore(tmp_path / "maps.shard-0-of-3.h5")
    made = label(many, out, 1, 3, form=form)
    assert names(tmp_path) == ["maps.h5"]
    assert made.header.form == form
    one = label(many, tmp_path / "one" / "maps.h5", form=form)
    # Shards of 21 or 22 rows end in smaller batches, where a convolution may sum in another order.
    # The tolerance is above the float16 rounding error of that.
    for ours, theirs in zip(made.rows(np.arange(COUNT)), one.rows(np.arange(COUNT)), strict=True):
        np.testing.assert_allclose(ours.astype(np.float64), theirs.astype(np.float64), atol=0.02)
    assert made.paths() == one.paths() == Images(many).paths
    assert label(many, out, 1, 3, form=form).path == out  # a repeated job finds it complete
    with pytest.raises(UserError, match=r"maps.h5 exists already"):
        label(many, out, 1, 3, form=form, top_k=1)


def test_two_jobs_give_the_bytes_of_one_labeling(many, whole, tmp_path):
    label(many, tmp_path / "maps.h5", 1, 2)
    assert label(many, tmp_path / "maps.h5", 0, 2).path.read_bytes() == whole


def test_a_labeling_resumes_with_another_number_of_shards(many, whole, tmp_path, monkeypatch):
    """One of four shards, a part of a single process, then two shards: same bytes as one process.

    Every row is labeled once.
    """
    out, labeled = tmp_path / "maps.h5", []
    watch(monkeypatch, labeled)
    label(many, out, 1, 4)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            label(many, out)
    assert names(tmp_path) == ["maps.h5.part", "maps.shard-1-of-4.h5"]
    label(many, out, 1, 2)
    assert label(many, out, 0, 2).path.read_bytes() == whole
    assert sorted(labeled) == list(range(COUNT))
    assert names(tmp_path) == ["maps.h5"]


def watch(monkeypatch, labeled: list) -> None:
    """Record each row that is labeled, in contrast to copied."""
    from densefeed.relabel import labeling

    real = labeling.label_rows

    def label_rows(work, writer, start, tell):
        write = writer.write
        writer.write = lambda ids, maps: (labeled.extend((ids + start).tolist()), write(ids, maps))
        try:
            return real(work, writer, start, tell)
        finally:
            del writer.write

    monkeypatch.setattr(labeling, "label_rows", label_rows)


def stop_after(patch, batches: int) -> None:
    """Raise KeyboardInterrupt after `batches` scored batches."""
    from densefeed.relabel.scoring import Scorer

    begin, calls = Scorer.begin, iter(range(10**9))

    def begun(self, *words):
        if next(calls) == batches:
            raise KeyboardInterrupt
        return begin(self, *words)

    patch.setattr(Scorer, "begin", begun)


# ------------------------------------------------------------------------- errors


def test_a_shard_with_other_settings_is_refused_by_name(many, tmp_path):
    out = tmp_path / "maps.h5"
    label(many, out, 0, 2)
    with pytest.raises(
        UserError, match=r"maps.shard-0-of-2.h5 was started with another top k \(2, not 1\)"
    ):
        label(many, out, 1, 2, top_k=1)
    with pytest.raises(
        UserError, match=r"maps.shard-0-of-2.h5 was started with another input size \(64, not 96\)"
    ):
        label(many, out, 0, 2, size=96)
    other = shutil.copytree(many, tmp_path / "other")
    (other / "cat" / "000.jpg").rename(other / "cat" / "0000.jpg")
    with pytest.raises(UserError, match=r"maps.shard-0-of-2.h5 was started for another dataset"):
        label(other, out, 1, 2)
    # No file is left that would stop the correct command.
    assert names(tmp_path) == ["maps.shard-0-of-2.h5", "other"]


def header_of(count: int) -> StoreHeader:
    return StoreHeader(
        side=2,
        top_k=2,
        num_classes=3,
        absent="tail",
        teacher="t",
        input_size=64,
        geometry="squash",
        fingerprint=f"{count} images",
        class_names=("a", "b", "c"),
    )


def make_shard(out: Path, shard: Shard, header: StoreHeader, maps, count: int, finish=True) -> None:
    rows = np.array(shard.rows(count))
    writer = ScoreMapWriter(
        shard.file(out), shard.header(header, count), [f"{row}" for row in rows], rows % 3
    )
    writer.write(np.arange(len(rows)), ScoreMaps(*(part[rows] for part in maps)))
    if finish:
        writer.finish()
    writer.close()


@pytest.mark.slow
def test_merge_copies_rows_and_names_faulty_shards(tmp_path, random_maps, command):
    count, out = 20, tmp_path / "maps.h5"
    maps, header = random_maps(count, 2, 2, 3), header_of(20)
    merging = ("tools/score_maps.py", "merge", out)
    assert "has no shards (maps.shard-0-of-8.h5, ...)" in command(*merging).stderr
    for index in (0, 2):
        make_shard(out, Shard(index, 3), header, maps, count)
    with pytest.raises(
        UserError, match=r"maps.shard-1-of-3.h5 is missing: run the same labeling with --shard 1/3"
    ):
        merge(out, 3)
    make_shard(out, Shard(1, 3), header, maps, count, finish=False)
    with pytest.raises(UserError, match=r"maps.shard-1-of-3.h5 is missing; it is not finished"):
        merge(out, 3)
    part = tmp_path / "maps.shard-1-of-3.h5.part"
    make_shard(tmp_path / "x.h5", Shard(1, 3), replace(header, teacher="u"), maps, count)
    (tmp_path / "x.shard-1-of-3.h5").rename(tmp_path / "maps.shard-1-of-3.h5")
    with pytest.raises(
        UserError, match=r"maps.shard-1-of-3.h5 was started with another teacher \(u, not t\)"
    ):
        merge(out, 3)
    part.rename(tmp_path / "maps.shard-1-of-3.h5")
    shutil.copy(tmp_path / "maps.shard-1-of-3.h5", tmp_path / "sound")
    offset = StoreFile(tmp_path / "sound").offsets["logit"]
    with open(tmp_path / "maps.shard-1-of-3.h5", "r+b") as file:
        file.seek(offset + 3)
        file.write(b"\xff\xff")
    with pytest.raises(
        UserError, match=r"maps.shard-1-of-3.h5: the map of 7 is damaged; remove this file"
    ):
        merge(out, 3)
    (tmp_path / "sound").rename(tmp_path / "maps.shard-1-of-3.h5")
    done = command(*merging, "--form", "lossless")
    assert done.returncode == 0, done.stderr
    assert names(tmp_path) == ["maps.h5"]
    for ours, theirs in zip(ScoreMapStore(out).rows(np.arange(count)), maps, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "value"), [("label", 0), ("label", 99), ("label", -1), ("path", b"0")]
)
def test_damaged_labels_and_paths_of_a_shard_are_not_merged(tmp_path, random_maps, name, value):
    """A merged store has a checksum of its own, which would hide the damage."""
    count, out = 20, tmp_path / "maps.h5"
    for index in range(2):
        make_shard(out, Shard(index, 2), header_of(count), random_maps(count, 2, 2, 3), count)
    path = Shard(1, 2).file(out)
    with h5py.File(path, "r+") as file:
        file[name][:] = value
    before = names(tmp_path)
    with pytest.raises(UserError, match=rf"^{path} is damaged: its labels or paths are not those"):
        merge(out, 2)
    assert names(tmp_path) == before


def test_a_file_name_with_a_huge_number_of_shards_is_one_sentence(tmp_path, random_maps):
    out = tmp_path / "maps.h5"
    make_shard(out, Shard(0, 2), header_of(20), random_maps(20, 2, 2, 3), 20)
    Shard(0, 2).file(out).rename(Shard(0, 10**20).file(out))
    with pytest.raises(UserError, match=rf"maps.shard-1-of-{10**20}.h5 is missing: run the same"):
        shards.merge_files(out)


# ------------------------------------------------------------------------- locks and orphans


def test_two_writers_never_write_the_same_file(tmp_path, random_maps):
    maps, header = random_maps(4, 2, 2, 3), header_of(4)
    words = tmp_path / "maps.h5", header, list("abcd"), np.zeros(4, np.int64)
    first = ScoreMapWriter(*words)
    with pytest.raises(
        BusyError, match=r"maps.h5.part is being written by another process; wait for it"
    ):
        ScoreMapWriter(*words)
    first.write(np.arange(4), maps)
    first.close()
    second = ScoreMapWriter(*words)
    assert second.done.all()
    second.finish()
    with pytest.raises(UserError, match=r"exists already"):
        ScoreMapWriter(*words)
    assert names(tmp_path) == ["maps.h5"]


def test_a_file_system_without_hard_links_works(tmp_path, monkeypatch):
    monkeypatch.setattr(
        os, "link", lambda *words: (_ for _ in ()).throw(PermissionError(1, "no links here"))
    )
    ScoreMapWriter(tmp_path / "maps.h5", header_of(4), list("abcd"), np.zeros(4, np.int64)).close()
    assert names(tmp_path) == ["maps.h5.part"]


def test_files_of_killed_conversions_are_removed_and_those_of_running_ones_are_kept(tmp_path):
    out, orphan = tmp_path / "maps.h5", tmp_path / "maps.h5.123456.part"
    others = ["maps.h5.7.parts", "maps.h5.99.part"]
    for name in (orphan.name, *others):
        (tmp_path / name).write_bytes(b"")
    living = os.open(tmp_path / "maps.h5.99.part", os.O_RDWR)
    lock(living, out)
    ScoreMapWriter(out, header_of(4), list("abcd"), np.zeros(4, np.int64)).close()
    assert names(tmp_path) == sorted([*others, "maps.h5.part"])
    orphan.write_bytes(b"")
    with replace_file(out) as part:
        # Another process that takes it for an orphan finds it locked.
        with pytest.raises(BusyError):
            open_locked(part)
        part.write_bytes(b"x")
    assert names(tmp_path) == sorted([*others, "maps.h5", "maps.h5.part"])
    os.close(living)


def test_a_shard_that_another_rank_renames_meanwhile_is_no_error(many, tmp_path, monkeypatch):
    """It was found by its unfinished name, and got its final one before it was opened."""
    out = tmp_path / "maps.h5"
    label(many, out, 0, 2)
    finished = Shard(0, 2).file(out)
    unfinished = Path(f"{finished}.part")
    finished.rename(unfinished)
    header = replace(StoreFile(unfinished).header, shard=None)
    renamed = []

    def rename_before_opening(path):
        if path == unfinished:
            renamed.append(path.rename(finished))
        return StoreFile(path)

    monkeypatch.setattr(shards, "StoreFile", rename_before_opening)
    check_leftovers(out, header)
    assert renamed
    assert label(many, out, 1, 2) is not None


# ------------------------------------------------------------------------- kills


@pytest.fixture(scope="module")
def processes():
    """A function that makes processes with all modules imported, as children of a fork server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["densefeed.tools.relabel_imagenet"])
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    os.environ |= {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "OMP_NUM_THREADS": "1"}
    context.Process(target=int).start()
    yield lambda *words, **options: context.Process(target=label, args=words, kwargs=options)
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


# test_a_run_killed_with_9 kills a labeling once, and is fast.
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_labeling_killed_at_random_times_ends_with_the_usual_bytes(
    many, tmp_path, processes, ranks
):
    """SIGKILL to all ranks, repeatedly, until the labeling ends; `make soak` kills 20 times."""
    # Slow enough to be killed while it labels, and with a conversion at the end.
    options = dict(form="lossless", size=160)

    def begin(out: Path) -> list:
        children = [
            processes(many, out, index, ranks, ranks=ranks > 1, **options) for index in range(ranks)
        ]
        for child in children:
            child.start()
        return children

    def end(children: list) -> list[int]:
        """Exit codes. Alone, the first rank waits forever; torchrun would end it."""
        try:
            for child in children:
                child.join(120)
            return [child.exitcode for child in children]
        finally:
            for child in children:
                child.kill()

    began = time.monotonic()
    assert end(begin(tmp_path / "whole" / "maps.h5")) == [0] * ranks
    lasts, seed = time.monotonic() - began, 0 if KILLS == 3 else int.from_bytes(os.urandom(4))
    want = (tmp_path / "whole" / "maps.h5").read_bytes()
    print(f"seed {seed}, a pass of {ranks} ranks lasts {lasts:.1f} s")
    draws, kills, rounds = random.Random(seed), 0, 0
    out = tmp_path / "cut-0" / "maps.h5"
    while True:
        children = begin(out)
        if kills < KILLS:
            children[0].join(draws.uniform(0.05, 0.9) * lasts)
            for child in children:
                child.kill()
        codes = end(children)
        assert set(codes) <= {0, -signal.SIGKILL}
        killed = -signal.SIGKILL in codes
        kills += killed
        if not out.exists():
            assert killed
            continue
        # Killed after the last rename, or not at all: the next run removes the files left over.
        if find_leftovers(out):
            with pytest.raises(UserError, match="exists already"):
                label(many, out, **options)
        assert out.read_bytes() == want
        assert names(out.parent) == ["maps.h5"]
        if kills >= KILLS:
            break
        rounds += 1
        out = tmp_path / f"cut-{rounds}" / "maps.h5"


@pytest.mark.slow
def test_torchrun_labels_with_two_ranks_and_reports_once(many, whole, tmp_path):
    """The command gives the bytes of one process and leaves no shard."""
    torch.manual_seed(0)
    save_file(
        timm.create_model("test_resnet", num_classes=2).state_dict(),
        tmp_path / "teacher.safetensors",
    )

    def words(out, *more):
        return [
            "tools/relabel_imagenet.py",
            "--data",
            many,
            "--teacher",
            tmp_path / "teacher.safetensors",
            "--model",
            "test_resnet",
            "--input-size",
            64,
            "--top-k",
            2,
            "--batch",
            4,
            "--threads",
            1,
            "--device",
            "cpu",
            "--out",
            out,
            *more,
        ]

    run = dict(cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    begin = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    both = subprocess.run([*begin, *map(str, words(tmp_path / "out" / "two.h5"))], **run)
    assert both.returncode == 0, both.stderr
    one = subprocess.run([sys.executable, *map(str, words(tmp_path / "out" / "one.h5"))], **run)
    assert one.returncode == 0, one.stderr
    assert (tmp_path / "out" / "two.h5").read_bytes() == (tmp_path / "out" / "one.h5").read_bytes()
    assert names(tmp_path / "out") == ["one.h5", "two.h5"]
    assert both.stdout.count("accuracy of the stored maps") == 1
    assert both.stdout.count("images/s; the teacher waited") == 2


def test_ranks_have_their_own_devices_and_shards(monkeypatch):
    wanted = relabel_imagenet.Labeling(data=Path("d"), out=Path("o"), teacher=("t",))
    assert relabel_imagenet.choose_shard(replace(wanted, device="cpu", shard="3/8"))[0] == Shard(
        3, 8
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr("densefeed.system.devices.use_device", lambda device, name: device)
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "6"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert relabel_imagenet.choose_shard(replace(wanted, device="cuda")) == (
        Shard(5, 6),
        torch.device("cuda", 1),
    )
    for fields in (dict(shard="0/2"), dict(dry_run=True)):
        with pytest.raises(
            UserError,
            match=r"torchrun gives each rank its own shard; run --shard and --dry-run without it",
        ):
            relabel_imagenet.choose_shard(replace(wanted, device="cuda", **fields))
    with pytest.raises(UserError, match=r"--device cuda:0 is one device"):
        relabel_imagenet.choose_shard(replace(wanted, device="cuda:0"))
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(UserError, match=r"5 or more ranks on a machine of 4 CUDA devices"):
        relabel_imagenet.choose_shard(replace(wanted, device="cuda"))

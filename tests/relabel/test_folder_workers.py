"""Workers that list one class folder at a time.

The reference is one undisturbed worker, whose files are compared byte by byte.
"""

# Fixtures of another file are imported, and are arguments too.
# ruff: noqa: F811

import multiprocessing
import os
import random
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch

from densefeed.relabel import workers
from densefeed.relabel.folder_workers import join_folders
from densefeed.relabel.labeling import begin_pass
from densefeed.relabel.teacher import Teacher
from densefeed.storage import class_folders
from densefeed.storage.class_folders import ClassFolders
from densefeed.storage.images import Images
from densefeed.storage.maintenance import convert
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.storage.shard_plan import FOLDERS, PLAN, SHARDS, measure_status, redo_images
from densefeed.storage.store_folder import MANIFEST
from densefeed.system.errors import UserError
from densefeed.system.object_store import ObjectStore, ObjectURL, connect
from densefeed.tools.pack_dataset import Packing
from densefeed.tools.pack_dataset import main as pack

from ..object_storage import cycle_faults, run_with
from .test_workers import COUNT, KILLS, SIZE, SlowRender, files, join, many, wait_for  # noqa: F401
from .test_workers_in_storage import objects

obstore = pytest.importorskip("obstore")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def data(many, bucket) -> ObjectURL:
    """The images in a bucket."""
    for path in many.rglob("*.jpg"):
        obstore.put(connect(bucket), f"data/{path.relative_to(many)}", path.read_bytes())
    return bucket / "data"


def begin(data: ObjectURL):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "interpolation": "bilinear"}
    teacher = Teacher(timm.create_model("test_resnet", num_classes=2), 64, "squash", config)
    return begin_pass(ClassFolders(data), teacher, "t", top_k=2, batch=4, threads=1, absent="tail")


def label(data: ObjectURL, out, seconds: float = 5):
    return join_folders(begin(data), out, SIZE, seconds)


@pytest.fixture
def counted(monkeypatch) -> list:
    """First rows and counts of the shards that are labeled, and folders that are listed."""
    calls, real, find = [], workers.label_rows, class_folders.find_images

    def label_rows(work, writer, start, update):
        calls.append((start, len(writer.done)))
        return real(work, writer, start, update)

    def find_images(home, folder):
        calls.append(folder)
        return find(home, folder)

    monkeypatch.setattr(workers, "label_rows", label_rows)
    monkeypatch.setattr(class_folders, "find_images", find_images)
    return calls


def test_rows_are_those_of_one_listing(many, data, tmp_path, counted):
    store, images = label(data, tmp_path / "maps"), Images(many)
    # Each folder was listed when its first shard was labeled, and not again.
    assert sorted(call for call in counted if isinstance(call, str)) == ["cat", "dog"]
    assert isinstance(counted[1], tuple)
    other = join(many, tmp_path / "whole")
    assert store.paths() == other.paths() == images.paths
    np.testing.assert_array_equal(store.labels, images.labels)
    ids = np.random.default_rng(0).permutation(COUNT)
    for mine, theirs in zip(store.rows(ids), other.rows(ids), strict=True):
        np.testing.assert_allclose(mine.astype(np.float64), theirs.astype(np.float64), atol=0.02)
    assert sorted(p.name for p in (tmp_path / "maps").iterdir()) == [MANIFEST, PLAN, SHARDS]
    status = measure_status(tmp_path / "maps")
    assert (status.images_done, status.images, status.unlisted) == (COUNT, COUNT, 0)
    before = files(tmp_path / "maps")
    assert label(data, tmp_path / "maps") is None
    assert files(tmp_path / "maps") == before


def test_maps_are_compared_with_images_shard_by_shard(many, data, tmp_path):
    store, images = label(data, tmp_path / "maps"), Images(many)
    store.check(images.fingerprint(), many, images)
    pack(Packing(data=many, maps=store.path, out=tmp_path / "x.beton"))
    images.paths[50] += ".jpg"
    with pytest.raises(UserError, match="holds the maps of another dataset"):
        store.check(images.fingerprint(), many, images)
    with pytest.raises(UserError, match=r"pack the images again with tools/pack_dataset.py --maps"):
        store.check(images.fingerprint(), many)
    with pytest.raises(UserError, match=r"was labeled with --listing folders.*use the folder"):
        convert(store, tmp_path / "maps.h5", "raw")


def test_two_workers_share_the_folders(data, tmp_path, bucket, counted):
    label(data, tmp_path / "maps")
    labeled = sorted(call for call in counted if isinstance(call, tuple))
    counted.clear()
    works = [begin(data) for _ in range(2)]
    threads = [
        threading.Thread(target=join_folders, args=(work, bucket / "maps", SIZE)) for work in works
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(call for call in counted if isinstance(call, tuple)) == labeled
    assert objects(bucket / "maps") == files(tmp_path / "maps")


def test_faults_that_pass_leave_the_same_bytes(data, tmp_path, bucket, disturb):
    label(data, tmp_path / "maps")
    proxy = disturb(cycle_faults(3, "InternalError", "SlowDown", "lost", "cut", "stale"))
    label(data, bucket / "maps")
    proxy.choose = lambda *_: ""
    assert objects(bucket / "maps") == files(tmp_path / "maps")


def stop_after(monkeypatch, shards: int) -> None:
    """Let a worker end like a killed one once it has labeled some shards."""
    real, calls = workers.label_rows, []

    def label_rows(*words):
        calls.append(words)
        if len(calls) > shards:
            raise KeyboardInterrupt
        return real(*words)

    monkeypatch.setattr(workers, "label_rows", label_rows)


def test_images_that_change_while_it_is_interrupted_are_found(data, tmp_path, monkeypatch, counted):
    """One is removed and one added: the plan of their folder is replaced."""
    with monkeypatch.context() as patched:
        stop_after(patched, 2)
        with pytest.raises(KeyboardInterrupt):
            label(data, tmp_path / "maps")
    status = measure_status(tmp_path / "maps")
    assert (status.shards_done, status.unlisted) == (2, 1)
    assert status.lines()[0].endswith("; 1 of 2 class folders are not listed yet")
    folder = next(call for call in counted if isinstance(call, str))
    store = connect(data)
    last = sorted(o["path"] for part in obstore.list(store, f"data/{folder}") for o in part)[-1]
    obstore.put(store, f"data/{folder}/900.jpg", bytes(obstore.get(store, last).bytes()))
    obstore.delete(store, last)
    counted.clear()
    again = label(data, tmp_path / "maps")
    assert sorted(call for call in counted if isinstance(call, str)) == ["cat", "dog"]
    assert files(again.path) == files(label(data, tmp_path / "fresh").path)


def test_a_finished_store_finds_what_has_changed(data, tmp_path, counted):
    label(data, tmp_path / "maps")
    shards = sum(isinstance(call, tuple) for call in counted)
    obstore.delete(connect(data), "data/dog/033.jpg")
    counted.clear()
    label(data, tmp_path / "maps")
    labeled = sum(isinstance(call, tuple) for call in counted)
    assert 1 <= labeled < shards / 2
    assert len(ScoreMapStore(tmp_path / "maps")) == COUNT - 1
    assert files(tmp_path / "maps") == files(label(data, tmp_path / "fresh").path)


def test_named_images_and_lost_shards_are_labeled_again(data, tmp_path, capsys, counted):
    out = label(data, tmp_path / "maps").path
    before = files(out)
    redo_images(out, ("cat/010.jpg",))
    first = next(path for path in sorted((out / SHARDS).glob("*.h5")))
    first.unlink()
    counted.clear()
    label(data, out)
    assert "is missing or was cut" in capsys.readouterr().out
    assert sum(isinstance(call, tuple) for call in counted) == 2
    assert files(out) == before


def test_damaged_records_and_cut_shards_are_labeled_again(data, tmp_path, counted):
    out = label(data, tmp_path / "maps").path
    before = files(out)
    records, shards = sorted((out / SHARDS).glob("*.json")), sorted((out / SHARDS).glob("*.h5"))
    records[0].write_bytes(b"{")
    os.truncate(shards[1], 500)
    counted.clear()
    label(data, out)
    assert sum(isinstance(call, tuple) for call in counted) == 2
    assert files(out) == before


def test_a_folder_that_cannot_be_listed_is_left_alone(data, tmp_path, capsys):
    store = connect(data)
    obstore.put(store, "data/cat/more/1.jpg", b"x")
    with pytest.raises(UserError, match=r"data/cat/more/1.jpg is in a folder below cat"):
        label(data, tmp_path / "maps")
    assert capsys.readouterr().out.count("folder cat is left") == 1
    assert measure_status(tmp_path / "maps").images_done == COUNT // 2
    obstore.delete(store, "data/cat/more/1.jpg")
    label(data, tmp_path / "maps")
    assert files(tmp_path / "maps") == files(label(data, tmp_path / "fresh").path)


def test_the_other_listing_is_refused_by_name(many, data, tmp_path):
    label(data, tmp_path / "maps")
    with pytest.raises(UserError, match="started with --listing folders, not whole; give the same"):
        join(many, tmp_path / "maps")
    join(many, tmp_path / "whole")
    with pytest.raises(UserError, match="started with --listing whole, not folders; give the same"):
        label(data, tmp_path / "whole")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data", "x", "--workers-join"], "is for class folders at --data s3://"),
        (["--data", "s3://b/x", "--dataset", "tar", "--workers-join"], "is for class folders at"),
        (["--data", "s3://b/x"], "--listing folders needs --workers-join, and no --dry-run"),
    ],
)
def test_options_that_exclude_it_are_one_sentence(command, tmp_path, words, said):
    words += ["--listing", "folders", "--teacher", "x", "--out", tmp_path / "maps"]
    done = command("tools/relabel_imagenet.py", *words)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.slow
def test_the_command_labels_by_folders(data, bucket, tmp_path, command):
    weights, out = tmp_path / "teacher.safetensors", bucket / "maps"
    from safetensors.torch import save_file

    torch.manual_seed(0)
    save_file(timm.create_model("test_resnet", num_classes=2).state_dict(), weights)
    words = ["tools/relabel_imagenet.py", "--data", data, "--teacher", weights, "--out", out]
    words += ["--model", "test_resnet", "--input-size", 64, "--top-k", 2, "--threads", 1]
    words += ["--device", "cpu", "--shard-images", 8, "--workers-join", "--listing", "folders"]
    labeled = command(*words)
    assert labeled.returncode == 0, labeled.stderr
    assert "64 of 64 images are labeled" in command("tools/score_maps.py", "status", out).stdout
    fetched = command("tools/score_maps.py", "fetch", out, tmp_path / "maps")
    assert "accuracy of the stored maps" in fetched.stdout, fetched.stderr
    assert "no faults" in command("tools/score_maps.py", "verify", tmp_path / "maps").stdout


# ------------------------------------------------------------------------------------------ kills


class SlowFolderRender(SlowRender):
    """Also for the images of one folder."""

    def _replace(self, images):
        return SlowFolderRender(self.render._replace(images=images))


def work_until_done(data: ObjectURL, out: ObjectURL) -> None:
    """A worker in a process of its own, whose leases last a second."""
    work = begin(data)
    join_folders(replace(work, render=SlowFolderRender(work.render)), out, SIZE, seconds=1)


@pytest.mark.slow
def test_workers_killed_at_random_times_lose_no_row(data, bucket, tmp_path):
    """Three workers; after each SIGKILL another joins. `make soak` kills 20 times."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["densefeed.relabel.folder_workers", "timm"])
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def start(*words):
        process = context.Process(target=run_with, args=(environment, work_until_done, *words))
        process.start()
        return process

    label(data, tmp_path / "maps")
    seed = 0 if KILLS == 3 else int.from_bytes(os.urandom(4))
    draws, kills, rounds = random.Random(seed), 0, 0
    while kills < KILLS and rounds < 20:
        out = bucket / f"maps-{rounds}"
        store, alive = ObjectStore(out), [start(data, out) for _ in range(3)]
        try:
            wait_for(lambda store=store: store.list(FOLDERS))
            limit = time.monotonic() + 300
            while store.read(MANIFEST) is None:
                assert time.monotonic() < limit
                time.sleep(draws.uniform(0.1, 0.5))
                if kills < KILLS:
                    child = alive.pop(draws.randrange(3))
                    child.kill()
                    child.join()
                    kills += child.exitcode == -signal.SIGKILL
                    alive.append(start(data, out))
            for child in alive:
                child.join(120)
            assert {child.exitcode for child in alive} == {0}
        finally:
            for child in alive:
                child.kill()
        assert objects(out) == files(tmp_path / "maps")
        rounds += 1
    assert kills >= KILLS
    print(f"seed {seed}: {kills} kills in {rounds} passes")

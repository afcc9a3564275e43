"""Workers that share a bucket, through a network that fails.

The reference is one undisturbed worker with a local folder, whose bytes are compared.
"""

# Fixtures of another file are imported, and are arguments too.
# ruff: noqa: F811

import multiprocessing
import os
import random
import re
import shutil
import signal
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from densefeed.relabel import workers
from densefeed.relabel.workers import label
from densefeed.storage.fetch import fetch
from densefeed.storage.images import Images
from densefeed.storage.maintenance import verify_files
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.storage.shard_plan import LEASES, PLAN, SHARDS, measure_status, publish, redo_images
from densefeed.storage.shards import merge_folders
from densefeed.storage.store_folder import MANIFEST, find_changed, read_manifest
from densefeed.system import errors
from densefeed.system.errors import UserError
from densefeed.system.object_store import ObjectStore, StorageError, connect
from densefeed.system.object_url import ObjectURL

from ..object_storage import SECRET, cycle_faults, run_with
from .test_workers import (
    COUNT,
    KILLS,
    SIZE,
    SlowRender,
    begin,
    files,
    join,
    many,  # noqa: F401
    plan,
    wait_for,
    whole,  # noqa: F401
)

obstore = pytest.importorskip("obstore")

slow = pytest.mark.slow
pytestmark = pytest.mark.usefixtures("one_thread")


def objects(out: ObjectURL) -> dict[str, bytes]:
    """The content of a store by the names of its objects."""
    store = connect(out)
    paths = [found["path"] for part in obstore.list(store, out.key) for found in part]
    return {p.removeprefix(f"{out.key}/"): bytes(obstore.get(store, p).bytes()) for p in paths}


def copied(whole: Path) -> dict[str, bytes]:
    """The files of a store that readers need, which a copy has."""
    return {n: c for n, c in files(whole).items() if n == MANIFEST or n.endswith(".h5")}


def test_the_objects_are_the_files_of_a_folder(many, whole, bucket, tmp_path, capsys):
    out = bucket / "some" / "maps"
    assert join(many, out) is None
    assert objects(out) == files(whole)
    assert not any(SECRET.encode() in content for content in objects(out).values())
    assert join(many, out) is None
    status = measure_status(out)
    assert (status.images_done, status.shards_done) == (COUNT, len(plan(many).shards))
    assert status.workers == 0
    copy = fetch(out, tmp_path / "copy")
    assert files(copy.path) == copied(whole)
    assert find_changed(copy.path, read_manifest(copy.path)) == []


@slow
def test_two_workers_divide_the_shards(many, whole, bucket, monkeypatch):
    labeled, real = [], workers.label_rows

    def label_rows(work, writer, start, update):
        labeled.append(start)
        return real(work, writer, start, update)

    monkeypatch.setattr(workers, "label_rows", label_rows)
    works = [begin(many) for _ in range(2)]
    threads = [
        threading.Thread(target=label, args=(work, bucket / "maps"), kwargs={"shard_images": SIZE})
        for work in works
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(labeled) == [shard.rows.start for shard in plan(many).shards]
    assert objects(bucket / "maps") == files(whole)


def store_whole(whole: Path, out: ObjectURL) -> ObjectURL:
    """Upload a finished store."""
    for name, content in files(whole).items():
        obstore.put(connect(out), (out / name).key, content)
    return out


def test_a_late_worker_is_identical_or_refused(many, whole, bucket, tmp_path, capsys):
    out, shard, late = store_whole(whole, bucket / "maps"), plan(many).shards[1], tmp_path / "late"
    (finished,) = (whole / SHARDS).glob(f"{shard.name}-*.h5")
    shutil.copy(finished, late)
    assert publish(ObjectStore(out), shard, late)
    assert objects(out) == files(whole)
    late.write_bytes(finished.read_bytes() + b"x")
    assert not publish(ObjectStore(out), shard, late)
    assert "published other bytes before" in capsys.readouterr().out
    assert objects(out) == files(whole)


def test_named_images_and_lost_shards_are_labeled_again(many, whole, bucket, tmp_path, capsys):
    out = store_whole(whole, bucket / "maps")
    with pytest.raises(UserError, match=r"no finished shard of s3://.*/maps has the image cat/x"):
        redo_images(out, ("cat/x.jpg",))
    with pytest.raises(UserError, match="no image was named"):
        redo_images(out, ())
    redo_images(out, (Images(many).paths[20],))
    with pytest.raises(UserError, match=r"shards/.*.h5 is missing or truncated; run the labeling"):
        fetch(out, tmp_path / "copy")
    first = sorted(name for name in objects(out) if name.endswith(".h5"))[0]
    ObjectStore(out).remove(first)
    assert measure_status(out).shards_done == len(plan(many).shards) - 2
    join(many, out)
    assert "is missing or truncated" in capsys.readouterr().out
    assert objects(out) == files(whole)


def test_another_labeling_is_refused(many, whole, bucket):
    out = store_whole(whole, bucket / "maps")
    with pytest.raises(UserError, match=r"s3://.*/maps was started with another top k"):
        join(many, out, top_k=1)


# ----------------------------------------------------------------------------------------- copies


def test_a_copy_fetches_what_is_missing_and_drops_what_is_gone(many, whole, bucket, tmp_path):
    out, copy = store_whole(whole, bucket / "maps"), tmp_path / "copy"
    first, second, *_ = sorted((fetch(out, copy).path / SHARDS).glob("*.h5"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:1000])
    other = copy / SHARDS / f"{'0' * 16}-{'1' * 16}.h5"
    other.write_bytes(b"")
    kept = {path: path.stat().st_ino for path in (copy / SHARDS).iterdir()}
    fetch(out, copy)
    assert files(copy) == copied(whole)
    changed = {path for path, number in kept.items() if not path.exists() or path in (first, other)}
    assert changed == {other}
    assert sum(p.stat().st_ino == kept.get(p) for p in (copy / SHARDS).iterdir()) == len(kept) - 2


@pytest.mark.parametrize("damage", ["bit", "manifest"])
def test_a_damaged_copy_is_mended(whole, bucket, tmp_path, damage, capsys):
    out, copy = store_whole(whole, bucket / "maps"), tmp_path / "copy"
    fetch(out, copy)
    path = copy / MANIFEST if damage == "manifest" else min((copy / SHARDS).glob("*.h5"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content[:100] if damage == "manifest" else content)
    with pytest.raises(UserError, match=r"of a folder do what is said of each shard"):
        verify_files((copy,))
    assert "or fetch it again if it is a copy" in capsys.readouterr().out
    fetch(out, copy)
    assert files(copy) == copied(whole)
    verify_files((copy,))


def test_a_copy_is_not_taken_for_a_labeling(many, whole, bucket, tmp_path):
    copy = tmp_path / "copy"
    fetch(store_whole(whole, bucket / "maps"), copy)
    for use in (measure_status, lambda place: redo_images(place, ("x.jpg",)), partial(join, many)):
        with pytest.raises(UserError, match=r"copy is a copy of a finished store; name the folder"):
            use(copy)
    assert files(copy) == copied(whole)


def test_what_is_no_copy_stays(many, whole, bucket, tmp_path):
    out = bucket / "maps"
    with pytest.raises(UserError, match=r"maps/manifest.json: there is no such object; correct"):
        fetch(out, tmp_path / "copy")
    store_whole(whole, out)
    with pytest.raises(UserError, match="is not a copy of a store; remove it or name another"):
        fetch(out, shutil.copytree(whole, tmp_path / "labeled"))
    join(many, tmp_path / "other", top_k=1)
    (tmp_path / "other" / PLAN).unlink()
    before = files(tmp_path / "other")
    with pytest.raises(UserError, match="other was started with another top k"):
        fetch(out, tmp_path / "other")
    assert files(tmp_path / "other") == before


def test_a_damaged_shard_is_never_copied(whole, bucket, tmp_path, quick_retries):
    out = store_whole(whole, bucket / "maps")
    name = sorted(name for name in objects(out) if name.endswith(".h5"))[0]
    obstore.put(connect(out), (out / name).key, bytes(len(objects(out)[name])))
    with pytest.raises(StorageError, match=rf"{name} does not match its checksum; remove it and"):
        fetch(out, tmp_path / "copy")
    assert not (tmp_path / "copy" / name).exists()
    assert not (tmp_path / "copy" / MANIFEST).exists()


def test_readers_name_the_command_that_copies():
    """An option that takes only paths collapses the URL."""
    path = Path("s3://bucket/maps")
    merge = partial(merge_folders, out=Path("maps.h5"))
    for read in (ScoreMapStore, lambda path: merge((path,)), lambda path: verify_files((path,))):
        with pytest.raises(UserError, match=r"^s3.*score-maps fetch s3://bucket/maps maps`, a"):
            read(path)


# ----------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["InternalError", "SlowDown"], marks=slow),
        pytest.param(["late"], marks=slow),
        pytest.param(["lost", "cut"], marks=slow),
        pytest.param(["stale"], marks=slow),
        ["InternalError", "SlowDown", "lost", "cut", "stale"],
    ],
    ids="-".join,
)
def test_faults_that_pass_leave_the_same_bytes(many, whole, bucket, disturb, tmp_path, names):
    """Half of the first shard is stored too, which S3 would notice by the checksum of a request."""
    cycle, uploads = cycle_faults(3, *names), []

    def choose(method: str, path: str, number: int) -> str:
        if method == "PUT" and path.endswith(".h5"):
            uploads.append(path)
            return "half" if len(uploads) == 1 else cycle(method, path, number)
        return cycle(method, path, number)

    proxy = disturb(choose)
    out = bucket / "maps"
    join(many, out)
    fetch(out, tmp_path / "copy")
    assert {*names, "half"} <= set(proxy.faults)
    proxy.choose = lambda *_: ""
    assert objects(out) == files(whole)
    assert files(tmp_path / "copy") == copied(whole)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("NoSuchBucket", "there is no such bucket"),
        pytest.param("ExpiredToken", "the credentials have expired; renew them", marks=slow),
        pytest.param("RequestTimeTooSkewed", "the clock of this machine differs", marks=slow),
        pytest.param("AccessDenied", "access was refused", marks=slow),
        pytest.param("SlowDown", "the storage refuses more requests", marks=slow),
    ],
)
def test_a_fault_that_stays_ends_in_one_sentence(
    many, whole, bucket, disturb, capsys, fault, words
):
    """It begins in the middle of the labeling, of which nothing is left half done."""
    work = begin(many)
    proxy = disturb(lambda method, path, number: fault if number > 60 else "")
    with pytest.raises(SystemExit) as end:
        errors.run(lambda: label(work, bucket / "maps", shard_images=SIZE))
    assert end.value.code == 2
    shown = capsys.readouterr()
    assert re.search(rf"^error: s3://bucket-\w+/maps/\S+: {words}[^\n]*$", shown.err, re.MULTILINE)
    assert SECRET not in shown.out + shown.err
    assert proxy.faults[fault]
    proxy.choose = lambda *_: ""
    there = objects(bucket / "maps")
    records = [name for name in there if re.fullmatch(rf"{SHARDS}/\w+\.json", name)]
    assert 0 < len(records) < len(plan(many).shards)
    assert MANIFEST not in there
    want = files(whole)
    assert all(there[name] == want[name] for name in there if name.startswith(SHARDS))
    # It continues, once the lease of the one that ended is released or over.
    label(work, bucket / "maps", shard_images=SIZE, seconds=0.5)
    assert objects(bucket / "maps") == files(whole)


# ------------------------------------------------------------------------------------------ kills


def work_until_done(folder: Path, out: ObjectURL) -> None:
    """A worker in a process of its own, whose leases last a second."""
    work = begin(folder)
    slow = replace(work, render=SlowRender(work.render))
    label(slow, out, shard_images=SIZE, seconds=1)


@pytest.fixture(scope="module")
def processes():
    """A function that starts workers with all modules imported, as children of a fork server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["densefeed.relabel.workers", "timm"])

    def start(*words):
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = context.Process(target=run_with, args=(environment, work_until_done, *words))
        process.start()
        return process

    return start


@slow
def test_workers_killed_at_random_times_lose_no_row(many, whole, bucket, processes):
    """Four workers; after each SIGKILL another joins, and one is stopped for longer than its lease.

    `make soak` kills 20 times. Passes are repeated until one that was killed held a lease.
    """
    seed = 0 if KILLS == 3 else int.from_bytes(os.urandom(4))
    draws, kills, resumed, rounds = random.Random(seed), 0, 0, 0
    while kills < KILLS or (resumed < 2 and rounds < 20):
        out = bucket / f"maps-{rounds}"
        store, alive = ObjectStore(out), [processes(many, out) for _ in range(5)]
        stopped = alive.pop()
        try:
            wait_for(lambda store=store: store.list(SHARDS))
            os.kill(stopped.pid, signal.SIGSTOP)
            limit = time.monotonic() + 300
            while store.read(MANIFEST) is None:
                assert time.monotonic() < limit
                time.sleep(draws.uniform(0.1, 0.5))
                resumed = max(resumed, count_generations(store))
                if kills < KILLS or resumed < 2:
                    child = alive.pop(draws.randrange(4))
                    child.kill()
                    child.join()
                    kills += child.exitcode == -signal.SIGKILL
                    alive.append(processes(many, out))
            os.kill(stopped.pid, signal.SIGCONT)
            for child in [*alive, stopped]:
                child.join(120)
            assert {child.exitcode for child in [*alive, stopped]} == {0}
        finally:
            for child in [*alive, stopped]:
                child.kill()
        assert objects(out) == files(whole)
        rounds += 1
    # Some of them held leases.
    assert resumed > 1
    print(f"seed {seed}: {kills} kills in {rounds} passes, up to {resumed} holders of a shard")


def count_generations(store: ObjectStore) -> int:
    """The most holders that the lease of any unfinished shard had."""
    return max((int(name.rpartition(".")[2]) for name in store.list(LEASES)), default=0)


@slow
def test_the_commands_take_a_url(many, bucket, tmp_path, command):
    """Label, show the progress, copy, read; errors are one sentence and exit code 2."""
    import timm
    import torch
    from safetensors.torch import save_file

    weights, out = tmp_path / "teacher.safetensors", bucket / "maps"
    torch.manual_seed(0)
    save_file(timm.create_model("test_resnet", num_classes=2).state_dict(), weights)
    words = ["tools/relabel_imagenet.py", "--data", many, "--teacher", weights]
    words += ["--model", "test_resnet", "--input-size", 64, "--top-k", 2, "--threads", 1]
    words += ["--device", "cpu", "--shard-images", 8, "--out"]
    missing = command(*words, "s3://no-such-bucket/maps")
    assert missing.returncode == 2
    assert re.fullmatch(
        r"error: s3://no-such-bucket/\S+: there is no such bucket.*\n",
        missing.stderr.splitlines(True)[-1],
    )
    labeled = command(*words, out)
    assert labeled.returncode == 0, labeled.stderr
    assert f"{out} is finished; copy it with" in labeled.stdout
    assert "64 of 64 images are labeled" in command("tools/score_maps.py", "status", out).stdout
    fetched = command("tools/score_maps.py", "fetch", out, tmp_path / "maps")
    assert "accuracy of the stored maps" in fetched.stdout, fetched.stderr
    assert "no faults" in command("tools/score_maps.py", "verify", tmp_path / "maps").stdout
    refused = command("tools/audit.py", out, "--data", many)
    assert refused.returncode == 2
    assert f"fetch {out} maps" in refused.stderr
    assert SECRET not in labeled.stdout + labeled.stderr + fetched.stdout + missing.stderr


def test_parts_of_killed_workers_are_removed(tmp_path, monkeypatch):
    """Only of those that are dead: a lock shows who lives."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = tmp_path / f"densefeed-{os.getuid()}.123.part"
    dead.mkdir()
    (dead / "rows").write_bytes(b"x")
    with ObjectStore.make_parts() as one, ObjectStore.make_parts() as other:
        assert sorted(tmp_path.iterdir()) == sorted([one, other])
        assert one.stat().st_mode & 0o777 == 0o700
        (one / "rows").write_bytes(np.zeros(3).tobytes())
    assert list(tmp_path.iterdir()) == []

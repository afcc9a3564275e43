"""Workers that share a folder or a bucket: they join, leave, are killed and stop at any time.

The reference is one undisturbed worker, whose shards are compared byte by byte.
"""

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from densefeed.relabel import workers
from densefeed.relabel.audit import audit
from densefeed.relabel.labeling import begin_pass
from densefeed.relabel.teacher import Teacher
from densefeed.relabel.workers import Share, label
from densefeed.storage.images import Images, sample_evenly
from densefeed.storage.maintenance import convert
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.storage.selection import select
from densefeed.storage.shard_plan import (
    LEASES,
    PARTS,
    PLAN,
    SHARDS,
    measure_status,
    plan_shards,
    publish,
    redo_images,
    shards_folder,
    share_plan,
)
from densefeed.storage.shards import merge_folders
from densefeed.storage.store_folder import MANIFEST, SIZED_FILES
from densefeed.system.errors import UserError
from densefeed.system.leases import Leases
from densefeed.system.object_folder import ObjectFolder, open_objects
from densefeed.system.object_store import connect
from densefeed.system.object_url import ObjectURL

from ..object_storage import run_with
from ..runs import label_words

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("SOAK_KILLS", 3))
COUNT, SIZE = 64, 8
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """64 small JPEGs in two classes."""
    root, rng = tmp_path_factory.mktemp("many"), np.random.default_rng(0)
    for number in range(COUNT):
        path = root / ("cat", "dog")[number % 2] / f"{number:03d}.jpg"
        path.parent.mkdir(exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
        coarse.resize((int(rng.integers(40, 90)), 50), Image.Resampling.BICUBIC).save(path)
    return root


def begin(folder: Path | Images, top_k: int = 2, form: str = "raw", size: int = 64):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "interpolation": "bilinear"}
    teacher = Teacher(timm.create_model("test_resnet", num_classes=2), size, "squash", config)
    options = dict(top_k=top_k, batch=4, threads=1, absent="tail", form=form)
    images = folder if isinstance(folder, Images) else Images(folder)
    return begin_pass(images, teacher, "t", **options)


def join(folder: Path, out: Path, seconds: float = 5, images: int = SIZE, **options):
    return label(begin(folder, **options), out, shard_images=images, seconds=seconds)


@pytest.fixture(params=["maps", "bucket"])
def out(request, tmp_path) -> Path | ObjectURL:
    """The place of a store, on a disk or in object storage."""
    if request.param != "bucket":
        return tmp_path / request.param
    pytest.importorskip("obstore")
    return request.getfixturevalue("bucket") / "maps"


def files(out: Path | ObjectURL) -> dict[str, bytes]:
    """The content of a store by the names of its files."""
    if isinstance(out, ObjectURL):
        store = connect(out)
        paths = [found["path"] for part in store.list(out.key) for found in part]
        return {p.removeprefix(f"{out.key}/"): bytes(store.get(p).bytes()) for p in paths}
    return {
        str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()
    }


def copy_store(whole: Path, out: Path | ObjectURL) -> Path | ObjectURL:
    """Copy a finished store to another place."""
    for name, content in files(whole).items():
        open_objects(out).replace(name, content)
    return out


@pytest.fixture(scope="module")
def whole(many, tmp_path_factory, one_thread) -> Path:
    """The store of one undisturbed worker."""
    out = tmp_path_factory.mktemp("whole") / "maps"
    assert join(many, out).path == out
    return out


def test_one_worker_gives_the_rows_of_a_single_file(many, whole, tmp_path):
    """Shards may end in smaller batches, where a convolution may sum in another order."""
    work = begin(many)
    one, ours = label(work, tmp_path / "maps.h5"), ScoreMapStore(whole)
    assert len(ours._file.files) > 3
    assert ours.header == one.header
    assert ours.paths() == one.paths()
    np.testing.assert_array_equal(ours.labels, one.labels)
    ids = np.random.default_rng(0).permutation(COUNT)
    for mine, theirs in zip(ours.rows(ids), one.rows(ids), strict=True):
        np.testing.assert_allclose(mine.astype(np.float64), theirs.astype(np.float64), atol=0.02)
    # Nothing is left of the work.
    assert sorted(path.name for path in whole.iterdir()) == [MANIFEST, PLAN, SHARDS]
    assert join(many, whole) is None


@pytest.mark.parametrize("form", ["lossless", "compact"])
def test_workers_write_every_form(many, whole, tmp_path, form):
    store, raw = join(many, tmp_path / "maps", form=form), ScoreMapStore(whole)
    ids = np.random.default_rng(0).permutation(COUNT)
    assert store.header.form == form
    for mine, theirs in zip(store.rows(ids), raw.rows(ids), strict=True):
        if form == "lossless":
            np.testing.assert_array_equal(mine, theirs)
    if form == "compact":
        errors = [ScoreMapStore(file.path).error for file in store._file.files]
        assert store.error.probability_max == max(error.probability_max for error in errors)
        assert 0 < store.error.variation_mean < store.error.variation_max < 0.01


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "out", ["maps", "maps.h5", pytest.param("bucket", marks=pytest.mark.slow)], indirect=True
)
def test_two_workers_divide_the_shards(many, whole, tmp_path, monkeypatch, out):
    """Two at once, as threads: each shard is labeled once, and one of them completes the store."""
    labeled, real = [], workers.label_rows

    def label_rows(work, writer, start, update):
        labeled.append(start)
        return real(work, writer, start, update)

    monkeypatch.setattr(workers, "label_rows", label_rows)
    works, made = [begin(many) for _ in range(2)], []
    threads = [
        threading.Thread(target=lambda w=w: made.append(label(w, out, shard_images=SIZE)))
        for w in works
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    batch = works[0].batch if out.name == "maps.h5" else 0
    shards = plan_shards(works[0].images, works[0].header, SIZE, batch).shards
    assert sorted(labeled) == [shard.rows.start for shard in shards]
    assert isinstance(out, ObjectURL) or any(store is not None for store in made)
    if out.name == "maps":
        assert files(out) == files(whole)
    else:
        want = convert(ScoreMapStore(whole), tmp_path / "want.h5", "raw")
        assert out.read_bytes() == want.path.read_bytes()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["maps.h5", "want.h5"]


def plan(folder: Path):
    work = begin(folder)
    return plan_shards(work.images, work.header, SIZE)


def stop_after(patch, batches: int) -> None:
    """Raise KeyboardInterrupt after `batches` scored batches."""
    from densefeed.relabel.scoring import Scorer

    begin, calls = Scorer.begin, iter(range(10**9))

    def begun(self, *words):
        if next(calls) == batches:
            raise KeyboardInterrupt
        return begin(self, *words)

    patch.setattr(Scorer, "begin", begun)


def test_a_worker_continues_with_the_rows_of_one_that_left(many, whole, tmp_path, monkeypatch):
    """A released lease is taken at once; no batch is scored twice."""
    from densefeed.relabel.scoring import Scorer

    out = tmp_path / "maps"
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        with pytest.raises(KeyboardInterrupt):
            join(many, out, images=32)
    status = measure_status(out)
    assert status.images == COUNT
    assert status.workers == 0
    scored, begin_batch = [], Scorer.begin
    monkeypatch.setattr(
        Scorer, "begin", lambda self, *w: (scored.append(w[1]), begin_batch(self, *w))[1]
    )
    monkeypatch.setattr(workers.time, "sleep", lambda seconds: pytest.fail("waited"))
    work = begin(many)
    scored.clear()
    store = label(work, out, shard_images=32)
    assert sum(scored) <= COUNT - 5 * 4
    want = join(many, tmp_path / "want", images=32)
    for ours, theirs in zip(store.rows(np.arange(COUNT)), want.rows(np.arange(COUNT)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", ["raw", "compact"])
def test_a_file_is_made_of_its_shards(many, whole, tmp_path, monkeypatch, form):
    """Also by a run that follows one killed at the conversion; then it is finished already."""
    out, want = tmp_path / "maps.h5", convert(ScoreMapStore(whole), tmp_path / "raw.h5", "raw")
    if form != "raw":
        want = convert(want, tmp_path / "want.h5", form)
    with monkeypatch.context() as patch:
        patch.setattr("densefeed.storage.shards.convert", lambda *words: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            join(many, out, form=form)
    assert measure_status(out).images_done == COUNT
    monkeypatch.setattr(workers, "label_rows", lambda *words: pytest.fail("labeled again"))
    assert join(many, out, form=form).header.form == form
    assert out.read_bytes() == want.path.read_bytes()
    assert not shards_folder(out).exists()
    # Killed before it had removed all.
    shutil.copytree(whole, shards_folder(out))
    assert join(many, out, form=form).path == out
    assert not shards_folder(out).exists()
    with pytest.raises(UserError, match=r"maps.h5 exists already; remove it or choose another"):
        join(many, out, form=form, top_k=1)


def test_a_worker_that_comes_after_the_last_shard_labels_nothing(many, tmp_path, monkeypatch):
    """Between its look for the file and its plan another worker finishes the file."""
    out, real, labeled = tmp_path / "maps.h5", workers.plan_shards, []

    def plan_late(*words):
        monkeypatch.setattr(workers, "plan_shards", real)
        assert join(many, out) is not None
        monkeypatch.setattr(workers, "label_rows", lambda *words: labeled.append(words))
        return real(*words)

    monkeypatch.setattr(workers, "plan_shards", plan_late)
    assert join(many, out) is None
    assert not labeled
    assert [path.name for path in tmp_path.iterdir()] == ["maps.h5"]
    # That of another labeling is refused, not taken for this one.
    out.unlink()
    monkeypatch.undo()
    monkeypatch.setattr(workers, "plan_shards", plan_late)
    with pytest.raises(UserError, match=r"maps.h5 exists already"):
        join(many, out, top_k=1)


def test_shares_are_joined_to_the_bytes_of_one_labeling(many, whole, tmp_path, monkeypatch):
    """Machines without a common disk label every third shard each."""
    parts = [tmp_path / f"part-{n}" for n in range(3)]
    for number, out in enumerate(parts):
        share = Share.parse(f"{number}/3")
        assert label(begin(many), out, shard_images=SIZE, share=share) is None
    with pytest.raises(UserError, match=r"shards are in none of these folders, the first is"):
        merge_folders((parts[0], parts[2]), tmp_path / "maps")
    merge_folders(tuple(parts), tmp_path / "maps")
    readers = {name for name in files(whole) if name == MANIFEST or name.endswith(".h5")}
    assert files(tmp_path / "maps") == {name: files(whole)[name] for name in readers}
    with monkeypatch.context() as without_links:

        def link(*_: object) -> None:
            raise OSError(errno.ENOSYS, "Function not implemented")

        without_links.setattr(os, "link", link)
        merge_folders(tuple(parts), tmp_path / "copied")
    assert files(tmp_path / "copied") == files(tmp_path / "maps")
    merge_folders((whole,), tmp_path / "one.h5")
    merge_folders(tuple(parts), tmp_path / "joined.h5")
    assert (tmp_path / "one.h5").read_bytes() == (tmp_path / "joined.h5").read_bytes()
    assert len(ScoreMapStore(tmp_path / "joined.h5")) == COUNT
    assert not shards_folder(tmp_path / "joined.h5").exists()
    with pytest.raises(UserError, match=r"one.h5 exists already"):
        merge_folders((whole,), tmp_path / "one.h5")
    with pytest.raises(UserError, match=r"--form compact is for one file"):
        merge_folders((whole,), tmp_path / "again", form="compact")
    # Shards of other images or options, and damaged ones.
    label(begin(many, top_k=1), tmp_path / "other", shard_images=SIZE, share=Share(1, 3))
    with pytest.raises(UserError, match=r"other was started with another top k"):
        merge_folders((parts[0], tmp_path / "other"), tmp_path / "again")
    label(begin(many), tmp_path / "large", shard_images=16, share=Share(1, 3))
    with pytest.raises(UserError, match=r"large has other shards than .*part-0"):
        merge_folders((parts[0], tmp_path / "large"), tmp_path / "again")
    shard = min((parts[1] / SHARDS).glob("*.h5"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=rf"{shard.name} does not match its checksum; remove it"):
        merge_folders(tuple(parts), tmp_path / "again.h5")
    assert not (tmp_path / "again.h5").exists()


@pytest.mark.parametrize("text", ["8/8", "1", "-1/8", "1/0", "a/b", "1/8/2"])
def test_a_share_is_parsed_as_index_of_count(many, tmp_path, text):
    assert Share.parse("7/8") == Share(7, 8)
    with pytest.raises(UserError, match=r"--shard .* is not a share; write it as 0/8"):
        Share.parse(text)
    with pytest.raises(UserError, match=r"--shard writes a folder, .* give --out maps$"):
        label(begin(many), tmp_path / "maps.h5", share=Share(0, 2))


@pytest.mark.one_in(2)
def test_a_late_worker_is_identical_or_refused(many, whole, out, tmp_path, capsys):
    objects, shard = open_objects(copy_store(whole, out)), plan(many).shards[1]
    (finished,) = (whole / SHARDS).glob(f"{shard.name}-*.h5")
    late = tmp_path / "late.h5"
    for more in (b"", b"x"):
        late.write_bytes(finished.read_bytes() + more)
        assert publish(objects, shard, late) == (not more)
        assert ("published other bytes before" in capsys.readouterr().out) == bool(more)
        assert files(out) == files(whole)


def test_a_worker_that_lost_its_lease_leaves_the_shard(many, whole, tmp_path, monkeypatch, capsys):
    """While a worker labels its first shard, another one takes and finishes it."""
    out, real, taken = tmp_path / "maps", workers.label_rows, []

    def label_rows(work, writer, start, update):
        if not taken:
            taken.append(start)
            # As if the first worker was stopped for longer than its lease.
            monkeypatch.setattr(workers.Leases, "_is_free", lambda *words: True)
            assert join(many, out) is not None
            # The next renewal finds that it is gone.
            time.sleep(0.8)
        return real(work, writer, start, update)

    monkeypatch.setattr(workers, "label_rows", label_rows)
    assert join(many, out, seconds=2) is None
    assert "is another worker's now; this one leaves it" in capsys.readouterr().out
    assert files(out) == files(whole)


def test_the_status_counts_finished_and_unfinished_shards(many, tmp_path, monkeypatch):
    out, real, seen = tmp_path / "maps", workers.label_rows, []

    def label_rows(work, writer, start, update):
        before = measure_status(out)

        def updated(count: int) -> None:
            update(count)
            # Once, after a batch of a shard of several, until the thread of the lease reports it.
            if before.shards_done and not seen and count < len(writer.done):
                wait_for(lambda: measure_status(out).images_done > before.images_done)
                seen.append((measure_status(out), before.images_done + count))

        return real(work, writer, start, updated)

    monkeypatch.setattr(workers, "label_rows", label_rows)
    join(many, out, seconds=1)
    ((status, images),) = seen
    assert (status.workers, status.images, status.images_done) == (1, COUNT, images)
    assert 0 < status.shards_done < status.shards
    last = measure_status(out)
    assert last[:6] == (last.shards, last.shards, COUNT, COUNT, 0, 0)


@pytest.mark.slow
def test_the_commands_write_and_read_a_folder(many, tmp_path, command):
    """Two workers label, and what reads score maps takes the folder."""
    out = tmp_path / "maps"
    words = label_words(many, tmp_path, "--input-size", 64, "--shard-images", 8, "--out", out)
    first = command(*words)
    assert first.returncode == 0, first.stderr
    assert "accuracy of the stored maps" in first.stdout
    assert f"{out} is finished" in command(*words).stdout
    shown = command("tools/score_maps.py", "status", out)
    assert "64 of 64 images are labeled" in shown.stdout, shown.stderr
    assert "no faults" in command("tools/score_maps.py", "verify", out).stdout
    audit = command("tools/audit.py", out, "--data", many)
    assert "all 64 rows are labeled" in audit.stdout + audit.stderr
    run = ["train.py", "lvvit_micro_token_label", "--loader", "folder", "--data", many]
    run += ["--val", many, "--score-maps", out, "--out", tmp_path / "run", "--size", 32]
    run += ["--batch", 32, "--epochs", 1, "--threads", 1, "--device", "cpu"]
    trained = command(*run)
    assert trained.returncode == 0, trained.stderr


# ------------------------------------------------------------------------- changed images


def names(folder: Path) -> list[str]:
    return [shard.name for shard in plan(folder).shards]


def test_only_the_shards_of_changed_images_are_labeled_again(many, tmp_path, capsys):
    folder, out = shutil.copytree(many, tmp_path / "images"), tmp_path / "maps"
    join(folder, out)
    before, shards = files(out), plan(folder).shards
    # The image in the middle of a shard, which no boundary depends on.
    rows = max(shards, key=lambda shard: len(shard.rows)).rows
    (folder / Images(folder).paths[rows[len(rows) // 2]]).unlink()
    kept = set(names(folder)) & {shard.name for shard in shards}
    assert len(kept) == len(shards) - 1
    capsys.readouterr()
    store = join(folder, out)
    assert f"images have changed, 1 of {len(shards)} shards are new" in capsys.readouterr().out
    assert len(store) == COUNT - 1
    assert store.paths() == Images(folder).paths
    images = Images(folder)
    store.check(images.fingerprint(), images.labels, images.paths, folder)
    after = files(out)
    same = {name for name in before if name in after and name.endswith(".h5")}
    assert {name.split("/")[1].split("-")[0] for name in same} == kept
    assert all(before[name] == after[name] for name in same)
    assert len([name for name in after if name.endswith(".h5")]) == len(shards)


def test_a_replaced_image_is_labeled_again_by_name(many, whole, tmp_path):
    """Its path and size are the same, so nothing else shows that it is another."""
    folder, out = shutil.copytree(many, tmp_path / "images"), shutil.copytree(whole, tmp_path / "m")
    (shard,) = [shard for shard in plan(folder).shards if 20 in shard.rows]
    name = Images(folder).paths[20]
    with pytest.raises(UserError, match=r"no finished shard of .*m has the image cat/x.jpg; name"):
        redo_images(out, ("cat/x.jpg",))
    assert files(out) == files(whole)
    pixels, size = np.asarray(Image.open(folder / name)), (folder / name).stat().st_size
    Image.fromarray(255 - pixels).save(folder / name, quality=40)
    (folder / name).write_bytes((folder / name).read_bytes().ljust(size, b"\0"))
    assert plan(folder).to_json() == plan(many).to_json()
    assert join(folder, out) is None
    redo_images(out, (name,))
    assert measure_status(out).images_done == COUNT - len(shard.rows)
    with pytest.raises(UserError, match=rf"{shard.name}.*there is no such file"):
        ScoreMapStore(out)
    redone, before = join(folder, out), ScoreMapStore(whole)
    ids = np.arange(COUNT)
    changed = (redone.rows(ids).logit != before.rows(ids).logit).any((1, 2, 3))
    assert np.flatnonzero(changed).tolist() == [20]


def replace_unsampled(folder: Path) -> int:
    """Replace an image whose size is in the fingerprint of the dataset and in that of no shard."""
    work = begin(folder)
    sampled = {
        shard.rows[place]
        for shard in plan_shards(work.images, work.header, COUNT).shards
        for place in sample_evenly(len(shard.rows), SIZED_FILES).tolist()
    }
    place = min(set(range(COUNT)) - sampled)
    path = folder / work.images.paths[place]
    Image.fromarray(255 - np.asarray(Image.open(path))).save(path, quality=30)
    return place


@pytest.mark.parametrize("finished", [True, False])
def test_a_replaced_image_is_found_by_the_sizes_in_the_plan(many, tmp_path, finished, monkeypatch):
    """Its shard keeps its name; unfinished rows of it are dropped too."""
    folder, out = shutil.copytree(many, tmp_path / "images"), tmp_path / "maps"
    if finished:
        join(folder, out, images=COUNT)
    else:
        with monkeypatch.context() as patch:
            stop_after(patch, 3)
            with pytest.raises(KeyboardInterrupt):
                join(folder, out, images=COUNT)
        assert any((out / PARTS).iterdir())
    replace_unsampled(folder)
    join(folder, out, images=COUNT)
    fresh = join(folder, tmp_path / "fresh", images=COUNT)
    assert files(out) == files(fresh.path)


def test_a_replaced_image_is_found_beside_a_removed_one(many, tmp_path):
    """The rows of all later images differ then."""
    folder, out = shutil.copytree(many, tmp_path / "images"), tmp_path / "maps"
    join(folder, out)
    images = Images(folder)
    (folder / images.paths[0]).unlink()
    Image.new("RGB", (70, 50), (200, 10, 10)).save(folder / images.paths[60], quality=30)
    join(folder, out)
    assert files(out) == files(join(folder, tmp_path / "fresh").path)


def test_an_image_that_cannot_be_read_stops_its_shard_alone(many, whole, tmp_path):
    folder, out = shutil.copytree(many, tmp_path / "images"), tmp_path / "maps"
    path = folder / Images(folder).paths[20]
    sound = path.read_bytes()
    path.write_bytes(sound[:200])
    with pytest.raises(UserError, match=path.name):
        join(folder, out)
    status = measure_status(out)
    assert status.shards_done == status.shards - 1
    assert not (out / MANIFEST).exists()
    with pytest.raises(UserError, match=r"maps is a folder without manifest.json"):
        ScoreMapStore(out)
    path.write_bytes(sound)
    assert len(join(folder, out)) == COUNT
    assert files(out) == files(whole)


def test_a_repaired_image_of_the_only_shard_is_no_other_dataset(many, tmp_path):
    """No shard of the first plan is left, but none of them was finished."""
    folder, out = shutil.copytree(many, tmp_path / "images"), tmp_path / "maps"
    path = folder / Images(folder).paths[0]
    sound = path.read_bytes()
    path.write_bytes(sound[:200])
    with pytest.raises(UserError, match=path.name):
        join(folder, out, images=200)
    path.write_bytes(sound)
    assert len(join(folder, out, images=200)) == COUNT


def test_a_shard_that_is_gone_or_cut_is_labeled_again(many, whole, tmp_path, capsys):
    out = shutil.copytree(whole, tmp_path / "maps")
    first, second = sorted((out / SHARDS).glob("*.h5"))[:2]
    first.unlink()
    os.truncate(second, 1000)
    with pytest.raises(UserError, match=rf"{first}: there is no such file|{second}"):
        ScoreMapStore(out)
    join(many, out)
    assert capsys.readouterr().out.count("are labeled again") == 2
    assert files(out) == files(whole)


@pytest.mark.parametrize("damage", ["empty", "cut", "that of another shard", "rows", "sha256"])
def test_a_damaged_record_is_labeled_again(many, whole, tmp_path, capsys, damage):
    out = shutil.copytree(whole, tmp_path / "maps")
    one, other = sorted((out / SHARDS).glob("*.json"))[:2]
    record = json.loads(one.read_bytes())
    changed = {"rows": record["rows"] + 1, "sha256": "0" * 64}
    damaged = {"empty": b"", "cut": one.read_bytes()[:40]} | {
        name: json.dumps(record | {name: value}).encode() for name, value in changed.items()
    }
    one.write_bytes(damaged.get(damage, other.read_bytes()))
    join(many, out)
    said = f"{one.name} is damaged; {record['rows']} images are labeled again"
    assert said in capsys.readouterr().out
    assert files(out) == files(whole)


def test_maps_are_not_selected_for_another_image_of_the_same_name(many, whole, tmp_path):
    """The plan has the sizes of sampled files, here of all."""
    folder = shutil.copytree(many, tmp_path / "images")
    chosen = select(ScoreMapStore(whole), Images(folder), tmp_path / "chosen.h5")
    assert chosen.paths() == ScoreMapStore(whole).paths()
    path = folder / Images(folder).paths[20]
    Image.new("RGB", (70, 50), (200, 10, 10)).save(path, quality=30)
    with pytest.raises(UserError, match=rf"{path.name} has .* bytes, and had .* another"):
        select(ScoreMapStore(whole), Images(folder), tmp_path / "other.h5")
    assert not (tmp_path / "other.h5").exists()


def test_a_worker_whose_plan_was_replaced_stops_at_the_next_shard(many, tmp_path, monkeypatch):
    """Another command labels other images into the same folder, before a shard is finished."""
    other, out = shutil.copytree(many, tmp_path / "other"), tmp_path / "maps"
    for path in sorted(other.rglob("*.jpg")):
        path.rename(path.with_name(f"x{path.name}"))
    claim, claimed = Leases.claim, []

    def claim_late(self, name):
        lease = claim(self, name)
        if not claimed:
            claimed.append(name)
            share_plan(ObjectFolder(out), plan(other))
        return lease

    monkeypatch.setattr(Leases, "claim", claim_late)
    with pytest.raises(UserError, match=r"another worker labels other images into .*maps: "):
        join(many, out)
    assert [path.stem for path in (out / SHARDS).glob("*.json")] == claimed


@pytest.mark.slow
def test_sigterm_gives_the_lease_back(many, tmp_path, command):
    """Schedulers send it before a preemption; another worker need not wait for a minute."""
    out, slow = tmp_path / "maps", ("--batch", 1, "--input-size", 512, "--tta-views", 8)
    words = label_words(many, tmp_path, *slow, "--out", out)
    worker = subprocess.Popen([sys.executable, *map(str, words)], cwd=ROOT)
    try:
        # Not only its lease: it releases that once it works.
        wait_for(lambda: list((out / PARTS).glob("*.h5.part")))
        worker.terminate()
        assert worker.wait(20) == 130
    finally:
        worker.kill()
    assert measure_status(out).workers == 0
    assert any((out / "leases").iterdir())
    assert command(*words).returncode == 0
    assert measure_status(out).images_done == COUNT


def test_outside_a_worker_with_another_copy_stops_one_of_the_two(many, tmp_path, monkeypatch):
    """A class has another name, or an image is missing, on the disk of the second machine."""
    out, claim = tmp_path / "maps", Leases.claim
    assert label(begin(many), out, shard_images=SIZE, share=Share(0, 8)) is None
    renamed, before = shutil.copytree(many, tmp_path / "renamed"), files(out)
    (renamed / "cat").rename(renamed / "zebra")
    with pytest.raises(UserError, match=r"maps was started for another dataset"):
        join(renamed, out)
    assert files(out) == before
    missing = shutil.copytree(many, tmp_path / "missing")
    min(missing.rglob("*.jpg")).unlink()

    def claim_late(self, name):
        # The second machine begins while the first one labels a shard.
        monkeypatch.setattr(Leases, "claim", claim)
        share_plan(ObjectFolder(out), plan(missing))
        return claim(self, name)

    monkeypatch.setattr(Leases, "claim", claim_late)
    with pytest.raises(UserError, match=r"another worker labels other images into .*maps: "):
        join(many, out)


def test_other_options_are_refused_by_name(many, whole, out, tmp_path):
    copy_store(whole, out)
    with pytest.raises(UserError, match=r"started with another top k \(2, not 1\)"):
        join(many, out, top_k=1)
    with pytest.raises(UserError, match=r"started with --shard-images 8, not 9"):
        join(many, out, images=9)
    other = shutil.copytree(many, tmp_path / "other")
    for path in sorted(other.rglob("*.jpg")):
        path.rename(path.with_name(f"x{path.name}"))
    with pytest.raises(UserError, match=r"maps was started for another dataset; remove it"):
        join(other, out)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=r"file is a file; name a folder, where workers label"):
        join(many, tmp_path / "file")
    assert files(out) == files(whole)


@pytest.mark.slow
def test_torchrun_labels_with_two_ranks_and_reports_once(many, tmp_path):
    """The command gives the bytes of one process and leaves no shard."""
    words = label_words(many, tmp_path, "--input-size", 64, "--batch", 4, "--shard-images", SIZE)
    two, one = (tmp_path / "out" / name for name in ("two.h5", "one.h5"))
    run = dict(cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    begin = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    both = subprocess.run([*begin, *map(str, words), "--out", two], **run)
    assert both.returncode == 0, both.stderr
    alone = subprocess.run([sys.executable, *map(str, words), "--out", one], **run)
    assert alone.returncode == 0, alone.stderr
    assert two.read_bytes() == one.read_bytes()
    assert sorted(os.listdir(tmp_path / "out")) == ["one.h5", "two.h5"]
    # A rank that starts after the other has finished all 8 images finds the file and reports it.
    late = "is finished already" in both.stdout
    assert both.stdout.count("accuracy of the stored maps") == 1 + late
    assert both.stdout.count("images/s; the teacher waited") == COUNT // SIZE


# ------------------------------------------------------------------------- kills


class SlowRender:
    """Renders images, and takes long enough to be killed meanwhile."""

    def __init__(self, render) -> None:
        self.render = render

    def __call__(self, index: int, out: np.ndarray):
        time.sleep(0.06)
        return self.render(index, out)


def work_until_done(folder: Path, out: Path | ObjectURL) -> None:
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


@pytest.mark.slow
def test_workers_killed_at_random_times_lose_no_row(many, whole, out, processes):
    """Four workers; after each SIGKILL another joins, and one is stopped for longer than its lease.

    `make soak` kills 20 times. Passes are repeated until one that was killed held a lease.
    """
    seed = 0 if KILLS == 3 else int.from_bytes(os.urandom(4))
    draws, kills, resumed, rounds = random.Random(seed), 0, 0, 0
    while kills < KILLS or (resumed < 2 and rounds < 20):
        place = out / f"{rounds}"
        objects, alive = open_objects(place), [processes(many, place) for _ in range(5)]
        stopped = alive.pop()
        try:
            wait_for(lambda objects=objects: objects.list(SHARDS))
            os.kill(stopped.pid, signal.SIGSTOP)
            limit = time.monotonic() + 300
            while objects.read(MANIFEST) is None:
                assert time.monotonic() < limit
                time.sleep(draws.uniform(0.1, 0.5))
                # The most holders that the lease of an unfinished shard had.
                generations = (int(name.rpartition(".")[2]) for name in objects.list(LEASES))
                resumed = max(resumed, *generations, 0)
                if kills < KILLS or resumed < 2:
                    child = alive.pop(draws.randrange(4))
                    child.kill()
                    child.join()
                    kills += child.exitcode == -signal.SIGKILL
                    alive.append(processes(many, place))
            os.kill(stopped.pid, signal.SIGCONT)
            for child in [*alive, stopped]:
                child.join(120)
            assert {child.exitcode for child in [*alive, stopped]} == {0}
        finally:
            for child in [*alive, stopped]:
                child.kill()
        assert files(place) == files(whole)
        rounds += 1
    # Some of them held leases.
    assert resumed > 1
    print(f"seed {seed}: {kills} kills in {rounds} passes, up to {resumed} holders of a shard")


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_outside_files_of_others_in_its_folders_stay(many, whole, tmp_path):
    """`shards` is also a common name for the folder of a dataset's tar files."""
    out = tmp_path / "data"
    theirs = [out / SHARDS / "train-000000.tar", out / SHARDS / "classes.txt"]
    theirs += [out / PARTS / "mine.txt", out / LEASES / "a.1"]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"mine")
    join(many, out)
    assert [path.read_bytes() for path in theirs] == [b"mine"] * 4
    ours = files(out).keys() - {str(path.relative_to(out)) for path in theirs}
    assert ours == files(whole).keys()


def test_outside_a_list_may_repeat_its_images(many, tmp_path, capsys):
    """As to show some more often: every shard has a name of its own, and every row its image."""
    lines = [f"{path} {n % 2}\n" for n, path in enumerate(sorted(Images(many).paths))]
    (tmp_path / "twice.txt").write_text("".join(lines) * 2)
    images = Images(many, f"list/{tmp_path / 'twice.txt'}")
    work = begin(images)
    names = [shard.name for shard in plan_shards(images, work.header, SIZE).shards]
    once = [shard.name for shard in plan_shards(Images(many), work.header, SIZE).shards]
    assert len(set(names)) == len(names) > len(once)
    store = label(work, tmp_path / "maps", shard_images=SIZE)
    assert store.paths() == images.paths
    parts = [tmp_path / f"part-{n}" for n in range(2)]
    for number, out in enumerate(parts):
        label(work, out, shard_images=SIZE, share=Share.parse(f"{number}/2"))
    merge_folders(tuple(parts), tmp_path / "joined.h5")
    joined = ScoreMapStore(tmp_path / "joined.h5")
    assert joined.paths() == images.paths
    for result in (audit(store.path, images), audit(joined.path, images)):
        verdicts = {check.name: check.verdict for check in result.checks}
        assert (verdicts["images"], verdicts["duplicates"]) == ("sound", "sound")
    # Every shard that has the image is labeled again.
    redo_images(store.path, (images.paths[0],))
    lacking = [n for n in names if not (store.path / SHARDS / f"{n}.json").exists()]
    assert len(lacking) == 2
    # An earlier version gave shards of the same images one name.
    plan = json.loads((parts[0] / PLAN).read_text())
    plan["shards"][-1] = plan["shards"][0]
    (parts[0] / PLAN).write_text(json.dumps(plan))
    with pytest.raises(UserError, match=r"part-0 was labeled by a version that lost rows of"):
        merge_folders((parts[0],), tmp_path / "again")

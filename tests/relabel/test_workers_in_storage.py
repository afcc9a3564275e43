"""Workers that share a bucket through a network that fails, and copies of what they label.

The reference is one undisturbed worker with a local folder, whose bytes are compared.
"""

# Fixtures of another file are imported, and are arguments too.
# ruff: noqa: F811

import os
import re
import shutil
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from densefeed.relabel.workers import label
from densefeed.storage.fetch import fetch
from densefeed.storage.images import Images
from densefeed.storage.maintenance import verify_files
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.storage.shard_plan import PLAN, SHARDS, measure_status, redo_images
from densefeed.storage.shards import merge_folders
from densefeed.storage.store_folder import MANIFEST, find_changed, read_manifest
from densefeed.system import errors
from densefeed.system.errors import UserError
from densefeed.system.object_store import ObjectStore, StorageError, connect

from ..object_storage import SECRET, cycle_faults
from ..runs import label_words
from .test_workers import (
    COUNT,
    SIZE,
    begin,
    copy_store,
    files,
    join,
    many,  # noqa: F401
    plan,
    whole,  # noqa: F401
)

obstore = pytest.importorskip("obstore")

slow = pytest.mark.slow
pytestmark = pytest.mark.usefixtures("one_thread")


def copied(whole: Path) -> dict[str, bytes]:
    """The files of a store that readers need, which a copy has."""
    return {n: c for n, c in files(whole).items() if n == MANIFEST or n.endswith(".h5")}


def test_the_objects_are_the_files_of_a_folder(many, whole, bucket, tmp_path):
    out = bucket / "some" / "maps"
    assert join(many, out) is None
    assert files(out) == files(whole)
    assert not any(SECRET.encode() in content for content in files(out).values())
    assert join(many, out) is None
    status = measure_status(out)
    assert (status.images_done, status.shards_done) == (COUNT, len(plan(many).shards))
    assert status.workers == 0
    copy = fetch(out, tmp_path / "copy")
    assert files(copy.path) == copied(whole)
    assert find_changed(copy.path, read_manifest(copy.path)) == {}


@pytest.mark.slow
def test_named_images_and_lost_shards_are_labeled_again(many, whole, bucket, tmp_path, capsys):
    out = copy_store(whole, bucket / "maps")
    with pytest.raises(UserError, match=r"no finished shard of s3://.*/maps has the image cat/x"):
        redo_images(out, ("cat/x.jpg",))
    with pytest.raises(UserError, match="no image was named"):
        redo_images(out, ())
    redo_images(out, (Images(many).paths[20],))
    with pytest.raises(UserError, match=r"shards/.*.h5 is missing or truncated; run the labeling"):
        fetch(out, tmp_path / "copy")
    first = sorted(name for name in files(out) if name.endswith(".h5"))[0]
    ObjectStore(out).remove(first)
    assert measure_status(out).shards_done == len(plan(many).shards) - 2
    join(many, out)
    assert "is missing or truncated" in capsys.readouterr().out
    assert files(out) == files(whole)


# ----------------------------------------------------------------------------------------- copies


def test_a_copy_fetches_what_is_missing_and_drops_what_is_gone(many, whole, bucket, tmp_path):
    out, copy = copy_store(whole, bucket / "maps"), tmp_path / "copy"
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
    out, copy = copy_store(whole, bucket / "maps"), tmp_path / "copy"
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
    fetch(copy_store(whole, bucket / "maps"), copy)
    for use in (measure_status, lambda place: redo_images(place, ("x.jpg",)), partial(join, many)):
        with pytest.raises(UserError, match=r"copy is a copy of a finished store; name the folder"):
            use(copy)
    assert files(copy) == copied(whole)


def test_what_is_no_copy_stays(many, whole, bucket, tmp_path):
    out = bucket / "maps"
    with pytest.raises(UserError, match=r"maps/manifest.json: there is no such object; correct"):
        fetch(out, tmp_path / "copy")
    copy_store(whole, out)
    with pytest.raises(UserError, match="is not a copy of a store; remove it or name another"):
        fetch(out, shutil.copytree(whole, tmp_path / "labeled"))
    for name, file in (("notes", SHARDS), ("full", "thesis.txt"), ("page", MANIFEST)):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_bytes(b"mine")
        with pytest.raises(UserError, match=f"{name} is not a copy of a store; remove it or name"):
            fetch(out, tmp_path / name)
        assert list(files(tmp_path / name).values()) == [b"mine"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".DS_Store").write_bytes(b"")
    fetch(out, tmp_path / "empty")
    join(many, tmp_path / "other", top_k=1)
    (tmp_path / "other" / PLAN).unlink()
    before = files(tmp_path / "other")
    with pytest.raises(UserError, match="other was started with another top k"):
        fetch(out, tmp_path / "other")
    assert files(tmp_path / "other") == before


def test_a_damaged_shard_is_never_copied(whole, bucket, tmp_path, quick_retries):
    out = copy_store(whole, bucket / "maps")
    name = sorted(name for name in files(out) if name.endswith(".h5"))[0]
    obstore.put(connect(out), (out / name).key, bytes(len(files(out)[name])))
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
    assert files(out) == files(whole)
    assert files(tmp_path / "copy") == copied(whole)


@pytest.mark.slow
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
    there = files(bucket / "maps")
    records = [name for name in there if re.fullmatch(rf"{SHARDS}/\w+\.json", name)]
    assert 0 < len(records) < len(plan(many).shards)
    assert MANIFEST not in there
    want = files(whole)
    assert all(there[name] == want[name] for name in there if name.startswith(SHARDS))
    # It continues, once the lease of the one that ended is released or over.
    label(work, bucket / "maps", shard_images=SIZE, seconds=0.5)
    assert files(bucket / "maps") == files(whole)


@slow
def test_the_commands_take_a_url(many, bucket, tmp_path, command):
    """Label, show the progress, copy, read; errors are one sentence and exit code 2."""
    out = bucket / "maps"
    words = label_words(many, tmp_path, "--input-size", 64, "--shard-images", 8, "--out")
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

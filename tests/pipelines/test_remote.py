"""Training data in object storage: equal batches, exact reads, faults."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import densefeed
from densefeed.pipelines.dali import DaliLoader
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.remote import RemoteSource
from densefeed.storage import fetch, object_cache
from densefeed.storage.beton import Beton
from densefeed.storage.beton_verify import verify_files
from densefeed.storage.fetch import make_local
from densefeed.storage.images import Images
from densefeed.storage.score_maps import ScoreMaps, ScoreMapWriter
from densefeed.storage.store_file import StoreFile
from densefeed.storage.store_folder import MANIFEST, SIZED_FILES, Manifest, StoredShard
from densefeed.system.errors import UserError
from densefeed.system.files import hash_file, remove_any
from densefeed.system.object_store import ObjectStore, connect
from densefeed.tools.pack_dataset import Packing
from densefeed.tools.pack_dataset import main as pack
from densefeed.tools.validate import Validation, open_source

obstore = pytest.importorskip("obstore")


@pytest.fixture
def local(packed):
    return packed[0]


@pytest.fixture(scope="module")
def uploaded(s3_server, packed):
    """The file of `local` in a bucket, for copies in the server: an upload of 16 MB takes 0.2 s."""
    url = s3_server.make_bucket() / "train.beton"
    s3_server.request("PUT", url, packed[0].read_bytes())
    return url


@pytest.fixture
def url(s3_server, bucket, uploaded):
    source = uploaded.removeprefix("s3://")
    s3_server.request("PUT", bucket / "train.beton", headers={"x-amz-copy-source": source})
    return bucket / "train.beton"


def upload(url, path: Path) -> None:
    obstore.put(connect(url), url.key, path.read_bytes())


def read(source, epochs=(0,), start=0, make=ThreadedLoader, **options):
    """Return the batches of epochs; the first from `start` on."""
    settings = {"batch": 4, "seed": 3, "mode": "train", "sizes": ((0, 32),)} | options
    reader = make(source, EpochPlan(num_samples=len(source.labels), **settings), 2)
    try:
        return [
            batch
            for epoch in epochs
            for batch in reader.batches(epoch, start if epoch == epochs[0] else 0)
        ]
    finally:
        reader.close()


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.tensors.keys() == other.tensors.keys()
        for name, tensor in one.tensors.items():
            assert torch.equal(tensor, other.tensors[name]), name


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "options",
    [{}, {"order": "blocks", "block": 2, "window": 2}, {"repeats": 2}, {"mode": "evaluate"}],
    ids=["random", "blocks", "repeats", "evaluate"],
)
def test_batches_equal_those_of_the_local_file(url, local, tmp_path, options):
    ours = read(RemoteSource(url, None, tmp_path), (0, 1), **options)
    assert_equal(ours, read(FfcvSource(local), (0, 1), **options))


def test_open_loader_reads_a_url_as_the_local_file(url, local, tmp_path):
    """A Path collapses the URL."""
    options = {"batch": 4, "size": 32, "seed": 3, "threads": 1}
    theirs = list(densefeed.open_loader(local, **options))
    for place in (str(url), Path(url)):
        assert_equal(list(densefeed.open_loader(place, cache=str(tmp_path), **options)), theirs)
    with pytest.raises(UserError, match=r"where --loader folder reads nothing"):
        densefeed.open_loader(url, loader="folder", **options)


def test_outside_missing_objects_of_a_number_are_named(bucket, local, tmp_path):
    for number in (1, 2):
        upload(bucket / f"x-{number}-of-3.beton", local)
    with pytest.raises(UserError, match=f"^{bucket} lacks 1 of 3 .beton files: x-0-of-3.beton;"):
        RemoteSource(bucket / "x-*.beton", None, tmp_path)
    upload(bucket / "x-0-of-3.beton", local)
    one = len(FfcvSource(local).labels)
    for pattern, count in (("x-*.beton", 3), ("x-[12]*.beton", 2), ("x-1-of-3.beton", 1)):
        source = RemoteSource(bucket / pattern, None, tmp_path)
        assert len(source.labels) == count * one
        source.close()


def test_commands_that_read_local_files_name_the_url(url):
    path = Path(url)
    for read in (Beton, FfcvSource, lambda path: verify_files((path,))):
        with pytest.raises(UserError, match=f"^{url} is in object storage, which is not read here"):
            read(path)
    for loader in ("ffcv", "folder", "dali"):
        with pytest.raises(UserError, match=f"^{url} is in object storage, which is not read here"):
            open_source(Validation(checkpoint=Path("runs"), data=path), loader)


def test_a_resumed_epoch_and_two_ranks_equal_those_of_the_local_file(url, local, tmp_path):
    for options in ({"start": 1}, {"rank": 0, "ranks": 2}, {"rank": 1, "ranks": 2}):
        ours = read(RemoteSource(url, None, tmp_path), (1, 2), **options)
        assert_equal(ours, read(FfcvSource(local), (1, 2), **options))


@pytest.mark.dali
def test_dali_reads_the_same_batches_as_from_the_local_file(url, local, tmp_path):
    pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    ours = read(RemoteSource(url, None, tmp_path), (0, 1), make=DaliLoader)
    assert_equal(ours, read(FfcvSource(local), (0, 1), make=DaliLoader))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "damage",
    ["flip", "cut", "grown", "gone", "folder", "empty", "objects.json", "index", "lock", "sums"],
)
def test_a_damaged_local_copy_is_fetched_again(url, local, tmp_path, damage):
    """The object is sound: its owner must not be told to pack it again."""
    theirs = read(FfcvSource(local), (0, 1))
    source = RemoteSource(url, None, tmp_path)
    (copy,) = tmp_path.glob("*/0.beton")
    # Equal batches also while another run has the copy open.
    if damage in ("flip", "cut", "grown"):
        read(source, (0,))
        source = RemoteSource(url, None, tmp_path)
    source.close()
    size = copy.stat().st_size
    if damage in ("objects.json", "index", "lock"):
        (copy.parent / damage).unlink()
        (copy.parent / damage / "x").mkdir(parents=True)
    elif damage == "sums":
        known = json.loads((copy.parent / "objects.json").read_bytes())
        (copy.parent / "objects.json").write_text(json.dumps(known | {"fronts": ["a"]}))
    elif damage == "flip":
        content = bytearray(copy.read_bytes())
        for at in (3, 20, 60, table_start(local) + 9, size - 5):
            content[at] ^= 16
        copy.write_bytes(content)
    elif damage in ("cut", "grown"):
        os.truncate(copy, size // 3 if damage == "cut" else size + 10)
    else:
        copy.unlink()
    if damage == "folder":
        (copy / "x").mkdir(parents=True)
    elif damage == "empty":
        copy.write_bytes(b"")
    assert_equal(read(RemoteSource(url, None, tmp_path), (0, 1)), theirs)


def test_a_file_in_place_of_the_local_copies_is_named(url, tmp_path):
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(UserError, match=r"cache is a file, .* name another folder with --cache"):
        RemoteSource(url, None, tmp_path / "cache")


@pytest.fixture
def limit_disk(monkeypatch):
    """Return a function that limits the bytes that a local copy may take from now on."""
    monkeypatch.setattr(object_cache, "DISK_SHARE", 1)

    def limit(capacity):
        monkeypatch.setattr(object_cache, "count_free", lambda folder: capacity)

    return limit


def test_a_disk_with_little_room_is_refused_before_the_first_batch(url, tmp_path, limit_disk):
    options = {"batch": 4, "size": 32, "threads": 1, "cache": tmp_path}
    limit_disk(4096)
    with pytest.raises(UserError, match=r"free at least [0-9,]+ bytes, .*--batch$") as refused:
        densefeed.open_loader(url, **options)
    least = int(re.search("least ([0-9,]+)", str(refused.value))[1].replace(",", ""))
    limit_disk(least - 1)
    with pytest.raises(UserError, match="free at least"):
        densefeed.open_loader(url, **options)
    limit_disk(least)
    assert list(densefeed.open_loader(url, **options))


def needed_bytes(local, ids):
    """Return the bytes of samples and of all that lies before and after the samples."""
    beton = Beton(local)
    extents = beton.extents()
    between = int((extents.offset + extents.size).max() - extents.offset.min())
    beton.close()
    gaps = table_start(local) - int((extents.offset + extents.size).max())
    front = local.stat().st_size - between - gaps
    return front + int(extents.size[ids].sum()), front


def table_start(path):
    return int(np.fromfile(path, "<u8", 3)[2])


def test_only_needed_bytes_are_fetched_once(url, local, tmp_path):
    source = RemoteSource(url, None, tmp_path)
    needed, front = needed_bytes(local, np.arange(len(source.labels)))
    read(source, (0, 1, 2))
    assert needed - front <= source.fetched <= 1.05 * needed
    # The copy is complete: the next run fetches nothing.
    again = RemoteSource(url, None, tmp_path)
    read(again)
    assert again.fetched == 0


def damage(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 255]))


def test_what_a_power_cut_left_damaged_is_fetched_again(url, local, tmp_path):
    source = RemoteSource(url, None, tmp_path)
    read(source)
    extents, copy = Beton(local).extents(), next(tmp_path.rglob("0.beton"))
    damage(copy, int(extents.offset[5] + extents.size[5] // 2))
    again = RemoteSource(url, None, tmp_path)
    assert_equal(read(again, (0, 1)), read(FfcvSource(local), (0, 1)))
    assert again.fetched == extents.size[5]


def test_a_replaced_object_is_noticed(url, local, tmp_path):
    read(RemoteSource(url, None, tmp_path))
    content = bytearray(local.read_bytes())
    extents = Beton(local).extents()
    at = int(extents.offset[0] + extents.size[0] - 1)
    content[at] ^= 1
    # Opened before it is replaced.
    early = RemoteSource(url, None, tmp_path / "early")
    obstore.put(connect(url), url.key, bytes(content))
    with pytest.raises(UserError, match=r"train\.beton was replaced while it was read"):
        read(early)
    late = RemoteSource(url, None, tmp_path)
    read(late)
    # Nothing of the old version was used.
    assert late.fetched >= extents.size.sum()
    assert next(tmp_path.glob("*/0.beton")).read_bytes()[at] == content[at]


def test_a_replaced_object_that_another_run_reads(url, local, tmp_path):
    source = RemoteSource(url, None, tmp_path)
    obstore.put(connect(url), url.key, local.read_bytes()[:-1] + b"\1")
    with pytest.raises(UserError, match=r"was replaced, or .* while another run reads it"):
        RemoteSource(url, None, tmp_path)
    source.close()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("ExpiredToken", "the credentials have expired"),
        ("NoSuchBucket", "there is no such bucket"),
        ("SlowDown", "the storage refuses more requests"),
        ("cut", "the storage|a reply was truncated"),
    ],
)
def test_storage_that_fails_for_good(url, tmp_path, disturb, fault, reason):
    source = RemoteSource(url, None, tmp_path)
    disturb(lambda method, path, number: fault)
    with pytest.raises(UserError, match=reason):
        read(source)
    assert not any(np.fromfile(next(tmp_path.rglob("index")), "<u8"))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("ExpiredToken", "the credentials have expired"),
        ("RequestTimeTooSkewed", "the clock of this machine differs"),
        ("NoSuchBucket", "there is no such bucket"),
    ],
)
def test_the_first_request_tells_why_it_failed(url, tmp_path, disturb, fault, reason):
    """The reply to HEAD has no body."""
    disturb(lambda *_: fault)
    with pytest.raises(UserError, match=reason):
        RemoteSource(url, None, tmp_path)


def test_storage_that_fails_now_and_then(url, local, tmp_path, disturb):
    faults = {n: name for n, name in enumerate(["cut", "SlowDown", "InternalError", "lost"] * 2)}
    disturb(lambda method, path, number: faults.get(number - 2, ""))
    ours = read(RemoteSource(url, None, tmp_path), (0, 1))
    assert_equal(ours, read(FfcvSource(local), (0, 1)))


def test_a_full_disk_ends_the_run(url, tmp_path, monkeypatch):
    source = RemoteSource(url, None, tmp_path)

    def write_at(descriptor, data, offset):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("densefeed.storage.object_cache.write_at", write_at)
    with pytest.raises(OSError, match="No space left") as raised:
        read(source)
    assert str(tmp_path) in raised.value.filename


def test_a_missing_object(bucket, tmp_path, quick_retries):
    for name in ("absent.beton", "absent-*.beton"):
        with pytest.raises(UserError, match=r"absent.*no such object|matches no object"):
            RemoteSource(bucket / name, None, tmp_path)


def test_a_pattern_names_one_dataset(bucket, local, tmp_path):
    for n in (0, 1):
        shutil.copy(local, tmp_path / f"part-{n}.beton")
        upload(bucket / "sub" / f"part-{n}.beton", local)
    ours = read(RemoteSource(bucket / "sub" / "part-*.beton", None, tmp_path / "cache"), (0, 1))
    assert_equal(ours, read(FfcvSource(tmp_path / "part-*.beton"), (0, 1)))


def test_a_copy_smaller_than_the_dataset(url, local, tmp_path, limit_disk):
    """The copy stays below its capacity, and the batches are the same."""
    probe = RemoteSource(url, None, tmp_path / "probe")
    capacity = probe._cache.room(7)
    probe.close()
    limit_disk(capacity)
    source = RemoteSource(url, None, tmp_path)
    assert source._cache.is_bounded
    ours = read(source, (0, 1, 2), batch=1)
    assert_equal(ours, read(FfcvSource(local), (0, 1, 2), batch=1))
    assert next(tmp_path.glob("*/0.beton")).stat().st_blocks * 512 < local.stat().st_size
    limit_disk(0)
    with pytest.raises(UserError, match="bytes of samples, less than the batches in flight take"):
        read(RemoteSource(url, None, tmp_path), batch=4)


def test_a_copy_too_small_for_the_first_read_does_not_wait_for_other_runs(
    url, tmp_path, limit_disk
):
    limit_disk(100)
    source = RemoteSource(url, None, tmp_path)
    with pytest.raises(
        UserError, match=r"room for 100 bytes of samples, less than 1 images take.* free several"
    ):
        source.maps(np.array([1]))
    source.close()


def test_outside_shards_in_storage_are_packed_first(tmp_path):
    message = r"s3://bucket/wds is not a \.beton; .* pack them with densefeed pack"
    with pytest.raises(UserError, match=message):
        densefeed.open_loader("s3://bucket/wds", batch=1, cache=tmp_path)


def test_maps_are_read_before_the_first_batch(url, local, tmp_path):
    """The audit of a training's start reads some."""
    source, ids = RemoteSource(url, None, tmp_path), np.array([3, 1, 3])
    theirs = FfcvSource(local)
    for one, other in zip(source.maps(ids), theirs.maps(ids), strict=True):
        np.testing.assert_array_equal(one, other)
    assert source.image(2).tobytes() == theirs.image(2).tobytes()
    assert not source._cache._pins.any()
    source.close()
    theirs.close()


@pytest.mark.slow
def test_train_from_storage_equals_local_training(url, local, tmp_path, command):
    """The same checkpoint, and the options that storage needs."""
    options = ["--loader", "ffcv", "--val", local, "--epochs", 1, "--batch", 4, "--threads", 1]
    recipe = ["train.py", "lvvit_micro_token_label", "--device", "cpu", *options]
    results = []
    for name, data in (("local", local), ("remote", url)):
        extra = ["--cache", tmp_path / "cache"] if name == "remote" else []
        done = command(*recipe, "--data", data, "--out", tmp_path / name, *extra)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / name / "result.json").read_text().splitlines()
        results.append([line for line in lines if '"loss"' in line or '"top' in line])
    assert results[0] == results[1]
    for extra, reason in (
        (["--loader", "folder"], "where --loader folder reads nothing, and"),
        (["--maps-on-device"], "remove it, or copy the file"),
        (["--data", local, "--cache", tmp_path], "--cache has no effect without --data s3://"),
    ):
        done = command(*recipe, "--data", url, "--out", tmp_path / "x", *extra)
        assert done.returncode == 2
        assert reason in done.stderr


# ------------------------------------------------------------------------------- score maps


@pytest.fixture
def store_url(folder, maps, bucket, tmp_path):
    """The maps of `folder` as a store of two shards in object storage."""
    whole = StoreFile(maps)
    images, objects = Images(folder, split="train"), ObjectStore(bucket / "maps")
    shards = []
    for rows in (range(4), range(4, len(images))):
        name = f"{len(shards):016x}"
        path = tmp_path / f"{name}.h5"
        part = images.fingerprint(rows, SIZED_FILES)
        writer = ScoreMapWriter(
            path,
            replace(whole.header, fingerprint=part),
            images.paths[rows.start : rows.stop],
            images.labels[rows.start : rows.stop],
        )
        ids = np.arange(rows.start, rows.stop)
        writer.write(np.arange(len(rows)), ScoreMaps(*whole.take(ScoreMaps._fields, ids)))
        writer.finish()
        digest = hash_file(path)
        file = f"shards/{name}-{digest[:16]}.h5"
        obstore.put(connect(objects.root), (objects.root / file).key, path.read_bytes())
        shards.append(StoredShard(file, len(rows), path.stat().st_size, digest, part))
    objects.replace(MANIFEST, Manifest(whole.header, tuple(shards)).to_json())
    return objects.root


def test_score_maps_at_a_url_are_those_of_the_file(folder, maps, store_url, tmp_path, capsys):
    options = {"batch": 4, "size": 32, "seed": 3, "threads": 1}
    theirs = list(densefeed.open_loader(folder, score_maps=maps, **options))
    assert theirs[0].map_class is not None
    cache = tmp_path / "cache"
    for place in (str(store_url), Path(store_url)):
        ours = densefeed.open_loader(folder, score_maps=place, cache=cache, **options)
        assert_equal(list(ours), theirs)
    said = capsys.readouterr().out
    assert f"2 of 2 shards were copied from {store_url}" in said
    assert f"0 of 2 shards were copied from {store_url}" in said
    # Another process has it open, and may have been killed while it copied.
    (shard, *_) = cache.glob("maps-*/shards/*.h5")
    os.truncate(shard, 100)
    ours = densefeed.open_loader(folder, score_maps=store_url, cache=cache, **options)
    assert_equal(list(ours), theirs)


@pytest.mark.parametrize("damage", ["bit", "folder", "shards", "manifest", "lock", "all"])
def test_a_damaged_copy_of_score_maps_is_mended(store_url, tmp_path, monkeypatch, damage):
    copy = make_local(store_url, tmp_path)
    sound = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file() and p.name != "lock"}
    shard = min(copy.glob("shards/*.h5"))
    monkeypatch.setattr(fetch, "TOGETHER_SECONDS", 0.0)
    if damage == "bit":
        content = bytearray(sound[shard])
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
        # A process that starts together with the one that has compared the copy.
        monkeypatch.setattr(fetch, "TOGETHER_SECONDS", 1e9)
        make_local(store_url, tmp_path)
        assert shard.read_bytes() != sound[shard]
        monkeypatch.setattr(fetch, "TOGETHER_SECONDS", 0.0)
    elif damage == "folder":
        shard.unlink()
        (shard / "x").mkdir(parents=True)
    else:
        path = {"shards": shard.parent, "manifest": copy / MANIFEST, "lock": copy / "lock"}
        path = path.get(damage, copy)
        remove_any(path)
        if damage in ("shards", "all"):
            path.write_bytes(b"x")
        else:
            path.mkdir()
    assert make_local(store_url, tmp_path) == copy
    assert sound == {p: p.read_bytes() for p in copy.rglob("*") if p.is_file() and p.name != "lock"}


def test_outside_links_in_a_copy_of_score_maps_are_replaced(store_url, tmp_path):
    """What they lead to is not of the copy, and stays."""
    copy, other = make_local(store_url, tmp_path / "cache"), tmp_path / "other"
    (copy / "shards").rename(other)
    (other / "mine.txt").write_text("mine")
    before = {path: path.read_bytes() for path in other.iterdir()}
    (copy / "shards").symlink_to(other)
    for name in ("lock", MANIFEST):
        (copy / name).unlink()
        (copy / name).symlink_to(other / "mine.txt")
    assert make_local(store_url, tmp_path / "cache") == copy
    assert not any(path.is_symlink() for path in (copy, *copy.rglob("*")))
    assert before == {path: path.read_bytes() for path in other.iterdir()}


def test_packing_takes_score_maps_at_a_url(folder, packed, store_url, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    pack(Packing(data=folder, split="train", maps=store_url, out=tmp_path / "x.beton"))
    mine, theirs = Beton(tmp_path / "x.beton"), Beton(packed[0])
    for name in ("map", "lse", "window"):
        one, other = (b.arrays(np.arange(11))[name] for b in (mine, theirs))
        assert one.tobytes() == other.tobytes()


def test_an_opening_that_fails_keeps_no_file_open(url, tmp_path, monkeypatch):
    """In a script they would stay locked, so that the next run could not replace the copy."""

    def count():
        places = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
        return sum(str(tmp_path) in os.readlink(place) for place in filter(os.path.lexists, places))

    options = {"batch": 4, "size": 32, "threads": 1, "cache": tmp_path, "loader": "ffcv"}
    for place in (
        "densefeed.storage.object_cache.CachedFiles._start_over",
        "densefeed.pipelines.remote.SampleCache",
        "densefeed.pipelines.open.EpochPlan",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, lambda *words, **options: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                densefeed.open_loader(url, **options)
        assert count() == 0, place
    densefeed.open_loader(url, **options).close()
    assert count() == 0

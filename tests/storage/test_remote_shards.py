"""Tar and Parquet shards in object storage: the images, labels and packed files of local ones."""

import pytest
import timm
import torch

from densefeed.relabel.teacher import Teacher
from densefeed.storage import tar_index
from densefeed.storage.images import Images
from densefeed.system import object_ranges
from densefeed.system.errors import UserError
from densefeed.system.object_store import connect
from densefeed.tools.pack_dataset import Packing, main

from ..object_storage import SECRET, cycle_faults
from ..planted import plant, time_limit
from ..runs import label_images
from ..shard_files import write_shards, write_tar

obstore = pytest.importorskip("obstore")

KINDS = "tar", "parquet"


@pytest.fixture(scope="module")
def local(folder, tmp_path_factory):
    """Folders of shards on a disk, by their kind."""
    root = tmp_path_factory.mktemp("shards")
    for split in ("train", "val"):
        found = write_shards(Images(folder, split=split), root, split)
    return dict(zip(KINDS, found, strict=True))


@pytest.fixture
def remote(local, bucket, tmp_path, monkeypatch):
    """The URLs of copies of `local`; indexes are kept in a folder of the test."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for kind, root in local.items():
        for path in root.rglob("*.*"):
            key = f"{kind}/{path.relative_to(root)}"
            obstore.put(connect(bucket), key, path.read_bytes())
    return {kind: bucket / kind for kind in local}


@pytest.fixture
def requested(monkeypatch):
    """The bytes of every range that is read."""
    counts, read = [], object_ranges.read_range

    def count(file, start, stop):
        counts.append(stop - start)
        return read(file, start, stop)

    monkeypatch.setattr(object_ranges, "read_range", count)
    return counts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", ["train", "validation"])
def test_images_equal_those_on_a_disk(local, remote, kind, split):
    got, want = Images(remote[kind], split=split), Images(local[kind], split=split)
    assert (got.paths, got.class_names) == (want.paths, want.class_names)
    assert got.labels.tolist() == want.labels.tolist()
    assert [got.read(n) for n in range(len(got))] == [want.read(n) for n in range(len(want))]
    assert [got.size(n) for n in range(len(got))] == [want.size(n) for n in range(len(want))]
    assert got.fingerprint() == want.fingerprint()
    assert got.where(1).startswith(f"{remote[kind]}/")
    assert Images(remote[kind], kind, split).paths == want.paths


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_labels_and_packed_file_are_equal_bytes_in_spite_of_faults(
    folder, remote, maps, packed, tmp_path, disturb, kind
):
    disturb(cycle_faults(3, "InternalError", "SlowDown", "lost", "cut"))
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=2)
    config = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bilinear"}
    for name, root in (("folder", folder), ("remote", remote[kind])):
        options = dict(top_k=2, batch=4, threads=2, absent="tail")
        teacher = Teacher(model, 64, "squash", config)
        label_images(Images(root), teacher, "t", tmp_path / f"{name}.h5", **options)
    assert (tmp_path / "remote.h5").read_bytes() == (tmp_path / "folder.h5").read_bytes()
    main(Packing(data=remote[kind], maps=maps, out=tmp_path / "x.beton"))
    assert (tmp_path / "x.beton").read_bytes() == packed[0].read_bytes()


def test_a_tar_is_indexed_in_one_reading_and_the_index_is_kept(local, remote, requested, tmp_path):
    tars = sorted(local["tar"].glob("*train*.tar"))
    sizes = [tar.stat().st_size for tar in tars]
    want, names = Images(remote["tar"]), (local["tar"] / "classes.txt").stat().st_size
    assert sorted(requested) == [names, *sorted(sizes)]
    requested.clear()
    assert Images(remote["tar"]).paths == want.paths
    assert requested == [names]
    requested.clear()
    kept = sorted((tmp_path / ".cache" / "densefeed" / "tar-index").glob("*.json"))
    assert len(kept) == len(tars)
    # A shard holds cats, dogs or both, and the bucket's name decides which index is the first.
    index = next(path for path in kept if b"cat" in path.read_bytes())
    for damage in (lambda old: old[:-1], lambda old: old.replace(b"cat", b"dog", 1), lambda _: b""):
        index.write_bytes(damage(index.read_bytes()))
        again = Images(remote["tar"])
        assert (again.paths, again.labels.tolist()) == (want.paths, want.labels.tolist())
        assert len(requested) == 2
        requested.clear()


def test_small_requests_of_an_index_read_a_tar_once(remote, requested, local, monkeypatch):
    monkeypatch.setattr(tar_index, "REQUESTED", 4096)
    Images(remote["tar"])
    size = sum(tar.stat().st_size for tar in local["tar"].glob("*train*.tar"))
    # And up to a request more for each of the three tars.
    assert sum(requested) <= size + 3 * 4096


def test_a_folder_that_cannot_be_written_keeps_no_index(remote, tmp_path):
    (tmp_path / ".cache").write_text("no folder")
    assert Images(remote["tar"]).paths == Images(remote["tar"]).paths


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_that_is_replaced_meanwhile_is_an_error_and_then_the_new_one(remote, local, kind):
    images = Images(remote[kind])
    path, other, _ = sorted(local[kind].rglob("*train-*.*"))
    url = remote[kind] / str(path.relative_to(local[kind]))
    obstore.put(connect(url), url.key, other.read_bytes())
    with pytest.raises(UserError, match=f"{url} was replaced while it was read; run"):
        images.read(0)
    # Both have the same names, so paths begin with those of the shards.
    assert Images(remote[kind]).read(0) == Images(local[kind]).read(4)


@pytest.mark.parametrize(
    ("kind", "damage", "said"),
    [
        ("tar", lambda old: old[: len(old) // 2], "is truncated: a member ends|has no end mark"),
        ("tar", lambda old: b"\x1f\x8b" + old[2:], "is not an uncompressed tar file"),
        ("parquet", lambda old: old[: len(old) // 2], "is not a Parquet file, or is damaged"),
    ],
)
def test_damaged_shards_are_named(remote, local, kind, damage, said):
    _, path, _ = sorted(local[kind].rglob("*train-*.*"))
    url = remote[kind] / str(path.relative_to(local[kind]))
    obstore.put(connect(url), url.key, damage(path.read_bytes()))
    with pytest.raises(UserError, match=f"{url} ({said})"):
        Images(remote[kind])


def test_class_folders_in_a_tar_have_the_order_of_the_folder(folder, bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    want = Images(folder)
    files = [(path, want.read(n)) for n, path in reversed(list(enumerate(want.paths)))]
    tar = write_tar(tmp_path / "photos.tar", files)
    obstore.put(connect(bucket), "x/photos.tar", tar.read_bytes())
    got = Images(bucket / "x")
    assert (got.paths, got.labels.tolist()) == (want.paths, want.labels.tolist())
    assert (got.class_names, got.fingerprint()) == (want.class_names, want.fingerprint())


def test_missing_and_mixed_shards_are_refused(remote, bucket):
    with pytest.raises(UserError, match=r"/tar holds no parquet files of the split 'train'"):
        Images(remote["tar"], "parquet")
    with pytest.raises(UserError, match=r"/tar holds tar files of other splits but none of 'test'"):
        Images(remote["tar"], split="test")
    obstore.put(connect(bucket), "tar/train.parquet", b"x")
    with pytest.raises(UserError, match="holds tar and Parquet files; give --dataset tar or"):
        Images(remote["tar"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_storage_that_fails_is_one_sentence(remote, disturb, kind):
    images = Images(remote[kind])
    disturb(lambda *_: "ExpiredToken")
    for call in (lambda: Images(remote[kind]), lambda: images.read(0)):
        with pytest.raises(UserError, match="the credentials have expired") as error:
            call()
        assert SECRET not in str(error.value)


def test_outside_a_kept_index_is_a_regular_file(tmp_path):
    """A pipe is not read, and the index is written in its place."""
    kept, index = tmp_path / "kept.json", tar_index.TarIndex(["a.jpg"], [1], [512], [9], {}, [])
    plant("pipe", kept)
    with time_limit():
        assert tar_index.load_index(kept) is None
    tar_index.save_index(index, kept)
    assert tar_index.load_index(kept) == index

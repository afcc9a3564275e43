"""Class folders in object storage: the images, labels and packed files of those on a disk."""

import pytest
import timm
import torch

from densefeed.relabel.teacher import Teacher
from densefeed.storage.images import Images
from densefeed.system.errors import UserError
from densefeed.system.object_store import connect
from densefeed.system.object_url import ObjectURL
from densefeed.tools.pack_dataset import Packing, main

from ..object_storage import SECRET, cycle_faults
from ..runs import label_images

obstore = pytest.importorskip("obstore")


@pytest.fixture
def remote(folder, bucket):
    """The URL of a copy of `folder`, with an object that is no image."""
    store = connect(bucket)
    for path in folder.rglob("*.*"):
        obstore.put(store, f"photos/{path.relative_to(folder)}", path.read_bytes())
    obstore.put(store, "photos/train/cat/notes.txt", b"x")
    obstore.put(store, "photos-old/train/cat/x.jpg", b"x")
    return bucket / "photos"


@pytest.mark.parametrize("split", ["train", "validation"])
def test_images_equal_those_of_the_folder(folder, remote, split, capsys):
    got, want = Images(remote, split=split), Images(folder, split=split)
    assert (got.paths, got.class_names) == (want.paths, want.class_names)
    assert got.labels.tolist() == want.labels.tolist()
    assert [got.read(n) for n in range(len(got))] == [want.read(n) for n in range(len(want))]
    assert [got.size(n) for n in range(len(got))] == [want.size(n) for n in range(len(want))]
    assert got.fingerprint() == want.fingerprint()
    assert ("1 file with another ending was left out" in capsys.readouterr().out) == (
        split == "train"
    )
    # The folder of the classes itself.
    assert Images(remote / "train").paths == Images(folder).paths


def test_outside_classes_of_objects_are_those_of_a_folder(folder, bucket, tmp_path, capsys):
    store, image = connect(bucket), next(folder.rglob("*.jpg")).read_bytes()
    names = ["Aqua/s1/0.jpg", "Dune/s1/0.jpg", "Dune/1.jpg", "top.jpg"]
    system = [".ipynb_checkpoints/0.jpg", "Aqua/@eaDir/0.jpg", "Aqua/@eaDir/1.jpg", "Dune/._0.jpg"]
    said = []
    for name in (*names, *system):
        obstore.put(store, f"nested/train/{name}", image)
        (tmp_path / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / name).write_bytes(image)
    for root in (bucket / "nested", tmp_path):
        images = Images(root)
        assert (images.class_names, images.labels.tolist()) == (["Aqua", "Dune"], [0, 1, 1])
        said.append(capsys.readouterr().out.replace(str(root), ""))
    # The folder of @eaDir counts once in both.
    assert said[0] == said[1]
    assert "3 hidden or system names were left out" in said[0]
    obstore.put(store, "flat/val/0.jpg", image)
    with pytest.raises(UserError, match=r"flat/val, as 0.jpg, lie in no class folder; make"):
        Images(bucket / "flat", split="val")


def test_labels_and_packed_file_are_equal_bytes_in_spite_of_faults(
    folder, remote, maps, packed, tmp_path, disturb
):
    disturb(cycle_faults(3, "InternalError", "SlowDown", "lost", "cut"))
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=2)
    config = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bilinear"}
    for name, root in (("folder", folder), ("remote", remote)):
        options = dict(top_k=2, batch=4, threads=2, absent="tail")
        teacher = Teacher(model, 64, "squash", config)
        label_images(Images(root), teacher, "t", tmp_path / f"{name}.h5", **options)
    assert (tmp_path / "remote.h5").read_bytes() == (tmp_path / "folder.h5").read_bytes()
    main(Packing(data=remote, maps=maps, out=tmp_path / "x.beton"))
    assert (tmp_path / "x.beton").read_bytes() == packed[0].read_bytes()


def test_an_image_that_changed_or_vanished_is_named(folder, remote):
    images, store = Images(remote), connect(remote)
    for change in (
        lambda key: obstore.put(store, key, b"x"),
        lambda key: obstore.delete(store, key),
    ):
        change(f"photos/train/{images.paths[2]}")
        with pytest.raises(UserError, match=f"{images.paths[2]} is gone or has another size since"):
            images.read(2)


def test_outside_a_class_of_objects_may_be_called_as_a_split(bucket):
    store = connect(bucket)
    for path in ("car/a/1.jpg", "train/a/1.jpg", "notes/a/1.xml"):
        obstore.put(store, f"vehicles/{path}", b"x")
    said = "vehicles holds images in car beside train, which may be a split or a class; .* rename"
    with pytest.raises(UserError, match=said):
        Images(bucket / "vehicles")


@pytest.mark.parametrize(
    ("path", "split", "said"),
    [
        ("photos", "test", "holds train, val but no folder 'test'"),
        ("nothing", "train", "holds no images; name a folder, not an object or a pattern"),
    ],
)
def test_what_is_missing_is_one_sentence(remote, path, split, said):
    with pytest.raises(UserError, match=said):
        Images(ObjectURL(f"{remote.bucket}/{path}"), split=split)
    with pytest.raises(UserError, match="--dataset cifar10 is read from a disk only"):
        Images(remote, "cifar10")


def test_a_storage_that_fails_is_one_sentence(remote, disturb):
    images = Images(remote)
    disturb(lambda *_: "SlowDown")
    for call in (lambda: Images(remote), lambda: images.read(0)):
        with pytest.raises(UserError, match="the storage refuses more requests") as error:
            call()
        assert SECRET not in str(error.value)


def test_the_commands_take_a_url(remote, tmp_path, command):
    done = command("tools/pack_dataset.py", "--data", remote, "--out", tmp_path / "x.beton")
    assert done.returncode == 0, done.stderr
    assert "11 images" in done.stdout


def test_a_bucket_is_a_folder_too(folder, remote):
    images = Images(ObjectURL(remote.bucket))
    assert len(images) == len(list(folder.rglob("*.jpg"))) + 1
    assert "photos-old/train/cat/x.jpg" in images.paths


def test_a_split_may_be_a_path(folder, remote):
    """The folder above it holds the images of other splits too."""
    bucket = ObjectURL(remote.bucket)
    assert Images(bucket, split="photos/train").paths == Images(folder, split="train").paths
    with pytest.raises(UserError, match="but no folder 'photos/test'"):
        Images(bucket, split="photos/test")

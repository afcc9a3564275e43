"""Datasets other than class folders: small copies in their published formats.

The reference is torchvision.
"""

import errno
import hashlib
import io
import os
import pickle
import re
import subprocess
import tarfile
from types import SimpleNamespace

import numpy as np
import pytest
import timm.data
import torchvision.datasets as sets
from PIL import Image
from scipy.io import savemat
from timm.data import create_dataset
from timm.utils.misc import natural_key as timm_key

from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.storage import dataset_names, datasets, published_datasets
from densefeed.storage.beton import Beton
from densefeed.storage.beton_format import RAW
from densefeed.storage.images import Images, crop_resize, decode
from densefeed.system.errors import UserError
from densefeed.tools.pack_dataset import Packing, main

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Let downloads fail, as behind a firewall, with an error that contains the address."""
    import urllib.request

    def refuse(request, *_args, **_kwargs):
        raise OSError(f"no route to {getattr(request, 'full_url', request)}")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def cifar(root, kind, monkeypatch, images=4):
    """Write `kind` in the layout of torchvision's download, with a few images per file.

    Its MD5s are patched to match.
    """
    home = root / kind.base_folder
    home.mkdir(parents=True)
    fine = kind is sets.CIFAR100
    names = [f"class {n}" for n in range(100 if fine else 10)]
    (home / kind.meta["filename"]).write_bytes(pickle.dumps({kind.meta["key"]: names}))
    for batches in ("train_list", "test_list"):
        listed = []
        for file, _ in getattr(kind, batches):
            data = RNG.integers(0, 256, (images, 3072), dtype=np.uint8)
            labels = RNG.integers(0, len(names), images).tolist()
            (home / file).write_bytes(
                pickle.dumps({"data": data, "fine_labels" if fine else "labels": labels})
            )
            listed.append([file, md5(home / file)])
        monkeypatch.setattr(kind, batches, listed)
    monkeypatch.setattr(kind, "meta", kind.meta | {"md5": md5(home / kind.meta["filename"])})
    return root


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_cifar_pixels_labels_and_names_equal_torchvision(tmp_path, monkeypatch, name, split):
    kind = {"cifar10": sets.CIFAR10, "cifar100": sets.CIFAR100}[name]
    images = Images(cifar(tmp_path, kind, monkeypatch), name, split)
    theirs = kind(tmp_path, split == "train")
    assert len(images) == len(theirs) == {("cifar10", "train"): 20}.get((name, split), 4)
    assert images.class_names == theirs.classes
    for index, (picture, label) in enumerate(theirs):
        np.testing.assert_array_equal(
            np.asarray(decode(images.read(index), "")), np.asarray(picture)
        )
        assert images.labels[index] == label


def test_svhn_digit_0_is_class_0(tmp_path, monkeypatch):
    """In the .mat files the channels are axis 2, the images axis 3, and digit 0 is class 10."""
    pixels = RNG.integers(0, 256, (32, 32, 3, 5), dtype=np.uint8)
    labels = np.array([[10], [1], [9], [10], [3]], np.uint8)
    savemat(tmp_path / "train_32x32.mat", {"X": pixels, "y": labels})
    address, file, _ = sets.SVHN.split_list["train"]
    monkeypatch.setitem(sets.SVHN.split_list, "train", [address, file, md5(tmp_path / file)])
    images = Images(tmp_path, "svhn")
    assert images.labels.tolist() == [0, 1, 9, 0, 3]
    assert images.class_names == list("0123456789")
    for index in range(5):
        np.testing.assert_array_equal(
            np.asarray(decode(images.read(index), "")), pixels[..., index]
        )


def test_flowers_trainval_is_train_and_val(tmp_path, monkeypatch):
    home = tmp_path / "flowers-102"
    (home / "jpg").mkdir(parents=True)
    for number in range(1, 7):
        Image.fromarray(RNG.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(
            home / "jpg" / f"image_{number:05d}.jpg"
        )
    savemat(home / "imagelabels.mat", {"labels": np.array([[5, 102, 1, 5, 7, 7]])})
    savemat(
        home / "setid.mat",
        {"trnid": np.array([[2, 1]]), "valid": np.array([[4, 5]]), "tstid": np.array([[3, 6]])},
    )
    files = dict(sets.Flowers102._file_dict)
    for what, file in (("label", "imagelabels.mat"), ("setid", "setid.mat")):
        files[what] = (file, md5(home / file))
    monkeypatch.setattr(sets.Flowers102, "_file_dict", files)
    both, test = Images(tmp_path, "flowers102", "trainval"), Images(tmp_path, "flowers102", "test")
    assert both.paths == [f"jpg/image_{number:05d}.jpg" for number in (2, 1, 4, 5)]
    assert both.labels.tolist() == [101, 4, 4, 6]
    assert test.labels.tolist() == [0, 6]
    assert both.read(1) == (home / "jpg" / "image_00001.jpg").read_bytes()
    assert both.where(1) == str(home / "jpg" / "image_00001.jpg")
    assert len(both.class_names) == 102


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn", "flowers102"])
def test_the_error_of_a_failed_download_names_the_files_needed(tmp_path, name):
    with pytest.raises(
        UserError, match=rf"{name} is not complete .* cannot be downloaded \(.*\); put there .*"
    ):
        Images(tmp_path, name)
    with pytest.raises(UserError, match=r"has no split 'validation'; give --split train or"):
        Images(tmp_path, name, "validation")


def test_a_pickle_with_another_checksum_is_never_opened(tmp_path, monkeypatch):
    cifar(tmp_path, sets.CIFAR10, monkeypatch)
    victim = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    opened = tmp_path / "opened"

    class Bomb:
        def __reduce__(self):
            return opened.touch, ()

    victim.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UserError, match="cifar10 is not complete and sound in"):
        Images(tmp_path, "cifar10")
    assert not opened.exists()


def test_a_download_is_unpacked_and_read(tmp_path, monkeypatch, capsys):
    """torchvision's own download, with an archive in place of the network."""
    import urllib.request

    source = cifar(tmp_path / "source", sets.CIFAR100, monkeypatch)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        tar.add(source / "cifar-100-python", "cifar-100-python")
    monkeypatch.setattr(sets.CIFAR100, "tgz_md5", hashlib.md5(archive.getvalue()).hexdigest())

    class Response(io.BytesIO):
        length = len(archive.getvalue())
        url = sets.CIFAR100.url

    monkeypatch.setattr(
        urllib.request, "urlopen", lambda *_args, **_kwargs: Response(archive.getvalue())
    )
    here = Images(tmp_path / "here", "cifar100", "test")
    assert here.labels.tolist() == Images(source, "cifar100", "test").labels.tolist()
    assert "downloading it to this folder" in capsys.readouterr().out


# ------------------------------------------------------------------------- lists and folders


@pytest.fixture
def domain(tmp_path):
    """Three classes of DomainNet's clipart; the test list lacks class 1."""
    lists = {"train": [], "test": []}
    for label, name in enumerate(("aircraft_carrier", "airplane", "alarm_clock")):
        for number in range(4):
            path = tmp_path / "clipart" / name / f"clipart_{label + 1:03d}_{number:06d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(RNG.integers(0, 256, (50, 60, 3), dtype=np.uint8)).save(path)
            split = "train" if number % 2 else "test"
            if (split, label) != ("test", 1):
                lists[split].append(f"clipart/{name}/{path.name} {label}")
    for split, lines in lists.items():
        (tmp_path / f"clipart_{split}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_domainnet_labels_are_those_of_its_lists(domain, capsys):
    """Labels by sorted folders would be 0 and 1 in the test split."""
    train, test = Images(domain, "domainnet/clipart"), Images(domain, "domainnet/clipart", "test")
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert test.labels.tolist() == [0, 0, 2, 2]
    assert train.class_names == [
        "aircraft_carrier",
        "airplane",
        "alarm_clock",
        *(f"class {number}" for number in range(3, 345)),
    ]
    assert test.class_names == train.class_names
    assert train.read(0) == (domain / train.paths[0]).read_bytes()
    assert "has 6 images, but 33,525 were published" in capsys.readouterr().err


def test_counts_of_domainnet_are_those_of_the_papers():
    """Table 6 of DHVT gives train and test of each domain; DomainNet's web page gives the sums."""
    train, test = map(sum, zip(*published_datasets.DOMAINS.values(), strict=True))
    assert (len(published_datasets.DOMAINS), train, test) == (6, 409_832, 176_743)


def test_a_list_without_labels_takes_the_folders_as_classes(domain):
    (domain / "some.txt").write_text(
        "clipart/airplane/clipart_002_000003.jpg\n\nclipart/aircraft_carrier/clipart_001_000000.jpg\n"
    )
    images = Images(domain, f"list/{domain / 'some.txt'}")
    assert images.labels.tolist() == [1, 0]
    assert images.class_names == ["aircraft_carrier", "airplane"]


@pytest.mark.parametrize("separator", [" ", "\t", "  \t "])
def test_any_white_space_may_precede_a_label(domain, separator):
    (domain / "some.txt").write_text(f"clipart/airplane/clipart_002_000003.jpg{separator}07\r\n")
    images = Images(domain, f"list/{domain / 'some.txt'}")
    assert (images.labels.tolist(), images.paths) == (
        [7],
        ["clipart/airplane/clipart_002_000003.jpg"],
    )


def test_outside_labels_that_count_from_1_are_noted(tmp_path, capsys):
    touch(tmp_path, "x/1.jpg", "x/2.jpg")
    name, lines = tmp_path / "all.txt", "x/1.jpg {}\nx/2.jpg {}\n"
    name.write_text(lines.format(1, 2))
    assert len(Images(tmp_path, f"list/{name}").class_names) == 3
    assert capsys.readouterr().out == (
        f"note: {name} gives no image the label 0, so class 0 has no images; if its labels count "
        "from 1, subtract 1 from each\n"
        f"{tmp_path} has no images of 1 of its 3 classes: 0\n"
    )
    name.write_text(lines.format(0, 1))
    Images(tmp_path, f"list/{name}")
    assert capsys.readouterr().out == ""


# The content of lists, all class names, and the labels of the first list.
@pytest.mark.parametrize(
    ("lists", "names", "labels"),
    [
        # A class is missing in one list, in the middle or at the end.
        (
            {"train": "cat/1 0\nant/1 1\nbee/1 2", "test": "cat/2 0\nbee/2 2"},
            ["cat", "ant", "bee"],
            [0, 1, 2],
        ),
        ({"test": "cat/2 0\nant/1 1", "train": "cat/1 0\nbee/1 2"}, ["cat", "ant", "bee"], [0, 1]),
        (
            {"val": "cat/2 0", "test": "ant/1 4", "trainval": "bee/1 2"},
            ["cat", "class 1", "bee", "class 3", "ant"],
            [0],
        ),
        # Without labels a missing folder would shift the class ids after it.
        ({"test": "cat/1", "train": "ant/1\ncat/2"}, ["ant", "cat"], [1]),
        # Labels without a name: two folders of one label, one folder of two labels, no folder, one
        # folder for all.
        ({"train": "cat/1 0\ndog/1 0\nant/1 1", "test": ""}, ["class 0", "ant"], [0, 0, 1]),
        ({"train": "cat/1 0\nant/1 1", "test": "dog/1 0"}, ["class 0", "ant"], [0, 1]),
        ({"train": "cat/1 0\ncat/2 1\nant/1 2"}, ["class 0", "class 1", "ant"], [0, 1, 2]),
        ({"train": "1 1\nant/1 0"}, ["ant", "class 1"], [1, 0]),
        ({"train": "cat/1 0\ncat/2 1"}, ["0", "1"], [0, 1]),
        # One folder for a whole split, as in the published ImageNet val, does not remove the names
        # that the other list gives.
        ({"val": "all/1 1\nall/2 0", "train": "cat/1 0\nant/1 1"}, ["cat", "ant"], [1, 0]),
        # An image may be listed twice with the same label.
        ({"train": "ant/1 0\nant/1 0"}, ["ant"], [0, 0]),
    ],
)
def test_classes_are_those_of_all_splits(tmp_path, lists, names, labels):
    for split, text in lists.items():
        file = tmp_path / f"my-{split}-2.txt"
        file.write_text(text)
        for line in text.splitlines():
            image = tmp_path / line.split()[0]
            image.parent.mkdir(exist_ok=True)
            image.touch()
    (tmp_path / "my-tested-2.txt").write_text("bear/1 70")  # no split's word
    splits = [
        Images(tmp_path, f"list/{tmp_path / f'my-{split}-2.txt'}")
        for split, text in lists.items()
        if text
    ]
    assert splits[0].labels.tolist() == labels
    assert [images.class_names for images in splits] == [names] * len(splits)


def test_missing_images_are_counted_when_the_list_is_read(domain, capsys):
    there = "clipart/airplane/clipart_002_000003.jpg 1\n"
    (domain / "some.txt").write_text(
        there + "\nclipart/airplane/no.jpg 1\n" + "nowhere/1.jpg 1\n" + there
    )
    Images(domain, f"list/{domain / 'some.txt'}")
    assert "some.txt names 2 images that are not below " in (said := capsys.readouterr().err)
    assert "the first in line 3: clipart/airplane/no.jpg" in said


AIRPLANE = "clipart/airplane/clipart_002_000003.jpg"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no images"),
        (
            f"{AIRPLANE} 1\nclipart/airplane/clipart_002_000001.jpg\n",
            "line 2: some lines end in a label",
        ),
        ("nowhere/1.jpg 0\n", "line 1 names nowhere/1.jpg, which is not below .*; check --data"),
        (
            f"{AIRPLANE} cat\n",
            f'line 1 names {AIRPLANE} cat, which is not below .* and that lines are "path label"',
        ),
        (f"\n{AIRPLANE} -1\n", "line 2 ends in -1; a label is an integer from 0 to 65,534"),
        (f"{AIRPLANE} 1.5\n", "line 1 ends in 1.5; a label is an integer"),
        (f"{AIRPLANE} 65535\n", "line 1 ends in 65535; .* to 65,534"),
        (f"{AIRPLANE} 99999999999999999999\n", "line 1 ends in 99999999999999999999; .* to 65,534"),
        (f"{AIRPLANE} {'9' * 5000}\n", "line 1 ends in 9{24}; .* to 65,534"),
        (
            f"{AIRPLANE} 1\n{AIRPLANE} 2\n",
            f"line 2 gives {AIRPLANE} the label 2, and line 1 the label 1; keep one",
        ),
        ("1.jpg\n", "line 1: 1.jpg has no label and no folder"),
        (None, "there is no such file"),
        (b"\xff\xfe\x00\xd8", "is not a text file"),
        (b"a\x00b/1.jpg 1\n", "is not a text file"),
    ],
    ids=lambda value: repr(value)[-24:],
)
def test_bad_lists_are_refused_by_name(domain, text, said):
    file = domain / "bad.txt"
    if text is not None:
        file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(UserError, match=rf"{file}.*{said}"):
        Images(domain, f"list/{file}")


def test_outside_a_list_below_data_is_named_with_the_path_to_give(domain, monkeypatch):
    """The path of a list is relative to the working directory."""
    (domain / "own.txt").write_text(f"{AIRPLANE} 1\n")
    monkeypatch.chdir(domain.parent)
    root = domain.relative_to(domain.parent)
    with pytest.raises(UserError, match=rf"not in the working .* give list/{root}/own.txt$"):
        Images(root, "list/own.txt")
    assert len(Images(root, f"list/{root}/own.txt")) == 1
    with pytest.raises(UserError, match=r"neither.txt: there is no such file"):
        Images(root, "list/neither.txt")


def test_a_split_without_labels_beside_one_with_them_is_refused(domain):
    (domain / "a_train.txt").write_text(f"{AIRPLANE} 1\n")
    (domain / "a_test.txt").write_text(f"{AIRPLANE}\n")
    for split in ("train", "test"):
        with pytest.raises(
            UserError,
            match=r"a_train.txt has labels and .*a_test.txt has none, .*; give labels to both or",
        ):
            Images(domain, f"list/{domain / f'a_{split}.txt'}")


def test_domainnet_needs_both_lists_and_has_345_classes(domain):
    with (domain / "clipart_test.txt").open("a") as file:
        file.write(f"{AIRPLANE} 345\n")
    with pytest.raises(
        UserError,
        match=r"clipart_test.txt, line 5 ends in 345; a label is an integer from 0 to 344",
    ):
        Images(domain, "domainnet/clipart")
    (domain / "clipart_test.txt").unlink()
    with pytest.raises(UserError, match=r"clipart_test.txt does not exist; put clipart.zip there"):
        Images(domain, "domainnet/clipart")


@pytest.fixture
def folders(tmp_path):
    """Classes of 20, 7 and 1 files, which are not images; a train split only."""
    for name, count in (("n01", 20), ("n02", 7), ("n03", 1)):
        (tmp_path / "train" / name).mkdir(parents=True)
        for number in range(count):
            (tmp_path / "train" / name / f"{number:02d}.jpg").write_bytes(
                f"{name} {number}".encode()
            )
    return tmp_path


def test_a_class_list_selects_and_numbers_class_folders(folders):
    (folders / "in2.txt").write_text("n03 a name behind it\nn01\n")
    images = Images(folders, f"classes/{folders / 'in2.txt'}")
    assert images.class_names == ["n03", "n01"]
    assert images.labels.tolist() == [1] * 20 + [0]
    assert images.read(20) == b"n03 0"
    assert images.where(20) == str(folders / "train" / "n03" / "00.jpg")
    (folders / "train" / "n02").rename(folders / "train" / "n01 b")
    (folders / "in2.txt").write_text("n01 b\nn03\n")
    images = Images(folders, f"classes/{folders / 'in2.txt'}")
    assert images.class_names == ["n01 b", "n03"]
    assert images.labels.tolist() == [0] * 7 + [1]
    for text, said in (
        ("n01\nn04\n", "names n04, which is not a class folder"),
        ("n01\nn01\n", "names a class twice"),
        ("\n", "in2.txt is empty; give it a line for each class folder"),
    ):
        (folders / "in2.txt").write_text(text)
        with pytest.raises(UserError, match=said):
            Images(folders, f"classes/{folders / 'in2.txt'}")


def test_a_share_is_the_same_in_every_call(folders):
    whole, some = Images(folders), Images(folders, "share/10")
    assert np.bincount(some.labels).tolist() == [2, 1, 1]
    assert some.paths == Images(folders, "share/10").paths
    assert set(some.paths) < set(whole.paths)
    assert some.paths == sorted(some.paths)
    half = Images(folders, "share/50")
    assert np.bincount(half.labels).tolist() == [10, 4, 1]
    assert set(some.paths) < set(half.paths)  # a smaller share is part of a larger one
    assert Images(folders, "share/100").paths == whole.paths
    for wrong in ("share/0", "share/101", "share/ten", "share"):
        with pytest.raises(UserError, match=r"is not a percentage; write it as share/10"):
            Images(folders, wrong)


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(
        UserError,
        match=r"--dataset mnist is unknown; give none .* or one of cifar10, .* torch \(see --h",
    ):
        Images(tmp_path, "mnist")
    with pytest.raises(UserError, match=r"there is no such domain; choose from domainnet/clipart,"):
        Images(tmp_path, "domainnet/photo")
    with pytest.raises(UserError, match=r"clipart_train.txt does not exist; put clipart.zip there"):
        Images(tmp_path, "domainnet/clipart")
    for name in ("list", "list/", "classes", "classes/"):
        with pytest.raises(
            UserError, match=rf"--dataset {name} names no file; give {name.strip('/')}/FILE"
        ):
            Images(tmp_path, name)
    with pytest.raises(UserError, match=r"the dataset is called cifar10"):
        Images(tmp_path, "cifar10/train")


# ------------------------------------------------------------------------- packed


def test_small_images_are_packed_as_pixels(tmp_path, monkeypatch, capsys):
    """The loader's crops of 32 x 32 images equal torchvision's pixels, without JPEG in between.

    Pixels are stored in the raw mode of stock ffcv.
    """
    theirs = sets.CIFAR10(cifar(tmp_path, sets.CIFAR10, monkeypatch))
    main(Packing(data=tmp_path, dataset="cifar10", out=tmp_path / "x.beton"))
    assert (
        "stored as raw pixels: 20 images that are not JPEGs and not larger than 64 px"
        in capsys.readouterr().out
    )
    beton = Beton(tmp_path / "x.beton")
    assert (beton.modes == RAW).all()
    assert beton.notes["class_names"] == theirs.classes
    for index, (picture, label) in enumerate(theirs):
        stored, mode = beton.image(index)
        assert mode == RAW
        np.testing.assert_array_equal(
            np.frombuffer(stored, np.uint8).reshape(32, 32, 3), np.asarray(picture)
        )
        assert beton.labels[index] == label
    plan = EpochPlan(
        num_samples=20, batch=20, seed=0, mode="evaluate", sizes=((0, 28),), crop_pct=0.875
    )
    loader = ThreadedLoader(FfcvSource(tmp_path / "x.beton"), plan, 1)
    (batch,) = loader.batches(0)
    loader.close()
    for index in range(20):
        np.testing.assert_array_equal(
            batch.image[index].numpy(), np.asarray(theirs[index][0])[2:30, 2:30]
        )
    beton.close()


def test_images_above_pixels_to_are_packed_as_jpegs(tmp_path, monkeypatch):
    theirs = sets.CIFAR10(cifar(tmp_path, sets.CIFAR10, monkeypatch))
    main(Packing(data=tmp_path, dataset="cifar10", out=tmp_path / "x.beton", pixels_to=31))
    beton = Beton(tmp_path / "x.beton")
    assert not beton.modes.any()
    assert np.asarray(decode(beton.image(0)[0], "")).shape == np.asarray(theirs[0][0]).shape
    beton.close()
    main(Packing(data=tmp_path, dataset="cifar10", out=tmp_path / "y.beton", max_side=16))
    beton = Beton(tmp_path / "y.beton")
    assert (beton.modes == RAW).all()
    assert set(beton.heights.tolist()) == {16}
    want = crop_resize(theirs[0][0], (0, 0, 32, 32), 16, Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(
        np.frombuffer(beton.image(0)[0], np.uint8).reshape(16, 16, 3), want
    )
    beton.close()


@pytest.mark.slow
def test_the_command_packs_a_named_dataset(domain, command):
    """The labels of the list are in the .beton, without folders train and val."""
    done = command(
        "tools/pack_dataset.py",
        "--dataset",
        "domainnet/clipart",
        "--data",
        domain,
        "--split",
        "test",
        "--out",
        domain / "x.beton",
    )
    assert done.returncode == 0, done.stderr
    assert Beton(domain / "x.beton").labels.tolist() == [0, 0, 2, 2]


# ------------------------------------------------------------------------- what a name may do


def touch(root, *paths):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"x")


# Names that sort differently by text, by number, by case and by folder, and names that are equal to
# timm's key, as 1 and 01, which timm leaves in the order of the disk.
TREE = [
    *(f"n{n}/{m}_{n}.JPEG" for n in (1, 2, 10, 100) for m in (1, 2, 10)),
    *("B/b.png", "a/A.jpg", "a/b.jpeg", "a/deep/x10.png", "a/deep/x9.png", "C/deep/y.jpg"),
    *("n1/01_1.JPEG", "n1/001_1.JPEG", "a/a.jpg", "A/b.jpeg", "top.jpg", "x/.jpg", "x/._1.jpg"),
    *("é/É.jpg", "猫/٣.jpg", "x/1.jpg.txt", "x/list.csv", "n2/a b.jpg", "n2/a-b.jpg", "n2/a.b.jpg"),
]


@pytest.mark.parametrize("split", ["train", "val", "whole"])
def test_folders_of_png_and_jpeg_are_in_timms_order(tmp_path, split):
    """The fingerprints of stores that exist depend on it."""
    home = tmp_path / {"train": "train", "val": "validation", "whole": ""}[split]
    touch(home, *TREE)
    (home / "linked").symlink_to("a")
    theirs = create_dataset("", root=str(tmp_path), split=split).reader
    images = Images(tmp_path, split=split)
    # timm reads images in no class folder and companion files too.
    names = zip(theirs.filenames(), theirs.filenames(absolute=True), strict=True)
    kept = [pair for pair in names if "/" in pair[0] and "/._" not in pair[0]]
    keys = [timm_key(path) for path, _ in kept]
    kept.sort(key=lambda pair: (keys.index(timm_key(pair[0])), pair[0]))
    assert keys == sorted(keys)
    assert [(path, images.where(n)) for n, path in enumerate(images.paths)] == kept
    # timm orders classes whose names are equal to its key by chance: a and A. Its class is the
    # innermost folder: `deep`, of two classes.
    order = [name for name in theirs.class_to_idx if name not in ("", "deep", "x", "a", "A")]
    assert [name for name in images.class_names if name not in ("C", "a", "A")] == order
    named = [images.class_names[label] for label in images.labels]
    assert named == [path.partition("/")[0] for path, _ in kept]
    assert len(images) == 32


def test_the_fingerprint_of_a_folder_is_that_of_earlier_versions(tmp_path):
    """Computed with commit 65c3882."""
    touch(tmp_path, *(f"n{n}/{m}.{e}" for n in (1, 10, 2) for m, e in ((1, "JPG"), (10, "png"))))
    assert Images(tmp_path).fingerprint() == FINGERPRINT


FINGERPRINT = "1f1eafc9d1c2c6d6d3157d3e537e19a33cf553de74c99278a55f76ac8f35fc23"


def test_all_endings_of_torchvision_are_read_and_others_counted(tmp_path, capsys):
    touch(tmp_path, *(f"cat/1{ending}" for ending in sets.folder.IMG_EXTENSIONS), "cat/2.WebP")
    assert len(Images(tmp_path)) == 10
    assert capsys.readouterr().out == ""
    assert set(dataset_names.ENDINGS) == set(sets.folder.IMG_EXTENSIONS)
    touch(tmp_path, "cat/1.txt", "dog/2.TXT", "cat/x.gif")
    Images(tmp_path)
    assert capsys.readouterr().out == (
        f"{tmp_path}: 3 files with other endings were left out: .txt 2, .gif 1\n"
    )
    touch(tmp_path, *(f"cat/a.\x1b{n}" for n in range(9)), "cat/LICENSE")
    Images(tmp_path)
    assert r"13 files with other endings were left out: .txt 2, " in (
        said := capsys.readouterr().out
    )
    assert r".\x1b0 1, .\x1b1 1, " in said
    assert "and 7 more" in said


SESSIONS = [f"{c}/s{s}/{n}.jpg" for c in ("Aqua", "Dune") for s in (1, 2) for n in (0, 1)]


def test_outside_the_class_is_the_first_folder_as_in_torchvision(tmp_path, capsys):
    touch(tmp_path, *(f"train/{path}" for path in (*SESSIONS, "Dune/3.jpg")))
    theirs, images = sets.ImageFolder(tmp_path / "train"), Images(tmp_path)
    assert images.class_names == theirs.classes == ["Aqua", "Dune"]
    got = {images.where(n): label for n, label in enumerate(images.labels.tolist())}
    assert got == dict(theirs.samples)
    assert capsys.readouterr().out == (
        f"{tmp_path}/train: the class of an image is its first folder; 8 images lie deeper, as "
        "Aqua/s1/0.jpg of class 'Aqua'\n"
    )
    half = Images(tmp_path, "share/50")
    assert (half.class_names, len(half)) == (["Aqua", "Dune"], 4)
    (tmp_path / "some.txt").write_text("Dune\n")
    chosen = Images(tmp_path, f"classes/{tmp_path / 'some.txt'}")
    assert (chosen.class_names, len(chosen)) == (["Dune"], 5)


@pytest.mark.parametrize(
    ("lists", "names", "labels", "said"),
    [
        ({"train": SESSIONS}, ["Aqua", "Dune"], [0] * 4 + [1] * 4, "8 images lie deeper"),
        # What all images of a split share is above the classes, but for the last folder.
        (
            {"train": [f"train/{p}" for p in SESSIONS], "val": ["val/Dune/s3/1.jpg"]},
            ["Aqua", "Dune"],
            [0] * 4 + [1] * 4,
            "8 images lie deeper",
        ),
        ({"val": ["cat/s1/1.jpg"], "train": SESSIONS}, ["Aqua", "Dune", "cat"], [2], "1 images"),
        ({"all": ["./cat/s1/1.jpg", "./dog/s1/1.jpg"]}, ["cat", "dog"], [0, 1], "lie deeper"),
        (
            {"all": ["x/cat/1.jpg", "x/dog/1.jpg"]},
            ["cat", "dog"],
            [0, 1],
            "the classes are the folders in x, which all images share",
        ),
        # With labels the folders give only names.
        ({"all": ["cat/s1/1.jpg 1", "dog/s1/1.jpg 0"]}, ["dog", "cat"], [1, 0], ""),
        ({"all": ["x/cat/s1/1.jpg 0", "x/dog/s1/1.jpg 1"]}, ["cat", "dog"], [0, 1], ""),
    ],
)
def test_outside_the_class_in_a_list_is_the_first_folder(
    tmp_path, lists, names, labels, said, capsys
):
    for split, lines in lists.items():
        touch(tmp_path, *(line.split()[0] for line in lines))
        (tmp_path / f"my_{split}.txt").write_text("\n".join(lines))
    images = Images(tmp_path, f"list/{tmp_path / f'my_{next(iter(lists))}.txt'}")
    assert (images.class_names, images.labels.tolist()) == (names, labels)
    assert said in (out := capsys.readouterr().out)
    assert said or not out


def test_outside_splits_are_no_classes(tmp_path):
    lines = ["train/cat/1.jpg", "val/dog/2.jpg"]
    touch(tmp_path, *lines)
    (tmp_path / "all.txt").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"all.txt holds splits where .* train, val; give each"):
        Images(tmp_path, f"list/{tmp_path / 'all.txt'}")


@pytest.mark.parametrize("paths", [["train/a/1.jpg", "train/b/1.jpg"], ["train/1.jpg"]])
@pytest.mark.parametrize("dataset", ["", "share/50"])
def test_outside_a_class_may_be_called_as_a_split(tmp_path, dataset, paths):
    """Only that class was read, with its folders as classes."""
    touch(tmp_path, *paths, "airplane/a/b/1.jpg", "car/1.jpg", "notes/1.txt")
    for split in ("train", "val"):
        said = (
            rf"{tmp_path} holds images in airplane, car beside train, which may .* if it is a "
            rf"split, give {tmp_path}/train itself, and if it is a class, rename it"
        )
        with pytest.raises(UserError, match=said):
            Images(tmp_path, dataset, split)
    (tmp_path / "train").rename(tmp_path / "trains")
    assert Images(tmp_path, dataset).class_names == ["airplane", "car", "trains"]


def test_outside_what_lies_beside_splits_is_named(tmp_path, capsys):
    """Train beside val are splits, and no image was said to be left out."""
    touch(tmp_path, *(f"{split}/cat/1.jpg" for split in ("train", "val")), "train/dog/1.jpg")
    touch(tmp_path, "notes/a/1.xml", "@eaDir/1.jpg")
    assert len(Images(tmp_path)) == 2
    assert capsys.readouterr().out == ""
    touch(tmp_path, *(f"x{number}/cat/1.jpg" for number in range(6)))
    assert len(Images(tmp_path)) == 2
    assert capsys.readouterr().out == (
        f"{tmp_path}: images beside the splits are left out: x0, x1, x2, x3, x4, ...\n"
    )
    # A split that was named is meant.
    (tmp_path / "val").rename(tmp_path / "mine")
    assert Images(tmp_path, split="mine").paths == ["cat/1.jpg"]


def test_outside_a_large_tree_beside_a_split_is_not_listed(tmp_path, scanned):
    touch(tmp_path, "train/cat/1.jpg", "train/dog/1.jpg")
    touch(tmp_path, *(f"notes/n{a}/m{b}/1.xml" for a in range(4) for b in range(4)))
    assert len(Images(tmp_path)) == 2
    notes = [str(folder) for folder in scanned if "notes" in str(folder)]
    assert notes == [f"{tmp_path}/notes{deeper}" for deeper in ("", "/n0", "/n0/m0")]


def test_outside_equal_names_have_one_order_on_every_disk(tmp_path, monkeypatch):
    """1.jpg and 01.jpg had the order of the disk: a copy had another fingerprint."""
    touch(tmp_path, *(f"{c}/{n}.jpg" for c in ("Ant", "ant", "bee") for n in ("1", "01", "B", "b")))
    scandir, prints = os.scandir, set()
    for backwards in (False, True):
        with monkeypatch.context() as patch:
            # The disk's order; pytest lists folders too when the test has ended.
            patch.setattr(
                os, "scandir", lambda path, b=backwards: sorted(scandir(path), key=str, reverse=b)
            )
            images = Images(tmp_path)
        assert images.paths[:4] == ["Ant/01.jpg", "Ant/1.jpg", "ant/01.jpg", "ant/1.jpg"]
        prints.add(images.fingerprint())
    assert len(prints) == 1


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("bar", "caf\u00e9", "cafe\u0301"), r"'cafe\u0301' and 'caf\xe9'"),
        (("Cat", "cat"), "'Cat' and 'cat'"),
    ],
)
def test_outside_classes_that_look_equal_are_warned_of(tmp_path, capsys, names, said):
    touch(tmp_path, *(f"{name}/1.jpg" for name in names))
    assert len(Images(tmp_path).class_names) == len(names)
    assert capsys.readouterr().err == (
        f"warning: {tmp_path} has classes whose names look equal: {said} differ in case or Unicode "
        "form only\n"
    )


def test_outside_a_class_list_may_have_another_unicode_form(tmp_path):
    touch(tmp_path, "bar/1.jpg", "caf\u00e9/1.jpg", "dog/1.jpg")
    (tmp_path / "some.txt").write_text("cafe\u0301\nbar\n")
    images = Images(tmp_path, f"classes/{tmp_path / 'some.txt'}")
    assert images.class_names == ["caf\u00e9", "bar"]


def test_outside_classes_without_images_are_named(tmp_path, capsys):
    touch(tmp_path, "cat/1.jpg", "dog/1.jpg")
    (tmp_path / "all.txt").write_text("cat/1.jpg 0\ndog/1.jpg 2\n")
    assert Images(tmp_path, f"list/{tmp_path / 'all.txt'}").class_names == ["cat", "class 1", "dog"]
    assert capsys.readouterr().out == (f"{tmp_path} has no images of 1 of its 3 classes: class 1\n")


# What systems leave in folders of images, and what a Mac's zip has beside each of them.
LEFT = [
    *(f"cat/{name}/1.jpg" for name in (".ipynb_checkpoints", "@eaDir/1.jpg", ".thumbnails")),
    *(f"{name}/1.jpg" for name in ("__MACOSX/cat", ".Trash-0/files", "lost+found", "#recycle")),
    *(
        f"{name}/1.jpg"
        for name in ("Network Trash Folder", "Temporary Items", "@__thumb", "__pycache__")
    ),
    *(f"{name}/1.jpg" for name in (".AppleDouble", "$RECYCLE.BIN", "found.000", "~snapshot")),
    *("cat/._1.jpg", "cat/._2.jpg", "dog/._1.jpg", "cat/.hidden.jpg"),
]


def test_outside_what_systems_put_into_folders_is_left_out(tmp_path, capsys):
    touch(tmp_path, "cat/1.jpg", "dog/1.jpg")
    before = Images(tmp_path).fingerprint()
    touch(tmp_path, *LEFT)
    images = Images(tmp_path)
    assert (images.class_names, images.paths) == (["cat", "dog"], ["cat/1.jpg", "dog/1.jpg"])
    assert images.fingerprint() == before
    assert capsys.readouterr().out == (
        f"{tmp_path}: 19 hidden or system names were left out: ._* 3, #recycle 1, $RECYCLE.BIN 1, "
        ".AppleDouble 1, .Trash-0 1 and 12 more\n"
    )
    with pytest.raises(UserError, match="holds cat, dog but no folder 'a/b'"):
        Images(tmp_path, split="a/b")
    (tmp_path / "all.txt").write_text("\n".join(["cat/1.jpg", "dog/1.jpg", *LEFT]))
    listed = Images(tmp_path, f"list/{tmp_path / 'all.txt'}")
    assert (listed.class_names, listed.paths) == (images.class_names, images.paths)
    assert "all.txt: 19 hidden or system names were left out: " in capsys.readouterr().out


def test_outside_a_flat_folder_is_refused(tmp_path, capsys):
    touch(tmp_path, "val/2.jpg", "val/1.jpg", "val/metadata.csv")
    said = r"the images in .*/val, as 1.jpg, lie in no class folder; make .* --dataset list/FILE"
    for root, dataset in ((tmp_path, ""), (tmp_path / "val", ""), (tmp_path, "share/50")):
        with pytest.raises(UserError, match=said):
            Images(root, dataset, split="val")
    touch(tmp_path, "val/cat/1.jpg", "val/dog/1.jpg")
    assert Images(tmp_path, split="val").class_names == ["cat", "dog"]
    assert "images left out that lie in no class folder: 2, as 1.jpg" in capsys.readouterr().out


@pytest.fixture
def scanned(monkeypatch):
    """The folders listed so far."""
    folders, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: folders.append(path) or scandir(path))
    return folders


def test_links_around_in_a_circle_are_refused(tmp_path, scanned):
    """timm follows them 40 times, and two in one folder 2^40 times."""
    touch(tmp_path, "cat/1.jpg")
    for name in ("again", "and_again"):
        (tmp_path / "cat" / name).symlink_to("..")
    with pytest.raises(UserError, match=r"again is a link to a folder above it, .*; remove it"):
        Images(tmp_path)
    assert len(scanned) < 10


def test_links_that_double_in_every_folder_are_refused(tmp_path, scanned):
    """No circle: each folder holds two links to the next, so the last one is there 2^20 times."""
    for n in range(20):
        (tmp_path / "data" / str(n)).mkdir(parents=True)
        for name in "ab":
            (tmp_path / "data" / str(n) / name).symlink_to(f"../{n + 1}")
    touch(tmp_path, "data/20/1.jpg")
    with pytest.raises(UserError, match=r"lead to the same folders more than 1,024 times"):
        Images(tmp_path / "data")
    assert len(scanned) < 1100


def test_links_out_of_the_root_are_followed(tmp_path):
    """ImageNet is often a folder of links; the one who made them may read what they name."""
    touch(tmp_path, "store/n01/1.jpg", "store/n02/1.jpg", "store/2.jpg")
    (tmp_path / "data").mkdir()
    for name in ("n01", "n02"):
        (tmp_path / "data" / name).symlink_to(tmp_path / "store" / name)
    (tmp_path / "data" / "n01" / "2.jpg").symlink_to("../2.jpg")
    images = Images(tmp_path / "data")
    assert images.paths == ["n01/1.jpg", "n01/2.jpg", "n02/1.jpg"]
    assert images.read(1) == b"x"


def test_folders_deeper_than_pythons_stack_are_skipped_with_a_warning(tmp_path, capsys):
    """A path has 4,095 bytes at most."""
    touch(tmp_path, "cat/1.jpg")
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("deep", dir_fd=here)
        here, above = os.open("deep", os.O_RDONLY, dir_fd=here), here
        os.close(above)
    os.close(here)
    try:
        assert Images(tmp_path).paths == ["cat/1.jpg"]
    finally:
        # pytest cannot: it recurses once per level.
        subprocess.run(["rm", "-rf", tmp_path / "deep"], check=True)
    said = capsys.readouterr().err
    assert "warning: 1 folders were left out: " in said
    assert "this name is too long" in said


@pytest.mark.parametrize("name", [b"\xff.jpg", b"a/\xe9/1.jpg"])
def test_names_that_are_not_utf_8_are_refused(tmp_path, name):
    path = os.path.join(os.fsencode(tmp_path), b"cat", name)
    os.makedirs(os.path.dirname(path))
    with open(path, "wb"):
        pass
    with pytest.raises(UserError, match=r"jpg: this name is not UTF-8; rename it"):
        Images(tmp_path)


def test_a_digit_that_is_no_number_sorts_as_text(tmp_path):
    """timm ends in a ValueError of int()."""
    touch(tmp_path, "1²2/1.jpg", "12/1²2.jpg")
    assert Images(tmp_path).class_names == ["1²2", "12"]


@pytest.mark.parametrize(
    "path",
    ["../secret.jpg", "clipart/../../secret.jpg", "/etc/passwd", "clipart//airplane/1.jpg", "a/"],
)
def test_a_list_names_nothing_outside_of_its_root(domain, path):
    (domain.parent / "secret.jpg").touch()
    (domain / "bad.txt").write_text(f"{AIRPLANE} 1\n{path} 1\n{AIRPLANE} 1\n")
    with pytest.raises(UserError, match=r"bad.txt, line 2: .*; paths in a list are relative to"):
        Images(domain, f"list/{domain / 'bad.txt'}")


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.symlink_to("/dev/zero"),
        os.mkfifo,
        lambda path: path.write_bytes(b"a" * 100_000),
        lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**40),
    ],
    ids=["device", "pipe", "line", "zeros"],
)
def test_a_list_without_end_is_refused(domain, make):
    make(domain / "endless.txt")
    with pytest.raises(
        UserError, match=r"endless.txt(: this is not a regular file| is not a text file)"
    ):
        Images(domain, f"list/{domain / 'endless.txt'}")


def test_a_list_may_begin_with_a_byte_order_mark(domain):
    (domain / "some.txt").write_bytes(f"\ufeff{AIRPLANE} 1\n".encode())
    assert Images(domain, f"list/{domain / 'some.txt'}").paths == [AIRPLANE]


def test_more_classes_than_files_hold_are_refused(monkeypatch, folders):
    monkeypatch.setattr(datasets, "MOST_CLASSES", 2)
    with pytest.raises(UserError, match=r"has 3 classes, and files hold 2 at most"):
        Images(folders)


@pytest.mark.parametrize("label", [-1, 2, 10**8])
def test_a_label_without_a_class_is_refused(monkeypatch, tmp_path, label):
    """A finder of the user's own is checked too."""
    found = datasets.Listed(["1.jpg"], np.array([label]), ["cat", "dog"], tmp_path)
    monkeypatch.setitem(datasets.FINDERS, "own", lambda *_: found)
    with pytest.raises(UserError, match=rf"has labels from {label} to .* outside its 2 classes"):
        Images(tmp_path, "own/x")


@pytest.mark.parametrize("label", [10**8, -1, None, "cat", [1], 0.5])
def test_labels_of_hugging_face_are_checked_before_classes_get_names(monkeypatch, tmp_path, label):
    """A label of 10^8 took 7.4 GB. The package `datasets` is not installed here."""

    class Reader(list):
        def filenames(self):
            return ["1.jpg", "2.jpg"]

    reader = Reader([(io.BytesIO(), 0), (io.BytesIO(), label)])
    made = SimpleNamespace(reader=reader)
    monkeypatch.setattr(timm.data, "create_dataset", lambda *_, **__: made)
    with pytest.raises(UserError, match=r"hfds/x, row 1 has the label .* from 0 to 65,534: write"):
        Images(tmp_path, "hfds/x")
    reader[1] = io.BytesIO(), 3
    assert Images(tmp_path, "hfds/x").class_names == ["0", "1", "2", "3"]


def test_errors_of_hugging_face_are_one_sentence(monkeypatch, tmp_path):
    error = ValueError('Unknown split "validation". Should be one of ["train", "test"].')

    def create(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(timm.data, "create_dataset", create)
    said = r"hfds/x cannot be read as split validation \(ValueError, Unknown split"
    with pytest.raises(UserError, match=said):
        Images(tmp_path, "hfds/x", "validation")
    # Commands name the remedy of a full disk.
    error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space"):
        Images(tmp_path, "hfds/x", "validation")


def test_a_list_with_labels_may_hold_several_splits(folder, tmp_path):
    paths = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.jpg"))
    lines = [f"{path} {int('dog' in path)}\n" for path in paths]
    (tmp_path / "all.txt").write_text("".join(lines))
    assert Images(folder, f"list/{tmp_path / 'all.txt'}").class_names == ["cat", "dog"]


# ------------------------------------------------------------------------- CSV


def write_table(root, name, text):
    """Write a CSV, and an empty file for each path in it."""
    (root / name).write_text(text)
    for path in re.findall(r"[\w /]+\.jpg", text):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).touch()
    return f"list/{root / name}"


@pytest.mark.parametrize(
    ("text", "paths", "labels", "names"),
    [
        ("1.jpg,dog\n2.jpg,cat\n", ["1.jpg", "2.jpg"], [1, 0], ["cat", "dog"]),
        ("1.jpg, 1\n2.jpg, 0\n", ["1.jpg", "2.jpg"], [1, 0], ["0", "1"]),
        ("path,label\n1.jpg,dog\n2.jpg,cat\n", ["1.jpg", "2.jpg"], [1, 0], ["cat", "dog"]),
        ('Label,n,FileName\n0,"a,b",a b.jpg\n1,3,c.jpg', ["a b.jpg", "c.jpg"], [0, 1], ["0", "1"]),
        ("image,label\na/1.jpg,1\nb/2.jpg,0\n", ["a/1.jpg", "b/2.jpg"], [1, 0], ["b", "a"]),
        # As in every list.
        ("cat/1.jpg 0\ndog/2.jpg 1\n", ["cat/1.jpg", "dog/2.jpg"], [0, 1], ["cat", "dog"]),
    ],
)
def test_outside_a_csv_lists_paths_and_labels(tmp_path, text, paths, labels, names):
    found = Images(tmp_path, write_table(tmp_path, "some.csv", text))
    assert (found.paths, found.labels.tolist(), found.class_names) == (paths, labels, names)


def test_outside_classes_named_in_a_csv_are_those_of_all_splits(tmp_path):
    val = write_table(tmp_path, "my_val.csv", "path,label\n1.jpg,dog\n2.jpg,ant\n")
    write_table(tmp_path, "my_train.csv", "path,label\n3.jpg,cat\n")
    images = Images(tmp_path, val)
    assert (images.labels.tolist(), images.class_names) == ([2, 0], ["ant", "cat", "dog"])
    write_table(tmp_path, "my_train.csv", "path,label\n3.jpg,4\n")
    with pytest.raises(UserError, match=r"one has numbers for labels and the other names of class"):
        Images(tmp_path, val)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("label,text\n0,1.jpg\n", r"line 1 names 0 columns of paths; call one, and no other, '"),
        ("label,path,file\n0,1.jpg,1.jpg\n", "line 1 names 2 columns of paths"),
        ("1.jpg,0,7\n", r"line 1 has no path and label in its 3 columns; write \"path,label\", or"),
        ("path,label\n1.jpg,\n", "line 2 has no path and label in its 2 columns"),
        ("path,label\n1.jpg,0,5\n", "line 2 has no path and label in its 3 columns"),
        ("1.jpg,0\n2.jpg,cat\n", "line 2: some labels are numbers and some names of classes, as"),
        ("1.jpg,cat\n1.jpg,dog\n", "line 2 gives 1.jpg the label dog, and line 1 the label cat"),
        ("1.jpg,-1\n", "line 1 ends in -1; a label is an integer"),
        ("../1.jpg,cat\n", "line 1: ../1.jpg .*paths in a list are relative to --data"),
    ],
)
def test_outside_bad_tables_are_refused_by_name(tmp_path, text, said):
    with pytest.raises(UserError, match=rf"some\.csv, {said}"):
        Images(tmp_path, write_table(tmp_path, "some.csv", text))

"""Dataset objects of torchvision, timm, Hugging Face and users: pixels, labels, class names.

Hugging Face's `datasets` is not installed for tests: `Table` has the part of its interface that is
read.
"""

import io
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_dataset
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from densefeed.storage.beton_images import open_images
from densefeed.storage.dataset_items import SAMPLED, DatasetItems
from densefeed.storage.images import Images, SplitOptions, decode
from densefeed.system.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Seven PNGs of two classes, RGB, of different sizes."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(7):
        path = root / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (9 + number, 12, 3), np.uint8)).save(path)
    return root


def read(dataset):
    """The pixels of all items, as every command decodes them."""
    images = open_images(None, DatasetItems(dataset, "data"), "train")
    return [np.asarray(decode(images.read(n), "")) for n in range(len(images))]


def equal(ones, others):
    return len(ones) == len(others) and all(map(np.array_equal, ones, others))


def as_array(image):
    return np.asarray(image)


def as_bytes(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


FORMS = {
    "pillow": lambda image: image,
    "array": as_array,
    "uint8 tensor": lambda image: torch.from_numpy(as_array(image).copy()).permute(2, 0, 1),
    "float tensor": v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]),
    "bytes": as_bytes,
    "undecoded": lambda image: {"bytes": as_bytes(image), "path": None},
}


@pytest.mark.parametrize("form", FORMS)
def test_outside_items_of_every_form_have_the_pixels_of_their_files(photos, form):
    files = ImageFolder(photos)
    items = [(FORMS[form](image), label) for image, label in files]
    assert equal(read(items), [as_array(image) for image, _ in files])
    found = DatasetItems(items, "data")
    assert (found.labels.tolist(), found.class_names) == (files.targets, ["0", "1"])


def test_outside_paths_are_read_as_files(photos):
    files = ImageFolder(photos)
    items = DatasetItems(files.samples, "data")
    assert items.open(3).read() == Path(files.samples[3][0]).read_bytes()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "CMYK", "YCbCr", "HSV"])
def test_outside_pillow_images_of_every_mode_become_what_their_files_do(mode):
    rgb = Image.fromarray(np.random.default_rng(1).integers(0, 256, (8, 9, 3), np.uint8))
    if mode == "I;16":
        image = Image.fromarray(np.arange(72, dtype=np.uint16).reshape(8, 9) * 910)
        wanted = np.round(np.asarray(image) / 257)[..., None].repeat(3, 2)
    else:
        image = rgb.convert({"LA": "L"}.get(mode, mode)).convert(mode)
        wanted = np.asarray(image.convert("RGB"))
    assert image.mode == mode
    assert equal(read([(image, 0), (image, 1)]), [wanted] * 2)


def test_outside_the_images_that_a_dataset_keeps_stay_as_they_are():
    image = Image.new("P", (4, 4))
    image.info["transparency"] = 0
    read([(image, 0)])
    assert (image.mode, image.info) == ("P", {"transparency": 0})


def test_outside_gray_and_alpha_arrays_become_rgb():
    rng = np.random.default_rng(2)
    gray, rgba = rng.integers(0, 256, (4, 5), np.uint8), rng.integers(0, 256, (4, 5, 4), np.uint8)
    wanted = [np.stack([gray] * 3, -1)] * 3 + [rgba[..., :3]]
    items = [(gray, 0), (gray[..., None], 0), (torch.tensor(gray)[None], 0), (rgba, 0)]
    assert equal(read(items), wanted)


# ------------------------------------------------------------------------- labels and classes


class Feature:
    """A column's type; `datasets` has the classes Image and ClassLabel."""

    def __init__(self, names=None):
        if names:
            self.names = names


class ClassLabel(Feature):
    pass


class Value(Feature):
    pass


# Known by its name alone.
ImageFeature = type("Image", (Feature,), {})


class Table:
    """A stand-in for datasets.Dataset: features, rows, and columns without the transform."""

    def __init__(self, columns, features, transform=lambda row: row):
        self.columns, self.features, self.transform = columns, features, transform
        self.reads = []

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.columns[key]
        self.reads.append(key)
        return self.transform({name: column[key] for name, column in self.columns.items()})

    def with_format(self, kind):
        assert kind is None
        return Table(self.columns, self.features)


def make_table(files, **more):
    features = {"id": Value(), "img": ImageFeature(), "label": ClassLabel(["cat", "dog"])}
    images, labels = zip(*files, strict=True)
    columns = {"id": [*range(len(files))], "img": images, "label": labels}
    return Table(columns, features, **more)


def test_outside_a_table_of_hugging_face_is_read_by_its_features(photos):
    """With Table, which has its interface."""
    files = ImageFolder(photos)
    table = make_table(files)
    found = DatasetItems(table, "data")
    assert (found.labels.tolist(), found.class_names) == (files.targets, ["cat", "dog"])
    # All labels come from the column.
    assert len(table.reads) == 2 * len(files)
    assert equal(read(table), [as_array(image) for image, _ in files])
    table.features = {"img": ImageFeature(), "fine": ClassLabel(["a"]), "coarse": ClassLabel(["b"])}
    with pytest.raises(UserError, match=r"2 columns of labels among img, fine, coarse; .*rename_c"):
        DatasetItems(table, "data")


def test_outside_labels_that_a_transform_changes_are_read_from_the_items(photos):
    files = ImageFolder(photos)
    swap = make_table(files, transform=lambda row: row | {"label": 1 - row["label"]})
    wanted = [1 - label for label in files.targets]
    assert DatasetItems(swap, "data").labels.tolist() == wanted
    swapped = ImageFolder(photos, target_transform=lambda label: 1 - label)
    assert DatasetItems(swapped, "data").labels.tolist() == wanted


def test_outside_datasets_of_torchvision_timm_and_torch_state_labels_and_classes(photos):
    files = ImageFolder(photos)
    pixels = [as_array(image) for image, _ in files]
    order = [5, 0, 3]
    joined = ConcatDataset([Subset(files, order), files])
    cases = {
        "timm": (create_dataset("", str(photos)), range(7)),
        "torchvision": (files, range(7)),
        "subset": (Subset(files, order), order),
        "joined": (joined, [*order, *range(7)]),
        "table": (Subset(make_table(files), order), order),
    }
    for name, (dataset, rows) in cases.items():
        found = DatasetItems(dataset, "data")
        assert found.class_names == ["cat", "dog"], name
        assert found.labels.tolist() == [files.targets[row] for row in rows], name
        assert equal(read(dataset), [pixels[row] for row in rows]), name
    other = ImageFolder(photos)
    other.classes = ["bird", "dog"]
    with pytest.raises(UserError, match="joins datasets of other classes"):
        DatasetItems(ConcatDataset([files, other]), "data")


def test_outside_a_stated_label_needs_no_reading_of_all_items():
    class Many(list):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

    many = Many([(Image.new("RGB", (4, 4)), n % 3) for n in range(1000)])
    many.targets = torch.tensor([n % 3 for n in range(1000)])
    assert DatasetItems(many, "data").labels.tolist() == many.targets.tolist()
    assert many.reads == 2 * SAMPLED
    del many.targets
    assert DatasetItems(many, "data").labels.tolist() == [n % 3 for n in range(1000)]


# ------------------------------------------------------------------------- identity


def fingerprint(dataset):
    return open_images(None, DatasetItems(dataset, "data"), "train").fingerprint()


def test_outside_the_fingerprint_shows_other_lengths_orders_labels_and_pixels(photos):
    files = [(as_array(image), label) for image, label in ImageFolder(photos)]
    whole = fingerprint(files)
    assert whole == fingerprint([(Image.fromarray(image), label) for image, label in files])
    other = [(255 - image, label) for image, label in files]
    # Another label, images of one label in other places, and fewer items.
    places = [0, 1, 4, 3, 2, 5, 6]
    for changed in (files[:-1], [(files[0][0], 1), *files[1:]], [files[n] for n in places], other):
        assert fingerprint(changed) != whole


def test_outside_a_division_keeps_the_index_of_its_items(photos):
    items = DatasetItems(ImageFolder(photos), "data")
    parts = [open_images(None, items, s, SplitOptions(val_fraction=0.3)) for s in ("train", "val")]
    names = [path for images in parts for path in images.paths]
    assert sorted(names) == [f"item-{n:08d}" for n in range(7)]
    assert len({part.fingerprint() for part in parts}) == 2
    row = int(parts[1].rows[0])
    assert parts[1].read(0) == items.open(row).read()


def test_outside_items_are_read_one_at_a_time(photos):
    class Busy(list):
        inside = most = 0

        def __getitem__(self, index):
            self.inside += 1
            self.most = max(self.most, self.inside)
            threading.Event().wait(0.002)
            self.inside -= 1
            return super().__getitem__(index)

    busy = Busy([(image, label) for image, label in ImageFolder(photos)])
    items = DatasetItems(busy, "data")
    threads = [threading.Thread(target=items.open, args=(n,)) for n in range(7)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert busy.most == 1


# ------------------------------------------------------------------------- refusals

RGB = Image.new("RGB", (4, 4))
FLAT = torch.zeros(3, 4, 4)


class Growing(list):
    def __getitem__(self, index):
        if index == 1 and len(self) == 2:
            self.append((RGB, 0))
        return super().__getitem__(index)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


REFUSED = {
    "none": (None, r"data is a NoneType, and not a map-style dataset; give an object that has len"),
    "stream": (Stream(), r"data is a Stream, and not a map-style dataset"),
    "splits": ({"train": [], "test": []}, r"is a dictionary of train, test; give one of its"),
    "empty": ([], r"data holds no items"),
    "no image": (
        [{"pixels": RGB, "label": 0}],
        r"item 0 of data has no image among pixels, label;",
    ),
    "no image in a tuple": ([()], r"item 0 of data has no image; return \(image, label\)"),
    "no label": ([(RGB, 0), (RGB,)], r"item 1 of data has no label; return \(image, label\)"),
    "images alone": ([RGB], r"item 0 of data has no label"),
    "negative": (
        [(RGB, 0), (RGB, -1)],
        r"item 1 of data has the label '-1'; a label is an integer",
    ),
    "too many": ([(RGB, 70_000)], r"has the label '70000'; a label is an integer from 0 to 65,534"),
    "a name": ([(RGB, "cat")], r"item 0 of data has the label 'cat'; a label is an integer"),
    "layout": ([(np.zeros((3, 4, 5), np.uint8), 0)], r"has an image of uint8 \[3, 4, 5\]; an"),
    "floats": ([(np.zeros((4, 4, 3)), 0)], r"has an image of float64 \[4, 4, 3\]; an image"),
    "normalized": (
        [(FLAT - 2, 0)],
        r"an image of float32 \[3, 4, 4\] from -2 to -2; an image is a Pillow",
    ),
    "not a number": ([(FLAT + torch.nan, 0)], r"from nan to nan; an image is a Pillow"),
    "object": ([(object(), 0)], r"has an image of type object; an image is a Pillow image"),
    "floats of Pillow": (
        [(Image.new("F", (4, 4)), 0)],
        r"item 0 of data cannot be decoded \(it ho",
    ),
    "grown": (
        Growing([(RGB, 0), (RGB, 1)]),
        r"data has 3 items and had 2 when it was opened; leave",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_outside_datasets_that_cannot_be_labeled_are_refused_in_one_sentence(name):
    dataset, pattern = REFUSED[name]
    with pytest.raises(UserError, match=pattern) as error:
        DatasetItems(dataset, "data")
    assert "\n" not in str(error.value)


def test_outside_classes_of_one_name_are_told_apart():
    """Classes are matched by name, as those of a teacher. timm's ImageNet has two cranes."""
    items = type("Birds", (list,), {"classes": [("crane",), ("dog", "hound"), ("crane",)]})
    found = DatasetItems(items([(RGB, 0), (RGB, 1), (RGB, 2)]), "data")
    assert found.class_names == ["crane (0)", "dog, hound", "crane (2)"]


class Raising(list):
    """A list whose attributes cannot be read."""

    @property
    def labels(self):
        raise RuntimeError("not loaded")

    features = classes = samples = targets = reader = labels


@pytest.mark.parametrize(
    "stated",
    [
        {"samples": np.array([["a.png", "0"], ["b.png", "1"]])},
        {"imgs": torch.zeros(2, 3)},
        {"features": {"a": 1, "b": 2}},
    ],
)
def test_outside_attributes_of_other_meanings_are_not_read(stated):
    items = [(RGB, 0), (RGB, 1)]
    for dataset in (type("Own", (list,), stated)(items), Raising(items)):
        found = DatasetItems(dataset, "data")
        assert found.labels.tolist() == [0, 1]
        assert found.class_names == ["0", "1"]


def test_outside_a_path_that_no_file_can_have_is_one_sentence():
    with pytest.raises(UserError, match=r"item 0 of data names .*, which does not exist; correct"):
        DatasetItems([("a\0b.png", 0)], "data")


def test_outside_a_label_outside_the_classes_is_refused():
    dataset = TensorDataset(FLAT[None].repeat(3, 1, 1, 1), torch.tensor([0, 1, 2]))
    dataset.classes = ["cat", "dog"]
    with pytest.raises(UserError, match="labels from 0 to 2, outside its 2 classes; correct"):
        DatasetItems(dataset, "data")
    stated = [(RGB, None)] * 3
    stated = type("Stated", (list,), {"targets": [0, 1, 2**40]})([(RGB,)] * 3)
    with pytest.raises(UserError, match=r"item 2 of data has the label '1099511627776'"):
        DatasetItems(stated, "data")


def test_outside_a_random_transform_is_refused(photos):
    random = ImageFolder(photos, transform=v2.RandomResizedCrop(8))
    with pytest.raises(UserError, match=r"item 0 of data has other pixels when it is read again;"):
        DatasetItems(random, "data")
    assert len(read(ImageFolder(photos, transform=v2.CenterCrop(8)))) == 7


def test_outside_a_dataset_that_shrank_while_it_was_read_is_refused():
    dataset = [(RGB, 0)] * 5
    items = DatasetItems(dataset, "data")
    del dataset[3:]
    with pytest.raises(UserError, match="data has 3 items and had 5 when it was opened"):
        items.open(0)
    with pytest.raises(UserError, match=r"item 4 .* \(IndexError: list index out of range\)"):
        items.open(4)


def write_mnist(root, name):
    """Fashion-MNIST's four files, of seven images each; return the pixels of the training set."""
    rng, folder = np.random.default_rng(1), root / name / "raw"
    folder.mkdir(parents=True)
    for split in ("t10k", "train"):
        pixels = rng.integers(0, 256, (7, 28, 28), np.uint8)
        head = b"".join(n.to_bytes(4, "big") for n in (0x803, *pixels.shape))
        (folder / f"{split}-images-idx3-ubyte").write_bytes(head + pixels.tobytes())
        head = b"".join(n.to_bytes(4, "big") for n in (0x801, 7))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(head + bytes(n % 2 for n in range(7)))
    return pixels


def test_outside_datasets_of_torchvision_are_read_by_the_names_of_timm(photos, tmp_path, capsys):
    pixels = write_mnist(tmp_path, "FashionMNIST")
    for split, same in (("train", True), ("val", False)):
        images = open_images(tmp_path, "torch/fashion_mnist", split)
        assert images.labels.tolist() == [0, 1, 0, 1, 0, 1, 0]
        assert images.class_names[:2] == ["T-shirt/top", "Trouser"]
        read = [np.asarray(decode(images.read(n), ""))[..., 0] for n in range(7)]
        assert np.array_equal(read, pixels) == same
        assert images.describe_split() is None
        assert capsys.readouterr().err == ""
    parts = [
        open_images(tmp_path, "torch/fashion_mnist", split, SplitOptions(val_fraction=0.5))
        for split in ("train", "val")
    ]
    divided = {part.open(n).read() for part in parts for n in range(len(part))}
    assert len(divided) == 7
    assert {np.asarray(decode(each, ""))[..., 0].tobytes() for each in divided} == {
        each.tobytes() for each in pixels
    }
    folder = open_images(photos, "torch/image_folder", "train")
    assert folder.class_names == ["cat", "dog"]


def test_outside_names_of_timm_that_cannot_be_read_are_refused(tmp_path):
    for name, reason in {
        "torch/fashion_mnist": r"\(RuntimeError: Dataset not found",
        "torch/cifar1000": r"\(AssertionError: Unknown torchvision dataset cifar1000\)",
    }.items():
        with pytest.raises(UserError, match=f"{name} cannot be read from .* {reason}.*check the n"):
            open_images(tmp_path, name, "train")
    with pytest.raises(UserError, match="has no split 'trian'; give --split train or training or"):
        open_images(tmp_path, "torch/mnist", "trian")
    with pytest.raises(UserError, match="torch/mnist is read from a disk; give its folder with --"):
        open_images(None, "torch/mnist", "train")
    with pytest.raises(UserError, match=r"torch/mnist is labeled, packed and audited, .* give"):
        Images(tmp_path, "torch/mnist")
    with pytest.raises(UserError, match="tfds/cifar10 is a stream, and maps belong to numbered im"):
        open_images(tmp_path, "tfds/cifar10", "train")


def test_outside_a_factory_that_makes_no_dataset_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "made_here.py").write_text(
        "def make():\n    pass\n\ndef fail():\n    raise KeyError('pixels')\n"
    )
    for name, reason in {
        "nowhere_here:make": "ModuleNotFoundError: No module named 'nowhere_here'",
        "made_here:nothing": "AttributeError: ",
        "made_here:fail": "KeyError: 'pixels'",
    }.items():
        with pytest.raises(UserError, match=re.escape(f"{name} failed ({reason}")):
            open_images(None, name, "train")
    with pytest.raises(UserError, match="made_here:make is a NoneType, and not a map-style"):
        open_images(None, "made_here:make", "train")
    with pytest.raises(UserError, match=r"--data .*photos has no effect beside it; remove --da"):
        open_images(tmp_path / "photos", "made_here:make", "train")
    with pytest.raises(UserError, match="--data is missing; give the folder of the images, or --d"):
        open_images(None, "", "train")
    with pytest.raises(UserError, match=r"made_here:make is labeled, packed and audited, .* give"):
        Images(tmp_path, "made_here:make")

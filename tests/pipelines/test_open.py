"""Options of the data: which loader reads it, and which data set a name and a list mean."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch

import densefeed
import densefeed.train as training
from densefeed.pipelines.open import DataOptions, choose_loader, open_dataset
from densefeed.storage.datasets import choose_validation_split
from densefeed.system.errors import UserError
from densefeed.system.object_url import ObjectURL
from densefeed.system.options import with_options
from densefeed.tools.pack_dataset import Packing
from densefeed.tools.pack_dataset import main as pack
from densefeed.tools.relabel_imagenet import Labeling
from densefeed.tools.relabel_imagenet import main as label
from densefeed.tools.validate import Validation
from densefeed.tools.validate import main as validate


@pytest.fixture
def flat(folder, tmp_path):
    """Images in one folder, and the lists train.txt and val.txt of lines "path label"."""
    root = tmp_path / "flat"
    root.mkdir()
    for split in ("train", "val"):
        lines = []
        for path in sorted((folder / split).glob("*/*.jpg")):
            name = f"{split}-{path.name}"
            shutil.copy(path, root / name)
            lines.append(f"{name} {int(path.parent.name == 'dog')}")
        (tmp_path / f"{split}.txt").write_text("\n".join(lines))
    return root


def test_outside_the_loader_is_found_from_the_data(folder, packed, tmp_path):
    shutil.copy(packed[0], tmp_path / "noending")
    (tmp_path / "folder.beton").mkdir()
    for path, loader in (
        (folder, "folder"),
        (packed[0], "ffcv"),
        (tmp_path / "noending", "ffcv"),
        (tmp_path / "part-*.beton", "ffcv"),
        (tmp_path / "missing.beton", "ffcv"),
        (tmp_path / "missing", "folder"),
        (tmp_path / "folder.beton", "folder"),
        (ObjectURL("s3://bucket/x.beton"), "ffcv"),
    ):
        assert choose_loader("auto", path) == loader
        assert choose_loader("dali", path) == "dali"
    with pytest.raises(UserError, match="choose one of auto, folder, ffcv, dali"):
        choose_loader("tar", folder)
    with pytest.raises(ValueError, match="there is a loader 'auto' already"):
        densefeed.register_loader("auto", lambda *_: None)


def test_outside_packed_training_data_and_a_folder_to_validate_on_need_no_loader(
    folder, packed, micro, tmp_path, three_runs
):
    config = with_options(micro(tmp_path / "run", epochs=1), loader="auto", val=folder)
    assert training.train(config)["images"] == 5
    rows = [
        validate(Validation(checkpoint=tmp_path / "run", data=data, device="cpu"))
        for data in (folder, packed[1])
    ]
    assert [row["loader"] for row in rows] == ["folder", "ffcv"]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-5)


def test_outside_a_loader_that_is_named_keeps_its_refusal(packed, folder):
    for loader, data, message in (
        ("folder", packed[0], "is a file; --loader folder reads folders"),
        ("ffcv", folder, "is a folder; pack it with densefeed pack"),
    ):
        with pytest.raises(UserError, match=message):
            open_dataset(DataOptions(train=data, loader=loader), "train", batch=2, seed=0)


def test_outside_a_list_is_trained_from_its_images(flat, tmp_path, command):
    words = "--data", flat, "--dataset", f"list/{tmp_path / 'train.txt'}", "--out"
    common = "--epochs", 1, "--batch", 4, "--size", 32, "--device", "cpu", "--threads", 1
    done = command(
        *("train.py", "lvvit_micro_ce", *words, tmp_path / "teacher"),
        *("--val", tmp_path / "val.txt", *common),
    )
    assert done.returncode == 0, done.stderr
    assert "11 training and 5 validation images" in done.stdout
    config = json.loads((tmp_path / "teacher/config.json").read_text())["data"]
    assert config["dataset"] == f"list/{tmp_path / 'train.txt'}"
    # Labeling by the same list gives maps of the same images.
    label(
        Labeling(
            data=flat,
            dataset=config["dataset"],
            teacher=(str(tmp_path / "teacher"),),
            input_size=(32,),
            out=tmp_path / "maps.h5",
        )
    )
    done = command(
        *("train.py", "lvvit_micro_token_label", *words, tmp_path / "student"),
        *("--score-maps", tmp_path / "maps.h5", "--val", tmp_path / "val.txt", *common),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "student/result.json").read_text())
    assert (result["images"], result["skipped"]) == (5, 0)


def test_outside_a_list_is_divided(flat, micro, tmp_path, capsys, three_runs):
    """The run's list is read for the images that it held out."""
    dataset, out = f"list/{tmp_path / 'train.txt'}", tmp_path / "run"
    config = micro(out, objective="ce", mixtoken=False, epochs=1, loader="auto")
    given = dict(data=flat, val=None, dataset=dataset, val_fraction=0.3)
    result = training.train(with_options(config, **given))
    # 6 cats and 5 dogs: round(1.8) and round(1.5).
    assert result["images"] == 4
    row = validate(Validation(checkpoint=out, data=flat, device="cpu"))
    assert row["images"] == 4
    assert row["top1"] == pytest.approx(result["top1_ema"])


def test_outside_open_loader_takes_a_list(flat, folder, tmp_path):
    for train, name, count in ((True, "train", 11), (False, "val", 5)):
        options = dict(batch=4, size=32, train=train, threads=1)
        dataset = f"list/{tmp_path / f'{name}.txt'}"
        with densefeed.open_loader(flat, dataset=dataset, **options) as loader:
            assert loader.plan.num_samples == count
            ours = [batch.image for batch in loader.batches(0)]
        with densefeed.open_loader(folder, **options) as loader:
            theirs = [batch.image for batch in loader.batches(0)]
        if not train:
            # The list is in the order of the folder.
            assert all(map(torch.equal, ours, theirs))


def test_outside_the_validation_set_of_a_name(folder, tmp_path):
    """A share is one of the training images; published sets without `val` have `test`."""
    splits = {"": "val", "cifar100": "test", "flowers102": "val", "domainnet/real": "test"}
    splits |= {"hfds/x": "validation", "tar": "val", "share/10": "val"}
    assert {name: choose_validation_split(name) for name in splits} == splits
    data = DataOptions(train=folder, val=folder, dataset="share/20", size=32)
    for mode, count in (("train", 2), ("evaluate", 5)):
        with closing(open_dataset(data, mode, batch=2, seed=0)) as loader:
            assert loader.plan.num_samples == count
    listed = DataOptions(train=folder, val=folder, dataset="list/some.txt")
    assert listed.locate("evaluate") == (folder, "")
    listed = with_options(listed, val=Path("val.txt"))
    assert listed.locate("evaluate") == (folder, "list/val.txt")


def test_outside_names_for_packed_data_and_own_loaders_are_refused(packed, monkeypatch, flat):
    data = DataOptions(train=packed[0], dataset="list/x.txt")
    with pytest.raises(UserError, match=r"is packed, and --dataset list/x\.txt names what a fol"):
        open_dataset(data, "train", batch=2, seed=0)
    monkeypatch.setitem(densefeed.pipelines.open.LOADERS, "own", (None, None))
    for fields, words in (
        (dict(), "no --dataset, .*; leave it out, or let the function that own is registered with"),
        (
            dict(dataset="", val_fraction=0.2),
            "no --val-fraction, .*, and give another set to --val,",
        ),
    ):
        with pytest.raises(UserError, match=f"^--loader own takes {words}"):
            open_dataset(with_options(data, loader="own", **fields), "train", batch=2, seed=0)


def test_outside_a_run_folder_initializes_a_run(micro, tmp_path, capsys):
    first = dict(objective="ce", mixtoken=False, epochs=1)
    training.train(micro(tmp_path / "first", **first))
    capsys.readouterr()
    training.train(micro(tmp_path / "next", init=tmp_path / "first", **first))
    assert f"initialized from {tmp_path / 'first/last.pt'} (EMA" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        UserError, match=r"empty has no last\.pt and no model\.safetensors; give a run"
    ):
        training.train(micro(tmp_path / "x", init=tmp_path / "empty", **first))


def test_outside_a_teachers_folder_without_a_checkpoint_is_named(folder, tmp_path):
    labeling = Labeling(data=folder, teacher=(str(tmp_path),), out=tmp_path / "maps.h5")
    with pytest.raises(UserError, match=r"has no last\.pt and no model\.safetensors; give a run"):
        label(labeling)


def test_outside_a_packed_list_is_what_is_trained(flat, tmp_path):
    """Both are found by the same name, so one fingerprint serves both."""
    dataset = f"list/{tmp_path / 'train.txt'}"
    pack(Packing(data=flat, dataset=dataset, out=tmp_path / "x.beton"))
    prints = []
    for fields in (dict(train=flat, dataset=dataset), dict(train=tmp_path / "x.beton")):
        with closing(open_dataset(DataOptions(**fields, size=32), "train", batch=2, seed=0)) as one:
            prints.append(one.fingerprint)
    assert prints[0] == prints[1]

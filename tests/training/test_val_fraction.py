"""A folder without validation images: labeled, packed, trained and shown by one division."""

import json
import shutil
from collections import Counter
from contextlib import closing, suppress

import numpy as np
import pytest

import densefeed
import densefeed.train as training
from densefeed.objectives import check_unused
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.folder import FolderSource
from densefeed.pipelines.open import DataOptions, open_dataset
from densefeed.storage.images import Images, SplitOptions
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError
from densefeed.system.options import with_options
from densefeed.tools import audit, explain, pack_dataset, relabel_imagenet, validate

from ..fixtures import photograph

HELD = dict(val_fraction=0.25, val_seed=3)
CE = dict(objective="ce", mixtoken=False)
CLASSES = {"ant": 8, "bee": 13, "cat": 4}
# round(n / 4) of 8, 13 and 4.
VALIDATION = {"ant": 2, "bee": 3, "cat": 1}
pytestmark = pytest.mark.usefixtures("three_runs")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("mine") / "photos", np.random.default_rng(1)
    for name, count in CLASSES.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            photograph(rng, 40, 48).save(root / name / f"{number}.jpg")
    return root


def count_classes(paths):
    return Counter(path.split("/")[0] for path in paths)


def trained(micro, photos, out, **fields):
    config = with_options(micro(out, **fields), data=photos, val=None, loader="folder", **HELD)
    return training.train(config)


@pytest.fixture(scope="module")
def flow(photos, micro, tmp_path_factory):
    """Teacher, label, pack, train: what a newcomer does with photographs in class folders."""
    root = tmp_path_factory.mktemp("flow")
    trained(micro, photos, root / "teacher", epochs=1, **CE)
    relabel_imagenet.main(
        relabel_imagenet.Labeling(
            data=photos,
            teacher=(str(root / "teacher"),),
            input_size=(32,),
            out=root / "maps.h5",
            **HELD,
        )
    )
    for split, maps in (("train", root / "maps.h5"), ("val", None)):
        out = root / f"{split}.beton"
        pack_dataset.main(
            pack_dataset.Packing(data=photos, split=split, maps=maps, out=out, **HELD)
        )
    packed = dict(data=root / "train.beton", val=root / "val.beton")
    training.train(with_options(micro(root / "student"), **packed))
    trained(micro, photos, root / "folder", score_maps=root / "maps.h5")
    return root


@pytest.mark.slow
def test_outside_label_pack_and_train_agree_on_the_division(photos, flow):
    division = SplitOptions(**HELD)
    train, val = (Images(photos, split=split, division=division) for split in ("train", "val"))
    assert count_classes(val.paths) == VALIDATION
    assert sorted([*train.paths, *val.paths]) == sorted(Images(photos).paths)
    # No validation image has a map.
    assert ScoreMapStore(flow / "maps.h5").paths() == train.paths
    for split, part in (("train", train), ("val", val)):
        source = FfcvSource(flow / f"{split}.beton")
        with closing(source):
            assert source.fingerprint == part.fingerprint()
            assert len(source.labels) == len(part)
    config = json.loads((flow / "folder/config.json").read_text())["data"]
    assert (config["val_fraction"], config["val_seed"], config["val"]) == (0.25, 3, None)
    # The run from the folder and the run from the packed parts are one.
    lines = [
        (flow / run / "metrics.jsonl").read_text().splitlines() for run in ("student", "folder")
    ]
    losses = [[json.loads(line)["loss"] for line in run] for run in lines]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert json.loads((flow / "folder/result.json").read_text())["images"] == len(val)


def test_outside_maps_of_all_images_serve_the_training_part(photos, flow, random_maps, tmp_path):
    from ..stores import write_store

    whole = Images(photos)
    scores = random_maps(len(whole), 4, 2, 3)
    store = write_store(tmp_path / "whole.h5", whole, scores, 3)
    division = SplitOptions(**HELD)
    part = Images(photos, division=division)
    with closing(FolderSource(photos, "train", store, division=division)) as source:
        ids = np.arange(len(part))[::-1].copy()
        places = [whole.paths.index(part.paths[n]) for n in ids]
        np.testing.assert_array_equal(source.maps(ids).logit, scores.logit[places])
    out = tmp_path / "train.beton"
    pack_dataset.main(pack_dataset.Packing(data=photos, maps=store, out=out, **HELD))
    with closing(FfcvSource(out)) as source:
        np.testing.assert_array_equal(source.maps(ids).logit, scores.logit[places])
    # Those of one part do not serve the whole set, or the other.
    with pytest.raises(UserError, match=r"19 maps for 25 images, .* the --val-fraction of the"):
        FolderSource(photos, "train", flow / "maps.h5")
    with pytest.raises(UserError, match="holds the maps of another dataset"):
        FolderSource(photos, "val", flow / "maps.h5", division=division)


def test_outside_start_line_and_dry_run_have_the_size_of_each_part(photos, micro, tmp_path, capsys):
    trained(micro, photos, tmp_path / "run", dry_run=True, **CE)
    assert "19 training and 6 validation images" in capsys.readouterr().out
    trained(micro, photos, tmp_path / "run", epochs=1, **CE)
    assert "19 training and 6 validation images" in capsys.readouterr().out


@pytest.mark.parametrize("dry_run", [False, True])
def test_outside_training_lists_a_divided_folder_once(photos, micro, tmp_path, capsys, dry_run):
    """The lines about files that are left out were printed for each part."""
    mine = shutil.copytree(photos, tmp_path / "mine")
    (mine / "ant" / "notes.txt").touch()
    capsys.readouterr()
    trained(micro, mine, tmp_path / "run", epochs=1, dry_run=dry_run, **CE)
    assert capsys.readouterr().out.count("with another ending was left out: .txt 1") == 1


@pytest.mark.slow
def test_outside_validate_and_explain_take_the_runs_validation_images(
    photos, flow, tmp_path, capsys
):
    moved = shutil.copytree(photos, tmp_path / "moved")
    for data in (photos, moved):
        row = validate.main(
            validate.Validation(
                checkpoint=flow / "folder", data=data, loader="folder", device="cpu"
            )
        )
        assert row["images"] == sum(VALIDATION.values())
        assert (
            "evaluating the 6 images that it held out, 0.25 of each class"
            in capsys.readouterr().out
        )
    # Other images are taken as they are.
    shutil.rmtree(moved / "ant")
    options = validate.Validation(checkpoint=flow / "folder", data=moved, loader="folder")
    assert validate.main(options)["images"] == 17
    page = tmp_path / "page.html"
    explain.main(
        explain.Explanations(
            source=str(flow / "folder"),
            images=(photos,),
            split="train",
            maps=flow / "maps.h5",
            count=2,
            out=page,
            device="cpu",
        )
    )
    assert "puts 19 of 25 images into the split train" in capsys.readouterr().out
    assert page.exists()


def test_outside_validate_takes_the_validation_images_of_packed_parts(
    photos, flow, tmp_path, capsys
):
    """The run knows its .beton, whose notes say how it was divided."""
    moved = shutil.copytree(photos, tmp_path / "moved")
    for data in (photos, moved):
        options = validate.Validation(checkpoint=flow / "student", data=data, device="cpu")
        assert validate.main(options)["images"] == sum(VALIDATION.values())
        assert "evaluating the 6 images that it held out, 0.25 of each class" in (
            capsys.readouterr().out
        )


def test_outside_validate_warns_of_training_images(photos, flow, tmp_path, capsys):
    def said(data):
        options = validate.Validation(checkpoint=flow / "student", data=data, device="cpu")
        validate.main(options)
        return capsys.readouterr().err

    assert "training images" not in said(flow / "val.beton")
    assert f"warning: the images of {flow / 'train.beton'} are training images" in said(
        flow / "train.beton"
    )
    # All but one of the images that the run divided: 19 of 24 are training images.
    moved = shutil.copytree(photos, tmp_path / "moved")
    division = SplitOptions(**HELD)
    (moved / Images(photos, split="val", division=division).paths[0]).unlink()
    assert f"warning: about 79 % of the images of {moved} are training images" in said(moved)


def test_outside_the_audit_compares_the_maps_with_their_part(photos, flow, tmp_path):
    def checked(**fields):
        out = tmp_path / "page.html"
        options = audit.AuditOptions(maps=flow / "maps.h5", data=photos, out=out, **fields)
        with suppress(UserError):
            audit.main(options)
        checks = json.loads(out.with_suffix(".json").read_text())["checks"]
        return {check["name"]: check["verdict"] for check in checks}["images"]

    assert checked(**HELD) == "sound"
    assert checked() == "fault"


def test_outside_open_loader_opens_both_parts(photos):
    sizes = []
    for train in (True, False):
        with densefeed.open_loader(photos, batch=4, size=32, train=train, **HELD) as loader:
            sizes.append(loader.plan.num_samples)
    assert sizes == [19, 6]


@pytest.mark.slow
def test_outside_a_run_is_resumed_from_its_packed_parts(flow, photos, micro):
    """The division is compared by the images that it gives."""
    packed = dict(data=flow / "train.beton", val=flow / "val.beton")
    training.train(with_options(micro(flow / "folder", resume="auto"), **packed))
    other = micro(flow / "folder", resume="auto", score_maps=flow / "maps.h5")
    other = with_options(other, loader="folder", data=photos, val=None, val_fraction=0.5)
    with pytest.raises(UserError, match="fingerprints differ"):
        training.train(other)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(val="elsewhere"), "--val .* and --val-fraction both name validation images"),
        (dict(data="packed"), "pack the two parts by densefeed pack --val-fraction"),
        (dict(val_fraction=0.0), "--val is missing; .*--val-fraction 0.15"),
    ],
)
def test_outside_divisions_that_do_not_fit_are_refused(
    photos, packed, micro, tmp_path, fields, message
):
    places = {"elsewhere": photos, "packed": packed[0]}
    fields = {name: places.get(value, value) for name, value in fields.items()}
    loader = "ffcv" if "data" in fields else "folder"
    options = dict(data=photos, val=None, loader=loader) | HELD | fields

    def train():
        training.train(with_options(micro(tmp_path / "run", **CE), **options))

    with pytest.raises(UserError, match=message):
        train()
    assert not (tmp_path / "run").exists()


def test_outside_only_train_and_val_can_be_divided(photos, tmp_path):
    with pytest.raises(UserError, match="in place of --split test, or leave out --val-fraction"):
        Images(photos, split="test", division=SplitOptions(**HELD))
    (tmp_path / "one/cat").mkdir(parents=True)
    shutil.copy(photos / "cat/0.jpg", tmp_path / "one/cat")
    with pytest.raises(UserError, match="has one image of each class"):
        Images(tmp_path / "one", split="val", division=SplitOptions(**HELD))


def test_outside_a_missing_val_names_the_fraction(photos, tmp_path):
    (tmp_path / "train").symlink_to(photos)
    data = DataOptions(train=tmp_path, val=tmp_path, size=32)
    with pytest.raises(UserError, match=r"or hold out images by --val-fraction 0\.15"):
        open_dataset(data, "evaluate", batch=2, seed=0)
    data = DataOptions(train=tmp_path, size=32, **HELD)
    with closing(open_dataset(data, "evaluate", batch=2, seed=0)) as loader:
        assert loader.plan.num_samples == 6


def test_outside_a_seed_without_a_fraction_is_refused(photos, micro, tmp_path, command):
    config = micro(tmp_path / "run")
    with pytest.raises(UserError, match="--val-seed has no effect without --val-fraction"):
        check_unused(with_options(config, val_seed=1), config)
    done = command(
        "tools/pack_dataset.py", "--data", photos, "--out", tmp_path / "x.beton", "--val-seed", 1
    )
    assert done.returncode == 2
    assert "--val-seed has no effect without --val-fraction" in done.stderr

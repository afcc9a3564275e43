"""Import and export of score maps: a round trip on digit scenes, the targets that the published
code would read, and training from an imported store.
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.ops import roi_align

import densefeed.train as training
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.folder import FolderSource
from densefeed.pipelines.targets import TargetRules, sparse_targets
from densefeed.recipes import RECIPES
from densefeed.relabel.audit import AuditResult
from densefeed.storage.images import Images
from densefeed.storage.packs import PUBLISHED
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError
from densefeed.system.object_store import connect
from densefeed.system.options import with_options
from densefeed.tools import export_labels, import_labels, make_digit_scenes
from densefeed.tools.export_labels import ExportLabels
from densefeed.tools.import_labels import Import
from densefeed.tools.pack_dataset import Packing, main

from ..runs import train_loader
from ..shard_files import write_tar
from ..stores import write_store

SIDE, TOP_K, CLASSES = 18, 5, 10


@pytest.fixture(scope="module")
def scenes(tmp_path_factory, random_maps):
    """Digit scenes, random score maps of them (zero-logit), and these maps as a tree."""
    root = tmp_path_factory.mktemp("import")
    make_digit_scenes.main(make_digit_scenes.Scenes(out=root / "scenes", train=20, val=10, size=64))
    write_maps(root / "maps.h5", Images(root / "scenes"), random_maps)
    export_labels.main(ExportLabels(maps=root / "maps.h5", out=root / "tree"))
    return root


def write_maps(path, images, random_maps, **fields):
    cut = 0.125 if fields.get("geometry") == "center-crop" else 0.0
    maps = random_maps(len(images), SIDE, TOP_K, CLASSES, window=(0.0, cut, 1.0, 1.0 - cut))
    header = dict(absent="zero-logit", input_size=576) | fields
    return ScoreMapStore(write_store(path, images, maps, CLASSES, **header))


def import_tree(scenes, out, **fields):
    import_labels.main(
        Import(
            labels=scenes / "tree", data=scenes / "scenes", out=out, footprint="squash", **fields
        )
    )
    return ScoreMapStore(out)


@pytest.mark.parametrize(("option", "least"), [("reference_size", 0), ("audit_images", 2)])
def test_numbers_of_the_reference_are_bounded(scenes, tmp_path, option, least):
    """A negative size was a traceback, and a negative number of images blamed the maps."""
    with pytest.raises(UserError, match=f"is -5, and must be at least {least}"):
        import_tree(scenes, tmp_path / "maps.h5", reference="x", **{option: -5})


@pytest.mark.parametrize(
    ("folder", "variables"),
    [
        (b"\xff", {}),
        # Needs a new interpreter, which takes 6 s.
        pytest.param(
            "é".encode(),
            {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["not UTF-8", "locale without UTF-8"],
)
def test_problems_are_listed_by_names_of_any_bytes(scenes, tmp_path, command, folder, variables):
    tree = tmp_path / os.fsdecode(folder) / "tree"
    shutil.copytree(scenes / "tree", tree)
    victim = sorted(tree.glob("*/*.pt"))[0]
    victim.write_bytes(b"")
    words = "--labels", tree, "--data", scenes / "scenes", "--out", tmp_path / "maps.h5"
    words += "--problems", tree / "problems.txt", "--teacher", "t", "--input-size", 64
    words += "--footprint", "squash", "--missing", "label", "--no-audit", "--threads", 1
    done = command("tools/import_labels.py", *words, environment=variables)
    assert done.returncode == 0, done.stderr
    assert os.fsencode(victim) in (tree / "problems.txt").read_bytes()


def test_export_and_import_restore_the_score_maps(scenes, tmp_path, capsys):
    before, after = ScoreMapStore(scenes / "maps.h5"), import_tree(scenes, tmp_path / "again.h5")
    ids = np.arange(20)
    for name in ("logit", "cls", "window"):
        assert np.array_equal(getattr(before.rows(ids), name), getattr(after.rows(ids), name)), name
    for name in ("fingerprint", "num_classes"):
        assert getattr(before.header, name) == getattr(after.header, name), name
    assert after.header.teacher == "dm_nfnet_f6 (pack tree, axes row-column)"
    assert "taken to cover the whole image, axes row-column" in capsys.readouterr().out
    export_labels.main(ExportLabels(maps=tmp_path / "again.h5", out=tmp_path / "tree"))
    for path in (scenes / "tree").rglob("*.pt"):
        assert (
            path.read_bytes()
            == (tmp_path / "tree" / path.relative_to(scenes / "tree")).read_bytes()
        )


def test_export_writes_through_no_link_that_another_process_makes(scenes, tmp_path, monkeypatch):
    names = [path.relative_to(scenes / "tree") for path in (scenes / "tree").rglob("*.pt")]
    victim, save = tmp_path / "victim", torch.save
    victim.write_text("mine")

    def plant(tensor, file):
        (folder,) = tmp_path.glob("tree.*.part")
        for name in names:
            if not (folder / name).exists():
                (folder / name).symlink_to(victim)
        save(tensor, file)

    monkeypatch.setattr(torch, "save", plant)
    with pytest.raises(FileExistsError):
        export_labels.main(ExportLabels(maps=scenes / "maps.h5", out=tmp_path / "tree"))
    assert victim.read_text() == "mine"
    assert not (tmp_path / "tree").exists()


def published_targets(folder, path, box, grid):
    """Return the dense targets of a crop as the published code computes them, in float64.

    `box` is (top, left, height, width), as shares of the image.
    """
    packed = torch.load(folder / f"{path.partition('.')[0]}.pt", weights_only=True)
    assert (packed.dtype, packed.shape) == (torch.float16, (2, TOP_K, SIDE, SIDE))
    dense = torch.zeros(CLASSES, SIDE, SIDE, dtype=torch.float64).scatter_(
        0, packed[1].long(), packed[0].double()
    )
    top, left, height, width = box
    corners = torch.tensor([[0, top, left, top + height, left + width]], dtype=torch.float64)
    corners[:, 1:] = corners[:, 1:] * SIDE - 0.5
    return roi_align(dense[None], corners, grid, 1.0, -1, False)[0].softmax(0).flatten(1).T


def test_the_published_code_reads_the_targets_of_our_training_from_the_tree(scenes, tmp_path):
    """Targets of a batch from an imported store against the published computation from the files.

    Flipped crops are skipped.
    """
    store = import_tree(scenes, tmp_path / "again.h5")
    for geometry in ("published", "aligned"):
        run = config(scenes, tmp_path / "again.h5", tmp_path, geometry=geometry)
        loader = train_loader(run)
        batch = next(iter(loader.batches(0)))
        targets = sparse_targets(batch, loader.score_maps, 4, TargetRules(geometry=geometry))
        palette = targets.palette[:, None].expand(-1, 16, -1)
        dense = targets.base[..., None].repeat(1, 1, CLASSES)
        dense.scatter_add_(2, palette, targets.extra)
        loader.close()
        checked = 0
        for row, index in enumerate(batch.index.tolist()):
            (width, _, left), (_, height, top) = batch.view[row].tolist()
            if width < 0:
                continue
            box = (top, left, height, width)
            # The published code swaps the axes of the crop. Swapping them here too gives aligned
            # labels from the same operator.
            box = box if geometry == "published" else (left, top, width, height)
            want = published_targets(scenes / "tree", store.paths()[index], box, 4)
            assert torch.allclose(dense[row].double(), want, atol=2e-5), geometry
            checked += 1
        assert checked >= 3


def config(scenes, labels, out, **fields):
    return with_options(
        RECIPES["lvvit_micro_token_label"](),
        data=scenes / "scenes",
        val=scenes / "scenes",
        score_maps=labels,
        loader="folder",
        out=out,
        batch=10,
        epochs=1,
        size=32,
        threads=2,
        log_every=1,
        device="cpu",
        **fields,
    )


@pytest.mark.parametrize("geometry", ["published", "aligned"])
def test_training_from_imported_maps_equals_training_from_the_original_maps(
    scenes, tmp_path, geometry, one_thread
):
    import_tree(scenes, tmp_path / "again.h5")
    losses = {}
    for name, labels in (("first", scenes / "maps.h5"), ("again", tmp_path / "again.h5")):
        training.train(
            config(scenes, labels, tmp_path / name, geometry=geometry, outside="uniform")
        )
        records = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        losses[name] = [record["loss"] for record in records if record["kind"] == "train"]
    assert losses["first"] == losses["again"]
    assert len(losses["first"]) == 2


def test_a_column_row_tree_is_transposed(scenes, tmp_path):
    for path in (scenes / "tree").rglob("*.pt"):
        turned = tmp_path / "turned" / path.relative_to(scenes / "tree")
        turned.parent.mkdir(parents=True, exist_ok=True)
        torch.save(torch.load(path, weights_only=True).transpose(2, 3), turned)
    turned = Import(
        labels=tmp_path / "turned",
        data=scenes / "scenes",
        out=tmp_path / "t.h5",
        footprint="squash",
        axes="column-row",
    )
    import_labels.main(turned)
    ids = np.arange(20)
    assert np.array_equal(
        ScoreMapStore(tmp_path / "t.h5").rows(ids).cls,
        ScoreMapStore(scenes / "maps.h5").rows(ids).cls,
    )


def test_outside_maps_of_images_in_object_storage(scenes, tmp_path, bucket, capsys):
    """WebDataset in S3: the keys are the names of the files of the pack."""
    obstore = pytest.importorskip("obstore")
    images, files = Images(scenes / "scenes"), []
    for n, path in enumerate(images.paths):
        files += [(f"{Path(path).stem}.jpg", images.read(n))]
        files += [(f"{Path(path).stem}.cls", b"%d" % images.labels[n])]
    tar = write_tar(tmp_path / "train-0.tar", files)
    obstore.put(connect(bucket), "wds/train-0.tar", tar.read_bytes())
    import_labels.main(
        Import(
            labels=scenes / "tree",
            data=bucket / "wds",
            out=tmp_path / "maps.h5",
            footprint="squash",
            audit=False,
        )
    )
    assert "maps are matched by their names without folders" in capsys.readouterr().out
    ids = np.arange(20)
    before = ScoreMapStore(scenes / "maps.h5").rows(ids)
    assert np.array_equal(ScoreMapStore(tmp_path / "maps.h5").rows(ids).cls, before.cls)
    options = Import(labels=Path("s3://bucket/pack"), data=scenes / "scenes", out=tmp_path / "b.h5")
    with pytest.raises(UserError, match=r"s3://bucket/pack is in object storage.*copy it"):
        import_labels.main(options)


def test_undeclared_properties_are_as_published(scenes, tmp_path):
    import_labels.main(
        Import(labels=scenes / "tree", data=scenes / "scenes", out=tmp_path / "a.h5")
    )
    header, known = ScoreMapStore(tmp_path / "a.h5").header, PUBLISHED[SIDE, TOP_K]
    assert header.teacher.startswith(known.teacher)
    assert (header.input_size, header.geometry) == (576, "center-crop")


def test_maps_of_unknown_shape_must_be_declared(folder, tmp_path):
    for path in Images(folder).paths:
        array = np.stack(
            [np.full((2, 3, 3), 2.0), np.arange(2)[:, None, None].repeat(3, 1).repeat(3, 2)]
        )
        (tmp_path / "labels" / path).parent.mkdir(parents=True, exist_ok=True)
        np.save((tmp_path / "labels" / path).with_suffix(".npy"), array)
    options = Import(labels=tmp_path / "labels", data=folder, out=tmp_path / "a.h5", teacher="mine")
    with pytest.raises(
        UserError, match=r"3 x 3 cells, top 2, .* give --input-size and --footprint"
    ):
        import_labels.main(options)
    with pytest.raises(UserError, match=r"the maps against; give --input-size and --reference$"):
        import_labels.main(replace(options, footprint="find"))
    # The audit would report that all images have the same map.
    import_labels.main(replace(options, input_size=96, footprint="squash", audit=False))
    assert ScoreMapStore(tmp_path / "a.h5").header.input_size == 96


def test_the_command_names_missing_and_extra_maps(scenes, tmp_path, command):
    labels = tmp_path / "labels"
    for path in (scenes / "tree").rglob("*.pt"):
        copy = labels / path.relative_to(scenes / "tree")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (labels / "3" / "000003.pt").rename(labels / "3" / "no-image.pt")
    paths = ("--labels", labels, "--data", scenes / "scenes", "--out", tmp_path / "a.h5")
    words = ("tools/import_labels.py", *paths)
    done = command(*words)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: 1 image has no usable map - no file: 1 (3/000003.jpg); fix"
    )
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "a.h5").exists()
    done = command(*words, "--missing", "label", "--problems", tmp_path / "problems.txt")
    assert done.returncode == 0, done.stderr
    assert "(0 read now, 19 earlier)" in done.stdout
    assert (tmp_path / "problems.txt").read_text() == "no file\t3/000003.jpg\n"
    assert "left out: 1 maps without an image (3/no-image)" in done.stdout
    done = command(*words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "exists already" in done.stderr


def test_the_export_prints_what_a_tree_cannot_hold(scenes, tmp_path, random_maps, capsys):
    images = Images(scenes / "scenes")
    write_maps(tmp_path / "crop.h5", images, random_maps, geometry="center-crop", absent="tail")
    export_labels.main(ExportLabels(maps=tmp_path / "crop.h5", out=tmp_path / "tree"))
    printed = capsys.readouterr().out
    assert "the logsumexp of each cell; the published code gives classes outside the top" in printed
    assert "where this store has their true remainder of the probability" in printed
    assert "20 maps cover only a part of their image" in printed
    assert "--footprint center-crop" in printed
    export_labels.main(ExportLabels(maps=scenes / "maps.h5", out=tmp_path / "whole"))
    assert "cover only" not in capsys.readouterr().out


def test_exports_that_would_lose_data_are_refused(scenes, tmp_path, random_maps, monkeypatch):
    maps = scenes / "maps.h5"
    with pytest.raises(UserError, match="exists already; remove it"):
        export_labels.main(ExportLabels(maps=maps, out=scenes / "tree"))
    monkeypatch.setattr(export_labels, "MOST_CLASSES", CLASSES - 1)
    with pytest.raises(
        UserError, match="10 classes, and float16 represents only 9 class numbers exactly"
    ):
        export_labels.main(ExportLabels(maps=maps, out=tmp_path / "a"))
    monkeypatch.undo()
    monkeypatch.setattr(
        ScoreMapStore, "paths", lambda store: ["0/a.1.jpg", "0/a.2.jpg", *map(str, range(18))]
    )
    with pytest.raises(UserError, match=r"0/a.1.jpg and 0/a.2.jpg would both be 0/a.pt"):
        export_labels.main(ExportLabels(maps=maps, out=tmp_path / "a"))
    monkeypatch.undo()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space"):
        export_labels.main(ExportLabels(maps=maps, out=tmp_path / "a"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("a//x.jpg", "has an empty name in it"),
        ("//x.jpg", "is absolute"),
        ("/x.jpg", "is absolute"),
        ("a/../x.jpg", "leaves its folder by `..`"),
        ("../x.jpg", "leaves its folder by `..`"),
        ("a/" + "x" * 254, "is too long"),
    ],
)
def test_an_export_writes_nothing_outside_of_out(scenes, tmp_path, random_maps, path, fault):
    """The last two parts of `a//x.jpg` are `/x`, which was written to the root of the disk."""
    images = Images(scenes / "scenes")
    images.paths = [path.replace("x", f"x{n}", 1) for n in range(len(images))]
    write_maps(tmp_path / "maps.h5", images, random_maps)
    with pytest.raises(UserError, match=rf"maps.h5 names the image '{path[:2]}.*, which {fault}"):
        export_labels.main(ExportLabels(maps=tmp_path / "maps.h5", out=tmp_path / "out" / "tree"))
    assert [path.name for path in tmp_path.iterdir()] == ["maps.h5"]
    assert not Path("/x0.pt").exists()


def test_outside_maps_imported_without_a_reference_warn_at_import_and_training(
    scenes, tmp_path, capsys
):
    import_tree(scenes, tmp_path / "maps.h5")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: it was not checked how the maps of {tmp_path}/maps.h5 are")
    assert "remove the imported file and import again with densefeed import --reference MODEL" in (
        line
    )
    main(Packing(data=scenes / "scenes", maps=tmp_path / "maps.h5", out=tmp_path / "x.beton"))
    for source in (
        FolderSource(scenes / "scenes", "train", tmp_path / "maps.h5"),
        FfcvSource(tmp_path / "x.beton"),
    ):
        assert source.teacher == "dm_nfnet_f6 (pack tree, axes row-column)"
        source.close()
    for maps, warned in ((tmp_path / "maps.h5", True), (scenes / "maps.h5", False)):
        capsys.readouterr()
        training.train(config(scenes, maps, tmp_path / f"run-{warned}"))
        said = f"warning: it was not checked how the maps of {maps} are oriented"
        err = capsys.readouterr().err
        assert (said in err) is warned
        assert ("densefeed import --reference MODEL" in err) is warned


@pytest.mark.parametrize(
    ("verdict", "words", "warned"),
    [
        ("sound", "by", ""),
        ("unchecked", "unconfirmed by", "the reference of their import did not show how the maps"),
        ("fault", "contradicted by", "the reference of their import shows that the maps"),
    ],
)
def test_outside_imported_maps_state_what_the_reference_has_shown(
    scenes, tmp_path, monkeypatch, capsys, verdict, words, warned
):
    """The mark said only that a reference was given, so training was silent whatever it showed."""
    monkeypatch.setattr(import_labels, "load_references", lambda *_: "a model")
    monkeypatch.setattr(import_labels, "look", lambda *_: None)
    monkeypatch.setattr(import_labels, "check_orientation", lambda *_: (verdict, "evidence"))
    monkeypatch.setattr(import_labels, "audit", lambda *_, **__: AuditResult(None, [], {}))
    maps = tmp_path / "maps.h5"
    store = import_tree(scenes, maps, reference="runs/teacher.pt")
    assert store.header.teacher == (
        f"dm_nfnet_f6 (pack tree, axes row-column {words} reference teacher.pt)"
    )
    err = capsys.readouterr().err
    assert err.startswith(f"warning: {warned}") if warned else not err
    training.train(config(scenes, maps, tmp_path / "run"))
    err = capsys.readouterr().err
    assert f"warning: {warned} of {maps}" in err if warned else "reference" not in err

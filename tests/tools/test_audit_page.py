"""The audit as commands: the page of tools/report.py, and imports that find how a pack lies."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

from densefeed.models import nfnet  # noqa: F401  (registers)
from densefeed.relabel.labeling import label_images
from densefeed.relabel.reference_match import turned
from densefeed.storage.images import Images
from densefeed.storage.score_maps import ScoreMapStore, ScoreMapWriter, StoreHeader
from densefeed.system.errors import UserError
from densefeed.tools import audit_page, export_labels, import_labels, report
from densefeed.tools.audit_page import references
from densefeed.tools.export_labels import Export
from densefeed.tools.import_labels import Import
from densefeed.tools.load_teacher import Loaded
from densefeed.tools.report import Report


@pytest.fixture(scope="module")
def scenes(located, tmp_path_factory):
    """A teacher's center-crop maps of the scenes, as a store and as a tree."""
    root = tmp_path_factory.mktemp("scenes")
    label_images(
        Images(located.scenes),
        located.teachers(0)["center-crop"],
        "t",
        root / "maps.h5",
        top_k=5,
        batch=64,
        threads=2,
        absent="zero-logit",
    )
    export_labels.main(Export(maps=root / "maps.h5", out=root / "tree"))
    return root


@pytest.fixture
def student(located, monkeypatch):
    """`--teacher` and `--reference` give the second network, which is no timm model."""
    network = located.teachers(1)["squash"].model
    config = {"mean": (0.4,) * 3, "std": (0.25,) * 3, "interpolation": "bilinear"}
    monkeypatch.setattr(
        audit_page, "load_network", lambda *_: Loaded(network, config, [str(n) for n in range(10)])
    )


def report_of(path: Path, located, **fields):
    return Report(runs=(path,), data=located.scenes, images=200, threads=2, device="cpu", **fields)


def test_the_page_of_a_clean_store(scenes, located, student, tmp_path, capsys):
    report.main(
        report_of(
            scenes / "maps.h5", located, teacher="student", input_size=48, out=tmp_path / "a.html"
        )
    )
    text, numbers = (tmp_path / "a.html").read_text(), json.loads((tmp_path / "a.json").read_text())
    assert len(text) < 3e6
    assert "http" not in text  # self-contained
    wrong = min(24, round((1 - numbers["agreement"]) * 320))
    assert text.count("<img") == 12 + wrong
    assert "No fault was found." in text
    assert "That is about the teacher's own accuracy" in text
    assert numbers["looks"]["correlation"]["center-crop"]["upright"] > 0.3
    assert sum(numbers["entropy"]["histogram"]) == sum(numbers["palette"]["counts"]) == 320
    assert [c["images"] for c in numbers["classes"]] == [32] * 10
    assert all(item["label"] != item["says"] for item in numbers["disagreements"])
    told = capsys.readouterr().out
    assert all(f"sound  {name}" in told for name in ("orientation", "coverage", "rows"))


def test_faults_stand_on_top_and_end_in_exit_code_2(scenes, located, student, tmp_path):
    store = ScoreMapStore(scenes / "maps.h5")
    maps = store.rows(np.arange(len(store)))
    writer = ScoreMapWriter(tmp_path / "maps.h5", store.header, store.paths(), store.labels)
    parts = {
        name: np.stack([turned(row, 3) for row in getattr(maps, name)])
        for name in ("logit", "cls", "lse")
    }
    writer.write(np.arange(len(store)), maps._replace(**parts))
    writer.finish()
    with pytest.raises(
        UserError,
        match=r"maps.h5: the audit found 1 fault \(orientation\); .*maps.audit.html says what to do",
    ):
        report.main(report_of(tmp_path / "maps.h5", located, teacher="student", input_size=48))
    text = (tmp_path / "maps.audit.html").read_text()
    assert text.index("Fault: orientation") < text.index("Sound: ")
    assert "Do not train on this file" in text
    assert (
        json.loads((tmp_path / "maps.audit.json").read_text())["checks"][0]["name"] == "orientation"
    )
    assert "That is about the teacher's own accuracy" in text  # whichever way they lie


@pytest.mark.parametrize("held", [True, False])
def test_the_page_of_shuffled_maps_says_nothing_of_the_teacher(
    scenes, located, student, tmp_path, held
):
    """With a reference and without."""
    store = ScoreMapStore(scenes / "maps.h5")
    writer = ScoreMapWriter(tmp_path / "maps.h5", store.header, store.paths(), store.labels)
    writer.write(
        np.arange(len(store)), store.rows(np.random.default_rng(0).permutation(len(store)))
    )
    writer.finish()
    # The Windows, which follow from the images, were shuffled too.
    with pytest.raises(UserError, match="labels"):
        report.main(
            report_of(
                tmp_path / "maps.h5",
                located,
                **({"teacher": "student", "input_size": 48} if held else {}),
            )
        )
    text = (tmp_path / "maps.audit.html").read_text()
    assert "the teacher's own accuracy" not in text
    assert "While there is a fault of labels, that says nothing of the teacher." in text


def random_store(path: Path, folder: Path, random_maps, side: int, top_k: int, num_classes: int):
    """Random maps of the small folder's images; finished."""
    images = Images(folder)
    header = StoreHeader(
        side=side,
        top_k=top_k,
        num_classes=num_classes,
        absent="tail",
        teacher="t",
        input_size=576,
        geometry="squash",
        fingerprint=images.fingerprint(),
        class_names=tuple(images.class_names),
    )
    writer = ScoreMapWriter(path, header, images.paths, images.labels)
    writer.write(np.arange(len(images)), random_maps(len(images), side, top_k, num_classes))
    writer.finish()
    return ScoreMapStore(path)


def test_the_command(folder, random_maps, tmp_path, command):
    """Of a store and its images; unfinished, it says so on a page too."""
    store = random_store(tmp_path / "maps.h5", folder, random_maps, 6, 2, 2)
    done = command(
        "tools/report.py",
        store.path,
        "--data",
        folder,
        "--out",
        tmp_path / "a.html",
        "--json",
        tmp_path / "b.json",
    )
    assert done.returncode == 0, done.stderr
    assert "not checked  orientation: only a reference model can tell" in done.stdout
    assert (tmp_path / "b.json").exists()
    assert (tmp_path / "a.html").read_text().count("<img") > 5
    writer = ScoreMapWriter(tmp_path / "part.h5", store.header, store.paths(), store.labels)
    writer.close()
    done = command("tools/report.py", writer.part, "--out", tmp_path / "c.html")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "11 of 11 rows are not labeled" in (tmp_path / "c.html").read_text()


@pytest.mark.parametrize(
    ("names", "fields", "said"),
    [
        (
            ["maps"],
            {"data": None, "teacher": "x"},
            "--teacher looks at images; give them with --data",
        ),
        (["maps", "maps"], {}, "one file of score maps is audited at a time"),
        (
            ["maps"],
            {"boxes": Path("boxes.json")},
            "--boxes judges the labels of runs; leave it out of an audit of score maps",
        ),
        (["maps"], {"images": 1}, "--images must be at least 2"),
        (["none"], {}, "there is no such file"),
        (["maps"], {"teacher": "nobody"}, "neither a file nor a timm model"),
        ([], {}, "name at least one run folder of train.py, or a file of score maps"),
    ],
)
def test_what_cannot_be_audited_is_said(scenes, located, tmp_path, names, fields, said):
    told = replace(
        report_of(tmp_path, located),
        runs=tuple(scenes / f"{name}.h5" for name in names),
        out=tmp_path / "a.html",
    )
    with pytest.raises(UserError, match=said):
        report.main(replace(told, **fields))
    assert not list(tmp_path.iterdir())


def test_a_page_of_many_classes_and_cells_stays_small(folder, random_maps, tmp_path):
    """S = 18, 1,000 classes; most cells are drawn."""
    store = random_store(
        tmp_path / "maps.h5", folder, lambda *shape: random_maps(*shape, seed=1), 18, 5, 1000
    )
    result = audit_page.audit(store.path, Images(folder))
    text = audit_page.page(result)
    assert text.count("<rect") > 5 * 324
    # 36 pictures at most; here are 5 and 11.
    assert len(text) / text.count("<img") * 36 < 3e6


@pytest.mark.parametrize("axes", ["row-column", "column-row"])
def test_an_import_finds_how_its_pack_lies(scenes, located, student, tmp_path, axes, capsys):
    """Neither published nor declared: the maps cover the center square, the axes are as given."""
    for path in (scenes / "tree").rglob("*.pt"):
        lies = tmp_path / "tree" / path.relative_to(scenes / "tree")
        lies.parent.mkdir(parents=True, exist_ok=True)
        array = torch.load(path, weights_only=True)
        torch.save(array.mT.contiguous() if axes == "column-row" else array, lies)
    wanted = Import(
        labels=tmp_path / "tree",
        data=located.scenes,
        out=tmp_path / "maps.h5",
        footprint="find",
        axes="find",
        teacher="t",
        input_size=48,
        reference="student",
        audit_images=200,
        threads=2,
    )
    import_labels.main(wanted)
    found, before = ScoreMapStore(tmp_path / "maps.h5"), ScoreMapStore(scenes / "maps.h5")
    assert found.header.geometry == "center-crop"
    assert found.header.teacher.endswith(f"axes {axes})")
    for name in ("logit", "cls", "window"):
        ids = np.arange(len(before))
        np.testing.assert_array_equal(
            getattr(found.rows(ids), name), getattr(before.rows(ids), name)
        )
    assert "sound  orientation" in capsys.readouterr().out
    with pytest.raises(
        UserError, match="--axes find needs a model to hold the maps against; give --reference"
    ):
        import_labels.main(replace(wanted, out=tmp_path / "b.h5", footprint=None, reference=""))
    if axes == "column-row":  # declared wrongly, the store is written and the audit says so
        with pytest.raises(UserError, match=r"the audit found 1 fault \(orientation\)"):
            import_labels.main(
                replace(wanted, out=tmp_path / "c.h5", footprint="center-crop", axes="row-column")
            )
        assert (tmp_path / "c.h5").exists()


def test_references_that_do_not_fit_are_refused(tmp_path):
    torch.manual_seed(0)
    kwargs = {"num_classes": 2}
    model = timm.create_model("test_vit", **kwargs)
    checkpoint = {
        "recipe": {"name": "test_vit", "kwargs": kwargs},
        "model": model.state_dict(),
        "class_names": ["cat", "dog"],
    }
    torch.save(checkpoint, tmp_path / "last.pt")
    with pytest.raises(
        UserError, match=r"trained on other classes than the maps have \(cat, ... and dog, ...\)"
    ):
        references(str(tmp_path / "last.pt"), "", 64, ["dog", "cat"])
    found = references(str(tmp_path / "last.pt"), "", 64, ["cat", "dog"], "cpu")
    assert set(found) == {"squash", "center-crop"}
    assert found["squash"].model is found["center-crop"].model

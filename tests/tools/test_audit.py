"""The audit as a command, its page, and imports that find the layout of their pack."""

import copy
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

from densefeed.models import nfnet  # noqa: F401  (registers)
from densefeed.models.model_spec import imagenet_names
from densefeed.pages.templates import TEMPLATES
from densefeed.relabel import load_teacher
from densefeed.relabel.audit import audit
from densefeed.relabel.load_teacher import Loaded, load_references
from densefeed.relabel.reference_match import orient
from densefeed.storage.images import Images
from densefeed.storage.score_maps import ScoreMapStore, ScoreMapWriter
from densefeed.system.errors import UserError
from densefeed.tools import audit as audit_tool
from densefeed.tools import export_labels, import_labels
from densefeed.tools.audit import AuditOptions, render_page
from densefeed.tools.export_labels import ExportLabels
from densefeed.tools.import_labels import Import
from densefeed.tools.report import read_costs

from ..runs import label_images
from ..stores import write_store


@pytest.fixture(scope="module")
def scenes(located, tmp_path_factory):
    """Label the scenes with center-crop maps: a store, and a tree of files."""
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
    export_labels.main(ExportLabels(maps=root / "maps.h5", out=root / "tree"))
    return root


@pytest.fixture
def student(located, monkeypatch):
    """Make `--teacher` and `--reference` load the second network, which is no timm model."""
    network = located.teachers(1)["squash"].model
    config = {"mean": (0.4,) * 3, "std": (0.25,) * 3, "interpolation": "bilinear"}
    monkeypatch.setattr(
        load_teacher,
        "load_network",
        lambda *_: Loaded(network, config, [str(n) for n in range(10)]),
    )


def make_options(path: Path, located, **fields):
    """Options of an audit of `path` with the images of the scenes."""
    common = {"data": located.scenes, "images": 200, "threads": 2, "device": "cpu"}
    return AuditOptions(maps=path, **(common | fields))


@pytest.mark.parametrize("name", ["json", "out"])
def test_json_of_something_else_is_not_replaced(scenes, located, tmp_path, name):
    other = tmp_path / "boxes.json"
    other.write_text("{}")
    path = other if name == "json" else other.with_suffix(".html")
    with pytest.raises(
        UserError, match=rf"^{other} is not an earlier output, .* another --{name}$"
    ):
        audit_tool.main(make_options(scenes / "maps.h5", located, **{name: path}))
    assert os.listdir(tmp_path) == ["boxes.json"]


def test_the_page_of_a_clean_store(scenes, located, student, tmp_path, capsys):
    maps, out = scenes / "maps.h5", tmp_path / "a.html"
    audit_tool.main(make_options(maps, located, teacher="student", input_size=48, out=out))
    text, numbers = (tmp_path / "a.html").read_text(), json.loads((tmp_path / "a.json").read_text())
    assert len(text) < 3e6
    assert "http" not in text  # self-contained
    wrong = min(24, round((1 - numbers["agreement"]) * 320))
    assert text.count("<img") == 12 + wrong
    assert "No fault was found." in text
    assert "This is about the teacher's own accuracy" in text
    assert numbers["reference"]["correlation"]["center-crop"]["upright"] > 0.3
    assert sum(numbers["entropy"]["histogram"]) == sum(numbers["palette"]["counts"]) == 320
    assert [c["images"] for c in numbers["classes"]] == [32] * 10
    assert all(item["label"] != item["top_class"] for item in numbers["disagreements"])
    printed = capsys.readouterr().out
    assert all(f"sound  {name}" in printed for name in ("orientation", "coverage", "rows"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"maps": Path("")}, r"\. is a folder without manifest.json: name a file of score maps"),
        ({"maps": Path("m.h5"), "out": Path("")}, r"--out \. must end in \.html"),
        ({"maps": Path("m.h5"), "json": Path("")}, r"--json \. must end in \.json"),
    ],
)
def test_empty_paths_are_refused(fields, said):
    with pytest.raises(UserError, match=said):
        audit_tool.main(AuditOptions(**fields))


def test_crops_are_compared_with_the_reference(scenes, located, student, tmp_path, capsys):
    """The page has the table and two curves, the JSON the numbers, and the terminal a sentence."""
    fields = {"teacher": "student", "input_size": 48, "images": 40, "out": tmp_path / "a.html"}
    plain = make_options(scenes / "maps.h5", located, **fields)
    audit_tool.main(plain)
    assert "cached label" not in (tmp_path / "a.html").read_text() + capsys.readouterr().out
    assert "crops" not in json.loads((tmp_path / "a.json").read_text())
    audit_tool.main(replace(plain, crops=3))
    text, numbers = (tmp_path / "a.html").read_text(), json.loads((tmp_path / "a.json").read_text())
    crops = numbers["crops"]
    assert (crops["images"], crops["crops_per_image"], crops["own_teacher"]) == (40, 3, False)
    printed = capsys.readouterr().out
    sentence = crops["sentence"]
    assert f"cached labels: {sentence}\n" in printed
    # Beyond the center square of its image a map labels no crop.
    total, *others = crops["groups"]
    assert [g["by"] for g in others] == ["area"] * 3 + ["width / height"] * 3 + ["mirrored"] * 2
    assert 100 < total["crops"] <= 120
    assert 0.1 < total["agreement"]["mean"] < 1
    assert f"on all crops on {100 * total['agreement']['mean']:.0f} %" in sentence
    part = text[text.index("What the cached label costs") : text.index("Maps over their images")]
    assert part.count("<tr>") == 1 + len(crops["groups"])
    assert part.count("<polyline") == 2
    for group in crops["groups"]:
        assert f"<b>{100 * group['agreement']['mean']:.1f} %</b>" in part
        assert f"<b>{group['divergence']['mean']:.2f}</b>" in part
    before = (tmp_path / "a.json").read_bytes()
    audit_tool.main(replace(plain, crops=3))
    assert (tmp_path / "a.json").read_bytes() == before


def test_a_class_map_makes_a_reference_of_other_classes(scenes, located, student, tmp_path):
    """One that gives each class its own number changes nothing; one that rotates them does."""
    fields = {"teacher": "student", "input_size": 48, "images": 40, "crops": 2}
    plain = make_options(scenes / "maps.h5", located, **fields, out=tmp_path / "a.html")
    names = ScoreMapStore(scenes / "maps.h5").header.class_names
    found = []
    for order in (None, names, [*names[1:], names[0]]):
        file = None
        if order:
            file = tmp_path / "map.csv"
            file.write_text("".join(f"{number},{name}\n" for number, name in enumerate(order)))
        audit_tool.main(replace(plain, class_map=file))
        found.append(read_costs(tmp_path / "a.json")["groups"][0]["agreement"]["mean"])
    assert found[1] == pytest.approx(found[0], abs=1e-6)
    assert found[2] < found[0] - 0.02


def test_the_report_shows_what_cached_labels_cost(scenes, located, student, tmp_path):
    fields = {"teacher": "student", "input_size": 48, "images": 40, "out": tmp_path / "a.html"}
    plain = make_options(scenes / "maps.h5", located, **fields)
    audit_tool.main(replace(plain, crops=1))
    # The mean of one image has no interval.
    path = tmp_path / "a.json"
    document = json.loads(path.read_text())
    document["crops"]["groups"][0]["agreement"] |= {"low": None, "high": None}
    path.write_text(json.dumps(document))
    cached = TEMPLATES.get_template("cached.html").module.costs(read_costs(path))
    share = 100 * document["crops"]["groups"][0]["agreement"]["mean"]
    assert f"<td><b>{share:.1f} %</b></td>" in cached
    audit_tool.main(plain)
    with pytest.raises(UserError, match=r"a.json compares no crops; audit .* --crops 8"):
        read_costs(path)


def test_crops_without_a_reference_are_refused():
    options = AuditOptions(maps=Path("m.h5"), data=Path("d"), crops=2)
    with pytest.raises(UserError, match="--crops has no effect without --teacher"):
        options.check_named(["m.h5", "--data", "d", "--crops", "2"])


def test_crops_of_maps_that_hold_no_logits_are_not_compared(scenes, located, student, tmp_path):
    store = ScoreMapStore(scenes / "maps.h5")
    maps = store.rows(np.arange(len(store)))
    writer = ScoreMapWriter(tmp_path / "maps.h5", store.header, store.paths(), store.labels)
    share = np.exp(maps.logit.astype(np.float64) - maps.lse.astype(np.float64)[..., None])
    writer.write(np.arange(len(store)), maps._replace(logit=share.astype(np.float16)))
    writer.finish()
    options = make_options(tmp_path / "maps.h5", located, teacher="student", crops=2, input_size=48)
    with pytest.raises(UserError, match="logits"):
        audit_tool.main(options)
    text = (tmp_path / "maps.audit.html").read_text()
    assert "Crops were not compared, see the faults and the checks not made." in text


@pytest.mark.filterwarnings("error")
def test_a_reference_of_flat_maps_is_no_number(scenes, located, student, tmp_path, monkeypatch):
    """Its correlations are NaN, which JSON cannot hold: the page could not be written again."""
    flat = copy.deepcopy(located.teachers(1)["squash"].model)
    for weights in flat.parameters():
        weights.data.zero_()
    loaded = load_teacher.load_network()._replace(model=flat)
    monkeypatch.setattr(load_teacher, "load_network", lambda *_: loaded)
    options = make_options(
        scenes / "maps.h5", located, teacher="student", input_size=48, out=tmp_path / "a.html"
    )
    for _ in range(2):
        audit_tool.main(options)
    reference = json.loads((tmp_path / "a.json").read_text())["reference"]
    assert reference["neighbor"] is None
    assert set(reference["correlation"]["center-crop"].values()) == {None}
    assert "nan" not in re.sub(r"data:image\S+", "", (tmp_path / "a.html").read_text()).lower()


def test_faults_are_listed_first_and_raise_an_error(scenes, located, student, tmp_path):
    store = ScoreMapStore(scenes / "maps.h5")
    maps = store.rows(np.arange(len(store)))
    writer = ScoreMapWriter(tmp_path / "maps.h5", store.header, store.paths(), store.labels)
    parts = {
        name: np.stack([orient(row, 3) for row in getattr(maps, name)])
        for name in ("logit", "cls", "lse")
    }
    writer.write(np.arange(len(store)), maps._replace(**parts))
    writer.finish()
    message = r"maps.h5: the audit found 1 fault \(orientation\); .*audit.html lists the remedies"
    with pytest.raises(UserError, match=message):
        audit_tool.main(
            make_options(tmp_path / "maps.h5", located, teacher="student", input_size=48)
        )
    text = (tmp_path / "maps.audit.html").read_text()
    assert text.index("Fault: orientation") < text.index("Sound: ")
    assert "Do not train on this file" in text
    assert (
        json.loads((tmp_path / "maps.audit.json").read_text())["checks"][0]["name"] == "orientation"
    )
    assert "This is about the teacher's own accuracy" in text  # in every orientation


@pytest.mark.parametrize("fields", [{"teacher": "student", "input_size": 48}, {}])
def test_the_page_of_shuffled_maps_does_not_measure_the_teacher(
    scenes, located, student, tmp_path, fields
):
    """With a reference and without."""
    store = ScoreMapStore(scenes / "maps.h5")
    writer = ScoreMapWriter(tmp_path / "maps.h5", store.header, store.paths(), store.labels)
    writer.write(
        np.arange(len(store)), store.rows(np.random.default_rng(0).permutation(len(store)))
    )
    writer.finish()
    # The windows, which follow from the images, are shuffled too.
    with pytest.raises(UserError, match="labels"):
        audit_tool.main(make_options(tmp_path / "maps.h5", located, **fields))
    text = (tmp_path / "maps.audit.html").read_text()
    assert "the teacher's own accuracy" not in text
    assert "Because of the faults found (" in text
    assert "this is no measure of the teacher." in text


def random_store(path: Path, folder: Path, random_maps, side: int, top_k: int, num_classes: int):
    """Write a finished store of random maps for the small folder's images."""
    scores = random_maps(11, side, top_k, num_classes)
    return ScoreMapStore(write_store(path, Images(folder), scores, num_classes, input_size=576))


def test_the_command(folder, random_maps, tmp_path, command):
    """A store with its images, and an unfinished store, which gets a page too."""
    store = random_store(tmp_path / "maps.h5", folder, random_maps, 6, 2, 2)
    done = command(
        "tools/audit.py",
        store.path,
        "--data",
        folder,
        "--out",
        tmp_path / "a.html",
        "--json",
        tmp_path / "b.json",
    )
    assert done.returncode == 0, done.stderr
    assert (
        "not checked  orientation: this check needs a reference model, and none was given"
        in done.stdout
    )
    assert (tmp_path / "b.json").exists()
    assert (tmp_path / "a.html").read_text().count("<img") > 5
    writer = ScoreMapWriter(tmp_path / "part.h5", store.header, store.paths(), store.labels)
    writer.close()
    done = command("tools/audit.py", writer.part, "--out", tmp_path / "c.html")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "11 of 11 rows are not labeled" in (tmp_path / "c.html").read_text()


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "maps",
            {"data": None, "teacher": "x"},
            "--teacher needs the images; pass them with --data",
        ),
        ("maps", {"images": 1}, "--images is 1, and must be at least 2"),
        ("maps", {"crops": 65}, "--crops is 65, and must be from 0 to 64"),
        ("maps", {"teacher": "x", "input_size": -3}, "--input-size is -3, and must be at least 0"),
        ("none", {}, "there is no such file"),
        ("maps", {"teacher": "nobody"}, "neither a file nor a timm model"),
    ],
)
def test_an_audit_that_cannot_be_made_is_refused(scenes, located, tmp_path, name, fields, message):
    with pytest.raises(UserError, match=message):
        audit_tool.main(
            make_options(scenes / f"{name}.h5", located, out=tmp_path / "a.html", **fields)
        )
    assert not list(tmp_path.iterdir())


def test_a_page_of_many_classes_and_cells_stays_small(folder, random_maps, tmp_path):
    """With S = 18 and 1,000 classes, most cells are drawn."""
    store = random_store(
        tmp_path / "maps.h5", folder, lambda *shape: random_maps(*shape, seed=1), 18, 5, 1000
    )
    text = render_page(audit(store.path, Images(folder)))
    assert text.count("<rect") > 5 * 324
    # A page has at most 36 pictures; this one has 5 and 11.
    assert len(text) / text.count("<img") * 36 < 3e6


@pytest.mark.one_in(2)
@pytest.mark.parametrize("axes", ["row-column", "column-row"])
def test_an_import_finds_the_layout_of_its_pack(scenes, located, student, tmp_path, axes, capsys):
    """It is neither published nor declared: maps of the center square, axes as parametrized."""
    for path in (scenes / "tree").rglob("*.pt"):
        copy = tmp_path / "tree" / path.relative_to(scenes / "tree")
        copy.parent.mkdir(parents=True, exist_ok=True)
        array = torch.load(path, weights_only=True)
        torch.save(array.mT.contiguous() if axes == "column-row" else array, copy)
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
    assert found.header.teacher.endswith(f"axes {axes} by reference student)")
    for name in ("logit", "cls", "window"):
        ids = np.arange(len(before))
        np.testing.assert_array_equal(
            getattr(found.rows(ids), name), getattr(before.rows(ids), name)
        )
    assert "sound  orientation" in capsys.readouterr().out
    needs = "--axes find needs a model to hold the maps against; give --footprint and --reference"
    with pytest.raises(UserError, match=needs):
        import_labels.main(replace(wanted, out=tmp_path / "b.h5", footprint=None, reference=""))
    # With a wrong declaration the store is written, and the audit reports the fault.
    if axes == "column-row":
        with pytest.raises(UserError, match=r"the audit found 1 fault \(orientation\)"):
            import_labels.main(
                replace(wanted, out=tmp_path / "c.h5", footprint="center-crop", axes="row-column")
            )
        # The file is there, and says so too.
        teacher = ScoreMapStore(tmp_path / "c.h5").header.teacher
        assert teacher.endswith("axes row-column contradicted by reference student)")


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
        UserError, match=r"trained on other classes than the maps have \(the same .*class 0 is cat"
    ):
        load_references(str(tmp_path / "last.pt"), "", 64, ["dog", "cat"])
    found = load_references(str(tmp_path / "last.pt"), "", 64, ["cat", "dog"], "cpu")
    assert set(found) == {"squash", "center-crop"}
    assert found["squash"].model is found["center-crop"].model


def test_outside_a_reference_without_names_is_matched_by_order_in_a_line(tmp_path, capsys):
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=2)
    torch.save(model.state_dict(), tmp_path / "plain.pth")
    path = str(tmp_path / "plain.pth")
    load_references(path, "test_vit", 64, ["cat", "dog"], "cpu")
    assert capsys.readouterr().out == (
        f"note: {path} states no names of classes; they are matched by order with those of the "
        "maps\n"
    )
    # A model of ImageNet's classes has their names.
    names = imagenet_names(timm.create_model("test_vit", num_classes=1000))
    torch.save(timm.create_model("test_vit").state_dict(), tmp_path / "plain.pth")
    load_references(path, "test_vit", 64, names, "cpu")
    assert capsys.readouterr().out == ""
    with pytest.raises(UserError, match="the same names in another order"):
        load_references(path, "test_vit", 64, names[::-1], "cpu")

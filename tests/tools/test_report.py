"""The report: geometry against cases by hand, and the table of results."""

import json
import os
import re
import shutil
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageColor

import densefeed.train as training
from densefeed.objectives.detection import paint_found
from densefeed.pages.class_masks import draw_classes
from densefeed.pages.label_truth import find_owners
from densefeed.pages.true_objects import Truth, boxes_in_crop, draw_objects, parse_truth
from densefeed.pipelines.open import open_dataset
from densefeed.pipelines.plan import EpochPlan
from densefeed.recipes import RECIPES
from densefeed.storage.geometry import crop_views
from densefeed.storage.mask_folder import MaskFolder
from densefeed.system.errors import UserError, explain_os_error
from densefeed.system.options import with_options
from densefeed.tools import report
from densefeed.tools.report import (
    LONGEST_LOG,
    Report,
    RunRecord,
    build_augmentation,
    curve,
    describe_excess,
    draw_curves,
    main,
    make_row,
    read_run,
)
from densefeed.training import predictions
from densefeed.training.config import Config


@pytest.mark.parametrize("flip", [False, True])
def test_boxes_in_a_crop(flip):
    """In a crop of the right half a box is twice as wide; in a flipped one it is mirrored."""
    view = crop_views(
        np.array([[0.0, 50.0, 100.0, 50.0]]), np.array([flip]), np.array([100]), np.array([100])
    )[0]
    (box,) = boxes_in_crop(np.array([[0.5, 0.2, 0.75, 0.4]]), view)
    want = [0.5, 0.2, 1.0, 0.4] if flip else [0.0, 0.2, 0.5, 0.4]
    np.testing.assert_allclose(box, want, atol=1e-6)


def test_a_token_has_an_owner_only_inside_exactly_one_box():
    boxes = np.array([[0.0, 0.0, 0.5, 0.5], [0.45, 0.45, 1.0, 1.0]])
    owner = find_owners(boxes, 4)
    np.testing.assert_array_equal(
        owner, [[0, 0, -1, -1], [0, -1, -1, -1], [-1, -1, 1, 1], [-1, -1, 1, 1]]
    )


def test_the_token_grid_of_a_run_is_that_of_its_first_epoch():
    config = with_options(
        RECIPES["lvvit_micro_token_label"](),
        data=Path("t.beton"),
        val=Path("v.beton"),
        out=Path("run"),
        sizes=((0, 32), (1, 64)),
    )
    run = RunRecord("run", config, {}, [], [])
    plan = EpochPlan(num_samples=1, batch=1, seed=0, mode="train", sizes=config.data.sizes)
    assert build_augmentation(run, SimpleNamespace(plan=plan, num_classes=2))[0] == 4


def test_a_box_in_a_rotated_crop_is_the_box_around_its_corners():
    # The crop shows at (x, y) what is at (y, 1 - x) in the image.
    quarter = np.array([[0.0, 1.0, 0.0], [-1.0, 0.0, 1.0]])
    np.testing.assert_allclose(
        boxes_in_crop(np.array([[0.1, 0.2, 0.4, 0.3]]), quarter), [[0.7, 0.1, 0.8, 0.4]], atol=1e-12
    )


def test_a_folder_that_is_not_a_run_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"is not a run folder \(config.json is missing\)"):
        read_run(tmp_path)
    with pytest.raises(FileNotFoundError) as raised:
        read_run(Path("s3://bucket/run"))
    assert "is in object storage" in explain_os_error(raised.value)


def test_outside_a_folder_of_runs_is_refused_with_their_names(tmp_path):
    for name in "b", "a":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"\(config.json is missing\)") as info:
        main(Report(runs=(tmp_path,)))
    assert str(info.value).endswith(
        f"; give those that it holds: {tmp_path / 'a'}, {tmp_path / 'b'}"
    )


def test_runs_are_compared_by_the_options_that_differ(tmp_path):
    """The runs are in progress: their last lines are incomplete."""
    runs = []
    for name, more in (("a", {"lr": 0.1}), ("b", {"lr": 0.2, "ema": 0.9})):
        folder = tmp_path / name
        folder.mkdir()
        paths = {"data": Path(name), "val": Path(name), "out": folder}
        config = with_options(RECIPES["lvvit_micro_ce"](), epochs=4, **paths, **more)
        (folder / "config.json").write_text(json.dumps(config.to_dict()))
        same = {"kind": "train", "mfu": 0.1, "loss": 1.0}
        lines = [same | {"step": n, "epoch": n / 2, "images_per_s": 10 * n} for n in (1, 2, 3)]
        val = {"kind": "val", "step": 3, "epoch": 1.5, "top1": 0.25}
        lines += [val | ({"top1_ema": 0.5} if name == "b" else {})]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text + '{"kind": "tr')
        runs.append(read_run(folder))
        assert runs[-1].config == config
    runs[0].train[1].pop("loss")  # an interval in which every update was skipped
    lines = curve(runs, "train", "loss", percent=False)["lines"]
    assert [len(line["points"]) for line in lines] == [2, 3]
    one, other = (make_row(run, runs) for run in runs)
    assert (one["differs"], other["differs"]) == ("lr 0.1, ema 0.0", "lr 0.2, ema 0.9")
    assert (one["tops"], other["tops"]) == ([(0.25, "")], [(0.25, ""), (0.5, "EMA")])
    assert (one["epoch"], one["epochs"], one["result"], one["images_per_s"]) == (1.5, 4, {}, 20)
    # Two of three runs have the options of the first; only the other's are listed.
    three = [make_row(run, [*runs, runs[0]])["differs"] for run in runs]
    assert three == ["", "lr 0.2, ema 0.9"]
    # The only evaluation of each run is a point.
    (training, loss), (validation, top1) = draw_curves(runs)
    assert (training, validation) == (
        "training loss by epoch",
        "top-1 on the validation set by epoch",
    )
    assert [len(line["points"]) for line in loss["lines"] + top1["lines"]] == [2, 3, 1, 1]
    assert draw_curves([run._replace(val=[]) for run in runs]) == [(training, loss)]


# ------------------------------------------------------------------------- damaged files


@pytest.fixture
def run_folder(tmp_path):
    """Files of a finished run without score maps, whose training set is gone."""
    folder = tmp_path / "run"
    folder.mkdir()
    paths = {"data": tmp_path / "t.beton", "val": tmp_path / "v.beton", "out": folder}
    config = with_options(RECIPES["lvvit_micro_ce"](), epochs=4, **paths).to_dict()
    train = {"kind": "train", "step": 1, "epoch": 0.0, "loss": 0.0, "images_per_s": 5, "mfu": 0.1}
    val = {"kind": "val", "step": 1, "epoch": 1.0, "top1": 0.5, "images": 52, "unreadable": 7}
    result = {"top1": 0.5, "seconds": 3.1, "data_wait_share": 0.25}
    environment = {"command": ["x"], "device": "cpu", "cores": 2, "torch": "2", "timm": "1"}
    files = {"config": config, "result": result, "environment": environment}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    lines = (json.dumps(line) + "\n" for line in (train, val))
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def test_the_report_shows_how_many_images_were_evaluated(run_folder):
    main(Report(runs=(run_folder,)))
    assert "on 52 images; 7 unreadable" in (run_folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", "config.json is damaged (Expecting property name"),
        ("config.json", b"{}", "config.json was written by another version of densefeed"),
        ("environment.json", b"", "environment.json is damaged (Expecting value"),
        ("environment.json", b"{}", "environment.json is damaged (cores is missing)"),
        ("environment.json", None, "run is not a run folder (environment.json is missing)"),
        ("result.json", b'{"top1": NaN}', "result.json is damaged (NaN is not a finite number)"),
        ("result.json", b'{"top1": 1}', "result.json is damaged (seconds is not a number from 0"),
        ("metrics.jsonl", b"\xff\n", "metrics.jsonl is damaged in line 1 ("),
        ("metrics.jsonl", b'{"kind": "val"}\n', "metrics.jsonl is damaged in line 1 (it is no"),
        ("metrics.jsonl", b" " * 2**20, "metrics.jsonl is damaged in line 1 (Expecting value"),
    ],
)
def test_a_damaged_file_of_a_run_is_named(run_folder, name, content, message):
    path = run_folder / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UserError) as error:
        main(Report(runs=(run_folder,)))
    assert str(error.value).startswith(f"{run_folder.parent}/")
    assert message in str(error.value)
    assert not (run_folder / "report.html").exists()


def test_values_that_no_run_can_have_are_refused_with_the_file(run_folder):
    config = json.loads((run_folder / "config.json").read_text())
    config["optim"]["batch"] = "x"
    (run_folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"run/config.json: --batch is 'x', and must be a whole"):
        read_run(run_folder)


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        *(("metrics.jsonl", "top1", value) for value in (1e308, 101, -0.1)),
        *(("metrics.jsonl", "step", value) for value in (-5, 1.5)),
        *(("metrics.jsonl", name, 1e308) for name in ("epoch", "loss")),
        *(("result.json", "data_wait_share", value) for value in (-1, 1.5, "1")),
        ("result.json", "seconds", -1),
    ],
)
def test_impossible_numbers_are_refused_with_the_file(run_folder, file, name, value):
    lines = [json.loads(line) for line in (run_folder / file).read_text().splitlines()]
    lines[-1][name] = value
    (run_folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=rf"run/{file}.* is damaged.*{name}.*; (remove|copy)"):
        read_run(run_folder)


@pytest.mark.parametrize(
    ("samples", "batch", "size", "fits"),
    [
        (40, 100_000, 64, False),
        (40, 1024, 224, True),
        (1_281_167, 1024, 448, True),
        (1_281_167, 1024, 10_000, False),
    ],
)
def test_a_batch_that_takes_all_memory_is_not_replayed(samples, batch, size, fits):
    plan = EpochPlan(num_samples=samples, batch=batch, seed=0, mode="train", sizes=((0, size),))
    assert (describe_excess(plan) == "") == fits


@pytest.mark.parametrize("objects", [[], [{"class": "0", "box": [0, 0, 1, 50]}], [{"class": "0"}]])
def test_true_boxes_that_are_none_are_refused(objects):
    """An image without objects, and a box outside of the scene."""
    with pytest.raises(UserError, match=r"x.json is damaged \(the objects of a\); make"):
        parse_truth({"a": objects}, [60, 40], "a", {"0": 0}, Path("x.json"))
    whole = {"a": [{"class": "0", "box": [0, 10, 60, 40]}]}
    good = parse_truth(whole, [60, 40], "a", {"0": 0}, Path("x"))
    assert good.boxes_ltrb.tolist() == [[0, 0.25, 1, 1]]
    for size in (60, [60], [60, "40"], [40, 40], None):
        with pytest.raises(UserError, match=r"x is damaged \(the objects of a\); make"):
            parse_truth(whole, size, "a", {"0": 0}, Path("x"))


def test_control_characters_of_names_are_not_in_the_page(run_folder):
    name = "a\x1b[31m\u202e<b>"
    odd = run_folder.rename(run_folder.with_name(name))
    main(Report(runs=(odd,)))
    text = (odd / "report.html").read_text()
    assert r"a\x1b[31m\u202e&lt;b&gt;" in text
    assert not re.search("[\x1b\u202e]|<b>", text)


def test_the_true_boxes_are_not_replaced_by_the_numbers(run_folder, tmp_path):
    """The numbers of boxes.html are written to boxes.json."""
    boxes = tmp_path / "boxes.json"
    boxes.write_text('{"scenes": {}}')
    with pytest.raises(
        UserError, match=rf"^{boxes} is not an earlier output, .*; choose another --out"
    ):
        main(Report(runs=(run_folder,), boxes=boxes, out=tmp_path / "boxes.html"))
    assert boxes.read_text() == '{"scenes": {}}'
    assert not (tmp_path / "boxes.html").exists()


def test_missing_boxes_are_named_though_the_run_shows_no_crops(run_folder, tmp_path):
    with pytest.raises(UserError, match=r"no.json: there is no such file; densefeed scenes"):
        main(Report(runs=(run_folder,), boxes=tmp_path / "no.json"))


def test_a_log_that_no_page_can_show_is_refused(run_folder):
    with open(run_folder / "metrics.jsonl", "ab") as file:
        file.truncate(LONGEST_LOG + 1)
    with pytest.raises(UserError, match=r"metrics.jsonl has more than 64 MiB"):
        read_run(run_folder)


def test_pipes_in_a_run_folder_do_not_hang(run_folder):
    for name in ("config.json", "environment.json", "result.json", "metrics.jsonl"):
        content = (run_folder / name).read_bytes()
        (run_folder / name).unlink()
        os.mkfifo(run_folder / name)
        with pytest.raises(OSError, match="this is not a regular file"):
            main(Report(runs=(run_folder,)))
        (run_folder / name).unlink()
        (run_folder / name).write_bytes(content)


VALUES = (None, True, -1, 0, 1e308, 10**19, "", "x", "\0", [], {}, [1], {"a": 1}, "no.such:thing")


def mutate(rng, content):
    """Cut the file, flip bits in it, or put another value in place of one of its values."""
    kind, at = rng.integers(3), int(rng.integers(len(content)))
    if kind == 0:
        return content[:at]
    if kind == 1:
        changed = bytearray(content)
        for place in rng.integers(len(content), size=rng.integers(1, 6)):
            changed[place] ^= 1 << int(rng.integers(8))
        return bytes(changed)
    lines = content.splitlines(keepends=True)
    number = int(rng.integers(len(lines)))
    document = json.loads(lines[number])
    node = document
    while True:
        key = list(node)[rng.integers(len(node))]
        if not isinstance(node[key], dict) or rng.random() < 0.2:
            break
        node = node[key]
    node[key] = VALUES[rng.integers(len(VALUES))]
    lines[number] = json.dumps(document).encode() + b"\n"
    return b"".join(lines)


def test_mutated_run_folders_give_a_report_or_one_sentence(run_folder):
    """Two hundred; the number of refusals shows that the mutations reach the checks."""
    rng, refused = np.random.default_rng(17), 0
    names = ("config.json", "environment.json", "result.json", "metrics.jsonl")
    for number in range(200):
        path = run_folder / names[number % 4]
        content = path.read_bytes()
        path.write_bytes(mutate(rng, content))
        try:
            main(Report(runs=(run_folder,)))
        except (UserError, OSError):
            refused += 1
        path.write_bytes(content)
    assert 80 < refused < 190


def test_outside_what_was_validated_on_other_images_is_a_column(run_folder, tmp_path):
    """The column was on the terminal of the flow only."""
    other = tmp_path / "other"
    shutil.copytree(run_folder, other)
    for wrong in ("", "sub/x.json", "none.json"):
        if wrong:
            with pytest.raises(UserError, match=f"no run folder holds {wrong}; write it with"):
                main(Report(runs=(other, run_folder), validated=wrong))
    (other / "new.json").write_text(json.dumps({"top1": 0.1234}))
    main(Report(runs=(other, run_folder), validated="new.json"))
    page = (run_folder / "report.html").read_text()
    assert "<th>top-1</th><th>new</th>" in page
    assert [page.count(f'<td class="big">{x}</td>') for x in ("12.3 %", "–")] == [1, 1]
    (other / "new.json").write_text(json.dumps({"miou": 0.4321, "images": 5}))
    main(Report(runs=(other, run_folder), validated="new.json"))
    assert '<td class="big">43.2 %</td>' in (run_folder / "report.html").read_text()
    (other / "new.json").write_text(json.dumps({"top1": 12.34}))
    with pytest.raises(UserError, match=r"new.json .*; validate the run again$"):
        main(Report(runs=(other, run_folder), validated="new.json"))


def test_outside_parts_without_tokens_are_dashes(run_folder, monkeypatch):
    """Of few scenes no token may lie on an object beside the label's."""
    kinds = ("image", "crop", "token", "published")
    purity = {kind: {"all": 0.5, "largest": 0.25} for kind in kinds}
    purity |= {"tokens": {"all": 3, "largest": 3}, "by": [], "scenes": 2}
    nothing = {"labeled": None, "sheet": [], "grid": 0, "scenes": [], "license": ""}
    monkeypatch.setattr(report, "replay", lambda *given: nothing | {"purity": purity})
    main(Report(runs=(run_folder,)))
    page = (run_folder / "report.html").read_text()
    assert (
        "3 tokens of training crops (before augmentation) lie inside exactly one true object; 0"
        in page
    )
    assert page.count('<td class="big">25.0 %</td>') == page.count('<td class="big">–</td>') == 4


def test_outside_objects_are_drawn_where_their_masks_are(tmp_path):
    mask = np.zeros((6, 8), np.uint8)
    mask[1:3, 2:5], mask[3:6, 6:] = 1, 2
    Image.fromarray(mask).save(tmp_path / "mask.png")
    truth = Truth(np.array([1, 0]), np.zeros((2, 4)), tmp_path / "mask.png", (8, 6))
    # Packed at half the size.
    for shrunk in (1, 2):
        image = Image.new("RGB", (8 // shrunk, 6 // shrunk), (200, 200, 200))
        drawn, key = draw_objects(image, truth, ("cat", "dog"))
        assert [entry["name"] for entry in key] == ["dog", "cat"]
        colors = [(0, 0, 0), *(ImageColor.getrgb(entry["ink"]) for entry in key)]
        for y, x in np.ndindex(6 // shrunk, 8 // shrunk):
            # The pixel that is nearest to the center of a block counts.
            value = mask[shrunk * y + shrunk // 2, shrunk * x + shrunk // 2]
            want = [int(80 + 0.6 * part + 1e-3) for part in colors[value]]
            assert np.abs(np.array(drawn.getpixel((x, y))) - want).max() <= 1


@pytest.fixture
def student(tmp_path, micro):
    """A finished run of two steps, with token labels."""
    training.train(micro(tmp_path / "student", epochs=1, batch=6, mixtoken=False))
    return tmp_path / "student"


def test_outside_tokens_are_drawn_without_their_names(student):
    """On 4 x 4 tokens; the key below a crop has the names."""
    main(Report(runs=(student,)))
    text = (student / "report.html").read_text()
    assert "Right: the same crop without labels." in text
    assert "below the picture are the most frequent classes, at most four" in text
    crops = re.findall(r'<svg viewBox="0 0 1 1".*?</svg>', text)
    assert len(crops) == 6
    assert all("<rect" in crop and "<text" not in crop for crop in crops)
    assert text.count('<i class="swatch"') >= 6


def test_outside_an_audit_of_other_images_is_refused(student, tmp_path):
    """It was shown as what the labels of the run's images cost."""
    group = {"by": "all", "crops_are": "all", "images": 2, "crops": 8}
    interval = {"mean": 0.5, "low": 0.4, "high": 0.6}
    group |= dict.fromkeys(("agreement", "divergence", "correlation"), interval)
    crops = {"sentence": "it costs little", "crops_per_image": 4, "images": 2, "input_size": 64}
    crops |= {"own_teacher": True, "groups": [group], "curve": []}
    audit = tmp_path / "audit.json"
    loader = open_dataset(read_run(student).config.data, "train", batch=6, seed=0)
    own = loader.fingerprint
    loader.close()
    for fingerprint in ("0" * 16, None, own):
        header = {"fingerprint": fingerprint}
        audit.write_text(json.dumps({"file": "maps.h5", "header": header, "crops": crops}))
        given = Report(runs=(student,), audit=audit)
        if fingerprint == own:
            main(given)
        else:
            said = "audits score maps of other images" if fingerprint else "does not state its ima"
            with pytest.raises(UserError, match=said):
                main(given)
            assert not (student / "report.html").exists()
    # The fingerprint of several files is not that of their images' maps.
    header = {"fingerprint": "0" * 16}
    audit.write_text(json.dumps({"file": "maps.h5", "header": header, "crops": crops}))
    path = student / "config.json"
    config = json.loads(path.read_text())
    train = config["data"]["train"]
    config["data"]["train"] = f"{train}*"
    path.write_text(json.dumps(config))
    main(Report(runs=(student,), audit=audit))
    text = (student / "report.html").read_text()
    assert "It costs little." in text
    assert "Maps: maps.h5." in text


def test_outside_predictions_are_those_of_the_evaluation(student):
    """All validation images are tried, as there are fewer than 64."""
    main(Report(runs=(student,)))
    text = (student / "report.html").read_text()
    tried, right, wrong = map(
        int, re.search(r"<p>(\d+) validation[^:]*: (\d+) right,\s+(\d+) wrong", text).groups()
    )
    result = json.loads((student / "result.json").read_text())
    assert (tried, right / tried) == (result["images"], pytest.approx(result["top1_ema"]))
    assert right + wrong == tried
    assert "with its EMA weights at 32 px" in text
    shown = re.findall(r'<b class="(right|wrong)">', text)
    assert shown == ["wrong"] * min(6, wrong) + ["right"] * min(6, right)
    assert text.count('alt="relevance for') == len(shown)


def test_outside_names_of_classes_in_another_unicode_form_are_the_same(student, monkeypatch):
    """As training takes them: the folders of the two sets may have other forms."""
    config = Config.from_dict(json.loads((student / "config.json").read_text()))
    trained, opened = predictions.open_trained(student), predictions.open_dataset
    names = [f"{name}\u00e9" for name in trained.class_names]
    renamed = trained._replace(class_names=names)

    def open_dataset(*words, **options):
        loader = opened(*words, **options)
        loader.class_names = [unicodedata.normalize("NFD", name) for name in names]
        loader.source.class_names = loader.class_names
        return loader

    want = predictions.show_predictions(config, student)
    monkeypatch.setattr(predictions, "open_trained", lambda *words, **options: renamed)
    monkeypatch.setattr(predictions, "open_dataset", open_dataset)
    shown = predictions.show_predictions(config, student)
    assert shown["right"] == want["right"]
    assert {item["label"] for item in shown["items"]} <= set(names)


def test_outside_predicted_masks_are_beside_the_true_ones(segments, masked, tmp_path, monkeypatch):
    """The share of right pixels, weighted by labeled pixels, is that of the evaluation."""
    training.train(segments(tmp_path / "run", epochs=1))
    licenses = {masked[0] / "boxes.json": "cut-outs under a license"}
    monkeypatch.setattr(report, "read_license", licenses.get)
    main(Report(runs=(tmp_path / "run",)))
    text = (tmp_path / "run/report.html").read_text()
    assert "<th>mIoU</th>" in text
    assert "mIoU on the validation set by epoch" in text
    assert "The pictures show cut-outs under a license." in text
    shares = re.findall(r"(\d+) % of the labeled pixels are right; validation sample (\d)", text)
    assert sorted(int(index) for _, index in shares) == [1, 2, 3, 4]
    data = MaskFolder(masked[0], "val")
    labeled = {index: int((data.mask(int(index)) != -1).sum()) for _, index in shares}
    mean = sum(int(share) * labeled[index] for share, index in shares) / sum(labeled.values())
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert mean == pytest.approx(100 * result["pixels_ema"], abs=1)
    for kind in ("true", "predicted"):
        assert text.count(f'alt="the {kind} mask of validation image') == 4


def test_crops_of_a_run_on_masks_have_no_image_label(segments, masked, tmp_path):
    """Every image was shown as one of the first class, and --boxes named a false reason."""
    training.train(segments(tmp_path / "run", epochs=1, objective="segment-soft"))
    main(Report(runs=(tmp_path / "run",)))
    text = (tmp_path / "run/report.html").read_text()
    assert "What the student saw" in text
    assert "image label" not in text
    boxes = tmp_path / "boxes.json"
    boxes.write_text("{}")
    with pytest.raises(UserError, match=r"--boxes shows how often .*, and run trains on masks"):
        main(Report(runs=(tmp_path / "run",), boxes=boxes))


@pytest.mark.parametrize("change", ["without masks", "other order"])
def test_outside_masks_of_other_classes_are_not_shown(segments, masked, tmp_path, capsys, change):
    """Masks are not renumbered, and a folder of classes has none."""
    training.train(segments(tmp_path / "run", epochs=1))
    root = shutil.copytree(masked[0], tmp_path / "data")
    path = tmp_path / "run/config.json"
    config = json.loads(path.read_text())
    if change == "other order":
        (root / "classes.txt").write_text("red\nground\ngreen\nblue\n")
    else:
        shutil.rmtree(root / "annotations")
        for name in ("ground", "red", "green", "blue"):
            shutil.copytree(root / "images/validation", root / "val" / name)
        shutil.rmtree(root / "images")
        config["data"] |= {"dataset": ""}
    config["data"]["val"] = str(root)
    path.write_text(json.dumps(config))
    main(Report(runs=(tmp_path / "run",)))
    assert "no predictions: the validation set has no masks of the cl" in capsys.readouterr().err
    assert "What the model predicts" not in (tmp_path / "run/report.html").read_text()


@pytest.mark.slow
def test_outside_found_objects_are_beside_the_true_ones(detects, tmp_path):
    training.train(detects(tmp_path / "run", epochs=1))
    main(Report(runs=(tmp_path / "run",)))
    text = (tmp_path / "run/report.html").read_text()
    assert "<th>box AP</th>" in text
    assert "searched for objects with its EMA weights" in text
    shown = text.count('alt="the true mask of validation image')
    assert 0 < shown == text.count('alt="the predicted mask of validation image') <= 8


def test_outside_the_object_of_the_highest_score_is_above():
    def find(rows, score, category):
        mask = np.zeros((4, 3), np.uint8)
        mask[rows] = 1
        runs = coder.encode(np.asfortranarray(mask))
        return {"category_id": category, "score": score, "segmentation": runs}

    coder = pytest.importorskip("pycocotools.mask")
    found = [find(slice(0, 2), 0.9, 5), find(slice(1, 3), 0.6, 7), find(slice(3, 4), 0.4, 2)]
    want = np.repeat([[5], [5], [7], [-1]], 3, 1)
    np.testing.assert_array_equal(paint_found(found, (4, 3)), want)


def test_outside_classes_have_one_color_in_all_masks():
    """The background and unlabeled pixels are dark, and so are equal pixels of two masks."""
    image = Image.new("RGB", (4, 1), (100, 50, 200))
    masks = np.array([[2, 1, 0, -1]]), np.array([[1, 1, 2, 2]])
    (first, second), key = draw_classes(image, masks, ("background", "cat", "dog"))
    assert [entry["name"] for entry in key] == ["cat", "dog"]
    first, second = np.asarray(first)[0], np.asarray(second)[0]
    inks = np.array([ImageColor.getrgb(entry["ink"]) for entry in key])
    cat, dog = 0.4 * np.array([100, 50, 200]) + 0.6 * inks
    dark = np.tile([40, 20, 80], (2, 1))
    np.testing.assert_allclose(first, [dog, cat, *dark], atol=1)
    np.testing.assert_allclose(second, [cat, cat, dog, dog], atol=1)
    # Ten classes have inks of their own.
    many = np.arange(12)[None]
    _, key = draw_classes(Image.new("RGB", (12, 1)), [many], [str(n) for n in range(12)])
    assert len({entry["ink"] for entry in key[:10]}) == 10
    assert {entry["ink"] for entry in key[10:]} == {"#808080"}


def test_outside_a_run_without_validation_set_shows_no_predictions(student, capsys):
    """The rest of the page is there, and a line says why."""
    config = json.loads((student / "config.json").read_text())
    config["data"]["val"] = str(student / "gone.beton")
    (student / "config.json").write_text(json.dumps(config))
    main(Report(runs=(student,)))
    assert "the report shows no predictions: " in capsys.readouterr().err
    text = (student / "report.html").read_text()
    assert "What the model predicts" not in text
    assert "What the student saw" in text


def test_outside_options_that_differ_lie_below_a_run_and_widen_no_table(run_folder, tmp_path):
    """As the last column they were cut off in a window of 500 pixels."""
    other = shutil.copytree(run_folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["optim"]["lr"] = 0.25
    (other / "config.json").write_text(json.dumps(config))
    main(Report(runs=(run_folder, other), out=tmp_path / "report.html"))
    text = (tmp_path / "report.html").read_text()
    table = re.search(r'<table class="results">(.*?)</table>', text, re.DOTALL)[1]
    header, *rows = re.findall(r"<tr.*?>(.*?)</tr>", table, re.DOTALL)
    columns = header.count("<th>")
    assert [row.count("<td") for row in rows] == [columns, 1, columns, 1]
    assert rows[3] == f'<td class="differs" colspan="{columns}">lr 0.25</td>'
    main(Report(runs=(run_folder,), out=tmp_path / "report.html"))
    assert 'class="differs"' not in (tmp_path / "report.html").read_text()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        (
            "augment",
            {"operations": ["gamma"]},
            "--operations gamma: no such operation is registered",
        ),
        ("model", {"name": "my_model"}, "timm knows no model 'my_model'"),
        ("objective", {"name": "mine"}, "--objective mine is unknown"),
    ],
)
def test_outside_a_run_of_code_that_is_not_imported_is_shown_beside_the_others(
    student, tmp_path, capsys, section, values, said
):
    """Its row, its options and its curves; a line says what is missing and how to get it."""
    own = shutil.copytree(student, tmp_path / "own")
    config = json.loads((own / "config.json").read_text())
    config[section] |= values
    (own / "config.json").write_text(json.dumps(config))
    main(Report(runs=(student, own), out=tmp_path / "report.html"))
    told = capsys.readouterr().err
    assert f"the report shows no crops: {said}" in told
    assert "start the file that registers" in told
    text = (tmp_path / "report.html").read_text()
    assert [text.count(f"<td>{name}</td>") for name in ("student", "own")] == [1, 1]
    (value,) = values.values()
    shown = value[0] if isinstance(value, list) else value
    assert shown in re.search(r'<td class="differs".*?>(.*?)</td>', text.partition(">own<")[2])[1]
    assert text.count("<polyline") == 4


def test_a_size_that_no_memory_holds_leaves_out_the_crops(tmp_path, micro, capsys):
    """In the config of a run whose training set is there."""
    out = tmp_path / "run"
    out.mkdir()
    config = micro(out, size=10**18).to_dict()
    environment = {"device": "cpu", "cores": 2, "torch": "2", "timm": "1"}
    for name, content in (("config", config), ("environment", environment)):
        (out / f"{name}.json").write_text(json.dumps(content))
    (out / "metrics.jsonl").write_text("")
    main(Report(runs=(out,)))
    assert "shows no crops: --batch 4 with images of 1,000,000" in capsys.readouterr().err

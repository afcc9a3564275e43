"""Labeling with a class map that covers a part of the teacher's classes, and stores of it."""

import hashlib
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from densefeed.pipelines.ffcv import FfcvSource
from densefeed.relabel.accuracy import measure_accuracy, print_accuracy
from densefeed.relabel.audit import audit, raise_on_faults
from densefeed.relabel.load_teacher import load_teacher
from densefeed.storage.images import Images, decode
from densefeed.storage.maintenance import convert, summary, verify
from densefeed.storage.row_codecs import ErrorSum, ScoreMaps, cell_targets
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.storage.selection import select
from densefeed.storage.store_file import find_header_fault
from densefeed.system.errors import UserError
from densefeed.tools import export_labels, pack_dataset
from densefeed.tools.relabel_imagenet import Labeling, main

from ..stores import write_store

OWN = """
import torch
from torch import nn

class Own(nn.Module):
    mean, std, interpolation = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), "bilinear"
    def __init__(self, classes, side):
        super().__init__()
        torch.manual_seed(classes)
        self.num_classes, self.body = classes, nn.Conv2d(3, classes, side, side)
        nn.init.normal_(self.body.weight, std=0.12)
    def forward_token_logits(self, image):
        return self.body(image)

class Plain(nn.Module):
    mean, std, interpolation, num_classes = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), "bilinear", 3
    def forward_token_logits(self, image):
        return 4 * nn.functional.avg_pool2d(image, 8)

def seven(): return Own(7, 16)
def coarse(): return Own(5, 32)
def two(): return Own(2, 16)
def plain(): return Plain()
"""
# Classes 1, 4, 5 and 6 of seven, and 0, 2 and 4 of five, become none.
MAPS = {
    "seven.json": {"0": "cat", "2": "cat", "3": "dog"},
    "coarse.json": {"1": "dog", "3": "cat"},
    "two.json": {"0": "dog", "1": "cat"},
    "plain.json": {"0": "cat", "1": "dog"},
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change to a folder with teachers, class maps and six pictures of 64 x 64 pixels."""
    (tmp_path / "part_teachers.py").write_text(OWN)
    for name, pairs in MAPS.items():
        (tmp_path / name).write_text(json.dumps(pairs))
    for n in range(6):
        path = tmp_path / "data" / "train" / ("cat", "dog")[n % 2] / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cells = np.random.default_rng(n).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(cells.repeat(8, 0).repeat(8, 1)).save(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path)])
    yield tmp_path
    sys.modules.pop("part_teachers", None)


def label(here, *teachers, out="maps.h5", **options):
    options = dict(unmapped="keep", top_k=2, threads=1, device="cpu", batch=4) | options
    names = tuple(f"part_teachers:{name}" for name in teachers)
    maps = options.pop("class_map", tuple(f"{name}.json" for name in teachers))
    main(
        Labeling(
            data=here / "data",
            out=here / out,
            teacher=names,
            class_map=maps,
            input_size=(64,),
            **options,
        )
    )
    return ScoreMapStore(here / out)


def score(here, name, classes, flip=False):
    """Return the softmax over all classes of the teacher, float64 `[N, S, S, classes]`, and the
    images.
    """
    import part_teachers

    images = Images(here / "data", split="train")
    pixels = np.stack([np.asarray(decode(images.read(n), "")) for n in range(len(images))])
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        logits = getattr(part_teachers, name)().forward_token_logits(x.flip(3) if flip else x)
    logits = (logits.flip(3) if flip else logits).permute(0, 2, 3, 1).double()
    assert logits.shape[3] == classes
    return logits.softmax(-1).numpy()


def of_data(p, name):
    """Add the probabilities of classes that become one: cat, dog."""
    merged = np.zeros((*p.shape[:3], 2))
    for theirs, ours in MAPS[f"{name}.json"].items():
        merged[..., ["cat", "dog"].index(ours)] += p[..., int(theirs)]
    return merged


def stored(store, num_classes=2):
    """Return exp(logit - lse) by class, `[N, S, S, K]`."""
    maps = store.rows(np.arange(len(store)))
    p = np.zeros((*maps.logit.shape[:3], num_classes))
    named = np.exp(maps.logit.astype(float) - maps.lse.astype(float)[..., None])
    np.put_along_axis(p, maps.cls.astype(int), named, -1)
    return p


# Logits and logsumexps of up to 8 are rounded to 11 bits each: 2 * 8 / 2**12.
NEAR = dict(rtol=0, atol=4e-3)


@pytest.mark.parametrize("form", ["raw", "lossless"])
def test_outside_probabilities_are_those_of_all_classes(here, form):
    store = label(here, "seven", form=form)
    want = of_data(score(here, "seven", 7), "seven")
    np.testing.assert_allclose(stored(store), want, **NEAR)
    # The map leaves most of the probability, and not the same in every cell.
    assert want.sum(-1).mean() < 0.7
    assert np.ptp(want.sum(-1)) > 0.3
    header = store.header
    assert (header.absent, header.num_classes, header.top_k) == ("background", 2, 2)
    assert "top 2 of 2 classes and background" in summary(store)
    assert not verify(store)


def test_outside_one_class_is_kept_of_two(here):
    store = label(here, "seven", top_k=1)
    want = of_data(score(here, "seven", 7), "seven")
    best = want == want.max(-1, keepdims=True)
    np.testing.assert_allclose(stored(store), want * best, **NEAR)


def test_outside_views_average_what_belongs_to_none_too(here):
    views = [of_data(score(here, "seven", 7, flip), "seven") for flip in (False, True)]
    store = label(here, "seven", tta_views=2)
    np.testing.assert_allclose(stored(store), np.mean(views, 0), **NEAR)


def test_outside_ensembles_average_what_belongs_to_none_too(here):
    """One of the members has the classes of the data, in another order, and one coarser cells."""
    seven = of_data(score(here, "seven", 7), "seven")
    two = of_data(score(here, "two", 2), "two")
    np.testing.assert_allclose(two.sum(-1), 1)
    store = label(here, "seven", "two")
    np.testing.assert_allclose(stored(store), (seven + two) / 2, **NEAR)
    plain = label(here, "seven", "two", out="plain.h5", class_map=("seven.json", "-"))
    by_order = (seven + score(here, "two", 2)) / 2
    np.testing.assert_allclose(stored(plain), by_order, **NEAR)
    coarse = torch.from_numpy(of_data(score(here, "coarse", 5), "coarse")).permute(0, 3, 1, 2)
    finer = torch.nn.functional.interpolate(coarse, (4, 4), mode="bilinear").permute(0, 2, 3, 1)
    three = label(here, "seven", "coarse", out="three.h5")
    np.testing.assert_allclose(stored(three), (seven + finer.numpy()) / 2, **NEAR)


def test_outside_another_number_of_classes_is_refused(here):
    with pytest.raises(UserError, match=r"scores 7; choose a teacher of the same classes"):
        label(here, "seven", "seven", class_map=("-", "-"), unmapped="drop")
    with pytest.raises(UserError, match=r"seven.json [0-9a-f]{8} 2, part_teachers:seven 7\)"):
        label(here, "seven", "seven", class_map=("seven.json", "-"))


def test_outside_a_map_of_every_class_gives_drops_numbers(here):
    kept = label(here, "two")
    dropped = label(here, "two", out="dropped.h5", unmapped="drop")
    rows = np.arange(len(kept))
    for one, other in zip(kept.rows(rows), dropped.rows(rows), strict=True):
        np.testing.assert_array_equal(one, other)
    assert kept.header == replace(dropped.header, absent="background")


def test_outside_a_drop_is_not_resumed_with_keep(here):
    for first, then, said in (
        ("drop", "keep", r"absent \(tail, not background\)"),
        ("keep", "drop", r"absent \(background, not tail\)"),
    ):
        label(here, "seven", out=first, unmapped=first)
        with pytest.raises(UserError, match=rf"{first}.*was started with another {said}"):
            label(here, "seven", out=first, unmapped=then)
    names = ["cat", "dog"]
    arguments = ["part_teachers:seven"], (), (64,), ("seven.json",), names, "squash", 1, 1
    assert load_teacher(*arguments)[1] != load_teacher(*arguments, keep_unmapped=True)[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(class_map=()), "--unmapped keep needs a --class-map; add it"),
        (dict(class_map=("-",)), "--unmapped keep needs a --class-map; add it"),
        (dict(absent="zero-logit"), "--absent zero-logit does not; remove one of them"),
    ],
)
def test_outside_keep_is_refused_without_probabilities_to_keep(here, options, said):
    with pytest.raises(UserError, match=said):
        label(here, "seven", **options)
    assert not (here / "maps.h5").exists()


def test_outside_a_logit_of_no_class_that_is_nan_is_refused(here):
    (here / "part_teachers.py").write_text(
        OWN + "def nan():\n    model = Own(7, 16)\n    model.body.bias.data[5] = float('nan')\n"
        "    return model\n"
    )
    with pytest.raises(UserError, match=r"scores of .* are NaN; check its weights"):
        label(here, "nan", class_map=("seven.json",))


def test_outside_dropping_writes_what_it_always_wrote(here):
    """The digest is of version 0.1 before there was --unmapped."""
    for n in (4, 5):
        next((here / "data").rglob(f"{n}.png")).unlink()
    (here / "my_golden.py").write_text(OWN)
    (here / "map.json").write_text(json.dumps(MAPS["plain.json"]))
    main(
        Labeling(
            data=here / "data",
            out=here / "golden.h5",
            teacher=("my_golden:plain",),
            class_map=("map.json",),
            input_size=(64,),
            top_k=2,
            threads=1,
            device="cpu",
        )
    )
    store = ScoreMapStore(here / "golden.h5")
    maps = store.rows(np.arange(4))
    # The fingerprint covers sizes of files, which depend on the version of zlib.
    digest = hashlib.sha256(replace(store.header, fingerprint="").to_json().encode())
    for part in (maps.logit, maps.cls, maps.window):
        digest.update(part.tobytes())
    assert digest.hexdigest() == "5851106bd52f233472b7e77825289f891676335e72709da4808af270806c2cd0"
    lse = np.logaddexp(*np.moveaxis(maps.logit.astype(float), -1, 0))
    np.testing.assert_allclose(maps.lse, lse, rtol=1e-3)


# ---------------------------------------------------------------------------------- stores of it


@pytest.fixture
def half(here, random_maps):
    """A store of 6 maps of 3 x 3 cells of both classes, and its maps.

    Cells of the first column show the label with 0.9, those of the others the other class with
    0.2 and nothing else.
    """
    images = Images(here / "data", split="train")
    p = np.zeros((6, 3, 3, 2))
    p[..., 0] = [0.9, 0.2, 0.2]
    p[..., 1] = [0.05, 0.01, 0.01]
    cls = np.zeros((6, 3, 3, 2), np.uint16)
    cls[..., 0] = images.labels[:, None, None]
    cls[..., 1:, 0] = 1 - images.labels[:, None, None]
    cls[..., 1] = 1 - cls[..., 0]
    # Without a difference between rows they would share a map.
    p *= 1 - np.arange(6)[:, None, None, None] / 1000
    lse = np.full((6, 3, 3), 5, np.float16)
    window = np.tile(np.float32([0, 0, 1, 1]), (6, 1))
    maps = ScoreMaps((np.log(p) + 5).astype(np.float16), cls, lse, window)
    path = write_store(here / "half.h5", images, maps, 2, absent="background")
    return SimpleNamespace(store=ScoreMapStore(path), images=images, maps=maps, p=p)


def test_outside_an_audit_states_the_mass_and_finds_no_fault(half):
    result = audit(half.store.path, half.images)
    (check,) = [check for check in result.checks if check.name == "background"]
    assert check.verdict == "sound"
    # (0.95 + 2 * 0.21) / 3, less 0.25 % on average.
    assert "together is 45.6 % on average, and less than half in 66.7 % of the cells" in (
        check.evidence
    )
    assert not result.faults()
    figures = json.loads(json.dumps(result.to_dict()))
    assert figures["background"]["mass"] == pytest.approx(0.4556, abs=1e-3)
    assert figures["background"]["mostly_none"] == pytest.approx(2 / 3)
    # The entropy is that of the classes alone: (0.9, 0.05) / 0.95 and (0.2, 0.01) / 0.21.
    parts = [np.array([0.9, 0.05]) / 0.95, *[np.array([0.2, 0.01]) / 0.21] * 2]
    entropy = np.mean([-(part * np.log(part)).sum() for part in parts])
    assert figures["entropy"]["mean"] == pytest.approx(entropy, abs=2e-3)


def test_outside_the_accuracy_weighs_cells_by_their_mass(half, capsys):
    """One cell of three names the label, with more mass than the two others have together."""
    assert measure_accuracy(half.store) == 1
    print_accuracy(half.store)
    assert "100.0 %" in capsys.readouterr().out


def test_outside_a_compact_store_keeps_the_mass(half, tmp_path):
    small = convert(half.store, tmp_path / "small.h5", "compact")
    np.testing.assert_allclose(
        cell_targets(small.rows(np.arange(6)), 2, "background")[0], half.p, rtol=0, atol=4e-3
    )
    assert small.header.absent == "background"
    assert not verify(small)
    assert 0 < small.error.variation_max < 8e-3
    # A cell that loses half of its mass has another target.
    error, fewer = ErrorSum(2, "background"), half.maps._replace(lse=half.maps.lse + np.log(2))
    error.add(half.maps, fewer._replace(lse=fewer.lse.astype(np.float16)))
    assert error.result().variation_max == pytest.approx(0.95 / 2, abs=3e-3)


def test_outside_other_commands_keep_the_value(half, tmp_path, capsys):
    chosen = select(half.store, half.images, tmp_path / "selected.h5")
    assert chosen.header.absent == "background"
    pack_dataset.main(
        pack_dataset.Packing(data=half.images.root, out=tmp_path / "t.beton", maps=half.store.path)
    )
    assert FfcvSource(tmp_path / "t.beton").score_maps.absent == "background"
    capsys.readouterr()
    export_labels.main(export_labels.ExportLabels(maps=half.store.path, out=tmp_path / "pt"))
    said = " ".join(capsys.readouterr().out.split())
    assert "this store gives what the others leave to no class of the data" in said


def test_outside_an_unknown_meaning_is_refused_by_name(half):
    values = json.loads(half.store.header.to_json())
    assert find_header_fault(values) is None
    assert find_header_fault(values | {"absent": "foreground"}) == (
        "absent is 'foreground', but must be one of tail, zero-logit, background"
    )
    # A reader without the third value has this sentence with two, and the version stays.
    assert values["version"] == 1


def test_outside_more_than_everything_is_still_a_fault(half, tmp_path):
    maps = half.maps._replace(lse=(half.maps.lse - 1).astype(np.float16))
    path = write_store(tmp_path / "over.h5", half.images, maps, 2, absent="background")
    assert "probabilities that sum to more than 1" in str(verify(ScoreMapStore(path)))
    with pytest.raises(UserError, match="values"):
        raise_on_faults(audit(path), path, "see")

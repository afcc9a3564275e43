"""The audit: a fault of each kind is planted and must be found; the store without it must pass.

The reference for orientation, coverage and rows is a small network trained here on digit scenes
(seconds), which made the maps of the store, or another one that never saw those maps.
SOAK_ORIENTATIONS sets the number of planted orientations (`make soak`).
"""

import io
import itertools
import json
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from densefeed.relabel import audit as auditing
from densefeed.relabel.audit import audit
from densefeed.relabel.checks.images import neighbors
from densefeed.relabel.checks.outcome import Check
from densefeed.relabel.checks.reference import check_orientation
from densefeed.relabel.checks.rows import are_probabilities, share_sums
from densefeed.relabel.reference_match import (
    ORIENTATIONS,
    choose_best,
    find_layout,
    look,
    orient,
    upright,
)
from densefeed.storage.images import Images
from densefeed.storage.maintenance import convert
from densefeed.storage.packs import label_rows
from densefeed.storage.row_codecs import ScoreMaps
from densefeed.storage.score_maps import ScoreMapStore, ScoreMapWriter
from densefeed.storage.store_file import StoreFile
from densefeed.system.errors import UserError

from ..runs import label_images

CASES = int(os.environ.get("SOAK_ORIENTATIONS", 8))
SQUASH, CENTER = "squash", "center-crop"


def verdicts(result):
    return {check.name: check.verdict for check in result.checks}


def find_check(result, name):
    (found,) = [check for check in result.checks if check.name == name]
    return found


def alarms(result):
    return [check for check in result.checks if check.verdict in ("fault", "warning")]


@pytest.fixture(scope="session")
def clean(located, tmp_path_factory):
    """Label the scenes with the teacher, every class kept: the store, its images and its maps."""
    images = Images(located.scenes)
    path = tmp_path_factory.mktemp("clean") / "maps.h5"
    store = label_images(
        images, located.teachers(0)[SQUASH], "t", path, top_k=10, batch=64, threads=2, absent="tail"
    )
    return SimpleNamespace(
        store=store, images=images, maps=store.rows(np.arange(len(store))), count=len(store)
    )


def plant(clean, path, maps=None, labels=None, **header):
    """Write the clean store with other maps, labels or header."""
    labels = clean.images.labels if labels is None else labels
    writer = ScoreMapWriter(path, replace(clean.store.header, **header), clean.images.paths, labels)
    writer.write(np.arange(clean.count), maps or clean.maps)
    writer.finish()
    return path


def take_maps(clean, rows):
    """Store at each row the map of another row, given in `rows`; windows stay."""
    return ScoreMaps(*(part[rows] for part in clean.maps[:3]), clean.maps.window)


def orient_all(maps, orientation):
    """Bring every upright map into an orientation."""
    parts = (np.stack([orient(row, orientation) for row in part]) for part in maps[:3])
    return ScoreMaps(*parts, maps.window)


# ------------------------------------------------------------------------------------- clean stores


@pytest.mark.one_in(6)
@pytest.mark.parametrize("form", ["raw", "compact", "lossless"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_clean_store_raises_no_alarm(clean, located, tmp_path, form, which):
    """In each form, compared with the teacher that made it and with another model.

    Nothing is left unchecked.
    """
    path = clean.store.path
    if form != "raw":
        path = convert(clean.store, tmp_path / "maps.h5", form).path
    result = audit(path, clean.images, located.teachers(which), 200)
    assert set(verdicts(result).values()) == {"sound"}, alarms(result)
    assert json.loads(json.dumps(result.to_dict()))["rows"] == clean.count


def test_without_images_and_reference_some_checks_are_unchecked(clean):
    result = audit(clean.store.path)
    assert not alarms(result)
    assert {name for name, verdict in verdicts(result).items() if verdict == "unchecked"} == {
        "images",
        "orientation",
        "coverage",
        "rows",
    }
    assert "none was given" in find_check(result, "orientation").evidence


@pytest.mark.slow
def test_a_reference_that_does_not_locate_objects_gives_no_verdict(clean, located):
    """Random weights give no alarm."""
    for seed in range(4):
        result = audit(clean.store.path, clean.images, located.untrained(seed), 200)
        assert not result.faults()
        assert verdicts(result)["orientation"] == verdicts(result)["coverage"] == "unchecked"


def test_few_images_give_no_verdict(clean, located):
    result = audit(clean.store.path, clean.images, located.teachers(1), 20)
    assert verdicts(result)["orientation"] == verdicts(result)["rows"] == "unchecked"
    assert not result.faults()


def test_a_large_store_is_sampled(clean, monkeypatch):
    monkeypatch.setattr(auditing, "ALL_ROWS", clean.count - 1)
    monkeypatch.setattr(auditing, "SAMPLED_ROWS", 150)
    assert audit(clean.store.path).figures["rows_read"] == 150
    assert audit(clean.store.path, every_row=True).figures["rows_read"] == clean.count


# ----------------------------------------------------------------------------------------- geometry


def test_orientations_are_the_eight_symmetries_of_the_square():
    """`orient` equals Pillow's transpositions by name, and `upright` inverts each."""
    pixels = np.arange(9, dtype=np.uint8).reshape(3, 3)
    T = Image.Transpose
    names = {
        0: None,
        1: T.FLIP_LEFT_RIGHT,
        2: T.ROTATE_180,
        3: T.FLIP_TOP_BOTTOM,
        4: T.TRANSPOSE,
        5: T.ROTATE_270,
        6: T.TRANSVERSE,
        7: T.ROTATE_90,
    }
    for number, method in names.items():
        image = Image.fromarray(pixels)
        want = np.asarray(image if method is None else image.transpose(method))
        np.testing.assert_array_equal(orient(pixels, number), want, ORIENTATIONS[number])
        np.testing.assert_array_equal(upright(orient(pixels, number), number), pixels)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("orientation", range(1, 8))
def test_oriented_maps_are_a_fault_that_names_the_orientation(
    clean, located, tmp_path, orientation
):
    path = plant(clean, tmp_path / "maps.h5", orient_all(clean.maps, orientation))
    result = audit(path, clean.images, located.teachers(1), 200)
    (fault,) = alarms(result)
    assert (fault.name, fault.verdict) == ("orientation", "fault")
    assert f"if they are {ORIENTATIONS[orientation]};" in fault.evidence
    assert ("--axes column-row" in fault.remedy) == (orientation == 4)


def test_outside_images_mirrored_after_labeling_are_found_by_the_reference(
    clean, located, tmp_path
):
    """The fingerprint alone would not show it for files that keep their sizes, such as BMP."""
    root = shutil.copytree(clean.images.root, tmp_path / "images")
    for path in root.rglob("*.*"):
        with Image.open(path) as image:
            mirrored = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        mirrored.save(path)
    result = audit(clean.store.path, Images(root), located.teachers(1), 200)
    faults = {fault.name: fault.evidence for fault in alarms(result)}
    assert "if they are mirrored left-right;" in faults["orientation"]


def test_the_next_best_orientation_has_the_next_greatest_correlation(clean, located):
    """It is the second of the page's table, also where another orientation has the smaller t."""
    result = audit(clean.store.path, clean.images, located.teachers(1), 200)
    table = sorted(
        result.figures["reference"]["correlation"][SQUASH].items(), key=lambda item: -item[1]
    )
    assert (
        f"; the next best is {table[1][0]} at {table[1][1]:.3f} ("
        in find_check(result, "orientation").evidence
    )
    scores = np.random.default_rng(0).normal(
        [0.9, 0.5, 0.4] + [0.0] * 5, [0.01, 0.01, 1.0] + [0.01] * 5, (100, 8)
    )
    choice = choose_best(scores)
    assert (choice.best, choice.runner_up(), int(choice.t_over.argmin())) == (0, 1, 2)
    match = SimpleNamespace(own=scores[:, None], best=lambda: (0, 0), is_located=lambda: True)
    verdict, evidence = check_orientation(match, foreign=False)
    assert f"the next best is mirrored left-right at {choice.mean[1]:.3f} " in evidence
    smallest = f"t is at least {choice.t_over[2]:.1f} against every other orientation, 100 images"
    assert smallest in evidence
    assert verdict == "sound"
    # The second mean is still elsewhere, but one orientation is too close to decide.
    scores[:, 2] += 0.42
    scores[:, 1] = scores[:, 0] - 0.06
    assert check_orientation(match, foreign=False)[0] == "unchecked"


def test_planted_orientations(clean, located):
    """Random images, each orientation in turn, and a reference that is not the teacher.

    At least 99 of 100 orientations are named, none is named wrongly, and no clean map is a fault.
    """
    rng, right, wrong, alarmed = np.random.default_rng(0), 0, [], []
    for case in range(CASES):
        orientation = case % 8
        some = np.sort(rng.choice(clean.count, 280, replace=False))
        rows = neighbors(clean.store.labels, some, 200)
        match = look(
            lambda ids, o=orientation: orient_all(
                ScoreMaps(*(part[ids] for part in clean.maps)), o
            ),
            clean.store.header,
            clean.images,
            np.arange(clean.count),
            rows,
            {SQUASH: located.teachers(1)[SQUASH]},
            2,
        )
        check = Check("orientation", *check_orientation(match, foreign=False))
        if orientation == 0:
            right += check.verdict == "sound"
            alarmed += [case] * (check.verdict in ("fault", "warning"))
        else:
            named = check.verdict == "fault" and "could also be" not in check.evidence
            right += named and f"if they are {ORIENTATIONS[orientation]};" in check.evidence
            wrong += [case] * (
                named and f"if they are {ORIENTATIONS[orientation]};" not in check.evidence
            )
    print(
        f"{right} of {CASES} planted orientations named correctly, {len(wrong)} wrongly, "
        f"{len(alarmed)} false alarms"
    )
    assert right >= 0.99 * CASES
    assert not wrong
    assert not alarmed


@pytest.mark.parametrize("truth", [SQUASH, CENTER])
def test_maps_of_another_part_of_the_image_are_a_fault(clean, located, tmp_path, truth):
    """Maps of the part `truth` are declared as it or as the other; half of the scenes are wide."""
    other = {SQUASH: CENTER, CENTER: SQUASH}
    teachers = located.teachers(0)
    options = dict(top_k=10, batch=64, threads=2, absent="tail")
    made = {
        g: label_images(clean.images, teachers[g], "t", tmp_path / f"{g}.h5", **options)
        for g in other
    }
    assert not alarms(audit(made[truth].path, clean.images, located.teachers(1), 200))
    maps = {g: store.rows(np.arange(clean.count)) for g, store in made.items()}
    taken = maps[truth]._replace(window=maps[other[truth]].window)
    path = plant(clean, tmp_path / "maps.h5", taken, geometry=other[truth])
    (fault,) = alarms(audit(path, clean.images, located.teachers(1), 200))
    assert (fault.name, fault.verdict) == ("coverage", "fault")
    assert f"--footprint {truth}" in fault.remedy


def test_windows_of_another_geometry_are_a_fault(clean, tmp_path):
    path = plant(clean, tmp_path / "maps.h5", geometry=CENTER)
    (fault,) = alarms(audit(path, clean.images))
    assert (fault.name, fault.verdict) == ("windows", "fault")
    assert "(0.0, 0.0, 1.0, 1.0), not (0.0, 0.125, 1.0, 0.875)" in fault.evidence


@pytest.mark.slow
def test_the_layout_of_a_pack_is_found(clean, located):
    """Both orders of axes and both footprints are found.

    A mirrored pack is refused, and so is one whose layout the reference does not show.
    """
    rows = neighbors(clean.store.labels, np.arange(clean.count), 200)

    def match(orientation, references, made=SQUASH):
        maps = clean.maps if made == SQUASH else center
        read = lambda ids: orient_all(ScoreMaps(*(part[ids] for part in maps)), orientation)  # noqa: E731
        return look(
            read, clean.store.header, clean.images, np.arange(clean.count), rows, references, 2
        )

    pixels = [
        located.teachers(0)[CENTER].prepare(Image.open(io.BytesIO(clean.images.read(n))))[0]
        for n in range(clean.count)
    ]
    logits = located.teachers(0)[CENTER](torch.from_numpy(np.stack(pixels)))
    top = logits.topk(10, dim=-1)
    values, lse = top.values.half().numpy(), logits.logsumexp(-1).half().numpy()
    center = ScoreMaps(values, top.indices.numpy().astype(np.uint16), lse, clean.maps.window)
    for orientation, axes in ((0, "row-column"), (4, "column-row")):
        for made in (SQUASH, CENTER):
            assert find_layout(match(orientation, located.teachers(1), made), "pack") == (
                axes,
                made,
            )
    assert find_layout(match(4, located.teachers(1)), "pack", CENTER) == ("column-row", CENTER)
    with pytest.raises(
        UserError, match="pack: these maps are mirrored left-right, which no --axes corrects"
    ):
        find_layout(match(1, located.teachers(1)), "pack")
    with pytest.raises(UserError, match="does not show how these maps are oriented"):
        find_layout(match(0, located.untrained(0)), "pack")


def test_a_reference_of_other_classes_is_refused(clean, located):
    with pytest.raises(UserError, match="the reference scores 7 classes, the maps have 10"):
        audit(clean.store.path, clean.images, located.untrained(0, classes=7), 40)


# --------------------------------------------------------------------------------- rows and classes


def test_shuffled_rows_are_a_fault(clean, located, tmp_path):
    """Across classes the labels show it; within a class only the reference that made the maps."""
    rng = np.random.default_rng(0)
    mixed = rng.permutation(clean.count)
    path = plant(clean, tmp_path / "all.h5", take_maps(clean, mixed))
    assert [fault.name for fault in audit(path).faults()] == ["labels"]
    for references in (None, located.teachers(0), located.teachers(1)):
        result = audit(path, clean.images, references, 200)
        assert "labels" in [fault.name for fault in result.faults()]
        names = find_check(result, "class list")
        assert (names.verdict, "by chance it would be 10" in names.evidence) == ("unchecked", True)
        if references:
            for name in ("orientation", "coverage"):
                check = find_check(result, name)
                assert (check.verdict, check.evidence.split(": ")[-1]) == (
                    "unchecked",
                    "the maps do not fit the content of these images, see the check of rows",
                )
            assert verdicts(result)["rows"] in ("fault", "warning")

    labels = clean.images.labels
    within = np.arange(clean.count)
    for c in range(10):
        within[labels == c] = np.roll(within[labels == c], 1)
    path = plant(clean, tmp_path / "within.h5", take_maps(clean, within))
    assert not alarms(audit(path))  # nothing else can show it
    result = audit(path, clean.images, located.teachers(0), 200)
    assert [fault.name for fault in result.faults()] == ["rows"]
    assert "the store's own teacher" in find_check(result, "rows").evidence
    # As a GPU labels by default.
    name = f"{clean.store.header.teacher} bf16"
    low = plant(clean, tmp_path / "low.h5", take_maps(clean, within), teacher=name)
    assert verdicts(audit(low, clean.images, located.teachers(0), 200))["rows"] == "fault"
    result = audit(path, clean.images, located.teachers(1), 200)
    assert verdicts(result)["rows"] == "warning"
    assert verdicts(result)["orientation"] == "unchecked"
    assert find_check(result, "orientation").evidence.endswith(
        "or the maps are of other images of the same classes"
    )


def test_a_few_maps_of_other_images_are_named_by_row(clean, located, tmp_path):
    some = np.arange(clean.count)
    some[100:110] = np.roll(some[100:110], 1)
    path = plant(clean, tmp_path / "maps.h5", take_maps(clean, some))
    result = audit(path, clean.images, located.teachers(0), clean.count)
    (fault,) = result.faults()
    assert fault.name == "rows"
    assert f"row 100 ({clean.images.paths[100]})" in fault.evidence


@pytest.mark.parametrize("moved", [(1, 2, 3, 4, 5, 6, 7, 8, 9, 0), (0, 1, 2, 7, 4, 5, 6, 3, 8, 9)])
def test_a_permuted_class_list_is_a_fault(clean, located, tmp_path, moved):
    """All classes, or two exchanged; with and without a reference.

    Geometry is then unchecked.
    """
    maps = clean.maps._replace(cls=np.array(moved, np.uint16)[clean.maps.cls])
    path = plant(clean, tmp_path / "maps.h5", maps)
    for references in (None, located.teachers(1)):
        result = audit(path, clean.images, references, 200)
        (fault,) = alarms(result)
        assert fault.name == "class list"
        assert f"3 is called {moved[3]}" in fault.evidence
        assert verdicts(result)["orientation"] == "unchecked"


def test_outside_a_weak_teacher_is_no_other_class_list(clean, tmp_path):
    """It calls several classes by one name; another list has a name for each."""
    favorites = np.array((0, 1, 1, 1, 1, 1, 6, 7, 7, 7), np.uint16)
    path = plant(clean, tmp_path / "maps.h5", clean.maps._replace(cls=favorites[clean.maps.cls]))
    assert "class list" not in [check.name for check in alarms(audit(path, clean.images))]


def test_names_and_labels_are_compared_with_the_folder(clean, tmp_path):
    names = tuple(reversed(clean.store.header.class_names))
    (fault,) = alarms(audit(plant(clean, tmp_path / "names.h5", class_names=names), clean.images))
    assert (fault.name, fault.verdict) == ("class names", "fault")
    labels = np.where(np.arange(clean.count) == 5, 9, clean.images.labels)
    (fault,) = alarms(audit(plant(clean, tmp_path / "labels.h5", labels=labels), clean.images))
    assert fault.evidence.startswith("rows whose label is not that of their image: 1 (")
    (fault,) = alarms(
        audit(plant(clean, tmp_path / "files.h5", fingerprint="0" * 64), clean.images)
    )
    assert (fault.name, "fingerprint" in fault.evidence) == ("images", True)


def test_missing_rows_are_named(clean, tmp_path):
    """Rows not labeled, and images without a row."""
    path = plant(clean, tmp_path / "maps.h5")
    offsets = StoreFile(path).offsets
    with open(path, "r+b") as file:
        file.seek(offsets["done"] + 7)
        file.write(b"\0\0")
    (fault,) = audit(path, clean.images).faults()
    assert (fault.name, fault.evidence.split(" rows")[0]) == ("finished", f"2 of {clean.count:,}")
    assert clean.images.paths[7] in fault.evidence

    def without(rows):
        images = Images(clean.images.root)
        images.paths = [path for row, path in enumerate(images.paths) if row not in rows]
        images.labels = np.delete(images.labels, rows)
        return images

    (fault,) = alarms(audit(clean.store.path, without([3, 4])))
    assert (fault.name, fault.evidence.split(" have")[0]) == ("images", f"2 of {clean.count} rows")
    writer = ScoreMapWriter(
        tmp_path / "short.h5", clean.store.header, clean.images.paths[:-1], clean.images.labels[:-1]
    )
    writer.write(np.arange(clean.count - 1), ScoreMaps(*(part[:-1] for part in clean.maps)))
    writer.finish()
    (fault,) = alarms(audit(tmp_path / "short.h5", clean.images))
    assert (fault.name, fault.evidence.split(" have")[0]) == (
        "images",
        f"1 of {clean.count} images",
    )


# ------------------------------------------------------------------------------------------- values


def test_probabilities_stored_as_logits_are_a_fault(clean, tmp_path):
    logit = clean.maps.logit.astype(np.float64)
    p = np.exp(logit - clean.maps.lse.astype(np.float64)[..., None])
    lse = np.log(np.exp(p).sum(-1)).astype(np.float16)
    for absent in ("tail", "zero-logit"):
        path = plant(
            clean,
            tmp_path / f"{absent}.h5",
            ScoreMaps(p.astype(np.float16), clean.maps.cls, lse, clean.maps.window),
            absent=absent,
        )
        (fault,) = alarms(audit(path))
        assert (fault.name, fault.verdict) == ("logits", "fault")
        assert "these are probabilities" in fault.evidence
    small = convert(ScoreMapStore(tmp_path / "tail.h5"), tmp_path / "compact.h5", "compact")
    # Only the flatness remains of their logarithms.
    (warning,) = alarms(audit(small.path))
    assert (warning.name, warning.verdict) == ("logits", "warning")


def top_five(clean, p, lse):
    """Make maps with these numbers in place of five logits."""
    return ScoreMaps(
        p[..., :5].astype(np.float16),
        clean.maps.cls[..., :5].copy(),
        lse.astype(np.float16),
        clean.maps.window,
    )


def test_five_probabilities_of_rounded_logits_are_a_fault(clean, located, tmp_path):
    """Computed from float16 logits beyond 100, the sums of some cells pass 1 by more than 2 %.

    Some rows were labeled by their class.
    """
    logit = (clean.maps.logit * 8.0).astype(np.float32)  # up to 100 and more
    lse = np.log(np.exp(logit.astype(np.float64)).sum(-1)).astype(np.float16).astype(np.float64)
    p = np.exp(logit.astype(np.float16).astype(np.float64) - lse[..., None]).clip(0, 1)
    assert (p[..., :5].sum(-1) > 1.02).any()
    maps = top_five(clean, p, np.log(np.exp(p[..., :5]).sum(-1) + 5))
    filled = label_rows(clean.images.labels[:6], 10, clean.store.header.side, 5)
    for name in ("logit", "cls", "lse"):
        getattr(maps, name)[:6] = getattr(filled, name)
    path = plant(clean, tmp_path / "maps.h5", maps, top_k=5, absent="zero-logit")
    result = audit(path, clean.images, located.teachers(0), 200)
    (fault,) = alarms(result)
    assert (fault.name, "these are probabilities" in fault.evidence) == ("logits", True)
    for name in ("class list", "labels", "orientation", "coverage", "rows"):
        assert find_check(result, name)[1:3] == ("unchecked", auditing.LOGITS_FIRST)


def test_probabilities_beside_the_logsumexps_of_logits_are_a_fault(clean, tmp_path):
    """With absent = tail, the classes that are not named then are the likeliest.

    Where a logsumexp is small, probabilities pass 1.
    """
    p = np.exp(
        clean.maps.logit.astype(np.float64) - clean.maps.lse.astype(np.float64)[..., None]
    ).clip(0, 1)
    large = top_five(clean, p, clean.maps.lse + np.maximum(0, 3 - clean.maps.lse.min()))
    result = audit(plant(clean, tmp_path / "large.h5", large, top_k=5))
    (fault,) = alarms(result)
    assert (fault.name, verdicts(result)["class list"]) == ("logits", "unchecked")
    result = audit(
        plant(
            clean, tmp_path / "small.h5", top_five(clean, p, np.zeros_like(clean.maps.lse)), top_k=5
        )
    )
    assert [fault.name for fault in result.faults()] == ["values", "logits"]
    assert (
        find_check(result, "values").remedy
        == "Fix the fault of the logits first: these sums follow from it."
    )
    assert verdicts(result)["class list"] == "unchecked"


@pytest.mark.slow
def test_small_logits_are_not_taken_for_probabilities():
    """Logits of untrained teachers and probabilities, for 2 to 1,000 classes.

    The greatest logit is between 0.5 and 1, the least above 0. The probabilities are those of
    confident teachers and, of many classes, of less confident ones.
    """
    rng, tops = np.random.default_rng(0), {}

    def judged(numbers, classes):
        numbers = numbers.astype(np.float16).astype(np.float32)
        assert numbers.min() >= 0
        return are_probabilities(
            float(numbers.max()), share_sums(numbers, classes).mean(0), numbers.shape[-1]
        )

    for classes, k in (
        (2, 1),
        (2, 2),
        (3, 2),
        (10, 1),
        (10, 5),
        (20, 2),
        (100, 3),
        (1000, 2),
        (1000, 5),
    ):
        # Images differ, or cells, or both.
        spreads = ((1.0, 0.0), (1.0, 0.2), (0.2, 1.0), (0.0, 1.0))
        for number, (high, (image, cell)) in enumerate(
            itertools.product((0.5, 0.76, 0.9, 1.0), spreads)
        ):
            # Drawing 1,000 classes takes 0.2 s: each spread once.
            if classes < 1000 or number < len(spreads):
                drawn = image * rng.normal(size=(200, 1, 1, classes)) + cell * rng.normal(
                    size=(200, 6, 6, classes)
                )
                drawn = -np.sort(-np.partition(drawn, -k)[..., -k:], -1)
                tops[image, cell] = drawn - min(0, drawn.min())
            top = tops[image, cell]
            top = top * (high / top.max())
            assert not judged(top, classes), (classes, k, high, image, cell)
        # With few classes a cell, only confident teachers show where probabilities end.
        for sharp in (3, 10) if k > 3 else (10,):
            logit = rng.normal(size=(200, 6, 6, classes)) * sharp
            p = np.exp(logit - logit.max(-1, keepdims=True))
            assert judged(-np.sort(-p / p.sum(-1, keepdims=True), -1)[..., :k], classes), (
                classes,
                k,
                sharp,
            )


def test_logarithms_of_probabilities_are_logits_only_if_the_tail_is_known(clean, tmp_path):
    five = ScoreMaps(
        clean.maps.logit[..., :5], clean.maps.cls[..., :5], clean.maps.lse, clean.maps.window
    )
    log_p = five.logit.astype(np.float64) - five.lse.astype(np.float64)[..., None]
    # Because of roundings in the store some cells pass 1.
    log_p = (log_p - 0.05).clip(-60, 0).astype(np.float16)
    maps = five._replace(logit=log_p, lse=np.zeros_like(five.lse))
    assert not alarms(audit(plant(clean, tmp_path / "tail.h5", maps, top_k=5)))
    check = find_check(
        audit(plant(clean, tmp_path / "zero.h5", maps, top_k=5, absent="zero-logit")), "logits"
    )
    assert (check.verdict, "logarithms of probabilities" in check.evidence) == ("fault", True)


@pytest.mark.parametrize("rounded", [False, True])
def test_class_numbers_rounded_to_float16_are_a_fault(clean, tmp_path, rounded):
    """21,841 classes; the numbers of the digits are drawn from 2,049 on."""
    rng = np.random.default_rng(0)
    numbers = np.sort(rng.choice(np.arange(2049, 21841), 10, replace=False))
    many = numbers[clean.maps.cls]
    if rounded:
        many = many.astype(np.float16).astype(np.int64)
    path = plant(
        clean,
        tmp_path / "maps.h5",
        clean.maps._replace(cls=many.astype(np.uint16)),
        num_classes=21841,
    )
    check = find_check(audit(path), "class numbers")
    assert check.verdict == ("fault" if rounded else "sound")
    assert (
        "10 different classes above 2,048 are named, and 10 of them" in check.evidence
    ) == rounded


def test_bad_values_are_named_by_row(clean, tmp_path):
    logit = clean.maps.logit.copy()
    logit[3, 1, 2, 0] = np.nan
    logit[5, 0, 0, :2] = logit[5, 0, 0, 1::-1]
    path = plant(clean, tmp_path / "maps.h5", clean.maps._replace(logit=logit))
    offsets = StoreFile(path).offsets
    with open(path, "r+b") as file:
        file.seek(offsets["logit"] + 9 * logit[0].nbytes)
        file.write(b"\1\2\3")
    (fault,) = alarms(audit(path))
    assert fault.name == "values"
    for words in (
        "not finite (first: row 3",
        "do not descend (first: row 5",
        "a checksum that does not match (first: row 9",
    ):
        assert words in fault.evidence
    assert fault.evidence.startswith(f"3 of {clean.count:,} rows read are bad: 1 row with ")


def test_equal_maps_are_a_fault_unless_the_images_are_equal(clean, tmp_path):
    double = np.arange(clean.count)
    double[21] = 20
    maps = ScoreMaps(*(part[double] for part in clean.maps))
    path = plant(clean, tmp_path / "maps.h5", maps)
    (warning,) = alarms(audit(path))
    assert (warning.name, warning.verdict) == ("duplicates", "warning")
    (fault,) = alarms(audit(path, clean.images))
    assert (fault.name, fault.verdict) == ("duplicates", "fault")
    assert "row 20" in fault.evidence
    assert "row 21" in fault.evidence
    images = Images(clean.images.root)
    images.read = lambda index: clean.images.read(20 if index == 21 else index)
    assert verdicts(audit(path, images))["duplicates"] == "sound"
    everywhere = take_maps(clean, np.zeros(clean.count, int))
    result = audit(plant(clean, tmp_path / "same.h5", everywhere))
    assert verdicts(result)["duplicates"] == "fault"


def test_maps_that_name_only_the_label_are_no_duplicates(clean, tmp_path):
    rows = label_rows(clean.images.labels, 10, clean.store.header.side, 10)
    result = audit(plant(clean, tmp_path / "maps.h5", rows, absent="zero-logit"), clean.images)
    assert not alarms(result)
    assert "name only the label" in find_check(result, "duplicates").evidence
    assert result.figures["same_in_every_cell"] == clean.count

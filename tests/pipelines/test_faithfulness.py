"""What cached labels cost, of a teacher whose labels of a crop are known from its colors."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.special
import torch
from PIL import Image
from torchvision.ops import roi_align

from densefeed.pipelines import faithfulness
from densefeed.pipelines.faithfulness import (
    MEASURES,
    Crops,
    compare_image,
    draw_crops,
    measure_crops,
    summarize,
)
from densefeed.relabel.class_map import ClassMap, name_unmapped
from densefeed.relabel.teacher import Teacher
from densefeed.storage.images import Images
from densefeed.storage.score_maps import ScoreMapStore, ScoreMapWriter

from ..runs import label_images

SIDE, CELL = 64, 8
CONFIG = {"mean": (0.5,) * 3, "std": (0.25,) * 3, "interpolation": "bilinear"}
# Red, green, blue, and two classes that no picture here shows.
WEIGHTS = np.array([[3, -1, -1], [-1, 3, -1], [-1, -1, 3], [-1, -1, -1], [1, 1, -2]], np.float64)
COLORS = {"red": (230, 25, 25), "green": (25, 230, 25), "blue": (25, 25, 230)}


class ColorCells(torch.nn.Module):
    """Scores each cell of 8 x 8 pixels by its mean color."""

    num_classes = len(WEIGHTS)

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Conv2d(3, len(WEIGHTS), 1, bias=False)
        self.head.weight.data = torch.from_numpy(WEIGHTS).float()[..., None, None]

    def forward_token_logits(self, image_NCHW):
        return self.head(torch.nn.functional.avg_pool2d(image_NCHW, CELL))


def make_teacher(geometry: str = "squash", **how: object) -> Teacher:
    return Teacher(ColorCells(), SIDE, geometry, CONFIG, **how).eval()


def probabilities(pixels_HW3: np.ndarray) -> np.ndarray:
    """The teacher's distributions of a picture of 64 x 64, float64 `[8, 8, K]`, in NumPy."""
    cells = (pixels_HW3 / 255 - 0.5) / 0.25
    cells = cells.reshape(SIDE // CELL, CELL, SIDE // CELL, CELL, 3).mean((1, 3))
    return scipy.special.softmax(cells @ WEIGHTS.T, -1)


@pytest.fixture
def label(tmp_path):
    """Write images as PNG files and label them; return the images and the store."""

    def make(pictures: list[np.ndarray], teacher: Teacher, name: str = "t", **how: object):
        for number, picture in enumerate(pictures):
            # As many class folders as the teacher has classes.
            folder = tmp_path / "images" / f"c{number % len(WEIGHTS)}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(folder / f"{number:03}.png")
        images = Images(tmp_path / "images")
        options = {"top_k": 3, "batch": 8, "threads": 1, "absent": "tail"} | how
        return images, label_images(images, teacher, name, tmp_path / "maps.h5", **options)

    return make


def measure(images: Images, store: ScoreMapStore, teacher: Teacher, count: int = 6) -> dict:
    rows = np.arange(len(images))
    return measure_crops(store, images, rows, rows, teacher, count, 2)


def find(figures: dict, name: str) -> dict:
    (group,) = [group for group in figures["groups"] if group["crops_are"] == name]
    return group


def flat(color: str, height: int = 96, width: int = 120) -> np.ndarray:
    return np.full((height, width, 3), COLORS[color], np.uint8)


def halves(left: str, right: str, height: int = 96, width: int = 120) -> np.ndarray:
    picture = flat(left, height, width)
    picture[:, width // 2 :] = COLORS[right]
    return picture


def test_flat_images_have_the_same_labels_either_way(label):
    pictures = [flat(color) for color in ("red", "green", "blue", "red", "green")]
    teacher = make_teacher()
    images, store = label(pictures, teacher)
    figures = measure(images, store, teacher)
    for group in figures["groups"]:
        assert group["agreement"]["mean"] == 1
        # float16 keeps a logit of 11 to 0.004, and a probability of a cell as exactly.
        assert 0 <= group["divergence"]["mean"] < 1e-4
        assert group["correlation"]["mean"] == pytest.approx(1, abs=1e-4)
    assert (figures["images"], figures["crops_per_image"], figures["input_size"]) == (5, 6, SIDE)
    total = find(figures, "all")
    assert (total["images"], total["crops"]) == (5, 30)
    for by in ("area", "width / height", "mirrored"):
        assert sum(g["crops"] for g in figures["groups"] if g["by"] == by) == 30
    text = figures["sentence"]
    assert "on all crops on 100 % (95 % interval 100 to 100 %, KL 0.00)" in text
    assert "the stored map and the teacher on the crop agree on" in text
    # Another model scores other weights, and the sentence says that it is another.
    other = make_teacher()
    other.model.head.weight.data *= 0.5
    text = measure(images, store, other)["sentence"]
    assert "the stored map and the reference on the crop agree on" in text
    assert text.endswith("; the reference is not recognized as the maps' teacher")


def rewrite(store: ScoreMapStore, path: Path, change: Callable) -> ScoreMapStore:
    """Write the store with each map changed by `change`, of arrays `[S, S, ...]`."""
    maps = store.rows(np.arange(len(store)))
    parts = {
        name: np.stack([change(row) for row in getattr(maps, name)])
        for name in ("logit", "cls", "lse")
    }
    writer = ScoreMapWriter(path, store.header, store.paths(), store.labels)
    writer.write(np.arange(len(store)), maps._replace(**parts))
    writer.finish()
    return ScoreMapStore(path)


def test_maps_of_another_place_disagree(label, tmp_path):
    teacher = make_teacher()
    pictures = [halves(*pair) for pair in (("red", "green"), ("blue", "red"), ("green", "blue"))]
    images, store = label(pictures * 4, teacher)
    right = find(measure(images, store, teacher), "all")
    assert right["agreement"]["mean"] > 0.95
    # Shifted by half of the image, the halves of two colors are exchanged, as when mirrored.
    changes = (lambda row: row[:, ::-1]), (lambda row: np.roll(row, 4, axis=1))
    for number, change in enumerate(changes):
        other = rewrite(store, tmp_path / f"{number}.h5", change)
        wrong = find(measure(images, other, teacher), "all")
        assert wrong["agreement"]["mean"] < 0.2
        assert wrong["divergence"]["mean"] > 10 * right["divergence"]["mean"]


@pytest.mark.parametrize("absent", ["tail", "zero-logit"])
def test_the_numbers_of_a_crop_are_those_of_float64(label, absent):
    """Bilinear samples by torchvision's RoIAlign, the teacher and the measures by NumPy."""
    picture = np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)
    picture = np.asarray(Image.fromarray(picture).resize((120, 96), Image.Resampling.BICUBIC))
    teacher = make_teacher()
    images, store = label([picture] * 5, teacher, absent=absent)
    drawn = draw_crops(images, 0, 8, teacher)
    assert drawn.flip.any()
    assert not drawn.flip.all()
    weights, sums = compare_image(store, 0, drawn, teacher)
    logit, cls, lse, _ = (part[0] for part in store.rows(np.array([0])))
    K, cells = len(WEIGHTS), len(lse)
    dense = np.zeros((cells, cells, K))
    if absent == "tail":
        named = np.exp(logit.astype(np.float64) - lse.astype(np.float64)[..., None])
        # Rounded to float16, three probabilities can sum to more than 1.
        named /= np.maximum(named.sum(-1, keepdims=True), 1)
        dense += ((1 - named.sum(-1)) / (K - 3))[..., None]
    else:
        named = logit.astype(np.float64)
    np.put_along_axis(dense, cls.astype(int), named, -1)
    palette, least = np.unique(cls).astype(int), 1e-3
    assert len(palette) > 2
    for n, (top, left, height, width) in enumerate(drawn.box_tlhw.tolist()):
        box = left / 120 * cells, top / 96 * cells
        box += (left + width) / 120 * cells, (top + height) / 96 * cells
        pooled = roi_align(
            torch.from_numpy(dense).permute(2, 0, 1)[None],
            [torch.tensor([box], dtype=torch.float64)],
            cells,
            aligned=True,
        )
        q = pooled[0].permute(1, 2, 0).numpy()
        cut = Image.fromarray(picture).crop((left, top, left + width, top + height))
        p = probabilities(np.asarray(cut.resize((SIDE, SIDE), Image.Resampling.BILINEAR)))
        # The label of a mirrored crop is mirrored; the teacher's cells do not depend on neighbors.
        q, p = q.reshape(-1, K), p.reshape(-1, K)
        q = scipy.special.softmax(q, -1) if absent == "zero-logit" else q
        agree = q.argmax(-1) == p.argmax(-1)
        p, q = (
            np.concatenate([x[:, palette], 1 - x[:, palette].sum(-1, keepdims=True)], 1)
            for x in (p, q)
        )
        p, q = ((1 - least) * x + least / (len(palette) + 1) for x in (p, q))
        divergence = scipy.special.rel_entr(p, q).sum(-1)
        correlation = [np.corrcoef(a, b)[0, 1] for a, b in zip(p, q, strict=True)]
        assert weights[n] == pytest.approx(cells**2)
        want = [agree.mean(), divergence.mean(), np.mean(correlation)]
        assert sums[n] / weights[n] == pytest.approx(want, abs=1e-5)


def test_outside_maps_that_keep_unmapped_classes_are_compared(label):
    """Two of five classes are of the data; shares, weights and labels by NumPy and RoIAlign."""
    picture = np.random.default_rng(1).integers(0, 256, (6, 5, 3), np.uint8)
    picture = np.asarray(Image.fromarray(picture).resize((120, 96), Image.Resampling.BICUBIC))
    places = torch.arange(2)
    two = ClassMap(places, places, 2)
    maker = make_teacher(class_map=name_unmapped(two, len(WEIGHTS)), unmapped=True)
    images, store = label([picture] * 2, maker, top_k=2, absent="background")
    reference = make_teacher(class_map=two)
    drawn = draw_crops(images, 0, 8, reference)
    weights, sums = compare_image(store, 0, drawn, reference)
    logit, cls, lse, _ = (part[0] for part in store.rows(np.array([0])))
    cells, least = len(lse), 1e-3
    dense = np.zeros((cells, cells, 2))
    named = np.exp(logit.astype(np.float64) - lse.astype(np.float64)[..., None])
    np.put_along_axis(dense, cls.astype(int), named, -1)
    for n, (top, left, height, width) in enumerate(drawn.box_tlhw.tolist()):
        box = left / 120 * cells, top / 96 * cells
        box += (left + width) / 120 * cells, (top + height) / 96 * cells
        maps, boxes = torch.from_numpy(dense).permute(2, 0, 1)[None], torch.tensor([box]).double()
        q = roi_align(maps, [boxes], cells, aligned=True)[0].permute(1, 2, 0).reshape(-1, 2).numpy()
        cut = Image.fromarray(picture).crop((left, top, left + width, top + height))
        p = probabilities(np.asarray(cut.resize((SIDE, SIDE), Image.Resampling.BILINEAR)))
        p, weight = p.reshape(-1, 5)[:, :2], q.sum(-1)
        assert weight.max() - weight.min() > 0.1
        p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
        agree = q.argmax(-1) == p.argmax(-1)
        # The two classes are all that both name, beside a rest of 0.
        p, q = ((1 - least) * np.concatenate([x, 0 * x[:, :1]], 1) + least / 3 for x in (p, q))
        divergence = scipy.special.rel_entr(p, q).sum(-1)
        assert weights[n] == pytest.approx(weight.sum(), abs=1e-4)
        want = [weight @ agree, weight @ divergence]
        assert sums[n, :2] == pytest.approx(want, abs=1e-4)
    said = measure(images, store, reference)["sentence"]
    assert said.endswith("a token counts by what it shows of the data's classes, by the map")


def test_tokens_count_by_their_weight(label):
    """Maps of the center square: its left and right are of another color, and have no label."""
    picture = flat("blue", 60, 120)
    picture[:, 30:90] = COLORS["red"]
    teacher = make_teacher("center-crop")
    _images, store = label([picture] * 5, teacher)
    shown = np.array(Image.fromarray(picture).resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    whole = np.array([[0, 0, 60, 120.0]])
    crops = Crops(shown[None], whole, np.array([False]), (60, 120))
    weights, sums = compare_image(store, 0, crops, make_teacher())
    # 4 of the 8 columns of cells lie in the Window.
    assert weights.tolist() == [[32] * 3]
    assert sums[0, 0] == 32
    # The left quarter of the picture, which the map does not cover.
    crops = crops._replace(box_tlhw=np.array([[0, 0, 60, 30.0]]))
    assert compare_image(store, 0, crops, make_teacher())[0].tolist() == [[0] * 3]


def test_means_are_over_images():
    """An image counts once, however many tokens of its crops have a weight."""
    # This import takes 0.7 s.
    import scipy.stats

    rng = np.random.default_rng(0)
    weight = np.repeat(rng.uniform(0, 9, (6, 4, 1)), 3, axis=2)
    value, part = rng.uniform(0, 1, (6, 4, 3)), rng.uniform(size=(6, 4)) < 0.6
    # An image without a crop of this kind, and one whose crops show nothing of the map.
    part[1], weight[2] = False, 0
    found = summarize(weight, weight * value, part)
    at = [n for n in range(6) if part[n].any() and n != 2]
    assert (found["images"], found["crops"]) == (len(at), part[at].sum())
    for m, name in enumerate(MEASURES):
        means = [np.average(value[n, part[n], m], weights=weight[n, part[n], m]) for n in at]
        low, high = scipy.stats.norm.interval(0.95, np.mean(means), scipy.stats.sem(means))
        interval = {"mean": np.mean(means), "low": max(low, 0), "high": high}
        interval["high"] = high if name == "divergence" else min(high, 1)
        assert found[name] == pytest.approx(interval, abs=1e-4)
    single = summarize(weight[:1], (weight * value)[:1], np.ones((1, 4), bool))
    assert math.isnan(single["agreement"]["low"])
    assert single["agreement"]["mean"] > 0
    assert math.isnan(summarize(weight, weight, np.zeros((6, 4), bool))["divergence"]["mean"])


def test_crops_are_those_of_training_and_do_not_depend_on_the_batches(label, monkeypatch):
    teacher = make_teacher()
    images, store = label([halves("red", "green")] * 5, teacher)
    first, again = (measure(images, store, teacher, 20) for _ in range(2))
    assert first == again
    monkeypatch.setattr(faithfulness, "BATCH", 3)
    other = find(measure(images, store, teacher, 20), "all")
    assert other["agreement"] == pytest.approx(find(first, "all")["agreement"])
    crops = [draw_crops(images, index, 20, teacher) for index in range(5)]
    height, width = np.concatenate([c.box_tlhw for c in crops]).T[2:]
    share, ratio = height * width / (96 * 120), width / height
    assert 0.07 < share.min() < 0.3
    assert 0.85 < share.max() <= 1
    assert 0.72 < ratio.min() < 0.8
    assert 1.25 < ratio.max() < 1.36
    assert 0.3 < np.concatenate([c.flip for c in crops]).mean() < 0.7


@pytest.mark.parametrize(
    ("geometry", "how", "said"),
    [
        ("tile", {"tiles": 2}, "sees each crop once, and the maps are of tile 2 x 2"),
        ("squash", {"tta_views": 2}, "sees each crop once, and the maps are of 2 views"),
        ("letterbox", {}, "agree on"),
    ],
)
def test_maps_of_tiles_views_and_padding_are_compared(label, geometry, how, said):
    maker = make_teacher(geometry, **how)
    pictures = [flat(color) for color in ("red", "green", "blue", "red", "green")]
    images, store = label(pictures, maker, "t, 2 views" if "tta_views" in how else "t")
    figures = measure(images, store, make_teacher())
    assert find(figures, "all")["agreement"]["mean"] == 1
    assert said in figures["sentence"]
    assert figures["own_teacher"]
    assert "the teacher on the crop" in figures["sentence"]

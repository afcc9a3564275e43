"""RandAugment before the crop, against the published pipeline written down with Pillow, SciPy and
torchvision.
"""

import math
import shutil
import threading
from contextlib import closing

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from scipy import ndimage
from torchvision.ops import roi_align

from densefeed.pipelines.augment.augmentation import Augmentation, augment_batches
from densefeed.pipelines.augment.before_crop import warp_maps
from densefeed.pipelines.augment.choices import Step
from densefeed.pipelines.augment.settings import GEOMETRIC, Augment
from densefeed.pipelines.batch import Batch, ScoreMapSpec
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.folder import FolderSource
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.plan import AUGMENT, CROP, EpochPlan
from densefeed.pipelines.targets import TargetRules, sparse_targets
from densefeed.storage.geometry import teacher_window
from densefeed.storage.images import Images
from densefeed.system.errors import UserError

from ...stores import write_store

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FILL = (124, 116, 104)
RULES = TargetRules(smoothing=0.1, geometry="published", outside="uniform")
# The set of the published commands, in its order (rand-m9-mstd0.5-inc1).
NAMES = (
    *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd"),
    *("Color", "Contrast", "Brightness", "Sharpness", "ShearX", "ShearY"),
    *("TranslateXRel", "TranslateYRel"),
)


# ---------------------------------------------------------------- the published pipeline


def published_crop(u: np.ndarray, height: int, width: int) -> tuple[int, int, int, int]:
    """Choose a random-resized crop by torchvision's rule: (top, left, height, width)."""
    for number in range(10):
        area = height * width * (0.08 + 0.92 * u[number])
        low, high = math.log(3 / 4), math.log(4 / 3)
        ratio = math.exp(low + (high - low) * u[10 + number])
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(u[20] * (height - h + 1)), int(u[21] * (width - w + 1)), h, w
    w = min(width, round(height * 4 / 3))
    h = min(height, round(width * 4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


def published_operation(
    image: Image.Image, planes: np.ndarray, name: str, level: float, negative: bool, cubic: bool
) -> tuple[Image.Image, np.ndarray]:
    """Apply an operation at a level from 0 to 10 to an image and to its map `[2, k, S, S]`.

    The planes are logits and classes.
    """
    share, sign = level / 10, -1 if negative else 1
    how = dict(resample=Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR)
    width, height = image.size
    side = planes.shape[2]

    def transform(*data: float) -> Image.Image:
        return image.transform(image.size, Image.Transform.AFFINE, data, fillcolor=FILL, **how)

    def warp(*data: float) -> np.ndarray:
        # From (rank, row, column) of the new map to that of the old one.
        matrix = np.array([[1, 0, 0, 0], [0, *data[:3]], [0, *data[3:]]], float)
        logits, classes = (
            ndimage.affine_transform(plane, matrix, order=0, mode=mode)
            for plane, mode in zip(planes, ("constant", "nearest"), strict=True)
        )
        return np.stack([logits, classes])

    match name:
        case "AutoContrast":
            return ImageOps.autocontrast(image), planes
        case "Equalize":
            return ImageOps.equalize(image), planes
        case "Invert":
            return ImageOps.invert(image), planes
        case "Posterize":
            bits = 4 - int(share * 4)
            black = Image.new("RGB", image.size)
            return (ImageOps.posterize(image, bits) if bits else black), planes
        case "Solarize":
            return ImageOps.solarize(image, 256 - int(share * 256)), planes
        case "SolarizeAdd":
            added = int(share * 110)
            table = [min(255, value + added) if value < 128 else value for value in range(256)]
            return image.point(table * 3), planes
        case "Color" | "Contrast" | "Brightness" | "Sharpness":
            return getattr(ImageEnhance, name)(image).enhance(1 + sign * share * 0.9), planes
        case "Rotate":
            degrees = sign * share * 30
            c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
            # About side / 2, though centers of cells are whole numbers.
            m = side / 2
            data = c, s, m - c * m - s * m, -s, c, m + s * m - c * m
            return image.rotate(degrees, fillcolor=FILL, **how), warp(*data)
        case "ShearX":
            factor = sign * share * 0.3
            return transform(1, factor, 0, 0, 1, 0), warp(1, 0, 0, factor, 1, 0)
        case "ShearY":
            factor = sign * share * 0.3
            return transform(1, 0, 0, factor, 1, 0), warp(1, factor, 0, 0, 1, 0)
        case "TranslateXRel":
            part = sign * share * 0.45
            return transform(1, 0, part * width, 0, 1, 0), warp(1, 0, 0, 0, 1, part * side)
        case "TranslateYRel":
            part = sign * share * 0.45
            return transform(1, 0, 0, 0, 1, part * height), warp(1, 0, part * side, 0, 1, 0)
    raise AssertionError(name)


def published_sample(
    image: Image.Image, planes: np.ndarray, crop_u: np.ndarray, layer_u: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    """Flip, RandAugment, crop and resize: pixels, planes, the box as shares, the operations.

    `crop_u` are the 24 numbers of a crop, `layer_u` 6 for each layer.
    """
    if crop_u[22] < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        planes = planes[..., ::-1]
    used = []
    for which, whether, radius, angle, sign, filter in layer_u:
        if whether >= 0.5:
            continue
        gauss = math.sqrt(-2 * math.log(1 - radius)) * math.cos(2 * math.pi * angle)
        level = min(max(9 + 0.5 * gauss, 0), 10)
        used.append(NAMES[int(which * len(NAMES))])
        image, planes = published_operation(
            image, planes, used[-1], level, sign > 0.5, filter >= 0.5
        )
    top, left, h, w = published_crop(crop_u, image.height, image.width)
    resample = Image.Resampling.BICUBIC if crop_u[23] >= 0.5 else Image.Resampling.BILINEAR
    cut = image.crop((left, top, left + w, top + h)).resize((size, size), resample)
    corners = np.array([top, left, top + h, left + w], float)
    box = corners / np.array([image.height, image.width] * 2)
    return np.asarray(cut), planes, box, used


def published_targets(
    planes: np.ndarray, boxes: np.ndarray, classes: int, grid: int
) -> torch.Tensor:
    """Make targets of maps `[N, 2, k, S, S]`, float64 `[N, grid * grid, K]`: scatter, RoIAlign with
    rows for x, softmax, smoothing by 0.1.
    """
    logits, named = torch.from_numpy(planes).unbind(1)
    dense = torch.zeros(len(planes), classes, *logits.shape[2:], dtype=torch.float64)
    dense.scatter_(1, named.long(), logits.double())
    corners = list(torch.from_numpy(boxes)[:, None] * planes.shape[-1] - 0.5)
    pooled = roi_align(dense, corners, grid).flatten(2).mT
    off = 0.1 / classes
    return pooled.softmax(-1) * (1 - 0.1 + off) + off


# ---------------------------------------------------------------- ours


@pytest.fixture(scope="module")
def photos(tmp_path_factory, noise) -> tuple:
    """50 images of different shapes, and a store of published maps: zero-logit, center squares."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(4)
    for number in range(50):
        path = root / "train" / f"{number % 4}" / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = (rng.integers(90, 200, 2)).tolist()
        Image.fromarray(noise(height, width, seed=number)).save(path)
    return root


def write_maps(root, maps, path, kind="center-crop"):
    images = Images(root, split="train")
    windows = [teacher_window(kind, *images.size(n)) for n in range(len(images))]
    maps = maps._replace(window=np.array(windows, np.float32))
    return write_store(path, images, maps, 4, absent="zero-logit", geometry=kind)


@pytest.fixture(scope="module")
def store(photos, random_maps, tmp_path_factory):
    maps = random_maps(50, 18, 2, 4)
    return write_maps(photos, maps, tmp_path_factory.mktemp("store") / "maps.h5")


def opened(source, size=64, batch=10, **fields):
    plan = EpochPlan(
        num_samples=len(source.labels),
        batch=batch,
        seed=5,
        mode="train",
        sizes=((0, size),),
        crop_interpolation="random",
    )
    augment = Augment(rand_augment="rand-m9-mstd0.5-inc1", augment_before_crop=True)
    return ThreadedLoader(source, plan, 2), Augmentation(plan, augment, MEAN, STD, **fields)


def densify(targets, classes: int) -> torch.Tensor:
    T = targets.extra.shape[1]
    index = targets.palette[:, None].expand(-1, T, -1)
    dense = targets.base.double()[..., None].repeat(1, 1, classes)
    return dense.scatter_add(2, index, targets.extra.double())


@pytest.mark.slow
def test_200_samples_equal_the_published_pipeline(photos, store):
    """The same draws in; images within what resampling rounds, labels to 1e-5."""
    source = FolderSource(photos, "train", store, threads=2)
    images, maps = Images(photos, split="train"), source.maps(np.arange(50))
    every_NkSS = np.stack([maps.logit, maps.cls], 1).astype(np.float32).transpose(0, 1, 4, 2, 3)
    loader, augmentation = opened(source, warps_maps=True)
    numbers, seen, off = [8 * layer + n for layer in (0, 1) for n in range(6)], set(), []
    with closing(loader):
        for epoch in range(4):
            crops = loader.batches(epoch, prepare=augmentation.whole)
            for batch in augment_batches(crops, augmentation, torch.device("cpu")):
                ids, wanted = batch.index.numpy(), []
                crop_uN = loader.plan.draws(epoch, ids, CROP, range(24))
                layer_uN = loader.plan.draws(epoch, ids, AUGMENT, numbers).reshape(2, 6, -1)
                for n, index in enumerate(ids.tolist()):
                    image, uses = Image.open(images.where(index)), (crop_uN[:, n], layer_uN[..., n])
                    wanted.append(published_sample(image, every_NkSS[index], *uses, 64))
                pixels, planes, boxes, used = zip(*wanted, strict=True)
                for grid in (1, 14):
                    want = published_targets(np.stack(planes), np.stack(boxes), 4, grid)
                    targets = sparse_targets(batch, loader.score_maps, grid, RULES)
                    torch.testing.assert_close(densify(targets, 4), want, rtol=0, atol=1e-5)
                got = augmentation.normalize.pixels(batch.image).numpy().astype(int)
                off.append(abs(got - np.stack(pixels)))
                seen.update(*used, map(len, used))
    off = np.concatenate(off)
    assert len(off) == 200
    assert seen == {*NAMES, 0, 1, 2}
    assert off.mean((1, 2, 3)).max() < 0.25
    # Pillow clips to a byte between its two passes, where a bicubic filter may overshoot.
    assert (off > 2).mean() < 1e-3
    assert off.max() <= 16


@pytest.mark.parametrize("absent", ["zero-logit", "tail", "background"])
def test_cells_from_beyond_a_warped_map_have_no_class(random_maps, absent):
    """They are uniform, whatever the maps say of absent classes; the others are moved."""
    maps, steps = random_maps(2, 6, 2, 50), [[Step("TranslateXRel", 1 / 3, False)], []]
    tensors = (torch.from_numpy(part) for part in maps)
    image, label, zeros = torch.zeros(2, 8, 8, 3), torch.zeros(2).long(), torch.zeros(2).long()
    view = torch.tensor([[[1.0, 0, 0], [0, 1, 0]]]).repeat(2, 1, 1)
    shown = torch.tensor([[0.0, 0, 1, 1]]).repeat(2, 1)
    plain = Batch(image, label, view, shown, zeros, zeros, zeros + 1.0, *tensors, axis_aligned=True)
    spec = ScoreMapSpec(6, 2, 50, absent, 50, 1.0)
    moved = warp_maps(plain, np.array([False, True]), steps, spec)
    rules = TargetRules(outside="uniform")
    before, after = (
        densify(sparse_targets(batch, spec, 6, rules), 50).unflatten(1, (6, 6))
        for batch in (plain, moved)
    )
    # log(50) as float16.
    torch.testing.assert_close(
        after[0, :, 4:], torch.full((6, 2, 50), 1 / 50.0).double(), rtol=0, atol=2e-5
    )
    torch.testing.assert_close(after[0, :, :4], before[0, :, 2:])
    torch.testing.assert_close(after[1], before[1].flip(1))


# ---------------------------------------------------------------- aligned labels


def test_views_follow_whole_images(monkeypatch, tmp_path):
    """Red and green are the place in the stored image, so a crop's colors are those places."""
    root = tmp_path / "places"
    for number, (height, width) in enumerate([(200, 240), (256, 130), (180, 180)] * 4):
        y, x = np.mgrid[:height, :width]
        place = [(x + 0.5) / width * 255, (y + 0.5) / height * 255, np.full((height, width), 77)]
        path = root / "train" / "a" / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.stack(place, 2).round().astype(np.uint8)).save(path)
    loader, augmentation = opened(FolderSource(root, "train"), size=32, batch=12)
    chooser = augmentation.whole._chooser
    spec = chooser.spec._replace(names=GEOMETRIC, probability=1.0, layers=1)
    monkeypatch.setattr(chooser, "spec", spec)
    steps = (np.arange(32) + 0.5) / 32
    u, v = np.meshgrid(steps, steps)
    filled = 0
    with closing(loader):
        for epoch in range(4):
            for batch in loader.batches(epoch, prepare=augmentation.whole):
                assert not batch.axis_aligned
                # The box around the corners, within the image.
                corners = torch.tensor([[0.0, 1, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1]])
                ends = (batch.view @ corners).flip(1).clamp(0, 1)
                box = torch.cat([ends.amin(2), ends.amax(2)], 1)
                torch.testing.assert_close(batch.shown, box, rtol=0, atol=2e-6)
                for view, pixels in zip(batch.view.numpy(), batch.image.numpy(), strict=True):
                    x, y = np.einsum("ij,jhw->ihw", view, np.stack([u, v, np.ones_like(u)]))
                    away = np.maximum(abs(x - 0.5), abs(y - 0.5)) - 0.5
                    inside, outside = away < -0.08, away > 0.08
                    want = np.stack([x, y], 2) * 255
                    assert abs(pixels[inside][:, :2] - want[inside]).max(initial=0) < 3
                    assert abs(pixels[outside].astype(int) - FILL).max(initial=0) <= 1
                    filled += outside.sum()
    assert filled > 1000


@pytest.mark.parametrize("moved", [{"zoom_out": 0.5}, {"shift": 12}], ids=["zoom", "shift"])
def test_fill_that_comes_after_the_crop_has_no_label(monkeypatch, tmp_path, moved):
    """Blue is 255 in every stored pixel, and 104 in fill. RandAugment itself changes nothing."""
    root, spec = tmp_path / "blue", ScoreMapSpec(8, 2, 4, "tail", 2, 1.0)
    for number in range(8):
        path = root / "train" / "a" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (120 - 9 * number, 90), (0, 0, 255)).save(path)
    loader, _ = opened(FolderSource(root, "train"), batch=8)
    augment = Augment(rand_augment="rand-m9-n1", augment_before_crop=True, **moved)
    augmentation = Augmentation(loader.plan, augment, MEAN, STD)
    chooser = augmentation.whole._chooser
    monkeypatch.setattr(chooser, "spec", chooser.spec._replace(probability=0.0))
    filled = 0
    with closing(loader):
        for epoch in range(4):
            batches = loader.batches(epoch, prepare=augmentation.whole)
            for batch in augment_batches(batches, augmentation, torch.device("cpu")):
                blue = augmentation.normalize.pixels(batch.image)[..., 2]
                tokens = (blue < 200).unflatten(1, (8, 8)).unflatten(3, (8, 8))
                only_fill, none = (t.all(4).all(2).flatten(1) for t in (tokens, ~tokens))
                N = len(blue)
                maps = {
                    "map_logit": torch.zeros(N, 8, 8, 2).half(),
                    "map_class": torch.tensor([0, 1]).expand(N, 8, 8, 2).to(torch.uint16),
                    "map_lse": torch.full((N, 8, 8), 0.7).half(),
                    "window": torch.tensor([[0.0, 0, 1, 1]]).repeat(N, 1),
                }
                weight = sparse_targets(batch._replace(**maps), spec, 8).weight
                assert (weight[only_fill] < 0.5).all()
                assert (weight[none] > 0.5).all()
                filled += int(only_fill.sum())
    assert filled > 50


# ---------------------------------------------------------------- loaders


def epoch_of(source, start=0, batch=10, **fields):
    loader, augmentation = opened(source, batch=batch, **fields)
    with closing(loader):
        return list(loader.batches(1, start, augmentation.whole))


def assert_equal(one, other):
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name


@pytest.mark.parametrize("warps_maps", [False, True])
def test_batches_do_not_depend_on_the_start_or_the_loader(folder, maps, packed, warps_maps):
    """Files of a folder and JPEGs of a .beton, which Pillow decodes alike."""
    whole = epoch_of(FolderSource(folder, "train", maps), batch=4, warps_maps=warps_maps)
    late = epoch_of(FolderSource(folder, "train", maps), 1, batch=4, warps_maps=warps_maps)
    for one, other in zip(whole[1:], late, strict=True):
        assert_equal(one, other)
    beton = epoch_of(FfcvSource(packed[0]), batch=4, warps_maps=warps_maps)
    for one, other in zip(whole, beton, strict=True):
        assert torch.equal(one.index, other.index)
        assert_equal(one, other)


def test_without_operations_crops_are_those_of_the_plan(folder, maps, monkeypatch):
    """A flip before the crop: the mirrored image is cropped where the other order crops it."""
    loader, augmentation = opened(FolderSource(folder, "train", maps), size=32, batch=4)
    chooser = augmentation.whole._chooser
    monkeypatch.setattr(chooser, "spec", chooser.spec._replace(layers=0))
    flips = 0
    with closing(loader):
        plain = loader.batches(0)
        for one, other in zip(loader.batches(0, prepare=augmentation.whole), plain, strict=True):
            view, there = one.view.numpy(), other.view.numpy()
            flipped = there[:, 0, 0] < 0
            np.testing.assert_array_equal(view[:, 0, 0] < 0, flipped)
            # The left edge of the mirrored image is the right edge of the stored one.
            mirrored = np.where(flipped, 1 - (there[:, 0].sum(1)), there[:, 0, 2])
            np.testing.assert_allclose(view[:, 0, 2], mirrored, atol=1e-6)
            np.testing.assert_allclose(view[:, 1], there[:, 1], atol=1e-6)
            still = torch.from_numpy(~flipped)
            # Chroma of a JPEG is resampled at another place.
            off = (one.image[still].int() - other.image[still].int()).abs().float()
            assert off.mean() < 0.7
            flips += flipped.sum()
    assert 0 < flips < 12


def test_a_damaged_image_is_named_or_skipped(photos, tmp_path):
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    bad = sorted((root / "train" / "2").iterdir())[3]
    bad.write_bytes(bad.read_bytes()[:500])
    with pytest.raises(UserError, match=bad.name):
        epoch_of(FolderSource(root, "train"))
    source = FolderSource(root, "train")
    loader, augmentation = opened(source)
    with closing(ThreadedLoader(source, loader.plan, 2, "skip")) as loader:
        weight = torch.cat(
            [batch.weight for batch in loader.batches(0, prepare=augmentation.whole)]
        )
        assert (weight.sum(), loader.skipped) == (49, 1)


def test_a_loader_that_is_left_or_closed_ends_its_threads(photos):
    loader, augmentation = opened(FolderSource(photos, "train"), batch=5)
    before = threading.active_count()
    crops = loader.batches(0, prepare=augmentation.whole)
    next(crops)
    assert threading.active_count() > before
    crops.close()
    crops = loader.batches(0, prepare=augmentation.whole)
    next(crops)
    loader.close()
    assert threading.active_count() <= before
    with pytest.raises(RuntimeError, match="this loader is closed"):
        list(crops)

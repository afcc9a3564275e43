"""examples/stock_ffcv.py with ffcv 1.0.2: position-coded images show which pixels a crop contains,
and labels equal our loader's.

ffcv draws other crops in every run, so the assertions hold for any crop.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.targets import TargetRules, sparse_targets
from densefeed.storage.beton import Beton
from densefeed.storage.images import Images

from .stores import write_store

pytestmark = [pytest.mark.ffcv, pytest.mark.slow]
IMAGES, SIZE, GRID, EPOCHS = 13, 24, 4, 3
EXAMPLES = Path(__file__).parents[1] / "examples"
RULES = TargetRules(smoothing=0.1)

# All of ffcv runs in one child process: an error in its threads would leave the test waiting
# forever, and its compiler takes seconds per Loader.
FFCV = f"""
import json
import sys
import numpy as np
import torch
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.rgb_image import CenterCropRGBImageDecoder, RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import RandomHorizontalFlip, ToTensor
from ffcv.writer import DatasetWriter
sys.path.insert(0, {str(EXAMPLES)!r})
from stock_ffcv import DenseLabels, crop_pipelines
from densefeed.pipelines.targets import TargetRules, sparse_targets
from densefeed.system.errors import UserError
from densefeed.storage.images import Images, decode
root = sys.argv[1]
images = Images(root + "/images", split="train")
class Samples:
    def __len__(self): return len(images)
    def __getitem__(self, n): return np.asarray(decode(images.read(n), "x")), int(images.labels[n])
fields = {{"image": RGBImageField(write_mode="raw"), "label": IntField()}}
DatasetWriter(root + "/stock.beton", fields, num_workers=1).from_indexed_dataset(Samples())
random = RandomResizedCropRGBImageDecoder(({SIZE}, {SIZE}))
center = CenterCropRGBImageDecoder(({SIZE}, {SIZE}), 0.8)
def error_of(call):
    try:
        call()
    except UserError as error:
        return str(error)
# Used by two Loaders; from ffcv's own lists of operations the first would remove the decoder.
twice = crop_pipelines(random, flip=0.5)
for name, maps, pipelines, workers, cached in (
    ("ours", None, twice, 2, True), ("stock", root + "/maps.h5", twice, 1, False),
    ("damaged", None, crop_pipelines(center, flip=0.5), 2, True),
):
    path, parts, errors = f"{{root}}/{{name}}.beton", [], []
    loader = Loader(path, batch_size=5, num_workers=workers, order=OrderOption.RANDOM, seed=1,
                    drop_last=False, os_cache=cached, pipelines=pipelines)
    labels = DenseLabels(path, maps)
    for epoch in range({EPOCHS}):
        for image, label, crop in loader:
            if error := error_of(lambda: labels(image, label, crop)):
                errors.append(error)
                parts.append({{"crop": np.array(crop)}})
                continue
            batch = labels(image, label, crop)
            targets = sparse_targets(batch, labels.score_maps, {GRID}, TargetRules(smoothing=0.1))
            fields = batch.tensors | targets._asdict()
            fields |= {{"crop": crop, "token_weight": targets.weight, "weight": batch.weight}}
            fields |= {{"epoch": torch.full(batch.label.shape, epoch)}}
            # Copies, since ffcv overwrites its memory.
            parts.append({{name: np.array(field) for name, field in fields.items()}})
    read = set.intersection(*map(set, parts))
    arrays = {{name: np.concatenate([part[name] for part in parts]) for name in read}}
    np.savez(f"{{root}}/{{name}}.npz", errors=np.array(errors, str), **arrays)
row = torch.tensor([[0, 0, 0, 9, 9, 10, 10, 0, 0, 0]])
ours = DenseLabels(root + "/ours.beton")
sample = ours.source.begin(np.array([0])).wait().samples[0]
height, width, offset = sample[["height", "width", "offset"]].tolist()
fits = torch.tensor([[0, 0, 0, 9, 9, height, width, 0, 0, offset]])
moved = torch.tensor([[0, 0, 0, 9, 9, height, width, 0, 0, offset + 1]])
ours(torch.zeros(1, 8, 8, 3), torch.zeros(1, 1), fits)  # the first image, whose label is 0
refused = [
    error_of(lambda: crop_pipelines(random, transforms=[RandomHorizontalFlip(), ToTensor()])),
    error_of(lambda: DenseLabels(root + "/stock.beton")),
    error_of(lambda: ours(torch.zeros(1, 8, 8, 3), torch.zeros(1, 1), row)),
    error_of(lambda: ours(torch.zeros(1, 8, 8, 3), torch.ones(1, 1), fits)),
    error_of(lambda: ours(torch.zeros(1, 8, 8, 3), torch.zeros(1, 1), moved)),
]
print(json.dumps(refused))
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory, random_maps, command):
    """Run the child; return the folder of all files, and the error messages.

    The red channel of an image is the row, the green one the column. ours.beton is packed here with
    maps; damaged.beton is a copy in which a JPEG lacks its second half and a map has a flipped bit;
    stock.beton is written by ffcv: raw pixels.
    """
    pytest.importorskip("ffcv", reason="ffcv could not be built here")
    root, rng = tmp_path_factory.mktemp("coded"), np.random.default_rng(0)
    for number in range(IMAGES):
        height, width = rng.integers(100, 250, 2)
        row, column = np.mgrid[:height, :width]
        path = root / "images" / "train" / ("cat", "dog", "emu")[number % 3] / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(
            np.stack([row, column, np.full_like(row, 10 * number)], -1).astype(np.uint8)
        ).save(path)
    images, maps = Images(root / "images", split="train"), root / "maps.h5"
    scores = random_maps(IMAGES, 6, 2, 3, window=(0.0, 0.2, 1.0, 0.6))
    write_store(maps, images, scores, 3, geometry="center-crop")
    packing = (
        "--data",
        root / "images",
        "--maps",
        maps,
        "--out",
        root / "ours.beton",
        "--quality",
        98,
    )
    done = command("tools/pack_dataset.py", *packing)
    assert done.returncode == 0, done.stderr
    beton, data = Beton(root / "ours.beton"), bytearray((root / "ours.beton").read_bytes())
    at, size = int(beton.images.offset[4]), int(beton.images.size[4])
    data[at + size // 2 : at + size] = bytes(size - size // 2)
    data[int(beton.offsets("map")[7]) + 3] ^= 1
    (root / "damaged.beton").write_bytes(data)
    done = command("-c", FFCV, root, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return root, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(params=["ours", "stock"])
def got(request, ran):
    return request.param, dict(np.load(ran[0] / f"{request.param}.npz"))


def test_pixels_match_the_view(got):
    """An area filter preserves a ramp: an output pixel shows the row and column at its center,
    through the View.
    """
    name, read = got
    center = (np.arange(SIZE) + 0.5) / SIZE
    scale, shift = read["view"][:, :, :2], read["view"][:, :, 2]
    height, width = read["crop"][:, 5], read["crop"][:, 6]
    assert (scale[:, 0, 1] == 0).all()
    x = (scale[:, 0, 0, None] * center + shift[:, 0, None]) * width[:, None] - 0.5  # N, columns
    y = (scale[:, 1, 1, None] * center + shift[:, 1, None]) * height[:, None] - 0.5
    image = read["image"].astype(float)
    limit = 0.51 if name == "stock" else 5.0  # rounding alone; JPEG at quality 98 and a fast DCT
    assert np.abs(image[..., 1] - x[:, None, :]).max() < limit
    assert np.abs(image[..., 0] - y[:, :, None]).max() < limit
    assert np.abs(image[..., 2] - 10 * number_of(read)[:, None, None]).max() < limit
    assert (scale[:, 0, 0] < 0).any()
    assert (scale[:, 0, 0] > 0).any()
    np.testing.assert_array_equal(scale[:, 0, 0] < 0, read["crop"][:, 7] == 1)


def number_of(read):
    """Return the file number of each sample; samples are sorted by class."""
    order = sorted(range(IMAGES), key=lambda n: (n % 3, n))
    return np.array(order)[read["index"]]


def test_every_sample_appears_once_an_epoch_with_its_own_crop(got):
    _, read = got
    for epoch in range(EPOCHS):
        assert sorted(read["index"][read["epoch"] == epoch]) == list(range(IMAGES))
    np.testing.assert_array_equal(read["label"], number_of(read) % 3)
    assert len(np.unique(read["crop"][:, 1:5], axis=0)) > 0.9 * EPOCHS * IMAGES
    _, top, left, high, wide, height, width, _, status, _ = read["crop"].T
    assert ((top >= 0) & (left >= 0) & (top + high <= height) & (left + wide <= width)).all()
    assert not status.any()
    assert not len(read["errors"])


class FixedPlan(EpochPlan):
    """A plan with the crops of another loader."""

    def crops(self, epoch, ids, *given):
        return self.boxes[ids].astype(np.float64), self.flips[ids]


def test_labels_equal_our_loaders_for_the_same_box(got, ran):
    (name, read), (root, _) = got, ran
    source = FfcvSource(root / f"{name}.beton", root / "maps.h5" if name == "stock" else None)
    plan = FixedPlan(num_samples=IMAGES, batch=IMAGES, seed=0, mode="train", sizes=((0, SIZE),))
    rows = np.flatnonzero(read["epoch"] == 1)
    rows = rows[np.argsort(read["index"][rows])]
    object.__setattr__(plan, "boxes", read["crop"][rows, 1:5])
    object.__setattr__(plan, "flips", read["crop"][rows, 7] > 0)
    loader = ThreadedLoader(source, plan, threads=1)
    (batch,) = loader.batches(0)
    rows = rows[batch.index.numpy()]
    want = (
        batch.tensors | (targets := sparse_targets(batch, source.score_maps, GRID, RULES))._asdict()
    )
    want |= {"token_weight": targets.weight, "weight": batch.weight}
    loader.close()
    # ffcv resizes with another filter.
    assert np.abs(read["image"][rows].astype(float) - want.pop("image").numpy()).mean() < 3
    for field, value in want.items():
        np.testing.assert_array_equal(read[field][rows], value.numpy(), err_msg=field)
    assert (read["token_weight"] < 0.5).any()  # beyond the Window
    assert (read["token_weight"] > 0.99).any()


def test_batches_with_a_bad_sample_are_refused(ran):
    root, _ = ran
    read = dict(np.load(root / "damaged.npz"))
    errors = read["errors"].tolist()
    # In one batch or in two.
    assert EPOCHS <= len(errors) <= 2 * EPOCHS
    assert all(str(root / "damaged.beton") in error for error in errors)
    assert any("sample 4, " in e and "ffcv cannot decode all of it" in e for e in errors)
    assert sum("sample 4, " in error for error in errors) == EPOCHS


def test_center_crops_are_reported(ran):
    _, top, left, high, wide, height, width, _, status, _ = np.load(ran[0] / "damaged.npz")[
        "crop"
    ].T
    np.testing.assert_array_equal(high, (0.8 * np.minimum(height, width)).astype(int))
    np.testing.assert_array_equal(wide, high)
    np.testing.assert_array_equal(top, (height - high) // 2)
    np.testing.assert_array_equal(left, (width - wide) // 2)
    assert (status != 0).sum() == EPOCHS


def test_inconsistent_input_is_refused(ran):
    root, (moves, bare, *others) = ran
    assert moves.startswith("RandomHorizontalFlip moves pixels")
    assert bare.startswith(f"{root / 'stock.beton'} has no score maps; give DenseLabels")
    assert len(others) == 3
    assert all(other.startswith("the Loader reads other images than") for other in others)

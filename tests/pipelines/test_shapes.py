"""Aspect buckets and multi-scale batches: laws of the order, crops of the bucket's aspect against
torchvision, the same shape on every rank.
"""

import math
import threading
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as tv

from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.folder import FolderSource
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.open import DataOptions, open_dataset
from densefeed.pipelines.plan import EpochPlan
from densefeed.pipelines.shapes import AspectBuckets, bucket_shape, list_shapes
from densefeed.storage.images import Images
from densefeed.system.errors import UserError

ASPECTS = (0.75, 1.0, 4 / 3)


def buckets_of(count, aspects=ASPECTS, multiple=16, seed=0):
    """Buckets of `count` images of random sizes."""
    heights, widths = np.random.default_rng(seed).integers(100, 200, (2, count))
    return AspectBuckets(aspects, multiple, heights, widths)


def plan(num_samples=1000, buckets=None, **fields):
    buckets = buckets or buckets_of(num_samples)
    fields = {"batch": 32, "seed": 7, "mode": "train", "buckets": buckets} | fields
    return EpochPlan(num_samples=num_samples, **fields)


# ------------------------------------------------------------------------- shapes


@given(st.integers(1, 40), st.integers(1, 32), st.fractions(Fraction(1, 4), 4))
@settings(max_examples=100)
def test_shapes_are_multiples_of_the_patch_near_aspect_and_area(tokens, multiple, aspect):
    side, aspect = tokens * multiple, float(aspect)
    height, width = bucket_shape(side, aspect, multiple)
    assert height % multiple == width % multiple == 0 < min(height, width)
    # Each side is rounded to a neighboring multiple.
    for extent, exact in ((height, side / math.sqrt(aspect)), (width, side * math.sqrt(aspect))):
        assert abs(extent - exact) < multiple or extent == multiple
    assert bucket_shape(side, 1.0, multiple) == (side, side)


@pytest.mark.parametrize(
    ("aspect", "want"),
    [(0.75, (256, 192)), (1, (224, 224)), (4 / 3, (192, 256)), (1.5, (176, 272)), (2, (160, 320))],
)
def test_shapes_of_common_photographs(aspect, want):
    assert bucket_shape(224, aspect, 16) == want


def test_invalid_aspects_and_sides_are_refused():
    with pytest.raises(UserError, match=r"--aspects 1 and 1\.02 both have inputs of 64 px"):
        list_shapes((64, 32), (1.0, 1.02), 16)
    for aspects in ((1.0, 0.75), (1.0, 1.0), (0.0, 1.0)):
        with pytest.raises(UserError, match="once, above 0 and ascending"):
            DataOptions(aspects=aspects)
    with pytest.raises(UserError, match="give one of the two"):
        DataOptions(sizes=((0, 16),), multi_scale=(16, 32))
    with pytest.raises(UserError, match="an input of 0 px is too small"):
        EpochPlan(num_samples=1, batch=2, seed=0, mode="train", multi_scale=(16, 0))
    for fields in (dict(order="blocks"), dict(mode="evaluate")):
        with pytest.raises(UserError, match="--aspects reorders the training set"):
            plan(**fields)


def test_an_image_is_in_the_bucket_of_the_nearest_aspect():
    """Distances are ratios: 0.866 is as far from 0.75 as from 1."""
    widths = np.array([10, 700, 865, 867, 1000, 1154, 1156, 9000], np.uint16)
    buckets = AspectBuckets(ASPECTS, 16, np.full(8, 1000, np.uint16), widths)
    assert buckets.bucket_N.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


# ------------------------------------------------------------------------- order


@given(
    st.integers(1, 300),
    st.sampled_from([4, 12, 24]),
    st.sampled_from([1, 2]),
    st.integers(1, 4),
    st.integers(0, 2**64 - 1),
    st.integers(0, 100),
)
@settings(max_examples=100)
def test_batches_of_buckets_are_a_permutation(count, batch, repeats, number, seed, epoch):
    """Every image once, all batches but one full, and all but `number` - 1 of one bucket."""
    aspects = tuple(0.7 * 1.3**n for n in range(number))
    chosen = plan(
        count, buckets_of(count, aspects, seed=seed), batch=batch, repeats=repeats, seed=seed
    )
    ids = chosen.permutation(epoch)
    np.testing.assert_array_equal(np.sort(ids), np.arange(count))
    shapes = [chosen.shape(epoch, step) for step in range(chosen.batches)]
    known = [chosen.buckets.shape(224, bucket) for bucket in range(number)]
    assert set(shapes) <= set(known) == set(chosen.shapes())
    shard, mixed = chosen.rank_rows(epoch), 0
    for index, weight, shape in zip(shard.index, shard.weight, shapes, strict=True):
        own = Counter(chosen.buckets.bucket_N[index[weight == 1]].tolist())
        mixed += len(own) > 1
        # The shape is that of a bucket with images in the batch, of the only one if there is one.
        assert known.index(shape) in own
    assert mixed <= number - 1
    # The ranks have the same images in the same steps, of the same shape.
    for rank in range(2):
        own = plan(
            count, chosen.buckets, batch=batch, repeats=repeats, seed=seed, rank=rank, ranks=2
        )
        np.testing.assert_array_equal(own.rank_rows(epoch).index, shard.index[:, own.rows])
        assert [own.shape(epoch, step) for step in range(own.batches)] == shapes


def test_the_order_of_buckets_is_random_and_unbiased():
    """Over 1,000 epochs of 10 batches of 4 images each, and one image more.

    The first batch and the last are of a bucket as often as batches are, and each image of a bucket
    is equally often in the last batch, which has one image.
    """
    heights = np.full(41, 100)
    widths = np.where(np.arange(41) < 21, 50, 200)
    halves = AspectBuckets((0.5, 2.0), 16, heights, widths)
    tall = halves.shape(224, 0)
    chosen, first, last, alone = plan(41, halves, batch=4), 0, 0, np.zeros(41)
    for epoch in range(1000):
        first += chosen.shape(epoch, 0) == tall
        last += chosen.shape(epoch, 10) == tall
        alone[chosen.permutation(epoch)[-1]] += 1
    # 4 standard deviations. The last batch is image 0, 4, ... 40 in the order of buckets: 6 of 11.
    # The others have 5 tall ones: of 20 and 20 images, or 21 and 19 with a wide one in the middle.
    assert abs(last / 1000 - 6 / 11) < 4 * 0.5 / math.sqrt(1000)
    assert abs(first / 1000 - 5 / 10) < 4 * 0.5 / math.sqrt(1000)
    for part, total in ((alone[:21], last), (alone[21:], 1000 - last)):
        expected = total / len(part)
        # Chi-square with 20 and 19 degrees of freedom: 99.9 % quantile of the larger.
        assert ((part - expected) ** 2 / expected).sum() < 45.3


def test_each_batch_draws_a_scale_with_equal_probability():
    sides = (160, 192, 224)
    chosen = plan(3200, multi_scale=sides)
    drawn = [chosen.shape(epoch, step) for epoch in range(10) for step in range(100)]
    squares = EpochPlan(num_samples=3200, batch=32, seed=7, mode="train", multi_scale=sides)
    same = [squares.shape(epoch, step) for epoch in range(10) for step in range(100)]
    counts = np.array([same.count((side, side)) for side in sides])
    assert counts.sum() == 1000
    # Chi-square with 2 degrees of freedom, 99.9 % quantile.
    assert ((counts - 1000 / 3) ** 2 / (1000 / 3)).sum() < 13.8
    # The scale does not depend on the bucket.
    scale = {shape: side for side in sides for shape in list_shapes((side,), ASPECTS, 16)}
    assert [scale[shape] for shape in drawn] == [side for side, _ in same]


# ------------------------------------------------------------------------- crops


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333)])
@pytest.mark.parametrize("shape", [(192, 256), (224, 224)])
def test_crops_follow_torchvisions_distribution(height, width, shape):
    """RandomResizedCrop whose only ratio is that of the shape: Kolmogorov-Smirnov on areas and
    offsets of 2,000 crops each.
    """
    torch.manual_seed(0)
    image, ratio = torch.empty(3, height, width), shape[1] / shape[0]
    theirs = [RandomResizedCrop.get_params(image, [0.08, 1.0], [ratio] * 2) for _ in range(2000)]
    extents = np.full(2000, height), np.full(2000, width)
    ours, _ = plan(2000).crops(0, np.arange(2000), *extents, shape=shape)
    assert np.abs(ours[:, 3] / ours[:, 2] / ratio - 1).max() < 0.02
    for measure in (
        lambda b: b[:, 2] * b[:, 3],
        lambda b: b[:, 0] / np.maximum(height - b[:, 2], 1),
        lambda b: b[:, 1] / np.maximum(width - b[:, 3], 1),
    ):
        one, other = np.sort(measure(ours)), np.sort(measure(np.array(theirs, float)))
        both = np.concatenate([one, other])
        apart = [np.searchsorted(part, both, side="right") / 2000 for part in (one, other)]
        assert np.abs(apart[0] - apart[1]).max() < 1.95 * np.sqrt(2 / 2000)  # 99.9 %


@given(st.integers(20, 3000), st.integers(20, 3000), st.sampled_from([(192, 256), (320, 160)]))
@settings(max_examples=100)
def test_crops_are_inside_the_image_and_have_the_aspect_of_the_input(height, width, shape):
    """Also where no try fits, as in a panorama. Sides are whole pixels."""
    ids = np.arange(20)
    boxes, _ = plan().crops(0, ids, np.full(20, height), np.full(20, width), shape=shape)
    top, left, h, w = boxes.T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + h <= height).all()
    assert (left + w <= width).all()
    ratio = shape[1] / shape[0]
    # Rounded to half a pixel in each side.
    assert (np.abs(w - h * ratio) <= 0.5 * (1 + ratio) + 1e-9).all()


# ------------------------------------------------------------------------- loaders


def batches_of(source):
    """The plan and batches of epoch 1 with buckets of the stored sizes."""
    buckets = AspectBuckets(ASPECTS, 8, *source.extents())
    chosen = plan(len(source.labels), buckets, batch=2, sizes=((0, 48),))
    reader = ThreadedLoader(source, chosen, 2)
    batches = list(reader.batches(1))
    reader.close()
    return chosen, batches


def test_stored_sizes_are_those_of_the_images(folder, packed):
    """Any kind of file has a shape; one that cannot be read counts as square."""
    images = Images(folder, split="train")
    want = np.array([images.size(index) for index in range(len(images))]).T
    for source in (FolderSource(folder, "train", threads=2), FfcvSource(packed[0])):
        np.testing.assert_array_equal(source.extents(), want)
        source.close()


def test_sizes_of_other_files_are_found_too(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8)
    exif = Image.Exif()
    # Metadata before the size, longer than each of the first two reads.
    exif[0x927C] = bytes(60_000)
    for name, options in (("a.png", {}), ("b.jpg", dict(exif=exif)), ("c.webp", {})):
        path = tmp_path / "train" / "x" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise).save(path, **options)
    (tmp_path / "train" / "x" / "d.jpg").write_bytes(b"\xff\xd8\xff")
    source = FolderSource(tmp_path, "train", threads=2)
    assert np.array(source.extents()).T.tolist() == [[50, 70]] * 3 + [[1, 1]]
    # A file that only this process cannot read would give the ranks different batches.
    for name in ("a.png", "b.jpg"):
        path = tmp_path / "train" / "x" / name
        content = path.read_bytes()
        path.unlink()
        said = rf"{name}: .*; --aspects needs the size of every"
        # The error keeps its frames alive, and with them a progress bar that was not closed.
        with pytest.raises(UserError, match=said) as _caught:
            source.extents()
        assert all(type(thread).__name__ != "_TrackThread" for thread in threading.enumerate())
        path.write_bytes(content)
    source.close()


@pytest.mark.parametrize("kind", ["folder", "ffcv"])
def test_pixels_are_close_to_torchvisions_resized_crop(folder, packed, kind):
    """To height x width, antialiased; both sides are those of the bucket."""
    images = Images(folder, split="train")
    source = FolderSource(folder, "train") if kind == "folder" else FfcvSource(packed[0])
    chosen, batches = batches_of(source)
    seen = []
    for step, batch in enumerate(batches):
        shape = chosen.shape(1, step)
        seen.append(tuple(batch.image.shape[1:3]))
        for n in range(2):
            image = Image.open(images.where(int(batch.index[n]))).convert("RGB")
            size = np.array([image.height]), np.array([image.width])
            box, flip = chosen.crops(1, batch.index[n : n + 1].numpy(), *size, shape=shape)
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
            want = tv.resized_crop(pixels, *box[0].astype(int).tolist(), shape, antialias=True)
            want = want.flip(2) if flip[0] else want
            difference = (batch.image[n].permute(2, 0, 1).int() - want.int()).abs().float()
            assert difference.mean() <= 0.6
            assert (difference > 2).float().mean() < 2e-3
    assert seen == [chosen.shape(1, step) for step in range(chosen.batches)]
    assert set(seen) == {(56, 40), (48, 48), (40, 56)}


def test_memory_of_all_shapes_of_an_epoch_is_kept(packed):
    source = FfcvSource(packed[0])
    buckets = AspectBuckets(ASPECTS, 8, *source.extents())
    chosen = plan(11, buckets, batch=2, multi_scale=(48, 64))
    reader = ThreadedLoader(source, chosen, 2)
    for _ in reader.batches(0):
        pass
    memory = reader._memory
    for _ in reader.batches(1):
        pass
    assert reader._memory is memory
    reader.close()


def test_a_loader_that_does_not_know_sizes_is_refused(folder, monkeypatch):
    monkeypatch.delattr(FolderSource, "extents")
    with pytest.raises(UserError, match="--loader folder does not know the sizes of stored images"):
        open_dataset(DataOptions(train=folder, aspects=ASPECTS), "train", batch=2, seed=0)


def test_crops_of_tiny_images_have_a_pixel_at_least():
    """Whatever the aspect: a fallback of no width was taken for a damaged file."""
    ones = np.ones(64, np.uint16)
    tiny = plan(64, AspectBuckets((0.2, 5.0), 16, ones, ones), crop_scale=(0.08, 0.3))
    for shape in ((16, 80), (80, 16)):
        box, _ = tiny.crops(0, np.arange(64), ones, ones, shape=shape)
        assert box.tolist() == [[0.0, 0.0, 1.0, 1.0]] * 64

"""`folder` against `ffcv`, sample by sample; both against torchvision's crop; errors surface."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as tv

from densefeed.pipelines import loader as loader_module
from densefeed.pipelines.ffcv import FfcvSource
from densefeed.pipelines.folder import FolderSource
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.plan import EpochPlan
from densefeed.storage.geometry import crop_views
from densefeed.storage.images import Images
from densefeed.storage.score_maps import ScoreMapStore
from densefeed.system.errors import UserError


@pytest.fixture(scope="module")
def beton(packed):
    return packed[0]


def loader(source, batch=4, threads=2, seed=3, size=32, mode="train", way="bilinear", **options):
    plan = EpochPlan(
        num_samples=len(source.labels),
        batch=batch,
        seed=seed,
        mode=mode,
        sizes=((0, size),),
        crop_interpolation=way,
    )
    return ThreadedLoader(source, plan, threads, **options)


def epoch_of(source, epoch=0, start=0, **options):
    reader = loader(source, **options)
    batches = list(reader.batches(epoch, start))
    reader.close()
    return batches


@pytest.mark.parametrize("summed", [True, False], ids=["checksums", "none"])
def test_values_of_maps_are_checked_once_or_always_without_checksums(beton, monkeypatch, summed):
    """FFCV's own files have no checksums, so a map may hold other values the next time."""
    source, checked = FfcvSource(beton), []
    if not summed:
        source._beton.crcs = None
    reader = loader(source)
    wait = reader._wait

    def record(decoding):
        checked.append(bool(decoding.job.batch.parts.limits))
        wait(decoding)

    monkeypatch.setattr(reader, "_wait", record)
    for epoch in (0, 1):
        assert len(list(reader.batches(epoch))) == 3
    reader.close()
    assert checked == [True] * 3 + [not summed] * 3


@pytest.mark.parametrize("drawn", [1, 8, 1000])
def test_crops_are_those_of_the_plan_however_many_are_drawn_at_once(beton, monkeypatch, drawn):
    """In batches of 4, of which several are drawn at once, or each alone."""
    monkeypatch.setattr(loader_module, "DRAWN", drawn)
    source = FfcvSource(beton)
    # Closes the source that it reads.
    for batch in epoch_of(FfcvSource(beton), start=1):
        ids, repeats = batch.index.numpy(), batch.repeat.numpy()
        samples = source.begin(ids).wait().samples
        sides = samples["height"], samples["width"]
        crops = loader(source).plan.crops(0, ids, *sides, repeats)
        np.testing.assert_array_equal(batch.view.numpy(), crop_views(*crops, *sides))


@pytest.mark.parametrize("first", [1, 3])
def test_little_is_drawn_and_located_before_the_first_batch(beton, monkeypatch, first):
    """Of 11 samples in batches of 1: FIRST, and before the second batch twice as many more."""
    monkeypatch.setattr(loader_module, "FIRST", first)
    source, drawn, located = FfcvSource(beton), [], []
    reader = loader(source, batch=1)
    draw, locate, submit = EpochPlan.crop_draws, source.map_parts, reader._submit
    submitted = []

    def record_draw(plan, epoch, index, repeat):
        drawn.append(len(index))
        return draw(plan, epoch, index, repeat)

    def record_parts(ids):
        located.append(len(ids))
        return locate(ids)

    def record_submit(*arguments):
        submitted.append((sum(drawn), sum(located)))
        return submit(*arguments)

    monkeypatch.setattr(EpochPlan, "crop_draws", record_draw)
    monkeypatch.setattr(source, "map_parts", record_parts)
    monkeypatch.setattr(reader, "_submit", record_submit)
    batches = reader.batches(0)
    next(batches)
    # The first batch is submitted before the second is fetched, later ones after one more.
    numbers = {1: [1, 3, 7], 3: [3, 3, 9]}[first]
    assert submitted == [(number, number) for number in numbers]
    assert len(list(batches)) == 10
    reader.close()


@pytest.mark.parametrize(("block", "blocks"), [(1, 3), (8, 2), (1000, 1)])
def test_each_batch_has_the_maps_of_its_samples(beton, monkeypatch, block, blocks):
    """In batches of 4, of which none or several share a block of memory; all are held."""
    monkeypatch.setattr(loader_module, "FIRST", 1000)
    source = FfcvSource(beton)
    monkeypatch.setattr(loader_module, "BLOCK", block * source.score_maps.nbytes)
    # Closes the source that it reads.
    batches = epoch_of(FfcvSource(beton))
    memory = [batch.map_logit.untyped_storage().data_ptr() for batch in batches]
    assert len(set(memory)) == blocks
    for batch in batches:
        fields = batch.map_logit, batch.map_class, batch.map_lse, batch.window
        assert sum(field[0].nbytes for field in fields) == source.score_maps.nbytes
        for field, want in zip(fields, source.maps(batch.index.numpy()), strict=True):
            np.testing.assert_array_equal(field.numpy(), want)


@pytest.mark.parametrize("way", ["bilinear", "bicubic", "random"])
def test_pixels_are_close_to_torchvisions_resized_crop(folder, way):
    """Chroma is resampled at half resolution and color is converted once, so rounding differs, and
    clipped colors differ slightly.
    """
    seen = set()
    source = FolderSource(folder, "train")
    images = Images(folder, split="train")
    plan = loader(source, way=way).plan
    for batch in epoch_of(source, way=way):
        for n in range(4):
            image, index = Image.open(images.where(int(batch.index[n]))), batch.index[n : n + 1]
            image = image.convert("RGB")
            box, flip = plan.crops(
                0, index.numpy(), np.array([image.height]), np.array([image.width])
            )
            cubic = bool(plan.cubic_crops(plan.crop_draws(0, index.numpy())))
            seen.add(cubic)
            top, left, height, width = box[0].astype(int).tolist()
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
            how = tv.InterpolationMode.BICUBIC if cubic else tv.InterpolationMode.BILINEAR
            want = tv.resized_crop(pixels, top, left, height, width, [32, 32], how, antialias=True)
            want = want.flip(2) if flip[0] else want
            difference = (batch.image[n].permute(2, 0, 1).int() - want.int()).abs().float()
            assert difference.mean() <= 0.6
            assert (difference > 2).float().mean() < (5e-3 if cubic else 1e-3), difference.max()
    assert seen == {"bilinear": {False}, "bicubic": {True}, "random": {False, True}}[way]


def test_views_map_to_the_pixels_of_the_crop(folder):
    """The stored image sampled at View(token centers) resembles the crop, and not its mirror
    image.
    """
    source, images = FolderSource(folder, "train"), Images(folder, split="train")
    centers = (torch.arange(8) + 0.5) / 8
    points = torch.stack([*torch.meshgrid(centers, centers, indexing="xy"), torch.ones(8, 8)], -1)
    for batch in epoch_of(source):
        for n in range(4):
            image = (
                torch.from_numpy(
                    np.array(Image.open(images.where(int(batch.index[n]))).convert("RGB"))
                )
                .permute(2, 0, 1)[None]
                .float()
            )
            grid = (points @ batch.view[n].T) * 2 - 1
            want = torch.nn.functional.grid_sample(image, grid[None], align_corners=False)[
                0
            ].permute(1, 2, 0)
            crop = torch.nn.functional.avg_pool2d(
                batch.image[n].permute(2, 0, 1).float(), 4
            ).permute(1, 2, 0)
            right, mirrored = (crop - want).abs().mean(), (crop.flip(1) - want).abs().mean()
            assert right < 12  # the crop is averaged over a token, the image is not
            assert right < 0.5 * mirrored


def test_maps_equal_the_rows_of_the_store(folder, maps):
    store = ScoreMapStore(maps)
    for batch in epoch_of(FolderSource(folder, "train", maps)):
        rows = store.rows(batch.index.numpy())
        np.testing.assert_array_equal(batch.map_logit.numpy(), rows.logit)
        np.testing.assert_array_equal(batch.map_class.numpy(), rows.cls)
        np.testing.assert_array_equal(batch.window.numpy(), rows.window)


def test_two_ranks_together_give_the_epoch_and_repeats_differ(beton):
    """11 samples twice in batches of 4: the last batch has two rows of padding, one on each rank;
    rank 0 has rows 0 and 3.
    """
    epochs = {}
    for ranks in (1, 2):
        for rank in range(ranks):
            source = FfcvSource(beton)
            plan = EpochPlan(
                num_samples=11,
                batch=4,
                seed=3,
                mode="train",
                repeats=2,
                rank=rank,
                ranks=ranks,
                sizes=((0, 32),),
            )
            reader = ThreadedLoader(source, plan, threads=2)
            epochs[ranks, rank] = list(reader.batches(0))
            reader.close()
    for whole, first, second in zip(epochs[1, 0], epochs[2, 0], epochs[2, 1], strict=True):
        for name, field in whole.tensors.items():
            both = torch.cat([first.tensors[name], second.tensors[name]])
            assert torch.equal(field[[0, 3, 1, 2]], both), name
        assert (whole.index[0::2] == whole.index[1::2]).all()
        assert all((whole.view[n] != whole.view[n + 1]).any() for n in (0, 2))
    assert epochs[2, 0][-1].weight.tolist() == epochs[2, 1][-1].weight.tolist() == [1, 0]


def test_memory_is_kept_between_epochs_until_the_size_changes(beton):
    plan = EpochPlan(num_samples=11, batch=4, seed=3, mode="train", sizes=((0, 16), (2, 48)))
    reader = ThreadedLoader(FfcvSource(beton), plan, threads=2)
    # All batches of an epoch at once, so that each has memory of its own.
    places = []
    for epoch in range(3):
        batches = list(reader.batches(epoch))
        places.append({batch.image.data_ptr() for batch in batches})
        del batches
    assert len(places[0]) == 3
    assert places[0] == places[1]
    # Blocks of 16 x 16 images serve no images of 48 x 48.
    sizes = {shape for shape, _ in reader._memory._free if shape[-1] == 3}
    assert sizes == {(4, 48, 48, 3)}
    reader.close()


def test_maps_of_another_dataset_are_refused(folder, maps, tmp_path, command):
    other = shutil.copytree(folder, tmp_path / "other")
    next((other / "train" / "cat").glob("*.jpg")).unlink()
    with pytest.raises(UserError, match=r"another dataset"):
        FolderSource(other, "train", maps)
    packed = tmp_path / "other.beton"
    assert command("tools/pack_dataset.py", "--data", other, "--out", packed).returncode == 0
    with pytest.raises(UserError, match=r"another dataset"):
        FfcvSource(packed, maps)


def test_order_blocks_prefetches_before_it_reads(beton, monkeypatch):
    known, begin, early = set(), ThreadedLoader._begin, []
    monkeypatch.setattr(
        FfcvSource, "read_ahead", lambda self, first, end: known.update(range(first, end))
    )

    def begin_known(self, ids, *given):
        early.append(len(known) == 11)
        assert known.issuperset(ids.tolist())
        return begin(self, ids, *given)

    monkeypatch.setattr(ThreadedLoader, "_begin", begin_known)
    source = FfcvSource(beton)
    plan = EpochPlan(
        num_samples=11,
        batch=2,
        seed=3,
        mode="train",
        order="blocks",
        block=2,
        window=2,
        sizes=((0, 32),),
    )
    reader = ThreadedLoader(source, plan, 2)
    assert len(list(reader.batches(0))) == 6
    reader.close()
    # At an even rate, however many batches are located at once.
    assert early == [False] * 3 + [True] * 3

"""The same images as files, tar and Parquet shards and .beton give equal batches with equal maps.

So do labeling and packing: the files that they write are equal, byte for byte.
"""

import json
from collections import Counter
from dataclasses import replace

import pytest
import timm
import torch

from densefeed.pipelines.augment.augmentation import Augmentation
from densefeed.pipelines.augment.settings import Augment
from densefeed.pipelines.loader import ThreadedLoader
from densefeed.pipelines.open import DataOptions, open_beton, open_dataset, open_folder
from densefeed.pipelines.plan import EpochPlan
from densefeed.relabel.teacher import Teacher
from densefeed.storage import parquet_files
from densefeed.storage.images import Images
from densefeed.system.errors import UserError
from densefeed.tools.pack_dataset import Packing, main

from ..runs import label_images
from ..shard_files import write_parquet, write_shards

AUGMENT = Augment(rand_augment="rand-m9-mstd0.5-inc1", erase_probability=0.5)
MEAN = STD = (0.5, 0.5, 0.5)
KINDS = "tar", "parquet"


@pytest.fixture(scope="module")
def shards(folder, tmp_path_factory):
    """Where the images of `folder` lie, by the form of their storage."""
    root = tmp_path_factory.mktemp("shards")
    for split in ("train", "val"):
        tars, tables = write_shards(Images(folder, split=split), root, split)
    return {"folder": folder, "tar": tars, "parquet": tables}


def read_batches(source, mode, augment):
    """Read one epoch, augmented if `augment` is given; the tensors of each batch."""
    plan = EpochPlan(
        num_samples=len(source.labels), batch=4, seed=5, mode=mode, repeats=1, sizes=((0, 32),)
    )
    loader = ThreadedLoader(source, plan, 2)
    augmentation = Augmentation(plan, augment, MEAN, STD) if augment else None
    found = []
    for batch in loader.batches(0):
        if augmentation:
            ids = batch.epoch, batch.index, batch.repeat
            batch = augmentation(batch, augmentation.choose(*ids, *batch.image.shape[1:3]))
        found.append([part for part in batch if isinstance(part, torch.Tensor)])
    loader.close()
    return found


@pytest.mark.parametrize("augment", [None, AUGMENT], ids=["plain", "augmented"])
@pytest.mark.parametrize("mode", ["train", "evaluate"])
def test_folder_tar_parquet_and_beton_give_equal_batches(shards, maps, packed, mode, augment):
    training = mode == "train"
    maps = maps if training else None
    sources = [open_folder(path, mode, maps, 2) for path in shards.values()]
    sources.append(open_beton(packed[0 if training else 1], mode, None, 1))
    want, *others = (read_batches(source, mode, augment) for source in sources)
    assert len(want) == 3 if training else 1
    # image, label, view, index, weight and others; four fields of maps.
    assert len(want[0]) >= (9 if training else 5)
    for batches in others:
        for one, other in zip(want, batches, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_labels_of_shards_equal_those_of_the_folder(shards, tmp_path, kind):
    torch.manual_seed(0)
    config = {"mean": MEAN, "std": STD, "interpolation": "bilinear"}
    model = timm.create_model("test_resnet", num_classes=2)
    for name in ("folder", kind):
        teacher = Teacher(model, 64, "squash", config)
        options = dict(top_k=2, batch=4, threads=2, absent="tail")
        label_images(Images(shards[name]), teacher, "t", tmp_path / f"{name}.h5", **options)
    assert (tmp_path / f"{kind}.h5").read_bytes() == (tmp_path / "folder.h5").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_packing_shards_equals_packing_the_folder(shards, maps, packed, tmp_path, kind):
    main(Packing(data=shards[kind], out=tmp_path / "x.beton", maps=maps))
    assert (tmp_path / "x.beton").read_bytes() == packed[0].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_and_validation_read_shards(shards, maps, tmp_path, command, kind):
    words = "--loader folder --epochs 1 --batch 4 --size 32 --threads 1".split()  # noqa: SIM905
    words += [
        "--data",
        shards[kind],
        "--val",
        shards[kind],
        "--score-maps",
        maps,
        "--device",
        "cpu",
    ]
    done = command("train.py", "lvvit_micro_token_label", *words, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    trained = json.loads((tmp_path / "run" / "result.json").read_text())
    words = "--loader", "folder", "--threads", "1", "--json", tmp_path / "result.json"
    words += ("--data", shards[kind], "--device", "cpu")
    done = command("tools/validate.py", tmp_path / "run", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "result.json").read_text())["top1"] == trained["top1"]


def test_training_from_much_parquet_needs_order_blocks_and_validation_does_not(
    folder, tmp_path, monkeypatch
):
    """Sixteen row groups of 3 images; the cache has room for 4 of the largest."""
    images = Images(folder)
    rows = [(None, images.read(n % len(images)), n % 2) for n in range(48)]
    root = write_parquet(tmp_path / "x.parquet", rows, ["cat", "dog"]).parent
    file = parquet_files.open_parquet(root / "x.parquet")
    largest = max(parquet_files.count_bytes(file, group) for group in range(16))
    monkeypatch.setattr(parquet_files, "CACHE", 4 * largest)
    options = {"batch": 2, "seed": 5}
    data = DataOptions(train=root, val=root, loader="folder", size=32, threads=2)
    with pytest.raises(UserError, match=r"give --order blocks, which shuffles within 3 images, or"):
        open_dataset(data, "train", **options)
    open_dataset(data, "evaluate", **options).close()
    read, count = [], parquet_files.ParquetFile.read
    counting = lambda *words: read.append(words[0].path.name + str(words[2])) or count(*words)  # noqa: E731
    monkeypatch.setattr(parquet_files.ParquetFile, "read", counting)
    loader = open_dataset(replace(data, order="blocks"), "train", **options)
    for epoch in range(2):
        read.clear()
        ids = torch.cat([batch.index[batch.weight > 0] for batch in loader.batches(epoch)]).tolist()
        assert sorted(ids) == [*range(len(loader.source.labels))]
        assert len(set(read)) > 8
        assert max(Counter(read).values()) <= 2
    loader.close()
    monkeypatch.setattr(parquet_files, "CACHE", largest)
    with pytest.raises(UserError, match="too large for training; pack it with densefeed pack"):
        open_dataset(data, "train", **options)

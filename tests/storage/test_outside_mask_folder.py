"""Folders of images with hard masks: four layouts, what they hold, what is refused."""

import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision import tv_tensors
from torchvision.transforms import v2

import densefeed
from densefeed import MaskFolder, UserError
from densefeed.storage.images import Images, SplitOptions

NAMES = [f"c{number}" for number in range(5)]
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 5, (3, 20, 24), dtype=np.uint8)
IDS[:, :4] = 255


def save(path, pixels, palette=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels)
    if palette:
        image = image.convert("L")
        image.putpalette(RNG.integers(0, 256, 768, dtype=np.uint8).tobytes())
    image.save(path)


def write(root, images, masks, ids, palette=False):
    for number, pixels in enumerate(ids):
        save(root / images / f"{number}.jpg", RNG.integers(0, 256, (20, 24, 3), dtype=np.uint8))
        save(root / masks / f"{number}.png", pixels, palette)


@pytest.fixture
def plain(tmp_path):
    write(tmp_path, "images", "masks", IDS)
    return tmp_path


def want(number):
    ids = torch.from_numpy(IDS[number].astype(np.int64))
    return torch.where(ids == 255, -1, ids)


def test_outside_plain_folders_hold_ids_and_255(plain):
    (plain / "masks/1.png").unlink()
    data = MaskFolder(plain, classes=NAMES)
    assert (len(data), data.classes) == (3, NAMES)
    item = data[0]
    assert item["image"].size == (24, 20)
    assert isinstance(item["mask"], tv_tensors.Mask)
    assert torch.equal(item["mask"].as_subclass(torch.Tensor), want(0))
    assert item["label"] == want(0)[4:].flatten().bincount().argmax() == data.labels[0]
    # Without a file every pixel is unlabeled.
    assert (data[1]["mask"] == -1).all()
    assert data[1]["mask"].shape == (20, 24)
    cut = v2.RandomCrop(8)(data[2])
    assert cut["mask"].shape == (8, 8) == cut["image"].size


def test_outside_ades_ids_begin_at_1(tmp_path):
    ids = np.where(IDS == 255, 0, IDS + 1).astype(np.uint8)
    write(tmp_path, "images/validation", "annotations/validation", ids)
    table = "Idx\tRatio\tTrain\tVal\tStuff\tName\n"
    rows = [f"{n + 1}\t0.1\t10\t5\t1\t{name}, other" for n, name in enumerate(NAMES)]
    (tmp_path / "objectInfo150.txt").write_text(table + "\n".join(rows))
    for split in ("val", "validation"):
        data = MaskFolder(tmp_path, split)
        assert data.classes == [f"{name}, other" for name in NAMES]
        assert torch.equal(data.mask(2), want(2))
    with pytest.raises(UserError, match="images/training is missing"):
        MaskFolder(tmp_path)


def test_outside_pascals_palettes_are_class_ids(tmp_path):
    write(tmp_path, "JPEGImages", "SegmentationClass", IDS, palette=True)
    lists = tmp_path / "ImageSets/Segmentation"
    lists.mkdir(parents=True)
    (lists / "val.txt").write_text("2\n0\n")
    data = MaskFolder(tmp_path, "val")
    assert len(data.classes) == 21
    assert [path.stem for path in data.images] == ["2", "0"]
    assert torch.equal(data.mask(0), want(2))
    with pytest.raises(UserError, match=r"train.txt is missing; give a split"):
        MaskFolder(tmp_path)
    (lists / "val.txt").write_text("7\n")
    with pytest.raises(UserError, match=r"7.jpg is missing, and .*val.txt lists it"):
        MaskFolder(tmp_path, "val")


def remove_masks(root):
    for path in (root / "masks").iterdir():
        path.unlink()
    (root / "masks").rmdir()


BREAKS = {
    "has neither masks, nor annotations": remove_masks,
    "is not a folder; give the one that": lambda root: root.rename(root.with_name("moved")),
    "0.jpg is no PNG file, as masks are; save it": lambda root: (root / "masks/0.png").rename(
        root / "masks/0.jpg"
    ),
    "9.png is a mask of no image": lambda root: save(root / "masks/9.png", IDS[0]),
    "several images of the same name": lambda root: save(root / "images/0.png", IDS[0]),
    r"0.png has class 7, and there are 5 classes from 0 on": lambda root: save(
        root / "masks/0.png", IDS[0] // 255 * 248 + 7
    ),
    "0.png has 9 x 9 pixels and .*0.jpg 24 x 20": lambda root: save(
        root / "masks/0.png", IDS[0, :9, :9]
    ),
    "0.png is an image of mode RGB, not of class ids": lambda root: save(
        root / "masks/0.png", np.zeros((20, 24, 3), np.uint8)
    ),
    "0.png cannot be read": lambda root: (root / "masks/0.png").write_bytes(b"none"),
}


@pytest.mark.parametrize("said", BREAKS)
def test_outside_a_folder_that_is_wrong_is_one_sentence(plain, said):
    BREAKS[said](plain)
    with pytest.raises(UserError, match=said) as error:
        MaskFolder(plain, classes=NAMES)[0]
    assert "\n" not in str(error.value)


def test_outside_masks_may_be_named_in_capitals(plain):
    """They were taken for none."""
    (plain / "masks/0.png").rename(plain / "masks/0.PNG")
    assert torch.equal(MaskFolder(plain, classes=NAMES).mask(0), want(0))


def test_outside_classes_must_be_known(plain):
    with pytest.raises(UserError, match=r"the classes of .* are not known; write .*classes\.txt"):
        MaskFolder(plain)
    (plain / "classes.txt").write_text("\n".join(NAMES))
    assert MaskFolder(plain).classes == NAMES


def test_outside_a_damaged_table_of_ade20k_is_not_needed_beside_other_names(tmp_path):
    """Its error offered classes that were then not read."""
    write(tmp_path, "images/training", "annotations/training", IDS % 255 + 1)
    (tmp_path / "objectInfo150.txt").write_text("Index\n1\n")
    with pytest.raises(UserError, match=r"objectInfo150\.txt has no column Name; .* classes\.txt"):
        MaskFolder(tmp_path)
    assert MaskFolder(tmp_path, classes=NAMES).classes == NAMES
    (tmp_path / "classes.txt").write_text("\n".join(NAMES))
    assert MaskFolder(tmp_path).classes == NAMES


class Segmenter(nn.Module):
    """Logits of five classes of every pixel: of its color."""

    class_names = NAMES

    def forward(self, image_NCHW):
        return {"out": image_NCHW[:, [0, 1, 2, 0, 1]].abs() * torch.arange(1, 6).view(5, 1, 1)}


def test_outside_the_page_runs(tmp_path, monkeypatch):
    ids = np.where(IDS == 255, 0, IDS + 1).astype(np.uint8)
    root = tmp_path / "ADEChallengeData2016"
    write(root, "images/training", "annotations/training", ids)
    (root / "classes.txt").write_text("\n".join(NAMES))
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/reference/masks.md").read_text()
    first, loss, hard = (part.partition("```")[0] for part in page.split("```python")[1:])
    names = {"teacher": Segmenter(), "ids": [2, 0], "view": torch.eye(2, 3).repeat(2, 1, 1)}
    names["logits"] = torch.zeros(2, 5, 512, 512, requires_grad=True)
    exec(first + loss + hard, names)
    # Logits of 0 call all classes alike.
    torch.testing.assert_close(names["loss"].item(), np.log(5), rtol=1e-5, atol=0)
    assert names["masks"].hard.shape == (2, 512, 512)
    with densefeed.open_score_maps("maps.h5") as labels:
        assert labels.targets([0], names["view"][:1], 64).weight.eq(1).all()


def test_outside_images_with_masks_are_labeled_and_trained_on(plain, tmp_path):
    data = MaskFolder(plain, classes=NAMES)
    path = tmp_path / "maps.h5"
    densefeed.label(data, Segmenter(), path, input_size=32, top_k=5, device="cpu", map_side=8)
    view = torch.tensor([[[0.5, 0.0, 0.25], [0.0, 0.5, 0.5]]] * 3)
    hard = densefeed.sample_masks([data.mask(n) for n in range(3)], view, (10, 12))
    with densefeed.open_score_maps(path, data) as labels:
        masks = labels.soft_masks(range(3), view, (10, 12)).mix(hard, 0.5)
        logits = torch.zeros(3, 5, 10, 12, requires_grad=True)
        loss = densefeed.sparse_loss(logits, masks)
    loss.backward()
    torch.testing.assert_close(loss.item(), np.log(5), rtol=1e-5, atol=0)
    assert logits.grad.abs().sum() > 0


def write_scenes(root):
    """Two scenes of 4 x 6 pixels with objects of two of three classes, and one of val."""
    shown = {
        "train/cat/a.jpg": ["cat", "ant"],
        "train/ant/b.jpg": ["ant"],
        "val/bee/c.jpg": ["bee"],
    }
    for name, classes in shown.items():
        mask = np.zeros((4, 6), np.uint8)
        mask[:, : len(classes)] = range(1, len(classes) + 1)
        save(root / name, np.zeros((4, 6, 3), np.uint8))
        save((root / "masks" / name).with_suffix(".png"), mask)
    scenes = {name: [{"class": each} for each in found] for name, found in shown.items()}
    (root / "boxes.json").write_text(json.dumps({"scenes": scenes}))
    return scenes


def test_outside_masks_of_scenes_have_the_classes_of_their_objects(tmp_path):
    scenes = write_scenes(tmp_path)
    data = MaskFolder(tmp_path)
    assert (
        data.classes == MaskFolder(tmp_path, "val").classes == ["background", "ant", "bee", "cat"]
    )
    # In the order of the paths: b of ants, then a with a cat and an ant.
    assert data.mask(0).tolist() == [[1, 0, 0, 0, 0, 0]] * 4
    assert data.mask(1).tolist() == [[3, 1, 0, 0, 0, 0]] * 4
    (tmp_path / "masks/train/cat/a.png").unlink()
    assert MaskFolder(tmp_path).mask(1).shape == (0, 0)
    with pytest.raises(UserError, match="lists no scenes of the split test; give another"):
        MaskFolder(tmp_path, "test")
    scenes["held-out/x/d.jpg"] = [{"class": "cow"}]
    (tmp_path / "boxes.json").write_text(json.dumps({"scenes": scenes}))
    with pytest.raises(UserError, match=r"of a class that train and val lack \(cow\); give one"):
        MaskFolder(tmp_path, "held-out")
    save(tmp_path / "masks/train/ant/b.png", np.full((4, 6), 2, np.uint8))
    with pytest.raises(UserError, match=r"b.png has more objects than boxes.json lists; make"):
        MaskFolder(tmp_path).mask(0)
    # No object, and not unlabeled: it was the last object.
    save(tmp_path / "masks/train/ant/b.png", np.full((4, 6), 255, np.uint8))
    with pytest.raises(UserError, match=r"b.png has more objects than boxes.json lists; make"):
        MaskFolder(tmp_path).mask(0)
    (tmp_path / "boxes.json").write_text('{"scenes": [1]}')
    with pytest.raises(UserError, match="does not list the objects of scenes; make the scenes"):
        MaskFolder(tmp_path)


def test_outside_commands_read_folders_of_masks(tmp_path):
    """Labels are 0 whatever the masks, so that maps stay valid; a part keeps its masks."""
    write_scenes(tmp_path)
    images = Images(tmp_path, "masks", "train")
    assert (images.labels.tolist(), images.class_names[3]) == ([0, 0], "cat")
    before = images.fingerprint()
    (tmp_path / "masks/train/cat/a.png").unlink()
    assert Images(tmp_path, "masks", "train").fingerprint() == before
    part = Images(tmp_path, "masks", "train", division=SplitOptions(val_fraction=0.5, val_seed=0))
    assert part.masks.mask(int(part.rows[0])).shape in ((4, 6), (0, 0))
    with pytest.raises(UserError, match="--dataset masks/x: the layout has no names"):
        Images(tmp_path, "masks/x", "train")


def write_gray(path, rows, depth):
    """Write a gray PNG of this depth, which Pillow cannot."""
    height, width = rows.shape
    bits = (rows[..., None] >> np.arange(depth)[::-1]) & 1
    lines = np.packbits(bits.reshape(height, -1).astype(np.uint8), axis=1)
    pixels = zlib.compress(b"".join(b"\0" + line.tobytes() for line in lines))
    header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    for kind, part in ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")):
        content += struct.pack(">I", len(part)) + kind + part
        content += struct.pack(">I", zlib.crc32(kind + part))
    path.write_bytes(content)


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_outside_gray_of_any_depth_holds_ids(plain, depth):
    """Pillow multiplied ids of 2 bits by 85, and of 4 bits by 17."""
    most = min(2**depth, 200)
    ids = RNG.integers(0, most, (20, 24))
    write_gray(plain / "masks/1.png", ids, depth)
    data = MaskFolder(plain, classes=[str(number) for number in range(most)])
    assert np.array_equal(data.mask(1), ids)
    short = MaskFolder(plain, classes=[str(number) for number in range(int(ids.max()))])
    with pytest.raises(UserError, match=rf"1.png has class {ids.max()}, and there are {ids.max()}"):
        short.mask(1)


def test_outside_a_jpeg_by_the_name_of_a_png_is_refused(plain):
    Image.fromarray(IDS[1]).save(plain / "masks/1.png", "JPEG")
    with pytest.raises(UserError, match=r"1.png is a JPEG file, which may hold other ids; save it"):
        MaskFolder(plain, classes=NAMES).mask(1)


def test_outside_classes_are_a_list_of_names(plain):
    for given in ("abc", 5):
        with pytest.raises(UserError, match=rf"^classes is {given!r}; give a list of names"):
            MaskFolder(plain, classes=given)

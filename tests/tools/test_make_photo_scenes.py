"""Photo scenes: masks against a composition in float64, what is held out, bad input, packages."""

import csv
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.random import default_rng
from PIL import Image

from densefeed.pages.true_objects import read_objects
from densefeed.relabel.class_map import read_class_map
from densefeed.storage.images import Images
from densefeed.storage.mask_folder import MaskFolder
from densefeed.system.errors import UserError
from densefeed.tools import make_photo_scenes
from densefeed.tools.make_photo_scenes import (
    CLASS_MAP,
    KEPT,
    LEAST_VISIBLE,
    SPLITS,
    Cutout,
    PhotoScenes,
    arrange,
    draw_background,
    draw_cutout,
    list_cutouts,
    main,
    read_folders,
)

from ..drawn_pictures import BACKGROUNDS, COLORS, draw_pictures, draw_shape
from ..storage.test_debian_packages import write_tools

SIZE = 160, 120


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    draw_pictures(root)
    return root


def describe(folders, out, **fields) -> PhotoScenes:
    numbers = dict(train=24, val=9, held_out=9, hold_out=0.3, width=SIZE[0], height=SIZE[1])
    own = dict(cutouts=folders / "cutouts", backgrounds=folders / "backgrounds")
    return PhotoScenes(out=out, **(numbers | own | fields))


@pytest.fixture(scope="module")
def scenes(folders, tmp_path_factory):
    made = describe(folders, tmp_path_factory.mktemp("photos") / "photos")
    main(made)
    return made


def files(root):
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def read_mask(out, name):
    return np.asarray(Image.open((out / "masks" / name).with_suffix(".png")))


def read_boxes(out):
    return json.loads((out / "boxes.json").read_text())


def place_again(scenes: PhotoScenes, name: str):
    """Return background and layers of a scene, from its generator."""
    pictures = read_folders(scenes)
    split, label, file = name.split("/")
    number = int(file.removesuffix(".jpg"))
    cutouts = (pictures.held_out if split == "held-out" else pictures.cutouts)[label]
    others = {name: found for name, found in pictures.cutouts.items() if name != label}
    rng = default_rng([scenes.seed, SPLITS.index(split), number])
    canvas = draw_background(rng, pictures.backgrounds[split], scenes.size)
    chosen = cutouts[number // len(pictures.cutouts) % len(cutouts)]
    return canvas, arrange(rng, label, chosen, others, scenes.size)


def test_masks_and_pixels_are_those_of_a_composition_in_float64(scenes):
    """From front to back, where the tool paints from back to front."""
    overlapping = 0
    for name in read_boxes(scenes.out)["scenes"]:
        canvas, layers = place_again(scenes, name)
        through, color = np.ones((120, 160)), np.zeros((120, 160, 3))
        weight = np.zeros((len(layers) + 1, 120, 160))
        for layer in reversed(layers):
            whole = np.zeros((120, 160, 4))
            height, width = layer.pixels.shape[:2]
            whole[layer.top : layer.top + height, layer.left : layer.left + width] = layer.pixels
            alpha = whole[..., 3] / 255
            weight[layer.number] = through * alpha
            color += through[..., None] * whole[..., :3]
            through *= 1 - alpha
        weight[0] = through
        color += through[..., None] * canvas
        assert np.allclose(weight.sum(0), 1)
        mask, ordered = read_mask(scenes.out, name), np.sort(weight, 0)
        clear = ordered[-1] - ordered[-2] > 1e-6
        assert clear.mean() > 0.99
        assert (mask == weight.argmax(0))[clear].all()
        overlapping += (np.count_nonzero(weight[1:] > 0.1, axis=0) > 1).any()
        pixels = np.asarray(Image.open(scenes.out / name), float)
        assert abs(pixels - color).mean() < 4
    assert overlapping > 5


def test_each_object_is_visible_and_its_box_encloses_its_mask(scenes):
    document = read_boxes(scenes.out)
    assert document["size"] == [160, 120]
    assert len(document["scenes"]) == 24 + 9 + 9
    counts = []
    for name, objects in document["scenes"].items():
        assert objects[0]["class"] == name.split("/")[1]
        assert all(one["class"] != objects[0]["class"] for one in objects[1:])
        mask = read_mask(scenes.out, name)
        assert mask.dtype == np.uint8
        assert set(np.unique(mask)) == set(range(len(objects) + 1))
        areas = np.bincount(mask.ravel())[1:]
        assert areas.min() >= LEAST_VISIBLE
        assert areas.argmax() == 0
        for number, one in enumerate(objects, 1):
            rows, columns = (np.flatnonzero((mask == number).any(axis)) for axis in (1, 0))
            assert one["box"] == [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
        for layer in place_again(scenes, name)[1]:
            assert areas[layer.number - 1] >= KEPT * (layer.pixels[..., 3] > 127).sum()
        counts.append(len(objects))
    assert min(counts) < max(counts) <= 4


def test_what_is_held_out_is_never_in_training(scenes):
    """Seen in the pixels of the scenes, whose cut-outs and backgrounds have colors of their own."""
    names, seen, behind = list(COLORS), {}, {}
    for name, objects in read_boxes(scenes.out)["scenes"].items():
        split = name.split("/")[0]
        pixels = np.asarray(Image.open(scenes.out / name), float)
        mask = read_mask(scenes.out, name)
        for number, one in enumerate(objects, 1):
            color = np.median(pixels[mask == number], axis=0)
            nearest = min(names, key=lambda file: abs(COLORS[file] - color).sum())
            assert nearest.split("/")[0] == one["class"]
            seen.setdefault((split, number == 1), set()).add(nearest)
        color = np.median(pixels[mask == 0], axis=0)
        ratio = {key: np.array(value) / max(value) for key, value in BACKGROUNDS.items()}
        nearest = min(ratio, key=lambda key: abs(ratio[key] - color / color.max()).sum())
        behind.setdefault(split, set()).add(nearest)
    held = seen["held-out", True]
    assert len(held) == 3
    training = seen["train", True]
    assert training == set(names) - held == seen["val", True]
    assert all(found <= training for key, found in seen.items() if key != ("held-out", True))
    assert len(behind["train"]) == 3
    assert behind["val"] == behind["held-out"] == set(BACKGROUNDS) - behind["train"]


def test_a_tenth_of_the_masks_is_left_by_the_code_of_the_results(scenes, tmp_path, monkeypatch):
    """docs/results/segmentation.md: one set of these scenes alone, one of all scenes."""
    page = Path(__file__).parents[2] / "docs/results/segmentation.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    (tmp_path / "scenes").symlink_to(scenes.out)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    whole, few, mixed = (MaskFolder(name) for name in ("scenes", "few", "mixed"))
    names = [path.name for path in whole.images]
    assert [path.name for path in few.images] == names[::10]
    assert few.classes == mixed.classes == whole.classes
    assert all(few.masks)
    kept = [bool(mask) for mask in mixed.masks]
    assert kept == [number % 10 == 0 for number in range(24)]
    assert files(mixed.root)["boxes.json"] == files(whole.root)["boxes.json"]
    assert all(torch.equal(mixed.mask(n), whole.mask(n)) for n in range(0, 24, 10))


@pytest.mark.slow
def test_scenes_depend_on_the_seed_and_not_on_their_number(folders, scenes, tmp_path):
    main(describe(folders, tmp_path / "more", train=30, val=12, held_out=3, threads=1))
    main(describe(folders, tmp_path / "other", seed=1))
    first, more, other = (files(out) for out in (scenes.out, tmp_path / "more", tmp_path / "other"))
    common = [name for name in set(first) & set(more) if name.endswith((".jpg", ".png"))]
    assert len(common) == 2 * (24 + 9 + 3)
    assert all(first[name] == more[name] for name in common)
    assert all(first[n] != other[n] for n in set(first) & set(other) if n.endswith(".jpg"))
    again = read_boxes(tmp_path / "more")["scenes"]
    objects = read_boxes(scenes.out)["scenes"]
    assert all(objects[name] == again[name] for name in common if name.endswith(".jpg"))
    main(describe(folders, tmp_path / "again"))
    assert files(tmp_path / "again") == first


def test_the_folder_is_read_as_splits_and_its_masks_are_not(scenes, capsys):
    for split, count in (("train", 24), ("val", 9), ("held-out", 9)):
        images = Images(scenes.out, split=split)
        assert len(images) == count
        assert images.class_names == ["bar", "disc", "ring"]
        assert np.ptp(np.bincount(images.labels)) == 0
        truths = list(read_objects(scenes.out / "boxes.json", images, split))
        assert [truth.classes[0] for truth in truths] == images.labels.tolist()
        assert all(truth.boxes_ltrb.max() <= 1 for truth in truths)
    assert len(Images(scenes.out / "held-out", split="val")) == 9
    with open(scenes.out / "held_out_map.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [["teacher", "data"], ["bar", "bar"], ["disc", "disc"], ["ring", "ring"]]
    assert not (scenes.out / "class_map.csv").exists()


@pytest.mark.parametrize("area", [300, 2500, 10_000_000])
def test_a_cut_out_keeps_color_and_aspect_and_gets_no_dark_fringe(area):
    image = draw_shape("bar", (200, 120, 40))
    image = image.crop(image.getchannel("A").getbbox()).convert("RGBa")
    opaque = int((np.asarray(image)[..., 3] > 127).sum())
    mass = (np.asarray(image)[..., 3] / 255).sum()
    for seed in range(20):
        pixels = draw_cutout(default_rng(seed), Cutout(image, opaque, "x"), area, (320, 240))
        assert pixels.shape[1] <= 320
        assert pixels.shape[0] <= 240
        alpha = pixels[..., 3] / 255
        some = alpha > 0.2
        # Rounding of three steps in 8 bits, divided by alpha.
        color = pixels[some][:, :3] / alpha[some][:, None]
        assert abs(color - [200, 120, 40]).max() < 12
        # It is enlarged at most twice. Sides of some 18 half pixels are rounded.
        scale = alpha.sum() / mass
        assert scale == pytest.approx(min(area / opaque, 4), rel=0.06)
        # The axes of the mass have the aspect of the bar, whatever its angle.
        y, x = np.nonzero(alpha)
        low, high = np.sqrt(np.linalg.eigvalsh(np.cov(x, y, aweights=alpha[y, x])))
        assert high / low == pytest.approx(72 / 20, rel=0.12)
        assert ((alpha > 0) & (alpha < 1)).any()


@pytest.mark.parametrize(
    ("file", "picture", "match"),
    [
        ("x.png", Image.new("RGB", (40, 40)), r"x.png is not a cut-out: it has no alpha; give"),
        ("x.png", Image.new("RGBA", (40, 40), (9, 9, 9, 255)), r"x.png .* opaque everywhere; give"),
        ("x.png", Image.new("RGBA", (40, 40)), r"x.png .* transparent everywhere; give"),
        ("x.png", draw_shape("bar", (9, 9, 9)).resize((30, 23)), r"x.png shows \d+ x \d pixels; a"),
        ("x.png", b"\x89PNG\r\n\x1a\n", r"x.png cannot be decoded .*; replace or remove this"),
    ],
)
def test_a_bad_cut_out_is_named(folders, tmp_path, file, picture, match):
    for name in ("disc", "ring"):
        (tmp_path / "cutouts" / name).mkdir(parents=True)
        draw_shape(name, COLORS[f"{name}/0.png"]).save(tmp_path / "cutouts" / name / "0.png")
    path = tmp_path / "cutouts/ring" / file
    path.write_bytes(picture) if isinstance(picture, bytes) else picture.save(path)
    with pytest.raises(UserError, match=match):
        main(describe(folders, tmp_path / "out", cutouts=tmp_path / "cutouts", hold_out=0.0))
    assert os.listdir(tmp_path) == ["cutouts"]


def test_a_cut_out_of_scattered_dots_is_named(folders, tmp_path):
    """No pixel of its label would be left in the mask."""
    dots = np.zeros((400, 400, 4), np.uint8)
    dots[::4, ::4] = 255
    (tmp_path / "cutouts/dots").mkdir(parents=True)
    Image.fromarray(dots).save(tmp_path / "cutouts/dots/0.png")
    (tmp_path / "cutouts/disc").mkdir()
    draw_shape("disc", (9, 9, 9)).save(tmp_path / "cutouts/disc/0.png")
    with pytest.raises(UserError, match=r"dots/0.png has 0 opaque pixels in a scene of 160 x 120"):
        main(describe(folders, tmp_path / "out", cutouts=tmp_path / "cutouts", hold_out=0.0))


@pytest.mark.parametrize(
    ("content", "hold_out", "match"),
    [
        (None, 0.0, r"small is not a folder; give"),
        ({}, 0.0, r"small holds 0 photographs"),
        ({"a.png": (90, 90)}, 0.3, r"small holds 1 photographs .*--hold-out needs two"),
        ({"a.png": (90, 9)}, 0.0, r"a.png has 90 x 9 pixels; a background of these scenes needs"),
        ({"a.jpg": b"nothing"}, 0.0, r"a.jpg cannot be decoded .*; replace or remove"),
    ],
)
def test_bad_backgrounds_are_named(folders, tmp_path, content, hold_out, match):
    if content is not None:
        (tmp_path / "small").mkdir()
    for name, picture in (content or {}).items():
        if isinstance(picture, bytes):
            (tmp_path / "small" / name).write_bytes(picture)
        else:
            Image.new("RGB", picture).save(tmp_path / "small" / name)
    with pytest.raises(UserError, match=match):
        main(describe(folders, tmp_path / "out", backgrounds=tmp_path / "small", hold_out=hold_out))
    assert not (tmp_path / "out").exists()


def test_bad_folders_and_numbers_are_refused(folders, scenes, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"photos exists already; remove it or choose another"):
        main(describe(folders, scenes.out))
    with pytest.raises(UserError, match="--cutouts and --backgrounds belong together"):
        main(describe(folders, out, backgrounds=None))
    with pytest.raises(UserError, match=r"--val 2 leaves some of the 3 classes .* at least 3"):
        main(describe(folders, out, val=2))
    # With the packages' cut-outs, before the packages are looked for.
    for split, count, labels in (("train", 59, 60), ("val", 1, 60), ("held_out", 8, 9)):
        wrong = PhotoScenes(out=out, cache=tmp_path / "none", **{split: count})
        with pytest.raises(UserError, match=rf"{count} leaves some of the {labels} classes"):
            main(wrong)
    assert not (tmp_path / "none").exists()
    (tmp_path / "one/disc").mkdir(parents=True)
    draw_shape("disc", (9, 9, 9)).save(tmp_path / "one/disc/0.png")
    with pytest.raises(UserError, match="has one class alone, 'disc'"):
        main(describe(folders, out, cutouts=tmp_path / "one"))
    (tmp_path / "one/ring").mkdir()
    draw_shape("ring", (9, 9, 9)).save(tmp_path / "one/ring/0.png")
    with pytest.raises(UserError, match="has one cut-out of each class, of which --hold-out"):
        main(describe(folders, out, cutouts=tmp_path / "one"))
    monkeypatch.setitem(sys.modules, "skimage", None)
    with pytest.raises(UserError, match=r"scikit-image and scikit-learn .*pip install"):
        main(PhotoScenes(out=out, cache=tmp_path / "cache"))
    assert os.listdir(tmp_path) == ["one"]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--hold-out", "0.2"], "--hold-out has no effect without --cutouts"),
        (["--cutouts", "a", "--backgrounds", "b", "--cache", "c"], "no effect beside --cutouts"),
        (["--cutouts", "a", "--backgrounds", "b", "--held-out", "9"], "effect without --hold-out"),
    ],
)
def test_options_without_effect_are_refused(words, match, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["photo-scenes", "--out", str(tmp_path / "out"), *words])
    with pytest.raises(SystemExit) as stopped:
        make_photo_scenes.command()
    assert stopped.value.code == 2
    assert match in capsys.readouterr().err


# ------------------------------------------------------------------------- packages


@pytest.mark.parametrize("there", [(), ("apt_get",)])
def test_without_debian_the_command_names_folders_of_your_own(there, tmp_path, monkeypatch, capsys):
    write_tools(tmp_path / "bin", **dict.fromkeys(there, ": > x.deb"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    words = "--out", tmp_path / "out", "--cache", tmp_path / "cache"
    monkeypatch.setattr(sys, "argv", ["photo-scenes", *map(str, words)])
    # The stand-in needs no program but the shell's own.
    with pytest.raises(SystemExit) as stopped:
        make_photo_scenes.command()
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    missing = "dpkg" if there else "apt-get"
    assert f"there is no {missing}, a program of Debian" in error
    assert error.strip().endswith("--cutouts FOLDER --backgrounds FOLDER")
    assert not (tmp_path / "out").exists()
    assert os.listdir(tmp_path / "cache") == ["lock"]


def test_the_list_of_the_packages_is_consistent():
    rows = list_cutouts()
    names = [row["file"] for row in rows]
    assert len(names) == len(set(names)) == 75 + 77
    groups = {row["class"]: row["group"] for row in rows if row["class"]}
    assert len(groups) == 60
    # A class has one group, whatever its cut-out.
    assert all(groups[row["class"]] == row["group"] for row in rows if row["class"])
    held = {row["group"] for row in rows if not row["class"]}
    assert held <= set(groups.values())
    # A held-out label and the classes of the small objects have different names.
    assert not held & set(groups)
    found = read_class_map(CLASS_MAP, [], 1000, sorted(groups))
    assert set(found.target.tolist()) == set(range(60))

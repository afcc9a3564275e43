"""Make a folder of photo scenes: cut-outs on photographs, with true masks.

    densefeed photo-scenes --out photos
    densefeed photo-scenes --out mine --cutouts cutouts --backgrounds photographs --hold-out 0.2

It writes `train/<class>/*.jpg`, `val/<class>/*.jpg` and `held-out/<group>/*.jpg`, and for each of
them a mask `masks/<split>/<class>/*.png`, and the boxes of its objects in `boxes.json`. A scene has
one large object, which is the label, and one to three small ones of other classes. Values of a mask
are 0 for the background and n for object n in boxes.json. They judge the labels of classifiers,
which never read them; segment_photos and detect_photos train on them.

Without --cutouts the cut-outs are the stamps of Tux Paint and most backgrounds those of the MATE
desktop: 75 cut-outs of 60 classes, and 77 held-out ones of other animals and things in 9 of their
groups, as birds. In the split `held-out` the label is the group of a held-out cut-out, and the
small objects are of other groups. Debian's packages tuxpaint-stamps-default and mate-backgrounds
are fetched with apt-get, as any user, to --cache; they take 280 MB there. Other backgrounds come
with scikit-image and scikit-learn. `class_map.csv` maps ImageNet's classes to the 60 (densefeed
label --class-map), and `held_out_map.csv` these to the groups (densefeed validate --class-map).
The stamps are under the GPL, version 2, and so are scenes made of them.

--cutouts is a folder of class folders of images with alpha, as PNG. --backgrounds is a folder of
photographs without objects of these classes. All are held in memory, 1.5 MB each by default.
--hold-out 0.2 keeps a fifth of the cut-outs of each class for `held-out`, whose label is the class,
and a fifth of the backgrounds for `val` and `held-out`.
"""

if not __package__:
    import script_start  # noqa: F401

import csv
import io
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from numpy.random import Generator, default_rng
from PIL import Image

from densefeed.storage.class_folders import walk
from densefeed.storage.dataset_names import (
    ENDINGS,
    check_two_classes,
    find_system_entry,
    hold_out,
    natural_key,
)
from densefeed.storage.debian_packages import Package, fetch_package
from densefeed.storage.images import (
    DecodeOptions,
    Images,
    decode,
    explain,
    limit_pixels,
    open_image,
    read_encoded,
)
from densefeed.storage.scenes import (
    BOXES,
    HELD_OUT,
    MASKS,
    SPLITS,
    TRAIN,
    VAL,
    check_counts,
    count_classes,
    cut_window,
    encode_scene,
    list_cutouts,
    load_photographs,
    write_boxes,
)
from densefeed.system.commands import PACKAGE
from densefeed.system.devices import ThreadOptions
from densefeed.system.errors import UserError, make_command
from densefeed.system.files import cache_folder, create_folder, open_regular
from densefeed.system.options import Beside, Bounds, Count, NonNegativeInt, own_first
from densefeed.system.prefetch import ordered_map
from densefeed.system.progress import bar
from densefeed.system.terminal import print

CLASS_MAP = PACKAGE / "recipes/photo_class_map.csv"
# Photographs of the MATE desktop, and of scikit-image and scikit-learn. None shows a class.
MATE = {
    "train": ("Aqua", "Blinds", "Dune", "GreenMeadow", "TwoWings", "Wood"),
    "val": ("RainDrops", "Storm"),
}
SAMPLES = {"train": ("brick", "gravel", "motorcycle_left", "rocket"), "val": ("grass", "china")}
OWN = "give densefeed photo-scenes folders of your own: --cutouts FOLDER --backgrounds FOLDER"

# Area of the label's object, as a share of the scene, and of a small one, as a share of the former.
LARGE, SMALL = (0.12, 0.3), (0.12, 0.35)
# Greatest share of the scene's width and height that an object takes.
MOST_SIDE = 0.96
# A cut-out is enlarged at most so much. The smallest of the packages has 88 pixels.
MOST_SCALE = 2.0
MOST_DEGREES = 20.0
# Least share of its pixels, and least number of them, that is visible of each object.
KEPT, LEAST_VISIBLE = 0.5, 50
# Places that are tried for a small object.
TRIES = 30
# Least side of a cut-out, pixels, and of a background, as a share of the scene's shorter side:
# smaller ones would be a blur.
LEAST_SIDE, LEAST_BACKGROUND = 10, 0.25
# Height of a background's window, as a share of the greatest in its photograph.
WINDOW = (0.4, 1.0)
# Factor of the background's brightness.
BRIGHTNESS = (0.6, 1.1)

LICENSE = "cut-outs of Tux Paint's stamps, under the GNU General Public License, version 2"
STAMPS = Package(
    "tuxpaint-stamps-default",
    "usr/share/tuxpaint/stamps",
    "af3a053a1cc5b03905bbcb8b72d0591aa9eec7b139ebc6d7402de95a6f6bd400",
    OWN,
)
WALLPAPERS = Package(
    "mate-backgrounds",
    "usr/share/backgrounds/mate/nature",
    "49b1fc4785573b70bfd03892c5a2c17d3513bf0074d17ac537ba4859679cb916",
    OWN,
)


@own_first
@dataclass(frozen=True, kw_only=True)
class PhotoScenes(DecodeOptions, ThreadOptions):
    """The scenes to make."""

    out: Path  # folder to make; must not exist yet
    train: Count = 3600  # training scenes, at least one for each class
    val: Count = 1500  # validation scenes, of training cut-outs on other backgrounds
    held_out: NonNegativeInt = 600  # scenes whose label is a held-out cut-out
    width: Annotated[int, Bounds(96, 8192)] = 320  # width of a scene, pixels
    height: Annotated[int, Bounds(96, 8192)] = 240  # height of a scene, pixels
    seed: Annotated[int, Bounds(0, 2**63 - 1)] = 0  # the same seed gives the same bytes
    cutouts: Path | None = None  # folder of class folders of cut-outs; default: the packages'
    backgrounds: Path | None = None  # folder of photographs; give it with --cutouts
    # share of each class's cut-outs, and of the backgrounds, that training does not show
    hold_out: Annotated[float, Bounds(0, 0.9)] = 0.0
    # folder of the packages that are fetched; default: ~/.cache/densefeed/photo-scenes
    cache: Path | None = None

    def unused(self) -> dict[str, str]:
        if self.cutouts is None:
            return {"hold_out": "--cutouts"}
        return {"cache": Beside("--cutouts")} | (
            {} if self.hold_out else {"held_out": "--hold-out"}
        )

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height


class Cutout(NamedTuple):
    """A cut-out, without the transparent margin around it."""

    image: Image.Image  # RGBa: the color is multiplied by alpha
    area: int  # pixels of more than half opacity
    where: str


class Pictures(NamedTuple):
    """What scenes are made of."""

    cutouts: dict[str, list[Cutout]]  # by class
    held_out: dict[str, list[Cutout]]  # by group
    groups: dict[str, str]  # the group of each class
    backgrounds: dict[str, list[Image.Image]]  # by split


class Layer(NamedTuple):
    """An object of a scene."""

    number: int  # from 1, the label's
    name: str  # its class
    pixels: np.ndarray  # float32 [h, w, 4], 0 to 255, color multiplied by alpha
    left: int
    top: int

    @property
    def place(self) -> tuple[slice, slice]:
        """The rows and columns of the scene that it covers."""
        height, width = self.pixels.shape[:2]
        return slice(self.top, self.top + height), slice(self.left, self.left + width)

    @property
    def alpha(self) -> np.ndarray:
        """Float32 `[h, w]`, 0 to 1."""
        return self.pixels[..., 3] / 255

    @property
    def area(self) -> int:
        """The pixels that would be visible without other objects."""
        return int((self.alpha > 0.5).sum())


def main(scenes: PhotoScenes) -> None:
    """Write the folder under a temporary name and rename it when it is complete."""
    if (scenes.cutouts is None) != (scenes.backgrounds is None):
        raise UserError("--cutouts and --backgrounds belong together; give both, or none of them")
    limit_pixels(scenes.max_pixels)
    if scenes.cutouts is None:
        # Before the pictures are read, which takes 9 s.
        count_scenes(scenes, *count_classes())
    with create_folder(scenes.out) as part:
        pictures = read_packages(scenes) if scenes.cutouts is None else read_folders(scenes)
        counts = count_scenes(scenes, len(pictures.cutouts), len(pictures.held_out))
        boxes = {}
        for split, count in counts.items():
            boxes |= write_split(scenes, split, count, pictures, part)
        license = LICENSE if scenes.cutouts is None else ""
        write_boxes(part, scenes.size, scenes.seed, boxes, license)
        if HELD_OUT in counts:
            with open(part / "held_out_map.csv", "w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows(map_held_out(pictures))
        if scenes.cutouts is None:
            (part / "class_map.csv").write_bytes(CLASS_MAP.read_bytes())
    numbers = ", ".join(f"{split} {count:,}" for split, count in counts.items())
    print(
        f"{scenes.out}: scenes of {scenes.width} x {scenes.height} px ({numbers}), their masks in "
        f"{MASKS}/, boxes in {BOXES}"
    )


def map_held_out(pictures: Pictures) -> Iterable[tuple[str, str]]:
    """Return the class map of the held-out scenes: the group of each class, "" if none shows it."""
    groups = pictures.groups.items()
    found = ((name, group if group in pictures.held_out else "") for name, group in groups)
    return [("teacher", "data"), *sorted(found)]


def count_scenes(scenes: PhotoScenes, classes: int, groups: int) -> dict[str, int]:
    """Return the number of scenes of each split. UserError if a class would have none.

    `groups` is the number of classes of the held-out scenes, 0 if no cut-out is held out.
    """
    counts = {TRAIN: scenes.train, VAL: scenes.val}
    if groups and scenes.held_out:
        counts[HELD_OUT] = scenes.held_out
    check_counts(counts, classes, groups)
    return counts


def write_split(
    scenes: PhotoScenes, split: str, count: int, pictures: Pictures, folder: Path
) -> dict[str, list[dict]]:
    """Write images and masks of a split; return the objects of each scene, by its path."""
    held = split == HELD_OUT
    cutouts = pictures.held_out if held else pictures.cutouts
    # The classes that may stand beside a label.
    beside = {
        label: {
            name: found
            for name, found in pictures.cutouts.items()
            if (pictures.groups[name] if held else name) != label
        }
        for label in cutouts
    }
    for label in cutouts:
        (folder / split / label).mkdir(parents=True)
        (folder / MASKS / split / label).mkdir(parents=True)
    labels = list(cutouts)

    def write(number: int) -> tuple[str, list[dict]]:
        # A generator for each scene: it is the same whatever the number of scenes.
        rng = default_rng([scenes.seed, SPLITS.index(split), number])
        turn, place = divmod(number, len(labels))
        label = labels[place]
        cutout = cutouts[label][turn % len(cutouts[label])]
        canvas = draw_background(rng, pictures.backgrounds[split], scenes.size)
        layers = arrange(rng, label, cutout, beside[label], scenes.size)
        mask = find_owners(layers, scenes.size)
        paint(canvas, layers)
        name = f"{split}/{label}/{number:06d}"
        (folder / f"{name}.jpg").write_bytes(encode_scene(canvas))
        Image.fromarray(mask).save(folder / MASKS / f"{name}.png")
        return f"{name}.jpg", list_objects(layers, mask)

    with (
        ThreadPoolExecutor(scenes.threads) as pool,
        closing(ordered_map(write, range(count), pool, 4 * scenes.threads)) as written,
    ):
        return dict(bar(written, f"{split} scenes", count))


# ------------------------------------------------------------------------- one scene


def arrange(
    rng: Generator,
    label: str,
    cutout: Cutout,
    others: dict[str, list[Cutout]],
    size: tuple[int, int],
) -> list[Layer]:
    """Place the label's cut-out and one to three of `others`; return them from bottom to top.

    Of each one at least half, and LEAST_VISIBLE pixels, are visible. One for which no place is
    found is left out. UserError if the label's has too few opaque pixels at this size.
    """
    width, height = size
    pixels = draw_cutout(rng, cutout, rng.uniform(*LARGE) * width * height, size)
    layers = [lay(rng, 1, label, pixels, size)]
    area = layers[0].area
    if area < LEAST_VISIBLE:
        raise UserError(
            f"{cutout.where} has {area} opaque pixels in a scene of {width} x {height}, fewer than "
            f"{LEAST_VISIBLE}; replace it, or give a larger --width and --height"
        )
    names = list(others)
    for choice in rng.permutation(len(names))[: rng.integers(1, 4)]:
        cutouts = others[names[choice]]
        chosen = cutouts[rng.integers(len(cutouts))]
        pixels = draw_cutout(rng, chosen, rng.uniform(*SMALL) * area, size)
        for _ in range(TRIES):
            layer = lay(rng, len(layers) + 1, names[choice], pixels, size)
            depth = rng.integers(len(layers) + 1)
            tried = [*layers[:depth], layer, *layers[depth:]]
            visible = np.bincount(find_owners(tried, size).ravel(), minlength=len(tried) + 1)
            if all(visible[o.number] >= max(LEAST_VISIBLE, KEPT * o.area) for o in tried):
                layers = tried
                break
    return layers


def lay(rng: Generator, number: int, name: str, pixels: np.ndarray, size: tuple[int, int]) -> Layer:
    """Return a layer at a random place of a scene."""
    height, width = pixels.shape[:2]
    left, top = rng.integers(0, (size[0] - width + 1, size[1] - height + 1)).tolist()
    return Layer(number, name, pixels, left, top)


def draw_cutout(rng: Generator, cutout: Cutout, area: float, size: tuple[int, int]) -> np.ndarray:
    """Scale a cut-out to an area in pixels, flip and rotate it; float32 `[h, w, 4]` as in Layer.

    It is smaller where it would not fit into a scene, or be enlarged too much.
    """
    image = cutout.image
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    degrees = rng.uniform(-MOST_DEGREES, MOST_DEGREES)
    cosine, sine = np.cos(np.radians(degrees)), abs(np.sin(np.radians(degrees)))
    width, height = image.size
    scale = min(
        np.sqrt(area / cutout.area),
        MOST_SCALE,
        MOST_SIDE * size[0] / (cosine * width + sine * height),
        MOST_SIDE * size[1] / (sine * width + cosine * height),
    )
    # Rotated at twice the size: rotation has no antialiasing, and the last step averages 2 x 2
    # pixels. Colors stay multiplied by alpha, so transparent pixels add no color.
    sides = [max(1, round(2 * scale * side)) for side in image.size]
    double = image.resize(sides, Image.Resampling.BILINEAR)
    # Rotation interpolates up to the edge of an image, but not beyond it: the edge is transparent.
    double = double.crop((-2, -2, sides[0] + 2, sides[1] + 2))
    double = double.rotate(degrees, Image.Resampling.BILINEAR, expand=True)
    drawn = double.reduce(2)
    return np.asarray(drawn.crop(drawn.getbbox()), np.float32)


def draw_background(
    rng: Generator, photographs: Sequence[Image.Image], size: tuple[int, int]
) -> np.ndarray:
    """Return a random window of a photograph, flipped at random; float32 `[height, width, 3]`."""
    window = cut_window(rng, photographs, size, WINDOW)
    if rng.random() < 0.5:
        window = window[:, ::-1]
    return np.minimum(window * np.float32(rng.uniform(*BRIGHTNESS)), 255)


def paint(canvas: np.ndarray, layers: Iterable[Layer]) -> None:
    """Paint layers, from bottom to top, on a canvas `[height, width, 3]` (alpha over)."""
    for layer in layers:
        patch = canvas[layer.place]
        patch *= 1 - layer.alpha[..., None]
        patch += layer.pixels[..., :3]


def find_owners(layers: Iterable[Layer], size: tuple[int, int]) -> np.ndarray:
    """Return for each pixel the number of the object that contributes most to its color.

    uint8 `[height, width]`, 0 for the background; a tie has the lower number. Contributions are the
    weights that colors have in the result of `paint`. `layers` are from bottom to top.
    """
    layers = list(layers)
    share_NHW = np.zeros((len(layers) + 1, size[1], size[0]), np.float32)
    share_NHW[0] = 1
    for layer in layers:
        share_NHW[:, *layer.place] *= 1 - layer.alpha
        share_NHW[layer.number, *layer.place] = layer.alpha
    owner_HW, most_HW = np.zeros(share_NHW.shape[1:], np.uint8), share_NHW[0]
    # Not argmax over the short first axis, with which all of this takes three times as long.
    for layer in sorted(layers, key=lambda layer: layer.number):
        share_hw = share_NHW[layer.number][layer.place]
        owner_HW[layer.place][share_hw > most_HW[layer.place]] = layer.number
        np.maximum(most_HW[layer.place], share_hw, out=most_HW[layer.place])
    return owner_HW


def list_objects(layers: Iterable[Layer], mask: np.ndarray) -> list[dict]:
    """Return class of each object, and the box around its pixels in the mask, by number."""
    found = []
    for layer in sorted(layers, key=lambda layer: layer.number):
        rows, columns = np.nonzero(mask == layer.number)
        corners = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
        found.append({"class": layer.name, "box": list(map(int, corners))})
    return found


# ------------------------------------------------------------------------- pictures


def read_packages(scenes: PhotoScenes) -> Pictures:
    """Read the cut-outs of the list and their backgrounds; fetch the packages if necessary."""
    rows = list_cutouts()
    samples = {split: load_photographs(names) for split, names in SAMPLES.items()}
    cache = scenes.cache or cache_folder() / "photo-scenes"
    stamps = fetch_package(STAMPS, [row["file"] for row in rows], cache)
    names = [f"{name}.jpg" for split in MATE.values() for name in split]
    wallpapers = fetch_package(WALLPAPERS, names, cache)
    pictures = Pictures({}, {}, {row["class"]: row["group"] for row in rows if row["class"]}, {})
    for row in bar(rows, "read cut-outs"):
        by = pictures.cutouts if row["class"] else pictures.held_out
        path = stamps / row["file"]
        cutout = read_cutout(read_file(path), str(path), scenes.size)
        by.setdefault(row["class"] or row["group"], []).append(cutout)
    for split, names in MATE.items():
        paths = [wallpapers / f"{name}.jpg" for name in names]
        own = [read_background(path, scenes.size) for path in paths]
        pictures.backgrounds[split] = own + samples[split]
    pictures.backgrounds[HELD_OUT] = pictures.backgrounds[VAL]
    return pictures


def read_folders(scenes: PhotoScenes) -> Pictures:
    """Read cut-outs and backgrounds of the user's folders, and choose which are held out."""
    images = Images(scenes.cutouts)
    names = images.class_names
    check_two_classes(scenes.cutouts, names)
    pictures = Pictures({name: [] for name in names}, {}, {name: name for name in names}, {})
    held_N = choose_held_out(scenes, images.paths, images.labels)
    if scenes.hold_out and not held_N.any():
        raise UserError(
            f"{scenes.cutouts} has one cut-out of each class, of which --hold-out holds out none; "
            "add cut-outs, or leave out --hold-out"
        )
    for n in bar(range(len(images)), "read cut-outs"):
        by = pictures.held_out if held_N[n] else pictures.cutouts
        cutout = read_cutout(images.read(n), images.where(n), scenes.size)
        by.setdefault(names[images.labels[n]], []).append(cutout)
    if not scenes.backgrounds.is_dir():
        raise UserError(f"{scenes.backgrounds} is not a folder; give a folder of photographs")
    files = sorted(
        (
            str(Path(folder, name))
            for folder, names in walk(scenes.backgrounds)
            for name in names
            if os.path.splitext(name)[1].lower() in ENDINGS and not find_system_entry(name)
        ),
        key=lambda name: (natural_key(name), name),
    )
    held_N = choose_held_out(scenes, files, np.zeros(len(files), np.int64))
    if len(files) < 1 + bool(scenes.hold_out):
        raise UserError(
            f"{scenes.backgrounds} holds {len(files)} photographs with the endings "
            f"{' '.join(ENDINGS)}; add some (--hold-out needs two or more)"
        )
    found = [
        read_background(scenes.backgrounds / name, scenes.size)
        for name in bar(files, "read backgrounds")
    ]
    train = [one for one, held in zip(found, held_N, strict=True) if not held]
    val = [one for one, held in zip(found, held_N, strict=True) if held]
    pictures.backgrounds.update({TRAIN: train, VAL: val or train, HELD_OUT: val or train})
    return pictures


def choose_held_out(scenes: PhotoScenes, paths: Sequence[str], labels: np.ndarray) -> np.ndarray:
    """Return which of N pictures are held out, bool `[N]`."""
    if not scenes.hold_out or not len(paths):
        return np.zeros(len(paths), bool)
    return hold_out(paths, labels, scenes.hold_out, scenes.seed)


def read_file(path: Path) -> bytes:
    """Return the bytes of an image's file."""
    with open_regular(path) as file:
        return read_encoded(file, str(path))


def read_cutout(encoded: bytes, where: str, size: tuple[int, int]) -> Cutout:
    """Decode a cut-out for scenes of a `size`.

    UserError that names `where` if it is damaged, too small, or nowhere or everywhere opaque.
    """
    try:
        image = open_image(io.BytesIO(encoded))
        has_alpha = image.has_transparency_data
        image = image.convert("RGBA")
    except MemoryError:
        raise
    # Pillow does not limit the types of its exceptions.
    except Exception as error:
        raise UserError(
            f"{where} cannot be decoded ({explain(error)}); replace or remove this file"
        ) from error
    opaque_HW = np.asarray(image.getchannel("A")) > 127
    if not has_alpha or opaque_HW.all() or not opaque_HW.any():
        state = "transparent everywhere" if not opaque_HW.any() else "opaque everywhere"
        raise UserError(
            f"{where} is not a cut-out: it {f'is {state}' if has_alpha else 'has no alpha'}; give "
            "an image whose background is transparent"
        )
    image = image.crop(image.getchannel("A").getbbox())
    if min(image.size) < LEAST_SIDE:
        raise UserError(
            f"{where} shows {image.width} x {image.height} pixels; a cut-out needs {LEAST_SIDE} in "
            "both directions: replace or remove this file"
        )
    image = reduce_to(image.convert("RGBa"), (2 * size[0], 2 * size[1]))
    area = (np.asarray(image.getchannel("a")) > 127).sum()
    return Cutout(image, max(1, int(area)), where)


def read_background(path: Path, size: tuple[int, int]) -> Image.Image:
    """Read a photograph for scenes of a `size`, RGB. UserError if it is damaged or too small."""
    image = decode(read_file(path), str(path))
    least = round(min(size) * LEAST_BACKGROUND)
    if min(image.size) < least:
        raise UserError(
            f"{path} has {image.width} x {image.height} pixels; a background of these scenes needs "
            f"{least} in both directions: replace or remove this file"
        )
    # The smallest window still has as many pixels as a scene.
    return reduce_to(image, (size[0] / WINDOW[0], size[1] / WINDOW[0]))


def reduce_to(image: Image.Image, size: tuple[float, float]) -> Image.Image:
    """Shrink an image by a whole factor, antialiased, such that it still covers `size`."""
    factor = int(min(image.width / size[0], image.height / size[1]))
    return image.reduce(factor) if factor > 1 else image


command = make_command(main, PhotoScenes, __doc__)


if __name__ == "__main__":
    command()
